// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Parallels' expandable images, as QEMU's `docs/interop/parallels.rst` describes them: a header, a block allocation table
//! (BAT), clusters. Numbers are little-endian, offsets of the header count sectors.

use crate::bytes::{array_at, le32_at, le64_at};
use crate::complaint::{refused, wrong};
use crate::fresh::FreshFile;
use cowshed_types::{Error, Result};

/// Length of the header in bytes; the BAT follows it.
pub const HEADER_BYTES: usize = 64;
/// Bytes of an entry of the BAT.
pub const ENTRY_BYTES: u64 = 4;

const SECTOR_BYTES: u64 = 512;
const OLD_MAGIC: &[u8; 16] = b"WithoutFreeSpace";
const MAGIC: &[u8; 16] = b"WithouFreSpacExt";
const VERSION: u32 = 2;
/// Largest cluster in sectors (1 GiB).
const MAX_CLUSTER_SECTORS: u32 = 1 << 21;
const IN_USE: u32 = 0x746f_6e59;

/// The header of an image, checked. Sizes and offsets in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParallelsHeader {
    /// Length of a cluster, whole sectors.
    pub cluster_bytes: u64,
    /// Entries of the BAT.
    pub entries: u32,
    /// Size of the disk in bytes.
    pub size: u64,
    /// Offset of the first cluster, in bytes.
    pub data_offset: u64,
    /// The unit in which entries of the BAT count, in bytes: a sector, or a cluster.
    pub entry_unit_bytes: u64,
    /// A program had it open for writing and didn't close it.
    pub is_in_use: bool,
    /// The sector of the format extension; 0 without one.
    pub extension_sector: u64,
}

impl ParallelsHeader {
    /// Parses the first [`HEADER_BYTES`] bytes of an image.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let is_old = match array_at::<16>(bytes, 0) {
            Some(magic) if &magic == OLD_MAGIC => true,
            Some(magic) if &magic == MAGIC => false,
            Some(other) => {
                return Err(wrong("magic", 0, other.escape_ascii(), "this is no Parallels image")
                    .qemu("Image not in Parallels format"));
            }
            None => {
                let error = wrong("header", 0, bytes.len(), "the Parallels header is cut short");
                return Err(error.qemu("Image not in Parallels format"));
            }
        };
        let cut_short = || wrong("header", 0, bytes.len(), "the Parallels header is cut short");
        Self::parse_fields(bytes, is_old).ok_or_else(cut_short)?
    }

    fn parse_fields(bytes: &[u8], is_old: bool) -> Option<Result<Self>> {
        let version = le32_at(bytes, 16)?;
        if version != VERSION {
            let message = "Parallels images of this version are not supported";
            return Some(Err(refused("version", 16, version, message)));
        }
        let (tracks, entries, nb_sectors) = (le32_at(bytes, 28)?, le32_at(bytes, 32)?, le64_at(bytes, 36)?);
        let (in_use, data_off) = (le32_at(bytes, 44)?, le32_at(bytes, 48)?);
        // The field ends the header; older programs wrote less of it.
        let extension_sector = le64_at(bytes, EXTENSION_AT as usize)?;
        if tracks == 0 || tracks > MAX_CLUSTER_SECTORS {
            let message = format!("the cluster size is not from 1 to {MAX_CLUSTER_SECTORS} sectors");
            return Some(Err(wrong("tracks", 28, tracks, message)));
        }
        let cluster_bytes = u64::from(tracks) * SECTOR_BYTES;
        // "Only the lowest 4 bytes are used" with the old magic.
        let sectors = if is_old { nb_sectors & 0xffff_ffff } else { nb_sectors };
        let Some(size) = sectors.checked_mul(SECTOR_BYTES).filter(|size| i64::try_from(*size).is_ok()) else {
            return Some(Err(wrong("nb_sectors", 36, nb_sectors, "the Parallels disk is too large")));
        };
        if u64::from(entries) * cluster_bytes < size {
            let message = format!("too few entries for a disk of {size} bytes");
            return Some(Err(wrong("nb_bat_entries", 32, entries, message)));
        }
        let bat_end = HEADER_BYTES as u64 + u64::from(entries) * ENTRY_BYTES;
        let data_offset = match data_off {
            0 if is_old => bat_end.next_multiple_of(SECTOR_BYTES),
            sectors => u64::from(sectors) * SECTOR_BYTES,
        };
        if data_offset < bat_end {
            let message = "the data begin inside the block allocation table";
            return Some(Err(wrong("data_off", 48, data_off, message)));
        }
        if !is_old && !data_offset.is_multiple_of(cluster_bytes) {
            return Some(Err(wrong(
                "data_off",
                48,
                data_off,
                "the data don't begin at a multiple of the cluster size",
            )));
        }
        let entry_unit_bytes = if is_old { SECTOR_BYTES } else { cluster_bytes };
        let is_in_use = in_use == IN_USE;
        Some(Ok(Self { cluster_bytes, entries, size, data_offset, entry_unit_bytes, is_in_use, extension_sector }))
    }

    /// Where the format extension begins in the file, in bytes; `None` without one, or too far for any file.
    pub fn extension_at(&self) -> Option<u64> {
        self.extension_sector.checked_mul(SECTOR_BYTES).filter(|at| *at != 0 && i64::try_from(*at).is_ok())
    }

    /// Length of the BAT in bytes.
    pub fn table_bytes(&self) -> u64 {
        u64::from(self.entries) * ENTRY_BYTES
    }

    /// Offset of a cluster by its entry of the BAT, in bytes; `None`: not allocated, zeroes.
    pub fn cluster(&self, entry: u32) -> Option<u64> {
        // 2^32 clusters of 1 GiB at most: far from 2^64.
        (entry != 0).then(|| u64::from(entry) * self.entry_unit_bytes)
    }
}

