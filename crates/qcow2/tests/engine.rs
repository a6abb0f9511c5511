// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The engine alone, over an image in memory. Seeded random requests run against a byte model, with reopening. After
//! each flush every reference is counted against every refcount.

use cowshed_layout::qcow2::{Geometry, L1Entry, L2Entry, L2Format, refcount};
use cowshed_qcow2::{
    Budget, Cycle, CycleEnd, Engine, EngineConfig, ExtentList, Fill, Load, OverlapSet, Planned, Stall, Structure, Tail,
    ZeroMode,
};
use cowshed_types::{GuestOffset, HostOffset, Mapping};
use std::collections::BTreeMap;
use std::sync::Arc;

/// An image file in memory with its engine; the backing file is a fixed pattern.
struct Disk {
    bytes: Vec<u8>,
    engine: Arc<Engine>,
    budget: Arc<Budget>,
    config: EngineConfig,
    backing: Vec<u8>,
}

fn engine_of(config: &EngineConfig, l1: &[u64], budget: &Arc<Budget>) -> Arc<Engine> {
    let engine = Arc::new(Engine::new(config.clone(), l1).unwrap());
    engine.join_budget(budget);
    engine
}

fn backing_byte(offset: u64) -> u8 {
    (offset / 512 % 251) as u8 + 1
}

#[derive(Clone, Copy, Debug)]
struct Shape {
    cluster_bits: u32,
    refcount_order: u32,
    extended_l2: bool,
    version: u32,
    size: u64,
    backing_size: Option<u64>,
    slice_bytes: u64,
    l2_cache_bytes: u64,
    /// The limit of the image's budget in bytes.
    budget_bytes: u64,
}

impl Disk {
    fn new(shape: Shape) -> Disk {
        let geometry = Geometry::new(shape.cluster_bits, shape.refcount_order, shape.extended_l2).unwrap();
        let cluster = geometry.cluster_size() as usize;
        let l1_entries = geometry.l1_entries_needed(shape.size);
        let l1_clusters = geometry.clusters(l1_entries * 8);
        // Header, refcount table, refcount block, L1.
        let clusters = 3 + l1_clusters;
        let mut bytes = vec![0; cluster * clusters as usize];
        bytes[cluster..cluster + 8].copy_from_slice(&(2 * cluster as u64).to_be_bytes());
        for index in 0..clusters {
            let block = &mut bytes[2 * cluster..3 * cluster];
            refcount::set(block, shape.refcount_order, index as usize, 1);
        }
        let config = EngineConfig {
            format: L2Format { geometry, version: shape.version, data_file: false },
            size: shape.size,
            encrypted: false,
            lazy_refcounts: false,
            l1_offset: 3 * cluster as u64,
            refcount_table_offset: cluster as u64,
            refcount_table_clusters: 1,
            file_len: bytes.len() as u64,
            fixed_length: false,
            reserves: true,
            data_file_len: 0,
            new_space_is_zero: true,
            sector_bytes: 512,
            l2_cache_bytes: shape.l2_cache_bytes,
            l2_slice_bytes: shape.slice_bytes,
            refcount_cache_bytes: 4 * cluster as u64,
            discard_no_unref: false,
            overlap: OverlapSet::NONE
                .with(Structure::MainHeader, true)
                .with(Structure::ActiveL1, true)
                .with(Structure::ActiveL2, true)
                .with(Structure::RefcountTable, true)
                .with(Structure::RefcountBlock, true),
            other_metadata: Vec::new(),
            backing_size: shape.backing_size,
            names_backing: shape.backing_size.is_some(),
        };
        let l1 = vec![0; l1_entries as usize];
        let backing = (0..shape.backing_size.unwrap_or(0)).map(backing_byte).collect();
        let budget = Budget::new(shape.budget_bytes);
        Disk { engine: engine_of(&config, &l1, &budget), budget, config, bytes, backing }
    }

    fn write_host(&mut self, host: u64, bytes: &[u8]) {
        let end = host as usize + bytes.len();
        if self.bytes.len() < end {
            self.bytes.resize(end, 0);
        }
        self.bytes[host as usize..end].copy_from_slice(bytes);
    }

    fn read_host(&self, host: u64, len: usize) -> Vec<u8> {
        let mut out: Vec<u8> = self.bytes.iter().skip(host as usize).take(len).copied().collect();
        out.resize(len, 0);
        out
    }

    fn load(&self, load: &Load) {
        let bytes = self.read_host(load.host.0, load.len);
        self.engine.loaded(load, &bytes).unwrap();
    }

    fn plan<T>(&mut self, mut attempt: impl FnMut(&Engine) -> Planned<T>) -> T {
        for _ in 0..10_000 {
            match attempt(&self.engine) {
                Ok(plan) => return plan,
                Err(Stall::Load(load)) => self.load(&load),
                Err(Stall::Reserve(reserve)) => self.engine.reserved(&reserve),
                Err(Stall::Retry) => {}
                Err(Stall::WriteBack) => self.cycle(),
                Err(Stall::GrowRefcounts) => self.grow_refcounts(),
                Err(Stall::Wait) => panic!("a single request waits for no other"),
                Err(Stall::Full) => panic!("the file can grow"),
                Err(Stall::Error(error) | Stall::Corrupt(error, _)) => panic!("{error}"),
            }
        }
        panic!("no plan after many tries");
    }

