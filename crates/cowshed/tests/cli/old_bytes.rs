// SPDX-License-Identifier: Apache-2.0 OR MIT
//! No byte of an earlier use of memory reaches a file or a client. Builds with debug assertions fill memory that is
//! about to be filled with a mark. Every way of it that these tests know ends without the mark.

use crate::oracle::Oracle;
use crate::serving::Serving;
use cowshed_storage::SCRATCH_POISON;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// So many marks in a row are no accident: the tests' own data have none at all.
const RUN: [u8; 16] = [SCRATCH_POISON; 16];

fn cowshed(folder: &Path, line: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cowshed"));
    command.args(line.split(' ')).current_dir(folder).output().expect("our own binary runs")
}

fn expect_ok(folder: &Path, line: &str) {
    let output = cowshed(folder, line);
    assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Data that compress a little, with holes, ending within a sector.
fn source() -> Vec<u8> {
    let mut state = 7u64;
    let mut bytes: Vec<u8> = (0..(3 << 20) + 700)
        .map(|at: usize| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let byte = if at % 64 < 40 { b'a' + (at % 23) as u8 } else { (state >> 33) as u8 };
            if byte == SCRATCH_POISON { 1 } else { byte }
        })
        .collect();
    bytes[1_000_000..1_300_001].fill(0);
    bytes
}

#[track_caller]
fn expect_no_mark(path: &Path, what: &str) {
    let bytes = std::fs::read(path).expect("the file is there");
    let found = bytes.windows(RUN.len()).position(|window| window == RUN);
    assert_eq!(found, None, "{what}: memory of an earlier use");
}

/// The disk as a client of a server of ours sees it.
fn over_nbd(oracle: &Oracle, options: &[&str], image: &str) -> PathBuf {
    let folder = oracle.work();
    let mut serving = Serving::start(folder.clone(), &[&["serve", "-r"], options, &[image]].concat());
    let uri = serving.line();
    let copy = folder.join("client.raw");
    let text = copy.to_str().expect("a name");
    // In small pieces that follow no border, and whole.
    let read = ["read 511 70001", "read 65535 2", "read 0 3M", "read 999999 300003"];
    let commands: Vec<&str> = read.iter().flat_map(|command| ["-c", command]).collect();
    oracle.qemu.io([&["-f", "raw", "-r"][..], &commands, &[uri.as_str()]].concat()).expect_ok();
    oracle.qemu.img(["convert", "-f", "raw", "-O", "raw", &uri, text]).expect_ok();
    copy
}

#[test]
fn images_hold_no_old_bytes() {
    let oracle = Oracle::new();
    let folder = oracle.work();
    let mut bytes = source();
    std::fs::write(folder.join("source"), &bytes).expect("a file");
    bytes.resize(bytes.len().next_multiple_of(512), 0);
    for (options, name) in [
        ("-O raw", "plain.raw"),
        ("-O raw -S 0", "full.raw"),
        ("-O qcow2", "plain.qcow2"),
        ("-O qcow2 -S 0 -o cluster_size=512", "small.qcow2"),
        ("-O qcow2 -o compat=0.10", "old.qcow2"),
        ("-O qcow2 -o extended_l2=on", "parts.qcow2"),
        ("-O qcow2 -c", "packed.qcow2"),
        ("-O qcow2 -c -o compression_type=zstd,cluster_size=2M", "zstd.qcow2"),
        ("-O qcow2 -t none -T none", "direct.qcow2"),
        ("-O raw -t none -T none", "direct.raw"),
        ("-O qcow2 -m 16 -W", "disorder.qcow2"),
        ("-O qcow2 -o data_file=FOLDER/data.raw", "parted.qcow2"),
    ] {
        let options = options.replace("FOLDER", folder.to_str().expect("a name"));
        let options = options.as_str();
        expect_ok(&folder, &format!("convert {options} -f raw source {name}"));
        expect_no_mark(&folder.join(name), options);
        let format = name.split('.').next_back().expect("a format");
        let theirs = oracle.qemu.content(&folder.join(name), format);
        assert!(theirs == bytes, "{options}: another disk");
        let client = over_nbd(&oracle, &[], name);
        assert!(std::fs::read(&client).expect("the copy") == bytes, "{options}: another disk over NBD");
        let client = over_nbd(&oracle, &["--cache", "none"], name);
        assert!(std::fs::read(&client).expect("the copy") == bytes, "{options}: another disk over NBD, uncached");
    }
    expect_no_mark(&folder.join("data.raw"), "a data file");
}

