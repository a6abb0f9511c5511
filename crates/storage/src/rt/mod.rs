// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The runtime: one small executor and one ring per thread. Tasks never migrate.

mod cancel;
mod completion;
mod executor;
mod nested;
mod polling;
mod pool;
mod timer;

pub use cancel::{Cancel, is_cancelled};
pub use completion::{Completion, Owner, is_left, to_completion, to_completion_of};
pub(crate) use executor::with_current;
pub use executor::{Local, Simulation};
pub use nested::{is_deep, nested};
pub use polling::PollLimit;
pub(crate) use pool::ThreadPool;

use crate::ring::Ring;
use cowshed_types::{Error, Result};
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

/// Makes this thread's executor, which the first [`block_on`] would do otherwise.
///
/// # Errors
/// When the process has no file descriptor left.
pub fn prepare() -> Result<()> {
    executor::prepare_thread().map_err(|error| Error::io(&error, "could not make an executor"))
}

/// Makes this thread look for completions itself before it sleeps, for as long as that has paid and `limit` allows. It
/// serves threads that answer others: their next request often comes before a sleep would have been worth it. Looking
/// keeps a core busy. Without effect in a simulation and where there is no io_uring.
///
/// # Panics
/// Outside of [`block_on`].
pub fn poll_up_to(limit: PollLimit) {
    with_current(|local| {
        let local = local.expect("poll_up_to outside of block_on");
        local.poll_limit.replace(Some(limit));
    });
}

/// Counts a request of those whom this thread answers. With many of them between two waits it doesn't look for more
/// ([`poll_up_to`]): they gather while it sleeps.
#[inline]
pub fn note_request() {
    executor::REQUESTS.set(executor::REQUESTS.get().wrapping_add(1));
}

/// Runs `future` to its end on this thread, with this thread's ring and executor. Tasks that it spawned and that haven't
/// ended go on in the thread's next call.
///
/// # Panics
/// When called inside of another `block_on`; when the process has no file descriptor left for the executor ([`prepare`]
/// reports that without a panic).
pub fn block_on<F: Future>(future: F) -> F::Output {
    executor::block_on_thread(future)
}

/// Starts a task on this thread's executor; it may be not `Send` and never migrates. Dropping the handle detaches it.
///
/// # Panics
/// Outside of [`block_on`]. A panic of the task itself goes through `block_on`.
pub fn spawn<T: 'static>(future: impl Future<Output = T> + 'static) -> JoinHandle<T> {
    with_current(|local| {
        let local = local.expect("spawn outside of block_on");
        JoinHandle { task: Some(local.spawn(future)) }
    })
}

/// The result of a task.
pub struct JoinHandle<T> {
    task: Option<async_task::Task<T>>,
}

impl<T> JoinHandle<T> {
    /// Drops the task's future at its next suspension; `None` when it was cancelled before its end.
    pub async fn cancel(mut self) -> Option<T> {
        match self.task.take() {
            Some(task) => task.cancel().await,
            None => None,
        }
    }

    /// True when the task has ended.
    pub fn is_finished(&self) -> bool {
        self.task.as_ref().is_none_or(async_task::Task::is_finished)
    }
}

impl<T> Future for JoinHandle<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        match self.task.as_mut() {
            Some(task) => Pin::new(task).poll(context),
            None => Poll::Pending,
        }
    }
}

impl<T> Drop for JoinHandle<T> {
    fn drop(&mut self) {
        if let Some(task) = self.task.take() {
            task.detach();
        }
    }
}

/// Runs CPU work on a process-wide pool sized to the cores and waits without blocking this thread. Under the
/// simulator the work runs inline, so that runs stay deterministic. A panic of the work continues here.
pub async fn run_on_cpu_pool<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    if is_simulated() {
        return work();
    }
    ThreadPool::cpu().run(work).await
}

/// Runs the future of `work` on another thread, on an executor of that thread. It serves requests that keep a core busy
/// in system calls, as copying out of the page cache does. It runs to its end even when this future is dropped. It
/// stays on this thread where another core, a thread or a file descriptor for an executor is missing, and under the
/// simulator. A panic of the work continues here.
pub async fn beside<T: Send + 'static, F: Future<Output = T> + 'static>(
    work: impl FnOnce() -> F + Send + 'static,
) -> T {
    static HAS_CORES: LazyLock<bool> =
        LazyLock::new(|| std::thread::available_parallelism().is_ok_and(|cores| cores.get() > 1));
    if is_simulated() || !*HAS_CORES {
        return work().await;
    }
    to_completion(async move {
        let outcome = ThreadPool::io().run(move || {
            // A pool that could start no thread at all works on the caller's, which has an executor running.
            if with_current(|local| local.is_some()) || prepare().is_err() {
                return Err(work);
            }
            Ok(block_on(work()))
        });
        match outcome.await {
            Ok(output) => output,
            Err(work) => work().await,
        }
    })
    .await
}

/// Waits. Under the simulator time is virtual.
pub async fn sleep(duration: Duration) {
    match current_simulation() {
        Some(simulation) => simulation.sleep(duration).await,
        None => timer::Sleep::new(duration).await,
    }
}

