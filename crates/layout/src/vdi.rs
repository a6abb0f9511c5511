// SPDX-License-Identifier: Apache-2.0 OR MIT
//! VDI, VirtualBox's format, version 1.1: one header, one map of blocks, then the blocks. Numbers are little-endian,
//! offsets count bytes.

use crate::bytes::{array_at, le32_at, le64_at};
use crate::complaint::{refused, wrong};
use crate::fresh::{FilePiece, FreshFile};
use cowshed_types::{Error, Result};

/// Bytes of a header that are looked at.
pub const HEADER_BYTES: usize = 512;
/// Bytes of an entry of the block map.
pub const ENTRY_BYTES: u64 = 4;

const SIGNATURE: u32 = 0xbeda_107f;
const VERSION: u32 = 0x0001_0001;
/// The part of the header behind the signature and the version, up to the number of allocated blocks.
const LEAST_HEADER_SIZE: u32 = 0x180;
const SECTOR_BYTES: u32 = 512;
const MAX_BLOCK_BYTES: u32 = 256 << 20;
/// Offset of the header's count of allocated blocks.
pub const ALLOCATED_AT: u64 = 388;
/// Where the header names the present content, 16 bytes.
pub const CONTENT_UUID_AT: u64 = 408;
/// Blocks of a new image.
const NEW_BLOCK_BYTES: u32 = 1 << 20;
/// The largest disk of QEMU, which keeps the map of its blocks in memory.
const MAX_NEW_BYTES: u64 = 0x0001_ffff_f800_0000;
const NEW_TEXT: &[u8] = b"<<< QEMU VM Virtual Disk Image >>>\n";
const UNALLOCATED: u32 = 0xffff_ffff;
const ZERO: u32 = 0xffff_fffe;

/// The header of an image, checked. Sizes and offsets in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VdiHeader {
    /// All blocks were allocated when the image was made.
    pub is_fixed: bool,
    /// Offset of the block map, in bytes.
    pub map_offset: u64,
    /// Where block 0 of the file is.
    pub data_offset: u64,
    /// Size of the disk, whole sectors.
    pub size: u64,
    /// Length of a block, a power of two.
    pub block_bytes: u64,
    /// Entries of the block map.
    pub blocks: u32,
    /// Entries that lead to a block, as the header counts them.
    pub allocated: u32,
    /// The ids of the image and of its present content.
    pub uuids: [[u8; 16]; 2],
    /// The same of the image that this one is a difference to.
    pub parent: Option<[[u8; 16]; 2]>,
}

/// An entry of the block map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VdiBlock {
    /// Never written: zeroes, or as in the parent.
    Unallocated,
    /// Discarded: zeroes.
    Zero,
    /// The block with this number in the file.
    At(u32),
}

impl VdiBlock {
    /// The block that an entry of the map leads to.
    pub fn of(entry: u32) -> VdiBlock {
        match entry {
            UNALLOCATED => VdiBlock::Unallocated,
            ZERO => VdiBlock::Zero,
            number => VdiBlock::At(number),
        }
    }
}

/// The largest disk that QEMU opens.
const QEMU_MOST_BYTES: u64 = 0x1_ffff_f800_0000;

