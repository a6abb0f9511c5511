// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The parts that the tests of the workspace share: the real QEMU as oracle, seeded images, the byte model, the crash
//! enumerator. Not part of the product. See the README of this crate.

pub mod audit;
pub mod bigimage;
pub mod campaign;
pub mod crash;
pub mod credentials;
pub mod damage;
pub mod dirty;
pub mod fuzz;
pub mod guest;
pub mod held;
pub mod images;
pub mod journal;
pub mod live;
pub mod matrix;
pub mod means;
pub mod model;
pub mod mutants;
pub mod operations;
pub mod qemu;
pub mod random;
pub mod reflink;
pub mod runner;
pub mod scenario;
pub mod specimens;
pub mod stress;
pub mod switches;
pub mod tally;
pub mod vhost;

pub use cowshed_testbase::{programs, waiting};
