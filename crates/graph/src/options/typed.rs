// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Checked options as the structs that drivers take. Everything here has passed the schema, so a key that is there has
//! its type from the table.

use super::BlockdevOptions;
use cowshed_storage::{IoEngine, Locking};
use cowshed_types::{Error, Result};
use serde_json::Value;

impl BlockdevOptions {
    /// The value of a key that is on or off, where it is given.
    pub fn flag(&self, key: &str) -> Option<bool> {
        self.get(key).and_then(Value::as_bool)
    }

    /// The value of a key that is a number, where it is given.
    pub fn number(&self, key: &str) -> Option<u64> {
        self.get(key).and_then(Value::as_u64)
    }

    /// All texts in it.
    pub(crate) fn texts(&self) -> Vec<String> {
        fn collect(value: &Value, found: &mut Vec<String>) {
            match value {
                Value::String(text) => found.push(text.clone()),
                Value::Array(list) => list.iter().for_each(|one| collect(one, found)),
                Value::Object(map) => map.values().for_each(|one| collect(one, found)),
                _ => {}
            }
        }
        let mut found = Vec::new();
        self.iter().for_each(|(_, value)| collect(value, &mut found));
        found
    }
}

/// Options of `file` and `host_device`.
#[derive(Debug)]
pub(crate) struct FileOptions {
    pub filename: String,
    pub engine: IoEngine,
    pub locking: Locking,
}

impl FileOptions {
    pub(crate) fn new(options: &BlockdevOptions) -> FileOptions {
        FileOptions {
            filename: options.text("filename").unwrap_or_default().to_owned(),
            engine: match options.text("aio") {
                Some("threads") => IoEngine::Threads,
                Some("io_uring") => IoEngine::IoUring,
                // Linux' older asynchronous interface has nothing that io_uring lacks.
                _ => IoEngine::Auto,
            },
            locking: match options.text("locking") {
                Some("on") => Locking::On,
                Some("off") => Locking::Off,
                _ => Locking::Auto,
            },
        }
    }
}

/// Refuses `aio=native` of a file that goes through the page cache (not `direct`), in QEMU's words.
pub(crate) fn check_aio(options: &BlockdevOptions, direct: bool) -> Result<()> {
    if options.text("aio") == Some("native") && !direct {
        let message = "aio=native was specified, but it requires cache.direct=on, which was not specified.";
        return Err(Error::invalid_argument(message));
    }
    Ok(())
}

/// Options of `null-co`.
#[derive(Debug)]
pub(crate) struct NullOptions {
    pub size: u64,
    pub latency_ns: u64,
    /// Whether a map shows zeroes. Reads give zeroes in any case.
    pub read_zeroes: bool,
}

impl NullOptions {
    pub(crate) fn new(options: &BlockdevOptions) -> NullOptions {
        NullOptions {
            size: options.number("size").unwrap_or(1 << 30),
            latency_ns: options.number("latency-ns").unwrap_or(0),
            read_zeroes: options.flag("read-zeroes").unwrap_or(true),
        }
    }
}
