// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The requests of one thread through an attachment. A request passes, in this order:
//!
//! - the gate of the attachment, which a drain closes;
//! - the limits of a throttle filter at the top, without the filter's node where its credit suffices;
//! - the node.
//!
//! A read or a write that was carried out is counted once, in the counters of its route. They count for the attachment and for the
//! nodes of the route. Where these don't count the same, each counts by itself.

use super::attachment::Attachment;
use super::gate::Lane;
use crate::filters::throttle::{Credit, Direction};
use crate::node::{ChildRole, Counting, Node, Preallocation, StatusExtent, ZeroFlags};
use crate::stats::{IoKind, LaneCounters, RequestOutcome, outcome_of};
use cowshed_storage::{IoBuf, PermissionSet, SharedBufs, rt};
use cowshed_types::{DirtyBits, Error, ErrorKind, Result};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

/// The requests of one thread through an [`Attachment`]. Not `Send`; cheap to clone within the thread.
#[derive(Clone)]
pub struct Queue(Rc<QueueState>);

/// A request is one request of its node, too.
const ONE: bool = true;
/// It is several requests of its node: a write and a flush.
const SEVERAL: bool = false;

/// The node at the attachment's place. Requests share it without touching the counts that all threads see.
struct CachedRoute {
    attachment: Arc<Attachment>,
    node: Arc<Node>,
    /// When `node` is a throttle filter without settings of its own.
    fast_path: Option<FastPath>,
    /// Counts requests that go the whole route, for the attachment and for each node of the route.
    counters: Arc<LaneCounters>,
}

/// The way past a throttle filter.
struct FastPath {
    /// The node behind it.
    behind: Arc<Node>,
    /// The credit that requests may take from the filter's group without asking it; for reads, and for writes.
    credits: [Credit; 2],
}

impl Drop for CachedRoute {
    fn drop(&mut self) {
        self.attachment.counts().fold(&self.counters);
        self.nodes().for_each(|node| node.lanes().fold(&self.counters));
    }
}

impl CachedRoute {
    fn new(attachment: &Arc<Attachment>) -> CachedRoute {
        let (attachment, node) = (Arc::clone(attachment), attachment.node());
        let behind = if node.is_plain_throttle() { node.child(ChildRole::File) } else { None };
        let fast_path = behind.map(|behind| FastPath { behind, credits: Default::default() });
        let route = CachedRoute { attachment, node, fast_path, counters: Arc::default() };
        route.attachment.counts().add(&route.counters);
        route.nodes().for_each(|node| node.lanes().add(&route.counters));
        route
    }

    fn nodes(&self) -> impl Iterator<Item = &Arc<Node>> {
        self.fast_path.iter().map(|fast_path| &fast_path.behind).chain([&self.node])
    }

    /// The way of a request: to the node, or past a throttle filter that lets it go at once. `shared`: the counters of the
    /// route may count it.
    #[inline]
    fn choose<const WRITES: bool>(&self, len: u64, shared: bool) -> RequestRoute<'_> {
        let direction = if WRITES { Direction::Write } else { Direction::Read };
        let (to, is_past) = match &self.fast_path {
            Some(fast_path) if !self.node.is_watched() && (!WRITES || !self.node.is_tracked()) => {
                if self.try_debit(fast_path, direction, len) {
                    (&*fast_path.behind, true)
                } else {
                    self.note_entrance();
                    (&*self.node, false)
                }
            }
            _ => (&*self.node, false),
        };
        let is_whole = is_past || self.fast_path.is_none();
        let counting = match shared && is_whole && to.is_counted_in_lanes::<WRITES>() {
            true => Counting::Lane(rt::round_now_ns()),
            false => Counting::Node,
        };
        RequestRoute { route: self, to, is_past, counting }
    }

    /// The request that is about to go to the node has not begun while a throttle filter there holds it back.
    #[cold]
    fn note_entrance(&self) {
        if let Some(throttle) = self.node.throttle() {
            throttle.note_entrance();
        }
    }

    /// True when the filter needn't be asked, or lets the request go at once.
    #[inline]
    fn try_debit(&self, fast_path: &FastPath, direction: Direction, len: u64) -> bool {
        let credit = &fast_path.credits[direction as usize];
        credit.take(len) || self.node.throttle().is_some_and(|throttle| throttle.lend(credit, direction, len))
    }
}

/// The way of a request.
struct RequestRoute<'a> {
    route: &'a CachedRoute,
    to: &'a Node,
    /// It goes past the throttle filter.
    is_past: bool,
    counting: Counting,
}

