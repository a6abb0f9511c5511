// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Entry points of `cowshed-vhost-user-proto`: messages of a front end, and the memory of a guest.

use super::replay::Entry;
use cowshed_vhost_user_proto::chain::MAX_DESCRIPTORS;
use cowshed_vhost_user_proto::memory::Block;
use cowshed_vhost_user_proto::request::{Request, RequestLimits, Status, write_status};
use cowshed_vhost_user_proto::ring::RingPlace;
use cowshed_vhost_user_proto::{Inflight, Message, MessageHeader, Regions, Ring, Shared, inflight};

/// All entry points of this file.
pub const ENTRIES: &[Entry] = &[("vhost_message", message), ("vhost_ring", ring)];

/// Messages, one behind the other. The regions that they bring are found at their addresses.
pub fn message(data: &[u8]) {
    let mut rest = data;
    let mut regions = Regions::default();
    while let Some((head, behind)) = rest.split_first_chunk() {
        let Ok(header) = MessageHeader::parse(head) else { return };
        let (body, behind) = behind.split_at((header.body_bytes as usize).min(behind.len()));
        let added = match Message::parse(&header, body) {
            Ok(Message::SetMemTable(added)) => added,
            Ok(Message::AddMemReg(region)) => vec![region],
            _ => Vec::new(),
        };
        for region in added {
            if regions.add(region, region.guest_address).is_ok() {
                let last = region.guest_address + (region.len - 1);
                assert_eq!(regions.find(last), Some((&region.guest_address, region.len - 1, 1)));
            }
        }
        rest = behind;
    }
}

/// Guest memory that begins with a ring of 16 places, and the notes of requests in flight behind it. Each chain is walked, read
/// as a request, and given back.
pub fn ring(data: &[u8]) {
    const SIZE: u16 = 16;
    const MEMORY_BYTES: usize = 4096;
    let Some((&first, data)) = data.split_first() else { return };
    let mut bytes = data[..data.len().min(MEMORY_BYTES)].to_vec();
    bytes.resize(MEMORY_BYTES + inflight::part_bytes(SIZE), 0);
    let memory = Block::new(bytes);
    let notes = memory.part(MEMORY_BYTES, inflight::part_bytes(SIZE));
    let guest = memory.part(0, MEMORY_BYTES);
    let place = RingPlace {
        size: SIZE,
        descriptors: 0,
        available: 0x100,
        used: 0x200,
        event_index: first & 1 != 0,
        indirect: first & 2 != 0,
    };
    let limits = RequestLimits {
        disk_bytes: 1 << 20,
        block_bytes: 512,
        read_only: first & 4 != 0,
        max_segments: 8,
        max_segment_sectors: 1 << 12,
    };
    let base = guest.load(0x102).wrapping_sub(u16::from(first >> 3));
    let Ok(mut ring) = Ring::new(&guest, &place, base) else { return };
    let Ok((mut inflight, left)) = Inflight::open(notes, SIZE, ring.used_index()) else { return };
    if ring.resume(&left).is_err() {
        return;
    }
    while let Ok(Some(head)) = ring.take() {
        inflight.begin(head);
        let (result, chain) = ring.chain(&guest, head);
        assert!(chain.readable.len() + chain.writable.len() <= (MAX_DESCRIPTORS * MEMORY_BYTES) as u64);
        match Request::parse(&chain, &limits) {
            Ok(Request::Read { offset, len } | Request::Write { offset, len }) => {
                assert!(offset + len <= limits.disk_bytes);
            }
            Ok(Request::Discard(segments) | Request::WriteZeroes(segments)) => {
                assert!(segments.iter().all(|segment| segment.offset + segment.len <= limits.disk_bytes));
            }
            _ => {}
        }
        write_status(&chain, if result.is_ok() { Status::Ok } else { Status::IoError });
        inflight.end(head, || {
            ring.give_back(head, 1);
            ring.used_index()
        });
        ring.is_call_due();
    }
    ring.listen();
    assert!(ring.in_flight() <= usize::from(SIZE));
}
