// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Capabilities of drivers. Each is a trait; the graph and jobs ask a node for it, whatever its driver is.

use super::{Bitmaps, LocalFuture, Node, Transfer, Work, done};
use crate::encryption::LuksArea;
use crate::options::BlockdevOptions;
use cowshed_codec::Codec;
use cowshed_layout::luks::LuksHeader;
use cowshed_layout::qcow2::{Header, Snapshot, SnapshotName};
use cowshed_storage::{File, IoBuf};
use cowshed_types::{CacheStatistics, Compression, Error, Result};
use std::sync::Arc;

/// A backing file, whose name the image holds.
pub trait BackingName: Send + Sync {
    /// The name that the image holds.
    fn name(&self) -> Option<String>;

    /// The format of the backing file, by the image.
    fn format(&self) -> Option<String>;

    /// Plans from now on as if the backing file had `bytes` bytes, for an image that is about to get a longer one.
    /// Ranges that read as zeroes behind the end of the present one become zeroes of the image's own when they are
    /// zeroed or discarded. `None`: for the backing file as it is; it may have grown. No request runs.
    fn plan_for(&self, bytes: Option<u64>);

    /// Whether [`Node::make_empty`] can give the image's clusters back.
    fn can_be_emptied(&self) -> bool {
        true
    }
}

/// The name of the image below in an image's header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeaderName {
    /// The name.
    pub file: String,
    /// The driver that opens it.
    pub format: &'static str,
}

/// The backing node of an image in use, whatever its header names.
pub trait BackingLink: Send + Sync {
    /// True when the image names a backing file that was left out at open.
    fn is_left_out(&self) -> bool;

    /// Refuses a backing node with other content than the image was made of, where the image notes that.
    fn check<'a>(&'a self, _backing: &'a Node) -> Work<'a> {
        done(Ok(()))
    }

    /// Another backing node, or none. The image's own name for it isn't changed.
    fn link(&self, backing: Option<Arc<Node>>);
}

/// The operations of the graph and the node on a backing file.
pub trait Backing: BackingName {
    /// Changes the name that the image holds, and the format with it.
    fn rename<'a>(&'a self, name: Option<&'a str>, format: Option<&'a str>) -> Work<'a>;

    /// Gives all clusters back: the image reads as its backing file afterwards, or as zeroes.
    fn make_empty(&self) -> Work<'_>;
}

/// Metadata that checks, amendments and reports read in the image's own file.
pub trait Metadata: Send + Sync {
    /// A copy of the header as it is on disk.
    fn header(&self) -> Header;

    /// The file with the metadata.
    fn file(&self) -> &File;
}

/// Compressed clusters.
pub trait Compressing: Send + Sync {
    /// The method of the image.
    fn method(&self) -> Compression;

    /// Chooses how clusters are compressed from now on. The method must be the image's.
    fn set_codec(&self, codec: Codec) -> Result<()>;
}

/// A disk that is encrypted as a whole, with key slots in a header.
pub trait EncryptedVolume: Send + Sync {
    /// The header as it is on disk.
    fn header(&self) -> LocalFuture<'_, Result<LuksHeader>>;

    /// True when header and disk are in two files.
    fn has_detached_header(&self) -> bool;
}

/// Internal snapshots. No request runs while they change.
pub trait Snapshots: Send + Sync {
    /// All of them, in the order of the image.
    fn list(&self) -> LocalFuture<'_, Result<Vec<Snapshot>>>;

    /// Takes one with this name; its ID. The options are the node's.
    fn take<'a>(
        &'a self,
        name: &'a str,
        options: &'a BlockdevOptions,
        discards: bool,
    ) -> LocalFuture<'a, Result<String>>;

    /// Deletes one, and returns its description. The options are the node's.
    fn delete<'a>(
        &'a self,
        wanted: &'a SnapshotName,
        options: &'a BlockdevOptions,
        discards: bool,
    ) -> LocalFuture<'a, Result<Snapshot>>;
}

/// Space for the state of a virtual machine.
pub trait VmState: Send + Sync {
    /// The offset behind the disk where it begins.
    fn start(&self) -> u64;

    /// Fills a buffer from `offset` of the state.
    fn read(&self, offset: u64, buf: IoBuf) -> Transfer<'_>;

    /// Writes to `offset` of the state.
    fn write(&self, offset: u64, buf: IoBuf) -> Transfer<'_>;
}

/// A mark of the content in an image's header. Overlays note it, and so a parent that was changed is told from the one that
/// they were made of.
pub trait Marks: Send + Sync {
    /// The image's mark now.
    fn mark(&self) -> u32;

