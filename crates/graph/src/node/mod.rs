// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Nodes of the block graph, which jobs, exports and the library read and write.

mod below;
mod bitmaps;
mod capabilities;
mod chain;
mod counting;
mod deadline;
mod description;
mod driver;
mod edge;
mod filename;
mod guess;
mod home;
mod io;
mod live;
mod permissions;
mod ranges;
mod reflink;
mod requests;
mod settings;
mod shared;
mod status;
mod storage;
mod stored_bitmaps;
mod tracking;
mod users;
mod walk;
mod watch;

pub use below::Below;
pub use bitmaps::{BitmapUse, NodeBitmap, SavedBitmap};
pub use capabilities::{Apply, Backing, BackingLink, LiveOptions, Snapshots, VmState};
pub use capabilities::{BackingName, Compressing, EncryptedVolume, HeaderName, Marks, Metadata, MovingBlocks};
pub use chain::{Chain, Holder};
pub(crate) use counting::{ByNode, CountedBy, Counting};
pub(crate) use deadline::Deadline;
pub use description::Described;
pub use description::{Description, MappedCheck};
pub use driver::LocalFuture;
pub use driver::{Driver, Intent, Mapped, NamedBacking, OnCorruption, Place, StorageKind, Transfer, Work};
pub use driver::{done, whole_sectors};
pub use edge::{Child, ChildRole};
pub(crate) use edge::{ChildLink, Children};
pub use edge::{Link, graph_changes};
use filename::Filename;
pub use home::{Corruption, QuorumReport, QuorumWork, ThresholdCrossed};
pub(crate) use home::{Home, Reporter};
pub(crate) use io::is_zero;
pub(crate) use permissions::{Edge, Hold};
pub(crate) use ranges::{Claim, Ranges, Readers, Reading};
pub use requests::LocalNode;
use settings::LiveSettings;
pub(crate) use settings::detect_zeroes;
pub use stored_bitmaps::{BITMAP_NAME_BYTES, default_granularity_bytes};
pub use stored_bitmaps::{BitmapChange, BitmapStatus, Bitmaps, check_new_bitmap};
use tracking::Tracking;
pub(crate) use users::MONITOR;
pub use walk::{below_filters, images_below, nodes_below, only_child, storage_of};

use crate::events::Events;
use crate::options::BlockdevOptions;
use crate::stats::{NodeCounters, NodeStats};
use cowshed_storage::fault::Faults;
use cowshed_storage::{File, rt};
use cowshed_types::{Error, Result, slip};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

/// Preallocation modes of `create` and `resize`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Preallocation {
    /// Nothing.
    #[default]
    Off,
    /// Metadata only: every guest cluster mapped, its host cluster a hole.
    Metadata,
    /// Space reserved with `fallocate`.
    Falloc,
    /// Space written with zeroes.
    Full,
}

impl Preallocation {
    /// The word of command lines, as QEMU's.
    pub fn name(self) -> &'static str {
        match self {
            Preallocation::Off => "off",
            Preallocation::Metadata => "metadata",
            Preallocation::Falloc => "falloc",
            Preallocation::Full => "full",
        }
    }

    /// QEMU's words for space that a file doesn't get.
    pub fn failed_sentence(self) -> &'static str {
        match self {
            Preallocation::Off | Preallocation::Metadata => "Allocating clusters failed",
            Preallocation::Falloc => "Could not preallocate new data",
            Preallocation::Full => "Could not write zeros for preallocation",
        }
    }
}

/// Options of [`Node::write_zeroes`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ZeroFlags {
    /// The space may be given back (QEMU's `BDRV_REQ_MAY_UNMAP`, qemu-io's `-u`).
    pub may_unmap: bool,
    /// Fail with `Unsupported` rather than write zeroes slowly.
    pub no_fallback: bool,
}

/// One run of [`Node::block_status`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatusExtent {
    /// First byte on the virtual disk.
    pub start: u64,
    /// Length in bytes.
    pub len: u64,
    /// May hold bytes other than zero.
    pub data: bool,
    /// Reads as zeroes.
    pub zero: bool,
    /// Allocated in the layer `depth` (0: this node): not read from a backing file.
    pub present: bool,
    /// Stored compressed.
    pub compressed: bool,
    /// Offset in `file`, when its bytes are the data.
    pub offset: Option<u64>,
    /// File name of the layer that `offset` is in.
    pub file: Option<Arc<str>>,
    /// Number of layers down from the asked node.
    pub depth: u32,
}

