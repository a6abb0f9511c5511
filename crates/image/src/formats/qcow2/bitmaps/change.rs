// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What users do to bitmaps: add, remove, clear, enable, disable, merge.

use super::super::Qcow2Driver;
use super::StoredBitmap;
use cowshed_block::{Error, ErrorKind, Result};
use cowshed_layout::qcow2::bitmap::{FLAG_AUTO, TYPE_DIRTY_TRACKING};
use cowshed_layout::qcow2::{BitmapEntry, limits};
use cowshed_qcow2::DirtyBits;
use std::sync::Arc;

/// Longest name of a bitmap in bytes.
const NAME_BYTES: usize = 1023;
/// Most bytes of data of a bitmap, as in QEMU.
const DATA_BYTES: u64 = 512 << 20;
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
        /// It records what is written from now on.
        enabled: bool,
    },
    /// Takes one away.
    Remove(String),
    /// Nothing is dirty any more.
    Clear(String),
    /// Records what is written from now on.
    Enable(String),
    /// Stays as it is from now on.
    Disable(String),
    /// What is dirty in `source` becomes dirty in the target too.
    Merge {
        /// Name of the target.
        target: String,
        /// Of a disk of the same size.
        source: Arc<DirtyBits>,
    },
}

impl BitmapChange {
    fn name(&self) -> &str {
        match self {
            BitmapChange::Add { name, .. } => name,
            BitmapChange::Remove(name) | BitmapChange::Clear(name) => name,
            BitmapChange::Enable(name) | BitmapChange::Disable(name) => name,
            BitmapChange::Merge { target, .. } => target,
        }
    }
}

/// The granularity in bytes that QEMU gives a bitmap by itself; `cluster_bytes` is 0 for formats without clusters.
pub(crate) fn default_granularity_bytes(cluster_bytes: u64) -> u64 {
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
    if name.len() > NAME_BYTES {
        return Err(Error::invalid_argument(format!("Bitmap name too long: {name}")));
    }
    if !granularity_bytes.is_power_of_two() || !GRANULARITY_BITS.contains(&granularity_bytes.trailing_zeros()) {
        let message = "Granularity must be power of 2 and at least 512";
        return Err(Error::invalid_argument(message).hint(" (and at most 2G)").value(granularity_bytes));
    }
    Ok(granularity_bytes.trailing_zeros())
}

impl Qcow2Driver {
    /// The granularity of a bitmap that is added without one, in bytes: as QEMU has it.
    pub fn default_bitmap_granularity_bytes(&self) -> u64 {
        default_granularity_bytes(self.cluster_size())
    }

    /// Makes all the changes, in order and durably, or none. While something is recorded no request may run.
    pub async fn change_bitmaps(&self, changes: &[BitmapChange]) -> Result<()> {
        self.check_writable()?;
        if self.header().version < 3 {
            return match changes.first() {
                None => Ok(()),
                Some(BitmapChange::Add { name, .. }) => {
                    Err(self.not_persistent(name, Error::unsupported("Cannot store dirty bitmaps in qcow2 v2 files")))
                }
                Some(other) => Err(self.no_such_bitmap(other.name())),
            };
        }
        self.know_bitmaps().await?;
        let _change = self.bitmaps.change.lock().await;
        for change in changes {
            let found = self.bitmaps.known().find(change.name());
            if let (BitmapChange::Merge { .. }, Some(index)) = (change, found) {
                self.load_bits(index).await?;
            }
        }
        let mut maps = self.bitmaps.known().maps.clone();
        for change in changes {
            self.apply_change(&mut maps, change)?;
        }
        self.publish(maps, None).await
    }

