// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Runs a job to its end: with progress, on SIGUSR1 too, and stopped by Ctrl-C or SIGTERM.
//!
//! A signal asks the job to stop. I/O that never returns (a silent server) can't keep the process: its time is bounded.

use super::arguments::NamingArgs;
use crate::invocation::Persona;
use crate::output::Failure;
use crate::output::progress::{Progress, report_percent};
use cowshed_jobs::{ImageSpec, JobHandle};
use cowshed_storage::signal::lock;
use cowshed_storage::{SignalMask, only_opens, rt};
use cowshed_types::{Error, ErrorKind};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::flag;
use signal_hook::iterator::Signals;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

/// The time that a job may take to end once its time is over, before the process is ended.
const GRACE: Duration = Duration::from_secs(10);

/// The time that a job may take to stop after a signal, before the process is ended: I/O may never return.
const STOP_GRACE: Duration = Duration::from_secs(5);

/// A Ctrl-C that comes so long after a signal is another one.
const SECOND: Duration = Duration::from_millis(200);

/// The time that the last words may take where standard error is a pipe without a reader's progress.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// The time that this process has, for images from strangers.
static TIME_LIMIT: OnceLock<Duration> = OnceLock::new();
/// The code to exit with when that is over.
static ERROR_EXIT_CODE: AtomicU8 = AtomicU8::new(1);

/// Ends the process after this time, whatever it is doing. The first call counts.
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
        end_process(too_late(limit), ERROR_EXIT_CODE.load(Ordering::Relaxed));
    };
    let thread = std::thread::Builder::new().name("time limit".to_owned()).spawn(watch);
    thread.map(drop).map_err(|error| Error::io(&error, "could not watch the time"))
}

