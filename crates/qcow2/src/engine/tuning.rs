// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The settings that may change while an image is open: its backing size, its overlap checks, the size of its caches.

use crate::config::EngineConfig;
use crate::engine::Engine;
use crate::structures::OverlapSet;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};

/// For "no backing file": no disk is that long.
const NO_BACKING: u64 = u64::MAX;

/// The changeable part of [`EngineConfig`]. Changed only while no request runs, but for the cache limits.
pub(crate) struct Tuning {
    backing_size: AtomicU64,
    lazy_refcounts: AtomicBool,
    discard_no_unref: AtomicBool,
    overlap: AtomicU16,
    l2_cache_bytes: AtomicU64,
    l2_slice_bytes: AtomicU64,
    refcount_cache_bytes: AtomicU64,
}

impl Tuning {
    pub(crate) fn new(config: &EngineConfig) -> Tuning {
        Tuning {
            backing_size: AtomicU64::new(config.backing_size.unwrap_or(NO_BACKING)),
            lazy_refcounts: AtomicBool::new(config.lazy_refcounts),
            discard_no_unref: AtomicBool::new(config.discard_no_unref),
            overlap: AtomicU16::new(config.overlap.bits()),
            l2_cache_bytes: AtomicU64::new(config.l2_cache_bytes),
            l2_slice_bytes: AtomicU64::new(config.l2_slice_bytes),
            refcount_cache_bytes: AtomicU64::new(config.refcount_cache_bytes),
        }
    }
}

impl Engine {
    /// Size of the backing file in bytes, `None` without one.
    pub fn backing_size(&self) -> Option<u64> {
        Some(self.tuning.backing_size.load(Ordering::Acquire)).filter(|size| *size != NO_BACKING)
    }

    /// Sets the size of another backing file in bytes, or none. No request may run.
    pub fn set_backing_size(&self, size: Option<u64>) {
        self.tuning.backing_size.store(size.unwrap_or(NO_BACKING), Ordering::Release);
    }

    /// Refcounts reach the disk only on a clean close, under the dirty bit.
    pub fn lazy_refcounts(&self) -> bool {
        self.tuning.lazy_refcounts.load(Ordering::Relaxed)
    }

    /// Switches lazy refcounts. No request may run; before they are switched off, a cycle with refcounts must have run.
    pub fn set_lazy_refcounts(&self, lazy: bool) {
        self.tuning.lazy_refcounts.store(lazy, Ordering::Release);
    }

    /// Discarded clusters keep their host cluster.
    pub(crate) fn discard_no_unref(&self) -> bool {
        self.tuning.discard_no_unref.load(Ordering::Relaxed)
    }

    /// Whether discarded clusters keep their host cluster.
    pub fn set_discard_no_unref(&self, keep: bool) {
        self.tuning.discard_no_unref.store(keep, Ordering::Relaxed);
    }

    pub(crate) fn overlap_set(&self) -> OverlapSet {
        OverlapSet::from_bits(self.tuning.overlap.load(Ordering::Relaxed))
    }

    /// Checks writes against other structures from now on. No request may run.
    pub fn set_overlap(&self, set: OverlapSet) {
        let mut state = self.lock_state();
        self.metadata.clear();
        self.tuning.overlap.store(set.bits(), Ordering::Release);
        let l1: Vec<u64> = (0..state.tables.l1_len()).map(|index| self.directory.l1(index)).collect();
        state.overlapping_tables = self.mark_known(&state, &l1);
        if state.refcounts.table().is_some() {
            self.mark_refcount_blocks(&mut state);
        }
    }

    /// Bytes of an L2 slice.
    #[inline]
    pub fn slice_bytes(&self) -> u64 {
        self.tuning.l2_slice_bytes.load(Ordering::Relaxed)
    }

    /// Only [`Engine::set_slice_bytes`] calls this.
    pub(crate) fn note_slice_bytes(&self, bytes: u64) {
        self.tuning.l2_slice_bytes.store(bytes, Ordering::Release);
    }

    /// Most bytes of L2 slices and of refcount blocks in memory.
    pub fn cache_limits(&self) -> (u64, u64) {
        let limit = |of: &AtomicU64| of.load(Ordering::Relaxed);
        (limit(&self.tuning.l2_cache_bytes), limit(&self.tuning.refcount_cache_bytes))
    }

    /// Changes the limits, in bytes; slices and blocks beyond them leave at once as far as they are clean and idle.
    pub fn set_cache_limits(&self, l2_cache_bytes: u64, refcount_cache_bytes: u64) {
        self.tuning.l2_cache_bytes.store(l2_cache_bytes, Ordering::Relaxed);
        self.tuning.refcount_cache_bytes.store(refcount_cache_bytes, Ordering::Relaxed);
        let mut state = self.lock_state();
        state.tables.set_cap(l2_cache_bytes);
        state.refcounts.set_cap(refcount_cache_bytes);
        self.shrink_caches(&mut state);
    }
}
