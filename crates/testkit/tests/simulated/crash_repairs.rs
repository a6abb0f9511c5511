// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Power cuts while an image of a format without reference counts is repaired or gets another size.

use crate::fresh_images::{
    BASE, IMAGE, Kind, SECTOR, SECTORS, base_value, filled, kinds, opened, qed_over_raw, raw_base,
};
use cowshed_image::{OpenRequest, Preallocation, open};
use cowshed_jobs::check::{self, CheckOptions, Repair};
use cowshed_jobs::{ImageSpec, JobHandle};
use cowshed_simulator::{Config, PageMap, Snapshot, World};
use cowshed_storage::IoBuf;
use cowshed_testkit::crash::{CrashPlan, CrashReport, explore};

const BLOCK: usize = 4096;
/// Blocks whose entries lead out of the file.
const LOST: [usize; 2] = [1, 3];
/// Of a Parallels image: a block that lies on another one.
const TWIN: (usize, usize) = (7, 4);

/// Each block of the disk; `None` where it can't be read.
async fn blocks(kind: Kind) -> Vec<Option<Vec<u8>>> {
    let node = opened(kind.format, false).await;
    let mut blocks = Vec::new();
    for block in 0..SECTORS * SECTOR / BLOCK {
        let (result, bytes) = node.read((block * BLOCK) as u64, IoBuf::zeroed(BLOCK)).await;
        blocks.push(result.is_ok().then(|| bytes.to_vec()));
    }
    node.close().await.expect("it closes");
    blocks
}

/// A QED image that needs a check, or a Parallels image that was not closed: with lost blocks, and space behind all others.
fn damaged(kind: Kind, image: &[u8]) -> Vec<u8> {
    let mut bytes = filled(kind, image, base_value);
    let le64 = |bytes: &[u8], at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight")) as usize;
    let far = 1u64 << 28;
    match kind.format {
        "qed" => {
            bytes[16] |= 2;
            let l1 = le64(&bytes, 40);
            let l2 = le64(&bytes, l1);
            for (block, entry) in LOST.into_iter().zip([far, 123_456]) {
                bytes[l2 + block * 8..l2 + block * 8 + 8].copy_from_slice(&entry.to_le_bytes());
            }
        }
        _ => {
            bytes[44..48].copy_from_slice(&0x746f_6e59_u32.to_le_bytes());
            for block in LOST {
                bytes[64 + block * 4..68 + block * 4].copy_from_slice(&(far as u32).to_le_bytes());
            }
            let (twin, other) = (64 + TWIN.0 * 4, 64 + TWIN.1 * 4);
            bytes.copy_within(other..other + 4, twin);
        }
    }
    bytes.resize(bytes.len() + 3 * BLOCK, 7);
    bytes
}

async fn repair(kind: Kind) -> Result<u64, String> {
    let image = ImageSpec { name: IMAGE.to_owned(), format: Some(kind.format.to_owned()), ..ImageSpec::default() };
    let options = CheckOptions { image, repair: Repair::All, ..CheckOptions::default() };
    let done = check::run(&options, &JobHandle::new()).await.map_err(|error| error.to_string())?;
    done.map(|done| done.report.counters.corruptions).ok_or_else(|| "there is no check".to_owned())
}

