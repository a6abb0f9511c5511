// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The common part of formats that keep a disk in blocks of one length, found by tables. The tables are read in pages, of
//! which a fixed number is kept. So no table takes memory on the word of a file.

mod changes;
mod runs;

use super::holes::Holes;
use super::mapped::{MappedDriver, MappedFormat, MappedWriter, Run, RunSource, no_such_bitmap, push_run};
use super::patches::Patches;
use super::units::Units;
use super::writer::{Usage, Writer};
use cowshed_graph::node::{BitmapStatus, ChildRole, LocalFuture, Node, Work};
use cowshed_graph::node::{Description, MappedCheck};
use cowshed_graph::open::{BackingReference, Draft, Opened, Opener};
use cowshed_graph::options::{Key, KeyType, REQUIRED};
use cowshed_storage::{File, IoBuf};
use cowshed_types::{DirtyBits, Error, ErrorKind, Repair, Result, text_of_name};
use std::collections::HashMap;
use std::future::Future;
use std::rc::Rc;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// This much of a table is read at once, in bytes.
const PAGE_BYTES: u64 = 64 << 10;
/// Pages that an image keeps in memory: 4 MiB.
const KEPT_PAGES: usize = 64;
/// Blocks that one call looks up; for more, call again.
const MAX_STEPS: usize = 64 << 10;

/// The key of every driver here.
pub(crate) const FILE_KEY: Key = Key { name: "file", value: KeyType::Child, default: REQUIRED, help: "the image file" };
/// The key of those that may have a backing file.
pub(crate) const BACKING_KEY: Key = Key {
    name: "backing",
    value: KeyType::ChildOrNull,
    default: "as the image says",
    help: "the backing file; null for none",
};

