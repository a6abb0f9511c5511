// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Filters: nodes with one child that see the requests pass. A graph without filters doesn't pay for them.

mod compress;
mod copy_before_write;
mod copy_on_read;
mod fault;
mod log_writes;
mod preallocate;
mod ranges;
mod replicas;
mod saver;
mod snapshot_access;
pub mod throttle;
mod write_blocking;

pub use compress::Compress;
pub use copy_before_write::CopyBeforeWrite;
pub(crate) use copy_before_write::SavingOptions;
pub use copy_on_read::CopyOnRead;
pub use fault::{Fault, FaultOp, FaultRule};
pub(crate) use log_writes::LogOptions;
pub use log_writes::LogWrites;
pub use preallocate::Preallocate;
pub(crate) use ranges::{Readers, Reading};
pub(crate) use replicas::{Agreement, Replicas};
pub(crate) use snapshot_access::SnapshotAccess;
pub use throttle::Throttle;
pub use write_blocking::{Claimed, WriteBlocking};

use crate::node::{Link, Node, Preallocation, ZeroFlags};
use cowshed_block::{Error, Result};
use cowshed_storage::{IoBuf, PermissionSet, Permissions};
use std::sync::Arc;

/// A filter: one line of [`FILTERS`].
#[derive(Clone, Copy, Debug)]
pub struct FilterInfo {
    /// The driver name.
    pub name: &'static str,
    /// One line for people.
    pub about: &'static str,
}

/// The filters there are.
pub const FILTERS: &[FilterInfo] = &[
    FilterInfo { name: "fault", about: "fails chosen requests with a chosen errno" },
    FilterInfo { name: "throttle", about: "limits operations and bytes per second" },
    FilterInfo { name: "copy-on-read", about: "copies what is read from a backing file into the image" },
    FilterInfo { name: "copy-before-write", about: "saves to a target what is about to be overwritten" },
    FilterInfo { name: "compress", about: "has what is written compressed in the image" },
    FilterInfo { name: "preallocate", about: "reserves space ahead for a file that grows" },
    FilterInfo { name: "blklogwrites", about: "logs writes as dm-log-writes does" },
    FilterInfo { name: "mirror", about: "writes to the target of a mirror too; only the job adds it" },
];

/// A copy that a filter could not make.
#[derive(Clone, Debug)]
pub struct CopyFailure {
    /// The end that is written failed, else the one that is read.
    pub writing: bool,
    /// Why.
    pub error: Error,
}

impl CopyFailure {
    pub(crate) fn reading(error: Error) -> CopyFailure {
        CopyFailure { writing: false, error }
    }

    pub(crate) fn writing(error: Error) -> CopyFailure {
        CopyFailure { writing: true, error }
    }
}

/// The end of a filter's edge to the node behind it.
#[derive(Clone)]
pub(crate) struct Below(Arc<Link>);

impl Below {
    pub(crate) fn new(link: Arc<Link>) -> Below {
        Below(link)
    }

    /// The node behind the filter.
    pub(crate) fn node(&self) -> Result<Arc<Node>> {
        self.0.get().ok_or_else(|| Error::internal("a filter without a child"))
    }

    pub(crate) fn size(&self) -> u64 {
        self.0.load().as_ref().map_or(0, |child| child.size())
    }

    pub(crate) async fn read(&self, offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        match &*self.0.load() {
            Some(child) => child.read_boxed(offset, buf).await,
            None => (Err(Error::internal("a filter without a child")), buf),
        }
    }

    pub(crate) async fn write(&self, offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        match &*self.0.load() {
            Some(child) => child.write_boxed(offset, buf).await,
            None => (Err(Error::internal("a filter without a child")), buf),
        }
    }

    pub(crate) async fn write_compressed(&self, clusters: Vec<(u64, IoBuf)>) -> Result<()> {
        self.node()?.write_compressed_boxed(clusters).await
    }

    pub(crate) async fn write_zeroes(&self, offset: u64, len: u64, flags: ZeroFlags) -> Result<()> {
        self.node()?.write_zeroes_boxed(offset, len, flags).await
    }

    pub(crate) async fn discard(&self, offset: u64, len: u64) -> Result<()> {
        self.node()?.discard_boxed(offset, len).await
    }

    pub(crate) async fn flush(&self) -> Result<()> {
        self.node()?.flush_boxed().await
    }

    pub(crate) async fn resize(&self, size: u64, preallocation: Preallocation) -> Result<()> {
        self.node()?.resize_boxed(size, preallocation).await
    }
}

/// A filter node's driver: static dispatch over the filters.
pub(crate) enum Filter {
    Fault(Fault),
    Throttle(Throttle),
    CopyOnRead(CopyOnRead),
    CopyBeforeWrite(Box<CopyBeforeWrite>),
    WriteBlocking(Box<WriteBlocking>),
    Compress(Compress),
    Preallocate(Preallocate),
    LogWrites(Box<LogWrites>),
}

