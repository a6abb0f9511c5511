// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The block graph: nodes, options, opening, filters, and changes under running requests.

pub mod buffers;
pub mod dirty;
pub mod encryption;
pub mod events;
pub mod filters;
pub mod graph;
mod nbd_client;
pub mod node;
pub mod open;
pub mod options;
pub mod partitions;
pub mod protocols;
pub mod secret;
pub mod stats;

pub use cowshed_layout::qcow2::SnapshotName;
pub use cowshed_types::DirtyBits;
pub use node::{Node, Preallocation, StatusExtent, ZeroFlags};
pub use open::{OpenRequest, TlsCredentials};
