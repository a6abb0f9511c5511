// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The reasons for which a plan can't be made now, with the caller's next step.

use cowshed_types::{Error, HostOffset};
use std::ops::Range;

/// A table or a part of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TableId {
    /// Slice of an L2 table, numbered over the whole virtual disk.
    L2Slice(u64),
    /// The refcount table.
    RefcountTable,
    /// The refcount block with this index in the refcount table.
    RefcountBlock(u64),
}

/// A table that must be read from the image file before the plan can be made.
///
/// The holder reads `len` bytes at `host` and calls [`crate::Engine::loaded`], or [`crate::Engine::load_failed`]; until
/// then all others that need the table wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// The kind of table, and its index.
    pub table: TableId,
    /// Its place in the image file.
    pub host: HostOffset,
    /// Its length in bytes.
    pub len: usize,
}

/// Space in the image file that must be reserved before the plan can be made.
///
/// The holder reserves it and calls [`crate::Engine::reserved`], or [`crate::Engine::reserve_failed`]; until then all
/// others that need it wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reserve {
    /// Its place in the image file.
    pub host: HostOffset,
    /// Its length in bytes.
    pub len: u64,
    /// Nothing of the image is there, and no other request gets the place meanwhile: where the file can't reserve space, zeroes may
    /// be written. Else the bytes that are there must stay.
    pub is_new: bool,
    /// The L2 table that the place is for.
    pub(crate) table: Option<usize>,
}

/// The reasons for which a plan can't be made now.
#[derive(Debug)]
pub enum Stall {
    /// Read this first.
    Load(Load),
    /// Reserve this first.
    Reserve(Reserve),
    /// Another request is at it: plan again after any change of the engine.
    Wait,
    /// Plan again at once: the mapping has changed under the caller.
    Retry,
    /// Run a write-back cycle first, then plan again: too much of the metadata is dirty; see [`crate::Engine::wants_writeback`].
    WriteBack,
    /// The refcount table must grow first: [`crate::Engine::begin_refcount_growth`].
    GrowRefcounts,
    /// The container of the image can't grow and has no room for it. It may be longer than it was
    /// ([`crate::Engine::container_grew`]), and freed clusters may be used again after a flush.
    Full,
    /// It would write onto metadata, which is in this range of host offsets: the image is corrupt and must be marked so.
    Corrupt(Error, Range<u64>),
    /// It can't be done.
    Error(Error),
}

impl From<Error> for Stall {
    fn from(error: Error) -> Self {
        Stall::Error(error)
    }
}

/// A plan, or why there is none yet.
pub type Planned<T> = Result<T, Stall>;
