// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Users and commands that reach the nodes of a running job: QEMU's daemon and ours refuse the same ones.

use super::beside_qemu::Theirs;
use super::exports::node;
use super::running::{Client, Running};
use cowshed_testkit::qemu::Qemu;
use serde_json::{Value, json};
use std::path::Path;
use std::time::{Duration, Instant};

const CHAIN: [&str; 4] = ["base", "mid", "a", "top"];
const SIZE: u64 = 4 << 20;

/// Bounds the end of a job on a busy machine.
const END_LIMIT: Duration = Duration::from_secs(120);

/// Both daemons, each with a chain of its own, its NBD server and the throttle group `g`.
fn both() -> (Running, Theirs, [Client; 2]) {
    let ours = Running::start(Vec::new());
    let (theirs, their_client) = Theirs::start_newest();
    let mut clients = [ours.client(), their_client];
    for (client, folder) in clients.iter_mut().zip([ours.folder.path(), theirs.folder.path()]) {
        make(client, folder);
    }
    (ours, theirs, clients)
}

fn make(client: &mut Client, folder: &Path) {
    let qemu = Qemu::system();
    let mut below: Option<&str> = None;
    for (number, name) in CHAIN.into_iter().enumerate() {
        let path = folder.join(name);
        let backing = below.map(|below| format!("backing_file={},backing_fmt=qcow2", folder.join(below).display()));
        qemu.create(&path, "qcow2", &backing.unwrap_or_default(), SIZE);
        qemu.io_commands(&path, "qcow2", &[format!("write -P {} {number}M 64k", number + 1)]).expect_ok();
        below = Some(name);
    }
    below = None;
    for name in CHAIN {
        let mut options = node(&folder.join(name), name);
        options["backing"] = below.map_or(Value::Null, Value::from);
        client.command("blockdev-add", options);
        below = Some(name);
    }
    for name in ["ov", "t"] {
        qemu.create(&folder.join(name), "qcow2", "", SIZE);
    }
    client.command("blockdev-add", node(&folder.join("t"), "t"));
    client.command("object-add", json!({"qom-type": "throttle-group", "id": "g"}));
    let address = json!({"type": "unix", "data": {"path": folder.join("n.sock")}});
    client.command("nbd-server-start", json!({"addr": address}));
}

fn export(name: &str, writable: bool) -> Value {
    json!({"type": "nbd", "id": "late", "name": "late", "node-name": name, "writable": writable})
}

/// Exports a node and takes the export back; the refusal where there is one.
fn try_export(client: &mut Client, name: &str, writable: bool) -> Option<String> {
    let said = client.execute("block-export-add", export(name, writable)).err();
    if said.is_none() {
        client.command("block-export-del", json!({"id": "late", "mode": "hard"}));
        client.event("BLOCK_EXPORT_DELETED");
    }
    said.map(|error| error["desc"].as_str().expect("a text").to_owned())
}

/// As [`try_export`], of a new node above the one with that name.
fn try_export_above(client: &mut Client, folder: &Path, driver: &str, name: &str) -> Option<String> {
    let mut above = match driver {
        "qcow2" => node(&folder.join("ov"), "above"),
        _ => json!({"driver": driver, "node-name": "above"}),
    };
    match driver {
        "qcow2" => above["backing"] = json!(name),
        _ => (above["file"], above["throttle-group"]) = (json!(name), json!("g")),
    }
    client.command("blockdev-add", above);
    let said = try_export(client, "above", false);
    client.command("blockdev-del", json!({"node-name": "above"}));
    said
}

fn await_no_jobs(client: &mut Client) {
    let until = Instant::now() + END_LIMIT;
    while client.command("query-jobs", json!({})) != json!([]) {
        assert!(Instant::now() < until, "the job doesn't end");
        std::thread::yield_now();
    }
}

/// The late users of the chain's nodes, and whether they write.
const LATE: [(&str, bool); 4] = [("plain", false), ("plain", true), ("qcow2", false), ("throttle", false)];

fn all_refusals(client: &mut Client, folder: &Path) -> Vec<(String, Option<String>)> {
    let mut found = Vec::new();
    for name in ["base", "mid", "a"] {
        for (driver, writable) in LATE {
            let said = match driver {
                "plain" => try_export(client, name, writable),
                driver => try_export_above(client, folder, driver, name),
            };
            found.push((format!("{driver} {name} writable={writable}"), said));
        }
    }
    found
}

