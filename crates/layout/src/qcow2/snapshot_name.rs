// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Internal snapshots as users name them.

use super::Snapshot;
use cowshed_types::keyval::next_item;
use cowshed_types::{Error, LINE_END, Result};
use std::fmt;

/// The way from a user's name to a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lookup {
    /// The first with this ID, else the first with this name (apply, `convert -l`).
    IdOrName,
    /// By ID alone (`snapshot.id=`).
    Id,
    /// By name alone (delete, `snapshot.name=`).
    Name,
}

/// An internal snapshot as a user names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotName {
    /// ID or name.
    pub name: String,
    /// The kind of lookup.
    pub lookup: Lookup,
    /// It must have this ID besides.
    id: Option<String>,
}

impl SnapshotName {
    /// The ID and the name, where they are given.
    pub fn parts(&self) -> (Option<&str>, Option<&str>) {
        match self.lookup {
            Lookup::Id => (Some(&self.name), None),
            Lookup::IdOrName => (Some(&self.name), Some(&self.name)),
            Lookup::Name => (self.id.as_deref(), Some(&self.name)),
        }
    }

    /// The first snapshot of this name.
    pub fn of_name(name: impl Into<String>) -> SnapshotName {
        SnapshotName { name: name.into(), lookup: Lookup::Name, id: None }
    }

    /// The snapshot with this ID.
    pub fn of_id(id: impl Into<String>) -> SnapshotName {
        SnapshotName { name: id.into(), lookup: Lookup::Id, id: None }
    }

    /// The snapshot with this ID and this name.
    pub fn of_id_and_name(id: impl Into<String>, name: impl Into<String>) -> SnapshotName {
        SnapshotName { id: Some(id.into()), ..SnapshotName::of_name(name) }
    }

    /// Parses the value of `-l` of `convert` and `measure`. It is `snapshot.id=ID`, `snapshot.name=NAME`, both with a
    /// comma between, or one of the two alone; `,,` in a value stands for one comma. A text that doesn't start with
    /// `snapshot.` is a whole ID or name. Refused: other parameters after `snapshot.`, and one without a value.
    pub fn parse(text: &str) -> Result<SnapshotName> {
        if !text.starts_with("snapshot.") {
            return Ok(SnapshotName { name: text.to_owned(), lookup: Lookup::IdOrName, id: None });
        }
        let (mut id, mut name) = (None, None);
        let mut rest = text;
        while !rest.is_empty() {
            let item;
            (item, rest) = next_item(rest);
            match item.split_once('=').unwrap_or((&item, "")) {
                ("snapshot.id" | "snapshot.name", _) if !item.contains('=') => {
                    return Err(Error::invalid_argument(format!("Parameter '{item}' needs a value")));
                }
                ("snapshot.id", value) => id = Some(value.to_owned()),
                ("snapshot.name", value) => name = Some(value.to_owned()),
                (other, _) => {
                    let sentence = format!(
                        "Invalid parameter '{other}'{LINE_END}qemu-img: Failed in parsing snapshot param '{text}'"
                    );
                    return Err(Error::invalid_argument(format!("Invalid parameter '{other}'")).qemu(sentence));
                }
            }
        }
        Ok(match (id, name) {
            (Some(id), None) => SnapshotName::of_id(id),
            (id, name) => SnapshotName { id, ..SnapshotName::of_name(name.unwrap_or_default()) },
        })
    }

    /// Index of the snapshot that it stands for.
    pub fn find(&self, snapshots: &[Snapshot]) -> Option<usize> {
        match &self.id {
            None => find_snapshot(snapshots, self.name.as_bytes(), self.lookup),
            Some(id) => {
                let is_it = |snapshot: &Snapshot| snapshot.id == id.as_bytes() && snapshot.name == self.name.as_bytes();
                snapshots.iter().position(is_it)
            }
        }
    }
}

impl fmt::Display for SnapshotName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.id, self.lookup) {
            (Some(id), _) => write!(f, "id '{id}' and name '{}'", self.name),
            (None, Lookup::Id) => write!(f, "id '{}'", self.name),
            (None, Lookup::Name) => write!(f, "name '{}'", self.name),
            (None, Lookup::IdOrName) => write!(f, "id or name '{}'", self.name),
        }
    }
}

/// Index of the snapshot that `wanted` stands for.
pub fn find_snapshot(snapshots: &[Snapshot], wanted: &[u8], lookup: Lookup) -> Option<usize> {
    let by_id = || snapshots.iter().position(|snapshot| snapshot.id == wanted);
    let by_name = || snapshots.iter().position(|snapshot| snapshot.name == wanted);
    match lookup {
        Lookup::IdOrName => by_id().or_else(by_name),
        Lookup::Id => by_id(),
        Lookup::Name => by_name(),
    }
}
