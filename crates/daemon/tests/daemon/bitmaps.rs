// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Dirty bitmaps by command, as NBD contexts, and in incremental backups; real clients read them.

use super::exports::{node, uri};
use super::running::{Client, Running};
use cowshed_testkit::qemu::Qemu;
use serde_json::{Value, json};
use std::path::Path;

const SIZE: u64 = 8 << 20;

/// A daemon that serves an image, as node `t` and export `e`.
fn served() -> (Running, Client) {
    let daemon = Running::start(Vec::new());
    let mut client = daemon.client();
    let path = daemon.path("t");
    Qemu::system().create(&path, "qcow2", "", SIZE);
    client.command("blockdev-add", node(&path, "t"));
    let socket = daemon.path("n.sock");
    client.command("nbd-server-start", json!({"addr": {"type": "unix", "data": {"path": socket}}}));
    (daemon, client)
}

fn export(client: &mut Client, writable: bool, bitmaps: Value) {
    let mut options = json!({"type": "nbd", "id": "e", "node-name": "t", "name": "t", "writable": writable});
    options["bitmaps"] = bitmaps;
    client.command("block-export-add", options);
}

fn write(daemon: &Running, commands: &[&str]) {
    let qemu = Qemu::system();
    let uri = uri(daemon, "t");
    let mut arguments = vec!["-f", "raw"];
    commands.iter().for_each(|command| arguments.extend(["-c", command]));
    arguments.push(&uri);
    let done = qemu.io(arguments).expect_ok();
    assert!(!done.stdout.contains("failed"), "{}", done.stdout);
}

/// The dirty ranges of a context, as qemu-img finds them.
fn dirty(daemon: &Running, export: &str, bitmap: &str) -> Vec<(u64, u64)> {
    let options = format!(
        "driver=nbd,server.type=unix,server.path={},export={export},x-dirty-bitmap=qemu:dirty-bitmap:{bitmap}",
        daemon.path("n.sock").display()
    );
    let map = Qemu::system().img(["map", "--output=json", "--image-opts", &options]).expect_ok().json();
    let runs = map.as_array().expect("runs").iter().filter(|run| run["data"] == false);
    runs.map(|run| (run["start"].as_u64().expect("start"), run["length"].as_u64().expect("length"))).collect()
}

fn bitmap(client: &mut Client, name: &str) -> Value {
    let nodes = client.command("query-named-block-nodes", json!({"flat": true}));
    let node = nodes.as_array().expect("nodes").iter().find(|node| node["node-name"] == "t").expect("the node").clone();
    let found = node["dirty-bitmaps"].as_array().cloned().unwrap_or_default();
    found.into_iter().find(|bitmap| bitmap["name"] == name).unwrap_or(Value::Null)
}

fn on(name: &str) -> Value {
    json!({"node": "t", "name": name})
}

