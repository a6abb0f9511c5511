// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Power cuts while the content of an image changes that others stand on: an overlay shows its own disk, or is refused.

use crate::crash_formats::work;
use crate::fresh_images::{
    BASE, IMAGE, Kind, SECTOR, SECTORS, base_value, empty_stream, filled, kinds, opened, overlays,
};
use cowshed_image::{OpenRequest, open};
use cowshed_jobs::commit::{self, CommitOptions};
use cowshed_jobs::{ImageSpec, JobHandle};
use cowshed_layout::vmdk::{embedded_descriptor, with_parent_cid};
use cowshed_simulator::{Config, PageMap, Snapshot, World};
use cowshed_storage::IoBuf;
use cowshed_testkit::crash::{CrashPlan, CrashReport, explore};
use cowshed_testkit::random::Random;
use cowshed_types::Result;
use futures_util::future::join_all;

/// The used sectors of a disk.
async fn content_of(kind: Kind) -> Result<Vec<u8>> {
    let node = open(OpenRequest::file(IMAGE).format(kind.format)).await?;
    let mut content = Vec::new();
    for part in kind.parts(0..SECTORS) {
        let (result, bytes) = node.read(kind.offset(part.start), IoBuf::zeroed(part.len() * SECTOR)).await;
        result?;
        content.extend_from_slice(&bytes);
    }
    node.close().await.map(|()| content)
}

fn content(files: &Snapshot, kind: Kind) -> std::result::Result<Vec<u8>, String> {
    World::with_files(Config::new(0), files).run(content_of(kind)).map_err(|error| error.to_string())
}

/// The same where a user has noted the content id of the parent: docs/formats/vmdk.md.
fn content_over_parent(files: &Snapshot, kind: Kind) -> std::result::Result<Vec<u8>, String> {
    let left = World::with_files(Config::new(0), files);
    let [image, base] = [IMAGE, BASE].map(|name| left.contents(name).expect("the file").to_vec());
    let descriptor = SECTOR..21 * SECTOR;
    let cid = embedded_descriptor(&base[descriptor.clone()], 1).map_err(|error| error.to_string())?.cid;
    let text = with_parent_cid(&image[descriptor.clone()], cid).ok_or("no room for the id")?;
    let mut image = image;
    image[SECTOR..SECTOR + text.len()].copy_from_slice(&text);
    left.add_file(IMAGE, PageMap::from_bytes(&image));
    left.run(content_of(kind)).map_err(|error| error.to_string())
}

#[test]
fn power_cut_during_a_commit_keeps_the_overlays_disk() {
    let (mut total, mut refused) = (CrashReport::default(), 0);
    for (kind, files) in overlays() {
        for seed in 1..=3 {
            let before = World::new(Config::new(seed));
            for (name, bytes) in &files {
                before.add_file(name, PageMap::from_bytes(bytes));
            }
            work(&before, kind, seed, false);
            let before = before.snapshot();
            let disk = content(&before, kind).expect("the overlay opens");
            let world = World::with_files(Config::new(seed), &before);
            let image =
                ImageSpec { name: IMAGE.to_owned(), format: Some(kind.format.to_owned()), ..ImageSpec::default() };
            let options = CommitOptions { image, ..CommitOptions::default() };
            world.run(async { commit::run(&options, &JobHandle::new()).await }).expect("it is committed");
            let end = world.position();
            let plan = CrashPlan { max_distinct: 250, ..CrashPlan::new(seed) };
            let report = explore(&world.trace(), &plan, |case| {
                let read = match content(&case.state.files, kind) {
                    Err(error) if error.contains("was changed since") && case.position < end => {
                        refused += 1;
                        content_over_parent(&case.state.files, kind)?
                    }
                    read => read?,
                };
                match read == disk {
                    true => Ok(()),
                    false => Err("the overlay shows another disk".to_owned()),
                }
            });
            total.add(&report.unwrap_or_else(|failure| panic!("{}, seed {seed}: {failure}", kind.format)));
        }
    }
    println!("commits: {total}, {refused} refused");
    assert!(total.distinct() > 200 && refused > 0, "{total}, {refused} refused");
}

