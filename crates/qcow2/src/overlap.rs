// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Overlap checks: no write may land on metadata that it isn't meant for.
//!
//! One bit for each host cluster that holds a checked structure, readable without a lock: a write costs one look-up
//! per host cluster, whatever the size of the image. Which structure it is, is found out only when the bit is set.

use crate::engine::{Engine, Stall, State};
use arc_swap::ArcSwap;
use cowshed_block::{Errno, Error, HostOffset};
use cowshed_layout::qcow2::L1Entry;
use std::collections::{BTreeSet, HashSet};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// Metadata structures that writes are checked against; the names are those of `overlap-check`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum Structure {
    MainHeader,
    ActiveL1,
    ActiveL2,
    RefcountTable,
    RefcountBlock,
    SnapshotTable,
    InactiveL1,
    InactiveL2,
    BitmapDirectory,
}

impl Structure {
    /// For messages.
    pub const fn name(self) -> &'static str {
        match self {
            Structure::MainHeader => "qcow2_header",
            Structure::ActiveL1 => "active L1 table",
            Structure::ActiveL2 => "active L2 table",
            Structure::RefcountTable => "refcount table",
            Structure::RefcountBlock => "refcount block",
            Structure::SnapshotTable => "snapshot table",
            Structure::InactiveL1 => "inactive L1 table",
            Structure::InactiveL2 => "inactive L2 table",
            Structure::BitmapDirectory => "bitmap directory",
        }
    }
}

/// Which structures are checked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OverlapSet(u16);

impl OverlapSet {
    /// No checks.
    pub const NONE: OverlapSet = OverlapSet(0);

    /// With one more structure.
    #[must_use]
    pub const fn with(self, structure: Structure, checked: bool) -> Self {
        if checked { OverlapSet(self.0 | 1 << structure as u16) } else { self }
    }

    pub(crate) const fn bits(self) -> u16 {
        self.0
    }

    pub(crate) const fn from_bits(bits: u16) -> OverlapSet {
        OverlapSet(bits)
    }

    /// True when the structure is checked.
    pub const fn contains(self, structure: Structure) -> bool {
        self.0 >> structure as u16 & 1 != 0
    }
}

/// Clusters that one chunk of the map covers: 8192, which is 512 MiB of file at 64 KiB.
const CHUNK_BITS: u32 = 13;
/// Chunks with a smaller number stand in an array; clusters further out (absurdly far in the file) in a tree, so that
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

/// The bits. Changed only by the owner. What was once made stays until the map goes, so that a look costs two steps and
/// no guard.
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

impl Engine {
    /// Marks clusters of a structure, if it is checked. True when something else had them marked already.
    pub(crate) fn mark(&self, structure: Structure, clusters: Range<u64>) -> bool {
        self.overlap_set().contains(structure) && self.metadata.insert(clusters)
    }

    pub(crate) fn unmark(&self, structure: Structure, clusters: Range<u64>) {
        if self.overlap_set().contains(structure) {
            self.metadata.remove(clusters);
        }
    }

    /// Marks what is known without reading anything. Returns the L1 indices of L2 tables that overlap something.
    pub(crate) fn mark_known(&self, state: &State, l1: &[u64]) -> Vec<usize> {
        let bits = self.geometry.cluster_bits();
        let clusters = |offset: u64, bytes: u64| offset >> bits..(offset + bytes).div_ceil(1 << bits);
        self.mark(Structure::MainHeader, 0..1);
        self.mark(Structure::ActiveL1, clusters(state.tables.l1_offset, l1.len() as u64 * 8));
        let table_bytes = state.refcounts.table_clusters << bits;
        self.mark(Structure::RefcountTable, clusters(state.refcounts.table_offset, table_bytes));
        // A snapshot's table that is the active one too, still unchanged, is marked as that.
        let active: HashSet<u64> = match self.overlap_set().contains(Structure::InactiveL2) {
            true => l1.iter().map(|entry| L1Entry(*entry).offset().0).collect(),
            false => HashSet::new(),
        };
        for (structure, offset, bytes) in &state.other_metadata {
            if *structure != Structure::InactiveL2 || !active.contains(offset) {
                self.mark(*structure, clusters(*offset, *bytes));
            }
        }
        let mut overlapping = Vec::new();
        if self.overlap_set().contains(Structure::ActiveL2) {
            // Tables past the end of the file are refused where they are used.
            let table_of =
                |entry: &u64| Some(L1Entry(*entry).offset().0).filter(|o| (1..state.refcounts.high_water).contains(o));
            let ranges = l1.iter().map(|entry| table_of(entry).map_or(0..0, |host| host >> bits..(host >> bits) + 1));
            self.metadata.insert_all(ranges, |l1_index| overlapping.push(l1_index));
        }
        overlapping
    }

    /// The end of a write that would hit metadata.
    #[cold]
    pub(crate) fn overlap(&self, state: &State, cluster: u64) -> Stall {
        let host = HostOffset(cluster << self.geometry.cluster_bits());
        let structure = self.structure_at(state, cluster).map_or("metadata", Structure::name);
        let message = format!("preventing invalid write on metadata (overlaps with {structure})");
        let report = format!("Preventing invalid write on metadata (overlaps with {structure})");
        let error = Error::invalid_image("host_offset", host, message).with_errno(Errno::EIO).with_report(report);
        Stall::Corrupt(error, host.0..host.0 + self.geometry.cluster_size())
    }

    /// Which structure a marked cluster belongs to.
    fn structure_at(&self, state: &State, cluster: u64) -> Option<Structure> {
        let bits = self.geometry.cluster_bits();
        let within = |offset: u64, bytes: u64| {
            offset != 0 && (offset >> bits..(offset + bytes).div_ceil(1 << bits)).contains(&cluster)
        };
        if cluster == 0 {
            return Some(Structure::MainHeader);
        }
        if within(state.tables.l1_offset, state.tables.l1_len as u64 * 8) {
            return Some(Structure::ActiveL1);
        }
        if within(state.refcounts.table_offset, state.refcounts.table_clusters << bits) {
            return Some(Structure::RefcountTable);
        }
        if let Some((structure, ..)) = state.other_metadata.iter().find(|(_, offset, bytes)| within(*offset, *bytes)) {
            return Some(*structure);
        }
        let blocks = state.refcounts.table.as_deref().unwrap_or_default();
        if blocks.iter().any(|block| *block != 0 && block >> bits == cluster) {
            return Some(Structure::RefcountBlock);
        }
        (0..state.tables.l1_len)
            .any(|index| L1Entry(self.directory.l1(index)).offset().0 >> bits == cluster)
            .then_some(Structure::ActiveL2)
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

    #[test]
    fn sets() {
        let set = OverlapSet::NONE.with(Structure::ActiveL2, true).with(Structure::ActiveL1, false);
        assert!(set.contains(Structure::ActiveL2) && !set.contains(Structure::ActiveL1));
    }
}
