// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A bound on the lines of the log. Clients and guests decide how often something is worth a line, and must not fill the log's disk.
//!
//! Each place in the code has lines for each export. A few of them come at once, then one in a while, and a line tells the number
//! of those left out.

use std::collections::HashMap;
use std::fmt::{self, Debug, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tracing::callsite::Identifier;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// The target of the lines about left-out ones. No crate has the name.
pub const LEFT_OUT: &str = "left_out";

/// Lines of a kind that may come at once.
const BURST: u32 = 50;
/// The pause before one more line behind these.
const PAUSE: Duration = Duration::from_secs(10);
/// The pause between lines about left-out ones.
const TELL: Duration = Duration::from_secs(60);
/// Kinds that are known at a time, about: exports come and go.
const MOST_KINDS: usize = 1000;

/// The lines of one place in the code about one export.
struct Kind {
    /// Lines that may come now.
    spare: u32,
    /// Since then the next spare one is on its way.
    since: Instant,
    left_out: u64,
    /// The text of a line that was left out.
    example: String,
}

impl Kind {
    fn new(now: Instant) -> Kind {
        Kind { spare: BURST, since: now, left_out: 0, example: String::new() }
    }

    fn refill(&mut self, now: Instant) {
        let pauses = now.saturating_duration_since(self.since).as_secs() / PAUSE.as_secs();
        let earned = u32::try_from(pauses).unwrap_or(u32::MAX);
        self.spare = self.spare.saturating_add(earned).min(BURST);
        // A full count earns nothing more.
        self.since = match self.spare {
            BURST => now,
            _ => self.since + PAUSE * earned,
        };
    }

    fn admit(&mut self, now: Instant) -> bool {
        self.refill(now);
        let is_admitted = self.spare > 0;
        match is_admitted {
            true => self.spare -= 1,
            false => self.left_out += 1,
        }
        is_admitted
    }
}

/// The place in the code, and the export's name where there is one: two kinds differ in them. An operator names exports.
type Key = (Identifier, String);

#[derive(Default)]
struct FloodCounts {
    kinds: HashMap<Key, Kind>,
    /// A thread waits to report the left-out lines.
    is_telling: bool,
}

/// The bounds of one log.
#[derive(Clone, Default)]
pub struct Bounds(Arc<Mutex<FloodCounts>>);

impl Bounds {
    fn counts(&self) -> MutexGuard<'_, FloodCounts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True for a line that may be written.
    fn admit(&self, event: &Event<'_>) -> bool {
        let mut text = Text::default();
        event.record(&mut text);
        let now = Instant::now();
        let mut counts = self.counts();
        if counts.kinds.len() > MOST_KINDS {
            counts.kinds.retain(|_, kind| {
                kind.refill(now);
                kind.spare < BURST || kind.left_out > 0
            });
        }
        let kind = counts.kinds.entry((event.metadata().callsite(), text.export)).or_insert_with(|| Kind::new(now));
        if kind.admit(now) {
            return true;
        }
        if kind.left_out == 1 {
            kind.example = text.message;
        }
        if !std::mem::replace(&mut counts.is_telling, true) {
            drop(counts);
            self.tell_later();
        }
        false
    }

    fn tell_later(&self) {
        let bounds = self.clone();
        let telling = move || {
            loop {
                std::thread::sleep(TELL);
                if !bounds.log_omitted() {
                    return;
                }
            }
        };
        if std::thread::Builder::new().name("log".to_owned()).spawn(telling).is_err() {
            self.counts().is_telling = false;
        }
    }

    /// Logs the number of lines left out since the last time. True: there was something.
    pub fn log_omitted(&self) -> bool {
        let mut counts = self.counts();
        let told: Vec<(String, String, u64)> = counts
            .kinds
            .iter_mut()
            .filter(|(_, kind)| kind.left_out > 0)
            .map(|((_, export), kind)| {
                (export.clone(), std::mem::take(&mut kind.example), std::mem::take(&mut kind.left_out))
            })
            .collect();
        counts.is_telling = !told.is_empty();
        drop(counts);
        for (export, example, count) in &told {
            match export.as_str() {
                "" => tracing::warn!(target: LEFT_OUT, count, "left out of the log: '{example}'"),
                export => tracing::warn!(target: LEFT_OUT, export, count, "left out of the log: '{example}'"),
            }
        }
        !told.is_empty()
    }
}

/// The fields of an event that matter here.
#[derive(Default)]
struct Text {
    export: String,
    message: String,
}

impl Visit for Text {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "export" {
            value.clone_into(&mut self.export);
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "message" {
            // Memory takes all that is written to it.
            let _ = write!(self.message, "{value:?}");
        }
    }
}

/// Lines in the form `F`, within the bounds.
pub struct Bounded<F> {
    /// The form.
    pub form: F,
    /// The bounds.
    pub bounds: Bounds,
}

impl<S, N, F> FormatEvent<S, N> for Bounded<F>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(&self, context: &FmtContext<'_, S, N>, writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let metadata = event.metadata();
        // Finer levels are asked for, and wanted whole.
        let is_bounded = *metadata.level() <= Level::INFO && metadata.target() != LEFT_OUT;
        match is_bounded && !self.bounds.admit(event) {
            true => Ok(()),
            false => self.form.format_event(context, writer, event),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_leaves_few_lines_and_loses_no_count() {
        let start = Instant::now();
        let mut kind = Kind::new(start);
        let mut admitted = 0_u64;
        // A thousand a second, for ten minutes.
        for millis in 0..600_000 {
            admitted += u64::from(kind.admit(start + Duration::from_millis(millis)));
        }
        assert_eq!((admitted, admitted + kind.left_out), (u64::from(BURST) + 59, 600_000));
        // After a quiet while it is as new.
        let later = start + Duration::from_secs(600) + PAUSE * BURST;
        assert_eq!((0..BURST + 1).filter(|_| kind.admit(later)).count(), BURST as usize);
    }
}
