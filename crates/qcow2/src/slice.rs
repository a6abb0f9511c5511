// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Slices of L2 tables in memory. They are readable without the lock while its holder edits them.
//!
//! A slice is an array of 64-bit words under a version counter (a seqlock made of atomics). The holder of the lock makes the
//! version odd, edits, and makes it even again. A reader that saw the version change reads again. A regular slice is kept
//! in a compact form instead, which is never edited. The holder of the lock puts an array in its place first.

use crate::compact::{Compact, SliceLayout};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

/// A part of an L2 table.
#[derive(Debug)]
pub(crate) struct Slice {
    version: AtomicU64,
    /// Set by readers, cleared by the clock hand of eviction.
    pub(crate) referenced: AtomicBool,
    /// An array that has no compact form as it is now.
    is_irregular: AtomicBool,
    shape: SliceLayout,
    /// Number of words.
    len: usize,
    form: Form,
}

#[derive(Debug)]
enum Form {
    Words(Box<[AtomicU64]>),
    Compact(Compact),
}

/// Overhead of a compact slice in a cache, in bytes, beside its entries.
const COMPACT_BYTES: usize = 64;

impl Slice {
    fn new(shape: SliceLayout, len: usize, form: Form) -> Slice {
        let (version, referenced) = (AtomicU64::new(0), AtomicBool::new(true));
        Slice { version, referenced, is_irregular: AtomicBool::new(false), shape, len, form }
    }

    fn array(shape: SliceLayout, words: impl Iterator<Item = u64>) -> Slice {
        let words: Box<[AtomicU64]> = words.map(AtomicU64::new).collect();
        Slice::new(shape, words.len(), Form::Words(words))
    }

    /// From the big-endian bytes of a table, compact where that saves memory.
    pub(crate) fn from_bytes(bytes: &[u8], shape: SliceLayout) -> Self {
        let words: Vec<u64> =
            bytes.chunks_exact(8).map(|word| u64::from_be_bytes(word.try_into().unwrap_or_default())).collect();
        match Compact::of(&words, shape) {
            Some(compact) => Slice::new(shape, words.len(), Form::Compact(compact)),
            None => {
                let slice = Slice::array(shape, words.into_iter());
                slice.is_irregular.store(true, Ordering::Relaxed);
                slice
            }
        }
    }

    /// All entries zero.
    pub(crate) fn zeroed(words: usize, shape: SliceLayout) -> Self {
        Slice::array(shape, std::iter::repeat_n(0, words))
    }

    /// The same slice as an array, if it is compact: the holder of the lock needs that before it edits.
    pub(crate) fn expanded(&self) -> Option<Slice> {
        match &self.form {
            Form::Words(_) => None,
            Form::Compact(_) => Some(Slice::array(self.shape, self.words())),
        }
    }

    /// The same slice in less memory, if it is an array and there is such a form. Only the holder of the lock calls this.
    pub(crate) fn squeezed(&self) -> Option<Slice> {
        if matches!(self.form, Form::Compact(_)) || self.is_irregular.load(Ordering::Relaxed) {
            return None;
        }
        let words: Vec<u64> = self.words().collect();
        let Some(compact) = Compact::of(&words, self.shape) else {
            self.is_irregular.store(true, Ordering::Relaxed);
            return None;
        };
        let slice = Slice::new(self.shape, self.len, Form::Compact(compact));
        slice.referenced.store(false, Ordering::Relaxed);
        Some(slice)
    }

    fn words(&self) -> impl Iterator<Item = u64> {
        (0..self.len).map(|index| self.word(index))
    }

    /// Big-endian bytes, as on disk. Only the holder of the lock calls this, so no edit is under way.
    pub(crate) fn to_bytes(&self, out: &mut Vec<u8>) {
        out.extend(self.words().flat_map(u64::to_be_bytes));
    }

    /// Its size in a cache of limited size, in bytes. An array counts as much as on disk.
    pub(crate) fn counted_bytes(&self) -> usize {
        match &self.form {
            Form::Words(words) => words.len() * 8,
            Form::Compact(compact) => compact.heap_bytes() + COMPACT_BYTES,
        }
    }

