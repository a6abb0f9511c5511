// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Carries one request out.

use crate::server::MountState;
use cowshed_fuse_proto::request::Changes;
use cowshed_fuse_proto::{Operation, reply};
use cowshed_image::graph::{AttachRequest, Queue, images_below};
use cowshed_image::node::ZeroFlags;
use cowshed_image::{Node, Preallocation};
use cowshed_storage::{IoBuf, PermissionSet, Permissions, rt};
use cowshed_types::{Errno, Error, ErrorKind, Result};
use rustix::io::Errno as Number;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The unit of sizes of images that count in sectors, in bytes.
const SECTOR_BYTES: u64 = 512;
/// Zeroes are written in pieces of this many bytes, with turns for other requests between them.
const ZERO_PIECE_BYTES: u64 = 1 << 30;
/// Runs of a mapping that one look asks for.
const RUNS_AT_ONCE: usize = 256;
/// The unit of the file system's figures, in bytes.
const FIGURE_BYTES: u32 = 4096;
/// Open flags by which each write is to be durable: `O_DSYNC`, which `O_SYNC` has too.
const DURABLE: u32 = 0o10000;
/// The open flag by which a file loses its bytes: `O_TRUNC`.
const TRUNCATES: u32 = 0o1000;
/// The open flag by which writes go to the end of the file: `O_APPEND`.
const APPENDS: u32 = 0o2000;

/// Modes of fallocate(2).
mod allocate {
    pub const KEEP_SIZE: u32 = 1;
    pub const PUNCH_HOLE: u32 = 2;
    pub const ZERO_RANGE: u32 = 0x10;
}

/// Places of lseek(2) that the server is asked for.
mod seek {
    pub const DATA: u32 = 3;
    pub const HOLE: u32 = 4;
}

/// The result of a request: bytes that stand for themselves, data of the disk, or the number of an error.
pub(crate) type FuseOutcome = std::result::Result<Given, Errno>;

#[derive(Debug)]
pub(crate) enum Given {
    Fields(Vec<u8>),
    Data(IoBuf),
}

fn errno(number: Number) -> Errno {
    Errno(number.raw_os_error())
}

fn number_of(error: &Error) -> Errno {
    match error.kind() {
        ErrorKind::ReadOnly => errno(Number::ROFS),
        ErrorKind::Unsupported => errno(Number::OPNOTSUPP),
        // Another user of the disk is against it.
        ErrorKind::Busy => errno(Number::BUSY),
        _ => error.errno(),
    }
}

/// A request on its way.
pub(crate) struct RequestWork {
    pub shared: Arc<MountState>,
    pub disk: Queue,
}

impl RequestWork {
    /// Carries a request out; a write has its data in `data`.
    pub async fn run(self, operation: Operation, data: Option<IoBuf>) -> FuseOutcome {
        let result = match operation {
            Operation::Read { offset, len } => return self.read(offset, len).await.map_err(|error| number_of(&error)),
            Operation::Write { offset, flags, .. } => {
                return self.write(offset, data.unwrap_or_default(), flags).await;
            }
            Operation::GetAttributes => Ok(self.attributes()),
            Operation::SetAttributes(changes) => return self.set_attributes(&changes).await,
            Operation::Open { flags } => self.open(flags).await,
            Operation::Statistics => Ok(self.statistics()),
            Operation::Flush if !self.shared.is_unflushed.load(Ordering::Acquire) => Ok(Vec::new()),
            Operation::Flush | Operation::Sync => self.flush().await,
            Operation::Allocate { offset, len, mode } => return self.allocate(offset, len, mode).await,
            Operation::Seek { offset, whence } => return self.seek(offset, whence).await,
            Operation::Release | Operation::Destroy | Operation::Unanswered => Ok(Vec::new()),
            Operation::Lookup => return Err(errno(Number::NOENT)),
            // The session has seen to it.
            Operation::Init { .. } | Operation::Interrupt { .. } => return Err(errno(Number::IO)),
            Operation::Other => return Err(errno(Number::NOSYS)),
        };
        result.map(Given::Fields).map_err(|error| number_of(&error))
    }

