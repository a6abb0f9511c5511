// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The block graph: options, opening, reading and writing of disk images.

mod buffers;
pub mod dirty;
mod drivers;
pub mod encryption;
mod events;
pub mod filters;
pub mod formats;
pub mod graph;
mod nbd_client;
pub mod node;
pub mod open;
pub mod options;
mod protocols;
pub mod secret;
pub mod stats;

pub use cowshed_qcow2::{Budget, DirtyBits};
pub use drivers::DRIVERS;
pub use node::{Node, Preallocation, StatusExtent, ZeroFlags};
pub use open::{OpenRequest, TlsCredentials};

use cowshed_block::Result;
use std::sync::Arc;

/// Opens an image with its whole chain, takes the locks, and returns its top node.
pub async fn open(request: OpenRequest) -> Result<Arc<Node>> {
    DRIVERS.open(request).await
}
