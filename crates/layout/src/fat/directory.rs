// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Entries of folders.

use super::names::Name;
use super::{ENTRY_BYTES, LABEL_BYTES};

const DIRECTORY: u8 = 0x10;
const ARCHIVE: u8 = 0x20;
const VOLUME: u8 = 0x08;
const LONG_NAME: u8 = 0x0f;
/// Units of UTF-16 in an entry of a long name, and their places.
const UNITS: usize = 13;
const UNIT_PLACES: [usize; UNITS] = [1, 3, 5, 7, 9, 14, 16, 18, 20, 22, 24, 28, 30];
const LAST_PART: u8 = 0x40;

/// A time as folders have it: the date, and the time of the day in steps of two seconds, UTC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    date: u16,
    time: u16,
}

impl Times {
    /// From seconds since 1970, UTC. Times before 1980 and after 2107 become the first and the last that there is.
    pub fn of(seconds: i64) -> Times {
        // 1980-01-01 and 2108-01-01.
        let seconds = seconds.clamp(315_532_800, 4_354_819_199);
        let (days, rest) = (seconds / 86_400, seconds % 86_400);
        // Years that begin in March: the day of a leap year is the last one.
        let days = days + 719_468;
        let (era, day) = (days / 146_097, days % 146_097);
        let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
        let day = day - (365 * year + year / 4 - year / 100);
        let month = (5 * day + 2) / 153;
        let day = day - (153 * month + 2) / 5 + 1;
        let month = if month < 10 { month + 3 } else { month - 9 };
        let year = year + era * 400 + i64::from(month <= 2);
        Times {
            date: (((year - 1980) << 9) | (month << 5) | day) as u16,
            time: (((rest / 3600) << 11) | ((rest / 60 % 60) << 5) | (rest % 60 / 2)) as u16,
        }
    }
}

/// The fields of a folder's entry for a file or a folder.
#[derive(Clone, Copy, Debug)]
pub struct DirectoryEntry {
    /// It is a folder.
    pub is_directory: bool,
    /// Its first cluster; 0 where it has none.
    pub cluster: u32,
    /// Length in bytes; 0 of a folder.
    pub len: u32,
    /// When it was written to last.
    pub times: Times,
}

impl DirectoryEntry {
    /// Length of the entries of a name in bytes.
    pub fn bytes_of(name: &Name) -> u64 {
        (1 + name.long.as_ref().map_or(0, |long| long.len().div_ceil(UNITS)) as u64) * ENTRY_BYTES
    }

    /// The label of the volume, as the first entry of the root folder.
    pub fn label(label: [u8; LABEL_BYTES], out: &mut Vec<u8>) {
        short(&label, VOLUME, &DirectoryEntry { is_directory: false, cluster: 0, len: 0, times: Times::of(0) }, out);
    }

    /// The entries of a folder for itself and for the folder that it is in, whose cluster is 0 for the root.
    pub fn own(cluster: u32, parent: u32, times: Times, out: &mut Vec<u8>) {
        for (name, cluster) in [(b".          ", cluster), (b"..         ", parent)] {
            short(name, DIRECTORY, &DirectoryEntry { is_directory: true, cluster, len: 0, times }, out);
        }
    }

    /// Length of the entries that [`DirectoryEntry::own`] makes, in bytes.
    pub const OWN_BYTES: u64 = 2 * ENTRY_BYTES;
    /// Length of the entry that [`DirectoryEntry::label`] makes, in bytes.
    pub const LABEL_BYTES: u64 = ENTRY_BYTES;

    /// Appends the entries: the parts of the long name, the last one first, and the short name.
    pub fn put(&self, name: &Name, out: &mut Vec<u8>) {
        let long = name.long.as_deref().unwrap_or_default();
        let sum = name.short.iter().fold(0_u8, |sum, byte| sum.rotate_right(1).wrapping_add(*byte));
        let parts = long.chunks(UNITS).enumerate();
        let last = parts.len();
        for (index, part) in parts.rev() {
            let mut entry = [0xff; ENTRY_BYTES as usize];
            let mark = if index + 1 == last { LAST_PART } else { 0 };
            entry[0] = (index + 1) as u8 | mark;
            entry[11..14].copy_from_slice(&[LONG_NAME, 0, sum]);
            entry[26..28].fill(0);
            // A name that ends within an entry has a zero behind it.
            for (unit, place) in part.iter().chain([&0]).zip(UNIT_PLACES) {
                entry[place..place + 2].copy_from_slice(&unit.to_le_bytes());
            }
            out.extend_from_slice(&entry);
        }
        short(&name.short, if self.is_directory { DIRECTORY } else { ARCHIVE }, self, out);
    }
}

fn short(name: &[u8; LABEL_BYTES], attributes: u8, entry: &DirectoryEntry, out: &mut Vec<u8>) {
    let mut bytes = [0; ENTRY_BYTES as usize];
    let mut put = |at: usize, part: &[u8]| bytes[at..at + part.len()].copy_from_slice(part);
    put(0, name);
    put(11, &[attributes]);
    let Times { date, time } = entry.times;
    put(14, &time.to_le_bytes());
    put(16, &date.to_le_bytes());
    put(18, &date.to_le_bytes());
    put(20, &((entry.cluster >> 16) as u16).to_le_bytes());
    put(22, &time.to_le_bytes());
    put(24, &date.to_le_bytes());
    put(26, &(entry.cluster as u16).to_le_bytes());
    put(28, &entry.len.to_le_bytes());
    out.extend_from_slice(&bytes);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_the_calendar() {
        for (seconds, year, month, day, hour, minute, second) in [
            (0, 1980, 1, 1, 0, 0, 0),
            (951_782_400 + 86_399, 2000, 2, 29, 23, 59, 58),
            (951_868_800, 2000, 3, 1, 0, 0, 0),
            (1_798_761_599, 2026, 12, 31, 23, 59, 58),
            (i64::MAX, 2107, 12, 31, 23, 59, 58),
        ] {
            let Times { date, time } = Times::of(seconds);
            let found = (1980 + (date >> 9), date >> 5 & 15, date & 31, time >> 11, time >> 5 & 63, (time & 31) * 2);
            assert_eq!(found, (year, month, day, hour, minute, second), "{seconds}");
        }
    }
}
