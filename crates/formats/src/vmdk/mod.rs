// SPDX-License-Identifier: Apache-2.0 OR MIT
//! VMDK: docs/formats/vmdk.md. A disk is a row of extents; `extent.rs` knows one of them, `open.rs` finds
//! them, `write.rs` writes to them, this file is their row.

mod check;
mod claims;
mod extent;
mod grains;
mod open;
mod overlaps;
mod se_sparse;
mod stream;
mod tables;
mod write;

use super::mapped::{MappedFormat, MappedWriter, MarkedFormat, Run, RunSource, push_run};
use cowshed_graph::node::{Description, MappedCheck};
use cowshed_graph::node::{LocalFuture, Node, Work};
use cowshed_graph::open::DriverLine;
use cowshed_graph::options::{DriverKind, DriverSchema, Key, KeyType, REQUIRED};
use cowshed_layout::vmdk::{Access, Descriptor, SparseKind};
use cowshed_types::{Error, ErrorKind, Result};
use extent::{Extent, Storage};
use open::check_parent;
use serde_json::{Value, json};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use write::VmdkWriter;

const SCHEMA: DriverSchema = DriverSchema {
    name: "vmdk",
    kind: DriverKind::Format,
    about: "VMware's image format",
    keys: &[
        Key { name: "file", value: KeyType::Child, default: REQUIRED, help: "the image, or its descriptor" },
        Key {
            name: "backing",
            value: KeyType::ChildOrNull,
            default: "as the image says",
            help: "the parent; null for none",
        },
        Key {
            name: "extents",
            value: KeyType::Choice(&["folder", "anywhere"]),
            default: "folder",
            help: "where the files that a descriptor names may be: in its own folder, or anywhere",
        },
    ],
};

/// The line of the table.
pub(crate) const DRIVER: DriverLine = DriverLine::new(&SCHEMA, |opener, draft| Box::pin(open::open(opener, draft)));

/// The version of sparse extents whose changes VMware tracks, and of streams.
const TRACKED_VERSION: u32 = 3;

/// An extent and where on the disk it is.
struct DiskExtent {
    start: u64,
    extent: Extent,
}

pub(crate) struct Vmdk {
    descriptor: Descriptor,
    pieces: Vec<DiskExtent>,
    /// The files of the extents; for an image in one file that file.
    files: Vec<Arc<Node>>,
    size: u64,
    /// The content id now.
    cid: AtomicU32,
    /// The parent's, as the image notes it now.
    parent_cid: AtomicU32,
    /// The file of the descriptor and, inside of an extent, its place: first sector and number of sectors.
    home: (Arc<Node>, Option<(u64, u64)>),
    /// Empty: opened for reading.
    writer: OnceLock<VmdkWriter>,
}

impl Vmdk {
    fn new(
        descriptor: Descriptor,
        extents: Vec<Extent>,
        files: Vec<Arc<Node>>,
        home: (Arc<Node>, Option<(u64, u64)>),
    ) -> Result<Vmdk> {
        let mut size = 0u64;
        let mut pieces = Vec::with_capacity(extents.len());
        for extent in extents {
            let start = size;
            size = size.checked_add(extent.len).filter(|size| i64::try_from(*size).is_ok()).ok_or_else(|| {
                Error::invalid_image("extents", pieces.len() + 1, "the extents of the disk are too large together")
            })?;
            if extent.len > 0 {
                pieces.push(DiskExtent { start, extent });
            }
        }
        let cid = AtomicU32::new(descriptor.cid);
        let parent_cid = AtomicU32::new(descriptor.parent_cid);
        Ok(Vmdk { descriptor, pieces, files, size, cid, parent_cid, home, writer: OnceLock::new() })
    }

    /// The piece that byte `offset` of the disk is in.
    fn piece(&self, offset: u64) -> Result<&DiskExtent> {
        self.piece_index(offset).map(|index| &self.pieces[index])
    }

    fn piece_index(&self, offset: u64) -> Result<usize> {
        let index = self.pieces.partition_point(|piece| piece.start <= offset);
        let index = index.checked_sub(1).filter(|index| *index < self.pieces.len());
        index.ok_or_else(|| Error::internal("a request behind the end of the disk").offset(offset))
    }

