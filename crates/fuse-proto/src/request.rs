// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Requests of the kernel.

use crate::{Malformed, WRITE_HEAD_BYTES};

/// Bytes of the header.
pub const HEADER_BYTES: usize = 40;
/// The longest request without data that is of interest, in bytes. Longer ones are cut.
pub const MAX_FIELDS_BYTES: usize = 128;

/// Bits of `fuse_setattr_in.valid`.
mod valid {
    pub const MODE: u32 = 1 << 0;
    pub const UID: u32 = 1 << 1;
    pub const GID: u32 = 1 << 2;
    pub const SIZE: u32 = 1 << 3;
    pub const ATIME: u32 = 1 << 4;
    pub const MTIME: u32 = 1 << 5;
    pub const FH: u32 = 1 << 6;
    pub const ATIME_NOW: u32 = 1 << 7;
    pub const MTIME_NOW: u32 = 1 << 8;
}

/// The header of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestHeader {
    /// Length of the whole request in bytes.
    pub len: u32,
    /// Number of the operation, see [`opcode`].
    pub opcode: u32,
    /// The request's number, which its reply repeats.
    pub unique: u64,
    /// The number of the file.
    pub node: u64,
    /// The thread that waits for the reply, by its number; zero where none does, or one of another namespace.
    pub thread: u32,
}

/// A time of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Time {
    /// When the request is carried out.
    Now,
    /// Seconds and nanoseconds since 1970.
    At(i64, u32),
}

/// The attributes that `SETATTR` changes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are those of stat")]
pub struct Changes {
    pub mode: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub size: Option<u64>,
    /// The change goes through an open file.
    pub through_descriptor: bool,
    pub atime: Option<Time>,
    pub mtime: Option<Time>,
}

/// The kind of request from the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// The first one: versions and features.
    Init {
        /// The kernel's version.
        major: u32,
        /// The kernel's minor version.
        minor: u32,
        /// The kernel's features.
        features: u64,
        /// The most bytes that it reads ahead.
        max_readahead: u32,
    },
    /// A request for attributes.
    GetAttributes,
    /// Attributes change.
    SetAttributes(Changes),
    /// The file is opened.
    Open {
        /// As of open(2).
        flags: u32,
    },
    /// A request for bytes.
    Read {
        /// First byte in the file.
        offset: u64,
        /// Length in bytes.
        len: u32,
    },
    /// Bytes come.
    Write {
        /// First byte in the file.
        offset: u64,
        /// Length in bytes.
        len: u32,
        /// Flags of the open file.
        flags: u32,
    },
    /// Figures of the file system.
    Statistics,
    /// A descriptor is closed.
    Flush,
    /// The last descriptor of an open file is closed.
    Release,
    /// Earlier writes become durable.
    Sync,
    /// Space, a hole or zeroes.
    Allocate {
        /// First byte in the file.
        offset: u64,
        /// Length in bytes.
        len: u64,
        /// As of fallocate(2).
        mode: u32,
    },
    /// The next data or the next hole.
    Seek {
        /// The byte at which the search begins.
        offset: u64,
        /// As of lseek(2).
        whence: u32,
    },
    /// A name below the file, which has none.
    Lookup,
    /// A signal came for the thread that waits for an earlier request, which may be answered with `EINTR`. No reply.
    Interrupt {
        /// The number of that request.
        unique: u64,
    },
    /// Something that gets no reply: a number is forgotten.
    Unanswered,
    /// The file system goes.
    Destroy,
    /// Something that we don't do.
    Other,
}

/// Numbers of operations.
pub mod opcode {
    #![allow(missing_docs, reason = "the names are those of linux/fuse.h")]
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const FLUSH: u32 = 25;
    pub const INIT: u32 = 26;
    pub const INTERRUPT: u32 = 36;
    pub const DESTROY: u32 = 38;
    pub const BATCH_FORGET: u32 = 42;
    pub const FALLOCATE: u32 = 43;
    pub const LSEEK: u32 = 46;
    pub const SYNCFS: u32 = 50;
}

/// Numbers of a request; zero where the bytes end before.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn u32(&self, at: usize) -> u32 {
        self.0.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |bytes| u32::from_ne_bytes(*bytes))
    }

    fn u64(&self, at: usize) -> u64 {
        self.0.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |bytes| u64::from_ne_bytes(*bytes))
    }
}

