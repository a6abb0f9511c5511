// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Rings and chains of drivers, sound and hostile ones.

use crate::chain::{INDIRECT, MAX_DESCRIPTORS, NEXT, WRITE};
use crate::memory::{Block, Memory};
use crate::request::{Request, RequestLimits, Segment, Status, write_status};
use crate::ring::RingPlace;
use crate::{DescriptorChain, Malformed, Ring, Shared};
use proptest::prelude::*;
use std::cell::Cell;
use std::rc::Rc;

const SIZE: u16 = 16;
const MEMORY_BYTES: usize = 1 << 16;
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;
const DATA: u64 = 0x4000;
const LIMITS: RequestLimits = RequestLimits {
    disk_bytes: 1 << 20,
    block_bytes: 512,
    read_only: false,
    max_segments: 4,
    max_segment_sectors: 256,
};

fn place(event_index: bool) -> RingPlace {
    RingPlace { size: SIZE, descriptors: 0, available: AVAILABLE, used: USED, event_index, indirect: true }
}

fn ring(memory: &Block, event_index: bool) -> Ring<Block> {
    Ring::new(memory, &place(event_index), 0).unwrap()
}

/// Writes a descriptor to a table.
fn describe(memory: &Block, table: u64, index: u16, (address, len, flags, next): (u64, u32, u16, u16)) {
    let at = table as usize + usize::from(index) * 16;
    memory.write(at, &address.to_le_bytes());
    memory.write(at + 8, &len.to_le_bytes());
    memory.store(at + 12, flags);
    memory.store(at + 14, next);
}

/// Makes a chain available as the next one.
fn offer(memory: &Block, head: u16) {
    let index = memory.load(AVAILABLE as usize + 2);
    memory.store(AVAILABLE as usize + 4 + 2 * usize::from(index % SIZE), head);
    memory.store(AVAILABLE as usize + 2, index.wrapping_add(1));
}

fn walked(memory: &Block, head: u16) -> Result<DescriptorChain<Block>, Malformed> {
    let (result, chain) = ring(memory, false).chain(memory, head);
    result.map(|()| chain)
}

/// A header at `DATA`.
fn header(memory: &Block, kind: u32, sector: u64) {
    memory.write(DATA as usize, &kind.to_le_bytes());
    memory.write(DATA as usize + 8, &sector.to_le_bytes());
}

#[test]
fn descriptor_chains_return_in_order_of_completion() {
    let memory = Block::zeroed(MEMORY_BYTES);
    let mut ring = ring(&memory, false);
    assert_eq!(ring.take(), Ok(None));
    offer(&memory, 3);
    offer(&memory, 9);
    assert_eq!((ring.take(), ring.take(), ring.take()), (Ok(Some(3)), Ok(Some(9)), Ok(None)));
    assert_eq!((ring.in_flight(), ring.base()), (2, 2));
    ring.give_back(9, 513);
    ring.give_back(9, 513);
    assert_eq!((ring.in_flight(), memory.load(USED as usize + 2)), (1, 1), "a second time has no effect");
    ring.give_back(3, 1);
    let mut entries = [0; 16];
    memory.read(USED as usize + 4, &mut entries);
    assert_eq!(entries, [9, 0, 0, 0, 1, 2, 0, 0, 3, 0, 0, 0, 1, 0, 0, 0]);
}

/// A memory of which some addresses are in another region.
struct Parted<'a> {
    memory: &'a Block,
    other: &'a Block,
    in_other: std::ops::Range<u64>,
}

impl Memory for Parted<'_> {
    type Piece = Block;

    fn piece(&self, address: u64, len: usize) -> Option<Block> {
        let region = if self.in_other.contains(&address) { self.other } else { self.memory };
        region.piece(address, len)
    }

    fn pieces(&self, address: u64, len: usize, pieces: &mut Vec<Block>) -> bool {
        self.piece(address, len).map(|piece| pieces.push(piece)).is_some()
    }
}

/// Lost memory reads as zeroes, and the chain at 0 is a request that has ended.
#[test]
fn a_ring_in_lost_memory_is_not_followed() {
    for in_other in [0..AVAILABLE, AVAILABLE..USED, USED..DATA] {
        let (memory, other) = (Block::zeroed(MEMORY_BYTES), Block::zeroed(MEMORY_BYTES));
        let parted = Parted { memory: &memory, other: &other, in_other };
        let mut ring = Ring::new(&parted, &place(false), 65535).unwrap();
        let available = if parted.in_other.contains(&AVAILABLE) { &other } else { &memory };
        available.store(AVAILABLE as usize + 2, 0);
        other.lose();
        let error = ring.take().unwrap_err();
        assert_eq!(error.what, "memory of a ring is lost; its index", "{:?}", parted.in_other);
        assert_eq!(ring.in_flight(), 0);
    }
}

