// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Bitmap directories and tables that lie: writing is refused by one error that names the fault, nothing is changed,
//! reading the disk goes on. And disks that get full, or fail, while bitmaps are changed.

use cowshed_image::formats::DriverOf;
use cowshed_image::formats::qcow2::BitmapChange;
use cowshed_image::{OpenRequest, open};
use cowshed_offline::check::{CheckOptions, check};
use cowshed_simulator::{Config, Effect, Fault, OpKind, PageMap, Snapshot, World};
use cowshed_storage::{File, IoBuf, OpenOptions};
use cowshed_testkit::qemu::{Qemu, temp_dir};
use cowshed_types::{Errno, Repair, Result};
use std::path::Path;

const NAME: &str = "image.qcow2";
const SIZE: u64 = 1 << 20;

/// An image with the enabled bitmaps `one` and `two`, something dirty in both.
fn image() -> Vec<u8> {
    let (qemu, folder) = (Qemu::system(), temp_dir());
    let path = folder.path().join(NAME);
    let name = path.to_str().expect("text path");
    qemu.create(&path, "qcow2", "cluster_size=4k", SIZE);
    qemu.img(["bitmap", "--add", "-g", "512", name, "one"]).expect_ok();
    qemu.img(["bitmap", "--add", "-g", "4096", name, "two"]).expect_ok();
    qemu.io_commands(&path, "qcow2", &["write -P 1 0 96k".into()]).expect_ok();
    std::fs::read(&path).expect("the image just made")
}

fn number(bytes: &[u8], at: usize, len: usize) -> u64 {
    bytes[at..at + len].iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte))
}

fn put(bytes: &mut [u8], at: usize, len: usize, value: u64) {
    bytes[at..at + len].copy_from_slice(&value.to_be_bytes()[8 - len..]);
}

/// Where the data of the extension, the directory's first entry, and its table are.
struct Places {
    extension: usize,
    entry: usize,
    table: usize,
}

fn places(bytes: &[u8]) -> Places {
    let mut at = number(bytes, 100, 4) as usize;
    while number(bytes, at, 4) != 0x2385_2875 {
        at += 8 + (number(bytes, at + 4, 4) as usize).next_multiple_of(8);
    }
    let entry = number(bytes, at + 24, 8) as usize;
    Places { extension: at + 8, entry, table: number(bytes, entry, 8) as usize }
}

