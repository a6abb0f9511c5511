// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Refcount table and blocks in memory, and the allocation of host clusters. Only the holder of the lock gets here.

use crate::config::EngineConfig;
use crate::engine::contiguous::RunSearch;
use crate::engine::damage::hex;
use crate::engine::emptied::Emptied;
use crate::engine::tables::Dirt;
use crate::engine::{Engine, State};
use crate::stall::{Load, Planned, Stall, TableId};
use crate::structures::Structure;
use cowshed_layout::qcow2::{Geometry, RefcountTableEntry, refcount};
use cowshed_types::memory::vec_for;
use cowshed_types::{Errno, Error, HostOffset, slip};
use foldhash::{HashMap, HashMapExt};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Blocks that a change of a few counts may need at once: the counts of neighbouring clusters, and of a block's own.
const LEAST_BLOCKS: u64 = 4;

/// A refcount block in memory.
struct Block {
    bytes: Box<[u8]>,
    dirt: Dirt,
    /// Bytes changed since the last copy for a cycle.
    changed: Range<usize>,
    /// Bytes that the running cycle writes.
    writing: Range<usize>,
    used: u64,
}

/// A run of host clusters that was just allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FreeRun {
    /// Number of the first cluster.
    pub(crate) cluster: u64,
    /// Number of clusters, at least 1.
    pub(crate) count: u64,
    /// They read as zeroes: never written since the file grew over them.
    pub(crate) is_zero: bool,
}

/// See the module's text.
pub(crate) struct Refcounts {
    /// `None` until it is needed.
    table: Option<Vec<u64>>,
    table_offset: u64,
    table_clusters: u64,
    /// Entries of the table in memory that the disk doesn't have yet.
    table_dirty: BTreeMap<u64, Dirt>,
    blocks: HashMap<u64, Block>,
    dirty: BTreeSet<u64>,
    /// The next allocation looks from this cluster on.
    hint: u64,
    /// See [`RunSearch`].
    runs: RunSearch,
    /// Clusters that the container has: there are no more where it can't grow.
    limit: u64,
    /// Everything at or above this offset was never used: the larger of the file's length and the end of all
    /// allocations so far.
    high_water: u64,
    /// The clusters that the file had when it was opened.
    found_clusters: u64,
    /// Those of them that this opening has freed.
    emptied: Emptied,
    /// Blocks that share their cluster with other metadata.
    overlapping: BTreeSet<u64>,
    /// The table is being moved: no new blocks meanwhile.
    growing: bool,
    tick: u64,
    /// The tick when idle blocks were dropped last.
    swept_tick: u64,
    /// Look-ups that found their block in memory.
    hits: u64,
    /// Blocks in memory, beyond which clean ones go.
    cap: usize,
    /// Clean blocks that stay all the same: a change needs several at once, whatever number of others is dirty.
    least_clean: usize,
    cluster_size: u64,
}

impl Refcounts {
    pub(crate) fn new(config: &EngineConfig) -> Self {
        let cluster_size = config.geometry().cluster_size();
        Refcounts {
            table: None,
            table_offset: config.refcount_table_offset,
            table_clusters: config.refcount_table_clusters,
            table_dirty: BTreeMap::new(),
            blocks: HashMap::new(),
            dirty: BTreeSet::new(),
            hint: 1,
            runs: RunSearch::default(),
            limit: if config.fixed_length { config.file_len / cluster_size } else { u64::MAX },
            high_water: config.file_len,
            found_clusters: config.file_len.div_ceil(cluster_size),
            emptied: Emptied::default(),
            overlapping: BTreeSet::new(),
            growing: false,
            tick: 0,
            swept_tick: 0,
            hits: 0,
            cap: (config.refcount_cache_bytes / cluster_size).max(LEAST_BLOCKS) as usize,
            least_clean: LEAST_BLOCKS as usize,
            cluster_size,
        }
    }

    pub(crate) fn set_cap(&mut self, bytes: u64) {
        self.cap = (bytes / self.cluster_size).max(LEAST_BLOCKS) as usize;
    }

