// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Power cuts while images of formats without reference counts are written to. Flushed data read back, a sector that was written since
//! is old or new, and the image takes writes again.

use crate::fresh_images::{
    BASE, IMAGE, Kind, SECTOR, SECTORS, base_value, kinds, opened, overlays, qed_over_raw, split_vmdk, vdi_count,
    vhd_without_end, vhdx_of,
};
use cowshed_image::{OpenRequest, Preallocation, ZeroFlags, open};
use cowshed_simulator::{Config, PageMap, Snapshot, Trace, World};
use cowshed_storage::IoBuf;
use cowshed_testkit::crash::{CrashPlan, CrashReport, explore};
use cowshed_testkit::qemu::{Qemu, temp_dir};
use cowshed_testkit::random::Random;
use futures_util::future::join_all;
use std::ops::Range;

/// A write or a flush, and between which entries of the log it ran.
pub struct Step {
    range: (usize, usize),
    /// Sectors and the byte that they are filled with; `None` for a flush.
    write: Option<(Range<usize>, u8)>,
}

/// Requests in groups that run together, with flushes between some. `packs`: whole blocks are written compressed.
pub fn work(world: &World, kind: Kind, seed: u64, packs: bool) -> Vec<Step> {
    let random = &mut Random::new(seed);
    let mut steps = Vec::new();
    let mut value = 0;
    let node = world.run(opened(kind.format, true));
    for _ in 0..8 {
        let mut group = Vec::new();
        let mut taken = [false; SECTORS];
        for _ in 0..1 + random.below(4) {
            let len = [1, 3, 8, 20][random.below(4) as usize];
            let start = random.below((SECTORS - len) as u64) as usize;
            // Half of the requests are about whole blocks.
            let (start, len) =
                if packs && value % 2 == 0 { (start / 8 * 8, len.next_multiple_of(8)) } else { (start, len) };
            if taken[start..start + len].iter().any(|taken| *taken) {
                continue;
            }
            taken[start..start + len].fill(true);
            value += 1;
            // Some write zeroes.
            group.push((start..start + len, if value % 6 == 5 { 0 } else { value }));
        }
        let begin = world.position();
        world.run(join_all(group.iter().map(|(sectors, value)| {
            let node = &node;
            async move {
                for part in kind.parts(sectors.clone()) {
                    let (at, len) = (kind.offset(part.start), part.len() * SECTOR);
                    let block = kind.block_bytes;
                    let is_whole = at.is_multiple_of(block) && (len as u64).is_multiple_of(block);
                    match value {
                        value if packs && is_whole => {
                            let whole = || IoBuf::copy_from(&vec![*value; block as usize]);
                            let blocks = (at..at + len as u64).step_by(block as usize).map(|at| (at, whole()));
                            node.write_compressed(blocks.collect()).await
                        }
                        0 => node.write_zeroes(at, len as u64, ZeroFlags::default()).await,
                        value => node.write(at, IoBuf::copy_from(&vec![*value; len])).await.0,
                    }
                    .expect("it is written");
                }
            }
        })));
        let range = (begin, world.position());
        steps.extend(group.into_iter().map(|write| Step { range, write: Some(write) }));
        if random.chance(60) {
            let begin = world.position();
            world.run(node.flush()).expect("it is flushed");
            steps.push(Step { range: (begin, world.position()), write: None });
        }
    }
    world.run(node.close()).expect("it closes");
    let end = world.position();
    steps.push(Step { range: (end, end), write: None });
    steps
}

/// The allowed values of each sector after a cut at `position`, where it held `before`.
fn allowed(steps: &[Step], position: usize, before: fn(usize) -> u8) -> Vec<Vec<u8>> {
    let mut allowed: Vec<Vec<u8>> = (0..SECTORS).map(|sector| vec![before(sector)]).collect();
    let flushed = steps.iter().rfind(|step| step.write.is_none() && step.range.1 <= position);
    let durable = flushed.map_or(0, |step| step.range.0);
    for step in steps.iter().filter(|step| step.range.0 < position || step.range.1 <= position) {
        let Some((sectors, value)) = &step.write else { continue };
        for sector in sectors.clone() {
            if flushed.is_some() && step.range.1 <= durable {
                allowed[sector] = vec![*value];
            } else {
                allowed[sector].push(*value);
            }
        }
    }
    allowed
}

