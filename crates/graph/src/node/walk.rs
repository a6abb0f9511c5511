// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Walks over the nodes below a node.

use super::{ChildRole, Node};
use std::sync::Arc;

/// A node and everything below it, each once.
pub fn nodes_below(top: &Arc<Node>) -> Vec<Arc<Node>> {
    let mut seen: Vec<Arc<Node>> = Vec::new();
    let mut next = vec![Arc::clone(top)];
    while let Some(node) = next.pop() {
        if seen.iter().any(|known| Arc::ptr_eq(known, &node)) {
            continue;
        }
        next.extend(node.children().into_iter().map(|child| child.node));
        seen.push(node);
    }
    seen
}

/// A node and its storage: all nodes below it but backing files.
pub fn storage_of(top: &Arc<Node>) -> Vec<Arc<Node>> {
    let mut found = vec![Arc::clone(top)];
    let mut at = 0;
    while let Some(node) = found.get(at).cloned() {
        let stored = node.children().into_iter().filter(|child| child.role != ChildRole::Backing);
        for child in stored {
            if !found.iter().any(|known| Arc::ptr_eq(known, &child.node)) {
                found.push(child.node);
            }
        }
        at += 1;
    }
    found
}

/// The only node below one, but for a backing file. As in QEMU a driver without snapshots shows those of that node.
pub fn only_child(node: &Node) -> Option<Arc<Node>> {
    let mut stored = node.children().into_iter().filter(|child| child.role != ChildRole::Backing);
    match (stored.next(), stored.next()) {
        (Some(child), None) if matches!(child.role, ChildRole::File | ChildRole::Image) => Some(child.node),
        _ => None,
    }
}

/// The images that hold the disk of a node: behind filters, and behind nodes that pass bytes on. A quorum has several.
pub fn images_below(node: &Arc<Node>) -> Vec<Arc<Node>> {
    let passes = |role: ChildRole| match role {
        ChildRole::File => node.is_filter() || node.is_raw(),
        ChildRole::Image | ChildRole::Raw | ChildRole::Test | ChildRole::Replica(_) => true,
        _ => false,
    };
    let below: Vec<_> = node.children().into_iter().filter(|child| passes(child.role)).collect();
    match below.is_empty() {
        true => vec![Arc::clone(node)],
        false => below.iter().flat_map(|child| images_below(&child.node)).collect(),
    }
}

/// The image that a node stands for: filters pass on to it.
pub fn below_filters(node: &Arc<Node>) -> Arc<Node> {
    let mut node = Arc::clone(node);
    while node.is_filter() {
        match node.child(ChildRole::File) {
            Some(child) => node = child,
            None => break,
        }
    }
    node
}
