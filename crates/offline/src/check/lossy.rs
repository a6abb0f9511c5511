// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The steps of a repair that give up or guess, and only on demand.

use super::session::CheckSession;
use cowshed_layout::qcow2::{L1Entry, features, offset, snapshot};
use cowshed_qcow2::check::{EditStep, Finding, FindingKind, INACTIVE, give_up_l1, give_up_l2};
use cowshed_types::{Error, Result};

impl CheckSession<'_> {
    /// Gives up entries whose targets can't be reached, with a barrier. Clusters below it aren't freed in the same run.
    pub(super) async fn give_up(&mut self) -> Result<bool> {
        let has_backing = self.header.backing_file.is_some();
        let mut changed = self.give_up_in_tables(has_backing).await?;
        let context = self.context;
        let edit = move |entry: L1Entry| give_up_l1(&context, has_backing, entry);
        let new: Vec<u64> = self.l1.iter().map(|raw| edit(L1Entry(*raw)).0).collect();
        changed |= self.rewrite_active_l1(new).await?;
        if changed {
            self.barrier().await?;
        }
        Ok(changed | self.edit_snapshot_l1s(edit).await?)
    }

    /// Bitmaps can't show which parts of the disk are given up, so they go first, durably: a backup by them would miss
    /// those parts. Returns a note when it was done.
    pub(super) async fn distrust_bitmaps(&mut self) -> Result<Option<String>> {
        if self.bitmaps.is_empty() || self.stale_bitmaps || !self.gives_up_parts_of_the_disk().await? {
            return Ok(None);
        }
        self.end_bitmaps().await?;
        let count = self.bitmaps.len();
        self.bitmaps.clear();
        self.stale_bitmaps = true;
        Ok(Some(format!("dirty bitmaps were removed ({count}): they don't know what was given up")))
    }

    /// From now on no program trusts the bitmaps, durably.
    async fn end_bitmaps(&mut self) -> Result<()> {
        let gone = features::AUTOCLEAR_BITMAPS | features::AUTOCLEAR_BITMAP_JOURNAL;
        let left = self.header.autoclear_features & !gone;
        self.write(offset::AUTOCLEAR_FEATURES, &left.to_be_bytes()).await?;
        self.barrier().await?;
        self.header.autoclear_features = left;
        Ok(())
    }

    /// Snapshots and bitmaps that can't be read go, durably, so that the rest can be counted. True when there were any.
    pub(super) async fn give_up_owners(&mut self, notes: &mut Vec<String>) -> Result<bool> {
        if self.lost_bitmaps {
            self.end_bitmaps().await?;
            notes.push("dirty bitmaps were given up: they can't be read".to_owned());
        }
        if self.lost_snapshots {
            let (had, kept) = (self.declared_snapshots, self.snapshots.len() as u32);
            let start = match kept {
                0 => 0,
                _ if self.scattered_snapshots => self.move_snapshot_table(notes).await?,
                _ => self.header.snapshots_offset,
            };
            // The number of snapshots, and behind it where their table is: in one sector.
            let fields = [&kept.to_be_bytes()[..], &start.to_be_bytes()].concat();
            self.write(offset::NB_SNAPSHOTS, &fields).await?;
            self.barrier().await?;
            let given_up = had.saturating_sub(kept);
            notes.push(format!("{given_up} of {had} internal snapshots were given up: they can't be read"));
        }
        Ok(self.lost_bitmaps || self.lost_snapshots)
    }

    /// The snapshots that are left get a table of their own, counted and durable, to which nothing refers yet. No count
    /// falls: those that can't be read are in the image until it does. Returns its offset.
    async fn move_snapshot_table(&mut self, notes: &mut Vec<String>) -> Result<u64> {
        // The file is going to grow: an L1 table that should be there must not come into being.
        for entry in std::mem::take(&mut self.lost_near_end) {
            self.write(entry + snapshot::L1_SIZE_OFFSET, &[0; 4]).await?;
        }
        self.barrier().await?;
        let copies = self.write_snapshot_table().await?;
        self.edit_entries(EditStep::Revoke).await?;
        self.raise_counts(true, &copies, notes).await?;
        let pointer = copies.first().and_then(|copy| copy.pointer);
        pointer.map(|(_, start)| start).ok_or_else(|| Error::internal("a snapshot table without a place"))
    }

    async fn gives_up_parts_of_the_disk(&self) -> Result<bool> {
        let has_backing = self.header.backing_file.is_some();
        if self.l1.iter().any(|raw| give_up_l1(&self.context, has_backing, L1Entry(*raw)).0 != *raw) {
            return Ok(true);
        }
        for table in self.tables.iter().filter(|table| table.weight != 0 && table.l1_index != INACTIVE) {
            let bytes = self.read(table.offset, self.geometry.cluster_size() as usize).await?;
            if !give_up_l2(&self.context, has_backing, &bytes).is_empty() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    async fn give_up_in_tables(&self, has_backing: bool) -> Result<bool> {
        let cluster_size = self.geometry.cluster_size() as usize;
        let mut changed = false;
        for table in self.tables.iter().filter(|table| table.weight != 0 && !self.is_claimed_twice(table.offset)) {
            let bytes = self.read(table.offset, cluster_size).await?;
            let edits = give_up_l2(&self.context, has_backing, &bytes);
            if edits.is_empty() {
                continue;
            }
            self.write_words(table.offset, &bytes, edits.iter().map(|(word, new)| (*word as u64, *new))).await?;
            changed = true;
        }
        Ok(changed)
    }

    /// "Raw external data" can't be true where a cluster is elsewhere than the guest's: the bit goes, and the guest keeps
    /// its view. With a barrier.
    pub(super) async fn end_raw_data(&mut self, findings: &[Finding]) -> Result<bool> {
        if !findings.iter().any(|finding| matches!(finding.kind, FindingKind::DataFileOffset { .. })) {
            return Ok(false);
        }
        let left = self.header.autoclear_features & !features::AUTOCLEAR_RAW_DATA;
        self.write(offset::AUTOCLEAR_FEATURES, &left.to_be_bytes()).await?;
        self.barrier().await?;
        self.header.autoclear_features = left;
        self.context.data_file_raw = false;
        Ok(true)
    }
}