    /// Keeps room for this many clean blocks at least.
    pub(crate) fn require_cap(&mut self, blocks: u64) {
        self.cap = self.cap.max(blocks as usize);
        self.least_clean = self.least_clean.max(blocks as usize);
    }

    pub(crate) fn cached(&self) -> usize {
        self.blocks.len()
    }

    pub(crate) fn dirty_bytes(&self) -> u64 {
        self.dirty.len() as u64 * self.cluster_size
    }

    /// Look-ups that found their block in memory.
    pub(crate) fn hits(&self) -> u64 {
        self.hits
    }

    /// The offsets of the blocks; `None` until the table was read.
    pub(crate) fn table(&self) -> Option<&[u64]> {
        self.table.as_deref()
    }

    /// Offset of the table in the file, in bytes.
    pub(crate) fn table_offset(&self) -> u64 {
        self.table_offset
    }

    /// Length of the table in clusters.
    pub(crate) fn table_clusters(&self) -> u64 {
        self.table_clusters
    }

    /// The bytes of a block in memory.
    pub(crate) fn block(&self, index: u64) -> Option<&[u8]> {
        self.blocks.get(&index).map(|block| &*block.bytes)
    }

    /// Clusters that the container has: there are no more where it can't grow.
    pub(crate) fn limit(&self) -> u64 {
        self.limit
    }

    /// Everything at or above this offset was never used.
    #[inline]
    pub(crate) fn high_water(&self) -> u64 {
        self.high_water
    }

    /// Everything below `end`, in bytes, counts as used.
    pub(crate) fn raise_high_water(&mut self, end: u64) {
        self.high_water = self.high_water.max(end);
    }

    /// Notes the container's length in bytes, where it can't grow by itself; true when it has become longer.
    pub(crate) fn container_grew(&mut self, len: u64) -> bool {
        let clusters = len / self.cluster_size;
        if clusters <= self.limit {
            return false;
        }
        self.limit = clusters;
        // The bytes there aren't zero.
        self.raise_high_water(len);
        true
    }

    /// The file ends at `len` bytes now.
    pub(crate) fn truncated(&mut self, len: u64) {
        self.high_water = self.high_water.min(len);
        self.found_clusters = self.found_clusters.min(len.div_ceil(self.cluster_size));
    }

    /// The clusters that the file had when it was opened; `None` where this opening has freed all of them from `first` on.
    pub(crate) fn unknown_clusters(&self, first: u64) -> Option<u64> {
        (!self.emptied.covers(first, self.found_clusters)).then_some(self.found_clusters)
    }

    /// The first cluster at which a run of `want` free clusters may start.
    pub(crate) fn start_of_run(&self, want: u64) -> u64 {
        self.runs.start(want, self.hint).max(1)
    }

    /// No run of `want` free clusters starts before `from`.
    pub(crate) fn no_run_before(&mut self, want: u64, from: u64) {
        self.runs.none_before(want, from);
    }

    /// A run of `want` clusters was taken, with the blocks before it. `end`: of both, in bytes.
    pub(crate) fn took_run(&mut self, want: u64, taken: Range<u64>, end: u64) {
        if self.hint == taken.start {
            self.hint = taken.end;
        }
        self.runs.none_before(want, taken.end);
        self.raise_high_water(end);
    }

    /// The table is being moved: no new blocks meanwhile.
    pub(crate) fn is_growing(&self) -> bool {
        self.growing
    }

    /// See [`Refcounts::is_growing`].
    pub(crate) fn set_growing(&mut self, growing: bool) {
        self.growing = growing;
    }

    /// The table has moved.
    pub(crate) fn move_table(&mut self, table: Vec<u64>, offset: u64, clusters: u64) {
        (self.table, self.table_offset, self.table_clusters) = (Some(table), offset, clusters);
    }

    /// True when entries of the table aren't on the disk.
    pub(crate) fn is_table_dirty(&self) -> bool {
        !self.table_dirty.is_empty()
    }

    /// True when something in memory differs from the disk.
    pub(crate) fn holds_changes(&self) -> bool {
        !self.dirty.is_empty() || self.is_table_dirty()
    }

