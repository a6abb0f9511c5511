// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The base of a chain in use, opened up for a job that writes the data of the layers above into it.

use super::announce_change;
use cowshed_image::graph::{AttachRequest, Attachment, Chain, Grants, Graph, below_filters, check_layers};
use cowshed_image::{Node, Preallocation};
use cowshed_storage::{PermissionSet, Permissions};
use cowshed_types::{Error, Result};
use std::sync::Arc;

/// The attachment by which the job `id` reads.
pub(crate) fn reader_of(id: &str) -> String {
    format!("{id}-source")
}

/// The permissions of a job on a disk in use: it reads, and no other user changes the size meanwhile.
pub(crate) fn reading_one_size() -> Permissions {
    Permissions { used: PermissionSet::CONSISTENT_READ, shared: PermissionSet::ALL & !PermissionSet::RESIZE }
}

/// A base that the job may write to. The data that its overlays read must stay the same.
pub(crate) struct OpenedBase {
    graph: Arc<Graph>,
    chain: Chain,
    base: Arc<Node>,
    writer: Arc<Attachment>,
    /// The layers whose content the job changes by writing to the base.
    held: Grants,
    /// The right to write to the base.
    grants: Grants,
}

impl OpenedBase {
    /// Makes the base of `chain` writable and as large as `size` bytes at least. The layers of `held` below its top are kept from
    /// others. An error leaves all as it was.
    pub async fn open(graph: &Arc<Graph>, id: &str, chain: Chain, held: &Chain, size: u64) -> Result<OpenedBase> {
        let base = chain.base().cloned().ok_or_else(|| Error::internal("a commit without a base"))?;
        let lowest = chain.lowest().cloned().ok_or_else(|| Error::internal("a chain without layers"))?;
        chain.check_private(id)?;
        check_layers(&base, chain.layers())?;
        let layers = Grants::new(graph);
        layers.hold_private(id, held, &[&reader_of(id)]).await?;
        let grants = Grants::new(graph);
        let granted = Self::grant(&grants, id, &base, &lowest).await;
        let writer = layers.end(grants.end(granted).await).await?;
        let opened = OpenedBase { graph: Arc::clone(graph), chain, base, writer, held: layers, grants };
        match opened.grow(size).await {
            Ok(()) => Ok(opened),
            Err(error) => opened.close().await.and(opened.let_go().await).and(Err(error)),
        }
    }

    async fn grant(grants: &Grants, id: &str, base: &Arc<Node>, lowest: &Arc<Node>) -> Result<Arc<Attachment>> {
        grants.make_writable(base).await?;
        grants.lend_backing(lowest)?;
        let write = PermissionSet::CONSISTENT_READ | PermissionSet::WRITE | PermissionSet::RESIZE;
        let permissions = Permissions { used: write, ..Permissions::READ };
        grants.attach(base, AttachRequest::job(format!("{id}-target"), permissions)).await
    }

    async fn grow(&self, size: u64) -> Result<()> {
        if let Some(lowest) = self.chain.lowest() {
            announce_change(&self.base, lowest).await?;
        }
        if self.base.size() >= size {
            return Ok(());
        }
        let image = below_filters(&self.base);
        let drained = self.graph.drain(&[&image]).await;
        let moving = image.moving_blocks();
        let resized = self.base.resize(size, Preallocation::Off).await;
        drop(moving);
        drop(drained);
        resized?;
        // The layer above must no longer take the range behind the old end for zeroes.
        let Some(lowest) = self.chain.lowest() else { return Ok(()) };
        let _drained = self.graph.drain(&[lowest]).await;
        if let Some(backing) = lowest.backing_name() {
            backing.plan_for(None);
        }
        Ok(())
    }

    pub fn chain(&self) -> &Chain {
        &self.chain
    }

    pub fn writer(&self) -> &Arc<Attachment> {
        &self.writer
    }

    /// Gives the held layers back. They read right again once their overlay has another backing node.
    pub async fn let_go(&self) -> Result<()> {
        self.held.take_back().await
    }

    /// Flushes, and gives the base its former state.
    pub async fn close(&self) -> Result<()> {
        let detached = self.writer.detach().await;
        self.end_change().await;
        detached.and(self.grants.take_back().await)
    }

    /// Overlays that are left behind are told from later ones: they noted the content that the job gave the base.
    async fn end_change(&self) {
        if let Some(marks) = below_filters(&self.base).marks() {
            marks.end_change().await;
        }
    }

    /// Ends while the base stays writable: it is others' by now, and the writer is detached. They are still its
    /// overlays, and their users decide about writes to it again.
    pub async fn release(&self) -> Result<()> {
        self.end_change().await;
        self.grants.leave_writable();
        self.grants.take_back().await
    }
}
