// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Copy-before-write: the disk as it was when the filter came goes to a target, part by part. A part that a write is about
//! to change is copied at once; a job asks for the rest.

use super::copy_state::CopyState;
use super::{CopyFailure, Filter, keeps_writers_away};
use crate::events::Events;
use crate::node::{
    Below, Link, LocalFuture, Node, Preallocation, StatusExtent, Transfer, Work, ZeroFlags, below_filters, done,
    nodes_below,
};
use crate::options::{BlockdevOptions, schemas};
use cowshed_storage::{IoBuf, Permissions, rt};
use cowshed_types::{DirtyBits, Errno, Error, ErrorKind, Result, slip};
use futures_util::future::{Either, select};
use std::future::Future;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Smallest part in bytes; a target with larger clusters makes it larger.
const LEAST_PART_BYTES: u64 = 64 << 10;

/// Copies that run at the same time for requests that don't wait for ever.
const MOST_COPIES: usize = 1024;

/// The parts to save, and the way to save them.
#[derive(Clone, Debug)]
pub(crate) struct SavingOptions {
    /// A write whose old data can't be saved fails; else it passes and the copy is spoiled.
    pub breaks_writes: bool,
    /// A saving that takes longer has failed.
    pub timeout: Option<Duration>,
    /// Smallest part in bytes, 0 or a power of two up to 2 GiB.
    pub least_part_bytes: u64,
    /// Only the dirty parts of these are saved.
    pub bits: Option<Arc<DirtyBits>>,
}

/// The filter. A write to a part that isn't pending, and that no reader needs as it was, passes at once.
pub struct CopyBeforeWrite {
    state: Arc<CopyState>,
    breaks_writes: bool,
    timeout: Option<Duration>,
}

/// The outcome of a copy that goes on by itself.
#[derive(Default)]
struct Attempt {
    result: Mutex<Option<Result<(), CopyFailure>>>,
    ended: Events,
}

impl Attempt {
    fn finish(&self, result: Result<(), CopyFailure>) {
        *self.result.lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
        self.ended.notify();
    }

    async fn finished(&self) -> Result<(), CopyFailure> {
        loop {
            let seen = self.ended.now();
            if let Some(result) = self.result.lock().unwrap_or_else(PoisonError::into_inner).take() {
                return result;
            }
            self.ended.wait(seen).await;
        }
    }
}

impl CopyBeforeWrite {
    pub(crate) fn new(below: Below, target: Arc<Link>, options: SavingOptions) -> Result<CopyBeforeWrite> {
        let cluster_bytes = target.get().and_then(|node| node.filled_unit_bytes()).unwrap_or(0);
        let target_readers = match (target.get(), below.node()) {
            (Some(target), Ok(disk))
                if !slip!("readers_through_an_overlay_overtaken")
                    && nodes_below(&target).iter().any(|node| Arc::ptr_eq(node, &disk)) =>
            {
                // Filters above it have no mapping: their reads are noted there, too.
                Some(Arc::clone(below_filters(&target).note_readers()))
            }
            _ => None,
        };
        let part_bytes = cluster_bytes.max(LEAST_PART_BYTES).max(options.least_part_bytes);
        let state =
            CopyState::new(below, target, target_readers, (part_bytes, cluster_bytes), options.bits.as_deref())?;
        let SavingOptions { breaks_writes, timeout, .. } = options;
        Ok(CopyBeforeWrite { state: Arc::new(state), breaks_writes, timeout })
    }

    /// Writes to the target compressed from now on. The target must be able to.
    pub fn set_compress(&self, compress: bool) {
        self.state.set_compress(compress);
    }

    /// From now on, discards the copied parts on the disk. The bytes of a part that guests didn't write are lost to
    /// them.
    pub fn set_discard_source(&self, discard: bool) {
        self.state.set_discard_source(discard);
    }

    /// Size of a part in bytes.
    pub fn part_bytes(&self) -> u64 {
        self.state.pending().granularity_bytes()
    }

    /// The parts of the disk that the target still lacks, in bytes. The last one counts whole, as in QEMU.
    pub fn pending_bytes(&self) -> u64 {
        self.state.pending().dirty_bytes()
    }

