// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Into the background: the program starts itself once more, and ends when the other one is up or has failed.

use crate::output::Failure;
use cowshed_storage::Listener;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

/// Tells the second process that it is the one.
const MARK: &str = "COWSHED_BACKGROUND";

/// The second process's message that it is up.
const UP: &[u8] = b"up";

/// The two processes.
pub enum Background {
    /// The first one: it ends with this exit code.
    Parent(u8),
    /// The second one, which serves.
    Child,
}

impl Background {
    /// Starts the second process, or notices to be it.
    pub fn start() -> Result<Background, Failure> {
        let failed = |error: io::Error| Failure::new(format!("could not go into the background: {error}"));
        if std::env::var_os(MARK).is_some() {
            // Away from the terminal and its signals. Fails only for a leader already.
            let _ = rustix::process::setsid();
            return Ok(Background::Child);
        }
        if Listener::are_passed() {
            return Err(Failure::new("sockets that a service manager passed can't follow into the background"));
        }
        let mut arguments = std::env::args_os();
        let name = arguments.next().unwrap_or_default();
        let mut child = Command::new(std::env::current_exe().map_err(failed)?)
            .arg0(name)
            .args(arguments)
            .env(MARK, "1")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(failed)?;
        let mut said = Vec::new();
        if let Some(mut output) = child.stdout.take() {
            output.read_to_end(&mut said).map_err(failed)?;
        }
        // Its text before that is for the user.
        if let Some(message) = said.strip_suffix(UP) {
            let _ = io::stdout().write_all(message);
            return Ok(Background::Parent(0));
        }
        // It has printed the reason on standard error.
        let status = child.wait().map_err(failed)?;
        Ok(Background::Parent(
            status.code().and_then(|code| u8::try_from(code).ok()).filter(|code| *code != 0).unwrap_or(1),
        ))
    }

    /// Tells the first process that this one is up, and lets go of its streams.
    pub fn detach(self) -> Result<(), Failure> {
        let failed = |error: io::Error| Failure::new(format!("could not go into the background: {error}"));
        let mut output = io::stdout();
        output.write_all(UP).and_then(|()| output.flush()).map_err(failed)?;
        let null = File::options().read(true).write(true).open("/dev/null").map_err(failed)?;
        rustix::stdio::dup2_stdout(&null).map_err(|error| failed(error.into()))?;
        rustix::stdio::dup2_stderr(&null).map_err(|error| failed(error.into()))?;
        Ok(())
    }
}
