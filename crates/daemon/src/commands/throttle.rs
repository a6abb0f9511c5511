// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `block_set_io_throttle`: limits for an export or a node, with a throttle filter put in where there is none.

use super::names::{self, NamedObject};
use super::{Arguments, Group, change, failed, nothing};
use crate::state::Daemon;
use cowshed_image::Node;
use cowshed_image::filters::throttle::Limits;
use cowshed_image::graph::Attachment;
use cowshed_image::node::ChildRole;
use cowshed_image::options::BlockdevOptions;
use cowshed_qmp::{QmpError, QmpResult};
use serde_json::Value;
use std::rc::Rc;
use std::sync::Arc;

pub(super) const GROUP: Group = Group {
    schema: "
command block_set_io_throttle: device?: str, id?: str, bps: int, bps_rd: int, bps_wr: int, iops: int, iops_rd: int
  , iops_wr: int, bps_max?: int, bps_rd_max?: int, bps_wr_max?: int, iops_max?: int, iops_rd_max?: int
  , iops_wr_max?: int, bps_max_length?: int, bps_rd_max_length?: int, bps_wr_max_length?: int, iops_max_length?: int
  , iops_rd_max_length?: int, iops_wr_max_length?: int, iops_size?: int, group?: str
",
    commands: &[change!("block_set_io_throttle", block_set_io_throttle)],
};

/// Names of filters that the command puts in start so.
const FILTER_PREFIX: &str = "throttle-";

/// The object whose limits are set.
enum Target {
    /// One export: others that use the same node aren't touched.
    Export(Arc<Attachment>),
    /// A node: all of its users.
    Node(Arc<Node>),
}

fn target(daemon: &Daemon, name: &str) -> QmpResult<Target> {
    match names::device(daemon, name) {
        Ok(NamedObject::Export(export)) => Ok(Target::Export(export.attachment)),
        Ok(NamedObject::Node(node)) => Ok(Target::Node(node)),
        Err(_) => Err(QmpError::new(cowshed_qmp::ErrorClass::DeviceNotFound, format!("Device '{name}' not found"))),
    }
}

impl Target {
    /// The throttle filter that all requests of the target pass, and no others.
    fn filter(&self, daemon: &Daemon) -> Option<Arc<Node>> {
        match self {
            Target::Export(attachment) => among_filters(attachment.node(), |node| node.user_names().len() == 1),
            Target::Node(node) => among_filters(Arc::clone(node), |_| true).or_else(|| {
                let is_above = |above: &Arc<Node>| {
                    above.throttle().is_some()
                        && above.child(ChildRole::File).is_some_and(|child| Arc::ptr_eq(&child, node))
                };
                daemon.graph.snapshot().nodes().find(is_above).filter(|_| node.user_names().len() == 1)
            }),
        }
    }
}

/// The first throttle filter from `top` down, as long as there are filters and `goes_on` is true.
fn among_filters(top: Arc<Node>, goes_on: impl Fn(&Node) -> bool) -> Option<Arc<Node>> {
    let mut next = Some(top);
    while let Some(node) = next.filter(|node| node.is_filter() && goes_on(node)) {
        if node.throttle().is_some() {
            return Some(node);
        }
        next = node.child(ChildRole::File);
    }
    None
}

async fn block_set_io_throttle(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    let name = match (arguments.maybe_text("device"), arguments.maybe_text("id")) {
        (Some(name), None) | (None, Some(name)) => name.to_owned(),
        _ => return Err(QmpError::generic("Need exactly one of 'device' and 'id'")),
    };
    if arguments.maybe_text("group") == Some("") {
        return Err(QmpError::generic("Parameter 'group' expects the name of a throttle group"));
    }
    let target = target(&daemon, &name)?;
    let mut limits = arguments.clone().into_map();
    limits.retain(|key, _| Limits::is_name(key));
    let limits = Limits::from_json(&limits).map_err(failed)?;
    if !limits.is_limited() {
        return match target.filter(&daemon) {
            Some(filter) => end_limits(&daemon, &filter).await,
            None => nothing(),
        };
    }
    throttle(&daemon, &target, &name, arguments.maybe_text("group"), Some(limits)).await
}

