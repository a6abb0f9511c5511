// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Jobs by command: a mirror under a writing client, states and their events, refusals.

use super::exports::{node, serving, uri};
use super::running::{Client, Running};
use cowshed_testkit::qemu::Qemu;
use serde_json::json;
use std::process::{Command, Stdio};
use std::time::Duration;

/// As [`serving`], with the export `e` of `q` and an empty target `t` of the same size.
fn with_target() -> (Running, Client) {
    let (daemon, mut client) = serving();
    client.command("block-export-add", json!({"type": "nbd", "id": "e", "node-name": "q", "writable": true}));
    Qemu::system().create(&daemon.path("t.qcow2"), "qcow2", "", 16 << 20);
    client.command("blockdev-add", node(&daemon.path("t.qcow2"), "t"));
    (daemon, client)
}

#[test]
fn a_mirror_under_a_writing_client_takes_over_complete() {
    let (daemon, mut client) = with_target();
    let (qemu, uri) = (Qemu::system(), uri(&daemon, "q"));
    qemu.io(["-f", "raw", "-c", "write -P 99 0 16M", &uri]).expect_ok();
    let writes = (0..512).flat_map(|n| ["-c".to_owned(), format!("write -P {} {}k 32k", n % 255 + 1, n * 32)]);
    let mut writer = Command::new(qemu.io_path())
        .args(["-f", "raw"])
        .args(writes)
        .arg(&uri)
        .stdout(Stdio::null())
        .spawn()
        .expect("qemu-io runs");
    client.command("blockdev-mirror", json!({"job-id": "m", "device": "e", "target": "t", "sync": "full"}));
    assert_eq!(client.event("BLOCK_JOB_READY")["device"], "m");
    let jobs = client.command("query-block-jobs", json!({}));
    assert_eq!((&jobs[0]["type"], &jobs[0]["ready"]), (&json!("mirror"), &json!(true)));
    // Commands on the same nodes are refused meanwhile.
    let overlay = json!({"node-name": "q", "snapshot-file": daemon.path("o.qcow2"), "snapshot-node-name": "o"});
    assert!(client.refusal("blockdev-snapshot-sync", overlay).contains("in use by block job: mirror"));
    client.command("job-complete", json!({"id": "m"}));
    let completed = client.event("BLOCK_JOB_COMPLETED");
    assert!(completed.get("error").is_none(), "{completed}");
    assert!(writer.wait().expect("qemu-io ends").success(), "no request may fail");
    assert_eq!(client.command("query-block-exports", json!({}))[0]["node-name"], "t");
    assert_eq!(client.command("query-jobs", json!({})), json!([]));
    client.command("blockdev-del", json!({"node-name": "q"}));
    let target = daemon.path("t.qcow2");
    let (_folder, stopped) = daemon.keep_after_stop();
    stopped.expect("stopped in order");
    qemu.expect_clean(&target);
    let reads: Vec<String> = (0..512).map(|n| format!("read -P {} {}k 32k", n % 255 + 1, n * 32)).collect();
    qemu.io_commands(&target, "qcow2", &reads);
}

/// All of the disk is one piece, and a device that takes its time has it when the pause comes.
#[test]
fn a_pause_during_the_last_piece_holds_a_backup() {
    const MIB: u64 = 1 << 20;
    let (daemon, mut client) = serving();
    for (name, latency_ns) in [("slow", 300_000_000), ("fast", 0)] {
        client.command(
            "blockdev-add",
            json!({"driver": "null-co", "node-name": name, "size": MIB, "latency-ns": latency_ns, "read-zeroes": false}),
        );
    }
    client.command("blockdev-backup", json!({"job-id": "j", "device": "slow", "target": "fast", "sync": "full"}));
    // The read of the piece takes three times as long.
    std::thread::sleep(Duration::from_millis(100));
    client.command("block-job-pause", json!({"device": "j"}));
    loop {
        let jobs = client.command("query-jobs", json!({}));
        let job = jobs.get(0).unwrap_or_else(|| panic!("the job has ended: {jobs}"));
        assert_eq!(job["status"], "paused");
        if job["current-progress"] == MIB {
            break;
        }
        std::thread::yield_now();
    }
    // Nothing but the end is left.
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(client.command("query-jobs", json!({}))[0]["status"], "paused");
    client.command("block-job-resume", json!({"device": "j"}));
    let completed = client.event("BLOCK_JOB_COMPLETED");
    assert!(completed.get("error").is_none(), "{completed}");
    daemon.stop().expect("stopped in order");
}