/// Reads the whole disk and compares it with the allowed values.
fn judge(left: &World, kind: Kind, allowed: &[Vec<u8>]) -> Result<Vec<u8>, String> {
    let content = left.run(async {
        let node = opened(kind.format, false).await;
        let mut content = Vec::new();
        for part in kind.parts(0..SECTORS) {
            let (result, bytes) = node.read(kind.offset(part.start), IoBuf::zeroed(part.len() * SECTOR)).await;
            result.map_err(|error| error.to_string())?;
            content.extend_from_slice(&bytes);
        }
        let check = node.check_mapped(4).await.expect("a format with tables").map_err(|error| error.to_string())?;
        let findings = check.map(|check| check.findings).unwrap_or_default();
        // The count may be too high, and the mark of a writer may stay: docs/formats/block-formats.md. The second copy of a VMDK's table may
        // lag behind the first, which counts: docs/formats/vmdk.md.
        let allowed = ["blocks_allocated is", "was not closed correctly", "the copy of grain table"];
        if let Some(finding) = findings.iter().find(|finding| !allowed.iter().any(|text| finding.contains(text))) {
            return Err(format!("check: {finding}"));
        }
        node.close().await.map_err(|error| error.to_string())?;
        Ok(content)
    })?;
    for (sector, bytes) in content.chunks(SECTOR).enumerate() {
        if !allowed[sector].iter().any(|value| bytes.iter().all(|byte| byte == value)) {
            return Err(format!("sector {sector} begins with {} and may hold {:?}", bytes[0], allowed[sector]));
        }
    }
    Ok(content)
}

/// Another write to the disk after the cut: it goes where it belongs, and nothing else changes.
fn write_again(left: &World, kind: Kind, content: &[u8], seed: u64) -> Result<(), String> {
    let mut expected = content.to_vec();
    let first = Random::new(seed).below(SECTORS as u64 - 20) as usize;
    expected[first * SECTOR..(first + 20) * SECTOR].fill(0xee);
    left.run(async {
        let node = opened(kind.format, true).await;
        for part in kind.parts(first..first + 20) {
            node.write(kind.offset(part.start), IoBuf::copy_from(&vec![0xee; part.len() * SECTOR])).await.0?;
        }
        node.close().await
    })
    .map_err(|error| format!("a write afterwards: {error}"))?;
    let allowed: Vec<Vec<u8>> = expected.chunks(SECTOR).map(|bytes| vec![bytes[0]]).collect();
    judge(left, kind, &allowed).map(drop).map_err(|complaint| format!("after another write: {complaint}"))
}

/// The sectors as qemu-img reads them. It carries a log out first, as it does for a machine that starts again.
fn content_by_qemu(kind: Kind, seed: u64, path: &std::path::Path) -> Vec<u8> {
    let qemu = Qemu::for_seed(seed);
    if ["vhdx", "parallels"].contains(&kind.format) {
        qemu.img(["check", "-q", "-r", "all", "-f", kind.format, &path.to_string_lossy()]);
    }
    let disk = qemu.content(path, kind.format);
    kind.parts(0..SECTORS)
        .flat_map(|part| {
            let start = kind.offset(part.start) as usize;
            disk[start..start + part.len() * SECTOR].to_vec()
        })
        .collect()
}

