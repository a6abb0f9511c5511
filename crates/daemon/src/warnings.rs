// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Warnings about images that this process opens: in the log, and as the program words them.

use cowshed_image::Node;
use cowshed_image::node::{ChildRole, StorageKind};
use std::sync::{Arc, OnceLock};

/// The log's name for these warnings, so that a program that prints them can leave them out there.
pub const OPENING: &str = "cowshed_daemon::opening";

/// Told of each warning, beside the log.
static PRINTER: OnceLock<fn(&str)> = OnceLock::new();

/// Passes each warning about an image that this process opens, and of its command line, to `print`. The first call counts.
pub fn print_warnings(print: fn(&str)) {
    let _ = PRINTER.set(print);
}

/// Passes a warning about a command line on.
pub(crate) fn say(warning: &str) {
    if let Some(print) = PRINTER.get() {
        print(warning);
    }
}

/// Tells the warnings of the node's opening.
pub(crate) fn report(node: &Arc<Node>) {
    for warning in node.warnings() {
        tracing::warn!(target: OPENING, node = node.name(), "{warning}");
        say(warning);
    }
    if let Some(target) = node.child(ChildRole::Target).filter(|_| node.copy_before_write().is_some()) {
        report_unit(&target);
    }
}

/// QEMU's warning about the target of a copy that has no unit of allocation to tell.
pub(crate) fn report_unit(target: &Arc<Node>) {
    let passes = |node: &Arc<Node>| node.is_filter() || node.is_raw();
    let below = |node: &Arc<Node>| node.child(ChildRole::File).filter(|_| passes(node));
    let bottom = std::iter::successors(Some(Arc::clone(target)), below).last();
    let kind = bottom.and_then(|bottom| bottom.storage_kind());
    if matches!(kind, Some(StorageKind::Export | StorageKind::Nothing)) {
        say(
            "The target block device doesn't provide information about the block size and it doesn't have a backing file. The \
             (default) block size of 65536 bytes is used. If the actual block size of the target exceeds this value, the backup \
             may be unusable",
        );
    }
}
