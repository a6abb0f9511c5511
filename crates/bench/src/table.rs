// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Results as a markdown table.

use crate::Settings;
use crate::measure::{Pairs, Sample, median};
use std::process::Command;
use std::time::Duration;

/// One line of the table.
pub struct Row {
    /// What was done.
    pub name: String,
    /// What the issue wants, in words; empty where there is no target.
    pub target: &'static str,
    /// The measurements.
    pub result: Outcome,
}

/// What a row shows.
pub enum Outcome {
    /// Two commands side by side, with the sizes of what they wrote (0: nothing).
    Pair {
        /// Times and memory.
        pairs: Pairs,
        /// Bytes that our run wrote.
        our_bytes: u64,
        /// Bytes that theirs wrote.
        their_bytes: u64,
    },
    /// CPU time per request through the library and on the raw file.
    Requests {
        /// Nanoseconds through the library, one value a round.
        library_ns: Vec<f64>,
        /// Nanoseconds on the file.
        file_ns: Vec<f64>,
    },
}

/// The whole report.
pub fn render(settings: &Settings, rows: &[Row]) -> String {
    let mut text = format!("cowshed against {}\n", version(settings));
    text += "\n| case | cowshed: wall, CPU, peak | qemu-img: wall, CPU, peak | wall ratio (min–max) | CPU ratio | size | target |\n";
    text += "|---|---|---|---|---|---|---|\n";
    for row in rows {
        text += &format!("| {} | {} | {} |\n", row.name, line(&row.result), row.target);
    }
    text += &format!(
        "\nMedians of {} rounds in turns; a ratio is theirs / ours of the same round, so above 1 we are faster.",
        settings.rounds
    );
    text
}

fn version(settings: &Settings) -> String {
    let output = Command::new(&settings.qemu).arg("--version").output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    text.lines().next().unwrap_or("an unknown qemu-img").to_owned()
}

fn line(result: &Outcome) -> String {
    match result {
        Outcome::Pair { pairs, our_bytes, their_bytes } => {
            let size = match (*our_bytes, *their_bytes) {
                (0, _) | (_, 0) => "–".to_owned(),
                (ours, theirs) => format!("{:.1} % of theirs", 100.0 * ours as f64 / theirs as f64),
            };
            let (wall, cpu) = (ratios(pairs, |s| s.wall), ratios(pairs, |s| s.cpu));
            let (least, most) = wall.iter().fold((f64::MAX, 0.0_f64), |(l, m), r| (l.min(*r), m.max(*r)));
            let (wall, cpu) = (median(wall.iter().copied()), median(cpu));
            let sides = format!("{} | {}", summary(&pairs.ours), summary(&pairs.theirs));
            format!("{sides} | **{wall:.2}** ({least:.2}–{most:.2}) | {cpu:.2} | {size}")
        }
        Outcome::Requests { library_ns, file_ns } => {
            let (library, file) = (median(library_ns.iter().copied()), median(file_ns.iter().copied()));
            let ratio = median(library_ns.iter().zip(file_ns).map(|(library, file)| library / file));
            format!("{library:.0} ns a request | raw file: {file:.0} ns | – | **{ratio:.2}** × the raw file | –")
        }
    }
}

fn ratios(pairs: &Pairs, of: impl Fn(&Sample) -> Duration) -> Vec<f64> {
    let both = pairs.ours.iter().zip(&pairs.theirs);
    both.map(|(ours, theirs)| of(theirs).as_secs_f64() / of(ours).as_secs_f64().max(1e-9)).collect()
}

fn summary(samples: &[Sample]) -> String {
    let seconds = |of: fn(&Sample) -> Duration| median(samples.iter().map(|sample| of(sample).as_secs_f64()));
    let (wall, cpu) = (seconds(|s| s.wall), seconds(|s| s.cpu));
    let peak = median(samples.iter().map(|sample| sample.peak_bytes as f64)) / f64::from(1 << 20);
    format!("{}, {}, {peak:.0} MiB", time(wall), time(cpu))
}

fn time(seconds: f64) -> String {
    if seconds < 0.1 { format!("{:.1} ms", seconds * 1e3) } else { format!("{seconds:.2} s") }
}
