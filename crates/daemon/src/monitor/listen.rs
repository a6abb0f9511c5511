// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Where monitors listen.

use super::client::InputEnd;
use super::connection::{Calling, StreamSocket, unknown_host};
use super::{MonitorContext, serve};
use crate::message::Message;
use crate::socket::{SocketFile, bind_unix};
use cowshed_storage::Socket;
use cowshed_storage::socket::SocketAddress;
use cowshed_types::{Error, Result};
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::{Shutdown, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

/// Clients of one monitor at a time. The oldest of those that have not negotiated makes room for a further one; without any that one is
/// turned away.
const MAX_CLIENTS: usize = 64;

/// The connections of clients that have not negotiated yet, the oldest first, by number.
#[derive(Default)]
struct Newcomers(Mutex<BTreeMap<u64, UnixStream>>);

impl Newcomers {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, UnixStream>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, number: u64, line: UnixStream) {
        self.lock().insert(number, line);
    }

    fn remove(&self, number: u64) {
        self.lock().remove(&number);
    }

    /// Ends the oldest connection; false when there is none.
    fn end_oldest(&self) -> bool {
        let oldest = self.lock().pop_first();
        // A client that is gone already needs no end.
        oldest.map(|(_, line)| drop(line.shutdown(Shutdown::Both))).is_some()
    }
}

/// The address of a monitor.
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
    /// A listening Unix socket that the process inherited: the number of its descriptor.
    Passed(i32),
    /// Standard input and output.
    Stdio,
}

impl fmt::Display for MonitorAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MonitorAddress::Unix(path) => write!(f, "unix:{}", path.display()),
            MonitorAddress::Tcp { host, port } => write!(f, "tcp:{host}:{port}"),
            MonitorAddress::Passed(number) => write!(f, "fd:{number}"),
            MonitorAddress::Stdio => f.write_str("stdio"),
        }
    }
}

enum Listener {
    Unix(UnixListener),
    Tcp(TcpListener),
}

/// A place for a monitor: bound already, so that a monitor can be started there. Dropping it takes its socket out of the
/// file system.
pub struct Bound {
    address: MonitorAddress,
    /// `None` for the standard streams.
    listener: Option<Arc<Listener>>,
    file: Option<SocketFile>,
}

/// A monitor that runs. Dropped, it takes no further client; those that it has stay. [`Listening::end`] ends them, too.
pub struct Listening {
    listener: Option<Arc<Listener>>,
    stopped: Arc<AtomicBool>,
    present: Arc<Present>,
    /// For a monitor that connects by itself.
    calling: Option<Calling>,
}

/// A client that is connected.
struct PresentClient {
    number: u64,
    /// Its end, as `query-chardev` shows it behind the address.
    end: String,
    /// The same connection, to end it.
    line: Option<UnixStream>,
}

/// The clients that are connected.
#[derive(Default)]
struct Present(Mutex<Vec<PresentClient>>);

impl Present {
    fn lock(&self) -> MutexGuard<'_, Vec<PresentClient>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn remove(&self, number: u64) {
        self.lock().retain(|client| client.number != number);
    }

    /// Ends all connections. A client that is gone already needs no end.
    fn hang_up(&self) {
        self.lock()
            .iter()
            .filter_map(|client| client.line.as_ref())
            .for_each(|line| drop(line.shutdown(Shutdown::Both)));
    }
}

impl Bound {
    /// Binds a socket; a port that was 0 is the one that was found free.
    pub fn new(address: &MonitorAddress) -> Result<Bound> {
        let failed = |error: io::Error| {
            let sentence = match (error.kind(), unknown_host(address, &error)) {
                (_, Some(sentence)) => sentence,
                (io::ErrorKind::AddrInUse, None) => "Failed to find an available port".to_owned(),
                _ => "Failed to bind socket".to_owned(),
            };
            Error::io(&error, "could not listen").qemu(sentence).file(address.to_string())
        };
        let (listener, address, file) = match address {
            MonitorAddress::Stdio => (None, MonitorAddress::Stdio, None),
            MonitorAddress::Passed(number) => {
                let listener = passed(*number)?;
                let file = file_of(&listener);
                (Some(listener), address.clone(), file)
            }
            MonitorAddress::Unix(path) => {
                let (listener, file) = bind_unix(path)?;
                (Some(Listener::Unix(listener)), address.clone(), Some(file))
            }
            MonitorAddress::Tcp { host, port } => {
                let shown = if host.is_empty() { "::" } else { host };
                let listener = TcpListener::bind((shown, *port)).map_err(failed)?;
                let port = listener.local_addr().map_err(failed)?.port();
                (Some(Listener::Tcp(listener)), MonitorAddress::Tcp { host: host.clone(), port }, None)
            }
        };
        Ok(Bound { address, listener: listener.map(Arc::new), file })
    }

    /// Its address.
    pub fn address(&self) -> &MonitorAddress {
        &self.address
    }

    /// Starts a monitor: serves its clients on threads of their own.
    pub fn start(&self, context: MonitorContext) -> Result<Listening> {
        let (stopped, present) = (Arc::new(AtomicBool::new(false)), Arc::default());
        match self.listener.clone() {
            None => start("monitor-stdio", move || {
                serve(&context, (io::stdin(), InputEnd::Stays), io::stdout(), (|| false, || ()), || ())
            })?,
            Some(listener) => {
                let (stopped, present) = (Arc::clone(&stopped), Arc::clone(&present));
                start("monitor", move || accept(&listener, &context, &stopped, &present))?;
            }
        }
        Ok(Listening { listener: self.listener.clone(), stopped, present, calling: None })
    }

