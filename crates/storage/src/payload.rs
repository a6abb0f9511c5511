// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The memory that an operation owns from submission to completion, also when the future that waits for it is dropped.

use crate::IoBuf;
use crate::blocklock::BlockGuard;

/// The largest transfer in one system call, in bytes. Linux stops at 2 GiB less a page; longer ones are continued.
pub(crate) const MAX_TRANSFER: usize = 1 << 30;
/// The most buffers in one system call (`IOV_MAX`).
pub(crate) const MAX_VECTORS: usize = 1024;

/// The memory of an operation.
#[derive(Debug)]
pub(crate) enum Bufs {
    One(IoBuf),
    Many(Vec<IoBuf>),
}

impl Bufs {
    /// All bytes together.
    pub(crate) fn len(&self) -> usize {
        self.slice().iter().map(IoBuf::len).sum()
    }

    pub(crate) fn slice(&self) -> &[IoBuf] {
        match self {
            Bufs::One(buf) => std::slice::from_ref(buf),
            Bufs::Many(bufs) => bufs,
        }
    }

    pub(crate) fn slice_mut(&mut self) -> &mut [IoBuf] {
        match self {
            Bufs::One(buf) => std::slice::from_mut(buf),
            Bufs::Many(bufs) => bufs,
        }
    }

    /// The memory behind the first `skip` bytes, as far as one system call takes it and at most `most` bytes.
    pub(crate) fn vectors(&self, skip: usize, most: usize) -> Vec<libc::iovec> {
        let mut vectors = Vec::with_capacity(self.slice().len().min(MAX_VECTORS));
        self.vectors_into(skip, most, &mut vectors);
        vectors
    }

    /// As [`Bufs::vectors`], in place of the old contents of `vectors`.
    pub(crate) fn vectors_into(&self, mut skip: usize, most: usize, vectors: &mut Vec<libc::iovec>) {
        vectors.clear();
        let mut room = most;
        for buf in self.slice() {
            if buf.len() <= skip {
                skip -= buf.len();
                continue;
            }
            let len = (buf.len() - skip).min(room);
            // In bounds: `skip < buf.len()`.
            let start = buf.as_raw().wrapping_add(skip);
            vectors.push(libc::iovec { iov_base: start.cast(), iov_len: len });
            skip = 0;
            room -= len;
            if room == 0 || vectors.len() == MAX_VECTORS {
                break;
            }
        }
    }
}

/// Memory, and the lock on the blocks that a write touches.
#[derive(Debug)]
pub(crate) struct Payload {
    pub(crate) bufs: Bufs,
    /// Given back when the kernel is done, not when the caller stops waiting.
    pub(crate) guard: Option<BlockGuard>,
}

impl Payload {
    pub(crate) fn one(buf: IoBuf) -> Self {
        Payload { bufs: Bufs::One(buf), guard: None }
    }

    /// For operations without memory.
    pub(crate) fn empty(guard: Option<BlockGuard>) -> Self {
        Payload { bufs: Bufs::Many(Vec::new()), guard }
    }

    pub(crate) fn len(&self) -> usize {
        self.bufs.len()
    }

    pub(crate) fn into_one(self) -> IoBuf {
        match self.bufs {
            Bufs::One(buf) => buf,
            Bufs::Many(mut bufs) => bufs.pop().unwrap_or_default(),
        }
    }

    pub(crate) fn into_many(self) -> Vec<IoBuf> {
        match self.bufs {
            Bufs::One(buf) => vec![buf],
            Bufs::Many(bufs) => bufs,
        }
    }
}

/// The buffer, and the place in it, that the byte `skip` of all of them is in.
pub(crate) fn locate(bufs: &[IoBuf], mut skip: usize) -> (usize, usize) {
    for (index, buf) in bufs.iter().enumerate() {
        if skip < buf.len() {
            return (index, skip);
        }
        skip -= buf.len();
    }
    (bufs.len(), 0)
}
