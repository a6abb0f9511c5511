// SPDX-License-Identifier: Apache-2.0 OR MIT
//! VHDX: docs/formats/block-formats.md.

mod journal;

use super::blocks::{BACKING_KEY, BlockFormat, FILE_KEY, FileTable, ImageFile, finish};
use super::mapped::RunSource;
use super::parents::{check_identity, parent_of};
use super::patches::Patches;
use super::sector_map::SectorMap;
use super::survey::BlockSurvey;
use super::units::Units;
use super::writer::Usage;
use cowshed_graph::node::Node;
use cowshed_graph::node::{Description, MappedCheck};
use cowshed_graph::open::{BackingReference, Draft, DriverLine, Opened, Opener};
use cowshed_graph::options::{DriverKind, DriverSchema};
use cowshed_layout::vhdx::{
    ENTRY_BYTES, HEADER_BYTES, HEADER_OFFSETS, MAX_LOG_BYTES, METADATA_TABLE_BYTES, MetadataItem, MetadataTable,
    REGION_TABLE_BYTES, REGION_TABLE_OFFSETS, Replay, UNIT_BYTES, VhdxBlock, VhdxDisk, VhdxHeader, VhdxParent,
    VhdxRegions, check_signature, replay_of,
};
use cowshed_storage::File;
use cowshed_types::{Error, ErrorKind, Repair, Result};
use journal::LogWriter;
use std::rc::Rc;

const SCHEMA: DriverSchema = DriverSchema {
    name: "vhdx",
    kind: DriverKind::Format,
    about: "Hyper-V's image format",
    keys: &[FILE_KEY, BACKING_KEY],
};

/// The line of the table.
pub(crate) const DRIVER: DriverLine = DriverLine::new(&SCHEMA, |opener, draft| Box::pin(open(opener, draft)));

struct Vhdx {
    disk: VhdxDisk,
    bat: FileTable,
    /// Where no data can be: the region of the BAT, the metadata, the log.
    taken: [FileTable; 3],
    journal: LogWriter,
    /// The log held changes when the image was opened.
    had_log: bool,
    parent: Option<VhdxParent>,
}

/// Opens a VHDX image. The changes in its log are carried out: in the file where that is opened for writing, else in
/// memory.
async fn open(opener: &Rc<Opener>, draft: &mut Draft) -> Opened {
    let mut file = ImageFile::open(opener, draft).await?;
    let is_written = !draft.settings.read_only;
    let vhdx = load(&mut file, is_written).await.map_err(|error| file.named(error))?;
    let backing = match &vhdx.parent {
        Some(parent) => parent_of::<Vhdx>(opener, draft, parent.name.clone(), &parent.linkages.join(", "))
            .map_err(|error| file.named(error))?,
        None => BackingReference::default(),
    };
    finish(opener, draft, file, vhdx, backing).await
}

async fn load(file: &mut ImageFile, is_written: bool) -> Result<Vhdx> {
    check_signature(&file.read(0, 8).await?)?;
    let (header, slot) = read_header(file).await?;
    let log = FileTable { field: "LogOffset", offset: header.log_offset, bytes: header.log_bytes };
    let journal = LogWriter::new(header.clone(), slot);
    let mut had_log = false;
    if !header.log_guid.is_zero()
        && let Some(replay) = read_log(file, &header, &log).await?
    {
        had_log = true;
        match is_written {
            true => {
                journal.carry_out(&file.storage(), replay).await?;
                file.forget();
            }
            false => file.patch(Patches::of(replay)),
        }
    }
    let regions = read_regions(file).await?;
    let (offset, len) = regions.metadata;
    let metadata = FileTable { field: "FileOffset", offset, bytes: len };
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
    let parent = match disk.has_parent {
        true => Some(read_parent(file, offset, &table).await?),
        false => None,
    };
    let bat = FileTable { field: "FileOffset", offset: regions.bat.0, bytes: disk.entries() * ENTRY_BYTES };
    if bat.bytes > regions.bat.1 {
        let message = format!("the block allocation table is too short for a disk of {} bytes", disk.size);
        return Err(Error::invalid_image("Length", regions.bat.1, message));
    }
    file.check_table(&bat)?;
    let bat_region = FileTable { bytes: regions.bat.1, ..bat };
    Ok(Vhdx { disk, bat, taken: [bat_region, metadata, log], journal, had_log, parent })
}

/// Where the parent is, by the metadata at `offset`.
async fn read_parent(file: &ImageFile, offset: u64, table: &MetadataTable) -> Result<VhdxParent> {
    let (start, len) = table.parent_locator.ok_or_else(|| {
        Error::invalid_image("parent locator", "missing", "the disk is a difference, and doesn't say to what")
    })?;
    VhdxParent::parse(&file.read(offset + start, len as usize).await?)
}

