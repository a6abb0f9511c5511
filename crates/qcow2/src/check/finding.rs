// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The findings of a check.

use cowshed_types::CheckCounters;
use std::fmt;

/// A structure of the format that owns clusters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CheckedStructure {
    /// The header's cluster.
    Header,
    /// The refcount table.
    RefcountTable,
    /// A refcount block.
    RefcountBlock,
    /// The active L1 table.
    ActiveL1,
    /// The L1 table of a snapshot.
    SnapshotL1,
    /// An L2 table.
    L2Table,
    /// Guest data, plain or compressed.
    Data,
    /// The snapshot table.
    SnapshotTable,
    /// The directory of the bitmaps.
    BitmapDirectory,
    /// The table of a bitmap.
    BitmapTable,
    /// The bits of a bitmap.
    BitmapData,
    /// The LUKS header.
    EncryptionHeader,
}

impl CheckedStructure {
    /// The structure's name in messages.
    pub const fn name(self) -> &'static str {
        match self {
            CheckedStructure::Header => "header",
            CheckedStructure::RefcountTable => "refcount table",
            CheckedStructure::RefcountBlock => "refcount block",
            CheckedStructure::ActiveL1 => "active L1 table",
            CheckedStructure::SnapshotL1 => "snapshot L1 table",
            CheckedStructure::L2Table => "L2 table",
            CheckedStructure::Data => "data",
            CheckedStructure::SnapshotTable => "snapshot table",
            CheckedStructure::BitmapDirectory => "bitmap directory",
            CheckedStructure::BitmapTable => "bitmap table",
            CheckedStructure::BitmapData => "bitmap data",
            CheckedStructure::EncryptionHeader => "encryption header",
        }
    }
}

/// The severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Severity {
    /// Data may be wrong, or become wrong by a write.
    Corruption,
    /// Space is lost, nothing else.
    Leak,
}

/// One kind of damage with its values. Entries have their bytes on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum FindingKind {
    /// The stored refcount is below the references: the cluster could be handed out while it is in use.
    RefcountLow { cluster: u64, stored: u64, references: u64 },
    /// The stored refcount is above the references.
    Leak { cluster: u64, stored: u64, references: u64 },
    /// Bit 63 of an active L1 entry contradicts the stored refcount.
    CopiedL1 { l1_index: u64, entry: u64, refcount: u64 },
    /// Bit 63 of an L2 entry contradicts the stored refcount.
    CopiedL2 { entry: u64, refcount: u64 },
    /// A structure lies a cluster or more behind the end of the file.
    PastEnd { structure: CheckedStructure, offset: u64, len: u64 },
    /// The offset of a data cluster isn't a multiple of the cluster size.
    UnalignedData { offset: u64, zero: bool },
    /// The offset of an L2 table isn't a multiple of the cluster size.
    UnalignedL2 { offset: u64 },
    /// The offset of another structure isn't a multiple of the cluster size.
    Unaligned { structure: CheckedStructure, offset: u64 },
    /// Reserved bits of an L1 entry are set.
    ReservedL1 { entry: u64 },
    /// An L1 entry without an L2 table has bit 63 set.
    FlagWithoutTable { entry: u64 },
    /// Reserved bits of an L2 entry are set.
    ReservedL2 { entry: u64 },
    /// Bit 63 is set in the entry of a compressed cluster.
    CompressedCopied { offset: u64 },
    /// A compressed cluster in an image with an external data file.
    CompressedInDataFile { guest_cluster: u64, entry: u64 },
    /// Raw external data: the host offset isn't the guest offset.
    DataFileOffset { entry: u64, guest: u64 },
    /// A subcluster that is allocated and zero at once.
    SubclusterBitmap { offset: u64, bitmap: u64 },
    /// Subclusters are allocated in a cluster without a host offset.
    SubclusterUnallocated { bitmap: u64 },
    /// The offset in a refcount table entry isn't a multiple of the cluster size.
    RefcountBlockUnaligned { index: u64, entry: u64 },
    /// A refcount table entry points behind the end of the file.
    RefcountBlockPastEnd { index: u64, entry: u64 },
    /// Reserved bits of a refcount table entry are set.
    RefcountTableReserved { index: u64, entry: u64 },
    /// Two refcount table entries share a block.
    RefcountBlockShared { index: u64, references: u64 },
    /// A cluster belongs to metadata and to something else.
    Overlap { structure: CheckedStructure, cluster: u64 },
    /// A snapshot lacks fields that version 3 asks for.
    SnapshotIncomplete { index: u32 },
    /// A snapshot has more extra data than there may be.
    SnapshotOversized { index: u32 },
    /// A structure can't be read by the rules of the format.
    Unreadable { structure: CheckedStructure, offset: u64, reason: String },
}

