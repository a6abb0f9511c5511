// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Opening: the descriptor, the extents that it names, and the parent.

use super::extent::{Extent, Sparse, Storage, le32_entries, read};
use super::se_sparse::{SeSparse, no_writing};
use super::tables::GrainTables;
use super::{SCHEMA, Vmdk};
use crate::holes::Holes;
use crate::mapped::{MappedDriver, MappedFormat};
use cowshed_graph::node::{ChildRole, Marks, Node};
use cowshed_graph::open::{BackingReference, Draft, Opened, Opener};
use cowshed_layout::vmdk::{
    Access, Descriptor, ExtentKind, ExtentLine, FOOTER_FROM_END_BYTES, HEADER_BYTES, SECTOR_BYTES, SparseHeader,
    SparseKind, check_kind, embedded_descriptor, limits, sectors_to_bytes,
};
use cowshed_types::{Error, ErrorKind, Result};
use std::path::{Component, Path};
use std::rc::Rc;
use std::sync::Arc;

/// The kinds of disk whose extents lie in files of their own, as the descriptor calls them.
const SPLIT_TYPES: &[&str] = &[
    "monolithicFlat",
    "monolithicSparse",
    "twoGbMaxExtentFlat",
    "twoGbMaxExtentSparse",
    "vmfs",
    "vmfsPreallocated",
    "vmfsEagerZeroedThick",
    "vmfsThin",
    "vmfsSparse",
    "seSparse",
    "custom",
];

/// Grain directories of a disk, all together, in bytes: 512 TiB with the usual sizes.
const MAX_DIRECTORIES_BYTES: u64 = 64 << 20;

/// The grain directories of a disk, which all stay in memory, and its tables.
#[derive(Default)]
pub(super) struct Directories {
    pub tables: Arc<GrainTables>,
    bytes: u64,
}

impl Directories {
    /// Refuses one more directory of `len` bytes, before it is read, where all of them together are too long.
    pub(super) fn add(&mut self, opener: &Opener, len: u64) -> Result<()> {
        opener.policy().check_table("grain directory", len)?;
        self.bytes = self.bytes.saturating_add(len);
        opener.policy().check_table("grain directories", self.bytes)?;
        if self.bytes > MAX_DIRECTORIES_BYTES {
            let message = format!("the grain directories together are larger than {MAX_DIRECTORIES_BYTES} bytes");
            return Err(Error::invalid_image("grain directories", self.bytes, message));
        }
        Ok(())
    }
}

/// The parent's content id of a disk without a parent.
const NO_PARENT: u32 = u32::MAX;

/// Opens a VMDK image.
pub(super) async fn open(opener: &Rc<Opener>, draft: &mut Draft) -> Opened {
    let file = opener.unshared_file_child(draft).await?;
    let filename = file.filename();
    let named = |error: Error| if error.file_name().is_none() { error.file(filename.clone()) } else { error };
    let first = read(&file, 0, HEADER_BYTES as u64).await?;
    check_kind(&first).map_err(named)?;
    let vmdk = match first.starts_with(b"KDMV") || first.starts_with(b"COWD") {
        true => open_monolithic(opener, draft, &file, &first).await.map_err(named)?,
        false => open_split(opener, draft, &file).await.map_err(named)?,
    };
    if !draft.settings.read_only {
        vmdk.start_writing().await.map_err(named)?;
    }
    let size = vmdk.size;
    opener.policy().check_size(size).map_err(named)?;
    let parent = vmdk.descriptor.parent_hint.clone();
    if vmdk.descriptor.has_parent() && parent.is_none() && opener.opens_backing(draft) {
        let message = "the disk is a difference to a parent, and doesn't say where that is";
        return Err(named(Error::invalid_image("parentFileNameHint", "missing", message)));
    }
    let backing = BackingReference { name: parent, format: Some(SCHEMA.name.to_owned()) };
    let (backing, no_backing) = opener.backing_child(draft, &filename, &backing).await?;
    if let Some(backing) = &backing {
        check_parent(vmdk.descriptor.parent_cid, backing).map_err(named)?;
    }
    let unpacked = opener.policy().max_decompressed_bytes;
    let backing = draft.children.link(ChildRole::Backing).unwrap_or_default();
    draft.children.share(ChildRole::Backing, Arc::clone(&backing));
    let driver = MappedDriver::new(Box::new(vmdk), filename.clone(), backing, no_backing, unpacked);
    Ok((Box::new(driver), filename))
}

