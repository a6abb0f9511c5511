// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Replies of the transmission phase: simple ones, structured chunks, and chunks with extended headers.

use crate::cursor::{Cursor, Malformed, text};
use crate::errno::NbdErrno;
use crate::flags::ReplyFlags;

/// Magic of a simple reply.
pub const SIMPLE_MAGIC: u32 = 0x6744_6698;
/// Magic of a structured chunk.
pub const STRUCTURED_MAGIC: u32 = 0x668e_33ef;
/// Magic of a chunk with an extended header.
pub const EXTENDED_MAGIC: u32 = 0x6e8a_278c;

/// Bytes of a simple reply; of the others at least this many.
pub const SIMPLE_BYTES: usize = 16;
/// Bytes of a structured chunk's header.
pub const STRUCTURED_BYTES: usize = 20;
/// Bytes of an extended chunk's header.
pub const EXTENDED_BYTES: usize = 32;

/// `NBD_REPLY_TYPE_…`.
#[allow(missing_docs)]
pub mod kind {
    pub const NONE: u16 = 0;
    pub const OFFSET_DATA: u16 = 1;
    pub const OFFSET_HOLE: u16 = 2;
    pub const BLOCK_STATUS: u16 = 5;
    pub const BLOCK_STATUS_EXT: u16 = 6;
    pub const ERROR_BIT: u16 = 1 << 15;
    pub const ERROR: u16 = ERROR_BIT + 1;
    pub const ERROR_OFFSET: u16 = ERROR_BIT + 2;
}

/// The negotiated form of replies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReplyStyle {
    /// Simple replies only.
    #[default]
    Simple,
    /// Structured chunks; a reply without data may still be a simple one.
    Structured,
    /// Extended headers on everything.
    Extended,
}

impl ReplyStyle {
    /// Bytes of the header that every reply starts with.
    pub const fn header_bytes(self) -> usize {
        match self {
            ReplyStyle::Simple => SIMPLE_BYTES,
            ReplyStyle::Structured => STRUCTURED_BYTES,
            ReplyStyle::Extended => EXTENDED_BYTES,
        }
    }
}

/// A reply's header and the first fields of its payload, as bytes.
#[derive(Clone, Copy, Debug)]
pub struct Head {
    bytes: [u8; 48],
    len: u8,
}

impl Head {
    fn new() -> Head {
        Head { bytes: [0; 48], len: 0 }
    }

    fn put<const N: usize>(&mut self, field: [u8; N]) {
        let place = self.bytes[usize::from(self.len)..].first_chunk_mut().expect("the longest header fits");
        *place = field;
        self.len += N as u8;
    }
}

impl std::ops::Deref for Head {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

/// A simple reply. Data follows it when it answers a read without an error.
pub fn simple(cookie: u64, errno: u32) -> Head {
    let mut head = Head::new();
    head.put(SIMPLE_MAGIC.to_be_bytes());
    head.put(errno.to_be_bytes());
    head.put(cookie.to_be_bytes());
    head
}

/// The request that a chunk answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answered {
    /// Its cookie.
    pub cookie: u64,
    /// Its offset, which extended headers repeat.
    pub offset: u64,
}

/// The header of a chunk with `payload_bytes` of payload. `extended`: with an extended header.
pub fn chunk(extended: bool, to: Answered, kind: u16, flags: ReplyFlags, payload_bytes: u64) -> Head {
    let mut head = Head::new();
    head.put(if extended { EXTENDED_MAGIC } else { STRUCTURED_MAGIC }.to_be_bytes());
    head.put(flags.0.to_be_bytes());
    head.put(kind.to_be_bytes());
    head.put(to.cookie.to_be_bytes());
    if extended {
        head.put(to.offset.to_be_bytes());
        head.put(payload_bytes.to_be_bytes());
    } else {
        head.put((payload_bytes as u32).to_be_bytes());
    }
    head
}

