// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Formats without an engine of their own. Each is a [`MappedFormat`], which knows the places of a range's bytes, and
//! this driver does the I/O for all of them. A new one needs no other code between `Node` and the files. Formats that
//! can be written to are a [`MappedWriter`], too.

mod at_once;
mod writer;

use cowshed_graph::buffers::join;
use cowshed_graph::node::{
    Backing, BackingLink, BackingName, BitmapChange, BitmapStatus, Bitmaps, Described, Description, Driver, Intent,
    Link, LocalFuture, Mapped, MappedCheck, Marks, NamedBacking, Node, Preallocation, StatusExtent, Transfer, Work,
    ZeroFlags, below_filters, done,
};
use cowshed_graph::options::BlockdevOptions;
use cowshed_storage::IoBuf;
use cowshed_types::memory::vec_for;
use cowshed_types::{DirtyBits, Error, ErrorKind, Repair, Result};
use futures_util::future::join_all;
use futures_util::lock::Mutex as AsyncMutex;
use std::future::ready;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

pub(crate) use writer::MappedWriter;

/// Runs that one request maps at once.
const MAX_RUNS: usize = 256;
/// Unpacked blocks that are kept: small reads in a row don't unpack the same block again.
const KEPT_BLOCKS: usize = 4;
/// A packed block of more bytes is large.
pub(crate) const LARGE_BYTES: u64 = 4 << 20;

/// Memory for the bytes of an unpacked block. `ENOMEM` where there is none.
pub(crate) fn zeroed(len: usize) -> Result<Vec<u8>> {
    let mut bytes = vec_for(len)?;
    bytes.resize(len, 0);
    Ok(bytes)
}

/// The place of a run of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RunSource {
    /// Plain bytes in one of the files, at this offset.
    Data { file: usize, host: u64 },
    /// Zeroes.
    Zero,
    /// Not here: in the backing file, or zeroes without one.
    Unallocated,
    /// Inside the packed block that begins at this byte of the disk.
    Packed { block: u64 },
}

/// A range of the disk with one place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub start: u64,
    pub len: u64,
    pub place: RunSource,
}

impl Run {
    fn end(&self) -> u64 {
        self.start + self.len
    }

    /// True when `next` only goes on with this run. Packed blocks stay apart.
    fn continues_in(&self, next: &Run) -> bool {
        match (self.place, next.place) {
            (RunSource::Data { file, host }, RunSource::Data { file: next_file, host: next_host }) => {
                file == next_file && host + self.len == next_host
            }
            (RunSource::Zero, RunSource::Zero) | (RunSource::Unallocated, RunSource::Unallocated) => true,
            _ => false,
        }
    }
}

/// Adds a run, joined with the last one where it goes on with that.
pub(crate) fn push_run(runs: &mut Vec<Run>, run: Run) {
    match runs.last_mut() {
        Some(last) if last.continues_in(&run) => last.len += run.len,
        _ => runs.push(run),
    }
}

pub(crate) fn no_such_bitmap(name: &str) -> Error {
    Error::new(ErrorKind::NotFound, format!("Dirty bitmap '{name}' not found"))
}

