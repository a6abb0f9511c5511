// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Locks on ranges of blocks, for direct I/O.
//!
//! A write smaller than the block of the medium reads the block, changes a part and writes it back. In between no other
//! write may touch that block, or its bytes would be lost. So each write of a direct file takes its blocks first:
//! `Shared` when it covers them whole, `Exclusive` when it reads before it writes. Whole-block writes to one block may
//! overlap (their order is the caller's business), anything else waits, in order of arrival.

use std::collections::VecDeque;
use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

/// The use of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// Whole blocks are written.
    Shared,
    /// Blocks are read and written back.
    Exclusive,
}

#[derive(Debug)]
struct Entry {
    ticket: u64,
    range: Range<u64>,
    access: Access,
    granted: bool,
    /// Guards that stand for this entry.
    holders: u32,
    waker: Option<Waker>,
}

impl Entry {
    fn conflicts(&self, other: &Entry) -> bool {
        let overlap = self.range.start < other.range.end && other.range.start < self.range.end;
        overlap && (self.access == Access::Exclusive || other.access == Access::Exclusive)
    }
}

#[derive(Debug, Default)]
struct Table {
    /// In order of arrival. Short: one entry per write in flight.
    entries: VecDeque<Entry>,
    next_ticket: u64,
}

/// The locks of one file, shared by all that use it.
#[derive(Debug, Default)]
pub(crate) struct BlockLocks {
    table: Mutex<Table>,
}

impl BlockLocks {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `range` (bytes, whole blocks) is free for `access`.
    pub(crate) fn acquire(self: &Arc<Self>, range: Range<u64>, access: Access) -> Acquire {
        let mut table = self.table();
        let ticket = table.next_ticket;
        table.next_ticket += 1;
        let mut entry = Entry { ticket, range, access, granted: false, holders: 1, waker: None };
        entry.granted = !table.entries.iter().any(|earlier| earlier.conflicts(&entry));
        table.entries.push_back(entry);
        drop(table);
        Acquire { guard: Some(BlockGuard { locks: Arc::clone(self), ticket }) }
    }

    fn release(&self, ticket: u64) {
        let mut wakers = Vec::new();
        let mut table = self.table();
        let Some(position) = table.entries.iter().position(|entry| entry.ticket == ticket) else { return };
        let entry = &mut table.entries[position];
        entry.holders -= 1;
        if entry.holders > 0 {
            return;
        }
        let gone = table.entries.remove(position);
        for index in position..table.entries.len() {
            let entry = &table.entries[index];
            if entry.granted || !gone.as_ref().is_some_and(|gone| gone.conflicts(entry)) {
                continue;
            }
            if !table.entries.iter().take(index).any(|earlier| earlier.conflicts(entry)) {
                let entry = &mut table.entries[index];
                entry.granted = true;
                wakers.extend(entry.waker.take());
            }
        }
        drop(table);
        wakers.into_iter().for_each(Waker::wake);
    }
}

/// The future of [`BlockLocks::acquire`]. Holds its place in the line; dropping it gives the place up.
pub(crate) struct Acquire {
    guard: Option<BlockGuard>,
}

impl Future for Acquire {
    type Output = BlockGuard;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<BlockGuard> {
        let Some(guard) = &self.guard else { return Poll::Pending };
        let mut table = guard.locks.table();
        let entry = table.entries.iter_mut().find(|entry| entry.ticket == guard.ticket);
        let granted = match entry {
            Some(entry) if !entry.granted => {
                entry.waker = Some(context.waker().clone());
                false
            }
            _ => true,
        };
        drop(table);
        match granted {
            true => self.guard.take().map_or(Poll::Pending, Poll::Ready),
            false => Poll::Pending,
        }
    }
}

/// A range held; given back when the last guard of it drops.
pub(crate) struct BlockGuard {
    locks: Arc<BlockLocks>,
    ticket: u64,
}

impl BlockGuard {
    /// Another guard of the same range: one for the operation, one for the work after it.
    pub(crate) fn share(&self) -> Self {
        if let Some(entry) = self.locks.table().entries.iter_mut().find(|entry| entry.ticket == self.ticket) {
            entry.holders += 1;
        }
        BlockGuard { locks: Arc::clone(&self.locks), ticket: self.ticket }
    }
}

impl Drop for BlockGuard {
    fn drop(&mut self) {
        self.locks.release(self.ticket);
    }
}

impl std::fmt::Debug for BlockGuard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "BlockGuard({})", self.ticket)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    #[test]
    fn whole_block_writes_do_not_wait_for_each_other() {
        let locks = Arc::new(BlockLocks::default());
        let a = locks.acquire(0..4096, Access::Shared).now_or_never();
        let b = locks.acquire(0..8192, Access::Shared).now_or_never();
        assert!(a.is_some() && b.is_some());
    }

    #[test]
    fn exclusive_waits_for_all_and_keeps_its_place() {
        let locks = Arc::new(BlockLocks::default());
        let first = locks.acquire(0..4096, Access::Shared).now_or_never().expect("free");
        let mut exclusive = locks.acquire(0..4096, Access::Exclusive);
        assert!((&mut exclusive).now_or_never().is_none());
        // Arrived later, so it doesn't overtake the one that waits.
        let mut later = locks.acquire(0..4096, Access::Shared);
        assert!((&mut later).now_or_never().is_none());
        let elsewhere = locks.acquire(4096..8192, Access::Exclusive).now_or_never();
        assert!(elsewhere.is_some());
        drop(first);
        let guard = exclusive.now_or_never().expect("first in line");
        assert!((&mut later).now_or_never().is_none());
        drop(guard);
        assert!(later.now_or_never().is_some());
        drop(elsewhere);
        assert!(locks.table().entries.is_empty());
    }

    #[test]
    fn the_last_guard_gives_back() {
        let locks = Arc::new(BlockLocks::default());
        let first = locks.acquire(0..512, Access::Exclusive).now_or_never().expect("free");
        let second = first.share();
        let mut next = locks.acquire(0..512, Access::Exclusive);
        drop(first);
        assert!((&mut next).now_or_never().is_none());
        drop(second);
        assert!(next.now_or_never().is_some());
    }

    #[test]
    fn a_dropped_wait_lets_others_pass() {
        let locks = Arc::new(BlockLocks::default());
        let first = locks.acquire(0..512, Access::Exclusive).now_or_never().expect("free");
        let abandoned = locks.acquire(0..1024, Access::Exclusive);
        let mut last = locks.acquire(512..1024, Access::Shared);
        assert!((&mut last).now_or_never().is_none());
        drop(abandoned);
        assert!(last.now_or_never().is_some());
        drop(first);
    }
}