#[test]
fn a_chain_of_a_lost_table_is_not_followed() {
    const TABLE: u64 = 0x3000;
    for in_other in [0..AVAILABLE, TABLE..DATA] {
        let (memory, other) = (Block::zeroed(MEMORY_BYTES), Block::zeroed(MEMORY_BYTES));
        let parted = Parted { memory: &memory, other: &other, in_other };
        for memory in [&memory, &other] {
            describe(memory, 0, 0, (TABLE, 16, INDIRECT, 0));
            describe(memory, TABLE, 0, (DATA, 16, 0, 0));
        }
        let ring = Ring::new(&parted, &place(false), 0).unwrap();
        assert_eq!(ring.chain(&parted, 0).0, Ok(()));
        other.lose();
        let error = ring.chain(&parted, 0).0.unwrap_err();
        assert_eq!(error.what, "memory of a table of descriptors is lost, number", "{:?}", parted.in_other);
    }
}

#[test]
fn a_ring_goes_round_past_its_last_index() {
    let memory = Block::zeroed(MEMORY_BYTES);
    let start = u16::MAX - 20;
    memory.store(AVAILABLE as usize + 2, start);
    memory.store(USED as usize + 2, start);
    let mut ring = Ring::new(&memory, &place(true), start).unwrap();
    for round in 0..60u16 {
        offer(&memory, round % SIZE);
        assert_eq!(ring.take(), Ok(Some(round % SIZE)));
        ring.give_back(round % SIZE, 0);
        assert_eq!(memory.load(USED as usize + 2), start.wrapping_add(round + 1));
    }
}

#[test]
fn drivers_that_overfill_a_ring_are_refused() {
    let memory = Block::zeroed(MEMORY_BYTES);
    let mut taken = ring(&memory, false);
    memory.store(AVAILABLE as usize + 2, SIZE + 1);
    assert!(taken.take().is_err(), "more chains than places");
    let memory = Block::zeroed(MEMORY_BYTES);
    offer(&memory, 1);
    offer(&memory, 1);
    let mut twice = ring(&memory, false);
    assert_eq!(twice.take(), Ok(Some(1)));
    assert!(twice.take().is_err(), "the same chain twice");
    let memory = Block::zeroed(MEMORY_BYTES);
    offer(&memory, SIZE);
    assert!(ring(&memory, false).take().is_err(), "a head outside of the table");
}

#[test]
fn rings_that_are_no_memory_or_misaligned_are_refused() {
    let memory = Block::zeroed(MEMORY_BYTES);
    let sound = place(false);
    let wrong = [
        RingPlace { size: 0, ..sound },
        RingPlace { size: 12, ..sound },
        RingPlace { descriptors: 8, ..sound },
        RingPlace { available: AVAILABLE + 1, ..sound },
        RingPlace { used: USED + 2, ..sound },
        RingPlace { used: MEMORY_BYTES as u64 - 16, ..sound },
        RingPlace { available: u64::MAX - 1, ..sound },
        RingPlace { size: 1 << 14, ..sound },
    ];
    for place in wrong {
        assert!(Ring::new(&memory, &place, 0).is_err(), "{place:?}");
    }
}

#[test]
fn calls_and_kicks_follow_the_flags_without_the_event_index() {
    let memory = Block::zeroed(MEMORY_BYTES);
    let mut ring = ring(&memory, false);
    offer(&memory, 0);
    ring.take().unwrap();
    assert!(!ring.is_call_due() || ring.used_index() == 0, "nothing was given back");
    ring.give_back(0, 0);
    assert!(ring.is_call_due());
    assert!(!ring.is_call_due());
    memory.store(AVAILABLE as usize, 1);
    offer(&memory, 0);
    ring.take().unwrap();
    ring.give_back(0, 0);
    assert!(!ring.is_call_due(), "the driver wants none");
    ring.look_without_kicks();
    assert_eq!(memory.load(USED as usize), 1);
    offer(&memory, 2);
    assert!(ring.listen(), "a chain came before the wish for a kick was seen");
    assert_eq!(memory.load(USED as usize), 0);
}

