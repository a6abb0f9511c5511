// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Neighbouring clusters, for tables that take more than one: the first run of free clusters that is long enough.

use crate::engine::{Engine, State};
use crate::stall::{Planned, Stall};
use cowshed_layout::qcow2::refcount;
use cowshed_types::{Error, ErrorKind};
use std::ops::Range;

/// Refcount blocks in memory beyond those that count a run.
const SPARE_BLOCKS: u64 = 4;

/// The progress of the search for a run: no run of `want` free clusters starts before cluster `from`.
///
/// A search that has to read a block begins again afterwards. Without this memory it would need all blocks at once.
#[derive(Default)]
pub(crate) struct RunSearch {
    want: u64,
    from: u64,
}

impl RunSearch {
    /// The first cluster at which a run of `want` clusters may start; `hint` is the first cluster that may be free.
    pub(crate) fn start(&self, want: u64, hint: u64) -> u64 {
        if want >= self.want { self.from.max(hint) } else { hint }
    }

    pub(crate) fn none_before(&mut self, want: u64, from: u64) {
        *self = RunSearch { want, from };
    }

    /// A run may start before a cluster that is free now.
    pub(crate) fn freed(&mut self, cluster: u64) {
        self.from = self.from.min(cluster.saturating_sub(self.want));
    }
}

/// The outcome of a look at one place.
enum FirstFit {
    /// The run fits there, behind new refcount blocks of these indices.
    Free(Vec<u64>),
    /// No run starts before this cluster.
    From(u64),
}

impl Engine {
    /// Allocates `want` neighbouring clusters, with the refcount blocks that they need before them: the first place
    /// that is free.
    pub(crate) fn allocate_contiguous(&self, state: &mut State, want: u64) -> Planned<u64> {
        let block_bits = self.geometry.refcount_block_bits();
        let table_len = self.refcount_table(state)?;
        if state.refcounts.is_growing() {
            return Err(Stall::Wait);
        }
        state.refcounts.require_cap((want >> block_bits) + 2 + SPARE_BLOCKS);
        let mut start = state.refcounts.start_of_run(want);
        let missing = loop {
            match self.look_for_run(state, start, want, table_len)? {
                FirstFit::Free(missing) => break missing,
                FirstFit::From(next) => start = next,
            }
            state.refcounts.no_run_before(want, start);
        };
        let end = start + missing.len() as u64 + want;
        if let Some(cluster) = (start..end).find(|cluster| self.metadata.contains(*cluster)) {
            return Err(self.overlap(state, cluster));
        }
        self.require_room_of_run(state, start..end, &missing)?;
        // Blocks that were there first: raising makes them dirty, so that the new ones don't push them out.
        let is_missing = |cluster: &u64| missing.contains(&(cluster >> block_bits));
        for cluster in (start..end).filter(|cluster| !is_missing(cluster)) {
            self.raise(state, cluster);
        }
        for (number, index) in missing.iter().enumerate() {
            self.put_refcount_block(state, *index, start + number as u64);
        }
        for cluster in (start..end).filter(is_missing) {
            self.raise(state, cluster);
        }
        state.refcounts.took_run(want, start..end, end << self.geometry.cluster_bits());
        Ok(start + missing.len() as u64)
    }

    /// Room for the counts of a run that begins with new blocks of the indices `missing`.
    fn require_room_of_run(&self, state: &mut State, run: Range<u64>, missing: &[u64]) -> Planned<()> {
        let block_bits = self.geometry.refcount_block_bits();
        for index in run.start >> block_bits..=(run.end - 1) >> block_bits {
            if !missing.contains(&index) {
                self.require_count_room(state, index << block_bits)?;
            }
        }
        for (number, index) in missing.iter().enumerate() {
            let cluster = run.start + number as u64;
            // Where a block counts the cluster, another request may get it first.
            let is_held = missing.contains(&(cluster >> block_bits));
            self.require_block_room(state, *index, cluster, is_held)?;
        }
        Ok(())
    }

    /// Looks whether the clusters from `start` on are free.
    fn look_for_run(&self, state: &mut State, start: u64, want: u64, table_len: u64) -> Planned<FirstFit> {
        let geometry = self.geometry;
        let mut missing: Vec<u64> = Vec::new();
        let mut at = start;
        loop {
            let end = start + missing.len() as u64 + want;
            if at == end {
                return Ok(FirstFit::Free(missing));
            }
            if end > state.refcounts.limit() {
                return Err(Stall::Full);
            }
            if end > 1 << (56 - geometry.cluster_bits()) {
                return Err(Error::new(ErrorKind::Limit, "the image file can't grow past 2^56 bytes").into());
            }
            let index = geometry.refcount_table_index(at);
            if index >= table_len {
                return Err(Stall::GrowRefcounts);
            }
            let region_end = (index + 1) << geometry.refcount_block_bits();
            if !self.refcount_block(state, index)? {
                missing.push(index);
                at = region_end.min(end + 1);
                continue;
            }
            let Some(block) = state.refcounts.block(index) else {
                return Err(Error::internal("a refcount block left the cache").into());
            };
            let entry = |cluster| geometry.refcount_block_index(cluster) as usize;
            let is_used = |cluster: &u64| refcount::get(block, geometry.refcount_order(), entry(*cluster)) != 0;
            // The last one in the way: the space before it is too short.
            if let Some(used) = (at..region_end.min(end)).rev().find(is_used) {
                return Ok(FirstFit::From(used + 1));
            }
            at = region_end.min(end);
        }
    }
}