    fn node(&self) -> Arc<Node> {
        self.disk.attachment().node()
    }

    fn attributes(&self) -> Vec<u8> {
        self.shared.attributes.look(&self.node(), self.disk.size()).body()
    }

    /// A disk that grows with its writes may begin anew. Another one hears of `O_TRUNC` as a change of the size.
    async fn open(&self, flags: u32) -> Result<Vec<u8>> {
        if flags & TRUNCATES != 0 && self.shared.config.growable {
            let _one = self.shared.resizing.lock().await;
            if self.disk.size() != 0 {
                self.resize(0).await?;
            }
        }
        Ok(reply::opened().to_vec())
    }

    /// Changes of the size so far. It is looked at before the size.
    fn resizes(&self) -> u64 {
        self.shared.resizes.load(Ordering::SeqCst)
    }

    /// True where a request up to `end` has failed because the disk became shorter after the look at its size. `seen` has the changes of
    /// the size until that look, and gets those until now.
    fn has_shrunk(&self, seen: &mut u64, end: u64, error: &Error) -> bool {
        let before = std::mem::replace(seen, self.resizes());
        error.errno() == Errno::EINVAL && (*seen != before || self.disk.size() < end)
    }

    async fn read(&self, offset: u64, len: u32) -> Result<Given> {
        let mut seen = self.resizes();
        loop {
            let there = self.disk.size().saturating_sub(offset).min(len.into());
            if there == 0 {
                return Ok(Given::Fields(Vec::new()));
            }
            let buf = IoBuf::try_scratch(usize::try_from(there).unwrap_or(usize::MAX))?;
            let (result, buf) = self.disk.read(offset, buf).await;
            match result {
                // As at the end of a file that is truncated meanwhile.
                Err(error) if self.has_shrunk(&mut seen, offset + there, &error) => {}
                result => return result.map(|()| Given::Data(buf)),
            }
        }
    }

    async fn write(&self, offset: u64, mut data: IoBuf, flags: u32) -> FuseOutcome {
        let growable = self.shared.config.growable;
        if !growable && flags & APPENDS != 0 && !data.is_empty() {
            // The kernel may know another length than the disk has. Behind the end there is no room.
            return Err(errno(Number::NOSPC));
        }
        let end = offset.checked_add(data.len() as u64).ok_or(errno(Number::FBIG))?;
        let is_durable = flags & DURABLE != 0 || self.shared.config.writethrough;
        // Held from where the disk grows to the end of the write, so that no truncation comes between them.
        let mut one = None;
        let mut seen = self.resizes();
        let (result, len) = loop {
            if growable && end > self.disk.size() {
                if one.is_none() {
                    one = Some(self.shared.resizing.lock().await);
                }
                self.grow(end).await.map_err(|error| number_of(&error))?;
            }
            let there = self.disk.size().saturating_sub(offset);
            if !growable {
                if there == 0 && !data.is_empty() {
                    return Err(errno(Number::NOSPC));
                }
                data.truncate(usize::try_from(there).unwrap_or(usize::MAX));
            }
            let len = data.len() as u32;
            let (result, written) = match is_durable {
                true => self.disk.write_durable(offset, data).await,
                false => self.disk.write(offset, data).await,
            };
            // A file that was truncated meanwhile is too short: the write comes after that.
            let end = offset + u64::from(len);
            let is_too_short = result.as_ref().is_err_and(|error| {
                self.has_shrunk(&mut seen, end, error) || growable && error.errno() == Errno::EINVAL
            });
            if !is_too_short || one.is_some() {
                break (result, len);
            }
            if growable {
                one = Some(self.shared.resizing.lock().await);
            }
            data = written;
        };
        result.map_err(|error| number_of(&error))?;
        self.note_change();
        Ok(Given::Fields(reply::written(len).to_vec()))
    }

    fn note_change(&self) {
        self.shared.attributes.note_write();
        if !self.shared.is_unflushed.load(Ordering::Relaxed) {
            self.shared.is_unflushed.store(true, Ordering::Release);
        }
    }

