// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The log (\[MS-VHDX\] 2.3): a ring of entries, each with new contents of 4 KiB sectors of the file. Entries that
//! follow each other with rising numbers are a sequence; the one with the largest number must be carried out.

use super::{CHECKSUM_AT, Guid, LOG_ENTRY_SIGNATURE, LOG_SECTOR_BYTES, REGION_TABLE_OFFSETS, checksum};
use crate::bytes::{array_at, le32_at, le64_at};
use crate::complaint::wrong;
use cowshed_types::memory::{try_push, vec_for};
use cowshed_types::{Error, Result, slip};
use std::ops::Range;

/// A longer log with entries in it is refused, in bytes: all of it is looked at in memory.
pub const MAX_LOG_BYTES: u64 = 64 << 20;

const SECTOR: usize = LOG_SECTOR_BYTES;
const HEADER_BYTES: usize = 64;
const DESCRIPTOR_BYTES: usize = 32;
const ZERO_SIGNATURE: &[u8; 4] = b"zero";
const DATA_SIGNATURE: &[u8; 4] = b"desc";
const SECTOR_SIGNATURE: &[u8; 4] = b"data";
/// The bytes of a sector that its descriptor has: this many at its start, and at its end.
const LEADING: usize = 8;
const TRAILING: usize = 4;

/// A change that an entry asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LogWrite {
    /// This many zeroes, at this offset of the file; whole sectors of 4 KiB.
    Zeroes(u64, u64),
    /// These 4 KiB at this offset of the file.
    Sector(u64, Vec<u8>),
}

impl LogWrite {
    /// The bytes of the file that it changes.
    pub fn range(&self) -> Range<u64> {
        match self {
            LogWrite::Zeroes(at, len) => *at..*at + *len,
            LogWrite::Sector(at, bytes) => *at..*at + bytes.len() as u64,
        }
    }
}

/// The changes that a log demands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Replay {
    /// A file that is shorter was cut off.
    pub flushed_bytes: u64,
    /// The file needs this length.
    pub last_bytes: u64,
    /// The changes, in this order.
    pub writes: Vec<LogWrite>,
}

/// An entry, its changes left aside.
struct Entry {
    length: usize,
    tail: usize,
    number: u64,
    descriptors: usize,
    flushed_bytes: u64,
    last_bytes: u64,
}

/// The bytes of a ring.
struct Ring<'a>(&'a [u8]);

