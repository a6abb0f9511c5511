// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Exports of the type `ublk`.

use super::{Arguments, failed, nothing};
use crate::message::Message;
use crate::nbd::Exported;
use crate::servers::ExportServer;
use crate::state::Daemon;
use cowshed_image::graph::{AttachRequest, Attachment};
use cowshed_image::node::LocalFuture;
use cowshed_qmp::{QmpError, QmpResult};
use cowshed_types::{Error, Result};
use cowshed_ublk::{Config, Recover, Server, open_driver};
use serde_json::Value;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The name of the type.
pub(crate) const UBLK: &str = "ublk";
/// Requests of a queue, by default.
const DEPTH: u64 = 128;
/// Lives as long as the kernel does, and belongs to no user.
const NOTES: &str = "/dev/shm";

pub(super) async fn add(daemon: &Rc<Daemon>, arguments: &Arguments, node: &str) -> QmpResult<Value> {
    let node = daemon.graph.find(node).ok_or_else(|| QmpError::generic(format!("there is no node '{node}'")))?;
    let writable = arguments.flag("writable", false);
    if writable && node.is_read_only() {
        return Err(QmpError::generic("Cannot export read-only node as writable"));
    }
    let number = |key: &str, default: u64| arguments.number(key).map(|number| number.unwrap_or(default));
    let config = Config {
        id: arguments.text("id").to_owned(),
        writable,
        writethrough: arguments.flag("writethrough", false),
        block_bytes: u32::try_from(number("logical-block-size", 512)?).unwrap_or(u32::MAX),
        queues: number("num-queues", 1)?,
        depth: number("queue-size", DEPTH)?,
        device: arguments.number("device-id")?.map(|number| u32::try_from(number).unwrap_or(u32::MAX)),
        recover: match arguments.maybe_text("recover") {
            Some("on") => Recover::On,
            Some("auto") => Recover::Auto,
            _ => Recover::Off,
        },
        unprivileged: arguments.flag("unprivileged", false),
        poll_limit: daemon.objects.poll_limit.clone(),
        notes: PathBuf::from(NOTES),
    };
    let worded = |error: Error| QmpError::generic(error.message().to_owned());
    config.check().map_err(worded)?;
    let request = AttachRequest::export(config.id.clone(), writable);
    let attachment = daemon.graph.attach(&node, request).await.map_err(failed)?;
    if let Err(error) = start(daemon, config, Arc::clone(&attachment)).await {
        attachment.detach().await.map_err(failed)?;
        return Err(failed(error));
    }
    nothing()
}

async fn start(daemon: &Daemon, config: Config, attachment: Arc<Attachment>) -> Result<()> {
    let (id, writable) = (config.id.clone(), config.writable);
    let has_ended = Arc::new(AtomicBool::new(false));
    let (ended, control, ending) = (Arc::clone(&has_ended), daemon.control.clone(), id.clone());
    let on_end = Box::new(move || {
        ended.store(true, Ordering::SeqCst);
        // Fails only when the daemon has stopped.
        let _ = control.send(Message::ExportEnded(ending));
    });
    let server = Server::start(open_driver()?, config, Arc::clone(&attachment), on_end).await?;
    let export = Exported::new(UBLK, id.clone(), id, attachment, writable, Vec::new());
    daemon.servers.add(export, Rc::new(Served { server, has_ended }));
    Ok(())
}

struct Served {
    server: Server,
    has_ended: Arc<AtomicBool>,
}

impl ExportServer for Served {
    /// Programs that have the device open keep no export from going.
    fn is_connected(&self) -> bool {
        false
    }

    fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::SeqCst)
    }

    /// The path of the block device.
    fn uris(&self) -> Vec<String> {
        vec![self.server.path()]
    }

    fn look_at_size(&self) {
        self.server.look_at_size();
    }

    fn stop(&self) -> LocalFuture<'_, ()> {
        Box::pin(self.server.stop())
    }
}
