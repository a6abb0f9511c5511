// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The epochs of write-back, and freed clusters on their way through them.

use cowshed_types::slip;
use std::collections::{BTreeMap, VecDeque};

/// One lost reference to a host cluster.
struct Freed {
    cluster: u64,
    /// The write-back epoch that makes the unmapping durable.
    cycle: u64,
    /// The request epoch in which it was still mapped.
    tag: u64,
}

/// The references that may be reclaimed at some moment.
pub(crate) struct Reclaimable {
    /// The number of lost references by host cluster.
    pub(crate) lost: BTreeMap<u64, u64>,
    /// The last epochs whose references are among them.
    cycle: u64,
    tag: u64,
}

/// The epoch that collects edits, the cycle that writes one, and what waits for its end.
pub(crate) struct Epochs {
    /// Number of the epoch that collects edits now; counts up from 1.
    open: u64,
    /// Number of the last epoch whose stages are all durable.
    durable: u64,
    /// A cycle is between its begin and its end.
    runs: bool,
    /// It writes something.
    writes: bool,
    /// The dirty bit must be set in the header by the next cycle.
    wants_dirty_bit: bool,
    freed: VecDeque<Freed>,
    /// The number of them that the open epoch has added.
    freed_in_open: u64,
    /// References that were taken to be reclaimed and are still counted, by host cluster.
    reclaiming: BTreeMap<u64, u64>,
}

impl Epochs {
    pub(crate) fn new() -> Epochs {
        Epochs {
            open: 1,
            durable: 0,
            runs: false,
            writes: false,
            wants_dirty_bit: false,
            freed: VecDeque::new(),
            freed_in_open: 0,
            reclaiming: BTreeMap::new(),
        }
    }

    /// Closes the epoch, which a cycle writes now, and returns its number.
    pub(crate) fn begin_cycle(&mut self) -> u64 {
        assert!(!self.runs, "two write-back cycles at once");
        self.runs = true;
        self.freed_in_open = 0;
        self.open += 1;
        self.open - 1
    }

    /// Whether the cycle that has begun writes anything.
    pub(crate) fn note_writes(&mut self, writes: bool) {
        self.writes = writes;
    }

    /// True while a cycle writes something.
    pub(crate) fn is_writing(&self) -> bool {
        self.writes
    }

    /// Ends the cycle of an epoch. `set_dirty_bit`: it was to set the dirty bit, which a failed one may not have done.
    pub(crate) fn end_cycle(&mut self, number: u64, is_durable: bool, set_dirty_bit: bool) {
        (self.runs, self.writes) = (false, false);
        if is_durable {
            self.durable = number;
        } else {
            self.wants_dirty_bit |= set_dirty_bit;
        }
    }

    /// True when no cycle runs and no freed cluster waits.
    pub(crate) fn is_at_rest(&self) -> bool {
        !self.runs && self.freed.is_empty()
    }

    /// Asks the next cycle to set the dirty bit.
    pub(crate) fn want_dirty_bit(&mut self) {
        self.wants_dirty_bit = true;
    }

    pub(crate) fn wants_dirty_bit(&self) -> bool {
        self.wants_dirty_bit
    }

    /// As [`Epochs::wants_dirty_bit`], for the cycle that does it.
    pub(crate) fn take_dirty_bit(&mut self) -> bool {
        std::mem::take(&mut self.wants_dirty_bit)
    }

    /// Notes a lost reference that was still mapped in request epoch `tag`. The edit is part of the open epoch.
    pub(crate) fn free(&mut self, cluster: u64, tag: u64) {
        let cycle = if slip!("unmapping_counts_as_durable") { 0 } else { self.open };
        self.freed.push_back(Freed { cluster, cycle, tag });
        self.freed_in_open += 1;
    }

    /// Notes a reference that never reached the disk's tables.
    pub(crate) fn give_back(&mut self, cluster: u64, tag: u64) {
        self.freed.push_back(Freed { cluster, cycle: 0, tag });
    }

    /// Number of references that the open epoch has lost.
    pub(crate) fn freed_in_open(&self) -> u64 {
        self.freed_in_open
    }

    /// Number of lost references that wait.
    pub(crate) fn waiting(&self) -> u64 {
        self.freed.len() as u64
    }

