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

    /// Adds to the time of a kind. Only the lane's thread calls this.
    #[cold]
    pub(crate) fn add_time(&self, kind: IoKind, more_ns: u64) {
        bump(&self.kinds[kind as usize].total_ns, more_ns);
    }

    /// The counts so far.
    fn counts(&self) -> Counts {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let kinds = self.kinds.each_ref().map(|kind| KindStats {
            operations: load(&kind.operations),
            bytes: load(&kind.bytes),
            merged: load(&kind.merged),
            failed: load(&kind.failed),
            invalid: load(&kind.invalid),
            total_ns: load(&kind.total_ns),
        });
        let (highest_written_byte, last_end_ns) = (load(&self.highest_written_byte), load(&self.last_end_ns));
        Counts { kinds, highest_written_byte, last_end_ns }
    }
}

/// Counts as they are at some time.
#[derive(Clone, Debug, Default)]
pub(crate) struct Counts {
    /// By [`IoKind`] as index.
    pub(crate) kinds: [KindStats; KINDS],
    pub(crate) highest_written_byte: u64,
    /// When the last request ended; 0 before the first one.
    pub(crate) last_end_ns: u64,
}

impl Counts {
    fn add(&mut self, other: &Counts) {
        for (kind, more) in self.kinds.iter_mut().zip(&other.kinds) {
            kind.add(more);
        }
        self.highest_written_byte = self.highest_written_byte.max(other.highest_written_byte);
        self.last_end_ns = self.last_end_ns.max(other.last_end_ns);
    }
}

/// The sum of lanes. A lane may be part of several sums: its requests are counted once for all of them.
#[derive(Debug, Default)]
pub(crate) struct LaneSum(Mutex<Lanes>);

#[derive(Debug, Default)]
struct Lanes {
    running: Vec<Arc<LaneCounters>>,
    /// Of lanes that are gone.
    past: Counts,
}

impl LaneSum {
    fn lanes(&self) -> MutexGuard<'_, Lanes> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes in a lane, until [`LaneSum::fold`].
    pub(crate) fn add(&self, lane: &Arc<LaneCounters>) {
        self.lanes().running.push(Arc::clone(lane));
    }

    /// Keeps the counts of a lane that counts no more.
    pub(crate) fn fold(&self, gone: &Arc<LaneCounters>) {
        let mut lanes = self.lanes();
        let known = lanes.running.len();
        lanes.running.retain(|lane| !Arc::ptr_eq(lane, gone));
        if lanes.running.len() < known {
            lanes.past.add(&gone.counts());
        }
    }

    /// The counts so far. A lane is either running or past.
    pub(crate) fn counts(&self) -> Counts {
        let lanes = self.lanes();
        let mut counts = lanes.past.clone();
        lanes.running.iter().for_each(|lane| counts.add(&lane.counts()));
        counts
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

/// Column of [`NodeCounters`] that is stored, not added to.
const LAST_END_NS: usize = 5;

/// The counters of one node. Its own table has operations, bytes, failed, invalid, nanoseconds and the end of the last.
#[derive(Debug, Default)]
pub(crate) struct NodeCounters {
    /// Of requests that no lane counts for the node.
    table: ShardedCounters<KINDS, 6>,
    highest_written_byte: AtomicU64,
    /// Of queues that count for the node.
    lanes: LaneSum,
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

    /// The lanes that count requests for the node.
    pub(crate) fn lanes(&self) -> &LaneSum {
        &self.lanes
    }

    pub(crate) fn snapshot(&self) -> NodeStats {
        let own = Counts {
            kinds: self.table.sums().map(|[operations, bytes, failed, invalid, total_ns, _]| KindStats {
                operations,
                bytes,
                merged: 0,
                failed,
                invalid,
                total_ns,
            }),
            highest_written_byte: self.highest_written_byte.load(Ordering::Relaxed),
            last_end_ns: self.table.largest(LAST_END_NS),
        };
        let mut counts = self.lanes.counts();
        counts.add(&own);
        let Counts { kinds, highest_written_byte, last_end_ns } = counts;
        NodeStats { kinds, highest_written_byte, last_end_ns, ..NodeStats::default() }
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
        lane.add_time(IoKind::Write, 7);
        let mut counts = lane.counts();
        counts.add(&lane.counts());
        let write = KindStats { operations: 2, bytes: 1024, merged: 0, failed: 2, invalid: 2, total_ns: 574 };
        assert_eq!(counts.kinds[IoKind::Write as usize], write);
        assert_eq!(counts.kinds[IoKind::Read as usize].merged, 2);
        assert_eq!((counts.highest_written_byte, counts.last_end_ns), (4608, 400));
    }

    #[test]
    fn a_lane_counts_once_for_each_of_its_sums() {
        let (node, export) = (NodeCounters::default(), LaneSum::default());
        node.count_done(IoKind::Read, 1, 5, 7);
        let lanes = [Arc::new(LaneCounters::default()), Arc::new(LaneCounters::default())];
        for lane in &lanes {
            node.lanes().add(lane);
            export.add(lane);
        }
        lanes[0].count_done(IoKind::Read, 0, 10, 0, 8);
        lanes[0].count_done(IoKind::Write, 100, 20, 0, 9);
        lanes[1].count_done(IoKind::Read, 0, 100, 0, 10);
        for gone in [Some(&lanes[0]), Some(&lanes[1]), Some(&lanes[1]), None] {
            let stats = node.snapshot();
            assert_eq!((stats.kind(IoKind::Read).operations, stats.kind(IoKind::Read).bytes), (3, 111));
            assert_eq!((stats.kind(IoKind::Write).operations, stats.kind(IoKind::Write).bytes), (1, 20));
            assert_eq!(stats.kind(IoKind::Discard), &KindStats::default());
            assert_eq!(
                (stats.kind(IoKind::Read).total_ns, stats.highest_written_byte, stats.last_end_ns),
                (2, 120, 10)
            );
            let counts = export.counts();
            assert_eq!(counts.kinds[IoKind::Read as usize].bytes, 110);
            assert_eq!((counts.highest_written_byte, counts.last_end_ns), (120, 10));
            // An export may go before its node.
            gone.into_iter().for_each(|gone| export.fold(gone));
            gone.into_iter().for_each(|gone| node.lanes().fold(gone));
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