#[test]
fn bitmaps_record_and_are_served() {
    let (daemon, mut client) = served();
    let add = |name: &str, more: Value| {
        let mut arguments = on(name);
        arguments.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        arguments
    };
    client.command("block-dirty-bitmap-add", add("kept", json!({"persistent": true, "granularity": 4096})));
    client.command("block-dirty-bitmap-add", add("gone", json!({"granularity": 65536})));
    client.command("block-dirty-bitmap-add", add("still", json!({"disabled": true})));
    export(&mut client, true, json!(["kept", {"node": "t", "name": "gone"}]));
    write(&daemon, &["write 5k 1k", "write -z 1M 128k", "write 8191k 1k"]);
    assert_eq!(dirty(&daemon, "t", "kept"), [(4096, 4096), (1 << 20, 128 << 10), (SIZE - 4096, 4096)]);
    assert_eq!(dirty(&daemon, "t", "gone"), [(0, 65536), (1 << 20, 128 << 10), (SIZE - 65536, 65536)]);
    let info = std::process::Command::new("nbdinfo")
        .args(["--map=qemu:dirty-bitmap:kept", "--json", &uri(&daemon, "t")])
        .output()
        .expect("nbdinfo runs");
    let map: Value = serde_json::from_slice(&info.stdout).expect("JSON");
    let found: Vec<(u64, u64)> = map
        .as_array()
        .expect("runs")
        .iter()
        .filter(|run| run["type"] == 1)
        .map(|run| (run["offset"].as_u64().unwrap(), run["length"].as_u64().unwrap()))
        .collect();
    assert_eq!(found, dirty(&daemon, "t", "kept"));
    let expected = json!({"name": "kept", "count": 4096 * 2 + (128 << 10), "granularity": 4096, "recording": true,
                          "busy": true, "persistent": true});
    assert_eq!(bitmap(&mut client, "kept"), expected);
    assert_eq!(bitmap(&mut client, "still")["recording"], false);
    let devices = client.command("query-block", json!({}));
    assert_eq!(devices[0]["inserted"]["dirty-bitmaps"].as_array().map(Vec::len), Some(3), "{devices}");
    for name in ["block-dirty-bitmap-clear", "block-dirty-bitmap-remove", "block-dirty-bitmap-disable"] {
        assert!(client.refusal(name, on("kept")).contains("currently in use"), "{name}");
    }
    client.command("block-export-del", json!({"id": "e", "mode": "hard"}));
    client.command("block-dirty-bitmap-clear", on("gone"));
    assert_eq!(bitmap(&mut client, "gone")["count"], 0);
    let merge = json!({"node": "t", "target": "still", "bitmaps": ["kept", {"node": "t", "name": "gone"}]});
    client.command("block-dirty-bitmap-merge", merge);
    assert_eq!(bitmap(&mut client, "still")["count"], 65536 * 4);
    client.command("block-dirty-bitmap-disable", on("kept"));
    export(&mut client, false, json!(["kept"]));
    assert_eq!(dirty(&daemon, "t", "kept").len(), 3);
    let (folder, stopped) = daemon.keep_after_stop();
    stopped.expect("stopped in order");
    let path = folder.path().join("t");
    Qemu::system().expect_clean(&path);
    let info = Qemu::system().info(&path, "qcow2");
    let kept = &info["format-specific"]["data"]["bitmaps"];
    assert_eq!(*kept, json!([{"name": "kept", "granularity": 4096, "flags": []}]));
}

#[test]
fn a_transaction_changes_all_bitmaps_or_none() {
    let (daemon, mut client) = served();
    for name in ["a", "b"] {
        client.command("block-dirty-bitmap-add", json!({"node": "t", "name": name, "persistent": name == "a"}));
    }
    export(&mut client, true, json!([]));
    write(&daemon, &["write 0 64k", "write 2M 64k"]);
    let clear = |name: &str| json!({"type": "block-dirty-bitmap-clear", "data": on(name)});
    let actions = json!([
        clear("a"), {"type": "block-dirty-bitmap-remove", "data": on("b")},
        {"type": "block-dirty-bitmap-add", "data": on("new")}, {"type": "block-dirty-bitmap-enable", "data": on("none")},
    ]);
    assert_eq!(client.refusal("transaction", json!({"actions": actions})), "Dirty bitmap 'none' not found");
    for name in ["a", "b"] {
        assert_eq!(bitmap(&mut client, name)["count"], 131_072, "{name}");
    }
    assert_eq!(bitmap(&mut client, "new"), Value::Null);
    let actions = json!([clear("a"), clear("b"), {"type": "block-dirty-bitmap-add", "data": on("new")}]);
    client.command("transaction", json!({"actions": actions}));
    write(&daemon, &["write 4M 64k"]);
    for name in ["a", "b", "new"] {
        assert_eq!(bitmap(&mut client, name)["count"], 65536, "{name}");
    }
    daemon.stop().expect("stopped in order");
}

#[test]
fn bitmaps_that_cannot_be_are_refused_by_name() {
    let (daemon, mut client) = served();
    client.command("block-dirty-bitmap-add", on("a"));
    for (name, arguments, words) in [
        ("block-dirty-bitmap-add", on("a"), "Bitmap already exists: a"),
        ("block-dirty-bitmap-add", json!({"node": "t", "name": ""}), "cannot be empty"),
        ("block-dirty-bitmap-add", json!({"node": "t", "name": "b", "granularity": 1000}), "power of 2"),
        ("block-dirty-bitmap-add", json!({"node": "x", "name": "b"}), "Cannot find device='x' nor node-name='x'"),
        ("block-dirty-bitmap-clear", on("b"), "Dirty bitmap 'b' not found"),
        (
            "block-dirty-bitmap-merge",
            json!({"node": "t", "target": "a", "bitmaps": ["b"]}),
            "Dirty bitmap 'b' not found",
        ),
        (
            "block-dirty-bitmap-merge",
            json!({"node": "t", "target": "b", "bitmaps": ["a"]}),
            "Dirty bitmap 'b' not found",
        ),
    ] {
        let refusal = client.refusal(name, arguments.clone());
        assert!(refusal.contains(words), "{name} {arguments}: {refusal}");
    }
    let export = |bitmaps: Value, writable: bool| json!({"type": "nbd", "id": "e", "node-name": "t", "writable": writable, "bitmaps": bitmaps});
    for (bitmaps, writable, words) in [
        (json!(["none"]), true, "Bitmap 'none' is not found"),
        (json!(["a"]), false, "Enabled bitmap 'a' incompatible with readonly export"),
    ] {
        let refusal = client.refusal("block-export-add", export(bitmaps, writable));
        assert!(refusal.contains(words), "{refusal}");
    }
    // With its node an enabled one is offered, as a pull backup asks for it.
    client.command("block-export-add", export(json!([on("a")]), false));
    client.command("block-export-del", json!({"id": "e"}));
    client.event("BLOCK_EXPORT_DELETED");
    // A refused command holds nothing.
    client.command("block-dirty-bitmap-remove", on("a"));
    daemon.stop().expect("stopped in order");
}

