// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The grains of a file that entries name, as bits. A disk may have many millions of them in any order, so the check of a disk
//! keeps no range for each.

use cowshed_layout::vmdk::SECTOR_BYTES;
use cowshed_types::memory::grow_map;
use cowshed_types::{Error, ErrorKind, Result};
use std::collections::HashMap;

/// Memory for the bits: those of 4 TiB in grains of 4 KiB, and of 64 TiB in the usual ones.
const MAX_BYTES: usize = 128 << 20;
const PAGE_WORDS: u64 = 32;
const PAGE_BYTES: usize = PAGE_WORDS as usize * 8;
/// A line of the map of pages, with what the allocator adds.
const LINE_BYTES: usize = 32;

/// Bits of units of one length.
pub(super) struct Claims {
    unit_bytes: u64,
    /// Bytes in front of the first unit.
    head_bytes: u64,
    /// `None`: all units of the page are claimed.
    pages: HashMap<u64, Option<Box<[u64; PAGE_WORDS as usize]>>>,
    bytes: usize,
    max_bytes: usize,
}

impl Claims {
    /// Units of `unit_bytes`, of which one begins at `first`.
    pub(super) fn new(unit_bytes: u64, first: u64) -> Self {
        Claims { unit_bytes, head_bytes: first % unit_bytes, pages: HashMap::new(), bytes: 0, max_bytes: MAX_BYTES }
    }

    /// One bit for each sector.
    pub(super) fn of_sectors() -> Self {
        Claims::new(SECTOR_BYTES, 0)
    }

    /// True where a unit begins at a byte of the file.
    pub(super) fn has_unit_at(&self, offset: u64) -> bool {
        offset % self.unit_bytes == self.head_bytes
    }

    /// Claims whole units from `from` to `to`. The first byte of those that are claimed already, if there are any.
    ///
    /// # Errors
    /// The kind `Limit` where the bits need too much memory, and `ENOMEM`.
    pub(super) fn claim(&mut self, from: u64, to: u64) -> Result<Option<u64>> {
        let mut taken = None;
        let number = |offset: u64| offset.saturating_sub(self.head_bytes) / self.unit_bytes;
        let (mut unit, end) = (number(from), number(to));
        while unit < end {
            let bit = unit % 64;
            let count = (64 - bit).min(end - unit);
            let mask = (u64::MAX >> (64 - count)) << bit;
            let before = self.set(unit / 64, mask)? & mask;
            if before != 0 && taken.is_none() {
                let first = unit - bit + u64::from(before.trailing_zeros());
                taken = Some(first * self.unit_bytes + self.head_bytes);
            }
            unit += count;
        }
        Ok(taken)
    }

    /// Sets bits of a word. Its value before.
    fn set(&mut self, word: u64, mask: u64) -> Result<u64> {
        let number = word / PAGE_WORDS;
        if !self.pages.contains_key(&number) {
            if self.bytes + PAGE_BYTES + LINE_BYTES > self.max_bytes {
                let message = "the grains lie so far apart in the file that they are not checked";
                return Err(Error::new(ErrorKind::Limit, message));
            }
            grow_map(&mut self.pages)?;
            self.bytes += PAGE_BYTES + LINE_BYTES;
        }
        let page = self.pages.entry(number).or_insert_with(|| Some(Box::default()));
        let Some(words) = page else { return Ok(u64::MAX) };
        let slot = &mut words[(word % PAGE_WORDS) as usize];
        let before = *slot;
        *slot |= mask;
        if *slot == u64::MAX && words.iter().all(|word| *word == u64::MAX) {
            *page = None;
            self.bytes -= PAGE_BYTES;
        }
        Ok(before)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_unit_is_claimed_once() {
        let mut claims = Claims::new(4096, 4096 * 3 + 512);
        assert!(claims.has_unit_at(512) && !claims.has_unit_at(0) && !claims.has_unit_at(4096));
        let at = |unit: u64| 512 + unit * 4096;
        assert_eq!(claims.claim(at(60), at(200)).unwrap(), None);
        assert_eq!(claims.claim(at(200), at(201)).unwrap(), None);
        assert_eq!(claims.claim(at(0), at(60)).unwrap(), None);
        assert_eq!(claims.claim(at(199), at(300)).unwrap(), Some(at(199)));
        assert_eq!(claims.claim(at(300), at(301)).unwrap(), None);
        assert_eq!(claims.claim(at(290), at(400)).unwrap(), Some(at(290)));
        assert_eq!(claims.claim(at(5000), at(5001)).unwrap(), None);
        assert_eq!(claims.claim(at(4000), at(6000)).unwrap(), Some(at(5000)));
    }

    #[test]
    fn units_in_any_order_become_whole_pages() {
        let mut claims = Claims::new(4096, 0);
        let units = PAGE_WORDS * 64 * 512;
        // Every unit once: the step has no factor in common with their number.
        for step in 0..units {
            let at = step * 7919 % units * 4096;
            assert_eq!(claims.claim(at, at + 4096).unwrap(), None);
        }
        assert_eq!(claims.bytes, 512 * LINE_BYTES);
        assert_eq!(claims.claim(0, 4096).unwrap(), Some(0));
    }

    #[test]
    fn units_far_apart_are_bounded() {
        let mut claims = Claims { max_bytes: 1 << 20, ..Claims::of_sectors() };
        let error = (0..1u64 << 20).find_map(|index| claims.claim(index << 32, (index << 32) + 512).err());
        assert_eq!(error.unwrap().kind(), ErrorKind::Limit);
        assert!(claims.bytes <= 1 << 20);
    }
}