#[test]
fn no_user_comes_to_the_layers_of_a_job() {
    let jobs = [
        ("active commit", "block-commit", json!({"device": "top"})),
        ("merge", "block-commit", json!({"device": "top", "top-node": "a", "base-node": "base", "speed": 1})),
        ("stream", "block-stream", json!({"device": "top", "speed": 1})),
        ("stream in the middle", "block-stream", json!({"device": "a", "base-node": "base", "speed": 1})),
    ];
    for (kind, command, mut arguments) in jobs {
        arguments["job-id"] = json!("j");
        arguments["auto-finalize"] = json!(false);
        let (ours, theirs, mut clients) = both();
        let folders = [ours.folder.path(), theirs.folder.path()];
        let [mine, other] = [0, 1].map(|at| {
            let (client, folder) = (&mut clients[at], folders[at]);
            let disk = json!({"type": "nbd", "id": "e", "name": "e", "node-name": "top", "writable": true});
            client.command("block-export-add", disk);
            client.command(command, arguments.clone());
            if kind == "active commit" {
                client.event("BLOCK_JOB_READY");
            }
            all_refusals(client, folder)
        });
        for ((case, mine), (_, other)) in mine.iter().zip(&other) {
            // QEMU lets others write to the base of a commit that is ready, and to the node that a stream fills.
            let stricter =
                [("active commit", "plain base writable=true"), ("stream in the middle", "plain a writable=true")];
            if stricter.contains(&(kind, case.as_str())) {
                assert!(mine.is_some(), "{kind}: {case}");
                continue;
            }
            assert_eq!(mine.is_some(), other.is_some(), "{kind}: {case}: {mine:?}, QEMU: {other:?}");
            // A writer meets several others, of which each daemon names one.
            let told = other.as_ref().filter(|other| !case.ends_with("true") && other.contains("intermediate node"));
            if let Some(other) = told {
                assert_eq!(mine.as_ref(), Some(other), "{kind}: {case}");
            }
        }
        for client in &mut clients {
            client.command("job-cancel", json!({"id": "j"}));
            await_no_jobs(client);
            for name in ["base", "mid", "a"] {
                assert_eq!(try_export(client, name, false), None, "{kind}: {name} is free again");
            }
            client.command("quit", json!({}));
        }
        let (folder, stopped) = ours.keep_after_stop();
        stopped.expect("stopped in order");
        for name in CHAIN {
            Qemu::system().expect_clean(&folder.path().join(name));
        }
    }
}

/// The layers are free again, and closed where no command named them, once a commit has ended well.
#[test]
fn a_commit_that_ends_gives_its_layers_back() {
    let (ours, _theirs, [mut client, _]) = both();
    let merge = json!({"device": "top", "top-node": "a", "base-node": "base", "job-id": "j"});
    client.command("block-commit", merge);
    assert!(client.event("BLOCK_JOB_COMPLETED").get("error").is_none());
    for name in ["a", "mid"] {
        assert_eq!(try_export(&mut client, name, true), None, "{name} is free");
        client.command("blockdev-del", json!({"node-name": name}));
    }
    client.command("block-commit", json!({"device": "top", "job-id": "j"}));
    client.event("BLOCK_JOB_READY");
    client.command("job-complete", json!({"id": "j"}));
    assert!(client.event("BLOCK_JOB_COMPLETED").get("error").is_none());
    client.command("blockdev-del", json!({"node-name": "top"}));
    ours.stop().expect("stopped in order");
}

#[test]
fn no_filter_hides_a_busy_image_from_a_resize() {
    let jobs = [
        ("blockdev-mirror", json!({"target": "t", "sync": "full"})),
        ("blockdev-backup", json!({"target": "t", "sync": "full"})),
        ("block-commit", json!({})),
    ];
    for driver in ["throttle", "copy-on-read"] {
        for (command, mut arguments) in jobs.clone() {
            (arguments["device"], arguments["job-id"]) = (json!("flt"), json!("j"));
            (arguments["auto-finalize"], arguments["speed"]) = (json!(false), json!(1));
            let (ours, _theirs, mut clients) = both();
            let said = clients.each_mut().map(|client| {
                let mut filter = json!({"driver": driver, "node-name": "flt", "file": "top"});
                if driver == "throttle" {
                    filter["throttle-group"] = json!("g");
                }
                client.command("blockdev-add", filter);
                let disk = json!({"type": "nbd", "id": "e", "name": "e", "node-name": "flt", "writable": true});
                client.command("block-export-add", disk);
                client.command(command, arguments.clone());
                client.refusal("block_resize", json!({"node-name": "flt", "size": 2 * SIZE}))
            });
            let [mine, other] = said;
            assert!(mine.starts_with("Node 'flt' is busy: block device is in use by block job: "), "{command}: {mine}");
            if ["blockdev-mirror", "block-commit"].contains(&command) {
                assert_eq!(mine, other, "{driver}: {command}");
            }
            let [client, _] = &mut clients;
            let by_export = client.refusal("block_resize", json!({"device": "e", "size": 2 * SIZE}));
            assert_eq!(by_export, mine);
            client.command("job-cancel", json!({"id": "j"}));
            await_no_jobs(client);
            client.command("block_resize", json!({"node-name": "flt", "size": 2 * SIZE}));
            ours.stop().expect("stopped in order");
        }
    }
}

/// Else a mirror would end at a place that is in no chain any more.
#[test]
fn the_filter_that_a_mirror_is_to_replace_stays() {
    let (ours, _theirs, [mut client, _]) = both();
    let filter = json!({"driver": "throttle", "node-name": "flt", "file": "top", "throttle-group": "g"});
    client.command("blockdev-add", filter);
    client.command("block-export-add", export("flt", true));
    let mirror = json!({"job-id": "j", "device": "late", "target": "t", "sync": "full", "replaces": "flt"});
    client.command("blockdev-mirror", mirror);
    client.event("BLOCK_JOB_READY");
    let refusal = client.refusal("x-blockdev-remove", json!({"node-name": "flt"}));
    assert_eq!(refusal, "Node 'flt' is busy: block device is in use by block job: mirror");
    client.command("job-complete", json!({"id": "j"}));
    assert!(client.event("BLOCK_JOB_COMPLETED").get("error").is_none());
    assert_eq!(client.command("query-block-exports", json!({}))[0]["node-name"], "t");
    ours.stop().expect("stopped in order");
}
