// SPDX-License-Identifier: Apache-2.0 OR MIT
//! qcow, version 1: the format before qcow2. A header, an L1 table, L2 tables, clusters. Numbers are big-endian, offsets
//! count bytes.

use crate::bytes::{be32_at, be64_at};
use crate::complaint::{refused, wrong};
use crate::fresh::{FilePiece, FreshFile};
use crate::qcow2::MAGIC;
use cowshed_types::{Error, ErrorKind, LINE_END, Result};

/// Length of the header in bytes.
pub const HEADER_BYTES: usize = 48;
/// Bytes of an entry of the tables.
pub const ENTRY_BYTES: u64 = 8;

const SECTOR_BYTES: u64 = 512;
const COMPRESSED: u64 = 1 << 63;
/// `crypt_method` of an encrypted image.
const METHOD_AES: u32 = 1;
const MAX_BACKING_NAME_BYTES: u32 = 1023;

/// The header of an image, checked. Sizes and offsets in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QcowHeader {
    /// Place and length of the backing file's name.
    pub backing_name: Option<(u64, u32)>,
    /// Size of the disk, whole sectors.
    pub size: u64,
    /// Base-2 logarithm of the cluster size, 9 to 16.
    pub cluster_bits: u32,
    /// Base-2 logarithm of the entries of an L2 table, 6 to 13.
    pub l2_bits: u32,
    /// Offset of the L1 table, in bytes.
    pub l1_offset: u64,
    /// Clusters are encrypted with AES, but for compressed ones.
    pub is_encrypted: bool,
}

/// An entry of an L2 table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QcowCluster {
    /// Not here: the backing file's, or zeroes.
    Unallocated,
    /// At this offset in bytes.
    At(u64),
    /// This many bytes of deflate data from this offset on.
    Compressed {
        /// Where they begin, in bytes.
        host: u64,
        /// Number of bytes.
        len: u64,
    },
}

