// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Building the new metadata beside the old and switching to it.

use super::free::{FreeClusters, give_back, read_block};
use super::plan::{Change, CountSurvey, Deltas, SparseBitmap, Windows};
use super::{Image, SnapshotOptions, tree};
use crate::ProgressFn;
use cowshed_layout::qcow2::features::AUTOCLEAR_KNOWN;
use cowshed_layout::qcow2::{L1Entry, L2Entry, RefcountTableEntry, limits, refcount};
use cowshed_storage::{File, IoBuf};
use cowshed_types::{Error, ErrorKind, Result};
use futures_util::stream::{self, StreamExt};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;

/// L2 tables in memory at once while they are copied.
const TABLES_AT_ONCE: usize = 64;
/// Ranges of freed clusters that are kept for giving their space back; further ones stay allocated in the file.
const FREED_MAX: usize = 1 << 20;

/// An operation under way.
pub(super) struct Publication<'a> {
    pub(super) image: Image,
    pub(super) options: &'a SnapshotOptions,
    pub(super) watch: ProgressFn<'a>,
    pub(super) refcount_table: Vec<u64>,
    pub(super) windows: Windows,
    /// Changes of counts beyond those of the trees: metadata that moves.
    pub(super) extra: BTreeMap<u64, i64>,
    /// Refcount blocks that change.
    pub(super) blocks: BTreeSet<u64>,
    /// The clusters that lose their last reference.
    pub(super) freed: Vec<Range<u64>>,
}

impl<'a> Publication<'a> {
    pub fn new(image: Image, options: &'a SnapshotOptions, watch: ProgressFn<'a>) -> Self {
        let clusters = image.geometry.clusters(image.file.len());
        let windows = Windows::new(image.geometry, clusters, options.memory_bytes);
        Publication {
            image,
            options,
            watch,
            refcount_table: Vec::new(),
            windows,
            extra: BTreeMap::new(),
            blocks: BTreeSet::new(),
            freed: Vec::new(),
        }
    }

    /// Carries the change out. After an error before the switch the file has its old length again.
    pub async fn run(mut self, change: Change) -> Result<()> {
        let length = self.image.file.len();
        if let Err(error) = self.build(&change).await {
            self.image.cut_back(length).await;
            return Err(error);
        }
        self.image.file.sync().await?;
        self.image.header.autoclear_features &= AUTOCLEAR_KNOWN;
        self.image.write_header().await?;
        let Image { file, geometry, .. } = &self.image;
        give_back(file, *geometry, &self.refcount_table, &self.freed, self.options.discard).await
    }

    /// Writes everything that is new; nothing refers to it yet.
    async fn build(&mut self, change: &Change) -> Result<()> {
        self.refcount_table = self.image.refcount_table().await?;
        let (survey, deltas) = self.survey(change).await?;
        let mut free = self.image.free_clusters(&self.refcount_table)?;
        if let Some(lowered) = change.lowered.as_ref().filter(|_| change.is_begun) {
            // They are read again.
            free.keep(
                tree::tables(lowered, self.image.geometry, self.image.file.len())?.into_iter().map(|(_, host)| host),
            );
        }
        let copies = self.place_copies(change, &survey, &mut free).await?;
        self.copy_tables(&copies, &survey).await?;
        self.place_l1_tables(change, &copies, &survey, &mut free).await?;
        self.place_snapshot_table(&mut free).await?;
        self.blocks.extend(survey.blocks.iter().copied());
        self.place_refcounts(change, deltas, &mut free).await
    }

    /// Looks at all counts and entries that the change touches.
    pub(super) async fn survey(&self, change: &Change) -> Result<(CountSurvey, Option<Deltas>)> {
        let image = &self.image;
        let mut survey = CountSurvey {
            blocks: BTreeSet::new(),
            single_entries: SparseBitmap::default(),
            single_tables: SparseBitmap::default(),
        };
        let per_block = image.geometry.refcount_block_entries();
        let order = image.geometry.refcount_order();
        let mut last = None;
        for window in self.windows.ranges() {
            let deltas = image.deltas(change, window.clone(), self.watch).await?;
            let mut is_single = SparseBitmap::default();
            for index in window.start / per_block..window.end.div_ceil(per_block) {
                let stored = read_block(&image.file, image.geometry, &self.refcount_table, index).await?;
                let new = image.new_counts(index, stored.as_deref(), |cluster| deltas.get(cluster))?;
                if new.is_some() {
                    survey.blocks.insert(index);
                }
                let Some(counts) = new.as_deref().or(stored.as_deref()) else { continue };
                for entry in 0..per_block {
                    let cluster = index * per_block + entry;
                    if window.contains(&cluster) && refcount::get(counts, order, entry as usize) == 1 {
                        is_single.set(cluster - window.start)?;
                    }
                }
            }
            image.note_single(&change.active, &window, &is_single, &mut survey).await?;
            last = Some(deltas);
        }
        // With one window its deltas serve the second pass too.
        Ok((survey, last.filter(|_| self.windows.ranges().count() == 1)))
    }

