// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Changes of bitmaps by users: add, remove, clear, enable, disable, merge.

use super::super::Qcow2Driver;
use super::StoredBitmap;
use cowshed_graph::node::{BITMAP_NAME_BYTES, BitmapChange, check_new_bitmap, default_granularity_bytes};
use cowshed_layout::qcow2::bitmap::{FLAG_AUTO, TYPE_DIRTY_TRACKING};
use cowshed_layout::qcow2::{BitmapEntry, limits};
use cowshed_types::{DirtyBits, Error, ErrorKind, Result};
use std::sync::Arc;

/// Most bytes of data of a bitmap. QEMU opens no image with more, also where the bitmap is in use.
const DATA_BYTES: u64 = 512 << 20;

/// Fails where a bitmap would be larger than QEMU opens one.
fn check_space(bits: &DirtyBits) -> Result<()> {
    if bits.piece_count() * 8 <= limits::BITMAP_TABLE_BYTES && bits.bits().div_ceil(8) <= DATA_BYTES {
        return Ok(());
    }
    let message = "Too much space will be occupied by the bitmap. Use larger granularity";
    Err(Error::new(ErrorKind::Limit, message).field("granularity").value(bits.granularity_bytes()))
}

impl Qcow2Driver {
    /// The granularity of a bitmap that is added without one, in bytes: as QEMU has it.
    pub fn default_bitmap_granularity_bytes(&self) -> u64 {
        default_granularity_bytes(self.cluster_size())
    }

    /// Makes all the changes, in order and durably, or none. While something is recorded no request may run.
    pub async fn change_bitmaps(&self, changes: &[BitmapChange]) -> Result<()> {
        self.be_writable().await?;
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
        if name.len() > BITMAP_NAME_BYTES {
            let why = Error::invalid_argument(format!("Name length exceeds maximum ({BITMAP_NAME_BYTES} characters)"));
            return Err(self.not_persistent(name, why));
        }
        let granularity_bits = check_new_bitmap(name, granularity_bytes).map_err(|error| self.error(error))?;
        let bits = self.no_bits(granularity_bits);
        check_space(&bits).map_err(|error| self.not_persistent(name, error))?;
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

    /// Fails where a bitmap can't follow the disk to `size` bytes: before anything behind a new end is cut off or made.
    pub(in super::super) async fn check_bitmaps_for_resize(&self, size: u64) -> Result<()> {
        if self.bitmaps.known().maps.is_empty() {
            return Ok(());
        }
        let _change = self.bitmaps.change.lock().await;
        self.load_all_bits().await?;
        let cluster_bits = self.engine.geometry().cluster_bits();
        for map in &self.bitmaps.known().maps {
            let bits = DirtyBits::new(size, u32::from(map.entry.granularity_bits), cluster_bits);
            // QEMU's words, with which it gives such a bitmap up when it closes the image.
            check_space(&bits).map_err(|error| {
                self.error(error.context(format!("Bitmap '{}' doesn't satisfy the constraints", map.name())))
            })?;
        }
        Ok(())
    }

    async fn load_all_bits(&self) -> Result<()> {
        let count = self.bitmaps.known().maps.len();
        for index in 0..count {
            self.load_bits(index).await?;
        }
        Ok(())
    }

    /// Changes the size of the disk in the header, and of its bitmaps: new bits are clean. Inconsistent bitmaps can't
    /// be resized.
    pub(in super::super) async fn resize_bitmaps(&self, size: u64) -> Result<bool> {
        if self.bitmaps.known().maps.is_empty() {
            return Ok(false);
        }
        let _change = self.bitmaps.change.lock().await;
        self.load_all_bits().await?;
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
