// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Disks that can be served.

use cowshed_image::graph::{Attachment, Queue};
use cowshed_image::stats::IoKind;
use cowshed_image::{DirtyBits, Node, StatusExtent, ZeroFlags};
use cowshed_nbd_proto::Command;
use cowshed_storage::IoBuf;
use cowshed_types::{Error, Result};
use std::future::Future;
use std::sync::Arc;

/// Where data is: one run of [`DiskQueue::block_status`].
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

/// One run of [`DiskQueue::dirty_status`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirtyRun {
    /// Length in bytes, not 0.
    pub len: u64,
    /// The bitmap has it as written.
    pub dirty: bool,
}

/// A disk that can be served: shared by all threads, each connection makes a [`DiskQueue`] of its own.
pub trait Disk: Send + Sync + 'static {
    /// The target of the requests of one connection.
    type Queue: DiskQueue;

    /// A queue for requests of this thread.
    fn queue(&self) -> Self::Queue;

    /// Size in bytes; may change while it is served.
    fn size(&self) -> u64;

    /// True when writing is never possible.
    fn is_read_only(&self) -> bool;
}

/// The requests of one connection: all from one thread, many at a time, each run to its end. Ranges are inside of the
/// disk, as it was when the request came.
pub trait DiskQueue: 'static {
    /// Size of the disk in bytes, now.
    fn size(&self) -> u64;

    /// Fills `buf` from `offset`.
    fn read(&self, offset: u64, buf: IoBuf) -> impl Future<Output = (Result<()>, IoBuf)>;

    /// Writes `buf` at `offset`; `durable`: it is when this returns.
    fn write(&self, offset: u64, buf: IoBuf, durable: bool) -> impl Future<Output = (Result<()>, IoBuf)>;

    /// Makes a range read as zeroes. With `no_fallback` an error of kind `Unsupported` means: only slowly.
    fn write_zeroes(&self, offset: u64, len: u64, flags: ZeroFlags) -> impl Future<Output = Result<()>>;

    /// Gives a range back: a hint.
    fn discard(&self, offset: u64, len: u64) -> impl Future<Output = Result<()>>;

    /// Makes everything durable that was written before, through whichever queue.
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

    /// A request that was refused before it got here: for the statistics.
    fn count_invalid(&self, command: Command) {
        let _ = command;
    }
}

/// The runs of a bitmap from `offset` on. Bytes past the end of the bitmap's disk are clean.
fn dirty_runs(bits: &DirtyBits, offset: u64, len: u64, max_runs: usize) -> Vec<DirtyRun> {
    let end = offset.saturating_add(len);
    let mut at = offset;
    let mut runs = Vec::new();
    while at < end && runs.len() < max_runs.max(1) {
        let (next, dirty) = match at < bits.disk_bytes() {
            true => bits.run_at(at, end),
            false => (end, false),
        };
        runs.push(DirtyRun { len: next - at, dirty });
        at = next;
    }
    runs
}

fn disk_runs(runs: &[StatusExtent]) -> Vec<DiskRun> {
    let depth = |run: &StatusExtent| if run.present { run.depth.saturating_add(1) } else { 0 };
    runs.iter().map(|run| DiskRun { len: run.len, data: run.data, zero: run.zero, depth: depth(run) }).collect()
}

/// A node by itself: for servers whose graph never changes.
impl Disk for Arc<Node> {
    type Queue = Arc<Node>;

    fn queue(&self) -> Arc<Node> {
        Arc::clone(self)
    }

    fn size(&self) -> u64 {
        Node::size(self)
    }

    fn is_read_only(&self) -> bool {
        Node::is_read_only(self)
    }
}

impl DiskQueue for Arc<Node> {
    fn size(&self) -> u64 {
        Node::size(self)
    }

    fn read(&self, offset: u64, buf: IoBuf) -> impl Future<Output = (Result<()>, IoBuf)> {
        Node::read(self, offset, buf)
    }

    async fn write(&self, offset: u64, buf: IoBuf, durable: bool) -> (Result<()>, IoBuf) {
        let (result, buf) = Node::write(self, offset, buf).await;
        match result {
            Ok(()) if durable => (Node::flush(self).await, buf),
            result => (result, buf),
        }
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
        Ok(disk_runs(&self.block_status_chain(offset, len, max_runs).await?))
    }

    async fn dirty_status(&self, bitmap: &str, offset: u64, len: u64, max_runs: usize) -> Result<Vec<DirtyRun>> {
        let bits = self.find_bitmap(bitmap).await?.bitmap_bits(bitmap).await?;
        Ok(dirty_runs(&bits, offset, len, max_runs))
    }
}

/// The node that is at the attachment's place: the graph may change under the clients.
impl Disk for Arc<Attachment> {
    type Queue = Queue;

    fn queue(&self) -> Queue {
        Attachment::queue(self)
    }

    fn size(&self) -> u64 {
        Attachment::size(self)
    }

    fn is_read_only(&self) -> bool {
        !self.is_writable()
    }
}

impl DiskQueue for Queue {
    fn size(&self) -> u64 {
        Queue::size(self)
    }

    fn read(&self, offset: u64, buf: IoBuf) -> impl Future<Output = (Result<()>, IoBuf)> {
        Queue::read(self, offset, buf)
    }

    async fn write(&self, offset: u64, buf: IoBuf, durable: bool) -> (Result<()>, IoBuf) {
        match durable {
            false => Queue::write(self, offset, buf).await,
            true => self.write_durable(offset, buf).await,
        }
    }

    fn write_zeroes(&self, offset: u64, len: u64, flags: ZeroFlags) -> impl Future<Output = Result<()>> {
        Queue::write_zeroes(self, offset, len, flags)
    }

    fn discard(&self, offset: u64, len: u64) -> impl Future<Output = Result<()>> {
        Queue::discard(self, offset, len)
    }

    fn flush(&self) -> impl Future<Output = Result<()>> {
        Queue::flush(self)
    }

    async fn block_status(&self, offset: u64, len: u64, max_runs: usize) -> Result<Vec<DiskRun>> {
        Ok(disk_runs(&self.block_status_chain(offset, len, max_runs).await?))
    }

    async fn dirty_status(&self, bitmap: &str, offset: u64, len: u64, max_runs: usize) -> Result<Vec<DirtyRun>> {
        Ok(dirty_runs(&*self.bitmap_bits(bitmap).await?, offset, len, max_runs))
    }

    fn count_invalid(&self, command: Command) {
        let kind = match command {
            Command::Write => IoKind::Write,
            Command::WriteZeroes => IoKind::WriteZeroes,
            Command::Trim => IoKind::Discard,
            Command::Flush => IoKind::Flush,
            _ => IoKind::Read,
        };
        Queue::count_invalid(self, kind);
    }
}
