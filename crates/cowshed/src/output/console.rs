// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Standard output and standard error. All output goes through here, in the form of the tool's name, and never panics.

use crate::invocation::Persona;
use cowshed_types::{in_lines, name_of_text};
use std::borrow::Cow;
use std::fmt::Display;
use std::io::{self, BufWriter, IsTerminal, Stdout, Write};

/// The output of a verb.
///
/// A reader that went away (`cowshed map a.qcow2 | head`) changes neither the work of a verb nor its exit code: later
/// output is dropped. Any other failure to print is kept and reported by [`Console::finish`].
pub struct Console {
    /// The tool whose manners apply.
    pub persona: Persona,
    out: BufWriter<Stdout>,
    failed: Option<io::Error>,
}

impl Console {
    /// The process's own standard streams.
    pub fn new(persona: Persona) -> Self {
        super::warning::set_persona(persona);
        Self { persona, out: BufWriter::new(io::stdout()), failed: None }
    }

    /// Prints text as it is, file names in it as they are on disk.
    pub fn print(&mut self, text: impl Display) {
        self.print_text(&text.to_string());
    }

    /// The same of text that is made.
    pub fn print_text(&mut self, text: &str) {
        if self.failed.is_none() {
            self.failed = self.out.write_all(&name_of_text(text)).err();
        }
    }

    /// Prints text and a line end.
    pub fn line(&mut self, text: impl Display) {
        self.print(format_args!("{text}\n"));
    }

    /// Prints a message with the program's name in front of each line, to standard error.
    pub fn complain(&mut self, message: impl Display) {
        let message = message.to_string();
        let name = self.persona.name();
        self.error_text(&format!("{name}: {message}\n"));
    }

    /// Prints to standard error, after earlier output. A failure of that has nowhere to go.
    pub fn error_text(&mut self, text: &str) {
        self.flush();
        let _ = io::stderr().lock().write_all(&name_of_text(&lines_of(text)));
    }

    /// Hands the printed text on to the reader.
    pub fn flush(&mut self) {
        if self.failed.is_none() {
            self.failed = self.out.flush().err();
        }
    }

    /// True when escape sequences for colour are welcome on standard output.
    pub fn colour(&self) -> bool {
        self.persona == Persona::Cowshed
            && io::stdout().is_terminal()
            && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
            && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
    }

    /// Flushes; the error, if something could not be printed to a reader that still listens.
    pub fn finish(mut self) -> Option<io::Error> {
        self.flush();
        let failed = self.failed.take();
        // The rest of the buffer could not be written; dropping the writer would try once more.
        let (_, _) = self.out.into_parts();
        failed.filter(|error| error.kind() != io::ErrorKind::BrokenPipe)
    }
}

/// A text that ends a line. Names in it begin none.
fn lines_of(text: &str) -> Cow<'_, str> {
    match text.strip_suffix('\n') {
        Some(body) => Cow::Owned(in_lines(body).into_owned() + "\n"),
        None => in_lines(text),
    }
}
