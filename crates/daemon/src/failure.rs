// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Errors of the lower layers on their way to a client.

use cowshed_qmp::QmpError;
use cowshed_types::{Error, ErrorKind};

/// QEMU's sentence; for a lock it names neither its holder nor the image that asks for it.
fn in_qemus_words(error: &Error) -> String {
    let sentence = error.sentence();
    let (mut frame, mut rest) = (String::new(), sentence.as_str());
    while let Some((words, below)) = FRAMES.iter().find_map(|(start, end, words)| {
        let (_, below) = rest.strip_prefix(start)?.split_once(end)?;
        Some((words, below))
    }) {
        frame += words;
        rest = below;
    }
    let lock = rest.split_once("failed to get ").or_else(|| rest.split_once("Failed to get "));
    if let Some((before, lock)) = lock
        && let Some((lock, _)) = lock.split_once(" lock")
    {
        return format!("{frame}{before}Failed to get {lock} lock");
    }
    let named = |(start, words): &(&str, &str)| {
        let (reason, file) = (rest.strip_prefix(start)?, error.file_name()?);
        Some(format!("{frame}{words} '{file}': {reason}"))
    };
    let named =
        [("could not open: ", "Could not open"), ("could not create: ", "Could not create")].iter().find_map(named);
    named.unwrap_or_else(|| format!("{frame}{rest}"))
}

/// The beginning of an error about a file that could not be opened, the end of that part, and QEMU's words for it.
const FRAMES: [(&str, &str, &str); 3] = [
    ("could not open the backing file of '", "': ", "Could not open backing file: "),
    ("could not open the data file of '", "': ", ""),
    ("Could not open backing file: ", "", "Could not open backing file: "),
];

/// An error of the lower layers as a command's, in QEMU's words. The log has the whole.
pub(crate) fn failed(error: Error) -> QmpError {
    let sentence = in_qemus_words(&error);
    if error.message() != sentence {
        tracing::info!(%error, "refused");
    }
    let is_locked = error.kind() == ErrorKind::Busy && sentence.ends_with(" lock");
    let failure = QmpError::generic(sentence).with_whole(format!("{error:#}"));
    match error.file_name().filter(|_| is_locked) {
        Some(file) => failure.with_hint(format!("Is another process using the image [{file}]?")),
        None => failure,
    }
}