impl Ring<'_> {
    /// The sector `at`, which may be behind the end, that is, at the start.
    fn sector(&self, at: usize) -> Option<&[u8]> {
        let at = at.checked_rem(self.0.len())?;
        self.0.get(at..at + SECTOR)
    }

    /// Steps from one place forwards to another.
    fn distance(&self, from: usize, to: usize) -> usize {
        (to + self.0.len() - from) % self.0.len().max(1)
    }

    /// The entry that begins at `at`, when all of it is sound.
    fn entry(&self, at: usize, guid: Guid) -> Option<Entry> {
        let head = self.sector(at)?;
        if !super::is_log_entry(head, guid) {
            return None;
        }
        let entry = Entry {
            length: le32_at(head, 8)? as usize,
            tail: le32_at(head, 12)? as usize,
            number: le64_at(head, 16)?,
            descriptors: le32_at(head, 24)? as usize,
            flushed_bytes: le64_at(head, 48)?,
            last_bytes: le64_at(head, 56)?,
        };
        let is_whole = entry.length.is_multiple_of(SECTOR) && entry.length > 0 && entry.length <= self.0.len();
        if !is_whole || !entry.tail.is_multiple_of(SECTOR) || entry.tail >= self.0.len() || entry.number == 0 {
            return None;
        }
        let head_bytes = head_bytes(entry.descriptors)?;
        if head_bytes > entry.length {
            return None;
        }
        let data = self.descriptors(at, &entry).try_fold(0, |data, descriptor| match descriptor? {
            Descriptor { zeroes: Some(_), .. } => Some(data),
            Descriptor { zeroes: None, .. } => {
                let sector = self.sector(at + head_bytes + data * SECTOR)?;
                let number = (u64::from(le32_at(sector, 4)?) << 32) | u64::from(le32_at(sector, SECTOR - TRAILING)?);
                let is_its = sector.starts_with(SECTOR_SIGNATURE) && number == entry.number;
                (is_its || slip!("vhdx_log_ends_with_half_an_entry")).then_some(data + 1)
            }
        })?;
        if head_bytes + data * SECTOR != entry.length {
            return None;
        }
        let mut bytes = vec_for(entry.length).ok()?;
        for step in 0..entry.length / SECTOR {
            bytes.extend_from_slice(self.sector(at + step * SECTOR)?);
        }
        let is_sound = le32_at(&bytes, CHECKSUM_AT)? == checksum(&bytes);
        (is_sound || slip!("vhdx_log_ends_with_half_an_entry")).then_some(entry)
    }

    /// The descriptors of an entry at `at`; `None` for one that breaks a rule.
    fn descriptors<'a>(&'a self, at: usize, entry: &'a Entry) -> impl Iterator<Item = Option<Descriptor>> + 'a {
        (0..entry.descriptors).map(move |index| {
            let place = HEADER_BYTES + index * DESCRIPTOR_BYTES;
            let sector = self.sector(at + place / SECTOR * SECTOR)?;
            let bytes = sector.get(place % SECTOR..)?.get(..DESCRIPTOR_BYTES)?;
            Descriptor::parse(bytes, entry.number)
        })
    }

    /// The entries that begin at `start` and follow each other: the place of the last one, that entry, and whether the
    /// sequence is complete.
    fn sequence(&self, start: usize, guid: Guid) -> Option<(usize, Entry, bool)> {
        let mut last = self.entry(start, guid)?;
        let (mut at, mut total) = (start, last.length);
        loop {
            let next = (at + last.length) % self.0.len();
            match self.entry(next, guid) {
                Some(entry)
                    if Some(entry.number) == last.number.checked_add(1) && total + entry.length <= self.0.len() =>
                {
                    total += entry.length;
                    (at, last) = (next, entry);
                }
                _ => break,
            }
        }
        // The entries that are still to be replayed begin within the sequence.
        let is_whole = self.distance(start, last.tail) <= self.distance(start, at);
        Some((at, last, is_whole))
    }
}

/// A descriptor of an entry.
struct Descriptor {
    offset: u64,
    /// Length of zeroes; `None`: a sector follows.
    zeroes: Option<u64>,
    leading: [u8; LEADING],
    trailing: [u8; TRAILING],
}

impl Descriptor {
    fn parse(bytes: &[u8], number: u64) -> Option<Descriptor> {
        let offset = le64_at(bytes, 16)?;
        let zeroes = match bytes.first_chunk()? {
            ZERO_SIGNATURE => Some(le64_at(bytes, 8)?),
            DATA_SIGNATURE => None,
            _ => return None,
        };
        let len = zeroes.unwrap_or(SECTOR as u64);
        let is_whole = offset.is_multiple_of(SECTOR as u64) && len.is_multiple_of(SECTOR as u64);
        let end = offset.checked_add(len).filter(|end| i64::try_from(*end).is_ok());
        // The signature of the file and the headers are never logged.
        let is_sound = is_whole && end.is_some() && offset >= REGION_TABLE_OFFSETS[0] && le64_at(bytes, 24)? == number;
        let descriptor = Descriptor { offset, zeroes, leading: array_at(bytes, 8)?, trailing: array_at(bytes, 4)? };
        is_sound.then_some(descriptor)
    }
}

/// Length of the sectors that header and descriptors of an entry take.
fn head_bytes(descriptors: usize) -> Option<usize> {
    descriptors.checked_mul(DESCRIPTOR_BYTES)?.checked_add(HEADER_BYTES)?.checked_next_multiple_of(SECTOR)
}

