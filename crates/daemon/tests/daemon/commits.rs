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

/// The data of the chain's layers, base first.
pub const LAYERS: &[(&str, u64, Writes)] = &[
    ("b", SIZE, &[(1, 0, 4 << 20), (2, 6 << 20, 2 << 20)]),
    // Shorter than the others: the base's data behind its end must not show.
    ("l", 7 << 20, &[(3, 1 << 20, 300 << 10), (0, 100 << 10, 50 << 10)]),
    ("m", SIZE, &[(4, 2 << 20, 1 << 20), (0, 3 << 20, 65536)]),
    ("t", SIZE, &[(5, 5 << 20, 70_144), (6, 512, 1024)]),
];

/// A daemon with the chain `b` ← `l` ← `m` ← `t`, all by name, and the export `e` of `t`; and the disk's data.
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
    backing_in(path, "qcow2")
}

/// The backing file in the header of an image of this format.
pub fn backing_in(path: &std::path::Path, format: &str) -> Value {
    Qemu::system().info(path, format)["backing-filename"].clone()
}

pub const OPTIONS: &[&str] =
    &["cluster_size=64k", "cluster_size=4k", "compat=0.10", "extended_l2=on,cluster_size=128k"];

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

#[test]
fn a_base_that_grows_shows_nothing_that_was_discarded() {
    let daemon = Running::start(Vec::new());
    let (qemu, mut client) = (Qemu::system(), daemon.client());
    let (base, top) = (daemon.path("b"), daemon.path("t"));
    qemu.create(&base, "qcow2", "", 4 << 20);
    qemu.create(&top, "qcow2", &format!("backing_file={},backing_fmt=qcow2", base.display()), SIZE);
    qemu.io_commands(&top, "qcow2", &["write -P 5 3M 4M".to_owned()]).expect_ok();
    client.command("blockdev-add", node(&top, "t"));
    let address = json!({"type": "unix", "data": {"path": daemon.path("n.sock")}});
    client.command("nbd-server-start", json!({"addr": address}));
    client.command("block-export-add", json!({"type": "nbd", "id": "e", "node-name": "t", "writable": true}));
    client.command("block-commit", json!({"job-id": "c", "device": "t", "base": base}));
    client.event("BLOCK_JOB_READY");
    qemu.io(["-f", "raw", "-c", "write -z -u 5M 1M", &uri(&daemon, "t")]).expect_ok();
    let read = ["-f", "raw", "-c", "read -P 5 3M 2M", "-c", "read -P 0 5M 1M", "-c", "read -P 5 6M 1M"];
    let read = |uri: &str| {
        let output = qemu.io(read.iter().copied().chain([uri])).expect_ok();
        assert!(!output.stdout.contains("failed"), "{}", output.stdout);
    };
    read(&uri(&daemon, "t"));
    client.command("job-complete", json!({"id": "c"}));
    let completed = client.event("BLOCK_JOB_COMPLETED");
    assert!(completed.get("error").is_none(), "{completed}");
    read(&uri(&daemon, "t"));
    let (folder, stopped) = daemon.keep_after_stop();
    stopped.expect("stopped in order");
    qemu.expect_clean(&folder.path().join("b"));
    assert_eq!(qemu.info(&folder.path().join("b"), "qcow2")["virtual-size"], SIZE);
}

#[test]
fn a_commit_that_is_cancelled_or_fails_leaves_the_chain() {
    for (top, ready, force) in [("t", true, true), ("t", false, false), ("m", false, false)] {
        let (daemon, mut client, mut model) = chain("cluster_size=64k");
        let speed = if ready { 0 } else { 256 << 10 };
        let arguments = json!({"job-id": "c", "device": "t", "top-node": top, "base-node": "b", "speed": speed});
        client.command("block-commit", arguments);
        if ready {
            client.event("BLOCK_JOB_READY");
        }
        let load = Load::start(&uri(&daemon, "t"), &mut model, 9);
        client.command("block-job-cancel", json!({"device": "c", "force": force}));
        client.event("BLOCK_JOB_CANCELLED");
        load.join();
        assert_eq!(client.command("query-block-exports", json!({}))[0]["node-name"], "t");
        let nodes = client.command("query-named-block-nodes", json!({"flat": true}));
        let read_only = |name: &str| {
            let found = nodes.as_array().expect("a list").iter().find(|node| node["node-name"] == name);
            found.expect("the node")["ro"] == true
        };
        assert!(read_only("b") && read_only("m") && !read_only("t"));
        drop(expect_content(daemon, "t", &model));
    }
}

