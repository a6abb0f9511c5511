// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Drains: no request runs in a part of the graph while it is changed.

use super::Graph;
use super::attachment::Attachment;
use crate::node::{Node, nodes_below};
use cowshed_block::slip;
use std::sync::Arc;

/// While it lives, the drained attachments let no request in; those that come wait and go on afterwards.
#[must_use = "requests go on when the guard is dropped"]
pub struct Drained {
    attachments: Vec<Arc<Attachment>>,
    /// Nodes that hold requests back on purpose, and don't meanwhile.
    throttles: Vec<Arc<Node>>,
}

impl Drained {
    /// Closes the gates, lets throttled requests go, and waits until no request is left.
    pub(super) async fn of(attachments: Vec<Arc<Attachment>>) -> Drained {
        let mut throttles: Vec<Arc<Node>> = Vec::new();
        for attachment in &attachments {
            attachment.gate().close();
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
        let drained = Drained { attachments, throttles };
        for attachment in &drained.attachments {
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
        for attachment in &self.attachments {
            // What stands below may have changed.
            attachment.renew();
            attachment.gate().open();
        }
    }
}

/// True when `node` is `top` or below it.
pub(super) fn reaches(top: &Arc<Node>, node: &Arc<Node>) -> bool {
    nodes_below(top).iter().any(|known| Arc::ptr_eq(known, node))
}

impl Graph {
    /// Drains everything that can send requests to one of these nodes.
    pub async fn drain(&self, nodes: &[&Arc<Node>]) -> Drained {
        let is_above = |top: &Arc<Node>| {
            let below = nodes_below(top);
            nodes.iter().any(|node| below.iter().any(|known| Arc::ptr_eq(known, node)))
        };
        let affected = self.attachments().into_iter().filter(|attachment| is_above(&attachment.node()));
        let drained = Drained::of(affected.collect()).await;
        // What requests left behind goes on without them. No new ones come to these nodes.
        for node in self.snapshot().nodes().filter(is_above) {
            if !slip!("drain_without_what_is_read_ahead") {
                node.settle().await;
            }
        }
        drained
    }
}
