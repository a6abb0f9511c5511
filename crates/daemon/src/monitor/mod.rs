// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Monitors: QMP servers on Unix and TCP sockets and on standard input. Each client has a thread that reads and one that
//! writes; a client's commands are answered in order, each by a task on the control thread.

mod client;
mod listen;

pub use client::serve;
pub use listen::{Bound, Listening, MonitorAddress};

use crate::control::Message;
use crate::events::EventBus;
use crate::inbox::Sender;
use cowshed_qmp::Schema;
use std::sync::Arc;

/// What every client's threads need.
#[derive(Clone)]
pub struct MonitorContext {
    /// To the control thread.
    pub control: Sender<Message>,
    /// The commands there are.
    pub schema: Arc<Schema>,
    /// Where events come from.
    pub events: EventBus,
    /// Messages over several lines.
    pub pretty: bool,
}
