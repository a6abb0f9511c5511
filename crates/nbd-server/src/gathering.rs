// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Waiting a moment before receiving, so that one system call brings many requests.
//!
//! A client with many requests in flight sends each as soon as it has room for it. A server that is as fast receives
//! each alone: a receive, a send, a wake of the client. A server that pauses first finds several, and its replies go
//! out together, too. Whether that pays depends on the client, the load and the machine, so it is tried: windows of
//! requests with pauses and without, in turns. Pauses that gain neither processor time nor rate end, and are tried
//! again after a while. Pauses that gain are tried again, too, less often.

use cowshed_storage::rt;
use std::time::Duration;

/// How long a pause is: of 10 µs and 20 µs, which were tried without trials, the one that cost no rate (docs/performance.md).
pub(crate) const PAUSE: Duration = Duration::from_micros(10);

/// Requests between two decisions.
const WINDOW: u32 = 512;
/// A trial has so many windows without pauses, and as many with them.
const TURNS: usize = 3;
/// Fewer requests than these for each pause, and there is nothing to gather.
const FEW_REQUESTS: u32 = 4;
/// So many pauses tell whether there is.
const FEW_PAUSES: u32 = 16;
/// Rest after a trial that failed; doubled each time up to the longest.
const REST_NS: std::ops::RangeInclusive<u64> = 4_000_000..=1_000_000_000;
/// Windows with pauses after a trial that was a gain; doubled each time up to the most.
const WINDOWS: std::ops::RangeInclusive<u32> = 64..=1024;

/// What has passed on some clocks, in nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Spent {
    /// Of everybody's.
    pub wall_ns: u64,
    /// Of this thread's processor time.
    pub cpu_ns: u64,
}

impl Spent {
    /// Until now.
    pub(crate) fn now() -> Spent {
        Spent { wall_ns: rt::now_ns(), cpu_ns: rt::thread_cpu_ns() }
    }

