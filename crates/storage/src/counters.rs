// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Counters that many threads add to, spread so that they don't share cache lines; and those of a file.

use cowshed_types::Sharded;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

/// A table of counters that many threads add to.
#[derive(Debug)]
pub struct ShardedCounters<const ROWS: usize, const COLUMNS: usize>(Sharded<[[AtomicU64; COLUMNS]; ROWS], 8>);

impl<const ROWS: usize, const COLUMNS: usize> Default for ShardedCounters<ROWS, COLUMNS> {
    fn default() -> Self {
        ShardedCounters(Sharded::of(|| std::array::from_fn(|_| std::array::from_fn(|_| AtomicU64::new(0)))))
    }
}

impl<const ROWS: usize, const COLUMNS: usize> ShardedCounters<ROWS, COLUMNS> {
    /// A row, for this thread to add to. A store could lose counts, because threads may share it.
    #[inline]
    pub fn row(&self, row: usize) -> &[AtomicU64; COLUMNS] {
        &self.0.mine()[row]
    }

    /// The sums over all threads.
    pub fn sums(&self) -> [[u64; COLUMNS]; ROWS] {
        let mut sums = [[0; COLUMNS]; ROWS];
        for shard in self.0.iter() {
            for (sums, counters) in sums.iter_mut().zip(shard) {
                for (sum, counter) in sums.iter_mut().zip(counters) {
                    *sum += counter.load(Ordering::Relaxed);
                }
            }
        }
        sums
    }

    /// The largest value that any thread has in this column: for columns that are stored, not added to.
    pub fn largest(&self, column: usize) -> u64 {
        let rows = self.0.iter().flat_map(|shard| shard.iter());
        rows.map(|row| row[column].load(Ordering::Relaxed)).max().unwrap_or(0)
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
    /// Number of operations that were carried out.
    pub operations: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Number of operations that failed.
    pub failed: u64,
    /// Time that all of them took, also those that failed, in nanoseconds.
    pub total_ns: u64,
}

/// The operations that reached a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileStats {
    kinds: [FileOpStats; 5],
    /// End of the furthest byte written or zeroed.
    pub highest_written_byte: u64,
    /// When the last operation ended, by the clock of [`crate::rt::now`]; 0 before the first one.
    pub last_end_ns: u64,
}

impl FileStats {
    /// The counters of a kind.
    pub fn of(&self, op: FileOp) -> &FileOpStats {
        &self.kinds[op as usize]
    }

    /// True where an operation may have changed the bytes.
    pub fn has_changes(&self) -> bool {
        let changes = [FileOp::Write, FileOp::Zero, FileOp::Discard].map(|op| self.of(op));
        changes.iter().any(|counted| counted.operations + counted.failed > 0)
    }
}

/// An operation on a file that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndedOp {
    /// The kind of operation.
    pub op: FileOp,
    /// Its first byte; 0 for barriers.
    pub offset: u64,
    /// First byte behind it; 0 for barriers.
    pub end: u64,
    /// It was carried out.
    pub done: bool,
    /// Its duration in nanoseconds.
    pub latency_ns: u64,
    /// When it ended, by the clock of [`crate::rt::now`].
    pub end_ns: u64,
}

/// Sees each operation of a file, on the operation's thread: must be quick.
pub trait FileObserver: Send + Sync {
    /// An operation has ended. The file has the length that it gave it.
    fn ended(&self, ended: &EndedOp);
}

/// Columns of the table of a file.
const OPERATIONS: usize = 0;
const BYTES: usize = 1;
const FAILED: usize = 2;
const TOTAL_NS: usize = 3;
const LAST_END_NS: usize = 4;

/// The counters of one file.
#[derive(Default)]
pub(crate) struct FileCounters {
    table: ShardedCounters<5, 5>,
    highest_written_byte: AtomicU64,
    /// There is an observer.
    is_observed: AtomicBool,
    /// Each with the key of its owner.
    observers: RwLock<Vec<(u64, Arc<dyn FileObserver>)>>,
}

