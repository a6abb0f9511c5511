// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A disk is handed to another process and back: `blockdev-set-active`.

use super::exports::{node, serving, uri};
use super::running::{Client, Running};
use cowshed_testkit::qemu::Qemu;
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::process::{Command, Stdio};

fn set(client: &mut Client, name: &str, active: bool) {
    client.command("blockdev-set-active", json!({"node-name": name, "active": active}));
}

fn refused(client: &mut Client, name: &str, active: bool) -> String {
    client.refusal("blockdev-set-active", json!({"node-name": name, "active": active}))
}

/// The named nodes with their state.
fn states(client: &mut Client) -> Vec<(String, bool)> {
    let nodes = client.command("query-named-block-nodes", json!({"flat": true}));
    let mut states: Vec<(String, bool)> = nodes
        .as_array()
        .expect("a list")
        .iter()
        .map(|node| (node["node-name"].as_str().expect("a name").to_owned(), node["active"].as_bool().expect("a flag")))
        .filter(|(name, _)| !name.starts_with('#'))
        .collect();
    states.sort();
    states
}

fn named(states: &[(&str, bool)]) -> Vec<(String, bool)> {
    states.iter().map(|(name, active)| ((*name).to_owned(), *active)).collect()
}

fn export(client: &mut Client, id: &str, node: &str) {
    client.command("block-export-add", json!({"type": "nbd", "id": id, "node-name": node, "writable": true}));
}

fn unexport(client: &mut Client, id: &str) {
    // The server may not have noticed yet that its client is gone.
    client.command("block-export-del", json!({"id": id, "mode": "hard"}));
    client.event("BLOCK_EXPORT_DELETED");
}

fn io(daemon: &Running, export: &str, command: &str) {
    let said = Qemu::system().io(["-f", "raw", "-c", command, &uri(daemon, export)]).expect_ok();
    assert!(!said.stdout.contains("failed"), "{command}: {}", said.stdout);
}

#[test]
fn another_process_uses_an_image_while_its_node_is_inactive() {
    let (daemon, mut client) = serving();
    let (qemu, path) = (Qemu::system(), daemon.path("a.qcow2"));
    let bitmap = json!({"node": "q", "name": "b", "persistent": true});
    client.command("block-dirty-bitmap-add", bitmap);
    export(&mut client, "e", "q");
    io(&daemon, "q", "write -P 1 0 1M");
    let words = "Failed to inactivate node: Operation not permitted";
    assert_eq!(refused(&mut client, "q", false), words);
    assert_eq!(client.refusal("blockdev-set-active", json!({"active": false})).replace("all nodes", "node"), words);
    io(&daemon, "q", "write -P 2 1M 1M");
    unexport(&mut client, "e");
    set(&mut client, "q", false);
    set(&mut client, "q", false);
    assert_eq!(states(&mut client), named(&[("q", false)]));
    // It is complete on disk, and has no locks.
    qemu.expect_clean(&path);
    let reads = ["read -P 1 0 1M", "read -P 2 1M 1M", "write -P 3 512k 64k"].map(str::to_owned);
    qemu.io_commands(&path, "qcow2", &reads).expect_ok();
    qemu.img(["resize", "-q", "-f", "qcow2", path.to_str().expect("text"), "24M"]).expect_ok();
    qemu.io_commands(&path, "qcow2", &["write -P 4 20M 64k".to_owned()]).expect_ok();
    for (command, arguments) in [
        ("block_resize", json!({"node-name": "q", "size": 32 << 20})),
        ("blockdev-mirror", json!({"device": "q", "target": "q", "sync": "full"})),
        (
            "blockdev-snapshot-sync",
            json!({"node-name": "q", "snapshot-file": daemon.path("o.qcow2"), "snapshot-node-name": "o"}),
        ),
        ("blockdev-reopen", json!({"options": [node(&path, "q")]})),
        ("block-dirty-bitmap-add", json!({"node": "q", "name": "c"})),
    ] {
        let refusal = client.refusal(command, arguments);
        assert!(refusal.contains("'q' is inactive"), "{command}: {refusal}");
    }
    let inactive = json!({"type": "nbd", "id": "e", "node-name": "q", "allow-inactive": true});
    assert!(client.refusal("block-export-add", inactive).contains("'q' is inactive"));
    assert!(client.refusal("blockdev-add", node(&path, "q")).contains("Duplicate"));
    // While another process has it, it stays inactive.
    let mut other = Command::new(qemu.io_path())
        .args(["-f", "qcow2"])
        .arg(&path)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("qemu-io runs");
    // It asks for a command when it has the image. No other process looks at the image meanwhile: that takes a lock of
    // its own.
    let mut prompt = [0; 9];
    other.stdout.as_mut().expect("a pipe").read_exact(&mut prompt).expect("it opens the image");
    assert_eq!(&prompt, b"qemu-io> ");
    assert!(refused(&mut client, "q", true).contains("lock"));
    assert_eq!(states(&mut client), named(&[("q", false)]));
    other.stdin.take().expect("a pipe").write_all(b"quit\n").expect("it listens");
    assert!(other.wait().expect("it ends").success());
    set(&mut client, "q", true);
    set(&mut client, "q", true);
    assert_eq!(states(&mut client), named(&[("q", true)]));
    let nodes = client.command("query-named-block-nodes", json!({}));
    let q = nodes.as_array().expect("a list").iter().find(|node| node["node-name"] == "q").expect("is listed");
    assert_eq!(q["image"]["virtual-size"], 24 << 20);
    // The other process's writes are recorded too: 2 MiB were ours.
    let bitmap = &q["dirty-bitmaps"][0];
    assert_eq!((&bitmap["name"], &bitmap["recording"]), (&json!("b"), &json!(true)), "{bitmap}");
    assert_eq!(bitmap["count"], (2 << 20) + 65536, "{bitmap}");
    // An export makes it active by itself.
    set(&mut client, "q", false);
    export(&mut client, "e", "q");
    assert_eq!(states(&mut client), named(&[("q", true)]));
    for command in ["read -P 3 512k 64k", "read -P 2 1M 1M", "read -P 4 20M 64k", "write -P 5 23M 1M"] {
        io(&daemon, "q", command);
    }
    let (folder, stopped) = daemon.keep_after_stop();
    stopped.expect("stopped in order");
    qemu.expect_clean(&folder.path().join("a.qcow2"));
}

