// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Latencies over intervals of a given length, up to the present moment.

use super::{IoKind, KINDS};

/// Parts that an interval is kept in: the report covers the interval but for at most one part.
const PARTS: u64 = 8;

/// Latencies of the requests of one kind in one interval, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LatencyStats {
    /// The shortest; 0 when there was no request.
    pub min_ns: u64,
    /// The longest.
    pub max_ns: u64,
    /// The average.
    pub average_ns: u64,
    /// Number of requests that ended in the interval.
    pub operations: u64,
    /// Requests in flight at the same time, on average, in thousandths.
    pub average_queue_depth_milli: u64,
}

/// The statistics of an interval at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IntervalStats {
    /// Its length in nanoseconds.
    pub length_ns: u64,
    /// By [`IoKind::latency_kind`] as index.
    pub kinds: [LatencyStats; KINDS],
}

impl IntervalStats {
    /// The latencies of a kind; those of writes cover writes of zeroes.
    pub fn kind(&self, kind: IoKind) -> &LatencyStats {
        &self.kinds[kind.latency_kind() as usize]
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    count: u64,
    total_ns: u64,
    min_ns: u64,
    max_ns: u64,
}

impl Sum {
    fn add(&mut self, other: &Sum) {
        if other.count == 0 {
            return;
        }
        self.min_ns = if self.count == 0 { other.min_ns } else { self.min_ns.min(other.min_ns) };
        self.max_ns = self.max_ns.max(other.max_ns);
        self.count += other.count;
        self.total_ns = self.total_ns.saturating_add(other.total_ns);
    }
}

/// One part of the interval.
#[derive(Clone, Copy, Debug, Default)]
struct Part {
    /// Number of the part since time 0.
    number: u64,
    kinds: [Sum; KINDS],
}

/// A sliding interval: a ring of parts, each an eighth of it long.
#[derive(Debug)]
pub struct Interval {
    length_ns: u64,
    part_ns: u64,
    started_ns: u64,
    parts: [Part; PARTS as usize],
}

impl Interval {
    /// Of `length_ns`, at least 8 ns, counting from `now_ns` on.
    pub fn new(length_ns: u64, now_ns: u64) -> Interval {
        let part_ns = (length_ns / PARTS).max(1);
        Interval { length_ns, part_ns, started_ns: now_ns, parts: [Part::default(); PARTS as usize] }
    }

    /// Counts a request that ended at `now_ns` after `latency_ns`.
    pub fn record(&mut self, kind: IoKind, latency_ns: u64, now_ns: u64) {
        let number = now_ns / self.part_ns;
        let part = &mut self.parts[(number % PARTS) as usize];
        if part.number > number {
            // A thread whose clock reading is a little older than the ring's turn.
            return;
        }
        if part.number != number {
            *part = Part { number, ..Part::default() };
        }
        part.kinds[kind.latency_kind() as usize].add(&Sum {
            count: 1,
            total_ns: latency_ns,
            min_ns: latency_ns,
            max_ns: latency_ns,
        });
    }

    /// The statistics at `now_ns`.
    pub fn snapshot(&self, now_ns: u64) -> IntervalStats {
        let newest = now_ns / self.part_ns;
        let oldest = (newest + 1).saturating_sub(PARTS);
        let mut sums = [Sum::default(); KINDS];
        for part in self.parts.iter().filter(|part| (oldest..=newest).contains(&part.number)) {
            for (sum, more) in sums.iter_mut().zip(&part.kinds) {
                sum.add(more);
            }
        }
        let covered_ns = now_ns.saturating_sub((oldest * self.part_ns).max(self.started_ns)).max(1);
        IntervalStats { length_ns: self.length_ns, kinds: sums.map(|sum| latencies(&sum, covered_ns)) }
    }
}

fn latencies(sum: &Sum, covered_ns: u64) -> LatencyStats {
    LatencyStats {
        min_ns: sum.min_ns,
        max_ns: sum.max_ns,
        average_ns: sum.total_ns.checked_div(sum.count).unwrap_or(0),
        operations: sum.count,
        // Little's law: time spent in requests over time passed.
        average_queue_depth_milli: (u128::from(sum.total_ns) * 1000 / u128::from(covered_ns))
            .try_into()
            .unwrap_or(u64::MAX),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn old_requests_leave_the_interval() {
        let start = 1000 * SECOND;
        let mut interval = Interval::new(8 * SECOND, start);
        interval.record(IoKind::Read, 5000, start);
        interval.record(IoKind::Read, 1000, start + SECOND);
        interval.record(IoKind::Write, 70, start + SECOND);
        let stats = interval.snapshot(start + 2 * SECOND);
        let read = stats.kind(IoKind::Read);
        assert_eq!((read.min_ns, read.max_ns, read.average_ns, read.operations), (1000, 5000, 3000, 2));
        assert_eq!(stats.kind(IoKind::Write).operations, 1);
        assert_eq!(stats.kind(IoKind::Flush), &LatencyStats::default());
        let later = interval.snapshot(start + 8 * SECOND);
        assert_eq!((later.kind(IoKind::Read).max_ns, later.kind(IoKind::Read).operations), (1000, 1));
        let idle = interval.snapshot(start + 100 * SECOND);
        assert_eq!(idle.kind(IoKind::Read), &LatencyStats::default());
    }

    #[test]
    fn writes_of_zeroes_are_writes() {
        let mut interval = Interval::new(8 * SECOND, 0);
        interval.record(IoKind::Write, 10, SECOND);
        interval.record(IoKind::WriteZeroes, 30, SECOND);
        interval.record(IoKind::Discard, 70, SECOND);
        let stats = interval.snapshot(2 * SECOND);
        let write = stats.kind(IoKind::Write);
        assert_eq!((write.min_ns, write.max_ns, write.average_ns, write.operations), (10, 30, 20, 2));
        assert_eq!(stats.kind(IoKind::WriteZeroes), write);
        assert_eq!((stats.kind(IoKind::Discard).average_ns, stats.kind(IoKind::Discard).operations), (70, 1));
    }

    #[test]
    fn queue_depth_is_time_in_requests_over_time_passed() {
        let mut interval = Interval::new(8 * SECOND, 0);
        for n in 1..=40u64 {
            // Two seconds each, twenty of them ending each second: forty at a time.
            interval.record(IoKind::Read, 2 * SECOND, n * SECOND / 20);
        }
        let stats = interval.snapshot(2 * SECOND);
        assert_eq!(stats.kind(IoKind::Read).average_queue_depth_milli, 40_000);
    }

    #[test]
    fn a_late_clock_reading_does_not_bring_old_parts_back() {
        let mut interval = Interval::new(8 * SECOND, 0);
        interval.record(IoKind::Read, 7, 20 * SECOND);
        interval.record(IoKind::Read, 9, 12 * SECOND);
        assert_eq!(interval.snapshot(20 * SECOND).kind(IoKind::Read).max_ns, 7);
    }
}
