// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Requests that change the disk of a mapped format.

use cowshed_graph::node::{Link, Transfer, Work, ZeroFlags, done};
use cowshed_storage::IoBuf;
use cowshed_types::Error;

/// A format that is written to. Ranges are inside of the disk.
pub(crate) trait MappedWriter {
    /// Writes a buffer; the data of `backing` around it stays as it was.
    fn write<'a>(&'a self, offset: u64, buf: IoBuf, backing: &'a Link) -> Transfer<'a>;
    /// Writes whole clusters compressed, where the format [`MappedWriter::compresses`].
    fn write_compressed<'a>(&'a self, _clusters: Vec<(u64, IoBuf)>, _backing: &'a Link) -> Work<'a> {
        done(Err(Error::unsupported("Compression not supported for this file format")))
    }
    /// True when it can write compressed clusters.
    fn compresses(&self) -> bool {
        false
    }
    /// Makes a range read as zeroes.
    fn write_zeroes<'a>(&'a self, offset: u64, len: u64, flags: ZeroFlags, backing: &'a Link) -> Work<'a>;
    /// Gives the space of a range back: it reads as before or as zeroes.
    fn discard(&self, offset: u64, len: u64) -> Work<'_>;
    /// True for a disk that can be made longer.
    fn is_resizable(&self) -> bool {
        false
    }
    /// Makes the disk longer; new bytes read as zeroes.
    fn resize<'a>(&'a self, _size: u64, _backing: &'a Link) -> Work<'a> {
        done(Err(Error::unsupported("Image format driver does not support resize")))
    }
    /// See [`Node::moving_blocks`](cowshed_graph::node::Node::moving_blocks).
    fn let_blocks_move(&self, _allowed: bool) {}
    /// See [`cowshed_graph::node::Node::holds_changes`].
    fn holds_changes(&self) -> bool;
    /// Makes everything written so far durable.
    fn flush(&self) -> Work<'_>;
    /// The same, and leaves the files as a close does. No request runs.
    fn complete(&self) -> Work<'_>;
}