    /// True while all of the disk is in its parent.
    async fn is_empty(&self) -> Result<bool> {
        let mut at = 0;
        while at < self.size {
            let runs = self.map(at, self.size - at, 2).await?;
            if runs.iter().any(|run| run.place != RunSource::Unallocated) {
                return Ok(false);
            }
            at = runs.last().map_or(self.size, |run| run.start + run.len);
        }
        Ok(true)
    }

    /// Refuses what a writer would harm:
    ///
    /// - a disk whose changes VMware tracks: a write that the record lacks is missing in the next incremental backup;
    /// - an extent with the header "COWD": ESX puts its next grain at the free sector that the header notes, over a grain of ours.
    fn check_may_change(&self) -> Result<()> {
        let is_of_esx = |piece: &DiskExtent| match &piece.extent.storage {
            Storage::Sparse(sparse) => sparse.header.kind == SparseKind::Esx,
            _ => false,
        };
        if let Some(piece) = self.pieces.iter().find(|piece| is_of_esx(piece)) {
            let message = "extents of the kind vmfsSparse can only be read: ESX would write its next grain over new ones; \
                           convert the disk to write to it";
            let error = Error::new(ErrorKind::ReadOnly, message).field("magic").value("COWD");
            return Err(match piece.extent.file(&self.files) {
                Some(file) => error.file(file.filename()),
                None => error,
            });
        }
        let is_tracked = |piece: &DiskExtent| match &piece.extent.storage {
            Storage::Sparse(sparse) => {
                sparse.header.kind == SparseKind::Hosted
                    && sparse.header.version == TRACKED_VERSION
                    && !sparse.is_stream
                    && !sparse.header.compressed
            }
            _ => false,
        };
        if self.pieces.iter().any(is_tracked) {
            let message = "VMDK version 3 must be read only";
            return Err(Error::new(ErrorKind::ReadOnly, message)
                .hint(": VMware tracks the changes of the disk, and writes would be missing there")
                .field("version")
                .value(TRACKED_VERSION));
        }
        match &self.descriptor.change_track {
            Some(path) => {
                let message = "the disk can only be read: VMware tracks its changes, and writes would be missing there";
                Err(Error::new(ErrorKind::ReadOnly, message).field("changeTrackPath").value(path.escape_debug()))
            }
            None => Ok(()),
        }
    }

    /// QEMU's `ImageInfoSpecificVmdk`.
    fn specific(&self) -> Value {
        let extents: Vec<Value> = self.pieces.iter().filter_map(|piece| piece.extent.info(&self.files)).collect();
        json!({
            "type": "vmdk",
            "data": {
                "cid": self.cid.load(Ordering::Relaxed),
                "parent-cid": self.parent_cid.load(Ordering::Relaxed),
                "create-type": self.descriptor.create_type,
                "extents": extents,
            }
        })
    }
}

/// The mark is the content id.
impl MarkedFormat for Vmdk {
    fn mark(&self) -> u32 {
        self.cid.load(Ordering::Relaxed)
    }

    fn notes_parent(&self) -> bool {
        self.descriptor.has_parent()
    }

    fn room_bits(&self) -> LocalFuture<'_, Result<u32>> {
        Box::pin(async move { self.open_writer()?.room_bits().await })
    }

    fn follow_parent(&self, cid: u32) -> Work<'_> {
        Box::pin(async move {
            match self.parent_cid.load(Ordering::Relaxed) == cid {
                true => Ok(()),
                false => self.open_writer()?.follow(self, cid).await,
            }
        })
    }

    fn announce_change(&self, bits: u32) -> Work<'_> {
        Box::pin(async move { self.open_writer()?.announce(self, bits).await })
    }

    fn take_back_change(&self) -> Work<'_> {
        Box::pin(async move { self.open_writer()?.restore_content_id(self).await })
    }

    fn end_change(&self) -> LocalFuture<'_, ()> {
        Box::pin(async move {
            if let Some(writer) = self.writer.get() {
                writer.end_change().await;
            }
        })
    }
}