    fn adjust(&mut self, cluster: u64, by: i64) {
        *self.extra.entry(cluster).or_default() += by;
        self.blocks.insert(self.image.geometry.refcount_table_index(cluster));
    }

    pub(super) fn adjust_range(&mut self, start: u64, bytes: u64, by: i64) {
        let bits = self.image.geometry.cluster_bits();
        for cluster in start >> bits..(start + bytes).div_ceil(1 << bits) {
            self.adjust(cluster, by);
        }
    }

    /// Finds the active L2 tables whose flags change, and a place for a copy of each: old place to new.
    async fn place_copies(
        &mut self,
        change: &Change,
        survey: &CountSurvey,
        free: &mut FreeClusters,
    ) -> Result<BTreeMap<u64, (usize, u64)>> {
        let image = &self.image;
        let geometry = image.geometry;
        let tables = tree::tables(&change.active, geometry, image.file.len())?;
        let mut changed = Vec::new();
        tree::for_tables(&image.file, geometry, &tables, |l1_index, host, bytes| {
            let first = l1_index as u64 * geometry.l2_entries();
            let differs = |(index, entry)| flagged(entry, survey.single_entries.get(first + index as u64)) != entry;
            if tree::entries(bytes, geometry).any(differs) {
                changed.push((l1_index, host));
            }
            Ok(())
        })
        .await?;
        // The number of references to each from the tables of the new world.
        let mut users: HashMap<u64, i64> = HashMap::new();
        for l1 in std::iter::once(&change.active).chain(&change.taken) {
            for raw in l1.iter().filter(|raw| **raw != 0) {
                *users.entry(L1Entry(*raw).offset().0).or_default() += 1;
            }
        }
        let bits = geometry.cluster_bits();
        let mut copies = BTreeMap::new();
        for (l1_index, host) in changed {
            if copies.contains_key(&host) {
                let message = "two entries of the L1 table share an L2 table: check and repair the image first";
                return Err(Error::invalid_image("l1_entry", format!("{host:#x}"), message));
            }
            let cluster = free.take(1).await?;
            let users = users.get(&host).copied().unwrap_or(1);
            self.adjust(host >> bits, -users);
            self.adjust(cluster, users);
            copies.insert(host, (l1_index, cluster << bits));
        }
        Ok(copies)
    }

    /// Writes the copies of L2 tables with their new flags.
    async fn copy_tables(&self, copies: &BTreeMap<u64, (usize, u64)>, survey: &CountSurvey) -> Result<()> {
        let geometry = self.image.geometry;
        let words = (geometry.l2_entry_size() / 8) as usize;
        let copies: Vec<(u64, usize, u64)> =
            copies.iter().map(|(host, (l1_index, copy))| (*host, *l1_index, *copy)).collect();
        for some in copies.chunks(TABLES_AT_ONCE) {
            let tables: Vec<(usize, u64)> = some.iter().map(|(host, l1_index, _)| (*l1_index, *host)).collect();
            let mut writes = Vec::with_capacity(some.len());
            tree::for_tables(&self.image.file, geometry, &tables, |l1_index, _, bytes| {
                let first = l1_index as u64 * geometry.l2_entries();
                let mut copy = IoBuf::copy_from(bytes);
                for (index, word) in copy.as_chunks_mut::<8>().0.iter_mut().step_by(words).enumerate() {
                    let single = survey.single_entries.get(first + index as u64);
                    *word = flagged(L2Entry(u64::from_be_bytes(*word)), single).0.to_be_bytes();
                }
                writes.push((some[writes.len()].2, copy));
                Ok(())
            })
            .await?;
            self.write_all(writes).await?;
        }
        Ok(())
    }

    pub(super) async fn write_all(&self, writes: Vec<(u64, IoBuf)>) -> Result<()> {
        write_all(&self.image.file, writes).await
    }

    /// Writes a table of whole clusters to free ones: its place, 0 for an empty one.
    async fn place(&mut self, free: &mut FreeClusters, mut bytes: Vec<u8>) -> Result<u64> {
        let geometry = self.image.geometry;
        let clusters = geometry.clusters(bytes.len() as u64);
        if clusters == 0 {
            return Ok(0);
        }
        let host = free.take(clusters).await? << geometry.cluster_bits();
        bytes.resize((clusters << geometry.cluster_bits()) as usize, 0);
        self.adjust_range(host, bytes.len() as u64, 1);
        self.write_all(vec![(host, IoBuf::copy_from(&bytes))]).await?;
        Ok(host)
    }

