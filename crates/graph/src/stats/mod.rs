// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Statistics: accumulators without clocks or threads of their own, and the snapshots that QMP, OpenMetrics and `top`
//! render. Time is passed in, in nanoseconds from any fixed start.

mod counters;
mod histogram;
mod interval;
mod observed;

pub use counters::{Accounting, KindStats, NodeStats, RequestOutcome};
pub(crate) use counters::{LaneCounters, LaneSum, NodeCounters};
pub use histogram::{Histogram, HistogramSnapshot};
pub use interval::{Interval, IntervalStats, LatencyStats};
pub(crate) use observed::Observed;

use cowshed_types::{ErrorKind, Result};

/// Kinds of requests that are counted apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum IoKind {
    /// Reads.
    Read,
    /// Writes of data.
    Write,
    /// Writes of zeroes.
    WriteZeroes,
    /// Discards.
    Discard,
    /// Flushes.
    Flush,
}

/// Number of kinds.
pub const KINDS: usize = 5;

impl IoKind {
    /// All kinds.
    pub const ALL: [IoKind; KINDS] = [IoKind::Read, IoKind::Write, IoKind::WriteZeroes, IoKind::Discard, IoKind::Flush];

    /// The kind whose latencies its own are counted among: writes of zeroes are writes there, as in QEMU.
    pub const fn latency_kind(self) -> IoKind {
        match self {
            IoKind::WriteZeroes => IoKind::Write,
            kind => kind,
        }
    }

    /// The kinds whose latencies are kept apart.
    pub fn of_latencies() -> impl Iterator<Item = IoKind> {
        IoKind::ALL.into_iter().filter(|kind| kind.latency_kind() == *kind)
    }

    /// A short name: "read", "write", "write-zeroes", "discard", "flush".
    pub const fn name(self) -> &'static str {
        match self {
            IoKind::Read => "read",
            IoKind::Write => "write",
            IoKind::WriteZeroes => "write-zeroes",
            IoKind::Discard => "discard",
            IoKind::Flush => "flush",
        }
    }
}

/// The counts of the requests that went through one attachment (an export, a job).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AttachmentStats {
    /// Counters, by [`IoKind`] as index.
    pub kinds: [KindStats; KINDS],
    /// The requests that count for latencies and idle time.
    pub accounting: Accounting,
    /// End of the furthest byte written so far.
    pub highest_written_byte: u64,
    /// Time since the last request ended, in nanoseconds; `None` before the first one and while one runs.
    pub idle_ns: Option<u64>,
    /// Number of requests in flight now, waiting ones included.
    pub in_flight: u64,
    /// The user-chosen intervals, in the order they were given.
    pub intervals: Vec<IntervalStats>,
    /// The latency histograms that were asked for, by [`IoKind::latency_kind`] as index.
    pub histograms: [Option<HistogramSnapshot>; KINDS],
}

impl AttachmentStats {
    /// The counters of a kind.
    pub fn kind(&self, kind: IoKind) -> &KindStats {
        &self.kinds[kind as usize]
    }
}

/// The meaning of a result for the statistics.
pub(crate) fn outcome_of<T>(result: &Result<T>) -> RequestOutcome {
    match result {
        Ok(_) => RequestOutcome::Done,
        Err(error) => match error.kind() {
            ErrorKind::InvalidArgument | ErrorKind::ReadOnly => RequestOutcome::Invalid,
            _ => RequestOutcome::Failed,
        },
    }
}
