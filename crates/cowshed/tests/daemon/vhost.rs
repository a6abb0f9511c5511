// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The export `vhost-user-blk`: QEMU's own client (by libblkio), and a front end whose back end is killed.

use super::process::{Killed, Monitor, Serving, text};
use cowshed_testkit::programs::{run_to_code, tool};
use cowshed_testkit::qemu::{peers_dir, temp_dir};
use cowshed_testkit::random::{Random, seeds};
use cowshed_testkit::vhost::{FrontEnd, Guest, request};
use cowshed_testkit::waiting::await_that;
use serde_json::json;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

const DISK_BYTES: u64 = 16 << 20;

/// A storage daemon with one export, and its monitor.
fn start(folder: &Path, image: &str, more: &str) -> (Serving, Monitor) {
    let mut command = Command::new(super::process::COWSHED);
    command.arg0("qemu-storage-daemon").args(["--chardev", "socket,path=m.sock,server=on,wait=off,id=m"]);
    command.args(["--monitor", "chardev=m", "--blockdev", image]);
    command.args(["--export", &format!("vhost-user-blk,id=e,node-name=d,addr.type=unix,addr.path=v.sock{more}")]);
    // The socket of an earlier daemon, which was killed. The export's own is left where it is.
    let monitor = folder.join("m.sock");
    assert!(std::fs::remove_file(&monitor).is_ok() || !monitor.exists());
    let mut daemon = Serving::start_command(folder, command);
    // The name of the socket is there a moment before it listens.
    await_that("the daemon listens", || {
        assert!(daemon.child().try_wait().expect("a child").is_none(), "the daemon has ended: {}", daemon.log());
        std::os::unix::net::UnixStream::connect(&monitor).is_ok()
    });
    let mut monitor = Monitor::connect(&monitor);
    // The answer comes when the command line is carried out.
    let exports = monitor.command("query-block-exports", json!({}));
    assert_eq!(exports.as_array().map(Vec::len), Some(1), "{}", daemon.log());
    (daemon, monitor)
}

fn peer(name: &str) -> String {
    text(&peers_dir().join(name)).to_owned()
}

const OPTIONS: &str = "driver=virtio-blk-vhost-user,path=v.sock,cache.direct=on";

/// Commands of `qemu-io` through the export.
fn qemu_io(folder: &Path, commands: &[&str], codes: &[i32]) -> String {
    let options = OPTIONS.replace("v.sock", text(&folder.join("v.sock")));
    let mut arguments = vec!["--image-opts", &options];
    commands.iter().for_each(|command| arguments.extend(["-c", command]));
    run_to_code(&peer("qemu-io-vhost"), &arguments, codes)
}

#[test]
fn qemus_client_reads_writes_zeroes_discards_and_flushes() {
    let folder = temp_dir();
    let folder = folder.path();
    tool("qemu-img", &["create", "-q", "-f", "qcow2", text(&folder.join("d.qcow2")), "16M"]);
    let image = "qcow2,node-name=d,discard=unmap,file.driver=file,file.filename=d.qcow2";
    let (daemon, mut monitor) = start(folder, image, ",writable=on,num-queues=2");
    let commands = [
        "write -P 5 0 64k",
        "write -z 16k 8k",
        "write -P 6 1M 3M",
        "discard 2M 64k",
        "flush",
        "read -P 5 0 16k",
        "read -P 0 16k 8k",
        "read -P 6 1M 1M",
        "read -P 0 2M 64k",
        "write -P 7 4000k 1",
        "length",
    ];
    let said = qemu_io(folder, &commands, &[0]);
    assert!(!said.contains("fail") && said.contains("\n16 MiB"), "{said}");
    let exports = monitor.command("query-block-exports", json!({}));
    assert_eq!(exports, json!([{"id": "e", "type": "vhost-user-blk", "node-name": "d", "shutting-down": false}]));
    let stats = monitor.command("query-blockstats", json!({}));
    assert!(stats[0]["stats"]["wr_operations"].as_u64().is_some_and(|writes| writes > 0), "{stats}");
    let (options, copy) = (OPTIONS.replace("v.sock", text(&folder.join("v.sock"))), folder.join("copy.raw"));
    tool(peer("qemu-img-vhost"), &["convert", "--image-opts", &options, "-O", "raw", text(&copy)]);
    daemon.stop();
    assert!(!folder.join("v.sock").exists(), "the socket is left behind");
    tool("qemu-img", &["compare", text(&folder.join("d.qcow2")), text(&copy)]);
    tool("qemu-img", &["check", "-q", text(&folder.join("d.qcow2"))]);
}

