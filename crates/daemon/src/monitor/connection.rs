// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Connections of monitors: those that clients make, and those that a monitor makes itself, to a client that listens.

use super::client::InputEnd;
use super::{MonitorContext, serve};
use crate::message::Message;
use cowshed_storage::{Socket, connect_unix};
use cowshed_types::{Error, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::fmt;
use std::io;
use std::net::{Shutdown, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{SocketAddr as UnixAddr, UnixStream};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// An attempt to connect ends after this time.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);

/// The same for the first attempt of a device that tries again: the monitor's other commands wait for it.
const FIRST_ATTEMPT_LIMIT: Duration = Duration::from_secs(1);

/// A connected stream socket of any family: its calls are the same for all of them.
pub(super) struct StreamSocket(UnixStream);

impl StreamSocket {
    pub fn unix(stream: UnixStream) -> StreamSocket {
        StreamSocket(stream)
    }

    pub fn tcp(stream: TcpStream) -> io::Result<StreamSocket> {
        stream.set_nodelay(true)?;
        Ok(StreamSocket(OwnedFd::from(stream).into()))
    }

    /// The same connection once more, to end it.
    pub fn line(&self) -> io::Result<UnixStream> {
        self.0.try_clone()
    }

    /// Speaks with the client until it goes. `negotiated` is called once it has negotiated its capabilities.
    pub fn serve(self, context: &MonitorContext, negotiated: impl Fn()) {
        let stream = self.0;
        // A connection that is gone already needs no hanging up.
        let served = stream.try_clone().and_then(|output| {
            let line = stream.try_clone()?;
            let hang_up = move || drop(line.shutdown(Shutdown::Both));
            serve(context, (&stream, InputEnd::Goes), output, (|| is_gone(&stream), &negotiated), hang_up);
            Ok(())
        });
        if let Err(error) = served {
            tracing::warn!(%error, "a monitor's client is turned away");
        }
    }
}

/// True when nothing that is sent reaches the client. A client that has only ended its own direction still reads.
fn is_gone(stream: impl AsFd) -> bool {
    let mut now = [PollFd::new(&stream, PollFlags::empty())];
    let polled = poll(&mut now, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    polled.is_ok() && now[0].revents().intersects(PollFlags::ERR | PollFlags::HUP)
}

/// A client that listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClientAddress {
    /// On a Unix socket.
    Unix(PathBuf),
    /// On a TCP port.
    Tcp {
        /// Host name or address.
        host: String,
        /// Its port.
        port: u16,
    },
    /// At the other end of a connected socket, a descriptor of this process.
    Passed(i32),
}

impl fmt::Display for ClientAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ClientAddress::Unix(path) => write!(f, "unix:{}", path.display()),
            ClientAddress::Tcp { host, port } => write!(f, "tcp:{host}:{port}"),
            ClientAddress::Passed(_) => f.write_str("unix:"),
        }
    }
}

/// QEMU's sentence about a host that has no address. `address` is shown with its kind in front.
pub(super) fn unknown_host(address: &impl fmt::Display, error: &io::Error) -> Option<String> {
    let words = error.to_string();
    let words = words.strip_prefix("failed to lookup address information: ")?;
    let address = address.to_string();
    Some(format!("address resolution failed for {}: {words}", address.strip_prefix("tcp:").unwrap_or(&address)))
}

impl ClientAddress {
    /// Connects, each address of a host within `limit`; with the connection's name for `query-chardev`.
    fn connect(&self, limit: Duration) -> Result<(StreamSocket, String)> {
        let failed = |error: io::Error, place: String| {
            let sentence = unknown_host(&place, &error).unwrap_or_else(|| format!("Failed to connect to '{place}'"));
            Error::io(&error, format!("could not connect to '{place}'")).qemu(sentence)
        };
        match self {
            ClientAddress::Unix(path) => {
                let stream = UnixAddr::from_pathname(path).and_then(|address| connect_unix(&address, limit));
                let stream = stream.map_err(|error| failed(error, path.display().to_string()))?;
                Ok((StreamSocket::unix(stream), self.to_string()))
            }
            ClientAddress::Tcp { host, port } => {
                let failed = |error: io::Error| failed(error, format!("{host}:{port}"));
                let stream = connect_tcp(host, *port, limit).map_err(failed)?;
                let (own, peer) = (stream.local_addr().map_err(failed)?, stream.peer_addr().map_err(failed)?);
                Ok((StreamSocket::tcp(stream).map_err(failed)?, format!("tcp:{own} <-> {peer}")))
            }
            ClientAddress::Passed(number) => {
                let descriptor = Socket::copy_of_descriptor(*number)?;
                Ok((StreamSocket::unix(descriptor.into()), self.to_string()))
            }
        }
    }
}

