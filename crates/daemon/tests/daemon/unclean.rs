// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Images that were not closed cleanly and are read first: the switch to writing repairs them. QEMU writes by the
//! counts that they have, over their data.

use super::running::{Client, Running, temp_folder};
use cowshed_testkit::qemu::Qemu;
use serde_json::{Value, json};
use std::path::Path;

const DIRTY_OFFSET: usize = 79;

/// An image of 1 MiB with the pattern 1 in its first 64 KiB, whose count of that cluster is lost, and the dirty bit.
fn unclean(path: &Path) {
    let qemu = Qemu::system();
    qemu.create(path, "qcow2", "", 1 << 20);
    qemu.io_commands(path, "qcow2", &["write -P 1 0 64k".to_owned()]).expect_ok();
    let mut image = std::fs::read(path).expect("an image");
    let word = |at: usize| u64::from_be_bytes(image[at..at + 8].try_into().expect("eight bytes"));
    let (table, l1) = (word(48) as usize, word(40) as usize);
    let block = word(table) as usize;
    let l2 = word(l1) as usize & !(1 << 63);
    let data = word(l2) as usize & !(1 << 63);
    let count = block + data / 65536 * 2;
    assert_eq!(image[count..count + 2], [0, 1]);
    image[count + 1] = 0;
    image[DIRTY_OFFSET] |= 1;
    std::fs::write(path, image).expect("an image");
}

fn options(name: &str, read_only: bool) -> Value {
    json!({"driver": "qcow2", "node-name": name, "read-only": read_only,
           "file": {"driver": "file", "filename": name, "node-name": format!("{name}-file")}})
}

fn expect(path: &Path, reads: &[&str]) {
    let qemu = Qemu::system();
    qemu.expect_clean(path);
    let reads: Vec<String> = reads.iter().map(|read| (*read).to_owned()).collect();
    qemu.io_commands(path, "qcow2", &reads).expect_ok();
}

/// A daemon with the chain `a` ← `o` ← `t`, of which `a` was not closed cleanly.
fn chain() -> (Running, Client) {
    let daemon = Running::start_in(temp_folder(), Vec::new());
    let qemu = Qemu::system();
    unclean(&daemon.path("a"));
    for (name, below, write) in [("o", "a", "write -P 2 128k 64k"), ("t", "o", "write -P 3 256k 64k")] {
        let options = format!("backing_file={},backing_fmt=qcow2", daemon.path(below).display());
        qemu.create(&daemon.path(name), "qcow2", &options, 1 << 20);
        qemu.io_commands(&daemon.path(name), "qcow2", &[write.to_owned()]).expect_ok();
    }
    let mut client = daemon.client();
    client.files_in(daemon.path("").as_path());
    for (name, below) in [("a", None), ("o", Some("a")), ("t", Some("o"))] {
        let mut options = options(name, name != "t");
        if let Some(below) = below {
            options["backing"] = json!(below);
        }
        client.command("blockdev-add", options);
    }
    (daemon, client)
}

#[test]
fn a_commit_of_the_active_layer_repairs_its_base_first() {
    let (daemon, mut client) = chain();
    client.command("block-commit", json!({"job-id": "c", "device": "t"}));
    client.event("BLOCK_JOB_READY");
    client.command("job-complete", json!({"id": "c"}));
    let completed = client.event("BLOCK_JOB_COMPLETED");
    assert!(completed.get("error").is_none(), "{completed}");
    let (folder, stopped) = daemon.keep_after_stop();
    stopped.expect("stopped in order");
    expect(&folder.path().join("a"), &["read -P 1 0 64k", "read -P 2 128k 64k", "read -P 3 256k 64k"]);
}

#[test]
fn a_commit_of_a_lower_layer_repairs_its_base_first() {
    let (daemon, mut client) = chain();
    client.command("block-commit", json!({"job-id": "c", "device": "t", "top-node": "o", "base-node": "a"}));
    let completed = client.event("BLOCK_JOB_COMPLETED");
    assert!(completed.get("error").is_none(), "{completed}");
    let (folder, stopped) = daemon.keep_after_stop();
    stopped.expect("stopped in order");
    expect(&folder.path().join("a"), &["read -P 1 0 64k", "read -P 2 128k 64k"]);
    expect(&folder.path().join("t"), &["read -P 1 0 64k", "read -P 3 256k 64k"]);
}

