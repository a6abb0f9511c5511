// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The bitmap directory and bitmap tables ("Bitmaps").

use super::{BitmapsExtension, limits};
use crate::bytes::{be16_at, be32_at, be64_at};
use cowshed_types::{Error, HostOffset, Result};
use std::collections::HashSet;

/// Flag bit 0: the bitmap was not saved correctly.
pub const FLAG_IN_USE: u32 = 1 << 0;
/// Flag bit 1: the bitmap must follow all writes.
pub const FLAG_AUTO: u32 = 1 << 1;
/// Flag bit 2: the bitmap may be used although its extra data isn't understood.
pub const FLAG_EXTRA_DATA_COMPATIBLE: u32 = 1 << 2;
/// `type` of a dirty tracking bitmap.
pub const TYPE_DIRTY_TRACKING: u8 = 1;

/// Bytes of a directory entry without its variable part.
const FIXED_BYTES: usize = 24;
/// Longest name that we accept, in bytes.
const NAME_BYTES: usize = 1023;

/// An entry of the bitmap directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BitmapEntry {
    /// Host offset of the bitmap table, in bytes. Alignment is checked by [`BitmapEntry::validate`].
    pub table_offset: u64,
    /// Entries of the bitmap table.
    pub table_size: u32,
    /// Mask of `FLAG_*`; other bits are reserved and kept as found.
    pub flags: u32,
    /// 1: dirty tracking bitmap; other values are reserved.
    pub kind: u8,
    /// log2 of the bytes of virtual disk that one bit stands for.
    pub granularity_bits: u8,
    /// Data of the type; kept byte for byte.
    pub extra_data: Vec<u8>,
    /// Name, as bytes; not empty.
    pub name: Vec<u8>,
}

impl BitmapEntry {
    /// Bytes that the entry takes in the directory, padding included.
    pub fn encoded_len(&self) -> usize {
        Self::encoded_len_of(self.name.len() + self.extra_data.len())
    }

    /// As [`BitmapEntry::encoded_len`], by the bytes of its name and its extra data.
    pub fn encoded_len_of(variable_bytes: usize) -> usize {
        (FIXED_BYTES + variable_bytes).next_multiple_of(8)
    }

    /// The bytes of the entry in the directory. Fails where name or extra data are too long.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let name_len = u16::try_from(self.name.len())
            .map_err(|_| Error::invalid_argument("bitmap name is too long").value(self.name.len()))?;
        let extra_len = u32::try_from(self.extra_data.len())
            .map_err(|_| Error::invalid_argument("bitmap extra data is too long").value(self.extra_data.len()))?;
        let mut bytes = Vec::with_capacity(self.encoded_len());
        bytes.extend_from_slice(&self.table_offset.to_be_bytes());
        bytes.extend_from_slice(&self.table_size.to_be_bytes());
        bytes.extend_from_slice(&self.flags.to_be_bytes());
        bytes.push(self.kind);
        bytes.push(self.granularity_bits);
        bytes.extend_from_slice(&name_len.to_be_bytes());
        bytes.extend_from_slice(&extra_len.to_be_bytes());
        bytes.extend_from_slice(&self.extra_data);
        bytes.extend_from_slice(&self.name);
        bytes.resize(self.encoded_len(), 0);
        Ok(bytes)
    }

    /// The entry at the start of `bytes` and its length with padding; `None` where the bytes end before it does.
    fn parse(bytes: &[u8]) -> Option<(Self, usize)> {
        let name_len = usize::from(be16_at(bytes, 18)?);
        let extra_end = FIXED_BYTES.checked_add(usize::try_from(be32_at(bytes, 20)?).ok()?)?;
        let name_end = extra_end.checked_add(name_len)?;
        let len = name_end.checked_next_multiple_of(8)?;
        // "It is the cumulative size of all entries": the padding of the last one is part of the directory.
        bytes.get(..len)?;
        let entry = BitmapEntry {
            table_offset: be64_at(bytes, 0)?,
            table_size: be32_at(bytes, 8)?,
            flags: be32_at(bytes, 12)?,
            kind: bytes[16],
            granularity_bits: bytes[17],
            extra_data: bytes[FIXED_BYTES..extra_end].to_vec(),
            name: bytes[extra_end..name_end].to_vec(),
        };
        Some((entry, len))
    }

    /// Checks the entry's fields and pointers. `disk_size` is the virtual disk's, in bytes; while [`FLAG_IN_USE`] is
    /// set the table's size isn't compared with it (it may be outdated).
    pub fn validate(&self, disk_size: u64, cluster_bits: u32) -> Result<()> {
        let shown = String::from_utf8_lossy(&self.name).into_owned();
        let error = |field, value: String, message: String| {
            let error = Error::invalid_image(field, value, format!("bitmap {shown:?}: {message}"));
            Err(error.qemu(format!("Bitmap '{shown}' doesn't satisfy the constraints")))
        };
        if self.name.is_empty() || self.name.len() > NAME_BYTES {
            let message = format!("the name must have 1 to {NAME_BYTES} bytes");
            return error("bitmap_name_size", self.name.len().to_string(), message);
        }
        if self.kind != TYPE_DIRTY_TRACKING {
            return error("bitmap_type", self.kind.to_string(), "unknown type".into());
        }
        let known_flags = FLAG_IN_USE | FLAG_AUTO | FLAG_EXTRA_DATA_COMPATIBLE;
        if self.flags & !known_flags != 0 {
            return error("bitmap_flags", format!("{:#x}", self.flags), "reserved flags are set".into());
        }
        if self.granularity_bits > 63 {
            return error("bitmap_granularity_bits", self.granularity_bits.to_string(), "more than 63".into());
        }
        let bytes = u64::from(self.table_size) * 8;
        if bytes > limits::BITMAP_TABLE_BYTES {
            let message = format!("bitmap table is larger than {} MiB", limits::BITMAP_TABLE_BYTES >> 20);
            return error("bitmap_table_size", self.table_size.to_string(), message);
        }
        let start = self.table_offset;
        let past_end = start.checked_add(bytes).is_none_or(|end| end > limits::HOST_OFFSET_END);
        if start == 0 || !start.is_multiple_of(1 << cluster_bits) || past_end {
            let message = "the table's offset is not cluster-aligned or out of range".into();
            return error("bitmap_table_offset", format!("{start:#x}"), message);
        }
        let bits = disk_size.div_ceil(1 << self.granularity_bits);
        let needed = bits.div_ceil(8).div_ceil(1 << cluster_bits);
        if self.flags & FLAG_IN_USE == 0 && u64::from(self.table_size) != needed {
            let message = format!("the table should have {needed} entries for {disk_size} bytes of virtual disk");
            return error("bitmap_table_size", self.table_size.to_string(), message);
        }
        Ok(())
    }
}