    /// The next pending run at or behind `from`: offset and length in bytes, in whole parts but for the disk's end.
    pub fn next_pending(&self, from: u64) -> Option<(u64, u64)> {
        let range = self.state.pending().next(from, self.part_bytes().max(1 << 20))?;
        let end = range.end.min(self.below().size());
        (range.start < end).then(|| (range.start, end - range.start))
    }

    /// The ranges that the target still lacks, in bytes and whole parts.
    pub fn pending_ranges(&self) -> Vec<std::ops::Range<u64>> {
        let mut ranges = Vec::new();
        let mut at = 0;
        while let Some(range) = self.state.pending().next(at, u64::MAX) {
            at = range.end;
            ranges.push(range);
        }
        ranges
    }

    /// The reason why the target will never hold the disk's old state, if so.
    pub fn broken(&self) -> Option<Error> {
        self.state.broken()
    }

    /// Copies the pending parts of a range, each one whole. Once polled, the copy runs to its end even when the future
    /// is dropped.
    pub fn copy(&self, offset: u64, len: u64) -> impl Future<Output = Result<(), CopyFailure>> + use<> {
        let state = Arc::clone(&self.state);
        rt::to_completion(async move {
            let running = state.copies().begin();
            let copied = state.copy(offset, len).await;
            drop(running);
            copied
        })
    }

    /// Takes the parts of a range out that the target doesn't need.
    pub async fn skip(&self, offset: u64, len: u64) {
        self.state.skip(offset, len).await;
    }

    /// Waits until nothing is copied for requests that ended without waiting for it.
    pub async fn idle(&self) {
        self.state.copies().idle().await;
    }

    /// The copy counts for nothing from now on: no request waits for the target, which may never answer. Operations
    /// that run there go on: see [`CopyBeforeWrite::idle`]. Requests still wait for a discard on the disk that runs.
    pub fn abandon(&self) {
        self.state.break_with(Error::new(ErrorKind::Cancelled, "the copy was given up"));
        self.state.copies().give_up();
    }

    pub(crate) async fn read_kept(&self, offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        self.state.read(offset, buf).await
    }

    pub(crate) async fn kept_status(&self, offset: u64, len: u64, max_runs: usize) -> Result<Vec<StatusExtent>> {
        self.state.block_status(offset, len, max_runs).await
    }

    pub(crate) async fn give_up(&self, offset: u64, len: u64) -> Result<()> {
        self.state.give_up(offset, len).await
    }

    /// Saves the parts that a request is about to change.
    async fn save(&self, offset: u64, len: u64) -> Result<()> {
        // A spoiled copy is not trusted any more.
        if len == 0 {
            return Ok(());
        }
        if self.broken().is_some() {
            self.state.discarded(offset, len).await;
            return Ok(());
        }
        if self.state.pending().is_dirty(offset, len) {
            let copied = match self.timeout {
                None => {
                    let state = Arc::clone(&self.state);
                    let copy = async move { state.copy(offset, len).await };
                    match self.state.copies().wait_for(copy).await {
                        Some(copied) => copied,
                        None => {
                            self.state.discarded(offset, len).await;
                            return Ok(());
                        }
                    }
                }
                Some(timeout) => self.copy_within(timeout, offset, len).await,
            };
            match copied {
                Ok(()) => {}
                Err(failure) if self.breaks_writes => return Err(failure.error),
                Err(failure) => {
                    self.state.break_with(failure.error);
                    self.state.copies().give_up();
                }
            }
        }
        self.state.discarded(offset, len).await;
        self.state.readers_left(offset, len).await;
        Ok(())
    }

    /// Copies, and waits no longer than `timeout` for it. The copy runs to its end all the same: others may wait for it.
    async fn copy_within(&self, timeout: Duration, offset: u64, len: u64) -> Result<(), CopyFailure> {
        let late = || {
            let message = format!("old data was not saved within {} s", timeout.as_secs());
            Err(CopyFailure::writing(Error::os(Errno::ETIMEDOUT, message)))
        };
        // Each attempt at a part waits behind the first one, which may never end.
        if rt::within(timeout, self.state.copies().fewer_than(MOST_COPIES)).await.is_none() {
            return late();
        }
        let attempt = Arc::new(Attempt::default());
        let copying = {
            let (state, attempt, running) =
                (Arc::clone(&self.state), Arc::clone(&attempt), self.state.copies().begin());
            async move {
                attempt.finish(state.copy(offset, len).await);
                drop(running);
            }
        };
        if let Err(copying) = rt::spawn_critical(copying) {
            copying.await;
        }
        let (finished, time) = (pin!(attempt.finished()), pin!(rt::sleep(timeout)));
        match select(finished, time).await {
            Either::Left((result, _)) => result,
            Either::Right(_) => late(),
        }
    }
}

