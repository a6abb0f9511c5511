// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The metadata region (\[MS-VHDX\] 2.6): a table, and items with the properties of the disk.

use super::{Guid, MAX_ENTRIES, refused, wrong};
use crate::bytes::{le16_at, le32_at, le64_at};
use crate::parents::{beside, utf16};
use cowshed_types::Result;

/// Length of the table at the start of the region in bytes; the items follow it.
pub const METADATA_TABLE_BYTES: usize = 64 << 10;

pub(super) const SIGNATURE: &[u8; 8] = b"metadata";
pub(super) const MAX_BLOCK_BYTES: u32 = 256 << 20;
pub(super) const MIN_BLOCK_BYTES: u32 = 1 << 20;
pub(super) const MAX_SIZE: u64 = 64 << 40;
/// Sectors that one block of the sector bitmap describes.
const BITMAP_SECTORS: u64 = 1 << 23;
pub(super) const FLAG_REQUIRED: u32 = 1 << 2;
const FLAG_HAS_PARENT: u32 = 1 << 1;

/// An item that every image has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetadataItem {
    /// Block size, and whether there is a parent.
    FileParameters,
    /// Size of the disk.
    VirtualDiskSize,
    /// The length of the disk's logical sectors.
    LogicalSectorSize,
}

/// The items of the specification: whether we read them, and their least length in bytes.
pub(super) const KNOWN: [(Guid, Option<MetadataItem>, u32); 6] = [
    (
        Guid::new(0xcaa1_6737, 0xfa36, 0x4d43, [0xb3, 0xb6, 0x33, 0xf0, 0xaa, 0x44, 0xe7, 0x6b]),
        Some(MetadataItem::FileParameters),
        8,
    ),
    (
        Guid::new(0x2fa5_4224, 0xcd1b, 0x4876, [0xb2, 0x11, 0x5d, 0xbe, 0xd8, 0x3b, 0xf4, 0xb8]),
        Some(MetadataItem::VirtualDiskSize),
        8,
    ),
    (
        Guid::new(0x8141_bf1d, 0xa96f, 0x4709, [0xba, 0x47, 0xf2, 0x33, 0xa8, 0xfa, 0xab, 0x5f]),
        Some(MetadataItem::LogicalSectorSize),
        4,
    ),
    // The disk's identity, the physical sector size: not needed to read the disk. The parent's place.
    (Guid::new(0xbeca_12ab, 0xb2e6, 0x4523, [0x93, 0xef, 0xc3, 0x09, 0xe0, 0x00, 0xc7, 0x46]), None, 0),
    (Guid::new(0xcda3_48c7, 0x445d, 0x4471, [0x9c, 0xc9, 0xe9, 0x88, 0x52, 0x51, 0xc5, 0x56]), None, 0),
    (PARENT_LOCATOR, None, 0),
];
const PARENT_LOCATOR: Guid = Guid::new(0xa8d3_5f2d, 0xb30b, 0x454d, [0xab, 0xf7, 0xd3, 0xd8, 0x48, 0x34, 0xab, 0x0c]);
/// The one type of parents' places.
const VHDX_LOCATOR: Guid = Guid::new(0xb04a_efb7, 0xd19e, 0x4a81, [0xb7, 0x89, 0x25, 0xb8, 0xe9, 0x44, 0x59, 0x13]);
/// Entries of that item: five are known.
const MAX_LOCATOR_ENTRIES: usize = 64;
/// The longest item with the place of the parent, in bytes.
const MAX_LOCATOR_BYTES: u32 = 64 << 10;

/// Where the items are, in bytes from the start of the region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetadataTable {
    items: [u64; 3],
    /// Where the item with the parent's place is, and its length.
    pub parent_locator: Option<(u64, u32)>,
}

