// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The log: lines on standard error, as text or as JSON. `RUST_LOG` chooses its lines.

use super::floods::{Bounded, Bounds, LEFT_OUT};
use super::qemu_lines::QemuLines;
use crate::invocation::Persona;
use crate::output::{Failure, warning};
use clap::ValueEnum;
use tracing_subscriber::EnvFilter;

/// `--log-format`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Lines for people
    #[default]
    Text,
    /// An object a line
    Json,
}

/// A log that has started. At its end it reports the left-out lines.
pub struct Log(Bounds);

impl Log {
    /// Reports the lines left out until now.
    pub fn tell_left_out(&self) {
        self.0.log_omitted();
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        self.tell_left_out();
    }
}

/// Starts logging; `level` counts where `RUST_LOG` isn't set.
pub fn start(format: LogFormat, level: &str) -> Result<Log, Failure> {
    let filter = match std::env::var("RUST_LOG") {
        Ok(wanted) => EnvFilter::try_new(&wanted)
            .map_err(|error| Failure::new(format!("RUST_LOG: '{wanted}' can't be understood: {error}")))?,
        Err(_) => EnvFilter::new(level),
    };
    let told = format!("{LEFT_OUT}=warn").parse();
    let filter = filter.add_directive(told.map_err(|error| Failure::new(format!("could not start the log: {error}")))?);
    // A line that can't be written is lost without a word: the word would go to the same place, and there it panics.
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .log_internal_errors(false);
    let log = Log(Bounds::default());
    let bounds = log.0.clone();
    let started = match format {
        LogFormat::Text if warning::persona() != Persona::Cowshed => builder
            .with_target(false)
            .map_event_format(|form| Bounded { form: QemuLines { program: warning::persona().name(), form }, bounds })
            .try_init(),
        LogFormat::Text => builder.with_target(false).map_event_format(|form| Bounded { form, bounds }).try_init(),
        LogFormat::Json => {
            builder.json().flatten_event(true).map_event_format(|form| Bounded { form, bounds }).try_init()
        }
    };
    started.map_err(|error| Failure::new(format!("could not start the log: {error}")))?;
    Ok(log)
}