#[test]
fn write_blocking_mirror_writes_to_the_target_first() {
    let (daemon, mut client) = with_target();
    let (qemu, uri) = (Qemu::system(), uri(&daemon, "q"));
    qemu.io(["-f", "raw", "-c", "write -P 99 0 16M", &uri]).expect_ok();
    let mirror = json!({"job-id": "m", "device": "e", "target": "t", "sync": "full", "copy-mode": "write-blocking",
                        "filter-node-name": "both", "granularity": 4096});
    client.command("blockdev-mirror", mirror.clone());
    // While it copies, too; odd places, zeroes and discards among them.
    let writes = |first: usize| -> Vec<String> {
        (0..200)
            .flat_map(|n| {
                let command = match n % 8 {
                    6 => format!("write -z {} 3k", n * 70_000 + 512),
                    7 => format!("discard {} 64k", n * 65_536),
                    _ => format!("write -P {} {} 1536", (first + n) % 255 + 1, n * 70_000),
                };
                ["-c".to_owned(), command]
            })
            .collect()
    };
    let run = |first: usize| {
        let mut arguments = vec!["-f".to_owned(), "raw".to_owned()];
        arguments.extend(writes(first));
        arguments.push(uri.clone());
        qemu.io(arguments).expect_ok();
    };
    run(1);
    client.event("BLOCK_JOB_READY");
    let nodes = client.command("query-named-block-nodes", json!({"flat": true}));
    let filter = nodes.as_array().expect("a list").iter().find(|node| node["node-name"] == "both").expect("a filter");
    assert_eq!((&filter["drv"], filter["children"].as_array().map(Vec::len)), (&json!("mirror"), Some(2)));
    run(100);
    // The target has the written data. Nothing is left to be copied but ranges that a discard left open.
    let in_step = |client: &mut Client| client.command("query-block-jobs", json!({}))[0]["actively-synced"].clone();
    while in_step(&mut client) != json!(true) {}
    qemu.io(["-f", "raw", "-c", "write -P 200 123 10000", "-c", "write -z 1M 64k", &uri]).expect_ok();
    assert_eq!(in_step(&mut client), json!(true), "a write that is over is on the target");
    client.command("job-complete", json!({"id": "m"}));
    let completed = client.event("BLOCK_JOB_COMPLETED");
    assert!(completed.get("error").is_none(), "{completed}");
    assert_eq!(client.command("query-block-exports", json!({}))[0]["node-name"], "t");
    assert!(client.refusal("blockdev-del", json!({"node-name": "both"})).contains("Failed to find node"));
    client.command("block-export-del", json!({"id": "e"}));
    let (source, target) = (daemon.path("a.qcow2"), daemon.path("t.qcow2"));
    let (_folder, stopped) = daemon.keep_after_stop();
    stopped.expect("stopped in order");
    qemu.expect_clean(&target);
    assert!(qemu.is_equal((&source, "qcow2"), (&target, "qcow2")));
}