    fn grow_refcounts(&mut self) {
        self.engine.prepare_refcount_growth();
        self.cycle();
        let growth = self.engine.begin_refcount_growth().unwrap();
        for write in &growth.writes {
            self.write_host(write.host.0, &write.bytes);
        }
        self.config.refcount_table_offset = growth.table_offset.0;
        self.config.refcount_table_clusters = u64::from(growth.table_clusters);
        self.engine.end_refcount_growth(Some(growth), true);
    }

    fn cycle(&mut self) {
        let cycle: Cycle = self.engine.begin_cycle(true);
        for write in cycle.stages.iter().flatten() {
            self.write_host(write.host.0, &write.bytes);
        }
        self.engine.end_cycle(cycle, CycleEnd::Durable);
    }

    fn flush(&mut self) {
        for _ in 0..4 {
            self.cycle();
            loop {
                let mut reclaim = self.plan(|engine| engine.take_reclaimable());
                if reclaim.is_empty() {
                    break;
                }
                for (host, len) in reclaim.holes.clone() {
                    // Not zeroes: a new user of the space must not rely on them.
                    self.write_host(host.0, &vec![0xee; len as usize]);
                }
                self.plan(|engine| engine.reclaimed(&mut reclaim));
            }
            if !self.engine.is_dirty() {
                return;
            }
        }
        panic!("still dirty after four cycles");
    }

    fn read(&mut self, guest: u64, len: u64) -> Vec<u8> {
        let mut out = Vec::new();
        while (out.len() as u64) < len {
            let at = guest + out.len() as u64;
            let mut extents = ExtentList::default();
            self.plan(|engine| engine.map(GuestOffset(at), len - (at - guest), &mut extents));
            for extent in extents.iter() {
                let count = extent.len as usize;
                match extent.mapping {
                    Mapping::Data { host, .. } => out.extend(self.read_host(host.0, count)),
                    Mapping::Zero { .. } => out.resize(out.len() + count, 0),
                    Mapping::Unallocated => {
                        out.extend((extent.guest.0..extent.guest.0 + extent.len).map(|at| self.backing_at(at)));
                    }
                    // "Compressed" here: one byte that the whole cluster is filled with.
                    Mapping::Compressed { host, .. } => {
                        let byte = self.read_host(host.0, 1)[0];
                        out.resize(out.len() + count, byte);
                    }
                }
            }
        }
        out
    }

    fn backing_at(&self, guest: u64) -> u8 {
        self.backing.get(guest as usize).copied().unwrap_or(0)
    }

    fn write(&mut self, guest: u64, data: &[u8]) {
        let mut done = 0;
        while done < data.len() {
            let at = guest + done as u64;
            let left = (data.len() - done) as u64;
            let mut extents = ExtentList::default();
            let mapped = self.plan(|engine| engine.map_overwrite(GuestOffset(at), left, &mut extents));
            for extent in extents.iter().take(if mapped > 0 { usize::MAX } else { 0 }) {
                let Mapping::Data { host, .. } = extent.mapping else { panic!("in place into {extent:?}") };
                let bytes = data[done..done + extent.len as usize].to_vec();
                self.write_host(host.0, &bytes);
                done += bytes.len();
            }
            if mapped == 0 {
                done += self.write_allocating(at, &data[done..]);
            }
        }
    }

    fn write_allocating(&mut self, at: u64, data: &[u8]) -> usize {
        let allocation = self.plan(|engine| engine.begin_allocate(GuestOffset(at), data.len() as u64, true));
        assert_eq!(allocation.data_start.0, at);
        let len = (allocation.data_end - allocation.data_start) as usize;
        let mut bytes = Vec::new();
        let edges = [
            (allocation.head, allocation.start.0..allocation.data_start.0),
            (allocation.tail, allocation.data_end.0..allocation.end.0),
        ];
        for (index, (fill, range)) in edges.into_iter().enumerate() {
            match fill {
                Fill::None => assert!(range.is_empty()),
                Fill::Zero if allocation.host_is_zero => {
                    let host = allocation.host.0 + (range.start - allocation.start.0);
                    let there = self.read_host(host, (range.end - range.start) as usize);
                    assert!(there.iter().all(|byte| *byte == 0), "space said to be zero isn't");
                    bytes.extend(there);
                }
                Fill::Zero => bytes.resize(bytes.len() + (range.end - range.start) as usize, 0),
                Fill::Copy => bytes.extend(self.read(range.start, range.end - range.start)),
            }
            if index == 0 {
                bytes.extend(&data[..len]);
            }
        }
        self.write_host(allocation.host.0, &bytes);
        self.engine.commit(allocation).unwrap();
        len
    }