/// Cuts the power of writes to an image whose sectors hold `before`.
fn survive(kind: Kind, files: &[(String, Vec<u8>)], before: fn(usize) -> u8, packs: bool) -> CrashReport {
    let mut total = CrashReport::default();
    let folder = temp_dir();
    for seed in 1..=3 {
        let world = World::new(Config::new(seed));
        for (name, bytes) in files {
            world.add_file(name, PageMap::from_bytes(bytes));
        }
        let steps = work(&world, kind, seed, packs && seed % 2 == 0);
        let plan = CrashPlan { max_distinct: 250, ..CrashPlan::new(seed) };
        let report = explore(&world.trace(), &plan, |case| {
            let left = World::with_files(Config::new(0), &case.state.files);
            if kind.format == "vdi" {
                vdi_count(&left.contents(IMAGE).ok_or("the file is gone")?.to_vec())?;
            }
            let content = judge(&left, kind, &allowed(&steps, case.position, before))?;
            if kind.format != "vdi" && case.number % 60 == 0 {
                for (name, _) in files {
                    let bytes = left.contents(name).ok_or("a file is gone")?.to_vec();
                    std::fs::write(folder.path().join(name), bytes).map_err(|error| error.to_string())?;
                }
                let path = folder.path().join(IMAGE);
                if content_by_qemu(kind, case.number as u64, &path) != content {
                    return Err("qemu-img reads another disk".to_owned());
                }
            }
            write_again(&left, kind, &content, case.number as u64)
        });
        total.add(&report.unwrap_or_else(|failure| panic!("{}, seed {seed}: {failure}", kind.format)));
    }
    total
}

#[test]
fn formats_without_reference_counts_survive_power_cuts() {
    let mut total = CrashReport::default();
    let single = kinds().into_iter().map(|(kind, image)| (kind, vec![(IMAGE.to_owned(), image)]));
    for (kind, files) in single.chain([split_vmdk(), vhd_without_end()]) {
        total.add(&survive(kind, &files, |_| 0, kind.format == "qcow"));
    }
    println!("formats: {total}");
    assert!(total.distinct() > 1800, "{total}");
}

/// A new block takes the rest of its content from the file below.
#[test]
fn overlays_without_reference_counts_survive_power_cuts() {
    let mut total = CrashReport::default();
    for (kind, files) in overlays() {
        total.add(&survive(kind, &files, base_value, false));
    }
    println!("overlays: {total}");
    assert!(total.distinct() > 700, "{total}");
}

/// Names within the first sector and beyond it, and none.
#[test]
fn power_cut_leaves_the_old_backing_name_or_the_new() {
    let (long, longer) = ("d/".repeat(300), "e".repeat(1023));
    let names = [None, Some("a.raw"), Some(&long[..]), Some(&longer[..]), Some("b.raw"), Some(&longer[..]), None];
    let (kind, image) = kinds().into_iter().find(|(kind, _)| kind.format == "qed").expect("it is there");
    let mut total = CrashReport::default();
    for seed in 1..=4 {
        let world = World::new(Config::new(seed));
        world.add_file(IMAGE, PageMap::from_bytes(&image));
        let node = world.run(opened(kind.format, true));
        let mut ends = vec![world.position()];
        for name in &names[1..] {
            world.run(node.change_backing_file(*name, Some("raw"))).expect("it is renamed");
            ends.push(world.position());
        }
        world.run(node.close()).expect("it closes");
        let plan = CrashPlan { max_distinct: 400, ..CrashPlan::new(seed) };
        let report = explore(&world.trace(), &plan, |case| {
            let left = World::with_files(Config::new(0), &case.state.files);
            let request = OpenRequest::file(IMAGE).format(kind.format).no_backing().writable(true);
            let node = left.run(open(request)).map_err(|error| error.to_string())?;
            let name = node.backing_name().and_then(|backing| backing.name());
            left.run(node.close()).map_err(|error| error.to_string())?;
            let durable = ends.iter().rposition(|end| *end <= case.position).unwrap_or(0);
            let allowed = &names[durable..(durable + 2).min(names.len())];
            match allowed.contains(&name.as_deref()) {
                true => Ok(()),
                false => Err(format!("the name is {name:?} and may be one of {allowed:?}")),
            }
        });
        total.add(&report.unwrap_or_else(|failure| panic!("seed {seed}: {failure}")));
    }
    println!("names: {total}");
    assert!(total.distinct() > 15, "{total}");
}