/// Ends the process, whatever its other threads are stuck in; a full pipe keeps the message, not the end.
pub fn end_process(message: String, code: u8) -> ! {
    let (said, is_said) = std::sync::mpsc::sync_channel(1);
    let say = move || {
        crate::output::warning::print_always(&message);
        let _ = said.send(());
    };
    if std::thread::Builder::new().name("last words".to_owned()).spawn(say).is_ok() {
        let _ = is_said.recv_timeout(LAST_WORDS);
    }
    std::process::exit(i32::from(code))
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

/// A job that takes less needs no warning that no thread waits for signals.
const SHORT: Duration = Duration::from_millis(20);

/// The message about the remains after a signal.
const INCOMPLETE: &str = "what was written so far is incomplete";

/// The same where nothing remains.
const NOTHING: &str = "nothing was made";

/// The same of work that only reads.
const READ: &str = "nothing was changed";

/// The number that the shell adds to that of the signal that ended a process.
const SIGNAL_EXIT_BASE: usize = 128;

/// A job in the foreground.
pub struct Foreground {
    handle: JobHandle,
    progress: Arc<Mutex<Progress>>,
    /// The number of the signal that came; 0: none.
    signal: Arc<AtomicUsize>,
    /// The thread that heeds signals, until it is started.
    watch: Arc<Watch>,
    /// The next Ctrl-C ends the process.
    asked: Arc<AtomicBool>,
    /// The progress begins with the job's first report, when its images are open.
    is_late: bool,
    /// Without progress there is no line to end.
    ends_begun_lines: bool,
    /// 100 % is printed at the end, whether or not the work has printed it.
    says_end_again: bool,
    /// Errors after which 100 % is printed all the same.
    ends_with: fn(&Error) -> bool,
    /// The message about the remains after a signal, where it isn't [`INCOMPLETE`].
    leaves: Arc<OnceLock<&'static str>>,
    /// Nothing remains where the error doesn't say so.
    takes_back: bool,
}

/// The work of the thread that heeds signals, until that has it.
type Watch = Mutex<Option<Box<dyn FnOnce() + Send>>>;

/// Starts the thread that heeds signals, and leaves those to it. Where it can't be started, a later attempt may.
fn start_watch(watch: &Arc<Watch>) -> std::io::Result<()> {
    let before = SignalMask::block_ends();
    let taken = Arc::clone(watch);
    let heed = move || {
        before.set();
        if let Some(heed) = lock(&taken).take() {
            heed();
        }
    };
    let started = std::thread::Builder::new().name("signals".to_owned()).spawn(heed);
    if started.is_err() {
        before.set();
    }
    started.map(drop)
}

impl Foreground {
    /// Progress by `-p` (`wanted`) and `-q`; `what` comes before the bar.
    pub fn new(persona: Persona, wanted: bool, quiet: bool, what: &'static str) -> Result<Self, Failure> {
        let progress = Arc::new(Mutex::new(Progress::new(persona, wanted, quiet, what)));
        let shown = Arc::clone(&progress);
        let handle = JobHandle::watched(move |state| lock(&shown).update(state.offset, state.len));
        let signal = Arc::new(AtomicUsize::new(0));
        let is_hidden = matches!(*lock(&progress), Progress::Hidden);
        let asked = Arc::new(AtomicBool::new(false));
        let leaves = Arc::default();
        let watch =
            heed_signals(handle.clone(), Arc::clone(&signal), Arc::clone(&asked), is_hidden, Arc::clone(&leaves))?;
        Ok(Self {
            handle,
            progress,
            signal,
            watch: Arc::new(Mutex::new(Some(watch))),
            asked,
            is_late: false,
            ends_begun_lines: false,
            says_end_again: false,
            ends_with: |_| false,
            leaves,
            takes_back: false,
        })
    }

    /// Shows no progress before the job's images are open.
    #[must_use]
    pub fn starting_late(mut self) -> Self {
        self.is_late = true;
        self
    }

    /// As [`Foreground::starting_late`], and prints nothing where the images can't be opened.
    #[must_use]
    pub fn starting_with_images(mut self) -> Self {
        self.ends_begun_lines = true;
        self.starting_late()
    }

    /// Prints 100 % at the end also where the work has done so, as QEMU does for some verbs.
    #[must_use]
    pub fn saying_end_again(mut self) -> Self {
        self.says_end_again = true;
        self
    }

    /// Prints 100 % also where the work ends with such an error, as QEMU does for refusals of a format.
    #[must_use]
    pub fn ending_with(mut self, refusals: fn(&Error) -> bool) -> Self {
        self.ends_with = refusals;
        self
    }

    /// Of work whose result has its name when it is whole.
    #[must_use]
    pub fn leaving_nothing(self) -> Self {
        self.leaves.get_or_init(|| NOTHING);
        self
    }

    /// Of work that changes no file.
    #[must_use]
    pub fn reading(self) -> Self {
        self.leaves.get_or_init(|| READ);
        self
    }

    /// Of work that takes its new files away, and whose errors say where something incomplete stays.
    #[must_use]
    pub fn leaving_what_errors_say(mut self) -> Self {
        self.takes_back = true;
        self
    }

    /// Runs the job and takes the progress away; `work` makes its future, `failed` words its error.
    pub fn run<T, F: Future<Output = Result<T, Error>>>(
        &self,
        work: impl FnOnce(JobHandle) -> F,
        failed: impl FnOnce(&Error) -> Failure,
    ) -> Result<T, Failure> {
        self.run_saying(work, failed, |_| true, |_| {})
    }

    /// As [`Foreground::run`] for work whose result is printed by `say`: qemu-img does so before it ends the line of
    /// its progress. The progress ends at 100 % where the result is that of the `whole` work.
    pub fn run_saying<T, F: Future<Output = Result<T, Error>>>(
        &self,
        work: impl FnOnce(JobHandle) -> F,
        failed: impl FnOnce(&Error) -> Failure,
        whole: impl FnOnce(&T) -> bool,
        say: impl FnOnce(&T),
    ) -> Result<T, Failure> {
        if !self.is_late {
            lock(&self.progress).update(0, 1);
        }
        // The opening of a file may hang, and keep this thread.
        let is_watched = start_watch(&self.watch).is_ok();
        let result = watch_time(&self.handle).and_then(|()| {
            rt::block_on(async {
                let starting = rt::spawn(start_in_time(Arc::clone(&self.watch), is_watched, Arc::clone(&self.asked)));
                // Its time begins now, and nothing that can run keeps the job's calls from this thread.
                rt::yield_now().await;
                let result = work(self.handle.clone()).await;
                starting.cancel().await;
                result
            })
        });
        {
            let mut progress = lock(&self.progress);
            if self.says_end_again && result.is_ok() {
                progress.repeat_end();
            }
            let ends = match &result {
                Ok(value) => whole(value),
                Err(error) => (self.ends_with)(error),
            };
            if ends && result.is_err() {
                progress.update(0, 1);
            }
            progress.complete(ends);
            if let Ok(value) = &result {
                say(value);
            }
            if progress.has_begun() || !self.ends_begun_lines || matches!(*progress, Progress::Bar(_)) {
                progress.finish();
            }
        }
        let signal = self.signal.load(Ordering::Acquire);
        result.map_err(|error| match error.kind() {
            ErrorKind::Cancelled if signal != 0 => {
                let is_gone = self.takes_back && !error.message().starts_with(cowshed_create::INCOMPLETE);
                let leaves = if is_gone { NOTHING } else { self.leaves.get().unwrap_or(&INCOMPLETE) };
                Failure::new(format!("interrupted; {leaves}")).code(signal_exit_code(signal))
            }
            _ => failed(&reason(error)),
        })
    }
}

/// Runs a job without progress or a stop by signals.
pub fn run_quietly<T, F: Future<Output = Result<T, Error>>>(work: impl FnOnce(JobHandle) -> F) -> Result<T, Error> {
    let handle = JobHandle::new();
    watch_time(&handle)?;
    rt::block_on(work(handle)).map_err(reason)
}

/// qemu-img's message where an image can't be opened and an argument is wrong too: it opens the images first. Images of
/// strangers aren't opened for that.
pub fn opened_first(persona: Persona, naming: &NamingArgs, images: &[&ImageSpec], later: Failure) -> Failure {
    if persona != Persona::QemuImg || naming.untrusted.is_on() {
        return later;
    }
    for image in images {
        let image = ImageSpec { on_warning: None, ..(*image).clone() };
        let opened = run_quietly(async |_| image.open_for_reading().await?.close().await);
        if let Err(error) = opened {
            return Failure::open(persona, &image.name, &error);
        }
    }
    later
}

fn signal_exit_code(signal: usize) -> u8 {
    u8::try_from(SIGNAL_EXIT_BASE + signal).unwrap_or(1)
}

/// Starts the thread that heeds signals when the job isn't short, where it could not be started before.
async fn start_in_time(watch: Arc<Watch>, is_watched: bool, asked: Arc<AtomicBool>) {
    if is_watched {
        return;
    }
    rt::sleep(SHORT).await;
    if let Err(error) = start_watch(&watch) {
        // From the next signal on.
        let _ = flag::register(SIGINT, asked);
        crate::output::warning::print(&format!(
            "only a second Ctrl-C stops this: could not start a thread that watches for signals: {error}"
        ));
    }
}

/// The first signal asks the job to stop, so that it can leave the target closed in order. It has [`STOP_GRACE`] for
/// that; then, or on a second Ctrl-C, the process ends. Other signals may come twice: `timeout` signals its command, and
/// then the group of both. So a second Ctrl-C is one that comes [`SECOND`] later. A job that never waits for anything sees
/// the signal at its next pause point; one that waits is woken by the thread. A process that only opens something ends at
/// once: the opening may hang. SIGUSR1 asks for the progress where none is shown, as in qemu-img.
/// From now on signals are taken; the thread that is to run the returned watch acts on them.
fn heed_signals(
    handle: JobHandle,
    noted: Arc<AtomicUsize>,
    asked: Arc<AtomicBool>,
    tells: bool,
    leaves: Arc<OnceLock<&'static str>>,
) -> Result<Box<dyn FnOnce() + Send>, Failure> {
    let failed = |error: std::io::Error| Failure::new(format!("could not watch for signals: {error}"));
    let stops = [SIGINT, SIGTERM, SIGHUP];
    let code = i32::from(signal_exit_code(SIGINT as usize));
    flag::register_conditional_shutdown(SIGINT, code, Arc::clone(&asked)).map_err(failed)?;
    for signal in stops {
        flag::register_usize(signal, Arc::clone(&noted), signal as usize).map_err(failed)?;
        flag::register(signal, handle.cancel_flag()).map_err(failed)?;
    }
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP, SIGUSR1]).map_err(failed)?;
    Ok(Box::new(move || {
        for signal in &mut signals {
            if signal == SIGUSR1 {
                if tells {
                    let state = handle.progress();
                    report_percent(state.offset, state.len);
                }
                continue;
            }
            let code = signal_exit_code(usize::try_from(signal).unwrap_or(0));
            handle.cancel();
            std::thread::sleep(SECOND);
            asked.store(true, Ordering::Release);
            if only_opens() {
                end_process(format!("interrupted; {NOTHING}"), code);
            }
            std::thread::sleep(STOP_GRACE.saturating_sub(SECOND));
            let seconds = STOP_GRACE.as_secs();
            let leaves = leaves.get().unwrap_or(&INCOMPLETE);
            end_process(format!("interrupted, and I/O did not end within {seconds} s; {leaves}"), code);
        }
    }))
}
