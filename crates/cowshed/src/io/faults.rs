// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Breakpoints: requests held up below the format by the `blkdebug` driver.

use super::Shell;
use super::arguments::Arguments;
use super::outcome::{CommandFailed, Done};
use cowshed_storage::fault::{Event, Faults};
use cowshed_storage::rt;
use std::sync::Arc;
use std::time::Duration;

const LOOK: Duration = Duration::from_millis(1);
const NO_SUCH_THING: &str = "No such file or directory";
const NOT_SUPPORTED: &str = "Operation not supported";

fn faults(shell: &Shell) -> Option<Arc<Faults>> {
    shell.opened.as_ref().and_then(|opened| opened.image().faults())
}

fn word(arguments: &Arguments, index: usize) -> Result<&str, CommandFailed> {
    arguments.operands.get(index).map(String::as_str).ok_or_else(CommandFailed::usage)
}

pub(super) async fn set_break(shell: &mut Shell, arguments: Arguments) -> Done {
    let (event, tag) = (word(&arguments, 0)?, word(&arguments, 1)?);
    let failed = |reason: &str| CommandFailed::output(format!("Could not set breakpoint: {reason}"));
    let faults = faults(shell).ok_or_else(|| failed(NOT_SUPPORTED))?;
    let event = Event::parse(event).filter(|event| *event != Event::None).ok_or_else(|| failed(NO_SUCH_THING))?;
    faults.set_break(event, tag);
    Ok(())
}

pub(super) async fn resume(shell: &mut Shell, arguments: Arguments) -> Done {
    let tag = word(&arguments, 0)?;
    let failed = |reason: &str| CommandFailed::output(format!("Could not resume request: {reason}"));
    let faults = faults(shell).ok_or_else(|| failed(NOT_SUPPORTED))?;
    print_news(shell);
    match faults.resume(tag) {
        true => resumed(shell, tag),
        false => return Err(failed(NO_SUCH_THING)),
    }
    rt::yield_now().await;
    Ok(())
}

pub(super) async fn remove_break(shell: &mut Shell, arguments: Arguments) -> Done {
    let tag = word(&arguments, 0)?;
    let failed = |reason: &str| CommandFailed::output(format!("Could not remove breakpoint {tag}: {reason}"));
    let faults = faults(shell).ok_or_else(|| failed(NOT_SUPPORTED))?;
    print_news(shell);
    let was_set = faults.remove_break(tag);
    while faults.resume(tag) {
        resumed(shell, tag);
    }
    if was_set { Ok(()) } else { Err(failed(NO_SUCH_THING)) }
}

/// Waits until a request is held up under this tag. Without blkdebug there never will be one: refused at once.
pub(super) async fn wait_break(shell: &mut Shell, arguments: Arguments) -> Done {
    let tag = word(&arguments, 0)?;
    let failed = || CommandFailed::output(format!("Could not wait for breakpoint {tag}: {NOT_SUPPORTED}"));
    let faults = faults(shell).ok_or_else(failed)?;
    while !faults.held().iter().any(|held| held == tag) {
        rt::sleep(LOOK).await;
        shell.print_later();
    }
    print_news(shell);
    Ok(())
}

fn resumed(shell: &mut Shell, tag: &str) {
    shell.held.retain(|held| held != tag);
    shell.console.line(format_args!("blkdebug: Resuming request '{tag}'"));
}

/// Prints the requests that are held up since the last look.
pub(super) fn print_news(shell: &mut Shell) {
    let Some(faults) = faults(shell) else { return };
    for tag in faults.held() {
        if !shell.held.contains(&tag) {
            shell.console.line(format_args!("blkdebug: Suspended request '{tag}'"));
            shell.held.push(tag);
        }
    }
}

/// Takes all breakpoints away, so that nothing waits for ever when the image is closed.
pub(super) fn let_go(shell: &mut Shell) {
    if let Some(faults) = faults(shell) {
        faults.remove_all_breaks();
        shell.held.clear();
    }
}
