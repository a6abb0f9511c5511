// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The L1 table and the L2 slices under the lock: dirty ones, busy ones, and those that may leave the cache.

use crate::compact::SliceLayout;
use crate::config::EngineConfig;
use crate::engine::damage::hex;
use crate::engine::room::Edit;
use crate::engine::{Engine, State};
use crate::slice::Slice;
use crate::stall::{Load, Planned, TableId};
use crate::structures::Structure;
use cowshed_layout::qcow2::L1Entry;
use cowshed_types::{Errno, Error, HostOffset, slip};
use foldhash::{HashMap, HashMapExt};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The relation of a piece of metadata in memory to the disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Dirt {
    /// The same.
    #[default]
    Clean,
    /// Changed in memory.
    Dirty,
    /// A copy is being written by the running cycle.
    Writing,
    /// A copy is being written, and it changed again meanwhile.
    WritingDirty,
}

impl Dirt {
    pub(crate) fn edited(self) -> Self {
        match self {
            Dirt::Clean | Dirt::Dirty => Dirt::Dirty,
            Dirt::Writing | Dirt::WritingDirty => Dirt::WritingDirty,
        }
    }

    pub(crate) fn cycle_ended(self, success: bool) -> Self {
        match (self, success) {
            (Dirt::Writing, true) => Dirt::Clean,
            (Dirt::Writing | Dirt::WritingDirty, _) => Dirt::Dirty,
            (other, _) => other,
        }
    }
}

#[derive(Default)]
struct SliceMeta {
    dirt: Dirt,
    /// Requests that will edit the slice when their I/O is done.
    busy: u32,
    /// Its share of the cache, in bytes; 0 while only its state is known.
    counted: u32,
}

/// An L1 entry that is not, or not surely, on disk as it is in memory.
#[derive(Clone, Copy)]
struct L1Dirt {
    /// The value that the disk holds for sure, or held last.
    durable: u64,
    /// The value that the running cycle writes.
    written: Option<u64>,
    /// Changed since that copy was taken.
    dirty: bool,
}

/// See the module's text.
pub(crate) struct Tables {
    slices: HashMap<u64, SliceMeta>,
    clock: VecDeque<u64>,
    /// Slices whose [`Dirt`] asks for a write by the next cycle.
    dirty: BTreeSet<u64>,
    /// L2 tables that the disk's L1 doesn't point to yet, by L1 index, with their host offset. The next cycle writes
    /// them whole; slices that aren't cached are zero.
    fresh: BTreeMap<usize, u64>,
    l1_dirty: BTreeMap<usize, L1Dirt>,
    l1_offset: u64,
    l1_len: usize,
    /// Tables being copied to a new place: their slices stay.
    moving: BTreeSet<usize>,
    /// Bytes that slices may count for: the size of a cache limits its slices, not its memory.
    cap_bytes: u64,
    counted_bytes: u64,
    slice_bytes: u64,
    slices_per_table: u64,
}

fn cap_of(slice_bytes: u64, bytes: u64) -> u64 {
    bytes.max(2 * slice_bytes)
}

/// The fate of a slice under the clock's hand.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Visit {
    Stays,
    Squeezed,
    Left,
}

impl Tables {
    pub(crate) fn new(config: &EngineConfig, l1_len: usize) -> Self {
        Tables {
            slices: HashMap::new(),
            clock: VecDeque::new(),
            dirty: BTreeSet::new(),
            fresh: BTreeMap::new(),
            l1_dirty: BTreeMap::new(),
            l1_offset: config.l1_offset,
            l1_len,
            moving: BTreeSet::new(),
            cap_bytes: cap_of(config.l2_slice_bytes, config.l2_cache_bytes),
            counted_bytes: 0,
            slice_bytes: config.l2_slice_bytes,
            slices_per_table: config.geometry().cluster_size() / config.l2_slice_bytes,
        }
    }

    pub(crate) fn set_cap(&mut self, bytes: u64) {
        self.cap_bytes = cap_of(self.slice_bytes, bytes);
    }