/// Offset of the header's mark that a program has the image open for writing.
pub const IN_USE_AT: u64 = 44;
/// The mark at [`IN_USE_AT`] while a program has the image open for writing.
pub const IN_USE_MARK: [u8; 4] = IN_USE.to_le_bytes();

/// Offset of the last field, which has the sector of the format extension.
pub const EXTENSION_AT: u64 = 56;

const EXTENSION_MAGIC: u64 = 0xab23_4cef_23dc_ea87;
/// Length in bytes of the magic number and the checksum, in front of the features.
pub const EXTENSION_HEADER_BYTES: usize = 24;
const FEATURE_HEADER_BYTES: usize = 24;
const FEATURE_END: u64 = 0;
const FEATURE_BITMAP: u64 = 0x2038_5fae_252c_b34a;
/// A program that doesn't load the feature must not change the image.
const FEATURE_NECESSARY: u64 = 1;
/// A program that doesn't load the feature must take it along.
const FEATURE_TRANSIT: u64 = 2;
/// Length in bytes of the header in front of a bitmap's table.
const BITMAP_HEADER_BYTES: usize = 32;

/// The features of a format extension.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FormatExtension {
    /// MD5 of the extension's cluster behind its first [`EXTENSION_HEADER_BYTES`] bytes.
    pub checksum: [u8; 16],
    /// A feature must be loaded before the image is changed, or be taken along, or is unknown.
    pub forbids_writing: bool,
    /// The places of the clusters of its features in bytes; `None` where a feature is unknown.
    pub clusters: Option<Vec<u64>>,
    /// The dirty bitmaps, in the order of the image.
    pub bitmaps: Vec<ParallelsBitmap>,
    /// No feature is cut short.
    pub is_whole: bool,
}

/// A dirty bitmap of the format extension, as the image has it: unchecked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParallelsBitmap {
    /// Size of the disk in sectors of 512 bytes.
    pub sectors: u64,
    /// A UUID, which names the bitmap.
    pub id: [u8; 16],
    /// Sectors that a bit stands for.
    pub granularity_sectors: u32,
    /// For each cluster of the bitmap's bytes the sector where it is; 0: no bit is set, 1: all bits are.
    pub table: Vec<u64>,
}

