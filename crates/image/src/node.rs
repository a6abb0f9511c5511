// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Nodes of the block graph: what jobs, exports and the library read and write.

use cowshed_block::Result;
use cowshed_storage::IoBuf;
use std::sync::Arc;

/// Preallocation modes of `create` and `resize`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Preallocation {
    /// Nothing.
    #[default]
    Off,
    /// Metadata only: every guest cluster mapped, its host cluster a hole.
    Metadata,
    /// Space reserved with `fallocate`.
    Falloc,
    /// Space written with zeroes.
    Full,
}

/// How [`Node::write_zeroes`] may go about it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ZeroFlags {
    /// The space may be given back (QEMU's `BDRV_REQ_MAY_UNMAP`, qemu-io's `-u`).
    pub may_unmap: bool,
    /// Fail with `Unsupported` rather than write zeroes slowly.
    pub no_fallback: bool,
}

/// One run of [`Node::block_status`].
#[derive(Clone, Debug)]
pub struct StatusExtent {
    /// First byte on the virtual disk.
    pub start: u64,
    /// Length in bytes.
    pub len: u64,
    /// May hold bytes other than zero.
    pub data: bool,
    /// Reads as zeroes.
    pub zero: bool,
    /// Allocated in the layer `depth` (0: this node): not read from a backing file.
    pub present: bool,
    /// Stored compressed.
    pub compressed: bool,
    /// Offset in `file`, when the bytes stand there as they are.
    pub offset: Option<u64>,
    /// File name of the layer that `offset` is in.
    pub file: Option<String>,
    /// Layers down from the asked node.
    pub depth: u32,
}

/// A node of the block graph: a format or a protocol driver with its children, and a size.
pub struct Node {}

impl Node {
    /// `node-name`, generated where the user gave none (`#blockNNN`).
    pub fn name(&self) -> &str {
        todo!()
    }
    /// `driver`: "qcow2", "raw", "file", "null-co", …
    pub fn driver_name(&self) -> &'static str {
        todo!()
    }
    /// The file name for people and for `info`; for nodes without one a `json:{…}` name.
    pub fn filename(&self) -> String {
        todo!()
    }
    /// Virtual size in bytes.
    pub fn size(&self) -> u64 {
        todo!()
    }
    /// True when it was opened for reading only.
    pub fn is_read_only(&self) -> bool {
        todo!()
    }
    /// The backing file's node.
    pub fn backing(&self) -> Option<&Arc<Node>> {
        todo!()
    }
    /// Fills `buf` from `offset`; reading past the end is `InvalidArgument`.
    pub async fn read(&self, offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        let _ = (offset, buf);
        todo!()
    }
    /// Writes `buf` at `offset`; it is durable after the next [`Node::flush`].
    pub async fn write(&self, offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        let _ = (offset, buf);
        todo!()
    }
    /// Makes a range read as zeroes.
    pub async fn write_zeroes(&self, offset: u64, len: u64, flags: ZeroFlags) -> Result<()> {
        let _ = (offset, len, flags);
        todo!()
    }
    /// Gives a range back: a hint. Afterwards it reads as before or as zeroes, never as older backing data.
    pub async fn discard(&self, offset: u64, len: u64) -> Result<()> {
        let _ = (offset, len);
        todo!()
    }
    /// Makes everything written so far durable, metadata included.
    pub async fn flush(&self) -> Result<()> {
        todo!()
    }
    /// Writes whole clusters compressed (already-compressible check inside: a cluster that doesn't shrink is written
    /// plain). Each element is (guest offset, one guest cluster, the last one of the disk may be shorter).
    pub async fn write_compressed(&self, clusters: Vec<(u64, IoBuf)>) -> Result<()> {
        let _ = clusters;
        todo!()
    }
    /// What this layer alone says of a range: runs in order without gaps, `present == false` where the backing file
    /// decides. At least one run, at most `max_runs`; they may end before `offset + len`.
    pub async fn block_status(&self, offset: u64, len: u64, max_runs: usize) -> Result<Vec<StatusExtent>> {
        let _ = (offset, len, max_runs);
        todo!()
    }
    /// As [`Node::block_status`], through the whole backing chain.
    pub async fn block_status_chain(&self, offset: u64, len: u64, max_runs: usize) -> Result<Vec<StatusExtent>> {
        let _ = (offset, len, max_runs);
        todo!()
    }
    /// Changes the virtual size. Shrinking discards what lies behind the new end.
    pub async fn resize(&self, size: u64, preallocation: Preallocation) -> Result<()> {
        let _ = (size, preallocation);
        todo!()
    }
    /// Flushes, clears the dirty bit, gives the tail of the file back, releases the locks. Errors are the last chance
    /// to learn that something didn't reach the disk.
    pub async fn close(&self) -> Result<()> {
        todo!()
    }
}