fn connect_tcp(host: &str, port: u16, limit: Duration) -> io::Result<TcpStream> {
    let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
    for address in (host, port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, limit) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// The state of the connection.
#[derive(Default)]
struct ChardevState {
    /// Made, and not taken by a monitor yet.
    waiting: Option<StreamSocket>,
    /// The name of the connection that is there.
    connected: Option<String>,
    /// The connection that the monitor has taken, to end it.
    line: Option<UnixStream>,
    /// The monitors that the device has had. An older one makes no further connection.
    monitors: u64,
}

/// A character device that connects to a client by itself.
pub struct Outgoing {
    address: ClientAddress,
    /// The time after the end of a connection, or after a failed attempt, at which the next one is tried.
    reconnect: Option<Duration>,
    shared: Arc<Shared>,
}

impl ChardevState {
    /// The connection that waits, for the last monitor.
    fn take(&mut self, own: u64) -> Option<StreamSocket> {
        let connection = if self.monitors == own { self.waiting.take() } else { None }?;
        self.line = connection.line().ok();
        Some(connection)
    }
}

#[derive(Default)]
struct Shared {
    state: Mutex<ChardevState>,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, ChardevState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for `pause`, or until another monitor than `own` is the last one; whether it is.
    fn stops_within(&self, pause: Duration, own: u64) -> bool {
        let waited = self.changed.wait_timeout_while(self.lock(), pause, |state| state.monitors == own);
        waited.unwrap_or_else(PoisonError::into_inner).0.monitors != own
    }

    /// Counts another monitor, so that those before it stop.
    fn next_monitor(&self) -> u64 {
        let mut state = self.lock();
        state.monitors += 1;
        self.changed.notify_all();
        state.monitors
    }
}

/// A monitor on such a device. Dropped, it makes no further connection; the one that is there stays.
pub struct Calling {
    shared: Arc<Shared>,
    own: u64,
}

impl Calling {
    /// Ends the connection that is there.
    pub fn hang_up(&self) {
        if let Some(line) = self.shared.lock().line.take() {
            // A client that is gone already needs no end.
            let _ = line.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Calling {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        if state.monitors == self.own {
            state.monitors += 1;
            self.shared.changed.notify_all();
        }
    }
}

impl Outgoing {
    /// Connects. Where it may try again, a failure is no error.
    pub fn new(id: &str, address: &ClientAddress, reconnect: Option<Duration>) -> Result<Outgoing> {
        let shared = Arc::new(Shared::default());
        // The command that makes the device waits for this.
        let limit = if reconnect.is_some() { FIRST_ATTEMPT_LIMIT } else { CONNECT_LIMIT };
        match address.connect(limit) {
            Ok((connection, name)) => {
                let mut state = shared.lock();
                state.waiting = Some(connection);
                state.connected = Some(name);
            }
            Err(error) if reconnect.is_some() => report(id, &error),
            Err(error) => return Err(error),
        }
        Ok(Outgoing { address: address.clone(), reconnect, shared })
    }

    /// Its name for `query-chardev`.
    pub fn name(&self) -> String {
        let connected = self.shared.lock().connected.clone();
        connected.unwrap_or_else(|| format!("disconnected:{}", self.address))
    }

    /// A connection is there.
    pub fn is_connected(&self) -> bool {
        self.shared.lock().connected.is_some()
    }

    /// Starts a monitor, on a thread of its own.
    pub fn start(&self, context: MonitorContext) -> Result<Calling> {
        let own = self.shared.next_monitor();
        let (shared, address, reconnect) = (Arc::clone(&self.shared), self.address.clone(), self.reconnect);
        let run = move || {
            loop {
                let made = shared.lock().take(own);
                if let Some(connection) = made {
                    connection.serve(&context, || ());
                    let mut state = shared.lock();
                    (state.connected, state.line) = (None, None);
                    drop(state);
                    // A daemon that has stopped needs no word.
                    let _ = context.control.send(Message::MonitorClosed(Arc::clone(&context.properties)));
                }
                let Some(pause) = reconnect else { return };
                if shared.stops_within(pause, own) {
                    return;
                }
                // The client of the monitor before this one is still there.
                if shared.lock().connected.is_some() {
                    continue;
                }
                if let Ok((connection, name)) = address.connect(CONNECT_LIMIT) {
                    let mut state = shared.lock();
                    // A monitor that has gone meanwhile takes no client.
                    if state.monitors != own {
                        return;
                    }
                    state.waiting = Some(connection);
                    state.connected = Some(name);
                }
            }
        };
        let started = thread::Builder::new().name("monitor".into()).spawn(run);
        started.map_err(|error| Error::io(&error, "could not start a thread"))?;
        Ok(Calling { shared: Arc::clone(&self.shared), own })
    }
}

fn report(id: &str, error: &Error) {
    tracing::warn!("Unable to connect character device {id}: {}", error.sentence());
}