impl MetadataTable {
    /// Parses the table, [`METADATA_TABLE_BYTES`] bytes, of a region of `region_bytes` bytes at `offset` of the file.
    pub fn parse(bytes: &[u8], offset: u64, region_bytes: u64) -> Result<Self> {
        if !bytes.starts_with(SIGNATURE) {
            return Err(wrong(
                "metadata signature",
                offset,
                "another",
                "the metadata are not where the region table says",
            ));
        }
        let cut_short = || wrong("metadata table", offset, bytes.len(), "the metadata table is cut short");
        let count = le16_at(bytes, 10).ok_or_else(cut_short)?;
        if u32::from(count) > MAX_ENTRIES {
            let message = format!("a metadata table has at most {MAX_ENTRIES} entries");
            return Err(wrong("EntryCount", offset + 10, count, message));
        }
        let (mut items, mut parent_locator) = ([None; 3], None);
        for index in 0..usize::from(count) {
            let at = 32 + index * 32;
            let entry = || Some((Guid::at(bytes, at)?, le32_at(bytes, at + 16)?, le32_at(bytes, at + 20)?));
            let ((guid, start, len), flags) = entry().zip(le32_at(bytes, at + 24)).ok_or_else(cut_short)?;
            let place = offset + at as u64;
            let Some((_, item, least)) = KNOWN.iter().find(|(known, ..)| *known == guid) else {
                if flags & FLAG_REQUIRED == 0 {
                    continue;
                }
                return Err(refused("ItemId", place, guid, "metadata that must be understood are not known"));
            };
            let Some(item) = item else {
                if guid == PARENT_LOCATOR {
                    let end = u64::from(start) + u64::from(len);
                    if (start as usize) < METADATA_TABLE_BYTES || end > region_bytes || len > MAX_LOCATOR_BYTES {
                        let message = "the item with the parent's place is not in the region, or too long";
                        return Err(wrong("Offset", place + 16, start, message));
                    }
                    parent_locator = Some((u64::from(start), len));
                }
                continue;
            };
            if len < *least {
                return Err(wrong("Length", place + 20, len, "an item of the metadata is too short"));
            }
            if (start as usize) < METADATA_TABLE_BYTES || u64::from(start) + u64::from(len) > region_bytes {
                return Err(wrong("Offset", place + 16, start, "an item of the metadata is not in their region"));
            }
            if items[*item as usize].replace(u64::from(start)).is_some() {
                return Err(wrong("ItemId", place, guid, "the same item stands twice in the metadata"));
            }
        }
        let missing =
            || wrong("metadata item", offset, "missing", "block size, disk size or sector size are not given");
        let [Some(parameters), Some(size), Some(sector)] = items else { return Err(missing()) };
        Ok(Self { items: [parameters, size, sector], parent_locator })
    }

    /// Where an item is, in bytes from the start of the region; 8 bytes of it are enough.
    pub fn offset(&self, item: MetadataItem) -> u64 {
        self.items[item as usize]
    }
}

/// The properties of the disk, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VhdxDisk {
    /// Length of a block in bytes, a power of two from 1 MiB to 256 MiB.
    pub block_bytes: u64,
    /// Size of the disk in bytes.
    pub size: u64,
    /// Payload blocks for each block of the sector bitmap; a power of two.
    pub chunk_ratio: u64,
    /// Length of a sector in bytes.
    pub sector_bytes: u64,
    /// The disk is a difference to another one.
    pub has_parent: bool,
}

