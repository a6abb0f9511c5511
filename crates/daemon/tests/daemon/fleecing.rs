// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A disk as it was, exported while clients write to it: `copy-before-write` and `snapshot-access` by command.

use super::commits::{SIZE, chain};
use super::exports::{node, uri};
use super::load::Load;
use super::running::{Client, Running};
use cowshed_testkit::programs::tool;
use cowshed_testkit::qemu::{Output, Qemu};
use serde_json::{Value, json};

/// The export `disk` of a throttle filter above `t`, so that something can be put between, and an empty image `scratch`.
fn with_room() -> (Running, Client, Vec<u8>) {
    let (daemon, mut client, model) = chain("cluster_size=64k");
    client.command("block-export-del", json!({"id": "e"}));
    client.event("BLOCK_EXPORT_DELETED");
    client.command("object-add", json!({"qom-type": "throttle-group", "id": "g"}));
    let top = json!({"driver": "throttle", "node-name": "top", "throttle-group": "g", "file": "t"});
    client.command("blockdev-add", top);
    export(&mut client, "top", "disk", true);
    let path = daemon.path("scratch");
    Qemu::system().create(&path, "qcow2", "", SIZE);
    client.command("blockdev-add", node(&path, "scratch"));
    (daemon, client, model)
}

fn export(client: &mut Client, node: &str, name: &str, writable: bool) {
    let export = json!({"type": "nbd", "id": name, "node-name": node, "name": name, "writable": writable});
    client.command("block-export-add", export);
}

fn unexport(client: &mut Client, id: &str) {
    client.command("block-export-del", json!({"id": id}));
    client.event("BLOCK_EXPORT_DELETED");
}

/// Puts `top` onto another node.
fn stand_on(client: &mut Client, file: &str) {
    let options = json!({"driver": "throttle", "node-name": "top", "throttle-group": "g", "file": file});
    client.command("blockdev-reopen", json!({"options": [options]}));
}

/// Puts the filter between `top` and `t`, and exports `past`.
fn fleece(client: &mut Client, more: &Value) {
    let mut filter = json!({"driver": "copy-before-write", "node-name": "filter", "file": "t", "target": "scratch"});
    let options = filter.as_object_mut().expect("an object");
    options.extend(more.as_object().expect("an object").clone());
    client.command("blockdev-add", filter);
    stand_on(client, "filter");
    let past = json!({"driver": "snapshot-access", "node-name": "past", "file": "filter", "discard": "unmap"});
    client.command("blockdev-add", past);
    export(client, "past", "past", true);
}

fn io(daemon: &Running, export: &str, commands: &[&str]) -> Output {
    let uri = uri(daemon, export);
    let arguments = commands.iter().flat_map(|command| ["-c", command]);
    Qemu::system().io(["-f", "raw"].into_iter().chain(arguments).chain([uri.as_str()]))
}

#[track_caller]
fn works(daemon: &Running, export: &str, commands: &[&str]) {
    let said = io(daemon, export, commands).expect_ok();
    assert!(!said.stdout.contains("failed"), "{commands:?}: {}", said.stdout);
}

#[track_caller]
fn fails(daemon: &Running, export: &str, command: &str, words: &str) {
    let said = io(daemon, export, &[command]);
    assert!(format!("{}{}", said.stdout, said.stderr).contains(words), "{command}: {} {}", said.stdout, said.stderr);
}

fn wr_bytes(client: &mut Client, node: &str) -> u64 {
    let stats = client.command("query-blockstats", json!({"query-nodes": true}));
    let stats =
        stats.as_array().expect("a list").iter().find(|one| one["node-name"] == node).expect("is listed").clone();
    stats["stats"]["wr_bytes"].as_u64().expect("a number")
}

