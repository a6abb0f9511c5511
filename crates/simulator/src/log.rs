// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The events of a simulated machine, in order. Power cuts are worked out from them.

use std::sync::Arc;

/// Number of an operation, in order of submission.
pub type OpId = u64;

/// Index of a file of a [`World`](super::World).
pub type FileId = usize;

/// The change that an operation makes to a file.
#[derive(Clone)]
pub enum Change {
    /// Bytes at an offset; the file grows as needed.
    Write {
        /// First byte.
        offset: u64,
        /// The written bytes.
        bytes: Arc<[u8]>,
    },
    /// The range reads as zeroes.
    Zero {
        /// First byte.
        offset: u64,
        /// Length in bytes.
        len: u64,
        /// Space is kept (`FALLOC_FL_ZERO_RANGE`) rather than given back (`FALLOC_FL_PUNCH_HOLE`).
        keep_space: bool,
        /// The file grows where the range passes its end.
        grow: bool,
    },
    /// Space is taken (`fallocate` without flags), and the file grows to hold the range.
    Allocate {
        /// First byte.
        offset: u64,
        /// Length in bytes.
        len: u64,
    },
    /// The length is set.
    SetLen(u64),
    /// The file's name appears in its folder.
    Create,
}

impl Change {
    /// The bytes touched, as start and end; empty for changes of length or name.
    pub fn range(&self) -> (u64, u64) {
        match self {
            Change::Write { offset, bytes } => (*offset, offset + bytes.len() as u64),
            Change::Zero { offset, len, .. } | Change::Allocate { offset, len } => {
                (*offset, offset.saturating_add(*len))
            }
            Change::SetLen(_) | Change::Create => (0, 0),
        }
    }
}

impl std::fmt::Debug for Change {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Change::Write { offset, bytes } => write!(f, "write {offset:#x}+{:#x}", bytes.len()),
            Change::Zero { offset, len, keep_space: true, .. } => write!(f, "zero range {offset:#x}+{len:#x}"),
            Change::Zero { offset, len, .. } => write!(f, "punch hole {offset:#x}+{len:#x}"),
            Change::Allocate { offset, len } => write!(f, "allocate {offset:#x}+{len:#x}"),
            Change::SetLen(len) => write!(f, "set length {len:#x}"),
            Change::Create => write!(f, "create"),
        }
    }
}

/// The part of a change that reached the volatile contents when the operation ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Applied {
    /// All of it.
    All,
    /// Its first bytes (a short write).
    Prefix(u64),
    /// These of its sectors, counted from the one that holds its first byte (a failed, torn write).
    Sectors(Vec<u64>),
    /// Nothing.
    Nothing,
}

/// One entry of the log.
#[derive(Clone, Debug)]
pub enum Event {
    /// A changing operation was handed over; from now on parts of it may be on disk.
    Submitted {
        /// The operation.
        op: OpId,
        /// Its file.
        file: FileId,
        /// The change.
        change: Change,
    },
    /// It ended.
    Completed {
        /// The operation.
        op: OpId,
        /// The part that reached the volatile contents.
        applied: Applied,
    },
    /// A barrier was asked for. It covers operations completed before.
    SyncIssued {
        /// The operation.
        op: OpId,
        /// Its file.
        file: FileId,
    },
    /// A barrier ended well: the covered changes are durable.
    SyncDone {
        /// The operation.
        op: OpId,
    },
    /// A barrier failed. The operating system has dropped the covered changes: they may be on disk or not, and no later
    /// barrier will write them.
    SyncFailed {
        /// The operation.
        op: OpId,
    },
    /// All names created so far are durable.
    FolderSynced,
    /// A mark of a user above the disk, to be found again in the log; see [`World::mark`](super::World::mark).
    Mark(u64),
}
