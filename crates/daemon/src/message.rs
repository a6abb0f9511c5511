// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Messages to the control thread, from threads of monitors, servers and the metrics endpoint.

use crate::inbox::Sender;
use crate::monitor_properties::MonitorProperties;
use cowshed_qmp::{Command, QmpResult};
use serde_json::Value;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// Takes a command's result, on the control thread: so it comes in order with the events that follow it.
pub type Reply = Box<dyn FnOnce(QmpResult<Value>) + Send>;

/// A message to the control thread.
pub enum Message {
    /// A command of a monitor's client.
    Run {
        /// The command, checked against the schema.
        command: Command,
        /// The monitor that it came by.
        monitor: Arc<MonitorProperties>,
        /// For its result. Dropped without one when the daemon stops.
        reply: Reply,
    },
    /// A reply to send between the events, in its turn.
    Say(Box<dyn FnOnce() + Send>),
    /// A request for the page of the metrics endpoint.
    Metrics {
        /// The channel for the page.
        reply: mpsc::SyncSender<String>,
        /// True while a scraper waits for it. Nothing is rendered for one that has gone.
        is_awaited: Box<dyn Fn() -> bool + Send>,
    },
    /// Events were held back: they are due after this time.
    EventsDue(Duration),
    /// The last client of a monitor has gone.
    MonitorClosed(Arc<MonitorProperties>),
    /// The server of this export has ended by itself.
    ExportEnded(String),
    /// A writer of an exported file has changed the size of a disk. The flag is set until the other clients of the disk hear of it.
    SizeChanged(Arc<AtomicBool>),
    /// Stop in order.
    Stop(StopReason),
}

/// The reason of the daemon's stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// The command `quit`.
    Quit,
    /// SIGTERM, SIGINT or SIGHUP.
    Signal(i32),
    /// Nothing is left to do: the last client of a server that isn't persistent has gone.
    Idle,
}

impl std::fmt::Debug for Sender<Message> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Sender")
    }
}