#[test]
fn the_past_of_a_disk_is_exported_while_clients_write() {
    let (daemon, mut client, mut model) = with_room();
    for round in 0..2 {
        let before = model.clone();
        fleece(&mut client, &json!({}));
        let load = Load::start(&uri(&daemon, "disk"), &mut model, 7 + round);
        for copy in ["one.raw", "two.raw"] {
            let copy = daemon.path(copy);
            tool("nbdcopy", &[&uri(&daemon, "past"), copy.to_str().expect("text")]);
            assert!(std::fs::read(&copy).expect("a copy") == before, "not as it was");
        }
        load.join();
        let copy = daemon.path("three.raw");
        tool("nbdcopy", &[&uri(&daemon, "past"), copy.to_str().expect("text")]);
        assert!(std::fs::read(&copy).expect("a copy") == before, "not as it was");
        // Nodes that it needs stay; the refusal names the node in the way.
        for used in ["filter", "scratch", "t"] {
            assert!(client.refusal("blockdev-del", json!({"node-name": used})).contains("in use"));
        }
        let past = json!({"driver": "throttle", "node-name": "top", "throttle-group": "g", "file": "t"});
        let refusal = client.refusal("blockdev-reopen", json!({"options": [past]}));
        assert!(refusal.contains("and unshared by node 'filter'"), "who writes past the filter spoils it: {refusal}");
        works(&daemon, "disk", &["write -P 0x33 0 512", "read -P 0x33 0 512"]);
        model[..512].fill(0x33);
        unexport(&mut client, "past");
        client.command("blockdev-del", json!({"node-name": "past"}));
        stand_on(&mut client, "t");
        client.command("blockdev-del", json!({"node-name": "filter"}));
        // The next round begins with this one's remains on the target.
    }
    let (folder, stopped) = daemon.keep_after_stop();
    stopped.expect("stopped in order");
    let qemu = Qemu::system();
    for name in ["t", "scratch"] {
        qemu.expect_clean(&folder.path().join(name));
    }
    assert!(qemu.content(&folder.path().join("t"), "qcow2") == model, "the disk itself is wrong");
}

#[test]
fn bitmap_limits_what_fleecing_keeps() {
    let (daemon, mut client, _) = with_room();
    let bitmap = json!({"node": "t", "name": "b", "granularity": 65536});
    client.command("block-dirty-bitmap-add", bitmap.clone());
    works(&daemon, "disk", &["write -P 11 1M 128k", "write -P 12 3M 64k"]);
    fleece(&mut client, &json!({"bitmap": {"node": "t", "name": "b"}}));
    // It was looked at once.
    client.command("block-dirty-bitmap-remove", json!({"node": "t", "name": "b"}));
    works(&daemon, "past", &["read -P 11 1M 128k", "read -P 12 3M 64k"]);
    fails(&daemon, "past", "read 0 64k", "read failed");
    fails(&daemon, "past", "read 960k 128k", "read failed");
    // A part that isn't kept isn't saved.
    works(&daemon, "disk", &["write -P 21 0 1M", "write -P 22 4M 1M"]);
    assert_eq!(wr_bytes(&mut client, "scratch"), 0);
    works(&daemon, "disk", &["write -P 23 1100k 1k"]);
    assert_eq!(wr_bytes(&mut client, "scratch"), 65536);
    works(&daemon, "past", &["read -P 11 1M 128k", "discard 1M 100k", "read -P 11 1088k 64k"]);
    fails(&daemon, "past", "read 1M 512", "read failed");
    works(&daemon, "disk", &["write -P 24 1M 64k", "read -P 24 1M 64k"]);
    assert_eq!(wr_bytes(&mut client, "scratch"), 65536, "nobody needs it any more");
    fails(&daemon, "past", "write 3M 64k", "write failed");
    fails(&daemon, "past", "write -z 3M 64k", "write failed");
    daemon.stop().expect("stopped in order");
}

#[test]
fn a_backup_of_the_past_gives_back_what_it_has_copied() {
    let (daemon, mut client, mut model) = with_room();
    let before = model.clone();
    fleece(&mut client, &json!({"cbw-timeout": 60, "on-cbw-error": "break-snapshot"}));
    Load::start(&uri(&daemon, "disk"), &mut model, 5).join();
    let path = daemon.path("copy");
    Qemu::system().create(&path, "qcow2", "", SIZE);
    client.command("blockdev-add", node(&path, "copy"));
    let load = Load::start(&uri(&daemon, "disk"), &mut model, 6);
    let backup = json!({"job-id": "k", "device": "past", "target": "copy", "sync": "full", "discard-source": true});
    client.command("blockdev-backup", backup);
    let completed = client.event("BLOCK_JOB_COMPLETED");
    assert!(completed.get("error").is_none(), "{completed}");
    load.join();
    fails(&daemon, "past", "read 0 64k", "read failed");
    fails(&daemon, "past", "read 7M 64k", "read failed");
    let saved = wr_bytes(&mut client, "scratch");
    Load::start(&uri(&daemon, "disk"), &mut model, 8).join();
    assert_eq!(wr_bytes(&mut client, "scratch"), saved, "nothing is saved that nobody needs");
    let (folder, stopped) = daemon.keep_after_stop();
    stopped.expect("stopped in order");
    let qemu = Qemu::system();
    for name in ["t", "scratch", "copy"] {
        qemu.expect_clean(&folder.path().join(name));
    }
    assert!(qemu.content(&folder.path().join("copy"), "qcow2") == before, "not as it was");
    assert!(qemu.content(&folder.path().join("t"), "qcow2") == model, "the disk itself is wrong");
    // Its clusters were given back, all of them.
    let left = qemu.map(&folder.path().join("scratch"), "qcow2");
    assert!(left.iter().all(|entry| !entry.data), "{left:?}");
}

