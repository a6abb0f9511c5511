// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Work on whole images: create, convert, compare, measure, resize, dd, map and info.
//!
//! Each job is an options struct and an `async fn run(&options, &JobHandle)`; the command line and QMP call the
//! same. See the README of this crate.

pub mod amend;
pub mod backup;
pub mod bench;
pub mod bitmap;
pub mod check;
pub mod commit;
pub mod compare;
pub mod convert;
pub mod create;
pub mod dd;
pub mod faults;
mod held_writes;
mod in_flight;
pub mod info;
pub mod inspect;
pub mod job;
pub mod key_slots;
mod layer;
pub mod limits;
pub mod map;
pub mod measure;
pub mod mirror;
mod rate;
pub mod rebase;
pub mod rescue;
pub mod resize;
mod runs;
pub mod snapshot;
pub mod spec;
pub mod stream;
mod work_error;
pub mod zeroes;

pub use job::{JobHandle, Progress};
pub use spec::ImageSpec;
use work_error::in_work;

/// The error of a copy onto a disk of another size.
pub const DIFFERENT_SIZES: &str = "Source and target image have different sizes";

pub(crate) fn different_sizes() -> cowshed_types::Error {
    cowshed_types::Error::invalid_argument(DIFFERENT_SIZES)
}
