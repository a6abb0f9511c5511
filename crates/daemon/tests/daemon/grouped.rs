// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Backups of one transaction that end together, beside the newest QEMU.

use super::beside_qemu::Theirs;
use super::exports::uri;
use super::running::{Client, Running, temp_folder};
use cowshed_testkit::qemu::Qemu;
use serde_json::{Value, json};
use std::path::Path;

const SIZE: u64 = 1 << 20;

/// The disks `a`, and `b` whose last reads fail where they are to, with the targets `t` and `u`.
fn add_disks(client: &mut Client, folder: &Path, fails: bool) {
    let qemu = Qemu::newest();
    for name in ["a", "b", "t", "u"] {
        let path = folder.join(format!("{name}.qcow2"));
        let _ = std::fs::remove_file(&path);
        qemu.create(&path, "qcow2", "", SIZE);
        if matches!(name, "a" | "b") {
            qemu.io_commands(&path, "qcow2", &["write -P 5 0 1M".to_owned()]).expect_ok();
        }
        let sector = if fails { 1500_u64 } else { 1 << 40 };
        let image = json!({"driver": "file", "filename": format!("{name}.qcow2")});
        let rules = json!([{"event": "none", "iotype": "read", "sector": sector}]);
        let file = match name {
            "b" => json!({"driver": "blkdebug", "image": image, "inject-error": rules}),
            _ => image,
        };
        client.command("blockdev-add", json!({"driver": "qcow2", "node-name": name, "file": file}));
    }
    client.command("block-dirty-bitmap-add", json!({"node": "a", "name": "since"}));
}

fn backup(device: &str, target: &str, more: &Value) -> Value {
    let mut data = json!({"job-id": device, "device": device, "target": target, "sync": "full", "auto-dismiss": false});
    for (key, value) in more.as_object().expect("an object") {
        data[key] = value.clone();
    }
    json!({"type": "blockdev-backup", "data": data})
}

fn grouped(actions: &[Value]) -> Value {
    json!({"actions": actions, "properties": {"completion-mode": "grouped"}})
}

/// Waits for the end of both jobs.
fn await_end(client: &mut Client) {
    let mut ended = 0;
    while ended < 2 {
        ended += usize::from(client.event("JOB_STATUS_CHANGE")["status"] == "concluded");
    }
}

/// The outcome of both jobs.
fn outcome(client: &mut Client) -> Vec<String> {
    let mut found = Vec::new();
    for job in client.command("query-jobs", json!({})).as_array().expect("a list") {
        found.push(format!("{} {} {:?}", job["id"], job["status"], job.get("error")));
    }
    for event in &client.events {
        let data = &event["data"];
        match event["event"].as_str().expect("a text") {
            "JOB_STATUS_CHANGE" => {}
            name => found.push(format!("{name} {} {:?}", data["device"], data.get("error"))),
        }
    }
    found
}

fn scenarios(client: &mut Client, folder: &Path) -> Vec<Vec<String>> {
    let none = json!({});
    let slow = json!({"speed": 65536});
    let mut all = Vec::new();
    for (fails, first, end) in [
        (false, &none, "both complete"),
        (true, &none, "the second one fails"),
        (true, &slow, "the second one fails, the first one is slow"),
        (false, &json!({"auto-finalize": false}), "the first one waits for its user"),
    ] {
        client.events.clear();
        add_disks(client, folder, fails);
        let actions = [backup("a", "t", first), backup("b", "u", &none)];
        client.command("transaction", grouped(&actions));
        if end.ends_with("its user") {
            client.event("BLOCK_JOB_PENDING");
            let jobs = client.command("query-jobs", json!({}));
            let pending = jobs.as_array().expect("a list").iter().filter(|job| job["status"] == "pending").count();
            assert_eq!(pending, 2, "{jobs}");
            client.command("job-finalize", json!({"id": "b"}));
        }
        await_end(client);
        let mut found = vec![end.to_owned()];
        found.extend(outcome(client));
        all.push(found);
        for id in ["a", "b"] {
            client.command("job-dismiss", json!({"id": id}));
        }
        for name in ["a", "b", "t", "u"] {
            client.command("blockdev-del", json!({"node-name": name}));
        }
    }
    all
}

#[test]
fn backups_of_a_group_complete_together_or_not_at_all() {
    let (theirs, mut client) = Theirs::start_newest();
    let expected = scenarios(&mut client, theirs.folder.path());
    let folder = temp_folder();
    let path = folder.path().to_owned();
    let daemon = Running::start_in(folder, Vec::new());
    let mut client = daemon.client();
    client.files_in(&path);
    let found = scenarios(&mut client, &path);
    for (ours, theirs) in found.iter().zip(&expected) {
        assert_eq!(ours, theirs);
    }
    daemon.stop().expect("stopped in order");
}

