// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Building new metadata beside the old and switching to it.

use super::runs::Runs;
use crate::ProgressFn;
use crate::snapshots::free::{FreeClusters, StoredCounts, give_back};
use crate::snapshots::{Image, write_all};
use cowshed_layout::qcow2::{Geometry, Header, RefcountTableEntry, limits, refcount, switch_header};
use cowshed_storage::IoBuf;
use cowshed_types::{Error, ErrorKind, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Bytes of refcount blocks that are written at once.
const WRITE_BYTES: usize = 8 << 20;
/// Clusters counted in one step.
const CLUSTERS_AT_ONCE: u64 = 1 << 16;
/// Ranges of freed clusters that are kept for giving their space back; further ones stay allocated in the file.
const FREED_MAX: usize = 1 << 20;
/// Bytes of extra data that a snapshot of version 3 has at least.
const SNAPSHOT_EXTRA_BYTES: usize = 16;

/// A change under way.
pub(super) struct Rewrite<'a> {
    pub image: Image,
    /// The header afterwards.
    pub new: Header,
    pub stored: StoredCounts,
    free: FreeClusters,
    watch: ProgressFn<'a>,
    done: u64,
    total: u64,
    /// By how much counts change.
    changes: BTreeMap<u64, i64>,
    /// Clusters that lose all their references.
    pub dropped: Runs,
    /// The snapshot table changes.
    pub moves_snapshots: bool,
    /// The clusters that are free afterwards.
    freed: Vec<Range<u64>>,
    /// The refcount table that is to count, once it is written.
    new_table: Option<Vec<u64>>,
}

impl<'a> Rewrite<'a> {
    pub async fn new(image: Image, new: Header, watch: ProgressFn<'a>) -> Result<Self> {
        let table = image.refcount_table().await?;
        let free = image.free_clusters(&table)?;
        let stored = StoredCounts::new(image.file.clone(), image.geometry, table);
        Ok(Rewrite {
            image,
            new,
            stored,
            free,
            watch,
            done: 0,
            total: 0,
            changes: BTreeMap::new(),
            dropped: Runs::default(),
            moves_snapshots: false,
            freed: Vec::new(),
            new_table: None,
        })
    }

    /// Carries it out. After an error before the switch the file has its old length again.
    pub async fn run(mut self, discard: bool) -> Result<()> {
        let (old, length) = (self.image.header.clone(), self.image.file.len());
        if let Err(error) = self.build(&old).await {
            self.image.cut_back(length).await;
            return Err(error);
        }
        self.switch(&old).await?;
        let Rewrite { image, new, new_table, freed, .. } = &self;
        match new_table {
            Some(table) => give_back(&image.file, new.geometry()?, table, freed, discard).await,
            None => Ok(()),
        }
    }

    /// Writes everything that is new; nothing refers to it yet.
    async fn build(&mut self, old: &Header) -> Result<()> {
        self.check_method().await?;
        if self.new.version < old.version {
            self.expand_zeroes().await?;
        }
        if self.new.version > old.version {
            self.complete_snapshots();
        }
        if self.moves_snapshots {
            self.place_snapshot_table().await?;
        }
        if self.new.refcount_order != old.refcount_order || !self.changes.is_empty() {
            self.place_counts().await?;
        }
        Ok(())
    }

    /// Adds to the steps that are to come.
    pub fn expect(&mut self, steps: u64) {
        self.total += steps;
    }

    /// Counts steps as done; stops at the user's wish.
    pub fn advance(&mut self, steps: u64) -> Result<()> {
        self.done += steps;
        match (self.watch)(self.done, self.total) {
            true => Ok(()),
            false => Err(Error::new(ErrorKind::Cancelled, "cancelled")),
        }
    }

    pub fn adjust(&mut self, cluster: u64, by: i64) {
        *self.changes.entry(cluster).or_default() += by;
    }

    pub fn adjust_range(&mut self, start: u64, bytes: u64, by: i64) {
        let bits = self.image.geometry.cluster_bits();
        for cluster in start >> bits..(start + bytes).div_ceil(1 << bits) {
            self.adjust(cluster, by);
        }
    }