/// The header that counts, and which of the two it is.
async fn read_header(file: &ImageFile) -> Result<(VhdxHeader, usize)> {
    let [first, second] = HEADER_OFFSETS;
    let header = async |offset| Ok(VhdxHeader::parse(&file.read(offset, HEADER_BYTES).await?, offset));
    let (first, second) = (header(first).await?, header(second).await?);
    let is_second = |header: &VhdxHeader| matches!(&second, Some(Ok(second)) if second == header);
    let newer = VhdxHeader::newer(first.clone(), second.clone())?;
    let slot = usize::from(is_second(&newer));
    Ok((newer, slot))
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

/// The changes in the log, which is newer than the tables.
async fn read_log(file: &ImageFile, header: &VhdxHeader, log: &FileTable) -> Result<Option<Replay>> {
    file.check_table(log)?;
    if log.bytes > MAX_LOG_BYTES {
        let message = format!("a log of more than {MAX_LOG_BYTES} bytes that has to be carried out is not supported");
        return Err(Error::new(ErrorKind::Limit, message).field("LogLength").value(log.bytes));
    }
    let bytes = file.read(log.offset, log.bytes as usize).await?;
    let Some(replay) = replay_of(&bytes, header.log_guid, log.offset)? else { return Ok(None) };
    let there = file.len();
    if replay.flushed_bytes > there {
        let message = format!("the file is cut off: it has {there} bytes, and its log knows of more");
        return Err(Error::invalid_image("FlushedFileOffset", replay.flushed_bytes, message));
    }
    let end = replay.last_bytes.max(there);
    if i64::try_from(replay.last_bytes).is_err() {
        let message = "the log asks for a file that is too long";
        return Err(Error::invalid_image("LastFileOffset", replay.last_bytes, message));
    }
    if let Some(write) = replay.writes.iter().find(|write| write.range().end > end) {
        let message = "an entry of the log changes bytes behind the end of the file";
        return Err(Error::invalid_image("FileOffset", format!("{:#x}", write.range().start), message));
    }
    Ok(Some(replay))
}

/// Refuses to write where there is no room for a log.
fn check_log(file: &ImageFile, log: &FileTable) -> Result<()> {
    if log.bytes == 0 {
        return Err(Error::invalid_image("LogLength", 0, "the image has no log: it can't be written to"));
    }
    file.check_table(log)
}

impl BlockFormat for Vhdx {
    const NAME: &'static str = SCHEMA.name;

    fn size(&self) -> u64 {
        self.disk.size
    }

    fn describe(&self) -> Description {
        Description {
            in_sectors: true,
            cluster_bytes: Some(self.disk.block_bytes),
            backing_name: self.parent.as_ref().and_then(|parent| parent.name.clone()),
            backing_format: self.parent.as_ref().map(|_| SCHEMA.name),
            identity: Some(self.journal.data_guid().to_string()),
            ..Description::default()
        }
    }

    fn takes_backing(&self) -> bool {
        self.parent.is_some()
    }

    /// A parent that was written to since is another disk than the one that the differences belong to.
    fn check_parent(&self, parent: &Node) -> Result<()> {
        match &self.parent {
            Some(wanted) => check_identity(parent, "parent_linkage", &wanted.linkages),
            None => Ok(()),
        }
    }

    async fn place(&self, file: &ImageFile, at: u64, len: u64) -> Result<(RunSource, u64)> {
        let block_bytes = self.disk.block_bytes;
        let (block, skip) = (at / block_bytes, at % block_bytes);
        let index = self.disk.entry_of(block);
        let entry = u64::from_le_bytes(file.entry(self.bat, index).await?);
        let wrong = |message: &str| {
            let message = format!("{message} (block at byte {} of the disk)", at - skip);
            Err(Error::invalid_image("block allocation table entry", format!("{entry:#x}"), message))
        };
        let start = match VhdxBlock::of(entry) {
            empty @ (VhdxBlock::Zero | VhdxBlock::Absent) => {
                let is_below = self.parent.is_some() && empty == VhdxBlock::Absent;
                let place = if is_below { RunSource::Unallocated } else { RunSource::Zero };
                // Behind the blocks of a chunk comes the entry of its sector bitmap.
                let chunk_bytes = self.disk.chunk_ratio * block_bytes;
                let len = len.min(chunk_bytes - at % chunk_bytes);
                return Ok((place, file.same::<8>(self.bat, index, (at, len, block_bytes)).await?));
            }
            VhdxBlock::At(start) => start,
            VhdxBlock::Partial if self.parent.is_some() => entry >> 20 << 20,
            VhdxBlock::Partial => return wrong("only an image with a parent has blocks that are there in part"),
            VhdxBlock::Unknown(_) => return wrong("the state of a block is unknown"),
        };
        let len = len.min(block_bytes - skip);
        if start < UNIT_BYTES || self.taken.iter().any(|table| table.overlaps(start, block_bytes)) {
            return wrong("a block lies on the metadata");
        }
        file.check_data("block allocation table entry", start, skip + len, at)?;
        if VhdxBlock::of(entry) != VhdxBlock::Partial {
            return Ok(file.data(start + skip, at, len));
        }
        let bitmap = u64::from_le_bytes(file.entry(self.bat, self.disk.bitmap_entry_of(block)).await?);
        let VhdxBlock::At(offset) = VhdxBlock::of(bitmap) else {
            return wrong("a block is there in part, and the bitmap of its sectors is missing");
        };
        let table = FileTable { field: "sector bitmap", offset, bytes: UNIT_BYTES };
        let map = SectorMap { table, sector_bytes: self.disk.sector_bytes, is_high_first: false };
        let chunk_bytes = self.disk.chunk_ratio * block_bytes;
        match map.run(file, at % chunk_bytes, len).await? {
            (true, len) => Ok(file.data(start + skip, at, len)),
            (false, len) => Ok((RunSource::Unallocated, len)),
        }
    }

    /// A sector that the log has: as no image for writing has one, it is found by its place.
    async fn unpack(&self, file: &ImageFile, block: u64) -> Result<Vec<u8>> {
        let entry = u64::from_le_bytes(file.entry(self.bat, self.disk.entry_of(block / self.disk.block_bytes)).await?);
        let start = match VhdxBlock::of(entry) {
            VhdxBlock::At(start) => start,
            VhdxBlock::Partial => entry >> 20 << 20,
            _ => return Err(Error::internal("a block went away").offset(block)),
        };
        let host = start + block % self.disk.block_bytes;
        let bytes = file.patches().and_then(|patches| patches.bytes_at(host));
        bytes.ok_or_else(|| Error::internal("a sector of the log went away").offset(block))
    }

    async fn check(&self, file: &ImageFile, max: usize) -> Result<Option<MappedCheck>> {
        // Blocks begin at multiples of 1 MiB, not of their length.
        Ok(Some(BlockSurvey::of(self, file, self.disk.block_bytes, max).await?.without_totals()))
    }

    /// The log was carried out when the image was opened; it counts as one corruption, as in QEMU.
    async fn repair(&self, file: &ImageFile, _what: Repair, max: usize) -> Result<Option<MappedCheck>> {
        let mut check = BlockSurvey::of(self, file, self.disk.block_bytes, max).await?.without_totals();
        check.counters.corruptions_fixed = u64::from(self.had_log);
        Ok(Some(check))
    }

    async fn before_writing(&self, file: &ImageFile) -> Result<()> {
        if self.parent.is_some() {
            return Err(Error::new(ErrorKind::ReadOnly, "VHDX images that are a difference can only be read"));
        }
        if file.patches().is_some() {
            let message = "the image has a log that was carried out in memory: open it for writing from the start";
            return Err(Error::unsupported(message).field("LogGuid"));
        }
        let [bat, metadata, log] = &self.taken;
        check_log(file, log)?;
        // New blocks go behind the end of the file: the rest of a region must not be there.
        file.check_table(bat)?;
        self.journal.begin().await?;
        if [bat, metadata].iter().any(|part| log.overlaps(part.offset, part.bytes)) {
            let message = "the log lies on another part of the metadata: the image can't be written to";
            return Err(Error::invalid_image("LogOffset", log.offset, message));
        }
        Ok(())
    }

    fn units(&self) -> Option<Units> {
        let (head, tail) = (Vec::new(), Vec::new());
        // Unknown regions may be anywhere, and the bytes of a zero block in the file may be kept.
        let block_bytes = self.disk.block_bytes;
        Some(Units { file: 0, block_bytes, head, first: 0, grid: UNIT_BYTES, tail, is_at_end: true })
    }

    async fn occupied(&self, _file: &ImageFile) -> Result<Vec<(u64, u64)>> {
        let mut parts: Vec<(u64, u64)> =
            self.taken.iter().map(|table| (table.offset, table.offset + table.bytes)).collect();
        parts.push((0, UNIT_BYTES));
        Ok(parts)
    }

    async fn slot(&self, _file: &ImageFile, block: u64) -> Result<(FileTable, u64)> {
        Ok((self.bat, self.disk.entry_of(block)))
    }

    fn entry_bytes(&self) -> u64 {
        ENTRY_BYTES
    }

    /// The log.
    fn flush_area(&self) -> Option<(u64, u64)> {
        let [_, _, log] = &self.taken;
        Some((log.offset, log.bytes.min(MAX_LOG_BYTES)))
    }

    fn entry(&self, host: u64) -> Result<Vec<u8>> {
        Ok(VhdxBlock::entry_at(host).to_le_bytes().to_vec())
    }

    async fn before_change(&self, file: &File) -> Result<()> {
        self.journal.before_change(file).await
    }

    async fn write_entries(
        &self,
        image: &ImageFile,
        file: &File,
        entries: Vec<(u64, Vec<u8>)>,
        usage: Usage,
    ) -> Result<()> {
        self.journal.write(image, file, entries, usage).await
    }

    async fn settle(&self, file: &File) -> Result<()> {
        self.journal.empty_log(file).await
    }
}