    /// Listens once more, after the monitor that was here has ended: a direction that was shut down stays so.
    pub fn listen_again(&mut self) -> Result<()> {
        self.listener = None;
        match (self.file.take(), &self.address) {
            // A passed socket listens on.
            (Some(file), MonitorAddress::Passed(_)) => file.leave(),
            (file, _) => drop(file),
        }
        *self = Bound::new(&self.address)?;
        Ok(())
    }
}

impl Listening {
    /// A monitor that no client can reach.
    pub(crate) fn nowhere() -> Listening {
        Listening { listener: None, stopped: Arc::default(), present: Arc::default(), calling: None }
    }

    /// A monitor that connects by itself.
    pub(crate) fn calling(calling: Calling) -> Listening {
        Listening { listener: None, stopped: Arc::default(), present: Arc::default(), calling: Some(calling) }
    }

    /// Ends it with the connections of its clients.
    pub(crate) fn end(self) {
        self.stopped.store(true, Ordering::SeqCst);
        self.present.hang_up();
        if let Some(calling) = &self.calling {
            calling.hang_up();
        }
    }

    /// The end of the client that came last, as `query-chardev` shows it behind the address. `None` without a client.
    pub fn client(&self) -> Option<String> {
        self.present.lock().last().map(|client| client.end.clone())
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        self.stopped.store(true, Ordering::SeqCst);
        // Wakes the thread that waits for clients.
        let copy = match self.listener.as_deref() {
            Some(Listener::Unix(listener)) => listener.try_clone().map(OwnedFd::from),
            Some(Listener::Tcp(listener)) => listener.try_clone().map(OwnedFd::from),
            None => return,
        };
        match copy {
            Ok(descriptor) => Socket::from_descriptor(descriptor).shutdown(),
            Err(error) => tracing::warn!(%error, "a monitor's thread stays"),
        }
    }
}

/// The file of a passed socket: as in QEMU it goes with its device.
fn file_of(listener: &Listener) -> Option<SocketFile> {
    let Listener::Unix(listener) = listener else { return None };
    let address = listener.local_addr().ok()?;
    SocketFile::bound(address.as_pathname()?).ok()
}

/// A copy of a listening socket of another process's making.
fn passed(number: i32) -> Result<Listener> {
    let failed = |error: io::Error| Error::io(&error, "could not listen on a socket that was passed");
    let socket = cowshed_storage::socket::Listener::from_descriptor(Socket::copy_of_descriptor(number)?)?;
    let descriptor = socket.as_fd().try_clone_to_owned().map_err(failed)?;
    let listener = match socket.address() {
        SocketAddress::Unix(_) => Listener::Unix(descriptor.into()),
        SocketAddress::Tcp { .. } => Listener::Tcp(descriptor.into()),
    };
    // Threads of its own wait for clients.
    match &listener {
        Listener::Unix(listener) => listener.set_nonblocking(false),
        Listener::Tcp(listener) => listener.set_nonblocking(false),
    }
    .map_err(failed)?;
    Ok(listener)
}

fn start(name: &str, work: impl FnOnce() + Send + 'static) -> Result<()> {
    let started = thread::Builder::new().name(name.into()).spawn(work);
    started.map(drop).map_err(|error| Error::io(&error, "could not start a thread"))
}

/// Takes clients until the monitor is stopped.
fn accept(listener: &Listener, context: &MonitorContext, stopped: &AtomicBool, present: &Arc<Present>) {
    let clients = Arc::new(AtomicUsize::new(0));
    let (newcomers, mut number) = (Arc::new(Newcomers::default()), 0);
    loop {
        let connection = match listener {
            Listener::Unix(listener) => {
                listener.accept().map(|(stream, _)| (StreamSocket::unix(stream), String::new()))
            }
            Listener::Tcp(listener) => {
                listener.accept().and_then(|(stream, peer)| Ok((StreamSocket::tcp(stream)?, format!(" <-> {peer}"))))
            }
        };
        if stopped.load(Ordering::SeqCst) {
            return;
        }
        let (connection, end) = match connection {
            Ok(connected) => connected,
            Err(error) => {
                tracing::warn!(%error, "could not accept a monitor's client");
                // Out of descriptors, most likely: not in a busy loop.
                thread::sleep(std::time::Duration::from_millis(100));
                continue;
            }
        };
        if clients.load(Ordering::SeqCst) >= MAX_CLIENTS && !newcomers.end_oldest() {
            tracing::warn!("a monitor has {MAX_CLIENTS} clients; one more is turned away");
            continue;
        }
        let line = match connection.line() {
            Ok(line) => line,
            Err(error) => {
                tracing::warn!(%error, "a monitor's client is turned away");
                continue;
            }
        };
        number += 1;
        newcomers.add(number, line);
        let (context, counted, waiting) = (context.clone(), Arc::clone(&clients), Arc::clone(&newcomers));
        counted.fetch_add(1, Ordering::SeqCst);
        present.lock().push(PresentClient { number, end, line: connection.line().ok() });
        // The monitor has ended meanwhile.
        if stopped.load(Ordering::SeqCst) {
            present.hang_up();
        }
        let here = Arc::clone(present);
        let started = start("monitor-in", move || {
            connection.serve(&context, || waiting.remove(number));
            here.remove(number);
            waiting.remove(number);
            if counted.fetch_sub(1, Ordering::SeqCst) == 1 {
                // A daemon that has stopped needs no word.
                let _ = context.control.send(Message::MonitorClosed(context.properties));
            }
        });
        if let Err(error) = started {
            clients.fetch_sub(1, Ordering::SeqCst);
            present.remove(number);
            newcomers.remove(number);
            tracing::warn!(%error, "a monitor's client is turned away");
        }
    }
}