/// A parent that was written to since is another disk than the one that the differences belong to.
pub(super) fn check_parent(noted: u32, parent: &Node) -> Result<()> {
    match cid_of(parent) {
        Some(cid) => {
            if cid == noted {
                return Ok(());
            }
            if noted == NO_PARENT {
                let message =
                    format!("the disk is no difference to a parent, and can't stand on '{}'", parent.filename());
                return Err(Error::invalid_image("parentCID", format!("{noted:08x}"), message));
            }
            let message = format!(
                "the parent '{}' was changed since this disk was made of it: its content id is {cid:08x}",
                parent.filename()
            );
            Err(Error::invalid_image("parentCID", format!("{noted:08x}"), message))
        }
        None => Ok(()),
    }
}

/// The content id of a VMDK disk now; `None` of another format.
pub(super) fn cid_of(node: &Node) -> Option<u32> {
    node.marks().filter(|_| node.driver_name() == SCHEMA.name).map(Marks::mark)
}

/// One sparse file with the descriptor inside.
async fn open_monolithic(opener: &Rc<Opener>, draft: &mut Draft, file: &Arc<Node>, first: &[u8]) -> Result<Vmdk> {
    let header = SparseHeader::parse(first)?;
    let (start, sectors) = header.descriptor.unwrap_or((0, 0));
    let wanted = sectors.saturating_mul(SECTOR_BYTES).min(limits::DESCRIPTOR_BYTES as u64);
    let text = read(file, start * SECTOR_BYTES, wanted).await?;
    let descriptor = embedded_descriptor(&text, start)?;
    // A file without grains may hold the descriptor of a disk in others.
    if header.capacity_sectors == 0 && descriptor.extents.iter().any(|extent| extent.sectors > 0) {
        return open_described(opener, draft, descriptor, (Arc::clone(file), header.descriptor)).await;
    }
    let sparse = open_sparse(opener, file, 0, header.clone(), "", &mut Directories::default()).await?;
    let extent = Extent { len: bytes(sparse.header.capacity_sectors)?, storage: Storage::Sparse(Box::new(sparse)) };
    let home = (Arc::clone(file), header.descriptor);
    Vmdk::new(descriptor, vec![extent], vec![Arc::clone(file)], home)
}

/// A descriptor that names the files of the extents.
async fn open_split(opener: &Rc<Opener>, draft: &mut Draft, file: &Arc<Node>) -> Result<Vmdk> {
    if file.size() > limits::DESCRIPTOR_BYTES as u64 {
        let message = "this is no VMDK image: there is no header, and for a descriptor it is too long";
        let error = Error::invalid_image("file", format!("{} bytes", file.size()), message);
        return Err(error.qemu("invalid VMDK image descriptor"));
    }
    let descriptor = Descriptor::parse(&read(file, 0, file.size()).await?)?;
    open_described(opener, draft, descriptor, (Arc::clone(file), None)).await
}

/// Opens the extents that a descriptor names. `home`: its file, and its place there.
async fn open_described(
    opener: &Rc<Opener>,
    draft: &mut Draft,
    descriptor: Descriptor,
    home: (Arc<Node>, Option<(u64, u64)>),
) -> Result<Vmdk> {
    let file = &home.0;
    if !SPLIT_TYPES.contains(&descriptor.create_type.as_str()) {
        let message = "VMDK disks of this type are not supported";
        let shown = descriptor.create_type.escape_default().to_string();
        let error = Error::unsupported(message).field("createType").value(&shown);
        return Err(error.qemu(format!("Unsupported image type '{shown}'")));
    }
    // A disk of 0 bytes has none, and says so by its geometry.
    if descriptor.extents.is_empty() && !descriptor.has_no_cylinders {
        return Err(Error::invalid_image("extents", 0, "the VMDK descriptor names no extents"));
    }
    opener.policy().check_size(bytes(descriptor.total_sectors()?)?)?;
    if descriptor.extents.iter().any(|line| line.kind == ExtentKind::SeSparse) && !draft.settings.read_only {
        if !draft.place.auto_read_only {
            return Err(no_writing());
        }
        draft.settings.read_only = true;
    }
    let mut directories = Directories::default();
    let mut extents = Vec::with_capacity(descriptor.extents.len());
    let mut files = Vec::new();
    for (index, line) in descriptor.extents.iter().enumerate() {
        let extent = open_extent(opener, draft, file, (index, line), (&mut files, &mut directories)).await;
        extents.push(extent.map_err(|error| error.in_part(format!("extent {index} of the disk")))?);
    }
    Vmdk::new(descriptor, extents, files, home)
}