/// Full, then two incremental ones on top of it, with writes between and meanwhile: the last one reads as the disk did.
#[test]
fn incremental_backups_are_chains_that_read_as_the_disk() {
    for persistent in [true, false] {
        let (daemon, mut client) = served();
        let qemu = Qemu::system();
        export(&mut client, true, json!([]));
        write(&daemon, &["write -P 1 0 3M", "write -P 2 5M 1M"]);
        client.command("block-dirty-bitmap-add", json!({"node": "t", "name": "b", "persistent": persistent}));
        let backup = |client: &mut Client, name: &str, sync: &str, more: Value| {
            let mut arguments = json!({"job-id": name, "device": "t", "target": name, "sync": sync});
            arguments.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            client.command("blockdev-backup", arguments);
            let completed = client.event("BLOCK_JOB_COMPLETED");
            assert!(completed.get("error").is_none(), "{completed}");
        };
        let add_target = |client: &mut Client, name: &str, below: Option<&Path>| {
            let path = daemon.path(name);
            let options =
                below.map_or(String::new(), |below| format!("backing_file={},backing_fmt=qcow2", below.display()));
            qemu.create(&path, "qcow2", &options, SIZE);
            let mut options = node(&path, name);
            options["backing"] = Value::Null;
            client.command("blockdev-add", options);
        };
        add_target(&mut client, "full", None);
        backup(&mut client, "full", "full", json!({"bitmap": "b", "bitmap-mode": "on-success"}));
        assert_eq!(bitmap(&mut client, "b")["count"], 0);
        write(&daemon, &["write -P 3 1M 64k", "write -P 4 7M 4k"]);
        add_target(&mut client, "one", Some(&daemon.path("full")));
        backup(&mut client, "one", "incremental", json!({"bitmap": "b"}));
        write(&daemon, &["write -z 2M 1M", "write -P 5 1M 4k"]);
        assert_eq!(bitmap(&mut client, "b")["count"], (1 << 20) + 65536);
        add_target(&mut client, "two", Some(&daemon.path("one")));
        backup(&mut client, "two", "bitmap", json!({"bitmap": "b", "bitmap-mode": "never"}));
        assert_eq!(bitmap(&mut client, "b")["count"], (1 << 20) + 65536);
        let (folder, stopped) = daemon.keep_after_stop();
        stopped.expect("stopped in order");
        let path = |name: &str| folder.path().join(name);
        let disk = qemu.content(&path("t"), "qcow2");
        assert!(qemu.content(&path("two"), "qcow2") == disk, "the chain reads otherwise");
        // Only dirty parts were copied.
        let copied = qemu.map(&path("one"), "qcow2").into_iter().filter(|run| run.depth == 0);
        let copied: u64 = copied.map(|run| run.length).sum();
        assert_eq!(copied, 2 * 65536);
        qemu.expect_clean(&path("t"));
    }
}

