// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The kernel's FUSE protocol for one file, as bytes and structs; no I/O.
//!
//! `linux/fuse.h` of the kernel defines it (version 7). Numbers have the byte order of the machine, because both sides run on it.
//!
//! - `request`: the kernel's requests
//! - `reply`: our replies, and notifications

#[cfg(test)]
mod tests;

pub mod reply;
pub mod request;

pub use reply::{Attributes, InitReply, reply};
pub use request::{Changes, Operation, RequestHeader, Time};

use std::fmt;

/// Version of the protocol that we speak.
pub const MAJOR: u32 = 7;
/// Its minor version: the first one that has mappings of files with direct I/O.
pub const MINOR: u32 = 39;
/// The oldest minor version that we understand (Linux 4.5): it has `LSEEK`.
pub const MIN_MINOR: u32 = 24;
/// The number of the root, which is the file.
pub const ROOT: u64 = 1;
/// A write has its data behind this many bytes: the header and its own fields.
pub const WRITE_HEAD_BYTES: usize = 80;
/// A read of the device needs at least this many bytes besides the longest data.
pub const MIN_BUFFER_BYTES: usize = 8192;

/// Features that the kernel and we agree on (`FUSE_INIT`).
pub mod features {
    #![allow(missing_docs, reason = "the names are those of linux/fuse.h")]
    pub const ASYNC_READ: u64 = 1 << 0;
    /// The kernel leaves `O_TRUNC` to us.
    pub const ATOMIC_O_TRUNC: u64 = 1 << 3;
    pub const BIG_WRITES: u64 = 1 << 5;
    pub const ASYNC_DIO: u64 = 1 << 15;
    pub const MAX_PAGES: u64 = 1 << 22;
    pub const INIT_EXT: u64 = 1 << 30;
    pub const DIRECT_IO_ALLOW_MMAP: u64 = 1 << 36;
    /// The features that are of use for a disk.
    pub const WANTED: u64 =
        ASYNC_READ | ATOMIC_O_TRUNC | BIG_WRITES | ASYNC_DIO | MAX_PAGES | INIT_EXT | DIRECT_IO_ALLOW_MMAP;
}

/// A field that breaks the rules, and its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed {
    /// The field and the rule.
    pub what: &'static str,
    /// The value that was found.
    pub value: u64,
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({:#x})", self.what, self.value)
    }
}

impl std::error::Error for Malformed {}
