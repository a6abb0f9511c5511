// SPDX-License-Identifier: Apache-2.0 OR MIT
//! After the end of each kind of job, every node that is left reads as in the newest QEMU, and has the same backing
//! file.

use super::beside_qemu::Theirs;
use super::running::{Client, Running, temp_folder};
use cowshed_testkit::qemu::Qemu;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

const SIZE: u64 = 512 << 10;

fn qcow2(name: &str) -> Value {
    json!({"driver": "qcow2", "node-name": name, "file": {"driver": "file", "filename": format!("{name}.qcow2")}})
}

fn with(mut value: Value, key: &str, more: Value) -> Value {
    value[key] = more;
    value
}

/// The chain `n0` to `n3`, each with data of its own, and the empty images `t`, `o`.
fn make_images(folder: &Path) {
    let qemu = Qemu::newest();
    let at = |name: &str| folder.join(format!("{name}.qcow2"));
    for name in ["n0", "t", "o"] {
        qemu.create(&at(name), "qcow2", "", SIZE);
    }
    for (over, base) in [("n1", "n0"), ("n2", "n1"), ("n3", "n2")] {
        let (over, base) = (at(over), format!("{base}.qcow2"));
        let over = over.to_str().expect("text");
        qemu.img(["create", "-q", "-f", "qcow2", "-b", &base, "-F", "qcow2", over]).expect_ok();
    }
    for (name, write) in [
        ("n0", "write -q -P 0x11 0 256k"),
        ("n1", "write -q -P 0x22 64k 64k"),
        ("n2", "write -q -P 0x33 128k 64k"),
        ("n3", "write -q -P 0x44 192k 64k"),
    ] {
        qemu.io_commands(&at(name), "qcow2", &[write.to_owned()]).expect_ok();
    }
}

/// Opens the chain, each image under its name, and exports its top.
fn open_chain(client: &mut Client, exported: bool) {
    client.command("nbd-server-start", json!({"addr": {"type": "unix", "data": {"path": "n.sock"}}}));
    client.command("object-add", json!({"qom-type": "throttle-group", "id": "g"}));
    client.command("blockdev-add", with(qcow2("n0"), "read-only", json!(true)));
    for (name, below) in [("n1", "n0"), ("n2", "n1")] {
        let options = with(qcow2(name), "read-only", json!(true));
        client.command("blockdev-add", with(options, "backing", json!(below)));
    }
    client.command("blockdev-add", with(qcow2("n3"), "backing", json!("n2")));
    client.command("blockdev-add", qcow2("t"));
    client.command("blockdev-add", with(qcow2("o"), "backing", Value::Null));
    if exported {
        let export = json!({"type": "nbd", "id": "e", "node-name": "n3", "name": "e", "writable": true});
        client.command("block-export-add", export);
    }
}

/// Backing file and content of each node that has a name.
type NodeContents = BTreeMap<String, (Option<String>, Vec<u8>)>;

fn state(client: &mut Client, folder: &Path) -> NodeContents {
    let nodes = client.command("query-named-block-nodes", json!({"flat": true}));
    let mut found = NodeContents::new();
    for node in nodes.as_array().expect("a list") {
        let name = node["node-name"].as_str().expect("a name");
        if name.starts_with('#') {
            continue;
        }
        let backing = node["backing_file"].as_str().and_then(|file| file.rsplit('/').next()).map(str::to_owned);
        let export = json!({"type": "nbd", "id": "look", "node-name": name, "name": "look"});
        client.command("block-export-add", export);
        let uri = format!("nbd+unix:///look?socket={}", folder.join("n.sock").display());
        let out = temp_folder();
        let out = out.path().join("content");
        Qemu::newest().img(["convert", "-f", "raw", "-O", "raw", &uri, out.to_str().expect("text")]).expect_ok();
        client.command("block-export-del", json!({"id": "look", "mode": "hard"}));
        client.event("BLOCK_EXPORT_DELETED");
        found.insert(name.to_owned(), (backing, std::fs::read(&out).expect("the content")));
    }
    found
}

/// Commands, and the events waited for after them.
type Steps = Vec<(&'static str, Value, Option<&'static str>)>;

const READY: Option<&str> = Some("BLOCK_JOB_READY");
const COMPLETED: Option<&str> = Some("BLOCK_JOB_COMPLETED");

/// A job with a filter's worth of waiting, whose target takes over.
fn pivot(command: &'static str, mut arguments: Value) -> Steps {
    arguments["job-id"] = json!("j");
    vec![(command, arguments, READY), ("job-complete", json!({"id": "j"}), COMPLETED)]
}

fn once(command: &'static str, mut arguments: Value) -> Steps {
    arguments["job-id"] = json!("j");
    vec![(command, arguments, COMPLETED)]
}

