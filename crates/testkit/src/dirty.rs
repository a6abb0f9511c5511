// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The contents that a dirty bitmap must have: a plain set of granules.

use std::collections::BTreeSet;

/// One bitmap.
#[derive(Clone, Debug)]
pub struct DirtyModel {
    /// Bytes that one bit stands for.
    pub granularity: u64,
    /// Writes are recorded.
    pub enabled: bool,
    /// The numbers of the granules that are dirty.
    pub dirty: BTreeSet<u64>,
}

impl DirtyModel {
    /// Nothing is dirty.
    pub fn new(granularity: u64, enabled: bool) -> Self {
        DirtyModel { granularity, enabled, dirty: BTreeSet::new() }
    }

    /// Whatever has a byte of `len` from `start` on is dirty.
    pub fn mark(&mut self, start: u64, len: u64) {
        self.dirty.extend(start / self.granularity..(start + len).div_ceil(self.granularity));
    }

    /// The dirty ranges of a disk of `size` bytes: start and end in bytes, neighbours joined.
    pub fn ranges(&self, size: u64) -> Vec<(u64, u64)> {
        let mut ranges: Vec<(u64, u64)> = Vec::new();
        for granule in &self.dirty {
            let (start, end) = (granule * self.granularity, ((granule + 1) * self.granularity).min(size));
            match ranges.last_mut() {
                Some(last) if last.1 == start => last.1 = end,
                _ => ranges.push((start, end)),
            }
        }
        ranges
    }
}
