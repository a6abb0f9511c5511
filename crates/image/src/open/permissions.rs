// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Who may do what with a node: one edge per user.

use crate::options::{DriverKind, DriverSchema};
use cowshed_block::{Error, ErrorKind, Result};
use cowshed_storage::{PermissionSet, Permissions};

/// What one user of a node does with it, and what it lets others do.
#[derive(Clone, Debug)]
pub(crate) struct Edge {
    /// The parent's node-name, or what else uses the node.
    pub user: String,
    pub permissions: Permissions,
}

impl Edge {
    /// The edge of a user that reads, or reads, writes and resizes. Nobody else may write or resize meanwhile, unless
    /// `share_all`.
    pub(crate) fn of(user: &str, writable: bool, share_all: bool) -> Edge {
        let permissions = if writable { Permissions::WRITE } else { Permissions::READ };
        let permissions = if share_all { permissions.sharing_all() } else { permissions };
        Edge { user: user.to_owned(), permissions }
    }

    /// An error when the two can't use `node` at the same time.
    pub(crate) fn check_against(&self, other: &Edge, node: &str) -> Result<()> {
        for (one, two) in [(self, other), (other, self)] {
            let conflict = one.permissions.used & !two.permissions.shared;
            if !conflict.is_empty() {
                return Err(Error::new(
                    ErrorKind::Busy,
                    format!(
                        "conflicting use of node '{node}': '{}' needs permission to {}, which '{}' doesn't share",
                        one.user,
                        names(conflict),
                        two.user
                    ),
                ));
            }
        }
        Ok(())
    }
}

fn names(set: PermissionSet) -> String {
    let all = [
        (PermissionSet::CONSISTENT_READ, "read"),
        (PermissionSet::WRITE, "write"),
        (PermissionSet::WRITE_UNCHANGED, "write unchanged data"),
        (PermissionSet::RESIZE, "resize"),
    ];
    let names: Vec<&str> = all.into_iter().filter(|(one, _)| set.contains(*one)).map(|(_, name)| name).collect();
    names.join(" and ")
}

/// Filters that ask of their child what their users ask of them. `blkdebug` is none: it uses the file itself; nor is
/// `snapshot-access`, which only reads.
pub(super) fn is_plain_filter(schema: &DriverSchema) -> bool {
    schema.kind == DriverKind::Filter && !["blkdebug", "snapshot-access"].contains(&schema.name)
}

/// What a node of this driver asks of its file before it has users, where it depends on them. `by_users`: the locks of files do.
pub(super) fn asked_at_first(driver: Option<&DriverSchema>, by_users: bool) -> Option<Permissions> {
    let driver = driver?;
    match driver.name {
        _ if is_plain_filter(driver) => Some(Permissions::NONE),
        "raw" if by_users => Some(Permissions::NONE),
        // Its header is read.
        "luks" if by_users => Some(Permissions::READ.sharing_all()),
        _ => None,
    }
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
            assert!(error.to_string().contains("write and resize"), "{error}");
        }
        // A force-sharing reader doesn't mind the writer, and the writer lets others read.
        assert!(careless.check_against(&writer, "n").is_ok());
    }
}
