// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The executor of one thread: a queue of tasks that can run, and its work while none can.
//!
//! Wakers may be used from any thread. On the executor's own thread a wake is a push to a local queue. From elsewhere
//! it goes through a locked queue and, only when the executor sleeps in the kernel, through an eventfd.

use super::polling::{Cores, FEW_REQUESTS, LOST_CORE, PollLimit, Polling, Wait};
use super::timer::{NextTimer, Timers};
use crate::OpenOptions;
use crate::ring::Ring;
use crate::simulated::SimulatedFile;
use async_task::Runnable;
use cowshed_types::Result;
use slab::Slab;
use std::cell::{Cell, OnceCell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

/// Tasks that run between two looks at the ring: enough to batch submissions, few enough to keep the disk busy.
const TASKS_PER_ROUND: usize = 256;
/// This many rounds may pass before the ring is looked at,
const ROUNDS_PAST_RING: u32 = 3;
/// while fewer operations than this are queued.
const FEW_OPERATIONS: usize = 8;

/// The world outside of the executor, when it isn't the operating system: a simulation.
pub trait Simulation {
    /// Called when no task can run. Completes one pending operation, or moves the clock to the next timer, and wakes
    /// the tasks that wait for it. Panics with the pending operations when nothing is left that could ever wake a task.
    fn advance(&self);
    /// Ready after `duration` of virtual time.
    fn sleep(&self, duration: Duration) -> Pin<Box<dyn Future<Output = ()>>>;
    /// Virtual time since the start.
    fn now(&self) -> Duration;
    /// Opens a file of this world; `None` leaves the name to the host's file system.
    fn open(&self, name: &str, options: &OpenOptions) -> Option<Result<Arc<dyn SimulatedFile>>> {
        let _ = (name, options);
        None
    }
    /// Makes the names of all files of this world durable; false where the host has them.
    fn sync_folder(&self) -> bool {
        false
    }
}

/// The part of an executor that other threads see.
struct Shared {
    /// Tasks woken by other threads.
    remote: Mutex<RemoteTasks>,
    /// Something is in `remote`, or `main_woken` was set by another thread.
    remote_came: AtomicBool,
    /// The future of `block_on` was woken.
    main_woken: AtomicBool,
    /// The executor is in, or about to enter, a wait that only `wake_fd` ends.
    asleep: AtomicBool,
    /// Counts wakes while asleep.
    wake_fd: OwnedFd,
}

#[derive(Default)]
struct RemoteTasks {
    tasks: VecDeque<Runnable>,
    /// The executor is gone: added tasks never run.
    closed: bool,
}

impl Shared {
    fn remote(&self) -> MutexGuard<'_, RemoteTasks> {
        self.remote.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the executor's sleep. Called after the reason was stored.
    fn notify(&self) {
        self.remote_came.store(true, Ordering::SeqCst);
        if self.asleep.swap(false, Ordering::SeqCst) {
            // Fails only when the counter is full, and then it is awake already.
            let _ = rustix::io::write(&self.wake_fd, &1u64.to_ne_bytes());
        }
    }

    fn schedule(self: &Arc<Self>, task: Runnable) {
        let mut task = Some(task);
        // During the destruction of the thread's variables there is no current executor.
        let _ = CURRENT.try_with(|current| {
            if let Ok(current) = current.try_borrow()
                && let Some(local) = current.as_ref()
                && Arc::ptr_eq(&local.shared, self)
                && let Some(task) = task.take()
            {
                local.ready.borrow_mut().push_back(task);
            }
        });
        let Some(task) = task else { return };
        let mut remote = self.remote();
        if remote.closed {
            // Its future may only be dropped on the executor's thread, which has ended: leak it.
            std::mem::forget(task);
            return;
        }
        remote.tasks.push_back(task);
        drop(remote);
        self.notify();
    }
}

impl Wake for Shared {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let here = CURRENT.try_with(|current| {
            current
                .try_borrow()
                .is_ok_and(|current| current.as_ref().is_some_and(|local| Arc::ptr_eq(&local.shared, self)))
        });
        self.main_woken.store(true, Ordering::SeqCst);
        if !here.unwrap_or(false) {
            self.notify();
        }
    }
}

enum Outside {
    /// The ring is made on first use; `None` inside when the kernel refuses one.
    System(OnceCell<Option<Rc<Ring>>>),
    Simulated(Rc<dyn Simulation>),
}

