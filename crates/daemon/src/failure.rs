// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Errors of the lower layers on their way to a client.

use cowshed_block::Error;
use cowshed_qmp::QmpError;

/// QEMU's sentence; of a lock it says neither whose it is nor which image wants it.
fn in_qemus_words(error: &Error) -> String {
    const LOCK: &str = "failed to get ";
    let sentence = error.sentence();
    if let Some((before, behind)) = sentence.split_once(LOCK)
        && let Some((lock, _)) = behind.split_once(" lock")
    {
        let before = if before.contains("backing file") { "Could not open backing file: " } else { before };
        return format!("{before}Failed to get {lock} lock");
    }
    match (sentence.strip_prefix("could not open: "), error.file_name()) {
        (Some(reason), Some(file)) => format!("Could not open '{file}': {reason}"),
        _ => sentence,
    }
}

/// An error of the lower layers as a command's, in QEMU's words. The log has the whole.
pub(crate) fn failed(error: Error) -> QmpError {
    let sentence = in_qemus_words(&error);
    if error.message() != sentence {
        tracing::info!(%error, "refused");
    }
    QmpError::generic(sentence).with_whole(error.to_string())
}
