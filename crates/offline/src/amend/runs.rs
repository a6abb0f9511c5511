// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A set of numbers, kept as runs.

use std::collections::BTreeMap;
use std::ops::Range;

/// Numbers of which most come with their neighbours.
#[derive(Clone, Debug, Default)]
pub(super) struct Runs(BTreeMap<u64, u64>);

impl Runs {
    pub fn insert(&mut self, number: u64) {
        let before = self.0.range_mut(..=number).next_back();
        let start = match before {
            Some((_, end)) if number < *end => return,
            Some((start, end)) if *end == number => {
                *end += 1;
                *start
            }
            _ => {
                self.0.insert(number, number + 1);
                number
            }
        };
        if let Some(end) = self.0.remove(&(number + 1)) {
            self.0.insert(start, end);
        }
    }

    /// The parts of `range` that are in the set.
    pub fn within(&self, range: Range<u64>) -> impl Iterator<Item = Range<u64>> + '_ {
        let first = self.0.range(..=range.start).next_back().map_or(range.start, |(start, _)| *start);
        self.0
            .range(first..range.end)
            .map(move |(start, end)| (*start).max(range.start)..(*end).min(range.end))
            .filter(|run| !run.is_empty())
    }

    pub fn contains(&self, number: u64) -> bool {
        self.within(number..number + 1).next().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::Runs;

    #[test]
    fn neighbours_are_one_run() {
        let mut runs = Runs::default();
        for number in [5, 7, 6, 6, 9, 1, 8] {
            runs.insert(number);
        }
        assert_eq!(runs.within(0..100).collect::<Vec<_>>(), [1..2, 5..10]);
        assert!(runs.within(6..8).eq(std::iter::once(6..8)));
        assert_eq!(runs.within(2..5).count(), 0);
        assert!(runs.contains(9) && !runs.contains(10) && !runs.contains(0));
    }
}
