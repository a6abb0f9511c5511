// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Parallels' format, for reading: docs/formats/block-formats.md.

use super::blocks::{BlockFormat, FILE_KEY, ImageFile, Survey, Table, finish};
use super::mapped::{Description, MappedCheck, Place};
use crate::open::{Draft, DriverLine, NamedBacking, Opened, Opener};
use crate::options::{DriverKind, DriverSchema};
use cowshed_block::{Error, Result};
use cowshed_layout::parallels::{ENTRY_BYTES, HEADER_BYTES, ParallelsHeader};
use std::rc::Rc;

const SCHEMA: DriverSchema = DriverSchema {
    name: "parallels",
    kind: DriverKind::Format,
    about: "Parallels' image format, for reading",
    keys: &[FILE_KEY],
};

/// The line of the table.
pub(crate) const DRIVER: DriverLine = DriverLine::new(&SCHEMA, |opener, draft| Box::pin(open(opener, draft)));

struct Parallels {
    header: ParallelsHeader,
    bat: Table,
}

/// Opens a Parallels image.
async fn open(opener: &Rc<Opener>, draft: &mut Draft) -> Opened {
    let file = ImageFile::open(opener, draft, "Parallels").await?;
    let parallels = load(&file).await.map_err(|error| file.named(error))?;
    finish(opener, draft, file, parallels, NamedBacking::default()).await
}

async fn load(file: &ImageFile) -> Result<Parallels> {
    let header = ParallelsHeader::parse(&file.read(0, HEADER_BYTES).await?)?;
    // The table may have more entries than the disk has clusters.
    let bytes = header.size.div_ceil(header.cluster_bytes) * ENTRY_BYTES;
    let bat = Table { field: "nb_bat_entries", offset: HEADER_BYTES as u64, bytes };
    file.check_table(&bat)?;
    Ok(Parallels { header, bat })
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
        if self.header.is_in_use {
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
}