    async fn flush(&self) -> Result<Vec<u8>> {
        // A write that ends from here on is for the next flush.
        self.shared.is_unflushed.store(false, Ordering::Release);
        let result = self.disk.flush().await;
        if result.is_err() {
            self.shared.is_unflushed.store(true, Ordering::Release);
        }
        result.map(|()| Vec::new())
    }

    async fn set_attributes(&self, changes: &Changes) -> FuseOutcome {
        if changes.size.is_some() && !self.shared.config.writable {
            return Err(errno(Number::ROFS));
        }
        if let Some(size) = changes.size.filter(|size| !self.opens_to_truncate(*size, changes)) {
            if self.node().is_sized_in_sectors() && !size.is_multiple_of(SECTOR_BYTES) {
                return Err(errno(Number::INVAL));
            }
            let _one = self.shared.resizing.lock().await;
            if size != self.disk.size() {
                self.resize(size).await.map_err(|error| number_of(&error))?;
            }
        }
        self.shared.attributes.change(changes)?;
        Ok(Given::Fields(self.attributes()))
    }

    /// True for the change by which `O_TRUNC` empties a file. The kernel sends the same for `truncate(path, 0)`.
    fn opens_to_truncate(&self, size: u64, changes: &Changes) -> bool {
        size == 0 && !changes.through_descriptor && !self.shared.config.growable
    }

    /// Makes the disk at least `end` bytes long. The caller holds [`MountState::resizing`].
    async fn grow(&self, end: u64) -> Result<()> {
        let wanted = match self.node().is_sized_in_sectors() {
            true => end.checked_next_multiple_of(SECTOR_BYTES).unwrap_or(end),
            false => end,
        };
        if wanted > self.disk.size() {
            self.resize(wanted).await?;
        }
        match end > self.disk.size() {
            true => Err(Error::new(ErrorKind::NoSpace, "another user made the disk shorter")),
            false => Ok(()),
        }
    }

    /// Changes the size, and holds the right to do so meanwhile. Requests in flight from other users of the disk end
    /// before.
    async fn resize(&self, size: u64) -> Result<()> {
        // A job may put another node in its place while this waits.
        let named = |error: Error| match error.kind() {
            // As file systems say it of a length that no file of theirs has.
            ErrorKind::InvalidArgument if size > self.disk.size() => Error::os(Errno::EFBIG, error.message()),
            _ => error,
        };
        while !self.resize_node(&self.node(), size).await.map_err(named)? {}
        (self.shared.on_resize)();
        Ok(())
    }

    /// True where another export shows the same disk, whatever nodes are in between.
    fn is_shared(&self) -> bool {
        let own = &self.shared.attachment;
        let node = self.node();
        let images = images_below(&node);
        let exports =
            node.graph().attachments().into_iter().filter(|other| other.is_export() && !Arc::ptr_eq(other, own));
        let mut others = exports.flat_map(|other| images_below(&other.node()));
        others.any(|other| images.iter().any(|image| Arc::ptr_eq(image, &other)))
    }

    /// As [`RequestWork::resize`]; false where the export has another node than `node` by the time that it may do so.
    async fn resize_node(&self, node: &Arc<Node>, size: u64) -> Result<bool> {
        if size < node.size() && self.is_shared() {
            return Err(Error::new(ErrorKind::Busy, "clients of another export may use what a shorter disk lacks"));
        }
        let graph = Arc::clone(node.graph());
        let right = match self.shared.config.growable {
            true => None,
            false => {
                let permissions = Permissions { used: PermissionSet::RESIZE, shared: PermissionSet::ALL };
                let name = format!("{}:resize", self.shared.config.id);
                let request = AttachRequest::job(name, permissions).without_statistics();
                Some(graph.attach(node, request).await?)
            }
        };
        // Users of the image itself wait, too, not only those of a node above it.
        let images = images_below(node);
        let drained = graph.drain(&images.iter().chain([node]).collect::<Vec<_>>()).await;
        let result = match Arc::ptr_eq(node, &self.node()) {
            true => node.resize(size, Preallocation::Off).await.map(|()| true),
            false => Ok(false),
        };
        // Before waiting requests go on.
        self.shared.resizes.fetch_add(1, Ordering::SeqCst);
        drop(drained);
        let given_back = match right {
            Some(right) => right.detach().await,
            None => Ok(()),
        };
        self.note_change();
        given_back.and(result)
    }

