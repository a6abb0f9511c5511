// SPDX-License-Identifier: Apache-2.0 OR MIT
//! "Something has changed": a counter that tasks of any thread can wait on.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

#[derive(Default)]
struct State {
    count: u64,
    waiting: Vec<Waker>,
}

/// A counter of changes. Read it, look at the state, and wait for it to move if the state didn't suit: no change in
/// between is missed.
#[derive(Default)]
pub(super) struct Events {
    state: Mutex<State>,
}

impl Events {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The present count.
    pub(super) fn now(&self) -> u64 {
        self.lock().count
    }

    /// Counts a change and wakes everybody.
    pub(super) fn notify(&self) {
        let waiting = {
            let mut state = self.lock();
            state.count += 1;
            std::mem::take(&mut state.waiting)
        };
        waiting.into_iter().for_each(Waker::wake);
    }

    /// Waits until the count isn't `seen` any more.
    pub(super) async fn wait(&self, seen: u64) {
        std::future::poll_fn(|context| {
            let mut state = self.lock();
            if state.count != seen {
                return Poll::Ready(());
            }
            state.waiting.push(context.waker().clone());
            Poll::Pending
        })
        .await;
    }
}
