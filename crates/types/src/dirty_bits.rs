// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The bits of one dirty bitmap, in pieces as the image stores them: one cluster each.

use crate::{Error, ErrorKind, Result};
use std::collections::BTreeMap;
use std::ops::Range;

/// The content of one cluster of bitmap data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BitsPiece<'a> {
    /// All bits are zero.
    Zeroes,
    /// All bits are one, and none lies behind the end of the disk.
    Ones,
    /// These bytes: bit 0 of the first byte is the first bit.
    Bytes(&'a [u8]),
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Stored {
    Ones,
    Bytes(Box<[u8]>),
}

/// The bits of a dirty bitmap: bit n stands for the bytes from n × granularity on. A range without a set bit takes no
/// memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirtyBits {
    granularity_bits: u32,
    disk_bytes: u64,
    piece_bytes: usize,
    pieces: BTreeMap<u64, Stored>,
}

impl DirtyBits {
    /// Nothing dirty. `granularity_bits`: log2 of the bytes that a bit stands for, 0–63; `cluster_bits` 9–21.
    pub fn new(disk_bytes: u64, granularity_bits: u32, cluster_bits: u32) -> Self {
        DirtyBits { granularity_bits, disk_bytes, piece_bytes: 1 << cluster_bits, pieces: BTreeMap::new() }
    }

    /// Bytes of the disk that a bit stands for.
    pub fn granularity_bytes(&self) -> u64 {
        1 << self.granularity_bits
    }

    /// Size of the disk in bytes.
    pub fn disk_bytes(&self) -> u64 {
        self.disk_bytes
    }

    /// Number of bits.
    pub fn bits(&self) -> u64 {
        self.disk_bytes.div_ceil(self.granularity_bytes())
    }

    /// Clusters that the bitmap data takes at most: entries of the bitmap table.
    pub fn piece_count(&self) -> u64 {
        self.bits().div_ceil(self.bits_per_piece())
    }

    fn bits_per_piece(&self) -> u64 {
        self.piece_bytes as u64 * 8
    }

    /// Bits of a piece that stand for bytes of the disk.
    fn bits_of_piece(&self, piece: u64) -> u64 {
        self.bits().saturating_sub(piece * self.bits_per_piece()).min(self.bits_per_piece())
    }

    /// The bits that a range of bytes touches, as far as it lies in the disk.
    fn touched(&self, offset: u64, len: u64) -> Range<u64> {
        let end = offset.saturating_add(len).min(self.disk_bytes);
        if offset >= end {
            return 0..0;
        }
        offset >> self.granularity_bits..((end - 1) >> self.granularity_bits) + 1
    }

    /// The touched bits, piece by piece: number of the piece, bits within it.
    fn touched_pieces(&self, offset: u64, len: u64) -> impl Iterator<Item = (u64, Range<u64>)> + use<> {
        let (bits, per_piece) = (self.touched(offset, len), self.bits_per_piece());
        let pieces = match bits.is_empty() {
            true => 0..0,
            false => bits.start / per_piece..(bits.end - 1) / per_piece + 1,
        };
        pieces.map(move |piece| {
            let first = piece * per_piece;
            (piece, bits.start.max(first) - first..bits.end.min(first + per_piece) - first)
        })
    }

