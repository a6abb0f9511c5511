// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A change of the graph in steps that are taken back together.
//!
//! Every step that changes an edge, a link, an option or the right to write goes through a [`Transaction`], which notes the way
//! back. A change that fails half-way takes its steps back, the last one first. No request runs meanwhile.

use super::{Attachment, Graph};
use crate::node::{Edge, Link, Node};
use cowshed_storage::{CacheMode, File, Permissions};
use cowshed_types::{Error, Result};
use serde_json::Value;
use std::sync::Arc;

#[cfg(test)]
mod tests;

/// The steps of one change so far.
#[derive(Default)]
pub(super) struct Transaction {
    undo: Vec<Undo>,
}

/// The way back of one step.
enum Undo {
    /// A node has got a user.
    Attached(Arc<Node>, String),
    /// A user left a node, where it had this edge.
    Released(Arc<Node>, Edge),
    /// A user of a node had these permissions.
    Granted(Arc<Node>, String, Permissions),
    /// A node has passed the rights of its users to the nodes below.
    Passed(Arc<Node>),
    /// An attachment's former node.
    Moved(Arc<Attachment>, Arc<Node>),
    /// A parent's former child.
    Linked(Arc<Link>, Option<Arc<Node>>),
    /// An image had this backing node.
    Backing(Arc<Node>, Option<Arc<Node>>),
    /// An option of a node had this value.
    Option(Arc<Node>, &'static str, Option<Value>),
    /// A file used the page cache in this way.
    Cache(File, CacheMode),
    /// A driver has prepared itself for other options than the node has.
    Prepared(Arc<Node>),
    /// An image named this backing file, with this format.
    Named(Arc<Node>, Option<String>, Option<String>),
    /// A node took writes.
    StoppedWriting(Arc<Node>),
    /// A node took no writes.
    StartedWriting(Arc<Node>),
    /// A node was read-only for another reason than a snapshot above it, or for none.
    PutBelowSnapshot(Arc<Node>),
}

impl Transaction {
    /// Gives a user its permissions on a node.
    pub(super) fn attach(&mut self, node: &Arc<Node>, edge: Edge) -> Result<()> {
        may_step()?;
        let user = edge.user.clone();
        node.attach(edge)?;
        self.undo.push(Undo::Attached(Arc::clone(node), user));
        Ok(())
    }

    /// Takes the permissions of a user on a node back. True when the node has no users any more.
    pub(super) fn release(&mut self, node: &Arc<Node>, user: &str) -> bool {
        self.undo.extend(node.edge_of(user).map(|edge| Undo::Released(Arc::clone(node), edge)));
        node.release(user)
    }

    /// Changes the permissions of a user on a node.
    pub(super) fn change_user(&mut self, node: &Arc<Node>, user: &str, permissions: Permissions) -> Result<()> {
        may_step()?;
        let before = node.edge_of(user).map(|edge| edge.permissions);
        node.change_user(user, permissions)?;
        self.undo.extend(before.map(|before| Undo::Granted(Arc::clone(node), user.to_owned(), before)));
        Ok(())
    }

    /// Passes the rights of a node's users to the nodes below, or to the locks of its file.
    pub(super) fn pass_permissions(&mut self, node: &Arc<Node>) -> Result<()> {
        // Also where it fails half-way.
        self.undo.push(Undo::Passed(Arc::clone(node)));
        may_step()?;
        node.pass_permissions()
    }

    /// Puts another node in the place of an attachment's node. It is attached there already.
    pub(super) fn point(&mut self, attachment: &Arc<Attachment>, node: &Arc<Node>) {
        self.undo.push(Undo::Moved(Arc::clone(attachment), attachment.node()));
        attachment.point_to(Arc::clone(node));
    }

    /// Puts another node in the place of a child. The parent is attached there already.
    pub(super) fn link(&mut self, link: &Arc<Link>, node: &Arc<Node>) {
        self.undo.push(Undo::Linked(Arc::clone(link), link.get()));
        link.set(Some(Arc::clone(node)));
    }

    /// Gives an image another backing node, or none. The image is attached there already.
    pub(super) fn link_backing(&mut self, image: &Arc<Node>, backing: Option<&Arc<Node>>) {
        self.undo.push(Undo::Backing(Arc::clone(image), image.backing()));
        set_backing(image, backing.cloned());
        let name = backing.map_or(Value::Null, |backing| Value::from(backing.name()));
        self.set_option(image, "backing", name);
    }

    /// A step is about to change an option. Noted before the step itself, it comes back after that.
    fn note_option(&mut self, node: &Arc<Node>, key: &'static str) {
        self.undo.push(Undo::Option(Arc::clone(node), key, node.options().get(key).cloned()));
    }

    /// Notes the new value of an option.
    pub(super) fn set_option(&mut self, node: &Arc<Node>, key: &'static str, value: Value) {
        self.note_option(node, key);
        node.set_option(key, value);
    }

