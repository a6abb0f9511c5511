// SPDX-License-Identifier: Apache-2.0 OR MIT
//! VHD, which QEMU calls vpc: docs/formats/block-formats.md.

use super::blocks::{BACKING_KEY, BlockFormat, FILE_KEY, FileTable, ImageFile, finish};
use super::mapped::RunSource;
use super::parents::{check_identity, parent_of};
use super::sector_map::SectorMap;
use super::units::Units;
use cowshed_graph::node::{ChildRole, Description, Node};
use cowshed_graph::open::{BackingReference, Draft, DriverLine, Opened, Opener, Telling};
use cowshed_graph::options::{DriverKind, DriverSchema, Key, KeyType};
use cowshed_layout::parents::{beside, utf16};
use cowshed_layout::vpc::{
    COOKIE, DYNAMIC_HEADER_BYTES, ENTRY_BYTES, EPOCH_SECONDS, FOOTER_BYTES, VpcDynamicHeader, VpcFooter, VpcKind,
    VpcParent,
};
use cowshed_storage::{File, IoBuf};
use cowshed_types::{Error, ErrorKind, Result};
use std::collections::HashSet;
use std::rc::Rc;
use std::sync::{Mutex, PoisonError};

const SCHEMA: DriverSchema = DriverSchema {
    name: "vpc",
    kind: DriverKind::Format,
    about: "Virtual PC's image format (VHD)",
    keys: &[
        FILE_KEY,
        BACKING_KEY,
        Key {
            name: "force_size_calc",
            value: KeyType::Text,
            default: "by the creator of the image",
            help: "take the size from the geometry (chs) or from its own field (current_size)",
        },
        Key {
            name: "parent-time",
            value: KeyType::Choice(&["check", "ignore"]),
            default: "check",
            help: "of a difference: refuse a parent whose file was written to since (check), or don't look (ignore)",
        },
    ],
};

/// The line of the table.
pub(crate) const DRIVER: DriverLine = DriverLine::new(&SCHEMA, |opener, draft| Box::pin(open(opener, draft)))
    .telling(Telling::Keys(&["force_size_calc", "parent-time"]));

const SECTOR_BYTES: u64 = 512;

/// The field of the footer with the size of the disk.
#[derive(Clone, Copy, Debug)]
enum SizeField {
    Geometry,
    CurrentSize,
}

struct Vpc {
    footer: VpcFooter,
    /// None for fixed disks.
    dynamic: Option<Dynamic>,
    /// The parent of a difference.
    parent: Option<Parent>,
    /// The words for an end of the file that is not the footer whose copy is at its start. The copy counts.
    flaw: Option<&'static str>,
}

struct Parent {
    uuid: [u8; 16],
    /// The name of its file, relative to the image.
    name: Option<String>,
    /// When its file was written to last, in seconds since 1970, where that is known and counts.
    time: Option<i64>,
}

/// Times of files in other file systems have steps of two seconds.
const MAX_DIFFERENCE_SECONDS: u64 = 2;

struct Dynamic {
    header: VpcDynamicHeader,
    /// The place of the header.
    place: FileTable,
    table: FileTable,
    /// The table with the entries that the disk doesn't need: nothing else may lie there.
    whole_table: FileTable,
    /// Where blocks may begin.
    first: u64,
    /// The bytes of the footer at the end.
    tail: Vec<u8>,
    /// Blocks, by their data's offset, whose sectors are all marked as written.
    marked: Mutex<HashSet<u64>>,
}

/// Blocks that are known to be marked: more are asked again.
const MAX_MARKED: usize = 64 << 10;

/// Opens a VHD image.
async fn open(opener: &Rc<Opener>, draft: &mut Draft) -> Opened {
    let calculation = match draft.options.text("force_size_calc") {
        None => None,
        Some("chs") => Some(SizeField::Geometry),
        Some("current_size") => Some(SizeField::CurrentSize),
        Some(other) => {
            return Err(Error::invalid_argument(format!("Invalid size calculation mode: '{other}'")));
        }
    };
    let file = ImageFile::open(opener, draft).await?;
    let mut vpc = load(&file, calculation).await.map_err(|error| file.named(error))?;
    if let (Some(_), Some(flaw), None) = (&vpc.parent, vpc.flaw, draft.options.get("backing")) {
        // A fixed disk without its end begins with bytes of its guest, which may name any file.
        let message = format!(
            "{flaw}, and the one at its start, which may be its guest's, names a parent: give 'backing' to read it as a difference \
             (docs/formats/block-formats.md)"
        );
        return Err(file.named(Error::invalid_image("disk_type", "differencing", message)));
    }
    if let Some(parent) = &mut vpc.parent
        && draft.options.text("parent-time") == Some("ignore")
    {
        parent.time = None;
    }
    let backing = match &vpc.parent {
        Some(parent) => parent_of::<Vpc>(opener, draft, parent.name.clone(), &hexadecimal(&parent.uuid))
            .map_err(|error| file.named(error))?,
        None => BackingReference::default(),
    };
    finish(opener, draft, file, vpc, backing).await
}