/// The changes that the whole log demands; `None` where it has no entry with this mark. `place`: where the log is in
/// the file.
pub fn replay_of(log: &[u8], guid: Guid, place: u64) -> Result<Option<Replay>> {
    let ring = Ring(log);
    let mut newest: Option<(usize, Entry)> = None;
    let mut at = 0;
    while at < log.len() {
        let Some((last_at, last, is_whole)) = ring.sequence(at, guid) else {
            at += SECTOR;
            continue;
        };
        // A part of a broken sequence is broken, too.
        let end = last_at + last.length;
        if is_whole && newest.as_ref().is_none_or(|(_, known)| known.number < last.number) {
            newest = Some((last_at, last));
        }
        if last_at < at {
            break;
        }
        at = end;
    }
    // Where the first entry was cut off, nothing was done on its word.
    let Some((last_at, last)) = newest else { return Ok(None) };
    let mut replay = Replay { flushed_bytes: last.flushed_bytes, last_bytes: last.last_bytes, ..Replay::default() };
    let mut at = last.tail;
    loop {
        let broken = || wrong("log entry", place + at as u64, "broken", "the log of the image can't be followed");
        let entry = ring.entry(at, guid).ok_or_else(broken)?;
        collect(&ring, at, &entry, &mut replay)?;
        if at == last_at {
            break;
        }
        at = (at + entry.length) % log.len();
    }
    let log_range = place..place + log.len() as u64;
    for write in &replay.writes {
        let range = write.range();
        if range.start < log_range.end && log_range.start < range.end {
            let message = "an entry of the log changes the log itself";
            return Err(wrong("FileOffset", place, format!("{:#x}", range.start), message));
        }
    }
    Ok(Some(replay))
}

/// Adds the changes of an entry.
fn collect(ring: &Ring<'_>, at: usize, entry: &Entry, replay: &mut Replay) -> Result<()> {
    let broken = || Error::internal("an entry of a log is broken");
    let mut data_at = at + head_bytes(entry.descriptors).ok_or_else(broken)?;
    for descriptor in ring.descriptors(at, entry) {
        let descriptor = descriptor.ok_or_else(broken)?;
        let write = match descriptor.zeroes {
            Some(len) => LogWrite::Zeroes(descriptor.offset, len),
            None => {
                let sector = ring.sector(data_at).ok_or_else(broken)?;
                data_at += SECTOR;
                let mut bytes = vec_for(SECTOR)?;
                bytes.extend_from_slice(&descriptor.leading);
                bytes.extend_from_slice(&sector[LEADING..SECTOR - TRAILING]);
                bytes.extend_from_slice(&descriptor.trailing);
                LogWrite::Sector(descriptor.offset, bytes)
            }
        };
        if write.range().is_empty() {
            continue;
        }
        try_push(&mut replay.writes, write)?;
    }
    Ok(())
}

/// A new entry of the log.
#[derive(Clone, Debug)]
pub struct NewLogEntry<'a> {
    /// The mark of the log.
    pub guid: Guid,
    /// Its number, one more than that of the entry before.
    pub number: u64,
    /// Where in the log the first entry begins that is not in the file durably; this one at the latest. In bytes.
    pub tail: u32,
    /// The file has this length durably; whole MiB.
    pub flushed_bytes: u64,
    /// All that is in use ends there; whole MiB.
    pub last_bytes: u64,
    /// The new contents of sectors of 4 KiB, with their offsets in the file.
    pub sectors: &'a [(u64, Vec<u8>)],
}