impl VdiHeader {
    /// Parses the first [`HEADER_BYTES`] bytes of an image.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        match le32_at(bytes, 64) {
            Some(SIGNATURE) => {}
            Some(other) => {
                // QEMU looks at the size first.
                let sentence = match le64_at(bytes, 368).filter(|size| *size > QEMU_MOST_BYTES) {
                    Some(size) => {
                        format!("Unsupported VDI image size (size is {size:#x}, max supported is {QEMU_MOST_BYTES:#x})")
                    }
                    None => format!("Image not in VDI format (bad signature {other:08x})"),
                };
                return Err(wrong("signature", 64, format!("{other:#x}"), "this is no VDI image").qemu(sentence));
            }
            None => return Err(wrong("header", 0, bytes.len(), "the VDI header is cut short")),
        }
        Self::parse_fields(bytes).unwrap_or_else(|| Err(wrong("header", 0, bytes.len(), "the VDI header is cut short")))
    }

    fn parse_fields(bytes: &[u8]) -> Option<Result<Self>> {
        let version = le32_at(bytes, 68)?;
        if version != VERSION {
            let value = format!("{}.{}", version >> 16, version & 0xffff);
            return Some(Err(refused("version", 68, value, "VDI images of this version are not supported")));
        }
        let header_size = le32_at(bytes, 72)?;
        if header_size < LEAST_HEADER_SIZE {
            return Some(Err(wrong("header_size", 72, header_size, "the VDI header is too short")));
        }
        let image_type = le32_at(bytes, 76)?;
        let is_fixed = match image_type {
            1 => false,
            2 => true,
            3 | 4 => false,
            _ => return Some(Err(wrong("image_type", 76, image_type, "unknown type of VDI image"))),
        };
        let parent: [[u8; 16]; 2] = [array_at(bytes, 424)?, array_at(bytes, 440)?];
        let is_difference = matches!(image_type, 3 | 4);
        if is_difference && parent[0] == [0; 16] {
            return Some(Err(wrong("uuid_link", 424, 0, "the image is a difference, and doesn't say to what")));
        }
        // Whatever the type: there is another image below.
        let parent = (is_difference || parent != [[0; 16]; 2]).then_some(parent);
        let header = Self {
            is_fixed,
            map_offset: u64::from(le32_at(bytes, 340)?),
            data_offset: u64::from(le32_at(bytes, 344)?),
            size: le64_at(bytes, 368)?,
            block_bytes: u64::from(le32_at(bytes, 376)?),
            blocks: le32_at(bytes, 384)?,
            allocated: le32_at(bytes, 388)?,
            uuids: [array_at(bytes, 392)?, array_at(bytes, 408)?],
            parent,
        };
        let sector_size = le32_at(bytes, 360)?;
        if sector_size != SECTOR_BYTES {
            return Some(Err(refused("sector_size", 360, sector_size, "only sectors of 512 bytes are supported")));
        }
        let extra = le32_at(bytes, 380)?;
        if extra != 0 {
            return Some(Err(refused(
                "block_extra",
                380,
                extra,
                "VDI images with data between blocks are not supported",
            )));
        }
        Some(header.checked())
    }

    fn checked(mut self) -> Result<Self> {
        let sector = u64::from(SECTOR_BYTES);
        if !self.block_bytes.is_power_of_two() || !(sector..=u64::from(MAX_BLOCK_BYTES)).contains(&self.block_bytes) {
            let message = format!("the block size is no power of two from 512 to {MAX_BLOCK_BYTES}");
            return Err(wrong("block_size", 376, self.block_bytes, message));
        }
        // A disk of an odd size has a last sector all the same, as in QEMU.
        let size = self.size.checked_next_multiple_of(sector).filter(|size| i64::try_from(*size).is_ok());
        self.size = size.ok_or_else(|| wrong("disk_size", 368, self.size, "the VDI disk is too large"))?;
        if u64::from(self.blocks) * self.block_bytes < self.size {
            let message = format!("too few blocks for a disk of {} bytes", self.size);
            return Err(wrong("blocks_in_image", 384, self.blocks, message));
        }
        if !self.map_offset.is_multiple_of(sector) || self.map_offset < HEADER_BYTES as u64 {
            let message = "the block map is not at a multiple of 512 behind the header";
            return Err(wrong("offset_bmap", 340, self.map_offset, message));
        }
        if !self.data_offset.is_multiple_of(sector) || self.data_offset < self.map_offset + self.map_bytes() {
            let message = "the data are not at a multiple of 512 behind the block map";
            return Err(wrong("offset_data", 344, self.data_offset, message));
        }
        Ok(self)
    }

    /// Length of the block map in bytes.
    pub fn map_bytes(&self) -> u64 {
        u64::from(self.blocks) * ENTRY_BYTES
    }
}

/// The part of a header that changes when the disk grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VdiShape {
    /// Where the block map is, in bytes.
    pub map_offset: u64,
    /// Where block 0 of the file is, in bytes.
    pub data_offset: u64,
    /// Size of the disk in bytes.
    pub size: u64,
    /// Entries of the map.
    pub blocks: u64,
    /// The number of the next new block.
    pub allocated: u64,
}

