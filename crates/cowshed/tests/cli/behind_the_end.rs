// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tables with entries behind the end of the disk. Readers that see a longer disk need their blocks, and damage shows there, too.

use crate::oracle::{Oracle, words};
use crate::written_edges::{io, run_io};
use std::fs;

/// A format, options of its creation, and the fields of the header that hold the size: offset, bytes, order, unit in bytes.
struct Kind {
    format: &'static str,
    options: &'static str,
    size_at: &'static [usize],
    bytes: usize,
    is_big_endian: bool,
    unit_bytes: u64,
}

const KINDS: &[Kind] = &[
    Kind {
        format: "qed",
        options: "cluster_size=4k,table_size=2",
        size_at: &[48],
        bytes: 8,
        is_big_endian: false,
        unit_bytes: 1,
    },
    Kind {
        format: "parallels",
        options: "cluster_size=1M",
        size_at: &[36],
        bytes: 8,
        is_big_endian: false,
        unit_bytes: 512,
    },
    Kind { format: "vdi", options: "", size_at: &[368], bytes: 8, is_big_endian: false, unit_bytes: 1 },
    Kind { format: "vpc", options: "force_size=on", size_at: &[48], bytes: 8, is_big_endian: true, unit_bytes: 1 },
    Kind { format: "qcow", options: "", size_at: &[24], bytes: 8, is_big_endian: true, unit_bytes: 1 },
];

impl Kind {
    /// The image with another size in its header.
    fn resized(&self, image: &[u8], size: u64) -> Vec<u8> {
        let mut image = image.to_vec();
        let value = size / self.unit_bytes;
        let value = if self.is_big_endian { value.to_be_bytes() } else { value.to_le_bytes() };
        for at in self.size_at {
            image[*at..at + self.bytes].copy_from_slice(&value);
        }
        if self.format == "vpc" {
            // The footer has a sum of its own, and stands at the end, too.
            image[64..68].fill(0);
            let sum = !image[..512].iter().map(|byte| u32::from(*byte)).sum::<u32>();
            image[64..68].copy_from_slice(&sum.to_be_bytes());
            let end = image.len() - 512;
            image.copy_within(..512, end);
        }
        image
    }
}

const MIB: u64 = 1 << 20;

#[test]
fn blocks_behind_the_end_stay() {
    for kind in KINDS {
        let (oracle, format) = (Oracle::new(), kind.format);
        let (work, options) = (oracle.work(), kind.options);
        let options = if options.is_empty() { String::new() } else { format!("-o {options}") };
        oracle.make(&format!("create -q -f {format} {options} image 8M"));
        let fill = ["write -P 1 0 64k", "write -P 2 7936k 64k"];
        qemu_io(&oracle, format, &fill);
        // In the last block, or behind it; of qcow, in the reach of the same table.
        let short = if format == "qcow" { 7 * MIB } else { 5 * MIB };
        let image = fs::read(work.join("image")).unwrap();
        fs::write(work.join("image"), kind.resized(&image, short)).unwrap();
        let check = |what: &str| {
            let line = words(&format!("check -f {format} image"));
            let (ours, theirs) = (oracle.ours(&work, &line), oracle.real(&work, &line));
            assert_eq!((ours.code, theirs.code == Some(2)), (theirs.code, false), "{format}, {what}: {ours:?}");
        };
        check("with entries behind the end");
        io(&oracle, format, "image", &["read -P 1 0 64k", "write -P 9 2M 64k"]);
        check("written to");
        if format == "parallels" {
            let said = oracle.ours(&work, &words("check -r all -f parallels image"));
            assert_eq!(said.code, Some(0), "{said:?}");
        }
        let image = fs::read(work.join("image")).unwrap();
        fs::write(work.join("image"), kind.resized(&image, 8 * MIB)).unwrap();
        check("long again");
        qemu_io(&oracle, format, &["read -P 1 0 64k", "read -P 9 2M 64k", "read -P 2 7936k 64k"]);
    }
}