impl VhdxDisk {
    /// From the first 8 bytes of the items file parameters, disk size and logical sector size.
    pub fn parse(parameters: [u8; 8], size: [u8; 8], sector: [u8; 8]) -> Result<Self> {
        let field =
            |field, value: u64, message: String| Err(cowshed_types::Error::invalid_image(field, value, message));
        let block_bytes = le32_at(&parameters, 0).unwrap_or_default();
        let flags = le32_at(&parameters, 4).unwrap_or_default();
        let sector_bytes = le32_at(&sector, 0).unwrap_or_default();
        let size = le64_at(&size, 0).unwrap_or_default();
        if !block_bytes.is_power_of_two() || !(MIN_BLOCK_BYTES..=MAX_BLOCK_BYTES).contains(&block_bytes) {
            let message = "the block size is no power of two from 1 MiB to 256 MiB".to_owned();
            return field("BlockSize", u64::from(block_bytes), message);
        }
        if !matches!(sector_bytes, 512 | 4096) {
            return field(
                "LogicalSectorSize",
                u64::from(sector_bytes),
                "the sector size is not 512 or 4096".to_owned(),
            );
        }
        if size == 0 || size > MAX_SIZE || !size.is_multiple_of(u64::from(sector_bytes)) {
            let message = "the size is no multiple of the sector size up to 64 TiB".to_owned();
            return field("VirtualDiskSize", size, message);
        }
        let block_bytes = u64::from(block_bytes);
        let chunk_ratio = BITMAP_SECTORS * u64::from(sector_bytes) / block_bytes;
        let has_parent = flags & FLAG_HAS_PARENT != 0;
        Ok(Self { block_bytes, size, chunk_ratio, sector_bytes: u64::from(sector_bytes), has_parent })
    }

    /// The entry of the BAT for a payload block: the entry of each chunk's sector bitmap follows those of its blocks.
    pub fn entry_of(&self, block: u64) -> u64 {
        block + block / self.chunk_ratio
    }

    /// The entry of the BAT for the sector bitmap of the chunk that a payload block is in.
    pub fn bitmap_entry_of(&self, block: u64) -> u64 {
        (block / self.chunk_ratio + 1) * (self.chunk_ratio + 1) - 1
    }

    /// Entries of the BAT that the disk needs: with a parent, those of all sector bitmaps too.
    pub fn entries(&self) -> u64 {
        let last = self.size.div_ceil(self.block_bytes) - 1;
        if self.has_parent { self.bitmap_entry_of(last) + 1 } else { self.entry_of(last) + 1 }
    }
}

/// Where the parent of a difference is, and which one it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VhdxParent {
    /// GUIDs of the parent's data that are right, in lower case.
    pub linkages: Vec<String>,
    /// The name of a file relative to the image.
    pub name: Option<String>,
}

impl VhdxParent {
    /// Parses the item with the parent's place.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let cut_short = || wrong("parent locator", 0, bytes.len(), "the item with the parent's place is cut short");
        let kind = Guid::at(bytes, 0).ok_or_else(cut_short)?;
        if kind != VHDX_LOCATOR {
            return Err(refused("LocatorType", 0, kind, "the parent's place is of a kind that is not known"));
        }
        let count = usize::from(le16_at(bytes, 18).ok_or_else(cut_short)?);
        if count > MAX_LOCATOR_ENTRIES {
            let message = format!("the parent's place has more than {MAX_LOCATOR_ENTRIES} entries");
            return Err(wrong("KeyValueCount", 18, count, message));
        }
        let (mut linkages, mut relative, mut absolute, mut volume) = (Vec::new(), None, None, None);
        for index in 0..count {
            let at = 20 + index * 12;
            let text = |offset: usize, len: usize| {
                let (start, len) = (le32_at(bytes, at + offset)? as usize, usize::from(le16_at(bytes, at + len)?));
                Some(utf16(bytes.get(start..start.checked_add(len)?)?, false))
            };
            let (key, value) = (text(0, 8).ok_or_else(cut_short)?, text(4, 10).ok_or_else(cut_short)?);
            match key.as_str() {
                "parent_linkage" | "parent_linkage2" => {
                    linkages.push(value.trim_matches(['{', '}']).to_ascii_lowercase());
                }
                "relative_path" => relative = Some(value),
                "absolute_win32_path" => absolute = Some(value),
                "volume_path" => volume = Some(value),
                _ => (),
            }
        }
        let name = beside(relative.as_deref(), &[absolute.as_deref(), volume.as_deref()]);
        Ok(Self { linkages, name })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(changes: &[(usize, &[u8])]) -> Vec<u8> {
        let mut bytes = vec![0; METADATA_TABLE_BYTES];
        let mut put = |at: usize, data: &[u8]| bytes[at..at + data.len()].copy_from_slice(data);
        put(0, SIGNATURE);
        put(10, &[5]);
        for (index, (guid, item, least)) in KNOWN.iter().take(5).enumerate() {
            let at = 32 + index * 32;
            put(at, &guid.0);
            put(at + 16, &(0x1_0000 + 16 * index as u32).to_le_bytes());
            put(at + 20, &(*least).max(4).to_le_bytes());
            put(at + 24, &[if item.is_some() { 4 } else { 6 }]);
        }
        for (at, data) in changes {
            put(*at, data);
        }
        bytes
    }

