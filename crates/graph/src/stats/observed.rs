// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The statistics that a user can ask for beside the counters: intervals and histograms.

use super::{Histogram, HistogramSnapshot, Interval, IntervalStats, IoKind, KINDS};
use cowshed_types::{Error, Result};

/// Most intervals of one export or node.
const MAX_INTERVALS: usize = 16;

/// Intervals and histograms of one export or node.
#[derive(Debug, Default)]
pub(crate) struct Observed {
    intervals: Vec<Interval>,
    histograms: [Option<Histogram>; KINDS],
}

impl Observed {
    /// True when there is nothing to keep.
    pub(crate) fn is_empty(&self) -> bool {
        self.intervals.is_empty() && self.histograms.iter().all(Option::is_none)
    }

    /// Keeps latencies over intervals of these lengths, in seconds, instead of those asked for before.
    pub(crate) fn set_intervals(&mut self, lengths_seconds: &[u64], now_ns: u64) -> Result<()> {
        if lengths_seconds.contains(&0) || lengths_seconds.len() > MAX_INTERVALS {
            let message = format!("up to {MAX_INTERVALS} intervals of at least one second can be kept");
            return Err(Error::invalid_argument(message).field("stats-intervals"));
        }
        let length_ns = |seconds: &u64| seconds.saturating_mul(1_000_000_000);
        self.intervals = lengths_seconds.iter().map(|length| Interval::new(length_ns(length), now_ns)).collect();
        Ok(())
    }

    /// Keeps a new latency histogram for requests of a kind, with these bounds in nanoseconds. Writes include those of
    /// zeroes. An empty list ends it.
    pub(crate) fn set_histogram(&mut self, kind: IoKind, bounds_ns: &[u64]) -> Result<()> {
        self.histograms[kind.latency_kind() as usize] =
            if bounds_ns.is_empty() { None } else { Some(Histogram::new(bounds_ns)?) };
        Ok(())
    }

    /// A request that ended at `end_ns`.
    pub(crate) fn record(&mut self, kind: IoKind, latency_ns: u64, end_ns: u64) {
        for interval in &mut self.intervals {
            interval.record(kind, latency_ns, end_ns);
        }
        if let Some(histogram) = &self.histograms[kind.latency_kind() as usize] {
            histogram.record(latency_ns);
        }
    }

    /// The present statistics of the intervals, in the order they were given.
    pub(crate) fn intervals(&self, now_ns: u64) -> Vec<IntervalStats> {
        self.intervals.iter().map(|interval| interval.snapshot(now_ns)).collect()
    }

    /// The histograms, by [`IoKind::latency_kind`] as index.
    pub(crate) fn histograms(&self) -> [Option<HistogramSnapshot>; KINDS] {
        self.histograms.each_ref().map(|histogram| histogram.as_ref().map(Histogram::snapshot))
    }
}