impl RequestHeader {
    /// Parses the header of a request that has `received` bytes.
    ///
    /// # Errors
    /// A header that is not all there, or has another length than the request.
    pub fn parse(bytes: &[u8], received: usize) -> Result<RequestHeader, Malformed> {
        if bytes.len() < HEADER_BYTES || received < HEADER_BYTES {
            return Err(Malformed { what: "length of a request", value: received as u64 });
        }
        let fields = Fields(bytes);
        let header = RequestHeader {
            len: fields.u32(0),
            opcode: fields.u32(4),
            unique: fields.u64(8),
            node: fields.u64(16),
            thread: fields.u32(32),
        };
        match header.len as usize == received {
            true => Ok(header),
            false => Err(Malformed { what: "length in the header of a request", value: header.len.into() }),
        }
    }
}

impl Operation {
    /// Parses the bytes behind the header.
    ///
    /// # Errors
    /// Missing fields, or a write with more or less data than its length.
    pub fn parse(header: &RequestHeader, body: &[u8]) -> Result<Operation, Malformed> {
        let fields = Fields(body);
        let least = match header.opcode {
            opcode::INIT => 16,
            opcode::SETATTR => 88,
            opcode::READ | opcode::WRITE => 40,
            opcode::FALLOCATE => 32,
            opcode::LSEEK => 24,
            opcode::INTERRUPT => 8,
            _ => 0,
        };
        if body.len() < least {
            return Err(Malformed { what: "length of a request's fields", value: body.len() as u64 });
        }
        Ok(match header.opcode {
            opcode::INIT => init(&fields, body.len()),
            opcode::GETATTR => Operation::GetAttributes,
            opcode::SETATTR => Operation::SetAttributes(changes(&fields)),
            opcode::OPEN => Operation::Open { flags: fields.u32(0) },
            opcode::READ => Operation::Read { offset: fields.u64(8), len: fields.u32(16) },
            opcode::WRITE => {
                let len = fields.u32(16);
                if (header.len as usize).checked_sub(WRITE_HEAD_BYTES) != Some(len as usize) {
                    return Err(Malformed { what: "length of a write's data", value: len.into() });
                }
                Operation::Write { offset: fields.u64(8), len, flags: fields.u32(32) }
            }
            opcode::STATFS => Operation::Statistics,
            opcode::FLUSH => Operation::Flush,
            opcode::RELEASE => Operation::Release,
            opcode::FSYNC | opcode::SYNCFS => Operation::Sync,
            opcode::FALLOCATE => {
                Operation::Allocate { offset: fields.u64(8), len: fields.u64(16), mode: fields.u32(24) }
            }
            opcode::LSEEK => Operation::Seek { offset: fields.u64(8), whence: fields.u32(16) },
            opcode::LOOKUP => Operation::Lookup,
            opcode::INTERRUPT => Operation::Interrupt { unique: fields.u64(0) },
            opcode::FORGET | opcode::BATCH_FORGET => Operation::Unanswered,
            opcode::DESTROY => Operation::Destroy,
            _ => Operation::Other,
        })
    }
}

fn init(fields: &Fields<'_>, len: usize) -> Operation {
    let low = u64::from(fields.u32(12));
    // Older kernels send no second word.
    let high = if low & crate::features::INIT_EXT != 0 && len >= 20 { u64::from(fields.u32(16)) << 32 } else { 0 };
    Operation::Init { major: fields.u32(0), minor: fields.u32(4), features: low | high, max_readahead: fields.u32(8) }
}

fn changes(fields: &Fields<'_>) -> Changes {
    let bits = fields.u32(0);
    let time = |set: u32, now: u32, seconds: usize, nanoseconds: usize| match (bits & set != 0, bits & now != 0) {
        (false, _) => None,
        (true, true) => Some(Time::Now),
        (true, false) => Some(Time::At(fields.u64(seconds).cast_signed(), fields.u32(nanoseconds).min(999_999_999))),
    };
    let number = |bit: u32, at: usize| (bits & bit != 0).then(|| fields.u32(at));
    Changes {
        size: (bits & valid::SIZE != 0).then(|| fields.u64(16)),
        through_descriptor: bits & valid::FH != 0,
        atime: time(valid::ATIME, valid::ATIME_NOW, 32, 56),
        mtime: time(valid::MTIME, valid::MTIME_NOW, 40, 60),
        mode: number(valid::MODE, 68),
        uid: number(valid::UID, 76),
        gid: number(valid::GID, 80),
    }
}
