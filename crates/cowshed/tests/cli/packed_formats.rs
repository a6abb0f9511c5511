// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Formats that are only read: Apple's disk images, Bochs, cloop.

use crate::oracle::{Oracle, words};
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let part = |chunk: &[u8]| {
        let word = chunk.iter().fold(0u32, |word, &byte| word << 8 | u32::from(byte)) << (8 * (3 - chunk.len()));
        let digit = |index: usize| char::from(DIGITS[(word >> (18 - 6 * index) & 63) as usize]);
        (0..4).map(|index| if index <= chunk.len() { digit(index) } else { '=' }).collect::<String>()
    };
    bytes.chunks(3).map(part).collect()
}

/// The input packed by a program.
fn packed(program: &str, arguments: &[&str], bytes: &[u8]) -> Vec<u8> {
    let mut child =
        Command::new(program).args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it runs");
    let (mut stdin, bytes) = (child.stdin.take().unwrap(), bytes.to_vec());
    let writer = std::thread::spawn(move || stdin.write_all(&bytes).unwrap());
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    assert!(output.status.success());
    output.stdout
}

fn zlib(bytes: &[u8]) -> Vec<u8> {
    packed(
        "python3",
        &["-c", "import sys, zlib; sys.stdout.buffer.write(zlib.compress(sys.stdin.buffer.read()))"],
        bytes,
    )
}

fn bzip2(bytes: &[u8]) -> Vec<u8> {
    packed("python3", &["-c", "import bz2, sys; sys.stdout.buffer.write(bz2.compress(sys.stdin.buffer.read()))"], bytes)
}

fn xz(bytes: &[u8]) -> Vec<u8> {
    packed(
        "python3",
        &["-c", "import lzma, sys; sys.stdout.buffer.write(lzma.compress(sys.stdin.buffer.read()))"],
        bytes,
    )
}

fn lzfse(bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    lzfse_rust::encode_bytes(bytes, &mut out).unwrap();
    out
}

/// Literals alone, but for one copy of earlier bytes.
fn adc(bytes: &[u8]) -> Vec<u8> {
    let mut out: Vec<u8> = Vec::new();
    for chunk in bytes.chunks(128) {
        out.push(0x7f + chunk.len() as u8);
        out.extend(chunk);
    }
    out
}

fn content(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|index| (index / 7) as u8 ^ (index / 501) as u8 ^ seed).collect()
}

/// A piece: its kind, its bytes on the disk, and those in the file.
type Piece = (u32, Vec<u8>, Vec<u8>);

/// A disk image with these pieces in two tables, and the disk.
fn dmg(pieces: &[Piece]) -> (Vec<u8>, Vec<u8>) {
    let (mut file, mut disk, mut tables) = (Vec::new(), Vec::new(), String::new());
    for part in pieces.chunks(pieces.len().div_ceil(2)) {
        let first = disk.len() / 512;
        let mut table = b"mish\0\0\0\x01".to_vec();
        let sectors: usize = part.iter().map(|(_, bytes, _)| bytes.len() / 512).sum();
        for word in [first as u64, sectors as u64, 0] {
            table.extend(word.to_be_bytes());
        }
        table.resize(200, 0);
        table.extend((part.len() as u32 + 2).to_be_bytes());
        let mut entry = |kind: u32, numbers: [usize; 4]| {
            table.extend(kind.to_be_bytes());
            table.extend([0; 4]);
            numbers.iter().for_each(|number| table.extend((*number as u64).to_be_bytes()));
        };
        entry(0x7fff_fffe, [0; 4]);
        for (kind, bytes, stored) in part {
            entry(*kind, [disk.len() / 512 - first, bytes.len() / 512, file.len(), stored.len()]);
            file.extend(stored);
            disk.extend(bytes);
        }
        entry(0xffff_ffff, [sectors, 0, 0, 0]);
        tables += &format!("<dict><key>Data</key>\n<data>\n{}\n</data></dict>", base64(&table));
    }
    let list = format!(
        "<?xml version=\"1.0\"?><plist version=\"1.0\"><dict><key>resource-fork</key><dict><key>blkx</key>\n<array>{tables}\
         </array></dict></dict></plist>"
    );
    let data_len = file.len() as u64;
    let list_at = file.len() as u64;
    file.extend(list.bytes());
    let mut trailer = vec![0; 512];
    trailer[..12].copy_from_slice(b"koly\0\0\0\x04\0\0\x02\0");
    trailer[32..40].copy_from_slice(&data_len.to_be_bytes());
    trailer[216..224].copy_from_slice(&list_at.to_be_bytes());
    trailer[224..232].copy_from_slice(&(list.len() as u64).to_be_bytes());
    trailer[492..500].copy_from_slice(&(disk.len() as u64 / 512).to_be_bytes());
    file.extend(trailer);
    (file, disk)
}

