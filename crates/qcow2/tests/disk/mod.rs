// SPDX-License-Identifier: Apache-2.0 OR MIT
//! An image in memory, with the engine that plans its requests.

use cowshed_layout::qcow2::{Geometry, L1Entry, L2Entry, L2Format, refcount};
use cowshed_qcow2::{
    Budget, Cycle, CycleEnd, Engine, EngineConfig, ExtentList, Fill, Load, OverlapSet, Planned, Stall, Structure,
    ZeroMode,
};
use cowshed_types::{GuestOffset, Mapping};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// An image file in memory with its engine; the backing file is a fixed pattern.
pub struct Disk {
    bytes: Vec<u8>,
    pub engine: Arc<Engine>,
    pub budget: Arc<Budget>,
    pub config: EngineConfig,
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
pub struct Shape {
    pub cluster_bits: u32,
    pub refcount_order: u32,
    pub extended_l2: bool,
    pub version: u32,
    pub size: u64,
    pub backing_size: Option<u64>,
    pub slice_bytes: u64,
    pub l2_cache_bytes: u64,
    /// The limit of the image's budget in bytes.
    pub budget_bytes: u64,
}

impl Disk {
    pub fn new(shape: Shape) -> Disk {
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

    pub fn write_host(&mut self, host: u64, bytes: &[u8]) {
        let end = host as usize + bytes.len();
        if self.bytes.len() < end {
            self.bytes.resize(end, 0);
        }
        self.bytes[host as usize..end].copy_from_slice(bytes);
    }

    pub fn read_host(&self, host: u64, len: usize) -> Vec<u8> {
        let mut out: Vec<u8> = self.bytes.iter().skip(host as usize).take(len).copied().collect();
        out.resize(len, 0);
        out
    }

    fn load(&self, load: &Load) {
        let bytes = self.read_host(load.host.0, load.len);
        self.engine.loaded(load, &bytes).unwrap();
    }

    pub fn plan<T>(&mut self, mut attempt: impl FnMut(&Engine) -> Planned<T>) -> T {
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

    pub fn cycle(&mut self) {
        let cycle: Cycle = self.engine.begin_cycle(true);
        for write in cycle.stages.iter().flatten() {
            self.write_host(write.host.0, &write.bytes);
        }
        self.engine.end_cycle(cycle, CycleEnd::Durable);
    }

    pub fn flush(&mut self) {
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

    pub fn read(&mut self, guest: u64, len: u64) -> Vec<u8> {
        let mut out = Vec::new();
        while (out.len() as u64) < len {
            let at = guest + out.len() as u64;
            let mut extents = ExtentList::default();
            self.plan(|engine| engine.map(GuestOffset(at), len - (at - guest), &mut extents));
            for extent in extents.iter() {
                out.extend(self.read_mapped(extent.mapping, extent.guest.0..extent.guest.0 + extent.len));
            }
        }
        out
    }

    fn read_mapped(&self, mapping: Mapping, guest: Range<u64>) -> Vec<u8> {
        let count = (guest.end - guest.start) as usize;
        match mapping {
            Mapping::Data { host, .. } => self.read_host(host.0, count),
            Mapping::Zero { .. } => vec![0; count],
            Mapping::Unallocated => guest.map(|at| self.backing_at(at)).collect(),
            // "Compressed" here: one byte that the whole cluster is filled with.
            Mapping::Compressed { host, .. } => vec![self.read_host(host.0, 1)[0]; count],
        }
    }

    pub fn backing_at(&self, guest: u64) -> u8 {
        self.backing.get(guest as usize).copied().unwrap_or(0)
    }

    pub fn write(&mut self, guest: u64, data: &[u8]) {
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
            (allocation.head, allocation.head_source(), allocation.start.0..allocation.data_start.0),
            (allocation.tail, allocation.tail_source(), allocation.data_end.0..allocation.end.0),
        ];
        let whole = allocation.source().map(|from| self.read_mapped(from, allocation.start.0..allocation.end.0));
        for (index, (fill, source, range)) in edges.into_iter().enumerate() {
            match fill {
                Fill::None => assert!(range.is_empty()),
                Fill::Zero if allocation.host_is_zero => {
                    let host = allocation.host.0 + (range.start - allocation.start.0);
                    let there = self.read_host(host, (range.end - range.start) as usize);
                    assert!(there.iter().all(|byte| *byte == 0), "space said to be zero isn't");
                    bytes.extend(there);
                }
                Fill::Zero => bytes.resize(bytes.len() + (range.end - range.start) as usize, 0),
                Fill::Copy => {
                    let old = self.read(range.start, range.end - range.start);
                    let within = (range.start - allocation.start.0) as usize..(range.end - allocation.start.0) as usize;
                    let inside = (range.end.min(self.config.size) - range.start) as usize;
                    assert!(source.is_none_or(|from| self.read_mapped(from, range)[..inside] == old[..inside]));
                    assert!(whole.as_ref().is_none_or(|whole| whole[within][..inside] == old[..inside]));
                    bytes.extend(old);
                }
            }
            if index == 0 {
                bytes.extend(&data[..len]);
            }
        }
        self.write_host(allocation.host.0, &bytes);
        self.engine.commit(allocation).unwrap();
        len
    }

    pub fn zero(&mut self, guest: u64, len: u64, mode: ZeroMode) -> bool {
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

    pub fn write_compressed(&mut self, batch: &[(u64, u8, u64)]) {
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

    pub fn l1(&self) -> Vec<u64> {
        let entries = self.engine.geometry().l1_entries_needed(self.config.size);
        let bytes = self.read_host(self.config.l1_offset, entries as usize * 8);
        bytes.chunks_exact(8).map(|word| u64::from_be_bytes(word.try_into().unwrap())).collect()
    }

    pub fn reopen(&mut self) {
        self.flush();
        self.config.file_len = self.bytes.len() as u64;
        self.engine = engine_of(&self.config, &self.l1(), &self.budget);
    }

    /// Counts every reference on "disk" and compares with every stored refcount.
    pub fn check(&self) {
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
