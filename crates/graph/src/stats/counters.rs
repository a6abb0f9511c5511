// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Plain counters, spread so that threads don't share cache lines.

use super::{HistogramSnapshot, IntervalStats, IoKind, KINDS};
use cowshed_storage::{FileOp, FileOpStats, FileStats, ShardedCounters};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The end of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestOutcome {
    /// It was carried out.
    Done,
    /// It was carried out and failed.
    Failed,
    /// It asked for something that can't be: outside of the disk, or a write where only reading is allowed.
    Invalid,
}

/// The requests that weren't carried out and count for latencies and idle time (QEMU's `stats-account-failed` and
/// `stats-account-invalid`). They are counted as failed and invalid in any case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Accounting {
    /// Failed requests: for latencies and for idle time.
    pub failed: bool,
    /// Invalid ones: for idle time.
    pub invalid: bool,
}

impl Default for Accounting {
    fn default() -> Self {
        Accounting { failed: true, invalid: true }
    }
}

/// Counters of one kind of request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KindStats {
    /// Number of requests that were carried out.
    pub operations: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Number of requests that were joined with another one before they got here.
    pub merged: u64,
    /// Number of requests that failed.
    pub failed: u64,
    /// Number of requests that were refused as impossible.
    pub invalid: u64,
    /// Time that the requests took, all together, in nanoseconds: those carried out, and failed ones where they count
    /// ([`Accounting::failed`]).
    pub total_ns: u64,
}

impl KindStats {
    pub(crate) fn add(&mut self, other: &KindStats) {
        self.operations += other.operations;
        self.bytes += other.bytes;
        self.merged += other.merged;
        self.failed += other.failed;
        self.invalid += other.invalid;
        self.total_ns += other.total_ns;
    }
}

#[derive(Debug, Default)]
struct LaneKind {
    operations: AtomicU64,
    bytes: AtomicU64,
    merged: AtomicU64,
    failed: AtomicU64,
    invalid: AtomicU64,
    total_ns: AtomicU64,
}

/// Adds without a locked instruction: only one thread writes a lane.
#[inline]
fn bump(counter: &AtomicU64, by: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(by), Ordering::Relaxed);
}

/// Counters that one thread writes and any thread reads.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(crate) struct LaneCounters {
    kinds: [LaneKind; KINDS],
    highest_written_byte: AtomicU64,
    last_end_ns: AtomicU64,
}

impl LaneCounters {
    /// Counts a request that was carried out in `took_ns`. Only the lane's thread calls this.
    #[inline]
    pub(crate) fn count_done(&self, kind: IoKind, offset: u64, len: u64, took_ns: u64, end_ns: u64) {
        let counters = &self.kinds[kind as usize];
        bump(&counters.operations, 1);
        bump(&counters.bytes, len);
        bump(&counters.total_ns, took_ns);
        let end = offset.saturating_add(len);
        if matches!(kind, IoKind::Write | IoKind::WriteZeroes)
            && end > self.highest_written_byte.load(Ordering::Relaxed)
        {
            self.highest_written_byte.store(end, Ordering::Relaxed);
        }
        self.last_end_ns.store(end_ns, Ordering::Relaxed);
    }

    /// Counts a request that was not. With `latency_ns` it counts as a use of the disk all the same, and for the total
    /// time. Only the lane's thread calls this.
    #[cold]
    pub(crate) fn count_refused(&self, kind: IoKind, outcome: RequestOutcome, latency_ns: Option<u64>, end_ns: u64) {
        let counters = &self.kinds[kind as usize];
        match outcome {
            RequestOutcome::Done => {}
            RequestOutcome::Failed => bump(&counters.failed, 1),
            RequestOutcome::Invalid => bump(&counters.invalid, 1),
        }
        if let Some(latency_ns) = latency_ns {
            bump(&counters.total_ns, latency_ns);
            self.last_end_ns.store(end_ns, Ordering::Relaxed);
        }
    }

    /// Counts a request that became part of another one. Only the lane's thread calls this.
    pub(crate) fn count_merged(&self, kind: IoKind) {
        bump(&self.kinds[kind as usize].merged, 1);
    }

    /// Adds the counters to `into`.
    pub(crate) fn collect(&self, into: &mut [KindStats; KINDS]) {
        for (kind, sum) in self.kinds.iter().zip(into) {
            sum.add(&KindStats {
                operations: kind.operations.load(Ordering::Relaxed),
                bytes: kind.bytes.load(Ordering::Relaxed),
                merged: kind.merged.load(Ordering::Relaxed),
                failed: kind.failed.load(Ordering::Relaxed),
                invalid: kind.invalid.load(Ordering::Relaxed),
                total_ns: kind.total_ns.load(Ordering::Relaxed),
            });
        }
    }

    pub(crate) fn highest_written_byte(&self) -> u64 {
        self.highest_written_byte.load(Ordering::Relaxed)
    }

