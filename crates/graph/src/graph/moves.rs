// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Putting one node in the place of another for all its users at once: replacing, inserting and removing filters,
//! another backing file.

use super::attachment::is_attachment;
use super::drain::reaches;
use super::files::check_backing;
use super::owned::quoted;
use super::transaction::Transaction;
use super::{Attachment, Graph};
use crate::node::{ChildLink, ChildRole, Edge, Node, nodes_below};
use crate::options::{BlockdevOptions, DriverKind};
use cowshed_storage::Permissions;
use cowshed_types::{Error, ErrorKind, Result};
use std::sync::Arc;

/// A user that moves from one node to another.
enum User {
    Attachment(Arc<Attachment>),
    Parent(Arc<Node>, ChildLink),
}

impl User {
    fn name(&self) -> String {
        match self {
            User::Attachment(attachment) => attachment.user(),
            User::Parent(parent, _) => parent.name().to_owned(),
        }
    }

    fn point_to(&self, node: &Arc<Node>, change: &mut Transaction) {
        match self {
            User::Attachment(attachment) => change.point(attachment, node),
            User::Parent(parent, child) if child.role == ChildRole::Backing && parent.takes_backing() => {
                change.link_backing(parent, Some(node));
            }
            User::Parent(_, child) => change.link(&child.link, node),
        }
    }
}

impl Graph {
    /// Puts `new` in the place of `old` for all users of `old`, but for those that `new` itself stands on. While they
    /// are moved their requests wait.
    pub async fn replace(self: &Arc<Self>, old: &Arc<Node>, new: &Arc<Node>) -> Result<()> {
        let _one_change = self.changing([old, new]).await;
        let _drained = self.drain(&[old, new]).await;
        let mut change = Transaction::default();
        let moved = self.move_users(old, new, &mut change);
        change.end(self, moved).await
    }

    /// Opens a filter (`options` without its `file`) above a node and puts it between the node and its users.
    pub async fn insert_filter(self: &Arc<Self>, node: &Arc<Node>, options: BlockdevOptions) -> Result<Arc<Node>> {
        let filter = self.add(options.with("file", node.name())).await?;
        let inserted = match filter.is_filter() {
            true => self.replace(node, &filter).await,
            false => Err(Error::invalid_argument(format!("'{}' is not a filter", filter.driver_name()))),
        };
        self.keep_inserted(filter, inserted).await
    }

    /// A filter that was added, where it could be put in its place. Otherwise it is deleted.
    pub(super) async fn keep_inserted(self: &Arc<Self>, filter: Arc<Node>, inserted: Result<()>) -> Result<Arc<Node>> {
        if inserted.is_err()
            && let Err(error) = self.delete(filter.name()).await
        {
            tracing::warn!("{error}");
        }
        inserted.map(|()| filter)
    }

    /// As [`Graph::insert_filter`], above the node of an attachment and for that attachment alone: the node's other
    /// users stay as they are.
    pub async fn insert_filter_for(
        self: &Arc<Self>,
        attachment: &Arc<Attachment>,
        options: BlockdevOptions,
    ) -> Result<Arc<Node>> {
        let filter = self.add(options.with("file", attachment.node().name())).await?;
        let inserted = match filter.is_filter() {
            true => self.move_attachment(attachment, &filter).await,
            false => Err(Error::invalid_argument(format!("'{}' is not a filter", filter.driver_name()))),
        };
        self.keep_inserted(filter, inserted).await
    }

    /// Moves one attachment to another node, or leaves it where it is.
    async fn move_attachment(self: &Arc<Self>, attachment: &Arc<Attachment>, new: &Arc<Node>) -> Result<()> {
        let _one_change = self.changing([&attachment.node(), new]).await;
        let _drained = self.drain(&[&attachment.node(), new]).await;
        let (old, user) = (attachment.node(), attachment.user());
        let Some(edge) = old.edge_of(&user) else {
            return Err(Error::invalid_argument(format!("'{}' was detached", attachment.name())));
        };
        let _locked = self.keep_locks();
        let mut change = Transaction::default();
        // It leaves before it comes: `new` passes its rights on to `old`.
        change.release(&old, &edge.user);
        let moved = change.attach(new, edge).map(|()| change.point(attachment, new));
        change.end(self, moved).await
    }

