// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Key slots of images in use. Requests need no slot: an open image holds its master key, and the header stays where it is.

use super::Graph;
use crate::encryption::{SlotChange, change_slots};
use crate::node::Node;
use crate::secret::Secret;
use cowshed_storage::rt;
use cowshed_types::Result;
use std::sync::Arc;

impl Graph {
    /// Adds or erases key slots of an image that is open for writing. `secret` opens it now. Durable when it returns; a dropped
    /// future that has begun is carried out all the same.
    pub async fn change_key_slots(
        self: &Arc<Self>,
        node: &Arc<Node>,
        secret: Option<Secret>,
        change: SlotChange,
        force: bool,
    ) -> Result<()> {
        let one_change = self.changing([node]).await;
        let (area, _) = node.key_slots()?;
        rt::to_completion(async move {
            let _held = one_change;
            change_slots(&area, secret.as_ref(), &change, force).await
        })
        .await
    }
}
