// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Copies a disk in use to another node as it is at the moment of the start.
//!
//! A copy-before-write filter above the disk saves the parts that clients overwrite; the job copies the rest.

use crate::faults::{Failure, Judge, settle};
use crate::mirror::Sync;
use crate::{JobHandle, Progress};
use cowshed_image::dirty::DirtyMap;
use cowshed_image::filters::CopyBeforeWrite;
use cowshed_image::graph::{AttachRequest, Attachment, Grants, Graph, check_apart, nodes_below};
use cowshed_image::node::{BitmapUse, ChildRole};
use cowshed_image::options::BlockdevOptions;
use cowshed_image::{DirtyBits, Node};
use cowshed_storage::{PermissionSet, Permissions, rt};
use cowshed_types::{Error, ErrorKind, Result, slip};
use futures_util::future::{Either, select};
use std::ops::Range;
use std::pin::pin;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

#[cfg(test)]
mod tests;

/// The pause between looks for an end, of a job that only saves overwritten parts.
const LOOK: Duration = Duration::from_millis(50);
/// A failed job's target that is not durable by then counts as empty.
const FLUSH_LIMIT: Duration = Duration::from_secs(30);
/// Runs that one question about the mapping answers at most.
const STATUS_RUNS: usize = 64;

/// The source, the target and the options of a backup.
pub struct BackupRequest {
    /// The disk.
    pub source: Arc<Node>,
    /// Where it goes: writable, of the same size.
    pub target: Arc<Node>,
    /// The copied parts; with `None` only overwritten parts, until the job is cancelled.
    pub sync: Sync,
    /// Compress the target's data.
    pub compress: bool,
    /// Discard copied parts on the disk: for a disk that is only there to be copied.
    pub discard_source: bool,
    /// A write whose old data can't be saved fails; else it passes and the job fails.
    pub breaks_writes: bool,
    /// The node-name of the filter.
    pub filter_name: String,
    /// A dirty bitmap of the source.
    pub bitmap: Option<BackupBitmap>,
}

/// The condition on which a backup changes its bitmap to the writes since its start (`bitmap-mode`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BitmapMode {
    /// When it succeeds.
    OnSuccess,
    /// Also when it fails: parts that were not copied stay dirty.
    Always,
    /// The bitmap stays as it was.
    Never,
}

/// The use of a bitmap by a backup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackupBitmap {
    /// Its name.
    pub name: String,
    /// When it changes.
    pub mode: BitmapMode,
    /// Only dirty parts are copied (`sync` of `bitmap` or `incremental`).
    pub selects: bool,
}

/// A bitmap in use.
struct Recorded {
    held: BitmapUse,
    mode: BitmapMode,
    selects: bool,
    /// The dirty parts at the start.
    before: Arc<DirtyBits>,
    /// The parts that are written since.
    since: Arc<DirtyMap>,
}

/// The work under way. Requests that a dropped future of it has begun are carried out; the steps behind them are not. Parts
/// that a dropped [`Backup::copy`] has not saved stay pending, so it can be called again. A dropped [`Backup::finish`] or
/// [`Backup::end`] may leave the filter in the graph.
pub struct Backup {
    graph: Arc<Graph>,
    request: BackupRequest,
    filter: Arc<Node>,
    user: Arc<Attachment>,
    /// The filter and its user.
    grants: Grants,
    bitmap: Option<Recorded>,
    /// The ranges that the target is to have from this job, once they are chosen.
    selected: OnceLock<Vec<Range<u64>>>,
}

/// The filter could not take its place. Conflicts with other users show in QEMU when the filter is there.
fn not_replaced(error: Error) -> Error {
    match error.sentence().starts_with("Permission conflict on node") {
        true => error,
        false => error.context("Could not replace node"),
    }
}

fn saver_of(filter: &Node) -> Result<&CopyBeforeWrite> {
    filter.copy_before_write().ok_or_else(|| Error::internal("not the filter of a backup"))
}

/// Refuses the step that a test wants to fail.
fn may_step() -> Result<()> {
    #[cfg(test)]
    cowshed_testbase::steps::fail_in_turn(|| Error::internal("this step fails"))?;
    Ok(())
}