/// A log that is carried out when an image is opened is there until its changes are.
#[test]
fn power_cut_during_log_replay_keeps_the_disk() {
    let (kind, image) = kinds().into_iter().find(|(kind, _)| kind.format == "vhdx").expect("it is there");
    let (mut total, mut with_log) = (CrashReport::default(), 0);
    for seed in 1..=3 {
        let world = World::new(Config::new(seed));
        world.add_file(IMAGE, PageMap::from_bytes(&image));
        work(&world, kind, seed, false);
        let plan = CrashPlan { max_distinct: 150, ..CrashPlan::new(seed) };
        let report = explore(&world.trace(), &plan, |case| {
            let read = |files: &Snapshot| {
                let left = World::with_files(Config::new(0), files);
                let read = left.run(async {
                    let node = opened(kind.format, false).await;
                    let (result, bytes) = node.read(0, IoBuf::zeroed(node.size() as usize)).await;
                    result?;
                    node.close().await.map(|()| bytes.to_vec())
                });
                read.map_err(|error| error.to_string())
            };
            let content = read(&case.state.files)?;
            let again = World::with_files(Config::new(case.number as u64), &case.state.files);
            let opened = again.run(async { opened(kind.format, true).await.close().await });
            opened.map_err(|error| error.to_string())?;
            if again.trace().log.is_empty() {
                return Ok(());
            }
            with_log += 1;
            let plan = CrashPlan { max_distinct: 12, ..CrashPlan::new(case.number as u64) };
            let inner = explore(&again.trace(), &plan, |case| match read(&case.state.files)? == content {
                true => Ok(()),
                false => Err("the disk is another one".to_owned()),
            });
            inner.map(drop).map_err(|failure| format!("the second cut: {failure}"))
        });
        total.add(&report.unwrap_or_else(|failure| panic!("seed {seed}: {failure}")));
    }
    println!("logs: {total}, {with_log} carried out");
    assert!(with_log > 20, "{total}, {with_log} carried out");
}

/// The log has 1 MiB. Its first entry takes 12 KiB here and the others 8 KiB, so that one of them lies at both ends.
#[test]
fn power_cut_while_a_log_wraps_keeps_flushed_data() {
    const BEFORE: u64 = 122;
    const LAST: u64 = 133;
    let world = World::new(Config::new(1));
    world.add_file(IMAGE, PageMap::from_bytes(&vhdx_of(700 << 20)));
    let node = world.run(opened("vhdx", true));
    let write = |block: u64| {
        let filled = IoBuf::copy_from(&[block as u8 + 1; SECTOR]);
        world.run(async { node.write(block << 20, filled).await.0 }).expect("it is written");
    };
    let flush = || world.run(node.flush()).expect("it is flushed");
    write(0);
    // Its entry is in another sector of the table.
    write(600);
    flush();
    for block in 1..=BEFORE {
        write(block);
        flush();
    }
    let (start, before) = (world.position(), world.snapshot());
    let mut ends = Vec::new();
    for block in BEFORE + 1..=LAST {
        write(block);
        flush();
        ends.push(world.position() - start);
    }
    let trace = world.trace();
    let files = before.into_iter().map(|(name, contents)| (name, Some(contents))).collect();
    let trace = Trace { files, log: trace.log[start..].to_vec(), ..trace };
    let plan = CrashPlan { max_distinct: 600, ..CrashPlan::new(1) };
    let report = explore(&trace, &plan, |case| {
        let left = World::with_files(Config::new(0), &case.state.files);
        let durable = BEFORE + ends.iter().filter(|end| **end <= case.position).count() as u64;
        // In memory first, then in the file.
        for writable in [false, true] {
            let read = left.run(async {
                let node = open(OpenRequest::file(IMAGE).format("vhdx").writable(writable)).await?;
                let mut first = Vec::new();
                for block in 0..=LAST {
                    let (result, bytes) = node.read(block << 20, IoBuf::zeroed(SECTOR)).await;
                    result?;
                    first.push(bytes.to_vec());
                }
                node.close().await.map(|()| first)
            });
            let read = read.map_err(|error| error.to_string())?;
            for (block, bytes) in read.iter().enumerate() {
                let is_written = bytes.iter().all(|byte| *byte == block as u8 + 1);
                let is_new = block as u64 > durable && bytes.iter().all(|byte| *byte == 0);
                if !is_written && !is_new {
                    return Err(format!("block {block} begins with {}, {durable} are flushed", bytes[0]));
                }
            }
        }
        Ok(())
    });
    let report = report.unwrap_or_else(|failure| panic!("{failure}"));
    println!("log that goes round: {report}");
    // The world and the plan have fixed seeds: it is 45 in each run.
    assert!(report.distinct() > 30, "{report}");
    world.run(node.close()).expect("it closes");
}

