// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Parallels' format: docs/formats/block-formats.md.

use super::blocks::{BlockFormat, FILE_KEY, FileTable, ImageFile, finish};
use super::mapped::{RunSource, no_such_bitmap};
use super::survey::BlockSurvey;
use super::units::Units;
use cowshed_graph::node::{BitmapStatus, Description, MappedCheck};
use cowshed_graph::open::{BackingReference, Draft, DriverLine, Opened, Opener};
use cowshed_graph::options::{DriverKind, DriverSchema};
use cowshed_layout::parallels::{
    ENTRY_BYTES, EXTENSION_AT, FormatExtension, HEADER_BYTES, IN_USE_AT, IN_USE_MARK, ParallelsHeader,
};
use cowshed_storage::{File, IoBuf};
use cowshed_types::{DirtyBits, Error, ErrorKind, Repair, Result};
use futures_util::lock::Mutex as AsyncMutex;
use std::rc::Rc;
use std::sync::Arc;

const SCHEMA: DriverSchema =
    DriverSchema { name: "parallels", kind: DriverKind::Format, about: "Parallels' image format", keys: &[FILE_KEY] };

/// The line of the table.
pub(crate) const DRIVER: DriverLine = DriverLine::new(&SCHEMA, |opener, draft| Box::pin(open(opener, draft)));

struct Parallels {
    header: ParallelsHeader,
    bat: FileTable,
    marks: AsyncMutex<Marks>,
}

/// The marks in the header at the moment.
struct Marks {
    /// A program has the image open for writing.
    is_in_use: bool,
    /// There is a format extension: dirty bitmaps.
    has_extension: bool,
}

mod bitmaps;
mod twins;

/// This much of the extension's cluster is looked at.
const MAX_EXTENSION_BYTES: u64 = 4 << 20;

/// Opens a Parallels image.
async fn open(opener: &Rc<Opener>, draft: &mut Draft) -> Opened {
    let file = ImageFile::open(opener, draft).await?;
    let parallels = load(&file).await.map_err(|error| file.named(error))?;
    finish(opener, draft, file, parallels, BackingReference::default()).await
}

async fn load(file: &ImageFile) -> Result<Parallels> {
    let header = ParallelsHeader::parse(&file.read(0, HEADER_BYTES).await?)?;
    // The table may have more entries than the disk has clusters. QEMU's check counts their clusters as used.
    let needed = header.size.div_ceil(header.cluster_bytes) * ENTRY_BYTES;
    let (offset, there) = (HEADER_BYTES as u64, file.len().saturating_sub(HEADER_BYTES as u64));
    let bytes = (u64::from(header.entries) * ENTRY_BYTES).min(there / ENTRY_BYTES * ENTRY_BYTES).max(needed);
    let bat = FileTable { field: "nb_bat_entries", offset, bytes };
    file.check_table(&bat)?;
    let marks = Marks { is_in_use: header.is_in_use, has_extension: header.extension_sector != 0 };
    Ok(Parallels { header, bat, marks: AsyncMutex::new(marks) })
}

impl Parallels {
    /// The next entry from `cluster` on that names a place: its number and the place.
    async fn next_entry(&self, image: &ImageFile, mut cluster: u64) -> Result<Option<(u64, u64)>> {
        let (count, cluster_bytes) = (self.bat.bytes / ENTRY_BYTES, self.header.cluster_bytes);
        while cluster < count {
            let entry = u32::from_le_bytes(image.entry(self.bat, cluster).await?);
            if let Some(start) = self.header.cluster(entry) {
                return Ok(Some((cluster, start)));
            }
            let rest = (0, (count - cluster).saturating_mul(cluster_bytes), cluster_bytes);
            cluster += image.same::<4>(self.bat, cluster, rest).await?.div_ceil(cluster_bytes);
        }
        Ok(None)
    }

    /// Marks the image as one that a program has open for writing, or as closed. The content changes meanwhile, which
    /// the format extension doesn't follow: the same write takes it off the header, before any change.
    async fn mark(&self, file: &File, is_in_use: bool) -> Result<()> {
        let mut marks = self.marks.lock().await;
        if marks.is_in_use != is_in_use || marks.has_extension {
            let mark = if is_in_use { IN_USE_MARK } else { [0; 4] };
            let bytes = match marks.has_extension {
                true => {
                    // All in one sector, so that a power cut leaves both fields or none.
                    let len = HEADER_BYTES - IN_USE_AT as usize;
                    let (result, fields) = file.read_at(IoBuf::try_zeroed(len)?, IN_USE_AT).await;
                    result?;
                    let mut fields = fields.to_vec();
                    fields[..mark.len()].copy_from_slice(&mark);
                    fields[(EXTENSION_AT - IN_USE_AT) as usize..].fill(0);
                    fields
                }
                false => mark.to_vec(),
            };
            file.write_at(IoBuf::copy_from(&bytes), IN_USE_AT).await.0?;
            file.sync().await?;
            *marks = Marks { is_in_use, has_extension: false };
        }
        Ok(())
    }

