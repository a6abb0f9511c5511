// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Several backups of one disk at a time, and other jobs beside a backup: as in QEMU.

use super::commits::{SIZE, chain};
use super::exports::{node, uri};
use super::load::Load;
use super::running::{Client, Running};
use super::unchanged_data::{both, export, guest};
use cowshed_testkit::qemu::Qemu;
use serde_json::{Value, json};
use std::path::Path;

/// An empty image as node `name`, whose header names the base of an incremental backup.
fn add_target(daemon: &Running, client: &mut Client, name: &str, below: Option<&Path>) {
    let path = daemon.path(name);
    let options = below.map(|below| format!("backing_file={},backing_fmt=raw", below.display()));
    Qemu::system().create(&path, "qcow2", &options.unwrap_or_default(), SIZE);
    let mut options = node(&path, name);
    options["backing"] = Value::Null;
    client.command("blockdev-add", options);
}

/// A backup of the disk that keeps its past readable, as the export `past-NAME`.
fn keep_past(daemon: &Running, client: &mut Client, name: &str) -> Value {
    let path = daemon.path(name);
    Qemu::system().create(&path, "qcow2", "", SIZE);
    let mut options = node(&path, name);
    options["backing"] = json!("t");
    client.command("blockdev-add", options);
    json!({"job-id": format!("job-{name}"), "device": "t", "target": name, "sync": "none"})
}

fn export_past(client: &mut Client, name: &str) {
    let name = (name, format!("past-{name}"));
    client.command("block-export-add", json!({"type": "nbd", "id": name.1, "node-name": name.0, "name": name.1}));
}

fn expect_past(daemon: &Running, name: &str, model: &[u8]) {
    let out = daemon.path(&format!("{name}.raw"));
    let from = uri(daemon, &format!("past-{name}"));
    Qemu::system().convert((Path::new(&from), "raw"), (&out, "raw"), &[]);
    assert!(std::fs::read(&out).expect("a copy") == model, "{name} is not the disk as it was");
}

fn end_past(client: &mut Client, name: &str) {
    client.command("block-export-del", json!({"id": format!("past-{name}"), "mode": "hard"}));
    client.event("BLOCK_EXPORT_DELETED");
    client.command("job-cancel", json!({"id": format!("job-{name}")}));
    assert_eq!(client.event("BLOCK_JOB_CANCELLED")["device"], format!("job-{name}"));
}

#[test]
fn each_backup_holds_its_own_moment() {
    for seed in 0..3 {
        let (daemon, mut client, mut model) = chain("cluster_size=64k");
        let old = model.clone();
        let old_file = daemon.path("old");
        std::fs::write(&old_file, &old).expect("a copy of the model");
        client.command("block-dirty-bitmap-add", json!({"node": "t", "name": "p", "persistent": true}));
        client.command("block-dirty-bitmap-add", json!({"node": "t", "name": "q", "granularity": 4096}));
        let first = keep_past(&daemon, &mut client, "first");
        client.command("blockdev-backup", first);
        export_past(&mut client, "first");
        Load::start(&uri(&daemon, "t"), &mut model, seed).join();
        let middle = model.clone();
        // All of these begin now, beside the first one.
        let second = keep_past(&daemon, &mut client, "second");
        let mut actions = vec![json!({"type": "blockdev-backup", "data": second})];
        for (name, bitmap) in [("full", None), ("inc-p", Some("p")), ("inc-q", Some("q"))] {
            add_target(&daemon, &mut client, name, bitmap.map(|_| old_file.as_path()));
            let mut data = json!({"job-id": name, "device": "t", "target": name, "sync": "full", "speed": 1 << 20});
            if let Some(bitmap) = bitmap {
                data["sync"] = json!("incremental");
                data["bitmap"] = json!(bitmap);
            }
            actions.push(json!({"type": "blockdev-backup", "data": data}));
        }
        client.command("transaction", json!({"actions": actions}));
        export_past(&mut client, "second");
        let load = Load::start(&uri(&daemon, "t"), &mut model, 10 + seed);
        expect_past(&daemon, "first", &old);
        end_past(&mut client, "first");
        expect_past(&daemon, "second", &middle);
        load.join();
        expect_past(&daemon, "second", &middle);
        for name in ["full", "inc-p", "inc-q"] {
            // It may have ended.
            let _ = client.execute("block-job-set-speed", json!({"device": name, "speed": 0}));
        }
        for _ in 0..3 {
            let completed = client.event("BLOCK_JOB_COMPLETED");
            assert!(completed.get("error").is_none(), "{completed}");
        }
        expect_past(&daemon, "second", &middle);
        end_past(&mut client, "second");
        let (folder, stopped) = daemon.keep_after_stop();
        stopped.expect("stopped in order");
        let qemu = Qemu::system();
        for name in ["full", "inc-p", "inc-q"] {
            qemu.expect_clean(&folder.path().join(name));
            let content = qemu.content(&folder.path().join(name), "qcow2");
            assert!(content == middle, "seed {seed}: {name} is not the disk as it was");
        }
        qemu.expect_clean(&folder.path().join("t"));
        assert!(qemu.content(&folder.path().join("t"), "qcow2") == model, "seed {seed}: the disk itself is wrong");
    }
}

