// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The block graph: the nodes by name, their attachments, and changes under running requests.
//!
//! The names are one immutable snapshot that is swapped whole. Edges (attachment to node, parent to child) are moved
//! while the attachments above them are drained. A request sees the graph before or after a change, never in between.

mod attachment;
mod bitmaps;
mod chain;
mod changes;
mod corruption;
mod credentials;
mod drain;
mod failed;
mod files;
mod gate;
mod grants;
mod hold;
mod internal;
mod key_slots;
mod mirror;
mod moves;
mod owned;
mod queue;
mod relink;
mod reopen;
mod snapshot;
mod threshold;
mod transaction;
mod votes;
mod writing;

pub use crate::node::{
    Chain, Corruption, Holder, QuorumReport, QuorumWork, ThresholdCrossed, below_filters, images_below, nodes_below,
    only_child, storage_of,
};
pub use attachment::{AttachRequest, Attachment};
pub use corruption::{CORRUPTION, CorruptionObserver, print_corruptions};
pub use drain::Drained;
pub use failed::FailedRequest;
pub(crate) use files::check_children;
pub use files::{check_apart, check_layers, files_below};
pub use grants::Grants;
pub use hold::HeldNodes;
pub use queue::Queue;
pub use snapshot::SnapshotTaken;
pub use threshold::ThresholdObserver;
pub use votes::QuorumObserver;

use crate::filters::throttle::Groups;
use crate::nbd_client::ClientTls;
use crate::node::{Home, Node, Reporter};
use crate::options::Schemas;
use crate::secret::Secret;
use cowshed_types::{Error, ErrorKind, Result};
use owned::Owned;
use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, Weak};

/// Longest node-name in bytes, as QEMU has it.
const MAX_NAME_BYTES: usize = 31;

/// A set of named nodes. The graph keeps the nodes alive that were added by name ([`Graph::add`]); the others are kept by
/// their users and parents.
pub struct Graph {
    /// The drivers that nodes may have.
    schemas: &'static dyn Schemas,
    snapshot: RwLock<Arc<GraphSnapshot>>,
    generated: AtomicU32,
    /// Generated names of nodes that are added later.
    given_out: Mutex<BTreeSet<String>>,
    owned: Mutex<Owned>,
    /// TLS credentials by the id that options name them with.
    credentials: Mutex<BTreeMap<String, ClientTls>>,
    /// Secrets by their id.
    secrets: Mutex<BTreeMap<String, Secret>>,
    throttle_groups: Groups,
    /// The observers of requests of exports that failed.
    on_failed: OnceLock<failed::Listener>,
    observers: corruption::CorruptionObservers,
    threshold_observers: threshold::ThresholdObservers,
    quorum_observers: votes::QuorumObservers,
    /// The turns of changes.
    changes: changes::Changes,
    drains: drain::Drains,
    /// Users move from node to node: no file gives locks back meanwhile.
    keep_locks: AtomicU32,
}

/// While it lives, locks of files are added and none is given back, so that no other process comes in between.
pub(crate) struct LocksKept<'a>(&'a Graph);

impl Drop for LocksKept<'_> {
    fn drop(&mut self) {
        if self.0.keep_locks.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.snapshot().nodes().for_each(|node| node.give_locks_back());
        }
    }
}

/// The nodes of a [`Graph`] at one moment.
#[derive(Clone, Debug, Default)]
pub struct GraphSnapshot {
    nodes: BTreeMap<String, NamedNode>,
}

/// A name is taken before the node is open, so that two opens can't end with the same one.
#[derive(Clone, Debug)]
enum NamedNode {
    Opening,
    Node(Weak<Node>),
}

impl GraphSnapshot {
    /// The node with this name.
    pub fn find(&self, name: &str) -> Option<Arc<Node>> {
        match self.nodes.get(name)? {
            NamedNode::Opening => None,
            NamedNode::Node(node) => node.upgrade(),
        }
    }

    /// All nodes, ordered by name.
    pub fn nodes(&self) -> impl Iterator<Item = Arc<Node>> + '_ {
        self.nodes.values().filter_map(|slot| match slot {
            NamedNode::Opening => None,
            NamedNode::Node(node) => node.upgrade(),
        })
    }
}

impl Graph {
    /// An empty graph, whose nodes may have these drivers.
    pub(crate) fn with_schemas(schemas: &'static dyn Schemas) -> Arc<Graph> {
        Arc::new(Graph {
            schemas,
            snapshot: RwLock::default(),
            generated: AtomicU32::default(),
            given_out: Mutex::default(),
            owned: Mutex::default(),
            credentials: Mutex::default(),
            secrets: Mutex::default(),
            throttle_groups: Groups::default(),
            on_failed: OnceLock::default(),
            observers: corruption::CorruptionObservers::default(),
            threshold_observers: threshold::ThresholdObservers::default(),
            quorum_observers: votes::QuorumObservers::default(),
            changes: changes::Changes::default(),
            drains: drain::Drains::default(),
            keep_locks: AtomicU32::default(),
        })
    }

