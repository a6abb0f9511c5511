// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Where monitors listen.

use super::{MonitorContext, serve};
use crate::socket::{SocketFile, bind_unix};
use cowshed_block::{Error, Result};
use std::fmt;
use std::io;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::thread;

/// Clients of one monitor at a time; further ones are turned away.
const MAX_CLIENTS: usize = 64;

/// Where a monitor is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MonitorAddress {
    /// A socket that is bound to this path.
    Unix(PathBuf),
    /// A TCP port.
    Tcp {
        /// Host name or address; "" for all addresses.
        host: String,
        /// 0 for any free one.
        port: u16,
    },
    /// Standard input and output.
    Stdio,
}

impl fmt::Display for MonitorAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MonitorAddress::Unix(path) => write!(f, "unix:{}", path.display()),
            MonitorAddress::Tcp { host, port } => write!(f, "tcp:{host}:{port}"),
            MonitorAddress::Stdio => f.write_str("stdio"),
        }
    }
}

/// A monitor that listens; dropping it takes its socket out of the file system.
#[derive(Debug)]
pub struct Listening {
    /// Where it is: with the port that was found free.
    pub address: MonitorAddress,
    _file: Option<SocketFile>,
}

enum Listener {
    Unix(UnixListener),
    Tcp(TcpListener),
}

/// Starts a monitor: listens, and serves its clients on threads of their own.
pub fn listen(address: &MonitorAddress, context: MonitorContext) -> Result<Listening> {
    let failed = |error: io::Error| Error::io(&error, "could not listen").file(address.to_string());
    let (listener, address, file) = match address {
        MonitorAddress::Stdio => {
            start("monitor-stdio", move || serve(&context, io::stdin(), io::stdout(), || ()))?;
            return Ok(Listening { address: MonitorAddress::Stdio, _file: None });
        }
        MonitorAddress::Unix(path) => {
            let (listener, file) = bind_unix(path)?;
            (Listener::Unix(listener), address.clone(), Some(file))
        }
        MonitorAddress::Tcp { host, port } => {
            let shown = if host.is_empty() { "::" } else { host };
            let listener = TcpListener::bind((shown, *port)).map_err(failed)?;
            let port = listener.local_addr().map_err(failed)?.port();
            (Listener::Tcp(listener), MonitorAddress::Tcp { host: host.clone(), port }, None)
        }
    };
    start("monitor", move || accept(&listener, &context))?;
    Ok(Listening { address, _file: file })
}

fn start(name: &str, work: impl FnOnce() + Send + 'static) -> Result<()> {
    let started = thread::Builder::new().name(name.into()).spawn(work);
    started.map(drop).map_err(|error| Error::io(&error, "could not start a thread"))
}

/// The threads end with the process.
fn accept(listener: &Listener, context: &MonitorContext) {
    let clients = std::sync::Arc::new(());
    loop {
        let connection = match listener {
            Listener::Unix(listener) => listener.accept().map(|(stream, _)| Connection::Unix(stream)),
            Listener::Tcp(listener) => listener.accept().map(|(stream, _)| Connection::Tcp(stream)),
        };
        let connection = match connection {
            Ok(connection) => connection,
            Err(error) => {
                tracing::warn!(%error, "could not accept a monitor's client");
                // Out of descriptors, most likely: not in a busy loop.
                thread::sleep(std::time::Duration::from_millis(100));
                continue;
            }
        };
        if std::sync::Arc::strong_count(&clients) > MAX_CLIENTS {
            tracing::warn!("a monitor has {MAX_CLIENTS} clients; one more is turned away");
            continue;
        }
        let (context, counted) = (context.clone(), std::sync::Arc::clone(&clients));
        let started = start("monitor-in", move || {
            connection.serve(&context);
            drop(counted);
        });
        if let Err(error) = started {
            tracing::warn!(%error, "a monitor's client is turned away");
        }
    }
}

enum Connection {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Connection {
    fn serve(self, context: &MonitorContext) {
        // A connection that is gone already needs no hanging up.
        let served = match self {
            Connection::Unix(stream) => stream.try_clone().and_then(|output| {
                let line = stream.try_clone()?;
                serve(context, stream, output, move || drop(line.shutdown(Shutdown::Both)));
                Ok(())
            }),
            Connection::Tcp(stream) => stream.set_nodelay(true).and_then(|()| {
                let (output, line) = (stream.try_clone()?, stream.try_clone()?);
                serve(context, stream, output, move || drop(line.shutdown(Shutdown::Both)));
                Ok(())
            }),
        };
        if let Err(error) = served {
            tracing::warn!(%error, "a monitor's client is turned away");
        }
    }
}
