// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The daemon's NBD server and its exports.

use crate::events::EventBus;
use crate::inbox::Sender;
use crate::message::{Message, StopReason};
use crate::socket::SocketFile;
use cowshed_image::graph::Attachment;
use cowshed_image::node::BitmapUse;
use cowshed_jobs::limits::BlockLimits;
use cowshed_nbd::ServerTls;
use cowshed_nbd_proto::uri::{NbdUri, ServerAddress};
use cowshed_nbd_server::{Authorizer, Event, EventHandler, Export, Limits, PoolStats, Removal, Server, ServerConfig};
use cowshed_storage::rt::within;
use cowshed_storage::rt::{self, PollLimit};
use cowshed_storage::{ListenOptions, Listener, Socket, SocketAddress};
use cowshed_types::{Error, ErrorKind, Result};
use serde_json::json;
use std::cell::{Cell, RefCell};
use std::mem::ManuallyDrop;
use std::net::IpAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

/// The time limit for the server's stop, by default; half of it is for requests in flight.
pub(crate) const STOP_LIMIT: Duration = Duration::from_secs(20);

/// So long the removal of an export is waited for: longer than clients may take to receive their last replies. A longer
/// removal goes on by itself.
const REMOVAL_PATIENCE: Duration = Duration::from_secs(7);

/// The name of the type.
pub(crate) const NBD: &str = "nbd";

/// The target of the log line about a writable export that the network can reach without TLS.
pub const EXPOSURE: &str = "cowshed_daemon::exposure";

/// The address of the server.
#[derive(Clone, Debug)]
pub(crate) enum ListenPlace {
    /// Listens at an address.
    Address(SocketAddress),
    /// On a listening socket that the process inherited: the number of its descriptor.
    Descriptor(i32),
    /// On all sockets that a service manager passed.
    Passed,
}

impl From<Option<SocketAddress>> for ListenPlace {
    fn from(address: Option<SocketAddress>) -> ListenPlace {
        address.map_or(ListenPlace::Passed, ListenPlace::Address)
    }
}

/// The settings of the server.
#[derive(Debug)]
pub(crate) struct NbdSetup {
    pub place: ListenPlace,
    pub listen: ListenOptions,
    pub tls: Option<ServerTls>,
    pub authorizer: Option<Authorizer>,
    /// 0 is no limit of its own.
    pub max_connections: usize,
    pub handshake_seconds: Option<u64>,
    pub queues: usize,
    /// Memory for the data of all clients' requests, in bytes.
    pub request_memory_bytes: u64,
    /// The longest time that the queues look for requests before they sleep.
    pub poll_limit: PollLimit,
    /// Stop the daemon when the last client goes.
    pub stop_when_idle: bool,
    /// Clients wait until [`Nbd::release`].
    pub held: bool,
}

/// An export.
#[derive(Clone, Debug)]
pub(crate) struct Exported {
    /// Its type.
    pub kind: &'static str,
    /// Later exports have higher ones.
    pub number: u64,
    /// Unique among all exports.
    pub id: String,
    /// The name by which clients choose it.
    pub name: String,
    pub attachment: Arc<Attachment>,
    pub writable: bool,
    pub shutting_down: bool,
    /// Held, not looked at.
    _bitmaps: Arc<Vec<BitmapUse>>,
}

impl Exported {
    pub fn new(
        kind: &'static str,
        id: String,
        name: String,
        attachment: Arc<Attachment>,
        writable: bool,
        bitmaps: Vec<BitmapUse>,
    ) -> Exported {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        Exported { kind, number, id, name, attachment, writable, shutting_down: false, _bitmaps: Arc::new(bitmaps) }
    }
}

/// The description of a new export.
#[derive(Debug)]
pub(crate) struct ExportSpec {
    pub id: String,
    pub name: String,
    pub description: String,
    pub writable: bool,
    /// Each change is durable before it is answered.
    pub writethrough: bool,
    pub allocation_depth: bool,
    /// Dirty bitmaps that it offers; in use as long as it is there.
    pub bitmaps: Vec<BitmapUse>,
}

