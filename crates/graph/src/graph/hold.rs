// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Nodes of a chain that a job keeps from others for as long as it runs.

use super::attachment::{AttachRequest, Attachment, user_of};
use super::{Chain, Graph};
use crate::node::Hold;
use cowshed_storage::PermissionSet;
use cowshed_types::Result;
use std::sync::Arc;

/// Nodes that a job holds. Dropping it gives them back; [`HeldNodes::release`] is the orderly way.
#[derive(Debug, Default)]
pub struct HeldNodes(Vec<Arc<Attachment>>);

impl HeldNodes {
    /// Gives the nodes back. Those without other users, and not added by name, are closed.
    pub async fn release(&self) -> Result<()> {
        let mut result = Ok(());
        // The upper ones first: a node that closes lets go of the one below it.
        for held in &self.0 {
            result = result.and(held.detach().await);
        }
        result
    }
}

impl Graph {
    /// Holds the layers of `chain` below its top, which a commit makes read as something else: no other user may read
    /// them. `id` is the job's, `own` its attachments.
    pub async fn hold_private(self: &Arc<Self>, id: &str, chain: &Chain, own: &[&str]) -> Result<HeldNodes> {
        let shared = PermissionSet::WRITE | PermissionSet::WRITE_UNCHANGED | PermissionSet::RESIZE;
        self.hold(("commit", id), chain, shared, own).await
    }

    /// Holds the layers of `chain` below its top, which a stream takes over: they get no writers. As the lowest of them
    /// then keeps writers from the base, that has none either.
    pub async fn hold_unchanged(self: &Arc<Self>, id: &str, chain: &Chain) -> Result<HeldNodes> {
        let shared = PermissionSet::CONSISTENT_READ | PermissionSet::WRITE_UNCHANGED;
        self.hold(("stream", id), chain, shared, &[]).await
    }

    async fn hold(
        self: &Arc<Self>,
        (kind, id): (&str, &str),
        chain: &Chain,
        shared: PermissionSet,
        own: &[&str],
    ) -> Result<HeldNodes> {
        let parents = chain.nodes().into_iter().map(|node| node.name().to_owned());
        let parents = parents.chain(chain.left_out().iter().cloned());
        let spared: Vec<String> = parents.chain(own.iter().map(|name| user_of(name))).collect();
        let mut held = HeldNodes::default();
        for node in &chain.between_ends() {
            let hold = Hold { job: format!("{kind} job '{id}'"), spared: spared.clone() };
            // Ids have no such character, so that no other attachment of the job has this name.
            let request = AttachRequest::hold(format!("{id}#{}", node.name()), shared, hold);
            match self.attach(node, request).await {
                Ok(attachment) => held.0.push(attachment),
                Err(error) => return held.release().await.and(Err(error)),
            }
        }
        Ok(held)
    }
}
