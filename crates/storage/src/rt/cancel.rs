// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Requests that have lost their client: those that still wait for leave to begin don't begin.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

thread_local! {
    /// The task that runs now works for a client that is gone.
    static CANCELLED: Cell<bool> = const { Cell::new(false) };
}

/// The shared state of one client's tasks: whether that client is gone.
#[derive(Debug, Default)]
pub struct Cancel {
    cancelled: Cell<bool>,
    tasks: RefCell<Vec<Waker>>,
}

impl Cancel {
    /// The client is there.
    pub fn new() -> Rc<Cancel> {
        Rc::default()
    }

    /// Nothing more begins. Tasks that wait look at it once more; begun operations run to their end.
    pub fn cancel(&self) {
        if !self.cancelled.replace(true) {
            let tasks = self.tasks.take();
            tasks.into_iter().for_each(Waker::wake);
        }
    }

    /// True after [`Cancel::cancel`].
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.get()
    }

    /// Runs a future in the name of the client: [`is_cancelled`] answers for it meanwhile.
    pub fn cover<F: Future>(self: &Rc<Self>, future: F) -> impl Future<Output = F::Output> + use<F> {
        Covered { cancel: Rc::clone(self), is_known: false, future: Box::pin(future) }
    }
}

/// True when the task that runs now works for a client that is gone ([`Cancel::cover`]): work that may still be left
/// undone is left undone.
#[inline]
pub fn is_cancelled() -> bool {
    CANCELLED.get()
}

struct Covered<F> {
    cancel: Rc<Cancel>,
    /// The task is woken by [`Cancel::cancel`].
    is_known: bool,
    future: Pin<Box<F>>,
}

/// Puts the answer of the task before back.
struct Restored(bool);

impl Drop for Restored {
    fn drop(&mut self) {
        CANCELLED.set(self.0);
    }
}

impl<F: Future> Future for Covered<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        if !self.is_known {
            self.is_known = true;
            self.cancel.tasks.borrow_mut().push(context.waker().clone());
        }
        let _restored = Restored(CANCELLED.replace(self.cancel.is_cancelled()));
        self.future.as_mut().poll(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rt;

    #[test]
    fn only_the_task_of_a_gone_client_is_cancelled() {
        rt::block_on(async {
            let cancel = Cancel::new();
            let seen = Rc::new(Cell::new(false));
            let covered = rt::spawn(cancel.cover({
                let seen = Rc::clone(&seen);
                // Nothing but the cancelling wakes it.
                std::future::poll_fn(move |_| {
                    seen.set(true);
                    if is_cancelled() { Poll::Ready(()) } else { Poll::Pending }
                })
            }));
            while !seen.get() {
                rt::yield_now().await;
            }
            assert!(!covered.is_finished() && !cancel.is_cancelled());
            cancel.cancel();
            covered.await;
            assert!(!is_cancelled(), "this task has no client");
        });
    }
}