impl FileCounters {
    /// The start of an operation that will be counted. It is by the clock itself where the file has an observer, else
    /// by that of the executor's round.
    #[inline]
    pub(crate) fn start_ns(&self) -> u64 {
        if self.is_observed.load(Ordering::Relaxed) { crate::rt::now_ns() } else { crate::rt::round_now_ns() }
    }

    /// Counts an operation that began at `start_ns`, as [`FileCounters::start_ns`] gave it.
    #[inline]
    pub(crate) fn count(&self, op: FileOp, offset: u64, len: u64, start_ns: u64, done: bool) {
        // One look at the flag, and nothing else without an observer.
        if self.is_observed.load(Ordering::Relaxed) {
            return self.count_observed(op, offset, len, start_ns, done);
        }
        self.count_until(op, offset, len, start_ns, crate::rt::round_now_ns(), done);
    }

    #[cold]
    fn count_observed(&self, op: FileOp, offset: u64, len: u64, start_ns: u64, done: bool) {
        let end_ns = crate::rt::now_ns();
        self.count_until(op, offset, len, start_ns, end_ns, done);
        let latency_ns = end_ns.saturating_sub(start_ns);
        self.tell(&EndedOp { op, offset, end: offset.saturating_add(len), done, latency_ns, end_ns });
    }

    /// Shows observers a write that failed and isn't counted: a part of it may have been carried out.
    #[cold]
    pub(crate) fn tell_tried(&self, offset: u64, len: u64, start_ns: u64) {
        let end_ns = crate::rt::now_ns();
        let latency_ns = end_ns.saturating_sub(start_ns);
        let end = offset.saturating_add(len);
        self.tell(&EndedOp { op: FileOp::Write, offset, end, done: false, latency_ns, end_ns });
    }

    #[inline]
    fn count_until(&self, op: FileOp, offset: u64, len: u64, start_ns: u64, end_ns: u64, done: bool) {
        let latency_ns = end_ns.saturating_sub(start_ns);
        let end = offset.saturating_add(len);
        let row = self.table.row(op as usize);
        row[TOTAL_NS].fetch_add(latency_ns, Ordering::Relaxed);
        row[LAST_END_NS].store(end_ns, Ordering::Relaxed);
        if done {
            row[OPERATIONS].fetch_add(1, Ordering::Relaxed);
            row[BYTES].fetch_add(len, Ordering::Relaxed);
            if matches!(op, FileOp::Write | FileOp::Zero) && self.highest_written_byte.load(Ordering::Relaxed) < end {
                self.highest_written_byte.fetch_max(end, Ordering::Relaxed);
            }
        } else {
            row[FAILED].fetch_add(1, Ordering::Relaxed);
        }
    }

    fn tell(&self, ended: &EndedOp) {
        // Told without the lock: an observer may leave.
        let observers = self.observers.read().unwrap_or_else(PoisonError::into_inner).clone();
        observers.iter().for_each(|(_, observer)| observer.ended(ended));
    }

    /// Has each operation shown to `observer` from now on, instead of to the one before that had this key; `None`: to
    /// none.
    pub(crate) fn observe(&self, key: u64, observer: Option<Arc<dyn FileObserver>>) {
        let mut observers = self.observers.write().unwrap_or_else(PoisonError::into_inner);
        observers.retain(|(other, _)| *other != key);
        observers.extend(observer.map(|observer| (key, observer)));
        self.is_observed.store(!observers.is_empty(), Ordering::SeqCst);
    }

    pub(crate) fn snapshot(&self) -> FileStats {
        let kinds = self.table.sums().map(|sums| FileOpStats {
            operations: sums[OPERATIONS],
            bytes: sums[BYTES],
            failed: sums[FAILED],
            total_ns: sums[TOTAL_NS],
        });
        FileStats {
            kinds,
            highest_written_byte: self.highest_written_byte.load(Ordering::Relaxed),
            last_end_ns: self.table.largest(LAST_END_NS),
        }
    }
}

impl std::fmt::Debug for FileCounters {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("FileCounters").field(&self.snapshot()).finish()
    }
}
