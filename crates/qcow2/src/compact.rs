// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Slices of L2 tables in less memory: runs of neighbouring clusters, or numbers of just as many bits as they need.
//!
//! Both give back every word as it was. A compact slice never changes: the holder of the lock makes an array of it before an edit.

use cowshed_types::without;

/// The layout of a slice's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SliceLayout {
    /// Words of an entry: 1, or 2 with extended L2 entries.
    pub(crate) entry_words: usize,
    pub(crate) cluster_bits: u32,
}

/// Entries that repeat, or of which each is one cluster further than the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EntryRun {
    /// Index of the first entry.
    first: u32,
    /// log2 of the difference of an entry to the one before, or [`CONSTANT`].
    stride_bits: u32,
    entry: u64,
    bitmap: u64,
}

const CONSTANT: u32 = u32::MAX;

impl EntryRun {
    #[inline]
    fn entry_at(&self, index: u32) -> u64 {
        match self.stride_bits {
            CONSTANT => self.entry,
            bits => self.entry.wrapping_add(u64::from(index - self.first) << bits),
        }
    }
}

/// Clusters in any order: offsets from the lowest one, in this many bits each. 0 stands for an entry that is 0.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Packed {
    /// The entry that 1 stands for.
    base: u64,
    /// The bitmap of all entries that aren't 0.
    bitmap: u64,
    cluster_bits: u32,
    /// Width of an offset in bits, at most 32.
    width: u32,
    bits: Box<[u64]>,
}

/// See the module's text.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Compact {
    Runs(Box<[EntryRun]>),
    Packed(Packed),
}

impl Compact {
    /// A compact form that takes at most three quarters of the array, if there is one.
    pub(crate) fn of(words: &[u64], shape: SliceLayout) -> Option<Compact> {
        if without!("compact_slices") {
            return None;
        }
        let most_bytes = size_of_val(words) / 4 * 3;
        // A few runs are the fastest to look up; many are worth it only where packing doesn't do as well.
        let runs = runs(words, shape, most_bytes / size_of::<EntryRun>());
        let packed = match &runs {
            Some(runs) if size_of_val(runs.as_slice()) <= most_bytes / 8 => None,
            _ => packed(words, shape, most_bytes),
        };
        match (runs, packed) {
            (Some(runs), Some(packed)) if packed.heap_bytes() < size_of_val(runs.as_slice()) => {
                Some(Compact::Packed(packed))
            }
            (Some(runs), _) => Some(Compact::Runs(runs.into_boxed_slice())),
            (None, Some(packed)) => Some(Compact::Packed(packed)),
            (None, None) => None,
        }
    }

    /// The word at `index` of the array.
    #[inline]
    pub(crate) fn word(&self, index: usize, shape: SliceLayout) -> u64 {
        let (at, is_entry) = match shape.entry_words {
            1 => (index as u32, true),
            _ => ((index / 2) as u32, index.is_multiple_of(2)),
        };
        match self {
            Compact::Runs(runs) => {
                let run = match &**runs {
                    [run] => run,
                    runs => &runs[runs.partition_point(|run| run.first <= at) - 1],
                };
                if is_entry { run.entry_at(at) } else { run.bitmap }
            }
            Compact::Packed(packed) => {
                let number = packed.number(at);
                match (number, is_entry) {
                    (0, _) => 0,
                    (number, true) => packed.base.wrapping_add((number - 1) << packed.cluster_bits),
                    (_, false) => packed.bitmap,
                }
            }
        }
    }

    /// Memory beside the value itself, in bytes.
    pub(crate) fn heap_bytes(&self) -> usize {
        match self {
            Compact::Runs(runs) => size_of_val::<[EntryRun]>(runs),
            Compact::Packed(packed) => packed.heap_bytes(),
        }
    }
}