#[test]
fn what_an_inactive_node_stands_on_is_inactive_too() {
    let (daemon, mut client) = serving();
    let (qemu, base) = (Qemu::system(), daemon.path("a.qcow2"));
    export(&mut client, "e", "q");
    io(&daemon, "q", "write -P 1 0 1M");
    let over = daemon.path("o.qcow2");
    qemu.img(["create", "-q", "-f", "qcow2", "-b", "a.qcow2", "-F", "qcow2", over.to_str().expect("text")]).expect_ok();
    let mut overlay = node(&over, "o");
    overlay["backing"] = Value::Null;
    client.command("blockdev-add", overlay);
    client.command("blockdev-snapshot", json!({"node": "q", "overlay": "o"}));
    io(&daemon, "q", "write -P 2 512k 64k");
    unexport(&mut client, "e");
    client.command("blockdev-add", json!({"driver": "null-co", "node-name": "n"}));
    assert_eq!(refused(&mut client, "q", false), "Node has active parent node");
    set(&mut client, "o", false);
    assert_eq!(states(&mut client), named(&[("n", true), ("o", false), ("q", false)]));
    assert!(client.refusal("blockdev-del", json!({"node-name": "q"})).contains("in use"));
    // No node reads the base meanwhile.
    qemu.io_commands(&base, "qcow2", &["write -P 3 256k 64k".to_owned()]).expect_ok();
    set(&mut client, "o", true);
    assert_eq!(states(&mut client), named(&[("n", true), ("o", true), ("q", true)]));
    client.command("blockdev-set-active", json!({"active": false}));
    assert_eq!(states(&mut client), named(&[("n", false), ("o", false), ("q", false)]));
    client.command("blockdev-set-active", json!({"active": true}));
    assert_eq!(states(&mut client), named(&[("n", true), ("o", true), ("q", true)]));
    export(&mut client, "e", "o");
    for command in ["read -P 1 0 256k", "read -P 3 256k 64k", "read -P 2 512k 64k", "read -P 1 576k 448k"] {
        io(&daemon, "o", command);
    }
    unexport(&mut client, "e");
    set(&mut client, "o", false);
    for name in ["o", "q", "n"] {
        client.command("blockdev-del", json!({"node-name": name}));
    }
    assert_eq!(states(&mut client), []);
    daemon.stop().expect("stopped in order");
}

#[test]
fn a_node_may_be_inactive_from_the_start() {
    let (daemon, mut client) = serving();
    client.command("blockdev-del", json!({"node-name": "q"}));
    let with = |name: &str, more: &[(&str, Value)]| {
        let mut options = node(&daemon.path(name), "q");
        more.iter().for_each(|(key, value)| options[*key] = value.clone());
        options
    };
    let qemu = Qemu::system();
    // The other process is still at it.
    let path = daemon.path("a.qcow2");
    client.command("blockdev-add", with("a.qcow2", &[("active", json!(false))]));
    assert_eq!(states(&mut client), named(&[("q", false)]));
    qemu.io_commands(&path, "qcow2", &["write -P 3 0 64k".to_owned()]).expect_ok();
    set(&mut client, "q", true);
    export(&mut client, "e", "q");
    io(&daemon, "q", "read -P 3 0 64k");
    unexport(&mut client, "e");
    client.command("blockdev-del", json!({"node-name": "q"}));
    assert!(client.refusal("blockdev-add", with("missing", &[("active", json!(false))])).contains("missing"));
    let file = json!({"driver": "file", "filename": path, "active": false});
    let refusal = client.refusal("blockdev-add", with("a.qcow2", &[("file", file)]));
    assert!(refusal.contains("'file.active=off' is for nodes that are added to a daemon"), "{refusal}");
    assert_eq!(states(&mut client), []);
    daemon.stop().expect("stopped in order");
}

#[test]
fn nodes_that_cannot_be_inactive_are_refused_by_name() {
    let (daemon, mut client) = serving();
    client.command("block-dirty-bitmap-add", json!({"node": "q", "name": "b"}));
    let refusal = refused(&mut client, "q", false);
    assert!(refusal.contains("bitmap 'b' of node 'q' is only in memory"), "{refusal}");
    assert_eq!(refused(&mut client, "zz", false), "Failed to find node with node-name='zz'");
    assert_eq!(refused(&mut client, "zz", true), "Failed to find node with node-name='zz'");
    assert_eq!(states(&mut client), named(&[("q", true)]));
    daemon.stop().expect("stopped in order");
}
