// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The exports, and their clients.

use crate::admission::{Admissions, Connections};
use crate::config::{Event, ServerConfig};
use crate::pool::{ExportShare, Pool};
use crate::signal::Watched;
use crate::{Disk, Export, ExportInfo, Removal};
use cowshed_storage::{Socket, rt};
use cowshed_types::{Error, ErrorKind, Result};
use futures_util::future::{Either, select};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// So long may the clients of an export that is removed take their last replies.
const HARD_GRACE: Duration = Duration::from_secs(5);

/// So long may clients whose connections have ended keep an export from being removed.
const LEAVE_GRACE: Duration = Duration::from_secs(5);

/// The part of a server that all its threads share.
#[derive(Debug)]
pub(crate) struct Registry<D> {
    pub config: ServerConfig,
    exports: Watched<Exports<D>>,
    /// Connections that have been accepted and aren't closed.
    pub connections: Watched<Connections>,
    /// The connections that negotiate.
    pub admissions: Admissions,
    /// Clients are left where the system keeps them.
    pub held: Watched<bool>,
    /// The memory of requests.
    pub pool: Arc<Pool>,
}

impl<D> Exports<D> {
    fn find(&self, name: &str) -> Option<&Arc<Served<D>>> {
        self.list.iter().find(|served| served.export.name == name)
    }
}

#[derive(Debug)]
struct Exports<D> {
    /// In the order of their coming, in which clients get the list.
    list: Vec<Arc<Served<D>>>,
    /// No new clients any more.
    stopping: bool,
}

/// An export and its clients.
#[derive(Debug)]
pub(crate) struct Served<D> {
    pub export: Export<D>,
    /// The part of the shared memory that its requests hold.
    pub memory: Arc<ExportShare>,
    clients: Watched<Clients>,
}

#[derive(Debug, Default)]
struct Clients {
    /// By the number of their connection.
    list: Vec<Arc<Client>>,
    /// No new ones.
    closed: bool,
}

/// One connection that is in the transmission phase.
#[derive(Debug)]
pub(crate) struct Client {
    socket: Socket,
    closing: AtomicBool,
}

impl Client {
    /// True when nothing more is to be taken from it.
    pub(crate) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    /// Takes no further requests; those in flight are still answered.
    fn ask_to_leave(&self) {
        self.closing.store(true, Ordering::Release);
        self.socket.shutdown_receive();
    }
}

impl<D: Disk> Registry<D> {
    pub(crate) fn new(config: ServerConfig) -> Self {
        let exports = Exports { list: Vec::new(), stopping: false };
        let limits = &config.limits;
        let pool = Pool::new(limits.memory_bytes, limits.max_payload_bytes.into(), limits.stall_limit);
        Registry {
            config,
            exports: Watched::new(exports),
            connections: Watched::default(),
            admissions: Admissions::default(),
            held: Watched::new(false),
            pool,
        }
    }

    pub(crate) fn add(&self, export: Export<D>) -> Result<()> {
        export.check()?;
        self.exports.change(|exports| {
            if exports.stopping {
                return Err(Error::new(ErrorKind::Busy, "the server is stopping"));
            }
            if exports.find(&export.name).is_some() {
                let message = format!("an export named '{}' exists already", export.name);
                return Err(Error::invalid_argument(message));
            }
            if export.is_default && exports.list.iter().any(|other| other.export.is_default) {
                return Err(Error::invalid_argument("there is a default export already"));
            }
            let memory = ExportShare::new(&export.name);
            exports.list.push(Arc::new(Served { export, memory, clients: Watched::default() }));
            Ok(())
        })
    }

    /// The export that a client means by `name`.
    pub(crate) fn find(&self, name: &str) -> Option<Arc<Served<D>>> {
        self.exports.look(|exports| {
            let means = |served: &&Arc<Served<D>>| match name {
                "" => served.export.is_default,
                name => served.export.alias.as_deref() == Some(name),
            };
            let found = exports.find(name).or_else(|| exports.list.iter().find(means));
            found.filter(|served| !served.clients.look(|clients| clients.closed)).cloned()
        })
    }

    pub(crate) fn all(&self) -> Vec<Arc<Served<D>>> {
        self.exports.look(|exports| exports.list.clone())
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.exports.look(|exports| exports.stopping)
    }

