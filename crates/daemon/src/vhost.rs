// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The daemon's exports over vhost-user-blk: each has a socket and threads of its own.

use crate::events::EventBus;
use crate::nbd::Exported;
use cowshed_block::{Error, ErrorKind, Result};
use cowshed_image::graph::Attachment;
use cowshed_nbd_server::Removal;
use cowshed_storage::rt::within;
use cowshed_storage::{Listener, rt};
use cowshed_vhost_user::{Config, Server};
use serde_json::json;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// So long the removal of an export is waited for; what takes longer goes on by itself.
const REMOVAL_PATIENCE: Duration = Duration::from_secs(7);

/// The name of the type.
pub(crate) const VHOST_USER_BLK: &str = "vhost-user-blk";

struct Entry {
    export: Exported,
    server: Arc<Server>,
}

/// All of them.
pub(crate) struct VhostExports {
    list: RefCell<Vec<Entry>>,
    events: EventBus,
}

impl VhostExports {
    pub fn new(events: EventBus) -> VhostExports {
        VhostExports { list: RefCell::default(), events }
    }

    /// Serves an attachment on a socket. An error leaves the attachment to the caller.
    pub fn add(&self, config: Config, listener: Listener, attachment: Arc<Attachment>) -> Result<()> {
        let (id, writable) = (config.id.clone(), config.writable);
        let server = Server::start(config, listener, Arc::clone(&attachment))?;
        tracing::info!(export = id, address = %server.address(), node = attachment.node().name(), writable, "export added");
        let export = Exported::new(VHOST_USER_BLK, id.clone(), id, attachment, writable, Vec::new());
        self.list.borrow_mut().push(Entry { export, server: Arc::new(server) });
        Ok(())
    }

    /// The exports, in the order of their coming.
    pub fn exports(&self) -> Vec<Exported> {
        self.list.borrow().iter().map(|entry| entry.export.clone()).collect()
    }

    /// Front ends that are connected.
    pub fn connections(&self) -> usize {
        self.list.borrow().iter().filter(|entry| entry.server.is_connected()).count()
    }

    /// Where an export listens: `vhost-user:PATH`.
    pub fn uris(&self, id: &str) -> Vec<String> {
        let list = self.list.borrow();
        let found = list.iter().filter(|entry| entry.export.id == id);
        found.map(|entry| format!("vhost-user:{}", entry.server.address())).collect()
    }

    /// Sizes may have changed: guests hear of it.
    pub fn look_at_sizes(&self) {
        self.list.borrow().iter().for_each(|entry| entry.server.look_at_size());
    }

    /// Ends an export: its front end is sent away after its last requests.
    pub async fn remove(self: &Rc<Self>, id: &str, removal: Removal) -> Result<()> {
        let (server, export) = {
            let mut list = self.list.borrow_mut();
            let Some(entry) = list.iter_mut().find(|entry| entry.export.id == id) else {
                return Err(Error::new(ErrorKind::NotFound, format!("there is no export '{id}'")));
            };
            if entry.export.shutting_down {
                return Err(Error::invalid_argument(format!("Export '{id}' is already shutting down")));
            }
            if removal == Removal::Safe && entry.server.is_connected() {
                return Err(Error::new(ErrorKind::Busy, format!("export '{id}' is in use by a front end")));
            }
            entry.export.shutting_down = true;
            (Arc::clone(&entry.server), entry.export.clone())
        };
        let exports = Rc::clone(self);
        let requests = export.attachment.statistics().in_flight;
        let task = rt::spawn(async move { exports.take_away(&server, export).await });
        match within(REMOVAL_PATIENCE, task).await {
            Some(result) => result,
            None => {
                tracing::warn!(export = id, requests, "requests of a removed export hang; it stays until they end");
                Ok(())
            }
        }
    }

    async fn take_away(&self, server: &Server, export: Exported) -> Result<()> {
        server.stop().await;
        let detached = export.attachment.detach().await;
        self.list.borrow_mut().retain(|entry| entry.export.id != export.id);
        if let Err(error) = &detached {
            tracing::warn!(export = export.id, %error, "a removed export could not be flushed");
        }
        self.events.emit("BLOCK_EXPORT_DELETED", json!({"id": export.id}));
        detached
    }

    /// Ends all of them, the newest first. The first error, and what did not end within `limit`.
    pub async fn stop(self: &Rc<Self>, limit: Duration, detaches: bool) -> (Result<()>, Vec<String>) {
        let end = rt::now() + limit;
        let (mut result, mut hung) = (Ok(()), Vec::new());
        let entries: Vec<(Exported, Arc<Server>)> = {
            let list = self.list.borrow();
            list.iter().rev().map(|entry| (entry.export.clone(), Arc::clone(&entry.server))).collect()
        };
        for (export, server) in entries {
            let shown = format!("export '{}'", export.id);
            if export.shutting_down {
                continue;
            }
            let exports = Rc::clone(self);
            let task = rt::spawn(async move {
                match detaches {
                    true => exports.take_away(&server, export).await,
                    false => {
                        server.stop().await;
                        Ok(())
                    }
                }
            });
            match within(end.saturating_sub(rt::now()), task).await {
                Some(stopped) => result = result.and(stopped),
                None => hung.push(shown),
            }
        }
        (result, hung)
    }
}
