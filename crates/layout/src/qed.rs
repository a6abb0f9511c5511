// SPDX-License-Identifier: Apache-2.0 OR MIT
//! QED, as QEMU's "QED Image File Format Specification" describes it: a header, an L1 table, L2 tables, clusters. Numbers
//! are little-endian, offsets count bytes.

use crate::bytes::{array_at, le32_at, le64_at};
use crate::complaint::{refused, wrong};
use crate::fresh::{FilePiece, FreshFile};
use cowshed_types::{Error, Result};

/// Length of the header in bytes.
pub const HEADER_BYTES: usize = 64;
/// Bytes of an entry of the tables.
pub const ENTRY_BYTES: u64 = 8;

const MAGIC: &[u8; 4] = b"QED\0";
const SECTOR_BYTES: u64 = 512;
const FEATURE_BACKING_FILE: u64 = 1;
const FEATURE_NEED_CHECK: u64 = 2;
const FEATURE_BACKING_IS_RAW: u64 = 4;
const KNOWN_FEATURES: u64 = FEATURE_BACKING_FILE | FEATURE_NEED_CHECK | FEATURE_BACKING_IS_RAW;
const MAX_BACKING_NAME_BYTES: u32 = 1023;

/// Bytes to write, each with its offset in the file.
pub type Writes = Vec<(u64, Vec<u8>)>;

/// The header of an image, checked. Sizes and offsets in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QedHeader {
    /// Length of a cluster, a power of two from 4 KiB to 64 MiB.
    pub cluster_bytes: u64,
    /// Clusters of the header and its further parts, at the start of the file.
    pub header_clusters: u64,
    /// Length of a table, of the L1 table as of an L2 table.
    pub table_bytes: u64,
    /// Offset of the L1 table, in bytes.
    pub l1_offset: u64,
    /// Size of the disk in bytes.
    pub size: u64,
    /// Place and length of the backing file's name.
    pub backing_name: Option<(u64, u32)>,
    /// The backing file is raw, whatever it looks like.
    pub backing_is_raw: bool,
    /// The last writer didn't finish.
    pub needs_check: bool,
}

/// An entry of an L2 table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QedCluster {
    /// Not here: the backing file's, or zeroes.
    Unallocated,
    /// Zeroes.
    Zero,
    /// At this offset in bytes.
    At(u64),
}

impl QedCluster {
    /// The cluster that an entry of an L2 table leads to.
    pub fn of(entry: u64) -> QedCluster {
        match entry {
            0 => QedCluster::Unallocated,
            1 => QedCluster::Zero,
            offset => QedCluster::At(offset),
        }
    }
}

