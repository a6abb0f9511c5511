// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `block-commit` by command, while clients write.

use super::exports::{node, uri};
use super::load::{Load, apply, as_commands};
use super::running::{Client, Running};
use cowshed_testkit::qemu::Qemu;
use serde_json::{Value, json};

pub const SIZE: u64 = 8 << 20;

/// Pattern, offset, length.
type Writes = &'static [(u8, usize, usize)];

/// What the layers of the chain hold, base first.
pub const LAYERS: &[(&str, u64, Writes)] = &[
    ("b", SIZE, &[(1, 0, 4 << 20), (2, 6 << 20, 2 << 20)]),
    // Shorter than the others: what the base has behind its end is not to be seen.
    ("l", 7 << 20, &[(3, 1 << 20, 300 << 10), (0, 100 << 10, 50 << 10)]),
    ("m", SIZE, &[(4, 2 << 20, 1 << 20), (0, 3 << 20, 65536)]),
    ("t", SIZE, &[(5, 5 << 20, 70_144), (6, 512, 1024)]),
];

/// A daemon with the chain `b` ← `l` ← `m` ← `t`, all by name, and the export `e` of `t`; and what the disk holds.
pub fn chain(options: &str) -> (Running, Client, Vec<u8>) {
    let daemon = Running::start(Vec::new());
    let qemu = Qemu::system();
    let mut client = daemon.client();
    let mut model: Vec<u8> = Vec::new();
    let mut below: Option<&str> = None;
    for (name, size, writes) in LAYERS {
        let path = daemon.path(name);
        let backing = below.map(|below| format!(",backing_file={},backing_fmt=qcow2", daemon.path(below).display()));
        let options = format!("{options}{}", backing.unwrap_or_default());
        qemu.create(&path, "qcow2", &options, *size);
        qemu.io_commands(&path, "qcow2", &as_commands(writes)).expect_ok();
        model.resize(*size as usize, 0);
        apply(&mut model, writes);
        assert!(qemu.content(&path, "qcow2") == model, "the model is wrong");
        let mut options = node(&path, name);
        options["backing"] = below.map_or(Value::Null, Value::from);
        options["read-only"] = json!(*name != "t");
        client.command("blockdev-add", options);
        below = Some(name);
    }
    let address = json!({"type": "unix", "data": {"path": daemon.path("n.sock")}});
    client.command("nbd-server-start", json!({"addr": address}));
    client.command("block-export-add", json!({"type": "nbd", "id": "e", "node-name": "t", "writable": true}));
    (daemon, client, model)
}

/// Stops the daemon; the images are clean and `top` holds the model, as QEMU reads it.
pub fn expect_content(daemon: Running, top: &str, model: &[u8]) -> tempfile::TempDir {
    let (folder, stopped) = daemon.keep_after_stop();
    stopped.expect("stopped in order");
    let qemu = Qemu::system();
    for (name, ..) in LAYERS {
        qemu.expect_clean(&folder.path().join(name));
    }
    let found = qemu.content(&folder.path().join(top), "qcow2");
    let differs = found.iter().zip(model).position(|(one, other)| one != other);
    assert_eq!((differs, found.len()), (None, model.len()), "{top} reads otherwise");
    folder
}

pub fn backing_of(path: &std::path::Path) -> Value {
    Qemu::system().info(path, "qcow2")["backing-filename"].clone()
}

const OPTIONS: &[&str] = &["cluster_size=64k", "cluster_size=4k", "compat=0.10", "extended_l2=on,cluster_size=128k"];

#[test]
fn the_active_layer_is_committed_under_writing_clients() {
    for (number, options) in OPTIONS.iter().enumerate() {
        for base in ["b", "m"] {
            let (daemon, mut client, mut model) = chain(options);
            let load = Load::start(&uri(&daemon, "t"), &mut model, number as u64);
            client.command("block-commit", json!({"job-id": "c", "device": "e", "base-node": base}));
            assert_eq!(client.event("BLOCK_JOB_READY")["type"], "commit");
            assert!(client.refusal("blockdev-del", json!({"node-name": "t"})).contains("in use"));
            assert!(client.refusal("block_resize", json!({"node-name": base, "size": 9 << 20})).contains("in use"));
            client.command("job-complete", json!({"id": "c"}));
            let completed = client.event("BLOCK_JOB_COMPLETED");
            assert!(completed.get("error").is_none(), "{completed}");
            load.join();
            assert_eq!(client.command("query-block-exports", json!({}))[0]["node-name"], base);
            let second = Load::start(&uri(&daemon, "t"), &mut model, 77);
            client.command("blockdev-del", json!({"node-name": "t"}));
            second.join();
            drop(expect_content(daemon, base, &model));
        }
    }
}

#[test]
fn layers_in_the_middle_are_committed_under_writing_clients() {
    for (number, options) in OPTIONS.iter().enumerate() {
        for (top, base, overlay) in [("m", "l", "t"), ("l", "b", "m"), ("m", "b", "t")] {
            let (daemon, mut client, mut model) = chain(options);
            let load = Load::start(&uri(&daemon, "t"), &mut model, number as u64);
            let arguments = json!({"job-id": "c", "device": "t", "top-node": top, "base": daemon.path(base)});
            client.command("block-commit", arguments);
            let completed = client.event("BLOCK_JOB_COMPLETED");
            assert!(completed.get("error").is_none(), "{completed}");
            load.join();
            client.command("blockdev-del", json!({"node-name": top}));
            let nodes = client.command("query-named-block-nodes", json!({"flat": true}));
            let described = nodes.as_array().expect("a list").iter().find(|node| node["node-name"] == overlay);
            assert_eq!(described.expect("the overlay")["backing_file"], json!(daemon.path(base)));
            let second = Load::start(&uri(&daemon, "t"), &mut model, 78);
            second.join();
            let base_path = daemon.path(base);
            let folder = expect_content(daemon, "t", &model);
            assert_eq!(backing_of(&folder.path().join(overlay)), json!(base_path));
        }
    }
}
