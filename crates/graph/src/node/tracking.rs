// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Trackers: dirty maps that follow the writes to a node. Formats and raw images go to a node's file directly, so a node with a
//! file also marks what its file shows.

use super::Node;
use super::driver::whole_sectors;
use crate::dirty::DirtyMap;
use cowshed_types::{DirtyBits, Result};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// The dirty maps of one node; without any a write looks at one flag.
#[derive(Debug, Default)]
pub(super) struct Tracking {
    active: AtomicBool,
    maps: Mutex<Vec<Weak<DirtyMap>>>,
    named: Mutex<NamedBitmaps>,
}

/// Dirty bitmaps that have a name.
#[derive(Debug, Default)]
pub(super) struct NamedBitmaps {
    /// Those in memory alone.
    pub transient: Vec<Transient>,
    /// Names of bitmaps that an export or a job uses, once for each use.
    pub busy: Vec<String>,
    /// Names of the bitmaps of any kind that were added since the node is open, in the order of their coming.
    pub added: Vec<String>,
}

/// A bitmap that goes with the node.
#[derive(Clone, Debug)]
pub(super) struct Transient {
    pub name: String,
    pub enabled: bool,
    pub bits: Arc<DirtyBits>,
}

impl Tracking {
    /// True when there may be an observer.
    #[inline]
    pub(super) fn is_active(&self) -> bool {
        self.active.load(Ordering::Acquire)
    }

    /// A range was written, or may have been.
    #[inline]
    pub(super) fn written(&self, offset: u64, len: u64) {
        if self.active.load(Ordering::Acquire) {
            self.mark(offset, len);
        }
    }

    #[cold]
    fn mark(&self, offset: u64, len: u64) {
        let mut maps = self.maps.lock().unwrap_or_else(PoisonError::into_inner);
        maps.retain(|map| match map.upgrade() {
            Some(map) => {
                map.mark(offset, len);
                true
            }
            None => false,
        });
        let mut named = self.named();
        let mut recording = false;
        for bitmap in named.transient.iter_mut().filter(|bitmap| bitmap.enabled) {
            recording = true;
            if !bitmap.bits.covers(offset, len) {
                Arc::make_mut(&mut bitmap.bits).mark(offset, len);
            }
        }
        if maps.is_empty() && !recording {
            self.active.store(false, Ordering::Release);
        }
    }

    pub(super) fn named(&self) -> MutexGuard<'_, NamedBitmaps> {
        self.named.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// There may be an observer from now on: see [`Node::start_tracking`].
    fn activate(&self) {
        self.active.store(true, Ordering::Release);
    }

    /// The disk has another size: new bytes are clean.
    pub(super) fn resized(&self, disk_bytes: u64) {
        for bitmap in self.named().transient.iter_mut().filter(|bitmap| bitmap.bits.disk_bytes() != disk_bytes) {
            Arc::make_mut(&mut bitmap.bits).resize(disk_bytes);
        }
    }
}

impl Node {
    /// Marks all writes through this node from now on, in parts of `granularity_bytes` (a power of two from 512 to 2
    /// GiB). Ends when the map is dropped. To miss nothing, call it while the node is drained.
    pub fn track_dirty(&self, granularity_bytes: u64) -> Result<Arc<DirtyMap>> {
        let map = Arc::new(DirtyMap::new(granularity_bytes)?);
        self.tracking.maps.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::downgrade(&map));
        self.start_tracking();
        Ok(map)
    }

    /// There may be an observer of writes from now on.
    pub(super) fn start_tracking(&self) {
        self.tracking.activate();
        self.renew_observer();
    }

    /// The bitmaps in memory with the size that the disk has: a format makes its file longer without the node.
    pub(super) fn named_bitmaps(&self) -> MutexGuard<'_, NamedBitmaps> {
        if self.driver.whole_file().is_some() {
            self.tracking.resized(whole_sectors(self.size()));
        }
        self.tracking.named()
    }

    /// The node's file was changed from `offset` to `end`, by this node or past it.
    #[cold]
    pub(super) fn note_changed(&self, offset: u64, end: u64) {
        if !self.is_tracked() {
            return;
        }
        drop(self.named_bitmaps());
        let end = end.min(self.size());
        if offset < end {
            self.tracking.written(offset, end - offset);
        }
        if !self.is_tracked() {
            self.renew_observer();
        }
    }
}
