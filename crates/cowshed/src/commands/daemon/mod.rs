// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The storage daemon under its names: `serve`, `qemu-nbd`, `qemu-storage-daemon`.

mod background;
mod device;
mod floods;
mod keys;
mod list;
mod logging;
pub mod mount;
pub mod nbd;
mod pid_file;
mod qemu_lines;
pub mod serve;
pub mod storage_daemon;
pub mod top;

use super::{Verb, work};
use crate::invocation::{Persona, has_name_of_qemu};
use crate::output::{Console, Failure, warning};
use background::Background;
use clap::Args;
use cowshed_daemon::{
    GuardProgram, LOG_REFUSED, MIN_REQUEST_MEMORY_BYTES, Message, REQUEST_MEMORY_BYTES, Ready, STOP_LIMIT, Sender,
    Setup, StopReason,
};
use cowshed_image::graph::CORRUPTION;
use cowshed_image::options::parse_size;
use cowshed_storage::SignalMask;
use cowshed_types::Error;
use device::{DeviceLink, DeviceState};
use logging::LogFormat;
use pid_file::PidFile;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::any::Any;
use std::cell::{Cell, RefCell};
use std::ffi::OsString;
use std::time::{Duration, Instant};

/// Programs of QEMU whose names and command lines we have, besides qemu-img.
pub const TOOLS: &[Verb] = &[nbd::VERB, storage_daemon::VERB, super::io::QEMU_IO];

/// The settings of a daemon, whatever it serves.
struct Running {
    setup: Setup,
    /// Leave the terminal once it is up.
    background: bool,
    /// Go to the root folder once it is up, as QEMU's, so that the folder's file system can be unmounted.
    leaves_folder: bool,
    pid_file: Option<String>,
    /// QEMU's words in front of the error where that file can't be made.
    pid_frame: &'static str,
    /// The process of the pid file is stopped first.
    takes_over: bool,
    /// The kernel's device to serve.
    device: Option<DeviceLink>,
    log: LogFormat,
    /// The filter of the log where `RUST_LOG` is unset.
    log_level: &'static str,
    /// Dropped at the end, in whatever way that comes.
    kept: Option<Box<dyn Any>>,
    /// The words for an error at the start.
    worded: Box<dyn Fn(&Error) -> Failure>,
}

/// An error as it is.
fn as_it_is(error: &Error) -> Failure {
    let sentence = match error.file_name() {
        Some(option) => format!("{option}: {}", error.sentence()),
        None => error.sentence(),
    };
    Failure { sentence: Some(sentence), ..Failure::new(error.to_string()) }
}

/// The limits of a daemon.
#[derive(Args, Clone, Debug)]
struct BoundArgs {
    /// Seconds to stop in order; whatever hangs is ended then; 0: no limit
    #[arg(long, value_name = "SECONDS", default_value_t = STOP_LIMIT.as_secs())]
    stop_timeout: u64,
    /// Memory for the data of all clients' requests, at least 32M; each connection has 1M besides [default: 256M]
    #[arg(long, value_name = "SIZE")]
    request_memory: Option<String>,
}

impl BoundArgs {
    /// The time limit for stopping in order.
    fn stop_limit(&self) -> Option<Duration> {
        (self.stop_timeout > 0).then(|| Duration::from_secs(self.stop_timeout.min(MOST_SECONDS)))
    }

    fn request_memory_bytes(&self) -> Result<u64, Failure> {
        let Some(text) = &self.request_memory else { return Ok(REQUEST_MEMORY_BYTES) };
        let bytes = parse_size(text).map_err(|error| error.file("--request-memory"))?;
        if bytes < MIN_REQUEST_MEMORY_BYTES {
            let message = format!("--request-memory: {bytes} bytes don't hold the longest request, which has 32 MiB");
            return Err(Failure::new(message));
        }
        Ok(bytes)
    }
}

/// The longest time to stop in: a century.
const MOST_SECONDS: u64 = 3_000_000_000;

/// The pause between looks for a second signal of a daemon that stops.
const LOOK: Duration = Duration::from_millis(20);

/// The time after the daemon's own limit at which its signals' thread ends the process: when even the control thread
/// hangs.
const STUCK_CONTROL: Duration = Duration::from_secs(3);

impl Running {
    /// The filter of the log. QEMU's programs are silent about writable exports on the network, and so are ours under
    /// their names. Their messages about images and clients are printed there as well, in place of lines of the log.
    fn log_filter(&self) -> String {
        let mut filter = self.log_level.to_owned();
        if warning::persona() != Persona::Cowshed {
            filter += &format!(",{LOG_REFUSED}=debug");
        }
        if !has_name_of_qemu() {
            return filter;
        }
        let exposure = (self.log_level == "warn").then_some(cowshed_daemon::EXPOSURE);
        for target in [cowshed_daemon::OPENING, CORRUPTION].into_iter().chain(exposure) {
            filter += &format!(",{target}=off");
        }
        filter
    }

