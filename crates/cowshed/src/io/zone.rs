// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Zones of zoned block devices. No format and no driver here has any, so the commands only have qemu-io's messages for
//! other devices.

use super::Shell;
use super::arguments::{self, Arguments};
use super::outcome::{CommandFailed, Done};
use cowshed_types::LINE_END;

fn unsupported(what: &str) -> CommandFailed {
    CommandFailed::output(format!("zone {what} failed: Operation not supported"))
}

pub(super) async fn report(_shell: &mut Shell, arguments: Arguments) -> Done {
    sizes(&arguments)?;
    Err(unsupported("report"))
}

/// Opens, closes, finishes or resets zones.
pub(super) async fn manage(shell: &mut Shell, what: &str, arguments: Arguments) -> Done {
    let [offset, len] = sizes(&arguments)?[..] else { return Err(CommandFailed::usage()) };
    let size = shell.opened()?.node.size();
    match offset.checked_add(len) {
        Some(end) if end <= size => Err(unsupported(what)),
        _ => Err(CommandFailed::output(format!("zone {what} failed: Input/output error"))),
    }
}

pub(super) async fn append(_shell: &mut Shell, arguments: Arguments) -> Done {
    let failed = sizes(&arguments).map_or_else(|error| error, |_| unsupported("append"));
    // As qemu-io, which names unknown flags, and goes on.
    Err(if arguments.unknown.is_empty() { failed } else { failed.error(arguments.unknown.join(&LINE_END.to_string())) })
}

fn sizes(arguments: &Arguments) -> Result<Vec<u64>, CommandFailed> {
    arguments.operands.iter().map(|text| arguments::size(text)).collect()
}