impl NewLogEntry<'_> {
    /// Length of an entry of this many sectors in bytes.
    pub fn length_of(sectors: usize) -> usize {
        head_bytes(sectors).unwrap_or(usize::MAX).saturating_add(sectors.saturating_mul(SECTOR))
    }

    /// The bytes of the entry.
    pub fn to_bytes(&self) -> Vec<u8> {
        let length = Self::length_of(self.sectors.len());
        let mut bytes = vec![0; length];
        let mut put = |at: usize, part: &[u8]| bytes[at..at + part.len()].copy_from_slice(part);
        put(0, LOG_ENTRY_SIGNATURE);
        put(8, &(length as u32).to_le_bytes());
        put(12, &self.tail.to_le_bytes());
        put(16, &self.number.to_le_bytes());
        put(24, &(self.sectors.len() as u32).to_le_bytes());
        put(32, &self.guid.0);
        put(48, &self.flushed_bytes.to_le_bytes());
        put(56, &self.last_bytes.to_le_bytes());
        let data = length - self.sectors.len() * SECTOR;
        for (index, (offset, contents)) in self.sectors.iter().enumerate() {
            let at = HEADER_BYTES + index * DESCRIPTOR_BYTES;
            put(at, DATA_SIGNATURE);
            put(at + 4, &contents[SECTOR - TRAILING..]);
            put(at + 8, &contents[..LEADING]);
            put(at + 16, &offset.to_le_bytes());
            put(at + 24, &self.number.to_le_bytes());
            let at = data + index * SECTOR;
            put(at, SECTOR_SIGNATURE);
            put(at + 4, &((self.number >> 32) as u32).to_le_bytes());
            put(at + LEADING, &contents[LEADING..SECTOR - TRAILING]);
            put(at + SECTOR - TRAILING, &(self.number as u32).to_le_bytes());
        }
        let sum = checksum(&bytes);
        bytes[CHECKSUM_AT..CHECKSUM_AT + 4].copy_from_slice(&sum.to_le_bytes());
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GUID: Guid = Guid::new(7, 8, 9, [1; 8]);
    const LOG_AT: u64 = 1 << 20;

    fn sector(value: u8) -> Vec<u8> {
        (0..SECTOR).map(|at| value.wrapping_add(at as u8)).collect()
    }

    fn entry(at: usize, number: u64, sectors: &[(u64, Vec<u8>)]) -> Vec<u8> {
        let (flushed_bytes, last_bytes) = (5 << 20, 6 << 20);
        NewLogEntry { guid: GUID, number, tail: at as u32, flushed_bytes, last_bytes, sectors }.to_bytes()
    }

    /// A log of 1 MiB with entries at these places; they go round its end.
    fn log(entries: &[(usize, Vec<u8>)]) -> Vec<u8> {
        let mut log = vec![0; 1 << 20];
        for (at, bytes) in entries {
            for (index, byte) in bytes.iter().enumerate() {
                log[(at + index) % (1 << 20)] = *byte;
            }
        }
        log
    }

    fn replay(log: &[u8]) -> Option<Replay> {
        replay_of(log, GUID, LOG_AT).unwrap()
    }

    /// The entry with another tail.
    fn with_tail(mut bytes: Vec<u8>, tail: usize) -> Vec<u8> {
        bytes[12..16].copy_from_slice(&(tail as u32).to_le_bytes());
        let sum = checksum(&bytes);
        bytes[4..8].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    #[test]
    fn an_entry_is_read_as_it_was_meant() {
        for count in [0, 1, 126, 127, 200] {
            let sectors: Vec<(u64, Vec<u8>)> =
                (0..count).map(|index| ((2 << 20) + index * 4096, sector(index as u8))).collect();
            let at = (1 << 20) - 4096;
            let bytes = entry(at, u64::from(u32::MAX) + 2, &sectors);
            assert_eq!(bytes.len(), NewLogEntry::length_of(count as usize));
            let found = replay(&log(&[(at, bytes.clone())])).unwrap();
            assert_eq!((found.flushed_bytes, found.last_bytes), (5 << 20, 6 << 20));
            let writes: Vec<_> = sectors.into_iter().map(|(at, bytes)| LogWrite::Sector(at, bytes)).collect();
            assert_eq!(found.writes, writes);
            // Any byte that is another one ends it.
            for at in [0, 9, 13, 17, 25, 33, 50, 60, bytes.len() - 1] {
                let mut torn = bytes.clone();
                torn[at] ^= 1;
                assert_eq!(replay(&log(&[((1 << 20) - 4096, torn)])), None, "byte {at} of {count} sectors");
            }
        }
    }

    #[test]
    fn the_newest_sequence_counts_from_its_tail_on() {
        let one = |number: u64, value: u8| (4096 * number, entry(0, number, &[(2 << 20, sector(value))]));
        let at = |index: usize| index * 8192;
        let entries = |numbers: &[(usize, u64, usize)]| -> Vec<(usize, Vec<u8>)> {
            numbers
                .iter()
                .map(|(index, number, tail)| (at(*index), with_tail(one(*number, *number as u8).1, at(*tail))))
                .collect()
        };
        let values = |log: Vec<u8>| -> Vec<u8> {
            let writes = replay(&log).map(|replay| replay.writes).unwrap_or_default();
            writes
                .iter()
                .map(|write| match write {
                    LogWrite::Sector(_, bytes) => bytes[0],
                    _ => 99,
                })
                .collect()
        };
        // All of one; its end; two sequences; one that was overwritten before its tail; a gap in the numbers.
        assert_eq!(values(log(&entries(&[(0, 1, 0), (1, 2, 0), (2, 3, 0)]))), [1, 2, 3]);
        assert_eq!(values(log(&entries(&[(0, 1, 0), (1, 2, 0), (2, 3, 1)]))), [2, 3]);
        assert_eq!(values(log(&entries(&[(0, 8, 0), (1, 9, 1), (3, 4, 3), (4, 5, 3)]))), [9]);
        assert_eq!(values(log(&entries(&[(1, 2, 0), (2, 3, 0)]))), []);
        assert_eq!(values(log(&entries(&[(0, 1, 0), (1, 3, 0)]))), [1]);
        // Round the end.
        let last = (1 << 20) / 8192 - 1;
        assert_eq!(values(log(&entries(&[(last, 6, last), (0, 7, last), (1, 8, last)]))), [6, 7, 8]);
        // Entries of another log.
        assert_eq!(replay_of(&log(&entries(&[(0, 1, 0)])), Guid::new(1, 2, 3, [4; 8]), LOG_AT).unwrap(), None);
        assert_eq!(replay(&[]), None);
    }

    #[test]
    fn no_entry_follows_the_one_with_the_largest_number() {
        let write = [(2 << 20, sector(1))];
        let last = with_tail(entry(0, u64::MAX, &write), 0);
        for number in [0, 1, 5] {
            let found = replay(&log(&[(0, last.clone()), (8192, with_tail(entry(0, number, &[]), 0))])).unwrap();
            assert_eq!(found.writes.len(), 1, "{number}");
        }
        let both =
            [(0, with_tail(entry(0, u64::MAX - 1, &write), 0)), (8192, with_tail(entry(0, u64::MAX, &write), 0))];
        assert_eq!(replay(&log(&both)).unwrap().writes.len(), 2);
    }

    #[test]
    fn what_an_entry_may_not_change_is_refused() {
        // The headers, an odd place, beyond all files.
        for offset in [0x1_0000, 0x2_f000, (2 << 20) + 512, u64::MAX - 4095] {
            assert_eq!(replay(&log(&[(0, entry(0, 1, &[(offset, sector(1))]))])), None, "{offset:#x}");
        }
        let error = replay_of(&log(&[(0, entry(0, 1, &[(LOG_AT, sector(1))]))]), GUID, LOG_AT).unwrap_err();
        assert!(error.to_string().contains("changes the log itself"), "{error}");
    }

    #[test]
    fn zeroes_are_understood() {
        let mut bytes = entry(0, 1, &[(2 << 20, sector(1))]);
        bytes.truncate(SECTOR);
        bytes[8..12].copy_from_slice(&(SECTOR as u32).to_le_bytes());
        bytes[64..68].copy_from_slice(ZERO_SIGNATURE);
        bytes[72..80].copy_from_slice(&(3u64 << 20).to_le_bytes());
        let found = replay(&log(&[(0, with_tail(bytes.clone(), 0))])).unwrap();
        assert_eq!(found.writes, [LogWrite::Zeroes(2 << 20, 3 << 20)]);
        bytes[72..80].copy_from_slice(&513u64.to_le_bytes());
        assert_eq!(replay(&log(&[(0, with_tail(bytes, 0))])), None);
    }
}
