// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Requests of a node from outside of the graph. Requests that change something run to their end even when their
//! futures are dropped: see [`rt::to_completion`]. Requests that a driver makes of another node are part of such a
//! request already ([`super::io`]).

use super::{Backing, Node, Preallocation, ZeroFlags};
use cowshed_storage::{File, IoBuf, SharedBufs, rt};
use cowshed_types::Result;
use std::future::Future;
use std::ops::Deref;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A node as one thread holds it: requests share it without touching the count that all threads see.
#[derive(Clone, Debug)]
pub struct LocalNode(#[allow(clippy::redundant_allocation, reason = "the outer count is this thread's")] Rc<Arc<Node>>);

impl LocalNode {
    /// Holds the node for this thread.
    pub fn new(node: Arc<Node>) -> LocalNode {
        LocalNode(Rc::new(node))
    }
}

impl Deref for LocalNode {
    type Target = Node;

    #[inline]
    fn deref(&self) -> &Node {
        &self.0
    }
}

/// Counts a request that goes on without its caller: a close or a drain of the node waits for its end.
pub(super) struct Left<N>(pub(super) N);

/// Such a request, until its end.
pub(super) struct LeftBehind<N: Deref<Target = Node>>(N);

impl<N: Deref<Target = Node> + 'static> rt::Owner for Left<N> {
    type Guard = LeftBehind<N>;

    fn leave(self) -> LeftBehind<N> {
        self.0.left_behind.fetch_add(1, Ordering::SeqCst);
        LeftBehind(self.0)
    }
}

impl<N: Deref<Target = Node>> Drop for LeftBehind<N> {
    fn drop(&mut self) {
        self.0.left_behind.fetch_sub(1, Ordering::SeqCst);
        self.0.one_ended.notify();
    }
}

/// The requests of a holder of a node.
macro_rules! requests {
    ($holder:ty, |$self:ident| $hold:expr) => {
        impl $holder {
            /// Writes `buf` at byte `offset`; it is durable after the next `flush` (at once in a writethrough mode).
            /// Once polled, the write is carried out even when the future is dropped.
            pub fn write(&$self, offset: u64, buf: IoBuf) -> impl Future<Output = (Result<()>, IoBuf)> + use<> {
                let node = $hold;
                rt::to_completion_of(Left(node.clone()), async move { node.run_write(offset, buf).await })
            }

            /// As the other writes, from memory that a guest shares and may change meanwhile.
            pub fn write_shared(
                &$self,
                offset: u64,
                bufs: SharedBufs,
            ) -> impl Future<Output = (Result<()>, SharedBufs)> + use<> {
                let node = $hold;
                rt::to_completion_of(Left(node.clone()), async move { node.run_write_shared(offset, bufs).await })
            }

            /// Makes a range read as zeroes. `may_unmap` counts only where the node discards. Once polled, it is carried out even
            /// when the future is dropped.
            pub fn write_zeroes(
                &$self,
                offset: u64,
                len: u64,
                flags: ZeroFlags,
            ) -> impl Future<Output = Result<()>> + use<> {
                let node = $hold;
                rt::to_completion_of(Left(node.clone()), async move { node.run_write_zeroes(offset, len, flags).await })
            }

            /// Gives a range back: a hint. Afterwards it reads as before or as zeroes, never as older backing data. Once polled, it
            /// is carried out even when the future is dropped.
            pub fn discard(&$self, offset: u64, len: u64) -> impl Future<Output = Result<()>> + use<> {
                let node = $hold;
                rt::to_completion_of(Left(node.clone()), async move { node.run_discard(offset, len).await })
            }

            /// Makes everything written so far durable, metadata included. Once polled, it is carried out even when the future is
            /// dropped.
            pub fn flush(&$self) -> impl Future<Output = Result<()>> + use<> {
                let node = $hold;
                rt::to_completion_of(Left(node.clone()), async move { node.run_flush().await })
            }

            /// Changes the virtual size, in bytes. Formats round it up to 512. A file or a raw image gets the very
            /// length, and is then shown rounded up. Shrinking discards the data behind the new end. Once polled, it is
            /// carried out even when the future is dropped.
            pub fn resize(
                &$self,
                size: u64,
                preallocation: Preallocation,
            ) -> impl Future<Output = Result<()>> + use<> {
                let node = $hold;
                rt::to_completion_of(Left(node.clone()), async move { node.run_resize(size, preallocation).await })
            }
        }
    };
}

