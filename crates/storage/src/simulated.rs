// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A file of a simulated machine, as a [`crate::File`] sees it. The machine itself is the crate `cowshed-simulator`, which no
//! product depends on.

use crate::{Alignment, DataRange, IoBuf};
use cowshed_types::Errno;
use futures_util::future::LocalBoxFuture;
use std::any::Any;
use std::fmt::Debug;

/// The result of a simulated system call, once it has ended.
pub type Simulated<'a, T> = LocalBoxFuture<'a, Result<T, Errno>>;

/// An open file of a simulated machine, with the manners of system calls: counts may be short, and offsets must be aligned.
/// Offsets and lengths are bytes.
pub trait SimulatedFile: Debug + Send + Sync + 'static {
    /// Its name.
    fn name(&self) -> &str;
    /// Opened for writing.
    fn is_writable(&self) -> bool;
    /// As after opening it anew for writing.
    fn make_writable(&self);
    /// The multiple that offsets, lengths and memory need, in bytes; 1 without direct I/O.
    fn alignment(&self) -> Alignment;
    /// Opened with direct I/O.
    fn is_direct(&self) -> bool;
    /// With direct I/O from now on, or without; returns the alignment that it needs then.
    fn set_direct(&self, direct: bool) -> Alignment;
    /// Length, now.
    fn file_len(&self) -> u64;
    /// Its length can't change.
    fn is_fixed(&self) -> bool;
    /// Space taken.
    fn allocated_bytes(&self) -> u64;
    /// Reads into `buf`; returns the count, which is short at the end of the file.
    fn read(&self, buf: IoBuf, offset: u64) -> LocalBoxFuture<'_, (Result<usize, Errno>, IoBuf)>;
    /// Writes `bufs` one after the other; returns the count, which may be short.
    fn write(&self, bufs: Vec<IoBuf>, offset: u64) -> LocalBoxFuture<'_, (Result<usize, Errno>, Vec<IoBuf>)>;
    /// A barrier over operations completed before; each failure is reported once.
    fn sync(&self) -> Simulated<'_, ()>;
    /// Gives the space of a range back.
    fn punch_hole(&self, offset: u64, len: u64) -> Simulated<'_, ()>;
    /// Makes a range read as zeroes and keeps its space.
    fn zero_range(&self, offset: u64, len: u64) -> Simulated<'_, ()>;
    /// Takes space for a range; grows the file to hold it.
    fn allocate(&self, offset: u64, len: u64) -> Simulated<'_, ()>;
    /// Sets the length.
    fn set_len(&self, len: u64) -> Simulated<'_, ()>;
    /// The first run of data at or behind `offset`.
    fn next_data(&self, offset: u64) -> Simulated<'_, Option<DataRange>>;
    /// The file system copies ranges itself.
    fn can_copy_range(&self) -> bool;
    /// Copies from `source`, a file of the same machine; returns the count, which is short at its end.
    fn copy_range<'a>(
        &'a self,
        source: &'a dyn SimulatedFile,
        source_offset: u64,
        offset: u64,
        len: u64,
    ) -> Simulated<'a, u64>;
    /// Itself, for the machine to know its own.
    fn as_any(&self) -> &dyn Any;
}
