// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Attachments: what an export or a job holds of the graph. Its requests go to whatever node stands at its place now.

use super::gate::{Gate, Lane};
use super::{Drained, Graph};
use crate::filters::throttle::Direction;
use crate::node::{ChildRole, Node, Preallocation, StatusExtent, ZeroFlags};
use crate::open::Edge;
use crate::stats::{AttachmentStats, Histogram, Interval, IoKind, KINDS, KindStats, Outcome};
use arc_swap::ArcSwap;
use cowshed_block::{Error, ErrorKind, Result};
use cowshed_storage::{IoBuf, PermissionSet, Permissions, rt};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What an attachment wants.
#[derive(Clone, Debug)]
pub struct AttachRequest {
    name: String,
    permissions: Permissions,
}

impl AttachRequest {
    /// An export by its id: reads, and writes if `writable`; others may do the same meanwhile.
    pub fn export(name: impl Into<String>, writable: bool) -> AttachRequest {
        let write = if writable { PermissionSet::WRITE } else { PermissionSet::NONE };
        let used = PermissionSet::CONSISTENT_READ | write;
        AttachRequest { name: name.into(), permissions: Permissions { used, shared: PermissionSet::ALL } }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// A job by its id, with what it does and what it lets others do.
    pub fn job(name: impl Into<String>, permissions: Permissions) -> AttachRequest {
        AttachRequest { name: name.into(), permissions }
    }
}

/// A user of a node: an export or a job. Usable from any thread; each makes a [`Queue`] of its own for its requests.
///
/// While the graph changes below it, requests wait; none of them fails for that reason. Dropping it gives the node back
/// without a flush; [`Attachment::detach`] is the orderly way.
pub struct Attachment {
    name: String,
    graph: Arc<Graph>,
    permissions: Permissions,
    node: ArcSwap<Node>,
    /// Counts the changes of `node`.
    generation: AtomicU64,
    gate: Gate,
    detached: AtomicBool,
    /// Counters of queues that are gone.
    past: Mutex<Past>,
    /// True when `observed` has something: then each request looks there.
    observing: AtomicBool,
    observed: Mutex<Observed>,
}

#[derive(Default)]
struct Past {
    kinds: [KindStats; KINDS],
    highest_written_byte: u64,
    last_end_ns: u64,
}

#[derive(Default)]
struct Observed {
    intervals: Vec<Interval>,
    histograms: [Option<Histogram>; KINDS],
}

/// The user of a node that stands for an attachment.
fn user_of(name: &str) -> String {
    format!("attachment:{name}")
}

/// The time of the executor's round: exact enough for latencies, and much cheaper than a look at the clock.
fn now_ns() -> u64 {
    u64::try_from(rt::round_now().as_nanos()).unwrap_or(u64::MAX)
}

impl Attachment {
    pub(super) fn new(graph: &Arc<Graph>, node: &Arc<Node>, request: AttachRequest) -> Result<Arc<Attachment>> {
        node.attach(Edge { user: user_of(&request.name), permissions: request.permissions })?;
        Ok(Arc::new(Attachment {
            name: request.name,
            graph: Arc::clone(graph),
            permissions: request.permissions,
            node: ArcSwap::new(Arc::clone(node)),
            generation: AtomicU64::new(0),
            gate: Gate::default(),
            detached: AtomicBool::new(false),
            past: Mutex::default(),
            observing: AtomicBool::new(false),
            observed: Mutex::default(),
        }))
    }

    /// The id of the export or job.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The node that stands here now.
    pub fn node(&self) -> Arc<Node> {
        self.node.load_full()
    }

    /// Virtual size in bytes, now.
    pub fn size(&self) -> u64 {
        self.node.load().size()
    }

    /// True when it may write.
    pub fn is_writable(&self) -> bool {
        self.permissions.used.contains(PermissionSet::WRITE)
    }

    /// A queue for the requests of this thread.
    pub fn queue(self: &Arc<Self>) -> Queue {
        let lane = self.gate.add_lane();
        let attachment = Arc::clone(self);
        let seen = RefCell::new((self.generation.load(Ordering::SeqCst), Rc::new(Standing(self.node()))));
        Queue(Rc::new(QueueState { attachment, lane, seen }))
    }

    /// Holds new requests back and waits for those in flight; they go on when the guard is dropped.
    pub async fn drain(self: &Arc<Self>) -> Drained {
        Drained::of(vec![Arc::clone(self)]).await
    }

