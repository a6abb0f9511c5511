// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Overlays that grow over a backing file that is longer: what that takes, and what a failure leaves.

use crate::oracle::{Oracle, ours};
use crate::written_edges::run_io;
use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Output};

/// A base of three MiB of 51, and an overlay of one MiB with a cluster of its own.
fn overlay(oracle: &Oracle, options: &str) {
    fs::write(oracle.work().join("base"), vec![51; 3 << 20]).unwrap();
    oracle.make(&format!("create -q -f qcow2 -F raw -b base {options} top.qcow2 1M"));
    oracle.io(&["write -P 7 64k 64k"], "top.qcow2");
}

/// The disk of [`overlay`], with zeroes up to this size.
fn model(oracle: &Oracle, size: u64) {
    let mut bytes = vec![51; 1 << 20];
    bytes[64 << 10..128 << 10].fill(7);
    let path = oracle.work().join("model");
    fs::write(&path, &bytes).unwrap();
    File::options().write(true).open(&path).unwrap().set_len(size).unwrap();
}

fn expect_model(oracle: &Oracle, size: u64) {
    model(oracle, size);
    oracle.make("compare -q -f qcow2 -F raw top.qcow2 model");
    ours(oracle, "compare -q -f qcow2 -F raw top.qcow2 model");
    oracle.make("check -q -f qcow2 top.qcow2");
    ours(oracle, "check -q -f qcow2 top.qcow2");
}

fn len(oracle: &Oracle) -> u64 {
    fs::metadata(oracle.work().join("top.qcow2")).unwrap().len()
}

/// Zeroes of version 2 take space, so they stop where the base ends. Those of version 3 go on to the end of the disk.
#[test]
fn growth_of_a_version_2_overlay_stays_small() {
    let oracle = Oracle::new();
    overlay(&oracle, "-o compat=0.10");
    ours(&oracle, "resize -q top.qcow2 1G");
    assert!(len(&oracle) < 4 << 20, "{} bytes", len(&oracle));
    expect_model(&oracle, 1 << 30);
    let oracle = Oracle::new();
    overlay(&oracle, "");
    ours(&oracle, "resize -q top.qcow2 1G");
    let base = File::options().write(true).open(oracle.work().join("base")).unwrap();
    base.set_len(512 << 20).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&base, &[9; 4096], 100 << 20).unwrap();
    expect_model(&oracle, 1 << 30);
}

fn limited(folder: &Path, limit: &str, line: &str) -> Output {
    let mut command = Command::new("prlimit");
    command.arg(limit).arg(env!("CARGO_BIN_EXE_cowshed")).args(line.split(' '));
    command.current_dir(folder).output().expect("prlimit must be installed (util-linux)")
}

/// The tables of the new part take 128 MiB.
#[test]
fn growth_over_a_longer_base_takes_little_memory() {
    const LIMIT: u64 = 96 << 20;
    let oracle = Oracle::new();
    overlay(&oracle, "");
    let output = limited(&oracle.work(), &format!("--data={LIMIT}"), "resize -q top.qcow2 1T");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(len(&oracle) > 128 << 20, "{} bytes", len(&oracle));
    oracle.make("check -q -f qcow2 top.qcow2");
    let said = run_io(&oracle, "qcow2", "top.qcow2", &["read -P 7 64k 64k", "read -P 0 1M 1M", "read -P 0 900G 1M"]);
    assert!(!said.contains("failed"), "{said}");
}

/// The disk of version 2 runs out of space with its zeroes, that of version 3 with its tables.
#[test]
fn failed_growth_of_an_overlay_leaves_nothing() {
    for (options, base, size) in
        [("-o compat=0.10", 1 << 30, "1G"), ("", 3 << 20, "2T"), ("-o extended_l2=on", 3 << 20, "2T")]
    {
        let oracle = Oracle::new();
        overlay(&oracle, options);
        File::options().write(true).open(oracle.work().join("base")).unwrap().set_len(base).unwrap();
        let before = len(&oracle);
        let output = limited(&oracle.work(), &format!("--fsize={}", 32 << 20), &format!("resize -q top.qcow2 {size}"));
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains("too large"), "{options}: {said}");
        expect_model(&oracle, 1 << 20);
        // A larger table of tables may stay.
        assert!(len(&oracle) <= before + (256 << 10), "{options}: {} bytes, {before} before", len(&oracle));
        let allocated =
            std::os::unix::fs::MetadataExt::blocks(&fs::metadata(oracle.work().join("top.qcow2")).unwrap()) * 512;
        assert!(allocated <= before + (256 << 10), "{options}: {allocated} bytes");
        ours(&oracle, "resize -q top.qcow2 8M");
        expect_model(&oracle, 8 << 20);
    }
}

/// Bytes behind the disk in the data file were never the disk's. QEMU shows them in the new part.
#[test]
fn growth_over_a_longer_raw_data_file_shows_zeroes() {
    for preallocation in ["off", "metadata", "falloc", "full"] {
        let oracle = Oracle::new();
        oracle.make("create -q -f qcow2 -o data_file=data,data_file_raw=on top.qcow2 1M");
        let mut bytes = vec![51; 1 << 20];
        bytes.resize(4 << 20, 90);
        fs::write(oracle.work().join("data"), &bytes).unwrap();
        ours(&oracle, &format!("resize -q --preallocation={preallocation} top.qcow2 3M"));
        bytes.truncate(1 << 20);
        bytes.resize(3 << 20, 0);
        fs::write(oracle.work().join("model"), &bytes).unwrap();
        oracle.make("compare -q -f qcow2 -F raw top.qcow2 model");
        ours(&oracle, "compare -q -f qcow2 -F raw top.qcow2 model");
        assert!(
            fs::read(oracle.work().join("data")).unwrap()[..3 << 20] == bytes,
            "{preallocation}: the file is the disk"
        );
        oracle.make("check -q top.qcow2");
    }
}

/// The table for the zeroes has no room.
#[test]
fn failed_growth_of_a_qed_overlay_leaves_nothing() {
    let oracle = Oracle::new();
    fs::write(oracle.work().join("base"), vec![51; 3 << 20]).unwrap();
    oracle.make("create -q -f qed -F raw -b base top.qed 1M");
    let path = oracle.work().join("top.qed");
    let before = fs::read(&path).unwrap();
    let output = limited(&oracle.work(), &format!("--fsize={}", 400 << 10), "resize -q -f qed top.qed 8M");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("too large"), "{said}");
    assert!(fs::read(&path).unwrap() == before, "the image is as it was");
    ours(&oracle, "resize -q -f qed top.qed 8M");
    let mut bytes = vec![51; 1 << 20];
    bytes.resize(8 << 20, 0);
    fs::write(oracle.work().join("model"), &bytes).unwrap();
    oracle.make("compare -q -f qed -F raw top.qed model");
    ours(&oracle, "compare -q -f qed -F raw top.qed model");
    oracle.make("check -q -f qed top.qed");
}