fn pieces() -> Vec<Piece> {
    let (a, b, c, d) = (content(1, 65536), content(2, 1024), content(3, 200 * 512), content(4, 3 * 512));
    vec![
        (1, a.clone(), a.clone()),
        (0, vec![0; 8192], Vec::new()),
        (0x8000_0005, b.clone(), zlib(&b)),
        (2, vec![0; 512], Vec::new()),
        (0x8000_0006, c.clone(), bzip2(&c)),
        (0x8000_0004, d.clone(), adc(&d)),
        (0x8000_0005, a.clone(), zlib(&a)),
        (0x8000_0007, c.clone(), lzfse(&c)),
        (0x8000_0007, d.clone(), lzfse(&d)),
        (0x8000_0008, c.clone(), xz(&c)),
    ]
}

#[track_caller]
fn reads_as(oracle: &Oracle, name: &str, format: &str, disk: &[u8]) {
    let work = oracle.work();
    for line in [format!("convert -f {format} -O raw {name} out.raw"), format!("convert -O raw {name} out.raw")] {
        let said = oracle.ours(&work, &words(&line));
        assert_eq!(said.code, Some(0), "{line}: {said:?}");
        assert!(fs::read(work.join("out.raw")).unwrap() == disk, "{line}: another disk");
    }
    // In small pieces too.
    let said = oracle.ours(&work, &words(&format!("dd -f {format} -O raw bs=1536 if={name} of=out.raw")));
    assert_eq!(said.code, Some(0), "{said:?}");
    assert!(fs::read(work.join("out.raw")).unwrap() == disk, "dd: another disk");
}

/// An image of Apple's own program, as QEMU reads it.
#[test]
fn apples_own_image_is_read_as_qemu_reads_it() {
    let oracle = Oracle::new();
    let sample = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testkit/images/apple-hfsplus_zlib.dmg");
    fs::copy(sample, oracle.work().join("a.dmg")).unwrap();
    oracle.make("convert -f dmg -O raw a.dmg truth");
    let truth = fs::read(oracle.work().join("truth")).unwrap();
    reads_as(&oracle, "a.dmg", "dmg", &truth);
    for line in [
        "info -f dmg a.dmg",
        "info --output=json -f dmg a.dmg",
        "convert -f dmg -O dmg a.dmg b",
        "create -f dmg b 1M",
        "check -f dmg a.dmg",
        "rebase -u -f dmg -b x a.dmg",
    ] {
        // The system's QEMU complains besides of modules that it lacks.
        let (work, words) = (oracle.work(), words(line));
        assert_eq!(oracle.ours(&work, &words), oracle.real(&work, &words), "{line}");
    }
}

#[test]
fn each_packing_of_a_dmg_is_unpacked() {
    let oracle = Oracle::new();
    let (file, disk) = dmg(&pieces());
    fs::write(oracle.work().join("a.dmg"), file).unwrap();
    reads_as(&oracle, "a.dmg", "dmg", &disk);
    // 7-Zip takes each table for a file.
    let theirs = Command::new("7z").args(["e", "-so", "a.dmg"]).current_dir(oracle.work()).output().expect("7z runs");
    assert!(theirs.status.success() && theirs.stdout == disk, "{}", String::from_utf8_lossy(&theirs.stderr));
    // The pieces that QEMU reads.
    let theirs = |kind| matches!(kind, 0 | 1 | 2 | 0x8000_0005);
    let (file, disk) = dmg(&pieces().into_iter().filter(|(kind, ..)| theirs(*kind)).collect::<Vec<_>>());
    fs::write(oracle.work().join("b.dmg"), file).unwrap();
    reads_as(&oracle, "b.dmg", "dmg", &disk);
    oracle.make("convert -f dmg -O raw b.dmg theirs");
    assert!(fs::read(oracle.work().join("theirs")).unwrap() == disk);
}

