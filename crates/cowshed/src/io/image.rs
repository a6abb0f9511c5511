// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Commands that transfer no data: the image's size and mapping, flushes, and the process itself.

use super::Shell;
use super::arguments::{self, Arguments};
use super::outcome::{CommandFailed, Done};
use super::text;
use crate::output::failure::qemu_reason;
use crate::output::{info, json};
use cowshed_image::Preallocation;
use cowshed_jobs::info::image_info;
use cowshed_storage::rt;
use std::time::Duration;

const SECTOR_BYTES: u64 = 512;
/// The longest disk of QEMU: 2^63 - 1 bytes, down to a whole GiB.
const LONGEST_DISK_BYTES: u64 = (i64::MAX as u64) & !((1 << 30) - 1);
/// Runs asked for at once.
const MAX_RUNS: usize = 1024;

pub(super) async fn length(shell: &mut Shell) -> Done {
    let size = shell.opened()?.node.size();
    shell.console.line(text::size(size as f64));
    Ok(())
}

pub(super) async fn flush(shell: &mut Shell) -> Done {
    let node = shell.opened()?.node.clone();
    node.flush().await.map_err(|error| CommandFailed::output(format!("flush failed: {}", shell.reason(&error))))
}

pub(super) async fn truncate(shell: &mut Shell, arguments: Arguments) -> Done {
    let preallocation = arguments.value('m').map_or(Ok(Preallocation::Off), arguments::preallocation)?;
    // Words behind the size count for nothing, as in qemu-io.
    let [size, ..] = &arguments.operands[..] else {
        let flag = arguments.first_flags.as_deref().unwrap_or_default();
        return Err(CommandFailed::output(arguments::no_number(flag)));
    };
    // As qemu-io, which names the command's first word, where flags come before all else.
    let first = arguments.first_flags.as_deref().unwrap_or(size);
    let size = arguments::size_named(size, first)?;
    let node = shell.opened()?.node.clone();
    if size > LONGEST_DISK_BYTES {
        return Err(CommandFailed::complaint(format!("offset({size}) exceeds maximum({LONGEST_DISK_BYTES})")));
    }
    if shell.opened()?.image().is_sized_in_sectors() && !size.is_multiple_of(SECTOR_BYTES) {
        return Err(CommandFailed::complaint("The new size must be a multiple of 512"));
    }
    node.resize(size, preallocation).await.map_err(|error| {
        CommandFailed::complaint(if shell.manner.terse {
            qemu_reason(&node.filename(), &error)
        } else {
            error.to_string()
        })
    })
}

pub(super) async fn info(shell: &mut Shell) -> Done {
    let node = shell.opened()?.image();
    let failed = |error: cowshed_types::Error| CommandFailed::complaint(error.to_string());
    let image = image_info(&node).await.map_err(failed)?;
    if node.description().is_some_and(|known| known.only_sizes) {
        // QEMU has no more to say here, and fails.
        shell.console.line(format_args!("format name: {}", image.format));
        return Err(CommandFailed::silent());
    }
    let cluster = image.cluster_size.unwrap_or(0);
    shell.console.line(format_args!("format name: {}", image.format));
    shell.console.line(format_args!("cluster size: {}", text::size(cluster as f64)));
    shell.console.line(format_args!("vm state offset: {}", text::size(node.vm_state_offset().unwrap_or(0) as f64)));
    let image = serde_json::to_value(image).map_err(|error| CommandFailed::complaint(error.to_string()))?;
    let specific = info::render_specific(&json::in_qemu_order(image), shell.console.persona);
    shell.console.print(specific);
    Ok(())
}

/// Hands out the runs of a range as (first byte, length, held by this layer).
async fn each_run(
    shell: &Shell,
    start: u64,
    len: u64,
    failed: impl Fn(String) -> CommandFailed,
    mut take: impl FnMut(u64, u64, bool),
) -> Result<(), CommandFailed> {
    let node = shell.opened()?.node.clone();
    let (mut at, end) = (start, start + len);
    while at < end {
        let runs = node.block_status(at, end - at, MAX_RUNS).await.map_err(|error| failed(shell.reason(&error)))?;
        let from = at;
        for run in runs {
            take(run.start, run.len, run.present);
            at = run.start + run.len;
        }
        if at == from {
            return Err(CommandFailed::complaint("the image says nothing of a range"));
        }
    }
    Ok(())
}

pub(super) async fn alloc(shell: &mut Shell, arguments: Arguments) -> Done {
    let Some(offset) = arguments.operands.first() else { return Err(CommandFailed::usage()) };
    let offset = arguments::size(offset)?;
    let count = arguments.operands.get(1).map_or(Ok(SECTOR_BYTES), |text| arguments::size(text))?;
    let size = shell.opened()?.node.size();
    let count = count.min(size.saturating_sub(offset));
    let mut sum = 0;
    if count > 0 {
        let failed = |reason| CommandFailed::output(format!("is_allocated failed: {reason}"));
        each_run(shell, offset, count, failed, |_, len, present| sum += if present { len } else { 0 }).await?;
    }
    shell.console.line(format_args!("{sum}/{count} bytes allocated at offset {}", text::size(offset as f64)));
    Ok(())
}

pub(super) async fn map(shell: &mut Shell) -> Done {
    let size = shell.opened()?.node.size();
    let mut runs: Vec<(u64, u64, bool)> = Vec::new();
    let failed = |reason| CommandFailed::complaint(format!("Failed to get allocation status: {reason}"));
    each_run(shell, 0, size, failed, |start, len, present| match runs.last_mut() {
        Some(last) if last.2 == present => last.1 += len,
        _ => runs.push((start, len, present)),
    })
    .await?;
    for (start, len, present) in runs {
        let state = if present { "    allocated" } else { "not allocated" };
        let (len_text, start_text) = (text::size(len as f64), text::size(start as f64));
        shell.console.line(format_args!("{len_text} ({len:#x}) bytes {state} at offset {start_text} ({start:#x})"));
    }
    Ok(())
}

pub(super) async fn sleep(shell: &mut Shell, arguments: Arguments) -> Done {
    let Some(text) = arguments.operands.first() else { return Err(CommandFailed::usage()) };
    let milliseconds = text.parse::<u64>().ok().filter(|_| text.bytes().all(|byte| byte.is_ascii_digit()));
    let milliseconds = milliseconds.ok_or_else(|| CommandFailed::output(format!("{text} is not a valid number")))?;
    shell.print_later();
    shell.console.flush();
    rt::sleep(Duration::from_millis(milliseconds)).await;
    Ok(())
}

pub(super) async fn sigraise(shell: &mut Shell, arguments: Arguments) -> Done {
    let Some(text) = arguments.operands.first() else { return Err(CommandFailed::usage()) };
    let signal = arguments::size(text)?;
    let signal = i32::try_from(signal).map_err(|_| CommandFailed::output(format!("signal out of range: {text}")))?;
    shell.print_later();
    shell.console.flush();
    // As with raise(3), a number that is no signal is no failure.
    let _ = signal_hook::low_level::raise(signal);
    Ok(())
}

pub(super) async fn abort(shell: &mut Shell) -> Done {
    shell.console.flush();
    std::process::abort()
}

pub(super) async fn quit(shell: &mut Shell) -> Done {
    shell.is_over = true;
    Ok(())
}
