// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Pieces of shared memory that one transfer fills or takes.

use super::{PAGE_BYTES, SharedMemory};
use cowshed_types::{Errno, Error, ErrorKind, Result};

/// The bytes that [`SharedBufs::zero_from`] copies.
static ZEROES: [u8; 4096] = [0; 4096];

/// Pieces of shared memory, one behind the other.
///
/// The sum of the lengths is no field. Each future of a transfer holds room for one of these, and takes longer to move
/// with eight bytes more.
#[derive(Clone, Debug, Default)]
pub struct SharedBufs {
    pieces: Pieces,
}

/// One piece is the rule, and needs no list.
#[derive(Clone, Debug)]
enum Pieces {
    One([SharedMemory; 1]),
    Many(Vec<SharedMemory>),
}

impl Default for Pieces {
    fn default() -> Self {
        Pieces::Many(Vec::new())
    }
}

impl SharedBufs {
    /// Adds a piece at the end.
    pub fn push(&mut self, piece: SharedMemory) {
        self.pieces = match std::mem::take(&mut self.pieces) {
            Pieces::One([first]) => Pieces::Many(vec![first, piece]),
            Pieces::Many(pieces) if pieces.is_empty() => Pieces::One([piece]),
            Pieces::Many(mut pieces) => {
                pieces.push(piece);
                Pieces::Many(pieces)
            }
        };
    }

    /// Bytes of all pieces.
    #[inline]
    pub fn len(&self) -> usize {
        match &self.pieces {
            Pieces::One([piece]) => piece.len(),
            Pieces::Many(pieces) => pieces.iter().map(SharedMemory::len).sum(),
        }
    }

    /// True for no byte.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The pieces in their order.
    #[inline]
    pub fn pieces(&self) -> &[SharedMemory] {
        match &self.pieces {
            Pieces::One(piece) => piece,
            Pieces::Many(pieces) => pieces,
        }
    }

    /// Fails when memory of the pieces is lost; see [`SharedMemory::is_lost`]. Asked after bytes were copied out or in, it tells whether
    /// those are the other process's.
    #[inline]
    pub fn check(&self) -> Result<()> {
        match self.pieces().iter().any(SharedMemory::is_lost) {
            false => Ok(()),
            true => Err(lost()),
        }
    }

    /// As [`SharedBufs::check`], with a look at each page.
    pub(crate) fn check_pages(&self) -> Result<()> {
        for piece in self.pieces() {
            for at in (0..piece.len()).step_by(PAGE_BYTES as usize).chain(piece.len().checked_sub(1)) {
                piece.read(at, &mut [0]);
            }
        }
        self.check()
    }

    /// Copies bytes out from the place `at` on, each once. Those behind the end stay as they are.
    pub fn read(&self, at: usize, into: &mut [u8]) {
        let mut rest = into;
        self.each(at, rest.len(), |piece, at, len| {
            let (head, behind) = std::mem::take(&mut rest).split_at_mut(len);
            piece.read(at, head);
            rest = behind;
        });
    }

    /// Copies bytes in from the place `at` on, as many as there is room for.
    pub fn write(&self, at: usize, from: &[u8]) {
        let mut rest = from;
        self.each(at, from.len(), |piece, at, len| {
            let (head, behind) = rest.split_at(len);
            piece.write(at, head);
            rest = behind;
        });
    }

    /// Writes zeroes from the place `at` to the end.
    pub fn zero_from(&self, at: usize) {
        self.each(at, self.len().saturating_sub(at), |piece, at, len| {
            for done in (0..len).step_by(ZEROES.len()) {
                piece.write(at + done, &ZEROES[..ZEROES.len().min(len - done)]);
            }
        });
    }

    /// Calls `visit` with each piece of a range, the place in it and the length there.
    fn each(&self, at: usize, len: usize, mut visit: impl FnMut(&SharedMemory, usize, usize)) {
        let (mut skip, mut left) = (at, len);
        for piece in self.pieces() {
            let start = skip.min(piece.len());
            let take = left.min(piece.len() - start);
            if take > 0 {
                visit(piece, start, take);
            }
            (skip, left) = (skip - start, left - take);
        }
    }
}

/// No fault of a disk: the memory that the request names is not there.
#[cold]
fn lost() -> Error {
    let message = "memory of the request is lost: its file has become shorter";
    Error::new(ErrorKind::InvalidArgument, message).with_errno(Errno(libc::EFAULT))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_shared_memory_are_one_range() {
        let (memory, _file) = SharedMemory::create("test", 16 << 10).unwrap();
        let mut bufs = SharedBufs::default();
        for (at, len) in [(100, 3), (200, 0), (50, 1), (8192, 5000)] {
            bufs.push(memory.part(at, len));
        }
        assert_eq!((bufs.len(), bufs.pieces().len()), (5004, 4));
        let bytes: Vec<u8> = (0..5004).map(|number| (number % 255) as u8 + 1).collect();
        bufs.write(0, &bytes);
        let mut back = vec![0; 5000];
        bufs.read(2, &mut back);
        assert_eq!(back, bytes[2..5002]);
        bufs.zero_from(3);
        let mut back = vec![9; 5004];
        bufs.read(0, &mut back);
        assert!(back[..3] == bytes[..3] && back[3..].iter().all(|&byte| byte == 0));
        bufs.write(5003, &[7, 8]);
        let mut back = [1; 3];
        bufs.read(5003, &mut back);
        assert_eq!(back, [7, 1, 1]);
    }
}
