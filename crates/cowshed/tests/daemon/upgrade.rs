// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `serve --takeover`: daemons that come one after the other under guests, as docs/upgrade.md has it.

use super::process::{COWSHED, Killed, Serving, text};
use cowshed_testkit::programs::{run_to_code, tool};
use cowshed_testkit::qemu::temp_dir;
use cowshed_testkit::vhost::FrontEnd;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};

/// Chains of the vhost-user guest, each with a place of its own.
const CHAINS: u16 = 8;

fn serve(folder: &Path) -> Serving {
    let mut arguments = vec!["serve", "--takeover", "--pidfile", "pid", "-k", "n.sock", "--monitor", "m.sock"];
    arguments.extend(["--drive", "file=d.qcow2,id=disk"]);
    arguments.extend(["--export", "vhost-user-blk,id=v,node-name=disk,addr.type=unix,addr.path=v.sock,writable=on"]);
    let mut daemon = Serving::start(folder, &arguments);
    while !daemon.line().starts_with("QMP") {}
    daemon
}

/// An NBD client that writes one place after the other.
pub(super) struct Writer {
    client: Killed,
    written: u64,
}

impl Writer {
    /// Of an export of the server at `n.sock`.
    pub(super) fn start(folder: &Path, export: &str) -> Writer {
        let socket = text(&folder.join("n.sock")).to_owned();
        let options = format!("driver=nbd,server.type=unix,server.path={socket},export={export},reconnect-delay=60");
        let mut client = Command::new("qemu-io");
        client.args(["--image-opts", &options]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        Writer { client: Killed(client.spawn().expect("qemu-io runs")), written: 0 }
    }

    /// One more write, which the client carries out in its own time.
    pub(super) fn write(&mut self) {
        let number = self.written;
        self.written += 1;
        let place = (8 << 20) + number % 512 * 8192;
        let command = format!("write -P {} {place} 8k\n", 1 + number % 250);
        let input = self.client.0.stdin.as_mut().expect("a pipe");
        input.write_all(command.as_bytes()).expect("the client reads");
    }

    /// Waits for all of them: their number, and the text of the client.
    pub(super) fn end(mut self) -> (u64, String) {
        drop(self.client.0.stdin.take());
        let mut said = String::new();
        self.client.0.stdout.take().expect("a pipe").read_to_string(&mut said).expect("text");
        assert!(self.client.0.wait().expect("it ends").success(), "{said}");
        (self.written, said)
    }
}

#[test]
fn daemons_take_over_from_one_another_under_guests() {
    let folder = temp_dir();
    let folder = folder.path();
    tool("qemu-img", &["create", "-q", "-f", "qcow2", text(&folder.join("d.qcow2")), "16M"]);
    let mut before: Option<Serving> = None;
    let (mut guest, mut front_end, mut notes, mut writer): (_, Option<FrontEnd>, _, Option<Writer>) =
        (None, None, None, None);
    let mut known = [0u8; CHAINS as usize];
    let mut value = 0u8;
    let mut in_flight = 0;
    for life in 0..5 {
        let mut daemon = serve(folder);
        if let Some(old) = before.take() {
            let log = old.log();
            assert!(old.wait().success(), "it has ended in order: {log}");
            drop(front_end.take());
        }
        let writer = writer.get_or_insert_with(|| Writer::start(folder, ""));
        let mut driver = FrontEnd::resume(&folder.join("v.sock"), guest.take(), &mut notes);
        for round in 0..20 {
            while in_flight > 0 {
                let (head, _) = driver.wait_used(0);
                assert_eq!(driver.status(head), 0, "life {life}, round {round}");
                in_flight -= 1;
            }
            // Writes before the end of a daemon are durable: no flush reports lost changes.
            assert_eq!(driver.request(4, 0, &[], 0).0, 0, "life {life}, round {round}");
            for chain in 0..CHAINS {
                value = value.checked_add(1).unwrap_or(1);
                known[usize::from(chain)] = value;
                driver.prepare(0, chain * 3, 1, u64::from(chain) * 256, &[value; 4096], 0);
                driver.offer(0, chain * 3);
                in_flight += 1;
            }
            driver.kick(0);
        }
        // The next one begins while these are under way. In every second life the front end stays until it is sent away.
        (0..300).for_each(|_| writer.write());
        assert!(daemon.child().try_wait().expect("a child").is_none(), "{}", daemon.log());
        guest = Some(driver.guest.clone());
        front_end = (life % 2 == 0).then_some(driver);
        before = Some(daemon);
    }
    let last = before.take().expect("a daemon");
    let (written, said) = writer.take().expect("a client").end();
    assert_eq!(said.matches("wrote 8192/8192").count() as u64, written, "{said}");
    last.stop();
    assert!(!folder.join("pid").exists(), "the pid file goes with its daemon");
    let image = text(&folder.join("d.qcow2")).to_owned();
    for number in written.saturating_sub(100)..written {
        let place = (8 << 20) + number % 512 * 8192;
        let read = format!("read -P {} {place} 8k", 1 + number % 250);
        let said = tool("qemu-io", &["-c", &read, &image]);
        assert!(!said.contains("failed"), "{said}");
    }
    let mut again = serve(folder);
    let mut driver = FrontEnd::resume(&folder.join("v.sock"), guest.take(), &mut notes);
    while in_flight > 0 {
        driver.wait_used(0);
        in_flight -= 1;
    }
    for (chain, known) in known.iter().enumerate() {
        let (status, bytes) = driver.request(0, chain as u64 * 256, &[], 4096);
        assert!(status == 0 && bytes == [*known; 4096], "place {chain}");
    }
    assert!(again.child().try_wait().expect("a child").is_none());
    again.stop();
    tool("qemu-img", &["check", "-q", &image]);
}

#[test]
fn what_can_not_be_taken_over_is_said() {
    let folder = temp_dir();
    let at = |name: &str| text(&folder.path().join(name)).to_owned();
    tool("qemu-img", &["create", "-q", "-f", "qcow2", &at("d.qcow2"), "1M"]);
    let said = run_to_code(COWSHED, &["serve", "--takeover", &at("d.qcow2")], &[1, 2]);
    assert!(said.contains("--pidfile"), "{said}");
    // A lock of a process whose number is not in the file.
    std::fs::write(at("pid"), "nobody\n").expect("a file");
    let held = std::fs::File::open(at("pid")).expect("the file");
    held.lock().expect("a lock");
    let said =
        run_to_code(COWSHED, &["serve", "--takeover", "--pidfile", &at("pid"), "-k", &at("n"), &at("d.qcow2")], &[1]);
    assert!(said.contains("could not take over: it holds no number of a process"), "{said}");
}
