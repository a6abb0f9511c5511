// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Writes to the extents of a disk. A flat one is written as it is; a sparse one allocates grains as every format in blocks
//! does (`formats/writer.rs`). The first write gives the disk another content id, so that disks made of it notice.

use super::extent::{Extent, Sparse, Storage};
use super::grains::Grains;
use super::se_sparse::no_writing;
use super::stream::{StreamHeader, StreamWriter};
use super::{DiskExtent, Vmdk};
use crate::blocks::ImageFile;
use crate::mapped::{MappedWriter, RunSource};
use crate::writer::Writer;
use cowshed_graph::buffers::join;
use cowshed_graph::node::{Link, Node, Transfer, Work, ZeroFlags};
use cowshed_graph::protocols::{discard_file, zero_file};
use cowshed_layout::vmdk::{
    HEADER_BYTES, SECTOR_BYTES, limits, parent_cid_bits, sectors_to_bytes, stream_end, with_cid, with_parent_cid,
};
use cowshed_storage::{File, FileIdentity, IoBuf};
use cowshed_types::memory::try_push;
use cowshed_types::{Error, ErrorKind, Result, slip};
use futures_util::lock::Mutex as AsyncMutex;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The part of a disk that writes.
pub(super) struct VmdkWriter {
    /// One for each piece.
    extents: Vec<ExtentWriter>,
    /// The descriptor: its file, its place and the space for it in bytes; `None`: as long as it is.
    descriptor: (File, u64, Option<u64>),
    changed: AsyncMutex<Change>,
}

/// The content id, as far as this opening has changed it.
#[derive(Default)]
struct Change {
    /// It is another one.
    is_marked: bool,
    /// The one before, of a change that is only announced.
    announced: Option<u32>,
}

enum ExtentWriter {
    Flat(File),
    Sparse(Box<(ImageFile, Writer)>),
    Stream(Box<StreamWriter>),
    /// A stream that is whole.
    Finished,
    /// It reads as zeroes, and takes nothing else.
    Zero,
}

impl ExtentWriter {
    fn holds_changes(&self) -> bool {
        match self {
            ExtentWriter::Sparse(parts) => parts.1.holds_changes(),
            ExtentWriter::Stream(stream) => stream.holds_changes(),
            ExtentWriter::Flat(_) | ExtentWriter::Finished | ExtentWriter::Zero => false,
        }
    }
}

impl VmdkWriter {
    /// Looks at the extents of a disk that is opened for writing.
    pub(super) async fn open(vmdk: &Vmdk) -> Result<VmdkWriter> {
        check_apart(vmdk)?;
        let mut extents = Vec::new();
        for piece in &vmdk.pieces {
            extents.push(match &piece.extent.storage {
                Storage::Zero => ExtentWriter::Zero,
                Storage::SeSparse(_) => return Err(no_writing()),
                Storage::Flat { file, .. } => ExtentWriter::Flat(node_of(&vmdk.files, *file)?.storage()),
                Storage::Sparse(sparse) if sparse.header.compressed => match empty_stream(vmdk, piece, sparse).await? {
                    Some(stream) => ExtentWriter::Stream(Box::new(stream)),
                    None => ExtentWriter::Finished,
                },
                Storage::Sparse(sparse) => {
                    let image = ImageFile::of(Arc::clone(node_of(&vmdk.files, sparse.file)?));
                    let grains = Grains { sparse, files: &vmdk.files, len: piece.extent.len, start: piece.start };
                    let writer = Writer::open(&grains, &image).await.map_err(|error| image.named(error))?;
                    ExtentWriter::Sparse(Box::new((image, writer)))
                }
            });
        }
        let (file, place) = &vmdk.home;
        let space = place.map(|(_, sectors)| sectors.saturating_mul(SECTOR_BYTES));
        let place = place.map_or(0, |(sector, _)| sector * SECTOR_BYTES);
        Ok(VmdkWriter { extents, descriptor: (file.storage(), place, space), changed: AsyncMutex::default() })
    }

