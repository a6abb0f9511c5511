// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Adaptive polling: before a thread that serves sleeps in the kernel, it polls for completions for a while. Being woken
//! takes longer than most clients need for their next request, and the core that wakes pays for it as well.
//!
//! Here is the decision, without a clock or a system call: how long to poll, learnt from the length of the last waits. A
//! thread doesn't poll where it would gain little:
//!
//! - nothing comes within four times the limit (an idle client, a slow disk): the time goes back to 0, and grows from
//!   there. The limit itself is no bound for this: polling makes the next wait shorter, as the client's core stays awake;
//! - polls don't pay although something comes soon: polling pauses, longer each time;
//! - another thread needs the core: polling pauses, likewise;
//! - a disk has to answer: that takes longer than being woken;
//! - the last request waited for a disk: the wake that could be saved is the smaller part of its time;
//! - many requests came since the last wait: there is enough to do, and requests that gather are cheaper;
//! - all cores but one poll already.

use std::num::NonZero;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

/// The longest time that a thread polls before it sleeps, for all threads that were given it
/// ([`super::poll_up_to`]). Clones are the same limit; it can be changed at any time.
#[derive(Clone, Debug)]
pub struct PollLimit(Arc<AtomicU64>);

impl PollLimit {
    /// The default limit. `poll-max-ns` of QEMU's `iothread` means the same and is 32,768 there; in a virtual machine a
    /// wait with two wakes takes 100 µs and more.
    pub const DEFAULT: Duration = Duration::from_micros(100);

    /// The longest time of polling; zero: never. Longer than 584 years is 584 years.
    pub fn new(most: Duration) -> Self {
        let limit = PollLimit(Arc::default());
        limit.set(most);
        limit
    }

    /// Sets the limit; zero: never.
    pub fn set(&self, most: Duration) {
        self.0.store(u64::try_from(most.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// The present limit.
    pub fn get(&self) -> Duration {
        Duration::from_nanos(self.as_nanos())
    }

    pub(super) fn as_nanos(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Default for PollLimit {
    fn default() -> Self {
        PollLimit::new(Self::DEFAULT)
    }
}

/// The first look.
const FIRST_NS: u64 = 10_000;
/// A completion came soon within this many times the limit.
const SOON: u64 = 4;
/// The thread rests after this number of looks without a find, each of the whole limit.
const VAIN_LOOKS: u32 = 8;
/// After this number of looks with a find the next rest is the shortest again.
const GOOD_LOOKS: u32 = 64;
/// The shortest and the longest rest.
const REST_NS: std::ops::RangeInclusive<u64> = 1_000_000..=1_000_000_000;
/// With more requests than these since the last wait there is enough to do.
pub(super) const FEW_REQUESTS: u32 = 4;
/// Two looks that lie further apart: another thread had the core between them.
pub(super) const LOST_CORE: Duration = Duration::from_micros(50);

/// The end of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    /// The look found something.
    Found,
    /// The thread slept; the time from the beginning of the look to the end of the sleep.
    Slept(u64),
    /// Another thread had the core while it looked.
    LostCore,
}

/// The experience of a thread with its waits. Times are of one clock, in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Polling {
    look_ns: u64,
    vain: u32,
    good: u32,
    rests_until_ns: u64,
    rest_ns: u64,
    /// A disk was waited for since the last request came.
    waited_for_disk: bool,
}

impl Default for Polling {
    fn default() -> Self {
        Polling { look_ns: 0, vain: 0, good: 0, rests_until_ns: 0, rest_ns: *REST_NS.start(), waited_for_disk: false }
    }
}

impl Polling {
    /// Requests have come.
    pub(super) fn requests_came(&mut self) {
        self.waited_for_disk = false;
    }

    /// The thread is to sleep until a disk answers.
    pub(super) fn waits_for_disk(&mut self) {
        self.waited_for_disk = true;
    }

    /// The time of looking now, by the limit; `None`: the thread rests, or its requests took a disk anyway, and there
    /// is nothing to note.
    pub(super) fn look_ns(&self, limit_ns: u64, now_ns: u64) -> Option<u64> {
        (limit_ns > 0 && now_ns >= self.rests_until_ns && !self.waited_for_disk).then(|| self.look_ns.min(limit_ns))
    }

    /// A wait that [`Polling::look_ns`] was asked for has ended.
    pub(super) fn note(&mut self, wait: Wait, limit_ns: u64, now_ns: u64) {
        match wait {
            Wait::Found => {
                self.vain = 0;
                self.good += 1;
                if self.good >= GOOD_LOOKS {
                    self.good = 0;
                    self.rest_ns = *REST_NS.start();
                }
            }
            Wait::LostCore => self.rest(now_ns),
            Wait::Slept(took_ns) if took_ns > limit_ns.saturating_mul(SOON) => {
                self.look_ns = 0;
                self.vain = 0;
            }
            Wait::Slept(_) if self.look_ns < limit_ns => {
                self.look_ns = self.look_ns.saturating_mul(2).max(FIRST_NS).min(limit_ns);
            }
            Wait::Slept(_) => {
                self.vain += 1;
                if self.vain >= VAIN_LOOKS {
                    self.rest(now_ns);
                }
            }
        }
    }

    fn rest(&mut self, now_ns: u64) {
        self.rests_until_ns = now_ns + self.rest_ns;
        self.rest_ns = (self.rest_ns * 2).min(*REST_NS.end());
        self.vain = 0;
        self.good = 0;
    }
}

/// The cores that may be used for looking: one is always left for the peers that are waited for.
pub(super) struct Cores {
    taken: AtomicUsize,
    most: usize,
}

/// A core in use.
pub(super) struct Core<'a>(&'a Cores);

impl Cores {
    /// The cores of the machine that this process may use.
    pub(super) fn of_machine() -> &'static Cores {
        static ALL: LazyLock<Cores> =
            LazyLock::new(|| Cores::all_but_one(std::thread::available_parallelism().map_or(1, NonZero::get)));
        &ALL
    }

    fn all_but_one(count: usize) -> Cores {
        Cores { taken: AtomicUsize::new(0), most: count - 1 }
    }

    /// One, unless all are taken.
    pub(super) fn take(&self) -> Option<Core<'_>> {
        if self.taken.fetch_add(1, Ordering::Relaxed) < self.most {
            return Some(Core(self));
        }
        self.taken.fetch_sub(1, Ordering::Relaxed);
        None
    }
}

