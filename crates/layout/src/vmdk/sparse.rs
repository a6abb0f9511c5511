// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Headers of sparse extents, entries of their grain tables, and the header of a compressed grain ("Hosted Sparse
//! Extents", "ESXi Host Sparse Extents", "Stream-Optimized Compressed").

use super::{SECTOR_BYTES, sectors_to_bytes};
use crate::bytes::{le16_at, le32_at, le64_at};
use cowshed_types::{Error, Result};

/// Bytes of a header that are looked at.
pub const HEADER_BYTES: usize = 512;
/// The footer, a header once more, lies so far before the end of a stream-optimised file, with the end marker behind.
pub const FOOTER_FROM_END_BYTES: u64 = 1024;
/// Bytes in front of a compressed grain: its first sector on the disk, and the length of the data.
pub const COMPRESSED_GRAIN_HEADER_BYTES: usize = 12;

const HOSTED_MAGIC: &[u8; 4] = b"KDMV";
const ESX_MAGIC: &[u8; 4] = b"COWD";
/// The directory's place is in the footer.
const DIRECTORY_AT_END: u64 = u64::MAX;
const FLAG_NEWLINE_TEST: u32 = 1;
const FLAG_REDUNDANT: u32 = 1 << 1;
const FLAG_ZEROED_GRAINS: u32 = 1 << 2;
const FLAG_COMPRESSED: u32 = 1 << 16;
const COMPRESSION_DEFLATE: u16 = 1;
/// Largest grain in sectors (32 MiB): a compressed one is held in memory.
const MAX_GRAIN_SECTORS: u64 = 1 << 16;
const TABLE_ENTRY_BYTES: usize = 4;
/// Entries of a grain table: "numGTEsPerGT … for VMware, 512"; ESX has 4096.
const MAX_HOSTED_TABLE_ENTRIES: u32 = 512;
const ESX_TABLE_ENTRIES: u32 = 4096;
/// Largest directory in bytes: 512 TiB of disk with the usual sizes.
const MAX_DIRECTORY_BYTES: u64 = 64 << 20;

/// The product that a header belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SparseKind {
    /// "KDMV": Workstation, Fusion, and everything that is exchanged.
    Hosted,
    /// "COWD": redo logs of ESX.
    Esx,
}

/// The header of a sparse extent, checked. Sizes and offsets in sectors of 512 bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SparseHeader {
    /// The product of the header.
    pub kind: SparseKind,
    /// 1 to 3.
    pub version: u32,
    /// Length of the extent.
    pub capacity_sectors: u64,
    /// Length of a grain, a power of two.
    pub grain_sectors: u64,
    /// Entries of a grain table.
    pub table_entries: u32,
    /// The sector of the grain directory; `None`: the footer has it.
    pub directory_sector: Option<u64>,
    /// The sector of the copy of the directory.
    pub redundant_directory_sector: Option<u64>,
    /// The sector that grains begin at (`overHead`); 0 where the header doesn't say.
    pub first_grain_sector: u64,
    /// Place and length of the embedded descriptor.
    pub descriptor: Option<(u64, u64)>,
    /// Entry 1 of a grain table means zeroes.
    pub zeroed_grains: bool,
    /// Grains are compressed.
    pub compressed: bool,
}

/// An entry of a grain table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grain {
    /// Not there: the parent's, or zeroes.
    Unallocated,
    /// Zeroes.
    Zero,
    /// At this sector of the file.
    At(u64),
}

/// The header in front of the data of a compressed grain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompressedGrain {
    /// First sector of the grain on the extent.
    pub first_sector: u64,
    /// Length of the compressed data in bytes.
    pub data_bytes: u32,
}

impl CompressedGrain {
    /// Parses [`COMPRESSED_GRAIN_HEADER_BYTES`] bytes.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        Some(Self { first_sector: le64_at(bytes, 0)?, data_bytes: le32_at(bytes, 8)? })
    }
}