/// Sets the limits in `throttling.…` of a drive for its export. Without limits it only joins the group, which must be
/// there.
pub(crate) async fn throttle_export(
    daemon: &Rc<Daemon>,
    id: &str,
    group: Option<&str>,
    limits: Option<Limits>,
) -> QmpResult<()> {
    let target = target(daemon, id)?;
    if let (Some(group), None) = (group, &limits)
        && daemon.graph.throttle_groups().find(group).is_none()
    {
        return Err(QmpError::generic(format!("Throttle group '{group}' does not exist")));
    }
    throttle(daemon, &target, id, group, limits).await.map(drop)
}

/// Makes the target a member of a group (its own, where none is named and it is in none), and sets that group's limits.
async fn throttle(
    daemon: &Rc<Daemon>,
    target: &Target,
    name: &str,
    group: Option<&str>,
    limits: Option<Limits>,
) -> QmpResult<Value> {
    let filter = target.filter(daemon);
    let groups = daemon.graph.throttle_groups();
    let current = filter.as_ref().and_then(|filter| filter.throttle()).map(|throttle| throttle.group());
    let group_name = match (group, &current) {
        (Some(group), _) => group.to_owned(),
        // A filter that has left its group is in a nameless one.
        (None, Some(group)) if !group.name().is_empty() => group.name().to_owned(),
        (None, _) => name.to_owned(),
    };
    let is_new = groups.find(&group_name).is_none();
    let group = groups.find_or_create(&group_name).map_err(failed)?;
    let before = group.limits();
    group.set_limits(limits.unwrap_or(before)).map_err(failed)?;
    match filter.as_ref().and_then(|filter| filter.throttle()) {
        Some(throttle) => throttle.set_group(group),
        None => {
            let inserted = insert(daemon, target, name, &group_name).await;
            if let Err(error) = inserted {
                // As before: the limits of the group's others, or no group.
                group.set_limits(before).map_err(failed)?;
                drop(group);
                if is_new {
                    groups.delete(&group_name).map_err(failed)?;
                }
                return Err(error);
            }
        }
    }
    if let Some(old) = current.filter(|old| old.name() != group_name && !old.name().is_empty()) {
        forget_unused(daemon, old.name());
    }
    nothing()
}

async fn insert(daemon: &Rc<Daemon>, target: &Target, name: &str, group: &str) -> QmpResult<()> {
    let stem: String = name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).take(16).collect();
    let mut candidates = (0..).map(|n| match n {
        0 => format!("{FILTER_PREFIX}{stem}"),
        n => format!("{FILTER_PREFIX}{stem}-{n}"),
    });
    let free = candidates.find(|name| daemon.graph.find(name).is_none()).unwrap_or_default();
    let options = BlockdevOptions::new()
        .with("driver", "throttle")
        .with("discard", "unmap")
        .with("node-name", free)
        .with("throttle-group", group);
    let inserted = match target {
        Target::Export(attachment) => daemon.graph.insert_filter_for(attachment, options).await,
        Target::Node(node) => daemon.graph.insert_filter(node, options).await,
    };
    daemon.inserted_filters.add(&inserted.map_err(failed)?);
    Ok(())
}

/// Ends the limits: a filter that we put in is taken out, one of the user's goes into a group without limits.
async fn end_limits(daemon: &Rc<Daemon>, filter: &Arc<Node>) -> QmpResult<Value> {
    let Some(throttle) = filter.throttle() else { return nothing() };
    let group = throttle.group();
    if daemon.inserted_filters.contains(filter) {
        daemon.graph.remove_filter(filter).await.map_err(failed)?;
    } else {
        let free = cowshed_image::filters::throttle::Group::new("", Limits::new()).map_err(failed)?;
        throttle.set_group(free);
    }
    let name = group.name().to_owned();
    drop(group);
    forget_unused(daemon, &name);
    nothing()
}

/// A group that no `object-add` made goes with its last member.
fn forget_unused(daemon: &Rc<Daemon>, name: &str) {
    let unused = daemon.graph.throttle_groups().find(name).is_some_and(|group| group.members() == 0);
    if unused && daemon.objects.find(name).is_none() {
        // Fails only when a member has joined it since.
        let _ = daemon.graph.throttle_groups().delete(name);
    }
}