impl ParallelsBitmap {
    fn parse(data: &[u8]) -> Option<Self> {
        let entries = le32_at(data, BITMAP_HEADER_BYTES - 4)? as usize;
        let table = data.get(BITMAP_HEADER_BYTES..BITMAP_HEADER_BYTES.checked_add(entries.checked_mul(8)?)?)?;
        Some(Self {
            sectors: le64_at(data, 0)?,
            id: array_at(data, 8)?,
            granularity_sectors: le32_at(data, 24)?,
            table: table.chunks_exact(8).filter_map(|entry| le64_at(entry, 0)).collect(),
        })
    }

    /// The UUID as text: its bytes in order, in lower case.
    pub fn name(&self) -> String {
        let digits = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let groups = [&self.id[..4], &self.id[4..6], &self.id[6..8], &self.id[8..10], &self.id[10..]];
        groups.map(digits).join("-")
    }
}

impl FormatExtension {
    /// Parses the beginning of the extension's cluster; `None` where there is none.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        if le64_at(bytes, 0)? != EXTENSION_MAGIC {
            return None;
        }
        let mut found = FormatExtension {
            checksum: array_at(bytes, 8).unwrap_or_default(),
            forbids_writing: false,
            clusters: Some(Vec::new()),
            bitmaps: Vec::new(),
            is_whole: true,
        };
        let mut at = EXTENSION_HEADER_BYTES;
        loop {
            match found.feature(bytes, at) {
                Some(Some(next)) => at = next,
                Some(None) => return Some(found),
                None => {
                    return Some(FormatExtension { forbids_writing: true, clusters: None, is_whole: false, ..found });
                }
            }
        }
    }

    /// Takes the feature at `at`, and returns the place of the next one, or no place behind the last one; `None` where it is cut
    /// short.
    fn feature(&mut self, bytes: &[u8], at: usize) -> Option<Option<usize>> {
        let (magic, flags) = (le64_at(bytes, at)?, le64_at(bytes, at.checked_add(8)?)?);
        if magic == FEATURE_END {
            return Some(None);
        }
        let len = le32_at(bytes, at.checked_add(16)?)? as usize;
        let start = at.checked_add(FEATURE_HEADER_BYTES)?;
        let data = bytes.get(start..start.checked_add(len)?)?;
        self.forbids_writing |= flags & (FEATURE_NECESSARY | FEATURE_TRANSIT) != 0;
        if magic == FEATURE_BITMAP {
            let bitmap = ParallelsBitmap::parse(data)?;
            if let Some(known) = &mut self.clusters {
                let sectors = bitmap.table.iter().filter(|sector| **sector > 1);
                known.extend(sectors.map(|sector| sector.saturating_mul(SECTOR_BYTES)));
            }
            self.bitmaps.push(bitmap);
        } else {
            self.clusters = None;
        }
        Some(start.checked_add(len)?.checked_next_multiple_of(8))
    }
}

const NEW_HEADS: u32 = 16;
const NEW_SECTORS_OF_TRACK: u64 = 32;

/// A new image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewParallels {
    /// Size of the disk in bytes, whole sectors.
    pub size: u64,
    /// Length of a cluster in bytes, as the user asks.
    pub cluster_bytes: u64,
}

