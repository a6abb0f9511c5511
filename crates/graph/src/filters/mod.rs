// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Filters: nodes with one child that see the requests pass. A graph without filters doesn't pay for them.

mod compress;
mod copies;
mod copy_before_write;
mod copy_on_read;
mod copy_state;
mod fault;
mod log_writes;
mod preallocate;
mod replicas;
mod snapshot_access;
pub mod throttle;
mod write_blocking;

pub use compress::Compress;
pub use copy_before_write::CopyBeforeWrite;
pub(crate) use copy_before_write::saving_options;
pub use copy_on_read::CopyOnRead;
pub use fault::{ArmedRule, Fault, FaultAction, FaultOp, FaultRule, fault_options};
pub(crate) use fault::{SCHEMA as FAULT_SCHEMA, read_scenario, rules_of};
pub(crate) use log_writes::LogOptions;
pub use log_writes::LogWrites;
pub use preallocate::Preallocate;
pub(crate) use preallocate::preallocated_sizes;
pub(crate) use replicas::{Agreement, Replicas, SHARED_BY_VOTERS, agreement_of, check_agreement};
pub(crate) use snapshot_access::SnapshotAccess;
pub use throttle::Throttle;
pub use write_blocking::{Claimed, WriteBlocking};

use crate::node::{
    Below, ChildRole, Driver, Intent, Link, LiveOptions, LocalFuture, Mapped, Node, Preallocation, StatusExtent,
    Transfer, Work, ZeroFlags, done, nodes_below,
};
use cowshed_storage::{IoBuf, PermissionSet, Permissions};
use cowshed_types::{Error, Result};
use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

/// A copy that a filter could not make.
#[derive(Clone, Debug)]
pub struct CopyFailure {
    /// The end that is written failed, else the one that is read.
    pub writing: bool,
    /// The reason of the failure.
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

/// A driver that passes all requests, but those that it handles itself, to the node behind it.
pub(crate) trait Filter: Any + Send + Sync {
    /// As [`Driver::name`].
    fn name(&self) -> &'static str;

    /// The edge to the node behind it.
    fn below(&self) -> &Below;

    /// As [`Driver::size`].
    fn size(&self) -> u64 {
        self.below().size()
    }

    /// As [`Driver::map`]: reads pass at once, writes go through [`Filter::write`].
    fn map(&self, offset: u64, _len: u64, intent: Intent) -> Mapped<'_> {
        match intent {
            Intent::Read => Mapped::Below(self.below(), offset),
            Intent::Overwrite => Mapped::Special,
        }
    }

    /// As [`Driver::read`].
    fn read(&self, offset: u64, buf: IoBuf) -> Transfer<'_> {
        Box::pin(self.below().read(offset, buf))
    }

    /// As [`Driver::write`].
    fn write(&self, offset: u64, buf: IoBuf) -> Transfer<'_> {
        Box::pin(self.below().write(offset, buf))
    }

    /// As [`Driver::write_unchanged`]: by default a filter treats it as any other write.
    fn write_unchanged(&self, offset: u64, buf: IoBuf) -> Transfer<'_> {
        Filter::write(self, offset, buf)
    }

    /// As [`Driver::write_compressed`].
    fn write_compressed(&self, clusters: Vec<(u64, IoBuf)>) -> Work<'_> {
        Box::pin(self.below().write_compressed(clusters))
    }

    /// As [`Driver::write_zeroes`].
    fn write_zeroes(&self, offset: u64, len: u64, flags: ZeroFlags) -> Work<'_> {
        Box::pin(self.below().write_zeroes(offset, len, flags))
    }

    /// As [`Driver::write_zeroes_unchanged`]: see [`Filter::write_unchanged`].
    fn write_zeroes_unchanged(&self, offset: u64, len: u64, flags: ZeroFlags) -> Work<'_> {
        Filter::write_zeroes(self, offset, len, flags)
    }

    /// As [`Driver::discard`].
    fn discard(&self, offset: u64, len: u64) -> Work<'_> {
        Box::pin(self.below().discard(offset, len))
    }

    /// As [`Driver::flush`].
    fn flush(&self) -> Work<'_> {
        Box::pin(self.below().flush())
    }

    /// As [`Driver::resize`].
    fn resize(&self, size: u64, preallocation: Preallocation) -> Work<'_> {
        Box::pin(self.below().resize(size, preallocation))
    }

    /// As [`Driver::permissions`].
    fn permissions(&self, wanted: Permissions, _read_only: bool) -> Permissions {
        wanted
    }

    /// As [`Driver::request_bytes`].
    fn request_bytes(&self) -> Option<u64> {
        None
    }

    /// As [`Driver::settle`].
    fn settle<'a>(&'a self, _drained: &'a [Arc<Node>]) -> LocalFuture<'a, ()> {
        Box::pin(std::future::ready(()))
    }

    /// As [`Driver::complete`].
    fn complete<'a>(&'a self, flush: Work<'a>) -> Work<'a> {
        flush
    }

    /// As [`Driver::close`].
    fn close(&self, _read_only: bool) -> Work<'_> {
        done(Ok(()))
    }

    /// As [`Driver::live_options`].
    fn live_options(&self) -> Option<&dyn LiveOptions> {
        None
    }

    /// As [`Driver::moves_freely`].
    fn moves_freely(&self) -> bool {
        false
    }
}

