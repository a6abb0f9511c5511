// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Events of quorums whose copies fail or differ, beside the newest QEMU.

use super::beside_qemu::Theirs;
use super::running::{Client, Running};
use cowshed_testkit::qemu::Qemu;
use serde_json::{Value, json};
use std::path::Path;

/// Options of a quorum, options of the faulty copy, a client's command, and the events that follow.
type Trouble = (Value, Value, &'static str, &'static [&'static str]);

fn troubles() -> Vec<Trouble> {
    let fails = |kind: &str| json!({"inject-error": [{"event": "none", "iotype": kind}]});
    let bad = &["QUORUM_REPORT_BAD"][..];
    let both = &["QUORUM_REPORT_BAD", "QUORUM_FAILURE"][..];
    vec![
        (json!({"vote-threshold": 2}), json!({}), "read 64k 64k", bad),
        (json!({"vote-threshold": 3}), json!({}), "read 64k 64k", &["QUORUM_FAILURE"]),
        (json!({"vote-threshold": 2}), fails("read"), "read 1k 3k", bad),
        (json!({"vote-threshold": 3}), fails("read"), "read 0 1M", both),
        (json!({"vote-threshold": 2}), fails("write"), "write 512k 64k", bad),
        (json!({"vote-threshold": 3}), fails("write"), "write 512k 64k", both),
        (json!({"vote-threshold": 2}), fails("flush"), "write 0 64k;flush", bad),
        (json!({"vote-threshold": 1, "read-pattern": "fifo"}), fails("read"), "read 0 64k", bad),
    ]
}

/// A daemon's answers and events in all troubles.
fn told(client: &mut Client, folder: &Path) -> Vec<Value> {
    let qemu = Qemu::newest();
    client.files_in(folder);
    client.command("nbd-server-start", json!({"addr": {"type": "unix", "data": {"path": folder.join("n.sock")}}}));
    let mut told = Vec::new();
    for (at, (mut options, faults, command, events)) in troubles().into_iter().enumerate() {
        let copy = |name: &str| {
            let path = folder.join(format!("{name}{at}"));
            // Without holes, which clients learn without a read.
            std::fs::write(&path, vec![1; 1 << 20]).expect("a file");
            json!({"driver": "file", "filename": path, "node-name": format!("{name}{at}")})
        };
        let mut faulty = json!({"driver": "blkdebug", "node-name": format!("faulty{at}"), "image": copy("x")});
        faulty.as_object_mut().expect("an object").extend(faults.as_object().expect("an object").clone());
        if faults == json!({}) {
            qemu.io(["-f", "raw", "-c", "write -P 7 64k 64k", &folder.join(format!("x{at}")).display().to_string()])
                .expect_ok();
        }
        options["driver"] = json!("quorum");
        options["node-name"] = json!(format!("q{at}"));
        options["children"] = json!([faulty, copy("y"), copy("z")]);
        client.command("blockdev-add", options);
        let export = json!({"type": "nbd", "id": format!("e{at}"), "node-name": format!("q{at}"), "writable": true});
        client.command("block-export-add", export);
        let uri = format!("nbd+unix:///q{at}?socket={}", folder.join("n.sock").display());
        // A flush and a write may fail there, which the events report.
        let commands = command.split(';').flat_map(|command| ["-c", command]);
        qemu.io(["-t", "writeback", "-f", "raw"].into_iter().chain(commands).chain([uri.as_str()]));
        told.extend(events.iter().map(|event| json!([at, event, client.event(event)])));
    }
    told
}

#[test]
fn what_a_quorum_meets_is_told_as_by_qemu() {
    let (theirs, mut theirs_client) = Theirs::start_newest();
    let ours = Running::start(Vec::new());
    let mut ours_client = ours.client();
    let found = told(&mut ours_client, ours.folder.path());
    assert_eq!(found, told(&mut theirs_client, theirs.folder.path()));
    assert!(found.iter().any(|event| event[2]["error"] == "Input/output error"), "{found:?}");
    drop(ours_client);
    // The flush of the last close fails on purpose.
    let _ = ours.stop();
}
