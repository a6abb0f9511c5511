// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The remedy of a repair for a finding, decided before it is applied.

use super::{CheckedStructure, Finding, FindingKind, Ledger};
use cowshed_layout::qcow2::{Header, L1Entry, L2Entry};
use cowshed_types::Result;
use cowshed_types::memory::set_for;
use std::collections::HashSet;

/// The change that a repair makes for a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Remedy {
    /// The stored refcount falls.
    LowerRefcount { to: u64 },
    /// The stored refcount rises.
    RaiseRefcount { to: u64 },
    /// Bit 63 of the entry comes or goes.
    FixCopiedFlag,
    /// Reserved bits of the entry go.
    ClearReservedBits,
    /// Bit 63 of a compressed cluster's entry goes.
    ClearCopiedFlag,
    /// The entry becomes one of a zero cluster without an offset: it reads the same.
    MakeZeroPlain,
    /// The guest's data gets a cluster of its own.
    CopyCluster,
    /// The snapshot table is written anew, with the missing fields and without superfluous data.
    CompleteSnapshots,
    /// Snapshots that can't be read are given up.
    DropSnapshots,
    /// Dirty bitmaps that can't be read are given up, and the others with them.
    DropBitmaps,
    /// Refcount table and blocks are made anew.
    RebuildRefcounts,
    /// The header marks the external data file as raw no more.
    EndRawData,
    /// Data that can't be reached is given up.
    GiveUp,
    /// Subclusters that are allocated and zero at once read as their data.
    TakeData,
}

impl Remedy {
    /// The remedy in words, for a report.
    pub fn describe(self) -> String {
        match self {
            Remedy::LowerRefcount { to } => format!("lower the refcount to {to}"),
            Remedy::RaiseRefcount { to } => format!("raise the refcount to {to}"),
            Remedy::FixCopiedFlag => "correct the copied flag".to_owned(),
            Remedy::ClearReservedBits => "clear the reserved bits".to_owned(),
            Remedy::ClearCopiedFlag => "clear the copied flag".to_owned(),
            Remedy::MakeZeroPlain => "drop the offset of the zero cluster".to_owned(),
            Remedy::CopyCluster => "copy the guest's data to a cluster of its own".to_owned(),
            Remedy::CompleteSnapshots => "write the snapshot table anew with the fields that it must have".to_owned(),
            Remedy::DropSnapshots => "give up the internal snapshots that can't be read".to_owned(),
            Remedy::DropBitmaps => "give up the dirty bitmaps".to_owned(),
            Remedy::RebuildRefcounts => "make the refcount structure anew".to_owned(),
            Remedy::EndRawData => "no longer call the data file raw".to_owned(),
            Remedy::GiveUp => "give it up, so that it reads as zeroes".to_owned(),
            Remedy::TakeData => "take the data of the subclusters".to_owned(),
        }
    }
}

/// The state of the image that decides about remedies, beside the finding itself.
#[derive(Clone, Debug, Default)]
pub struct Outlook {
    /// The reasons that forbid every repair.
    pub obstacles: Vec<String>,
    /// Data that can't be reached may be given up.
    pub lossy: bool,
    /// There is a backing file, which must not show through.
    pub has_backing: bool,
    /// There is no flag for zeroes: version 2.
    pub is_version_2: bool,
    /// Nothing is freed: see [`Finding::hides_references`].
    pub hides_references: bool,
    /// The guest's data overlaps with metadata.
    pub data_overlaps: bool,
    /// Clusters in use count as free: see [`Finding::is_uncounted`].
    pub uncounted: bool,
    /// Clusters can't be moved: where they are decides how they decrypt.
    pub is_encrypted: bool,
    /// L2 entries have a flag for zero clusters.
    pub has_zero_flag: bool,
    /// The largest count.
    pub refcount_max: u64,
    /// Size of a cluster, as a power of two.
    pub cluster_bits: u32,
    /// Length of the file in bytes.
    pub file_len: u64,
    /// Clusters that two structures of metadata claim: their bytes stay as they are.
    pub clashes: HashSet<u64>,
    /// Clusters with more references than a refcount can hold, whose users can get copies.
    pub movable: HashSet<u64>,
    /// Clusters whose stored refcount is too low, as far as findings were kept.
    pub low: HashSet<u64>,
}

impl Outlook {
    /// The outlook after the findings of a check. `ENOMEM` where there is no memory for its sets.
    pub fn new(
        header: &Header,
        ledger: &Ledger,
        obstacles: Vec<String>,
        bitmaps_stay: bool,
        file_len: u64,
    ) -> Result<Self> {
        let is_low = |finding: &&Finding| matches!(finding.kind, FindingKind::RefcountLow { .. });
        let mut low = set_for(ledger.findings.iter().filter(is_low).count())?;
        low.extend(ledger.findings.iter().filter_map(|finding| match finding.kind {
            FindingKind::RefcountLow { cluster, .. } => Some(cluster),
            _ => None,
        }));
        let mut clashes = set_for(ledger.clashes.len())?;
        clashes.extend(ledger.clashes.iter().copied());
        let data =
            |finding: &Finding| matches!(finding.kind, FindingKind::Overlap { structure: CheckedStructure::Data, .. });
        let order = header.refcount_order;
        Ok(Outlook {
            obstacles,
            lossy: false,
            has_backing: header.backing_file.is_some(),
            is_version_2: header.version < 3,
            hides_references: ledger.hidden_references || bitmaps_stay,
            data_overlaps: ledger.findings.iter().any(data),
            uncounted: ledger.uncounted,
            is_encrypted: header.crypt_method != 0,
            has_zero_flag: header.version >= 3 && !header.has_extended_l2(),
            refcount_max: if order >= 6 { u64::MAX } else { (1 << (1 << order)) - 1 },
            cluster_bits: header.cluster_bits,
            file_len,
            clashes,
            movable: HashSet::new(),
            low,
        })
    }