#[test]
fn calls_and_kicks_follow_the_event_index() {
    let memory = Block::zeroed(MEMORY_BYTES);
    let mut ring = ring(&memory, true);
    let wish = AVAILABLE as usize + 4 + 2 * usize::from(SIZE);
    let mut end = |head: u16| {
        offer(&memory, head);
        ring.take().unwrap();
        ring.give_back(head, 0);
        ring.is_call_due()
    };
    assert!(end(0), "the first one always");
    memory.store(wish, 3);
    assert_eq!((end(1), end(2)), (false, false));
    assert!(end(3), "the driver wants to hear at 4");
    assert!(!end(4));
    assert!(!ring.listen());
    assert_eq!(memory.load(USED as usize + 4 + 8 * usize::from(SIZE)), 5, "a kick from here on");
}

#[test]
fn data_shares_descriptors_with_header_and_status() {
    let memory = Block::zeroed(MEMORY_BYTES);
    header(&memory, 1, 4);
    describe(&memory, 0, 0, (DATA, 7, NEXT, 1));
    describe(&memory, 0, 1, (DATA + 7, 9 + 100, NEXT, 2));
    describe(&memory, 0, 2, (DATA + 116, 412, NEXT, 3));
    describe(&memory, 0, 3, (DATA + 0x1000, 1, WRITE, 0));
    let chain = walked(&memory, 0).unwrap();
    assert_eq!(Request::parse(&chain, &LIMITS), Ok(Request::Write { offset: 2048, len: 512 }));
    header(&memory, 0, 1);
    describe(&memory, 0, 0, (DATA, 16, NEXT, 1));
    describe(&memory, 0, 1, (DATA + 0x1000, 1024 + 1, WRITE, 0));
    let chain = walked(&memory, 0).unwrap();
    assert_eq!(Request::parse(&chain, &LIMITS), Ok(Request::Read { offset: 512, len: 1024 }));
    assert!(write_status(&chain, Status::Unsupported));
    assert_eq!(memory.load(DATA as usize + 0x1400), 2);
}

/// Memory that counts how often it is looked at.
#[derive(Clone)]
struct Counted(Block, Rc<Cell<usize>>);

impl Shared for Counted {
    fn len(&self) -> usize {
        self.1.set(self.1.get() + 1);
        self.0.len()
    }

    fn read(&self, at: usize, into: &mut [u8]) {
        self.0.read(at, into);
    }

    fn write(&self, at: usize, from: &[u8]) {
        self.0.write(at, from);
    }

    fn load(&self, at: usize) -> u16 {
        self.0.load(at)
    }

    fn store(&self, at: usize, value: u16) {
        self.0.store(at, value);
    }

    fn part(&self, at: usize, len: usize) -> Counted {
        Counted(self.0.part(at, len), Rc::clone(&self.1))
    }
}

impl Memory for Counted {
    type Piece = Counted;

    fn piece(&self, address: u64, len: usize) -> Option<Counted> {
        Some(Counted(self.0.piece(address, len)?, Rc::clone(&self.1)))
    }

    /// As where each byte is a region of its own.
    fn pieces(&self, address: u64, len: usize, pieces: &mut Vec<Counted>) -> bool {
        (0..len).all(|at| self.piece(address + at as u64, 1).map(|piece| pieces.push(piece)).is_some())
    }
}

#[test]
fn a_long_list_of_pieces_is_passed_once() {
    const BYTES: usize = 40_000;
    let memory = Block::zeroed(MEMORY_BYTES);
    describe(&memory, 0, 0, (DATA, BYTES as u32, 0, 0));
    let counted = Counted(memory, Rc::default());
    let (result, chain) = DescriptorChain::walk(&counted, &counted, 0, false);
    assert!(result.is_ok() && chain.readable.count() == BYTES);
    counted.1.set(0);
    let (mut cursor, mut part) = (chain.readable.cursor(16), [0; 100]);
    while chain.readable.read(&mut cursor, &mut part) {}
    let looks = counted.1.get();
    assert!(looks < 3 * BYTES, "{looks} looks at {BYTES} pieces");
}

