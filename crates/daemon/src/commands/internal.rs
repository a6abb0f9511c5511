// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Internal snapshots of images in use.

use super::names;
use super::{Arguments, Group, change, failed, nothing};
use crate::state::Daemon;
use cowshed_image::{Node, SnapshotName};
use cowshed_jobs::info::SnapshotInfo;
use cowshed_qmp::{QmpError, QmpResult};
use cowshed_types::Result;
use serde_json::Value;
use std::rc::Rc;
use std::sync::Arc;

pub(super) const GROUP: Group = Group {
    schema: "
object BlockdevSnapshotInternal: device: str, name: str
object BlockdevSnapshotInternalWrapper: data: BlockdevSnapshotInternal
object SnapshotInfo: id: str, name: str, vm-state-size: int, date-sec: int, date-nsec: int, vm-clock-sec: int
  , vm-clock-nsec: int, icount?: int
command blockdev-snapshot-internal-sync(BlockdevSnapshotInternal)
command blockdev-snapshot-delete-internal-sync: device: str, id?: str, name?: str -> SnapshotInfo
",
    commands: &[
        change!("blockdev-snapshot-internal-sync", take),
        change!("blockdev-snapshot-delete-internal-sync", delete),
    ],
};

/// A snapshot that is ready to be taken.
pub(super) struct InternalPlan {
    node: Arc<Node>,
    name: String,
}

/// A snapshot that was taken.
pub(super) struct InternalTaken {
    node: Arc<Node>,
    id: String,
}

pub(super) fn plan(daemon: &Daemon, arguments: &Arguments) -> QmpResult<InternalPlan> {
    let node = names::root(daemon, arguments.text("device"))?.image();
    daemon.jobs.check_free(&node)?;
    Ok(InternalPlan { node, name: arguments.text("name").to_owned() })
}

impl InternalPlan {
    pub(super) fn node(&self) -> &Arc<Node> {
        &self.node
    }

    pub(super) async fn run(self, daemon: &Rc<Daemon>) -> QmpResult<InternalTaken> {
        let InternalPlan { node, name } = self;
        let id = daemon.graph.take_internal_snapshot(&node, &name).await.map_err(failed)?;
        tracing::info!(node = node.name(), name, id, "internal snapshot taken");
        Ok(InternalTaken { node, id })
    }
}

impl InternalTaken {
    pub(super) async fn roll_back(&self, daemon: &Rc<Daemon>) -> Result<()> {
        daemon.graph.delete_internal_snapshot(&self.node, &SnapshotName::of_id(&*self.id)).await.map(drop)
    }
}

async fn take(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    plan(&daemon, &arguments)?.run(&daemon).await?;
    nothing()
}

async fn delete(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    let node = names::root(&daemon, arguments.text("device"))?.image();
    daemon.jobs.check_free(&node)?;
    let wanted = match (arguments.maybe_text("id"), arguments.maybe_text("name")) {
        (Some(id), Some(name)) => SnapshotName::of_id_and_name(id, name),
        (Some(id), None) => SnapshotName::of_id(id),
        (None, Some(name)) => SnapshotName::of_name(name),
        (None, None) => return Err(QmpError::generic("Name or id must be provided")),
    };
    let deleted = daemon.graph.delete_internal_snapshot(&node, &wanted).await.map_err(failed)?;
    tracing::info!(node = node.name(), %wanted, "internal snapshot deleted");
    serde_json::to_value(SnapshotInfo::from(&deleted)).map_err(|error| QmpError::generic(error.to_string()))
}