impl Backup {
    /// Starts it: the target will hold the disk as it is now.
    pub async fn start(graph: &Arc<Graph>, id: &str, request: BackupRequest) -> Result<Backup> {
        let BackupRequest { source, target, .. } = &request;
        if source.size() != target.size() {
            return Err(crate::different_sizes());
        }
        if Arc::ptr_eq(source, target) {
            return Err(Error::invalid_argument("Source and target cannot be the same"));
        }
        if target.is_read_only() {
            return Err(Error::new(ErrorKind::ReadOnly, "Could not create node: Block node is read-only"));
        }
        check_apart(target, [source])?;
        if request.compress && !target.compresses() {
            // Behind it QEMU names the disk of a machine, of which a daemon has none.
            return Err(Error::unsupported("Compression is not supported for this drive "));
        }
        if request.discard_source && source.is_read_only() {
            let message = format!("what is copied can't be discarded: node '{}' is read-only", source.name());
            return Err(Error::new(ErrorKind::ReadOnly, message));
        }
        if request.discard_source {
            check_no_past(graph, source)?;
        }
        let grants = Grants::new(graph);
        let granted = Self::grant(graph, &grants, id, &request).await;
        let (filter, user, bitmap) = grants.end(granted).await?;
        let selected = OnceLock::new();
        Ok(Backup { graph: Arc::clone(graph), request, filter, user, grants, bitmap, selected })
    }

    async fn grant(
        graph: &Arc<Graph>,
        grants: &Grants,
        id: &str,
        request: &BackupRequest,
    ) -> Result<(Arc<Node>, Arc<Attachment>, Option<Recorded>)> {
        let BackupRequest { source, target, .. } = request;
        // Writes from the moment of the start on are distinguished from earlier ones.
        let drained = graph.drain(&[source]).await;
        let bitmap = match &request.bitmap {
            Some(bitmap) => Some(Recorded::start(source, bitmap).await?),
            None => None,
        };
        may_step()?;
        let options = BlockdevOptions::new()
            .with("driver", "copy-before-write")
            .with("discard", "unmap")
            .with("node-name", request.filter_name.as_str())
            .with("target", target.name())
            .with("on-cbw-error", if request.breaks_writes { "break-guest-write" } else { "break-snapshot" });
        let added = grants.add(options.with("file", source.name())).await;
        let filter = added.map_err(|error| error.context("Could not create node"))?;
        may_step()?;
        grants.put_above(source, &filter).await.map_err(not_replaced)?;
        drop(drained);
        may_step()?;
        let permissions = Permissions { used: PermissionSet::CONSISTENT_READ, shared: PermissionSet::ALL };
        let user = AttachRequest::job(format!("{id}-backup"), permissions);
        let user = grants.attach(&filter, user).await.map_err(not_replaced)?;
        may_step()?;
        let saver = saver_of(&filter)?;
        saver.set_compress(request.compress);
        saver.set_discard_source(request.discard_source);
        Ok((filter, user, bitmap))
    }

    fn saver(&self) -> Result<&CopyBeforeWrite> {
        saver_of(&self.filter)
    }

    /// The disk.
    pub fn source(&self) -> &Arc<Node> {
        &self.request.source
    }

    /// The nodes that it works on: others must leave them as they are.
    pub fn nodes(&self) -> Vec<Arc<Node>> {
        [&self.request.source, &self.request.target, &self.filter].map(Arc::clone).into()
    }

    /// True when the bitmap that selects its parts marks none.
    pub fn is_empty(&self) -> bool {
        self.bitmap.as_ref().is_some_and(|bitmap| bitmap.selects && bitmap.before.dirty_ranges().next().is_none())
    }

    /// True when after a failure only the target has the copied parts: the source was discarded, or the bitmap no
    /// longer marks them.
    pub fn gives_up_parts(&self) -> bool {
        self.request.discard_source || self.bitmap.as_ref().is_some_and(|bitmap| bitmap.mode == BitmapMode::Always)
    }

    /// True when a bitmap counts on the target once that has everything.
    pub fn gives_up_whole(&self) -> bool {
        self.bitmap.as_ref().is_some_and(|bitmap| bitmap.mode != BitmapMode::Never)
    }

    /// Copies all parts of the backup. Progress counts bytes that the target no longer lacks. A cancelled `job` does
    /// not wait for a target that hangs: [`Backup::end`] does.
    pub async fn copy(&self, job: &JobHandle, judge: &dyn Judge) -> Result<()> {
        match select(pin!(self.copy_parts(job, judge)), pin!(job.cancelled())).await {
            Either::Left((copied, _)) => {
                job.end_measure();
                copied
            }
            Either::Right(_) => {
                job.end_measure();
                // While the piece still holds drains: its operations on the disk have begun, or do not begin.
                self.saver()?.abandon();
                job.pause_point().await
            }
        }
    }

