// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Copy-before-write: the disk as it was when the filter came goes to a target, part by part: what is about to be
//! overwritten at once, the rest when a job asks for it.

use super::ranges::Ranges;
use super::{Below, CopyFailure};
use crate::dirty::DirtyMap;
use crate::node::{Link, Node, Preallocation, ZeroFlags};
use cowshed_block::{Error, Result};
use cowshed_storage::IoBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// What is copied in one piece is at most this long, in bytes, or one part.
const MOST_COPIED_BYTES: u64 = 1 << 20;
/// Smallest part in bytes; a target with larger clusters makes it larger.
const LEAST_PART_BYTES: u64 = 64 << 10;
/// Zeroes on the target may be holes.
const ZEROES: ZeroFlags = ZeroFlags { may_unmap: true, no_fallback: false };

/// The filter.
///
/// A part of the disk is pending until the target has it. Whoever copies a part has it claimed, so a write to a part that
/// isn't pending may pass at once: nobody reads it any more.
pub struct CopyBeforeWrite {
    below: Below,
    target: Arc<Link>,
    pending: DirtyMap,
    ranges: Arc<Ranges>,
    compress: AtomicBool,
    /// A write whose old data can't be saved fails; else it passes and the copy is spoiled.
    breaks_writes: bool,
    /// Why the target will never hold the disk as it was.
    broken: Mutex<Option<Error>>,
}

impl CopyBeforeWrite {
    pub(crate) fn new(below: Below, target: Arc<Link>, breaks_writes: bool) -> Result<CopyBeforeWrite> {
        let cluster = target.get().and_then(|node| node.qcow2().map(|qcow2| qcow2.cluster_size())).unwrap_or(0);
        let pending = DirtyMap::new(cluster.max(LEAST_PART_BYTES))?;
        pending.mark(0, below.size());
        Ok(CopyBeforeWrite {
            below,
            target,
            pending,
            ranges: Arc::default(),
            compress: AtomicBool::new(false),
            breaks_writes,
            broken: Mutex::default(),
        })
    }

    pub(crate) fn below(&self) -> &Below {
        &self.below
    }

    /// Writes to the target compressed from now on. The target must be able to.
    pub fn set_compress(&self, compress: bool) {
        self.compress.store(compress, Ordering::Relaxed);
    }

    /// Size of a part in bytes.
    pub fn part_bytes(&self) -> u64 {
        self.pending.granularity_bytes()
    }

    /// What the target still lacks, in bytes.
    pub fn pending_bytes(&self) -> u64 {
        self.pending.dirty_bytes().min(self.below.size())
    }

    /// The next pending run at or behind `from`: offset and length in bytes, in whole parts but for the disk's end.
    pub fn next_pending(&self, from: u64) -> Option<(u64, u64)> {
        let range = self.pending.next(from, MOST_COPIED_BYTES)?;
        let end = range.end.min(self.below.size());
        (range.start < end).then(|| (range.start, end - range.start))
    }

    /// What the target still lacks, in bytes, in whole parts.
    pub fn pending_ranges(&self) -> Vec<std::ops::Range<u64>> {
        let mut ranges = Vec::new();
        let mut at = 0;
        while let Some(range) = self.pending.next(at, u64::MAX) {
            at = range.end;
            ranges.push(range);
        }
        ranges
    }

