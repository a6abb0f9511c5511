// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The crash enumerator: cuts the power of a simulated run everywhere, and has the caller look at each disk that is
//! left.
//!
//! A cut can fall between any two entries of the log. After a barrier, and where the guest was promised something, all
//! kinds of subsets of the changes since are tried. Where a change begins, subsets with it in whole and in part are
//! tried. While only few sectors are open, everything that one cut can leave is tried.

mod choices;
mod report;

pub use report::{CrashFailure, CrashReport};

use choices::Chooser;
use cowshed_simulator::{Choice, CrashState, Cut, Event, Replay, Rng, Trace};
use std::collections::HashSet;

/// The extent of the search.
#[derive(Clone, Debug)]
pub struct CrashPlan {
    /// Where chance starts from.
    pub seed: u64,
    /// Stop after this many states with contents not seen before.
    pub max_distinct: usize,
    /// States tried after each barrier and each promise.
    pub per_barrier: usize,
    /// States tried where a change begins.
    pub per_change: usize,
    /// With this many independent parts or fewer, every combination is tried.
    pub exhaustive_atoms: u32,
}

impl CrashPlan {
    /// Enough to find an ordering slip in a run of a few hundred operations.
    pub fn new(seed: u64) -> Self {
        CrashPlan { seed, max_distinct: usize::MAX, per_barrier: 40, per_change: 3, exhaustive_atoms: 6 }
    }
}

/// A disk after a power cut, and its history.
pub struct CrashCase<'a> {
    /// The disk.
    pub state: &'a CrashState,
    /// Entries of the log before the cut.
    pub position: usize,
    /// Number of this state among the distinct ones, from 0: for looking closer at some only.
    pub number: usize,
}

/// Tries power cuts all over `trace`. `verify` looks at a disk and returns its fault. The first complaint ends the
/// search, with the smallest deviation from a complete disk that still draws one.
///
/// # Errors
/// The complaint, with the cut and the changes lost.
pub fn explore(
    trace: &Trace,
    plan: &CrashPlan,
    mut verify: impl FnMut(&CrashCase<'_>) -> Result<(), String>,
) -> Result<CrashReport, Box<CrashFailure>> {
    let mut search =
        Search { plan, rng: Rng::new(plan.seed), seen: HashSet::new(), promises: 0, report: CrashReport::default() };
    let mut replay = Replay::new(trace);
    // The disk before the first entry must be right too.
    search.try_cut(&replay.cut(), None, &mut verify)?;
    while let Some(event) = replay.advance() {
        let newest = match event {
            Event::Submitted { op, .. } => Some(*op),
            Event::Mark(_) => {
                search.promises += 1;
                None
            }
            Event::SyncDone { .. } | Event::SyncFailed { .. } => None,
            // The possible states of the disk are the same as before.
            Event::Completed { .. } | Event::SyncIssued { .. } | Event::FolderSynced => continue,
        };
        search.try_cut(&replay.cut(), newest, &mut verify)?;
        if search.report.contents.len() >= plan.max_distinct {
            break;
        }
    }
    search.try_cut(&replay.cut(), None, &mut verify)?;
    Ok(search.report)
}

struct Search<'a> {
    plan: &'a CrashPlan,
    rng: Rng,
    /// Contents together with the number of promises that they were held against.
    seen: HashSet<(u128, u64)>,
    promises: u64,
    report: CrashReport,
}

impl Search<'_> {
    fn try_cut(
        &mut self,
        cut: &Cut,
        newest: Option<u64>,
        verify: &mut impl FnMut(&CrashCase<'_>) -> Result<(), String>,
    ) -> Result<(), Box<CrashFailure>> {
        self.report.cuts += 1;
        let chooser = Chooser::new(cut);
        let (tries, exhaustive) = chooser.tries(self.plan, newest, &mut self.rng);
        self.report.exhaustive_cuts += u64::from(exhaustive);
        for choices in tries {
            self.report.tried += 1;
            let state = cut.state(&choices);
            let hash = state.hash();
            if !self.seen.insert((hash, self.promises)) {
                continue;
            }
            self.report.contents.insert(hash as u64);
            let number = self.report.contents.len() - 1;
            let case = CrashCase { state: &state, position: cut.position(), number };
            if let Err(complaint) = verify(&case) {
                return Err(self.failure(cut, choices, complaint, verify));
            }
        }
        Ok(())
    }

    /// Gives lost changes back, one after the other, as long as the complaint stays.
    fn failure(
        &mut self,
        cut: &Cut,
        mut choices: Vec<Choice>,
        mut complaint: String,
        verify: &mut impl FnMut(&CrashCase<'_>) -> Result<(), String>,
    ) -> Box<CrashFailure> {
        let mut fails = |choices: &[Choice]| {
            let state = cut.state(choices);
            verify(&CrashCase { state: &state, position: cut.position(), number: 0 }).err()
        };
        for index in 0..choices.len() {
            for simpler in [Choice::Everything, Choice::Nothing] {
                if choices[index] == simpler {
                    break;
                }
                let before = std::mem::replace(&mut choices[index], simpler);
                match fails(&choices) {
                    Some(message) => {
                        complaint = message;
                        break;
                    }
                    None => choices[index] = before,
                }
            }
        }
        let state = cut.state(&choices);
        Box::new(CrashFailure {
            complaint,
            position: cut.position(),
            lost: report::describe(cut, &choices),
            state,
            report: self.report.clone(),
        })
    }
}