/// A format that knows the places of data.
pub(crate) trait MappedFormat: Send + Sync {
    /// The driver's name.
    fn name(&self) -> &'static str;
    /// Size of the disk in bytes.
    fn size(&self) -> u64;
    /// The image's description of itself.
    fn describe(&self) -> Description;
    /// True for an image whose data are encrypted.
    fn is_encrypted(&self) -> bool {
        false
    }
    /// True for a disk that is stored as it is, so that a map of its file is one of the disk.
    fn is_as_in_its_file(&self) -> bool {
        false
    }
    /// The files that runs refer to.
    fn files(&self) -> &[Arc<Node>];
    /// The places of a range: runs in order without gaps from `offset` on, at least one, about `max_runs` at most. They
    /// may end before the range does, never behind it.
    fn map(&self, offset: u64, len: u64, max_runs: usize) -> LocalFuture<'_, Result<Vec<Run>>>;
    /// True where blocks are so large that they are unpacked one after the other, and one of them is kept.
    fn packs_large(&self) -> bool {
        false
    }
    /// Unpacks the block that begins at byte `block` of the disk, all of it.
    fn unpack(&self, block: u64) -> LocalFuture<'_, Result<Vec<u8>>>;
    /// Looks for damage; at most `max` findings are reported. `None` where qemu-img has no check for the format either.
    fn check(&self, max: usize) -> LocalFuture<'_, Result<Option<MappedCheck>>>;
    /// The same with a repair, as far as possible, of an image that was opened for writing. `None` where the format has
    /// no repair.
    fn repair(&self, _what: Repair, _max: usize) -> LocalFuture<'_, Result<Option<MappedCheck>>> {
        Box::pin(ready(Ok(None)))
    }
    /// The part that writes, of an image that was opened for that.
    fn writer(&self) -> Option<&dyn MappedWriter> {
        None
    }
    /// Whether an image in use can get another backing node.
    fn takes_backing(&self) -> bool {
        false
    }
    /// Refuses a backing node with other content than the image was made of, where the image notes that.
    fn check_backing<'a>(&'a self, _backing: &'a Node) -> Work<'a> {
        done(Ok(()))
    }
    /// Whether the header of an image can be changed to name another backing file.
    fn renames_backing(&self) -> bool {
        false
    }
    /// Has the header name another backing file, or none. All that was written before is durable by then.
    fn rename_backing<'a>(&'a self, _name: Option<&'a str>, _format: Option<&'a str>) -> Work<'a> {
        done(Err(Error::unsupported("the format has no way to name another backing file")))
    }
    /// True for a format that keeps dirty bitmaps.
    fn has_bitmaps(&self) -> bool {
        false
    }
    /// The dirty bitmaps of the image, in its order.
    fn bitmaps(&self) -> LocalFuture<'_, Result<Vec<BitmapStatus>>> {
        Box::pin(ready(Ok(Vec::new())))
    }
    /// The bits of one of them.
    fn bitmap_bits<'a>(&'a self, name: &'a str) -> LocalFuture<'a, Result<Arc<DirtyBits>>> {
        Box::pin(ready(Err(no_such_bitmap(name))))
    }
    /// See [`MarkedFormat`].
    fn marked(&self) -> Option<&dyn MarkedFormat> {
        None
    }
    /// Makes the part that writes, for an image whose files have become writable.
    fn start_writing(&self) -> Work<'_>;
}

/// A format whose images have a mark of their content: [`Marks`] says what each does.
pub(crate) trait MarkedFormat: Send + Sync {
    fn mark(&self) -> u32;
    fn notes_parent(&self) -> bool;
    fn room_bits(&self) -> LocalFuture<'_, Result<u32>>;
    fn follow_parent(&self, mark: u32) -> Work<'_>;
    fn announce_change(&self, bits: u32) -> Work<'_>;
    fn take_back_change(&self) -> Work<'_>;
    fn end_change(&self) -> LocalFuture<'_, ()>;
}

/// The driver over a [`MappedFormat`].
pub(crate) struct MappedDriver {
    format: Box<dyn MappedFormat>,
    filename: String,
    backing: Arc<Link>,
    /// The caller left the backing file out: its data can't be read.
    no_backing: bool,
    /// This much may still be unpacked, in bytes.
    unpack_budget: AtomicU64,
    kept: Mutex<Kept>,
    /// Held while a large block is unpacked.
    turn: AsyncMutex<()>,
}

/// Unpacked blocks.
#[derive(Default)]
struct Kept {
    /// Counts the times that packed blocks were written.
    changes: u64,
    blocks: Vec<(u64, Arc<Vec<u8>>)>,
}

impl MappedDriver {
    pub(crate) fn new(
        format: Box<dyn MappedFormat>,
        filename: String,
        backing: Arc<Link>,
        no_backing: bool,
        max_unpacked_bytes: u64,
    ) -> MappedDriver {
        let unpack_budget = AtomicU64::new(max_unpacked_bytes);
        MappedDriver {
            format,
            filename,
            backing,
            no_backing,
            unpack_budget,
            kept: Mutex::default(),
            turn: AsyncMutex::default(),
        }
    }