#[test]
fn cancelled_write_blocking_mirror_frees_its_source() {
    let (daemon, mut client) = with_target();
    let (qemu, uri) = (Qemu::system(), uri(&daemon, "q"));
    let mirror = json!({"job-id": "m", "device": "q", "target": "t", "sync": "none", "copy-mode": "write-blocking"});
    client.command("blockdev-mirror", mirror);
    client.event("BLOCK_JOB_READY");
    qemu.io(["-f", "raw", "-c", "write -P 5 1M 1M", &uri]).expect_ok();
    // The disk's size stays while both ends are written.
    assert!(
        client.refusal("block_resize", json!({"node-name": "q", "size": 32 << 20})).contains("in use by block job")
    );
    client.command("job-cancel", json!({"id": "m"}));
    client.event("BLOCK_JOB_CANCELLED");
    assert_eq!(client.command("query-block-exports", json!({}))[0]["node-name"], "q");
    qemu.io(["-f", "raw", "-c", "write -P 6 2M 1M", &uri]).expect_ok();
    client.command("blockdev-del", json!({"node-name": "t"}));
    let (source, target) = (daemon.path("a.qcow2"), daemon.path("t.qcow2"));
    let (_folder, stopped) = daemon.keep_after_stop();
    stopped.expect("stopped in order");
    qemu.io_commands(&source, "qcow2", &["read -P 5 1M 1M".to_owned(), "read -P 6 2M 1M".to_owned()]).expect_ok();
    qemu.io_commands(&target, "qcow2", &["read -P 5 1M 1M".to_owned(), "read -P 0 2M 1M".to_owned()]).expect_ok();
}

#[test]
fn a_mirror_replaces_a_filter_and_takes_a_target_for_zero() {
    let (daemon, mut client) = with_target();
    let (qemu, uri) = (Qemu::system(), uri(&daemon, "q"));
    qemu.io(["-f", "raw", "-c", "write -P 3 1M 1M", &uri]).expect_ok();
    client.command(
        "block_set_io_throttle",
        json!({"id": "q", "iops": 0, "iops_rd": 0, "iops_wr": 0, "bps": 1u64 << 40,
                                                   "bps_rd": 0, "bps_wr": 0}),
    );
    let exported = client.command("query-block-exports", json!({}))[0]["node-name"].clone();
    assert_ne!(exported, "q", "a throttle filter stands there");
    let mut mirror = json!({"job-id": "m", "device": "e", "target": "t", "sync": "full", "target-is-zero": true});
    mirror["replaces"] = json!("none");
    assert!(client.refusal("blockdev-mirror", mirror.clone()).contains("node-name='none'"));
    mirror["replaces"] = json!("t");
    assert!(
        client.refusal("blockdev-mirror", mirror.clone()).starts_with("Cannot replace 't' by a node mirrored from 'q'")
    );
    mirror["replaces"] = exported;
    client.command("blockdev-mirror", mirror);
    // Zeroes aren't copied.
    assert_eq!(client.event("BLOCK_JOB_READY")["len"], 1 << 20);
    client.command("job-complete", json!({"id": "m"}));
    client.event("BLOCK_JOB_COMPLETED");
    assert_eq!(client.command("query-block-exports", json!({}))[0]["node-name"], "t", "the filter is gone with it");
    client.command("quit", json!({}));
    let (source, target) = (daemon.path("a.qcow2"), daemon.path("t.qcow2"));
    let (_folder, stopped) = daemon.keep_after_stop();
    stopped.expect("stopped in order");
    assert!(qemu.is_equal((&source, "qcow2"), (&target, "qcow2")));
}

#[test]
fn a_mirror_that_is_ready_can_end_as_a_copy() {
    let (daemon, mut client) = with_target();
    let qemu = Qemu::system();
    qemu.io(["-f", "raw", "-c", "write -P 7 1M 3M", &uri(&daemon, "q")]).expect_ok();
    client.command("blockdev-mirror", json!({"job-id": "m", "device": "q", "target": "t", "sync": "full"}));
    client.event("BLOCK_JOB_READY");
    client.command("block-job-cancel", json!({"device": "m"}));
    client.event("BLOCK_JOB_COMPLETED");
    assert_eq!(client.command("query-block-exports", json!({}))[0]["node-name"], "q");
    client.command("quit", json!({}));
    let (source, target) = (daemon.path("a.qcow2"), daemon.path("t.qcow2"));
    let (_folder, stopped) = daemon.keep_after_stop();
    stopped.expect("stopped in order");
    assert!(qemu.is_equal((&source, "qcow2"), (&target, "qcow2")));
}