    /// The format extension that the header leads to; `None` where there is none.
    async fn extension(&self, file: &ImageFile) -> Result<Option<(u64, FormatExtension)>> {
        let inside = |at: &u64| at.checked_add(self.header.cluster_bytes).is_some_and(|end| end <= file.len());
        let Some(at) = self.header.extension_at().filter(inside) else { return Ok(None) };
        let len = self.header.cluster_bytes.min(MAX_EXTENSION_BYTES);
        let bytes = file.read(at, usize::try_from(len).unwrap_or(usize::MAX)).await?;
        Ok(FormatExtension::parse(&bytes).map(|extension| (at, extension)))
    }

    /// The clusters of the format extension in the file, and where they end: all of the file may belong to a feature that is unknown.
    async fn extension_clusters(&self, file: &ImageFile) -> Result<(Vec<u64>, u64)> {
        let Some((at, extension)) = self.extension(file).await? else { return Ok((Vec::new(), file.len())) };
        let Some(mut clusters) = extension.clusters else { return Ok((vec![at], file.len())) };
        clusters.push(at);
        let end = clusters.iter().map(|at| at.saturating_add(self.header.cluster_bytes)).max();
        Ok((clusters, end.unwrap_or(0).min(file.len())))
    }
}

impl BlockFormat for Parallels {
    const NAME: &'static str = SCHEMA.name;
    const HAS_BITMAPS: bool = true;

    async fn bitmaps(&self, file: &ImageFile) -> Result<Vec<BitmapStatus>> {
        self.list_bitmaps(file).await
    }

    async fn bitmap_bits(&self, file: &ImageFile, name: &str) -> Result<Arc<DirtyBits>> {
        match self.sound_bitmap(file, name).await? {
            Some(bitmap) => self.bits_of(file, &bitmap).await.map(Arc::new),
            None => Err(no_such_bitmap(name)),
        }
    }

    fn size(&self) -> u64 {
        self.header.size
    }

    fn described_bytes(&self) -> u64 {
        self.size().max((self.bat.bytes / ENTRY_BYTES).saturating_mul(self.header.cluster_bytes))
    }

    /// qemu-img doesn't print the cluster size.
    fn describe(&self) -> Description {
        Description { only_sizes: true, in_sectors: true, ..Description::default() }
    }

    async fn before_writing(&self, file: &ImageFile) -> Result<()> {
        if !self.marks.lock().await.has_extension {
            return Ok(());
        }
        match self.extension(file).await? {
            Some((_, extension)) if extension.forbids_writing => {
                let message = "the image has a format extension that must not be lost: it can only be read";
                Err(Error::new(ErrorKind::ReadOnly, message).field("ext_off").value(self.header.extension_sector))
            }
            _ => Ok(()),
        }
    }

    async fn place(&self, file: &ImageFile, at: u64, len: u64) -> Result<(RunSource, u64)> {
        let cluster_bytes = self.header.cluster_bytes;
        let (cluster, skip) = (at / cluster_bytes, at % cluster_bytes);
        let entry = u32::from_le_bytes(file.entry(self.bat, cluster).await?);
        let Some(start) = self.header.cluster(entry) else {
            return Ok((RunSource::Unallocated, file.same::<4>(self.bat, cluster, (at, len, cluster_bytes)).await?));
        };
        let len = len.min(cluster_bytes - skip);
        if start < self.header.data_offset {
            let message = format!("the cluster at byte {} of the disk lies before the data", at - skip);
            return Err(Error::invalid_image("BAT entry", entry, message));
        }
        file.check_data("BAT entry", start, skip + len, at)?;
        Ok((RunSource::Data { file: 0, host: start + skip }, len))
    }

