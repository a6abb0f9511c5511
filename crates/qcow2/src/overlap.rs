// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Overlap checks: no write may land on metadata that it isn't meant for.
//!
//! One bit for each host cluster that holds a checked structure, readable without a lock: a write costs one look-up
//! per host cluster, whatever the size of the image. Which structure it is, is found out only when the bit is set.

use crate::engine::{Engine, State};
use arc_swap::ArcSwap;
use cowshed_block::{Errno, Error, HostOffset};
use cowshed_layout::qcow2::L1Entry;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

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

    /// True when the structure is checked.
    pub const fn contains(self, structure: Structure) -> bool {
        self.0 >> structure as u16 & 1 != 0
    }
}

/// Clusters that one chunk of the map covers.
const CHUNK_BITS: u32 = 15;
/// Chunks with a smaller number stand in an array, others (absurdly far out in the file) in a tree.
const DENSE_CHUNKS: u64 = 1 << 16;

type Chunk = [AtomicU64; 1 << (CHUNK_BITS - 6)];

#[derive(Clone, Default)]
struct Chunks {
    dense: Vec<Option<Arc<Chunk>>>,
    far: BTreeMap<u64, Arc<Chunk>>,
}

impl Chunks {
    #[inline]
    fn get(&self, number: u64) -> Option<&Chunk> {
        match number < DENSE_CHUNKS {
            true => self.dense.get(number as usize)?.as_deref(),
            false => self.far.get(&number).map(|chunk| &**chunk),
        }
    }
}

/// The bits. Changed only by the owner.
#[derive(Default)]
pub(crate) struct MetadataMap {
    chunks: ArcSwap<Chunks>,
}

impl MetadataMap {
    /// True when a host cluster holds checked metadata.
    #[inline]
    pub(crate) fn contains(&self, cluster: u64) -> bool {
        let chunks = self.chunks.load();
        let Some(chunk) = chunks.get(cluster >> CHUNK_BITS) else { return false };
        let bit = cluster & ((1 << CHUNK_BITS) - 1);
        chunk[bit as usize / 64].load(Ordering::Acquire) >> (bit % 64) & 1 != 0
    }

    /// Sets bits; true when one was set before.
    pub(crate) fn insert(&self, clusters: Range<u64>) -> bool {
        let mut was_set = false;
        for cluster in clusters {
            let number = cluster >> CHUNK_BITS;
            if self.chunks.load().get(number).is_none() {
                let mut chunks = Chunks::clone(&self.chunks.load());
                let chunk: Arc<Chunk> = Arc::new(std::array::from_fn(|_| AtomicU64::new(0)));
                if number < DENSE_CHUNKS {
                    let len = chunks.dense.len().max(number as usize + 1);
                    chunks.dense.resize(len, None);
                    chunks.dense[number as usize] = Some(chunk);
                } else {
                    chunks.far.insert(number, chunk);
                }
                self.chunks.store(Arc::new(chunks));
            }
            let chunks = self.chunks.load();
            let bit = cluster & ((1 << CHUNK_BITS) - 1);
            if let Some(chunk) = chunks.get(number) {
                was_set |= chunk[bit as usize / 64].fetch_or(1 << (bit % 64), Ordering::AcqRel) >> (bit % 64) & 1 != 0;
            }
        }
        was_set
    }

    /// Clears bits.
    pub(crate) fn remove(&self, clusters: Range<u64>) {
        let chunks = self.chunks.load();
        for cluster in clusters {
            let bit = cluster & ((1 << CHUNK_BITS) - 1);
            if let Some(chunk) = chunks.get(cluster >> CHUNK_BITS) {
                chunk[bit as usize / 64].fetch_and(!(1 << (bit % 64)), Ordering::AcqRel);
            }
        }
    }
}

impl Engine {
    /// Marks clusters of a structure, if it is checked. True when something else had them marked already.
    pub(crate) fn mark(&self, structure: Structure, clusters: Range<u64>) -> bool {
        self.config.overlap.contains(structure) && self.metadata.insert(clusters)
    }

    pub(crate) fn unmark(&self, structure: Structure, clusters: Range<u64>) {
        if self.config.overlap.contains(structure) {
            self.metadata.remove(clusters);
        }
    }

    /// Marks what is known when the image is opened. Returns the L1 indices of L2 tables that overlap something.
    pub(crate) fn mark_at_open(&self, l1: &[u64]) -> Vec<usize> {
        let bits = self.geometry.cluster_bits();
        let clusters = |offset: u64, bytes: u64| offset >> bits..(offset + bytes).div_ceil(1 << bits);
        self.mark(Structure::MainHeader, 0..1);
        self.mark(Structure::ActiveL1, clusters(self.config.l1_offset, l1.len() as u64 * 8));
        let table_bytes = self.config.refcount_table_clusters << bits;
        self.mark(Structure::RefcountTable, clusters(self.config.refcount_table_offset, table_bytes));
        for (structure, offset, bytes) in &self.config.other_metadata {
            self.mark(*structure, clusters(*offset, *bytes));
        }
        let mut overlapping = Vec::new();
        for (index, entry) in l1.iter().enumerate() {
            let table = L1Entry(*entry).offset().0;
            if table != 0 && self.mark(Structure::ActiveL2, table >> bits..(table >> bits) + 1) {
                overlapping.push(index);
            }
        }
        overlapping
    }

    /// The error for a write that would hit metadata.
    #[cold]
    pub(crate) fn overlap_error(&self, state: &State, cluster: u64) -> Error {
        let host = HostOffset(cluster << self.geometry.cluster_bits());
        let structure = self.structure_at(state, cluster).map_or("metadata", Structure::name);
        let message = format!("preventing invalid write on metadata (overlaps with {structure})");
        Error::invalid_image("host_offset", host, message).with_errno(Errno::EIO)
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
        if let Some((structure, ..)) =
            self.config.other_metadata.iter().find(|(_, offset, bytes)| within(*offset, *bytes))
        {
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
