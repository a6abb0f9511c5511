// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Observers of images that are found to be corrupt (the event BLOCK_IMAGE_CORRUPTED).

use super::{Attachment, Graph, nodes_below};
use crate::node::Corruption;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

/// The log's name for corruptions, so that a program that prints them can leave them out there.
pub const CORRUPTION: &str = "cowshed_image::corruption";

/// Told of corruptions of every graph, beside its observers.
static PRINTER: OnceLock<fn(&Corruption)> = OnceLock::new();

/// Passes every image of this process that is found to be corrupt to `print`. The first call counts.
pub fn print_corruptions(print: fn(&Corruption)) {
    let _ = PRINTER.set(print);
}

/// Told of corruptions, from any thread; must not wait.
pub type CorruptionObserver = Arc<dyn Fn(&Corruption) + Send + Sync>;

/// The observers.
#[derive(Default)]
pub(super) struct CorruptionObservers(RwLock<Vec<CorruptionObserver>>);

impl Graph {
    /// Tells `observer` of every image of this graph that any request finds to be corrupt. It hears of each image once,
    /// and once more when the image is marked as corrupt.
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
            tracing::error!(target: CORRUPTION, node = corruption.node_name, reason = corruption.message, "{line}");
        }
        if let Some(print) = PRINTER.get() {
            print(corruption);
        }
        let observers = self.observers.0.read().unwrap_or_else(PoisonError::into_inner).clone();
        observers.iter().for_each(|observer| observer(corruption));
    }
}