    /// Takes a filter out: its users go on with the node behind it, and the filter is closed. A target that never answers keeps
    /// the closing waiting, and no other change.
    pub async fn remove_filter(self: &Arc<Self>, filter: &Arc<Node>) -> Result<()> {
        self.take_filter_out(filter).await?.close().await
    }

    /// As [`Graph::remove_filter`], but the caller closes the filter. The filter takes no new users.
    pub async fn take_filter_out(self: &Arc<Self>, filter: &Arc<Node>) -> Result<Arc<Node>> {
        let _one_change = self.changing([filter]).await;
        let child = match filter.child(ChildRole::File) {
            Some(child) if filter.is_filter() => child,
            _ => {
                let message = format!("node '{}' is not a filter", filter.name());
                return Err(Error::invalid_argument(message));
            }
        };
        {
            let _drained = self.drain(&[filter]).await;
            let mut change = Transaction::default();
            let moved = self.move_users(filter, &child, &mut change);
            change.end(self, moved).await?;
        }
        if self.owns(filter) {
            return self.take_unused(filter.name());
        }
        filter.leave();
        Ok(Arc::clone(filter))
    }

    /// Gives an image another backing file, or none, without writing that into its header.
    pub async fn set_backing(self: &Arc<Self>, node: &Arc<Node>, backing: Option<&Arc<Node>>) -> Result<()> {
        let _one_change = self.changing(backing.into_iter().chain([node])).await;
        let _drained = self.drain(&[node]).await;
        node.check_backing(backing).await?;
        let mut change = Transaction::default();
        let unused = match self.set_backing_drained(node, backing, &mut change) {
            Ok(unused) => node.note_backing().await.map(|()| unused),
            Err(error) => Err(error),
        };
        match change.end(self, unused).await? {
            Some(unused) => unused.close().await,
            None => Ok(()),
        }
    }

    /// As [`Graph::set_backing`], drained already. Returns the old backing node when it has no users any more.
    pub(super) fn set_backing_drained(
        &self,
        node: &Arc<Node>,
        backing: Option<&Arc<Node>>,
        change: &mut Transaction,
    ) -> Result<Option<Arc<Node>>> {
        let name = node.name();
        let Some(link) = node.driver().backing_link() else {
            let message = format!("node '{name}' ({}) can't have a backing file", node.driver_name());
            return Err(Error::invalid_argument(message));
        };
        if link.is_left_out() {
            let message = format!("node '{name}' was opened without its backing file");
            return Err(Error::invalid_argument(message));
        }
        let old = node.backing();
        if let Some(backing) = backing {
            if old.as_ref().is_some_and(|old| Arc::ptr_eq(old, backing)) {
                return Ok(None);
            }
            if reaches(backing, node) {
                let message = format!("Making '{}' a backing child of '{name}' would create a cycle", backing.name());
                return Err(Error::invalid_argument(message));
            }
            if !node.is_read_only() {
                check_backing(&node.children(), backing)?;
            }
            change.attach(backing, node.backing_edge())?;
        }
        change.link_backing(node, backing);
        Ok(old.filter(|old| change.release(old, name)))
    }

    /// A user of this node that keeps what it found there at its opening, by its name. An image that is stored in the node is one. A
    /// layer above it only reads, and filters that move freely keep nothing.
    pub fn bound_user(&self, node: &Node) -> Option<String> {
        let is_bound = |user: &String| {
            let Some(parent) = self.find(user) else { return true };
            let mut edges = parent.children().into_iter().filter(|child| std::ptr::eq(&*child.node, node));
            let follows = || parent.is_filter() && parent.driver().moves_freely() && self.bound_user(&parent).is_none();
            edges.any(|child| child.role != ChildRole::Backing && !follows())
        };
        node.user_names().into_iter().filter(|user| !is_attachment(user)).find(is_bound)
    }

