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
const FLAGS_AT: usize = 2;
/// The guest heard of the end of changes that die with the life that has noted that.
const UNFLUSHED: u16 = 1;
/// Changes of an earlier life are lost, and the guest doesn't know.
const LOST: u16 = 2;
const CACHE_AT: usize = 4;
/// Values of the write cache's switch; 0 is none.
const CACHE_OFF: u16 = 1;
const CACHE_ON: u16 = 2;
/// The number of the life that keeps the note, of 8 bytes. 0: a version without such numbers.
const LIFE_AT: usize = 8;

/// The content of a note, for the life that takes it up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NoteState {
    /// The guest heard of the end of changes that die with this life.
    pub is_unflushed: bool,
    /// Changes of an earlier life are lost, and the guest doesn't know.
    pub is_lost: bool,
    /// The guest's switch of the write cache, where it is noted.
    pub write_cache: Option<bool>,
}

/// Our own note: whether a guest heard of the end of changes that die with the back end's process, and its write cache.
/// Other back ends neither know nor change it.
#[derive(Debug)]
pub struct UnflushedNote<P>(P);

impl<P: Shared> UnflushedNote<P> {
    /// Takes the note up for a life, whose number is its own. A front end passes the same region again to the same life:
    /// the changes of that one are still there.
    pub fn open(part: P, life: u64) -> Result<(UnflushedNote<P>, NoteState), Malformed> {
        if part.len() < NOTE_BYTES {
            return Err(Malformed::new("the note behind the queues is too short, bytes", part.len() as u64));
        }
        match part.load(0) {
            0 => part.store(0, NOTE_MARK),
            NOTE_MARK => {}
            mark => return Err(Malformed::new("mark of the note behind the queues", mark)),
        }
        let mut keeper = [0; 8];
        part.read(LIFE_AT, &mut keeper);
        let (flags, is_own) = (part.load(FLAGS_AT), keeper == life.to_le_bytes());
        let state = NoteState {
            is_unflushed: is_own && flags & UNFLUSHED != 0,
            is_lost: if is_own { flags & !UNFLUSHED != 0 } else { flags != 0 },
            write_cache: match part.load(CACHE_AT) {
                CACHE_OFF => Some(false),
                CACHE_ON => Some(true),
                _ => None,
            },
        };
        let note = UnflushedNote(part);
        // Before the number: a kill in between must not make the changes of another life those of this one.
        note.set(state.is_unflushed, state.is_lost);
        if !is_own {
            note.0.write(LIFE_AT, &life.to_le_bytes());
            fence(Ordering::SeqCst);
        }
        Ok((note, state))
    }

    /// Sets both facts, before later writes to memory.
    pub fn set(&self, is_unflushed: bool, is_lost: bool) {
        let flag = |is_set: bool, flag: u16| if is_set { flag } else { 0 };
        self.0.store(FLAGS_AT, flag(is_unflushed, UNFLUSHED) | flag(is_lost, LOST));
        fence(Ordering::SeqCst);
    }

    /// Notes the guest's switch of the write cache, before later writes to memory.
    pub fn set_write_cache(&self, is_on: bool) {
        self.0.store(CACHE_AT, if is_on { CACHE_ON } else { CACHE_OFF });
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

    #[test]
    fn a_note_means_a_loss_to_other_lives_alone() {
        let part = Block::zeroed(NOTE_BYTES);
        let open = |life: u64| UnflushedNote::open(part.clone(), life).unwrap();
        let (note, none) = open(7);
        assert_eq!(none, NoteState::default());
        note.set(true, false);
        note.set_write_cache(false);
        let own = NoteState { is_unflushed: true, is_lost: false, write_cache: Some(false) };
        assert_eq!((open(7).1, open(7).1), (own, own));
        let lost = NoteState { is_unflushed: false, is_lost: true, write_cache: Some(false) };
        // The guest has to hear of it, however often the region comes again.
        assert_eq!((open(8).1, open(8).1, open(7).1), (lost, lost, lost));
        open(8).0.set(false, false);
        assert_eq!(open(9).1, NoteState { is_lost: false, ..lost });
        // A version without numbers of lives.
        part.write(LIFE_AT, &[0; 8]);
        part.store(FLAGS_AT, 1);
        assert!(open(9).1.is_lost);
    }

    #[test]
    fn a_kill_while_a_note_is_taken_up_forgets_no_loss() {
        let before = Block::zeroed(NOTE_BYTES);
        UnflushedNote::open(before.clone(), 7).unwrap().0.set(true, false);
        let mut bytes = vec![0; NOTE_BYTES];
        before.read(0, &mut bytes);
        // The flags are there, and the number of the life that has written them is not.
        bytes[FLAGS_AT] = LOST as u8;
        for life in [7, 8, 9] {
            assert!(UnflushedNote::open(Block::new(bytes.clone()), life).unwrap().1.is_lost);
        }
    }
}
