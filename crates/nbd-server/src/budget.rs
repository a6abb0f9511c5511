// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The memory that the requests of one connection may hold: a share of its own, and beyond that a part of the server's pool.

use crate::pool::{Account, ExportShare, Pool};
use cowshed_storage::{Socket, rt};
use futures_util::future::{Either, select};
use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Duration;

/// The share that a connection has for itself, in bytes: it goes on when the pool is empty.
pub(crate) const OWN_BYTES: u64 = 1 << 20;

/// The part of that share that a longer request gets at a time when the pool has nothing for it, in bytes.
pub(crate) const PIECE_BYTES: u64 = OWN_BYTES / 2;
/// So long a request waits for the pool before it goes on in pieces.
const POOL_PATIENCE: Duration = Duration::from_millis(250);

/// Counts bytes in flight.
#[derive(Debug)]
pub(crate) struct Budget {
    limit_bytes: u64,
    /// The memory of all requests that may begin, in bytes.
    used_bytes: Cell<u64>,
    /// The taken part of the connection's own share, in bytes.
    own_bytes: Cell<u64>,
    pool: Arc<Pool>,
    pub account: Arc<Account>,
    /// The last long request got no memory of the pool: the next one doesn't wait.
    is_pool_taken: Cell<bool>,
    /// The task that reads the requests; only one at a time does.
    waiting: RefCell<Option<Waker>>,
}

/// Bytes of a [`Budget`], held until this is dropped.
#[derive(Debug)]
pub(crate) struct Permit {
    budget: Rc<Budget>,
    bytes: u64,
    is_shared: bool,
    /// The disk has the request that this is for, by the pool's number.
    work: Cell<Option<u64>>,
    /// Counts against the connection's limit.
    counts: bool,
}

impl Permit {
    /// The number of these bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// True for memory of the pool.
    pub(crate) fn is_shared(&self) -> bool {
        self.is_shared
    }

    /// The disk begins with the request.
    pub(crate) fn begin_work(&self) {
        if self.is_shared {
            self.work.set(Some(self.budget.pool.begin_work(&self.budget.account, self.bytes)));
        }
    }

    /// The disk has done its part.
    pub(crate) fn end_work(&self) {
        if let Some(ticket) = self.work.take() {
            self.budget.pool.end_work(ticket);
        }
    }
}

impl Budget {
    pub(crate) fn new(limit_bytes: u64, pool: &Arc<Pool>, socket: &Socket, export: &Arc<ExportShare>) -> Rc<Budget> {
        Rc::new(Budget {
            limit_bytes,
            used_bytes: Cell::new(0),
            own_bytes: Cell::new(0),
            pool: Arc::clone(pool),
            account: pool.open(socket, export),
            is_pool_taken: Cell::new(false),
            waiting: RefCell::default(),
        })
    }

    /// The limit that it was made with, in bytes.
    pub(crate) fn limit_bytes(&self) -> u64 {
        self.limit_bytes
    }

    /// Waits until `bytes` fit, or nothing else is in flight. One caller at a time. `None`: the client is gone.
    pub(crate) async fn take(self: &Rc<Self>, bytes: u64) -> Option<Permit> {
        match self.is_below_limit(bytes) && self.take_own(bytes) {
            true => Some(self.permit(bytes, false, true)),
            false => Box::pin(self.wait(bytes, || false)).await,
        }
    }

    /// As [`Budget::take`], but a long request may get only `PIECE_BYTES`, where `may_be_some`. That is one longer than
    /// the connection's own share which finds no memory in the pool soon.
    pub(crate) async fn take_some(self: &Rc<Self>, bytes: u64, may_be_some: impl Fn() -> bool) -> Option<Permit> {
        match self.is_below_limit(bytes) && self.take_own(bytes) {
            true => Some(self.permit(bytes, false, true)),
            false => Box::pin(self.wait(bytes, || bytes > OWN_BYTES && may_be_some())).await,
        }
    }

