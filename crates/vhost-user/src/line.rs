// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The counters by which a ring's thread wakes its front end.
//!
//! A front end can make such a counter one that blocks, and fill it, at any time. The thread that signals then waits in the kernel,
//! with its requests in flight, and other clients of the disk wait for those. So the control thread looks after signals that take
//! long. It empties their counters, also those that the front end has replaced, and the line is silent from then on. Threads
//! of the front end may take that room first, so it also interrupts the wait. The control thread itself never signals.

use cowshed_storage::signal::{Watched, lock};
use cowshed_storage::{EventCounter, Interruption, rt};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// An interruption comes too early where the thread is on its way into the wait. It is sent so often in one look.
const MOST_INTERRUPTIONS: usize = 1000;
/// A signal takes long if two looks find it.
const LOOK_PAUSE: Duration = Duration::from_millis(50);

/// The descriptors of a ring that may change while it runs. One thread signals.
#[derive(Debug, Default)]
pub(crate) struct Line {
    call: Mutex<Option<EventCounter>>,
    pub error: Mutex<Option<EventCounter>>,
    /// The counter of the signal that runs, or of the last one. The front end may have set another one since.
    signalled: Mutex<Option<EventCounter>>,
    /// A new counter has not been signalled yet.
    owes: AtomicBool,
    /// Signals that the thread has begun.
    begun: AtomicU64,
    /// The number of that thread.
    thread: AtomicI32,
    /// Signals that it has ended.
    ended: AtomicU64,
    /// A signal was held up. There are no more.
    is_silent: AtomicBool,
    watch: Arc<SignalWatch>,
}

/// Tells the looks that there are signals again. An idle guest costs none.
#[derive(Debug, Default)]
pub(crate) struct SignalWatch {
    is_asleep: AtomicBool,
    wakes: Watched<u64>,
}

impl Line {
    /// A line that a watch looks after.
    pub fn watched(watch: &Arc<SignalWatch>) -> Line {
        Line { watch: Arc::clone(watch), ..Line::default() }
    }

    /// Sets another call counter. The ring's thread signals it: this thread must not wait. True where that thread doesn't know
    /// of one yet.
    pub fn set_call(&self, counter: Option<EventCounter>) -> bool {
        let owes = counter.is_some();
        *lock(&self.call) = counter;
        owes && !self.owes.swap(true, Ordering::AcqRel)
    }

    /// True once for a new counter.
    pub fn takes_owed(&self) -> bool {
        self.owes.load(Ordering::Relaxed) && self.owes.swap(false, Ordering::AcqRel)
    }

    /// Tells the driver of ended requests. False: a counter has blocked, and nothing is told any more.
    pub fn call(&self) -> bool {
        self.signal(&self.call)
    }

    /// Tells the front end that the ring has stopped.
    pub fn report_error(&self) {
        self.signal(&self.error);
    }

    fn signal(&self, counter: &Mutex<Option<EventCounter>>) -> bool {
        // Without the lock: this may block.
        let counter = lock(counter).clone();
        if let Some(counter) = counter
            && !self.is_silent.load(Ordering::Acquire)
        {
            *lock(&self.signalled) = Some(counter.clone());
            self.thread.store(Interruption::here().number(), Ordering::Relaxed);
            let number = self.begun.load(Ordering::Relaxed) + 1;
            self.begun.store(number, Ordering::SeqCst);
            self.watch.wake();
            counter.signal();
            self.ended.store(number, Ordering::Release);
        }
        !self.is_silent.load(Ordering::Acquire)
    }

    /// Ends a signal that was there at the last look already. True: there were signals since.
    fn look(&self, last: &mut u64) -> bool {
        // The end first: it is never ahead of the begin.
        let (ended, begun) = (self.ended.load(Ordering::Acquire), self.begun.load(Ordering::SeqCst));
        let is_held = ended != begun && begun == *last;
        if is_held
            && let Some(counter) = lock(&self.signalled).clone()
            // The thread may also lack a processor. No sound front end lets a counter get full.
            && (counter.is_full() || self.is_silent.load(Ordering::Acquire))
        {
            self.is_silent.store(true, Ordering::Release);
            for _ in 0..MOST_INTERRUPTIONS {
                counter.take();
                Interruption::of(self.thread.load(Ordering::Acquire)).send();
                if self.ended.load(Ordering::Acquire) == begun {
                    break;
                }
                std::thread::yield_now();
            }
        }
        let is_busy = ended != begun || begun != *last;
        *last = begun;
        is_busy
    }
}

impl SignalWatch {
    fn wake(&self) {
        if self.is_asleep.load(Ordering::SeqCst) && self.is_asleep.swap(false, Ordering::SeqCst) {
            self.wakes.change(|wakes| *wakes += 1);
        }
    }

    /// Looks after the signals of lines, for ever.
    pub async fn look_after(&self, lines: &[Arc<Line>]) {
        let mut lasts = vec![0; lines.len()];
        let mut look = || lines.iter().zip(&mut lasts).fold(false, |any, (line, last)| line.look(last) || any);
        loop {
            let wakes = self.wakes.look(|wakes| *wakes);
            self.is_asleep.store(true, Ordering::SeqCst);
            // A signal that this look doesn't see finds the watch asleep.
            if !look() {
                self.wakes.wait(|now| (*now != wakes).then_some(())).await;
            }
            self.is_asleep.store(false, Ordering::SeqCst);
            rt::sleep(LOOK_PAUSE).await;
        }
    }
}