    /// Looks at the extents again, of a disk that was read-only for a while.
    pub(super) async fn begin_again(&self, vmdk: &Vmdk) -> Result<()> {
        for (piece, extent) in vmdk.pieces.iter().zip(&self.extents) {
            if let (Storage::Sparse(sparse), ExtentWriter::Sparse(parts)) = (&piece.extent.storage, extent) {
                sparse.tables.forget(sparse.file);
                let grains = vmdk.grains(sparse, &piece.extent, piece.start);
                parts.1.begin_again(&grains, &parts.0).await?;
            }
        }
        self.end_change().await;
        Ok(())
    }

    /// The first change gives the disk another content id.
    async fn change(&self, vmdk: &Vmdk) -> Result<()> {
        self.mark(vmdk, u32::BITS).await.map(drop)
    }

    /// The content id before, if this call has changed it. The new one has `bits` bits at most.
    async fn mark(&self, vmdk: &Vmdk, bits: u32) -> Result<Option<u32>> {
        if self.extents.iter().all(|extent| matches!(extent, ExtentWriter::Finished)) {
            return Ok(None);
        }
        let mut changed = self.changed.lock().await;
        if changed.is_marked {
            return Ok(None);
        }
        let before = self.read_descriptor().await?;
        let mut random = [0; 4];
        cowshed_crypto::luks::fill_random(&mut random)?;
        let former = vmdk.cid.load(Ordering::Relaxed);
        // All ones mean that there is no parent. A short id must not be the same one by chance.
        let cid = u32::from_le_bytes(random) & 0x7fff_ffff & u32::MAX.unbounded_shr(u32::BITS - bits);
        let new = with_cid(&before, cid).map(|(_, new)| if new == former { new ^ 1 } else { new });
        if let Some((text, cid)) = new.and_then(|cid| with_cid(&before, cid)) {
            self.write_descriptor(&before, text).await?;
            // An overlay of the old content must not be read over the new one.
            if !slip!("vmdk_content_id_after_the_data") {
                self.descriptor.0.sync().await?;
            }
            vmdk.cid.store(cid, Ordering::Relaxed);
        }
        *changed = Change { is_marked: true, announced: None };
        Ok(Some(former))
    }

    /// Gives the disk another content id, durably: a crash can't take it back when an overlay has noted it.
    pub(super) async fn announce(&self, vmdk: &Vmdk, bits: u32) -> Result<()> {
        if let Some(former) = self.mark(vmdk, bits).await? {
            self.changed.lock().await.announced = Some(former);
        }
        Ok(())
    }

    /// Gives the disk the content id that it had before [`Self::announce`].
    pub(super) async fn restore_content_id(&self, vmdk: &Vmdk) -> Result<()> {
        let mut changed = self.changed.lock().await;
        let Some(former) = changed.announced else { return Ok(()) };
        let before = self.read_descriptor().await?;
        if let Some((text, cid)) = with_cid(&before, former).filter(|(_, cid)| *cid == former) {
            self.write_descriptor(&before, text).await?;
            vmdk.cid.store(cid, Ordering::Relaxed);
            *changed = Change::default();
        }
        self.descriptor.0.sync().await
    }

    /// The next change gets another content id.
    pub(super) async fn end_change(&self) {
        *self.changed.lock().await = Change::default();
    }

    /// The bits of a parent's content id for which there is room.
    pub(super) async fn room_bits(&self) -> Result<u32> {
        let before = self.read_descriptor().await?;
        let bits = parent_cid_bits(&before).filter(|bits| *bits > 0);
        bits.ok_or_else(|| Error::invalid_image("parentCID", "missing", "the descriptor notes no parent"))
    }

    async fn read_descriptor(&self) -> Result<IoBuf> {
        let (file, place, space) = &self.descriptor;
        let there = file.len().saturating_sub(*place);
        let space = space.unwrap_or(there).min(there);
        let len = space.min(limits::DESCRIPTOR_BYTES as u64);
        let (result, text) = file.read_at(IoBuf::try_zeroed(len as usize)?, *place).await;
        result?;
        // A change of its length must not be written over bytes that were not read.
        if len < space && text.last().is_some_and(|byte| *byte != 0) {
            let message = format!("the descriptor is longer than {len} bytes");
            return Err(Error::invalid_image("descriptorSize", space / SECTOR_BYTES, message));
        }
        Ok(text)
    }