#[test]
fn indirect_tables_are_followed_once() {
    let memory = Block::zeroed(MEMORY_BYTES);
    header(&memory, 4, 0);
    describe(&memory, 0, 5, (DATA + 0x100, 32, INDIRECT, 0));
    describe(&memory, DATA + 0x100, 0, (DATA, 16, NEXT, 1));
    describe(&memory, DATA + 0x100, 1, (DATA + 0x40, 1, WRITE, 0));
    assert_eq!(Request::parse(&walked(&memory, 5).unwrap(), &LIMITS), Ok(Request::Flush));
    describe(&memory, 0, 5, (DATA + 0x100, 32, INDIRECT | WRITE, 0));
    assert_eq!(Request::parse(&walked(&memory, 5).unwrap(), &LIMITS), Ok(Request::Flush), "a flag without a meaning");
    let wrong = [
        (DATA + 0x100, 32, INDIRECT | NEXT, 1),
        (DATA + 0x100, 31, INDIRECT, 0),
        (DATA + 0x100, 0, INDIRECT, 0),
        (DATA + 0x100, 16, INDIRECT, 0),
        (MEMORY_BYTES as u64, 32, INDIRECT, 0),
        (u64::MAX - 15, 32, INDIRECT, 0),
    ];
    for descriptor in wrong {
        describe(&memory, 0, 5, descriptor);
        assert!(walked(&memory, 5).is_err(), "{descriptor:x?}");
    }
    describe(&memory, 0, 5, (DATA + 0x100, 32, INDIRECT, 0));
    describe(&memory, DATA + 0x100, 1, (DATA + 0x100, 32, INDIRECT, 0));
    assert!(walked(&memory, 5).is_err(), "a table in a table");
    let unagreed = RingPlace { indirect: false, ..place(false) };
    assert!(Ring::new(&memory, &unagreed, 0).unwrap().chain(&memory, 5).0.is_err());
}

#[test]
fn loops_ends_outside_and_wrong_directions_are_refused() {
    let memory = Block::zeroed(MEMORY_BYTES);
    describe(&memory, 0, 0, (DATA, 16, NEXT, 1));
    describe(&memory, 0, 1, (DATA, 16, NEXT, 0));
    let (result, chain) = ring(&memory, false).chain(&memory, 0);
    assert!(result.is_err(), "a loop");
    assert!(chain.readable.len() <= 16 * MAX_DESCRIPTORS as u64);
    describe(&memory, 0, 1, (DATA, 16, NEXT, SIZE));
    assert!(walked(&memory, 0).is_err(), "a descriptor outside of the table");
    describe(&memory, 0, 0, (DATA, 16, NEXT | WRITE, 1));
    describe(&memory, 0, 1, (DATA, 16, 0, 0));
    assert!(walked(&memory, 0).is_err(), "memory to read behind memory to write");
}

#[test]
fn data_outside_of_memory_leaves_a_place_for_the_status() {
    let memory = Block::zeroed(MEMORY_BYTES);
    for address in [MEMORY_BYTES as u64 - 1, u64::MAX - 3, 1 << 40] {
        describe(&memory, 0, 0, (DATA, 16, NEXT, 1));
        describe(&memory, 0, 1, (address, 512, NEXT | WRITE, 2));
        describe(&memory, 0, 2, (DATA + 0x800, 1, WRITE, 0));
        memory.write(DATA as usize + 0x800, &[0xff]);
        let (result, chain) = ring(&memory, false).chain(&memory, 0);
        assert!(result.is_err() && write_status(&chain, Status::IoError));
        assert_eq!(memory.load(DATA as usize + 0x800), 1);
    }
}

