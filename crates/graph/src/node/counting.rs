// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The counting of requests. A request that a queue hands to a node is counted once, in the queue's lane, where that is the same for
//! both. The node itself counts those of other nodes, and all that were not carried out.

use super::{Corruption, DetectZeroes, Node};
use crate::stats::{IoKind, LaneSum, RequestOutcome, outcome_of};
use cowshed_storage::rt;
use cowshed_types::{Error, ErrorKind, Result};
use std::sync::atomic::Ordering;

/// The place where a request is counted that was carried out. The node counts one that wasn't, in any case.
#[derive(Clone, Copy)]
pub(crate) enum Counting {
    /// The node.
    Node,
    /// The lane of its queue, for the node and for the attachment. It reached the node at this time, by the clock of the
    /// executor's rounds.
    Lane(u64),
}

/// A [`Counting`], or [`ByNode`] where the caller knows that it is no other: such a request looks for no lane.
pub(crate) trait CountedBy: Copy + 'static {
    /// True where a lane may count the request.
    const MAY_BE_LANE: bool;

    fn counting(self) -> Counting;
}

/// [`Counting::Node`], known when the program is built.
#[derive(Clone, Copy)]
pub(crate) struct ByNode;

impl CountedBy for ByNode {
    const MAY_BE_LANE: bool = false;

    #[inline]
    fn counting(self) -> Counting {
        Counting::Node
    }
}

impl CountedBy for Counting {
    const MAY_BE_LANE: bool = true;

    #[inline]
    fn counting(self) -> Counting {
        self
    }
}

impl Node {
    /// The lanes that count requests for this node.
    pub(crate) fn lanes(&self) -> &LaneSum {
        self.counters.lanes()
    }

    /// True while a read or a write of a queue is one request of this node, too, of the same kind and length. So a lane can count it
    /// for both.
    #[inline]
    pub(crate) fn is_counted_in_lanes<const WRITES: bool>(&self) -> bool {
        let is_one =
            !WRITES || (self.settings.detect_zeroes() == DetectZeroes::Off && !self.settings.is_writethrough());
        is_one && !self.is_watched()
    }

    /// The time: by the clock itself where latencies are watched, else by that of the executor's round, which is there
    /// already.
    #[inline]
    pub(super) fn clock_ns(&self) -> u64 {
        if self.is_watched() { rt::now_ns() } else { rt::round_now_ns() }
    }

    /// When a request begins.
    #[inline]
    pub(super) fn start_ns<C: CountedBy>(&self, counting: C) -> u64 {
        if !C::MAY_BE_LANE {
            return self.clock_ns();
        }
        match counting.counting() {
            Counting::Node => self.clock_ns(),
            Counting::Lane(start_ns) => start_ns,
        }
    }

    /// As [`Node::count`], unless a lane counts it.
    #[inline]
    pub(super) fn end<C: CountedBy>(
        &self,
        counting: C,
        kind: IoKind,
        offset: u64,
        len: u64,
        start_ns: u64,
        result: &Result<()>,
    ) {
        if !C::MAY_BE_LANE {
            return self.count(kind, offset, len, start_ns, result);
        }
        match (counting.counting(), result) {
            (Counting::Lane(_), Ok(())) if self.is_watched() => self.note_late(kind, offset + len, start_ns),
            (Counting::Lane(_), Ok(())) => {}
            _ => self.count(kind, offset, len, start_ns, result),
        }
    }

    /// The watch was set while the request ran.
    #[cold]
    fn note_late(&self, kind: IoKind, end: u64, start_ns: u64) {
        self.note_watched(kind, end, start_ns, rt::now_ns(), RequestOutcome::Done);
    }

    /// Counts a request of this node for `len` bytes at `offset` that began at `start_ns`.
    #[inline]
    pub(crate) fn count(&self, kind: IoKind, offset: u64, len: u64, start_ns: u64, result: &Result<()>) {
        // One look at the flag, and nothing else where no watch is set.
        if self.is_watched() {
            return self.count_watched(kind, offset, len, start_ns, result);
        }
        self.count_until(kind, len, start_ns, rt::round_now_ns(), result);
    }

    #[cold]
    fn count_watched(&self, kind: IoKind, offset: u64, len: u64, start_ns: u64, result: &Result<()>) {
        let end_ns = rt::now_ns();
        self.count_until(kind, len, start_ns, end_ns, result);
        self.note_watched(kind, offset + len, start_ns, end_ns, outcome_of(result));
    }

    #[inline]
    fn count_until(&self, kind: IoKind, len: u64, start_ns: u64, end_ns: u64, result: &Result<()>) {
        match result {
            Ok(()) => self.counters.count_done(kind, len, start_ns, end_ns),
            Err(error) => self.count_failed(kind, end_ns.saturating_sub(start_ns), end_ns, error),
        }
    }

    /// Counts a write or a write of zeroes, and tells observers of it, also of one that failed: a part may have arrived.
    #[inline]
    pub(super) fn end_write<C: CountedBy>(
        &self,
        counting: C,
        kind: IoKind,
        offset: u64,
        len: u64,
        start_ns: u64,
        result: &Result<()>,
    ) {
        self.end(counting, kind, offset, len, start_ns, result);
        if result.is_ok() && matches!(counting.counting(), Counting::Node) {
            self.counters.note_written(offset + len);
        }
        self.tracking.written(offset, len);
    }

    /// Counts a read or a write that has gone past this node, and that no lane counts for it.
    pub(crate) fn count_passed(&self, kind: IoKind, offset: u64, len: u64, start_ns: u64, result: &Result<()>) {
        self.count(kind, offset, len, start_ns, result);
        if kind == IoKind::Write && result.is_ok() {
            self.counters.note_written(offset + len);
        }
    }

    /// Counts a request that is impossible.
    #[cold]
    pub(super) fn count_invalid(&self, kind: IoKind) {
        self.counters.count_refused(kind, RequestOutcome::Invalid, 0, rt::round_now_ns());
    }

    #[cold]
    fn count_failed(&self, kind: IoKind, latency_ns: u64, end_ns: u64, error: &Error) {
        let outcome = outcome_of::<()>(&Err(error.clone()));
        let latency_ns = if outcome == RequestOutcome::Failed { latency_ns } else { 0 };
        self.counters.count_refused(kind, outcome, latency_ns, end_ns);
        if error.kind() == ErrorKind::InvalidImage {
            self.tell_corrupt(error);
        }
    }

    /// Reports damage that a request met, once, if it is this image's own.
    fn tell_corrupt(&self, error: &Error) {
        let own = error.file_name().is_none_or(|file| file == self.filename());
        if !own || !self.driver.tells_damage() || self.told_corrupt.swap(true, Ordering::Relaxed) {
            return;
        }
        self.home.report_corruption(&Corruption::new(&self.name, error, false));
    }
}
