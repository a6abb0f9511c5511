// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Copies to a target that may never answer: how many run, and whether requests still wait for them.

use crate::events::Events;
use cowshed_storage::rt;
use futures_util::future::{Either, select};
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

/// The copies of one filter.
#[derive(Default)]
pub(super) struct Copies {
    running: AtomicUsize,
    ended: Events,
    given_up: AtomicBool,
    /// Those to wake when the target is given up, by the number of their wait.
    waiting: Mutex<BTreeMap<u64, Waker>>,
    waits: AtomicU64,
}

/// A copy that runs, until dropped.
pub(super) struct Copying(Arc<Copies>);

impl Drop for Copying {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::SeqCst);
        self.0.ended.notify();
    }
}

/// A wait of [`Copies::unless_given_up`].
struct Wait<'a>(&'a Copies, u64);

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        self.0.waiting().remove(&self.1);
    }
}

impl Copies {
    fn waiting(&self) -> MutexGuard<'_, BTreeMap<u64, Waker>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a copy.
    pub(super) fn begin(self: &Arc<Self>) -> Copying {
        self.running.fetch_add(1, Ordering::SeqCst);
        Copying(Arc::clone(self))
    }

    /// Waits until fewer copies run than this.
    pub(super) async fn fewer_than(&self, most: usize) {
        loop {
            let seen = self.ended.now();
            if self.running.load(Ordering::SeqCst) < most {
                return;
            }
            self.ended.wait(seen).await;
        }
    }

    /// Waits until no copy runs.
    pub(super) async fn idle(&self) {
        self.fewer_than(1).await;
    }

    /// From now on no request waits for the target.
    pub(super) fn give_up(&self) {
        self.given_up.store(true, Ordering::SeqCst);
        std::mem::take(&mut *self.waiting()).into_values().for_each(Waker::wake);
    }

    /// True after [`Copies::give_up`].
    pub(super) fn is_given_up(&self) -> bool {
        self.given_up.load(Ordering::SeqCst)
    }

    /// The output of `work`, or `None` once the target is given up; then `work` is dropped.
    pub(super) async fn unless_given_up<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        let wait = Wait(self, self.waits.fetch_add(1, Ordering::Relaxed));
        let given_up = std::future::poll_fn(|context| {
            let mut waiting = self.waiting();
            if self.is_given_up() {
                return Poll::Ready(());
            }
            waiting.insert(wait.1, context.waker().clone());
            Poll::Pending
        });
        match select(pin!(work), given_up).await {
            Either::Left((output, _)) => Some(output),
            Either::Right(_) => None,
        }
    }

    /// The output of a copy, or `None` once the target is given up; then the copy runs to its end by itself.
    pub(super) async fn wait_for<T: 'static>(self: &Arc<Self>, copy: impl Future<Output = T> + 'static) -> Option<T> {
        let running = self.begin();
        // Counted before the look. The task that gives the target up and waits for the copies then meets this one, or
        // it does not begin.
        if self.is_given_up() {
            return None;
        }
        let copy = rt::to_completion(async move {
            let output = copy.await;
            drop(running);
            output
        });
        self.unless_given_up(copy).await
    }
}
