// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Repairs, in the only order that is safe at every moment, with a barrier after each step. Rights to write in place
//! are revoked, counts raised, entries changed, counts lowered, rights granted. The header's bits are cleared last.

use super::metadata::CheckScope;
use super::relocate::Copy;
use super::session::CheckSession;
use super::sweep::OverlapEntry;
use super::{CheckReport, report_of};
use crate::bitmap_journal;
use cowshed_layout::qcow2::{L1Entry, L2Entry, features, offset, refcount};
use cowshed_qcow2::check::{
    Counts, EditStep, Finding, FindingKind, INACTIVE, Ledger, edit_l1, edit_l2, lower_block, raise_block,
};
use cowshed_types::memory::{set_for, try_collect, try_extend, vec_for};
use cowshed_types::{Error, Repair, Result};

/// The note about refcounts in a new place, in QEMU's words.
pub const REBUILT: &str = "Rebuilding refcount structure";

/// Repairs an image that was surveyed into `before`.
pub(super) async fn run(
    mut session: CheckSession<'_>,
    before: Ledger,
    overlaps: &[OverlapEntry],
) -> Result<CheckReport> {
    let all = session.options.repair == Repair::All;
    if !session.obstacles.is_empty() {
        let mut report = report_of(before);
        report.notes = session.obstacles.iter().map(|why| format!("not repaired: {why}")).collect();
        return Ok(report);
    }
    let mut notes = Vec::new();
    let file = session.file;
    let mut changed = session.give_up_owners(&mut notes).await?;
    if changed {
        // The result is another image, whose damage is looked for anew.
        let mut now = Ledger::new(session.options.findings_max);
        session = CheckSession::load(file, session.options, session.watch, session.journal, &mut now).await?;
        let overlaps = session.survey(&mut now).await?;
        if session.obstacles.is_empty() {
            session.repair(&now, &overlaps, &mut notes).await?;
        }
        notes.extend(session.obstacles.iter().map(|why| format!("not repaired: {why}")));
    } else if before.counters.corruptions + before.counters.leaks != 0 {
        changed = session.repair(&before, overlaps, &mut notes).await?;
    }
    let mut after = Ledger::new(session.options.findings_max);
    let mut repaired = Vec::new();
    let was = before.counters;
    let mut followed = 0;
    let mut session = if changed {
        let mut reread = CheckSession::load(file, session.options, session.watch, session.journal, &mut after).await?;
        reread.survey(&mut after).await?;
        (repaired, followed) = repaired_findings(before, &after, reread.geometry.cluster_bits())?;
        reread
    } else {
        after = before;
        session
    };
    let clean = after.counters.corruptions == 0;
    if clean && changed && session.options.lossy {
        session.free_past_end().await?;
    }
    changed |= session.clear_bits(clean, all).await?;
    changed |= clean && session.end_bitmap_journal().await?;
    let mut report = report_of(after);
    let fixed = was.corruptions.saturating_sub(report.counters.corruptions);
    report.counters.corruptions_fixed = fixed.saturating_sub(followed);
    report.counters.leaks_fixed = was.leaks.saturating_sub(report.counters.leaks);
    report.repaired = repaired;
    report.notes = notes;
    report.changed = changed;
    Ok(report)
}

/// The findings from before that are gone. A flag that was wrong beside a wrong count alone is no finding of its own.
/// The second number counts these, and the list leaves them out.
fn repaired_findings(before: Ledger, after: &Ledger, cluster_bits: u32) -> Result<(Vec<Finding>, u64)> {
    let key = |finding: &Finding| (finding.order(), std::mem::discriminant(&finding.kind));
    let mut left = set_for(after.findings.len())?;
    left.extend(after.findings.iter().map(key));
    let mut gone = before.findings;
    gone.retain(|finding| !left.contains(&key(finding)));
    let counted = |finding: &Finding| match finding.kind {
        FindingKind::RefcountLow { cluster, references, .. } | FindingKind::Leak { cluster, references, .. } => {
            Some((cluster, references == 1))
        }
        _ => None,
    };
    let mut single = set_for(gone.iter().filter_map(counted).count())?;
    single.extend(gone.iter().filter_map(counted));
    let found = gone.len();
    let flag_of = |offset: u64, entry: u64| (offset >> cluster_bits, entry >> 63 != 0);
    gone.retain(|finding| {
        !single.contains(&match finding.kind {
            FindingKind::CopiedL1 { entry, .. } => flag_of(L1Entry(entry).offset().0, entry),
            FindingKind::CopiedL2 { entry, .. } => flag_of(L2Entry(entry).offset().0, entry),
            _ => return true,
        })
    });
    let followed = (found - gone.len()) as u64;
    gone.iter_mut().for_each(|finding| finding.repaired = true);
    // In place: a stable sort takes as much memory again.
    gone.sort_unstable_by_key(Finding::order);
    Ok((gone, followed))
}

