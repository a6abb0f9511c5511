// SPDX-License-Identifier: Apache-2.0 OR MIT
//! VHDX, Hyper-V's format: Microsoft's specification \[MS-VHDX\]. Two headers, of which the newer one counts, two equal
//! tables of regions, and two regions: metadata, and the block allocation table (BAT). Numbers are little-endian, offsets
//! count bytes.

mod create;
mod log;
mod metadata;

pub use create::NewVhdx;
pub use log::{LogWrite, MAX_LOG_BYTES, NewLogEntry, Replay, replay_of};
pub use metadata::{METADATA_TABLE_BYTES, MetadataItem, MetadataTable, VhdxDisk, VhdxParent};

use crate::bytes::{array_at, le16_at, le32_at, le64_at};
use crate::complaint::{refused, wrong};
use crate::crc32c::crc32c;
use cowshed_types::Result;
use std::fmt;

/// Length of a header in bytes.
pub const HEADER_BYTES: usize = 4 << 10;
/// Offsets of the two headers.
pub const HEADER_OFFSETS: [u64; 2] = [64 << 10, 128 << 10];
/// Length of a region table in bytes.
pub const REGION_TABLE_BYTES: usize = 64 << 10;
/// Offsets of the two region tables.
pub const REGION_TABLE_OFFSETS: [u64; 2] = [192 << 10, 256 << 10];
/// Unit of places in the file: regions, blocks and the log begin at multiples of it.
pub const UNIT_BYTES: u64 = 1 << 20;
/// Bytes of an entry of the BAT.
pub const ENTRY_BYTES: u64 = 8;
/// Unit of the log: entries begin at multiples of it.
pub const LOG_SECTOR_BYTES: usize = 4 << 10;

const FILE_SIGNATURE: &[u8; 8] = b"vhdxfile";
const HEADER_SIGNATURE: &[u8; 4] = b"head";
const REGION_SIGNATURE: &[u8; 4] = b"regi";
const LOG_ENTRY_SIGNATURE: &[u8; 4] = b"loge";
const CHECKSUM_AT: usize = 4;
const VERSION: u16 = 1;
/// "EntryCount … MUST be less than or equal to 2,047", of both kinds of table.
const MAX_ENTRIES: u32 = 2047;
const BAT: Guid = Guid::new(0x2dc2_7766, 0xf623, 0x4200, [0x9d, 0x64, 0x11, 0x5e, 0x9b, 0xfd, 0x4a, 0x08]);
const METADATA: Guid = Guid::new(0x8b7c_a206, 0x4790, 0x4b9a, [0xb8, 0xfe, 0x57, 0x5f, 0x05, 0x0f, 0x88, 0x6e]);

/// A GUID as Microsoft stores it: the first three groups are little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Guid([u8; 16]);

impl Guid {
    const fn new(first: u32, second: u16, third: u16, rest: [u8; 8]) -> Guid {
        let ([a, b, c, d], [e, f], [g, h]) = (first.to_le_bytes(), second.to_le_bytes(), third.to_le_bytes());
        let [i, j, k, l, m, n, o, p] = rest;
        Guid([a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p])
    }

    /// From random bytes (RFC 9562, version 4).
    pub fn random(bytes: [u8; 16]) -> Guid {
        let mut guid = Guid(bytes);
        // The third group is little-endian.
        guid.0[7] = guid.0[7] & 0x0f | 0x40;
        guid.0[8] = guid.0[8] & 0x3f | 0x80;
        guid
    }

    /// From its bytes as files have them.
    pub const fn of(bytes: [u8; 16]) -> Guid {
        Guid(bytes)
    }

    fn at(bytes: &[u8], at: usize) -> Option<Guid> {
        array_at(bytes, at).map(Guid)
    }

    /// The one of zeroes.
    pub const ZERO: Guid = Guid([0; 16]);

    /// True for the one of zeroes alone.
    pub fn is_zero(&self) -> bool {
        self.0 == [0; 16]
    }
}

impl fmt::Display for Guid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, at) in [3, 2, 1, 0, 5, 4, 7, 6, 8, 9, 10, 11, 12, 13, 14, 15].into_iter().enumerate() {
            if matches!(index, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{:02x}", self.0[at])?;
        }
        Ok(())
    }
}