    async fn write_descriptor(&self, before: &[u8], mut text: Vec<u8>) -> Result<()> {
        let (file, place, space) = &self.descriptor;
        if let Some(space) = space {
            if text.len() as u64 > *space {
                return Err(Error::invalid_image("descriptor", text.len(), "there is no room for a new content id"));
            }
            // Zeroes that were zeroes stay: the space for them may be a hole, and the disk full.
            let used = before.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
            text.resize(text.len().max(used), 0);
        }
        file.write_at(IoBuf::copy_from(&text), *place).await.0
    }

    /// A commit has changed the parent, where this disk has data of its own or the same data.
    pub(super) async fn follow(&self, vmdk: &Vmdk, cid: u32) -> Result<()> {
        let _changed = self.changed.lock().await;
        let before = self.read_descriptor().await?;
        let Some(text) = with_parent_cid(&before, cid) else {
            let message = "there is no room for the new content id of the parent";
            return Err(Error::invalid_image("parentCID", format!("{cid:08x}"), message));
        };
        let noted = match self.write_descriptor(&before, text).await {
            Ok(()) => self.descriptor.0.sync().await,
            Err(error) => Err(error),
        };
        match noted {
            Ok(()) => vmdk.parent_cid.store(cid, Ordering::Relaxed),
            // The parent gets its former id back.
            Err(_) => drop(self.write_descriptor(&before, before.to_vec()).await),
        }
        noted
    }
}

/// The writer of a disk that is one stream-optimised file without grains: those can be added. A new disk has its
/// directories in front of the grains, as QEMU lays it out. With its first grain it becomes one with a footer.
async fn empty_stream(vmdk: &Vmdk, piece: &DiskExtent, sparse: &Sparse) -> Result<Option<StreamWriter>> {
    let is_alone = vmdk.pieces.len() == 1 && vmdk.descriptor.create_type == "streamOptimized";
    if !is_alone || vmdk.descriptor.has_parent() {
        return Ok(None);
    }
    let file = node_of(&vmdk.files, sparse.file)?.storage();
    let (described, there) =
        (sparse.header.descriptor.map_or(1, |(start, sectors)| start.saturating_add(sectors)), file.len());
    let is_empty = match sparse.is_stream {
        true => sparse.directory.iter().all(|table| *table == 0),
        // No grain is in the file, whatever the tables say.
        false => {
            let ends_there = sectors_to_bytes(sparse.header.first_grain_sector) == Some(there);
            ends_there && described <= sparse.header.first_grain_sector && vmdk.is_empty().await?
        }
    };
    if !is_empty {
        return Ok(None);
    }
    let first = match sparse.is_stream {
        true => described.max(1).checked_next_multiple_of(sparse.header.grain_sectors),
        false => Some(sparse.header.first_grain_sector),
    };
    let first = first
        .filter(|first| *first <= there / SECTOR_BYTES)
        .ok_or_else(|| Error::invalid_image("descriptorSize", described, "the descriptor is not in the file"))?;
    let (result, header) = file.read_at(IoBuf::try_zeroed(HEADER_BYTES)?, 0).await;
    result?;
    let bytes = if sparse.is_stream { header.to_vec() } else { stream_end::header(&header) };
    let header = StreamHeader { bytes, is_in_file: sparse.is_stream };
    Ok(Some(StreamWriter::new(file, sparse.header.clone(), header, piece.extent.len, first)))
}

fn no_data(at: u64) -> Error {
    Error::unsupported("an extent of the type ZERO takes no data").offset(at)
}

