// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The children of a node: edges whose lower end can be moved to another node while no request runs.

use super::Node;
use arc_swap::{ArcSwapOption, Guard};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// The role of a child for its parent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ChildRole {
    /// The file that stores the image, or a filter's only child.
    File,
    /// The child that `blkdebug` passes its I/O on to.
    Image,
    /// The external data file.
    DataFile,
    /// The header of a volume, where it is in a file of its own.
    Header,
    /// A file that holds one part of the disk, by its number.
    Extent(u32),
    /// The node into which a filter saves data that is about to be overwritten.
    Target,
    /// The trusted copy that `blkverify` compares with.
    Raw,
    /// The copy that `blkverify` tests.
    Test,
    /// Where `blklogwrites` logs writes.
    Log,
    /// A copy of the disk in a `quorum`, by its number.
    Replica(u32),
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
            ChildRole::Header => "header",
            ChildRole::Extent(_) => "extents",
            ChildRole::Target => "target",
            ChildRole::Raw => "raw",
            ChildRole::Test => "test",
            ChildRole::Log => "log",
            ChildRole::Replica(_) => "children",
            ChildRole::Backing => "backing",
        }
    }

    /// The role, with the number where there are several: "file", "extents.0".
    pub fn name(self) -> String {
        match self {
            ChildRole::Extent(index) | ChildRole::Replica(index) => format!("{}.{index}", self.as_str()),
            role => role.as_str().to_owned(),
        }
    }
}

/// An edge of the graph, seen from the parent.
#[derive(Clone, Debug)]
pub struct Child {
    /// The child's role for the parent.
    pub role: ChildRole,
    /// The child at the moment of asking.
    pub node: Arc<Node>,
}

static GRAPH_CHANGES: AtomicU64 = AtomicU64::new(1);

/// Changes so far of edges, and of nodes that became writable, in all graphs. Facts derived from a chain of nodes hold
/// as long as the number stays.
#[inline]
pub fn graph_changes() -> u64 {
    GRAPH_CHANGES.load(Ordering::Acquire)
}

pub(crate) fn note_graph_change() {
    GRAPH_CHANGES.fetch_add(1, Ordering::AcqRel);
}

/// The lower end of an edge. Reading it takes no lock; it is moved only while the parent is drained.
#[derive(Default)]
pub struct Link(ArcSwapOption<Node>);

impl Link {
    /// An edge to a node, or to none.
    pub fn to(node: Option<Arc<Node>>) -> Arc<Link> {
        Arc::new(Link(ArcSwapOption::new(node)))
    }

    /// The child, for the time of a request.
    #[inline]
    pub fn load(&self) -> Guard<Option<Arc<Node>>> {
        self.0.load()
    }

    /// The child, to keep.
    #[inline]
    pub fn get(&self) -> Option<Arc<Node>> {
        self.0.load_full()
    }

    /// Moves the edge to another node, or to none.
    pub fn set(&self, node: Option<Arc<Node>>) {
        self.0.store(node);
        note_graph_change();
    }
}

/// One child edge; the driver shares the link.
#[derive(Clone)]
pub(crate) struct ChildLink {
    pub role: ChildRole,
    pub link: Arc<Link>,
}

/// The children of one parent. Each has an edge of that parent. Dropping the set takes the edges back, so a failed open
/// leaves no permission behind on older nodes.
pub struct Children {
    parent: String,
    /// Tells the parent from a later node of its name.
    id: u64,
    links: Mutex<Vec<ChildLink>>,
    /// The edges were given back: the parent is closed.
    released: AtomicBool,
}

impl Children {
    pub(crate) fn of(parent: &str) -> Children {
        static MADE: AtomicU64 = AtomicU64::new(0);
        let (parent, id) = (parent.to_owned(), MADE.fetch_add(1, Ordering::Relaxed));
        Children { parent, id, links: Mutex::default(), released: AtomicBool::new(false) }
    }

    /// Another number for each parent.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// Adds a child that the parent is attached to already.
    pub(crate) fn push(&self, role: ChildRole, link: Arc<Link>) {
        self.links.lock().unwrap_or_else(PoisonError::into_inner).push(ChildLink { role, link });
    }

    /// Puts the driver's own link in the place of the one with this role, or adds it.
    pub fn share(&self, role: ChildRole, link: Arc<Link>) {
        let mut links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
        match links.iter_mut().find(|child| child.role == role) {
            Some(child) => child.link = link,
            None => links.push(ChildLink { role, link }),
        }
    }

    pub(crate) fn links(&self) -> Vec<ChildLink> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn link(&self, role: ChildRole) -> Option<Arc<Link>> {
        self.links().into_iter().find(|child| child.role == role).map(|child| child.link)
    }

    /// The children, to which the caller gives the parent's edges back.
    pub(crate) fn take(&self) -> Vec<Child> {
        self.released.store(true, Ordering::Release);
        self.list()
    }

    pub(crate) fn list(&self) -> Vec<Child> {
        let with_node = |child: ChildLink| Some(Child { role: child.role, node: child.link.get()? });
        self.links().into_iter().filter_map(with_node).collect()
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        if self.released.load(Ordering::Acquire) {
            return;
        }
        for child in self.list() {
            child.node.release(&self.parent);
        }
    }
}
