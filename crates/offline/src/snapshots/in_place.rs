// SPDX-License-Identifier: Apache-2.0 OR MIT
//! An operation where there is little room: the tables that differ are new, counts and flags change in place.
//!
//! A whole set of new metadata needs space that a full disk lacks, and a full disk is the reason to delete a snapshot. So after
//! ENOSPC only the snapshot table and an L1 table with other entries go to free clusters. One write of the header's first sector
//! switches to them and sets the dirty bit. Counts and COPIED flags follow in place, then the dirty bit goes. A cut in between
//! leaves a dirty image, which `check -r all` restores. Version 2 has no dirty bit: there a deletion lowers the counts that fall
//! to zero. The other counts stay too high: with a lower one and before its COPIED flag, a cut would leave an error. No other
//! operation goes this way.

use super::free::{FreeClusters, give_back, read_block};
use super::plan::{Change, CountSurvey, Deltas};
use super::publish::{Publication, flagged, no_change, note_freed};
use super::{Image, tree};
use cowshed_layout::qcow2::features::{AUTOCLEAR_KNOWN, INCOMPAT_DIRTY};
use cowshed_layout::qcow2::{L1Entry, L2Entry, RefcountTableEntry, refcount};
use cowshed_storage::{File, IoBuf};
use cowshed_types::{Errno, Error, HostOffset, Result, slip};
use std::collections::BTreeMap;
use std::ops::Range;

/// Written in place at once, in bytes: a block that holds an entry has space for all of it.
const PIECE_BYTES: usize = 4096;

impl Image {
    /// True where counts may change in place.
    pub(super) fn may_change_in_place(&self, change: &Change) -> bool {
        self.header.version >= 3 || change.raised.is_none()
    }
}

