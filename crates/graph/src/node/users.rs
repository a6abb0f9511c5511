// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The users of a node, and the rights of each.
//!
//! A filter has no wishes of its own: it needs the rights of its users at its child. So a filter can be put between a
//! node and its users without a conflict. In a daemon's graph the same holds for the formats that keep no metadata in
//! use (raw, LUKS). The locks of a file follow from the operations that its node's users do and share: see
//! [`LockSource`].

use super::driver::whole_sectors;
use super::{Child, ChildRole, Edge, LockSource, Node};
use cowshed_storage::{File, PermissionSet, Permissions};
use cowshed_types::{Error, ErrorKind, Result};
use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, PoisonError};

/// The user that stands for the adding of a node by name: it asks for nothing and keeps the node open.
pub(crate) const MONITOR: &str = "#monitor";

/// The user that stands for a change of a file's length.
const RESIZING: &str = "#resize";

/// The operations of all these users together, and those that all of them let others do.
fn sum<'a>(users: impl IntoIterator<Item = &'a Edge>) -> Permissions {
    users.into_iter().fold(Permissions::NONE, |sum, edge| Permissions {
        used: sum.used | edge.permissions.used,
        shared: sum.shared & edge.permissions.shared,
    })
}

/// The rights that all these users keep from other processes.
fn held(users: &[Edge]) -> PermissionSet {
    users.iter().fold(PermissionSet::NONE, |sum, edge| sum | edge.held)
}

impl Node {
    /// True for an image whose header or tables are in memory: they say where its bytes are. Raw images, filters and protocols have
    /// none.
    pub fn has_tables(&self) -> bool {
        self.storage_kind().is_none() && !self.is_filter() && !self.is_raw()
    }
}

/// A file whose length changes: the lock shows it until this is dropped.
pub(super) struct Resizing<'a> {
    node: &'a Node,
    /// The file and the locks that it had, where they don't follow from the node's users.
    before: Option<(&'a File, Permissions)>,
}

impl Drop for Resizing<'_> {
    fn drop(&mut self) {
        self.node.release(RESIZING);
        if let Some((file, before)) = self.before
            && let Err(error) = file.lock(before)
        {
            tracing::warn!("{error}");
        }
    }
}

impl Node {
    fn users(&self) -> MutexGuard<'_, Vec<Edge>> {
        self.users.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The names of the users: parents' node-names, attachments, and names with a `#` for others.
    pub fn user_names(&self) -> Vec<String> {
        self.users().iter().map(|edge| edge.user.clone()).filter(|user| user != MONITOR && user != RESIZING).collect()
    }

    /// True when the node has no users, and wasn't added by name.
    pub(crate) fn is_unused(&self) -> bool {
        self.users().is_empty()
    }

    /// True when a user may write to the node now.
    pub fn has_writer(&self) -> bool {
        self.users().iter().any(|edge| edge.permissions.used.contains(PermissionSet::WRITE))
    }

    /// True when a user that is none of `parents` (node-names) may write to the node now.
    pub fn has_writer_beside(&self, parents: &[&str]) -> bool {
        let others = |edge: &&Edge| !parents.contains(&edge.user.as_str());
        self.users().iter().filter(others).any(|edge| edge.permissions.used.contains(PermissionSet::WRITE))
    }

    /// The number of times so far that a user has got the right to write.
    pub fn grants_to_write(&self) -> u64 {
        self.grants_to_write.load(Ordering::Acquire)
    }