    /// Why the target will never hold the disk as it was, when that is so.
    pub fn broken(&self) -> Option<Error> {
        self.broken.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn node(&self, link: &Link) -> Result<Arc<Node>> {
        link.get().ok_or_else(|| Error::internal("a filter without a target"))
    }

    /// Copies what is pending of a range, in whole parts.
    pub async fn copy(&self, offset: u64, len: u64) -> Result<(), CopyFailure> {
        let (start, len) = self.whole_parts(offset, len);
        let _claim = self.ranges.claim(start, len).await;
        self.copy_claimed(start, len).await
    }

    /// Takes the parts of a range out that the target doesn't need.
    pub async fn skip(&self, offset: u64, len: u64) {
        let (start, len) = self.whole_parts(offset, len);
        let _claim = self.ranges.claim(start, len).await;
        self.pending.clear(start, len);
    }

    fn whole_parts(&self, offset: u64, len: u64) -> (u64, u64) {
        let part = self.part_bytes();
        let start = offset / part * part;
        let end = offset.saturating_add(len).checked_next_multiple_of(part).unwrap_or(u64::MAX);
        (start, end - start)
    }

    async fn copy_claimed(&self, start: u64, len: u64) -> Result<(), CopyFailure> {
        let end = start.saturating_add(len);
        let size = self.below.size();
        let source = self.below.node().map_err(CopyFailure::reading)?;
        let target = self.node(&self.target).map_err(CopyFailure::writing)?;
        let mut at = start;
        while let Some(range) = self.pending.next(at, MOST_COPIED_BYTES).filter(|range| range.start < end.min(size)) {
            if self.broken().is_some() {
                return Ok(());
            }
            let stop = range.end.min(end).min(size);
            self.copy_run(&source, &target, range.start, stop).await?;
            self.pending.clear(range.start, stop - range.start);
            at = stop;
        }
        Ok(())
    }

    async fn copy_run(&self, source: &Node, target: &Node, start: u64, end: u64) -> Result<(), CopyFailure> {
        let len = usize::try_from(end - start).map_err(|_| CopyFailure::reading(Error::internal("a run too long")))?;
        let (result, buf) = source.read_boxed(start, IoBuf::zeroed(len)).await;
        result.map_err(CopyFailure::reading)?;
        let written = if crate::node::is_zero(&buf) {
            target.write_zeroes_boxed(start, end - start, ZEROES).await
        } else if self.compress.load(Ordering::Relaxed) {
            let cluster = target.qcow2().map_or(self.part_bytes(), |qcow2| qcow2.cluster_size()) as usize;
            let places = (start..).step_by(cluster);
            let clusters = places.zip(buf.chunks(cluster)).map(|(at, bytes)| (at, IoBuf::copy_from(bytes))).collect();
            target.write_compressed_boxed(clusters).await
        } else {
            target.write_boxed(start, buf).await.0
        };
        written.map_err(CopyFailure::writing)
    }

    /// Saves what a request is about to change.
    async fn save(&self, offset: u64, len: u64) -> Result<()> {
        if len == 0 || !self.pending.is_dirty(offset, len) {
            return Ok(());
        }
        match self.copy(offset, len).await {
            Ok(()) => Ok(()),
            Err(failure) if self.breaks_writes => Err(failure.error),
            Err(failure) => {
                let mut broken = self.broken.lock().unwrap_or_else(PoisonError::into_inner);
                broken.get_or_insert(failure.error);
                Ok(())
            }
        }
    }

    pub(crate) async fn read(&self, offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        self.below.read(offset, buf).await
    }

    pub(crate) async fn write(&self, offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        match self.save(offset, buf.len() as u64).await {
            Ok(()) => self.below.write(offset, buf).await,
            Err(error) => (Err(error), buf),
        }
    }

    pub(crate) async fn write_compressed(&self, clusters: Vec<(u64, IoBuf)>) -> Result<()> {
        for (offset, buf) in &clusters {
            self.save(*offset, buf.len() as u64).await?;
        }
        self.below.write_compressed(clusters).await
    }

    pub(crate) async fn write_zeroes(&self, offset: u64, len: u64, flags: ZeroFlags) -> Result<()> {
        self.save(offset, len).await?;
        self.below.write_zeroes(offset, len, flags).await
    }

    pub(crate) async fn discard(&self, offset: u64, len: u64) -> Result<()> {
        self.save(offset, len).await?;
        self.below.discard(offset, len).await
    }

    pub(crate) async fn flush(&self) -> Result<()> {
        // The target is flushed by who completes it.
        self.below.flush().await
    }

    pub(crate) async fn resize(&self, _size: u64, _preallocation: Preallocation) -> Result<()> {
        Err(Error::unsupported("a disk can't be resized while it is copied before it is written"))
    }
}
