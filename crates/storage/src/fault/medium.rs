// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Carries out the decisions of the rules, on the raw operations of the medium below.

use super::rules::{FaultAction, Faults, IoType};
use crate::blocklock::BlockGuard;
use crate::counters::{FileCounters, FileOp};
use crate::medium::{Medium, Space};
use crate::payload::{Bufs, Payload};
use crate::sys::SysResult;
use crate::{Alignment, DataRange, File, IoBuf, rt};
use cowshed_types::Errno;
use std::ops::Range;
use std::sync::Arc;

/// The unit of tears and corruptions, in bytes.
const SECTOR_BYTES: u64 = 512;

/// A file in front of another.
#[derive(Debug)]
pub(crate) struct FaultyFile {
    base: File,
    faults: Arc<Faults>,
    alignment: Alignment,
    max_transfer_bytes: u64,
}

/// The fate of a read or write.
enum Fate {
    /// It moves at most this many bytes.
    Move { limit: u64 },
    /// It moves this many bytes and fails.
    Torn { bytes: u64, errno: Errno },
    /// A read that is corrupted afterwards.
    Corrupt,
    /// A write that is forgotten.
    Lose,
}

impl FaultyFile {
    /// `max_transfer_bytes` is a multiple of the alignment, and not 0.
    pub(crate) fn new(base: File, faults: Arc<Faults>, alignment: Alignment, max_transfer_bytes: u64) -> FaultyFile {
        FaultyFile { base, faults, alignment, max_transfer_bytes }
    }

    pub(crate) fn faults(&self) -> &Arc<Faults> {
        &self.faults
    }

    pub(crate) fn base(&self) -> &File {
        &self.base
    }

    pub(crate) fn max_transfer(&self) -> Option<u64> {
        // Without a limit it is the largest multiple of the alignment.
        (self.max_transfer_bytes < u64::MAX / 2).then_some(self.max_transfer_bytes)
    }

    pub(crate) fn alignment(&self) -> Alignment {
        self.alignment
    }

    fn medium(&self) -> &Medium {
        self.base.medium()
    }

    /// The counters of the file behind the faults: its operations are those that reach it.
    fn counters(&self) -> &FileCounters {
        &self.base.inner().counters
    }

    /// Waits as the rules demand, and returns the action.
    async fn decide(&self, io: IoType, range: Option<Range<u64>>) -> FaultAction {
        if let Some(held) = self.faults.hold_before(io) {
            held.await;
        }
        let Some(verdict) = self.faults.decide(io, range) else { return FaultAction::Pass };
        if !verdict.delay.is_zero() {
            rt::sleep(verdict.delay).await;
        }
        verdict.action
    }

    /// For operations that can only fail or be lost; true: lost.
    async fn check(&self, io: IoType, range: Option<Range<u64>>) -> SysResult<bool> {
        match self.decide(io, range).await {
            FaultAction::Fail(errno) | FaultAction::Torn { errno, .. } => Err(errno),
            FaultAction::Lose => Ok(true),
            FaultAction::Short { .. } | FaultAction::Corrupt | FaultAction::Pass => Ok(false),
        }
    }

    async fn fate(&self, io: IoType, offset: u64, len: u64) -> SysResult<Fate> {
        let whole = Fate::Move { limit: self.max_transfer_bytes };
        let part = |bytes: Option<u64>| {
            let unit = self.alignment.offset.max(SECTOR_BYTES);
            bytes.unwrap_or(len / 2).min(len) / unit * unit
        };
        Ok(match self.decide(io, Some(offset..offset.saturating_add(len))).await {
            FaultAction::Pass => whole,
            FaultAction::Fail(errno) => return Err(errno),
            FaultAction::Torn { errno, bytes } if io == IoType::Write => Fate::Torn { bytes: part(bytes), errno },
            FaultAction::Torn { errno, .. } => return Err(errno),
            FaultAction::Short { bytes } => {
                let least = self.alignment.offset.max(SECTOR_BYTES);
                Fate::Move { limit: part(bytes).max(least).min(self.max_transfer_bytes) }
            }
            FaultAction::Corrupt if io == IoType::Read => Fate::Corrupt,
            FaultAction::Lose if io == IoType::Write => Fate::Lose,
            FaultAction::Corrupt | FaultAction::Lose => whole,
        })
    }

    pub(crate) async fn read(&self, payload: Payload, skip: usize, offset: u64) -> (SysResult<usize>, Payload) {
        let len = (payload.len() - skip) as u64;
        let (limit, corrupt) = match self.fate(IoType::Read, offset, len).await {
            Err(errno) => return (Err(errno), payload),
            Ok(Fate::Move { limit }) => (limit, false),
            Ok(Fate::Corrupt) => (self.max_transfer_bytes, true),
            Ok(Fate::Torn { .. } | Fate::Lose) => unreachable!("only writes are torn or lost"),
        };
        let (cut, rest) = cut(payload, skip, limit);
        let (len, start_ns) = ((cut.len() - skip) as u64, self.counters().start_ns());
        let (result, cut) = self.medium().read(cut, skip, offset).await;
        self.counters().count(FileOp::Read, offset, len, start_ns, result.is_ok());
        let mut payload = rejoin(cut, rest);
        if let (true, Ok(count)) = (corrupt, result) {
            self.corrupt(&mut payload.bufs, skip, count);
        }
        (result, payload)
    }

