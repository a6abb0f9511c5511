// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Several queues on one simulated machine: threads, each with an executor of its own, of which exactly one runs at a
//! time. The seed decides which of them goes on, so a run with threads is as repeatable as one without.
//!
//! The turn can change hands wherever a queue waits, before each operation that it submits, and at every call of
//! [`interleave`]. There another thread of the real program could come between.

use super::world::{Step, World};
use cowshed_storage::rng::Rng;
use cowshed_storage::simulated::SimulatedFile;
use cowshed_storage::{OpenOptions, rt};
use cowshed_types::Result;
use std::any::Any;
use std::cell::RefCell;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The work of one queue: called on the queue's thread, the future is driven to its end there.
pub type QueueStart<'a> = Box<dyn FnOnce() -> Pin<Box<dyn Future<Output = ()>>> + Send + 'a>;

/// Rounds in which no queue finds work before they count as stuck.
const ROUNDS_WITHOUT_WORK: u32 = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    /// It can go on.
    Ready,
    /// It found nothing to do when it ran last.
    Idle,
    /// Its future has ended.
    Ended,
}

struct QueuesState {
    rng: Rng,
    /// Index of the queue whose turn it is.
    turn: usize,
    queues: Vec<Standing>,
    /// A queue has panicked: all others stop where they are.
    failed: bool,
    rounds_without_work: u32,
}

/// The queue whose turn it is.
struct Turns {
    world: World,
    state: Mutex<QueuesState>,
    changed: Condvar,
}

/// The payload of the panics that stop the queues beside one that failed.
struct Stopped;

thread_local! {
    /// The queue that this thread runs.
    static QUEUE: RefCell<Option<(Arc<Turns>, usize)>> = const { RefCell::new(None) };
}

/// Another queue may go on here, by the seed. Does nothing outside of [`World::run_queues`].
pub fn interleave() {
    let queue = QUEUE.try_with(|queue| queue.borrow().clone()).ok().flatten();
    if let Some((turns, me)) = queue {
        turns.point(me);
    }
}

impl Turns {
    fn lock(&self) -> MutexGuard<'_, QueuesState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place where the turn may change hands, and where the disk may get something done meanwhile.
    fn point(&self, me: usize) {
        let (steps, passes) = {
            let mut state = self.lock();
            if state.failed {
                drop(state);
                return Self::stop();
            }
            (state.rng.chance(1, 16), state.rng.chance(1, 3))
        };
        if steps {
            self.world.step();
        }
        if passes {
            self.pass(me, Standing::Ready);
        }
    }

    /// Ends this thread's work, unless it is being ended already.
    fn stop() {
        if !std::thread::panicking() {
            resume_unwind(Box::new(Stopped));
        }
    }