/// The runs of a slice, unless there are more than `most`.
fn runs(words: &[u64], shape: SliceLayout, most: usize) -> Option<Vec<EntryRun>> {
    let mut runs: Vec<EntryRun> = Vec::new();
    for (index, entry) in words.chunks_exact(shape.entry_words).enumerate() {
        let index = index as u32;
        let (entry, bitmap) = (entry[0], entry.get(1).copied().unwrap_or(0));
        if let Some(run) = runs.last_mut()
            && run.bitmap == bitmap
        {
            if index == run.first + 1 {
                // The second entry decides the kind of the run.
                run.stride_bits = if entry == run.entry { CONSTANT } else { shape.cluster_bits };
            }
            if run.entry_at(index) == entry {
                continue;
            }
        }
        if runs.len() == most {
            return None;
        }
        runs.push(EntryRun { first: index, stride_bits: CONSTANT, entry, bitmap });
    }
    Some(runs)
}

impl Packed {
    fn heap_bytes(&self) -> usize {
        size_of_val::<[u64]>(&self.bits)
    }

    #[inline]
    fn number(&self, index: u32) -> u64 {
        let at = u64::from(index) * u64::from(self.width);
        let (word, shift) = ((at / 64) as usize, at % 64);
        // There is always one word more.
        let both = u128::from(self.bits[word]) | u128::from(self.bits[word + 1]) << 64;
        (both >> shift) as u64 & ((1 << self.width) - 1)
    }
}

/// Bits 9 to 55: where a host offset is.
const HOST: u64 = 0x00ff_ffff_ffff_fe00;

fn packed(words: &[u64], shape: SliceLayout, most_bytes: usize) -> Option<Packed> {
    let pairs = || {
        let entries = words.chunks_exact(shape.entry_words);
        entries.map(|entry| (entry[0], entry.get(1).copied().unwrap_or(0)))
    };
    let (first, bitmap) = pairs().find(|pair| *pair != (0, 0))?;
    let (mut low, mut high) = (first & HOST, first & HOST);
    for (entry, its_bitmap) in pairs().filter(|pair| *pair != (0, 0)) {
        let is_like = entry & !HOST == first & !HOST && its_bitmap == bitmap;
        if !is_like || entry & HOST & ((1 << shape.cluster_bits) - 1) != 0 {
            return None;
        }
        (low, high) = (low.min(entry & HOST), high.max(entry & HOST));
    }
    let largest = ((high - low) >> shape.cluster_bits) + 1;
    let width = u64::BITS - largest.leading_zeros();
    let entries = words.len() / shape.entry_words;
    let len = (entries * width as usize).div_ceil(64) + 1;
    if width > 32 || len * 8 > most_bytes {
        return None;
    }
    let mut bits = vec![0u64; len];
    for (index, (entry, its_bitmap)) in pairs().enumerate() {
        let number = match (entry, its_bitmap) {
            (0, 0) => 0,
            _ => (((entry & HOST) - low) >> shape.cluster_bits) + 1,
        };
        let at = index * width as usize;
        let placed = u128::from(number) << (at % 64);
        bits[at / 64] |= placed as u64;
        bits[at / 64 + 1] |= (placed >> 64) as u64;
    }
    let base = first & !HOST | low;
    Some(Packed { base, bitmap, cluster_bits: shape.cluster_bits, width, bits: bits.into_boxed_slice() })
}

#[cfg(test)]
mod tests {
    use super::*;

    const COPIED: u64 = 1 << 63;
    const STANDARD: SliceLayout = SliceLayout { entry_words: 1, cluster_bits: 16 };
    const EXTENDED: SliceLayout = SliceLayout { entry_words: 2, cluster_bits: 16 };

    #[track_caller]
    fn round_trip(words: &[u64], shape: SliceLayout) -> Option<usize> {
        let compact = Compact::of(words, shape)?;
        for (index, word) in words.iter().enumerate() {
            assert_eq!(compact.word(index, shape), *word, "word {index} of {compact:?}");
        }
        assert!(compact.heap_bytes() <= words.len() * 6, "{} bytes", compact.heap_bytes());
        Some(compact.heap_bytes())
    }