    /// The content of a piece.
    pub fn piece(&self, piece: u64) -> BitsPiece<'_> {
        match self.pieces.get(&piece) {
            None => BitsPiece::Zeroes,
            Some(Stored::Ones) => BitsPiece::Ones,
            Some(Stored::Bytes(bytes)) => BitsPiece::Bytes(bytes),
        }
    }

    /// A piece as bytes.
    pub fn piece_bytes(&self, piece: u64) -> Box<[u8]> {
        let mut bytes = vec![0; self.piece_bytes];
        match self.piece(piece) {
            BitsPiece::Zeroes => {}
            BitsPiece::Ones => set(&mut bytes, 0..self.bits_of_piece(piece)),
            BitsPiece::Bytes(stored) => bytes.copy_from_slice(stored),
        }
        bytes.into()
    }

    /// The pieces that hold set bits, in order.
    pub fn used_pieces(&self) -> impl Iterator<Item = u64> + '_ {
        self.pieces.keys().copied()
    }

    /// Takes a piece as it is stored. Bits behind the end of the disk are dropped; so is a piece behind it.
    pub fn put_piece(&mut self, piece: u64, mut bytes: Box<[u8]>) {
        let bits = self.bits_of_piece(piece);
        if bits == 0 || bytes.len() != self.piece_bytes {
            return;
        }
        unset(&mut bytes, bits..self.bits_per_piece());
        let stored = match bytes.iter().all(|byte| *byte == 0) {
            true => None,
            false if bits == self.bits_per_piece() && bytes.iter().all(|byte| *byte == 0xff) => Some(Stored::Ones),
            false => Some(Stored::Bytes(bytes)),
        };
        match stored {
            Some(stored) => drop(self.pieces.insert(piece, stored)),
            None => drop(self.pieces.remove(&piece)),
        }
    }

    /// Sets every bit of a piece that stands for bytes of the disk.
    pub fn fill_piece(&mut self, piece: u64) {
        let mut bytes = vec![0; self.piece_bytes];
        set(&mut bytes, 0..self.bits_of_piece(piece));
        self.put_piece(piece, bytes.into());
    }

    /// True when every bit that the range touches is set.
    pub fn covers(&self, offset: u64, len: u64) -> bool {
        self.touched_pieces(offset, len).all(|(piece, bits)| match self.piece(piece) {
            BitsPiece::Zeroes => false,
            BitsPiece::Ones => true,
            BitsPiece::Bytes(bytes) => first(bytes, bits, false).is_none(),
        })
    }

    /// The pieces that setting the range would change, as they would be.
    pub fn with_range(&self, offset: u64, len: u64) -> Vec<(u64, Box<[u8]>)> {
        let mut changed = Vec::new();
        for (piece, bits) in self.touched_pieces(offset, len) {
            let is_set = match self.piece(piece) {
                BitsPiece::Zeroes => false,
                BitsPiece::Ones => true,
                BitsPiece::Bytes(bytes) => first(bytes, bits.clone(), false).is_none(),
            };
            if !is_set {
                let mut bytes = self.piece_bytes(piece);
                set(&mut bytes, bits);
                changed.push((piece, bytes));
            }
        }
        changed
    }

    /// Sets every bit that the range touches.
    pub fn mark(&mut self, offset: u64, len: u64) {
        for (piece, bytes) in self.with_range(offset, len) {
            self.put_piece(piece, bytes);
        }
    }

    /// Clears all bits.
    pub fn clear(&mut self) {
        self.pieces.clear();
    }

    /// The run of equal bits at `offset`: its end in bytes, at most `end`, and whether it is dirty.
    pub fn run_at(&self, offset: u64, end: u64) -> (u64, bool) {
        let end = end.min(self.disk_bytes);
        let (mut at, last) = (offset >> self.granularity_bits, end.div_ceil(self.granularity_bytes()));
        let dirty = self.covers(offset, 1);
        while at < last {
            let piece = at / self.bits_per_piece();
            let base = piece * self.bits_per_piece();
            let bits = at - base..(last - base).min(self.bits_per_piece());
            let found = match self.piece(piece) {
                BitsPiece::Zeroes if dirty => Some(bits.start),
                BitsPiece::Ones if !dirty => Some(bits.start),
                BitsPiece::Bytes(bytes) => first(bytes, bits.clone(), !dirty),
                _ => None,
            };
            if let Some(found) = found {
                return (((base + found) << self.granularity_bits).min(end), dirty);
            }
            at = base + bits.end;
        }
        (end, dirty)
    }

    /// The dirty ranges in bytes, in order, the last one cut at the end of the disk.
    pub fn dirty_ranges(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        let mut at = 0;
        std::iter::from_fn(move || {
            while at < self.disk_bytes {
                let (end, dirty) = self.run_at(at, self.disk_bytes);
                let start = std::mem::replace(&mut at, end);
                if dirty {
                    return Some(start..end);
                }
            }
            None
        })
    }

    /// Number of bits that are set.
    pub fn count(&self) -> u64 {
        let ones = |bytes: &[u8]| bytes.iter().map(|byte| u64::from(byte.count_ones())).sum::<u64>();
        let pieces = self.pieces.iter().map(|(piece, stored)| match stored {
            Stored::Ones => self.bits_of_piece(*piece),
            Stored::Bytes(bytes) => ones(bytes),
        });
        pieces.sum()
    }

    /// Memory that the bits take, in bytes.
    pub fn memory_bytes(&self) -> u64 {
        self.pieces.values().map(|stored| if let Stored::Bytes(bytes) = stored { bytes.len() as u64 } else { 0 }).sum()
    }

    /// Makes the dirty bytes of `other` dirty here too; its granularity may differ. The disks must be equally large.
    pub fn merge(&mut self, other: &DirtyBits) -> Result<()> {
        if self.disk_bytes != other.disk_bytes {
            let message = format!(
                "Bitmaps are of different sizes (destination size is {}, source size is {}) and can't be merged",
                self.disk_bytes, other.disk_bytes
            );
            return Err(Error::new(ErrorKind::InvalidArgument, message));
        }
        for range in other.dirty_ranges() {
            self.mark(range.start, range.end - range.start);
        }
        Ok(())
    }

    /// Changes the size of the disk: new bytes are clean, cut-off ones are forgotten.
    pub fn resize(&mut self, disk_bytes: u64) {
        self.disk_bytes = disk_bytes;
        for (piece, stored) in std::mem::take(&mut self.pieces) {
            match stored {
                Stored::Ones if self.bits_of_piece(piece) == self.bits_per_piece() => {
                    self.pieces.insert(piece, Stored::Ones);
                }
                Stored::Ones => self.put_piece(piece, vec![0xff; self.piece_bytes].into()),
                Stored::Bytes(bytes) => self.put_piece(piece, bytes),
            }
        }
    }
}

