// SPDX-License-Identifier: Apache-2.0 OR MIT
//! VHD, the format of Virtual PC and of older Hyper-V, which QEMU calls vpc: Microsoft's "Virtual Hard Disk Image
//! Format Specification" 1.0. A footer is at the end of the file. Dynamic disks also have a copy of it at the start, a
//! header, and a block allocation table. Numbers are big-endian, offsets of structures count bytes, those of blocks
//! sectors.

use crate::bytes::{array_at, be16_at, be32_at, be64_at};
use crate::complaint::{refused, wrong};
use crate::fresh::{FilePiece, FreshFile};
use crate::parents::utf16;
use cowshed_types::{Error, Result};

/// Length of the footer, and of its copy at the start of a dynamic disk, in bytes.
pub const FOOTER_BYTES: usize = 512;
/// Length of the header of a dynamic disk in bytes.
pub const DYNAMIC_HEADER_BYTES: usize = 1024;
/// Bytes of an entry of the block allocation table.
pub const ENTRY_BYTES: u64 = 4;
/// Unit of the table's entries.
pub const SECTOR_BYTES: u64 = 512;

/// The footer's mark.
pub const COOKIE: &[u8; 8] = b"conectix";
const DYNAMIC_COOKIE: &[u8; 8] = b"cxsparse";
const FOOTER_CHECKSUM_AT: usize = 64;
const DYNAMIC_CHECKSUM_AT: usize = 36;
const VERSION: u32 = 0x0001_0000;
const MAX_BLOCK_BYTES: u32 = 1 << 30;
/// A geometry of this many cylinders, heads and sectors means that the disk is too large to have one.
const LARGEST_GEOMETRY: (u16, u8, u8) = (65535, 16, 255);
/// Creators of disks whose size is that of the geometry: Virtual PC, and QEMU by default.
const SIZED_BY_GEOMETRY: [&[u8; 4]; 2] = [b"vpc ", b"qemu"];
const UNALLOCATED: u32 = 0xffff_ffff;
/// The largest disk of a new image, in sectors: 2040 GiB.
const MAX_NEW_SECTORS: u64 = 2040 << 21;
const NEW_BLOCK_BYTES: u32 = 2 << 20;
/// "Reserved bit", always 1.
const FEATURES: u32 = 2;
const NEW_HEADER_AT: u64 = FOOTER_BYTES as u64;
const NEW_TABLE_AT: u64 = NEW_HEADER_AT + DYNAMIC_HEADER_BYTES as u64;

/// The storage of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VpcKind {
    /// The bytes of the disk, then the footer.
    Fixed,
    /// In blocks; the header of the dynamic disk is at this offset in bytes.
    Dynamic(u64),
    /// The same, with sectors that are in another image: [`VpcParent`].
    Differencing(u64),
}

/// The footer of an image, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VpcFooter {
    /// The storage of the disk.
    pub kind: VpcKind,
    /// Four letters for the program that made the image.
    pub creator: [u8; 4],
    /// Size of the disk in bytes, by the rule for its creator: see [`VpcFooter::parse`].
    pub size: u64,
    /// The id of the image, by which differences refer to it.
    pub uuid: [u8; 16],
}

