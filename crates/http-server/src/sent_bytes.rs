// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The bytes of a content that a client has.

use std::collections::BTreeMap;
use std::ops::Range;

/// Pieces that lie apart. A client that reads more of them reads at random: it downloads nothing whole.
const MOST_PIECES: usize = 1 << 16;

/// Ranges that lie apart, with a bound on their number.
#[derive(Debug, Default)]
pub struct SentBytes {
    /// The end of each range by its start.
    ends: BTreeMap<u64, u64>,
    bytes: u64,
}

impl SentBytes {
    /// Adds a range, and returns the number of bytes in all ranges. Of a client that has too many pieces only those are noted that
    /// touch one of them.
    pub fn add(&mut self, range: Range<u64>) -> u64 {
        let Range { mut start, mut end } = range;
        let mut touches = false;
        // The ranges that touch it end at its start or behind, and start at its end or before.
        while let Some((&last_start, &last_end)) = self.ends.range(..=end).next_back()
            && last_end >= start
        {
            self.ends.remove(&last_start);
            self.bytes -= last_end - last_start;
            (start, end) = (start.min(last_start), end.max(last_end));
            touches = true;
        }
        if start < end && (touches || self.ends.len() < MOST_PIECES) {
            self.ends.insert(start, end);
            self.bytes += end - start;
        }
        self.bytes
    }

    /// The ranges, in their order.
    pub fn ranges(&self) -> impl Iterator<Item = Range<u64>> {
        self.ends.iter().map(|(&start, &end)| start..end)
    }

    /// The part before `end` of the range that reaches up to there or farther.
    pub fn up_to(&self, end: u64) -> Option<Range<u64>> {
        let (&start, &last) = self.ends.range(..end).next_back()?;
        (last >= end).then_some(start..end)
    }

    /// True where all bytes of a content of `len` bytes are there.
    pub fn is_all(&self, len: u64) -> bool {
        self.ends.first_key_value() == Some((&0, &len))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_that_touch_become_one() {
        let mut ranges = SentBytes::default();
        assert_eq!(ranges.add(0..10), 10);
        assert_eq!(ranges.add(20..30), 20);
        assert_eq!(ranges.add(5..6), 20);
        assert_eq!(ranges.add(40..50), 30);
        assert!(!ranges.is_all(50));
        assert_eq!(ranges.add(10..20), 40);
        assert_eq!(ranges.ends.len(), 2);
        assert_eq!(ranges.add(25..45), 50);
        assert!(ranges.is_all(50) && !ranges.is_all(51));
        ranges.add(60..70);
        assert_eq!(
            [0, 50, 55, 60, 61, 70].map(|end| ranges.up_to(end)),
            [None, Some(0..50), None, None, Some(60..61), Some(60..70)]
        );
    }

    #[test]
    fn ranges_agree_with_a_set_of_bytes() {
        let mut ranges = SentBytes::default();
        let mut model = [false; 256];
        let mut state = 1_u64;
        for _ in 0..2000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let (start, len) = ((state >> 33) % 256, (state >> 45) % 9);
            let end = (start + len).min(256);
            model[start as usize..end as usize].fill(true);
            let bytes = model.iter().filter(|there| **there).count() as u64;
            assert_eq!(ranges.add(start..end), bytes);
            if bytes == 256 {
                assert!(ranges.is_all(256));
                (ranges, model) = (SentBytes::default(), [false; 256]);
            }
        }
    }

    #[test]
    fn many_pieces_are_bounded() {
        let mut ranges = SentBytes::default();
        let mut bytes = 0;
        for at in 0..2 * MOST_PIECES as u64 {
            bytes = ranges.add(3 * at..3 * at + 1);
        }
        assert_eq!((bytes, ranges.ends.len()), (MOST_PIECES as u64, MOST_PIECES));
        // A piece that touches one is noted still.
        assert_eq!(ranges.add(1..2), MOST_PIECES as u64 + 1);
    }
}
