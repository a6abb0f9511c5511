// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The commands, in groups: each group has its definitions and its table.

mod activity;
mod arguments;
mod bitmaps;
mod block_jobs;
mod chardevs;
mod create;
mod drives;
mod exports;
mod general;
mod internal;
mod jobs;
mod nodes;
mod objects;
mod snapshot;
mod stats;
mod throttle;

pub(crate) use activity::InactiveNodes;
pub(crate) use arguments::{Arguments, failed};
pub(crate) use chardevs::REFUSED_BACKENDS;
pub(crate) use exports::{Access, start_nbd};
pub(crate) use nodes::add_node;
pub(crate) use snapshot::free_name;
pub(crate) use stats::set_budget;
pub(crate) use throttle::{InsertedFilters, throttle_export};

use crate::state::Daemon;
use cowshed_image::node::LocalFuture;
use cowshed_qmp::{Command, QmpError, QmpResult};
use serde_json::{Map, Value, json};
use std::rc::Rc;

/// Carries a command out. It changes nothing when it fails.
type Handler = fn(Rc<Daemon>, Arguments) -> LocalFuture<'static, QmpResult<Value>>;

/// A command.
pub(crate) struct CommandInfo {
    pub name: &'static str,
    pub run: Handler,
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
];

/// A line of a group's table.
macro_rules! command {
    ($name:literal, $run:path) => {
        $crate::commands::CommandInfo { name: $name, run: |daemon, arguments| Box::pin($run(daemon, arguments)) }
    };
}
pub(crate) use command;

/// Runs a command that the schema has checked.
pub(crate) async fn run(daemon: &Rc<Daemon>, command: Command) -> QmpResult<Value> {
    call(daemon, &command.name, command.arguments).await
}

/// As [`run`], by name.
pub(crate) async fn call(daemon: &Rc<Daemon>, name: &str, arguments: Map<String, Value>) -> QmpResult<Value> {
    let found = GROUPS.iter().flat_map(|group| group.commands).find(|known| known.name == name);
    match found {
        Some(found) => (found.run)(Rc::clone(daemon), Arguments::new(arguments)).await,
        None => Err(QmpError::generic(format!("there is no command '{name}'"))),
    }
}

/// What a command returns that has nothing to say.
pub(crate) fn nothing() -> QmpResult<Value> {
    Ok(json!({}))
}
