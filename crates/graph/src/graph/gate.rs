// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Where requests enter the graph: each thread counts its own requests in flight, and a drain can hold new ones back
//! until those are done.

use crate::events::Events;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The requests of one queue, which is one thread's.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(super) struct Lane {
    in_flight: AtomicU64,
    /// A request that was carried out is not just counted: see [`Lane::is_plain`].
    special: AtomicBool,
}

impl Lane {
    /// True when a request that was carried out is counted, and nothing more.
    #[inline]
    pub(super) fn is_plain(&self) -> bool {
        !self.special.load(Ordering::Relaxed)
    }

    /// See [`Lane::is_plain`].
    pub(super) fn set_plain(&self, plain: bool) {
        self.special.store(!plain, Ordering::SeqCst);
    }
}

/// The entrance of one attachment.
#[derive(Default)]
pub(super) struct Gate {
    /// Drains that hold it closed.
    closed: AtomicU32,
    lanes: Mutex<Vec<Arc<Lane>>>,
    changes: Events,
}

/// A request between its entrance and its end.
pub(super) struct Passage<'a> {
    gate: &'a Gate,
    lane: &'a Lane,
}

impl Drop for Passage<'_> {
    fn drop(&mut self) {
        self.gate.leave(self.lane);
    }
}

impl Gate {
    fn lanes(&self) -> MutexGuard<'_, Vec<Arc<Lane>>> {
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn add_lane(&self) -> Arc<Lane> {
        let lane = Arc::new(Lane::default());
        self.lanes().push(Arc::clone(&lane));
        lane
    }

    /// Takes out a lane whose queue is gone.
    pub(super) fn remove_lane(&self, lane: &Arc<Lane>) {
        self.lanes().retain(|known| !Arc::ptr_eq(known, lane));
    }

    /// Shows the lanes while none comes or goes.
    pub(super) fn with_lanes(&self, look: impl FnOnce(&[Arc<Lane>])) {
        look(&self.lanes());
    }

    pub(super) fn in_flight(&self) -> u64 {
        self.lanes().iter().map(|lane| lane.in_flight.load(Ordering::SeqCst)).sum()
    }

    /// Enters, after waiting for drains to end.
    #[inline]
    pub(super) async fn enter<'a>(&'a self, lane: &'a Lane) -> Passage<'a> {
        self.admit(lane).await;
        Passage { gate: self, lane }
    }

    /// As [`Gate::enter`]; the caller calls [`Gate::leave`].
    #[inline]
    pub(super) async fn admit(&self, lane: &Lane) {
        // A drain closes the gate and then looks at the count; here it is the other way round, so one of us sees it.
        lane.in_flight.fetch_add(1, Ordering::SeqCst);
        if self.closed.load(Ordering::SeqCst) != 0 {
            self.wait(lane).await;
        }
    }

    #[cold]
    async fn wait(&self, lane: &Lane) {
        loop {
            self.leave(lane);
            loop {
                let seen = self.changes.now();
                if self.closed.load(Ordering::SeqCst) == 0 {
                    break;
                }
                self.changes.wait(seen).await;
            }
            lane.in_flight.fetch_add(1, Ordering::SeqCst);
            if self.closed.load(Ordering::SeqCst) == 0 {
                return;
            }
        }
    }

    #[inline]
    pub(super) fn leave(&self, lane: &Lane) {
        lane.in_flight.fetch_sub(1, Ordering::SeqCst);
        if self.closed.load(Ordering::SeqCst) != 0 {
            self.changes.notify();
        }
    }

    /// Lets no request in from now on, until as many [`Gate::open`].
    pub(super) fn close(&self) {
        self.closed.fetch_add(1, Ordering::SeqCst);
    }

    /// Waits until no request is in.
    pub(super) async fn empty(&self) {
        loop {
            let seen = self.changes.now();
            if self.in_flight() == 0 {
                return;
            }
            self.changes.wait(seen).await;
        }
    }

    pub(super) fn open(&self) {
        self.closed.fetch_sub(1, Ordering::SeqCst);
        self.changes.notify();
    }
}