    /// True for an image that notes the mark of its backing file.
    fn notes_backing(&self) -> bool;

    /// The bits of a mark of the backing file that the image can note.
    fn room_bits(&self) -> LocalFuture<'_, Result<u32>>;

    /// Notes the present mark of the backing file, durably. The image is open for writing. A job that changed the backing file
    /// left the image's own view as it was.
    fn note_backing(&self) -> Work<'_>;

    /// Gives the image another mark of at most `bits` bits, durably, if this opening has not done so yet.
    fn announce_change(&self, bits: u32) -> Work<'_>;

    /// Gives the image the mark back that it had before [`Marks::announce_change`]. Nothing was changed.
    fn take_back_change(&self) -> Work<'_>;

    /// The change is complete, as others see it: the next one gets a mark of its own.
    fn end_change(&self) -> LocalFuture<'_, ()>;
}

/// Options that change while the node is in use, when no request runs.
pub trait LiveOptions: Send + Sync {
    /// The keys of these options.
    fn keys(&self) -> &'static [&'static str];

    /// A reopening may leave out an option that the node has, which goes back to its default.
    fn can_go(&self) -> bool {
        true
    }

    /// Refuses options that `node`, which is this driver's, can't have; else returns the step that applies them.
    fn check(&self, node: &Node, options: &BlockdevOptions, discards: bool) -> Result<Apply>;

    /// Does the steps that may fail. `Node::complete` has run before.
    fn prepare<'a>(&'a self, _options: &'a BlockdevOptions, _discards: bool) -> Work<'a> {
        done(Ok(()))
    }
}

/// Applies options to the node that they were checked for. It can't fail.
pub type Apply = Box<dyn FnOnce(&Node)>;

/// See [`Node::moving_blocks`].
pub struct MovingBlocks<'a>(&'a Node);

impl Drop for MovingBlocks<'_> {
    fn drop(&mut self) {
        self.0.driver.let_blocks_move(false);
    }
}

impl Node {
    /// The dirty bitmaps that the image keeps. A writable image has none of a format that only reads them: the first write
    /// makes them wrong.
    pub fn stored_bitmaps(&self) -> Option<&dyn Bitmaps> {
        self.driver.bitmaps().filter(|stored| stored.can_change() || self.is_read_only())
    }

    /// The same, where the format has a way to store and change bitmaps.
    pub fn changeable_bitmaps(&self) -> Option<&dyn Bitmaps> {
        self.stored_bitmaps().filter(|stored| stored.can_change())
    }

