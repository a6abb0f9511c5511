// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Turning nodes read-only and back, with their files and the locks on those.

use super::Graph;
use super::files::check_children;
use crate::node::{ChildRole, Edge, LocalFuture, Node};
use cowshed_block::{Error, ErrorKind, Result};
use cowshed_storage::rt;
use std::sync::Arc;

/// Drivers that stay read-only once they are opened so. Each writes to a second node besides, and an image may have named that
/// node for reading only. QEMU refuses to reopen the same drivers.
const STAY_READ_ONLY: &[&str] = &["blklogwrites", "blkverify", "compress", "copy-before-write", "quorum"];

/// Refuses a read-only node that could not be opened again for writing, or that stands on one.
pub(super) fn check_becomes_writable(node: &Node) -> Result<()> {
    if !node.is_read_only() {
        return Ok(());
    }
    let driver = node.driver_name();
    if STAY_READ_ONLY.contains(&driver) {
        let message =
            format!("Block format '{driver}' used by node '{}' does not support reopening files", node.name());
        return Err(Error::new(ErrorKind::ReadOnly, message));
    }
    let mut storage = node.children().into_iter().filter(|child| child.role != ChildRole::Backing);
    storage.try_for_each(|child| check_becomes_writable(&child.node))
}

impl Graph {
    /// Makes a node read-only or writable, with the files that store it. Refused while somebody writes to it, or where
    /// its file may not be written. A future that is dropped while it waits for requests changes nothing; later, the change is
    /// made all the same.
    pub async fn set_read_only(self: &Arc<Self>, node: &Arc<Node>, read_only: bool) -> Result<()> {
        let one_change = self.changing([node]).await;
        let drained = self.drain(&[node]).await;
        let (graph, node) = (Arc::clone(self), Arc::clone(node));
        rt::to_completion(async move {
            let _held = (drained, one_change);
            match read_only {
                true => {
                    node.complete().await?;
                    graph.make_read_only(&node).await
                }
                false => {
                    check_becomes_writable(&node)?;
                    graph.make_writable(&node).await
                }
            }
        })
        .await
    }

    /// [`Node::complete`] has run, and no request runs.
    pub(super) fn make_read_only<'a>(&'a self, node: &'a Arc<Node>) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move {
            if node.is_read_only() {
                return Ok(());
            }
            if node.has_writer() {
                return Err(Error::new(ErrorKind::Busy, format!("node '{}' has a writer", node.name())));
            }
            node.stop_writing()?;
            for child in node.children() {
                if child.role == ChildRole::Backing {
                    continue;
                }
                // Asking for less can't meet a conflict.
                match node.passes_permissions() {
                    true => node.pass_permissions()?,
                    false => child.node.change_user(node.name(), Edge::of(node.name(), false, false).permissions)?,
                }
                if !node.is_filter() && !child.node.has_writer() {
                    // A filter has a state of its own behind that of its user: space ahead, for one.
                    if child.node.is_filter() {
                        child.node.complete().await?;
                    }
                    self.make_read_only(&child.node).await?;
                }
            }
            Ok(())
        })
    }

    /// No request runs. On an error everything is as before.
    pub(super) fn make_writable<'a>(&'a self, node: &'a Arc<Node>) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move {
            if !node.is_read_only() {
                return Ok(());
            }
            check_children(&node.children())?;
            let mut done: Vec<Arc<Node>> = Vec::new();
            let result = self.make_children_writable(node, &mut done).await;
            let result = match result {
                Ok(()) => node.start_writing().await,
                error => error,
            };
            if result.is_err() {
                for child in done {
                    let undone = match node.passes_permissions() {
                        true => node.pass_permissions(),
                        false => child.change_user(node.name(), Edge::of(node.name(), false, false).permissions),
                    };
                    if let Err(error) = undone.and(self.make_read_only(&child).await) {
                        tracing::error!("{error}");
                    }
                }
            }
            result
        })
    }

    async fn make_children_writable(&self, node: &Arc<Node>, done: &mut Vec<Arc<Node>>) -> Result<()> {
        for child in node.children() {
            if child.role == ChildRole::Backing {
                continue;
            }
            let was_read_only = child.node.is_read_only();
            self.make_writable(&child.node).await?;
            if was_read_only {
                done.push(Arc::clone(&child.node));
            }
            if !node.passes_permissions() {
                child.node.change_user(node.name(), Edge::of(node.name(), true, false).permissions)?;
            }
        }
        Ok(())
    }
}