    pub(crate) fn memory_bytes(&self) -> u64 {
        self.counted_bytes + self.slices.len() as u64 * Slice::OVERHEAD_BYTES as u64
    }

    pub(crate) fn clock_len(&self) -> usize {
        self.clock.len()
    }

    pub(crate) fn cached(&self) -> usize {
        self.slices.len()
    }

    /// True when a slice more fits in, however irregular it is.
    fn has_room(&self) -> bool {
        self.counted_bytes + self.slice_bytes <= self.cap_bytes
    }

    /// Counts a slice for this many bytes from now on.
    fn count(&mut self, number: u64, bytes: usize) {
        let meta = self.slices.entry(number).or_default();
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        self.counted_bytes = self.counted_bytes - u64::from(meta.counted) + u64::from(bytes);
        meta.counted = bytes;
    }

    /// Forgets a slice. False when it wasn't known.
    fn forget(&mut self, number: u64) -> bool {
        let Some(meta) = self.slices.remove(&number) else { return false };
        self.counted_bytes -= u64::from(meta.counted);
        true
    }

    pub(crate) fn dirty_slices(&self) -> usize {
        self.dirty.len()
    }

    /// Offset of the L1 table in the file, in bytes.
    pub(crate) fn l1_offset(&self) -> u64 {
        self.l1_offset
    }

    /// Entries of the L1 table.
    #[inline]
    pub(crate) fn l1_len(&self) -> usize {
        self.l1_len
    }

    /// The L1 table has moved.
    pub(crate) fn move_l1(&mut self, offset: u64, len: usize) {
        (self.l1_offset, self.l1_len) = (offset, len);
    }

    /// The value of an L1 entry that the disk holds, where it differs from the one in memory or may differ.
    pub(crate) fn durable_l1(&self, index: usize) -> Option<u64> {
        self.l1_dirty.get(&index).map(|dirt| dirt.durable)
    }

    /// The tables that the disk's L1 doesn't point to yet, by L1 index, with their host offset.
    pub(crate) fn fresh(&self) -> &BTreeMap<usize, u64> {
        &self.fresh
    }

    /// A table that was to be copied to a new place stays where it is.
    pub(crate) fn stop_moving(&mut self, l1_index: usize) {
        self.moving.remove(&l1_index);
    }

    /// True when something in memory differs from the disk.
    pub(crate) fn holds_changes(&self) -> bool {
        !self.dirty.is_empty() || !self.fresh.is_empty() || !self.l1_dirty.is_empty()
    }

    /// The dirty slices, which a cycle writes now.
    pub(crate) fn begin_slices(&mut self) -> Vec<u64> {
        let mut taken: Vec<u64> = std::mem::take(&mut self.dirty).into_iter().collect();
        taken.retain(|number| match self.slices.get_mut(number) {
            Some(meta) => {
                meta.dirt = Dirt::Writing;
                true
            }
            None => false,
        });
        taken
    }

    /// The changed entries of the L1 table, which a cycle writes now: index and value. `value_of`: an entry in memory.
    pub(crate) fn begin_l1(&mut self, value_of: impl Fn(usize) -> u64) -> Vec<(u64, u64)> {
        let begin = |(index, dirt): (&usize, &mut L1Dirt)| {
            let value = value_of(*index);
            (dirt.written, dirt.dirty) = (Some(value), false);
            (*index as u64, value)
        };
        self.l1_dirty.iter_mut().map(begin).collect()
    }

    /// Ends a cycle, which wrote these slices and entries of the L1 table. Changes that aren't durable are dirty again.
    pub(crate) fn end_cycle(&mut self, slices: &[u64], success: bool) {
        for number in slices {
            if let Some(meta) = self.slices.get_mut(number) {
                meta.dirt = meta.dirt.cycle_ended(success);
                if meta.dirt == Dirt::Dirty {
                    self.dirty.insert(*number);
                }
            }
        }
        self.l1_dirty.retain(|_, dirt| {
            match (dirt.written.take(), success) {
                (Some(value), true) => dirt.durable = value,
                (Some(_), false) => dirt.dirty = true,
                (None, _) => {}
            }
            dirt.dirty
        });
    }

