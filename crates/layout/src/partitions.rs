// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Partition tables: MBR with its logical partitions, and GPT (UEFI specification, chapter 5). [`Search`] looks one
//! partition up, and names the bytes that it has to read. Numbers are little-endian.

use crate::bytes::{array_at, le32_at, le64_at};
use crate::complaint::wrong;
use crate::crc32c::crc32;
use cowshed_types::{Error, ErrorKind, Result};
use std::ops::Range;

/// Unit of an MBR, and the smallest unit of a GPT.
const SECTOR_BYTES: u64 = 512;
/// Lengths of a logical block that a GPT may count in.
const BLOCK_BYTES: [u64; 2] = [SECTOR_BYTES, 4096];
/// Bytes of a GPT header with meaning.
const GPT_HEADER_BYTES: usize = 92;
/// The longest list of a GPT that is read; the usual one has 16 KiB.
const MAX_LIST_BYTES: u64 = 1 << 20;
/// The first number of a logical partition.
const FIRST_LOGICAL: u32 = 5;
/// The field that marks a GPT header.
const SIGNATURE: &str = "signature";
/// The longest chain of logical partitions that is followed.
const MAX_LOGICAL: u32 = 256;

/// Where the entries of an MBR begin, in bytes.
const FIRST_ENTRY: usize = 446;
/// Length of one of them.
const ENTRY_BYTES: usize = 16;

/// Types of entries in an MBR.
mod kind {
    pub const EMPTY: u8 = 0;
    /// The disk has a GPT.
    pub const PROTECTIVE: u8 = 0xee;
    /// The partition holds logical ones.
    pub const EXTENDED: [u8; 3] = [0x05, 0x0f, 0x85];
}

/// The next step of a [`Search`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ScanStep {
    /// It needs these bytes of the disk, which are there: [`Search::take`].
    Read(Range<u64>),
    /// The partition has these bytes of the disk.
    Found(Range<u64>),
}

/// Looks for one partition of a disk.
#[derive(Clone, Debug)]
pub struct Search {
    /// As the Linux kernel counts: from 1, logical ones from 5.
    number: u32,
    disk_bytes: u64,
    stage: SearchStage,
}

#[derive(Clone, Debug)]
enum SearchStage {
    /// The first sector.
    Head,
    /// A link of the chain of logical partitions.
    Chain {
        extended: Range<u64>,
        at: u64,
        number: u32,
    },
    /// The header of a GPT, by its number in [`Search::headers`]. The error is that of the first one that was there.
    Header {
        index: usize,
        first_error: Option<Error>,
    },
    /// The list of a GPT, whose header is right.
    List {
        index: usize,
        header: GptHeader,
        first_error: Option<Error>,
    },
    Found(Range<u64>),
}

/// The part of a GPT header with the place of the list of partitions.
#[derive(Clone, Debug)]
struct GptHeader {
    block_bytes: u64,
    /// The bytes of the disk that partitions may take.
    usable: Range<u64>,
    list: Range<u64>,
    list_sum: u32,
    entry_bytes: u64,
    entries: u64,
}

/// An entry of an MBR that isn't empty, with its place in bytes. `start` counts from the place that the entry is
/// relative to.
#[derive(Clone, Debug)]
struct MbrEntry {
    kind: u8,
    start: u64,
    len: u64,
}

impl MbrEntry {
    fn is_extended(&self) -> bool {
        kind::EXTENDED.contains(&self.kind)
    }
}

impl Search {
    /// For partition `number` of a disk with this many bytes.
    ///
    /// # Errors
    /// For the number 0, and where the disk is too short for a table.
    pub fn new(number: u32, disk_bytes: u64) -> Result<Search> {
        if number == 0 {
            return Err(Error::invalid_argument("partitions are numbered from 1"));
        }
        if disk_bytes < SECTOR_BYTES {
            return Err(no_table());
        }
        Ok(Search { number, disk_bytes, stage: SearchStage::Head })
    }

