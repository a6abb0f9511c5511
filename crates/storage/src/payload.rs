// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The memory that an operation owns from submission to completion, also when the future that waits for it is dropped.

use crate::blocklock::BlockGuard;
use crate::{IoBuf, SharedBufs};

/// The largest transfer in one system call, in bytes. Linux stops at 2 GiB less a page; longer ones are continued.
pub(crate) const MAX_TRANSFER: usize = 1 << 30;
/// The most buffers in one system call (`IOV_MAX`).
pub(crate) const MAX_VECTORS: usize = 1024;

/// The memory of an operation.
#[derive(Debug)]
pub(crate) enum Bufs {
    One(IoBuf),
    Many(Vec<IoBuf>),
    /// For files of the host alone: the kernel fills or takes it, and no reference to its bytes may exist.
    Shared(SharedBufs),
}

// A future of a transfer holds one and is moved as a whole: eight bytes more cost a tenth of a cached read.
const _: () = assert!(size_of::<Bufs>() == 32, "the memory of a transfer takes more room");

impl Bufs {
    /// All bytes together.
    pub(crate) fn len(&self) -> usize {
        match self {
            Bufs::One(buf) => buf.len(),
            Bufs::Many(bufs) => bufs.iter().map(IoBuf::len).sum(),
            Bufs::Shared(bufs) => bufs.len(),
        }
    }

    /// The buffers of this process alone.
    ///
    /// # Panics
    /// For shared memory, which is not handed to a medium that looks at bytes.
    pub(crate) fn slice(&self) -> &[IoBuf] {
        match self {
            Bufs::One(buf) => std::slice::from_ref(buf),
            Bufs::Many(bufs) => bufs,
            Bufs::Shared(_) => unreachable!("shared memory is for files of the host"),
        }
    }

    /// As [`Bufs::slice`].
    pub(crate) fn slice_mut(&mut self) -> &mut [IoBuf] {
        match self {
            Bufs::One(buf) => std::slice::from_mut(buf),
            Bufs::Many(bufs) => bufs,
            Bufs::Shared(_) => unreachable!("shared memory is for files of the host"),
        }
    }

    /// True for shared memory that is lost: what was copied out of it may be none of the other process's bytes.
    pub(crate) fn is_lost(&self) -> bool {
        matches!(self, Bufs::Shared(bufs) if bufs.check().is_err())
    }

    /// The start and the length of each piece of memory.
    pub(crate) fn raw(&self) -> impl Iterator<Item = (*mut u8, usize)> + '_ {
        let (own, shared) = match self {
            Bufs::Shared(bufs) => (&[][..], bufs.pieces()),
            own => (own.slice(), &[][..]),
        };
        let own = own.iter().map(|buf| (buf.as_raw(), buf.len()));
        own.chain(shared.iter().map(|piece| (piece.as_raw(), piece.len())))
    }

    /// The memory behind the first `skip` bytes, and at most `most` bytes of it, where all is one piece.
    #[inline]
    pub(crate) fn single(&self, skip: usize, most: usize) -> Option<(*mut u8, usize)> {
        let (start, len) = match self {
            Bufs::One(buf) => (buf.as_raw(), buf.len()),
            Bufs::Many(_) => return None,
            Bufs::Shared(bufs) => match bufs.pieces() {
                [piece] => (piece.as_raw(), piece.len()),
                _ => return None,
            },
        };
        Some((start.wrapping_add(skip), (len - skip).min(most)))
    }

    /// The memory behind the first `skip` bytes, as far as one system call takes it and at most `most` bytes.
    pub(crate) fn vectors(&self, skip: usize, most: usize) -> Vec<libc::iovec> {
        let count = match self {
            Bufs::Shared(bufs) => bufs.pieces().len(),
            own => own.slice().len(),
        };
        let mut vectors = Vec::with_capacity(count.min(MAX_VECTORS));
        self.vectors_into(skip, most, &mut vectors);
        vectors
    }

    /// As [`Bufs::vectors`], in place of the old contents of `vectors`.
    pub(crate) fn vectors_into(&self, mut skip: usize, most: usize, vectors: &mut Vec<libc::iovec>) {
        vectors.clear();
        let mut room = most;
        for (start, len) in self.raw() {
            if len <= skip {
                skip -= len;
                continue;
            }
            let len = (len - skip).min(room);
            // In bounds: `skip` is less than the length of the piece.
            let start = start.wrapping_add(skip);
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
            Bufs::Shared(_) => unreachable!("shared memory is not this process's own"),
        }
    }

    pub(crate) fn into_shared(self) -> SharedBufs {
        match self.bufs {
            Bufs::Shared(bufs) => bufs,
            Bufs::One(_) | Bufs::Many(_) => unreachable!("an operation gives back the memory that it was given"),
        }
    }

    pub(crate) fn into_many(self) -> Vec<IoBuf> {
        match self.bufs {
            Bufs::One(buf) => vec![buf],
            Bufs::Many(bufs) => bufs,
            Bufs::Shared(_) => unreachable!("shared memory is not this process's own"),
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