    #[test]
    fn items_are_found() {
        let parsed = MetadataTable::parse(&table(&[]), 2 << 20, 1 << 20).unwrap();
        assert_eq!(parsed.offset(MetadataItem::FileParameters), 0x1_0000);
        assert_eq!(parsed.offset(MetadataItem::VirtualDiskSize), 0x1_0010);
        assert_eq!(parsed.offset(MetadataItem::LogicalSectorSize), 0x1_0020);
    }

    #[test]
    fn the_bitmaps_of_chunks_have_entries_of_their_own() {
        let disk = |block: u32, size: u64, sector: u64| {
            let parameters = u64::from(block).to_le_bytes();
            VhdxDisk::parse(parameters, size.to_le_bytes(), sector.to_le_bytes())
        };
        let parsed = disk(1 << 20, 9 << 30, 512).unwrap();
        assert_eq!((parsed.chunk_ratio, parsed.entry_of(4095), parsed.entry_of(4096)), (4096, 4095, 4097));
        assert_eq!(parsed.entries(), 9216 + 2);
        assert_eq!(disk(256 << 20, 512, 512).unwrap().chunk_ratio, 16);
        assert_eq!(disk(1 << 20, 4096, 4096).unwrap().chunk_ratio, 32768);
        for (block, size, sector, part) in [
            (0, 512, 512, "BlockSize"),
            (3 << 20, 512, 512, "BlockSize"),
            (512 << 20, 512, 512, "BlockSize"),
            (1 << 20, 512, 1024, "LogicalSectorSize"),
            (1 << 20, 0, 512, "VirtualDiskSize"),
            (1 << 20, 512, 4096, "VirtualDiskSize"),
            (1 << 20, (64 << 40) + 512, 512, "VirtualDiskSize"),
        ] {
            let error = disk(block, size, sector).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
        let child = (1u64 << 33 | 1 << 20).to_le_bytes();
        let child = VhdxDisk::parse(child, (9u64 << 30).to_le_bytes(), 512u64.to_le_bytes()).unwrap();
        assert!(child.has_parent && child.bitmap_entry_of(4095) == 4096 && child.bitmap_entry_of(4096) == 8193);
        assert_eq!(child.entries(), 3 * 4097);
    }

    #[test]
    fn each_rule_is_held() {
        for (at, bytes, part) in [
            (0, &b"x"[..], "metadata signature"),
            (10, &[0, 8], "EntryCount"),
            (10, &[2], "missing"),
            (32, &[0], "ItemId"),
            (48, &[0, 0, 0], "(Offset"),
            (50, &[0x20], "(Offset"),
            (52, &[7], "(Length"),
        ] {
            let error = MetadataTable::parse(&table(&[(at, bytes)]), 2 << 20, 1 << 20).unwrap_err().to_string();
            assert!(error.contains(part), "{at}: {error}");
        }
        let twice = table(&[(64, &KNOWN[0].0.0)]);
        assert!(MetadataTable::parse(&twice, 0, 1 << 20).unwrap_err().to_string().contains("twice"));
        for len in [0, 8, 11, 40, 120] {
            assert!(MetadataTable::parse(&table(&[])[..len], 0, 1 << 20).is_err(), "{len} bytes");
        }
    }
}
