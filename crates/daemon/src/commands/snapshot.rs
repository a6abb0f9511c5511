// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Live snapshots, one or several at the same moment.

use super::bitmaps::{self, BitmapAction, BitmapChanged, Removed};
use super::block_jobs::{BackupPlan, BackupStarted, plan_backup};
use super::drives::{self, DrivePlan, DriveStarted};
use super::internal::{self, InternalPlan, InternalTaken};
use super::names;
use super::new_file::{NewFile, plain_name};
use super::{Arguments, Group, change, failed, new_file, nothing};
use crate::jobs::Job;
use crate::state::Daemon;
use cowshed_create::{CreateRequest, takes_backing};
use cowshed_image::DRIVERS;
use cowshed_image::Node;
use cowshed_image::graph::SnapshotTaken;
use cowshed_image::node::ChildRole;
use cowshed_qmp::{QmpError, QmpResult};
use serde_json::{Value, json};
use std::rc::Rc;
use std::sync::Arc;

pub(super) const GROUP: Group = Group {
    schema: "
enum NewImageMode: existing absolute-paths
object BlockdevSnapshot: node: str, overlay: str
object BlockdevSnapshotSync: device?: str, node-name?: str, snapshot-file: str, snapshot-node-name?: str, format?: str
  , mode?: NewImageMode
object BlockdevSnapshotWrapper: data: BlockdevSnapshot
object BlockdevSnapshotSyncWrapper: data: BlockdevSnapshotSync
object Abort:
object AbortWrapper: data: Abort
object BlockdevBackupWrapper: data: BlockdevBackup
enum TransactionActionKind: abort blockdev-snapshot blockdev-snapshot-sync blockdev-snapshot-internal-sync
  blockdev-backup drive-backup block-dirty-bitmap-add
  block-dirty-bitmap-remove block-dirty-bitmap-clear block-dirty-bitmap-enable block-dirty-bitmap-disable
  block-dirty-bitmap-merge
object TransactionAction: type: TransactionActionKind | type = abort: AbortWrapper
  , blockdev-snapshot: BlockdevSnapshotWrapper, blockdev-snapshot-sync: BlockdevSnapshotSyncWrapper
  , blockdev-snapshot-internal-sync: BlockdevSnapshotInternalWrapper
  , blockdev-backup: BlockdevBackupWrapper, drive-backup: DriveBackupWrapper, block-dirty-bitmap-add: BlockDirtyBitmapAddWrapper
  , block-dirty-bitmap-remove: BlockDirtyBitmapWrapper, block-dirty-bitmap-clear: BlockDirtyBitmapWrapper
  , block-dirty-bitmap-enable: BlockDirtyBitmapWrapper, block-dirty-bitmap-disable: BlockDirtyBitmapWrapper
  , block-dirty-bitmap-merge: BlockDirtyBitmapMergeWrapper
enum ActionCompletionMode: individual grouped
object TransactionProperties: completion-mode?: ActionCompletionMode
command blockdev-snapshot(BlockdevSnapshot)
command blockdev-snapshot-sync(BlockdevSnapshotSync)
command change-backing-file: device: str, image-node-name: str, backing-file: str
command transaction: actions: [TransactionAction], properties?: TransactionProperties
",
    commands: &[
        change!("blockdev-snapshot", blockdev_snapshot),
        change!("blockdev-snapshot-sync", blockdev_snapshot_sync),
        change!("transaction", transaction),
        change!("change-backing-file", change_backing_file),
    ],
};

/// A snapshot that is ready to be taken: its overlay is open.
pub(super) struct Prepared {
    node: Arc<Node>,
    overlay: Arc<Node>,
    /// The overlay was opened, and perhaps created, for this: it goes if the snapshot isn't taken.
    opened: bool,
    created: Option<NewFile>,
}

impl Prepared {
    /// Another action of the same transaction may have changed the disk below since its overlay was created: the header names it
    /// as it is now.
    async fn name_again(&self) -> cowshed_types::Result<()> {
        let Some(file) = &self.created else { return Ok(()) };
        let below = self.node.header_name(Some(&file.plain_name()))?;
        let named = match self.overlay.backing_name() {
            Some(backing) => backing.name(),
            None => self.overlay.description().and_then(|known| known.backing_name),
        };
        if named.is_some_and(|name| name == below.file) {
            return Ok(());
        }
        self.overlay.change_backing_file(Some(&below.file), Some(below.format)).await
    }

