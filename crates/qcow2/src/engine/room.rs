// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Room for metadata in the file system, certain before a request that needs the metadata is acknowledged.
//!
//! Data reaches the file before its request is acknowledged, metadata only with a later cycle. On a full file system
//! that cycle would fail, and with it every later one. So the space of a metadata cluster is reserved before its first
//! edit since the image was opened. A request that finds no space fails, and nothing of it is mapped.

use crate::engine::{Engine, State};
use crate::stall::{Planned, Reserve, Stall};
use cowshed_types::{HostOffset, slip};
use foldhash::HashSet;
use std::collections::BTreeMap;

/// The edit that a request is going to make in an L2 table that is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Edit {
    /// Set entries.
    Fill,
    /// Empty entries that hold something: their space is there.
    Empty,
}

/// See the module's text. Clusters are host clusters.
#[derive(Default)]
pub(crate) struct Room {
    /// Clusters whose space is there.
    certain: HashSet<u64>,
    /// Clusters whose space a request reserves now.
    asked: HashSet<u64>,
    /// Clusters that were taken for L2 tables and aren't in use yet, by L1 index.
    places: BTreeMap<usize, u64>,
}

impl Room {
    /// A cluster lost its last reference: its space may go back.
    pub(crate) fn freed(&mut self, cluster: u64) {
        self.certain.remove(&cluster);
    }

    /// The file ends before this cluster now.
    pub(crate) fn cut(&mut self, end: u64) {
        self.certain.retain(|cluster| *cluster < end);
    }

    /// True when no request waits for space.
    pub(crate) fn is_at_rest(&self) -> bool {
        self.asked.is_empty()
    }

    /// A plan that got this stall goes on without it.
    pub(crate) fn withdraw(&mut self, reserve: &Reserve, cluster_bits: u32) {
        self.asked.remove(&(reserve.host.0 >> cluster_bits));
    }
}

impl Engine {
    /// The space is there.
    pub fn reserved(&self, reserve: &Reserve) {
        let bits = self.geometry.cluster_bits();
        let mut state = self.lock_state();
        state.room.withdraw(reserve, bits);
        state.room.certain.insert(reserve.host.0 >> bits);
    }

    /// There is no space: others may try. All I/O to the place is over.
    pub fn reserve_failed(&self, reserve: &Reserve) {
        let mut state = self.lock_state();
        let state = &mut *state;
        state.room.withdraw(reserve, self.geometry.cluster_bits());
        if let Some(l1_index) = reserve.table {
            state.tables.stop_moving(l1_index);
            if let Some(cluster) = state.room.places.remove(&l1_index) {
                self.release(state, cluster);
            }
        }
    }

    /// Gives back a cluster that nothing has ever pointed to: it may be used again at once.
    pub(crate) fn release(&self, state: &mut State, cluster: u64) {
        if let Err(stall) = self.lower(state, cluster, 1) {
            self.withdraw(state, &stall);
            self.give_back(state, [cluster]);
        }
    }

    /// Gives back the places for tables of requests that failed later. No request runs.
    pub fn release_places(&self) {
        let mut state = self.lock_state();
        let places = std::mem::take(&mut state.room.places);
        places.into_values().for_each(|cluster| self.release(&mut state, cluster));
    }

    /// Room for a cluster of metadata that is there.
    pub(crate) fn require_room(&self, state: &mut State, cluster: u64) -> Planned<()> {
        self.ask_for_room(state, cluster, false, None)
    }

    /// Room for metadata that comes into being. `is_held`: no other request can get the cluster meanwhile.
    pub(crate) fn require_new_room(&self, state: &mut State, cluster: u64, is_held: bool) -> Planned<()> {
        self.ask_for_room(state, cluster, is_held, None)
    }

    /// Room for the block that counts `cluster`, which is there.
    pub(crate) fn require_count_room(&self, state: &mut State, cluster: u64) -> Planned<()> {
        let index = self.geometry.refcount_table_index(cluster) as usize;
        match state.refcounts.table().and_then(|table| table.get(index)).copied() {
            Some(_) if slip!("counts_without_room") => Ok(()),
            Some(block) => self.require_room(state, block >> self.geometry.cluster_bits()),
            None => Ok(()),
        }
    }

    /// Room for a refcount block that comes into being, and for the entry that names it.
    pub(crate) fn require_block_room(&self, state: &mut State, index: u64, cluster: u64, is_held: bool) -> Planned<()> {
        self.require_new_room(state, cluster, is_held)?;
        let entry = (state.refcounts.table_offset() + index * 8) >> self.geometry.cluster_bits();
        self.require_room(state, entry)
    }

    /// A cluster for a new L2 table with room for it, and for the entry that names it.
    pub(crate) fn place_for_table(&self, state: &mut State, l1_index: usize) -> Planned<u64> {
        let cluster = match state.room.places.get(&l1_index) {
            Some(cluster) => *cluster,
            None => {
                let cluster = self.allocate(state, 1, None)?.cluster;
                state.room.places.insert(l1_index, cluster);
                cluster
            }
        };
        self.ask_for_room(state, cluster, true, Some(l1_index))?;
        let entry = (state.tables.l1_offset() + l1_index as u64 * 8) >> self.geometry.cluster_bits();
        self.ask_for_room(state, entry, false, Some(l1_index))?;
        state.room.places.remove(&l1_index);
        Ok(cluster)
    }

    fn ask_for_room(&self, state: &mut State, cluster: u64, is_new: bool, table: Option<usize>) -> Planned<()> {
        if !self.config.reserves || state.room.certain.contains(&cluster) {
            return Ok(());
        }
        if !state.room.asked.insert(cluster) {
            return Err(Stall::Wait);
        }
        let host = HostOffset(cluster << self.geometry.cluster_bits());
        Err(Stall::Reserve(Reserve { host, len: self.geometry.cluster_size(), is_new, table }))
    }
}
