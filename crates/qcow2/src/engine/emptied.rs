// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Clusters whose counts this opening has lowered to zero: nothing refers to them. Others without a count may be in use all
//! the same, in an image that wants repair.

use std::collections::BTreeMap;

/// Ranges that are kept. An image with more is looked through where its end is to be cut off.
const MAX_RANGES: usize = 4096;

/// Ranges of host clusters, apart from each other: where each begins and ends.
#[derive(Default)]
pub(crate) struct Emptied {
    ranges: BTreeMap<u64, u64>,
}

impl Emptied {
    /// Notes a cluster, while there is room.
    pub(crate) fn add(&mut self, cluster: u64) {
        let before = self.ranges.range(..=cluster).next_back().map(|(start, end)| (*start, *end));
        let (start, end) = match before {
            Some((_, end)) if end > cluster => return,
            Some((start, end)) if end == cluster => (start, cluster + 1),
            _ => (cluster, cluster + 1),
        };
        let end = self.ranges.remove(&end).unwrap_or(end);
        if self.ranges.len() < MAX_RANGES || start < cluster {
            self.ranges.insert(start, end);
        }
    }

    /// True where all clusters from `from` up to `to` are noted.
    pub(crate) fn covers(&self, from: u64, to: u64) -> bool {
        from >= to || self.ranges.range(..=from).next_back().is_some_and(|(_, end)| *end >= to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_become_one_range_in_any_order() {
        let mut emptied = Emptied::default();
        for cluster in [9, 5, 7, 8, 6, 7, 5, 2] {
            emptied.add(cluster);
        }
        assert_eq!(emptied.ranges, BTreeMap::from([(2, 3), (5, 10)]));
        assert!(emptied.covers(5, 10) && emptied.covers(6, 8) && emptied.covers(2, 3) && emptied.covers(4, 4));
        assert!(!emptied.covers(4, 6) && !emptied.covers(5, 11) && !emptied.covers(2, 5));
    }

    #[test]
    fn ranges_without_number_are_not_kept() {
        let mut emptied = Emptied::default();
        (0..3 * MAX_RANGES as u64).for_each(|cluster| emptied.add(2 * cluster));
        assert_eq!(emptied.ranges.len(), MAX_RANGES);
        assert!(!emptied.covers(4 * MAX_RANGES as u64, 4 * MAX_RANGES as u64 + 1));
        emptied.add(1);
        assert!(emptied.covers(0, 3));
    }
}
