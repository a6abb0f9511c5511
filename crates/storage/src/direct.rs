// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Direct I/O on ranges and memory that the medium doesn't take as they are.
//!
//! Such transfers go through an aligned buffer. A write that covers a block only in part reads the block, changes its
//! part and writes it back, with the block locked ([`crate::blocklock`]).
//!
//! **Odd tails.** A write whose last block reaches past the end of the file would leave the file too long; it is cut
//! back afterwards. Between the two, a write behind that block would lose its bytes to the cut. So such a write locks
//! the file from its first block on, without an end, and lengths are noted before locks are given back. A second,
//! buffered descriptor for the tail is not safe. The page cache writes whole pages back, over the bytes of direct
//! writes to the same page. A power cut between the two leaves zeroes behind the end, less than a block of them.

use crate::IoBuf;
use crate::blocklock::{Access, BlockGuard};
use crate::fault::Event;
use crate::file::Inner;
use crate::medium::Medium;
use crate::payload::{Bufs, Payload};
use crate::sys::SysResult;
use cowshed_types::{Errno, slip};
use std::sync::atomic::Ordering;

/// Most bytes in one aligned buffer.
const BOUNCE_BYTES: u64 = 1 << 20;

impl Inner {
    fn align_down(&self, offset: u64) -> u64 {
        offset & !(self.alignment.get().offset - 1)
    }

    /// Offsets are below 2^63 and blocks small, so this can't overflow.
    fn align_up(&self, offset: u64) -> u64 {
        self.align_down(offset + (self.alignment.get().offset - 1))
    }

    /// Locks the blocks of a range of bytes; `None` where there is no need, because the medium has no blocks.
    pub(crate) async fn lock_blocks(&self, start: u64, end: u64, access: Access) -> Option<BlockGuard> {
        if self.alignment.get().offset == 1 {
            return None;
        }
        let end = if end > i64::MAX as u64 { u64::MAX } else { self.align_up(end) };
        Some(self.block_locks.acquire(self.align_down(start)..end, access).await)
    }

    pub(crate) async fn read_bounced(&self, mut payload: Payload, offset: u64) -> (SysResult<()>, Payload) {
        let end = offset + payload.len() as u64;
        let mut position = offset;
        while position < end {
            let start = self.align_down(position);
            let stop = self.align_up(end).min(start + BOUNCE_BYTES);
            let bounce = Payload::one(IoBuf::scratch((stop - start) as usize));
            let (result, bounce) = self.read_aligned(bounce, start).await;
            if let Err(errno) = result {
                return (Err(errno), payload);
            }
            let bounce = bounce.into_one();
            let from = (position - start) as usize;
            let count = (stop.min(end) - position) as usize;
            scatter(&mut payload.bufs, (position - offset) as usize, &bounce[from..from + count]);
            position += count as u64;
        }
        (Ok(()), payload)
    }

    pub(crate) async fn write_bounced(&self, payload: Payload, offset: u64) -> (SysResult<()>, Payload) {
        let end = offset + payload.len() as u64;
        let mut position = offset;
        while position < end {
            let stop = end.min(self.align_down(position) + BOUNCE_BYTES);
            let from = (position - offset) as usize;
            let count = (stop - position) as usize;
            if let Err(errno) = self.rewrite_blocks(&payload.bufs, from, position, count).await {
                return (Err(errno), payload);
            }
            position = stop;
        }
        (Ok(()), payload)
    }

