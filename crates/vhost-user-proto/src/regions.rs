// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Where the memory of a guest is: regions by the guest's addresses, and by those of the front end.

use crate::Malformed;
use crate::malformed::u64_at;

/// The most regions at a time, which `GET_MAX_MEM_SLOTS` answers.
pub const MAX_REGIONS: usize = 509;

/// Bytes of a region in a message.
pub const REGION_BYTES: usize = 32;

/// One region of guest memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Its first address for the guest.
    pub guest_address: u64,
    /// Its length in bytes.
    pub len: u64,
    /// Its first address in the front end, in whose terms the places of rings come.
    pub front_end_address: u64,
    /// Its offset in its file, in bytes.
    pub file_offset: u64,
}

impl Region {
    /// Parses a region of a message and checks that none of its ends passes the last address.
    pub fn parse(bytes: &[u8; REGION_BYTES]) -> Result<Region, Malformed> {
        let region = Region {
            guest_address: u64_at(bytes, 0),
            len: u64_at(bytes, 8),
            front_end_address: u64_at(bytes, 16),
            file_offset: u64_at(bytes, 24),
        };
        let ends = [region.guest_address, region.front_end_address, region.file_offset];
        let is_sound = ends.iter().all(|start| start.checked_add(region.len).is_some());
        match region.len {
            0 => Err(Malformed::new("a memory region has no byte; its guest address", region.guest_address)),
            len if !is_sound => Err(Malformed::new("a memory region passes the last address; its length", len)),
            _ => Ok(region),
        }
    }

    /// The bytes of a message.
    pub fn encode(&self) -> [u8; REGION_BYTES] {
        let mut bytes = [0; REGION_BYTES];
        let fields = [self.guest_address, self.len, self.front_end_address, self.file_offset];
        for (place, field) in bytes.chunks_exact_mut(8).zip(fields) {
            place.copy_from_slice(&field.to_le_bytes());
        }
        bytes
    }

    fn guest_end(&self) -> u64 {
        self.guest_address.saturating_add(self.len)
    }
}

/// The regions, each with the object that stands for its bytes.
#[derive(Clone, Debug)]
pub struct Regions<T> {
    /// Ordered by the guest's addresses, without overlap.
    list: Vec<(Region, T)>,
}

impl<T> Default for Regions<T> {
    fn default() -> Self {
        Regions { list: Vec::new() }
    }
}

impl<T> Regions<T> {
    /// Adds a region. An error where it overlaps another one, or there are too many.
    pub fn add(&mut self, region: Region, bytes: T) -> Result<(), Malformed> {
        if self.list.len() >= MAX_REGIONS {
            return Err(Malformed::new("too many memory regions", self.list.len() as u64));
        }
        let at = self.list.partition_point(|(other, _)| other.guest_address < region.guest_address);
        let before = at.checked_sub(1).and_then(|before| self.list.get(before));
        let overlaps = before.is_some_and(|(before, _)| before.guest_end() > region.guest_address)
            || self.list.get(at).is_some_and(|(next, _)| next.guest_address < region.guest_end());
        if overlaps {
            return Err(Malformed::new("a memory region overlaps another one at guest address", region.guest_address));
        }
        self.list.insert(at, (region, bytes));
        Ok(())
    }

    /// Removes the region with these addresses and this length.
    pub fn remove(&mut self, region: &Region) -> Result<T, Malformed> {
        let is_it = |(other, _): &(Region, T)| {
            other.guest_address == region.guest_address
                && other.len == region.len
                && other.front_end_address == region.front_end_address
        };
        match self.list.iter().position(is_it) {
            Some(at) => Ok(self.list.remove(at).1),
            None => Err(Malformed::new("there is no such memory region at guest address", region.guest_address)),
        }
    }

    /// All of them, by the guest's addresses.
    pub fn iter(&self) -> impl Iterator<Item = &(Region, T)> {
        self.list.iter()
    }

    /// The bytes of all of them.
    pub fn bytes(&self) -> u64 {
        self.list.iter().fold(0, |sum, (region, _)| sum.saturating_add(region.len))
    }

    /// The number of regions.
    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// True for none.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// The region with the byte at a guest's address, its place there, and how many bytes follow in the region, that
    /// one included.
    pub fn find(&self, address: u64) -> Option<(&T, u64, u64)> {
        let at = self.list.partition_point(|(region, _)| region.guest_address <= address).checked_sub(1)?;
        let (region, bytes) = self.list.get(at)?;
        let offset = address - region.guest_address;
        (offset < region.len).then(|| (bytes, offset, region.len - offset))
    }

    /// The guest's address of a place that the front end names by its own.
    pub fn guest_address(&self, front_end_address: u64) -> Result<u64, Malformed> {
        let found = self.list.iter().find_map(|(region, _)| {
            let offset = front_end_address.checked_sub(region.front_end_address)?;
            (offset < region.len).then(|| region.guest_address.checked_add(offset)).flatten()
        });
        found.ok_or(Malformed::new("no memory region has the front end's address", front_end_address))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(guest_address: u64, len: u64) -> Region {
        Region { guest_address, len, front_end_address: guest_address + 0x10_0000, file_offset: 0 }
    }

    #[test]
    fn regions_are_found_by_both_kinds_of_addresses() {
        let mut regions = Regions::default();
        regions.add(region(0x2000, 0x1000), 'b').unwrap();
        regions.add(region(0x0, 0x1000), 'a').unwrap();
        regions.add(region(0x1000, 0x1000), 'm').unwrap();
        assert_eq!(regions.find(0x1fff), Some((&'m', 0xfff, 1)));
        assert_eq!(regions.find(0x2000), Some((&'b', 0, 0x1000)));
        assert_eq!(regions.find(0x3000), None);
        assert_eq!(regions.guest_address(0x10_2004), Ok(0x2004));
        assert!(regions.guest_address(0x10_3000).is_err() && regions.guest_address(0).is_err());
        assert_eq!(regions.remove(&region(0x1000, 0x1000)), Ok('m'));
        assert_eq!(regions.find(0x1fff), None);
        assert!(regions.remove(&region(0x1000, 0x1000)).is_err());
    }

    #[test]
    fn overlaps_and_ends_past_the_last_address_are_refused() {
        let mut regions = Regions::default();
        regions.add(region(0x2000, 0x1000), ()).unwrap();
        for (start, len) in [(0x2000, 0x1000), (0x1000, 0x1001), (0x2fff, 1), (0, 0x8000)] {
            assert!(regions.add(region(start, len), ()).is_err(), "{start:#x}");
        }
        regions.add(region(0x1000, 0x1000), ()).unwrap();
        regions.add(region(0x3000, 0x1000), ()).unwrap();
        let sound = region(0x1000, 0x1000);
        assert_eq!(Region::parse(&sound.encode()), Ok(sound));
        assert!(Region::parse(&Region { len: 0, ..sound }.encode()).is_err());
        assert!(Region::parse(&Region { guest_address: u64::MAX - 5, ..sound }.encode()).is_err());
        assert!(Region::parse(&Region { file_offset: u64::MAX - 5, ..sound }.encode()).is_err());
    }
}
