// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Stored refcounts against counted references.

use super::Counts;
use cowshed_layout::qcow2::refcount;

/// A cluster whose stored refcount isn't its number of references.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Host cluster number.
    pub cluster: u64,
    /// The count in the refcount block; 0 without a block.
    pub stored: u64,
    /// The references that the check counted.
    pub references: u64,
}

/// Compares the counts of one refcount block with the references counted, inside of the window. The block begins with
/// cluster `first`. `None`: there is no block, all its counts are 0. Clusters from `file_clusters` on matter only where
/// something refers to them. Returns the number of the cluster behind the last one in use, 0 when none is.
pub fn compare_block(
    counts: &Counts,
    order: u32,
    block: Option<&[u8]>,
    first: u64,
    entries: u64,
    file_clusters: u64,
    mut found: impl FnMut(Difference),
) -> u64 {
    let from = first.max(counts.first());
    let to = first.saturating_add(entries).min(counts.end());
    let mut end = 0;
    for cluster in from..to {
        let Some(index) = counts.index(cluster) else { break };
        let references = counts.references_at(index);
        let stored = match block {
            Some(block) if order == 4 => {
                let at = (cluster - first) as usize * 2;
                u64::from(u16::from_be_bytes([block[at], block[at + 1]]))
            }
            Some(block) => refcount::get(block, order, (cluster - first) as usize),
            None => 0,
        };
        if cluster >= file_clusters && references == 0 {
            continue;
        }
        if stored | references != 0 {
            end = cluster + 1;
        }
        if stored != references {
            found(Difference { cluster, stored, references });
        }
    }
    end
}

/// Raises the counts of a block that are below the references, as far as the width goes. Returns true when the block
/// changed.
pub fn raise_block(counts: &Counts, order: u32, block: &mut [u8], first: u64) -> bool {
    let mut changed = false;
    let entries = refcount::entries(block.len(), order) as u64;
    for cluster in first.max(counts.first())..first.saturating_add(entries).min(counts.end()) {
        let index = (cluster - first) as usize;
        let wanted = counts.references(cluster).min(refcount::max_value(order));
        if refcount::get(block, order, index) < wanted {
            refcount::set(block, order, index, wanted);
            changed = true;
        }
    }
    changed
}

/// Lowers the counts of a block that are above the references. Returns true when the block changed.
pub fn lower_block(counts: &Counts, order: u32, block: &mut [u8], first: u64, file_clusters: u64) -> bool {
    let mut changed = false;
    let entries = refcount::entries(block.len(), order) as u64;
    let to = first.saturating_add(entries).min(counts.end()).min(file_clusters);
    for cluster in first.max(counts.first())..to {
        let index = (cluster - first) as usize;
        let references = counts.references(cluster);
        if refcount::get(block, order, index) > references {
            refcount::set(block, order, index, references);
            changed = true;
        }
    }
    changed
}
