// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The state of the daemon. It lives on the control thread.

use crate::chardevs::{BackendOptions, ChardevOptions, Devices};
use crate::events::EventBus;
use crate::inactive::InactiveNodes;
use crate::inbox::Sender;
use crate::inserted_filters::InsertedFilters;
use crate::jobs::Jobs;
use crate::message::{Message, Reply, StopReason};
use crate::monitor::{MonitorAddress, MonitorContext};
use crate::monitor_properties::MonitorProperties;
use crate::nbd::{Exported, NBD, Nbd};
use crate::objects::{Object, Objects};
use crate::servers::Servers;
use crate::untrusted::Untrusted;
use crate::waiting::Commands;
use cowshed_fuse::GuardProgram;
use cowshed_image::Node;
use cowshed_image::graph::Graph;
use cowshed_qmp::{QmpError, QmpResult, Schema};
use cowshed_types::{Error, Result};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// An export that is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Served {
    /// Its id.
    pub id: String,
    /// Where clients find it.
    pub uris: Vec<String>,
    /// The node behind it.
    pub node: String,
    /// The image behind it.
    pub file: String,
    /// Its size in bytes.
    pub size: u64,
    /// Clients may write.
    pub writable: bool,
}

/// The settings of a daemon, beside the steps of its start.
pub(crate) struct Settings {
    pub queues: usize,
    pub vhost_queues: u16,
    pub request_memory_bytes: u64,
    pub stop_when_idle: bool,
    /// The time that a command waits for its turn to change the graph before it is refused.
    pub turn_limit: Duration,
    pub mount_guard: Option<GuardProgram>,
}

/// The daemon. No borrow of a cell is held across an `.await`.
pub(crate) struct Daemon {
    /// The nodes by name, and their users.
    pub graph: Arc<Graph>,
    /// Nodes that are closed for the time being.
    pub inactive: InactiveNodes,
    /// Throttle filters that commands put in.
    pub inserted_filters: InsertedFilters,
    /// To the monitors' clients.
    pub events: EventBus,
    /// The commands there are.
    pub schema: Arc<Schema>,
    /// To the control thread itself.
    pub control: Sender<Message>,
    /// The objects that `object-add` made.
    pub objects: Objects,
    /// Background jobs.
    pub jobs: Rc<Jobs>,
    /// The limits of images from strangers.
    pub untrusted: Untrusted,
    /// Commands that run.
    pub commands: Commands,
    /// For the answers to `quit`, which come when everything has stopped.
    pub farewells: RefCell<Vec<Reply>>,
    /// Generated node-names of commands that run.
    pub given_names: RefCell<Vec<String>>,
    /// Number of threads that serve clients.
    pub queues: usize,
    /// Queues of an export of the type `vhost-user-blk` by default.
    pub vhost_queues: u16,
    /// Memory for the data of all clients' requests, in bytes.
    pub request_memory_bytes: u64,
    /// Stop when the last client goes.
    pub stop_when_idle: bool,
    /// The steps of the start aren't all done: a client that connects to the NBD server waits for the exports that are to come.
    pub is_starting: Cell<bool>,
    /// Monitors of the command line that had no id.
    unnamed_monitors: Cell<usize>,
    nbd: RefCell<Option<Rc<Nbd>>>,
    /// The exports that have a server each.
    pub servers: Rc<Servers>,
    /// The program that unmounts files when this process has gone.
    pub mount_guard: Option<GuardProgram>,
    /// Where monitors are and can be.
    pub chardevs: Devices,
    metrics: RefCell<Vec<String>>,
}

impl Daemon {
    pub fn new(control: Sender<Message>, schema: Schema, settings: &Settings) -> Daemon {
        let events = EventBus::default();
        Daemon {
            graph: Graph::new(&cowshed_image::DRIVERS),
            inactive: InactiveNodes::default(),
            inserted_filters: InsertedFilters::default(),
            servers: Rc::new(Servers::new(events.clone())),
            mount_guard: settings.mount_guard.clone(),
            events,
            schema: Arc::new(schema),
            control,
            objects: Objects::default(),
            jobs: Rc::default(),
            untrusted: Untrusted::default(),
            commands: Commands::new(settings.turn_limit),
            farewells: RefCell::default(),
            given_names: RefCell::default(),
            queues: settings.queues,
            vhost_queues: settings.vhost_queues,
            request_memory_bytes: settings.request_memory_bytes,
            stop_when_idle: settings.stop_when_idle,
            is_starting: Cell::new(true),
            unnamed_monitors: Cell::new(0),
            nbd: RefCell::default(),
            chardevs: Devices::default(),
            metrics: RefCell::default(),
        }
    }

