// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Requests of exports that failed, for the part of a program that reports them to the user.

use super::Graph;
use crate::node::Node;
use crate::stats::IoKind;
use cowshed_types::Error;
use std::sync::Arc;

/// A request that failed for another reason than being impossible.
#[derive(Clone, Copy, Debug)]
pub struct FailedRequest<'a> {
    /// The export's id.
    pub export: &'a str,
    /// The export's node.
    pub node: &'a Arc<Node>,
    /// The kind of request.
    pub kind: IoKind,
    /// The reason of the failure.
    pub error: &'a Error,
}

pub(super) type Listener = Box<dyn Fn(&FailedRequest<'_>) + Send + Sync>;

impl Graph {
    /// From now on calls `listener` for each failed request of an export, on the request's thread: it must be quick. The
    /// first listener stays.
    pub fn on_failed(&self, listener: impl Fn(&FailedRequest<'_>) + Send + Sync + 'static) {
        // A second one is not asked for.
        let _ = self.on_failed.set(Box::new(listener));
    }

    pub(super) fn tell_failed(&self, export: &str, node: &Arc<Node>, kind: IoKind, error: &Error) {
        if let Some(listener) = self.on_failed.get() {
            listener(&FailedRequest { export, node, kind, error });
        }
    }
}