    fn named(&self, error: Error) -> Error {
        if error.file_name().is_none() { error.file(self.filename.clone()) } else { error }
    }

    /// Work of the part that writes, if there is one.
    fn written<'a>(&'a self, work: Option<Work<'a>>) -> Work<'a> {
        match work {
            Some(work) => Box::pin(async move { work.await.map_err(|error| self.named(error)) }),
            None => done(Err(self.refusal())),
        }
    }

    /// The runs of the format, checked against its promise: a bug there must not become an endless loop here.
    async fn runs(&self, offset: u64, len: u64, max_runs: usize) -> Result<Vec<Run>> {
        let runs = self.format.map(offset, len, max_runs).await.map_err(|error| self.named(error))?;
        let mut at = offset;
        for run in &runs {
            if run.start != at || run.len == 0 || run.len > offset + len - at {
                return Err(self.named(Error::internal("a format maps a range with gaps").offset(at)));
            }
            at = run.end();
        }
        match runs.is_empty() {
            true => Err(self.named(Error::internal("a format says nothing of a range").offset(offset))),
            false => Ok(runs),
        }
    }

    async fn read_run(&self, run: Run, mut part: IoBuf) -> (Result<()>, IoBuf) {
        match run.place {
            RunSource::Data { file, host } => match self.format.files().get(file) {
                Some(node) => node.read_boxed(host, part).await,
                None => (Err(Error::internal("a format maps to a file that it doesn't have")), part),
            },
            RunSource::Unallocated if self.no_backing => {
                let message = "the data is in the backing file, which was left out";
                (Err(Error::invalid_argument(message).offset(run.start)), part)
            }
            RunSource::Unallocated => match &*self.backing.load() {
                Some(backing) => backing.read_padded(run.start, part).await,
                None => {
                    part.fill(0);
                    (Ok(()), part)
                }
            },
            RunSource::Zero => {
                part.fill(0);
                (Ok(()), part)
            }
            RunSource::Packed { block } => {
                let unpacked = match self.unpacked(block).await {
                    Ok(unpacked) => unpacked,
                    // Another request wrote to it meanwhile, and it isn't packed any more.
                    Err(error) => match self.runs(run.start, run.len, 1).await {
                        Ok(runs) if runs.first().is_some_and(|now| now.place != run.place) => {
                            return self.read(run.start, part).await;
                        }
                        _ => return (Err(error), part),
                    },
                };
                let skip = (run.start - block) as usize;
                match unpacked.get(skip..skip + part.len()) {
                    Some(bytes) => {
                        part.copy_from_slice(bytes);
                        (Ok(()), part)
                    }
                    None => (Err(Error::internal("a packed block is too short").offset(run.start)), part),
                }
            }
        }
    }

    async fn unpacked(&self, block: u64) -> Result<Arc<Vec<u8>>> {
        let kept = || self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let known = || {
            let kept = kept();
            let found = kept.blocks.iter().find(|(known, _)| *known == block).map(|(_, bytes)| Arc::clone(bytes));
            (found, kept.changes)
        };
        if let (Some(bytes), _) = known() {
            return Ok(bytes);
        }
        let is_large = self.format.packs_large();
        let _turn = if is_large { Some(self.turn.lock().await) } else { None };
        // Another request may have unpacked it meanwhile.
        let (found, changes) = known();
        if let Some(bytes) = found {
            return Ok(bytes);
        }
        let others = if is_large { 0 } else { KEPT_BLOCKS - 1 };
        if is_large {
            kept().blocks.clear();
        }
        let bytes = Arc::new(self.format.unpack(block).await?);
        let len = bytes.len() as u64;
        let within = self.unpack_budget.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
            if left == u64::MAX { Some(left) } else { left.checked_sub(len) }
        });
        if within.is_err() {
            let message = "more data comes out of compressed clusters than the policy for this image allows";
            return Err(Error::new(ErrorKind::Limit, message).offset(block));
        }
        let mut kept = kept();
        if kept.changes == changes {
            kept.blocks.truncate(others);
            kept.blocks.insert(0, (block, Arc::clone(&bytes)));
        }
        Ok(bytes)
    }
}

