// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The rights and nodes that a job gets in the graph, each noted with its way back. They go back together, the last one first, when
//! the job ends or can't begin.

use super::{AttachRequest, Attachment, Chain, Graph, HeldNodes};
use crate::node::Node;
use crate::options::BlockdevOptions;
use cowshed_types::Result;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// See the module's text. Dropping it gives back only the held nodes and the attachments.
pub struct Grants {
    graph: Arc<Graph>,
    given: Mutex<Vec<Grant>>,
}

enum Grant {
    /// Layers that others leave as they are.
    Held(HeldNodes),
    /// A node that was read-only.
    Writable(Arc<Node>),
    /// The backing node of this image takes writers.
    Lent(Arc<Node>),
    Attached(Arc<Attachment>),
    /// A node that has no place between others yet.
    Added(Arc<Node>),
    Filter(Arc<Node>),
    /// An image plans for a backing file of another length.
    Planned(Arc<Node>),
}

impl Grant {
    async fn take_back(self, graph: &Arc<Graph>) -> Result<()> {
        match self {
            Grant::Held(held) => held.release().await,
            Grant::Writable(node) => graph.set_read_only(&node, true).await,
            // The image may stand on another node meanwhile, or on none.
            Grant::Lent(overlay) if overlay.backing().is_none() => Ok(()),
            Grant::Lent(overlay) => graph.share_backing(&overlay, false),
            Grant::Attached(attachment) => attachment.detach().await,
            Grant::Added(node) => graph.delete(node.name()).await,
            Grant::Filter(filter) => graph.remove_filter(&filter).await,
            Grant::Planned(image) => {
                let _drained = graph.drain(&[&image]).await;
                if let Some(backing) = image.backing_name() {
                    backing.plan_for(None);
                }
                Ok(())
            }
        }
    }
}

impl Grants {
    /// None so far.
    pub fn new(graph: &Arc<Graph>) -> Grants {
        Grants { graph: Arc::clone(graph), given: Mutex::default() }
    }

    fn given(&self) -> MutexGuard<'_, Vec<Grant>> {
        self.given.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// See [`Graph::hold_private`].
    pub async fn hold_private(&self, id: &str, chain: &Chain, own: &[&str]) -> Result<()> {
        let held = self.graph.hold_private(id, chain, own).await?;
        self.given().push(Grant::Held(held));
        Ok(())
    }

    /// See [`Graph::hold_unchanged`].
    pub async fn hold_unchanged(&self, id: &str, chain: &Chain) -> Result<()> {
        let held = self.graph.hold_unchanged(id, chain).await?;
        self.given().push(Grant::Held(held));
        Ok(())
    }

    /// Makes a node writable, with the files that store it.
    pub async fn make_writable(&self, node: &Arc<Node>) -> Result<()> {
        let was_read_only = node.is_read_only();
        self.graph.set_read_only(node, false).await?;
        if was_read_only {
            self.given().push(Grant::Writable(Arc::clone(node)));
        }
        Ok(())
    }

    /// See [`Graph::share_backing`].
    pub fn lend_backing(&self, overlay: &Arc<Node>) -> Result<()> {
        self.graph.share_backing(overlay, true)?;
        self.given().push(Grant::Lent(Arc::clone(overlay)));
        Ok(())
    }

    /// See [`Graph::attach`].
    pub async fn attach(&self, node: &Arc<Node>, request: AttachRequest) -> Result<Arc<Attachment>> {
        let attachment = self.graph.attach(node, request).await?;
        self.given().push(Grant::Attached(Arc::clone(&attachment)));
        Ok(attachment)
    }

    /// See [`Graph::add`].
    pub async fn add(&self, options: BlockdevOptions) -> Result<Arc<Node>> {
        let node = self.graph.add(options).await?;
        self.given().push(Grant::Added(Arc::clone(&node)));
        Ok(node)
    }

    /// Puts a filter that [`Grants::add`] opened above `node` between it and its users.
    pub async fn put_above(&self, node: &Arc<Node>, filter: &Arc<Node>) -> Result<()> {
        self.graph.replace(node, filter).await?;
        let mut given = self.given();
        given.retain(|grant| !matches!(grant, Grant::Added(added) if Arc::ptr_eq(added, filter)));
        given.push(Grant::Filter(Arc::clone(filter)));
        Ok(())
    }

    /// See [`Graph::insert_filter`].
    pub async fn insert_filter(&self, node: &Arc<Node>, options: BlockdevOptions) -> Result<Arc<Node>> {
        let filter = self.graph.insert_filter(node, options).await?;
        self.given().push(Grant::Filter(Arc::clone(&filter)));
        Ok(filter)
    }

    /// Has an image plan as if its backing file had `bytes` bytes.
    pub async fn plan_for(&self, image: &Arc<Node>, bytes: u64) {
        let _drained = self.graph.drain(&[image]).await;
        if let Some(backing) = image.backing_name() {
            backing.plan_for(Some(bytes));
            self.given().push(Grant::Planned(Arc::clone(image)));
        }
    }

    /// Leaves nodes writable that were made so, and attachments as they are: they are others' by now.
    pub fn leave_writable(&self) {
        self.given().retain(|grant| !matches!(grant, Grant::Writable(_) | Grant::Attached(_)));
    }

    /// Gives all back, the last one first. Returns the first error; each is tried.
    pub async fn take_back(&self) -> Result<()> {
        let mut result = Ok(());
        loop {
            let last = self.given().pop();
            let Some(grant) = last else { return result };
            result = result.and(grant.take_back(&self.graph).await);
        }
    }

    /// Keeps what was given where `result` is no error, and gives it back otherwise.
    pub async fn end<T>(&self, result: Result<T>) -> Result<T> {
        if result.is_err()
            && let Err(error) = self.take_back().await
        {
            tracing::error!("could not take back what a job was granted: {error}");
        }
        result
    }
}
