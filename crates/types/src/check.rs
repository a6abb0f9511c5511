// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The request and the counts of a check, of images of every format.

/// The extent of a repair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Repair {
    /// Nothing.
    #[default]
    None,
    /// Leaked clusters, and bit 63 of entries.
    Leaks,
    /// All that can be.
    All,
}

/// The counters of a check, under the names that qemu-img's JSON has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CheckCounters {
    /// End of the last cluster in use, in bytes.
    pub image_end_offset: u64,
    /// Clusters of the virtual disk.
    pub total_clusters: u64,
    /// Clusters of the virtual disk that are allocated in this image.
    pub allocated_clusters: u64,
    /// Allocated clusters that don't follow the one before.
    pub fragmented_clusters: u64,
    /// Compressed clusters.
    pub compressed_clusters: u64,
    /// Number of corruptions that are there now.
    pub corruptions: u64,
    /// Leaked clusters that are there now.
    pub leaks: u64,
    /// Number of errors that kept parts of the image from being checked.
    pub check_errors: u64,
    /// Number of corruptions repaired.
    pub corruptions_fixed: u64,
    /// Number of leaks repaired.
    pub leaks_fixed: u64,
}