impl RequestRoute<'_> {
    /// Counts a request at the filter that it went past, which didn't see it.
    #[cold]
    fn count_past(&self, kind: IoKind, offset: u64, len: u64, start_ns: u64, result: &Result<()>) {
        self.route.node.count_passed(kind, offset, len, start_ns, result);
        if let (RequestOutcome::Invalid, Some(fast_path)) = (outcome_of(result), &self.route.fast_path) {
            // An impossible request is no load.
            fast_path.credits[direction_of(kind) as usize].give_back(len);
        }
    }
}

/// When a request began and ended, by the clock of the executor's rounds unless it began by the clock itself.
#[derive(Clone, Copy)]
struct Span {
    start_ns: u64,
    took_ns: u64,
    end_ns: u64,
}

/// The limits that a request counts against.
fn direction_of(kind: IoKind) -> Direction {
    if kind == IoKind::Read { Direction::Read } else { Direction::Write }
}

struct QueueState {
    attachment: Arc<Attachment>,
    lane: Arc<Lane>,
    /// Counts requests for the attachment alone.
    counters: Arc<LaneCounters>,
    /// The route of some generation. While that is the attachment's, no shared counter is touched to hold it.
    seen: RefCell<(u64, Rc<CachedRoute>)>,
}

impl Drop for QueueState {
    fn drop(&mut self) {
        self.attachment.gate().remove_lane(&self.lane);
        self.attachment.counts().fold(&self.counters);
    }
}

impl QueueState {
    #[inline]
    fn route(&self) -> Rc<CachedRoute> {
        let generation = self.attachment.generation();
        let mut seen = self.seen.borrow_mut();
        if seen.0 != generation {
            *seen = (generation, Rc::new(CachedRoute::new(&self.attachment)));
        }
        Rc::clone(&seen.1)
    }

    fn node(&self) -> Arc<Node> {
        Arc::clone(&self.route().node)
    }

    fn check_attached(&self) -> Result<()> {
        match self.attachment.is_detached() {
            false => Ok(()),
            true => Err(Error::invalid_argument(format!("'{}' was detached", self.attachment.name()))),
        }
    }

    fn check(&self, kind: IoKind) -> Result<()> {
        self.check_attached()?;
        if rt::is_cancelled() {
            return Err(Error::new(ErrorKind::Cancelled, "the client of the request is gone"));
        }
        if kind != IoKind::Read && kind != IoKind::Flush && !self.attachment.is_writable() {
            let message = format!("'{}' may only read", self.attachment.name());
            return Err(Error::new(ErrorKind::ReadOnly, message));
        }
        Ok(())
    }

    #[inline]
    fn count(&self, kind: IoKind, offset: u64, len: u64, span: Span, result: &Result<()>) {
        if result.is_ok() && self.lane.is_plain() {
            self.counters.count_done(kind, offset, len, span.took_ns, span.end_ns);
        } else {
            self.count_special(kind, offset, len, span.start_ns, result);
        }
    }

    /// Counts a request that took this way.
    #[inline]
    fn count_on_way(
        &self,
        way: &RequestRoute<'_>,
        kind: IoKind,
        offset: u64,
        len: u64,
        start_ns: u64,
        result: &Result<()>,
    ) {
        match (way.counting, result) {
            (Counting::Lane(entered_ns), Ok(())) => {
                let end_ns = rt::round_now_ns();
                way.route.counters.count_done(kind, offset, len, end_ns.saturating_sub(entered_ns), end_ns);
                if start_ns != entered_ns || !self.lane.is_plain() {
                    self.count_rest(kind, start_ns, entered_ns);
                }
            }
            _ => {
                if way.is_past {
                    way.count_past(kind, offset, len, start_ns, result);
                }
                self.count(kind, offset, len, self.span_since(start_ns), result);
            }
        }
    }

    /// The attachment's own of such a request: a wait at the gate, and intervals that were set while it ran.
    #[cold]
    fn count_rest(&self, kind: IoKind, start_ns: u64, entered_ns: u64) {
        self.counters.add_time(kind, entered_ns.saturating_sub(start_ns));
        if self.attachment.is_observing() {
            let end_ns = rt::now_ns();
            self.attachment.observe(kind, end_ns.saturating_sub(start_ns), end_ns);
        }
    }

