// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Live snapshots: a new overlay under running clients.

use super::Graph;
use super::drain::reaches;
use super::transaction::Transaction;
use crate::node::Node;
use cowshed_storage::rt;
use cowshed_types::{Error, ErrorKind, Result, slip};
use std::sync::Arc;

/// A snapshot that was taken, with the way back. Dropped, it stays.
pub struct SnapshotTaken {
    nodes: [Arc<Node>; 2],
    change: Transaction,
}

impl Graph {
    /// Puts `overlay` on top of `node` for all users of `node`, which becomes its read-only backing file.
    ///
    /// Everything written before is in `node` and durable, everything written after is in the overlay; requests that
    /// come meanwhile wait, and none fails. The overlay must be an image without users and without a backing node
    /// (`backing: null`); its header isn't changed. On an error everything is as before. A future that is dropped while
    /// it waits for requests changes nothing; later, the snapshot is taken all the same.
    pub async fn take_snapshot(self: &Arc<Self>, node: &Arc<Node>, overlay: &Arc<Node>) -> Result<SnapshotTaken> {
        let one_change = self.changing([node, overlay]).await;
        check_overlay(node, overlay)?;
        let drained = self.drain(&[node, overlay]).await;
        let (graph, node, overlay) = (Arc::clone(self), Arc::clone(node), Arc::clone(overlay));
        rt::to_completion(async move {
            let _held = (drained, one_change);
            let mut change = Transaction::default();
            match graph.put_on_top(&node, &overlay, &mut change).await {
                Ok(()) => Ok(SnapshotTaken { nodes: [node, overlay], change }),
                Err(error) => change.end(&graph, Err(error)).await,
            }
        })
        .await
    }

    /// Takes a snapshot back: its users stand on the node below again, which takes writes if it did before. Data
    /// written to the overlay is not in that node. Nothing else may have changed the two nodes since. Dropped futures:
    /// as [`Graph::take_snapshot`].
    pub async fn take_snapshot_back(self: &Arc<Self>, taken: SnapshotTaken) {
        let SnapshotTaken { nodes, change } = taken;
        let one_change = self.changing(&nodes).await;
        let drained = self.drain(&nodes.iter().collect::<Vec<_>>()).await;
        let graph = Arc::clone(self);
        rt::to_completion(async move {
            let _held = (drained, one_change);
            change.take_back(&graph).await;
        })
        .await;
    }

    /// See [`Graph::take_snapshot`]. No request runs.
    async fn put_on_top(&self, node: &Arc<Node>, overlay: &Arc<Node>, change: &mut Transaction) -> Result<()> {
        // The steps that can fail for reasons outside of this process come first, and change nothing that a user sees.
        if !slip!("live_snapshot_over_an_unfinished_image") {
            node.complete().await?;
        }
        // The users leave first, so that the node has no writers when it becomes a backing file.
        self.move_users(node, overlay, change)?;
        let was_read_only = node.is_read_only();
        self.make_read_only(node, change).await?;
        if !was_read_only {
            change.put_below_snapshot(node);
        }
        overlay.check_backing(Some(node)).await?;
        self.set_backing_drained(overlay, Some(node), change)?;
        // It reads the same after a crash.
        overlay.note_backing().await
    }
}

fn check_overlay(node: &Arc<Node>, overlay: &Arc<Node>) -> Result<()> {
    let refuse = |kind: ErrorKind, message: String| Err(Error::new(kind, message));
    let name = overlay.name();
    let in_use = || refuse(ErrorKind::Busy, "The overlay is already in use".to_owned());
    let is_below = reaches(node, overlay);
    // An unused node has no reader, and takes none below it.
    if overlay.has_reader() && (!is_below || node.has_reader()) {
        return in_use();
    }
    if overlay.is_filter() {
        return refuse(ErrorKind::InvalidArgument, "Filters cannot be used as overlays".to_owned());
    }
    if !overlay.takes_backing() {
        return refuse(ErrorKind::InvalidArgument, "The overlay does not support backing images".to_owned());
    }
    if overlay.backing().is_some() {
        return refuse(ErrorKind::InvalidArgument, "The overlay already has a backing image".to_owned());
    }
    if is_below {
        let message = format!("Making '{}' a backing child of '{name}' would create a cycle", node.name());
        return refuse(ErrorKind::InvalidArgument, message);
    }
    if !overlay.user_names().is_empty() {
        return in_use();
    }
    if overlay.is_read_only() && node.has_writer() {
        return refuse(ErrorKind::ReadOnly, "Block node is read-only".to_owned());
    }
    Ok(())
}