/// The treatment of a write of nothing but zeroes (`detect-zeroes`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DetectZeroes {
    /// It is written.
    #[default]
    Off,
    /// [`Node::write_zeroes`] that keeps the space.
    On,
    /// [`Node::write_zeroes`] that may give the space back, if the node discards at all.
    Unmap,
}

/// The generic settings of a node, the same for every driver.
#[derive(Clone, Copy, Debug, Default)]
pub struct NodeSettings {
    /// Nothing is written.
    pub read_only: bool,
    /// The word of an option on that. A node above can't change it.
    pub said_read_only: Option<bool>,
    /// Each write is followed by a flush.
    pub writethrough: bool,
    /// Discards are passed on (`discard=unmap`), else ignored.
    pub discard: bool,
    /// The treatment of a write of nothing but zeroes.
    pub detect_zeroes: DetectZeroes,
    /// The format "raw" is a guess: block 0 must not turn into another format's header.
    pub probed_raw: bool,
    /// Opened without the file that holds its data: it only describes itself.
    pub no_data: bool,
    /// The source of the locks of its file.
    pub locks: LockSource,
}

/// The source of the locks of a node's file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LockSource {
    /// The way in which the node was opened.
    #[default]
    Opening,
    /// The rights that its users use and share at the moment. With `share_all` (`force-share`) they share everything.
    Users {
        /// They share everything.
        share_all: bool,
    },
}

/// A node of the block graph: a format or a protocol driver with its children, and a size.
///
/// Shared between threads as `Arc<Node>`; a request runs on the thread that made it. Futures of a node are not `Send`.
/// A dropped future of a request that changes something leaves the request to the thread's executor, which runs it to its end.
pub struct Node {
    name: String,
    number: u64,
    filename: Filename,
    driver: Box<dyn Driver>,
    children: Children,
    settings: LiveSettings,
    /// The options as they count now, for reopening.
    options: Mutex<BlockdevOptions>,
    /// The parent that it was described with ([`Children::id`]). A name could come back with another node.
    described_by: Mutex<Option<u64>>,
    /// The options as the user gave them.
    given: Vec<(String, serde_json::Value)>,
    /// The users of this node (parents, exports, jobs), with their rights.
    users: Mutex<Vec<Edge>>,
    /// The number of times that a user has got the right to write.
    grants_to_write: AtomicU64,
    counters: NodeCounters,
    tracking: Tracking,
    watch: watch::Watch,
    home: Box<dyn Home>,
    warnings: Vec<String>,
    deadline: Option<Deadline>,
    closed: AtomicBool,
    /// Its last user has left: it is closed next, and gets no new users.
    leaving: AtomicBool,
    /// The image was found to be corrupt by a request, and that was reported.
    told_corrupt: Arc<AtomicBool>,
    /// Others may write to the backing node whatever the users of this node share.
    lends_backing: AtomicBool,
    /// Its readers, once each write below it is to wait for them.
    readers: OnceLock<Arc<Readers>>,
    /// See [`guess`].
    ends: futures_util::lock::Mutex<()>,
    /// Itself, for requests that go on as tasks.
    this: Weak<Node>,
    /// Requests that go on without their callers, and their ends.
    left_behind: AtomicUsize,
    one_ended: Events,
}

/// A future that evaluates the expression for `$node`, a copy of `$self`. It is in a box, or a task of its own where
/// polls are nested deep.
macro_rules! boxed {
    ($self:expr, |$node:ident| $work:expr) => {
        match $self.on_new_stack() {
            Some($node) => Box::pin(cowshed_storage::rt::spawn(async move { $work.await })),
            None => {
                let $node = $self;
                cowshed_storage::rt::nested(async move { $work.await })
            }
        }
    };
}
pub(crate) use boxed;

/// The longest disk, as QEMU's: 2^63 bytes but for one GiB.
const MOST_BYTES: u64 = (1 << 63) - (1 << 30);

/// The parts of a new node, for [`Node::new`].
pub(crate) struct NodeParts {
    pub name: String,
    pub filename: String,
    pub driver: Box<dyn Driver>,
    pub children: Children,
    pub settings: NodeSettings,
    pub options: BlockdevOptions,
    /// See [`crate::open::given`].
    pub given: Vec<(String, serde_json::Value)>,
    /// The graph.
    pub home: Box<dyn Home>,
    pub warnings: Vec<String>,
    pub deadline: Option<Deadline>,
}