/// Parses the directory that `extension` describes from its `directory_size` bytes. Names must be unique.
pub fn parse_directory(bytes: &[u8], extension: &BitmapsExtension) -> Result<Vec<BitmapEntry>> {
    let size_error = |message: String| Error::invalid_image("bitmap_directory_size", extension.directory_size, message);
    if extension.nb_bitmaps > limits::BITMAPS {
        let message = format!("more than {} bitmaps", limits::BITMAPS);
        return Err(Error::invalid_image("nb_bitmaps", extension.nb_bitmaps, message));
    }
    if extension.directory_size > limits::BITMAP_DIRECTORY_BYTES {
        return Err(size_error(format!(
            "bitmap directory is larger than {} MiB",
            limits::BITMAP_DIRECTORY_BYTES >> 20
        )));
    }
    let Some(mut rest) = bytes.get(..extension.directory_size as usize) else {
        return Err(size_error(format!("bitmap directory ends after {} bytes", bytes.len())));
    };
    let mut entries: Vec<BitmapEntry> = Vec::new();
    for index in 0..extension.nb_bitmaps {
        let Some((entry, len)) = BitmapEntry::parse(rest) else {
            let error = size_error(format!("bitmap directory ends within entry {index}"));
            return Err(error.qemu(match rest.is_empty() {
                _ if entries.iter().any(|entry| !entry.extra_data.is_empty()) => "Bitmap extra data is not supported",
                true => "Less bitmaps found than specified in header extension",
                false => "Broken bitmap directory",
            }));
        };
        rest = &rest[len..];
        entries.push(entry);
    }
    if !rest.is_empty() {
        let error = size_error(format!("bitmap directory has {} bytes behind its last entry", rest.len()));
        return Err(error.qemu("Broken bitmap directory"));
    }
    let mut names = HashSet::new();
    if let Some(twice) = entries.iter().find(|entry| !names.insert(&entry.name)) {
        let name = format!("{:?}", String::from_utf8_lossy(&twice.name));
        return Err(Error::invalid_image("bitmap_name", name, "two bitmaps have the same name"));
    }
    Ok(entries)
}

/// An entry of a bitmap table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct BitmapTableEntry(pub u64);

impl BitmapTableEntry {
    const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;

    /// Bits 9–55: where the cluster of bitmap data is; 0: there is none.
    pub const fn offset(self) -> HostOffset {
        HostOffset(self.0 & Self::OFFSET_MASK)
    }

    /// Without a cluster: true when all bits read as ones, false when as zeroes.
    pub const fn reads_as_ones(self) -> bool {
        self.0 & (Self::OFFSET_MASK | 1) == 1
    }

