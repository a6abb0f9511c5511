// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Compressed clusters as they came out of the decoder, kept for the next small read of the same cluster.
//!
//! One store of a limited size serves all images of the process, and counts in the process's [`Budget`]. Clusters go
//! first that were not used since the clock's hand last came by.
//!
//! A reader puts a cluster in while it holds the cluster's pin. The cluster is taken out before its host cluster may get
//! another owner (`flush.rs`, `reclaim`). So the store always agrees with the mapping.

use cowshed_qcow2::{Budget, BudgetedCache};
use cowshed_storage::SCRATCH_POISON;
use cowshed_types::{HostOffset, without};
use std::collections::{HashMap, VecDeque};
use std::hash::{Hash, Hasher};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// The default limit of the store in bytes.
const DEFAULT_BYTES: usize = 24 << 20;
const SHARDS: usize = 16;
/// The most memory of clusters that left the store, in bytes, which waits for the next ones.
const SPARE_BYTES: usize = 4 << 20;

/// The place of compressed data: the offset in the image file and the length by its descriptor, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ClusterKey {
    image: u64,
    host: u64,
    len: u64,
}

/// One word, because each read looks a place up. Places of one hash are those of one offset: as few as lengths and images.
impl Hash for ClusterKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.host ^ self.image << 48);
    }
}

#[derive(Debug)]
struct Kept {
    cluster: Arc<Vec<u8>>,
    referenced: bool,
    /// No reader has asked for it yet.
    is_ahead: bool,
}

#[derive(Debug, Default)]
struct Shard {
    kept: HashMap<ClusterKey, Kept>,
    clock: VecDeque<ClusterKey>,
}

/// Memory of clusters that left. One thread decompresses a cluster and another drops it, so an allocator would keep pages for
/// every thread.
#[derive(Debug, Default)]
struct Spare {
    clusters: VecDeque<Vec<u8>>,
    bytes: usize,
}

/// The store of all images.
#[derive(Debug, Default)]
struct Store {
    shards: [Mutex<Shard>; SHARDS],
    used_bytes: AtomicUsize,
    limit_bytes: OnceLock<AtomicUsize>,
    images: AtomicU64,
    /// The shard that loses clusters next.
    hand: AtomicUsize,
    spare: Mutex<Spare>,
}

fn store() -> &'static Store {
    static STORE: OnceLock<Store> = OnceLock::new();
    STORE.get_or_init(Store::default)
}

impl BudgetedCache for Store {
    fn give_up(&self, bytes: u64) -> u64 {
        let mut freed = self.drop_spare() as u64;
        if freed < bytes {
            freed += self.take_out(bytes - freed, drop);
        }
        freed
    }
}

impl Store {
    fn limit(&self) -> &AtomicUsize {
        self.limit_bytes.get_or_init(|| AtomicUsize::new(DEFAULT_BYTES))
    }

