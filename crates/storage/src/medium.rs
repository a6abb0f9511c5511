// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The base of a [`crate::File`]: a file of the host, simulated, empty or with faults, or bytes behind a protocol
//! or a node.
//!
//! Operations are the raw ones: transfers may be short, offsets and memory must have the medium's alignment, errors are
//! bare numbers. A lock on blocks goes with the operation and is given back when the medium is done with it, even
//! without a waiter. (The simulated medium gives it back with its future.) The convenience of a file is built on this,
//! so that the simulator tests it.

use crate::blocklock::BlockGuard;
use crate::fault::FaultyFile;
use crate::host::{HostFile, not_between_these};
use crate::null::NullFile;
use crate::payload::{Bufs, Payload, locate};
use crate::remote::RemoteFile;
use crate::ring::{Direction, RingOp};
use crate::simulated::SimulatedFile;
use crate::sys::SysResult;
use crate::{Alignment, DataRange, IoBuf};
use cowshed_types::Errno;
use std::sync::Arc;

/// The change to the space of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Space {
    /// Give it back; the range reads as zeroes.
    Punch,
    /// Keep it; the range reads as zeroes.
    Zero,
    /// Reserve it; the file grows to hold it.
    Allocate,
}

#[derive(Debug)]
pub(crate) enum Medium {
    Host(HostFile),
    Null(NullFile),
    Sim(Arc<dyn SimulatedFile>),
    Faulty(Box<FaultyFile>),
    Remote(RemoteFile),
}

impl Medium {
    pub(crate) fn alignment(&self) -> Alignment {
        match self {
            Medium::Host(host) => host.alignment(),
            Medium::Null(_) => Alignment { memory: 1, offset: 1 },
            Medium::Sim(sim) => sim.alignment(),
            Medium::Faulty(faulty) => faulty.alignment(),
            Medium::Remote(file) => file.remote.alignment(),
        }
    }

    /// A change of space is about whole blocks of this many bytes.
    pub(crate) fn space_block_bytes(&self) -> u64 {
        match self {
            Medium::Host(host) => host.space_block_bytes(),
            Medium::Null(_) | Medium::Sim(_) => 1,
            Medium::Faulty(faulty) => faulty.base().space_block_bytes(),
            Medium::Remote(file) => file.remote.alignment().offset.max(1),
        }
    }

