// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Runs a job to its end: with progress, on SIGUSR1 too, and stopped by Ctrl-C or SIGTERM.

use crate::invocation::Persona;
use crate::output::Failure;
use crate::output::progress::{Progress, report_percent};
use cowshed_block::{Error, ErrorKind};
use cowshed_jobs::JobHandle;
use cowshed_storage::rt;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;
use std::sync::atomic::{AtomicI32, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// How long a job may take to end once its time is over, before the process is ended.
const GRACE: Duration = Duration::from_secs(10);

/// The time that this process has, for images from strangers.
static TIME_LIMIT: OnceLock<Duration> = OnceLock::new();
/// The code to exit with when that is over.
static ERROR_EXIT_CODE: AtomicU8 = AtomicU8::new(1);

/// The process ends after so long, whatever it is doing. The first call counts.
pub fn limit_time(limit: Duration) {
    let _ = TIME_LIMIT.set(limit);
}

/// For verbs in which 1 is no error.
pub fn fail_with(code: u8) {
    ERROR_EXIT_CODE.store(code, Ordering::Relaxed);
}

/// Cancels the job when the time is over, and ends the process where that doesn't help.
fn watch_time(handle: &JobHandle) -> Result<(), Error> {
    let Some(limit) = TIME_LIMIT.get().copied() else { return Ok(()) };
    let handle = handle.clone();
    let watch = move || {
        std::thread::sleep(limit);
        handle.cancel();
        std::thread::sleep(GRACE);
        crate::output::warning::print(&too_late(limit));
        std::process::exit(i32::from(ERROR_EXIT_CODE.load(Ordering::Relaxed)));
    };
    let thread = std::thread::Builder::new().name("time limit".to_owned()).spawn(watch);
    thread.map(drop).map_err(|error| Error::io(&error, "could not watch the time"))
}

fn too_late(limit: Duration) -> String {
    format!("the time limit of {} s is used up", limit.as_secs_f64())
}

/// A job that was cancelled because its time was over.
fn reason(error: Error) -> Error {
    match (error.kind(), TIME_LIMIT.get()) {
        (ErrorKind::Cancelled, Some(limit)) => Error::new(ErrorKind::Limit, too_late(*limit)),
        _ => error,
    }
}

/// What the shell adds to the number of the signal that ended a process.
const SIGNAL_EXIT_BASE: i32 = 128;

/// A job in the foreground.
pub struct Foreground {
    handle: JobHandle,
    progress: Arc<Mutex<Progress>>,
    signal: Arc<AtomicI32>,
}

impl Foreground {
    /// Progress as wanted by `-p` (`wanted`) and `-q`; `what` stands before the bar.
    pub fn new(persona: Persona, wanted: bool, quiet: bool, what: &'static str) -> Result<Self, Failure> {
        let progress = Arc::new(Mutex::new(Progress::new(persona, wanted, quiet, what)));
        let shown = Arc::clone(&progress);
        let handle = JobHandle::watched(move |state| lock(&shown).update(state.offset, state.len));
        let signal = Arc::new(AtomicI32::new(0));
        let is_hidden = matches!(*lock(&progress), Progress::Hidden);
        heed_signals(handle.clone(), Arc::clone(&signal), is_hidden)?;
        Ok(Self { handle, progress, signal })
    }

    /// Runs the job and takes the progress away; `work` makes its future, `failed` words its error.
    pub fn run<T, F: Future<Output = Result<T, Error>>>(
        &self,
        work: impl FnOnce(JobHandle) -> F,
        failed: impl FnOnce(&Error) -> Failure,
    ) -> Result<T, Failure> {
        self.run_saying(work, failed, |_| {})
    }

    /// As [`Foreground::run`] for what has a result to `say`: qemu-img does so before it ends the line of its progress.
    pub fn run_saying<T, F: Future<Output = Result<T, Error>>>(
        &self,
        work: impl FnOnce(JobHandle) -> F,
        failed: impl FnOnce(&Error) -> Failure,
        say: impl FnOnce(&T),
    ) -> Result<T, Failure> {
        lock(&self.progress).update(0, 1);
        let result = watch_time(&self.handle).and_then(|()| rt::block_on(work(self.handle.clone())));
        {
            let mut progress = lock(&self.progress);
            progress.complete(result.is_ok());
            if let Ok(value) = &result {
                say(value);
            }
            progress.finish();
        }
        let signal = self.signal.load(Ordering::Acquire);
        result.map_err(|error| match error.kind() {
            ErrorKind::Cancelled if signal != 0 => {
                Failure::new("interrupted; what was written so far is incomplete").code(signal_exit_code(signal))
            }
            _ => failed(&reason(error)),
        })
    }
}

/// Runs a job that nobody needs to watch or stop.
pub fn run_quietly<T, F: Future<Output = Result<T, Error>>>(work: impl FnOnce(JobHandle) -> F) -> Result<T, Error> {
    let handle = JobHandle::new();
    watch_time(&handle)?;
    rt::block_on(work(handle)).map_err(reason)
}

fn lock(progress: &Mutex<Progress>) -> MutexGuard<'_, Progress> {
    progress.lock().unwrap_or_else(PoisonError::into_inner)
}

fn signal_exit_code(signal: i32) -> u8 {
    u8::try_from(SIGNAL_EXIT_BASE + signal).unwrap_or(1)
}

/// The first signal asks the job to stop, so that it can leave the target closed in order; the second one ends the
/// process at once. SIGUSR1 asks for the progress where none is shown, as in qemu-img.
fn heed_signals(handle: JobHandle, noted: Arc<AtomicI32>, tells: bool) -> Result<(), Failure> {
    let failed = |error: std::io::Error| Failure::new(format!("could not watch for signals: {error}"));
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP, SIGUSR1]).map_err(failed)?;
    let watch = move || {
        for signal in &mut signals {
            if signal == SIGUSR1 {
                if tells {
                    let state = handle.progress();
                    report_percent(state.offset, state.len);
                }
                continue;
            }
            if noted.swap(signal, Ordering::AcqRel) != 0 {
                std::process::exit(i32::from(signal_exit_code(signal)));
            }
            handle.cancel();
        }
    };
    std::thread::Builder::new().name("signals".to_owned()).spawn(watch).map_err(failed)?;
    Ok(())
}
