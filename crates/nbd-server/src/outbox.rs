// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Replies on their way out. A task that queues one while no other sends becomes the sender of all.

use crate::budget::Permit;
use crate::life::Life;
use crate::pool::Account;
use cowshed_nbd::Stream;
use cowshed_nbd_proto::reply::Head;
use cowshed_storage::{Dispatch, IoBuf, rt};
use cowshed_types::{Error, Result};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::task::{Poll, Waker};

/// Buffers of one system call.
const MAX_BUFFERS: usize = 256;
/// Bytes of one system call, about. They are enough for the wire, and few enough to let other clients of the thread
/// come in between. They also distinguish a peer that takes nothing from a slow one.
const MAX_BYTES: usize = 1 << 20;
/// Room for the headers of one system call.
const HEAD_BYTES: usize = 4096;
/// The most replies that wait; the task of a further one waits with it.
const MAX_WAITING: usize = 1024;

/// A part of a reply. The parts of one chunk follow one another in the queue.
#[derive(Debug)]
pub(crate) enum ReplyPart {
    Head(Head),
    Data(IoBuf),
    /// The permit of the data before it, given back when it is sent.
    Sent(Permit),
}

#[derive(Debug)]
pub(crate) struct Outbox {
    queue: RefCell<VecDeque<ReplyPart>>,
    is_sending: Cell<bool>,
    /// The tasks that wait for room in the queue.
    waiting: RefCell<Vec<Waker>>,
    error: RefCell<Option<Error>>,
    /// Kept for the next call.
    buffers: RefCell<Vec<IoBuf>>,
}

impl Outbox {
    pub(crate) fn new() -> Outbox {
        Outbox {
            queue: RefCell::default(),
            is_sending: Cell::new(false),
            waiting: RefCell::default(),
            error: RefCell::default(),
            buffers: RefCell::default(),
        }
    }

    /// The first failure; nothing is sent after it.
    pub(crate) fn take_error(&self) -> Option<Error> {
        self.error.take()
    }

    /// Queues a reply. [`Outbox::send`] must follow.
    pub(crate) fn push(&self, pieces: impl IntoIterator<Item = ReplyPart>) {
        let mut queue = self.queue.borrow_mut();
        pieces.into_iter().for_each(|piece| queue.push_back(piece));
    }

    /// Sends the queued replies, or leaves that to the present sender. `crowded`: other replies are about to come, so a
    /// moment's wait saves system calls; the one of many clients' requests goes along with theirs.
    pub(crate) async fn send(&self, stream: &Stream, life: &Life, account: &Account, crowded: bool) {
        if self.is_sending.replace(true) {
            self.wait_for_room().await;
            return;
        }
        if crowded {
            rt::yield_now().await;
        }
        let dispatch = if crowded { Dispatch::Together } else { Dispatch::Alone };
        while let Some((buffers, permits, bytes)) = self.take() {
            let is_broken = self.error.borrow().is_some();
            account.sending.begin(bytes, account.holds());
            let result = if is_broken { Ok(()) } else { self.send_buffers(stream, buffers, dispatch).await };
            if let Err(error) = result {
                life.die(stream);
                self.error.borrow_mut().get_or_insert(error);
            }
            account.sending.end(account.holds());
            drop(permits);
            self.waiting.take().into_iter().for_each(Waker::wake);
            if bytes >= MAX_BYTES {
                rt::yield_now().await;
            }
        }
        self.is_sending.set(false);
    }

    async fn send_buffers(&self, stream: &Stream, buffers: Vec<IoBuf>, dispatch: Dispatch) -> Result<()> {
        let (result, mut buffers) = stream.send(buffers, dispatch).await;
        buffers.clear();
        self.buffers.replace(buffers);
        result
    }

    async fn wait_for_room(&self) {
        poll_fn(|context| {
            if self.queue.borrow().len() < MAX_WAITING {
                return Poll::Ready(());
            }
            self.waiting.borrow_mut().push(context.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// The buffers of the next system call, the permits to give back after it, and the bytes of data; `None` when
    /// nothing waits.
    fn take(&self) -> Option<(Vec<IoBuf>, Vec<Permit>, usize)> {
        let mut queue = self.queue.borrow_mut();
        if queue.is_empty() {
            return None;
        }
        let mut buffers = self.buffers.take();
        let mut permits = Vec::new();
        let mut heads = IoBuf::scratch(HEAD_BYTES);
        // Headers that no buffer has been made of yet: this many bytes at the start of `heads`.
        let mut filled = 0;
        let mut bytes = 0;
        while let Some(piece) = queue.pop_front() {
            match piece {
                ReplyPart::Head(head) => {
                    if filled + head.len() > heads.len() {
                        queue.push_front(ReplyPart::Head(head));
                        break;
                    }
                    heads[filled..filled + head.len()].copy_from_slice(&head);
                    filled += head.len();
                }
                ReplyPart::Data(mut data) => {
                    if filled > 0 {
                        buffers.push(heads.split_to(filled));
                        filled = 0;
                    }
                    // The rest of a long one goes with the next call.
                    let rest = data.len().saturating_sub(MAX_BYTES - bytes);
                    if rest > 0 {
                        let rest = data.split_off(data.len() - rest);
                        queue.push_front(ReplyPart::Data(rest));
                    }
                    bytes += data.len();
                    buffers.push(data);
                }
                ReplyPart::Sent(permit) => permits.push(permit),
            }
            let is_full = buffers.len() + 2 >= MAX_BUFFERS || bytes >= MAX_BYTES;
            if is_full && !matches!(queue.front(), Some(ReplyPart::Sent(_))) {
                break;
            }
        }
        if filled > 0 {
            buffers.push(heads.split_to(filled));
        }
        Some((buffers, permits, bytes))
    }
}
