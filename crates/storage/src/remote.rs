// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Files that live behind a protocol, or behind anything else that another crate knows.

use crate::blocklock::BlockGuard;
use crate::medium::Space;
use crate::payload::{Bufs, Payload, locate};
use crate::sys::SysResult;
use crate::{Alignment, DataRange, IoBuf, TransferSizes};
use cowshed_types::Errno;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A future of a [`Remote`]: stays on its thread.
pub type RemoteFuture<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// Bytes behind a protocol, of a length that only changes if it reports that. Usable from any thread. Ranges are inside
/// of the length (writes may be past it where that [`Remote::grows`]), and aligned as it asks. Its messages are for the
/// log; a caller gets an error number.
pub trait Remote: Send + Sync + fmt::Debug {
    /// The alignment that it needs for memory, offsets and lengths, in bytes.
    fn alignment(&self) -> Alignment;

    /// The transfers that the other side prefers, where known.
    fn transfer_sizes(&self) -> Option<TransferSizes> {
        None
    }

    /// True when the other side doesn't let us write.
    fn is_read_only(&self) -> bool;

    /// True when writes past the end make it longer and [`Remote::set_len`] works, as with a regular file.
    fn grows(&self) -> bool {
        false
    }

    /// True when the bytes by which it grows read as zeroes.
    fn grows_by_zeroes(&self) -> bool {
        true
    }

    /// The words of a refusal to set the length, of another image's disk or a part of it. An export has its server's.
    fn fixed_length(&self) -> Option<&'static str> {
        None
    }

    /// Fills `buf` from `offset`.
    fn read(&self, buf: IoBuf, offset: u64) -> RemoteFuture<'_, (Result<(), Errno>, IoBuf)>;

    /// Writes `buf` at `offset`.
    fn write(&self, buf: IoBuf, offset: u64) -> RemoteFuture<'_, (Result<(), Errno>, IoBuf)>;

    /// Makes everything durable that was written before.
    fn sync(&self) -> RemoteFuture<'_, Result<(), Errno>>;

    /// Makes a range read as zeroes; `may_unmap`: its space may be given back. `ENOTSUP` where it can't.
    fn write_zeroes(&self, offset: u64, len: u64, may_unmap: bool) -> RemoteFuture<'_, Result<(), Errno>>;

    /// As [`Remote::write_zeroes`], but never by writing: `ENOTSUP` where the other side would.
    fn write_zeroes_fast(&self, offset: u64, len: u64, may_unmap: bool) -> RemoteFuture<'_, Result<(), Errno>>;

    /// Gives a range back; its bytes are unknown afterwards.
    fn discard(&self, offset: u64, len: u64) -> RemoteFuture<'_, Result<(), Errno>>;

    /// The next range from `offset` on that may hold something else than zeroes.
    fn next_data(&self, offset: u64) -> RemoteFuture<'_, Result<Option<DataRange>, Errno>>;

    /// Sets the length in bytes; added bytes read as zeroes.
    fn set_len(&self, _len: u64) -> RemoteFuture<'_, Result<(), Errno>> {
        Box::pin(std::future::ready(Err(Errno::ENOTSUP)))
    }
}

/// A [`Remote`] as a medium.
#[derive(Debug)]
pub(crate) struct RemoteFile {
    pub(crate) remote: Arc<dyn Remote>,
    len: AtomicU64,
    grows: bool,
}

impl RemoteFile {
    pub(crate) fn new(remote: Arc<dyn Remote>, len: u64) -> RemoteFile {
        let grows = remote.grows();
        RemoteFile { remote, len: AtomicU64::new(len), grows }
    }

    /// True when the length can change.
    pub(crate) fn grows(&self) -> bool {
        self.grows
    }

    fn len(&self) -> u64 {
        self.len.load(Ordering::Acquire)
    }

    /// Sets the length.
    pub(crate) async fn set_len(&self, len: u64, guard: Option<BlockGuard>) -> SysResult<()> {
        let _guard = guard;
        if self.grows {
            self.remote.set_len(len).await?;
            self.len.store(len, Ordering::Release);
        }
        if len == self.len() { Ok(()) } else { Err(Errno::ENOTSUP) }
    }

    /// One buffer of the payload, as far as the file goes.
    pub(crate) async fn read(&self, mut payload: Payload, skip: usize, offset: u64) -> (SysResult<usize>, Payload) {
        let Some(part) = Part::cut(&mut payload.bufs, skip, self.len().saturating_sub(offset)) else {
            return (Ok(0), payload);
        };
        let Part { index, head, middle, tail } = part;
        let len = middle.len();
        let (result, middle) = self.remote.read(middle, offset).await;
        Part { index, head, middle, tail }.put_back(&mut payload.bufs);
        (result.map(|()| len), payload)
    }