/// Something wrong in an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The kind of fault.
    pub kind: FindingKind,
    /// Host offset in bytes of the faulty entry, where there is one.
    pub entry_offset: Option<u64>,
    /// First byte on the virtual disk that it concerns, where it is known.
    pub guest: Option<u64>,
    /// True once this check has repaired it.
    pub repaired: bool,
}

impl Finding {
    /// A finding without a place.
    pub const fn new(kind: FindingKind) -> Self {
        Finding { kind, entry_offset: None, guest: None, repaired: false }
    }

    /// A finding at an entry.
    pub const fn at(kind: FindingKind, entry_offset: u64, guest: Option<u64>) -> Self {
        Finding { kind, entry_offset: Some(entry_offset), guest, repaired: false }
    }

    /// A word for the kind of damage, for programs.
    pub const fn kind_name(&self) -> &'static str {
        match self.kind {
            FindingKind::RefcountLow { .. } => "refcount-low",
            FindingKind::Leak { .. } => "leak",
            FindingKind::CopiedL1 { .. } => "copied-l1",
            FindingKind::CopiedL2 { .. } => "copied-l2",
            FindingKind::PastEnd { .. } => "past-end",
            FindingKind::UnalignedData { .. } => "unaligned-data",
            FindingKind::UnalignedL2 { .. } => "unaligned-l2",
            FindingKind::Unaligned { .. } => "unaligned",
            FindingKind::ReservedL1 { .. } => "reserved-l1",
            FindingKind::FlagWithoutTable { .. } => "flag-without-table",
            FindingKind::ReservedL2 { .. } => "reserved-l2",
            FindingKind::CompressedCopied { .. } => "compressed-copied",
            FindingKind::CompressedInDataFile { .. } => "compressed-in-data-file",
            FindingKind::DataFileOffset { .. } => "data-file-offset",
            FindingKind::SubclusterBitmap { .. } => "subcluster-bitmap",
            FindingKind::SubclusterUnallocated { .. } => "subcluster-unallocated",
            FindingKind::RefcountBlockUnaligned { .. } => "refcount-block-unaligned",
            FindingKind::RefcountBlockPastEnd { .. } => "refcount-block-past-end",
            FindingKind::RefcountTableReserved { .. } => "refcount-table-reserved",
            FindingKind::RefcountBlockShared { .. } => "refcount-block-shared",
            FindingKind::Overlap { .. } => "overlap",
            FindingKind::SnapshotIncomplete { .. } => "snapshot-incomplete",
            FindingKind::SnapshotOversized { .. } => "snapshot-oversized",
            FindingKind::Unreadable { .. } => "unreadable",
        }
    }

    /// Host offset in bytes of the entry, structure or cluster that is damaged; `None` where it has no place of its
    /// own.
    pub fn place(&self, cluster_bits: u32) -> Option<u64> {
        self.entry_offset.or(match self.kind {
            FindingKind::RefcountLow { cluster, .. }
            | FindingKind::Leak { cluster, .. }
            | FindingKind::Overlap { cluster, .. } => cluster.checked_shl(cluster_bits),
            FindingKind::PastEnd { offset, .. }
            | FindingKind::UnalignedL2 { offset }
            | FindingKind::Unaligned { offset, .. }
            | FindingKind::Unreadable { offset, .. } => Some(offset),
            _ => None,
        })
    }

    /// Its severity.
    pub const fn severity(&self) -> Severity {
        match self.kind {
            FindingKind::Leak { .. } => Severity::Leak,
            _ => Severity::Corruption,
        }
    }

    /// Sorts findings as qemu-img prints them: entries and structures, refcounts, bit 63; each by place.
    pub const fn order(&self) -> (u8, u64) {
        let at = match self.entry_offset {
            Some(offset) => offset,
            None => 0,
        };
        match self.kind {
            FindingKind::RefcountLow { cluster, .. } | FindingKind::Leak { cluster, .. } => (1, cluster),
            FindingKind::Overlap { cluster, .. } => (2, cluster),
            FindingKind::CopiedL1 { .. } => (3, at),
            FindingKind::CopiedL2 { .. } => (4, at),
            _ => (0, at),
        }
    }

    /// True when unknown clusters may hang below the damage: freeing anything would be a guess.
    pub const fn hides_references(&self) -> bool {
        match self.kind {
            FindingKind::UnalignedL2 { .. } | FindingKind::Unaligned { .. } | FindingKind::Unreadable { .. } => true,
            FindingKind::PastEnd { structure, .. } => {
                !matches!(structure, CheckedStructure::Data | CheckedStructure::BitmapData)
            }
            _ => false,
        }
    }

    /// True when a cluster in use counts as free, or the counts can't be found. The basis for judging COPIED and leaks
    /// is itself in doubt then.
    pub const fn is_uncounted(&self) -> bool {
        matches!(
            self.kind,
            FindingKind::RefcountLow { stored: 0, .. }
                | FindingKind::RefcountBlockUnaligned { .. }
                | FindingKind::RefcountBlockPastEnd { .. }
        )
    }
}

