// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The filter of a mirror whose writes go to both ends. No user adds it by options, so it is made here.

use super::Graph;
use crate::filters::WriteBlocking;
use crate::node::{Below, ChildRole, Children, Edge, Link, MONITOR, Node, NodeParts, NodeSettings};
use crate::options::BlockdevOptions;
use cowshed_storage::{PermissionSet, Permissions};
use cowshed_types::Result;
use std::sync::Arc;

impl Graph {
    /// Puts a filter of this name between a node and its users. Once it is activated, their writes go to `target` too,
    /// which may have no other writers. [`Graph::remove_filter`] takes it out.
    pub async fn insert_write_blocking(
        self: &Arc<Self>,
        source: &Arc<Node>,
        target: &Arc<Node>,
        name: &str,
    ) -> Result<Arc<Node>> {
        let filter = self.build_write_blocking(source, target, name)?;
        filter.attach(Edge::new(MONITOR, Permissions::NONE))?;
        self.adopt(&filter);
        let inserted = self.replace(source, &filter).await;
        self.keep_inserted(filter, inserted).await
    }

    fn build_write_blocking(self: &Arc<Self>, source: &Arc<Node>, target: &Arc<Node>, name: &str) -> Result<Arc<Node>> {
        let reservation = self.reserve(Some(name))?;
        let children = Children::of(name);
        // A filter takes the rights of its users, and so far it has none.
        source.attach(Edge::new(name, Permissions::NONE).with_role(ChildRole::File))?;
        let (file, copy) = (Link::to(Some(Arc::clone(source))), Link::to(Some(Arc::clone(target))));
        children.push(ChildRole::File, Arc::clone(&file));
        let used = PermissionSet::CONSISTENT_READ | PermissionSet::WRITE;
        target.attach(
            Edge::new(name, Permissions { used, shared: PermissionSet::WRITE_UNCHANGED }).with_role(ChildRole::Target),
        )?;
        children.push(ChildRole::Target, Arc::clone(&copy));
        let node = Node::new(NodeParts {
            name: name.to_owned(),
            filename: source.filename(),
            driver: Box::new(WriteBlocking::new(Below::new(file), copy)),
            children,
            settings: NodeSettings { read_only: source.is_read_only(), discard: true, ..NodeSettings::default() },
            options: BlockdevOptions::new().with("node-name", name),
            given: Vec::new(),
            home: Box::new(Arc::clone(self)),
            warnings: Vec::new(),
            deadline: None,
        })?;
        reservation.fill(&node);
        Ok(node)
    }
}