impl QcowHeader {
    /// Parses the first [`HEADER_BYTES`] bytes of an image.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        match be32_at(bytes, 0) {
            Some(MAGIC) => {}
            Some(other) => {
                return Err(
                    wrong("magic", 0, format!("{other:#x}"), "this is no qcow image").qemu("Image not in qcow format")
                );
            }
            None => return Err(wrong("header", 0, bytes.len(), "the qcow header is cut short")),
        }
        Self::parse_fields(bytes)
            .unwrap_or_else(|| Err(wrong("header", 0, bytes.len(), "the qcow header is cut short")))
    }

    fn parse_fields(bytes: &[u8]) -> Option<Result<Self>> {
        let version = be32_at(bytes, 4)?;
        if version != 1 {
            let message = "this version is none of the driver 'qcow'";
            let mut sentence = format!("qcow (v1) does not support qcow version {version}");
            if matches!(version, 2 | 3) {
                sentence += &format!("{LINE_END}Try the 'qcow2' driver instead.");
            }
            return Some(Err(refused("version", 4, version, message).qemu(sentence)));
        }
        let (name_offset, name_bytes) = (be64_at(bytes, 8)?, be32_at(bytes, 16)?);
        let size = be64_at(bytes, 24)?;
        let (cluster_bits, l2_bits) = (u32::from(*bytes.get(32)?), u32::from(*bytes.get(33)?));
        let (crypt_method, l1_offset) = (be32_at(bytes, 36)?, be64_at(bytes, 40)?);
        Some(match crypt_method {
            method @ (0 | METHOD_AES) => Self::checked(name_offset, name_bytes, size, cluster_bits, l2_bits, l1_offset)
                .map(|header| Self { is_encrypted: method == METHOD_AES, ..header }),
            _ => Err(wrong("crypt_method", 36, crypt_method, "unknown method of encryption")),
        })
    }

    fn checked(
        name_offset: u64,
        name_bytes: u32,
        size: u64,
        cluster_bits: u32,
        l2_bits: u32,
        l1_offset: u64,
    ) -> Result<Self> {
        if size <= 1 {
            let message = "a qcow disk has at least 2 bytes";
            return Err(wrong("size", 24, size, message).qemu("Image size is too small (must be at least 2 bytes)"));
        }
        if !(9..=16).contains(&cluster_bits) {
            return Err(wrong("cluster_bits", 32, cluster_bits, "the cluster size is not from 512 bytes to 64 KiB"));
        }
        if !(6..=13).contains(&l2_bits) {
            return Err(wrong("l2_bits", 33, l2_bits, "an L2 table doesn't have 64 to 8192 entries"));
        }
        let whole_size = size.checked_next_multiple_of(SECTOR_BYTES).filter(|size| i64::try_from(*size).is_ok());
        let Some(whole_size) = whole_size else {
            return Err(wrong("size", 24, size, "the qcow disk is too large"));
        };
        let backing_name = (name_offset != 0).then_some((name_offset, name_bytes));
        if backing_name.is_some() && name_bytes > MAX_BACKING_NAME_BYTES {
            let message = format!("the name of the backing file is longer than {MAX_BACKING_NAME_BYTES} bytes");
            return Err(wrong("backing_file_size", 16, name_bytes, message));
        }
        let header = Self { backing_name, size: whole_size, cluster_bits, l2_bits, l1_offset, is_encrypted: false };
        if l1_offset < HEADER_BYTES as u64 || l1_offset.checked_add(header.l1_bytes()).is_none() {
            return Err(wrong("l1_table_offset", 40, l1_offset, "the L1 table is at an impossible offset"));
        }
        if header.l1_bytes() / ENTRY_BYTES > MAX_L1_ENTRIES {
            return Err(wrong("size", 24, size, "the L1 table is too large").qemu("Image too large"));
        }
        Ok(header)
    }

    /// Length of a cluster in bytes.
    pub fn cluster_bytes(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Bytes of the disk that one L2 table describes.
    pub fn l2_span_bytes(&self) -> u64 {
        1 << (self.cluster_bits + self.l2_bits)
    }

    /// Length of the L1 table in bytes.
    pub fn l1_bytes(&self) -> u64 {
        self.size.div_ceil(self.l2_span_bytes()) * ENTRY_BYTES
    }

    /// Length of an L2 table in bytes.
    pub fn l2_bytes(&self) -> u64 {
        ENTRY_BYTES << self.l2_bits
    }

    /// The entry of an L2 table for a compressed cluster. An error where the place is too far away for one.
    pub fn compressed_entry(&self, host: u64, len: u64) -> Result<u64> {
        let shift = 63 - self.cluster_bits;
        if len == 0 || len >= self.cluster_bytes() || host >> shift != 0 {
            let message = "a compressed cluster lies too far back in the file";
            return Err(Error::new(ErrorKind::NoSpace, message).offset(host));
        }
        Ok(COMPRESSED | len << shift | host)
    }

    /// The cluster that an entry of an L2 table leads to.
    pub fn cluster(&self, entry: u64) -> QcowCluster {
        if entry & COMPRESSED == 0 {
            return if entry == 0 { QcowCluster::Unallocated } else { QcowCluster::At(entry) };
        }
        let shift = 63 - self.cluster_bits;
        let len = entry >> shift & (self.cluster_bytes() - 1);
        QcowCluster::Compressed { host: entry & ((1 << shift) - 1), len }
    }
}

/// Entries of the largest L1 table.
const MAX_L1_ENTRIES: u64 = i32::MAX as u64 / ENTRY_BYTES;

/// A new image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewQcow<'a> {
    /// Size of the disk in bytes, whole sectors.
    pub size: u64,
    /// The backing file's name.
    pub backing: Option<&'a str>,
}