    async fn discard(self, daemon: &Rc<Daemon>) {
        if self.opened
            && let Err(error) = daemon.graph.delete(self.overlay.name()).await
        {
            tracing::warn!(%error, "could not close an overlay");
        }
        if let Some(created) = self.created {
            created.remove();
        }
    }
}

async fn blockdev_snapshot(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    let prepared = prepare_blockdev(&daemon, &arguments)?;
    carry_out(&daemon, vec![Action::Snapshot(prepared)]).await
}

async fn blockdev_snapshot_sync(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    let prepared = prepare_sync(&daemon, &arguments).await?;
    carry_out(&daemon, vec![Action::Snapshot(prepared)]).await
}

/// An action of a transaction that is ready to be carried out.
pub(super) enum Action {
    Snapshot(Prepared),
    Internal(InternalPlan),
    Backup(Box<BackupPlan>),
    Drive(Box<DrivePlan>),
    Bitmap(BitmapAction),
}

/// An action that has been carried out.
enum Done {
    Snapshot(Prepared, SnapshotTaken),
    Internal(InternalTaken),
    Backup(Box<BackupStarted>),
    Drive(Box<DriveStarted>),
    Bitmap(BitmapChanged),
    /// A job that has only been announced, and what goes with it.
    Announced(Rc<Job>, Action),
}

async fn transaction(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    let actions = arguments.get("actions").and_then(Value::as_array).cloned().unwrap_or_default();
    let grouped = arguments.object("properties").and_then(|map| map.get("completion-mode")) == Some(&json!("grouped"));
    let kinds = || actions.iter().filter_map(|action| action["type"].as_str());
    if grouped && let Some(kind) = kinds().find(|kind| !matches!(*kind, "blockdev-backup" | "drive-backup")) {
        return Err(QmpError::generic(format!(
            "Action '{kind}' does not support transaction property completion-mode = grouped"
        )));
    }
    let mut ready = Vec::new();
    let mut failure = None;
    for action in &actions {
        let data = Arguments::new(action["data"].as_object().cloned().unwrap_or_default());
        let one = match action["type"].as_str().unwrap_or_default() {
            "blockdev-snapshot" => prepare_blockdev(&daemon, &data).map(Action::Snapshot),
            "blockdev-snapshot-sync" => prepare_sync(&daemon, &data).await.map(Action::Snapshot),
            "blockdev-snapshot-internal-sync" => internal::plan(&daemon, &data).map(Action::Internal),
            "blockdev-backup" => plan_backup(&daemon, &data).await.map(|plan| Action::Backup(Box::new(plan))),
            "drive-backup" => drives::plan(&daemon, data).await.map(|plan| Action::Drive(Box::new(plan))),
            kind if bitmaps::ACTIONS.contains(&kind) => bitmaps::prepare(&daemon, kind, &data).map(Action::Bitmap),
            _ => Err(QmpError::generic("Transaction aborted using Abort action")),
        };
        match one {
            Ok(one) => ready.push(one),
            Err(error) => {
                failure = Some(error);
                break;
            }
        }
    }
    let Some(error) = failure else { return carry_out_as(&daemon, ready, grouped).await };
    Err(give_up(&daemon, ready, error).await)
}

