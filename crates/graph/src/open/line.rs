// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A driver's line in the table ([`crate::drivers`]): its keys, its opening, and the facts that the opener needs
//! before.

use super::build::{Draft, Opened, Opener};
use super::file_names::FileNames;
use crate::node::LocalFuture;
use crate::options::{DriverKind, DriverSchema};
use cowshed_storage::Permissions;
use cowshed_types::Result;
use std::rc::Rc;

/// Opens a node of a driver. The options have passed the schema.
pub(crate) type OpenDriver = for<'a> fn(&'a Rc<Opener>, &'a mut Draft) -> LocalFuture<'a, Opened>;

/// Completes the options of a node before the schema checks them, or refuses them in words of the driver.
pub(crate) type Prepare = fn(&Opener, &mut Draft) -> Result<()>;

/// The rights that a node needs at its file before it has users.
#[derive(Clone, Copy, Debug)]
pub enum FirstUse {
    /// The rights that its own opening takes.
    Opening,
    /// Nothing: its users decide later.
    Nothing,
    /// These rights, where the locks of files follow from their users; else those that its opening takes.
    WhereUsersLock(Permissions),
}

/// Options that change a node's data. A name by which it opens again has them.
#[derive(Clone, Copy, Debug)]
pub enum Telling {
    /// These, with flat keys.
    Keys(&'static [&'static str]),
    /// All of the driver's own but this one.
    AllBut(&'static str),
}

/// Whether an image may name the driver for a file of its disk: the policy for images of strangers asks.
#[derive(Clone, Copy, Debug)]
pub enum Mention {
    /// As the policy allows the file.
    AsFile,
    /// Only where the policy allows extents, and then with these words in its refusal.
    AsExtent(&'static str),
    /// Never, with these words in the refusal.
    Never(&'static str),
}

/// A driver.
pub struct DriverLine {
    /// Its name and its keys.
    pub(super) schema: &'static DriverSchema,
    pub(super) open: OpenDriver,
    pub(super) prepare: Prepare,
    pub(super) first: FirstUse,
    pub(super) telling: Telling,
    /// It keeps nothing of its own in its children, so they are no metadata.
    pub(super) passes_on: bool,
    /// It becomes read-only with its file.
    pub(super) follows_file: bool,
    /// The file names that it reads by itself.
    pub(super) names: Option<FileNames>,
    /// As in QEMU a node has the name of its disk.
    pub(super) has_name_of_disk: bool,
    /// A node stays read-only once it was opened so.
    pub(super) stays_read_only: bool,
    /// A node can be given other options while it is open.
    pub(super) reopens: bool,
    /// Whether an image may name it.
    pub(super) mention: Mention,
}

impl DriverLine {
    /// A driver by its keys and its opening function. A filter passes on, and needs the rights of its users at its
    /// child.
    pub const fn new(schema: &'static DriverSchema, open: OpenDriver) -> DriverLine {
        let is_filter = matches!(schema.kind, DriverKind::Filter);
        DriverLine {
            schema,
            open,
            prepare: |_, _| Ok(()),
            first: if is_filter { FirstUse::Nothing } else { FirstUse::Opening },
            telling: Telling::Keys(&[]),
            passes_on: is_filter,
            follows_file: is_filter,
            names: None,
            has_name_of_disk: false,
            stays_read_only: false,
            reopens: true,
            mention: Mention::AsFile,
        }
    }

    /// Completes the options of a node by `prepare`, before the schema checks them.
    pub const fn prepared_by(self, prepare: Prepare) -> DriverLine {
        DriverLine { prepare, ..self }
    }

    /// Asks `first` of a child before there are users.
    pub const fn asking_first(self, first: FirstUse) -> DriverLine {
        DriverLine { first, ..self }
    }

    /// Puts the options of `telling` into a name by which a node opens again.
    pub const fn telling(self, telling: Telling) -> DriverLine {
        DriverLine { telling, ..self }
    }

    /// Keeps nothing of its own in its children.
    pub const fn passing_on(self) -> DriverLine {
        DriverLine { passes_on: true, follows_file: true, ..self }
    }

    /// Becomes read-only with its file: it writes no metadata by itself.
    pub const fn following_file(self) -> DriverLine {
        DriverLine { follows_file: true, ..self }
    }

    /// Reads these file names by itself.
    pub const fn reading(self, names: FileNames) -> DriverLine {
        DriverLine { names: Some(names), ..self }
    }

    /// Gives a node the name of its disk.
    pub(super) const fn named_as_its_disk(self) -> DriverLine {
        DriverLine { has_name_of_disk: true, ..self }
    }

    /// Keeps a node read-only that was opened so. It writes to a second node besides, and an image may have named that node for
    /// reading only. QEMU refuses to reopen the same drivers.
    pub(super) const fn staying_read_only(self) -> DriverLine {
        DriverLine { stays_read_only: true, ..self.never_reopened() }
    }

    /// Refuses other options for an open node, as QEMU does.
    pub(super) const fn never_reopened(self) -> DriverLine {
        DriverLine { reopens: false, ..self }
    }

    /// Lets images name it only as `mention` says.
    pub const fn named_by_images(self, mention: Mention) -> DriverLine {
        DriverLine { mention, ..self }
    }

    /// True for a format without metadata: the disk is the bytes of its file.
    pub(super) fn is_raw(&self) -> bool {
        self.schema.kind == DriverKind::Format && self.passes_on
    }

    /// The rights that a node needs at its file before it has users, where they depend on its users. `by_users`: the
    /// locks of files do.
    pub(super) fn asked_at_first(&self, by_users: bool) -> Option<Permissions> {
        match self.first {
            FirstUse::Opening => None,
            FirstUse::Nothing => Some(Permissions::NONE),
            FirstUse::WhereUsersLock(permissions) => by_users.then_some(permissions),
        }
    }
}