#[test]
fn what_cannot_be_saved_fails_the_write_or_the_past() {
    for policy in ["break-guest-write", "break-snapshot"] {
        let (daemon, mut client, _) = with_room();
        client.command("blockdev-del", json!({"node-name": "scratch"}));
        let path = daemon.path("small");
        Qemu::system().create(&path, "raw", "", SIZE);
        let rule = json!({"event": "none", "iotype": "write", "sector": 2048, "sectors": 8192, "errno": 28});
        let file = json!({"driver": "blkdebug", "image": {"driver": "file", "filename": path}, "inject-error": [rule]});
        client.command("blockdev-add", json!({"driver": "raw", "node-name": "scratch", "file": file}));
        fleece(&mut client, &json!({"on-cbw-error": policy}));
        works(&daemon, "disk", &["write -P 77 0 64k"]);
        let said = io(&daemon, "disk", &["write -P 77 2M 64k"]);
        let failed = said.code != 0 || said.stdout.contains("failed") || said.stderr.contains("failed");
        assert_eq!(failed, policy == "break-guest-write", "{policy}: {} {}", said.stdout, said.stderr);
        if failed {
            works(&daemon, "disk", &["read -P 4 2M 64k"]);
            works(&daemon, "past", &["read -P 4 2M 64k", "read -P 1 256k 64k"]);
        } else {
            works(&daemon, "disk", &["read -P 77 2M 64k"]);
            fails(&daemon, "past", "read 2M 64k", "read failed");
            fails(&daemon, "past", "read 256k 64k", "read failed");
        }
        daemon.stop().expect("stopped in order");
    }
}

#[test]
fn a_filter_moves_to_another_node_or_stays_where_it_is() {
    let (daemon, mut client, _) = with_room();
    let top = |file: Value| {
        let options = json!({"driver": "throttle", "node-name": "top", "throttle-group": "g", "file": file});
        json!({"options": [options]})
    };
    for (file, words) in [
        (json!("zz"), "Cannot find device='' nor node-name='zz'"),
        (json!("top"), "Making 'top' a file child of 'top' would create a cycle"),
        (json!("m"), "Block node is read-only"),
        (json!({"driver": "null-co", "size": SIZE}), "Cannot change the option 'file.driver'"),
    ] {
        let refusal = client.refusal("blockdev-reopen", top(file));
        assert!(refusal.contains(words), "{refusal}");
    }
    works(&daemon, "disk", &["read -P 4 2M 64k", "write -P 4 2M 64k"]);
    // All or nothing: the second one can't be.
    let other = json!({"driver": "qcow2", "node-name": "m", "file": "zz"});
    let options = json!({"driver": "throttle", "node-name": "top", "throttle-group": "g", "file": "scratch"});
    client.refusal("blockdev-reopen", json!({"options": [options, other]}));
    works(&daemon, "disk", &["read -P 4 2M 64k"]);
    stand_on(&mut client, "scratch");
    works(&daemon, "disk", &["read -P 0 0 8M", "write -P 9 0 64k"]);
    stand_on(&mut client, "t");
    works(&daemon, "disk", &["read -P 4 2M 64k"]);
    daemon.stop().expect("stopped in order");
}

#[test]
fn fleecing_never_stores_into_its_own_source() {
    let (daemon, mut client, _) = with_room();
    client.command("block-export-del", json!({"id": "disk", "mode": "hard"}));
    client.event("BLOCK_EXPORT_DELETED");
    client.command("blockdev-del", json!({"node-name": "top"}));
    let raw = json!({"driver": "raw", "node-name": "stored", "file": "t"});
    client.command("blockdev-add", raw);
    for target in ["stored", "t"] {
        let filter = json!({"driver": "copy-before-write", "node-name": "filter", "file": "t", "target": target});
        let refusal = client.refusal("blockdev-add", filter);
        assert!(
            refusal.contains(&format!("the target '{target}' is stored in 't', whose past it is to keep")),
            "{refusal}"
        );
    }
    let names = client.command("query-named-block-nodes", json!({"flat": true})).to_string();
    assert!(!names.contains("\"filter\""), "{names}");
    daemon.stop().expect("stopped in order");
}
