// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Inactive nodes: images that another process may use meanwhile, to hand a disk over (`blockdev-set-active`).
//!
//! An inactive node is closed: complete on disk, without locks. Only its name and its options are left. It is opened
//! again by them, so everything that the other process wrote is there.

use super::nodes::describe;
use super::{Arguments, Group, change, failed, nothing};
use crate::inactive::{Closed, references};
use crate::state::Daemon;
use cowshed_image::Node;
use cowshed_image::graph::nodes_below;
use cowshed_image::node::LocalFuture;
use cowshed_image::options::BlockdevOptions;
use cowshed_qmp::{QmpError, QmpResult};
use serde_json::{Value, json};
use std::rc::Rc;
use std::sync::Arc;

pub(super) const GROUP: Group = Group {
    schema: "
command blockdev-set-active: node-name?: str, active: bool
",
    commands: &[change!("blockdev-set-active", blockdev_set_active)],
};

fn owns(daemon: &Daemon, node: &Arc<Node>) -> bool {
    daemon.graph.owned_nodes().iter().any(|owned| Arc::ptr_eq(owned, node))
}

/// The options by which a node can be opened again: children that go with it are described, not named.
fn lasting_options(daemon: &Daemon, node: &Arc<Node>) -> BlockdevOptions {
    let mut options = node.options();
    for child in node.children() {
        let key = child.role.as_str();
        let is_named = options.get(key).is_some_and(Value::is_string);
        if is_named && !owns(daemon, &child.node) {
            let mut below = lasting_options(daemon, &child.node);
            if !child.node.name().starts_with('#') {
                below.insert("node-name", child.node.name());
            }
            options.insert(key, Value::from(below));
        }
    }
    options
}

async fn blockdev_set_active(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    let active = arguments.flag("active", true);
    match (arguments.maybe_text("node-name"), active) {
        (Some(name), true) => activate(&daemon, name).await?,
        (Some(name), false) if daemon.inactive.contains(name) => {}
        (Some(name), false) => {
            let node = daemon.node(name)?;
            inactivate(&daemon, &node).await?;
        }
        (None, true) => {
            for name in daemon.inactive.names() {
                activate(&daemon, &name).await?;
            }
        }
        (None, false) => inactivate_all(&daemon).await?,
    }
    nothing()
}

/// Nodes without users become inactive first, then those below them.
async fn inactivate_all(daemon: &Rc<Daemon>) -> QmpResult<()> {
    if !daemon.graph.attachments().is_empty() {
        return Err(QmpError::generic("Failed to inactivate all nodes: Operation not permitted"));
    }
    let before = daemon.inactive.names();
    while let Some(node) = daemon.graph.owned_nodes().into_iter().find(|node| node.user_names().is_empty()) {
        if let Err(error) = inactivate(daemon, &node).await {
            for name in daemon.inactive.names().into_iter().filter(|name| !before.contains(name)) {
                activate(daemon, &name).await?;
            }
            return Err(QmpError::generic(format!("Failed to inactivate all nodes: {}", error.description)));
        }
    }
    Ok(())
}

/// Completes a node on disk and releases its locks, and those below it that have no other users.
async fn inactivate(daemon: &Rc<Daemon>, node: &Arc<Node>) -> QmpResult<()> {
    let users = node.user_names();
    if users.iter().any(|user| daemon.graph.find(user).is_some()) {
        return Err(QmpError::generic("Node has active parent node"));
    }
    if !users.is_empty() {
        // Exports and jobs go on using it.
        return Err(QmpError::generic("Failed to inactivate node: Operation not permitted"));
    }
    let below: Vec<Arc<Node>> = nodes_below(node).into_iter().skip(1).collect();
    for node in std::iter::once(node).chain(&below) {
        let bitmaps = node.bitmaps().await.map_err(failed)?;
        if let Some(bitmap) = bitmaps.iter().find(|bitmap| !bitmap.persistent) {
            let message = format!(
                "Failed to inactivate node: bitmap '{}' of node '{}' is only in memory",
                bitmap.name,
                node.name()
            );
            return Err(QmpError::generic(message));
        }
        if let Some(bitmap) = bitmaps.first().filter(|_| node.size() == 0) {
            let message = format!(
                "Failed to inactivate node: a disk of 0 bytes can't store bitmap '{}' of node '{}'",
                bitmap.name,
                node.name()
            );
            return Err(QmpError::generic(message));
        }
    }
    close(daemon, node).await?;
    // Users come before the nodes that they use.
    let mut left: Vec<Arc<Node>> = below.into_iter().filter(|node| owns(daemon, node)).collect();
    while let Some(at) = left.iter().position(|node| node.user_names().is_empty()) {
        let node = left.swap_remove(at);
        close(daemon, &node).await?;
    }
    Ok(())
}

