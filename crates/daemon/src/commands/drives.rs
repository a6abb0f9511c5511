// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `drive-backup` and `drive-mirror`: backups and mirrors to an image that is named by its file. A missing one is made,
//! and it is closed again when the job ends.

use super::block_jobs::{BackupPlan, BackupStarted, mirror_sync, plan_backup, prepare_mirror};
use super::names;
use super::new_file::{NewFile, plain_name};
use super::{Arguments, Group, change, failed, free_name, new_file, nothing};
use crate::jobs::{Closing, JobWork, Needed};
use crate::state::Daemon;
use cowshed_create::CreateRequest;
use cowshed_image::DRIVERS;
use cowshed_image::Node;
use cowshed_qmp::{QmpError, QmpResult};
use serde_json::Value;
use std::rc::Rc;
use std::sync::Arc;

pub(super) const GROUP: Group = Group {
    schema: "
object DriveBackup: job-id?: str, device: str, target: str, format?: str, sync: BackupSyncMode, mode?: NewImageMode
  , speed?: int, compress?: bool, bitmap?: str, bitmap-mode?: BitmapSyncMode, discard-source?: bool
  , on-source-error?: BlockdevOnError, on-target-error?: BlockdevOnError, on-cbw-error?: OnCbwError
  , filter-node-name?: str, auto-finalize?: bool, auto-dismiss?: bool, x-perf?: BackupPerf
object DriveBackupWrapper: data: DriveBackup
object DriveMirror: job-id?: str, device: str, target: str, format?: str, node-name?: str, replaces?: str
  , sync: MirrorSyncMode, mode?: NewImageMode, speed?: int, granularity?: uint32, buf-size?: int
  , on-source-error?: BlockdevOnError, on-target-error?: BlockdevOnError, unmap?: bool
  , copy-mode?: MirrorCopyMode, auto-finalize?: bool, auto-dismiss?: bool
command drive-backup(DriveBackup)
command drive-mirror(DriveMirror)
",
    commands: &[change!("drive-backup", drive_backup), change!("drive-mirror", drive_mirror)],
};

/// An image that was opened for a job.
struct Target {
    node: Arc<Node>,
    /// The file that was made for it.
    created: Option<NewFile>,
}

impl Target {
    /// Opens the image that a job of `source` is to fill, made anew unless it exists by the arguments.
    async fn open(daemon: &Rc<Daemon>, source: &Arc<Node>, arguments: &Arguments) -> QmpResult<Target> {
        let file = arguments.text("target");
        let name = match arguments.maybe_text("node-name") {
            Some(name) if daemon.graph.find(name).is_some() => {
                return Err(QmpError::generic(format!("Duplicate nodes with node-name='{name}'")));
            }
            Some(name) => name.to_owned(),
            None => free_name(daemon, "drive-target"),
        };
        let exists = arguments.maybe_text("mode") == Some("existing");
        let format = match arguments.maybe_text("format") {
            None if !exists => Some(source.driver_name()),
            format => format,
        };
        let below = match arguments.text("sync") {
            "top" => source.backing(),
            "none" => Some(Arc::clone(source)),
            _ => None,
        };
        let created = match exists {
            true => None,
            false => Some(create(daemon, source, below.as_ref(), file, format.unwrap_or("raw")).await?),
        };
        let mut options = DRIVERS.options_of_name(file, format).map_err(failed)?;
        options.insert("node-name", name);
        let is_discarding = arguments.flag("unmap", true);
        options.insert("discard", if is_discarding { "unmap" } else { "ignore" });
        let driver = options.text("driver").and_then(|name| DRIVERS.schema(name));
        if driver.is_some_and(|schema| schema.knows("backing")) {
            // The disk itself can't be the backing node: it is being written. The job doesn't read the part that the
            // copy lacks.
            let below = below.filter(|_| arguments.text("sync") == "top");
            options.insert("backing", below.map_or(Value::Null, |node| node.name().into()));
        }
        match daemon.graph.add(options).await {
            Ok(node) => Ok(Target { node, created }),
            Err(error) => {
                if let Some(created) = created {
                    created.remove();
                }
                Err(failed(error))
            }
        }
    }

    /// It goes with the job.
    fn with_job(self, daemon: &Rc<Daemon>) -> Closing {
        let daemon = Rc::clone(daemon);
        let remove =
            self.created.map(|created| -> Box<dyn FnOnce()> { Box::new(move || created.remove_unless_used(&daemon)) });
        Closing { node: self.node, remove, needed: Needed::default() }
    }