impl CheckSession<'_> {
    /// All steps. Returns true when anything was written.
    async fn repair(&mut self, before: &Ledger, overlaps: &[OverlapEntry], notes: &mut Vec<String>) -> Result<bool> {
        let mut changed = false;
        let mut hidden = before.hidden_references;
        self.hides_references = hidden;
        if self.options.repair == Repair::Leaks && !overlaps.is_empty() {
            notes.push("nothing was changed: the guest would see it where its data overlaps with metadata".to_owned());
            return Ok(false);
        }
        if self.options.repair == Repair::Leaks && before.uncounted {
            notes.push("nothing was changed: clusters in use count as free, which 'check -r all' repairs".to_owned());
            return Ok(false);
        }
        if self.options.repair == Repair::All {
            let mut copies = self.copy_snapshot_table(notes).await?;
            let snapshot_table = copies.first().and_then(|copy| copy.pointer);
            let mut movable = try_collect(overlaps.iter().copied())?;
            for surplus in self.overfull(before).await?.into_values() {
                try_extend(&mut movable, surplus)?;
            }
            movable.sort_unstable_by_key(|entry| entry.at);
            copies.extend(self.copy_overlaps(&movable, notes).await?);
            changed |= !copies.is_empty();
            changed |= self.edit_entries(EditStep::Revoke).await?;
            changed |= self.raise_counts(hidden, &copies, notes).await?;
            self.switch_to_copies(&copies).await?;
            if let Some((_, start)) = snapshot_table {
                self.switched_snapshot_table(start);
            }
            changed |= self.edit_entries(EditStep::Normalise).await?;
            changed |= self.normalise_snapshot_l1s().await?;
            changed |= self.end_raw_data(&before.findings).await?;
            if self.options.lossy {
                notes.extend(self.distrust_bitmaps().await?);
                changed |= self.give_up().await?;
            }
        }
        if self.stale_bitmaps {
            match self.drop_stale_bitmaps().await? {
                true => changed = true,
                false => hidden = true,
            }
        }
        if hidden {
            self.note_unread_snapshots(notes);
            notes.push("nothing was freed: what can't be read may use what looks leaked".to_owned());
            if self.options.repair == Repair::All {
                // By the stored count: a writer that went elsewhere instead would free the cluster.
                changed |= self.edit_entries(EditStep::Grant).await?;
            }
            return Ok(changed);
        }
        changed |= self.lower_counts().await?;
        changed |= self.edit_entries(EditStep::Grant).await?;
        Ok(changed)
    }

    /// One step over all entries of L2 tables and the active L1 table, and a barrier when it wrote anything.
    pub(super) async fn edit_entries(&mut self, step: EditStep) -> Result<bool> {
        let mut changed = false;
        for window in self.windows() {
            let mut silent = Ledger::new(0);
            let (counts, _) = self.count_window(window, CheckScope::Whole, &mut silent).await?;
            changed |= self.edit_tables(&counts, step).await?;
            changed |= self.edit_active_l1(&counts, step).await?;
        }
        if changed {
            self.barrier().await?;
        }
        Ok(changed)
    }

    async fn edit_tables(&self, counts: &Counts, step: EditStep) -> Result<bool> {
        let cluster_size = self.geometry.cluster_size() as usize;
        let mut changed = false;
        for table in self.tables.iter().filter(|table| table.weight != 0) {
            let bytes = self.read(table.offset, cluster_size).await?;
            let edits = edit_l2(&self.context, counts, step, table.l1_index != INACTIVE, &bytes);
            if edits.is_empty() || self.is_claimed_twice(table.offset) {
                continue;
            }
            let edits = edits.iter().map(|(word, new)| (*word as u64, *new));
            self.write_words(table.offset, &bytes, edits).await?;
            changed = true;
        }
        Ok(changed)
    }

    /// A table that shares its cluster with another structure must not be written: the bytes may be the other's.
    pub(super) fn is_claimed_twice(&self, offset: u64) -> bool {
        self.clashes.binary_search(&(offset >> self.geometry.cluster_bits())).is_ok()
    }

    async fn edit_active_l1(&mut self, counts: &Counts, step: EditStep) -> Result<bool> {
        let mut new = try_collect(self.l1.iter().copied())?;
        for (index, entry) in edit_l1(&self.context, counts, step, &self.l1) {
            new[index] = entry;
        }
        self.rewrite_active_l1(new).await
    }

    /// Writes the differences from the active L1 table.
    pub(super) async fn rewrite_active_l1(&mut self, new: Vec<u64>) -> Result<bool> {
        let changed = self.l1.iter().zip(&new).enumerate().filter(|(_, (old, new))| old != new);
        let edits: Vec<(u64, u64)> = changed.map(|(index, (_, new))| (index as u64, *new)).collect();
        let start = self.header.l1_table_offset;
        let clusters = self.geometry.clusters(self.l1.len() as u64 * 8);
        let mut places = (0..clusters).map(|nth| start + (nth << self.geometry.cluster_bits()));
        if edits.is_empty() || places.any(|place| self.is_claimed_twice(place)) {
            return Ok(false);
        }
        let mut bytes = vec_for(self.l1.len() * 8)?;
        bytes.extend(self.l1.iter().flat_map(|entry| entry.to_be_bytes()));
        self.write_words(start, &bytes, edits.into_iter()).await?;
        self.l1 = new;
        Ok(true)
    }

    /// Writes the sectors of a table that hold changed words, never more than that.
    pub(super) async fn write_words(
        &self,
        start: u64,
        old: &[u8],
        edits: impl Iterator<Item = (u64, u64)>,
    ) -> Result<()> {
        const SECTOR: usize = 512;
        let mut table = try_collect(old.iter().copied())?;
        let mut sectors: Vec<usize> = Vec::new();
        for (word, new) in edits {
            let at = word as usize * 8;
            let target = table.get_mut(at..at + 8).ok_or_else(|| Error::internal("edit behind the end of a table"))?;
            target.copy_from_slice(&new.to_be_bytes());
            if sectors.last() != Some(&(at / SECTOR)) {
                sectors.push(at / SECTOR);
            }
        }
        for run in sectors.chunk_by(|a, b| a + 1 == *b) {
            let from = run[0] * SECTOR;
            let to = ((run[run.len() - 1] + 1) * SECTOR).min(table.len());
            self.write(start + from as u64, &table[from..to]).await?;
        }
        Ok(())
    }

    /// Makes every stored count at least the number of references: in place, or where that can't be, in a structure
    /// made anew.
    pub(super) async fn raise_counts(&mut self, keep: bool, copies: &[Copy], notes: &mut Vec<String>) -> Result<bool> {
        let mut changed = false;
        if !self.needs_rebuild {
            for window in self.windows() {
                let mut silent = Ledger::new(0);
                let (counts, _) = self.count_window(window, CheckScope::Whole, &mut silent).await?;
                changed |= self.raise_window(&counts).await?;
            }
            if changed {
                self.barrier().await?;
            }
        }
        if let Some(why) = self.growth_obstacle().filter(|_| self.needs_rebuild) {
            notes.push(why.to_owned());
        } else if self.needs_rebuild {
            // Structures that move for other damage take this way, too.
            if copies.is_empty() {
                notes.push(REBUILT.to_owned());
            }
            self.rebuild(keep, copies).await?;
            changed = true;
        }
        Ok(changed)
    }

    /// Raises counts in place where possible; a cluster without a block needs a rebuild.
    async fn raise_window(&mut self, counts: &Counts) -> Result<bool> {
        let entries = self.geometry.refcount_block_entries();
        let order = self.geometry.refcount_order();
        let mut changed = false;
        for index in self.blocks_of(counts) {
            let first = index * entries;
            let Some(place) = self.refcount_block(index) else {
                let used = (first.max(counts.first())..(first + entries).min(counts.end()))
                    .any(|cluster| counts.references(cluster) != 0);
                self.needs_rebuild |= used;
                continue;
            };
            let mut block = self.read(place, self.geometry.cluster_size() as usize).await?;
            if !raise_block(counts, order, &mut block, first) {
                continue;
            }
            if self.is_claimed_twice(place) {
                self.needs_rebuild = true;
                continue;
            }
            self.write_buf(place, block).await?;
            changed = true;
        }
        Ok(changed)
    }

    async fn lower_counts(&mut self) -> Result<bool> {
        let entries = self.geometry.refcount_block_entries();
        let order = self.geometry.refcount_order();
        let mut changed = false;
        for window in self.windows() {
            let mut silent = Ledger::new(0);
            let (counts, _) = self.count_window(window, CheckScope::Whole, &mut silent).await?;
            for index in self.blocks_of(&counts) {
                let Some(place) = self.refcount_block(index) else { continue };
                let mut block = self.read(place, self.geometry.cluster_size() as usize).await?;
                let lowered = lower_block(&counts, order, &mut block, index * entries, self.file_clusters);
                if lowered && !self.is_claimed_twice(place) {
                    self.write_buf(place, block).await?;
                    changed = true;
                }
            }
        }
        if changed {
            self.barrier().await?;
        }
        Ok(changed)
    }

    /// Frees clusters past the end of the file, which a look at the file's clusters passes by: their data is given up.
    /// No reference to them is left.
    async fn free_past_end(&self) -> Result<()> {
        self.carry_out_pending().await?;
        let end = self.geometry.clusters(self.file.len());
        let (entries, order) = (self.geometry.refcount_block_entries(), self.geometry.refcount_order());
        let blocks = self.geometry.refcount_table_index(end)..self.refcount_table.len() as u64;
        let mut changed = false;
        for index in blocks {
            let Some(place) = self.refcount_block(index) else { continue };
            let mut block = self.read(place, self.geometry.cluster_size() as usize).await?;
            let lost = end.saturating_sub(index * entries)..entries;
            let used: Vec<u64> = lost.filter(|entry| refcount::get(&block, order, *entry as usize) != 0).collect();
            if used.is_empty() || self.is_claimed_twice(place) {
                continue;
            }
            used.iter().for_each(|entry| refcount::set(&mut block, order, *entry as usize, 0));
            self.write_buf(place, block).await?;
            changed = true;
        }
        if changed { self.barrier().await } else { Ok(()) }
    }

    /// Ends the bitmap journal of an image with snapshots, which an older version of this program left at a crash.
    async fn end_bitmap_journal(&mut self) -> Result<bool> {
        if self.header.nb_snapshots == 0 || self.header.autoclear_features & features::AUTOCLEAR_BITMAP_JOURNAL == 0 {
            return Ok(false);
        }
        self.barrier().await?;
        for stage in bitmap_journal::stages(self.file, &self.header).await? {
            for (at, bytes) in stage {
                self.write(at, &bytes).await?;
            }
            self.barrier().await?;
        }
        self.header.autoclear_features &= !features::AUTOCLEAR_BITMAP_JOURNAL;
        Ok(true)
    }

    /// Clears the dirty bit once no refcount is wrong, and after a full repair the corrupt bit.
    async fn clear_bits(&mut self, clean: bool, all: bool) -> Result<bool> {
        if !clean || self.header.version < 3 {
            return Ok(false);
        }
        let gone = features::INCOMPAT_DIRTY | if all { features::INCOMPAT_CORRUPT } else { 0 };
        let left = self.header.incompatible_features & !gone;
        if left == self.header.incompatible_features {
            return Ok(false);
        }
        // Whatever was written before must be durable before the bit goes.
        self.barrier().await?;
        self.write(offset::INCOMPATIBLE_FEATURES, &left.to_be_bytes()).await?;
        self.barrier().await?;
        self.header.incompatible_features = left;
        Ok(true)
    }
}
