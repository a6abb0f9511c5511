// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The engine beside the real QEMU and a byte model, also after power cuts.

mod amend;
mod bitmap_model;
mod bitmaps;
mod bitmaps_beside_snapshots;
mod bitmaps_hostile;
mod chains;
mod check;
mod check_crash;
mod check_hostile;
mod check_verdicts;
mod crash_amend;
mod crash_bitmaps;
mod crash_chains;
mod crash_copies;
mod crash_live_chains;
mod crash_snapshots;
mod differential;
mod differential_edges;
mod differential_features;
mod differential_model;
mod fleecing;
mod full_guest;
mod read_ahead;
mod snapshots;
mod vm_state;