impl VpcFooter {
    /// Parses a footer or its copy, [`FOOTER_BYTES`] bytes.
    ///
    /// The size of the disk is `current_size`. For images of Virtual PC and of QEMU (unless made with `force_size`) it
    /// is cylinders × heads × sectors, except for the largest geometry. These are the rules of QEMU 11, as it shows
    /// them.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        if !bytes.starts_with(COOKIE) {
            return Err(wrong("cookie", 0, "another", "this is no VHD footer").qemu("invalid VPC image"));
        }
        let cut_short = || wrong("footer", 0, bytes.len(), "the VHD footer is cut short");
        let footer = bytes.get(..FOOTER_BYTES).ok_or_else(cut_short)?;
        check_sum(footer, FOOTER_CHECKSUM_AT, "footer checksum")?;
        Self::parse_unverified(footer)
    }

    /// As [`VpcFooter::parse`], whatever the checksum is.
    pub fn parse_unverified(bytes: &[u8]) -> Result<Self> {
        let cut_short = || wrong("footer", 0, bytes.len(), "the VHD footer is cut short");
        Self::parse_fields(bytes).ok_or_else(cut_short)?
    }

    fn parse_fields(bytes: &[u8]) -> Option<Result<Self>> {
        let version = be32_at(bytes, 12)?;
        if version >> 16 != VERSION >> 16 {
            let message = "VHD images of this version are not supported";
            return Some(Err(refused("file_format_version", 12, format!("{version:#x}"), message)));
        }
        let (data_offset, current_size) = (be64_at(bytes, 16)?, be64_at(bytes, 48)?);
        let creator: [u8; 4] = array_at(bytes, 28)?;
        let disk_type = be32_at(bytes, 60)?;
        let kind = match disk_type {
            2 => VpcKind::Fixed,
            3 => VpcKind::Dynamic(data_offset),
            4 => VpcKind::Differencing(data_offset),
            _ => return Some(Err(wrong("disk_type", 60, disk_type, "unknown type of VHD image"))),
        };
        let (cylinders, heads, sectors) = (be16_at(bytes, 56)?, *bytes.get(58)?, *bytes.get(59)?);
        let by_geometry = SIZED_BY_GEOMETRY.contains(&&creator) && (cylinders, heads, sectors) != LARGEST_GEOMETRY;
        let size = match by_geometry {
            true => u64::from(cylinders) * u64::from(heads) * u64::from(sectors) * SECTOR_BYTES,
            // Whole sectors, as QEMU counts.
            false => current_size / SECTOR_BYTES * SECTOR_BYTES,
        };
        if i64::try_from(size).is_err() {
            return Some(Err(wrong("current_size", 48, current_size, "the VHD disk is too large")));
        }
        Some(Ok(Self { kind, creator, size, uuid: array_at(bytes, 68)? }))
    }
}

/// The header of a dynamic disk, checked. Offsets and lengths in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VpcDynamicHeader {
    /// Offset of the block allocation table, in bytes.
    pub table_offset: u64,
    /// Entries of that table.
    pub entries: u32,
    /// Length of a block without its sector bitmap, a power of two.
    pub block_bytes: u64,
}

impl VpcDynamicHeader {
    /// Parses [`DYNAMIC_HEADER_BYTES`] bytes for a disk of `size` bytes.
    pub fn parse(bytes: &[u8], size: u64) -> Result<Self> {
        if !bytes.starts_with(DYNAMIC_COOKIE) {
            return Err(wrong(
                "dynamic cookie",
                0,
                "another",
                "the header of the dynamic disk is not where the footer says",
            ));
        }
        let cut_short = || wrong("dynamic header", 0, bytes.len(), "the header of the dynamic disk is cut short");
        let header = bytes.get(..DYNAMIC_HEADER_BYTES).ok_or_else(cut_short)?;
        check_sum(header, DYNAMIC_CHECKSUM_AT, "dynamic header checksum")?;
        Self::parse_unverified(header, size)
    }

    /// As [`VpcDynamicHeader::parse`], with any checksum.
    pub fn parse_unverified(bytes: &[u8], size: u64) -> Result<Self> {
        let cut_short = || wrong("dynamic header", 0, bytes.len(), "the header of the dynamic disk is cut short");
        Self::parse_fields(bytes, size).ok_or_else(cut_short)?
    }

    fn parse_fields(bytes: &[u8], size: u64) -> Option<Result<Self>> {
        let (table_offset, version) = (be64_at(bytes, 16)?, be32_at(bytes, 24)?);
        let (entries, block_bytes) = (be32_at(bytes, 28)?, be32_at(bytes, 32)?);
        if version >> 16 != VERSION >> 16 {
            let message = "dynamic VHD disks of this version are not supported";
            return Some(Err(refused("header_version", 24, format!("{version:#x}"), message)));
        }
        if !block_bytes.is_power_of_two() || !(SECTOR_BYTES as u32..=MAX_BLOCK_BYTES).contains(&block_bytes) {
            let message = format!("the block size is no power of two from 512 to {MAX_BLOCK_BYTES}");
            return Some(Err(wrong("block_size", 32, block_bytes, message)));
        }
        let header = Self { table_offset, entries, block_bytes: u64::from(block_bytes) };
        if u64::from(entries) * header.block_bytes < size {
            let message = format!("too few blocks for a disk of {size} bytes");
            return Some(Err(wrong("max_table_entries", 28, entries, message)));
        }
        if table_offset < FOOTER_BYTES as u64 || table_offset.checked_add(header.table_bytes()).is_none() {
            let message = "the block allocation table is at an impossible offset";
            return Some(Err(wrong("table_offset", 16, table_offset, message)));
        }
        Some(Ok(header))
    }