    /// The changed sectors of the dirty blocks, which a cycle writes now: index, host offset, bytes.
    pub(crate) fn begin_blocks(&mut self, sector: usize) -> Vec<(u64, HostOffset, Vec<u8>)> {
        let mut begun = Vec::new();
        for index in std::mem::take(&mut self.dirty) {
            let host = self.table.as_ref().and_then(|table| table.get(index as usize)).copied();
            let (Some(host), Some(block)) = (host, self.blocks.get_mut(&index)) else { continue };
            let changed = std::mem::take(&mut block.changed);
            let range = changed.start / sector * sector..changed.end.next_multiple_of(sector).min(block.bytes.len());
            block.writing = range.clone();
            block.dirt = Dirt::Writing;
            begun.push((index, HostOffset(host + range.start as u64), block.bytes[range].to_vec()));
        }
        begun
    }

    /// The changed entries of the table, which a cycle writes now: index and value.
    pub(crate) fn begin_entries(&mut self) -> Vec<(u64, u64)> {
        let Some(table) = &self.table else { return Vec::new() };
        let begin = |(index, dirt): (&u64, &mut Dirt)| {
            *dirt = Dirt::Writing;
            (*index, table.get(*index as usize).copied().unwrap_or(0))
        };
        self.table_dirty.iter_mut().map(begin).collect()
    }

    /// Ends a cycle, which wrote these blocks and entries of the table. Changes that aren't durable are dirty again.
    pub(crate) fn end_cycle(&mut self, blocks: &[u64], entries: &[u64], success: bool) {
        for index in blocks {
            let Some(block) = self.blocks.get_mut(index) else { continue };
            block.dirt = block.dirt.cycle_ended(success);
            let written = std::mem::take(&mut block.writing);
            if block.dirt == Dirt::Dirty {
                if !success {
                    block.changed = match block.changed.is_empty() {
                        true => written,
                        false => written.start.min(block.changed.start)..written.end.max(block.changed.end),
                    };
                }
                self.dirty.insert(*index);
            }
        }
        for index in entries {
            let dirt = self.table_dirty.get(index).copied().unwrap_or_default().cycle_ended(success);
            if dirt == Dirt::Clean {
                self.table_dirty.remove(index);
            } else {
                self.table_dirty.insert(*index, dirt);
            }
        }
    }

    pub(crate) fn set_table(&mut self, geometry: Geometry, bytes: &[u8]) -> Result<(), Error> {
        let mut table = vec_for(bytes.len() / 8)?;
        for (index, word) in bytes.chunks_exact(8).enumerate() {
            let entry = RefcountTableEntry(u64::from_be_bytes(word.try_into().unwrap_or_default()));
            let block = entry.block(geometry).map_err(|error| misplaced_block(error, entry, index))?;
            if let Some(block) = block
                && block.0 >= self.high_water
            {
                let message = format!("refcount block {index} lies past the end of the file");
                return Err(Error::invalid_image("refcount_table_entry", block, message).with_errno(Errno::EIO));
            }
            table.push(entry.offset().0);
        }
        self.table = Some(table);
        Ok(())
    }

    pub(crate) fn insert_block(&mut self, index: u64, bytes: &[u8]) {
        self.evict();
        self.tick += 1;
        let block = Block { bytes: bytes.into(), dirt: Dirt::Clean, changed: 0..0, writing: 0..0, used: self.tick };
        self.blocks.insert(index, block);
    }

    pub(crate) fn memory_bytes(&self) -> u64 {
        self.blocks.len() as u64 * self.cluster_size
    }

    /// Drops clean blocks without a use since the last call. Returns how many. Not in the middle of a change.
    pub(crate) fn drop_idle(&mut self) -> usize {
        let (before, since) = (self.blocks.len(), self.swept_tick);
        self.blocks.retain(|_, block| block.dirt != Dirt::Clean || block.used > since);
        self.swept_tick = self.tick;
        before - self.blocks.len()
    }

