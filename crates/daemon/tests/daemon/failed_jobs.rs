// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The files that jobs made for themselves go when the jobs fail, and no other file does.

use super::exports::uri;
use super::running::{Client, Running};
use cowshed_testkit::qemu::Qemu;
use serde_json::{Value, json};
use std::path::Path;

const SIZE: u64 = 8 << 20;

/// A daemon with a full disk as the node `q`, whose reads fail from 4 MiB on while `fails`.
fn serving(fails: bool) -> (Running, Client) {
    let daemon = Running::start(Vec::new());
    let (qemu, path) = (Qemu::system(), daemon.path("a.raw"));
    qemu.create(&path, "raw", "", SIZE);
    qemu.io_commands(&path, "raw", &["write -P 9 0 8M".to_owned()]).expect_ok();
    let sector = (4 << 20) / 512;
    let rules = if fails { json!([{"event": "none", "iotype": "read", "sector": sector}]) } else { json!([]) };
    let file = json!({"driver": "blkdebug", "image": {"driver": "file", "filename": path}, "inject-error": rules});
    let mut client = daemon.client();
    client.command("blockdev-add", json!({"driver": "raw", "node-name": "q", "file": file}));
    (daemon, client)
}

/// The arguments of a job to the file `copy`.
fn job(daemon: &Running, more: &Value) -> Value {
    let mut all = json!({"job-id": "k", "device": "q", "target": daemon.path("copy"), "sync": "full"});
    for (key, value) in more.as_object().expect("an object") {
        all[key] = value.clone();
    }
    all
}

/// The files of the folder, without sockets and the disk.
fn files(folder: &Path) -> Vec<String> {
    let list = std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("a file").file_name());
    let mut names: Vec<String> = list.map(|name| name.into_string().expect("text")).collect();
    names.retain(|name| name != "a.raw" && !name.ends_with(".sock"));
    names.sort();
    names
}

fn expect_failure(client: &mut Client) {
    let completed = client.event("BLOCK_JOB_COMPLETED");
    assert_eq!(completed["error"], "Input/output error", "{completed}");
}

#[test]
fn failed_job_removes_only_its_own_file() {
    for command in ["drive-backup", "drive-mirror"] {
        for format in ["raw", "qcow2"] {
            let (daemon, mut client) = serving(true);
            client.command(command, job(&daemon, &json!({"format": format})));
            expect_failure(&mut client);
            assert_eq!(files(daemon.folder.path()), [""; 0], "{command} {format}");
            // Another owner's file stays, also after the job's failure.
            let target = daemon.path("copy");
            Qemu::system().create(&target, format, "", SIZE);
            client.command(command, job(&daemon, &json!({"format": format, "mode": "existing"})));
            expect_failure(&mut client);
            assert_eq!(files(daemon.folder.path()), ["copy"], "{command} {format} existing");
            // It had another image before, which the job replaced by its own.
            client.command(command, job(&daemon, &json!({"format": format})));
            expect_failure(&mut client);
            assert_eq!(files(daemon.folder.path()), [""; 0], "{command} {format} replaced");
            daemon.stop().expect("stopped in order");
        }
    }
}

#[test]
fn the_backups_of_a_transaction_remove_their_files_one_by_one() {
    let (daemon, mut client) = serving(true);
    let whole = daemon.path("whole.raw");
    Qemu::system().create(&whole, "raw", "", SIZE);
    let file = json!({"driver": "file", "filename": whole});
    client.command("blockdev-add", json!({"driver": "raw", "node-name": "w", "file": file}));
    let backup = |device: &str, target: &str| {
        let data = json!({"job-id": target, "device": device, "target": daemon.path(target), "format": "qcow2",
                          "sync": "full"});
        json!({"type": "drive-backup", "data": data})
    };
    client.command("transaction", json!({"actions": [backup("q", "bad"), backup("w", "good")]}));
    let mut ended = [client.event("BLOCK_JOB_COMPLETED"), client.event("BLOCK_JOB_COMPLETED")];
    ended.sort_by_key(|data| data["device"].to_string());
    assert_eq!((&ended[0]["device"], ended[0].get("error").is_some()), (&json!("bad"), true), "{ended:?}");
    assert_eq!((&ended[1]["device"], ended[1].get("error").is_some()), (&json!("good"), false), "{ended:?}");
    assert_eq!(files(daemon.folder.path()), ["good", "whole.raw"]);
    daemon.stop().expect("stopped in order");
}

#[test]
fn a_file_that_is_used_by_then_stays() {
    for is_active in [true, false] {
        let (daemon, mut client) = serving(true);
        let arguments = json!({"format": "raw", "speed": 1, "on-source-error": "stop"});
        client.command("drive-backup", job(&daemon, &arguments));
        let file = json!({"driver": "file", "filename": daemon.path("copy"), "locking": "off", "read-only": true});
        let node = json!({"driver": "raw", "node-name": "r", "read-only": true, "file": file, "active": is_active});
        client.command("blockdev-add", node);
        client.command("block-job-set-speed", json!({"device": "k", "speed": 0}));
        client.event("BLOCK_JOB_ERROR");
        client.command("block-job-cancel", json!({"device": "k", "force": true}));
        client.event("BLOCK_JOB_CANCELLED");
        assert_eq!(files(daemon.folder.path()), ["copy"], "active: {is_active}");
        daemon.stop().expect("stopped in order");
    }
}