/// An executor's state on its own thread.
pub(crate) struct LocalState {
    shared: Arc<Shared>,
    ready: RefCell<VecDeque<Runnable>>,
    /// A waker for each task that hasn't ended, so that dropping the executor can drop them all.
    unfinished: RefCell<Slab<Waker>>,
    /// Detached tasks that must end before `block_on` may return, because other threads wait for them.
    pub(super) obligations: Cell<usize>,
    /// See [`LocalState::is_abandoned`].
    abandoned: Cell<bool>,
    /// Rounds since the ring was looked at.
    rounds_past_ring: Cell<u32>,
    pub(super) timers: RefCell<Timers>,
    /// The time of looking for news before a sleep; `None`: not at all.
    pub(super) poll_limit: RefCell<Option<PollLimit>>,
    polling: Cell<Polling>,
    /// Waits that ended without a sleep, because looking found something.
    #[cfg(test)]
    pub(super) found: Cell<u64>,
    outside: Outside,
}

thread_local! {
    /// The time that this round of the thread's executor goes by, once a task has asked for it; else 0. Not in the
    /// executor's state, because a look here costs next to nothing, and it is taken twice in each request.
    pub(super) static ROUND_NS: Cell<u64> = const { Cell::new(0) };
    /// Requests that this thread took since its executor last waited, see [`super::note_request`].
    pub(super) static REQUESTS: Cell<u32> = const { Cell::new(0) };
    /// The executor that runs on this thread now.
    static CURRENT: RefCell<Option<Rc<LocalState>>> = const { RefCell::new(None) };
    /// The executor of [`super::block_on`].
    static THREAD: OnceCell<Local> = const { OnceCell::new() };
}

/// Calls `f` with the running executor, if one runs on this thread.
pub(crate) fn with_current<T>(f: impl FnOnce(Option<&Rc<LocalState>>) -> T) -> T {
    let mut f = Some(f);
    // While a thread's variables are destroyed, the futures dropped then find no executor.
    let result = CURRENT.try_with(|current| f.take().map(|f| f(current.borrow().as_ref())));
    match (result, f) {
        (Ok(Some(result)), _) => result,
        (_, Some(f)) => f(None),
        (_, None) => unreachable!("`f` was called and gave a result"),
    }
}

/// An executor for one thread. [`super::block_on`] uses one that belongs to the thread; a simulation makes its own.
///
/// Dropping it drops every task that hasn't ended, but requests of [`super::to_completion`] end first. A simulation drops those too.
pub struct Local {
    state: Rc<LocalState>,
}

impl Local {
    fn with_outside(outside: Outside) -> std::io::Result<Self> {
        // Blocking, because the ring's read of it would return at once otherwise.
        let wake_fd = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)?;
        let shared = Shared {
            remote: Mutex::default(),
            remote_came: AtomicBool::new(false),
            main_woken: AtomicBool::new(false),
            asleep: AtomicBool::new(false),
            wake_fd,
        };
        let state = LocalState {
            shared: Arc::new(shared),
            ready: RefCell::default(),
            unfinished: RefCell::default(),
            obligations: Cell::new(0),
            abandoned: Cell::new(false),
            rounds_past_ring: Cell::new(0),
            timers: RefCell::default(),
            poll_limit: RefCell::default(),
            polling: Cell::default(),
            #[cfg(test)]
            found: Cell::new(0),
            outside,
        };
        Ok(Local { state: Rc::new(state) })
    }

    /// An executor on the operating system.
    ///
    /// # Panics
    /// When the process has no file descriptor left.
    pub fn system() -> Self {
        Self::with_outside(Outside::System(OnceCell::new())).expect("an eventfd for the executor")
    }

    /// An executor in a simulated world. Real files work in it too: their operations run inline.
    ///
    /// # Panics
    /// When the process has no file descriptor left.
    pub fn simulated(simulation: Rc<dyn Simulation>) -> Self {
        Self::with_outside(Outside::Simulated(simulation)).expect("an eventfd for the executor")
    }

    /// Runs `future` to its end, and with it the tasks that it spawns. Tasks left over go on in the next call.
    ///
    /// # Panics
    /// When called inside of another `block_on`.
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        let _entered = Entered::new(&self.state);
        // Obligations of the future, left behind when it is dropped, must end too.
        let output = self.run(future);
        self.state.end_obligations();
        output
    }

    fn run<F: Future>(&self, future: F) -> F::Output {
        let waker = Waker::from(Arc::clone(&self.state.shared));
        let mut context = Context::from_waker(&waker);
        let mut future = pin!(future);
        self.state.shared.main_woken.store(true, Ordering::SeqCst);
        loop {
            if self.state.shared.main_woken.load(Ordering::Relaxed)
                && self.state.shared.main_woken.swap(false, Ordering::SeqCst)
                && let Poll::Ready(output) = future.as_mut().poll(&mut context)
            {
                return output;
            }
            let next_timer = self.state.run_ready();
            self.state.wait(next_timer);
        }
    }
}

