// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The server as its owner sees it.

use crate::admission::Connections;
use crate::config::ServerConfig;
use crate::pool::PoolStats;
use crate::queue::{self, QueueHandle, QueueMessage};
use crate::registry::Registry;
use crate::signal::lock;
use crate::{Disk, DiskQueue, Export, ExportInfo, Removal};
use cowshed_storage::{Listener, Socket, SocketAddress, rt};
use cowshed_types::{Error, ErrorKind, Result};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Serves disks of type `D` over NBD until [`Server::stop`]. Usable from any thread.
///
/// Dropping it without that ends the connections without the replies that are due.
#[derive(Debug)]
pub struct Server<D: Disk> {
    registry: Arc<Registry<D>>,
    /// Empty once it was stopped.
    queues: Mutex<Vec<QueueHandle<D>>>,
    next_queue: Arc<AtomicUsize>,
}

impl<D: Disk> Server<D> {
    /// Starts the threads. No client is served before [`Server::listen`] or [`Server::serve`].
    pub fn new(config: ServerConfig) -> Result<Server<D>> {
        config.check()?;
        let registry = Arc::new(Registry::new(config));
        let queues = QueueHandle::start_all(&registry)?;
        Ok(Server { registry, queues: Mutex::new(queues), next_queue: Arc::default() })
    }

    /// Listens; returns where, with the ports that the system chose. May wait for a name server.
    pub fn listen(&self, address: &SocketAddress) -> Result<Vec<SocketAddress>> {
        Listener::bind(address)?.into_iter().map(|listener| self.listen_on(listener)).collect()
    }

    /// Clients that connect wait, without an answer, until [`Server::release`]: for sockets that listen before all exports are
    /// there. Call it before the first [`Server::listen`].
    pub fn hold(&self) {
        self.registry.held.change(|held| *held = true);
    }

    /// From now on clients are taken.
    pub fn release(&self) {
        self.registry.held.change(|held| *held = false);
    }

    /// Takes clients from a socket that listens already; returns its address.
    pub fn listen_on(&self, listener: Listener) -> Result<SocketAddress> {
        let address = listener.address().clone();
        let queues = lock(&self.queues);
        let mailboxes = queues.iter().map(QueueHandle::mailbox).collect();
        let first = queues.first().ok_or_else(stopped)?;
        first.send(QueueMessage::Listen { listener, mailboxes, next: Arc::clone(&self.next_queue) });
        Ok(address)
    }

    /// Serves one client that is connected already. It isn't counted against the limit of connections.
    pub fn serve(&self, socket: Socket) -> Result<()> {
        let queues = lock(&self.queues);
        let next = self.next_queue.fetch_add(1, Ordering::Relaxed);
        match queues.len() {
            0 => Err(stopped()),
            count => {
                queues[next % count].send(QueueMessage::Serve { socket, slot: None });
                Ok(())
            }
        }
    }

    /// Serves one client that is connected already on the caller's own executor, until it has left. Not counted
    /// against the limit of connections, and not waited for by [`Server::stop`]. Call it inside of [`rt::block_on`].
    pub async fn serve_here(&self, socket: Socket) {
        queue::serve(Arc::clone(&self.registry), socket, None).await;
    }

    /// From now on clients find it.
    pub fn add_export(&self, export: Export<D>) -> Result<()> {
        self.registry.add(export)
    }

    /// Removes an export; when this returns, its disk has no users. With [`Removal::Safe`] an export that is in use
    /// stays, with an error of kind `Busy`. Call it inside of [`rt::block_on`].
    pub async fn remove_export(&self, name: &str, removal: Removal) -> Result<()> {
        self.registry.remove(name, removal).await.map(drop)
    }

    /// The exports, ordered by name.
    pub fn exports(&self) -> Vec<ExportInfo> {
        self.registry.all().iter().map(|served| served.info()).collect()
    }

    /// Number of connections at the moment, those in negotiation included.
    pub fn connections(&self) -> usize {
        self.registry.connections.look(Connections::all)
    }

    /// The memory that the requests of all connections share.
    pub fn memory(&self) -> PoolStats {
        self.registry.pool.stats()
    }

    /// Waits until there is no connection.
    pub async fn wait_until_idle(&self) {
        self.registry.connections.wait(|all| (all.all() == 0).then_some(())).await;
    }

    /// Stops listening, answers requests in flight (for at most `grace`) and disconnects all clients. Then it flushes
    /// every disk that could be written to, and ends the threads. Returns the first error of a flush. Call it inside of
    /// [`rt::block_on`].
    pub async fn stop(&self, grace: Duration) -> Result<()> {
        self.registry.begin_stop();
        let queues = std::mem::take(&mut *lock(&self.queues));
        for queue in &queues {
            queue.send(QueueMessage::Stop);
        }
        let registry = Arc::clone(&self.registry);
        let impatience = rt::spawn(async move {
            rt::sleep(grace).await;
            registry.disconnect_all();
        });
        for queue in queues {
            queue.join().await;
        }
        impatience.cancel().await;
        let mut result = Ok(());
        for served in self.registry.all() {
            if served.export.writable {
                let flushed = served.export.disk.queue().flush().await;
                result = result.and(flushed);
            }
        }
        result
    }
}

fn stopped() -> Error {
    Error::new(ErrorKind::Busy, "the server was stopped")
}

impl<D: Disk> Drop for Server<D> {
    fn drop(&mut self) {
        self.registry.begin_stop();
        self.registry.disconnect_all();
        for queue in lock(&self.queues).drain(..) {
            queue.send(QueueMessage::Stop);
        }
    }
}
