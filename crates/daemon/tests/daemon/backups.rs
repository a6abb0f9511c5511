// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `blockdev-backup` by command, alone and in transactions, while clients write.

use super::commits::{SIZE, backing_of, chain};
use super::exports::{node, uri};
use super::load::Load;
use super::running::{Client, Running};
use cowshed_testkit::qemu::Qemu;
use serde_json::{Value, json};

/// An empty image as node `name`.
fn add_target(daemon: &Running, client: &mut Client, name: &str, options: &str) {
    let path = daemon.path(name);
    Qemu::system().create(&path, "qcow2", options, SIZE);
    let mut options = node(&path, name);
    options["backing"] = Value::Null;
    client.command("blockdev-add", options);
}

#[test]
fn a_backup_holds_the_disk_as_it_was() {
    for (number, options) in ["", "cluster_size=4k", "cluster_size=512k"].iter().enumerate() {
        for (sync, compress) in [("full", false), ("full", true), ("top", false)] {
            let (daemon, mut client, mut model) = chain("cluster_size=64k");
            let backing = daemon.path("m");
            let on_top = format!("backing_file={},backing_fmt=qcow2", backing.display());
            let options = if sync == "top" { format!("{options},{on_top}") } else { (*options).to_owned() };
            add_target(&daemon, &mut client, "copy", options.trim_start_matches(','));
            let mut before = model.clone();
            let load = Load::start(&uri(&daemon, "t"), &mut model, number as u64);
            load.join();
            before.copy_from_slice(&model);
            // Slow, so that the clients overwrite most of it before its turn comes.
            let arguments = json!({"job-id": "k", "device": "e", "target": "copy", "sync": sync, "compress": compress,
                                   "speed": 2 << 20, "filter-node-name": "f"});
            client.command("blockdev-backup", arguments);
            let load = Load::start(&uri(&daemon, "t"), &mut model, 100 + number as u64);
            let past = json!({"type": "nbd", "id": "past", "node-name": "t", "name": "past", "writable": true});
            assert!(
                client
                    .refusal("block-export-add", past)
                    .contains("Permission conflict on node 't': permissions 'write'")
            );
            assert!(client.refusal("blockdev-del", json!({"node-name": "copy"})).contains("in use"));
            load.join();
            // The clients may have seen to the rest already.
            let _ = client.execute("block-job-set-speed", json!({"device": "k", "speed": 0}));
            let completed = client.event("BLOCK_JOB_COMPLETED");
            assert!(completed.get("error").is_none(), "{completed}");
            let (folder, stopped) = daemon.keep_after_stop();
            stopped.expect("stopped in order");
            let qemu = Qemu::system();
            for name in ["copy", "t"] {
                qemu.expect_clean(&folder.path().join(name));
            }
            assert!(qemu.content(&folder.path().join("copy"), "qcow2") == before, "{sync}: not as it was");
            assert!(qemu.content(&folder.path().join("t"), "qcow2") == model, "{sync}: the disk itself is wrong");
            if sync == "top" {
                assert_eq!(backing_of(&folder.path().join("copy")), json!(backing));
            }
        }
    }
}

#[test]
fn a_backup_without_sync_saves_what_is_overwritten() {
    let (daemon, mut client, _) = chain("cluster_size=64k");
    add_target(&daemon, &mut client, "copy", "");
    client.command("blockdev-backup", json!({"job-id": "k", "device": "e", "target": "copy", "sync": "none"}));
    let qemu = Qemu::system();
    qemu.io(["-f", "raw", "-c", "write -P 99 2M 64k", "-c", "write -z 5M 64k", &uri(&daemon, "t")]).expect_ok();
    client.command("job-cancel", json!({"id": "k"}));
    client.event("BLOCK_JOB_CANCELLED");
    let (folder, stopped) = daemon.keep_after_stop();
    stopped.expect("stopped in order");
    let reads = ["read -P 4 2M 64k", "read -P 5 5M 64k", "read -P 0 0 1M"].map(str::to_owned);
    qemu.io_commands(&folder.path().join("copy"), "qcow2", &reads).expect_ok();
}

/// A target `copy` whose file fails writes behind its first megabyte.
fn add_failing_target(daemon: &Running, client: &mut Client, times: u64) {
    let path = daemon.path("copy");
    Qemu::system().create(&path, "raw", "", SIZE);
    let rule =
        json!({"event": "none", "iotype": "write", "sector": 2048, "sectors": 8192, "errno": 28, "times": times});
    let file = json!({"driver": "blkdebug", "image": {"driver": "file", "filename": path}, "inject-error": [rule]});
    client.command("blockdev-add", json!({"driver": "raw", "node-name": "copy", "file": file}));
}

