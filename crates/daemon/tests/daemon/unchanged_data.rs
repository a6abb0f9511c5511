// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Data that a job or a filter moves into an image without changing the disk's data: dirty bitmaps count it as QEMU's
//! do.

use super::beside_qemu::Theirs;
use super::exports::node;
use super::running::{Client, Running};
use cowshed_testkit::qemu::{MapEntry, Qemu, coalesce};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

pub(super) const SIZE: u64 = 4 << 20;

/// Writes a part of an image.
fn io(path: &Path, command: &str) {
    Qemu::newest().io_commands(path, "qcow2", &[command.to_owned()]).expect_ok();
}

/// Both daemons, each with its folder and a client: the image `n` on `mid` on `base`, an empty `t`, and an NBD server. Each image
/// has a persistent bitmap `p`; `n` has one in memory besides, `m`.
pub(super) fn both() -> (Running, Theirs, [Client; 2]) {
    let ours = Running::start(Vec::new());
    let (theirs, their_client) = Theirs::start_newest();
    let mut clients = [ours.client(), their_client];
    for (client, folder) in clients.iter_mut().zip([ours.folder.path(), theirs.folder.path()]) {
        make(client, folder);
    }
    (ours, theirs, clients)
}

fn make(client: &mut Client, folder: &Path) {
    let qemu = Qemu::newest();
    client.files_in(folder);
    let mut below: Option<&str> = None;
    for (name, write) in [("base", "write -P 1 0 1M"), ("mid", "write -P 2 1M 512k"), ("n", "write -P 3 2M 64k")] {
        let path = folder.join(name);
        let backing = below.map(|below| format!("backing_file={},backing_fmt=qcow2", folder.join(below).display()));
        qemu.create(&path, "qcow2", &backing.unwrap_or_default(), SIZE);
        io(&path, write);
        qemu.img(["bitmap", "--add", path.to_str().expect("text"), "p"]).expect_ok();
        below = Some(name);
    }
    below = None;
    for name in ["base", "mid", "n"] {
        let mut options = node(&folder.join(name), name);
        options["backing"] = below.map_or(Value::Null, Value::from);
        client.command("blockdev-add", options);
        below = Some(name);
    }
    qemu.create(&folder.join("t"), "qcow2", "", SIZE);
    client.command("blockdev-add", node(&folder.join("t"), "t"));
    client.command("block-dirty-bitmap-add", json!({"node": "n", "name": "m"}));
    let address = json!({"type": "unix", "data": {"path": folder.join("n.sock")}});
    client.command("nbd-server-start", json!({"addr": address}));
}

pub(super) fn export(client: &mut Client, name: &str) {
    let export = json!({"type": "nbd", "id": "e", "node-name": name, "name": "x", "writable": true});
    client.command("block-export-add", export);
}

/// Requests of a client of the export.
pub(super) fn guest(client: &Client, commands: &[&str]) {
    let uri = format!("nbd+unix:///x?socket={}", client.in_folder("n.sock"));
    let commands = commands.iter().flat_map(|command| ["-c", command]);
    let said = Qemu::newest().io(["-f", "raw"].into_iter().chain(commands).chain([uri.as_str()])).expect_ok();
    assert!(!said.stdout.contains("failed"), "{}", said.stdout);
}

/// Dirty bytes by node and bitmap.
fn counts(client: &mut Client, nodes: &[&str]) -> BTreeMap<String, u64> {
    let listed = client.command("query-named-block-nodes", json!({"flat": true}));
    let mut found = BTreeMap::new();
    for node in listed.as_array().expect("a list") {
        let name = node["node-name"].as_str().expect("a text");
        for bitmap in node["dirty-bitmaps"].as_array().into_iter().flatten().filter(|_| nodes.contains(&name)) {
            let count = bitmap["count"].as_u64().expect("a number");
            found.insert(format!("{name}/{}", bitmap["name"].as_str().unwrap_or_default()), count);
        }
    }
    found
}

pub(super) fn run_job(client: &mut Client, command: &str, mut arguments: Value) -> Value {
    arguments["job-id"] = json!("j");
    client.command(command, arguments);
    let completed = client.event("BLOCK_JOB_COMPLETED");
    assert!(completed.get("error").is_none(), "{completed}");
    completed
}

