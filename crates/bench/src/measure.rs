// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Runs two commands in turns and keeps the costs of each.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use wait4::Wait4;

/// The time and memory of one run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sample {
    /// From start to exit.
    pub wall: Duration,
    /// User and system time of all threads.
    pub cpu: Duration,
    /// Peak resident memory in bytes (at least this program's own, a few MiB: the child starts as its copy).
    pub peak_bytes: u64,
}

/// The samples of both sides, index by index taken right after one another.
#[derive(Clone, Debug, Default)]
pub struct Pairs {
    /// Ours.
    pub ours: Vec<Sample>,
    /// The other's.
    pub theirs: Vec<Sample>,
}

/// A command line, made anew for each run.
pub type Recipe<'a> = &'a dyn Fn() -> Result<Command, String>;

/// Runs both sides `rounds` times: ours first in even rounds, theirs first in odd ones. One run of each comes before,
/// isn't counted, and warms the page cache.
pub fn alternate(rounds: usize, ours: Recipe, theirs: Recipe) -> Result<Pairs, String> {
    once(ours()?)?;
    once(theirs()?)?;
    let mut pairs = Pairs::default();
    for round in 0..rounds {
        if round % 2 == 0 {
            pairs.ours.push(once(ours()?)?);
            pairs.theirs.push(once(theirs()?)?);
        } else {
            pairs.theirs.push(once(theirs()?)?);
            pairs.ours.push(once(ours()?)?);
        }
    }
    Ok(pairs)
}

/// Runs a command to its end; the error of a failure has its output.
pub fn once(mut command: Command) -> Result<Sample, String> {
    let text = format!("{command:?}");
    let log = tempfile::tempfile().map_err(|e| e.to_string())?;
    let errors = log.try_clone().map_err(|e| e.to_string())?;
    let started = Instant::now();
    let child = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(errors)
        .spawn()
        .map_err(|e| format!("could not run {text}: {e}"))?;
    let used = child.wait4().map_err(|e| format!("could not wait for {text}: {e}"))?;
    let wall = started.elapsed();
    if !used.status.success() {
        return Err(format!("{text}: {}: {}", used.status, tail_of(log)));
    }
    Ok(Sample { wall, cpu: used.rusage.utime + used.rusage.stime, peak_bytes: used.rusage.maxrss })
}

fn tail_of(mut log: std::fs::File) -> String {
    use std::io::{Read, Seek};
    let mut text = String::new();
    // A log that can't be read adds nothing to the error that is being reported.
    let _ = log.rewind().and_then(|()| log.read_to_string(&mut text));
    text.lines().last().unwrap_or_default().to_owned()
}

/// The middle value (of an even number, the mean of the two in the middle); 0 for none.
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    match (values.len(), values.len() / 2) {
        (0, _) => 0.0,
        (count, middle) if count % 2 == 1 => values[middle],
        (_, middle) => (values[middle - 1] + values[middle]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(median([3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median([4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median([]), 0.0);
    }

    #[test]
    fn a_failing_command_is_an_error() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo broken >&2; exit 3"]);
        assert!(once(command).is_err_and(|message| message.contains("broken")));
    }

    #[test]
    fn a_run_has_time_and_memory() {
        let mut command = Command::new("sleep");
        command.arg("0.05");
        let sample = once(command).expect("sleep runs");
        assert!(sample.wall >= Duration::from_millis(50) && sample.peak_bytes > 100_000, "{sample:?}");
    }
}
