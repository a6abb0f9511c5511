// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The commands, in groups: each group has its definitions and its table.

mod activity;
mod arguments;
mod bitmaps;
mod block_jobs;
mod chardevs;
mod create;
mod drives;
mod experimental;
mod exports;
mod faults;
mod fuse;
mod general;
mod http;
mod internal;
mod jobs;
mod names;
mod new_file;
mod nodes;
mod objects;
mod snapshot;
mod stats;
mod throttle;
#[cfg(feature = "ublk")]
mod ublk;
mod vhost;

pub(crate) use arguments::Arguments;
pub(crate) use chardevs::REFUSED_BACKENDS;
pub(crate) use exports::{TlsAccess, start_nbd};
pub(crate) use objects::{NO_IDENTIFIER, NO_TYPE, check_kind};
pub(crate) use snapshot::free_name;
pub(crate) use stats::set_budget;
pub(crate) use throttle::throttle_export;

use crate::failure::failed;
use crate::monitor_properties::MonitorProperties;
use crate::state::Daemon;
use crate::waiting::{CommandScope, Turn};
use cowshed_image::node::LocalFuture;
use cowshed_qmp::{Command, QmpError, QmpResult};
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::Arc;

/// Carries a command out. It changes nothing when it fails.
type Handler = fn(Rc<Daemon>, Arguments) -> LocalFuture<'static, QmpResult<Value>>;

/// A command.
pub(crate) struct CommandInfo {
    pub name: &'static str,
    pub run: Handler,
    /// It changes the graph: one at a time of those that are about the same nodes. The others run whatever waits, so they change
    /// nothing across an `.await` that a change depends on.
    pub is_change: bool,
}

/// Commands that belong together.
pub(crate) struct Group {
    /// Their definitions, in the notation of `cowshed_qmp`.
    pub schema: &'static str,
    pub commands: &'static [CommandInfo],
}

/// All groups.
pub(crate) const GROUPS: &[&Group] = &[
    &general::GROUP,
    &nodes::GROUP,
    &activity::GROUP,
    &exports::GROUP,
    &objects::GROUP,
    &throttle::GROUP,
    &stats::GROUP,
    &snapshot::GROUP,
    &internal::GROUP,
    &jobs::GROUP,
    &block_jobs::GROUP,
    &drives::GROUP,
    &create::GROUP,
    &bitmaps::GROUP,
    &chardevs::GROUP,
    &experimental::GROUP,
    &faults::GROUP,
];

/// A line of a group's table.
macro_rules! command {
    ($name:literal, $run:path) => {
        $crate::commands::CommandInfo {
            name: $name,
            run: |daemon, arguments| Box::pin($run(daemon, arguments)),
            is_change: false,
        }
    };
}
pub(crate) use command;

/// As `command!`, for one that changes the graph.
macro_rules! change {
    ($name:literal, $run:path) => {
        $crate::commands::CommandInfo { is_change: true, ..$crate::commands::command!($name, $run) }
    };
}
pub(crate) use change;

/// Runs a command that the schema has checked. `monitor`: the one that it came by.
pub(crate) async fn run(daemon: &Rc<Daemon>, command: Command, monitor: Arc<MonitorProperties>) -> QmpResult<Value> {
    let Command { name, arguments, .. } = command;
    let listed = daemon.commands.begin(&name);
    if daemon.commands.list().len() == 1 {
        // Names that former commands were given are those of nodes by now.
        daemon.given_names.borrow_mut().clear();
    }
    let work = async {
        let connected = |names: &BTreeSet<String>| names::connected(daemon, names);
        let turn = match find(&name).is_some_and(|found| found.is_change) {
            true => {
                let names = names::named(daemon, &arguments);
                Some(daemon.commands.turn(&listed, CommandScope { names, connected: &connected }).await?)
            }
            false => None,
        };
        let mut arguments = Arguments::new(arguments);
        arguments.turn = turn.as_ref().map(Turn::id);
        arguments.monitor = Some(monitor);
        let done = call_with(daemon, &name, arguments).await;
        // Clients hear of a new size.
        daemon.servers.look_at_sizes();
        done
    };
    daemon.commands.watched(&name, work).await
}

fn find(name: &str) -> Option<&'static CommandInfo> {
    GROUPS.iter().flat_map(|group| group.commands).find(|known| known.name == name)
}

/// As [`run`], by name.
pub(crate) async fn call(daemon: &Rc<Daemon>, name: &str, arguments: Map<String, Value>) -> QmpResult<Value> {
    call_with(daemon, name, Arguments::new(arguments)).await
}

async fn call_with(daemon: &Rc<Daemon>, name: &str, arguments: Arguments) -> QmpResult<Value> {
    match find(name) {
        Some(found) => (found.run)(Rc::clone(daemon), arguments).await,
        None => Err(QmpError::generic(format!("there is no command '{name}'"))),
    }
}

/// The empty result of a command.
pub(crate) fn nothing() -> QmpResult<Value> {
    Ok(json!({}))
}