fn after(mut first: Steps, more: Steps) -> Steps {
    first.extend(more);
    first
}

fn follow(name: &str, exported: bool, steps: &Steps) {
    let (theirs, mut theirs_client) = Theirs::start_newest();
    let ours = Running::start(Vec::new());
    let mut client = ours.client();
    client.files_in(ours.folder.path());
    let folders = [ours.folder.path().to_owned(), theirs.folder.path().to_owned()];
    let mut states = Vec::new();
    for (client, folder) in [&mut client, &mut theirs_client].into_iter().zip(&folders) {
        make_images(folder);
        open_chain(client, exported);
        for (command, arguments, event) in steps {
            client.command(command, arguments.clone());
            if let Some(event) = event {
                let data = client.event(event);
                assert!(data.get("error").is_none(), "{name}: {data}");
            }
        }
        states.push(state(client, folder));
    }
    let (ours_state, theirs_state) = (&states[0], &states[1]);
    let names = |state: &NodeContents| state.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(ours_state), names(theirs_state), "{name}: the nodes");
    for (node, (backing, content)) in ours_state {
        let (their_backing, their_content) = &theirs_state[node];
        assert_eq!(backing, their_backing, "{name}: the backing file of {node}");
        let at = content.iter().zip(their_content).position(|(one, other)| one != other);
        assert_eq!(at, None, "{name}: {node} reads differently from QEMU's");
        assert_eq!(content.len(), their_content.len(), "{name}: {node}");
    }
    ours.stop().expect("stopped in order");
}

#[test]
fn nodes_read_after_commits_what_they_read_in_qemu() {
    let commit = |base: &str| pivot("block-commit", json!({"device": "n3", "base-node": base}));
    for exported in [false, true] {
        follow("commit into n1", exported, &commit("n1"));
        follow("commit into n0", exported, &commit("n0"));
        for (top, base) in [("n2", "n0"), ("n1", "n0"), ("n2", "n1")] {
            let middle = once("block-commit", json!({"device": "n3", "top-node": top, "base-node": base}));
            follow(&format!("commit of {top} into {base}"), exported, &middle);
        }
    }
}

#[test]
fn nodes_read_after_streams_what_they_read_in_qemu() {
    for exported in [false, true] {
        follow("stream", exported, &once("block-stream", json!({"device": "n3"})));
        follow("stream to n0", exported, &once("block-stream", json!({"device": "n3", "base-node": "n0"})));
        follow("stream of n2", exported, &once("block-stream", json!({"device": "n2", "base-node": "n0"})));
    }
}

#[test]
fn nodes_read_after_mirrors_what_they_read_in_qemu() {
    let mirror =
        |sync: &str, target: &str| pivot("blockdev-mirror", json!({"device": "n3", "target": target, "sync": sync}));
    follow("mirror", true, &mirror("full", "t"));
    follow("mirror of the top", true, &mirror("top", "o"));
    let blocking = json!({"device": "n3", "target": "t", "sync": "full", "copy-mode": "write-blocking"});
    follow("mirror with writes to both", true, &pivot("blockdev-mirror", blocking));
    let copy = json!({"device": "n3", "target": "t", "sync": "full", "job-id": "j"});
    let as_copy = vec![("blockdev-mirror", copy, READY), ("block-job-cancel", json!({"device": "j"}), COMPLETED)];
    follow("mirror that ends as a copy", true, &as_copy);
    let backup = once("blockdev-backup", json!({"device": "n3", "target": "t", "sync": "full"}));
    follow("backup", true, &backup);
}

#[test]
fn nodes_read_after_snapshots_and_commits_what_they_read_in_qemu() {
    let sync: Steps = vec![(
        "blockdev-snapshot-sync",
        json!({"node-name": "n3", "snapshot-file": "s.qcow2", "snapshot-node-name": "s"}),
        None,
    )];
    let added: Steps = vec![("blockdev-snapshot", json!({"node": "n3", "overlay": "o"}), None)];
    let commit = |device: &str, base: &str| pivot("block-commit", json!({"device": device, "base-node": base}));
    follow("snapshot", true, &sync);
    follow("snapshot without users", false, &sync);
    follow("snapshot and commit", true, &after(sync.clone(), commit("s", "n3")));
    follow("snapshot and deep commit", true, &after(sync.clone(), commit("s", "n1")));
    follow("snapshot on an added overlay and commit", true, &after(added.clone(), commit("o", "n3")));
    follow("snapshot on an added overlay and deep commit", true, &after(added, commit("o", "n1")));
    let streamed = once("block-stream", json!({"device": "s"}));
    follow("snapshot and stream", true, &after(sync, streamed));
}