#[test]
fn a_reopening_for_writing_repairs_the_image_first() {
    let daemon = Running::start_in(temp_folder(), Vec::new());
    unclean(&daemon.path("a"));
    let mut client = daemon.client();
    client.files_in(daemon.path("").as_path());
    client.command("blockdev-add", options("a", true));
    client.command("blockdev-reopen", json!({"options": [options("a", false)]}));
    let socket = daemon.path("n.sock");
    client.command("nbd-server-start", json!({"addr": {"type": "unix", "data": {"path": socket}}}));
    client.command("block-export-add", json!({"type": "nbd", "id": "e", "node-name": "a", "writable": true}));
    let uri = format!("nbd+unix:///a?socket={}", socket.display());
    Qemu::system().io(["-f", "raw", "-c", "read -P 1 0 64k", "-c", "write -P 4 512k 256k", &uri]).expect_ok();
    let (folder, stopped) = daemon.keep_after_stop();
    stopped.expect("stopped in order");
    expect(&folder.path().join("a"), &["read -P 1 0 64k", "read -P 4 512k 256k"]);
}

/// An image that can't be repaired stays as it was, and is read on.
#[test]
fn an_image_that_can_not_be_repaired_stays_readable() {
    let daemon = Running::start_in(temp_folder(), Vec::new());
    let path = daemon.path("a");
    unclean(&path);
    // A bitmap directory of an unknown place: a possible owner of clusters stops the repair.
    let mut image = std::fs::read(&path).expect("an image");
    image[88] |= 0x80;
    std::fs::write(&path, &image).expect("an image");
    let mut client = daemon.client();
    client.files_in(daemon.path("").as_path());
    client.command("blockdev-add", options("a", true));
    let refused = client.refusal("blockdev-reopen", json!({"options": [options("a", false)]}));
    assert!(refused.contains("was not closed cleanly"), "{refused}");
    let socket = daemon.path("n.sock");
    client.command("nbd-server-start", json!({"addr": {"type": "unix", "data": {"path": socket}}}));
    client.command("block-export-add", json!({"type": "nbd", "id": "e", "node-name": "a"}));
    let uri = format!("nbd+unix:///a?socket={}", socket.display());
    Qemu::system().io(["-r", "-f", "raw", "-c", "read -P 1 0 64k", &uri]).expect_ok();
    daemon.stop().expect("stopped in order");
}

/// A repair without a following look at its result may be tried again.
#[test]
fn a_second_attempt_to_write_to_an_image_begins_anew() {
    let daemon = Running::start_in(temp_folder(), Vec::new());
    let path = daemon.path("a");
    unclean(&path);
    let mut client = daemon.client();
    client.files_in(daemon.path("").as_path());
    client.command("blockdev-add", options("a", true));
    // Another program changes the length of the disk, and takes that back.
    let resize = |bytes: u64| {
        let file = std::fs::OpenOptions::new().write(true).open(&path).expect("an image");
        std::os::unix::fs::FileExt::write_all_at(&file, &bytes.to_be_bytes(), 24).expect("a header");
    };
    resize((1 << 20) + 65536);
    let refused = client.refusal("blockdev-reopen", json!({"options": [options("a", false)]}));
    assert!(refused.contains("size of the disk has changed"), "{refused}");
    resize(1 << 20);
    client.command("blockdev-reopen", json!({"options": [options("a", false)]}));
    let socket = daemon.path("n.sock");
    client.command("nbd-server-start", json!({"addr": {"type": "unix", "data": {"path": socket}}}));
    client.command("block-export-add", json!({"type": "nbd", "id": "e", "node-name": "a", "writable": true}));
    let uri = format!("nbd+unix:///a?socket={}", socket.display());
    Qemu::system().io(["-f", "raw", "-c", "read -P 1 0 64k", "-c", "write -P 4 512k 256k", &uri]).expect_ok();
    let (folder, stopped) = daemon.keep_after_stop();
    stopped.expect("stopped in order");
    expect(&folder.path().join("a"), &["read -P 1 0 64k", "read -P 4 512k 256k"]);
}

/// The clusters of snapshots that can't be read would be taken for free ones.
#[test]
fn unreadable_snapshots_keep_writers_from_unclean_images() {
    let daemon = Running::start_in(temp_folder(), Vec::new());
    let path = daemon.path("a");
    unclean(&path);
    let mut image = std::fs::read(&path).expect("an image");
    image[60..64].copy_from_slice(&1u32.to_be_bytes());
    image[64..72].copy_from_slice(&(1u64 << 30).to_be_bytes());
    std::fs::write(&path, &image).expect("an image");
    let mut client = daemon.client();
    client.files_in(daemon.path("").as_path());
    client.command("blockdev-add", options("a", true));
    let refused = client.refusal("blockdev-reopen", json!({"options": [options("a", false)]}));
    assert!(refused.contains("snapshot"), "{refused}");
    assert_eq!(std::fs::read(&path).expect("an image"), image, "nothing is changed");
    daemon.stop().expect("stopped in order");
}