impl VdiShape {
    /// Writes it into a header.
    ///
    /// # Errors
    /// For a header that is cut short, and for numbers that the header has no room for.
    pub fn put(&self, header: &mut [u8]) -> Result<()> {
        let field = |name, value: u64| {
            let too_large = || Error::unsupported("a VDI header can't say so much").field(name).value(value);
            u32::try_from(value).map(u32::to_le_bytes).map_err(|_| too_large())
        };
        let fields = [
            (340, field("offset_bmap", self.map_offset)?),
            (344, field("offset_data", self.data_offset)?),
            (384, field("blocks_in_image", self.blocks)?),
            (ALLOCATED_AT as usize, field("blocks_allocated", self.allocated)?),
        ];
        let short = || Error::invalid_image("header", "short", "the VDI header is cut short");
        for (at, bytes) in fields {
            header.get_mut(at..at + 4).ok_or_else(short)?.copy_from_slice(&bytes);
        }
        header.get_mut(368..376).ok_or_else(short)?.copy_from_slice(&self.size.to_le_bytes());
        Ok(())
    }
}

/// The largest disk of blocks of this length, in bytes: QEMU opens no larger one, and an entry has 32 bits.
pub fn largest_disk(block_bytes: u64) -> u64 {
    MAX_NEW_BYTES.min(block_bytes.saturating_mul(u64::from(ZERO)))
}

/// A new image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewVdi {
    /// Size of the disk in bytes.
    pub size: u64,
    /// All blocks are allocated.
    pub is_fixed: bool,
    /// Random bytes that name the image, and its last change.
    pub uuids: [[u8; 16]; 2],
}

