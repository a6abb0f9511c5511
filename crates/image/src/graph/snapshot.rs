// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Live snapshots: a new overlay under running clients.

use super::Graph;
use super::drain::reaches;
use crate::node::Node;
use cowshed_block::{Error, ErrorKind, Result, slip};
use cowshed_storage::rt;
use std::sync::Arc;

impl Graph {
    /// Puts `overlay` on top of `node` for everybody who uses `node`, which becomes its read-only backing file.
    ///
    /// Everything written before is in `node` and durable, everything written after is in the overlay; requests that
    /// come meanwhile wait, and none fails. The overlay must be an image without a backing node (`backing: null`)
    /// that nobody uses; its header isn't changed. On an error everything is as before. A future that is dropped while it waits
    /// for requests changes nothing; later, the snapshot is taken all the same.
    pub async fn take_snapshot(self: &Arc<Self>, node: &Arc<Node>, overlay: &Arc<Node>) -> Result<()> {
        let one_change = self.changing([node, overlay]).await;
        check_overlay(node, overlay)?;
        let drained = self.drain(&[node, overlay]).await;
        let (graph, node, overlay) = (Arc::clone(self), Arc::clone(node), Arc::clone(overlay));
        rt::to_completion(async move {
            let _held = (drained, one_change);
            graph.put_on_top(&node, &overlay).await
        })
        .await
    }

    /// See [`Graph::take_snapshot`]. No request runs.
    async fn put_on_top(&self, node: &Arc<Node>, overlay: &Arc<Node>) -> Result<()> {
        let was_writable = !node.is_read_only();
        // What can fail for reasons outside of this process comes first, and changes nothing that anybody sees.
        if !slip!("live_snapshot_over_an_unfinished_image") {
            node.complete().await?;
        }
        // The users leave first, so that nobody writes to the node when it becomes a backing file.
        self.move_users(node, overlay)?;
        let linked = match self.make_read_only(node).await {
            Ok(()) => self.set_backing_drained(overlay, Some(node)).map(drop),
            Err(error) => Err(error),
        };
        if linked.is_err() {
            let writable = if was_writable { self.make_writable(node).await } else { Ok(()) };
            if let Err(error) = writable.and_then(|()| self.move_users(overlay, node)) {
                tracing::error!("could not go back to the node below the overlay: {error}");
            }
        }
        linked
    }
}

fn check_overlay(node: &Arc<Node>, overlay: &Arc<Node>) -> Result<()> {
    let refuse = |kind: ErrorKind, message: String| Err(Error::new(kind, message));
    let name = overlay.name();
    if reaches(node, overlay) {
        return refuse(ErrorKind::InvalidArgument, format!("the overlay '{name}' is in use below '{}'", node.name()));
    }
    let users = overlay.user_names();
    if !users.is_empty() {
        return refuse(ErrorKind::Busy, "The overlay is already in use".to_owned());
    }
    if overlay.is_filter() {
        return refuse(ErrorKind::InvalidArgument, "Filters cannot be used as overlays".to_owned());
    }
    if overlay.backing_name().is_none() {
        let message = format!("the overlay '{name}' ({}) can't have a backing file", overlay.driver_name());
        return refuse(ErrorKind::InvalidArgument, message);
    }
    if overlay.backing().is_some() {
        return refuse(ErrorKind::InvalidArgument, "The overlay already has a backing image".to_owned());
    }
    if overlay.is_read_only() && node.has_writer() {
        return refuse(ErrorKind::ReadOnly, "Block node is read-only".to_owned());
    }
    Ok(())
}
