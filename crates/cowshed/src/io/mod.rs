// SPDX-License-Identifier: Apache-2.0 OR MIT
//! An I/O shell over images: `cowshed io`, and by the name `qemu-io` one that scripts made for that tool can use.
//!
//! `table.rs` lists the commands; `arguments.rs` takes their words apart, `text.rs` words their reports. The rest
//! carries them out: `transfer.rs` at once, `background.rs` without waiting, and `image.rs` those that are no transfer.
//! `open.rs` opens and closes, `faults.rs` holds requests up, `zone.rs` refuses requests to zoned devices,
//! `prompt.rs` asks for lines.

mod arguments;
mod background;
mod faults;
mod image;
mod open;
mod outcome;
mod prompt;
mod reopen;
mod table;
mod text;
mod transfer;
mod zone;

pub use open::{OpenImage, OpenSpec};

use crate::output::Console;
use arguments::Arguments;
use cowshed_storage::rt;
use outcome::{CommandFailed, Done};
use prompt::Lines;
use std::cell::RefCell;
use std::rc::Rc;
use table::ShellCommand;

/// The words that the shell uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Manner {
    /// In front of messages and in the prompt.
    pub program: &'static str,
    /// Errors by the system's words alone, as in qemu-io.
    pub terse: bool,
}

/// The shell's state.
pub struct Shell {
    console: Console,
    manner: Manner,
    opened: Option<OpenImage>,
    /// The output of requests in the background that isn't printed yet.
    said_later: Rc<RefCell<String>>,
    pending: Vec<rt::JoinHandle<()>>,
    /// Tags of requests that are known to be held up.
    held: Vec<String>,
    is_over: bool,
}

impl Shell {
    /// A shell without an image, which prints to `console`.
    pub fn new(console: Console, manner: Manner) -> Shell {
        Shell {
            console,
            manner,
            opened: None,
            said_later: Rc::default(),
            pending: Vec::new(),
            held: Vec::new(),
            is_over: false,
        }
    }

    /// Opens the image of the command line and runs `commands`, or those from the terminal or standard input. Returns
    /// the exit code: 1 when a command failed.
    pub async fn run(mut self, image: Option<OpenSpec>, commands: &[String]) -> u8 {
        let mut is_well = match image {
            Some(spec) => {
                let opened = open::open(&mut self, spec).await;
                self.conclude(None, opened)
            }
            None => true,
        };
        if is_well {
            is_well = match commands {
                [] => self.run_interactively().await,
                commands => self.run_all(commands).await,
            };
        }
        let closed = open::close(&mut self).await;
        is_well &= self.conclude(None, closed);
        let (program, persona) = (self.manner.program, self.console.persona);
        match self.console.finish() {
            Some(error) => {
                Console::new(persona).error_text(&format!("{program}: could not write the output: {error}\n"));
                1
            }
            None => u8::from(!is_well),
        }
    }

    async fn run_all(&mut self, commands: &[String]) -> bool {
        let mut is_well = true;
        for line in commands {
            is_well &= self.run_line(line).await;
            if self.is_over {
                break;
            }
        }
        is_well
    }

    async fn run_interactively(&mut self) -> bool {
        let mut lines = Lines::new(self.manner.program);
        let mut is_well = true;
        while !self.is_over {
            self.console.flush();
            match lines.next().await {
                Ok(Some(line)) => is_well &= self.run_line(&line).await,
                Ok(None) => break,
                Err(error) => {
                    let failed = CommandFailed::complaint(format!("could not read a command: {error}"));
                    return self.conclude(None, Err(failed));
                }
            }
        }
        is_well
    }

    /// One command line; true when it went well.
    async fn run_line(&mut self, line: &str) -> bool {
        // QEMU's tool knows no other blank.
        let is_blank = |letter: char| letter == ' ' || (!self.manner.terse && letter.is_ascii_whitespace());
        let line = line.strip_suffix('\n').unwrap_or(line);
        let words: Vec<&str> = line.split(is_blank).filter(|word| !word.is_empty()).collect();
        let Some((name, words)) = words.split_first() else { return true };
        let (command, done) = match table::find(name) {
            None => (None, Err(CommandFailed::plain_error(format!("command \"{name}\" not found")))),
            Some(command) => (Some(command), self.carry_out(command, name, words).await),
        };
        // A moment for requests in the background, so that they don't wait for the next long command.
        rt::yield_now().await;
        self.print_later();
        self.conclude(command, done)
    }

    async fn carry_out(&mut self, command: &'static ShellCommand, name: &str, words: &[&str]) -> Done {
        if command.needs_image && self.opened.is_none() {
            return Err(CommandFailed::plain_error("no file open, try 'help open'"));
        }
        command.check_count(name, words.len())?;
        if command.writes && self.opened.as_ref().is_some_and(|opened| opened.node.is_read_only()) {
            return Err(CommandFailed::complaint("Block node is read-only"));
        }
        let arguments = Arguments::parse(name, command.flags, words)?;
        (command.run)(self, arguments).await
    }

    /// Reports the end of a command; true when it went well.
    fn conclude(&mut self, command: Option<&ShellCommand>, done: Done) -> bool {
        let Err(failed) = done else { return true };
        if let Some(line) = failed.error {
            self.console.error_text(&format!("{line}\n"));
        }
        if let Some(line) = failed.complaint {
            let text = format!("{}: {line}\n", self.manner.program);
            self.console.error_text(&text);
        }
        if let Some(line) = failed.output {
            self.console.line(line);
        }
        if let Some(command) = command.filter(|_| failed.shows_usage) {
            self.console.line(command.usage());
        }
        false
    }

    /// Prints the texts of requests in the background.
    fn print_later(&mut self) {
        faults::print_news(self);
        let said = std::mem::take(&mut *self.said_later.borrow_mut());
        if !said.is_empty() {
            self.console.print(said);
        }
        self.pending.retain(|task| !task.is_finished());
    }

    /// The open image. Commands that need one are not called without.
    fn opened(&self) -> Result<&OpenImage, CommandFailed> {
        self.opened.as_ref().ok_or_else(|| CommandFailed::plain_error("no file open, try 'help open'"))
    }

    /// The reason of an error in this shell's manner.
    fn reason(&self, error: &cowshed_types::Error) -> String {
        outcome::reason(error, self.manner.terse)
    }
}
