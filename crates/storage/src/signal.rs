// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Waiting for other threads.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

/// Locks; a panic while it was held can't have broken the plain data inside.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A value, and the tasks that wait for a change of it.
#[derive(Debug, Default)]
pub struct Watched<T> {
    inner: Mutex<Inner<T>>,
}

#[derive(Debug, Default)]
struct Inner<T> {
    value: T,
    /// By the number of the wait. A wait that is given up takes its waker along: nothing piles up here.
    waiting: Vec<(u64, Waker)>,
    next_number: u64,
}

impl<T> Watched<T> {
    /// A value without waiters yet.
    pub fn new(value: T) -> Self {
        Watched { inner: Mutex::new(Inner { value, waiting: Vec::new(), next_number: 0 }) }
    }

    /// Changes the value and wakes all waiters.
    pub fn change<R>(&self, change: impl FnOnce(&mut T) -> R) -> R {
        let mut inner = lock(&self.inner);
        let result = change(&mut inner.value);
        let waiting = std::mem::take(&mut inner.waiting);
        drop(inner);
        waiting.into_iter().for_each(|(_, waker)| waker.wake());
        result
    }

    /// Looks at the value.
    pub fn look<R>(&self, look: impl FnOnce(&T) -> R) -> R {
        look(&lock(&self.inner).value)
    }

    /// Waits until `check` returns a value; it may change the shared one.
    pub fn wait<R, F: FnMut(&mut T) -> Option<R> + Unpin>(&self, check: F) -> Wait<'_, T, F> {
        Wait { watched: self, check, number: None }
    }
}

/// The future of [`Watched::wait`].
pub struct Wait<'a, T, F> {
    watched: &'a Watched<T>,
    check: F,
    number: Option<u64>,
}

impl<T, R, F: FnMut(&mut T) -> Option<R> + Unpin> Future for Wait<'_, T, F> {
    type Output = R;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<R> {
        let this = &mut *self;
        let mut inner = lock(&this.watched.inner);
        if let Some(result) = (this.check)(&mut inner.value) {
            return Poll::Ready(result);
        }
        let number = *this.number.get_or_insert_with(|| {
            inner.next_number += 1;
            inner.next_number
        });
        inner.waiting.retain(|(other, _)| *other != number);
        inner.waiting.push((number, context.waker().clone()));
        Poll::Pending
    }
}

impl<T, F> Drop for Wait<'_, T, F> {
    fn drop(&mut self) {
        if let Some(number) = self.number {
            lock(&self.watched.inner).waiting.retain(|(other, _)| *other != number);
        }
    }
}

/// Messages for one thread.
#[derive(Debug)]
pub struct Mailbox<T> {
    messages: Watched<VecDeque<T>>,
}

impl<T> Default for Mailbox<T> {
    fn default() -> Self {
        Mailbox { messages: Watched::new(VecDeque::new()) }
    }
}

impl<T> Mailbox<T> {
    /// Puts a message behind the others.
    pub fn send(&self, message: T) {
        self.messages.change(|messages| messages.push_back(message));
    }

    /// Waits for the first message and takes it.
    pub async fn receive(&self) -> T {
        self.messages.wait(VecDeque::pop_front).await
    }
}
