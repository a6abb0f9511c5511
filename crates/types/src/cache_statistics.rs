// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The counters of a cache of metadata.

/// Counters of the metadata cache of an image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStatistics {
    /// L2 slices in memory.
    pub l2_slices: u64,
    /// Dirty L2 slices.
    pub l2_dirty: u64,
    /// Number of look-ups that found their slice in memory.
    pub l2_hits: u64,
    /// Number of slices read from the image since it was opened.
    pub l2_misses: u64,
    /// Memory of the L2 slices in bytes, bookkeeping included.
    pub l2_bytes: u64,
    /// Most bytes of L2 slices (`l2-cache-size`).
    pub l2_limit_bytes: u64,
    /// Look-ups that found their refcount block in memory.
    pub refcount_hits: u64,
    /// Refcount blocks read from the image since it was opened.
    pub refcount_misses: u64,
    /// Memory of the refcount blocks in bytes.
    pub refcount_bytes: u64,
    /// Most bytes of refcount blocks (`refcount-cache-size`).
    pub refcount_limit_bytes: u64,
    /// Refcount blocks in memory.
    pub refcount_blocks: u64,
    /// Number of freed host ranges that may not be used again yet.
    pub quarantined: u64,
}
