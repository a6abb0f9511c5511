// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tables in holes of an image's file: they are passed over, and the rest of the disk stays what it was.

use crate::oracle::{Oracle, ours};
use crate::serving::{Serving, await_socket};
use crate::written_edges::{io, run_io};
use cowshed_testkit::random::Random;
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

/// An image with one table that leads to others.
#[derive(Clone, Copy)]
struct Kind {
    format: &'static str,
    options: &'static str,
    directory_at: u64,
    table_bytes: u64,
    cluster_bytes: u64,
    is_big_endian: bool,
}

const KINDS: [Kind; 2] = [
    Kind {
        format: "qed",
        options: "-o cluster_size=4k,table_size=2",
        directory_at: 4096,
        table_bytes: 8192,
        cluster_bytes: 4096,
        is_big_endian: false,
    },
    Kind { format: "qcow", options: "", directory_at: 48, table_bytes: 4096, cluster_bytes: 4096, is_big_endian: true },
];

impl Kind {
    fn entry(self, at: u64) -> [u8; 8] {
        if self.is_big_endian { at.to_be_bytes() } else { at.to_le_bytes() }
    }
}

/// A disk of many tables: missing ones, others in holes, and a few with entries. Two holes never follow from one another.
fn make(oracle: &Oracle, kind: Kind, random: &mut Random) {
    const TABLES: u64 = 100;
    let span = kind.table_bytes / 8 * kind.cluster_bytes;
    oracle.make(&format!("create -q -f {} {} image {}", kind.format, kind.options, TABLES * span));
    let file = OpenOptions::new().read(true).write(true).open(oracle.work().join("image")).unwrap();
    let mut end = file.metadata().unwrap().len().next_multiple_of(4096);
    let mut order: Vec<u64> = (0..TABLES).collect();
    // Their order in the file is another one for a part of them.
    for _ in 0..random.below(20) {
        order.swap(random.below(TABLES) as usize, random.below(TABLES) as usize);
    }
    for table in order {
        let kind_of_table = random.below(4);
        if kind_of_table == 0 {
            continue;
        }
        let place = end;
        end += kind.table_bytes;
        file.write_all_at(&kind.entry(place), kind.directory_at + table * 8).unwrap();
        for cluster in 0..if kind_of_table == 1 { 1 + random.below(3) as usize } else { 0 } {
            let last = kind.table_bytes / 8 - 1;
            let index = [last, 0, 1 + random.below(last - 1)][cluster];
            file.write_all_at(&vec![random.below(255) as u8 + 1; kind.cluster_bytes as usize], end).unwrap();
            file.write_all_at(&kind.entry(end), place + index * 8).unwrap();
            end += kind.cluster_bytes;
        }
    }
    file.set_len(end).unwrap();
}

#[test]
fn tables_in_holes_have_no_clusters() {
    for seed in 1..=12 {
        let random = &mut Random::new(seed);
        for kind in KINDS {
            let oracle = Oracle::new();
            make(&oracle, kind, random);
            let format = kind.format;
            oracle.make(&format!("convert -f {format} -O raw image model"));
            ours(&oracle, &format!("compare -q -f {format} -F raw image model"));
            let size = fs::metadata(oracle.work().join("model")).unwrap().len();
            let (at, len) = (random.below(size - (3 << 20)) / 512 * 512, 512 * (1 + random.below(5000)));
            io(&oracle, format, "image", &[&format!("write -P 7 {at} {len}")]);
            io(&oracle, "raw", "model", &[&format!("write -P 7 {at} {len}")]);
            oracle.make(&format!("compare -q -f {format} -F raw image model"));
            ours(&oracle, &format!("compare -q -f {format} -F raw image model"));
            if format == "qed" {
                oracle.make("check -q -f qed image");
                ours(&oracle, "check -q -f qed image");
            }
        }
    }
}

/// A QED disk of 1 MiB whose L1 table names this many tables of 1 MiB, all in one hole.
fn qed_with_tables_behind_the_end(oracle: &Oracle, tables: u64) {
    const CLUSTER: u64 = 64 << 10;
    oracle.make("create -q -f qed -o table_size=16 image 1M");
    let file = OpenOptions::new().write(true).open(oracle.work().join("image")).unwrap();
    let directory: Vec<u8> = (0..tables).flat_map(|index| (CLUSTER * (17 + 16 * index)).to_le_bytes()).collect();
    file.write_all_at(&directory, CLUSTER).unwrap();
    file.set_len(CLUSTER * (17 + 16 * tables)).unwrap();
}