#[track_caller]
fn qemu_io(oracle: &Oracle, format: &str, commands: &[&str]) {
    let mut command = std::process::Command::new(oracle.qemu.io_path());
    command.current_dir(oracle.work()).args(["-f", format]);
    for text in commands {
        command.args(["-c", text]);
    }
    let output = command.arg("image").output().expect("qemu-io runs");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && !said.contains("failed"), "{format}: {said}");
}

fn le64(image: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(image[at..at + 8].try_into().unwrap())
}

/// A QED disk of 6 MiB with an entry behind its end.
fn damaged_qed(oracle: &Oracle, what: &str) {
    oracle.make("create -q -f qed -o cluster_size=4k,table_size=2 image 6M");
    qemu_io(oracle, "qed", &["write -P 1 0 64k", "write -P 2 5M 64k"]);
    let path = oracle.work().join("image");
    let mut image = fs::read(&path).unwrap();
    let l1 = le64(&image, 40) as usize;
    let (first, second) = (le64(&image, l1) as usize, le64(&image, l1 + 8) as usize);
    let (at, entry) = match what {
        "a table out of the file" => (l1 + 8 * 5, 1 << 30),
        "a table twice" => (l1 + 8 * 5, first as u64),
        "a cluster twice" => (second + 8 * 600, le64(&image, first)),
        _ => (second + 8 * 600, 1 << 30),
    };
    image[at..at + 8].copy_from_slice(&entry.to_le_bytes());
    fs::write(path, image).unwrap();
}

#[test]
fn qed_entries_behind_the_end_are_checked() {
    let oracle = Oracle::new();
    let work = oracle.work();
    for (what, is_repaired) in [
        ("a table out of the file", true),
        ("a cluster out of the file", true),
        ("a table twice", false),
        ("a cluster twice", false),
    ] {
        damaged_qed(&oracle, what);
        let run = |line: &str| oracle.ours(&work, &words(line));
        assert_eq!(run("check -f qed image").code, Some(2), "{what}");
        assert_eq!(oracle.real(&work, &words("check -f qed image")).code, Some(2), "{what}");
        // A longer disk would show them, and a write to it change other data.
        assert_eq!(run("resize -f qed image 8M").code, Some(1), "{what}");
        let said = run("check -r all -f qed image");
        assert_eq!(said.code, Some(if is_repaired { 0 } else { 2 }), "{what}: {said:?}");
        let judged = oracle.real(&work, &words("check -f qed image"));
        assert_eq!(judged.code == Some(2), !is_repaired, "{what}: {judged:?}");
        // An image that was not closed is repaired by its opening.
        damaged_qed(&oracle, what);
        let mut image = fs::read(work.join("image")).unwrap();
        image[16] |= 2;
        fs::write(work.join("image"), image).unwrap();
        let said = run_io(&oracle, "qed", "image", &["write -P 3 1M 4k"]);
        assert_eq!(said.contains("wrote 4096/4096 bytes"), is_repaired, "{what}: {said}");
    }
}

