// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A ring on memory that a test simulates: a back end without sockets, threads and descriptors.

use crate::ledger::SessionLedger;
use crate::line::Line;
use crate::memory::GuestMemory;
use crate::queue::{RingRules, RunningRing, Start};
use cowshed_image::graph::Queue;
use cowshed_storage::SharedMemory;
use cowshed_storage::signal::Mailbox;
use cowshed_vhost_user_proto::inflight::UnflushedNote;
use cowshed_vhost_user_proto::request::RequestLimits;
use cowshed_vhost_user_proto::ring::RingPlace;
use cowshed_vhost_user_proto::{Malformed, Memory, Region};
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
    let ledger = SessionLedger::default();
    let (unflushed, found) = UnflushedNote::open(unflushed, life)?;
    ledger.take_up(unflushed, found, found.write_cache.unwrap_or(true));
    let ways = ways(ledger, memory_of);
    let start = Start {
        place,
        base: 0,
        memory: Arc::new(Mutex::new(Arc::new(memory))),
        kick: None,
        line: Arc::new(Line::default()),
        notes: Some(notes),
        ways,
    };
    RunningRing::new(start)?.serve(disk, &Mailbox::default()).await;
    Ok(())
}

/// Serves a ring in memory as front ends share it, without notes. The memory begins at the guest's address 0.
///
/// # Errors
/// For a ring that breaks the protocol.
pub async fn serve_shared_ring(disk: &Queue, memory: SharedMemory, place: RingPlace) -> Result<(), Malformed> {
    let mut guest = GuestMemory::default();
    let region = Region { guest_address: 0, len: memory.len() as u64, front_end_address: 0, file_offset: 0 };
    guest.regions.add(region, memory)?;
    let start = Start {
        place,
        base: 0,
        memory: Arc::new(Mutex::new(Arc::new(guest))),
        kick: None,
        line: Arc::new(Line::default()),
        notes: None,
        ways: ways(SessionLedger::default(), |piece| &piece.0),
    };
    RunningRing::new(start)?.serve(disk, &Mailbox::default()).await;
    Ok(())
}

fn ways<P>(ledger: SessionLedger<P>, memory_of: fn(&P) -> &SharedMemory) -> RingRules<P> {
    let limits = RequestLimits {
        disk_bytes: 0,
        block_bytes: 512,
        read_only: false,
        max_segments: 32,
        max_segment_sectors: 1 << 21,
    };
    RingRules {
        id: "simulated".into(),
        limits,
        writethrough: false,
        writeback: Arc::new(AtomicBool::new(true)),
        ledger: Arc::new(ledger),
        memory_of: Some(memory_of),
    }
}