/// A content chunk of `len` bytes from `offset` of the export, which follow.
pub fn offset_data(extended: bool, to: Answered, flags: ReplyFlags, offset: u64, len: u64) -> Head {
    let mut head = chunk(extended, to, kind::OFFSET_DATA, flags, len + 8);
    head.put(offset.to_be_bytes());
    head
}

/// A content chunk for `len` zero bytes from `offset` of the export.
pub fn offset_hole(extended: bool, to: Answered, flags: ReplyFlags, offset: u64, len: u32) -> Head {
    let mut head = chunk(extended, to, kind::OFFSET_HOLE, flags, 12);
    head.put(offset.to_be_bytes());
    head.put(len.to_be_bytes());
    head
}

/// An error chunk whose text of `message_bytes` follows.
pub fn error(extended: bool, to: Answered, errno: NbdErrno, message_bytes: u16) -> Head {
    let mut head = chunk(extended, to, kind::ERROR, ReplyFlags::DONE, 6 + u64::from(message_bytes));
    head.put(errno.0.to_be_bytes());
    head.put(message_bytes.to_be_bytes());
    head
}

/// A run of one status: length in bytes, and flags that the context defines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatusRun {
    /// Length in bytes, not 0.
    pub len: u64,
    /// The context's flags for the run.
    pub flags: u32,
}

/// Appends a status chunk with its header. In the compact form runs have at most 2^32 - 1 bytes. Longer ones are cut to
/// 4 GiB less 64 KiB, and runs behind a cut one are left out.
pub fn append_status(
    extended: bool,
    to: Answered,
    flags: ReplyFlags,
    context: u32,
    runs: &[StatusRun],
    bytes: &mut Vec<u8>,
) {
    const CUT: u32 = u32::MAX - 0xffff;
    if extended {
        bytes.extend_from_slice(&chunk(true, to, kind::BLOCK_STATUS_EXT, flags, 8 + 16 * runs.len() as u64));
        bytes.extend_from_slice(&context.to_be_bytes());
        bytes.extend_from_slice(&(runs.len() as u32).to_be_bytes());
        for run in runs {
            bytes.extend_from_slice(&run.len.to_be_bytes());
            bytes.extend_from_slice(&u64::from(run.flags).to_be_bytes());
        }
        return;
    }
    let cut = runs.iter().position(|run| run.len > u64::from(u32::MAX)).map_or(runs.len(), |at| at + 1);
    let runs = &runs[..cut];
    bytes.extend_from_slice(&chunk(false, to, kind::BLOCK_STATUS, flags, 4 + 8 * runs.len() as u64));
    bytes.extend_from_slice(&context.to_be_bytes());
    for run in runs {
        bytes.extend_from_slice(&u32::try_from(run.len).unwrap_or(CUT).to_be_bytes());
        bytes.extend_from_slice(&run.flags.to_be_bytes());
    }
}

/// A reply's header as the client sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyHeader {
    /// A simple reply.
    Simple {
        /// The request's mark.
        cookie: u64,
        /// 0: success.
        errno: NbdErrno,
    },
    /// A chunk.
    Chunk {
        /// The request's mark.
        cookie: u64,
        /// The last chunk of its reply.
        done: bool,
        /// `NBD_REPLY_TYPE_…`, also one that this version doesn't know.
        kind: u16,
        /// Bytes of payload that follow.
        payload_bytes: u64,
    },
}

impl ReplyHeader {
    /// Bytes of the whole header, from its first 4.
    pub fn bytes_needed(style: ReplyStyle, magic: [u8; 4]) -> Result<usize, Malformed> {
        match (u32::from_be_bytes(magic), style) {
            (SIMPLE_MAGIC, ReplyStyle::Simple | ReplyStyle::Structured) => Ok(SIMPLE_BYTES),
            (STRUCTURED_MAGIC, ReplyStyle::Structured) => Ok(STRUCTURED_BYTES),
            (EXTENDED_MAGIC, ReplyStyle::Extended) => Ok(EXTENDED_BYTES),
            _ => Err(Malformed("a reply doesn't start with its magic number")),
        }
    }

