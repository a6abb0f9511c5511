// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The trait of drivers. A driver decides at once about the way of a request ([`Driver::map`]), and the node carries
//! that out. A driver carries out itself whatever it can't map at once.

use super::{
    Backing, BackingLink, Below, Bitmaps, ChildRole, Compressing, Described, EncryptedVolume, LiveOptions, Marks,
    Metadata, Node, Preallocation, Snapshots, StatusExtent, VmState, ZeroFlags,
};
use crate::encryption::LuksArea;
use crate::options::BlockdevOptions;
use cowshed_storage::{File, IoBuf, Permissions};
use cowshed_types::{CacheStatistics, CountGuard, Error, HostOffset, Result};
use std::any::Any;
use std::future::{Future, ready};
use std::ops::Range;
use std::pin::Pin as Pinned;
use std::sync::Arc;

/// A boxed future that stays on its thread: breaks the recursion of nodes over nodes.
pub type LocalFuture<'a, T> = Pinned<Box<dyn Future<Output = T> + 'a>>;

/// A transfer on its way: its result, and its buffer back.
pub type Transfer<'a> = LocalFuture<'a, (Result<()>, IoBuf)>;

/// A request without a buffer on its way.
pub type Work<'a> = LocalFuture<'a, Result<()>>;

/// A guard that keeps a mapped range from getting another owner. It is held until the I/O there is done.
pub(crate) type RangeGuard<'a> = Option<CountGuard<'a>>;

/// The reason for which a range is mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Intent {
    /// It is read.
    Read,
    /// It is written, where nothing but its bytes changes by that.
    Overwrite,
}

/// The place of a layer's plain data in its file, as long as [`super::graph_changes`] returns `changes`. A reader takes
/// a guard of the layer first and looks at that number then. The layer releases no cluster while a guard from before is
/// held, and each change by which it may do so is counted.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// Offset of the range in the file.
    pub host: HostOffset,
    /// The number of changes for which it holds.
    pub changes: u64,
}

/// The way of a request, as far as a driver can decide it without waiting.
pub enum Mapped<'a> {
    /// It is one plain range of a file.
    File {
        /// The file.
        file: &'a File,
        /// Offset of the range in it, in bytes.
        host: u64,
        /// Held until the I/O there is done.
        guard: RangeGuard<'a>,
    },
    /// It reads as zeroes.
    Zeroes,
    /// Another layer of the chain has it; and where that layer has it, if that is known.
    Layer(Arc<Node>, Option<Place>),
    /// The node behind has it, at this offset.
    Below(&'a Below, u64),
    /// This has to end first. The task that got it must run it: other requests wait for the same.
    Load(Work<'a>),
    /// No byte of it can be overwritten: [`Driver::write_unmapped`] carries it out.
    Nothing,
    /// The driver carries it out.
    Special,
}

/// Gets the damage, and the host offset and the length of the metadata that a write would have hit, in bytes. The flag
/// is set if the image takes no more writes.
pub type OnCorruption = Box<dyn Fn(&Error, Option<(u64, u64)>, bool) + Send + Sync>;

/// The storage behind a protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StorageKind {
    /// A file of the host.
    HostFile,
    /// A block device of the host.
    HostDevice,
    /// An export of a server.
    Export,
    /// No storage at all.
    Nothing,
}

/// Virtual disks are counted in sectors: a file with an odd tail is shown rounded up, its tail reads as zeroes.
const SECTOR_BYTES: u64 = 512;

/// The length of a file rounded up to whole sectors; `u64::MAX` when that can't be.
pub fn whole_sectors(len: u64) -> u64 {
    len.checked_next_multiple_of(SECTOR_BYTES).unwrap_or(u64::MAX)
}

/// Work that is done already.
pub fn done<'a>(result: Result<()>) -> Work<'a> {
    Box::pin(ready(result))
}

/// The backing file that an image names: its name and its format.
pub type NamedBacking = (Option<String>, Option<String>);

/// A driver: a format, a protocol or a filter. The node has checked each range against [`Driver::size`]. Futures that change
/// something are parts of a node's request, which runs to its end.
pub trait Driver: Any + Send + Sync {
    /// `driver` of the options.
    fn name(&self) -> &'static str;

    /// Size of the node in bytes.
    fn size(&self) -> u64;

    /// True for a format without metadata: the disk is the bytes of its file.
    fn is_raw(&self) -> bool {
        false
    }

    /// The file name of a node whose options make it another disk than the file below it: a part of that file, for one.
    fn name_of_options(&self, _node: &Node) -> Option<String> {
        None
    }