#[test]
fn a_backup_that_fails_keeps_what_was_dirty() {
    let (daemon, mut client) = served();
    export(&mut client, true, json!([]));
    client.command("block-dirty-bitmap-add", json!({"node": "t", "name": "b", "persistent": true}));
    write(&daemon, &["write -P 1 0 4M"]);
    for (mode, left) in [("on-success", 4 << 20), ("always", 4 << 20)] {
        let path = daemon.path(mode);
        Qemu::system().create(&path, "qcow2", "", SIZE);
        client.command("blockdev-add", node(&path, mode));
        let arguments = json!({"job-id": mode, "device": "t", "target": mode, "sync": "bitmap", "bitmap": "b",
                               "bitmap-mode": mode, "speed": 65536});
        client.command("blockdev-backup", arguments);
        assert!(client.refusal("block-dirty-bitmap-clear", on("b")).contains("currently in use"));
        write(&daemon, &["write -P 2 6M 64k"]);
        client.command("block-job-cancel", json!({"device": mode}));
        client.event("BLOCK_JOB_CANCELLED");
        let count = bitmap(&mut client, "b")["count"].as_u64().expect("a count");
        // With `always`, parts copied before the end are clean.
        assert!(count <= left + 65536 && count > left / 2, "{mode}: {count}");
        if mode == "on-success" {
            assert_eq!(count, left + 65536);
        }
    }
    daemon.stop().expect("stopped in order");
}

/// As in QEMU, parts that were clean before count too: without them, the next backup by the bitmap leaves the copy incomplete.
#[test]
fn a_cancelled_whole_backup_marks_all_it_lacks() {
    let (daemon, mut client) = served();
    export(&mut client, true, json!([]));
    write(&daemon, &["write -P 1 0 4M"]);
    client.command("block-dirty-bitmap-add", json!({"node": "t", "name": "b", "persistent": true}));
    let path = daemon.path("copy");
    Qemu::system().create(&path, "qcow2", "", SIZE);
    client.command("blockdev-add", node(&path, "copy"));
    for (sync, most) in [("full", SIZE), ("top", 4 << 20)] {
        let arguments = json!({"job-id": "k", "device": "t", "target": "copy", "sync": sync, "bitmap": "b",
                               "bitmap-mode": "always", "speed": 65536});
        client.command("blockdev-backup", arguments);
        write(&daemon, &["write -P 2 1M 64k"]);
        client.command("block-job-cancel", json!({"device": "k"}));
        let cancelled = client.event("BLOCK_JOB_CANCELLED");
        let (lacking, len) = (bitmap(&mut client, "b")["count"].as_u64(), cancelled["len"].as_u64());
        let lacking = lacking.expect("a count");
        assert!(len == Some(most) && lacking < most && lacking > most / 2, "{sync}: {lacking} {cancelled}");
    }
    // The rest by the bitmap makes the copy whole.
    let rest = json!({"job-id": "k", "device": "t", "target": "copy", "sync": "incremental", "bitmap": "b"});
    client.command("blockdev-backup", rest);
    client.event("BLOCK_JOB_COMPLETED");
    assert_eq!(bitmap(&mut client, "b")["count"], 0);
    let (folder, stopped) = daemon.keep_after_stop();
    stopped.expect("stopped in order");
    let qemu = Qemu::system();
    let content = |name: &str| qemu.content(&folder.path().join(name), "qcow2");
    assert!(content("copy") == content("t"), "the copy lacks a part");
}

/// A target that can't be made durable counts for nothing, also the parts that writers had saved before the job chose its own.
#[test]
fn a_part_saved_before_the_choice_stays_dirty() {
    const LARGE: u64 = 32 << 30;
    let (daemon, qemu) = (Running::start(Vec::new()), Qemu::system());
    let mut client = daemon.client();
    let (path, copy) = (daemon.path("t"), daemon.path("copy"));
    qemu.create(&path, "qcow2", "", LARGE);
    qemu.create(&copy, "raw", "", LARGE);
    client.command("blockdev-add", node(&path, "t"));
    let socket = daemon.path("n.sock");
    client.command("nbd-server-start", json!({"addr": {"type": "unix", "data": {"path": socket}}}));
    export(&mut client, true, json!([]));
    // The job copies the first part at once, waits before the second one, and finds the third one saved.
    write(&daemon, &["write 0 64k", "write 64M 64k", &format!("write {} 64k", LARGE - 65536)]);
    client.command("block-dirty-bitmap-add", json!({"node": "t", "name": "b", "granularity": 512}));
    let fails = json!([{"event": "none", "iotype": "flush"}]);
    let file = json!({"driver": "blkdebug", "inject-error": fails, "image": {"driver": "file", "filename": copy}});
    client.command("blockdev-add", json!({"driver": "raw", "node-name": "copy", "file": file}));
    let arguments = json!({"job-id": "k", "device": "t", "target": "copy", "sync": "top", "bitmap": "b",
                           "bitmap-mode": "always", "speed": 1});
    client.command("blockdev-backup", arguments);
    write(&daemon, &[&format!("write {} 512", LARGE - 512)]);
    let chosen = |client: &mut Client| {
        let jobs = client.command("query-block-jobs", json!({}));
        (1..=131_072).contains(&jobs[0]["len"].as_u64().expect("a length"))
    };
    cowshed_testkit::waiting::await_that("the choice", || chosen(&mut client));
    client.command("block-job-cancel", json!({"device": "k"}));
    client.event("BLOCK_JOB_CANCELLED");
    assert_eq!(bitmap(&mut client, "b")["count"], 196_608);
    // The flush of the target fails here, too.
    daemon.stop().expect_err("a failed flush");
}

