// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Copies a disk that is in use to another node, or into an image of its own chain, until both are the same. Then the
//! other can take its place.
//!
//! A dirty map holds the parts that are still to be copied; writers of the source fill it, too. A part is taken out of
//! the map before it is read, so a write that comes in between puts it back.

mod ends;

use self::ends::{Blank, Ends, Missing};
use crate::JobHandle;
use crate::commit::opened::{OpenedBase, reader_of, reading_one_size};
use crate::faults::{Failure, Judge, settle};
use crate::held_writes::follow_writes;
use crate::zeroes::reads_as_zeroes;
use cowshed_image::dirty::DirtyMap;
use cowshed_image::filters::WriteBlocking;
use cowshed_image::graph::{AttachRequest, Attachment, Chain, Graph, Queue, check_apart};
use cowshed_image::node::{ChildRole, LocalFuture};
use cowshed_image::{Node, ZeroFlags};
use cowshed_storage::{PermissionSet, Permissions, rt};
use cowshed_types::{Error, ErrorKind, Result, slip};
use futures_util::future::{Either, select};
use std::ops::Range;
use std::pin::pin;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Copied in one piece at most, in bytes.
const CHUNK_BYTES: u64 = 1 << 20;
/// Copied for one small write by default, in bytes.
const GRANULARITY_BYTES: u64 = 64 << 10;
/// Runs that one question about the mapping returns at most.
const STATUS_RUNS: usize = 64;
/// Zeroes on the target may be holes.
const ZEROES: ZeroFlags = ZeroFlags { may_unmap: true, no_fallback: false };

/// The parts that are copied at first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sync {
    /// The whole disk.
    Full,
    /// The data of the top layer; the target has the same backing file.
    Top,
    /// Nothing: only writes from now on.
    None,
}

/// The settings of a mirror.
#[derive(Clone, Debug)]
pub struct MirrorOptions {
    /// The parts that are copied at first.
    pub sync: Sync,
    /// The unit of copying for a small write, in bytes: a power of two from 512 to 64 MiB.
    pub granularity_bytes: u64,
    /// The most that is in memory, in bytes; at least one granule is.
    pub buffer_bytes: u64,
    /// The target reads as zeroes: zeroes of the source aren't written there at first.
    pub target_is_zero: bool,
    /// Writes to the source go to the target too before they are over, by a filter of this name.
    pub write_blocking: Option<String>,
    /// The node whose place the target takes in the end, where that isn't the source: a filter above it.
    pub replaces: Option<Arc<Node>>,
}

impl Default for MirrorOptions {
    fn default() -> Self {
        MirrorOptions {
            sync: Sync::Full,
            granularity_bytes: GRANULARITY_BYTES,
            buffer_bytes: CHUNK_BYTES,
            target_is_zero: false,
            write_blocking: None,
            replaces: None,
        }
    }
}

/// A copy under way: to another node, or of an image's data into an image below it. Requests that a dropped future of
/// it has begun are carried out; the steps behind them are not. The piece of a dropped [`Mirror::catch_up`] stays to be
/// copied, so it can be called again. Behind a dropped [`Mirror::finish`] only [`Mirror::end`] may follow.
pub struct Mirror {
    graph: Arc<Graph>,
    source: Arc<Node>,
    target: Arc<Node>,
    reader: Arc<Attachment>,
    writer: Mutex<Writer>,
    dirty: Arc<DirtyMap>,
    chunk_bytes: u64,
    /// The target is the base of the source's own chain.
    opened: Option<OpenedBase>,
    /// The base read as zeroes at first.
    blank: Option<Blank>,
    replaces: Option<Arc<Node>>,
    /// The target's backing file isn't attached: a write to a piece of a cluster fills the rest up with zeroes.
    lacks_backing: bool,
    skipped_bytes: u64,
    /// Held while a piece is copied, and while the writer of the target changes. True once it has ended.
    piece: futures_util::lock::Mutex<bool>,
}

/// The writer of the target.
#[derive(Clone)]
enum Writer {
    /// The job.
    Job(Arc<Attachment>),
    /// This filter above the source, and the job beside it.
    Filter(Arc<Node>),
}

impl Writer {
    fn filter(&self) -> Option<&WriteBlocking> {
        match self {
            Writer::Job(_) => None,
            Writer::Filter(filter) => filter.write_blocking(),
        }
    }

    async fn end(&self, graph: &Arc<Graph>) -> Result<()> {
        match self {
            Writer::Job(attachment) => attachment.detach().await,
            Writer::Filter(filter) => graph.remove_filter(filter).await,
        }
    }
}