    /// The disk's L1 points to these tables. One that was dropped and made anew meanwhile has another place.
    pub(crate) fn end_fresh(&mut self, written: &BTreeMap<usize, u64>) {
        self.fresh.retain(|index, host| written.get(index) != Some(host));
    }

    pub(crate) fn set_busy(&mut self, number: u64, busy: bool) {
        let meta = self.slices.entry(number).or_default();
        meta.busy = if busy { meta.busy + 1 } else { meta.busy.saturating_sub(1) };
    }

    pub(crate) fn mark_dirty(&mut self, number: u64) {
        let meta = self.slices.entry(number).or_default();
        meta.dirt = meta.dirt.edited();
        self.dirty.insert(number);
    }

    fn may_leave(&self, number: u64) -> bool {
        let table = (number / self.slices_per_table) as usize;
        self.slices
            .get(&number)
            .is_some_and(|meta| (slip!("dirty_slices_evicted") || meta.dirt == Dirt::Clean) && meta.busy == 0)
            && !self.moving.contains(&table)
            && !self.fresh.contains_key(&table)
    }

    /// Records a change of an L1 entry whose durable value was `old`, if it wasn't dirty before.
    pub(crate) fn l1_edited(&mut self, index: usize, old: u64) {
        let dirt = self.l1_dirty.entry(index).or_insert(L1Dirt { durable: old, written: None, dirty: true });
        dirt.dirty = true;
    }
}

impl Engine {
    pub(crate) fn slices_per_table(&self) -> u64 {
        self.geometry.cluster_size() / self.slice_bytes()
    }

    pub(crate) fn slice_shape(&self) -> SliceLayout {
        let entry_words = self.geometry.l2_entry_size() as usize / 8;
        SliceLayout { entry_words, cluster_bits: self.geometry.cluster_bits() }
    }

    /// Index of the slice in its table and of the entry's first word in the slice, for an index into an L2 table.
    pub(crate) fn slice_position(&self, l2_index: u64) -> (usize, usize) {
        let byte = l2_index * self.geometry.l2_entry_size();
        ((byte / self.slice_bytes()) as usize, (byte % self.slice_bytes() / 8) as usize)
    }

    /// Number of a slice over the whole disk.
    pub(crate) fn slice_number(&self, l1_index: usize, slice: usize) -> u64 {
        l1_index as u64 * self.slices_per_table() + slice as u64
    }

    /// The L1 index and the slice's index in the table.
    pub(crate) fn slice_of_number(&self, number: u64) -> (usize, usize) {
        ((number / self.slices_per_table()) as usize, (number % self.slices_per_table()) as usize)
    }

    /// Puts a slice into the cache and lets others go.
    pub(crate) fn insert_slice(&self, state: &mut State, number: u64, slice: Slice) -> Arc<Slice> {
        self.evict(state);
        self.relieve_budget(state);
        let (l1_index, index) = self.slice_of_number(number);
        let slice = Arc::new(slice);
        self.directory.set_slice(l1_index, index, Some(slice.clone()));
        if !state.tables.slices.contains_key(&number) {
            state.tables.clock.push_back(number);
        }
        state.tables.count(number, slice.counted_bytes());
        self.account(state);
        slice
    }

    fn evict(&self, state: &mut State) {
        let tables = &mut state.tables;
        // A bounded walk of the clock's hand: a slice that can't leave now may leave at the next insertion.
        for _ in 0..128 {
            if tables.has_room() {
                return;
            }
            let Some(number) = tables.clock.pop_front() else { return };
            if tables.slices.contains_key(&number) && self.visit(tables, number, true) != Visit::Left {
                tables.clock.push_back(number);
            }
        }
    }

