// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The qcow2 format, versions 2 and 3. The clauses are explained in `docs/formats/qcow2.md`.

pub mod bitmap;
mod entry;
mod extension;
pub mod features;
mod geometry;
mod header;
pub mod refcount;
pub mod sequential;
pub mod snapshot;
mod snapshot_name;
mod subcluster;
mod switch;
mod validate;

pub use bitmap::{BitmapEntry, BitmapTableEntry};
pub use entry::{Cluster, CompressedDescriptor, L1Entry, L2Entry, L2Format, RefcountTableEntry, SECTOR_SIZE};
pub use extension::{
    BitmapJournal, BitmapsExtension, EncryptionHeader, Extension, FeatureName, FeatureNames, extension_type,
};
pub use geometry::Geometry;
pub use header::{Header, MAGIC, V2_HEADER_LENGTH, V3_HEADER_LENGTH, V3_HEADER_LENGTH_MIN, offset, peek_cluster_bits};
pub use snapshot::Snapshot;
pub use snapshot_name::{Lookup, SnapshotName, find_snapshot};
pub use subcluster::{SUBCLUSTERS_PER_CLUSTER, Subcluster, SubclusterBitmap};
pub use switch::{HeaderStages, switch as switch_header};
pub use validate::limits;

/// The progress of a parser of variable-length structures.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Parsed<T> {
    /// The whole structure was there.
    Complete {
        /// The parsed structure.
        value: T,
        /// Bytes it takes, padding included.
        len: usize,
    },
    /// The bytes end before the structure does.
    Incomplete {
        /// At least this many bytes are needed, counted from the first byte of the slice.
        need: usize,
    },
}