/// The time limit for a change of the copy mode that waits for the target.
const SWITCHING: Duration = Duration::from_secs(30);
/// A target that takes longer to answer is left to answer when it can.
const LETTING_GO: Duration = Duration::from_millis(500);

/// Gives a target back whose copy counts for nothing. A target that hangs has the requests in flight until they end.
async fn give_back_in_time(graph: &Graph, writer: Arc<Attachment>) -> Result<()> {
    let leaving = Arc::clone(&writer);
    let mut given_back = Box::pin(async move { leaving.detach().await });
    match select(&mut given_back, pin!(rt::sleep(LETTING_GO))).await {
        Either::Left((result, _)) => return result,
        Either::Right(_) => {}
    }
    graph.free_name_of(&writer);
    let _detached = rt::spawn(async move {
        if let Err(error) = given_back.await {
            tracing::warn!(%error, "could not give back the target of a job");
        }
    });
    Ok(())
}

/// The job's wishes for its target, under this name.
fn writer_of(name: String) -> AttachRequest {
    let used = PermissionSet::CONSISTENT_READ | PermissionSet::WRITE;
    // An incomplete copy is nothing to read.
    AttachRequest::job(name, Permissions { used, shared: PermissionSet::WRITE_UNCHANGED })
}

impl Mirror {
    /// Starts it: from now on writes to `source` are noticed. The target must be writable, and have no users. With
    /// another size the first step fails.
    pub async fn start(
        graph: &Arc<Graph>,
        id: &str,
        (source, target): (&Arc<Node>, &Arc<Node>),
        mut options: MirrorOptions,
    ) -> Result<Mirror> {
        if source.size() != target.size() {
            options = MirrorOptions { sync: Sync::None, write_blocking: None, ..options };
        }
        if Arc::ptr_eq(source, target) {
            return Err(Error::new(ErrorKind::Busy, "Can't mirror node into itself"));
        }
        check_apart(target, [source])?;
        let lacks_backing = options.sync != Sync::Full && target.lacks_backing();
        if let Some(unit) = target.filled_unit_bytes().filter(|_| lacks_backing) {
            options.granularity_bytes = options.granularity_bytes.max(unit);
        }
        let writer = match &options.write_blocking {
            Some(name) => Writer::Filter(graph.insert_write_blocking(source, target, name).await?),
            None => Writer::Job(graph.attach(target, writer_of(format!("{id}-target"))).await?),
        };
        match Self::observe(graph, id, source, options.granularity_bytes).await {
            Ok((reader, dirty)) => {
                let target = Arc::clone(target);
                let mirror = Mirror::of(graph, source, target, reader, writer, dirty);
                Self::begin(Mirror { lacks_backing, ..mirror }, options).await
            }
            Err(error) => writer.end(graph).await.and(Err(error)),
        }
    }

    /// Starts to bring the data of `top` and the layers below it into `base`, which is in its chain: `block-commit` of
    /// the layer that clients write to.
    pub async fn commit(
        graph: &Arc<Graph>,
        id: &str,
        (top, base): (&Arc<Node>, &Arc<Node>),
        options: MirrorOptions,
    ) -> Result<Mirror> {
        let chain = Chain::between(top, Some(base))?;
        let opened = OpenedBase::open(graph, id, chain.clone(), &chain, top.size()).await?;
        match Self::observe(graph, id, top, options.granularity_bytes).await {
            Ok((reader, dirty)) => {
                let writer = Writer::Job(Arc::clone(opened.writer()));
                let blank = if reads_as_zeroes(base).await { Blank::new(&dirty) } else { None };
                let mirror = Mirror::of(graph, top, Arc::clone(base), reader, writer, dirty);
                Self::begin(Mirror { opened: Some(opened), blank, ..mirror }, options).await
            }
            Err(error) => opened.close().await.and(opened.let_go().await).and(Err(error)),
        }
    }

    /// A reader of the source, and a map of the writes to it from now on.
    async fn observe(
        graph: &Arc<Graph>,
        id: &str,
        source: &Arc<Node>,
        granularity_bytes: u64,
    ) -> Result<(Arc<Attachment>, Arc<DirtyMap>)> {
        let reader = graph.attach(source, AttachRequest::job(reader_of(id), reading_one_size())).await?;
        let tracked = {
            let _drained = graph.drain(&[source]).await;
            source.track_dirty(granularity_bytes)
        };
        match tracked {
            Ok(dirty) => Ok((reader, dirty)),
            Err(error) => reader.detach().await.and(Err(error)),
        }
    }

