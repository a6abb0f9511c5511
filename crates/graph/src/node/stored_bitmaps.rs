// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Dirty bitmaps that images keep, whatever their format: their state, and their changes.

use super::LocalFuture;
use cowshed_types::{DirtyBits, Error, Result};
use std::sync::Arc;

/// Dirty bitmaps that the image keeps.
pub trait Bitmaps: Send + Sync {
    /// True when the image's version has bitmaps.
    fn may_have_bitmaps(&self) -> bool;

    /// All of them, in the order of the image.
    fn list(&self) -> LocalFuture<'_, Result<Vec<BitmapStatus>>>;

    /// The bits of one.
    fn bits<'a>(&'a self, name: &'a str) -> LocalFuture<'a, Result<Arc<DirtyBits>>>;

    /// True where bitmaps can be added and changed; else they are only read.
    fn can_change(&self) -> bool {
        true
    }

    /// Makes several changes: all or none.
    fn change<'a>(&'a self, changes: &'a [BitmapChange]) -> LocalFuture<'a, Result<()>>;
}

/// A persistent bitmap, as others see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BitmapStatus {
    /// Its name.
    pub name: String,
    /// Bytes of the disk that a bit stands for.
    pub granularity_bytes: u64,
    /// It records writes.
    pub enabled: bool,
    /// It was not saved correctly: it can only be removed.
    pub inconsistent: bool,
}

/// Longest name of a bitmap in bytes.
pub const BITMAP_NAME_BYTES: usize = 1023;
/// log2 of the granularities that QEMU takes.
const GRANULARITY_BITS: std::ops::RangeInclusive<u32> = 9..=31;
/// Granularities in bytes that QEMU chooses by itself: the cluster size within these limits.
const DEFAULT_BYTES: std::ops::RangeInclusive<u64> = 4096..=65536;

/// A change of the persistent bitmaps of an image.
#[derive(Clone, Debug)]
pub enum BitmapChange {
    /// A new one, with nothing dirty.
    Add {
        /// 1 to 1023 bytes, not used yet.
        name: String,
        /// Bytes that a bit stands for: a power of two from 512 to 2 GiB; as QEMU chooses it when `None`.
        granularity_bytes: Option<u64>,
        /// It records writes from now on.
        enabled: bool,
    },
    /// Takes one away.
    Remove(String),
    /// Nothing is dirty any more.
    Clear(String),
    /// Records writes from now on.
    Enable(String),
    /// Stays as it is from now on.
    Disable(String),
    /// Ranges that are dirty in `source` become dirty in the target too.
    Merge {
        /// Name of the target.
        target: String,
        /// The bits to add, of a disk of the same size.
        source: Arc<DirtyBits>,
    },
}

impl BitmapChange {
    /// The name of the bitmap that is changed.
    pub fn name(&self) -> &str {
        match self {
            BitmapChange::Add { name, .. } => name,
            BitmapChange::Remove(name) | BitmapChange::Clear(name) => name,
            BitmapChange::Enable(name) | BitmapChange::Disable(name) => name,
            BitmapChange::Merge { target, .. } => target,
        }
    }
}

/// QEMU's default granularity of a bitmap, in bytes; `cluster_bytes` is 0 for formats without clusters.
pub fn default_granularity_bytes(cluster_bytes: u64) -> u64 {
    if cluster_bytes == 0 {
        *DEFAULT_BYTES.end()
    } else {
        cluster_bytes.clamp(*DEFAULT_BYTES.start(), *DEFAULT_BYTES.end())
    }
}

/// Refuses a name or granularity that no bitmap may have; log2 of the granularity.
pub fn check_new_bitmap(name: &str, granularity_bytes: u64) -> Result<u32> {
    if name.is_empty() {
        return Err(Error::invalid_argument("Bitmap name cannot be empty"));
    }
    if name.len() > BITMAP_NAME_BYTES {
        return Err(Error::invalid_argument(format!("Bitmap name too long: {name}")));
    }
    if !granularity_bytes.is_power_of_two() || !GRANULARITY_BITS.contains(&granularity_bytes.trailing_zeros()) {
        let message = "Granularity must be power of 2 and at least 512";
        return Err(Error::invalid_argument(message).hint(" (and at most 2G)").value(granularity_bytes));
    }
    Ok(granularity_bytes.trailing_zeros())
}