    fn shard(&self, place: &ClusterKey) -> MutexGuard<'_, Shard> {
        // Neighbours go to different shards; the low bits of an offset are nearly equal.
        let mixed = (place.host ^ place.image << 48).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.lock((mixed >> 60) as usize)
    }

    fn lock(&self, index: usize) -> MutexGuard<'_, Shard> {
        self.shards[index].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts bytes here and in the budget.
    fn change(&self, before: usize, after: usize) {
        self.used_bytes.fetch_add(after, Ordering::Relaxed);
        self.used_bytes.fetch_sub(before, Ordering::Relaxed);
        Budget::process_wide().change(before as u64, after as u64);
    }

    /// Takes about this many bytes of clusters out, and hands each to `leaves`. Returns the bytes that went.
    fn take_out(&self, bytes: u64, leaves: impl Fn(Arc<Vec<u8>>)) -> u64 {
        let mut freed = 0;
        for _ in 0..SHARDS {
            let mut shard = self.lock(self.hand.fetch_add(1, Ordering::Relaxed) % SHARDS);
            let mut steps = shard.clock.len();
            while steps > 0 && freed < bytes {
                steps -= 1;
                if let Some(cluster) = self.step(&mut shard) {
                    freed += cluster.len() as u64;
                    leaves(cluster);
                }
            }
            if freed >= bytes {
                break;
            }
        }
        freed
    }

    fn spare(&self) -> MutexGuard<'_, Spare> {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the memory of a cluster that no reader has any more.
    fn reuse(&self, cluster: Arc<Vec<u8>>) {
        let Some(memory) = Arc::into_inner(cluster) else { return };
        let mut spare = self.spare();
        let before = spare.bytes;
        spare.bytes += memory.len();
        spare.clusters.push_back(memory);
        while spare.bytes > SPARE_BYTES
            && let Some(oldest) = spare.clusters.pop_front()
        {
            spare.bytes -= oldest.len();
        }
        Budget::process_wide().change(before as u64, spare.bytes as u64);
    }

    /// Memory for a cluster of `len` bytes, with any content.
    fn memory(&self, len: usize) -> Vec<u8> {
        let mut spare = self.spare();
        let known = spare.clusters.iter().rposition(|memory| memory.len() == len);
        let Some(mut memory) = known.and_then(|index| spare.clusters.swap_remove_back(index)) else {
            return vec![0; len];
        };
        spare.bytes -= len;
        drop(spare);
        Budget::process_wide().change(len as u64, 0);
        if cfg!(debug_assertions) {
            memory.fill(SCRATCH_POISON);
        }
        memory
    }

    /// Returns the bytes that went.
    fn drop_spare(&self) -> usize {
        let Spare { bytes, .. } = std::mem::take(&mut *self.spare());
        Budget::process_wide().change(bytes as u64, 0);
        bytes
    }

    /// Drops clusters until all together take no more than the limit. The caller holds no shard.
    fn keep_limit(&self) {
        // The first round takes what was not used since the last one.
        for _ in 0..2 {
            let limit = self.limit().load(Ordering::Relaxed);
            match self.used_bytes.load(Ordering::Relaxed).saturating_sub(limit) {
                0 => return,
                over => self.take_out(over as u64, |cluster| self.reuse(cluster)),
            };
        }
    }

    /// Moves the hand of a shard over one cluster. Returns it where it goes.
    fn step(&self, shard: &mut Shard) -> Option<Arc<Vec<u8>>> {
        let place = shard.clock.pop_front()?;
        match shard.kept.get_mut(&place) {
            Some(kept) if kept.referenced => {
                kept.referenced = false;
                shard.clock.push_back(place);
                None
            }
            _ => self.remove(shard, &place),
        }
    }

    fn remove(&self, shard: &mut Shard, place: &ClusterKey) -> Option<Arc<Vec<u8>>> {
        let kept = shard.kept.remove(place)?;
        self.change(kept.cluster.len(), 0);
        Some(kept.cluster)
    }
}

/// Bytes of decompressed clusters that all images of the process keep together: now, and at most. 24 MiB unless
/// [`set_limit_bytes`] sets another limit. The process's [`Budget`] may hold them lower.
pub fn usage_bytes() -> (usize, usize) {
    (store().used_bytes.load(Ordering::Relaxed), store().limit().load(Ordering::Relaxed))
}

/// Lets the store grow to this many bytes; 0 keeps nothing. Clusters over the limit go at once.
pub fn set_limit_bytes(limit_bytes: usize) {
    store().limit().store(limit_bytes, Ordering::Relaxed);
    store().keep_limit();
    store().drop_spare();
}

/// Memory for a cluster of `len` bytes with any content, perhaps of another client: all of it is overwritten before a
/// byte leaves.
pub(super) fn memory(len: usize) -> Vec<u8> {
    store().memory(len)
}

/// Ends a reader's use of a cluster. Its memory serves another one where the store has it no more.
pub(super) fn release(cluster: Arc<Vec<u8>>) {
    store().reuse(cluster);
}

/// The clusters that one image has in the store.
#[derive(Debug)]
pub(super) struct ClusterCache {
    image: u64,
    /// Clusters in the store, about: never 0 when there are some.
    kept: AtomicUsize,
}

impl ClusterCache {
    pub(super) fn new() -> ClusterCache {
        Budget::process_wide().join_cache(store());
        ClusterCache { image: store().images.fetch_add(1, Ordering::Relaxed), kept: AtomicUsize::new(0) }
    }