    /// Waits for the requests in flight, flushes and gives the node back. A node that nobody else uses and that
    /// wasn't added by name is closed. Requests that come later fail.
    pub async fn detach(self: &Arc<Self>) -> Result<()> {
        let _one_change = self.graph.changing().await;
        let drained = self.drain().await;
        if self.detached.swap(true, Ordering::SeqCst) {
            return Ok(());
        }
        let node = self.node();
        let flushed = if self.is_writable() { node.flush().await } else { Ok(()) };
        let unused = node.release(&user_of(&self.name));
        self.graph.forget_attachment(self);
        drop(drained);
        if unused {
            return flushed.and(node.close().await);
        }
        flushed
    }

    /// What went through it so far.
    pub fn statistics(&self) -> AttachmentStats {
        let mut stats = AttachmentStats::default();
        let mut last_end_ns = 0;
        self.gate.with_lanes(|lanes| {
            // Both at once: a lane that goes away is either still there or in the past.
            for lane in lanes {
                lane.counters.collect(&mut stats.kinds);
                stats.highest_written_byte = stats.highest_written_byte.max(lane.counters.highest_written_byte());
                last_end_ns = last_end_ns.max(lane.counters.last_end_ns());
            }
            let past = self.past();
            for (kind, more) in stats.kinds.iter_mut().zip(&past.kinds) {
                kind.add(more);
            }
            stats.highest_written_byte = stats.highest_written_byte.max(past.highest_written_byte);
            last_end_ns = last_end_ns.max(past.last_end_ns);
        });
        stats.in_flight = self.gate.in_flight();
        let now = now_ns();
        stats.idle_ns = (stats.in_flight == 0 && last_end_ns != 0).then(|| now.saturating_sub(last_end_ns));
        let observed = self.observed();
        stats.intervals = observed.intervals.iter().map(|interval| interval.snapshot(now)).collect();
        for (snapshot, histogram) in stats.histograms.iter_mut().zip(&observed.histograms) {
            *snapshot = histogram.as_ref().map(Histogram::snapshot);
        }
        stats
    }

    /// Keeps latencies over intervals of these lengths, in seconds, instead of those asked for before
    /// (`stats-intervals`).
    pub fn set_intervals(&self, lengths_seconds: &[u64]) -> Result<()> {
        if lengths_seconds.contains(&0) || lengths_seconds.len() > 16 {
            let message = "up to 16 intervals of at least one second can be kept";
            return Err(Error::invalid_argument(message).field("stats-intervals"));
        }
        let now = now_ns();
        let length_ns = |seconds: &u64| seconds.saturating_mul(1_000_000_000);
        let mut observed = self.observed();
        observed.intervals = lengths_seconds.iter().map(|length| Interval::new(length_ns(length), now)).collect();
        self.note_observing(&observed);
        Ok(())
    }

    /// Keeps a latency histogram for requests of a kind, a new one with these bounds in nanoseconds; an empty list ends
    /// it.
    pub fn set_histogram(&self, kind: IoKind, bounds_ns: &[u64]) -> Result<()> {
        let histogram = if bounds_ns.is_empty() { None } else { Some(Histogram::new(bounds_ns)?) };
        let mut observed = self.observed();
        observed.histograms[kind as usize] = histogram;
        self.note_observing(&observed);
        Ok(())
    }

    fn note_observing(&self, observed: &Observed) {
        let any = !observed.intervals.is_empty() || observed.histograms.iter().any(Option::is_some);
        self.observing.store(any, Ordering::Relaxed);
    }

    fn observed(&self) -> MutexGuard<'_, Observed> {
        self.observed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn past(&self) -> MutexGuard<'_, Past> {
        self.past.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn user(&self) -> String {
        user_of(&self.name)
    }

    pub(super) fn gate(&self) -> &Gate {
        &self.gate
    }

    /// Another node in its place. It is drained, and attached to that node already.
    pub(super) fn point_to(&self, node: Arc<Node>) {
        self.node.store(node);
        self.generation.fetch_add(1, Ordering::SeqCst);
    }

    #[cold]
    fn observe(&self, kind: IoKind, latency_ns: u64, end_ns: u64) {
        let mut observed = self.observed();
        for interval in &mut observed.intervals {
            interval.record(kind, latency_ns, end_ns);
        }
        if let Some(histogram) = &observed.histograms[kind as usize] {
            histogram.record(latency_ns);
        }
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        if !self.detached.load(Ordering::SeqCst) {
            self.node.load().release(&user_of(&self.name));
            self.graph.forget_attachment(self);
        }
    }
}

impl std::fmt::Debug for Attachment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Attachment").field("name", &self.name).field("node", &self.node).finish_non_exhaustive()
    }
}