/// The footer. A fixed disk has it at the end alone, exactly behind the disk, and the bytes at its start are its guest's. Of another
/// disk the copy at the start counts, as in QEMU: where the file lost its end, the last bytes are the guest's.
/// With words: the copy counts, and the end of the file is no equal to it.
async fn read_footer(file: &ImageFile) -> Result<(VpcFooter, IoBuf, Option<&'static str>)> {
    let end = file.read(file.len().saturating_sub(FOOTER_BYTES as u64), FOOTER_BYTES).await?;
    let start = file.read(0, FOOTER_BYTES).await?;
    let is_fixed = |footer: &VpcFooter| footer.kind == VpcKind::Fixed;
    let copy = start.starts_with(COOKIE).then(|| VpcFooter::parse(&start));
    match (VpcFooter::parse(&end), copy.filter(|copy| !copy.as_ref().is_ok_and(is_fixed))) {
        (Ok(footer), Some(Ok(_))) if is_fixed(&footer) && footer.size + FOOTER_BYTES as u64 == file.len() => {
            Ok((footer, end, None))
        }
        (Ok(footer), Some(Ok(_))) if is_fixed(&footer) => {
            let message = "the disk is a fixed one by the footer at the end of the file, and a dynamic one by that at its start: \
                           one of them may be its guest's (docs/formats/block-formats.md)";
            Err(Error::invalid_image("disk_type", "fixed", message))
        }
        (_, Some(Ok(copy))) if start[..] == end[..] => Ok((copy, start, None)),
        (Ok(_), Some(Ok(copy))) => Ok((copy, start, Some("the file ends with another footer than it begins with"))),
        (Err(_), Some(Ok(copy))) => Ok((copy, start, Some("the file has no footer at its end"))),
        (Ok(footer), _) => Ok((footer, end, None)),
        (Err(_), Some(Err(error))) | (Err(error), None) => Err(error),
    }
}

async fn load(file: &ImageFile, calculation: Option<SizeField>) -> Result<Vpc> {
    let (mut footer, bytes_of_footer, flaw) = read_footer(file).await?;
    let bytes = &bytes_of_footer;
    match calculation {
        None => {}
        // The largest geometry has no meaning, as in QEMU.
        Some(SizeField::Geometry) if bytes[56..60] != [0xff, 0xff, 16, 255] => {
            let cylinders = u64::from(u16::from_be_bytes([bytes[56], bytes[57]]));
            footer.size = cylinders * u64::from(bytes[58]) * u64::from(bytes[59]) * SECTOR_BYTES;
        }
        Some(_) => {
            let mut size = [0; 8];
            size.copy_from_slice(&bytes[48..56]);
            footer.size = u64::from_be_bytes(size) / SECTOR_BYTES * SECTOR_BYTES;
        }
    }
    if i64::try_from(footer.size).is_err() {
        return Err(Error::invalid_image("current_size", footer.size, "the VHD disk is too large"));
    }
    let (VpcKind::Dynamic(header_offset) | VpcKind::Differencing(header_offset)) = footer.kind else {
        let there = file.len().saturating_sub(FOOTER_BYTES as u64);
        if footer.size > there {
            let message = format!("the file is too short for the disk: {there} bytes and the footer");
            return Err(Error::invalid_image("size", footer.size, message));
        }
        return Ok(Vpc { footer, dynamic: None, parent: None, flaw });
    };
    if header_offset < FOOTER_BYTES as u64 || header_offset >= file.len() {
        let message = "the header of the dynamic disk is not in the file behind the footer's copy";
        return Err(Error::invalid_image("data_offset", header_offset, message));
    }
    let header = file.read(header_offset, DYNAMIC_HEADER_BYTES).await?;
    let parent = match footer.kind {
        VpcKind::Differencing(_) => Some(read_parent(file, &header).await?),
        _ => None,
    };
    let header = VpcDynamicHeader::parse(&header, footer.size)?;
    // The table may have more entries than the disk has blocks, and those are of use to readers that go by the other of the two
    // sizes in the footer.
    let needed = footer.size.div_ceil(header.block_bytes) * ENTRY_BYTES;
    let whole_table =
        FileTable { field: "table_offset", offset: header.table_offset, bytes: header.table_bytes().max(needed) };
    let place = FileTable { field: "data_offset", offset: header_offset, bytes: DYNAMIC_HEADER_BYTES as u64 };
    let there = file.len().saturating_sub(header.table_offset) / ENTRY_BYTES * ENTRY_BYTES;
    let table = FileTable { bytes: whole_table.bytes.min(there).max(needed), ..whole_table };
    file.check_table(&table)?;
    if whole_table.overlaps(place.offset, place.bytes) {
        let message = "the block allocation table overlaps the header of the dynamic disk";
        return Err(Error::invalid_image("table_offset", table.offset, message));
    }
    let metadata_end = (whole_table.offset + whole_table.bytes).max(header_offset + DYNAMIC_HEADER_BYTES as u64);
    let first = metadata_end.next_multiple_of(SECTOR_BYTES);
    let tail = bytes_of_footer.to_vec();
    Ok(Vpc {
        footer,
        dynamic: Some(Dynamic { header, place, table, whole_table, first, tail, marked: Mutex::default() }),
        parent,
        flaw,
    })
}

