// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The filter of a mirror that holds writes until they are on the target too (`copy-mode=write-blocking`).

use super::copies::Copies;
use super::{Filter, keeps_writers_away};
use crate::dirty::DirtyMap;
use crate::node::{Below, Link, LocalFuture, Node, Preallocation, Transfer, Work, ZeroFlags, done};
use crate::node::{Claim, Ranges};
use cowshed_storage::{IoBuf, Permissions};
use cowshed_types::{Error, Result, slip};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// The filter. The mirror's map has the parts of the target that differ from the source. A write that reached both
/// leaves its part as clean as it was. A write that fails on the target stays dirty, as does a hint (a discard), and
/// the mirror copies it.
pub struct WriteBlocking {
    below: Below,
    target: Arc<Link>,
    /// Until the mirror has one, writes only pass.
    map: OnceLock<MirrorMap>,
    ranges: Arc<Ranges>,
    copies: Arc<Copies>,
    /// Bytes of requests that have reached the target, and are not counted yet.
    written: Arc<AtomicU64>,
}

/// The parts of the target that differ from the source.
struct MirrorMap {
    dirty: Arc<DirtyMap>,
    /// A write to a piece of a part leaves the part dirty.
    takes_whole_parts: bool,
}

/// A range that no other task writes or copies, until it is dropped.
pub struct Claimed(#[allow(dead_code)] Claim);

/// The parts that a write touches, claimed, and which of them it leaves clean when it has reached the target.
struct Touched {
    dirty: Arc<DirtyMap>,
    clean: std::ops::Range<u64>,
    /// The length of the request in bytes, and where it counts.
    len: u64,
    written: Arc<AtomicU64>,
    _claim: Claim,
}

impl Touched {
    fn finish(self, on_target: &Result<()>) {
        match on_target {
            Ok(()) => {
                self.written.fetch_add(self.len, Ordering::Relaxed);
                self.dirty.clear(self.clean.start, self.clean.end - self.clean.start);
            }
            // The source has marked it.
            Err(error) => tracing::warn!(%error, "a write did not reach the target of a mirror"),
        }
    }
}

impl WriteBlocking {
    pub(crate) fn new(below: Below, target: Arc<Link>) -> WriteBlocking {
        let (ranges, copies, written) = <(Arc<Ranges>, Arc<Copies>, Arc<AtomicU64>)>::default();
        WriteBlocking { below, target, map: OnceLock::new(), ranges, copies, written }
    }

    /// The bytes of requests that have reached the target since the last call.
    pub fn take_written(&self) -> u64 {
        self.written.swap(0, Ordering::Relaxed)
    }

    /// From now on writes go to the target too. `dirty` has every part that the target lacks, and is marked by all writes to the
    /// source. `takes_whole_parts`: the target fills up the rest of a part with zeroes behind a smaller write. So the mirror copies
    /// such a part. No request runs.
    pub fn activate(&self, dirty: Arc<DirtyMap>, takes_whole_parts: bool) {
        let _ = self.map.set(MirrorMap { dirty, takes_whole_parts });
    }

    /// Keeps writes out of a range (bytes, in whole parts of the map) while it is copied.
    pub async fn claim(&self, start: u64, len: u64) -> Claimed {
        Claimed(self.ranges.claim(start, len).await)
    }

    /// The mirror counts for nothing from now on: no request waits for the target, which may never answer. Operations
    /// that run there go on: see [`WriteBlocking::idle`].
    pub fn abandon(&self) {
        self.copies.give_up();
    }

    /// Waits until no request writes to the target.
    pub async fn idle(&self) {
        self.copies.idle().await;
    }

    /// `None`: requests pass by the target.
    async fn touch(&self, offset: u64, len: u64) -> Option<Touched> {
        let MirrorMap { dirty, takes_whole_parts } = self.map.get().filter(|_| !self.copies.is_given_up())?;
        let stays_dirty = |at| *takes_whole_parts || dirty.is_dirty(at, 1);
        let part = dirty.granularity_bytes();
        let end = offset.saturating_add(len);
        let start = offset / part * part;
        // The last part may be cut off by the end of the disk.
        let whole_end = end.checked_next_multiple_of(part).unwrap_or(u64::MAX);
        let claim = self.copies.unless_given_up(self.ranges.claim(start, whole_end - start)).await?;
        let mut clean = start..whole_end;
        if !slip!("head_of_a_held_write_unchecked") && offset != start && stays_dirty(start) {
            clean.start += part;
        }
        if end != whole_end && end != self.below.size() && stays_dirty(whole_end - 1) {
            clean.end -= part;
        }
        clean.end = clean.end.max(clean.start);
        let (dirty, written) = (Arc::clone(dirty), Arc::clone(&self.written));
        Some(Touched { dirty, clean, len, written, _claim: claim })
    }

    fn target(&self) -> Result<Arc<Node>> {
        self.target.get().ok_or_else(|| Error::internal("a filter without a target"))
    }
}

impl Filter for WriteBlocking {
    fn name(&self) -> &'static str {
        "mirror"
    }

    fn below(&self) -> &Below {
        &self.below
    }

    fn write(&self, offset: u64, buf: IoBuf) -> Transfer<'_> {
        Box::pin(async move {
            let Some(touched) = self.touch(offset, buf.len() as u64).await else {
                return self.below.write(offset, buf).await;
            };
            let (result, buf) = self.below.write(offset, buf).await;
            if result.is_err() {
                return (result, buf);
            }
            let target = match self.target() {
                Ok(target) => target,
                Err(error) => {
                    touched.finish(&Err(error));
                    return (Ok(()), buf);
                }
            };
            // A copy: a target that is given up keeps the memory.
            let copied = IoBuf::copy_from(&buf);
            let copy = async move { touched.finish(&target.write_boxed(offset, copied).await.0) };
            let _ = self.copies.wait_for(copy).await;
            (Ok(()), buf)
        })
    }

    fn write_compressed(&self, clusters: Vec<(u64, IoBuf)>) -> Work<'_> {
        Box::pin(async move {
            let mut spans = clusters.iter().map(|(offset, buf)| (*offset, offset + buf.len() as u64));
            let first = spans.next().unwrap_or_default();
            let (start, end) = spans.fold(first, |(start, end), (from, to)| (start.min(from), end.max(to)));
            let _touched = self.touch(start, end - start).await;
            self.below.write_compressed(clusters).await
        })
    }

    fn write_zeroes(&self, offset: u64, len: u64, flags: ZeroFlags) -> Work<'_> {
        Box::pin(async move {
            let Some(touched) = self.touch(offset, len).await else {
                return self.below.write_zeroes(offset, len, flags).await;
            };
            self.below.write_zeroes(offset, len, flags).await?;
            let target = self.target();
            let copy = async move {
                let on_target = match target {
                    Ok(target) => {
                        target.write_zeroes_boxed(offset, len, ZeroFlags { no_fallback: false, ..flags }).await
                    }
                    Err(error) => Err(error),
                };
                touched.finish(&on_target);
            };
            let _ = self.copies.wait_for(copy).await;
            Ok(())
        })
    }

    fn discard(&self, offset: u64, len: u64) -> Work<'_> {
        Box::pin(async move {
            let _touched = self.touch(offset, len).await;
            self.below.discard(offset, len).await
        })
    }

    fn resize(&self, _size: u64, _preallocation: Preallocation) -> Work<'_> {
        done(Err(Error::unsupported("a disk can't be resized while it is mirrored")))
    }

    fn permissions(&self, wanted: Permissions, _read_only: bool) -> Permissions {
        keeps_writers_away(wanted)
    }

    fn settle<'a>(&'a self, drained: &'a [Arc<Node>]) -> LocalFuture<'a, ()> {
        Box::pin(async move {
            if super::drains_target(drained, &self.target, &self.below) {
                return self.idle().await;
            }
            // Once the target is given up its copies touch nothing else, and a drain holds the disk's clients.
            let _ = self.copies.unless_given_up(self.idle()).await;
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
    /// The filter of a mirror that holds writes back, when this node is one.
    pub fn write_blocking(&self) -> Option<&WriteBlocking> {
        self.driver().downcast()
    }
}
