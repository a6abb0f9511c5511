// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Carries out one request.

use crate::queue::Ways;
use cowshed_image::ZeroFlags;
use cowshed_image::graph::Queue;
use cowshed_storage::{IoBuf, SharedBufs};
use cowshed_types::{Error, ErrorKind, Result, slip};
use cowshed_vhost_user_proto::request::{HEADER_BYTES, ID_BYTES, Request, Segment, Status, write_status};
use cowshed_vhost_user_proto::{DescriptorChain, Pieces, Shared};
use std::rc::Rc;

/// Longer reads and writes go in pieces of so many bytes.
pub(crate) const PIECE_BYTES: u64 = 1 << 20;

/// Each request takes so many bytes besides its data, near enough.
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
    let pieces = (chain.readable.count() + chain.writable.count()) * size_of::<P>();
    data + REQUEST_BYTES + pieces as u64
}

fn lost() -> Error {
    let message = "changes are lost that an earlier process had told of: it was killed before they were flushed";
    Error::new(ErrorKind::Io, message)
}

/// Carries a request out and writes its status.
pub(crate) async fn run<P: Shared>(
    disk: Queue,
    ways: Rc<Ways<P>>,
    chain: DescriptorChain<P>,
    request: Request,
) -> Ended {
    let bytes = cost(&request, &chain);
    let changes = matches!(request, Request::Write { .. } | Request::Discard(_) | Request::WriteZeroes(_));
    let promises = matches!(request, Request::Flush) || (changes && ways.is_durable());
    let tells_loss = promises && ways.ledger.is_lost();
    if tells_loss && slip!("loss_is_told_before_the_guest_sees_it") {
        ways.ledger.told_lost();
    }
    let (result, mut written) = match request {
        _ if tells_loss => (Err(lost()), 0),
        Request::Read { offset, len } => read(&disk, &ways, &chain, offset, len).await,
        Request::Write { offset, len } => (write(&disk, &ways, &chain, offset, len).await, 0),
        Request::Flush => {
            let began = ways.ledger.begin_flush();
            let result = disk.flush().await;
            if result.is_ok() {
                ways.ledger.end_flush(began);
            }
            (result, 0)
        }
        Request::GetId { len } => {
            let mut name = [0; ID_BYTES];
            let id = ways.id.as_bytes();
            let known = id.len().min(ID_BYTES);
            name[..known].copy_from_slice(&id[..known]);
            // In range: at most ID_BYTES.
            let len = len as usize;
            chain.writable.write(0, &name[..len]);
            (Ok(()), len as u64)
        }
        Request::Discard(segments) => (discard(&disk, &ways, segments).await, 0),
        Request::WriteZeroes(segments) => (write_zeroes(&disk, &ways, segments).await, 0),
    };
    if changes && !ways.is_durable() {
        ways.ledger.note_change(|| disk.attachment().node().holds_changes());
    }
    let status = match result {
        Ok(()) => Status::Ok,
        Err(error) => {
            written = 0;
            tracing::warn!(export = &*ways.id, %error, "a request has failed");
            Status::IoError
        }
    };
    Ended { tells_loss, ..end(&chain, status, written, bytes) }
}

/// Writes the status of a chain.
pub(crate) fn end<P: Shared>(chain: &DescriptorChain<P>, status: Status, written: u64, bytes: u64) -> Ended {
    let has_status = write_status(chain, status);
    let written = has_status.then(|| u32::try_from(written.saturating_add(1)).unwrap_or(u32::MAX));
    Ended { head: chain.head, written, bytes, tells_loss: false }
}

/// A range of the memory of a request, where the kernel may fill or take it. `None`: the data has a copy, because a page of the
/// memory may be late. The disk's locks would wait for it, and other clients with them.
fn shared<P: Shared>(ways: &Ways<P>, pieces: &Pieces<P>, at: u64, len: u64) -> Option<SharedBufs> {
    let memory_of = ways.memory_of?;
    let (mut bufs, mut is_memory) = (SharedBufs::default(), true);
    // In range of `usize`: at most PIECE_BYTES.
    let is_whole = pieces.each(at, len as usize, |piece, at, len| {
        let memory = memory_of(piece);
        is_memory &= memory.is_memory();
        bufs.push(memory.part(at, len));
    });
    (is_whole && is_memory).then_some(bufs)
}

async fn read<P: Shared>(
    disk: &Queue,
    ways: &Ways<P>,
    chain: &DescriptorChain<P>,
    offset: u64,
    len: u64,
) -> (Result<()>, u64) {
    let mut done = 0;
    while done < len {
        let piece = (len - done).min(PIECE_BYTES);
        if let Some(bufs) = shared(ways, &chain.writable, done, piece) {
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
        chain.writable.write(done, &buf);
        done += piece;
    }
    (Ok(()), done)
}

async fn write<P: Shared>(
    disk: &Queue,
    ways: &Ways<P>,
    chain: &DescriptorChain<P>,
    offset: u64,
    len: u64,
) -> Result<()> {
    let mut done = 0;
    let is_durable = ways.is_durable();
    while done < len {
        let piece = (len - done).min(PIECE_BYTES);
        if let Some(bufs) = shared(ways, &chain.readable, HEADER_BYTES as u64 + done, piece) {
            let (result, _) = match is_durable {
                true => disk.write_shared_durable(offset + done, bufs).await,
                false => disk.write_shared(offset + done, bufs).await,
            };
            result?;
            done += piece;
            continue;
        }
        let mut buf = IoBuf::try_scratch(piece as usize)?;
        chain.readable.read(HEADER_BYTES as u64 + done, &mut buf);
        let (result, _) = match is_durable {
            true => disk.write_durable(offset + done, buf).await,
            false => disk.write(offset + done, buf).await,
        };
        result?;
        done += piece;
    }
    Ok(())
}

async fn discard<P>(disk: &Queue, ways: &Ways<P>, segments: Vec<Segment>) -> Result<()> {
    for segment in segments {
        disk.discard(segment.offset, segment.len).await?;
    }
    complete(disk, ways).await
}

async fn write_zeroes<P>(disk: &Queue, ways: &Ways<P>, segments: Vec<Segment>) -> Result<()> {
    for segment in segments {
        let flags = ZeroFlags { may_unmap: segment.unmap, no_fallback: false };
        disk.write_zeroes(segment.offset, segment.len, flags).await?;
    }
    complete(disk, ways).await
}

async fn complete<P>(disk: &Queue, ways: &Ways<P>) -> Result<()> {
    match ways.is_durable() {
        true => disk.flush().await,
        false => Ok(()),
    }
}
