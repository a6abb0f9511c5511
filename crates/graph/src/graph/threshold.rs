// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Observers of writes that cross a node's threshold (the event BLOCK_WRITE_THRESHOLD).

use super::Graph;
use crate::node::ThresholdCrossed;
use std::sync::{Arc, PoisonError, RwLock};

/// Told of crossed thresholds, from any thread; must not wait.
pub type ThresholdObserver = Arc<dyn Fn(&ThresholdCrossed) + Send + Sync>;

/// The observers.
#[derive(Default)]
pub(super) struct ThresholdObservers(RwLock<Vec<ThresholdObserver>>);

impl Graph {
    /// Calls `observer` when a write crosses the threshold of a node of this graph
    /// ([`crate::Node::set_write_threshold`]).
    pub fn observe_thresholds(&self, observer: ThresholdObserver) {
        self.threshold_observers.0.write().unwrap_or_else(PoisonError::into_inner).push(observer);
    }

    pub(crate) fn report_threshold(&self, crossed: &ThresholdCrossed) {
        let observers = self.threshold_observers.0.read().unwrap_or_else(PoisonError::into_inner).clone();
        observers.iter().for_each(|observer| observer(crossed));
    }
}