impl QedHeader {
    /// Parses the first [`HEADER_BYTES`] bytes of an image.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        match array_at::<4>(bytes, 0) {
            Some(magic) if &magic == MAGIC => {}
            Some(other) => {
                return Err(
                    wrong("magic", 0, other.escape_ascii(), "this is no QED image").qemu("Image not in QED format")
                );
            }
            None => return Err(wrong("header", 0, bytes.len(), "the QED header is cut short")),
        }
        Self::parse_fields(bytes).unwrap_or_else(|| Err(wrong("header", 0, bytes.len(), "the QED header is cut short")))
    }

    fn parse_fields(bytes: &[u8]) -> Option<Result<Self>> {
        let (cluster_size, table_size, header_size) = (le32_at(bytes, 4)?, le32_at(bytes, 8)?, le32_at(bytes, 12)?);
        let features = le64_at(bytes, 16)?;
        let (l1_offset, size) = (le64_at(bytes, 40)?, le64_at(bytes, 48)?);
        let (name_offset, name_bytes) = (le32_at(bytes, 56)?, le32_at(bytes, 60)?);
        if !cluster_size.is_power_of_two() || !(1 << 12..=1 << 26).contains(&cluster_size) {
            let message = "the cluster size is no power of two from 4 KiB to 64 MiB";
            return Some(Err(wrong("cluster_size", 4, cluster_size, message)));
        }
        if !table_size.is_power_of_two() || table_size > 16 {
            let message = "the size of tables is no power of two from 1 to 16 clusters";
            return Some(Err(wrong("table_size", 8, table_size, message)));
        }
        if features & !KNOWN_FEATURES != 0 {
            let value = format!("{features:#x}");
            return Some(Err(refused("features", 16, value, "features that this version doesn't know")));
        }
        let cluster_bytes = u64::from(cluster_size);
        let header_bytes = u64::from(header_size) * cluster_bytes;
        let name_end = u64::from(name_offset) + u64::from(name_bytes);
        let has_backing = features & FEATURE_BACKING_FILE != 0;
        if has_backing && (name_bytes > MAX_BACKING_NAME_BYTES || name_end > header_bytes) {
            let message = format!(
                "the name of the backing file is longer than {MAX_BACKING_NAME_BYTES} bytes, or not within the header"
            );
            return Some(Err(wrong("backing_filename_size", 60, name_bytes, message)));
        }
        let header = Self {
            cluster_bytes,
            header_clusters: u64::from(header_size),
            table_bytes: u64::from(table_size) * cluster_bytes,
            l1_offset,
            size,
            backing_name: has_backing.then_some((u64::from(name_offset), name_bytes)),
            backing_is_raw: has_backing && features & FEATURE_BACKING_IS_RAW != 0,
            needs_check: features & FEATURE_NEED_CHECK != 0,
        };
        Some(header.checked(header_size))
    }

    fn checked(self, header_size: u32) -> Result<Self> {
        if header_size == 0 {
            return Err(wrong("header_size", 12, header_size, "the header has no cluster"));
        }
        if !self.l1_offset.is_multiple_of(self.cluster_bytes)
            || self.l1_offset < u64::from(header_size) * self.cluster_bytes
            || self.l1_offset.checked_add(self.table_bytes).is_none()
        {
            let message = "the L1 table is not at a cluster behind the header";
            return Err(wrong("l1_table_offset", 40, self.l1_offset, message));
        }
        // 2^24 entries of a table of 16 clusters of 64 MiB: the product doesn't fit in 64 bits.
        let most = u128::from(self.l2_span_bytes()) * u128::from(self.table_entries());
        if !self.size.is_multiple_of(SECTOR_BYTES) || u128::from(self.size) > most || i64::try_from(self.size).is_err()
        {
            let message = "the size is no multiple of 512, or larger than the tables can describe";
            return Err(wrong("image_size", 48, self.size, message));
        }
        Ok(self)
    }

    /// Entries of a table.
    pub fn table_entries(&self) -> u64 {
        self.table_bytes / ENTRY_BYTES
    }

    /// Bytes of the disk that one L2 table describes.
    pub fn l2_span_bytes(&self) -> u64 {
        self.table_entries() * self.cluster_bytes
    }
}

/// Offset of the header's flag that the image needs a check, and the bytes there without that.
pub const FEATURES_AT: u64 = 16;
/// Offset of the features that a program must clear if it doesn't know them.
pub const AUTOCLEAR_FEATURES_AT: u64 = 32;
/// Bytes of a file that [`QedHeader::rename`] needs: its first sector.
pub const FIRST_BYTES: usize = SECTOR_BYTES as usize;
/// Offset for a name whose place beside the header is taken by the old one. The header's cluster has at least 4 KiB.
const FAR_NAME_AT: u64 = 2048;
/// Offset of the size of the disk in the header.
pub const SIZE_AT: u64 = 48;

impl QedHeader {
    /// The features of an image that needs no check.
    pub fn clean_features(&self) -> [u8; 8] {
        let backing = if self.backing_name.is_some() { FEATURE_BACKING_FILE } else { 0 };
        let raw = if self.backing_is_raw { FEATURE_BACKING_IS_RAW } else { 0 };
        (backing | raw).to_le_bytes()
    }