/// The server, once it runs, and the exports.
pub(crate) struct Nbd {
    server: Arc<Server<Arc<Attachment>>>,
    addresses: Vec<SocketAddress>,
    /// The names of a socket that was inherited ([`ListenPlace::Descriptor`]), as they were at the start.
    inherited: RefCell<Vec<ManuallyDrop<SocketFile>>>,
    exports: RefCell<Vec<Exported>>,
    events: EventBus,
    tls: bool,
    /// The log has the warning about [`Nbd::open_addresses`].
    has_warned: Cell<bool>,
    /// See [`Nbd::answer_to_ids`].
    is_lenient: Cell<bool>,
    /// With one connection at a time there is nothing to be had from several.
    multi_conn: bool,
}

impl Nbd {
    pub fn start(setup: NbdSetup, events: EventBus, control: Sender<Message>) -> Result<Nbd> {
        let mut limits = Limits { memory_bytes: setup.request_memory_bytes, ..Limits::default() };
        if setup.max_connections > 0 {
            limits.max_connections = setup.max_connections;
        } else {
            limits.max_connections = MAX_CONNECTIONS;
            limits.spare_connections = SPARE_CONNECTIONS;
        }
        if let Some(seconds) = setup.handshake_seconds {
            limits.handshake_timeout = Duration::from_secs(seconds);
        }
        let tls = setup.tls.is_some();
        let config = ServerConfig {
            queues: setup.queues,
            poll_limit: setup.poll_limit,
            limits,
            tls: setup.tls,
            tls_required: true,
            authorizer: setup.authorizer,
            events: Some(count_clients(setup.stop_when_idle.then_some(control))),
        };
        let server = Server::new(config)?;
        if setup.held {
            server.hold();
        }
        let is_inherited = matches!(setup.place, ListenPlace::Descriptor(_));
        let addresses = match setup.place {
            ListenPlace::Address(address) => {
                let listeners = Listener::bind_with(&address, &setup.listen)?;
                listeners.into_iter().map(|listener| server.listen_on(listener)).collect::<Result<_>>()?
            }
            ListenPlace::Descriptor(number) => {
                let listener = Socket::inherited_descriptor(number).and_then(Listener::from_descriptor)?;
                vec![server.listen_on(listener)?]
            }
            ListenPlace::Passed => listen_on_passed(&server)?,
        };
        for address in &addresses {
            tracing::info!(%address, "NBD server listens");
        }
        let inherited = addresses.iter().filter(|_| is_inherited).filter_map(name_of_socket);
        let inherited = inherited.map(ManuallyDrop::new).collect();
        Ok(Nbd {
            server: Arc::new(server),
            addresses,
            inherited: RefCell::new(inherited),
            exports: RefCell::default(),
            events,
            tls,
            has_warned: Cell::new(false),
            is_lenient: Cell::new(false),
            multi_conn: setup.max_connections != 1,
        })
    }

    /// Exports that are added from now on are found by their ids, too, and the first one by clients that give no name. QEMU's
    /// servers know exact names only.
    pub fn answer_to_ids(&self) {
        self.is_lenient.set(true);
    }

    /// Takes the clients that have waited, and those that come.
    pub fn release(&self) {
        self.server.release();
    }

    /// The memory for the data of all clients' requests.
    pub fn memory(&self) -> PoolStats {
        self.server.memory()
    }

    /// The exports, in the order of their coming.
    pub fn exports(&self) -> Vec<Exported> {
        self.exports.borrow().clone()
    }

    pub fn find(&self, id: &str) -> Option<Exported> {
        self.exports.borrow().iter().find(|export| export.id == id).cloned()
    }

    /// Serves an attachment under a name. An error leaves the attachment to the caller.
    pub fn add(&self, spec: ExportSpec, attachment: Arc<Attachment>) -> Result<()> {
        let export = Export {
            description: spec.description,
            writable: spec.writable,
            writethrough: spec.writethrough,
            multi_conn: self.multi_conn,
            allocation_depth: spec.allocation_depth,
            bitmaps: spec.bitmaps.iter().map(|bitmap| bitmap.name().to_owned()).collect(),
            is_default: self.is_lenient.get() && self.exports.borrow().is_empty(),
            alias: self.is_lenient.get().then(|| spec.id.clone()),
            unit_bytes: BlockLimits::of(&attachment.node()).request_alignment.try_into().unwrap_or(1),
            ..Export::new(spec.name.clone(), Arc::clone(&attachment))
        };
        self.server.add_export(export)?;
        let ExportSpec { id, name, writable, bitmaps, .. } = spec;
        tracing::info!(export = id, name, node = attachment.node().name(), writable, "export added");
        if writable {
            self.warn_of_open_addresses(&name);
        }
        self.exports.borrow_mut().push(Exported::new(NBD, id, name, attachment, writable, bitmaps));
        Ok(())
    }

