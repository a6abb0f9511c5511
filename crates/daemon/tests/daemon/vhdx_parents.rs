// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A VHDX disk that a client has changed is no parent of its differences any more, also before it is closed.

use super::running::{Client, Running};
use cowshed_testkit::qemu::Qemu;
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;

/// Puts a sample into the folder.
fn unpack(sample: &str, path: &Path) {
    let images = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testkit/images");
    let output = Command::new("gzip").arg("-dc").arg(images.join(format!("{sample}.gz"))).output().expect("gzip runs");
    assert!(output.status.success(), "{sample}");
    std::fs::write(path, output.stdout).expect("it is written");
}

/// The newer header's id of the data.
fn data_guid(path: &Path) -> Vec<u8> {
    let bytes = std::fs::read(path).expect("the image");
    let number = |at: usize| u64::from_le_bytes(bytes[at + 8..at + 16].try_into().expect("8 bytes"));
    let at = if number(0x10000) > number(0x20000) { 0x10000 } else { 0x20000 };
    bytes[at + 32..at + 48].to_vec()
}

fn write(client: &mut Client, daemon: &Running, place: &str) {
    let export = json!({"type": "nbd", "id": "p", "name": "p", "node-name": "p", "writable": true});
    client.command("block-export-add", export);
    let uri = format!("nbd+unix:///p?socket={}", daemon.path("n.sock").display());
    let fill = format!("write -P 9 {place}");
    Qemu::newest().io(["-f", "raw", "-c", &fill, "-c", "flush", &uri]).expect_ok();
    client.command("block-export-del", json!({"id": "p"}));
    client.event("BLOCK_EXPORT_DELETED");
}

#[test]
fn a_changed_vhdx_parent_is_refused_at_once() {
    let daemon = Running::start(Vec::new());
    let mut client = daemon.client();
    let (parent, child) = (daemon.path("p.vhdx"), daemon.path("c.vhdx"));
    unpack("windows-fat-parent.vhdx", &parent);
    unpack("windows-fat-differential.vhdx", &child);
    let socket = daemon.path("n.sock");
    client.command("nbd-server-start", json!({"addr": {"type": "unix", "data": {"path": socket}}}));
    let node = |read_only: bool| {
        json!({"driver": "vhdx", "node-name": "p", "read-only": read_only,
            "file": {"driver": "file", "filename": parent}})
    };
    let difference: Value = json!({"driver": "vhdx", "node-name": "c", "read-only": true, "backing": "p",
        "file": {"driver": "file", "filename": child}});
    client.command("blockdev-add", node(false));
    let first = data_guid(&parent);
    client.command("blockdev-add", difference.clone());
    client.command("blockdev-del", json!({"node-name": "c"}));
    write(&mut client, &daemon, "1M 64k");
    let second = data_guid(&parent);
    assert_ne!(first, second);
    let message = client.refusal("blockdev-add", difference);
    assert!(message.contains("parent_linkage"), "{message}");
    // A time that it is only read ends what a difference may rely on.
    for read_only in [true, false] {
        client.command("blockdev-reopen", json!({"options": [node(read_only)]}));
    }
    assert_eq!(data_guid(&parent), second);
    write(&mut client, &daemon, "2M 64k");
    assert_ne!(data_guid(&parent), second, "the content has its former id");
    client.command("blockdev-del", json!({"node-name": "p"}));
    daemon.stop().expect("stopped in order");
}
