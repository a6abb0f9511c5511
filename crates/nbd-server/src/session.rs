// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The transmission phase of one connection.
//!
//! Workers take turns at reading. One waits for the next request, hands the turn on when it has it, carries it out and
//! queues the reply. They start when they are needed and live as long as the connection, so a request costs no new
//! task. Their number bounds the requests in flight.

use crate::Disk;
use crate::budget::Budget;
use crate::config::Limits;
use crate::intake::{Intake, IntakeRequest};
use crate::life::Life;
use crate::negotiation::NegotiatedOptions;
use crate::outbox::Outbox;
use crate::pool::Pool;
use crate::registry::ClientGuard;
use crate::signal::Watched;
use cowshed_nbd::{Receiver, Stream};
use cowshed_storage::rt;
use cowshed_types::{Error, ErrorKind, Result};
use futures_util::lock::Mutex;
use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Duration;

pub(crate) struct Session<D: Disk> {
    pub stay: ClientGuard<D>,
    pub terms: NegotiatedOptions,
    pub stream: Arc<Stream>,
    pub outbox: Outbox,
    pub disk: D::Queue,
    intake: Mutex<Intake>,
    pub budget: Rc<Budget>,
    pub stall_limit: Duration,
    pub life: Rc<Life>,
    max_workers: usize,
    workers: Cell<usize>,
    /// Workers that wait for their turn to read.
    idle: Cell<usize>,
    /// A worker has its turn: it waits for a request, or for the rest of one.
    reading: Cell<bool>,
    /// Behind the request that was taken last there is more that has been received.
    has_more: Cell<bool>,
    /// The reader waits until no request runs.
    waits_alone: Cell<Option<Waker>>,
    /// The last worker has ended.
    ended: Watched<bool>,
    error: RefCell<Option<Error>>,
}

/// Serves a client until it leaves, is lost or is sent away. Each request that has begun runs to its end. Once the
/// connection is dead none begins. An error names the fault of the client or the connection.
pub(crate) async fn run<D: Disk>(
    stay: ClientGuard<D>,
    terms: NegotiatedOptions,
    stream: Arc<Stream>,
    receiver: Receiver,
    limits: Limits,
    pool: &Arc<Pool>,
) -> Result<()> {
    let budget = Budget::new(limits.max_bytes_in_flight, pool, stream.socket(), &stay.served.memory);
    let session = Rc::new(Session {
        disk: stay.served.export.disk.queue(),
        stay,
        terms,
        stream,
        outbox: Outbox::new(),
        intake: Mutex::new(Intake::new(receiver)),
        budget,
        stall_limit: limits.stall_limit,
        life: Life::new(),
        max_workers: limits.max_requests,
        workers: Cell::new(0),
        idle: Cell::new(0),
        reading: Cell::new(false),
        has_more: Cell::new(false),
        waits_alone: Cell::new(None),
        ended: Watched::new(false),
        error: RefCell::default(),
    });
    let watch = rt::spawn({
        let session = Rc::clone(&session);
        async move { session.life.watch(&session.stream).await }
    });
    session.start_worker();
    session.ended.wait(|ended| ended.then_some(())).await;
    watch.cancel().await;
    session.stream.close().await;
    let error = session.error.take().or_else(|| session.outbox.take_error());
    if session.budget.account.is_cut() {
        return Err(Error::new(ErrorKind::Limit, "the client kept memory from others and neither sent nor received"));
    }
    match error {
        // A client that was cut off on purpose has no fault.
        Some(error) if !session.stay.client.is_closing() => Err(error),
        _ => Ok(()),
    }
}

impl<D: Disk> Session<D> {
    fn start_worker(self: &Rc<Self>) {
        self.workers.set(self.workers.get() + 1);
        let session = Rc::clone(self);
        drop(rt::spawn(async move {
            let cancel = Rc::clone(&session.life.cancel);
            cancel.cover(session.work()).await;
            let left = session.workers.get() - 1;
            session.workers.set(left);
            if left == 0 {
                session.ended.change(|ended| *ended = true);
            }
        }));
    }

    async fn work(self: &Rc<Self>) {
        while let Some(job) = self.next_job().await {
            if self.idle.get() == 0 && self.workers.get() < self.max_workers {
                self.start_worker();
            }
            self.carry_out(job).await;
            let busy = self.workers.get() - self.idle.get() - usize::from(self.reading.get());
            // A request that needs no waiting is carried out at once, so that the next one's reply may come as soon.
            let crowded = busy > 1 || self.has_more.get();
            self.outbox.send(&self.stream, &self.life, &self.budget.account, crowded).await;
        }
    }

    /// For the worker that reads: waits until all requests of the connection are answered. False when the client is gone.
    pub(crate) async fn wait_until_alone(&self) -> bool {
        poll_fn(|context| {
            if rt::is_cancelled() {
                return Poll::Ready(false);
            }
            if self.workers.get() - self.idle.get() == 1 {
                return Poll::Ready(true);
            }
            self.waits_alone.set(Some(context.waker().clone()));
            Poll::Pending
        })
        .await
    }

    async fn next_job(&self) -> Option<IntakeRequest> {
        self.idle.set(self.idle.get() + 1);
        if let Some(waker) = self.waits_alone.take() {
            waker.wake();
        }
        let mut intake = self.intake.lock().await;
        self.idle.set(self.idle.get() - 1);
        if intake.ended {
            return None;
        }
        self.reading.set(true);
        let next = intake.next(self).await;
        self.reading.set(false);
        self.has_more.set(!intake.is_empty());
        match next {
            Ok(Some(job)) => {
                rt::note_request();
                return Some(job);
            }
            Ok(None) => {}
            Err(error) => {
                self.error.borrow_mut().get_or_insert(error);
            }
        }
        intake.ended = true;
        None
    }
}