impl SparseHeader {
    /// Parses the first [`HEADER_BYTES`] bytes of an extent, or of the footer of one.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let header = match bytes.get(..4) {
            Some(magic) if magic == HOSTED_MAGIC => Self::parse_hosted(bytes),
            Some(magic) if magic == ESX_MAGIC => Self::parse_esx(bytes),
            _ => {
                let error = Error::invalid_image("magic", "another", "this is no sparse VMDK extent");
                return Err(error.qemu("Image not in VMDK format"));
            }
        };
        let header =
            header.ok_or_else(|| Error::invalid_image("header", bytes.len(), "the VMDK header is cut short"))??;
        header.validate()?;
        Ok(header)
    }

    fn parse_hosted(bytes: &[u8]) -> Option<Result<Self>> {
        let version = le32_at(bytes, 4)?;
        if !(1..=3).contains(&version) {
            return Some(Err(Error::unsupported("this version of VMDK is unknown")
                .field("version")
                .offset(4)
                .value(version)));
        }
        let flags = le32_at(bytes, 8)?;
        // A transfer as text changes these bytes, and all others of their kind in the data.
        if flags & FLAG_NEWLINE_TEST != 0 && bytes.get(73..77)? != b"\n \r\n" {
            let message = "the VMDK file was damaged by a transfer as text: its line ends were changed";
            return Some(Err(Error::invalid_image("newline test", "another", message).offset(73)));
        }
        let algorithm = le16_at(bytes, 77)?;
        // Where the two contradict each other, packed bytes must not be taken for the disk's. QEMU goes by the algorithm alone.
        let compressed = flags & FLAG_COMPRESSED != 0 || algorithm == COMPRESSION_DEFLATE;
        if compressed && algorithm != COMPRESSION_DEFLATE {
            let error = Error::unsupported("this compression of VMDK is unknown");
            return Some(Err(error.field("compressAlgorithm").offset(77).value(algorithm)));
        }
        let (start, sectors) = (le64_at(bytes, 28)?, le64_at(bytes, 36)?);
        let directory = le64_at(bytes, 56)?;
        let redundant = le64_at(bytes, 48)?;
        Some(Ok(Self {
            kind: SparseKind::Hosted,
            version,
            capacity_sectors: le64_at(bytes, 12)?,
            grain_sectors: le64_at(bytes, 20)?,
            table_entries: le32_at(bytes, 44)?,
            directory_sector: (directory != DIRECTORY_AT_END).then_some(directory),
            redundant_directory_sector: (flags & FLAG_REDUNDANT != 0
                && redundant != 0
                && redundant != DIRECTORY_AT_END)
                .then_some(redundant),
            first_grain_sector: le64_at(bytes, 64)?,
            descriptor: (start != 0 && sectors != 0).then_some((start, sectors)),
            zeroed_grains: flags & FLAG_ZEROED_GRAINS != 0,
            compressed,
        }))
    }

    fn parse_esx(bytes: &[u8]) -> Option<Result<Self>> {
        let version = le32_at(bytes, 4)?;
        if version != 1 {
            let error = Error::unsupported("this version of VMDK is unknown");
            return Some(Err(error.field("version").offset(4).value(version)));
        }
        let header = Self {
            kind: SparseKind::Esx,
            version,
            capacity_sectors: u64::from(le32_at(bytes, 12)?),
            grain_sectors: u64::from(le32_at(bytes, 16)?),
            table_entries: ESX_TABLE_ENTRIES,
            directory_sector: Some(u64::from(le32_at(bytes, 20)?)),
            redundant_directory_sector: None,
            first_grain_sector: 0,
            descriptor: None,
            zeroed_grains: false,
            compressed: false,
        };
        let entries = u64::from(le32_at(bytes, 24)?);
        if header.grain_sectors != 0 && entries < header.directory_entries() {
            let message = "the grain directory is too short for the extent";
            return Some(Err(Error::invalid_image("numGDEntries", entries, message).offset(24)));
        }
        Some(Ok(header))
    }

    fn validate(&self) -> Result<()> {
        if sectors_to_bytes(self.capacity_sectors).is_none() {
            return Err(Error::invalid_image("capacity", self.capacity_sectors, "the VMDK extent is too large"));
        }
        if !self.grain_sectors.is_power_of_two() || self.grain_sectors > MAX_GRAIN_SECTORS {
            let message = format!("the grain size is no power of two up to {MAX_GRAIN_SECTORS} sectors");
            return Err(Error::invalid_image("grainSize", self.grain_sectors, message));
        }
        if self.table_entries == 0 || (self.kind == SparseKind::Hosted && self.table_entries > MAX_HOSTED_TABLE_ENTRIES)
        {
            let message = format!("a grain table doesn't have 1 to {MAX_HOSTED_TABLE_ENTRIES} entries");
            return Err(Error::invalid_image("numGTEsPerGT", self.table_entries, message));
        }
        if self.directory_bytes() > MAX_DIRECTORY_BYTES {
            let message = format!("the grain directory is larger than {MAX_DIRECTORY_BYTES} bytes");
            return Err(Error::invalid_image("capacity", self.capacity_sectors, message));
        }
        for (field, sector) in [
            ("gdOffset", self.directory_sector),
            ("rgdOffset", self.redundant_directory_sector),
            ("descriptorOffset", self.descriptor.map(|(start, sectors)| start.saturating_add(sectors))),
        ] {
            if let Some(sector) = sector.filter(|sector| sectors_to_bytes(*sector).is_none()) {
                return Err(Error::invalid_image(field, sector, "an offset of the VMDK header is impossible"));
            }
        }
        Ok(())
    }

    /// Length of a grain in bytes.
    pub fn grain_bytes(&self) -> u64 {
        self.grain_sectors * SECTOR_BYTES
    }

    /// Bytes of the disk that one grain table describes.
    pub fn table_span_bytes(&self) -> u64 {
        self.grain_bytes() * u64::from(self.table_entries)
    }

    /// Length of a grain table in bytes.
    pub fn table_bytes(&self) -> usize {
        self.table_entries as usize * TABLE_ENTRY_BYTES
    }

    /// Entries of the directory: one for each grain table.
    pub fn directory_entries(&self) -> u64 {
        self.capacity_sectors.div_ceil(self.grain_sectors * u64::from(self.table_entries))
    }

    /// Length of the directory in bytes.
    pub fn directory_bytes(&self) -> u64 {
        self.directory_entries().saturating_mul(4)
    }

    /// The grain that entry `index` of a table leads to. `None`: the table is too short.
    pub fn grain_at(&self, table: &[u8], index: usize) -> Option<Grain> {
        le32_at(table, index.checked_mul(TABLE_ENTRY_BYTES)?).map(|entry| self.grain(entry))
    }

    /// The grain that an entry of a grain table leads to.
    pub fn grain(&self, entry: u32) -> Grain {
        match entry {
            0 => Grain::Unallocated,
            1 if self.zeroed_grains => Grain::Zero,
            sector => Grain::At(u64::from(sector)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hosted() -> Vec<u8> {
        let mut bytes = vec![0; HEADER_BYTES];
        let mut put = |at: usize, data: &[u8]| bytes[at..at + data.len()].copy_from_slice(data);
        put(0, HOSTED_MAGIC);
        put(4, &1u32.to_le_bytes());
        put(8, &3u32.to_le_bytes());
        put(12, &20_480u64.to_le_bytes());
        put(20, &128u64.to_le_bytes());
        put(28, &1u64.to_le_bytes());
        put(36, &20u64.to_le_bytes());
        put(44, &512u32.to_le_bytes());
        put(48, &21u64.to_le_bytes());
        put(56, &26u64.to_le_bytes());
        put(73, b"\n \r\n");
        bytes
    }

    fn esx() -> Vec<u8> {
        let words: [u32; 6] = [1, 3, 8192, 1, 4, 2];
        let mut bytes = ESX_MAGIC.to_vec();
        bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
        bytes.resize(HEADER_BYTES, 0);
        bytes
    }

    #[test]
    fn headers_are_read() {
        let header = SparseHeader::parse(&hosted()).unwrap();
        assert_eq!((header.grain_bytes(), header.directory_entries()), (65_536, 1));
        assert_eq!((header.directory_sector, header.redundant_directory_sector), (Some(26), Some(21)));
        assert_eq!(header.descriptor, Some((1, 20)));
        assert_eq!(
            (header.grain(0), header.grain(1), header.grain(2)),
            (Grain::Unallocated, Grain::At(1), Grain::At(2))
        );
        let mut packed = hosted();
        packed[77] = 1;
        assert!(SparseHeader::parse(&packed).unwrap().compressed, "the flag is not set");
        let header = SparseHeader::parse(&esx()).unwrap();
        assert_eq!((header.kind, header.grain_bytes(), header.directory_entries()), (SparseKind::Esx, 512, 2));
    }

    #[test]
    fn each_rule_is_held() {
        for (at, bytes, part) in [
            (0, &b"QFI\xfb"[..], "no sparse"),
            (4, &[4, 0, 0, 0], "version"),
            (10, &[1], "compression"),
            (12, &[0xff; 8], "too large"),
            (12, &[0, 0, 0, 0, 0, 0xff, 0, 0], "larger than"),
            (20, &[0; 8], "grainSize"),
            (20, &[3], "grainSize"),
            (20, &[0, 0, 2], "grainSize"),
            (44, &[0; 4], "numGTEsPerGT"),
            (44, &[1, 2, 0, 0], "numGTEsPerGT"),
            (48, &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f], "rgdOffset"),
            (56, &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f], "gdOffset"),
            (28, &[0xff; 8], "descriptorOffset"),
            (75, b"\n", "transfer as text"),
        ] {
            let mut header = hosted();
            header[at..at + bytes.len()].copy_from_slice(bytes);
            let error = SparseHeader::parse(&header).unwrap_err().to_string();
            assert!(error.contains(part), "{at}: {error}");
        }
        for len in 0..79 {
            assert!(SparseHeader::parse(&hosted()[..len]).is_err(), "{len} bytes");
        }
        let mut short = esx();
        short[24] = 1;
        assert!(SparseHeader::parse(&short).unwrap_err().to_string().contains("numGDEntries"));
    }
}
