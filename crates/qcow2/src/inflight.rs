// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Guest clusters whose mapping is being changed by a request that does I/O: others wait for it.

use std::collections::BTreeMap;
use std::ops::Range;

/// Locked ranges of guest clusters, never overlapping.
#[derive(Default)]
pub(crate) struct Inflight {
    ranges: BTreeMap<u64, u64>,
}

impl Inflight {
    /// First locked cluster in `clusters`.
    pub(crate) fn first_in(&self, clusters: Range<u64>) -> Option<u64> {
        if let Some((_, end)) = self.ranges.range(..=clusters.start).next_back()
            && *end > clusters.start
        {
            return Some(clusters.start);
        }
        self.ranges.range(clusters).next().map(|(start, _)| *start)
    }

    /// True when nothing is locked.
    pub(crate) fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Locks clusters that are free.
    pub(crate) fn lock(&mut self, clusters: Range<u64>) {
        debug_assert!(self.first_in(clusters.clone()).is_none());
        self.ranges.insert(clusters.start, clusters.end);
    }

    /// Unlocks exactly what was locked.
    pub(crate) fn unlock(&mut self, clusters: &Range<u64>) {
        let end = self.ranges.remove(&clusters.start);
        debug_assert_eq!(end, Some(clusters.end));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_first_locked_cluster() {
        let mut inflight = Inflight::default();
        inflight.lock(10..12);
        inflight.lock(20..21);
        assert_eq!(inflight.first_in(0..10), None);
        assert_eq!(inflight.first_in(0..11), Some(10));
        assert_eq!(inflight.first_in(11..30), Some(11));
        assert_eq!(inflight.first_in(12..30), Some(20));
        inflight.unlock(&(10..12));
        assert_eq!(inflight.first_in(0..20), None);
    }
}
