// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The passes over refcount blocks and L2 tables: batched reads, shared among threads.

use super::metadata::CheckScope;
use super::session::CheckSession;
use super::worker_threads::fan_out;
use cowshed_layout::qcow2::refcount;
use cowshed_qcow2::check::{
    CopiedSuspect, Counts, Difference, Finding, FindingKind, Ledger, ScanOutput, ScanStats, TableRef, compare_block,
    scan_l2,
};
use cowshed_storage::IoBuf;
use cowshed_types::memory::{try_collect, try_extend, try_push};
use cowshed_types::{Error, Result, without};
use futures_util::future::{join, try_join_all};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Tables and blocks are read in batches of about this size, in bytes.
const BATCH_BYTES: u64 = 1 << 20;
/// Two lanes in each thread, each with a batch in work and the buffers of the one before.
const THREAD_BYTES: u64 = 4 * BATCH_BYTES;

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A guest entry that shares a cluster with metadata: a repair copies the cluster.
#[derive(Clone, Copy, Debug)]
pub(super) struct OverlapEntry {
    /// Host offset of the entry.
    pub at: u64,
    /// The entry.
    pub entry: u64,
    /// Number of L1 entries that lead to its table.
    pub weight: u32,
}

/// The findings of all passes over the tables, beside the ledger.
#[derive(Debug, Default)]
pub(super) struct Sums {
    stats: ScanStats,
    /// Up to the ledger's limit.
    pub overlaps: Vec<OverlapEntry>,
}