    /// Length of the block allocation table in bytes.
    pub fn table_bytes(&self) -> u64 {
        u64::from(self.entries) * ENTRY_BYTES
    }

    /// Length of the sector bitmap in front of each block: a bit for each sector, whole sectors of them.
    pub fn bitmap_bytes(&self) -> u64 {
        (self.block_bytes / SECTOR_BYTES).div_ceil(8).next_multiple_of(SECTOR_BYTES)
    }

    /// Offset of a block's data by its entry of the table, in bytes; `None`: not allocated, zeroes.
    pub fn block(&self, entry: u32) -> Option<u64> {
        (entry != UNALLOCATED).then(|| u64::from(entry) * SECTOR_BYTES + self.bitmap_bytes())
    }
}

/// The fields of a dynamic disk's header that name the image it is a difference to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VpcParent {
    /// The parent's [`VpcFooter::uuid`].
    pub uuid: [u8; 16],
    /// Its name, mostly an absolute path of Windows.
    pub name: String,
    /// Time of the last write to the parent's file, in seconds since the year 2000 began, UTC. 0 if unknown.
    pub time: u32,
    /// Where the file has its relative path and its absolute one, in UTF-16LE: offset and length in bytes.
    pub relative: Option<(u64, u32)>,
    /// See [`VpcParent::relative`].
    pub absolute: Option<(u64, u32)>,
}

/// The beginning of the year 2000 in seconds since 1970, UTC: times of VHD images count from there.
pub const EPOCH_SECONDS: i64 = 946_684_800;

/// The longest name of a parent, in bytes.
pub const MAX_LOCATOR_BYTES: u32 = 4096;

impl VpcParent {
    /// Parses [`DYNAMIC_HEADER_BYTES`] bytes.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let cut_short = || wrong("dynamic header", 0, bytes.len(), "the header of the dynamic disk is cut short");
        Self::parse_fields(bytes).ok_or_else(cut_short)?
    }

    fn parse_fields(bytes: &[u8]) -> Option<Result<Self>> {
        let name = utf16(bytes.get(64..576)?, true);
        let mut parent =
            Self { uuid: array_at(bytes, 40)?, name, time: be32_at(bytes, 56)?, relative: None, absolute: None };
        for index in 0..8 {
            let at = 576 + index * 24;
            let place = match &array_at::<4>(bytes, at)? {
                b"W2ru" => &mut parent.relative,
                b"W2ku" => &mut parent.absolute,
                _ => continue,
            };
            let (len, offset) = (be32_at(bytes, at + 8)?, be64_at(bytes, at + 16)?);
            if len > MAX_LOCATOR_BYTES {
                let message = format!("a name of the parent has more than {MAX_LOCATOR_BYTES} bytes");
                return Some(Err(wrong("platform_data_length", at as u64 + 8, len, message)));
            }
            *place = Some((offset, len));
        }
        Some(Ok(parent))
    }
}

/// Cylinders, heads and sectors per track of a disk with this many sectors: the appendix "CHS Calculation".
fn geometry(sectors: u64) -> (u16, u8, u8) {
    let (most_cylinders, most_heads) = (u64::from(LARGEST_GEOMETRY.0), 16);
    let sectors = sectors.min(most_cylinders * most_heads * 255);
    let (mut per_track, mut heads);
    if sectors >= most_cylinders * most_heads * 63 {
        (per_track, heads) = (255, most_heads);
    } else {
        per_track = 17;
        heads = (sectors / per_track).div_ceil(1024).max(4);
        if sectors / per_track >= heads * 1024 || heads > most_heads {
            (per_track, heads) = (31, most_heads);
        }
        if sectors / per_track >= heads * 1024 {
            (per_track, heads) = (63, most_heads);
        }
    }
    ((sectors / per_track / heads) as u16, heads as u8, per_track as u8)
}

