// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `drive-backup`, `drive-mirror` and `block-job-change`.

use super::commits::{SIZE, backing_in, chain};
use super::exports::{serving, uri};
use super::load::Load;
use super::running::{Running, temp_folder};
use cowshed_daemon::{Drive, Step};
use cowshed_testkit::qemu::Qemu;
use serde_json::json;

#[test]
fn a_drive_backup_makes_its_target_and_closes_it() {
    let cases = [("full", "qcow2"), ("full", "raw"), ("top", "qcow2"), ("top", "qed")];
    for (number, (sync, format)) in cases.into_iter().enumerate() {
        let (daemon, mut client, mut model) = chain("cluster_size=64k");
        let (target, before) = (daemon.path("copy"), model.clone());
        let arguments = json!({"job-id": "k", "device": "e", "target": target, "format": format, "sync": sync,
                               "speed": 4 << 20});
        client.command("drive-backup", arguments.clone());
        // The disk takes a second backup, but not onto the file of the first one.
        let refusal = client.refusal("drive-backup", arguments);
        assert!(refusal.contains("Failed to get \"write\" lock"), "{refusal}");
        Load::start(&uri(&daemon, "t"), &mut model, number as u64).join();
        let _ = client.execute("block-job-set-speed", json!({"device": "k", "speed": 0}));
        let completed = client.event("BLOCK_JOB_COMPLETED");
        assert!(completed.get("error").is_none(), "{completed}");
        let nodes = client.command("query-named-block-nodes", json!({"flat": true}));
        let is_copy = |node: &serde_json::Value| node["file"].as_str().is_some_and(|file| file.ends_with("/copy"));
        assert!(!nodes.as_array().expect("a list").iter().any(is_copy), "the target is closed: {nodes}");
        let (folder, stopped) = daemon.keep_after_stop();
        stopped.expect("stopped in order");
        let (qemu, copy) = (Qemu::system(), folder.path().join("copy"));
        assert!(qemu.content(&copy, format) == before, "{sync} {format}: not as it was");
        assert!(qemu.content(&folder.path().join("t"), "qcow2") == model, "the disk itself is wrong");
        if sync == "top" {
            assert_eq!(backing_in(&copy, format), json!(folder.path().join("m")));
        }
    }
}

/// The target's header names the disk itself, which is being written: no node stands for it.
#[test]
fn the_target_of_overwritten_parts_opens_without_its_backing_file() {
    let (daemon, mut client, _) = chain("cluster_size=64k");
    for format in ["qcow2", "qed"] {
        let target = daemon.path(&format!("copy.{format}"));
        let arguments = json!({"job-id": "k", "device": "e", "target": target, "format": format, "sync": "none"});
        client.command("drive-backup", arguments);
        client.command("block-job-cancel", json!({"device": "k"}));
        client.event("BLOCK_JOB_CANCELLED");
        assert_eq!(backing_in(&target, format), json!(daemon.path("t")));
    }
    daemon.stop().expect("stopped in order");
}

#[test]
fn a_transaction_starts_all_drive_backups_or_leaves_no_file() {
    let (daemon, mut client, model) = chain("cluster_size=64k");
    let backup = |target: &str, id: &str| {
        let data = json!({"device": "e", "target": daemon.path(target), "sync": "full", "job-id": id});
        json!({"type": "drive-backup", "data": data})
    };
    let abort = json!({"type": "abort", "data": {}});
    client.refusal("transaction", json!({"actions": [backup("copy", "k"), abort]}));
    assert!(!daemon.path("copy").exists());
    assert_eq!(client.command("query-jobs", json!({})), json!([]));
    let bitmap = json!({"type": "block-dirty-bitmap-add", "data": {"node": "t", "name": "since"}});
    client.command("transaction", json!({"actions": [backup("copy", "k"), bitmap]}));
    assert!(client.event("BLOCK_JOB_COMPLETED").get("error").is_none());
    let (folder, stopped) = daemon.keep_after_stop();
    stopped.expect("stopped in order");
    assert!(Qemu::system().content(&folder.path().join("copy"), "qcow2") == model);
}

