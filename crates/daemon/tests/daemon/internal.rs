// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Internal snapshots of an image that clients use.

use super::exports::{node, serving, uri};
use super::load::Load;
use super::running::{Client, Running};
use cowshed_testkit::qemu::Qemu;
use serde_json::{Value, json};
use std::path::Path;

const SIZE: u64 = 8 << 20;

/// A daemon with the empty image `a.qcow2` of these options as node `q`, and the writable export `e` of it.
fn with_image(options: &str) -> (Running, Client) {
    let daemon = Running::start(Vec::new());
    let path = daemon.path("a.qcow2");
    Qemu::system().create(&path, "qcow2", options, SIZE);
    let mut client = daemon.client();
    client.command("blockdev-add", node(&path, "q"));
    let address = json!({"type": "unix", "data": {"path": daemon.path("n.sock")}});
    client.command("nbd-server-start", json!({"addr": address}));
    client.command("block-export-add", json!({"type": "nbd", "id": "e", "node-name": "q", "writable": true}));
    (daemon, client)
}

fn take(client: &mut Client, name: &str) {
    client.command("blockdev-snapshot-internal-sync", json!({"device": "e", "name": name}));
}

/// The data of a snapshot, as qemu-img reads it.
fn content_of(qemu: &Qemu, folder: &Path, name: &str) -> Vec<u8> {
    let (image, raw) = (folder.join("a.qcow2"), folder.join("snapshot.raw"));
    let arguments = ["convert", "-O", "raw", "-l", &format!("snapshot.name={name}")].map(str::to_owned);
    let files = [image, raw.clone()].map(|path| path.to_str().expect("text").to_owned());
    qemu.img(arguments.into_iter().chain(files)).expect_ok();
    std::fs::read(raw).expect("what was just written")
}

fn names(qemu: &Qemu, folder: &Path) -> Vec<Value> {
    let info = qemu.info(&folder.join("a.qcow2"), "qcow2");
    info["snapshots"].as_array().into_iter().flatten().map(|one| one["name"].clone()).collect()
}

#[test]
fn internal_snapshots_under_writing_clients_hold_each_moment() {
    for (number, options) in [
        "cluster_size=64k",
        "cluster_size=4k,lazy_refcounts=on",
        "cluster_size=64k,extended_l2=on",
        "cluster_size=4k,compat=0.10",
        "cluster_size=512,refcount_bits=8",
    ]
    .iter()
    .enumerate()
    {
        let (daemon, mut client) = with_image(options);
        let (qemu, uri) = (Qemu::system(), uri(&daemon, "q"));
        let mut model = vec![0; SIZE as usize];
        Load::start(&uri, &mut model, number as u64).join();
        take(&mut client, "first");
        let first = model.clone();
        // Some while clients write: no request fails, and the image stays right.
        let load = Load::start(&uri, &mut model, 50 + number as u64);
        (0..3).for_each(|n| take(&mut client, &format!("busy{n}")));
        load.join();
        take(&mut client, "last");
        let last = model.clone();
        let deleted = client.command("blockdev-snapshot-delete-internal-sync", json!({"device": "q", "name": "busy1"}));
        assert_eq!((&deleted["name"], &deleted["vm-state-size"]), (&json!("busy1"), &json!(0)), "{deleted}");
        Load::start(&uri, &mut model, 100 + number as u64).join();
        let (folder, stopped) = daemon.keep_after_stop();
        stopped.expect("stopped in order");
        qemu.expect_clean(&folder.path().join("a.qcow2"));
        assert!(qemu.content(&folder.path().join("a.qcow2"), "qcow2") == model, "{options}: the disk");
        assert_eq!(names(&qemu, folder.path()), ["first", "busy0", "busy2", "last"], "{options}");
        assert!(content_of(&qemu, folder.path(), "first") == first, "{options}: the first snapshot");
        assert!(content_of(&qemu, folder.path(), "last") == last, "{options}: the last snapshot");
    }
}

