// SPDX-License-Identifier: Apache-2.0 OR MIT
//! State that many threads change, spread so that they don't share cache lines.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

#[derive(Debug)]
#[repr(align(64))]
struct Shard<T>(T);

/// `SHARDS` times the same, on cache lines apart. Each thread has one of them; with more threads than shards, threads share one.
#[derive(Debug)]
pub struct Sharded<T, const SHARDS: usize>([Shard<T>; SHARDS]);

impl<T: Default, const SHARDS: usize> Default for Sharded<T, SHARDS> {
    fn default() -> Self {
        Sharded::of(T::default)
    }
}

/// The number of this thread: they are counted as they come.
#[inline]
fn number_of_thread() -> usize {
    const NONE: usize = usize::MAX;
    thread_local! {
        static NUMBER: Cell<usize> = const { Cell::new(NONE) };
    }
    #[cold]
    fn choose() -> usize {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed) & (NONE >> 1);
        NUMBER.set(number);
        number
    }
    match NUMBER.get() {
        NONE => choose(),
        number => number,
    }
}

impl<T, const SHARDS: usize> Sharded<T, SHARDS> {
    /// Shards that `make` makes, one after the other.
    pub fn of(make: impl Fn() -> T) -> Self {
        Sharded(std::array::from_fn(|_| Shard(make())))
    }

    /// The shard of this thread. Another thread may have the same one.
    #[inline]
    pub fn mine(&self) -> &T {
        &self.0[number_of_thread() % SHARDS].0
    }

    /// All shards.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.0.iter().map(|shard| &shard.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;

    #[test]
    fn every_thread_keeps_its_shard() {
        let sharded = Sharded::<AtomicU64, 4>::default();
        std::thread::scope(|scope| {
            for _ in 0..9 {
                scope.spawn(|| {
                    let mine: *const AtomicU64 = sharded.mine();
                    for _ in 0..1000 {
                        assert!(std::ptr::eq(mine, sharded.mine()));
                        sharded.mine().fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        });
        assert_eq!(sharded.iter().map(|shard| shard.load(Ordering::Relaxed)).sum::<u64>(), 9000);
        assert_eq!(sharded.iter().count(), 4);
    }

    #[test]
    fn shards_lie_on_cache_lines_apart() {
        let sharded = Sharded::<u64, 3>::of(|| 7);
        let places: Vec<usize> = sharded.iter().map(|shard| std::ptr::from_ref(shard).addr()).collect();
        assert!(places.windows(2).all(|pair| pair[1] - pair[0] == 64), "{places:?}");
    }
}