#[test]
fn a_drive_mirror_moves_a_disk_to_a_new_file() {
    for (mode, sync) in [("absolute-paths", "full"), ("existing", "full"), ("absolute-paths", "top")] {
        let (daemon, mut client, mut model) = chain("cluster_size=64k");
        let (qemu, target) = (Qemu::system(), daemon.path("new"));
        if mode == "existing" {
            qemu.create(&target, "qcow2", "cluster_size=4k", SIZE);
        }
        let load = Load::start(&uri(&daemon, "t"), &mut model, 7);
        let arguments = json!({"job-id": "k", "device": "e", "target": target, "mode": mode, "sync": sync,
                               "format": "qcow2", "node-name": "moved", "unmap": false});
        client.command("drive-mirror", arguments);
        client.event("BLOCK_JOB_READY");
        client.command("block-job-complete", json!({"device": "k"}));
        let completed = client.event("BLOCK_JOB_COMPLETED");
        assert!(completed.get("error").is_none(), "{completed}");
        load.join();
        assert_eq!(client.command("query-block-exports", json!({}))[0]["node-name"], "moved");
        let (folder, stopped) = daemon.keep_after_stop();
        stopped.expect("stopped in order");
        qemu.expect_clean(&folder.path().join("new"));
        assert!(qemu.content(&folder.path().join("new"), "qcow2") == model, "{mode} {sync}");
    }
}

#[test]
fn drive_mirror_closes_its_copy_or_leaves_nothing() {
    let (daemon, mut client, model) = chain("cluster_size=64k");
    let target = daemon.path("copy");
    let arguments = |more: serde_json::Value| {
        let mut all = json!({"job-id": "k", "device": "e", "target": target, "sync": "full"});
        for (key, value) in more.as_object().expect("an object") {
            all[key] = value.clone();
        }
        all
    };
    for (more, reason) in [
        (json!({"granularity": 1000}), "expects a power of 2"),
        (json!({"format": "nosuch"}), "nosuch"),
        (json!({"node-name": "b"}), "Duplicate"),
        (json!({"replaces": "b"}), "a node-name must be provided when replacing a named node of the graph"),
        (json!({"replaces": "b", "node-name": "n"}), "Node 'b' is busy: node is used as backing hd of 'l'"),
        (json!({"mode": "existing"}), "copy"),
    ] {
        let refusal = client.refusal("drive-mirror", arguments(more));
        assert!(refusal.contains(reason), "{refusal}");
        assert!(!target.exists(), "{reason}");
    }
    client.command("drive-mirror", arguments(json!({})));
    client.event("BLOCK_JOB_READY");
    client.command("block-job-cancel", json!({"device": "k"}));
    client.event("BLOCK_JOB_COMPLETED");
    assert_eq!(client.command("query-block-exports", json!({}))[0]["node-name"], "t");
    let nodes = client.command("query-named-block-nodes", json!({"flat": true}));
    let names = nodes.as_array().expect("a list").iter().filter_map(|node| node["node-name"].as_str());
    assert!(!names.clone().any(|name| name.starts_with("drive-target")), "{nodes}");
    let (folder, stopped) = daemon.keep_after_stop();
    stopped.expect("stopped in order");
    assert!(Qemu::system().content(&folder.path().join("copy"), "qcow2") == model);
}

#[test]
fn a_mirror_holds_writes_as_soon_as_it_is_told() {
    let (daemon, mut client) = serving();
    let (qemu, uri) = (Qemu::system(), uri(&daemon, "q"));
    client.command("block-export-add", json!({"type": "nbd", "id": "e", "node-name": "q", "writable": true}));
    let mut model = vec![99; 16 << 20];
    qemu.io(["-f", "raw", "-c", "write -P 99 0 16M", &uri]).expect_ok();
    Qemu::system().create(&daemon.path("copy"), "qcow2", "", 16 << 20);
    client.command("blockdev-add", super::exports::node(&daemon.path("copy"), "copy"));
    // It does nothing at all by itself: its speed doesn't let it go on, or it is paused.
    let mirror = json!({"job-id": "m", "device": "e", "target": "copy", "sync": "full", "speed": 1});
    client.command("blockdev-mirror", mirror);
    client.command("job-pause", json!({"id": "m"}));
    let change = json!({"id": "m", "type": "mirror", "copy-mode": "write-blocking"});
    client.command("block-job-change", change);
    let written = |client: &mut super::running::Client| {
        let stats = client.command("query-blockstats", json!({"query-nodes": true}));
        let stats = stats.as_array().expect("a list").iter().find(|one| one["node-name"] == "copy").cloned();
        stats.expect("is listed")["stats"]["wr_bytes"].as_u64().expect("a number")
    };
    let before = written(&mut client);
    qemu.io(["-f", "raw", "-c", "write -P 7 8M 64k", "-c", "write -P 8 12M 512", &uri]).expect_ok();
    model[8 << 20..(8 << 20) + 65536].fill(7);
    model[12 << 20..(12 << 20) + 512].fill(8);
    assert_eq!(written(&mut client) - before, 65536 + 512, "what is over is on the target");
    client.command("job-resume", json!({"id": "m"}));
    client.command("block-job-set-speed", json!({"device": "m", "speed": 0}));
    client.event("BLOCK_JOB_READY");
    client.command("block-job-cancel", json!({"device": "m"}));
    client.event("BLOCK_JOB_COMPLETED");
    let (folder, stopped) = daemon.keep_after_stop();
    stopped.expect("stopped in order");
    assert!(qemu.content(&folder.path().join("copy"), "qcow2") == model);
}