/// Among them a piece far longer than its space in memory would be: CVE-2014-0145.
#[test]
fn damaged_and_hostile_images_of_apple_are_refused() {
    let oracle = Oracle::new();
    let (good, disk) = dmg(&pieces());
    let work = oracle.work();
    let refused = |file: &[u8], word: &str| {
        fs::write(work.join("a.dmg"), file).unwrap();
        let message = oracle.refused("convert -f dmg -O raw a.dmg out.raw");
        assert!(message.contains(word), "no '{word}' in {message}");
        assert!(!work.join("out.raw").exists());
    };
    let changed = |at: usize, bytes: &[u8]| {
        let mut file = good.clone();
        let at = file.len() - 512 + at;
        file[at..at + bytes.len()].copy_from_slice(bytes);
        file
    };
    refused(&good[..good.len() - 512], "Could not locate UDIF trailer in dmg file");
    refused(&changed(216, &u64::MAX.to_be_bytes()), "not in the file");
    refused(&changed(224, &(1u64 << 40).to_be_bytes()), "too long");
    refused(&changed(224, &0u64.to_be_bytes()), "resource fork");
    refused(&changed(492, &u64::MAX.to_be_bytes()), "too large");
    refused(&changed(492, &1u64.to_be_bytes()), "behind the end of the disk");
    refused(&changed(60, &2u32.to_be_bytes()), "several segments");
    // Bytes of a packed piece, and a longer piece than its data.
    let mut file = good.clone();
    file[65536 + 20] ^= 0xff;
    refused(&file, "a.dmg");
    for (kind, word) in [(0x8000_0007, "lzfse"), (0x8000_0008, "xz"), (0x1234, "isn't known")] {
        let (file, _) = dmg(&[(kind, disk[..512].to_vec(), vec![1; 20]), (0, vec![0; 512], Vec::new())]);
        refused(&file, word);
    }
    for (piece, sectors) in [(1, 1u64 << 40), (3, u64::MAX), (5, 0x8000_0000)] {
        let long = with_tables(&good, |_, table| {
            table[entry_at(piece, 16)..entry_at(piece, 24)].copy_from_slice(&sectors.to_be_bytes());
        });
        refused(&long, "a.dmg");
    }
    let (file, _) = dmg(&[(1, disk[..1024].to_vec(), vec![1; 20]), (0, vec![0; 512], Vec::new())]);
    refused(&file, "too few bytes");
    for kind in 0x8000_0004..=0x8000_0008 {
        let (file, _) = dmg(&[(kind, disk[..1024].to_vec(), vec![0x55; 20]), (0, vec![0; 512], Vec::new())]);
        refused(&file, "a.dmg");
    }
}

/// Zeroes are a piece too: where no table has one, QEMU fails, and so does this.
#[test]
fn untabled_part_of_a_dmg_is_no_zeroes() {
    let oracle = Oracle::new();
    let (good, disk) = dmg(&[(1, content(1, 1024), content(1, 1024)), (1, content(2, 512), content(2, 512))]);
    let mut longer = good.clone();
    let at = longer.len() - 512 + 492;
    longer[at..at + 8].copy_from_slice(&(disk.len() as u64 / 512 + 8).to_be_bytes());
    fs::write(oracle.work().join("a.dmg"), &longer).unwrap();
    let work = oracle.work();
    let line = words("convert -f dmg -O raw a.dmg out.raw");
    assert_eq!(oracle.real(&work, &line).code, Some(1));
    let message = oracle.refused("convert -f dmg -O raw a.dmg out.raw");
    assert!(message.contains("no table of the image has this part"), "{message}");
}

