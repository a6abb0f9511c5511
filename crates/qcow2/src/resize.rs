// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Changing the virtual size: a longer L1 table, and unmapping the range behind a new end.

use crate::engine::{Edit, Engine, State};
use crate::stall::{Planned, Stall};
use crate::structures::Structure;
use crate::writeback::MetaWrite;
use cowshed_layout::qcow2::{L1Entry, L2Entry, SubclusterBitmap};
use cowshed_types::memory::vec_for;
use cowshed_types::{Error, ErrorKind, GuestOffset, HostOffset, slip};

/// L1 entries without a table that are passed over in one critical section.
const ENTRIES_AT_ONCE: usize = 1 << 16;

/// The rest of the entries behind a new end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TailCut {
    /// Nothing, and no table that lies behind it.
    Unmap,
    /// Zero clusters in place of data, so that no backing file shows. Version 3 of the format has them.
    Zero,
}

/// The progress of [`Engine::cut_tail`].
#[derive(Clone, Copy, Debug)]
pub struct Tail {
    at: GuestOffset,
    /// The walk began at the start of the table that it is in.
    covers_table: bool,
}

impl Tail {
    /// A walk from `at` on, which is a multiple of the cluster size.
    pub fn new(at: GuestOffset) -> Tail {
        Tail { at, covers_table: false }
    }
}

/// A longer L1 table in the making.
#[derive(Debug)]
pub struct L1Growth {
    /// New `l1_table_offset` (header bytes 40–47).
    pub offset: HostOffset,
    /// New `l1_size` in entries (header bytes 36–39).
    pub entries: u32,
    clusters: u64,
}

impl Engine {
    /// Reserves space for an L1 table that maps `size` bytes; `None` when the present one does.
    ///
    /// To carry it out: a whole write-back cycle with refcounts; write [`Engine::l1_image`]; barrier; header bytes 36–47;
    /// barrier; [`Engine::end_l1_growth`]. No other cycle may run from the first to the last step.
    pub fn begin_l1_growth(&self, size: u64) -> Planned<Option<L1Growth>> {
        let mut state = self.lock_state();
        let entries = self.geometry.l1_entries_needed(size);
        if entries <= state.tables.l1_len() as u64 {
            return Ok(None);
        }
        if size > self.geometry.max_virtual_size() {
            let message = "the virtual size is too large for this cluster size";
            let error = Error::new(ErrorKind::InvalidArgument, message).field("size").value(size);
            return Err(error.qemu("Failed to grow the L1 table: File too large").into());
        }
        self.directory.grow(entries as usize)?;
        let clusters = (entries * 8).div_ceil(self.geometry.cluster_size());
        let first = self.allocate_contiguous(&mut state, clusters)?;
        let offset = HostOffset(first << self.geometry.cluster_bits());
        Ok(Some(L1Growth { offset, entries: entries as u32, clusters }))
    }

    /// The new L1 table, with only such entries as are durable.
    pub fn l1_image(&self, growth: &L1Growth) -> cowshed_types::Result<MetaWrite> {
        let state = self.lock_state();
        let mut bytes = vec_for((growth.clusters * self.geometry.cluster_size()) as usize)?;
        for index in 0..state.tables.l1_len() {
            let durable = state.tables.durable_l1(index);
            bytes.extend(durable.unwrap_or_else(|| self.directory.l1(index)).to_be_bytes());
        }
        bytes.resize((growth.clusters * self.geometry.cluster_size()) as usize, 0);
        Ok(MetaWrite { host: growth.offset, bytes })
    }

    /// Gives the growth up before anything of the header was written: the space goes back.
    pub fn abort_l1_growth(&self, growth: L1Growth) {
        let mut state = self.lock_state();
        let first = self.geometry.host_cluster(growth.offset);
        (first..first + growth.clusters).for_each(|cluster| self.release(&mut state, cluster));
    }

    /// Ends the growth: with `success` the header points to the new table, durably.
    pub fn end_l1_growth(&self, growth: L1Growth, success: bool) {
        let mut state = self.lock_state();
        let state: &mut State = &mut state;
        let bits = self.geometry.cluster_bits();
        if !success {
            // The header may or may not point there: the space is left alone.
            return;
        }
        let first = state.tables.l1_offset() >> bits;
        let old_clusters = (state.tables.l1_len() as u64 * 8).div_ceil(self.geometry.cluster_size());
        self.unmark(Structure::ActiveL1, first..first + old_clusters);
        let new = growth.offset.0 >> bits;
        self.mark(Structure::ActiveL1, new..new + growth.clusters);
        state.tables.move_l1(growth.offset.0, growth.entries as usize);
        if first > 0 {
            self.give_back(state, first..first + old_clusters);
        }
    }

    /// Publishes a new virtual size in bytes to readers and writers, after the header has it (growing) or before
    /// anything is unmapped (shrinking).
    pub fn publish_size(&self, size: u64) {
        self.set_size(size);
    }

    /// A tag for [`Engine::is_drained`]: requests planned up to now.
    pub fn drain_tag(&self) -> u64 {
        let _owner = self.lock_state();
        self.pins.advance()
    }

    /// True when no request planned before [`Engine::drain_tag`] runs any more.
    pub fn is_drained(&self, tag: u64) -> bool {
        let _owner = self.lock_state();
        self.pins.is_drained(tag)
    }

