// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Owned, aligned I/O memory.

/// A piece of I/O memory that its holder owns alone: read and written by the kernel, so an operation takes it by
/// value and gives it back on completion. Cheap to split into disjoint parts and to join again.
pub struct IoBuf {
    _private: (),
}

impl IoBuf {
    /// `len` zero bytes, aligned to at least 4096.
    pub fn zeroed(len: usize) -> Self {
        let _ = len;
        todo!()
    }
    /// A copy of `bytes`, aligned to at least 4096.
    pub fn copy_from(bytes: &[u8]) -> Self {
        let _ = bytes;
        todo!()
    }
    /// Length in bytes.
    pub fn len(&self) -> usize {
        todo!()
    }
    /// True for length 0.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Cuts the first `at` bytes off and returns them; `self` keeps the rest. No copy.
    pub fn split_to(&mut self, at: usize) -> IoBuf {
        let _ = at;
        todo!()
    }
    /// Joins `next`, which must have been split from directly behind `self`. Gives `next` back otherwise.
    pub fn unsplit(&mut self, next: IoBuf) -> Result<(), IoBuf> {
        let _ = next;
        todo!()
    }
}

impl std::ops::Deref for IoBuf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        todo!()
    }
}

impl std::ops::DerefMut for IoBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        todo!()
    }
}
