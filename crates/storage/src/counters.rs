// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Counters that many threads add to, spread so that they don't share cache lines; and those of a file.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Threads share a shard when there are more of them than shards.
const SHARDS: usize = 8;

#[derive(Debug)]
#[repr(align(64))]
struct Shard<const ROWS: usize, const COLUMNS: usize>([[AtomicU64; COLUMNS]; ROWS]);

/// A table of counters.
#[derive(Debug)]
pub struct ShardedCounters<const ROWS: usize, const COLUMNS: usize>([Shard<ROWS, COLUMNS>; SHARDS]);

impl<const ROWS: usize, const COLUMNS: usize> Default for ShardedCounters<ROWS, COLUMNS> {
    fn default() -> Self {
        let zeroes = |_| Shard(std::array::from_fn(|_| std::array::from_fn(|_| AtomicU64::new(0))));
        ShardedCounters(std::array::from_fn(zeroes))
    }
}

/// The shard of this thread.
#[inline]
fn shard_of_thread() -> usize {
    thread_local! {
        /// `SHARDS` before the first request.
        static SHARD: Cell<usize> = const { Cell::new(SHARDS) };
    }
    #[cold]
    fn choose() -> usize {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let shard = NEXT.fetch_add(1, Ordering::Relaxed) % SHARDS;
        SHARD.set(shard);
        shard
    }
    match SHARD.get() {
        shard if shard < SHARDS => shard,
        _ => choose(),
    }
}

impl<const ROWS: usize, const COLUMNS: usize> ShardedCounters<ROWS, COLUMNS> {
    /// A row, for this thread to add to (never to store: threads may share it).
    #[inline]
    pub fn row(&self, row: usize) -> &[AtomicU64; COLUMNS] {
        &self.0[shard_of_thread()].0[row]
    }

    /// What all threads have added up.
    pub fn sums(&self) -> [[u64; COLUMNS]; ROWS] {
        let mut sums = [[0; COLUMNS]; ROWS];
        for shard in &self.0 {
            for (sums, counters) in sums.iter_mut().zip(&shard.0) {
                for (sum, counter) in sums.iter_mut().zip(counters) {
                    *sum += counter.load(Ordering::Relaxed);
                }
            }
        }
        sums
    }
}

/// Kinds of operations on a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileOp {
    /// Reads.
    Read,
    /// Writes, copies inside of the kernel included.
    Write,
    /// Zeroed ranges.
    Zero,
    /// Ranges given back.
    Discard,
    /// Barriers.
    Sync,
}

/// Counters of one kind of operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileOpStats {
    /// Operations that were carried out.
    pub operations: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Operations that failed.
    pub failed: u64,
}

/// What reached a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileStats {
    kinds: [FileOpStats; 5],
    /// End of the furthest byte written or zeroed.
    pub highest_written_byte: u64,
}

impl FileStats {
    /// The counters of a kind.
    pub fn of(&self, op: FileOp) -> &FileOpStats {
        &self.kinds[op as usize]
    }
}

/// The counters of one file.
#[derive(Debug, Default)]
pub(crate) struct FileCounters {
    table: ShardedCounters<5, 3>,
    highest_written_byte: AtomicU64,
}

impl FileCounters {
    #[inline]
    pub(crate) fn count(&self, op: FileOp, offset: u64, len: u64, done: bool) {
        if !done {
            return self.count_failed(op);
        }
        let [operations, bytes, _] = self.table.row(op as usize);
        operations.fetch_add(1, Ordering::Relaxed);
        bytes.fetch_add(len, Ordering::Relaxed);
        let end = offset.saturating_add(len);
        if matches!(op, FileOp::Write | FileOp::Zero) && self.highest_written_byte.load(Ordering::Relaxed) < end {
            self.highest_written_byte.fetch_max(end, Ordering::Relaxed);
        }
    }

    #[cold]
    fn count_failed(&self, op: FileOp) {
        self.table.row(op as usize)[2].fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn snapshot(&self) -> FileStats {
        FileStats {
            kinds: self.table.sums().map(|[operations, bytes, failed]| FileOpStats { operations, bytes, failed }),
            highest_written_byte: self.highest_written_byte.load(Ordering::Relaxed),
        }
    }
}
