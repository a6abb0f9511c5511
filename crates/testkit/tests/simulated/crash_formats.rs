// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Power cuts while images of formats without a journal are written to. Flushed data read back, a sector that was written since
//! is old or new, and the image takes writes again.

use cowshed_image::{Node, OpenRequest, ZeroFlags, open};
use cowshed_layout::fresh::FreshFile;
use cowshed_layout::vdi::NewVdi;
use cowshed_layout::vpc::{self, NewVpc};
use cowshed_storage::IoBuf;
use cowshed_storage::sim::{Config, PageMap, World};
use cowshed_testkit::crash::{CrashPlan, CrashReport, explore};
use cowshed_testkit::qemu::{Qemu, temp_dir};
use cowshed_testkit::random::Random;
use futures_util::future::join_all;
use std::sync::Arc;

const IMAGE: &str = "disk";
const SECTOR: usize = 512;
/// A disk of 24 blocks.
const SECTORS: usize = 192;
const BLOCK_BYTES: u32 = 4096;

/// The bytes of a new file.
fn bytes_of(fresh: &FreshFile) -> Vec<u8> {
    let mut bytes = vec![0; fresh.len as usize];
    for (at, piece) in &fresh.pieces {
        piece.fill(0, &mut bytes[*at as usize..(at + piece.len()) as usize]);
    }
    if let Some((at, mark)) = &fresh.mark {
        bytes[*at as usize..*at as usize + mark.len()].copy_from_slice(mark);
    }
    bytes
}

/// A VDI image with small blocks.
fn vdi() -> Vec<u8> {
    let size = SECTORS as u64 * SECTOR as u64;
    let mut bytes = bytes_of(&NewVdi { size, is_fixed: false, uuids: [[1; 16], [2; 16]] }.lay_out().expect("a layout"));
    let blocks = size as u32 / BLOCK_BYTES;
    bytes[376..380].copy_from_slice(&BLOCK_BYTES.to_le_bytes());
    bytes[384..388].copy_from_slice(&blocks.to_le_bytes());
    bytes[512..512 + blocks as usize * 4].fill(0xff);
    bytes
}

/// A dynamic VHD image with small blocks.
fn vpc() -> Vec<u8> {
    let size = SECTORS as u64 * SECTOR as u64;
    let new = NewVpc { size, is_fixed: false, force_size: true, made_at: 1, uuid: [3; 16] };
    let mut bytes = bytes_of(&new.lay_out().expect("a layout"));
    bytes[512 + 28..512 + 32].copy_from_slice(&(size as u32 / BLOCK_BYTES).to_be_bytes());
    bytes[512 + 32..512 + 36].copy_from_slice(&BLOCK_BYTES.to_be_bytes());
    let sum = vpc::checksum(&bytes[512..1536], 36);
    bytes[512 + 36..512 + 40].copy_from_slice(&sum.to_be_bytes());
    bytes
}

/// A write or a flush, and between which entries of the log it ran.
struct Step {
    range: (usize, usize),
    /// Sectors and the byte that they are filled with; `None` for a flush.
    write: Option<(std::ops::Range<usize>, u8)>,
}

async fn opened(format: &str, writable: bool) -> Arc<Node> {
    open(OpenRequest::file(IMAGE).format(format).writable(writable)).await.expect("the image opens")
}

