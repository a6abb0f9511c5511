// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Chains of descriptors: one request's memory.

use crate::malformed::{u16_at, u32_at, u64_at};
use crate::{Malformed, Memory, Shared};

/// Bytes of a descriptor.
pub(crate) const DESCRIPTOR_BYTES: usize = 16;
/// The most descriptors of a chain, those of its indirect table included.
pub const MAX_DESCRIPTORS: usize = 1024;
/// The flag that another descriptor follows.
pub const NEXT: u16 = 1;
/// The flag that the device writes the memory; else it reads it.
pub const WRITE: u16 = 2;
/// The flag that the memory holds a table of descriptors.
pub const INDIRECT: u16 = 4;

/// A place in [`Pieces`]. A request with parts goes through a long list once.
#[derive(Clone, Copy, Debug)]
pub struct Cursor {
    index: usize,
    /// In that piece.
    start: usize,
    /// Of all pieces.
    at: u64,
}

/// Pieces of memory, one behind the other.
#[derive(Clone, Debug)]
pub struct Pieces<P> {
    list: Vec<P>,
    len: u64,
}

impl<P> Default for Pieces<P> {
    fn default() -> Self {
        Pieces { list: Vec::new(), len: 0 }
    }
}

impl<P> Pieces<P> {
    /// A list of this length keeps its memory for the next chain. Most requests need less.
    const KEPT: usize = 16;

    fn clear(&mut self) {
        self.list.clear();
        self.list.shrink_to(Self::KEPT);
        self.len = 0;
    }
}

impl<P: Shared> Pieces<P> {
    /// Bytes of all pieces.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// True for no byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The number of pieces of memory.
    pub fn count(&self) -> usize {
        self.list.len()
    }

    /// See [`Shared::is_lost`].
    pub fn is_lost(&self) -> bool {
        self.list.iter().any(P::is_lost)
    }

    /// The place `at` of all pieces, or the end.
    pub fn cursor(&self, at: u64) -> Cursor {
        let (mut index, mut left) = (0, at.min(self.len));
        while let Some(piece) = self.list.get(index).filter(|piece| piece.len() as u64 <= left) {
            left -= piece.len() as u64;
            index += 1;
        }
        // In range of `usize`: less than the length of a piece, or 0.
        Cursor { index, start: left as usize, at: at.min(self.len) }
    }

    /// Copies bytes out, each once. False, and nothing of use in `into`: the range passes the end.
    pub fn read(&self, cursor: &mut Cursor, into: &mut [u8]) -> bool {
        let mut rest = into;
        self.each(cursor, rest.len(), |piece, at, len| {
            let (head, behind) = std::mem::take(&mut rest).split_at_mut(len);
            piece.read(at, head);
            rest = behind;
        })
    }

    /// Copies bytes in. False, and nothing written: the range passes the end.
    pub fn write(&self, cursor: &mut Cursor, from: &[u8]) -> bool {
        let mut rest = from;
        self.each(cursor, from.len(), |piece, at, len| {
            let (head, behind) = rest.split_at(len);
            piece.write(at, head);
            rest = behind;
        })
    }

    /// Calls `visit` with each piece of a range, the place in it and the length there. The cursor is behind the range then. False, and
    /// no call: the range passes the end.
    pub fn each(&self, cursor: &mut Cursor, len: usize, mut visit: impl FnMut(&P, usize, usize)) -> bool {
        if cursor.at.checked_add(len as u64).is_none_or(|end| end > self.len) {
            return false;
        }
        let mut left = len;
        while left > 0
            && let Some(piece) = self.list.get(cursor.index)
        {
            let piece_len = piece.len();
            let take = left.min(piece_len - cursor.start);
            if take > 0 {
                visit(piece, cursor.start, take);
            }
            left -= take;
            cursor.at += take as u64;
            cursor.start += take;
            if cursor.start == piece_len {
                (cursor.index, cursor.start) = (cursor.index + 1, 0);
            }
        }
        left == 0
    }

    fn append<M: Memory<Piece = P>>(&mut self, memory: &M, descriptor: &Descriptor) -> Result<(), Malformed> {
        let before = self.list.len();
        if descriptor.len == 0 {
            return Ok(());
        }
        if !memory.pieces(descriptor.address, descriptor.len as usize, &mut self.list) {
            self.list.truncate(before);
            return Err(Malformed::new("a descriptor's range is no memory, at guest address", descriptor.address));
        }
        self.len += u64::from(descriptor.len);
        Ok(())
    }
}

/// The memory of one request.
#[derive(Clone, Debug)]
pub struct DescriptorChain<P> {
    /// Its number in the ring.
    pub head: u16,
    /// The bytes that the device reads.
    pub readable: Pieces<P>,
    /// The bytes that the device writes.
    pub writable: Pieces<P>,
}

