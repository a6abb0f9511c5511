// SPDX-License-Identifier: Apache-2.0 OR MIT
//! No job writes into a file that it reads, by whatever node: with `locking=off` no lock shows that.

use super::jobs::concluded;
use super::running::{Client, Running};
use cowshed_testkit::qemu::Qemu;
use serde_json::{Value, json};

const SIZE: u64 = 1 << 20;

/// A node of an image by any of its names, without locks.
fn unlocked(daemon: &Running, file: &str, name: &str, read_only: bool, backing: Value) -> Value {
    json!({"driver": "qcow2", "node-name": name, "read-only": read_only, "backing": backing,
           "file": {"driver": "file", "filename": daemon.path(file), "locking": "off"}})
}

/// `b` ← `t`, with a hard link to each, and the nodes of both.
fn chain() -> (Running, Client) {
    let daemon = Running::start(Vec::new());
    let qemu = Qemu::system();
    let mut client = daemon.client();
    qemu.create(&daemon.path("b"), "qcow2", "", SIZE);
    qemu.io_commands(&daemon.path("b"), "qcow2", &["write -P 1 0 512k".to_owned()]).expect_ok();
    let backing = format!("backing_file={},backing_fmt=qcow2", daemon.path("b").display());
    qemu.create(&daemon.path("t"), "qcow2", &backing, SIZE);
    qemu.io_commands(&daemon.path("t"), "qcow2", &["write -P 2 64k 64k".to_owned()]).expect_ok();
    for name in ["b", "t"] {
        std::fs::hard_link(daemon.path(name), daemon.path(&format!("hard-{name}"))).expect("a hard link");
    }
    client.command("blockdev-add", unlocked(&daemon, "b", "b", true, Value::Null));
    client.command("blockdev-add", unlocked(&daemon, "t", "t", false, json!("b")));
    (daemon, client)
}

fn bytes(daemon: &Running) -> Vec<Vec<u8>> {
    ["b", "t"].map(|name| std::fs::read(daemon.path(name)).expect("an image")).to_vec()
}

const SAME: &str = "both are one file";

#[test]
fn copies_of_a_disk_do_not_go_to_its_own_files() {
    let (daemon, mut client) = chain();
    let before = bytes(&daemon);
    for file in ["hard-t", "hard-b"] {
        client.command("blockdev-add", unlocked(&daemon, file, "x", false, Value::Null));
        let copy = json!({"job-id": "j", "device": "t", "target": "x", "sync": "full"});
        assert!(client.refusal("blockdev-mirror", copy.clone()).contains(SAME), "mirror onto {file}");
        assert!(client.refusal("blockdev-backup", copy).contains(SAME), "backup onto {file}");
        let snapshot = json!({"node": "t", "overlay": "x"});
        assert!(client.refusal("blockdev-snapshot", snapshot).contains(SAME), "{file} as overlay");
        client.command("blockdev-del", json!({"node-name": "x"}));
    }
    assert!(bytes(&daemon) == before);
    daemon.stop().expect("stopped in order");
}

#[test]
fn a_chain_that_has_a_file_twice_is_not_written_to() {
    let (daemon, mut client) = chain();
    let before = bytes(&daemon);
    let twice = unlocked(&daemon, "hard-b", "x", false, json!("b"));
    assert!(client.refusal("blockdev-add", twice).contains(SAME), "a layer over itself");
    client.command("blockdev-del", json!({"node-name": "t"}));
    // Only read, so there is no harm; a commit would write.
    client.command("blockdev-add", unlocked(&daemon, "hard-b", "x", true, json!("b")));
    client.command("blockdev-add", unlocked(&daemon, "hard-t", "y", false, json!("x")));
    let commit = json!({"job-id": "j", "device": "y", "top-node": "x", "base-node": "b"});
    let said = client.refusal("block-commit", commit);
    assert!(said.contains(SAME), "a commit of a layer into itself: {said}");
    assert!(bytes(&daemon) == before);
    daemon.stop().expect("stopped in order");
}

#[test]
fn nothing_is_created_over_a_file_that_is_open() {
    let (daemon, mut client) = chain();
    let before = bytes(&daemon);
    for file in ["b", "t", "hard-b", "hard-t"] {
        let options = json!({"driver": "file", "filename": daemon.path(file), "size": SIZE});
        client.command("blockdev-create", json!({"job-id": "c", "options": options}));
        let error = concluded(&mut client, "c").unwrap_or_default();
        assert!(error.contains("which is in use here"), "{file}: {error}");
    }
    // In a node that stands for the file once more.
    let file = json!({"driver": "file", "node-name": "f", "filename": daemon.path("hard-b"), "locking": "off"});
    client.command("blockdev-add", file);
    let options = json!({"driver": "qcow2", "file": "f", "size": SIZE});
    client.command("blockdev-create", json!({"job-id": "c", "options": options}));
    let error = concluded(&mut client, "c").unwrap_or_default();
    assert!(error.contains("which is in use here"), "{error}");
    assert!(bytes(&daemon) == before);
    daemon.stop().expect("stopped in order");
}
