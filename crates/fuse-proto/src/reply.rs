// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Replies, and notifications without a request.

use crate::{MAJOR, MINOR, ROOT};

/// Bytes of the header of a reply.
pub const HEADER_BYTES: usize = 16;
/// The kernel takes only errors below this one.
const MAX_ERRNO: i32 = 511;
/// `EIO` of every Linux, which other errors become.
const EIO: i32 = 5;
/// `FUSE_NOTIFY_INVAL_INODE`: in the place of an error.
const NOTIFY_INVAL_INODE: i32 = 2;
/// `FOPEN_DIRECT_IO`: the page cache keeps nothing of the file.
const DIRECT_IO: u32 = 1 << 0;
/// `FOPEN_PARALLEL_DIRECT_WRITES`: writes need not wait for one another.
const PARALLEL_DIRECT_WRITES: u32 = 1 << 6;

/// The header of a reply with `body_bytes` behind it.
pub fn header(unique: u64, error: i32, body_bytes: usize) -> [u8; HEADER_BYTES] {
    let error = match error {
        0 => 0,
        errno if (1..=MAX_ERRNO).contains(&errno) => -errno,
        _ => -EIO,
    };
    head(unique, error, body_bytes)
}

fn head(unique: u64, error: i32, body_bytes: usize) -> [u8; HEADER_BYTES] {
    let mut bytes = [0; HEADER_BYTES];
    let len = u32::try_from(HEADER_BYTES + body_bytes).unwrap_or(u32::MAX);
    bytes[..4].copy_from_slice(&len.to_ne_bytes());
    bytes[4..8].copy_from_slice(&error.to_ne_bytes());
    bytes[8..].copy_from_slice(&unique.to_ne_bytes());
    bytes
}

/// A whole reply: an error (its number, above 0), or a body.
pub fn reply(unique: u64, result: Result<&[u8], i32>) -> Vec<u8> {
    match result {
        Ok(body) => [&header(unique, 0, body.len())[..], body].concat(),
        Err(errno) => header(unique, if errno == 0 { EIO } else { errno }, 0).to_vec(),
    }
}

/// Tells the kernel to ask for the attributes again.
pub fn attributes_changed() -> Vec<u8> {
    let mut body = Vec::with_capacity(24);
    body.extend(ROOT.to_ne_bytes());
    // A negative offset means the attributes alone.
    body.extend((-1i64).to_ne_bytes());
    body.extend(0i64.to_ne_bytes());
    [&head(0, NOTIFY_INVAL_INODE, body.len())[..], &body].concat()
}

/// The attributes of the file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are those of stat; times in seconds and nanoseconds")]
pub struct Attributes {
    pub size: u64,
    /// Allocated, in units of 512 bytes.
    pub blocks: u64,
    pub atime: (i64, u32),
    pub mtime: (i64, u32),
    pub ctime: (i64, u32),
    /// The access rights, with the type of the file.
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub block_bytes: u32,
}

impl Attributes {
    /// The body of a reply to `GETATTR` and `SETATTR`. The kernel asks again each time.
    pub fn body(&self) -> Vec<u8> {
        let mut body = Vec::with_capacity(104);
        body.extend([0; 16]);
        for number in [ROOT, self.size, self.blocks] {
            body.extend(number.to_ne_bytes());
        }
        for (seconds, _) in [self.atime, self.mtime, self.ctime] {
            body.extend(seconds.to_ne_bytes());
        }
        for (_, nanoseconds) in [self.atime, self.mtime, self.ctime] {
            body.extend(nanoseconds.to_ne_bytes());
        }
        let links = 1;
        for number in [self.mode, links, self.uid, self.gid, 0, self.block_bytes, 0] {
            body.extend(number.to_ne_bytes());
        }
        body
    }
}

/// Our answer to `INIT`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InitReply {
    /// The features that both sides have.
    pub features: u64,
    /// The most bytes that the kernel reads ahead.
    pub max_readahead: u32,
    /// The most requests in the background at a time; direct asynchronous I/O is among them.
    pub max_background: u16,
    /// The most bytes of one write.
    pub max_write: u32,
    /// The most pages of one request.
    pub max_pages: u16,
}

impl InitReply {
    /// The body.
    pub fn body(&self) -> Vec<u8> {
        let mut body = Vec::with_capacity(64);
        for number in [MAJOR, MINOR, self.max_readahead, self.features as u32] {
            body.extend(number.to_ne_bytes());
        }
        body.extend(self.max_background.to_ne_bytes());
        body.extend((self.max_background / 4 * 3).to_ne_bytes());
        body.extend(self.max_write.to_ne_bytes());
        // Times are exact to the nanosecond.
        body.extend(1u32.to_ne_bytes());
        body.extend(self.max_pages.to_ne_bytes());
        body.extend(0u16.to_ne_bytes());
        body.extend(((self.features >> 32) as u32).to_ne_bytes());
        body.resize(64, 0);
        body
    }
}

/// The body of a reply to an `INIT` of a later major version: the kernel asks again in ours.
pub fn older_version() -> Vec<u8> {
    let mut body = [MAJOR.to_ne_bytes(), MINOR.to_ne_bytes()].concat();
    body.resize(64, 0);
    body
}

/// The body of a reply to `OPEN`.
pub fn opened() -> [u8; 16] {
    let mut body = [0; 16];
    body[8..12].copy_from_slice(&(DIRECT_IO | PARALLEL_DIRECT_WRITES).to_ne_bytes());
    body
}

/// The body of a reply to `WRITE`: this many bytes were taken.
pub fn written(bytes: u32) -> [u8; 8] {
    let mut body = [0; 8];
    body[..4].copy_from_slice(&bytes.to_ne_bytes());
    body
}

/// The body of a reply to `STATFS`, in blocks of `block_bytes`.
pub fn statistics(block_bytes: u32, blocks: u64, free: u64) -> [u8; 80] {
    let mut body = [0; 80];
    for (at, number) in [(0, blocks), (8, free), (16, free), (24, 1)] {
        body[at..at + 8].copy_from_slice(&number.to_ne_bytes());
    }
    for (at, number) in [(40, block_bytes), (44, 255), (48, block_bytes)] {
        body[at..at + 4].copy_from_slice(&number.to_ne_bytes());
    }
    body
}