    /// The next step: bytes to read, a partition, or the end.
    pub fn step(&self) -> ScanStep {
        match &self.stage {
            SearchStage::Head => ScanStep::Read(0..SECTOR_BYTES),
            SearchStage::Chain { at, .. } => ScanStep::Read(*at..*at + SECTOR_BYTES),
            // Its places are inside of the disk.
            SearchStage::Header { index, .. } => match self.headers().nth(*index) {
                Some((at, _)) => ScanStep::Read(at..at + SECTOR_BYTES),
                None => ScanStep::Read(0..SECTOR_BYTES),
            },
            SearchStage::List { header, .. } => ScanStep::Read(header.list.clone()),
            SearchStage::Found(range) => ScanStep::Found(range.clone()),
        }
    }

    /// Takes the bytes that [`Search::step`] asked for.
    ///
    /// # Errors
    /// Where the disk has no such partition, or a table that breaks the rules.
    pub fn take(&mut self, bytes: &[u8]) -> Result<()> {
        self.stage = match std::mem::replace(&mut self.stage, SearchStage::Head) {
            SearchStage::Head => self.take_head(bytes)?,
            SearchStage::Chain { extended, at, number } => self.take_link(bytes, extended, at, number)?,
            SearchStage::Header { index, first_error } => match self.take_header(bytes, index) {
                Ok(header) => SearchStage::List { index, header, first_error },
                Err(error) => self.next_header(index, first_error, error)?,
            },
            SearchStage::List { index, header, first_error } => match crc32(&[bytes]) == header.list_sum {
                true => self.take_list(bytes, &header)?,
                false => {
                    let error = wrong("partition_entry_array_crc32", header.list.start, header.list_sum, BAD_LIST);
                    self.next_header(index, first_error, error)?
                }
            },
            SearchStage::Found(range) => SearchStage::Found(range),
        };
        Ok(())
    }

    fn missing(&self) -> Error {
        Error::new(ErrorKind::NotFound, format!("the disk has no partition {}", self.number))
    }

    fn take_head(&self, bytes: &[u8]) -> Result<SearchStage> {
        let entries = mbr_entries(bytes).ok_or_else(no_table)?;
        if entries.iter().flatten().any(|entry| entry.kind == kind::PROTECTIVE) {
            return match self.headers().next() {
                Some(_) => Ok(SearchStage::Header { index: 0, first_error: None }),
                None => Err(wrong("signature", SECTOR_BYTES, self.disk_bytes, "the disk is too short for its GPT")),
            };
        }
        if !has_boot_indicators(bytes) {
            return Err(no_table());
        }
        if self.number >= FIRST_LOGICAL {
            let extended = entries.iter().flatten().find(|entry| entry.is_extended()).ok_or_else(|| self.missing())?;
            let extended = self.range(0, extended, 0)?;
            return Ok(SearchStage::Chain { at: extended.start, extended, number: FIRST_LOGICAL });
        }
        let index = self.number as usize - 1;
        let entry = entries[index].as_ref().ok_or_else(|| self.missing())?;
        if entry.is_extended() {
            let message = format!("partition {} is an extended one, which holds those from 5 on", self.number);
            return Err(Error::invalid_argument(message));
        }
        Ok(SearchStage::Found(self.range(0, entry, 0)?))
    }

    /// A link: the entry of a logical partition, and that of the next link, which counts from the extended partition.
    fn take_link(&self, bytes: &[u8], extended: Range<u64>, at: u64, number: u32) -> Result<SearchStage> {
        let Some(entries) = mbr_entries(bytes) else {
            return Err(wrong("signature", at + 510, number, "a link of the logical partitions is no partition table"));
        };
        let data = entries.iter().flatten().find(|entry| !entry.is_extended());
        let mut next_number = number;
        if let Some(data) = data {
            if number == self.number {
                return Ok(SearchStage::Found(self.range(at, data, at)?));
            }
            next_number += 1;
        }
        let next = entries.iter().flatten().find(|entry| entry.is_extended()).ok_or_else(|| self.missing())?;
        let next_at = extended.start.checked_add(next.start).filter(|next| next + SECTOR_BYTES <= extended.end);
        let next_at = next_at.ok_or_else(|| {
            wrong("partition start", at, next.start, "a link of the logical partitions is outside of their partition")
        })?;
        // Tools write the chain in the order of the disk. A link that goes back may be a circle.
        if next_at <= at || next_number - FIRST_LOGICAL >= MAX_LOGICAL {
            return Err(wrong("partition start", at, next.start, "the chain of logical partitions doesn't go forward"));
        }
        Ok(SearchStage::Chain { extended, at: next_at, number: next_number })
    }

