// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Commands that QEMU calls experimental (`x-`), and that management tools call all the same.

use super::bitmaps::node_of;
use super::create::assignment;
use super::{Arguments, Group, change, command, failed, names, nothing};
use crate::jobs::{JobFinish, JobSpec};
use crate::state::Daemon;
use cowshed_create::schema::amended_options_of;
use cowshed_image::Node;
use cowshed_jobs::key_slots::LiveSlots;
use cowshed_qmp::{QmpError, QmpResult};
use cowshed_types::{Error, Result};
use serde_json::{Map, Value, json};
use std::rc::Rc;
use std::sync::Arc;

pub(super) const GROUP: Group = Group {
    schema: "
alternate StrOrNull: str, null
object BlockDirtyBitmapSha256: sha256: str
object BlockdevAmendOptionsQcow2: encrypt?: QCryptoBlockAmendOptions
object QCryptoBlockAmendOptions: format: QCryptoBlockFormat | format = luks: QCryptoBlockAmendOptionsLUKS
enum QCryptoBlockLUKSKeyslotState: active inactive
object QCryptoBlockAmendOptionsLUKS: state: QCryptoBlockLUKSKeyslotState, new-secret?: str, old-secret?: str
  , keyslot?: int, iter-time?: int, secret?: str
object BlockdevAmendOptions: driver: BlockdevDriver | driver = luks: QCryptoBlockAmendOptionsLUKS
  , qcow2: BlockdevAmendOptionsQcow2
command x-blockdev-amend: job-id: str, node-name: str, options: BlockdevAmendOptions, force?: bool
command x-blockdev-change: parent: str, child?: str, node?: str
command x-blockdev-set-iothread: node-name: str, iothread: StrOrNull, force?: bool
command x-debug-block-dirty-bitmap-sha256(BlockDirtyBitmap) -> BlockDirtyBitmapSha256
",
    commands: &[
        change!("x-blockdev-amend", amend),
        command!("x-blockdev-change", change_children),
        command!("x-blockdev-set-iothread", set_iothread),
        change!("x-debug-block-dirty-bitmap-sha256", bitmap_digest),
    ],
};

/// A job, as QEMU has it. It has ended before the answer where it has to look at no key.
async fn amend(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    let name = arguments.text("node-name");
    let node = names::lookup(&daemon, None, Some(name))?.node();
    let options = arguments.object("options").cloned().unwrap_or_default();
    let driver = options.get("driver").and_then(Value::as_str).unwrap_or_default();
    if driver != node.driver_name() {
        return Err(QmpError::generic("x-blockdev-amend doesn't support changing the block driver"));
    }
    if amended_options_of(driver).is_none() {
        return Err(QmpError::generic("Driver does not support x-blockdev-amend"));
    }
    names::check_job_id(arguments.text("job-id"))?;
    let change = slot_change(&daemon, &node, &options, arguments.flag("force", false));
    let refused = match &change {
        Ok(Some(change)) => change.check().await,
        _ => Ok(()),
    };
    let is_read_only = node.is_read_only();
    let ends_at_once = refused.is_err() || !matches!(change, Ok(Some(_)));
    let spec = JobSpec {
        id: arguments.text("job-id").to_owned(),
        kind: "amend",
        auto_finalize: true,
        auto_dismiss: false,
        speed: 0,
        nodes: Vec::new(),
        readable: Vec::new(),
        on_error: Default::default(),
    };
    let job = daemon.jobs.add(spec, &daemon.events)?;
    if is_read_only && !matches!(change, Ok(None)) {
        daemon.jobs.dismiss(&job);
        return Err(QmpError::generic("Block node is read-only"));
    }
    let handle = job.handle.clone();
    let work = async move {
        handle.set_progress(1, 1);
        let changed = match (refused, change) {
            (Ok(()), Ok(Some(change))) => change.run().await,
            (refused, change) => refused.and(change.map(drop)),
        };
        // The job's error is QEMU's sentence alone.
        changed.map_err(|error| {
            let sentence = error.message().to_owned();
            error.qemu(sentence)
        })
    };
    let finish = JobFinish::new(|_| Box::pin(async { Result::Ok(()) }));
    daemon.jobs.start(Rc::clone(&job), async move { (work.await, finish) });
    if ends_at_once {
        job.await_end().await;
    }
    nothing()
}

