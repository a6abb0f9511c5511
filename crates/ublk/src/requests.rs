// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Carries one request out.

use crate::ledger::DeviceLedger;
use cowshed_image::ZeroFlags;
use cowshed_image::graph::Queue;
use cowshed_storage::{IoBuf, UblkQueue};
use cowshed_types::{Errno, Error, ErrorKind, Result};
use cowshed_ublk_proto::{Operation, Request};
use rustix::io::Errno as Number;
use std::sync::Arc;

/// Longer reads and writes go in pieces of this many bytes.
pub(crate) const PIECE_BYTES: u64 = 1 << 20;

/// Errors that the block layer distinguishes. `ENODEV` is none: by it a server gives a request up.
const TOLD: [Number; 5] = [Number::NOSPC, Number::OPNOTSUPP, Number::TIMEDOUT, Number::NOLINK, Number::NODATA];

/// The way of carrying requests out: the same for all of a device.
#[derive(Clone)]
pub(crate) struct DeviceRules {
    /// The export's name.
    pub id: Arc<str>,
    /// Each change is durable before it is answered.
    pub writethrough: bool,
    /// Changes that die with this process.
    pub ledger: Arc<DeviceLedger>,
}

fn number_of(error: &Error) -> i32 {
    let number = match error.kind() {
        ErrorKind::Unsupported => Errno(Number::OPNOTSUPP.raw_os_error()),
        ErrorKind::NoSpace => Errno(Number::NOSPC.raw_os_error()),
        _ => error.errno(),
    };
    let is_told = TOLD.iter().any(|told| told.raw_os_error() == number.0);
    if is_told { number.0 } else { Number::IO.raw_os_error() }
}

fn lost() -> Error {
    let message = "changes are lost that an earlier process had told of: it was killed before they were flushed";
    Error::new(ErrorKind::Io, message)
}

/// Carries a request out. The result for the driver: bytes, or the negative number of an error.
pub(crate) async fn run(disk: &Queue, ways: &DeviceRules, queue: &impl UblkQueue, tag: u16, request: Request) -> i32 {
    let Request { operation, offset, len } = request;
    let is_durable = match operation {
        Operation::Write { is_durable } | Operation::WriteZeroes { is_durable, .. } => is_durable || ways.writethrough,
        Operation::Discard => ways.writethrough,
        Operation::Read | Operation::Flush => false,
    };
    let promises = is_durable || operation == Operation::Flush;
    let tells_loss = promises && ways.ledger.is_lost();
    let began = ways.ledger.begin_flush();
    let result = match operation {
        // Changes that have ended since outlive another kill.
        Operation::Flush if tells_loss => flush(disk, ways).await.and(Err(lost())),
        _ if tells_loss => Err(lost()),
        Operation::Read => read(disk, queue, tag, offset, len).await,
        Operation::Write { .. } => write(disk, queue, tag, (offset, len), is_durable).await,
        Operation::Flush => flush(disk, ways).await,
        Operation::Discard => disk.discard(offset, len).await,
        Operation::WriteZeroes { may_unmap, .. } => {
            disk.write_zeroes(offset, len, ZeroFlags { may_unmap, no_fallback: false }).await
        }
    };
    // A write has made itself durable.
    let result = match result {
        Ok(()) if is_durable && !matches!(operation, Operation::Write { .. }) => disk.flush().await,
        result => result,
    };
    if is_durable && result.is_ok() {
        ways.ledger.end_flush(began);
    }
    if operation.changes() && !is_durable {
        ways.ledger.note_change(|| disk.attachment().node().holds_changes());
    }
    match result {
        Ok(()) if matches!(operation, Operation::Read | Operation::Write { .. }) => {
            i32::try_from(len).unwrap_or(i32::MAX)
        }
        Ok(()) => 0,
        Err(error) => {
            tracing::warn!(export = &*ways.id, ?operation, offset, len, %error, "a request has failed");
            -number_of(&error)
        }
    }
}

async fn flush(disk: &Queue, ways: &DeviceRules) -> Result<()> {
    let began = ways.ledger.begin_flush();
    disk.flush().await?;
    ways.ledger.end_flush(began);
    Ok(())
}

fn failed(errno: Errno) -> Error {
    Error::os(errno, "the driver refuses to copy data of a request")
}

async fn read(disk: &Queue, queue: &impl UblkQueue, tag: u16, offset: u64, len: u64) -> Result<()> {
    let mut done = 0;
    while done < len {
        let piece = (len - done).min(PIECE_BYTES);
        let buf = IoBuf::try_scratch(piece as usize)?;
        let (result, buf) = disk.read(offset + done, buf).await;
        result?;
        queue.give(tag, done as u32, &buf).map_err(failed)?;
        done += piece;
    }
    Ok(())
}

async fn write(
    disk: &Queue,
    queue: &impl UblkQueue,
    tag: u16,
    (offset, len): (u64, u64),
    is_durable: bool,
) -> Result<()> {
    let mut done = 0;
    while done < len {
        let piece = (len - done).min(PIECE_BYTES);
        let mut buf = IoBuf::try_scratch(piece as usize)?;
        queue.take(tag, done as u32, &mut buf).map_err(failed)?;
        let (result, _) = match is_durable {
            true => disk.write_durable(offset + done, buf).await,
            false => disk.write(offset + done, buf).await,
        };
        result?;
        done += piece;
    }
    Ok(())
}