#[test]
fn power_cut_during_a_repair_loses_no_more() {
    let mut total = CrashReport::default();
    for (kind, image) in kinds().into_iter().filter(|(kind, _)| ["qed", "parallels"].contains(&kind.format)) {
        let image = damaged(kind, &image);
        for seed in 1..=6 {
            let world = World::new(Config::new(seed));
            world.add_file(IMAGE, PageMap::from_bytes(&image));
            let read = |files: &Snapshot| World::with_files(Config::new(0), files).run(blocks(kind));
            let before = read(&world.snapshot());
            for (block, bytes) in before.iter().enumerate() {
                assert_eq!(bytes.is_none(), LOST.contains(&block), "{} block {block}", kind.format);
            }
            let is_kept = |files: &Snapshot| {
                let now = read(files);
                let is_zero = |bytes: &Option<Vec<u8>>| bytes.as_ref().is_none_or(|bytes| *bytes == [0; BLOCK]);
                let wrong = |block: &usize| match LOST.contains(block) {
                    true => !is_zero(&now[*block]),
                    false => now[*block] != before[*block],
                };
                match (0..now.len()).find(wrong) {
                    Some(block) => Err(format!("block {block} is another one")),
                    None => Ok(()),
                }
            };
            assert_eq!(world.run(repair(kind)), Ok(0), "{}", kind.format);
            let plan = CrashPlan::new(seed);
            let report = explore(&world.trace(), &plan, |case| {
                is_kept(&case.state.files)?;
                // The next repair ends it.
                let again = World::with_files(Config::new(0), &case.state.files);
                match again.run(repair(kind))? {
                    0 => is_kept(&again.snapshot()),
                    left => Err(format!("{left} corruptions are left")),
                }
            });
            total.add(&report.unwrap_or_else(|failure| panic!("{}, seed {seed}: {failure}", kind.format)));
            // The twin has a place of its own, which takes a write alone.
            world.run(async {
                let node = opened(kind.format, true).await;
                node.write((TWIN.0 * BLOCK) as u64, IoBuf::copy_from(&[0xee; BLOCK])).await.0.expect("it is written");
                node.close().await.expect("it closes");
            });
            let after = read(&world.snapshot());
            assert!(after[TWIN.0].as_deref() == Some(&[0xee; BLOCK][..]) && after[TWIN.1] == before[TWIN.1]);
        }
    }
    println!("repairs: {total}");
    assert!(total.distinct() > 10, "{total}");
}

/// Behind the old end the disk is zeroes: neither the longer file below shows, nor the rest of a cluster.
#[test]
fn power_cut_leaves_a_qed_disk_old_or_longer() {
    let (kind, _) = kinds().into_iter().find(|(kind, _)| kind.format == "qed").expect("it is there");
    let mut total = CrashReport::default();
    let end = SECTORS * SECTOR;
    for (seed, old) in [(1, 5 * BLOCK), (2, 5 * BLOCK + SECTOR), (3, end / 2 + 3 * SECTOR)] {
        for new in [old + SECTOR, old + 2 * BLOCK, end, 4 * end] {
            let world = World::new(Config::new(seed));
            world.add_file(IMAGE, PageMap::from_bytes(&qed_over_raw(old as u64)));
            world.add_file(BASE, PageMap::from_bytes(&raw_base()));
            // The last cluster is the image's own.
            world.run(async {
                let node = opened(kind.format, true).await;
                let last = (old - SECTOR) as u64;
                node.write(last, IoBuf::copy_from(&[0xee; SECTOR])).await.0.expect("it is written");
                node.close().await.expect("it closes");
            });
            let before = world.snapshot();
            let read = |files: &Snapshot| {
                let read = World::with_files(Config::new(0), files).run(async {
                    let node = open(OpenRequest::file(IMAGE).format(kind.format)).await?;
                    let (result, bytes) = node.read(0, IoBuf::zeroed(node.size() as usize)).await;
                    result?;
                    node.close().await.map(|()| bytes.to_vec())
                });
                read.map_err(|error| error.to_string())
            };
            let disk = read(&before).expect("it reads");
            let world = World::with_files(Config::new(seed), &before);
            world.run(async {
                let node = opened(kind.format, true).await;
                node.resize(new as u64, Preallocation::Off).await.expect("it grows");
                node.close().await.expect("it closes");
            });
            let position = world.position();
            let report = explore(&world.trace(), &CrashPlan::new(seed), |case| {
                let now = read(&case.state.files)?;
                let mut expected = disk.clone();
                expected.resize(now.len(), 0);
                match now.len() {
                    len if len == old && case.position < position || len == new => match now == expected {
                        true => Ok(()),
                        false => Err("the disk is another one".to_owned()),
                    },
                    len => Err(format!("the disk has {len} bytes")),
                }
            });
            total.add(&report.unwrap_or_else(|failure| panic!("{old} to {new}: {failure}")));
        }
    }
    println!("sizes: {total}");
    assert!(total.distinct() > 20, "{total}");
}