    /// Runs it to its end. `announce` tells the user the addresses of the running daemon.
    fn run(self, announce: impl FnOnce(&Ready)) -> Result<u8, Failure> {
        let standard = self.setup.steps.iter().find(|step| step.uses_standard_streams());
        if let (true, Some(step)) = (self.background, standard) {
            return Err(Failure::new(format!("{}: cannot use stdio with -daemonize", step.option())));
        }
        let background = match self.background {
            true => match Background::start()? {
                Background::Parent(code) => return Ok(code),
                child => Some(child),
            },
            false => None,
        };
        let log = logging::start(self.log, &self.log_filter())?;
        if has_name_of_qemu() {
            cowshed_daemon::print_warnings(warning::print);
        }
        if let (true, Some(path)) = (self.takes_over, &self.pid_file) {
            pid_file::stop_owner(path)?;
        }
        let stop_limit = self.setup.stop_limit;
        let left = RefCell::new((None, self.kept));
        let mut trouble: Option<Failure> = None;
        let device = DeviceState::default();
        let worded = self.worded;
        let is_up = Cell::new(false);
        let started = |ready: &Ready| {
            let up = || -> Result<(), Failure> {
                stop_on_signals(ready.control.clone(), stop_limit, device.clone())?;
                left.borrow_mut().0 = self.pid_file.as_deref().map(PidFile::write).transpose().map_err(|failure| {
                    let framed = |sentence: String| format!("{}{sentence}", self.pid_frame);
                    Failure { sentence: failure.sentence.clone().map(framed), ..failure }
                })?;
                announce(ready);
                if self.leaves_folder {
                    let failed = |error| Failure::new(format!("could not go to the root folder: {error}"));
                    std::env::set_current_dir("/").map_err(failed)?;
                }
                if let Some(link) = self.device {
                    let failed = |error| Failure::new(format!("could not start a thread: {error}"));
                    return link.start(ready.control.clone(), device.clone(), background).map_err(failed);
                }
                background.map_or(Ok(()), Background::detach)
            };
            is_up.set(true);
            up().map_err(|failure| {
                let error = Error::invalid_argument(failure.message.clone());
                trouble = Some(failure);
                error
            })
        };
        let result = cowshed_daemon::run_with(self.setup, started, |error| {
            drop(left.take());
            log.tell_left_out();
            work::end_process(error.to_string(), 1)
        });
        drop(left);
        match (result, trouble.or_else(|| device.failure())) {
            (_, Some(failure)) => Err(failure),
            (Ok(StopReason::Quit | StopReason::Signal(_) | StopReason::Idle), None) => Ok(0),
            // An error at the end concerns no option.
            (Err(error), None) if is_up.get() => Err(as_it_is(&error)),
            (Err(error), None) => Err(worded(&error)),
        }
    }
}

/// A signal stops the daemon in order; a second Ctrl-C ends the process at once. Other signals may come twice (from a
/// service manager and from a wrapper): unflushed data must not be lost for that.
fn stop_on_signals(control: Sender<Message>, stop_limit: Option<Duration>, device: DeviceState) -> Result<(), Failure> {
    let failed = |error: std::io::Error| Failure::new(format!("could not watch for signals: {error}"));
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).map_err(failed)?;
    let watch = move || {
        let Some(first) = signals.forever().next() else { return };
        tracing::info!(signal = first, "stopping");
        let stop = move || {
            // Fails only when it has stopped already.
            let _ = control.send(Message::Stop(StopReason::Signal(first)));
        };
        // The server must be there for the device's data in the page cache.
        let detach_limit = device.detach_before(stop);
        let stopping = Instant::now();
        loop {
            if signals.pending().any(|signal| signal == SIGINT) {
                std::process::exit(128 + SIGINT);
            }
            if let Some(limit) = stop_limit.filter(|limit| stopping.elapsed() > *limit + STUCK_CONTROL + detach_limit) {
                let message =
                    format!("could not stop in order (stop timeout {} s): the control thread hangs", limit.as_secs());
                work::end_process(message, 1);
            }
            std::thread::sleep(LOOK);
        }
    };
    // The control thread may hang in the opening of a file.
    let before = SignalMask::block_ends();
    let heed = move || {
        before.set();
        watch();
    };
    let started = std::thread::Builder::new().name("signals".to_owned()).spawn(heed);
    let failed = |error| Failure::from(Error::io(&error, "could not start a thread that watches for signals"));
    started.map(drop).map_err(failed)
}

/// Prints the help that values of `--object` ask for with `help`; true when one did.
pub(super) fn show_object_help<'a>(
    objects: impl IntoIterator<Item = &'a String>,
    console: &mut Console,
) -> Result<bool, Failure> {
    for text in objects {
        if let Some(help) = cowshed_daemon::object_help(text)? {
            console.line(help);
            return Ok(true);
        }
    }
    Ok(false)
}

/// This program, as the guard of a mount.
fn mount_guard() -> Option<GuardProgram> {
    let arguments = ["umount", "--guard"].map(OsString::from).to_vec();
    // The program that runs, even where its file has another one's bytes by now.
    Some(GuardProgram { program: "/proc/self/exe".into(), name: "cowshed".into(), arguments })
}

/// Threads that serve clients by default: more than four rarely help, and each costs memory.
fn default_queues() -> usize {
    std::thread::available_parallelism().map_or(1, |count| count.get().min(4))
}

/// The most threads that serve clients, as for queues of an export.
const MOST_QUEUES: usize = 64;

/// Queues of an export of the type `vhost-user-blk` by default: a guest with a queue for each of its processors finds enough.
fn vhost_queues() -> u16 {
    std::thread::available_parallelism().map_or(1, |count| count.get().min(MOST_QUEUES) as u16)
}

/// The threads of `--queues`, or as many as by default.
fn queues(given: Option<usize>) -> Result<usize, Failure> {
    match given {
        Some(count) if !(1..=MOST_QUEUES).contains(&count) => {
            Err(Failure::new(format!("--queues is {count}, and a daemon has 1 to {MOST_QUEUES} threads that serve")))
        }
        given => Ok(given.unwrap_or_else(default_queues)),
    }
}
