// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Memory that a guest, or another process, changes meanwhile.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// A contiguous piece of such memory. Its bytes are only ever copied: no reference to them exists.
///
/// Implementations may panic where an access passes the end. This crate never makes one.
pub trait Shared {
    /// Bytes.
    fn len(&self) -> usize;

    /// True for no byte.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies bytes out, each once.
    fn read(&self, at: usize, into: &mut [u8]);

    /// Copies bytes in.
    fn write(&self, at: usize, from: &[u8]);

    /// The little-endian number at `at`, in one access where the address is even. Bytes written before the number was
    /// are seen afterwards.
    fn load(&self, at: usize) -> u16;

    /// Stores a little-endian number, in one access where the address is even. Earlier writes are seen before it.
    fn store(&self, at: usize, value: u16);

    /// The part of `len` bytes from `at` on.
    fn part(&self, at: usize, len: usize) -> Self;

    /// True once memory of its region is gone. Bytes copied out before may then be none that the guest wrote.
    fn is_lost(&self) -> bool {
        false
    }
}

/// The memory of a guest, by the guest's addresses.
pub trait Memory {
    /// A piece of it.
    type Piece: Shared;

    /// A range that lies in one region. `None`: it doesn't.
    fn piece(&self, address: u64, len: usize) -> Option<Self::Piece>;

    /// The pieces of a range, appended in order: several where regions meet in it. False: a part of it is no memory,
    /// and the appended pieces are of no use.
    fn pieces(&self, address: u64, len: usize, pieces: &mut Vec<Self::Piece>) -> bool;
}

/// Memory of this process in the place of a guest's: for tests and fuzzing.
#[derive(Clone, Debug)]
pub struct Block {
    bytes: Rc<RefCell<Vec<u8>>>,
    is_lost: Rc<Cell<bool>>,
    start: usize,
    len: usize,
}

impl Block {
    /// Memory that holds `bytes`.
    pub fn new(bytes: Vec<u8>) -> Block {
        let len = bytes.len();
        Block { bytes: Rc::new(RefCell::new(bytes)), is_lost: Rc::default(), start: 0, len }
    }

    /// `len` zero bytes.
    pub fn zeroed(len: usize) -> Block {
        Self::new(vec![0; len])
    }

    /// Makes the memory one that is lost; see [`Shared::is_lost`].
    pub fn lose(&self) {
        self.is_lost.set(true);
    }
}

impl Shared for Block {
    fn len(&self) -> usize {
        self.len
    }

    fn read(&self, at: usize, into: &mut [u8]) {
        assert!(at + into.len() <= self.len, "read past the end of a piece");
        let at = self.start + at;
        into.copy_from_slice(&self.bytes.borrow()[at..at + into.len()]);
    }

    fn write(&self, at: usize, from: &[u8]) {
        assert!(at + from.len() <= self.len, "write past the end of a piece");
        let at = self.start + at;
        self.bytes.borrow_mut()[at..at + from.len()].copy_from_slice(from);
    }

    fn load(&self, at: usize) -> u16 {
        let mut bytes = [0; 2];
        self.read(at, &mut bytes);
        u16::from_le_bytes(bytes)
    }

    fn store(&self, at: usize, value: u16) {
        self.write(at, &value.to_le_bytes());
    }

    fn part(&self, at: usize, len: usize) -> Block {
        assert!(at + len <= self.len, "a part past the end of a piece");
        Block { bytes: Rc::clone(&self.bytes), is_lost: Rc::clone(&self.is_lost), start: self.start + at, len }
    }

    fn is_lost(&self) -> bool {
        self.is_lost.get()
    }
}

/// One region that begins at the guest's address 0.
impl Memory for Block {
    type Piece = Block;

    fn piece(&self, address: u64, len: usize) -> Option<Block> {
        let start = usize::try_from(address).ok()?;
        let end = start.checked_add(len)?;
        (end <= self.len).then(|| self.part(start, len))
    }

    fn pieces(&self, address: u64, len: usize, pieces: &mut Vec<Block>) -> bool {
        let piece = self.piece(address, len);
        let is_memory = piece.is_some();
        pieces.extend(piece);
        is_memory
    }
}
