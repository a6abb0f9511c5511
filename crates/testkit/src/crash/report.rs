// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The tries of an exploration, and its findings.

use cowshed_simulator::{Choice, CrashState, Cut};
use std::collections::HashSet;
use std::fmt;

/// The states that were tried.
#[derive(Clone, Debug, Default)]
pub struct CrashReport {
    /// Points at which the power was cut.
    pub cuts: u64,
    /// Points of which everything possible was tried.
    pub exhaustive_cuts: u64,
    /// Disks made.
    pub tried: u64,
    /// Hashes of the contents of the disks, each once.
    pub contents: HashSet<u64>,
}

impl CrashReport {
    /// Number of disks with different contents.
    pub fn distinct(&self) -> u64 {
        self.contents.len() as u64
    }

    /// Adds another run's numbers.
    pub fn add(&mut self, other: &CrashReport) {
        self.cuts += other.cuts;
        self.exhaustive_cuts += other.exhaustive_cuts;
        self.tried += other.tried;
        self.contents.extend(&other.contents);
    }
}

impl fmt::Display for CrashReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CrashReport { cuts, exhaustive_cuts, tried, .. } = self;
        write!(f, "{} distinct states of {tried} tried at {cuts} cuts ({exhaustive_cuts} completely)", self.distinct())
    }
}

/// A disk that was found wrong.
#[derive(Clone, Debug)]
pub struct CrashFailure {
    /// The complaint about it.
    pub complaint: String,
    /// Entries of the log before the cut.
    pub position: usize,
    /// The changes that the cut has lost, in whole or in part, a line each; everything else is there.
    pub lost: Vec<String>,
    /// The disk.
    pub state: CrashState,
    /// The states that were tried until then.
    pub report: CrashReport,
}

impl fmt::Display for CrashFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.complaint)?;
        writeln!(f, "  after a power cut at log entry {} that lost:", self.position)?;
        self.lost.iter().try_for_each(|line| writeln!(f, "    {line}"))?;
        write!(f, "  found after {}", self.report)
    }
}

pub(super) fn describe(cut: &Cut, choices: &[Choice]) -> Vec<String> {
    let names = cut.names();
    let lines = cut.changes().iter().zip(choices).filter_map(|(change, choice)| {
        let lost = match choice {
            Choice::Everything => return None,
            Choice::Nothing => "all".to_owned(),
            Choice::Parts(parts) if parts.iter().all(|kept| *kept) => return None,
            Choice::Parts(parts) => {
                let atoms = change.atoms(cut.sector_bytes());
                let lost: Vec<_> = atoms.iter().zip(parts).filter(|(_, kept)| !**kept).map(|(atom, _)| atom).collect();
                format!("{lost:x?}")
            }
        };
        let state = if change.is_in_flight() { " (under way)" } else { "" };
        Some(format!("#{} {}: {:?}{state}: {lost}", change.op(), names[change.file()], change.change()))
    });
    lines.collect()
}