/// A piece's unpacked length bounds the bytes that are read for it.
#[test]
fn a_packed_piece_far_longer_than_its_content_is_refused() {
    let oracle = Oracle::new();
    let bytes = content(1, 512);
    let mut stored = zlib(&bytes);
    stored.resize(1 << 20, 0);
    let (file, _) = dmg(&[(0x8000_0005, bytes, stored), (0, vec![0; 512], Vec::new())]);
    fs::write(oracle.work().join("a.dmg"), file).unwrap();
    let message = oracle.refused("convert -f dmg -O raw a.dmg out.raw");
    assert!(message.contains("a packed piece is too long"), "{message}");
}

/// Blocks of many MiB are unpacked one after the other, and read right by many requests.
#[test]
fn large_packed_pieces_are_read_right() {
    let oracle = Oracle::new();
    let large = content(5, 5 << 20);
    let pieces: Vec<Piece> = [(0x8000_0005, zlib(&large)), (0x8000_0007, lzfse(&large)), (0x8000_0008, xz(&large))]
        .map(|(kind, stored)| (kind, large.clone(), stored))
        .into();
    let (file, disk) = dmg(&pieces);
    fs::write(oracle.work().join("a.dmg"), file).unwrap();
    reads_as(&oracle, "a.dmg", "dmg", &disk);
}

/// The tables of an image, changed by `change`: its file, with the data and the list where they were.
fn with_tables(file: &[u8], change: impl Fn(usize, &mut Vec<u8>)) -> Vec<u8> {
    let word = |at: usize| u64::from_be_bytes(file[file.len() - 512 + at..][..8].try_into().unwrap()) as usize;
    let (at, len) = (word(216), word(224));
    let list = std::str::from_utf8(&file[at..at + len]).unwrap();
    let mut changed = String::new();
    for (index, part) in list.split("<data>").enumerate() {
        let Some((text, rest)) = part.split_once("</data>").filter(|_| index != 0) else {
            changed += part;
            continue;
        };
        let mut table = packed("base64", &["-d", "-i"], text.as_bytes());
        change(index - 1, &mut table);
        changed += &format!("<data>{}</data>{rest}", base64(&table));
    }
    let mut trailer = file[file.len() - 512..].to_vec();
    trailer[224..232].copy_from_slice(&(changed.len() as u64).to_be_bytes());
    [&file[..at], changed.as_bytes(), &trailer].concat()
}

/// Bytes of a table before the field `field` of its entry `index`.
fn entry_at(index: usize, field: usize) -> usize {
    204 + 40 * index + field
}

/// Bytes that no piece has aren't zeroes: QEMU fails there, too.
#[test]
fn a_gap_between_the_pieces_of_a_dmg_is_an_error() {
    let oracle = Oracle::new();
    let work = oracle.work();
    let (good, disk) = dmg(&pieces());
    type Change = fn(usize, &mut Vec<u8>);
    let damages: [(&str, Change); 5] = [
        ("the count of a table", |index, table| {
            if index == 1 {
                table[200..204].copy_from_slice(&0u32.to_be_bytes());
            }
        }),
        ("a piece that is a comment", |index, table| {
            if index == 0 {
                table[entry_at(2, 0)..][..4].copy_from_slice(&0x7fff_fffeu32.to_be_bytes());
            }
        }),
        ("a shorter piece", |index, table| {
            if index == 1 {
                table[entry_at(2, 16)..][..8].copy_from_slice(&1u64.to_be_bytes());
            }
        }),
        ("more sectors than pieces", |index, table| {
            if index == 1 {
                table[16..24].copy_from_slice(&4000u64.to_be_bytes());
            }
        }),
        ("sectors out of range", |index, table| {
            if index == 0 {
                table[16..24].copy_from_slice(&u64::MAX.to_be_bytes());
            }
        }),
    ];
    for (name, change) in damages {
        fs::write(work.join("a.dmg"), with_tables(&good, change)).unwrap();
        let message = oracle.refused("convert -f dmg -O raw a.dmg out.raw");
        assert!(message.contains("leave out a part of its sectors"), "{name}: {message}");
    }
    // A part of the disk that is in no table: at its end, and in the middle.
    let mut longer = good.clone();
    let at = longer.len() - 512 + 492;
    longer[at..at + 8].copy_from_slice(&(disk.len() as u64 / 512 + 3).to_be_bytes());
    let apart = with_tables(&longer, |index, table| {
        if index == 1 {
            let first = u64::from_be_bytes(table[8..16].try_into().unwrap());
            table[8..16].copy_from_slice(&(first + 3).to_be_bytes());
        }
    });
    let middle: usize = pieces()[..pieces().len().div_ceil(2)].iter().map(|(_, bytes, _)| bytes.len()).sum();
    for (file, gap) in [(longer, disk.len()), (apart, middle)] {
        fs::write(work.join("a.dmg"), file).unwrap();
        let message = oracle.refused("convert -f dmg -O raw a.dmg out.raw");
        assert!(message.contains("no table of the image has this part"), "{message}");
        // The sectors around it are there.
        for (at, len) in [(gap - 512, 512), (gap, 512), (gap - 512, 1024)] {
            let line = format!("dd -f dmg -O raw bs=512 skip={} count={} if=a.dmg of=part", at / 512, len / 512);
            let said = oracle.ours(&work, &words(&line));
            assert_eq!(said.code, Some(i32::from(at + len > gap)), "{line}: {said:?}");
        }
    }
}

