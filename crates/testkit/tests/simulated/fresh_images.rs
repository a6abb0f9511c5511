// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Small images of formats that keep a disk in blocks without reference counts, for the simulated disk.

use cowshed_image::{Node, OpenRequest, open};
use cowshed_layout::fresh::FreshFile;
use cowshed_layout::parallels::NewParallels;
use cowshed_layout::qcow::NewQcow;
use cowshed_layout::qed::NewQed;
use cowshed_layout::vdi::NewVdi;
use cowshed_layout::vhdx::{Guid, NewVhdx};
use cowshed_layout::vmdk::{NEW_KINDS, NewVmdk, embedded_descriptor};
use cowshed_layout::vpc::{self, NewVpc};
use cowshed_simulator::{Config, PageMap, World};
use cowshed_storage::IoBuf;
use std::ops::Range;
use std::sync::Arc;

pub const IMAGE: &str = "disk";
/// The file under an overlay.
pub const BASE: &str = "base";
pub const SECTOR: usize = 512;
/// Sectors that are used at the start of each block.
const SECTORS_OF_BLOCK: usize = 8;
/// A disk of 24 blocks.
pub const SECTORS: usize = 24 * SECTORS_OF_BLOCK;
const BLOCK_BYTES: u32 = 4096;
const VMDK_BLOCK_BYTES: u64 = 64 << 10;

/// A format, and the length of its blocks.
#[derive(Clone, Copy)]
pub struct Kind {
    pub format: &'static str,
    pub block_bytes: u64,
}

impl Kind {
    /// Where on the disk a sector is.
    pub fn offset(self, sector: usize) -> u64 {
        (sector / SECTORS_OF_BLOCK) as u64 * self.block_bytes + (sector % SECTORS_OF_BLOCK * SECTOR) as u64
    }

