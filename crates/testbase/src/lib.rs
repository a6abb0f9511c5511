// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The parts of tests that know nothing of disks: other programs, temporary folders, waiting. Not part of the product.
//! See the README of this crate.

mod folder;
pub mod programs;
pub mod steps;
pub mod waiting;

pub use folder::temp_dir;
