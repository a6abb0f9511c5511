// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The edge of a node that passes requests on: a filter, or a window.

use super::{Link, Node, Preallocation, ZeroFlags};
use cowshed_storage::IoBuf;
use cowshed_types::{Error, Result};
use std::sync::Arc;

/// The end of a filter's edge to the node behind it.
#[derive(Clone)]
pub struct Below(Arc<Link>);

impl Below {
    /// The node behind this edge.
    pub fn new(link: Arc<Link>) -> Below {
        Below(link)
    }

    /// The node behind the filter.
    pub fn node(&self) -> Result<Arc<Node>> {
        self.0.get().ok_or_else(|| Error::internal("a filter without a child"))
    }

    /// See [`Node::size`].
    pub fn size(&self) -> u64 {
        self.0.load().as_ref().map_or(0, |child| child.size())
    }

    /// See [`Node::read`].
    pub async fn read(&self, offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        match &*self.0.load() {
            Some(child) => child.read_boxed(offset, buf).await,
            None => (Err(Error::internal("a filter without a child")), buf),
        }
    }

    /// See [`Node::write`].
    pub async fn write(&self, offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        match &*self.0.load() {
            Some(child) => child.write_boxed(offset, buf).await,
            None => (Err(Error::internal("a filter without a child")), buf),
        }
    }

    /// See [`Node::write_unchanged_boxed`].
    pub(crate) async fn write_unchanged(&self, offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        match &*self.0.load() {
            Some(child) => child.write_unchanged_boxed(offset, buf).await,
            None => (Err(Error::internal("a filter without a child")), buf),
        }
    }

    /// See [`Node::write_zeroes_unchanged_boxed`].
    pub(crate) async fn write_zeroes_unchanged(&self, offset: u64, len: u64, flags: ZeroFlags) -> Result<()> {
        self.node()?.write_zeroes_unchanged_boxed(offset, len, flags).await
    }

    pub(crate) async fn write_compressed(&self, clusters: Vec<(u64, IoBuf)>) -> Result<()> {
        self.node()?.write_compressed_boxed(clusters).await
    }

    /// See [`Node::write_zeroes`].
    pub async fn write_zeroes(&self, offset: u64, len: u64, flags: ZeroFlags) -> Result<()> {
        self.node()?.write_zeroes_boxed(offset, len, flags).await
    }

    /// See [`Node::discard`].
    pub async fn discard(&self, offset: u64, len: u64) -> Result<()> {
        self.node()?.discard_boxed(offset, len).await
    }

    /// See [`Node::flush`].
    pub async fn flush(&self) -> Result<()> {
        self.node()?.flush_boxed().await
    }

    /// See [`Node::resize`].
    pub async fn resize(&self, size: u64, preallocation: Preallocation) -> Result<()> {
        self.node()?.resize_boxed(size, preallocation).await
    }
}