/// The map of a VDI disk has room for more entries, then moves into the place of one block, then of three.
#[test]
fn power_cut_leaves_a_grown_vdi_whole() {
    const BLOCK: u64 = 4096;
    const SIZES: [u64; 4] = [24, 100, 300, 3000];
    let (_, image) = kinds().into_iter().find(|(kind, _)| kind.format == "vdi").expect("it is there");
    let mut total = CrashReport::default();
    for (seed, is_fixed) in [(1, false), (2, false), (3, true)] {
        let world = World::new(Config::new(seed));
        let mut image = image.clone();
        image[76] = if is_fixed { 2 } else { 1 };
        world.add_file(IMAGE, PageMap::from_bytes(&image));
        let request = || OpenRequest::file(IMAGE).format("vdi").writable(true).for_resize();
        let node = world.run(open(request())).expect("it opens");
        let random = &mut Random::new(seed);
        // Where each size counts, and each written block: begun, durable, what it is.
        let mut sizes = vec![(0, 0, SIZES[0])];
        let mut blocks: Vec<(usize, usize, u64)> = Vec::new();
        for size in SIZES {
            let begun = world.position();
            if size > SIZES[0] {
                world.run(node.resize(size * BLOCK, Preallocation::Off)).expect("it grows");
                sizes.push((begun, world.position(), size));
            }
            let begun = world.position();
            let mut new: Vec<u64> = [0, 1, size - 1, random.below(size), random.below(size)].to_vec();
            new.retain(|block| blocks.iter().all(|(_, _, known)| known != block));
            new.sort_unstable();
            new.dedup();
            for block in &new {
                let bytes = IoBuf::copy_from(&[*block as u8 | 1; BLOCK as usize]);
                world.run(async { node.write(block * BLOCK, bytes).await.0 }).expect("it is written");
            }
            world.run(node.flush()).expect("it is flushed");
            blocks.extend(new.iter().map(|block| (begun, world.position(), *block)));
        }
        world.run(node.close()).expect("it closes");
        let plan = CrashPlan { max_distinct: 500, ..CrashPlan::new(seed) };
        let report = explore(&world.trace(), &plan, |case| {
            let left = World::with_files(Config::new(0), &case.state.files);
            vdi_count(&left.contents(IMAGE).ok_or("the file is gone")?.to_vec())?;
            let read = || {
                left.run(async {
                    let node = opened("vdi", false).await;
                    let (result, bytes) = node.read(0, IoBuf::zeroed(node.size() as usize)).await;
                    result?;
                    node.close().await.map(|()| bytes.to_vec())
                })
            };
            let disk = read().map_err(|error| error.to_string())?;
            let is_size = |(begun, end, size): &(usize, usize, u64)| {
                let is_later = sizes.iter().any(|(_, later, other)| other > size && *later <= case.position);
                size * BLOCK == disk.len() as u64 && (*begun < case.position || *end <= case.position) && !is_later
            };
            if !sizes.iter().any(is_size) {
                return Err(format!("the disk has {} blocks", disk.len() as u64 / BLOCK));
            }
            for (number, bytes) in disk.chunks(BLOCK as usize).enumerate() {
                let known = blocks.iter().find(|(begun, _, block)| *block == number as u64 && *begun < case.position);
                let is_durable = known.is_some_and(|(_, end, _)| *end <= case.position);
                let value = known.map_or(0, |(_, _, block)| *block as u8 | 1);
                let is_allowed = |sector: &[u8]| {
                    sector.iter().all(|byte| *byte == value) || !is_durable && sector.iter().all(|byte| *byte == 0)
                };
                if !bytes.chunks(SECTOR).all(is_allowed) {
                    return Err(format!("block {number} begins with {}, and is to be {value}", bytes[0]));
                }
            }
            // It grows, and takes writes.
            let mut expected = disk;
            expected.resize(4000 * BLOCK as usize, 0);
            expected[..SECTOR].fill(0xee);
            expected[3999 * BLOCK as usize..].fill(0xdd);
            let again = left.run(async {
                let node = open(request()).await?;
                node.resize(4000 * BLOCK, Preallocation::Off).await?;
                node.write(0, IoBuf::copy_from(&[0xee; SECTOR])).await.0?;
                node.write(3999 * BLOCK, IoBuf::copy_from(&[0xdd; BLOCK as usize])).await.0?;
                node.close().await
            });
            again.map_err(|error| format!("afterwards: {error}"))?;
            match read().map_err(|error| error.to_string())? == expected {
                true => Ok(()),
                false => Err("the disk is another one after it has grown again".to_owned()),
            }
        });
        total.add(&report.unwrap_or_else(|failure| panic!("seed {seed}: {failure}")));
    }
    println!("grown: {total}");
    assert!(total.distinct() > 100, "{total}");
}

