// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Jobs by command: a mirror under a writing client, states and their events, refusals.

use super::exports::{node, serving, uri};
use super::running::{Client, Running};
use cowshed_testkit::qemu::Qemu;
use serde_json::json;
use std::process::{Command, Stdio};

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
    // What works on the same nodes is refused meanwhile.
    let overlay = json!({"node-name": "q", "snapshot-file": daemon.path("o.qcow2")});
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
    let mirror = json!({"job-id": "m", "device": "q", "target": "t", "sync": "full", "speed": 1 << 20});
    client.command("blockdev-mirror", mirror.clone());
    assert_eq!(
        client.refusal("blockdev-mirror", mirror),
        "Node 'q' is busy: block device is in use by block job: mirror"
    );
    client.command("job-pause", json!({"id": "m"}));
    assert_eq!(client.command("query-jobs", json!({}))[0]["status"], "paused");
    assert!(client.refusal("job-pause", json!({"id": "m"})).contains("cannot accept command verb 'pause'"));
    assert!(client.refusal("job-complete", json!({"id": "m"})).contains("cannot be completed"));
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

#[test]
fn a_file_is_created_by_a_job_that_waits_to_be_dismissed() {
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
