// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The graph changes under requests of the exports beside NBD: snapshots, a mirror, limits, reopening and new sizes.

use super::process::{COWSHED, Monitor, Serving, page, text};
use cowshed_testkit::programs::tool;
use cowshed_testkit::qemu::{Qemu, temp_dir};
use cowshed_testkit::random::{Random, seeds};
use cowshed_testkit::vhost::FrontEnd;
use cowshed_testkit::waiting::await_that;
use serde_json::{Value, json};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const DISK_BYTES: u64 = 16 * MIB;
/// A cluster each.
const PLACES: u64 = DISK_BYTES >> 16;
const WRITE: u32 = 1;
const FLUSH: u32 = 4;

/// A daemon with the node `d`, one export of it, and the page of metrics.
fn start(folder: &Path, export: &str) -> (Serving, Monitor, String) {
    tool("qemu-img", &["create", "-q", "-f", "qcow2", text(&folder.join("d.qcow2")), &DISK_BYTES.to_string()]);
    let arguments = ["serve", "-k", "n.sock", "--monitor", "m.sock", "--metrics", "127.0.0.1:0"];
    let disk = ["--drive", "file=d.qcow2,id=d,discard=unmap", "--export", export];
    let mut daemon = Serving::start(folder, &[&arguments[..], &disk].concat());
    let metrics = loop {
        let line = daemon.line();
        if line.starts_with("metrics: ") {
            break line;
        }
    };
    (daemon, Monitor::connect(&folder.join("m.sock")), metrics)
}

fn limits(id: &str, key: &str, value: u64) -> Value {
    let mut all = json!({"id": id, "bps": 0, "bps_rd": 0, "bps_wr": 0, "iops": 0, "iops_rd": 0, "iops_wr": 0});
    all[key] = json!(value);
    all
}

/// A counter or gauge of the page of metrics.
#[track_caller]
fn metric(address: &str, name: &str) -> f64 {
    let page = page(address);
    let line = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {name} in {page}")).parse().expect("a number")
}

/// A guest's driver that writes and reads without a pause, and knows each byte.
struct Load {
    driver: FrontEnd,
    random: Random,
    known: Vec<u8>,
    requests: u64,
}

impl Load {
    fn step(&mut self) {
        let place = self.random.below(self.known.len() as u64);
        let value = 1 + self.random.below(255) as u8;
        assert_eq!(self.driver.request(WRITE, place * 128, &[value; 4096], 0).0, 0, "place {place}");
        self.known[place as usize] = value;
        let other = self.random.below(self.known.len() as u64);
        let (status, bytes) = self.driver.request(0, other * 128, &[], 4096);
        assert!(status == 0 && bytes == [self.known[other as usize]; 4096], "place {other}: {status}");
        self.requests += 2;
    }

    /// Goes on while the monitor does something, and for some requests behind it.
    fn while_monitor(&mut self, monitor: &mut Monitor, work: impl FnOnce(&mut Monitor) + Send) {
        std::thread::scope(|scope| {
            let working = scope.spawn(|| work(monitor));
            while !working.is_finished() {
                self.step();
            }
            working.join().expect("the monitor's part");
        });
        (0..20).for_each(|_| self.step());
    }
}

