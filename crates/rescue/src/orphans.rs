// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tables that nothing leads to any more: clusters that are in no known use and whose bytes make sense as an L2 table.

use crate::damaged_image::{DamagedImage, L1Target, salvage};
use crate::place::EntryRules;
use cowshed_layout::qcow2::{
    BitmapTableEntry, L1Entry, L2Entry, Parsed, RefcountTableEntry, SubclusterBitmap, bitmap, limits, snapshot,
};
use cowshed_offline::ProgressFn;
use cowshed_types::memory::expect_memory;
use cowshed_types::{Error, ErrorKind, Result};
use std::collections::HashSet;

/// Bytes looked at at a time.
const BATCH_BYTES: u64 = 1 << 20;
/// Clusters of the largest file that is scanned: a bit each is kept in memory.
const CLUSTERS_MAX: u64 = 1 << 31;
/// Orphans before a scan ends: more of them are no tables.
const ORPHANS_MAX: usize = 1 << 16;

/// The kind of table that a cluster resembles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OrphanKind {
    /// An L2 table.
    L2,
    /// All that it points to looks like L2 tables: an L1 table, to be given as the image's own.
    L1,
    /// Offsets without a flag: an L2 table of a snapshot, an old refcount table.
    Unclear,
}

impl OrphanKind {
    /// A word for programs.
    pub const fn name(self) -> &'static str {
        match self {
            OrphanKind::L2 => "l2",
            OrphanKind::L1 => "l1",
            OrphanKind::Unclear => "unclear",
        }
    }
}

/// A table that nothing leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Orphan {
    /// Host offset in bytes.
    pub offset: u64,
    /// The kind of table that it resembles.
    pub kind: OrphanKind,
    /// Entries that aren't 0.
    pub entries: u64,
    /// Lowest host offset that it points to, in bytes.
    pub first_target: u64,
}

/// A bit for each cluster of the file.
struct Clusters {
    words: Vec<u64>,
    bits: u32,
}

impl Clusters {
    fn mark(&mut self, start: u64, len: u64) {
        let Some(end) = start.checked_add(len.max(1)) else { return };
        for cluster in start >> self.bits..((end - 1) >> self.bits) + 1 {
            let Some(word) = usize::try_from(cluster / 64).ok().and_then(|word| self.words.get_mut(word)) else {
                return;
            };
            *word |= 1 << (cluster % 64);
        }
    }

    fn contains(&self, offset: u64) -> bool {
        let cluster = offset >> self.bits;
        self.words.get((cluster / 64) as usize).is_some_and(|word| word >> (cluster % 64) & 1 != 0)
    }
}

impl DamagedImage {
    /// Looks through the file for tables that nothing leads to. `watch` gets the number of bytes done and the number of
    /// all, and returns false to stop.
    pub async fn scan(&self, watch: ProgressFn<'_>) -> Result<Vec<Orphan>> {
        let bits = self.shape.geometry.cluster_bits();
        let clusters = self.shape.file_len.div_ceil(1 << bits);
        if clusters > CLUSTERS_MAX {
            return Err(Error::new(ErrorKind::Limit, "the file has too many clusters to scan").value(clusters));
        }
        let words = clusters.div_ceil(64) as usize;
        expect_memory(words * 8)?;
        let mut used = Clusters { words: vec![0; words], bits };
        self.mark_used(&mut used, watch).await?;
        let mut found = Vec::new();
        let mut at = 0;
        while at < self.shape.file_len && found.len() < ORPHANS_MAX {
            if !watch(at, self.shape.file_len) {
                return Err(Error::new(ErrorKind::Cancelled, "cancelled"));
            }
            at = self.scan_batch(at, &used, &mut found).await;
        }
        Ok(classify(found))
    }

    /// Scans from `at` on, and returns where to go on.
    async fn scan_batch(&self, at: u64, used: &Clusters, found: &mut Vec<Candidate>) -> u64 {
        let cluster_size = self.shape.geometry.cluster_size();
        let len = BATCH_BYTES.max(cluster_size).min(self.shape.file_len - at);
        // Holes hold no tables; a status that can't be had is one of data.
        if let Ok(runs) = self.image.block_status(at, self.shape.file_len - at, 1).await
            && let Some(run) = runs.first()
            && run.zero
        {
            let end = at + run.len;
            let next = if end >= self.shape.file_len { end } else { end / cluster_size * cluster_size };
            if next > at {
                return next;
            }
        }
        let (bytes, _) = salvage(&self.image, at, len as usize).await;
        for (cluster, offset) in bytes.chunks_exact(cluster_size as usize).zip((at..).step_by(cluster_size as usize)) {
            if !used.contains(offset) && is_plausible(&self.shape, offset, cluster) {
                found.push(Candidate::new(&self.shape, offset, cluster));
            }
        }
        at + len
    }