#[test]
fn bitmaps_and_counts_go_on_over_an_internal_snapshot() {
    let (daemon, mut client) = with_image("");
    let (qemu, uri) = (Qemu::system(), uri(&daemon, "q"));
    let bitmap = |name: &str, persistent: bool| json!({"node": "q", "name": name, "persistent": persistent});
    client.command("block-dirty-bitmap-add", bitmap("kept", true));
    client.command("block-dirty-bitmap-add", bitmap("passing", false));
    qemu.io(["-f", "raw", "-c", "write -P 1 0 64k", &uri]).expect_ok();
    take(&mut client, "s");
    qemu.io(["-f", "raw", "-c", "write -P 2 1M 64k", "-c", "read -P 1 0 64k", &uri]).expect_ok();
    let nodes = client.command("query-named-block-nodes", json!({"flat": true}));
    let listed = nodes.as_array().expect("a list").iter().find(|node| node["node-name"] == "q").expect("is listed");
    for bitmap in listed["dirty-bitmaps"].as_array().expect("bitmaps") {
        assert_eq!(bitmap["count"], 2 << 16, "{bitmap}");
    }
    let stats = client.command("query-blockstats", json!({}));
    assert_eq!(stats[0]["stats"]["wr_bytes"], 2 << 16);
    let (folder, stopped) = daemon.keep_after_stop();
    stopped.expect("stopped in order");
    qemu.expect_clean(&folder.path().join("a.qcow2"));
    let info = qemu.info(&folder.path().join("a.qcow2"), "qcow2");
    assert_eq!(info["format-specific"]["data"]["bitmaps"][0]["flags"], json!(["auto"]), "consistent: {info}");
}

#[test]
fn internal_snapshots_that_cannot_be_are_refused_by_name() {
    let (daemon, mut client) = serving();
    client.command("block-export-add", json!({"type": "nbd", "id": "e", "node-name": "q", "writable": true}));
    take(&mut client, "s");
    let qemu = Qemu::system();
    qemu.create(&daemon.path("r.raw"), "raw", "", 1 << 20);
    let raw = json!({"driver": "raw", "node-name": "r", "file": {"driver": "file", "filename": daemon.path("r.raw")}});
    client.command("blockdev-add", raw);
    qemu.create(&daemon.path("o.qcow2"), "qcow2", "", 1 << 20);
    let mut read_only = node(&daemon.path("o.qcow2"), "o");
    read_only["read-only"] = json!(true);
    client.command("blockdev-add", read_only);
    for (device, name, reason) in [
        ("e", "s", "Snapshot with name 's' already exists"),
        ("e", "", "Name is empty"),
        ("zz", "t", "zz"),
        ("r", "t", "Block format 'raw' used by device 'r' does not support internal snapshots"),
        ("o", "t", "read only"),
    ] {
        let refusal = client.refusal("blockdev-snapshot-internal-sync", json!({"device": device, "name": name}));
        assert!(refusal.contains(reason), "{refusal}");
    }
    for (which, reason) in [
        (json!({"name": "t"}), "id 'null' and name 't' does not exist"),
        (json!({"id": "7"}), "id '7' and name 'null' does not exist"),
        (json!({"id": "2", "name": "s"}), "does not exist"),
        (json!({}), "must be provided"),
    ] {
        let mut arguments = which;
        arguments["device"] = json!("q");
        let refusal = client.refusal("blockdev-snapshot-delete-internal-sync", arguments);
        assert!(refusal.contains(reason), "{refusal}");
    }
    // A snapshot of a transaction that fails is taken back.
    let internal = json!({"type": "blockdev-snapshot-internal-sync", "data": {"device": "q", "name": "gone"}});
    let impossible = json!({"type": "blockdev-snapshot-internal-sync", "data": {"device": "q", "name": "s"}});
    client.refusal("transaction", json!({"actions": [internal, impossible]}));
    let overlay = json!({"type": "blockdev-snapshot-sync",
                         "data": {"node-name": "q", "snapshot-node-name": "x", "snapshot-file": daemon.path("x.qcow2")}});
    client.command("transaction", json!({"actions": [internal, overlay]}));
    let (folder, stopped) = daemon.keep_after_stop();
    stopped.expect("stopped in order");
    assert_eq!(names(&qemu, folder.path()), ["s", "gone"]);
    qemu.expect_clean(&folder.path().join("a.qcow2"));
}
