// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The writes to an encrypted image that are under way. A write of part of a sector reads the sector and writes it
//! back: any other write there meanwhile would be lost. So such a write has its sectors alone; writes of whole sectors
//! don't mind each other.

use super::SECTOR_BYTES;
use crate::events::Events;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The writes that run or wait, in the order in which they came.
#[derive(Default)]
pub struct Writers {
    state: Mutex<WritersState>,
    changes: Events,
}

#[derive(Default)]
struct WritersState {
    next_ticket: u64,
    writes: Vec<Write>,
}

struct Write {
    ticket: u64,
    /// Whole sectors, in bytes.
    range: Range<u64>,
    is_alone: bool,
}

impl Write {
    /// Both can't run at once.
    fn excludes(&self, other: &Write) -> bool {
        let meet = self.range.start < other.range.end && other.range.start < self.range.end;
        meet && (self.is_alone || other.is_alone)
    }
}

/// A write that may run, until it is dropped.
pub struct Writing<'a> {
    writers: &'a Writers,
    ticket: u64,
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        self.writers.lock().writes.retain(|write| write.ticket != self.ticket);
        self.writers.changes.notify();
    }
}

impl Writers {
    fn lock(&self) -> MutexGuard<'_, WritersState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until every earlier write that can't run at the same time is over.
    pub async fn enter(&self, offset: u64, len: u64) -> Writing<'_> {
        let end = offset.saturating_add(len);
        let is_alone = !offset.is_multiple_of(SECTOR_BYTES) || !end.is_multiple_of(SECTOR_BYTES);
        let range = offset / SECTOR_BYTES * SECTOR_BYTES..end.div_ceil(SECTOR_BYTES).saturating_mul(SECTOR_BYTES);
        let ticket = {
            let mut state = self.lock();
            let ticket = state.next_ticket;
            state.next_ticket += 1;
            state.writes.push(Write { ticket, range, is_alone });
            ticket
        };
        // It takes its place in the row back when the future is dropped.
        let writing = Writing { writers: self, ticket };
        loop {
            let seen = self.changes.now();
            if self.may_run(ticket) {
                return writing;
            }
            self.changes.wait(seen).await;
        }
    }

    fn may_run(&self, ticket: u64) -> bool {
        let state = self.lock();
        let own = state.writes.iter().find(|write| write.ticket == ticket);
        own.is_none_or(|own| state.writes.iter().all(|other| other.ticket >= ticket || !other.excludes(own)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cowshed_storage::rt;
    use std::cell::RefCell;
    use std::rc::Rc;

    #[test]
    fn parts_of_a_sector_wait_and_whole_sectors_dont() {
        let writers = Rc::new(Writers::default());
        let log = Rc::new(RefCell::new(Vec::new()));
        rt::block_on(async {
            let first = writers.enter(100, 20).await;
            let other_sector = writers.enter(512, 512).await;
            let also_there = writers.enter(0x200, 1024).await;
            let mut tasks = Vec::new();
            for (name, offset, len) in [("whole", 0, 512), ("part", 300, 1), ("late whole", 0, 512), ("far", 4096, 1)] {
                let (writers, log) = (Rc::clone(&writers), Rc::clone(&log));
                tasks.push(rt::spawn(async move {
                    let writing = writers.enter(offset, len).await;
                    log.borrow_mut().push(name);
                    // The others get their turn meanwhile.
                    rt::sleep(std::time::Duration::from_millis(1)).await;
                    drop(writing);
                }));
            }
            // Nothing else enters, however long this takes.
            rt::sleep(std::time::Duration::from_millis(20)).await;
            assert_eq!(*log.borrow(), ["far"]);
            drop((first, other_sector, also_there));
            for task in tasks {
                task.await;
            }
        });
        assert_eq!(*log.borrow(), ["far", "whole", "part", "late whole"]);
        assert!(writers.lock().writes.is_empty());
    }
}
