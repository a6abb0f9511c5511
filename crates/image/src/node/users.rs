// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Who uses a node, and what each may do with it.
//!
//! A filter has no wishes of its own: what its users are granted is what it asks of its child, so a filter can be put
//! between a node and its users without a conflict.

use super::driver::Driver;
use super::{ChildRole, Node};
use crate::open::Edge;
use cowshed_block::{Error, ErrorKind, Result};
use cowshed_storage::{PermissionSet, Permissions};
use std::sync::{MutexGuard, PoisonError};

/// The user that stands for whoever added a node by name: it asks for nothing and keeps the node open.
pub(crate) const MONITOR: &str = "#monitor";

impl Node {
    fn users(&self) -> MutexGuard<'_, Vec<Edge>> {
        self.users.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The names of the users: parents' node-names, attachments, and names with a `#` for what is neither.
    pub fn user_names(&self) -> Vec<String> {
        self.users().iter().map(|edge| edge.user.clone()).filter(|user| user != MONITOR).collect()
    }

    /// True when nobody uses the node, and nobody added it by name.
    pub(crate) fn is_unused(&self) -> bool {
        self.users().is_empty()
    }

    /// True when somebody may write to the node now.
    pub fn has_writer(&self) -> bool {
        self.users().iter().any(|edge| edge.permissions.used.contains(PermissionSet::WRITE))
    }

    /// Gives `edge` its permissions on this node, or says which other user stands in the way.
    pub(crate) fn attach(&self, edge: Edge) -> Result<()> {
        {
            let mut users = self.users();
            self.check_edge(&users, &edge, None)?;
            users.push(edge.clone());
        }
        let passed = self.pass_permissions();
        if passed.is_err() {
            let mut users = self.users();
            if let Some(at) = users.iter().rposition(|other| other.user == edge.user) {
                users.remove(at);
            }
            drop(users);
            // What was granted before is granted again.
            let _ = self.pass_permissions();
        }
        passed
    }

    /// Changes the permissions of a user that is attached already.
    pub(crate) fn change_user(&self, user: &str, permissions: Permissions) -> Result<()> {
        let before = {
            let mut users = self.users();
            let Some(at) = users.iter().position(|edge| edge.user == user) else {
                return Err(Error::internal(format!("'{user}' does not use node '{}'", self.name)));
            };
            let edge = Edge { user: user.to_owned(), permissions };
            self.check_edge(&users, &edge, Some(at))?;
            std::mem::replace(&mut users[at].permissions, permissions)
        };
        let passed = self.pass_permissions();
        if passed.is_err() {
            if let Some(edge) = self.users().iter_mut().find(|edge| edge.user == user) {
                edge.permissions = before;
            }
            let _ = self.pass_permissions();
        }
        passed
    }

    /// The permissions of a user.
    pub(crate) fn permissions_of(&self, user: &str) -> Option<Permissions> {
        self.users().iter().find(|edge| edge.user == user).map(|edge| edge.permissions)
    }

    fn check_edge(&self, users: &[Edge], edge: &Edge, except: Option<usize>) -> Result<()> {
        for (at, other) in users.iter().enumerate() {
            if Some(at) != except {
                edge.check_against(other, &self.name)?;
            }
        }
        if edge.permissions.used.contains(PermissionSet::WRITE) && self.is_read_only() {
            return Err(Error::new(ErrorKind::ReadOnly, format!("node '{}' is read-only", self.name)));
        }
        Ok(())
    }

    /// What all users together do, and what all of them let others do.
    fn all_permissions(&self) -> Permissions {
        self.users().iter().fold(Permissions::NONE, |sum, edge| Permissions {
            used: sum.used | edge.permissions.used,
            shared: sum.shared & edge.permissions.shared,
        })
    }

    /// A filter asks of its child what is asked of it.
    fn pass_permissions(&self) -> Result<()> {
        let Driver::Filter(filter) = &self.driver else { return Ok(()) };
        let Some(child) = self.child(ChildRole::File) else { return Ok(()) };
        if child.permissions_of(&self.name).is_none() {
            return Ok(());
        }
        child.change_user(&self.name, filter.permissions(self.all_permissions(), self.is_read_only()))
    }

    /// Takes back what [`Node::attach`] gave to `user`. True when nobody uses the node any more.
    pub(crate) fn release(&self, user: &str) -> bool {
        let unused = {
            let mut users = self.users();
            if let Some(at) = users.iter().position(|edge| edge.user == user) {
                users.swap_remove(at);
            }
            users.is_empty()
        };
        // Asking for less never meets a conflict.
        let _ = self.pass_permissions();
        unused
    }
}
