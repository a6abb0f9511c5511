// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A disk image, opened for use by a program.

use cowshed_image::node::LocalNode;
use cowshed_image::{Node, OpenRequest, Preallocation, StatusExtent, ZeroFlags};
use cowshed_storage::{IoBuf, rt};
use cowshed_types::Result;
use std::sync::Arc;

/// Runs of [`Queue::map`] that one call returns at most.
const MAP_RUNS: usize = 1024;

/// An open disk image. Cheap to clone and usable from any thread: each makes a [`Queue`] of its own.
///
/// [`Disk::close`] is the last chance to learn that something didn't reach the disk. A disk that is dropped without it
/// releases its files and locks; data flushed before is safe.
#[derive(Clone, Debug)]
pub struct Disk {
    node: Arc<Node>,
}

impl Disk {
    /// Opens an image with its backing chain; `Disk::open("disk.qcow2")` opens it for reading. Blocks this thread: in
    /// a task use [`Disk::open_async`].
    pub fn open(request: impl Into<OpenRequest>) -> Result<Disk> {
        rt::block_on(Self::open_async(request))
    }

    /// As [`Disk::open`], in a task of [`crate::block_on`].
    pub async fn open_async(request: impl Into<OpenRequest>) -> Result<Disk> {
        Ok(Disk { node: cowshed_image::open(request.into()).await? })
    }

    /// Virtual size in bytes.
    pub fn size(&self) -> u64 {
        self.node.size()
    }

    /// The driver: "qcow2", "raw", …
    pub fn driver(&self) -> &'static str {
        self.node.driver_name()
    }

    /// True when it can't be written to.
    pub fn is_read_only(&self) -> bool {
        self.node.is_read_only()
    }

    /// Warnings about the opening of the image, for the user: formats that had to be guessed.
    pub fn warnings(&self) -> &[String] {
        self.node.warnings()
    }

    /// The top node of the block graph, for functions that this face doesn't have.
    pub fn node(&self) -> &Arc<Node> {
        &self.node
    }

    /// A queue for this thread. Any number of requests may be in flight on it.
    pub fn queue(&self) -> Queue {
        Queue { node: LocalNode::new(Arc::clone(&self.node)) }
    }

    /// The disk for callers without a runtime: every call blocks until it is done.
    pub fn blocking(&self) -> Blocking<'_> {
        Blocking { node: &self.node }
    }

    /// Flushes and closes. Other clones and queues get errors from then on.
    pub fn close(self) -> Result<()> {
        rt::block_on(self.node.close())
    }

    /// As [`Disk::close`], in a task of [`crate::block_on`].
    pub async fn close_async(self) -> Result<()> {
        self.node.close().await
    }
}

/// A disk as one thread uses it, in tasks of [`crate::block_on`]. Not `Send`: another thread makes its own from the
/// [`Disk`].
///
/// **Dropped futures.** A request that was never polled does nothing. Once polled, a request that changes the disk is
/// carried out to its end even when its future is dropped, by a `select` for example. These are all requests but
/// [`Queue::read`] and [`Queue::map`]. The kernel can't take back a write that it has begun. The caller then no longer
/// learns the result, and the request's buffer is freed at its end. Until then the range of a write reads as before or
/// as written, sector by sector. [`Queue::flush`] covers requests that have completed, so it need not cover such a one.
/// [`crate::block_on`] returns only after these requests have ended, so a throttle doesn't hold them back.
/// [`Disk::close`] waits for them. A dropped read has no effect.
#[derive(Clone, Debug)]
pub struct Queue {
    node: LocalNode,
}

impl Queue {
    /// Fills `buf` from byte `offset` of the disk and returns it. A range past the end is `InvalidArgument`. After an
    /// error all of `buf` is zeroes.
    pub async fn read(&self, offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        self.node.read(offset, buf).await
    }

    /// Writes `buf` at byte `offset` of the disk and returns it. The write is durable after the next [`Queue::flush`]. A
    /// range past the end is `InvalidArgument`, a disk opened for reading `ReadOnly`.
    pub async fn write(&self, offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        self.node.write(offset, buf).await
    }

    /// Makes a range of bytes read as zeroes. With `no_fallback` in `flags` a slow way is `Unsupported`.
    pub async fn write_zeroes(&self, offset: u64, len: u64, flags: ZeroFlags) -> Result<()> {
        self.node.write_zeroes(offset, len, flags).await
    }

    /// Gives a range of bytes back: a hint. It reads as before or as zeroes afterwards.
    pub async fn discard(&self, offset: u64, len: u64) -> Result<()> {
        self.node.discard(offset, len).await
    }

    /// Makes everything durable whose write completed before. After a failed sync of a file every later flush fails too,
    /// until the image is opened again.
    pub async fn flush(&self) -> Result<()> {
        self.node.flush().await
    }

    /// Changes the virtual size, in bytes. Shrinking discards the data behind the new end.
    pub async fn resize(&self, size: u64, preallocation: Preallocation) -> Result<()> {
        self.node.resize(size, preallocation).await
    }

    /// The places of a range's data through the whole chain: runs in order, without gaps. They may end before the
    /// range does; the caller goes on behind the last one.
    pub async fn map(&self, offset: u64, len: u64) -> Result<Vec<StatusExtent>> {
        self.node.block_status_chain(offset, len, MAP_RUNS).await
    }
}

/// A disk for callers without a runtime, from [`Disk::blocking`]. Not for use inside [`crate::block_on`].
#[derive(Clone, Copy, Debug)]
pub struct Blocking<'a> {
    node: &'a Node,
}

impl Blocking<'_> {
    /// Fills `bytes` from byte `offset` of the disk. After an error `bytes` is as before.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<()> {
        let (result, buf) = rt::block_on(self.node.read(offset, IoBuf::zeroed(bytes.len())));
        result?;
        bytes.copy_from_slice(&buf);
        Ok(())
    }

    /// Writes `bytes` at byte `offset` of the disk: see [`Queue::write`].
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        rt::block_on(self.node.write(offset, IoBuf::copy_from(bytes))).0
    }

    /// See [`Queue::write_zeroes`].
    pub fn write_zeroes(&self, offset: u64, len: u64, flags: ZeroFlags) -> Result<()> {
        rt::block_on(self.node.write_zeroes(offset, len, flags))
    }

    /// See [`Queue::discard`].
    pub fn discard(&self, offset: u64, len: u64) -> Result<()> {
        rt::block_on(self.node.discard(offset, len))
    }

    /// See [`Queue::flush`].
    pub fn flush(&self) -> Result<()> {
        rt::block_on(self.node.flush())
    }

    /// See [`Queue::resize`].
    pub fn resize(&self, size: u64, preallocation: Preallocation) -> Result<()> {
        rt::block_on(self.node.resize(size, preallocation))
    }

    /// See [`Queue::map`]; here the whole range is answered.
    pub fn map(&self, offset: u64, len: u64) -> Result<Vec<StatusExtent>> {
        let mut runs: Vec<StatusExtent> = Vec::new();
        let end = offset.saturating_add(len);
        let mut at = offset;
        while at < end {
            let more = rt::block_on(self.node.block_status_chain(at, end - at, MAP_RUNS))?;
            match more.last() {
                Some(last) if last.start + last.len > at => at = last.start + last.len,
                _ => return Err(cowshed_types::Error::internal("a map without progress").offset(at)),
            }
            runs.extend(more);
        }
        Ok(runs)
    }
}