    async fn mark_used(&self, used: &mut Clusters, watch: ProgressFn<'_>) -> Result<()> {
        let cluster_size = self.shape.geometry.cluster_size();
        used.mark(0, cluster_size);
        if let Some(start) = self.fields.l1_offset {
            used.mark(start, self.slots() * 8);
        }
        for index in 0..self.slots() {
            let L1Target::Table { offset, .. } = self.slot(index) else { continue };
            if !watch(0, self.shape.file_len) {
                return Err(Error::new(ErrorKind::Cancelled, "cancelled"));
            }
            used.mark(offset, cluster_size);
            let (table, _) = salvage(&self.image, offset, cluster_size as usize).await;
            for (raw, _) in entries(&self.shape, &table) {
                self.mark_target(raw, used);
            }
        }
        if let Some((Some(start), entries)) = self.active_l1 {
            self.mark_tables(start, entries * 8, used).await;
        }
        self.mark_refcounts(used).await;
        self.mark_snapshots(used).await;
        self.mark_bitmaps(used).await;
        Ok(())
    }

    fn mark_target(&self, raw: u64, used: &mut Clusters) {
        let entry = L2Entry(raw);
        match entry.compressed_descriptor(self.shape.geometry.cluster_bits()) {
            Some(descriptor) => used.mark(descriptor.host_offset.0, descriptor.len_max()),
            None if self.shape.data_file || entry.offset().0 == 0 => {}
            None => used.mark(entry.offset().0, self.shape.geometry.cluster_size()),
        }
    }

    async fn mark_refcounts(&self, used: &mut Clusters) {
        let Some(header) = &self.fields.header else { return };
        let len = u64::from(header.refcount_table_clusters) << header.cluster_bits;
        used.mark(header.refcount_table_offset, len);
        let (table, _) = salvage(&self.image, header.refcount_table_offset, len as usize).await;
        for word in table.as_chunks::<8>().0 {
            let offset = RefcountTableEntry(u64::from_be_bytes(*word)).offset().0;
            if offset != 0 {
                used.mark(offset, header.cluster_size());
            }
        }
    }

    /// The tables of internal snapshots; their data look like no tables.
    async fn mark_snapshots(&self, used: &mut Clusters) {
        let Some(header) = self.fields.header.as_ref().filter(|header| header.nb_snapshots != 0) else { return };
        let start = header.snapshots_offset;
        let len = self.shape.file_len.saturating_sub(start).min(BATCH_BYTES);
        used.mark(start, header.cluster_size());
        let (bytes, _) = salvage(&self.image, start, len as usize).await;
        let Ok(Parsed::Complete { value: snapshots, .. }) = snapshot::parse_table(&bytes, header.nb_snapshots) else {
            return;
        };
        for snapshot in snapshots {
            let len = u64::from(snapshot.l1_size) * 8;
            if snapshot.validate(2, header.cluster_bits).is_err() {
                continue;
            }
            self.mark_tables(snapshot.l1_table_offset, len, used).await;
        }
    }

    /// An L1 table of `len` bytes, and the L2 tables that it leads to.
    async fn mark_tables(&self, start: u64, len: u64, used: &mut Clusters) {
        used.mark(start, len);
        let (l1, _) = salvage(&self.image, start, len as usize).await;
        for word in l1.as_chunks::<8>().0 {
            let table = L1Entry(u64::from_be_bytes(*word));
            if table.is_allocated() {
                used.mark(table.offset().0, self.shape.geometry.cluster_size());
            }
        }
    }
}

impl DamagedImage {
    async fn mark_bitmaps(&self, used: &mut Clusters) {
        let Some(header) = &self.fields.header else { return };
        let Some(extension) = header.bitmaps() else { return };
        let (start, len) = (extension.directory_offset, extension.directory_size);
        if len > limits::BITMAP_DIRECTORY_BYTES {
            return;
        }
        used.mark(start, len);
        let (bytes, _) = salvage(&self.image, start, len as usize).await;
        for entry in bitmap::parse_directory(&bytes, extension).unwrap_or_default() {
            if entry.validate(header.size, header.cluster_bits).is_err() {
                continue;
            }
            let len = u64::from(entry.table_size) * 8;
            used.mark(entry.table_offset, len);
            let (table, _) = salvage(&self.image, entry.table_offset, len as usize).await;
            for word in table.as_chunks::<8>().0 {
                let offset = BitmapTableEntry(u64::from_be_bytes(*word)).offset().0;
                if offset != 0 {
                    used.mark(offset, header.cluster_size());
                }
            }
        }
    }
}

