// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Disk images: the block graph with the formats of this program. The one table of drivers is made here.

pub use cowshed_formats as formats;
pub use cowshed_formats::Budget;
pub use cowshed_graph::{
    DirtyBits, Node, OpenRequest, Preallocation, SnapshotName, StatusExtent, TlsCredentials, ZeroFlags, dirty,
    encryption, filters, graph, node, open, options, partitions, secret, stats,
};

use cowshed_formats::{FORMATS, REFUSED};
use cowshed_graph::open::{Drivers, FILTERS, PROTOCOLS};
use cowshed_types::Result;
use std::sync::Arc;

/// The drivers of this program, in the order of the help.
pub static DRIVERS: Drivers = Drivers::new(&[PROTOCOLS, FORMATS, FILTERS], REFUSED);

/// Opens an image with its whole chain, takes the locks, and returns its top node.
pub async fn open(request: OpenRequest) -> Result<Arc<Node>> {
    DRIVERS.open(request).await
}
