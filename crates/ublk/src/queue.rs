// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The thread of a queue: a task for each tag waits for its request, carries it out, and waits for the next one.

use crate::requests::{self, DeviceRules, PIECE_BYTES};
use cowshed_image::graph::{Attachment, Queue};
use cowshed_storage::rt::{self, PollLimit};
use cowshed_storage::signal::Watched;
use cowshed_storage::{UblkDevice, UblkQueue, UblkShape};
use cowshed_types::{Error, Result};
use cowshed_ublk_proto::{Arrival, Limits, Malformed, Operation, Request, Tags};
use rustix::io::Errno as Number;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::task::{Poll, Waker};
use std::time::Duration;

/// Buffers of the requests of one thread, in bytes; one request may always run.
const MAX_BYTES_IN_FLIGHT: u64 = 32 << 20;
/// The driver refuses a command at once or not at all.
const REFUSAL: Duration = Duration::from_millis(1);

/// The settings that all queues of a device have in common.
#[derive(Clone)]
pub(crate) struct QueueSettings {
    pub ways: DeviceRules,
    pub limits: Limits,
    pub attachment: Arc<Attachment>,
    pub poll_limit: PollLimit,
    /// Threads that run.
    pub threads: Arc<Watched<usize>>,
    /// Called by the last thread.
    pub on_end: Arc<dyn Fn() + Send + Sync>,
}

/// Counts a thread, also where it panics.
struct Running(QueueSettings);

impl Drop for Running {
    fn drop(&mut self) {
        let left = self.0.threads.change(|threads| {
            *threads -= 1;
            *threads
        });
        if left == 0 {
            (self.0.on_end)();
        }
    }
}

/// Starts the thread of a queue. It reports that the driver has all of its tags, or the fault.
pub(crate) fn spawn<D: UblkDevice>(
    device: &Arc<D>,
    common: &QueueSettings,
    shape: UblkShape,
    prepared: SyncSender<Result<()>>,
) -> Result<()> {
    let (device, common) = (Arc::clone(device), common.clone());
    common.threads.change(|threads| *threads += 1);
    let running = Running(common);
    let serve = move || {
        let running = running;
        let outcome = rt::prepare().and_then(|()| {
            device.queue(shape).map_err(|errno| Error::os(errno, "could not open a queue of the ublk device"))
        });
        // The queue keeps the char device open from here on.
        drop(device);
        match outcome {
            // The owner may have given up: an earlier queue was refused.
            Err(error) => drop(prepared.send(Err(error))),
            Ok(queue) => rt::block_on(serve(&running.0, queue, shape.depth, prepared)),
        }
    };
    let spawned = std::thread::Builder::new().name(format!("ublk-{}", shape.queue)).spawn(serve);
    spawned.map(drop).map_err(|error| Error::io(&error, "could not start a thread"))
}

/// The state that the tasks of a thread share.
struct Shared<Q> {
    common: QueueSettings,
    queue: Q,
    disk: Queue,
    tags: RefCell<Tags>,
    budget: Budget,
    refused: Cell<Option<i32>>,
}

async fn serve<Q: UblkQueue>(common: &QueueSettings, queue: Q, depth: u16, prepared: SyncSender<Result<()>>) {
    rt::poll_up_to(common.poll_limit.clone());
    rt::sleep_exactly();
    let disk = common.attachment.queue();
    let shared = Rc::new(Shared {
        common: common.clone(),
        queue,
        disk,
        tags: RefCell::new(Tags::new(depth)),
        budget: Budget::new(MAX_BYTES_IN_FLIGHT),
        refused: Cell::new(None),
    });
    let tasks: Vec<rt::JoinHandle<()>> = (0..depth)
        .map(|tag| {
            let shared = Rc::clone(&shared);
            rt::spawn(async move { shared.serve_tag(tag).await })
        })
        .collect();
    rt::sleep(REFUSAL).await;
    let outcome = match shared.refused.get() {
        None => Ok(()),
        Some(number) if number == Number::NOSYS.raw_os_error() => {
            Err(Error::unsupported("an export of the type 'ublk' needs io_uring, which is not to be had here"))
        }
        Some(number) => Err(Error::os(cowshed_types::Errno(number), "the ublk driver refuses to serve a queue")),
    };
    // As above.
    drop(prepared.send(outcome));
    for task in tasks {
        task.await;
    }
}

