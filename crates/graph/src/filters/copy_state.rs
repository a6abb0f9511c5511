// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The disk as it was when a copy-before-write filter came. It knows the parts that the target has, saves the others,
//! and reads them while the disk itself goes on.

use super::CopyFailure;
use super::copies::Copies;
use crate::dirty::DirtyMap;
use crate::node::{Below, Link, Node, StatusExtent, ZeroFlags};
use crate::node::{Ranges, Readers, Reading};
use cowshed_storage::IoBuf;
use cowshed_types::{DirtyBits, Error, ErrorKind, Result, slip};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// The longest piece of a copy, in bytes, unless a cluster of the target is longer.
const MOST_COPIED_BYTES: u64 = 1 << 20;
/// Runs that one question about the mapping returns at most.
const STATUS_RUNS: usize = 64;
/// Zeroes on the target may be holes.
const ZEROES: ZeroFlags = ZeroFlags { may_unmap: true, no_fallback: false };

/// The state of the filter.
///
/// A part of the disk is kept until it is given up, and pending until the target has it. A copy of a part has it
/// claimed. A reader of a pending part on the disk announces itself before. A write waits for those readers once its
/// part is saved: later ones read the target.
pub(super) struct CopyState {
    below: Below,
    target: Arc<Link>,
    /// Size of a cluster of the target, in bytes.
    cluster_bytes: u64,
    kept: DirtyMap,
    /// The kept parts that the target lacks.
    pending: DirtyMap,
    ranges: Arc<Ranges>,
    /// Held until a range that was copied is discarded on the disk.
    discarding: Arc<Ranges>,
    readers: Arc<Readers>,
    /// The readers of the target, where it reads missing parts from the disk.
    target_readers: Option<Arc<Readers>>,
    compress: AtomicBool,
    /// Copied parts are discarded on the disk.
    discard_source: AtomicBool,
    /// The reason why the target will never hold the disk's old state.
    broken: Mutex<Option<Error>>,
    /// Copies that go on although their request may have ended.
    copies: Arc<Copies>,
}

/// A run of the disk as it was, on one node.
struct OldExtent {
    node: Arc<Node>,
    /// Its end on the disk, in bytes.
    end: u64,
    /// Keeps the disk from changing there.
    _reading: Option<Reading>,
}

impl CopyState {
    /// Parts of `part_bytes`; `bits` has the kept parts, else everything is kept.
    pub(super) fn new(
        below: Below,
        target: Arc<Link>,
        target_readers: Option<Arc<Readers>>,
        (part_bytes, cluster_bytes): (u64, u64),
        bits: Option<&DirtyBits>,
    ) -> Result<CopyState> {
        let (kept, pending) = (DirtyMap::new(part_bytes)?, DirtyMap::new(part_bytes)?);
        match bits {
            None => kept.mark(0, below.size()),
            Some(bits) => bits.dirty_ranges().for_each(|range| kept.mark(range.start, range.end - range.start)),
        }
        let mut at = 0;
        while let Some(range) = kept.next(at, u64::MAX) {
            pending.mark(range.start, range.end - range.start);
            at = range.end;
        }
        Ok(CopyState {
            below,
            target,
            cluster_bytes,
            kept,
            pending,
            ranges: Arc::default(),
            discarding: Arc::default(),
            readers: Arc::default(),
            target_readers,
            compress: AtomicBool::new(false),
            discard_source: AtomicBool::new(false),
            broken: Mutex::default(),
            copies: Arc::default(),
        })
    }

    pub(super) fn below(&self) -> &Below {
        &self.below
    }

    pub(super) fn pending(&self) -> &DirtyMap {
        &self.pending
    }

    pub(super) fn set_compress(&self, compress: bool) {
        self.compress.store(compress, Ordering::Relaxed);
    }

    pub(super) fn set_discard_source(&self, discard: bool) {
        self.discard_source.store(discard, Ordering::Relaxed);
    }

    /// True when copied parts are discarded on the disk.
    pub(super) fn discards_source(&self) -> bool {
        self.discard_source.load(Ordering::Relaxed)
    }

    /// Waits for the discards in the parts that a range touches. None begins later in a part that the target has, or where the
    /// copy is broken.
    pub(super) async fn discarded(&self, offset: u64, len: u64) {
        if self.discards_source() {
            let (start, len) = self.touched_parts(offset, len);
            drop(self.discarding.claim(start, len).await);
        }
    }

