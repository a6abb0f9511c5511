// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The end of a command of the shell.

use cowshed_types::Error;

/// The result of a command.
pub type Done = Result<(), CommandFailed>;

/// A command that failed: the shell goes on, and its exit code is 1 in the end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CommandFailed {
    /// A line for standard output.
    pub output: Option<String>,
    /// A line for standard error.
    pub error: Option<String>,
    /// A line for standard error, with the program's name in front.
    pub complaint: Option<String>,
    /// The command's usage is to be shown.
    pub shows_usage: bool,
}

impl CommandFailed {
    /// A line on standard output, where qemu-io reports most failures.
    pub fn output(line: impl Into<String>) -> CommandFailed {
        CommandFailed { output: Some(line.into()), ..CommandFailed::default() }
    }

    /// A line on standard error.
    pub fn plain_error(line: impl Into<String>) -> CommandFailed {
        CommandFailed { error: Some(line.into()), ..CommandFailed::default() }
    }

    /// A line on standard error, after the program's name.
    pub fn complaint(line: impl Into<String>) -> CommandFailed {
        CommandFailed { complaint: Some(line.into()), ..CommandFailed::default() }
    }

    /// Shows the command's usage.
    pub fn usage() -> CommandFailed {
        CommandFailed { shows_usage: true, ..CommandFailed::default() }
    }

    /// No line: all has been printed.
    pub fn silent() -> CommandFailed {
        CommandFailed::default()
    }

    /// With a line on standard error before.
    #[must_use]
    pub fn error(mut self, line: impl Into<String>) -> CommandFailed {
        self.error = Some(line.into());
        self
    }
}

/// The reason of an error: the system's words alone (`terse`, as qemu-io has it), or all that is known.
pub fn reason(error: &Error, terse: bool) -> String {
    if !terse {
        return error.to_string();
    }
    let text = std::io::Error::from_raw_os_error(error.errno().0).to_string();
    text.split(" (os error").next().unwrap_or_default().to_owned()
}
