// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Exports that end and come back under their clients, and the events about them.

use super::faults::{Client, arm, disarm, start};
use super::process::{COWSHED, Monitor, text};
use super::upgrade::Writer;
use cowshed_testkit::programs::{run_to_code, tool};
use cowshed_testkit::qemu::temp_dir;
use cowshed_testkit::vhost::{FRONT_END, FrontEnd, GUEST, MEMORY_BYTES};
use cowshed_testkit::waiting::await_that;
use serde_json::{Value, json};
use std::fs::File;
use std::path::Path;
use std::time::Duration;

const WRITE: u32 = 1;
/// Chains of the vhost-user guest, each with a place of its own.
const CHAINS: u16 = 8;

fn remove(monitor: &mut Monitor, id: &str) {
    monitor.command("block-export-del", json!({"id": id, "mode": "hard"}));
}

fn add(monitor: &mut Monitor, id: &str, kind: &str, more: Value) {
    let mut export = json!({"type": kind, "id": id, "node-name": "f"});
    export.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    monitor.command("block-export-add", export);
}

fn add_vhost(monitor: &mut Monitor, folder: &Path) {
    let address = json!({"type": "unix", "path": folder.join("v.sock")});
    add(monitor, "v", "vhost-user-blk", json!({"addr": address, "writable": true}));
}

/// A device disappears and comes back. Its clients reconnect, and each of their requests ends once.
#[test]
fn clients_go_on_when_their_exports_come_back() {
    let folder = temp_dir();
    let folder = folder.path();
    let (daemon, mut monitor) = start(folder, "");
    let mut writer = Writer::start(folder, "f");
    writer.write();
    // QEMU's client waits for an export that it has had once, not for its first one.
    await_that("the client's first write", || std::fs::read(folder.join("d.raw")).expect("the disk")[8 << 20] == 1);
    let heads: Vec<u16> = (0..CHAINS).map(|chain| chain * 3).collect();
    let mut notes = None;
    let mut driver = FrontEnd::resume(&folder.join("v.sock"), None, &mut notes);
    for round in 1..=4u8 {
        // Requests are under way for a while.
        arm(&mut monitor, json!({"op": "write", "action": "delay", "delay-ms": 5}));
        (0..40).for_each(|_| writer.write());
        for &head in &heads {
            driver.prepare(0, head, WRITE, u64::from(head) * 8, &[round; 4096], 0);
            driver.offer(0, head);
        }
        driver.kick(0);
        ["n", "v"].iter().for_each(|id| remove(&mut monitor, id));
        assert!(driver.is_closed() && !folder.join("v.sock").exists());
        disarm(&mut monitor);
        add(&mut monitor, "n", "nbd", json!({"name": "f", "writable": true}));
        add_vhost(&mut monitor, folder);
        driver = FrontEnd::resume(&folder.join("v.sock"), Some(driver.guest.clone()), &mut notes);
        let mut ended: Vec<u16> = heads.iter().map(|_| driver.wait_used(0).0).collect();
        ended.sort_unstable();
        assert_eq!(ended, heads, "round {round}: each ends once");
        assert!(heads.iter().all(|head| driver.status(*head) == 0) && driver.used(0) == driver.guest.seen[0]);
    }
    let (written, said) = writer.end();
    assert_eq!(said.matches("wrote 8192/8192").count() as u64, written, "{said}");
    drop(driver);
    daemon.stop();
    let disk = std::fs::read(folder.join("d.raw")).expect("the disk");
    for head in heads {
        assert!(disk[usize::from(head) * 4096..][..4096] == [4; 4096], "place {head}");
    }
    for number in 0..written {
        let place = (8 << 20) + number as usize % 512 * 8192;
        assert!(disk[place..][..8192] == [1 + (number % 250) as u8; 8192], "write {number}");
    }
}

#[test]
fn an_export_is_removed_while_its_front_end_leaves() {
    let folder = temp_dir();
    let folder = folder.path();
    let (daemon, mut monitor) = start(folder, "");
    for round in 0..20u64 {
        let mut driver = FrontEnd::resume(&folder.join("v.sock"), None, &mut None);
        for head in (0..48).step_by(3) {
            driver.prepare(0, head, WRITE, u64::from(head), &[1; 512], 0);
            driver.offer(0, head);
        }
        driver.kick(0);
        let leaves = std::thread::spawn(move || {
            // Each round leaves at another moment of the removal.
            std::thread::sleep(Duration::from_micros(round * 50));
            drop(driver);
        });
        remove(&mut monitor, "v");
        leaves.join().expect("it has left");
        add_vhost(&mut monitor, folder);
    }
    let [_, vhost, _] = Client::all(folder);
    vhost.works(&["write -P 9 0 64k", "read -P 9 0 64k"]);
    daemon.stop();
}

