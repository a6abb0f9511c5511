// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The command line tool. Called by the name `qemu-img` it has that tool's words, streams and exit codes.

mod commands;
mod invocation;
mod io;
mod output;

use cowshed_storage::socket::Listener;
use invocation::{Invocation, Persona};
use output::Console;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use signal_hook::consts::{SIGALRM, SIGIO, SIGUSR1};
use std::process::ExitCode;
use std::sync::Arc;

/// The signal of a write or a change of length past the limit of file sizes (`ulimit -f`).
const SIGXFSZ: i32 = 25;

/// Signals that end none of QEMU's tools. `SIGUSR1` shows how far a job is.
const HARMLESS: [i32; 3] = [SIGUSR1, SIGALRM, SIGIO];

/// A handler each, which programs that this one starts don't inherit. Under our own name `SIGALRM` is a time limit.
fn survive_signals(persona: Persona) {
    for signal in HARMLESS {
        if persona != Persona::Cowshed || signal == SIGUSR1 {
            let _ = signal_hook::flag::register(signal, Arc::default());
        }
    }
}

/// Lets the process have as many files open as it may. The usual soft limit of 1024 is for programs with `select`, and
/// a split disk has a file for every 2 GiB.
fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        // Without it only such disks fail.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
    }
}

fn main() -> ExitCode {
    Listener::claim_passed();
    // With a handler the operation fails with EFBIG; the signal's default would end the process with all that isn't flushed.
    let _ = signal_hook::flag::register(SIGXFSZ, Arc::default());
    raise_file_limit();
    let invocation = Invocation::from_argv(std::env::args_os());
    survive_signals(invocation.persona);
    let mut console = Console::new(invocation.persona);
    let code = commands::dispatch(&invocation, &mut console);
    let name = invocation.persona.name();
    match console.finish() {
        None => ExitCode::from(code),
        Some(error) => {
            Console::new(invocation.persona).error_text(&format!("{name}: could not write the output: {error}\n"));
            ExitCode::from(if code == 0 { 1 } else { code })
        }
    }
}
