// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Space for entries before their blocks are written. A table is a hole of the file as a rule, and a flush that finds no
//! space for an entry could never succeed again.

use cowshed_storage::File;
use cowshed_types::{ErrorKind, Result};
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// Space is asked for in parts of this many bytes.
const PART_BYTES: u64 = 64 << 10;
/// File systems keep files in blocks of this length, or of a divisor.
const BLOCK_BYTES: u64 = 4096;

/// The space that is there for certain.
#[derive(Default)]
pub(super) struct EntryRoom {
    /// From, and to.
    parts: Mutex<HashSet<(u64, u64)>>,
    /// The file system reserves no space.
    is_unsupported: AtomicBool,
}

impl EntryRoom {
    /// Makes byte `at` of the file have space, with the bytes that follow in the table from `start` to `end`.
    pub(super) async fn ensure(&self, file: &File, at: u64, (start, end): (u64, u64)) -> Result<()> {
        let part = at / PART_BYTES * PART_BYTES;
        self.reserve(file, (part.max(start), part.saturating_add(PART_BYTES).min(end))).await
    }

    /// The same for a range, whole.
    pub(super) async fn reserve(&self, file: &File, (start, end): (u64, u64)) -> Result<()> {
        let start = start / BLOCK_BYTES * BLOCK_BYTES;
        let end = end.next_multiple_of(BLOCK_BYTES).min(file.len());
        let is_there = self.is_unsupported.load(Ordering::Relaxed) || self.parts().contains(&(start, end));
        if is_there || start >= end || file.is_device() {
            return Ok(());
        }
        match file.allocate(start, end - start).await {
            Err(error) if error.kind() == ErrorKind::Unsupported => self.is_unsupported.store(true, Ordering::Relaxed),
            done => {
                done?;
                self.parts().insert((start, end));
            }
        }
        Ok(())
    }

    fn parts(&self) -> std::sync::MutexGuard<'_, HashSet<(u64, u64)>> {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
