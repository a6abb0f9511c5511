// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Damaged and hostile images of the formats that `block_formats.rs` reads: one clear error that names file, field and
//! value.

use crate::oracle::{Oracle, words};
use crate::written_edges::{io, run_io};
use cowshed_layout::{vhdx, vpc};
use std::fs;

/// A change of bytes, and a part of the message.
type Case<'a> = (usize, &'a [u8], &'a str);

/// Each change alone must be refused by `info` and by `convert`. `finish` puts checksums right.
#[track_caller]
fn refuse_each(oracle: &Oracle, format: &str, good: &[u8], cases: &[Case<'_>], finish: impl Fn(&mut Vec<u8>)) {
    for (at, bytes, part) in cases {
        let mut image = good.to_vec();
        image[*at..at + bytes.len()].copy_from_slice(bytes);
        finish(&mut image);
        fs::write(oracle.work().join("bad"), image).unwrap();
        for line in [format!("info -f {format} bad"), format!("convert -f {format} -O raw bad out")] {
            let message = oracle.refused(&line);
            assert!(message.contains(part) && message.contains("bad"), "{line}, {at}: {message}");
            assert!(message.contains(" is "), "{line}, {at} names no value: {message}");
        }
    }
}

/// A file that is not of the format is refused in QEMU's words.
#[track_caller]
fn refuse_foreign(oracle: &Oracle, format: &str, good: &[u8], (at, bytes, sentence): Case<'_>) {
    let mut image = good.to_vec();
    image[at..at + bytes.len()].copy_from_slice(bytes);
    fs::write(oracle.work().join("bad"), image).unwrap();
    let line = format!("info -f {format} bad");
    let real = oracle.real(&oracle.work(), &words(&line));
    assert!(real.code == Some(1) && real.err.contains(sentence), "{line}: {}", real.err);
    let message = oracle.refused(&line);
    assert!(message.contains(sentence) && message.contains("bad"), "{line}: {message}");
}

/// A change of an entry of a table: opening works, reading doesn't, and `check`, where there is one, finds it.
#[track_caller]
fn refuse_reading(oracle: &Oracle, format: &str, good: &[u8], (at, bytes, part): Case<'_>) {
    let mut image = good.to_vec();
    image[at..at + bytes.len()].copy_from_slice(bytes);
    fs::write(oracle.work().join("bad"), image).unwrap();
    assert_eq!(oracle.ours(&oracle.work(), &words(&format!("info -f {format} bad"))).code, Some(0));
    let message = oracle.refused(&format!("convert -f {format} -O raw bad out"));
    assert!(message.contains(part) && message.contains("bad"), "{format}, {at}: {message}");
    let said = oracle.ours(&oracle.work(), &words(&format!("check -f {format} bad")));
    let wanted = if matches!(format, "vpc" | "qcow") { 63 } else { 2 };
    assert!(said.code == Some(wanted) && (wanted == 63 || said.err.contains(part)), "{format}: {}", said.err);
}

/// A disk of 10 MiB with some data at 0 and at 3 MiB, as the real tools make it.
fn image(oracle: &Oracle, format: &str, options: &str) -> Vec<u8> {
    oracle.make(&format!("create -q -f {format} {options} good 10M"));
    let mut command = std::process::Command::new(oracle.qemu.io_path());
    command.current_dir(oracle.work()).args([
        "-f",
        format,
        "-c",
        "write -P 1 0 64k",
        "-c",
        "write -P 2 3M 64k",
        "good",
    ]);
    assert!(command.output().unwrap().status.success());
    fs::read(oracle.work().join("good")).unwrap()
}

#[test]
fn vdi() {
    let oracle = Oracle::new();
    let good = image(&oracle, "vdi", "");
    let cases: &[Case<'_>] = &[
        (68, &[2], "version"),
        (72, &[0, 0], "header_size"),
        (76, &[4], "uuid_link"),
        (76, &[9], "image_type"),
        (340, &[1], "offset_bmap"),
        (340, &[0, 0, 0, 0xff], "offset_"),
        (344, &[0, 2], "offset_data"),
        (360, &[0, 16], "sector_size"),
        (368, &[0xff; 8], "disk_size"),
        (368, &[0, 0, 0, 0, 1], "blocks_in_image"),
        (376, &[0; 4], "block_size"),
        (376, &[1], "block_size"),
        (380, &[1], "block_extra"),
        (384, &[9], "blocks_in_image"),
    ];
    refuse_each(&oracle, "vdi", &good, cases, |_| ());
    refuse_foreign(&oracle, "vdi", &good, (64, &[0], "Image not in VDI format (bad signature beda1000)"));
    refuse_reading(&oracle, "vdi", &good, (512, &[9], "points after EOF"));
    // Two blocks of the disk in one of the file, and a count that is wrong, are corruptions to qemu-img too.
    for (at, bytes) in [(512, &[1u8][..]), (388, &[5])] {
        let mut image = good.clone();
        image[at..at + bytes.len()].copy_from_slice(bytes);
        fs::write(oracle.work().join("bad"), image).unwrap();
        let real = oracle.real(&oracle.work(), &words("check -f vdi bad"));
        let said = oracle.ours(&oracle.work(), &words("check -f vdi bad"));
        assert_eq!((real.code, said.code), (Some(2), Some(2)), "{}", said.err);
    }
    // A map that the file has no room for.
    fs::write(oracle.work().join("bad"), &good[..512]).unwrap();
    assert!(oracle.refused("info -f vdi bad").contains("offset_bmap"));
}

/// Puts the right checksum into the structure at `at`, whose field for it is at `field`.
fn sum_vpc(image: &mut [u8], at: usize, len: usize, field: usize) {
    let sum = vpc::checksum(&image[at..at + len], field);
    image[at + field..at + field + 4].copy_from_slice(&sum.to_be_bytes());
}

#[test]
fn vpc_footers_and_headers() {
    let oracle = Oracle::new();
    let mut good = image(&oracle, "vpc", "");
    // Without the end, the copy at the start counts.
    good.truncate(good.len() - 512);
    let cases: &[Case<'_>] = &[
        (12, &[0, 2], "file_format_version"),
        (60, &[0, 0, 0, 9], "disk_type"),
        (16, &[0; 8], "data_offset"),
        (16, &[0xff; 8], "data_offset"),
        (16, &[0, 0, 0, 0, 0, 0, 3, 0], "dynamic cookie"),
        (56, &[0xff, 0xff, 0xff, 0xff], "max_table_entries"),
        (512, b"x", "dynamic cookie"),
        (512 + 16, &[0; 8], "table_offset"),
        (512 + 16, &[0xff; 8], "table_offset"),
        (512 + 16, &[0, 0, 0, 0, 0, 0, 3, 0], "table_offset"),
        (512 + 16, &[0, 0, 0, 0, 0x7f, 0, 0, 0], "points after EOF"),
        (512 + 24, &[0, 3], "header_version"),
        (512 + 28, &[0, 0, 0, 4], "max_table_entries"),
        (512 + 32, &[0; 4], "block_size"),
        (512 + 35, &[1], "block_size"),
    ];
    refuse_each(&oracle, "vpc", &good, cases, |image| {
        sum_vpc(image, 0, 512, 64);
        sum_vpc(image, 512, 1024, 36);
    });
    refuse_each(&oracle, "vpc", &good, &[(64, &[1], "footer"), (200, &[1], "footer")], |_| ());
    refuse_each(&oracle, "vpc", &good, &[(512 + 900, &[1], "dynamic header checksum")], |_| ());
    refuse_reading(&oracle, "vpc", &good, (1536, &[0x7f], "points after EOF"));
    refuse_reading(&oracle, "vpc", &good, (1536, &[0; 4], "lies on the metadata"));
    oracle.make("create -q -f vpc -o subformat=fixed,force_size=on fixed 1M");
    let fixed = fs::read(oracle.work().join("fixed")).unwrap();
    fs::write(oracle.work().join("bad"), &fixed[512..]).unwrap();
    assert!(oracle.refused("info -f vpc bad").contains("too short"));
    fs::write(oracle.work().join("bad"), &fixed[..512]).unwrap();
    assert!(oracle.refused("info -f vpc bad").contains("invalid VPC image"));
}

/// The last bytes of a dynamic VHD that lost its footer are the guest's. It doesn't choose what the disk is by them.
#[test]
fn a_guest_forges_no_footer_of_a_vhd() {
    let oracle = Oracle::new();
    let work = oracle.work();
    let whole = image(&oracle, "vpc", "-o force_size=on");
    let lost = &whole[..whole.len() - 512];
    for kind in [2u32, 3, 4] {
        let mut footer = whole[..512].to_vec();
        footer[48..56].copy_from_slice(&(1u64 << 20).to_be_bytes());
        footer[60..64].copy_from_slice(&kind.to_be_bytes());
        footer[68..84].fill(7);
        if kind == 2 {
            footer[16..24].fill(0xff);
        }
        sum_vpc(&mut footer, 0, 512, 64);
        let mut forged = lost.to_vec();
        forged[lost.len() - 512..].copy_from_slice(&footer);
        fs::write(work.join("bad"), forged).unwrap();
        oracle.make("convert -f vpc -O raw bad expected");
        assert_eq!(fs::metadata(work.join("expected")).unwrap().len(), 10 << 20);
        match kind {
            // It could be a fixed disk, whose guest wrote the start.
            2 => assert!(oracle.refused("info -f vpc bad").contains("may be its guest's")),
            _ => assert_eq!(oracle.ours(&work, &words("compare -f vpc -F raw bad expected")).code, Some(0)),
        }
    }
    // A fixed disk is one still where its guest writes a footer of that kind, or half of another.
    oracle.make("create -q -f vpc -o subformat=fixed,force_size=on fixed 1M");
    let fixed = fs::read(work.join("fixed")).unwrap();
    let mut half = whole[..512].to_vec();
    half[64] ^= 1;
    for start in [&fixed[1 << 20..], &half, &whole[..512]] {
        let mut image = fixed.clone();
        image[..512].copy_from_slice(start);
        fs::write(work.join("bad"), image).unwrap();
        assert_eq!(oracle.ours(&work, &words("convert -f vpc -O raw bad out")).code, Some(0));
        assert_eq!(fs::read(work.join("out")).unwrap()[..512], *start);
    }
}

/// The start of a fixed disk is its guest's. The guest may make it the start of a difference to any file.
#[test]
fn a_fixed_vhd_without_footer_names_no_parent() {
    let oracle = Oracle::new();
    let work = oracle.work();
    oracle.make("create -q -f vpc -o force_size=on parent.vhd 4M");
    let parent = fs::read(work.join("parent.vhd")).unwrap();
    oracle.make("create -q -f vpc -o subformat=fixed,force_size=on fixed 8M");
    let mut disk = fs::read(work.join("fixed")).unwrap();
    disk.truncate(8 << 20);
    // A footer of a difference, and a header that names the parent.
    let mut start = parent[..1536].to_vec();
    start[60..64].copy_from_slice(&4u32.to_be_bytes());
    start[68..84].fill(9);
    start[512 + 40..512 + 56].copy_from_slice(&parent[68..84]);
    let name: Vec<u8> = "parent.vhd".encode_utf16().flat_map(u16::to_be_bytes).collect();
    start[512 + 64..512 + 64 + name.len()].copy_from_slice(&name);
    sum_vpc(&mut start, 0, 512, 64);
    sum_vpc(&mut start, 512, 1024, 36);
    disk[..1536].copy_from_slice(&start);
    disk[1536..2048].fill(0xff);
    fs::write(work.join("bad"), &disk).unwrap();
    for line in ["info -f vpc bad", "convert -f vpc -O raw bad out"] {
        assert!(oracle.refused(line).contains("may be its guest's"), "{line}");
    }
    // It is one where the user says so, or where its end is there.
    let image = "driver=vpc,file.filename=bad,backing.driver=vpc,backing.file.filename=parent.vhd";
    let said = oracle.ours(&work, &words(&format!("convert --image-opts -O raw {image} out")));
    assert_eq!(said.code, Some(0), "{}", said.err);
    // A footer of another disk at the end is its guest's, too.
    let mut other = start[..512].to_vec();
    other[60..64].copy_from_slice(&3u32.to_be_bytes());
    sum_vpc(&mut other, 0, 512, 64);
    fs::write(work.join("bad"), [&disk[..], &other].concat()).unwrap();
    assert!(oracle.refused("info -f vpc bad").contains("may be its guest's"));
    disk.extend_from_slice(&start[..512]);
    fs::write(work.join("bad"), &disk).unwrap();
    let said = oracle.ours(&work, &words("info -f vpc bad"));
    assert!(said.out.contains("backing file: parent.vhd"), "{said:?}");
}

/// The footer is back before the first write, which may make the file longer or not.
#[test]
fn a_write_restores_the_lost_footer_of_a_vhd() {
    let oracle = Oracle::new();
    let work = oracle.work();
    let whole = image(&oracle, "vpc", "");
    let read = || fs::read(work.join("bad")).unwrap();
    for cut in [512, 511, 1] {
        for place in ["1M 64k", "6M 64k"] {
            fs::write(work.join("bad"), &whole[..whole.len() - cut]).unwrap();
            io(&oracle, "vpc", "bad", &["read 0 64k"]);
            assert_eq!(read().len(), whole.len() - cut);
            io(&oracle, "vpc", "bad", &[&format!("write -P 9 {place}")]);
            assert!(read().ends_with(&whole[..512]), "{cut}, {place}");
            fs::copy(work.join("good"), work.join("expected")).unwrap();
            oracle.io(&[&format!("write -P 9 {place}")], "expected");
            oracle.make("compare -f vpc -F vpc bad expected");
            assert_eq!(oracle.ours(&work, &words("compare -f vpc -F vpc bad expected")).code, Some(0));
        }
    }
}

#[test]
fn qcow() {
    let oracle = Oracle::new();
    let good = image(&oracle, "qcow", "");
    let cases: &[Case<'_>] = &[
        (8, &[0, 0, 0, 0, 0, 0, 0, 60, 0, 0, 4, 0], "backing_file_size"),
        (8, &[0, 0, 1, 0, 0, 0, 0, 60, 0, 0, 0, 9], "backing_file_offset"),
        (24, &[0xff; 8], "(size"),
        (32, &[8], "cluster_bits"),
        (33, &[14], "l2_bits"),
        (39, &[2], "crypt_method"),
        (40, &[0xff; 8], "l1_table_offset"),
        (40, &[0, 1], "points after EOF"),
        (47, &[1], "l1_table_offset"),
    ];
    refuse_each(&oracle, "qcow", &good, cases, |_| ());
    refuse_foreign(&oracle, "qcow", &good, (0, b"x", "Image not in qcow format"));
    let mut large = good.clone();
    large[24..26].copy_from_slice(&[0, 0xff]);
    fs::write(oracle.work().join("bad"), large).unwrap();
    assert!(oracle.refused("info -f qcow bad").contains("Image too large"));
    refuse_foreign(&oracle, "qcow", &good, (7, &[3], "does not support qcow version 3"));
    for size in [0, 1] {
        refuse_foreign(&oracle, "qcow", &good, (24, &[0, 0, 0, 0, 0, 0, 0, size], "Image size is too small"));
    }
    fs::write(oracle.work().join("bad"), [&good[..4], &[0, 0, 0, 4], &good[8..]].concat()).unwrap();
    oracle.compare("info -f qcow bad");
    oracle.verdict();
    let l1 = good[47] as usize;
    refuse_reading(&oracle, "qcow", &good, (l1, &[0, 0, 0, 9], "points after EOF"));
    refuse_reading(&oracle, "qcow", &good, (l1, &[0, 0, 0, 0, 0, 0, 0, 9], "lies on the header"));
    let l2 = usize::from_str_radix(&good[l1..l1 + 8].iter().map(|byte| format!("{byte:02x}")).collect::<String>(), 16);
    let l2 = l2.unwrap();
    refuse_reading(&oracle, "qcow", &good, (l2, &[0, 0, 0, 9], "points after EOF"));
    refuse_reading(&oracle, "qcow", &good, (l2 + 7, &[9], "not at a sector"));
    refuse_reading(&oracle, "qcow", &good, (l2, &[0x80, 0, 0, 0, 0, 0, 0, 48], "has no length"));
    refuse_reading(&oracle, "qcow", &good, (l2, &[0x90, 0, 0, 9, 0, 0, 0, 48], "points after EOF"));
    refuse_reading(&oracle, "qcow", &good, (l2, &[0x90, 0, 0, 0, 0, 0, 0, 40], "lies on the header"));
    refuse_reading(
        &oracle,
        "qcow",
        &good,
        (l2, &[0x80, 0x10, 0, 0, 0, 0, 0x20, 0], "compressed data inflate to 0 bytes instead of 4096"),
    );
}

#[test]
fn qed() {
    let oracle = Oracle::new();
    let good = image(&oracle, "qed", "");
    let cases: &[Case<'_>] = &[
        (4, &[1], "cluster_size"),
        (4, &[0, 0, 0, 8], "cluster_size"),
        (8, &[0], "table_size"),
        (8, &[32], "table_size"),
        (12, &[0], "header_size"),
        (16, &[8], "features"),
        (16, &[1], "backing_filename"),
        (40, &[1], "l1_table_offset"),
        (40, &[0, 0, 0, 0, 0, 1], "points after EOF"),
        (48, &[1], "image_size"),
        (54, &[0x7f], "image_size"),
    ];
    let mut with_name = good.clone();
    with_name[60] = 9;
    with_name[56..60].copy_from_slice(&65_530u32.to_le_bytes());
    refuse_each(&oracle, "qed", &with_name, cases, |_| ());
    refuse_foreign(&oracle, "qed", &good, (0, b"x", "Image not in QED format"));
    let l1 = 65_536;
    refuse_reading(&oracle, "qed", &good, (l1 + 4, &[9], "points after EOF"));
    refuse_reading(&oracle, "qed", &good, (l1, &[9], "no multiple of the cluster size"));
    let l2 = u64::from_le_bytes(good[l1..l1 + 8].try_into().unwrap()) as usize;
    refuse_reading(&oracle, "qed", &good, (l2 + 4, &[9], "points after EOF"));
    refuse_reading(&oracle, "qed", &good, (l2, &[9], "no multiple of the cluster size"));
    // Two clusters of the disk in one of the file.
    let mut image = good.clone();
    let first = image[l2..l2 + 8].to_vec();
    image[l2 + 8..l2 + 16].copy_from_slice(&first);
    fs::write(oracle.work().join("bad"), image).unwrap();
    let said = oracle.ours(&oracle.work(), &words("check -f qed bad"));
    let real = oracle.real(&oracle.work(), &words("check -f qed bad"));
    assert_eq!((said.code, real.code), (Some(2), Some(2)), "{}", said.err);
}

/// Puts the right checksums into headers and region tables.
fn sum_vhdx(image: &mut [u8]) {
    let headers = vhdx::HEADER_OFFSETS.map(|at| (at as usize, vhdx::HEADER_BYTES));
    let tables = vhdx::REGION_TABLE_OFFSETS.map(|at| (at as usize, vhdx::REGION_TABLE_BYTES));
    for (at, len) in headers.into_iter().chain(tables) {
        let sum = vhdx::checksum(&image[at..at + len]);
        image[at + 4..at + 8].copy_from_slice(&sum.to_le_bytes());
    }
}

/// The place of the header with the larger sequence number, whose first value QEMU draws at random.
fn newer_header(image: &[u8]) -> usize {
    let number = |at: usize| u64::from_le_bytes(image[at + 8..at + 16].try_into().unwrap());
    if number(0x10000) > number(0x20000) { 0x10000 } else { 0x20000 }
}

#[test]
fn vhdx_headers_and_tables() {
    let oracle = Oracle::new();
    let mut good = image(&oracle, "vhdx", "-o block_size=1M");
    let word = |image: &[u8], at: usize| u64::from_le_bytes(image[at..at + 8].try_into().unwrap()) as usize;
    // One header alone, and both region tables damaged alike.
    let newer = newer_header(&good);
    good[if newer == 0x10000 { 0x20000 } else { 0x10000 }] = b'x';
    let entries: Vec<usize> = [0x30010, 0x30030].to_vec();
    let of = |first: u8| *entries.iter().find(|at| good[**at] == first).unwrap();
    let (bat_entry, metadata_entry) = (of(0x66), of(0x06));
    let (bat, metadata) = (word(&good, bat_entry + 16), word(&good, metadata_entry + 16));
    let item = |first: u8| {
        let entry = (1..8).map(|index| metadata + 32 * index).find(|at| good[*at] == first).unwrap();
        (entry, metadata + u32::from_le_bytes(good[entry + 16..entry + 20].try_into().unwrap()) as usize)
    };
    let (parameters_entry, parameters) = item(0x37);
    let ((_, size), (_, sector)) = (item(0x24), item(0x1d));
    let cases: &[Case<'_>] = &[
        (0, b"x", "signature"),
        (newer, b"x", "header checksum"),
        (newer + 66, &[2], "(Version"),
        (newer + 72, &[1], "LogOffset"),
        (newer + 68, &[1], "LogLength"),
        (0x30008, &[0xff, 0xff], "EntryCount"),
        (0x30008, &[1], "region"),
        (bat_entry, &[0], "region"),
        (bat_entry + 16, &[1], "FileOffset"),
        (metadata_entry + 21, &[1], "points after EOF"),
        (bat_entry + 16, &good[metadata_entry + 16..metadata_entry + 24], "overlaps"),
        (metadata, b"x", "metadata signature"),
        (metadata + 10, &[0xff, 0xff], "EntryCount"),
        (metadata + 10, &[1], "metadata item"),
        (parameters_entry, &[0], "ItemId"),
        (parameters_entry + 19, &[1], "(Offset"),
        (parameters_entry + 20, &[7], "(Length"),
        (parameters, &[0, 0, 0x30], "BlockSize"),
        (parameters + 4, &[2], "parent locator"),
        (size, &[1], "VirtualDiskSize"),
        (size, &[0; 8], "VirtualDiskSize"),
        (size + 5, &[1], "too short"),
        (sector, &[1], "LogicalSectorSize"),
    ];
    refuse_each(&oracle, "vhdx", &good, cases, |image| {
        let table = image[0x30000..0x40000].to_vec();
        image[0x40000..0x50000].copy_from_slice(&table);
        sum_vhdx(image);
    });
    let tables: &[Case<'_>] = &[(newer + 100, &[1], "header checksum")];
    refuse_each(&oracle, "vhdx", &good, tables, |_| ());
    let mut torn = good.clone();
    torn[0x30100] = 1;
    refuse_each(&oracle, "vhdx", &torn, &[(0x40100, &[1], "region table checksum")], |_| ());
    // One good copy of each is enough.
    fs::write(oracle.work().join("bad"), torn).unwrap();
    assert_eq!(oracle.ours(&oracle.work(), &words("compare -f vhdx -F vhdx good bad")).code, Some(0));
    refuse_reading(&oracle, "vhdx", &good, (bat + 5, &[9], "points after EOF"));
    refuse_reading(&oracle, "vhdx", &good, (bat, &[7], "there in part"));
    refuse_reading(&oracle, "vhdx", &good, (bat, &[4], "state of a block is unknown"));
    for state in [0, 1, 2, 3, 5] {
        let mut image = good.clone();
        image[bat] = state;
        fs::write(oracle.work().join("image"), image).unwrap();
        oracle.make("convert -f vhdx -O raw image expected");
        assert_eq!(
            oracle.ours(&oracle.work(), &words("compare -f vhdx -F raw image expected")).code,
            Some(0),
            "{state}"
        );
    }
    refuse_reading(&oracle, "vhdx", &good, (bat, &[6, 0, 0x10, 0, 0, 0, 0, 0], "lies on the metadata"));
}

/// The image is as it was before qemu-io emptied its log, once the header names the log again.
#[test]
fn a_vhdx_log_of_qemu_is_carried_out() {
    let oracle = Oracle::new();
    let good = image(&oracle, "vhdx", "");
    let newer = newer_header(&good);
    let log = u64::from_le_bytes(good[newer + 72..newer + 80].try_into().unwrap()) as usize;
    assert_eq!(&good[log..log + 4], b"loge", "what qemu-io left of its log");
    let with_guid = |guid: &[u8], damage: &[(usize, usize)]| {
        let mut image = good.clone();
        image[newer + 48..newer + 64].copy_from_slice(guid);
        sum_vhdx(&mut image);
        for (at, len) in damage {
            image[*at..*at + *len].fill(0);
        }
        fs::write(oracle.work().join("bad"), image).unwrap();
    };
    // The BAT is lost, and only the log has it.
    let bat = 2 << 20;
    with_guid(&good[log + 32..log + 48], &[(bat, 4096)]);
    let before = fs::read(oracle.work().join("bad")).unwrap();
    for line in ["info -f vhdx bad", "convert -f vhdx -O raw bad out", "check -f vhdx bad"] {
        assert_eq!(oracle.real(&oracle.work(), &words(line)).code, Some(1));
        let said = oracle.ours(&oracle.work(), &words(line));
        assert_eq!(said.code, Some(0), "{line}: {}", said.err);
    }
    assert_eq!(oracle.ours(&oracle.work(), &words("compare -f vhdx -F vhdx good bad")).code, Some(0));
    assert!(fs::read(oracle.work().join("bad")).unwrap() == before, "an opening for reading wrote to the file");
    assert_eq!(oracle.ours(&oracle.work(), &words("check -r all -f vhdx bad")).code, Some(0));
    assert_eq!(oracle.real(&oracle.work(), &words("compare -f vhdx -F vhdx good bad")).code, Some(0));
    // Entries of another guid are old ones: nothing is to be done.
    with_guid(&[7; 16], &[]);
    assert_eq!(oracle.real(&oracle.work(), &words("compare -f vhdx -F vhdx good bad")).code, Some(0));
    assert_eq!(oracle.ours(&oracle.work(), &words("compare -f vhdx -F vhdx good bad")).code, Some(0));
}

/// Two entries, of which the first has the largest number.
#[test]
fn a_vhdx_log_may_have_the_largest_number() {
    let oracle = Oracle::new();
    oracle.make("create -q -f vhdx bad 8M");
    let mut image = fs::read(oracle.work().join("bad")).unwrap();
    let newer = newer_header(&image);
    let log = u64::from_le_bytes(image[newer + 72..newer + 80].try_into().unwrap()) as usize;
    let guid = vhdx::Guid::random([5; 16]);
    let (flushed_bytes, last_bytes) = (image.len() as u64, image.len() as u64);
    let mut at = log;
    for number in [u64::MAX, 5] {
        let sectors = &[(6 << 20, vec![0; 4096])];
        let entry = vhdx::NewLogEntry { guid, number, tail: 0, flushed_bytes, last_bytes, sectors }.to_bytes();
        image[at..at + entry.len()].copy_from_slice(&entry);
        image[newer + 48..newer + 64].copy_from_slice(&entry[32..48]);
        at += entry.len();
    }
    sum_vhdx(&mut image);
    fs::write(oracle.work().join("bad"), image).unwrap();
    for line in ["info -f vhdx bad", "check -r all -f vhdx bad", "check -f vhdx bad"] {
        let said = oracle.ours(&oracle.work(), &words(line));
        assert!(matches!(said.code, Some(0 | 1)) && !said.err.contains("panicked"), "{line}: {}", said.err);
    }
}

/// The number of the header can't grow, or new blocks would go where the rest of the BAT's region is said to be.
#[test]
fn vhdx_images_that_no_write_can_keep() {
    let oracle = Oracle::new();
    oracle.make("create -q -f vhdx -o block_size=1M good 10M");
    let good = fs::read(oracle.work().join("good")).unwrap();
    let newer = newer_header(&good);
    let bat = [0x30010, 0x30030].into_iter().find(|at| good[*at] == 0x66).unwrap();
    // The BAT at the end of the file, in a region of 64 MiB.
    let place = u64::from_le_bytes(good[bat + 16..bat + 24].try_into().unwrap()) as usize;
    let (end, table) = (good.len().next_multiple_of(1 << 20), &good[place..place + (1 << 20)]);
    let region = [&(end as u64).to_le_bytes()[..], &(64u32 << 20).to_le_bytes()].concat();
    for (at, bytes, part) in [(newer + 8, &[0xff; 8][..], "SequenceNumber"), (bat + 16, &region, "points after EOF")] {
        let mut image = good.clone();
        image.resize(end, 0);
        image.extend_from_slice(table);
        image[at..at + bytes.len()].copy_from_slice(bytes);
        let table = image[0x30000..0x40000].to_vec();
        image[0x40000..0x50000].copy_from_slice(&table);
        sum_vhdx(&mut image);
        fs::write(oracle.work().join("bad"), &image).unwrap();
        let said = run_io(&oracle, "vhdx", "bad", &["write -P 9 6M 1M"]);
        assert!(said.contains(part), "{at}: {said}");
        assert!(fs::read(oracle.work().join("bad")).unwrap() == image, "{at}: it was changed");
        assert_eq!(oracle.ours(&oracle.work(), &words("compare -f vhdx -F vhdx good bad")).code, Some(0));
    }
}

#[test]
fn parallels() {
    let oracle = Oracle::new();
    let good = image(&oracle, "parallels", "");
    let cases: &[Case<'_>] = &[
        (16, &[3], "version"),
        (28, &[0; 4], "tracks"),
        (28, &[0xff; 4], "tracks"),
        (32, &[9], "nb_bat_entries"),
        (36, &[0xff; 8], "nb_sectors"),
        (48, &[0; 4], "data_off"),
        (48, &[1], "data_off"),
    ];
    refuse_each(&oracle, "parallels", &good, cases, |_| ());
    refuse_foreign(&oracle, "parallels", &good, (0, b"x", "Image not in Parallels format"));
    refuse_reading(&oracle, "parallels", &good, (64 + 2, &[9], "points after EOF"));
    let mut far = good.clone();
    far[48..52].copy_from_slice(&8192u32.to_le_bytes());
    refuse_reading(&oracle, "parallels", &far, (64, &[1], "lies before the data"));
    // The older kind counts sectors.
    let mut old = good.clone();
    old[..16].copy_from_slice(b"WithoutFreeSpace");
    for at in (64..64 + 40).step_by(4) {
        let clusters = u32::from_le_bytes(old[at..at + 4].try_into().unwrap());
        old[at..at + 4].copy_from_slice(&(clusters * 2048).to_le_bytes());
    }
    fs::write(oracle.work().join("old"), old).unwrap();
    oracle.make("compare -f parallels -F parallels good old");
    assert_eq!(oracle.ours(&oracle.work(), &words("compare -f parallels -F parallels good old")).code, Some(0));
}

#[test]
fn sizes_on_paper_cost_no_memory() {
    let oracle = Oracle::new();
    let work = oracle.work();
    // 4 PiB on a file of holes. A map of 16 GiB with "block 0" everywhere would be read in pages, and is refused under
    // the policy for strangers.
    let mut header = image(&oracle, "vdi", "")[..512].to_vec();
    header[368..376].copy_from_slice(&((1u64 << 52) - (1 << 20)).to_le_bytes());
    header[384..388].copy_from_slice(&u32::MAX.to_le_bytes());
    header[344..348].copy_from_slice(&(0xffff_fe00u32).to_le_bytes());
    fs::write(work.join("bad"), &header).unwrap();
    let message = oracle.refused("info -f vdi bad");
    assert!(message.contains("offset_data"), "{message}");
    // As large as a map can be before the data.
    let blocks = ((0xffff_fe00u64 - 512) / 4) as u32;
    header[368..376].copy_from_slice(&(u64::from(blocks) << 20).to_le_bytes());
    header[384..388].copy_from_slice(&blocks.to_le_bytes());
    fs::write(work.join("bad"), &header).unwrap();
    assert!(oracle.refused("info -f vdi bad").contains("points after EOF"));
    fs::File::options().write(true).open(work.join("bad")).unwrap().set_len(5 << 30).unwrap();
    assert_eq!(oracle.ours(&work, &words("info -f vdi bad")).code, Some(0));
    assert!(oracle.refused("info --untrusted -f vdi bad").contains("policy"));
    let line = "map --output=json --max-length=1G -f vdi bad";
    assert_eq!(oracle.ours(&work, &words(line)).code, Some(0));
}

#[test]
fn inspect_tells_what_an_image_asks_for() {
    let oracle = Oracle::new();
    let work = oracle.work();
    let inspect = |name: &str| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_cowshed"));
        let output = command.args(["inspect", "--output=json", name]).current_dir(&work).output().unwrap();
        (output.status.code(), serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap())
    };
    fs::write(work.join("base.raw"), vec![0; 1 << 20]).unwrap();
    // A byte of each header whose change makes it impossible.
    let damage = [("vdi", 376), ("vpc", 600), ("vhdx", 0), ("qcow", 32), ("qed", 4), ("parallels", 31)];
    for (format, at) in damage {
        image(&oracle, format, "");
        let (code, json) = inspect("good");
        assert_eq!((code, json["verdict"].as_str()), (Some(0), Some("harmless")), "{json}");
        let real = oracle.real(&work, &words(&format!("info --output=json -f {format} good")));
        let real: serde_json::Value = serde_json::from_str(&real.out).unwrap();
        assert_eq!((&json["virtual-size"], &json["format"]), (&real["virtual-size"], &real["format"]));
        let mut bad = fs::read(work.join("good")).unwrap();
        if format == "vhdx" {
            // Both region tables.
            bad[0x30000] = b'x';
            bad[0x40000] = b'x';
        } else {
            bad[at] = 0xff;
        }
        fs::write(work.join("good"), bad).unwrap();
        let (code, json) = inspect("good");
        assert_eq!((code, json["verdict"].as_str()), (Some(2), Some("suspicious")), "{json}");
    }
    for (format, verdict) in [("qed", "asks-for-files"), ("qcow", "suspicious")] {
        oracle.make(&format!("create -q -f {format} -b base.raw -F raw child"));
        let (code, json) = inspect("child");
        assert_eq!((code, json["verdict"].as_str()), (Some(2), Some(verdict)), "{json}");
        assert_eq!(json["asks-for"][0]["name"], "base.raw", "{json}");
    }
}

/// A log may have zeroes for any part of a file whose length it gives itself.
#[test]
fn zeroes_of_a_vhdx_log_take_no_space() {
    use std::os::unix::fs::MetadataExt;
    let oracle = Oracle::new();
    oracle.make("create -q -f vhdx -o block_size=1M bad 8M");
    let path = oracle.work().join("bad");
    let mut image = fs::read(&path).unwrap();
    let newer = newer_header(&image);
    let log = u64::from_le_bytes(image[newer + 72..newer + 80].try_into().unwrap()) as usize;
    let (end, more) = (image.len() as u64, 8u64 << 30);
    let mut entry = vec![0u8; 4096];
    entry[..4].copy_from_slice(b"loge");
    entry[8..12].copy_from_slice(&4096u32.to_le_bytes());
    entry[16..24].copy_from_slice(&7u64.to_le_bytes());
    entry[24..28].copy_from_slice(&1u32.to_le_bytes());
    entry[32..48].fill(5);
    entry[48..56].copy_from_slice(&end.to_le_bytes());
    entry[56..64].copy_from_slice(&(end + more).to_le_bytes());
    entry[64..68].copy_from_slice(b"zero");
    entry[72..80].copy_from_slice(&more.to_le_bytes());
    entry[80..88].copy_from_slice(&end.to_le_bytes());
    entry[88..96].copy_from_slice(&7u64.to_le_bytes());
    let sum = vhdx::checksum(&entry);
    entry[4..8].copy_from_slice(&sum.to_le_bytes());
    image[log..log + 4096].copy_from_slice(&entry);
    image[newer + 48..newer + 64].fill(5);
    sum_vhdx(&mut image);
    fs::write(&path, &image).unwrap();
    io(&oracle, "vhdx", "bad", &["write -P 3 0 64k"]);
    let now = fs::metadata(&path).unwrap();
    assert!(now.len() >= end + more, "the log was carried out: {} bytes", now.len());
    assert!(now.blocks() * 512 < 64 << 20, "{} bytes on the disk", now.blocks() * 512);
    oracle.make("check -f vhdx bad");
}