    /// Writes the active L1 table and that of a new snapshot; frees the old ones.
    async fn place_l1_tables(
        &mut self,
        change: &Change,
        copies: &BTreeMap<u64, (usize, u64)>,
        survey: &CountSurvey,
        free: &mut FreeClusters,
    ) -> Result<()> {
        let moved = |raw: u64| match copies.get(&L1Entry(raw).offset().0) {
            Some((_, copy)) if raw != 0 => *copy,
            _ => L1Entry(raw).offset().0,
        };
        let is_shared = change.taken.is_some();
        let active: Vec<u8> = change
            .active
            .iter()
            .enumerate()
            .flat_map(|(index, raw)| {
                let host = moved(*raw);
                // A copy belongs to the active table alone, unless the new snapshot has it too.
                let is_copy = host != L1Entry(*raw).offset().0;
                let single = if is_copy { !is_shared } else { survey.single_tables.get(index as u64) };
                let flag =
                    if host != 0 && single { L1Entry::new(cowshed_types::HostOffset(host), true).0 } else { host };
                flag.to_be_bytes()
            })
            .collect();
        let entries = u32::try_from(change.active.len()).unwrap_or(u32::MAX);
        if !active.is_empty() {
            let old_bytes = u64::from(self.image.header.l1_size) * 8;
            self.adjust_range(self.image.header.l1_table_offset, old_bytes, -1);
            self.image.header.l1_table_offset = self.place(free, active).await?;
            self.image.header.l1_size = entries;
        }
        if let Some(taken) = &change.taken {
            let bytes = taken.iter().flat_map(|raw| moved(*raw).to_be_bytes()).collect();
            let host = self.place(free, bytes).await?;
            if let Some(snapshot) = self.image.snapshots.last_mut() {
                snapshot.l1_table_offset = host;
            }
        }
        if let Some(released) = self.image.released.take() {
            self.adjust_range(released.l1_table_offset, u64::from(released.l1_size) * 8, -1);
        }
        Ok(())
    }

    async fn place_snapshot_table(&mut self, free: &mut FreeClusters) -> Result<()> {
        let table = self.image.snapshot_table()?;
        self.adjust_range(self.image.header.snapshots_offset, self.image.old_table_bytes, -1);
        self.image.header.nb_snapshots = u32::try_from(self.image.snapshots.len()).unwrap_or(u32::MAX);
        self.image.header.snapshots_offset = self.place(free, table).await?;
        Ok(())
    }

    /// Writes the changed refcount blocks to new places, and the table.
    async fn place_refcounts(
        &mut self,
        change: &Change,
        deltas: Option<Deltas>,
        free: &mut FreeClusters,
    ) -> Result<()> {
        let geometry = self.image.geometry;
        let bits = geometry.cluster_bits();
        let header = &self.image.header;
        let (old_table, old_clusters) = (header.refcount_table_offset, u64::from(header.refcount_table_clusters));
        // Room for all that may still be taken: every block there is, and the table. The container may be much longer.
        let taken = 2 * (self.extra.len() as u64 + self.blocks.len() as u64);
        let clusters = geometry.clusters(self.image.file.len()).min(free.counted_clusters()) + taken;
        let used = geometry.refcount_table_index(clusters) + 2;
        let table_clusters = (used * 8 + (used * 8) / geometry.cluster_size() * 16).div_ceil(geometry.cluster_size());
        let table_clusters = table_clusters.max(old_clusters);
        if table_clusters << bits > limits::REFCOUNT_TABLE_BYTES {
            let message = "the refcount table would be larger than any reader accepts: use larger clusters";
            return Err(Error::new(ErrorKind::Limit, message).field("refcount_table_clusters").value(table_clusters));
        }
        let new_table = free.take(table_clusters).await? << bits;
        self.adjust_range(new_table, table_clusters << bits, 1);
        self.adjust_range(old_table, old_clusters << bits, -1);
        let places = self.place_blocks(free).await?;
        let mut table = std::mem::take(&mut self.refcount_table);
        let old = table.clone();
        table.resize(((table_clusters << bits) / 8) as usize, 0);
        for (index, cluster) in &places {
            let Some(entry) = table.get_mut(*index as usize) else {
                return Err(Error::internal("a refcount table was made too small").value(index));
            };
            *entry = cluster << bits;
        }
        self.write_blocks(change, deltas, &old, &places).await?;
        let bytes: Vec<u8> = table.iter().flat_map(|entry| entry.to_be_bytes()).collect();
        self.write_all(vec![(new_table, IoBuf::copy_from(&bytes))]).await?;
        self.refcount_table = table;
        self.image.header.refcount_table_offset = new_table;
        self.image.header.refcount_table_clusters = u32::try_from(table_clusters).unwrap_or(u32::MAX);
        Ok(())
    }

