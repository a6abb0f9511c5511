// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Files that are containers and no disks: each is known by its mark, and an unreadable one is refused by its name.

use crate::oracle::Oracle;
use std::path::Path;
use std::process::{Command, Output};

const MIB: usize = 1 << 20;

fn cowshed(folder: &Path, line: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cowshed"));
    command.args(line.split(' ')).current_dir(folder).output().expect("our own binary runs")
}

/// A MiB of zeroes with these bytes at these places; negative ones count from the end.
fn disk(parts: &[(isize, &[u8])]) -> Vec<u8> {
    let mut bytes = vec![0; MIB];
    for (at, part) in parts {
        let at = if *at < 0 { MIB - at.unsigned_abs() } else { at.unsigned_abs() };
        bytes[at..at + part.len()].copy_from_slice(part);
    }
    bytes
}

/// A VHD footer for a disk of a MiB less the footer, of this type.
fn footer(kind: u8) -> Vec<u8> {
    let mut footer = vec![0; 512];
    footer[..8].copy_from_slice(b"conectix");
    footer[8..16].copy_from_slice(&[0, 0, 0, 2, 0, 1, 0, 0]);
    footer[16..24].copy_from_slice(&[0xff; 8]);
    let size = (MIB as u64 - 512).to_be_bytes();
    footer[40..48].copy_from_slice(&size);
    footer[48..56].copy_from_slice(&size);
    footer[56..60].copy_from_slice(&[0, 30, 4, 17]);
    footer[63] = kind;
    let sum: u32 = footer.iter().map(|byte| u32::from(*byte)).sum();
    footer[64..68].copy_from_slice(&(!sum).to_be_bytes());
    footer
}

/// Files that can't be read, with the words of `info` about them.
#[test]
fn what_can_not_be_read_is_refused_by_name() {
    let oracle = Oracle::new();
    let folder = oracle.work();
    let refused: [(&str, Vec<u8>, &str); 13] = [
        ("dmg", disk(&[(-512, b"koly\0\0\0\x04\0\0\x02\0")]), "property list"),
        (
            "odd.dmg",
            [disk(&[]), b"x".repeat(88), disk(&[(-512, b"koly\0\0\0\x04\0\0\x02\0")])].concat(),
            "property list",
        ),
        ("bochs", disk(&[(0, b"Bochs Virtual HD Image")]), "images of Bochs"),
        ("cloop", disk(&[(0, b"#!/bin/sh\n#V2.0 Format\nmodprobe cloop")]), "block_size"),
        (
            "cowd",
            disk(&[(0, b"COWD\x01\0\0\0\x03\0\0\0\0\x08\0\0\x01\0\0\0\x04\0\0\0\0\x10\0\0")]),
            "open the disk by its",
        ),
        ("sesparse", disk(&[(0, b"\xbe\xba\xfe\xca\0\0\0\0\x01\0\0\0\x02\0\0\0")]), "open the disk by its descriptor"),
        ("vhd-dynamic", disk(&[(-512, &footer(3))]), "dynamic"),
        ("vhd-differencing", disk(&[(-512, &footer(4))]), "vhd-differencing"),
        ("qcow-0", disk(&[(0, b"QFI\xfb\0\0\0\0")]), "version"),
        ("qcow-9", disk(&[(0, b"QFI\xfb\0\0\0\x09")]), "version"),
        // Without a key that is the first thing missing.
        ("luks-3", disk(&[(0, b"LUKS\xba\xbe\0\x03")]), "luks-3"),
        ("lower", b"# disk descriptorfile\nversion=1\n".to_vec(), "createType"),
        ("untitled", b"version=1\nCID=1\n".to_vec(), "createType"),
    ];
    for (name, bytes, part) in refused {
        std::fs::write(folder.join(name), bytes).expect("a file");
        for verb in ["info", "check", "convert -O raw", "map", "measure -O qcow2"] {
            let end = if verb.starts_with("convert") { " out" } else { "" };
            let output = cowshed(&folder, &format!("{verb} {name}{end}"));
            let error = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(output.status.code(), Some(1), "{verb} {name}: {error}");
            assert!(error.contains(part), "{verb} {name}: {error}");
            assert!(!folder.join("out").exists(), "{verb} {name}");
        }
        let output = cowshed(&folder, &format!("inspect {name}"));
        assert_eq!(output.status.code(), Some(2), "inspect {name}: {output:?}");
        let reason = String::from_utf8_lossy(&output.stdout).into_owned();
        let part = match name {
            // It names the format that it can't judge, not the version.
            "luks-3" => "'luks'",
            "dmg" | "odd.dmg" => "'dmg'",
            "bochs" => "'bochs'",
            "cloop" => "'cloop'",
            _ => part,
        };
        assert!(reason.contains(part), "inspect {name}: {reason}");
        // With a format from the user it is a disk of that format.
        let output = cowshed(&folder, &format!("convert -f raw -O raw {name} out"));
        assert!(output.status.success(), "{name}: {output:?}");
        std::fs::remove_file(folder.join("out")).expect("it was made");
    }
}

/// A VHD of fixed size has nothing but its footer, which is no part of the disk.
#[test]
fn a_fixed_vhd_is_known_by_its_footer() {
    let oracle = Oracle::new();
    let folder = oracle.work();
    oracle.make("create -q -f vpc -o subformat=fixed,force_size=on made.vhd 3M");
    std::fs::write(folder.join("written.vhd"), disk(&[(-512, &footer(2))])).expect("a file");
    for (name, size) in [("made.vhd", 3 * MIB), ("written.vhd", MIB - 512)] {
        let output = cowshed(&folder, &format!("info --output=json {name}"));
        let info: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        assert_eq!((&info["format"], &info["virtual-size"]), (&"vpc".into(), &size.into()), "{info}");
        assert!(cowshed(&folder, &format!("convert --force -O raw {name} out")).status.success());
        assert_eq!(std::fs::metadata(folder.join("out")).expect("it was made").len(), size as u64);
        assert!(oracle.qemu.is_equal((&folder.join(name), "vpc"), (&folder.join("out"), "raw")));
    }
}

/// File systems and packed files that are no disk image are raw, as QEMU has it.
#[test]
fn other_files_are_raw() {
    let oracle = Oracle::new();
    let folder = oracle.work();
    let plain: [(&str, Vec<u8>); 9] = [
        ("iso", disk(&[(0x8000, b"\x01CD001\x01")])),
        ("squashfs", disk(&[(0, b"hsqs")])),
        ("gzip", disk(&[(0, b"\x1f\x8b\x08")])),
        ("xz", disk(&[(0, b"\xfd7zXZ\0")])),
        ("zip", disk(&[(0, b"PK\x03\x04")])),
        ("tar", disk(&[(257, b"ustar\x0000")])),
        ("koly-alone", disk(&[(-512, b"koly")])),
        ("cookie-alone", disk(&[(-512, b"conectix")])),
        ("comment", b"# a comment\nversion two\n".to_vec()),
    ];
    for (name, bytes) in plain {
        std::fs::write(folder.join(name), bytes).expect("a file");
        let output = cowshed(&folder, &format!("info --output=json {name}"));
        let info: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let theirs =
            oracle.qemu.img([&["info", "--output=json"][..], &[folder.join(name).to_str().expect("a name")]].concat());
        assert_eq!(info["format"], "raw", "{name}");
        assert_eq!(theirs.json()["format"], "raw", "{name}");
    }
}