#[test]
fn a_guest_goes_on_while_its_disk_is_copied_and_limited() {
    let folder = temp_dir();
    let at = |name: &str| folder.path().join(name);
    let export = "vhost-user-blk,id=e,node-name=d,addr.type=unix,addr.path=v.sock,writable=on";
    let (daemon, mut monitor, metrics) = start(folder.path(), export);
    let seed = seeds(1).next().expect("a seed");
    eprintln!("seed {seed}");
    let mut driver = FrontEnd::resume(&at("v.sock"), None, &mut None);
    let channel = driver.back_end_channel();
    assert_eq!(driver.config(0, 8), (DISK_BYTES / 512).to_le_bytes());
    driver.request(FLUSH, 0, &[], 0);
    let mut load = Load { driver, random: Random::new(seed), known: vec![0; PLACES as usize], requests: 0 };
    (0..50).for_each(|_| load.step());

    load.while_monitor(&mut monitor, |monitor| {
        let snapshot =
            json!({"node-name": "d", "snapshot-file": at("s.qcow2"), "snapshot-node-name": "s", "format": "qcow2"});
        monitor.command("blockdev-snapshot-sync", snapshot);
    });

    tool("qemu-img", &["create", "-q", "-f", "qcow2", text(&at("t.qcow2")), &DISK_BYTES.to_string()]);
    load.while_monitor(&mut monitor, |monitor| {
        monitor.command("blockdev-add", json!({"driver": "file", "node-name": "tf", "filename": at("t.qcow2")}));
        monitor.command("blockdev-add", json!({"driver": "qcow2", "node-name": "t", "file": "tf"}));
        monitor.command("blockdev-mirror", json!({"job-id": "m", "device": "s", "target": "t", "sync": "full"}));
        await_that("the mirror", || monitor.command("query-jobs", json!({}))[0]["status"] == "ready");
        monitor.command("job-complete", json!({"id": "m"}));
        await_that("the end of the mirror", || monitor.command("query-jobs", json!({})) == json!([]));
    });
    let exports = monitor.command("query-block-exports", json!({}));
    let named = exports.as_array().expect("a list").iter().find(|export| export["id"] == "e").cloned();
    assert_eq!(named.expect("the export")["node-name"], "t", "{exports}");

    load.while_monitor(&mut monitor, |monitor| {
        monitor.command("block_set_io_throttle", limits("e", "iops", 200));
    });
    // The bucket holds a tenth of a second.
    let (before, begun) = (load.requests, Instant::now());
    (0..50).for_each(|_| load.step());
    let (count, taken) = (load.requests - before, begun.elapsed());
    assert!(taken >= Duration::from_millis(300), "{count} requests at 200 a second took {taken:?}");
    let waits = |kind: &str| metric(&metrics, &format!("cowshed_throttle_{kind}{{node=\"throttle-e\",group=\"e\"}}"));
    assert!(waits("waits_total") > 10.0 && waits("wait_seconds_total") > 0.1);
    load.while_monitor(&mut monitor, |monitor| {
        monitor.command("block_set_io_throttle", limits("e", "iops", 0));
    });

    load.while_monitor(&mut monitor, |monitor| {
        for discard in ["unmap", "ignore"] {
            let again =
                json!({"driver": "qcow2", "node-name": "t", "file": "tf", "discard": discard, "lazy-refcounts": false});
            monitor.command("blockdev-reopen", json!({"options": [again]}));
        }
    });

    load.while_monitor(&mut monitor, |monitor| {
        monitor.command("block_resize", json!({"node-name": "t", "size": 2 * DISK_BYTES}));
    });
    assert_eq!(FrontEnd::back_end_message(&channel), 2, "CONFIG_CHANGE_MSG");
    assert_eq!(load.driver.config(0, 8), (2 * DISK_BYTES / 512).to_le_bytes());
    load.known.resize(2 * PLACES as usize, 0);
    (0..100).for_each(|_| load.step());
    let counted: f64 = ["read", "write"]
        .map(|kind| metric(&metrics, &format!("cowshed_export_operations_total{{export=\"e\",kind=\"{kind}\"}}")))
        .iter()
        .sum();
    assert!(counted >= load.requests as f64, "{counted} of {}", load.requests);
    assert_eq!(load.driver.request(FLUSH, 0, &[], 0).0, 0);
    let known = std::mem::take(&mut load.known);
    drop(load);
    daemon.stop();

    let qemu = Qemu::system();
    ["d.qcow2", "s.qcow2", "t.qcow2"].iter().for_each(|name| qemu.expect_clean(&at(name)));
    qemu.img(["convert", "-f", "qcow2", "-O", "raw", text(&at("t.qcow2")), text(&at("t.raw"))]).expect_ok();
    let copy = File::open(at("t.raw")).expect("a disk");
    assert_eq!(copy.metadata().expect("its length").len(), 2 * DISK_BYTES);
    for (place, value) in known.iter().enumerate() {
        let mut bytes = [0xff; 4096];
        copy.read_exact_at(&mut bytes, (place as u64) << 16).expect("a read");
        assert!(bytes == [*value; 4096], "seed {seed}: place {place} is not {value}");
    }
}

