// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Requests in the background: a task each, whose report is printed when there is time.

use super::Shell;
use super::arguments::Arguments;
use super::outcome::{CommandFailed, Done, reason};
use super::text::{self, Report};
use super::transfer::{self, DEFAULT_PATTERN, Expected, Range};
use cowshed_image::Node;
use cowshed_storage::{IoBuf, rt};
use cowshed_types::Result;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The pause of the shell between two looks at requests in the background.
const LOOK: Duration = Duration::from_millis(1);

/// Starts a request; its text is printed later.
fn start<F>(shell: &mut Shell, work: impl FnOnce(Arc<Node>) -> F) -> Done
where
    F: Future<Output = String> + 'static,
{
    let node = shell.opened()?.node.clone();
    let said = std::rc::Rc::clone(&shell.said_later);
    let work = work(node);
    shell.pending.push(rt::spawn(async move {
        let text = work.await;
        said.borrow_mut().push_str(&text);
    }));
    Ok(())
}

/// The end of a request in words.
struct Ending {
    what: &'static str,
    failed: &'static str,
    arguments: Arguments,
    range: Range,
    terse: bool,
    started: Instant,
}

impl Ending {
    fn report(&self, result: Result<()>, elapsed: Duration) -> String {
        if let Err(error) = result {
            return format!("{} failed: {}\n", self.failed, reason(&error, self.terse));
        }
        if self.arguments.has('q') {
            return String::new();
        }
        let Range { offset, len } = self.range;
        let compact = self.arguments.has('C');
        Report { what: self.what, offset, asked_bytes: len, done_bytes: len, elapsed, compact }.render()
    }
}

pub(super) async fn read(shell: &mut Shell, arguments: Arguments) -> Done {
    let pattern = arguments.pattern('P')?;
    if arguments.has('i') {
        shell.console.line("injecting invalid read request");
        return Ok(());
    }
    let range = transfer::ranges(&arguments)?;
    let (terse, started) = (shell.manner.terse, Instant::now());
    let ending = Ending { what: "read", failed: "readv", arguments, range, terse, started };
    start(shell, move |node| async move {
        let (result, data) = match transfer::check_end(&node, range) {
            Ok(()) => node.read(range.offset, IoBuf::zeroed(range.len as usize)).await,
            Err(error) => (Err(error), IoBuf::zeroed(0)),
        };
        let elapsed = ending.started.elapsed();
        let mut said = String::new();
        if result.is_ok() {
            let expected = pattern.map(|byte| Expected { byte, skip: 0, len: range.len });
            if let Some(verdict) = expected.and_then(|expected| expected.verdict(&data, range.offset)) {
                said += &format!("{verdict}\n");
            }
            if ending.arguments.has('v') && !ending.arguments.has('q') {
                said += &text::dump(&data, range.offset);
            }
        }
        said + &ending.report(result, elapsed)
    })
}

pub(super) async fn write(shell: &mut Shell, arguments: Arguments) -> Done {
    let pattern = arguments.pattern('P')?.unwrap_or(DEFAULT_PATTERN);
    if arguments.has('i') {
        shell.console.line("injecting invalid write request");
        return Ok(());
    }
    if arguments.operands.len() < 2 {
        return Err(CommandFailed::usage());
    }
    if arguments.has('u') && !arguments.has('z') {
        return Err(CommandFailed::output("-u requires -z to be specified"));
    }
    if arguments.has('z') && arguments.operands.len() > 2 {
        return Err(CommandFailed::output("-z supports only a single length parameter"));
    }
    if arguments.has('z') && arguments.has('r') {
        return Err(CommandFailed::output("cannot combine zero write with registered I/O buffer"));
    }
    // Zeroes need no buffer.
    let range = match arguments.has('z') {
        true => transfer::unbounded_range(&arguments)?,
        false => transfer::ranges(&arguments)?,
    };
    let (terse, started) = (shell.manner.terse, Instant::now());
    let ending = Ending { what: "wrote", failed: "aio_write", arguments, range, terse, started };
    start(shell, move |node| async move {
        let result = match transfer::check_end(&node, range) {
            Err(error) => Err(error),
            Ok(()) if ending.arguments.has('z') => transfer::write_zeroes(&node, range, &ending.arguments).await,
            Ok(()) => {
                let data = transfer::filled(pattern, range.len as usize);
                transfer::write_data(&node, range, data, ending.arguments.has('f')).await
            }
        };
        let elapsed = ending.started.elapsed();
        ending.report(result, elapsed)
    })
}

pub(super) async fn discard(shell: &mut Shell, arguments: Arguments) -> Done {
    let range = transfer::unbounded_range(&arguments)?;
    let (terse, started) = (shell.manner.terse, Instant::now());
    let ending = Ending { what: "discarded ", failed: "aio_discard", arguments, range, terse, started };
    start(shell, move |node| async move {
        let result = match transfer::check_end(&node, range) {
            Ok(()) => node.discard(range.offset, range.len).await,
            Err(error) => Err(error),
        };
        let elapsed = ending.started.elapsed();
        ending.report(result, elapsed)
    })
}

/// Waits for everything in the background.
pub(super) async fn wait_for_all(shell: &mut Shell) {
    loop {
        shell.print_later();
        if shell.pending.is_empty() {
            return;
        }
        rt::sleep(LOOK).await;
    }
}

pub(super) async fn flush(shell: &mut Shell) -> Done {
    wait_for_all(shell).await;
    super::image::flush(shell).await
}