/// A log names a length of the file: a file that is shorter is refused. Other requests lengthen it while a flush runs.
#[test]
fn power_cut_leaves_files_as_long_as_their_logs_know() {
    let mut total = CrashReport::default();
    for seed in 1..=6 {
        let world = World::new(Config::new(seed));
        world.add_file(IMAGE, PageMap::from_bytes(&vhdx_of(700 << 20)));
        let node = world.run(opened("vhdx", true));
        let write = async |block: u64| {
            node.write(block << 20, IoBuf::copy_from(&[1; SECTOR])).await.0.expect("it is written");
        };
        world.run(async {
            let flushes = async {
                for block in 600..604 {
                    write(block).await;
                    node.flush().await.expect("it is flushed");
                }
            };
            // The file grows by 16 blocks at once.
            let writes = async |first: u64| {
                for block in first..first + 40 {
                    write(block).await;
                }
            };
            futures_util::join!(flushes, writes(0), writes(100), writes(200));
        });
        let plan = CrashPlan { max_distinct: 300, ..CrashPlan::new(seed) };
        let report = explore(&world.trace(), &plan, |case| {
            let left = World::with_files(Config::new(0), &case.state.files);
            let request = || OpenRequest::file(IMAGE).format("vhdx");
            let read = left.run(async { open(request()).await?.close().await });
            read.map_err(|error| error.to_string())
        });
        total.add(&report.unwrap_or_else(|failure| panic!("seed {seed}: {failure}")));
        world.run(node.close()).expect("it closes");
    }
    println!("lengths: {total}");
    assert!(total.distinct() > 300, "{total}");
}

/// Entries that only mark zeroes wait for a flush in memory, and not without bound.
#[test]
fn zero_writes_reach_the_tables_without_a_flush() {
    const SIZE: u64 = 512 << 20;
    let world = World::new(Config::new(1));
    world.add_file(IMAGE, PageMap::from_bytes(&qed_over_raw(SIZE)));
    world.add_file(BASE, PageMap::from_bytes(&[7; SECTOR]));
    let node = world.run(opened("qed", true));
    let before = world.contents(IMAGE).expect("the file").to_vec();
    world.run(node.write_zeroes(0, SIZE / 4, ZeroFlags::default())).expect("zeroes are written");
    assert_eq!(world.contents(IMAGE).expect("the file").to_vec()[4096..8192], before[4096..8192], "the L1 table");
    world.run(node.write_zeroes(SIZE / 4, SIZE / 4 * 3, ZeroFlags::default())).expect("zeroes are written");
    assert_ne!(world.contents(IMAGE).expect("the file").to_vec()[4096..8192], before[4096..8192], "the L1 table");
    world.run(node.close()).expect("it closes");
}
