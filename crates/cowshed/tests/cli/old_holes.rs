// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Holes of QEMU's drivers for other formats than qcow2, by their numbers: one clear error each, in bounded memory. Those of qcow2
//! and of names in images are in `hostile.rs`.

use crate::oracle::Oracle;
use cowshed_layout::vpc;
use std::fs;
use std::process::Command;

/// Address space that a refusal may take, in KiB.
const MEMORY_KIB: u32 = 768 << 10;

/// Every verb that reads the image ends with 1 and one message about it, in little memory and without a file left behind.
#[track_caller]
fn refused(oracle: &Oracle, format: &str, image: &[u8], part: &str) {
    let work = oracle.work();
    fs::write(work.join("bad"), image).unwrap();
    for line in [
        format!("info -f {format} bad"),
        format!("map -f {format} bad"),
        format!("convert -f {format} -O raw bad out"),
        format!("bench -c 1 -f {format} bad"),
    ] {
        let program = env!("CARGO_BIN_EXE_cowshed");
        let limited = format!("ulimit -v {MEMORY_KIB}; exec timeout 20 {program} {line}");
        let output = Command::new("sh").args(["-c", &limited]).current_dir(&work).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{line}: {said}");
        assert!(said.contains(part) && said.contains("bad"), "{line}, no '{part}': {said}");
        assert!(said.lines().count() == 1 && !said.contains("panicked"), "{line}: {said}");
        assert!(!work.join("out").exists(), "{line}");
    }
}

/// The image with other bytes here and there.
fn changed(good: &[u8], changes: &[(usize, &[u8])]) -> Vec<u8> {
    let mut image = good.to_vec();
    for (at, bytes) in changes {
        image[*at..at + bytes.len()].copy_from_slice(bytes);
    }
    image
}

fn made(oracle: &Oracle, line: &str) -> Vec<u8> {
    oracle.make(&format!("create -q {line}"));
    let name = line.split(' ').find(|word| word.starts_with("good")).unwrap();
    fs::read(oracle.work().join(name)).unwrap()
}

/// A growing image of Bochs with one extent of 64 KiB.
fn bochs() -> Vec<u8> {
    let mut file = vec![0; 512];
    file[..22].copy_from_slice(b"Bochs Virtual HD Image");
    file[32..39].copy_from_slice(b"Redolog");
    file[48..55].copy_from_slice(b"Growing");
    for (at, word) in [(64, 0x2_0000u32), (68, 512), (72, 1), (76, 512), (80, 65536), (88, 65536)] {
        file[at..at + 4].copy_from_slice(&word.to_le_bytes());
    }
    file.extend([0; 512]);
    file.resize(1024 + 512 + 65536, 1);
    file
}

/// A cloop image of one block, whose data are nowhere.
fn cloop() -> Vec<u8> {
    let mut file = b"#!/bin/sh\n#V2.0 Format\nmodprobe cloop file=$0 && mount -r -t iso9660 /dev/cloop $1\n".to_vec();
    file.resize(128, 0);
    file.extend(65536u32.to_be_bytes());
    file.extend(1u32.to_be_bytes());
    file.extend(152u64.to_be_bytes());
    file.extend(200u64.to_be_bytes());
    file.resize(512, 0);
    file
}

/// CVE-2014-0142: a division by zero, by tracks of 0 in Parallels and extents of 0 bytes in Bochs.
#[test]
fn zero_as_a_length_of_blocks_is_refused() {
    let oracle = Oracle::new();
    let parallels = made(&oracle, "-f parallels good 10M");
    refused(&oracle, "parallels", &changed(&parallels, &[(28, &[0; 4])]), "tracks");
    refused(&oracle, "bochs", &changed(&bochs(), &[(80, &[0; 4])]), "extent");
}

/// CVE-2014-0143: catalogs and counts of blocks that overflow what is allocated for them.
#[test]
fn table_longer_than_memory_is_refused() {
    let oracle = Oracle::new();
    let parallels = made(&oracle, "-f parallels good 10M");
    for entries in [0x2000_0000u32, 0x4000_0000, 0x4000_0001, u32::MAX] {
        let word = entries.to_le_bytes();
        refused(&oracle, "parallels", &changed(&parallels, &[(32, &word)]), "block allocation table");
        refused(&oracle, "bochs", &changed(&bochs(), &[(72, &word)]), "catalog");
        refused(&oracle, "cloop", &changed(&cloop(), &[(132, &entries.to_be_bytes())]), "not in the file");
    }
}

