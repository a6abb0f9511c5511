// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Exports of the type `http`: a node's bytes for reading, by ranges.

use super::exports::place;
use super::{Arguments, failed, nothing};
use crate::nbd::{Exported, ListenPlace};
use crate::servers::ExportServer;
use crate::state::Daemon;
use cowshed_http_server::proto::answer::percent_encoded;
use cowshed_http_server::{Server, ServerConfig};
use cowshed_image::graph::{AttachRequest, Attachment};
use cowshed_image::node::LocalFuture;
use cowshed_qmp::{QmpError, QmpResult};
use cowshed_storage::{ListenOptions, Listener, SocketAddress};
use cowshed_types::{Error, Result};
use serde_json::Value;
use std::net::IpAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// The name of the type.
pub(crate) const HTTP: &str = "http";

/// So long may responses go on that have begun when the export ends.
const GRACE: Duration = Duration::from_secs(1);

pub(super) async fn add(daemon: &Rc<Daemon>, arguments: &Arguments, node: &str) -> QmpResult<Value> {
    let path = arguments.maybe_text("path").map_or_else(|| format!("/{node}"), str::to_owned);
    let node = daemon.graph.find(node).ok_or_else(|| QmpError::generic(format!("there is no node '{node}'")))?;
    if arguments.flag("writable", false) {
        return Err(QmpError::generic("an export of the type 'http' is for reading only"));
    }
    let (ListenPlace::Address(listen), options) = place(arguments.object("addr"), daemon.is_starting.get())? else {
        return Err(QmpError::generic("Only socket address types 'inet' and 'unix' are supported"));
    };
    let tls = arguments.maybe_text("tls-creds").map(|id| daemon.objects.server_tls(id)).transpose()?;
    let id = arguments.text("id").to_owned();
    let request = AttachRequest::export(id.clone(), false);
    let attachment = daemon.graph.attach(&node, request).await.map_err(failed)?;
    let scheme = if tls.is_some() { "https" } else { "http" };
    let config = ServerConfig { tls, export: Some(id.clone()), ..ServerConfig::default() };
    let started = start(config, (&listen, &options), &path, &attachment);
    match started {
        Ok((server, bound)) => {
            let uris = bound.iter().map(|address| uri(scheme, address, &path)).collect();
            let export = Exported::new(HTTP, id.clone(), id, attachment, false, Vec::new());
            daemon.servers.add(export, Rc::new(Site { server, uris }));
            nothing()
        }
        Err(error) => {
            attachment.detach().await.map_err(failed)?;
            Err(failed(error))
        }
    }
}

fn start(
    mut config: ServerConfig,
    (listen, options): (&SocketAddress, &ListenOptions),
    path: &str,
    attachment: &Arc<Attachment>,
) -> Result<(Server, Vec<SocketAddress>)> {
    let bound = Listener::bind_with(listen, options).map_err(|error: Error| error.context("could not listen"))?;
    // With TLS the name must fit the certificate.
    if let (SocketAddress::Tcp { host, .. }, None) = (listen, &config.tls) {
        if bound.iter().all(|listener| is_of_this_machine(listener.address())) {
            // A page of the web reaches what listens for this machine alone, by a name that leads here.
            config.local_names = Some(vec![host.clone()]);
        } else {
            let export = config.export.as_deref();
            tracing::warn!(export, host, "any host that reaches this one can read the disk: tls-creds encrypts");
        }
    }
    let server = Server::start(config)?;
    server.add(path, Arc::new(Arc::clone(attachment)))?;
    let addresses = bound.into_iter().map(|listener| server.listen_on(listener)).collect();
    Ok((server, addresses))
}

fn is_of_this_machine(address: &SocketAddress) -> bool {
    let SocketAddress::Tcp { host, .. } = address else { return true };
    host.parse::<IpAddr>().is_ok_and(|address| address.to_canonical().is_loopback())
}

fn uri(scheme: &str, address: &SocketAddress, path: &str) -> String {
    let path = percent_encoded(path, b"/._-~");
    match address {
        SocketAddress::Tcp { host, port } if host.contains(':') => format!("{scheme}://[{host}]:{port}{path}"),
        SocketAddress::Tcp { host, port } => format!("{scheme}://{host}:{port}{path}"),
        // As curl has it: --unix-socket, and any host.
        other => format!("{scheme}+unix:{other} {path}"),
    }
}

struct Site {
    server: Server,
    uris: Vec<String>,
}

impl ExportServer for Site {
    /// A client comes back for its next range, so none keeps an export from going.
    fn is_connected(&self) -> bool {
        false
    }

    fn uris(&self) -> Vec<String> {
        self.uris.clone()
    }

    fn stop(&self) -> LocalFuture<'_, ()> {
        Box::pin(self.server.stop(GRACE))
    }
}
