// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The file name of a node. One that is called after a node below it follows when a reopening moves that edge.

use super::{ChildRole, Children, Driver, Link, Node};
use std::sync::Arc;

/// The file name of a node.
pub(super) struct Filename {
    /// The name that its opening found.
    opened: String,
    /// The edge to the node that it is called after.
    after: Option<Arc<Link>>,
}

impl Filename {
    pub(super) fn new(opened: String, driver: &dyn Driver, children: &Children) -> Filename {
        // A raw disk is called after its file as soon as it shows all of it.
        let gives = |role: ChildRole, name: &dyn Fn() -> Option<String>| match role {
            ChildRole::Backing => false,
            ChildRole::File if driver.is_raw() => true,
            _ => name().is_some_and(|name| name == opened),
        };
        let mut links = children.links().into_iter();
        let after = links.find(|child| gives(child.role, &|| child.link.get().map(|node| node.filename())));
        let after = after.map(|child| child.link);
        Filename { opened, after }
    }

    pub(super) fn text(&self, node: &Node) -> String {
        let given = node.driver().name_of_options(node);
        let below = || self.after.as_ref()?.get().map(|below| below.filename());
        given.or_else(below).unwrap_or_else(|| self.opened.clone())
    }
}
