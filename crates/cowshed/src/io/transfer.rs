// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reads, writes and discards that the shell waits for.

use super::Shell;
use super::arguments::{self, Arguments};
use super::outcome::{CommandFailed, Done};
use super::text::{self, Report};
use cowshed_image::{Node, ZeroFlags};
use cowshed_storage::IoBuf;
use cowshed_types::{Errno, Error, Result};
use std::time::Instant;

/// Longest request in bytes.
pub(super) const MOST_BYTES: u64 = (i32::MAX as u64) / SECTOR_BYTES * SECTOR_BYTES;
const SECTOR_BYTES: u64 = 512;
/// The pattern of a write without `-P`.
pub(super) const DEFAULT_PATTERN: u8 = 0xcd;

/// A range of the disk.
#[derive(Clone, Copy, Debug)]
pub(super) struct Range {
    pub offset: u64,
    pub len: u64,
}

/// The one range of a command.
fn range(arguments: &Arguments) -> std::result::Result<Range, CommandFailed> {
    let range = unbounded_range(arguments)?;
    if range.len > MOST_BYTES {
        let [_, len] = &arguments.operands[..] else { return Err(CommandFailed::usage()) };
        return Err(CommandFailed::output(format!("length cannot exceed {MOST_BYTES}, given {len}")));
    }
    Ok(range)
}

/// As [`range`], without a bound.
pub(super) fn unbounded_range(arguments: &Arguments) -> std::result::Result<Range, CommandFailed> {
    let [offset, len] = &arguments.operands[..] else { return Err(CommandFailed::usage()) };
    Ok(Range { offset: arguments::size(offset)?, len: arguments::size(len)? })
}

/// An offset and the lengths of several buffers, which lie behind one another.
pub(super) fn ranges(arguments: &Arguments) -> std::result::Result<Range, CommandFailed> {
    let Some((offset, lens)) = arguments.operands.split_first().filter(|(_, lens)| !lens.is_empty()) else {
        return Err(CommandFailed::usage());
    };
    let mut range = Range { offset: arguments::size(offset)?, len: 0 };
    for text in lens {
        let len = arguments::size(text)?;
        if len > MOST_BYTES {
            return Err(CommandFailed::output(format!("Argument '{text}' exceeds maximum size {MOST_BYTES}")));
        }
        range.len += len;
        if range.len > MOST_BYTES {
            return Err(CommandFailed::output(format!(
                "The total number of bytes exceed the maximum size {MOST_BYTES}"
            )));
        }
    }
    Ok(range)
}

/// A request behind the end is an I/O error to the shell; found out before memory is taken for it.
pub(super) fn check_end(node: &Node, range: Range) -> Result<()> {
    match range.offset.checked_add(range.len) {
        Some(end) if end <= node.size() => Ok(()),
        _ => Err(Error::os(Errno::EIO, "the request is past the end of the disk").value(range.offset)),
    }
}

/// The pattern that data must have, and in which part.
#[derive(Clone, Copy, Debug)]
pub(super) struct Expected {
    pub byte: u8,
    pub skip: u64,
    pub len: u64,
}

impl Expected {
    /// The message about data that begin at `offset`; `None` when all is well.
    pub(super) fn verdict(self, data: &[u8], offset: u64) -> Option<String> {
        let (skip, len) = (self.skip as usize, self.len as usize);
        let part = data.get(skip..skip.saturating_add(len)).unwrap_or_default();
        let is_well = part.len() == len && part.iter().all(|byte| *byte == self.byte);
        (!is_well).then(|| format!("Pattern verification failed at offset {}, {} bytes", offset + self.skip, self.len))
    }
}

/// The disk, or with `-b` the state of a virtual machine, as the target of requests.
struct RequestTarget {
    node: std::sync::Arc<Node>,
    is_vm_state: bool,
}

impl RequestTarget {
    fn of(shell: &Shell, arguments: &Arguments) -> std::result::Result<RequestTarget, CommandFailed> {
        let opened = shell.opened()?;
        let is_vm_state = arguments.has('b');
        Ok(RequestTarget { node: if is_vm_state { opened.image() } else { opened.node.clone() }, is_vm_state })
    }

    async fn read(&self, range: Range) -> Result<IoBuf> {
        let buf = IoBuf::zeroed(range.len as usize);
        let (result, data) = match self.is_vm_state {
            false => {
                check_end(&self.node, range)?;
                self.node.read(range.offset, buf).await
            }
            true if self.node.vm_state_offset().is_some() => self.node.read_vm_state(range.offset, buf).await,
            true => return Err(self.no_vm_state()),
        };
        result.map(|()| data)
    }

    async fn write_vm_state(&self, range: Range, data: IoBuf) -> Result<()> {
        match self.node.vm_state_offset() {
            Some(_) => self.node.write_vm_state(range.offset, data).await.0?,
            None => return Err(self.no_vm_state()),
        }
        self.node.flush().await
    }