    fn apply_change(&self, maps: &mut Vec<StoredBitmap>, change: &BitmapChange) -> Result<()> {
        let found = maps.iter().position(|map| map.entry.name == change.name().as_bytes());
        if let BitmapChange::Add { name, granularity_bytes, enabled } = change {
            if found.is_some() {
                let message = format!("Bitmap already exists: {name}");
                return Err(self.error(Error::invalid_argument(message)));
            }
            let granularity = granularity_bytes.unwrap_or_else(|| self.default_bitmap_granularity_bytes());
            maps.push(self.new_bitmap(name, granularity, *enabled)?);
            return Ok(());
        }
        let Some(index) = found else { return Err(self.no_such_bitmap(change.name())) };
        if matches!(change, BitmapChange::Remove(_)) {
            maps.remove(index);
            return Ok(());
        }
        let map = &mut maps[index];
        self.check_usable(map)?;
        match change {
            BitmapChange::Enable(_) => map.entry.flags |= FLAG_AUTO,
            BitmapChange::Disable(_) => map.entry.flags &= !FLAG_AUTO,
            BitmapChange::Clear(_) => {
                map.bits = Some(Arc::new(self.no_bits(u32::from(map.entry.granularity_bits))));
                map.is_new = true;
            }
            BitmapChange::Merge { source, .. } => {
                let Some(bits) = &mut map.bits else {
                    return Err(Error::internal("a bitmap to merge into wasn't read"));
                };
                Arc::make_mut(bits).merge(source).map_err(|error| self.error(error))?;
                map.is_new = true;
            }
            BitmapChange::Add { .. } | BitmapChange::Remove(_) => {}
        }
        Ok(())
    }

    /// QEMU's words for a bitmap that this image can't hold.
    fn not_persistent(&self, name: &str, why: Error) -> Error {
        self.error(why.context(format!("Can't make bitmap '{name}' persistent in '{}'", self.file_name)))
    }

    fn no_bits(&self, granularity_bits: u32) -> DirtyBits {
        DirtyBits::new(self.header().size, granularity_bits, self.engine.geometry().cluster_bits())
    }

    fn new_bitmap(&self, name: &str, granularity_bytes: u64, enabled: bool) -> Result<StoredBitmap> {
        if name.len() > NAME_BYTES {
            let why = Error::invalid_argument(format!("Name length exceeds maximum ({NAME_BYTES} characters)"));
            return Err(self.not_persistent(name, why));
        }
        let granularity_bits = check_new_bitmap(name, granularity_bytes).map_err(|error| self.error(error))?;
        let bits = self.no_bits(granularity_bits);
        if bits.piece_count() * 8 > limits::BITMAP_TABLE_BYTES || bits.bits().div_ceil(8) > DATA_BYTES {
            let message = "Too much space will be occupied by the bitmap. Use larger granularity";
            let error = Error::new(ErrorKind::Limit, message).field("granularity").value(granularity_bytes);
            return Err(self.not_persistent(name, error));
        }
        Ok(StoredBitmap {
            entry: BitmapEntry {
                table_offset: 0,
                table_size: 0,
                flags: if enabled { FLAG_AUTO } else { 0 },
                kind: TYPE_DIRTY_TRACKING,
                granularity_bits: granularity_bits as u8,
                extra_data: Vec::new(),
                name: name.as_bytes().to_vec(),
            },
            table: None,
            bits: Some(Arc::new(bits)),
            is_new: true,
        })
    }

    /// Changes the size of the disk in the header, and of its bitmaps: what is new is clean. Inconsistent bitmaps can't
    /// be told how large they are.
    pub(in super::super) async fn resize_bitmaps(&self, size: u64) -> Result<bool> {
        if self.bitmaps.known().maps.is_empty() {
            return Ok(false);
        }
        let _change = self.bitmaps.change.lock().await;
        let count = self.bitmaps.known().maps.len();
        for index in 0..count {
            self.load_bits(index).await?;
        }
        let mut maps = self.bitmaps.known().maps.clone();
        for map in &mut maps {
            if let Some(bits) = &mut map.bits {
                Arc::make_mut(bits).resize(size);
                map.is_new = true;
            }
        }
        self.publish(maps, Some(size)).await.map(|()| true)
    }
}