    /// From as many bytes as [`ReplyHeader::bytes_needed`] returns.
    pub fn parse(bytes: &[u8]) -> Result<ReplyHeader, Malformed> {
        let mut cursor = Cursor::new(bytes);
        let magic = cursor.u32()?;
        if magic == SIMPLE_MAGIC {
            let errno = NbdErrno(cursor.u32()?);
            return Ok(ReplyHeader::Simple { cookie: cursor.u64()?, errno });
        }
        let flags = ReplyFlags(cursor.u16()?);
        let kind = cursor.u16()?;
        let cookie = cursor.u64()?;
        let payload_bytes = match magic {
            STRUCTURED_MAGIC => cursor.u32()?.into(),
            EXTENDED_MAGIC => {
                cursor.u64()?;
                cursor.u64()?
            }
            _ => return Err(Malformed("a reply doesn't start with its magic number")),
        };
        Ok(ReplyHeader::Chunk { cookie, done: flags.contains(ReplyFlags::DONE), kind, payload_bytes })
    }
}

/// A chunk's payload, other than data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Chunk<'a> {
    /// Nothing more.
    None,
    /// Zeroes.
    Hole {
        /// First byte on the export.
        offset: u64,
        /// Length in bytes, not 0.
        len: u32,
    },
    /// Statuses.
    Status(Status<'a>),
    /// The request failed.
    Error {
        /// Why, never 0.
        errno: NbdErrno,
        /// The text for a user, perhaps empty.
        message: &'a str,
    },
}

/// The payload of a status chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status<'a> {
    /// The context's number.
    pub context: u32,
    wide: bool,
    runs: &'a [u8],
}

impl Status<'_> {
    /// The runs, in order from the request's offset; a length of 0 is possible here, and its user must take it for an
    /// error.
    pub fn runs(&self) -> impl Iterator<Item = StatusRun> + '_ {
        let wide = self.wide;
        self.runs.chunks_exact(if wide { 16 } else { 8 }).filter_map(move |run| {
            let mut cursor = Cursor::new(run);
            Some(match wide {
                true => {
                    let len = cursor.u64().ok()?;
                    // 64 bits of flags, of which the upper half is padding: larger values are not understood.
                    StatusRun { len, flags: u32::try_from(cursor.u64().ok()?).unwrap_or(0) }
                }
                false => StatusRun { len: cursor.u32().ok()?.into(), flags: cursor.u32().ok()? },
            })
        })
    }
}