    /// As if it had not been opened.
    async fn discard(self, daemon: &Rc<Daemon>) {
        if let Err(error) = daemon.graph.delete(self.node.name()).await {
            tracing::warn!(%error, "could not close the target of a job");
        }
        if let Some(created) = self.created {
            created.remove();
        }
    }
}

/// Makes an image as large as the source, on top of `below`.
async fn create(
    daemon: &Rc<Daemon>,
    source: &Arc<Node>,
    below: Option<&Arc<Node>>,
    file: &str,
    format: &str,
) -> QmpResult<NewFile> {
    let below = below.map(|node| node.header_name(Some(&plain_name(file)))).transpose().map_err(failed)?;
    let request = CreateRequest {
        filename: file.to_owned(),
        format: format.to_owned(),
        size: Some(source.size()),
        backing_format: below.as_ref().map(|below| below.format.to_owned()),
        backing_file: below.map(|below| below.file),
        backing_unchecked: true,
        ..CreateRequest::default()
    };
    new_file::create(daemon, request).await
}

/// The arguments of the command that takes a node as its target.
fn with_node(arguments: Arguments, target: &Target) -> Arguments {
    let mut map = arguments.into_map();
    for key in ["format", "mode", "node-name", "unmap"] {
        map.remove(key);
    }
    map.insert("target".to_owned(), target.node.name().into());
    Arguments::new(map)
}

/// A backup whose target is open.
pub(super) struct DrivePlan {
    backup: BackupPlan,
    target: Target,
}

/// A backup whose moment has come.
pub(super) struct DriveStarted {
    backup: BackupStarted,
    target: Target,
}

pub(super) async fn plan(daemon: &Rc<Daemon>, arguments: Arguments) -> QmpResult<DrivePlan> {
    let source = names::for_job(daemon, arguments.text("device"))?;
    daemon.jobs.check_readable(&source)?;
    let arguments = match arguments.text("sync") == "top" && source.backing().is_none() {
        // There is nothing below, so all is at the top.
        true => arguments.with("sync", "full"),
        false => arguments,
    };
    let target = Target::open(daemon, &source, &arguments).await?;
    match plan_backup(daemon, &with_node(arguments, &target)).await {
        Ok(backup) => Ok(DrivePlan { backup, target }),
        Err(error) => {
            target.discard(daemon).await;
            Err(error)
        }
    }
}

impl DrivePlan {
    pub(super) fn source(&self) -> &Arc<Node> {
        self.backup.source()
    }

    pub(super) fn backup(&self) -> &BackupPlan {
        &self.backup
    }

    pub(super) async fn discard(self, daemon: &Rc<Daemon>) {
        // The backup holds the target, so it goes first.
        let DrivePlan { backup, target } = self;
        drop(backup);
        target.discard(daemon).await;
    }

    pub(super) async fn start(self, daemon: &Rc<Daemon>) -> QmpResult<DriveStarted> {
        let DrivePlan { backup, target } = self;
        match backup.start(daemon).await {
            Ok(backup) => Ok(DriveStarted { backup, target }),
            Err(error) => {
                target.discard(daemon).await;
                Err(error)
            }
        }
    }
}

impl DriveStarted {
    pub(super) fn work(self, daemon: &Rc<Daemon>) -> JobWork {
        self.backup.work_and_close(daemon, self.target.with_job(daemon))
    }

    pub(super) async fn roll_back(self, daemon: &Rc<Daemon>) {
        self.backup.roll_back(daemon).await;
        self.target.discard(daemon).await;
    }
}

async fn drive_backup(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    let started = plan(&daemon, arguments).await?.start(&daemon).await?;
    daemon.jobs.start_backups(vec![started.work(&daemon)], false).await;
    nothing()
}

async fn drive_mirror(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    let named = names::root(&daemon, arguments.text("device"))?;
    let (source, disk) = (named.image(), named.disk(&daemon));
    daemon.jobs.check_free(&source)?;
    mirror_sync(&arguments)?;
    if arguments.maybe_text("replaces").is_some() && arguments.maybe_text("node-name").is_none() {
        let message = "a node-name must be provided when replacing a named node of the graph";
        return Err(QmpError::generic(message));
    }
    let target = Target::open(&daemon, &source, &arguments).await?;
    match prepare_mirror(&daemon, &with_node(arguments, &target), (&source, &disk), &target.node, true).await {
        Ok(prepared) => prepared.start(&daemon, Some(target.with_job(&daemon))),
        Err(error) => {
            target.discard(&daemon).await;
            Err(error)
        }
    }
}
