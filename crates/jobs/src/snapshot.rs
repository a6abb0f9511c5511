// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Internal snapshots: lists, takes, applies and deletes them.

use crate::info::SnapshotInfo;
use crate::layer::qcow2_layer;
use crate::{ImageSpec, JobHandle, in_work};
use cowshed_image::graph::only_child;
use cowshed_image::node::ChildRole;
use cowshed_image::{Node, OpenRequest};
use cowshed_offline::snapshots::{self, SnapshotOptions};
use cowshed_storage::File;
use cowshed_storage::fault::as_metadata;
use cowshed_types::{Error, Result};
use std::sync::Arc;

/// An operation on snapshots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SnapshotAction {
    /// Take one with this name.
    Create(String),
    /// Give the disk the snapshot's data: by ID, else by name.
    Apply(String),
    /// Delete one, by name.
    Delete(String),
}

/// The snapshots of an image; none for formats without them.
pub async fn list(image: &ImageSpec) -> Result<Vec<SnapshotInfo>> {
    let node = image.open(image.request()?.no_backing().without_content()).await?;
    // As in QEMU a driver without snapshots shows those of its only child.
    let listed = match qcow2_layer(&node).or_else(|| shown_image(&node).and_then(|below| qcow2_layer(&below))) {
        Some(layer) => layer.snapshots().await,
        None => Ok(Vec::new()),
    };
    let closed = node.close().await;
    let snapshots = listed?.iter().map(SnapshotInfo::from).collect();
    closed.map(|()| snapshots)
}

/// The image whose snapshots a node without them shows.
fn shown_image(node: &Node) -> Option<Arc<Node>> {
    let child = only_child(node)?;
    let below = qcow2_layer(&child).is_none().then(|| shown_image(&child)).flatten();
    below.or(Some(child))
}

/// Carries an action out. Progress counts tables of metadata. The image is locked for writing meanwhile.
pub async fn run(image: &ImageSpec, action: &SnapshotAction, job: &JobHandle) -> Result<()> {
    job.pause_point().await?;
    let request: OpenRequest = image.request()?.force_share(false).writable(true);
    let node = image.open(request.for_check().trying_keys().no_backing()).await?;
    let result = match file_of(&node) {
        Ok(file) => as_metadata(change(&file, action, job)).await,
        Err(error) => Err(error),
    };
    let closed = node.close().await;
    let (verb, name) = match action {
        SnapshotAction::Create(name) => ("create", name),
        SnapshotAction::Apply(name) => ("apply", name),
        SnapshotAction::Delete(name) => ("delete", name),
    };
    result.and(closed).map_err(|error| in_work(error, format!("Could not {verb} snapshot '{name}'")))
}

/// The file of a qcow2 image that is opened bare.
pub(crate) fn file_of(node: &Node) -> Result<File> {
    if !node.has_snapshots() {
        let message = format!("images of the format '{}' have no internal snapshots", node.driver_name());
        return Err(Error::unsupported(message).file(node.filename()));
    }
    let file = node.child(ChildRole::File).map(|child| child.storage());
    file.ok_or_else(|| Error::unsupported("the image isn't stored in a file").file(node.filename()))
}

async fn change(file: &File, action: &SnapshotAction, job: &JobHandle) -> Result<()> {
    let options = SnapshotOptions::default();
    let watch = |done: u64, total: u64| {
        job.set_progress(done, total);
        !job.is_cancelled()
    };
    match action {
        SnapshotAction::Create(name) => snapshots::create(file, name.as_bytes(), &options, &watch).await.map(drop),
        SnapshotAction::Apply(name) => snapshots::apply(file, name.as_bytes(), &options, &watch).await,
        SnapshotAction::Delete(name) => snapshots::delete(file, name.as_bytes(), &options, &watch).await,
    }
}