/// The output of `work`, or nothing when `limit` is over first; then `work` is dropped. Requests that it has begun are carried
/// out then, but the steps behind them are not. So work whose steps belong together comes as a task, which goes on without its
/// handle.
pub async fn within<T>(limit: Duration, work: impl Future<Output = T>) -> Option<T> {
    let (mut work, mut over) = (pin!(work), pin!(sleep(limit)));
    poll_fn(|context| match work.as_mut().poll(context) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending => over.as_mut().poll(context).map(|()| None),
    })
    .await
}

/// A clock that never goes back, from an arbitrary start. Under the simulator time is virtual.
pub fn now() -> Duration {
    match current_simulation() {
        Some(simulation) => simulation.now(),
        None => Duration::from_nanos(since_start_ns()),
    }
}

/// As [`now`], in nanoseconds: never 0 outside of the simulator. Out of the way of requests, which look at the clock
/// only where latencies are watched.
#[cold]
pub fn now_ns() -> u64 {
    u64::try_from(now().as_nanos()).unwrap_or(u64::MAX)
}

/// The time of a clock of the system, in nanoseconds. Not `Instant`: subtracting one from another costs several times
/// the reading of the clock.
fn clock_ns(clock: libc::clockid_t) -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a timespec of ours. The call can't fail: every Linux has the clocks that are asked for here.
    unsafe { libc::clock_gettime(clock, &raw mut time) };
    time.tv_sec.cast_unsigned() * 1_000_000_000 + time.tv_nsec.cast_unsigned()
}

/// From now on sleeps of this thread end when they are to, not up to 50 µs later as the system has it by default.
pub fn sleep_exactly() {
    // Refused by no Linux; where a sandbox does, sleeps are longer.
    let _ = rustix::thread::set_current_timer_slack(std::num::NonZero::new(1));
}

/// Nanoseconds since this was first asked, and one: never 0.
fn since_start_ns() -> u64 {
    static START_NS: AtomicU64 = AtomicU64::new(0);
    let now_ns = clock_ns(libc::CLOCK_MONOTONIC);
    let start_ns = match START_NS.load(Ordering::Relaxed) {
        0 => match START_NS.compare_exchange(0, now_ns, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => now_ns,
            Err(first_ns) => first_ns,
        },
        start_ns => start_ns,
    };
    now_ns.saturating_sub(start_ns) + 1
}

/// As [`now`] in nanoseconds, but looks at the clock once in a round of this thread's executor. A round runs the tasks
/// that can run, then looks for completions. It serves statistics, which need the time many times in a request.
#[inline]
pub fn round_now_ns() -> u64 {
    match executor::ROUND_NS.get() {
        0 => look_at_the_clock(),
        noted => noted,
    }
}

#[cold]
fn look_at_the_clock() -> u64 {
    with_current(|local| {
        let now_ns = match local.and_then(|local| local.simulation()) {
            Some(simulation) => u64::try_from(simulation.now().as_nanos()).unwrap_or(u64::MAX),
            None => since_start_ns(),
        };
        // Outside of an executor there are no rounds.
        if local.is_some() {
            executor::ROUND_NS.set(now_ns);
        }
        now_ns
    })
}

/// Lets other tasks of this thread run.
pub async fn yield_now() {
    let mut yielded = false;
    std::future::poll_fn(|context| {
        if std::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// Runs a task to its end even without a waiter: [`block_on`] doesn't return before. It serves work that other threads
/// wait for. Outside of `block_on` the future is given back.
pub fn spawn_critical<F: Future<Output = ()> + 'static>(future: F) -> Result<(), F> {
    with_current(|local| {
        let Some(local) = local else { return Err(future) };
        let obligation = Obligation::new(local);
        local
            .spawn(async move {
                let _obligation = obligation;
                future.await;
            })
            .detach();
        Ok(())
    })
}

struct Obligation {
    state: Rc<executor::LocalState>,
}

impl Obligation {
    fn new(state: &Rc<executor::LocalState>) -> Self {
        state.obligations.set(state.obligations.get() + 1);
        Obligation { state: Rc::clone(state) }
    }
}

impl Drop for Obligation {
    fn drop(&mut self) {
        self.state.obligations.set(self.state.obligations.get() - 1);
    }
}

/// True when the running executor is a simulation's.
pub fn is_simulated() -> bool {
    with_current(|local| local.is_some_and(|local| local.simulation().is_some()))
}

/// True inside of [`block_on`] and of a simulation.
pub(crate) fn has_executor() -> bool {
    with_current(|local| local.is_some())
}

/// True when this thread's executor would only wait, see [`executor::LocalState::is_alone`].
pub(crate) fn is_alone() -> bool {
    with_current(|local| local.is_some_and(|local| local.is_alone()))
}

/// The running executor's ring; `None` without one, in a simulation and outside of [`block_on`].
pub(crate) fn current_ring() -> Option<Rc<Ring>> {
    with_current(|local| local.and_then(|local| local.ring().cloned()))
}

/// True where [`current_ring`] has one, or hasn't been asked yet: a ring isn't made for the question.
pub(crate) fn may_have_ring() -> bool {
    with_current(|local| local.is_some_and(|local| local.may_have_ring()))
}

/// True when the running executor has a ring already.
#[cfg(test)]
pub(crate) fn has_made_ring() -> bool {
    with_current(|local| local.is_some_and(|local| local.has_made_ring()))
}

/// The simulation that the running executor belongs to.
pub(crate) fn current_simulation() -> Option<Rc<dyn Simulation>> {
    with_current(|local| local.and_then(|local| local.simulation().cloned()))
}
