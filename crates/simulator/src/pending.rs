// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Operations under way on a simulated machine, and the future that waits for one.

use super::fault::{Effect, OpKind};
use super::log::{Change, FileId, OpId};
use super::world::World;
use cowshed_storage::{DataRange, IoBuf};
use cowshed_types::Errno;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

/// The request. It owns its memory until it ends, also without a waiter.
pub(super) enum Request {
    Read { offset: u64, buf: IoBuf },
    Write { change: Change, bufs: Vec<IoBuf> },
    Change { kind: OpKind, change: Change },
    Sync,
    NextData { offset: u64 },
}

impl Request {
    pub fn kind(&self) -> OpKind {
        match self {
            Request::Read { .. } => OpKind::Read,
            Request::Write { .. } => OpKind::Write,
            Request::Change { kind, .. } => *kind,
            Request::Sync => OpKind::Sync,
            Request::NextData { .. } => OpKind::NextData,
        }
    }

    pub fn change(&self) -> Option<&Change> {
        match self {
            Request::Write { change, .. } | Request::Change { change, .. } => Some(change),
            _ => None,
        }
    }

    /// The bytes touched, for faults and for the search of overlaps.
    pub fn range(&self) -> std::ops::Range<u64> {
        match self {
            Request::Read { offset, buf } => *offset..offset.saturating_add(buf.len() as u64),
            Request::NextData { offset } => *offset..offset.saturating_add(1),
            _ => self.change().map(Change::range).map_or(0..0, |(start, end)| start..end),
        }
    }
}

impl std::fmt::Debug for Request {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self, self.change()) {
            (_, Some(change)) => change.fmt(f),
            (Request::Read { offset, buf }, _) => write!(f, "read {offset:#x}+{:#x}", buf.len()),
            (Request::NextData { offset }, _) => write!(f, "next data {offset:#x}"),
            _ => f.write_str("sync"),
        }
    }
}

/// An operation that has not ended.
pub(super) struct Pending {
    pub file: FileId,
    pub request: Request,
    pub effect: Option<Effect>,
    /// Virtual time before which it is not looked at.
    pub ready_ns: u64,
    pub waker: Option<Waker>,
    pub abandoned: bool,
}

/// The value that an operation returns.
#[derive(Clone, Copy)]
pub(super) enum Value {
    Count(u64),
    Data(Option<DataRange>),
}

pub(super) struct Outcome {
    pub result: Result<Value, Errno>,
    pub bufs: Vec<IoBuf>,
}

pub(super) enum OpState {
    Waiting(Pending),
    Done(Outcome),
}

/// Waits for one operation. Dropped early, the operation still happens, as in a kernel.
pub(super) struct Completion {
    world: World,
    op: OpId,
}

impl Completion {
    pub fn new(world: World, op: OpId) -> Self {
        Completion { world, op }
    }
}

impl Future for Completion {
    type Output = Outcome;
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Outcome> {
        let mut state = self.world.lock();
        match state.slots.get_mut(&self.op) {
            Some(OpState::Waiting(pending)) => {
                pending.waker = Some(context.waker().clone());
                Poll::Pending
            }
            Some(OpState::Done(_)) => match state.slots.remove(&self.op) {
                Some(OpState::Done(outcome)) => Poll::Ready(outcome),
                _ => unreachable!("the slot was there a line above, under the same lock"),
            },
            None => panic!("a simulated operation was polled after its end"),
        }
    }
}

impl Drop for Completion {
    fn drop(&mut self) {
        let mut state = self.world.lock();
        match state.slots.get_mut(&self.op) {
            Some(OpState::Waiting(pending)) => pending.abandoned = true,
            Some(OpState::Done(_)) => drop(state.slots.remove(&self.op)),
            None => {}
        }
    }
}

/// Waits until the virtual clock has reached a time.
pub(super) struct Sleep {
    world: World,
    deadline_ns: u64,
    timer: Option<u64>,
}

impl Sleep {
    pub fn new(world: World, deadline_ns: u64) -> Self {
        Sleep { world, deadline_ns, timer: None }
    }
}

impl Future for Sleep {
    type Output = ();
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        let mut state = this.world.lock();
        if state.clock_ns >= this.deadline_ns {
            return Poll::Ready(());
        }
        let timer = *this.timer.get_or_insert_with(|| {
            state.next_timer += 1;
            state.next_timer
        });
        state.timers.insert((this.deadline_ns, timer), context.waker().clone());
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(timer) = self.timer {
            self.world.lock().timers.remove(&(self.deadline_ns, timer));
        }
    }
}