    /// An image with metadata of its own that is stored in this node. Its tables in memory are those of the present file.
    pub(super) fn image_stored_in(&self, node: &Arc<Node>) -> Option<Arc<Node>> {
        let stands_on = |parent: &Arc<Node>| {
            let edges = parent.children().into_iter().filter(|child| child.role != ChildRole::Backing);
            edges.into_iter().any(|child| Arc::ptr_eq(&child.node, node))
        };
        let is_image = |parent: &Arc<Node>| {
            let schema = self.schemas().schema(parent.driver_name());
            schema.is_some_and(|schema| schema.kind == DriverKind::Format) && !parent.is_raw()
        };
        self.snapshot().nodes().filter(stands_on).find_map(|parent| match is_image(&parent) {
            true => Some(parent),
            false => self.image_stored_in(&parent),
        })
    }

    /// Puts a filter above another node, drained already. Returns the node that it stood on.
    pub(super) fn set_filter_child(
        &self,
        filter: &Arc<Node>,
        new: &Arc<Node>,
        change: &mut Transaction,
    ) -> Result<Arc<Node>> {
        let name = filter.name();
        let link = filter.child_links().into_iter().find(|child| child.role == ChildRole::File).map(|child| child.link);
        let (link, old) = match link.and_then(|link| link.get().map(|old| (link, old))) {
            Some(found) => found,
            None => return Err(Error::internal(format!("node '{name}' has no file"))),
        };
        if reaches(new, filter) {
            let message = format!("Making '{}' a file child of '{name}' would create a cycle", new.name());
            return Err(Error::invalid_argument(message));
        }
        let edge = old.edge_of(name).unwrap_or_else(|| Edge::new(name, Permissions::NONE).with_role(ChildRole::File));
        let _locked = self.keep_locks();
        // It leaves before it comes: `new` may pass its rights on to `old`.
        change.release(&old, name);
        change.attach(new, edge)?;
        change.link(&link, new);
        change.set_option(filter, "file", new.name().into());
        Ok(old)
    }

    pub(super) fn owns(&self, node: &Arc<Node>) -> bool {
        self.owned_nodes().iter().any(|owned| Arc::ptr_eq(owned, node))
    }

    /// The users of `old`, but for what `new` stands on. An error when there is one that can't be moved.
    fn movable_users(&self, old: &Arc<Node>, new: &Arc<Node>) -> Result<Vec<User>> {
        let stay = nodes_below(new);
        let mut users = Vec::new();
        let mut staying = Vec::new();
        for attachment in self.attachments() {
            if Arc::ptr_eq(&attachment.node(), old) {
                users.push(User::Attachment(attachment));
            }
        }
        for parent in self.snapshot().nodes() {
            for child in parent.child_links() {
                if !child.link.get().is_some_and(|node| Arc::ptr_eq(&node, old)) {
                    continue;
                }
                if stay.iter().any(|known| Arc::ptr_eq(known, &parent)) {
                    staying.push(parent.name().to_owned());
                } else if child.role == ChildRole::Backing || parent.is_filter() {
                    users.push(User::Parent(Arc::clone(&parent), child));
                } else {
                    let message = format!(
                        "node '{}' stores its data in '{}' and can't move to another node while it is open",
                        parent.name(),
                        old.name()
                    );
                    return Err(Error::new(ErrorKind::Busy, message));
                }
            }
        }
        let known: Vec<String> = users.iter().map(User::name).chain(staying).collect();
        let others: Vec<String> = old.user_names().into_iter().filter(|user| !known.contains(user)).collect();
        if !others.is_empty() {
            let message = format!("node '{}' is in use by {}, which can't be moved", old.name(), quoted(&others));
            return Err(Error::new(ErrorKind::Busy, message));
        }
        Ok(users)
    }

    /// Moves all users of `old` to `new`. They are drained.
    pub(super) fn move_users(&self, old: &Arc<Node>, new: &Arc<Node>, change: &mut Transaction) -> Result<()> {
        if Arc::ptr_eq(old, new) {
            return Ok(());
        }
        let users = self.movable_users(old, new)?;
        let edge = |user: &User| {
            let name = user.name();
            old.edge_of(&name).unwrap_or_else(|| Edge::new(&name, Permissions::NONE))
        };
        let edges: Vec<Edge> = users.iter().map(edge).collect();
        let _locked = self.keep_locks();
        // All leave before the first comes: `new` may pass its rights on to `old`.
        for edge in &edges {
            change.release(old, &edge.user);
        }
        for edge in edges {
            change.attach(new, edge)?;
        }
        for user in &users {
            user.point_to(new, change);
        }
        Ok(())
    }
}