impl MappedFormat for Vmdk {
    fn name(&self) -> &'static str {
        SCHEMA.name
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn describe(&self) -> Description {
        let backing_name = self.descriptor.parent_hint.clone();
        Description {
            zeroes_in_clusters: true,
            has_packed_clusters: true,
            cluster_bytes: self.pieces.iter().find_map(|piece| piece.extent.grain_bytes()),
            backing_format: backing_name.is_some().then_some(SCHEMA.name),
            backing_name,
            takes_stream: self.stream().is_some(),
            specific: self.specific(),
            ..Description::default()
        }
    }

    fn is_as_in_its_file(&self) -> bool {
        self.pieces.iter().all(|piece| matches!(piece.extent.storage, Storage::Flat { .. }))
    }

    fn files(&self) -> &[Arc<Node>] {
        &self.files
    }

    fn map(&self, offset: u64, len: u64, max_runs: usize) -> LocalFuture<'_, Result<Vec<Run>>> {
        Box::pin(async move {
            let mut runs: Vec<Run> = Vec::new();
            let (mut at, end) = (offset, offset.saturating_add(len).min(self.size));
            while at < end && runs.len() < max_runs.max(1) {
                let index = self.piece_index(at)?;
                let piece = &self.pieces[index];
                let piece_end = (piece.start + piece.extent.len).min(end);
                let (place, len) = self.place(index, at - piece.start, piece_end - at).await?;
                let place = match place {
                    RunSource::Packed { block } => RunSource::Packed { block: block + piece.start },
                    place => place,
                };
                push_run(&mut runs, Run { start: at, len, place });
                at += len;
            }
            Ok(runs)
        })
    }

    fn unpack(&self, block: u64) -> LocalFuture<'_, Result<Vec<u8>>> {
        Box::pin(async move {
            let piece = self.piece(block)?;
            let at = block - piece.start;
            match (self.stream(), &piece.extent.storage) {
                (Some(stream), Storage::Sparse(sparse)) if stream.is_changed().await => {
                    let sector =
                        stream.grain(at).await.ok_or_else(|| Error::internal("a grain went away").offset(at))?;
                    sparse.unpack_at(&self.files, sector, at, piece.extent.len).await
                }
                _ => piece.extent.unpack(&self.files, at).await,
            }
        })
    }

    fn writer(&self) -> Option<&dyn MappedWriter> {
        self.writer.get().is_some().then_some(self)
    }

    /// A stream that is not whole yet has no places, and a stream has no parent.
    fn takes_backing(&self) -> bool {
        self.descriptor.create_type != "streamOptimized"
    }

    /// A disk without grains is not yet the difference to anything: it notes whatever content its parent has.
    fn check_backing<'a>(&'a self, backing: &'a Node) -> Work<'a> {
        Box::pin(async move {
            let checked = check_parent(self.parent_cid.load(Ordering::Relaxed), backing);
            if checked.is_err() && self.notes_parent() && self.is_empty().await? {
                return Ok(());
            }
            checked
        })
    }

    fn marked(&self) -> Option<&dyn MarkedFormat> {
        Some(self)
    }

    fn start_writing(&self) -> Work<'_> {
        Box::pin(async move {
            if self.descriptor.extents.iter().any(|extent| extent.access == Access::ReadOnly) {
                return Err(Error::new(ErrorKind::ReadOnly, "the descriptor forbids to write to an extent"));
            }
            if self.pieces.iter().any(|piece| matches!(piece.extent.storage, Storage::SeSparse(_))) {
                return Err(se_sparse::no_writing());
            }
            self.check_may_change()?;
            match self.writer.get() {
                Some(writer) => writer.begin_again(self).await,
                None => {
                    let writer = VmdkWriter::open(self).await?;
                    self.writer.set(writer).map_err(|_| Error::internal("an image is made writable twice at once"))
                }
            }
        })
    }

    fn check(&self, max: usize) -> LocalFuture<'_, Result<Option<MappedCheck>>> {
        Box::pin(async move { self.find_damage(max).await.map(Some) })
    }
}
