// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The options of opening a file, and its description of itself.

use crate::lock::{Locking, Permissions};
use std::path::PathBuf;
use std::time::Duration;

/// The use of the host's page cache, as QEMU's `cache.direct` and `cache.no-flush`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheMode {
    /// Bypass the page cache (`O_DIRECT`).
    pub direct: bool,
    /// [`crate::File::sync`] does nothing: fast, and a power cut may lose everything.
    pub no_flush: bool,
}

/// The engine that carries out the operations. `COWSHED_IO_ENGINE=io_uring|threads|auto` in the environment overrides
/// it for all files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IoEngine {
    /// io_uring where the kernel allows it, else threads.
    #[default]
    Auto,
    /// io_uring, or an error from `open`.
    IoUring,
    /// A pool of threads on `preadv`/`pwritev`.
    Threads,
}

/// The options of opening a [`crate::File`].
#[derive(Clone, Debug, Default)]
pub struct OpenOptions {
    /// Open for writing too.
    pub write: bool,
    /// Create the file; an existing one is truncated to 0 bytes, after its lock is taken. Implies `write`.
    pub create: bool,
    /// The file must be in this folder or below it, symbolic links followed, at the moment it is opened; `path` must
    /// begin with it.
    pub beneath: Option<PathBuf>,
    /// Page cache use.
    pub cache: CacheMode,
    /// The engine of the I/O.
    pub engine: IoEngine,
    /// Whether to lock.
    pub locking: Locking,
    /// Locks to take at once. `None`: none, until [`crate::File::lock`]; with `create`, those of
    /// [`Permissions::CREATE`] while the file is truncated.
    pub permissions: Option<Permissions>,
}

/// A file without contents (QEMU's `null-co`): for measuring the cost of the layers above.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NullOptions {
    /// Length in bytes.
    pub len: u64,
    /// The duration of each operation.
    pub latency: Duration,
}

/// Multiples of memory addresses, offsets and lengths that O_DIRECT needs, in bytes; all 1 without it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alignment {
    /// The alignment of memory addresses.
    pub memory: usize,
    /// Of offsets and lengths in the file.
    pub offset: u64,
}

/// Hints at the place of a new file on its disk. A file system that doesn't know one goes without.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayoutHints {
    /// Write in place where the file system would copy on write (btrfs: `FS_NOCOW_FL`; its checksums go, too).
    pub no_cow: bool,
    /// Allocate in pieces of this many bytes (XFS: `extsize`).
    pub extent_bytes: Option<u32>,
}

/// The limits of a block device's queue, as the kernel reports them; sizes in bytes. `None`: no limit, or no report of
/// it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceQueue {
    /// The smallest unit that can be addressed.
    pub logical_block_bytes: Option<u64>,
    /// The most that one request moves.
    pub max_transfer_bytes: Option<u64>,
    /// The most buffers of one request.
    pub max_segments: Option<u64>,
    /// The smallest unit that can be given back.
    pub discard_granularity_bytes: Option<u64>,
}

/// The transfer sizes that the other side of a remote file likes, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransferSizes {
    /// The size that costs it least, in bytes.
    pub preferred: u64,
    /// The most that one request moves, in bytes.
    pub maximum: u64,
}

/// A run of data or a hole, from [`crate::File::next_data`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataRange {
    /// First byte of data.
    pub start: u64,
    /// First byte behind it.
    pub end: u64,
}