    /// Starts a transfer of the whole payload on this thread's ring; returns it where this medium doesn't work so.
    pub(crate) fn start(&self, direction: Direction, payload: Payload, offset: u64) -> Result<RingOp<'_>, Payload> {
        match self {
            Medium::Host(host) => host.start(direction, payload, offset),
            Medium::Null(_) | Medium::Sim(_) | Medium::Faulty(_) | Medium::Remote(_) => Err(payload),
        }
    }

    /// A whole transfer on this thread, where that costs least; it may be short. `None` leaves it to [`Medium::start`].
    pub(crate) fn transfer_now(&self, direction: Direction, payload: &Payload, offset: u64) -> Option<i32> {
        let result = match self {
            Medium::Host(host) if direction == Direction::Read => host.read_now(payload, offset),
            Medium::Host(host) => host.write_now(payload, offset),
            Medium::Null(_) | Medium::Sim(_) | Medium::Faulty(_) | Medium::Remote(_) => None,
        };
        // In the ring's form.
        result.map(|result| result.map_or_else(|errno| -errno.0, |done| i32::try_from(done).unwrap_or(i32::MAX)))
    }

    /// One read into the payload behind its first `skip` bytes; 0 bytes at the end of the file.
    pub(crate) async fn read(&self, payload: Payload, skip: usize, offset: u64) -> (SysResult<usize>, Payload) {
        match self {
            Medium::Host(host) => host.read(payload, skip, offset).await,
            Medium::Null(null) => null.read(payload, skip, offset).await,
            Medium::Sim(sim) => read_simulated(&**sim, payload, skip, offset).await,
            Medium::Faulty(faulty) => Box::pin(faulty.read(payload, skip, offset)).await,
            Medium::Remote(file) => Box::pin(file.read(payload, skip, offset)).await,
        }
    }

    /// One write of the payload's bytes behind the first `skip`.
    pub(crate) async fn write(&self, payload: Payload, skip: usize, offset: u64) -> (SysResult<usize>, Payload) {
        match self {
            Medium::Host(host) => host.write(payload, skip, offset).await,
            Medium::Null(null) => null.write(payload, skip).await,
            Medium::Sim(sim) => write_simulated(&**sim, payload, skip, offset).await,
            Medium::Faulty(faulty) => Box::pin(faulty.write(payload, skip, offset)).await,
            Medium::Remote(file) => Box::pin(file.write(payload, skip, offset)).await,
        }
    }

    /// `fdatasync`. `EINTR`: nothing was flushed, and no error was used up.
    pub(crate) async fn sync(&self) -> SysResult<()> {
        match self {
            Medium::Host(host) => host.sync().await,
            Medium::Null(_) => Ok(()),
            Medium::Sim(sim) => sim.sync().await,
            Medium::Faulty(faulty) => Box::pin(faulty.sync()).await,
            Medium::Remote(file) => file.remote.sync().await,
        }
    }

    /// `EOPNOTSUPP` where the medium can't.
    pub(crate) async fn fallocate(
        &self,
        space: Space,
        offset: u64,
        len: u64,
        guard: Option<BlockGuard>,
    ) -> SysResult<()> {
        match self {
            Medium::Host(host) => host.fallocate(space, offset, len, guard).await,
            Medium::Null(_) => Ok(()),
            Medium::Sim(sim) => match space {
                Space::Punch => sim.punch_hole(offset, len).await,
                Space::Zero => sim.zero_range(offset, len).await,
                Space::Allocate => sim.allocate(offset, len).await,
            },
            Medium::Faulty(faulty) => Box::pin(faulty.fallocate(space, offset, len, guard)).await,
            Medium::Remote(file) => Box::pin(file.change_space(space, offset, len, guard)).await,
        }
    }

    pub(crate) async fn set_len(&self, len: u64, guard: Option<BlockGuard>) -> SysResult<()> {
        match self {
            Medium::Host(host) => host.set_len(len, guard).await,
            Medium::Null(_) => Err(Errno::ENOTSUP),
            Medium::Sim(sim) => sim.set_len(len).await,
            Medium::Faulty(faulty) => Box::pin(faulty.set_len(len, guard)).await,
            Medium::Remote(file) => Box::pin(file.set_len(len, guard)).await,
        }
    }

    pub(crate) async fn next_data(&self, offset: u64, len: u64) -> SysResult<Option<DataRange>> {
        match self {
            Medium::Host(host) => host.next_data(offset, len).await,
            Medium::Null(_) => Ok(None),
            Medium::Sim(sim) => sim.next_data(offset).await,
            Medium::Faulty(faulty) => Box::pin(faulty.next_data(offset, len)).await,
            Medium::Remote(file) => file.next_data(offset).await,
        }
    }

    /// The first `max` runs of data that begin from `offset` on and before `end`.
    pub(crate) async fn data_ranges(&self, offset: u64, end: u64, len: u64, max: usize) -> SysResult<Vec<DataRange>> {
        if let Medium::Host(host) = self {
            return host.data_ranges(offset, end, len, max).await;
        }
        let (mut ranges, mut at) = (Vec::new(), offset);
        while at < end && ranges.len() < max {
            let Some(range) = self.next_data(at, len).await?.filter(|range| range.start < end) else { break };
            at = range.end.max(at + 1);
            ranges.push(range);
        }
        Ok(ranges)
    }

    /// `EOPNOTSUPP` where the two have no way to do it, before anything was copied.
    pub(crate) async fn copy_from(
        &self,
        source: &Medium,
        source_offset: u64,
        offset: u64,
        len: u64,
        guard: Option<BlockGuard>,
    ) -> SysResult<u64> {
        match (self, source) {
            (Medium::Host(host), Medium::Host(source)) => {
                host.copy_from(source, source_offset, offset, len, guard).await
            }
            (Medium::Sim(sim), Medium::Sim(source)) => sim.copy_range(&**source, source_offset, offset, len).await,
            _ => Err(Errno::ENOTSUP),
        }
    }

    /// Whether [`Medium::share_from`] is worth a try.
    pub(crate) async fn can_share_from(&self, source: &Medium, source_len: u64) -> bool {
        match (self, source) {
            (Medium::Host(host), Medium::Host(source)) => {
                // A place behind the end, and within a block: nothing is there to be shared. A file system that can't
                // share reports that first.
                let place = source_len.next_multiple_of(1 << 20) + 1;
                let can = host.share_one_byte(source, place).await == Err(Errno::EINVAL);
                if can {
                    // Blocks that aren't on the disk yet are waited for, one range after the other. A hint; it may fail.
                    let _ = source.start_writeback_first().await;
                }
                can
            }
            (Medium::Sim(sim), Medium::Sim(_)) => sim.can_copy_range(),
            _ => false,
        }
    }

    /// `EOPNOTSUPP` where the two can't share blocks.
    pub(crate) async fn share_from(
        &self,
        source: &Medium,
        source_offset: u64,
        offset: u64,
        len: u64,
        guard: Option<BlockGuard>,
    ) -> SysResult<()> {
        match (self, source) {
            (Medium::Host(host), Medium::Host(source)) => {
                host.share_from(source, source_offset, offset, len, guard).await.map_err(not_between_these)
            }
            (Medium::Sim(sim), Medium::Sim(source)) => {
                let copied = sim.copy_range(&**source, source_offset, offset, len).await?;
                if copied == len { Ok(()) } else { Err(Errno::ENOTSUP) }
            }
            _ => Err(Errno::ENOTSUP),
        }
    }

    /// See [`crate::File::is_device`].
    pub(crate) fn is_device(&self) -> bool {
        match self {
            Medium::Host(host) => host.is_device(),
            Medium::Faulty(faulty) => faulty.base().is_device(),
            Medium::Remote(file) => !file.grows(),
            Medium::Sim(sim) => sim.is_fixed(),
            Medium::Null(_) => false,
        }
    }

    pub(crate) fn change_stamp(&self) -> Option<[u64; 7]> {
        match self {
            Medium::Host(host) => host.change_stamp(),
            _ => None,
        }
    }

    pub(crate) fn allocated_bytes(&self) -> SysResult<u64> {
        match self {
            Medium::Host(host) => host.allocated_bytes(),
            Medium::Null(_) => Ok(0),
            Medium::Sim(sim) => Ok(sim.allocated_bytes()),
            Medium::Faulty(faulty) => faulty.allocated_bytes(),
            Medium::Remote(_) => Err(Errno::ENOTSUP),
        }
    }
}