impl Publication<'_> {
    /// Carries the change out with new tables where they differ alone. Returns the number of clusters whose count is
    /// too high for lack of a dirty bit. The freed clusters, whose space isn't given back yet, come with it.
    pub(super) async fn run_in_place(mut self, change: Change) -> Result<(u64, Vec<Range<u64>>)> {
        let length = self.image.file.len();
        let placed = self.place_differing(&change).await;
        let (survey, deltas) = match placed {
            Ok(placed) => placed,
            Err(error) => {
                self.image.cut_back(length).await;
                return Err(error);
            }
        };
        let has_dirty_bit = self.image.header.version >= 3;
        if has_dirty_bit && !slip!("counts_in_place_without_the_dirty_bit") {
            self.image.header.incompatible_features |= INCOMPAT_DIRTY;
        }
        self.image.header.autoclear_features &= AUTOCLEAR_KNOWN;
        self.image.write_header().await?;
        self.blocks.extend(survey.blocks.iter().copied());
        let left = self.change_counts(&change, deltas, !has_dirty_bit).await?;
        self.image.file.sync().await?;
        if has_dirty_bit {
            self.change_flags(&change, &survey).await?;
            self.image.file.sync().await?;
            self.image.header.incompatible_features &= !INCOMPAT_DIRTY;
            self.image.write_header().await?;
        }
        let Image { file, geometry, .. } = &self.image;
        if left == 0 {
            give_back(file, *geometry, &self.refcount_table, &self.freed, self.options.discard).await?;
        }
        Ok((left, self.freed))
    }

    /// Writes the tables that differ to free clusters, and counts them. Nothing refers to them yet.
    async fn place_differing(&mut self, change: &Change) -> Result<(CountSurvey, Option<Deltas>)> {
        self.refcount_table = self.image.refcount_table().await?;
        let (survey, deltas) = self.survey(change).await?;
        let mut free = self.image.free_clusters(&self.refcount_table)?;
        let mut raised = BTreeMap::new();
        if change.active != self.image.l1 {
            let active = flagged_table(&change.active, &survey);
            let old_bytes = u64::from(self.image.header.l1_size) * 8;
            self.adjust_range(self.image.header.l1_table_offset, old_bytes, -1);
            self.image.header.l1_table_offset = self.place_bytes(&active, &mut free, &mut raised).await?;
            self.image.header.l1_size = u32::try_from(change.active.len()).unwrap_or(u32::MAX);
        }
        if let Some(taken) = &change.taken {
            let bytes: Vec<u8> = taken.iter().flat_map(|raw| L1Entry(*raw).offset().0.to_be_bytes()).collect();
            let host = self.place_bytes(&bytes, &mut free, &mut raised).await?;
            if let Some(snapshot) = self.image.snapshots.last_mut() {
                snapshot.l1_table_offset = host;
            }
        }
        if change.taken.is_some() || self.image.released.is_some() {
            let table = self.image.snapshot_table()?;
            self.adjust_range(self.image.header.snapshots_offset, self.image.old_table_bytes, -1);
            self.image.header.nb_snapshots = u32::try_from(self.image.snapshots.len()).unwrap_or(u32::MAX);
            self.image.header.snapshots_offset = self.place_bytes(&table, &mut free, &mut raised).await?;
        }
        if let Some(released) = self.image.released.take() {
            self.adjust_range(released.l1_table_offset, u64::from(released.l1_size) * 8, -1);
        }
        self.raise_counts(&raised).await?;
        self.image.file.sync().await?;
        Ok((survey, deltas))
    }

    /// Writes a table to free clusters, without the rest of the last one: its place, 0 for an empty table.
    async fn place_bytes(
        &mut self,
        bytes: &[u8],
        free: &mut FreeClusters,
        raised: &mut BTreeMap<u64, Vec<u64>>,
    ) -> Result<u64> {
        let geometry = self.image.geometry;
        let clusters = geometry.clusters(bytes.len() as u64);
        if clusters == 0 {
            return Ok(0);
        }
        let first = free.take(clusters).await?;
        for cluster in first..first + clusters {
            raised.entry(geometry.refcount_table_index(cluster)).or_default().push(cluster);
        }
        let host = first << geometry.cluster_bits();
        let mut padded = bytes.to_vec();
        padded.resize(bytes.len().next_multiple_of(512), 0);
        self.write_all(vec![(host, IoBuf::copy_from(&padded))]).await?;
        Ok(host)
    }

    fn block_host(&self, index: u64) -> Result<Option<u64>> {
        let raw = self.refcount_table.get(index as usize).copied().unwrap_or(0);
        Ok(RefcountTableEntry(raw).block(self.image.geometry)?.map(|host| host.0))
    }

    /// Gives the clusters of new tables one reference each, in refcount blocks that are there.
    async fn raise_counts(&self, raised: &BTreeMap<u64, Vec<u64>>) -> Result<()> {
        let geometry = self.image.geometry;
        for index in raised.keys() {
            if self.block_host(*index)?.is_none() {
                let message = "there is no room for another refcount block";
                return Err(Error::os(Errno::ENOSPC, message));
            }
        }
        for (index, clusters) in raised {
            let stored = read_block(&self.image.file, geometry, &self.refcount_table, *index).await?;
            let (Some(host), Some(stored)) = (self.block_host(*index)?, stored) else { continue };
            let mut new = stored.to_vec();
            for cluster in clusters {
                let entry = geometry.refcount_block_index(*cluster) as usize;
                refcount::set(&mut new, geometry.refcount_order(), entry, 1);
            }
            write_pieces(&self.image.file, host, &stored, &new).await?;
        }
        Ok(())
    }

    /// Writes the changed counts in place; with `only_free` those that fall to zero. Returns the number of counts that
    /// stay too high.
    async fn change_counts(&mut self, change: &Change, mut kept: Option<Deltas>, only_free: bool) -> Result<u64> {
        let geometry = self.image.geometry;
        let (order, per_block) = (geometry.refcount_order(), geometry.refcount_block_entries());
        let (mut done, mut left) = (0, 0);
        let windows = self.windows.ranges().chain(std::iter::once(u64::MAX..u64::MAX));
        for window in windows {
            let deltas = match kept.take() {
                Some(deltas) => deltas,
                None if window.is_empty() => self.image.deltas(&no_change(), 0..0, self.watch).await?,
                None => self.image.deltas(change, window.clone(), &|_, _| true).await?,
            };
            let end = window.end.div_ceil(per_block);
            let indices: Vec<u64> = self.blocks.range(done..end).copied().collect();
            for index in indices {
                let stored = read_block(&self.image.file, geometry, &self.refcount_table, index).await?;
                let mut too_high = 0;
                let by = |cluster| deltas.get(cluster) + self.extra.get(&cluster).copied().unwrap_or(0);
                if only_free && let Some(stored) = &stored {
                    let old = |cluster: u64| refcount::get(stored, order, (cluster % per_block) as usize);
                    let stays =
                        |cluster: &u64| by(*cluster) != 0 && old(*cluster).checked_add_signed(by(*cluster)) != Some(0);
                    too_high = (index * per_block..(index + 1) * per_block).filter(stays).count() as u64;
                }
                let lowered = |cluster: u64| match &stored {
                    Some(stored) if only_free => {
                        let old = refcount::get(stored, order, (cluster % per_block) as usize);
                        if old.checked_add_signed(by(cluster)) == Some(0) { by(cluster) } else { 0 }
                    }
                    _ => by(cluster),
                };
                let new = self.image.new_counts(index, stored.as_deref(), lowered)?;
                left += too_high;
                if let (Some(new), Some(stored), Some(host)) = (new, stored, self.block_host(index)?) {
                    note_freed(&mut self.freed, index * per_block, &stored, &new, order);
                    write_pieces(&self.image.file, host, &stored, &new).await?;
                }
            }
            done = end;
        }
        Ok(left)
    }

    /// Writes the COPIED flags of the active tables in place.
    async fn change_flags(&self, change: &Change, survey: &CountSurvey) -> Result<()> {
        let Image { file, geometry, header, .. } = &self.image;
        let tables = tree::tables(&change.active, *geometry, file.len())?;
        let words = (geometry.l2_entry_size() / 8) as usize;
        for table in &tables {
            let mut changed = None;
            tree::for_tables(file, *geometry, std::slice::from_ref(table), |l1_index, host, bytes| {
                let first = l1_index as u64 * geometry.l2_entries();
                let mut new = bytes.to_vec();
                for (index, word) in new.as_chunks_mut::<8>().0.iter_mut().step_by(words).enumerate() {
                    let single = survey.single_entries.get(first + index as u64);
                    *word = flagged(L2Entry(u64::from_be_bytes(*word)), single).0.to_be_bytes();
                }
                changed = (new != bytes).then(|| (host, bytes.to_vec(), new));
                Ok(())
            })
            .await?;
            if let Some((host, old, new)) = changed {
                write_pieces(file, host, &old, &new).await?;
            }
        }
        // A new one has its flags.
        if change.active == self.image.l1 {
            let old: Vec<u8> = change.active.iter().flat_map(|raw| raw.to_be_bytes()).collect();
            write_pieces(file, header.l1_table_offset, &old, &flagged_table(&change.active, survey)).await?;
        }
        Ok(())
    }
}

/// An L1 table with its COPIED flags as they should be.
fn flagged_table(l1: &[u64], survey: &CountSurvey) -> Vec<u8> {
    let entry = |(index, raw): (usize, &u64)| {
        let host = L1Entry(*raw).offset().0;
        let single = host != 0 && survey.single_tables.get(index as u64);
        if single { L1Entry::new(HostOffset(host), true).0 } else { host }
    };
    l1.iter().enumerate().map(entry).flat_map(u64::to_be_bytes).collect()
}

/// Writes the pieces of a table that differ from the present ones.
async fn write_pieces(file: &File, host: u64, old: &[u8], new: &[u8]) -> Result<()> {
    for (number, (old, new)) in old.chunks(PIECE_BYTES).zip(new.chunks(PIECE_BYTES)).enumerate() {
        if old != new {
            let at = host + (number * PIECE_BYTES) as u64;
            file.write_at(IoBuf::copy_from(new), at).await.0.map_err(|error| error.offset(at))?;
        }
    }
    Ok(())
}