    /// Flips a bit in each sector of the read bytes.
    fn corrupt(&self, bufs: &mut Bufs, skip: usize, count: usize) {
        let mut position = 0;
        for buf in bufs.slice_mut() {
            let start = skip.saturating_sub(position).min(buf.len());
            let end = (skip + count).saturating_sub(position).min(buf.len());
            position += buf.len();
            for sector in buf[start..end.max(start)].chunks_mut(SECTOR_BYTES as usize) {
                let bit = self.faults.random_below(sector.len() as u64 * 8) as usize;
                sector[bit / 8] ^= 1 << (bit % 8);
            }
        }
    }

    pub(crate) async fn write(&self, payload: Payload, skip: usize, offset: u64) -> (SysResult<usize>, Payload) {
        let len = (payload.len() - skip) as u64;
        match self.fate(IoType::Write, offset, len).await {
            Err(errno) => (Err(errno), payload),
            Ok(Fate::Lose) => (Ok(payload.len() - skip), payload),
            Ok(Fate::Torn { bytes: 0, errno }) => (Err(errno), payload),
            Ok(Fate::Torn { bytes, errno }) => {
                let (result, payload) = self.write_part(payload, skip, offset, bytes).await;
                (result.and(Err(errno)), payload)
            }
            Ok(Fate::Move { limit }) => {
                let (result, payload) = self.write_part(payload, skip, offset, limit).await;
                if result.is_ok() {
                    self.faults.written();
                    if let Some(held) = self.faults.hold_after_write() {
                        held.await;
                    }
                }
                (result, payload)
            }
            Ok(Fate::Corrupt) => unreachable!("only reads are corrupted"),
        }
    }

    async fn write_part(&self, payload: Payload, skip: usize, offset: u64, limit: u64) -> (SysResult<usize>, Payload) {
        let (cut, rest) = cut(payload, skip, limit);
        let (len, start_ns) = ((cut.len() - skip) as u64, self.counters().start_ns());
        let (result, cut) = self.medium().write(cut, skip, offset).await;
        if let Ok(count) = result {
            self.base.note_end(offset + count as u64);
        }
        self.counters().count(FileOp::Write, offset, len, start_ns, result.is_ok());
        (result, rejoin(cut, rest))
    }

    pub(crate) async fn sync(&self) -> SysResult<()> {
        if self.check(IoType::Flush, None).await? {
            return Ok(());
        }
        let start_ns = self.counters().start_ns();
        let result = self.medium().sync().await;
        self.counters().count(FileOp::Sync, 0, 0, start_ns, result.is_ok());
        result
    }

    pub(crate) async fn fallocate(
        &self,
        space: Space,
        offset: u64,
        len: u64,
        guard: Option<BlockGuard>,
    ) -> SysResult<()> {
        let io = if space == Space::Punch { IoType::Discard } else { IoType::WriteZeroes };
        let end = offset.saturating_add(len);
        if self.check(io, Some(offset..end)).await? {
            return Ok(());
        }
        let start_ns = self.counters().start_ns();
        let result = self.medium().fallocate(space, offset, len, guard).await;
        if space != Space::Punch && result.is_ok() {
            self.base.note_end(end);
        }
        match space {
            Space::Punch => self.counters().count(FileOp::Discard, offset, len, start_ns, result.is_ok()),
            Space::Zero => self.counters().count(FileOp::Zero, offset, len, start_ns, result.is_ok()),
            Space::Allocate => {}
        }
        result
    }

    pub(crate) async fn set_len(&self, len: u64, guard: Option<BlockGuard>) -> SysResult<()> {
        if self.check(IoType::Resize, None).await? {
            return Ok(());
        }
        self.medium().set_len(len, guard).await?;
        self.base.note_len(len);
        Ok(())
    }

    pub(crate) async fn next_data(&self, offset: u64, len: u64) -> SysResult<Option<DataRange>> {
        self.check(IoType::BlockStatus, Some(offset..len.max(offset))).await?;
        self.medium().next_data(offset, len).await
    }

    pub(crate) fn allocated_bytes(&self) -> SysResult<u64> {
        self.medium().allocated_bytes()
    }
}

/// The bytes behind a cut: the rest of the buffer that was cut, and the buffers behind it.
type Rest = (Option<IoBuf>, Vec<IoBuf>);

/// Takes everything off the payload that lies more than `limit` bytes behind its first `skip`.
fn cut(mut payload: Payload, skip: usize, limit: u64) -> (Payload, Rest) {
    let end = skip.saturating_add(usize::try_from(limit).unwrap_or(usize::MAX));
    let mut rest = (None, Vec::new());
    match &mut payload.bufs {
        Bufs::One(buf) if end < buf.len() => rest.0 = Some(buf.split_off(end)),
        Bufs::One(_) | Bufs::Shared(_) => {}
        Bufs::Many(bufs) => {
            let mut position = 0;
            for index in 0..bufs.len() {
                let len = bufs[index].len();
                if position + len > end {
                    rest.1 = bufs.split_off(index + 1);
                    rest.0 = Some(bufs[index].split_off(end - position));
                    break;
                }
                position += len;
            }
        }
    }
    (payload, rest)
}

fn rejoin(mut payload: Payload, (split, mut behind): Rest) -> Payload {
    let last = payload.bufs.slice_mut().last_mut();
    if let (Some(last), Some(split)) = (last, split)
        && last.unsplit(split).is_err()
    {
        unreachable!("the two were one buffer");
    }
    if let Bufs::Many(bufs) = &mut payload.bufs {
        bufs.append(&mut behind);
    }
    payload
}