    async fn copy_parts(&self, job: &JobHandle, judge: &dyn Judge) -> Result<()> {
        let saver = self.saver()?;
        let queue = self.user.queue();
        let size = self.request.source.size();
        if self.request.sync == Sync::None {
            self.measure(job, size.next_multiple_of(saver.part_bytes()));
            loop {
                job.pause_point().await?;
                saver.broken().map_or(Ok(()), Err)?;
                rt::sleep(LOOK).await;
            }
        }
        let mut selected: Vec<Range<u64>> = std::iter::once(0..size).collect();
        if self.request.sync == Sync::Top {
            selected = self.skip_below(saver, job).await?;
        }
        if let Some(bitmap) = self.bitmap.as_ref().filter(|bitmap| bitmap.selects) {
            skip_clean(saver, &bitmap.before).await;
            selected = saver.pending_ranges();
            // Writers may have had some of them saved by now.
            selected.extend(bitmap.before.dirty_ranges());
        }
        let _ = self.selected.set(selected);
        let total = saver.pending_bytes();
        self.measure(job, total);
        while let Some((at, len)) = saver.next_pending(0) {
            job.throttle(len).await?;
            // A drain waits for this piece, and the next one for the drain.
            let inside = if slip!("pieces_of_a_backup_pass_a_drain") { None } else { Some(queue.enter().await) };
            let copied = saver.copy(at, len).await.map_err(Failure::from);
            drop(inside);
            saver.broken().map_or(Ok(()), Err)?;
            if let Err(failure) = copied {
                settle(failure, judge, job).await?;
            }
            job.set_progress(total.saturating_sub(saver.pending_bytes()), total);
        }
        // A pause during the last piece holds the job before its end, which can't be held any more.
        job.pause_point().await?;
        saver.broken().map_or(Ok(()), Err)
    }

    /// The progress: of `total` bytes those that the target no longer lacks, also by writes of the disk's users.
    fn measure(&self, job: &JobHandle, total: u64) {
        job.set_progress(0, total);
        let filter = Arc::downgrade(&self.filter);
        job.measure_by(move |_| {
            let pending = filter.upgrade()?.copy_before_write()?.pending_bytes();
            Some(Progress { offset: total.saturating_sub(pending), len: total })
        });
    }

    /// Leaves out the parts that the top layer doesn't hold, and returns the ranges of the others. A part that is only partly
    /// held is copied whole.
    async fn skip_below(&self, saver: &CopyBeforeWrite, job: &JobHandle) -> Result<Vec<Range<u64>>> {
        let (size, part) = (self.request.source.size(), saver.part_bytes());
        let (mut at, mut selected) = (0, Vec::<Range<u64>>::new());
        while at < size {
            job.pause_point().await?;
            let end = (at + part).min(size);
            let mut held = false;
            let mut look = at;
            while look < end && !held {
                let runs = self.request.source.block_status(look, end - look, STATUS_RUNS).await?;
                held = runs.iter().any(|run| run.present);
                look = runs.last().map_or(end, |run| run.start + run.len);
            }
            match selected.last_mut() {
                _ if !held => saver.skip(at, end - at).await,
                Some(last) if last.end == at => last.end = end,
                _ => selected.push(at..end),
            }
            at = end;
        }
        Ok(selected)
    }

    /// Makes the target durable. A target may never answer: a cancelled `job` doesn't wait for it.
    pub async fn flush(&self, job: &JobHandle) -> Result<()> {
        job.unless_cancelled(self.request.target.flush()).await?
    }

    /// Makes the target durable and ends.
    pub async fn finish(&self) -> Result<()> {
        let flushed = self.request.target.flush().await;
        let succeeded = flushed.is_ok();
        flushed.and(self.end_as(succeeded).await)
    }

    /// Ends behind a [`Backup::flush`] that succeeded after the copy: the rest of [`Backup::finish`].
    pub async fn complete(&self) -> Result<()> {
        self.end_as(true).await
    }

    /// Ends; without [`Backup::finish`] the target is incomplete.
    pub async fn end(&self) -> Result<()> {
        self.end_as(false).await
    }