    /// Gives the turn to a queue and waits until it comes back (not with `Ended`).
    fn pass(&self, me: usize, standing: Standing) {
        let mut state = self.lock();
        state.queues[me] = standing;
        if standing != Standing::Idle {
            state.rounds_without_work = 0;
        }
        state = self.run_machine(state);
        if state.queues.iter().all(|queue| *queue == Standing::Ended) {
            return;
        }
        // A queue that found nothing to do may have been woken by another one since.
        let looks_at_idle = state.rng.chance(1, 3);
        let may_run = |queue: &Standing| *queue == Standing::Ready || (looks_at_idle && *queue == Standing::Idle);
        let ready: Vec<usize> = (0..state.queues.len()).filter(|index| may_run(&state.queues[*index])).collect();
        let choice = state.rng.index(ready.len());
        state.turn = ready[choice];
        self.changed.notify_all();
        if standing == Standing::Ended {
            return;
        }
        while state.turn != me && !state.failed {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let failed = state.failed;
        state.queues[me] = Standing::Ready;
        drop(state);
        if failed {
            Self::stop();
        }
    }

    /// When no queue can run, lets the machine finish an operation, and every queue look again.
    fn run_machine<'a>(&'a self, mut state: MutexGuard<'a, QueuesState>) -> MutexGuard<'a, QueuesState> {
        if state.queues.contains(&Standing::Ready) || !state.queues.contains(&Standing::Idle) {
            return state;
        }
        drop(state);
        let step = self.world.step();
        state = self.lock();
        state.rounds_without_work = if step == Step::Progress { 0 } else { state.rounds_without_work + 1 };
        if state.rounds_without_work > ROUNDS_WITHOUT_WORK {
            drop(state);
            panic!("nothing can wake the tasks of any queue: {}", self.world.describe_pending());
        }
        for queue in state.queues.iter_mut().filter(|queue| **queue == Standing::Idle) {
            *queue = Standing::Ready;
        }
        state
    }

    fn fail(&self) {
        self.lock().failed = true;
        self.changed.notify_all();
    }

    fn wait_for_first_turn(&self, me: usize) {
        let mut state = self.lock();
        while state.turn != me && !state.failed {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl World {
    /// Runs each of `queues` on a thread of its own to its end, one thread at a time in an order drawn from `seed`.
    ///
    /// # Panics
    /// With the panic of a queue; when all wait and nothing could wake any of them.
    pub fn run_queues(&self, seed: u64, queues: Vec<QueueStart<'_>>) {
        if queues.is_empty() {
            return;
        }
        let mut rng = Rng::new(seed);
        let turn = rng.index(queues.len());
        let state = QueuesState {
            rng,
            turn,
            queues: vec![Standing::Ready; queues.len()],
            failed: false,
            rounds_without_work: 0,
        };
        let turns = Arc::new(Turns { world: self.clone(), state: Mutex::new(state), changed: Condvar::new() });
        let payloads: Vec<Box<dyn Any + Send>> = std::thread::scope(|scope| {
            let threads: Vec<_> = queues
                .into_iter()
                .enumerate()
                .map(|(me, start)| {
                    let turns = Arc::clone(&turns);
                    scope.spawn(move || run_queue(&turns, me, start))
                })
                .collect();
            threads.into_iter().filter_map(|thread| thread.join().unwrap_or_else(Some)).collect()
        });
        if let Some(payload) = payloads.into_iter().find(|payload| !payload.is::<Stopped>()) {
            resume_unwind(payload);
        }
    }
}

/// The whole of a queue's thread. Gives the payload of its panic.
fn run_queue(turns: &Arc<Turns>, me: usize, start: QueueStart<'_>) -> Option<Box<dyn Any + Send>> {
    turns.wait_for_first_turn(me);
    QUEUE.with(|queue| *queue.borrow_mut() = Some((Arc::clone(turns), me)));
    let run = AssertUnwindSafe(|| {
        let machine = QueueMachine { turns: Arc::clone(turns), me };
        rt::Local::simulated(Rc::new(machine)).block_on(start());
    });
    let outcome = catch_unwind(run);
    QUEUE.with(|queue| *queue.borrow_mut() = None);
    match outcome {
        Ok(()) => {
            // A panic about being stuck is for those that still wait.
            let passed = catch_unwind(AssertUnwindSafe(|| turns.pass(me, Standing::Ended)));
            passed.err().inspect(|_| turns.fail())
        }
        Err(payload) => {
            turns.fail();
            Some(payload)
        }
    }
}

struct QueueMachine {
    turns: Arc<Turns>,
    me: usize,
}

impl rt::Simulation for QueueMachine {
    fn advance(&self) {
        self.turns.pass(self.me, Standing::Idle);
    }

    fn sleep(&self, duration: Duration) -> Pin<Box<dyn Future<Output = ()>>> {
        Box::pin(self.turns.world.sleep(duration))
    }

    fn now(&self) -> Duration {
        self.turns.world.now()
    }

    fn open(&self, name: &str, options: &OpenOptions) -> Option<Result<Arc<dyn SimulatedFile>>> {
        Some(self.turns.world.open_dyn(name, options))
    }

    fn sync_folder(&self) -> bool {
        self.turns.world.sync_folder();
        true
    }
}
