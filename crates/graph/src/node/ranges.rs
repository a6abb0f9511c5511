// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Ranges of bytes that one request alone may touch.

use crate::events::Events;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The ranges that are taken.
#[derive(Default)]
pub(crate) struct Ranges {
    busy: Mutex<BTreeMap<u64, u64>>,
    changes: Events,
}

/// A range that is taken, until it is dropped.
pub(crate) struct Claim {
    ranges: Arc<Ranges>,
    start: u64,
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.ranges.busy().remove(&self.start);
        self.ranges.changes.notify();
    }
}

impl Ranges {
    fn busy(&self) -> MutexGuard<'_, BTreeMap<u64, u64>> {
        self.busy.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until no part of the range (bytes) is taken, and takes it.
    pub(crate) async fn claim(self: &Arc<Self>, start: u64, len: u64) -> Claim {
        let end = start.saturating_add(len.max(1));
        loop {
            let seen = self.changes.now();
            {
                let mut busy = self.busy();
                let before = busy.range(..end).next_back();
                if before.is_none_or(|(_, other_end)| *other_end <= start) {
                    busy.insert(start, end);
                    return Claim { ranges: Arc::clone(self), start };
                }
            }
            self.changes.wait(seen).await;
        }
    }
}

/// The ranges that are read, several at the same time.
#[derive(Default)]
pub(crate) struct Readers {
    /// Number of ranges: without any, the lock isn't taken.
    count: AtomicUsize,
    list: Mutex<ReaderList>,
    changes: Events,
}

#[derive(Default)]
struct ReaderList {
    next_id: u64,
    ranges: BTreeMap<u64, Range<u64>>,
}

/// A reader, until dropped.
pub(crate) struct Reading {
    readers: Arc<Readers>,
    id: u64,
}

impl Reading {
    /// It goes no further than `end` (bytes).
    pub(crate) fn up_to(self, end: u64) -> Reading {
        if let Some(range) = self.readers.list().ranges.get_mut(&self.id) {
            range.end = range.end.min(end);
        }
        self
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        self.readers.list().ranges.remove(&self.id);
        self.readers.count.fetch_sub(1, Ordering::SeqCst);
        self.readers.changes.notify();
    }
}

impl Readers {
    fn list(&self) -> MutexGuard<'_, ReaderList> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a reader of a range of bytes.
    pub(crate) fn enter(self: &Arc<Self>, start: u64, end: u64) -> Reading {
        self.count.fetch_add(1, Ordering::SeqCst);
        let mut list = self.list();
        let id = list.next_id;
        list.next_id += 1;
        list.ranges.insert(id, start..end);
        drop(list);
        Reading { readers: Arc::clone(self), id }
    }

    /// Waits until the present readers of a range of bytes have left.
    pub(crate) async fn left(&self, offset: u64, len: u64) {
        if self.count.load(Ordering::SeqCst) == 0 {
            return;
        }
        let end = offset.saturating_add(len);
        let touches = |range: &Range<u64>| range.start < end && offset < range.end;
        let before = self.list().next_id;
        loop {
            let seen = self.changes.now();
            if !self.list().ranges.range(..before).any(|(_, range)| touches(range)) {
                return;
            }
            self.changes.wait(seen).await;
        }
    }
}