    /// The drivers that its nodes may have.
    pub(crate) fn schemas(&self) -> &'static dyn Schemas {
        self.schemas
    }

    /// The nodes as they are now.
    pub fn snapshot(&self) -> Arc<GraphSnapshot> {
        Arc::clone(&self.snapshot.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// The node with this name.
    pub fn find(&self, name: &str) -> Option<Arc<Node>> {
        self.snapshot().find(name)
    }

    /// The throttle groups that nodes of this graph may be in.
    pub fn throttle_groups(&self) -> &Groups {
        &self.throttle_groups
    }

    fn keep_locks(&self) -> LocksKept<'_> {
        self.keep_locks.fetch_add(1, Ordering::AcqRel);
        LocksKept(self)
    }

    /// Builds the next snapshot and swaps it in.
    fn change<T>(&self, edit: impl FnOnce(&mut BTreeMap<String, NamedNode>) -> T) -> T {
        let mut current = self.snapshot.write().unwrap_or_else(PoisonError::into_inner);
        let mut next = GraphSnapshot::clone(&current);
        let result = edit(&mut next.nodes);
        *current = Arc::new(next);
        result
    }

    fn next_name(&self) -> String {
        format!("#block{:03}", self.generated.fetch_add(1, Ordering::Relaxed))
    }

    fn given_out(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.given_out.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A name as nodes without one have, for a node that is added while this is kept.
    pub fn generate_name(self: &Arc<Self>) -> GeneratedName {
        let name = self.next_name();
        self.given_out().insert(name.clone());
        GeneratedName { graph: Arc::clone(self), name }
    }

    /// Takes a name: the given one, or a generated `#blockNNN`.
    pub(crate) fn reserve(self: &Arc<Self>, wanted: Option<&str>) -> Result<Reservation> {
        if let Some(name) = wanted.filter(|name| !self.given_out().contains(*name)) {
            check_name(name)?;
        }
        let name = self.change(|nodes| {
            let name = match wanted {
                Some(name) => name.to_owned(),
                None => self.next_name(),
            };
            if nodes.contains_key(&name) {
                return Err(Error::new(ErrorKind::InvalidArgument, format!("Duplicate nodes with node-name='{name}'")));
            }
            nodes.insert(name.clone(), NamedNode::Opening);
            Ok(name)
        })?;
        Ok(Reservation { graph: Arc::clone(self), name, kept: false })
    }

    /// Keeps a name from nodes until it is dropped.
    ///
    /// # Errors
    /// A node has it, or it is no name of a node.
    pub fn hold_name(self: &Arc<Self>, name: &str) -> Result<HeldName> {
        self.reserve(Some(name)).map(HeldName)
    }

    pub(crate) fn remove(&self, name: &str) {
        self.change(|nodes| nodes.remove(name));
    }
}

impl Home for Arc<Graph> {
    fn keeps_locks(&self) -> bool {
        self.keep_locks.load(Ordering::Acquire) != 0
    }

    fn is_raw(&self, name: &str) -> bool {
        self.find(name).is_some_and(|node| node.is_raw())
    }

    fn remove(&self, name: &str) {
        Graph::remove(self, name);
    }

    fn report_threshold(&self, crossed: &ThresholdCrossed) {
        Graph::report_threshold(self, crossed);
    }

    fn report_corruption(&self, corruption: &Corruption) {
        Graph::report_corruption(self, corruption);
    }

    fn reporter(&self) -> Box<dyn Reporter> {
        Box::new(Arc::downgrade(self))
    }
}

impl Reporter for Weak<Graph> {
    fn report_corruption(&self, corruption: &Corruption) {
        if let Some(graph) = self.upgrade() {
            graph.report_corruption(corruption);
        }
    }

    fn report_quorum(&self, report: &QuorumReport, offset: u64, len: u64) {
        if let Some(graph) = self.upgrade() {
            graph.report_quorum(report, offset, len);
        }
    }
}

impl Node {
    /// The graph that the node is part of.
    pub fn graph(&self) -> &Arc<Graph> {
        let home: &dyn Any = self.home();
        home.downcast_ref().unwrap_or_else(|| unreachable!("a node is part of a graph"))
    }
}

/// A name that was taken for a node about to open; given back when the opening fails.
pub(crate) struct Reservation {
    graph: Arc<Graph>,
    name: String,
    kept: bool,
}

/// A name as `#blockNNN`, see [`Graph::generate_name`].
pub struct GeneratedName {
    graph: Arc<Graph>,
    name: String,
}

impl GeneratedName {
    /// The name.
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl Drop for GeneratedName {
    fn drop(&mut self) {
        self.graph.given_out().remove(&self.name);
    }
}

/// A name that no node takes, see [`Graph::hold_name`].
pub struct HeldName(Reservation);

impl HeldName {
    /// The name.
    pub fn name(&self) -> &str {
        self.0.name()
    }
}

impl Reservation {
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The node is open: from now on it is found by its name.
    pub(crate) fn fill(mut self, node: &Arc<Node>) {
        self.kept = true;
        self.graph.change(|nodes| nodes.insert(self.name.clone(), NamedNode::Node(Arc::downgrade(node))));
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if !self.kept {
            self.graph.remove(&self.name);
        }
    }
}

impl std::fmt::Debug for Graph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Graph").field("snapshot", &self.snapshot()).finish_non_exhaustive()
    }
}

fn check_name(name: &str) -> Result<()> {
    let mut chars = name.chars();
    let starts_well = chars.next().is_some_and(|first| first.is_ascii_alphabetic());
    let goes_on_well = chars.all(|c| c.is_ascii_alphanumeric() || "-._".contains(c));
    if !starts_well || !goes_on_well {
        return Err(Error::invalid_argument(format!("Invalid node-name: '{name}'")));
    }
    if name.len() > MAX_NAME_BYTES {
        return Err(Error::invalid_argument("Node name too long"));
    }
    Ok(())
}