    /// Warns once that any host of the network can write to an export.
    fn warn_of_open_addresses(&self, export: &str) {
        let open = self.open_addresses();
        if !open.is_empty() && !self.has_warned.replace(true) {
            let addresses = open.join(", ");
            let message = "the export is writable without TLS for every host that reaches this address";
            tracing::warn!(target: EXPOSURE, export, addresses, "{message}");
        }
    }

    /// The addresses of the network without TLS.
    fn open_addresses(&self) -> Vec<String> {
        let addresses = self.addresses.iter().filter(|address| !self.tls && is_public(address));
        addresses.map(ToString::to_string).collect()
    }

    /// Ends an export: when this returns, it has no users, or its last requests hang. In that case it is shutting down,
    /// and is gone when they end.
    pub async fn remove(self: &Rc<Self>, id: &str, removal: Removal) -> Result<()> {
        let Some(export) = self.find(id) else {
            return Err(Error::new(ErrorKind::NotFound, format!("there is no export '{id}'")));
        };
        if export.shutting_down {
            let message = format!("Export '{id}' is already shutting down");
            return Err(Error::invalid_argument(message));
        }
        self.mark(id, true);
        let (nbd, removed) = (Rc::clone(self), export.clone());
        let task = rt::spawn(async move { nbd.take_away(removed, removal).await });
        match within(REMOVAL_PATIENCE, task).await {
            Some(result) => result,
            None => {
                let requests = export.attachment.statistics().in_flight;
                tracing::warn!(export = id, requests, "requests of a removed export hang; it stays until they end");
                Ok(())
            }
        }
    }

    async fn take_away(&self, export: Exported, removal: Removal) -> Result<()> {
        let id = &export.id;
        if let Err(error) = self.server.remove_export(&export.name, removal).await {
            self.mark(id, false);
            return Err(error);
        }
        let detached = export.attachment.detach().await;
        self.exports.borrow_mut().retain(|known| known.id != *id);
        if let Err(error) = &detached {
            tracing::warn!(export = id, %error, "a removed export could not be flushed");
        }
        self.events.emit("BLOCK_EXPORT_DELETED", json!({"id": id}));
        detached
    }

    fn mark(&self, id: &str, shutting_down: bool) {
        if let Some(export) = self.exports.borrow_mut().iter_mut().find(|export| export.id == id) {
            export.shutting_down = shutting_down;
        }
    }

    /// Answers requests in flight, flushes, and ends all exports. Returns the first error, and the exports that did not
    /// end within `limit`. `detaches`: nodes are given back in order, which waits for changes of the graph that are
    /// under way.
    pub async fn stop(&self, limit: Duration, detaches: bool) -> (Result<()>, Vec<String>) {
        let end = rt::now() + limit;
        let server = Arc::clone(&self.server);
        let stopping = rt::spawn(async move { server.stop(limit / 2).await });
        let stopped = within(limit * 3 / 4, stopping).await;
        let is_overdue = stopped.is_none();
        let mut result = stopped.unwrap_or(Ok(()));
        let mut hung = Vec::new();
        let mut exports = std::mem::take(&mut *self.exports.borrow_mut());
        // As in QEMU the newest goes first. But those that answer come before the others: they are flushed whatever those do.
        exports.reverse();
        exports.sort_by_key(|export| export.attachment.statistics().in_flight);
        for export in exports {
            let (id, attachment, events) = (export.id.clone(), Arc::clone(&export.attachment), self.events.clone());
            let requests = attachment.statistics().in_flight;
            let shown = format!("export '{id}' (requests in flight: {requests})");
            // An export that is being removed is released by its removal.
            if !detaches || export.shutting_down {
                if requests > 0 {
                    hung.push(shown);
                }
                continue;
            }
            let detaching = rt::spawn(async move {
                let detached = attachment.detach().await;
                events.emit("BLOCK_EXPORT_DELETED", json!({"id": id}));
                drop(export);
                detached
            });
            match within(end.saturating_sub(rt::now()), detaching).await {
                Some(detached) => result = result.and(detached),
                None => hung.push(shown),
            }
        }
        if is_overdue && hung.is_empty() {
            hung.push("the NBD server".to_owned());
        }
        (result, hung)
    }

