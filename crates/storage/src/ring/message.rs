// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The message header by which the kernel sends several buffers at once.

use crate::payload::{Bufs, MAX_TRANSFER};

/// A message header and the vectors that it points to. Kept by the ring for the next message, so that sending allocates
/// nothing once the vectors are long enough.
pub(crate) struct SocketMessage {
    header: libc::msghdr,
    vectors: Vec<libc::iovec>,
}

impl Default for SocketMessage {
    fn default() -> Self {
        // SAFETY: plain numbers and pointers, for which zero is a value: no name, no vectors, no control data.
        SocketMessage { header: unsafe { std::mem::zeroed() }, vectors: Vec::new() }
    }
}

impl SocketMessage {
    /// Makes it the message of these buffers, without their first `skip` bytes. It must not move, nor must the buffers
    /// go, while the kernel has it.
    pub(crate) fn point_to(&mut self, bufs: &Bufs, skip: usize) {
        bufs.vectors_into(skip, MAX_TRANSFER, &mut self.vectors);
        self.header.msg_iov = self.vectors.as_mut_ptr();
        self.header.msg_iovlen = self.vectors.len() as _;
    }

    /// The header that the kernel gets.
    pub(crate) fn header(&self) -> *const libc::msghdr {
        &raw const self.header
    }
}
