// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Monitors: QMP servers on Unix and TCP sockets and on standard input. Each client has a thread that reads and one
//! that writes. A client's commands are answered in order, each by a task on the control thread.

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

use crate::events::EventBus;
use crate::inbox::Sender;
use crate::message::Message;
use crate::monitor_properties::MonitorProperties;
use cowshed_qmp::Schema;
use std::sync::Arc;

/// The parts that every client's threads need.
#[derive(Clone)]
pub struct MonitorContext {
    /// To the control thread.
    pub control: Sender<Message>,
    /// The commands there are.
    pub schema: Arc<Schema>,
    /// The source of events.
    pub events: EventBus,
    /// The properties of the monitor's object.
    pub properties: Arc<MonitorProperties>,
    /// Gets a copy of the sent bytes.
    pub log: Option<Arc<Log>>,
}
