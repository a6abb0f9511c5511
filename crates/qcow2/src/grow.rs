// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Moving the refcount table to a larger place.
//!
//! The new table and the blocks that count it go behind the reach of the old table, where nothing is in use. They are
//! durable first. Then one write of header bytes 48–59 switches to it. Last the old table's clusters are freed.

use crate::engine::{Engine, State};
use crate::stall::{Planned, Stall};
use crate::structures::Structure;
use crate::writeback::MetaWrite;
use cowshed_layout::qcow2::refcount;
use cowshed_types::memory::vec_for;
use cowshed_types::{Error, ErrorKind, HostOffset};

/// A larger refcount table in the making.
#[derive(Debug)]
pub struct RefcountGrowth {
    /// Blocks and table: write these, then a barrier.
    pub writes: Vec<MetaWrite>,
    /// New `refcount_table_offset` (header bytes 48–55).
    pub table_offset: HostOffset,
    /// New `refcount_table_clusters` (header bytes 56–59).
    pub table_clusters: u32,
    table: Vec<u64>,
    blocks: Vec<(u64, Vec<u8>)>,
}

impl Engine {
    /// Clusters of the refcount table: compare before and after waiting, to see whether another request grew it.
    pub fn refcount_table_clusters(&self) -> u64 {
        self.lock_state().refcounts.table_clusters()
    }

    /// Holds the creation of new refcount blocks back. Then run a whole write-back cycle with refcounts, then call
    /// [`Engine::begin_refcount_growth`].
    pub fn prepare_refcount_growth(&self) {
        self.lock_state().refcounts.set_growing(true);
    }

    /// Plans the growth. To carry it out: `writes`, barrier, header bytes 48–59, barrier, then
    /// [`Engine::end_refcount_growth`]. No cycle may run meanwhile.
    /// [`Stall::Full`] where the container has no room for it.
    pub fn begin_refcount_growth(&self) -> Planned<RefcountGrowth> {
        let mut state = self.lock_state();
        let state = &mut *state;
        let bits = self.geometry.cluster_bits();
        let size = self.geometry.cluster_size();
        if state.refcounts.is_table_dirty() {
            return Err(Error::internal("the refcount table grows while entries of it are not written").into());
        }
        let Some(table) = state.refcounts.table() else {
            return Err(Error::internal("the refcount table grows before it was read").into());
        };
        let per_block = self.geometry.refcount_block_entries();
        let mut start = table.len() as u64 * per_block;
        let (blocks, clusters) = loop {
            let (blocks, clusters) = self.growth_shape(start, state)?;
            let mut place = start..start + blocks + clusters;
            // Where metadata lies without a count, the image is damaged: that stays as it is.
            let Some(metadata) = place.rfind(|cluster| self.metadata.contains(*cluster)) else {
                break (blocks, clusters);
            };
            start = metadata + 1;
        };
        let end = start + blocks + clusters;
        if end > state.refcounts.limit() {
            return Err(Stall::Full);
        }
        let mut larger = vec_for((clusters * size / 8) as usize)?;
        larger.extend_from_slice(table);
        larger.resize((clusters * size / 8) as usize, 0);
        let mut table = larger;
        let mut growth = RefcountGrowth {
            writes: Vec::new(),
            table_offset: HostOffset((start + blocks) << bits),
            table_clusters: clusters as u32,
            table: Vec::new(),
            blocks: Vec::new(),
        };
        for number in 0..blocks {
            let index = self.geometry.refcount_table_index(start) + number;
            let base = index << self.geometry.refcount_block_bits();
            let mut bytes = vec![0; size as usize];
            for cluster in base.max(start)..(base + per_block).min(end) {
                refcount::set(&mut bytes, self.geometry.refcount_order(), (cluster - base) as usize, 1);
            }
            table[index as usize] = (start + number) << bits;
            growth.writes.push(MetaWrite { host: HostOffset((start + number) << bits), bytes: bytes.clone() });
            growth.blocks.push((index, bytes));
        }
        let mut bytes = vec_for(table.len() * 8)?;
        bytes.extend(table.iter().flat_map(|entry| entry.to_be_bytes()));
        growth.writes.push(MetaWrite { host: growth.table_offset, bytes });
        growth.table = table;
        state.refcounts.raise_high_water(end << bits);
        Ok(growth)
    }

    /// Blocks and table clusters for a table that starts at cluster `start`. It has at least twice the present size,
    /// but no more than a container that can't grow needs.
    fn growth_shape(&self, start: u64, state: &State) -> Result<(u64, u64), Error> {
        let size = self.geometry.cluster_size();
        let block_bits = self.geometry.refcount_block_bits();
        let most = (state.refcounts.limit() >> block_bits).saturating_add(1).div_ceil(size / 8);
        let mut clusters = (state.refcounts.table_clusters() * 2).min(most).max(1);
        let mut blocks = 1;
        loop {
            let end = start + blocks + clusters;
            let needed_blocks = ((end - 1) >> block_bits) - (start >> block_bits) + 1;
            // Room for the image to grow by as much again before the next move.
            let least = (((end - 1) >> block_bits) + 1).div_ceil(size / 8);
            let needed_clusters = ((end >> block_bits) + 2).div_ceil(size / 8).min(most.max(least)).max(clusters);
            if needed_blocks <= blocks && needed_clusters == clusters {
                break;
            }
            blocks = needed_blocks;
            clusters = needed_clusters;
        }
        let limit = cowshed_layout::qcow2::limits::REFCOUNT_TABLE_BYTES;
        if clusters * size > limit {
            let message = "the refcount table would be larger than any reader accepts: use larger clusters";
            return Err(Error::new(ErrorKind::Limit, message).field("refcount_table_clusters").value(clusters));
        }
        Ok((blocks, clusters))
    }

    /// Ends the growth: with `success` the header points to the new table, durably.
    pub fn end_refcount_growth(&self, growth: Option<RefcountGrowth>, success: bool) {
        let mut state = self.lock_state();
        let state: &mut State = &mut state;
        state.refcounts.set_growing(false);
        let Some(growth) = growth.filter(|_| success) else { return };
        let bits = self.geometry.cluster_bits();
        let old = state.refcounts.table_offset() >> bits;
        let old_clusters = old..old + state.refcounts.table_clusters();
        self.unmark(Structure::RefcountTable, old_clusters.clone());
        let new = growth.table_offset.0 >> bits;
        self.mark(Structure::RefcountTable, new..new + u64::from(growth.table_clusters));
        for (index, _) in &growth.blocks {
            let block = growth.table[*index as usize] >> bits;
            self.mark(Structure::RefcountBlock, block..block + 1);
        }
        state.refcounts.move_table(growth.table, growth.table_offset.0, u64::from(growth.table_clusters));
        for (index, bytes) in growth.blocks {
            state.refcounts.insert_block(index, &bytes);
        }
        self.give_back(state, old_clusters);
    }
}
