// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Key slots of encrypted images (`encrypt.*`).

use cowshed_block::{Error, Result};
use cowshed_image::Node;
use cowshed_image::create::schema::OptionValues;

/// Adds, changes or erases key slots of the image in `node`, which is open for writing and not read by anybody.
pub(super) async fn amend(node: &Node, _values: &OptionValues, _force: bool) -> Result<()> {
    let message = "key slots of encrypted images can't be changed yet";
    Err(Error::unsupported(message).field("encrypt").file(node.filename()))
}