/// The time in which a thread runs an executor.
struct Entered;

impl Entered {
    fn new(state: &Rc<LocalState>) -> Self {
        Self::try_new(state).expect("the variables of the thread are there")
    }

    /// `None` while the thread's variables are destroyed.
    fn try_new(state: &Rc<LocalState>) -> Option<Self> {
        let entered = CURRENT.try_with(|current| {
            let mut current = current.borrow_mut();
            assert!(current.is_none(), "block_on inside of block_on");
            *current = Some(Rc::clone(state));
        });
        ROUND_NS.set(0);
        entered.is_ok().then_some(Entered)
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        ROUND_NS.set(0);
        let left = CURRENT.with(|current| current.borrow_mut().take());
        drop(left);
    }
}

impl LocalState {
    /// The thread's ring, made on first use; `None` in a simulation and where the kernel refuses.
    pub(crate) fn ring(&self) -> Option<&Rc<Ring>> {
        match &self.outside {
            Outside::System(ring) => ring
                .get_or_init(|| match Ring::new() {
                    Ok(ring) => Some(Rc::new(ring)),
                    Err(error) => {
                        tracing::debug!(%error, "no io_uring on this thread, using a thread pool");
                        None
                    }
                })
                .as_ref(),
            Outside::Simulated(_) => None,
        }
    }

    /// The simulation, if this executor runs in one.
    pub(crate) fn simulation(&self) -> Option<&Rc<dyn Simulation>> {
        match &self.outside {
            Outside::System(_) => None,
            Outside::Simulated(simulation) => Some(simulation),
        }
    }