#[test]
fn a_read_only_export_is_read_only_for_qemus_client() {
    let folder = temp_dir();
    let folder = folder.path();
    std::fs::write(folder.join("d.raw"), vec![3; 1 << 20]).expect("an image");
    let (daemon, _monitor) = start(folder, "file,node-name=d,filename=d.raw", "");
    let said = qemu_io(folder, &["read -P 3 0 1M"], &[1]);
    assert!(said.contains("read-only"), "{said}");
    let options = OPTIONS.replace("v.sock", text(&folder.join("v.sock")));
    tool(peer("qemu-io-vhost"), &["-r", "--image-opts", &options, "-c", "read -P 3 0 1M"]);
    daemon.stop();
}

#[test]
fn exports_come_and_go_by_the_monitor() {
    let folder = temp_dir();
    let folder = folder.path();
    std::fs::File::create(folder.join("d.raw")).and_then(|file| file.set_len(DISK_BYTES)).expect("an image");
    let (daemon, mut monitor) = start(folder, "file,node-name=d,filename=d.raw", ",writable=on");
    let front_end = FrontEnd::connect(&folder.join("v.sock"));
    assert_eq!(front_end.config(0, 8), (DISK_BYTES / 512).to_le_bytes());
    let refused = monitor.refusal("block-export-del", &json!({"id": "e"}));
    assert_eq!(refused, "export 'e' still in use");
    monitor.command("block-export-del", json!({"id": "e", "mode": "hard"}));
    assert!(front_end.is_closed() && !folder.join("v.sock").exists());
    let add = |path: &str| json!({"type": "vhost-user-blk", "id": "f", "node-name": "d", "addr": {"type": "unix", "path": path}});
    let long = "x".repeat(200);
    let words = monitor.refusal("block-export-add", &add(&long));
    assert!(words.starts_with(&format!("UNIX socket path '{long}' is too long")), "{words}");
    let words = monitor.refusal("block-export-add", &add("/nonexistent/v.sock"));
    assert_eq!(words, "Failed to bind socket to /nonexistent/v.sock: No such file or directory");
    assert_eq!(monitor.command("query-block-exports", json!({})), json!([]), "nothing is left behind");
    let words = monitor.refusal("block-export-add", &add(text(&folder.join("m.sock"))));
    let reason =
        format!("Failed to bind socket to {}: another process listens on this socket", text(&folder.join("m.sock")));
    assert!(words == reason && folder.join("m.sock").exists(), "{words}");
    monitor.command("block-export-add", add(text(&folder.join("w.sock"))));
    assert_eq!(FrontEnd::connect(&folder.join("w.sock")).config(0, 8), (DISK_BYTES / 512).to_le_bytes());
    daemon.stop();
}

/// The daemon's only line, without its name, for an export that can't be.
fn refused_export(folder: &Path, options: &str, input: Stdio) -> String {
    let mut command = Command::new(super::process::COWSHED);
    command.arg0("qemu-storage-daemon").args(["--blockdev", "file,node-name=d,filename=d.raw"]);
    command.args(["--export", &format!("vhost-user-blk,id=e,node-name=d,{options}")]);
    let ended = command.current_dir(folder).stdin(input).output().expect("our own binary runs");
    let said = String::from_utf8(ended.stderr).expect("text");
    assert_eq!((ended.status.code(), said.lines().count()), (Some(1), 1), "{options}: {said}");
    said.trim_end().to_owned()
}