#[test]
fn a_full_base_pauses_a_commit_or_ends_it() {
    for policy in ["report", "stop"] {
        let (daemon, mut client, _) = chain("cluster_size=64k");
        let (low, top) = (daemon.path("e1"), daemon.path("e2"));
        let qemu = Qemu::system();
        qemu.create(&low, "raw", "", 4 << 20);
        qemu.create(&top, "qcow2", &format!("backing_file={},backing_fmt=raw", low.display()), 4 << 20);
        qemu.io_commands(&top, "qcow2", &["write -P 9 0 4M".to_owned()]).expect_ok();
        let rule = json!({"event": "none", "iotype": "write", "sector": 4096, "errno": 28, "times": 1});
        let file = json!({"driver": "blkdebug", "image": {"driver": "file", "filename": low}, "inject-error": [rule]});
        client.command("blockdev-add", json!({"driver": "raw", "node-name": "low", "read-only": true, "file": file}));
        let file = json!({"driver": "file", "filename": top});
        client.command("blockdev-add", json!({"driver": "qcow2", "node-name": "top", "backing": "low", "file": file}));
        client.command("block-commit", json!({"job-id": "c", "device": "top", "on-error": policy}));
        let error = client.event("BLOCK_JOB_ERROR");
        assert_eq!(error, json!({"device": "c", "operation": "write", "action": policy}));
        if policy == "stop" {
            assert_eq!(client.command("query-block-jobs", json!({}))[0]["io-status"], "nospace");
            client.command("job-resume", json!({"id": "c"}));
            client.event("BLOCK_JOB_READY");
            client.command("job-complete", json!({"id": "c"}));
        }
        let completed = client.event("BLOCK_JOB_COMPLETED");
        assert_eq!(completed.get("error").is_some(), policy == "report", "{completed}");
        let (folder, stopped) = daemon.keep_after_stop();
        stopped.expect("stopped in order");
        qemu.expect_clean(&folder.path().join("e2"));
        for (name, format) in [("e2", "qcow2"), ("e1", "raw")] {
            if policy == "stop" || name == "e2" {
                let found = qemu.content(&folder.path().join(name), format);
                assert!(found.iter().all(|&byte| byte == 9), "{policy}: {name}");
            }
        }
    }
}

#[test]
fn a_commit_waits_to_be_finalized() {
    let (daemon, mut client, model) = chain("cluster_size=64k");
    let arguments = json!({"job-id": "c", "device": "t", "top-node": "m", "base-node": "b", "auto-finalize": false,
                           "auto-dismiss": false, "backing-file": "b"});
    client.command("block-commit", arguments);
    assert_eq!(client.event("BLOCK_JOB_PENDING"), json!({"type": "commit", "id": "c"}));
    assert_eq!(backing_of_live(&mut client, "t"), json!(daemon.path("m")));
    client.command("job-finalize", json!({"id": "c"}));
    client.event("BLOCK_JOB_COMPLETED");
    assert_eq!(backing_of_live(&mut client, "t"), json!(daemon.path("b")));
    assert_eq!(client.command("query-jobs", json!({}))[0]["status"], "concluded");
    client.command("job-dismiss", json!({"id": "c"}));
    let folder = expect_content(daemon, "t", &model);
    assert_eq!(backing_of(&folder.path().join("t")), json!("b"));
}