    pub(super) fn broken(&self) -> Option<Error> {
        self.broken.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The target will never hold the disk as it was; the first reason counts.
    pub(super) fn break_with(&self, error: Error) {
        self.broken.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
    }

    pub(super) fn copies(&self) -> &Arc<Copies> {
        &self.copies
    }

    pub(super) fn target_link(&self) -> &Link {
        &self.target
    }

    fn target(&self) -> Result<Arc<Node>> {
        self.target.get().ok_or_else(|| Error::internal("a filter without a target"))
    }

    fn part_bytes(&self) -> u64 {
        self.pending.granularity_bytes()
    }

    /// The whole parts that a range touches: offset and length in bytes.
    fn touched_parts(&self, offset: u64, len: u64) -> (u64, u64) {
        let part = self.part_bytes();
        let start = offset / part * part;
        let end = offset.saturating_add(len).checked_next_multiple_of(part).unwrap_or(u64::MAX);
        (start, end - start)
    }

    /// Copies the pending parts of a range, each one whole.
    pub(super) async fn copy(&self, offset: u64, len: u64) -> Result<(), CopyFailure> {
        let (start, len) = self.touched_parts(offset, len);
        let _claim = self.ranges.claim(start, len).await;
        let end = start.saturating_add(len);
        let size = self.below.size();
        let source = self.below.node().map_err(CopyFailure::reading)?;
        let target = self.target().map_err(CopyFailure::writing)?;
        let mut at = start;
        while let Some(range) = self.pending.next(at, MOST_COPIED_BYTES).filter(|range| range.start < end.min(size)) {
            if self.broken().is_some() {
                return Ok(());
            }
            let stop = range.end.min(end).min(size);
            self.copy_run(&source, &target, range.start..stop).await?;
            let discards = self.discards_source();
            let _discarding = match discards {
                true => Some(self.discarding.claim(range.start, stop - range.start).await),
                false => None,
            };
            // Writes no longer wait for this copy: the disk's present data may be newer than the copied ones.
            if self.broken().is_some() {
                return Ok(());
            }
            // New readers find the range on the target. A write that comes waits for the discard.
            self.pending.clear(range.start, stop - range.start);
            if discards {
                self.discard(&source, range.start, stop - range.start).await;
            }
            at = stop;
        }
        Ok(())
    }

    /// Discards the target's parts on the disk, once its readers have left.
    async fn discard(&self, source: &Node, offset: u64, len: u64) {
        self.readers_left(offset, len).await;
        // Given up meanwhile: the target may still have readers.
        if self.broken().is_some() {
            return;
        }
        if let Err(error) = source.discard_boxed(offset, len).await {
            tracing::warn!(%error, "what was copied could not be discarded");
        }
    }

    /// Copies ranges that are known to be zero as zeroes, part by part, and the rest as data.
    async fn copy_run(&self, source: &Node, target: &Node, run: Range<u64>) -> Result<(), CopyFailure> {
        let mut at = run.start;
        while at < run.end {
            let runs = source.block_status_chain_boxed(at, run.end - at, STATUS_RUNS).await;
            let (end, is_zero) = self.first_kind(&runs.map_err(CopyFailure::reading)?, at..run.end);
            if is_zero {
                target.write_zeroes_boxed(at, end - at, ZEROES).await.map_err(CopyFailure::writing)?;
            } else {
                self.copy_data(source, target, at..end).await?;
            }
            at = end;
        }
        Ok(())
    }

    /// The end of the first kind of data in a range, in whole parts, and whether it is known to be zero.
    fn first_kind(&self, runs: &[StatusExtent], range: Range<u64>) -> (u64, bool) {
        let part = self.part_bytes();
        let mut spans: Vec<Range<u64>> = Vec::new();
        for run in runs.iter().filter(|run| run.zero) {
            let end = run.start.saturating_add(run.len);
            match spans.last_mut() {
                Some(last) if last.end == run.start => last.end = end,
                _ => spans.push(run.start..end),
            }
        }
        for span in spans {
            let first = span.start.next_multiple_of(part);
            let stop = if span.end >= range.end { range.end } else { span.end / part * part };
            if first < stop {
                return if first == range.start { (stop, true) } else { (first, false) };
            }
        }
        (range.end, false)
    }

    async fn copy_data(&self, source: &Node, target: &Node, run: Range<u64>) -> Result<(), CopyFailure> {
        let most = MOST_COPIED_BYTES.max(self.cluster_bytes);
        let mut at = run.start;
        while at < run.end {
            let len = usize::try_from((run.end - at).min(most));
            let len = len.map_err(|_| CopyFailure::reading(Error::internal("a run too long")))?;
            let (result, buf) = source.read_boxed(at, IoBuf::zeroed(len)).await;
            result.map_err(CopyFailure::reading)?;
            let written = if crate::node::is_zero(&buf) {
                target.write_zeroes_boxed(at, len as u64, ZEROES).await
            } else if self.compress.load(Ordering::Relaxed) {
                let cluster = target.compressed_cluster_bytes().unwrap_or(self.part_bytes()) as usize;
                let places = (at..).step_by(cluster);
                let clusters = places.zip(buf.chunks(cluster)).map(|(at, bytes)| (at, IoBuf::copy_from(bytes)));
                target.write_compressed_boxed(clusters.collect()).await
            } else {
                target.write_boxed(at, buf).await.0
            };
            written.map_err(CopyFailure::writing)?;
            at += len as u64;
        }
        Ok(())
    }

    /// Waits for the readers of a range on the disk. It is saved, so later ones read the target. Readers through the
    /// target are waited for until it is given up.
    pub(super) async fn readers_left(&self, offset: u64, len: u64) {
        if !slip!("readers_of_the_past_overtaken") {
            self.readers.left(offset, len).await;
        }
        if let Some(readers) = &self.target_readers {
            let _ = self.copies.unless_given_up(readers.left(offset, len)).await;
        }
    }

    /// Stops keeping the parts that a range touches.
    pub(super) async fn skip(&self, offset: u64, len: u64) {
        let (start, len) = self.touched_parts(offset, len);
        let _claim = self.ranges.claim(start, len).await;
        self.clear_parts(start, len);
    }

    /// In this order, as `begin_read` looks the other way round: a part neither pending nor kept isn't on the target.
    fn clear_parts(&self, start: u64, len: u64) {
        if !slip!("given_up_parts_still_readable") {
            self.kept.clear(start, len);
        }
        self.pending.clear(start, len);
    }

    /// The whole parts inside of a range are no longer needed. They are not saved any more, and their place on the
    /// target is given back.
    pub(super) async fn give_up(&self, offset: u64, len: u64) -> Result<()> {
        let (part, size) = (self.part_bytes(), self.below.size());
        let end = offset.saturating_add(len).min(size);
        let start = offset.checked_next_multiple_of(part).unwrap_or(u64::MAX);
        // The last part may be cut off by the end of the disk.
        let end = if end == size { end } else { end / part * part };
        if start >= end {
            return Ok(());
        }
        let _claim = self.ranges.claim(start, end.next_multiple_of(part) - start).await;
        self.clear_parts(start, end - start);
        self.target()?.discard_boxed(start, end - start).await
    }

    fn check_unbroken(&self) -> Result<()> {
        match self.broken() {
            None => Ok(()),
            Some(reason) => {
                let message = format!("the disk as it was is lost: {reason}");
                Err(Error::new(ErrorKind::PermissionDenied, message))
            }
        }
    }

    /// Where the disk as it was is to be read from `at` on, up to `end` at most.
    fn begin_read(&self, at: u64, end: u64) -> Result<OldExtent> {
        self.check_unbroken()?;
        // Before the look at the pending parts: a write that comes between finds this reader.
        let reading = self.readers.enter(at, end);
        let (pending, pending_end) = self.pending.run_at(at, end);
        let (kept, kept_end) = self.kept.run_at(at, end);
        let end = pending_end.min(kept_end);
        match (kept, pending) {
            (false, _) => {
                let message = format!("bytes {at} to {end} of the disk as it was are not kept");
                Err(Error::new(ErrorKind::PermissionDenied, message))
            }
            (true, true) => Ok(OldExtent { node: self.below.node()?, end, _reading: Some(reading.up_to(end)) }),
            (true, false) => Ok(OldExtent { node: self.target()?, end, _reading: None }),
        }
    }

    /// Fills `buf` with the disk's old bytes at `offset`.
    pub(super) async fn read(&self, offset: u64, mut buf: IoBuf) -> (Result<()>, IoBuf) {
        let end = offset + buf.len() as u64;
        let mut at = offset;
        while at < end {
            let run = match self.begin_read(at, end) {
                Ok(run) => run,
                Err(error) => return (Err(error), buf),
            };
            let place = (at - offset) as usize..(run.end - offset) as usize;
            let result = if place.len() == buf.len() {
                let result;
                (result, buf) = run.node.read_boxed(at, buf).await;
                result
            } else {
                let (result, piece) = run.node.read_boxed(at, IoBuf::zeroed(place.len())).await;
                buf[place].copy_from_slice(&piece);
                result
            };
            if let Err(error) = result {
                return (Err(error), buf);
            }
            at = run.end;
        }
        // A write that could not be saved meanwhile may have been read.
        (self.check_unbroken(), buf)
    }

    /// Data and holes of the disk as it was.
    pub(super) async fn block_status(&self, offset: u64, len: u64, max_runs: usize) -> Result<Vec<StatusExtent>> {
        let end = offset + len;
        let (mut at, mut runs) = (offset, Vec::new());
        while at < end && runs.len() < max_runs {
            let run = match self.begin_read(at, end) {
                Err(error) if runs.is_empty() => return Err(error),
                Err(_) => break,
                Ok(run) => run,
            };
            for found in run.node.block_status_chain_boxed(at, run.end - at, max_runs - runs.len()).await? {
                at = found.start + found.len;
                // It has no place in a file that stays.
                runs.push(StatusExtent { present: true, depth: 0, offset: None, file: None, ..found });
            }
        }
        Ok(runs)
    }
}