/// Whether a file begins as a VHDX file must.
pub fn check_signature(bytes: &[u8]) -> Result<()> {
    if bytes.starts_with(FILE_SIGNATURE) {
        return Ok(());
    }
    Err(wrong("signature", 0, "another", "this is no VHDX image"))
}

/// One of the two headers. Offsets and lengths in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VhdxHeader {
    /// The header with the larger one counts.
    pub sequence_number: u64,
    /// Changes with the first write to the file after an opening.
    pub file_guid: Guid,
    /// Changes with the first write to the disk after an opening; images made of this one know it.
    pub data_guid: Guid,
    /// Entries of the log with this mark count; zero for none.
    pub log_guid: Guid,
    /// Offset of the log.
    pub log_offset: u64,
    /// Length of the log.
    pub log_bytes: u64,
}

impl VhdxHeader {
    /// Parses the header at `offset` of the file, [`HEADER_BYTES`] bytes. `None`: it doesn't count, because its signature or
    /// its checksum is wrong.
    pub fn parse(bytes: &[u8], offset: u64) -> Option<Result<Self>> {
        let bytes = bytes.get(..HEADER_BYTES)?;
        let is_sound = bytes.starts_with(HEADER_SIGNATURE) && le32_at(bytes, CHECKSUM_AT)? == checksum(bytes);
        is_sound.then(|| Self::parse_unverified(bytes, offset))
    }

    /// As [`VhdxHeader::parse`], with any signature and checksum.
    pub fn parse_unverified(bytes: &[u8], offset: u64) -> Result<Self> {
        let cut_short = || wrong("header", offset, bytes.len(), "the VHDX header is cut short");
        Self::parse_fields(bytes, offset).ok_or_else(cut_short)?
    }

    fn parse_fields(bytes: &[u8], offset: u64) -> Option<Result<Self>> {
        let (log_version, version) = (le16_at(bytes, 64)?, le16_at(bytes, 66)?);
        let header = Self {
            sequence_number: le64_at(bytes, 8)?,
            file_guid: Guid::at(bytes, 16)?,
            data_guid: Guid::at(bytes, 32)?,
            log_guid: Guid::at(bytes, 48)?,
            log_offset: le64_at(bytes, 72)?,
            log_bytes: u64::from(le32_at(bytes, 68)?),
        };
        if version != VERSION {
            return Some(Err(refused(
                "Version",
                offset + 66,
                version,
                "VHDX images of this version are not supported",
            )));
        }
        if !header.log_guid.is_zero() && log_version != 0 {
            let message = "VHDX logs of this version are not supported";
            return Some(Err(refused("LogVersion", offset + 64, log_version, message)));
        }
        if !header.log_offset.is_multiple_of(UNIT_BYTES) || header.log_offset < UNIT_BYTES {
            let message = "the log is not at a multiple of 1 MiB behind the headers";
            return Some(Err(wrong("LogOffset", offset + 72, header.log_offset, message)));
        }
        if !header.log_bytes.is_multiple_of(UNIT_BYTES) || header.log_offset.checked_add(header.log_bytes).is_none() {
            let message = "the length of the log is no multiple of 1 MiB";
            return Some(Err(wrong("LogLength", offset + 68, header.log_bytes, message)));
        }
        Some(Ok(header))
    }

