// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Long runs of the crash test: seed after seed on every core until the time is up. States are counted by content over
//! the whole run, with figures on the way.

use crate::matrix::{CrashScene, Effort};
use crate::tally::Tally;
use cowshed_simulator::{Effect, Fault, OpKind};
use cowshed_types::Errno;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The settings of a long run.
#[derive(Clone, Debug)]
pub struct Campaign {
    /// The first seed.
    pub first_seed: u64,
    /// No case begins after this.
    pub time: Duration,
    /// Cases that run side by side.
    pub threads: usize,
    /// Each case.
    pub effort: Effort,
    /// Figures are printed so often.
    pub report_every: Duration,
    /// More failing cases end the run.
    pub failures_max: usize,
}

/// The result of a long run.
#[derive(Debug, Default)]
pub struct CampaignReport {
    /// The states that were tried.
    pub tally: Tally,
    /// Cases that ran.
    pub cases: u64,
    /// Each failing case, with the commands that show it again.
    pub failures: Vec<String>,
    /// Time that it took.
    pub seconds: f64,
}

impl CampaignReport {
    /// Distinct states per hour.
    pub fn states_per_hour(&self) -> f64 {
        self.tally.total.distinct() as f64 / self.seconds.max(0.001) * 3600.0
    }

    fn progress(&self) -> String {
        format!(
            "{:>6.0} s: {} cases, {} distinct states of {} tried at {} cuts ({:.0} an hour), {} failures",
            self.seconds,
            self.cases,
            self.tally.total.distinct(),
            self.tally.total.tried,
            self.tally.total.cuts,
            self.states_per_hour(),
            self.failures.len()
        )
    }
}

/// The faults in the case of a seed: none in most, else one failed barrier, write or read, or a full disk.
pub fn weather(seed: u64, effort: &Effort) -> (Effort, Vec<Fault>) {
    let skip = seed / 16;
    let fault = |effect, kind, skip| vec![Fault::new(effect).kind(kind).skip(skip)];
    match seed % 16 {
        11 => (effort.clone(), fault(Effect::Fail(Errno::EIO), OpKind::Sync, skip % 8)),
        12 => (effort.clone(), fault(Effect::Torn(Errno::EIO), OpKind::Write, skip % 50)),
        13 => (effort.clone(), fault(Effect::Fail(Errno::ENOSPC), OpKind::Write, skip % 50)),
        14 => (effort.clone(), fault(Effect::Fail(Errno::EIO), OpKind::Read, skip % 40)),
        15 => (Effort { room_bytes: Some(skip % 24 * 4096), ..effort.clone() }, Vec::new()),
        _ => (effort.clone(), Vec::new()),
    }
}

struct Shared<'a> {
    campaign: &'a Campaign,
    started: Instant,
    next_seed: AtomicU64,
    stops: AtomicBool,
    report: Mutex<CampaignReport>,
}

impl Shared<'_> {
    fn report(&self) -> MutexGuard<'_, CampaignReport> {
        self.report.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_over(&self) -> bool {
        self.stops.load(Ordering::Relaxed) || self.started.elapsed() >= self.campaign.time
    }

    fn work(&self, print: &(dyn Fn(&str) + Sync)) {
        while !self.is_over() {
            let seed = self.next_seed.fetch_add(1, Ordering::Relaxed);
            let scene = CrashScene::new(seed);
            let (effort, faults) = weather(seed, &self.campaign.effort);
            let outcome = scene.run(&effort, faults);
            let mut report = self.report();
            report.cases += 1;
            match outcome {
                Ok(more) => report.tally.add(&scene, &more),
                Err(complaint) => {
                    let text = format!("FAILED (again with --seed {seed} --weather): {complaint}");
                    print(&text);
                    report.failures.push(text);
                    if report.failures.len() > self.campaign.failures_max {
                        self.stops.store(true, Ordering::Relaxed);
                    }
                }
            }
        }
    }
}

impl Campaign {
    /// Runs until the time is up; each line of the report goes to `print`.
    pub fn run(&self, print: &(dyn Fn(&str) + Sync)) -> CampaignReport {
        let shared = Shared {
            campaign: self,
            started: Instant::now(),
            next_seed: AtomicU64::new(self.first_seed),
            stops: AtomicBool::new(false),
            report: Mutex::default(),
        };
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..self.threads.max(1)).map(|_| scope.spawn(|| shared.work(print))).collect();
            let mut next_report = self.report_every;
            while !workers.iter().all(std::thread::ScopedJoinHandle::is_finished) {
                // Between two looks at the workers and the clock.
                std::thread::sleep(Duration::from_millis(100));
                if shared.started.elapsed() >= next_report {
                    next_report += self.report_every;
                    let mut report = shared.report();
                    report.seconds = shared.started.elapsed().as_secs_f64();
                    print(&report.progress());
                }
            }
        });
        let seconds = shared.started.elapsed().as_secs_f64();
        let mut report = shared.report.into_inner().unwrap_or_else(PoisonError::into_inner);
        report.seconds = seconds;
        print(&report.progress());
        report
    }
}