impl<'a> Chunk<'a> {
    /// From a chunk's type and whole payload. A data chunk isn't for this: its payload goes to the reader's own buffer.
    pub fn parse(kind: u16, payload: &'a [u8]) -> Result<Chunk<'a>, Malformed> {
        let mut cursor = Cursor::new(payload);
        match kind {
            kind::NONE => {
                cursor.end()?;
                Ok(Chunk::None)
            }
            kind::OFFSET_HOLE => {
                let (offset, len) = (cursor.u64()?, cursor.u32()?);
                cursor.end()?;
                if len == 0 {
                    return Err(Malformed("a hole of a reply is empty"));
                }
                Ok(Chunk::Hole { offset, len })
            }
            kind::BLOCK_STATUS | kind::BLOCK_STATUS_EXT => {
                let context = cursor.u32()?;
                let wide = kind == kind::BLOCK_STATUS_EXT;
                let count = if wide { cursor.u32()? } else { 0 };
                let runs = cursor.rest();
                let size = if wide { 16 } else { 8 };
                if runs.is_empty() || !runs.len().is_multiple_of(size) {
                    return Err(Malformed("a block status has an impossible length"));
                }
                if count != 0 && runs.len() / size != count as usize {
                    return Err(Malformed("a block status says another number of runs than it has"));
                }
                Ok(Chunk::Status(Status { context, wide, runs }))
            }
            error if error & kind::ERROR_BIT != 0 => {
                let errno = NbdErrno(cursor.u32()?);
                let len = cursor.u16()?;
                let message = cursor.take(usize::from(len))?;
                if errno.0 == 0 {
                    return Err(Malformed("an error of a reply says success"));
                }
                Ok(Chunk::Error { errno, message: text(message).unwrap_or_default() })
            }
            _ => Err(Malformed("a reply has an unknown type")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TO: Answered = Answered { cookie: 0x1122_3344_5566_7788, offset: 4096 };

    fn parse(bytes: &[u8], style: ReplyStyle) -> (ReplyHeader, &[u8]) {
        let needed = ReplyHeader::bytes_needed(style, bytes[..4].try_into().unwrap()).unwrap();
        let (head, payload) = bytes.split_at(needed);
        (ReplyHeader::parse(head).unwrap(), payload)
    }

    #[test]
    fn heads_parse_back() {
        let reply = simple(7, 22);
        assert_eq!(parse(&reply, ReplyStyle::Simple).0, ReplyHeader::Simple { cookie: 7, errno: NbdErrno::EINVAL });
        for extended in [false, true] {
            let style = if extended { ReplyStyle::Extended } else { ReplyStyle::Structured };
            let data = offset_data(extended, TO, ReplyFlags::DONE, 5000, 100);
            let (header, payload) = parse(&data, style);
            let kind = kind::OFFSET_DATA;
            assert_eq!(header, ReplyHeader::Chunk { cookie: TO.cookie, done: true, kind, payload_bytes: 108 });
            assert_eq!(payload, 5000u64.to_be_bytes());
            let hole = offset_hole(extended, TO, ReplyFlags::default(), 5000, 9);
            let (header, payload) = parse(&hole, style);
            assert!(matches!(header, ReplyHeader::Chunk { done: false, payload_bytes: 12, .. }));
            assert_eq!(Chunk::parse(kind::OFFSET_HOLE, payload), Ok(Chunk::Hole { offset: 5000, len: 9 }));
            let mut failed = error(extended, TO, NbdErrno::EIO, 3).to_vec();
            failed.extend_from_slice(b"why");
            let (_, payload) = parse(&failed, style);
            assert_eq!(Chunk::parse(kind::ERROR, payload), Ok(Chunk::Error { errno: NbdErrno::EIO, message: "why" }));
        }
    }

    #[test]
    fn compact_status_ends_before_a_too_long_run() {
        let runs =
            [StatusRun { len: 512, flags: 3 }, StatusRun { len: 5 << 30, flags: 0 }, StatusRun { len: 4096, flags: 1 }];
        let mut bytes = Vec::new();
        append_status(false, TO, ReplyFlags::DONE, 9, &runs, &mut bytes);
        let Ok(Chunk::Status(status)) = Chunk::parse(kind::BLOCK_STATUS, &bytes[STRUCTURED_BYTES..]) else { panic!() };
        let back: Vec<StatusRun> = status.runs().collect();
        assert_eq!(back, [runs[0], StatusRun { len: (1 << 32) - (1 << 16), flags: 0 }]);
        bytes.clear();
        append_status(true, TO, ReplyFlags::DONE, 9, &runs, &mut bytes);
        let Ok(Chunk::Status(status)) = Chunk::parse(kind::BLOCK_STATUS_EXT, &bytes[EXTENDED_BYTES..]) else {
            panic!()
        };
        assert_eq!((status.context, status.runs().collect::<Vec<_>>()), (9, runs.to_vec()));
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_parser_fall(kind: u16, bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            let _ = ReplyHeader::parse(&bytes);
            if let Ok(Chunk::Status(status)) = Chunk::parse(kind, &bytes) {
                prop_assert!(status.runs().count() > 0);
            }
        }
    }
}