    /// A new place for each block that changes. Taking one changes the block that counts it, until all are covered.
    async fn place_blocks(&mut self, free: &mut FreeClusters) -> Result<BTreeMap<u64, u64>> {
        let mut places = BTreeMap::new();
        loop {
            let missing: Vec<u64> = self.blocks.iter().filter(|index| !places.contains_key(*index)).copied().collect();
            if missing.is_empty() {
                return Ok(places);
            }
            for index in missing {
                let cluster = free.take(1).await?;
                places.insert(index, cluster);
                self.adjust(cluster, 1);
                let old = self.refcount_table.get(index as usize).copied().unwrap_or(0);
                if let Some(host) = RefcountTableEntry(old).block(self.image.geometry)? {
                    self.adjust(self.image.geometry.host_cluster(host), -1);
                }
            }
        }
    }

    async fn write_blocks(
        &mut self,
        change: &Change,
        mut kept: Option<Deltas>,
        old_table: &[u64],
        places: &BTreeMap<u64, u64>,
    ) -> Result<()> {
        let geometry = self.image.geometry;
        let per_block = geometry.refcount_block_entries();
        let mut done = 0;
        // Blocks behind the last window count new metadata alone.
        let windows = self.windows.ranges().chain(std::iter::once(u64::MAX..u64::MAX));
        for window in windows {
            let deltas = match kept.take() {
                Some(deltas) => deltas,
                None if window.is_empty() => self.image.deltas(&no_change(), 0..0, self.watch).await?,
                None => self.image.deltas(change, window.clone(), self.watch).await?,
            };
            let end = window.end.div_ceil(per_block);
            let mut writes = Vec::new();
            for (index, cluster) in places.range(done..end) {
                let stored = read_block(&self.image.file, geometry, old_table, *index).await?;
                let by = |cluster| deltas.get(cluster) + self.extra.get(&cluster).copied().unwrap_or(0);
                let new = self.image.new_counts(*index, stored.as_deref(), by)?;
                let new = match (new, &stored) {
                    (Some(new), _) => new,
                    (None, Some(stored)) => stored.to_vec(),
                    (None, None) => vec![0; geometry.cluster_size() as usize],
                };
                if let Some(stored) = &stored {
                    note_freed(&mut self.freed, index * per_block, stored, &new, geometry.refcount_order());
                }
                writes.push((cluster << geometry.cluster_bits(), IoBuf::copy_from(&new)));
                if writes.len() >= TABLES_AT_ONCE {
                    self.write_all(std::mem::take(&mut writes)).await?;
                }
            }
            self.write_all(writes).await?;
            done = end;
        }
        Ok(())
    }
}

/// Writes side by side, and waits for all also after an error.
pub(crate) async fn write_all(file: &File, writes: Vec<(u64, IoBuf)>) -> Result<()> {
    let mut running = stream::iter(writes)
        .map(|(host, bytes)| async move { file.write_at(bytes, host).await.0.map_err(|error| error.offset(host)) })
        .buffer_unordered(TABLES_AT_ONCE);
    let mut result = Ok(());
    while let Some(outcome) = running.next().await {
        result = result.and(outcome);
    }
    result
}

pub(super) fn no_change() -> Change {
    Change { raised: None, lowered: None, active: Vec::new(), taken: None, is_begun: false }
}

/// An L2 entry with its COPIED flag as it should be.
pub(super) fn flagged(entry: L2Entry, single: bool) -> L2Entry {
    match entry.is_compressed() || entry.offset().0 == 0 {
        true => entry,
        false => entry.with_copied(single),
    }
}

/// Adds the clusters that lost their last reference.
pub(super) fn note_freed(freed: &mut Vec<Range<u64>>, first: u64, old: &[u8], new: &[u8], order: u32) {
    for entry in 0..refcount::entries(old.len(), order) {
        if refcount::get(old, order, entry) == 0 || refcount::get(new, order, entry) != 0 {
            continue;
        }
        let cluster = first + entry as u64;
        let room = freed.len() < FREED_MAX;
        match freed.last_mut() {
            Some(last) if last.end == cluster => last.end += 1,
            _ if room => freed.push(cluster..cluster + 1),
            _ => {}
        }
    }
}