    /// Walks the clock's hand past `steps` slices. Those not used since it last came by leave, or first become smaller
    /// if they can and `squeeze` is set. Returns how many did either.
    pub(crate) fn walk_clock(&self, state: &mut State, steps: usize, squeeze: bool) -> usize {
        let tables = &mut state.tables;
        let mut freed = 0;
        for _ in 0..steps.min(tables.clock.len()) {
            let Some(number) = tables.clock.pop_front() else { break };
            if !tables.slices.contains_key(&number) {
                continue;
            }
            let visit = self.visit(tables, number, squeeze);
            if visit != Visit::Left {
                tables.clock.push_back(number);
            }
            freed += usize::from(visit != Visit::Stays);
        }
        freed
    }

    /// Takes a slice out of the cache, or makes it smaller, unless it was used lately or must stay as it is.
    fn visit(&self, tables: &mut Tables, number: u64, squeeze: bool) -> Visit {
        let (l1_index, index) = self.slice_of_number(number);
        let slice = self.directory.slice(l1_index, index);
        let referenced = slice.as_ref().is_some_and(|slice| slice.referenced.swap(false, Ordering::Relaxed));
        if !tables.may_leave(number) {
            return Visit::Stays;
        }
        if squeeze && let Some(smaller) = slice.and_then(|slice| slice.squeezed()) {
            tables.count(number, smaller.counted_bytes());
            self.directory.set_slice(l1_index, index, Some(Arc::new(smaller)));
            return Visit::Squeezed;
        }
        if referenced {
            return Visit::Stays;
        }
        tables.forget(number);
        self.directory.set_slice(l1_index, index, None);
        Visit::Left
    }

    /// Drops slices and blocks beyond the limits.
    pub(crate) fn shrink_caches(&self, state: &mut State) {
        // Each walk of the hand is bounded and gives referenced slices a second chance: two rounds see everything.
        for _ in 0..state.tables.clock.len() / 16 + 2 {
            if state.tables.has_room() {
                break;
            }
            self.evict(state);
        }
        state.refcounts.evict();
        self.account(state);
    }

    /// Drops all slices of a table that is no longer part of the image, dirty or not.
    pub(crate) fn drop_table(&self, state: &mut State, l1_index: usize) {
        for slice in 0..self.slices_per_table() as usize {
            let number = self.slice_number(l1_index, slice);
            if state.tables.forget(number) {
                state.tables.dirty.remove(&number);
                self.directory.set_slice(l1_index, slice, None);
            }
        }
        state.tables.fresh.remove(&l1_index);
    }

    /// The cached slice, which must belong to an allocated table; or a request to load it.
    pub(crate) fn slice(&self, state: &mut State, l1_index: usize, slice: usize) -> Planned<Arc<Slice>> {
        if let Some(found) = self.directory.slice(l1_index, slice) {
            found.referenced.store(true, Ordering::Relaxed);
            return Ok(found);
        }
        let number = self.slice_number(l1_index, slice);
        if state.tables.fresh.contains_key(&l1_index) {
            let zero = Slice::zeroed(self.slice_bytes() as usize / 8, self.slice_shape());
            return Ok(self.insert_slice(state, number, zero));
        }
        let host = self.l2_table(state, l1_index)?.unwrap_or_default() + slice as u64 * self.slice_bytes();
        let load = Load { table: TableId::L2Slice(number), host, len: self.slice_bytes() as usize };
        Err(Engine::stall_for(state, load))
    }

    /// Where the L2 table behind an L1 entry is, checked against the file.
    pub(crate) fn l2_table(&self, state: &State, l1_index: usize) -> Result<Option<HostOffset>, Error> {
        self.table_of(state, l1_index, L1Entry(self.directory.l1(l1_index)))
    }