/// Reads the fields that name the parent of a difference.
async fn read_parent(file: &ImageFile, header: &[u8]) -> Result<Parent> {
    let parent = VpcParent::parse(header)?;
    let path = async |place: Option<(u64, u32)>| -> Result<Option<String>> {
        let Some((offset, len)) = place else { return Ok(None) };
        let bytes = file.read(offset, len as usize).await?;
        if bytes.len() < len as usize {
            let message = "the name of the parent is not in the file";
            return Err(Error::invalid_image("parent locator", offset, message));
        }
        Ok(Some(utf16(&bytes, false)))
    };
    let (relative, absolute) = (path(parent.relative).await?, path(parent.absolute).await?);
    let name = beside(relative.as_deref(), &[absolute.as_deref(), Some(&parent.name)]);
    let time = (parent.time != 0).then(|| EPOCH_SECONDS + i64::from(parent.time));
    Ok(Parent { uuid: parent.uuid, name, time })
}

/// Refuses a parent whose file was written to since. Windows does so too: its writes leave the parent's UUID as it is, and those of QEMU.
fn check_time(parent: &Node, wanted: i64) -> Result<()> {
    // A parent that is no file has no such time.
    let stamp = parent.child(ChildRole::File).and_then(|child| child.file().and_then(File::change_stamp));
    let Some(found) = stamp.map(|stamp| stamp[3].cast_signed()) else { return Ok(()) };
    if found.abs_diff(wanted) <= MAX_DIFFERENCE_SECONDS {
        return Ok(());
    }
    let message = format!(
        "the parent '{}' was written to at another time ({found} s since 1970) than the difference says: it may have changed since. \
         Where its file is only a copy, 'parent-time=ignore' reads it",
        parent.filename()
    );
    Err(Error::invalid_image("parent_timestamp", wanted, message))
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl BlockFormat for Vpc {
    const NAME: &'static str = SCHEMA.name;

    fn size(&self) -> u64 {
        self.footer.size
    }

    fn describe(&self) -> Description {
        let cluster_bytes = self.dynamic.as_ref().map(|dynamic| dynamic.header.block_bytes);
        Description {
            cluster_bytes,
            backing_name: self.parent.as_ref().and_then(|parent| parent.name.clone()),
            backing_format: self.parent.as_ref().map(|_| SCHEMA.name),
            identity: Some(hexadecimal(&self.footer.uuid)),
            ..Description::default()
        }
    }

    fn is_as_in_its_file(&self) -> bool {
        self.dynamic.is_none()
    }

    fn takes_backing(&self) -> bool {
        self.parent.is_some()
    }

    fn check_parent(&self, parent: &Node) -> Result<()> {
        match &self.parent {
            Some(wanted) => {
                check_identity(parent, "parent_unique_id", &[hexadecimal(&wanted.uuid)])?;
                // A parent of another format is the user's choice.
                let time = wanted.time.filter(|_| parent.driver_name() == SCHEMA.name);
                time.map_or(Ok(()), |time| check_time(parent, time))
            }
            None => Ok(()),
        }
    }

    async fn before_writing(&self, _file: &ImageFile) -> Result<()> {
        match self.parent {
            Some(_) => Err(Error::new(ErrorKind::ReadOnly, "VHD images that are a difference can only be read")),
            None => Ok(()),
        }
    }

    fn described_bytes(&self) -> u64 {
        let described =
            |dynamic: &Dynamic| (dynamic.table.bytes / ENTRY_BYTES).saturating_mul(dynamic.header.block_bytes);
        self.size().max(self.dynamic.as_ref().map_or(0, described))
    }

    async fn place(&self, file: &ImageFile, at: u64, len: u64) -> Result<(RunSource, u64)> {
        let Some(Dynamic { header, place, table, whole_table, .. }) = &self.dynamic else {
            return Ok((RunSource::Data { file: 0, host: at }, len));
        };
        let (block, skip) = (at / header.block_bytes, at % header.block_bytes);
        let entry = u32::from_be_bytes(file.entry(*table, block).await?);
        // Some writers leave zeroes behind the disk's end. Any other entry there names a block of a longer disk.
        let is_unused = entry == 0 && at >= self.footer.size;
        let Some(start) = header.block(entry).filter(|_| !is_unused) else {
            let place = if self.parent.is_some() { RunSource::Unallocated } else { RunSource::Zero };
            return Ok((place, file.same::<4>(*table, block, (at, len, header.block_bytes)).await?));
        };
        let len = len.min(header.block_bytes - skip);
        let unit_bytes = header.bitmap_bytes() + header.block_bytes;
        let unit = start - header.bitmap_bytes();
        if unit < FOOTER_BYTES as u64 || [whole_table, place].iter().any(|part| part.overlaps(unit, unit_bytes)) {
            let message = format!("the block at byte {} of the disk lies on the metadata", at - skip);
            return Err(Error::invalid_image("block allocation table entry", entry, message));
        }
        file.check_data("block allocation table entry", start + skip, len, at)?;
        let data = RunSource::Data { file: 0, host: start + skip };
        if self.parent.is_some() {
            let table = FileTable { field: "sector bitmap", offset: unit, bytes: header.bitmap_bytes() };
            let map = SectorMap { table, sector_bytes: SECTOR_BYTES, is_high_first: true };
            return map.place(file, skip, len, data).await;
        }
        // Without a parent the sector bitmap is not asked, as in QEMU: a sector that was never written is zeroes in the block.
        Ok((data, len))
    }

    fn units(&self) -> Option<Units> {
        let dynamic = self.dynamic.as_ref()?;
        Some(Units {
            file: 0,
            block_bytes: dynamic.header.block_bytes,
            head: vec![0xff; dynamic.header.bitmap_bytes() as usize],
            first: dynamic.first,
            grid: SECTOR_BYTES,
            tail: dynamic.tail.clone(),
            is_at_end: false,
        })
    }

    async fn slot(&self, _file: &ImageFile, block: u64) -> Result<(FileTable, u64)> {
        let dynamic = self.dynamic.as_ref().ok_or_else(|| Error::internal("a fixed disk has no table"))?;
        Ok((dynamic.table, block))
    }

    fn entry(&self, host: u64) -> Result<Vec<u8>> {
        let bitmap_bytes = self.dynamic.as_ref().map_or(0, |dynamic| dynamic.header.bitmap_bytes());
        let sector = host.saturating_sub(bitmap_bytes) / SECTOR_BYTES;
        match u32::try_from(sector).ok().filter(|sector| *sector != u32::MAX) {
            Some(sector) => Ok(sector.to_be_bytes().to_vec()),
            None => Err(Error::new(ErrorKind::NoSpace, "a VHD file can be no longer").value(sector)),
        }
    }

    /// Readers that go by the bitmap of sectors see the written data.
    async fn before_overwrite(&self, file: &File, host: u64) -> Result<()> {
        let Some(dynamic) = &self.dynamic else { return Ok(()) };
        let marked = || dynamic.marked.lock().unwrap_or_else(PoisonError::into_inner);
        if marked().contains(&host) {
            return Ok(());
        }
        let len = dynamic.header.bitmap_bytes();
        let (result, bitmap) = file.read_at(IoBuf::try_zeroed(len as usize)?, host - len).await;
        result?;
        if bitmap.iter().any(|byte| *byte != 0xff) {
            file.write_at(IoBuf::copy_from(&vec![0xff; len as usize]), host - len).await.0?;
        }
        let mut marked = marked();
        if marked.len() >= MAX_MARKED {
            marked.clear();
        }
        marked.insert(host);
        Ok(())
    }
}
