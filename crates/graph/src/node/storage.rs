// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A node as the file that an image is stored in: for formats on a filter, on a window of a file, on another image.

use super::{Node, Preallocation, ZeroFlags};
use cowshed_storage::{Alignment, DataRange, File, IoBuf, Remote, RemoteFuture};
use cowshed_types::{Errno, Error};
use futures_util::lock::Mutex;
use std::fmt;
use std::sync::Arc;

/// Runs that one question about holes asks for.
const STATUS_RUNS: usize = 16;

/// A node behind a [`File`]. Its requests pass all filters of the node.
struct NodeStorage {
    node: Arc<Node>,
    alignment: Alignment,
    /// Held while the node is made longer: two at once could make it shorter again.
    growing: Mutex<()>,
}

impl fmt::Debug for NodeStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("NodeStorage").field(&self.node.name()).finish()
    }
}

impl Node {
    /// The bytes of the node as a file: the node's own where there is one ([`Node::file`]), else one whose operations are
    /// requests of the node.
    pub fn storage(self: &Arc<Self>) -> File {
        if let Some(file) = self.file() {
            return file.clone();
        }
        let bottom = self.bottom_file();
        // Exact where the node's size counts whole sectors.
        let len = bottom.as_ref().map_or_else(|| self.size(), File::len);
        let alignment = bottom.map_or(Alignment { memory: 1, offset: 1 }, |file| file.alignment());
        let storage = NodeStorage { node: Arc::clone(self), alignment, growing: Mutex::new(()) };
        File::remote(self.filename(), !self.is_read_only(), len, Arc::new(storage))
    }

    /// The file below nothing but filters.
    pub(crate) fn bottom_file(self: &Arc<Self>) -> Option<File> {
        let mut node = Arc::clone(self);
        loop {
            if let Some(file) = node.file() {
                return Some(file.clone());
            }
            let below = node.driver.filtered()?.node().ok()?;
            node = below;
        }
    }
}

/// The node's words are for the log; the node above gets the number.
fn errno(error: Error) -> Errno {
    tracing::debug!(%error, "a request of an image to the node that stores it failed");
    error.errno()
}

impl NodeStorage {
    /// Sees to it that the node holds bytes up to `end`.
    async fn make_room(&self, end: u64) -> Result<(), Errno> {
        if end <= self.node.size() {
            return Ok(());
        }
        let _growing = self.growing.lock().await;
        if end <= self.node.size() {
            return Ok(());
        }
        self.node.resize_boxed(end, Preallocation::Off).await.map_err(errno)
    }

    async fn find_data(&self, offset: u64) -> Result<Option<DataRange>, Errno> {
        let size = self.node.size();
        let mut at = offset;
        while at < size {
            for run in self.node.block_status_boxed(at, size - at, STATUS_RUNS).await.map_err(errno)? {
                if !run.zero {
                    return Ok(Some(DataRange { start: at, end: run.start + run.len }));
                }
                at = run.start + run.len;
            }
        }
        Ok(None)
    }
}

impl Remote for NodeStorage {
    fn alignment(&self) -> Alignment {
        self.alignment
    }

    fn is_read_only(&self) -> bool {
        self.node.is_read_only()
    }

    fn grows_by_zeroes(&self) -> bool {
        self.node.driver().grows_by_zeroes()
    }

    fn grows(&self) -> bool {
        self.node.driver().can_grow()
    }

    fn fixed_length(&self) -> Option<&'static str> {
        self.node.driver().fixed_length()
    }

    fn read(&self, buf: IoBuf, offset: u64) -> RemoteFuture<'_, (Result<(), Errno>, IoBuf)> {
        Box::pin(async move {
            let (result, buf) = self.node.read_boxed(offset, buf).await;
            (result.map_err(errno), buf)
        })
    }

    fn write(&self, buf: IoBuf, offset: u64) -> RemoteFuture<'_, (Result<(), Errno>, IoBuf)> {
        Box::pin(async move {
            if let Err(errno) = self.make_room(offset + buf.len() as u64).await {
                return (Err(errno), buf);
            }
            let (result, buf) = self.node.write_boxed(offset, buf).await;
            (result.map_err(errno), buf)
        })
    }

    fn sync(&self) -> RemoteFuture<'_, Result<(), Errno>> {
        Box::pin(async move { self.node.flush_boxed().await.map_err(errno) })
    }

    fn write_zeroes(&self, offset: u64, len: u64, may_unmap: bool) -> RemoteFuture<'_, Result<(), Errno>> {
        Box::pin(async move {
            self.make_room(offset + len).await?;
            let flags = ZeroFlags { may_unmap, no_fallback: false };
            self.node.write_zeroes_boxed(offset, len, flags).await.map_err(errno)
        })
    }

    fn write_zeroes_fast(&self, offset: u64, len: u64, may_unmap: bool) -> RemoteFuture<'_, Result<(), Errno>> {
        Box::pin(async move {
            self.make_room(offset + len).await?;
            let flags = ZeroFlags { may_unmap, no_fallback: true };
            self.node.write_zeroes_boxed(offset, len, flags).await.map_err(errno)
        })
    }

    fn discard(&self, offset: u64, len: u64) -> RemoteFuture<'_, Result<(), Errno>> {
        Box::pin(async move { self.node.discard_boxed(offset, len).await.map_err(errno) })
    }

    fn next_data(&self, offset: u64) -> RemoteFuture<'_, Result<Option<DataRange>, Errno>> {
        Box::pin(self.find_data(offset))
    }

    fn set_len(&self, len: u64) -> RemoteFuture<'_, Result<(), Errno>> {
        Box::pin(async move {
            let _growing = self.growing.lock().await;
            self.node.resize_boxed(len, Preallocation::Off).await.map_err(errno)
        })
    }
}