/// QEMU reads the pieces behind the end's mark.
#[test]
fn a_piece_behind_the_mark_of_the_end_is_read() {
    let oracle = Oracle::new();
    let (good, disk) = dmg(&pieces());
    let file = with_tables(&good, |_, table| {
        // The comment in front becomes an end.
        table[entry_at(0, 0)..][..4].copy_from_slice(&0xffff_ffffu32.to_be_bytes());
    });
    fs::write(oracle.work().join("a.dmg"), file).unwrap();
    reads_as(&oracle, "a.dmg", "dmg", &disk);
}

/// Many requests of long blocks at a time, in less memory than their blocks have.
#[test]
fn long_blocks_are_unpacked_one_after_the_other() {
    let oracle = Oracle::new();
    let (block, count) = (64usize << 20, 16usize);
    let stored = zlib(&vec![0; block]);
    let mut file = b"#!/bin/sh\n#V2.0 Format\nmodprobe cloop file=$0 && mount -r -t iso9660 /dev/cloop $1\n".to_vec();
    file.resize(128, 0);
    file.extend((block as u32).to_be_bytes());
    file.extend((count as u32).to_be_bytes());
    for index in 0..=count {
        file.extend(((at_of_data(count) + index * stored.len()) as u64).to_be_bytes());
    }
    file.extend(stored.repeat(count));
    fs::write(oracle.work().join("long.img"), &file).unwrap();
    let limited = format!(
        "ulimit -v 786432; exec {} bench -f cloop -c {count} -d {count} -s 512 -S {block} long.img",
        env!("CARGO_BIN_EXE_cowshed")
    );
    let output = Command::new("sh").args(["-c", &limited]).current_dir(oracle.work()).output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

/// A growing image of Bochs: catalog, and extents with a bitmap of their sectors.
fn bochs(version: u32) -> (Vec<u8>, Vec<u8>) {
    let (extent, entries, size) = (8192usize, 10usize, 75 * 1024usize);
    let mut file = vec![0; 512];
    file[..22].copy_from_slice(b"Bochs Virtual HD Image");
    file[32..39].copy_from_slice(b"Redolog");
    file[48..55].copy_from_slice(b"Growing");
    for (at, word) in [(64, version), (68, 512), (72, entries as u32), (76, 2), (80, extent as u32)] {
        file[at..at + 4].copy_from_slice(&word.to_le_bytes());
    }
    let at = if version == 0x1_0000 { 84 } else { 88 };
    file[at..at + 8].copy_from_slice(&(size as u64).to_le_bytes());
    let catalog = [2u32, u32::MAX, 0, u32::MAX, u32::MAX, u32::MAX, u32::MAX, 1, u32::MAX, 3];
    catalog.iter().for_each(|entry| file.extend(entry.to_le_bytes()));
    let mut disk = vec![0; entries * extent];
    for number in 0..4u32 {
        let index = catalog.iter().position(|entry| *entry == number).unwrap();
        let bits = [0xffffu16, 0x0001, 0x8ff0, 0x5555][number as usize];
        let mut bitmap = bits.to_le_bytes().to_vec();
        bitmap.resize(512, 0);
        file.extend(bitmap);
        for sector in 0..16 {
            let bytes = content(number as u8 * 16 + sector as u8, 512);
            file.extend(&bytes);
            if bits >> sector & 1 == 1 {
                disk[index * extent + sector * 512..][..512].copy_from_slice(&bytes);
            }
        }
    }
    disk.truncate(size);
    (file, disk)
}

#[test]
fn images_of_bochs_are_read_as_qemu_reads_them() {
    let oracle = Oracle::new();
    for version in [0x1_0000, 0x2_0000] {
        let (file, disk) = bochs(version);
        fs::write(oracle.work().join("b.img"), &file).unwrap();
        oracle.make("convert -f bochs -O raw b.img theirs");
        assert!(fs::read(oracle.work().join("theirs")).unwrap() == disk, "QEMU reads another disk");
        reads_as(&oracle, "b.img", "bochs", &disk);
        for (at, word, text) in [
            (64, 0x3_0000u32, "Image not in Bochs format"),
            (72, 1, "Catalog size is too small for this disk size"),
            (72, u32::MAX, "Catalog size is too large"),
            (76, 1, "bitmap"),
            (80, 0, "Extent size must be at least 512"),
            (80, 3000, "Extent size 3000 is not a power of two"),
            (512, 77, "not in the file"),
        ] {
            let mut bad = file.clone();
            bad[at..at + 4].copy_from_slice(&word.to_le_bytes());
            fs::write(oracle.work().join("bad.img"), &bad).unwrap();
            let message = oracle.refused("convert -f bochs -O raw bad.img out.none");
            assert!(message.contains(text), "no '{text}' in {message}");
        }
    }
}

#[test]
fn cloop_images_are_read_as_qemu_reads_them() {
    let oracle = Oracle::new();
    let (block, count) = (65536usize, 5usize);
    let disk: Vec<u8> =
        (0..count).flat_map(|index| if index == 2 { vec![0; block] } else { content(index as u8, block) }).collect();
    let mut file = b"#!/bin/sh\n#V2.0 Format\nmodprobe cloop file=$0 && mount -r -t iso9660 /dev/cloop $1\n".to_vec();
    file.resize(128, 0);
    file.extend((block as u32).to_be_bytes());
    file.extend((count as u32).to_be_bytes());
    let blocks: Vec<Vec<u8>> = disk.chunks(block).map(zlib).collect();
    let mut at = file.len() + 8 * (count + 1);
    for block in &blocks {
        file.extend((at as u64).to_be_bytes());
        at += block.len();
    }
    file.extend((at as u64).to_be_bytes());
    file.extend(blocks.concat());
    fs::write(oracle.work().join("c.img"), &file).unwrap();
    oracle.make("convert -f cloop -O raw c.img theirs");
    assert!(fs::read(oracle.work().join("theirs")).unwrap() == disk);
    reads_as(&oracle, "c.img", "cloop", &disk);
    for (at, bytes, text) in [
        (128, &[0u8, 0, 0, 0][..], "block_size cannot be zero"),
        (128, &[0xff; 4], "whole sectors"),
        (132, &[0xff; 4], "not in the file"),
        (136, &[0xff; 8], "impossible length"),
        (144, &[0x7f; 8], "impossible length"),
        (at_of_data(count) + 30, &[0x55; 8], "c.img"),
    ] {
        let mut bad = file.clone();
        bad[at..at + bytes.len()].copy_from_slice(bytes);
        fs::write(oracle.work().join("bad-c.img"), &bad).unwrap();
        let message = oracle.refused("convert -f cloop -O raw bad-c.img out.none");
        assert!(message.contains(text), "no '{text}' in {message}");
    }
}

fn at_of_data(count: usize) -> usize {
    136 + 8 * (count + 1)
}