impl CheckSession<'_> {
    /// The windows of clusters that are counted one after the other.
    pub(super) fn windows(&self) -> Vec<Range<u64>> {
        // One cluster more than the file has: compressed data may touch it.
        let end = self.file_clusters + 1;
        // Whole refcount blocks, so that none is split between windows.
        let block = self.geometry.refcount_block_entries();
        let window = (self.memory_for_counts() / Counts::bytes(1)).clamp(1, u64::from(u32::MAX) / 2);
        let window = (window / block).max(1) * block;
        (0..end.div_ceil(window)).map(|index| index * window..((index + 1) * window).min(end)).collect()
    }

    /// The memory that the lists of tables and the buffers of the threads leave, but at least a quarter. With less, an
    /// image would be read too often.
    fn memory_for_counts(&self) -> u64 {
        let lists = self.tables.len() * size_of::<TableRef>() + (self.l1.len() + self.refcount_table.len()) * 8;
        let taken = (lists as u64).saturating_add(THREAD_BYTES * self.threads() as u64);
        self.options.memory_bytes.saturating_sub(taken).max(self.options.memory_bytes / 4)
    }

    /// Threads whose buffers fit the memory.
    fn threads(&self) -> usize {
        let fit = self.options.memory_bytes / (2 * THREAD_BYTES);
        if without!("check_in_parallel") { 1 } else { self.options.threads }
            .min(usize::try_from(fit).unwrap_or(usize::MAX))
            .max(1)
    }

    /// Counts and compares everything, and changes nothing. Returns the entries that overlap with metadata.
    pub(super) async fn survey(&mut self, ledger: &mut Ledger) -> Result<Vec<OverlapEntry>> {
        let windows = self.windows();
        self.start_work(windows.len() as u64 * self.work_per_window());
        let mut overlaps = Vec::new();
        for window in windows {
            let (counts, sums) = self.count_window(window, CheckScope::Whole, ledger).await?;
            try_extend(&mut overlaps, sums.overlaps)?;
            self.compare_window(&counts, ledger).await?;
        }
        self.clashes = try_collect(ledger.clashes.iter().copied())?;
        self.clashes.sort_unstable();
        if ledger.clashes_omitted {
            self.obstacles.push("too many structures overlap".to_owned());
        }
        Ok(overlaps)
    }

    /// Work of one window, in clusters of metadata.
    fn work_per_window(&self) -> u64 {
        self.tables.len() as u64 + self.refcount_table.len() as u64
    }

    /// Counts the references to the clusters of `window`.
    pub(super) async fn count_window(
        &self,
        window: Range<u64>,
        scope: CheckScope,
        ledger: &mut Ledger,
    ) -> Result<(Counts, Sums)> {
        // The passes read past the undo log's queue.
        self.carry_out_pending().await?;
        let first_pass = window.start == 0;
        let len = usize::try_from(window.end - window.start).map_err(|_| Error::internal("window too large"))?;
        let counts = Counts::new(window.start, len)?;
        self.note_stored(&counts).await?;
        self.mark_metadata(&counts, first_pass, scope, ledger).await?;
        let shared = Mutex::new((std::mem::take(ledger), Sums::default()));
        let result = self.scan_tables(&counts, first_pass, &shared).await;
        let (filled, sums) = shared.into_inner().unwrap_or_else(PoisonError::into_inner);
        *ledger = filled;
        result?;
        if first_pass {
            ledger.counters.allocated_clusters = sums.stats.allocated;
            ledger.counters.fragmented_clusters = sums.stats.fragmented;
            ledger.counters.compressed_clusters = sums.stats.compressed;
        }
        Ok((counts, sums))
    }

    /// Refcount blocks that count clusters of the window, as indices in the table.
    pub(super) fn blocks_of(&self, counts: &Counts) -> Range<u64> {
        let entries = self.geometry.refcount_block_entries();
        counts.first() / entries..counts.end().div_ceil(entries)
    }

    async fn note_stored(&self, counts: &Counts) -> Result<()> {
        let order = self.geometry.refcount_order();
        let entries = self.geometry.refcount_block_entries();
        self.each_block(self.blocks_of(counts), |index, block| {
            if let Some(block) = block {
                counts.note_stored(block, order, index * entries);
            }
            Ok(())
        })
        .await
    }

    /// Calls `each` with every refcount block of a range, on any thread, in any order; `None` where there is none.
    async fn each_block(
        &self,
        blocks: Range<u64>,
        each: impl Fn(u64, Option<&[u8]>) -> Result<()> + Sync,
    ) -> Result<()> {
        let per_batch = (BATCH_BYTES >> self.geometry.cluster_bits()).max(1);
        let batches = ((blocks.end - blocks.start).div_ceil(per_batch)) as usize;
        let next = AtomicUsize::new(0);
        let lane = || async {
            let mut pool = Pool::default();
            loop {
                let batch = next.fetch_add(1, Relaxed);
                if batch >= batches {
                    return Ok(());
                }
                let start = blocks.start + batch as u64 * per_batch;
                let indices: Vec<u64> = (start..(start + per_batch).min(blocks.end)).collect();
                let places: Vec<Option<u64>> = indices.iter().map(|index| self.refcount_block(*index)).collect();
                let known: Vec<u64> = places.iter().flatten().copied().collect();
                let read = self.read_clusters(&known, &mut pool).await?;
                {
                    let mut tables = read.iter();
                    for (index, place) in indices.iter().zip(&places) {
                        each(*index, place.and_then(|_| tables.next()))?;
                    }
                }
                pool.give(read);
            }
        };
        fan_out(self.threads_for(batches), || async { join2(lane(), lane()).await }).await
    }

    fn threads_for(&self, batches: usize) -> usize {
        self.threads().clamp(1, batches.max(1))
    }

    /// Scans every L2 table into `counts`.
    async fn scan_tables(&self, counts: &Counts, first_pass: bool, shared: &Mutex<(Ledger, Sums)>) -> Result<()> {
        let per_batch = (BATCH_BYTES >> self.geometry.cluster_bits()).max(1) as usize;
        let batches = self.tables.len().div_ceil(per_batch);
        let next = AtomicUsize::new(0);
        let lane = || async {
            let mut pool = Pool::default();
            loop {
                let batch = next.fetch_add(1, Relaxed);
                if batch >= batches {
                    return Ok(());
                }
                let tables = &self.tables[batch * per_batch..self.tables.len().min((batch + 1) * per_batch)];
                let offsets: Vec<u64> = tables.iter().map(|table| table.offset).collect();
                let read = self.read_clusters(&offsets, &mut pool).await?;
                let mut stats = ScanStats::default();
                for (table, bytes) in tables.iter().zip(read.iter()) {
                    let part = self.scan_table(counts, first_pass, *table, bytes, shared).await?;
                    stats.append(&part);
                }
                lock(shared).1.stats.append(&stats);
                pool.give(read);
                self.advance(tables.len() as u64)?;
            }
        };
        fan_out(self.threads_for(batches), || async { join2(lane(), lane()).await }).await
    }

    async fn scan_table(
        &self,
        counts: &Counts,
        first_pass: bool,
        table: TableRef,
        bytes: &[u8],
        shared: &Mutex<(Ledger, Sums)>,
    ) -> Result<ScanStats> {
        let mut context = self.context;
        context.first_pass = first_pass;
        let mut out = ScanOutput::default();
        scan_l2(&context, counts, table, bytes, &mut out)?;
        for suspect in &out.copied {
            if let Some(finding) = self.judge_copied(counts, table, suspect).await? {
                try_push(&mut out.findings, (finding, 1))?;
            }
        }
        if !out.findings.is_empty() {
            let mut shared = lock(shared);
            for (finding, times) in out.findings.drain(..) {
                shared.0.add_times(finding, times);
            }
            let room = shared.0.limit.saturating_sub(shared.1.overlaps.len());
            for (word, entry, _) in out.overlaps.iter().take(room) {
                let at = table.offset + *word as u64 * 8;
                try_push(&mut shared.1.overlaps, OverlapEntry { at, entry: *entry, weight: table.weight })?;
            }
        }
        Ok(out.stats)
    }

    /// Looks the stored refcount up that bit 63 of an entry speaks of.
    async fn judge_copied(&self, counts: &Counts, table: TableRef, suspect: &CopiedSuspect) -> Result<Option<Finding>> {
        let copied = suspect.entry >> 63 != 0;
        let inside = (counts.first()..counts.end()).contains(&suspect.cluster);
        let refcount = self.stored_refcount(suspect.cluster).await?;
        if !inside && copied == (refcount == 1) {
            return Ok(None);
        }
        let kind = FindingKind::CopiedL2 { entry: suspect.entry, refcount };
        Ok(Some(Finding::at(kind, table.offset + suspect.word as u64 * 8, Some(suspect.guest))))
    }

    /// The stored refcount of any cluster; 0 without a block.
    pub(super) async fn stored_refcount(&self, cluster: u64) -> Result<u64> {
        let Some(block) = self.refcount_block(self.geometry.refcount_table_index(cluster)) else { return Ok(0) };
        // Eight aligned bytes hold the count whatever its width.
        let order = self.geometry.refcount_order();
        let index = self.geometry.refcount_block_index(cluster);
        let at = ((index << order) / 8) & !7;
        let bytes = self.read(block + at, 8).await?;
        Ok(refcount::get(&bytes, order, (index - ((at * 8) >> order)) as usize))
    }

    /// Compares the window with the stored refcounts, and the flags of the L1 table.
    pub(super) async fn compare_window(&self, counts: &Counts, ledger: &mut Ledger) -> Result<()> {
        self.check_l1_flags(counts, ledger).await?;
        let order = self.geometry.refcount_order();
        let entries = self.geometry.refcount_block_entries();
        let shared = Mutex::new((std::mem::take(ledger), Vec::<(u64, Vec<Difference>)>::new()));
        let limit = lock(&shared).0.limit;
        let kept = AtomicUsize::new(0);
        let result = self
            .each_block(self.blocks_of(counts), |index, block| {
                let mut found = Vec::new();
                let mut sums = Ledger::new(0);
                let end =
                    compare_block(counts, order, block, index * entries, entries, self.file_clusters, |difference| {
                        sums.add(finding_of(difference));
                        // Without memory for more it is counted all the same.
                        if found.len() < limit && found.try_reserve(1).is_ok() {
                            found.push(difference);
                        }
                    });
                let mut shared = lock(&shared);
                let counters = &mut shared.0.counters;
                let end = end << self.geometry.cluster_bits();
                counters.image_end_offset = counters.image_end_offset.max(end);
                counters.corruptions += sums.counters.corruptions;
                counters.leaks += sums.counters.leaks;
                shared.0.uncounted |= sums.uncounted;
                shared.0.omitted += sums.omitted.saturating_sub(found.len() as u64);
                let differences = &mut shared.1;
                if !found.is_empty()
                    && kept.fetch_add(found.len(), Relaxed) < limit
                    && differences.try_reserve(1).is_ok()
                {
                    differences.push((index, found));
                } else {
                    shared.0.omitted += found.len() as u64;
                }
                drop(shared);
                self.advance(1)
            })
            .await;
        let (mut filled, mut differences) = shared.into_inner().unwrap_or_else(PoisonError::into_inner);
        differences.sort_unstable_by_key(|(index, _)| *index);
        for difference in differences.into_iter().flat_map(|(_, found)| found) {
            if filled.findings.len() < filled.limit && filled.findings.try_reserve(1).is_ok() {
                filled.findings.push(finding_of(difference));
            } else {
                filled.omitted += 1;
            }
        }
        *ledger = filled;
        result
    }

    /// Bit 63 of the active L1 entries.
    async fn check_l1_flags(&self, counts: &Counts, ledger: &mut Ledger) -> Result<()> {
        for (l1_index, entry) in self.l1.iter().enumerate() {
            let offset = cowshed_layout::qcow2::L1Entry(*entry).offset().0;
            if offset == 0 || self.geometry.in_cluster(offset) != 0 {
                continue;
            }
            let cluster = offset >> self.geometry.cluster_bits();
            let inside = (counts.first()..counts.end()).contains(&cluster);
            let behind = counts.first() == 0 && cluster > self.file_clusters;
            let copied = entry >> 63 != 0;
            if !inside && !behind || inside && counts.stored_one(cluster) == copied {
                continue;
            }
            let refcount = self.stored_refcount(cluster).await?;
            if (refcount == 1) != copied {
                let l1_index = l1_index as u64;
                let kind = FindingKind::CopiedL1 { l1_index, entry: *entry, refcount };
                ledger.add(Finding::at(kind, self.header.l1_table_offset + l1_index * 8, None));
            }
        }
        Ok(())
    }

    /// Reads clusters; neighbours in one operation, all at once.
    async fn read_clusters(&self, offsets: &[u64], pool: &mut Pool) -> Result<Clusters> {
        let cluster_size = self.geometry.cluster_size();
        let mut runs: Vec<(u64, usize)> = Vec::new();
        for offset in offsets {
            match runs.last_mut() {
                Some((start, count)) if *start + *count as u64 * cluster_size == *offset => *count += 1,
                _ => runs.push((*offset, 1)),
            }
        }
        let reads = runs.iter().map(|(start, count)| {
            let buf = pool.take(*count * cluster_size as usize);
            async move {
                let (result, buf) = self.file.read_at(buf?, *start).await;
                result.map_err(|error| error.offset(*start)).map(|()| buf)
            }
        });
        Ok(Clusters { bufs: try_join_all(reads).await?, cluster_size: cluster_size as usize })
    }
}