    async fn check(&self, file: &ImageFile, max: usize) -> Result<Option<MappedCheck>> {
        let cluster_bytes = self.header.cluster_bytes;
        let mut survey = BlockSurvey::of(self, file, cluster_bytes, max).await?;
        let (is_in_use, has_extension) = {
            let marks = self.marks.lock().await;
            (marks.is_in_use, marks.has_extension)
        };
        if is_in_use {
            survey.corruption("the image was not closed correctly".to_owned());
        }
        let mut extension_end = 0;
        if has_extension {
            let (clusters, end) = self.extension_clusters(file).await?;
            extension_end = end;
            if clusters.is_empty() {
                let sector = self.header.extension_sector;
                survey
                    .corruption(format!("there is no format extension at sector {sector}, where the header leads to"));
            }
            for host in clusters {
                survey.claim(host, cluster_bytes, || "format extension".to_owned())?;
            }
        }
        let apart = survey.apart;
        let counters = &mut survey.check.counters;
        // Other than for QED, qemu-img takes no notice of gaps here.
        counters.fragmented_clusters = apart;
        counters.total_clusters = u64::from(self.header.entries);
        counters.image_end_offset = counters.image_end_offset.max(self.header.data_offset).max(extension_end);
        counters.leaks = file.len().saturating_sub(counters.image_end_offset).div_ceil(cluster_bytes);
        Ok(Some(survey.check))
    }

    /// As QEMU's: entries that lead out of the file are cleared, and of two blocks in one place one gets a copy. Space behind
    /// the last cluster is cut off, and the mark goes. The format extension stays while nothing else changes; one that isn't
    /// at the place in the header goes.
    async fn repair(&self, image: &ImageFile, what: Repair, max: usize) -> Result<Option<MappedCheck>> {
        let (file, cluster_bytes) = (image.storage(), self.header.cluster_bytes);
        let (mut fixed, mut end) = (0, self.header.data_offset);
        let (was_in_use, has_extension) = {
            let marks = self.marks.lock().await;
            (marks.is_in_use, marks.has_extension)
        };
        if has_extension && what == Repair::All {
            let is_missing = self.extension(image).await?.is_none();
            fixed += u64::from(is_missing);
            // A program that had it open may have changed the disk and not the bitmaps.
            if is_missing || was_in_use {
                self.mark(&file, was_in_use).await?;
            }
        }
        let mut next = 0;
        while let Some((cluster, start)) = self.next_entry(image, next).await? {
            next = cluster + 1;
            if start >= self.header.data_offset && start.saturating_add(cluster_bytes) <= image.len() {
                end = end.max(start + cluster_bytes);
            } else if what == Repair::All {
                self.mark(&file, was_in_use).await?;
                let at = self.bat.offset + cluster * ENTRY_BYTES;
                file.write_at(IoBuf::zeroed(ENTRY_BYTES as usize), at).await.0?;
                fixed += 1;
            } else {
                end = image.len();
            }
        }
        file.sync().await?;
        image.forget();
        if what == Repair::All {
            let (parted, last) = self.part_twins(image, &file, was_in_use).await?;
            fixed += parted;
            end = end.max(last);
        }
        if self.marks.lock().await.has_extension {
            end = end.max(self.extension_clusters(image).await?.1);
        }
        let leaks = image.len().saturating_sub(end).div_ceil(cluster_bytes);
        if leaks > 0 && !file.is_device() {
            file.set_len(end).await?;
            file.sync().await?;
        }
        let is_clean =
            self.check(image, 2).await?.is_some_and(|check| check.counters.corruptions == u64::from(was_in_use));
        if was_in_use && what == Repair::All && is_clean {
            self.mark(&file, false).await?;
            fixed += 1;
        }
        let mut check = self.check(image, max).await?;
        if let Some(check) = &mut check {
            check.counters.corruptions_fixed = fixed;
            check.counters.leaks_fixed = leaks;
        }
        Ok(check)
    }

    fn units(&self) -> Option<Units> {
        let (block_bytes, head, tail) = (self.header.cluster_bytes, Vec::new(), Vec::new());
        let first = self.header.data_offset;
        // With the older magic clusters begin at any sector.
        let grid = self.header.entry_unit_bytes;
        Some(Units { file: 0, block_bytes, head, first, grid, tail, is_at_end: false })
    }

    async fn slot(&self, _file: &ImageFile, block: u64) -> Result<(FileTable, u64)> {
        Ok((self.bat, block))
    }

    fn entry(&self, host: u64) -> Result<Vec<u8>> {
        match u32::try_from(host / self.header.entry_unit_bytes) {
            Ok(entry) => Ok(entry.to_le_bytes().to_vec()),
            Err(_) => Err(Error::new(ErrorKind::NoSpace, "a Parallels image can be no longer").value(host)),
        }
    }

    async fn before_change(&self, file: &File) -> Result<()> {
        self.mark(file, true).await
    }

    async fn settle(&self, file: &File) -> Result<()> {
        // Without a change there is nothing to take back, and the format extension stays.
        let is_in_use = self.marks.lock().await.is_in_use;
        if is_in_use { self.mark(file, false).await } else { Ok(()) }
    }
}
