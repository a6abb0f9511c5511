// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The memory that the requests of one connection may hold.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Poll, Waker};

/// Counts bytes in flight.
#[derive(Debug)]
pub(crate) struct Budget {
    limit_bytes: u64,
    used_bytes: Cell<u64>,
    /// Who reads the requests; only one at a time does.
    waiting: RefCell<Option<Waker>>,
}

/// So many bytes of a [`Budget`], until dropped.
#[derive(Debug)]
pub(crate) struct Permit {
    budget: Rc<Budget>,
    bytes: u64,
}

impl Budget {
    pub(crate) fn new(limit_bytes: u64) -> Rc<Budget> {
        Rc::new(Budget { limit_bytes, used_bytes: Cell::new(0), waiting: RefCell::default() })
    }

    /// What it was made with.
    pub(crate) fn limit_bytes(&self) -> u64 {
        self.limit_bytes
    }

    /// Waits until `bytes` fit, or nothing else is in flight. One caller at a time.
    pub(crate) async fn take(self: &Rc<Self>, bytes: u64) -> Permit {
        poll_fn(|context| {
            let used = self.used_bytes.get();
            if used == 0 || used.saturating_add(bytes) <= self.limit_bytes {
                self.used_bytes.set(used.saturating_add(bytes));
                return Poll::Ready(());
            }
            self.waiting.replace(Some(context.waker().clone()));
            Poll::Pending
        })
        .await;
        Permit { budget: Rc::clone(self), bytes }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let used = &self.budget.used_bytes;
        used.set(used.get().saturating_sub(self.bytes));
        let waker = self.budget.waiting.take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}