impl Drop for Core<'_> {
    fn drop(&mut self) {
        self.0.taken.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Local, note_request, poll_up_to, sleep, with_current};
    use super::*;
    use crate::IoBuf;
    use crate::payload::Payload;
    use crate::ring::Direction;
    use std::io::Write;
    use std::os::fd::OwnedFd;
    use std::rc::Rc;
    use std::sync::mpsc;
    use std::task::{Poll, Waker};
    use std::time::Instant;

    const LIMIT: u64 = 100_000;

    fn grown() -> Polling {
        let mut polling = Polling::default();
        for _ in 0..5 {
            polling.note(Wait::Slept(60_000), LIMIT, 0);
        }
        polling
    }

    #[test]
    fn polling_grows_with_short_waits_and_ends_with_long() {
        let mut polling = Polling::default();
        let mut looks = Vec::new();
        for _ in 0..6 {
            looks.push(polling.look_ns(LIMIT, 0).unwrap());
            polling.note(Wait::Slept(60_000), LIMIT, 0);
        }
        assert_eq!(looks, [0, 10_000, 20_000, 40_000, 80_000, 100_000]);
        polling.note(Wait::Slept(SOON * LIMIT), LIMIT, 0);
        assert_eq!(polling.look_ns(LIMIT, 0), Some(LIMIT));
        polling.note(Wait::Slept(SOON * LIMIT + 1), LIMIT, 0);
        assert_eq!(polling.look_ns(LIMIT, 0), Some(0));
    }

    #[test]
    fn lowered_polling_limit_counts_at_once() {
        let polling = grown();
        assert_eq!(polling.look_ns(30_000, 0), Some(30_000));
        assert_eq!(polling.look_ns(0, 0), None);
        let limit = PollLimit::default();
        let same = limit.clone();
        assert_eq!(limit.get(), PollLimit::DEFAULT);
        same.set(Duration::ZERO);
        assert_eq!(limit.get(), Duration::ZERO);
        same.set(Duration::MAX);
        assert_eq!(limit.get(), Duration::from_nanos(u64::MAX));
    }

    #[test]
    fn looks_in_vain_rest_longer_each_time_up_to_a_second() {
        let mut polling = grown();
        let mut now = 0;
        let mut rests = Vec::new();
        for _ in 0..12 {
            while polling.look_ns(LIMIT, now).is_some() {
                polling.note(Wait::Slept(150_000), LIMIT, now);
            }
            let begin = now;
            while polling.look_ns(LIMIT, now).is_none() {
                now += 500_000;
            }
            rests.push((now - begin) / 1_000_000);
            assert_eq!(polling.look_ns(LIMIT, now), Some(LIMIT), "what was learnt is kept");
        }
        assert_eq!(rests, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000, 1000]);
        for _ in 0..GOOD_LOOKS {
            polling.note(Wait::Found, LIMIT, now);
        }
        polling.note(Wait::LostCore, LIMIT, now);
        assert_eq!(polling.look_ns(LIMIT, now + 999_999), None);
        assert_eq!(polling.look_ns(LIMIT, now + 1_000_000), Some(LIMIT));
    }

    #[test]
    fn a_look_that_finds_something_makes_up_for_those_in_vain() {
        let mut polling = grown();
        for _ in 0..100 {
            for _ in 0..VAIN_LOOKS - 1 {
                polling.note(Wait::Slept(150_000), LIMIT, 0);
            }
            polling.note(Wait::Found, LIMIT, 0);
        }
        assert_eq!(polling.look_ns(LIMIT, 0), Some(LIMIT));
    }

    #[test]
    fn one_core_is_left() {
        for count in [1, 2, 5] {
            let cores = Cores::all_but_one(count);
            for _ in 0..3 {
                let taken: Vec<Core<'_>> = std::iter::from_fn(|| cores.take()).collect();
                assert_eq!(taken.len(), count - 1);
            }
        }
    }

    #[test]
    fn a_request_that_waited_for_a_disk_is_not_looked_after() {
        let mut polling = grown();
        polling.requests_came();
        assert_eq!(polling.look_ns(LIMIT, 0), Some(LIMIT));
        polling.waits_for_disk();
        assert_eq!(polling.look_ns(LIMIT, 0), None);
        assert_eq!(polling.look_ns(LIMIT, 0), None, "waits that end at once don't count");
        polling.requests_came();
        assert_eq!(polling.look_ns(LIMIT, 0), Some(LIMIT), "what was learnt is kept");
    }

    /// The condition that a request waits for before it is answered.
    #[derive(Clone, Copy)]
    enum Needs {
        Nothing,
        /// A file in the page cache.
        Cached,
        /// A wait as long as a disk's: a pipe that gets a byte after a while.
        Disk,
    }

    /// A demand on the other thread.
    enum Ask {
        Disk,
        Wake(Waker),
    }

    async fn read_byte(file: &Arc<OwnedFd>) {
        let ring = super::super::current_ring().expect("this test needs io_uring");
        let payload = Payload::one(IoBuf::zeroed(1));
        assert_eq!(ring.transfer(file, Direction::Read, payload, (0, 1), 0).await.0, 1);
    }

    /// Another thread wakes this one, each time a little after it was asked to. Rounds end when `is_enough` of the
    /// finds of looking; returns their number.
    fn found_in_rounds(limit: PollLimit, rounds: u32, needs: Needs, is_enough: impl Fn(u64) -> bool) -> u64 {
        let (ask, asked) = mpsc::channel::<Ask>();
        let answered = Arc::new(AtomicU64::new(0));
        let answers = Arc::clone(&answered);
        let (disk, mut disk_writer) = std::io::pipe().expect("a pipe");
        let disk = Arc::new(OwnedFd::from(disk));
        let mut cached = tempfile::tempfile().expect("a file");
        cached.write_all(&[1]).expect("it is written");
        let cached = Arc::new(OwnedFd::from(cached));
        let other = std::thread::spawn(move || {
            for ask in asked {
                match ask {
                    Ask::Disk => {
                        // The time that a disk takes.
                        std::thread::sleep(Duration::from_millis(1));
                        disk_writer.write_all(&[1]).expect("the pipe is open");
                    }
                    Ask::Wake(waker) => {
                        // Within the time of busy polling.
                        std::thread::sleep(Duration::from_micros(50));
                        answers.fetch_add(1, Ordering::SeqCst);
                        waker.wake();
                    }
                }
            }
        });
        let local = Local::system();
        let found = local.block_on(async {
            let local = || with_current(|local| Rc::clone(local.expect("an executor")));
            assert!(local().ring().is_some(), "this test needs io_uring");
            poll_up_to(limit);
            for round in 0..u64::from(rounds) {
                note_request();
                match needs {
                    Needs::Nothing => {}
                    Needs::Cached => read_byte(&cached).await,
                    Needs::Disk => {
                        ask.send(Ask::Disk).expect("the other thread");
                        read_byte(&disk).await;
                    }
                }
                let mut is_asked = false;
                std::future::poll_fn(|context| {
                    if !std::mem::replace(&mut is_asked, true) {
                        ask.send(Ask::Wake(context.waker().clone())).expect("the other thread");
                    }
                    if answered.load(Ordering::SeqCst) > round { Poll::Ready(()) } else { Poll::Pending }
                })
                .await;
                if is_enough(local().found.get()) {
                    break;
                }
            }
            let found = local().found.get();
            // The experience of waits neither delays timers nor rings them early.
            for _ in 0..10 {
                let (start, pause) = (Instant::now(), Duration::from_micros(300));
                sleep(pause).await;
                assert!(start.elapsed() >= pause);
            }
            found
        });
        drop(ask);
        other.join().expect("the other thread");
        found
    }

    #[test]
    fn polling_finds_soon_completions_on_two_cores() {
        let limit = PollLimit::new(Duration::from_millis(20));
        for needs in [Needs::Nothing, Needs::Cached] {
            match std::thread::available_parallelism().map_or(1, NonZero::get) {
                1 => assert_eq!(found_in_rounds(limit.clone(), 200, needs, |_| false), 0),
                _ => assert!(found_in_rounds(limit.clone(), 100_000, needs, |found| found >= 3) >= 3),
            }
        }
    }

    #[test]
    fn after_a_wait_for_a_disk_no_thread_looks() {
        assert_eq!(found_in_rounds(PollLimit::new(Duration::from_millis(20)), 200, Needs::Disk, |_| false), 0);
    }

    #[test]
    fn without_a_limit_a_thread_sleeps() {
        assert_eq!(found_in_rounds(PollLimit::new(Duration::ZERO), 200, Needs::Nothing, |_| false), 0);
    }
}
