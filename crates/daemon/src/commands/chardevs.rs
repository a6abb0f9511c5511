// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Character devices at run time: places for monitors (`object-add` of type `monitor-qmp`), and ring buffers.

use super::{Arguments, Group, command, failed, nothing};
use crate::chardevs::{BackendOptions, ChardevOptions, check_pauses};
use crate::monitor::{ClientAddress, LogOptions, MonitorAddress};
use crate::socket::port;
use crate::state::Daemon;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use cowshed_qmp::{QmpError, QmpResult};
use serde_json::{Map, Value, json};
use std::rc::Rc;
use std::time::Duration;

pub(super) const GROUP: Group = Group {
    schema: "
object ChardevInfo: label: str, filename: str, frontend-open: bool
object ChardevBackendInfo: name: str
enum DataFormat: utf8 base64
enum ChardevBackendKind: socket null ringbuf memory
object ChardevCommon: logfile?: str, logappend?: bool, logtimestamp?: bool
object ChardevCommonWrapper: data: ChardevCommon
object ChardevRingbuf: logfile?: str, logappend?: bool, logtimestamp?: bool, size?: int
object ChardevRingbufWrapper: data: ChardevRingbuf
object ChardevSocket: logfile?: str, logappend?: bool, logtimestamp?: bool, addr: SocketAddressLegacy, server?: bool, wait?: bool, nodelay?: bool, telnet?: bool, reconnect-ms?: int
object ChardevSocketWrapper: data: ChardevSocket
object ChardevBackend: type: ChardevBackendKind | type = socket: ChardevSocketWrapper, null: ChardevCommonWrapper
  , ringbuf: ChardevRingbufWrapper, memory: ChardevRingbufWrapper
object ChardevReturn: pty?: str
command query-chardev -> [ChardevInfo]
command query-chardev-backends -> [ChardevBackendInfo]
command chardev-add: id: str, backend: ChardevBackend -> ChardevReturn
command chardev-change: id: str, backend: ChardevBackend -> ChardevReturn
command chardev-remove: id: str
command chardev-send-break: id: str
command ringbuf-write: device: str, data: str, format?: DataFormat
command ringbuf-read: device: str, size: int, format?: DataFormat -> str
",
    commands: &[
        command!("query-chardev", query_chardev),
        command!("query-chardev-backends", query_backends),
        command!("chardev-add", chardev_add),
        command!("chardev-change", chardev_change),
        command!("chardev-remove", chardev_remove),
        command!("chardev-send-break", send_break),
        command!("ringbuf-write", ringbuf_write),
        command!("ringbuf-read", ringbuf_read),
    ],
};

/// Backends that QEMU has, and why there are none here.
pub(crate) const REFUSED_BACKENDS: &[(&str, &str)] = &[
    ("file", NO_MONITOR),
    ("pipe", NO_MONITOR),
    ("pty", NO_MONITOR),
    ("serial", NO_MONITOR),
    ("parallel", NO_MONITOR),
    ("udp", NO_MONITOR),
    ("mux", NO_MONITOR),
    ("hub", NO_MONITOR),
    ("stdio", "the standard streams belong to the command line (--chardev stdio)"),
];

const NO_MONITOR: &str = "a monitor is on a socket or on the standard streams";

async fn query_chardev(daemon: Rc<Daemon>, _arguments: Arguments) -> QmpResult<Value> {
    let describe = |device: crate::chardevs::Described| json!({"label": device.label, "filename": device.filename, "frontend-open": device.in_use});
    Ok(daemon.chardevs.list().into_iter().map(describe).collect())
}

async fn query_backends(_daemon: Rc<Daemon>, _arguments: Arguments) -> QmpResult<Value> {
    Ok(["memory", "null", "ringbuf", "socket", "stdio"].into_iter().map(|name| json!({"name": name})).collect())
}

