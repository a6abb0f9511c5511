// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The history of a disk, line by line with the time: for the search after a failure.

use super::guest::lock;
use std::sync::Mutex;
use std::time::Instant;

/// Lines, each with the seconds since the start of the life.
pub struct Trace {
    began: Instant,
    lines: Mutex<Vec<String>>,
}

impl Trace {
    /// Without a line yet.
    pub fn new() -> Trace {
        Trace { began: Instant::now(), lines: Mutex::default() }
    }

    /// Adds a line.
    pub fn note(&self, text: &str) {
        let line = format!("{:10.6} {text}\n", self.began.elapsed().as_secs_f64());
        lock(&self.lines).push(line);
    }

    /// All lines.
    pub fn text(&self) -> String {
        lock(&self.lines).concat()
    }
}