/// One by one they take more than a minute.
#[test]
fn qed_tables_in_a_hole_open_at_once() {
    let oracle = Oracle::new();
    qed_with_tables_behind_the_end(&oracle, 64 << 10);
    let started = Instant::now();
    io(&oracle, "qed", "image", &["write -P 1 0 64k", "read -P 1 0 64k"]);
    ours(&oracle, "check -q -f qed image");
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
}

/// The same for a format with short tables, of which each was read.
#[test]
fn qcow_tables_in_a_hole_open_at_once() {
    const TABLES: u64 = 512 << 10;
    let oracle = Oracle::new();
    oracle.make(&format!("create -q -f qcow image {}", TABLES << 21));
    let path = oracle.work().join("image");
    let first = fs::metadata(&path).unwrap().len().next_multiple_of(4096);
    let directory: Vec<u8> = (0..TABLES).flat_map(|index| (first + index * 4096).to_be_bytes()).collect();
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    file.write_all_at(&directory, 48).unwrap();
    file.set_len(first + TABLES * 4096).unwrap();
    let started = Instant::now();
    io(&oracle, "qcow", "image", &["write -P 1 5G 64k", "read -P 1 5G 64k", "read -P 0 6G 1M"]);
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
}

/// A table of two GiB that is a hole: its pages are not looked at one by one.
#[test]
fn one_large_table_in_a_hole_opens_at_once() {
    let oracle = Oracle::new();
    oracle.make("create -q -f parallels -o cluster_size=512 image 1M");
    let path = oracle.work().join("image");
    let mut header = fs::read(&path).unwrap()[..64].to_vec();
    let entries = 1_u32 << 29;
    header[32..36].copy_from_slice(&entries.to_le_bytes());
    let data = 64 + u64::from(entries) * 4;
    header[48..52].copy_from_slice(&u32::try_from(data.div_ceil(512)).unwrap().to_le_bytes());
    let file = File::create(&path).unwrap();
    file.write_all_at(&header, 0).unwrap();
    file.set_len(data.next_multiple_of(512)).unwrap();
    let started = Instant::now();
    let said = run_io(&oracle, "parallels", "image", &["write -P 1 4k 64k", "read -P 1 4k 64k"]);
    assert!(said.contains("wrote 65536/65536") && !said.contains("failed"), "{said}");
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
}

/// An export of an overlay without data. Its depths stand for zeroes to QEMU, and the tables of the image are read all the same.
#[test]
fn no_context_of_a_server_makes_holes_of_tables() {
    for (format, subformat) in [
        ("qed", ""),
        ("vmdk", ""),
        ("vmdk", " -o subformat=streamOptimized"),
        ("vdi", ""),
        ("vdi", " -o static=on"),
        ("vpc", ""),
        ("vpc", " -o subformat=fixed,force_size=on"),
        ("vhdx", ""),
        ("qcow", ""),
        ("qcow2", ""),
        ("parallels", ""),
    ] {
        let oracle = Oracle::new();
        oracle.make("create -q -f raw disk.raw 4M");
        oracle.io(&["write -q -P 1 0 1M", "write -q -P 2 2M 64k"], "disk.raw");
        oracle.make(&format!("convert -f raw -O {format}{subformat} disk.raw image"));
        oracle.make("create -q -f qcow2 -b image -F raw over.qcow2");
        let arguments = ["qemu-nbd", "-r", "-t", "-A", "-k", "n.sock", "-f", "qcow2", "over.qcow2"];
        let serving = Serving::start(oracle.work(), &arguments);
        await_socket(&oracle.work().join("n.sock"));
        let file = format!("file.driver=nbd,file.server.type=unix,file.server.path={}/n.sock", oracle.work().display());
        let options = format!("driver={format},{file},file.x-dirty-bitmap=qemu:allocation-depth");
        if format == "vhdx" {
            // Ours tells the place of data there, which QEMU leaves out.
            let said = ours(&oracle, &format!("map --output=json --image-opts {options}"));
            assert!(said.contains("\"zero\": false, \"data\": true"), "{said}");
        } else {
            oracle.compare(&format!("map --output=json --image-opts {options}"));
        }
        oracle.compare(&format!("check --image-opts {options}"));
        // QEMU's measure takes the context for zeroes of a disk that is stored as it is. QEMU 7.2 has no bitmaps of parallels.
        let is_as_in_its_file = subformat.contains("fixed") || subformat.contains("static");
        if !is_as_in_its_file && format != "parallels" {
            oracle.compare(&format!("measure -O qcow2 --image-opts {options}"));
        }
        oracle.verdict();
        serving.signal("TERM");
    }
}