    /// Starts a monitor on a character device.
    pub fn start_monitor(&self, chardev: &str, properties: &Arc<MonitorProperties>) -> Result<()> {
        let context = MonitorContext {
            control: self.control.clone(),
            schema: Arc::clone(&self.schema),
            events: self.events.clone(),
            properties: Arc::clone(properties),
            log: None,
        };
        self.chardevs.start_monitor(chardev, context)
    }

    /// Takes a monitor away with its character device, by its `close-action`: its last client has gone.
    pub fn close_monitor(&self, properties: &Arc<MonitorProperties>) {
        if !properties.is_deleted_on_close() {
            return;
        }
        let is_it = |object: &Object| matches!(object, Object::Monitor(known) if Arc::ptr_eq(known, properties));
        let Some(id) = self
            .objects
            .list()
            .into_iter()
            .map(|(id, _)| id)
            .find(|id| self.objects.find(id).as_ref().is_some_and(is_it))
        else {
            return;
        };
        self.objects.remove(&id);
        self.chardevs.remove_with_monitor(properties.chardev());
    }

    /// A monitor of the command line, which is an object too. Those without an id have a number, in their order.
    pub fn add_first_monitor(&self, chardev: &str, id: Option<String>, pretty: bool) -> Result<()> {
        let id = id.unwrap_or_else(|| {
            let number = self.unnamed_monitors.get();
            self.unnamed_monitors.set(number + 1);
            format!("compat_monitor{number}")
        });
        let refused = |error: QmpError| Error::invalid_argument(error.description);
        let properties = Arc::new(MonitorProperties::new(chardev, pretty, false));
        self.objects.add(&id, Object::Monitor(Arc::clone(&properties))).map_err(refused)?;
        self.start_monitor(chardev, &properties).inspect_err(|_| drop(self.objects.remove(&id)))
    }

    /// Starts a monitor at an address, on a character device of its own.
    pub fn add_monitor(&self, address: &MonitorAddress, pretty: bool) -> Result<()> {
        let id = self.chardevs.free_id("compat_monitor");
        self.chardevs.add(&id, &ChardevOptions { backend: BackendOptions::Place(address.clone()), log: None })?;
        self.start_monitor(&id, &Arc::new(MonitorProperties::new(&id, pretty, false)))
    }

    /// Notes the address of a metrics endpoint.
    pub fn note_metrics(&self, address: String) {
        self.metrics.borrow_mut().push(address);
    }

    /// The addresses of the metrics endpoints.
    pub fn metrics_addresses(&self) -> Vec<String> {
        self.metrics.borrow().clone()
    }

    /// The addresses of the monitors.
    pub fn monitor_addresses(&self) -> Vec<MonitorAddress> {
        self.chardevs.monitors()
    }

    /// The NBD server, while it runs.
    pub fn nbd(&self) -> Option<Rc<Nbd>> {
        self.nbd.borrow().clone()
    }

    pub fn set_nbd(&self, nbd: Option<Rc<Nbd>>) {
        *self.nbd.borrow_mut() = nbd;
    }

    /// All exports, in the order of their coming.
    pub fn exports(&self) -> Vec<Exported> {
        let mut exports = self.nbd().map(|nbd| nbd.exports()).unwrap_or_default();
        exports.extend(self.servers.exports());
        exports.sort_by_key(|export| export.number);
        exports
    }

    /// The export with this id.
    pub fn find_export(&self, id: &str) -> Option<Exported> {
        self.exports().into_iter().find(|export| export.id == id)
    }

    /// The exports with their URIs.
    pub fn served(&self) -> Vec<Served> {
        let uris = |export: &Exported| match export.kind {
            NBD => self.nbd().map(|nbd| nbd.uris(&export.name)).unwrap_or_default(),
            _ => self.servers.uris(&export.id),
        };
        let exports = self.exports().into_iter();
        exports
            .map(|export| Served {
                uris: uris(&export),
                node: export.attachment.node().name().to_owned(),
                file: export.attachment.node().filename(),
                size: export.attachment.size(),
                writable: export.writable,
                id: export.id,
            })
            .collect()
    }

    /// Tells the control thread to stop, after the command that runs now.
    pub fn stop(&self, reason: StopReason) {
        // Fails only when it has stopped.
        let _ = self.control.send(Message::Stop(reason));
    }

    /// The node with this name.
    pub fn node(&self, name: &str) -> QmpResult<Arc<Node>> {
        self.inactive.check(name)?;
        let found = self.graph.find(name);
        found.ok_or_else(|| QmpError::generic(format!("Failed to find node with node-name='{name}'")))
    }
}
