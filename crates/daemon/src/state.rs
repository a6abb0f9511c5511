// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the daemon holds. It lives on the control thread.

use crate::control::{Message, StopReason};
use crate::events::EventBus;
use crate::inbox::Sender;
use crate::monitor::{self, Listening, MonitorAddress, MonitorContext};
use cowshed_block::Result;
use cowshed_image::Node;
use cowshed_image::graph::Graph;
use cowshed_qmp::{QmpError, QmpResult, Schema};
use std::cell::RefCell;
use std::sync::Arc;

/// The daemon. No borrow of a cell is held across an `.await`.
pub(crate) struct Daemon {
    /// The nodes by name.
    pub graph: Arc<Graph>,
    /// To the monitors' clients.
    pub events: EventBus,
    /// The commands there are.
    pub schema: Arc<Schema>,
    control: Sender<Message>,
    /// The nodes that the user added: they live until the user deletes them. In the order of their coming.
    nodes: RefCell<Vec<Arc<Node>>>,
    monitors: RefCell<Vec<Listening>>,
}

impl Daemon {
    pub fn new(control: Sender<Message>, schema: Schema) -> Daemon {
        Daemon {
            graph: Graph::new(),
            events: EventBus::default(),
            schema: Arc::new(schema),
            control,
            nodes: RefCell::default(),
            monitors: RefCell::default(),
        }
    }

    /// Starts a monitor.
    pub fn add_monitor(&self, address: &MonitorAddress, pretty: bool) -> Result<()> {
        let context = MonitorContext {
            control: self.control.clone(),
            schema: Arc::clone(&self.schema),
            events: self.events.clone(),
            pretty,
        };
        self.monitors.borrow_mut().push(monitor::listen(address, context)?);
        Ok(())
    }

    /// Where the monitors are.
    pub fn monitor_addresses(&self) -> Vec<MonitorAddress> {
        self.monitors.borrow().iter().map(|monitor| monitor.address.clone()).collect()
    }

    /// Tells the control thread to stop, after the command that runs now.
    pub fn stop(&self, reason: StopReason) {
        // Fails only when it has stopped.
        let _ = self.control.send(Message::Stop(reason));
    }

    /// Keeps a node that the user added.
    pub fn keep(&self, node: Arc<Node>) {
        self.nodes.borrow_mut().push(node);
    }

    /// The node with this name.
    pub fn node(&self, name: &str) -> QmpResult<Arc<Node>> {
        let found = self.graph.find(name);
        found.ok_or_else(|| QmpError::generic(format!("Failed to find node with node-name='{name}'")))
    }

    /// True when the user added the node.
    pub fn is_kept(&self, node: &Arc<Node>) -> bool {
        self.nodes.borrow().iter().any(|known| Arc::ptr_eq(known, node))
    }

    /// The user's hold of a node ends.
    pub fn let_go(&self, node: &Arc<Node>) {
        self.nodes.borrow_mut().retain(|known| !Arc::ptr_eq(known, node));
    }

    /// Stops everything, users before what they use. The first error is the result; the rest is stopped all the same.
    pub async fn shut_down(&self) -> Result<()> {
        let mut result = Ok(());
        // Last come, first gone: an overlay is closed before what it stands on.
        while let Some(node) = { self.nodes.borrow_mut().pop() } {
            let closed = node.close().await;
            if let Err(error) = &closed {
                tracing::error!(%error, node = node.name(), "could not close a node");
            }
            result = result.and(closed);
        }
        self.monitors.borrow_mut().clear();
        result
    }
}
