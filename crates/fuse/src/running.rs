// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A request on its way to its reply.

use crate::caller::is_dying;
use crate::operations::{FuseOutcome, Given};
use crate::server::MountState;
use cowshed_fuse_proto::{Operation, RequestHeader, reply};
use cowshed_storage::FuseDevice;
use cowshed_types::Errno;
use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;
use rustix::io::Errno as Number;
use std::future::Future;
use std::io::IoSlice;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

/// A request that runs. It sends its reply, and ends with the bytes of its buffers.
pub(crate) struct RunningRequest {
    unique: u64,
    thread: u32,
    bytes: u64,
    /// It makes nothing durable either.
    is_read: bool,
    /// It changes nothing, so its caller may go before its end.
    may_be_left: bool,
    /// Its caller may have to go, and the kernel says nothing of that (again).
    is_watched: bool,
    is_answered: bool,
    shared: Arc<MountState>,
    device: FuseDevice,
    work: LocalBoxFuture<'static, FuseOutcome>,
}

impl RunningRequest {
    pub fn new(
        header: &RequestHeader,
        operation: Operation,
        shared: Arc<MountState>,
        device: FuseDevice,
        work: LocalBoxFuture<'static, FuseOutcome>,
    ) -> RunningRequest {
        let bytes = match operation {
            Operation::Read { len, .. } | Operation::Write { len, .. } => u64::from(len),
            _ => 0,
        };
        // A change that is left may still arrive, after a later one of the same bytes.
        let may_be_left =
            matches!(operation, Operation::Read { .. } | Operation::Seek { .. } | Operation::Flush | Operation::Sync);
        RunningRequest {
            unique: header.unique,
            thread: header.thread,
            bytes,
            is_read: matches!(operation, Operation::Read { .. } | Operation::Seek { .. }),
            may_be_left,
            // Of a process that exits the kernel reports no signal.
            is_watched: operation == Operation::Flush,
            is_answered: false,
            shared,
            device,
            work,
        }
    }

    pub fn unique(&self) -> u64 {
        self.unique
    }

    /// The bytes of its buffers.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// True where nothing is lost with it.
    pub fn is_read(&self) -> bool {
        self.is_read
    }

    /// True where [`RunningRequest::leave_dying`] is to be called from time to time.
    pub fn is_watched(&self) -> bool {
        self.is_watched && !self.is_answered
    }

    /// The kernel reports one signal of a caller. A program may catch it, and get another one later.
    pub fn note_signal(&mut self) {
        self.is_watched |= self.may_be_left;
    }

    /// It has its reply already.
    pub fn is_answered(&self) -> bool {
        self.is_answered
    }

    /// Lets a caller go that will see no reply. The request itself runs on. `hears_nothing`: the kernel had no chance to report a
    /// signal.
    pub fn leave_dying(&mut self, hears_nothing: bool) {
        let is_looked_at = self.is_watched || (hears_nothing && self.may_be_left);
        if is_looked_at && !self.is_answered && is_dying(self.thread) {
            tracing::debug!(export = self.shared.config.id, unique = self.unique, "a caller is let go");
            self.answer(&Err(Errno(Number::INTR.raw_os_error())));
        }
    }

    fn answer(&mut self, outcome: &FuseOutcome) {
        if !std::mem::replace(&mut self.is_answered, true) {
            answer(&self.shared, &self.device, self.unique, outcome);
        }
    }
}

impl Future for RunningRequest {
    type Output = u64;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<u64> {
        let outcome = ready!(self.work.poll_unpin(context));
        self.answer(&outcome);
        Poll::Ready(self.bytes)
    }
}

/// Sends a reply.
pub(crate) fn answer(shared: &MountState, device: &FuseDevice, unique: u64, outcome: &FuseOutcome) {
    let sent = match outcome {
        Ok(Given::Fields(fields)) => {
            device.send(&[IoSlice::new(&reply::header(unique, 0, fields.len())), IoSlice::new(fields)])
        }
        Ok(Given::Data(data)) => {
            device.send(&[IoSlice::new(&reply::header(unique, 0, data.len())), IoSlice::new(data)])
        }
        Err(errno) => device.send(&[IoSlice::new(&reply::reply(unique, Err(errno.0)))]),
    };
    if let Err(errno) = sent {
        tracing::warn!(export = shared.config.id, errno = errno.0, "the kernel refuses a reply");
        // The caller waits for one.
        let error = reply::reply(unique, Err(Number::IO.raw_os_error()));
        let _: std::result::Result<(), Errno> = device.send(&[IoSlice::new(&error)]);
    }
}