/// A format that keeps a disk in blocks.
pub(crate) trait BlockFormat: Send + Sync {
    /// The driver's name.
    const NAME: &'static str;
    /// Size of the disk in bytes.
    fn size(&self) -> u64;
    /// The image's description of itself.
    fn describe(&self) -> Description;
    /// True for an image whose data are encrypted.
    fn is_encrypted(&self) -> bool {
        false
    }
    /// See [`MappedFormat::is_as_in_its_file`].
    fn is_as_in_its_file(&self) -> bool {
        false
    }
    /// The place of byte `at` of the disk, and for how many of the `len` bytes from there it holds. The count is at
    /// least one, and ends at the end of an allocated block.
    fn place(&self, file: &ImageFile, at: u64, len: u64) -> impl Future<Output = Result<(RunSource, u64)>>;
    /// The same, of an image without pending entries: the count may reach over blocks that follow each other in the file too.
    fn run(&self, file: &ImageFile, at: u64, len: u64) -> impl Future<Output = Result<(RunSource, u64)>> {
        self.place(file, at, len)
    }
    /// True for an image that may have a backing file.
    fn takes_backing(&self) -> bool {
        true
    }
    /// Refuses a parent that is another one than the image was made of.
    fn check_parent(&self, _parent: &Node) -> Result<()> {
        Ok(())
    }
    /// True where blocks are so large that they are unpacked one after the other.
    fn packs_large(&self) -> bool {
        false
    }
    /// Unpacks the block that begins at byte `block` of the disk, all of it.
    fn unpack(&self, _file: &ImageFile, block: u64) -> impl Future<Output = Result<Vec<u8>>> {
        async move { Err(Error::internal("this format packs no blocks").offset(block)) }
    }
    /// Unpacks a block from `len` bytes at `host`.
    fn unpack_at(&self, _file: &ImageFile, host: u64, _len: u64) -> impl Future<Output = Result<Vec<u8>>> {
        async move { Err(Error::internal("this format packs no blocks").offset(host)) }
    }
    /// The entry for a block that is packed into `len` bytes at `host`, of formats with [`BlockFormat::PACKS`].
    fn packed_entry(&self, host: u64, _len: u64) -> Result<Vec<u8>> {
        Err(Error::internal("this format packs no blocks").offset(host))
    }
    /// Whether images of the format are only read.
    const READ_ONLY: bool = false;
    /// Whether new blocks can be packed.
    const PACKS: bool = false;
    /// Looks for damage; at most `max` findings are reported. `None` where qemu-img has no check for the format either.
    fn check(&self, _file: &ImageFile, _max: usize) -> impl Future<Output = Result<Option<MappedCheck>>> {
        async { Ok(None) }
    }
    /// The same with a repair, as far as possible, of an image that is opened for writing. `None` where the format has
    /// no repair.
    fn repair(
        &self,
        _file: &ImageFile,
        _what: Repair,
        _max: usize,
    ) -> impl Future<Output = Result<Option<MappedCheck>>> {
        async { Ok(None) }
    }
    /// The layout of new blocks in the file of an image that is opened for writing. `None`: all blocks are there.
    fn units(&self) -> Option<Units> {
        None
    }
    /// The place of a block's entry: its table, and its index there.
    fn slot(&self, _file: &ImageFile, block: u64) -> impl Future<Output = Result<(FileTable, u64)>> {
        async move { Err(Error::internal("this format allocates no blocks").value(block)) }
    }
    /// The second place of the entry, in a copy of the table.
    fn second_slot(&self, _file: &ImageFile, _block: u64) -> impl Future<Output = Result<Option<(FileTable, u64)>>> {
        async { Ok(None) }
    }
    /// Where tables are found by a table: the missing table that the entry of a block would be in.
    fn missing_table(&self, _file: &ImageFile, _block: u64) -> impl Future<Output = Result<Option<MissingTable>>> {
        async { Ok(None) }
    }
    /// The entry for a table at `host`.
    fn table_entry(&self, host: u64) -> Result<Vec<u8>> {
        Err(Error::internal("this format has one table").offset(host))
    }
    /// The entry for a block of zeroes, where there is one.
    fn zero_entry(&self) -> Option<Vec<u8>> {
        None
    }
    /// The bytes that the tables describe, at least the size. Entries behind the disk's end may name blocks all the same: of
    /// readers that see a longer disk, or by damage. No other block may take their places.
    fn described_bytes(&self) -> u64 {
        self.size()
    }
    /// Parts of the file that no block may lie on, of which [`BlockFormat::place`] knows nothing: from, and to.
    fn occupied(&self, _file: &ImageFile) -> impl Future<Output = Result<Vec<(u64, u64)>>> {
        async { Ok(Vec::new()) }
    }
    /// Has blocks move to other places of the file where a longer table needs theirs, or not: no request runs while they may.
    fn let_blocks_move(&self, _allowed: bool) {}
    /// Has the disk a size in memory. An error where it can't have that.
    fn set_size(&self, _size: u64) -> Result<()> {
        Err(Error::unsupported("Image format driver does not support resize"))
    }
    /// Makes room for a longer disk, where tables have to grow, with everything before durable.
    fn grow(
        &self,
        _image: &ImageFile,
        _file: &File,
        _size: u64,
        _usage: Usage,
    ) -> impl Future<Output = Result<Option<Grown>>> {
        async { Ok(None) }
    }
    /// Reads again the parts of the image that a growth changes: one failed.
    fn look_again(&self, _image: &ImageFile) -> impl Future<Output = Result<()>> {
        async { Ok(()) }
    }
    /// Writes the size of the disk to the header, durably.
    fn write_size(&self, _file: &File) -> impl Future<Output = Result<()>> {
        async { Ok(()) }
    }
    /// Whether an image in use can get another backing node.
    const LINKS_BACKING: bool = false;
    /// Whether the image's header can name another backing file, in an image that is there already.
    const RENAMES_BACKING: bool = false;
    /// Has the header name another backing file, or none, durably.
    fn rename_backing(
        &self,
        _file: &File,
        _name: Option<&str>,
        _format: Option<&str>,
    ) -> impl Future<Output = Result<()>> {
        async { Err(Error::unsupported("the format has no way to name another backing file")) }
    }
    /// Whether images of the format keep dirty bitmaps.
    const HAS_BITMAPS: bool = false;
    /// The dirty bitmaps of the image, in its order.
    fn bitmaps(&self, _file: &ImageFile) -> impl Future<Output = Result<Vec<BitmapStatus>>> {
        async { Ok(Vec::new()) }
    }
    /// The bits of one of them.
    fn bitmap_bits(&self, _file: &ImageFile, name: &str) -> impl Future<Output = Result<Arc<DirtyBits>>> {
        async move { Err(no_such_bitmap(name)) }
    }
    /// Forgets the tables read so far.
    fn forget(&self) {}
    /// Where on the whole disk its own begins, in bytes.
    fn disk_start(&self) -> u64 {
        0
    }
    /// The entry for a block whose data begin at `host`. An error where that is too far away for one.
    fn entry(&self, host: u64) -> Result<Vec<u8>> {
        Err(Error::internal("this format allocates no blocks").offset(host))
    }
    /// Refuses images that can't be written to. Called before the blocks are looked at.
    fn before_writing(&self, _file: &ImageFile) -> impl Future<Output = Result<()>> {
        async { Ok(()) }
    }
    /// Length of an entry in bytes.
    fn entry_bytes(&self) -> u64 {
        4
    }
    /// The area that a flush writes besides entries, where that may be a hole of the file: offset and length in bytes.
    fn flush_area(&self) -> Option<(u64, u64)> {
        None
    }
    /// Prepares the file for changes. Called before each of them.
    fn before_change(&self, _file: &File) -> impl Future<Output = Result<()>> {
        async { Ok(()) }
    }
    /// Puts entries into the tables, durably: where in the file, and the bytes. Their targets are durable already.
    fn write_entries(
        &self,
        _image: &ImageFile,
        file: &File,
        entries: Vec<(u64, Vec<u8>)>,
        _usage: Usage,
    ) -> impl Future<Output = Result<()>> {
        async move {
            for (at, bytes) in entries {
                file.write_at(IoBuf::copy_from(&bytes), at).await.0?;
            }
            file.sync().await
        }
    }
    /// Leaves the file as a close does, all being durable: before its end is cut off.
    fn settle(&self, _file: &File) -> impl Future<Output = Result<()>> {
        async { Ok(()) }
    }
    /// Notes the coming allocation, before the entries of new blocks are written.
    fn before_entries(&self, _file: &File, _usage: Usage) -> impl Future<Output = Result<()>> {
        async { Ok(()) }
    }
    /// Makes readers take the block at `host` from there, before a part of it is written.
    fn before_overwrite(&self, _file: &File, _host: u64) -> impl Future<Output = Result<()>> {
        async { Ok(()) }
    }
}

