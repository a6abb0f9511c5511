// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Bitmaps of differencing disks: which sectors of a block are in the image, and which ones in its parent.

use super::blocks::{FileTable, ImageFile};
use super::mapped::RunSource;
use cowshed_types::{Error, Result};

/// A bitmap with a bit for each sector: set for those that are in the image.
#[derive(Clone, Copy)]
pub(crate) struct SectorMap {
    /// The place of the bitmap.
    pub table: FileTable,
    /// Length of a sector in bytes.
    pub sector_bytes: u64,
    /// The first sector of a byte has the highest bit.
    pub is_high_first: bool,
}

impl SectorMap {
    /// Whether byte `at` of the bitmap's range is in the image, and for how many of the `len` bytes from there that
    /// holds.
    pub(crate) async fn run(&self, file: &ImageFile, at: u64, len: u64) -> Result<(bool, u64)> {
        let first = at / self.sector_bytes;
        let end = (at + len).div_ceil(self.sector_bytes);
        let (mut sector, mut is_here) = (first, None);
        while sector < end {
            let [byte] = file.entry::<1>(self.table, sector / 8).await?;
            let bit = if self.is_high_first { 7 - sector % 8 } else { sector % 8 };
            let is_set = byte >> bit & 1 == 1;
            if *is_here.get_or_insert(is_set) != is_set {
                break;
            }
            // Most bytes are about sectors of one kind.
            let is_uniform = sector.is_multiple_of(8) && (byte == 0 || byte == 0xff);
            sector += if is_uniform { 8 } else { 1 };
        }
        let until = (sector.min(end) * self.sector_bytes).min(at + len);
        let is_here = is_here.ok_or_else(|| Error::internal("an empty range has no sectors").offset(at))?;
        Ok((is_here, until - at))
    }

    /// The place of byte `at` of the bitmap's range, which is at `here` where the image has it.
    pub(crate) async fn place(&self, file: &ImageFile, at: u64, len: u64, here: RunSource) -> Result<(RunSource, u64)> {
        let (is_here, len) = self.run(file, at, len).await?;
        Ok((if is_here { here } else { RunSource::Unallocated }, len))
    }
}
