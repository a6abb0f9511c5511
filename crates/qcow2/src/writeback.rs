// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Write-back in epochs: edits of cached metadata to ordered stages of writes with barriers between them.
//!
//! A cycle takes copies of everything that is dirty. Every edit in memory was made after its data I/O completed. So
//! nothing in the copies points to data that isn't at least in the file. Stage 1 writes contents of L2 tables that
//! nothing on disk points to yet, and refcount blocks. (Their rises; falls are in them only once their unmapping is
//! durable.) Stage 2 writes refcount-table entries. Stage 3 writes entries of L2 tables in place, and L1 entries. After
//! stage 3's barrier a flush may be acknowledged, and the unmapped clusters count as durably unmapped.

use crate::engine::{Engine, State};
use cowshed_types::{HostOffset, slip};
use std::collections::BTreeMap;

/// One write of metadata: a copy, never a live table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetaWrite {
    /// Offset in the image file.
    pub host: HostOffset,
    /// The bytes.
    pub bytes: Vec<u8>,
}

/// The writes of one epoch. See [`Engine::begin_cycle`] for how to carry it out.
#[derive(Debug)]
pub struct Cycle {
    number: u64,
    /// The dirty bit (and nothing else) must be set in the header, in stage 1.
    pub set_dirty_bit: bool,
    /// Stages 1 to 3; a barrier after each that isn't empty, and after the last one in any case.
    pub stages: [Vec<MetaWrite>; 3],
    slices: Vec<u64>,
    blocks: Vec<u64>,
    table_entries: Vec<u64>,
    fresh: BTreeMap<usize, u64>,
}

/// The end of a cycle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CycleEnd {
    /// Everything in it is durable.
    Durable,
    /// A write or a barrier failed.
    Failed {
        /// Stages that were begun: writes of the last one may have reached the disk or not.
        stages: usize,
    },
}

impl Cycle {
    /// True when no metadata has to be written.
    pub fn is_empty(&self) -> bool {
        !self.set_dirty_bit && self.stages.iter().all(Vec::is_empty)
    }
}

impl Engine {
    /// Closes the epoch. Only one cycle may run at a time: the caller serialises them.
    ///
    /// To carry it out, issue all writes of stage 1 (with the header's dirty bit if asked) and wait for them. Then
    /// comes a barrier of the data file, and one of the image file. The same follows for stages 2 and 3. A barrier is
    /// needed only if something was written since the last one, but one at least. [`Engine::end_cycle`] takes the
    /// outcome. After a failed write or barrier no later stage is written. After a failed write a later cycle may be
    /// tried.
    ///
    /// `with_refcounts` writes refcounts also under lazy refcounts (on close, or before the table moves).
    pub fn begin_cycle(&self, with_refcounts: bool) -> Cycle {
        let mut state = self.lock_state();
        let state = &mut *state;
        let number = state.epochs.begin_cycle();
        let lots = state.refcounts.dirty_bytes() > self.cache_limits().1.max(16 << 20);
        let mut cycle = Cycle {
            number,
            // Decided here, under the lock: tables that became dirty since the caller last looked go out with this
            // cycle.
            set_dirty_bit: state.epochs.take_dirty_bit() && holds_changes(state, true),
            stages: Default::default(),
            slices: Vec::new(),
            blocks: Vec::new(),
            table_entries: Vec::new(),
            fresh: state.tables.fresh().clone(),
        };
        self.collect_slices(state, &mut cycle);
        if with_refcounts || lots || !self.lazy_refcounts() {
            self.collect_blocks(state, &mut cycle);
            self.collect_refcount_table(state, &mut cycle);
        }
        self.collect_l1(state, &mut cycle);
        state.epochs.note_writes(!cycle.is_empty());
        cycle
    }

    fn collect_slices(&self, state: &mut State, cycle: &mut Cycle) {
        let slice_bytes = self.slice_bytes();
        // Tables that nothing points to yet are written whole: slices that aren't cached are zero.
        for (l1_index, host) in &cycle.fresh {
            let mut bytes = Vec::with_capacity(self.geometry.cluster_size() as usize);
            for slice in 0..self.slices_per_table() as usize {
                match self.directory.slice(*l1_index, slice) {
                    Some(slice) => slice.to_bytes(&mut bytes),
                    None => bytes.resize(bytes.len() + slice_bytes as usize, 0),
                }
            }
            cycle.stages[if slip!("new_tables_with_pointers") { 2 } else { 0 }]
                .push(MetaWrite { host: HostOffset(*host), bytes });
        }
        cycle.slices = state.tables.begin_slices();
        for number in &cycle.slices {
            let (l1_index, index) = self.slice_of_number(*number);
            if cycle.fresh.contains_key(&l1_index) {
                continue;
            }
            let table = cowshed_layout::qcow2::L1Entry(self.directory.l1(l1_index)).offset();
            let Some(slice) = self.directory.slice(l1_index, index) else { continue };
            let mut bytes = Vec::with_capacity(slice_bytes as usize);
            slice.to_bytes(&mut bytes);
            push_joined(
                &mut cycle.stages[if slip!("pointers_with_what_they_point_to") { 0 } else { 2 }],
                table + index as u64 * slice_bytes,
                bytes,
            );
        }
    }

