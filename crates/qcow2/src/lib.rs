// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The qcow2 engine without any I/O: what is cached goes in, plans come out.
//!
//! An [`Engine`] holds the mapping of one image in memory. Its methods answer from what is cached or say what is
//! missing ([`Stall`]); the caller does all reading, writing and waiting. The rules that keep an image consistent
//! through a power cut are kept here. They say what may be written when ([`Engine::begin_cycle`]). They also say when a
//! freed host range may be used again ([`Engine::take_reclaimable`]). See `README.md` of the crate.

mod allocate;
mod budget;
pub mod check;
mod compact;
mod compressed;
mod config;
mod contiguous;
mod damage;
mod directory;
mod dirty_bits;
mod engine;
mod grow;
mod inflight;
mod interleaving;
mod map;
mod other_metadata;
mod overlap;
mod pins;
mod reclaim;
mod refcounts;
mod resize;
mod restart;
mod room;
mod slice;
mod tables;
mod tuning;
mod writeback;
mod zero;

pub use allocate::{Allocation, Fill};
pub use budget::Budget;
pub use compressed::{CompressedAllocation, CompressedPlace};
pub use config::Config;
pub use dirty_bits::{DirtyBits, Piece};
pub use engine::{Engine, Load, Planned, Stall, Statistics, TableId};
pub use grow::RefcountGrowth;
pub use interleaving::set_interleaving_hook;
pub use map::{ExtentList, MAX_EXTENTS};
pub use overlap::{OverlapSet, Structure};
pub use pins::Pin;
pub use reclaim::Reclaim;
pub use resize::{L1Growth, Tail};
pub use restart::Restart;
pub use room::Reserve;
pub use writeback::{Cycle, CycleEnd, MetaWrite};
pub use zero::ZeroMode;
