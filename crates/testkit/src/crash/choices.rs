// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The parts of the open changes that a power cut keeps: all combinations when they are few, else the telling ones.

use super::CrashPlan;
use cowshed_simulator::{Choice, Cut, Rng};

/// Makes the choices for one cut.
pub(super) struct Chooser {
    /// Number of independent parts of each change.
    atoms: Vec<usize>,
    ops: Vec<u64>,
}

impl Chooser {
    pub fn new(cut: &Cut) -> Self {
        let changes = cut.changes();
        Chooser {
            atoms: changes.iter().map(|change| change.atoms(cut.sector_bytes()).len()).collect(),
            ops: changes.iter().map(|change| change.op()).collect(),
        }
    }

    /// The choices to try, and whether they are all that there are. `newest`: the change that has just begun; states
    /// without it were possible before.
    pub fn tries(&self, plan: &CrashPlan, newest: Option<u64>, rng: &mut Rng) -> (Vec<Vec<Choice>>, bool) {
        let newest = newest.and_then(|op| self.ops.iter().position(|other| *other == op));
        let open: usize = self.atoms.iter().sum();
        if open <= plan.exhaustive_atoms as usize {
            return (self.exhaustive(open, newest), true);
        }
        let tries = match newest {
            Some(newest) => self.around_change(newest, plan.per_change, rng),
            None => self.around_barrier(plan.per_barrier, rng),
        };
        (tries, false)
    }

    fn exhaustive(&self, open: usize, newest: Option<usize>) -> Vec<Vec<Choice>> {
        let combinations = 0u64..1 << open;
        let choices = combinations.map(|bits| {
            let mut next = 0;
            let parts = self.atoms.iter().map(|&count| {
                let parts = (next..next + count).map(|bit| bits >> bit & 1 == 1).collect();
                next += count;
                Choice::Parts(parts)
            });
            parts.collect::<Vec<_>>()
        });
        let with_newest = |choices: &Vec<Choice>| match newest.map(|index| &choices[index]) {
            Some(Choice::Parts(parts)) => parts.iter().any(|kept| *kept),
            _ => true,
        };
        choices.filter(with_newest).collect()
    }

    fn all(&self, choice: &Choice) -> Vec<Choice> {
        vec![choice.clone(); self.atoms.len()]
    }

    fn around_barrier(&self, count: usize, rng: &mut Rng) -> Vec<Vec<Choice>> {
        let mut tries = vec![self.all(&Choice::Nothing), self.all(&Choice::Everything)];
        let mut singles: Vec<Vec<Choice>> = Vec::new();
        for index in 0..self.atoms.len() {
            let mut missing = self.all(&Choice::Everything);
            missing[index] = Choice::Nothing;
            let mut alone = self.all(&Choice::Nothing);
            alone[index] = Choice::Everything;
            singles.extend([missing, alone]);
        }
        rng.shuffle(&mut singles);
        // A third of the tries at least goes to mixtures.
        singles.truncate(count * 2 / 3);
        tries.extend(singles);
        while tries.len() < count {
            tries.push(self.mixture(rng));
        }
        tries
    }

    fn around_change(&self, newest: usize, count: usize, rng: &mut Rng) -> Vec<Vec<Choice>> {
        (0..count)
            .map(|number| {
                let mut choices = match number % 3 {
                    0 => self.all(&Choice::Nothing),
                    1 => self.mixture(rng),
                    _ => self.all(&Choice::Everything),
                };
                choices[newest] = if rng.chance(1, 3) { torn(self.atoms[newest], rng) } else { Choice::Everything };
                choices
            })
            .collect()
    }

    /// A random subset: mostly kept, mostly lost, a prefix in time, or anything; sometimes torn.
    fn mixture(&self, rng: &mut Rng) -> Vec<Choice> {
        let keep_of_16 = [2, 8, 14][rng.index(3)];
        let prefix = rng.chance(1, 4).then(|| rng.index(self.atoms.len() + 1));
        let choices = self.atoms.iter().enumerate().map(|(index, &atoms)| {
            let kept = match prefix {
                Some(end) => index < end,
                None => rng.chance(keep_of_16, 16),
            };
            match (kept, rng.chance(1, 6)) {
                (_, true) => torn(atoms, rng),
                (true, false) => Choice::Everything,
                (false, false) => Choice::Nothing,
            }
        });
        choices.collect()
    }
}

/// Some of `atoms` parts: each by chance, all up to one, or all from one on.
fn torn(atoms: usize, rng: &mut Rng) -> Choice {
    let at = rng.index(atoms + 1);
    let parts = match rng.below(3) {
        0 => (0..atoms).map(|index| index < at).collect(),
        1 => (0..atoms).map(|index| index >= at).collect(),
        _ => (0..atoms).map(|_| rng.chance(1, 2)).collect(),
    };
    Choice::Parts(parts)
}
