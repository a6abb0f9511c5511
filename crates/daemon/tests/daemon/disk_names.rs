// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One way to find a disk in all commands. An export's id is the disk that the export has now, and a node's name is the node.
//! The suite of `cowshed` compares the words about names that there are not, in every command, with QEMU's.

use super::exports::{node, serving};
use cowshed_testkit::qemu::Qemu;
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// Members of arguments that may name a disk.
const KEYS: [&str; 5] = ["device", "id", "node", "node-name", "qdev"];

/// The members that take a disk by the id of its export, or a node. Arguments without that member.
fn of_disks(path: impl Fn(&str) -> String) -> Vec<(&'static str, &'static str, Value)> {
    let no_limits = json!({"bps": 0, "bps_rd": 0, "bps_wr": 0, "iops": 0, "iops_rd": 0, "iops_wr": 0});
    vec![
        ("block_resize", "device", json!({"size": 20 << 20})),
        ("block_set_io_throttle", "device", no_limits.clone()),
        ("block_set_io_throttle", "id", no_limits),
        ("block-latency-histogram-set", "id", json!({})),
        ("x-block-stats-intervals-set", "id", json!({"intervals": []})),
        ("blockdev-snapshot-internal-sync", "device", json!({"name": "s"})),
        ("blockdev-snapshot-delete-internal-sync", "device", json!({"name": "s"})),
        ("blockdev-backup", "device", json!({"job-id": "j1", "target": "t1", "sync": "full"})),
        ("drive-backup", "device", json!({"job-id": "j2", "target": path("d1"), "sync": "full"})),
        ("blockdev-mirror", "device", json!({"job-id": "j3", "target": "t2", "sync": "full"})),
        ("drive-mirror", "device", json!({"job-id": "j4", "target": path("d2"), "sync": "full"})),
        ("change-backing-file", "device", json!({"image-node-name": "over", "backing-file": path("a.qcow2")})),
        ("block-commit", "device", json!({"job-id": "j5"})),
        ("block-stream", "device", json!({"job-id": "j6"})),
        ("blockdev-snapshot-sync", "device", json!({"snapshot-file": path("s1"), "snapshot-node-name": "s1"})),
    ]
}

/// The members that take a node by its name alone, as in QEMU.
const OF_NODES: &[(&str, &str)] = &[
    ("block-dirty-bitmap-add", "node"),
    ("block-dirty-bitmap-clear", "node"),
    ("block-dirty-bitmap-disable", "node"),
    ("block-dirty-bitmap-enable", "node"),
    ("block-dirty-bitmap-merge", "node"),
    ("block-dirty-bitmap-remove", "node"),
    ("block-export-add", "node-name"),
    ("block-set-write-threshold", "node-name"),
    ("block_resize", "node-name"),
    ("blockdev-del", "node-name"),
    ("blockdev-set-active", "node-name"),
    ("blockdev-snapshot", "node"),
    ("blockdev-snapshot-sync", "node-name"),
    ("nbd-server-add", "device"),
    ("x-blockdev-amend", "node-name"),
    ("x-blockdev-change", "node"),
    ("x-blockdev-remove", "node-name"),
    ("x-blockdev-set-iothread", "node-name"),
    ("x-debug-block-dirty-bitmap-sha256", "node"),
    ("x-fault-arm", "node-name"),
    ("x-fault-disarm", "node-name"),
    ("x-query-faults", "node-name"),
];

/// The members that name something else: a job, a device, an object, a rule, or something new.
const OF_OTHERS: &[(&str, &str)] = &[
    ("block-export-add", "id"),
    ("block-export-del", "id"),
    ("block-job-cancel", "device"),
    ("block-job-change", "id"),
    ("block-job-complete", "device"),
    ("block-job-dismiss", "id"),
    ("block-job-finalize", "id"),
    ("block-job-pause", "device"),
    ("block-job-resume", "device"),
    ("block-job-set-speed", "device"),
    ("blockdev-add", "node-name"),
    ("blockdev-snapshot-delete-internal-sync", "id"),
    ("chardev-add", "id"),
    ("chardev-change", "id"),
    ("chardev-remove", "id"),
    ("chardev-send-break", "id"),
    ("drive-mirror", "node-name"),
    ("job-cancel", "id"),
    ("job-complete", "id"),
    ("job-dismiss", "id"),
    ("job-finalize", "id"),
    ("job-pause", "id"),
    ("job-resume", "id"),
    ("object-add", "id"),
    ("object-del", "id"),
    ("ringbuf-read", "device"),
    ("ringbuf-write", "device"),
    ("x-blockdev-insert", "node-name"),
    ("x-fault-arm", "id"),
    ("x-fault-disarm", "id"),
];