/// True when a drain reaches the target of a filter by another way than through the filter's disk.
fn drains_target(drained: &[Arc<Node>], target: &Link, disk: &Below) -> bool {
    let (Some(target), Ok(disk)) = (target.get(), disk.node()) else { return false };
    let disk = nodes_below(&disk);
    let is_in = |nodes: &[Arc<Node>], node: &Arc<Node>| nodes.iter().any(|known| Arc::ptr_eq(known, node));
    nodes_below(&target).iter().any(|node| is_in(drained, node) && !is_in(&disk, node))
}

/// The rights that a filter needs at its child if it must see each write. A write past it would be neither saved nor
/// mirrored.
fn keeps_writers_away(wanted: Permissions) -> Permissions {
    match wanted.used.is_empty() {
        true => wanted,
        false => Permissions {
            used: wanted.used | PermissionSet::CONSISTENT_READ,
            shared: wanted.shared & !(PermissionSet::WRITE | PermissionSet::RESIZE),
        },
    }
}

impl<F: Filter> Driver for F {
    fn name(&self) -> &'static str {
        Filter::name(self)
    }

    /// A request of a filter ends with that of the node below, which answers for itself.
    fn holds_changes(&self) -> bool {
        false
    }

    fn size(&self) -> u64 {
        Filter::size(self)
    }

    fn map(&self, offset: u64, len: u64, intent: Intent) -> Mapped<'_> {
        Filter::map(self, offset, len, intent)
    }

    fn read(&self, offset: u64, buf: IoBuf) -> Transfer<'_> {
        Filter::read(self, offset, buf)
    }

    fn write(&self, offset: u64, buf: IoBuf) -> Transfer<'_> {
        Filter::write(self, offset, buf)
    }

    fn write_unchanged(&self, offset: u64, buf: IoBuf) -> Transfer<'_> {
        Filter::write_unchanged(self, offset, buf)
    }

    fn write_compressed(&self, clusters: Vec<(u64, IoBuf)>) -> Work<'_> {
        Filter::write_compressed(self, clusters)
    }

    fn compresses(&self) -> bool {
        true
    }

    fn write_zeroes(&self, offset: u64, len: u64, flags: ZeroFlags) -> Work<'_> {
        Filter::write_zeroes(self, offset, len, flags)
    }

    fn write_zeroes_unchanged(&self, offset: u64, len: u64, flags: ZeroFlags) -> Work<'_> {
        Filter::write_zeroes_unchanged(self, offset, len, flags)
    }

    fn discard(&self, offset: u64, len: u64) -> Work<'_> {
        Filter::discard(self, offset, len)
    }

    fn flush(&self) -> Work<'_> {
        Filter::flush(self)
    }

    fn resize(&self, size: u64, preallocation: Preallocation) -> Work<'_> {
        Filter::resize(self, size, preallocation)
    }

    fn block_status(&self, offset: u64, len: u64, max_runs: usize) -> LocalFuture<'_, Result<Vec<StatusExtent>>> {
        Box::pin(async move { self.below().node()?.block_status_boxed(offset, len, max_runs).await })
    }

    fn filtered(&self) -> Option<&Below> {
        Some(self.below())
    }

    fn part_of_child(&self, disk: &Range<u64>) -> Range<u64> {
        disk.clone()
    }

    fn can_grow(&self) -> bool {
        self.below().node().is_ok_and(|below| below.driver().can_grow())
    }

    fn fixed_length(&self) -> Option<&'static str> {
        self.below().node().ok().and_then(|below| below.driver().fixed_length())
    }

    fn grows_by_zeroes(&self) -> bool {
        self.below().node().is_ok_and(|below| below.driver().grows_by_zeroes())
    }

    fn request_bytes(&self) -> Option<u64> {
        Filter::request_bytes(self)
    }

    fn passes_permissions(&self, _by_users: bool) -> bool {
        true
    }

    fn permissions(&self, _role: ChildRole, wanted: Permissions, read_only: bool) -> Permissions {
        Filter::permissions(self, wanted, read_only)
    }

    fn settle<'a>(&'a self, drained: &'a [Arc<Node>]) -> LocalFuture<'a, ()> {
        Filter::settle(self, drained)
    }

    fn complete<'a>(&'a self, flush: Work<'a>) -> Work<'a> {
        Filter::complete(self, flush)
    }

    fn close(&self, read_only: bool) -> Work<'_> {
        Filter::close(self, read_only)
    }

    fn live_options(&self) -> Option<&dyn LiveOptions> {
        Filter::live_options(self)
    }

    fn moves_freely(&self) -> bool {
        Filter::moves_freely(self)
    }
}