#[test]
fn requests_that_cannot_be_end_with_an_error() {
    let memory = Block::zeroed(MEMORY_BYTES);
    let parse = |kind: u32, sector: u64, len: u32, limits: &RequestLimits| {
        header(&memory, kind, sector);
        let (to, from) = if kind == 0 { (16, len + 1) } else { (16 + len, 1) };
        describe(&memory, 0, 0, (DATA, to, NEXT, 1));
        describe(&memory, 0, 1, (DATA + 0x2000, from, WRITE, 0));
        Request::parse(&walked(&memory, 0).unwrap(), limits)
    };
    let last = LIMITS.disk_bytes / 512 - 1;
    for kind in [0, 1] {
        assert!(parse(kind, last, 512, &LIMITS).is_ok());
        assert!(parse(kind, last + 1, 0, &LIMITS).is_ok());
        for (sector, len) in [(last, 1024), (last + 1, 512), (0, 511), (u64::MAX, 512), (u64::MAX / 512, 512)] {
            assert_eq!(parse(kind, sector, len, &LIMITS), Err(Status::IoError), "{sector} {len}");
        }
        let blocks = RequestLimits { block_bytes: 4096, ..LIMITS };
        assert!(parse(kind, 8, 4096, &blocks).is_ok());
        assert_eq!(parse(kind, 1, 4096, &blocks), Err(Status::IoError));
        assert_eq!(parse(kind, 8, 513, &blocks), Err(Status::IoError));
        assert!(parse(kind, 8, 512, &blocks).is_ok(), "as QEMU's device");
    }
    let read_only = RequestLimits { read_only: true, ..LIMITS };
    for kind in [1, 11, 13] {
        assert_eq!(parse(kind, 0, 512, &read_only), Err(Status::IoError));
    }
    for kind in [2, 10, 14, u32::MAX] {
        assert_eq!(parse(kind, 0, 0, &LIMITS), Err(Status::Unsupported));
    }
    describe(&memory, 0, 0, (DATA, 15, NEXT, 1));
    assert_eq!(Request::parse(&walked(&memory, 0).unwrap(), &LIMITS), Err(Status::IoError), "half a header");
    describe(&memory, 0, 0, (DATA, 16, 0, 0));
    let chain = walked(&memory, 0).unwrap();
    assert_eq!(Request::parse(&chain, &LIMITS), Err(Status::IoError), "no status");
    assert!(!write_status(&chain, Status::IoError));
}

#[test]
fn discards_and_zeroes_have_several_segments() {
    let memory = Block::zeroed(MEMORY_BYTES);
    let parse = |kind: u32, segments: &[(u64, u32, u32)]| {
        header(&memory, kind, 0);
        for (number, (sector, sectors, flags)) in segments.iter().enumerate() {
            let at = DATA as usize + 16 + 16 * number;
            memory.write(at, &sector.to_le_bytes());
            memory.write(at + 8, &sectors.to_le_bytes());
            memory.write(at + 12, &flags.to_le_bytes());
        }
        describe(&memory, 0, 0, (DATA, 16 + 16 * segments.len() as u32, NEXT, 1));
        describe(&memory, 0, 1, (DATA + 0x2000, 1, WRITE, 0));
        Request::parse(&walked(&memory, 0).unwrap(), &LIMITS)
    };
    let found = |offset, len, unmap| Segment { offset, len, unmap };
    let expected = vec![found(512, 1024, false), found(4096, 512, true)];
    assert_eq!(parse(13, &[(1, 2, 0), (3, 0, 0), (8, 1, 1)]), Ok(Request::WriteZeroes(expected)));
    assert_eq!(parse(11, &[(0, 256, 0)]), Ok(Request::Discard(vec![found(0, 1 << 17, false)])));
    assert_eq!(parse(11, &[(0, 1, 1)]), Err(Status::Unsupported), "a flag that discards don't have");
    assert_eq!(parse(13, &[(0, 1, 2)]), Err(Status::Unsupported));
    assert_eq!(parse(13, &[(0, 257, 0)]), Err(Status::IoError), "too long");
    assert_eq!(parse(13, &[(2047, 2, 0)]), Err(Status::IoError), "past the end");
    assert_eq!(parse(11, &[]), Err(Status::IoError));
    assert_eq!(parse(11, &[(0, 1, 0); 5]), Err(Status::IoError), "too many");
}

proptest! {
    #[test]
    fn no_memory_makes_the_walker_panic_or_reach_outside(
        bytes in proptest::collection::vec(any::<u8>(), 4096),
        small in proptest::collection::vec((0u16..300, 0u16..4, 0u16..18), 16),
        event_index: bool,
    ) {
        let memory = Block::new(bytes);
        for (index, (address, flags, next)) in small.into_iter().enumerate() {
            describe(&memory, 0, index as u16, (u64::from(address) * 16, u32::from(address), flags, next));
        }
        let place = RingPlace { size: SIZE, descriptors: 0, available: 0x400, used: 0x800, event_index, indirect: true };
        let mut ring = Ring::new(&memory, &place, memory.load(0x402).wrapping_sub(5)).unwrap();
        while let Ok(Some(head)) = ring.take() {
            let (_, chain) = ring.chain(&memory, head);
            prop_assert!(chain.readable.len() + chain.writable.len() <= (MAX_DESCRIPTORS as u64) << 32);
            let _ = Request::parse(&chain, &LIMITS);
            write_status(&chain, Status::IoError);
            ring.give_back(head, 1);
            ring.is_call_due();
        }
        ring.listen();
        prop_assert!(ring.in_flight() <= usize::from(SIZE));
    }
}