#[test]
fn jobs_pause_slow_down_and_are_cancelled() {
    let (daemon, mut client) = with_target();
    // An empty disk has nothing to be copied to an empty one.
    Qemu::system().io(["-f", "raw", "-c", "write -P 99 0 16M", &uri(&daemon, "q")]).expect_ok();
    let mirror = json!({"job-id": "m", "device": "q", "target": "t", "sync": "full", "speed": 1 << 20});
    client.command("blockdev-mirror", mirror.clone());
    assert_eq!(client.refusal("blockdev-mirror", mirror), "Need a root block node");
    assert_eq!(
        client.refusal("block-stream", json!({"job-id": "s", "device": "q"})),
        "Node 'q' is busy: block device is in use by block job: mirror"
    );
    client.command("job-pause", json!({"id": "m"}));
    assert_eq!(client.command("query-jobs", json!({}))[0]["status"], "paused");
    assert!(client.refusal("job-pause", json!({"id": "m"})).contains("already paused"));
    assert!(client.refusal("job-complete", json!({"id": "m"})).contains("cannot accept command verb 'complete'"));
    client.command("block-job-set-speed", json!({"device": "m", "speed": 2 << 20}));
    client.command("job-resume", json!({"id": "m"}));
    client.command("job-cancel", json!({"id": "m"}));
    assert_eq!(client.event("BLOCK_JOB_CANCELLED")["speed"], 2 << 20);
    assert_eq!(client.refusal("job-pause", json!({"id": "m"})), "Job not found");
    let error = client.execute("block-job-cancel", json!({"device": "m"})).expect_err("is gone");
    assert_eq!(error["class"], "DeviceNotActive");
    // A job that runs when the daemon stops is cancelled.
    client.command(
        "blockdev-mirror",
        json!({"job-id": "n", "device": "q", "target": "t", "sync": "full", "speed": 1024}),
    );
    daemon.stop().expect("stopped in order");
}

/// A job that waits for years by its first speed goes by the second one.
#[test]
fn jobs_that_wait_go_by_their_new_speed() {
    let daemon = Running::start(Vec::new());
    let mut client = daemon.client();
    for name in ["q", "t"] {
        let null = json!({"driver": "null-co", "node-name": name, "size": 8 << 20, "read-zeroes": false});
        client.command("blockdev-add", null);
    }
    for (kind, event) in [("blockdev-mirror", "BLOCK_JOB_READY"), ("blockdev-backup", "BLOCK_JOB_COMPLETED")] {
        client.command(kind, json!({"job-id": "j", "device": "q", "target": "t", "sync": "full", "speed": 1}));
        while client.command("query-block-jobs", json!({}))[0]["offset"] == 0 {
            std::thread::yield_now();
        }
        client.command("block-job-set-speed", json!({"device": "j", "speed": 1_u64 << 40}));
        client.event(event);
        if kind == "blockdev-mirror" {
            client.command("block-job-cancel", json!({"device": "j"}));
            client.event("BLOCK_JOB_COMPLETED");
        }
    }
    daemon.stop().expect("stopped in order");
}

#[test]
fn create_job_waits_to_be_dismissed() {
    let (daemon, mut client) = serving();
    let options = json!({"driver": "file", "filename": daemon.path("new.raw"), "size": 1 << 20});
    client.command("blockdev-create", json!({"job-id": "c", "options": options}));
    loop {
        let jobs = client.command("query-jobs", json!({}));
        if jobs[0]["status"] == "concluded" {
            assert!(jobs[0].get("error").is_none(), "{jobs}");
            break;
        }
    }
    assert_eq!(std::fs::metadata(daemon.path("new.raw")).expect("a file").len(), 1 << 20);
    client.command("job-dismiss", json!({"id": "c"}));
    assert_eq!(client.command("query-jobs", json!({})), json!([]));
    daemon.stop().expect("stopped in order");
}

