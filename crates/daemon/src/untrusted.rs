// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Images from strangers: each is held to a policy as long as its node has its name, also when it is opened again.

use cowshed_image::graph::Graph;
use cowshed_image::open::Policy;
use cowshed_image::options::BlockdevOptions;
use cowshed_image::{DRIVERS, Node, OpenRequest};
use cowshed_jobs::inspect::{self, InspectVerdict};
use cowshed_types::{Error, ErrorKind, Result};
use serde_json::Value;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The option of `blockdev-add` for it.
pub(crate) const OPTION: &str = "x-untrusted";

/// The policies, by node-name.
#[derive(Default)]
pub(crate) struct Untrusted(RefCell<BTreeMap<String, Policy>>);

impl Untrusted {
    /// Takes the option out of those of a node that is to be added, and holds the node to it.
    pub fn take_option(&self, options: &mut BlockdevOptions) {
        let given = options.remove(OPTION);
        if given == Some(Value::Bool(true)) || given.as_ref().and_then(Value::as_str) == Some("on") {
            self.hold(options, Policy::untrusted());
        }
    }

    /// Holds the node that these options name to a policy.
    pub fn hold(&self, options: &BlockdevOptions, policy: Policy) {
        if let Some(name) = options.text("node-name") {
            self.0.borrow_mut().insert(name.to_owned(), policy);
        }
    }

    /// Opens a node as the monitor's, within the policy that it is held to.
    pub async fn add(&self, graph: &Arc<Graph>, options: BlockdevOptions) -> Result<Arc<Node>> {
        self.add_with(graph, options, |request| request).await
    }

    /// As [`Self::add`], for a request with further settings.
    pub async fn add_with(
        &self,
        graph: &Arc<Graph>,
        options: BlockdevOptions,
        more: impl FnOnce(OpenRequest) -> OpenRequest,
    ) -> Result<Arc<Node>> {
        let policy = options.text("node-name").and_then(|name| self.policy_of(name));
        let Some(policy) = policy else { return graph.add_with(more(OpenRequest::options(options))).await };
        if !is_loosened(&policy) {
            check(graph, &options).await?;
        }
        graph.add_with(more(OpenRequest::options(options)).policy(policy)).await
    }

    fn policy_of(&self, name: &str) -> Option<Policy> {
        self.0.borrow().get(name).cloned()
    }

    /// The node of this name is gone.
    pub fn remove(&self, name: &str) {
        self.0.borrow_mut().remove(name);
    }
}

/// True for a policy that allows features which `inspect` calls suspicious: then the policy alone decides.
fn is_loosened(policy: &Policy) -> bool {
    let usual = Policy::untrusted();
    policy.allow_json
        || policy.allow_backing_probe
        || policy.max_virtual_size_bytes > usual.max_virtual_size_bytes
        || policy.max_table_bytes > usual.max_table_bytes
        || policy.max_snapshots > usual.max_snapshots
}

/// Refuses an image that `inspect` calls suspicious. The policy decides about the files that it names.
async fn check(graph: &Graph, options: &BlockdevOptions) -> Result<()> {
    let is_raw = options.text("driver").is_some_and(|driver| DRIVERS.is_raw(driver) || DRIVERS.takes_paths(driver));
    let Some(name) = file_of(graph, options).filter(|_| !is_raw) else { return Ok(()) };
    let inspection = inspect::run(&name).await?;
    // The content of an image of no format makes no claims.
    if inspection.verdict != InspectVerdict::Suspicious || DRIVERS.is_raw(&inspection.format) {
        return Ok(());
    }
    let message = format!("the image is suspicious: {}", inspection.suspicions.join("; "));
    Err(Error::new(ErrorKind::InvalidImage, message).file(name))
}

/// The file that holds an image, where it is a file.
fn file_of(graph: &Graph, options: &BlockdevOptions) -> Option<String> {
    match options.get("file")? {
        Value::String(name) => {
            let node = graph.find(name)?;
            node.is_on_host().then(|| node.filename())
        }
        Value::Object(file) => {
            let is_local =
                file.get("driver").is_none_or(|driver| driver.as_str().is_some_and(|name| DRIVERS.takes_paths(name)));
            file.get("filename").filter(|_| is_local)?.as_str().map(str::to_owned)
        }
        _ => None,
    }
}
