// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Attachments: the connections of exports and jobs with nodes of the graph. Requests go to the node that is at the
//! attachment's place now.

use super::changes::ChangeScope;
use super::gate::Gate;
use super::queue::Queue;
use super::{Drained, Graph};
use crate::node::{Edge, Hold, Node};
use crate::stats::{Accounting, AttachmentStats, IoKind, LaneSum, Observed};
use arc_swap::ArcSwap;
use cowshed_storage::{PermissionSet, Permissions, rt};
use cowshed_types::{Error, ErrorKind, Result, slip};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The wishes of a new attachment: name, rights and kind of user.
#[derive(Clone, Debug)]
pub struct AttachRequest {
    name: String,
    permissions: Permissions,
    counted: bool,
    export: bool,
    hold: Option<Hold>,
}

impl AttachRequest {
    /// An export by its id: reads, and writes if `writable`; others may do the same meanwhile.
    pub fn export(name: impl Into<String>, writable: bool) -> AttachRequest {
        let write = if writable { PermissionSet::WRITE } else { PermissionSet::NONE };
        let used = PermissionSet::CONSISTENT_READ | write;
        let permissions = Permissions { used, shared: PermissionSet::ALL };
        AttachRequest { name: name.into(), permissions, counted: true, export: true, hold: None }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// A job by its id, with its operations and those that it lets others do.
    pub fn job(name: impl Into<String>, permissions: Permissions) -> AttachRequest {
        AttachRequest { name: name.into(), permissions, counted: true, export: false, hold: None }
    }

    /// As [`AttachRequest::job`], of a job that only keeps a node as it is.
    pub(super) fn hold(name: String, shared: PermissionSet, hold: Hold) -> AttachRequest {
        let permissions = Permissions { used: PermissionSet::NONE, shared };
        AttachRequest { name, permissions, counted: false, export: false, hold: Some(hold) }
    }

    /// It may change the size besides.
    #[must_use]
    pub fn resizing(mut self) -> AttachRequest {
        self.permissions.used = self.permissions.used | PermissionSet::RESIZE;
        self
    }

    /// Its requests aren't counted: for users that keep statistics of their own.
    pub fn without_statistics(self) -> AttachRequest {
        AttachRequest { counted: false, ..self }
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
    export: bool,
    node: ArcSwap<Node>,
    /// Counts the changes of `node` and of the nodes below it.
    generation: AtomicU64,
    gate: Gate,
    detached: AtomicBool,
    /// Held by the one that gives the node back, and its result afterwards.
    ending: futures_util::lock::Mutex<Option<Result<()>>>,
    counts: LaneSum,
    counted: bool,
    /// True when `observed` has something: then each request looks there.
    observing: AtomicBool,
    account_failed: AtomicBool,
    account_invalid: AtomicBool,
    observed: Mutex<Observed>,
}

/// The user of a node that stands for an attachment.
pub(super) fn user_of(name: &str) -> String {
    format!("{USER_PREFIX}{name}")
}

const USER_PREFIX: &str = "attachment:";

/// True when the user of a node is an attachment.
pub(super) fn is_attachment(user: &str) -> bool {
    user.starts_with(USER_PREFIX)
}

impl Attachment {
    pub(super) fn new(graph: &Arc<Graph>, node: &Arc<Node>, request: AttachRequest) -> Result<Arc<Attachment>> {
        let user = user_of(&request.name);
        node.attach(Edge::new(&user, request.permissions).of_export(request.export).of_hold(request.hold))?;
        Ok(Arc::new(Attachment {
            name: request.name,
            graph: Arc::clone(graph),
            permissions: request.permissions,
            export: request.export,
            node: ArcSwap::new(Arc::clone(node)),
            generation: AtomicU64::new(0),
            gate: Gate::default(),
            detached: AtomicBool::new(false),
            ending: futures_util::lock::Mutex::default(),
            counts: LaneSum::default(),
            counted: request.counted,
            observing: AtomicBool::new(false),
            account_failed: AtomicBool::new(true),
            account_invalid: AtomicBool::new(true),
            observed: Mutex::default(),
        }))
    }

    /// The id of the export or job.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The node at this place now.
    pub fn node(&self) -> Arc<Node> {
        self.node.load_full()
    }

    /// Virtual size in bytes, now.
    pub fn size(&self) -> u64 {
        self.node.load().size()
    }

    /// Tells the observers of an export's request that failed.
    #[cold]
    pub(super) fn tell_failed(&self, kind: IoKind, error: &Error) {
        if self.export && !matches!(error.kind(), ErrorKind::InvalidArgument | ErrorKind::ReadOnly) {
            self.graph.tell_failed(&self.name, &self.node(), kind, error);
        }
    }

    /// True for an export, false for a job.
    pub fn is_export(&self) -> bool {
        self.export
    }

    /// True when it may write.
    pub fn is_writable(&self) -> bool {
        self.permissions.used.contains(PermissionSet::WRITE)
    }

    /// A queue for the requests of this thread.
    pub fn queue(self: &Arc<Self>) -> Queue {
        Queue::of(self)
    }

    /// Holds new requests back and waits for those in flight; they go on when the guard is dropped.
    pub async fn drain(self: &Arc<Self>) -> Drained {
        Drained::of(self).await
    }

    /// Waits for the requests in flight, flushes and gives the node back. A node that has no other users and wasn't
    /// added by name is closed. Requests that come later fail. A future that is dropped while it waits for requests
    /// changes nothing. Later, the node is given back all the same, which may wait for a change of the graph. A second
    /// call returns the result of the first.
    pub async fn detach(self: &Arc<Self>) -> Result<()> {
        self.end(true).await
    }

    /// As [`Attachment::detach`], without a flush: writes are durable, or the next user's to make durable.
    pub async fn hand_over(self: &Arc<Self>) -> Result<()> {
        self.end(false).await
    }

    async fn end(self: &Arc<Self>, flushes: bool) -> Result<()> {
        // Before the turn, too.
        let drained = self.drain().await;
        let attachment = Arc::clone(self);
        rt::to_completion(async move {
            // One at a time: another end closes the node, which is not to be flushed then.
            let mut ending = attachment.ending.lock().await;
            if let Some(ended) = &*ending {
                return ended.clone();
            }
            let ended = attachment.end_alone(flushes, drained).await;
            ending.insert(ended).clone()
        })
        .await
    }

    async fn end_alone(self: &Arc<Self>, flushes: bool, drained: Drained) -> Result<()> {
        let node = self.node();
        let flushes = flushes && self.is_writable() && !slip!("no_flush_at_detach");
        // Before the turn: a flush that never ends would keep every other change of the graph waiting.
        let first = if flushes { node.flush().await } else { Ok(()) };
        let _one_change = self.graph.changing_in(ChangeScope::Attachment(Arc::downgrade(self))).await;
        // A change that ran meanwhile may have moved the attachment, with the node closed, or have stopped writes to the node
        // for a time.
        let was_changing = node.is_closed() || matches!(&first, Err(error) if error.kind() == ErrorKind::ReadOnly);
        let flushed = match flushes && (was_changing || !Arc::ptr_eq(&node, &self.node())) {
            true => {
                let second = self.node().flush().await;
                // An error of the medium counts wherever the attachment is now.
                if was_changing { second } else { first.and(second) }
            }
            false => first,
        };
        flushed.and(self.release_drained(drained).await)
    }

    async fn release_drained(&self, drained: Drained) -> Result<()> {
        if self.detached.swap(true, Ordering::SeqCst) {
            return Ok(());
        }
        let node = self.node();
        let unused = node.release(&user_of(&self.name));
        self.graph.forget_attachment(self);
        drop(drained);
        if unused { node.close().await } else { Ok(()) }
    }

    /// The requests that went through it so far.
    pub fn statistics(&self) -> AttachmentStats {
        let counts = self.counts.counts();
        let mut stats = AttachmentStats {
            kinds: counts.kinds,
            accounting: self.accounting(),
            highest_written_byte: counts.highest_written_byte,
            ..AttachmentStats::default()
        };
        stats.in_flight = self.gate.in_flight();
        let now = rt::now_ns();
        let is_idle = stats.in_flight == 0 && counts.last_end_ns != 0;
        stats.idle_ns = is_idle.then(|| now.saturating_sub(counts.last_end_ns));
        let observed = self.observed();
        stats.intervals = observed.intervals(now);
        stats.histograms = observed.histograms();
        stats
    }

    /// Keeps latencies over intervals of these lengths, in seconds, instead of those asked for before
    /// (`stats-intervals`).
    pub fn set_intervals(&self, lengths_seconds: &[u64]) -> Result<()> {
        let mut observed = self.observed();
        observed.set_intervals(lengths_seconds, rt::now_ns())?;
        self.note_observing(&observed);
        Ok(())
    }

    /// Keeps a latency histogram for requests of a kind, a new one with these bounds in nanoseconds; an empty list ends
    /// it.
    pub fn set_histogram(&self, kind: IoKind, bounds_ns: &[u64]) -> Result<()> {
        let mut observed = self.observed();
        observed.set_histogram(kind, bounds_ns)?;
        self.note_observing(&observed);
        Ok(())
    }

    /// Sets the requests that count for latencies and idle time from now on (`stats-account-failed`,
    /// `stats-account-invalid`).
    pub fn set_accounting(&self, accounting: Accounting) {
        self.account_failed.store(accounting.failed, Ordering::Relaxed);
        self.account_invalid.store(accounting.invalid, Ordering::Relaxed);
    }

    pub(super) fn accounting(&self) -> Accounting {
        Accounting {
            failed: self.account_failed.load(Ordering::Relaxed),
            invalid: self.account_invalid.load(Ordering::Relaxed),
        }
    }

    fn note_observing(&self, observed: &Observed) {
        self.observing.store(!observed.is_empty(), Ordering::SeqCst);
        self.gate.with_lanes(|lanes| lanes.iter().for_each(|lane| lane.set_plain(self.counts_plainly())));
    }

    fn observed(&self) -> MutexGuard<'_, Observed> {
        self.observed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn user(&self) -> String {
        user_of(&self.name)
    }

    pub(super) fn gate(&self) -> &Gate {
        &self.gate
    }

    pub(super) fn permissions(&self) -> Permissions {
        self.permissions
    }

    pub(super) fn is_detached(&self) -> bool {
        self.detached.load(Ordering::Relaxed)
    }

    pub(super) fn is_counted(&self) -> bool {
        self.counted
    }

    /// True when [`Attachment::observe`] needs each request.
    pub(super) fn is_observing(&self) -> bool {
        self.observing.load(Ordering::SeqCst)
    }

    /// True when requests that were carried out are counted, and nothing more.
    pub(super) fn counts_plainly(&self) -> bool {
        self.counted && !self.is_observing()
    }

    /// A number that changes when the node does, or a node below it.
    pub(super) fn generation(&self) -> u64 {
        self.generation.load(Ordering::SeqCst)
    }

    /// Closes the gate for the drains that run below.
    pub(super) fn join_drains(self: &Arc<Self>) {
        self.graph.drains.join(self);
    }

    /// Queues look again at the nodes below them. It is drained.
    pub(super) fn renew(&self) {
        self.generation.fetch_add(1, Ordering::SeqCst);
    }

    /// The lanes that count its requests.
    pub(super) fn counts(&self) -> &LaneSum {
        &self.counts
    }

    /// Another node in its place. It is drained, and attached to that node already.
    pub(super) fn point_to(&self, node: Arc<Node>) {
        self.node.store(node);
        self.renew();
    }

    #[cold]
    pub(super) fn observe(&self, kind: IoKind, latency_ns: u64, end_ns: u64) {
        self.observed().record(kind, latency_ns, end_ns);
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
