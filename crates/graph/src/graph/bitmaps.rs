// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Changes of dirty bitmaps, also of those that an image below a snapshot stores: it takes writes for that moment.

use super::Graph;
use super::transaction::Transaction;
use super::writing::check_becomes_writable;
use crate::node::{BitmapChange, Node, SavedBitmap};
use cowshed_storage::rt;
use cowshed_types::{DirtyBits, Result};
use std::sync::Arc;

/// The work on a node's bitmaps.
enum Work {
    Change(BitmapChange, bool),
    Restore(SavedBitmap),
    Set(String, Arc<DirtyBits>),
}

impl Work {
    async fn run(&self, node: &Arc<Node>) -> Result<()> {
        match self {
            Work::Change(change, persistent) => node.change_bitmap(change, *persistent).await,
            Work::Restore(saved) => node.restore_bitmap(saved).await,
            Work::Set(name, bits) => node.set_bitmap_bits(name, bits).await,
        }
    }
}

impl Graph {
    /// As [`Node::change_bitmap`].
    pub async fn change_bitmap(
        self: &Arc<Self>,
        node: &Arc<Node>,
        change: &BitmapChange,
        persistent: bool,
    ) -> Result<()> {
        self.work_on_bitmaps(node, Work::Change(change.clone(), persistent)).await
    }

    /// As [`Node::restore_bitmap`].
    pub async fn restore_bitmap(self: &Arc<Self>, node: &Arc<Node>, saved: &SavedBitmap) -> Result<()> {
        self.work_on_bitmaps(node, Work::Restore(saved.clone())).await
    }

    /// As [`Node::set_bitmap_bits`].
    pub async fn set_bitmap_bits(self: &Arc<Self>, node: &Arc<Node>, name: &str, bits: &Arc<DirtyBits>) -> Result<()> {
        self.work_on_bitmaps(node, Work::Set(name.to_owned(), Arc::clone(bits))).await
    }

    /// On an error everything is as before, as far as the work itself leaves it so.
    async fn work_on_bitmaps(self: &Arc<Self>, node: &Arc<Node>, work: Work) -> Result<()> {
        if !node.is_below_snapshot() {
            return work.run(node).await;
        }
        let one_change = self.changing([node]).await;
        let drained = self.drain(&[node]).await;
        let (graph, node) = (Arc::clone(self), Arc::clone(node));
        rt::to_completion(async move {
            let _held = (drained, one_change);
            let mut change = Transaction::default();
            let worked = graph.work_for_a_moment(&node, &work, &mut change).await;
            change.end(&graph, worked).await
        })
        .await
    }

    async fn work_for_a_moment(&self, node: &Arc<Node>, work: &Work, change: &mut Transaction) -> Result<()> {
        check_becomes_writable(node)?;
        self.make_writable(node, change).await?;
        work.run(node).await?;
        node.complete().await?;
        self.make_read_only(node, change).await
    }
}