    /// Takes the start back, before [`Backup::copy`]: the bitmap stays as it is.
    pub async fn undo(&self) -> Result<()> {
        self.saver()?.abandon();
        self.grants.take_back().await
    }

    async fn end_as(&self, succeeded: bool) -> Result<()> {
        if !succeeded {
            // The disk's users go on while the target has not answered. The drain below would hold them.
            let saver = self.saver()?;
            saver.abandon();
            saver.idle().await;
        }
        let settled = match &self.bitmap {
            Some(bitmap) => self.settle_bitmap(bitmap, succeeded).await,
            None => Ok(()),
        };
        settled.and(self.grants.take_back().await)
    }

    /// Takes the target's parts out of the bitmap.
    async fn settle_bitmap(&self, bitmap: &Recorded, succeeded: bool) -> Result<()> {
        if bitmap.mode == BitmapMode::Never || (bitmap.mode == BitmapMode::OnSuccess && !succeeded) {
            return Ok(());
        }
        // Copied data must be durable on the target before the bitmap, which is durable at once, forgets it.
        let flush = self.request.target.flush();
        let is_durable = succeeded || matches!(rt::within(FLUSH_LIMIT, flush).await, Some(Ok(())));
        let _drained = self.graph.drain(&[&self.request.source]).await;
        let mut left = DirtyBits::clone(&bitmap.before);
        match (succeeded, self.selected.get()) {
            (true, _) => left.clear(),
            // Before the choice of parts, the job has copied nothing.
            (false, None) if bitmap.selects => {}
            (false, selected) => {
                // Parts that were clean count too: the next backup by this bitmap completes this one.
                left.clear();
                let whole = || std::iter::once(0..self.request.source.size()).collect();
                let lacking = match is_durable {
                    true => self.saver()?.pending_ranges(),
                    false => selected.cloned().unwrap_or_else(whole),
                };
                lacking.iter().for_each(|range| left.mark(range.start, range.end - range.start));
            }
        }
        let mut at = 0;
        while let Some(range) = bitmap.since.next(at, u64::MAX) {
            left.mark(range.start, range.end - range.start);
            at = range.end;
        }
        self.graph.set_bitmap_bits(bitmap.held.node(), bitmap.held.name(), &Arc::new(left)).await
    }
}

/// Refuses to discard on a disk that another copy above reads as it was. The filter is below that copy's, which would
/// not see the discards.
fn check_no_past(graph: &Graph, source: &Arc<Node>) -> Result<()> {
    let saves = |node: &Arc<Node>| {
        let disk = node.copy_before_write().and_then(|_| node.child(ChildRole::File));
        disk.is_some_and(|disk| nodes_below(&disk).iter().any(|below| Arc::ptr_eq(below, source)))
    };
    let nodes = graph.snapshot();
    match nodes.nodes().find(saves) {
        Some(filter) => {
            let message =
                format!("what is copied can't be discarded: '{}' keeps the past of '{}'", filter.name(), source.name());
            Err(Error::new(ErrorKind::Busy, message))
        }
        None => Ok(()),
    }
}

impl Recorded {
    /// No request runs.
    async fn start(source: &Arc<Node>, bitmap: &BackupBitmap) -> Result<Recorded> {
        let held = source.use_bitmap(&bitmap.name).await?;
        may_step()?;
        if bitmap.mode != BitmapMode::Never {
            source.check_bitmap_changes(&bitmap.name)?;
        }
        let before = source.bitmap_bits(&bitmap.name).await?;
        let since = source.track_dirty(before.granularity_bytes())?;
        may_step()?;
        Ok(Recorded { held, mode: bitmap.mode, selects: bitmap.selects, before, since })
    }
}

/// Leaves out the parts in which nothing is dirty.
async fn skip_clean(saver: &CopyBeforeWrite, bits: &DirtyBits) {
    let (part, size) = (saver.part_bytes(), bits.disk_bytes());
    let mut clean_from = 0;
    for dirty in bits.dirty_ranges().chain(std::iter::once(size..size)) {
        let start = clean_from;
        clean_from = dirty.end.next_multiple_of(part);
        let first = dirty.start + if slip!("dirty_range_of_a_backup_rounded_up") { part - 1 } else { 0 };
        let end = if dirty.start == size { size } else { first / part * part };
        if start < end {
            saver.skip(start, end - start).await;
        }
    }
}
