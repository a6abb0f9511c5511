// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What can be served.

use cowshed_block::{Error, Result};
use cowshed_image::{Node, ZeroFlags};
use cowshed_storage::IoBuf;
use std::future::Future;
use std::sync::Arc;

/// Where data is: one run of [`Disk::block_status`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskRun {
    /// Length in bytes, not 0.
    pub len: u64,
    /// May hold bytes other than zero.
    pub data: bool,
    /// Reads as zeroes.
    pub zero: bool,
    /// The layer that it comes from: 1 is the top one, 0 none at all.
    pub depth: u32,
}

/// One run of [`Disk::dirty_status`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirtyRun {
    /// Length in bytes, not 0.
    pub len: u64,
    /// The bitmap says that it was written.
    pub dirty: bool,
}

/// A disk that can be served: shared by all queues, each request stays on the thread that made it. Every future is run to
/// its end.
pub trait Disk: Send + Sync + 'static {
    /// Size in bytes; may change while it is served.
    fn size(&self) -> u64;

    /// True when writing is never possible.
    fn is_read_only(&self) -> bool;

    /// Fills `buf` from `offset`; the range is inside of the disk.
    fn read(&self, offset: u64, buf: IoBuf) -> impl Future<Output = (Result<()>, IoBuf)>;

    /// Writes `buf` at `offset`; the range is inside of the disk.
    fn write(&self, offset: u64, buf: IoBuf) -> impl Future<Output = (Result<()>, IoBuf)>;

    /// Makes a range read as zeroes. With `no_fallback` an error of kind `Unsupported` says: only slowly.
    fn write_zeroes(&self, offset: u64, len: u64, flags: ZeroFlags) -> impl Future<Output = Result<()>>;

    /// Gives a range back: a hint.
    fn discard(&self, offset: u64, len: u64) -> impl Future<Output = Result<()>>;

    /// Makes everything durable that was written before, on whichever queue.
    fn flush(&self) -> impl Future<Output = Result<()>>;

    /// Where data is: runs in order from `offset`, without gaps, at least one and at most `max_runs`. They may end before
    /// the range does.
    fn block_status(&self, offset: u64, len: u64, max_runs: usize) -> impl Future<Output = Result<Vec<DiskRun>>>;

    /// The same for a dirty bitmap, by the name under which it is exported.
    fn dirty_status(
        &self,
        bitmap: &str,
        offset: u64,
        len: u64,
        max_runs: usize,
    ) -> impl Future<Output = Result<Vec<DirtyRun>>> {
        let _ = (offset, len, max_runs);
        let error = Error::unsupported(format!("this disk has no dirty bitmap '{bitmap}'"));
        async move { Err(error) }
    }
}

impl Disk for Arc<Node> {
    fn size(&self) -> u64 {
        Node::size(self)
    }

    fn is_read_only(&self) -> bool {
        Node::is_read_only(self)
    }

    fn read(&self, offset: u64, buf: IoBuf) -> impl Future<Output = (Result<()>, IoBuf)> {
        Node::read(self, offset, buf)
    }

    fn write(&self, offset: u64, buf: IoBuf) -> impl Future<Output = (Result<()>, IoBuf)> {
        Node::write(self, offset, buf)
    }

    fn write_zeroes(&self, offset: u64, len: u64, flags: ZeroFlags) -> impl Future<Output = Result<()>> {
        Node::write_zeroes(self, offset, len, flags)
    }

    fn discard(&self, offset: u64, len: u64) -> impl Future<Output = Result<()>> {
        Node::discard(self, offset, len)
    }

    fn flush(&self) -> impl Future<Output = Result<()>> {
        Node::flush(self)
    }

    async fn block_status(&self, offset: u64, len: u64, max_runs: usize) -> Result<Vec<DiskRun>> {
        let runs = self.block_status_chain(offset, len, max_runs).await?;
        let depth = |run: &cowshed_image::StatusExtent| if run.present { run.depth.saturating_add(1) } else { 0 };
        Ok(runs.iter().map(|run| DiskRun { len: run.len, data: run.data, zero: run.zero, depth: depth(run) }).collect())
    }
}