/// Waits for the end of a job that isn't dismissed by itself; its error.
pub fn concluded(client: &mut Client, id: &str) -> Option<String> {
    loop {
        let jobs = client.command("query-jobs", json!({}));
        let job = jobs.as_array().expect("a list").iter().find(|job| job["id"] == id).expect("the job").clone();
        if job["status"] == "concluded" {
            client.command("job-dismiss", json!({"id": id}));
            return job.get("error").map(|error| error.as_str().expect("a text").to_owned());
        }
    }
}

#[test]
fn images_are_created_in_the_files_of_nodes() {
    let (daemon, mut client) = serving();
    let path = daemon.path("new.qcow2");
    let file = json!({"driver": "file", "filename": path, "size": 0});
    client.command("blockdev-create", json!({"job-id": "f", "options": file}));
    assert_eq!(concluded(&mut client, "f"), None);
    client.command("blockdev-add", json!({"driver": "file", "filename": path, "node-name": "file"}));
    let options = json!({"driver": "qcow2", "file": "file", "size": 1 << 20, "cluster-size": 4096, "version": "v3",
                         "lazy-refcounts": true, "refcount-bits": 32, "compression-type": "zstd", "extended-l2": false,
                         "preallocation": "metadata"});
    client.command("blockdev-create", json!({"job-id": "c", "options": options}));
    assert_eq!(concluded(&mut client, "c"), None);
    client.command("blockdev-add", json!({"driver": "qcow2", "node-name": "new", "file": "file"}));
    // An open file is not overwritten.
    client.command(
        "blockdev-create",
        json!({"job-id": "c", "options": {"driver": "qcow2", "file": "file", "size": 512}}),
    );
    assert!(concluded(&mut client, "c").expect("is refused").contains("Permission conflict on node 'file'"));
    for (options, words) in [
        (json!({"driver": "qcow2", "file": "none", "size": 512}), "Cannot find device='none' nor node-name='none'"),
        (json!({"driver": "qcow2", "file": {"driver": "null-co", "size": 1 << 20}, "size": 512}), "keeps nothing"),
    ] {
        client.command("blockdev-create", json!({"job-id": "w", "options": options}));
        let error = concluded(&mut client, "w").expect("is refused");
        assert!(error.contains(words), "{error}");
    }
    for driver in ["raw", "nbd", "host_device"] {
        let create = json!({"job-id": "n", "options": {"driver": driver}});
        assert_eq!(client.refusal("blockdev-create", create), "Driver does not support blockdev-create");
    }
    let unknown = json!({"job-id": "n", "options": {"driver": "nosuch"}});
    assert!(client.refusal("blockdev-create", unknown).contains("does not accept value 'nosuch'"));
    assert_eq!(client.command("query-jobs", json!({})), json!([]));
    client.command("blockdev-del", json!({"node-name": "new"}));
    client.command("blockdev-del", json!({"node-name": "file"}));
    let wrong =
        json!({"driver": "qcow2", "file": {"driver": "file", "filename": path}, "size": 512, "cluster-size": 1000});
    client.command("blockdev-create", json!({"job-id": "w", "options": wrong}));
    let error = concluded(&mut client, "w").expect("is refused");
    assert_eq!(error, "Cluster size must be a power of two between 512 and 2048k");
    let qemu = Qemu::system();
    qemu.expect_clean(&path);
    let info = qemu.info(&path, "qcow2");
    assert_eq!((&info["virtual-size"], &info["cluster-size"]), (&json!(1 << 20), &json!(4096)));
    let data = &info["format-specific"]["data"];
    assert_eq!((&data["compression-type"], &data["refcount-bits"]), (&json!("zstd"), &json!(32)));
    // Over an old image, through a node that is opened for it.
    let options = json!({"driver": "qcow2", "file": {"driver": "file", "filename": path}, "size": 1 << 20,
                         "version": "v2", "backing-file": "a.qcow2", "backing-fmt": "qcow2"});
    client.command("blockdev-create", json!({"job-id": "c", "options": options}));
    assert_eq!(concluded(&mut client, "c"), None);
    let (_folder, stopped) = daemon.keep_after_stop();
    stopped.expect("stopped in order");
    qemu.expect_clean(&path);
    assert_eq!(qemu.info(&path, "qcow2")["backing-filename"], "a.qcow2");
}

