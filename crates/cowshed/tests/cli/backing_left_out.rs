// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Writes to an overlay whose backing file is left out. Zeroes must be there when the backing file shows again.

use crate::oracle::{Oracle, words};
use std::fs;
use std::os::unix::fs::symlink;
use std::process::Command;

/// Formats that may have a backing file, and the options of `create`.
const OVERLAYS: [(&str, &str); 6] = [
    ("qed", ""),
    ("qcow", ""),
    ("vmdk", ""),
    ("vmdk", "-o zeroed_grain=on "),
    ("vmdk", "-o subformat=twoGbMaxExtentSparse "),
    ("qcow2", ""),
];

/// The disk in KiB: start, length, and the byte there. A write of a piece of a cluster zeroes the rest of the cluster.
const RANGES: [(usize, usize, u8); 7] =
    [(0, 1024, 7), (1024, 2048, 0), (3072, 2048, 7), (5120, 100, 0), (6144, 64, 0), (6272, 768, 7), (7168, 3, 0)];

/// Runs our qemu-io without the backing file.
fn without_backing(oracle: &Oracle, image: &str, commands: &[&str]) {
    let link = oracle.work().join("qemu-io");
    if !link.exists() {
        symlink(env!("CARGO_BIN_EXE_cowshed"), &link).unwrap();
    }
    let mut command = Command::new(&link);
    command.current_dir(oracle.work());
    for text in commands {
        command.args(["-c", text]);
    }
    let output = command.args(["--image-opts", image]).output().unwrap();
    assert!(output.status.success(), "{commands:?}: {output:?}");
}

#[test]
fn zeroes_stay_where_the_backing_file_shows_again() {
    let oracle = Oracle::new();
    let work = oracle.work();
    for (format, options) in OVERLAYS {
        let below = if format == "vmdk" { "vmdk" } else { "raw" };
        fs::write(work.join("sevens"), vec![7u8; 8 << 20]).unwrap();
        oracle.make(&format!("convert -f raw -O {below} sevens base"));
        oracle.make(&format!("create -q -f {format} {options}-b base -F {below} top"));
        let image = format!("driver={format},file.filename=top,backing=");
        without_backing(&oracle, &image, &["write -z 1M 2M", "write -z 5M 100k"]);
        without_backing(&oracle, &format!("{image},detect-zeroes=on"), &["write -P 0 6M 64k", "write -P 0 7M 3k"]);
        for reader in 0..2 {
            let line = words(&format!("convert -f {format} -O raw top out"));
            let said = if reader == 0 { oracle.ours(&work, &line) } else { oracle.real(&work, &line) };
            assert_eq!(said.code, Some(0), "{format} {options}: {}", said.err);
            let out = fs::read(work.join("out")).unwrap();
            assert_eq!(out.len(), 8 << 20);
            for (start, len, byte) in RANGES {
                let wrong = out[start << 10..(start + len) << 10].iter().position(|is| *is != byte);
                assert_eq!(wrong, None, "{format} {options}, read by {reader}: {byte} at {start} KiB");
            }
        }
        for name in ["top", "base", "top-s001.vmdk"] {
            let _ = fs::remove_file(work.join(name));
        }
    }
}
