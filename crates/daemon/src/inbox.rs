// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Messages from any thread to one task.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

struct Shared<T> {
    queue: VecDeque<T>,
    waiting: Option<Waker>,
    /// The receiver is gone.
    closed: bool,
}

/// Where messages are put in; clones put into the same inbox.
pub struct Sender<T>(Arc<Mutex<Shared<T>>>);

/// The end from which one task takes them out.
pub struct Inbox<T>(Arc<Mutex<Shared<T>>>);

/// An empty inbox.
pub fn inbox<T>() -> (Sender<T>, Inbox<T>) {
    let shared = Arc::new(Mutex::new(Shared { queue: VecDeque::new(), waiting: None, closed: false }));
    (Sender(Arc::clone(&shared)), Inbox(shared))
}

fn lock<T>(shared: &Mutex<Shared<T>>) -> MutexGuard<'_, Shared<T>> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        Sender(Arc::clone(&self.0))
    }
}

impl<T> Sender<T> {
    /// Puts a message in; it comes back when its receiver is gone.
    pub fn send(&self, message: T) -> Result<(), T> {
        let mut shared = lock(&self.0);
        if shared.closed {
            return Err(message);
        }
        shared.queue.push_back(message);
        let waiting = shared.waiting.take();
        drop(shared);
        if let Some(waker) = waiting {
            waker.wake();
        }
        Ok(())
    }
}

impl<T> Inbox<T> {
    /// Waits for the next message.
    pub async fn receive(&self) -> T {
        poll_fn(|context| {
            let mut shared = lock(&self.0);
            match shared.queue.pop_front() {
                Some(message) => Poll::Ready(message),
                None => {
                    shared.waiting = Some(context.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await
    }
}

impl<T> Drop for Inbox<T> {
    fn drop(&mut self) {
        let mut shared = lock(&self.0);
        shared.closed = true;
        let rest = std::mem::take(&mut shared.queue);
        drop(shared);
        // Their senders may wait for an answer: dropping the messages shows them the end.
        drop(rest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cowshed_storage::rt;

    #[test]
    fn messages_of_other_threads_arrive_in_order() {
        let (sender, inbox) = inbox();
        let thread = std::thread::spawn(move || (0..100).for_each(|n| sender.send(n).expect("the receiver is there")));
        let received: Vec<i32> = rt::block_on(async {
            let mut received = Vec::new();
            while received.len() < 100 {
                received.push(inbox.receive().await);
            }
            received
        });
        thread.join().expect("the thread ends");
        assert_eq!(received, (0..100).collect::<Vec<_>>());
    }

    #[test]
    fn without_a_receiver_messages_come_back() {
        let (sender, inbox) = inbox();
        drop(inbox);
        assert_eq!(sender.send(5), Err(5));
    }
}
