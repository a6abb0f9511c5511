// SPDX-License-Identifier: Apache-2.0 OR MIT
//! VHD, which QEMU calls vpc, for reading: docs/formats/block-formats.md.

use super::blocks::{BlockFormat, FILE_KEY, ImageFile, Table, finish};
use super::mapped::{Description, Place};
use crate::node::{Driver, LocalFuture};
use crate::open::{Draft, NamedBacking, Opener};
use crate::options::{DriverKind, DriverSchema};
use cowshed_block::{Error, Result};
use cowshed_layout::vpc::{
    COOKIE, DYNAMIC_HEADER_BYTES, ENTRY_BYTES, FOOTER_BYTES, VpcDynamicHeader, VpcFooter, VpcKind,
};
use std::rc::Rc;

/// The driver and its keys.
pub(crate) const SCHEMA: DriverSchema = DriverSchema {
    name: "vpc",
    kind: DriverKind::Format,
    about: "Virtual PC's image format (VHD), for reading",
    keys: &[FILE_KEY],
};

struct Vpc {
    footer: VpcFooter,
    /// None for fixed disks.
    dynamic: Option<(VpcDynamicHeader, Table)>,
}

/// Opens a VHD image.
pub(crate) fn open<'a>(opener: &'a Rc<Opener>, draft: &'a mut Draft) -> LocalFuture<'a, Result<(Driver, String)>> {
    Box::pin(async move {
        let file = ImageFile::open(opener, draft, "VHD").await?;
        let vpc = load(&file).await.map_err(|error| file.named(error))?;
        finish(opener, draft, file, vpc, NamedBacking::default()).await
    })
}

/// The footer. The one at the end counts: what a fixed disk has at its start is its guest's. The copy at the start is for
/// files that lost their end.
async fn read_footer(file: &ImageFile) -> Result<VpcFooter> {
    let end = file.read(file.len().saturating_sub(FOOTER_BYTES as u64), FOOTER_BYTES).await?;
    let at_end = VpcFooter::parse(&end);
    if at_end.is_ok() {
        return at_end;
    }
    let start = file.read(0, FOOTER_BYTES).await?;
    if !start.starts_with(COOKIE) {
        return at_end;
    }
    match VpcFooter::parse(&start) {
        // Nobody puts a copy in front of a fixed disk.
        Ok(VpcFooter { kind: VpcKind::Fixed, .. }) => at_end,
        copy => copy,
    }
}

async fn load(file: &ImageFile) -> Result<Vpc> {
    let footer = read_footer(file).await?;
    let VpcKind::Dynamic(header_offset) = footer.kind else {
        let there = file.len().saturating_sub(FOOTER_BYTES as u64);
        if footer.size > there {
            let message = format!("the file is too short for the disk: {there} bytes and the footer");
            return Err(Error::invalid_image("size", footer.size, message));
        }
        return Ok(Vpc { footer, dynamic: None });
    };
    if header_offset < FOOTER_BYTES as u64 || header_offset >= file.len() {
        let message = "the header of the dynamic disk is not in the file behind the footer's copy";
        return Err(Error::invalid_image("data_offset", header_offset, message));
    }
    let header = file.read(header_offset, DYNAMIC_HEADER_BYTES).await?;
    let header = VpcDynamicHeader::parse(&header, footer.size)?;
    // The table may have more entries than the disk has blocks.
    let bytes = footer.size.div_ceil(header.block_bytes) * ENTRY_BYTES;
    let table = Table { field: "table_offset", offset: header.table_offset, bytes };
    file.check_table(&table)?;
    if table.overlaps(header_offset, DYNAMIC_HEADER_BYTES as u64) {
        let message = "the block allocation table overlaps the header of the dynamic disk";
        return Err(Error::invalid_image("table_offset", table.offset, message));
    }
    Ok(Vpc { footer, dynamic: Some((header, table)) })
}

impl BlockFormat for Vpc {
    const NAME: &'static str = SCHEMA.name;

    fn size(&self) -> u64 {
        self.footer.size
    }

    fn describe(&self) -> Description {
        let cluster_bytes = self.dynamic.as_ref().map(|(header, _)| header.block_bytes);
        Description { cluster_bytes, ..Description::default() }
    }

    async fn place(&self, file: &ImageFile, at: u64, len: u64) -> Result<(Place, u64)> {
        let Some((header, table)) = &self.dynamic else { return Ok((Place::Data { file: 0, host: at }, len)) };
        let (block, skip) = (at / header.block_bytes, at % header.block_bytes);
        let entry = u32::from_be_bytes(file.entry(*table, block).await?);
        let Some(start) = header.block(entry) else {
            return Ok((Place::Zero, file.same::<4>(*table, block, (at, len, header.block_bytes)).await?));
        };
        let len = len.min(header.block_bytes - skip);
        if start < header.bitmap_bytes() + FOOTER_BYTES as u64 || table.overlaps(start, header.block_bytes) {
            let message = format!("the block at byte {} of the disk lies on the metadata", at - skip);
            return Err(Error::invalid_image("block allocation table entry", entry, message));
        }
        // What the sector bitmap says is not asked, as in QEMU: a sector that was never written is zeroes in the block.
        file.check_data("block allocation table entry", start + skip, len, at)?;
        Ok((Place::Data { file: 0, host: start + skip }, len))
    }
}