    /// The bytes of the header in the file.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; HEADER_BYTES];
        let mut put = |at: usize, part: &[u8]| bytes[at..at + part.len()].copy_from_slice(part);
        put(0, HEADER_SIGNATURE);
        put(8, &self.sequence_number.to_le_bytes());
        put(16, &self.file_guid.0);
        put(32, &self.data_guid.0);
        put(48, &self.log_guid.0);
        put(66, &VERSION.to_le_bytes());
        put(68, &(self.log_bytes as u32).to_le_bytes());
        put(72, &self.log_offset.to_le_bytes());
        let sum = checksum(&bytes);
        bytes[CHECKSUM_AT..CHECKSUM_AT + 4].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// The valid one of the two headers: the one that is sound, or of two sound ones the one with the larger sequence
    /// number.
    pub fn newer(first: Option<Result<Self>>, second: Option<Result<Self>>) -> Result<Self> {
        match (first, second) {
            (None, None) => {
                let message = "neither of the two VHDX headers has its signature and the right checksum";
                Err(wrong("header checksum", HEADER_OFFSETS[0], "wrong", message))
            }
            (Some(only), None) | (None, Some(only)) => only,
            (Some(first), Some(second)) => {
                let (first, second) = (first?, second?);
                match first.sequence_number.cmp(&second.sequence_number) {
                    std::cmp::Ordering::Less => Ok(second),
                    std::cmp::Ordering::Greater => Ok(first),
                    // "If both headers … have the same sequence number, the file is corrupt", unless they are one and the same.
                    std::cmp::Ordering::Equal if first == second => Ok(first),
                    std::cmp::Ordering::Equal => {
                        let message = "both headers have the same sequence number and say different things";
                        Err(wrong("SequenceNumber", HEADER_OFFSETS[0] + 8, first.sequence_number, message))
                    }
                }
            }
        }
    }
}

/// Whether a sector of the log, [`LOG_SECTOR_BYTES`] bytes, begins an entry with this mark.
pub fn is_log_entry(sector: &[u8], log_guid: Guid) -> bool {
    sector.starts_with(LOG_ENTRY_SIGNATURE) && Guid::at(sector, 32) == Some(log_guid)
}

/// The places of the two regions that every file has. Offsets and lengths in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VhdxRegions {
    /// Offset and length of the block allocation table.
    pub bat: (u64, u64),
    /// Offset and length of the metadata.
    pub metadata: (u64, u64),
}

impl VhdxRegions {
    /// Parses the region table at `offset` of the file, [`REGION_TABLE_BYTES`] bytes. `None`: its signature or its checksum
    /// is wrong.
    pub fn parse(bytes: &[u8], offset: u64) -> Option<Result<Self>> {
        let bytes = bytes.get(..REGION_TABLE_BYTES)?;
        let is_sound = bytes.starts_with(REGION_SIGNATURE) && le32_at(bytes, CHECKSUM_AT)? == checksum(bytes);
        is_sound.then(|| Self::parse_unverified(bytes, offset))
    }

    /// As [`VhdxRegions::parse`], with any signature and checksum.
    pub fn parse_unverified(bytes: &[u8], offset: u64) -> Result<Self> {
        let cut_short = || wrong("region table", offset, bytes.len(), "the region table is cut short");
        let count = le32_at(bytes, 8).ok_or_else(cut_short)?;
        if count > MAX_ENTRIES {
            let message = format!("a region table has at most {MAX_ENTRIES} entries");
            return Err(wrong("EntryCount", offset + 8, count, message));
        }
        let (mut bat, mut metadata) = (None, None);
        for index in 0..count as usize {
            let at = 16 + index * 32;
            let entry = || Some((Guid::at(bytes, at)?, le64_at(bytes, at + 16)?, le32_at(bytes, at + 24)?));
            let ((guid, start, len), required) = entry().zip(le32_at(bytes, at + 28)).ok_or_else(cut_short)?;
            let (len, place) = (u64::from(len), offset + at as u64);
            let slot = match guid {
                BAT => &mut bat,
                METADATA => &mut metadata,
                _ if required & 1 != 0 => {
                    let message = "a region that must be understood is not known";
                    return Err(refused("region", place, guid, message));
                }
                _ => continue,
            };
            let is_whole = start.is_multiple_of(UNIT_BYTES) && len.is_multiple_of(UNIT_BYTES) && len > 0;
            if !is_whole || start < UNIT_BYTES || start.checked_add(len).is_none() {
                let message = "a region is not at a multiple of 1 MiB behind the headers";
                return Err(wrong("FileOffset", place + 16, start, message));
            }
            if slot.replace((start, len)).is_some() {
                return Err(wrong("region", place, guid, "the same region stands twice in the table"));
            }
        }
        let missing =
            |name: &str| wrong("region", offset, "missing", format!("the region table doesn't name the {name}"));
        let bat: (u64, u64) = bat.ok_or_else(|| missing("block allocation table"))?;
        let metadata: (u64, u64) = metadata.ok_or_else(|| missing("metadata"))?;
        if bat.0 < metadata.0 + metadata.1 && metadata.0 < bat.0 + bat.1 {
            return Err(wrong("FileOffset", offset, bat.0, "the block allocation table overlaps the metadata"));
        }
        Ok(Self { bat, metadata })
    }
}

