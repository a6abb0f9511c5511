// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Lets the tasks of one thread start something in the order of their numbers.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::pin;
use std::task::{Poll, Waker};

/// The number of the next turn.
#[derive(Default)]
pub struct StartOrder {
    next: Cell<u64>,
    waiting: RefCell<Vec<Waker>>,
}

impl StartOrder {
    /// Waits for turn `number`, polls `future` once, and passes the turn on. The futures *start* in order (which
    /// decides where an image allocates) and then run side by side.
    pub async fn start_in_order<F: Future>(&self, number: u64, future: F) -> F::Output {
        std::future::poll_fn(|context| {
            if self.next.get() >= number {
                return Poll::Ready(());
            }
            self.waiting.borrow_mut().push(context.waker().clone());
            Poll::Pending
        })
        .await;
        let mut future = pin!(future);
        let first = std::future::poll_fn(|context| Poll::Ready(future.as_mut().poll(context))).await;
        self.pass(number);
        match first {
            Poll::Ready(output) => output,
            Poll::Pending => future.await,
        }
    }

    /// Lets all pieces start, in any order: after an error no order is kept.
    pub fn open(&self) {
        self.next.set(u64::MAX);
        self.waiting.take().into_iter().for_each(Waker::wake);
    }

    fn pass(&self, number: u64) {
        if self.next.get() <= number {
            self.next.set(number + 1);
            self.waiting.take().into_iter().for_each(Waker::wake);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::StartOrder;
    use futures_util::stream::{FuturesUnordered, StreamExt};
    use std::cell::RefCell;
    use std::future::ready;

    #[test]
    fn work_starts_in_the_order_of_its_numbers() {
        let turn = StartOrder::default();
        let started = RefCell::new(Vec::new());
        let (turn, started) = (&turn, &started);
        let mut tasks: FuturesUnordered<_> = [3, 1, 0, 2]
            .into_iter()
            .map(|number| {
                let work = async move {
                    started.borrow_mut().push(number);
                    ready(()).await;
                };
                async move { turn.start_in_order(number, work).await }
            })
            .collect();
        let all = async { while tasks.next().await.is_some() {} };
        futures_util::FutureExt::now_or_never(all).expect("no task waits for anything else");
        drop(tasks);
        assert_eq!(*started.borrow(), [0, 1, 2, 3]);
    }
}