#[test]
fn cancel_removes_partial_targets_only() {
    let slow = json!({"format": "raw", "speed": 1});
    let always = json!({"format": "qcow2", "speed": 1, "sync": "bitmap", "bitmap": "since", "bitmap-mode": "always"});
    for (command, more, stays) in [
        ("drive-backup", slow.clone(), false),
        ("drive-mirror", slow, false),
        // It holds the past until it is cancelled.
        ("drive-backup", json!({"format": "qcow2", "sync": "none"}), true),
        // The bitmap, or the source, lacks the parts that the copy has.
        ("drive-backup", always, true),
        ("drive-backup", json!({"format": "raw", "speed": 1, "discard-source": true}), true),
    ] {
        let (daemon, mut client) = serving(false);
        client.command("block-dirty-bitmap-add", json!({"node": "q", "name": "since"}));
        let address = json!({"type": "unix", "data": {"path": daemon.path("n.sock")}});
        client.command("nbd-server-start", json!({"addr": address}));
        client.command("block-export-add", json!({"type": "nbd", "id": "e", "node-name": "q", "writable": true}));
        Qemu::system().io(["-f", "raw", "-c", "write -P 1 0 4M", &uri(&daemon, "q")]).expect_ok();
        client.command(command, job(&daemon, &more));
        client.command("block-job-cancel", json!({"device": "k"}));
        client.event("BLOCK_JOB_CANCELLED");
        assert_eq!(files(daemon.folder.path()).len(), usize::from(stays), "{command} {more}");
        daemon.stop().expect("stopped in order");
    }
}

#[test]
fn ready_mirror_keeps_its_file_when_cancelled() {
    for force in [false, true] {
        let (daemon, mut client) = serving(false);
        client.command("drive-mirror", job(&daemon, &json!({"format": "raw"})));
        client.event("BLOCK_JOB_READY");
        client.command("block-job-cancel", json!({"device": "k", "force": force}));
        client.event(if force { "BLOCK_JOB_CANCELLED" } else { "BLOCK_JOB_COMPLETED" });
        assert_eq!(files(daemon.folder.path()), ["copy"], "{force}");
        daemon.stop().expect("stopped in order");
    }
}

/// The copy has been whole: a later failure takes nothing from it.
#[test]
fn a_mirror_that_was_ready_keeps_its_file_when_it_fails() {
    let (daemon, mut client) = serving(false);
    let image = json!({"driver": "file", "filename": daemon.path("b.raw")});
    Qemu::system().create(&daemon.path("b.raw"), "raw", "", SIZE);
    // A write makes all reads fail that come after it.
    let file = json!({
        "driver": "blkdebug", "image": image,
        "set-state": [{"event": "write_aio", "state": 1, "new_state": 2}],
        "inject-error": [{"event": "read_aio", "iotype": "read", "state": 2}],
    });
    client.command("blockdev-add", json!({"driver": "raw", "node-name": "b", "file": file}));
    let address = json!({"type": "unix", "data": {"path": daemon.path("n.sock")}});
    client.command("nbd-server-start", json!({"addr": address}));
    client.command("block-export-add", json!({"type": "nbd", "id": "e", "node-name": "b", "writable": true}));
    client.command("drive-mirror", job(&daemon, &json!({"device": "b", "format": "raw"})));
    client.event("BLOCK_JOB_READY");
    Qemu::system().io(["-f", "raw", "-c", "write -P 1 0 64k", &uri(&daemon, "b")]).expect_ok();
    let completed = client.event("BLOCK_JOB_COMPLETED");
    assert!(completed["error"].is_string(), "{completed}");
    assert_eq!(files(daemon.folder.path()), ["b.raw", "copy"]);
    daemon.stop().expect("stopped in order");
}

#[test]
fn failed_new_image_leaves_no_file_and_keeps_older() {
    let (daemon, mut client) = serving(false);
    let path = daemon.path("new");
    let ended = |client: &mut Client| {
        while client.event("JOB_STATUS_CHANGE")["status"] != "concluded" {}
        let jobs = client.command("query-jobs", json!({}));
        assert!(jobs[0]["error"].is_string(), "{jobs}");
        client.command("job-dismiss", json!({"id": "k"}));
    };
    // More than any file system has.
    let file = json!({"driver": "file", "filename": path, "size": 1_u64 << 62, "preallocation": "full"});
    client.command("blockdev-create", json!({"job-id": "k", "options": file}));
    ended(&mut client);
    assert!(!path.exists());
    std::fs::write(&path, b"older").expect("a file");
    client.command("blockdev-create", json!({"job-id": "k", "options": file}));
    ended(&mut client);
    assert!(path.exists());
    let qcow2 = json!({"driver": "qcow2", "file": {"driver": "file", "filename": path}, "size": 1 << 20,
                       "cluster-size": 3});
    client.command("blockdev-create", json!({"job-id": "k", "options": qcow2}));
    ended(&mut client);
    assert!(path.exists());
    daemon.stop().expect("stopped in order");
}