    /// The next L1 entry with a table, at `at` or behind it; the end of the step where there is none.
    fn next_table(&self, state: &State, at: GuestOffset) -> (usize, bool) {
        let first = self.geometry.l1_index(at) as usize;
        // A large disk has millions of entries without.
        let end = state.tables.l1_len().min(first.saturating_add(ENTRIES_AT_ONCE));
        let found = (first..end).find(|index| L1Entry(self.directory.l1(*index)).offset().0 != 0);
        (found.unwrap_or(end), found.is_some())
    }

    fn table_at(&self, l1_index: usize) -> GuestOffset {
        GuestOffset((l1_index as u64) << self.geometry.l2_coverage_bits())
    }

    /// Makes the tables from `tail` on our own and reads them, in steps. So [`Engine::cut_tail`] finds no damaged one and
    /// needs no space. Returns true when all is done.
    pub fn own_tail(&self, tail: &mut Tail) -> Planned<bool> {
        let mut state = self.lock_state();
        let state = &mut *state;
        let (l1_index, is_there) = self.next_table(state, tail.at);
        if l1_index >= state.tables.l1_len() {
            return Ok(true);
        }
        tail.at = tail.at.max(self.table_at(l1_index));
        if is_there {
            self.own_table(state, l1_index, Edit::Empty)?;
            let (slice, _, first) = self.entry_slice(state, self.guest_cluster(tail.at))?;
            let words = self.slice_bytes() as usize / 8;
            let step = self.geometry.l2_entry_size() as usize / 8;
            for word in (first..words).step_by(step) {
                self.refuse_overlap(state, L2Entry(self.entry_of(&slice, word).0))?;
            }
            tail.at = self.behind_slice(tail.at, first);
        }
        Ok(false)
    }

    /// The disk behind the slice in which the word `first` belongs to the cluster at `at`.
    fn behind_slice(&self, at: GuestOffset, first: usize) -> GuestOffset {
        let words = self.slice_bytes() as usize / 8 - first;
        let covered = (words / (self.geometry.l2_entry_size() as usize / 8)) as u64;
        GuestOffset((self.guest_cluster(at) + covered) << self.geometry.cluster_bits())
    }

    /// The entry that `cut` leaves for `old` behind the new end.
    fn cut_entry(&self, cut: TailCut, old: (u64, u64)) -> (u64, u64) {
        match cut {
            TailCut::Unmap => (0, 0),
            TailCut::Zero if old == (0, 0) => old,
            TailCut::Zero if self.geometry.extended_l2() => (0, SubclusterBitmap::ALL_ZERO.0),
            TailCut::Zero => (L2Entry::ZERO_PLAIN.0, 0),
        }
    }

    /// Frees everything from `tail` on, in steps; returns true when all is done. The size is published and older requests are
    /// drained.
    pub fn cut_tail(&self, tail: &mut Tail, cut: TailCut) -> Planned<bool> {
        let mut state = self.lock_state();
        let state = &mut *state;
        let bits = self.geometry.cluster_bits();
        if state.inflight.first_in(self.guest_cluster(tail.at)..u64::MAX).is_some() {
            return Err(Stall::Wait);
        }
        let l1_index = self.geometry.l1_index(tail.at) as usize;
        if l1_index >= state.tables.l1_len() {
            return Ok(true);
        }
        if L1Entry(self.directory.l1(l1_index)).offset().0 == 0 {
            let (next, _) = self.next_table(state, tail.at);
            *tail = Tail::new(self.table_at(next));
            return Ok(false);
        }
        let next_table = self.table_at(l1_index + 1);
        self.own_table(state, l1_index, Edit::Empty)?;
        let (mut slice, number, word) = self.entry_slice(state, self.guest_cluster(tail.at))?;
        let step = self.geometry.l2_entry_size() as usize / 8;
        let mut lost = Vec::new();
        let words = self.slice_bytes() as usize / 8;
        for word in (word..words).step_by(step) {
            let old = self.entry_of(&slice, word);
            let new = self.cut_entry(cut, old);
            if old != new {
                self.refuse_overlap(state, L2Entry(old.0))?;
                if let Some(host) = self.unaligned_host(L2Entry(old.0)) {
                    let message = "the offset of a data cluster is not cluster-aligned";
                    self.tolerate(Error::invalid_image("l2_entry", format!("{:#018x}", old.0), message), host);
                }
                self.references_of(L2Entry(old.0), &mut lost);
                self.edit_entry(state, number, &mut slice, word, new);
            }
        }
        let covers_table = tail.covers_table || tail.at.within(self.geometry.l2_coverage_bits()) == 0;
        *tail = Tail { at: self.behind_slice(tail.at, word), covers_table };
        if tail.at == next_table {
            tail.covers_table = false;
        }
        // The whole table was walked from its start: it goes too.
        if tail.at == next_table && covers_table && cut == TailCut::Unmap {
            let table = L1Entry(self.directory.l1(l1_index));
            let cluster = table.offset().0 >> bits;
            self.unmark(Structure::ActiveL2, cluster..cluster + 1);
            lost.push(cluster);
            if !slip!("freed_table_stays_dirty") {
                self.drop_table(state, l1_index);
            }
            self.directory.set_l1(l1_index, 0);
            state.tables.l1_edited(l1_index, table.0);
        }
        self.retire(state, lost);
        Ok(false)
    }
}
