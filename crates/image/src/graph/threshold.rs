// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Observers of writes that cross a node's threshold (the event BLOCK_WRITE_THRESHOLD).

use super::Graph;
use std::sync::{Arc, PoisonError, RwLock};

/// A write that ended behind the threshold of its node, which is off now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThresholdCrossed {
    /// `node-name` of the node.
    pub node_name: String,
    /// The threshold: an offset in bytes.
    pub threshold_bytes: u64,
    /// How far behind it the write ended, in bytes.
    pub exceeded_bytes: u64,
}

/// Told of crossed thresholds, from any thread; must not wait.
pub type ThresholdObserver = Arc<dyn Fn(&ThresholdCrossed) + Send + Sync>;

/// Whoever is told.
#[derive(Default)]
pub(super) struct Observers(RwLock<Vec<ThresholdObserver>>);

impl Graph {
    /// Has `observer` told when a write crosses the threshold of a node of this graph
    /// ([`crate::Node::set_write_threshold`]).
    pub fn observe_thresholds(&self, observer: ThresholdObserver) {
        self.threshold_observers.0.write().unwrap_or_else(PoisonError::into_inner).push(observer);
    }

    pub(crate) fn report_threshold(&self, crossed: &ThresholdCrossed) {
        let observers = self.threshold_observers.0.read().unwrap_or_else(PoisonError::into_inner).clone();
        observers.iter().for_each(|observer| observer(crossed));
    }
}