impl<Q: UblkQueue> Shared<Q> {
    async fn serve_tag(&self, tag: u16) {
        if let Err(error) = self.serve_requests(tag).await {
            // The tag is used no more: whatever its turn was, the driver and we don't agree on it.
            tracing::error!(export = &*self.common.ways.id, tag, %error, "the ublk driver breaks its rules");
        }
    }

    async fn serve_requests(&self, tag: u16) -> std::result::Result<(), Malformed> {
        self.tags.borrow_mut().fetch(tag)?;
        let mut result = self.queue.fetch(tag).await;
        loop {
            let arrival = self.tags.borrow_mut().arrive(tag, result)?;
            match arrival {
                Arrival::Request => {}
                Arrival::Stopped => return Ok(()),
                Arrival::Refused(number) => {
                    self.refused.set(Some(number));
                    tracing::error!(export = &*self.common.ways.id, tag, number, "the ublk driver refuses a command");
                    return Ok(());
                }
            }
            rt::note_request();
            let answer = self.carry_out(tag).await;
            self.tags.borrow_mut().commit(tag)?;
            result = self.queue.commit(tag, answer).await;
        }
    }

    async fn carry_out(&self, tag: u16) -> i32 {
        let request = match Request::parse(&self.queue.descriptor(tag), &self.common.limits) {
            Ok(request) => request,
            Err(error) => {
                tracing::error!(export = &*self.common.ways.id, tag, %error, "a request that breaks the rules");
                return -Number::IO.raw_os_error();
            }
        };
        let bytes = match request.operation {
            Operation::Read | Operation::Write { .. } => request.len.min(PIECE_BYTES),
            _ => 0,
        };
        self.budget.take(bytes).await;
        let answer = requests::run(&self.disk, &self.common.ways, &self.queue, tag, request).await;
        self.budget.give(bytes);
        answer
    }
}

/// Bytes that a thread may use, first come, first served.
struct Budget {
    most: u64,
    used: Cell<u64>,
    waiting: RefCell<VecDeque<(u64, Waker)>>,
    next: Cell<u64>,
}

impl Budget {
    fn new(most: u64) -> Budget {
        Budget { most, used: Cell::new(0), waiting: RefCell::default(), next: Cell::new(0) }
    }

    async fn take(&self, bytes: u64) {
        if bytes == 0 {
            return;
        }
        let mut number = None;
        poll_fn(|context| {
            let mut waiting = self.waiting.borrow_mut();
            let is_first = waiting.front().is_none_or(|(first, _)| Some(*first) == number);
            let fits = self.used.get() == 0 || self.used.get() + bytes <= self.most;
            if is_first && fits {
                if number.is_some() {
                    waiting.pop_front();
                }
                self.used.set(self.used.get() + bytes);
                // The next one may fit as well.
                if let Some((_, waker)) = waiting.front() {
                    waker.wake_by_ref();
                }
                return Poll::Ready(());
            }
            let own = *number.get_or_insert_with(|| self.next.replace(self.next.get() + 1));
            match waiting.iter_mut().find(|(other, _)| *other == own) {
                Some((_, waker)) => waker.clone_from(context.waker()),
                None => waiting.push_back((own, context.waker().clone())),
            }
            Poll::Pending
        })
        .await;
    }

    fn give(&self, bytes: u64) {
        self.used.set(self.used.get() - bytes);
        if let Some((_, waker)) = self.waiting.borrow().front() {
            waker.wake_by_ref();
        }
    }
}