/// Reads for a second or two at a mebibyte in one; the time, and how much the export and its limits have counted.
fn limited(monitor: &mut Monitor, metrics: &str, read: impl FnOnce()) {
    monitor.command("block_set_io_throttle", limits("e", "bps_rd", MIB));
    let begun = Instant::now();
    read();
    let taken = begun.elapsed();
    assert!(taken >= Duration::from_millis(1500), "2 MiB at 1 MiB a second took {taken:?}");
    let bytes = metric(metrics, "cowshed_export_bytes_total{export=\"e\",kind=\"read\"}");
    assert!((2.0 * MIB as f64..4.0 * MIB as f64).contains(&bytes), "{bytes}");
    assert!(metric(metrics, "cowshed_throttle_waits_total{node=\"throttle-e\",group=\"e\"}") >= 1.0);
    // A change of the graph, and its end.
    monitor.command("block_set_io_throttle", limits("e", "bps_rd", 0));
    assert_eq!(monitor.command("query-jobs", json!({})), json!([]));
}

#[test]
fn a_file_has_limits_a_snapshot_and_a_new_size() {
    let folder = temp_dir();
    let at = |name: &str| folder.path().join(name);
    File::create(at("m")).expect("a mount point");
    let (daemon, mut monitor, metrics) = start(folder.path(), "fuse,id=e,node-name=d,mountpoint=m,writable=on");
    let file = File::options().read(true).write(true).open(at("m")).expect("it opens");
    file.write_all_at(&vec![5; 4 << 20], 0).and_then(|()| file.sync_all()).expect("a write");
    limited(&mut monitor, &metrics, || {
        tool(
            "dd",
            &[&format!("if={}", text(&at("m"))), "of=/dev/null", "iflag=direct", "bs=256k", "count=8", "status=none"],
        );
    });
    let overlay =
        json!({"node-name": "d", "snapshot-file": at("s.qcow2"), "snapshot-node-name": "s", "format": "qcow2"});
    monitor.command("blockdev-snapshot-sync", overlay);
    file.write_all_at(&[6; 4096], MIB).and_then(|()| file.sync_all()).expect("a write");
    monitor.command("block_resize", json!({"node-name": "s", "size": 2 * DISK_BYTES}));
    await_that("the new length", || file.metadata().expect("its length").len() == 2 * DISK_BYTES);
    file.write_all_at(&[7; 4096], DISK_BYTES).and_then(|()| file.sync_all()).expect("a write");
    drop(file);
    daemon.stop();
    let reads = ["read -P 5 0 1M", "read -P 6 1M 4k", "read -P 7 16M 4k"].iter().flat_map(|read| ["-c", *read]);
    Qemu::system().io(reads.chain([text(&at("s.qcow2"))])).expect_ok();
    Qemu::system().io(["-c", "read -P 5 0 4M", text(&at("d.qcow2"))]).expect_ok();
}

#[test]
fn a_download_has_limits_and_goes_on_over_a_mirror() {
    let folder = temp_dir();
    let at = |name: &str| folder.path().join(name);
    let export = "http,id=e,node-name=d,addr.type=unix,addr.path=h.sock,path=/disk";
    let (daemon, mut monitor, metrics) = start(folder.path(), export);
    let write = format!("nbd+unix:///d?socket={}", text(&at("n.sock")));
    Qemu::system().io(["-f", "raw", "-c", "write -P 5 0 4M", &write]).expect_ok();
    let curl = |range: &str, to: &str| {
        let socket = at("h.sock");
        let begin = ["-sSf", "--unix-socket", text(&socket), "-r", range, "-o"];
        tool("curl", &[&begin[..], &[text(&at(to)), "http://localhost/disk"]].concat());
    };
    limited(&mut monitor, &metrics, || curl("0-2097151", "part"));
    assert!(std::fs::read(at("part")).expect("a file") == vec![5; 2 << 20]);
    tool(COWSHED, &["create", "-q", "-f", "qcow2", text(&at("t.qcow2")), &DISK_BYTES.to_string()]);
    monitor.command(
        "blockdev-add",
        json!({"driver": "qcow2", "node-name": "t", "file": {"driver": "file", "filename": at("t.qcow2")}}),
    );
    monitor.command("blockdev-mirror", json!({"job-id": "m", "device": "d", "target": "t", "sync": "full"}));
    await_that("the mirror", || monitor.command("query-jobs", json!({}))[0]["status"] == "ready");
    curl("0-4095", "beside");
    monitor.command("job-complete", json!({"id": "m"}));
    await_that("the end of the mirror", || monitor.command("query-jobs", json!({})) == json!([]));
    curl("0-4194303", "behind");
    assert!(std::fs::read(at("beside")).expect("a file") == vec![5; 4096]);
    assert!(std::fs::read(at("behind")).expect("a file") == vec![5; 4 << 20]);
    daemon.stop();
    Qemu::system().expect_clean(&at("t.qcow2"));
}
