// SPDX-License-Identifier: Apache-2.0 OR MIT
//! VDI: docs/formats/block-formats.md.

mod growth;

use super::blocks::{BACKING_KEY, BlockFormat, FILE_KEY, FileTable, Grown, ImageFile, finish};
use super::mapped::RunSource;
use super::parents::{check_identity, parent_of};
use super::survey::BlockSurvey;
use super::units::Units;
use super::writer::Usage;
use cowshed_crypto::luks::fill_random;
use cowshed_graph::node::Node;
use cowshed_graph::node::{Description, MappedCheck};
use cowshed_graph::open::{BackingReference, Draft, DriverLine, Opened, Opener};
use cowshed_graph::options::{BlockdevOptions, DriverKind, DriverSchema, Key, KeyType};
use cowshed_layout::vdi::{ALLOCATED_AT, CONTENT_UUID_AT, ENTRY_BYTES, HEADER_BYTES, VdiBlock, VdiHeader};
use cowshed_layout::vhdx::Guid;
use cowshed_storage::{File, IoBuf};
use cowshed_types::{Error, ErrorKind, Result};
use futures_util::lock::Mutex as AsyncMutex;
use serde_json::{Value, json};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

const SCHEMA: DriverSchema = DriverSchema {
    name: "vdi",
    kind: DriverKind::Format,
    about: "VirtualBox's image format",
    keys: &[
        FILE_KEY,
        BACKING_KEY,
        Key {
            name: PARENTS,
            value: KeyType::Texts,
            default: "",
            help: "of a difference: the folders in which the parent, and its own, are looked for by their UUIDs",
        },
    ],
};

/// The line of the table.
pub(crate) const DRIVER: DriverLine = DriverLine::new(&SCHEMA, |opener, draft| Box::pin(open(opener, draft)));

/// The key of the folders with parents.
const PARENTS: &str = "parents";

struct Vdi {
    header: VdiHeader,
    /// The fields that a growth changes.
    shape: Mutex<Shape>,
    /// Nothing else uses the image while its size changes.
    may_move: AtomicBool,
    /// The identifier of the content now.
    content: Mutex<[u8; 16]>,
    /// True once this opening gave the content another identifier.
    is_changed: AsyncMutex<bool>,
}

/// The part of the header that a growth changes.
#[derive(Clone, Copy, Debug)]
struct Shape {
    size: u64,
    map: FileTable,
    data_offset: u64,
}

fn table(offset: u64, blocks: u64) -> FileTable {
    FileTable { field: "offset_bmap", offset, bytes: blocks * ENTRY_BYTES }
}

