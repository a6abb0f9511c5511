// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Work on a file as such: zeroes, holes, its length, and where it has data.

use crate::node::{Preallocation, StatusExtent, ZeroFlags};
use cowshed_storage::{File, IoBuf};
use cowshed_types::{Error, ErrorKind, Result};
use std::sync::Arc;

/// Zeroes are written in pieces of this size where the file system has no better way.
const ZERO_CHUNK_BYTES: u64 = 1 << 20;

/// Makes a range of a file read as zeroes: by giving it back where request and node allow that, by `fallocate`, or by
/// writing.
pub async fn zero_file(file: &File, offset: u64, len: u64, flags: ZeroFlags) -> Result<()> {
    if flags.no_fallback && file.is_remote() {
        return file.zero_fast(offset, len, flags.may_unmap && !file.keeps_space()).await;
    }
    if flags.may_unmap && !file.keeps_space() {
        // A hole doesn't make the file longer. The range behind its end (an odd tail) is written: setting the length
        // could cut off the bytes of a write in flight.
        let inside = file.len().saturating_sub(offset).min(len);
        let punched = if inside == 0 { Ok(()) } else { file.punch_hole(offset, inside).await };
        match punched {
            Ok(()) => return write_zero_bytes(file, offset + inside, len - inside).await,
            Err(error) if error.kind() == ErrorKind::Unsupported => {}
            Err(error) => return Err(error),
        }
    }
    match file.zero_range(offset, len).await {
        Err(error) if error.kind() == ErrorKind::Unsupported && !flags.no_fallback => {}
        result => return result,
    }
    write_zero_bytes(file, offset, len).await
}

/// Writes zeroes the slow way.
async fn write_zero_bytes(file: &File, offset: u64, len: u64) -> Result<()> {
    let mut zeroes = IoBuf::zeroed(ZERO_CHUNK_BYTES.min(len) as usize);
    let mut done = 0;
    while done < len {
        let piece = (len - done).min(ZERO_CHUNK_BYTES) as usize;
        if piece < zeroes.len() {
            zeroes = zeroes.split_to(piece);
        }
        let result;
        (result, zeroes) = file.write_at(zeroes, offset + done).await;
        result?;
        done += piece as u64;
    }
    Ok(())
}

/// Gives a range back, where the file's node passes discards on. A file system that can't is no error: a discard is a hint.
pub async fn discard_file(file: &File, offset: u64, len: u64) -> Result<()> {
    let inside = file.len().saturating_sub(offset).min(len);
    if inside == 0 || file.keeps_space() {
        return Ok(());
    }
    match file.discard(offset, inside).await {
        Err(error) if error.kind() == ErrorKind::Unsupported => Ok(()),
        result => result,
    }
}

/// Sets the length of a file in bytes, and fills the added range by `preallocation`.
pub async fn resize_file(file: &File, size: u64, preallocation: Preallocation) -> Result<()> {
    let old = file.len();
    if preallocation != Preallocation::Off && size < old {
        return Err(Error::invalid_argument("preallocation can't be used for shrinking").file(file.name()));
    }
    check_can_preallocate(file, preallocation)?;
    match preallocation {
        Preallocation::Off => file.set_len(size).await,
        Preallocation::Metadata => {
            Err(Error::unsupported("Unsupported preallocation mode: metadata").file(file.name()))
        }
        Preallocation::Falloc | Preallocation::Full if size > old => {
            let grown = reserve_end(file, old, size, preallocation).await;
            if grown.is_err()
                && let Err(error) = file.set_len(old).await
            {
                tracing::warn!(%error, "could not take back the growth of a file");
            }
            grown
        }
        Preallocation::Falloc | Preallocation::Full => Ok(()),
    }
}

/// Refuses to reserve space on a device or an export.
pub fn check_can_preallocate(file: &File, preallocation: Preallocation) -> Result<()> {
    match file.is_device() && preallocation != Preallocation::Off {
        true => {
            let mode = preallocation.name();
            let message = format!("Preallocation mode '{mode}' unsupported for this non-regular file");
            Err(Error::unsupported(message).file(file.name()))
        }
        false => Ok(()),
    }
}

/// Makes a file longer, with space for the added range. In a file system that reserves none, only the written bytes
/// have space.
async fn reserve_end(file: &File, old: u64, size: u64, preallocation: Preallocation) -> Result<()> {
    if preallocation == Preallocation::Falloc {
        match file.allocate(old, size - old).await {
            Err(error) if error.kind() == ErrorKind::Unsupported && !file.is_device() => {}
            allocated => return allocated,
        }
    }
    write_zero_bytes(file, old, size - old).await
}

/// Data and holes of a file.
pub(crate) async fn file_status(file: &File, offset: u64, len: u64, max_runs: usize) -> Result<Vec<StatusExtent>> {
    let name: Arc<str> = file.name().into();
    let end = offset + len;
    let mut runs: Vec<StatusExtent> = Vec::new();
    let mut add = |start: u64, until: u64, is_data: bool| {
        if start < until && runs.len() < max_runs {
            runs.push(StatusExtent {
                start,
                len: until - start,
                data: is_data,
                zero: !is_data,
                present: true,
                compressed: false,
                offset: Some(start),
                file: Some(Arc::clone(&name)),
                depth: 0,
            });
        }
    };
    let ranges = file.data_ranges(offset, end, max_runs).await?;
    let is_all = ranges.len() < max_runs;
    let mut at = offset;
    for data in ranges {
        let (start, until) = (data.start.clamp(at, end), data.end.clamp(at, end));
        add(at, start, false);
        add(start, until, true);
        at = until.max(start);
    }
    if is_all {
        // Behind the end of the file (its odd tail) there is only a hole.
        add(at, end, false);
    } else if at == offset {
        // Nothing but empty runs: the file changes under us. It is read.
        add(at, end, true);
    }
    Ok(runs)
}