/// The line that qemu-img prints, or one in its manner for findings that only we have. "Repairing" replaces "ERROR"
/// once it is repaired.
impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = if self.repaired { "Repairing" } else { "ERROR" };
        match &self.kind {
            FindingKind::RefcountLow { cluster, stored, references } => {
                write!(f, "{word} cluster {cluster} refcount={stored} reference={references}")
            }
            FindingKind::Leak { cluster, stored, references } => {
                let word = if self.repaired { "Repairing" } else { "Leaked" };
                write!(f, "{word} cluster {cluster} refcount={stored} reference={references}")
            }
            FindingKind::CopiedL1 { l1_index, entry, refcount } => {
                write!(f, "{word} OFLAG_COPIED L2 cluster: l1_index={l1_index} l1_entry={entry:x} refcount={refcount}")
            }
            FindingKind::CopiedL2 { entry, refcount } => {
                write!(f, "{word} OFLAG_COPIED data cluster: l2_entry={entry:x} refcount={refcount}")
            }
            FindingKind::PastEnd { offset, len, .. } => write!(
                f,
                "{word}: counting reference for region exceeding the end of the file by one cluster or more: \
                 offset {offset:#x} size {len:#x}"
            ),
            FindingKind::UnalignedData { offset, zero } => {
                let kind = if *zero { "Preallocated" } else { "Data" };
                write!(f, "{word} offset={offset:x}: {kind} cluster is not properly aligned; L2 entry corrupted.")
            }
            FindingKind::UnalignedL2 { offset } => {
                write!(f, "{word} l2_offset={offset:x}: Table is not cluster aligned; L1 entry corrupted")
            }
            FindingKind::Unaligned { structure, offset } => {
                write!(f, "{word} offset={offset:x}: {} is not cluster aligned", structure.name())
            }
            FindingKind::ReservedL1 { entry } => write!(f, "{word} found L1 entry with reserved bits set: {entry:x}"),
            FindingKind::FlagWithoutTable { entry } => {
                write!(f, "{word} L1 entry without an L2 table has its copied flag set: {entry:x}")
            }
            FindingKind::ReservedL2 { entry } => write!(f, "{word} found l2 entry with reserved bits set: {entry:x}"),
            FindingKind::CompressedCopied { offset } => {
                write!(f, "{word}: coffset={offset:#x}: copied flag must never be set for compressed clusters")
            }
            FindingKind::CompressedInDataFile { guest_cluster, entry } => {
                write!(f, "{word} compressed cluster {guest_cluster} with data file, entry={entry:#x}")
            }
            FindingKind::DataFileOffset { entry, guest } => {
                write!(f, "{word} guest offset {guest:#x} is elsewhere in the raw data file, l2_entry={entry:x}")
            }
            FindingKind::SubclusterBitmap { offset, .. } => {
                write!(f, "{word} offset={offset:x}: Allocated cluster has corrupted subcluster allocation bitmap")
            }
            FindingKind::SubclusterUnallocated { .. } => {
                write!(f, "{word}: Unallocated cluster has non-zero subcluster allocation map")
            }
            FindingKind::RefcountBlockUnaligned { index, .. } => {
                write!(f, "{word} refcount block {index} is not cluster aligned; refcount table entry corrupted")
            }
            FindingKind::RefcountBlockPastEnd { index, .. } => {
                write!(f, "{word} refcount block {index} is outside image")
            }
            FindingKind::RefcountTableReserved { index, .. } => {
                write!(f, "{word} refcount table entry {index} has reserved bits set")
            }
            FindingKind::RefcountBlockShared { index, references } => {
                write!(f, "{word} refcount block {index} refcount={references}")
            }
            FindingKind::Overlap { structure, cluster } => {
                write!(f, "{word} cluster {cluster}: {} overlaps with metadata", structure.name())
            }
            FindingKind::SnapshotIncomplete { index } => {
                write!(f, "{word} snapshot table entry {index} is incomplete")
            }
            FindingKind::SnapshotOversized { index } => {
                write!(f, "{word} snapshot table entry {index} has too much extra data")
            }
            FindingKind::Unreadable { structure, offset, reason } => {
                write!(f, "{word} {} at offset {offset:#x}: {reason}", structure.name())
            }
        }
    }
}

