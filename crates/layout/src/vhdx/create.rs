// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A new image: the signature, headers and region tables in the first MiB, the log, the BAT, the metadata, blocks.

use super::metadata::{
    FLAG_REQUIRED, KNOWN, MAX_BLOCK_BYTES, MAX_SIZE, METADATA_TABLE_BYTES, MIN_BLOCK_BYTES, SIGNATURE,
};
use super::{
    BAT, CHECKSUM_AT, ENTRY_BYTES, FILE_SIGNATURE, Guid, HEADER_OFFSETS, METADATA, REGION_SIGNATURE,
    REGION_TABLE_BYTES, REGION_TABLE_OFFSETS, UNIT_BYTES, VhdxBlock, VhdxDisk, VhdxHeader, checksum,
};
use crate::fresh::{FilePiece, FreshFile};
use cowshed_types::{Error, Result};

const SECTOR_BYTES: u32 = 512;
/// The state of a block that reads as zeroes.
const STATE_ZERO: u64 = 2;
/// "LeaveBlockAllocated": a fixed disk.
const FLAG_FIXED: u32 = 1;
const FLAG_VIRTUAL_DISK: u32 = 2;
/// QEMU leaves this much room between the metadata and the blocks.
const GAP_BYTES: u64 = 4 << 20;
const CREATOR_AT: usize = 8;

/// A new image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewVhdx<'a> {
    /// Size of the disk in bytes, whole sectors.
    pub size: u64,
    /// All blocks are allocated.
    pub is_fixed: bool,
    /// As the user asks: length of a block in bytes, 0 for one that suits the disk.
    pub block_bytes: u64,
    /// As the user asks: length of the log in bytes.
    pub log_bytes: u64,
    /// Blocks that are not allocated are marked as zeroes; else as never written.
    pub marks_zeroes: bool,
    /// The program that makes the image.
    pub creator: &'a str,
    /// Names of the file, of its data and of the disk.
    pub guids: [Guid; 3],
    /// The number of the first header.
    pub sequence_number: u64,
}

/// The places of the parts of the new file.
struct Places {
    disk: VhdxDisk,
    log_bytes: u64,
    bat: (u64, u64),
    metadata: u64,
    blocks: u64,
}