    /// Takes free clusters, with one reference each: the host offset of the first.
    pub async fn take(&mut self, clusters: u64) -> Result<u64> {
        let bits = self.image.geometry.cluster_bits();
        let host = self.free.take(clusters).await? << bits;
        self.adjust_range(host, clusters << bits, 1);
        Ok(host)
    }

    /// Writes a table to free clusters: its place.
    pub async fn place(&mut self, mut bytes: Vec<u8>) -> Result<u64> {
        let geometry = self.image.geometry;
        let clusters = geometry.clusters(bytes.len() as u64);
        let host = self.take(clusters).await?;
        bytes.resize((clusters << geometry.cluster_bits()) as usize, 0);
        write_all(&self.image.file, vec![(host, IoBuf::copy_from(&bytes))]).await?;
        Ok(host)
    }

    /// Gives snapshots the extra data that version 3 asks for.
    fn complete_snapshots(&mut self) {
        let size = self.image.header.size;
        for snapshot in &mut self.image.snapshots {
            if snapshot.extra_data.len() < SNAPSHOT_EXTRA_BYTES {
                snapshot.extra_data = [snapshot.vm_state_bytes().to_be_bytes(), size.to_be_bytes()].concat();
                self.moves_snapshots = true;
            }
        }
    }

    async fn place_snapshot_table(&mut self) -> Result<()> {
        let mut table = Vec::new();
        for snapshot in &self.image.snapshots {
            table.extend(snapshot.encode()?);
        }
        if table.len() as u64 > limits::SNAPSHOT_TABLE_BYTES {
            return Err(Error::new(ErrorKind::Limit, "the snapshot table would become too large").value(table.len()));
        }
        self.adjust_range(self.new.snapshots_offset, self.image.old_table_bytes, -1);
        self.new.snapshots_offset = self.place(table).await?;
        Ok(())
    }

    /// The count of a cluster afterwards.
    pub async fn new_count(&mut self, cluster: u64) -> Result<u64> {
        let counts = self.new_counts(cluster..cluster + 1, None).await?;
        Ok(counts[0])
    }

    /// Counts afterwards; clusters that get free are noted in `freed`.
    async fn new_counts(&mut self, clusters: Range<u64>, mut freed: Option<&mut Vec<Range<u64>>>) -> Result<Vec<u64>> {
        let geometry = self.image.geometry;
        let (per_block, order) = (geometry.refcount_block_entries(), geometry.refcount_order());
        let mut counts = vec![0; (clusters.end - clusters.start) as usize];
        let mut at = clusters.start;
        while at < clusters.end {
            let index = geometry.refcount_table_index(at);
            let end = ((index + 1) * per_block).min(clusters.end);
            if let Some(block) = self.stored.block(index).await? {
                for cluster in at..end {
                    let entry = geometry.refcount_block_index(cluster) as usize;
                    counts[(cluster - clusters.start) as usize] = refcount::get(block, order, entry);
                }
            }
            at = end;
        }
        let mut note = |cluster: u64| {
            let Some(freed) = &mut freed else { return };
            let room = freed.len() < FREED_MAX;
            match freed.last_mut() {
                Some(last) if last.end == cluster => last.end += 1,
                _ if room => freed.push(cluster..cluster + 1),
                _ => {}
            }
        };
        for cluster in self.dropped.within(clusters.clone()).flatten() {
            counts[(cluster - clusters.start) as usize] = 0;
            note(cluster);
        }
        for (cluster, by) in self.changes.range(clusters.clone()) {
            let count = &mut counts[(cluster - clusters.start) as usize];
            let Some(new) = count.checked_add_signed(*by) else {
                let message = "a refcount is lower than the references: check and repair the image first";
                let at = cluster << geometry.cluster_bits();
                return Err(Error::invalid_image("refcount", *count, message).offset(at));
            };
            if *count != 0 && new == 0 {
                note(*cluster);
            }
            *count = new;
        }
        Ok(counts)
    }

