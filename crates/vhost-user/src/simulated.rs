// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A ring on memory that a test simulates: a back end without sockets, threads and descriptors.

use crate::ledger::Ledger;
use crate::line::Line;
use crate::queue::{Running, Start, Ways};
use cowshed_image::graph::Queue;
use cowshed_storage::SharedMemory;
use cowshed_storage::signal::Mailbox;
use cowshed_vhost_user_proto::inflight::UnflushedNote;
use cowshed_vhost_user_proto::request::RequestLimits;
use cowshed_vhost_user_proto::ring::RingPlace;
use cowshed_vhost_user_proto::{Malformed, Memory};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

/// Serves a ring as its thread does, until the future is dropped: that is a kill of the back end. `notes`: the ring's part of the
/// region that survives it. `unflushed`: the note behind the parts, and the number of this life. `memory_of`: the shared memory of a
/// piece.
///
/// # Errors
/// For a ring or notes that break the protocol.
pub async fn serve_ring<M>(
    disk: &Queue,
    memory: M,
    place: RingPlace,
    notes: M::Piece,
    (unflushed, life): (M::Piece, u64),
    memory_of: fn(&M::Piece) -> &SharedMemory,
) -> Result<(), Malformed>
where
    M: Memory<Piece: Clone + 'static>,
{
    let ledger = Ledger::default();
    let (unflushed, found) = UnflushedNote::open(unflushed, life)?;
    ledger.take_up(unflushed, found, found.write_cache.unwrap_or(true));
    let limits = RequestLimits {
        disk_bytes: 0,
        block_bytes: 512,
        read_only: false,
        max_segments: 32,
        max_segment_sectors: 1 << 21,
    };
    let ways = Ways {
        id: "simulated".into(),
        limits,
        writethrough: false,
        writeback: Arc::new(AtomicBool::new(true)),
        ledger: Arc::new(ledger),
        memory_of: Some(memory_of),
    };
    let start = Start {
        place,
        base: 0,
        memory: Arc::new(Mutex::new(Arc::new(memory))),
        kick: None,
        line: Arc::new(Line::default()),
        notes: Some(notes),
        ways,
    };
    Running::new(start)?.serve(disk, &Mailbox::default()).await;
    Ok(())
}