/// The requests of one thread through an [`Attachment`]. Not `Send`; cheap to clone within the thread.
#[derive(Clone)]
pub struct Queue(Rc<QueueState>);

/// The node that stands at the attachment's place. Requests share it without touching the count that all threads see.
struct Standing(Arc<Node>);

impl std::ops::Deref for Standing {
    type Target = Arc<Node>;
    fn deref(&self) -> &Arc<Node> {
        &self.0
    }
}

struct QueueState {
    attachment: Arc<Attachment>,
    lane: Arc<Lane>,
    /// The node of some generation: as long as that is the attachment's, no shared counter is touched to hold it.
    seen: RefCell<(u64, Rc<Standing>)>,
}

impl Drop for QueueState {
    fn drop(&mut self) {
        let attachment = &self.attachment;
        attachment.gate.remove_lane(&self.lane, |lane| {
            let mut past = attachment.past();
            lane.counters.collect(&mut past.kinds);
            past.highest_written_byte = past.highest_written_byte.max(lane.counters.highest_written_byte());
            past.last_end_ns = past.last_end_ns.max(lane.counters.last_end_ns());
        });
    }
}

impl QueueState {
    fn node(&self) -> Rc<Standing> {
        let generation = self.attachment.generation.load(Ordering::SeqCst);
        let mut seen = self.seen.borrow_mut();
        if seen.0 != generation {
            *seen = (generation, Rc::new(Standing(self.attachment.node())));
        }
        Rc::clone(&seen.1)
    }

    fn check_attached(&self) -> Result<()> {
        match self.attachment.detached.load(Ordering::Relaxed) {
            false => Ok(()),
            true => Err(Error::invalid_argument(format!("'{}' was detached", self.attachment.name))),
        }
    }

    fn check(&self, kind: IoKind) -> Result<()> {
        self.check_attached()?;
        if kind != IoKind::Read && kind != IoKind::Flush && !self.attachment.is_writable() {
            let message = format!("'{}' may only read", self.attachment.name);
            return Err(Error::new(ErrorKind::ReadOnly, message));
        }
        Ok(())
    }

    #[inline]
    fn count(&self, kind: IoKind, offset: u64, len: u64, start_ns: u64, result: &Result<()>) {
        let end_ns = now_ns();
        let outcome = outcome_of(result);
        self.lane.counters.count(kind, offset, len, outcome, start_ns, end_ns);
        if outcome == Outcome::Done && self.attachment.observing.load(Ordering::Relaxed) {
            self.attachment.observe(kind, end_ns.saturating_sub(start_ns), end_ns);
        }
    }
}

/// What a result is to the statistics.
pub(crate) fn outcome_of<T>(result: &Result<T>) -> Outcome {
    match result {
        Ok(_) => Outcome::Done,
        Err(error) => match error.kind() {
            ErrorKind::InvalidArgument | ErrorKind::ReadOnly => Outcome::Invalid,
            _ => Outcome::Failed,
        },
    }
}

/// Runs a request without a buffer through the gate and counts it.
macro_rules! through_gate {
    ($self:ident, $kind:expr, $offset:expr, $len:expr, |$node:ident| $work:expr) => {{
        let queue = &*$self.0;
        let start_ns = now_ns();
        let passage = queue.attachment.gate.enter(&queue.lane).await;
        let result = match queue.check($kind) {
            Ok(()) => {
                let $node = queue.node();
                $work.await
            }
            Err(error) => Err(error),
        };
        queue.count($kind, $offset, $len, start_ns, &result);
        drop(passage);
        result
    }};
}

/// The same for a request with a buffer, which comes back.
macro_rules! through_gate_with {
    ($self:ident, $kind:expr, $offset:expr, $buf:ident, |$node:ident| $work:expr) => {{
        let queue = &*$self.0;
        let start_ns = now_ns();
        let len = $buf.len() as u64;
        let passage = queue.attachment.gate.enter(&queue.lane).await;
        let (result, buf) = match queue.check($kind) {
            Ok(()) => {
                let $node = queue.node();
                $work.await
            }
            Err(error) => (Err(error), $buf),
        };
        queue.count($kind, $offset, len, start_ns, &result);
        drop(passage);
        (result, buf)
    }};
}

impl Queue {
    /// What the requests go through.
    pub fn attachment(&self) -> &Arc<Attachment> {
        &self.0.attachment
    }

