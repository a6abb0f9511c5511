// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Space ahead of an image file that grows past the page cache.
//!
//! Past the page cache each write behind the end of the file changes its length. The file system makes these changes
//! one at a time. A file that is longer than its clusters takes such writes side by side. Where requests leave holes in
//! their clusters the file gets length ahead, and blocks otherwise. The space holds zeroes and
//! nothing refers to it. A close cuts it off. After a crash the next writer cuts it off when it closes.

use super::Qcow2Driver;
use super::allocate::written_bytes;
use cowshed_qcow2::{Allocation, Fill};
use cowshed_storage::IoBuf;
use cowshed_types::{Result, StoredIn};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The first and the largest piece, in clusters; the largest in bytes. Each piece is twice the one before.
const FIRST_CLUSTERS: u64 = 16;
const MOST_CLUSTERS: u64 = 4096;
const MOST_BYTES: u64 = 64 << 20;
/// The most that a crash leaves: a piece, half of the one before it, and what alignment adds.
const MOST_LEFT_BYTES: u64 = 2 * MOST_BYTES;
/// Bytes that one read looks at for the end of the data.
const LOOK_BYTES: u64 = 128 << 10;
/// A piece is reserved where the file system has room for this many. Some file systems keep what a failed reservation
/// took.
const PIECES_FREE: u64 = 8;
/// The last bytes of a piece, which are reserved for the length alone. A reservation never shortens a file, and keeps
/// what another request wrote there; setting the length does neither.
const LENGTH_BYTES: u64 = 4096;

/// The pieces of one image.
pub(super) struct Growth {
    /// Clusters of the next piece. 0: the file system can't reserve any.
    clusters: AtomicU64,
    /// A request left holes in its clusters, which blocks ahead would fill: only copies ask for blocks from then on.
    has_holes: AtomicBool,
    /// A request reserves a piece now.
    is_busy: AtomicBool,
}

impl Growth {
    pub(super) fn new() -> Growth {
        Growth {
            clusters: AtomicU64::new(FIRST_CLUSTERS),
            has_holes: AtomicBool::new(false),
            is_busy: AtomicBool::new(false),
        }
    }
}

/// The piece is reserved, or not: other requests may try.
struct Turn<'a>(&'a Growth);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.is_busy.store(false, Ordering::Release);
    }
}

/// The space that a growing file gets ahead of its clusters.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum SpaceAhead {
    /// Blocks of the file system.
    Blocks,
    /// Length alone: what is not written stays a hole.
    Length,
}

impl Qcow2Driver {
    /// The kind of space to reserve, where less than half a piece lies ahead of an allocation.
    pub(super) fn lacks_ahead(&self, allocation: &Allocation) -> Option<SpaceAhead> {
        if !self.file.cache_mode().direct || allocation.file != StoredIn::Image {
            return None;
        }
        let clusters = self.growth.clusters.load(Ordering::Relaxed);
        let end = allocation.host.0 + (allocation.end - allocation.start);
        let is_filled = is_filled(allocation, self.cluster_size());
        if !is_filled {
            self.growth.has_holes.store(true, Ordering::Relaxed);
        }
        let lacks = clusters > 0
            && end + self.piece_bytes(clusters) / 2 > self.file.len()
            && self.file.is_plain()
            && !self.file.is_device();
        let blocks = is_filled && (copies(allocation) || !self.growth.has_holes.load(Ordering::Relaxed));
        lacks.then_some(if blocks { SpaceAhead::Blocks } else { SpaceAhead::Length })
    }

    fn piece_bytes(&self, clusters: u64) -> u64 {
        (clusters << self.engine.geometry().cluster_bits()).min(MOST_BYTES)
    }

    /// Reserves the next piece, unless another request does. Without it a write only takes longer, so no error comes of it.
    pub(super) async fn reserve_ahead(&self, ahead: SpaceAhead) {
        if self.growth.is_busy.swap(true, Ordering::Acquire) {
            return;
        }
        let turn = Turn(&self.growth);
        let clusters = self.growth.clusters.load(Ordering::Relaxed);
        let (end, piece) = (self.file.len(), self.piece_bytes(clusters));
        let (start, bytes) = match ahead {
            SpaceAhead::Blocks => (end, piece),
            SpaceAhead::Length => (end + piece - LENGTH_BYTES, LENGTH_BYTES),
        };
        if self.file.free_bytes().is_none_or(|free| free >= PIECES_FREE * bytes) {
            let next = match self.file.allocate(start, bytes).await {
                Ok(()) => (2 * clusters).min(MOST_CLUSTERS),
                Err(error) => {
                    tracing::debug!("no space ahead of the image: {error}");
                    // The file may have grown all the same: the close cuts what the length has.
                    self.file.measure_len();
                    0
                }
            };
            self.growth.clusters.store(next, Ordering::Relaxed);
        }
        drop(turn);
    }

    /// Cuts off the space ahead that a crash has left, after an opening that changed no metadata. Only zeroes go that no
    /// count includes: bytes behind the counted clusters may be all that a damaged image has left of its data.
    pub(super) async fn cut_space_of_a_crash(&self) -> Result<()> {
        if !self.file.is_plain() || self.file.is_device() {
            return Ok(());
        }
        let len = self.file.len();
        let zeroes = self.zeroes_at_the_end(len).await?;
        if zeroes == len {
            return Ok(());
        }
        let mut passed = u64::MAX;
        let end = self.plan(|engine| engine.needed_file_len(&mut passed)).await?.max(zeroes);
        if end < len {
            self.file.set_len(end).await?;
            self.engine.truncated(end);
        }
        Ok(())
    }

    /// The first cluster from which on the file holds zeroes up to `len`, its end. `len` where there are none, or more than
    /// a crash leaves.
    async fn zeroes_at_the_end(&self, len: u64) -> Result<u64> {
        let from = len.saturating_sub(MOST_LEFT_BYTES);
        let mut end = len;
        while end > from {
            let start = from.max((end - 1) / LOOK_BYTES * LOOK_BYTES);
            if self.file.next_data(start).await?.is_some_and(|data| data.start < end) {
                let (result, bytes) = self.file.read_at(IoBuf::scratch((end - start) as usize), start).await;
                result?;
                if let Some(last) = bytes.iter().rposition(|byte| *byte != 0) {
                    return Ok((start + last as u64 + 1).next_multiple_of(self.cluster_size()).min(len));
                }
            }
            end = start;
        }
        Ok(len)
    }
}

/// True where the request writes most of the clusters that it takes.
fn is_filled(allocation: &Allocation, cluster_size: u64) -> bool {
    2 * written_bytes(allocation) >= (allocation.end - allocation.start).next_multiple_of(cluster_size)
}

fn copies(allocation: &Allocation) -> bool {
    allocation.head == Fill::Copy || allocation.tail == Fill::Copy
}
