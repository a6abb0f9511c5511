// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The parts of a disk that were written since a job looked: in memory, for jobs that copy a disk in use.
//!
//! A part counts as dirty once a write to it has ended, well or not. A job that clears a part *before* it reads it sees
//! every change: a write that was under way makes it dirty again.

use cowshed_types::{Error, Result};
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Largest granularity in bytes.
const MAX_GRANULARITY_BYTES: u64 = 2 << 30;

/// Dirty parts of one disk. Any thread may mark and clear.
#[derive(Debug)]
pub struct DirtyMap {
    granularity_bits: u32,
    bits: Mutex<Bits>,
}

#[derive(Debug, Default)]
struct Bits {
    /// 64 parts a word; as long as the furthest mark needs.
    words: Vec<u64>,
    count: u64,
}

impl Bits {
    fn change(&mut self, parts: Range<u64>, dirty: bool) {
        for part in parts {
            let (word, mask) = ((part / 64) as usize, 1u64 << (part % 64));
            if word >= self.words.len() {
                if !dirty {
                    return;
                }
                self.words.resize(word + 1, 0);
            }
            if (self.words[word] & mask != 0) != dirty {
                self.words[word] ^= mask;
                self.count = if dirty { self.count + 1 } else { self.count - 1 };
            }
        }
    }

    /// The first part from `from` on whose bit is `dirty`.
    fn find(&self, from: u64, dirty: bool) -> Option<u64> {
        let mut at = from;
        while let Some(word) = self.words.get((at / 64) as usize) {
            let word = if dirty { *word } else { !*word };
            let rest = word >> (at % 64);
            if rest != 0 {
                return Some(at + u64::from(rest.trailing_zeros()));
            }
            at = (at / 64 + 1) * 64;
        }
        // Bytes behind the words are clean.
        (!dirty).then_some(at.max(from))
    }
}

impl DirtyMap {
    /// Nothing dirty. `granularity_bytes` is the size of a part: a power of two from 512 to 2 GiB.
    pub fn new(granularity_bytes: u64) -> Result<DirtyMap> {
        if !granularity_bytes.is_power_of_two() || !(512..=MAX_GRANULARITY_BYTES).contains(&granularity_bytes) {
            let message = "the granularity must be a power of two from 512 bytes to 2 GiB";
            return Err(Error::invalid_argument(message).value(granularity_bytes));
        }
        Ok(DirtyMap { granularity_bits: granularity_bytes.trailing_zeros(), bits: Mutex::default() })
    }

    /// Size of a part in bytes.
    pub fn granularity_bytes(&self) -> u64 {
        1 << self.granularity_bits
    }

    fn bits(&self) -> MutexGuard<'_, Bits> {
        self.bits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The parts that a range of bytes touches.
    fn parts(&self, offset: u64, len: u64) -> Range<u64> {
        let first = offset >> self.granularity_bits;
        match len {
            0 => first..first,
            len => first..(offset.saturating_add(len - 1) >> self.granularity_bits) + 1,
        }
    }

    /// Makes every part dirty that the range in bytes touches.
    pub fn mark(&self, offset: u64, len: u64) {
        let parts = self.parts(offset, len);
        self.bits().change(parts, true);
    }

    /// Makes every part clean that the range in bytes touches.
    pub fn clear(&self, offset: u64, len: u64) {
        let parts = self.parts(offset, len);
        self.bits().change(parts, false);
    }

    /// The first dirty run at or behind `from`, at most `most_bytes` long: offset and length in bytes, in whole parts.
    pub fn next(&self, from: u64, most_bytes: u64) -> Option<Range<u64>> {
        self.next_parts(&self.bits(), from, most_bytes).map(|parts| self.bytes_of(parts))
    }

    /// As [`DirtyMap::next`], and the run is clean afterwards: read it after this call.
    pub fn take_next(&self, from: u64, most_bytes: u64) -> Option<Range<u64>> {
        let mut bits = self.bits();
        let parts = self.next_parts(&bits, from, most_bytes)?;
        bits.change(parts.clone(), false);
        Some(self.bytes_of(parts))
    }

