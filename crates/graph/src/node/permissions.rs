// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Permissions on nodes: one edge per user.

use super::ChildRole;
use cowshed_storage::{PermissionSet, Permissions};
use cowshed_types::{Error, ErrorKind, Result};
use std::borrow::Cow;

/// The operations of one user of a node, and those that it lets others do.
#[derive(Clone, Debug)]
pub(crate) struct Edge {
    /// The parent's node-name, or the name of another user.
    pub user: String,
    pub permissions: Permissions,
    /// The node's role for the user, for messages.
    pub role: Cow<'static, str>,
    /// Rights that the locks of files keep from other processes, beside those that `permissions` doesn't share.
    pub held: PermissionSet,
    /// An export: no parent of the node may change its length meanwhile, such as the format of an image in that file. The user
    /// may: then clients see another size of the disk.
    pub is_export: bool,
    /// A job that keeps the node from all users but these, which are its own.
    pub hold: Option<Hold>,
}

/// A job's edge on a node that it neither reads nor writes by this edge, only keeps as it is.
#[derive(Clone, Debug)]
pub(crate) struct Hold {
    /// The job in QEMU's words, such as `commit job 'j'`.
    pub job: String,
    /// Users whose permissions never conflict with this edge.
    pub spared: Vec<String>,
}

/// The role of a node for an export, a job or the monitor.
const ROOT_ROLE: &str = "root";

/// The role of a node for the job that holds it.
const HELD_ROLE: &str = "intermediate node";

impl Edge {
    /// The edge of a user that reads, or reads, writes and resizes. No other user may write or resize meanwhile, unless
    /// `share_all`.
    pub(crate) fn of(user: &str, writable: bool, share_all: bool) -> Edge {
        let permissions = if writable { Permissions::WRITE } else { Permissions::READ };
        let permissions = if share_all { permissions.sharing_all() } else { permissions };
        Edge::new(user, permissions)
    }

    /// The edge of an export, a job or the monitor.
    pub(crate) fn new(user: &str, permissions: Permissions) -> Edge {
        Edge {
            user: user.to_owned(),
            permissions,
            role: ROOT_ROLE.into(),
            held: PermissionSet::NONE,
            is_export: false,
            hold: None,
        }
    }

    /// The same of a job that holds the node, or of another user without a `hold`.
    pub(crate) fn of_hold(self, hold: Option<Hold>) -> Edge {
        match hold {
            None => self,
            hold => Edge { hold, role: HELD_ROLE.into(), ..self },
        }
    }

    fn spares(&self, other: &Edge) -> bool {
        self.hold.as_ref().is_some_and(|hold| hold.spared.contains(&other.user))
    }

    /// The same of an export.
    pub(crate) fn of_export(self, is_export: bool) -> Edge {
        Edge { is_export, ..self }
    }

    /// The rights that this user denies another one for the sake of the length.
    fn keeps_length_from(&self, other: &Edge) -> PermissionSet {
        let is_format = ![ROOT_ROLE, HELD_ROLE, ChildRole::DataFile.as_str()].contains(&&*other.role);
        if self.is_export && is_format { PermissionSet::RESIZE } else { PermissionSet::NONE }
    }

    /// The edge of a parent node whose child has this role.
    pub(crate) fn with_role(self, role: ChildRole) -> Edge {
        Edge { role: role.name().into(), ..self }
    }

    /// The edge on a backing node while the overlay has no users. Other processes leave the file as it is all the same.
    pub(crate) fn without_users(self) -> Edge {
        Edge { held: !self.permissions.shared, permissions: Permissions::NONE, ..self }
    }

    /// The user in QEMU's words.
    fn described(&self, node: &str) -> String {
        let user = match (&self.hold, &*self.role) {
            (Some(hold), _) => hold.job.clone(),
            (None, ROOT_ROLE) => "an unnamed block device".to_owned(),
            (None, _) => format!("node '{}'", self.user),
        };
        format!("{user} (uses node '{node}' as '{}' child)", self.role)
    }

    /// An error when the two can't use `node` at the same time.
    pub(crate) fn check_against(&self, other: &Edge, node: &str) -> Result<()> {
        if self.spares(other) || other.spares(self) {
            return Ok(());
        }
        // As QEMU, where the rights that the newer user denies come first.
        let both = [(other, self), (self, other)];
        let plain = both.map(|(one, two)| (one, two, !two.permissions.shared));
        let of_length = both.map(|(one, two)| (one, two, two.keeps_length_from(one)));
        for (one, two, unshared) in plain.into_iter().chain(of_length) {
            let conflict = one.permissions.used & unshared;
            if !conflict.is_empty() {
                let message = format!(
                    "Permission conflict on node '{node}': permissions '{}' are both required by {} and unshared by {}.",
                    names(conflict),
                    one.described(node),
                    two.described(node)
                );
                return Err(Error::new(ErrorKind::Busy, message));
            }
        }
        Ok(())
    }
}

fn names(set: PermissionSet) -> String {
    let all = [
        (PermissionSet::CONSISTENT_READ, "consistent read"),
        (PermissionSet::WRITE, "write"),
        (PermissionSet::WRITE_UNCHANGED, "write unchanged"),
        (PermissionSet::RESIZE, "resize"),
    ];
    let names: Vec<&str> = all.into_iter().filter(|(one, _)| set.contains(*one)).map(|(_, name)| name).collect();
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readers_share_and_writers_do_not() {
        let reader = Edge::of("reader", false, false);
        let writer = Edge::of("writer", true, false);
        let careless = Edge::of("careless", false, true);
        assert!(reader.check_against(&reader, "n").is_ok());
        assert!(careless.check_against(&reader, "n").is_ok());
        for (one, two) in [(&reader, &writer), (&writer, &reader), (&writer, &writer)] {
            let error = one.check_against(two, "n").unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Busy);
            assert!(error.to_string().contains("permissions 'write, resize'"), "{error}");
        }
        // A force-sharing reader doesn't mind the writer, and the writer lets others read.
        assert!(careless.check_against(&writer, "n").is_ok());
    }
}
