// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Observers of quorums whose copies fail or differ (the events QUORUM_REPORT_BAD and QUORUM_FAILURE).

use super::Graph;
use crate::node::QuorumReport;
use std::sync::{Arc, PoisonError, RwLock};

/// Told of a report and of its range in bytes, from any thread; must not wait.
pub type QuorumObserver = Arc<dyn Fn(&QuorumReport, u64, u64) + Send + Sync>;

/// All observers.
#[derive(Default)]
pub(super) struct QuorumObservers(RwLock<Vec<QuorumObserver>>);

impl Graph {
    /// Tells `observer` of the events of this graph's quorums.
    pub fn observe_quorums(&self, observer: QuorumObserver) {
        self.quorum_observers.0.write().unwrap_or_else(PoisonError::into_inner).push(observer);
    }

    pub(crate) fn report_quorum(&self, report: &QuorumReport, offset: u64, len: u64) {
        let observers = self.quorum_observers.0.read().unwrap_or_else(PoisonError::into_inner).clone();
        observers.iter().for_each(|observer| observer(report, offset, len));
    }
}
