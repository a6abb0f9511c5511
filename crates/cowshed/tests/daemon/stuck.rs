// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A disk that never answers: it keeps neither monitors, nor other disks, nor the daemon's end.

use super::process::{COWSHED, Killed, Monitor, Serving, page, text};
use cowshed_testkit::programs::tool;
use cowshed_testkit::qemu::{Qemu, temp_dir};
use cowshed_testkit::waiting::await_that;
use serde_json::{Value, json};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A daemon with a disk of its own, `disk`, and one on a server that can fall silent, `remote`. Both are exports.
struct Bench {
    daemon: Serving,
    server: Serving,
    folder: tempfile::TempDir,
    /// The line about the daemon's numbers for Prometheus.
    metrics: String,
}

impl Bench {
    fn start(options: &[&str]) -> Bench {
        let (folder, qemu) = (temp_dir(), Qemu::system());
        let at = |name: &str| folder.path().join(name);
        qemu.create(&at("disk.qcow2"), "qcow2", "", 8 << 20);
        qemu.create(&at("remote.raw"), "raw", "", 8 << 20);
        std::fs::create_dir(at("server")).expect("a folder");
        let mut server = Serving::start(&at("server"), &["serve", "-f", "raw", "-k", "r.sock", "../remote.raw"]);
        server.line();
        let common =
            ["serve", "-k", "n.sock", "--monitor", "m.sock", "--metrics", "127.0.0.1:0", "-x", "disk", "disk.qcow2"];
        let mut daemon = Serving::start(folder.path(), &[&common, options].concat());
        let metrics = [daemon.line(), daemon.line(), daemon.line()][2].clone();
        let bench = Bench { daemon, server, folder, metrics };
        let mut monitor = bench.monitor();
        let socket = bench.folder.path().join("server/r.sock");
        let remote = json!({"driver": "nbd", "node-name": "remote", "server": {"type": "unix", "path": socket}});
        monitor.command("blockdev-add", remote);
        let export = json!({"type": "nbd", "id": "remote", "node-name": "remote", "writable": true});
        monitor.command("block-export-add", export);
        bench
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    fn monitor(&self) -> Monitor {
        Monitor::connect(&self.path().join("m.sock"))
    }

    fn uri(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", self.path().join("n.sock").display())
    }

    /// The reads of the node `disk`.
    fn reads(&self, monitor: &mut Monitor) -> u64 {
        let stats = monitor.command("query-blockstats", json!({"query-nodes": true}));
        let nodes = stats.as_array().expect("a list").iter();
        let disk = nodes.filter(|node| node["node-name"] == "disk");
        disk.map(|node| node["stats"]["rd_operations"].as_u64().expect("a number")).sum()
    }

    /// Waits until a job has read more of `disk` than `before`, and waits with all of it for the silent target. Reads
    /// are counted before their data is looked at and sent.
    fn await_piece(&self, monitor: &mut Monitor, before: u64) {
        let (mut last, mut equal) = (before, 0);
        await_that("a piece is on its way", || {
            let now = self.reads(monitor);
            equal = if now > before && now == last { equal + 1 } else { 0 };
            last = now;
            equal > 20
        });
    }

    /// Waits until an export has a request in flight.
    fn await_request(&self, export: &str) {
        let idle = format!("cowshed_export_in_flight{{export=\"{export}\"}} 0");
        await_that("a request is in flight", || !page(&self.metrics).lines().any(|line| line == idle));
    }

    /// Waits until `remote` has no user.
    fn await_free(&self, monitor: &mut Monitor) {
        await_that("the target is given back", || {
            monitor.reply("blockdev-del", &json!({"node-name": "remote"})).get("return").is_some()
        });
    }

    /// A client with a write to the silent disk, which is on its way when this returns.
    fn stuck_client(&mut self) -> Killed {
        self.server.signal("STOP");
        let client = Command::new(COWSHED)
            .args(["io", "-f", "raw", "-c", "write -P 5 0 64k", &self.uri("remote")])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let client = Killed(client.expect("our own binary runs"));
        self.await_request("remote");
        client
    }

    /// A command on a monitor of its own, which hangs.
    fn stuck_command(&self, name: &'static str, arguments: Value) -> JoinHandle<Value> {
        let mut monitor = self.monitor();
        let command = std::thread::spawn(move || monitor.command(name, arguments));
        let mut monitor = self.monitor();
        await_that(name, || {
            let running = monitor.command("x-query-running", json!({}));
            running.as_array().expect("a list").iter().any(|one| one["name"] == name)
        });
        command
    }
}

#[test]
fn a_disk_that_never_answers_keeps_no_monitor() {
    let mut bench = Bench::start(&[]);
    let client = bench.stuck_client();
    let overlay = bench.path().join("overlay.qcow2");
    let snapshot = json!({"device": "remote", "snapshot-file": overlay, "format": "qcow2"});
    let stuck = bench.stuck_command("blockdev-snapshot-sync", snapshot);

    // Another monitor goes on, with everything that changes no disk.
    let mut monitor = bench.monitor();
    let started = Instant::now();
    for query in ["query-version", "query-named-block-nodes", "query-block-exports", "query-blockstats", "query-jobs"] {
        monitor.command(query, json!({}));
    }
    monitor.command("object-add", json!({"qom-type": "throttle-group", "id": "g"}));
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
    // So do the clients of the other disk.
    Qemu::system().io(["-f", "raw", "-c", "write -P 7 0 1M", "-c", "flush", &bench.uri("disk")]).expect_ok();
    // It is reported.
    bench.daemon.await_log("the command has run for 5 s");

    // The export can be taken away from its client; it is gone when its request ends.
    monitor.command("block-export-del", json!({"id": "remote", "mode": "hard"}));
    let exports = monitor.command("query-block-exports", json!({}));
    let remote = exports.as_array().expect("a list").iter().find(|one| one["id"] == "remote").expect("still there");
    assert_eq!((&remote["shutting-down"], &remote["x-requests"]), (&json!(true), &json!(1)), "{exports}");
    let refused = monitor.refusal("block-export-del", &json!({"id": "remote", "mode": "hard"}));
    assert_eq!(refused, "Export 'remote' is already shutting down");
    bench.daemon.await_log("requests of a removed export hang");

    bench.server.signal("CONT");
    await_that("the export goes", || {
        let exports = monitor.command("query-block-exports", json!({}));
        exports.as_array().expect("a list").iter().all(|one| one["id"] != "remote")
    });
    stuck.join().expect("the command ends");
    drop(client);
    monitor.command("blockdev-add", json!({"driver": "null-co", "node-name": "next", "size": 512}));
    let Bench { daemon, server, folder, .. } = bench;
    daemon.stop();
    server.stop();
    drop(folder);
}

/// A snapshot of a hung disk keeps the changes of that disk waiting, and those of no other one.
#[test]
fn changes_of_other_disks_go_on() {
    let mut bench = Bench::start(&[]);
    let client = bench.stuck_client();
    let at = |name: &str| bench.path().join(name);
    let overlay = at("overlay.qcow2");
    let snapshot = json!({"device": "remote", "snapshot-file": overlay, "format": "qcow2"});
    let stuck = bench.stuck_command("blockdev-snapshot-sync", snapshot);
    let waiting = bench.stuck_command("block-dirty-bitmap-add", json!({"node": "remote", "name": "b"}));

    let mut monitor = bench.monitor();
    let started = Instant::now();
    Qemu::system().create(&at("second.qcow2"), "qcow2", "", 8 << 20);
    let file = json!({"driver": "file", "filename": at("second.qcow2")});
    monitor.command("blockdev-add", json!({"driver": "qcow2", "node-name": "second", "file": file}));
    let export = json!({"type": "nbd", "id": "second", "node-name": "second", "writable": true});
    monitor.command("block-export-add", export);
    for (device, file) in [("second", at("s1.qcow2")), ("disk", at("s2.qcow2"))] {
        monitor.command("blockdev-snapshot-sync", json!({"device": device, "snapshot-file": file}));
        Qemu::system().io(["-f", "raw", "-c", "write -P 7 0 1M", "-c", "flush", &bench.uri(device)]).expect_ok();
    }
    monitor.command("block-export-del", json!({"id": "second", "mode": "hard"}));
    await_that("the export goes", || {
        let exports = monitor.command("query-block-exports", json!({}));
        exports.as_array().expect("a list").iter().all(|one| one["id"] != "second")
    });
    monitor.command("blockdev-del", json!({"node-name": "second"}));
    // Less than a command waits for its turn.
    assert!(started.elapsed() < Duration::from_secs(25), "{:?}", started.elapsed());
    let running = monitor.command("x-query-running", json!({}));
    let turns: Vec<(&Value, &Value)> =
        running.as_array().expect("a list").iter().map(|one| (&one["name"], &one["waits-for-turn"])).collect();
    let wanted = [("blockdev-snapshot-sync", false), ("block-dirty-bitmap-add", true)]
        .map(|(name, waits)| (json!(name), json!(waits)));
    let wanted: Vec<(&Value, &Value)> = wanted.iter().map(|(name, waits)| (name, waits)).collect();
    assert!(wanted.iter().all(|one| turns.contains(one)), "{running}");
    bench.server.signal("CONT");
    stuck.join().expect("the command ends");
    waiting.join().expect("the command ends");
    drop(client);
    bench.daemon.stop();
}

#[test]
fn a_daemon_ends_though_a_disk_never_answers() {
    for by_command in [false, true] {
        let mut bench = Bench::start(&["--stop-timeout", "6", "--pidfile", "pid"]);
        // Written, and not flushed: that is the daemon's affair now.
        let unflushed = ["-t", "unsafe", "-f", "raw", "-c", "write -P 7 0 1M", &bench.uri("disk")];
        Qemu::system().io(unflushed).expect_ok();
        let client = bench.stuck_client();
        assert!(bench.path().join("pid").exists());
        let started = Instant::now();
        if by_command {
            bench.monitor().command("quit", json!({}));
        } else {
            bench.daemon.signal("TERM");
        }
        await_that("the daemon ends", || bench.daemon.child().try_wait().expect("a child").is_some());
        assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
        let log = bench.daemon.log();
        assert!(log.contains("could not stop in order (stop timeout 6 s)") && log.contains("'remote'"), "{log}");
        let Bench { daemon, folder, .. } = bench;
        assert_eq!(daemon.wait().code(), Some(1), "{log}");
        drop(client);
        // The disk that answers is complete, and nothing is left behind.
        let disk = folder.path().join("disk.qcow2");
        Qemu::system().expect_clean(&disk);
        let sevens = Qemu::system().io(["-f", "qcow2", "-r", "-c", "read -P 7 0 1M", text(&disk)]).expect_ok();
        assert!(!sevens.stdout.contains("failed"), "{}", sevens.stdout);
        for left in ["pid", "m.sock", "n.sock"] {
            assert!(!folder.path().join(left).exists(), "{left} is left behind");
        }
    }
}

/// The newest export is the first that is stopped.
#[test]
fn an_export_that_hangs_leaves_the_others_their_end() {
    let mut bench = Bench::start(&["--stop-timeout", "4"]);
    let (at, mut monitor) = (|name: &str| bench.folder.path().join(name), bench.monitor());
    std::fs::write(at("m"), []).expect("a mount point");
    let socket = json!({"type": "unix", "path": at("v.sock")});
    let guest = json!({"type": "vhost-user-blk", "id": "guest", "node-name": "disk", "addr": socket});
    monitor.command("block-export-add", guest);
    let file = json!({"type": "fuse", "id": "file", "node-name": "remote", "mountpoint": at("m"), "writable": true});
    monitor.command("block-export-add", file);
    bench.server.signal("STOP");
    let copy = ["if=/dev/zero", "bs=4k", "count=1", "conv=notrunc", "status=none"];
    let output = format!("of={}", at("m").display());
    let client = Command::new("dd").args(copy).arg(output).stderr(Stdio::null()).spawn();
    let client = Killed(client.expect("dd must be installed (coreutils)"));
    bench.await_request("file");
    bench.daemon.signal("TERM");
    await_that("the daemon ends", || bench.daemon.child().try_wait().expect("a child").is_some());
    let log = bench.daemon.log();
    assert!(log.contains("export 'file' did not end") && !log.contains("'guest'"), "{log}");
    assert!(!bench.path().join("v.sock").exists(), "a socket is left behind");
    drop(client);
}

/// Every daemon whose disk is on a server that has fallen silent ends within its own limit, and a little.
#[test]
fn the_limit_for_stopping_holds_under_every_name() {
    const LIMIT_SECONDS: u64 = 2;
    let remote = "driver=nbd,server.type=unix,server.path=server/r.sock";
    let lines = [
        format!("serve --stop-timeout {LIMIT_SECONDS} -k n.sock -x remote --image-opts {remote}"),
        format!("qemu-nbd --stop-timeout {LIMIT_SECONDS} -t -v -k n.sock -x remote --image-opts {remote}"),
        format!(
            "qemu-storage-daemon --stop-timeout {LIMIT_SECONDS} --blockdev {remote},node-name=remote --nbd-server \
             addr.type=unix,addr.path=n.sock --export nbd,id=remote,node-name=remote,writable=on"
        ),
    ];
    for line in lines {
        let folder = temp_dir();
        let at = |name: &str| folder.path().join(name);
        Qemu::system().create(&at("remote.raw"), "raw", "", 8 << 20);
        std::fs::create_dir(at("server")).expect("a folder");
        let mut server = Serving::start(&at("server"), &["serve", "-f", "raw", "-k", "r.sock", "../remote.raw"]);
        server.line();
        let mut daemon = Serving::start(folder.path(), &line.split_whitespace().collect::<Vec<_>>());
        await_that("the daemon serves", || std::os::unix::net::UnixStream::connect(at("n.sock")).is_ok());
        let uri = format!("nbd+unix:///remote?socket={}", at("n.sock").display());
        // The socket is there before the daemon is ready for signals.
        Qemu::system().io(["-f", "raw", "-r", "-c", "read 0 64k", &uri]).expect_ok();
        server.signal("STOP");
        let client = Command::new(COWSHED)
            .args(["io", "-f", "raw", "-c", "write -P 5 0 64k", &uri])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let client = Killed(client.expect("our own binary runs"));
        // No count of requests under every name: the request follows the client by as much as a few messages take.
        std::thread::sleep(Duration::from_millis(500));
        let started = Instant::now();
        daemon.signal("TERM");
        await_that("the daemon ends", || daemon.child().try_wait().expect("a child").is_some());
        let (taken, log) = (started.elapsed(), daemon.log());
        // The thread for signals leaves the control thread three seconds more, and the machine may be busy.
        assert!(taken < Duration::from_secs(LIMIT_SECONDS + 6), "{line}: {taken:?}\n{log}");
        assert_eq!(daemon.wait().code(), Some(1), "{line}: {log}");
        assert!(log.contains("could not stop in order (stop timeout 2 s)"), "{line}: {log}");
        assert!(!at("n.sock").exists(), "{line}: the socket is left behind");
        drop(client);
        server.signal("CONT");
        server.stop();
    }
}

/// The disk that is copied is a good one: it doesn't wait for a target that never answers.
#[test]
fn a_mirror_whose_target_hangs_is_cancelled() {
    let bench = Bench::start(&[]);
    let mut monitor = bench.monitor();
    monitor.command("block-export-del", json!({"id": "remote", "mode": "hard"}));
    let mirror = json!({"job-id": "m", "device": "disk", "target": "remote", "sync": "full"});
    monitor.command("blockdev-mirror", mirror);
    let jobs = |monitor: &mut Monitor| monitor.command("query-jobs", json!({}));
    await_that("the mirror is ready", || jobs(&mut monitor)[0]["status"] == "ready");
    bench.server.signal("STOP");
    let before = bench.reads(&mut monitor);
    Qemu::system().io(["-f", "raw", "-c", "write -P 7 0 64k", &bench.uri("disk")]).expect_ok();
    bench.await_piece(&mut monitor, before);
    let started = Instant::now();
    monitor.command("block-job-cancel", json!({"device": "m", "force": true}));
    await_that("the job is gone", || jobs(&mut monitor) == json!([]));
    let overlay = json!({"device": "disk", "snapshot-file": bench.path().join("overlay"), "format": "qcow2"});
    monitor.command("blockdev-snapshot-sync", overlay);
    Qemu::system().io(["-f", "raw", "-c", "write -P 8 1M 64k", "-c", "flush", &bench.uri("disk")]).expect_ok();
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
    // The job's name is free, though the old target is still in use.
    monitor.command("blockdev-add", json!({"driver": "null-co", "node-name": "other", "size": 8 << 20}));
    let again = json!({"job-id": "m", "device": "disk", "target": "other", "sync": "full"});
    monitor.command("blockdev-mirror", again);
    await_that("the mirror is ready", || jobs(&mut monitor)[0]["status"] == "ready");
    monitor.command("block-job-cancel", json!({"device": "m", "force": true}));
    await_that("the job is gone", || jobs(&mut monitor) == json!([]));
    assert!(monitor.refusal("blockdev-del", &json!({"node-name": "remote"})).contains("in use"));
    bench.server.signal("CONT");
    bench.await_free(&mut monitor);
}

/// A mirror from `disk` to `remote` that has caught up.
fn ready_mirror(bench: &Bench, monitor: &mut Monitor) {
    monitor.command("block-export-del", json!({"id": "remote", "mode": "hard"}));
    let mirror = json!({"job-id": "m", "device": "disk", "target": "remote", "sync": "full"});
    monitor.command("blockdev-mirror", mirror);
    await_that("the mirror is ready", || monitor.command("query-jobs", json!({}))[0]["status"] == "ready");
    bench.server.signal("STOP");
}

/// The job can be cancelled, and the disk that it copied goes on.
fn cancel_and_write(bench: &Bench, monitor: &mut Monitor) {
    monitor.command("block-job-cancel", json!({"device": "m", "force": true}));
    await_that("the job is gone", || monitor.command("query-jobs", json!({})) == json!([]));
    Qemu::system().io(["-f", "raw", "-c", "write -P 8 1M 64k", "-c", "flush", &bench.uri("disk")]).expect_ok();
}

#[test]
fn hanging_mirror_changes_copy_mode_and_is_cancelled() {
    let bench = Bench::start(&[]);
    let mut monitor = bench.monitor();
    ready_mirror(&bench, &mut monitor);
    let mode = json!({"id": "m", "type": "mirror", "copy-mode": "write-blocking"});
    monitor.command("block-job-change", mode);
    Qemu::system().io(["-f", "raw", "-c", "read 0 64k", &bench.uri("disk")]).expect_ok();
    cancel_and_write(&bench, &mut monitor);
    bench.server.signal("CONT");
    bench.await_free(&mut monitor);
}

#[test]
fn copy_mode_changes_without_holding_the_source() {
    let bench = Bench::start(&[]);
    let mut monitor = bench.monitor();
    ready_mirror(&bench, &mut monitor);
    let write = "write -P 7 0 64k";
    let before = bench.reads(&mut monitor);
    Qemu::system().io(["-f", "raw", "-c", write, &bench.uri("disk")]).expect_ok();
    bench.await_piece(&mut monitor, before);
    let mode = json!({"id": "m", "type": "mirror", "copy-mode": "write-blocking"});
    let mut other = bench.monitor();
    let change = std::thread::spawn(move || other.refusal("block-job-change", &mode));
    await_that("the change runs", || {
        let running = monitor.command("x-query-running", json!({}));
        running.as_array().expect("a list").iter().any(|one| one["name"] == "block-job-change")
    });
    for _ in 0..3 {
        Qemu::system().io(["-f", "raw", "-c", write, "-c", "read -P 7 0 64k", &bench.uri("disk")]).expect_ok();
    }
    cancel_and_write(&bench, &mut monitor);
    change.join().expect("the change ends");
    bench.server.signal("CONT");
    bench.await_free(&mut monitor);
}

#[test]
fn a_mirror_whose_target_hangs_at_its_end_is_cancelled() {
    let bench = Bench::start(&[]);
    let mut monitor = bench.monitor();
    ready_mirror(&bench, &mut monitor);
    monitor.command("block-job-complete", json!({"device": "m"}));
    await_that("the job ends", || monitor.command("query-jobs", json!({}))[0]["status"] == "pending");
    Qemu::system().io(["-f", "raw", "-c", "write -P 7 0 64k", &bench.uri("disk")]).expect_ok();
    cancel_and_write(&bench, &mut monitor);
    bench.server.signal("CONT");
    bench.await_free(&mut monitor);
}

/// A refused change of the copy mode is reported in time, and the monitor goes on.
#[test]
fn copy_mode_of_a_silent_target_cannot_change() {
    let bench = Bench::start(&[]);
    let mut monitor = bench.monitor();
    ready_mirror(&bench, &mut monitor);
    let before = bench.reads(&mut monitor);
    Qemu::system().io(["-f", "raw", "-c", "write -P 7 0 64k", &bench.uri("disk")]).expect_ok();
    bench.await_piece(&mut monitor, before);
    let mode = json!({"id": "m", "type": "mirror", "copy-mode": "write-blocking"});
    let refused = monitor.refusal("block-job-change", &mode);
    assert!(refused.contains("has not answered for 30 s"), "{refused}");
    cancel_and_write(&bench, &mut monitor);
    bench.server.signal("CONT");
    bench.await_free(&mut monitor);
}

/// A target that is given back while it is silent is in use, and nothing else waits for it.
#[test]
fn silent_target_is_given_back_without_holding_changes() {
    let bench = Bench::start(&[]);
    let mut monitor = bench.monitor();
    ready_mirror(&bench, &mut monitor);
    // No request is in flight: the job's flush is the first that the target doesn't answer.
    monitor.command("block-job-complete", json!({"device": "m"}));
    await_that("the job ends", || monitor.command("query-jobs", json!({}))[0]["status"] == "pending");
    cancel_and_write(&bench, &mut monitor);
    let refused = monitor.refusal("blockdev-del", &json!({"node-name": "remote"}));
    assert!(refused.contains("in use"), "{refused}");
    let export = json!({"type": "nbd", "id": "more", "node-name": "disk", "name": "more"});
    monitor.command("block-export-add", export);
    bench.server.signal("CONT");
    bench.await_free(&mut monitor);
}

/// A write of the job that is on its way keeps the target until it ends: else it could land on the target's next
/// contents.
#[test]
fn cancelled_mirror_keeps_its_target_under_a_write() {
    let bench = Bench::start(&[]);
    let mut monitor = bench.monitor();
    monitor.command("block-export-del", json!({"id": "remote", "mode": "hard"}));
    Qemu::system().io(["-f", "raw", "-c", "write -P 7 0 1M", &bench.uri("disk")]).expect_ok();
    bench.server.signal("STOP");
    // The top layer alone: nothing is asked of the target before the first write to it.
    let mirror =
        json!({"job-id": "m", "device": "disk", "target": "remote", "sync": "top", "copy-mode": "write-blocking"});
    let before = bench.reads(&mut monitor);
    monitor.command("blockdev-mirror", mirror);
    bench.await_piece(&mut monitor, before);
    monitor.command("block-job-cancel", json!({"device": "m", "force": true}));
    let refused = monitor.refusal("blockdev-del", &json!({"node-name": "remote"}));
    assert!(refused.contains("in use"), "{refused}");
    assert_ne!(monitor.command("query-jobs", json!({})), json!([]), "the job waits for its write");
    bench.server.signal("CONT");
    await_that("the job is gone", || monitor.command("query-jobs", json!({})) == json!([]));
    bench.await_free(&mut monitor);
}

/// Starts a job from `disk` to `remote`, which falls silent, and a write to `disk` that waits for it. Once the job is cancelled the
/// users of `disk` go on; the job ends when the target answers.
fn cancelled_job_lets_the_source_go(name: &str, arguments: Value) {
    // Such a job discards its copied parts on the disk.
    let discards = arguments.get("discard-source").is_some();
    let bench = Bench::start(&[]);
    let mut monitor = bench.monitor();
    monitor.command("block-export-del", json!({"id": "remote", "mode": "hard"}));
    Qemu::system().io(["-f", "raw", "-c", "write -P 7 0 1M", &bench.uri("disk")]).expect_ok();
    monitor.command(name, arguments);
    let jobs = |monitor: &mut Monitor| monitor.command("query-jobs", json!({}));
    let started = |job: &Value| matches!(job["status"].as_str(), Some("running" | "ready"));
    await_that("the job runs", || started(&jobs(&mut monitor)[0]));
    bench.server.signal("STOP");
    let uri = bench.uri("disk");
    let write = ["io", "-f", "raw", "-c", "write -P 8 4M 64k", "-c", "flush", uri.as_str()];
    let guest = Command::new(COWSHED).args(write).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let mut guest = Killed(guest.expect("our own binary runs"));
    bench.await_request("disk");
    // A write that doesn't wait for the target ends within this time.
    std::thread::sleep(Duration::from_millis(500));
    let ended = guest.0.try_wait().expect("a child");
    assert!(ended.is_none(), "the write did not wait for the target: {ended:?}, {}", jobs(&mut monitor));
    monitor.command("block-job-cancel", json!({"device": "m", "force": true}));
    await_that("the write is done", || guest.0.try_wait().expect("a child").is_some());
    assert!(guest.0.wait().expect("a child").success());
    let more = ["-f", "raw", "-c", "read -P 8 4M 64k", "-c", "write -P 9 4M 64k", "-c", "write -P 9 5M 1M", &uri];
    Qemu::system().io(more).expect_ok();
    let refused = monitor.refusal("blockdev-del", &json!({"node-name": "remote"}));
    assert!(refused.contains("in use"), "{refused}");
    // A command that drains the disk does not wait for the target, and holds no other.
    let bitmap = json!({"type": "block-dirty-bitmap-add", "data": {"node": "disk", "name": "b"}});
    monitor.command("transaction", json!({"actions": [bitmap]}));
    Qemu::system().io(["-f", "raw", "-c", "read -P 9 4M 64k", "-c", "write -P 9 6M 64k", &uri]).expect_ok();
    bench.server.signal("CONT");
    await_that("the job is gone", || jobs(&mut monitor) == json!([]));
    bench.await_free(&mut monitor);
    Qemu::system().io(["-f", "raw", "-c", "read -P 9 4M 64k", &uri]).expect_ok();
    if !discards {
        Qemu::system().io(["-f", "raw", "-c", "read -P 7 0 1M", &uri]).expect_ok();
    }
}

#[test]
fn a_cancelled_mirror_lets_the_writes_go_that_it_holds() {
    let mirror =
        json!({"job-id": "m", "device": "disk", "target": "remote", "sync": "top", "copy-mode": "write-blocking"});
    cancelled_job_lets_the_source_go("blockdev-mirror", mirror);
}

#[test]
fn a_cancelled_backup_lets_the_writes_go_that_it_holds() {
    let backup = json!({"job-id": "m", "device": "disk", "target": "remote", "sync": "full", "speed": 65536});
    cancelled_job_lets_the_source_go("blockdev-backup", backup);
}

#[test]
fn cancelled_discarding_backup_releases_held_writes() {
    let backup = json!({"job-id": "m", "device": "disk", "target": "remote", "sync": "full", "speed": 65536, "discard-source": true});
    cancelled_job_lets_the_source_go("blockdev-backup", backup);
}

#[test]
fn cancelled_backup_releases_the_overwrites_it_holds() {
    let backup = json!({"job-id": "m", "device": "disk", "target": "remote", "sync": "none"});
    cancelled_job_lets_the_source_go("blockdev-backup", backup);
}

/// A write of this client to `export`, which has begun when this returns.
fn write_to(bench: &Bench, export: &str, at: &str) -> Killed {
    let write = format!("write -P 8 {at} 64k");
    let client = Command::new(COWSHED)
        .args(["io", "-f", "raw", "-c", &write, "-c", "flush", &bench.uri(export)])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    Killed(client.expect("our own binary runs"))
}

fn await_success(what: &str, client: &mut Killed) {
    await_that(what, || client.0.try_wait().expect("a child").is_some());
    assert!(client.0.wait().expect("a child").success(), "{what}");
}

/// Backups that end together: the users of one disk don't wait for the target of the other.
#[test]
fn cancelled_grouped_backups_let_the_writes_of_each_disk_go() {
    let bench = Bench::start(&[]);
    let mut monitor = bench.monitor();
    monitor.command("block-export-del", json!({"id": "remote", "mode": "hard"}));
    // Another disk, with a target behind the same server.
    let socket = bench.path().join("server/r.sock");
    let remote = json!({"driver": "nbd", "node-name": "remote2", "server": {"type": "unix", "path": socket}});
    monitor.command("blockdev-add", remote);
    Qemu::system().create(&bench.path().join("disk2.raw"), "raw", "", 8 << 20);
    let disk = json!({"driver": "raw", "node-name": "disk2", "file": {"driver": "file", "filename": bench.path().join("disk2.raw")}});
    monitor.command("blockdev-add", disk);
    let export = json!({"type": "nbd", "id": "disk2", "node-name": "disk2", "writable": true});
    monitor.command("block-export-add", export);
    let backup = |number: &str, target: &str| {
        let disk = format!("disk{number}");
        let data = json!({"job-id": format!("m{number}"), "device": disk, "target": target, "sync": "none"});
        json!({"type": "blockdev-backup", "data": data})
    };
    let actions = [backup("", "remote"), backup("2", "remote2")];
    let transaction = json!({"actions": actions, "properties": {"completion-mode": "grouped"}});
    monitor.command("transaction", transaction);
    bench.server.signal("STOP");
    let mut clients = [write_to(&bench, "disk", "4M"), write_to(&bench, "disk2", "4M")];
    ["disk", "disk2"].iter().for_each(|export| bench.await_request(export));
    // A write that doesn't wait for the target ends within this time.
    std::thread::sleep(Duration::from_millis(500));
    for client in &mut clients {
        assert!(client.0.try_wait().expect("a child").is_none(), "a write did not wait for the target");
    }
    monitor.command("job-cancel", json!({"id": "m2"}));
    for client in &mut clients {
        await_success("the write is done", client);
    }
    bench.server.signal("CONT");
    await_that("the jobs are gone", || monitor.command("query-jobs", json!({})) == json!([]));
    bench.await_free(&mut monitor);
}

/// A copy that was too slow for its filter holds no command, and so no client.
#[test]
fn a_snapshot_that_broke_on_a_silent_target_holds_no_command() {
    let bench = Bench::start(&[]);
    let mut monitor = bench.monitor();
    monitor.command("block-export-del", json!({"id": "remote", "mode": "hard"}));
    monitor.command("block-export-del", json!({"id": "disk", "mode": "hard"}));
    let filter = json!({"driver": "copy-before-write", "node-name": "filter", "file": "disk", "target": "remote",
                        "cbw-timeout": 1, "on-cbw-error": "break-snapshot"});
    monitor.command("blockdev-add", filter);
    let export = json!({"type": "nbd", "id": "f", "node-name": "filter", "name": "f", "writable": true});
    monitor.command("block-export-add", export);
    bench.server.signal("STOP");
    await_success("the first write is let go", &mut write_to(&bench, "f", "1M"));
    monitor.command("block-dirty-bitmap-add", json!({"node": "disk", "name": "b"}));
    await_success("the next write passes", &mut write_to(&bench, "f", "3M"));
    // The filter's closing waits for the copy; the disk's next user does not.
    let removal = bench.stuck_command("x-blockdev-remove", json!({"node-name": "filter"}));
    let export = json!({"type": "nbd", "id": "more", "node-name": "disk", "name": "more"});
    monitor.command("block-export-add", export);
    bench.server.signal("CONT");
    removal.join().expect("the filter is closed once its target answers");
    bench.await_free(&mut monitor);
}

/// A copy that goes on behind the cancellation does not discard a client's later writes.
#[test]
fn a_cancelled_backup_that_discards_loses_no_write() {
    let bench = Bench::start(&[]);
    let mut monitor = bench.monitor();
    monitor.command("block-export-del", json!({"id": "remote", "mode": "hard"}));
    Qemu::system().io(["-f", "raw", "-c", "write -P 7 0 8M", &bench.uri("disk")]).expect_ok();
    bench.server.signal("STOP");
    let before = bench.reads(&mut monitor);
    let backup = json!({"job-id": "m", "device": "disk", "target": "remote", "sync": "full", "discard-source": true});
    monitor.command("blockdev-backup", backup);
    bench.await_piece(&mut monitor, before);
    monitor.command("block-job-cancel", json!({"device": "m", "force": true}));
    let uri = bench.uri("disk");
    let write = ["io", "-f", "raw", "-c", "write -P 8 0 64k", "-c", "flush", uri.as_str()];
    let guest = Command::new(COWSHED).args(write).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    // The write waits for no copy that was given up. The piece's data comes back behind it, and discards nothing.
    let mut guest = Killed(guest.expect("our own binary runs"));
    await_that("the guest's write ends", || guest.0.try_wait().expect("a child").is_some_and(|end| end.success()));
    bench.server.signal("CONT");
    await_that("the job is gone", || monitor.command("query-jobs", json!({})) == json!([]));
    Qemu::system().io(["-f", "raw", "-c", "read -P 8 0 64k", "-c", "read -P 7 2M 6M", &uri]).expect_ok();
    bench.await_free(&mut monitor);
}

#[test]
fn a_second_interrupt_ends_a_daemon_at_once() {
    let mut bench = Bench::start(&["--stop-timeout", "0"]);
    let client = bench.stuck_client();
    bench.daemon.signal("INT");
    bench.daemon.await_log("stopping");
    let id = bench.daemon.child().id().to_string();
    tool("kill", &["-INT", &id]);
    await_that("the daemon ends", || bench.daemon.child().try_wait().expect("a child").is_some());
    assert_eq!(bench.daemon.wait().code(), Some(130));
    drop(client);
}