    /// The remedy of a finding in a repair of everything (`all`) or of leaks alone; `None`: the finding stays.
    pub fn remedy(&self, finding: &Finding, all: bool) -> Option<Remedy> {
        let in_clash = |offset: u64| self.clashes.contains(&(offset >> self.cluster_bits));
        let changes_nothing = !self.obstacles.is_empty() || (!all && (self.data_overlaps || self.uncounted));
        if changes_nothing || finding.entry_offset.is_some_and(in_clash) {
            return None;
        }
        match finding.kind {
            FindingKind::Leak { references, .. } => {
                (!self.hides_references).then_some(Remedy::LowerRefcount { to: references })
            }
            FindingKind::CopiedL1 { entry, .. } => {
                let given_up = self.give_up(!self.has_backing && all);
                self.flag(L1Entry(entry).offset().0, entry, all, given_up)
            }
            FindingKind::CopiedL2 { entry, .. } => {
                let given_up = self.give_up(self.may_zero() && all);
                self.flag(L2Entry(entry).offset().0, entry, all, given_up)
            }
            _ if !all => None,
            FindingKind::RefcountLow { references, .. } if references <= self.refcount_max => {
                Some(Remedy::RaiseRefcount { to: references })
            }
            FindingKind::RefcountLow { cluster, .. } => self.movable.contains(&cluster).then_some(Remedy::CopyCluster),
            FindingKind::UnalignedData { zero: true, .. } if self.has_zero_flag => Some(Remedy::MakeZeroPlain),
            FindingKind::UnalignedData { .. }
            | FindingKind::PastEnd { structure: CheckedStructure::Data, .. }
            | FindingKind::CompressedInDataFile { .. }
            | FindingKind::SubclusterUnallocated { .. } => self.give_up(self.may_zero()),
            FindingKind::PastEnd { structure: CheckedStructure::L2Table, .. } | FindingKind::UnalignedL2 { .. } => {
                self.give_up(!self.has_backing)
            }
            FindingKind::SubclusterBitmap { .. } => self.lossy.then_some(Remedy::TakeData),
            FindingKind::DataFileOffset { .. } => Some(Remedy::EndRawData),
            FindingKind::ReservedL1 { .. } | FindingKind::ReservedL2 { .. } => Some(Remedy::ClearReservedBits),
            FindingKind::CompressedCopied { .. } | FindingKind::FlagWithoutTable { .. } => {
                Some(Remedy::ClearCopiedFlag)
            }
            FindingKind::SnapshotIncomplete { .. } | FindingKind::SnapshotOversized { .. } => {
                Some(Remedy::CompleteSnapshots)
            }
            FindingKind::Unreadable {
                structure: CheckedStructure::SnapshotTable | CheckedStructure::SnapshotL1,
                ..
            }
            | FindingKind::PastEnd { structure: CheckedStructure::SnapshotL1, .. }
                if self.lossy =>
            {
                Some(Remedy::DropSnapshots)
            }
            FindingKind::Unreadable {
                structure: CheckedStructure::BitmapDirectory | CheckedStructure::BitmapTable,
                ..
            } if self.lossy => Some(Remedy::DropBitmaps),
            FindingKind::RefcountBlockUnaligned { .. }
            | FindingKind::RefcountBlockPastEnd { .. }
            | FindingKind::RefcountTableReserved { .. }
            | FindingKind::RefcountBlockShared { .. }
            | FindingKind::PastEnd { structure: CheckedStructure::RefcountTable, .. } => Some(Remedy::RebuildRefcounts),
            FindingKind::Overlap { structure: CheckedStructure::Data, .. } => {
                (!self.is_encrypted).then_some(Remedy::CopyCluster)
            }
            FindingKind::Overlap { .. }
            | FindingKind::PastEnd { .. }
            | FindingKind::Unaligned { .. }
            | FindingKind::Unreadable { .. } => None,
        }
    }

    fn give_up(&self, possible: bool) -> Option<Remedy> {
        (self.lossy && possible).then_some(Remedy::GiveUp)
    }

    /// True when a cluster can be made to read as zeroes.
    fn may_zero(&self) -> bool {
        !self.is_version_2 || !self.has_backing
    }

    fn flag(&self, offset: u64, entry: u64, all: bool, given_up: Option<Remedy>) -> Option<Remedy> {
        if offset >= self.file_len {
            // There is nothing that could be counted.
            return given_up;
        }
        let copied = entry >> 63 != 0;
        let is_low = self.low.contains(&(offset >> self.cluster_bits));
        let fixed = match (self.hides_references, all) {
            (_, true) => true,
            (true, false) => false,
            // A flag is not set for a cluster that has more users than its count.
            (false, false) => copied || !is_low,
        };
        fixed.then_some(Remedy::FixCopiedFlag)
    }
}