/// Where blocks lie in the file of a disk that has grown.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grown {
    /// No block begins before it.
    pub first: u64,
    /// The next new one goes here, or behind it.
    pub next: u64,
}

/// A table in the file, whole; offset and length in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FileTable {
    /// The name of its offset in messages.
    pub field: &'static str,
    pub offset: u64,
    pub bytes: u64,
}

/// A table that isn't there yet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MissingTable {
    /// Where in the file the entry is that is to lead to it.
    pub entry_offset: u64,
    /// The name of that entry in messages.
    pub field: &'static str,
    /// Length in bytes.
    pub bytes: u64,
    /// Blocks that it has entries for.
    pub blocks: u64,
}

impl FileTable {
    /// Whether bytes of the file are in this table.
    pub(crate) fn overlaps(&self, offset: u64, bytes: u64) -> bool {
        self.bytes > 0 && offset < self.offset.saturating_add(self.bytes) && self.offset < offset.saturating_add(bytes)
    }
}

/// Pages of tables by their place and length, the least recently used leaving first.
#[derive(Default)]
struct Pages {
    clock: u64,
    /// Counts the changes of tables.
    changes: u64,
    kept: HashMap<(u64, u64), (u64, Arc<IoBuf>)>,
}

/// The file of an image, and the parts of its tables read so far.
pub(crate) struct ImageFile {
    /// In an array, for callers that ask for all files of an image.
    node: [Arc<Node>; 1],
    pages: Mutex<Pages>,
    holes: Holes,
    /// A page of a hole.
    empty: OnceLock<Arc<IoBuf>>,
    /// The bytes that replace those of the file, here and there.
    patches: Option<Patches>,
}

