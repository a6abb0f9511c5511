// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Threads that block so that an executor's thread doesn't: one pool for CPU work, one for system calls.

use cowshed_types::without;
use std::any::Any;
use std::collections::VecDeque;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

/// Threads of the pool for system calls: as deep a queue as one device can use, and few enough to hold in memory.
const IO_THREADS: usize = 64;
/// A thread without work for that long ends.
const IDLE: Duration = Duration::from_secs(5);

static CPU: LazyLock<ThreadPool> = LazyLock::new(|| {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    ThreadPool::new("cowshed-cpu", if without!("all_cores") { 1 } else { cores })
});
static IO: LazyLock<ThreadPool> = LazyLock::new(|| ThreadPool::new("cowshed-io", IO_THREADS));

type Job = Box<dyn FnOnce() + Send>;

/// A pool that starts threads as work comes, up to a limit.
pub(crate) struct ThreadPool {
    thread_name: &'static str,
    max_threads: usize,
    state: Mutex<WorkQueue>,
    work_came: Condvar,
}

#[derive(Default)]
struct WorkQueue {
    queue: VecDeque<Job>,
    threads: usize,
    idle: usize,
}

/// Locks; a panic while it was held can't have broken the plain data inside.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ThreadPool {
    fn new(thread_name: &'static str, max_threads: usize) -> Self {
        ThreadPool { thread_name, max_threads, state: Mutex::default(), work_came: Condvar::new() }
    }

    /// For compression, ciphers, checksums: as many threads as cores.
    pub(crate) fn cpu() -> &'static ThreadPool {
        &CPU
    }

    /// For system calls that block.
    pub(crate) fn io() -> &'static ThreadPool {
        &IO
    }

    /// Runs `work` on a thread of the pool. It runs to its end even when the returned future is dropped.
    pub(crate) fn run<T: Send + 'static>(&'static self, work: impl FnOnce() -> T + Send + 'static) -> PoolOutcome<T> {
        let cell = Arc::new(Mutex::new(ResultCell { result: None, waker: None }));
        let outcome = PoolOutcome { cell: Arc::clone(&cell) };
        self.submit(Box::new(move || {
            let result = std::panic::catch_unwind(AssertUnwindSafe(work));
            let mut cell = lock(&cell);
            cell.result = Some(result);
            if let Some(waker) = cell.waker.take() {
                drop(cell);
                waker.wake();
            }
        }));
        outcome
    }

    fn submit(&'static self, job: Job) {
        let mut state = lock(&self.state);
        state.queue.push_back(job);
        if state.idle >= state.queue.len() || state.threads >= self.max_threads {
            drop(state);
            self.work_came.notify_one();
            return;
        }
        state.threads += 1;
        let builder = std::thread::Builder::new().name(self.thread_name.to_owned());
        if builder.spawn(move || self.serve()).is_ok() {
            return;
        }
        state.threads -= 1;
        if state.threads == 0 {
            // No thread to be had at all: slow is better than never.
            while let Some(job) = state.queue.pop_front() {
                drop(state);
                job();
                state = lock(&self.state);
            }
        }
    }

    fn serve(&self) {
        let mut state = lock(&self.state);
        loop {
            if let Some(job) = state.queue.pop_front() {
                drop(state);
                job();
                state = lock(&self.state);
                continue;
            }
            state.idle += 1;
            let (woken, timeout) = self.work_came.wait_timeout(state, IDLE).unwrap_or_else(PoisonError::into_inner);
            state = woken;
            state.idle -= 1;
            if timeout.timed_out() && state.queue.is_empty() {
                state.threads -= 1;
                return;
            }
        }
    }
}

struct ResultCell<T> {
    result: Option<Result<T, Box<dyn Any + Send>>>,
    waker: Option<Waker>,
}

/// The result of [`ThreadPool::run`]; a panic of the work continues in the awaiting task.
pub(crate) struct PoolOutcome<T> {
    cell: Arc<Mutex<ResultCell<T>>>,
}

impl<T> Future for PoolOutcome<T> {
    type Output = T;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        let mut cell = lock(&self.cell);
        match cell.result.take() {
            Some(Ok(value)) => Poll::Ready(value),
            Some(Err(panic)) => {
                drop(cell);
                std::panic::resume_unwind(panic)
            }
            None => {
                cell.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}
