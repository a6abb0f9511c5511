// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The region that notes the requests in flight, so that a new back end carries out those that the old one left behind.
//!
//! One part for each queue: `features` (8 bytes), `version` (2), number of descriptors (2), `last_batch_head` (2),
//! `used_idx` (2). Then 16 bytes for each descriptor: in flight (1), padding (5), `next` (2), counter (8).

use crate::{Malformed, Shared};
use std::sync::atomic::{Ordering, fence};

const VERSION_AT: usize = 8;
const COUNT_AT: usize = 10;
const LAST_HEAD_AT: usize = 12;
const USED_INDEX_AT: usize = 14;
const HEADER_BYTES: usize = 16;
const STATE_BYTES: usize = 16;
const NEXT_AT: usize = 6;
const COUNTER_AT: usize = 8;
const VERSION: u16 = 1;
/// Parts begin at multiples of it.
const PART_ALIGN: usize = 64;

/// Bytes of one queue's part, for rings of `size` places.
pub fn part_bytes(size: u16) -> usize {
    (HEADER_BYTES + STATE_BYTES * usize::from(size)).next_multiple_of(PART_ALIGN)
}

/// Bytes of a region for this many queues.
pub fn region_bytes(queues: u16, size: u16) -> usize {
    usize::from(queues) * part_bytes(size)
}

/// Bytes of our own note behind the parts of the queues.
pub const NOTE_BYTES: usize = 64;
/// The first number of a note that is in use.
const NOTE_MARK: u16 = 0xc05e;
const FLAG_AT: usize = 2;

/// Our own note: whether a guest heard of the end of changes that die with the back end's process. Other back ends
/// neither know nor change it.
#[derive(Debug)]
pub struct UnflushedNote<P>(P);

impl<P: Shared> UnflushedNote<P> {
    /// Takes the note up. True: an earlier life has left it set.
    pub fn open(part: P) -> Result<(UnflushedNote<P>, bool), Malformed> {
        if part.len() < NOTE_BYTES {
            return Err(Malformed::new("the note behind the queues is too short, bytes", part.len() as u64));
        }
        match part.load(0) {
            0 => {
                part.store(0, NOTE_MARK);
                Ok((UnflushedNote(part), false))
            }
            NOTE_MARK => {
                let is_set = part.load(FLAG_AT) != 0;
                Ok((UnflushedNote(part), is_set))
            }
            mark => Err(Malformed::new("mark of the note behind the queues", mark)),
        }
    }

    /// Sets or clears it, before later writes to memory.
    pub fn set(&self, is_set: bool) {
        self.0.store(FLAG_AT, is_set.into());
        fence(Ordering::SeqCst);
    }
}

/// The part of one queue.
#[derive(Debug)]
pub struct Inflight<P> {
    part: P,
    size: u16,
    next_counter: u64,
}

impl<P: Shared> Inflight<P> {
    /// Takes the part of a queue up. `used_index` is that of the ring in memory. Returns the heads of the chains that were in
    /// flight, in the order in which they were taken.
    pub fn open(part: P, size: u16, used_index: u16) -> Result<(Inflight<P>, Vec<u16>), Malformed> {
        if part.len() < part_bytes(size) {
            return Err(Malformed::new("the inflight region is too short, bytes of a queue", part.len() as u64));
        }
        let mut inflight = Inflight { part, size, next_counter: 1 };
        match inflight.part.load(VERSION_AT) {
            0 => {
                inflight.part.store(COUNT_AT, size);
                inflight.part.store(USED_INDEX_AT, used_index);
                inflight.part.store(VERSION_AT, VERSION);
                return Ok((inflight, Vec::new()));
            }
            VERSION => {}
            version => return Err(Malformed::new("version of the inflight region", version)),
        }
        let count = inflight.part.load(COUNT_AT);
        if count != size {
            return Err(Malformed::new("the inflight region is for rings of another size", count));
        }
        if inflight.part.load(USED_INDEX_AT) != used_index {
            // The last life has given a chain back, and ended before it could note that.
            let last = inflight.part.load(LAST_HEAD_AT);
            if last >= size {
                return Err(Malformed::new("last head of the inflight region", last));
            }
            inflight.part.write(inflight.state_at(last), &[0]);
            fence(Ordering::SeqCst);
            inflight.part.store(USED_INDEX_AT, used_index);
        }
        let mut heads: Vec<(u64, u16)> = (0..size).filter_map(|head| inflight.counter(head)).collect();
        heads.sort_unstable();
        inflight.next_counter = heads.last().map_or(1, |(counter, _)| counter.wrapping_add(1));
        Ok((inflight, heads.into_iter().map(|(_, head)| head).collect()))
    }