/// Whether two names of files lead the same way: `./` in them doesn't count.
fn is_same_path(one: &str, other: &str) -> bool {
    let parts = |name| Path::new(name).components().filter(|part| *part != Component::CurDir);
    parts(one).eq(parts(other))
}

async fn open_extent(
    opener: &Rc<Opener>,
    draft: &mut Draft,
    image: &Node,
    (index, line): (usize, &ExtentLine),
    (files, directories): (&mut Vec<Arc<Node>>, &mut Directories),
) -> Result<Extent> {
    if line.access == Access::None {
        return Err(Error::new(ErrorKind::PermissionDenied, "the descriptor forbids to read it").field("NOACCESS"));
    }
    let len = bytes(line.sectors)?;
    match line.kind {
        ExtentKind::Zero => return Ok(Extent { len, storage: Storage::Zero }),
        ExtentKind::VmfsRdm | ExtentKind::VmfsRaw => {
            let message = "extents of this type are not supported";
            return Err(Error::unsupported(message).field("type").value(line.kind.as_str()));
        }
        ExtentKind::Flat | ExtentKind::Vmfs | ExtentKind::Sparse | ExtentKind::VmfsSparse | ExtentKind::SeSparse => {}
    }
    let anywhere = draft.options.text("extents") == Some("anywhere");
    let place = opener.extent_place(draft, &image.filename(), &line.name, index, anywhere)?;
    if is_same_path(&place.filename, &image.filename()) {
        let message = "the descriptor names its own file as a part of the disk";
        return Err(Error::invalid_image("extent", line.name.escape_debug(), message));
    }
    let (file, node) =
        match files.iter().enumerate().find(|(_, known)| is_same_path(&known.filename(), &place.filename)) {
            // Two windows into one file.
            Some((file, known)) => (file, Arc::clone(known)),
            None => {
                let role = ChildRole::Extent(u32::try_from(index).unwrap_or(u32::MAX));
                let name = place.filename;
                let opened = opener.child(draft, role, place.options.into(), place.place).await;
                let node = opened.map_err(|error| match error.kind() {
                    ErrorKind::NotFound => Error::os(error.errno(), format!("could not open '{name}'"))
                        .qemu(format!("Could not open '{name}'")),
                    _ => error,
                })?;
                files.push(Arc::clone(&node));
                (files.len() - 1, node)
            }
        };
    if matches!(line.kind, ExtentKind::Flat | ExtentKind::Vmfs) {
        let host = bytes(line.offset_sectors)?;
        if node.size() < host + len {
            let message = format!("the file is too short for the extent ({} bytes)", node.size());
            return Err(Error::invalid_image("extent length", len, message).file(node.filename()));
        }
        return Ok(Extent { len, storage: Storage::Flat { file, host, kind: line.kind } });
    }
    let in_file = |error: Error| if error.file_name().is_none() { error.file(node.filename()) } else { error };
    let (capacity, storage) = match line.kind {
        ExtentKind::SeSparse => {
            let in_extent = |error: Error| {
                let words = error.sentence();
                error.context(node.filename()).qemu(words)
            };
            let sparse = SeSparse::open(opener, &node, file, directories).await.map_err(in_extent)?;
            (sparse.header.capacity_sectors, Storage::SeSparse(Box::new(sparse)))
        }
        _ => {
            let sparse = open_described_sparse(opener, &node, file, line, directories).await.map_err(in_file)?;
            (sparse.header.capacity_sectors, Storage::Sparse(Box::new(sparse)))
        }
    };
    if capacity < line.sectors {
        let message = format!("the descriptor gives the extent {} sectors", line.sectors);
        return Err(in_file(Error::invalid_image("capacity", capacity, message)));
    }
    Ok(Extent { len, storage })
}

