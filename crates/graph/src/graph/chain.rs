// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Chains of images in use: which layer decides a range, for jobs that change a layer below others.

use super::Graph;
use super::attachment::is_attachment;
use super::owned::quoted;
use crate::node::{Chain, Node};
use cowshed_types::{Error, ErrorKind, Result};
use std::sync::Arc;

impl Chain {
    /// Refuses the commit job `id` when another node stands on a node below the chain's top: the job would change the content of
    /// that node. Exports may read the base, not the layers between.
    pub fn check_private(&self, id: &str) -> Result<()> {
        let nodes = self.nodes();
        let top = self.layers().first();
        for node in nodes.iter().filter(|node| top.is_none_or(|top| !Arc::ptr_eq(top, node))) {
            let name = node.name();
            let known =
                |user: &String| self.left_out().contains(user) || nodes.iter().any(|known| known.name() == user);
            let others = node.user_names().into_iter().filter(|user| !known(user));
            let (exports, others): (Vec<_>, Vec<_>) = others.partition(|user| is_attachment(user));
            if !others.is_empty() {
                let message = format!("node '{name}' is in use by {} too", quoted(&others));
                return Err(Error::new(ErrorKind::Busy, message));
            }
            if !exports.is_empty() && self.base().is_none_or(|base| !Arc::ptr_eq(base, node)) {
                let message = format!(
                    "Permission conflict on node '{name}': permissions 'consistent read' are both required by an unnamed block \
                     device (uses node '{name}' as 'root' child) and unshared by commit job '{id}' (uses node '{name}' as \
                     'intermediate node' child)."
                );
                return Err(Error::new(ErrorKind::Busy, message));
            }
        }
        Ok(())
    }
}

impl Graph {
    /// Lets others write to and resize the backing node of `overlay` while it is there (`writes`), or not any more. The
    /// caller that does so must leave the overlay's data as it is.
    pub fn share_backing(&self, overlay: &Arc<Node>, writes: bool) -> Result<()> {
        if overlay.backing().is_none() {
            return Err(Error::internal(format!("node '{}' has no backing node", overlay.name())));
        }
        overlay.lend_backing(writes)
    }

    /// Closes a node that has no users any more and wasn't added by name.
    pub async fn close_unused(self: &Arc<Self>, node: &Arc<Node>) -> Result<()> {
        let _one_change = self.changing([node]).await;
        if node.is_unused() { node.close().await } else { Ok(()) }
    }
}