    fn next_parts(&self, bits: &Bits, from: u64, most_bytes: u64) -> Option<Range<u64>> {
        let start = bits.find(from >> self.granularity_bits, true)?;
        let most = (most_bytes >> self.granularity_bits).max(1);
        Some(start..bits.find(start, false).unwrap_or(u64::MAX).min(start.saturating_add(most)))
    }

    fn bytes_of(&self, parts: Range<u64>) -> Range<u64> {
        parts.start << self.granularity_bits..parts.end << self.granularity_bits
    }

    /// True when a part that the range in bytes touches is dirty.
    pub fn is_dirty(&self, offset: u64, len: u64) -> bool {
        let parts = self.parts(offset, len);
        self.bits().find(parts.start, true).is_some_and(|found| found < parts.end)
    }

    /// Whether the part at `offset` is dirty, and up to where, at most `end` (bytes), the parts behind it are the same.
    pub fn run_at(&self, offset: u64, end: u64) -> (bool, u64) {
        let first = offset >> self.granularity_bits;
        let bits = self.bits();
        let found = bits.find(first, true);
        let is_dirty = found == Some(first);
        let stop = if is_dirty { bits.find(first, false) } else { found };
        let stop = stop.and_then(|part| part.checked_mul(self.granularity_bytes())).unwrap_or(u64::MAX);
        (is_dirty, stop.min(end))
    }

    /// Dirty bytes, in whole parts.
    pub fn dirty_bytes(&self) -> u64 {
        self.bits().count << self.granularity_bits
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn parts_are_marked_whole_and_taken_in_order() {
        let map = DirtyMap::new(4096).unwrap();
        map.mark(4095, 2);
        map.mark(1 << 20, 1);
        map.mark(5000, 0);
        assert_eq!(map.dirty_bytes(), 3 * 4096);
        assert!(map.is_dirty(0, 1) && map.is_dirty(8191, 1) && !map.is_dirty(8192, 4096));
        assert_eq!(map.take_next(0, 4096), Some(0..4096));
        assert_eq!(map.take_next(0, 1 << 30), Some(4096..8192));
        map.mark(0, 1);
        assert_eq!(map.take_next(1, 1), Some(0..4096));
        assert_eq!(map.take_next(0, 1), Some(1 << 20..(1 << 20) + 4096));
        assert_eq!((map.take_next(0, 1), map.dirty_bytes()), (None, 0));
        assert_eq!(map.run_at(100, 1 << 40), (false, 1 << 40));
        map.mark(8192, 8192);
        assert_eq!((map.run_at(100, 1 << 40), map.run_at(8192, 1 << 40)), ((false, 8192), (true, 16384)));
        assert_eq!((map.run_at(9000, 10_000), map.run_at(16384, u64::MAX)), ((true, 10_000), (false, u64::MAX)));
        for wrong in [0, 100, 256, 4 << 30] {
            assert!(DirtyMap::new(wrong).is_err(), "{wrong}");
        }
    }

    proptest! {
        #[test]
        fn agrees_with_a_set_of_parts(
            steps in proptest::collection::vec((0..4u8, 0..200_000u64, 0..30_000u64), 1..100),
        ) {
            let map = DirtyMap::new(512).unwrap();
            let mut model = std::collections::BTreeSet::new();
            for (what, offset, len) in steps {
                let parts = if len == 0 { 0..0 } else { offset / 512..(offset + len - 1) / 512 + 1 };
                match what {
                    0 | 1 => {
                        map.mark(offset, len);
                        model.extend(parts);
                    }
                    2 => {
                        map.clear(offset, len);
                        model.retain(|part| !parts.contains(part));
                    }
                    _ => {
                        let taken = map.take_next(offset, len);
                        let first = model.range(offset / 512..).next().copied();
                        prop_assert_eq!(taken.as_ref().map(|range| range.start / 512), first);
                        if let Some(range) = taken {
                            let parts = range.start / 512..range.end / 512;
                            prop_assert!(parts.clone().all(|part| model.remove(&part)));
                            let full = parts.end - parts.start == (len / 512).max(1);
                            prop_assert!(full || !model.contains(&parts.end));
                        }
                    }
                }
                prop_assert_eq!(map.dirty_bytes(), model.len() as u64 * 512);
                prop_assert_eq!(map.is_dirty(offset, len.max(1)), model.range(offset / 512..(offset + len.max(1) - 1) / 512 + 1).next().is_some());
            }
        }
    }
}