/// A backup `A` of a node, by the filter `f`.
fn backup_of(name: &str, target: &str) -> Value {
    json!({"job-id": "A", "device": name, "target": target, "sync": "none", "filter-node-name": "f"})
}

fn add_empty(client: &mut Client, names: &[&str]) {
    for name in names {
        let path = client.in_folder(name);
        Qemu::newest().create(Path::new(&path), "qcow2", "", super::unchanged_data::SIZE);
        client.command("blockdev-add", node(Path::new(&path), name));
    }
}

/// The answers of both to a command.
fn say(clients: &mut [Client; 2], command: &str, arguments: &Value) -> Option<String> {
    let [ours, theirs] = clients.each_mut().map(|client| {
        let said = client.execute(command, arguments.clone());
        said.err().map(|error| error["desc"].as_str().expect("a text").to_owned())
    });
    assert_eq!(ours, theirs, "{command} {arguments}");
    ours
}

#[test]
fn second_backups_are_taken_and_refused_as_in_qemu() {
    let (ours, _theirs, mut clients) = both();
    for client in &mut clients {
        add_empty(client, &["u", "v"]);
        client.command("block-dirty-bitmap-add", json!({"node": "n", "name": "q"}));
        export(client, "n");
    }
    let with = |mut value: Value, more: Value| {
        for (key, more) in more.as_object().expect("an object") {
            value[key] = more.clone();
        }
        value
    };
    let second = |more: Value| with(json!({"job-id": "B", "device": "n", "target": "u", "sync": "none"}), more);
    assert_eq!(say(&mut clients, "blockdev-backup", &backup_of("n", "t")), None);
    for refused in [
        json!({"target": "t"}),
        json!({"filter-node-name": "f"}),
        json!({"job-id": "A"}),
        json!({"device": "f"}),
        json!({"device": "t"}),
        json!({"device": "n", "target": "n"}),
        json!({"target": "f"}),
        json!({"bitmap": "zz", "sync": "incremental"}),
    ] {
        assert!(say(&mut clients, "blockdev-backup", &second(refused)).is_some());
    }
    assert_eq!(say(&mut clients, "blockdev-backup", &second(json!({}))), None);
    for client in &mut clients {
        guest(client, &["write -P 7 0 128k", "write -z 1M 64k"]);
    }
    // One bitmap serves one of them.
    let held = json!({"job-id": "C", "target": "v", "sync": "incremental", "bitmap": "p", "speed": 1});
    assert_eq!(say(&mut clients, "blockdev-backup", &second(held)), None);
    for client in &mut clients {
        client.command("block-job-set-speed", json!({"device": "C", "speed": 0}));
        assert_eq!(client.event("BLOCK_JOB_COMPLETED")["device"], "C");
    }
    let both_of = |one: Value, other: Value| {
        let action = |data: Value| json!({"type": "blockdev-backup", "data": data});
        json!({"actions": [action(second(one)), action(second(other))]})
    };
    for (one, other) in [
        (json!({"job-id": "D", "target": "v"}), json!({"job-id": "E", "target": "v"})),
        (json!({"job-id": "D", "target": "v"}), json!({"job-id": "D", "target": "u"})),
        (json!({"job-id": "D", "target": "v"}), json!({"job-id": "E", "target": "u"})),
    ] {
        assert!(say(&mut clients, "transaction", &both_of(one, other)).is_some());
    }
    for (id, read) in [("A", "read -P 1 0 128k"), ("B", "read -P 1 0 128k")] {
        assert_eq!(say(&mut clients, "job-cancel", &json!({"id": id})), None);
        for client in &mut clients {
            assert_eq!(client.event("BLOCK_JOB_CANCELLED")["device"], id);
            let target = if id == "A" { "t" } else { "u" };
            client.command("blockdev-del", json!({"node-name": target}));
            let path = client.in_folder(target);
            let said = Qemu::newest().io(["-r", "-f", "qcow2", "-c", read, &path]).expect_ok();
            assert!(!said.stdout.contains("failed"), "{id}: {}", said.stdout);
        }
    }
    ours.stop().expect("stopped in order");
}