/// The change of the key slots; `None` without one.
fn slot_change(
    daemon: &Daemon,
    node: &Arc<Node>,
    options: &Map<String, Value>,
    force: bool,
) -> Result<Option<LiveSlots>> {
    let is_luks = node.encrypted_volume().is_some();
    let given = match options.get("encrypt").and_then(Value::as_object) {
        _ if is_luks => options,
        None => return Ok(None),
        Some(_) if !node.is_encrypted() => return Err(Error::unsupported("image is not encrypted, can't amend")),
        Some(encrypt) if encrypt.get("format").is_none_or(|format| format != "luks") => {
            return Err(Error::unsupported("Amend can't be used to change the qcow2 encryption format"));
        }
        Some(encrypt) => encrypt,
    };
    let prefix = if is_luks { "" } else { "encrypt." };
    let mut list = Vec::new();
    let mut opened_by = None;
    for (key, value) in given {
        match key.as_str() {
            "driver" | "format" => {}
            "secret" => opened_by = value.as_str().map(str::to_owned),
            // Where QEMU takes a negative number for a large one.
            "keyslot" if value.as_i64().is_some_and(|slot| slot < 0) => {
                list.push(assignment(&format!("{prefix}keyslot"), &json!(u32::MAX)));
            }
            key => list.push(assignment(&format!("{prefix}{key}"), value)),
        }
    }
    LiveSlots::new(&daemon.graph, node, daemon.objects.secrets(), (&list, opened_by), force).map(Some)
}

/// QEMU changes the children of a quorum so. There is none here, and no other node lets it.
async fn change_children(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    let parent = names::device(&daemon, arguments.text("parent"))?.node();
    let action = match (arguments.maybe_text("child"), arguments.maybe_text("node")) {
        (Some(_), Some(_)) => return Err(QmpError::generic("The parameters child and node are in conflict")),
        (None, None) => return Err(QmpError::generic("Either child or node must be specified")),
        (Some(child), None) if !parent.children().iter().any(|known| known.role.name() == child) => {
            let message = format!("Node '{}' does not have child '{child}'", parent.name());
            return Err(QmpError::generic(message));
        }
        (Some(_), None) => "removing",
        (None, Some(node)) => {
            let not_found = |_| QmpError::generic(format!("Node '{node}' not found"));
            names::node(&daemon, node).map_err(not_found)?;
            "adding"
        }
    };
    Err(QmpError::generic(format!("The node {} does not support {action} a child", parent.name())))
}

/// Requests run on the threads of their clients here, so there is nothing to move.
async fn set_iothread(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    let name = arguments.text("node-name");
    let node = daemon.node(name)?;
    let is_exported = || daemon.exports().iter().any(|export| Arc::ptr_eq(&export.attachment.node(), &node));
    if !arguments.flag("force", false) && is_exported() {
        return Err(QmpError::generic(format!(
            "Node {name} is associated with a BlockBackend and could be in use (use force=true to override this check)"
        )));
    }
    if let Some(thread) = arguments.maybe_text("iothread") {
        let not_found = |_| QmpError::generic(format!("Cannot find iothread {thread}"));
        daemon.objects.check_iothread(thread).map_err(not_found)?;
    }
    nothing()
}

async fn bitmap_digest(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    let (node, name) = (node_of(&daemon, arguments.text("node"))?, arguments.text("name"));
    if !node.bitmaps().await.map_err(failed)?.iter().any(|bitmap| bitmap.name == name) {
        return Err(QmpError::generic(format!("Dirty bitmap '{name}' not found")));
    }
    let digest = node.bitmap_digest(name).await.map_err(failed)?;
    Ok(json!({"sha256": digest}))
}
