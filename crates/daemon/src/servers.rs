// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The daemon's exports that have a server each: all types but NBD, whose exports share one.

use crate::events::EventBus;
use crate::nbd::Exported;
use cowshed_image::node::LocalFuture;
use cowshed_nbd_server::Removal;
use cowshed_storage::rt;
use cowshed_storage::rt::within;
use cowshed_types::{Error, ErrorKind, Result};
use serde_json::json;
use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

/// So long the removal of an export is waited for; a longer one goes on by itself.
const REMOVAL_PATIENCE: Duration = Duration::from_secs(7);

/// So long an export is waited for at the end before the next one is stopped beside it, by its part of the limit.
const HEAD_STARTS_IN_LIMIT: u32 = 8;
/// At the end each export gets so long, whatever others have taken.
const LEAST_PATIENCE: Duration = Duration::from_millis(100);

/// The name of the type.
pub(crate) const VHOST_USER_BLK: &str = "vhost-user-blk";

/// The server of one export.
pub(crate) trait ExportServer {
    /// A client keeps the export in use.
    fn is_connected(&self) -> bool;

    /// It has ended by itself.
    fn has_ended(&self) -> bool {
        false
    }

    /// Where clients find it.
    fn uris(&self) -> Vec<String>;

    /// The size of the disk may have changed.
    fn look_at_size(&self) {}

    /// Ends requests in flight, and the server.
    fn stop(&self) -> LocalFuture<'_, ()>;
}

struct Entry {
    export: Exported,
    server: Rc<dyn ExportServer>,
}

/// All of them.
pub(crate) struct Servers {
    list: RefCell<Vec<Entry>>,
    events: EventBus,
}

impl Servers {
    pub fn new(events: EventBus) -> Servers {
        Servers { list: RefCell::default(), events }
    }

    /// Takes an export that is served by now.
    pub fn add(&self, export: Exported, server: Rc<dyn ExportServer>) {
        let (address, node) = (server.uris().join(" "), export.attachment.node().name().to_owned());
        tracing::info!(export = export.id, address, node, writable = export.writable, "export added");
        self.list.borrow_mut().push(Entry { export, server });
    }

    /// The exports, in the order of their coming.
    pub fn exports(&self) -> Vec<Exported> {
        self.list.borrow().iter().map(|entry| entry.export.clone()).collect()
    }

    /// True when the servers of all exports have ended by themselves.
    pub fn have_ended(&self) -> bool {
        self.list.borrow().iter().all(|entry| entry.server.has_ended())
    }

    /// Number of exports of a type that a client has in use.
    pub fn connected(&self, kind: &str) -> usize {
        let list = self.list.borrow();
        list.iter().filter(|entry| entry.export.kind == kind && entry.server.is_connected()).count()
    }

    /// Where clients find an export.
    pub fn uris(&self, id: &str) -> Vec<String> {
        let list = self.list.borrow();
        list.iter().find(|entry| entry.export.id == id).map(|entry| entry.server.uris()).unwrap_or_default()
    }

    /// Sizes may have changed: clients hear of it.
    pub fn look_at_sizes(&self) {
        self.list.borrow().iter().for_each(|entry| entry.server.look_at_size());
    }

    /// Ends an export: its client is sent away after its last requests.
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
                return Err(Error::new(ErrorKind::Busy, format!("export '{id}' is in use by a client")));
            }
            entry.export.shutting_down = true;
            (Rc::clone(&entry.server), entry.export.clone())
        };
        let exports = Rc::clone(self);
        let requests = export.attachment.statistics().in_flight;
        let task = rt::spawn(async move { exports.take_away(&*server, export).await });
        match within(REMOVAL_PATIENCE, task).await {
            Some(result) => result,
            None => {
                tracing::warn!(export = id, requests, "requests of a removed export hang; it stays until they end");
                Ok(())
            }
        }
    }

    /// Takes an export away whose server has ended by itself.
    pub async fn remove_ended(self: &Rc<Self>, id: &str) {
        let found = {
            let mut list = self.list.borrow_mut();
            let is_it =
                |entry: &&mut Entry| entry.export.id == id && !entry.export.shutting_down && entry.server.has_ended();
            list.iter_mut().find(is_it).map(|entry| {
                entry.export.shutting_down = true;
                (Rc::clone(&entry.server), entry.export.clone())
            })
        };
        if let Some((server, export)) = found {
            tracing::info!(export = export.id, "an export was ended from outside");
            // It has reported the error.
            let _: Result<()> = self.take_away(&*server, export).await;
        }
    }

    async fn take_away(&self, server: &dyn ExportServer, export: Exported) -> Result<()> {
        server.stop().await;
        let detached = export.attachment.detach().await;
        self.list.borrow_mut().retain(|entry| entry.export.id != export.id);
        if let Err(error) = &detached {
            tracing::warn!(export = export.id, %error, "a removed export could not be flushed");
        }
        self.events.emit("BLOCK_EXPORT_DELETED", json!({"id": export.id}));
        detached
    }

    /// Ends all of them, the newest first; one that hangs keeps the next ones no longer than a moment. Returns the first error, and
    /// the exports that did not end within `limit`.
    pub async fn stop(self: &Rc<Self>, limit: Duration, detaches: bool) -> (Result<()>, Vec<String>) {
        let end = rt::now() + limit;
        let remaining = || end.saturating_sub(rt::now());
        let (mut result, mut hung, mut late) = (Ok(()), Vec::new(), Vec::new());
        let entries: Vec<(Exported, Rc<dyn ExportServer>)> = {
            let list = self.list.borrow();
            list.iter().rev().map(|entry| (entry.export.clone(), Rc::clone(&entry.server))).collect()
        };
        for (export, server) in entries {
            let shown = format!("export '{}'", export.id);
            if export.shutting_down {
                continue;
            }
            let exports = Rc::clone(self);
            let mut task = rt::spawn(async move {
                match detaches {
                    true => exports.take_away(&*server, export).await,
                    false => {
                        server.stop().await;
                        Ok(())
                    }
                }
            });
            match within((limit / HEAD_STARTS_IN_LIMIT).min(remaining()), &mut task).await {
                Some(stopped) => result = result.and(stopped),
                None => late.push((shown, task)),
            }
        }
        for (shown, task) in late {
            match within(remaining().max(LEAST_PATIENCE), task).await {
                Some(stopped) => result = result.and(stopped),
                None => hung.push(shown),
            }
        }
        (result, hung)
    }
}