/// The identity that children of an image compare. For Parallels the place of its dirty bitmaps: they say nothing of changes.
async fn identity_of(kind: Kind) -> Result<String> {
    let node = open(OpenRequest::file(IMAGE).format(kind.format)).await?;
    let mark = node.marks().map(|marks| marks.mark());
    let identity = node.description().and_then(|description| description.identity);
    let mut extension = Vec::new();
    if kind.format == "parallels" {
        let file = node.child(cowshed_image::node::ChildRole::File).expect("a file");
        let (result, bytes) = file.read(56, IoBuf::zeroed(8)).await;
        result?;
        extension = bytes.to_vec();
    }
    node.close().await.map(|()| format!("{identity:?} {mark:?} {extension:?}"))
}

/// A Parallels image with a format extension in its last cluster, which has no features.
fn with_extension(image: &[u8]) -> Vec<u8> {
    let mut bytes = image.to_vec();
    let at = bytes.len().next_multiple_of(4096);
    bytes.resize(at + 4096, 0);
    bytes[at..at + 8].copy_from_slice(&0xab23_4cef_23dc_ea87_u64.to_le_bytes());
    bytes[56..64].copy_from_slice(&(at as u64 / 512).to_le_bytes());
    bytes
}

#[test]
fn power_cut_leaves_no_changed_disk_under_its_old_identity() {
    let mut total = CrashReport::default();
    for (kind, image) in kinds() {
        if !["vdi", "vhdx", "vmdk", "parallels"].contains(&kind.format) {
            continue;
        }
        let image = filled(kind, &image, base_value);
        let image = if kind.format == "parallels" { with_extension(&image) } else { image };
        for seed in 1..=3 {
            let world = World::new(Config::new(seed));
            world.add_file(IMAGE, PageMap::from_bytes(&image));
            let before = world.snapshot();
            let identity = |files: &Snapshot| {
                let left = World::with_files(Config::new(0), files);
                left.run(identity_of(kind)).map_err(|error| error.to_string())
            };
            let (disk, name) = (content(&before, kind).expect("it reads"), identity(&before).expect("it opens"));
            work(&world, kind, seed, false);
            let plan = CrashPlan { max_distinct: 120, ..CrashPlan::new(seed) };
            let report = explore(&world.trace(), &plan, |case| {
                let is_changed = content(&case.state.files, kind)? != disk;
                match is_changed && identity(&case.state.files)? == name {
                    true => Err(format!("another disk is still {name}")),
                    false => Ok(()),
                }
            });
            total.add(&report.unwrap_or_else(|failure| panic!("{}, seed {seed}: {failure}", kind.format)));
        }
    }
    println!("identities: {total}");
    assert!(total.distinct() > 300, "{total}");
}

/// Grains of a stream: their numbers, in several grain tables.
const GRAINS: [u64; 9] = [0, 3, 4, 511, 512, 700, 1023, 1024, 1599];
const GRAIN_BYTES: u64 = 64 << 10;

fn grain(number: u64, seed: u64) -> Vec<u8> {
    let mut random = Random::new(number * 100 + seed);
    match number % 2 {
        0 => (0..GRAIN_BYTES).map(|_| random.next_u64() as u8).collect(),
        _ => vec![number as u8; GRAIN_BYTES as usize],
    }
}

/// The grains of the stream, and what `check` finds in it.
async fn read_stream() -> cowshed_types::Result<(Vec<Vec<u8>>, Vec<String>)> {
    let node = open(OpenRequest::file(IMAGE).format("vmdk")).await?;
    let mut grains = Vec::new();
    for number in GRAINS {
        let (result, bytes) = node.read(number * GRAIN_BYTES, IoBuf::zeroed(GRAIN_BYTES as usize)).await;
        result?;
        grains.push(bytes.to_vec());
    }
    let check = node.check_mapped(4).await.expect("a format with tables")?;
    node.close().await?;
    Ok((grains, check.map(|check| check.findings).unwrap_or_default()))
}