#[test]
fn exports_that_cannot_be_say_why_in_one_line() {
    let folder = temp_dir();
    let folder = folder.path();
    std::fs::File::create(folder.join("d.raw")).and_then(|file| file.set_len(DISK_BYTES)).expect("an image");
    for (options, words) in [
        ("addr.type=unix,addr.path=v.sock,num-queues=0", "num-queues must be greater than 0"),
        ("addr.type=unix,addr.path=v.sock,num-queues=65", "num-queues is 65, and an export has at most 64"),
        ("addr.type=unix,addr.path=v.sock,num-queues=65536", "Parameter 'num-queues' expects uint16_t"),
        ("addr.type=unix,addr.path=v.sock,logical-block-size=100", "logical-block-size"),
        // Of the command line alone it takes suffixes, as QEMU's does.
        ("addr.type=unix,addr.path=none/v.sock,logical-block-size=4k", "No such file or directory"),
        ("addr.type=unix,addr.path=v.sock,logical-block-size=1.5k", "must be a power of 2 between 512 and 2097152"),
        ("addr.type=unix,addr.path=v.sock,logical-block-size=4q", "Parameter 'logical-block-size' expects size"),
        // 0 is the default.
        ("addr.type=unix,addr.path=none/v.sock,logical-block-size=0", "No such file or directory"),
        ("addr.type=unix,addr.path=none/v.sock", "Failed to bind socket to none/v.sock: No such file or directory"),
        ("addr.type=inet,addr.host=localhost,addr.port=0", "Only socket address types 'unix' and 'fd' are supported"),
        ("addr.type=fd,addr.str=99", "File descriptor '99' is not a socket"),
        ("addr.type=fd,addr.str=0", "File descriptor '0' is not a socket"),
    ] {
        let said = refused_export(folder, options, Stdio::null());
        assert!(said.contains(words), "{options}: {said}");
        assert!(!folder.join("v.sock").exists(), "{options}");
    }
    // A connection is no socket that listens.
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().expect("a pair");
    let said = refused_export(folder, "addr.type=fd,addr.str=0", std::os::fd::OwnedFd::from(theirs).into());
    assert!(said.contains("File descriptor '0' is not a listening socket"), "{said}");
    drop(ours);
}

/// The value of one place of the disk: of the last write that has ended, and of one in flight.
#[derive(Clone, Copy, Default)]
struct Expected {
    known: u8,
    pending: Option<u8>,
}

/// Heads of chains, which have three descriptors each.
const CHAINS: u16 = 16;
const PLACES: usize = 64;

#[test]
fn a_guest_outlives_a_daemon_that_is_killed_under_load() {
    outlives("raw", ",writable=on");
}

#[test]
fn guest_on_written_through_qcow2_outlives_a_killed_daemon() {
    outlives("qcow2", ",writable=on,writethrough=on");
}

/// Kills daemons, each with requests in flight. At the end each place holds the last write of which the guest has heard.
fn outlives(format: &str, more: &str) {
    let folder = temp_dir();
    let folder = folder.path();
    tool("qemu-img", &["create", "-q", "-f", format, text(&folder.join("d.img")), "16M"]);
    let image = format!("{format},node-name=d,file.driver=file,file.filename=d.img");
    let seed = seeds(1).next().expect("a seed");
    let mut random = Random::new(seed);
    let (mut guest, mut notes): (Option<Guest>, _) = (None, None);
    let mut expected = [Expected::default(); PLACES];
    // The place that each chain writes.
    let mut chains = [None; CHAINS as usize];
    let (mut ended, mut again) = (0, 0);
    for life in 0..100 {
        let (mut daemon, monitor) = start(folder, &image, more);
        drop(monitor);
        let mut driver = FrontEnd::resume(&folder.join("v.sock"), guest.take(), &mut notes);
        again += chains.iter().flatten().count();
        // On a busy machine a daemon often ends all of them before its kill.
        let is_last = life >= 7 && again > 0;
        let last = ended + 20 + random.below(200);
        loop {
            for head in 0..CHAINS {
                let place = random.below(PLACES as u64) as usize;
                if chains[usize::from(head)].is_none() && expected[place].pending.is_none() {
                    let value = 1 + random.below(255) as u8;
                    driver.prepare(0, head * 3, 1, place as u64 * 8, &[value; 4096], 0);
                    driver.offer(0, head * 3);
                    expected[place].pending = Some(value);
                    chains[usize::from(head)] = Some(place);
                }
            }
            driver.kick(0);
            if ended >= last {
                break;
            }
            let (head, _) = driver.wait_used(0);
            assert_eq!(driver.status(head), 0, "seed {seed}");
            let place = chains[usize::from(head / 3)].take().expect("a chain in flight ends once");
            expected[place].known = expected[place].pending.take().expect("in flight");
            ended += 1;
        }
        if !is_last {
            daemon.child().kill().expect("it runs");
            daemon.wait();
        } else {
            while chains.iter().any(Option::is_some) {
                let (head, _) = driver.wait_used(0);
                let place = chains[usize::from(head / 3)].take().expect("a chain in flight ends once");
                expected[place].known = expected[place].pending.take().expect("in flight");
            }
            for (number, place) in expected.iter().enumerate() {
                let (status, bytes) = driver.request(0, number as u64 * 8, &[], 4096);
                assert!(
                    status == 0 && bytes == [place.known; 4096],
                    "seed {seed}: place {number} is not {}",
                    place.known
                );
            }
            daemon.stop();
            break;
        }
        // Requests given back before the end count.
        while driver.used(0) != driver.guest.seen[0] {
            let (head, _) = driver.wait_used(0);
            let place = chains[usize::from(head / 3)].take().expect("a chain in flight ends once");
            expected[place].known = expected[place].pending.take().expect("in flight");
            ended += 1;
        }
        guest = Some(driver.guest.clone());
    }
    assert!(again > 0, "seed {seed}: no daemon was killed with a request in flight");
    if format == "qcow2" {
        tool("qemu-img", &["check", "-q", "-r", "leaks", text(&folder.join("d.img"))]);
    }
}