    /// Decides at once about the way of a request.
    fn map(&self, _offset: u64, _len: u64, _intent: Intent) -> Mapped<'_> {
        Mapped::Special
    }

    /// As [`Driver::map`] for a read of a range whose place a map of the chain knows.
    fn placed(&self, _place: Place, _len: u64) -> Mapped<'_> {
        Mapped::Special
    }

    /// The error for which nothing is written here.
    fn refusal(&self) -> Error {
        Error::unsupported(format!("driver '{}' can't write", self.name()))
    }

    /// Fills a buffer, for any mapping.
    fn read(&self, offset: u64, buf: IoBuf) -> Transfer<'_>;

    /// Writes a buffer, for any mapping.
    fn write(&self, _offset: u64, buf: IoBuf) -> Transfer<'_> {
        Box::pin(ready((Err(self.refusal()), buf)))
    }

    /// As [`Driver::write`], of data that the range already has: no dirty bitmap counts it.
    fn write_unchanged(&self, offset: u64, buf: IoBuf) -> Transfer<'_> {
        self.write(offset, buf)
    }

    /// As [`Driver::write`], after [`Mapped::Nothing`].
    fn write_unmapped(&self, offset: u64, buf: IoBuf) -> Transfer<'_> {
        self.write(offset, buf)
    }

    /// True where space was given back after this error of a full disk: the request may be tried again.
    fn gains_space(&self, _error: &Error) -> LocalFuture<'_, bool> {
        Box::pin(ready(false))
    }

    /// Writes whole clusters compressed, where the driver [`Driver::compresses`].
    fn write_compressed(&self, _clusters: Vec<(u64, IoBuf)>) -> Work<'_> {
        done(Err(self.refusal()))
    }

    /// True when it can write compressed clusters.
    fn compresses(&self) -> bool {
        false
    }

    /// Makes a range read as zeroes.
    fn write_zeroes(&self, _offset: u64, _len: u64, _flags: ZeroFlags) -> Work<'_> {
        done(Err(self.refusal()))
    }

    /// As [`Driver::write_zeroes`], of a range that reads as zeroes already: no dirty bitmap counts it.
    fn write_zeroes_unchanged(&self, offset: u64, len: u64, flags: ZeroFlags) -> Work<'_> {
        self.write_zeroes(offset, len, flags)
    }

    /// Gives a range back: a hint.
    fn discard(&self, _offset: u64, _len: u64) -> Work<'_> {
        done(Ok(()))
    }

    /// Makes everything written so far durable.
    fn flush(&self) -> Work<'_> {
        done(Ok(()))
    }

    /// See [`Marks`].
    fn marks(&self) -> Option<&dyn Marks> {
        None
    }

    /// Changes the size to `size` bytes, which may be no whole number of sectors.
    fn resize(&self, _size: u64, _preallocation: Preallocation) -> Work<'_> {
        done(Err(self.refusal()))
    }

    /// See [`Node::moving_blocks`].
    fn let_blocks_move(&self, _allowed: bool) {}

    /// True where [`Driver::block_status`] tells of a metadata context that the user named, and not of contents.
    fn shows_foreign_context(&self) -> bool {
        false
    }

    /// See [`Node::block_status`].
    fn block_status(&self, offset: u64, len: u64, max_runs: usize) -> LocalFuture<'_, Result<Vec<StatusExtent>>>;

    /// See [`Node::share_from`]; 0 bytes where it can't be done.
    fn share_from<'a>(
        &'a self,
        offset: u64,
        len: u64,
        source: &'a File,
        source_offset: u64,
    ) -> LocalFuture<'a, Result<u64>> {
        match self.whole_file() {
            Some(file) => {
                Box::pin(async move { file.share_from(source, source_offset, offset, len).await.map(|()| len) })
            }
            None => Box::pin(ready(Ok(0))),
        }
    }

    /// The file, if the node's bytes are that file's bytes one to one.
    fn whole_file(&self) -> Option<&File> {
        None
    }

    /// The file that holds the node's data.
    fn content_file(&self) -> Option<&File> {
        self.whole_file()
    }

    /// The file of a protocol: its locks follow from the users of the node, and its length is the node's.
    fn protocol_file(&self) -> Option<&File> {
        None
    }

    /// The storage of a protocol.
    fn storage_kind(&self) -> Option<StorageKind> {
        None
    }

    /// The node behind a filter.
    fn filtered(&self) -> Option<&Below> {
        None
    }

    /// For `null-co` and nodes that pass it on unchanged: whether reads are promised to give zeroes.
    fn null_reads_zeroes(&self) -> Option<bool> {
        None
    }

    /// The part of the child `file` with a part of the disk.
    fn part_of_child(&self, _disk: &Range<u64>) -> Range<u64> {
        0..u64::MAX
    }

    /// True when it shows all of its child `file`, and nothing else.
    fn shows_all_of_child(&self) -> bool {
        false
    }

    /// True when its length can be set.
    fn can_grow(&self) -> bool {
        false
    }

    /// The words of a refusal to set its length as that of a file. `None` for devices and exports: theirs is given.
    fn fixed_length(&self) -> Option<&'static str> {
        (!self.can_grow()).then_some("Image format driver does not support resize")
    }

    /// True when the bytes by which it grows read as zeroes.
    fn grows_by_zeroes(&self) -> bool {
        true
    }

    /// The unit of requests, in bytes, where it has one.
    fn request_bytes(&self) -> Option<u64> {
        None
    }

    /// True when it needs the rights of its users at its children. `by_users`: the locks of files follow from their users.
    fn passes_permissions(&self, _by_users: bool) -> bool {
        false
    }

    /// The rights that it needs at the child of this role when its users have `wanted`, where [`Driver::passes_permissions`].
    fn permissions(&self, _role: ChildRole, wanted: Permissions, _read_only: bool) -> Permissions {
        wanted
    }

    /// See [`Bitmaps`].
    fn bitmaps(&self) -> Option<&dyn Bitmaps> {
        None
    }

    /// See [`Backing`].
    fn backing(&self) -> Option<&dyn Backing> {
        None
    }

    /// See [`BackingLink`].
    fn backing_link(&self) -> Option<&dyn BackingLink> {
        None
    }

    /// See [`Described`].
    fn described(&self) -> Option<&dyn Described> {
        None
    }

    /// See [`Metadata`].
    fn metadata(&self) -> Option<&dyn Metadata> {
        None
    }

    /// See [`Compressing`].
    fn compressing(&self) -> Option<&dyn Compressing> {
        None
    }

    /// The area with key slots, and the prefix of the options that are about them; `None` for drivers without encryption.
    fn key_slots(&self) -> Option<Result<(LuksArea, &'static str)>> {
        None
    }

    /// See [`EncryptedVolume`].
    fn encrypted_volume(&self) -> Option<&dyn EncryptedVolume> {
        None
    }

    /// True when the image's data is encrypted by its format.
    fn is_encrypted(&self) -> bool {
        false
    }

    /// See [`Snapshots`].
    fn snapshots(&self) -> Option<&dyn Snapshots> {
        None
    }

    /// See [`VmState`].
    fn vm_state(&self) -> Option<&dyn VmState> {
        None
    }

    /// See [`LiveOptions`].
    fn live_options(&self) -> Option<&dyn LiveOptions> {
        None
    }

    /// True for a filter that keeps nothing of the node below it, and so may get another one.
    fn moves_freely(&self) -> bool {
        false
    }

    /// The unit of allocation, and the least part of it that it can hold alone, in bytes.
    fn allocation(&self) -> Option<(u64, u64)> {
        None
    }

    /// True where data of an ended request is lost with this process: a table in memory has its place. A flush writes that.
    /// The nodes below answer for themselves.
    fn holds_changes(&self) -> bool;

    /// The size up to which it maps its disk without another table, in bytes.
    fn mapped_bytes(&self) -> Option<u64> {
        None
    }

    /// Counters of the cache of its metadata.
    fn cache_statistics(&self) -> Option<CacheStatistics> {
        None
    }

    /// True once it takes no more writes, because of damage.
    fn is_corrupt(&self) -> bool {
        false
    }

    /// True when it can record zeroes where something else lies beneath.
    fn records_zeroes(&self) -> bool {
        false
    }

    /// The name of the file with its data, where the image holds one.
    fn data_file_name(&self) -> Option<String> {
        None
    }

    /// The backing file that the image names; `None` where the name doesn't lead to the image's data source.
    fn named_backing(&self) -> Option<NamedBacking> {
        None
    }

    /// True when the node shows data that no name opens again.
    fn shows_past(&self) -> bool {
        false
    }

    /// True while a request that meets damage is the first to report it.
    fn tells_damage(&self) -> bool {
        false
    }

    /// Makes the driver report damage that it meets to `_tell`. Set once.
    fn observe_corruption(&self, _tell: OnCorruption) {}

    /// Waits for work behind requests that have ended, where it touches one of the drained nodes.
    fn settle<'a>(&'a self, _drained: &'a [Arc<Node>]) -> LocalFuture<'a, ()> {
        Box::pin(ready(()))
    }

    /// Makes the image complete on disk, as a close would leave it. `flush` flushes the node.
    fn complete<'a>(&'a self, flush: Work<'a>) -> Work<'a> {
        flush
    }

    /// Takes no writes from now on. [`Driver::complete`] has run. An error where something would be lost: it goes on then.
    fn stop_writing(&self) -> Result<()> {
        Ok(())
    }

    /// Takes writes from now on.
    fn start_writing<'a>(&'a self, _options: &'a BlockdevOptions, _discards: bool) -> Work<'a> {
        done(Ok(()))
    }

    /// All nodes of the request that opened this one are open, and it takes writes from now on.
    fn begin_writing(&self) -> Work<'_> {
        done(Ok(()))
    }

    /// Completes the image on disk and lets go of it.
    fn close(&self, _read_only: bool) -> Work<'_> {
        done(Ok(()))
    }
}

impl dyn Driver {
    /// The driver as its own type.
    #[inline]
    pub fn downcast<T: Driver>(&self) -> Option<&T> {
        (self as &dyn Any).downcast_ref()
    }
}
