// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The split virtqueue, as the device sees it.

use crate::chain::DESCRIPTOR_BYTES;
use crate::{DescriptorChain, Malformed, Memory, Shared};
use std::sync::atomic::{Ordering, fence};

/// The most places of a ring.
pub const MAX_RING_SIZE: u16 = 1 << 15;

/// In the flags of the available ring: the driver needs no calls.
const NO_CALLS: u16 = 1;
/// In the flags of the used ring: the device needs no kicks.
const NO_KICKS: u16 = 1;
/// The place of the index in both rings, behind the flags.
const INDEX_AT: usize = 2;
/// The offset of the entries in both rings.
const ENTRIES_AT: usize = 4;
const USED_ENTRY_BYTES: usize = 8;

/// The place of a ring, by the guest's addresses, and the agreed features.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingPlace {
    /// Number of places: a power of two.
    pub size: u16,
    /// Address of the descriptor table.
    pub descriptors: u64,
    /// Address of the available ring.
    pub available: u64,
    /// Address of the used ring.
    pub used: u64,
    /// `VIRTIO_F_EVENT_IDX`.
    pub event_index: bool,
    /// `VIRTIO_F_INDIRECT_DESC`.
    pub indirect: bool,
}

/// A ring that is in use.
#[derive(Debug)]
pub struct Ring<P> {
    size: u16,
    descriptors: P,
    available: P,
    used: P,
    event_index: bool,
    indirect: bool,
    /// The index of the next chain to take.
    next_available: u16,
    /// The index of the next chain to give back.
    next_used: u16,
    /// The index up to which the driver was, or needn't be, called; `None`: never yet.
    told: Option<u16>,
    /// Chains that were taken and not given back, by their heads.
    in_flight: Vec<bool>,
    in_flight_count: usize,
}