fn backing_of_live(client: &mut Client, name: &str) -> Value {
    let nodes = client.command("query-named-block-nodes", json!({"flat": true}));
    let found = nodes.as_array().expect("a list").iter().find(|node| node["node-name"] == name);
    found.expect("the node")["backing_file"].clone()
}

/// As in QEMU, an export may read the base of a commit, and goes on afterwards.
#[test]
fn an_export_reads_the_base_of_a_commit() {
    let (daemon, mut client, model) = chain("cluster_size=64k");
    client.command("block-export-add", json!({"type": "nbd", "id": "r", "node-name": "b", "name": "reader"}));
    client.command("block-commit", json!({"job-id": "c", "device": "e", "top-node": "m", "base-node": "b"}));
    assert!(client.event("BLOCK_JOB_COMPLETED").get("error").is_none());
    for name in ["m", "l"] {
        client.command("blockdev-del", json!({"node-name": name}));
    }
    client.command("block-commit", json!({"job-id": "c", "device": "e"}));
    client.event("BLOCK_JOB_READY");
    client.command("job-complete", json!({"id": "c"}));
    assert!(client.event("BLOCK_JOB_COMPLETED").get("error").is_none());
    let read = ["-r", "-f", "raw", "-c", "read -P 6 512 1024", &uri(&daemon, "reader")];
    let said = Qemu::system().io(read).expect_ok();
    assert!(!said.stdout.contains("failed"), "{}", said.stdout);
    expect_content(daemon, "b", &model);
}

#[test]
fn commits_that_cannot_be_are_refused_by_name() {
    let (daemon, mut client, _) = chain("cluster_size=64k");
    client.command("block-export-add", json!({"type": "nbd", "id": "f", "node-name": "l", "name": "low"}));
    for (mut arguments, words) in [
        (json!({"device": "t", "base-node": "t"}), "cannot commit an image into itself"),
        (json!({"device": "t", "base-node": "none"}), "Cannot find device='' nor node-name='none'"),
        (json!({"device": "m", "base-node": "t"}), "Need a root block node"),
        (json!({"device": "t", "top-node": "m", "base-node": "t"}), "'t' is not in the backing chain of 'm'"),
        (json!({"device": "t", "base": "nowhere"}), "Can't find 'nowhere' in the backing chain"),
        (json!({"device": "t", "base": "x", "base-node": "b"}), "mutually exclusive"),
        (json!({"device": "t", "backing-file": "x", "base-node": "m"}), "but 'top' is the active layer"),
        (
            json!({"device": "t", "top-node": "m", "base-node": "b"}),
            "Permission conflict on node 'l': permissions 'consistent read'",
        ),
        (json!({"device": "b"}), "Need a root block node"),
    ] {
        arguments["job-id"] = json!("c");
        let refusal = client.refusal("block-commit", arguments);
        assert!(refusal.contains(words), "{words}: {refusal}");
    }
    assert_eq!(client.command("query-jobs", json!({})), json!([]));
    daemon.stop().expect("stopped in order");
}

#[test]
fn a_commit_that_is_ready_can_end_without_taking_over() {
    let (daemon, mut client, mut model) = chain("cluster_size=64k");
    client.command("block-commit", json!({"job-id": "c", "device": "t", "base-node": "b"}));
    client.event("BLOCK_JOB_READY");
    client.command("block-job-cancel", json!({"device": "c"}));
    let completed = client.event("BLOCK_JOB_COMPLETED");
    assert!(completed.get("error").is_none(), "{completed}");
    let committed = model.clone();
    Load::start(&uri(&daemon, "t"), &mut model, 11).join();
    let folder = expect_content(daemon, "t", &model);
    assert!(Qemu::system().content(&folder.path().join("b"), "qcow2") == committed, "the base lacks something");
}