    fn since(self, earlier: Spent) -> Spent {
        Spent {
            wall_ns: self.wall_ns.saturating_sub(earlier.wall_ns),
            cpu_ns: self.cpu_ns.saturating_sub(earlier.cpu_ns),
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Phase {
    /// No pauses until then.
    Resting { until_ns: u64 },
    /// So many windows have passed, the first without pauses, the second with them, and so on.
    Trying { passed: usize },
    /// Pauses, for so many windows more.
    Pausing { left: u32 },
}

/// Whether one connection's receives wait for company.
#[derive(Debug)]
pub(crate) struct Gathering {
    phase: Phase,
    /// Requests of this window, and pauses.
    requests: u32,
    pauses: u32,
    begin: Spent,
    /// What the windows of a trial took: without pauses, with them.
    took: [[Spent; TURNS]; 2],
    rest_ns: u64,
    windows: u32,
}

impl Default for Gathering {
    fn default() -> Self {
        Gathering {
            phase: Phase::Resting { until_ns: 0 },
            requests: 0,
            pauses: 0,
            begin: Spent::default(),
            took: Default::default(),
            rest_ns: *REST_NS.start(),
            windows: *WINDOWS.start(),
        }
    }
}

impl Gathering {
    /// A receive is about to start, with nothing left of the one before. True: after a pause.
    pub(crate) fn takes_pause(&mut self) -> bool {
        let takes = match self.phase {
            Phase::Resting { .. } => false,
            Phase::Trying { passed } => passed % 2 == 1,
            Phase::Pausing { .. } => true,
        };
        self.pauses += u32::from(takes);
        takes
    }

    /// A request came. `clock` is looked at once in many.
    pub(crate) fn note_request(&mut self, clock: impl FnOnce() -> Spent) {
        self.requests += 1;
        let found_few = self.pauses >= FEW_PAUSES && self.requests < self.pauses * FEW_REQUESTS;
        if self.requests < WINDOW && !found_few {
            return;
        }
        let now = clock();
        let took = now.since(self.begin);
        self.phase = match self.phase {
            _ if found_few => self.rest(now),
            Phase::Resting { until_ns } if now.wall_ns < until_ns => self.phase,
            Phase::Resting { .. } => Phase::Trying { passed: 0 },
            Phase::Trying { passed } => {
                self.took[passed % 2][passed / 2] = took;
                match passed + 1 {
                    passed if passed < 2 * TURNS => Phase::Trying { passed },
                    _ if self.is_gain() => self.pause_on(),
                    _ => self.rest(now),
                }
            }
            Phase::Pausing { left: 0 } => Phase::Trying { passed: 0 },
            Phase::Pausing { left } => Phase::Pausing { left: left - 1 },
        };
        (self.requests, self.pauses, self.begin) = (0, 0, now);
    }

    fn rest(&mut self, now: Spent) -> Phase {
        let until_ns = now.wall_ns.saturating_add(self.rest_ns);
        self.rest_ns = (self.rest_ns * 2).min(*REST_NS.end());
        self.windows = *WINDOWS.start();
        Phase::Resting { until_ns }
    }

    fn pause_on(&mut self) -> Phase {
        let left = self.windows;
        self.windows = (self.windows * 2).min(*WINDOWS.end());
        self.rest_ns = *REST_NS.start();
        Phase::Pausing { left }
    }

    /// Neither rate nor processor time is worse with pauses, and one of them is better by more than windows differ by anyway.
    fn is_gain(&self) -> bool {
        let median = |side: usize, of: fn(&Spent) -> u64| {
            let mut values = self.took[side].each_ref().map(of);
            values.sort_unstable();
            values[TURNS / 2]
        };
        let times: [fn(&Spent) -> u64; 2] = [|spent| spent.wall_ns, |spent| spent.cpu_ns];
        let pairs = times.map(|of| (u128::from(median(0, of)), u128::from(median(1, of))));
        pairs.iter().all(|(without, with)| with * 100 <= without * 101)
            && pairs.iter().any(|(without, with)| with * 100 < without * 97)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A connection whose client has so many requests in flight, on a clock of its own.
    struct Model {
        gathering: Gathering,
        now: Spent,
        /// Requests that a receive brings, without a pause before it and with one.
        batches: [u32; 2],
        /// What a request takes, without pauses and with them.
        request: [Spent; 2],
        pauses: u64,
        requests: u64,
    }

    fn spent(wall_ns: u64, cpu_ns: u64) -> Spent {
        Spent { wall_ns, cpu_ns }
    }

    impl Model {
        fn new(batches: [u32; 2], request: [Spent; 2]) -> Model {
            let (gathering, now) = (Gathering::default(), spent(1, 1));
            Model { gathering, now, batches, request, pauses: 0, requests: 0 }
        }

        /// A receive and the requests that it brings; true after a pause.
        fn receive(&mut self) -> bool {
            let pauses = self.gathering.takes_pause();
            self.pauses += u64::from(pauses);
            for _ in 0..self.batches[usize::from(pauses)] {
                let request = self.request[usize::from(pauses)];
                self.now = spent(self.now.wall_ns + request.wall_ns, self.now.cpu_ns + request.cpu_ns);
                let now = self.now;
                self.gathering.note_request(|| now);
                self.requests += 1;
            }
            pauses
        }

        /// The part of the requests of the next so many that came after a pause.
        fn paused_part(&mut self, requests: u64) -> f64 {
            let end = self.requests + requests;
            let begin = self.requests;
            let mut paused = 0;
            while self.requests < end {
                let before = self.requests;
                if self.receive() {
                    paused += self.requests - before;
                }
            }
            paused as f64 / (self.requests - begin) as f64
        }

        fn is_pausing(&self) -> bool {
            matches!(self.gathering.phase, Phase::Pausing { .. })
        }
    }

    #[test]
    fn pauses_that_save_processor_time_are_kept() {
        let mut model = Model::new([1, 12], [spent(6_000, 6_000), spent(6_000, 4_000)]);
        model.paused_part(10 * u64::from(WINDOW));
        assert!(model.is_pausing());
        assert!(model.paused_part(10_000_000) > 0.98);
    }

    #[test]
    fn pauses_that_bring_rate_are_kept() {
        let mut model = Model::new([1, 12], [spent(6_000, 4_000), spent(5_500, 4_030)]);
        model.paused_part(10 * u64::from(WINDOW));
        assert!(model.is_pausing());
    }

    #[test]
    fn pauses_that_cost_rate_or_bring_nothing_are_hardly_tried() {
        for with in [spent(6_100, 3_000), spent(3_000, 6_100), spent(5_900, 5_900), spent(6_000, 6_000)] {
            let mut model = Model::new([1, 12], [spent(6_000, 6_000), with]);
            model.paused_part(200_000);
            assert!(model.paused_part(10_000_000) < 0.01, "{with:?}");
        }
    }

    #[test]
    fn a_client_with_few_requests_is_given_up_after_a_few_pauses() {
        for depth in 1..FEW_REQUESTS {
            let mut model = Model::new([1, depth], [spent(20_000, 6_000), spent(10_000, 3_000)]);
            model.paused_part(1_000_000);
            assert!(model.pauses > 0);
            // At most one trial of a few pauses a second.
            let (pauses, begin_ns) = (model.pauses, model.now.wall_ns);
            model.paused_part(1_000_000);
            let seconds = (model.now.wall_ns - begin_ns) / 1_000_000_000 + 1;
            assert!(
                model.pauses - pauses <= seconds * u64::from(FEW_PAUSES),
                "{} in {seconds} s",
                model.pauses - pauses
            );
        }
    }

    #[test]
    fn a_client_that_has_fewer_requests_than_before_is_soon_without_pauses() {
        let mut model = Model::new([1, 12], [spent(6_000, 6_000), spent(6_000, 4_000)]);
        model.paused_part(1_000_000);
        assert!(model.is_pausing());
        model.batches = [1, 1];
        let pauses = model.pauses;
        model.paused_part(u64::from(WINDOW));
        assert!(!model.is_pausing());
        // What was gathered before in the same window counts too.
        assert!(model.pauses - pauses <= u64::from(WINDOW / FEW_REQUESTS), "{}", model.pauses - pauses);
    }

    #[test]
    fn what_was_no_gain_may_become_one_and_the_other_way_round() {
        let slow = [spent(6_000, 6_000), spent(7_000, 6_000)];
        let mut model = Model::new([1, 12], slow);
        model.paused_part(1_000_000);
        assert!(!model.is_pausing());
        model.request = [spent(6_000, 6_000), spent(5_000, 5_000)];
        // The longest rest is a second.
        model.paused_part(1_200_000_000 / 6_000);
        assert!(model.is_pausing());
        model.request = slow;
        model.paused_part(u64::from(WINDOW) * u64::from(WINDOWS.end() + 10));
        assert!(!model.is_pausing());
    }

    #[test]
    fn a_window_that_was_disturbed_decides_nothing() {
        for disturbed in 0..2 * TURNS {
            let mut model = Model::new([1, 12], [spent(6_000, 6_000), spent(6_000, 4_000)]);
            model.paused_part(u64::from(WINDOW));
            while let Phase::Trying { passed } = model.gathering.phase {
                if passed == disturbed {
                    model.now.wall_ns += 50_000;
                    model.now.cpu_ns += 50_000;
                }
                model.receive();
            }
            assert!(model.is_pausing(), "{disturbed}");
        }
    }

    #[test]
    fn the_clocks_go_on() {
        let before = Spent::now();
        let mut sum = 0u64;
        while Spent::now().since(before).cpu_ns < 1_000_000 {
            sum = std::hint::black_box(sum + 1);
        }
        let spent = Spent::now().since(before);
        assert!(spent.wall_ns >= spent.cpu_ns / 2, "{spent:?}");
    }
}
