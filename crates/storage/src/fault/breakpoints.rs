// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Operations that are held up at an event until a command resumes them.

use super::rules::Event;
use crate::rt;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

/// The breakpoints of a file with faults, and the operations that they hold up.
#[derive(Default)]
pub(super) struct Breakpoints(Mutex<BreakpointsState>);

#[derive(Default)]
struct BreakpointsState {
    set: Vec<(Event, String)>,
    held: Vec<(String, Arc<Latch>)>,
}

/// Closed until it is opened once.
#[derive(Default)]
struct Latch(Mutex<(bool, Option<Waker>)>);

impl Latch {
    fn open(&self) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.0 = true;
        if let Some(waker) = state.1.take() {
            waker.wake();
        }
    }
}

/// The operation waits here.
pub(super) struct SuspendedOp(Arc<Latch>);

impl Future for SuspendedOp {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let mut state = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Once its caller has dropped the request, nothing may ever resume it.
        if state.0 || rt::is_left() {
            return Poll::Ready(());
        }
        state.1 = Some(context.waker().clone());
        Poll::Pending
    }
}

impl Breakpoints {
    fn state(&self) -> MutexGuard<'_, BreakpointsState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next operation that meets `event` is held up.
    pub(super) fn set(&self, event: Event, tag: &str) {
        self.state().set.push((event, tag.to_owned()));
    }

    /// One of these events happens: takes its breakpoint away and returns the hold to wait for.
    pub(super) fn meet(&self, events: &[Event]) -> Option<SuspendedOp> {
        let mut state = self.state();
        let at = state.set.iter().position(|(event, _)| events.contains(event))?;
        let (_, tag) = state.set.remove(at);
        let gate = Arc::<Latch>::default();
        state.held.push((tag, Arc::clone(&gate)));
        Some(SuspendedOp(gate))
    }

    /// The tags of the operations held up, in the order they came.
    pub(super) fn held(&self) -> Vec<String> {
        self.state().held.iter().map(|(tag, _)| tag.clone()).collect()
    }

    /// Lets one operation go on; false when none is held up by this tag.
    pub(super) fn resume(&self, tag: &str) -> bool {
        let mut state = self.state();
        match state.held.iter().position(|(held, _)| held == tag) {
            Some(at) => {
                state.held.remove(at).1.open();
                true
            }
            None => false,
        }
    }

    /// Takes breakpoints away that nothing has met; false when there is none with this tag.
    pub(super) fn remove(&self, tag: &str) -> bool {
        let mut state = self.state();
        let before = state.set.len();
        state.set.retain(|(_, known)| known != tag);
        state.set.len() < before
    }

    /// Takes all away and lets everything go on.
    pub(super) fn clear(&self) {
        let mut state = self.state();
        state.set.clear();
        for (_, gate) in state.held.drain(..) {
            gate.open();
        }
    }
}