impl NewParallels {
    /// The file: header and BAT.
    pub fn lay_out(&self) -> Result<FreshFile> {
        let cluster_bytes = self.cluster_bytes.max(1).checked_next_multiple_of(SECTOR_BYTES).unwrap_or(u64::MAX);
        let tracks = cluster_bytes / SECTOR_BYTES;
        if tracks > u64::from(MAX_CLUSTER_SECTORS) {
            let error = Error::invalid_argument("Cluster size is too large");
            return Err(error.field("cluster_size").value(self.cluster_bytes));
        }
        // An entry counts clusters in 32 bits.
        if self.size / cluster_bytes > u64::from(u32::MAX) {
            let error = Error::invalid_argument("Image size is too large for this cluster size");
            return Err(error.field("size").value(self.size));
        }
        let entries = self.size.div_ceil(cluster_bytes);
        let bat_end = HEADER_BYTES as u64 + entries * ENTRY_BYTES;
        // QEMU's bound: the table is at most 2 GiB long.
        if bat_end > i32::MAX as u64 {
            let error = Error::invalid_argument("Image size is too large for this cluster size");
            return Err(error
                .field("size")
                .value(self.size)
                .qemu("The image size is too large for file format 'parallels' (try using a larger cluster size)"));
        }
        let data_offset = bat_end.next_multiple_of(cluster_bytes);
        let cylinders = self.size / SECTOR_BYTES / u64::from(NEW_HEADS) / NEW_SECTORS_OF_TRACK;
        let mut header = MAGIC.to_vec();
        for word in [VERSION, NEW_HEADS, cylinders as u32, tracks as u32, entries as u32] {
            header.extend_from_slice(&word.to_le_bytes());
        }
        header.extend_from_slice(&(self.size / SECTOR_BYTES).to_le_bytes());
        for word in [0, (data_offset / SECTOR_BYTES) as u32, 0, 0, 0] {
            header.extend_from_slice(&u32::to_le_bytes(word));
        }
        Ok(FreshFile { len: data_offset, pieces: Vec::new(), mark: Some((0, header)) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(magic: &[u8; 16]) -> Vec<u8> {
        let mut bytes = magic.to_vec();
        bytes.extend([2u32, 16, 20, 2048, 10].iter().flat_map(|word| word.to_le_bytes()));
        bytes.extend(20_480u64.to_le_bytes());
        bytes.extend([0u32, 2048, 0, 0, 0].iter().flat_map(|word| word.to_le_bytes()));
        bytes
    }

    #[test]
    fn a_new_image_is_read_as_it_was_meant() {
        for (size, cluster_bytes, expected) in
            [(10 << 20, 1 << 20, 1 << 20), (512, 1, 512), (0, 1000, 1024), (1 << 40, 1 << 20, 1 << 20)]
        {
            let fresh = NewParallels { size, cluster_bytes }.lay_out().unwrap();
            let header = ParallelsHeader::parse(&fresh.mark.unwrap().1).unwrap();
            assert_eq!((header.size, header.cluster_bytes, header.is_in_use), (size, expected, false));
            assert_eq!((fresh.len, header.entry_unit_bytes), (header.data_offset, expected));
        }
        let error = |size, cluster_bytes| NewParallels { size, cluster_bytes }.lay_out().unwrap_err().to_string();
        assert!(error(512, (1 << 30) + 1).contains("Cluster size is too large"));
        assert!(error(512 << 40, 1 << 20).contains("too large for this cluster size"));
    }

    #[test]
    fn both_kinds_of_header_are_read() {
        let new = ParallelsHeader::parse(&header(MAGIC)).unwrap();
        assert_eq!((new.size, new.cluster_bytes, new.entries, new.data_offset), (10 << 20, 1 << 20, 10, 1 << 20));
        assert_eq!((new.cluster(0), new.cluster(3), new.table_bytes()), (None, Some(3 << 20), 40));
        let mut old = header(OLD_MAGIC);
        old[43] = 1;
        let parsed = ParallelsHeader::parse(&old).unwrap();
        assert_eq!((parsed.size, parsed.cluster(3)), (10 << 20, Some(3 * 512)));
        old[48..52].fill(0);
        assert_eq!(ParallelsHeader::parse(&old).unwrap().data_offset, 512);
    }

    #[test]
    fn the_format_extension_tells_its_clusters() {
        let feature = |magic: u64, flags: u64, data: &[u8]| {
            let mut bytes = [magic.to_le_bytes(), flags.to_le_bytes()].concat();
            bytes.extend((data.len() as u64).to_le_bytes());
            bytes.extend(data);
            bytes.resize(bytes.len().next_multiple_of(8), 0);
            bytes
        };
        let extension = |features: &[Vec<u8>]| {
            let mut bytes = EXTENSION_MAGIC.to_le_bytes().to_vec();
            bytes.extend([0; 16]);
            bytes.extend(features.concat());
            bytes.extend([0; 24]);
            FormatExtension::parse(&bytes)
        };
        let mut bitmap = vec![0; 28];
        bitmap.extend(3u32.to_le_bytes());
        bitmap.extend([0u64, 1, 9].iter().flat_map(|entry| entry.to_le_bytes()));
        let parsed = |forbids_writing, clusters: Option<&[u64]>, is_whole| {
            Some((forbids_writing, clusters.map(<[u64]>::to_vec), is_whole))
        };
        let found = |extension: Option<FormatExtension>| {
            extension.map(|extension| (extension.forbids_writing, extension.clusters, extension.is_whole))
        };
        let bitmaps = |features: &[Vec<u8>]| found(extension(features));
        assert_eq!(bitmaps(&[]), parsed(false, Some(&[]), true));
        assert_eq!(bitmaps(&[feature(FEATURE_BITMAP, 0, &bitmap)]), parsed(false, Some(&[9 * 512]), true));
        for flags in [FEATURE_NECESSARY, FEATURE_TRANSIT] {
            assert_eq!(bitmaps(&[feature(FEATURE_BITMAP, flags, &bitmap)]), parsed(true, Some(&[9 * 512]), true));
        }
        assert_eq!(bitmaps(&[feature(5, 0, b"x"), feature(FEATURE_BITMAP, 0, &bitmap)]), parsed(false, None, true));
        assert_eq!(bitmaps(&[feature(FEATURE_BITMAP, 0, &bitmap[..31])]), parsed(true, None, false));
        assert_eq!(FormatExtension::parse(&[0; 64]), None);
        let whole = [EXTENSION_MAGIC.to_le_bytes().to_vec(), vec![0; 16], feature(FEATURE_BITMAP, 0, &bitmap)].concat();
        for len in 8..=whole.len() {
            assert_eq!(found(FormatExtension::parse(&whole[..len])), parsed(true, None, false), "{len} bytes");
        }
        bitmap[..8].copy_from_slice(&7u64.to_le_bytes());
        bitmap[8..24].copy_from_slice(&std::array::from_fn::<u8, 16, _>(|index| 0xa0 + index as u8));
        bitmap[24] = 128;
        let second = extension(&[feature(FEATURE_BITMAP, 0, &bitmap), feature(FEATURE_BITMAP, 0, &bitmap)]).unwrap();
        assert_eq!(second.bitmaps.len(), 2);
        let bitmap = &second.bitmaps[1];
        assert_eq!((bitmap.sectors, bitmap.granularity_sectors, &bitmap.table[..]), (7, 128, &[0, 1, 9][..]));
        assert_eq!(bitmap.name(), "a0a1a2a3-a4a5-a6a7-a8a9-aaabacadaeaf");
    }

    #[test]
    fn each_rule_is_held() {
        for (at, bytes, part) in [
            (0, &b"x"[..], "magic"),
            (16, &[3], "version"),
            (28, &[0; 4], "tracks"),
            (28, &[0xff; 4], "tracks"),
            (32, &[9], "nb_bat_entries"),
            (36, &[0xff; 8], "nb_sectors"),
            (40, &[1], "nb_bat_entries"),
            (48, &[0; 4], "data_off"),
            (48, &[1], "data_off"),
        ] {
            let mut header = header(MAGIC);
            header[at..at + bytes.len()].copy_from_slice(bytes);
            let error = ParallelsHeader::parse(&header).unwrap_err().to_string();
            assert!(error.contains(part), "{at}: {error}");
        }
        for len in 0..HEADER_BYTES {
            assert!(ParallelsHeader::parse(&header(MAGIC)[..len]).is_err(), "{len} bytes");
        }
    }
}