/// Requests in groups that run together, with flushes between some.
fn work(world: &World, format: &str, seed: u64) -> Vec<Step> {
    let random = &mut Random::new(seed);
    let mut steps = Vec::new();
    let mut value = 0;
    let node = world.run(opened(format, true));
    for _ in 0..8 {
        let mut group = Vec::new();
        let mut taken = [false; SECTORS];
        for _ in 0..1 + random.below(4) {
            let len = [1, 3, 8, 20][random.below(4) as usize];
            let start = random.below((SECTORS - len) as u64) as usize;
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
            let (node, at, len) = (&node, sectors.start * SECTOR, sectors.len() * SECTOR);
            async move {
                match value {
                    0 => node.write_zeroes(at as u64, len as u64, ZeroFlags::default()).await,
                    value => node.write(at as u64, IoBuf::copy_from(&vec![*value; len])).await.0,
                }
                .expect("it is written");
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

/// What each sector may hold after a cut at `position`.
fn allowed(steps: &[Step], position: usize) -> Vec<Vec<u8>> {
    let mut allowed = vec![vec![0]; SECTORS];
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

/// Reads the whole disk and holds it against what is allowed.
fn judge(left: &World, format: &str, allowed: &[Vec<u8>]) -> Result<Vec<u8>, String> {
    let content = left.run(async {
        let node = opened(format, false).await;
        let (result, bytes) = node.read(0, IoBuf::zeroed(SECTORS * SECTOR)).await;
        result.map_err(|error| error.to_string())?;
        let check = node.check_mapped(4).await.expect("a format with tables").map_err(|error| error.to_string())?;
        let findings = check.map(|check| check.findings).unwrap_or_default();
        // The count may be too high: docs/formats/block-formats.md.
        if let Some(finding) = findings.iter().find(|finding| !finding.contains("blocks_allocated is")) {
            return Err(format!("check: {finding}"));
        }
        node.close().await.map_err(|error| error.to_string())?;
        Ok(bytes.to_vec())
    })?;
    for (sector, bytes) in content.chunks(SECTOR).enumerate() {
        if !allowed[sector].iter().any(|value| bytes.iter().all(|byte| byte == value)) {
            return Err(format!("sector {sector} begins with {} and may hold {:?}", bytes[0], allowed[sector]));
        }
    }
    Ok(content)
}

/// Another write to what is left: it goes where it belongs, and nothing else changes.
fn write_again(left: &World, format: &str, content: &[u8], seed: u64) -> Result<(), String> {
    let mut expected = content.to_vec();
    let at = Random::new(seed).below(SECTORS as u64 - 20) as usize * SECTOR;
    expected[at..at + 20 * SECTOR].fill(0xee);
    left.run(async {
        let node = opened(format, true).await;
        node.write(at as u64, IoBuf::copy_from(&expected[at..at + 20 * SECTOR])).await.0?;
        node.close().await
    })
    .map_err(|error| format!("a write afterwards: {error}"))?;
    let allowed: Vec<Vec<u8>> = expected.chunks(SECTOR).map(|bytes| vec![bytes[0]]).collect();
    judge(left, format, &allowed).map(drop).map_err(|complaint| format!("after another write: {complaint}"))
}

#[test]
fn formats_without_a_journal_survive_power_cuts() {
    let mut total = CrashReport::default();
    let folder = temp_dir();
    for (format, image) in [("vdi", vdi()), ("vpc", vpc())] {
        for seed in 1..=3 {
            let world = World::new(Config::new(seed));
            world.add_file(IMAGE, PageMap::from_bytes(&image));
            let steps = work(&world, format, seed);
            let plan = CrashPlan { max_distinct: 250, ..CrashPlan::new(seed) };
            let report = explore(&world.trace(), &plan, |case| {
                let left = World::with_files(Config::new(0), &case.state.files);
                let content = judge(&left, format, &allowed(&steps, case.position))?;
                if format == "vpc" && case.number % 60 == 0 {
                    let path = folder.path().join("left");
                    let bytes = left.contents(IMAGE).ok_or("the file is gone")?.to_vec();
                    std::fs::write(&path, bytes).map_err(|error| error.to_string())?;
                    if Qemu::for_seed(case.number as u64).content(&path, format) != content {
                        return Err("qemu-img reads another disk".to_owned());
                    }
                }
                write_again(&left, format, &content, case.number as u64)
            });
            total.add(&report.unwrap_or_else(|failure| panic!("{format}, seed {seed}: {failure}")));
        }
    }
    println!("formats: {total}");
    assert!(total.distinct() > 600, "{total}");
}