impl NewVdi {
    /// The file as QEMU lays it out: header, map, blocks. An error for a disk that is larger than QEMU's largest one.
    pub fn lay_out(&self) -> Result<FreshFile> {
        if self.size > MAX_NEW_BYTES {
            let message =
                format!("Unsupported VDI image size (size is {:#x}, max supported is {MAX_NEW_BYTES:#x})", self.size);
            return Err(Error::unsupported(message));
        }
        let blocks = self.size.div_ceil(u64::from(NEW_BLOCK_BYTES)) as u32;
        let map_bytes = (u64::from(blocks) * ENTRY_BYTES).next_multiple_of(u64::from(SECTOR_BYTES));
        let map_offset = HEADER_BYTES as u64;
        let data_offset = map_offset + map_bytes;
        let mut header = vec![0; HEADER_BYTES];
        let mut put = |at: usize, bytes: &[u8]| header[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, NEW_TEXT);
        for (at, value) in [
            (64, SIGNATURE),
            (68, VERSION),
            (72, LEAST_HEADER_SIZE),
            (76, if self.is_fixed { 2 } else { 1 }),
            (340, map_offset as u32),
            (344, data_offset as u32),
            (360, SECTOR_BYTES),
            (376, NEW_BLOCK_BYTES),
            (384, blocks),
            (ALLOCATED_AT as usize, if self.is_fixed { blocks } else { 0 }),
        ] {
            put(at, &value.to_le_bytes());
        }
        put(368, &self.size.to_le_bytes());
        put(392, &self.uuids[0]);
        put(408, &self.uuids[1]);
        let data_bytes = if self.is_fixed { u64::from(blocks) * u64::from(NEW_BLOCK_BYTES) } else { 0 };
        let map = if self.is_fixed {
            FilePiece::Count(blocks)
        } else {
            FilePiece::Fill(0xff, u64::from(blocks) * ENTRY_BYTES)
        };
        Ok(FreshFile { len: data_offset + data_bytes, pieces: vec![(map_offset, map)], mark: Some((0, header)) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_image_is_read_as_it_was_meant() {
        for (size, is_fixed) in [(0, false), (512, true), ((5 << 20) + 512, false), (300 << 20, true)] {
            let new = NewVdi { size, is_fixed, uuids: [[1; 16], [2; 16]] };
            let fresh = new.lay_out().unwrap();
            let header = VdiHeader::parse(&fresh.mark.unwrap().1).unwrap();
            assert_eq!((header.size, header.is_fixed), (size, is_fixed));
            assert_eq!(fresh.pieces[0].0, header.map_offset);
            assert_eq!(fresh.pieces[0].1.len(), header.map_bytes());
            let there = if is_fixed { header.blocks } else { 0 };
            assert_eq!(
                (fresh.len, header.allocated),
                (header.data_offset + u64::from(there) * header.block_bytes, there)
            );
        }
        let error = NewVdi { size: MAX_NEW_BYTES + 512, is_fixed: false, uuids: [[0; 16]; 2] }.lay_out().unwrap_err();
        assert!(error.to_string().contains("max supported is 0x1fffff8000000"), "{error}");
    }

    /// A disk of 2.5 MiB in blocks of 1 MiB.
    fn header() -> Vec<u8> {
        let mut bytes = vec![0; HEADER_BYTES];
        let mut put = |at: usize, value: u32| bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        for (at, value) in [
            (64, SIGNATURE),
            (68, VERSION),
            (72, 0x190),
            (76, 1),
            (340, 0x200),
            (344, 0x400),
            (360, 512),
            (368, 5 << 19),
            (376, 1 << 20),
            (384, 3),
        ] {
            put(at, value);
        }
        bytes
    }

    #[test]
    fn a_header_is_read() {
        let parsed = VdiHeader::parse(&header()).unwrap();
        assert_eq!((parsed.size, parsed.blocks, parsed.block_bytes, parsed.is_fixed), (5 << 19, 3, 1 << 20, false));
        assert_eq!((parsed.map_offset, parsed.data_offset, parsed.map_bytes()), (512, 1024, 12));
        let mut odd = header();
        odd[368] = 1;
        assert_eq!(VdiHeader::parse(&odd).unwrap().size, (5 << 19) + 512);
        assert_eq!(VdiBlock::of(7), VdiBlock::At(7));
        assert_eq!((VdiBlock::of(u32::MAX), VdiBlock::of(u32::MAX - 1)), (VdiBlock::Unallocated, VdiBlock::Zero));
    }

    #[test]
    fn a_difference_says_to_what() {
        assert_eq!(VdiHeader::parse(&header()).unwrap().parent, None);
        for (at, parent) in [(424, [1, 0]), (440, [0, 1])] {
            let mut header = header();
            header[at] = 1;
            let found = VdiHeader::parse(&header).unwrap().parent.expect("there is another image below");
            assert_eq!(found.map(|uuid| uuid[0]), parent);
        }
        let mut header = header();
        (header[76], header[424]) = (4, 7);
        let parsed = VdiHeader::parse(&header).unwrap();
        assert!(!parsed.is_fixed && parsed.parent.expect("a parent")[0][0] == 7);
    }

    #[test]
    fn each_rule_is_held() {
        for (at, bytes, part) in [
            (64, &[0][..], "signature"),
            (68, &[2], "version"),
            (72, &[0, 0], "header_size"),
            (76, &[4], "uuid_link"),
            (76, &[9], "image_type"),
            (340, &[1], "offset_bmap"),
            (340, &[0, 0], "offset_bmap"),
            (344, &[0, 2], "offset_data"),
            (344, &[1], "offset_data"),
            (360, &[0, 16], "sector_size"),
            (368, &[0xff; 8], "disk_size"),
            (368, &[0, 0, 0, 0, 1], "blocks_in_image"),
            (376, &[0; 4], "block_size"),
            (376, &[1], "block_size"),
            (379, &[0x20], "block_size"),
            (380, &[1], "block_extra"),
            (384, &[2], "blocks_in_image"),
        ] {
            let mut header = header();
            header[at..at + bytes.len()].copy_from_slice(bytes);
            let error = VdiHeader::parse(&header).unwrap_err().to_string();
            assert!(error.contains(part) && error.contains("at offset"), "{at}: {error}");
        }
        for len in 0..456 {
            assert!(VdiHeader::parse(&header()[..len]).is_err(), "{len} bytes");
        }
    }
}
