// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Clusters at the end of a file that something refers to, and that have no count: a damaged image, which a repair counts
//! again. Whatever changes the image in between leaves them there.

use crate::oracle::{Oracle, words};
use cowshed_testkit::programs::finish;
use std::fs;
use std::os::unix::fs::symlink;
use std::process::Command;

const CLUSTER: usize = 64 << 10;
const KEPT: std::ops::Range<usize> = 8..16;

fn word(bytes: &[u8], at: usize) -> usize {
    u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap()) as usize
}

/// An image with free clusters in front, and ten clusters at the end without a count: data, and an L2 table.
fn damaged(oracle: &Oracle) {
    let image = oracle.work().join("a.qcow2");
    oracle.make("create -q -f qcow2 a.qcow2 1G");
    let mut commands: Vec<String> = (0..KEPT.end).map(|at| format!("write -P {} {}k 64k", at + 1, at * 64)).collect();
    commands.push("write -P 99 512M 64k".to_owned());
    commands.push(format!("discard 0 {}k", KEPT.start * 64));
    qemu_io(oracle, "-dunmap", &commands);
    let mut bytes = fs::read(&image).unwrap();
    let block = word(&bytes, word(&bytes, 48));
    let end = bytes.len() / CLUSTER;
    for cluster in end - 10..end {
        assert_eq!(bytes[block + 2 * cluster + 1], 1, "cluster {cluster}");
        bytes[block + 2 * cluster + 1] = 0;
    }
    fs::write(&image, bytes).unwrap();
}

fn check_data(oracle: &Oracle) {
    let mut commands: Vec<String> = KEPT.map(|at| format!("read -P {} {}k 64k", at + 1, at * 64)).collect();
    commands.push("read -P 99 512M 64k".to_owned());
    qemu_io(oracle, "-r", &commands);
}

/// Nothing of it may fail.
fn qemu_io(oracle: &Oracle, option: &str, commands: &[String]) {
    let mut command = Command::new(oracle.qemu.io_path());
    command.current_dir(oracle.work()).arg(option);
    for line in commands {
        command.args(["-c", line]);
    }
    let said = finish(command.arg("a.qcow2"));
    assert!(said.code == Some(0) && !said.out.contains("failed") && said.err.is_empty(), "{}{}", said.out, said.err);
}

#[test]
fn changes_leave_uncounted_clusters_at_the_end() {
    let tools = ["qemu-img", "qemu-io"];
    for line in [
        "qemu-io -c 'write -P 7 8M 64k' a.qcow2",
        "qemu-io -d unmap -c 'write -P 7 8M 64k' -c 'discard 8M 64k' a.qcow2",
        "qemu-io -t none -c 'write -P 7 8M 64k' a.qcow2",
        "qemu-img resize -q a.qcow2 2G",
        "qemu-img bitmap --add a.qcow2 b",
        "qemu-img snapshot -c s a.qcow2",
        // Counts are too low to take any away.
        "qemu-img snapshot -c s a.qcow2; ! qemu-img snapshot -d s a.qcow2",
    ] {
        let oracle = Oracle::new();
        for tool in tools {
            let _ = symlink(env!("CARGO_BIN_EXE_cowshed"), oracle.work().join(tool));
        }
        damaged(&oracle);
        let length = fs::metadata(oracle.work().join("a.qcow2")).unwrap().len();
        let run = format!("set -e; PATH={}:$PATH; {line}", oracle.work().display());
        let said = finish(Command::new("sh").args(["-c", &run]).current_dir(oracle.work()));
        assert_eq!(said.code, Some(0), "{line}: {}{}", said.out, said.err);
        assert!(fs::metadata(oracle.work().join("a.qcow2")).unwrap().len() >= length, "{line}");
        check_data(&oracle);
        let repaired = oracle.ours(&oracle.work(), &words("check -r all a.qcow2"));
        assert_eq!(repaired.code, Some(0), "{line}: {}", repaired.out);
        oracle.make("check -q a.qcow2");
        check_data(&oracle);
    }
}

/// Space that a crash has left: nothing refers to it.
#[test]
fn changes_cut_off_what_nothing_refers_to() {
    let oracle = Oracle::new();
    let image = oracle.work().join("a.qcow2");
    symlink(env!("CARGO_BIN_EXE_cowshed"), oracle.work().join("qemu-io")).unwrap();
    oracle.make("create -q -f qcow2 a.qcow2 1G");
    oracle.io(&["write -P 1 0 64k"], "a.qcow2");
    let length = fs::metadata(&image).unwrap().len();
    fs::File::options().write(true).open(&image).unwrap().set_len(length + (20 << 20)).unwrap();
    let write = ["-c", "write -P 2 64k 64k", "a.qcow2"];
    let said = finish(Command::new("./qemu-io").args(write).current_dir(oracle.work()));
    assert_eq!(said.code, Some(0), "{}{}", said.out, said.err);
    assert_eq!(fs::metadata(&image).unwrap().len(), length + CLUSTER as u64);
    oracle.make("check -q a.qcow2");
}

#[test]
fn last_cluster_of_the_file_is_whole() {
    let oracle = Oracle::new();
    let work = oracle.work();
    let length = |name: &str| fs::metadata(work.join(name)).unwrap().len();
    symlink(env!("CARGO_BIN_EXE_cowshed"), work.join("qemu-io")).unwrap();
    for size in [1 << 20, (1 << 20) + 5120] {
        oracle.make(&format!("create -q -f qcow2 a.qcow2 {size}"));
        fs::copy(work.join("a.qcow2"), work.join("b.qcow2")).unwrap();
        let write = format!("write -P 3 {} 512", size - 512);
        oracle.io(&[&write], "b.qcow2");
        let said = finish(Command::new("./qemu-io").args(["-c", &write, "a.qcow2"]).current_dir(&work));
        assert_eq!(said.code, Some(0), "{}{}", said.out, said.err);
        assert_eq!(length("a.qcow2"), length("b.qcow2"), "{size}");
        oracle.ours(&work, &words("convert -O qcow2 a.qcow2 c.qcow2"));
        oracle.make("convert -O qcow2 a.qcow2 d.qcow2");
        assert_eq!(length("c.qcow2"), length("d.qcow2"), "{size}, converted");
        // Compressed data end the file, as in QEMU.
        oracle.ours(&work, &words("convert -c -O qcow2 a.qcow2 c.qcow2"));
        oracle.make("convert -c -O qcow2 a.qcow2 d.qcow2");
        assert!(length("c.qcow2") <= length("d.qcow2"), "{size}, compressed");
    }
}
