// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The meaning of the arguments `device`, `node-name`, `node` and `id`, and the place of a node in the graph.
//!
//! `device` and `id` name an export; the commands that take a node's name there too look for an export first. `node-name` and
//! `node` name a node, never an export.

use crate::nbd::Exported;
use crate::state::Daemon;
use cowshed_image::Node;
use cowshed_image::graph::below_filters;
use cowshed_image::node::ChildRole;
use cowshed_qmp::{QmpError, QmpResult};
use cowshed_types::is_identifier;
use serde_json::{Map, Value};
use std::collections::BTreeSet;
use std::sync::Arc;

/// The object that an argument names.
pub(super) enum NamedObject {
    Export(Exported),
    Node(Arc<Node>),
}

impl NamedObject {
    /// The node of that name, or the one that the export serves now.
    pub fn node(&self) -> Arc<Node> {
        match self {
            NamedObject::Export(export) => export.attachment.node(),
            NamedObject::Node(node) => Arc::clone(node),
        }
    }

    /// The node whose place others take: the one that was named, filters of the user included. Filters that a command or
    /// a backup has put above it stay where they are.
    pub fn disk(&self, daemon: &Daemon) -> Arc<Node> {
        let mut node = self.node();
        while daemon.inserted_filters.contains(&node) || (node.is_filter() && daemon.jobs.works_on(&node)) {
            match node.child(ChildRole::File) {
                Some(child) => node = child,
                None => break,
            }
        }
        node
    }

    /// The node that stores the data: the one below the filters.
    pub fn image(&self) -> Arc<Node> {
        below_filters(&self.node())
    }
}

/// The export with the id `device`, or else the node with the name `node`. A name that isn't given is empty.
pub(super) fn lookup(daemon: &Daemon, device: Option<&str>, node: Option<&str>) -> QmpResult<NamedObject> {
    let (device, node) = (device.unwrap_or_default(), node.unwrap_or_default());
    if let Some(export) = daemon.find_export(device) {
        return Ok(NamedObject::Export(export));
    }
    daemon.inactive.check(device)?;
    daemon.inactive.check(node)?;
    let not_found = || QmpError::generic(format!("Cannot find device='{device}' nor node-name='{node}'"));
    let behind_filter = || daemon.jobs.behind_filter(node).map(|(below, _)| below);
    daemon.graph.find(node).or_else(behind_filter).map(NamedObject::Node).ok_or_else(not_found)
}

/// The export with this id, or else the node with this name.
pub(super) fn device(daemon: &Daemon, name: &str) -> QmpResult<NamedObject> {
    lookup(daemon, Some(name), Some(name))
}

/// As [`device`], for commands that take no node with another node above it.
pub(super) fn root(daemon: &Daemon, name: &str) -> QmpResult<NamedObject> {
    let found = device(daemon, name)?;
    if let NamedObject::Node(node) = &found
        && !is_root(daemon, node)
    {
        return Err(QmpError::generic("Need a root block node"));
    }
    Ok(found)
}

/// The image that a job is to work on. A filter that a job has put in names it for no other job.
pub(super) fn for_job(daemon: &Daemon, name: &str) -> QmpResult<Arc<Node>> {
    let found = device(daemon, name)?;
    if let NamedObject::Node(node) = &found
        && node.is_filter()
    {
        daemon.jobs.check_free(node)?;
    }
    Ok(found.image())
}

/// The node with this name, for arguments that can't name an export.
pub(super) fn node(daemon: &Daemon, name: &str) -> QmpResult<Arc<Node>> {
    lookup(daemon, None, Some(name)).map(|found| found.node())
}

/// The nodes that have this one as a child, each with its role.
pub(super) fn parents(daemon: &Daemon, node: &Arc<Node>) -> Vec<(Arc<Node>, ChildRole)> {
    let mut found = Vec::new();
    for parent in daemon.graph.snapshot().nodes() {
        for child in parent.children().into_iter().filter(|child| Arc::ptr_eq(&child.node, node)) {
            found.push((Arc::clone(&parent), child.role));
        }
    }
    found
}

/// True when this one has no node above it and no job works on it. A filter that a command put in counts as part of its
/// users.
fn is_root(daemon: &Daemon, node: &Arc<Node>) -> bool {
    let stands_free =
        |(parent, _): (Arc<Node>, ChildRole)| daemon.inserted_filters.contains(&parent) && is_root(daemon, &parent);
    daemon.jobs.check_free(node).is_ok() && parents(daemon, node).into_iter().all(stands_free)
}

/// Arguments whose text is the name of something, even where there is nothing of that name yet.
const NAMING: &[&str] = &[
    "backing",
    "base-node",
    "device",
    "file",
    "filename",
    "filter-node-name",
    "group",
    "id",
    "image-node-name",
    "iothread",
    "job-id",
    "key-secret",
    "name",
    "new-secret",
    "node",
    "node-name",
    "old-secret",
    "overlay",
    "path",
    "secret",
    "snapshot-file",
    "snapshot-node-name",
    "target",
    "throttle-group",
    "tls-authz",
    "tls-creds",
    "top-node",
];

/// The names that arguments of a command mention, at any depth.
pub(super) fn named(daemon: &Daemon, arguments: &Map<String, Value>) -> BTreeSet<String> {
    fn collect(daemon: &Daemon, key: &str, value: &Value, found: &mut BTreeSet<String>) {
        match value {
            Value::String(text) if NAMING.contains(&key) || !found_nodes(daemon, text).is_empty() => {
                found.insert(text.clone());
            }
            Value::Array(list) => list.iter().for_each(|one| collect(daemon, key, one, found)),
            Value::Object(map) => map.iter().for_each(|(key, one)| collect(daemon, key, one, found)),
            _ => {}
        }
    }
    let mut found = BTreeSet::new();
    arguments.iter().for_each(|(key, value)| collect(daemon, key, value, &mut found));
    found
}

/// The nodes of this name, and those of the export or the job with this id.
fn found_nodes(daemon: &Daemon, name: &str) -> Vec<Arc<Node>> {
    let export = daemon.find_export(name).map(|export| export.attachment.node());
    let job = daemon.jobs.find(name).map(|job| job.nodes()).unwrap_or_default();
    let behind_filter = daemon.jobs.behind_filter(name).map(|(below, _)| below);
    daemon.graph.find(name).into_iter().chain(export).chain(job).chain(behind_filter).collect()
}

/// These names, and those of all nodes that are connected with them.
pub(super) fn connected(daemon: &Daemon, names: &BTreeSet<String>) -> BTreeSet<String> {
    let nodes: Vec<Arc<Node>> = names.iter().flat_map(|name| found_nodes(daemon, name)).collect();
    let connected = daemon.graph.connected(&nodes);
    names.iter().cloned().chain(connected.iter().map(|node| node.name().to_owned())).collect()
}

/// Refuses a node that is the backing file of another one.
pub(super) fn check_no_overlay(daemon: &Daemon, node: &Arc<Node>) -> QmpResult<()> {
    match parents(daemon, node).into_iter().find(|(_, role)| *role == ChildRole::Backing) {
        Some((overlay, _)) => Err(QmpError::generic(format!(
            "Node '{}' is busy: node is used as backing hd of '{}'",
            node.name(),
            overlay.name()
        ))),
        None => Ok(()),
    }
}

/// Refuses a text that is no id of a job.
pub(super) fn check_job_id(id: &str) -> QmpResult<()> {
    if is_identifier(id) { Ok(()) } else { Err(QmpError::generic(format!("Invalid job ID '{id}'"))) }
}
