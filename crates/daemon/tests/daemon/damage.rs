// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Damage that a client of an export meets, behind QEMU's daemon and ours. The same image and the same requests over
//! NBD give the same event, and the same bytes of the header afterwards.

use super::beside_qemu::Theirs;
use super::running::{Client, Running, temp_folder};
use cowshed_testkit::qemu::Qemu;
use serde_json::{Value, json};
use std::path::Path;

const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
const EVENT: &str = "BLOCK_IMAGE_CORRUPTED";

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

/// From the file's bytes and the places of its L1 and L2 table.
type Damage = fn(&mut [u8], usize, usize);

fn set(bytes: &mut [u8], at: usize, value: u64) {
    bytes[at..at + 8].copy_from_slice(&value.to_be_bytes());
}

/// Damage, a request that meets it, and whether the image takes writes afterwards.
const CASES: &[(&str, Damage, &str, bool)] = &[
    ("data cluster", |bytes, _, l2| set(bytes, l2, word(bytes, l2) | 0x200), "read 0 64k", false),
    ("data cluster", |bytes, _, l2| set(bytes, l2, word(bytes, l2) | 0x200), "write 4k 4k", false),
    ("data cluster", |bytes, _, l2| set(bytes, l2, word(bytes, l2) | 0x200), "discard 0 64k", true),
    ("data cluster", |bytes, _, l2| set(bytes, l2, word(bytes, l2) | 0x200), "write -z -u 0 64k", true),
    ("zero cluster", |bytes, _, l2| set(bytes, l2, word(bytes, l2) | 0x201), "write 0 4k", false),
    ("L2 table", |bytes, l1, _| set(bytes, l1, word(bytes, l1) | 0x200), "read 0 4k", false),
    ("L2 table", |bytes, l1, _| set(bytes, l1, word(bytes, l1) | 0x200), "discard 0 64k", false),
    ("data on the L1 table", |bytes, l1, l2| set(bytes, l2, l1 as u64 | 1 << 63), "write 0 4k", false),
    ("data on the L1 table", |bytes, l1, l2| set(bytes, l2, l1 as u64 | 1 << 63), "discard 0 64k", false),
];

/// Serves the image, sends the request and a write elsewhere. Returns whether each failed, and the event without the
/// export's name.
fn converse(client: &mut Client, folder: &Path, request: &str, qemu: &Qemu) -> (bool, bool, Value) {
    let image = folder.join("d.qcow2").display().to_string();
    let socket = folder.join("n.sock").display().to_string();
    let file = json!({"driver": "file", "filename": image});
    client.command("blockdev-add", json!({"driver": "qcow2", "node-name": "d", "discard": "unmap", "file": file}));
    client.command("nbd-server-start", json!({"addr": {"type": "unix", "data": {"path": socket}}}));
    client.command("block-export-add", json!({"type": "nbd", "id": "e", "node-name": "d", "writable": true}));
    let uri = format!("nbd+unix:///d?socket={socket}");
    let first = qemu.io(["-f", "raw", "-c", request, &uri]);
    let later = qemu.io(["-f", "raw", "-c", "write 2M 64k", &uri]);
    let mut event = client.event(EVENT);
    client.command("query-jobs", json!({}));
    assert!(!client.events.iter().any(|event| event["event"] == EVENT), "{request}: told once");
    event["device"] = Value::Null;
    let failed = |output: &cowshed_testkit::qemu::Output| output.stdout.contains("failed") || output.code != 0;
    if failed(&first) {
        assert!((first.stdout.clone() + &first.stderr).contains("Input/output error"), "{request}: {first:?}");
    }
    (failed(&first), failed(&later), event)
}

#[test]
fn damage_is_an_error_and_qemus_event() {
    let qemu = Qemu::system();
    for (damage, patch, request, takes_writes) in CASES {
        let about = format!("{damage}, {request}");
        let (theirs, mut their_client) = Theirs::start();
        let daemon = Running::start_in(temp_folder(), Vec::new());
        let mut our_client = daemon.client();
        let path = theirs.folder.path().join("d.qcow2");
        qemu.create(&path, "qcow2", "", 64 << 20);
        qemu.io_commands(&path, "qcow2", &["write -P 1 0 256k".to_owned()]);
        let mut bytes = std::fs::read(&path).expect("the image");
        let l1 = word(&bytes, 40) as usize;
        let l2 = (word(&bytes, l1) & OFFSET) as usize;
        patch(&mut bytes, l1, l2);
        std::fs::write(&path, &bytes).expect("the image");
        std::fs::write(daemon.path("d.qcow2"), &bytes).expect("the image");

        let expected = converse(&mut their_client, theirs.folder.path(), request, &qemu);
        let folder = daemon.folder.path().to_owned();
        let ours = converse(&mut our_client, &folder, request, &qemu);
        // QEMU frees the guest's cluster before it looks at its metadata, and reports success of its discard.
        let is_late = *damage == "data on the L1 table" && request.starts_with("discard");
        assert!(ours.0 == expected.0 || (is_late && ours.0), "{about}: {ours:?}, QEMU {expected:?}");
        assert_eq!((ours.1, &ours.2), (expected.1, &expected.2), "{about}");
        assert_eq!(ours.1, !takes_writes, "{about}");
        let (kept, stopped) = daemon.keep_after_stop();
        assert_eq!(stopped.is_ok(), *takes_writes, "{about}: {stopped:?}");
        let marks = std::fs::read(kept.path().join("d.qcow2")).expect("the image")[72..80].to_vec();
        let their_marks = std::fs::read(&path).expect("the image")[72..80].to_vec();
        assert_eq!(marks, their_marks, "{about}: features");
    }
}