    /// Memory that a slice takes beside [`Slice::counted_bytes`], about, in bytes.
    pub(crate) const OVERHEAD_BYTES: usize = size_of::<Slice>() + 64;

    /// One word. Outside [`Slice::read`] only for the holder of the lock.
    #[inline]
    pub(crate) fn word(&self, index: usize) -> u64 {
        match &self.form {
            Form::Words(words) => words[index].load(Ordering::Relaxed),
            Form::Compact(compact) => compact.word(index, self.shape),
        }
    }

    /// Runs `look` until no edit came between; `look` must be free of side effects that a second run would not undo.
    #[inline]
    pub(crate) fn read<T>(&self, mut look: impl FnMut(&Slice) -> T) -> T {
        loop {
            let before = self.version.load(Ordering::Acquire);
            if before & 1 == 0 {
                let seen = look(self);
                fence(Ordering::Acquire);
                if self.version.load(Ordering::Relaxed) == before {
                    return seen;
                }
            }
            std::hint::spin_loop();
        }
    }

    /// Edits words of an array as one change for readers. Only the holder of the lock calls this.
    pub(crate) fn edit(&self, edits: impl IntoIterator<Item = (usize, u64)>) {
        let Form::Words(words) = &self.form else { unreachable!("a compact slice is made an array before an edit") };
        let version = self.version.load(Ordering::Relaxed);
        self.version.store(version.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        for (index, word) in edits {
            words[index].store(word, Ordering::Relaxed);
        }
        self.version.store(version.wrapping_add(2), Ordering::Release);
        self.is_irregular.store(false, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: SliceLayout = SliceLayout { entry_words: 1, cluster_bits: 16 };

    /// Miri takes a thousand times as long.
    const EDITS: u64 = if cfg!(miri) { 100 } else { 100_000 };

    #[test]
    fn readers_never_see_half_an_edit() {
        let slice = Slice::zeroed(2, SHAPE);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for value in 1..=EDITS {
                    slice.edit([(0, value), (1, value)]);
                }
            });
            let mut last = 0;
            while last < EDITS {
                let (a, b) = slice.read(|slice| (slice.word(0), slice.word(1)));
                assert_eq!(a, b);
                assert!(a >= last);
                last = a;
            }
        });
    }

    #[test]
    fn bytes_round_trip() {
        let irregular: Vec<u8> = (0..64).collect();
        let regular: Vec<u8> = (0..64).flat_map(|n: u64| (1 << 63 | (n + 7) << 16).to_be_bytes()).collect();
        for (bytes, is_regular) in [(irregular, false), (regular, true)] {
            let slice = Slice::from_bytes(&bytes, SHAPE);
            let mut out = Vec::new();
            slice.to_bytes(&mut out);
            assert_eq!(out, bytes);
            assert_eq!(slice.expanded().is_some(), is_regular);
            let array = slice.expanded().unwrap_or(slice);
            array.edit([(1, 5)]);
            out.clear();
            array.to_bytes(&mut out);
            assert_eq!(out[..8], bytes[..8]);
            assert_eq!(out[8..16], 5u64.to_be_bytes());
            assert_eq!(out[16..], bytes[16..]);
        }
    }

    #[test]
    fn an_array_that_became_regular_is_squeezed() {
        let slice = Slice::zeroed(64, SHAPE);
        slice.edit((0..64).map(|index| (index, if index % 2 == 0 { (1 << 62) | (index as u64 * 77) } else { 0 })));
        assert!(slice.squeezed().is_none());
        slice.edit((0..64).map(|index| (index, 1 << 63 | (index as u64 + 3) << 16)));
        let squeezed = slice.squeezed().expect("one run");
        assert!(squeezed.counted_bytes() < 200 && slice.counted_bytes() == 512);
        assert!((0..64).all(|index| squeezed.word(index) == slice.word(index)));
    }
}
