// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A simulated machine: files on a disk whose operations complete in random order, fail on demand and lose data that
//! was not flushed. Deterministic: one seed, one run.
//!
//! [`World`] holds the files. [`World::run`] runs a future on it; inside, [`cowshed_storage::File::open`] opens
//! simulated files by name and [`cowshed_storage::rt`] keeps virtual time. The world logs every change ([`Event`]);
//! [`Replay`] walks through the log and has at each point the states that a power cut may leave ([`Cut`],
//! [`CrashState`]).

mod fault;
mod file;
mod log;
mod pages;
mod pending;
mod queues;
mod replay;
mod run;
#[cfg(test)]
mod tests;
mod world;

pub use cowshed_storage::rng::Rng;
pub use fault::{Effect, Fault, OpKind};
pub use file::SimFile;
pub use log::{Applied, Change, Event, FileId, OpId};
pub use pages::{PAGE_BYTES, PageMap};
pub use queues::{QueueStart, interleave};
pub use replay::{Atom, Choice, CrashState, Cut, CutChange, Replay};
pub use world::{Config, Features, Overlap, Snapshot, Step, Trace, World};