    /// Changes how a file uses the page cache.
    pub(super) fn set_cache_mode(&mut self, file: &File, mode: CacheMode) -> Result<()> {
        may_step()?;
        let before = file.cache_mode();
        file.set_cache_mode(mode)?;
        self.undo.push(Undo::Cache(file.clone(), before));
        Ok(())
    }

    /// The driver of a node is about to prepare itself for other options.
    pub(super) fn preparing(&mut self, node: &Arc<Node>) {
        self.undo.push(Undo::Prepared(Arc::clone(node)));
    }

    /// Changes the name of the backing file that an image holds, with the format.
    pub(super) async fn rename_backing(
        &mut self,
        image: &Arc<Node>,
        name: Option<&str>,
        format: Option<&str>,
    ) -> Result<()> {
        may_step()?;
        let before = image.backing_name().map(|backing| (backing.name(), backing.format()));
        image.change_backing_file(name, format).await?;
        self.undo.extend(before.map(|(name, format)| Undo::Named(Arc::clone(image), name, format)));
        Ok(())
    }

    /// Refuses writes to a node from now on. [`Node::complete`] has run.
    pub(super) fn stop_writing(&mut self, node: &Arc<Node>) -> Result<()> {
        may_step()?;
        self.note_option(node, "read-only");
        node.stop_writing()?;
        self.undo.push(Undo::StoppedWriting(Arc::clone(node)));
        Ok(())
    }

    /// Has a node take writes. The nodes that store its data take writes already.
    pub(super) async fn start_writing(&mut self, node: &Arc<Node>) -> Result<()> {
        may_step()?;
        self.note_option(node, "read-only");
        node.start_writing().await?;
        self.undo.push(Undo::StartedWriting(Arc::clone(node)));
        Ok(())
    }

    /// A node is read-only because of a snapshot above it from now on.
    pub(super) fn put_below_snapshot(&mut self, node: &Arc<Node>) {
        if !node.was_put_below_snapshot() {
            self.undo.push(Undo::PutBelowSnapshot(Arc::clone(node)));
            node.put_below_snapshot(true);
        }
    }

    /// Keeps the steps where `result` is no error, and takes them back otherwise.
    pub(super) async fn end<T>(self, graph: &Graph, result: Result<T>) -> Result<T> {
        let result = result.and_then(|value| may_step().map(|()| value));
        if result.is_err() {
            self.take_back(graph).await;
        }
        result
    }

    /// Takes the steps back, the last one first. A step that can't be taken back is logged, and doesn't keep the others.
    pub(super) async fn take_back(self, graph: &Graph) {
        let _locked = graph.keep_locks();
        for step in self.undo.into_iter().rev() {
            if let Err(error) = step.take_back().await {
                tracing::error!("could not take a change of the graph back: {error}");
            }
        }
    }
}

impl Undo {
    async fn take_back(self) -> Result<()> {
        match self {
            Undo::Attached(node, user) => drop(node.release(&user)),
            // It had these permissions a moment ago.
            Undo::Released(node, edge) => node.attach(edge)?,
            Undo::Granted(node, user, permissions) => node.change_user(&user, permissions)?,
            Undo::Passed(node) => node.pass_permissions()?,
            Undo::Moved(attachment, node) => attachment.point_to(node),
            Undo::Linked(link, node) => link.set(node),
            Undo::Backing(image, backing) => set_backing(&image, backing),
            Undo::Option(node, key, Some(value)) => node.set_option(key, value),
            Undo::Option(node, key, None) => node.remove_option(key),
            Undo::Cache(file, mode) => file.set_cache_mode(mode)?,
            Undo::Prepared(node) => {
                if let Some(live) = node.driver().live_options() {
                    live.prepare(&node.options(), node.discards()).await?;
                }
            }
            Undo::Named(image, name, format) => image.change_backing_file(name.as_deref(), format.as_deref()).await?,
            Undo::PutBelowSnapshot(node) => node.put_below_snapshot(false),
            Undo::StoppedWriting(node) => node.start_writing().await?,
            Undo::StartedWriting(node) => {
                // Its writes since then are to be complete on disk.
                let completed = node.complete().await;
                node.stop_writing()?;
                completed?;
            }
        }
        Ok(())
    }
}

/// Refuses the step that a test wants to fail.
fn may_step() -> Result<()> {
    #[cfg(test)]
    cowshed_testbase::steps::fail_in_turn(|| Error::internal("this step fails"))?;
    Ok(())
}

fn set_backing(image: &Arc<Node>, backing: Option<Arc<Node>>) {
    match image.driver().backing_link() {
        Some(link) => link.link(backing),
        None => tracing::error!("{}", Error::internal(format!("node '{}' has no backing file", image.name()))),
    }
}