    fn of(
        graph: &Arc<Graph>,
        source: &Arc<Node>,
        target: Arc<Node>,
        reader: Arc<Attachment>,
        writer: Writer,
        dirty: Arc<DirtyMap>,
    ) -> Mirror {
        let (graph, source) = (Arc::clone(graph), Arc::clone(source));
        let (chunk_bytes, writer) = (CHUNK_BYTES, Mutex::new(writer));
        let piece = futures_util::lock::Mutex::default();
        let (opened, blank, replaces, lacks_backing, skipped_bytes) = (None, None, None, false, 0);
        Mirror {
            graph,
            source,
            target,
            reader,
            writer,
            dirty,
            chunk_bytes,
            opened,
            blank,
            replaces,
            lacks_backing,
            skipped_bytes,
            piece,
        }
    }

    async fn begin(mut self, options: MirrorOptions) -> Result<Mirror> {
        self.chunk_bytes =
            options.buffer_bytes.clamp(self.dirty.granularity_bytes(), CHUNK_BYTES.max(options.granularity_bytes));
        self.replaces = options.replaces;
        if slip!("writes_held_before_the_map_is_whole")
            && let Some(filter) = self.writer().filter()
        {
            filter.activate(Arc::clone(&self.dirty), self.lacks_backing);
        }
        match self.mark(options.sync, options.target_is_zero).await {
            Ok(skipped_bytes) => self.skipped_bytes = skipped_bytes,
            Err(error) => return self.end().await.and(Err(error)),
        }
        // Only a whole map has the parts that the target lacks: a write to both ends leaves the other parts clean.
        if let Some(filter) = self.writer().filter() {
            let _drained = self.graph.drain(&[&self.source]).await;
            filter.activate(Arc::clone(&self.dirty), self.lacks_backing);
        }
        Ok(self)
    }

    /// Marks the parts to copy. Returns the bytes that are allocated and need no copy.
    async fn mark(&self, sync: Sync, target_is_zero: bool) -> Result<u64> {
        let size = self.source.size();
        let (mut at, allocated) = (0, DirtyMap::new(self.dirty.granularity_bytes())?);
        if let Some(opened) = &self.opened {
            while at < size {
                let holder = opened.chain().holder(at, size - at).await?;
                if holder.layer.is_some() {
                    self.dirty.mark(at, holder.len);
                }
                at += holder.len;
            }
            return Ok(0);
        }
        let queue = self.reader.queue();
        let target_is_zero = target_is_zero || (sync == Sync::Full && reads_as_zeroes(&self.target).await);
        match sync {
            Sync::Full if !target_is_zero => self.dirty.mark(0, size),
            Sync::None => {}
            Sync::Full => {
                while at < size {
                    for run in queue.block_status_chain(at, size - at, STATUS_RUNS).await? {
                        if !run.zero {
                            self.dirty.mark(run.start, run.len);
                        }
                        allocated.mark(run.start, if run.present { run.len } else { 0 });
                        at = run.start + run.len;
                    }
                }
            }
            Sync::Top => {
                while at < size {
                    for run in queue.block_status(at, size - at, STATUS_RUNS).await? {
                        if run.present {
                            self.dirty.mark(run.start, run.len);
                        }
                        at = run.start + run.len;
                    }
                }
            }
        }
        Ok(allocated.dirty_bytes().min(size).saturating_sub(self.remaining_bytes()))
    }

    /// Bytes that are allocated in the source, and zero in it and in the target. They count as copied at once.
    pub fn skipped_bytes(&self) -> u64 {
        self.skipped_bytes
    }

    /// The nodes that it works on: others must leave them as they are.
    pub fn nodes(&self) -> Vec<Arc<Node>> {
        let replaced = self.replaces.clone().filter(|node| !Arc::ptr_eq(node, &self.source));
        let filter = if let Writer::Filter(filter) = self.writer() { Some(filter) } else { None };
        let nodes = match &self.opened {
            Some(opened) => opened.chain().nodes(),
            None => [&self.source, &self.target].map(Arc::clone).into(),
        };
        nodes.into_iter().chain(filter).chain(replaced).collect()
    }

    /// The parts that the target lacks, where writes to the source go to it at once; else `None`.
    pub fn active_map(&self) -> Option<Arc<DirtyMap>> {
        self.writer().filter().map(|_| Arc::clone(&self.dirty))
    }