/// Discards actions behind which another one failed with `error`; the error of the transaction. As in QEMU changes of
/// bitmaps fail in their turn, so the error is that of the first one that can't be carried out. A bitmap that the image
/// stores is left alone. Its change is durable at once, and a power cut could come before it is taken back.
async fn give_up(daemon: &Rc<Daemon>, actions: Vec<Action>, mut error: QmpError) -> QmpError {
    let nodes: Vec<Arc<Node>> = actions.iter().map(Action::node).collect();
    let drained = daemon.graph.drain(&nodes.iter().collect::<Vec<_>>()).await;
    let (mut done, mut has_failed, mut removed) = (Vec::new(), false, Removed::default());
    for action in actions {
        if !has_failed && let Err(earlier) = action.pass(&mut removed) {
            (error, has_failed) = (earlier, true);
        }
        match action {
            Action::Bitmap(change) if !has_failed && !change.is_stored().await => match change.run(&daemon.graph).await
            {
                Ok(changed) => done.push(Done::Bitmap(changed)),
                Err(earlier) => (error, has_failed) = (earlier, true),
            },
            Action::Backup(_) | Action::Drive(_) if !has_failed => match action.announce(daemon) {
                Ok(job) => done.push(Done::Announced(job, action)),
                Err(earlier) => {
                    (error, has_failed) = (earlier, true);
                    action.discard(daemon).await;
                }
            },
            other => other.discard(daemon).await,
        }
    }
    for one in done.into_iter().rev() {
        one.roll_back(daemon).await;
    }
    drop(drained);
    error
}

impl Action {
    fn node(&self) -> Arc<Node> {
        match self {
            Action::Snapshot(one) => Arc::clone(&one.node),
            Action::Internal(plan) => Arc::clone(plan.node()),
            Action::Backup(plan) => Arc::clone(plan.source()),
            Action::Drive(plan) => Arc::clone(plan.source()),
            Action::Bitmap(action) => Arc::clone(action.node()),
        }
    }

    /// The job of a backup.
    fn announce(&self, daemon: &Daemon) -> QmpResult<Rc<Job>> {
        match self {
            Action::Backup(plan) => plan.announce(daemon),
            Action::Drive(plan) => plan.backup().announce(daemon),
            _ => Err(QmpError::generic("no backup")),
        }
    }

    /// Refuses it where it is about a bitmap that an action before it has removed.
    fn pass(&self, removed: &mut Removed) -> QmpResult<()> {
        let backup = match self {
            Action::Bitmap(action) => return removed.pass(action),
            Action::Backup(plan) => &**plan,
            Action::Drive(plan) => plan.backup(),
            Action::Snapshot(_) | Action::Internal(_) => return Ok(()),
        };
        backup.bitmap().map_or(Ok(()), |name| removed.check_use(backup.source(), name))
    }

    async fn discard(self, daemon: &Rc<Daemon>) {
        match self {
            Action::Snapshot(one) => one.discard(daemon).await,
            Action::Drive(plan) => plan.discard(daemon).await,
            Action::Internal(_) | Action::Backup(_) | Action::Bitmap(_) => {}
        }
    }

    /// Carries it out, or leaves everything as it was.
    async fn run(self, daemon: &Rc<Daemon>) -> QmpResult<Done> {
        match self {
            Action::Snapshot(one) => match daemon.graph.take_snapshot(&one.node, &one.overlay).await {
                Ok(taken) => match one.name_again().await {
                    Ok(()) => Ok(Done::Snapshot(one, taken)),
                    Err(error) => {
                        Done::Snapshot(one, taken).roll_back(daemon).await;
                        Err(failed(error))
                    }
                },
                Err(error) => {
                    one.discard(daemon).await;
                    Err(failed(error))
                }
            },
            Action::Internal(plan) => plan.run(daemon).await.map(Done::Internal),
            Action::Backup(plan) => plan.start(daemon).await.map(|started| Done::Backup(Box::new(started))),
            Action::Drive(plan) => plan.start(daemon).await.map(|started| Done::Drive(Box::new(started))),
            Action::Bitmap(action) => action.run(&daemon.graph).await.map(Done::Bitmap),
        }
    }
}

impl Done {
    async fn roll_back(self, daemon: &Rc<Daemon>) {
        match self {
            Done::Snapshot(one, taken) => {
                daemon.graph.take_snapshot_back(taken).await;
                one.discard(daemon).await;
            }
            Done::Internal(taken) => {
                if let Err(error) = taken.roll_back(daemon).await {
                    tracing::error!(%error, "could not take an internal snapshot back");
                }
            }
            Done::Backup(started) => started.roll_back(daemon).await,
            Done::Drive(started) => started.roll_back(daemon).await,
            Done::Bitmap(changed) => changed.roll_back(&daemon.graph).await,
            Done::Announced(job, action) => {
                daemon.jobs.abandon(&job);
                drop(job);
                Box::pin(action.discard(daemon)).await;
            }
        }
    }
}

