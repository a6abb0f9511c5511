// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Headers of space-efficient sparse extents (`seSparse`), and the entries of their tables. VMware never published them:
//! docs/decisions/0014-sesparse.md says how they were learned.

use super::{Grain, HEADER_BYTES, SECTOR_BYTES, sectors_to_bytes};
use crate::bytes::le64_at;
use cowshed_types::{Error, Result};

/// 0xcafebabe in 64 bits.
const CONST_MAGIC: u64 = 0xcafe_babe;
const VOLATILE_MAGIC: u64 = 0xcafe_cafe;
/// "2.1" in the logs of ESXi.
const VERSION: u64 = 0x2_0000_0001;
/// The only length of a grain, in sectors.
const GRAIN_SECTORS: u64 = 8;
/// The only length of a grain table, in sectors.
const TABLE_SECTORS: u64 = 64;
/// Bytes of an entry in a directory or a table.
const ENTRY_BYTES: u64 = 8;
/// The largest directory, in sectors.
const MAX_DIRECTORY_SECTORS: u64 = 1 << 19;
/// The high half of a directory entry that names a table.
const TABLE_MARK: u64 = 0x1000_0000;

/// The words of the header, by their names in the logs of ESXi.
const CONST_WORDS: usize = 26;
/// The same of the volatile header.
const VOLATILE_WORDS: usize = 4;

/// The header of a space-efficient sparse extent, checked. Offsets in sectors of 512 bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SeSparseHeader {
    /// Length of the extent.
    pub capacity_sectors: u64,
    /// The sector of the volatile header.
    pub volatile_sector: u64,
    /// The sector of the grain directory.
    pub directory_sector: u64,
    /// The sector of grain table 0.
    pub tables_sector: u64,
    /// The sector of grain 0.
    pub grains_sector: u64,
    /// The space of the directory.
    directory_sectors: u64,
}

