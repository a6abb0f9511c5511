// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The contents that a server serves.

use cowshed_image::Node;
use cowshed_image::graph::{Attachment, Queue, nodes_below};
use cowshed_image::node::{ChildRole, StorageKind};
use cowshed_image::stats::IoKind;
use cowshed_storage::{File, IoBuf};
use cowshed_types::{Error, ErrorKind, Result};
use futures_util::future::LocalBoxFuture;
use std::hash::{BuildHasher, Hash, Hasher, RandomState};
use std::sync::{Arc, LazyLock};

/// A content, in the words of HTTP a representation: bytes that clients may read, from any thread.
pub trait Content: Send + Sync + 'static {
    /// Follows a change of its source, before it is taken into use. A failure is an error of each read.
    fn follow(&self) -> LocalBoxFuture<'_, ()> {
        Box::pin(std::future::ready(()))
    }

    /// Takes it into use on this thread, for one response.
    fn open(&self) -> Box<dyn Reading>;

    /// Its media type.
    fn media_type(&self) -> &str {
        "application/octet-stream"
    }

    /// The name of the file that a browser makes of it; `None`: it is shown.
    fn file_name(&self) -> Option<&str> {
        None
    }

    /// The packed form that is sent in place of its bytes, piece by piece. The length of that is unknown before the
    /// end, and it has no ranges.
    fn packing(&self) -> Option<Packing> {
        None
    }
}

/// Makes the bytes to send from those of a piece. Pieces have [`crate::Limits::piece_bytes`], the last one fewer. An
/// empty content is one empty piece.
pub type Packing = Arc<dyn Fn(&[u8]) -> Result<Vec<u8>> + Send + Sync>;

/// A content as one response reads it.
pub trait Reading {
    /// Length in bytes, now.
    fn size(&self) -> u64;

    /// Its version, now.
    fn version(&self) -> Version;

    /// False for a while after a change: another one could have the same version.
    fn is_settled(&self) -> bool {
        true
    }

    /// True for some seconds after a change: the write that made it may still be under way.
    fn may_be_amid_write(&self) -> bool {
        false
    }

    /// Fails where its length, or bytes that are made without a read of the source, may be those of another source by now.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Fills `buf` from `offset` (bytes) and returns it.
    fn read(&self, offset: u64, buf: IoBuf) -> LocalBoxFuture<'_, (Result<()>, IoBuf)>;
}

/// A version of a content: two reads of one version belong together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Version {
    /// Another one after each change.
    pub number: u64,
    /// Something may be writing to it at the moment.
    pub may_change: bool,
    /// Others may change it without another number: a block device, a disk of a server, or a file whose times a server keeps.
    pub is_unsure: bool,
}

impl Content for Arc<Attachment> {
    fn open(&self) -> Box<dyn Reading> {
        Box::new(self.queue())
    }
}

impl Reading for Queue {
    fn size(&self) -> u64 {
        Queue::size(self)
    }

    fn version(&self) -> Version {
        version_of(&self.attachment().node())
    }

    fn is_settled(&self) -> bool {
        let node = self.attachment().node();
        // The version of one that may be written to has a number of those writes.
        !node.is_read_only() || !sources_of(&node).iter().any(|node| node.file().is_some_and(File::was_changed_lately))
    }

    fn may_be_amid_write(&self) -> bool {
        sources_of(&self.attachment().node()).iter().any(|node| node.file().is_some_and(File::may_be_amid_write))
    }

    fn check(&self) -> Result<()> {
        let node = self.attachment().node();
        check_lengths(&node).and_then(|()| check_tables(&node))
    }

    fn read(&self, offset: u64, buf: IoBuf) -> LocalBoxFuture<'_, (Result<()>, IoBuf)> {
        Box::pin(async move {
            let (result, buf) = Queue::read(self, offset, buf).await;
            (result.and_then(|()| Reading::check(self)), buf)
        })
    }
}

/// A node and everything below it that its data comes from. A disk of the past has its own data, whatever is written to the disk
/// below it.
fn sources_of(top: &Arc<Node>) -> Vec<Arc<Node>> {
    let mut seen: Vec<Arc<Node>> = Vec::new();
    let mut next = vec![Arc::clone(top)];
    while let Some(node) = next.pop() {
        if seen.iter().any(|known| Arc::ptr_eq(known, &node)) {
            continue;
        }
        if !node.driver().shows_past() {
            next.extend(node.children().into_iter().map(|child| child.node));
        }
        seen.push(node);
    }
    seen
}

