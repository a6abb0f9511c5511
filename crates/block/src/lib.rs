// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The vocabulary that every layer of Cowshed shares: offsets, extents, errors.
//!
//! Nothing here does I/O, and nothing here depends on another crate of the workspace.

mod error;
mod extent;
pub mod memory;
mod name;
mod offset;

pub use error::{Errno, Error, ErrorKind, Result};
pub use extent::{Compression, Extent, Mapping, StoredIn};
pub use name::{name_of_text, shown_name, text_of_name};
pub use offset::{GuestOffset, HostOffset};
