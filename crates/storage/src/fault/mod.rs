// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Faults on demand: a file in front of another that fails, delays, tears, loses and corrupts by rules.
//!
//! It serves tests of guests and programs against a failing disk, and our own tests with real files. The simulator has
//! faults of its own, which know about caches and power cuts.

mod breakpoints;
mod medium;
mod metadata;
mod rules;

pub(crate) use medium::FaultyFile;
pub use metadata::{AsMetadata, as_metadata};
pub use rules::{Event, FaultAction, FaultRule, Faults, IoType, StateRule};
