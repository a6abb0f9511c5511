// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A file that holds an image.

use crate::IoBuf;
use cowshed_block::Result;

/// How the host's page cache is used, as QEMU's `cache.direct` and `cache.no-flush`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheMode {
    /// Bypass the page cache (`O_DIRECT`).
    pub direct: bool,
    /// [`File::sync`] does nothing: fast, and a power cut may lose everything.
    pub no_flush: bool,
}

/// Who carries out the operations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Engine {
    /// io_uring where the kernel allows it, else threads.
    #[default]
    Auto,
    /// io_uring or an error.
    IoUring,
    /// A pool of threads on `preadv2`/`pwritev2`.
    Threads,
}

/// How to open a [`File`].
#[derive(Clone, Debug, Default)]
pub struct OpenOptions {
    /// Open for writing too.
    pub write: bool,
    /// Create the file; an existing one is truncated to 0 bytes (after its lock is taken).
    pub create: bool,
    /// Page cache use.
    pub cache: CacheMode,
    /// Who does the I/O.
    pub engine: Engine,
}

/// What O_DIRECT asks of memory, offsets and lengths, in bytes; all 1 without it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alignment {
    /// Of memory addresses.
    pub memory: usize,
    /// Of offsets and lengths in the file.
    pub offset: u64,
}

/// A run of data or a hole, from [`File::next_data`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataRange {
    /// First byte of data.
    pub start: u64,
    /// First byte behind it.
    pub end: u64,
}

/// A file, device or simulated file. Cheap to clone; any thread that runs [`crate::rt::block_on`] may use it.
#[derive(Clone, Debug)]
pub struct File {}

impl File {
    /// Opens a regular file or block device. A folder, socket or pipe is refused by name.
    pub fn open(path: &std::path::Path, options: &OpenOptions) -> Result<File> {
        let _ = (path, options);
        todo!()
    }
    /// The name for messages.
    pub fn name(&self) -> &str {
        todo!()
    }
    /// True when it was opened for writing.
    pub fn is_writable(&self) -> bool {
        todo!()
    }
    /// The alignment that the *medium* wants; `File` itself accepts any offset and length and bounces where needed.
    pub fn alignment(&self) -> Alignment {
        todo!()
    }
    /// Current length in bytes (cached; kept up to date by our own writes and `set_len`).
    pub fn len(&self) -> u64 {
        todo!()
    }
    /// True for length 0.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Fills `buf` from `offset`. What lies past the end of the file reads as zeroes.
    pub async fn read_at(&self, buf: IoBuf, offset: u64) -> (Result<()>, IoBuf) {
        let _ = (buf, offset);
        todo!()
    }
    /// Writes all of `buf` at `offset`, growing the file as needed.
    pub async fn write_at(&self, buf: IoBuf, offset: u64) -> (Result<()>, IoBuf) {
        let _ = (buf, offset);
        todo!()
    }
    /// Writes the buffers one after the other from `offset` on, in one operation where the alignment allows.
    pub async fn write_vectored_at(&self, bufs: Vec<IoBuf>, offset: u64) -> (Result<()>, Vec<IoBuf>) {
        let _ = (bufs, offset);
        todo!()
    }
    /// A barrier: everything written before and completed is durable when it returns (`fdatasync`; with growth also
    /// the length). The first failure poisons the file: every later `sync` and every write that grows the file fails
    /// with that error until the file is closed and opened again.
    pub async fn sync(&self) -> Result<()> {
        todo!()
    }
    /// The error of the first failed [`File::sync`], if there was one.
    pub fn poison(&self) -> Option<cowshed_block::Error> {
        todo!()
    }
    /// Gives the space of a range back; it reads as zeroes then. `Unsupported` where the file system can't.
    pub async fn punch_hole(&self, offset: u64, len: u64) -> Result<()> {
        let _ = (offset, len);
        todo!()
    }
    /// Makes a range read as zeroes and keeps its space allocated. `Unsupported` where the file system can't.
    pub async fn zero_range(&self, offset: u64, len: u64) -> Result<()> {
        let _ = (offset, len);
        todo!()
    }
    /// Allocates space for a range (grows the file). `Unsupported` where the file system can't.
    pub async fn allocate(&self, offset: u64, len: u64) -> Result<()> {
        let _ = (offset, len);
        todo!()
    }
    /// Sets the length. What is added reads as zeroes. On a block device only shrinking "succeeds" (does nothing).
    pub async fn set_len(&self, len: u64) -> Result<()> {
        let _ = len;
        todo!()
    }
    /// The first run of data at or behind `offset` (`SEEK_DATA`/`SEEK_HOLE`), `None` when only holes follow. Where
    /// the file system can't tell, all is data.
    pub async fn next_data(&self, offset: u64) -> Result<Option<DataRange>> {
        let _ = offset;
        todo!()
    }
    /// Copies inside the kernel (`copy_file_range`, which reflinks where it can). Returns the bytes copied, 0 or
    /// more; `Unsupported` where the kernel can't, before anything was copied.
    pub async fn copy_from(&self, source: &File, source_offset: u64, offset: u64, len: u64) -> Result<u64> {
        let _ = (source, source_offset, offset, len);
        todo!()
    }
    /// Space that the file takes on disk, in bytes (`st_blocks * 512`).
    pub fn allocated_bytes(&self) -> Result<u64> {
        todo!()
    }
}