#[test]
fn failed_requests_of_exports_are_events_and_no_flood() {
    let (daemon, mut client) = serving();
    let path = daemon.path("e.raw");
    let qemu = Qemu::system();
    qemu.create(&path, "raw", "", 1 << 20);
    let rules =
        json!([{"event": "none", "iotype": "read", "errno": 5}, {"event": "none", "iotype": "write", "errno": 28}]);
    let file = json!({"driver": "blkdebug", "image": {"driver": "file", "filename": path}, "inject-error": rules});
    client.command("blockdev-add", json!({"driver": "raw", "node-name": "bad", "file": file}));
    let export = json!({"type": "nbd", "id": "e", "node-name": "bad", "writable": true});
    client.command("block-export-add", export);
    let mut commands = vec!["-f", "raw", "-c", "write 64k 4k"];
    commands.extend(["-c", "read 0 4k"].repeat(50));
    let uri = uri(&daemon, "bad");
    commands.push(&uri);
    qemu.io(&commands);
    let first = client.event("BLOCK_IO_ERROR");
    assert_eq!((&first["device"], &first["node-name"]), (&json!("e"), &json!("bad")));
    assert_eq!((&first["action"], &first["qom-path"]), (&json!("report"), &json!("")));
    // The newest of the others is reported, when its time has come.
    let second = client.event("BLOCK_IO_ERROR");
    assert_eq!((&second["operation"], second.get("nospace")), (&json!("read"), None));
    assert!(second["reason"].as_str().expect("a text").contains("e.raw"), "{second}");
    client.command("query-jobs", json!({}));
    assert!(!client.events.iter().any(|event| event["event"] == "BLOCK_IO_ERROR"));
    daemon.stop().expect("stopped in order");
}

#[test]
fn a_corrupt_image_is_an_event_once() {
    let (daemon, mut client) = serving();
    let path = daemon.path("c.qcow2");
    let qemu = Qemu::system();
    qemu.create(&path, "qcow2", "", 4 << 20);
    qemu.io_commands(&path, "qcow2", &["write -P 1 0 1M".to_owned()]).expect_ok();
    // The entry of the disk's second cluster points to the L1 table.
    let mut bytes = std::fs::read(&path).expect("the image");
    let field = |bytes: &[u8], at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
    let l1 = field(&bytes, 40);
    let l2 = (field(&bytes, l1 as usize) & 0x00ff_ffff_ffff_fe00) as usize;
    bytes[l2 + 8..l2 + 16].copy_from_slice(&(l1 | 1 << 63).to_be_bytes());
    std::fs::write(&path, bytes).expect("the image");
    client.command("blockdev-add", node(&path, "c"));
    client.command("block-export-add", json!({"type": "nbd", "id": "e", "node-name": "c", "writable": true}));
    let uri = uri(&daemon, "c");
    qemu.io(["-f", "raw", "-c", "write -P 2 64k 4k", "-c", "write -P 2 64k 4k", &uri]);
    let event = client.event("BLOCK_IMAGE_CORRUPTED");
    assert_eq!((&event["device"], &event["node-name"], &event["fatal"]), (&json!("e"), &json!("c"), &json!(true)));
    assert_eq!(event["msg"], "Preventing invalid write on metadata (overlaps with active L1 table)");
    // The place where the write would have landed.
    assert_eq!((&event["offset"], &event["size"]), (&json!(l1), &json!(4096)));
    client.command("query-jobs", json!({}));
    assert!(!client.events.iter().any(|event| event["event"] == "BLOCK_IMAGE_CORRUPTED"), "only once");
    // Closing it reports that too: the last writes may not be there.
    let error = daemon.stop().expect_err("the image is corrupt");
    assert!(error.to_string().contains("marked as corrupt"), "{error}");
}

