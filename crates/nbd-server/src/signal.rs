// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Waiting for what another thread does.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

/// Locks; a panic while it was held can't have broken the plain data inside.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A value and those who wait for it to become something.
#[derive(Debug, Default)]
pub(crate) struct Watched<T> {
    inner: Mutex<(T, Vec<Waker>)>,
}

impl<T> Watched<T> {
    pub(crate) fn new(value: T) -> Self {
        Watched { inner: Mutex::new((value, Vec::new())) }
    }

    /// Changes the value and wakes all who wait.
    pub(crate) fn change<R>(&self, change: impl FnOnce(&mut T) -> R) -> R {
        let mut inner = lock(&self.inner);
        let result = change(&mut inner.0);
        let wakers = std::mem::take(&mut inner.1);
        drop(inner);
        wakers.into_iter().for_each(Waker::wake);
        result
    }

    /// Looks at the value.
    pub(crate) fn look<R>(&self, look: impl FnOnce(&T) -> R) -> R {
        look(&lock(&self.inner).0)
    }

    /// Waits until `check` gives something; it may change the value.
    pub(crate) async fn wait<R>(&self, mut check: impl FnMut(&mut T) -> Option<R>) -> R {
        poll_fn(|context: &mut Context<'_>| {
            let mut inner = lock(&self.inner);
            match check(&mut inner.0) {
                Some(result) => Poll::Ready(result),
                None => {
                    if !inner.1.iter().any(|waker| waker.will_wake(context.waker())) {
                        inner.1.push(context.waker().clone());
                    }
                    Poll::Pending
                }
            }
        })
        .await
    }
}

/// Messages for one thread.
#[derive(Debug)]
pub(crate) struct Mailbox<T> {
    messages: Watched<VecDeque<T>>,
}

impl<T> Default for Mailbox<T> {
    fn default() -> Self {
        Mailbox { messages: Watched::new(VecDeque::new()) }
    }
}

impl<T> Mailbox<T> {
    pub(crate) fn send(&self, message: T) {
        self.messages.change(|messages| messages.push_back(message));
    }

    pub(crate) async fn receive(&self) -> T {
        self.messages.wait(VecDeque::pop_front).await
    }
}
