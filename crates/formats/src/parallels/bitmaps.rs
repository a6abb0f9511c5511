// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The dirty bitmaps of the format extension, which are only read: a write takes the extension off the header.

use super::super::blocks::ImageFile;
use super::Parallels;
use cowshed_graph::node::BitmapStatus;
use cowshed_layout::parallels::{EXTENSION_HEADER_BYTES, FormatExtension, ParallelsBitmap};
use cowshed_types::{DirtyBits, Error, Result};
use md5::{Digest, Md5};
use std::collections::HashSet;

const SECTOR_BYTES: u64 = 512;
/// Granularities of a bitmap in bytes.
const GRANULARITY_BYTES: std::ops::RangeInclusive<u64> = SECTOR_BYTES..=2 << 30;
/// Most bytes of a bitmap: as many as QEMU takes from a qcow2 image.
const MAX_BITMAP_BYTES: u64 = 512 << 20;
/// log2 of the bytes that are read at once, a piece of the bits.
const PIECE_BITS: u32 = 16;
const PIECE_BYTES: u64 = 1 << PIECE_BITS;
/// This much of the extension is read at once for its checksum.
const SUMMED_BYTES: u64 = 1 << 20;

/// An entry of a bitmap's table: no bit of the cluster is set.
const ALL_CLEAR: u64 = 0;
/// All bits of the cluster are set.
const ALL_SET: u64 = 1;

impl Parallels {
    /// All bitmaps. One that doesn't fit the disk, or may be older than its data, is inconsistent.
    pub(super) async fn list_bitmaps(&self, file: &ImageFile) -> Result<Vec<BitmapStatus>> {
        let bitmaps = self.judged_bitmaps(file).await?;
        let status = |(bitmap, is_sound): &(ParallelsBitmap, bool)| BitmapStatus {
            name: bitmap.name(),
            granularity_bytes: u64::from(bitmap.granularity_sectors) * SECTOR_BYTES,
            enabled: true,
            inconsistent: !is_sound,
        };
        Ok(bitmaps.iter().map(status).collect())
    }

    pub(super) async fn sound_bitmap(&self, file: &ImageFile, name: &str) -> Result<Option<ParallelsBitmap>> {
        let mut bitmaps = self.judged_bitmaps(file).await?.into_iter();
        Ok(bitmaps.find(|(bitmap, is_sound)| *is_sound && bitmap.name() == name).map(|(bitmap, _)| bitmap))
    }

    /// The bitmaps, and whether each can be trusted.
    async fn judged_bitmaps(&self, file: &ImageFile) -> Result<Vec<(ParallelsBitmap, bool)>> {
        let was_in_use = {
            let marks = self.marks.lock().await;
            if !marks.has_extension {
                return Ok(Vec::new());
            }
            self.header.is_in_use
        };
        let wrong = |message| Error::invalid_image("ext_off", self.header.extension_sector, message);
        let Some((at, extension)) = self.extension(file).await? else {
            return Err(wrong("there is no format extension at this sector"));
        };
        if !extension.is_whole {
            return Err(wrong("the format extension at this sector is cut short"));
        }
        let is_sound = !was_in_use && self.has_checksum(file, at, &extension).await?;
        let mut names = HashSet::new();
        let judged = extension.bitmaps.into_iter().map(|bitmap| {
            let is_sound = is_sound && self.fits(file, &bitmap) && names.insert(bitmap.id);
            (bitmap, is_sound)
        });
        Ok(judged.collect())
    }

    async fn has_checksum(&self, file: &ImageFile, start: u64, extension: &FormatExtension) -> Result<bool> {
        let mut sum = Md5::new();
        let (mut at, end) = (start + EXTENSION_HEADER_BYTES as u64, start + self.header.cluster_bytes);
        while at < end {
            let len = (end - at).min(SUMMED_BYTES);
            sum.update(&file.read(at, len as usize).await?[..]);
            at += len;
        }
        Ok(sum.finalize()[..] == extension.checksum)
    }

    /// Whether a bitmap is one of this disk, and all of it is in the file.
    fn fits(&self, file: &ImageFile, bitmap: &ParallelsBitmap) -> bool {
        let granularity_bytes = u64::from(bitmap.granularity_sectors) * SECTOR_BYTES;
        if bitmap.sectors != self.header.size / SECTOR_BYTES
            || !granularity_bytes.is_power_of_two()
            || !GRANULARITY_BYTES.contains(&granularity_bytes)
        {
            return false;
        }
        let bytes = self.header.size.div_ceil(granularity_bytes).div_ceil(8);
        let is_inside = |sector: u64| {
            let host = sector.checked_mul(SECTOR_BYTES).filter(|host| *host >= self.header.data_offset);
            host.and_then(|host| host.checked_add(self.header.cluster_bytes)).is_some_and(|end| end <= file.len())
        };
        bytes <= MAX_BITMAP_BYTES
            && bitmap.table.len() as u64 == bytes.div_ceil(self.header.cluster_bytes)
            && bitmap.table.iter().all(|entry| matches!(*entry, ALL_CLEAR | ALL_SET) || is_inside(*entry))
    }

    /// The bits of a bitmap that fits.
    pub(super) async fn bits_of(&self, file: &ImageFile, bitmap: &ParallelsBitmap) -> Result<DirtyBits> {
        let granularity_bits = (u64::from(bitmap.granularity_sectors) * SECTOR_BYTES).trailing_zeros();
        let mut bits = DirtyBits::new(self.header.size, granularity_bits, PIECE_BITS);
        let cluster_bytes = self.header.cluster_bytes;
        let end = bits.bits().div_ceil(8);
        for piece in 0..bits.piece_count() {
            let mut bytes = vec![0; PIECE_BYTES as usize];
            let mut at = piece * PIECE_BYTES;
            // A piece may touch several clusters, which have any length of whole sectors.
            while at < end.min((piece + 1) * PIECE_BYTES) {
                let entry = bitmap.table.get((at / cluster_bytes) as usize).copied().unwrap_or(ALL_CLEAR);
                let len = (cluster_bytes - at % cluster_bytes).min(end - at).min((piece + 1) * PIECE_BYTES - at);
                let part = &mut bytes[(at % PIECE_BYTES) as usize..][..len as usize];
                match entry {
                    ALL_CLEAR => {}
                    ALL_SET => part.fill(0xff),
                    sector => {
                        let bytes = file.read(sector * SECTOR_BYTES + at % cluster_bytes, part.len()).await?;
                        // A file that another program cuts off gives less.
                        let there = part.get_mut(..bytes.len());
                        there.ok_or_else(|| Error::internal("too many bytes"))?.copy_from_slice(&bytes);
                    }
                }
                at += len;
            }
            bits.put_piece(piece, bytes.into());
        }
        Ok(bits)
    }
}
