// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Watches that a user sets on a node beside its counters: the first write past a threshold, latencies over intervals,
//! histograms. A node without watches looks at one flag for each request.

use super::{Node, ThresholdCrossed};
use crate::stats::{HistogramSnapshot, IntervalStats, IoKind, KINDS, Observed, RequestOutcome};
use cowshed_storage::{EndedOp, FileObserver, FileOp, rt};
use cowshed_types::Result;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// For "no threshold": nothing ends behind it. The largest one is a client's, and is shown.
const NO_THRESHOLD: u64 = u64::MAX - 1;

#[derive(Debug)]
pub(super) struct Watch {
    active: AtomicBool,
    threshold_bytes: AtomicU64,
    observed: Mutex<Observed>,
}

impl Default for Watch {
    fn default() -> Self {
        let (active, threshold_bytes) = (AtomicBool::new(false), AtomicU64::new(NO_THRESHOLD));
        Watch { active, threshold_bytes, observed: Mutex::default() }
    }
}

impl Watch {
    fn observed(&self) -> MutexGuard<'_, Observed> {
        self.observed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Tells a node of all operations on its file: formats go to their files directly.
struct OfFile(Weak<Node>);

impl FileObserver for OfFile {
    fn ended(&self, ended: &EndedOp) {
        let Some(node) = self.0.upgrade() else { return };
        // A part of a failed operation may have been carried out.
        if matches!(ended.op, FileOp::Write | FileOp::Zero | FileOp::Discard) {
            node.note_changed(ended.offset, ended.end);
        }
        if !node.is_watched() {
            return;
        }
        let kind = match ended.op {
            FileOp::Read => IoKind::Read,
            FileOp::Write => IoKind::Write,
            FileOp::Zero => IoKind::WriteZeroes,
            FileOp::Discard => IoKind::Discard,
            FileOp::Sync => IoKind::Flush,
        };
        let outcome = if ended.done { RequestOutcome::Done } else { RequestOutcome::Failed };
        node.note_ended(kind, ended.end, ended.latency_ns, ended.end_ns, outcome);
    }
}

impl Node {
    /// Calls the observers of the graph once when a write ends behind this offset in bytes
    /// (`block-set-write-threshold`); 0: no longer.
    pub fn set_write_threshold(&self, threshold_bytes: u64) {
        let threshold_bytes = if threshold_bytes == 0 { NO_THRESHOLD } else { threshold_bytes };
        self.watch.threshold_bytes.store(threshold_bytes, Ordering::SeqCst);
        self.renew_watch(&self.watch.observed());
    }

    /// The threshold in bytes; 0 when there is none, or it has been crossed.
    pub fn write_threshold(&self) -> u64 {
        match self.watch.threshold_bytes.load(Ordering::Relaxed) {
            NO_THRESHOLD => 0,
            threshold_bytes => threshold_bytes,
        }
    }

    /// As [`crate::graph::Attachment::set_intervals`], for all requests that reach the node.
    pub fn set_intervals(&self, lengths_seconds: &[u64]) -> Result<()> {
        let mut observed = self.watch.observed();
        observed.set_intervals(lengths_seconds, rt::now_ns())?;
        self.renew_watch(&observed);
        Ok(())
    }

    /// As [`crate::graph::Attachment::set_histogram`], for all requests that reach the node.
    pub fn set_histogram(&self, kind: IoKind, bounds_ns: &[u64]) -> Result<()> {
        let mut observed = self.watch.observed();
        observed.set_histogram(kind, bounds_ns)?;
        self.renew_watch(&observed);
        Ok(())
    }

    /// The intervals and histograms now.
    pub(super) fn observations(&self) -> (Vec<IntervalStats>, [Option<HistogramSnapshot>; KINDS]) {
        if !self.watch.active.load(Ordering::Relaxed) {
            return Default::default();
        }
        let observed = self.watch.observed();
        (observed.intervals(rt::now_ns()), observed.histograms())
    }

    fn renew_watch(&self, observed: &Observed) {
        let active = !observed.is_empty() || self.write_threshold() != 0;
        self.watch.active.store(active, Ordering::SeqCst);
        if let Some(file) = self.driver.whole_file() {
            let observer = || Arc::new(OfFile(self.this.clone())) as Arc<dyn FileObserver>;
            file.observe(self.number, (active || self.is_tracked()).then(observer));
        }
    }

    /// Has the file of the node, if it has one, show its operations or not, as its watches and dirty maps need.
    pub(super) fn renew_observer(&self) {
        self.renew_watch(&self.watch.observed());
    }

    /// True when [`Node::note_watched`] needs each request.
    #[inline]
    pub(crate) fn is_watched(&self) -> bool {
        self.watch.active.load(Ordering::Relaxed)
    }

    /// A request has ended; `end` is the first byte behind it.
    #[cold]
    pub(super) fn note_watched(&self, kind: IoKind, end: u64, start_ns: u64, end_ns: u64, outcome: RequestOutcome) {
        // The file itself shows each of its operations.
        if self.driver.whole_file().is_none() {
            self.note_ended(kind, end, end_ns.saturating_sub(start_ns), end_ns, outcome);
        }
    }

    fn note_ended(&self, kind: IoKind, end: u64, latency_ns: u64, end_ns: u64, outcome: RequestOutcome) {
        if outcome != RequestOutcome::Invalid {
            self.watch.observed().record(kind, latency_ns, end_ns);
        }
        let threshold_bytes = self.watch.threshold_bytes.load(Ordering::Relaxed);
        let writes = matches!(kind, IoKind::Write | IoKind::WriteZeroes);
        if !writes || end <= threshold_bytes {
            return;
        }
        // Of several at once, one reports.
        let exchanged = self.watch.threshold_bytes.compare_exchange(
            threshold_bytes,
            NO_THRESHOLD,
            Ordering::SeqCst,
            Ordering::SeqCst,
        );
        if exchanged.is_ok() {
            let exceeded_bytes = end - threshold_bytes;
            let crossed = ThresholdCrossed { node_name: self.name.clone(), threshold_bytes, exceeded_bytes };
            self.home.report_threshold(&crossed);
            self.renew_watch(&self.watch.observed());
        }
    }
}
