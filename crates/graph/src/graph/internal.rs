// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Internal snapshots of images in use: requests wait meanwhile.

use super::Graph;
use crate::node::{ChildRole, Node, Snapshots};
use cowshed_layout::qcow2::{Snapshot, SnapshotName};
use cowshed_storage::rt;
use cowshed_types::{Error, ErrorKind, Result};
use std::sync::Arc;

impl Graph {
    /// Takes an internal snapshot of an image under its users; its ID. The name must be new. Data written before is in
    /// the snapshot, and durable. A future that is dropped while it waits for requests changes nothing; later, the
    /// snapshot is taken all the same.
    pub async fn take_internal_snapshot(self: &Arc<Self>, node: &Arc<Node>, name: &str) -> Result<String> {
        let one_change = self.changing([node]).await;
        let drained = self.drain(&[node]).await;
        let (node, name) = (Arc::clone(node), name.to_owned());
        rt::to_completion(async move {
            let _held = (drained, one_change);
            take(&node, &name).await
        })
        .await
    }

    /// Deletes an internal snapshot of an image under its users, and returns its description. Dropped futures: as
    /// [`Graph::take_internal_snapshot`].
    pub async fn delete_internal_snapshot(
        self: &Arc<Self>,
        node: &Arc<Node>,
        wanted: &SnapshotName,
    ) -> Result<Snapshot> {
        let one_change = self.changing([node]).await;
        let drained = self.drain(&[node]).await;
        let (node, wanted) = (Arc::clone(node), wanted.clone());
        rt::to_completion(async move {
            let _held = (drained, one_change);
            delete(&node, &wanted).await
        })
        .await
    }
}

/// No request runs.
async fn take(node: &Node, name: &str) -> Result<String> {
    let snapshots = writable(node)?;
    if name.is_empty() {
        return Err(Error::invalid_argument("Name is empty"));
    }
    if node.child(ChildRole::DataFile).is_some() {
        return Err(no_list());
    }
    let known = snapshots.list().await?;
    if known.iter().any(|snapshot| snapshot.name == name.as_bytes()) {
        let message = format!("Snapshot with name '{name}' already exists on device '{}'", node.name());
        return Err(Error::new(ErrorKind::InvalidArgument, message));
    }
    snapshots.take(name, &node.options(), node.discards()).await
}

/// No request runs.
async fn delete(node: &Node, wanted: &SnapshotName) -> Result<Snapshot> {
    if node.driver().snapshots().is_none() || node.child(ChildRole::DataFile).is_some() {
        return Err(no_list());
    }
    if let Some(snapshots) = node.driver().snapshots()
        && wanted.find(&snapshots.list().await?).is_none()
    {
        let (id, name) = wanted.parts();
        let (id, name) = (id.unwrap_or("null"), name.unwrap_or("null"));
        let message = format!("Snapshot with id '{id}' and name '{name}' does not exist on device '{}'", node.name());
        return Err(Error::new(ErrorKind::NotFound, message));
    }
    if node.is_read_only() {
        let message = "Failed to remove snapshot from snapshot list: Operation not permitted";
        return Err(Error::new(ErrorKind::ReadOnly, message));
    }
    writable(node)?.delete(wanted, &node.options(), node.discards()).await
}

/// QEMU's error for an image that can have no snapshots.
fn no_list() -> Error {
    Error::unsupported("Failed to get a snapshot list: Operation not supported")
}

/// The snapshots of an image that may get more.
fn writable(node: &Node) -> Result<&dyn Snapshots> {
    let Some(snapshots) = node.driver().snapshots() else {
        let (driver, name) = (node.driver_name(), node.name());
        let message = format!("Block format '{driver}' used by device '{name}' does not support internal snapshots");
        return Err(Error::unsupported(message));
    };
    if node.is_read_only() {
        return Err(Error::new(ErrorKind::ReadOnly, format!("Device '{}' is read only", node.name())));
    }
    Ok(snapshots)
}