impl ImageFile {
    /// Opens the file of an image that `draft` describes.
    pub(crate) async fn open(opener: &Rc<Opener>, draft: &mut Draft) -> Result<ImageFile> {
        let node = opener.unshared_file_child(draft).await?;
        Ok(ImageFile::of(node))
    }

    /// A file that is open already.
    pub(crate) fn of(node: Arc<Node>) -> ImageFile {
        ImageFile {
            node: [node],
            pages: Mutex::default(),
            holes: Holes::default(),
            empty: OnceLock::new(),
            patches: None,
        }
    }

    /// Has the file read as if these changes were made.
    pub(crate) fn patch(&mut self, patches: Patches) {
        self.patches = Some(patches);
        self.forget();
    }

    /// The bytes that replace those of the file.
    pub(crate) fn patches(&self) -> Option<&Patches> {
        self.patches.as_ref()
    }

    /// The file, for writing.
    pub(crate) fn storage(&self) -> File {
        self.node[0].storage()
    }

    /// Forgets the tables read so far: they have changed.
    pub(crate) fn forget(&self) {
        let mut pages = self.pages.lock().unwrap_or_else(PoisonError::into_inner);
        pages.changes += 1;
        pages.kept.clear();
        self.holes.forget();
    }

    pub(crate) fn len(&self) -> u64 {
        self.node[0].size().max(self.patches.as_ref().map_or(0, Patches::len))
    }

    /// Where data at `host` of the file are, which are byte `at` of the disk, and for how many of the `len` bytes.
    pub(crate) fn data(&self, host: u64, at: u64, len: u64) -> (RunSource, u64) {
        match &self.patches {
            None => (RunSource::Data { file: 0, host }, len),
            Some(patches) => patches.place((host, at, len), self.node[0].size()),
        }
    }

    /// Its name in messages.
    pub(crate) fn filename(&self) -> String {
        self.node[0].filename()
    }

    /// The error with the file's name, unless it has one.
    pub(crate) fn named(&self, error: Error) -> Error {
        if error.file_name().is_none() { error.file(self.node[0].filename()) } else { error }
    }

    /// The bytes that there are of a range: fewer than `len` at the file's end.
    pub(crate) async fn read(&self, offset: u64, len: usize) -> Result<IoBuf> {
        let there = self.len().saturating_sub(offset);
        let len = usize::try_from(there).unwrap_or(usize::MAX).min(len);
        if len == 0 {
            return Ok(IoBuf::zeroed(0));
        }
        let Some(patches) = &self.patches else {
            let (result, bytes) = self.node[0].read_boxed(offset, IoBuf::try_zeroed(len)?).await;
            return result.map(|()| bytes);
        };
        let (result, mut bytes) = self.node[0].read_padded(offset, IoBuf::try_zeroed(len)?).await;
        result?;
        patches.apply(offset, &mut bytes);
        Ok(bytes)
    }

    /// A name in the header, as text. The caller has checked its length.
    pub(crate) async fn name(&self, field: &'static str, (offset, len): (u64, u32)) -> Result<String> {
        let name = self.read(offset, len as usize).await?;
        if name.len() < len as usize {
            return Err(Error::invalid_image(field, offset, "the name of the backing file is not in the file"));
        }
        Ok(text_of_name(&name).into_owned())
    }

    /// Refuses a table that isn't all in the file.
    pub(crate) fn check_table(&self, table: &FileTable) -> Result<()> {
        match table.offset.checked_add(table.bytes) {
            Some(end) if end <= self.len() => Ok(()),
            _ => {
                let message = format!("points after EOF: a table of {} bytes is not in the file", table.bytes);
                Err(Error::invalid_image(table.field, table.offset, message))
            }
        }
    }

