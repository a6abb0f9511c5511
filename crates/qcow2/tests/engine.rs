// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The engine alone, over an image in memory. Seeded random requests run against a byte model, with reopening. After
//! each flush every reference is counted against every refcount.

mod disk;

use cowshed_qcow2::{
    Budget, BudgetedCache, ExtentList, Stall, Tail, TailCut, ZeroMode, set_interleaving_hook, times_locked,
};
use cowshed_types::{GuestOffset, HostOffset};
use disk::{Disk, Shape};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

fn run(shape: Shape, seed: u64, operations: usize) {
    let mut disk = Disk::new(shape);
    let mut model: Vec<u8> = (0..shape.size).map(|at| disk.backing_at(at)).collect();
    let mut random = Random(seed);
    let cluster = disk.engine.geometry().cluster_size();
    let unit = disk.engine.zero_unit();
    for step in 0..operations {
        let context = format!("seed {seed}, step {step}, {shape:?}");
        let at = random.below(shape.size / 512) * 512;
        let len = ((1 + random.below(8)) * 512).max(random.below(4) * cluster).min(shape.size - at);
        match random.below(12) {
            0..=4 => {
                let byte = 1 + random.below(255) as u8;
                disk.write(at, &vec![byte; len as usize]);
                model[at as usize..(at + len) as usize].fill(byte);
            }
            mode @ 5..=7 => {
                let start = at.next_multiple_of(unit).min(shape.size / unit * unit);
                let end = (at + len + unit) / unit * unit;
                let end = end.min(shape.size / unit * unit);
                let mode = [ZeroMode::Unmap, ZeroMode::Keep, ZeroMode::Discard][mode as usize - 5];
                if start < end {
                    let before = disk.read(start, end - start);
                    let done = disk.zero(start, end - start, mode);
                    let after = disk.read(start, end - start);
                    for (index, (old, new)) in before.iter().zip(&after).enumerate() {
                        let is_old = !done || mode == ZeroMode::Discard;
                        assert!(
                            *new == 0 || (is_old && new == old),
                            "byte {} is {new}: {context}",
                            start + index as u64
                        );
                    }
                    model[start as usize..end as usize].copy_from_slice(&after);
                }
            }
            8 => {
                let first = at / cluster;
                let count = (1 + random.below(6)).min(shape.size / cluster - first.min(shape.size / cluster));
                let batch: Vec<(u64, u8, u64)> = (first..first + count)
                    .map(|number| (number * cluster, 1 + random.below(255) as u8, 1 + random.below(cluster)))
                    .collect();
                if !batch.is_empty() {
                    disk.write_compressed(&batch);
                }
                for (start, byte, _) in batch {
                    model[start as usize..(start + cluster) as usize].fill(byte);
                }
            }
            9 => disk.flush(),
            10 if random.below(4) == 0 => disk.reopen(),
            _ => assert_eq!(disk.read(at, len), model[at as usize..(at + len) as usize], "{context}"),
        }
        if random.below(10) == 0 {
            disk.flush();
            disk.check();
        }
    }
    disk.reopen();
    disk.check();
    assert_eq!(disk.read(0, shape.size), model, "seed {seed}, {shape:?}");
    assert_eq!(disk.engine.statistics().quarantined, 0);
}

#[test]
fn random_requests_match_a_byte_model() {
    let base = Shape {
        cluster_bits: 9,
        refcount_order: 4,
        extended_l2: false,
        version: 3,
        size: 300 << 10,
        backing_size: None,
        slice_bytes: 512,
        l2_cache_bytes: 4096,
        budget_bytes: u64::MAX,
    };
    let mut shapes = vec![base, Shape { version: 2, ..base }];
    for refcount_order in 0..=6 {
        shapes.push(Shape { refcount_order, ..base });
        shapes.push(Shape { refcount_order, backing_size: Some(200 << 10), cluster_bits: 12, size: 4 << 20, ..base });
    }
    shapes.push(Shape { version: 2, backing_size: Some(100_000), ..base });
    for backing_size in [None, Some(300_000), Some(3 << 20)] {
        shapes.push(Shape { extended_l2: true, cluster_bits: 14, size: 1 << 20, backing_size, ..base });
        shapes.push(Shape { cluster_bits: 16, size: 3 << 20, slice_bytes: 4096, backing_size, ..base });
    }
    for (index, shape) in shapes.into_iter().enumerate() {
        for seed in 0..3 {
            run(shape, seed * 1000 + index as u64, 300);
        }
    }
}

