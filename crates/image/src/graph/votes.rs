// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Observers of quorums whose copies fail or differ (the events QUORUM_REPORT_BAD and QUORUM_FAILURE).

use super::Graph;
use cowshed_block::Errno;
use std::sync::{Arc, PoisonError, RwLock};

/// Work of a quorum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuorumWork {
    /// A read.
    Read,
    /// A write, also of zeroes.
    Write,
    /// A flush.
    Flush,
}

/// Something that a quorum met.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum QuorumReport {
    /// One copy failed, or was outvoted.
    Bad {
        /// `node-name` of the copy.
        node_name: String,
        /// The work it was asked for.
        work: QuorumWork,
        /// Why it failed; `None`: it was outvoted.
        error: Option<Errno>,
    },
    /// Too few copies have done it or agree.
    Failure {
        /// `node-name` of the quorum.
        node_name: String,
    },
}

/// Told of a report and of its range in bytes, from any thread; must not wait.
pub type QuorumObserver = Arc<dyn Fn(&QuorumReport, u64, u64) + Send + Sync>;

/// All observers.
#[derive(Default)]
pub(super) struct Observers(RwLock<Vec<QuorumObserver>>);

impl Graph {
    /// Has `observer` told what the quorums of this graph meet.
    pub fn observe_quorums(&self, observer: QuorumObserver) {
        self.quorum_observers.0.write().unwrap_or_else(PoisonError::into_inner).push(observer);
    }

    pub(crate) fn report_quorum(&self, report: &QuorumReport, offset: u64, len: u64) {
        let observers = self.quorum_observers.0.read().unwrap_or_else(PoisonError::into_inner).clone();
        observers.iter().for_each(|observer| observer(report, offset, len));
    }
}