impl NewVhdx<'_> {
    fn places(&self) -> Result<Places> {
        if self.size > MAX_SIZE {
            return Err(Error::invalid_argument("Image size too large; max of 64TB").field("size").value(self.size));
        }
        if self.size == 0 {
            return Err(Error::invalid_argument("a VHDX disk has one sector at least").field("size").value(0));
        }
        if self.log_bytes > u64::from(u32::MAX) - (UNIT_BYTES - 1) {
            let error = Error::invalid_argument("Log size must be smaller than 4 GB");
            return Err(error.field("log_size").value(self.log_bytes));
        }
        let log_bytes = self.log_bytes.max(1).next_multiple_of(UNIT_BYTES);
        let block_bytes = match self.block_bytes {
            0 if self.size > 32 << 40 => 64 << 20,
            0 if self.size > 100 << 30 => 32 << 20,
            0 if self.size > 1 << 30 => 16 << 20,
            0 => 8 << 20,
            asked => asked.min(u64::from(MAX_BLOCK_BYTES)).next_multiple_of(u64::from(MIN_BLOCK_BYTES)),
        };
        if !block_bytes.is_power_of_two() {
            let error = Error::invalid_argument("Block size must be a power of two");
            return Err(error.field("block_size").value(block_bytes));
        }
        let parameters = block_bytes.to_le_bytes();
        let mut sector = [0; 8];
        sector[..4].copy_from_slice(&SECTOR_BYTES.to_le_bytes());
        let disk = VhdxDisk::parse(parameters, self.size.to_le_bytes(), sector)?;
        // The bitmap of the last chunk has its entry too.
        let blocks = self.size.div_ceil(block_bytes);
        let entries = blocks + blocks.div_ceil(disk.chunk_ratio);
        let bat = (UNIT_BYTES + log_bytes, (entries * ENTRY_BYTES).next_multiple_of(UNIT_BYTES));
        let metadata = bat.0 + bat.1;
        Ok(Places { disk, log_bytes, bat, metadata, blocks: metadata + UNIT_BYTES + GAP_BYTES })
    }

    /// The file.
    pub fn lay_out(&self) -> Result<FreshFile> {
        let places = self.places()?;
        let block_bytes = places.disk.block_bytes;
        let blocks = self.size.div_ceil(block_bytes);
        let mut pieces = Vec::new();
        for (index, offset) in HEADER_OFFSETS.into_iter().enumerate() {
            let header = VhdxHeader {
                sequence_number: self.sequence_number + index as u64,
                file_guid: self.guids[0],
                data_guid: self.guids[1],
                log_guid: Guid::ZERO,
                log_offset: UNIT_BYTES,
                log_bytes: places.log_bytes,
            };
            pieces.push((offset, FilePiece::Bytes(header.to_bytes())));
        }
        for offset in REGION_TABLE_OFFSETS {
            pieces.push((offset, FilePiece::Bytes(regions(&places))));
        }
        pieces.push((places.metadata, FilePiece::Bytes(self.metadata(block_bytes))));
        let mut len = places.blocks;
        if self.is_fixed || self.marks_zeroes {
            let mut at = 0;
            for start in (0..blocks).step_by(places.disk.chunk_ratio as usize) {
                let (first, step) = match self.is_fixed {
                    true => (VhdxBlock::entry_at(places.blocks + start * block_bytes), block_bytes),
                    false => (STATE_ZERO, 0),
                };
                let count = places.disk.chunk_ratio.min(blocks - start);
                pieces.push((places.bat.0 + at, FilePiece::Numbers { first, step, count }));
                // The entry of its sector bitmap follows a chunk.
                at += (count + 1) * ENTRY_BYTES;
            }
        }
        if self.is_fixed {
            len += blocks * block_bytes;
        }
        let mut mark = FILE_SIGNATURE.to_vec();
        mark.resize(CREATOR_AT, 0);
        mark.extend(self.creator.encode_utf16().take(200).flat_map(u16::to_le_bytes));
        Ok(FreshFile { len, pieces, mark: Some((0, mark)) })
    }

    fn metadata(&self, block_bytes: u64) -> Vec<u8> {
        let sector = SECTOR_BYTES.to_le_bytes();
        let mut parameters = block_bytes.to_le_bytes();
        parameters[4..].copy_from_slice(&(if self.is_fixed { FLAG_FIXED } else { 0 }).to_le_bytes());
        // Parameters, size, name of the disk, logical and physical sector size, by their places among those that are known.
        let items: [(usize, &[u8], u32); 5] = [
            (0, &parameters, FLAG_REQUIRED),
            (1, &self.size.to_le_bytes(), FLAG_REQUIRED | FLAG_VIRTUAL_DISK),
            (3, &self.guids[2].0, FLAG_REQUIRED | FLAG_VIRTUAL_DISK),
            (2, &sector, FLAG_REQUIRED | FLAG_VIRTUAL_DISK),
            (4, &sector, FLAG_REQUIRED | FLAG_VIRTUAL_DISK),
        ];
        let mut bytes = vec![0; METADATA_TABLE_BYTES];
        bytes[..8].copy_from_slice(SIGNATURE);
        bytes[10..12].copy_from_slice(&(items.len() as u16).to_le_bytes());
        for (index, (known, item, flags)) in items.into_iter().enumerate() {
            let (guid, ..) = KNOWN[known];
            let offset = bytes.len() as u32;
            let at = 32 + index * 32;
            bytes[at..at + 16].copy_from_slice(&guid.0);
            bytes[at + 16..at + 20].copy_from_slice(&offset.to_le_bytes());
            bytes[at + 20..at + 24].copy_from_slice(&(item.len() as u32).to_le_bytes());
            bytes[at + 24..at + 28].copy_from_slice(&flags.to_le_bytes());
            bytes.extend_from_slice(item);
        }
        bytes
    }
}

