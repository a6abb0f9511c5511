// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Slices of L2 tables in memory, readable without a lock while the owner edits them.
//!
//! A slice is an array of 64-bit words under a version counter (a seqlock made of atomics): the owner makes the
//! version odd, edits, and makes it even again; a reader that saw the version change reads again.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

/// A part of an L2 table.
#[derive(Debug)]
pub(crate) struct Slice {
    version: AtomicU64,
    /// Set by readers, cleared by the clock hand of eviction.
    pub(crate) referenced: AtomicBool,
    words: Box<[AtomicU64]>,
}

impl Slice {
    /// From the big-endian bytes of a table.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Self {
        let words = bytes
            .chunks_exact(8)
            .map(|word| AtomicU64::new(u64::from_be_bytes(word.try_into().unwrap_or_default())))
            .collect();
        Slice { version: AtomicU64::new(0), referenced: AtomicBool::new(true), words }
    }

    /// All entries zero.
    pub(crate) fn zeroed(words: usize) -> Self {
        let words = (0..words).map(|_| AtomicU64::new(0)).collect();
        Slice { version: AtomicU64::new(0), referenced: AtomicBool::new(true), words }
    }

    /// Big-endian bytes, as on disk. Only the owner calls this, so no edit is under way.
    pub(crate) fn to_bytes(&self, out: &mut Vec<u8>) {
        out.extend(self.words.iter().flat_map(|word| word.load(Ordering::Relaxed).to_be_bytes()));
    }

    /// Memory that the slice takes, in bytes.
    pub(crate) fn memory_bytes(words: usize) -> usize {
        words * 8 + size_of::<Slice>() + 64
    }

    /// One word. Outside [`Slice::read`] only for the owner.
    #[inline]
    pub(crate) fn word(&self, index: usize) -> u64 {
        self.words[index].load(Ordering::Relaxed)
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

    /// Edits words as one change for readers. Only the owner, who holds its lock, calls this.
    pub(crate) fn edit(&self, edits: impl IntoIterator<Item = (usize, u64)>) {
        let version = self.version.load(Ordering::Relaxed);
        self.version.store(version.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        for (index, word) in edits {
            self.words[index].store(word, Ordering::Relaxed);
        }
        self.version.store(version.wrapping_add(2), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readers_never_see_half_an_edit() {
        let slice = Slice::zeroed(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for value in 1..=100_000u64 {
                    slice.edit([(0, value), (1, value)]);
                }
            });
            let mut last = 0;
            while last < 100_000 {
                let (a, b) = slice.read(|slice| (slice.word(0), slice.word(1)));
                assert_eq!(a, b);
                assert!(a >= last);
                last = a;
            }
        });
    }

    #[test]
    fn bytes_round_trip() {
        let bytes: Vec<u8> = (0..64).collect();
        let mut out = Vec::new();
        Slice::from_bytes(&bytes).to_bytes(&mut out);
        assert_eq!(out, bytes);
    }
}
