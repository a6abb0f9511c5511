// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The map of the ranges that a rescue could read and of the lost ones.

use crate::info::SnapshotInfo;
use cowshed_layout::qcow2::SnapshotName;
use cowshed_rescue::{DamagedImage, Doubt, L1Target, Loss, Orphan, OrphanKind, SnapshotList};
use serde::Serialize;
use std::ops::Range;

/// Ranges that are listed; more are only counted in bytes.
const RANGES_MAX: usize = 1 << 20;

/// A range of the disk that is lost: zeroes in the target.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Lost {
    /// First byte of the disk.
    pub start: u64,
    /// Bytes.
    pub length: u64,
    /// Why, in a word.
    pub reason: &'static str,
    /// More about the reason, in a sentence.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    /// Host offset of the first entry of that kind.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entry_offset: Option<u64>,
    /// That entry.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entry: Option<String>,
}

/// A range of the disk that was read, but may not have the written data.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Doubtful {
    /// First byte of the disk.
    pub start: u64,
    /// Bytes.
    pub length: u64,
    /// Why, in a word.
    pub reason: &'static str,
    /// Host offset of the first entry of that kind.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entry_offset: Option<u64>,
}

/// A table that nothing leads to. All of it is a guess.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct OrphanTable {
    /// Host offset in bytes.
    pub offset: u64,
    /// The kind of table that it resembles: "l2", "l1" or "unclear".
    pub looks_like: &'static str,
    /// Entries that aren't 0.
    pub entries: u64,
    /// Lowest host offset that it points to, in bytes.
    pub first_target: u64,
    /// The suggested place: first byte of the disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub suggested: Option<u64>,
    /// The place by the user's choice: first byte of the disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub assigned: Option<u64>,
}

impl From<Orphan> for OrphanTable {
    fn from(orphan: Orphan) -> Self {
        let Orphan { offset, kind, entries, first_target } = orphan;
        let looks_like = kind.name();
        OrphanTable { offset, looks_like, entries, first_target, suggested: None, assigned: None }
    }
}

/// The result of a rescue.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct RescueMap {
    /// The damaged image.
    pub image: String,
    /// The internal snapshot that was read, as the user named it; absent for the disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
    /// The internal snapshots that can be read.
    pub snapshots: Vec<SnapshotInfo>,
    /// Size of the disk in bytes.
    pub virtual_size: u64,
    /// Bytes.
    pub cluster_size: u64,
    /// Bytes of the disk that one L2 table maps.
    pub table_coverage: u64,
    /// Bytes of data that were read.
    pub data_bytes: u64,
    /// Bytes that are zeroes.
    pub zero_bytes: u64,
    /// Bytes that are lost.
    pub lost_bytes: u64,
    /// Bytes that were read, but are doubtful.
    pub doubtful_bytes: u64,
    /// Further remarks.
    pub notes: Vec<String>,
    /// The lost ranges.
    pub lost: Vec<Lost>,
    /// The doubtful ranges.
    pub doubtful: Vec<Doubtful>,
    /// Tables that nothing leads to, if they were looked for.
    pub orphans: Vec<OrphanTable>,
    /// Ranges of the disk that have no L2 table: first byte and length.
    pub without_table: Vec<(u64, u64)>,
    /// Number of ranges that are not listed.
    pub omitted: u64,
}

impl RescueMap {
    pub(super) fn new(image: &str, wreck: &DamagedImage) -> Self {
        RescueMap {
            image: image.to_owned(),
            virtual_size: wreck.size(),
            cluster_size: wreck.geometry().cluster_size(),
            table_coverage: wreck.geometry().l2_coverage(),
            notes: wreck.notes().to_vec(),
            ..RescueMap::default()
        }
    }

    /// Lists the snapshots in the table. Where that is damaged, no byte of the disk is lost for it.
    pub(super) fn note_snapshots(&mut self, list: SnapshotList, read: Option<&SnapshotName>) {
        self.snapshots = list.snapshots.iter().map(SnapshotInfo::from).collect();
        self.notes.extend(list.fault);
        self.snapshot = read.map(|snapshot| snapshot.name.clone());
    }

    /// True when everything was read.
    pub fn is_whole(&self) -> bool {
        self.lost_bytes == 0
    }

    /// 0 everything was read, 2 something is lost.
    pub fn exit_code(&self) -> u8 {
        if self.is_whole() { 0 } else { 2 }
    }

    /// Notes which ranges have no table. Where as many tables are lost as L2 tables were found, they may belong together in
    /// their order.
    pub(super) fn note_slots(&mut self, wreck: &DamagedImage) {
        let coverage = self.table_coverage;
        let mut lost = Vec::new();
        for index in 0..wreck.slots() {
            let slot = wreck.slot(index);
            if matches!(slot, L1Target::Table { .. }) {
                continue;
            }
            let start = index * coverage;
            if matches!(slot, L1Target::Lost(_)) {
                lost.push(start);
            }
            let len = coverage.min(self.virtual_size - start);
            match self.without_table.last_mut() {
                Some((before, sum)) if *before + *sum == start => *sum += len,
                _ => self.without_table.push((start, len)),
            }
        }
        let is_l2 = |orphan: &&mut OrphanTable| orphan.looks_like == OrphanKind::L2.name();
        if self.orphans.iter_mut().filter(is_l2).count() == lost.len() {
            self.orphans.iter_mut().filter(is_l2).zip(lost).for_each(|(orphan, guest)| orphan.suggested = Some(guest));
        }
    }

    pub(super) fn note_assigned(&mut self, offset: u64, guest: u64) {
        if let Some(orphan) = self.orphans.iter_mut().find(|orphan| orphan.offset == offset) {
            orphan.assigned = Some(guest);
        }
    }

    pub(super) fn lose(&mut self, range: Range<u64>, loss: &Loss, entry: Option<(u64, u64)>) {
        if range.is_empty() {
            return;
        }
        let length = range.end - range.start;
        self.lost_bytes += length;
        if let Some(last) = self.lost.last_mut()
            && last.start + last.length == range.start
            && last.reason == loss.name()
            && last.detail.as_deref() == loss.detail()
        {
            last.length += length;
            return;
        }
        if self.lost.len() >= RANGES_MAX {
            self.omitted += 1;
            return;
        }
        self.lost.push(Lost {
            start: range.start,
            length,
            reason: loss.name(),
            detail: loss.detail().map(str::to_owned),
            entry_offset: entry.map(|(offset, _)| offset),
            entry: entry.map(|(_, raw)| format!("{raw:#018x}")),
        });
    }

    pub(super) fn doubt(&mut self, range: Range<u64>, doubt: Doubt, entry: Option<(u64, u64)>) {
        let length = range.end - range.start;
        self.doubtful_bytes += length;
        if let Some(last) = self.doubtful.last_mut()
            && last.start + last.length == range.start
            && last.reason == doubt.name()
        {
            last.length += length;
            return;
        }
        if self.doubtful.len() >= RANGES_MAX {
            self.omitted += 1;
            return;
        }
        let entry_offset = entry.map(|(offset, _)| offset);
        self.doubtful.push(Doubtful { start: range.start, length, reason: doubt.name(), entry_offset });
    }
}