    /// The cluster that is compressed at `host`, if it is here. A cluster that was put in ahead of a reader that takes
    /// all of it goes out again.
    pub(super) fn get(&self, host: u64, len: u64, whole: bool) -> Option<Arc<Vec<u8>>> {
        if self.kept.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let place = ClusterKey { image: self.image, host, len };
        let mut shard = store().shard(&place);
        let kept = shard.kept.get_mut(&place)?;
        let cluster = Arc::clone(&kept.cluster);
        if whole && kept.is_ahead {
            store().remove(&mut shard, &place);
            shard.clock.retain(|known| *known != place);
        } else {
            (kept.referenced, kept.is_ahead) = (!whole, false);
        }
        Some(cluster)
    }

    /// True when the cluster is here.
    pub(super) fn has(&self, host: u64, len: u64) -> bool {
        let place = ClusterKey { image: self.image, host, len };
        self.kept.load(Ordering::Relaxed) != 0 && store().shard(&place).kept.contains_key(&place)
    }

    /// Keeps a cluster. The caller holds the pin under which it saw the mapping.
    pub(super) fn put(&self, host: u64, len: u64, cluster: Arc<Vec<u8>>) {
        if !without!("decompressed_kept") {
            self.keep(host, len, Kept { cluster, referenced: false, is_ahead: false });
        }
    }

    /// As [`ClusterCache::put`], for a reader that is on the way.
    pub(super) fn put_ahead(&self, host: u64, len: u64, cluster: Arc<Vec<u8>>) {
        self.keep(host, len, Kept { cluster, referenced: false, is_ahead: true });
    }

    fn keep(&self, host: u64, len: u64, kept: Kept) {
        let store = store();
        let bytes = kept.cluster.len();
        if bytes > store.limit().load(Ordering::Relaxed) {
            return;
        }
        let place = ClusterKey { image: self.image, host, len };
        let mut shard = store.shard(&place);
        // Together with the cluster: see `retain`.
        self.kept.fetch_add(1, Ordering::SeqCst);
        let old = shard.kept.insert(place, kept);
        if old.is_none() {
            shard.clock.push_back(place);
        }
        store.change(old.map_or(0, |old| old.cluster.len()), bytes);
        drop(shard);
        store.keep_limit();
        Budget::process_wide().keep_limit();
    }

    /// Forgets the compressed clusters in these ranges of the image file, which are about to get new owners.
    pub(super) fn forget(&self, ranges: &[(HostOffset, u64)]) {
        if ranges.is_empty() || self.kept.load(Ordering::Relaxed) == 0 {
            return;
        }
        // The ranges are in order and don't touch.
        let is_hit = |place: &ClusterKey| {
            let next = ranges.partition_point(|(start, len)| start.0 + len <= place.host);
            ranges.get(next).is_some_and(|(start, _)| start.0 < place.host + place.len)
        };
        self.retain(|place| !is_hit(place));
    }

    /// Drops all clusters of this image.
    pub(super) fn clear(&self) {
        if self.kept.load(Ordering::Relaxed) > 0 {
            self.retain(|_| false);
        }
    }

    /// Keeps of this image's clusters only those for which `is_good` holds.
    fn retain(&self, is_good: impl Fn(&ClusterKey) -> bool) {
        // Read before the look: a thread that puts one in meanwhile changes the count.
        let seen = self.kept.load(Ordering::SeqCst);
        let mut left = 0;
        for index in 0..SHARDS {
            let mut shard = store().lock(index);
            let of_image: Vec<ClusterKey> =
                shard.kept.keys().filter(|place| place.image == self.image).copied().collect();
            for place in of_image {
                match is_good(&place) {
                    true => left += 1,
                    false => {
                        store().remove(&mut shard, &place);
                    }
                }
            }
            let Shard { kept, clock } = &mut *shard;
            clock.retain(|place| kept.contains_key(place));
        }
        if left == 0 {
            let _ = self.kept.compare_exchange(seen, 0, Ordering::SeqCst, Ordering::Relaxed);
        }
    }
}