async fn read_simulated(
    sim: &dyn SimulatedFile,
    payload: Payload,
    skip: usize,
    offset: u64,
) -> (SysResult<usize>, Payload) {
    let guard = payload.guard;
    let (result, bufs) = match payload.bufs {
        Bufs::One(mut buf) => {
            let mut head = buf.split_to(skip);
            let (result, buf) = sim.read(buf, offset).await;
            join(&mut head, buf);
            (result, Bufs::One(head))
        }
        Bufs::Many(mut bufs) => {
            // One buffer at a time: a short read for the caller.
            let (index, skip) = locate(&bufs, skip);
            let Some(buf) = bufs.get_mut(index) else { return (Ok(0), Payload { bufs: Bufs::Many(bufs), guard }) };
            let mut head = std::mem::take(buf);
            let (result, rest) = sim.read(head.split_off(skip), offset).await;
            join(&mut head, rest);
            bufs[index] = head;
            (result, Bufs::Many(bufs))
        }
        Bufs::Shared(_) => unreachable!("shared memory is for files of the host"),
    };
    (result, Payload { bufs, guard })
}

async fn write_simulated(
    sim: &dyn SimulatedFile,
    payload: Payload,
    skip: usize,
    offset: u64,
) -> (SysResult<usize>, Payload) {
    let Payload { bufs, guard } = payload;
    let (single, mut bufs) = match bufs {
        Bufs::One(buf) => (true, vec![buf]),
        Bufs::Many(bufs) => (false, bufs),
        Bufs::Shared(_) => unreachable!("shared memory is for files of the host"),
    };
    let (index, skip) = locate(&bufs, skip);
    let mut tail = bufs.split_off(index);
    let mut head = IoBuf::default();
    if let Some(first) = tail.first_mut()
        && skip > 0
    {
        head = first.split_to(skip);
    }
    let (result, mut tail) = sim.write(tail, offset).await;
    if let Some(first) = tail.first_mut()
        && skip > 0
    {
        join(&mut head, std::mem::take(first));
        *first = head;
    }
    bufs.append(&mut tail);
    let bufs = match single {
        true => Bufs::One(bufs.pop().unwrap_or_default()),
        false => Bufs::Many(bufs),
    };
    (result, Payload { bufs, guard })
}

fn join(head: &mut IoBuf, tail: IoBuf) {
    if head.unsplit(tail).is_err() {
        unreachable!("the two were one buffer");
    }
}
