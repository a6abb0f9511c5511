// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Images of formats without reference counts on a full disk: a write fails, and all else goes on.

use crate::fresh_images::{IMAGE, Kind, SECTOR, SECTORS, kinds, opened, vdi_count, wide_vmdk};
use cowshed_simulator::{Config, PageMap, World};
use cowshed_storage::IoBuf;
use cowshed_testkit::random::Random;
use cowshed_types::ErrorKind;
use futures_util::future::join_all;

const PAGE_BYTES: u64 = 4096;

/// The values that a sector may have: one, or several where a write to it failed.
type Model = Vec<Vec<u8>>;

/// Requests in groups that run together; each group is flushed. Returns how many of them failed.
fn fill(world: &World, kind: Kind, model: &mut Model, random: &mut Random) -> Result<u32, String> {
    let mut failures = 0;
    let node = world.run(opened(kind.format, true));
    // Sectors that have space in the file.
    let mut written = [false; SECTORS];
    for round in 0..14u8 {
        let mut group = Vec::new();
        let mut taken = [false; SECTORS];
        for index in 0..1 + random.below(4) as u8 {
            let len = [1, 3, 8, 20][random.below(4) as usize];
            let start = random.below((SECTORS - len) as u64) as usize;
            for part in kind.parts(start..start + len) {
                if taken[part.clone()].iter().all(|taken| !taken) {
                    taken[part.clone()].fill(true);
                    group.push((part, round * 8 + index + 1));
                }
            }
        }
        let results = world.run(join_all(group.iter().map(|(part, value)| {
            let (node, at) = (&node, kind.offset(part.start));
            let bytes = IoBuf::copy_from(&vec![*value; part.len() * SECTOR]);
            async move { node.write(at, bytes).await.0 }
        })));
        for ((part, value), result) in group.into_iter().zip(results) {
            match result {
                Ok(()) => {
                    written[part.clone()].fill(true);
                    model[part].fill(vec![value]);
                }
                Err(error) if error.kind() != ErrorKind::NoSpace => return Err(format!("a write: {error}")),
                Err(error) if written[part.clone()].iter().all(|written| *written) => {
                    return Err(format!("round {round}, a write to what has space: {error}"));
                }
                Err(_) => {
                    failures += 1;
                    model[part].iter_mut().for_each(|values| values.push(value));
                }
            }
        }
        world.run(node.flush()).map_err(|error| format!("round {round}, a flush: {error}"))?;
    }
    world.run(node.close()).map_err(|error| format!("a close: {error}"))?;
    Ok(failures)
}

/// Holds a disk against the model, and looks at its tables.
fn judge(world: &World, kind: Kind, model: &Model) -> Result<(), String> {
    if kind.format == "vdi" {
        vdi_count(&world.contents(IMAGE).ok_or("the file is gone")?.to_vec())?;
    }
    world.run(async {
        let node = opened(kind.format, false).await;
        for part in kind.parts(0..SECTORS) {
            let (result, bytes) = node.read(kind.offset(part.start), IoBuf::zeroed(part.len() * SECTOR)).await;
            result.map_err(|error| error.to_string())?;
            for (sector, bytes) in part.zip(bytes.chunks(SECTOR)) {
                if !model[sector].iter().any(|value| bytes.iter().all(|byte| byte == value)) {
                    return Err(format!("sector {sector} begins with {}, not {:?}", bytes[0], model[sector]));
                }
            }
        }
        let check = node.check_mapped(4).await.expect("a format with tables").map_err(|error| error.to_string())?;
        let findings = check.map(|check| check.findings).unwrap_or_default();
        // Blocks that failed may leave room between others.
        match findings.iter().find(|finding| !finding.contains("blocks_allocated is")) {
            Some(finding) => Err(format!("check: {finding}")),
            None => node.close().await.map_err(|error| error.to_string()),
        }
    })
}

#[test]
fn a_full_disk_fails_writes_to_new_blocks_and_nothing_else() {
    for (kind, image) in kinds().into_iter().chain([wide_vmdk()]) {
        let mut failures = 0;
        for seed in 1..=60 {
            let random = &mut Random::new(seed);
            let world = World::new(Config::new(seed));
            world.add_file(IMAGE, PageMap::from_bytes(&image));
            let used = PageMap::from_bytes(&image).allocated_bytes();
            let room = random.below(24) * PAGE_BYTES + if kind.format == "vhdx" { 1 << 20 } else { 0 };
            world.set_capacity(Some(used + room));
            let mut model = vec![vec![0]; SECTORS];
            let result = fill(&world, kind, &mut model, random);
            let result = result.and_then(|failed| judge(&world, kind, &model).map(|()| failed));
            failures += result.unwrap_or_else(|complaint| panic!("{}, seed {seed}: {complaint}", kind.format));
            // With room again the disk takes everything.
            world.set_capacity(None);
            let result = fill(&world, kind, &mut model, random).and_then(|_| judge(&world, kind, &model));
            result.unwrap_or_else(|complaint| panic!("{}, seed {seed}, with room again: {complaint}", kind.format));
        }
        assert!(failures > 100, "{}: only {failures} requests failed", kind.format);
    }
}

#[test]
fn grain_beyond_the_entry_fails_only_its_write() {
    let (kind, image) = wide_vmdk();
    let mut file = PageMap::from_bytes(&image);
    // Room for one more grain: an entry is the number of a sector, in 32 bits.
    file.set_len((u64::from(u32::MAX) + 1) * SECTOR as u64 - (64 << 10));
    let world = World::new(Config::new(1));
    world.add_file(IMAGE, file);
    world.run(async {
        let node = opened(kind.format, true).await;
        node.write(kind.offset(0), IoBuf::copy_from(&[1; SECTOR])).await.0.expect("the last grain");
        let error =
            node.write(kind.offset(8), IoBuf::copy_from(&[2; SECTOR])).await.0.expect_err("no entry can be made");
        assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
        node.write(kind.offset(1), IoBuf::copy_from(&[3; SECTOR])).await.0.expect("to the grain that is there");
        node.flush().await.expect("nothing waits for an entry that can't be made");
        node.close().await.expect("it closes");
    });
    let mut model = vec![vec![0]; SECTORS];
    (model[0], model[1]) = (vec![1], vec![3]);
    judge(&world, kind, &model).expect("what was written reads back");
}
