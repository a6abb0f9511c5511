// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Work on the bare file of a qcow2 image while no driver has it open: check, repair, internal snapshots, amending.

pub mod amend;
mod bitmap_journal;
pub mod check;
mod header;
pub mod snapshots;

pub use header::{read_header, read_header_as};

/// Called with the work done and the whole work. `false` asks the operation to stop, which it can before it publishes a
/// change.
pub type ProgressFn<'a> = &'a (dyn Fn(u64, u64) -> bool + Sync);
