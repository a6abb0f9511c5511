// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Epochs of running requests, which may still use a mapping that has just been taken away.
//!
//! A request pins the current epoch before it looks at the mapping and unpins when its I/O has completed. Taking a
//! mapping away tags its host range with the current epoch, and then starts a new one. The range may be used for
//! something else only when no pin of the tagged epoch or an older one is left. Pinning takes no lock.

use crate::interleaving;
use cowshed_types::{CountGuard, Sharded};
use std::sync::atomic::{AtomicU64, Ordering};

/// Epochs that can have pins at the same time.
const LIVE_EPOCHS: usize = 4;
/// More than for other counters: every read changes a pin twice.
const SHARDS: usize = 16;

#[derive(Default)]
struct Shard {
    pins: [AtomicU64; LIVE_EPOCHS],
    hits: AtomicU64,
}

/// The epoch counter and the pins per epoch.
pub(crate) struct Pins {
    epoch: AtomicU64,
    shards: Sharded<Shard, SHARDS>,
}

/// Proof that a request planned in some epoch is still running; see [`crate::Engine::pin`]. A mapping is only good while
/// its pin lives.
pub type EpochGuard<'a> = CountGuard<'a>;

impl Pins {
    pub(crate) fn new() -> Self {
        // Starts high enough that `epoch - LIVE_EPOCHS` never underflows.
        Pins { epoch: AtomicU64::new(LIVE_EPOCHS as u64), shards: Sharded::default() }
    }

    /// Pins the current epoch.
    pub(crate) fn pin(&self) -> EpochGuard<'_> {
        let shard = &self.shards.mine().pins;
        loop {
            let epoch = self.epoch.load(Ordering::SeqCst);
            let counter = &shard[epoch as usize % LIVE_EPOCHS];
            interleaving::point();
            counter.fetch_add(1, Ordering::SeqCst);
            interleaving::point();
            if self.epoch.load(Ordering::SeqCst) == epoch {
                return CountGuard::of(counter);
            }
            counter.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Counts a look-up that found its table in memory, on the cache line that the pin has touched anyway.
    #[inline]
    pub(crate) fn count_hit(&self) {
        self.shards.mine().hits.fetch_add(1, Ordering::Relaxed);
    }

    /// The look-ups counted so far.
    pub(crate) fn hits(&self) -> u64 {
        self.shards.iter().map(|shard| shard.hits.load(Ordering::Relaxed)).sum()
    }

    fn is_slot_empty(&self, epoch: u64) -> bool {
        self.shards.iter().all(|shard| shard.pins[epoch as usize % LIVE_EPOCHS].load(Ordering::SeqCst) == 0)
    }

    /// Ends the current epoch and returns its number, the tag for the clusters unmapped just now. Only the holder of the lock calls
    /// this. When a pin from long ago still holds the next slot, the epoch goes on: the tag is right all the same.
    pub(crate) fn advance(&self) -> u64 {
        let epoch = self.epoch.load(Ordering::SeqCst);
        self.try_advance();
        epoch
    }

    fn try_advance(&self) {
        let epoch = self.epoch.load(Ordering::SeqCst);
        if self.is_slot_empty(epoch + 1) {
            interleaving::point();
            self.epoch.store(epoch + 1, Ordering::SeqCst);
        }
    }

    /// True when no request that pinned epoch `tag` or an older one is running. Only the holder of the lock calls this.
    pub(crate) fn is_drained(&self, tag: u64) -> bool {
        if self.epoch.load(Ordering::SeqCst) <= tag {
            self.try_advance();
        }
        let epoch = self.epoch.load(Ordering::SeqCst);
        if epoch <= tag {
            return false;
        }
        let oldest = epoch + 1 - LIVE_EPOCHS as u64;
        (oldest..=tag).all(|old| self.is_slot_empty(old))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pin_holds_its_epoch_and_older_ones_back() {
        let pins = Pins::new();
        let early = pins.pin();
        let tag = pins.advance();
        assert!(!pins.is_drained(tag));
        let late = pins.pin();
        drop(early);
        assert!(pins.is_drained(tag), "a pin of the next epoch doesn't count");
        let second = pins.advance();
        assert!(!pins.is_drained(second));
        drop(late);
        assert!(pins.is_drained(second));
    }

    #[test]
    fn a_pin_from_long_ago_never_lets_a_tag_drain() {
        let pins = Pins::new();
        let early = pins.pin();
        let tags: Vec<u64> = (0..20).map(|_| pins.advance()).collect();
        assert!(tags.iter().all(|tag| !pins.is_drained(*tag)));
        drop(early);
        assert!(tags.iter().all(|tag| pins.is_drained(*tag)));
    }

    #[test]
    fn pins_of_threads_are_all_seen() {
        let pins = Pins::new();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..if cfg!(miri) { 50 } else { 10_000 } {
                        drop(pins.pin());
                    }
                });
            }
            for _ in 0..100 {
                pins.advance();
            }
        });
        let tag = pins.advance();
        assert!(pins.is_drained(tag));
    }
}