#[test]
fn the_refcount_table_moves_when_it_is_full() {
    let shape = Shape {
        cluster_bits: 9,
        refcount_order: 6,
        extended_l2: false,
        version: 3,
        size: 8 << 20,
        backing_size: None,
        slice_bytes: 512,
        l2_cache_bytes: 4096,
        budget_bytes: u64::MAX,
    };
    let mut disk = Disk::new(shape);
    let before = disk.config.refcount_table_clusters;
    for at in (0..shape.size).step_by(64 << 10) {
        disk.write(at, &[(at >> 16) as u8 + 1; 64 << 10]);
    }
    disk.flush();
    disk.check();
    assert!(disk.config.refcount_table_clusters > before);
    disk.reopen();
    for at in (0..shape.size).step_by(64 << 10) {
        assert_eq!(disk.read(at, 64 << 10), [(at >> 16) as u8 + 1; 64 << 10]);
    }
    run(shape, 7, 300);
}

#[test]
fn aborted_write_keeps_old_data_and_frees_clusters() {
    let shape = Shape {
        cluster_bits: 12,
        refcount_order: 4,
        extended_l2: false,
        version: 3,
        size: 1 << 20,
        backing_size: None,
        slice_bytes: 4096,
        l2_cache_bytes: 65536,
        budget_bytes: u64::MAX,
    };
    let mut disk = Disk::new(shape);
    let allocation = disk.plan(|engine| engine.begin_allocate(GuestOffset(8192), 4096, false));
    let host = allocation.host;
    assert!(
        matches!(disk.engine.begin_allocate(GuestOffset(8192), 4096, false), Err(Stall::Wait)),
        "the cluster is locked"
    );
    disk.write_host(host.0, &[7; 100]);
    disk.engine.abort(allocation, true);
    assert_eq!(disk.read(8192, 4096), vec![0; 4096]);
    disk.flush();
    disk.check();
    // The space is found again, and isn't taken for zero.
    let again = disk.plan(|engine| engine.begin_allocate(GuestOffset(0), 100, false));
    assert_eq!(again.host, HostOffset(host.0));
    assert!(!again.host_is_zero);
    disk.engine.abort(again, true);
}

const SMALL: Shape = Shape {
    cluster_bits: 12,
    refcount_order: 4,
    extended_l2: false,
    version: 3,
    size: 16 << 20,
    backing_size: None,
    slice_bytes: 512,
    l2_cache_bytes: 1 << 20,
    budget_bytes: u64::MAX,
};

#[test]
fn a_plan_and_its_commit_take_one_lock_each() {
    if !cfg!(debug_assertions) {
        return; // Nothing counts there.
    }
    let mut disk = Disk::new(Shape { backing_size: Some(1 << 20), ..SMALL });
    disk.write(0, &[1; 512]);
    set_interleaving_hook(Some(|| {}));
    // In the middle of a cluster.
    let at = GuestOffset(8192 + 1024);
    let (before, mut extents) = (times_locked(), ExtentList::default());
    let place = disk.engine.map_overwrite(at, 512, &mut extents).unwrap();
    assert_eq!((place, times_locked() - before), (0, 0), "the look for a place takes no lock");
    let allocation = disk.engine.begin_allocate(at, 512, true).unwrap();
    assert_eq!(times_locked() - before, 1, "the plan");
    assert!(allocation.source().is_some(), "the backing file's data is copied");
    disk.engine.commit(allocation).unwrap();
    assert_eq!(times_locked() - before, 2, "its commit");
    let place = disk.engine.map_overwrite(at, 512, &mut extents).unwrap();
    assert_eq!((place, times_locked() - before), (512, 2), "a write in place takes none");
    set_interleaving_hook(None);
}

#[test]
fn a_budget_that_is_always_exceeded_breaks_nothing() {
    for (index, cluster_bits) in [9, 12, 14].into_iter().enumerate() {
        for backing_size in [None, Some(500_000)] {
            let shape = Shape { cluster_bits, backing_size, size: 2 << 20, budget_bytes: 1, ..SMALL };
            run(shape, 77 + index as u64, 300);
        }
    }
}

/// As many slices as the disk has, so that they can be seen coming and going.
fn read_all(disk: &mut Disk) {
    for at in (0..SMALL.size).step_by(64 * 4096) {
        disk.read(at, 4096);
    }
}

