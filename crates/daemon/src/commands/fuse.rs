// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Exports of the type `fuse`.

use super::{Arguments, failed, nothing};
use crate::message::Message;
use crate::nbd::Exported;
use crate::servers::ExportServer;
use crate::state::Daemon;
use cowshed_fuse::{AllowOther, MountPoint, Server, ServerConfig};
use cowshed_image::graph::{AttachRequest, Attachment};
use cowshed_image::node::LocalFuture;
use cowshed_qmp::{QmpError, QmpResult};
use cowshed_types::Result;
use serde_json::Value;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The name of the type.
pub(crate) const FUSE: &str = "fuse";

pub(super) async fn add(daemon: &Rc<Daemon>, arguments: &Arguments, node: &str) -> QmpResult<Value> {
    let node = daemon.graph.find(node).ok_or_else(|| QmpError::generic(format!("there is no node '{node}'")))?;
    let writable = arguments.flag("writable", false);
    if writable && node.is_read_only() {
        return Err(QmpError::generic("Cannot export read-only node as writable"));
    }
    let threads = arguments.get("iothread").and_then(Value::as_array).map(Vec::len);
    let config = ServerConfig {
        id: arguments.text("id").to_owned(),
        writable,
        growable: writable && arguments.flag("growable", false),
        writethrough: arguments.flag("writethrough", false),
        allow_other: match arguments.maybe_text("allow-other") {
            Some("off") => AllowOther::Off,
            Some("on") => AllowOther::On,
            _ => AllowOther::Auto,
        },
        threads: threads.unwrap_or(daemon.queues),
        poll_limit: daemon.objects.poll_limit.clone(),
        guard: daemon.mount_guard.clone(),
    };
    let point = MountPoint::new(arguments.text("mountpoint")).map_err(failed)?;
    let request = AttachRequest::export(config.id.clone(), writable);
    let request = if config.growable { request.resizing() } else { request };
    let attachment = daemon.graph.attach(&node, request).await.map_err(failed)?;
    if let Err(error) = start(daemon, config, &point, Arc::clone(&attachment)) {
        attachment.detach().await.map_err(failed)?;
        return Err(failed(error));
    }
    nothing()
}

fn start(daemon: &Daemon, config: ServerConfig, point: &MountPoint, attachment: Arc<Attachment>) -> Result<()> {
    let (id, writable) = (config.id.clone(), config.writable);
    let has_ended = Arc::new(AtomicBool::new(false));
    let (ended, control, ending) = (Arc::clone(&has_ended), daemon.control.clone(), id.clone());
    let on_unmount = Box::new(move || {
        ended.store(true, Ordering::SeqCst);
        // Fails only when the daemon has stopped.
        let _ = control.send(Message::ExportEnded(ending));
    });
    let (control, is_told) = (daemon.control.clone(), Arc::new(AtomicBool::new(false)));
    let on_resize = Box::new(move || {
        if !is_told.swap(true, Ordering::SeqCst) {
            // As above.
            let _ = control.send(Message::SizeChanged(Arc::clone(&is_told)));
        }
    });
    let server = Server::start(config, point, Arc::clone(&attachment), (on_unmount, on_resize))?;
    let export = Exported::new(FUSE, id.clone(), id, attachment, writable, Vec::new());
    daemon.servers.add(export, Rc::new(Mounted { server, has_ended }));
    Ok(())
}

struct Mounted {
    server: Server,
    has_ended: Arc<AtomicBool>,
}

impl ExportServer for Mounted {
    /// Programs that have the file open keep no export from going.
    fn is_connected(&self) -> bool {
        false
    }

    fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::SeqCst)
    }

    /// The path of the file.
    fn uris(&self) -> Vec<String> {
        vec![self.server.path().to_string_lossy().into_owned()]
    }

    fn look_at_size(&self) {
        self.server.look_at_size();
    }

    fn stop(&self) -> LocalFuture<'_, ()> {
        Box::pin(self.server.stop())
    }
}
