// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Ids and names of all kinds, short, long and wrong, beside the newest QEMU: taken by both, or refused in the same words.

use super::beside_qemu::Theirs;
use super::running::{Client, Running};
use cowshed_testkit::qemu::Qemu;
use serde_json::{Value, json};
use std::path::Path;

/// The names that are tried: 31 bytes are the most for a node, 1023 for a bitmap, 4096 for an export.
fn names() -> Vec<String> {
    let lengths = [1, 31, 32, 64, 255, 1000, 1023, 1024, 2000];
    let long = lengths.iter().map(|len| "n".repeat(*len));
    long.chain(["1a", "a b", "a/b", "", "a.b-c_d", "\u{e9}"].map(str::to_owned)).collect()
}

/// Commands that make an object of that name, and the one that takes it away.
fn commands(name: &str) -> Vec<[(&'static str, Value); 2]> {
    let bitmap = json!({"node": "q", "name": name});
    let mut stored = bitmap.clone();
    stored["persistent"] = json!(true);
    vec![
        [
            ("blockdev-add", json!({"driver": "null-co", "read-zeroes": true, "node-name": name})),
            ("blockdev-del", json!({"node-name": name})),
        ],
        [("object-add", json!({"qom-type": "throttle-group", "id": name})), ("object-del", json!({"id": name}))],
        [
            ("block-export-add", json!({"type": "nbd", "id": name, "node-name": "q", "name": "x"})),
            ("block-export-del", json!({"id": name})),
        ],
        [
            ("block-export-add", json!({"type": "nbd", "id": "e", "node-name": "q", "name": name})),
            ("block-export-del", json!({"id": "e"})),
        ],
        [("block-dirty-bitmap-add", bitmap.clone()), ("block-dirty-bitmap-remove", bitmap.clone())],
        [("block-dirty-bitmap-add", stored), ("block-dirty-bitmap-remove", bitmap)],
        [
            ("chardev-add", json!({"id": name, "backend": {"type": "null", "data": {}}})),
            ("chardev-remove", json!({"id": name})),
        ],
        [
            ("blockdev-create", json!({"job-id": name, "options": {"driver": "file", "filename": "made", "size": 0}})),
            ("job-dismiss", json!({"id": name})),
        ],
    ]
}

/// The words of an error, or nothing.
fn said(client: &mut Client, command: &str, arguments: Value) -> String {
    let error = client.execute(command, arguments).err();
    error.map(|error| error["desc"].as_str().expect("a text").to_owned()).unwrap_or_default()
}

fn all_said(client: &mut Client, folder: &Path) -> Vec<String> {
    Qemu::newest().create(&folder.join("q.qcow2"), "qcow2", "", 1 << 20);
    let node = json!({"driver": "qcow2", "node-name": "q", "file": {"driver": "file", "filename": "q.qcow2"}});
    client.command("blockdev-add", node);
    client.command("nbd-server-start", json!({"addr": {"type": "unix", "data": {"path": "n.sock"}}}));
    let mut all = Vec::new();
    for name in names() {
        for [(command, arguments), (remove, gone)] in commands(&name) {
            let shown: String = name.chars().take(8).collect();
            let words = said(client, command, arguments.clone());
            all.push(format!(
                "{command} {} {shown} {}: {words}",
                arguments.as_object().map_or(0, |map| map.len()),
                name.len()
            ));
            if !words.is_empty() {
                continue;
            }
            if command == "blockdev-create" {
                let is_concluded = |client: &mut Client| {
                    let jobs = client.command("query-jobs", json!({}));
                    jobs.as_array().expect("a list").iter().any(|job| job["id"] == name && job["status"] == "concluded")
                };
                while !is_concluded(client) {
                    std::thread::yield_now();
                }
            }
            client.command(remove, gone);
            if command == "block-export-add" {
                client.event("BLOCK_EXPORT_DELETED");
            }
        }
    }
    all
}

#[test]
fn names_are_taken_and_refused_as_by_qemu() {
    let (theirs, mut theirs_client) = Theirs::start_newest();
    let ours = Running::start(Vec::new());
    let mut ours_client = ours.client();
    ours_client.files_in(ours.folder.path());
    let found = all_said(&mut ours_client, ours.folder.path());
    let expected = all_said(&mut theirs_client, theirs.folder.path());
    assert_eq!(found, expected);
    assert!(expected.iter().any(|line| line.contains("too long")), "{expected:?}");
    ours.stop().expect("stopped in order");
}