#[test]
fn every_command_finds_a_disk_by_the_same_names() {
    let (daemon, mut client) = serving();
    let path = |name: &str| daemon.path(name).display().to_string();
    for target in ["t1", "t2"] {
        Qemu::system().create(&daemon.path(target), "qcow2", "", 20 << 20);
        client.command("blockdev-add", node(&daemon.path(target), target));
    }
    // The export is of `over` now, and no node has the export's name.
    client.command("block-export-add", json!({"type": "nbd", "id": "e", "node-name": "q", "writable": true}));
    let over = json!({"device": "e", "snapshot-file": path("over.qcow2"), "snapshot-node-name": "over"});
    client.command("blockdev-snapshot-sync", over);
    let image = |client: &mut super::running::Client, flat: bool| {
        client.command("query-block", json!({"flat": flat}))[0]["inserted"]["image"].clone()
    };
    assert!(
        image(&mut client, false)["backing-image"].is_object() && image(&mut client, true)["backing-image"].is_null()
    );
    // All commands of the schema are here.
    let schema = client.command("query-qmp-schema", json!({}));
    let schema = schema.as_array().expect("a list");
    let found = |name: &Value| schema.iter().find(|entry| entry["name"] == *name).expect("a type");
    let mut members = BTreeSet::new();
    for command in schema.iter().filter(|entry| entry["meta-type"] == "command") {
        for member in found(&command["arg-type"])["members"].as_array().into_iter().flatten() {
            let (command, key) = (command["name"].as_str().expect("text"), member["name"].as_str().expect("text"));
            members.extend(KEYS.contains(&key).then(|| (command.to_owned(), key.to_owned())));
        }
    }
    let disks = of_disks(path);
    let listed = disks.iter().map(|(command, key, _)| (*command, *key)).chain(OF_NODES.iter().copied());
    let listed = listed.chain(OF_OTHERS.iter().copied());
    let listed: BTreeSet<_> = listed.map(|(command, key)| (command.to_owned(), key.to_owned())).collect();
    assert_eq!(members, listed);
    // The last of these moves the export to another node.
    let mut disk = "over".to_owned();
    for (command, key, more) in &disks {
        let with = |name: &str| {
            let mut arguments = more.clone();
            arguments[*key] = name.into();
            arguments
        };
        let refusal = client.refusal(command, with("zz"));
        assert!(refusal.contains("'zz'"), "{command} {key}: {refusal}");
        let before = client.events.len();
        let answer = client.execute(command, with("e"));
        assert!(answer.is_ok(), "{command} {key}: {answer:?}");
        // A job works on the disk of the export. It ends before the next command.
        if let Some(job) = more["job-id"].as_str() {
            let jobs = client.command("query-block-jobs", json!({}));
            let of_job = jobs.as_array().expect("a list").iter().find(|found| found["device"] == job).cloned();
            loop {
                let jobs = client.command("query-jobs", json!({}));
                let found = jobs.as_array().expect("a list").iter().find(|found| found["id"] == job).cloned();
                match found.as_ref().and_then(|job| job["status"].as_str()) {
                    Some("ready") => drop(client.execute("block-job-cancel", json!({"device": job}))),
                    Some(_) => std::thread::yield_now(),
                    None => break,
                }
            }
            assert!(of_job.is_some() || client.events.len() > before, "{command}");
        }
        let exports = client.command("query-block-exports", json!({}));
        disk = exports[0]["node-name"].as_str().expect("a name").to_owned();
    }
    assert_eq!(disk, "s1");
    let nodes = client.command("query-named-block-nodes", json!({"flat": true}));
    let size = |name: &str| {
        let found = nodes.as_array().expect("a list").iter().find(|node| node["node-name"] == name).expect("is there");
        found["image"]["virtual-size"].as_u64().expect("a size")
    };
    assert_eq!(size("over"), 20 << 20);
    // A node's name is not an export's id.
    for (command, arguments) in [
        ("block_resize", json!({"node-name": "e", "size": 512})),
        ("blockdev-snapshot-sync", json!({"node-name": "e", "snapshot-file": "x", "snapshot-node-name": "x"})),
        ("block-dirty-bitmap-add", json!({"node": "e", "name": "b"})),
        ("block-export-add", json!({"type": "nbd", "id": "f", "node-name": "e"})),
        ("block-set-write-threshold", json!({"node-name": "e", "write-threshold": 1})),
        ("blockdev-del", json!({"node-name": "e"})),
    ] {
        let refusal = client.refusal(command, arguments);
        assert!(refusal.contains("'e'"), "{command}: {refusal}");
    }
    daemon.stop().expect("stopped in order");
}
