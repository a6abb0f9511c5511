// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A refcount structure made anew, in clusters that nothing refers to.

use super::Counts;
use cowshed_layout::qcow2::{Geometry, limits, refcount};
use cowshed_types::memory::vec_for;
use cowshed_types::{Error, ErrorKind, Result};
use std::collections::BTreeSet;
use std::ops::Range;

/// The places of the parts of a new refcount structure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RefcountLayout {
    /// Clusters of the whole new structure: the table first, then the blocks.
    pub clusters: Range<u64>,
    /// Clusters of the table.
    pub table_clusters: u64,
    /// The blocks, by index in the table.
    pub blocks: Vec<u64>,
}

impl RefcountLayout {
    /// The cluster that the `nth` of [`RefcountLayout::blocks`] goes to.
    pub fn block_cluster(&self, nth: usize) -> u64 {
        self.clusters.start + self.table_clusters + nth as u64
    }

    /// The table's bytes, whole clusters.
    pub fn table(&self, geometry: Geometry) -> Result<Vec<u8>> {
        let len = (self.table_clusters * geometry.cluster_size()) as usize;
        let mut table = vec_for(len)?;
        table.resize(len, 0);
        for (nth, index) in self.blocks.iter().enumerate() {
            let offset = self.block_cluster(nth) << geometry.cluster_bits();
            table[*index as usize * 8..][..8].copy_from_slice(&offset.to_be_bytes());
        }
        Ok(table)
    }
}

/// Plans a refcount structure from cluster `start` on, behind everything that is in use. `needed` are the indices of
/// the blocks with a count other than 0.
pub fn plan_layout(geometry: Geometry, mut needed: BTreeSet<u64>, start: u64) -> Result<RefcountLayout> {
    let entries = geometry.refcount_block_entries();
    // Every round adds blocks or table clusters that the round before showed to be missing; each new block counts
    // many more clusters than it takes, so this ends after a few rounds.
    let mut clusters: u64 = 1;
    loop {
        let end = start.checked_add(clusters).filter(|end| *end <= limits::HOST_OFFSET_END >> geometry.cluster_bits());
        let end = end.ok_or_else(|| too_large(start))?;
        needed.extend(start / entries..=(end - 1) / entries);
        let last = needed.last().copied().unwrap_or_default();
        let table_bytes = (last + 1) * 8;
        if table_bytes > limits::REFCOUNT_TABLE_BYTES {
            return Err(too_large(last + 1));
        }
        let table_clusters = geometry.clusters(table_bytes);
        let total = table_clusters + needed.len() as u64;
        if total == clusters {
            return Ok(RefcountLayout { clusters: start..end, table_clusters, blocks: needed.into_iter().collect() });
        }
        clusters = total.max(clusters);
        if clusters != total {
            // Shrinking again could go on for ever: the surplus stays a leak-free part of the table.
            let table_clusters = clusters - needed.len() as u64;
            return Ok(RefcountLayout { clusters: start..end, table_clusters, blocks: needed.into_iter().collect() });
        }
    }
}

fn too_large(value: u64) -> Error {
    Error::new(ErrorKind::Limit, "the image is too large for a new refcount table").value(value)
}

/// Fills the block with index `block_index` with the references of the window and one for each cluster of `fresh`. A
/// count that doesn't fit the width becomes the largest that does; the next check reports it. `old` is the block
/// before: its counts are the least, for images with hidden references. Without it `hidden` are: so many more
/// references than those counted to each of the clusters before the second number.
pub fn fill_block(
    counts: &Counts,
    geometry: Geometry,
    block: &mut [u8],
    block_index: u64,
    fresh: &Range<u64>,
    (old, hidden): (Option<&[u8]>, (u64, u64)),
) {
    let (entries, order) = (geometry.refcount_block_entries(), geometry.refcount_order());
    let first = block_index * entries;
    for cluster in first..first + entries {
        let index = (cluster - first) as usize;
        let stored = old.map_or(0, |old| refcount::get(old, order, index));
        let unseen = if old.is_none() && cluster < hidden.1 { hidden.0 } else { 0 };
        let references = counts.references(cluster) + u64::from(fresh.contains(&cluster)) + unseen;
        let wanted = references.max(stored).min(geometry.max_refcount());
        if wanted != 0 {
            refcount::set(block, order, index, wanted);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_count_themselves() {
        for (cluster_bits, order) in [(9, 6), (9, 4), (9, 0), (16, 4), (21, 0)] {
            let geometry = Geometry::new(cluster_bits, order, false).unwrap();
            let entries = geometry.refcount_block_entries();
            for start in [3, entries - 1, entries, entries * 70 + 5] {
                let layout = plan_layout(geometry, (0..=start / entries).collect(), start).unwrap();
                assert_eq!(layout.clusters.start, start);
                assert_eq!(layout.clusters.end - start, layout.table_clusters + layout.blocks.len() as u64);
                for cluster in layout.clusters.clone() {
                    assert!(layout.blocks.contains(&(cluster / entries)));
                }
                let table = layout.table(geometry).unwrap();
                assert!(layout.blocks.iter().all(|index| (*index as usize) * 8 < table.len()));
            }
        }
    }

    #[test]
    fn a_table_past_the_limit_is_refused() {
        let geometry = Geometry::new(9, 6, false).unwrap();
        assert!(plan_layout(geometry, BTreeSet::from([0]), 1 << 40).is_err());
    }
}
