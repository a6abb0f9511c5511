// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Who may do what with a node: one edge per user.

use cowshed_block::{Error, ErrorKind, Result};
use std::fmt;

/// A set of permissions on a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Permissions(u8);

impl Permissions {
    /// Reads see what was written, as the user of the whole image means it.
    pub const CONSISTENT_READ: Permissions = Permissions(1 << 0);
    /// Writes that change data.
    pub const WRITE: Permissions = Permissions(1 << 1);
    /// Writes that leave every byte as it reads.
    pub const WRITE_UNCHANGED: Permissions = Permissions(1 << 2);
    /// Changes of the length.
    pub const RESIZE: Permissions = Permissions(1 << 3);
    /// None.
    pub const NONE: Permissions = Permissions(0);
    /// All four.
    pub const ALL: Permissions = Permissions(0b1111);

    /// Both sets together.
    #[must_use]
    pub const fn union(self, other: Permissions) -> Permissions {
        Permissions(self.0 | other.0)
    }

    /// What is in `self` and not in `other`.
    #[must_use]
    pub const fn without(self, other: Permissions) -> Permissions {
        Permissions(self.0 & !other.0)
    }

    /// True when all of `other` is in `self`.
    pub const fn contains(self, other: Permissions) -> bool {
        self.0 & other.0 == other.0
    }

    /// Bit n is permission n of QEMU's lock bytes.
    pub const fn bits(self) -> u8 {
        self.0
    }
}

impl fmt::Display for Permissions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = ["consistent read", "write", "write unchanged", "resize"];
        let set: Vec<&str> =
            names.into_iter().enumerate().filter(|(n, _)| self.0 & 1 << n != 0).map(|(_, name)| name).collect();
        f.write_str(&set.join(", "))
    }
}

/// What one user of a node does with it, and what it lets others do.
#[derive(Clone, Debug)]
pub(crate) struct Edge {
    /// The parent's node-name, or what else uses the node.
    pub user: String,
    pub used: Permissions,
    pub shared: Permissions,
}

impl Edge {
    /// The edge of a user that reads, or reads, writes and resizes. Nobody else may write or resize meanwhile, unless
    /// `force_share`.
    pub(crate) fn of(user: &str, writable: bool, force_share: bool) -> Edge {
        let mut used = Permissions::CONSISTENT_READ;
        if writable {
            used = used.union(Permissions::WRITE).union(Permissions::RESIZE);
        }
        let shared = if force_share {
            Permissions::ALL
        } else {
            Permissions::ALL.without(Permissions::WRITE).without(Permissions::RESIZE)
        };
        Edge { user: user.to_owned(), used, shared }
    }

    /// An error when the two can't use `node` at the same time.
    pub(crate) fn check_against(&self, other: &Edge, node: &str) -> Result<()> {
        for (one, two) in [(self, other), (other, self)] {
            let conflict = one.used.without(two.shared);
            if conflict != Permissions::NONE {
                return Err(Error::new(
                    ErrorKind::Busy,
                    format!(
                        "conflicting use of node '{node}': '{}' uses '{conflict}', '{}' doesn't share it",
                        one.user, two.user
                    ),
                ));
            }
        }
        Ok(())
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
            assert!(error.to_string().contains("write, resize"), "{error}");
        }
        // A force-sharing reader doesn't mind the writer, and the writer lets others read.
        assert!(careless.check_against(&writer, "n").is_ok());
    }
}
