// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Freed host clusters on their way back to the allocator.
//!
//! A cluster that lost a reference may be used again only under four conditions. (a) The barrier that made its
//! unmapping durable is passed. (b) No request planned before the unmapping runs any more. (c) Its hole has been
//! punched, after (a). (d) Nothing cached is keyed to it. Until then its count stays raised, in memory and on disk. So
//! lowering needs no stage of its own: a lowered count may reach the disk at any time after.

use crate::engine::{Engine, State};
use crate::interleaving;
use crate::stall::Planned;
use cowshed_types::{HostOffset, slip};
use std::collections::BTreeMap;

/// Clusters that may lose their references now: punch `holes`, then call [`Engine::reclaimed`].
#[derive(Debug, Default)]
pub struct Reclaim {
    /// Ranges of the image file that nothing uses any more, in bytes, neighbours joined.
    pub holes: Vec<(HostOffset, u64)>,
    counts: Vec<(u64, u64)>,
}

impl Reclaim {
    /// True when there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.counts.is_empty()
    }
}

impl Engine {
    /// Notes that each of `clusters` of the image file has lost a reference. The mapping is already edited.
    pub(crate) fn retire(&self, state: &mut State, clusters: impl IntoIterator<Item = u64>) {
        let mut tag = None;
        for cluster in clusters {
            let tag = *tag.get_or_insert_with(|| {
                interleaving::point();
                let tag = self.pins.advance();
                if slip!("epoch_not_closed") { tag - 1 } else { tag }
            });
            state.epochs.free(cluster, tag);
            // Never pack into a cluster that is on its way out.
            if state.pack_next.is_some_and(|next| self.geometry.host_cluster(next) == cluster) {
                state.pack_next = None;
            }
        }
    }

    /// Takes the clusters that may be reclaimed now (possibly none).
    pub fn take_reclaimable(&self) -> Planned<Reclaim> {
        let mut state = self.lock_state();
        let reclaimable = state.epochs.reclaimable(|tag| self.pins.is_drained(tag));
        let Some(reclaimable) = reclaimable else { return Ok(Reclaim::default()) };
        let mut reclaim = Reclaim::default();
        let bits = self.geometry.cluster_bits();
        for (&cluster, &by) in &reclaimable.lost {
            let count = match self.refcount(&mut state, cluster) {
                Ok(count) => count,
                Err(stall) if reclaim.is_empty() => return Err(stall),
                Err(stall) => {
                    // The next call asks again, with this part done.
                    self.withdraw(&mut state, &stall);
                    break;
                }
            };
            reclaim.counts.push((cluster, by));
            // Another call may be about to lower the same count: the one that takes the last reference sees to the
            // hole, and the count falls to zero only when that is done.
            let taken = state.epochs.begin_reclaim(cluster, by);
            if count == taken || slip!("hole_in_a_shared_cluster") {
                let host = HostOffset(cluster << bits);
                match reclaim.holes.last_mut() {
                    Some((start, len)) if *start + *len == host => *len += 1 << bits,
                    _ => reclaim.holes.push((host, 1 << bits)),
                }
            }
        }
        let taken: BTreeMap<u64, u64> = reclaim.counts.iter().copied().collect();
        state.epochs.forget(&reclaimable, |cluster| taken.contains_key(&cluster));
        Ok(reclaim)
    }

    /// Gives up the first cluster that [`Engine::take_reclaimable`] would take, and all whose counts stand in the same
    /// refcount block: it can't be read. They keep their counts until a check. Returns how many.
    pub fn leak_reclaimable(&self) -> usize {
        let mut state = self.lock_state();
        let Some(reclaimable) = state.epochs.reclaimable(|tag| self.pins.is_drained(tag)) else { return 0 };
        let block_of = |cluster: u64| self.geometry.refcount_table_index(cluster);
        let Some(first) = reclaimable.lost.keys().next().map(|cluster| block_of(*cluster)) else { return 0 };
        state.epochs.forget(&reclaimable, |cluster| block_of(cluster) == first);
        reclaimable.lost.keys().filter(|cluster| block_of(**cluster) == first).count()
    }

    /// Gives up the cluster whose count [`Engine::reclaimed`] could not lower: its refcount block can't be read.
    pub fn leak_taken(&self, reclaim: &mut Reclaim) {
        if let Some((cluster, by)) = reclaim.counts.pop() {
            self.lock_state().epochs.end_reclaim(cluster, by);
        }
    }

    /// Lowers the counts of the taken clusters, which may be allocated again. On a stall the rest stays in `reclaim`;
    /// call again.
    pub fn reclaimed(&self, reclaim: &mut Reclaim) -> Planned<()> {
        let mut state = self.lock_state();
        while let Some((cluster, by)) = reclaim.counts.last().copied() {
            self.lower(&mut state, cluster, by)?;
            reclaim.counts.pop();
            state.epochs.end_reclaim(cluster, by);
        }
        Ok(())
    }

    /// True when freed clusters still wait for something.
    pub fn has_quarantined(&self) -> bool {
        self.lock_state().epochs.waiting() > 0
    }

    /// Number of references that edits of the mapping have lost, and that wait for something.
    pub fn waiting_unmapped(&self) -> u64 {
        self.lock_state().epochs.waiting_unmapped()
    }

    /// True when freed clusters wait for a write-back cycle.
    pub fn has_freed_since_the_last_cycle(&self) -> bool {
        self.lock_state().epochs.wait_for_a_cycle()
    }

    /// Length that the image file needs, in bytes. It ends with the last cluster that has a count, looking back from
    /// its present end as far as counts are zero. No request runs.
    ///
    /// `passed` is how far an attempt before this one came, in clusters; `u64::MAX` at first. Without it, the walk over
    /// a tail of more refcount blocks than the cache holds would never end. Each block that is read ends the attempt.
    pub fn needed_file_len(&self, passed: &mut u64) -> Planned<u64> {
        let mut state = self.lock_state();
        *passed = (*passed).min(state.refcounts.high_water().div_ceil(self.geometry.cluster_size()));
        while *passed > 1 {
            let index = self.geometry.refcount_table_index(*passed - 1);
            if !self.refcount_block(&mut state, index)? {
                // Nothing in its region is used.
                *passed = (index << self.geometry.refcount_block_bits()).max(1);
            } else if self.cached_refcount(&state, *passed - 1) == 0 {
                *passed -= 1;
            } else {
                break;
            }
        }
        let end = if slip!("file_cut_too_short") { *passed - 1 } else { *passed };
        Ok(end << self.geometry.cluster_bits())
    }

    /// The end in bytes of what the file had when it was opened. `None` where this opening has freed all of that from `len`
    /// on. The rest may be in use without a count, in an image that wants repair.
    pub fn unknown_end(&self, len: u64) -> Option<u64> {
        let bits = self.geometry.cluster_bits();
        self.lock_state().refcounts.unknown_clusters(len >> bits).map(|clusters| clusters << bits)
    }

    /// Notes the length of the image's container in bytes, where it can't grow by itself; true when it has become
    /// longer.
    pub fn container_grew(&self, len: u64) -> bool {
        self.lock_state().refcounts.container_grew(len)
    }

    /// Notes that the image file was cut to `len` bytes, so that clusters allocated behind read as zeroes.
    pub fn truncated(&self, len: u64) {
        let mut state = self.lock_state();
        state.refcounts.truncated(len);
        state.room.cut(len >> self.geometry.cluster_bits());
    }
}