/// A table of many megabytes that is one hole is repaired in no time; entries one by one took minutes.
#[test]
fn empty_tables_are_repaired_by_pages() {
    let oracle = Oracle::new();
    let path = oracle.work().join("image");
    let entries = 1u32 << 28;
    let data_at = (64 + 4 * u64::from(entries)).div_ceil(512);
    let mut header = [0u8; 64];
    header[..16].copy_from_slice(b"WithoutFreeSpace");
    for (at, value) in [(16, 2u32), (20, 16), (24, 10), (28, 1), (32, entries), (44, 0x746f_6e59), (48, data_at as u32)]
    {
        header[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }
    header[36..44].copy_from_slice(&u64::from(entries).to_le_bytes());
    fs::write(&path, header).unwrap();
    fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(data_at * 512 + 4096).unwrap();
    let said = oracle.ours(&oracle.work(), &words("check -r all -f parallels image"));
    assert_eq!(said.code, Some(0), "{said:?}");
    // As many L1 entries of QED that all lead to one table: each table is looked at once.
    let (cluster, table_clusters) = (65_536u64, 16u64);
    let (l1, table_bytes) = (cluster, cluster * table_clusters);
    let mut image = vec![0u8; (l1 + 2 * table_bytes + cluster) as usize];
    image[..4].copy_from_slice(b"QED\0");
    for (at, value) in [(4, cluster as u32), (8, table_clusters as u32), (12, 1), (16, 2)] {
        image[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }
    image[40..48].copy_from_slice(&l1.to_le_bytes());
    image[48..56].copy_from_slice(&((1u64 << 50) - cluster).to_le_bytes());
    for entry in image[l1 as usize..(l1 + table_bytes) as usize].chunks_mut(8) {
        entry.copy_from_slice(&(l1 + table_bytes).to_le_bytes());
    }
    fs::write(&path, image).unwrap();
    for line in ["check -f qed image", "check -r all -f qed image"] {
        let said = oracle.ours(&oracle.work(), &words(line));
        assert_eq!(said.code, Some(2), "{line}");
    }
}

/// A VHD of which the size is the geometry's, with a block behind that.
fn vhd_with_a_block_behind_the_end(oracle: &Oracle) -> std::path::PathBuf {
    oracle.make("create -q -f vpc -o force_size=on image 41947136");
    let path = oracle.work().join("image");
    let mut image = fs::read(&path).unwrap();
    let end = image.len() - 512;
    for footer in [0, end] {
        image[footer + 28..footer + 32].copy_from_slice(b"vpc ");
        image[footer + 56..footer + 60].copy_from_slice(&[1204_u16.to_be_bytes()[0], 1204_u16.to_be_bytes()[1], 4, 17]);
        image[footer + 64..footer + 68].fill(0);
        let sum = !image[footer..footer + 512].iter().map(|byte| u32::from(*byte)).sum::<u32>();
        image[footer + 64..footer + 68].copy_from_slice(&sum.to_be_bytes());
    }
    fs::write(&path, image).unwrap();
    let mut command = std::process::Command::new(oracle.qemu.io_path());
    command.args(["--image-opts", "-c", "write -P 1 0 64k", "-c", "write -P 2 41943040 4k"]);
    let file = format!("driver=vpc,force_size_calc=current_size,file.filename={}", path.display());
    assert!(command.arg(file).output().expect("qemu-io runs").status.success());
    path
}

#[test]
fn vhd_whose_last_block_is_cut_off_stays() {
    let oracle = Oracle::new();
    let path = vhd_with_a_block_behind_the_end(&oracle);
    let whole = fs::read(&path).unwrap();
    let cut = &whole[..whole.len() - 512 - (2 << 20) - 512];
    fs::write(&path, cut).unwrap();
    let said = run_io(&oracle, "vpc", "image", &["write -P 9 4M 2M"]);
    assert!(said.contains("block allocation table entry"), "{said}");
    assert!(fs::read(&path).unwrap() == cut, "nothing is written");
}

#[test]
fn tables_of_many_unused_entries_open_at_once() {
    let oracle = Oracle::new();
    oracle.make("create -q -f vpc -o force_size=on image 8M");
    let path = oracle.work().join("image");
    let image = fs::read(&path).unwrap();
    // One by one they take minutes.
    let entries = 1_u32 << 27;
    let mut header = image[512..1536].to_vec();
    header[28..32].copy_from_slice(&entries.to_be_bytes());
    header[36..40].fill(0);
    let sum = !header.iter().map(|byte| u32::from(*byte)).sum::<u32>();
    header[36..40].copy_from_slice(&sum.to_be_bytes());
    let mut start = image[..image.len() - 512].to_vec();
    start[512..1536].copy_from_slice(&header);
    // The entries behind those of the disk are a hole.
    let end = 1536 + u64::from(entries) * 4;
    let file = fs::File::create(&path).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &start, 0).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &image[..512], end).unwrap();
    io(&oracle, "vpc", "image", &["write -P 1 4M 64k", "read -P 1 4M 64k"]);
}