    /// Lets clean blocks go until there is room for one more. The block read last must not push out the one that the
    /// same change read before, or it reads both for ever.
    pub(crate) fn evict(&mut self) {
        while self.blocks.len() >= self.cap {
            let clean = || self.blocks.iter().filter(|(_, block)| block.dirt == Dirt::Clean);
            if clean().count() < self.least_clean {
                return;
            }
            let Some(oldest) = clean().min_by_key(|(_, block)| block.used).map(|(index, _)| *index) else { return };
            self.blocks.remove(&oldest);
        }
    }

    /// Sets a count in a cached block.
    fn set(&mut self, geometry: Geometry, cluster: u64, value: u64) {
        let index = geometry.refcount_table_index(cluster);
        let entry = geometry.refcount_block_index(cluster) as usize;
        let block = self.blocks.get_mut(&index).unwrap_or_else(|| panic!("refcount block {index} left the cache"));
        refcount::set(&mut block.bytes, geometry.refcount_order(), entry, value);
        let bit = entry << geometry.refcount_order();
        let touched = bit / 8..(bit + (1 << geometry.refcount_order())).div_ceil(8);
        block.changed = if block.changed.is_empty() {
            touched
        } else {
            block.changed.start.min(touched.start)..block.changed.end.max(touched.end)
        };
        block.dirt = block.dirt.edited();
        self.dirty.insert(index);
    }
}

/// Adds QEMU's sentence to the error of such an entry.
fn misplaced_block(error: Error, entry: RefcountTableEntry, index: usize) -> Error {
    let (offset, index) = (hex(entry.offset().0), hex(index as u64));
    error.with_report(format!("Refblock offset {offset} unaligned (reftable index: {index})"))
}

impl Engine {
    /// Marks the blocks of a table that was just read; those that share a cluster with other metadata are never written.
    pub(crate) fn mark_refcount_blocks(&self, state: &mut State) {
        let bits = self.geometry.cluster_bits();
        if !self.overlap_set().contains(Structure::RefcountBlock) {
            return;
        }
        let Refcounts { table, overlapping, .. } = &mut state.refcounts;
        let clusters = |block: &u64| if *block == 0 { 0..0 } else { block >> bits..(block >> bits) + 1 };
        self.metadata.insert_all(table.as_deref().unwrap_or_default().iter().map(clusters), |index| {
            overlapping.insert(index as u64);
        });
    }

    /// Has the refcount table read, so that writes can be checked against its blocks from the first one on.
    pub fn require_refcount_table(&self) -> Planned<()> {
        self.refcount_table(&mut self.lock_state()).map(|_| ())
    }

    /// True when a host cluster from `first` on may be counted as used. Reads one refcount block at most.
    pub fn uses_clusters_from(&self, first: u64) -> Planned<bool> {
        let state = &mut self.lock_state();
        let table_len = self.refcount_table(state)?;
        let index = self.geometry.refcount_table_index(first);
        if index >= table_len {
            return Ok(false);
        }
        let table = state.refcounts.table.as_deref().unwrap_or_default();
        if table[index as usize + 1..].iter().any(|block| *block != 0) || state.refcounts.overlapping.contains(&index) {
            return Ok(true);
        }
        if !self.refcount_block(state, index)? {
            return Ok(false);
        }
        let Some(block) = state.refcounts.blocks.get(&index) else { return Ok(false) };
        let first = self.geometry.refcount_block_index(first) as usize;
        Ok(refcount::any_from(&block.bytes, self.geometry.refcount_order(), first))
    }

    /// Makes the refcount table available and returns its length in entries.
    pub(crate) fn refcount_table(&self, state: &mut State) -> Planned<u64> {
        if let Some(table) = &state.refcounts.table {
            return Ok(table.len() as u64);
        }
        let load = Load {
            table: TableId::RefcountTable,
            host: HostOffset(state.refcounts.table_offset),
            len: (state.refcounts.table_clusters * self.geometry.cluster_size()) as usize,
        };
        Err(Engine::stall_for(state, load))
    }