type Lie = (&'static str, fn(&mut [u8], &Places));

const LIES: &[Lie] = &[
    ("bitmap_directory", |bytes, at| put(bytes, at.extension, 4, 3)),
    ("nb_bitmaps", |bytes, at| put(bytes, at.extension, 4, 65536)),
    ("nb_bitmaps", |bytes, at| put(bytes, at.extension, 4, 0)),
    ("bitmap_directory", |bytes, at| put(bytes, at.extension + 8, 8, 40)),
    ("bitmap_directory", |bytes, at| put(bytes, at.extension + 8, 8, u64::MAX)),
    ("bitmap_directory", |bytes, at| put(bytes, at.extension + 8, 8, 1 << 20)),
    ("bitmap_directory", |bytes, at| put(bytes, at.extension + 16, 8, 1 << 40)),
    ("bitmap_directory", |bytes, at| put(bytes, at.extension + 16, 8, 4097)),
    ("bitmap_table_offset", |bytes, at| put(bytes, at.entry, 8, 0)),
    ("bitmap_table_offset", |bytes, at| put(bytes, at.entry, 8, 1 << 40)),
    ("bitmap_table_offset", |bytes, at| put(bytes, at.entry, 8, 513)),
    ("bitmap_table_offset", |bytes, at| put(bytes, at.entry, 8, u64::MAX << 12)),
    ("bitmap_table_size", |bytes, at| put(bytes, at.entry + 8, 4, 2)),
    ("bitmap_table_size", |bytes, at| put(bytes, at.entry + 8, 4, 0xffff_ffff)),
    ("bitmap_flags", |bytes, at| put(bytes, at.entry + 12, 4, 2 | 1 << 31)),
    ("bitmap_type", |bytes, at| put(bytes, at.entry + 16, 1, 2)),
    ("bitmap_table_size", |bytes, at| put(bytes, at.entry + 17, 1, 0)),
    ("bitmap_granularity_bits", |bytes, at| put(bytes, at.entry + 17, 1, 255)),
    ("bitmap", |bytes, at| put(bytes, at.entry + 18, 2, 0)),
    ("bitmap_directory", |bytes, at| put(bytes, at.entry + 18, 2, 0xffff)),
    ("bitmap_directory", |bytes, at| put(bytes, at.entry + 20, 4, 0xffff_fff0)),
    ("same name", |bytes, at| bytes[at.entry + 24..at.entry + 27].copy_from_slice(b"two")),
    ("bitmap_table_entry", |bytes, at| put(bytes, at.table, 8, 1 << 40)),
    ("bitmap_table_entry", |bytes, at| put(bytes, at.table, 8, 2)),
    ("bitmap_table_entry", |bytes, at| put(bytes, at.table, 8, 0x5001)),
    ("bitmap_table_entry", |bytes, at| put(bytes, at.table, 8, 0x5200)),
];

async fn write_one() -> Result<()> {
    let node = open(OpenRequest::file(NAME).format("qcow2").writable(true)).await?;
    let written = node.write(SIZE / 2, IoBuf::zeroed(512)).await.0;
    written.and(node.close().await)
}

async fn change_one() -> Result<()> {
    let node = open(OpenRequest::file(NAME).format("qcow2").writable(true)).await?;
    let clear = BitmapChange::Clear("one".to_owned());
    let merge = BitmapChange::Merge {
        target: "two".to_owned(),
        source: node.qcow2().expect("qcow2").bitmap_bits("one").await?,
    };
    let changed = node.qcow2().expect("qcow2").change_bitmaps(&[merge, clear]).await;
    changed.and(node.close().await)
}

async fn first_bytes() -> Result<u8> {
    let node = open(OpenRequest::file(NAME).format("qcow2")).await?;
    let (result, bytes) = node.read(0, IoBuf::zeroed(512)).await;
    result?;
    node.close().await?;
    Ok(bytes[0])
}

fn world(bytes: &[u8]) -> World {
    let files = Snapshot::from([(NAME.to_owned(), PageMap::from_bytes(bytes))]);
    World::with_files(Config { in_order: true, ..Config::new(1) }, &files)
}

#[test]
fn bitmaps_that_lie_are_one_error_and_nothing_is_written() {
    let good = image();
    let at = places(&good);
    for (number, (words, lie)) in LIES.iter().enumerate() {
        let mut bytes = good.clone();
        lie(&mut bytes, &at);
        assert!(bytes != good, "lie {number} is none");
        let machine = world(&bytes);
        for (what, result) in [("write", machine.run(write_one())), ("change", machine.run(change_one()))] {
            let Err(error) = result else { panic!("lie {number} is believed: {what}") };
            let error = error.to_string();
            assert!(error.contains(words) && error.contains(NAME), "lie {number}, {what}: {error}");
            assert_eq!(error.lines().count(), 1, "{error}");
        }
        assert!(machine.contents(NAME).expect("the image").to_vec() == bytes, "lie {number}: the image was written to");
        // A header that contradicts itself is refused as a whole.
        if !words.starts_with("nb_bitmaps") && *words != "bitmap_directory" {
            assert_eq!(machine.run(first_bytes()).expect("the disk can be read"), 1, "lie {number}");
        }
    }
}

/// "If it is not set, the bitmap must not be used, but both it and its extra data be left as is."
#[test]
fn extra_data_decides_the_use_of_a_bitmap() {
    let good = image();
    let at = places(&good);
    // The names are 3 bytes with 5 of padding: the first entry gets 8 bytes of extra data in place of the second one.
    let with_extra = |flags: u64| {
        let mut bytes = good.clone();
        put(&mut bytes, at.extension, 4, 1);
        put(&mut bytes, at.extension + 8, 8, 40);
        put(&mut bytes, at.entry + 12, 4, flags);
        put(&mut bytes, at.entry + 20, 4, 8);
        bytes[at.entry + 24..at.entry + 40].copy_from_slice(b"whatever\0\0\0\0\0\0\0\0");
        bytes[at.entry + 32..at.entry + 35].copy_from_slice(b"one");
        bytes
    };
    let error = world(&with_extra(2)).run(write_one()).expect_err("enabled, and nobody knows how").to_string();
    assert!(error.contains("'one'") && error.contains("extra data"), "{error}");
    world(&with_extra(0)).run(write_one()).expect("disabled bitmaps are left alone");
    let machine = world(&with_extra(2 | 4));
    machine.run(write_one()).expect("compatible");
    let after = machine.contents(NAME).expect("the image").to_vec();
    assert_eq!(after[at.entry + 24..at.entry + 32], *b"whatever");
}

#[test]
fn a_full_or_failing_disk_leaves_the_bitmaps_as_they_were() {
    let image = image();
    let found = |machine: &World| {
        machine.run(async {
            let node = open(OpenRequest::file(NAME).format("qcow2").writable(true)).await?;
            let mut all = Vec::new();
            for name in ["one", "two"] {
                let bits = node.qcow2().expect("qcow2").bitmap_bits(name).await?;
                all.push(bits.dirty_ranges().collect::<Vec<_>>());
            }
            node.close().await.map(|()| all)
        })
    };
    let before = found(&world(&image)).expect("bitmaps");
    let changed = world(&image);
    changed.run(change_one()).expect("a change");
    let after = found(&changed).expect("bitmaps");
    let mut failed = 0;
    for (kind, errno) in [(OpKind::Write, Errno::ENOSPC), (OpKind::Write, Errno::EIO), (OpKind::Sync, Errno::EIO)] {
        for skip in 0..24 {
            let machine = world(&image);
            machine.add_fault(Fault::new(Effect::Fail(errno)).kind(kind).skip(skip));
            if machine.run(change_one()).is_ok() {
                continue;
            }
            failed += 1;
            let left = Snapshot::from([(NAME.to_owned(), machine.contents(NAME).expect("the image"))]);
            let again = World::with_files(Config::new(2), &left);
            let report = again.run(async {
                let file = File::open(Path::new(NAME), &OpenOptions::default())?;
                check(&file, &CheckOptions::default(), &|_, _| true).await
            });
            let counters = report.expect("a check").counters;
            assert_eq!((counters.corruptions, counters.check_errors), (0, 0), "{kind:?} {errno:?} {skip}");
            let bitmaps = found(&again).expect("bitmaps");
            assert!(bitmaps == before || bitmaps == after, "{kind:?} {errno:?} {skip}: {bitmaps:?}");
        }
    }
    assert!(failed > 12, "only {failed} runs failed");
}

/// A program without bitmaps clears both bits and leaves the extensions: the bitmaps have no user any more, and a
/// repair frees them.
#[test]
fn what_another_program_made_stale_is_freed_by_a_repair() {
    let machine = world(&image());
    machine.run(change_one()).expect("a change");
    machine.run(write_one()).expect("a write");
    let mut bytes = machine.contents(NAME).expect("the image").to_vec();
    put(&mut bytes, 88, 8, 0);
    let machine = world(&bytes);
    machine.run(write_one()).expect("stale bitmaps are nobody's");
    let run = |repair: Repair| {
        let options = CheckOptions { repair, ..CheckOptions::default() };
        machine.run(async {
            let file = File::open(Path::new(NAME), &OpenOptions { write: true, ..OpenOptions::default() })?;
            check(&file, &options, &|_, _| true).await
        })
    };
    assert!(run(Repair::None).expect("a check").counters.leaks > 4);
    let repaired = run(Repair::Leaks).expect("a repair");
    assert!(repaired.is_clean(), "{:?} {:?}", repaired.counters, repaired.notes);
    let folder = temp_dir();
    let path = folder.path().join(NAME);
    std::fs::write(&path, machine.contents(NAME).expect("the image").to_vec()).expect("written");
    Qemu::system().expect_clean(&path);
    let info = Qemu::system().info(&path, "qcow2");
    assert_eq!(info["format-specific"]["data"]["bitmaps"], serde_json::Value::Null, "{info}");
    assert_eq!(machine.run(first_bytes()).expect("the disk can be read"), 1);
}
