// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The turns of changes: two changes that reach the same nodes go one after the other, in the order of their arrival. A
//! change that waits for a disk blocks only changes of connected nodes.

use super::{Attachment, Graph, GraphSnapshot};
use crate::events::Events;
use crate::node::Node;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// The changes that run or wait, the oldest first.
#[derive(Default)]
pub(super) struct Changes {
    list: Mutex<Vec<Ticket>>,
    next_id: AtomicU64,
    ended: Events,
}

/// The nodes that a change names.
#[derive(Clone)]
pub(super) enum ChangeScope {
    All,
    Nodes(Vec<Weak<Node>>),
    /// The node of an attachment, which may change while the attachment waits.
    Attachment(Weak<Attachment>),
}

/// The addresses of nodes; `None`: all nodes.
type Reach = Option<BTreeSet<usize>>;

struct Ticket {
    id: u64,
    scope: ChangeScope,
    /// The change runs, and reached these nodes at its begin.
    began_with: Option<Reach>,
}

/// A change under way, until dropped.
pub(crate) struct OneChange {
    graph: Arc<Graph>,
    id: u64,
}

impl Drop for OneChange {
    fn drop(&mut self) {
        let changes = &self.graph.changes;
        changes.list().retain(|ticket| ticket.id != self.id);
        changes.ended.notify();
    }
}

impl Changes {
    fn list(&self) -> MutexGuard<'_, Vec<Ticket>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a change, unless an older one reaches the same nodes.
    fn begin(&self, id: u64, nodes: &GraphSnapshot) -> bool {
        let mut list = self.list();
        let Some(at) = list.iter().position(|ticket| ticket.id == id) else { return true };
        let mine = list[at].scope.reach(nodes);
        if list[..at].iter().any(|older| older.meets(&mine, nodes)) {
            return false;
        }
        list[at].began_with = Some(mine);
        true
    }
}

impl Ticket {
    fn meets(&self, other: &Reach, nodes: &GraphSnapshot) -> bool {
        let meets = |reach: &Reach| match (reach, other) {
            (Some(one), Some(other)) => !one.is_disjoint(other),
            _ => true,
        };
        // Half-way through a change, nodes may have lost their connection that it still works on.
        self.began_with.as_ref().is_some_and(meets) || meets(&self.scope.reach(nodes))
    }
}

impl ChangeScope {
    fn reach(&self, nodes: &GraphSnapshot) -> Reach {
        let named: Vec<Arc<Node>> = match self {
            ChangeScope::All => return None,
            ChangeScope::Nodes(nodes) => nodes.iter().filter_map(Weak::upgrade).collect(),
            ChangeScope::Attachment(attachment) => attachment.upgrade().map(|one| one.node()).into_iter().collect(),
        };
        Some(connected(nodes, &named).iter().map(|node| Arc::as_ptr(node) as usize).collect())
    }
}

/// These nodes and all that are connected with them, by children and parents.
fn connected(nodes: &GraphSnapshot, named: &[Arc<Node>]) -> Vec<Arc<Node>> {
    let edges: Vec<(Arc<Node>, Arc<Node>)> = nodes
        .nodes()
        .filter(|parent| !parent.is_leaving())
        .flat_map(|parent| parent.children().into_iter().map(move |child| (Arc::clone(&parent), child.node)))
        .collect();
    let mut found: Vec<Arc<Node>> = named.to_vec();
    let mut at = 0;
    while let Some(node) = found.get(at).cloned() {
        for (parent, child) in &edges {
            let other = match (Arc::ptr_eq(parent, &node), Arc::ptr_eq(child, &node)) {
                (true, _) => child,
                (_, true) => parent,
                _ => continue,
            };
            if !found.iter().any(|known| Arc::ptr_eq(known, other)) {
                found.push(Arc::clone(other));
            }
        }
        at += 1;
    }
    found
}

impl Graph {
    /// These nodes and all that are connected with them, by children and parents.
    /// A node that goes connects nothing any more.
    pub fn connected(&self, nodes: &[Arc<Node>]) -> Vec<Arc<Node>> {
        connected(&self.snapshot(), nodes)
    }

    /// Waits until no other change runs that reaches a node which these nodes reach.
    pub(super) async fn changing<'a>(self: &Arc<Self>, nodes: impl IntoIterator<Item = &'a Arc<Node>>) -> OneChange {
        self.changing_in(ChangeScope::Nodes(nodes.into_iter().map(Arc::downgrade).collect())).await
    }

    /// As [`Graph::changing`], for the nodes with these names, as far as there are any.
    pub(crate) async fn changing_named(self: &Arc<Self>, names: &[String]) -> OneChange {
        let nodes: Vec<Arc<Node>> = names.iter().filter_map(|name| self.find(name)).collect();
        self.changing(&nodes).await
    }

    /// As [`Graph::changing`], with this scope.
    pub(super) async fn changing_in(self: &Arc<Self>, scope: ChangeScope) -> OneChange {
        let id = self.changes.next_id.fetch_add(1, Ordering::Relaxed);
        self.changes.list().push(Ticket { id, scope, began_with: None });
        // From here on: a future that is dropped leaves no ticket behind.
        let change = OneChange { graph: Arc::clone(self), id };
        loop {
            let seen = self.changes.ended.now();
            if self.changes.begin(id, &self.snapshot()) {
                return change;
            }
            self.changes.ended.wait(seen).await;
        }
    }
}
