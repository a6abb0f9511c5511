// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The effect of one option: the same work without it and with it, in turns. Our program runs it, and QEMU's where it
//! has the option. The figures of docs/measurements/options.md.

mod commands;
mod served;

use crate::Settings;
use crate::measure::median;
use crate::reads::Side;
use crate::table::Row;

/// The costs of one run.
#[derive(Clone, Copy, Debug)]
pub struct Taken {
    /// For one request of a load, or for a whole command; in seconds.
    pub seconds: f64,
    /// User and system time for the same, in seconds.
    pub cpu_seconds: f64,
    /// Peak resident memory in bytes, or resident memory at the end, by the row's name.
    pub peak_bytes: u64,
    /// The bytes that the disk was given to write; `None` without writes.
    pub written_bytes: Option<f64>,
    /// The space of the image on disk afterwards, in bytes; `None` where it doesn't change.
    pub size_bytes: Option<u64>,
}

/// Runs of one side, index by index of the same round.
#[derive(Clone, Debug, Default)]
pub struct Turns {
    /// Without the option, or with its first value.
    pub off: Vec<Taken>,
    /// With it, or with its second value.
    pub on: Vec<Taken>,
}

impl Turns {
    /// The middle of without / with of each round.
    pub fn ratio(&self, of: impl Fn(&Taken) -> f64) -> (f64, Vec<f64>) {
        let each: Vec<f64> = self.off.iter().zip(&self.on).map(|(off, on)| of(off) / of(on).max(1e-12)).collect();
        (median(each.iter().copied()), each)
    }

    /// The medians without and with it.
    pub fn medians(&self, of: impl Fn(&Taken) -> f64) -> [f64; 2] {
        [&self.off, &self.on].map(|runs| median(runs.iter().map(&of)))
    }
}

/// Every option.
pub fn run(settings: &Settings) -> Result<Vec<Row>, String> {
    let mut rows = served::rows(settings)?;
    rows.extend(commands::rows(settings)?);
    Ok(rows)
}

fn is_wanted(settings: &Settings, name: &str) -> bool {
    settings.only.as_ref().is_none_or(|only| name.contains(only.as_str()))
}

/// Runs both values on each side, `rounds` times; the first side changes from round to round. `once` gets the side, and
/// whether the option is on.
fn in_turns(
    settings: &Settings,
    has_theirs: bool,
    mut once: impl FnMut(Side, bool) -> Result<Taken, String>,
) -> Result<(Turns, Option<Turns>), String> {
    let mut sides = vec![(Side::Ours, Turns::default())];
    sides.extend(has_theirs.then(|| (Side::Theirs, Turns::default())));
    let count = 2 * sides.len();
    for round in 0..settings.rounds {
        for turn in 0..count {
            let index = (round + turn) % count;
            let (side, turns) = &mut sides[index / 2];
            let is_on = index % 2 == 1;
            let runs = if is_on { &mut turns.on } else { &mut turns.off };
            runs.push(once(*side, is_on)?);
        }
    }
    let mut turns = sides.into_iter().map(|(_, turns)| turns);
    Ok((turns.next().unwrap_or_default(), turns.next()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_values_run_in_turns_on_each_side() {
        let settings = Settings { rounds: 3, ..crate::tests::settings() };
        let mut order = Vec::new();
        let taken = |seconds| Taken { seconds, cpu_seconds: 1.0, peak_bytes: 1, written_bytes: None, size_bytes: None };
        let (ours, theirs) = in_turns(&settings, true, |side, is_on| {
            order.push((side, is_on));
            Ok(taken(if is_on { 1.0 } else { 2.0 }))
        })
        .expect("the runs");
        assert_eq!(order[..2], [(Side::Ours, false), (Side::Ours, true)]);
        assert_eq!(order[4..6], [(Side::Ours, true), (Side::Theirs, false)]);
        assert_eq!((ours.off.len(), ours.on.len()), (3, 3));
        assert_eq!(ours.ratio(|taken| taken.seconds).0, 2.0);
        assert_eq!(theirs.map(|turns| turns.medians(|taken| taken.seconds)), Some([2.0, 1.0]));
    }
}