fn finding_of(difference: Difference) -> Finding {
    let Difference { cluster, stored, references } = difference;
    Finding::new(if stored < references {
        FindingKind::RefcountLow { cluster, stored, references }
    } else {
        FindingKind::Leak { cluster, stored, references }
    })
}

async fn join2(a: impl Future<Output = Result<()>>, b: impl Future<Output = Result<()>>) -> Result<()> {
    let (a, b) = join(a, b).await;
    a.and(b)
}

/// The clusters that [`CheckSession::read_clusters`] read.
struct Clusters {
    bufs: Vec<IoBuf>,
    cluster_size: usize,
}

impl Clusters {
    fn iter(&self) -> impl Iterator<Item = &[u8]> {
        self.bufs.iter().flat_map(|buf| buf.chunks_exact(self.cluster_size))
    }
}

/// Buffers for the next batch: it is mostly of the same shape as the last.
#[derive(Default)]
struct Pool {
    bufs: Vec<IoBuf>,
}

impl Pool {
    fn take(&mut self, len: usize) -> Result<IoBuf> {
        match self.bufs.iter().position(|buf| buf.len() == len) {
            Some(index) => Ok(self.bufs.swap_remove(index)),
            None => IoBuf::try_zeroed(len),
        }
    }

    fn give(&mut self, clusters: Clusters) {
        self.bufs = clusters.bufs;
    }
}
