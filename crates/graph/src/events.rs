// SPDX-License-Identifier: Apache-2.0 OR MIT
//! "Something has changed": a counter that tasks of any thread can wait on.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

/// A counter of changes. Read it, look at the state, and wait for it to move if the state didn't suit: no change in
/// between is missed.
#[derive(Default)]
pub struct Events {
    /// Changed with the list locked, read without.
    count: AtomicU64,
    waiting: Mutex<Vec<Waker>>,
}

impl Events {
    fn lock(&self) -> MutexGuard<'_, Vec<Waker>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The present count.
    pub fn now(&self) -> u64 {
        self.count.load(Ordering::SeqCst)
    }

    /// Counts a change and wakes every waiter.
    pub fn notify(&self) {
        let waiting = {
            let mut waiting = self.lock();
            self.count.fetch_add(1, Ordering::SeqCst);
            std::mem::take(&mut *waiting)
        };
        waiting.into_iter().for_each(Waker::wake);
    }

    /// Waits until the count isn't `seen` any more.
    pub async fn wait(&self, seen: u64) {
        std::future::poll_fn(|context| {
            let mut waiting = self.lock();
            if self.now() != seen {
                return Poll::Ready(());
            }
            waiting.push(context.waker().clone());
            Poll::Pending
        })
        .await;
    }
}