/// A flush promises changes that were acknowledged to the guest before. The next daemon must not promise changes that
/// died with the last one.
#[test]
fn a_guest_hears_of_changes_that_died_with_a_daemon() {
    const WRITE: u32 = 1;
    const FLUSH: u32 = 4;
    const SECTORS: u64 = 128;
    let folder = temp_dir();
    let folder = folder.path();
    tool("qemu-img", &["create", "-q", "-f", "qcow2", text(&folder.join("d.img")), "16M"]);
    let image = "qcow2,node-name=d,file.driver=file,file.filename=d.img";
    let (mut guest, mut notes): (Option<Guest>, _) = (None, None);
    let mut live = |work: &mut dyn FnMut(&mut FrontEnd), is_killed: bool| {
        let (daemon, monitor) = start(folder, image, ",writable=on");
        drop(monitor);
        let mut driver = FrontEnd::connect(&folder.join("v.sock"));
        if let Some(guest) = guest.take() {
            driver.guest = guest;
        }
        driver.negotiate(u64::MAX);
        driver.share_memory();
        let region = notes.get_or_insert_with(|| driver.notes());
        driver.give_notes(region);
        driver.start_ring(0, driver.used(0));
        work(&mut driver);
        guest = Some(driver.guest.clone());
        match is_killed {
            true => {
                daemon.signal("KILL");
                let _ = daemon.wait();
            }
            false => daemon.stop(),
        }
    };
    let write = |driver: &mut FrontEnd, place: u64, value: u8| {
        assert_eq!(driver.request(WRITE, place * SECTORS, &[value; 4096], 0).0, 0);
    };
    let read = |driver: &mut FrontEnd, place: u64| driver.request(0, place * SECTORS, &[], 4096);
    let flush = |driver: &mut FrontEnd| driver.request(FLUSH, 0, &[], 0).0;
    live(
        &mut |driver| {
            write(driver, 0, 1);
            assert_eq!(flush(driver), 0);
        },
        true,
    );
    live(
        &mut |driver| {
            assert_eq!((flush(driver), read(driver, 0)), (0, (0, vec![1; 4096])), "all was flushed");
            // In its place: the page cache has it, also after the daemon's death.
            write(driver, 0, 2);
        },
        true,
    );
    live(
        &mut |driver| {
            assert_eq!((flush(driver), read(driver, 0)), (0, (0, vec![2; 4096])));
            write(driver, 1, 3);
        },
        true,
    );
    live(
        &mut |driver| {
            assert_eq!(
                (read(driver, 0), read(driver, 1)),
                ((0, vec![2; 4096]), (0, vec![0; 4096])),
                "a mapping is lost"
            );
            assert_eq!([flush(driver), flush(driver)], [1, 1], "each user of the disk hears of it");
            write(driver, 1, 4);
        },
        false,
    );
    live(
        &mut |driver| {
            assert_eq!([flush(driver), flush(driver)], [1, 1], "also from the next daemon");
            // As front ends do when their guest resets the device.
            driver.stop_ring(0);
            let region = driver.notes();
            driver.give_notes(&region);
            driver.start_ring(0, driver.used(0));
            assert_eq!(flush(driver), 0);
        },
        false,
    );
    live(
        &mut |driver| {
            assert_eq!(
                (flush(driver), read(driver, 1)),
                (0, (0, vec![4; 4096])),
                "a daemon that is stopped loses nothing"
            )
        },
        false,
    );
    tool("qemu-img", &["check", "-q", "-r", "leaks", text(&folder.join("d.img"))]);
}