/// The entries of a table that aren't 0, with their bitmaps.
fn entries<'a>(shape: &EntryRules, table: &'a [u8]) -> impl Iterator<Item = (u64, Option<u64>)> + use<'a> {
    let words = table.as_chunks::<8>().0;
    let stride = if shape.geometry.extended_l2() { 2 } else { 1 };
    words.chunks_exact(stride).filter_map(|entry| {
        let number = |word: &[u8; 8]| u64::from_be_bytes(*word);
        let bitmap = entry.get(1).map(number);
        let raw = number(&entry[0]);
        (raw != 0 || bitmap.unwrap_or_default() != 0).then_some((raw, bitmap))
    })
}

/// True for bytes that make sense as the L2 table at `offset`. Every entry is valid, none points to the table or to the
/// header, and no two point to one cluster. At least one points to a cluster.
pub(super) fn is_plausible(shape: &EntryRules, offset: u64, table: &[u8]) -> bool {
    let mut targets = HashSet::new();
    let mut pointers = 0;
    for (raw, bitmap) in entries(shape, table) {
        let entry = L2Entry(raw);
        if let Some(descriptor) = entry.compressed_descriptor(shape.geometry.cluster_bits()) {
            let end = descriptor.host_offset.0.checked_add(descriptor.len_max());
            let inside = end.is_some_and(|end| end <= shape.file_len.next_multiple_of(shape.geometry.cluster_size()));
            if entry.is_copied()
                || shape.data_file
                || !inside
                || descriptor.host_offset.0 < shape.geometry.cluster_size()
            {
                return false;
            }
            pointers += 1;
            continue;
        }
        let has_zero_flag = shape.version >= 3 && bitmap.is_none();
        if entry.reserved_bits() != 0 || (entry.is_zero() && !has_zero_flag) || !is_valid_bitmap(entry, bitmap) {
            return false;
        }
        let target = entry.offset().0;
        if target == 0 && !(shape.data_file && entry.is_copied()) {
            if entry.is_copied() {
                return false;
            }
            continue;
        }
        let inside = shape.data_file || (target < shape.file_len && target != offset);
        if shape.geometry.in_cluster(target) != 0 || !inside || !targets.insert(target) {
            return false;
        }
        pointers += 1;
    }
    pointers > 0
}

fn is_valid_bitmap(entry: L2Entry, bitmap: Option<u64>) -> bool {
    let Some(bitmap) = bitmap.map(SubclusterBitmap) else { return true };
    bitmap.is_valid() && (bitmap.data_mask() == 0 || entry.offset().0 != 0 || entry.is_copied())
}

struct Candidate {
    orphan: Orphan,
    /// The clusters that its plain entries point to, as far as they distinguish an L1 table from an L2 table.
    targets: Vec<u64>,
}

/// The number of targets that decides the kind of a table.
const TARGETS_MAX: usize = 64;

impl Candidate {
    fn new(shape: &EntryRules, offset: u64, table: &[u8]) -> Self {
        let mut orphan = Orphan { offset, kind: OrphanKind::Unclear, entries: 0, first_target: u64::MAX };
        let mut targets = Vec::new();
        for (raw, bitmap) in entries(shape, table) {
            let entry = L2Entry(raw);
            orphan.entries += 1;
            let compressed = entry.compressed_descriptor(shape.geometry.cluster_bits());
            if entry.is_copied() || compressed.is_some() || bitmap.is_some() || entry.is_zero() {
                orphan.kind = OrphanKind::L2;
            }
            let target = compressed.map_or(entry.offset().0, |descriptor| descriptor.host_offset.0);
            if target != 0 || compressed.is_some() {
                orphan.first_target = orphan.first_target.min(target);
            }
            if compressed.is_none() && target != 0 && !shape.data_file && targets.len() < TARGETS_MAX {
                targets.push(target);
            }
        }
        Candidate { orphan, targets }
    }
}

/// A cluster that resembles an L2 table, but points to nothing but L2 tables, is an L1 table. The target of another
/// table's data entry belongs to the guest, as part of a qcow2 image on its disk, for example.
fn classify(mut found: Vec<Candidate>) -> Vec<Orphan> {
    let places: HashSet<u64> = found.iter().map(|candidate| candidate.orphan.offset).collect();
    let mut guests: HashSet<u64> = HashSet::new();
    for candidate in &mut found {
        if !candidate.targets.is_empty() && candidate.targets.iter().all(|target| places.contains(target)) {
            candidate.orphan.kind = OrphanKind::L1;
        } else {
            guests.extend(candidate.targets.iter().filter(|target| places.contains(target)));
        }
    }
    found.retain(|candidate| !guests.contains(&candidate.orphan.offset));
    found.into_iter().map(|candidate| candidate.orphan).collect()
}