impl SeSparseHeader {
    /// Parses the first [`HEADER_BYTES`] bytes of an extent. Its places are for [`Self::check_places`] to judge.
    ///
    /// # Errors
    /// A field that no known file has, with the words of QEMU.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let words = words::<CONST_WORDS>(bytes)?;
        let [magic, version, capacity, grain, table, flags, ..] = words;
        let hex = |value: u64| format!("0x{value:016x}");
        if magic != CONST_MAGIC {
            let error = Error::invalid_image("constMagic", hex(magic), "this is no seSparse extent");
            return Err(error.qemu(format!("Bad const header magic: {}", hex(magic))));
        }
        if version != VERSION {
            let error = Error::unsupported("this version of seSparse is unknown").field("version").value(hex(version));
            return Err(error.qemu(format!("Unsupported version: {}", hex(version))));
        }
        if grain != GRAIN_SECTORS {
            let error = Error::unsupported("seSparse grains of this size are unknown").field("grainSize").value(grain);
            return Err(error.qemu(format!("Unsupported grain size: {grain}")));
        }
        if table != TABLE_SECTORS {
            let error = Error::unsupported("seSparse grain tables of this size are unknown");
            return Err(error
                .field("grainTableSize")
                .value(table)
                .qemu(format!("Unsupported grain table size: {table}")));
        }
        if flags != 0 {
            let error = Error::unsupported("these flags of a seSparse extent are unknown");
            return Err(error.field("flags").value(hex(flags)).qemu(format!("Unsupported flags: {}", hex(flags))));
        }
        if let Some(value) = words[6..10].iter().find(|word| **word != 0) {
            let all: Vec<String> = words[6..10].iter().map(|word| hex(*word)).collect();
            let error = Error::unsupported("a reserved field of a seSparse extent is in use");
            let error = error.field("reserved").value(hex(*value));
            return Err(error.qemu(format!("Unsupported reserved bits: {}", all.join(" "))));
        }
        expect_padding(bytes, CONST_WORDS, "const")?;
        Ok(Self {
            capacity_sectors: capacity,
            volatile_sector: words[10],
            directory_sector: words[16],
            tables_sector: words[18],
            grains_sector: words[24],
            directory_sectors: words[17],
        })
    }

    /// Checks the lengths and the offsets.
    ///
    /// # Errors
    /// One that no file can have, or a directory that doesn't describe all of the extent.
    pub fn check_places(&self) -> Result<()> {
        let directory_sectors = self.directory_sectors;
        if directory_sectors > MAX_DIRECTORY_SECTORS {
            let message = format!("the grain directory is longer than {MAX_DIRECTORY_SECTORS} sectors");
            let error = Error::invalid_image("grainDirectorySize", directory_sectors, message);
            return Err(error.qemu("L1 size too big"));
        }
        if sectors_to_bytes(self.capacity_sectors).is_none() {
            let error = Error::invalid_image("capacity", self.capacity_sectors, "the VMDK extent is too large");
            return Err(error.qemu("Could not refresh total sector count: File too large"));
        }
        if self.directory_bytes() > directory_sectors * SECTOR_BYTES {
            let message = "the grain directory is too short for the extent";
            return Err(Error::invalid_image("grainDirectorySize", directory_sectors, message));
        }
        for (field, sector) in [
            ("volatileHeaderOffset", self.volatile_sector),
            ("grainDirectoryOffset", self.directory_sector),
            ("grainTablesOffset", self.tables_sector),
            ("grainsOffset", self.grains_sector),
        ] {
            if sectors_to_bytes(sector).is_none() {
                return Err(Error::invalid_image(field, sector, "an offset of the VMDK header is impossible"));
            }
        }
        Ok(())
    }

    /// Checks the [`HEADER_BYTES`] bytes of the volatile header.
    ///
    /// # Errors
    /// A journal that has to be carried out before the tables count.
    pub fn check_volatile(bytes: &[u8]) -> Result<()> {
        let [magic, _free_table, _transaction, replay] = words::<VOLATILE_WORDS>(bytes)?;
        if magic != VOLATILE_MAGIC {
            let value = format!("0x{magic:016x}");
            let error = Error::invalid_image("volatileMagic", &value, "the volatile header of the extent is missing");
            return Err(error.qemu(format!("Bad volatile header magic: {value}")));
        }
        if replay != 0 {
            let message = "the extent was not closed, and its journal can't be replayed here; start the virtual machine once, \
                           or consolidate its snapshots";
            let error = Error::unsupported(message).field("replayJournal").value(replay);
            return Err(error.qemu("Image is dirty, Replaying journal not supported"));
        }
        expect_padding(bytes, VOLATILE_WORDS, "volatile")
    }

    /// Length of a grain in bytes.
    pub fn grain_bytes(&self) -> u64 {
        GRAIN_SECTORS * SECTOR_BYTES
    }

    /// Length of a grain table in bytes.
    pub fn table_bytes(&self) -> usize {
        (TABLE_SECTORS * SECTOR_BYTES) as usize
    }

    /// Entries of a grain table.
    pub fn table_entries(&self) -> u64 {
        TABLE_SECTORS * SECTOR_BYTES / ENTRY_BYTES
    }

    /// Bytes of the disk that one grain table describes.
    pub fn table_span_bytes(&self) -> u64 {
        self.grain_bytes() * self.table_entries()
    }

    /// Length of the directory in bytes, as far as the extent needs it.
    pub fn directory_bytes(&self) -> u64 {
        self.capacity_sectors.div_ceil(GRAIN_SECTORS * self.table_entries()) * ENTRY_BYTES
    }

    /// The place in bytes of the table that a directory entry names.
    ///
    /// # Errors
    /// An entry of no known form, or one of a table that no file is long enough for.
    pub fn table(&self, entry: u64) -> Result<Option<u64>> {
        if entry == 0 {
            return Ok(None);
        }
        let sector = (entry & u64::from(u32::MAX)) * TABLE_SECTORS + self.tables_sector;
        match sectors_to_bytes(sector).filter(|_| entry >> 32 == TABLE_MARK) {
            Some(place) => Ok(Some(place)),
            None => {
                let message = "an entry of the grain directory names no table";
                Err(Error::invalid_image("grain directory entry", format!("{entry:#x}"), message))
            }
        }
    }

    /// The grain that entry `index` of a table leads to. `None`: the table is too short.
    ///
    /// # Errors
    /// An entry of no known form, or one of a grain that no file is long enough for.
    pub fn grain_at(&self, table: &[u8], index: usize) -> Option<Result<Grain>> {
        le64_at(table, index.checked_mul(ENTRY_BYTES as usize)?).map(|entry| self.grain(entry))
    }

    fn grain(&self, entry: u64) -> Result<Grain> {
        const LOW_BITS: u32 = 48;
        let bad = || {
            let message = "an entry of a grain table is of no known kind";
            Err(Error::invalid_image("grain table entry", format!("{entry:#x}"), message))
        };
        match entry >> 60 {
            0 if entry == 0 => Ok(Grain::Unallocated),
            // Unmapped by the guest, or written with zeroes.
            1 | 2 => Ok(Grain::Zero),
            3 => {
                let number = (entry >> LOW_BITS & 0xfff) | (entry & ((1 << LOW_BITS) - 1)) << 12;
                let sector =
                    number.checked_mul(GRAIN_SECTORS).and_then(|sector| sector.checked_add(self.grains_sector));
                match sector.filter(|sector| sectors_to_bytes(*sector).is_some()) {
                    Some(sector) => Ok(Grain::At(sector)),
                    None => bad(),
                }
            }
            _ => bad(),
        }
    }
}