/// The device that the arguments describe.
fn options(arguments: &Arguments) -> QmpResult<ChardevOptions> {
    let described = arguments.object("backend").cloned().unwrap_or_default();
    let kind = described.get("type").and_then(Value::as_str).unwrap_or_default();
    let data = described.get("data").and_then(Value::as_object).cloned().unwrap_or_default();
    let flag = |key: &str| data.get(key).and_then(Value::as_bool).unwrap_or(false);
    let log = data.get("logfile").and_then(Value::as_str).map(|path| LogOptions {
        path: path.into(),
        append: flag("logappend"),
        timestamps: flag("logtimestamp"),
    });
    let backend = match kind {
        "null" => BackendOptions::Null,
        "ringbuf" | "memory" => {
            let size = data.get("size").map(|size| size.as_u64().unwrap_or(0));
            BackendOptions::ring(size).map_err(QmpError::generic)?
        }
        _ => socket(&data)?,
    };
    Ok(ChardevOptions { backend, log })
}

fn socket(data: &Map<String, Value>) -> QmpResult<BackendOptions> {
    let flag = |key: &str, default: bool| data.get(key).and_then(Value::as_bool).unwrap_or(default);
    let is_server = flag("server", true);
    let pause = data.get("reconnect-ms").and_then(Value::as_u64).filter(|&pause| pause > 0);
    check_pauses(is_server, pause.is_some(), data.contains_key("wait")).map_err(QmpError::generic)?;
    if is_server && flag("wait", false) {
        return Err(QmpError::generic("a monitor waits for no client: 'wait' must be false"));
    }
    if flag("telnet", false) {
        return Err(QmpError::generic("a monitor speaks no telnet: 'telnet' must be false"));
    }
    let reconnect = pause.map(Duration::from_millis);
    let address = data.get("addr").and_then(Value::as_object).cloned().unwrap_or_default();
    let inner = address.get("data").and_then(Value::as_object).cloned().unwrap_or_default();
    let text = |key: &str| inner.get(key).and_then(Value::as_str).unwrap_or_default();
    match address.get("type").and_then(Value::as_str) {
        Some("unix") if is_server => Ok(BackendOptions::Place(MonitorAddress::Unix(text("path").into()))),
        Some("unix") => Ok(BackendOptions::Outgoing { address: ClientAddress::Unix(text("path").into()), reconnect }),
        Some("inet") => {
            let port = port(text("host"), text("port"), "'port'").map_err(QmpError::generic)?;
            let host = text("host").to_owned();
            Ok(match is_server {
                true => BackendOptions::Place(MonitorAddress::Tcp { host, port }),
                false => BackendOptions::Outgoing { address: ClientAddress::Tcp { host, port }, reconnect },
            })
        }
        _ => Err(QmpError::generic("a monitor's socket is of type 'unix' or 'inet'")),
    }
}

async fn chardev_add(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    let id = arguments.text("id");
    daemon.chardevs.check_new(id).map_err(failed)?;
    let made = options(&arguments).and_then(|options| daemon.chardevs.add(id, &options).map_err(failed));
    made.map_err(|error| QmpError::generic(format!("Failed to add chardev '{id}': {}", error.description)))?;
    nothing()
}

/// A device's back end changes only while no monitor is there.
async fn chardev_change(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    daemon.chardevs.change(arguments.text("id"), &options(&arguments)?).map_err(failed)?;
    nothing()
}

async fn chardev_remove(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    daemon.chardevs.remove(arguments.text("id")).map_err(failed)?;
    nothing()
}

/// A break is for serial lines. Here it has no effect, as with QEMU's sockets and buffers.
async fn send_break(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    let id = arguments.text("id");
    match daemon.chardevs.check_new(id) {
        Ok(()) => Err(QmpError::generic(format!("Chardev '{id}' not found"))),
        Err(_) => nothing(),
    }
}

async fn ringbuf_write(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    let data = match arguments.maybe_text("format") {
        Some("base64") => {
            let wrong = |error| QmpError::generic(format!("Parameter 'data' expects base64: {error}"));
            STANDARD.decode(arguments.text("data")).map_err(wrong)?
        }
        _ => arguments.text("data").as_bytes().to_vec(),
    };
    daemon.chardevs.write_ring(arguments.text("device"), &data).map_err(failed)?;
    nothing()
}

async fn ringbuf_read(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    let size = arguments.number("size").ok().flatten().filter(|&size| size > 0);
    let Some(size) = size else { return Err(QmpError::generic("size must be greater than zero")) };
    let taken = daemon.chardevs.read_ring(arguments.text("device"), size).map_err(failed)?;
    Ok(match arguments.maybe_text("format") {
        Some("base64") => STANDARD.encode(&taken).into(),
        _ => String::from_utf8_lossy(&taken).into(),
    })
}
