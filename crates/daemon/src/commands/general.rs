// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Commands about the daemon itself.

use super::{Arguments, Group, command, nothing};
use crate::message::StopReason;
use crate::state::Daemon;
use crate::version::version;
use crate::waiting::RunningCommand;
use cowshed_qmp::{ErrorClass, QmpError, QmpResult};
use serde_json::{Value, json};
use std::rc::Rc;

pub(super) const GROUP: Group = Group {
    schema: "
object VersionTriple: major: int, minor: int, micro: int
object VersionInfo: qemu: VersionTriple, package: str
object CommandInfo: name: str
enum QMPCapability: oob
command qmp_capabilities: enable?: [QMPCapability]
command query-version -> VersionInfo
command query-commands -> [CommandInfo]
command query-qmp-schema -> [any]
object XRunningCommand: name: str, seconds: int, waits-for-turn: bool
command x-query-running -> [XRunningCommand]
command quit
",
    commands: &[
        command!("qmp_capabilities", capabilities),
        command!("query-version", query_version),
        command!("query-commands", query_commands),
        command!("query-qmp-schema", query_qmp_schema),
        command!("x-query-running", query_running),
        command!("quit", quit),
    ],
};

/// The session answers this one by itself; here it is for the lists of commands.
async fn capabilities(_daemon: Rc<Daemon>, _arguments: Arguments) -> QmpResult<Value> {
    Err(QmpError::new(ErrorClass::CommandNotFound, "Capabilities negotiation is already complete, command ignored"))
}

async fn query_version(_daemon: Rc<Daemon>, _arguments: Arguments) -> QmpResult<Value> {
    Ok(version())
}

async fn query_commands(daemon: Rc<Daemon>, _arguments: Arguments) -> QmpResult<Value> {
    Ok(daemon.schema.query_commands())
}

async fn query_qmp_schema(daemon: Rc<Daemon>, _arguments: Arguments) -> QmpResult<Value> {
    Ok(daemon.schema.query_schema())
}

/// The commands that have not ended, with how long they have run; this one is left out.
async fn query_running(daemon: Rc<Daemon>, _arguments: Arguments) -> QmpResult<Value> {
    let running = daemon.commands.list().into_iter().filter(|one| one.name != "x-query-running");
    let about = |one: Rc<RunningCommand>| json!({"name": one.name, "seconds": one.seconds(), "waits-for-turn": one.waits_for_turn.get()});
    Ok(running.map(about).collect())
}

async fn quit(daemon: Rc<Daemon>, _arguments: Arguments) -> QmpResult<Value> {
    daemon.stop(StopReason::Quit);
    nothing()
}