#[test]
fn a_backup_that_empties_its_disk_spares_the_past_of_others() {
    let (daemon, mut client, mut model) = chain("cluster_size=64k");
    add_target(&daemon, &mut client, "whole", None);
    add_target(&daemon, &mut client, "gone", None);
    let before = model.clone();
    let full = |id: &str, more: bool| json!({"job-id": id, "device": "t", "target": id, "sync": "full", "speed": 1 << 20, "discard-source": more});
    // The later filter is below the earlier one: its discards would be lost to that one.
    client.command("blockdev-backup", full("whole", false));
    let refusal = client.refusal("blockdev-backup", full("gone", true));
    assert!(refusal.contains("keeps the past of 't'"), "{refusal}");
    client.command("job-cancel", json!({"id": "whole"}));
    client.event("BLOCK_JOB_CANCELLED");
    let action = |data: Value| json!({"type": "blockdev-backup", "data": data});
    let actions = [action(full("gone", true)), action(full("whole", false))];
    client.command("transaction", json!({"actions": actions}));
    for id in ["gone", "whole"] {
        let _ = client.execute("block-job-set-speed", json!({"device": id, "speed": 0}));
    }
    for _ in 0..2 {
        let completed = client.event("BLOCK_JOB_COMPLETED");
        assert!(completed.get("error").is_none(), "{completed}");
    }
    model.fill(0);
    let (folder, stopped) = daemon.keep_after_stop();
    stopped.expect("stopped in order");
    for name in ["gone", "whole"] {
        assert!(Qemu::system().content(&folder.path().join(name), "qcow2") == before, "{name} is not as it was");
    }
    assert!(Qemu::system().content(&folder.path().join("t"), "qcow2") == model, "the disk has been emptied");
}

