// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The second half of an extended L2 entry ("Extended L2 Entries").

use std::ops::Range;

/// Subclusters of a cluster with extended L2 entries.
pub const SUBCLUSTERS_PER_CLUSTER: u32 = 32;

/// The source of a subcluster's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Subcluster {
    /// Neither bit: from the backing file, or zeroes without one.
    Unallocated,
    /// The allocation bit: from the host cluster.
    Data,
    /// The zero bit: zeroes.
    Zero,
    /// Both bits, which the format forbids.
    Invalid,
}

/// 32 allocation bits (low half) and 32 reads-as-zero bits (high half); bit x and bit 32 + x belong to subcluster x.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct SubclusterBitmap(pub u64);

impl SubclusterBitmap {
    /// Every subcluster unallocated.
    pub const UNALLOCATED: Self = Self(0);
    /// Every subcluster allocated.
    pub const ALL_DATA: Self = Self(0x0000_0000_ffff_ffff);
    /// Every subcluster reads as zeroes.
    pub const ALL_ZERO: Self = Self(0xffff_ffff_0000_0000);

    /// The allocation bits.
    #[inline]
    pub const fn data_mask(self) -> u32 {
        self.0 as u32
    }

    /// The reads-as-zero bits.
    #[inline]
    pub const fn zero_mask(self) -> u32 {
        (self.0 >> 32) as u32
    }

    /// The bitmap of the two masks.
    #[inline]
    pub const fn from_masks(data: u32, zero: u32) -> Self {
        Self((zero as u64) << 32 | data as u64)
    }

    /// Subclusters with both bits set, which the format forbids.
    #[inline]
    pub const fn invalid_mask(self) -> u32 {
        self.data_mask() & self.zero_mask()
    }

    /// True when no subcluster has both bits set.
    #[inline]
    pub const fn is_valid(self) -> bool {
        self.invalid_mask() == 0
    }

    /// The state of subcluster `index`, 0–31.
    #[inline]
    pub const fn get(self, index: u32) -> Subcluster {
        match (self.data_mask() >> index & 1, self.zero_mask() >> index & 1) {
            (0, 0) => Subcluster::Unallocated,
            (1, 0) => Subcluster::Data,
            (0, _) => Subcluster::Zero,
            (_, _) => Subcluster::Invalid,
        }
    }

    /// The state of subcluster `index` (0–31) and the number of subclusters from there on that share it, at least 1.
    #[inline]
    pub const fn run(self, index: u32) -> (Subcluster, u32) {
        let state = self.get(index);
        // Flip both halves so that bits equal to the state's are 0, then count up to the first difference.
        let (data, zero) = match state {
            Subcluster::Unallocated => (self.data_mask(), self.zero_mask()),
            Subcluster::Data => (!self.data_mask(), self.zero_mask()),
            Subcluster::Zero => (self.data_mask(), !self.zero_mask()),
            Subcluster::Invalid => (!self.data_mask(), !self.zero_mask()),
        };
        let same = ((data | zero) >> index).trailing_zeros();
        let left = SUBCLUSTERS_PER_CLUSTER - index;
        (state, if same < left { same } else { left })
    }

    /// The bits of subclusters `range`; an end above 32 counts as 32.
    #[inline]
    pub const fn mask(range: Range<u32>) -> u32 {
        if range.start >= range.end || range.start >= 32 {
            return 0;
        }
        let below_end = if range.end >= 32 { u32::MAX } else { (1 << range.end) - 1 };
        below_end & (u32::MAX << range.start)
    }

    /// The bitmap with `range` allocated.
    #[inline]
    #[must_use]
    pub const fn with_data(self, range: Range<u32>) -> Self {
        let mask = Self::mask(range);
        Self::from_masks(self.data_mask() | mask, self.zero_mask() & !mask)
    }

    /// With `range` reading as zeroes.
    #[inline]
    #[must_use]
    pub const fn with_zero(self, range: Range<u32>) -> Self {
        let mask = Self::mask(range);
        Self::from_masks(self.data_mask() & !mask, self.zero_mask() | mask)
    }

    /// The bitmap with `range` unallocated.
    #[inline]
    #[must_use]
    pub const fn with_unallocated(self, range: Range<u32>) -> Self {
        let mask = Self::mask(range);
        Self::from_masks(self.data_mask() & !mask, self.zero_mask() & !mask)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn runs_cover_the_bitmap(bits: u64) {
            let bitmap = SubclusterBitmap(bits);
            let mut index = 0;
            while index < 32 {
                let (state, len) = bitmap.run(index);
                prop_assert!(len >= 1 && index + len <= 32);
                for i in index..index + len {
                    prop_assert_eq!(bitmap.get(i), state);
                }
                if index + len < 32 {
                    prop_assert_ne!(bitmap.get(index + len), state);
                }
                index += len;
            }
            prop_assert_eq!(bitmap.is_valid(), (0..32).all(|i| bitmap.get(i) != Subcluster::Invalid));
        }

        #[test]
        fn setters_touch_their_range(bits: u64, start in 0u32..34, len in 0u32..34) {
            let bitmap = SubclusterBitmap(bits);
            let range = start..start + len;
            for (after, state) in [
                (bitmap.with_data(range.clone()), Subcluster::Data),
                (bitmap.with_zero(range.clone()), Subcluster::Zero),
                (bitmap.with_unallocated(range.clone()), Subcluster::Unallocated),
            ] {
                for i in 0..32 {
                    prop_assert_eq!(after.get(i), if range.contains(&i) { state } else { bitmap.get(i) });
                }
            }
        }
    }
}