/// An image that no virtual machine uses: its bitmaps are read without changing it.
#[test]
fn bitmaps_of_a_read_only_image_are_served() {
    let daemon = Running::start(Vec::new());
    let mut client = daemon.client();
    let (qemu, path) = (Qemu::system(), daemon.path("t"));
    let name = path.to_str().expect("text path");
    qemu.create(&path, "qcow2", "cluster_size=4k", SIZE);
    qemu.img(["bitmap", "--add", "-g", "512", name, "b"]).expect_ok();
    qemu.io_commands(&path, "qcow2", &["write 3M 1k".into(), "write 100k 512".into()]).expect_ok();
    let before = std::fs::read(&path).expect("the image");
    let mut options = node(&path, "t");
    options["read-only"] = json!(true);
    client.command("blockdev-add", options);
    let socket = daemon.path("n.sock");
    client.command("nbd-server-start", json!({"addr": {"type": "unix", "data": {"path": socket}}}));
    export(&mut client, false, json!(["b"]));
    assert_eq!(dirty(&daemon, "t", "b"), [(100 << 10, 512), (3 << 20, 1024)]);
    let (folder, stopped) = daemon.keep_after_stop();
    stopped.expect("stopped in order");
    assert!(std::fs::read(folder.path().join("t")).expect("the image") == before, "the image was written to");
}

#[test]
fn bitmap_without_room_is_refused_with_the_reason() {
    let running = Running::start(Vec::new());
    let image = running.path("a.qcow2");
    Qemu::system().create(&image, "qcow2", "", 1 << 20);
    let mut client = running.client();
    let full = json!([{"event": "none", "iotype": "write", "errno": 28, "times": 1}]);
    let file = json!({"driver": "blkdebug", "inject-error": full, "image": {"driver": "file", "filename": image}});
    client.command("blockdev-add", json!({"driver": "qcow2", "node-name": "q", "file": file}));
    let refusal = client.refusal("block-dirty-bitmap-add", json!({"node": "q", "name": "b", "persistent": true}));
    assert!(refusal.contains("No space left on device"), "{refusal}");
    running.stop().expect("stopped in order");
}

/// The format has no bitmaps of 0 bits: the node keeps them, and stays writable and active.
#[test]
fn disk_of_no_bytes_keeps_its_bitmaps() {
    let daemon = Running::start(Vec::new());
    Qemu::newest().create(&daemon.path("a.qcow2"), "qcow2", "", 4 << 20);
    let mut client = daemon.client();
    client.files_in(daemon.folder.path());
    let node = |more: &[(&str, bool)]| {
        let file = json!({"driver": "file", "filename": "a.qcow2"});
        let mut node = json!({"driver": "qcow2", "node-name": "d", "file": file});
        more.iter().for_each(|(key, value)| node[*key] = (*value).into());
        node
    };
    client.command("blockdev-add", node(&[]));
    client.command("block-dirty-bitmap-add", json!({"node": "d", "name": "b0", "persistent": true}));
    client.command("block_resize", json!({"node-name": "d", "size": 0}));
    let changes = [
        ("blockdev-reopen", json!({"options": [node(&[("read-only", true)])]})),
        ("blockdev-set-active", json!({"node-name": "d", "active": false})),
    ];
    for (command, arguments) in changes {
        let error = client.refusal(command, arguments);
        assert!(error.contains("disk of 0 bytes") && error.contains("'b0'"), "{error}");
    }
    client.command("blockdev-reopen", json!({"options": [node(&[("read-only", false)])]}));
    client.command("block_resize", json!({"node-name": "d", "size": 2 << 20}));
    client.command("blockdev-del", json!({"node-name": "d"}));
    let info = Qemu::newest().info(&daemon.path("a.qcow2"), "qcow2");
    assert_eq!(info["format-specific"]["data"]["bitmaps"][0]["name"], "b0", "{info}");
    daemon.stop().expect("stopped in order");
}
