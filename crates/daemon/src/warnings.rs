// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Warnings about images that this process opens: in the log, and as the program words them.

use cowshed_image::Node;
use std::sync::OnceLock;

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
pub(crate) fn report(node: &Node) {
    for warning in node.warnings() {
        tracing::warn!(target: OPENING, node = node.name(), "{warning}");
        say(warning);
    }
}
