// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What is fuzzed. See README.md.

pub mod engine;
pub mod image;
pub mod layout;
pub mod nbd;