impl Vdi {
    fn shape(&self) -> Shape {
        *self.shape.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_shape(&self, shape: Shape) {
        *self.shape.lock().unwrap_or_else(PoisonError::into_inner) = shape;
    }

    fn uuids(&self) -> Uuids {
        [self.header.uuids[0], *self.content.lock().unwrap_or_else(PoisonError::into_inner)]
    }
}

/// A random UUID (RFC 9562, version 4).
fn new_uuid() -> Result<[u8; 16]> {
    let mut bytes = [0; 16];
    fill_random(&mut bytes)?;
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    Ok(bytes)
}

/// Opens a VDI image.
async fn open(opener: &Rc<Opener>, draft: &mut Draft) -> Opened {
    let file = ImageFile::open(opener, draft).await?;
    let vdi = load(&file, opener.resizes()).await.map_err(|error| file.named(error))?;
    let backing = match &vdi.header.parent {
        Some(parent) => {
            find_parent(opener, draft, parent, file.filename()).await.map_err(|error| file.named(error))?;
            parent_of::<Vdi>(opener, draft, None, &identity(parent)).map_err(|error| file.named(error))?
        }
        None => BackingReference::default(),
    };
    finish(opener, draft, file, vdi, backing).await
}

/// The identifiers of an image and of its content.
type Uuids = [[u8; 16]; 2];

/// Looks for the parent in the folders that the user names, unless the options name the file.
async fn find_parent(opener: &Rc<Opener>, draft: &mut Draft, parent: &Uuids, image: String) -> Result<()> {
    let folders = opener.folders(draft, PARENTS);
    if folders.is_empty() || !opener.opens_backing(draft) || draft.options.get("backing").is_some() {
        return Ok(());
    }
    let what = identity(parent);
    let find = async |is_parent: fn(&Uuids, &Uuids) -> bool| {
        let is_wanted = |bytes: &[u8]| VdiHeader::parse(bytes).is_ok_and(|header| is_parent(&header.uuids, parent));
        opener.find_backing(&folders, HEADER_BYTES, is_wanted, (&what, &image)).await
    };
    let mut found = find(|uuids, parent| uuids == parent).await?;
    if found.is_empty() {
        // A parent that was changed since is warned of when it is opened.
        found = find(|uuids, parent| uuids[0] == parent[0]).await?;
    }
    let [name] = &found[..] else {
        let message = match found.is_empty() {
            true => format!("no file in {} is the parent of this disk", folders.join(", ")),
            false => format!("several files could be the parent of this disk: {}", found.join(", ")),
        };
        return Err(Error::invalid_image("uuid_link", what, message));
    };
    let file = BlockdevOptions::new().with("driver", "file").with("filename", name.clone());
    let backing = BlockdevOptions::new().with("driver", SCHEMA.name).with(PARENTS, folders).with("file", file);
    draft.options.insert("backing", backing);
    Ok(())
}

async fn load(file: &ImageFile, may_move: bool) -> Result<Vdi> {
    let header = VdiHeader::parse(&file.read(0, HEADER_BYTES).await?)?;
    let shape = Mutex::new(shape_of(&header, file)?);
    let content = Mutex::new(header.uuids[1]);
    Ok(Vdi { header, shape, may_move: AtomicBool::new(may_move), content, is_changed: AsyncMutex::new(false) })
}

fn shape_of(header: &VdiHeader, file: &ImageFile) -> Result<Shape> {
    // The map may have more entries than the disk has blocks. The check and the count of QEMU go over all of them.
    let needed = header.size.div_ceil(header.block_bytes);
    let there = file.len().min(header.data_offset).saturating_sub(header.map_offset) / ENTRY_BYTES;
    let map = table(header.map_offset, u64::from(header.blocks).min(there).max(needed));
    file.check_table(&map)?;
    Ok(Shape { size: header.size, map, data_offset: header.data_offset })
}

/// Names of an image and of its content, as VirtualBox writes them.
fn identity(uuids: &Uuids) -> String {
    uuids.map(|uuid| Guid::of(uuid).to_string()).join(", content ")
}

impl BlockFormat for Vdi {
    const NAME: &'static str = SCHEMA.name;

    fn size(&self) -> u64 {
        self.shape().size
    }

    fn describe(&self) -> Description {
        Description {
            cluster_bytes: Some(self.header.block_bytes),
            identity: Some(identity(&self.uuids())),
            specific: self.header.parent.as_ref().map_or(Value::Null, |parent| {
                let [image, content] = parent.map(|uuid| Guid::of(uuid).to_string());
                json!({ "type": SCHEMA.name, "data": { "parent-uuid": image, "parent-content-uuid": content } })
            }),
            ..Description::default()
        }
    }

    fn is_as_in_its_file(&self) -> bool {
        self.header.is_fixed
    }

    fn described_bytes(&self) -> u64 {
        let shape = self.shape();
        shape.size.max((shape.map.bytes / ENTRY_BYTES).saturating_mul(self.header.block_bytes))
    }

    fn takes_backing(&self) -> bool {
        self.header.parent.is_some()
    }

    fn check_parent(&self, parent: &Node) -> Result<()> {
        match &self.header.parent {
            Some(wanted) => check_identity(parent, "uuid_link", &[identity(wanted)]),
            None => Ok(()),
        }
    }

    async fn before_writing(&self, _file: &ImageFile) -> Result<()> {
        *self.is_changed.lock().await = false;
        match self.header.parent {
            Some(_) => Err(Error::new(ErrorKind::ReadOnly, "VDI images that are a difference can only be read")),
            None => Ok(()),
        }
    }

