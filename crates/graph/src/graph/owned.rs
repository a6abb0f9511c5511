// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The parts that a graph holds itself: nodes that were added by name, and the list of attachments.

use super::changes::ChangeScope;
use super::{AttachRequest, Attachment, Graph};
use crate::node::{MONITOR, Node};
use cowshed_storage::rt;
use cowshed_types::{Error, ErrorKind, Result};
use std::collections::BTreeMap;
use std::sync::{Arc, MutexGuard, PoisonError, Weak};

#[derive(Default)]
pub(super) struct Owned {
    nodes: BTreeMap<String, Arc<Node>>,
    attachments: BTreeMap<String, Weak<Attachment>>,
    /// Attachments that have given up their names, and are there until their last request ends.
    leaving: Vec<Weak<Attachment>>,
}

impl Graph {
    pub(super) fn owned(&self) -> MutexGuard<'_, Owned> {
        self.owned.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a node that has the monitor's edge already.
    pub(crate) fn adopt(&self, node: &Arc<Node>) {
        self.owned().nodes.insert(node.name().to_owned(), Arc::clone(node));
    }

    /// Closes a node that was added by name. Refused while it has users. A disk that never answers keeps the closing
    /// waiting, and no other change.
    pub async fn delete(self: &Arc<Self>, name: &str) -> Result<()> {
        self.take_out(name).await?.close().await
    }

    /// As [`Graph::delete`], but the caller closes the node. The node takes no new users.
    pub async fn take_out(self: &Arc<Self>, name: &str) -> Result<Arc<Node>> {
        let _one_change = self.changing_named(&[name.to_owned()]).await;
        self.take_unused(name)
    }

    /// The node of this name, which the graph no longer holds: the caller closes it. Refused while it has users.
    pub(super) fn take_unused(&self, name: &str) -> Result<Arc<Node>> {
        let node = match self.owned().nodes.get(name) {
            Some(node) => Arc::clone(node),
            None if self.find(name).is_some() => {
                let message = format!("node '{name}' is not owned by the monitor: it goes with the node that uses it");
                return Err(Error::new(ErrorKind::Busy, message));
            }
            None => return Err(no_such_node(name)),
        };
        let users = node.user_names();
        if !users.is_empty() {
            let message = format!("Node {name} is in use: by {}", quoted(&users));
            return Err(Error::new(ErrorKind::Busy, message));
        }
        self.owned().nodes.remove(name);
        node.leave();
        Ok(node)
    }

    /// Gives a node that was added by name to its users: it is closed with the last one, at once where there is none.
    pub async fn disown(self: &Arc<Self>, node: &Arc<Node>) -> Result<()> {
        let one_change = self.changing([node]).await;
        let known = {
            let mut owned = self.owned();
            match owned.nodes.get(node.name()) {
                Some(known) if Arc::ptr_eq(known, node) => owned.nodes.remove(node.name()),
                _ => None,
            }
        };
        let is_unused = known.is_some() && node.release(MONITOR);
        if is_unused {
            node.leave();
        }
        // A disk that never answers keeps no other change waiting.
        drop(one_change);
        if is_unused { node.close().await } else { Ok(()) }
    }

    /// The nodes that were added by name.
    pub fn owned_nodes(&self) -> Vec<Arc<Node>> {
        self.owned().nodes.values().cloned().collect()
    }

    /// Attaches an export or a job to a node. Its name must be new among the attachments. Its requests wait while a drain of that
    /// node runs.
    pub async fn attach(self: &Arc<Self>, node: &Arc<Node>, request: AttachRequest) -> Result<Arc<Attachment>> {
        let _one_change = self.changing([node]).await;
        if let Some(known) = self.find_attachment(request.name()) {
            let message = format!("there is an attachment '{}' already", known.name());
            return Err(Error::new(ErrorKind::Busy, message));
        }
        // A change that ran before may have closed it.
        node.check_stays()?;
        let attachment = Attachment::new(self, node, request)?;
        self.owned().attachments.insert(attachment.name().to_owned(), Arc::downgrade(&attachment));
        attachment.join_drains();
        Ok(attachment)
    }

    /// The attachments, ordered by name.
    pub fn attachments(&self) -> Vec<Arc<Attachment>> {
        let owned = self.owned();
        owned.attachments.values().chain(&owned.leaving).filter_map(Weak::upgrade).collect()
    }

    /// Takes the name from an attachment whose [`Attachment::detach`] waits for a request that may never end: another attachment
    /// may have the name at once.
    pub fn free_name_of(&self, attachment: &Arc<Attachment>) {
        let mut owned = self.owned();
        let named = owned.attachments.get(attachment.name()).filter(|known| known.as_ptr() == Arc::as_ptr(attachment));
        if named.is_some() {
            owned.attachments.remove(attachment.name());
            owned.leaving.retain(|known| known.strong_count() > 0);
            owned.leaving.push(Arc::downgrade(attachment));
        }
    }

    /// True while an attachment without a name keeps the node: see [`Graph::free_name_of`].
    pub fn is_being_left(&self, node: &Arc<Node>) -> bool {
        let leaving: Vec<Arc<Attachment>> = self.owned().leaving.iter().filter_map(Weak::upgrade).collect();
        leaving.iter().any(|attachment| Arc::ptr_eq(&attachment.node(), node))
    }

    /// The attachment with this name.
    pub fn find_attachment(&self, name: &str) -> Option<Arc<Attachment>> {
        self.owned().attachments.get(name).and_then(Weak::upgrade)
    }

    pub(super) fn forget_attachment(&self, attachment: &Attachment) {
        let mut owned = self.owned();
        owned.leaving.retain(|known| !std::ptr::eq(known.as_ptr(), attachment));
        // Its name may be another one's by now.
        if owned.attachments.get(attachment.name()).is_some_and(|known| std::ptr::eq(known.as_ptr(), attachment)) {
            owned.attachments.remove(attachment.name());
        }
    }

    /// The node with this name, or an error that names it.
    pub fn node(&self, name: &str) -> Result<Arc<Node>> {
        self.find(name).ok_or_else(|| no_such_node(name))
    }

    /// Closes every node that was added by name, users first. The first error is returned, after all were tried. Once it has
    /// begun, it ends even when the future is dropped.
    pub async fn close_all(self: &Arc<Self>) -> Result<()> {
        let one_change = self.changing_in(ChangeScope::All).await;
        let graph = Arc::clone(self);
        rt::to_completion(async move {
            let _one_change = one_change;
            graph.close_all_owned().await
        })
        .await
    }

    async fn close_all_owned(&self) -> Result<()> {
        let mut result = Ok(());
        loop {
            let nodes = std::mem::take(&mut self.owned().nodes);
            if nodes.is_empty() {
                return result;
            }
            let (used, unused): (Vec<_>, Vec<_>) =
                nodes.into_iter().partition(|(_, node)| !node.user_names().is_empty());
            if unused.is_empty() {
                // Attachments are still there: their nodes are closed all the same, they get errors.
                for (_, node) in used {
                    result = result.and(node.close().await);
                }
                return result;
            }
            self.owned().nodes.extend(used);
            for (_, node) in unused {
                result = result.and(node.close().await);
            }
        }
    }
}

/// The error for a name that no node has.
pub(super) fn no_such_node(name: &str) -> Error {
    Error::new(ErrorKind::NotFound, format!("Failed to find node with node-name='{name}'"))
}

/// Names for a message.
pub(super) fn quoted(names: &[String]) -> String {
    names.iter().map(|name| format!("'{name}'")).collect::<Vec<_>>().join(", ")
}