#[test]
fn grouped_jobs_change_state_in_qemus_order() {
    let states = |client: &mut Client, folder: &Path| {
        add_disks(client, folder, false);
        let none = json!({});
        client.command("transaction", grouped(&[backup("a", "t", &none), backup("b", "u", &none)]));
        let mut found = Vec::new();
        while found.iter().filter(|one: &&String| one.ends_with("concluded")).count() < 2 {
            let data = client.event("JOB_STATUS_CHANGE");
            let (id, status) = (data["id"].as_str().expect("a text"), data["status"].as_str().expect("a text"));
            // Each waits for the other in the order of their ends.
            if status != "waiting" {
                found.push(format!("{id} {status}"));
            }
        }
        found
    };
    let (theirs, mut client) = Theirs::start_newest();
    let expected = states(&mut client, theirs.folder.path());
    let folder = temp_folder();
    let path = folder.path().to_owned();
    let daemon = Running::start_in(folder, Vec::new());
    let mut client = daemon.client();
    client.files_in(&path);
    assert_eq!(states(&mut client, &path), expected);
    daemon.stop().expect("stopped in order");
}

#[test]
fn one_that_is_cancelled_cancels_the_group_also_one_that_waits() {
    for cancelled in ["a", "b"] {
        let folder = temp_folder();
        let path = folder.path().to_owned();
        let daemon = Running::start_in(folder, Vec::new());
        let mut client = daemon.client();
        client.files_in(&path);
        add_disks(&mut client, &path, false);
        // The first one waits for the second one, which takes long.
        let slow = json!({"speed": 1});
        for name in ["b", "u"] {
            client.command("blockdev-del", json!({"node-name": name}));
        }
        for name in ["b", "u"] {
            let null = json!({"driver": "null-co", "node-name": name, "size": 64 << 20, "read-zeroes": false});
            client.command("blockdev-add", null);
        }
        client.command("transaction", grouped(&[backup("a", "t", &json!({})), backup("b", "u", &slow)]));
        while client.event("JOB_STATUS_CHANGE") != json!({"id": "a", "status": "waiting"}) {}
        client.command("job-cancel", json!({"id": cancelled}));
        await_end(&mut client);
        for _ in 0..2 {
            client.event("BLOCK_JOB_CANCELLED");
        }
        let jobs = client.command("query-jobs", json!({}));
        for job in jobs.as_array().expect("a list") {
            assert_eq!(job["error"], "Operation canceled", "{jobs}");
        }
        daemon.stop().expect("stopped in order");
    }
}

/// The bitmap of a backup that ends first must not count on the others.
#[test]
fn a_target_that_cannot_be_flushed_fails_the_whole_group() {
    for bad in ["t", "u"] {
        let daemon = Running::start(Vec::new());
        let mut client = daemon.client();
        let rules = json!([{"event": "none", "iotype": "flush"}]);
        for name in ["a", "t", "b", "u"] {
            let image = json!({"driver": "null-co", "size": SIZE, "read-zeroes": true});
            let node = match name == bad {
                true => json!({"driver": "blkdebug", "node-name": name, "image": image, "inject-error": rules}),
                false => json!({"driver": "null-co", "node-name": name, "size": SIZE, "read-zeroes": true}),
            };
            client.command("blockdev-add", node);
        }
        let address = json!({"type": "unix", "data": {"path": daemon.path("n.sock")}});
        client.command("nbd-server-start", json!({"addr": address}));
        for name in ["a", "b"] {
            client.command("block-dirty-bitmap-add", json!({"node": name, "name": "since"}));
            let export = json!({"type": "nbd", "id": name, "node-name": name, "writable": true});
            client.command("block-export-add", export);
            Qemu::system().io(["-f", "raw", "-c", "write 0 64k", &uri(&daemon, name)]).expect_ok();
            client.command("block-export-del", json!({"id": name}));
            client.event("BLOCK_EXPORT_DELETED");
        }
        let bitmap = json!({"sync": "incremental", "bitmap": "since"});
        client.command("transaction", grouped(&[backup("a", "t", &bitmap), backup("b", "u", &bitmap)]));
        await_end(&mut client);
        let jobs = client.command("query-jobs", json!({}));
        for job in jobs.as_array().expect("a list") {
            let is_cause = (job["id"] == "a") == (bad == "t");
            let words = if is_cause { "Input/output error" } else { "Operation canceled" };
            assert_eq!(job["error"], words, "{jobs}");
        }
        for node in client.command("query-named-block-nodes", json!({})).as_array().expect("a list") {
            if let Some(bitmaps) = node.get("dirty-bitmaps") {
                assert_eq!(bitmaps[0]["count"], 65536, "{} lost what its target may lack", node["node-name"]);
            }
        }
        // A file whose flush has failed once reports that until it is opened again.
        daemon.stop().expect_err("a target could not be flushed");
    }
}