    /// Writes refcount blocks and table anew, in the new width.
    async fn place_counts(&mut self) -> Result<()> {
        let old = self.image.geometry;
        let new = Geometry::new(old.cluster_bits(), self.new.refcount_order, old.extended_l2())?;
        let header = &self.image.header;
        self.adjust_range(
            header.refcount_table_offset,
            u64::from(header.refcount_table_clusters) << old.cluster_bits(),
            -1,
        );
        let blocks: Vec<(u64, u64)> = self.old_blocks()?;
        self.expect(blocks.len() as u64 + 1);
        for (_, host) in &blocks {
            self.adjust(host >> old.cluster_bits(), -1);
        }
        let mut wanted = self.wanted_blocks(&blocks, new).await?;
        let table_clusters = self.table_clusters(&wanted, new)?;
        let table_offset = self.take(table_clusters).await?;
        for cluster in 0..table_clusters {
            wanted.insert(new.refcount_table_index((table_offset >> new.cluster_bits()) + cluster));
        }
        let places = self.place_blocks(wanted, new).await?;
        self.write_blocks(&places, new).await?;
        let mut table = vec![0u64; ((table_clusters << new.cluster_bits()) / 8) as usize];
        for (index, host) in &places {
            let entry = table.get_mut(*index as usize);
            *entry.ok_or_else(|| Error::internal("a refcount table was made too small").value(index))? = *host;
        }
        let bytes: Vec<u8> = table.iter().flat_map(|entry| entry.to_be_bytes()).collect();
        write_all(&self.image.file, vec![(table_offset, IoBuf::copy_from(&bytes))]).await?;
        self.new.refcount_table_offset = table_offset;
        self.new.refcount_table_clusters = u32::try_from(table_clusters).unwrap_or(u32::MAX);
        self.new_table = Some(table);
        Ok(())
    }

    /// The blocks there are: index and host offset.
    fn old_blocks(&self) -> Result<Vec<(u64, u64)>> {
        let mut blocks = Vec::new();
        for (index, raw) in (0..).zip(self.stored.table()) {
            if let Some(host) = RefcountTableEntry(*raw).block(self.image.geometry)? {
                blocks.push((index, host.0));
            }
        }
        Ok(blocks)
    }

    /// Blocks of the new width, by index, with a count in them. A count that doesn't fit is an error.
    async fn wanted_blocks(&mut self, blocks: &[(u64, u64)], new: Geometry) -> Result<BTreeSet<u64>> {
        let per_block = self.image.geometry.refcount_block_entries();
        let mut wanted: BTreeSet<u64> = self
            .changes
            .iter()
            .filter(|(_, by)| **by > 0)
            .map(|(cluster, _)| new.refcount_table_index(*cluster))
            .collect();
        for (index, _) in blocks {
            let mut start = index * per_block;
            let end = start + per_block;
            while start < end {
                let stop = (start + CLUSTERS_AT_ONCE).min(end);
                let counts = self.new_counts(start..stop, None).await?;
                for (cluster, count) in (start..stop).zip(counts).filter(|(_, count)| *count != 0) {
                    check_fits(cluster, count, new)?;
                    wanted.insert(new.refcount_table_index(cluster));
                }
                start = stop;
            }
            self.advance(1)?;
        }
        Ok(wanted)
    }

    /// Clusters of a table with room for all possible blocks.
    fn table_clusters(&self, wanted: &BTreeSet<u64>, new: Geometry) -> Result<u64> {
        let last = self.changes.last_key_value().map_or(0, |(cluster, _)| cluster + 1);
        let used = new.clusters(self.image.file.len()).min(self.stored.counted_clusters()).max(last);
        let used = wanted.last().map_or(used, |index| used.max((index + 1) * new.refcount_block_entries()));
        let mut table_clusters = 1;
        loop {
            // Blocks for the present clusters, for the table, and for the blocks themselves.
            let mut all = used + table_clusters + wanted.len() as u64;
            all += 2 * all.div_ceil(new.refcount_block_entries()) + 2;
            let bytes = (new.refcount_table_index(all) + 1) * 8;
            let needed = bytes.div_ceil(new.cluster_size());
            if needed << new.cluster_bits() > limits::REFCOUNT_TABLE_BYTES {
                let message = "the refcount table would be larger than any reader accepts: use larger clusters";
                return Err(Error::new(ErrorKind::Limit, message).field("refcount_bits").value(new.refcount_bits()));
            }
            if needed <= table_clusters {
                return Ok(table_clusters);
            }
            table_clusters = needed;
        }
    }