/// The threads of a daemon's rings.
fn ring_threads(daemon: &mut Serving) -> usize {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", daemon.child().id())).expect("a process");
    let names = tasks.map(|task| std::fs::read_to_string(task.expect("a thread").path().join("comm")).expect("a name"));
    names.filter(|name| name.starts_with("vhost-queue")).count()
}

#[test]
fn a_served_disk_has_a_queue_for_each_processor() {
    let processors = std::thread::available_parallelism().expect("a number").get();
    let folder = temp_dir();
    let folder = folder.path();
    std::fs::File::create(folder.join("d.raw")).and_then(|file| file.set_len(DISK_BYTES)).expect("an image");
    let export =
        |id: &str, more: &str| format!("vhost-user-blk,id={id},node-name=d,addr.type=unix,addr.path={id}.sock{more}");
    let (plain, many) = (export("plain", ""), export("many", ",num-queues=64"));
    let drive = ["serve", "-k", "n.sock", "--drive", "file=d.raw,format=raw,id=d,readonly=on"];
    for (exports, id, expected) in [(&plain, "plain", processors.min(64)), (&many, "many", 64)] {
        let mut daemon = Serving::start(folder, &[&drive[..], &["--export", exports]].concat());
        daemon.line();
        assert_eq!(FrontEnd::connect(&folder.join(format!("{id}.sock"))).queue_count(), expected as u64);
        assert_eq!(ring_threads(&mut daemon), processors.min(64), "no more threads than processors");
        daemon.stop();
    }
    // As QEMU's.
    let (mut daemon, _monitor) = start(folder, "file,node-name=d,filename=d.raw", "");
    assert_eq!((FrontEnd::connect(&folder.join("v.sock")).queue_count(), ring_threads(&mut daemon)), (1, 1));
    daemon.stop();
}

/// The last write of a guest on one queue, and the flush on another one, beside discards.
#[test]
fn a_flush_on_one_queue_covers_writes_of_the_other() {
    const SECTORS: u64 = 128;
    let folder = temp_dir();
    let folder = folder.path();
    tool("qemu-img", &["create", "-q", "-f", "qcow2", text(&folder.join("d.img")), "16M"]);
    let image = "qcow2,node-name=d,discard=unmap,file.driver=file,file.filename=d.img";
    let (mut daemon, monitor) = start(folder, image, ",writable=on,num-queues=2");
    drop(monitor);
    let mut driver = FrontEnd::connect(&folder.join("v.sock"));
    driver.negotiate(u64::MAX);
    driver.share_memory();
    driver.start_ring(0, 0);
    driver.start_ring(1, 0);
    // Writes to it go in place later.
    const PLACE: u64 = 70 * SECTORS;
    driver.prepare(0, 6, 1, PLACE, &[99; 8192], 0);
    driver.offer(0, 6);
    driver.kick(0);
    assert_eq!((driver.wait_used(0).0, driver.status(6)), (6, 0));
    for round in 0..64u64 {
        driver.prepare(0, 0, 1, round * SECTORS, &[round as u8 + 1; 4096], 0);
        driver.prepare(0, 6, 1, PLACE, &[round as u8 + 1; 4096], 0);
        // The discard of what was written two rounds before runs beside the write.
        let gone = [&(round.saturating_sub(2) * SECTORS).to_le_bytes()[..], &[128, 0, 0, 0, 0, 0, 0, 0]].concat();
        driver.prepare(1, 30, 11, 0, &gone, 0);
        driver.offer(0, 0);
        driver.offer(0, 6);
        driver.offer(1, 30);
        driver.kick(0);
        driver.kick(1);
        let mut written = [driver.wait_used(0).0, driver.wait_used(0).0];
        written.sort_unstable();
        assert_eq!((written, driver.status(0), driver.status(6)), ([0, 6], 0, 0), "round {round}");
        driver.prepare(1, 33, 4, 0, &[], 0);
        driver.offer(1, 33);
        driver.kick(1);
        let mut ended = [driver.wait_used(1).0, driver.wait_used(1).0];
        ended.sort_unstable();
        assert_eq!((ended, driver.status(30), driver.status(33)), ([30, 33], 0, 0), "round {round}");
    }
    daemon.child().kill().expect("it runs");
    daemon.wait();
    tool("qemu-img", &["check", "-q", "-r", "leaks", text(&folder.join("d.img"))]);
    for (round, value) in [(62u64, 63), (63, 64), (10, 0), (70, 64)] {
        let read = format!("read -P {value} {} 4k", round * SECTORS * 512);
        let said = run_to_code("qemu-io", &["-f", "qcow2", "-c", &read, text(&folder.join("d.img"))], &[0]);
        assert!(!said.contains("failed"), "{said}");
    }
}