    /// Places of GPT headers, and the length of the block that each of them counts in: first ones, then spare ones.
    fn headers(&self) -> impl Iterator<Item = (u64, u64)> {
        let disk_bytes = self.disk_bytes;
        let first = BLOCK_BYTES.into_iter().map(|block| (block, block));
        let spare = BLOCK_BYTES.into_iter().map(move |block| ((disk_bytes / block).saturating_sub(1) * block, block));
        first.chain(spare).filter(move |(at, block)| *at >= SECTOR_BYTES && at + block <= disk_bytes)
    }

    /// The next header, where this one is of no use.
    fn next_header(&self, index: usize, first_error: Option<Error>, error: Error) -> Result<SearchStage> {
        // The error of a damaged header tells more than the lack of one, and the first place more than a spare one.
        let is_missing = |error: &Error| error.field_name() == Some(SIGNATURE);
        let error = match first_error {
            Some(first) if !is_missing(&first) || is_missing(&error) => first,
            _ => error,
        };
        match self.headers().nth(index + 1) {
            Some(_) => Ok(SearchStage::Header { index: index + 1, first_error: Some(error) }),
            None => Err(error),
        }
    }

    fn take_header(&self, bytes: &[u8], index: usize) -> Result<GptHeader> {
        let (at, block_bytes) = self.headers().nth(index).ok_or_else(|| Error::internal("a GPT header of no disk"))?;
        let short = || wrong("header_size", at + 12, bytes.len(), "the GPT header is cut off");
        let u32_at = |offset: usize| le32_at(bytes, offset).ok_or_else(short);
        let u64_at = |offset: usize| le64_at(bytes, offset).ok_or_else(short);
        if !bytes.starts_with(b"EFI PART") {
            return Err(wrong(
                SIGNATURE,
                at,
                "something else",
                "the disk has no GPT, which its first sector announces",
            ));
        }
        let len = u32_at(12)? as usize;
        if !(GPT_HEADER_BYTES..=bytes.len()).contains(&len) {
            return Err(wrong("header_size", at + 12, len, "the GPT header has no sensible length"));
        }
        let sum = u32_at(16)?;
        if crc32(&[&bytes[..16], &[0; 4], &bytes[20..len]]) != sum {
            return Err(wrong("header_crc32", at + 16, sum, "the GPT header is damaged"));
        }
        let own = u64_at(24)?;
        if own.checked_mul(block_bytes) != Some(at) {
            return Err(wrong("my_lba", at + 24, own, "the GPT header is of another place"));
        }
        let place = |field, offset: usize| {
            let block = u64_at(offset)?;
            let bytes = block.checked_mul(block_bytes).filter(|bytes| *bytes < self.disk_bytes);
            bytes.ok_or_else(|| {
                wrong(field, at + offset as u64, block, "a block of the GPT header is outside of the disk")
            })
        };
        let (first, last) = (place("first_usable_lba", 40)?, place("last_usable_lba", 48)?);
        let (entries, entry_bytes) = (u64::from(u32_at(80)?), u64::from(u32_at(84)?));
        if entry_bytes < 128 || !entry_bytes.is_power_of_two() {
            return Err(wrong("size_of_partition_entry", at + 84, entry_bytes, BAD_ENTRY_BYTES));
        }
        let list_bytes = entries.checked_mul(entry_bytes).filter(|bytes| (1..=MAX_LIST_BYTES).contains(bytes));
        let list_bytes = list_bytes.ok_or_else(|| {
            wrong("number_of_partition_entries", at + 80, entries, "the list of partitions has no sensible length")
        })?;
        let start = place("partition_entry_lba", 72)?;
        if list_bytes > self.disk_bytes - start {
            return Err(wrong("partition_entry_lba", at + 72, start / block_bytes, LIST_OUTSIDE));
        }
        let usable = first..last + block_bytes;
        let list = start..start + list_bytes;
        Ok(GptHeader { block_bytes, usable, list, list_sum: u32_at(88)?, entry_bytes, entries })
    }