#[test]
fn a_full_target_pauses_a_backup_or_ends_it() {
    for policy in ["enospc", "report", "ignore"] {
        let (daemon, mut client, model) = chain("cluster_size=64k");
        add_failing_target(&daemon, &mut client, if policy == "report" { 1_000_000 } else { 2 });
        let arguments = json!({"job-id": "k", "device": "e", "target": "copy", "sync": "full",
                               "on-target-error": policy});
        client.command("blockdev-backup", arguments);
        let action = if policy == "enospc" { "stop" } else { policy };
        assert_eq!(client.event("BLOCK_JOB_ERROR"), json!({"device": "k", "operation": "write", "action": action}));
        if policy == "enospc" {
            let jobs = client.command("query-block-jobs", json!({}));
            assert_eq!((&jobs[0]["io-status"], &jobs[0]["status"]), (&json!("nospace"), &json!("paused")));
            client.command("job-resume", json!({"id": "k"}));
            client.event("BLOCK_JOB_ERROR");
            client.command("job-resume", json!({"id": "k"}));
        }
        let completed = client.event("BLOCK_JOB_COMPLETED");
        assert_eq!(completed.get("error").is_some(), policy == "report", "{completed}");
        Qemu::system().io(["-f", "raw", "-c", "write -P 77 0 64k", &uri(&daemon, "t")]).expect_ok();
        client.command("blockdev-del", json!({"node-name": "copy"}));
        let (folder, stopped) = daemon.keep_after_stop();
        stopped.expect("stopped in order");
        if policy != "report" {
            assert!(Qemu::system().content(&folder.path().join("copy"), "raw") == model, "{policy}");
        }
    }
}

#[test]
fn what_cannot_be_saved_breaks_the_write_or_the_backup() {
    for policy in ["break-guest-write", "break-snapshot"] {
        let (daemon, mut client, _) = chain("cluster_size=64k");
        add_failing_target(&daemon, &mut client, 1_000_000);
        let arguments = json!({"job-id": "k", "device": "e", "target": "copy", "sync": "none", "on-cbw-error": policy});
        client.command("blockdev-backup", arguments);
        let qemu = Qemu::system();
        let written = qemu.io(["-f", "raw", "-c", "write -P 77 2M 64k", &uri(&daemon, "t")]);
        let failed = written.code != 0 || written.stdout.contains("failed") || written.stderr.contains("failed");
        assert_eq!(failed, policy == "break-guest-write", "{policy}: {}", written.stdout);
        if failed {
            client.command("job-cancel", json!({"id": "k"}));
            client.event("BLOCK_JOB_CANCELLED");
        } else {
            assert!(client.event("BLOCK_JOB_COMPLETED").get("error").is_some(), "the backup is spoiled");
        }
        let expected = if failed { 4 } else { 77 };
        let read = format!("read -P {expected} 2M 64k");
        let read = qemu.io(["-f", "raw", "-c", &read, &uri(&daemon, "t")]).expect_ok();
        assert!(!read.stdout.contains("failed"), "{}", read.stdout);
        daemon.stop().expect("stopped in order");
    }
}

#[test]
fn a_transaction_starts_all_backups_at_one_moment_or_none() {
    let (daemon, mut client, mut model) = chain("cluster_size=64k");
    add_target(&daemon, &mut client, "copy", "");
    add_target(&daemon, &mut client, "u", "");
    add_target(&daemon, &mut client, "small", "");
    client.command("block_resize", json!({"node-name": "small", "size": 1 << 20}));
    let backup = |id: &str, device: &str, target: &str| {
        let data = json!({"job-id": id, "device": device, "target": target, "sync": "full"});
        json!({"type": "blockdev-backup", "data": data})
    };
    let snapshot = json!({"type": "blockdev-snapshot-sync", "data":
        {"node-name": "u", "snapshot-file": daemon.path("over"), "snapshot-node-name": "over"}});
    for last in [backup("k2", "u", "small"), backup("k2", "t", "u"), json!({"type": "abort", "data": {}})] {
        let actions = json!({"actions": [backup("k", "t", "copy"), snapshot, last]});
        client.refusal("transaction", actions);
        assert_eq!(client.command("query-jobs", json!({})), json!([]));
        assert!(!daemon.path("over").exists());
        assert_eq!(client.command("query-block-exports", json!({}))[0]["node-name"], "t");
    }
    let before = model.clone();
    client.command("transaction", json!({"actions": [backup("k", "t", "copy"), snapshot]}));
    Load::start(&uri(&daemon, "t"), &mut model, 3).join();
    let completed = client.event("BLOCK_JOB_COMPLETED");
    assert!(completed.get("error").is_none(), "{completed}");
    let (folder, stopped) = daemon.keep_after_stop();
    stopped.expect("stopped in order");
    let qemu = Qemu::system();
    assert!(qemu.content(&folder.path().join("copy"), "qcow2") == before, "not as it was");
    assert!(qemu.content(&folder.path().join("t"), "qcow2") == model, "the disk itself is wrong");
    assert_eq!(backing_of(&folder.path().join("over")), json!(folder.path().join("u")));
}

#[test]
fn backups_that_cannot_be_are_refused_by_name() {
    let (daemon, mut client, _) = chain("cluster_size=64k");
    add_target(&daemon, &mut client, "copy", "");
    for (sync, target, words) in [
        ("incremental", "copy", "must provide a valid bitmap name for 'incremental' sync mode"),
        ("bitmap", "copy", "must provide a valid bitmap name for 'bitmap' sync mode"),
        ("full", "t", "Source and target cannot be the same"),
        ("full", "m", "Could not create node: Block node is read-only"),
        ("full", "none", "Cannot find device='none' nor node-name='none'"),
    ] {
        let backup = json!({"job-id": "b", "device": "t", "target": target, "sync": sync});
        let refusal = client.refusal("blockdev-backup", backup);
        assert!(refusal.contains(words), "{sync} {target}: {refusal}");
    }
    assert_eq!(client.command("query-jobs", json!({})), json!([]));
    daemon.stop().expect("stopped in order");
}