/// The kernel reads into guest memory, and waits for a file system that is another process, which sleeps. The front end takes the
/// memory away meanwhile.
#[test]
fn memory_taken_during_a_transfer_lasts_until_its_end() {
    let (folder, base) = (temp_dir(), temp_dir());
    let (folder, base) = (folder.path(), base.path());
    std::fs::write(base.join("d.raw"), vec![5; DISK_BYTES as usize]).expect("an image");
    std::fs::File::create(base.join("m")).expect("a mount point");
    let mut command = Command::new(super::process::COWSHED);
    command.arg0("qemu-storage-daemon").args(["--blockdev", "file,node-name=d,filename=d.raw"]);
    command.args(["--export", "fuse,id=f,node-name=d,mountpoint=m,writable=on,allow-other=off"]);
    let mut server = Serving::start_command(base, command);
    let mounted = base.join("m");
    await_that("the mount", || std::fs::metadata(&mounted).is_ok_and(|found| found.len() == DISK_BYTES));
    let image = format!("file,node-name=d,locking=off,filename={}", text(&mounted));
    let (daemon, monitor) = start(folder, &image, "");
    drop(monitor);
    let mut driver = FrontEnd::connect(&folder.join("v.sock"));
    driver.negotiate(u64::MAX);
    driver.share_memory();
    driver.start_ring(0, 0);
    let sleeper = rustix::process::Pid::from_child(server.child());
    rustix::process::kill_process(sleeper, rustix::process::Signal::STOP).expect("it runs");
    driver.prepare(0, 0, 0, 4096, &[], 8192);
    driver.offer(0, 0);
    driver.kick(0);
    // Time for the request to reach the kernel. It can't end.
    std::thread::sleep(Duration::from_millis(200));
    assert!(driver.take_memory_away(), "the removal waits for nothing");
    assert_eq!((driver.used(0), driver.bytes(FrontEnd::data(0), 8192)), (0, vec![0; 8192]));
    rustix::process::kill_process(sleeper, rustix::process::Signal::CONT).expect("it is there");
    driver.wait_used(0);
    assert_eq!((driver.status(0), driver.bytes(FrontEnd::data(0), 8192)), (0, vec![5; 8192]));
    drop(driver);
    daemon.stop();
    server.stop();
}

#[test]
fn a_resize_reaches_a_front_end() {
    let folder = temp_dir();
    let folder = folder.path();
    std::fs::File::create(folder.join("d.raw")).and_then(|file| file.set_len(DISK_BYTES)).expect("an image");
    let (daemon, mut monitor) = start(folder, "file,node-name=d,filename=d.raw", ",writable=on");
    let mut driver = FrontEnd::connect(&folder.join("v.sock"));
    driver.negotiate(u64::MAX);
    let channel = driver.back_end_channel();
    monitor.command("block_resize", json!({"node-name": "d", "size": DISK_BYTES * 2}));
    assert_eq!(FrontEnd::back_end_message(&channel), 2, "CONFIG_CHANGE_MSG");
    assert_eq!(driver.config(0, 8), (DISK_BYTES / 256).to_le_bytes());
    daemon.stop();
}

/// A pause of the guest waits for a request that hangs: its memory is in use. The owner ends that.
#[test]
fn a_pause_behind_a_stuck_request_can_be_ended() {
    let folder = temp_dir();
    let folder = folder.path();
    std::fs::File::create(folder.join("d.raw")).and_then(|file| file.set_len(DISK_BYTES)).expect("an image");
    let image = "fault,node-name=d,file.driver=file,file.filename=d.raw,rules.0.op=read,rules.0.action=hang";
    let (daemon, mut monitor) = start(folder, image, ",writable=on");
    let mut driver = FrontEnd::connect(&folder.join("v.sock"));
    driver.negotiate(u64::MAX);
    driver.share_memory();
    driver.start_ring(0, 0);
    driver.prepare(0, 0, 0, 0, &[], 512);
    driver.offer(0, 0);
    driver.kick(0);
    await_that("the request", || monitor.command("x-query-faults", json!({"node-name": "d"}))["hits"] == 1);
    driver.begin_to_stop_ring(0);
    await_that("a line in the log", || daemon.log().contains("a ring can't stop before its requests end"));
    assert!(!driver.socket.has_hung_up() && driver.used(0) == 0);
    // The monitor answers, and takes the export away.
    let exports = |monitor: &mut Monitor| monitor.command("query-block-exports", json!({}));
    assert_eq!(exports(&mut monitor)[0]["shutting-down"], false);
    monitor.command("block-export-del", json!({"id": "e", "mode": "hard"}));
    assert!(driver.is_closed(), "the front end goes on");
    assert_eq!(exports(&mut monitor)[0]["shutting-down"], true, "the request has memory still");
    monitor.command("x-fault-disarm", json!({"node-name": "d"}));
    await_that("the export is gone", || exports(&mut monitor) == json!([]));
    assert_eq!(driver.used(0), 1, "the request has ended before");
    daemon.stop();
}

