// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Options of the driver `nbd`, and the same as a URI.

use super::BlockdevOptions;
use crate::nbd_client::{ClientOptions, ClientTls};
use cowshed_nbd_proto::uri::{LONG_EXPORT_SENTENCE, ServerAddress};
use cowshed_nbd_proto::{DEFAULT_PORT, MAX_STRING_BYTES, NbdUri};
use cowshed_storage::{SocketAddress, path_of_text};
use cowshed_types::{Error, Result};
use serde_json::Value;
use std::time::Duration;

/// The options that a URI stands for.
pub(crate) fn nbd_of_uri(uri: &NbdUri) -> BlockdevOptions {
    let server = match &uri.address {
        ServerAddress::Unix { path } => BlockdevOptions::new().with("type", "unix").with("path", path.as_str()),
        ServerAddress::Tcp { host, port } => {
            let server = BlockdevOptions::new().with("type", "inet");
            server.with("host", host.as_str()).with("port", port.to_string())
        }
    };
    let mut options = BlockdevOptions::new().with("driver", "nbd").with("server", server);
    if !uri.export.is_empty() {
        options.insert("export", uri.export.as_str());
    }
    // Where encryption is a must, the folder is asked for even when the URI forgets it.
    if uri.tls || uri.tls_certificates.is_some() {
        options.insert("tls-certificates", uri.tls_certificates.as_deref().unwrap_or_default());
    }
    if let Some(name) = &uri.tls_hostname {
        options.insert("tls-hostname", name.as_str());
    }
    if let Some(verify) = uri.tls_verify_peer {
        options.insert("tls-verify-peer", verify);
    }
    options
}

/// The client's options. `credentials` finds the credentials that `tls-creds` names.
pub(crate) fn nbd_client(
    options: &BlockdevOptions,
    credentials: impl FnOnce(&str) -> Result<ClientTls>,
) -> Result<ClientOptions> {
    let export = options.text("export").unwrap_or_default();
    if export.len() > MAX_STRING_BYTES {
        return Err(Error::invalid_argument("the export's name is too long").qemu(LONG_EXPORT_SENTENCE));
    }
    let mut client = ClientOptions::new(address(options)?, export);
    let seconds = |key| Duration::from_secs(options.number(key).unwrap_or(0));
    client.reconnect_delay = seconds("reconnect-delay");
    client.open_timeout = seconds("open-timeout");
    client.context = options.text("x-dirty-bitmap").map(str::to_owned);
    client.tls_hostname = options.text("tls-hostname").map(str::to_owned);
    let verify_peer = options.flag("tls-verify-peer").unwrap_or(true);
    client.tls = match (options.text("tls-creds"), options.text("tls-certificates")) {
        (None, None) => None,
        (Some(_), Some(_)) => {
            return Err(Error::invalid_argument("'tls-creds' and 'tls-certificates' exclude one another"));
        }
        (Some(id), None) => Some(credentials(id)?),
        (None, Some("")) if !verify_peer => Some(ClientTls::unverified()?),
        (None, Some("")) => {
            let message = "an encrypted connection needs the folder of its credentials: 'tls-certificates'";
            return Err(Error::invalid_argument(message));
        }
        (None, Some(folder)) => Some(ClientTls::from_dir(&path_of_text(folder), verify_peer)?),
    };
    if client.tls.is_none() && client.tls_hostname.is_some() {
        return Err(Error::invalid_argument("'tls-hostname' needs TLS credentials"));
    }
    Ok(client)
}

/// The error where `id` names no credentials.
pub(crate) fn no_credentials(id: &str) -> Error {
    Error::invalid_argument(format!("No TLS credentials with id '{id}'"))
}

fn address(options: &BlockdevOptions) -> Result<SocketAddress> {
    let old = ["path", "host", "port"].iter().any(|key| options.get(key).is_some());
    let server = match options.get("server") {
        Some(Value::Object(map)) if !old => BlockdevOptions::from_map(map.clone())?,
        Some(_) => {
            let error = Error::invalid_argument("'server' can't be given together with 'path', 'host' or 'port'");
            return Err(error.qemu("Cannot use 'server' and path/host/port at the same time"));
        }
        None => options.clone(),
    };
    let is_unix = match (server.text("type").filter(|_| !old), server.text("path"), server.text("host")) {
        (Some(kind), path, host) => {
            let is_unix = kind == "unix";
            if (is_unix && host.is_some()) || (!is_unix && path.is_some()) {
                let message = "an address has 'path' (type unix), or 'host' and 'port' (type inet)";
                return Err(Error::invalid_argument(message));
            }
            is_unix
        }
        (None, Some(_), Some(_)) => {
            return Err(Error::invalid_argument("path and host may not be used at the same time"));
        }
        (None, Some(_), None) => true,
        (None, None, Some(_)) => false,
        (None, None, None) => {
            let message = "driver 'nbd' needs the option 'server.path' or 'server.host'";
            return Err(Error::invalid_argument(message).qemu("NBD server address missing"));
        }
    };
    if is_unix {
        let path = server.text("path").unwrap_or_default();
        return match path.is_empty() {
            true => Err(Error::invalid_argument("driver 'nbd' needs the option 'server.path'").qemu(
                match server.text("path") {
                    Some(_) => "Failed to connect to '': Connection refused",
                    None => "Parameter 'path' is missing",
                },
            )),
            false => {
                let flag = |key: &str, default: bool| server.flag(key).unwrap_or(default);
                Ok(SocketAddress::of_unix(path, flag("abstract", false), flag("tight", true)))
            }
        };
    }
    if let Some(key) = ["abstract", "tight"].into_iter().find(|key| server.get(key).is_some()) {
        let error = Error::invalid_argument(format!("an inet address has no option 'server.{key}'"));
        return Err(error.qemu(format!("Parameter '{key}' is unexpected")));
    }
    // The old options have a default, the address of QMP has none.
    for key in ["host", "port"] {
        if !old && server.text(key).is_none() {
            let error = Error::invalid_argument(format!("driver 'nbd' needs the option 'server.{key}'"));
            return Err(error.qemu(format!("Parameter '{key}' is missing")));
        }
    }
    let host = server.text("host").filter(|host| !host.is_empty()).unwrap_or("localhost");
    let port = match server.text("port") {
        None => DEFAULT_PORT,
        Some(text) => text.parse().ok().filter(|&port| port != 0).ok_or_else(|| {
            let error = Error::invalid_argument("the port of an NBD server is a number from 1 to 65535");
            error.value(format!("'{text}'")).qemu(match text.parse::<u64>() {
                Ok(_) => format!("Failed to connect to '{host}:{text}': Connection refused"),
                Err(_) => {
                    format!("address resolution failed for {host}:{text}: Servname not supported for ai_socktype")
                }
            })
        })?,
    };
    Ok(SocketAddress::Tcp { host: host.to_owned(), port })
}
