// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The examples of docs/daemon.md work as the page says.

use super::exports::{node, serving};
use super::running::Running;
use cowshed_testkit::qemu::Qemu;
use serde_json::{Value, json};

/// Names in the examples are files of the test's folder.
fn with_paths(mut message: Value, daemon: &Running) -> Value {
    for pointer in ["/arguments/file/filename", "/arguments/snapshot-file"] {
        if let Some(name) = message.pointer_mut(pointer) {
            *name = json!(daemon.path(name.as_str().expect("a name")));
        }
    }
    message
}

#[test]
fn the_examples_of_the_page_are_true() {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/daemon.md")).expect("the page");
    let (daemon, mut client) = serving();
    Qemu::system().create(&daemon.path("disk.qcow2"), "qcow2", "", 1 << 20);
    client.command("blockdev-add", node(&daemon.path("disk.qcow2"), "disk"));
    client.command("block-export-add", json!({"type": "nbd", "id": "disk", "node-name": "disk", "writable": true}));
    Qemu::system().create(&daemon.path("second.qcow2"), "qcow2", "", 1 << 20);
    Qemu::system().create(&daemon.path("scratch.qcow2"), "qcow2", "", 1 << 20);
    let examples = page.split("```qmp\n").skip(1).map(|text| text.split("```").next().unwrap_or_default());
    let lines: Vec<&str> = examples.flat_map(str::lines).collect();
    let mut checked = 0;
    for pair in lines.chunks(2) {
        let [said, answered] = pair else { panic!("no answer to {pair:?}") };
        let parse = |line: &str, mark: &str| -> Value {
            let text = line.strip_prefix(mark).unwrap_or_else(|| panic!("{mark}: {line}"));
            serde_json::from_str(text).unwrap_or_else(|error| panic!("{line}: {error}"))
        };
        let (said, answered) = (parse(said, "-> "), parse(answered, "<- "));
        if said["execute"] == "qmp_capabilities" {
            continue;
        }
        client.send(&with_paths(said.clone(), &daemon).to_string());
        assert_eq!(client.reply(), answered, "{said}");
        checked += 1;
    }
    assert!(checked >= 10, "{checked} examples");
    daemon.stop().expect("stopped in order");
}