/// Carries all actions out at one moment, or none.
pub(super) async fn carry_out(daemon: &Rc<Daemon>, actions: Vec<Action>) -> QmpResult<Value> {
    carry_out_as(daemon, actions, false).await
}

/// As [`carry_out`]; the jobs end together where they are `grouped`.
async fn carry_out_as(daemon: &Rc<Daemon>, actions: Vec<Action>, grouped: bool) -> QmpResult<Value> {
    let nodes: Vec<Arc<Node>> = actions.iter().map(Action::node).collect();
    // No request runs between the first and the last one.
    let drained = daemon.graph.drain(&nodes.iter().collect::<Vec<_>>()).await;
    let mut done = Vec::new();
    let mut rest = actions.into_iter();
    let (mut failure, mut removed) = (None, Removed::default());
    for action in rest.by_ref() {
        let ran = match action.pass(&mut removed) {
            Ok(()) => action.run(daemon).await,
            Err(error) => {
                action.discard(daemon).await;
                Err(error)
            }
        };
        match ran {
            Ok(one) => done.push(one),
            Err(error) => {
                failure = Some(error);
                break;
            }
        }
    }
    if let Some(error) = failure {
        for one in done.into_iter().rev() {
            one.roll_back(daemon).await;
        }
        for action in rest {
            action.discard(daemon).await;
        }
        return Err(error);
    }
    drop(drained);
    let mut backups = Vec::new();
    for one in done {
        match one {
            Done::Snapshot(one, _) => {
                tracing::info!(node = one.node.name(), overlay = one.overlay.name(), "snapshot taken");
                // The monitor owns only the nodes of `blockdev-add`.
                if one.opened
                    && let Err(error) = daemon.graph.disown(&one.overlay).await
                {
                    tracing::warn!(%error, overlay = one.overlay.name(), "could not close an unused overlay");
                }
            }
            Done::Backup(started) => backups.push(started.work()),
            Done::Drive(started) => backups.push(started.work(daemon)),
            Done::Internal(_) | Done::Bitmap(_) | Done::Announced(..) => {}
        }
    }
    daemon.jobs.start_backups(backups, grouped).await;
    nothing()
}

/// Names another backing file in an image's header; open nodes stay as they are.
async fn change_backing_file(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    let device = arguments.text("device");
    let named = names::root(&daemon, device)?;
    let node = names::node(&daemon, arguments.text("image-node-name"))?;
    if node.backing().is_none() && !node.is_filter() {
        let message = "not allowing backing file change on an image without a backing file";
        return Err(QmpError::generic(message));
    }
    let mut chain = std::iter::successors(Some(named.image()), |node| node.backing());
    if !chain.any(|layer| Arc::ptr_eq(&layer, &node)) && !Arc::ptr_eq(&named.node(), &node) {
        return Err(QmpError::generic(format!("'{device}' and image file are not in the same chain")));
    }
    daemon.jobs.check_free(&node)?;
    let Some(backing) = node.backing_name() else {
        let file = arguments.text("backing-file");
        return Err(QmpError::generic(format!("Could not change backing file to '{file}': Operation not supported")));
    };
    let (file, format) = (arguments.text("backing-file"), backing.format());
    daemon.graph.rename_backing(&node, file, format.as_deref()).await.map_err(failed)?;
    nothing()
}

fn prepare_blockdev(daemon: &Rc<Daemon>, arguments: &Arguments) -> QmpResult<Prepared> {
    let name = arguments.text("node");
    // An export is no node, but the words are those for both.
    let not_found = |_| QmpError::generic(format!("Cannot find device='{name}' nor node-name='{name}'"));
    let node = names::lookup(daemon, None, Some(name)).map_err(not_found)?.node();
    check_taken_over(daemon, &node)?;
    let overlay = names::device(daemon, arguments.text("overlay"))?.node();
    if Arc::ptr_eq(&node, &overlay) {
        let name = node.name();
        if overlay.is_filter() {
            return Err(QmpError::generic("Filters cannot be used as overlays"));
        }
        if overlay.backing().is_some() {
            return Err(QmpError::generic("The overlay already has a backing image"));
        }
        return Err(QmpError::generic(format!("Making '{name}' a backing child of '{name}' would create a cycle")));
    }
    Ok(Prepared { node, overlay, opened: false, created: None })
}