    /// Makes a refcount block available; false when the table has none at that index.
    pub(crate) fn refcount_block(&self, state: &mut State, index: u64) -> Planned<bool> {
        self.refcount_table(state)?;
        let refcounts = &mut state.refcounts;
        let host = refcounts.table.as_ref().and_then(|table| table.get(index as usize)).copied().unwrap_or(0);
        if host == 0 {
            return Ok(false);
        }
        if refcounts.overlapping.contains(&index) {
            return Err(self.overlap(state, host >> self.geometry.cluster_bits()));
        }
        refcounts.tick += 1;
        if let Some(block) = refcounts.blocks.get_mut(&index) {
            block.used = refcounts.tick;
            refcounts.hits += 1;
            return Ok(true);
        }
        let len = self.geometry.cluster_size() as usize;
        Err(Engine::stall_for(state, Load { table: TableId::RefcountBlock(index), host: HostOffset(host), len }))
    }

    /// The refcount in memory of a host cluster; freed ranges count until they are reclaimed.
    pub(crate) fn refcount(&self, state: &mut State, cluster: u64) -> Planned<u64> {
        if !self.refcount_block(state, self.geometry.refcount_table_index(cluster))? {
            return Ok(0);
        }
        Ok(self.cached_refcount(state, cluster))
    }

    pub(crate) fn cached_refcount(&self, state: &State, cluster: u64) -> u64 {
        let entry = self.geometry.refcount_block_index(cluster) as usize;
        let block = state.refcounts.blocks.get(&self.geometry.refcount_table_index(cluster));
        block.map_or(0, |block| refcount::get(&block.bytes, self.geometry.refcount_order(), entry))
    }

    /// Raises a count whose block is cached.
    pub(crate) fn raise(&self, state: &mut State, cluster: u64) {
        let count = self.cached_refcount(state, cluster);
        debug_assert!(count < self.geometry.max_refcount());
        state.refcounts.set(self.geometry, cluster, count + 1);
    }

    /// Lowers a count by `by`. Asking for less than zero means that the image was inconsistent: the count stays.
    pub(crate) fn lower(&self, state: &mut State, cluster: u64, by: u64) -> Planned<()> {
        let count = self.refcount(state, cluster)?;
        if let Some(left) = count.checked_sub(by)
            && count > 0
        {
            state.refcounts.set(self.geometry, cluster, left);
            if left == 0 {
                state.refcounts.hint = state.refcounts.hint.min(cluster.max(1));
                state.refcounts.runs.freed(cluster);
                state.room.freed(cluster);
                if cluster < state.refcounts.found_clusters {
                    state.refcounts.emptied.add(cluster);
                }
            }
        }
        Ok(())
    }

    /// Allocates up to `want` neighbouring host clusters with count 1, at `at` exactly if given (`Stall::Retry` when
    /// that one is taken, or isn't there). Clusters that read as zeroes and such that don't never come in one run.
    pub(crate) fn allocate(&self, state: &mut State, want: u64, at: Option<u64>) -> Planned<FreeRun> {
        let table_len = self.refcount_table(state)?;
        let mut cluster = at.unwrap_or(state.refcounts.hint).max(1);
        loop {
            if cluster >= state.refcounts.limit {
                return Err(if at.is_some() { Stall::Retry } else { Stall::Full });
            }
            let index = self.geometry.refcount_table_index(cluster);
            if index >= table_len {
                return Err(Stall::GrowRefcounts);
            }
            if !self.refcount_block(state, index)? {
                if at.is_some() {
                    return Err(Stall::Retry);
                }
                self.new_refcount_block(state, index, cluster)?;
                cluster += 1;
                continue;
            }
            let free = self.free_run(state, index, cluster, want, at.is_some());
            if let Some(found) = free {
                return self.take(state, found, at.is_some());
            }
            if at.is_some() {
                return Err(Stall::Retry);
            }
            cluster = (index + 1) << self.geometry.refcount_block_bits();
            // All below is taken: don't look there again before something is freed.
            state.refcounts.hint = cluster.min(state.refcounts.limit);
        }
    }