    /// The writes that put another backing file's name into the header, and whether that file is raw. They come in
    /// stages of offsets and bytes, with a barrier between stages. `first` is the first [`FIRST_BYTES`] bytes of the
    /// file, or fewer where there are no more. Each stage but the last changes bytes that nothing refers to; the last
    /// is one write of the first sector.
    pub fn rename(&self, first: &[u8], backing: Option<(&[u8], bool)>) -> Result<Vec<Writes>> {
        let name = backing.map_or(&b""[..], |(name, _)| name);
        if name.len() > MAX_BACKING_NAME_BYTES as usize {
            return Err(Error::invalid_argument("Backing file name too long").field("backing_file"));
        }
        let sector = first.get(..SECTOR_BYTES as usize).filter(|sector| sector.starts_with(MAGIC));
        let mut sector = sector.ok_or_else(|| wrong("header", 0, first.len(), "the QED header is cut short"))?.to_vec();
        let (beside, len) = (HEADER_BYTES as u64, name.len() as u64);
        let old = self.backing_name.map_or(0..0, |(at, len)| at..at + u64::from(len));
        // A name that reaches beyond the first sector goes to a place beside the old one first.
        let (place, in_sector) = match beside + len <= SECTOR_BYTES {
            true => (beside, true),
            false if old.start < beside + len && beside < old.end => (FAR_NAME_AT, false),
            false => (beside, false),
        };
        let mut stages = Vec::new();
        if in_sector {
            sector[HEADER_BYTES..HEADER_BYTES + name.len()].copy_from_slice(name);
        } else {
            stages.push(vec![(place, name.to_vec())]);
            let shared = usize::try_from(SECTOR_BYTES.saturating_sub(place)).unwrap_or(0);
            sector[SECTOR_BYTES as usize - shared..].copy_from_slice(&name[..shared]);
        }
        let features = le64_at(&sector, FEATURES_AT as usize).unwrap_or(0);
        let features = features & !(FEATURE_BACKING_FILE | FEATURE_BACKING_IS_RAW)
            | if backing.is_some() { FEATURE_BACKING_FILE } else { 0 }
            | if backing.is_some_and(|(_, is_raw)| is_raw) { FEATURE_BACKING_IS_RAW } else { 0 };
        sector[FEATURES_AT as usize..][..8].copy_from_slice(&features.to_le_bytes());
        sector[56..60].copy_from_slice(&(place as u32).to_le_bytes());
        sector[60..64].copy_from_slice(&(len as u32).to_le_bytes());
        stages.push(vec![(0, sector)]);
        Ok(stages)
    }

    /// The largest disk that the tables can describe and QEMU opens, in bytes.
    pub fn largest_size(&self) -> u64 {
        largest_bytes(self.table_entries(), self.cluster_bytes).min(i64::MAX as u64) / SECTOR_BYTES * SECTOR_BYTES
    }
}

/// The size that two levels of tables describe. QEMU counts in 64 bits: of a product that doesn't fit it takes the rest, and
/// opens no larger image.
fn largest_bytes(entries: u64, cluster_bytes: u64) -> u64 {
    entries.wrapping_mul(entries).wrapping_mul(cluster_bytes)
}

/// A new image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewQed<'a> {
    /// Size of the disk in bytes, whole sectors.
    pub size: u64,
    /// Length of a cluster in bytes.
    pub cluster_bytes: u64,
    /// Length of a table in clusters.
    pub table_clusters: u64,
    /// The backing file's name, and whether it is raw.
    pub backing: Option<(&'a str, bool)>,
}

