// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Parallels' format: docs/formats/block-formats.md.

use super::blocks::{BlockFormat, FILE_KEY, ImageFile, Table, finish};
use super::mapped::Place;
use super::survey::Survey;
use super::units::Units;
use cowshed_graph::node::{Description, MappedCheck};
use cowshed_graph::open::{BackingReference, Draft, DriverLine, Opened, Opener};
use cowshed_graph::options::{DriverKind, DriverSchema};
use cowshed_layout::parallels::{ENTRY_BYTES, HEADER_BYTES, IN_USE_AT, IN_USE_MARK, ParallelsHeader};
use cowshed_offline::check::Repair;
use cowshed_storage::{File, IoBuf};
use cowshed_types::{Error, ErrorKind, Result};
use futures_util::lock::Mutex as Turn;
use std::rc::Rc;

const SCHEMA: DriverSchema =
    DriverSchema { name: "parallels", kind: DriverKind::Format, about: "Parallels' image format", keys: &[FILE_KEY] };

/// The line of the table.
pub(crate) const DRIVER: DriverLine = DriverLine::new(&SCHEMA, |opener, draft| Box::pin(open(opener, draft)));

struct Parallels {
    header: ParallelsHeader,
    bat: Table,
    /// What the header says: a program has the image open for writing.
    is_in_use: Turn<bool>,
}

/// Opens a Parallels image.
async fn open(opener: &Rc<Opener>, draft: &mut Draft) -> Opened {
    let file = ImageFile::open(opener, draft).await?;
    let parallels = load(&file).await.map_err(|error| file.named(error))?;
    finish(opener, draft, file, parallels, BackingReference::default()).await
}

async fn load(file: &ImageFile) -> Result<Parallels> {
    let header = ParallelsHeader::parse(&file.read(0, HEADER_BYTES).await?)?;
    // The table may have more entries than the disk has clusters.
    let bytes = header.size.div_ceil(header.cluster_bytes) * ENTRY_BYTES;
    let bat = Table { field: "nb_bat_entries", offset: HEADER_BYTES as u64, bytes };
    file.check_table(&bat)?;
    let is_in_use = Turn::new(header.is_in_use);
    Ok(Parallels { header, bat, is_in_use })
}

impl Parallels {
    async fn mark(&self, file: &File, is_in_use: bool) -> Result<()> {
        let mut known = self.is_in_use.lock().await;
        if *known != is_in_use {
            let mark = if is_in_use { IN_USE_MARK } else { [0; 4] };
            file.write_at(IoBuf::copy_from(&mark), IN_USE_AT).await.0?;
            file.sync().await?;
            *known = is_in_use;
        }
        Ok(())
    }
}

impl BlockFormat for Parallels {
    const NAME: &'static str = SCHEMA.name;

    fn size(&self) -> u64 {
        self.header.size
    }

    /// qemu-img doesn't tell the cluster size.
    fn describe(&self) -> Description {
        Description::default()
    }

    async fn place(&self, file: &ImageFile, at: u64, len: u64) -> Result<(Place, u64)> {
        let cluster_bytes = self.header.cluster_bytes;
        let (cluster, skip) = (at / cluster_bytes, at % cluster_bytes);
        let entry = u32::from_le_bytes(file.entry(self.bat, cluster).await?);
        let Some(start) = self.header.cluster(entry) else {
            return Ok((Place::Unallocated, file.same::<4>(self.bat, cluster, (at, len, cluster_bytes)).await?));
        };
        let len = len.min(cluster_bytes - skip);
        if start < self.header.data_offset {
            let message = format!("the cluster at byte {} of the disk lies before the data", at - skip);
            return Err(Error::invalid_image("BAT entry", entry, message));
        }
        file.check_data("BAT entry", start, skip + len, at)?;
        Ok((Place::Data { file: 0, host: start + skip }, len))
    }

    async fn check(&self, file: &ImageFile, max: usize) -> Result<Option<MappedCheck>> {
        let cluster_bytes = self.header.cluster_bytes;
        let mut survey = Survey::of(self, file, cluster_bytes, max).await?;
        if *self.is_in_use.lock().await {
            survey.corruption("the image was not closed correctly".to_owned());
        }
        let apart = survey.apart;
        let counters = &mut survey.check.counters;
        // Other than for QED, qemu-img takes no notice of gaps here.
        counters.fragmented_clusters = apart;
        counters.total_clusters = u64::from(self.header.entries);
        counters.image_end_offset = counters.image_end_offset.max(self.header.data_offset);
        counters.leaks = file.len().saturating_sub(counters.image_end_offset).div_ceil(cluster_bytes);
        Ok(Some(survey.check))
    }

    /// As QEMU's: entries that lead out of the file are cleared, space behind the last cluster is cut off, the mark goes.
    async fn repair(&self, image: &ImageFile, what: Repair, max: usize) -> Result<Option<MappedCheck>> {
        let (file, cluster_bytes) = (image.storage(), self.header.cluster_bytes);
        let (mut fixed, mut end) = (0, self.header.data_offset);
        let was_in_use = *self.is_in_use.lock().await;
        for cluster in 0..self.header.size.div_ceil(cluster_bytes) {
            let entry = u32::from_le_bytes(image.entry(self.bat, cluster).await?);
            let Some(start) = self.header.cluster(entry) else { continue };
            if start >= self.header.data_offset && start.saturating_add(cluster_bytes) <= image.len() {
                end = end.max(start + cluster_bytes);
            } else if what == Repair::All {
                let at = self.bat.offset + cluster * ENTRY_BYTES;
                file.write_at(IoBuf::zeroed(ENTRY_BYTES as usize), at).await.0?;
                fixed += 1;
            } else {
                end = image.len();
            }
        }
        file.sync().await?;
        image.forget();
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

    async fn slot(&self, _file: &ImageFile, block: u64) -> Result<(Table, u64)> {
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
        self.mark(file, false).await
    }
}