    /// Virtual size in bytes, now.
    pub fn size(&self) -> u64 {
        self.0.attachment.size()
    }

    /// Fills `buf` from `offset` (bytes) and gives it back.
    pub async fn read(&self, offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        through_gate_with!(self, IoKind::Read, offset, buf, |node| node.read(offset, buf))
    }

    /// Writes `buf` at `offset` (bytes) and gives it back. Durable after the next [`Queue::flush`].
    pub async fn write(&self, offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        through_gate_with!(self, IoKind::Write, offset, buf, |node| node.write(offset, buf))
    }

    /// As [`Queue::write`], and durable when it returns.
    pub async fn write_durable(&self, offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        through_gate_with!(self, IoKind::Write, offset, buf, |node| async {
            let (result, buf) = node.write(offset, buf).await;
            match result {
                Ok(()) => (node.flush().await, buf),
                Err(error) => (Err(error), buf),
            }
        })
    }

    /// Makes a range of bytes read as zeroes.
    pub async fn write_zeroes(&self, offset: u64, len: u64, flags: ZeroFlags) -> Result<()> {
        through_gate!(self, IoKind::WriteZeroes, offset, len, |node| node.write_zeroes(offset, len, flags))
    }

    /// Gives a range of bytes back: a hint. It reads as before or as zeroes afterwards.
    pub async fn discard(&self, offset: u64, len: u64) -> Result<()> {
        through_gate!(self, IoKind::Discard, offset, len, |node| node.discard(offset, len))
    }

    /// Makes everything durable whose write completed before.
    pub async fn flush(&self) -> Result<()> {
        through_gate!(self, IoKind::Flush, 0, 0, |node| async {
            if self.0.attachment.is_writable() { node.flush().await } else { Ok(()) }
        })
    }

    /// Where the data of a range is in the top layer alone; see [`Node::block_status`].
    pub async fn block_status(&self, offset: u64, len: u64, max_runs: usize) -> Result<Vec<StatusExtent>> {
        let queue = &*self.0;
        let _passage = queue.attachment.gate.enter(&queue.lane).await;
        queue.check_attached()?;
        queue.node().block_status(offset, len, max_runs).await
    }

    /// Where the data of a range is, through the whole chain; see [`Node::block_status_chain`].
    pub async fn block_status_chain(&self, offset: u64, len: u64, max_runs: usize) -> Result<Vec<StatusExtent>> {
        let queue = &*self.0;
        let _passage = queue.attachment.gate.enter(&queue.lane).await;
        queue.check_attached()?;
        queue.node().block_status_chain(offset, len, max_runs).await
    }

    /// Changes the virtual size, in bytes. Needs the permission to resize.
    pub async fn resize(&self, size: u64, preallocation: Preallocation) -> Result<()> {
        let queue = &*self.0;
        if !queue.attachment.permissions.used.contains(PermissionSet::RESIZE) {
            let message = format!("'{}' may not change the size", queue.attachment.name);
            return Err(Error::new(ErrorKind::PermissionDenied, message));
        }
        let _passage = queue.attachment.gate.enter(&queue.lane).await;
        queue.check_attached()?;
        queue.node().resize(size, preallocation).await
    }

    /// Waits as a request of `len` bytes would in the throttle filters at its node: for requests that the caller answers
    /// without reading or writing (a hole, found by its status), and that count all the same.
    pub async fn charge(&self, kind: IoKind, len: u64) {
        let queue = &*self.0;
        let start_ns = now_ns();
        let passage = queue.attachment.gate.enter(&queue.lane).await;
        let direction = if kind == IoKind::Read { Direction::Read } else { Direction::Write };
        let mut node = Some(Arc::clone(&queue.node()));
        while let Some(filter) = node.filter(|node| node.is_filter()) {
            if let Some(throttle) = filter.throttle() {
                throttle.admit(direction, len).await;
            }
            node = filter.child(ChildRole::File);
        }
        queue.count(kind, 0, len, start_ns, &Ok(()));
        drop(passage);
    }

    /// Counts a request that the caller joined with another one.
    pub fn count_merged(&self, kind: IoKind) {
        self.0.lane.counters.count_merged(kind);
    }

    /// Counts a request that the caller refused as impossible before it got here.
    pub fn count_invalid(&self, kind: IoKind) {
        let now = now_ns();
        self.0.lane.counters.count(kind, 0, 0, Outcome::Invalid, now, now);
    }
}