/// Refuses extents that share bytes of a file: a write to one would change the other.
fn check_apart(vmdk: &Vmdk) -> Result<()> {
    let mut known: Vec<(FileIdentity, u64, u64)> = Vec::new();
    for piece in &vmdk.pieces {
        let (file, from, to) = match &piece.extent.storage {
            Storage::Zero => continue,
            Storage::Flat { file, host, .. } => (*file, *host, host.saturating_add(piece.extent.len)),
            // New grains go anywhere.
            Storage::Sparse(sparse) => (sparse.file, 0, u64::MAX),
            Storage::SeSparse(sparse) => (sparse.file, 0, u64::MAX),
        };
        let node = node_of(&vmdk.files, file)?;
        let Some(identity) = node.storage().identity() else { continue };
        if known.iter().any(|(other, start, end)| *other == identity && from < *end && *start < to) {
            let message = "two extents of the disk share a part of this file: the disk can't be written to";
            return Err(Error::invalid_image("extents", known.len() + 1, message).file(node.filename()));
        }
        try_push(&mut known, (identity, from, to))?;
    }
    Ok(())
}

fn node_of(files: &[Arc<Node>], index: usize) -> Result<&Arc<Node>> {
    files.get(index).ok_or_else(|| Error::internal("an extent has no file"))
}

impl Vmdk {
    pub(super) fn open_writer(&self) -> Result<&VmdkWriter> {
        self.writer.get().ok_or_else(|| Error::new(ErrorKind::ReadOnly, "the image is read-only"))
    }

    /// The place of byte `at` of piece `index`, with the grains whose entries aren't written yet.
    pub(super) async fn place(&self, index: usize, at: u64, len: u64) -> Result<(RunSource, u64)> {
        let piece = self.pieces.get(index).ok_or_else(|| Error::internal("a piece of the disk is missing"))?;
        let writer = self.writer.get().and_then(|writer| writer.extents.get(index));
        match (&piece.extent.storage, writer) {
            (Storage::Sparse(sparse), Some(ExtentWriter::Sparse(parts))) => {
                let (image, writer) = &**parts;
                let grains = self.grains(sparse, &piece.extent, piece.start);
                writer.place(&grains, image, at, len).await
            }
            (_, Some(ExtentWriter::Stream(stream))) if stream.is_changed().await => Ok(stream.place(at, len).await),
            _ => piece.extent.map(&self.files, at, len).await,
        }
    }

    /// The stream that the disk is, if it is one.
    pub(super) fn stream(&self) -> Option<&StreamWriter> {
        match self.writer.get()?.extents.first() {
            Some(ExtentWriter::Stream(stream)) => Some(stream),
            _ => None,
        }
    }

    /// Refuses to write into a stream that is whole, before anything changes. Zeroes where nothing else is change nothing.
    async fn check_unfinished(&self, offset: u64, len: u64, zeroes_over: Option<&Link>) -> Result<()> {
        let writer = self.open_writer()?;
        for (index, mut at, len) in self.parts(offset, len) {
            if !matches!(writer.extents[index], ExtentWriter::Finished) {
                continue;
            }
            let end = at + len;
            while at < end {
                let (place, len) = self.place(index, at, end - at).await?;
                let message = match place {
                    RunSource::Unallocated if zeroes_over.is_some_and(|backing| backing.load().is_none()) => {
                        at += len;
                        continue;
                    }
                    RunSource::Unallocated => "a streamOptimized disk that is whole takes no more grains",
                    _ => "Could not write to allocated cluster for streamOptimized",
                };
                return Err(Error::new(ErrorKind::Io, message)
                    .hint(": convert the image to write to it")
                    .offset(offset));
            }
        }
        Ok(())
    }

