// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Guest memory by the guest's addresses.

use cowshed_storage::SharedMemory;
use cowshed_vhost_user_proto::{Memory, Regions, Shared};

/// A piece of guest memory.
#[derive(Clone, Debug)]
pub(crate) struct MemoryPiece(pub SharedMemory);

impl Shared for MemoryPiece {
    #[inline]
    fn len(&self) -> usize {
        self.0.len()
    }

    #[inline]
    fn read(&self, at: usize, into: &mut [u8]) {
        self.0.read(at, into);
    }

    #[inline]
    fn write(&self, at: usize, from: &[u8]) {
        self.0.write(at, from);
    }

    #[inline]
    fn load(&self, at: usize) -> u16 {
        self.0.load(at)
    }

    #[inline]
    fn store(&self, at: usize, value: u16) {
        self.0.store(at, value);
    }

    fn part(&self, at: usize, len: usize) -> MemoryPiece {
        MemoryPiece(self.0.part(at, len))
    }

    #[inline]
    fn is_lost(&self) -> bool {
        self.0.is_lost()
    }
}

/// The memory of a guest at some time.
#[derive(Clone, Debug, Default)]
pub(crate) struct GuestMemory {
    pub regions: Regions<SharedMemory>,
}

impl GuestMemory {
    /// As much of a range as lies in the region where it begins.
    fn head(&self, address: u64, len: usize) -> Option<MemoryPiece> {
        let (memory, offset, left) = self.regions.find(address)?;
        let take = len.min(usize::try_from(left).unwrap_or(usize::MAX));
        Some(MemoryPiece(memory.part(usize::try_from(offset).ok()?, take)))
    }
}

impl Memory for GuestMemory {
    type Piece = MemoryPiece;

    fn piece(&self, address: u64, len: usize) -> Option<MemoryPiece> {
        self.head(address, len).filter(|piece| piece.len() == len)
    }

    fn pieces(&self, mut address: u64, mut len: usize, pieces: &mut Vec<MemoryPiece>) -> bool {
        while len > 0 {
            let Some(piece) = self.head(address, len) else { return false };
            len -= piece.len();
            let next = address.checked_add(piece.len() as u64);
            pieces.push(piece);
            match next {
                Some(next) => address = next,
                None => return len == 0,
            }
        }
        true
    }
}
