// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Requests that have no reply yet.

use cowshed_nbd_proto::Malformed;
use cowshed_nbd_proto::reply::StatusRun;
use cowshed_storage::IoBuf;
use cowshed_types::Errno;
use slab::Slab;
use std::task::Waker;

/// Pieces of a read's reply that don't touch one another; more is no reply of an honest server.
const MAX_PIECES: usize = 4096;

/// Parts of one reply that bring no data: errors and block status. More is no reply of an honest server.
const MAX_REMARKS: u16 = 64;

/// A request on the wire.
#[derive(Debug, Default)]
pub(crate) struct PendingRequest {
    pub waker: Option<Waker>,
    /// The memory for the data of a read.
    pub buf: IoBuf,
    /// The buffer is away, being filled: whatever happens, the request isn't over before it is back.
    pub filling: bool,
    /// The range that was asked for.
    pub offset: u64,
    pub length: u64,
    /// A read: the reply must cover the range.
    pub reads: bool,
    /// The ranges that the reply has covered, in order of arrival, neighbours joined.
    pub covered: Vec<(u64, u64)>,
    /// Number of parts of the reply without data so far.
    pub remarks: u16,
    pub runs: Vec<StatusRun>,
    pub error: Option<Errno>,
    pub state: Progress,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Progress {
    #[default]
    Waiting,
    /// The reply is complete.
    Done,
    /// The connection was lost first.
    Lost,
    /// The request has no waiter any more.
    Abandoned,
}

impl PendingRequest {
    /// Notes that the reply covers a part of the range.
    pub(crate) fn cover(&mut self, offset: u64, length: u64) -> Result<(), Malformed> {
        let end = offset.checked_add(length).ok_or(Malformed("a part of a reply has no end"))?;
        if !self.reads || offset < self.offset || end > self.offset + self.length {
            return Err(Malformed("a reply has data that no request asked for"));
        }
        if self.covered.iter().any(|&(from, to)| offset < to && from < end) {
            return Err(Malformed("parts of a reply overlap"));
        }
        let is_crowded = self.covered.len() >= MAX_PIECES;
        match self.covered.last_mut() {
            Some(last) if last.1 == offset => last.1 = end,
            _ if is_crowded => return Err(Malformed("a reply has too many parts")),
            _ => self.covered.push((offset, end)),
        }
        Ok(())
    }

    /// Counts a part of the reply that brings no data.
    pub(crate) fn remark(&mut self) -> Result<(), Malformed> {
        self.remarks += 1;
        match self.remarks > MAX_REMARKS {
            true => Err(Malformed("a reply has too many parts")),
            false => Ok(()),
        }
    }

    /// Refuses data that can't be of this request, before they are received.
    pub(crate) fn expect_data(&self, length: u64) -> Result<(), Malformed> {
        match self.reads && length <= self.length {
            true => Ok(()),
            false => Err(Malformed("a reply has data that no request asked for")),
        }
    }

    /// True when a read that reports success has all its data.
    pub(crate) fn is_complete(&self) -> bool {
        let covered: u64 = self.covered.iter().map(|(from, to)| to - from).sum();
        !self.reads || self.error.is_some() || covered == self.length
    }
}

/// All requests of a connection that have no reply yet.
#[derive(Debug, Default)]
pub(crate) struct PendingTable {
    slots: Slab<PendingRequest>,
    pub lost: bool,
}

impl PendingTable {
    /// The cookie of a new request; `None` (and the request back) when the connection is lost.
    pub(crate) fn add(&mut self, pending: PendingRequest) -> Result<usize, PendingRequest> {
        if self.lost { Err(pending) } else { Ok(self.slots.insert(pending)) }
    }

    pub(crate) fn get(&mut self, cookie: u64) -> Result<&mut PendingRequest, Malformed> {
        let unknown = Malformed("a reply belongs to no request");
        let key = usize::try_from(cookie).map_err(|_| unknown)?;
        match self.slots.get_mut(key) {
            Some(pending) if !matches!(pending.state, Progress::Done | Progress::Lost) => Ok(pending),
            _ => Err(unknown),
        }
    }

    /// Brings the buffer of a request back, also when the connection was lost meanwhile.
    pub(crate) fn put_back(&mut self, cookie: u64, buf: IoBuf) -> Option<Waker> {
        let pending = usize::try_from(cookie).ok().and_then(|key| self.slots.get_mut(key))?;
        pending.buf = buf;
        pending.filling = false;
        if pending.state == Progress::Lost { pending.waker.take() } else { None }
    }

    /// The request with this key when it is over.
    pub(crate) fn take_finished(&mut self, key: usize, waker: &Waker) -> Option<PendingRequest> {
        let pending = &mut self.slots[key];
        if matches!(pending.state, Progress::Done | Progress::Lost) && !pending.filling {
            return Some(self.slots.remove(key));
        }
        if !pending.waker.as_ref().is_some_and(|known| known.will_wake(waker)) {
            pending.waker = Some(waker.clone());
        }
        None
    }

    /// The last part of a reply has come.
    pub(crate) fn finish(&mut self, cookie: u64) -> Result<Option<Waker>, Malformed> {
        let pending = self.get(cookie)?;
        if !pending.is_complete() {
            return Err(Malformed("a reply says success and lacks data"));
        }
        let waker = pending.waker.take();
        if pending.state == Progress::Abandoned {
            self.slots.remove(cookie as usize);
            return Ok(None);
        }
        pending.state = Progress::Done;
        Ok(waker)
    }

    /// The request has no waiter any more. Its memory stays until the reply has come.
    pub(crate) fn abandon(&mut self, key: usize) {
        match self.slots.get_mut(key) {
            Some(pending) if pending.state == Progress::Waiting && !self.lost => pending.state = Progress::Abandoned,
            Some(_) => drop(self.slots.remove(key)),
            None => {}
        }
    }

    /// No reply will come any more. Returns the wakers of the waiting requests.
    pub(crate) fn lose_all(&mut self) -> Vec<Waker> {
        self.lost = true;
        self.slots.retain(|_, pending| pending.state != Progress::Abandoned);
        let waiting = self.slots.iter_mut().filter(|(_, pending)| pending.state == Progress::Waiting);
        waiting
            .filter_map(|(_, pending)| {
                pending.state = Progress::Lost;
                pending.waker.take()
            })
            .collect()
    }
}