    /// Writes `count` bytes of `bufs` from the place `from` on to `offset`, by way of whole blocks.
    async fn rewrite_blocks(&self, bufs: &Bufs, from: usize, offset: u64, count: usize) -> SysResult<()> {
        let end = offset + count as u64;
        let (start, stop) = (self.align_down(offset), self.align_up(end));
        let guard = self.lock_rewrite(offset, end).await;
        let len = self.len.load(Ordering::Acquire);
        let mut bounce = IoBuf::zeroed((stop - start) as usize);
        let block = self.alignment.get().offset as usize;
        if offset > start {
            self.meet(Event::PwritevRmwHead).await;
            self.fill_block(&mut bounce[..block], start).await?;
            self.meet(Event::PwritevRmwAfterHead).await;
        }
        let last = bounce.len() - block;
        if end < stop && (last > 0 || offset == start) {
            self.meet(Event::PwritevRmwTail).await;
            self.fill_block(&mut bounce[last..], start + last as u64).await?;
            self.meet(Event::PwritevRmwAfterTail).await;
        }
        let place = (offset - start) as usize;
        gather(bufs, from, &mut bounce[place..place + count]);
        if bufs.is_lost() {
            return Err(Errno(libc::EFAULT));
        }
        let payload = Payload { bufs: Bufs::One(bounce), guard: Some(guard.share()) };
        let final_len = len.max(end);
        let (result, _) = self.write_blocks(payload, start, final_len).await;
        if stop > final_len {
            // Also after a failed write, which may have made the file longer.
            let cut = self.medium.set_len(final_len, Some(guard.share())).await;
            result.and(cut)?;
        } else {
            result?;
        }
        drop(guard);
        Ok(())
    }

    /// Tells the faults of the file, where it has some, the next event.
    async fn meet(&self, event: Event) {
        if let Medium::Faulty(faulty) = &self.medium {
            faulty.faults().meet(event).await;
        }
    }

    /// Writes whole blocks; the file counts as no longer than `final_len`.
    async fn write_blocks(&self, payload: Payload, offset: u64, final_len: u64) -> (SysResult<()>, Payload) {
        let stop = offset + payload.len() as u64;
        let (result, payload) = self.write_aligned(payload, offset).await;
        if stop > final_len {
            // Everything behind is locked, so no other write has made the file longer.
            self.len.store(final_len, Ordering::Release);
        }
        (result, payload)
    }

    /// Reads the block at `offset` to `place`, which is one block long.
    async fn fill_block(&self, place: &mut [u8], offset: u64) -> SysResult<()> {
        let (result, payload) = self.read_aligned(Payload::one(IoBuf::scratch(place.len())), offset).await;
        result?;
        place.copy_from_slice(&payload.into_one());
        Ok(())
    }

    /// Locks the blocks of a range for reading and writing back, and all behind them when they reach past the end.
    async fn lock_rewrite(&self, offset: u64, end: u64) -> BlockGuard {
        let (start, stop) = (self.align_down(offset), self.align_up(end));
        let mut limit = stop;
        loop {
            let guard = self.block_locks.acquire(start..limit, Access::Exclusive).await;
            if slip!("growing_tail_locks_its_block_alone")
                || limit == u64::MAX
                || stop <= self.len.load(Ordering::Acquire)
            {
                return guard;
            }
            limit = u64::MAX;
        }
    }
}

/// Copies `bytes` to the place `at` of all buffers together.
fn scatter(bufs: &mut Bufs, mut at: usize, mut bytes: &[u8]) {
    if let Bufs::Shared(bufs) = bufs {
        return bufs.write(at, bytes);
    }
    for buf in bufs.slice_mut() {
        let start = at.min(buf.len());
        let count = (buf.len() - start).min(bytes.len());
        buf[start..start + count].copy_from_slice(&bytes[..count]);
        bytes = &bytes[count..];
        at -= start;
    }
}

/// Fills `bytes` from the place `at` of all buffers together.
fn gather(bufs: &Bufs, mut at: usize, mut bytes: &mut [u8]) {
    if let Bufs::Shared(bufs) = bufs {
        return bufs.read(at, bytes);
    }
    for buf in bufs.slice() {
        let start = at.min(buf.len());
        let count = (buf.len() - start).min(bytes.len());
        let (head, rest) = bytes.split_at_mut(count);
        head.copy_from_slice(&buf[start..start + count]);
        bytes = rest;
        at -= start;
    }
}