    /// Refuses a write that would be the first change, and can't be done: the disk stays the parent of its overlays.
    async fn check_first(&self, offset: u64, buf: &[u8]) -> Result<()> {
        let (writer, mut rest) = (self.open_writer()?, buf);
        if writer.changed.lock().await.is_marked {
            return Ok(());
        }
        for (index, at, len) in self.parts(offset, buf.len() as u64) {
            let (part, behind) = rest.split_at(len as usize);
            rest = behind;
            let piece = self.pieces.get(index).ok_or_else(|| Error::internal("a piece of the disk is missing"))?;
            match (&piece.extent.storage, &writer.extents[index]) {
                (Storage::Zero, _) if part.iter().any(|byte| *byte != 0) => return Err(no_data(piece.start + at)),
                (Storage::Sparse(sparse), ExtentWriter::Sparse(_)) => {
                    let grains = self.grains(sparse, &piece.extent, piece.start);
                    let grain_bytes = sparse.header.grain_bytes();
                    let (mut from, end) = (at, at + len);
                    while from < end {
                        let (place, there) = self.place(index, from, end - from).await?;
                        if place == RunSource::Unallocated {
                            for block in from / grain_bytes..(from + there).div_ceil(grain_bytes) {
                                grains.slot_in(&sparse.directory, block)?;
                            }
                        }
                        from += there.max(1);
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Cuts a client's writes into grains.
    async fn write_stream(&self, stream: &StreamWriter, at: u64, part: IoBuf) -> (Result<()>, IoBuf) {
        let Some(grain_bytes) = self.pieces.first().and_then(|piece| piece.extent.grain_bytes()) else {
            return (Err(Error::internal("a stream has no grains")), part);
        };
        let grains = part.chunks(grain_bytes as usize).enumerate();
        let grains = grains.map(|(index, grain)| (at + index as u64 * grain_bytes, IoBuf::copy_from(grain)));
        (stream.write(grains.collect()).await, part)
    }

    fn grains<'a>(&'a self, sparse: &'a Sparse, extent: &Extent, start: u64) -> Grains<'a> {
        Grains { sparse, files: &self.files, len: extent.len, start }
    }

    async fn write_piece(&self, index: usize, at: u64, part: IoBuf, backing: &Link) -> (Result<()>, IoBuf) {
        let (writer, piece) = match (self.open_writer(), self.pieces.get(index)) {
            (Ok(writer), Some(piece)) => (writer, piece),
            (Err(error), _) => return (Err(error), part),
            _ => return (Err(Error::internal("a piece of the disk is missing")), part),
        };
        match (&piece.extent.storage, &writer.extents[index]) {
            (Storage::Flat { host, .. }, ExtentWriter::Flat(file)) => file.write_at(part, host + at).await,
            (Storage::Sparse(sparse), ExtentWriter::Sparse(parts)) => {
                let grains = self.grains(sparse, &piece.extent, piece.start);
                parts.1.write(&grains, &parts.0, backing, at, part).await
            }
            (_, ExtentWriter::Stream(stream)) => self.write_stream(stream, at, part).await,
            _ if part.iter().all(|byte| *byte == 0) => (Ok(()), part),
            _ => (Err(no_data(piece.start + at)), part),
        }
    }

    /// The pieces that a range touches: index, offset in the piece, length.
    fn parts(&self, offset: u64, len: u64) -> Vec<(usize, u64, u64)> {
        let end = offset + len;
        let first = self.pieces.partition_point(|piece| piece.start + piece.extent.len <= offset);
        let touched = self.pieces.iter().enumerate().skip(first).take_while(|(_, piece)| piece.start < end);
        touched
            .map(|(index, piece)| {
                let start = offset.max(piece.start);
                (index, start - piece.start, end.min(piece.start + piece.extent.len) - start)
            })
            .collect()
    }

    async fn zero_piece(
        &self,
        (index, at, len): (usize, u64, u64),
        flags: Option<ZeroFlags>,
        backing: &Link,
    ) -> Result<()> {
        let writer = self.open_writer()?;
        let piece = self.pieces.get(index).ok_or_else(|| Error::internal("a piece of the disk is missing"))?;
        match (&piece.extent.storage, &writer.extents[index]) {
            (Storage::Flat { host, .. }, ExtentWriter::Flat(file)) => match flags {
                Some(flags) => zero_file(file, host + at, len, flags).await,
                None => discard_file(file, host + at, len).await,
            },
            (Storage::Sparse(sparse), ExtentWriter::Sparse(parts)) => {
                let grains = self.grains(sparse, &piece.extent, piece.start);
                match flags {
                    Some(flags) => parts.1.write_zeroes(&grains, &parts.0, backing, (at, len), flags).await,
                    None => parts.1.discard(&grains, &parts.0, (at, len)).await,
                }
            }
            (_, ExtentWriter::Stream(stream)) if flags.is_some() => stream.check_zeroes(at, len).await,
            _ => Ok(()),
        }
    }

    async fn flush_all(&self, complete: bool) -> Result<()> {
        let writer = self.open_writer()?;
        let mut result = Ok(());
        for (piece, extent) in self.pieces.iter().zip(&writer.extents) {
            let done = match (&piece.extent.storage, extent) {
                (Storage::Sparse(sparse), ExtentWriter::Sparse(parts)) => {
                    let grains = self.grains(sparse, &piece.extent, piece.start);
                    match complete {
                        true => parts.1.complete(&grains, &parts.0).await,
                        false => parts.1.flush(&grains, &parts.0).await,
                    }
                }
                (_, ExtentWriter::Flat(file)) => file.sync().await,
                (_, ExtentWriter::Stream(stream)) => stream.complete().await,
                _ => Ok(()),
            };
            // The others are made durable though one fails.
            result = result.and(done);
        }
        if writer.changed.lock().await.is_marked {
            result = result.and(writer.descriptor.0.sync().await);
        }
        result
    }
}

impl MappedWriter for Vmdk {
    fn write_compressed<'a>(&'a self, clusters: Vec<(u64, IoBuf)>, backing: &'a Link) -> Work<'a> {
        Box::pin(async move {
            if let Some(stream) = self.stream() {
                self.open_writer()?.change(self).await?;
                return stream.write(clusters).await;
            }
            if !self.compresses() {
                return Err(Error::unsupported("Compression not supported for this file format"));
            }
            for (offset, cluster) in clusters {
                self.write(offset, cluster, backing).await.0?;
            }
            Ok(())
        })
    }

    /// Sparse disks take what is to be compressed as well, and keep it plain, as QEMU's.
    fn compresses(&self) -> bool {
        self.pieces.iter().all(|piece| piece.extent.grain_bytes().is_some())
    }

    fn write<'a>(&'a self, offset: u64, buf: IoBuf, backing: &'a Link) -> Transfer<'a> {
        Box::pin(async move {
            let changed = async {
                self.check_unfinished(offset, buf.len() as u64, None).await?;
                self.check_first(offset, &buf).await?;
                self.open_writer()?.change(self).await
            };
            if let Err(error) = changed.await {
                return (Err(error), buf);
            }
            let (mut rest, mut done) = (buf, None);
            for (index, at, len) in self.parts(offset, rest.len() as u64) {
                let (result, part) = self.write_piece(index, at, rest.split_to(len as usize), backing).await;
                done = Some(join(done, part));
                if let Err(error) = result {
                    return (Err(error), join(done, rest));
                }
            }
            (Ok(()), join(done, rest))
        })
    }

    fn write_zeroes<'a>(&'a self, offset: u64, len: u64, flags: ZeroFlags, backing: &'a Link) -> Work<'a> {
        Box::pin(async move {
            self.check_unfinished(offset, len, Some(backing)).await?;
            self.open_writer()?.change(self).await?;
            for part in self.parts(offset, len) {
                self.zero_piece(part, Some(flags), backing).await?;
            }
            Ok(())
        })
    }

    fn discard(&self, offset: u64, len: u64) -> Work<'_> {
        Box::pin(async move {
            let writer = self.open_writer()?;
            for (index, at, len) in self.parts(offset, len) {
                // A grain is written once, and stays.
                if matches!(writer.extents[index], ExtentWriter::Stream(_)) {
                    continue;
                }
                // Where there is nothing, nothing changes, and the disk stays the parent of its overlays.
                let (mut from, end) = (at, at + len);
                while from < end {
                    match self.place(index, from, end - from).await? {
                        (RunSource::Unallocated, there) => from += there.max(1),
                        _ => break,
                    }
                }
                if from < end {
                    self.open_writer()?.change(self).await?;
                    self.zero_piece((index, from, end - from), None, &Link::default()).await?;
                }
            }
            Ok(())
        })
    }

    fn holds_changes(&self) -> bool {
        self.writer.get().is_some_and(|writer| writer.extents.iter().any(ExtentWriter::holds_changes))
    }

    fn flush(&self) -> Work<'_> {
        Box::pin(self.flush_all(false))
    }

    fn complete(&self) -> Work<'_> {
        Box::pin(self.flush_all(true))
    }
}
