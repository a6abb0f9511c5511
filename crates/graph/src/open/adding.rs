// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Nodes that a graph opens and keeps.

use super::{Drivers, OpenRequest};
use crate::graph::Graph;
use crate::node::Node;
use crate::options::BlockdevOptions;
use cowshed_types::{Error, Result};
use std::sync::Arc;

impl Graph {
    /// An empty graph, whose nodes may have these drivers.
    pub fn new(drivers: &'static Drivers) -> Arc<Graph> {
        Graph::with_schemas(drivers)
    }

    /// Opens a node with everything below it, as `blockdev-add` does. It needs a `node-name`, is opened for writing
    /// unless the options forbid it, and stays until [`Graph::delete`].
    pub async fn add(self: &Arc<Self>, options: BlockdevOptions) -> Result<Arc<Node>> {
        self.add_with(OpenRequest::options(options)).await
    }

    /// As [`Graph::add`], for a request with further settings (a policy, a place for files).
    pub async fn add_with(self: &Arc<Self>, request: OpenRequest) -> Result<Arc<Node>> {
        if !request.has_node_name() {
            return Err(Error::invalid_argument("'node-name' must be specified for the root node"));
        }
        let _one_change = self.changing_named(&request.texts()).await;
        let node = Drivers::of(self).open(request.for_monitor(self)).await?;
        self.adopt(&node);
        Ok(node)
    }
}
