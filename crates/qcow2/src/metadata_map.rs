// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The map of the host clusters that hold checked metadata.
//!
//! One bit for each host cluster, readable without a lock: a write costs one look-up per host cluster, whatever the size of the
//! image.

use arc_swap::ArcSwap;
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// Clusters that one chunk of the map covers: 8192, which is 512 MiB of file at 64 KiB.
const CHUNK_BITS: u32 = 13;
/// Chunks with a smaller number are in an array. Clusters further out (absurdly far in the file) are in a tree, so that
/// a hostile image costs tens of MiB at most.
const DENSE_CHUNKS: u64 = (GROUP * GROUP) as u64;

type Chunk = [AtomicU64; 1 << (CHUNK_BITS - 6)];

/// Chunks per group, and groups.
const GROUP: usize = 1 << 8;

type Group = [OnceLock<Box<Chunk>>; GROUP];

/// Number of the chunk, index of the word, mask of the bit.
#[inline]
fn place(cluster: u64) -> (u64, usize, u64) {
    let bit = cluster & ((1 << CHUNK_BITS) - 1);
    (cluster >> CHUNK_BITS, bit as usize / 64, 1 << (bit % 64))
}

/// The bits. Changed only by the holder of the lock. A part once made stays until the map goes, so a look costs two steps and no
/// guard.
pub(crate) struct MetadataMap {
    groups: Box<[OnceLock<Box<Group>>; GROUP]>,
    far: ArcSwap<BTreeSet<u64>>,
}

impl Default for MetadataMap {
    fn default() -> Self {
        MetadataMap { groups: Box::new(std::array::from_fn(|_| OnceLock::new())), far: ArcSwap::default() }
    }
}

impl MetadataMap {
    #[inline]
    fn chunk(&self, number: u64) -> Option<&Chunk> {
        let group = self.groups.get(number as usize / GROUP)?.get()?;
        group[number as usize % GROUP].get().map(Box::as_ref)
    }

    fn made_chunk(&self, number: u64) -> Option<&Chunk> {
        let group = self.groups.get(number as usize / GROUP)?;
        let group = group.get_or_init(|| Box::new(std::array::from_fn(|_| OnceLock::new())));
        let new = || Box::new(std::array::from_fn(|_| AtomicU64::new(0)));
        Some(group[number as usize % GROUP].get_or_init(new))
    }

    /// True when a host cluster holds checked metadata. A function of its own, so that its cost can be counted
    /// (`testkit/examples/overlap_cost.rs`).
    #[inline(never)]
    pub(crate) fn contains(&self, cluster: u64) -> bool {
        let (number, word, mask) = place(cluster);
        if number >= DENSE_CHUNKS {
            return self.contains_far(cluster);
        }
        self.chunk(number).is_some_and(|chunk| chunk[word].load(Ordering::Acquire) & mask != 0)
    }

    /// Apart, so that the common look saves no registers for it.
    #[cold]
    #[inline(never)]
    fn contains_far(&self, cluster: u64) -> bool {
        self.far.load().contains(&cluster)
    }

    /// Forgets all.
    pub(crate) fn clear(&self) {
        let groups = self.groups.iter().filter_map(OnceLock::get);
        for chunk in groups.flat_map(|group| group.iter().filter_map(OnceLock::get)) {
            chunk.iter().for_each(|word| word.store(0, Ordering::Release));
        }
        self.far.store(Arc::default());
    }

    /// Sets bits and calls `taken` with the index of each item that has a cluster whose bit was set before.
    pub(crate) fn insert_all(&self, items: impl Iterator<Item = Range<u64>>, mut taken: impl FnMut(usize)) {
        // Copied only when there is something far out, and then once for all items.
        let mut far: Option<BTreeSet<u64>> = None;
        for (index, clusters) in items.enumerate() {
            let mut was_set = false;
            for cluster in clusters {
                let (number, word, mask) = place(cluster);
                was_set |= match self.made_chunk(number) {
                    Some(chunk) => chunk[word].fetch_or(mask, Ordering::AcqRel) & mask != 0,
                    None => !far.get_or_insert_with(|| BTreeSet::clone(&self.far.load())).insert(cluster),
                };
            }
            if was_set {
                taken(index);
            }
        }
        if let Some(far) = far {
            self.far.store(Arc::new(far));
        }
    }

    /// Sets bits; true when one was set before.
    pub(crate) fn insert(&self, clusters: Range<u64>) -> bool {
        let mut was_set = false;
        self.insert_all(std::iter::once(clusters), |_| was_set = true);
        was_set
    }

    /// Clears bits.
    pub(crate) fn remove(&self, clusters: Range<u64>) {
        for cluster in clusters {
            let (number, word, mask) = place(cluster);
            if number >= DENSE_CHUNKS {
                let mut far = BTreeSet::clone(&self.far.load());
                far.remove(&cluster);
                self.far.store(Arc::new(far));
            } else if let Some(chunk) = self.chunk(number) {
                chunk[word].fetch_and(!mask, Ordering::AcqRel);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_near_and_far() {
        let map = MetadataMap::default();
        assert!(!map.insert(5..8));
        assert!(map.insert(7..9));
        let far = 1 << 40;
        assert!(!map.contains(far));
        map.insert(far..far + 1);
        assert!(map.contains(far) && map.contains(5) && map.contains(8) && !map.contains(9) && !map.contains(4));
        map.remove(5..6);
        assert!(!map.contains(5) && map.contains(6));
    }
}