#[test]
fn images_share_a_budget_and_what_is_idle_goes_first() {
    let budget = Budget::new(u64::MAX);
    let mut disks: Vec<Disk> = (0..3)
        .map(|number| {
            let mut disk = Disk::new(SMALL);
            for at in (0..SMALL.size).step_by(64 * 4096) {
                disk.write(at, &[number + 1; 4096]);
            }
            disk.flush();
            disk.budget = Arc::clone(&budget);
            disk.reopen();
            disk
        })
        .collect();
    disks.iter_mut().for_each(read_all);
    let full = disks[0].engine.statistics();
    assert_eq!((full.l2_slices, full.l2_misses), (64, 64));
    assert_eq!(budget.used_bytes(), 3 * (full.l2_bytes + full.refcount_bytes));
    // Runs take less than the tables do on disk.
    assert!(full.l2_bytes > 0 && full.l2_bytes < 64 * 512 && budget.members() == 3);
    // Two of three images fit. The first is used again and again, the others lie idle.
    let limit = 2 * (full.l2_bytes + full.refcount_bytes);
    budget.set_limit_bytes(limit);
    for _ in 0..4 {
        read_all(&mut disks[0]);
    }
    assert!(budget.used_bytes() <= limit);
    let misses = disks[0].engine.statistics().l2_misses;
    for _ in 0..4 {
        read_all(&mut disks[0]);
    }
    assert_eq!(disks[0].engine.statistics().l2_misses, misses, "what is in use stays");
    assert!(disks[0].engine.statistics().l2_hits >= 64 * 8);
    // An image that comes into use takes from those that are idle.
    read_all(&mut disks[1]);
    read_all(&mut disks[1]);
    assert_eq!(disks[1].engine.statistics().l2_slices, 64);
    assert!(budget.used_bytes() <= limit + 2 * 1024);
    disks.drain(..2).for_each(drop);
    let left = disks[0].engine.statistics();
    assert_eq!(budget.used_bytes(), left.l2_bytes + left.refcount_bytes);
    drop(disks);
    assert_eq!((budget.used_bytes(), budget.members()), (0, 0));
}

/// A cache whose whole contents are a number of bytes.
#[derive(Debug)]
struct Bytes(Arc<Budget>, AtomicU64);

impl BudgetedCache for Bytes {
    fn give_up(&self, bytes: u64) -> u64 {
        let left = self.1.load(Ordering::Relaxed).saturating_sub(bytes);
        let freed = self.1.swap(left, Ordering::Relaxed) - left;
        self.0.change(freed, 0);
        freed
    }
}

#[test]
fn a_cache_and_metadata_share_the_budget() {
    let mut disk = Disk::new(SMALL);
    for at in (0..SMALL.size).step_by(64 * 4096) {
        disk.write(at, &[9; 4096]);
    }
    disk.flush();
    let budget = Budget::new(2 << 20);
    disk.budget = Arc::clone(&budget);
    disk.reopen();
    let cache: &Bytes = Box::leak(Box::new(Bytes(Arc::clone(&budget), AtomicU64::new(4 << 20))));
    budget.join_cache(cache);
    budget.change(0, 4 << 20);
    budget.keep_limit();
    assert!(budget.used_bytes() <= 2 << 20 && cache.1.load(Ordering::Relaxed) > 1 << 20);
    // Metadata takes from the cache where the cache has most.
    budget.set_limit_bytes(64 << 10);
    (0..4).for_each(|_| read_all(&mut disk));
    assert!(budget.used_bytes() <= 64 << 10);
    let metadata = disk.engine.statistics();
    assert!(metadata.l2_slices > 32, "{metadata:?}");
}

#[test]
fn closed_images_leave_nothing_in_their_budget() {
    let (budget, mut disk) = (Budget::new(u64::MAX), Disk::new(SMALL));
    disk.flush();
    disk.budget = Arc::clone(&budget);
    (0..10).for_each(|_| disk.reopen());
    assert_eq!(budget.members(), 1);
}