impl Node {
    pub(crate) fn new(parts: NodeParts) -> Result<Arc<Node>> {
        let size = parts.driver.size();
        if size > MOST_BYTES {
            let error = Error::invalid_argument("the disk is too large").value(size).file(parts.filename);
            return Err(error.qemu("Could not refresh total sector count: File too large"));
        }
        let told_corrupt = Arc::new(AtomicBool::new(false));
        let (reporter, node_name) = (parts.home.reporter(), parts.name.clone());
        let told = Arc::clone(&told_corrupt);
        parts.driver.observe_corruption(Box::new(move |error, place, fatal| {
            if !fatal && told.swap(true, Ordering::Relaxed) {
                return;
            }
            let corruption = Corruption {
                offset: place.map(|(offset, _)| offset),
                size_bytes: place.map(|(_, size_bytes)| size_bytes),
                ..Corruption::new(&node_name, error, fatal)
            };
            reporter.report_corruption(&corruption);
        }));
        static OPENED: AtomicU64 = AtomicU64::new(0);
        let number = OPENED.fetch_add(1, Ordering::Relaxed);
        let node = Arc::new_cyclic(|this| Node {
            number,
            this: this.clone(),
            left_behind: AtomicUsize::new(0),
            one_ended: Events::default(),
            name: parts.name,
            filename: Filename::new(parts.filename, &*parts.driver, &parts.children),
            driver: parts.driver,
            children: parts.children,
            settings: LiveSettings::new(parts.settings),
            options: Mutex::new(parts.options),
            described_by: Mutex::default(),
            given: parts.given,
            users: Mutex::default(),
            grants_to_write: AtomicU64::default(),
            counters: NodeCounters::default(),
            tracking: Tracking::default(),
            watch: watch::Watch::default(),
            home: parts.home,
            warnings: parts.warnings,
            deadline: parts.deadline,
            closed: AtomicBool::new(false),
            leaving: AtomicBool::new(false),
            told_corrupt,
            lends_backing: AtomicBool::new(false),
            readers: OnceLock::new(),
            ends: futures_util::lock::Mutex::new(()),
        });
        node.tell_file_of_discards();
        Ok(node)
    }

    /// Its driver.
    #[inline]
    pub fn driver(&self) -> &dyn Driver {
        &*self.driver
    }

    /// `node-name`, generated where the user gave none (`#blockNNN`).
    pub fn name(&self) -> &str {
        &self.name
    }