    /// The parts of a range that follow each other on the disk.
    pub fn parts(self, sectors: Range<usize>) -> impl Iterator<Item = Range<usize>> {
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

/// A VHD image that lost its footer. The one at the start is there.
pub fn vhd_without_end() -> (Kind, Vec<(String, Vec<u8>)>) {
    let mut bytes = vpc();
    bytes.truncate(bytes.len() - 512);
    (Kind { format: "vpc", block_bytes: u64::from(BLOCK_BYTES) }, vec![(IMAGE.to_owned(), bytes)])
}

/// A VHDX image with the smallest blocks that there are.
fn vhdx() -> Vec<u8> {
    vhdx_of(24 << 20)
}

/// The same with a disk of this size in bytes.
pub fn vhdx_of(size: u64) -> Vec<u8> {
    let new = NewVhdx {
        size,
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

/// A VMDK disk with the grains that QEMU makes.
fn new_vmdk(size: u64, kind: &str) -> NewVmdk<'static> {
    NewVmdk {
        size,
        kind: *NEW_KINDS.iter().find(|known| known.name == kind).expect("a known kind"),
        adapter: "ide",
        hardware: "4",
        tools: "2147483647",
        zeroed_grains: true,
        cid: 0x1234,
        parent: None,
        name: IMAGE,
        part_names: None,
        ids: None,
    }
}

/// The same in one sparse file.
fn vmdk(block_bytes: u64) -> Vec<u8> {
    let size = SECTORS as u64 / SECTORS_OF_BLOCK as u64 * block_bytes;
    bytes_of(&new_vmdk(size, "monolithicSparse").lay_out().expect("a layout").image)
}

/// A VMDK disk in two sparse files beside the descriptor. QEMU's are longer.
pub fn split_vmdk() -> (Kind, Vec<(String, Vec<u8>)>) {
    let size = SECTORS as u64 / SECTORS_OF_BLOCK as u64 * VMDK_BLOCK_BYTES;
    let files = new_vmdk(size / 2, "twoGbMaxExtentSparse").lay_out().expect("a layout");
    // The text is shorter than a sector.
    let text = String::from_utf8(files.image.mark.expect("a mark").1).expect("a text");
    let line = text.lines().find(|line| line.starts_with("RW ")).expect("an extent");
    let both = format!("{line}\n{}", line.replace("s001", "s002"));
    let part = bytes_of(&files.parts[0].1);
    let names = [format!("{IMAGE}-s001"), format!("{IMAGE}-s002")];
    let mut all = vec![(IMAGE.to_owned(), text.replace(line, &both).into_bytes())];
    all.extend(names.map(|name| (name, part.clone())));
    (Kind { format: "vmdk", block_bytes: VMDK_BLOCK_BYTES }, all)
}

/// A stream-optimised VMDK disk without grains.
pub fn empty_stream(size: u64) -> Vec<u8> {
    bytes_of(&new_vmdk(size, "streamOptimized").lay_out().expect("a layout").image)
}

/// The byte in each sector of the file under an overlay: two blocks of three have data.
pub fn base_value(sector: usize) -> u8 {
    if sector / SECTORS_OF_BLOCK % 3 == 2 { 0 } else { 200 + (sector % 50) as u8 }
}

/// An image whose sectors were filled by the driver; those of the value 0 were left out.
pub fn filled(kind: Kind, image: &[u8], value: fn(usize) -> u8) -> Vec<u8> {
    let world = World::new(Config::new(1));
    world.add_file(IMAGE, PageMap::from_bytes(image));
    world.run(async {
        let node = opened(kind.format, true).await;
        for sector in (0..SECTORS).filter(|sector| value(*sector) != 0) {
            let bytes = IoBuf::copy_from(&[value(sector); SECTOR]);
            node.write(kind.offset(sector), bytes).await.0.expect("it is written");
        }
        node.close().await.expect("it closes");
    });
    world.contents(IMAGE).expect("the file").to_vec()
}

/// A QED image over the raw file `BASE`, with a disk of this size in bytes.
pub fn qed_over_raw(size: u64) -> Vec<u8> {
    let backing = Some((BASE, true));
    let new = NewQed { size, cluster_bytes: u64::from(BLOCK_BYTES), table_clusters: 2, backing };
    bytes_of(&new.lay_out().expect("a layout"))
}

/// A raw file with the sectors of [`base_value`].
pub fn raw_base() -> Vec<u8> {
    (0..SECTORS).flat_map(|sector| [base_value(sector); SECTOR]).collect()
}

/// Files by name, with their bytes.
type Files = Vec<(String, Vec<u8>)>;

/// An empty overlay of each format that is written to, with the file under it.
pub fn overlays() -> Vec<(Kind, Files)> {
    let size = SECTORS as u64 * SECTOR as u64;
    let small = |format| Kind { format, block_bytes: u64::from(BLOCK_BYTES) };
    let qcow = bytes_of(&NewQcow { size, backing: Some(BASE) }.lay_out().expect("a layout"));
    let wide = Kind { format: "vmdk", block_bytes: VMDK_BLOCK_BYTES };
    let parent = filled(wide, &vmdk(VMDK_BLOCK_BYTES), base_value);
    // The descriptor has 20 sectors behind the header.
    let cid = embedded_descriptor(&parent[SECTOR..21 * SECTOR], 1).expect("a descriptor").cid;
    let size = SECTORS as u64 / SECTORS_OF_BLOCK as u64 * VMDK_BLOCK_BYTES;
    let child = NewVmdk { parent: Some((cid, BASE)), ..new_vmdk(size, "monolithicSparse") };
    let child = bytes_of(&child.lay_out().expect("a layout").image);
    let files = |image, base| vec![(IMAGE.to_owned(), image), (BASE.to_owned(), base)];
    vec![
        (small("qed"), files(qed_over_raw(SECTORS as u64 * SECTOR as u64), raw_base())),
        (small("qcow"), files(qcow, raw_base())),
        (wide, files(child, parent)),
    ]
}

/// An image of each format.
pub fn kinds() -> Vec<(Kind, Vec<u8>)> {
    let small = |format| Kind { format, block_bytes: u64::from(BLOCK_BYTES) };
    vec![
        (small("vdi"), vdi()),
        (small("vpc"), vpc()),
        (Kind { format: "vhdx", block_bytes: 1 << 20 }, vhdx()),
        (small("qed"), qed()),
        (small("qcow"), qcow()),
        (small("parallels"), parallels()),
        (Kind { format: "vmdk", block_bytes: VMDK_BLOCK_BYTES }, vmdk(VMDK_BLOCK_BYTES)),
    ]
}

/// Images with blocks of the length that new ones have, far longer than what a request writes.
pub fn large_blocks() -> Vec<(Kind, Vec<u8>)> {
    let size = 24 << 20;
    let vpc = NewVpc { size, is_fixed: false, force_size: true, made_at: 1, uuid: [3; 16] };
    let vdi = NewVdi { size, is_fixed: false, uuids: [[1; 16], [2; 16]] };
    vec![
        (Kind { format: "vpc", block_bytes: 2 << 20 }, bytes_of(&vpc.lay_out().expect("a layout"))),
        (Kind { format: "vdi", block_bytes: 1 << 20 }, bytes_of(&vdi.lay_out().expect("a layout"))),
    ]
}

pub async fn opened(format: &str, writable: bool) -> Arc<Node> {
    open(OpenRequest::file(IMAGE).format(format).writable(writable)).await.expect("the image opens")
}

/// A VMDK disk with a grain table for each block that is used.
pub fn wide_vmdk() -> (Kind, Vec<u8>) {
    let block_bytes = 512 * VMDK_BLOCK_BYTES;
    (Kind { format: "vmdk", block_bytes }, vmdk(block_bytes))
}

/// Returns the fault of the count in a VDI header. QEMU's next block goes to its place.
pub fn vdi_count(bytes: &[u8]) -> Result<(), String> {
    let number = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    let (blocks, map) = (number(384) as usize, number(340) as usize);
    let used = (0..blocks).map(|block| number(map + block * 4)).filter(|number| *number < 0xffff_fffe);
    match (used.max(), number(388)) {
        (Some(last), count) if last >= count => Err(format!("block {last} is in use, and the header counts {count}")),
        _ => Ok(()),
    }
}
