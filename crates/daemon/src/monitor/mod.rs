// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Monitors: QMP servers on Unix and TCP sockets and on standard input. Each client has a thread that reads and one that
//! writes; a client's commands are answered in order, each by a task on the control thread.

mod client;
mod connection;
mod listen;
mod log;

pub use client::serve;
pub(crate) use client::silent_greeting;
pub use connection::ClientAddress;
pub(crate) use connection::Outgoing;
pub use listen::{Bound, Listening, MonitorAddress};
pub use log::{Log, LogOptions};

use crate::control::Message;
use crate::events::EventBus;
use crate::inbox::Sender;
use cowshed_qmp::Schema;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What every client's threads need.
#[derive(Clone)]
pub struct MonitorContext {
    /// To the control thread.
    pub control: Sender<Message>,
    /// The commands there are.
    pub schema: Arc<Schema>,
    /// Where events come from.
    pub events: EventBus,
    /// What the monitor's object says.
    pub properties: Arc<MonitorProperties>,
    /// Takes a copy of what is sent.
    pub log: Option<Arc<Log>>,
}

/// Properties of a monitor, which may change while it runs.
#[derive(Debug)]
pub struct MonitorProperties {
    chardev: String,
    pretty: AtomicBool,
    deletes: AtomicBool,
}

impl MonitorProperties {
    /// Of a monitor on this device. `deletes`: it goes when its last client goes.
    pub fn new(chardev: &str, pretty: bool, deletes: bool) -> Self {
        let (pretty, deletes) = (AtomicBool::new(pretty), AtomicBool::new(deletes));
        MonitorProperties { chardev: chardev.to_owned(), pretty, deletes }
    }

    /// The character device.
    pub fn chardev(&self) -> &str {
        &self.chardev
    }

    /// Messages are over several lines.
    pub fn is_pretty(&self) -> bool {
        self.pretty.load(Ordering::Relaxed)
    }

    /// Of clients that come from now on.
    pub fn set_pretty(&self, pretty: bool) {
        self.pretty.store(pretty, Ordering::Relaxed);
    }

    /// The monitor goes, with its device, when its last client goes.
    pub fn is_deleted_on_close(&self) -> bool {
        self.deletes.load(Ordering::Relaxed)
    }

    /// See [`Self::is_deleted_on_close`].
    pub fn set_deleted_on_close(&self, deletes: bool) {
        self.deletes.store(deletes, Ordering::Relaxed);
    }
}