/// The footer at the end of a stream leads to its tables, so it comes last.
#[test]
fn power_cut_leaves_a_stream_empty_whole_or_refused() {
    let (mut total, mut refused, mut whole) = (CrashReport::default(), 0, 0);
    for seed in 1..=4 {
        let world = World::new(Config::new(seed));
        world.add_file(IMAGE, PageMap::from_bytes(&empty_stream(1600 * GRAIN_BYTES)));
        world.run(async {
            let node = opened("vmdk", true).await;
            for group in GRAINS.chunks(1 + seed as usize) {
                let grains = group.iter().map(|number| {
                    let packed = vec![(number * GRAIN_BYTES, IoBuf::copy_from(&grain(*number, seed)))];
                    node.write_compressed(packed)
                });
                for written in join_all(grains).await {
                    written.expect("it is written");
                }
            }
            node.close().await.expect("it closes");
        });
        let end = world.position();
        let plan = CrashPlan { max_distinct: 600, per_change: 40, ..CrashPlan::new(seed) };
        let report = explore(&world.trace(), &plan, |case| {
            let left = World::with_files(Config::new(0), &case.state.files);
            let read = left.run(read_stream());
            match read {
                Err(_) if case.position < end => {
                    refused += 1;
                    Ok(())
                }
                Err(error) => Err(error.to_string()),
                Ok((_, findings)) if !findings.is_empty() => Err(format!("check: {}", findings[0])),
                Ok((grains, _)) => {
                    let is_whole = grains.iter().zip(GRAINS).all(|(bytes, number)| *bytes == grain(number, seed));
                    whole += u64::from(is_whole);
                    let is_empty = grains.iter().all(|bytes| bytes.iter().all(|byte| *byte == 0));
                    match is_whole || is_empty && case.position < end {
                        true => Ok(()),
                        false => Err("a part of the disk looks whole".to_owned()),
                    }
                }
            }
        });
        total.add(&report.unwrap_or_else(|failure| panic!("seed {seed}: {failure}")));
    }
    println!("streams: {total}, {refused} refused, {whole} whole");
    assert!(refused > 30 && whole > 0, "{total}, {refused} refused, {whole} whole");
}

/// A stream that grows behind a flush is led to by its header until its next end is durable.
#[test]
fn power_cut_keeps_the_flushed_grains_of_a_stream() {
    let (mut total, mut refused, mut partly) = (CrashReport::default(), 0, 0);
    for seed in 1..=4 {
        let world = World::new(Config::new(seed));
        world.add_file(IMAGE, PageMap::from_bytes(&empty_stream(1600 * GRAIN_BYTES)));
        let mut flushed = vec![(0, 0)];
        let node = world.run(opened("vmdk", true));
        for (index, group) in GRAINS.chunks(1 + seed as usize % 3).enumerate() {
            world.run(async {
                for number in group {
                    let bytes = IoBuf::copy_from(&grain(*number, seed));
                    node.write(number * GRAIN_BYTES, bytes).await.0.expect("it is written");
                }
            });
            if index % 2 == 0 {
                world.run(node.flush()).expect("it is flushed");
                let count = (index + 1) * (1 + seed as usize % 3);
                flushed.push((world.position(), count.min(GRAINS.len())));
            }
        }
        world.run(node.close()).expect("it closes");
        flushed.push((world.position(), GRAINS.len()));
        let plan = CrashPlan { max_distinct: 600, per_change: 40, ..CrashPlan::new(seed) };
        let report = explore(&world.trace(), &plan, |case| {
            let durable =
                flushed.iter().rfind(|(position, _)| *position <= case.position).map_or(0, |(_, count)| *count);
            let left = World::with_files(Config::new(0), &case.state.files);
            let read = left.run(read_stream());
            match read {
                Err(_) if durable == 0 => {
                    refused += 1;
                    Ok(())
                }
                Err(error) => Err(format!("{durable} grains were flushed: {error}")),
                Ok((_, findings)) if !findings.is_empty() => Err(format!("check: {}", findings[0])),
                Ok((grains, _)) => {
                    partly += u64::from(durable < GRAINS.len());
                    let wrong = GRAINS.iter().zip(&grains).enumerate().find(|(index, (number, bytes))| {
                        let is_empty = *index >= durable && bytes.iter().all(|byte| *byte == 0);
                        !is_empty && **bytes != grain(**number, seed)
                    });
                    match wrong {
                        Some((index, (number, _))) => Err(format!("grain {number}, {index} of {durable} flushed")),
                        None => Ok(()),
                    }
                }
            }
        });
        total.add(&report.unwrap_or_else(|failure| panic!("seed {seed}: {failure}")));
    }
    println!("growing streams: {total}, {refused} refused, {partly} in part");
    assert!(refused > 10 && partly > 100, "{total}, {refused} refused, {partly} in part");
}