    /// When the last request ended; 0 before the first one.
    pub(crate) fn last_end_ns(&self) -> u64 {
        self.last_end_ns.load(Ordering::Relaxed)
    }
}

/// The counts of the requests that reached one node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeStats {
    /// Counters, by [`IoKind`] as index; `merged` stays 0: requests are joined before they reach a node.
    pub kinds: [KindStats; KINDS],
    /// End of the furthest byte written so far.
    pub highest_written_byte: u64,
    /// When the last request ended, by the clock of [`cowshed_storage::rt::now`]; 0 before the first one.
    pub last_end_ns: u64,
    /// The user-chosen intervals, in the order they were given.
    pub intervals: Vec<IntervalStats>,
    /// The latency histograms that were asked for, by [`IoKind::latency_kind`] as index.
    pub histograms: [Option<HistogramSnapshot>; KINDS],
}

impl NodeStats {
    /// The counters of a kind.
    pub fn kind(&self, kind: IoKind) -> &KindStats {
        &self.kinds[kind as usize]
    }

    /// The operations of a file take the place of those of its node: formats go to their files directly. Only requests
    /// that the node refused never got there.
    pub(crate) fn with_file(mut self, file: &FileStats) -> NodeStats {
        let ops = [
            (IoKind::Read, FileOp::Read),
            (IoKind::Write, FileOp::Write),
            (IoKind::WriteZeroes, FileOp::Zero),
            (IoKind::Discard, FileOp::Discard),
            (IoKind::Flush, FileOp::Sync),
        ];
        for (kind, op) in ops {
            let FileOpStats { operations, bytes, failed, total_ns } = *file.of(op);
            let invalid = self.kinds[kind as usize].invalid;
            self.kinds[kind as usize] = KindStats { operations, bytes, merged: 0, failed, invalid, total_ns };
        }
        self.highest_written_byte = file.highest_written_byte;
        self.last_end_ns = file.last_end_ns;
        self
    }
}

/// Reads and writes of one queue that went past a node which counts them all the same. One thread adds, any reads.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(crate) struct PassedCounters {
    /// Operations, bytes and nanoseconds; of reads, and of writes.
    sums: [[AtomicU64; 3]; 2],
    last_end_ns: AtomicU64,
}

impl PassedCounters {
    /// Counts a read or a write that was carried out in `took_ns`. Only the queue's thread calls this.
    #[inline]
    pub(crate) fn count(&self, kind: IoKind, len: u64, took_ns: u64, end_ns: u64) {
        let [operations, bytes, total_ns] = &self.sums[usize::from(kind != IoKind::Read)];
        bump(operations, 1);
        bump(bytes, len);
        bump(total_ns, took_ns);
        self.last_end_ns.store(end_ns, Ordering::Relaxed);
    }

    /// The sums of a kind: operations, bytes and nanoseconds.
    fn sums(&self, kind: IoKind) -> [u64; 3] {
        match kind {
            IoKind::Read => self.sums[0].each_ref().map(|counter| counter.load(Ordering::Relaxed)),
            IoKind::Write => self.sums[1].each_ref().map(|counter| counter.load(Ordering::Relaxed)),
            _ => [0; 3],
        }
    }
}

/// Column of [`NodeCounters`] that is stored, not added to.
const LAST_END_NS: usize = 5;

/// The counters of one node: operations, bytes, failed, invalid, nanoseconds, end of the last.
#[derive(Debug, Default)]
pub(crate) struct NodeCounters {
    table: ShardedCounters<KINDS, 6>,
    highest_written_byte: AtomicU64,
    /// Of queues whose requests go past the node.
    passed: Mutex<Vec<Arc<PassedCounters>>>,
}

impl NodeCounters {
    /// Counts a request that was carried out.
    #[inline]
    pub(crate) fn count_done(&self, kind: IoKind, len: u64, start_ns: u64, end_ns: u64) {
        let [operations, bytes, _, _, total_ns, last_end_ns] = self.table.row(kind as usize);
        operations.fetch_add(1, Ordering::Relaxed);
        bytes.fetch_add(len, Ordering::Relaxed);
        total_ns.fetch_add(end_ns.saturating_sub(start_ns), Ordering::Relaxed);
        last_end_ns.store(end_ns, Ordering::Relaxed);
    }

    /// Counts a request that was not; one that failed took `latency_ns`.
    #[cold]
    pub(crate) fn count_refused(&self, kind: IoKind, outcome: RequestOutcome, latency_ns: u64, end_ns: u64) {
        let [_, _, failed, invalid, total_ns, last_end_ns] = self.table.row(kind as usize);
        match outcome {
            RequestOutcome::Done => return,
            RequestOutcome::Failed => failed.fetch_add(1, Ordering::Relaxed),
            RequestOutcome::Invalid => invalid.fetch_add(1, Ordering::Relaxed),
        };
        total_ns.fetch_add(latency_ns, Ordering::Relaxed);
        last_end_ns.store(end_ns, Ordering::Relaxed);
    }

