// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The children of a node.

use super::Node;
use std::sync::Arc;

/// What a child is to its parent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ChildRole {
    /// The file that stores the image, or a filter's only child.
    File,
    /// What `blkdebug` passes its I/O on to.
    Image,
    /// The external data file.
    DataFile,
    /// Where unallocated ranges are read from.
    Backing,
}

impl ChildRole {
    /// The role as the option key and QMP spell it.
    pub fn as_str(self) -> &'static str {
        match self {
            ChildRole::File => "file",
            ChildRole::Image => "image",
            ChildRole::DataFile => "data-file",
            ChildRole::Backing => "backing",
        }
    }
}

/// An edge of the graph, seen from the parent.
#[derive(Clone, Debug)]
pub struct Child {
    /// What it is to the parent.
    pub role: ChildRole,
    /// The child.
    pub node: Arc<Node>,
}

/// The children of one parent. Each has an edge of that parent; dropping the set takes the edges back, so that an
/// open that fails half-way leaves no permission behind on nodes that were there before.
pub(crate) struct Children {
    parent: String,
    list: Vec<Child>,
}

impl Children {
    pub(crate) fn of(parent: &str) -> Children {
        Children { parent: parent.to_owned(), list: Vec::new() }
    }

    /// Adds a child that the parent is attached to already.
    pub(crate) fn push(&mut self, role: ChildRole, node: Arc<Node>) {
        self.list.push(Child { role, node });
    }

    pub(crate) fn as_slice(&self) -> &[Child] {
        &self.list
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        for child in &self.list {
            child.node.release(&self.parent);
        }
    }
}
