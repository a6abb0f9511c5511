// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reads the remains of a damaged qcow2 image. Nothing is ever written to it, and nothing of the engine is used. An
//! image that the engine refuses can be read here, entry by entry, and losses are named.

mod damaged_image;
mod encryption;
mod header;
mod orphans;
mod place;
mod snapshots;

pub use damaged_image::{DamagedImage, L1Target, Salvaged, Table};
pub use orphans::{Orphan, OrphanKind};
pub use snapshots::SnapshotList;

/// The user's values in place of the header's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Overrides {
    /// Cluster size in bytes.
    pub cluster_size_bytes: Option<u64>,
    /// Size of the virtual disk in bytes.
    pub size_bytes: Option<u64>,
    /// Where the active L1 table starts, in bytes.
    pub l1_offset_bytes: Option<u64>,
    /// Whether L2 entries are extended.
    pub extended_l2: Option<bool>,
    /// The user names a backing file, or declares that there is none.
    pub backing_is_given: bool,
}

/// The reason for which a guest range can't be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Loss {
    /// The disk failed; its error.
    Io(String),
    /// It lies behind the end of the file.
    PastEnd,
    /// Its offset isn't one of a cluster.
    Unaligned,
    /// The compressed data can't be decompressed; why.
    BadCompressedData(String),
    /// A compressed cluster in an image with an external data file.
    CompressedInDataFile,
    /// Its L2 table is lost; why.
    TableLost(String),
    /// Subclusters are allocated, but there is no cluster.
    NoCluster,
    /// The external data file is missing.
    DataFileMissing,
    /// The backing file is missing, or can't be read.
    Backing(String),
}

impl Loss {
    /// A word for programs.
    pub const fn name(&self) -> &'static str {
        match self {
            Loss::Io(_) => "io-error",
            Loss::PastEnd => "past-end",
            Loss::Unaligned => "unaligned",
            Loss::BadCompressedData(_) => "bad-compressed-data",
            Loss::CompressedInDataFile => "compressed-in-data-file",
            Loss::TableLost(_) => "table-lost",
            Loss::NoCluster => "no-cluster",
            Loss::DataFileMissing => "data-file-missing",
            Loss::Backing(_) => "backing-file",
        }
    }

    /// More about the loss, for a report.
    pub fn detail(&self) -> Option<&str> {
        match self {
            Loss::Io(text) | Loss::BadCompressedData(text) | Loss::TableLost(text) | Loss::Backing(text) => Some(text),
            _ => None,
        }
    }
}

/// The reason for which read bytes may not be the written ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doubt {
    /// The entry has reserved bits set.
    ReservedBits,
    /// Subclusters are allocated and zero at once: the data were taken.
    SubclusterBitmap,
    /// The file ends inside of the cluster: zeroes behind its end.
    FileEndsInside,
    /// The user assigned the L2 table.
    AssignedTable,
}

impl Doubt {
    /// A word for programs.
    pub const fn name(self) -> &'static str {
        match self {
            Doubt::ReservedBits => "reserved-bits",
            Doubt::SubclusterBitmap => "subcluster-bitmap",
            Doubt::FileEndsInside => "file-ends-inside",
            Doubt::AssignedTable => "assigned-table",
        }
    }
}