    /// Puts a task in the queue.
    pub(super) fn spawn<T: 'static>(self: &Rc<Self>, future: impl Future<Output = T> + 'static) -> async_task::Task<T> {
        let mut unfinished = self.unfinished.borrow_mut();
        let entry = unfinished.vacant_entry();
        let registered = Registered { state: Rc::downgrade(self), key: entry.key() };
        let future = async move {
            let _registered = registered;
            future.await
        };
        let shared = Arc::clone(&self.shared);
        let (runnable, task) = async_task::spawn_local(future, move |task| shared.schedule(task));
        entry.insert(runnable.waker());
        drop(unfinished);
        runnable.schedule();
        task
    }

    fn existing_ring(&self) -> Option<&Rc<Ring>> {
        match &self.outside {
            Outside::System(ring) => ring.get().and_then(Option::as_ref),
            Outside::Simulated(_) => None,
        }
    }

    #[cfg(test)]
    pub(crate) fn has_made_ring(&self) -> bool {
        self.existing_ring().is_some()
    }

    /// False in a simulation, and where the kernel has refused a ring.
    pub(crate) fn may_have_ring(&self) -> bool {
        match &self.outside {
            Outside::System(ring) => ring.get().is_none_or(Option::is_some),
            Outside::Simulated(_) => false,
        }
    }

    /// True when this thread waits for nothing else and no other task of it can run. A task that blocks it keeps no
    /// other waiting then. Never true without a ring: the work of other threads for this one isn't seen.
    pub(crate) fn is_alone(&self) -> bool {
        let is_idle = match &self.outside {
            // Not made yet: nothing was asked for.
            Outside::System(ring) => ring.get().is_none_or(|ring| ring.as_ref().is_some_and(|ring| ring.is_idle())),
            Outside::Simulated(_) => false,
        };
        let woken_elsewhere = self.shared.remote_came.load(Ordering::Relaxed) && !self.shared.remote().tasks.is_empty();
        is_idle && self.ready.borrow().is_empty() && !woken_elsewhere
    }

    fn has_obligations(&self) -> bool {
        self.obligations.get() > 0 || self.existing_ring().is_some_and(|ring| ring.has_orphans())
    }

    /// Runs until no obligation is left. The executor is this thread's current one.
    fn end_obligations(&self) {
        while self.has_obligations() {
            let next_timer = self.run_ready();
            // The last one ends without a wake: a wait would be for ever.
            if self.has_obligations() {
                self.wait(next_timer);
            }
        }
    }

    /// As [`LocalState::end_obligations`], outside of [`super::block_on`]. False while the thread's variables are destroyed.
    pub(super) fn run_obligations(self: &Rc<Self>) -> bool {
        let entered = Entered::try_new(self);
        if entered.is_some() {
            self.end_obligations();
        }
        entered.is_some()
    }

    /// True when the executor is going and runs nothing any more.
    pub(super) fn is_abandoned(&self) -> bool {
        self.abandoned.get()
    }

    /// The first half of a round: runs tasks that can run, and returns when the next timer is due.
    fn run_ready(&self) -> Option<Instant> {
        ROUND_NS.set(0);
        self.take_remote();
        let runnable = self.ready.borrow().len();
        for _ in 0..runnable.min(TASKS_PER_ROUND) {
            let Some(task) = self.ready.borrow_mut().pop_front() else { break };
            task.run();
        }
        self.fire_timers()
    }

    /// The other half: submits queued operations, and waits when there is nothing else to do.
    fn wait(&self, next_timer: Option<Instant>) {
        let busy = !self.ready.borrow().is_empty() || self.shared.main_woken.load(Ordering::Relaxed);
        if busy {
            self.look_at_the_ring();
            return;
        }
        self.rounds_past_ring.set(0);
        match &self.outside {
            Outside::Simulated(simulation) => {
                if !self.shared.remote_came.load(Ordering::SeqCst) {
                    simulation.advance();
                }
            }
            Outside::System(_) => self.look_or_sleep(next_timer),
        }
        ROUND_NS.set(0);
    }

    /// Submits and takes completions between two rounds. A few operations wait for the next round's submission. Often
    /// that one ends with nothing left to do, and waiting submits them in the same system call.
    fn look_at_the_ring(&self) {
        let Some(ring) = self.existing_ring() else { return };
        let rounds = self.rounds_past_ring.get();
        if rounds < ROUNDS_PAST_RING && ring.queued() < FEW_OPERATIONS {
            self.rounds_past_ring.set(rounds + 1);
            return;
        }
        self.rounds_past_ring.set(0);
        ring.poll();
    }

    /// Wakes whose time has come; returns the next deadline.
    fn fire_timers(&self) -> Option<Instant> {
        loop {
            let next = self.timers.borrow_mut().next();
            match next {
                NextTimer::Due(waker) => waker.wake(),
                NextTimer::At(deadline) => return Some(deadline),
                NextTimer::Never => return None,
            }
        }
    }

    fn take_remote(&self) {
        if !self.shared.remote_came.load(Ordering::Relaxed) {
            return;
        }
        self.shared.remote_came.store(false, Ordering::SeqCst);
        let tasks = std::mem::take(&mut self.shared.remote().tasks);
        self.ready.borrow_mut().extend(tasks);
    }

    /// Looks for news for as long as that has paid, then sleeps.
    fn look_or_sleep(&self, next_timer: Option<Instant>) {
        let limit_ns = self.poll_limit.borrow().as_ref().map_or(0, PollLimit::as_nanos);
        let Some(ring) = self.existing_ring().filter(|_| limit_ns > 0) else {
            self.sleep(next_timer);
            return;
        };
        ring.forget_completed();
        let requests = REQUESTS.take();
        let is_quiet = requests <= FEW_REQUESTS;
        let mut polling = self.polling.get();
        if requests > 0 {
            polling.requests_came();
        }
        if ring.waits_for_disk() {
            // Data in the page cache are there as soon as they are asked for.
            if is_quiet {
                ring.poll();
            }
            if !ring.has_completed() {
                polling.waits_for_disk();
                self.sleep(next_timer);
            }
            self.polling.set(polling);
            return;
        }
        let start_ns = super::since_start_ns();
        let Some(look_ns) = polling.look_ns(limit_ns, start_ns).filter(|_| is_quiet) else {
            self.polling.set(polling);
            self.sleep(next_timer);
            return;
        };
        let mut found = None;
        if look_ns > 0 {
            let Some(_core) = Cores::of_machine().take() else {
                self.polling.set(polling);
                self.sleep(next_timer);
                return;
            };
            found = self.look(ring, Duration::from_nanos(look_ns), next_timer);
        }
        let wait = found.unwrap_or_else(|| {
            self.sleep(next_timer);
            Wait::Slept(super::since_start_ns().saturating_sub(start_ns))
        });
        #[cfg(test)]
        self.found.set(self.found.get() + u64::from(wait == Wait::Found));
        if wait == Wait::LostCore {
            self.sleep(next_timer);
        }
        polling.note(wait, limit_ns, super::since_start_ns());
        self.polling.set(polling);
    }

    /// Looks for something to do. `None`: there is nothing.
    fn look(&self, ring: &Ring, most: Duration, next_timer: Option<Instant>) -> Option<Wait> {
        /// Between two looks at the clock.
        const SPINS: u32 = 8;
        let start = Instant::now();
        let end = next_timer.map_or(start + most, |timer| timer.min(start + most));
        // Queued operations go to the kernel first.
        ring.poll();
        // System calls may take long: only the time between them can be another process's.
        let mut last = Instant::now();
        loop {
            if ring.has_news() {
                ring.poll();
                last = Instant::now();
            }
            let is_woken =
                self.shared.remote_came.load(Ordering::Relaxed) || self.shared.main_woken.load(Ordering::Relaxed);
            if is_woken || ring.has_completed() || !self.ready.borrow().is_empty() {
                return Some(Wait::Found);
            }
            for _ in 0..SPINS {
                std::hint::spin_loop();
            }
            let now = Instant::now();
            if now >= end {
                return None;
            }
            if now.duration_since(last) > LOST_CORE {
                return Some(Wait::LostCore);
            }
            last = now;
        }
    }

    /// Waits in the kernel for a completion, a wake from another thread or the next timer.
    fn sleep(&self, next_timer: Option<Instant>) {
        let shared = &self.shared;
        // A wake stores its reason and then looks at `asleep`; here it is the other way round, so one of us sees it.
        shared.asleep.store(true, Ordering::SeqCst);
        let woken = shared.remote_came.load(Ordering::SeqCst) || shared.main_woken.load(Ordering::SeqCst);
        let timeout = match next_timer {
            _ if woken => Some(Duration::ZERO),
            Some(instant) => Some(instant.saturating_duration_since(Instant::now())),
            None => None,
        };
        match self.existing_ring() {
            Some(ring) => ring.wait(shared.wake_fd.as_fd(), timeout),
            None => self.park(timeout),
        }
        shared.asleep.store(false, Ordering::SeqCst);
    }

    fn park(&self, timeout: Option<Duration>) {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let timeout = timeout.map(|timeout| Timespec {
            tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        });
        let mut fds = [PollFd::new(&self.shared.wake_fd, PollFlags::IN)];
        if poll(&mut fds, timeout.as_ref()).is_ok_and(|ready| ready > 0) {
            let mut count = [0u8; 8];
            let _ = rustix::io::read(&self.shared.wake_fd, &mut count);
        }
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        // A simulated machine stops, as at a power cut. After a panic nothing may touch the shared state of the
        // futures.
        let ends_obligations = self.state.simulation().is_none() && !std::thread::panicking();
        self.state.abandoned.set(!ends_obligations);
        // Waking puts every task in a queue, and dropping the queue drops its futures. A future's drop may wake or
        // finish others, and leave obligations, hence the loop.
        loop {
            if !self.state.abandoned.get() && self.state.obligations.get() > 0 {
                let ended = catch_unwind(AssertUnwindSafe(|| self.state.run_obligations()));
                self.state.abandoned.set(!ended.unwrap_or(false));
            }
            let wakers: Vec<Waker> = self.state.unfinished.borrow_mut().drain().collect();
            for waker in &wakers {
                waker.wake_by_ref();
            }
            drop(wakers);
            let mut remote = self.state.shared.remote();
            let mut tasks = std::mem::take(&mut remote.tasks);
            drop(remote);
            tasks.extend(self.state.ready.borrow_mut().drain(..));
            if tasks.is_empty() {
                break;
            }
            drop(tasks);
        }
        self.state.abandoned.set(true);
        self.state.shared.remote().closed = true;
    }
}

/// Takes a task off the list of unfinished ones.
struct Registered {
    state: std::rc::Weak<LocalState>,
    key: usize,
}

impl Drop for Registered {
    fn drop(&mut self) {
        if let Some(state) = self.state.upgrade() {
            let waker = state.unfinished.borrow_mut().try_remove(self.key);
            drop(waker);
        }
    }
}

/// Makes the thread's own executor, if it has none.
pub(super) fn prepare_thread() -> std::io::Result<()> {
    outlive_executor();
    THREAD.with(|local| {
        if local.get().is_none() {
            let new = Local::with_outside(Outside::System(OnceCell::new()))?;
            drop(local.set(new));
        }
        Ok(())
    })
}

/// Variables are destroyed in the reverse order of their first use: the executor's last obligations need this one.
fn outlive_executor() {
    CURRENT.with(|_| ());
}

/// Runs `future` on the thread's own executor.
pub(super) fn block_on_thread<F: Future>(future: F) -> F::Output {
    outlive_executor();
    THREAD.with(|local| local.get_or_init(Local::system).block_on(future))
}