/// Clashes that are kept.
const CLASHES_MAX: usize = 1 << 20;

/// Collects findings: the first ones in full, all of them counted.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    /// The counters.
    pub counters: CheckCounters,
    /// The first findings.
    pub findings: Vec<Finding>,
    /// Findings that were counted but not kept.
    pub omitted: u64,
    /// See [`Finding::hides_references`].
    pub hidden_references: bool,
    /// Clusters in use have no count at all: a repair of leaks alone changes nothing then.
    pub uncounted: bool,
    /// Clusters that two structures of metadata claim.
    pub clashes: Vec<u64>,
    /// There are more of them than were kept.
    pub clashes_omitted: bool,
    /// The number of findings that are kept.
    pub limit: usize,
}

impl Ledger {
    /// Keeps up to `limit` findings.
    pub fn new(limit: usize) -> Self {
        Ledger { limit, ..Ledger::default() }
    }

    /// Adds a finding that counts once.
    pub fn add(&mut self, finding: Finding) {
        self.add_times(finding, 1);
    }

    /// Adds a finding that `times` references share.
    pub fn add_times(&mut self, finding: Finding, times: u64) {
        if times == 0 {
            return;
        }
        match finding.severity() {
            Severity::Corruption => self.counters.corruptions += times,
            Severity::Leak => self.counters.leaks += times,
        }
        self.hidden_references |= finding.hides_references();
        self.uncounted |= finding.is_uncounted();
        if let FindingKind::Overlap { structure, cluster } = finding.kind
            && structure != CheckedStructure::Data
        {
            self.clashes_omitted |= self.clashes.len() >= CLASHES_MAX;
            self.clashes_omitted |= self.clashes.try_reserve(1).is_err();
            if !self.clashes_omitted {
                self.clashes.push(cluster);
            }
        }
        // Without memory for more it is counted all the same.
        if self.findings.len() < self.limit && self.findings.try_reserve(1).is_ok() {
            self.findings.push(finding);
        } else {
            self.omitted += 1;
        }
    }
}