    fn no_vm_state(&self) -> Error {
        let message =
            format!("images of the format '{}' can't hold the state of a virtual machine", self.node.driver_name());
        Error::unsupported(message).with_errno(cowshed_types::Errno::ENOTSUP)
    }
}

fn check_sectors(range: Range) -> Done {
    for (what, value) in [("offset", range.offset), ("count", range.len)] {
        if !value.is_multiple_of(SECTOR_BYTES) {
            return Err(CommandFailed::output(format!("{value} is not a sector-aligned value for '{what}'")));
        }
    }
    Ok(())
}

pub(super) async fn read(shell: &mut Shell, arguments: Arguments) -> Done {
    let pattern = arguments.pattern('P')?;
    let (skip, len) = (arguments.size('s')?, arguments.size('l')?);
    let range = range(&arguments)?;
    if pattern.is_none() && (skip.is_some() || len.is_some()) {
        return Err(CommandFailed::usage());
    }
    if arguments.has('b') {
        check_sectors(range)?;
        if arguments.has('r') {
            return Err(CommandFailed::output("I/O buffer registration is not supported when reading from vmstate"));
        }
    }
    let skip = skip.unwrap_or(0);
    let len = len.unwrap_or(range.len.saturating_sub(skip));
    if skip.checked_add(len).is_none_or(|end| end > range.len) {
        return Err(CommandFailed::output("pattern verification range exceeds end of read data"));
    }
    let expected = pattern.map(|byte| Expected { byte, skip, len });
    read_range(shell, &arguments, range, expected, "read").await
}

pub(super) async fn readv(shell: &mut Shell, arguments: Arguments) -> Done {
    let pattern = arguments.pattern('P')?;
    let range = ranges(&arguments)?;
    let expected = pattern.map(|byte| Expected { byte, skip: 0, len: range.len });
    read_range(shell, &arguments, range, expected, "readv").await
}

/// `name`: the command's, for the error of a failed read.
async fn read_range(
    shell: &mut Shell,
    arguments: &Arguments,
    range: Range,
    expected: Option<Expected>,
    name: &str,
) -> Done {
    let target = RequestTarget::of(shell, arguments)?;
    let started = Instant::now();
    let result = target.read(range).await;
    let elapsed = started.elapsed();
    let data = result.map_err(|error| CommandFailed::output(format!("{name} failed: {}", shell.reason(&error))))?;
    let verdict = expected.and_then(|expected| expected.verdict(&data, range.offset));
    if let Some(verdict) = &verdict {
        shell.console.line(verdict);
    }
    if !arguments.has('q') {
        if arguments.has('v') {
            shell.console.print(text::dump(&data, range.offset));
        }
        report(shell, arguments, "read", range, elapsed);
    }
    if verdict.is_some() { Err(CommandFailed::silent()) } else { Ok(()) }
}

fn report(shell: &mut Shell, arguments: &Arguments, what: &str, range: Range, elapsed: std::time::Duration) {
    if arguments.has('q') {
        return;
    }
    let Range { offset, len } = range;
    let compact = arguments.has('C');
    shell.console.print(Report { what, offset, asked_bytes: len, done_bytes: len, elapsed, compact }.render());
}

pub(super) async fn write(shell: &mut Shell, arguments: Arguments) -> Done {
    let pattern = arguments.pattern('P')?;
    if arguments.operands.len() != 2 {
        return Err(CommandFailed::usage());
    }
    let has = |flag| arguments.has(flag);
    for (is_wrong, message) in [
        (has('b') && has('z'), "-b and -z cannot be specified at the same time"),
        (has('f') && (has('b') || has('c')), "-f and -b or -c cannot be specified at the same time"),
        (has('n') && !has('z'), "-n requires -z to be specified"),
        (has('u') && !has('z'), "-u requires -z to be specified"),
        (
            u8::from(has('z')) + u8::from(has('P')) + u8::from(has('s')) > 1,
            "Only one of -z, -P, and -s can be specified at the same time",
        ),
    ] {
        if is_wrong {
            return Err(CommandFailed::output(message));
        }
    }
    // Zeroes that may not become data need no buffer.
    let range = unbounded_range(&arguments)?;
    if range.len > MOST_BYTES && !has('n') {
        let given = arguments.operands.get(1).map_or("", String::as_str);
        return Err(CommandFailed::output(format!("length cannot exceed {MOST_BYTES} without -n, given {given}")));
    }
    if has('b') || has('c') {
        check_sectors(range)?;
    }
    if has('z') && has('r') {
        return Err(CommandFailed::output("cannot combine zero write with registered I/O buffer"));
    }
    let source = match arguments.value('s') {
        Some(path) => Some(read_source(path)?),
        None => None,
    };
    let target = RequestTarget::of(shell, &arguments)?;
    let (node, image) = (shell.opened()?.node.clone(), shell.opened()?.image());
    let started = Instant::now();
    let result = match check_end(&node, range) {
        _ if has('b') => {
            let data = match &source {
                Some(source) => repeated(source, range.len as usize),
                None => filled(pattern.unwrap_or(DEFAULT_PATTERN), range.len as usize),
            };
            target.write_vm_state(range, data).await
        }
        Err(error) => Err(error),
        Ok(()) if has('z') => write_zeroes(&node, range, &arguments).await,
        Ok(()) => {
            let data = match &source {
                Some(source) => repeated(source, range.len as usize),
                None => filled(pattern.unwrap_or(DEFAULT_PATTERN), range.len as usize),
            };
            match has('c') {
                true => write_compressed(&node, &image, range, data).await,
                false => write_data(&node, range, data, has('f')).await,
            }
        }
    };
    let elapsed = started.elapsed();
    result.map_err(|error| CommandFailed::output(format!("write failed: {}", shell.reason(&error))))?;
    report(shell, &arguments, "wrote", range, elapsed);
    Ok(())
}