#[test]
fn a_mirror_is_told_to_hold_writes_while_it_runs() {
    let (daemon, mut client) = serving();
    let (qemu, uri) = (Qemu::system(), uri(&daemon, "q"));
    client.command("block-export-add", json!({"type": "nbd", "id": "e", "node-name": "q", "writable": true}));
    qemu.io(["-f", "raw", "-c", "write -P 99 0 16M", &uri]).expect_ok();
    // Slow, so that it is reported in the middle.
    let arguments = json!({"job-id": "m", "device": "e", "target": daemon.path("copy"), "sync": "full",
                           "speed": 4 << 20});
    client.command("drive-mirror", arguments);
    let change = |id: &str, kind: &str, mode: &str| match kind {
        "mirror" => json!({"id": id, "type": kind, "copy-mode": mode}),
        _ => json!({"id": id, "type": kind}),
    };
    assert!(client.refusal("block-job-change", change("zz", "mirror", "background")).contains("zz"));
    assert!(client.refusal("block-job-change", change("m", "commit", "")).contains("commit"));
    client.command("block-job-change", change("m", "mirror", "background"));
    client.command("block-job-change", change("m", "mirror", "write-blocking"));
    assert!(client.refusal("block-job-change", change("m", "mirror", "background")).contains("background"));
    client.command("block-job-change", change("m", "mirror", "write-blocking"));
    let mut model = vec![99; 16 << 20];
    let load = Load::start(&uri, &mut model, 3);
    client.command("block-job-set-speed", json!({"device": "m", "speed": 0}));
    client.event("BLOCK_JOB_READY");
    load.join();
    let in_step = |client: &mut super::running::Client| {
        client.command("query-block-jobs", json!({}))[0]["actively-synced"].clone()
    };
    while in_step(&mut client) != json!(true) {
        std::thread::yield_now();
    }
    qemu.io(["-f", "raw", "-c", "write -P 7 12345 100000", &uri]).expect_ok();
    model[12345..112_345].fill(7);
    assert_eq!(in_step(&mut client), json!(true), "a write that is over is on the target");
    client.command("job-complete", json!({"id": "m"}));
    let completed = client.event("BLOCK_JOB_COMPLETED");
    assert!(completed.get("error").is_none(), "{completed}");
    let (folder, stopped) = daemon.keep_after_stop();
    stopped.expect("stopped in order");
    qemu.expect_clean(&folder.path().join("copy"));
    assert!(qemu.content(&folder.path().join("copy"), "qcow2") == model);
}

#[test]
fn drive_cache_options_override_its_mode() {
    for (settings, direct, no_flush, writeback) in [
        ("cache=none", true, false, true),
        ("cache=none,cache.direct=off", false, false, true),
        ("cache.direct=off,cache=none", false, false, true),
        ("cache=unsafe,cache.no-flush=off", false, false, true),
        ("cache=writeback,cache.direct=on,cache.no-flush=on", true, true, true),
        ("cache=none,cache.writeback=off", true, false, false),
        ("cache.writeback=on,cache=directsync", true, false, true),
    ] {
        let folder = temp_folder();
        let path = folder.path().join("a.qcow2");
        Qemu::system().create(&path, "qcow2", "", 1 << 20);
        let drive = Drive::parse(&format!("file={},{settings}", path.display()), "d", true).expect("right");
        let daemon = Running::start_in(folder, vec![Step::drive("--drive", drive)]);
        let nodes = daemon.client().command("query-named-block-nodes", json!({"flat": true}));
        let node = nodes.as_array().expect("a list").iter().find(|node| node["node-name"] == "d").expect("there");
        let expected = json!({"direct": direct, "no-flush": no_flush, "writeback": writeback});
        assert_eq!(node["cache"], expected, "{settings}");
        daemon.stop().expect("stopped in order");
    }
}

