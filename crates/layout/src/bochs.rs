// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The header of growing images of Bochs: docs/formats/block-formats.md.

use crate::bytes::{le32_at, le64_at};
use cowshed_types::{Error, Result};

/// Bytes of the header that are read.
pub const HEADER_BYTES: usize = 512;
/// The entry of an extent that isn't allocated.
pub const NOT_ALLOCATED: u32 = u32::MAX;
const SECTOR_BYTES: u64 = 512;
/// The largest catalog, in entries: 4 MiB.
const MOST_ENTRIES: u32 = 1 << 20;
/// The largest extent, in bytes.
const MOST_EXTENT_BYTES: u32 = 8 << 20;

/// The header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BochsHeader {
    /// Offset of the catalog in the file, in bytes.
    pub catalog_offset: u64,
    /// Its entries, of 4 bytes.
    pub catalog_entries: u32,
    /// Bytes of an extent's bitmap of sectors, in whole sectors.
    pub bitmap_bytes: u64,
    /// Bytes of the disk in an extent.
    pub extent_bytes: u64,
    /// Size of the disk in bytes.
    pub size: u64,
}

/// QEMU's words for another file.
const NOT_BOCHS: &str = "Image not in Bochs format";

impl BochsHeader {
    /// Reads the header.
    ///
    /// # Errors
    /// For other kinds of images of Bochs, and for numbers that contradict each other.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let short = || Error::invalid_image("magic", "another", "this is no image of Bochs").qemu(NOT_BOCHS);
        let text = |at: usize, expected: &str| {
            let field = bytes.get(at..at + expected.len() + 1);
            field.is_some_and(|field| field.strip_prefix(expected.as_bytes()) == Some(b"\0"))
        };
        if !text(0, "Bochs Virtual HD Image") {
            return Err(short());
        }
        if !text(32, "Redolog") || !text(48, "Growing") {
            let message = "images of Bochs are read of the type 'Redolog', 'Growing' alone";
            return Err(Error::unsupported(message).qemu(NOT_BOCHS));
        }
        let word = |at| le32_at(bytes, at).ok_or_else(short);
        let size_at = match word(64)? {
            0x1_0000 => 84,
            0x2_0000 => 88,
            other => {
                return Err(Error::unsupported("a version of this format that isn't known")
                    .field("version")
                    .value(other)
                    .qemu(NOT_BOCHS));
            }
        };
        let (header, entries, bitmap, extent) = (word(68)?, word(72)?, word(76)?, word(80)?);
        let size = le64_at(bytes, size_at).ok_or_else(short)?;
        let wrong = |field, value: u64, message: &str| Err(Error::invalid_image(field, value, message));
        if header < HEADER_BYTES as u32 || header > 1 << 20 {
            return wrong("header size", header.into(), "the header has an impossible length");
        }
        if entries > MOST_ENTRIES {
            return wrong("catalog", entries.into(), "the catalog is too large")
                .map_err(|error| error.qemu("Catalog size is too large"));
        }
        if !(512..=MOST_EXTENT_BYTES).contains(&extent) || !extent.is_power_of_two() {
            let sentence = match extent {
                0..512 => "Extent size must be at least 512".to_owned(),
                _ if !extent.is_power_of_two() => format!("Extent size {extent} is not a power of two"),
                _ => format!("Extent size {extent} is too large"),
            };
            return wrong("extent", extent.into(), "the length of extents is out of range")
                .map_err(|error| error.qemu(sentence));
        }
        let extent_bytes = u64::from(extent);
        let bits = extent_bytes / SECTOR_BYTES;
        if u64::from(bitmap) * 8 < bits || bitmap > MOST_EXTENT_BYTES {
            return wrong("bitmap", bitmap.into(), "the bitmap doesn't fit the extents");
        }
        if i64::try_from(size).is_err() || size > u64::from(entries) * extent_bytes {
            return wrong("disk", size, "the disk is longer than the catalog")
                .map_err(|error| error.qemu("Catalog size is too small for this disk size"));
        }
        Ok(BochsHeader {
            catalog_offset: header.into(),
            catalog_entries: entries,
            bitmap_bytes: u64::from(bitmap).next_multiple_of(SECTOR_BYTES),
            extent_bytes,
            size: size / SECTOR_BYTES * SECTOR_BYTES,
        })
    }

    /// Bytes of the catalog.
    pub fn catalog_bytes(&self) -> u64 {
        u64::from(self.catalog_entries) * 4
    }

    /// Offset of an extent's bitmap in the file, in bytes; the extent's data follows.
    pub fn extent(&self, entry: u32) -> Option<u64> {
        let first = self.catalog_offset + self.catalog_bytes();
        (entry != NOT_ALLOCATED).then(|| first + u64::from(entry) * (self.bitmap_bytes + self.extent_bytes))
    }
}
