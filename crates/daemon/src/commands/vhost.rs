// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Exports of the type `vhost-user-blk`.

use super::{Arguments, failed, nothing};
use crate::nbd::Exported;
use crate::servers::{ExportServer, VHOST_USER_BLK};
use crate::socket::MAX_PATH_BYTES;
use crate::state::Daemon;
use cowshed_image::graph::{AttachRequest, Attachment};
use cowshed_image::node::LocalFuture;
use cowshed_qmp::{QmpError, QmpResult};
use cowshed_storage::{Listener, Socket, SocketAddress};
use cowshed_types::{Error, ErrorKind, LINE_END, Result};
use cowshed_vhost_user::{Server, ServerConfig};
use serde_json::{Map, Value};
use std::num::NonZero;
use std::rc::Rc;
use std::sync::Arc;
use std::thread::available_parallelism;

pub(super) async fn add(daemon: &Rc<Daemon>, arguments: &Arguments, node: &str) -> QmpResult<Value> {
    let node = daemon.graph.find(node).ok_or_else(|| QmpError::generic(format!("there is no node '{node}'")))?;
    let writable = arguments.flag("writable", false);
    if writable && node.is_read_only() {
        return Err(QmpError::generic("Cannot export read-only node as writable"));
    }
    let config = ServerConfig {
        id: arguments.text("id").to_owned(),
        writable,
        writethrough: arguments.flag("writethrough", false),
        // 0 is the default, as in QEMU.
        block_bytes: match arguments.number("logical-block-size")? {
            None | Some(0) => 512,
            Some(bytes) => u32::try_from(bytes).unwrap_or(u32::MAX),
        },
        queues: match arguments.number("num-queues") {
            Ok(queues) => u16::try_from(queues.unwrap_or(daemon.vhost_queues.into())).map_err(|_| no_uint16())?,
            Err(_) => return Err(no_uint16()),
        },
        threads: available_parallelism().map_or(1, NonZero::get),
        poll_limit: daemon.objects.poll_limit.clone(),
    };
    let worded = |error: Error| QmpError::generic(error.message().to_owned());
    config.check().map_err(worded)?;
    let request = AttachRequest::export(config.id.clone(), writable);
    let attachment = daemon.graph.attach(&node, request).await.map_err(failed)?;
    let added = match listen(arguments.object("addr")) {
        Ok(listener) => start(daemon, config, listener, Arc::clone(&attachment)).map_err(failed),
        Err(error) => Err(error),
    };
    if let Err(error) = added {
        attachment.detach().await.map_err(failed)?;
        return Err(error);
    }
    nothing()
}

fn start(daemon: &Daemon, config: ServerConfig, listener: Listener, attachment: Arc<Attachment>) -> Result<()> {
    let (id, writable) = (config.id.clone(), config.writable);
    let server = Server::start(config, listener, Arc::clone(&attachment))?;
    let export = Exported::new(VHOST_USER_BLK, id.clone(), id, attachment, writable, Vec::new());
    daemon.servers.add(export, Rc::new(VhostUser(server)));
    Ok(())
}

struct VhostUser(Server);

impl ExportServer for VhostUser {
    fn is_connected(&self) -> bool {
        self.0.is_connected()
    }

    /// `vhost-user:PATH`.
    fn uris(&self) -> Vec<String> {
        vec![format!("vhost-user:{}", self.0.address())]
    }

    fn look_at_size(&self) {
        self.0.look_at_size();
    }

    fn stop(&self) -> LocalFuture<'_, ()> {
        Box::pin(self.0.stop())
    }
}

fn no_uint16() -> QmpError {
    QmpError::generic("Parameter 'num-queues' expects uint16_t")
}

/// The socket of an export.
fn listen(address: Option<&Map<String, Value>>) -> QmpResult<Listener> {
    let text = |key: &str| address.and_then(|address| address.get(key)).and_then(Value::as_str).unwrap_or_default();
    let value = |key: &str| address.and_then(|address| address.get(key));
    let flag = |key: &str, default: bool| value(key).and_then(Value::as_bool).unwrap_or(default);
    let bound: Result<Listener> = match text("type") {
        "unix" => {
            bind(text("path"), &SocketAddress::of_unix(text("path"), flag("abstract", false), flag("tight", true)))
        }
        "fd" => {
            let number = text("str").parse::<i32>();
            let number = number.map_err(|_| QmpError::generic("only QEMU supports file descriptor passing"))?;
            let listens = |fd| {
                let failed = |error: Error| match error.kind() {
                    ErrorKind::InvalidArgument => {
                        Error::invalid_argument(format!("File descriptor '{number}' is not a listening socket"))
                    }
                    _ => error,
                };
                Listener::from_descriptor(fd).map_err(failed)
            };
            Socket::copy_of_descriptor(number).and_then(listens)
        }
        _ => return Err(QmpError::generic("Only socket address types 'unix' and 'fd' are supported")),
    };
    bound.map_err(failed)
}

fn bind(path: &str, address: &SocketAddress) -> Result<Listener> {
    if path.len() >= MAX_PATH_BYTES {
        let words =
            format!("UNIX socket path '{path}' is too long{LINE_END}Path must be less than {MAX_PATH_BYTES} bytes");
        return Err(Error::invalid_argument("the path of a socket is too long").value(path.len()).qemu(words));
    }
    let worded = |error: Error| {
        let (failed, sentence) = (format!("Failed to bind socket to {path}"), error.sentence());
        // Ours of a socket or file in the way has the reason alone.
        let has_place = sentence.starts_with(&failed);
        error.qemu(if has_place { failed } else { format!("{failed}: {sentence}") })
    };
    let one = Listener::bind(address).map_err(worded)?.into_iter().next();
    one.ok_or_else(|| Error::internal("a Unix socket has one address"))
}