impl<P: Shared> Ring<P> {
    /// A ring at a place, from the index `base` of the available ring on. The used index is the one in memory.
    pub fn new<M: Memory<Piece = P>>(memory: &M, place: &RingPlace, base: u16) -> Result<Ring<P>, Malformed> {
        if !place.size.is_power_of_two() || place.size > MAX_RING_SIZE {
            return Err(Malformed::new("the size of a ring is no power of two up to 32768", place.size));
        }
        let size = usize::from(place.size);
        let part = |what: &'static str, address: u64, align: u64, len: usize| {
            if !address.is_multiple_of(align) {
                return Err(Malformed::new(what, address));
            }
            memory.piece(address, len).ok_or(Malformed::new(what, address))
        };
        let available_bytes = ENTRIES_AT + 2 * size + 2;
        let used_bytes = ENTRIES_AT + USED_ENTRY_BYTES * size + 2;
        let descriptors =
            part("a descriptor table is no memory or misaligned", place.descriptors, 16, DESCRIPTOR_BYTES * size)?;
        let available = part("an available ring is no memory or misaligned", place.available, 2, available_bytes)?;
        let used = part("a used ring is no memory or misaligned", place.used, 4, used_bytes)?;
        let next_used = used.load(INDEX_AT);
        Ok(Ring {
            size: place.size,
            descriptors,
            available,
            used,
            event_index: place.event_index,
            indirect: place.indirect,
            next_available: base,
            next_used,
            told: None,
            in_flight: vec![false; size],
            in_flight_count: 0,
        })
    }

    /// Number of places.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// The index of the next chain to take, which answers `GET_VRING_BASE` once nothing is in flight.
    pub fn base(&self) -> u16 {
        self.next_available
    }

    /// The index of the next chain to give back.
    pub fn used_index(&self) -> u16 {
        self.next_used
    }

    /// Number of chains that were taken and not given back.
    pub fn in_flight(&self) -> usize {
        self.in_flight_count
    }

    /// Goes on behind chains that an earlier life of the back end took: they are in flight now, and [`Ring::chain`]
    /// returns their memory.
    pub fn resume(&mut self, heads: &[u16]) -> Result<(), Malformed> {
        self.next_available = self.next_used;
        for &head in heads {
            self.begin(head)?;
            self.next_available = self.next_available.wrapping_add(1);
        }
        Ok(())
    }

    fn begin(&mut self, head: u16) -> Result<(), Malformed> {
        match self.in_flight.get_mut(usize::from(head)) {
            None => Err(Malformed::new("a chain begins outside of the descriptor table, number", head)),
            Some(true) => Err(Malformed::new("a chain was made available twice, number", head)),
            Some(place) => {
                *place = true;
                self.in_flight_count += 1;
                Ok(())
            }
        }
    }

    /// The head of the next chain, if there is one. An error is a driver that breaks the protocol; the ring is of no use then.
    pub fn take(&mut self) -> Result<Option<u16>, Malformed> {
        let index = self.available.load(INDEX_AT);
        let waiting = index.wrapping_sub(self.next_available);
        if waiting == 0 {
            return Ok(None);
        }
        if waiting > self.size || self.in_flight_count >= usize::from(self.size) {
            return Err(Malformed::new("more chains are available than the ring has places; its index", index));
        }
        let place = usize::from(self.next_available & (self.size - 1));
        let head = self.available.load(ENTRIES_AT + 2 * place);
        // Asked behind both loads: numbers of lost memory are zeroes, and the chain at 0 may be a request that has ended.
        if self.available.is_lost() || self.descriptors.is_lost() || self.used.is_lost() {
            return Err(Malformed::new("memory of a ring is lost; its index", index));
        }
        self.begin(head)?;
        self.next_available = self.next_available.wrapping_add(1);
        Ok(Some(head))
    }

    /// True when a chain is there to be taken.
    pub fn has_more(&self) -> bool {
        self.available.load(INDEX_AT) != self.next_available
    }

    /// The memory of the chain that begins at `head`.
    pub fn chain<M: Memory<Piece = P>>(&self, memory: &M, head: u16) -> (Result<(), Malformed>, DescriptorChain<P>) {
        DescriptorChain::walk(memory, &self.descriptors, head, self.indirect)
    }

    /// As [`Ring::chain`], in place of another chain whose request has ended.
    pub fn chain_into<M: Memory<Piece = P>>(
        &self,
        memory: &M,
        head: u16,
        chain: &mut DescriptorChain<P>,
    ) -> Result<(), Malformed> {
        chain.walk_into(memory, &self.descriptors, head, self.indirect)
    }

    /// Gives a chain back, of which the device has written `written` bytes. No effect for one that isn't in flight.
    pub fn give_back(&mut self, head: u16, written: u32) {
        match self.in_flight.get_mut(usize::from(head)) {
            Some(place) if *place => *place = false,
            _ => return,
        }
        self.in_flight_count -= 1;
        let place = usize::from(self.next_used & (self.size - 1));
        let mut entry = [0; USED_ENTRY_BYTES];
        entry[..4].copy_from_slice(&u32::from(head).to_le_bytes());
        entry[4..].copy_from_slice(&written.to_le_bytes());
        self.used.write(ENTRIES_AT + USED_ENTRY_BYTES * place, &entry);
        self.next_used = self.next_used.wrapping_add(1);
        self.used.store(INDEX_AT, self.next_used);
    }

    /// True when the driver is to be called for chains given back since it was asked last.
    pub fn is_call_due(&mut self) -> bool {
        let before = self.told.replace(self.next_used);
        if before == Some(self.next_used) {
            return false;
        }
        // The used index is seen before the driver's wish is read: else both could wait for each other.
        fence(Ordering::SeqCst);
        if !self.event_index {
            return self.available.load(0) & NO_CALLS == 0;
        }
        let wanted = self.available.load(ENTRIES_AT + 2 * usize::from(self.size));
        match before {
            None => true,
            Some(before) => {
                let (new, old) = (self.next_used, before);
                new.wrapping_sub(wanted).wrapping_sub(1) < new.wrapping_sub(old)
            }
        }
    }

    /// Asks for kicks from here on. True: a chain came meanwhile, and no kick may come for it.
    pub fn listen(&mut self) -> bool {
        match self.event_index {
            true => {
                self.used.store(ENTRIES_AT + USED_ENTRY_BYTES * usize::from(self.size), self.next_available);
            }
            false => self.used.store(0, 0),
        }
        // The wish is seen before the index is read: else both could wait for each other.
        fence(Ordering::SeqCst);
        self.has_more()
    }

    /// Asks for no kicks: the device looks by itself. With the event index no flag is needed.
    pub fn look_without_kicks(&mut self) {
        if !self.event_index {
            self.used.store(0, NO_KICKS);
        }
    }
}
