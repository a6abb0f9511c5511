// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The storage daemon under its names: `serve`, `qemu-nbd`, `qemu-storage-daemon`.

mod background;
mod list;
mod logging;
pub mod nbd;
pub mod serve;
pub mod storage_daemon;
pub mod top;

use super::Verb;
use crate::output::{Console, Failure};
use background::{Background, PidFile};
use cowshed_block::Error;
use cowshed_daemon::{Message, Ready, Sender, Setup, StopReason};
use logging::LogFormat;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// Programs of QEMU whose names and command lines we have, besides qemu-img.
pub const TOOLS: &[Verb] = &[nbd::VERB, storage_daemon::VERB, super::io::QEMU_IO];

/// How a daemon runs, whatever it serves.
struct Running {
    setup: Setup,
    /// Leave the terminal once it is up.
    background: bool,
    pid_file: Option<String>,
    log: LogFormat,
    /// What is logged where `RUST_LOG` doesn't say it.
    log_level: &'static str,
}

impl Running {
    /// Runs it to its end. `announce` tells the user what is there now.
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
        logging::start(self.log, self.log_level)?;
        let mut pid_file = None;
        let mut trouble: Option<Failure> = None;
        let result = cowshed_daemon::run(self.setup, |ready| {
            let up = || -> Result<(), Failure> {
                stop_on_signals(ready.control.clone())?;
                pid_file = self.pid_file.as_deref().map(PidFile::write).transpose()?;
                announce(ready);
                background.map_or(Ok(()), Background::detach)
            };
            up().map_err(|failure| {
                let error = Error::invalid_argument(failure.message.clone());
                trouble = Some(failure);
                error
            })
        });
        drop(pid_file);
        match (result, trouble) {
            (_, Some(failure)) => Err(failure),
            (Ok(StopReason::Quit | StopReason::Signal(_) | StopReason::Idle), None) => Ok(0),
            (Err(error), None) => Err(Failure::new(error.to_string())),
        }
    }
}

/// A signal stops the daemon in order; a second Ctrl-C ends the process at once. Other signals may come twice (from a
/// service manager and from a wrapper): what isn't flushed yet must not be lost for that.
fn stop_on_signals(control: Sender<Message>) -> Result<(), Failure> {
    let failed = |error: std::io::Error| Failure::new(format!("could not watch for signals: {error}"));
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).map_err(failed)?;
    let watch = move || {
        let mut stopping = false;
        for signal in &mut signals {
            tracing::info!(signal, "stopping");
            if std::mem::replace(&mut stopping, true) {
                if signal == SIGINT {
                    std::process::exit(128 + signal);
                }
                continue;
            }
            // Fails only when it has stopped already.
            let _ = control.send(Message::Stop(StopReason::Signal(signal)));
        }
    };
    std::thread::Builder::new().name("signals".to_owned()).spawn(watch).map_err(failed)?;
    Ok(())
}

/// Prints what the values of `--object` ask for with `help`; true when one did.
fn show_object_help<'a>(objects: impl IntoIterator<Item = &'a String>, console: &mut Console) -> Result<bool, Failure> {
    for text in objects {
        if let Some(help) = cowshed_daemon::object_help(text)? {
            console.line(help);
            return Ok(true);
        }
    }
    Ok(false)
}

/// Threads that serve clients where the user doesn't say it: more than four rarely help, and each costs memory.
fn default_queues() -> usize {
    std::thread::available_parallelism().map_or(1, |count| count.get().min(4))
}
