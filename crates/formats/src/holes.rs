// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Holes of a file under tables. A large disk with little data has tables that were never written, and one question to the file
//! system passes over many of them.

use cowshed_graph::node::Node;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The part of the file that was asked about last.
#[derive(Default)]
pub(crate) struct Holes(Mutex<KnownHole>);

#[derive(Default)]
struct KnownHole {
    /// Counts the changes of tables.
    changes: u64,
    start: u64,
    end: u64,
    is_hole: bool,
}

impl Holes {
    /// Forgets the known holes: tables were written.
    pub(crate) fn forget(&self) {
        let mut known = self.lock();
        *known = KnownHole { changes: known.changes + 1, ..KnownHole::default() };
    }

    /// The end of the hole that all of the `len` bytes at `offset` are in. `None`: they must be read.
    pub(crate) async fn end_of(&self, node: &Node, offset: u64, len: u64) -> Option<u64> {
        let changes = {
            let known = self.lock();
            if known.start <= offset && offset < known.end {
                return (known.is_hole && offset + len <= known.end).then_some(known.end);
            }
            known.changes
        };
        let rest = node.size().checked_sub(offset).filter(|rest| *rest > 0)?;
        if node.shows_foreign_context() {
            return None;
        }
        let part = node.block_status_boxed(offset, rest, 1).await.ok()?.into_iter().next()?;
        let (end, is_hole) = (offset.checked_add(part.len)?, part.zero);
        let mut known = self.lock();
        if known.changes == changes {
            *known = KnownHole { changes, start: offset, end, is_hole };
        }
        (is_hole && offset.checked_add(len)? <= end).then_some(end)
    }

    fn lock(&self) -> MutexGuard<'_, KnownHole> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
