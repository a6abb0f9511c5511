// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Arguments that have passed the schema, and errors on their way to a client.

use cowshed_block::Error;
use cowshed_qmp::{QmpError, QmpResult};
use serde_json::{Map, Value};

/// The arguments of one call. What the schema demands is there, with the type that it says.
#[derive(Clone, Debug, Default)]
pub(crate) struct Arguments(Map<String, Value>);

impl Arguments {
    pub fn new(map: Map<String, Value>) -> Arguments {
        Arguments(map)
    }

    /// A text that must be there.
    pub fn text(&self, key: &str) -> &str {
        self.maybe_text(key).unwrap_or_default()
    }

    /// A text that may be missing.
    pub fn maybe_text(&self, key: &str) -> Option<&str> {
        self.0.get(key).and_then(Value::as_str)
    }

    /// A flag; `default` when it is missing.
    pub fn flag(&self, key: &str, default: bool) -> bool {
        self.0.get(key).and_then(Value::as_bool).unwrap_or(default)
    }

    /// A number from 0 on; `None` when it is missing.
    pub fn number(&self, key: &str) -> QmpResult<Option<u64>> {
        match self.0.get(key) {
            None => Ok(None),
            Some(value) => match value.as_u64() {
                Some(number) => Ok(Some(number)),
                None => Err(QmpError::generic(format!("Parameter '{key}' expects a number of at least 0"))),
            },
        }
    }

    /// An object that may be missing.
    pub fn object(&self, key: &str) -> Option<&Map<String, Value>> {
        self.0.get(key).and_then(Value::as_object)
    }

    /// Any value.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.0.get(key)
    }

    /// All of them.
    pub fn into_map(self) -> Map<String, Value> {
        self.0
    }
}

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