    /// As [`Budget::take`], for at most `limit`.
    pub(crate) async fn take_within(self: &Rc<Self>, bytes: u64, limit: Duration) -> Option<Permit> {
        match select(pin!(self.take(bytes)), pin!(rt::sleep(limit))).await {
            Either::Left((permit, _)) => permit,
            Either::Right(_) => None,
        }
    }

    /// Memory for requests that may never begin, beside the connection's limit. Waits for at most `limit`.
    pub(crate) async fn take_aside(self: &Rc<Self>, bytes: u64, limit: Duration) -> Option<Permit> {
        if self.take_own(bytes) {
            return Some(self.permit(bytes, false, false));
        }
        let taking = pin!(self.pool.take(&self.account, bytes, |_| rt::is_cancelled()));
        match select(taking, pin!(rt::sleep(limit))).await {
            Either::Left((true, _)) => Some(self.permit(bytes, true, false)),
            _ => None,
        }
    }

    /// Requests end, and requests of other connections end.
    async fn wait(self: &Rc<Self>, bytes: u64, may_be_some: impl Fn() -> bool) -> Option<Permit> {
        loop {
            poll_fn(|context| match rt::is_cancelled() || self.is_below_limit(bytes) {
                true => Poll::Ready(()),
                false => {
                    self.waiting.replace(Some(context.waker().clone()));
                    Poll::Pending
                }
            })
            .await;
            if rt::is_cancelled() {
                return None;
            }
            if self.take_own(bytes) {
                return Some(self.permit(bytes, false, true));
            }
            let has_own_room = |waker: &Waker| {
                self.waiting.replace(Some(waker.clone()));
                rt::is_cancelled() || self.has_own(bytes)
            };
            let taking = pin!(self.pool.take(&self.account, bytes, has_own_room));
            match select(taking, pin!(self.wait_for_piece(&may_be_some))).await {
                Either::Left((true, _)) => {
                    self.is_pool_taken.set(false);
                    return Some(self.permit(bytes, true, true));
                }
                Either::Left((false, _)) => {}
                Either::Right(_) => {
                    self.is_pool_taken.set(true);
                    return Some(self.permit(PIECE_BYTES, false, true));
                }
            }
        }
    }

    /// Takes a piece of the own share when the pool has had its time, and `may_be_some`.
    async fn wait_for_piece(&self, may_be_some: impl Fn() -> bool) {
        if !self.is_pool_taken.get() {
            rt::sleep(POOL_PATIENCE).await;
        }
        poll_fn(|context| {
            if may_be_some() && self.take_own(PIECE_BYTES) {
                return Poll::Ready(());
            }
            self.waiting.replace(Some(context.waker().clone()));
            Poll::Pending
        })
        .await;
    }

    fn is_below_limit(&self, bytes: u64) -> bool {
        let used = self.used_bytes.get();
        used == 0 || used.saturating_add(bytes) <= self.limit_bytes
    }

    fn has_own(&self, bytes: u64) -> bool {
        self.own_bytes.get().saturating_add(bytes) <= OWN_BYTES
    }

    fn take_own(&self, bytes: u64) -> bool {
        let has = self.has_own(bytes);
        if has {
            self.own_bytes.set(self.own_bytes.get() + bytes);
        }
        has
    }

    fn permit(self: &Rc<Self>, bytes: u64, is_shared: bool, counts: bool) -> Permit {
        if counts {
            self.used_bytes.set(self.used_bytes.get().saturating_add(bytes));
        }
        if is_shared {
            // A send that waits already keeps this memory, too.
            self.account.sending.count();
        }
        Permit { budget: Rc::clone(self), bytes, is_shared, work: Cell::new(None), counts }
    }
}

impl Drop for Budget {
    fn drop(&mut self) {
        self.pool.close(&self.account);
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.end_work();
        let budget = &self.budget;
        if self.counts {
            budget.used_bytes.set(budget.used_bytes.get().saturating_sub(self.bytes));
        }
        match self.is_shared {
            true => budget.pool.give(&budget.account, self.bytes),
            false => budget.own_bytes.set(budget.own_bytes.get().saturating_sub(self.bytes)),
        }
        let waker = budget.waiting.take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}