    /// As in QEMU the file of an inherited socket goes with a server that is stopped, and stays at the daemon's end. Better: a socket that
    /// something else has put there since stays, too.
    pub fn remove_inherited_files(&self) {
        self.inherited.take().into_iter().map(ManuallyDrop::into_inner).for_each(drop);
    }

    /// Number of connections at the moment.
    pub fn connections(&self) -> usize {
        self.server.connections()
    }

    /// The URIs of an export: one for each address.
    pub fn uris(&self, export: &str) -> Vec<String> {
        let uri = |address: &SocketAddress| {
            let address = match address.clone() {
                SocketAddress::Unix(path) => ServerAddress::Unix { path },
                SocketAddress::Tcp { host, port } => ServerAddress::Tcp { host: reachable(host), port },
            };
            NbdUri {
                address,
                export: export.to_owned(),
                tls: self.tls,
                tls_hostname: None,
                tls_verify_peer: None,
                tls_certificates: None,
            }
        };
        self.addresses.iter().map(|address| uri(address).to_string()).collect()
    }
}

/// Connections where the user sets no limit: a flood of clients must not take all descriptors.
const MAX_CONNECTIONS: usize = 1024;
/// Besides these, for peers with few connections where one peer has taken all.
const SPARE_CONNECTIONS: usize = 64;

/// A host that clients on this machine can use, for one that means all of them.
fn reachable(host: String) -> String {
    match host.as_str() {
        "" | "::" | "0.0.0.0" => "localhost".to_owned(),
        _ => host,
    }
}

/// True for an address that other machines may reach. A host that isn't an address counts as one of them.
fn is_public(address: &SocketAddress) -> bool {
    match address {
        SocketAddress::Unix(_) => false,
        SocketAddress::Tcp { host, .. } => {
            host.parse::<IpAddr>().map_or(true, |address| !address.to_canonical().is_loopback())
        }
    }
}

/// The name of a socket in the file system, as it is now.
fn name_of_socket(address: &SocketAddress) -> Option<SocketFile> {
    match address {
        SocketAddress::Unix(path) if !path.starts_with('\0') => SocketFile::bound(path.as_ref()).ok(),
        _ => None,
    }
}

fn listen_on_passed(server: &Server<Arc<Attachment>>) -> Result<Vec<SocketAddress>> {
    let listeners = Listener::passed()?;
    if listeners.is_empty() {
        return Err(Error::invalid_argument("no socket was passed to this process (LISTEN_FDS)"));
    }
    listeners.into_iter().map(|listener| server.listen_on(listener)).collect()
}

/// Counts clients. With `control` the last one that goes stops the daemon.
fn count_clients(control: Option<Sender<Message>>) -> EventHandler {
    let connected = AtomicUsize::new(0);
    EventHandler(Arc::new(move |event| match event {
        // The server has logged it.
        Event::ClientConnected { .. } => {
            connected.fetch_add(1, Ordering::SeqCst);
        }
        Event::ClientDisconnected { .. } => {
            let was_last = connected.fetch_sub(1, Ordering::SeqCst) == 1;
            if let Some(control) = control.as_ref().filter(|_| was_last) {
                // Fails only when the daemon has stopped already.
                let _ = control.send(Message::Stop(StopReason::Idle));
            }
        }
        _ => {}
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_addresses_and_unix_sockets_are_not_public() {
        let tcp = |host: &str| SocketAddress::Tcp { host: host.to_owned(), port: 10809 };
        for host in ["127.0.0.1", "127.5.6.7", "::1", "::ffff:127.0.0.1"] {
            assert!(!is_public(&tcp(host)), "{host}");
        }
        for host in ["0.0.0.0", "::", "192.168.1.7", "10.0.0.1", "fe80::1", "2001:db8::1", "::ffff:10.0.0.1", ""] {
            assert!(is_public(&tcp(host)), "{host}");
        }
        assert!(!is_public(&SocketAddress::Unix("/run/nbd.sock".to_owned())));
        assert!(!is_public(&SocketAddress::Unix("\0name".to_owned())));
    }
}