/// A daemon with the VMDK chain `b` ← `m` ← `t`, the file of `m` behind rules, and the export `e` of `t`.
fn vmdk_chain(rules: Value) -> (Running, Client) {
    let (daemon, qemu) = (Running::start(Vec::new()), Qemu::newest());
    let mut client = daemon.client();
    let mut below: Option<&str> = None;
    for (number, name) in ["b", "m", "t"].into_iter().enumerate() {
        let path = daemon.path(name);
        let options = below
            .map_or(String::new(), |below| format!("backing_file={},backing_fmt=vmdk", daemon.path(below).display()));
        qemu.create(&path, "vmdk", &options, SIZE);
        qemu.io_commands(&path, "vmdk", &[format!("write -P {} {number}M 2M", number + 1)]).expect_ok();
        let mut file = json!({"driver": "file", "filename": path});
        if name == "m" {
            file = json!({"driver": "blkdebug", "inject-error": rules, "image": file});
        }
        let backing = below.map_or(Value::Null, Value::from);
        let options =
            json!({"driver": "vmdk", "node-name": name, "file": file, "backing": backing, "read-only": name != "t"});
        client.command("blockdev-add", options);
        below = Some(name);
    }
    let address = json!({"type": "unix", "data": {"path": daemon.path("n.sock")}});
    client.command("nbd-server-start", json!({"addr": address}));
    client.command("block-export-add", json!({"type": "nbd", "id": "e", "node-name": "t", "writable": true}));
    (daemon, client)
}

/// The content id of a parent is changed before its overlay notes it.
#[test]
fn a_parent_that_its_overlay_cannot_note_keeps_its_id() {
    let (daemon, mut client) = vmdk_chain(json!([{"event": "none", "iotype": "write"}]));
    let images = || ["b", "m"].map(|name| std::fs::read(daemon.path(name)).expect("an image"));
    let before = images();
    let commit = json!({"job-id": "k", "device": "t", "top-node": "m"});
    let refused = client.execute("block-commit", commit);
    if refused.is_ok() {
        let completed = client.event("BLOCK_JOB_COMPLETED");
        assert!(completed["error"].is_string(), "{completed}");
    }
    assert!(images() == before, "an image was changed");
    let (folder, stopped) = daemon.keep_after_stop();
    stopped.expect("stopped in order");
    let top = folder.path().join("t");
    Qemu::newest()
        .io_commands(&top, "vmdk", &["read -P 1 0 1M".into(), "read -P 2 1M 1M".into(), "read -P 3 2M 2M".into()])
        .expect_ok();
}

/// The overlay stays beside the base, which is the disk from then on: it must not show its data over later ones.
#[test]
fn an_overlay_left_behind_by_a_commit_is_refused() {
    for later_writes in [true, false] {
        let (daemon, mut client) = vmdk_chain(json!([]));
        client.command("block-commit", json!({"job-id": "k", "device": "t", "base-node": "m"}));
        client.event("BLOCK_JOB_READY");
        client.command("job-complete", json!({"id": "k"}));
        client.event("BLOCK_JOB_COMPLETED");
        if later_writes {
            Qemu::newest().io(["-f", "raw", "-c", "write -P 9 2M 1M", "-c", "flush", &uri(&daemon, "t")]).expect_ok();
        }
        let (folder, stopped) = daemon.keep_after_stop();
        stopped.expect("stopped in order");
        let qemu = Qemu::newest();
        let pattern = if later_writes { 9 } else { 3 };
        let reads = [format!("read -P {pattern} 2M 1M"), "read -P 3 3M 1M".into(), "read -P 1 0 1M".into()];
        qemu.io_commands(&folder.path().join("m"), "vmdk", &reads).expect_ok();
        let top = folder.path().join("t");
        let opened = Running::start(Vec::new()).client().execute(
            "blockdev-add",
            json!({"driver": "vmdk", "node-name": "t", "read-only": true, "file": {"driver": "file", "filename": top}}),
        );
        match later_writes {
            true => {
                assert!(opened.expect_err("a stale overlay")["desc"].as_str().unwrap().contains("was changed since"))
            }
            false => drop(opened.expect("the same content")),
        }
    }
}