/// A new image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewVpc {
    /// Size of the disk in bytes.
    pub size: u64,
    /// The bytes of the disk as they are, then the footer.
    pub is_fixed: bool,
    /// The size counts as it is. Else it is rounded up to the size of a geometry.
    pub force_size: bool,
    /// Seconds since the beginning of the year 2000, UTC.
    pub made_at: u32,
    /// Random bytes that name the image.
    pub uuid: [u8; 16],
}

impl NewVpc {
    /// Sectors of the disk, and its geometry. `None`: too large.
    fn sectors(&self) -> Option<(u64, (u16, u8, u8))> {
        let wanted = self.size.div_ceil(SECTOR_BYTES);
        if wanted > MAX_NEW_SECTORS {
            return None;
        }
        let most = u64::from(LARGEST_GEOMETRY.0) * u64::from(LARGEST_GEOMETRY.1) * u64::from(LARGEST_GEOMETRY.2);
        if self.force_size || wanted > most {
            return Some((wanted, LARGEST_GEOMETRY));
        }
        if wanted == 0 {
            return Some((0, (0, 0, 0)));
        }
        // A track more each time: the sizes of geometries are close to each other.
        (wanted..=wanted + most).map(geometry).find_map(|geometry| {
            let sectors = u64::from(geometry.0) * u64::from(geometry.1) * u64::from(geometry.2);
            (sectors >= wanted).then_some((sectors, geometry))
        })
    }

    /// The file as QEMU lays it out. An error for disks over 2040 GiB.
    pub fn lay_out(&self) -> Result<FreshFile> {
        let (sectors, geometry) = self.sectors().ok_or_else(|| {
            Error::invalid_argument("The image size is too large for file format 'vpc'").field("size").value(self.size)
        })?;
        let size = sectors * SECTOR_BYTES;
        let footer = self.footer(size, geometry);
        if self.is_fixed {
            // As a raw file, whose first block shows the alignment of direct I/O.
            let first = (0, FilePiece::Fill(0, size.min(4096)));
            return Ok(FreshFile { len: size + FOOTER_BYTES as u64, pieces: vec![first], mark: Some((size, footer)) });
        }
        let entries = size.div_ceil(u64::from(NEW_BLOCK_BYTES)) as u32;
        let table_bytes = u64::from(entries) * ENTRY_BYTES;
        let whole_table_bytes = table_bytes.next_multiple_of(SECTOR_BYTES);
        let mut header = vec![0; DYNAMIC_HEADER_BYTES];
        let mut put = |at: usize, bytes: &[u8]| header[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, DYNAMIC_COOKIE);
        put(8, &[0xff; 8]);
        put(16, &NEW_TABLE_AT.to_be_bytes());
        put(24, &VERSION.to_be_bytes());
        put(28, &entries.to_be_bytes());
        put(32, &NEW_BLOCK_BYTES.to_be_bytes());
        let sum = checksum(&header, DYNAMIC_CHECKSUM_AT);
        header[DYNAMIC_CHECKSUM_AT..DYNAMIC_CHECKSUM_AT + 4].copy_from_slice(&sum.to_be_bytes());
        let end = NEW_TABLE_AT + whole_table_bytes;
        Ok(FreshFile {
            len: end + FOOTER_BYTES as u64,
            pieces: vec![
                (NEW_HEADER_AT, FilePiece::Bytes(header)),
                (NEW_TABLE_AT, FilePiece::Fill(0xff, whole_table_bytes)),
                (end, FilePiece::Bytes(footer.clone())),
            ],
            mark: Some((0, footer)),
        })
    }

    fn footer(&self, size: u64, (cylinders, heads, sectors): (u16, u8, u8)) -> Vec<u8> {
        let mut footer = vec![0; FOOTER_BYTES];
        let mut put = |at: usize, bytes: &[u8]| footer[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, COOKIE);
        put(8, &FEATURES.to_be_bytes());
        put(12, &VERSION.to_be_bytes());
        put(16, &if self.is_fixed { u64::MAX } else { NEW_HEADER_AT }.to_be_bytes());
        put(24, &self.made_at.to_be_bytes());
        // The names by which QEMU, and this library, know whether the geometry or the size counts.
        put(28, if self.force_size { b"qem2" } else { b"qemu" });
        put(32, &[0, 5, 0, 3]);
        put(36, b"Wi2k");
        put(40, &size.to_be_bytes());
        put(48, &size.to_be_bytes());
        put(56, &cylinders.to_be_bytes());
        put(58, &[heads, sectors]);
        put(60, &if self.is_fixed { 2u32 } else { 3 }.to_be_bytes());
        put(68, &self.uuid);
        let sum = checksum(&footer, FOOTER_CHECKSUM_AT);
        footer[FOOTER_CHECKSUM_AT..FOOTER_CHECKSUM_AT + 4].copy_from_slice(&sum.to_be_bytes());
        footer
    }
}