async fn close(daemon: &Rc<Daemon>, node: &Arc<Node>) -> QmpResult<()> {
    let mut described = describe(daemon, node, true).await?;
    described.insert("active".to_owned(), json!(false));
    let options = lasting_options(daemon, node);
    let name = node.name().to_owned();
    let is_inserted = daemon.inserted_filters.contains(node);
    let closed = daemon.graph.delete(&name).await;
    // It is closed, also where that met an error; not where it was refused.
    if daemon.graph.find(&name).is_none() {
        daemon.inactive.insert(name, Closed { options, described, is_inserted });
    }
    closed.map_err(failed)
}

/// Opens a node again, after those that its options name. Nothing to do where it is active.
pub(super) fn activate<'a>(daemon: &'a Rc<Daemon>, name: &'a str) -> LocalFuture<'a, QmpResult<()>> {
    Box::pin(async move {
        let Some(closed) = daemon.inactive.find(name) else {
            return daemon.node(name).map(drop);
        };
        let opened = activate_named(daemon, &closed.options).await?;
        match daemon.untrusted.add(&daemon.graph, closed.options).await {
            Ok(node) => {
                if closed.is_inserted {
                    daemon.inserted_filters.add(&node);
                }
                daemon.inactive.remove(name);
                Ok(())
            }
            Err(error) => {
                roll_back(daemon, opened).await;
                Err(failed(error))
            }
        }
    })
}

/// Opens the inactive nodes that options name; returns their names. On an error all are as before.
pub(super) async fn activate_named(daemon: &Rc<Daemon>, options: &BlockdevOptions) -> QmpResult<Vec<String>> {
    let mut opened = Vec::new();
    for name in references(options).into_iter().filter(|name| daemon.inactive.contains(name)) {
        match activate(daemon, &name).await {
            Ok(()) => opened.push(name),
            Err(error) => {
                roll_back(daemon, opened).await;
                return Err(error);
            }
        }
    }
    Ok(opened)
}

/// Makes nodes inactive again that were opened for something that failed.
pub(super) async fn roll_back(daemon: &Rc<Daemon>, opened: Vec<String>) {
    for name in opened.into_iter().rev() {
        let Some(node) = daemon.graph.find(&name) else { continue };
        if let Err(error) = inactivate(daemon, &node).await {
            tracing::warn!(node = name, error = error.description, "could not make a node inactive again");
        }
    }
}

/// Adds a node that is inactive from the start: it is looked at, without locks, and closed again.
pub(super) async fn add_inactive(daemon: &Rc<Daemon>, options: BlockdevOptions) -> QmpResult<()> {
    // The nodes below stay as they are; an inactive node needs nothing of them.
    let opened = activate_named(daemon, &options).await?;
    let looked_at = options.clone().with("read-only", true).with("force-share", true);
    let added = daemon.untrusted.add(&daemon.graph, looked_at).await.map_err(failed);
    let described = match added {
        Ok(node) => {
            let described = describe(daemon, &node, true).await;
            let closed = daemon.graph.delete(node.name()).await.map_err(failed);
            described.and_then(|described| closed.map(|()| described))
        }
        Err(error) => Err(error),
    };
    roll_back(daemon, opened).await;
    let mut described = described?;
    described.insert("active".to_owned(), json!(false));
    described.insert("ro".to_owned(), json!(options.get("read-only") == Some(&json!(true))));
    let name = options.text("node-name").unwrap_or_default().to_owned();
    daemon.inactive.insert(name, Closed { options, described, is_inserted: false });
    Ok(())
}
