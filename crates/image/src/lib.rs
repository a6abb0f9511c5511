// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The block graph: options, opening, reading and writing of disk images.

pub mod codec;
pub mod create;
pub mod formats;
pub mod node;

pub use node::{Node, StatusExtent};