impl Driver for MappedDriver {
    fn name(&self) -> &'static str {
        self.format.name()
    }

    fn described(&self) -> Option<&dyn Described> {
        Some(self)
    }

    fn bitmaps(&self) -> Option<&dyn Bitmaps> {
        self.format.has_bitmaps().then_some(self)
    }

    fn size(&self) -> u64 {
        self.format.size()
    }

    fn refusal(&self) -> Error {
        Error::new(ErrorKind::ReadOnly, "the image is read-only").file(self.filename.clone())
    }

    fn map(&self, offset: u64, len: u64, intent: Intent) -> Mapped<'_> {
        self.look_at_once(offset, len, intent)
    }

    fn read(&self, offset: u64, buf: IoBuf) -> Transfer<'_> {
        Box::pin(async move {
            let end = offset + buf.len() as u64;
            let (mut at, mut rest, mut done) = (offset, buf, None);
            while at < end {
                let runs = match self.runs(at, end - at, MAX_RUNS).await {
                    Ok(runs) => runs,
                    Err(error) => return (Err(error), join(done, rest)),
                };
                let parts = runs.iter().map(|run| {
                    at = run.end();
                    let part = rest.split_to(run.len as usize);
                    self.read_run(*run, part)
                });
                let parts: Vec<_> = parts.collect();
                let mut result = Ok(());
                for (outcome, part) in join_all(parts).await {
                    result = result.and(outcome);
                    done = Some(join(done, part));
                }
                if let Err(error) = result {
                    return (Err(self.named(error)), join(done, rest));
                }
            }
            (Ok(()), join(done, rest))
        })
    }

    /// The status by the format, with the holes of the files under plain data as zeroes.
    fn block_status(&self, offset: u64, len: u64, max_runs: usize) -> LocalFuture<'_, Result<Vec<StatusExtent>>> {
        Box::pin(async move {
            let mut statuses: Vec<StatusExtent> = Vec::new();
            for run in self.runs(offset, len, max_runs).await? {
                if statuses.len() >= max_runs {
                    break;
                }
                let status = StatusExtent {
                    start: run.start,
                    len: run.len,
                    data: matches!(run.place, RunSource::Data { .. } | RunSource::Packed { .. }),
                    zero: match run.place {
                        RunSource::Zero => true,
                        RunSource::Unallocated => self.backing.load().is_none() && !self.no_backing,
                        _ => false,
                    },
                    present: run.place != RunSource::Unallocated,
                    compressed: matches!(run.place, RunSource::Packed { .. }),
                    offset: None,
                    file: None,
                    depth: 0,
                };
                match run.place {
                    RunSource::Data { file, host } => {
                        let Some(node) = self.format.files().get(file) else { break };
                        if node.shows_foreign_context() && !self.format.is_as_in_its_file() {
                            statuses.push(StatusExtent {
                                offset: Some(host),
                                file: Some(node.filename().into()),
                                ..status
                            });
                            continue;
                        }
                        if !in_file(node, status, host, max_runs, &mut statuses).await? {
                            break;
                        }
                    }
                    // Neighbouring packed blocks are reported as one run.
                    RunSource::Packed { .. } => match statuses.last_mut() {
                        Some(last) if last.compressed => last.len += run.len,
                        _ => statuses.push(status),
                    },
                    _ => statuses.push(status),
                }
            }
            // Blocks that are packed for their encryption alone.
            if self.is_encrypted() {
                statuses.iter_mut().for_each(|status| status.compressed = false);
            }
            Ok(statuses)
        })
    }

    fn write(&self, offset: u64, buf: IoBuf) -> Transfer<'_> {
        let Some(writer) = self.format.writer() else { return Box::pin(ready((Err(self.refusal()), buf))) };
        Box::pin(async move {
            let (result, buf) = writer.write(offset, buf, &self.backing).await;
            (result.map_err(|error| self.named(error)), buf)
        })
    }

    fn write_compressed(&self, clusters: Vec<(u64, IoBuf)>) -> Work<'_> {
        let Some(writer) = self.format.writer() else { return done(Err(self.refusal())) };
        Box::pin(async move {
            let written = writer.write_compressed(clusters, &self.backing).await;
            // Unpacked blocks may have the old data of the place.
            let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
            kept.changes += 1;
            kept.blocks.clear();
            written.map_err(|error| self.named(error))
        })
    }

    fn compresses(&self) -> bool {
        self.format.writer().is_some_and(|writer| writer.compresses())
    }

    fn write_zeroes(&self, offset: u64, len: u64, flags: ZeroFlags) -> Work<'_> {
        self.written(self.format.writer().map(|writer| writer.write_zeroes(offset, len, flags, &self.backing)))
    }

    fn discard(&self, offset: u64, len: u64) -> Work<'_> {
        self.written(self.format.writer().map(|writer| writer.discard(offset, len)))
    }

    fn holds_changes(&self) -> bool {
        self.format.writer().is_some_and(MappedWriter::holds_changes)
    }

    fn flush(&self) -> Work<'_> {
        match self.format.writer() {
            Some(writer) => self.written(Some(writer.flush())),
            None => done(Ok(())),
        }
    }

    fn marks(&self) -> Option<&dyn Marks> {
        self.format.marked().is_some().then_some(self)
    }

    fn resize(&self, size: u64, preallocation: Preallocation) -> Work<'_> {
        let is_resizable = self.format.writer().is_none_or(MappedWriter::is_resizable);
        if preallocation != Preallocation::Off && is_resizable {
            let message = format!("Unsupported preallocation mode '{}'", preallocation.name());
            return done(Err(Error::unsupported(message).file(self.filename.clone())));
        }
        self.written(self.format.writer().map(|writer| writer.resize(size, &self.backing)))
    }

    fn is_encrypted(&self) -> bool {
        self.format.is_encrypted()
    }

    fn let_blocks_move(&self, allowed: bool) {
        if let Some(writer) = self.format.writer() {
            writer.let_blocks_move(allowed);
        }
    }

    fn complete<'a>(&'a self, flush: Work<'a>) -> Work<'a> {
        match self.format.writer() {
            Some(writer) => self.written(Some(writer.complete())),
            None => flush,
        }
    }

    fn close(&self, read_only: bool) -> Work<'_> {
        match self.format.writer().filter(|_| !read_only) {
            Some(writer) => self.written(Some(writer.complete())),
            None => done(Ok(())),
        }
    }

    fn named_backing(&self) -> Option<NamedBacking> {
        if self.no_backing {
            return None;
        }
        let description = self.format.describe();
        Some((description.backing_name, description.backing_format.map(str::to_owned)))
    }

    fn backing(&self) -> Option<&dyn Backing> {
        self.format.renames_backing().then_some(self)
    }

    fn backing_link(&self) -> Option<&dyn BackingLink> {
        self.format.takes_backing().then_some(self)
    }

    fn tells_damage(&self) -> bool {
        true
    }

    fn start_writing<'a>(&'a self, _options: &'a BlockdevOptions, _discards: bool) -> Work<'a> {
        self.written(Some(self.format.start_writing()))
    }
}

