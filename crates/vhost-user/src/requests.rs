// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Carries out one request.

use crate::queue::RingRules;
use cowshed_image::ZeroFlags;
use cowshed_image::graph::Queue;
use cowshed_storage::{IoBuf, SharedBufs, SharedMemory};
use cowshed_types::{Error, ErrorKind, Result, slip};
use cowshed_vhost_user_proto::request::{HEADER_BYTES, ID_BYTES, Request, Segment, Status, write_status};
use cowshed_vhost_user_proto::{Cursor, DescriptorChain, Pieces, Shared};

/// Longer reads and writes go in pieces of this many bytes.
pub(crate) const PIECE_BYTES: u64 = 1 << 20;

/// The kernel fills and takes at most this many pieces of memory at a time: those of one system call.
const MAX_SHARED_PIECES: usize = 1024;

/// Bytes of the kernel's description of a piece.
const VECTOR_BYTES: usize = 16;

/// Each request takes this many bytes besides its data, near enough.
const REQUEST_BYTES: u64 = 1 << 10;

/// A chain whose request has ended.
pub(crate) struct Ended {
    /// The number of its chain in the ring.
    pub head: u16,
    /// Bytes that were written to the chain; `None`: it has no place for a status.
    pub written: Option<u32>,
    /// The part of the ring's memory that it took.
    pub bytes: u64,
    /// It fails because changes of an earlier life are lost.
    pub tells_loss: bool,
}

/// The memory that a request takes while it runs.
pub(crate) fn cost<P: Shared>(request: &Request, chain: &DescriptorChain<P>) -> u64 {
    let data = match request {
        Request::Read { len, .. } | Request::Write { len, .. } => (*len).min(PIECE_BYTES),
        _ => 0,
    };
    let count = chain.readable.count() + chain.writable.count();
    // A list of the pieces for the kernel, which grows by doubling.
    let of_transfer = match data {
        0 => 0,
        _ => count.min(MAX_SHARED_PIECES).next_power_of_two() * (size_of::<SharedMemory>() + VECTOR_BYTES),
    };
    data + REQUEST_BYTES + (count * size_of::<P>() + of_transfer) as u64
}

fn lost() -> Error {
    let message = "changes are lost that an earlier process had told of: it was killed before they were flushed";
    Error::new(ErrorKind::Io, message)
}

/// Fails when memory of a request is lost. Its header, its ranges and its data may be zeroes that the guest never wrote.
fn check_memory<P: Shared>(chain: &DescriptorChain<P>) -> Result<()> {
    match chain.readable.is_lost() || chain.writable.is_lost() {
        false => Ok(()),
        true => Err(memory_is_lost()),
    }
}

fn memory_is_lost() -> Error {
    Error::invalid_argument("memory of the request is lost: its file has become shorter")
}

/// Carries a request out and writes its status.
pub(crate) async fn run<P: Shared>(
    disk: &Queue,
    ways: &RingRules<P>,
    chain: &DescriptorChain<P>,
    request: Request,
) -> Ended {
    let bytes = cost(&request, chain);
    let changes = matches!(request, Request::Write { .. } | Request::Discard(_) | Request::WriteZeroes(_));
    let is_durable = ways.is_durable();
    let promises = matches!(request, Request::Flush) || (changes && is_durable);
    let there = check_memory(chain);
    // The guest sees no status in memory that is lost.
    let tells_loss = there.is_ok() && promises && ways.ledger.is_lost();
    let (mut result, mut written) = match request {
        _ if there.is_err() => (there, 0),
        // Changes that have ended since outlive another kill.
        Request::Flush if tells_loss => (flush(disk, ways).await.and(Err(lost())), 0),
        _ if tells_loss => (Err(lost()), 0),
        Request::Read { offset, len } => read(disk, ways, chain, offset, len).await,
        Request::Write { offset, len } => (write(disk, ways, chain, (offset, len), is_durable).await, 0),
        Request::Flush => (flush(disk, ways).await, 0),
        Request::GetId { len } => {
            let mut name = [0; ID_BYTES];
            let id = ways.id.as_bytes();
            let known = id.len().min(ID_BYTES);
            name[..known].copy_from_slice(&id[..known]);
            // In range: at most ID_BYTES.
            let len = len as usize;
            chain.writable.write(&mut chain.writable.cursor(0), &name[..len]);
            (Ok(()), len as u64)
        }
        Request::Discard(segments) => (discard(disk, ways, segments, is_durable).await, 0),
        Request::WriteZeroes(segments) => (write_zeroes(disk, ways, segments, is_durable).await, 0),
    };
    if changes && !is_durable {
        ways.ledger.note_change(|| disk.attachment().node().holds_changes());
        // The driver has switched the write cache off meanwhile, and sends no flush.
        if result.is_ok() && ways.is_durable() {
            result = flush(disk, ways).await;
        }
    }
    let status = match result.and_then(|()| check_memory(chain)) {
        Ok(()) => Status::Ok,
        Err(error) => {
            written = 0;
            tracing::warn!(export = &*ways.id, %error, "a request has failed");
            Status::IoError
        }
    };
    Ended { tells_loss, ..end(chain, status, written, bytes) }
}