impl<P> Default for DescriptorChain<P> {
    fn default() -> Self {
        DescriptorChain { head: 0, readable: Pieces::default(), writable: Pieces::default() }
    }
}

impl<P> DescriptorChain<P> {
    /// Lets the memory of the request go. A short list keeps its room for the next one.
    pub fn clear(&mut self) {
        self.readable.clear();
        self.writable.clear();
    }
}

#[derive(Clone, Copy, Debug)]
struct Descriptor {
    address: u64,
    len: u32,
    flags: u16,
    next: u16,
}

impl Descriptor {
    /// Copies the descriptor out of a table.
    fn read(table: &impl Shared, index: u16) -> Option<Descriptor> {
        let at = usize::from(index) * DESCRIPTOR_BYTES;
        if at + DESCRIPTOR_BYTES > table.len() {
            return None;
        }
        let mut bytes = [0; DESCRIPTOR_BYTES];
        table.read(at, &mut bytes);
        Some(Descriptor {
            address: u64_at(&bytes, 0),
            len: u32_at(&bytes, 8),
            flags: u16_at(&bytes, 12),
            next: u16_at(&bytes, 14),
        })
    }

    fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }
}

impl<P: Shared> DescriptorChain<P> {
    /// Walks the chain that begins at `head` of `table`. Memory written meanwhile doesn't matter: each descriptor is
    /// copied once.
    ///
    /// An error is a driver that breaks the protocol. The chain up to there comes along, so that its status can be
    /// reported where it has a place for one.
    pub fn walk<M: Memory<Piece = P>>(
        memory: &M,
        table: &P,
        head: u16,
        indirect: bool,
    ) -> (Result<(), Malformed>, DescriptorChain<P>) {
        let mut chain = DescriptorChain::default();
        let result = chain.walk_into(memory, table, head, indirect);
        (result, chain)
    }

    /// As [`DescriptorChain::walk`], in place of the chain before.
    pub fn walk_into<M: Memory<Piece = P>>(
        &mut self,
        memory: &M,
        table: &P,
        head: u16,
        indirect: bool,
    ) -> Result<(), Malformed> {
        self.clear();
        self.head = head;
        self.follow(memory, table, head, indirect)
    }

    fn follow<M: Memory<Piece = P>>(
        &mut self,
        memory: &M,
        table: &P,
        head: u16,
        indirect: bool,
    ) -> Result<(), Malformed> {
        let (mut index, mut inner) = (head, None);
        let mut wrong = Ok(());
        for _ in 0..MAX_DESCRIPTORS {
            let current = inner.as_ref().unwrap_or(table);
            let descriptor = Descriptor::read(current, index)
                .ok_or(Malformed::new("a descriptor lies outside of its table, number", index))?;
            if current.is_lost() {
                return Err(Malformed::new("memory of a table of descriptors is lost, number", index));
            }
            if descriptor.has(INDIRECT) {
                if !indirect {
                    return Err(Malformed::new("an indirect table that was not agreed on, flags", descriptor.flags));
                }
                // The flag WRITE has no meaning for a table: "the device MUST ignore the write-only flag" (virtio 1.3,
                // 2.7.5.3.2).
                if inner.is_some() || descriptor.has(NEXT) {
                    let what = "an indirect table in a table, or with a descriptor behind, flags";
                    return Err(Malformed::new(what, descriptor.flags));
                }
                inner = Some(indirect_table(memory, &descriptor)?);
                index = 0;
                continue;
            }
            if !descriptor.has(WRITE) && !self.writable.is_empty() {
                return Err(Malformed::new("memory to read behind memory to write, descriptor", index));
            }
            let part = if descriptor.has(WRITE) { &mut self.writable } else { &mut self.readable };
            // The walk goes on: the last byte is the place of the status, and the guest learns of its error there.
            wrong = wrong.and(part.append(memory, &descriptor));
            if !descriptor.has(NEXT) {
                return wrong;
            }
            index = descriptor.next;
        }
        Err(Malformed::new("a chain has too many descriptors, or a loop; its head", head))
    }
}

fn indirect_table<M: Memory>(memory: &M, descriptor: &Descriptor) -> Result<M::Piece, Malformed> {
    let len = descriptor.len as usize;
    if len == 0 || !len.is_multiple_of(DESCRIPTOR_BYTES) || len / DESCRIPTOR_BYTES > MAX_DESCRIPTORS {
        return Err(Malformed::new("length of an indirect table", descriptor.len));
    }
    let table = memory.piece(descriptor.address, len);
    table.ok_or(Malformed::new("an indirect table is no memory, at guest address", descriptor.address))
}