#[test]
fn damage_met_by_a_read_is_one_event() {
    let (daemon, mut client) = serving();
    let path = daemon.path("c.qcow2");
    let qemu = Qemu::system();
    qemu.create(&path, "qcow2", "", 4 << 20);
    qemu.io_commands(&path, "qcow2", &["write -P 1 0 1M".to_owned()]).expect_ok();
    // The entry of the disk's second cluster points far behind the end of the file.
    let mut bytes = std::fs::read(&path).expect("the image");
    let field = |bytes: &[u8], at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
    let l2 = (field(&bytes, field(&bytes, 40) as usize) & 0x00ff_ffff_ffff_fe00) as usize;
    bytes[l2 + 8..l2 + 16].copy_from_slice(&((1u64 << 40) | 1 << 63).to_be_bytes());
    std::fs::write(&path, bytes).expect("the image");
    let overlay = daemon.path("o.qcow2");
    qemu.img(["create", "-q", "-u", "-f", "qcow2", "-F", "qcow2", "-b", "c.qcow2", &overlay.to_string_lossy(), "4M"]);
    let mut options = node(&overlay, "top");
    options["backing"] = node(&path, "c");
    client.command("blockdev-add", options);
    client.command("block-export-add", json!({"type": "nbd", "id": "e", "node-name": "top", "writable": true}));
    let uri = uri(&daemon, "top");
    qemu.io(["-f", "raw", "-c", "read 64k 4k", "-c", "read 64k 4k", &uri]);
    let event = client.event("BLOCK_IMAGE_CORRUPTED");
    assert_eq!((&event["device"], &event["node-name"], &event["fatal"]), (&json!("e"), &json!("c"), &json!(false)));
    assert!(event["msg"].as_str().expect("a text").contains("c.qcow2"), "{event}");
    client.command("query-jobs", json!({}));
    assert!(!client.events.iter().any(|event| event["event"] == "BLOCK_IMAGE_CORRUPTED"), "only once");
    daemon.stop().expect("stopped in order");
}

#[test]
fn an_amendment_is_a_job_that_is_no_block_job() {
    let (daemon, mut client) = serving();
    let amend = |options: serde_json::Value| json!({"job-id": "j", "node-name": "q", "options": options});
    let encrypt = json!({"format": "luks", "state": "active", "new-secret": "s"});
    for (options, error) in [
        (json!({"driver": "qcow2"}), None),
        (json!({"driver": "qcow2", "encrypt": encrypt}), Some("image is not encrypted, can't amend")),
    ] {
        client.command("x-blockdev-amend", amend(options));
        while client.event("JOB_STATUS_CHANGE")["status"] != "concluded" {}
        let jobs = client.command("query-jobs", json!({}));
        assert_eq!((&jobs[0]["type"], jobs[0]["error"].as_str()), (&json!("amend"), error), "{jobs}");
        assert_eq!(client.command("query-block-jobs", json!({})), json!([]));
        client.command("job-dismiss", json!({"id": "j"}));
    }
    assert!(!client.events.iter().any(|event| event["event"] == "BLOCK_JOB_COMPLETED"));
    daemon.stop().expect("stopped in order");
}

/// Users can't take them, also when the job that was to have them has failed.
#[test]
fn generated_names_of_failed_jobs_stay_out_of_reach() {
    let (_daemon, mut client) = with_target();
    let job = |command: &str, client: &mut Client| {
        let mut arguments = json!({"job-id": "j", "device": "q", "target": "q", "sync": "full"});
        match command {
            "blockdev-mirror" => arguments["copy-mode"] = json!("write-blocking"),
            "block-stream" => arguments = json!({"job-id": "1", "device": "q"}),
            _ => {}
        }
        client.refusal(command, arguments)
    };
    for command in ["blockdev-backup", "blockdev-mirror", "block-stream"] {
        job(command, &mut client);
    }
    let null = |name: &str| json!({"driver": "null-co", "node-name": name, "size": 512});
    for number in 0..64 {
        let name = format!("#block{number:03}");
        let refused = client.refusal("blockdev-add", null(&name));
        let is_right = refused.contains(&format!("Invalid node-name: '{name}'"))
            || refused.contains(&format!("Duplicate nodes with node-name='{name}'"));
        assert!(is_right, "{refused}");
    }
}