    /// Bytes up to `end` were written.
    #[inline]
    pub(crate) fn note_written(&self, end: u64) {
        if self.highest_written_byte.load(Ordering::Relaxed) < end {
            self.highest_written_byte.fetch_max(end, Ordering::Relaxed);
        }
    }

    /// Counters for a queue whose requests go past the node, until [`NodeCounters::fold`].
    pub(crate) fn add_passed(&self) -> Arc<PassedCounters> {
        let counters = Arc::new(PassedCounters::default());
        self.passed().push(Arc::clone(&counters));
        counters
    }

    /// Takes over the counts of a queue that is gone.
    pub(crate) fn fold(&self, gone: &Arc<PassedCounters>) {
        let mut passed = self.passed();
        passed.retain(|known| !Arc::ptr_eq(known, gone));
        for kind in [IoKind::Read, IoKind::Write] {
            let [operations, bytes, total_ns] = gone.sums(kind);
            let [all_operations, all_bytes, _, _, all_ns, last_end_ns] = self.table.row(kind as usize);
            all_operations.fetch_add(operations, Ordering::Relaxed);
            all_bytes.fetch_add(bytes, Ordering::Relaxed);
            all_ns.fetch_add(total_ns, Ordering::Relaxed);
            last_end_ns.fetch_max(gone.last_end_ns.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }

    fn passed(&self) -> MutexGuard<'_, Vec<Arc<PassedCounters>>> {
        self.passed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn snapshot(&self) -> NodeStats {
        // A queue's counters are either still there or folded.
        let passed = self.passed();
        let sums = self.table.sums();
        let kinds = IoKind::ALL.map(|kind| {
            let [mut operations, mut bytes, failed, invalid, mut total_ns, _] = sums[kind as usize];
            for [more_operations, more_bytes, more_ns] in passed.iter().map(|counters| counters.sums(kind)) {
                operations += more_operations;
                bytes += more_bytes;
                total_ns += more_ns;
            }
            KindStats { operations, bytes, merged: 0, failed, invalid, total_ns }
        });
        let passed_ends = passed.iter().map(|counters| counters.last_end_ns.load(Ordering::Relaxed));
        NodeStats {
            kinds,
            highest_written_byte: self.highest_written_byte.load(Ordering::Relaxed),
            last_end_ns: passed_ends.fold(self.table.largest(LAST_END_NS), u64::max),
            ..NodeStats::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_count_outcomes_apart() {
        let lane = LaneCounters::default();
        lane.count_done(IoKind::Write, 4096, 512, 250, 350);
        lane.count_refused(IoKind::Write, RequestOutcome::Failed, Some(30), 400);
        lane.count_refused(IoKind::Write, RequestOutcome::Invalid, None, 450);
        lane.count_merged(IoKind::Read);
        let mut kinds = [KindStats::default(); KINDS];
        lane.collect(&mut kinds);
        lane.collect(&mut kinds);
        let write = KindStats { operations: 2, bytes: 1024, merged: 0, failed: 2, invalid: 2, total_ns: 560 };
        assert_eq!(kinds[IoKind::Write as usize], write);
        assert_eq!(kinds[IoKind::Read as usize].merged, 2);
        assert_eq!((lane.highest_written_byte(), lane.last_end_ns()), (4608, 400));
    }

    #[test]
    fn requests_past_a_node_are_counted_once() {
        let node = NodeCounters::default();
        node.count_done(IoKind::Read, 1, 5, 7);
        let (queue, other) = (node.add_passed(), node.add_passed());
        queue.count(IoKind::Read, 10, 0, 8);
        queue.count(IoKind::Write, 20, 0, 9);
        other.count(IoKind::Read, 100, 0, 10);
        for gone in [Some(&queue), Some(&other), None] {
            let stats = node.snapshot();
            assert_eq!((stats.kind(IoKind::Read).operations, stats.kind(IoKind::Read).bytes), (3, 111));
            assert_eq!((stats.kind(IoKind::Write).operations, stats.kind(IoKind::Write).bytes), (1, 20));
            assert_eq!(stats.kind(IoKind::Discard), &KindStats::default());
            assert_eq!(stats.kind(IoKind::Read).total_ns, 2);
            assert!(stats.last_end_ns > 0);
            gone.into_iter().for_each(|gone| node.fold(gone));
        }
    }

    #[test]
    fn counts_of_many_threads_are_all_seen() {
        let node = NodeCounters::default();
        std::thread::scope(|scope| {
            for _ in 0..12 {
                scope.spawn(|| (0..1000).for_each(|_| node.count_done(IoKind::Read, 3, 0, 1)));
            }
        });
        assert_eq!(
            (node.snapshot().kind(IoKind::Read).operations, node.snapshot().kind(IoKind::Read).bytes),
            (12000, 36000)
        );
    }
}
