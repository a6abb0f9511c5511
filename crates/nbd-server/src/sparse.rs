// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reads and their replies, in which long runs of zeroes are only mentioned.

use crate::Disk;
use crate::commands::answered;
use crate::outbox::ReplyPart;
use crate::session::Session;
use cowshed_nbd_proto::flags::{CommandFlags, ReplyFlags};
use cowshed_nbd_proto::{NbdErrno, ReplyStyle, Request, reply};
use cowshed_storage::{IoBuf, rt};
use cowshed_types::Result;

/// Zeroes of a reply that are worth a chunk of their own, in bytes.
const HOLE_BYTES: usize = 32 << 10;
/// Where such chunks start and end, in bytes.
const HOLE_ALIGN: usize = 4096;
/// The search examines this many bytes at once; then other clients of the thread have their turn. A multiple of
/// `HOLE_ALIGN`.
const LOOK_BYTES: usize = 1 << 20;

impl<D: Disk> Session<D> {
    /// The buffer of a read. Without memory the request is refused.
    pub(crate) fn buffer_for(&self, request: &Request) -> Option<IoBuf> {
        let buf = IoBuf::try_scratch(request.length as usize).ok();
        if buf.is_none() {
            self.refuse(request, NbdErrno::ENOMEM, "the server is out of memory");
        }
        buf
    }

    /// Queues the reply to a read. Data that take long to look at come back: [`Self::push_long`] is for them.
    pub(crate) fn answer_read(&self, request: &Request, result: Result<()>, buf: IoBuf) -> Option<IoBuf> {
        if let Err(error) = result {
            self.answer(request, Err(error), "reading failed");
            return None;
        }
        match self.terms.replies {
            ReplyStyle::Simple => {
                self.outbox.push([ReplyPart::Head(reply::simple(request.cookie, 0)), ReplyPart::Data(buf)])
            }
            _ if buf.is_empty() => self.answer(request, Ok(()), ""),
            _ if buf.len() < HOLE_BYTES || request.flags.contains(CommandFlags::DF) => {
                self.push_data(request, request.offset, buf, ReplyFlags::DONE);
            }
            _ if buf.len() <= LOOK_BYTES => self.push_sparse(request, buf),
            _ => return Some(buf),
        }
        None
    }

    fn is_extended(&self) -> bool {
        self.terms.replies == ReplyStyle::Extended
    }

    pub(crate) fn push_data(&self, request: &Request, offset: u64, data: IoBuf, flags: ReplyFlags) {
        let head = reply::offset_data(self.is_extended(), answered(request), flags, offset, data.len() as u64);
        self.outbox.push([ReplyPart::Head(head), ReplyPart::Data(data)]);
    }

    pub(crate) fn push_hole(&self, request: &Request, offset: u64, len: usize, flags: ReplyFlags) {
        // Lengths of 32 bits: a read is never longer.
        let head = reply::offset_hole(self.is_extended(), answered(request), flags, offset, len as u32);
        self.outbox.push([ReplyPart::Head(head)]);
    }

    /// The next chunk of a reply, of the first `len` bytes of the rest.
    fn push_part(&self, request: &Request, rest: &mut IoBuf, len: usize, is_hole: bool) {
        let offset = request.offset + (request.length - rest.len() as u64);
        let part = rest.split_to(len);
        let flags = if rest.is_empty() { ReplyFlags::DONE } else { ReplyFlags::default() };
        match is_hole {
            true => self.push_hole(request, offset, len, flags),
            false => self.push_data(request, offset, part, flags),
        }
    }

    /// The reply at once. Whether a block is zero shows in its first bytes most of the time. So looking costs next to
    /// nothing for data, and less than sending for zeroes.
    fn push_sparse(&self, request: &Request, mut rest: IoBuf) {
        while !rest.is_empty() {
            let zeroes = leading_zeroes(&rest);
            let is_hole = zeroes >= HOLE_BYTES || zeroes == rest.len();
            let len = if is_hole { zeroes } else { Search::default().look(&rest).unwrap_or(rest.len()) };
            self.push_part(request, &mut rest, len, is_hole);
        }
    }

    /// As [`Self::push_sparse`], in turns with other clients of the thread.
    pub(crate) async fn push_long(&self, request: &Request, mut rest: IoBuf) {
        while !rest.is_empty() {
            let mut zeroes = 0;
            for piece in rest.chunks(LOOK_BYTES) {
                let found = leading_zeroes(piece);
                zeroes += found;
                if found < piece.len() {
                    break;
                }
                rt::yield_now().await;
            }
            let is_hole = zeroes >= HOLE_BYTES || zeroes == rest.len();
            let mut len = if is_hole { zeroes } else { rest.len() };
            let mut search = Search::default();
            for piece in rest.chunks(LOOK_BYTES).take_while(|_| !is_hole) {
                if let Some(found) = search.look(piece) {
                    len = found;
                    break;
                }
                rt::yield_now().await;
            }
            self.push_part(request, &mut rest, len, is_hole);
        }
    }
}

fn is_zero(bytes: &[u8]) -> bool {
    let first = bytes.len().min(16);
    bytes[..first].iter().all(|&byte| byte == 0) && bytes[first..].iter().fold(0, |acc, byte| acc | byte) == 0
}

/// Zero bytes at the start, in whole blocks (or up to the end).
pub(crate) fn leading_zeroes(bytes: &[u8]) -> usize {
    let mut len = 0;
    for block in bytes.chunks(HOLE_ALIGN) {
        if !is_zero(block) {
            break;
        }
        len += block.len();
    }
    len
}

/// A search for the first run of zeroes that is long enough for a chunk of its own.
#[derive(Default)]
struct Search {
    /// Bytes that were looked at.
    at: usize,
    /// Zero bytes at their end, in whole blocks.
    zeroes: usize,
}

impl Search {
    /// Looks at the next bytes: bytes before the run, from where the search began.
    fn look(&mut self, bytes: &[u8]) -> Option<usize> {
        for block in bytes.chunks(HOLE_ALIGN) {
            self.zeroes = if is_zero(block) { self.zeroes + block.len() } else { 0 };
            self.at += block.len();
            if self.zeroes >= HOLE_BYTES && self.at > self.zeroes {
                return Some(self.at - self.zeroes);
            }
        }
        None
    }
}