/// The disk is served as a file, too, and writers of that change its size.
#[test]
fn sizes_that_a_file_gets_reach_a_front_end() {
    let folder = temp_dir();
    let folder = folder.path();
    std::fs::File::create(folder.join("d.raw")).and_then(|file| file.set_len(DISK_BYTES)).expect("an image");
    std::fs::write(folder.join("m"), "").expect("a mount point");
    let (daemon, mut monitor) = start(folder, "file,node-name=d,filename=d.raw", ",writable=on");
    let file = folder.join("m");
    monitor.command(
        "block-export-add",
        json!({"type": "fuse", "id": "m", "node-name": "d", "mountpoint": file, "writable": true, "growable": true}),
    );
    let mut driver = FrontEnd::connect(&folder.join("v.sock"));
    driver.negotiate(u64::MAX);
    let channel = driver.back_end_channel();
    let file = std::fs::File::options().write(true).open(file).expect("it opens");
    for (end, change) in [(2 * DISK_BYTES, true), (3 * DISK_BYTES, false)] {
        match change {
            true => file.set_len(end).expect("a truncation"),
            false => file.write_all_at(&[7; 512], end - 512).expect("a write behind the end"),
        }
        assert_eq!(FrontEnd::back_end_message(&channel), 2, "CONFIG_CHANGE_MSG");
        assert_eq!(driver.config(0, 8), (end / 512).to_le_bytes());
    }
    // As `block_resize`: what the guest has there would be gone.
    let shorter = file.set_len(DISK_BYTES).expect_err("the guest has a longer disk");
    assert_eq!(shorter.kind(), std::io::ErrorKind::ResourceBusy, "{shorter}");
    assert_eq!(driver.config(0, 8), (DISK_BYTES * 3 / 512).to_le_bytes());
    drop(file);
    daemon.stop();
}

#[test]
fn shorter_raw_node_above_spares_a_guest() {
    let folder = temp_dir();
    let folder = folder.path();
    tool("qemu-img", &["create", "-q", "-f", "qcow2", text(&folder.join("d.img")), "16M"]);
    std::fs::write(folder.join("m"), "").expect("a mount point");
    let image = "qcow2,node-name=d,file.driver=file,file.filename=d.img";
    let (daemon, mut monitor) = start(folder, image, ",writable=on");
    monitor.command("blockdev-add", json!({"driver": "raw", "node-name": "above", "file": "d"}));
    let refused = monitor.refusal("block_resize", &json!({"node-name": "above", "size": 8 << 20}));
    assert!(refused.contains("Permission conflict on node 'd'"), "{refused}");
    monitor.command(
        "block-export-add",
        json!({"type": "fuse", "id": "m", "node-name": "above", "mountpoint": folder.join("m"), "writable": true}),
    );
    let file = std::fs::File::options().write(true).open(folder.join("m")).expect("it opens");
    let shorter = file.set_len(8 << 20).expect_err("the guest has a longer disk");
    assert_eq!(shorter.kind(), std::io::ErrorKind::ResourceBusy, "{shorter}");
    assert_eq!(std::fs::metadata(folder.join("m")).expect("attributes").len(), 16 << 20);
    drop(file);
    daemon.stop();
}

/// The device disappears, with changes in memory, and comes back in the same daemon. Nothing is lost.
#[test]
fn export_that_comes_back_reports_no_loss() {
    comes_back("d");
}

/// The image has the changes, not the filter above it.
#[test]
fn export_of_the_image_below_reports_no_loss() {
    comes_back("i");
}