/// Changes bits: whole bytes at once.
fn change(bytes: &mut [u8], bits: Range<u64>, to: bool) {
    if bits.is_empty() {
        return;
    }
    let (from, last) = ((bits.start / 8) as usize, ((bits.end - 1) / 8) as usize);
    let (head, tail) = (0xffu8 << (bits.start % 8), 0xffu8 >> (7 - (bits.end - 1) % 8));
    let mut masked = |at: usize, mask: u8| if to { bytes[at] |= mask } else { bytes[at] &= !mask };
    if from == last {
        masked(from, head & tail);
        return;
    }
    masked(from, head);
    masked(last, tail);
    bytes[from + 1..last].fill(if to { 0xff } else { 0 });
}

fn set(bytes: &mut [u8], bits: Range<u64>) {
    change(bytes, bits, true);
}

fn unset(bytes: &mut [u8], bits: Range<u64>) {
    change(bytes, bits, false);
}

/// The first bit in the range that is `wanted`.
fn first(bytes: &[u8], bits: Range<u64>, wanted: bool) -> Option<u64> {
    let mut at = bits.start;
    while at < bits.end {
        let byte = if wanted { bytes[(at / 8) as usize] } else { !bytes[(at / 8) as usize] };
        let rest = byte >> (at % 8);
        if rest != 0 {
            let found = at + u64::from(rest.trailing_zeros());
            return (found < bits.end).then_some(found);
        }
        at = (at / 8 + 1) * 8;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn dirty_granules(bits: &DirtyBits) -> BTreeSet<u64> {
        let granularity = bits.granularity_bytes();
        bits.dirty_ranges().flat_map(|range| range.start / granularity..range.end.div_ceil(granularity)).collect()
    }

    proptest! {
        #[test]
        fn agrees_with_a_set_of_granules(
            disk_sectors in 1u64..if cfg!(miri) { 200 } else { 20_000 },
            granularity_bits in 9u32..13,
            steps in proptest::collection::vec((0u8..6, 0u64..10_500_000, 0u64..400_000), 1..40),
        ) {
            let disk = disk_sectors * 512;
            let mut bits = DirtyBits::new(disk, granularity_bits, 9);
            let mut model = BTreeSet::new();
            let granularity = 1u64 << granularity_bits;
            for (what, offset, len) in steps {
                let end = (offset + len).min(disk);
                match what {
                    0..=2 => {
                        bits.mark(offset, len);
                        model.extend(if offset < end { offset / granularity..end.div_ceil(granularity) } else { 0..0 });
                    }
                    3 => {
                        let pieces: Vec<u64> = bits.used_pieces().collect();
                        let mut again = DirtyBits::new(disk, granularity_bits, 9);
                        for piece in pieces {
                            again.put_piece(piece, bits.piece_bytes(piece));
                        }
                        prop_assert_eq!(&again, &bits);
                    }
                    4 => {
                        let mut coarse = DirtyBits::new(disk, granularity_bits + 2, 9);
                        coarse.merge(&bits).unwrap();
                        let wanted: BTreeSet<u64> = model.iter().map(|granule| granule / 4).collect();
                        prop_assert_eq!(dirty_granules(&coarse), wanted);
                    }
                    _ => {
                        let (mut smaller, mut back) = (bits.clone(), bits.clone());
                        smaller.resize(offset.clamp(512, disk));
                        let left = smaller.disk_bytes().div_ceil(granularity);
                        let wanted: BTreeSet<u64> = model.iter().copied().filter(|granule| *granule < left).collect();
                        prop_assert_eq!(dirty_granules(&smaller), wanted);
                        back.resize(disk * 3);
                        prop_assert_eq!(dirty_granules(&back), model.clone());
                    }
                }
                prop_assert_eq!(dirty_granules(&bits), model.clone());
                prop_assert_eq!(bits.count(), model.len() as u64);
                let touched = if offset < end { offset / granularity..end.div_ceil(granularity) } else { 0..0 };
                prop_assert_eq!(bits.covers(offset, len), touched.clone().all(|granule| model.contains(&granule)));
            }
        }
    }

    #[test]
    fn a_huge_disk_costs_what_is_dirty() {
        let mut bits = DirtyBits::new(1 << 60, 9, 16);
        bits.mark((1 << 59) + 5, 1);
        assert_eq!((bits.count(), bits.memory_bytes()), (1, 65536));
        assert_eq!(bits.run_at(1 << 59, u64::MAX), ((1 << 59) + 512, true));
        let whole = DirtyBits::new(1 << 40, 63, 21);
        assert_eq!((whole.bits(), whole.piece_count()), (1, 1));
    }

    #[test]
    fn bits_behind_the_disk_are_dropped() {
        let mut bits = DirtyBits::new(3 * 512, 9, 9);
        bits.put_piece(0, vec![0xff; 512].into());
        assert_eq!(bits.count(), 3);
        assert_eq!(bits.piece_bytes(0)[0], 7);
        bits.put_piece(1, vec![0xff; 512].into());
        assert_eq!(bits.piece(1), BitsPiece::Zeroes);
    }
}