/// Fails where another program has cut a file off that is read here: the bytes behind its end would be zeroes.
fn check_lengths(node: &Arc<Node>) -> Result<()> {
    if !node.is_read_only() {
        return Ok(());
    }
    for node in nodes_below(node) {
        if let Some(file) = node.file()
            && !file.is_device()
            && let Some([_, _, len, ..]) = file.change_stamp()
            && len < file.len()
        {
            let message = format!("another program has made the file shorter: it had {} bytes", file.len());
            return Err(Error::new(ErrorKind::Io, message).file(node.filename()).value(len));
        }
    }
    Ok(())
}

/// Fails where another program has changed an image: the tables in memory don't fit its bytes any more.
fn check_tables(node: &Arc<Node>) -> Result<()> {
    for image in nodes_below(node).iter().filter(|node| node.is_read_only() && node.has_tables()) {
        for child in image.children() {
            if !matches!(child.role, ChildRole::File | ChildRole::Header | ChildRole::Extent(_)) {
                continue;
            }
            if nodes_below(&child.node).iter().any(|node| node.file().is_some_and(File::was_changed_by_others)) {
                let message = "another program has changed the image since it was opened, so its tables are old ones";
                return Err(Error::new(ErrorKind::Io, message).file(child.node.filename()));
            }
        }
    }
    Ok(())
}

/// For contents whose version the files don't have: each process has versions of its own.
static PROCESS: LazyLock<u64> = LazyLock::new(|| RandomState::new().build_hasher().finish());

/// The version of a node's data: its view of its files, their stamps, and the number of writes through it. Nodes below it count
/// where others write to them: the writes of their parent are those that were counted above, or change no data.
fn version_of(node: &Arc<Node>) -> Version {
    let mut hasher = Stable::default();
    let tree = sources_of(node);
    let names: Vec<&str> = tree.iter().map(|node| node.name()).collect();
    let storages = tree.iter().filter_map(|node| node.storage_kind());
    let is_foreign = storages.into_iter().any(|kind| matches!(kind, StorageKind::HostDevice | StorageKind::Export));
    // A file without a stamp is no file of this machine: its kind tells.
    let tells = |file: &File| file.tells_changes() || file.change_stamp().is_none();
    let is_unsure = is_foreign || tree.iter().any(|node| node.file().is_some_and(|file| !tells(file)));
    let shows_past = node.driver().shows_past();
    let is_written = !shows_past && !node.is_read_only();
    // A write of this process moves the times of a file when it begins, and its bytes come later.
    let may_change = is_written || (!shows_past && tree[1..].iter().any(|below| below.has_writer_beside(&names)));
    node.size().hash(&mut hasher);
    hash_view(&tree, &mut hasher);
    // The files that are open, whatever their names mean by now.
    let mut is_told = !may_change;
    for node in tree.iter().filter(|_| !may_change) {
        match (node.file(), node.children().is_empty() || node.driver().shows_past()) {
            (Some(file), _) => match file.change_stamp() {
                Some(stamp) => stamp.hash(&mut hasher),
                None => is_told = false,
            },
            // A server has no times.
            (None, is_last) => is_told &= !is_last,
        }
    }
    if !is_told {
        PROCESS.hash(&mut hasher);
        for (at, below) in tree.iter().enumerate() {
            // A writer may have come and gone since the last look.
            below.grants_to_write().hash(&mut hasher);
            if at == 0 || below.has_writer_beside(&names) {
                hash_changes(below, &mut hasher);
            }
        }
    }
    Version { number: hasher.finish(), may_change: may_change || is_unsure, is_unsure }
}

/// The places of the nodes in each other: another window of a file, or another format, is another content. Filters change no data,
/// and jobs put them into use. A disk of the past is that of the node which keeps it.
fn hash_view(tree: &[Arc<Node>], hasher: &mut Stable) {
    for node in tree.iter().filter(|node| !node.is_filter()) {
        node.driver_name().hash(hasher);
        let part = node.driver().part_of_child(&(0..node.size()));
        (part.start, part.end).hash(hasher);
        if node.driver().shows_past() {
            node.children().iter().for_each(|child| child.node.number().hash(hasher));
        }
    }
}

/// The number of changes that were made through a node.
fn hash_changes(node: &Node, hasher: &mut Stable) {
    node.name().hash(hasher);
    let statistics = node.statistics();
    for kind in [IoKind::Write, IoKind::WriteZeroes, IoKind::Discard] {
        let kind = statistics.kind(kind);
        (kind.operations, kind.failed).hash(hasher);
    }
}

/// FNV-1a: the same from one process to the next, which the standard hasher isn't. No secret and no attack rests on it:
/// a client that asks for old bytes only deceives itself.
struct Stable(u64);

impl Default for Stable {
    fn default() -> Self {
        Stable(0xcbf2_9ce4_8422_2325)
    }
}

impl Hasher for Stable {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
}