    /// From then until now.
    #[inline]
    fn span_since(&self, start_ns: u64) -> Span {
        let end_ns = rt::round_now_ns();
        // A request that began by the clock itself may end by that of its round, when the latency isn't watched any
        // more.
        Span { start_ns, took_ns: end_ns.saturating_sub(start_ns), end_ns }
    }

    /// The start of a request: by the clock itself where latencies are watched, else by that of the executor's round,
    /// which is there already.
    #[inline]
    fn start_ns(&self) -> u64 {
        if self.lane.is_plain() { rt::round_now_ns() } else { self.end_ns() }
    }

    #[cold]
    fn end_ns(&self) -> u64 {
        if self.attachment.is_observing() { rt::now_ns() } else { rt::round_now_ns() }
    }

    #[cold]
    fn count_special(&self, kind: IoKind, offset: u64, len: u64, start_ns: u64, result: &Result<()>) {
        if let Err(error) = result {
            if error.kind() == ErrorKind::Cancelled && rt::is_cancelled() {
                return;
            }
            self.attachment.tell_failed(kind, error);
        }
        if !self.attachment.is_counted() {
            return;
        }
        let end_ns = self.end_ns();
        match result {
            Ok(()) => {
                self.counters.count_done(kind, offset, len, end_ns.saturating_sub(start_ns), end_ns);
                if self.attachment.is_observing() {
                    self.attachment.observe(kind, end_ns.saturating_sub(start_ns), end_ns);
                }
            }
            Err(_) => self.count_refused(kind, outcome_of(result), start_ns, end_ns),
        }
    }

    #[cold]
    fn count_refused(&self, kind: IoKind, outcome: RequestOutcome, start_ns: u64, end_ns: u64) {
        let accounting = self.attachment.accounting();
        let latency_ns = match outcome {
            RequestOutcome::Failed if accounting.failed => Some(end_ns.saturating_sub(start_ns)),
            RequestOutcome::Invalid if accounting.invalid => Some(0),
            _ => None,
        };
        self.counters.count_refused(kind, outcome, latency_ns, end_ns);
        if let (RequestOutcome::Failed, Some(latency_ns), true) = (outcome, latency_ns, self.attachment.is_observing())
        {
            self.attachment.observe(kind, latency_ns, end_ns);
        }
    }
}

/// A request between its entrance and its end, until dropped: see [`Queue::enter`].
pub struct Inside(Rc<QueueState>);

impl Drop for Inside {
    fn drop(&mut self) {
        self.0.attachment.gate().leave(&self.0.lane);
    }
}

/// Runs a request without a buffer that is inside of the gate, and counts it.
macro_rules! carry_out {
    ($queue:expr, $start_ns:expr, $kind:expr, $offset:expr, $len:expr, |$node:ident| $work:expr) => {{
        let queue: &QueueState = $queue;
        let result = match queue.check($kind) {
            Ok(()) => {
                let route = queue.route();
                if route.fast_path.is_some() && !route.node.is_tracked() {
                    route.note_entrance();
                }
                let $node = &*route.node;
                $work.await
            }
            Err(error) => Err(error),
        };
        queue.count($kind, $offset, $len, queue.span_since($start_ns), &result);
        result
    }};
}

/// The same for a read or a write, whose buffer comes back; it may go past a throttle filter. `$count` is [`ONE`] or [`SEVERAL`].
macro_rules! carry_out_with {
    ($queue:expr, $start_ns:expr, $kind:path, $count:ident, $offset:expr, $buf:ident, |$way:ident| $work:expr) => {{
        const WRITES: bool = !matches!($kind, IoKind::Read);
        let queue: &QueueState = $queue;
        let len = $buf.len() as u64;
        match queue.check($kind) {
            Ok(()) => {
                let route = queue.route();
                let $way = route.choose::<WRITES>(len, $count && queue.lane.is_plain());
                let (result, buf) = $work.await;
                queue.count_on_way(&$way, $kind, $offset, len, $start_ns, &result);
                (result, buf)
            }
            Err(error) => {
                let result = Err(error);
                queue.count($kind, $offset, len, queue.span_since($start_ns), &result);
                (result, $buf)
            }
        }
    }};
}

impl Queue {
    pub(super) fn of(attachment: &Arc<Attachment>) -> Queue {
        let lane = attachment.gate().add_lane();
        // It is in the list by now: a later change of this finds it there.
        lane.set_plain(attachment.counts_plainly());
        let counters = Arc::default();
        attachment.counts().add(&counters);
        let seen = RefCell::new((attachment.generation(), Rc::new(CachedRoute::new(attachment))));
        Queue(Rc::new(QueueState { attachment: Arc::clone(attachment), lane, counters, seen }))
    }