    /// The unit in which it copies, and the missing part, in bytes.
    pub fn missing(&self) -> (u64, u64) {
        (self.dirty.granularity_bytes(), self.remaining_bytes())
    }

    /// The rest of the copy, in bytes.
    pub fn remaining_bytes(&self) -> u64 {
        self.dirty.dirty_bytes().min(self.source.size())
    }

    fn writer(&self) -> Writer {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set_writer(&self, writer: Writer) {
        *self.writer.lock().unwrap_or_else(PoisonError::into_inner) = writer;
    }

    /// Makes writes to the source go to the target too before they end, by a filter of this name. It may copy, or be
    /// paused, meanwhile. On an error it goes on as before, or fails with its next piece. Fails when `job` is cancelled
    /// while it waits, and when the target does not answer within 30 s.
    pub async fn hold_writes(&self, name: &str, job: &JobHandle) -> Result<()> {
        if matches!(self.writer(), Writer::Filter(_)) {
            return Ok(());
        }
        if self.opened.is_some() {
            return Err(Error::unsupported("a commit into a base copies in the background only"));
        }
        // A target that hangs must not keep the source's users waiting: its requests end first.
        let idle = async {
            let has_ended = self.piece.lock().await;
            drop(self.graph.drain(&[&self.target]).await);
            has_ended
        };
        let (cancelled, late) = (pin!(job.cancelled()), pin!(rt::sleep(SWITCHING)));
        let has_ended = match select(pin!(idle), select(cancelled, late)).await {
            Either::Left((has_ended, _)) => has_ended,
            Either::Right((Either::Left(_), _)) => return job.pause_point().await,
            Either::Right((Either::Right(_), _)) => {
                let message = format!("the target of the job has not answered for {} s", SWITCHING.as_secs());
                return Err(Error::new(ErrorKind::Busy, message));
            }
        };
        if *has_ended {
            return Err(Error::new(ErrorKind::Busy, "the job has ended"));
        }
        let Writer::Job(writer) = self.writer() else { return Ok(()) };
        // Nothing is written between the moment when the job lets the target go and the filter's having it.
        let _drained = self.graph.drain(&[&self.source, &self.target]).await;
        self.check_place()?;
        let id = writer.name().to_owned();
        writer.hand_over().await?;
        match self.graph.insert_write_blocking(&self.source, &self.target, name).await {
            Ok(filter) => {
                if let Some(holding) = filter.write_blocking() {
                    holding.activate(Arc::clone(&self.dirty), self.lacks_backing);
                }
                self.set_writer(Writer::Filter(filter));
                Ok(())
            }
            Err(error) => {
                self.set_writer(Writer::Job(self.graph.attach(&self.target, writer_of(id)).await?));
                Err(error)
            }
        }
    }

    /// Copies until there was a moment without anything to copy. Progress counts copied bytes.
    pub async fn catch_up(&self, job: &JobHandle, judge: &dyn Judge) -> Result<()> {
        self.check_size()?;
        if let Writer::Filter(filter) = self.writer() {
            follow_writes(job, &filter);
        }
        let source = self.reader.queue();
        let (mut target, mut from): (Option<Queue>, u64) = (None, 0);
        loop {
            job.pause_point().await?;
            self.check_place()?;
            let most = self.chunk_bytes;
            let found = self.dirty.next(from, most).or_else(|| self.dirty.next(0, most));
            let Some(range) = found else { return Ok(()) };
            from = range.end;
            // As in QEMU the disk's end counts, not that of its last granule.
            let len = range.end.min(self.source.size()).saturating_sub(range.start);
            job.throttle(len).await?;
            // A target may never answer; the piece stays to be copied then.
            let (piece, cancelled) = (self.copy_piece(&source, &mut target, &range), job.cancelled());
            let copied = match select(pin!(piece), pin!(cancelled)).await {
                Either::Left((copied, _)) => copied,
                Either::Right((_, piece)) => {
                    // Past the gates nothing keeps the target for a write that goes on without the job. The disk's users go on.
                    if let Some(filter) = self.writer().filter() {
                        filter.abandon();
                        let _ = piece.await;
                    }
                    return job.pause_point().await;
                }
            };
            if let Err(failure) = copied {
                settle(failure, judge, job).await?;
                continue;
            }
            job.set_progress(job.progress().offset + len, job.progress().offset + len + self.remaining_bytes());
        }
    }

    /// Flushes the target, once it has been caught up with. False after an error that the job goes on with: then both are to
    /// be tried again.
    pub async fn flush(&self, job: &JobHandle, judge: &dyn Judge) -> Result<bool> {
        match job.unless_cancelled(self.target.flush()).await? {
            Ok(()) => Ok(true),
            Err(error) => settle(Failure::write(error), judge, job).await.map(|()| false),
        }
    }

    /// Copies a range, by the present writer of the target. `target`: the job's way there, made where it is needed.
    async fn copy_piece(&self, source: &Queue, target: &mut Option<Queue>, range: &Range<u64>) -> Result<(), Failure> {
        let _piece = self.piece.lock().await;
        let writer = self.writer();
        let ends = match &writer {
            Writer::Job(writer) => {
                // A change of the copy mode that failed made another one.
                target.take_if(|queue| !Arc::ptr_eq(queue.attachment(), writer));
                Ends::Queues(source, target.get_or_insert_with(|| writer.queue()))
            }
            // Past the gates: a write that waits for this range must not keep it from being copied.
            Writer::Filter(_) => {
                *target = None;
                Ends::Nodes(&self.source, &self.target)
            }
        };
        let len = range.end - range.start;
        // Clean before it is read: a write that comes in between makes it dirty again. A write that goes to the target
        // too must not come in between.
        let _claimed = match writer.filter() {
            Some(filter) => Some(filter.claim(range.start, len).await),
            None => None,
        };
        let missing = Missing { map: &self.dirty, range };
        self.dirty.clear(range.start, len);
        self.copy(&ends, range).await?;
        missing.came();
        Ok(())
    }

    /// The source must still be where its users write: else some writes were not noticed.
    fn check_place(&self) -> Result<()> {
        let mut node = self.reader.node();
        while !Arc::ptr_eq(&node, &self.source) {
            match node.child(ChildRole::File).filter(|_| node.is_filter()) {
                Some(child) => node = child,
                None => {
                    let message = format!("another node took the place of '{}' under the job", self.source.name());
                    return Err(Error::new(ErrorKind::Busy, message));
                }
            }
        }
        Ok(())
    }

    async fn copy(&self, ends: &Ends<'_>, range: &Range<u64>) -> Result<(), Failure> {
        let end = range.end.min(self.source.size());
        let mut at = range.start;
        if let Some(opened) = &self.opened {
            while at < end {
                let holder = opened.chain().holder(at, end - at).await.map_err(Failure::read)?;
                match holder.layer {
                    // The base has it already.
                    None => {}
                    Some(_) if holder.zero => match &self.blank {
                        Some(blank) if !blank.is_written(at, holder.len) => {}
                        _ => ends.zero(at, holder.len).await?,
                    },
                    Some(_) => {
                        self.blank.iter().for_each(|blank| blank.note(at, holder.len));
                        ends.copy(at, holder.len).await?;
                    }
                }
                at += holder.len;
            }
            return Ok(());
        }
        while at < end {
            for run in ends.status(at, end - at).await.map_err(Failure::read)? {
                let len = run.len.min(end - at);
                match run.zero {
                    true => ends.zero(at, len).await?,
                    false => ends.copy(at, len).await?,
                }
                at += len;
            }
        }
        Ok(())
    }

    /// Makes both the same and ends. With `pivot` the target takes the source's place for all its users. On an error
    /// the source stays where it is. `job` may be cancelled while the target hangs. The source's users go on then, and
    /// the target's work keeps it until it answers.
    pub async fn finish(self: &Rc<Self>, pivot: bool, job: &JobHandle) -> Result<()> {
        self.note_end().await;
        // The last flush finds little to do then, and a target that hangs is met before the source's users have to wait.
        match job.unless_cancelled(self.target.flush()).await {
            Ok(Ok(())) => {}
            Ok(failed) => {
                let ended = self.end().await;
                return failed.and(ended);
            }
            // The flush is dropped by now: it may hold a lock that the end waits for.
            Err(cancelled) => return self.end().await.and(Err(cancelled)),
        }
        let ends = [&self.source, &self.target];
        let mut drain = Box::pin(self.graph.drain(&ends));
        let drained = match select(&mut drain, pin!(job.cancelled())).await {
            Either::Left((drained, _)) => Some(drained),
            Either::Right(_) => None,
        };
        drop(drain);
        let Some(drained) = drained else { return self.end().await.and(job.pause_point().await) };
        let (mirror, copying_job) = (Rc::clone(self), job.clone());
        let rest: LocalFuture<'static, Result<()>> = Box::pin(async move { mirror.copy_rest(&copying_job).await });
        let result = match (&self.opened, self.writer()) {
            (None, Writer::Job(writer)) => match select(rest, pin!(job.cancelled())).await {
                Either::Left((result, _)) => result,
                Either::Right(((), rest)) => {
                    drop(drained);
                    self.graph.free_name_of(&writer);
                    let _left = rt::spawn(async move {
                        if let Err(error) = rest.await.and(writer.detach().await) {
                            tracing::warn!(%error, "could not give back the target of a job");
                        }
                    });
                    return self.reader.detach().await.and(job.pause_point().await);
                }
            },
            (_, writer) => match select(rest, pin!(job.cancelled())).await {
                Either::Left((result, _)) => result,
                Either::Right(((), rest)) => {
                    drop(drained);
                    if let Some(filter) = writer.filter() {
                        filter.abandon();
                    }
                    let _ = rest.await;
                    return self.end().await.and(job.pause_point().await);
                }
            },
        };
        job.end_measure();
        let released = match (&self.opened, self.writer(), &result) {
            // The target is flushed, and may hang from now on: the source's users wait.
            (None, Writer::Job(writer), Ok(())) => writer.hand_over().await,
            (None, Writer::Job(writer), Err(_)) => {
                drop(drained);
                let ended = self.reader.detach().await;
                let given_back = give_back_in_time(&self.graph, writer).await;
                return result.and(ended).and(given_back);
            }
            (_, writer, _) => writer.end(&self.graph).await,
        };
        // A client of FUSE may have cut it meanwhile.
        let result = match result.and(released).and_then(|()| self.check_size()) {
            Ok(()) if pivot => {
                let replaced = self.replaces.as_ref().unwrap_or(&self.source);
                self.graph.replace(replaced, &self.target).await
            }
            result => result,
        };
        let closed = match &self.opened {
            Some(opened) if pivot && result.is_ok() => opened.release().await,
            Some(opened) => opened.close().await,
            None => Ok(()),
        };
        let ended = self.reader.detach().await;
        drop(drained);
        let unused = self.graph.close_unused(&self.source).await;
        let freed = self.let_go().await;
        result.and(closed).and(ended).and(unused).and(freed)
    }

    /// Under a drain: copies the rest, and flushes the target. Once `job` is cancelled the drain is over, and nothing
    /// more is begun.
    async fn copy_rest(&self, job: &JobHandle) -> Result<()> {
        let go_on = || match job.is_cancelled() {
            true => Err(Error::new(ErrorKind::Cancelled, "the job was cancelled")),
            false => Ok(()),
        };
        self.check_place()?;
        while let Some(range) = self.dirty.take_next(0, self.chunk_bytes) {
            let missing = Missing { map: &self.dirty, range: &range };
            let copied = self.copy(&Ends::Nodes(&self.source, &self.target), &range).await;
            copied.map(|()| missing.came()).map_err(|failure| failure.error)?;
            go_on()?;
        }
        go_on()?;
        self.target.flush().await
    }

    async fn note_end(&self) {
        *self.piece.lock().await = true;
    }

    fn check_size(&self) -> Result<()> {
        match self.opened.is_some() || self.source.size() == self.target.size() {
            true => Ok(()),
            false => Err(crate::different_sizes()),
        }
    }

    async fn abandon_filter(&self) {
        if let Some(filter) = self.writer().filter() {
            filter.abandon();
            filter.idle().await;
        }
    }

    /// Ends without making the target complete.
    pub async fn end(&self) -> Result<()> {
        // The disk's users go on while the target has not answered. Taking the filter out would hold them.
        self.abandon_filter().await;
        self.note_end().await;
        // A change of the copy mode may have made it meanwhile.
        self.abandon_filter().await;
        if let (None, Writer::Job(writer)) = (&self.opened, self.writer()) {
            // The source first: it doesn't depend on a target that never answers.
            let source = self.reader.detach().await;
            return source.and(give_back_in_time(&self.graph, writer).await);
        }
        let Some(opened) = &self.opened else {
            let ended = self.writer().end(&self.graph).await;
            return ended.and(self.reader.detach().await);
        };
        opened.close().await.and(self.reader.detach().await).and(self.let_go().await)
    }

    /// Gives the layers back between the disk and the base of a commit.
    async fn let_go(&self) -> Result<()> {
        match &self.opened {
            Some(opened) => opened.let_go().await,
            None => Ok(()),
        }
    }
}
