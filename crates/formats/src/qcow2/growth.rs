// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Space ahead of an image file that grows past the page cache.
//!
//! Past the page cache each write behind the end of the file changes its length. The file system makes these changes
//! one at a time. A file that is longer than its clusters takes such writes side by side. Where requests leave holes in
//! their clusters the file gets length ahead, and blocks otherwise. The space holds zeroes and
//! nothing refers to it. A close cuts it off. After a crash the next writer that changes metadata cuts it off when it closes,
//! once it has seen that nothing refers to it.

use super::Qcow2Driver;
use super::allocate::written_bytes;
use cowshed_qcow2::{Allocation, Fill};
use cowshed_types::StoredIn;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The first and the largest piece, in clusters; the largest in bytes. Each piece is twice the one before.
const FIRST_CLUSTERS: u64 = 16;
const MOST_CLUSTERS: u64 = 4096;
const MOST_BYTES: u64 = 64 << 20;
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
struct BusyGuard<'a>(&'a Growth);

impl Drop for BusyGuard<'_> {
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
        let turn = BusyGuard(&self.growth);
        let clusters = self.growth.clusters.load(Ordering::Relaxed);
        // Another request's reservation may have failed meanwhile.
        if clusters == 0 {
            return;
        }
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
}

/// True where the request writes most of the clusters that it takes.
fn is_filled(allocation: &Allocation, cluster_size: u64) -> bool {
    2 * written_bytes(allocation) >= (allocation.end - allocation.start).next_multiple_of(cluster_size)
}

fn copies(allocation: &Allocation) -> bool {
    allocation.head == Fill::Copy || allocation.tail == Fill::Copy
}