    fn state_at(&self, head: u16) -> usize {
        HEADER_BYTES + STATE_BYTES * usize::from(head)
    }

    /// The counter of a chain that is in flight.
    fn counter(&self, head: u16) -> Option<(u64, u16)> {
        let mut state = [0; STATE_BYTES];
        self.part.read(self.state_at(head), &mut state);
        (state[0] != 0).then(|| (crate::malformed::u64_at(&state, COUNTER_AT), head))
    }

    /// Notes that a chain is in flight, before anything of it is carried out.
    pub fn begin(&mut self, head: u16) {
        if head >= self.size {
            return;
        }
        let at = self.state_at(head);
        self.part.write(at + COUNTER_AT, &self.next_counter.to_le_bytes());
        self.next_counter = self.next_counter.wrapping_add(1);
        fence(Ordering::SeqCst);
        self.part.write(at, &[1]);
    }

    /// Notes the chain that `give_back` returns to the ring, calls it, and notes that this was done. It returns the
    /// ring's used index.
    pub fn end(&mut self, head: u16, give_back: impl FnOnce() -> u16) {
        if head >= self.size {
            give_back();
            return;
        }
        let at = self.state_at(head);
        self.part.store(at + NEXT_AT, self.part.load(LAST_HEAD_AT));
        self.part.store(LAST_HEAD_AT, head);
        fence(Ordering::SeqCst);
        let used_index = give_back();
        fence(Ordering::SeqCst);
        self.part.write(at, &[0]);
        fence(Ordering::SeqCst);
        self.part.store(USED_INDEX_AT, used_index);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Block;

    const SIZE: u16 = 8;

    fn opened(part: &Block, used_index: u16) -> Vec<u16> {
        Inflight::open(part.clone(), SIZE, used_index).unwrap().1
    }

    #[test]
    fn chains_in_flight_come_back_in_their_order() {
        let part = Block::zeroed(part_bytes(SIZE));
        let (mut inflight, none) = Inflight::open(part.clone(), SIZE, 5).unwrap();
        assert!(none.is_empty());
        for head in [3, 1, 7] {
            inflight.begin(head);
        }
        inflight.end(1, || 6);
        assert_eq!(opened(&part, 6), [3, 7]);
        let (mut inflight, _) = Inflight::open(part.clone(), SIZE, 6).unwrap();
        inflight.begin(1);
        assert_eq!(opened(&part, 6), [3, 7, 1]);
    }

    #[test]
    fn a_chain_given_back_without_a_note_does_not_come_back() {
        let part = Block::zeroed(part_bytes(SIZE));
        let (mut inflight, _) = Inflight::open(part.clone(), SIZE, 0).unwrap();
        inflight.begin(2);
        inflight.begin(4);
        let before = part.clone();
        let mut killed = Vec::new();
        inflight.end(4, || {
            let mut bytes = vec![0; before.len()];
            before.read(0, &mut bytes);
            killed = bytes;
            1
        });
        // The daemon dies on either side of the ring's new index.
        assert_eq!(opened(&Block::new(killed.clone()), 0), [2, 4]);
        assert_eq!(opened(&Block::new(killed), 1), [2]);
        assert_eq!(opened(&part, 1), [2]);
    }

    #[test]
    fn a_region_of_a_stranger_is_checked() {
        let part = Block::zeroed(part_bytes(SIZE));
        Inflight::open(part.clone(), SIZE, 0).unwrap();
        assert!(Inflight::open(part.clone(), SIZE / 2, 0).is_err());
        assert!(Inflight::open(part.part(0, 64), SIZE, 0).is_err());
        part.store(LAST_HEAD_AT, SIZE);
        assert!(Inflight::open(part.clone(), SIZE, 1).is_err());
        part.store(VERSION_AT, 2);
        assert!(Inflight::open(part, SIZE, 0).is_err());
    }
}