impl Drop for ClusterCache {
    fn drop(&mut self) {
        self.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLUSTER: usize = 1 << 16;

    /// The store is one for the process, so its tests take turns.
    static TURN: Mutex<()> = Mutex::new(());

    fn cluster(byte: u8) -> Arc<Vec<u8>> {
        Arc::new(vec![byte; CLUSTER])
    }

    #[test]
    fn what_is_about_to_get_a_new_owner_is_forgotten() {
        let _turn = TURN.lock();
        let (one, two) = (ClusterCache::new(), ClusterCache::new());
        for number in 0..8u64 {
            one.put(number * 65536 + 512, 1024, cluster(number as u8));
            two.put(number * 65536 + 512, 1024, cluster(100 + number as u8));
        }
        // The last one begins in the third host cluster and ends in the fourth.
        one.put(3 * 65536 - 512, 1024, cluster(77));
        one.forget(&[(HostOffset(65536), 65536), (HostOffset(3 * 65536), 2 * 65536)]);
        let left: Vec<u64> = (0..8).filter(|number| one.get(number * 65536 + 512, 1024, false).is_some()).collect();
        assert_eq!(left, [0, 2, 5, 6, 7]);
        assert!(one.get(3 * 65536 - 512, 1024, false).is_none());
        assert_eq!(one.get(512, 1024, false).unwrap()[0], 0);
        assert!(one.get(512, 512, false).is_none(), "another length is another cluster");
        assert_eq!(two.get(65536 + 512, 1024, false).unwrap()[9], 101);
        let image = two.image;
        drop(two);
        let of_two =
            |shard: &Mutex<Shard>| shard.lock().unwrap().kept.keys().filter(|place| place.image == image).count();
        assert_eq!(store().shards.iter().map(of_two).sum::<usize>(), 0);
    }

    #[test]
    fn the_store_stays_below_its_limit() {
        let _turn = TURN.lock();
        for (cluster_bytes, count) in [(CLUSTER, 3000u64), (2 << 20, 100)] {
            let image = ClusterCache::new();
            for number in 0..count {
                image.put(number << 21, 512, Arc::new(vec![number as u8; cluster_bytes]));
                let (used, limit) = usage_bytes();
                assert!(used <= limit && limit <= 32 << 20, "{used} of {limit}");
                assert!(Budget::process_wide().used_bytes() >= used as u64);
            }
            let is_kept =
                |number: &u64| image.get(number << 21, 512, false).is_some_and(|kept| kept[5] == *number as u8);
            let hits = (0..count).filter(is_kept).count();
            assert!(hits * cluster_bytes > 20 << 20, "most of what fits is there: {hits}");
        }
    }

    #[test]
    fn clusters_that_leave_give_their_memory() {
        let _turn = TURN.lock();
        let image = ClusterCache::new();
        let fill = |count: u64| {
            for number in 0..count {
                let mut memory = memory(CLUSTER);
                memory.fill(1);
                image.put(number << 21, 512, Arc::new(memory));
            }
        };
        fill((DEFAULT_BYTES / CLUSTER) as u64 + 8);
        let (spare, used) = (store().spare().bytes, Budget::process_wide().used_bytes());
        assert!((CLUSTER..=SPARE_BYTES).contains(&spare), "{spare}");
        let taken = memory(CLUSTER);
        assert_eq!(store().spare().bytes, spare - CLUSTER);
        assert!(Budget::process_wide().used_bytes() < used);
        assert!(!cfg!(debug_assertions) || taken.iter().all(|byte| *byte == SCRATCH_POISON));
        let held = image.get(0, 512, false);
        release(Arc::new(taken));
        assert_eq!(store().spare().bytes, spare);
        held.into_iter().for_each(release);
        assert_eq!(store().spare().bytes, spare, "a cluster in the store keeps its memory");
        assert!(store().give_up(1) >= spare as u64);
        assert_eq!(store().spare().bytes, 0);
    }

    #[test]
    fn the_budget_of_the_process_bounds_the_store() {
        let _turn = TURN.lock();
        let (image, budget) = (ClusterCache::new(), Budget::process_wide());
        let limit = budget.limit_bytes();
        (0..100).for_each(|number| image.put(number << 21, 512, cluster(1)));
        let before = usage_bytes().0;
        assert!(before >= 100 * CLUSTER, "{before}");
        budget.set_limit_bytes(1 << 20);
        assert!((1 << 19..=1 << 20).contains(&usage_bytes().0), "{:?}", usage_bytes());
        (100..200).for_each(|number| image.put(number << 21, 512, cluster(2)));
        assert!((1 << 19..=1 << 20).contains(&usage_bytes().0), "{:?}", usage_bytes());
        budget.set_limit_bytes(limit);
        drop(image);
        assert_eq!(usage_bytes().0, 0);
    }
}
