// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The qcow2 engine without any I/O: cached tables go in, plans come out.
//!
//! An [`Engine`] holds the mapping of one image in memory. Its methods answer from cached tables or name the missing
//! ones ([`Stall`]); the caller does all reading, writing and waiting. The rules that keep an image consistent through
//! a power cut are kept here. They decide the time of each write ([`Engine::begin_cycle`]). They also decide when a
//! freed host range may be used again ([`Engine::take_reclaimable`]). See `README.md` of the crate.

mod allocate;
pub mod check;
mod compact;
mod compressed;
mod config;
mod directory;
mod engine;
mod grow;
mod inflight;
mod interleaving;
mod map;
mod metadata_map;
mod other_metadata;
mod pins;
mod resize;
mod restart;
mod slice;
mod stall;
mod structures;
mod writeback;
mod zero;

pub use allocate::{Allocation, Fill};
pub use compressed::{CompressedAllocation, CompressedPlace};
pub use config::EngineConfig;
pub use engine::{Budget, BudgetedCache, Engine, Reclaim};
pub use grow::RefcountGrowth;
pub use interleaving::{set_interleaving_hook, times_locked};
pub use map::{ExtentList, MAX_EXTENTS};
pub use pins::EpochGuard;
pub use resize::{L1Growth, Tail, TailCut};
pub use restart::Restart;
pub use stall::{Load, Planned, Reserve, Stall, TableId};
pub use structures::{OverlapSet, Structure};
pub use writeback::{Cycle, CycleEnd, MetaWrite};
pub use zero::ZeroMode;
