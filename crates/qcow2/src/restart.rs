// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Beginning anew while the image stays open: with slices of another size, or with an image that was changed on disk.

use crate::config::EngineConfig;
use crate::engine::{Engine, Refcounts, Room, State, Tables};
use crate::structures::Structure;
use crate::writeback::holds_changes;
use cowshed_types::{Error, ErrorKind, Result};

/// The places that an operation on the bare image file may have changed.
#[derive(Clone, Debug)]
pub struct Restart {
    /// Offset of the active L1 table.
    pub l1_offset: u64,
    /// Offset of the refcount table.
    pub refcount_table_offset: u64,
    /// Clusters that the refcount table takes.
    pub refcount_table_clusters: u64,
    /// Length of the image file in bytes.
    pub file_len: u64,
    /// Further metadata in the image file: structure, offset and length in bytes.
    pub other_metadata: Vec<(Structure, u64, u64)>,
}

impl Engine {
    /// Keeps L2 tables in slices of this many bytes from now on: a power of two from 512 to the cluster size. Their
    /// cached slices go. No request may run; an error when something isn't on disk yet.
    pub fn set_slice_bytes(&self, bytes: u64) -> Result<()> {
        let state = &mut *self.lock_state();
        self.check_at_rest(state)?;
        let before = self.slice_bytes();
        self.note_slice_bytes(bytes);
        let l1: Vec<u64> = (0..state.tables.l1_len()).map(|index| self.directory.l1(index)).collect();
        let begun = self.restart_tables(state, &self.config_now(state), &l1);
        if begun.is_err() {
            self.note_slice_bytes(before);
        }
        self.account(state);
        begun
    }

    /// Forgets everything, and begins anew with the image as it is on disk now. Sizes and options stay. Only requests that
    /// read may run, and the clusters of the disk are the same as before. An error when something isn't on disk yet, and
    /// nothing has changed then; [`cowshed_types::ErrorKind::Busy`] while a request asks for a table.
    pub fn restart(&self, facts: &Restart, l1: &[u64]) -> Result<()> {
        let state = &mut *self.lock_state();
        if !state.loading.is_empty() {
            return Err(Error::new(ErrorKind::Busy, "a table of the image is being read"));
        }
        self.check_at_rest(state)?;
        let config = EngineConfig {
            l1_offset: facts.l1_offset,
            refcount_table_offset: facts.refcount_table_offset,
            refcount_table_clusters: facts.refcount_table_clusters,
            file_len: facts.file_len,
            ..self.config_now(state)
        };
        self.restart_tables(state, &config, l1)?;
        state.refcounts = Refcounts::new(&config);
        state.room = Room::default();
        state.other_metadata.clone_from(&facts.other_metadata);
        state.pack_next = None;
        self.metadata.clear();
        state.overlapping_tables = self.mark_known(state, l1);
        self.account(state);
        Ok(())
    }

    fn restart_tables(&self, state: &mut State, config: &EngineConfig, l1: &[u64]) -> Result<()> {
        self.directory.restart(l1, self.slices_per_table() as usize)?;
        state.tables = Tables::new(config, l1.len());
        Ok(())
    }

    /// The facts of the opening, with the changes since.
    fn config_now(&self, state: &State) -> EngineConfig {
        let (l2_cache_bytes, refcount_cache_bytes) = self.cache_limits();
        EngineConfig {
            l1_offset: state.tables.l1_offset(),
            l2_cache_bytes,
            l2_slice_bytes: self.slice_bytes(),
            refcount_cache_bytes,
            ..self.config.clone()
        }
    }

    fn check_at_rest(&self, state: &State) -> Result<()> {
        let is_busy = !state.inflight.is_empty() || !state.loading.is_empty() || !state.room.is_at_rest();
        match is_busy || !state.epochs.is_at_rest() || holds_changes(state, true) {
            true => Err(Error::internal("the mapping of the image is not at rest")),
            false => Ok(()),
        }
    }
}