    /// Waits until the server begins to stop.
    pub(crate) async fn wait_for_stop(&self) {
        self.exports.wait(|exports| exports.stopping.then_some(())).await;
    }

    /// Removes an export; returns it when no client uses it any more.
    pub(crate) async fn remove(&self, name: &str, removal: Removal) -> Result<Arc<Served<D>>> {
        let found = self.exports.look(|exports| exports.find(name).cloned());
        let Some(served) = found else {
            return Err(Error::new(ErrorKind::NotFound, format!("there is no export '{name}'")));
        };
        if removal == Removal::Safe {
            served.wait_for_leavers().await;
        }
        served.clients.change(|clients| {
            if clients.closed {
                return Err(Error::new(ErrorKind::Busy, format!("export '{name}' is being removed already")));
            }
            if removal == Removal::Safe && !clients.list.is_empty() {
                let message = format!("export '{name}' is in use by {} connections", clients.list.len());
                return Err(Error::new(ErrorKind::Busy, message));
            }
            clients.closed = true;
            Ok(())
        })?;
        served.ask_all_to_leave();
        // A client that doesn't take its replies can't hold this up for ever.
        let in_time = {
            let leaving = pin!(served.wait_until_unused());
            matches!(select(leaving, pin!(rt::sleep(HARD_GRACE))).await, Either::Left(_))
        };
        if !in_time {
            served.disconnect_all();
            served.wait_until_unused().await;
        }
        self.exports.change(|exports| exports.list.retain(|other| !Arc::ptr_eq(other, &served)));
        self.config.notify(Event::ExportRemoved { name: name.to_owned() });
        Ok(served)
    }

    /// No new clients, and those that are there take their leave.
    pub(crate) fn begin_stop(&self) {
        self.exports.change(|exports| exports.stopping = true);
        for served in self.all() {
            served.clients.change(|clients| clients.closed = true);
            served.ask_all_to_leave();
        }
    }

    /// Ends connections that didn't leave by themselves.
    pub(crate) fn disconnect_all(&self) {
        self.all().iter().for_each(|served| served.disconnect_all());
    }
}

impl<D: Disk> Served<D> {
    /// Adds a client, unless the export is being removed.
    pub(crate) fn enter(self: &Arc<Self>, socket: &Socket) -> Option<ClientGuard<D>> {
        let client = Arc::new(Client { socket: socket.clone(), closing: AtomicBool::new(false) });
        let entered = self.clients.change(|clients| {
            if !clients.closed {
                clients.list.push(Arc::clone(&client));
            }
            !clients.closed
        });
        entered.then(|| ClientGuard { served: Arc::clone(self), client })
    }

    fn ask_all_to_leave(&self) {
        self.clients.look(|clients| clients.list.iter().for_each(|client| client.ask_to_leave()));
    }

    fn disconnect_all(&self) {
        self.clients.look(|clients| clients.list.iter().for_each(|client| client.socket.shutdown()));
    }

    /// Where all clients have closed their connections already, waits for their threads to notice and for their last
    /// requests to end. It waits for [`LEAVE_GRACE`] at most. Such a client's process may be long gone.
    async fn wait_for_leavers(&self) {
        let all_leave = self.clients.look(|clients| clients.list.iter().all(|client| client.socket.has_hung_up()));
        if all_leave {
            let _ = select(pin!(self.wait_until_unused()), pin!(rt::sleep(LEAVE_GRACE))).await;
        }
    }

    async fn wait_until_unused(&self) {
        self.clients.wait(|clients| clients.list.is_empty().then_some(())).await;
    }

    pub(crate) fn info(&self) -> ExportInfo {
        let (clients, shutting_down) = self.clients.look(|clients| (clients.list.len(), clients.closed));
        ExportInfo {
            name: self.export.name.clone(),
            description: self.export.description.clone(),
            size: self.export.disk.size(),
            writable: self.export.writable,
            clients,
            shutting_down,
        }
    }
}

/// A client's use of an export, from its choice to its end.
#[derive(Debug)]
pub(crate) struct ClientGuard<D: Disk> {
    pub served: Arc<Served<D>>,
    pub client: Arc<Client>,
}

impl<D: Disk> Drop for ClientGuard<D> {
    fn drop(&mut self) {
        self.served.clients.change(|clients| clients.list.retain(|client| !Arc::ptr_eq(client, &self.client)));
    }
}