impl NewQed<'_> {
    /// The file: a cluster with the header, and the L1 table.
    pub fn lay_out(&self) -> Result<FreshFile> {
        if !self.cluster_bytes.is_power_of_two() || !(1 << 12..=1 << 26).contains(&self.cluster_bytes) {
            let message = "QED cluster size must be within range [4096, 67108864] and power of 2";
            return Err(Error::invalid_argument(message).field("cluster_size").value(self.cluster_bytes));
        }
        if !self.table_clusters.is_power_of_two() || self.table_clusters > 16 {
            let message = "QED table size must be within range [1, 16] and power of 2";
            return Err(Error::invalid_argument(message).field("table_size").value(self.table_clusters));
        }
        let mut bytes = MAGIC.to_vec();
        for word in [self.cluster_bytes as u32, self.table_clusters as u32, 1] {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        let features = match self.backing {
            Some((_, true)) => FEATURE_BACKING_FILE | FEATURE_BACKING_IS_RAW,
            Some((_, false)) => FEATURE_BACKING_FILE,
            None => 0,
        };
        for word in [features, 0, 0, self.cluster_bytes, self.size] {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        let name = self.backing.map_or("", |(name, _)| name).as_bytes();
        if name.len() > MAX_BACKING_NAME_BYTES as usize {
            return Err(Error::invalid_argument("Backing file name too long").field("backing_file"));
        }
        let place = if name.is_empty() { 0 } else { HEADER_BYTES as u32 };
        bytes.extend_from_slice(&place.to_le_bytes());
        bytes.extend_from_slice(&(name.len() as u32).to_le_bytes());
        let entries = self.table_clusters * self.cluster_bytes / ENTRY_BYTES;
        let most = largest_bytes(entries, self.cluster_bytes);
        if self.size > most || i64::try_from(self.size).is_err() {
            let message =
                format!("QED image size must be a non-zero multiple of cluster size and less than {most} bytes");
            return Err(Error::invalid_argument(message).field("size").value(self.size));
        }
        let header = QedHeader::parse(&bytes)?;
        let mut pieces = Vec::new();
        if !name.is_empty() {
            pieces.push((HEADER_BYTES as u64, FilePiece::Bytes(name.to_vec())));
        }
        let len = self.cluster_bytes + header.table_bytes;
        // The file has all of the table, which QEMU writes.
        pieces.push((self.cluster_bytes, FilePiece::Fill(0, header.table_bytes)));
        Ok(FreshFile { len, pieces, mark: Some((0, bytes)) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend([65_536u32, 4, 1].iter().flat_map(|word| word.to_le_bytes()));
        bytes.extend([0u64, 0, 0, 65_536, 10 << 20].iter().flat_map(|word| word.to_le_bytes()));
        bytes.extend([64u32, 4].iter().flat_map(|word| word.to_le_bytes()));
        bytes
    }

    #[test]
    fn a_new_image_is_read_as_it_was_meant() {
        let new = NewQed { size: 10 << 20, cluster_bytes: 4096, table_clusters: 2, backing: Some(("base.raw", true)) };
        let fresh = new.lay_out().unwrap();
        let header = QedHeader::parse(&fresh.mark.unwrap().1).unwrap();
        assert_eq!((header.size, header.cluster_bytes, header.table_bytes), (10 << 20, 4096, 8192));
        assert_eq!((header.backing_name, header.backing_is_raw, fresh.len), (Some((64, 8)), true, 12_288));
        assert_eq!((header.clean_features()[0], header.largest_size()), (5, 1 << 32));
        for (new, part) in [
            (NewQed { cluster_bytes: 1024, ..new }, "cluster size must be"),
            (NewQed { cluster_bytes: 5000, ..new }, "cluster size must be"),
            (NewQed { table_clusters: 0, ..new }, "table size must be"),
            (NewQed { table_clusters: 32, ..new }, "table size must be"),
            (NewQed { size: (1 << 32) + 512, ..new }, "less than 4294967296 bytes"),
            (NewQed { cluster_bytes: 4 << 20, table_clusters: 4, ..new }, "less than 0 bytes"),
        ] {
            let error = new.lay_out().unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn a_header_is_read() {
        let parsed = QedHeader::parse(&header()).unwrap();
        assert_eq!((parsed.size, parsed.cluster_bytes, parsed.table_bytes), (10 << 20, 65_536, 262_144));
        assert_eq!((parsed.table_entries(), parsed.l2_span_bytes()), (32_768, 2 << 30));
        assert_eq!((parsed.backing_name, parsed.needs_check), (None, false));
        let mut child = header();
        child[16] = 7;
        let parsed = QedHeader::parse(&child).unwrap();
        assert_eq!((parsed.backing_name, parsed.backing_is_raw, parsed.needs_check), (Some((64, 4)), true, true));
        assert_eq!(
            [QedCluster::of(0), QedCluster::of(1), QedCluster::of(65_536)],
            [QedCluster::Unallocated, QedCluster::Zero, QedCluster::At(65_536)]
        );
    }

    #[test]
    fn each_rule_is_held() {
        for (at, bytes, part) in [
            (0, &b"x"[..], "magic"),
            (4, &[1], "cluster_size"),
            (4, &[0, 8, 0], "cluster_size"),
            (4, &[0, 0, 0, 8], "cluster_size"),
            (8, &[0], "table_size"),
            (8, &[3], "table_size"),
            (8, &[32], "table_size"),
            (12, &[0], "header_size"),
            (12, &[2], "l1_table_offset"),
            (16, &[8], "features"),
            (40, &[1], "l1_table_offset"),
            (40, &[0, 0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff], "l1_table_offset"),
            (48, &[1], "image_size"),
            (54, &[0x7f], "image_size"),
        ] {
            let mut header = header();
            header[at..at + bytes.len()].copy_from_slice(bytes);
            let error = QedHeader::parse(&header).unwrap_err().to_string();
            assert!(error.contains(part), "{at}: {error}");
        }
        for (at, bytes) in [(56, &[0xff, 0xff, 0xff, 0xff][..]), (60, &[0, 4, 0, 0]), (60, &[0xff; 4])] {
            let mut header = header();
            header[16] = 1;
            header[at..at + bytes.len()].copy_from_slice(bytes);
            assert!(QedHeader::parse(&header).unwrap_err().to_string().contains("backing_filename_size"), "{at}");
        }
        for len in 0..HEADER_BYTES {
            assert!(QedHeader::parse(&header()[..len]).is_err(), "{len} bytes");
        }
    }
}