    fn note_grant(&self, granted: Permissions, before: Permissions) {
        if granted.used.contains(PermissionSet::WRITE) && !before.used.contains(PermissionSet::WRITE) {
            self.grants_to_write.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// True when a user needs the content of the node.
    pub(crate) fn has_reader(&self) -> bool {
        self.users().iter().any(|edge| edge.permissions.used.contains(PermissionSet::CONSISTENT_READ))
    }

    /// Gives `edge` its permissions on this node, or returns the error with the other user in the way.
    pub(crate) fn attach(&self, edge: Edge) -> Result<()> {
        self.check_stays()?;
        {
            let mut users = self.users();
            self.check_edge(&users, &edge, None)?;
            users.push(edge.clone());
        }
        self.note_grant(edge.permissions, Permissions::NONE);
        let passed = self.pass_permissions();
        if passed.is_err() {
            let mut users = self.users();
            if let Some(at) = users.iter().rposition(|other| other.user == edge.user) {
                users.remove(at);
            }
            drop(users);
            // The former rights are granted again.
            let _ = self.pass_permissions();
        }
        passed
    }

    /// Changes the permissions of a user that is attached already.
    pub(crate) fn change_user(&self, user: &str, permissions: Permissions) -> Result<()> {
        self.change_edge(user, permissions, None)
    }

    /// As [`Node::change_user`], with other rights that are kept from other processes.
    fn change_edge(&self, user: &str, permissions: Permissions, held: Option<PermissionSet>) -> Result<()> {
        let before = {
            let mut users = self.users();
            let Some(at) = users.iter().position(|edge| edge.user == user) else {
                return Err(Error::internal(format!("'{user}' does not use node '{}'", self.name)));
            };
            let edge = Edge { permissions, held: held.unwrap_or(users[at].held), ..users[at].clone() };
            self.check_edge(&users, &edge, Some(at))?;
            self.note_grant(edge.permissions, users[at].permissions);
            std::mem::replace(&mut users[at], edge)
        };
        let passed = self.pass_permissions();
        if passed.is_err() {
            if let Some(edge) = self.users().iter_mut().find(|edge| edge.user == user) {
                *edge = before;
            }
            let _ = self.pass_permissions();
        }
        passed
    }

    /// The edge of a user.
    pub(crate) fn edge_of(&self, user: &str) -> Option<Edge> {
        self.users().iter().find(|edge| edge.user == user).cloned()
    }

    fn check_edge(&self, users: &[Edge], edge: &Edge, except: Option<usize>) -> Result<()> {
        // As in QEMU the newest user is named first.
        for (at, other) in users.iter().enumerate().rev() {
            if Some(at) != except {
                edge.check_against(other, &self.name)?;
            }
        }
        if edge.permissions.used.contains(PermissionSet::WRITE) && self.is_read_only() {
            return Err(Error::new(ErrorKind::ReadOnly, "Block node is read-only"));
        }
        Ok(())
    }

    /// True when the node needs the rights of its users at its child.
    pub(crate) fn passes_permissions(&self) -> bool {
        self.driver.passes_permissions(self.settings.locks() != LockSource::Opening)
    }

    /// True where the locks of files follow from the rights of their nodes' users.
    pub(crate) fn passes_to_locks(&self) -> bool {
        self.settings.locks() != LockSource::Opening
    }

    /// The children at which the node needs the rights of its users.
    fn passing_children(&self) -> Vec<Child> {
        let passing = |child: &Child| {
            matches!(child.role, ChildRole::File | ChildRole::Raw | ChildRole::Test | ChildRole::Replica(_))
        };
        match self.passes_permissions() {
            true => self.children().into_iter().filter(passing).collect(),
            false => Vec::new(),
        }
    }

    /// Passes the rights of the users to the nodes below, or to the locks of the file.
    pub(crate) fn pass_permissions(&self) -> Result<()> {
        if let Some(file) = self.driver.protocol_file() {
            return self.lock_file(file);
        }
        for Child { role, node: child } in self.passing_children() {
            if child.edge_of(&self.name).is_some() {
                let held = held(&self.users());
                child.change_edge(&self.name, self.asked_of_child(role), Some(held))?;
            }
        }
        if self.settings.locks() == LockSource::Opening {
            return Ok(());
        }
        match self.backing().filter(|backing| backing.edge_of(&self.name).is_some()) {
            Some(backing) => backing.change_user(&self.name, self.asked_of_backing()),
            None => Ok(()),
        }
    }

    /// The rights that the node needs at its backing node. In a daemon's graph others may write there as long as no
    /// user of this node forbids it. Without users the node needs no rights.
    pub(crate) fn asked_of_backing(&self) -> Permissions {
        let share_all = match self.settings.locks() {
            LockSource::Opening => false,
            LockSource::Users { share_all } => {
                let wanted = sum(self.users().iter());
                if wanted.used.is_empty() && wanted.shared == PermissionSet::ALL {
                    return Permissions::NONE;
                }
                share_all || wanted.shared.contains(PermissionSet::WRITE)
            }
        };
        match share_all || self.lends_backing.load(Ordering::Acquire) {
            true => Permissions::READ.sharing_all(),
            false => Permissions::READ,
        }
    }

    /// The node's edge on a backing node, by [`Node::asked_of_backing`].
    pub(crate) fn backing_edge(&self) -> Edge {
        let held = match self.settings.locks() {
            LockSource::Users { share_all: false } => !Permissions::READ.shared,
            _ => PermissionSet::NONE,
        };
        Edge { held, ..Edge::new(&self.name, self.asked_of_backing()).with_role(ChildRole::Backing) }
    }

    /// Lets others write to the backing node whatever the users of this node share, or not any more.
    pub(crate) fn lend_backing(&self, lends: bool) -> Result<()> {
        let before = self.lends_backing.swap(lends, Ordering::AcqRel);
        let passed = match (self.settings.locks(), self.backing()) {
            (LockSource::Opening, Some(backing)) => backing.change_user(&self.name, self.asked_of_backing()),
            _ => self.pass_permissions(),
        };
        if passed.is_err() {
            self.lends_backing.store(before, Ordering::Release);
            // The former rights are granted again.
            let _ = self.pass_permissions();
        }
        passed
    }

    fn asked_of_child(&self, role: ChildRole) -> Permissions {
        // A job holds each node of its chain by itself: below a filter it may read and write.
        let wanted = sum(self.users().iter().filter(|edge| edge.hold.is_none()));
        let asked = self.driver.permissions(role, wanted, self.is_read_only());
        match self.settings.locks() {
            LockSource::Users { share_all: true } => asked.sharing_all(),
            _ => asked,
        }
    }

    fn lock_file(&self, file: &File) -> Result<()> {
        // Until the locks are set, so that those of the last change stay.
        let users = self.users();
        match self.locks_of(&users, file) {
            Some(permissions) if !self.closed.load(Ordering::Acquire) => file.lock(permissions),
            _ => Ok(()),
        }
    }

    /// The rights for the locks of the node's file, where they follow from its users.
    fn locks_of(&self, users: &[Edge], file: &File) -> Option<Permissions> {
        let LockSource::Users { share_all } = self.settings.locks() else { return None };
        let wanted = sum(users);
        let wanted = Permissions { shared: wanted.shared & !held(users), ..wanted };
        let wanted = match share_all {
            true => wanted.sharing_all(),
            // Clients and jobs rely on the size that they know.
            false if wanted.used.contains(PermissionSet::CONSISTENT_READ) => {
                Permissions { shared: wanted.shared & !PermissionSet::RESIZE, ..wanted }
            }
            false => wanted,
        };
        if !self.home.keeps_locks() {
            return Some(wanted);
        }
        let held = file.permissions();
        Some(Permissions { used: held.used | wanted.used, shared: held.shared & wanted.shared })
    }

    /// The permissions with which the node's file becomes writable.
    pub(super) fn locks_for_writing(&self, file: &File) -> Permissions {
        let users = self.users();
        self.locks_of(&users, file).unwrap_or_else(|| {
            let is_raw = |edge: &Edge| self.home.is_raw(&edge.user);
            match users.iter().all(is_raw) {
                // Its length changes when it is resized, which takes that lock then.
                true => Permissions { used: Permissions::WRITE_IN_PLACE.used, ..Permissions::WRITE },
                false => Permissions::WRITE,
            }
        })
    }

    /// Gives locks back that were kept while users moved.
    pub(crate) fn give_locks_back(&self) {
        if let Some(file) = self.driver.protocol_file()
            && let Err(error) = self.lock_file(file)
        {
            tracing::warn!("{error}");
        }
    }

    /// Locks the node's file for a change of its length.
    pub(super) fn resizing<'a>(&'a self, file: &'a File) -> Result<Resizing<'a>> {
        let permissions = Permissions { used: PermissionSet::RESIZE, shared: PermissionSet::ALL };
        // Not against its own users: they follow the new size.
        self.users().push(Edge::new(RESIZING, permissions));
        let mut resizing = Resizing { node: self, before: None };
        let held = file.permissions();
        // A raw image that permits other writers is locked for its size only now.
        if self.settings.locks() == LockSource::Opening && held.used.contains(PermissionSet::WRITE) {
            file.lock(Permissions { used: held.used | PermissionSet::RESIZE, ..held })?;
            resizing.before = Some((file, held));
        }
        self.lock_file(file)?;
        Ok(resizing)
    }

    /// True when no lock keeps the node's file as it is.
    pub(crate) fn is_unlocked(&self) -> bool {
        match self.driver.protocol_file() {
            Some(file) => file.permissions().used.is_empty(),
            None => self.passing_children().iter().any(|child| child.node.is_unlocked()),
        }
    }

    /// Takes notice of the length that the file has now: while it was not locked, others may have changed it.
    pub(crate) fn measure_again(&self) -> Result<()> {
        let before = self.size();
        match self.driver.protocol_file() {
            Some(file) => file.measure_again()?,
            None => self.passing_children().iter().try_for_each(|child| child.node.measure_again())?,
        }
        self.note_size(before);
        Ok(())
    }

    /// Takes notice of a size that was another one before.
    pub(crate) fn note_size(&self, before: u64) {
        if self.size() != before {
            self.tracking.resized(whole_sectors(self.size()));
        }
    }

    /// Takes back the rights that [`Node::attach`] gave to `user`. True when the node has no users any more.
    pub(crate) fn release(&self, user: &str) -> bool {
        let unused = {
            let mut users = self.users();
            if let Some(at) = users.iter().position(|edge| edge.user == user) {
                users.remove(at);
            }
            users.is_empty()
        };
        // Asking for less never meets a conflict.
        let _ = self.pass_permissions();
        unused
    }
}