    /// As [`Self::l2_table`], with the entry at hand.
    fn table_of(&self, state: &State, l1_index: usize, entry: L1Entry) -> Result<Option<HostOffset>, Error> {
        let table = entry.table(self.geometry).map_err(|error| {
            let (offset, index) = (hex(entry.offset().0), hex(l1_index as u64));
            error.with_report(format!("L2 table offset {offset} unaligned (L1 index: {index})"))
        })?;
        if let Some(host) = table
            && host.0 >= state.refcounts.high_water()
        {
            let message = format!("the L2 table of L1 entry {l1_index} lies past the end of the file");
            return Err(Error::invalid_image("l1_entry", host, message).with_errno(Errno::EIO));
        }
        Ok(table)
    }

    /// Makes sure that there is an L2 table for `l1_index` which only we refer to, so that its entries may be edited.
    pub(crate) fn own_table(&self, state: &mut State, l1_index: usize, edit: Edit) -> Planned<()> {
        let old = L1Entry(self.directory.l1(l1_index));
        let table = self.table_of(state, l1_index, old)?;
        if let Some(host) = table
            && state.overlapping_tables.contains(&l1_index)
        {
            return Err(self.overlap(state, self.geometry.host_cluster(host)));
        }
        if table.is_some() && (slip!("shared_tables_edited_in_place") || old.is_copied()) {
            return match edit {
                Edit::Fill => self.require_room(state, self.geometry.host_cluster(old.offset())),
                Edit::Empty => Ok(()),
            };
        }
        if table.is_some() {
            // Shared with a snapshot: copy it whole.
            state.tables.moving.insert(l1_index);
            for slice in 0..self.slices_per_table() as usize {
                self.slice(state, l1_index, slice)?;
            }
        }
        let cluster = self.place_for_table(state, l1_index)?;
        state.tables.moving.remove(&l1_index);
        let host = HostOffset(cluster << self.geometry.cluster_bits());
        self.directory.set_l1(l1_index, L1Entry::new(host, true).0);
        state.tables.l1_edited(l1_index, old.0);
        state.tables.fresh.insert(l1_index, host.0);
        self.mark(Structure::ActiveL2, cluster..cluster + 1);
        if let Some(shared) = table {
            let shared_cluster = self.geometry.host_cluster(shared);
            // It stays the snapshot's.
            if !self.overlap_set().contains(Structure::InactiveL2) {
                self.unmark(Structure::ActiveL2, shared_cluster..shared_cluster + 1);
            }
            for slice in 0..self.slices_per_table() as usize {
                let number = self.slice_number(l1_index, slice);
                state.tables.mark_dirty(number);
            }
            self.retire(state, [self.geometry.host_cluster(shared)]);
        }
        Ok(())
    }

    /// Reads the words of one L2 entry: the descriptor, and the bitmap with extended L2 entries.
    pub(crate) fn entry_of(&self, slice: &Slice, word: usize) -> (u64, u64) {
        (slice.word(word), if self.geometry.extended_l2() { slice.word(word + 1) } else { 0 })
    }

    /// Changes one entry and marks its slice dirty. A compact slice gives way to an array of the same words.
    pub(crate) fn edit_entry(
        &self,
        state: &mut State,
        number: u64,
        slice: &mut Arc<Slice>,
        word: usize,
        entry: (u64, u64),
    ) {
        if let Some(array) = slice.expanded() {
            let (l1_index, index) = self.slice_of_number(number);
            *slice = Arc::new(array);
            state.tables.count(number, slice.counted_bytes());
            if !slip!("readers_keep_a_compact_slice") {
                self.directory.set_slice(l1_index, index, Some(slice.clone()));
            }
        }
        if self.geometry.extended_l2() {
            slice.edit([(word, entry.0), (word + 1, entry.1)]);
        } else {
            slice.edit([(word, entry.0)]);
        }
        state.tables.mark_dirty(number);
    }

    /// Loads a slice of an L2 table for reading. Nothing is done where the table isn't allocated.
    pub(crate) fn slice_for_reading(&self, l1_index: usize, slice: usize) -> Planned<()> {
        let mut state = self.lock_state();
        if self.l2_table(&state, l1_index)?.is_none() {
            return Ok(());
        }
        self.slice(&mut state, l1_index, slice).map(drop)
    }
}
