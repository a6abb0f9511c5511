// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Turning nodes read-only and back, with their files and the locks on those.

use super::Graph;
use super::files::check_children;
use super::transaction::Transaction;
use crate::node::{ChildRole, Edge, LocalFuture, Node};
use cowshed_storage::rt;
use cowshed_types::{Error, ErrorKind, Result};
use std::sync::Arc;

/// The refusal of another opening of a node whose driver has none.
pub(super) fn not_reopened(node: &Node) -> Error {
    let (driver, name) = (node.driver_name(), node.name());
    let message = format!("Block format '{driver}' used by node '{name}' does not support reopening files");
    Error::new(ErrorKind::ReadOnly, message)
}

/// Refuses a read-only node that could not be opened again for writing, or that stands on one.
pub(super) fn check_becomes_writable(node: &Node) -> Result<()> {
    if !node.is_read_only() {
        return Ok(());
    }
    if node.graph().schemas().stays_read_only(node.driver_name()) {
        return Err(not_reopened(node));
    }
    if node.children().iter().any(|child| child.role != ChildRole::Backing && child.node.stays_read_only()) {
        return Err(Error::new(ErrorKind::ReadOnly, "Block node is read-only"));
    }
    let mut storage = node.children().into_iter().filter(|child| child.role != ChildRole::Backing);
    storage.try_for_each(|child| check_becomes_writable(&child.node))
}

impl Graph {
    /// Makes a node read-only or writable, with the files that store it. Refused while it has a writer, or where its
    /// file may not be written. A future that is dropped while it waits for requests changes nothing; later, the change
    /// is made all the same.
    pub async fn set_read_only(self: &Arc<Self>, node: &Arc<Node>, read_only: bool) -> Result<()> {
        let one_change = self.changing([node]).await;
        let drained = self.drain(&[node]).await;
        let (graph, node) = (Arc::clone(self), Arc::clone(node));
        rt::to_completion(async move {
            let _held = (drained, one_change);
            let mut change = Transaction::default();
            let changed = match read_only {
                true => match node.complete().await {
                    Ok(()) => graph.make_read_only(&node, &mut change).await,
                    error => error,
                },
                false => match check_becomes_writable(&node) {
                    Ok(()) => graph.make_writable(&node, &mut change).await,
                    error => error,
                },
            };
            change.end(&graph, changed).await
        })
        .await
    }

    /// [`Node::complete`] has run, and no request runs.
    pub(super) fn make_read_only<'a>(
        &'a self,
        node: &'a Arc<Node>,
        change: &'a mut Transaction,
    ) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move {
            if node.is_read_only() {
                return Ok(());
            }
            self.make_itself_read_only(node, change)?;
            for child in node.children() {
                // A named file is its user's.
                let follows = child.node.is_described_by(node) || !node.passes_to_locks();
                if child.role != ChildRole::Backing && follows && !node.is_filter() && !child.node.has_writer() {
                    // A filter has a state of its own behind that of its user: space ahead, for one.
                    if child.node.is_filter() {
                        child.node.complete().await?;
                    }
                    self.make_read_only(&child.node, change).await?;
                }
            }
            Ok(())
        })
    }

    /// As [`Graph::make_read_only`], without the nodes that store it.
    pub(super) fn make_itself_read_only(&self, node: &Arc<Node>, change: &mut Transaction) -> Result<()> {
        if node.has_writer() {
            return Err(Error::new(ErrorKind::Busy, format!("node '{}' has a writer", node.name())));
        }
        change.stop_writing(node)?;
        for child in node.children().into_iter().filter(|child| child.role != ChildRole::Backing) {
            // Asking for less can't meet a conflict.
            match node.passes_permissions() {
                true => change.pass_permissions(node)?,
                false => {
                    let reading = Edge::of(node.name(), false, false).permissions;
                    change.change_user(&child.node, node.name(), reading)?;
                }
            }
        }
        Ok(())
    }

    /// No request runs.
    pub(super) fn make_writable<'a>(
        &'a self,
        node: &'a Arc<Node>,
        change: &'a mut Transaction,
    ) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move {
            if !node.is_read_only() {
                return Ok(());
            }
            for child in node.children().into_iter().filter(|child| child.role != ChildRole::Backing) {
                self.make_writable(&child.node, change).await?;
            }
            self.make_itself_writable(node, change).await
        })
    }

    /// As [`Graph::make_writable`], above nodes that are writable already.
    pub(super) async fn make_itself_writable(&self, node: &Arc<Node>, change: &mut Transaction) -> Result<()> {
        check_children(&node.children())?;
        for child in node.children().into_iter().filter(|child| child.role != ChildRole::Backing) {
            if !node.passes_permissions() {
                change.change_user(&child.node, node.name(), Edge::of(node.name(), true, false).permissions)?;
            }
        }
        change.start_writing(node).await
    }
}