/// A job `B` beside a backup `A` of each image. Both daemons take and refuse the same, the disk stays as it is, and the
/// backup keeps the past.
#[test]
fn commits_and_streams_beside_a_backup_are_those_of_qemu() {
    let commit = |more: Value| ("block-commit", more);
    let stream = |more: Value| ("block-stream", more);
    let seconds = [
        commit(json!({"device": "n"})),
        commit(json!({"device": "n", "base-node": "mid"})),
        commit(json!({"device": "n", "top-node": "mid"})),
        commit(json!({"device": "f", "top-node": "mid"})),
        commit(json!({"device": "mid"})),
        stream(json!({"device": "n"})),
        stream(json!({"device": "n", "base-node": "base"})),
        stream(json!({"device": "n", "base-node": "mid"})),
        stream(json!({"device": "mid"})),
        stream(json!({"device": "f"})),
    ];
    for source in ["n", "mid", "base"] {
        let mut started = None;
        for (command, arguments) in &seconds {
            let (ours, theirs, mut clients) = started.take().unwrap_or_else(|| {
                let (ours, theirs, mut clients) = both();
                clients.iter_mut().for_each(|client| export(client, "n"));
                assert_eq!(say(&mut clients, "blockdev-backup", &backup_of(source, "t")), None);
                (ours, theirs, clients)
            });
            let mut arguments = arguments.clone();
            arguments["job-id"] = json!("B");
            if say(&mut clients, command, &arguments).is_some() {
                started = Some((ours, theirs, clients));
                continue;
            }
            for client in &mut clients {
                let is_active = *command == "block-commit" && arguments.get("top-node").is_none();
                if is_active {
                    client.event("BLOCK_JOB_READY");
                    client.command("job-complete", json!({"id": "B"}));
                }
                let completed = client.event("BLOCK_JOB_COMPLETED");
                assert_eq!(completed["device"], "B");
                assert!(completed.get("error").is_none(), "{source}: {command} {arguments}: {completed}");
                let reads = ["read -P 1 0 1M", "read -P 2 1M 512k", "read -P 0 1536k 512k", "read -P 3 2M 64k"];
                guest(client, &reads);
                // The past is kept from writes that come now.
                guest(client, &["write -P 9 0 64k", "write -P 9 1M 64k", "write -P 9 2M 64k"]);
                guest(client, &["read -P 9 0 64k", "read -P 9 1M 64k", "read -P 9 2M 64k", "read -P 1 64k 64k"]);
                client.command("job-cancel", json!({"id": "A"}));
                assert_eq!(client.event("BLOCK_JOB_CANCELLED")["device"], "A");
                let saved = if source == "n" { "read -P 1 0 64k" } else { "read -P 0 0 64k" };
                client.command("blockdev-del", json!({"node-name": "t"}));
                let path = client.in_folder("t");
                let said = Qemu::newest().io(["-r", "-f", "qcow2", "-c", saved, &path]).expect_ok();
                assert!(!said.stdout.contains("failed"), "{source}: {command} {arguments}: {}", said.stdout);
            }
            drop(clients);
            let (folder, stopped) = ours.keep_after_stop();
            stopped.expect("stopped in order");
            for name in ["n", "mid", "base", "t"] {
                Qemu::newest().expect_clean(&folder.path().join(name));
            }
            drop(theirs);
        }
    }
}

/// A backup that begins beside a running commit or stream.
#[test]
fn backups_beside_a_commit_or_a_stream_are_those_of_qemu() {
    let first = [
        ("block-commit", json!({"device": "n", "speed": 1})),
        ("block-commit", json!({"device": "n", "top-node": "mid", "speed": 1})),
        ("block-commit", json!({"device": "n", "base-node": "mid", "speed": 1})),
        ("block-stream", json!({"device": "n", "speed": 1})),
        ("block-stream", json!({"device": "n", "base-node": "base", "speed": 1})),
        ("block-stream", json!({"device": "mid", "speed": 1})),
    ];
    for (command, mut arguments) in first {
        let (_ours, _theirs, mut clients) = both();
        arguments["job-id"] = json!("B");
        assert_eq!(say(&mut clients, command, &arguments), None);
        for source in ["n", "mid", "base"] {
            if say(&mut clients, "blockdev-backup", &backup_of(source, "t")).is_none() {
                say(&mut clients, "job-cancel", &json!({"id": "A"}));
                for client in &mut clients {
                    assert_eq!(client.event("BLOCK_JOB_CANCELLED")["device"], "A");
                }
            }
        }
    }
}