    /// The attachment that the requests go through.
    pub fn attachment(&self) -> &Arc<Attachment> {
        &self.0.attachment
    }

    /// Virtual size in bytes, now.
    pub fn size(&self) -> u64 {
        let route = self.0.route();
        route.fast_path.as_ref().map_or(&route.node, |fast_path| &fast_path.behind).size()
    }

    /// Enters as a request does, for work that goes past this queue: drains wait until the guard is dropped, and this waits for
    /// drains. Dropped before it has entered, the future leaves nothing behind.
    #[inline]
    pub async fn enter(&self) -> Inside {
        self.0.attachment.gate().admit(&self.0.lane).await;
        Inside(Rc::clone(&self.0))
    }

    /// Fills `buf` from `offset` (bytes) and returns it.
    pub async fn read(&self, offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        let start_ns = self.0.start_ns();
        let passage = self.0.attachment.gate().enter(&self.0.lane).await;
        let read = carry_out_with!(&*self.0, start_ns, IoKind::Read, ONE, offset, buf, |way| {
            way.to.read_counted(offset, buf, way.counting)
        });
        drop(passage);
        read
    }

    /// Writes `buf` at `offset` (bytes) and returns it. Durable after the next [`Queue::flush`]. A write that has begun
    /// is carried out even when the future is dropped; drains wait for it.
    pub async fn write(&self, offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        let start_ns = self.0.start_ns();
        let inside = self.enter().await;
        rt::to_completion(async move {
            carry_out_with!(&inside.0, start_ns, IoKind::Write, ONE, offset, buf, |way| {
                way.to.write_counted(offset, buf, way.counting)
            })
        })
        .await
    }

    /// As [`Queue::write`], and durable when it returns.
    pub async fn write_durable(&self, offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        let start_ns = self.0.start_ns();
        let inside = self.enter().await;
        rt::to_completion(async move {
            carry_out_with!(&inside.0, start_ns, IoKind::Write, SEVERAL, offset, buf, |way| async {
                let (result, buf) = way.to.run_write(offset, buf).await;
                match result {
                    Ok(()) => (way.to.run_flush().await, buf),
                    Err(error) => (Err(error), buf),
                }
            })
        })
        .await
    }

    /// As [`Queue::read`], into memory that a guest shares; see [`Node::read_shared`]. Carried out as [`Queue::write`] is: the kernel
    /// fills the guest's memory to the end. The place on the disk stays the range's own until then.
    pub async fn read_shared(&self, offset: u64, bufs: SharedBufs) -> (Result<()>, SharedBufs) {
        let start_ns = self.0.start_ns();
        let inside = self.enter().await;
        rt::to_completion(async move {
            carry_out_with!(&inside.0, start_ns, IoKind::Read, ONE, offset, bufs, |way| {
                way.to.read_shared_counted(offset, bufs, way.counting)
            })
        })
        .await
    }

    /// As [`Queue::write`], from memory that a guest shares and may change meanwhile: what it writes then is written, or what it wrote
    /// before.
    pub async fn write_shared(&self, offset: u64, bufs: SharedBufs) -> (Result<()>, SharedBufs) {
        let start_ns = self.0.start_ns();
        let inside = self.enter().await;
        rt::to_completion(async move {
            carry_out_with!(&inside.0, start_ns, IoKind::Write, ONE, offset, bufs, |way| {
                way.to.write_shared_counted(offset, bufs, way.counting)
            })
        })
        .await
    }

    /// As [`Queue::write_shared`], and durable when it returns.
    pub async fn write_shared_durable(&self, offset: u64, bufs: SharedBufs) -> (Result<()>, SharedBufs) {
        let start_ns = self.0.start_ns();
        let inside = self.enter().await;
        rt::to_completion(async move {
            carry_out_with!(&inside.0, start_ns, IoKind::Write, SEVERAL, offset, bufs, |way| async {
                let (result, bufs) = way.to.run_write_shared(offset, bufs).await;
                match result {
                    Ok(()) => (way.to.run_flush().await, bufs),
                    Err(error) => (Err(error), bufs),
                }
            })
        })
        .await
    }

    /// Makes a range of bytes read as zeroes. Carried out as [`Queue::write`] is.
    pub async fn write_zeroes(&self, offset: u64, len: u64, flags: ZeroFlags) -> Result<()> {
        let start_ns = self.0.start_ns();
        let inside = self.enter().await;
        rt::to_completion(async move {
            carry_out!(&inside.0, start_ns, IoKind::WriteZeroes, offset, len, |node| node
                .run_write_zeroes(offset, len, flags))
        })
        .await
    }