    fn collect_blocks(&self, state: &mut State, cycle: &mut Cycle) {
        for (index, host, bytes) in state.refcounts.begin_blocks(self.config.sector_bytes as usize) {
            cycle.blocks.push(index);
            cycle.stages[if slip!("refcounts_with_pointers") { 2 } else { 0 }].push(MetaWrite { host, bytes });
        }
    }

    fn collect_refcount_table(&self, state: &mut State, cycle: &mut Cycle) {
        let entries = state.refcounts.begin_entries();
        cycle.table_entries = entries.iter().map(|(index, _)| *index).collect();
        cycle.stages[if slip!("refcount_table_with_pointers") { 2 } else { 1 }] =
            self.entry_writes(state.refcounts.table_offset(), &entries);
    }

    fn collect_l1(&self, state: &mut State, cycle: &mut Cycle) {
        let entries = state.tables.begin_l1(|index| self.directory.l1(index));
        let writes = self.entry_writes(state.tables.l1_offset(), &entries);
        cycle.stages[if slip!("l1_entries_with_their_tables") { 0 } else { 2 }].extend(writes);
    }

    /// Writes of single 8-byte entries of a table, neighbours joined as long as they share a sector.
    fn entry_writes(&self, table: u64, entries: &[(u64, u64)]) -> Vec<MetaWrite> {
        let mut writes: Vec<MetaWrite> = Vec::new();
        for (index, value) in entries {
            let host = HostOffset(table + index * 8);
            match writes.last_mut() {
                Some(last)
                    if last.host + last.bytes.len() as u64 == host
                        && last.host.0 / self.config.sector_bytes == host.0 / self.config.sector_bytes =>
                {
                    last.bytes.extend(value.to_be_bytes());
                }
                _ => writes.push(MetaWrite { host, bytes: value.to_be_bytes().to_vec() }),
            }
        }
        writes
    }

    /// Ends a cycle. Changes that aren't durable are dirty again.
    pub fn end_cycle(&self, cycle: Cycle, end: CycleEnd) {
        let mut state = self.lock_state();
        let state = &mut *state;
        let success = end == CycleEnd::Durable;
        state.epochs.end_cycle(cycle.number, success, cycle.set_dirty_bit);
        state.tables.end_cycle(&cycle.slices, success);
        // After a failed write of pointers the disk may name any of the tables. Their contents are there, as they were in this
        // cycle; so they are tables in place, whose changes go out with the pointers.
        if success || (end == (CycleEnd::Failed { stages: 3 }) && !slip!("failed_pointer_write_forgotten")) {
            state.tables.end_fresh(&cycle.fresh);
        }
        state.refcounts.end_cycle(&cycle.blocks, &cycle.table_entries, success);
    }

    /// True when a cycle would write something.
    pub fn is_dirty(&self) -> bool {
        let state = self.lock_state();
        state.epochs.wants_dirty_bit() || holds_changes(&state, true)
    }

    /// True when something in memory may not be in the file: it differs, or a cycle is writing it. `with_refcounts`: reference counts
    /// count, too.
    pub fn holds_changes(&self, with_refcounts: bool) -> bool {
        let state = self.lock_state();
        (state.epochs.is_writing() && !slip!("changes_of_a_cycle_count_as_written"))
            || holds_changes(&state, with_refcounts)
    }

    /// With lazy refcounts: asks the next cycle to set the dirty bit, once, if there is anything to write.
    pub fn want_dirty_bit(&self) {
        self.lock_state().epochs.want_dirty_bit();
    }
}

/// True when something in memory differs from the disk.
pub(crate) fn holds_changes(state: &State, with_refcounts: bool) -> bool {
    state.tables.holds_changes() || (with_refcounts && state.refcounts.holds_changes())
}

/// Appends a write, joined to the one before where they are neighbours (up to 1 MiB).
fn push_joined(writes: &mut Vec<MetaWrite>, host: HostOffset, bytes: Vec<u8>) {
    match writes.last_mut() {
        Some(last) if last.host + last.bytes.len() as u64 == host && last.bytes.len() < 1 << 20 => {
            last.bytes.extend(bytes);
        }
        _ => writes.push(MetaWrite { host, bytes }),
    }
}
