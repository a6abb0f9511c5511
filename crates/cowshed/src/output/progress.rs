// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Progress of long work: qemu-img's percentage under its name, a bar with rate and time left under ours.

use crate::invocation::Persona;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};
use std::fmt::Write as _;
use std::io::Write as _;
use std::time::Duration;

/// The bar is redrawn at most this often each second.
const REDRAWS_PER_SECOND: u8 = 10;

/// A percentage is printed again when it has changed by this many hundredths.
const STEP: u64 = 100;

/// Shows how far something is.
pub enum Progress {
    /// Nothing is shown.
    Hidden,
    /// `    (12.34/100%)\r` on standard output.
    Percent {
        /// Hundredths of a percent printed last.
        shown: Option<u64>,
        /// The work was reported as done, and there was some.
        is_done: bool,
    },
    /// A bar on standard error.
    Bar(ProgressBar),
}

impl Progress {
    /// `wanted`: the user asked with `-p`. Under our own name a terminal gets the bar without asking, unless
    /// `quiet`.
    pub fn new(persona: Persona, wanted: bool, quiet: bool, what: &'static str) -> Self {
        match persona {
            _ if quiet => Progress::Hidden,
            Persona::QemuImg if wanted => Progress::Percent { shown: None, is_done: false },
            Persona::QemuImg => Progress::Hidden,
            Persona::Cowshed | Persona::Tool(_) => {
                let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(REDRAWS_PER_SECOND));
                if bar.is_hidden() {
                    return if wanted { Progress::Percent { shown: None, is_done: false } } else { Progress::Hidden };
                }
                bar.set_style(bar_style());
                bar.set_message(what);
                Progress::Bar(bar)
            }
        }
    }

    /// `done` of `total`, in bytes or any other unit. A `total` of 0 counts as everything done.
    pub fn update(&mut self, done: u64, total: u64) {
        match self {
            Progress::Hidden => {}
            Progress::Percent { shown, is_done } => {
                *is_done = total != 0 && done >= total;
                let hundredths = hundredths(done, total);
                let is_step = match *shown {
                    // Work in several rounds begins again; earlier percentages stay.
                    Some(before) => {
                        hundredths.saturating_sub(before) >= STEP || (hundredths == 10_000 && before != 10_000)
                    }
                    None => true,
                };
                if is_step {
                    *shown = Some(hundredths);
                    print_percent(hundredths);
                }
            }
            Progress::Bar(bar) => {
                bar.set_length(total);
                bar.set_position(done.min(total));
            }
        }
    }

    /// Ends the work; with `well` at 100 %. A bar goes away, a percentage stays until [`Progress::finish`].
    pub fn complete(&mut self, well: bool) {
        match self {
            Progress::Percent { shown, .. } if well && *shown != Some(10_000) => {
                *shown = Some(10_000);
                print_percent(10_000);
            }
            Progress::Bar(bar) => bar.finish_and_clear(),
            Progress::Hidden | Progress::Percent { .. } => {}
        }
    }

    /// Prints 100 % once more, as QEMU does where the work had reached it by itself.
    pub fn repeat_end(&mut self) {
        if let Progress::Percent { is_done: true, .. } = self {
            print_percent(10_000);
        }
    }

    /// True once a percentage has been printed.
    pub fn has_begun(&self) -> bool {
        matches!(self, Progress::Percent { shown: Some(_), .. })
    }

    /// Ends the line of a percentage.
    pub fn finish(&mut self) {
        if let Progress::Percent { .. } = self {
            end_percent_line();
        }
        *self = Progress::Hidden;
    }
}

fn bar_style() -> ProgressStyle {
    let template = "{msg} [{bar:32}] {percent:>3}% {bytes_of_total} {rate} {left}";
    ProgressStyle::with_template(template)
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .progress_chars("=> ")
        .with_key("bytes_of_total", |state: &ProgressState, out: &mut dyn std::fmt::Write| {
            let total = super::size::human(state.len().unwrap_or(0));
            let _ = write!(out, "{} of {total}", super::size::human(state.pos()));
        })
        .with_key("rate", |state: &ProgressState, out: &mut dyn std::fmt::Write| {
            let _ = write!(out, "{}/s", super::size::human(state.per_sec() as u64));
        })
        .with_key("left", |state: &ProgressState, out: &mut dyn std::fmt::Write| {
            let _ = write!(out, "{} left", clock(state.eta()));
        })
}

/// `1:02:03` or `2:03`.
fn clock(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    match hours {
        0 => format!("{minutes}:{seconds:02}"),
        _ => format!("{hours}:{minutes:02}:{seconds:02}"),
    }
}

fn hundredths(done: u64, total: u64) -> u64 {
    match total {
        0 => 10_000,
        total => {
            let (done, total) = (u128::from(done.min(total)), u128::from(total));
            u64::try_from((done * 10_000 + total / 2) / total).unwrap_or(10_000)
        }
    }
}

/// Straight to standard output: the reader waits for it, and one that went away doesn't stop the work.
fn print_percent(hundredths: u64) {
    let mut text = String::new();
    let _ = write!(text, "    ({}.{:02}/100%)\r", hundredths / 100, hundredths % 100);
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

/// Prints the progress once, on standard error. A failure of that has nowhere to go.
pub fn report_percent(done: u64, total: u64) {
    let hundredths = hundredths(done, total);
    let text = format!("    ({}.{:02}/100%)\n", hundredths / 100, hundredths % 100);
    let _ = std::io::stderr().lock().write_all(text.as_bytes());
}

fn end_percent_line() {
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(b"\n").and_then(|()| out.flush());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentages() {
        assert_eq!(hundredths(0, 0), 10_000);
        assert_eq!(hundredths(1, 3), 3_333);
        assert_eq!(hundredths(u64::MAX, u64::MAX), 10_000);
        assert_eq!(hundredths(9, 3), 10_000);
    }

    #[test]
    fn clocks() {
        assert_eq!(clock(Duration::from_secs(65)), "1:05");
        assert_eq!(clock(Duration::from_secs(3_725)), "1:02:05");
    }
}
