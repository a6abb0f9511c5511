// SPDX-License-Identifier: Apache-2.0 OR MIT
//! VHDX, for reading: docs/formats/block-formats.md.

use super::blocks::{BlockFormat, FILE_KEY, ImageFile, Survey, Table, finish};
use super::mapped::{Description, MappedCheck, Place};
use crate::open::{Draft, DriverLine, NamedBacking, Opened, Opener};
use crate::options::{DriverKind, DriverSchema};
use cowshed_block::{Error, Result};
use cowshed_layout::vhdx::{
    ENTRY_BYTES, HEADER_BYTES, HEADER_OFFSETS, LOG_SECTOR_BYTES, METADATA_TABLE_BYTES, MetadataItem, MetadataTable,
    REGION_TABLE_BYTES, REGION_TABLE_OFFSETS, UNIT_BYTES, VhdxBlock, VhdxDisk, VhdxHeader, VhdxRegions,
    check_signature, is_log_entry,
};
use std::rc::Rc;

const SCHEMA: DriverSchema = DriverSchema {
    name: "vhdx",
    kind: DriverKind::Format,
    about: "Hyper-V's image format, for reading",
    keys: &[FILE_KEY],
};

/// The line of the table.
pub(crate) const DRIVER: DriverLine = DriverLine::new(&SCHEMA, |opener, draft| Box::pin(open(opener, draft)));

struct Vhdx {
    disk: VhdxDisk,
    bat: Table,
    /// Where no data can be: the metadata, the log.
    taken: [Table; 2],
}

/// Opens a VHDX image.
async fn open(opener: &Rc<Opener>, draft: &mut Draft) -> Opened {
    let file = ImageFile::open(opener, draft, "VHDX").await?;
    let vhdx = load(&file).await.map_err(|error| file.named(error))?;
    finish(opener, draft, file, vhdx, NamedBacking::default()).await
}

async fn load(file: &ImageFile) -> Result<Vhdx> {
    check_signature(&file.read(0, 8).await?)?;
    let header = read_header(file).await?;
    let log = Table { field: "LogOffset", offset: header.log_offset, bytes: header.log_bytes };
    if !header.log_guid.is_zero() {
        check_log(file, &header, &log).await?;
    }
    let regions = read_regions(file).await?;
    let (offset, len) = regions.metadata;
    let metadata = Table { field: "FileOffset", offset, bytes: len };
    file.check_table(&metadata)?;
    let table = MetadataTable::parse(&file.read(offset, METADATA_TABLE_BYTES).await?, offset, len)?;
    let item = async |item| {
        let bytes = file.read(offset + table.offset(item), 8).await?;
        // The sector size is 4 bytes long, and may end the region.
        let mut item = [0; 8];
        item[..bytes.len()].copy_from_slice(&bytes);
        Ok(item)
    };
    let disk = VhdxDisk::parse(
        item(MetadataItem::FileParameters).await?,
        item(MetadataItem::VirtualDiskSize).await?,
        item(MetadataItem::LogicalSectorSize).await?,
    )?;
    let bat = Table { field: "FileOffset", offset: regions.bat.0, bytes: disk.entries() * ENTRY_BYTES };
    if bat.bytes > regions.bat.1 {
        let message = format!("the block allocation table is too short for a disk of {} bytes", disk.size);
        return Err(Error::invalid_image("Length", regions.bat.1, message));
    }
    file.check_table(&bat)?;
    Ok(Vhdx { disk, bat, taken: [metadata, log] })
}

async fn read_header(file: &ImageFile) -> Result<VhdxHeader> {
    let [first, second] = HEADER_OFFSETS;
    let header = async |offset| Ok(VhdxHeader::parse(&file.read(offset, HEADER_BYTES).await?, offset));
    VhdxHeader::newer(header(first).await?, header(second).await?)
}

async fn read_regions(file: &ImageFile) -> Result<VhdxRegions> {
    for offset in REGION_TABLE_OFFSETS {
        if let Some(regions) = VhdxRegions::parse(&file.read(offset, REGION_TABLE_BYTES).await?, offset) {
            return regions;
        }
    }
    let message = "neither of the two region tables has its signature and the right checksum";
    Err(Error::invalid_image("region table checksum", "wrong", message).offset(REGION_TABLE_OFFSETS[0]))
}

/// Refuses a log with entries: what they say is newer than the tables, and nothing is written here.
async fn check_log(file: &ImageFile, header: &VhdxHeader, log: &Table) -> Result<()> {
    file.check_table(log)?;
    let mut at = log.offset;
    while at < log.offset + log.bytes {
        let piece = file.read(at, UNIT_BYTES as usize).await?;
        for sector in piece.chunks(LOG_SECTOR_BYTES) {
            if is_log_entry(sector, header.log_guid) {
                let message = "the image was not closed cleanly, and what its log holds must be carried out before it \
                               can be read: attach it in Windows, or run QEMU's 'qemu-img check -r all' on it";
                return Err(Error::unsupported(message).field("LogGuid").value(header.log_guid).offset(at));
            }
        }
        at += UNIT_BYTES;
    }
    Ok(())
}

impl BlockFormat for Vhdx {
    const NAME: &'static str = SCHEMA.name;

    fn size(&self) -> u64 {
        self.disk.size
    }

    fn describe(&self) -> Description {
        Description { cluster_bytes: Some(self.disk.block_bytes), ..Description::default() }
    }

    async fn place(&self, file: &ImageFile, at: u64, len: u64) -> Result<(Place, u64)> {
        let block_bytes = self.disk.block_bytes;
        let (block, skip) = (at / block_bytes, at % block_bytes);
        let index = self.disk.entry_of(block);
        let entry = u64::from_le_bytes(file.entry(self.bat, index).await?);
        let wrong = |message: &str| {
            let message = format!("{message} (block at byte {} of the disk)", at - skip);
            Err(Error::invalid_image("block allocation table entry", format!("{entry:#x}"), message))
        };
        let start = match VhdxBlock::of(entry) {
            VhdxBlock::Zero => {
                // Behind the blocks of a chunk comes the entry of its sector bitmap.
                let chunk_bytes = self.disk.chunk_ratio * block_bytes;
                let len = len.min(chunk_bytes - at % chunk_bytes);
                return Ok((Place::Zero, file.same::<8>(self.bat, index, (at, len, block_bytes)).await?));
            }
            VhdxBlock::At(start) => start,
            VhdxBlock::Partial => return wrong("only an image with a parent has blocks that are there in part"),
            VhdxBlock::Unknown(_) => return wrong("the state of a block is unknown"),
        };
        let len = len.min(block_bytes - skip);
        let taken = std::iter::once(&self.bat).chain(&self.taken);
        if start < UNIT_BYTES || taken.into_iter().any(|table| table.overlaps(start, block_bytes)) {
            return wrong("a block lies on the metadata");
        }
        file.check_data("block allocation table entry", start, skip + len, at)?;
        Ok((Place::Data { file: 0, host: start + skip }, len))
    }

    async fn check(&self, file: &ImageFile, max: usize) -> Result<Option<MappedCheck>> {
        // Blocks begin at multiples of 1 MiB, not of their length.
        Ok(Some(Survey::of(self, file, self.disk.block_bytes, max).await?.without_totals()))
    }
}