    /// Number of those that a table on the disk may have named.
    pub(crate) fn waiting_unmapped(&self) -> u64 {
        self.freed.iter().filter(|freed| freed.cycle > 0).count() as u64
    }

    /// True where the end of a cycle would let more of them go.
    pub(crate) fn wait_for_a_cycle(&self) -> bool {
        self.freed.iter().any(|freed| freed.cycle > self.durable)
    }

    /// The references whose unmapping is durable and that no request uses, as `is_drained` says of request epochs. `None`
    /// where there is none.
    pub(crate) fn reclaimable(&self, is_drained: impl Fn(u64) -> bool) -> Option<Reclaimable> {
        let durable = self.durable + if slip!("reuse_before_unmapping_is_durable") { 9 } else { 0 };
        let mut lost: BTreeMap<u64, u64> = BTreeMap::new();
        let mut drained: Option<u64> = None;
        for freed in self.freed.iter().filter(|freed| freed.cycle <= durable) {
            // Tags only rise along the queue, so the newest drained one speaks for the older ones.
            if drained.is_none_or(|known| freed.tag > known) {
                if !slip!("reuse_under_running_requests") && !is_drained(freed.tag) {
                    break;
                }
                drained = Some(freed.tag);
            }
            *lost.entry(freed.cluster).or_default() += 1;
        }
        drained.map(|tag| Reclaimable { lost, cycle: durable, tag })
    }

    /// Takes `by` references to a cluster out to be reclaimed, and returns the number of those that are on their way.
    pub(crate) fn begin_reclaim(&mut self, cluster: u64, by: u64) -> u64 {
        let taken = self.reclaiming.entry(cluster).or_default();
        *taken = if slip!("two_last_parts_without_a_hole") { by } else { *taken + by };
        *taken
    }

    /// Those of `reclaimable` wait no more whose cluster was taken.
    pub(crate) fn forget(&mut self, reclaimable: &Reclaimable, is_taken: impl Fn(u64) -> bool) {
        let Reclaimable { cycle, tag, .. } = reclaimable;
        self.freed.retain(|freed| !(freed.cycle <= *cycle && freed.tag <= *tag && is_taken(freed.cluster)));
    }

    /// The count of a cluster was lowered by `by` references that were taken out.
    pub(crate) fn end_reclaim(&mut self, cluster: u64, by: u64) {
        if let Some(taken) = self.reclaiming.get_mut(&cluster) {
            *taken = taken.saturating_sub(by);
            if *taken == 0 {
                self.reclaiming.remove(&cluster);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reference_waits_for_its_cycle_and_its_requests() {
        let mut epochs = Epochs::new();
        epochs.free(7, 40);
        epochs.give_back(8, 41);
        assert_eq!((epochs.freed_in_open(), epochs.waiting()), (1, 2));
        let lost = |epochs: &Epochs, drained: u64| {
            epochs.reclaimable(|tag| tag <= drained).map(|reclaimable| reclaimable.lost.into_iter().collect::<Vec<_>>())
        };
        assert_eq!(lost(&epochs, 41), Some(vec![(8, 1)]), "no table on the disk names it");
        let number = epochs.begin_cycle();
        assert_eq!(epochs.freed_in_open(), 0);
        epochs.end_cycle(number, false, true);
        assert!(epochs.take_dirty_bit() && !epochs.wants_dirty_bit());
        assert_eq!(lost(&epochs, 41), Some(vec![(8, 1)]), "a failed cycle makes nothing durable");
        let number = epochs.begin_cycle();
        epochs.free(7, 42);
        epochs.end_cycle(number, true, true);
        assert!(!epochs.wants_dirty_bit());
        assert_eq!(lost(&epochs, 39), None);
        assert_eq!(lost(&epochs, 42), Some(vec![(7, 1), (8, 1)]), "the last one is of the open epoch");
        let reclaimable = epochs.reclaimable(|_| true).unwrap();
        assert_eq!(epochs.begin_reclaim(7, 1), 1);
        epochs.forget(&reclaimable, |cluster| cluster == 7);
        assert_eq!((epochs.waiting(), epochs.begin_reclaim(7, 2)), (2, 3));
        epochs.end_reclaim(7, 3);
        assert_eq!(epochs.begin_reclaim(7, 1), 1);
        assert!(!epochs.is_at_rest());
    }
}
