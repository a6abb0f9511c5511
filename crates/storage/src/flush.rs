// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Flushes of one file, one at a time, and the memory of the first one that failed.
//!
//! Linux reports a failed write-back to one `fsync` and calls the next one a success, so two in flight could have
//! different results. Here one runs at a time. Requests that come meanwhile share the next one. After a failure all get
//! its error.

use cowshed_types::{Error, Result, slip};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Poll, Waker};

#[derive(Debug, Default)]
struct FlushState {
    /// Flushes started so far.
    started: u64,
    /// The last one that succeeded.
    succeeded: u64,
    running: bool,
    waiting: Vec<Waker>,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct FlushGate {
    state: Mutex<FlushState>,
    poison: OnceLock<Error>,
}

/// The next step of a task that needs a flush.
#[derive(Debug)]
pub(crate) enum FlushStep {
    /// A flush that started after the request has ended.
    Done(Result<()>),
    /// Start one, and call [`FlushGate::finish`] whatever happens.
    Lead,
}

/// A request: the first flush that covers it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ticket(u64);

impl FlushGate {
    fn state(&self) -> MutexGuard<'_, FlushState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The first failure.
    pub(crate) fn poison(&self) -> Option<&Error> {
        self.poison.get()
    }

    /// A flush that runs already may have passed over the caller's writes: only a later one counts.
    pub(crate) fn request(&self) -> Ticket {
        Ticket(self.state().started + 1)
    }

    pub(crate) fn poll(&self, ticket: Ticket, context: &mut Context<'_>) -> Poll<FlushStep> {
        let mut state = self.state();
        if let Some(error) = self.poison.get() {
            return Poll::Ready(FlushStep::Done(Err(error.clone())));
        }
        if state.succeeded >= ticket.0 {
            return Poll::Ready(FlushStep::Done(Ok(())));
        }
        if !state.running {
            state.running = true;
            state.started += 1;
            return Poll::Ready(FlushStep::Lead);
        }
        if !state.waiting.iter().any(|waker| waker.will_wake(context.waker())) {
            state.waiting.push(context.waker().clone());
        }
        Poll::Pending
    }

    /// The running flush has ended.
    pub(crate) fn finish(&self, result: Result<()>) {
        let mut state = self.state();
        state.running = false;
        match result {
            Ok(()) => state.succeeded = state.started,
            // Later ones can't run, so this is the first.
            Err(_) if slip!("failed_barrier_forgotten") => {}
            Err(error) => drop(self.poison.set(error)),
        }
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        waiting.into_iter().for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cowshed_types::Errno;

    fn poll(gate: &FlushGate, ticket: Ticket) -> Poll<FlushStep> {
        gate.poll(ticket, &mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn a_running_flush_does_not_count_for_later_requests() {
        let gate = FlushGate::default();
        let first = gate.request();
        assert!(matches!(poll(&gate, first), Poll::Ready(FlushStep::Lead)));
        let (second, third) = (gate.request(), gate.request());
        assert!(poll(&gate, second).is_pending());
        gate.finish(Ok(()));
        assert!(matches!(poll(&gate, first), Poll::Ready(FlushStep::Done(Ok(())))));
        assert!(matches!(poll(&gate, second), Poll::Ready(FlushStep::Lead)));
        assert!(poll(&gate, third).is_pending());
        gate.finish(Ok(()));
        assert!(matches!(poll(&gate, third), Poll::Ready(FlushStep::Done(Ok(())))));
    }

    #[test]
    fn the_first_failure_stays() {
        let gate = FlushGate::default();
        let first = gate.request();
        assert!(matches!(poll(&gate, first), Poll::Ready(FlushStep::Lead)));
        gate.finish(Err(Error::os(Errno::EIO, "could not flush")));
        for ticket in [first, gate.request()] {
            let Poll::Ready(FlushStep::Done(Err(error))) = poll(&gate, ticket) else { panic!("no error") };
            assert_eq!(error.errno(), Errno::EIO);
        }
    }
}
