// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The counts of a run, by command.

use super::guest::lock;
use std::collections::BTreeMap;
use std::sync::Mutex;

/// Counts of commands, and the last refusal.
#[derive(Default)]
pub struct Tally {
    counts: Mutex<BTreeMap<String, Counts>>,
    last_refusal: Mutex<String>,
}

/// The numbers of a command's successes and refusals, and the reason of one refusal.
#[derive(Clone, Debug, Default)]
pub struct Counts {
    /// Carried out.
    pub done: u64,
    /// Refused.
    pub refused: u64,
    /// The last reason for a refusal.
    pub reason: String,
}

impl Tally {
    /// Counts a command.
    pub fn count(&self, name: &str, is_done: bool) {
        let mut counts = lock(&self.counts);
        let entry = counts.entry(name.to_owned()).or_default();
        if is_done {
            entry.done += 1;
        } else {
            entry.refused += 1;
        }
    }

    /// Counts a refusal and keeps its reason.
    pub fn refuse(&self, name: &str, reason: &str) {
        self.count(name, false);
        if let Some(entry) = lock(&self.counts).get_mut(name) {
            reason.clone_into(&mut entry.reason);
        }
        *lock(&self.last_refusal) = format!("{name}: {reason}");
    }

    /// The last refused command and its reason.
    pub fn last_refusal(&self) -> String {
        lock(&self.last_refusal).clone()
    }

    /// All counts by name.
    pub fn counts(&self) -> BTreeMap<String, Counts> {
        lock(&self.counts).clone()
    }
}