/// The state of a payload block, as its entry of the BAT gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VhdxBlock {
    /// Never written: zeroes, or as in the parent.
    Absent,
    /// Reads as zeroes: discarded, or zeroed.
    Zero,
    /// At this offset in bytes.
    At(u64),
    /// Some sectors are here, others in the parent.
    Partial,
    /// A state that the specification doesn't know.
    Unknown(u8),
}

impl VhdxBlock {
    /// Parses an entry: the state is in 3 bits, the place in MiB from bit 20 on.
    pub fn of(entry: u64) -> VhdxBlock {
        match entry & 7 {
            // 5 was "unmapped" in version 0.95 of the specification, and is so to QEMU.
            0 => VhdxBlock::Absent,
            1..=3 | 5 => VhdxBlock::Zero,
            6 => VhdxBlock::At(entry >> 20 << 20),
            7 => VhdxBlock::Partial,
            state => VhdxBlock::Unknown(state as u8),
        }
    }

    /// The entry for a block whose data are at this offset, a multiple of [`UNIT_BYTES`].
    pub fn entry_at(offset: u64) -> u64 {
        (offset / UNIT_BYTES * UNIT_BYTES) | 6
    }
}

/// CRC-32C of a structure with its checksum field taken as zeroes.
pub fn checksum(bytes: &[u8]) -> u32 {
    let (head, tail) = bytes.split_at(CHECKSUM_AT.min(bytes.len()));
    crc32c(&[head, &[0; 4], tail.get(4..).unwrap_or_default()])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Puts the right checksum in.
    fn summed(mut bytes: Vec<u8>) -> Vec<u8> {
        let sum = checksum(&bytes);
        bytes[CHECKSUM_AT..CHECKSUM_AT + 4].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    fn header(sequence_number: u64, changes: &[(usize, &[u8])]) -> Vec<u8> {
        let mut bytes = vec![0; HEADER_BYTES];
        let mut put = |at: usize, data: &[u8]| bytes[at..at + data.len()].copy_from_slice(data);
        put(0, HEADER_SIGNATURE);
        put(8, &sequence_number.to_le_bytes());
        put(66, &[1]);
        put(68, &(1u32 << 20).to_le_bytes());
        put(72, &(1u64 << 20).to_le_bytes());
        for (at, data) in changes {
            put(*at, data);
        }
        summed(bytes)
    }

    fn regions(changes: &[(usize, &[u8])]) -> Vec<u8> {
        let mut bytes = vec![0; REGION_TABLE_BYTES];
        let mut put = |at: usize, data: &[u8]| bytes[at..at + data.len()].copy_from_slice(data);
        put(0, REGION_SIGNATURE);
        put(8, &[2]);
        for (at, guid, mib) in [(16, BAT, 3u64), (48, METADATA, 2)] {
            put(at, &guid.0);
            put(at + 16, &(mib << 20).to_le_bytes());
            put(at + 24, &(1u32 << 20).to_le_bytes());
            put(at + 28, &[1]);
        }
        for (at, data) in changes {
            put(*at, data);
        }
        summed(bytes)
    }

    #[test]
    fn the_newer_sound_header_counts() {
        let parsed = |number: u64| VhdxHeader::parse(&header(number, &[]), 0);
        assert_eq!(VhdxHeader::newer(parsed(4), parsed(5)).unwrap().sequence_number, 5);
        assert_eq!(VhdxHeader::newer(parsed(6), parsed(5)).unwrap().sequence_number, 6);
        let mut torn = header(9, &[]);
        torn[100] ^= 1;
        assert!(VhdxHeader::parse(&torn, 0).is_none());
        assert_eq!(VhdxHeader::newer(None, parsed(5)).unwrap().sequence_number, 5);
        assert!(VhdxHeader::newer(None, None).unwrap_err().to_string().contains("header checksum"));
        assert!(VhdxHeader::newer(parsed(5), parsed(5)).is_ok());
        let other = VhdxHeader::parse(&header(5, &[(72, &[0, 0, 0x20])]), 0);
        assert!(VhdxHeader::newer(parsed(5), other).unwrap_err().to_string().contains("SequenceNumber"));
    }

    #[test]
    fn a_header_is_written_as_it_is_read() {
        let log_guid = Guid::random([0xff; 16]);
        assert_eq!(log_guid.to_string(), "ffffffff-ffff-4fff-bfff-ffffffffffff");
        let (file_guid, data_guid) = (Guid::random([1; 16]), Guid::random([2; 16]));
        let (log_offset, log_bytes) = (3 << 20, 2 << 20);
        let header = VhdxHeader { sequence_number: 9, file_guid, data_guid, log_guid, log_offset, log_bytes };
        assert_eq!(VhdxHeader::parse(&header.to_bytes(), 0).unwrap().unwrap(), header);
        assert_eq!(VhdxBlock::of(VhdxBlock::entry_at(5 << 20)), VhdxBlock::At(5 << 20));
    }

    #[test]
    fn regions_are_found() {
        let parsed = VhdxRegions::parse(&regions(&[]), 0).unwrap().unwrap();
        assert_eq!(parsed, VhdxRegions { bat: (3 << 20, 1 << 20), metadata: (2 << 20, 1 << 20) });
        assert!(VhdxRegions::parse(&regions(&[])[1..], 0).is_none());
        assert_eq!(BAT.to_string(), "2dc27766-f623-4200-9d64-115e9bfd4a08");
        assert_eq!(
            [0, 1, 2, 5, 4, 0x70_0006, 0x70_0007].map(VhdxBlock::of),
            [
                VhdxBlock::Absent,
                VhdxBlock::Zero,
                VhdxBlock::Zero,
                VhdxBlock::Zero,
                VhdxBlock::Unknown(4),
                VhdxBlock::At(7 << 20),
                VhdxBlock::Partial
            ]
        );
    }

    #[test]
    fn each_rule_is_held() {
        for (at, bytes, part) in [
            (66, &[2][..], "(Version"),
            (72, &[1], "LogOffset"),
            (74, &[0], "LogOffset"),
            (68, &[1], "LogLength"),
            (72, &[0, 0, 0xf0, 0xff, 0xff, 0xff, 0xff, 0xff], "LogLength"),
            (48, &[1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7], "LogVersion"),
        ] {
            let result = VhdxHeader::parse(&header(1, &[(at, bytes)]), 0x10000).unwrap();
            let error = result.unwrap_err().to_string();
            assert!(error.contains(part), "{at}: {error}");
        }
        for (at, bytes, part) in [
            (8, &[0, 8][..], "EntryCount"),
            (8, &[1], "doesn't name the metadata"),
            (8, &[0], "doesn't name the block"),
            (8, &[3], "metadata"),
            (16, &[0], "not known"),
            (32, &[1], "FileOffset"),
            (34, &[0], "FileOffset"),
            (40, &[0; 4], "FileOffset"),
            (34, &[0x20], "overlaps"),
        ] {
            // The bytes behind the second entry are a third one, equal to it.
            let copy = regions(&[])[48..80].to_vec();
            let result = VhdxRegions::parse(&regions(&[(80, &copy), (at, bytes)]), 0x30000).unwrap();
            let error = result.unwrap_err().to_string();
            assert!(error.contains(part) || (at == 8 && error.contains("twice")), "{at}: {error}");
        }
        for len in [0, 3, 4, 40, 79] {
            assert!(VhdxHeader::parse_unverified(&header(1, &[])[..len], 0).is_err(), "{len} bytes");
            assert!(VhdxRegions::parse_unverified(&regions(&[])[..len], 0).is_err(), "{len} bytes");
        }
        assert!(check_signature(b"vhdxfil").is_err() && check_signature(b"vhdxfile...").is_ok());
    }
}
