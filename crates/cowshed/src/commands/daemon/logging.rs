// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The log: lines on standard error, for people or as JSON. `RUST_LOG` chooses what is in it.

use crate::output::Failure;
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

/// Starts logging; `level` counts where `RUST_LOG` isn't set.
pub fn start(format: LogFormat, level: &str) -> Result<(), Failure> {
    let filter = match std::env::var("RUST_LOG") {
        Ok(wanted) => EnvFilter::try_new(&wanted)
            .map_err(|error| Failure::new(format!("RUST_LOG: '{wanted}' can't be understood: {error}")))?,
        Err(_) => EnvFilter::new(level),
    };
    // A line that can't be written is lost without a word: the word would go to the same place, and there it panics.
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .log_internal_errors(false);
    let started = match format {
        LogFormat::Text => builder.with_target(false).try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
    started.map_err(|error| Failure::new(format!("could not start the log: {error}")))
}
