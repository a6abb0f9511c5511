// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The dirty bitmaps of Parallels images, which are only read.

use crate::oracle::{Oracle, ours, words};
use crate::serving::{await_socket, dirty};
use crate::written_edges::with_extension;
use cowshed_testkit::programs::tool;
use cowshed_testkit::qemu::Qemu;
use std::fs;
use std::process::Command;

const COWSHED: &str = env!("CARGO_BIN_EXE_cowshed");

/// The same with the checksum that belongs to the extension, whose bitmap has the bits 0x2211, in 64 KiB each.
fn with_bitmap(oracle: &Oracle, change: impl FnOnce(&mut [u8])) {
    let mut bytes = with_extension(oracle, 0);
    let at = bytes.len() - (128 << 10);
    bytes[at + (64 << 10)..].fill(0);
    bytes[at + (64 << 10)..][..2].copy_from_slice(&[0x11, 0x22]);
    change(&mut bytes[at..]);
    let features = oracle.work().join("features");
    fs::write(&features, &bytes[at + 24..at + (64 << 10)]).unwrap();
    let sum = tool("md5sum", &[features.to_str().unwrap()]);
    let digit = |index: usize| u8::from_str_radix(&sum[2 * index..][..2], 16).unwrap();
    let sum: [u8; 16] = std::array::from_fn(digit);
    bytes[at + 8..][..16].copy_from_slice(&sum);
    fs::write(oracle.work().join("disk.hds"), &bytes).unwrap();
}

/// QEMU reads it too, though its `convert` leaves it out.
#[test]
fn convert_takes_the_bitmap_of_a_parallels_image_along() {
    let oracle = Oracle::new();
    with_bitmap(&oracle, |extension| extension[56..72].copy_from_slice(&[0xab; 16]));
    let name = "abababab-abab-abab-abab-abababababab";
    ours(&oracle, "convert --bitmaps -f parallels -O qcow2 disk.hds out.qcow2");
    oracle.make("check -q out.qcow2");
    let image = oracle.work().join("out.qcow2");
    let said = oracle.qemu.img(["info".as_ref(), "--output=json".as_ref(), image.as_os_str()]).expect_ok().json();
    let bitmaps = &said["format-specific"]["data"]["bitmaps"];
    assert_eq!(*bitmaps, serde_json::json!([{"name": name, "granularity": 65536, "flags": ["auto"]}]));
    let expected = [0, 4, 9, 13].map(|bit| (bit << 16, 1 << 16));
    for (image, program) in [("out.qcow2", COWSHED), ("disk.hds", COWSHED), ("disk.hds", "qemu-nbd")] {
        let mut command =
            Command::new(if program == COWSHED { COWSHED.into() } else { Qemu::newest().program(program) });
        let verb = (program == COWSHED).then_some("qemu-nbd");
        command.args(verb).args(["-r", "-t", "-x", "x", "-B", name, "-k"]).arg(oracle.work().join("n.sock"));
        let mut server = command.arg(oracle.work().join(image)).spawn().expect("a server");
        await_socket(&oracle.work().join("n.sock"));
        assert_eq!(dirty(&oracle, name), expected, "{image} by {program}");
        tool("kill", &[&server.id().to_string()]);
        server.wait().expect("a child");
        let _ = fs::remove_file(oracle.work().join("n.sock"));
    }
    // A writable image offers none, as with QEMU: the first write makes them wrong.
    let line = format!("qemu-nbd -x x -B {name} -k n.sock disk.hds");
    let said = Command::new(COWSHED).current_dir(oracle.work()).args(words(&line)).output().expect("a program");
    let complaint = String::from_utf8_lossy(&said.stderr);
    assert!(said.status.code() == Some(1) && complaint.contains(name), "{complaint}");
    // The target has a way to store none, and the source to change its own.
    for line in [
        "convert --bitmaps -f parallels -O parallels disk.hds out.hds",
        "bitmap --add -f parallels disk.hds new",
        &format!("bitmap --clear -f parallels disk.hds {name}"),
    ] {
        let code = oracle.ours(&oracle.work(), &words(line)).code;
        assert_eq!(code, Some(1), "{line}");
    }
    assert!(!oracle.work().join("out.hds").exists());
}

/// A bitmap that may say less than it should is never copied as a whole one.
#[test]
fn a_damaged_bitmap_of_a_parallels_image_is_not_copied() {
    let cases: [(&str, usize, &[u8]); 7] = [
        ("sectors", 48, &[0, 9]),
        ("granularity", 72, &[3]),
        ("no granularity", 72, &[0]),
        ("a table of none", 76, &[0]),
        ("a cluster behind the file", 80, &[0, 0, 1]),
        ("a cluster before the data", 80, &[2, 0, 0]),
        ("another feature", 24, &[7]),
    ];
    for (what, at, bytes) in cases {
        let change = |extension: &mut [u8]| extension[at..][..bytes.len()].copy_from_slice(bytes);
        let oracle = Oracle::new();
        with_bitmap(&oracle, change);
        let converted =
            oracle.ours(&oracle.work(), &words("convert --bitmaps -f parallels -O qcow2 disk.hds out.qcow2"));
        if what == "another feature" {
            assert_eq!(converted.code, Some(0), "{what}: {}", converted.err);
            continue;
        }
        assert_eq!(converted.code, Some(1), "{what}");
        assert!(converted.err.contains("Cannot copy inconsistent bitmap"), "{what}: {}", converted.err);
        assert!(!oracle.work().join("out.qcow2").exists(), "{what}");
        ours(&oracle, "convert --bitmaps --skip-broken-bitmaps -f parallels -O qcow2 disk.hds out.qcow2");
        ours(&oracle, "compare -f parallels -F qcow2 disk.hds out.qcow2");
    }
    let oracle = Oracle::new();
    for (at, byte) in [(8, 0u8), (44, 0x59)] {
        with_bitmap(&oracle, |_| {});
        let path = oracle.work().join("disk.hds");
        let mut bytes = fs::read(&path).unwrap();
        let extension = bytes.len() - (128 << 10);
        match at {
            // Open in another program, or left so.
            44 => bytes[44..48].copy_from_slice(&0x746f_6e59u32.to_le_bytes()),
            _ => bytes[extension + at] ^= byte | 1,
        }
        fs::write(&path, &bytes).unwrap();
        let converted =
            oracle.ours(&oracle.work(), &words("convert --bitmaps -f parallels -O qcow2 disk.hds out.qcow2"));
        assert!(converted.err.contains("Cannot copy inconsistent bitmap"), "{at}: {}", converted.err);
    }
}