    fn take_list(&self, bytes: &[u8], header: &GptHeader) -> Result<SearchStage> {
        let index = u64::from(self.number) - 1;
        if index >= header.entries {
            return Err(self.missing());
        }
        let from = index * header.entry_bytes;
        let at = header.list.start + from;
        let from = usize::try_from(from).unwrap_or(usize::MAX);
        let Some(entry) = bytes.get(from..from.saturating_add(128)) else { return Err(self.missing()) };
        if array_at::<16>(entry, 0).is_none_or(|kind| kind == [0; 16]) {
            return Err(self.missing());
        }
        let (first, last) = (le64_at(entry, 32).unwrap_or(u64::MAX), le64_at(entry, 40).unwrap_or(u64::MAX));
        let range = first
            .checked_mul(header.block_bytes)
            .zip(last.checked_add(1).and_then(|end| end.checked_mul(header.block_bytes)).filter(|_| first <= last));
        let inside = range
            .filter(|(start, end)| *start >= header.usable.start && *end <= header.usable.end.min(self.disk_bytes));
        match inside {
            Some((start, end)) => Ok(SearchStage::Found(start..end)),
            None => Err(self.outside(at, first)),
        }
    }

    /// The bytes of an entry that counts from `base`. `at`: where its table is.
    fn range(&self, base: u64, entry: &MbrEntry, at: u64) -> Result<Range<u64>> {
        let start = base.checked_add(entry.start).filter(|start| *start >= at + SECTOR_BYTES);
        let end = start.and_then(|start| start.checked_add(entry.len));
        match (start, end) {
            (Some(start), Some(end)) if end <= self.disk_bytes => Ok(start..end),
            _ => Err(self.outside(at, entry.start / SECTOR_BYTES)),
        }
    }

    fn outside(&self, at: u64, first: u64) -> Error {
        let message = format!("partition {} is not inside of the disk ({} bytes)", self.number, self.disk_bytes);
        wrong("partition start", at, first, message)
    }
}

const BAD_LIST: &str = "the list of partitions is damaged";
const LIST_OUTSIDE: &str = "the list of partitions reaches outside of the disk";
const BAD_ENTRY_BYTES: &str = "the length of an entry is no power of two from 128 on";

fn no_table() -> Error {
    Error::new(ErrorKind::NotFound, "the disk has no partition table (MBR or GPT)")
}

/// False for the boot sector of a file system that fills the whole disk. It has the signature of an MBR, but code or
/// text in the place of the entries.
fn has_boot_indicators(bytes: &[u8]) -> bool {
    (0..4).all(|index| bytes.get(FIRST_ENTRY + ENTRY_BYTES * index).is_some_and(|status| matches!(status, 0 | 0x80)))
}

/// The four entries; nothing where the sector is no MBR.
fn mbr_entries(bytes: &[u8]) -> Option<[Option<MbrEntry>; 4]> {
    (array_at(bytes, 510)? == [0x55, 0xaa]).then_some(())?;
    let entry = |index: usize| {
        let entry: [u8; ENTRY_BYTES] = array_at(bytes, FIRST_ENTRY + ENTRY_BYTES * index)?;
        let sectors = |at| le32_at(&entry, at).map_or(0, |count| u64::from(count) * SECTOR_BYTES);
        let (kind, start, len) = (entry[4], sectors(8), sectors(12));
        (kind != kind::EMPTY && len > 0).then_some(MbrEntry { kind, start, len })
    };
    Some([0, 1, 2, 3].map(entry))
}

#[cfg(test)]
mod tests;
