// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Whether the guest was told of the end of changes that die with this process.
//!
//! A flush promises that all changes are durable whose end was told before. A process that was killed has taken mappings along that
//! only its memory had. The next one must not answer a flush as if they were there.

use crate::memory::MemoryPiece;
use cowshed_storage::signal::lock;
use cowshed_vhost_user_proto::inflight::UnflushedNote;
use std::sync::Mutex;

/// The changes of one session.
#[derive(Debug, Default)]
pub(crate) struct Ledger(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    note: Option<UnflushedNote<MemoryPiece>>,
    is_marked: bool,
    /// Changes that ended.
    changes: u64,
    /// Changes of an earlier life are lost, and the guest doesn't know.
    is_lost: bool,
}

impl State {
    fn write(&self) {
        if let Some(note) = &self.note {
            note.set(self.is_marked || self.is_lost);
        }
    }
}

impl Ledger {
    /// Writes to this note from now on.
    pub fn take_up(&self, note: UnflushedNote<MemoryPiece>, is_lost: bool) {
        let mut state = lock(&self.0);
        state.note = Some(note);
        state.is_lost = is_lost;
        state.write();
    }

    /// A change has ended and the guest hears of it next. `dies` says whether it dies with this process.
    pub fn note_change(&self, dies: impl FnOnce() -> bool) {
        let mut state = lock(&self.0);
        state.changes += 1;
        if state.note.is_some() && !state.is_marked && dies() {
            state.is_marked = true;
            state.write();
        }
    }

    /// What [`Ledger::end_flush`] needs of the beginning.
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

    /// True once where changes of an earlier life are lost: the guest is to hear of it.
    pub fn take_lost(&self) -> bool {
        let mut state = lock(&self.0);
        let is_lost = std::mem::take(&mut state.is_lost);
        if is_lost {
            state.write();
        }
        is_lost
    }
}
