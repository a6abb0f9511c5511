// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Growing images of Bochs, for reading: docs/formats/block-formats.md.

use super::blocks::{BlockFormat, FILE_KEY, FileTable, ImageFile, finish};
use super::mapped::RunSource;
use cowshed_graph::node::Description;
use cowshed_graph::open::{BackingReference, Draft, DriverLine, Opened, Opener};
use cowshed_graph::options::{DriverKind, DriverSchema};
use cowshed_layout::bochs::{BochsHeader, HEADER_BYTES};
use cowshed_types::{Error, ErrorKind, Result};
use std::rc::Rc;

const SECTOR_BYTES: u64 = 512;

const SCHEMA: DriverSchema = DriverSchema {
    name: "bochs",
    kind: DriverKind::Format,
    about: "Bochs growing images, for reading",
    keys: &[FILE_KEY],
};

/// The line of the table.
pub(crate) const DRIVER: DriverLine = DriverLine::new(&SCHEMA, |opener, draft| Box::pin(open(opener, draft)));

struct Bochs {
    header: BochsHeader,
    catalog: FileTable,
}

async fn open(opener: &Rc<Opener>, draft: &mut Draft) -> Opened {
    let file = ImageFile::open(opener, draft).await?;
    let bochs = load(&file).await.map_err(|error| file.named(error))?;
    finish(opener, draft, file, bochs, BackingReference::default()).await
}

async fn load(file: &ImageFile) -> Result<Bochs> {
    let header = BochsHeader::parse(&file.read(0, HEADER_BYTES).await?)?;
    let catalog = FileTable { field: "catalog", offset: header.catalog_offset, bytes: header.catalog_bytes() };
    file.check_table(&catalog)?;
    Ok(Bochs { header, catalog })
}

impl BlockFormat for Bochs {
    const NAME: &'static str = SCHEMA.name;
    const READ_ONLY: bool = true;

    fn size(&self) -> u64 {
        self.header.size
    }

    fn describe(&self) -> Description {
        Description { only_sizes: true, in_sectors: true, ..Description::default() }
    }

    fn takes_backing(&self) -> bool {
        false
    }

    async fn before_writing(&self, _file: &ImageFile) -> Result<()> {
        Err(Error::new(ErrorKind::ReadOnly, "images of Bochs can only be read").qemu("Image is read-only"))
    }

    async fn place(&self, file: &ImageFile, at: u64, len: u64) -> Result<(RunSource, u64)> {
        let extent_bytes = self.header.extent_bytes;
        let index = at / extent_bytes;
        let entry = u32::from_le_bytes(file.entry(self.catalog, index).await?);
        let Some(bitmap) = self.header.extent(entry) else {
            return Ok((RunSource::Zero, file.same::<4>(self.catalog, index, (at, len, extent_bytes)).await?));
        };
        let skip = at % extent_bytes;
        let bits = FileTable { field: "bitmap", offset: bitmap, bytes: self.header.bitmap_bytes };
        file.check_table(&bits)?;
        let last = (skip + len.min(extent_bytes - skip)).div_ceil(SECTOR_BYTES);
        let mut sector = skip / SECTOR_BYTES;
        let is_set = async |sector: u64| {
            let [byte] = file.entry::<1>(bits, sector / 8).await?;
            Ok::<bool, Error>(byte >> (sector % 8) & 1 == 1)
        };
        let is_data = is_set(sector).await?;
        while sector < last && is_set(sector).await? == is_data {
            sector += 1;
        }
        let len = (sector * SECTOR_BYTES - skip).min(len);
        if !is_data {
            return Ok((RunSource::Zero, len));
        }
        let host = bitmap + self.header.bitmap_bytes + skip;
        file.check_data("catalog", host, len, at)?;
        Ok((RunSource::Data { file: 0, host }, len))
    }
}