requests!(Node, |self| self.shared());
requests!(LocalNode, |self| self.clone());

impl Node {
    /// Waits for requests that go on without their callers.
    pub(super) async fn left_behind_ended(&self) {
        loop {
            let seen = self.one_ended.now();
            if self.left_behind.load(Ordering::SeqCst) == 0 {
                return;
            }
            self.one_ended.wait(seen).await;
        }
    }

    /// The node as requests hold it that may go on without their callers.
    pub(super) fn shared(&self) -> Arc<Node> {
        self.this.upgrade().unwrap_or_else(|| unreachable!("a node that is in use has not been dropped"))
    }

    /// Writes whole clusters compressed (already-compressible check inside: a cluster that doesn't shrink is written
    /// plain). Each element is (guest offset, one guest cluster, the last one of the disk may be shorter). Once polled, it is
    /// carried out even when the future is dropped.
    pub fn write_compressed(&self, clusters: Vec<(u64, IoBuf)>) -> impl Future<Output = Result<()>> + use<> {
        let node = self.shared();
        rt::to_completion_of(Left(Arc::clone(&node)), async move { node.run_write_compressed(clusters).await })
    }

    /// As a write at `offset` of the `len` bytes that `source` has from `source_offset` on, by sharing their blocks.
    /// Returns the number of bytes taken over from the front. It is less than `len`, or 0, where format, settings or
    /// file system can't (see [`File::share_from`]). The rest is to be written. `source` must not change meanwhile.
    /// Once polled, it is carried out even when the future is dropped.
    pub fn share_from(
        &self,
        offset: u64,
        len: u64,
        source: &File,
        source_offset: u64,
    ) -> impl Future<Output = Result<u64>> + use<> {
        let (node, source) = (self.shared(), source.clone());
        rt::to_completion_of(Left(Arc::clone(&node)), async move {
            node.run_share_from(offset, len, &source, source_offset).await
        })
    }

    /// Names another backing file in the image, or none. The image's data source stays: see
    /// [`crate::graph::Graph::set_backing`]. `name` has at most 1023 bytes. Once polled, it is carried out even when
    /// the future is dropped.
    pub fn change_backing_file(
        &self,
        name: Option<&str>,
        format: Option<&str>,
    ) -> impl Future<Output = Result<()>> + use<> {
        let (node, name, format) = (self.shared(), name.map(str::to_owned), format.map(str::to_owned));
        rt::to_completion_of(Left(Arc::clone(&node)), async move {
            node.as_backed()?.rename(name.as_deref(), format.as_deref()).await
        })
    }

    /// Gives all clusters of the image's disk back: it reads as its backing file afterwards, or as zeroes. Once polled, it is
    /// carried out even when the future is dropped.
    pub fn make_empty(&self) -> impl Future<Output = Result<()>> + use<> {
        let node = self.shared();
        rt::to_completion_of(Left(Arc::clone(&node)), async move { node.as_backed()?.make_empty().await })
    }

    /// Writes to `offset` of the state of a virtual machine that the image holds. Once polled, it is carried out even when
    /// the future is dropped.
    pub fn write_vm_state(&self, offset: u64, buf: IoBuf) -> impl Future<Output = (Result<()>, IoBuf)> + use<> {
        let node = self.shared();
        rt::to_completion_of(Left(Arc::clone(&node)), async move {
            match node.driver.vm_state() {
                Some(state) => state.write(offset, buf).await,
                None => (Err(node.lacks("state of a virtual machine")), buf),
            }
        })
    }

    /// Refuses a backing node with other content than the image was made of, where the image notes that.
    pub(crate) async fn check_backing(&self, backing: Option<&Arc<Node>>) -> Result<()> {
        match (self.driver.backing_link(), backing) {
            (Some(link), Some(backing)) => link.check(backing).await,
            _ => Ok(()),
        }
    }

    fn as_backed(&self) -> Result<&dyn Backing> {
        self.driver.backing().ok_or_else(|| self.lacks("backing file"))
    }

    /// Flushes, clears the dirty bit, returns the space of the tail of the file, releases the locks. Errors are the
    /// last chance to learn that something didn't reach the disk. Children without other users are closed too. A second
    /// call does nothing. Once polled, it is carried out even when the future is dropped.
    pub fn close(&self) -> impl Future<Output = Result<()>> + use<> {
        let node = self.shared();
        rt::to_completion(async move { node.run_close().await })
    }
}
