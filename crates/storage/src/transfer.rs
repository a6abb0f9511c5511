// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Whole reads and writes of a file from the medium's short ones.

use crate::blocklock::Access;
use crate::file::Inner;
use crate::payload::{Bufs, Payload};
use crate::ring::Direction;
use crate::sys::SysResult;
use cowshed_types::{Errno, slip};
use std::sync::atomic::Ordering;

impl Inner {
    /// Fills the payload from `offset`; bytes past the end of the file are zeroes.
    ///
    /// The common case (a ring, all bytes at once) is short and needs no allocation. Everything else is boxed, to keep
    /// the future of the common case small.
    pub(crate) async fn read(&self, payload: Payload, offset: u64) -> (SysResult<()>, Payload) {
        if !ends_in_range(offset, payload.len()) {
            return (Err(Errno::EFBIG), payload);
        }
        if !self.is_aligned(&payload, offset) {
            return Box::pin(self.read_bounced(payload, offset)).await;
        }
        let (done, payload) = match self.medium.transfer_now(Direction::Read, &payload, offset) {
            Some(done) => (done, payload),
            None => match self.medium.start(Direction::Read, payload, offset) {
                Ok(operation) => operation.await,
                Err(payload) => (0, payload),
            },
        };
        match usize::try_from(done) {
            Ok(done) if done == payload.len() => (Ok(()), payload),
            Err(_) if !says_again(done) => (Err(Errno(-done)), payload),
            done => Box::pin(self.read_on(payload, offset, done.unwrap_or(0))).await,
        }
    }

    /// Writes all of the payload at `offset`, whose range the caller has checked.
    pub(crate) async fn write(&self, mut payload: Payload, offset: u64) -> (SysResult<()>, Payload) {
        if !self.is_aligned(&payload, offset) {
            return Box::pin(self.write_bounced(payload, offset)).await;
        }
        let end = offset + payload.len() as u64;
        payload.guard = self.lock_blocks(offset, end, Access::Shared).await;
        let (done, payload) = match self.medium.transfer_now(Direction::Write, &payload, offset) {
            Some(done) => (done, payload),
            None => match self.medium.start(Direction::Write, payload, offset) {
                Ok(operation) => operation.await,
                Err(payload) => (0, payload),
            },
        };
        let (result, mut payload) = match usize::try_from(done) {
            Ok(done) if done == payload.len() => {
                self.note_end(end);
                (Ok(()), payload)
            }
            Err(_) if !says_again(done) => (Err(Errno(-done)), payload),
            done => Box::pin(self.write_on(payload, offset, done.unwrap_or(0))).await,
        };
        payload.guard = None;
        (result, payload)
    }

    /// True when the medium takes it as it is.
    fn is_aligned(&self, payload: &Payload, offset: u64) -> bool {
        let alignment = self.alignment.get();
        if alignment.offset == 1 && alignment.memory == 1 {
            return true;
        }
        offset.is_multiple_of(alignment.offset)
            && payload.bufs.raw().all(|(start, len)| {
                (len as u64).is_multiple_of(alignment.offset) && start.addr() & (alignment.memory - 1) == 0
            })
    }

    /// As [`Inner::read`], aligned.
    pub(crate) async fn read_aligned(&self, payload: Payload, offset: u64) -> (SysResult<()>, Payload) {
        self.read_on(payload, offset, 0).await
    }

    /// Goes on with an aligned read of which `done` bytes are there.
    async fn read_on(&self, mut payload: Payload, offset: u64, mut done: usize) -> (SysResult<()>, Payload) {
        let total = payload.len();
        if self.stops_in_block(done) {
            zero_from(&mut payload.bufs, done);
            return (Ok(()), payload);
        }
        while done < total {
            let (result, back) = self.medium.read(payload, done, offset + done as u64).await;
            payload = back;
            match result {
                Ok(count) => {
                    done += count.min(total - done);
                    if (count == 0 || self.stops_in_block(done)) && done < total {
                        zero_from(&mut payload.bufs, done);
                        break;
                    }
                }
                Err(errno) => return (Err(errno), payload),
            }
        }
        (Ok(()), payload)
    }

    /// As [`Inner::write`], aligned and with the locks held.
    pub(crate) async fn write_aligned(&self, payload: Payload, offset: u64) -> (SysResult<()>, Payload) {
        self.write_on(payload, offset, 0).await
    }

    /// Goes on with an aligned write of which `done` bytes are there.
    async fn write_on(&self, mut payload: Payload, offset: u64, mut done: usize) -> (SysResult<()>, Payload) {
        let total = payload.len();
        if done > 0 {
            self.note_end(offset + done as u64);
        }
        while done < total {
            let (result, back) = self.medium.write(payload, done, offset + done as u64).await;
            payload = back;
            let count = match if slip!("short_write_is_whole") { result.map(|_| total) } else { result } {
                // A device that takes nothing and gives no error must be full.
                Ok(0) => return (Err(Errno::ENOSPC), payload),
                Ok(count) => count,
                Err(errno) => return (Err(errno), payload),
            };
            done += count.min(total - done);
            self.note_end(offset + done as u64);
        }
        (Ok(()), payload)
    }

    /// A read that stops inside of a block has met the end of the file; going on from there would not be aligned.
    fn stops_in_block(&self, done: usize) -> bool {
        !(done as u64).is_multiple_of(self.alignment.get().offset)
    }

    /// The file reaches at least to `end`.
    pub(crate) fn note_end(&self, end: u64) {
        // Looking first keeps the counter shared between the threads that only overwrite.
        if self.len.load(Ordering::Acquire) < end {
            self.len.fetch_max(end, Ordering::AcqRel);
        }
    }
}

/// True for results that mean: nothing happened, ask again. A ring returns `ECANCELED` where the kernel has no worker
/// for it.
fn says_again(result: i32) -> bool {
    matches!(-result, libc::EINTR | libc::EAGAIN | libc::ECANCELED)
}

fn ends_in_range(offset: u64, len: usize) -> bool {
    offset.checked_add(len as u64).is_some_and(|end| i64::try_from(end).is_ok())
}

fn zero_from(bufs: &mut Bufs, mut start: usize) {
    if let Bufs::Shared(bufs) = bufs {
        return bufs.zero_from(start);
    }
    for buf in bufs.slice_mut() {
        let from = start.min(buf.len());
        buf[from..].fill(0);
        start -= from;
    }
}