    /// A place for each block. A block is counted itself, perhaps by a block that had none to count before.
    async fn place_blocks(&mut self, mut wanted: BTreeSet<u64>, new: Geometry) -> Result<BTreeMap<u64, u64>> {
        let mut places = BTreeMap::new();
        while let Some(index) = wanted.pop_first() {
            if places.contains_key(&index) {
                continue;
            }
            let host = self.take(1).await?;
            places.insert(index, host);
            wanted.insert(new.refcount_table_index(host >> new.cluster_bits()));
        }
        Ok(places)
    }

    async fn write_blocks(&mut self, places: &BTreeMap<u64, u64>, new: Geometry) -> Result<()> {
        let per_block = new.refcount_block_entries();
        let mut freed = Vec::new();
        let mut writes = Vec::new();
        // Clusters that the old blocks alone have counted are free afterwards, too.
        let mut counted = 0;
        for (index, host) in places {
            let mut block = IoBuf::zeroed(new.cluster_size() as usize);
            let first = index * per_block;
            self.note_freed(counted..first, &mut freed).await?;
            counted = first + per_block;
            let mut start = first;
            while start < counted {
                let stop = (start + CLUSTERS_AT_ONCE).min(counted);
                let counts = self.new_counts(start..stop, Some(&mut freed)).await?;
                for (cluster, count) in (start..stop).zip(counts).filter(|(_, count)| *count != 0) {
                    check_fits(cluster, count, new)?;
                    refcount::set(&mut block, new.refcount_order(), (cluster - first) as usize, count);
                }
                start = stop;
            }
            writes.push((*host, block));
            if writes.len() * new.cluster_size() as usize >= WRITE_BYTES {
                write_all(&self.image.file, std::mem::take(&mut writes)).await?;
            }
        }
        write_all(&self.image.file, writes).await?;
        let end = self.image.geometry.clusters(self.image.file.len());
        self.note_freed(counted..end, &mut freed).await?;
        self.freed = freed;
        self.advance(1)
    }

    /// Notes the clusters that get free where no block counts afterwards.
    async fn note_freed(&mut self, clusters: Range<u64>, freed: &mut Vec<Range<u64>>) -> Result<()> {
        let mut changed: Vec<u64> =
            self.changes.range(clusters.start..clusters.end.max(clusters.start)).map(|(c, _)| *c).collect();
        changed.extend(self.dropped.within(clusters).flatten());
        changed.sort_unstable();
        for cluster in changed {
            self.new_counts(cluster..cluster + 1, Some(freed)).await?;
        }
        Ok(())
    }

    /// Everything new is on disk: switches the header to it.
    async fn switch(&self, old: &Header) -> Result<()> {
        let file = &self.image.file;
        let (result, cluster) = file.read_at(IoBuf::zeroed(old.cluster_size() as usize), 0).await;
        result?;
        let stages = switch_header(&cluster, old, &self.new)?;
        file.sync().await?;
        for stage in stages {
            for (offset, bytes) in stage {
                file.write_at(IoBuf::copy_from(&bytes), offset).await.0?;
            }
            file.sync().await?;
        }
        Ok(())
    }
}

fn check_fits(cluster: u64, count: u64, geometry: Geometry) -> Result<()> {
    if count <= geometry.max_refcount() {
        return Ok(());
    }
    let message = format!(
        "Cannot decrease refcount entry width to {} bits: Cluster at offset {:#x} has a refcount of {count}",
        geometry.refcount_bits(),
        cluster << geometry.cluster_bits()
    );
    Err(Error::new(ErrorKind::InvalidArgument, message).field("refcount_bits"))
}