/// "A one's complement of the sum of all the bytes … without the checksum field".
fn check_sum(bytes: &[u8], at: usize, field: &'static str) -> Result<()> {
    let sum = checksum(bytes, at);
    match be32_at(bytes, at) {
        Some(stored) if stored != sum => {
            let message = format!("the checksum is wrong, it should be {sum:#010x}");
            Err(wrong(field, at as u64, format!("{stored:#010x}"), message))
        }
        _ => Ok(()),
    }
}

/// The checksum of a footer or header whose field for it is at byte `at`.
pub fn checksum(bytes: &[u8], at: usize) -> u32 {
    let counted = bytes.iter().enumerate().filter(|(index, _)| !(at..at + 4).contains(index));
    !counted.fold(0u32, |sum, (_, byte)| sum.wrapping_add(u32::from(*byte)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Puts the right checksum in.
    fn summed(mut bytes: Vec<u8>, at: usize) -> Vec<u8> {
        let sum = checksum(&bytes, at);
        bytes[at..at + 4].copy_from_slice(&sum.to_be_bytes());
        bytes
    }

    fn footer(changes: &[(usize, &[u8])]) -> Vec<u8> {
        let mut bytes = vec![0; FOOTER_BYTES];
        let mut put = |at: usize, data: &[u8]| bytes[at..at + data.len()].copy_from_slice(data);
        put(0, COOKIE);
        put(12, &VERSION.to_be_bytes());
        put(16, &512u64.to_be_bytes());
        put(28, b"win ");
        put(48, &(10u64 << 20).to_be_bytes());
        // 10,514,432 bytes.
        put(56, &[0x01, 0x2e, 4, 17]);
        put(60, &3u32.to_be_bytes());
        for (at, data) in changes {
            put(*at, data);
        }
        summed(bytes, FOOTER_CHECKSUM_AT)
    }

    fn dynamic(changes: &[(usize, &[u8])]) -> Vec<u8> {
        let mut bytes = vec![0; DYNAMIC_HEADER_BYTES];
        let mut put = |at: usize, data: &[u8]| bytes[at..at + data.len()].copy_from_slice(data);
        put(0, DYNAMIC_COOKIE);
        put(8, &[0xff; 8]);
        put(16, &1536u64.to_be_bytes());
        put(24, &VERSION.to_be_bytes());
        put(28, &5u32.to_be_bytes());
        put(32, &(2u32 << 20).to_be_bytes());
        for (at, data) in changes {
            put(*at, data);
        }
        summed(bytes, DYNAMIC_CHECKSUM_AT)
    }

    #[test]
    fn a_new_image_is_read_as_it_was_meant() {
        for (size, is_fixed, force_size, expected) in [
            (0, false, false, 0),
            (512, false, false, 34_816),
            (1 << 20, false, false, 1_079_296),
            (1 << 20, true, true, 1 << 20),
            (4 << 30, false, false, 4_295_467_008),
            (127 << 30, false, false, 136_365_219_840),
            (128 << 30, true, false, 128 << 30),
            (2040 << 30, false, true, 2040 << 30),
        ] {
            let new = NewVpc { size, is_fixed, force_size, made_at: 1, uuid: [3; 16] };
            let fresh = new.lay_out().unwrap();
            let (at, mark) = fresh.mark.unwrap();
            let footer = VpcFooter::parse(&mark).unwrap();
            assert_eq!(footer.size, expected, "{new:?}");
            assert_eq!(at, if is_fixed { expected } else { 0 });
            if is_fixed {
                assert_eq!((fresh.len, footer.kind), (expected + 512, VpcKind::Fixed));
                continue;
            }
            let (at, FilePiece::Bytes(header)) = &fresh.pieces[0] else { panic!("no header") };
            assert_eq!(footer.kind, VpcKind::Dynamic(*at));
            let header = VpcDynamicHeader::parse(header, expected).unwrap();
            assert_eq!((header.table_offset, header.block_bytes), (fresh.pieces[1].0, 2 << 20));
            assert!(header.table_offset + header.table_bytes() <= fresh.pieces[2].0);
            assert_eq!(fresh.pieces[2].0 + 512, fresh.len);
        }
        let new = NewVpc { size: (2040 << 30) + 1, is_fixed: false, force_size: true, made_at: 0, uuid: [0; 16] };
        assert!(new.lay_out().is_err());
    }

    #[test]
    fn the_creator_decides_which_size_counts() {
        for (creator, geometry, size) in [
            (b"win ", [0x01, 0x2e, 4, 17], 10 << 20),
            (b"qem2", [0x01, 0x2e, 4, 17], 10 << 20),
            (b"qemu", [0x01, 0x2e, 4, 17], 10_514_432),
            (b"vpc ", [0x01, 0x2e, 4, 17], 10_514_432),
            (b"vpc ", [0xff, 0xff, 16, 255], 10 << 20),
        ] {
            let parsed = VpcFooter::parse(&footer(&[(28, creator), (56, &geometry)])).unwrap();
            assert_eq!((parsed.size, parsed.kind, &parsed.creator), (size, VpcKind::Dynamic(512), creator));
        }
    }

    #[test]
    fn a_difference_is_a_kind_of_its_own() {
        let parsed = VpcFooter::parse(&footer(&[(60, &[0, 0, 0, 4]), (68, &[7; 16])])).unwrap();
        assert_eq!((parsed.kind, parsed.uuid), (VpcKind::Differencing(512), [7; 16]));
    }

    #[test]
    fn the_header_of_a_dynamic_disk_is_read() {
        let parsed = VpcDynamicHeader::parse(&dynamic(&[]), 10 << 20).unwrap();
        assert_eq!((parsed.table_offset, parsed.entries, parsed.block_bytes), (1536, 5, 2 << 20));
        assert_eq!((parsed.bitmap_bytes(), parsed.table_bytes()), (512, 20));
        assert_eq!((parsed.block(5), parsed.block(u32::MAX)), (Some(6 * 512), None));
    }

    #[test]
    fn each_rule_is_held() {
        for (at, bytes, part) in [
            (0, &b"x"[..], "cookie"),
            (12, &[0, 2], "file_format_version"),
            (60, &[0, 0, 0, 9], "disk_type"),
            (48, &[0xff; 8], "current_size"),
        ] {
            let error = VpcFooter::parse(&footer(&[(at, bytes)])).unwrap_err().to_string();
            assert!(error.contains(part), "{at}: {error}");
        }
        for (at, bytes, part) in [
            (0, &b"x"[..], "dynamic cookie"),
            (16, &[0; 8], "table_offset"),
            (16, &[0xff; 8], "table_offset"),
            (24, &[0, 3], "header_version"),
            (28, &[0, 0, 0, 4], "max_table_entries"),
            (32, &[0; 4], "block_size"),
            (32, &[0x80, 0, 0, 0], "block_size"),
            (35, &[1], "block_size"),
        ] {
            let error = VpcDynamicHeader::parse(&dynamic(&[(at, bytes)]), 10 << 20).unwrap_err().to_string();
            assert!(error.contains(part), "{at}: {error}");
        }
        let (mut bad_footer, mut bad_header) = (footer(&[]), dynamic(&[]));
        bad_footer[200] ^= 1;
        bad_header[200] ^= 1;
        assert!(VpcFooter::parse(&bad_footer).unwrap_err().to_string().contains("footer checksum"));
        assert!(VpcDynamicHeader::parse(&bad_header, 1).unwrap_err().to_string().contains("dynamic header checksum"));
        for len in 0..FOOTER_BYTES {
            assert!(VpcFooter::parse(&footer(&[])[..len]).is_err(), "{len} bytes");
        }
        for len in 0..DYNAMIC_HEADER_BYTES {
            assert!(VpcDynamicHeader::parse(&dynamic(&[])[..len], 1).is_err(), "{len} bytes");
        }
    }
}
