// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The words of a process about its requests until it was killed, and the contents that its image may have then.

use crate::model::{Model, RequestId};
use crate::operations::{Op, Step};
use std::collections::HashMap;

/// Follows the lines of a [`crate::runner::Journal`].
pub struct Follower {
    model: Model,
    lines: usize,
    open: HashMap<u64, (Step, RequestId)>,
    /// Flushes that were acknowledged.
    pub flushes: u64,
    /// Requests that failed, and how.
    pub failures: Vec<String>,
}

impl Follower {
    /// For a disk that holds `content`, all of it durable.
    pub fn new(content: Vec<u8>) -> Self {
        Follower { model: Model::new(content), lines: 0, open: HashMap::new(), flushes: 0, failures: Vec::new() }
    }

    /// Takes the next line.
    ///
    /// # Errors
    /// A line that is none of a journal.
    pub fn follow(&mut self, line: &str) -> Result<(), String> {
        self.lines += 1;
        let at = self.lines;
        let (verb, rest) = line.split_once(' ').ok_or_else(|| format!("{line:?}: no line of a journal"))?;
        let (number, rest) = rest.split_once(' ').unwrap_or((rest, ""));
        let number: u64 = number.parse().map_err(|_| format!("{line:?}: no number"))?;
        match verb {
            "begin" => {
                let step: Step = rest.parse()?;
                let request = match step.op {
                    Op::Write { offset, len, stamp } | Op::Compressed { offset, len, stamp } => {
                        self.model.begin_write(offset, len, stamp, at)
                    }
                    Op::Zero { offset, len, .. } => self.model.begin_zero(offset, len, at),
                    Op::Discard { offset, len } => self.model.begin_discard(offset, len, at),
                    Op::Resize { bytes } => self.model.begin_resize(bytes, at),
                    Op::Flush => self.model.begin_flush(at),
                    Op::Read { .. } | Op::Snapshot => return Ok(()),
                };
                self.open.insert(number, (step, request));
            }
            "end" => match self.open.remove(&number) {
                Some((Step { op: Op::Flush, .. }, request)) => {
                    self.flushes += 1;
                    self.model.end_flush(request, at);
                }
                Some((Step { op: Op::Resize { .. }, .. }, request)) => self.model.end_resize(request, at),
                Some((_, request)) => self.model.end(request, at),
                None => return Err(format!("{line:?}: never begun")),
            },
            "failed" => self.failures.push(rest.to_owned()),
            _ => return Err(format!("{line:?}: no line of a journal")),
        }
        Ok(())
    }

    /// Checks the data of the whole disk after the process is gone.
    ///
    /// # Errors
    /// The first byte or size that isn't allowed.
    pub fn check(&self, content: &[u8]) -> Result<(), String> {
        let position = self.lines + 1;
        self.model.check_size_after_cut(position, content.len() as u64)?;
        self.model.check_after_cut(position, 0, content)
    }
}