/// Writes the status of a chain.
pub(crate) fn end<P: Shared>(chain: &DescriptorChain<P>, status: Status, written: u64, bytes: u64) -> Ended {
    let has_status = write_status(chain, status);
    let written = has_status.then(|| u32::try_from(written.saturating_add(1)).unwrap_or(u32::MAX));
    Ended { head: chain.head, written, bytes, tells_loss: false }
}

/// A range of the memory of a request, where the kernel may fill or take it. `None`: the data has a copy, because a page of the
/// memory may be late. The disk's locks would wait for it, and other clients with them. Very many pieces have a copy, too. Otherwise
/// `cursor` goes on.
fn shared<P: Shared>(ways: &RingRules<P>, pieces: &Pieces<P>, cursor: &mut Cursor, len: u64) -> Option<SharedBufs> {
    let memory_of = ways.memory_of?;
    let (mut bufs, mut fits, mut behind) = (SharedBufs::default(), true, *cursor);
    // In range of `usize`: at most PIECE_BYTES.
    let is_whole = pieces.each(&mut behind, len as usize, |piece, at, len| {
        let memory = memory_of(piece);
        fits &= memory.is_memory() && bufs.pieces().len() < MAX_SHARED_PIECES;
        if fits {
            bufs.push(memory.part(at, len));
        }
    });
    if !is_whole || !fits {
        return None;
    }
    *cursor = behind;
    Some(bufs)
}

async fn read<P: Shared>(
    disk: &Queue,
    ways: &RingRules<P>,
    chain: &DescriptorChain<P>,
    offset: u64,
    len: u64,
) -> (Result<()>, u64) {
    let (mut done, mut cursor) = (0, chain.writable.cursor(0));
    while done < len {
        let piece = (len - done).min(PIECE_BYTES);
        if let Some(bufs) = shared(ways, &chain.writable, &mut cursor, piece) {
            let (result, _) = disk.read_shared(offset + done, bufs).await;
            if result.is_err() {
                return (result, done);
            }
            done += piece;
            continue;
        }
        let buf = match IoBuf::try_scratch(piece as usize) {
            Ok(buf) => buf,
            Err(error) => return (Err(error), done),
        };
        let (result, buf) = disk.read(offset + done, buf).await;
        if result.is_err() {
            return (result, done);
        }
        chain.writable.write(&mut cursor, &buf);
        done += piece;
    }
    (Ok(()), done)
}

async fn write<P: Shared>(
    disk: &Queue,
    ways: &RingRules<P>,
    chain: &DescriptorChain<P>,
    (offset, len): (u64, u64),
    is_durable: bool,
) -> Result<()> {
    let (mut done, mut cursor) = (0, chain.readable.cursor(HEADER_BYTES as u64));
    let began = ways.ledger.begin_flush();
    while done < len {
        let piece = (len - done).min(PIECE_BYTES);
        if let Some(bufs) = shared(ways, &chain.readable, &mut cursor, piece) {
            let (result, _) = match is_durable {
                true => disk.write_shared_durable(offset + done, bufs).await,
                false => disk.write_shared(offset + done, bufs).await,
            };
            result?;
            done += piece;
            continue;
        }
        let mut buf = IoBuf::try_scratch(piece as usize)?;
        let (mut again, mut is_lost) = (cursor, false);
        chain.readable.read(&mut cursor, &mut buf);
        // Those of this part alone: the list may be long.
        chain.readable.each(&mut again, piece as usize, |piece, _, _| is_lost |= piece.is_lost());
        if is_lost {
            return Err(memory_is_lost());
        }
        let (result, _) = match is_durable {
            true => disk.write_durable(offset + done, buf).await,
            false => disk.write(offset + done, buf).await,
        };
        result?;
        done += piece;
    }
    // Each part was flushed behind it, and so was everything before.
    if is_durable && done > 0 {
        ways.ledger.end_flush(began);
    }
    Ok(())
}

async fn discard<P: Shared>(disk: &Queue, ways: &RingRules<P>, segments: Vec<Segment>, is_durable: bool) -> Result<()> {
    for segment in segments {
        disk.discard(segment.offset, segment.len).await?;
    }
    complete(disk, ways, is_durable).await
}

async fn write_zeroes<P: Shared>(
    disk: &Queue,
    ways: &RingRules<P>,
    segments: Vec<Segment>,
    is_durable: bool,
) -> Result<()> {
    for segment in segments {
        let flags = ZeroFlags { may_unmap: segment.unmap, no_fallback: false };
        disk.write_zeroes(segment.offset, segment.len, flags).await?;
    }
    complete(disk, ways, is_durable).await
}

async fn complete<P: Shared>(disk: &Queue, ways: &RingRules<P>, is_durable: bool) -> Result<()> {
    match is_durable {
        true => flush(disk, ways).await,
        false => Ok(()),
    }
}

/// Makes all changes durable that have ended.
async fn flush<P: Shared>(disk: &Queue, ways: &RingRules<P>) -> Result<()> {
    let began = ways.ledger.begin_flush();
    if !slip!("vhost_flush_promises_without_a_sync") {
        disk.flush().await?;
    }
    ways.ledger.end_flush(began);
    Ok(())
}