fn comes_back(node: &str) {
    let folder = temp_dir();
    let folder = folder.path();
    tool("qemu-img", &["create", "-q", "-f", "qcow2", text(&folder.join("d.img")), "16M"]);
    let image = "fault,node-name=d,file.driver=qcow2,file.node-name=i,file.file.driver=file,file.file.filename=d.img";
    let (daemon, mut monitor) = start(folder, image, ",writable=on");
    let mut driver = FrontEnd::connect(&folder.join("v.sock"));
    driver.negotiate(u64::MAX);
    driver.share_memory();
    let notes = driver.notes();
    driver.give_notes(&notes);
    driver.start_ring(0, 0);
    assert_eq!(driver.request(1, 0, &[5; 4096], 0).0, 0);
    monitor.command("x-fault-arm", json!({"node-name": "d", "rule": {"op": "any", "errno": 19}}));
    // It goes, and the flush of its disk fails.
    monitor.refusal("block-export-del", &json!({"id": "e", "mode": "hard"}));
    let guest = driver.guest.clone();
    drop(driver);
    monitor.command("x-fault-disarm", json!({"node-name": "d"}));
    let address = json!({"type": "unix", "path": folder.join("v.sock")});
    monitor.command(
        "block-export-add",
        json!({"type": "vhost-user-blk", "id": "e", "node-name": node, "addr": address, "writable": true}),
    );
    let mut driver = FrontEnd::connect(&folder.join("v.sock"));
    driver.guest = guest;
    driver.negotiate(u64::MAX);
    driver.share_memory();
    driver.give_notes(&notes);
    driver.start_ring(0, driver.used(0));
    assert_eq!(driver.request(0, 0, &[], 4096), (0, vec![5; 4096]));
    assert_eq!([driver.request(4, 0, &[], 0).0, driver.request(4, 0, &[], 0).0], [0, 0]);
    drop(driver);
    daemon.stop();
}

/// `fstat` and `close` of a file of a FUSE mount wait for its server. A front end passes one whose server stands still.
#[test]
fn files_of_a_silent_server_hold_no_export() {
    let folder = temp_dir();
    let folder = folder.path();
    for name in ["d.raw", "g.raw", "m"] {
        std::fs::write(folder.join(name), vec![0; if name == "m" { 0 } else { 1 << 20 }]).expect("a file");
    }
    let file = folder.join("m");
    // Closed last: that waits for the server, too, unless it has gone.
    let mut passed: Vec<OwnedFd> = Vec::new();
    let mut mount = Serving::start(folder, &["mount", "--foreground", "--writable", "-f", "raw", "g.raw", "m"]);
    await_that("the file is mounted", || std::fs::metadata(&file).is_ok_and(|found| found.len() == 1 << 20));
    let (daemon, _monitor) = start(folder, "raw,node-name=d,file.driver=file,file.filename=d.raw", ",writable=on");
    // It has no descriptor of these files, which a program that begins would have to close.
    let script = format!("read a; kill -STOP {0}; echo; read a; kill -CONT {0}; echo", mount.child().id());
    let shell = Command::new("sh").args(["-c", &script]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    let mut shell = Killed(shell.expect("a shell runs"));
    let mut next = || {
        let (input, output) = (shell.0.stdin.as_mut().expect("a pipe"), shell.0.stdout.as_mut().expect("a pipe"));
        std::io::Write::write_all(input, b"\n").expect("the shell reads");
        std::io::Read::read_exact(output, &mut [0]).expect("the shell has sent the signal");
    };
    for _ in 0..3 {
        passed.push(std::fs::OpenOptions::new().read(true).write(true).open(&file).expect("a file").into());
    }
    next();
    let region = [0, 1 << 20, 1 << 40, 0].map(u64::to_le_bytes).concat();
    let messages = [
        (request::ADD_MEM_REG, [vec![0; 8], region].concat()),
        (request::SET_VRING_CALL, vec![0; 8]),
        // A message that takes none.
        (request::SET_VRING_ENABLE, [0u32.to_le_bytes(), 1u32.to_le_bytes()].concat()),
    ];
    for ((number, body), descriptor) in messages.iter().zip(&passed) {
        let mut front_end = FrontEnd::connect(&folder.join("v.sock"));
        front_end.negotiate(u64::MAX);
        front_end.send(*number, body, Some(descriptor));
        assert!(front_end.is_closed(), "message {number}");
    }
    let front_end = FrontEnd::connect(&folder.join("v.sock"));
    assert_eq!(front_end.queue_count(), 1, "another front end is served");
    drop(front_end);
    next();
    daemon.stop();
    passed.clear();
    mount.stop();
}