async fn prepare_sync(daemon: &Rc<Daemon>, arguments: &Arguments) -> QmpResult<Prepared> {
    let (device, name) = (arguments.maybe_text("device"), arguments.maybe_text("node-name"));
    let named = names::lookup(daemon, device, name)?;
    let node = if matches!(named, names::NamedObject::Export(_)) { named.disk(daemon) } else { named.node() };
    if name.is_some() && arguments.maybe_text("snapshot-node-name").is_none() {
        return Err(QmpError::generic("New overlay node-name missing"));
    }
    check_taken_over(daemon, &node)?;
    let (file, format) = (arguments.text("snapshot-file"), arguments.maybe_text("format").unwrap_or("qcow2"));
    let overlay_name = match arguments.maybe_text("snapshot-node-name") {
        Some(name) if daemon.graph.find(name).is_some() => {
            return Err(QmpError::generic("New overlay node-name already in use"));
        }
        Some(name) => name.to_owned(),
        None => free_name(daemon, "snapshot"),
    };
    let existing = arguments.maybe_text("mode") == Some("existing");
    let created = if existing { None } else { Some(create(daemon, &node, file, format).await?) };
    let opened = match DRIVERS.options_of_name(file, Some(format)) {
        Ok(options) => {
            let discard = if node.discards() { "unmap" } else { "ignore" };
            let options = options.with("node-name", overlay_name).with("backing", Value::Null).with("discard", discard);
            daemon.graph.add(options).await
        }
        Err(error) => Err(error),
    };
    match opened {
        Ok(overlay) => Ok(Prepared { node, overlay, opened: true, created }),
        Err(error) => {
            if let Some(created) = created {
                created.remove();
            }
            Err(failed(error))
        }
    }
}

/// Refuses a node above which no overlay may be put now. Backups read below their filters, whatever stands there.
fn check_taken_over(daemon: &Daemon, node: &Arc<Node>) -> QmpResult<()> {
    let below = |node: &Arc<Node>| node.is_filter().then(|| node.child(ChildRole::File)).flatten();
    let mut parts = std::iter::successors(Some(Arc::clone(node)), below);
    if node.is_filter() && daemon.jobs.works_on(node) {
        daemon.jobs.check_free(node)?;
    }
    parts.try_for_each(|part| match part.is_filter() {
        true => Ok(()),
        false => daemon.jobs.check_free_but_for_backups(&part),
    })?;
    names::check_no_overlay(daemon, node)
}

/// Creates an overlay over the node.
async fn create(daemon: &Rc<Daemon>, node: &Arc<Node>, file: &str, format: &str) -> QmpResult<NewFile> {
    let below = node.header_name(Some(&plain_name(file))).map_err(failed)?;
    // A file in use is refused by its lock, but as in QEMU behind these two.
    if !takes_backing(format) {
        return Err(QmpError::generic(format!("Backing file not supported for file format '{format}'")));
    }
    if file == node.filename() {
        let message = "Error: Trying to create an image with the same filename as the backing file";
        return Err(QmpError::generic(message));
    }
    let request = CreateRequest {
        filename: file.to_owned(),
        format: format.to_owned(),
        size: Some(node.size()),
        backing_file: Some(below.file),
        backing_format: Some(below.format.to_owned()),
        backing_unchecked: true,
        ..CreateRequest::default()
    };
    new_file::create(daemon, request).await
}

/// A node-name that no node has, and that no other command that runs was given.
pub(crate) fn free_name(daemon: &Daemon, stem: &str) -> String {
    let mut given = daemon.given_names.borrow_mut();
    let mut names = (0..).map(|n| format!("{stem}{n}"));
    let is_free = |name: &String| daemon.graph.find(name).is_none() && !given.contains(name);
    let name = names.find(is_free).unwrap_or_else(|| stem.to_owned());
    given.push(name.clone());
    name
}