#[test]
fn unused_file_is_replaced_and_one_in_use_not() {
    let (daemon, mut client, model) = chain("cluster_size=64k");
    let target = daemon.path("copy");
    let backup = |target: &std::path::Path| json!({"job-id": "k", "device": "e", "target": target, "format": "raw", "sync": "full"});
    std::fs::write(&target, b"older").expect("a file");
    client.command("drive-backup", backup(&target));
    client.event("BLOCK_JOB_COMPLETED");
    assert!(std::fs::read(&target).expect("a file") == model, "the older file is replaced");
    // A node without locks is a user too, and a link is never replaced.
    let node = json!({"driver": "raw", "node-name": "unlocked",
                      "file": {"driver": "file", "filename": target, "locking": "off"}});
    client.command("blockdev-add", node);
    let link = daemon.path("link");
    std::os::unix::fs::symlink(daemon.path("b"), &link).expect("a link");
    for used in [target.clone(), daemon.path("b"), daemon.path("t"), link] {
        let before = std::fs::read(&used).expect("a file");
        let refusal = client.refusal("drive-backup", backup(&used));
        assert!(refusal.contains("lock") || refusal.contains("mode 'existing'"), "{refusal}");
        assert!(std::fs::read(&used).expect("a file") == before, "{}", used.display());
    }
    daemon.stop().expect("stopped in order");
}

/// As in QEMU, with the protocol before the path too, relative or not, and names as long as a file's can be.
#[test]
fn new_images_have_any_name_that_a_file_can_have() {
    let (daemon, mut client, model) = chain("cluster_size=64k");
    let path = |name: &str| daemon.path(name).display().to_string();
    let up = "../".repeat(std::env::current_dir().expect("a folder").components().count());
    let long = "n".repeat(255);
    // Cut inside of a letter it would be no text.
    let letters = "\u{fc}".repeat(127);
    let names = [
        (format!("file:{}", path("absolute")), "absolute"),
        (format!("file:{up}{}", path("relative").trim_start_matches('/')), "relative"),
        (path("with:colon"), "with:colon"),
        (path(&long), long.as_str()),
        (path(&letters), letters.as_str()),
    ];
    for (command, end) in [("drive-backup", None), ("drive-mirror", Some("block-job-cancel"))] {
        for (target, name) in &names {
            let arguments = json!({"job-id": "k", "device": "e", "target": target, "format": "qcow2", "sync": "full"});
            client.command(command, arguments);
            if let Some(end) = end {
                client.event("BLOCK_JOB_READY");
                client.command(end, json!({"device": "k"}));
            }
            assert!(client.event("BLOCK_JOB_COMPLETED").get("error").is_none(), "{command} {target}");
            std::fs::rename(daemon.path(name), daemon.path("copy")).expect("the new image");
            assert!(Qemu::system().content(&daemon.path("copy"), "qcow2") == model, "{command} {target}");
        }
    }
    for (number, (file, name)) in names.iter().enumerate() {
        let overlay = format!("s{number}");
        let arguments = json!({"device": "e", "snapshot-file": file, "snapshot-node-name": overlay});
        client.command("blockdev-snapshot-sync", arguments);
        assert_eq!(client.command("query-block-exports", json!({}))[0]["node-name"], json!(overlay));
        assert!(daemon.path(name).exists(), "{file}");
    }
    let existing = path("existing");
    Qemu::system().create(&daemon.path("existing"), "qcow2", "", SIZE);
    let arguments = json!({"device": "e", "snapshot-file": format!("file:{existing}"), "mode": "existing"});
    client.command("blockdev-snapshot-sync", arguments);
    let folder = std::fs::read_dir(daemon.folder.path()).expect("a folder");
    let left =
        folder.map(|entry| entry.expect("a file").file_name()).find(|name| name.to_string_lossy().ends_with(".tmp"));
    assert_eq!(left, None);
    let (folder, stopped) = daemon.keep_after_stop();
    stopped.expect("stopped in order");
    for (_, name) in &names {
        let top = folder.path().join("link");
        std::fs::rename(folder.path().join(name), &top).expect("an overlay");
        Qemu::system().expect_clean(&top);
        assert!(Qemu::system().content(&top, "qcow2") == model, "{name}");
        std::fs::rename(&top, folder.path().join(name)).expect("no other overlay");
    }
}
