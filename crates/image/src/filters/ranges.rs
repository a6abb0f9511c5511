// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Ranges of bytes that one request alone may touch.

use crate::events::Events;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The ranges that are taken.
#[derive(Default)]
pub(super) struct Ranges {
    busy: Mutex<BTreeMap<u64, u64>>,
    changes: Events,
}

/// A range that is taken, until it is dropped.
pub(super) struct Claim {
    ranges: Arc<Ranges>,
    start: u64,
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.ranges.busy().remove(&self.start);
        self.ranges.changes.notify();
    }
}

impl Ranges {
    fn busy(&self) -> MutexGuard<'_, BTreeMap<u64, u64>> {
        self.busy.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until nobody has a part of the range (bytes), and takes it.
    pub(super) async fn claim(self: &Arc<Self>, start: u64, len: u64) -> Claim {
        let end = start.saturating_add(len.max(1));
        loop {
            let seen = self.changes.now();
            {
                let mut busy = self.busy();
                let before = busy.range(..end).next_back();
                if before.is_none_or(|(_, other_end)| *other_end <= start) {
                    busy.insert(start, end);
                    return Claim { ranges: Arc::clone(self), start };
                }
            }
            self.changes.wait(seen).await;
        }
    }
}