/// The same expression for each filter.
macro_rules! each {
    ($filter:expr, |$one:ident| $work:expr) => {
        match $filter {
            Filter::Fault($one) => $work,
            Filter::Throttle($one) => $work,
            Filter::CopyOnRead($one) => $work,
            Filter::CopyBeforeWrite($one) => $work,
            Filter::WriteBlocking($one) => $work,
            Filter::Compress($one) => $work,
            Filter::Preallocate($one) => $work,
            Filter::LogWrites($one) => $work,
        }
    };
}

impl Filter {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Filter::Fault(_) => "fault",
            Filter::Throttle(_) => "throttle",
            Filter::CopyOnRead(_) => "copy-on-read",
            Filter::CopyBeforeWrite(_) => "copy-before-write",
            Filter::WriteBlocking(_) => "mirror",
            Filter::Compress(_) => "compress",
            Filter::Preallocate(_) => "preallocate",
            Filter::LogWrites(_) => "blklogwrites",
        }
    }

    /// Size of the node in bytes.
    pub(crate) fn size(&self) -> u64 {
        match self {
            Filter::Preallocate(ahead) => ahead.size(),
            _ => self.below().size(),
        }
    }

    pub(crate) fn below(&self) -> &Below {
        each!(self, |one| one.below())
    }

    /// What the filter asks of its child when its users have `wanted`.
    pub(crate) fn permissions(&self, wanted: Permissions, read_only: bool) -> Permissions {
        match self {
            // Who writes past the filter would be undone by a copy under way.
            Filter::CopyOnRead(_) if !read_only && !wanted.used.is_empty() => Permissions {
                used: wanted.used | PermissionSet::WRITE_UNCHANGED,
                shared: wanted.shared & !PermissionSet::WRITE,
            },
            // A write past the filter would miss the log.
            Filter::LogWrites(_) if wanted.used.contains(PermissionSet::WRITE) => {
                Permissions { shared: wanted.shared & !PermissionSet::WRITE, ..wanted }
            }
            Filter::Preallocate(_) if wanted.used.contains(PermissionSet::WRITE) => Permissions {
                used: wanted.used | PermissionSet::RESIZE,
                shared: wanted.shared & !(PermissionSet::WRITE | PermissionSet::RESIZE),
            },
            // What is written past the filter would not be saved, or not be mirrored.
            Filter::CopyBeforeWrite(_) | Filter::WriteBlocking(_) if !wanted.used.is_empty() => Permissions {
                used: wanted.used | PermissionSet::CONSISTENT_READ,
                shared: wanted.shared & !(PermissionSet::WRITE | PermissionSet::RESIZE),
            },
            _ => wanted,
        }
    }

    pub(crate) async fn read(&self, offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        match self {
            Filter::Fault(fault) => fault.read(offset, buf).await,
            Filter::Throttle(throttle) => throttle.read(offset, buf).await,
            // Boxed, so that the future of the others stays small.
            Filter::CopyOnRead(copy) => Box::pin(copy.read(offset, buf)).await,
            Filter::CopyBeforeWrite(copy) => Box::pin(copy.read(offset, buf)).await,
            Filter::WriteBlocking(mirror) => mirror.read(offset, buf).await,
            Filter::Compress(compress) => Box::pin(compress.read(offset, buf)).await,
            Filter::Preallocate(ahead) => ahead.read(offset, buf).await,
            Filter::LogWrites(log) => log.read(offset, buf).await,
        }
    }

    pub(crate) async fn write(&self, offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        match self {
            Filter::Fault(fault) => fault.write(offset, buf).await,
            Filter::Throttle(throttle) => throttle.write(offset, buf).await,
            Filter::CopyOnRead(copy) => Box::pin(copy.write(offset, buf)).await,
            Filter::CopyBeforeWrite(copy) => Box::pin(copy.write(offset, buf)).await,
            Filter::WriteBlocking(mirror) => Box::pin(mirror.write(offset, buf)).await,
            Filter::Compress(compress) => Box::pin(compress.write(offset, buf)).await,
            Filter::Preallocate(ahead) => ahead.write(offset, buf).await,
            Filter::LogWrites(log) => Box::pin(log.write(offset, buf)).await,
        }
    }

    pub(crate) async fn write_compressed(&self, clusters: Vec<(u64, IoBuf)>) -> Result<()> {
        each!(self, |one| one.write_compressed(clusters).await)
    }

    pub(crate) async fn write_zeroes(&self, offset: u64, len: u64, flags: ZeroFlags) -> Result<()> {
        each!(self, |one| one.write_zeroes(offset, len, flags).await)
    }

    pub(crate) async fn discard(&self, offset: u64, len: u64) -> Result<()> {
        each!(self, |one| one.discard(offset, len).await)
    }

    pub(crate) async fn flush(&self) -> Result<()> {
        each!(self, |one| one.flush().await)
    }

    pub(crate) async fn resize(&self, size: u64, preallocation: Preallocation) -> Result<()> {
        each!(self, |one| one.resize(size, preallocation).await)
    }
}
