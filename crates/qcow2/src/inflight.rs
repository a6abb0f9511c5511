// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Guest clusters whose mapping is being changed by a request that does I/O: others wait for it.

use std::ops::Range;

/// Locked ranges of guest clusters, never overlapping, in order. There are as many as requests in flight, a few as a rule.
#[derive(Default)]
pub(crate) struct Inflight {
    ranges: Vec<Range<u64>>,
}

impl Inflight {
    /// Index of the first range that ends behind `cluster`.
    fn index_of(&self, cluster: u64) -> usize {
        self.ranges.partition_point(|range| range.end <= cluster)
    }

    /// First locked cluster in `clusters`.
    pub(crate) fn first_in(&self, clusters: Range<u64>) -> Option<u64> {
        let next = self.ranges.get(self.index_of(clusters.start))?;
        (next.start < clusters.end).then(|| next.start.max(clusters.start))
    }

    /// True when nothing is locked.
    pub(crate) fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Locks clusters that are free.
    pub(crate) fn lock(&mut self, clusters: Range<u64>) {
        debug_assert!(self.first_in(clusters.clone()).is_none());
        self.ranges.insert(self.index_of(clusters.start), clusters);
    }

    /// Unlocks exactly the locked clusters.
    pub(crate) fn unlock(&mut self, clusters: &Range<u64>) {
        let index = self.index_of(clusters.start);
        let is_locked = self.ranges.get(index) == Some(clusters);
        debug_assert!(is_locked, "{clusters:?} is not locked");
        if is_locked {
            self.ranges.remove(index);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_first_locked_cluster() {
        let mut inflight = Inflight::default();
        inflight.lock(20..21);
        inflight.lock(10..12);
        assert_eq!(inflight.first_in(0..10), None);
        assert_eq!(inflight.first_in(0..11), Some(10));
        assert_eq!(inflight.first_in(11..30), Some(11));
        assert_eq!(inflight.first_in(12..30), Some(20));
        assert_eq!(inflight.first_in(21..30), None);
        inflight.unlock(&(10..12));
        assert_eq!(inflight.first_in(0..20), None);
        inflight.unlock(&(20..21));
        assert!(inflight.is_empty());
    }
}