#[test]
fn each_type_tells_that_an_export_is_gone() {
    let folder = temp_dir();
    let folder = folder.path();
    let (daemon, mut monitor) = start(folder, "");
    let mut listener = Monitor::connect(&folder.join("o.sock"));
    add(&mut monitor, "h", "http", json!({"addr": {"type": "unix", "path": folder.join("h.sock")}}));
    for id in ["n", "v", "m", "h"] {
        remove(&mut monitor, id);
        assert_eq!(listener.event("BLOCK_EXPORT_DELETED"), json!({"id": id}));
    }
    // A file that is unmounted by hand takes its export along.
    add(&mut monitor, "again", "fuse", json!({"mountpoint": folder.join("m")}));
    tool(COWSHED, &["umount", text(&folder.join("m"))]);
    assert_eq!(listener.event("BLOCK_EXPORT_DELETED"), json!({"id": "again"}));
    daemon.stop();
}

#[test]
fn errors_of_the_disk_are_events_of_each_type() {
    let folder = temp_dir();
    let folder = folder.path();
    let (daemon, mut monitor) = start(folder, "");
    let mut listener = Monitor::connect(&folder.join("o.sock"));
    add(&mut monitor, "h", "http", json!({"path": "/f", "addr": {"type": "unix", "path": folder.join("h.sock")}}));
    // Events of one export come once a second, so more than one may be of an earlier client.
    let mut failed = |id: &str| loop {
        let failed = listener.event("BLOCK_IO_ERROR");
        if failed["device"] == id {
            break failed;
        }
    };
    arm(&mut monitor, json!({"op": "read", "errno": 28}));
    for (client, id) in Client::all(folder).iter().zip(["n", "v", "m"]) {
        client.fails("read 0 4k", "read failed");
        let failed = failed(id);
        assert_eq!((&failed["operation"], &failed["nospace"]), (&json!("read"), &json!(true)), "{failed}");
        assert_eq!(failed["node-name"], "f");
    }
    let socket = text(&folder.join("h.sock")).to_owned();
    let arguments = ["-sSf", "--unix-socket", &socket, "-r", "0-99", "http://localhost/f"];
    run_to_code("curl", &arguments, &[22]);
    assert_eq!(failed("h")["operation"], "read");
    disarm(&mut monitor);
    daemon.stop();
}

/// A page that a front end takes away is a fault of the guest: docs/vhost-user-blk.md.
#[test]
fn lost_guest_memory_is_no_event_of_the_disk() {
    const GONE: u64 = MEMORY_BYTES + (1 << 20);
    let folder = temp_dir();
    let folder = folder.path();
    let (daemon, mut monitor) = start(folder, "");
    let mut listener = Monitor::connect(&folder.join("o.sock"));
    let mut driver = FrontEnd::resume(&folder.join("v.sock"), None, &mut None);
    let more = rustix::fs::memfd_create("more", rustix::fs::MemfdFlags::CLOEXEC).expect("memory");
    rustix::fs::ftruncate(&more, MEMORY_BYTES).expect("memory");
    let mut region = driver.region();
    (region.guest_address, region.front_end_address) = (GUEST + MEMORY_BYTES, FRONT_END + MEMORY_BYTES);
    // VHOST_USER_ADD_MEM_REG.
    assert!(driver.send_acked(37, &[&[0; 8][..], &region.encode()].concat(), Some(&more)));
    rustix::fs::ftruncate(&more, 4096).expect("less memory");
    driver.prepare(0, 0, WRITE, 0, &[], 0);
    driver.describe(FrontEnd::place(0), 0, (FrontEnd::data(0) - 0x100, 16, 1, 1));
    driver.describe(FrontEnd::place(0), 1, (GONE, 4096, 1, 2));
    driver.offer(0, 0);
    driver.kick(0);
    driver.wait_used(0);
    assert_eq!(driver.status(0), 1);
    assert_eq!(driver.request(0, 0, &[], 4096), (0, vec![3; 4096]), "the disk has not changed");
    // The first event is that of the next fault of the disk.
    arm(&mut monitor, json!({"op": "read", "errno": 5, "times": 1}));
    assert_eq!(driver.request(0, 0, &[], 4096).0, 1);
    assert_eq!(listener.event("BLOCK_IO_ERROR")["operation"], "read");
    drop(driver);
    daemon.stop();
}

#[test]
fn a_listening_socket_is_handed_over_by_its_number() {
    let folder = temp_dir();
    let folder = folder.path();
    File::create(folder.join("d.raw")).and_then(|file| file.set_len(1 << 20)).expect("an image");
    let listener = std::os::unix::net::UnixListener::bind(folder.join("v.sock")).expect("a socket");
    let mut command = std::process::Command::new(COWSHED);
    command.args(["qemu-storage-daemon", "--blockdev", "file,node-name=d,filename=d.raw", "--export"]);
    command.arg("vhost-user-blk,id=e,node-name=d,addr.type=fd,addr.str=0,writable=on");
    command.stdin(std::os::fd::OwnedFd::from(listener));
    let daemon = super::process::Serving::start_command(folder, command);
    // The socket listens from its beginning on, so nothing is to be waited for.
    let mut driver = FrontEnd::resume(&folder.join("v.sock"), None, &mut None);
    assert_eq!(driver.request(WRITE, 8, &[7; 4096], 0).0, 0);
    assert_eq!(driver.request(0, 8, &[], 4096), (0, vec![7; 4096]));
    drop(driver);
    daemon.stop();
    assert_eq!(std::fs::read(folder.join("d.raw")).expect("the disk")[4096..8192], [7; 4096]);
}