    /// `driver`: "qcow2", "raw", "file", "null-co", …
    pub fn driver_name(&self) -> &'static str {
        self.driver.name()
    }

    /// The file name for messages and for `info`; for nodes without one a `json:{…}` name.
    pub fn filename(&self) -> String {
        self.filename.text(self)
    }

    /// Virtual size in bytes.
    pub fn size(&self) -> u64 {
        self.driver.size()
    }

    /// True when it was opened for reading only.
    pub fn is_read_only(&self) -> bool {
        self.settings.is_read_only()
    }

    /// True when [`Node::discard`] and `may_unmap` do something (`discard=unmap`).
    pub fn discards(&self) -> bool {
        self.settings.discards()
    }

    /// True when each write is durable before it returns (cache modes `writethrough` and `directsync`).
    pub fn is_writethrough(&self) -> bool {
        self.settings.is_writethrough()
    }

    /// True when the format "raw" was guessed from the content.
    pub fn is_probed_raw(&self) -> bool {
        self.settings.is_probed_raw()
    }

    /// The children, in the order they were opened: `file`, `data-file`, `backing`, …
    pub fn children(&self) -> Vec<Child> {
        self.children.list()
    }

    /// Grows with each node that is opened in this process.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The child with this role.
    pub fn child(&self, role: ChildRole) -> Option<Arc<Node>> {
        self.children.link(role)?.get()
    }

    /// The backing file's node.
    pub fn backing(&self) -> Option<Arc<Node>> {
        self.child(ChildRole::Backing)
    }

    /// The storage of a protocol node (`file`, `host_device`, `null-co`), and of a raw node that covers all of one:
    /// for kernel copies and allocation figures.
    pub fn file(&self) -> Option<&File> {
        self.driver.whole_file()
    }

    /// The storage of a protocol; `None` for other drivers.
    pub fn storage_kind(&self) -> Option<StorageKind> {
        self.driver.storage_kind()
    }

    /// True for a file or a device of the host.
    pub fn is_on_host(&self) -> bool {
        matches!(self.storage_kind(), Some(StorageKind::HostFile | StorageKind::HostDevice))
    }

    /// For `null-co` and nodes that pass it on unchanged: whether reads are promised to give zeroes.
    pub(crate) fn null_reads_zeroes(&self) -> Option<bool> {
        self.driver.null_reads_zeroes()
    }

    /// The faults of a `blkdebug` node, or of the one directly below a format: to arm and disarm rules at run time.
    pub fn faults(&self) -> Option<Arc<Faults>> {
        let own = self.file().and_then(File::faults).cloned();
        own.or_else(|| self.child(ChildRole::File).and_then(|child| child.file()?.faults().cloned()))
    }

    /// The unit of requests of a filter that has one, in bytes.
    pub fn request_bytes(&self) -> Option<u64> {
        self.driver.request_bytes()
    }

    /// From now on each read notes itself here before it looks at the mapping.
    pub(crate) fn note_readers(&self) -> &Arc<Readers> {
        self.readers.get_or_init(Arc::default)
    }

    /// Waits for work behind requests that have ended, where it touches one of the drained nodes.
    pub(crate) async fn settle(&self, drained: &[Arc<Node>]) {
        self.left_behind_ended().await;
        self.driver.settle(drained).await;
    }

    /// True for nodes that pass requests on to their one child (throttle, copy-on-read, copy-before-write, fault).
    pub fn is_filter(&self) -> bool {
        self.driver.filtered().is_some()
    }

    /// True for a node that shows the bytes of its file: a format without metadata.
    pub fn is_raw(&self) -> bool {
        self.driver.is_raw()
    }

    /// Requests that reached this node so far; of a protocol node, all operations on its file.
    pub fn statistics(&self) -> NodeStats {
        let mut stats = self.counters.snapshot();
        if let Some(file) = self.driver.protocol_file() {
            stats = stats.with_file(&file.statistics());
        }
        (stats.intervals, stats.histograms) = self.observations();
        stats
    }

    /// The options of the node as they count now.
    pub fn options(&self) -> BlockdevOptions {
        self.options.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The options as the user gave them, with flat keys.
    pub(crate) fn given(&self) -> &[(String, serde_json::Value)] {
        &self.given
    }

    /// The graph that the node is part of, as the node sees it.
    pub(crate) fn home(&self) -> &dyn Home {
        &*self.home
    }

    /// Warnings about the opening of the image, for the user: guessed formats. Filled for the node that
    /// [`Drivers::open`](crate::open::Drivers::open) returned.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// See [`Node::close`].
    async fn run_close(&self) -> Result<()> {
        if !slip!("close_overtakes_dropped_requests") {
            self.left_behind_ended().await;
        }
        if self.closed.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let mut result = self.driver.close(self.settings.is_read_only()).await;
        for child in self.children.take() {
            if child.node.release(&self.name) {
                let closed = child.node.close_boxed().await;
                result = result.and(closed);
            }
        }
        self.home.remove(&self.name);
        result.map_err(|error| error.file(self.filename()))
    }

    fn close_boxed(&self) -> LocalFuture<'_, Result<()>> {
        boxed!(self, |node| node.run_close())
    }

    /// The node as a task can hold it, where a request for it should go on as one.
    fn on_new_stack(&self) -> Option<Arc<Node>> {
        if rt::is_deep() { self.this.upgrade() } else { None }
    }

    /// From now on the node, which is closed next, gets no new users. Its running requests may take long to end.
    pub(crate) fn leave(&self) {
        self.leaving.store(true, Ordering::Release);
    }

    /// True for a node that is closed, or is about to be.
    pub fn is_leaving(&self) -> bool {
        self.leaving.load(Ordering::Acquire) || self.is_closed()
    }

    /// True once it is being closed.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    pub(crate) fn check_open(&self) -> Result<()> {
        if self.is_closed() { Err(self.was_closed()) } else { Ok(()) }
    }

    /// Refuses new users of a node that goes.
    pub(crate) fn check_stays(&self) -> Result<()> {
        if self.is_leaving() { Err(self.was_closed()) } else { Ok(()) }
    }

    #[cold]
    fn was_closed(&self) -> Error {
        Error::invalid_argument("the node was closed").file(self.filename())
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // After a close the name may belong to another node already.
        if self.closed.load(Ordering::Acquire) {
            return;
        }
        self.home.remove(&self.name);
    }
}

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Node")
            .field("name", &self.name)
            .field("driver", &self.driver_name())
            .field("filename", &self.filename())
            .field("size", &self.size())
            .finish_non_exhaustive()
    }
}
