// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Compressed loop images of Linux, for reading: docs/formats/block-formats.md.

use super::blocks::{BlockFormat, FILE_KEY, FileTable, ImageFile, finish};
use super::mapped::{LARGE_BYTES, RunSource, zeroed};
use cowshed_codec::inflate_zlib;
use cowshed_graph::node::Description;
use cowshed_graph::open::{BackingReference, Draft, DriverLine, Opened, Opener};
use cowshed_graph::options::{DriverKind, DriverSchema};
use cowshed_layout::cloop::{CloopHeader, HEADER_BYTES};
use cowshed_storage::rt;
use cowshed_types::{Error, ErrorKind, Result};
use std::rc::Rc;

const SCHEMA: DriverSchema = DriverSchema {
    name: "cloop",
    kind: DriverKind::Format,
    about: "Linux cloop images, for reading",
    keys: &[FILE_KEY],
};

/// The line of the table.
pub(crate) const DRIVER: DriverLine = DriverLine::new(&SCHEMA, |opener, draft| Box::pin(open(opener, draft)));

struct Cloop {
    header: CloopHeader,
    table: FileTable,
}

async fn open(opener: &Rc<Opener>, draft: &mut Draft) -> Opened {
    let file = ImageFile::open(opener, draft).await?;
    let cloop = load(&file).await.map_err(|error| file.named(error))?;
    finish(opener, draft, file, cloop, BackingReference::default()).await
}

async fn load(file: &ImageFile) -> Result<Cloop> {
    let header = CloopHeader::parse(&file.read(0, HEADER_BYTES).await?)?;
    let table = FileTable { field: "offsets", offset: HEADER_BYTES as u64, bytes: header.table_bytes() };
    file.check_table(&table)?;
    Ok(Cloop { header, table })
}

impl BlockFormat for Cloop {
    const NAME: &'static str = SCHEMA.name;
    const READ_ONLY: bool = true;

    fn size(&self) -> u64 {
        self.header.size()
    }

    fn describe(&self) -> Description {
        Description { only_sizes: true, in_sectors: true, ..Description::default() }
    }

    fn takes_backing(&self) -> bool {
        false
    }

    async fn before_writing(&self, _file: &ImageFile) -> Result<()> {
        Err(Error::new(ErrorKind::ReadOnly, "cloop images can only be read").qemu("Image is read-only"))
    }

    async fn place(&self, _file: &ImageFile, at: u64, len: u64) -> Result<(RunSource, u64)> {
        let skip = at % self.header.block_bytes;
        Ok((RunSource::Packed { block: at - skip }, len.min(self.header.block_bytes - skip)))
    }

    fn packs_large(&self) -> bool {
        self.header.block_bytes > LARGE_BYTES
    }

    async fn unpack(&self, file: &ImageFile, block: u64) -> Result<Vec<u8>> {
        let index = block / self.header.block_bytes;
        let start = u64::from_be_bytes(file.entry(self.table, index).await?);
        let end = u64::from_be_bytes(file.entry(self.table, index + 1).await?);
        // Data that doesn't get shorter grows a little.
        let most = self.header.block_bytes + self.header.block_bytes / 8 + 1024;
        let len = end.checked_sub(start).filter(|&len| len <= most);
        let len = len.ok_or_else(|| Error::invalid_image("offsets", end, "a block has an impossible length"))?;
        file.check_data("offsets", start, len, block)?;
        let (packed, bytes) = (file.read(start, len as usize).await?, self.header.block_bytes as usize);
        rt::run_on_cpu_pool(move || {
            let mut out = zeroed(bytes)?;
            inflate_zlib(&packed, &mut out, bytes)?;
            Ok(out)
        })
        .await
        .map_err(|error: Error| error.offset(start))
    }
}