    /// Refuses data that aren't in the file: `len` bytes at `host`, which are byte `at` of the disk.
    pub(crate) fn check_data(&self, field: &'static str, host: u64, len: u64, at: u64) -> Result<()> {
        match host.checked_add(len) {
            Some(end) if end <= self.len() => Ok(()),
            _ => {
                let message = format!("points after EOF: the data of byte {at} of the disk are not in the file");
                Err(Error::invalid_image(field, host, message))
            }
        }
    }

    /// The entry `index` of a table.
    pub(crate) async fn entry<const N: usize>(&self, table: FileTable, index: u64) -> Result<[u8; N]> {
        let position = index.saturating_mul(N as u64);
        if position.saturating_add(N as u64) > table.bytes {
            return Err(Error::internal("a table is too short").field(table.field).value(index));
        }
        let (page, skip) = self.page_of(&table, position).await?;
        let entry = page.get(skip..skip + N).and_then(|bytes| bytes.try_into().ok());
        entry.ok_or_else(|| Error::internal("a page of a table is too short").field(table.field).value(index))
    }

    /// The page of a table that byte `position` of the table is in, and where there.
    async fn page_of(&self, table: &FileTable, position: u64) -> Result<(Arc<IoBuf>, usize)> {
        self.check_table(table)?;
        let start = position / PAGE_BYTES * PAGE_BYTES;
        let page = self.page(table.offset + start, table.bytes.saturating_sub(start).min(PAGE_BYTES)).await?;
        Ok((page, (position - start) as usize))
    }

    async fn page(&self, offset: u64, len: u64) -> Result<Arc<IoBuf>> {
        let pages = || self.pages.lock().unwrap_or_else(PoisonError::into_inner);
        let changes = {
            let pages = &mut *pages();
            pages.clock += 1;
            if let Some((used, page)) = pages.kept.get_mut(&(offset, len)) {
                *used = pages.clock;
                return Ok(Arc::clone(page));
            }
            pages.changes
        };
        if self.patches.is_none() && len == PAGE_BYTES && self.holes.end_of(&self.node[0], offset, len).await.is_some()
        {
            return Ok(Arc::clone(self.empty.get_or_init(|| Arc::new(IoBuf::zeroed(PAGE_BYTES as usize)))));
        }
        let page = Arc::new(self.read(offset, len as usize).await?);
        let pages = &mut *pages();
        if pages.changes != changes {
            // A table was written meanwhile: this page may have the old bytes.
            return Ok(page);
        }
        if pages.kept.len() >= KEPT_PAGES
            && let Some(oldest) = pages.kept.iter().min_by_key(|(_, (used, _))| *used).map(|(place, _)| *place)
        {
            pages.kept.remove(&oldest);
        }
        pages.kept.insert((offset, len), (pages.clock, Arc::clone(&page)));
        Ok(page)
    }
}

/// Ends an opening: opens the backing file, if there is one, and puts the driver together.
pub(crate) async fn finish<F: BlockFormat + 'static>(
    opener: &Rc<Opener>,
    draft: &mut Draft,
    file: ImageFile,
    format: F,
    backing: BackingReference,
) -> Opened {
    let filename = file.node[0].filename();
    opener.policy().check_size(format.size()).map_err(|error| file.named(error))?;
    let (parent, no_backing) = opener.backing_child(draft, &filename, &backing).await?;
    if let Some(parent) = &parent {
        if !format.takes_backing() {
            return Err(file.named(Error::invalid_argument("Driver doesn't support backing files")));
        }
        format.check_parent(parent).map_err(|error| file.named(error))?;
    }
    let link = draft.children.link(ChildRole::Backing).unwrap_or_default();
    draft.children.share(ChildRole::Backing, Arc::clone(&link));
    let unpacked = opener.policy().max_decompressed_bytes;
    let image = Image { file, format, writer: OnceLock::new() };
    // A damaged image may be in no state for writes, and a check opens it all the same.
    if !draft.settings.read_only && (F::READ_ONLY || !opener.checks(draft)) {
        image.start_writing().await.map_err(|error| image.file.named(error))?;
    }
    let driver = MappedDriver::new(Box::new(image), filename.clone(), link, no_backing, unpacked);
    Ok((Box::new(driver), filename))
}