    /// Gives a range of bytes back: a hint. It reads as before or as zeroes afterwards. Carried out as [`Queue::write`] is.
    pub async fn discard(&self, offset: u64, len: u64) -> Result<()> {
        let start_ns = self.0.start_ns();
        let inside = self.enter().await;
        rt::to_completion(async move {
            carry_out!(&inside.0, start_ns, IoKind::Discard, offset, len, |node| node.run_discard(offset, len))
        })
        .await
    }

    /// Makes everything durable whose write completed before. Carried out as [`Queue::write`] is.
    pub async fn flush(&self) -> Result<()> {
        let start_ns = self.0.start_ns();
        let inside = self.enter().await;
        rt::to_completion(async move {
            carry_out!(&inside.0, start_ns, IoKind::Flush, 0, 0, |node| async {
                if inside.0.attachment.is_writable() { node.run_flush().await } else { Ok(()) }
            })
        })
        .await
    }

    /// The places of a range's data in the top layer alone; see [`Node::block_status`].
    pub async fn block_status(&self, offset: u64, len: u64, max_runs: usize) -> Result<Vec<StatusExtent>> {
        let queue = &*self.0;
        let _passage = queue.attachment.gate().enter(&queue.lane).await;
        queue.check_attached()?;
        queue.node().block_status(offset, len, max_runs).await
    }

    /// Where the data of a range is, through the whole chain; see [`Node::block_status_chain`].
    pub async fn block_status_chain(&self, offset: u64, len: u64, max_runs: usize) -> Result<Vec<StatusExtent>> {
        let queue = &*self.0;
        let _passage = queue.attachment.gate().enter(&queue.lane).await;
        queue.check_attached()?;
        queue.node().block_status_chain(offset, len, max_runs).await
    }

    /// The bits of a dirty bitmap at this moment, of the first node of the chain that has one of this name.
    pub async fn bitmap_bits(&self, name: &str) -> Result<Arc<DirtyBits>> {
        let queue = &*self.0;
        let _passage = queue.attachment.gate().enter(&queue.lane).await;
        queue.check_attached()?;
        queue.node().find_bitmap(name).await?.bitmap_bits(name).await
    }

    /// Changes the virtual size, in bytes. Needs the permission to resize. Carried out as [`Queue::write`] is.
    pub async fn resize(&self, size: u64, preallocation: Preallocation) -> Result<()> {
        let queue = &*self.0;
        if !queue.attachment.permissions().used.contains(PermissionSet::RESIZE) {
            let message = format!("'{}' may not change the size", queue.attachment.name());
            return Err(Error::new(ErrorKind::PermissionDenied, message));
        }
        let inside = self.enter().await;
        rt::to_completion(async move {
            inside.0.check_attached()?;
            inside.0.node().run_resize(size, preallocation).await
        })
        .await
    }

    /// Waits as a request of `len` bytes would in the throttle filters at its node. It serves requests that the caller
    /// answers without reading or writing (a hole, found by its status). They count all the same.
    pub async fn charge(&self, kind: IoKind, len: u64) {
        let queue = &*self.0;
        let start_ns = queue.start_ns();
        let passage = queue.attachment.gate().enter(&queue.lane).await;
        let direction = direction_of(kind);
        let route = queue.route();
        let mut node = Some(Arc::clone(&route.node));
        if let Some(fast_path) = route.fast_path.as_ref().filter(|fast_path| route.try_debit(fast_path, direction, len))
        {
            node = Some(Arc::clone(&fast_path.behind));
        }
        while let Some(filter) = node.filter(|node| node.is_filter()) {
            if let Some(throttle) = filter.throttle() {
                // A charged attachment does its work itself, and has no client.
                let _ = throttle.admit(direction, len).await;
            }
            node = filter.child(ChildRole::File);
        }
        queue.count(kind, 0, len, queue.span_since(start_ns), &Ok(()));
        drop(passage);
    }

    /// Counts a request that the caller joined with another one.
    pub fn count_merged(&self, kind: IoKind) {
        self.0.counters.count_merged(kind);
    }

    /// Counts a request that the caller refused as impossible before it got here.
    pub fn count_invalid(&self, kind: IoKind) {
        let now_ns = rt::round_now_ns();
        self.0.count_refused(kind, RequestOutcome::Invalid, now_ns, now_ns);
    }
}