    /// The reserved bits that are set: 1–8, 56–63, and bit 0 when there is a cluster.
    pub const fn reserved_bits(self) -> u64 {
        let bit_0 = if self.0 & Self::OFFSET_MASK != 0 { 1 } else { 0 };
        self.0 & (!(Self::OFFSET_MASK | 1) | bit_0)
    }

    /// Where the cluster of bitmap data is, or `None` without one. Reserved bits and a misaligned offset are errors.
    pub fn cluster(self, cluster_bits: u32) -> Result<Option<HostOffset>> {
        let error = |message| Err(Error::invalid_image("bitmap_table_entry", format!("{:#018x}", self.0), message));
        if self.reserved_bits() != 0 {
            return error("reserved bits are set");
        }
        if !self.offset().is_aligned(cluster_bits) {
            return error("offset is not cluster-aligned");
        }
        Ok((self.offset().0 != 0).then_some(self.offset()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    prop_compose! {
        fn entry()(
            numbers: (u64, u32, u32, u8, u8),
            extra_data in vec(any::<u8>(), 0..40),
            name in vec(any::<u8>(), 0..40),
        ) -> BitmapEntry {
            let (table_offset, table_size, flags, kind, granularity_bits) = numbers;
            BitmapEntry { table_offset, table_size, flags, kind, granularity_bits, extra_data, name }
        }
    }

    fn extension(nb_bitmaps: u32, directory_size: u64) -> BitmapsExtension {
        BitmapsExtension { nb_bitmaps, reserved: 0, directory_size, directory_offset: 0x10000 }
    }

    proptest! {
        #[test]
        fn directory_round_trip(mut entries in vec(entry(), 0..6)) {
            for (index, entry) in entries.iter_mut().enumerate() {
                entry.name.push(index as u8);
            }
            let bytes: Vec<u8> = entries.iter().flat_map(|entry| entry.encode().unwrap()).collect();
            let extension = extension(entries.len() as u32, bytes.len() as u64);
            prop_assert_eq!(parse_directory(&bytes, &extension).unwrap(), entries);
            if !bytes.is_empty() {
                prop_assert!(parse_directory(&bytes[1..], &extension).is_err());
            }
        }

        #[test]
        fn any_bytes_parse_without_panic(bytes in vec(any::<u8>(), 0..300), nb_bitmaps in 0u32..4, word: u64) {
            for size in [bytes.len() as u64, word] {
                for entry in parse_directory(&bytes, &extension(nb_bitmaps, size)).unwrap_or_default() {
                    let _ = (entry.validate(word, 9), entry.validate(word, 21));
                }
            }
            let _ = BitmapTableEntry(word).cluster(16);
        }
    }

    #[test]
    fn rules() {
        let good = BitmapEntry {
            table_offset: 0x50000,
            table_size: 1,
            flags: FLAG_AUTO,
            kind: TYPE_DIRTY_TRACKING,
            granularity_bits: 16,
            extra_data: vec![],
            name: b"b0".to_vec(),
        };
        good.validate(1 << 30, 16).unwrap();
        let bad = [
            BitmapEntry { table_offset: 0x200, ..good.clone() },
            BitmapEntry { table_offset: 0, ..good.clone() },
            BitmapEntry { table_offset: u64::MAX << 16, ..good.clone() },
            BitmapEntry { table_size: 2, ..good.clone() },
            BitmapEntry { table_size: u32::MAX, flags: FLAG_IN_USE, ..good.clone() },
            BitmapEntry { flags: 8, ..good.clone() },
            BitmapEntry { kind: 0, ..good.clone() },
            BitmapEntry { granularity_bits: 64, ..good.clone() },
            BitmapEntry { name: vec![], ..good.clone() },
        ];
        for entry in bad {
            assert!(entry.validate(1 << 30, 16).is_err(), "{entry:?}");
        }
        BitmapEntry { table_size: 2, flags: FLAG_IN_USE, ..good.clone() }.validate(1 << 30, 16).unwrap();
        let twice = [good.encode().unwrap(), good.encode().unwrap()].concat();
        let error = parse_directory(&twice, &extension(2, twice.len() as u64)).unwrap_err();
        assert!(error.to_string().contains("same name"), "{error}");
    }

    #[test]
    fn table_entries() {
        assert_eq!(BitmapTableEntry(0x30000).cluster(16).unwrap(), Some(HostOffset(0x30000)));
        assert_eq!(BitmapTableEntry(1).cluster(16).unwrap(), None);
        assert!(BitmapTableEntry(1).reads_as_ones() && !BitmapTableEntry(0).reads_as_ones());
        for bad in [0x30001, 0x30002, 2, 1 << 56, 0x200] {
            assert!(BitmapTableEntry(bad).cluster(16).is_err(), "{bad:#x}");
        }
    }
}