#[test]
fn cleaning_drops_what_was_not_used_since_the_last_time() {
    let mut disk = Disk::new(SMALL);
    for at in (0..SMALL.size).step_by(64 * 4096) {
        disk.write(at, &[9; 4096]);
    }
    assert!(disk.engine.statistics().l2_dirty > 0);
    disk.engine.clean();
    disk.engine.clean();
    assert_eq!(disk.engine.statistics().l2_slices, 64, "what is dirty stays");
    disk.flush();
    disk.engine.clean();
    disk.read(0, 4096);
    disk.engine.clean();
    assert_eq!(disk.engine.statistics().l2_slices, 1);
    disk.engine.clean();
    let empty = disk.engine.statistics();
    assert_eq!((empty.l2_slices, empty.l2_bytes, empty.refcount_blocks), (0, 0, 0));
    assert_eq!(disk.budget.used_bytes(), 0);
    assert_eq!(disk.read(64 * 4096, 4096), [9; 4096]);
    // Smaller limits count at once.
    read_all(&mut disk);
    disk.engine.set_cache_limits(4 * 512, 1);
    let few = disk.engine.statistics();
    assert!(few.l2_slices < 32 && few.l2_bytes < 4 * 512 + few.l2_slices * 256, "{few:?}");
    assert_eq!(disk.engine.statistics().l2_limit_bytes, 4 * 512);
    disk.flush();
    disk.check();
}

/// Two calls that reclaim at once each take one reference of a cluster. The one that takes the last sees to the hole,
/// and to the memory of it.
#[test]
fn cluster_reclaimed_twice_is_one_hole() {
    for first_lowers_first in [true, false] {
        let mut disk = Disk::new(SMALL);
        disk.write_compressed(&[(0, 1, 1024), (4096, 2, 1024)]);
        disk.flush();
        disk.write(0, &[5; 4096]);
        disk.cycle();
        let mut first = disk.plan(|engine| engine.take_reclaimable());
        assert!(!first.is_empty() && first.holes.is_empty(), "the other half is still in use: {first:?}");
        disk.write(4096, &[6; 4096]);
        disk.cycle();
        let mut second = disk.plan(|engine| engine.take_reclaimable());
        assert_eq!(second.holes.iter().map(|(_, len)| *len).sum::<u64>(), 4096, "{second:?}");
        if first_lowers_first {
            disk.plan(|engine| engine.reclaimed(&mut first));
            disk.plan(|engine| engine.reclaimed(&mut second));
        } else {
            disk.plan(|engine| engine.reclaimed(&mut second));
            disk.plan(|engine| engine.reclaimed(&mut first));
        }
        disk.flush();
        assert!(disk.read(0, 8192) == [[5; 4096], [6; 4096]].concat());
        disk.check();
    }
}

/// A growth to a petabyte looks for mappings behind the old end in two million entries.
#[test]
fn entries_without_a_table_are_passed_over_together() {
    let shape = Shape {
        cluster_bits: 16,
        refcount_order: 4,
        extended_l2: false,
        version: 3,
        size: 1 << 50,
        backing_size: None,
        slice_bytes: 4096,
        l2_cache_bytes: 1 << 20,
        budget_bytes: 1 << 30,
    };
    let mut disk = Disk::new(shape);
    // A table in the middle is found all the same.
    let at = (1 << 49) + (3 << 29);
    disk.write(at, &[7; 512]);
    let mut tail = Tail::new(GuestOffset(65536));
    let steps = (1..).find(|_| disk.plan(|engine| engine.cut_tail(&mut tail, TailCut::Unmap))).unwrap();
    assert!(steps < 200, "{steps} steps");
    assert_eq!(disk.read(at, 512), [0; 512]);
    disk.flush();
    assert!(disk.l1().iter().all(|entry| *entry == 0));
}

/// Each block that is read ends an attempt, and the cache holds four of the hundred that count the tail.
#[test]
fn the_end_behind_a_long_free_tail_is_found() {
    const KEPT: u64 = 200;
    let shape = Shape { cluster_bits: 9, refcount_order: 6, size: 4 << 20, l2_cache_bytes: 4096, ..SMALL };
    let mut disk = Disk::new(shape);
    for at in (0..shape.size).step_by(64 << 10) {
        disk.write(at, &[7; 64 << 10]);
    }
    disk.flush();
    let table = disk.read_host(disk.config.refcount_table_offset, (disk.config.refcount_table_clusters * 512) as usize);
    let blocks = table.chunks_exact(8).map(|word| u64::from_be_bytes(word.try_into().unwrap()));
    for (index, block) in blocks.enumerate().filter(|(_, block)| *block != 0) {
        for entry in (0..64).filter(|entry| index as u64 * 64 + entry >= KEPT) {
            disk.write_host(block + entry * 8, &[0; 8]);
        }
    }
    disk.reopen();
    let mut passed = u64::MAX;
    assert_eq!(disk.plan(|engine| engine.needed_file_len(&mut passed)), KEPT * 512);
}
