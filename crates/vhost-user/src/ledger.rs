// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Whether the guest heard of the end of changes that die with this process.
//!
//! A flush promises that all changes are durable whose end was reported before. A process that was killed has taken
//! mappings along that only its memory had. The next one must not answer a flush as if they were there. Several users
//! of the disk may have lost changes, and each learns it from a flush of its own. So all flushes fail until the guest,
//! which has seen one fail, resets the device: what it reads from then on is what there is.

use crate::memory::MemoryPiece;
use cowshed_storage::signal::lock;
use cowshed_types::slip;
use cowshed_vhost_user_proto::Shared;
use cowshed_vhost_user_proto::inflight::{NoteState, UnflushedNote};
use std::sync::Mutex;

/// The changes of one session.
#[derive(Debug)]
pub(crate) struct SessionLedger<P = MemoryPiece>(Mutex<LedgerState<P>>);

#[derive(Debug)]
struct LedgerState<P> {
    note: Option<UnflushedNote<P>>,
    is_marked: bool,
    /// Changes that ended.
    changes: u64,
    /// Changes of an earlier life are lost: no flush succeeds.
    is_lost: bool,
    /// The guest can see a flush that has failed for that.
    is_told: bool,
}

impl<P> Default for SessionLedger<P> {
    fn default() -> Self {
        SessionLedger(Mutex::new(LedgerState {
            note: None,
            is_marked: false,
            changes: 0,
            is_lost: false,
            is_told: false,
        }))
    }
}

impl<P: Shared> LedgerState<P> {
    fn write(&self) {
        if let Some(note) = &self.note {
            note.set(self.is_marked, self.is_lost);
        }
    }
}

impl<P: Shared> SessionLedger<P> {
    /// Writes to this note from now on, whose content was `found`. The facts of another note before it stay: a reset of the guest
    /// brings a new one.
    pub fn take_up(&self, note: UnflushedNote<P>, found: NoteState, write_cache: bool) {
        let mut state = lock(&self.0);
        note.set_write_cache(write_cache);
        state.note = Some(note);
        state.is_marked |= found.is_unflushed;
        state.is_lost |= found.is_lost;
        state.write();
    }

    /// The region has no place for a note.
    pub fn lay_down(&self) {
        lock(&self.0).note = None;
    }

    /// The guest has set the switch of its write cache.
    pub fn note_write_cache(&self, is_on: bool) {
        if let Some(note) = &lock(&self.0).note {
            note.set_write_cache(is_on);
        }
    }

    /// A change has ended and the guest hears of it next. `dies` is true if it dies with this process.
    pub fn note_change(&self, dies: impl FnOnce() -> bool) {
        let mut state = lock(&self.0);
        state.changes += 1;
        if !state.is_marked && dies() && !slip!("unflushed_changes_are_not_noted") {
            state.is_marked = true;
            state.write();
        }
    }

    /// The state that [`SessionLedger::end_flush`] needs from the beginning of a flush.
    pub fn begin_flush(&self) -> u64 {
        lock(&self.0).changes
    }

    /// A flush has made all changes durable that had ended when it began.
    pub fn end_flush(&self, began: u64) {
        let mut state = lock(&self.0);
        if state.is_marked && state.changes == began {
            state.is_marked = false;
            state.write();
        }
    }

    /// True where a flush has something to do.
    pub fn is_unflushed(&self) -> bool {
        let state = lock(&self.0);
        state.is_marked || state.changes > 0
    }

    /// Changes of an earlier life are lost: nothing may be promised.
    pub fn is_lost(&self) -> bool {
        lock(&self.0).is_lost
    }

    /// The guest can see that changes are lost.
    pub fn told_lost(&self) {
        let mut state = lock(&self.0);
        state.is_told = true;
        if slip!("loss_is_told_to_one_flush_alone") {
            state.is_lost = false;
            state.write();
        }
    }

    /// The guest has reset the device. A guest that sleeps does so as well, so a loss of which it has not heard stays.
    pub fn reset(&self) {
        let mut state = lock(&self.0);
        if std::mem::take(&mut state.is_told) {
            state.is_lost = false;
            state.write();
        }
    }
}
