// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Observers of images that are found to be corrupt (the event BLOCK_IMAGE_CORRUPTED).

use super::{Attachment, Graph, nodes_below};
use cowshed_block::Error;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

/// An image that was found to be corrupt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Corruption {
    /// `node-name` of the image's node.
    pub node_name: String,
    /// What is wrong, for people.
    pub message: String,
    /// QEMU's sentence about this damage, where it has one.
    pub report: Option<String>,
    /// Host offset in bytes of what would have been hit, where one is known.
    pub offset: Option<u64>,
    /// How much would have been hit, in bytes, where that is known.
    pub size_bytes: Option<u64>,
    /// Nothing more is written to the image, and it is marked as corrupt where its version has a bit for that.
    pub fatal: bool,
}

impl Corruption {
    pub(crate) fn new(node_name: &str, error: &Error, fatal: bool) -> Self {
        Corruption {
            node_name: node_name.to_owned(),
            message: error.to_string(),
            report: error.report().map(str::to_owned),
            offset: None,
            size_bytes: None,
            fatal,
        }
    }

    /// The event's `msg`: QEMU's sentence, or ours where it has none.
    pub fn words(&self) -> &str {
        self.report.as_deref().unwrap_or(&self.message)
    }

    /// QEMU's line for its standard error. `None`: no harm is done, and QEMU says nothing of such damage.
    pub fn line(&self) -> Option<String> {
        match (self.fatal, &self.report) {
            (true, _) => Some(format!(
                "qcow2: Marking image as corrupt: {}; further corruption events will be suppressed",
                self.words()
            )),
            (false, Some(report)) => Some(format!(
                "qcow2: Image is corrupt: {report}; further non-fatal corruption events will be suppressed"
            )),
            (false, None) => None,
        }
    }
}

/// Told of corruptions of every graph, beside its observers.
static PRINTER: OnceLock<fn(&Corruption)> = OnceLock::new();

/// Has `print` told of every image of this process that is found to be corrupt. The first call counts.
pub fn print_corruptions(print: fn(&Corruption)) {
    let _ = PRINTER.set(print);
}

/// Told of corruptions, from any thread; must not wait.
pub type CorruptionObserver = Arc<dyn Fn(&Corruption) + Send + Sync>;

/// Whoever is told.
#[derive(Default)]
pub(super) struct Observers(RwLock<Vec<CorruptionObserver>>);

impl Graph {
    /// Has `observer` told of every image of this graph that is found to be corrupt, by whosever request: once for each
    /// image, and once more when it is marked as corrupt.
    pub fn observe_corruptions(&self, observer: CorruptionObserver) {
        self.observers.0.write().unwrap_or_else(PoisonError::into_inner).push(observer);
    }

    /// The exports whose requests reach this node, by their ids.
    pub fn exports_over(&self, node_name: &str) -> Vec<String> {
        let reaches = |attachment: &Arc<Attachment>| {
            attachment.is_export() && nodes_below(&attachment.node()).iter().any(|node| node.name() == node_name)
        };
        self.attachments().iter().filter(|attachment| reaches(attachment)).map(|one| one.name().to_owned()).collect()
    }

    pub(crate) fn report_corruption(&self, corruption: &Corruption) {
        if let Some(line) = corruption.line() {
            tracing::error!(node = corruption.node_name, reason = corruption.message, "{line}");
        }
        if let Some(print) = PRINTER.get() {
            print(corruption);
        }
        let observers = self.observers.0.read().unwrap_or_else(PoisonError::into_inner).clone();
        observers.iter().for_each(|observer| observer(corruption));
    }
}
