// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The files below nodes, by identity. A job that writes into a file that it reads would destroy both. Locks don't
//! always show that (`-U`, `locking=off`, file systems without locks), and names hardly ever do.

use crate::node::{Child, ChildRole, Node};
use cowshed_storage::FileIdentity;
use cowshed_types::{Error, Result};
use std::ops::Range;
use std::sync::Arc;

/// A range of a file of this machine.
struct Part {
    identity: FileIdentity,
    range: Range<u64>,
    name: String,
}

/// The files that are meant.
#[derive(Clone, Copy, PartialEq, Eq)]
enum FileScope {
    /// The files that change when the node is written to: not those of its backing file.
    Written,
    /// All that may be read.
    All,
}

const WHOLE: Range<u64> = 0..u64::MAX;

/// Adds the files with the bytes `window` of a node.
fn collect(node: &Node, window: Range<u64>, below: FileScope, parts: &mut Vec<Part>) {
    if let Some(file) = node.driver().protocol_file() {
        let identity = file.identity();
        parts.extend(identity.map(|identity| Part { identity, range: window, name: file.name().to_owned() }));
        return;
    }
    let window = node.driver().part_of_child(&window);
    for child in node.children() {
        match child.role {
            ChildRole::Backing if below == FileScope::Written => {}
            ChildRole::File => collect(&child.node, window.clone(), below, parts),
            _ => collect(&child.node, WHOLE, below, parts),
        }
    }
}

fn parts_of(node: &Node, below: FileScope) -> Vec<Part> {
    let mut parts = Vec::new();
    collect(node, WHOLE, below, &mut parts);
    parts
}

fn check(written: &[Part], read: &[Part]) -> Result<()> {
    for target in written {
        let is_hit = |part: &&Part| {
            part.identity == target.identity
                && part.range.start < target.range.end
                && target.range.start < part.range.end
        };
        if let Some(part) = read.iter().find(is_hit) {
            let message = format!("this file would be written while it is read as '{}': both are one file", part.name);
            return Err(Error::invalid_argument(message).file(&target.name));
        }
    }
    Ok(())
}

/// Refuses `written` as the target of a copy of `read` when a file of it is one of those that are read, backing files
/// included.
pub fn check_apart<'a>(written: &Node, read: impl IntoIterator<Item = &'a Arc<Node>>) -> Result<()> {
    let written = parts_of(written, FileScope::Written);
    read.into_iter().try_for_each(|node| check(&written, &parts_of(node, FileScope::All)))
}

/// Refuses `base` as the target of the data of `layers` when a layer and a node below the base share a file.
pub fn check_layers<'a>(base: &Node, layers: impl IntoIterator<Item = &'a Arc<Node>>) -> Result<()> {
    check_children(&base.children())?;
    let written = parts_of(base, FileScope::Written);
    layers.into_iter().try_for_each(|layer| check(&written, &parts_of(layer, FileScope::Written)))
}

/// Refuses the children of an image that is written to when its own files are also below its backing file.
pub(crate) fn check_children(children: &[Child]) -> Result<()> {
    let Some(backing) = children.iter().find(|child| child.role == ChildRole::Backing) else { return Ok(()) };
    check_backing(children, &backing.node)
}

/// As [`check_children`], for a backing file that the image is to get.
pub(crate) fn check_backing(children: &[Child], backing: &Node) -> Result<()> {
    let mut written = Vec::new();
    for child in children.iter().filter(|child| child.role != ChildRole::Backing) {
        collect(&child.node, WHOLE, FileScope::Written, &mut written);
    }
    check(&written, &parts_of(backing, FileScope::All))
}

/// The files below a node, each with its name: a new image must not be in one of them.
pub fn files_below(node: &Node) -> Vec<(FileIdentity, String)> {
    parts_of(node, FileScope::All).into_iter().map(|part| (part.identity, part.name)).collect()
}