/// Writes of parts: the bytes around them in their cluster, block or sector are zeroes or the backing file's.
#[test]
fn writes_of_parts_bring_no_old_bytes_along() {
    let oracle = Oracle::new();
    let folder = oracle.work();
    std::fs::write(folder.join("base.raw"), &source()[..700_000]).expect("a file");
    let writes =
        ["write -P 7 1000 100", "write -P 8 65535 2", "write -P 9 199999 70001", "write -P 6 2097151 1", "flush"];
    for (options, name) in [
        ("", "alone.qcow2"),
        ("-o cluster_size=2M", "large.qcow2"),
        ("-o extended_l2=on,cluster_size=128k", "parts.qcow2"),
        ("-b base.raw -F raw", "over.qcow2"),
        ("-b base.raw -F raw -o extended_l2=on,cluster_size=128k", "over-parts.qcow2"),
        ("-o data_file=FOLDER/data.raw", "parted.qcow2"),
    ] {
        let options = options.replace("FOLDER", folder.to_str().expect("a name"));
        for cache in ["writeback", "none"] {
            let line = format!("create -q -f qcow2 {options} {name} 3M");
            oracle.make(line.replace("  ", " ").as_str());
            let io: Vec<&str> = writes.iter().flat_map(|command| ["-c", command]).collect();
            let status = Command::new(env!("CARGO_BIN_EXE_cowshed"))
                .args(["io", "-t", cache])
                .args(io)
                .arg(name)
                .current_dir(&folder)
                .output()
                .expect("our own binary runs");
            assert!(status.status.success(), "{options}: {status:?}");
            expect_no_mark(&folder.join(name), &format!("{options} {cache}"));
            let mut expected = vec![0; 3 << 20];
            if options.contains("base.raw") {
                expected[..700_000].copy_from_slice(&source()[..700_000]);
            }
            for (byte, at, len) in [(7, 1000, 100), (8, 65535, 2), (9, 199_999, 70_001), (6, 2_097_151, 1)] {
                expected[at..at + len].fill(byte);
            }
            assert!(oracle.qemu.content(&folder.join(name), "qcow2") == expected, "{options} {cache}: another disk");
            oracle.qemu.expect_clean(&folder.join(name));
        }
    }
    expect_no_mark(&folder.join("data.raw"), "a data file");
}

/// Reads that fail half-way leave nothing of the memory that was to be filled.
#[test]
fn failed_reads_show_no_old_bytes() {
    let oracle = Oracle::new();
    let folder = oracle.work();
    oracle.make("create -q -f qcow2 disk.qcow2 4M");
    oracle.io(&["write -P 7 0 4M"], "disk.qcow2");
    // The last MiB can't be read: the readable part is there, the rest is zeroes.
    let bad = "driver=qcow2,file.driver=blkdebug,file.image.filename=disk.qcow2,file.inject-error.0.event=none,\
               file.inject-error.0.event=none,file.inject-error.0.iotype=read,file.inject-error.0.errno=5,file.inject-error.0.sector=6144";
    let line = format!("convert --salvage -O raw --image-opts {bad} out");
    let output = cowshed(&folder, &line);
    let bytes = std::fs::read(folder.join("out")).unwrap_or_else(|error| panic!("{error}: {output:?}"));
    expect_no_mark(&folder.join("out"), "salvaged");
    assert!(bytes.iter().all(|byte| [0, 7].contains(byte)) && bytes.contains(&7));
}