impl Marks for MappedDriver {
    fn mark(&self) -> u32 {
        self.format.marked().map_or(0, MarkedFormat::mark)
    }

    fn notes_backing(&self) -> bool {
        self.format.marked().is_some_and(MarkedFormat::notes_parent)
    }

    fn room_bits(&self) -> LocalFuture<'_, Result<u32>> {
        Box::pin(async move {
            match self.format.marked() {
                Some(marked) => marked.room_bits().await.map_err(|error| self.named(error)),
                None => Ok(0),
            }
        })
    }

    fn note_backing(&self) -> Work<'_> {
        let parent = self.backing.load().clone();
        let mark = parent.and_then(|parent| below_filters(&parent).marks().map(Marks::mark));
        match (self.format.marked(), mark) {
            (Some(marked), Some(mark)) => self.written(Some(marked.follow_parent(mark))),
            _ => done(Ok(())),
        }
    }

    fn announce_change(&self, bits: u32) -> Work<'_> {
        self.written(self.format.marked().map(|marked| marked.announce_change(bits)))
    }

    fn take_back_change(&self) -> Work<'_> {
        self.written(self.format.marked().map(MarkedFormat::take_back_change))
    }

    fn end_change(&self) -> LocalFuture<'_, ()> {
        self.format.marked().map_or_else(|| Box::pin(ready(())) as LocalFuture<'_, ()>, MarkedFormat::end_change)
    }
}