    async fn place(&self, file: &ImageFile, at: u64, len: u64) -> Result<(RunSource, u64)> {
        let (Shape { map, data_offset, .. }, block_bytes) = (self.shape(), self.header.block_bytes);
        let (block, skip) = (at / block_bytes, at % block_bytes);
        let entry = u32::from_le_bytes(file.entry(map, block).await?);
        let found = VdiBlock::of(entry);
        let VdiBlock::At(number) = found else {
            let is_below = found == VdiBlock::Unallocated && self.header.parent.is_some();
            let place = if is_below { RunSource::Unallocated } else { RunSource::Zero };
            return Ok((place, file.same::<4>(map, block, (at, len, block_bytes)).await?));
        };
        let len = len.min(block_bytes - skip);
        // 2^32 blocks of 256 MiB at most, far from 2^64.
        let host = data_offset + u64::from(number) * block_bytes + skip;
        file.check_data("block map entry", host, len, at)?;
        Ok((RunSource::Data { file: 0, host }, len))
    }

    async fn check(&self, file: &ImageFile, max: usize) -> Result<Option<MappedCheck>> {
        let mut survey = BlockSurvey::of(self, file, self.header.block_bytes, max).await?;
        let allocated = survey.check.counters.allocated_clusters;
        if survey.check.findings.is_empty() && allocated != u64::from(self.header.allocated) {
            let counted = self.header.allocated;
            survey.corruption(format!("blocks_allocated is {counted}, but {allocated} blocks are allocated"));
        }
        Ok(Some(survey.without_totals()))
    }

    fn units(&self) -> Option<Units> {
        let (block_bytes, first) = (self.header.block_bytes, self.shape().data_offset);
        let (head, tail) = (Vec::new(), Vec::new());
        Some(Units { file: 0, block_bytes, head, first, grid: block_bytes, tail, is_at_end: false })
    }

    async fn slot(&self, _file: &ImageFile, block: u64) -> Result<(FileTable, u64)> {
        Ok((self.shape().map, block))
    }

    fn entry(&self, host: u64) -> Result<Vec<u8>> {
        let number = host.saturating_sub(self.shape().data_offset) / self.header.block_bytes;
        match u32::try_from(number).ok().filter(|number| matches!(VdiBlock::of(*number), VdiBlock::At(_))) {
            Some(number) => Ok(number.to_le_bytes().to_vec()),
            None => Err(Error::new(ErrorKind::NoSpace, "a VDI image has no more blocks").value(number)),
        }
    }

    /// The first change gives the content another identifier, durably and before it. A difference to the old content
    /// must not be read over the new one.
    async fn before_change(&self, file: &File) -> Result<()> {
        let mut is_changed = self.is_changed.lock().await;
        if *is_changed {
            return Ok(());
        }
        let uuid = new_uuid()?;
        file.write_at(IoBuf::copy_from(&uuid), CONTENT_UUID_AT).await.0?;
        file.sync().await?;
        *self.content.lock().unwrap_or_else(PoisonError::into_inner) = uuid;
        *is_changed = true;
        Ok(())
    }

    /// QEMU puts its next block at the place in the header: the count may be larger than the number of blocks, never
    /// smaller. So blocks count whose writes run or failed, with others behind them.
    async fn before_entries(&self, file: &File, usage: Usage) -> Result<()> {
        let numbers = (usage.end - self.shape().data_offset).div_ceil(self.header.block_bytes);
        let count = u32::try_from(numbers).unwrap_or(u32::MAX).to_le_bytes();
        file.write_at(IoBuf::copy_from(&count), ALLOCATED_AT).await.0
    }

    fn set_size(&self, size: u64) -> Result<()> {
        // The disk has it once there is room for it.
        match i64::try_from(size) {
            Ok(_) => Ok(()),
            Err(_) => Err(Error::invalid_argument("Unsupported VDI image size").field("size").value(size)),
        }
    }

    fn let_blocks_move(&self, allowed: bool) {
        self.may_move.store(allowed, Ordering::Relaxed);
    }

    async fn grow(&self, image: &ImageFile, file: &File, size: u64, usage: Usage) -> Result<Option<Grown>> {
        self.grow_to(image, file, size, usage).await.map(Some)
    }

    async fn look_again(&self, image: &ImageFile) -> Result<()> {
        let header = VdiHeader::parse(&image.read(0, HEADER_BYTES).await?)?;
        self.set_shape(shape_of(&header, image)?);
        Ok(())
    }
}
