// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Commands about the daemon itself.

use super::{Arguments, Group, command, nothing};
use crate::control::{StopReason, version};
use crate::state::Daemon;
use cowshed_qmp::{ErrorClass, QmpError, QmpResult};
use serde_json::Value;
use std::rc::Rc;

pub(super) const GROUP: Group = Group {
    schema: "
object VersionTriple: major: int, minor: int, micro: int
object VersionInfo: qemu: VersionTriple, package: str
object CommandInfo: name: str
enum ShutdownCause: none host-error host-qmp-quit host-qmp-system-reset host-signal host-ui guest-shutdown guest-reset
  guest-panic subsystem-reset snapshot-load
enum QMPCapability: oob
command qmp_capabilities: enable?: [QMPCapability]
command query-version -> VersionInfo
command query-commands -> [CommandInfo]
command query-qmp-schema -> [any]
command quit
event SHUTDOWN: guest: bool, reason: ShutdownCause
",
    commands: &[
        command!("qmp_capabilities", capabilities),
        command!("query-version", query_version),
        command!("query-commands", query_commands),
        command!("query-qmp-schema", query_qmp_schema),
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

async fn quit(daemon: Rc<Daemon>, _arguments: Arguments) -> QmpResult<Value> {
    daemon.stop(StopReason::Quit);
    nothing()
}