#[test]
fn daemon_ends_while_grouped_jobs_wait() {
    let daemon = Running::start(Vec::new());
    let mut client = daemon.client();
    for name in ["a", "t", "b", "u"] {
        let null = json!({"driver": "null-co", "node-name": name, "size": 64 << 20, "read-zeroes": false});
        client.command("blockdev-add", null);
    }
    client.command("transaction", grouped(&[backup("a", "t", &json!({"speed": 1})), backup("b", "u", &json!({}))]));
    while client.event("JOB_STATUS_CHANGE") != json!({"id": "b", "status": "waiting"}) {}
    // In order: no job is late.
    daemon.stop().expect("stopped in order");
}

/// The change of a bitmap that an image stores is durable at once, so a transaction that is refused makes none.
#[test]
fn a_refused_transaction_leaves_stored_bitmaps_alone() {
    let folder = temp_folder();
    let path = folder.path().to_owned();
    let daemon = Running::start_in(folder, Vec::new());
    let mut client = daemon.client();
    client.files_in(&path);
    add_disks(&mut client, &path, false);
    client.command("block-dirty-bitmap-add", json!({"node": "a", "name": "kept", "persistent": true}));
    let before = std::fs::read(path.join("a.qcow2")).expect("the image");
    let data = json!({"node": "a", "name": "kept"});
    let actions = json!([{"type": "block-dirty-bitmap-clear", "data": data}, {"type": "abort", "data": {}}]);
    let refusal = client.refusal("transaction", json!({"actions": actions}));
    assert_eq!(refusal, "Transaction aborted using Abort action");
    // Taken back it would be stored anew, in other places.
    assert!(std::fs::read(path.join("a.qcow2")).expect("the image") == before, "the image has changed");
    daemon.stop().expect("stopped in order");
}

#[test]
fn only_jobs_end_together() {
    let daemon = Running::start(Vec::new());
    let mut client = daemon.client();
    let kinds = ["abort", "block-dirty-bitmap-add", "blockdev-snapshot-sync", "blockdev-snapshot-internal-sync"];
    for kind in kinds {
        let data = match kind {
            "abort" => json!({}),
            "block-dirty-bitmap-add" => json!({"node": "zz", "name": "b"}),
            "blockdev-snapshot-sync" => json!({"node-name": "zz", "snapshot-file": "f", "snapshot-node-name": "o"}),
            _ => json!({"device": "zz", "name": "i"}),
        };
        let refusal = client.refusal("transaction", grouped(&[json!({"type": kind, "data": data})]));
        let words = format!("Action '{kind}' does not support transaction property completion-mode = grouped");
        assert_eq!(refusal, words);
    }
    daemon.stop().expect("stopped in order");
}

#[test]
fn a_change_of_a_bitmap_fails_in_its_turn() {
    let folder = temp_folder();
    let path = folder.path().to_owned();
    let daemon = Running::start_in(folder, Vec::new());
    let mut client = daemon.client();
    client.files_in(&path);
    add_disks(&mut client, &path, false);
    let action = |kind: &str, node: &str, name: &str| json!({"type": kind, "data": {"node": node, "name": name}});
    let before = client.command("query-named-block-nodes", json!({"flat": true}));
    let actions = [
        action("block-dirty-bitmap-add", "a", "new"),
        action("block-dirty-bitmap-add", "a", "since"),
        action("block-dirty-bitmap-add", "zz", "c"),
    ];
    let refusal = client.refusal("transaction", json!({"actions": actions}));
    assert_eq!(refusal, "Bitmap already exists: since");
    assert_eq!(client.command("query-named-block-nodes", json!({"flat": true})), before, "nothing has changed");
    daemon.stop().expect("stopped in order");
}

/// The answer to a transaction comes at once, whichever of its jobs waits for its user.
#[test]
fn group_without_work_that_asks_its_user_answers_at_once() {
    for asks in ["a", "b"] {
        let daemon = Running::start(Vec::new());
        let mut client = daemon.client();
        for name in ["a", "t", "b", "u"] {
            client.command("blockdev-add", json!({"driver": "null-co", "node-name": name, "size": SIZE}));
        }
        let mut actions = Vec::new();
        for (name, target) in [("a", "t"), ("b", "u")] {
            client.command("block-dirty-bitmap-add", json!({"node": name, "name": "since"}));
            let more = json!({"sync": "incremental", "bitmap": "since", "auto-finalize": name != asks});
            actions.push(backup(name, target, &more));
        }
        let begin = std::time::Instant::now();
        client.command("transaction", grouped(&actions));
        // One that takes a job for unsettled waits for a second.
        assert!(begin.elapsed() < std::time::Duration::from_millis(900), "{:?}", begin.elapsed());
        client.event("BLOCK_JOB_PENDING");
        client.command("job-finalize", json!({"id": asks}));
        await_end(&mut client);
        daemon.stop().expect("stopped in order");
    }
}