/// The region table.
fn regions(places: &Places) -> Vec<u8> {
    let mut bytes = vec![0; REGION_TABLE_BYTES];
    bytes[..4].copy_from_slice(REGION_SIGNATURE);
    let regions = [(BAT, places.bat.0, places.bat.1), (METADATA, places.metadata, UNIT_BYTES)];
    bytes[8..12].copy_from_slice(&(regions.len() as u32).to_le_bytes());
    for (index, (guid, offset, len)) in regions.into_iter().enumerate() {
        let at = 16 + index * 32;
        bytes[at..at + 16].copy_from_slice(&guid.0);
        bytes[at + 16..at + 24].copy_from_slice(&offset.to_le_bytes());
        bytes[at + 24..at + 28].copy_from_slice(&(len as u32).to_le_bytes());
        // "Required": 2.2.3.2 demands it of both.
        bytes[at + 28] = 1;
    }
    let sum = checksum(&bytes);
    bytes[CHECKSUM_AT..CHECKSUM_AT + 4].copy_from_slice(&sum.to_le_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::super::{MetadataItem, MetadataTable, VhdxRegions};
    use super::*;

    fn new(size: u64) -> NewVhdx<'static> {
        NewVhdx {
            size,
            is_fixed: false,
            block_bytes: 0,
            log_bytes: 1 << 20,
            marks_zeroes: true,
            creator: "a test",
            guids: [Guid::random([1; 16]), Guid::random([2; 16]), Guid::random([3; 16])],
            sequence_number: 5,
        }
    }

    fn piece(fresh: &FreshFile, offset: u64) -> &[u8] {
        match fresh.pieces.iter().find(|(at, _)| *at == offset) {
            Some((_, FilePiece::Bytes(bytes))) => bytes,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_new_image_is_read_as_it_was_meant() {
        for (size, block_bytes, is_fixed) in
            [(512, 8 << 20, false), (3 << 30, 16 << 20, true), (9 << 30, 1 << 20, true)]
        {
            let fresh = NewVhdx { is_fixed, block_bytes, ..new(size) }.lay_out().unwrap();
            let headers = HEADER_OFFSETS.map(|at| VhdxHeader::parse(piece(&fresh, at), at));
            let [first, second] = headers;
            assert_eq!(VhdxHeader::newer(first, second).unwrap().sequence_number, 6);
            let regions = VhdxRegions::parse(piece(&fresh, REGION_TABLE_OFFSETS[1]), 0).unwrap().unwrap();
            let metadata = piece(&fresh, regions.metadata.0);
            let table = MetadataTable::parse(metadata, regions.metadata.0, regions.metadata.1).unwrap();
            let item = |item| -> [u8; 8] {
                let at = table.offset(item) as usize;
                metadata[at..at + 8].try_into().unwrap()
            };
            let sector = u64::from_le_bytes(item(MetadataItem::LogicalSectorSize)) & 0xffff_ffff;
            let disk = VhdxDisk::parse(
                item(MetadataItem::FileParameters),
                item(MetadataItem::VirtualDiskSize),
                sector.to_le_bytes(),
            );
            let disk = disk.unwrap();
            assert_eq!((disk.size, disk.block_bytes), (size, block_bytes));
            assert!(disk.entries() * ENTRY_BYTES <= regions.bat.1);
            let mut bat = vec![0; regions.bat.1 as usize];
            for (at, piece) in
                fresh.pieces.iter().filter(|(at, _)| *at >= regions.bat.0 && *at < regions.bat.0 + regions.bat.1)
            {
                let at = (at - regions.bat.0) as usize;
                piece.fill(0, &mut bat[at..at + piece.len() as usize]);
            }
            let mut next = (4 << 20) + regions.metadata.0 + regions.metadata.1;
            for block in 0..size.div_ceil(block_bytes) {
                let at = disk.entry_of(block) as usize * 8;
                let entry = VhdxBlock::of(u64::from_le_bytes(bat[at..at + 8].try_into().unwrap()));
                assert_eq!(entry, if is_fixed { VhdxBlock::At(next) } else { VhdxBlock::Zero }, "{block}");
                next += if is_fixed { block_bytes } else { 0 };
            }
            assert_eq!(fresh.len, next);
        }
    }

    #[test]
    fn what_is_asked_for_is_rounded_or_refused() {
        let block = |asked: u64, size: u64| {
            NewVhdx { block_bytes: asked, ..new(size) }.places().map(|places| places.disk.block_bytes >> 20)
        };
        assert_eq!([1, 1 << 19, 257 << 20, 1 << 40].map(|asked| block(asked, 512).unwrap()), [1, 1, 256, 256]);
        let sizes = [1 << 30, (1 << 30) + 512, 100 << 30, (100 << 30) + 512, 32 << 40, (32 << 40) + 512];
        assert_eq!(sizes.map(|size| block(0, size).unwrap()), [8, 16, 16, 32, 32, 64]);
        assert!(block(3 << 20, 512).unwrap_err().to_string().contains("power of two"));
        assert!(block(0, (64 << 40) + 512).unwrap_err().to_string().contains("max of 64TB"));
        assert!(block(0, 0).unwrap_err().to_string().contains("one sector"));
        let log = |asked: u64| NewVhdx { log_bytes: asked, ..new(512) }.places().map(|places| places.log_bytes >> 20);
        assert_eq!([1, 1 << 20, (1 << 20) + 1, 4095 << 20].map(|asked| log(asked).unwrap()), [1, 1, 2, 4095]);
        assert!(log((4095 << 20) + 1).unwrap_err().to_string().contains("smaller than 4 GB"));
    }
}