    fn random(seed: u64) -> impl FnMut() -> u64 {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        }
    }

    #[test]
    fn neighbours_are_one_run() {
        let words: Vec<u64> = (0..512).map(|index| COPIED | (5 + index) << 16).collect();
        assert_eq!(round_trip(&words, STANDARD), Some(size_of::<EntryRun>()));
        let words = vec![0; 512];
        assert_eq!(round_trip(&words, STANDARD), Some(size_of::<EntryRun>()));
        // Zero clusters, a hole, data, all of one kind.
        let words: Vec<u64> = (0..512).map(|index| [1, 0, COPIED | (index + 9) << 16][index as usize / 200]).collect();
        assert_eq!(round_trip(&words, STANDARD), Some(3 * size_of::<EntryRun>()));
    }

    #[test]
    fn extended_entries_are_runs_too() {
        let words: Vec<u64> =
            (0..256).flat_map(|index| [COPIED | (5 + index) << 16, if index < 99 { 0xffff_ffff } else { 3 }]).collect();
        assert_eq!(round_trip(&words, EXTENDED), Some(2 * size_of::<EntryRun>()));
    }

    #[test]
    fn clusters_in_any_order_take_the_bits_that_they_need() {
        let mut next = random(1);
        // A disk of 20 GiB, filled at random: 19 bits each.
        let words: Vec<u64> = (0..512).map(|_| COPIED | (next() % 327_680 + 6) << 16).collect();
        let bytes = round_trip(&words, STANDARD).unwrap();
        assert!(bytes <= 512 * 19 / 8 + 16, "{bytes}");
        let words: Vec<u64> = words.iter().enumerate().map(|(at, word)| if at % 3 == 0 { 0 } else { *word }).collect();
        assert!(round_trip(&words, STANDARD).unwrap() <= 512 * 19 / 8 + 16);
        let extended: Vec<u64> = words.iter().flat_map(|word| [*word, if *word == 0 { 0 } else { 0xff }]).collect();
        assert!(round_trip(&extended, EXTENDED).unwrap() <= 512 * 19 / 8 + 16);
    }

    #[test]
    fn what_does_not_pay_stays_an_array() {
        let mut next = random(2);
        let compressed: Vec<u64> = (0..512).map(|_| 1 << 62 | next() >> 8).collect();
        assert_eq!(round_trip(&compressed, STANDARD), None);
        let mixed: Vec<u64> = (0..512).map(|_| (next() & COPIED) | (next() % 1000 + 1) << 16).collect();
        assert_eq!(round_trip(&mixed, STANDARD), None);
        let far: Vec<u64> = (0..512).map(|_| COPIED | (next() & HOST) >> 16 << 16).collect();
        assert_eq!(round_trip(&far, STANDARD), None);
        // Reserved bits are kept like all others.
        let odd: Vec<u64> = (0..512).map(|index| COPIED | (5 + index) << 16 | 2).collect();
        assert_eq!(round_trip(&odd, STANDARD), Some(size_of::<EntryRun>()));
    }

    #[test]
    fn any_words_come_back() {
        for seed in 0..if cfg!(miri) { 20 } else { 2000 } {
            let mut next = random(seed);
            let shape = if next().is_multiple_of(2) { STANDARD } else { EXTENDED };
            let spread = 1 << (next() % 30);
            let (mut words, mut last) = (Vec::new(), 1u64);
            while words.len() < 64 {
                last = match next() % 8 {
                    0 => next() % spread,
                    1 => last,
                    _ => last + 1,
                };
                let entry = match next() % 16 {
                    0 => 0,
                    1 if seed % 3 == 0 => next(),
                    _ => COPIED | last << 16,
                };
                words.push(entry);
                if shape == EXTENDED {
                    words.push(if seed % 5 == 0 {
                        next() % 4
                    } else if entry == 0 {
                        0
                    } else {
                        0xffff
                    });
                }
            }
            round_trip(&words, shape);
        }
    }
}