    /// One buffer of the payload, past the end only where the file grows.
    pub(crate) async fn write(&self, mut payload: Payload, skip: usize, offset: u64) -> (SysResult<usize>, Payload) {
        let room = if self.grows { u64::MAX - offset } else { self.len().saturating_sub(offset) };
        let Some(part) = Part::cut(&mut payload.bufs, skip, room) else {
            return (Err(Errno::ENOSPC), payload);
        };
        let Part { index, head, middle, tail } = part;
        let len = middle.len();
        let (result, middle) = self.remote.write(middle, offset).await;
        if result.is_ok() {
            self.note_end(offset + len as u64);
        }
        Part { index, head, middle, tail }.put_back(&mut payload.bufs);
        (result.map(|()| len), payload)
    }

    fn note_end(&self, end: u64) {
        if self.grows {
            self.len.fetch_max(end, Ordering::AcqRel);
        }
    }

    fn block_bytes(&self) -> u64 {
        self.remote.alignment().offset.max(1)
    }

    /// Gives the whole blocks of a range back.
    pub(crate) async fn discard(&self, offset: u64, len: u64) -> SysResult<()> {
        let block = self.block_bytes();
        let end = offset.saturating_add(len).min(self.len()) / block * block;
        let start = offset.checked_next_multiple_of(block).unwrap_or(end);
        if start >= end { Ok(()) } else { self.remote.discard(start, end - start).await }
    }

    /// The next data from `offset` on, which may lie inside of a block.
    pub(crate) async fn next_data(&self, offset: u64) -> SysResult<Option<DataRange>> {
        let found = self.remote.next_data(offset - offset % self.block_bytes()).await?;
        Ok(found.map(|range| DataRange { start: range.start.max(offset), end: range.end }))
    }

    /// Zeroes that the other side makes without writing them.
    pub(crate) async fn zero_fast(&self, offset: u64, len: u64, may_unmap: bool) -> SysResult<()> {
        if !(offset | len).is_multiple_of(self.block_bytes()) {
            return Err(Errno::ENOTSUP);
        }
        self.remote.write_zeroes_fast(offset, len, may_unmap).await?;
        self.note_end(offset + len);
        Ok(())
    }

    pub(crate) async fn change_space(
        &self,
        space: Space,
        offset: u64,
        len: u64,
        guard: Option<BlockGuard>,
    ) -> SysResult<()> {
        let _guard = guard;
        match space {
            // Length and space are the other side's business.
            Space::Allocate => Err(Errno::ENOTSUP),
            // The caller writes edges within a block, with the rest of their block.
            _ if !offset.is_multiple_of(self.block_bytes()) || !len.is_multiple_of(self.block_bytes()) => {
                Err(Errno::ENOTSUP)
            }
            _ if offset.checked_add(len).is_none_or(|end| end > self.len() && !self.grows) => Err(Errno::ENOSPC),
            Space::Punch => {
                // A hole makes no file longer.
                let inside = self.len().saturating_sub(offset).min(len);
                if inside == 0 { Ok(()) } else { self.remote.write_zeroes(offset, inside, true).await }
            }
            Space::Zero => {
                self.remote.write_zeroes(offset, len, false).await?;
                self.note_end(offset + len);
                Ok(())
            }
        }
    }
}

/// A part of one buffer of a payload, taken out for an operation.
struct Part {
    index: usize,
    head: IoBuf,
    middle: IoBuf,
    tail: IoBuf,
}

impl Part {
    /// The rest of the buffer in which the byte `skip` of all of them is, at most `room` bytes; `None` when that is nothing.
    fn cut(bufs: &mut Bufs, skip: usize, room: u64) -> Option<Part> {
        let bufs = bufs.slice_mut();
        let (index, skip) = locate(bufs, skip);
        let mut middle = std::mem::take(bufs.get_mut(index)?);
        let head = middle.split_to(skip);
        let len = usize::try_from(room).unwrap_or(usize::MAX).min(middle.len());
        let tail = middle.split_off(len);
        let part = Part { index, head, middle, tail };
        if len == 0 {
            part.put_back_into(bufs);
            return None;
        }
        Some(part)
    }

    fn put_back(self, bufs: &mut Bufs) {
        self.put_back_into(bufs.slice_mut());
    }

    fn put_back_into(self, bufs: &mut [IoBuf]) {
        let Part { index, mut head, middle, tail } = self;
        let joined = head.unsplit(middle).is_ok() && head.unsplit(tail).is_ok();
        assert!(joined, "a remote file gave back another buffer than it was given");
        bufs[index] = head;
    }
}