    /// The first run of free clusters at or behind `from` that one block counts.
    fn free_run(&self, state: &State, index: u64, from: u64, want: u64, exact: bool) -> Option<Range<u64>> {
        let block = state.refcounts.blocks.get(&index)?;
        let order = self.geometry.refcount_order();
        let entries = self.geometry.refcount_block_entries();
        let base = index << self.geometry.refcount_block_bits();
        let is_free = |cluster: u64| refcount::get(&block.bytes, order, (cluster - base) as usize) == 0;
        let end = (base + entries).min(state.refcounts.limit);
        let start = if exact { Some(from).filter(|c| is_free(*c)) } else { (from..end).find(|c| is_free(*c)) }?;
        let stop = (start..end.min(start + want)).find(|c| !is_free(*c)).unwrap_or(end.min(start + want));
        Some(start..stop)
    }

    fn take(&self, state: &mut State, found: Range<u64>, exact: bool) -> Planned<FreeRun> {
        let bits = self.geometry.cluster_bits();
        let high_cluster = state.refcounts.high_water.div_ceil(self.geometry.cluster_size());
        let is_zero =
            self.config.new_space_is_zero && (slip!("old_space_taken_for_zero") || found.start >= high_cluster);
        let end = if !is_zero && found.start < high_cluster { found.end.min(high_cluster) } else { found.end };
        // Bits 9–55 of an entry hold a host offset.
        if end > 1 << (56 - bits) {
            return Err(Error::new(cowshed_types::ErrorKind::Limit, "the image file can't grow past 2^56 bytes").into());
        }
        if let Some(cluster) = (found.start..end).find(|cluster| self.metadata.contains(*cluster)) {
            return Err(self.overlap(state, cluster));
        }
        self.require_count_room(state, found.start)?;
        for cluster in found.start..end {
            state.refcounts.set(self.geometry, cluster, 1);
        }
        // Without an exact place, everything from the hint to here was seen taken.
        if !exact || state.refcounts.hint == found.start {
            state.refcounts.hint = end;
        }
        state.refcounts.high_water = state.refcounts.high_water.max(end << bits);
        Ok(FreeRun { cluster: found.start, count: end - found.start, is_zero })
    }

    /// Puts a refcount block for the empty region `index` into its own cluster `cluster`, the first of the rest.
    fn new_refcount_block(&self, state: &mut State, index: u64, cluster: u64) -> Planned<()> {
        if state.refcounts.growing {
            return Err(Stall::Wait);
        }
        let bits = self.geometry.cluster_bits();
        if cluster >= 1 << (56 - bits) {
            return Err(Error::new(cowshed_types::ErrorKind::Limit, "the image file can't grow past 2^56 bytes").into());
        }
        if self.metadata.contains(cluster) {
            return Err(self.overlap(state, cluster));
        }
        // Nothing counts the clusters of this region: none of them is allocated.
        self.require_block_room(state, index, cluster, true)?;
        self.put_refcount_block(state, index, cluster);
        state.refcounts.set(self.geometry, cluster, 1);
        state.refcounts.hint = cluster + 1;
        state.refcounts.high_water = state.refcounts.high_water.max((cluster + 1) << bits);
        Ok(())
    }

    /// Makes an empty block for `index`, to be stored in `cluster`; the caller counts that cluster.
    pub(crate) fn put_refcount_block(&self, state: &mut State, index: u64, cluster: u64) {
        let zero = vec![0; self.geometry.cluster_size() as usize];
        self.mark(Structure::RefcountBlock, cluster..cluster + 1);
        state.refcounts.insert_block(index, &zero);
        if let Some(block) = state.refcounts.blocks.get_mut(&index) {
            block.changed = 0..zero.len();
            block.dirt = Dirt::Dirty;
        }
        state.refcounts.dirty.insert(index);
        if let Some(entry) = state.refcounts.table.as_mut().and_then(|table| table.get_mut(index as usize)) {
            *entry = cluster << self.geometry.cluster_bits();
        }
        state.refcounts.table_dirty.insert(index, Dirt::Dirty);
    }
}
