// SPDX-License-Identifier: Apache-2.0 OR MIT
//! An operation in flight and the future that waits for it.

use super::Ring;
use super::message::SocketMessage;
use crate::payload::Payload;
use io_uring::squeue;
use std::future::Future;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

/// Memory that the kernel may use until the completion.
pub(super) struct OpMemory {
    payload: Payload,
    /// Pointers into `payload`, for the vectored operations.
    #[allow(dead_code, reason = "read by the kernel")]
    vectors: Vec<libc::iovec>,
    /// The parts of a message to a socket: pointers into `payload` too.
    message: Option<Box<SocketMessage>>,
    /// Set when the future is gone, whose borrow kept the descriptor open until then.
    #[allow(dead_code, reason = "held for its drop")]
    file: Option<Arc<OwnedFd>>,
}

enum OpState {
    InFlight(Option<Waker>),
    Orphan,
    Done(i32),
}

/// An operation's place in the ring. Its number is the user data.
pub(super) struct Slot {
    state: OpState,
    held: OpMemory,
    /// Others than a disk complete it, if they ever do.
    waits_for_peer: bool,
    /// The result that a fault puts into its completion.
    #[cfg(test)]
    told: Option<i32>,
}

pub(super) enum OpFinish {
    Wake(Option<Waker>),
    Orphan,
}

impl Slot {
    pub(super) fn finish(&mut self, result: i32) -> OpFinish {
        #[cfg(test)]
        let result = self.told.unwrap_or(result);
        match std::mem::replace(&mut self.state, OpState::Done(result)) {
            OpState::InFlight(waker) => OpFinish::Wake(waker),
            OpState::Orphan | OpState::Done(_) => OpFinish::Orphan,
        }
    }

    /// A file's operation: a disk, or its page cache, completes it.
    pub(super) fn is_on_disk(&self) -> bool {
        !self.waits_for_peer
    }

    pub(super) fn into_held(self) -> OpMemory {
        self.held
    }
}

/// Waits for an operation and returns the kernel's result and the memory. Dropped early, it leaves the operation its
/// memory and its descriptor, and the ring frees them when it completes.
pub(crate) struct RingOp<'a> {
    ring: Rc<Ring>,
    key: Option<usize>,
    file: &'a Arc<OwnedFd>,
    /// As in the slot.
    waits_for_peer: bool,
}

impl<'a> RingOp<'a> {
    /// Queues the operation that `entry` makes from its memory. `entry` may point to nothing else that can go away.
    pub(super) fn start(
        ring: Rc<Ring>,
        file: &'a Arc<OwnedFd>,
        payload: Payload,
        vectors: Vec<libc::iovec>,
        entry: squeue::Entry,
    ) -> Self {
        Self::start_held(ring, file, OpMemory { payload, vectors, message: None, file: None }, entry, false)
    }

    /// As [`RingOp::start`], for operations that may never complete by themselves, because they need a peer. They are
    /// cancelled when they have no waiter any more.
    pub(super) fn start_for_peer(
        ring: Rc<Ring>,
        socket: &'a Arc<OwnedFd>,
        payload: Payload,
        entry: squeue::Entry,
    ) -> Self {
        Self::start_held(
            ring,
            socket,
            OpMemory { payload, vectors: Vec::new(), message: None, file: None },
            entry,
            true,
        )
    }

    /// As [`RingOp::start_for_peer`], for an entry that points to `message`.
    pub(super) fn start_message(
        ring: Rc<Ring>,
        socket: &'a Arc<OwnedFd>,
        payload: Payload,
        message: Box<SocketMessage>,
        entry: squeue::Entry,
    ) -> Self {
        let held = OpMemory { payload, vectors: Vec::new(), message: Some(message), file: None };
        Self::start_held(ring, socket, held, entry, true)
    }

    fn start_held(
        ring: Rc<Ring>,
        file: &'a Arc<OwnedFd>,
        #[cfg_attr(not(test), allow(unused_mut, reason = "faults shorten vectors"))] mut held: OpMemory,
        entry: squeue::Entry,
        waits_for_peer: bool,
    ) -> Self {
        #[cfg(test)]
        let (entry, told) = crate::kernel_faults::of_entry(file, entry, &mut held.vectors);
        let slot = Slot {
            state: OpState::InFlight(None),
            held,
            waits_for_peer,
            #[cfg(test)]
            told,
        };
        ring.on_disk.set(ring.on_disk.get() + usize::from(slot.is_on_disk()));
        let key = ring.slots.borrow_mut().insert(slot);
        ring.push(&entry.user_data(key as u64));
        RingOp { ring, key: Some(key), file, waits_for_peer }
    }
}

impl Future for RingOp<'_> {
    type Output = (i32, Payload);

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(key) = self.key else { return Poll::Pending };
        let mut slots = self.ring.slots.borrow_mut();
        let replaced = match &mut slots[key].state {
            OpState::Done(result) => {
                let result = *result;
                let slot = slots.remove(key);
                drop(slots);
                self.key = None;
                if let Some(message) = slot.held.message {
                    self.ring.keep_message(message);
                }
                return Poll::Ready((result, slot.held.payload));
            }
            OpState::InFlight(Some(waker)) if waker.will_wake(context.waker()) => None,
            OpState::InFlight(waker) => waker.replace(context.waker().clone()),
            OpState::Orphan => None,
        };
        drop(slots);
        drop(replaced);
        Poll::Pending
    }
}

impl Drop for RingOp<'_> {
    fn drop(&mut self) {
        let Some(key) = self.key else { return };
        let mut slots = self.ring.slots.borrow_mut();
        if matches!(slots[key].state, OpState::Done(_)) {
            let slot = slots.remove(key);
            drop(slots);
            drop(slot);
            return;
        }
        let slot = &mut slots[key];
        slot.held.file = Some(Arc::clone(self.file));
        let state = std::mem::replace(&mut slot.state, OpState::Orphan);
        drop(slots);
        drop(state);
        self.ring.orphans.set(self.ring.orphans.get() + 1);
        if self.waits_for_peer {
            self.ring.cancel(key as u64);
        }
    }
}
