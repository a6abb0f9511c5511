// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Power cuts while images of formats without reference counts are written to. Flushed data read back, a sector that was written since
//! is old or new, and the image takes writes again.

use cowshed_image::{Node, OpenRequest, ZeroFlags, open};
use cowshed_layout::fresh::FreshFile;
use cowshed_layout::parallels::NewParallels;
use cowshed_layout::qcow::NewQcow;
use cowshed_layout::qed::NewQed;
use cowshed_layout::vdi::NewVdi;
use cowshed_layout::vhdx::{Guid, NewVhdx};
use cowshed_layout::vpc::{self, NewVpc};
use cowshed_simulator::{Config, PageMap, World};
use cowshed_storage::IoBuf;
use cowshed_testkit::crash::{CrashPlan, CrashReport, explore};
use cowshed_testkit::qemu::{Qemu, temp_dir};
use cowshed_testkit::random::Random;
use futures_util::future::join_all;
use std::ops::Range;
use std::sync::Arc;

const IMAGE: &str = "disk";
const SECTOR: usize = 512;
/// Sectors that are used at the start of each block.
const SECTORS_OF_BLOCK: usize = 8;
/// A disk of 24 blocks.
const SECTORS: usize = 24 * SECTORS_OF_BLOCK;
const BLOCK_BYTES: u32 = 4096;

/// A format, and the length of its blocks.
#[derive(Clone, Copy)]
struct Kind {
    format: &'static str,
    block_bytes: u64,
}

impl Kind {
    /// Where on the disk a sector is.
    fn offset(self, sector: usize) -> u64 {
        (sector / SECTORS_OF_BLOCK) as u64 * self.block_bytes + (sector % SECTORS_OF_BLOCK * SECTOR) as u64
    }

    /// The parts of a range that follow each other on the disk.
    fn parts(self, sectors: Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let step = if self.block_bytes == u64::from(BLOCK_BYTES) { SECTORS } else { SECTORS_OF_BLOCK };
        let (first, last) = (sectors.start / step, sectors.end.div_ceil(step));
        (first..last).map(move |part| (part * step).max(sectors.start)..((part + 1) * step).min(sectors.end))
    }
}

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

/// A VHDX image with the smallest blocks that there are.
fn vhdx() -> Vec<u8> {
    let new = NewVhdx {
        size: 24 << 20,
        is_fixed: false,
        block_bytes: 1 << 20,
        log_bytes: 1 << 20,
        marks_zeroes: true,
        creator: "a test",
        guids: [Guid::random([1; 16]), Guid::random([2; 16]), Guid::random([3; 16])],
        sequence_number: 7,
    };
    bytes_of(&new.lay_out().expect("a layout"))
}

fn qed() -> Vec<u8> {
    let size = SECTORS as u64 * SECTOR as u64;
    let cluster_bytes = u64::from(BLOCK_BYTES);
    bytes_of(&NewQed { size, cluster_bytes, table_clusters: 2, backing: None }.lay_out().expect("a layout"))
}

/// qcow with tables of 64 entries and clusters of 512 bytes would have more tables; QEMU makes this kind.
fn qcow() -> Vec<u8> {
    bytes_of(&NewQcow { size: SECTORS as u64 * SECTOR as u64, backing: None }.lay_out().expect("a layout"))
}

fn parallels() -> Vec<u8> {
    let size = SECTORS as u64 * SECTOR as u64;
    bytes_of(&NewParallels { size, cluster_bytes: u64::from(BLOCK_BYTES) }.lay_out().expect("a layout"))
}

/// A write or a flush, and between which entries of the log it ran.
struct Step {
    range: (usize, usize),
    /// Sectors and the byte that they are filled with; `None` for a flush.
    write: Option<(Range<usize>, u8)>,
}

async fn opened(format: &str, writable: bool) -> Arc<Node> {
    open(OpenRequest::file(IMAGE).format(format).writable(writable)).await.expect("the image opens")
}

/// Requests in groups that run together, with flushes between some.
fn work(world: &World, kind: Kind, seed: u64) -> Vec<Step> {
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
                    match value {
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
        // The count may be too high, and the mark of a writer may stay: docs/formats/block-formats.md.
        let allowed = ["blocks_allocated is", "was not closed correctly"];
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

/// Another write to what is left: it goes where it belongs, and nothing else changes.
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

#[test]
fn formats_without_reference_counts_survive_power_cuts() {
    let mut total = CrashReport::default();
    let folder = temp_dir();
    let small = |format| Kind { format, block_bytes: u64::from(BLOCK_BYTES) };
    let kinds = [
        (small("vdi"), vdi()),
        (small("vpc"), vpc()),
        (Kind { format: "vhdx", block_bytes: 1 << 20 }, vhdx()),
        (small("qed"), qed()),
        (small("qcow"), qcow()),
        (small("parallels"), parallels()),
    ];
    for (kind, image) in kinds {
        for seed in 1..=3 {
            let world = World::new(Config::new(seed));
            world.add_file(IMAGE, PageMap::from_bytes(&image));
            let steps = work(&world, kind, seed);
            let plan = CrashPlan { max_distinct: 250, ..CrashPlan::new(seed) };
            let report = explore(&world.trace(), &plan, |case| {
                let left = World::with_files(Config::new(0), &case.state.files);
                let content = judge(&left, kind, &allowed(&steps, case.position))?;
                if kind.format != "vdi" && case.number % 60 == 0 {
                    let path = folder.path().join("left");
                    let bytes = left.contents(IMAGE).ok_or("the file is gone")?.to_vec();
                    std::fs::write(&path, bytes).map_err(|error| error.to_string())?;
                    if content_by_qemu(kind, case.number as u64, &path) != content {
                        return Err("qemu-img reads another disk".to_owned());
                    }
                }
                write_again(&left, kind, &content, case.number as u64)
            });
            total.add(&report.unwrap_or_else(|failure| panic!("{}, seed {seed}: {failure}", kind.format)));
        }
    }
    println!("formats: {total}");
    assert!(total.distinct() > 1800, "{total}");
}
