// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Images made to do harm: a check ends with a verdict or one clear error, in bounded time and memory.

use cowshed_jobs::JobHandle;
use cowshed_jobs::check::{CheckOptions, CheckReport, Repair, check_file};
use cowshed_storage::{File, OpenOptions, rt};
use cowshed_testkit::damage::{COPIED, Victim};
use cowshed_testkit::qemu::{Qemu, temp_dir};
use std::os::unix::fs::FileExt;
use std::path::Path;

fn run(path: &Path, repair: Repair) -> cowshed_types::Result<CheckReport> {
    let file = File::open(path, &OpenOptions { write: repair != Repair::None, ..OpenOptions::default() })?;
    let options = CheckOptions { repair, threads: Some(2), ..CheckOptions::default() };
    rt::block_on(check_file(&file, &options, &JobHandle::new()))
}

/// The expected end.
enum End {
    /// An error that names this.
    Error(&'static str),
    /// Corruptions, and no repair makes the image clean.
    Hopeless,
    /// Corruptions, and a full repair makes it clean.
    Repaired,
}

type Harm = fn(&Victim);

const CASES: &[(&str, Harm, End)] = &[
    ("L1 table of absurd size", |v| v.file.write_all_at(&[0xff; 4], 36).unwrap(), End::Error("l1_size")),
    ("refcount table of absurd size", |v| v.file.write_all_at(&[0xff; 4], 56).unwrap(), End::Error("refcount_table")),
    ("too many snapshots nowhere", |v| v.file.write_all_at(&[0xff; 4], 60).unwrap(), End::Error("snapshots_offset")),
    (
        "too many snapshots",
        |v| {
            v.file.write_all_at(&[0xff; 4], 60).unwrap();
            v.set_word(64, v.header.l1_table_offset);
        },
        End::Hopeless,
    ),
    ("refcount order", |v| v.file.write_all_at(&[7], 99).unwrap(), End::Error("refcount_order")),
    ("cluster bits", |v| v.file.write_all_at(&[40], 23).unwrap(), End::Error("cluster_bits")),
    ("size near 2^63", |v| v.set_word(24, i64::MAX as u64), End::Error("l1_size")),
    ("unknown incompatible feature", |v| v.set_word(72, 1 << 63), End::Error("incompatible")),
    ("empty file", |v| v.file.set_len(0).unwrap(), End::Error("")),
    ("half a header", |v| v.file.set_len(40).unwrap(), End::Error("")),
    ("header alone", |v| v.file.set_len(65536).unwrap(), End::Hopeless),
    ("refcount table near 2^63", |v| v.set_word(48, 1 << 62), End::Error("refcount_table_offset")),
    ("refcount table behind the end", |v| v.set_word(48, 1 << 50), End::Repaired),
    ("refcount table on the header", |v| v.set_word(48, 0), End::Error("refcount_table_offset")),
    ("refcount table on the L1 table", |v| v.set_word(48, v.header.l1_table_offset), End::Repaired),
    ("L1 table behind the end", |v| v.set_word(40, 1 << 50), End::Hopeless),
    ("L1 table as its own L2 table", |v| v.set_word(v.l1_entry(0), COPIED | v.header.l1_table_offset), End::Hopeless),
    ("L2 table as its own data", |v| v.set_word(v.l2_entry(1), COPIED | v.l2_entry(0)), End::Repaired),
    (
        "every entry of the L2 table in one cluster",
        |v| {
            (0..8192).for_each(|n| v.set_word(v.l2_entry(0) + n * 8, COPIED | 0x50000));
        },
        End::Repaired,
    ),
    (
        "refcount block as its own block",
        |v| {
            let block = v.word(v.refcount_table_entry(0));
            (0..8192).for_each(|n| v.set_word(v.refcount_table_entry(n), block));
        },
        End::Repaired,
    ),
    (
        "refcount blocks all over 2^63",
        |v| {
            (0..8192).for_each(|n| v.set_word(v.refcount_table_entry(n), u64::MAX << 16));
        },
        End::Repaired,
    ),
    (
        "compressed data everywhere",
        |v| {
            (0..8192).for_each(|n| v.set_word(v.l2_entry(0) + n * 8, 1 << 62 | 0xff << 54 | 0x4fff0));
        },
        End::Hopeless,
    ),
    (
        "snapshots within the header",
        |v| {
            v.file.write_all_at(&200u32.to_be_bytes(), 60).unwrap();
            v.set_word(64, 0);
        },
        End::Error("snapshots_offset"),
    ),
    (
        "snapshots in a sparse file",
        |v| {
            v.file.set_len(1 << 40).unwrap();
            v.file.write_all_at(&65536u32.to_be_bytes(), 60).unwrap();
            v.set_word(64, 1 << 30);
        },
        // Entries of nothing but zeroes are snapshots of nothing that lack version 3's fields.
        End::Repaired,
    ),
];

#[test]
fn hostile_images() {
    let (qemu, folder) = (Qemu::system(), temp_dir());
    let path = folder.path().join("image.qcow2");
    for (name, harm, end) in CASES {
        qemu.create(&path, "qcow2", "cluster_size=64k", 512 << 20);
        qemu.io_commands(&path, "qcow2", &["write -P 1 0 300k".to_owned()]).expect_ok();
        harm(&Victim::open(&path));
        let verdict = run(&path, Repair::None);
        match (verdict, end) {
            (Err(error), End::Error(part)) => {
                let text = error.to_string();
                assert!(text.contains(part) && text.contains("image.qcow2"), "{name}: {text}");
                let bytes = std::fs::read(&path).expect("image");
                assert!(run(&path, Repair::All).is_err(), "{name}");
                assert!(bytes == std::fs::read(&path).expect("image"), "{name}: the image changed");
            }
            (Ok(report), End::Hopeless | End::Repaired) => {
                assert!(report.counters.corruptions > 0, "{name}: {:?}", report.counters);
                assert!(report.findings.len() <= 100_000);
                let repaired = run(&path, Repair::All).unwrap_or_else(|error| panic!("{name}: {error}"));
                let hope = matches!(end, End::Repaired);
                let what = format!("{name}: {:?} {:?}", repaired.counters, repaired.findings.first());
                assert_eq!(repaired.counters.corruptions == 0, hope, "{what}");
                if hope {
                    qemu.expect_clean(&path);
                }
            }
            (verdict, _) => panic!("{name}: {verdict:?}"),
        }
    }
}