pub(super) async fn writev(shell: &mut Shell, arguments: Arguments) -> Done {
    let pattern = arguments.pattern('P')?.unwrap_or(DEFAULT_PATTERN);
    let range = ranges(&arguments)?;
    let node = shell.opened()?.node.clone();
    let started = Instant::now();
    let result = match check_end(&node, range) {
        Ok(()) => write_data(&node, range, filled(pattern, range.len as usize), arguments.has('f')).await,
        Err(error) => Err(error),
    };
    let elapsed = started.elapsed();
    result.map_err(|error| CommandFailed::output(format!("writev failed: {}", shell.reason(&error))))?;
    report(shell, &arguments, "wrote", range, elapsed);
    Ok(())
}

pub(super) async fn discard(shell: &mut Shell, arguments: Arguments) -> Done {
    let range = range(&arguments)?;
    let node = shell.opened()?.node.clone();
    let started = Instant::now();
    let result = match check_end(&node, range) {
        Ok(()) => node.discard(range.offset, range.len).await,
        Err(error) => Err(error),
    };
    let elapsed = started.elapsed();
    result.map_err(|error| CommandFailed::output(format!("discard failed: {}", shell.reason(&error))))?;
    report(shell, &arguments, "discard", range, elapsed);
    Ok(())
}

/// A buffer of one byte.
pub(super) fn filled(byte: u8, len: usize) -> IoBuf {
    let mut data = IoBuf::scratch(len);
    data.fill(byte);
    data
}

fn repeated(source: &[u8], len: usize) -> IoBuf {
    let mut data = IoBuf::scratch(len);
    for chunk in data.chunks_mut(source.len().max(1)) {
        let len = chunk.len();
        chunk.copy_from_slice(&source[..len]);
    }
    data
}

fn read_source(path: &str) -> std::result::Result<Vec<u8>, CommandFailed> {
    let failed = |error: std::io::Error| {
        let error = error.to_string();
        CommandFailed::plain_error(format!("{path}: {}", error.split(" (os error").next().unwrap_or_default()))
    };
    let bytes = std::fs::read(path).map_err(failed)?;
    if bytes.is_empty() {
        return Err(CommandFailed::plain_error(format!("{path}: file is empty")));
    }
    Ok(bytes)
}

/// Writes; with `durable` it is so when this returns.
pub(super) async fn write_data(node: &Node, range: Range, data: IoBuf, durable: bool) -> Result<()> {
    node.write(range.offset, data).await.0?;
    if durable { node.flush().await } else { Ok(()) }
}

/// Makes a range zero by the flags `u`, `n` and `f`.
pub(super) async fn write_zeroes(node: &Node, range: Range, arguments: &Arguments) -> Result<()> {
    let flags = ZeroFlags { may_unmap: arguments.has('u'), no_fallback: arguments.has('n') };
    node.write_zeroes(range.offset, range.len, flags).await?;
    if arguments.has('f') { node.flush().await } else { Ok(()) }
}

async fn write_compressed(node: &Node, image: &Node, range: Range, mut data: IoBuf) -> Result<()> {
    let cluster = image.compressed_cluster_bytes();
    let cluster = cluster.ok_or_else(|| Error::unsupported("this format has no compressed clusters"))?;
    let mut clusters = Vec::new();
    let mut at = range.offset;
    while !data.is_empty() {
        let len = data.len().min(usize::try_from(cluster).unwrap_or(usize::MAX));
        clusters.push((at, data.split_to(len)));
        at += len as u64;
    }
    node.write_compressed(clusters).await
}