/// CVE-2014-0144: sizes of blocks, offsets and tables that nothing checks, in cloop, VHD and VDI.
#[test]
fn length_of_no_sense_is_refused() {
    let oracle = Oracle::new();
    for block in [0u32, 513, 1 << 30, 0xffff_fe00] {
        refused(&oracle, "cloop", &changed(&cloop(), &[(128, &block.to_be_bytes())]), "block_size");
    }
    let file = cloop();
    for next in [0u64, 1 << 40, u64::MAX] {
        let image = changed(&file, &[(144, &next.to_be_bytes())]);
        fs::write(oracle.work().join("bad"), image).unwrap();
        let message = oracle.refused("convert -f cloop -O raw bad out");
        assert!(message.contains("impossible length"), "{message}");
    }
    // Entries of the table of a VHD: more than it may have, and blocks without a length.
    let vhd = made(&oracle, "-f vpc good.vhd 10M");
    let with_sum = |at: usize, word: u32| {
        let mut image = changed(&vhd[..vhd.len() - 512], &[(at, &word.to_be_bytes())]);
        let sum = vpc::checksum(&image[512..1536], 36);
        image[512 + 36..512 + 40].copy_from_slice(&sum.to_be_bytes());
        image
    };
    for word in [0, 1, 513] {
        refused(&oracle, "vpc", &with_sum(512 + 32, word), "block_size");
    }
    refused(&oracle, "vpc", &with_sum(512 + 28, 0), "max_table_entries");
    // As many entries as there can be: those of the disk are read.
    fs::write(oracle.work().join("long.vhd"), with_sum(512 + 28, u32::MAX)).unwrap();
    let line = format!(
        "ulimit -v {MEMORY_KIB}; exec {} convert --force -f vpc -O raw long.vhd out",
        env!("CARGO_BIN_EXE_cowshed")
    );
    let output = Command::new("sh").args(["-c", &line]).current_dir(oracle.work()).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    fs::remove_file(oracle.work().join("out")).unwrap();
    // A disk of VDI that has more blocks than a table in memory, and fewer than its size.
    let vdi = made(&oracle, "-f vdi good.vdi 10M");
    for (size, blocks, part) in [
        (u64::MAX, 10, "disk_size"),
        ((1 << 52) - (1 << 20), u32::MAX, "offset_data"),
        (0x3fff_ffff << 20, 0x3fff_ffff, "offset_data"),
        (11 << 20, 10, "blocks_in_image"),
    ] {
        let (size, blocks) = (size.to_le_bytes(), blocks.to_le_bytes());
        refused(&oracle, "vdi", &changed(&vdi, &[(368, &size), (384, &blocks)]), part);
    }
}

/// CVE-2014-0147: numbers whose highest bit is set, which QEMU read with a sign, in Bochs.
#[test]
fn number_with_its_highest_bit_is_no_negative_one() {
    let oracle = Oracle::new();
    for (at, part) in [(68, "header"), (72, "catalog"), (76, "bitmap"), (80, "extent")] {
        for word in [0x8000_0000u32, 0xffff_ff00] {
            refused(&oracle, "bochs", &changed(&bochs(), &[(at, &word.to_le_bytes())]), part);
        }
    }
    for entry in [0x8000_0000u32, 0xffff_fffe] {
        fs::write(oracle.work().join("bad"), changed(&bochs(), &[(512, &entry.to_le_bytes())])).unwrap();
        let message = oracle.refused("convert -f bochs -O raw bad out");
        assert!(message.contains("not in the file"), "{message}");
    }
}

/// CVE-2014-0148: lengths of blocks and of sectors in VHDX over which QEMU looped without an end.
#[test]
fn vhdx_blocks_and_sectors_have_a_length() {
    let oracle = Oracle::new();
    let good = made(&oracle, "-f vhdx -o block_size=1M good 10M");
    let word = |at: usize| u64::from_le_bytes(good[at..at + 8].try_into().unwrap()) as usize;
    let region = [0x30010, 0x30030].into_iter().find(|at| good[*at] == 0x06).unwrap();
    let metadata = word(region + 16);
    let item = |first: u8| {
        let entry = (1..8).map(|index| metadata + 32 * index).find(|at| good[*at] == first).unwrap();
        metadata + u32::from_le_bytes(good[entry + 16..entry + 20].try_into().unwrap()) as usize
    };
    for (at, words, part) in [
        (item(0x37), &[0u32, 1, 512, 0x8000_0000, u32::MAX][..], "BlockSize"),
        (item(0x1d), &[0, 1, 256, 0x8000_0000, u32::MAX], "LogicalSectorSize"),
    ] {
        for word in words {
            refused(&oracle, "vhdx", &changed(&good, &[(at, &word.to_le_bytes())]), part);
        }
    }
    // A size beyond what blocks of the file's table have.
    for size in [u64::MAX, 1 << 63, 64 << 40 | 512] {
        refused(&oracle, "vhdx", &changed(&good, &[(item(0x24), &size.to_le_bytes())]), "VirtualDiskSize");
    }
}

/// CVE-2014-0222: a table of qcow (version 1) whose length in bits nothing checks.
#[test]
fn qcow_tables_have_a_length() {
    let oracle = Oracle::new();
    let good = made(&oracle, "-f qcow good 10M");
    for bits in [0u8, 5, 14, 20, 61, 64, 255] {
        refused(&oracle, "qcow", &changed(&good, &[(33, &[bits])]), "l2_bits");
    }
    for bits in [0u8, 8, 17, 31, 64, 255] {
        refused(&oracle, "qcow", &changed(&good, &[(32, &[bits])]), "cluster_bits");
    }
}

/// CVE-2014-0223: the size of a qcow disk (version 1), from which the length of its table follows.
#[test]
fn qcow_disk_of_no_possible_size_is_refused() {
    let oracle = Oracle::new();
    let good = made(&oracle, "-f qcow good 10M");
    for size in [u64::MAX, 1 << 63, i64::MAX as u64, 1 << 56, 1 << 50] {
        refused(&oracle, "qcow", &changed(&good, &[(24, &size.to_be_bytes())]), "size");
    }
}