    fn zero(&mut self, guest: u64, len: u64, mode: ZeroMode) -> bool {
        let mut at = guest;
        while at < guest + len {
            let left = guest + len - at;
            loop {
                match self.engine.zero(GuestOffset(at), left, mode) {
                    Ok(done) => {
                        at += done;
                        break;
                    }
                    Err(Stall::Load(load)) => self.load(&load),
                    Err(Stall::Reserve(reserve)) => self.engine.reserved(&reserve),
                    Err(Stall::GrowRefcounts) => self.grow_refcounts(),
                    Err(Stall::Error(_)) => return false,
                    Err(stall) => panic!("{stall:?}"),
                }
            }
        }
        true
    }

    fn write_compressed(&mut self, batch: &[(u64, u8, u64)]) {
        let mut left: Vec<(GuestOffset, u64)> = batch.iter().map(|(at, _, len)| (GuestOffset(*at), *len)).collect();
        let mut bytes: Vec<u8> = batch.iter().map(|(_, byte, _)| *byte).collect();
        while !left.is_empty() {
            let allocation = self.plan(|engine| engine.begin_compressed(&left));
            for (place, byte) in allocation.places.clone().iter().zip(&bytes) {
                self.write_host(place.host.0, &vec![*byte; place.len as usize]);
            }
            left.drain(..allocation.places.len());
            bytes.drain(..allocation.places.len());
            self.engine.commit_compressed(allocation).unwrap();
        }
    }

    fn l1(&self) -> Vec<u64> {
        let entries = self.engine.geometry().l1_entries_needed(self.config.size);
        let bytes = self.read_host(self.config.l1_offset, entries as usize * 8);
        bytes.chunks_exact(8).map(|word| u64::from_be_bytes(word.try_into().unwrap())).collect()
    }

    fn reopen(&mut self) {
        self.flush();
        self.config.file_len = self.bytes.len() as u64;
        self.engine = engine_of(&self.config, &self.l1(), &self.budget);
    }

    /// Counts every reference on "disk" and compares with every stored refcount.
    fn check(&self) {
        let geometry = self.engine.geometry();
        let cluster = geometry.cluster_size();
        let mut references: BTreeMap<u64, u64> = BTreeMap::new();
        let mut count = |first: u64, clusters: u64| {
            for number in first..first + clusters {
                *references.entry(number).or_default() += 1;
            }
        };
        count(0, 1);
        count(self.config.refcount_table_offset / cluster, self.config.refcount_table_clusters);
        count(self.config.l1_offset / cluster, geometry.clusters(self.l1().len() as u64 * 8));
        for entry in self.l1() {
            let table = L1Entry(entry).offset().0;
            if table == 0 {
                continue;
            }
            count(table / cluster, 1);
            let bytes = self.read_host(table, cluster as usize);
            for entry in bytes.chunks_exact(geometry.l2_entry_size() as usize) {
                let entry = L2Entry(u64::from_be_bytes(entry[..8].try_into().unwrap()));
                if let Some(descriptor) = entry.compressed_descriptor(geometry.cluster_bits()) {
                    let first = descriptor.host_offset.0 / cluster;
                    let last = (descriptor.host_offset.0 + descriptor.len_max() - 1) / cluster;
                    count(first, last - first + 1);
                } else if entry.offset().0 != 0 {
                    assert!(entry.is_copied(), "data without COPIED in an image without sharing");
                    count(entry.offset().0 / cluster, 1);
                }
            }
        }
        let table_bytes = (self.config.refcount_table_clusters * cluster) as usize;
        let table = self.read_host(self.config.refcount_table_offset, table_bytes);
        let blocks: Vec<u64> = table.chunks_exact(8).map(|word| u64::from_be_bytes(word.try_into().unwrap())).collect();
        for block in blocks.iter().filter(|block| **block != 0) {
            count(block / cluster, 1);
        }
        for (index, block) in blocks.iter().enumerate().filter(|(_, block)| **block != 0) {
            let bytes = self.read_host(*block, cluster as usize);
            for entry in 0..geometry.refcount_block_entries() {
                let number = (index as u64) * geometry.refcount_block_entries() + entry;
                let stored = refcount::get(&bytes, geometry.refcount_order(), entry as usize);
                assert_eq!(stored, references.remove(&number).unwrap_or(0), "refcount of cluster {number}");
            }
        }
        assert!(references.is_empty(), "references without a refcount block: {references:?}");
    }
}

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
    let steps = (1..).find(|_| disk.plan(|engine| engine.unmap_tail(&mut tail))).unwrap();
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
    disk.config.file_len = disk.bytes.len() as u64;
    disk.engine = engine_of(&disk.config, &disk.l1(), &disk.budget);
    let mut passed = u64::MAX;
    assert_eq!(disk.plan(|engine| engine.needed_file_len(&mut passed)), KEPT * 512);
}