impl Filter for CopyBeforeWrite {
    fn name(&self) -> &'static str {
        schemas::COPY_BEFORE_WRITE.name
    }

    fn below(&self) -> &Below {
        self.state.below()
    }

    fn write(&self, offset: u64, buf: IoBuf) -> Transfer<'_> {
        Box::pin(async move {
            match self.save(offset, buf.len() as u64).await {
                Ok(()) => self.below().write(offset, buf).await,
                Err(error) => (Err(error), buf),
            }
        })
    }

    /// The disk as it was stays readable where it is.
    fn write_unchanged(&self, offset: u64, buf: IoBuf) -> Transfer<'_> {
        Box::pin(self.below().write_unchanged(offset, buf))
    }

    fn write_compressed(&self, clusters: Vec<(u64, IoBuf)>) -> Work<'_> {
        Box::pin(async move {
            for (offset, buf) in &clusters {
                self.save(*offset, buf.len() as u64).await?;
            }
            self.below().write_compressed(clusters).await
        })
    }

    fn write_zeroes(&self, offset: u64, len: u64, flags: ZeroFlags) -> Work<'_> {
        Box::pin(async move {
            self.save(offset, len).await?;
            self.below().write_zeroes(offset, len, flags).await
        })
    }

    fn write_zeroes_unchanged(&self, offset: u64, len: u64, flags: ZeroFlags) -> Work<'_> {
        Box::pin(self.below().write_zeroes_unchanged(offset, len, flags))
    }

    fn discard(&self, offset: u64, len: u64) -> Work<'_> {
        Box::pin(async move {
            self.save(offset, len).await?;
            self.below().discard(offset, len).await
        })
    }

    fn resize(&self, _size: u64, _preallocation: Preallocation) -> Work<'_> {
        done(Err(Error::unsupported("a disk can't be resized while it is copied before it is written")))
    }

    fn permissions(&self, wanted: Permissions, _read_only: bool) -> Permissions {
        keeps_writers_away(wanted)
    }

    fn settle<'a>(&'a self, drained: &'a [Arc<Node>]) -> LocalFuture<'a, ()> {
        Box::pin(async move {
            if super::drains_target(drained, self.state.target_link(), self.below()) {
                return self.idle().await;
            }
            // A copy without a request or a job that waits for it (given up, or too slow) only reads the disk. A drain that waited
            // for it would hold the disk's clients while the target is silent.
            self.state.discarded(0, u64::MAX).await;
        })
    }

    fn close(&self, _read_only: bool) -> Work<'_> {
        Box::pin(async move {
            self.idle().await;
            Ok(())
        })
    }
}

impl Node {
    /// The copy-before-write filter, when this node is one.
    pub fn copy_before_write(&self) -> Option<&CopyBeforeWrite> {
        self.driver().downcast()
    }
}

/// Largest part that is saved at once, in bytes.
const MAX_PART_BYTES: u64 = 2 << 30;

/// Options of `copy-before-write`. `path` is for messages, `bits` has the kept parts of the disk.
pub(crate) fn saving_options(
    options: &BlockdevOptions,
    path: &str,
    bits: Option<Arc<DirtyBits>>,
) -> Result<SavingOptions> {
    let least_part_bytes = options.number("min-cluster-size").unwrap_or(0);
    if least_part_bytes != 0 && (!least_part_bytes.is_power_of_two() || least_part_bytes > MAX_PART_BYTES) {
        let message = format!("option '{path}min-cluster-size' expects a power of two up to 2 GiB");
        return Err(Error::invalid_argument(message).value(least_part_bytes));
    }
    Ok(SavingOptions {
        breaks_writes: options.text("on-cbw-error") != Some("break-snapshot"),
        timeout: options.number("cbw-timeout").filter(|seconds| *seconds > 0).map(Duration::from_secs),
        least_part_bytes,
        bits,
    })
}
