// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A new refcount structure in fresh clusters, published by one write of twelve bytes of the header.

use super::metadata::CheckScope;
use super::relocate::Copy;
use super::session::CheckSession;
use cowshed_layout::qcow2::offset;
use cowshed_qcow2::check::{Counts, Ledger, RefcountLayout, fill_block, plan_layout};
use cowshed_types::memory::try_collect;
use cowshed_types::{Error, ErrorKind, Result};
use std::collections::BTreeSet;

impl CheckSession<'_> {
    /// Replaces refcount table and blocks. With `keep` no count becomes smaller than it was. The clusters of
    /// `copies` get the counts that they will need.
    pub(super) async fn rebuild(&mut self, keep: bool, copies: &[Copy]) -> Result<()> {
        let entries = self.geometry.refcount_block_entries();
        let windows = self.windows();
        let mut needed = BTreeSet::new();
        let mut last = None;
        for window in windows.clone() {
            let counts = self.count_for_rebuild(window, copies).await?;
            for index in self.blocks_of(&counts) {
                let first = index * entries;
                let mut clusters = first..(first + entries).min(counts.end());
                let is_old = self.refcount_block(index).is_some();
                let kept = keep && (is_old || !self.unread_snapshots.is_empty() && first < self.file_clusters);
                if kept || clusters.any(|cluster| counts.references(cluster) != 0) {
                    needed.insert(index);
                }
            }
            last = Some(counts);
        }
        let len = self.file.len();
        loop {
            let layout = self.place_layout(needed.clone()).await?;
            match self.write_layout(&layout, &windows, keep, copies, last.take()).await {
                // The undo log knows the writes. Without one the repair begins again, in free clusters of the file.
                Err(error) if error.kind() == ErrorKind::NoSpace && !self.stays_inside && self.journal.is_none() => {
                    self.file.set_len(len).await?;
                    self.stays_inside = true;
                }
                written => {
                    written?;
                    return self.publish(&layout).await;
                }
            }
        }
    }

    /// Writes the blocks and the table of a new structure. `last` are the counts of the last window, where they are at hand.
    async fn write_layout(
        &self,
        layout: &RefcountLayout,
        windows: &[std::ops::Range<u64>],
        keep: bool,
        copies: &[Copy],
        mut last: Option<Counts>,
    ) -> Result<()> {
        for window in windows {
            let counts = match last.take().filter(|counts| counts.first() == window.start) {
                Some(counts) => counts,
                None => self.count_for_rebuild(window.clone(), copies).await?,
            };
            self.write_blocks(layout, &counts, keep).await?;
        }
        let start = layout.clusters.start << self.geometry.cluster_bits();
        self.write(start, &layout.table(self.geometry)?).await
    }

    /// Finds a place for the new structure, whose length depends on the place.
    async fn place_layout(&mut self, needed: BTreeSet<u64>) -> Result<RefcountLayout> {
        let mut clusters = 1;
        loop {
            let room = self.take_room(clusters, true).await?;
            let first = room.first().copied().unwrap_or_default();
            let layout = plan_layout(self.geometry, needed.clone(), first)?;
            let wanted = layout.clusters.end - layout.clusters.start;
            if wanted <= clusters {
                return Ok(layout);
            }
            room.iter().for_each(|cluster| _ = self.taken.remove(cluster));
            clusters = wanted;
        }
    }

    async fn count_for_rebuild(&self, window: std::ops::Range<u64>, copies: &[Copy]) -> Result<Counts> {
        let mut silent = Ledger::new(0);
        let (counts, _) = self.count_window(window, CheckScope::WithoutRefcounts, &mut silent).await?;
        for copy in copies {
            counts.add(copy.cluster, copy.weight)?;
        }
        Ok(counts)
    }

    /// Writes the new blocks that count clusters of the window, and with the last window those behind it.
    async fn write_blocks(&self, layout: &RefcountLayout, counts: &Counts, keep: bool) -> Result<()> {
        let cluster_size = self.geometry.cluster_size() as usize;
        let mut mine = self.blocks_of(counts);
        if counts.end() > self.file_clusters {
            mine.end = u64::MAX;
        }
        for (nth, index) in layout.blocks.iter().enumerate().filter(|(_, index)| mine.contains(index)) {
            let mut block = vec![0; cluster_size];
            let old = match self.refcount_block(*index).filter(|_| keep) {
                Some(place) => Some(self.read(place, cluster_size).await?),
                None => None,
            };
            // A snapshot that can't be read may have any cluster whose count is lost.
            let hidden = (self.unread_snapshots.len() as u64, self.file_clusters);
            fill_block(counts, self.geometry, &mut block, *index, &layout.clusters, (old.as_deref(), hidden));
            self.write(layout.block_cluster(nth) << self.geometry.cluster_bits(), &block).await?;
        }
        Ok(())
    }

    async fn publish(&mut self, layout: &RefcountLayout) -> Result<()> {
        let table = layout.table(self.geometry)?;
        let start = layout.clusters.start << self.geometry.cluster_bits();
        self.barrier().await?;
        let clusters = u32::try_from(layout.table_clusters).map_err(|_| Error::internal("refcount table too large"))?;
        // Bytes 48 to 59: offset and clusters of the table, in one sector and one write.
        let mut fields = [0; 12];
        fields[..8].copy_from_slice(&start.to_be_bytes());
        fields[8..].copy_from_slice(&clusters.to_be_bytes());
        self.write(offset::REFCOUNT_TABLE_OFFSET, &fields).await?;
        self.barrier().await?;
        self.header.refcount_table_offset = start;
        self.header.refcount_table_clusters = clusters;
        self.refcount_table = try_collect(table.as_chunks::<8>().0.iter().map(|word| u64::from_be_bytes(*word)))?;
        self.needs_rebuild = false;
        self.file_grew();
        Ok(())
    }
}
