// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Images that other products made: crates/testkit/images.

use crate::oracle::{Oracle, words};
use std::fs;
use std::path::Path;
use std::process::Command;

/// Puts a sample under a name into the folder.
#[track_caller]
fn unpack(oracle: &Oracle, sample: &str, name: &str) {
    let images = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testkit/images");
    let output = Command::new("gzip").arg("-dc").arg(images.join(format!("{sample}.gz"))).output().unwrap();
    assert!(output.status.success(), "{sample}: {}", String::from_utf8_lossy(&output.stderr));
    fs::write(oracle.work().join(name), output.stdout).unwrap();
}

#[track_caller]
fn ours(oracle: &Oracle, line: &str) -> String {
    let said = oracle.ours(&oracle.work(), &words(line));
    assert_eq!(said.code, Some(0), "{line}: {}{}", said.out, said.err);
    said.out
}

/// QEMU refuses to read such an image, and carries its log out where it may write.
#[test]
fn a_vhdx_log_is_carried_out_in_memory_for_reading_and_in_the_file_for_writing() {
    let oracle = Oracle::new();
    unpack(&oracle, "windows-log-replay.vhdx", "sample.vhdx");
    let before = fs::read(oracle.work().join("sample.vhdx")).unwrap();
    for name in ["theirs.vhdx", "ours.vhdx"] {
        fs::write(oracle.work().join(name), &before).unwrap();
    }
    assert_eq!(oracle.real(&oracle.work(), &words("convert -f vhdx -O raw sample.vhdx none")).code, Some(1));
    let real = oracle.real(&oracle.work(), &words("check -r all -f vhdx theirs.vhdx"));
    assert_eq!(real.code, Some(0), "{}", real.err);
    oracle.make("convert -f vhdx -O raw theirs.vhdx truth");
    // Without a right to write, nothing is written.
    ours(&oracle, "compare -f vhdx -F raw sample.vhdx truth");
    ours(&oracle, "convert -f vhdx -O qcow2 sample.vhdx out.qcow2");
    oracle.make("compare -f qcow2 -F raw out.qcow2 truth");
    ours(&oracle, "check -f vhdx sample.vhdx");
    ours(&oracle, "check -r all --dry-run -f vhdx sample.vhdx");
    assert!(fs::read(oracle.work().join("sample.vhdx")).unwrap() == before, "it was written to");
    // With it, the file becomes one that QEMU reads.
    let said = oracle.ours(&oracle.work(), &words("check -r all -f vhdx ours.vhdx"));
    assert_eq!((said.out, said.err, said.code), (real.out, real.err, real.code));
    oracle.make("compare -f vhdx -F raw ours.vhdx truth");
    oracle.make("check -f vhdx ours.vhdx");
    let said = oracle.ours(&oracle.work(), &words("check -r all -f vhdx ours.vhdx"));
    assert_eq!(said.out, "No errors were found on the image.\n");
}

/// A log that was cut off with its file.
#[test]
fn a_vhdx_file_that_is_shorter_than_its_log_knows_is_refused() {
    let oracle = Oracle::new();
    unpack(&oracle, "windows-log-replay.vhdx", "sample.vhdx");
    let path = oracle.work().join("sample.vhdx");
    let len = fs::metadata(&path).unwrap().len();
    fs::File::options().write(true).open(&path).unwrap().set_len(len - (1 << 20)).unwrap();
    for line in ["info -f vhdx sample.vhdx", "check -r all -f vhdx sample.vhdx"] {
        let message = oracle.refused(line);
        assert!(message.contains("FlushedFileOffset") && message.contains("cut off"), "{message}");
    }
}