/// A sparse extent with a line in a descriptor.
async fn open_described_sparse(
    opener: &Opener,
    node: &Arc<Node>,
    file: usize,
    line: &ExtentLine,
    directories: &mut Directories,
) -> Result<Sparse> {
    let header = SparseHeader::parse(&read(node, 0, HEADER_BYTES as u64).await?)?;
    let expected = if line.kind == ExtentKind::Sparse { SparseKind::Hosted } else { SparseKind::Esx };
    if header.kind != expected {
        let message = "the header is of another kind than the descriptor says";
        return Err(Error::invalid_image("type", line.kind.as_str(), message));
    }
    open_sparse(opener, node, file, header, line.kind.as_str(), directories).await
}

/// Reads the grain directory.
async fn open_sparse(
    opener: &Opener,
    node: &Arc<Node>,
    file: usize,
    mut header: SparseHeader,
    kind: &'static str,
    directories: &mut Directories,
) -> Result<Sparse> {
    let is_stream = header.directory_sector.is_none();
    if is_stream {
        header = read_footer(node, &header).await?;
    }
    let len = header.directory_bytes();
    directories.add(opener, len)?;
    let primary = header.directory_sector.and_then(|sector| place_of(node, sector, len));
    let redundant = header.redundant_directory_sector.and_then(|sector| place_of(node, sector, len));
    let read_directory = async |place: Option<u64>| match place {
        Some(place) => read(node, place, len).await.and_then(|bytes| le32_entries(&bytes)),
        None => Ok(Vec::new()),
    };
    let redundant = read_directory(redundant).await?;
    let uses_copy = primary.is_none() && !redundant.is_empty();
    let directory = match primary {
        Some(_) => read_directory(primary).await?,
        None if !redundant.is_empty() => redundant.clone(),
        None if len == 0 => Vec::new(),
        None => {
            let sector = header.directory_sector.unwrap_or(0);
            return Err(Error::invalid_image("gdOffset", sector, "the grain directory is not in the file"));
        }
    };
    Ok(Sparse {
        file,
        header,
        is_stream,
        kind,
        directory,
        redundant,
        uses_copy,
        tables: Arc::clone(&directories.tables),
        holes: Holes::default(),
    })
}

/// Where a table of `len` bytes at a sector is, in bytes; `None` when it isn't in the file. Sector 0 is the header.
fn place_of(node: &Node, sector: u64, len: u64) -> Option<u64> {
    let place = sectors_to_bytes(sector).filter(|place| *place != 0)?;
    (place.checked_add(len)? <= node.size()).then_some(place)
}

/// The header once more at the end of a stream-optimised file, where the directory's place is known.
async fn read_footer(node: &Node, header: &SparseHeader) -> Result<SparseHeader> {
    let missing =
        || Error::invalid_image("gdOffset", "at the end", "the VMDK file is cut short: its footer is missing");
    let place = node.size().checked_sub(FOOTER_FROM_END_BYTES).ok_or_else(missing)?;
    let footer = SparseHeader::parse(&read(node, place, HEADER_BYTES as u64).await?).map_err(|_| missing())?;
    let same = footer.capacity_sectors == header.capacity_sectors
        && footer.grain_sectors == header.grain_sectors
        && footer.table_entries == header.table_entries
        && footer.directory_sector.is_some();
    if !same {
        return Err(Error::invalid_image("footer", "another", "the footer of the VMDK file contradicts its header"));
    }
    Ok(SparseHeader { descriptor: header.descriptor, ..footer })
}

fn bytes(sectors: u64) -> Result<u64> {
    sectors_to_bytes(sectors).ok_or_else(|| Error::invalid_image("sectors", sectors, "the VMDK extent is too large"))
}