/// The image's own data, once both daemons are gone.
fn own_data(ours: Running, theirs: Theirs, [ours_client, mut theirs_client]: [Client; 2]) -> [Vec<MapEntry>; 2] {
    drop(ours_client);
    theirs_client.command("quit", json!({}));
    while theirs_client.message().is_some() {}
    let (folder, stopped) = ours.keep_after_stop();
    stopped.expect("stopped in order");
    Qemu::newest().expect_clean(&folder.path().join("n"));
    [folder.path(), theirs.folder.path()].map(|folder| {
        let map = Qemu::newest().map(&folder.join("n"), "qcow2").into_iter().filter(|run| run.depth == 0);
        coalesce(map.map(|run| MapEntry { offset: None, ..run }))
    })
}

#[test]
fn a_stream_leaves_dirty_bitmaps_as_they_are() {
    for base in [None, Some("base")] {
        let (ours, theirs, mut clients) = both();
        let mut states = Vec::new();
        for client in &mut clients {
            export(client, "n");
            guest(client, &["write -P 9 3M 64k"]);
            let mut arguments = json!({"device": "n"});
            if let Some(base) = base {
                arguments["base-node"] = json!(base);
            }
            run_job(client, "block-stream", arguments);
            let after_stream = counts(client, &["n", "base"]);
            // So the next backup is as small as without the stream.
            let backup = json!({"device": "n", "target": "t", "sync": "incremental", "bitmap": "p"});
            let backup = run_job(client, "blockdev-backup", backup);
            states.push((after_stream, backup["len"].clone(), counts(client, &["n", "base"])));
        }
        assert_eq!(states[0], states[1]);
        assert_eq!((states[0].0["n/p"], states[0].0["n/m"], &states[0].1), (65536, 65536, &json!(65536)));
        let [ours, theirs] = own_data(ours, theirs, clients);
        assert_eq!(ours, theirs);
    }
}

#[test]
fn reads_that_copy_leave_dirty_bitmaps_as_they_are() {
    let (ours, theirs, mut clients) = both();
    let mut states = Vec::new();
    for client in &mut clients {
        client.command("blockdev-add", json!({"driver": "copy-on-read", "node-name": "c", "file": "n"}));
        export(client, "c");
        guest(client, &["read -P 1 0 1M", "read -P 2 1M 4k", "write -P 9 3M 64k", "write -z 3200k 64k"]);
        states.push(counts(client, &["n"]));
    }
    assert_eq!(states[0], states[1]);
    assert_eq!((states[0]["n/p"], states[0]["n/m"]), (128 << 10, 128 << 10));
    let [ours, theirs] = own_data(ours, theirs, clients);
    assert_eq!(ours, theirs);
}

/// QEMU's filters of the middle lose the mark of such a write, so that its bitmaps count it; here it counts nowhere.
#[test]
fn reads_are_copied_through_filters_below_as_in_qemu() {
    for driver in ["throttle", "copy-before-write", "copy-on-read", "preallocate"] {
        let (ours, theirs, mut clients) = both();
        for client in &mut clients {
            client.command("object-add", json!({"qom-type": "throttle-group", "id": "g"}));
            let mut middle = json!({"driver": driver, "node-name": "f", "file": "n"});
            match driver {
                "throttle" => middle["throttle-group"] = json!("g"),
                "copy-before-write" => middle["target"] = json!("t"),
                _ => {}
            }
            client.command("blockdev-add", middle);
            client.command("blockdev-add", json!({"driver": "copy-on-read", "node-name": "c", "file": "f"}));
            export(client, "c");
            guest(client, &["read -P 1 0 1M", "read -P 2 1M 4k"]);
        }
        if driver != "preallocate" {
            assert_eq!(counts(&mut clients[0], &["n"])["n/p"], 0, "{driver}");
        }
        let [ours, theirs] = own_data(ours, theirs, clients);
        assert_eq!(ours, theirs, "{driver}");
    }
}

#[test]
fn a_commit_marks_its_base_as_in_qemu() {
    for arguments in [json!({"device": "n"}), json!({"device": "n", "top-node": "mid", "base-node": "base"})] {
        let (ours, _theirs, mut clients) = both();
        let mut states = Vec::new();
        for client in &mut clients {
            for name in ["base", "mid"] {
                client.command("block-dirty-bitmap-add", json!({"node": name, "name": "m"}));
            }
            match arguments.get("top-node") {
                Some(_) => drop(run_job(client, "block-commit", arguments.clone())),
                None => {
                    let mut arguments = arguments.clone();
                    arguments["job-id"] = json!("j");
                    client.command("block-commit", arguments);
                    client.event("BLOCK_JOB_READY");
                    client.command("job-complete", json!({"id": "j"}));
                    client.event("BLOCK_JOB_COMPLETED");
                }
            }
            states.push(counts(client, &["base", "n"]));
        }
        assert_eq!(states[0], states[1], "{arguments}");
        ours.stop().expect("stopped in order");
    }
}