impl NewQcow<'_> {
    /// The file as QEMU lays it out: the header, the name, the L1 table. Small clusters where there is a backing file, so that
    /// little of it is copied.
    pub fn lay_out(&self) -> Result<FreshFile> {
        if self.size == 0 {
            let error = Error::invalid_argument("Image size is too small, cannot be zero length");
            return Err(error.field("size").value(0));
        }
        let name = self.backing.unwrap_or("").as_bytes();
        if name.len() > MAX_BACKING_NAME_BYTES as usize {
            return Err(Error::invalid_argument("Backing file name too long").field("backing_file"));
        }
        let (cluster_bits, l2_bits) = if name.is_empty() { (12, 9) } else { (9, 12) };
        let l1_offset = (HEADER_BYTES as u64 + name.len() as u64).next_multiple_of(8);
        let name_offset = if name.is_empty() { 0 } else { HEADER_BYTES as u64 };
        let mut header = MAGIC.to_be_bytes().to_vec();
        header.extend_from_slice(&1u32.to_be_bytes());
        header.extend_from_slice(&name_offset.to_be_bytes());
        header.extend_from_slice(&(name.len() as u32).to_be_bytes());
        header.extend_from_slice(&[0; 4]);
        header.extend_from_slice(&self.size.to_be_bytes());
        header.extend_from_slice(&[cluster_bits, l2_bits, 0, 0, 0, 0, 0, 0]);
        header.extend_from_slice(&l1_offset.to_be_bytes());
        if self.size.div_ceil(1 << (cluster_bits + l2_bits)) > MAX_L1_ENTRIES {
            return Err(Error::invalid_argument("Image too large").field("size").value(self.size));
        }
        let parsed = QcowHeader::parse(&header)?;
        let mut pieces = Vec::new();
        if !name.is_empty() {
            pieces.push((HEADER_BYTES as u64, FilePiece::Bytes(name.to_vec())));
        }
        let len = l1_offset + parsed.l1_bytes().next_multiple_of(SECTOR_BYTES);
        Ok(FreshFile { len, pieces, mark: Some((0, header)) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Vec<u8> {
        let mut bytes = b"QFI\xfb\0\0\0\x01".to_vec();
        bytes.extend(0u64.to_be_bytes());
        bytes.extend([0; 8]);
        bytes.extend((10u64 << 20).to_be_bytes());
        bytes.extend([12, 9, 0, 0, 0, 0, 0, 0]);
        bytes.extend(48u64.to_be_bytes());
        bytes
    }

    #[test]
    fn a_new_image_is_read_as_it_was_meant() {
        for (backing, cluster_bytes, len) in [(None, 4096, 560), (Some("ra"), 512, 568)] {
            let fresh = NewQcow { size: 10 << 20, backing }.lay_out().unwrap();
            let header = QcowHeader::parse(&fresh.mark.unwrap().1).unwrap();
            assert_eq!((header.size, header.cluster_bytes(), fresh.len), (10 << 20, cluster_bytes, len));
            assert_eq!(header.backing_name, backing.map(|name| (48, name.len() as u32)));
        }
        let error = |size| NewQcow { size, backing: None }.lay_out().unwrap_err().to_string();
        assert!(error(0).contains("cannot be zero") && error(1 << 50).contains("too large"));
    }

    #[test]
    fn a_header_is_read() {
        let parsed = QcowHeader::parse(&header()).unwrap();
        assert_eq!((parsed.size, parsed.cluster_bytes(), parsed.l2_span_bytes()), (10 << 20, 4096, 2 << 20));
        assert_eq!((parsed.l1_bytes(), parsed.l2_bytes(), parsed.backing_name), (40, 4096, None));
        assert_eq!(parsed.cluster(0), QcowCluster::Unallocated);
        assert_eq!(parsed.cluster(4096), QcowCluster::At(4096));
        let mut encrypted = header();
        encrypted[39] = 1;
        assert!(!parsed.is_encrypted && QcowHeader::parse(&encrypted).unwrap().is_encrypted);
        let compressed = 1 << 63 | 700 << 51 | 12_345;
        assert_eq!(parsed.cluster(compressed), QcowCluster::Compressed { host: 12_345, len: 700 });
    }

    #[test]
    fn each_rule_is_held() {
        for (at, bytes, part) in [
            (0, &b"x"[..], "magic"),
            (7, &[2], "version"),
            (8, &[0, 0, 0, 0, 0, 0, 0, 60, 0, 0, 4, 0], "backing_file_size"),
            (24, &[0xff; 8], "(size"),
            (24, &[0, 8, 0, 0, 0, 0, 0, 0], "L1 table is too large"),
            (32, &[8], "cluster_bits"),
            (32, &[17], "cluster_bits"),
            (33, &[5], "l2_bits"),
            (33, &[14], "l2_bits"),
            (39, &[2], "crypt_method"),
            (40, &[0xff; 8], "l1_table_offset"),
            (40, &[0; 8], "l1_table_offset"),
        ] {
            let mut header = header();
            header[at..at + bytes.len()].copy_from_slice(bytes);
            let error = QcowHeader::parse(&header).unwrap_err().to_string();
            assert!(error.contains(part), "{at}: {error}");
        }
        for len in 0..HEADER_BYTES {
            assert!(QcowHeader::parse(&header()[..len]).is_err(), "{len} bytes");
        }
    }
}