/// The first words of a header.
fn words<const COUNT: usize>(bytes: &[u8]) -> Result<[u64; COUNT]> {
    let mut words = [0; COUNT];
    for (index, word) in words.iter_mut().enumerate() {
        *word = le64_at(bytes, index * 8).ok_or_else(|| {
            Error::invalid_image("header", bytes.len(), "a header of the seSparse extent is cut short")
        })?;
    }
    Ok(words)
}

/// Refuses bytes behind the known words: they would have a meaning that is not known.
fn expect_padding(bytes: &[u8], count: usize, header: &str) -> Result<()> {
    let padding = bytes.get(count * 8..HEADER_BYTES).unwrap_or_default();
    match padding.iter().position(|byte| *byte != 0) {
        None => Ok(()),
        Some(at) => {
            let message = format!("the {header} header of a seSparse extent has fields that are unknown");
            let error = Error::unsupported(message).offset((count * 8 + at) as u64).field("padding").value(padding[at]);
            Err(error.qemu(format!("Unsupported non-zero {header} header padding")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Vec<u8> {
        let mut words = [0u64; HEADER_BYTES / 8];
        words[..6].copy_from_slice(&[CONST_MAGIC, VERSION, 65_536, 8, 64, 0]);
        words[10..26].copy_from_slice(&[1, 1, 2, 2, 4, 2048, 2052, 1, 2053, 256, 2309, 1, 2310, 1, 2312, 512]);
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    #[test]
    fn a_header_is_read() {
        let header = SeSparseHeader::parse(&header()).unwrap();
        assert_eq!((header.capacity_sectors, header.volatile_sector, header.directory_sector), (65_536, 1, 2052));
        assert_eq!((header.directory_bytes(), header.table_span_bytes()), (16, 16 << 20));
    }

    #[test]
    fn each_rule_is_held() {
        for (word, value, part) in [
            (0, 0xcafe_cafe, "Bad const header magic: 0x00000000cafecafe"),
            (1, 0x2_0000_0002, "Unsupported version: 0x0000000200000002"),
            (2, 1 << 54, "File too large"),
            (2, 65_536 * 33, "too short"),
            (3, 16, "Unsupported grain size: 16"),
            (4, 32, "Unsupported grain table size: 32"),
            (5, 1, "Unsupported flags: 0x0000000000000001"),
            (8, 2, "Unsupported reserved bits: 0x0000000000000000 0x0000000000000000 0x0000000000000002"),
            (10, 1 << 54, "volatileHeaderOffset"),
            (16, 1 << 54, "grainDirectoryOffset"),
            (17, (1 << 19) + 1, "L1 size too big"),
            (17, 0, "too short"),
            (18, 1 << 54, "grainTablesOffset"),
            (24, 1 << 54, "grainsOffset"),
            (26, 1 << 63, "Unsupported non-zero const header padding"),
        ] {
            let mut bytes = header();
            bytes[word * 8..word * 8 + 8].copy_from_slice(&u64::to_le_bytes(value));
            let error = SeSparseHeader::parse(&bytes).and_then(|header| header.check_places()).unwrap_err();
            let said = format!("{} {error}", error.sentence());
            assert!(said.contains(part), "{word}: {said}");
        }
        for len in 0..CONST_WORDS * 8 {
            assert!(SeSparseHeader::parse(&header()[..len]).is_err(), "{len} bytes");
        }
    }

    #[test]
    fn a_journal_to_replay_is_refused() {
        let volatile = |words: [u64; 5]| {
            let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            bytes.resize(HEADER_BYTES, 0);
            SeSparseHeader::check_volatile(&bytes).map_err(|error| error.sentence())
        };
        assert_eq!(volatile([VOLATILE_MAGIC, 7, 9, 0, 0]), Ok(()));
        for (words, part) in [
            ([VOLATILE_MAGIC, 0, 0, 1, 0], "Replaying journal not supported"),
            ([CONST_MAGIC, 0, 0, 0, 0], "Bad volatile header magic: 0x00000000cafebabe"),
            ([VOLATILE_MAGIC, 0, 0, 0, 1], "Unsupported non-zero volatile header padding"),
        ] {
            assert!(volatile(words).unwrap_err().contains(part));
        }
    }

    #[test]
    fn entries_lead_to_tables_and_grains() {
        let header = SeSparseHeader::parse(&header()).unwrap();
        assert_eq!(header.table(0).unwrap(), None);
        assert_eq!(header.table(0x1000_0000_0000_0003).unwrap(), Some((2053 + 3 * 64) * 512));
        for entry in [1, 0x1000_0001_0000_0000, 0x2000_0000_0000_0000, 1 << 32, u64::MAX] {
            assert!(header.table(entry).is_err(), "{entry:#x}");
        }
        let table: Vec<u8> = [0, 1 << 60 | 5, 2 << 60, 3 << 60 | 7 << 48, 3 << 60 | 1, 1, 1 << 48, 4 << 60, u64::MAX]
            .iter()
            .flat_map(|entry: &u64| entry.to_le_bytes())
            .collect();
        let grain = |index| header.grain_at(&table, index).map(|grain| grain.ok());
        assert_eq!(grain(0), Some(Some(Grain::Unallocated)));
        assert_eq!((grain(1), grain(2)), (Some(Some(Grain::Zero)), Some(Some(Grain::Zero))));
        assert_eq!(grain(3), Some(Some(Grain::At(2312 + 7 * 8))));
        assert_eq!(grain(4), Some(Some(Grain::At(2312 + 4096 * 8))));
        for index in 5..9 {
            assert_eq!(grain(index), Some(None), "{index}");
        }
        assert_eq!(grain(9), None);
        // Numbers that no file has room for.
        let far = (3u64 << 60 | 0xffff_ffff_ffff).to_le_bytes();
        assert!(header.grain_at(&far, 0).is_some_and(|grain| grain.is_err()));
    }
}