impl BackingName for MappedDriver {
    fn name(&self) -> Option<String> {
        self.format.describe().backing_name
    }

    fn format(&self) -> Option<String> {
        self.format.describe().backing_format.map(str::to_owned)
    }

    /// Zeroes over a backing file are always the image's own, however long that one is.
    fn plan_for(&self, _bytes: Option<u64>) {}

    fn can_be_emptied(&self) -> bool {
        false
    }
}

impl BackingLink for MappedDriver {
    fn is_left_out(&self) -> bool {
        self.no_backing
    }

    fn check<'a>(&'a self, backing: &'a Node) -> Work<'a> {
        Box::pin(async move { self.format.check_backing(backing).await.map_err(|error| self.named(error)) })
    }

    fn link(&self, backing: Option<Arc<Node>>) {
        self.backing.set(backing);
    }
}

impl Backing for MappedDriver {
    fn rename<'a>(&'a self, name: Option<&'a str>, format: Option<&'a str>) -> Work<'a> {
        self.written(Some(self.format.rename_backing(name, format)))
    }

    fn make_empty(&self) -> Work<'_> {
        done(Err(Error::unsupported("the format has no way to empty an image").file(self.filename.clone())))
    }
}

/// They are only read.
impl Bitmaps for MappedDriver {
    fn may_have_bitmaps(&self) -> bool {
        true
    }

    fn can_change(&self) -> bool {
        false
    }

    fn list(&self) -> LocalFuture<'_, Result<Vec<BitmapStatus>>> {
        Box::pin(async move { self.format.bitmaps().await.map_err(|error| self.named(error)) })
    }

    fn bits<'a>(&'a self, name: &'a str) -> LocalFuture<'a, Result<Arc<DirtyBits>>> {
        Box::pin(async move { self.format.bitmap_bits(name).await.map_err(|error| self.named(error)) })
    }

    fn change<'a>(&'a self, _changes: &'a [BitmapChange]) -> LocalFuture<'a, Result<()>> {
        let message = "Can't store persistent bitmaps to images of this format";
        Box::pin(ready(Err(self.named(Error::unsupported(message)))))
    }
}

impl Described for MappedDriver {
    fn describe(&self) -> Description {
        self.format.describe()
    }

    fn check(&self, max: usize) -> LocalFuture<'_, Result<Option<MappedCheck>>> {
        Box::pin(async move { self.format.check(max).await.map_err(|error| self.named(error)) })
    }

    fn repair(&self, what: Repair, max: usize) -> LocalFuture<'_, Result<Option<MappedCheck>>> {
        Box::pin(async move { self.format.repair(what, max).await.map_err(|error| self.named(error)) })
    }
}

/// Cuts a run of plain data at the holes of its file. False when it doesn't reach the run's end.
async fn in_file(
    node: &Node,
    run: StatusExtent,
    host: u64,
    max_runs: usize,
    statuses: &mut Vec<StatusExtent>,
) -> Result<bool> {
    let mut done = 0;
    while done < run.len {
        if statuses.len() >= max_runs {
            return Ok(false);
        }
        let pieces = node.block_status_boxed(host + done, run.len - done, max_runs - statuses.len()).await?;
        for piece in pieces {
            statuses.push(StatusExtent {
                start: run.start + done,
                len: piece.len,
                zero: piece.zero,
                offset: Some(host + done),
                file: Some(node.filename().into()),
                ..run.clone()
            });
            done += piece.len;
        }
    }
    Ok(true)
}