    /// While the guard lives, a resize may move data to other places of the file, where a longer table needs theirs. The node is
    /// drained for that time: a request in flight has the old places.
    pub fn moving_blocks(&self) -> MovingBlocks<'_> {
        self.driver.let_blocks_move(true);
        MovingBlocks(self)
    }

    /// The mark of the image's content, where the format has one.
    pub fn marks(&self) -> Option<&dyn Marks> {
        self.driver.marks()
    }

    /// True for an image that notes the content of its backing file: [`Node::note_backing`].
    pub fn notes_backing(&self) -> bool {
        self.driver.marks().is_some_and(Marks::notes_backing)
    }

    /// Has an image note the present content of its backing file, durably, where it notes that and is open for writing.
    pub async fn note_backing(&self) -> Result<()> {
        match self.driver.marks().filter(|marks| marks.notes_backing()) {
            Some(marks) if !self.is_read_only() => marks.note_backing().await,
            _ => Ok(()),
        }
    }

    /// True when the image can get another backing node while it is in use.
    pub fn takes_backing(&self) -> bool {
        self.driver.backing_link().is_some()
    }

    /// The backing file's name in the image; `None` for drivers whose images can get no other one.
    pub fn backing_name(&self) -> Option<&dyn BackingName> {
        self.driver.backing().map(|backing| backing as &dyn BackingName)
    }

    /// True when the image has internal snapshots, or may get some.
    pub fn has_snapshots(&self) -> bool {
        self.driver.snapshots().is_some()
    }

    /// The metadata that checks, amendments and reports read; `None` for drivers whose images have nothing of that.
    pub fn metadata(&self) -> Option<&dyn Metadata> {
        self.driver.metadata()
    }

    /// The image's compression of clusters; `None` for drivers that compress nothing themselves.
    pub fn compressing(&self) -> Option<&dyn Compressing> {
        self.driver.compressing()
    }

    /// The area with the key slots of an encrypted image, and the prefix of the options that are about them.
    pub fn key_slots(&self) -> Result<(LuksArea, &'static str)> {
        self.driver
            .key_slots()
            .unwrap_or_else(|| Err(Error::unsupported("only encrypted images have key slots").file(self.filename())))
    }

    /// The header of a disk that is encrypted as a whole. Such a disk is never blank: bytes that were never written read
    /// as noise.
    pub fn encrypted_volume(&self) -> Option<&dyn EncryptedVolume> {
        self.driver.encrypted_volume()
    }

    /// True when the image's data is encrypted by its format.
    pub fn is_encrypted(&self) -> bool {
        self.driver.is_encrypted()
    }

    /// True where something that was written is lost with this process, as long as it is not flushed. Data in the page cache isn't.
    pub fn holds_changes(&self) -> bool {
        let below = || self.children().into_iter().filter(|child| child.role != super::ChildRole::Backing);
        self.driver.holds_changes() || below().any(|child| child.node.holds_changes())
    }

    /// The image's unit of allocation, in bytes.
    pub fn cluster_bytes(&self) -> Option<u64> {
        self.driver.allocation().map(|(cluster, _)| cluster)
    }

    /// The cluster of an image that may have a backing node, in bytes; the largest of the images that hold the disk. Where such an
    /// image has nothing of a cluster, a smaller write fills up the rest of it. `None`: no write does.
    pub fn filled_unit_bytes(self: &Arc<Self>) -> Option<u64> {
        let unit = |image: &Arc<Node>| {
            let described = || image.description().filter(|_| image.takes_backing())?.cluster_bytes;
            image.cluster_bytes().or_else(described)
        };
        super::images_below(self).iter().filter_map(unit).max()
    }

    /// True when the header of an image that holds the disk names a backing file, and no node stands for that.
    pub fn lacks_backing(self: &Arc<Self>) -> bool {
        let lacks = |image: &Arc<Node>| image.names_backing() && image.child(super::ChildRole::Backing).is_none();
        super::images_below(self).iter().any(lacks)
    }

    /// True when the image's header names a backing file.
    pub fn names_backing(&self) -> bool {
        self.driver.named_backing().is_some_and(|(name, _)| name.is_some())
    }

    /// The least part of a cluster that the image can hold alone, in bytes.
    pub fn subcluster_bytes(&self) -> Option<u64> {
        self.driver.allocation().map(|(_, subcluster)| subcluster)
    }

    /// True when the image takes compressed clusters itself.
    pub fn compresses(&self) -> bool {
        self.driver.compresses() && !self.is_filter()
    }

    /// The length of a unit of compression, in bytes; `None` where it takes no compressed clusters itself.
    pub fn compressed_cluster_bytes(&self) -> Option<u64> {
        let cluster = self.cluster_bytes().or_else(|| self.description()?.cluster_bytes);
        cluster.filter(|_| self.compresses())
    }

    /// True when the driver takes whole sectors for a size, and no other number.
    pub fn is_sized_in_sectors(&self) -> bool {
        self.driver.allocation().is_some()
    }

    /// Counters of the metadata cache.
    pub fn cache_statistics(&self) -> Option<CacheStatistics> {
        self.driver.cache_statistics()
    }

    /// True once the image was found to be corrupt and takes no more writes.
    pub fn is_corrupt(&self) -> bool {
        self.driver.is_corrupt()
    }

    /// True when zeroes can be recorded in the image where something else lies beneath.
    pub(crate) fn records_zeroes(&self) -> bool {
        self.driver.records_zeroes()
    }

    /// Fills `buf` from `offset` of the state of a virtual machine in the image; bytes that were never written read as
    /// zeroes.
    pub async fn read_vm_state(&self, offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        match self.driver.vm_state() {
            Some(state) => state.read(offset, buf).await,
            None => (Err(self.lacks("state of a virtual machine")), buf),
        }
    }

    /// The place of the state of a virtual machine: the offset behind the disk where it begins.
    pub fn vm_state_offset(&self) -> Option<u64> {
        self.driver.vm_state().map(VmState::start)
    }

    /// The size up to which the image maps its disk without another table, in bytes.
    pub fn mapped_bytes(&self) -> Option<u64> {
        self.driver.mapped_bytes()
    }

    /// The error of a driver that lacks `what`.
    pub(super) fn lacks(&self, what: &str) -> Error {
        let message = format!("images of the driver '{}' have no {what}", self.driver_name());
        Error::unsupported(message).file(self.filename())
    }
}