    async fn allocate(&self, offset: u64, len: u64, mode: u32) -> FuseOutcome {
        let end = offset.checked_add(len).filter(|end| i64::try_from(*end).is_ok()).ok_or(errno(Number::FBIG))?;
        let size = self.disk.size();
        let keeps_size = mode & allocate::KEEP_SIZE != 0;
        let (grows, may_unmap) = match mode & !allocate::KEEP_SIZE {
            // Space is never set aside, so this can only make the disk longer.
            0 if !keeps_size && offset >= size => (true, None),
            allocate::PUNCH_HOLE if keeps_size => (false, Some(true)),
            allocate::ZERO_RANGE => (!keeps_size, Some(false)),
            _ => return Err(errno(Number::OPNOTSUPP)),
        };
        if !self.shared.config.writable {
            return Err(errno(Number::ROFS));
        }
        let outcome = async {
            if grows && end > size {
                let _one = self.shared.resizing.lock().await;
                self.grow(end).await?;
            }
            if let Some(may_unmap) = may_unmap {
                self.write_zeroes(offset, end.min(self.disk.size()), may_unmap).await?;
            }
            Ok(())
        };
        outcome.await.map(|()| Given::Fields(Vec::new())).map_err(|error: Error| number_of(&error))
    }

    async fn write_zeroes(&self, offset: u64, end: u64, may_unmap: bool) -> Result<()> {
        let (mut at, mut seen) = (offset, self.resizes());
        loop {
            let piece = ZERO_PIECE_BYTES.min(end.min(self.disk.size()).saturating_sub(at));
            if piece == 0 {
                break;
            }
            match self.disk.write_zeroes(at, piece, ZeroFlags { may_unmap, no_fallback: false }).await {
                // No byte is left there.
                Err(error) if self.has_shrunk(&mut seen, at + piece, &error) => continue,
                result => result?,
            }
            at += piece;
            rt::yield_now().await;
        }
        self.note_change();
        match self.shared.config.writethrough {
            true => self.disk.flush().await,
            false => Ok(()),
        }
    }

    async fn seek(&self, offset: u64, whence: u32) -> FuseOutcome {
        let wants_data = match whence {
            seek::DATA => true,
            seek::HOLE => false,
            _ => return Err(errno(Number::INVAL)),
        };
        let (mut at, mut seen) = (offset, self.resizes());
        let mut size = self.disk.size();
        while at < size {
            let found = match self.disk.block_status_chain(at, size - at, RUNS_AT_ONCE).await {
                Err(error) if self.has_shrunk(&mut seen, size, &error) => {
                    size = self.disk.size();
                    continue;
                }
                found => found.map_err(|error| number_of(&error))?,
            };
            for run in found {
                if wants_data != run.zero {
                    return Ok(place(at));
                }
                at += run.len;
            }
            rt::yield_now().await;
        }
        // The end of the file is a hole.
        match wants_data || offset > size {
            true => Err(errno(Number::NXIO)),
            false => Ok(place(size)),
        }
    }

    /// The figures of a file system that holds this one file.
    fn statistics(&self) -> Vec<u8> {
        let size = self.disk.size();
        let used = crate::attributes::allocated_bytes(&self.node()).unwrap_or(size).min(size);
        let blocks = |bytes: u64| bytes.div_ceil(FIGURE_BYTES.into());
        reply::statistics(FIGURE_BYTES, blocks(size), blocks(size) - blocks(used)).to_vec()
    }
}

fn place(offset: u64) -> Given {
    Given::Fields(offset.to_ne_bytes().to_vec())
}