struct Image<F> {
    file: ImageFile,
    format: F,
    /// Empty: opened for reading.
    writer: OnceLock<Writer>,
}

impl<F: BlockFormat> Image<F> {
    fn open_writer(&self) -> Result<&Writer> {
        self.writer.get().ok_or_else(|| Error::new(ErrorKind::ReadOnly, "the image is read-only"))
    }
}

impl<F: BlockFormat> MappedFormat for Image<F> {
    fn name(&self) -> &'static str {
        F::NAME
    }

    fn size(&self) -> u64 {
        self.format.size()
    }

    fn describe(&self) -> Description {
        self.format.describe()
    }

    fn is_encrypted(&self) -> bool {
        self.format.is_encrypted()
    }

    fn is_as_in_its_file(&self) -> bool {
        self.format.is_as_in_its_file()
    }

    fn files(&self) -> &[Arc<Node>] {
        &self.file.node
    }

    fn map(&self, offset: u64, len: u64, max_runs: usize) -> LocalFuture<'_, Result<Vec<Run>>> {
        Box::pin(async move {
            let mut runs: Vec<Run> = Vec::new();
            let (mut at, end) = (offset, offset.saturating_add(len).min(self.format.size()));
            let mut steps = 0;
            while at < end && runs.len() < max_runs.max(1) && steps < MAX_STEPS {
                let (place, len) = match self.writer.get() {
                    Some(writer) => writer.place(&self.format, &self.file, at, end - at).await?,
                    None => self.format.place(&self.file, at, end - at).await?,
                };
                push_run(&mut runs, Run { start: at, len, place });
                at += len;
                steps += 1;
            }
            Ok(runs)
        })
    }

    fn packs_large(&self) -> bool {
        self.format.packs_large()
    }

    fn unpack(&self, block: u64) -> LocalFuture<'_, Result<Vec<u8>>> {
        Box::pin(async move {
            match self.writer.get() {
                Some(writer) => writer.unpack(&self.format, &self.file, block).await,
                None => self.format.unpack(&self.file, block).await,
            }
        })
    }

    fn check(&self, max: usize) -> LocalFuture<'_, Result<Option<MappedCheck>>> {
        Box::pin(self.format.check(&self.file, max))
    }

    fn repair(&self, what: Repair, max: usize) -> LocalFuture<'_, Result<Option<MappedCheck>>> {
        Box::pin(self.format.repair(&self.file, what, max))
    }

    fn writer(&self) -> Option<&dyn MappedWriter> {
        self.writer.get().is_some().then_some(self)
    }

    fn takes_backing(&self) -> bool {
        F::LINKS_BACKING
    }

    fn renames_backing(&self) -> bool {
        F::RENAMES_BACKING
    }

    fn has_bitmaps(&self) -> bool {
        F::HAS_BITMAPS
    }

    fn bitmaps(&self) -> LocalFuture<'_, Result<Vec<BitmapStatus>>> {
        Box::pin(self.format.bitmaps(&self.file))
    }

    fn bitmap_bits<'a>(&'a self, name: &'a str) -> LocalFuture<'a, Result<Arc<DirtyBits>>> {
        Box::pin(self.format.bitmap_bits(&self.file, name))
    }

    fn rename_backing<'a>(&'a self, name: Option<&'a str>, format: Option<&'a str>) -> Work<'a> {
        Box::pin(async move {
            self.open_writer()?.flush(&self.format, &self.file).await?;
            self.format.rename_backing(&self.file.storage(), name, format).await
        })
    }

    fn start_writing(&self) -> Work<'_> {
        Box::pin(async move {
            self.file.forget();
            self.format.before_writing(&self.file).await?;
            match self.writer.get() {
                Some(writer) => writer.begin_again(&self.format, &self.file).await,
                None => {
                    let writer = Writer::open(&self.format, &self.file).await?;
                    self.writer.set(writer).map_err(|_| Error::internal("an image is made writable twice at once"))
                }
            }
        })
    }
}
