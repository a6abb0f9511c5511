// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Another backing file in the header of an image in use. A job that shortens a chain ends so, and changes the graph with it; or the
//! name changes alone.

use super::Graph;
use super::transaction::Transaction;
use super::writing::check_becomes_writable;
use crate::node::{HeaderName, Node};
use cowshed_storage::rt;
use cowshed_types::Result;
use std::sync::Arc;

impl Graph {
    /// Puts an image on another backing node, or on none: first in its header, durably, then in the graph. It must read the same on
    /// both. `name` is how the header names it. On an error everything is as before. A future that is dropped while it waits
    /// for requests changes nothing; later, the image is put there all the same.
    pub async fn relink(
        self: &Arc<Self>,
        image: &Arc<Node>,
        backing: Option<&Arc<Node>>,
        name: Option<HeaderName>,
    ) -> Result<()> {
        let one_change = self.changing(backing.into_iter().chain([image])).await;
        let drained = self.drain(&[image]).await;
        let (graph, image, backing) = (Arc::clone(self), Arc::clone(image), backing.cloned());
        rt::to_completion(async move {
            let _held = (drained, one_change);
            let mut change = Transaction::default();
            let unused = graph.relink_drained(&image, backing.as_ref(), name.as_ref(), &mut change).await;
            match change.end(&graph, unused).await? {
                Some(unused) => unused.close().await,
                None => Ok(()),
            }
        })
        .await
    }

    /// Changes the name of the backing file that an image holds, with the format; in the graph nothing changes. Errors and dropped
    /// futures: as [`Graph::relink`].
    pub async fn rename_backing(self: &Arc<Self>, image: &Arc<Node>, name: &str, format: Option<&str>) -> Result<()> {
        let one_change = self.changing([image]).await;
        let drained = self.drain(&[image]).await;
        let (graph, image) = (Arc::clone(self), Arc::clone(image));
        let (name, format) = (name.to_owned(), format.map(str::to_owned));
        rt::to_completion(async move {
            let _held = (drained, one_change);
            let mut change = Transaction::default();
            let renamed = graph.rename_drained(&image, &name, format.as_deref(), &mut change).await;
            change.end(&graph, renamed).await
        })
        .await
    }

    /// See [`Graph::relink`]. Returns the old backing node when it has no users any more.
    async fn relink_drained(
        &self,
        image: &Arc<Node>,
        backing: Option<&Arc<Node>>,
        name: Option<&HeaderName>,
        change: &mut Transaction,
    ) -> Result<Option<Arc<Node>>> {
        let was_read_only = image.is_read_only();
        check_becomes_writable(image)?;
        self.make_writable(image, change).await?;
        if image.backing_name().is_some() {
            change.rename_backing(image, name.map(|name| name.file.as_str()), name.map(|name| name.format)).await?;
        }
        let unused = self.set_backing_drained(image, backing, change)?;
        self.restore(image, was_read_only, change).await?;
        Ok(unused)
    }

    /// See [`Graph::rename_backing`].
    async fn rename_drained(
        &self,
        image: &Arc<Node>,
        name: &str,
        format: Option<&str>,
        change: &mut Transaction,
    ) -> Result<()> {
        let was_read_only = image.is_read_only();
        check_becomes_writable(image)?;
        self.make_writable(image, change).await?;
        change.rename_backing(image, Some(name), format).await?;
        self.restore(image, was_read_only, change).await
    }

    /// Makes an image read-only that was so before.
    async fn restore(&self, image: &Arc<Node>, was_read_only: bool, change: &mut Transaction) -> Result<()> {
        if !was_read_only {
            return Ok(());
        }
        image.complete().await?;
        self.make_read_only(image, change).await
    }
}
