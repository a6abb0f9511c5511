// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Drains: no request runs in a part of the graph while it is changed.

use super::Graph;
use super::attachment::Attachment;
use crate::node::{Node, nodes_below};
use cowshed_types::slip;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// While it lives, the drained attachments let no request in; those that come wait and go on afterwards.
#[must_use = "requests go on when the guard is dropped"]
pub struct Drained {
    closed: Arc<Closed>,
    /// Nodes that hold requests back on purpose, and don't meanwhile.
    throttles: Vec<Arc<Node>>,
}

/// The gates that a drain holds closed.
struct Closed {
    /// An attachment to a node that reaches one of these joins the drain.
    nodes: Vec<Arc<Node>>,
    /// `None` when the drain is over.
    attachments: Mutex<Option<Vec<Arc<Attachment>>>>,
}

impl Closed {
    fn attachments(&self) -> MutexGuard<'_, Option<Vec<Arc<Attachment>>>> {
        self.attachments.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_below(&self, top: &Arc<Node>) -> bool {
        let below = nodes_below(top);
        self.nodes.iter().any(|node| below.iter().any(|known| Arc::ptr_eq(known, node)))
    }

    /// Closes the gate, once.
    fn add(&self, attachment: &Arc<Attachment>) {
        let mut closed = self.attachments();
        let Some(attachments) = &mut *closed else { return };
        if !attachments.iter().any(|known| Arc::ptr_eq(known, attachment)) {
            attachment.gate().close();
            attachments.push(Arc::clone(attachment));
        }
    }
}

/// The drains that run.
#[derive(Default)]
pub(super) struct Drains(Mutex<Vec<Weak<Closed>>>);

impl Drains {
    fn list(&self) -> MutexGuard<'_, Vec<Weak<Closed>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(&self, nodes: &[&Arc<Node>]) -> Arc<Closed> {
        let nodes = nodes.iter().map(|node| Arc::clone(node)).collect();
        let closed = Arc::new(Closed { nodes, attachments: Mutex::new(Some(Vec::new())) });
        let mut list = self.list();
        list.retain(|known| known.strong_count() > 0);
        list.push(Arc::downgrade(&closed));
        closed
    }

    /// A new attachment waits for the drains that run below it.
    pub(super) fn join(&self, attachment: &Arc<Attachment>) {
        let running: Vec<Arc<Closed>> = self.list().iter().filter_map(Weak::upgrade).collect();
        for closed in running {
            if closed.is_below(&attachment.node()) && !slip!("new_users_overtake_a_drain") {
                closed.add(attachment);
            }
        }
    }
}

impl Drained {
    /// Closes the gates, lets throttled requests go, and waits until no request is left.
    pub(super) async fn of(attachment: &Arc<Attachment>) -> Drained {
        let closed = Arc::new(Closed { nodes: Vec::new(), attachments: Mutex::new(Some(Vec::new())) });
        Self::begin(closed, vec![Arc::clone(attachment)]).await
    }

    async fn begin(closed: Arc<Closed>, attachments: Vec<Arc<Attachment>>) -> Drained {
        let mut throttles: Vec<Arc<Node>> = Vec::new();
        for attachment in &attachments {
            closed.add(attachment);
            for node in nodes_below(&attachment.node()) {
                if node.throttle().is_some() && !throttles.iter().any(|known| Arc::ptr_eq(known, &node)) {
                    throttles.push(node);
                }
            }
        }
        for throttle in throttles.iter().filter_map(|node| node.throttle()) {
            throttle.begin_drain();
        }
        // Made before the wait: dropped half-way, it opens the gates again.
        let drained = Drained { closed, throttles };
        for attachment in &attachments {
            if !slip!("live_snapshot_overtakes_writers") {
                attachment.gate().empty().await;
            }
        }
        drained
    }
}

impl Drop for Drained {
    fn drop(&mut self) {
        for throttle in self.throttles.iter().filter_map(|node| node.throttle()) {
            throttle.end_drain();
        }
        let attachments = self.closed.attachments().take().unwrap_or_default();
        for attachment in attachments {
            // The nodes below may have changed: nodes that another drain holds may be there by now.
            attachment.renew();
            attachment.join_drains();
            attachment.gate().open();
        }
    }
}

/// True when `node` is `top` or below it.
pub(super) fn reaches(top: &Arc<Node>, node: &Arc<Node>) -> bool {
    nodes_below(top).iter().any(|known| Arc::ptr_eq(known, node))
}

impl Graph {
    /// Drains everything that can send requests to one of these nodes, and new attachments while the guard lives.
    pub async fn drain(&self, nodes: &[&Arc<Node>]) -> Drained {
        // Before the look at the attachments: one that comes meanwhile sees the drain.
        let closed = self.drains.begin(nodes);
        let affected = self.attachments().into_iter().filter(|attachment| closed.is_below(&attachment.node()));
        let drained = Drained::begin(Arc::clone(&closed), affected.collect()).await;
        // The work that requests left behind goes on without them. Closed gates keep new ones from these nodes.
        for node in self.snapshot().nodes().filter(|top| closed.is_below(top)) {
            if !slip!("drain_without_what_is_read_ahead") {
                node.settle(&closed.nodes).await;
            }
        }
        drained
    }
}
