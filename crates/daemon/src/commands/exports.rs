// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The NBD server and exports.

#[cfg(feature = "ublk")]
use super::ublk;
use super::{Arguments, Group, activity, change, command, failed, fuse, http, nothing, vhost};
use crate::nbd::{ExportSpec, ListenPlace, NBD, Nbd, NbdSetup, STOP_LIMIT};
use crate::objects::Object;
use crate::servers::VHOST_USER_BLK;
use crate::socket::port;
use crate::state::Daemon;
use cowshed_image::Node;
use cowshed_image::graph::AttachRequest;
use cowshed_image::node::{BitmapUse, LocalFuture, NodeBitmap};
use cowshed_nbd_server::Removal;
use cowshed_qmp::{QmpError, QmpResult};
use cowshed_storage::{KeepAlive, ListenOptions, SocketAddress};
use cowshed_types::{ErrorKind, is_identifier};
use serde_json::{Map, Value, json};
use std::rc::Rc;
use std::sync::Arc;

pub(super) const GROUP: Group = Group {
    schema: "
enum SocketAddressType: inet unix fd
object InetSocketAddress: host: str, port: str, numeric?: bool, to?: int, ipv4?: bool, ipv6?: bool, keep-alive?: bool
  , keep-alive-count?: uint32, keep-alive-idle?: uint32, keep-alive-interval?: uint32, mptcp?: bool
object UnixSocketAddress: path: str, abstract?: bool, tight?: bool
object FdSocketAddress: str: str
object SocketAddress: type: SocketAddressType | type = inet: InetSocketAddress, unix: UnixSocketAddress
  , fd: FdSocketAddress
object InetSocketAddressWrapper: data: InetSocketAddress
object UnixSocketAddressWrapper: data: UnixSocketAddress
object FdSocketAddressWrapper: data: FdSocketAddress
object SocketAddressLegacy: type: SocketAddressType | type = inet: InetSocketAddressWrapper
  , unix: UnixSocketAddressWrapper, fd: FdSocketAddressWrapper
object NbdServerOptions: addr: SocketAddress, handshake-max-seconds?: uint32, tls-creds?: str, tls-authz?: str
  , max-connections?: uint32
command nbd-server-start: addr: SocketAddressLegacy, handshake-max-seconds?: uint32, tls-creds?: str
  , tls-authz?: str, max-connections?: uint32
command nbd-server-add: device: str, name?: str, description?: str, writable?: bool, bitmap?: str
command nbd-server-remove: name: str, mode?: BlockExportRemoveMode
command nbd-server-stop
enum BlockExportRemoveMode: safe hard
enum BlockExportType: nbd vhost-user-blk fuse http ublk
enum FuseExportAllowOther: off on auto
object BlockExportOptionsNbd: name?: str, description?: str, allocation-depth?: bool, bitmaps?: [BlockDirtyBitmapOrStr]
object BlockExportOptionsVhostUserBlk: addr: SocketAddress, logical-block-size?: size, num-queues?: int
object BlockExportOptionsFuse: mountpoint: str, growable?: bool, allow-other?: FuseExportAllowOther
object BlockExportOptionsHttp: addr: SocketAddress, path?: str, tls-creds?: str
enum UblkExportRecover: off on auto
object BlockExportOptionsUblk: device-id?: uint32, num-queues?: uint32, queue-size?: uint32, logical-block-size?: size
  , recover?: UblkExportRecover, unprivileged?: bool
alternate BlockExportIothreads: str, [str]
object BlockExportOptions: type: BlockExportType, id: str, fixed-iothread?: bool, iothread?: BlockExportIothreads, node-name: str
  , writable?: bool, writethrough?: bool, allow-inactive?: bool | type = nbd: BlockExportOptionsNbd
  , vhost-user-blk: BlockExportOptionsVhostUserBlk, fuse: BlockExportOptionsFuse
  , http: BlockExportOptionsHttp, ublk: BlockExportOptionsUblk
command block-export-add(BlockExportOptions)
command block-export-del: id: str, mode?: BlockExportRemoveMode
object BlockExportInfo: id: str, type: BlockExportType, node-name: str, shutting-down: bool, x-requests?: int
command query-block-exports -> [BlockExportInfo]
event BLOCK_IO_ERROR: qom-path: str, device: str, node-name?: str, operation: IoOperationType, action: BlockErrorAction
  , nospace?: bool, reason: str
event BLOCK_IMAGE_CORRUPTED: device: str, node-name?: str, msg: str, offset?: int, size?: int, fatal: bool
event BLOCK_EXPORT_DELETED: id: str
",
    commands: &[
        command!("nbd-server-start", nbd_server_start),
        change!("nbd-server-add", nbd_server_add),
        command!("nbd-server-remove", nbd_server_remove),
        command!("nbd-server-stop", nbd_server_stop),
        change!("block-export-add", block_export_add),
        command!("block-export-del", block_export_del),
        command!("query-block-exports", query_block_exports),
    ],
};

fn not_running() -> QmpError {
    QmpError::generic("NBD server not running")
}

async fn nbd_server_start(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    let place = place(arguments.object("addr"), daemon.is_starting.get())?;
    let most = arguments.number("max-connections")?.unwrap_or(0);
    let most = usize::try_from(most).map_err(|_| too_large("max-connections"))?;
    let patience = arguments.number("handshake-max-seconds")?;
    let access =
        TlsAccess { tls_creds: arguments.maybe_text("tls-creds"), tls_authz: arguments.maybe_text("tls-authz") };
    start_nbd(&daemon, place, access, most, patience)?;
    nothing()
}

/// The permitted clients: ids of objects.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TlsAccess<'a> {
    /// Credentials of the server.
    pub tls_creds: Option<&'a str>,
    /// The check of certificates.
    pub tls_authz: Option<&'a str>,
}

impl TlsAccess<'_> {
    /// A check of names without certificates would let every client in.
    fn check(&self, daemon: &Daemon) -> QmpResult<()> {
        let (Some(_), creds) = (self.tls_authz, self.tls_creds) else { return Ok(()) };
        let Some(creds) = creds else {
            return Err(QmpError::generic("'tls-authz' is not permitted without 'tls-creds'"));
        };
        match daemon.objects.find(creds) {
            Some(Object::TlsCreds { verify_peer: false, .. }) => {
                let message = format!("'tls-authz' needs credentials with 'verify-peer=on', which '{creds}' hasn't");
                Err(QmpError::generic(message))
            }
            _ => Ok(()),
        }
    }
}

/// Starts the NBD server.
pub(crate) fn start_nbd(
    daemon: &Rc<Daemon>,
    (place, listen): (ListenPlace, ListenOptions),
    access: TlsAccess<'_>,
    max_connections: usize,
    handshake_seconds: Option<u64>,
) -> QmpResult<()> {
    if daemon.nbd().is_some() {
        return Err(QmpError::generic("NBD server already running"));
    }
    access.check(daemon)?;
    let setup = NbdSetup {
        place,
        listen,
        tls: access.tls_creds.map(|id| daemon.objects.server_tls(id)).transpose()?,
        authorizer: access.tls_authz.map(|id| daemon.objects.authorizations.authorizer(id)),
        max_connections,
        handshake_seconds,
        queues: daemon.queues,
        request_memory_bytes: daemon.request_memory_bytes,
        poll_limit: daemon.objects.poll_limit.clone(),
        stop_when_idle: daemon.stop_when_idle,
        held: daemon.is_starting.get(),
    };
    let nbd = Nbd::start(setup, daemon.events.clone(), daemon.control.clone()).map_err(failed)?;
    daemon.set_nbd(Some(Rc::new(nbd)));
    Ok(())
}

fn too_large(key: &str) -> QmpError {
    QmpError::generic(format!("Parameter '{key}' is too large"))
}

/// A `SocketAddress`, or the older spelling with its members in `data`.
pub(super) fn place(given: Option<&Map<String, Value>>, is_starting: bool) -> QmpResult<(ListenPlace, ListenOptions)> {
    let missing = || QmpError::generic("Parameter 'addr' is missing");
    let given = given.ok_or_else(missing)?;
    let members = given.get("data").and_then(Value::as_object).unwrap_or(given);
    let text = |key: &str| members.get(key).and_then(Value::as_str).unwrap_or_default();
    let kind = given.get("type").and_then(Value::as_str).unwrap_or_default();
    match kind {
        "unix" => {
            let flag = |key: &str, default: bool| members.get(key).and_then(Value::as_bool).unwrap_or(default);
            let address = SocketAddress::of_unix(text("path"), flag("abstract", false), flag("tight", true));
            Ok((ListenPlace::Address(address), ListenOptions::default()))
        }
        "inet" => {
            let port = port(text("host"), text("port"), "Parameter 'addr.port'").map_err(QmpError::generic)?;
            let address = SocketAddress::Tcp { host: text("host").to_owned(), port };
            Ok((ListenPlace::Address(address), listen_options(members)?))
        }
        // The numbers of descriptors are known at the start only: those that come later are this process's own.
        _ if !is_starting => Err(QmpError::generic("only QEMU supports file descriptor passing")),
        _ => {
            let wrong = |_| QmpError::generic(format!("Unable to parse FD number {}", text("str")));
            let number = text("str").parse().map_err(wrong)?;
            Ok((ListenPlace::Descriptor(number), ListenOptions::default()))
        }
    }
}

/// The members of an `InetSocketAddress` beside host and port.
fn listen_options(members: &Map<String, Value>) -> QmpResult<ListenOptions> {
    let flag = |key: &str| members.get(key).and_then(Value::as_bool);
    let number = |key: &str| members.get(key).and_then(Value::as_u64);
    let keep_alive = |key: &str| {
        let wrong = || QmpError::generic(format!("Parameter 'addr.{key}' expects a number of 32 bits"));
        members.get(key).map(|_| number(key).and_then(|number| number.try_into().ok()).ok_or_else(wrong)).transpose()
    };
    let (count, idle, interval) =
        (keep_alive("keep-alive-count")?, keep_alive("keep-alive-idle")?, keep_alive("keep-alive-interval")?);
    let last_port = members.get("to").map(|_| number("to").and_then(|port| port.try_into().ok()));
    let wrong = || QmpError::generic("Parameter 'to' expects uint16_t");
    Ok(ListenOptions {
        ipv4: flag("ipv4"),
        ipv6: flag("ipv6"),
        numeric: flag("numeric") == Some(true),
        last_port: last_port.map(|port| port.ok_or_else(wrong)).transpose()?,
        keep_alive: (flag("keep-alive") == Some(true)).then_some(KeepAlive {
            count,
            idle_seconds: idle,
            interval_seconds: interval,
        }),
        mptcp: flag("mptcp") == Some(true),
    })
}

async fn nbd_server_stop(daemon: Rc<Daemon>, _arguments: Arguments) -> QmpResult<Value> {
    let nbd = daemon.nbd().ok_or_else(not_running)?;
    daemon.set_nbd(None);
    let (result, hung) = nbd.stop(STOP_LIMIT, true).await;
    nbd.remove_inherited_files();
    if !hung.is_empty() {
        tracing::warn!("the NBD server has stopped, and what hangs stays until it ends: {}", hung.join(", "));
    }
    result.map_err(failed)?;
    nothing()
}

async fn nbd_server_add(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    let device = arguments.text("device").to_owned();
    let name = arguments.maybe_text("name").unwrap_or(&device).to_owned();
    if daemon.inactive.contains(&device) {
        activity::activate(&daemon, &device).await?;
    }
    if daemon.graph.find(&device).is_none() {
        return Err(QmpError::generic(format!("Cannot find device='{device}' nor node-name='{device}'")));
    }
    let spec = ExportSpec {
        id: name.clone(),
        name,
        description: arguments.maybe_text("description").unwrap_or_default().to_owned(),
        // As QEMU does here, and only here.
        writable: arguments.flag("writable", false)
            && !daemon.graph.find(&device).is_some_and(|node| node.is_read_only()),
        writethrough: arguments.flag("writethrough", false),
        allocation_depth: false,
        bitmaps: Vec::new(),
    };
    let bitmaps = arguments.maybe_text("bitmap").map(|name| (None, name.to_owned()));
    export(&daemon, &device, spec, bitmaps.into_iter().collect()).await
}

/// A type of exports.
struct ExportType {
    name: &'static str,
    /// The type in QEMU's words, for the refusal of several threads.
    title: &'static str,
    /// It serves with as many threads as it is given.
    has_threads: bool,
    /// It is of no use before the NBD server runs.
    needs_nbd: bool,
    /// Adds an export of a node, which is there and active.
    add: for<'a> fn(&'a Rc<Daemon>, &'a Arguments, &'a str) -> LocalFuture<'a, QmpResult<Value>>,
}

/// The types of exports.
const EXPORTS: &[ExportType] = &[
    ExportType {
        name: NBD,
        title: "NBD",
        has_threads: false,
        needs_nbd: true,
        add: |d, a, n| Box::pin(add_nbd(d, a, n)),
    },
    ExportType {
        name: VHOST_USER_BLK,
        title: "vhost-user-blk",
        has_threads: false,
        needs_nbd: false,
        add: |d, a, n| Box::pin(vhost::add(d, a, n)),
    },
    ExportType {
        name: fuse::FUSE,
        title: "FUSE",
        has_threads: true,
        needs_nbd: false,
        add: |d, a, n| Box::pin(fuse::add(d, a, n)),
    },
    ExportType {
        name: http::HTTP,
        title: "HTTP",
        has_threads: false,
        needs_nbd: false,
        add: |d, a, n| Box::pin(http::add(d, a, n)),
    },
    #[cfg(feature = "ublk")]
    ExportType {
        name: ublk::UBLK,
        title: "ublk",
        has_threads: false,
        needs_nbd: false,
        add: |d, a, n| Box::pin(ublk::add(d, a, n)),
    },
];

/// One thread, or a list, which exports refuse that can't use it.
fn check_iothreads(daemon: &Daemon, kind: &ExportType, given: Option<&Value>) -> QmpResult<()> {
    let list = given.and_then(Value::as_array);
    let names = list.into_iter().flatten().chain(given.filter(|given| given.is_string())).filter_map(Value::as_str);
    match list {
        Some(list) if list.is_empty() => return Err(QmpError::generic("The set of I/O threads must not be empty")),
        _ => {}
    }
    for name in names {
        daemon.objects.check_iothread(name)?;
    }
    match list {
        Some(_) if kind.needs_nbd && daemon.nbd().is_none() => Err(not_running()),
        Some(_) if kind.has_threads => Ok(()),
        Some(_) => Err(QmpError::generic(format!("{} export does not support multi-threading", kind.title))),
        None => Ok(()),
    }
}

async fn block_export_add(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    let node = arguments.text("node-name").to_owned();
    let kind = EXPORTS.iter().find(|kind| kind.name == arguments.text("type"));
    let kind = kind.ok_or_else(|| QmpError::generic("this build has no such type of exports"))?;
    if arguments.flag("fixed-iothread", false) && arguments.get("iothread").is_some_and(Value::is_array) {
        return Err(QmpError::generic("Cannot use fixed-iothread for a multi-threaded export"));
    }
    check_new(&daemon, arguments.text("id"))?;
    if daemon.graph.find(&node).is_none() && !daemon.inactive.contains(&node) {
        return Err(no_node(&node));
    }
    check_iothreads(&daemon, kind, arguments.get("iothread"))?;
    if daemon.inactive.contains(&node) {
        if arguments.flag("allow-inactive", false) {
            let message = format!("Node '{node}' is inactive: it is closed, and an export of it has nothing to serve");
            return Err(QmpError::generic(message));
        }
        activity::activate(&daemon, &node).await?;
    }
    (kind.add)(&daemon, &arguments, &node).await
}

async fn add_nbd(daemon: &Rc<Daemon>, arguments: &Arguments, node: &str) -> QmpResult<Value> {
    let spec = ExportSpec {
        id: arguments.text("id").to_owned(),
        name: arguments.maybe_text("name").unwrap_or(node).to_owned(),
        description: arguments.maybe_text("description").unwrap_or_default().to_owned(),
        writable: arguments.flag("writable", false),
        writethrough: arguments.flag("writethrough", false),
        allocation_depth: arguments.flag("allocation-depth", false),
        bitmaps: Vec::new(),
    };
    let bitmaps = super::bitmaps::of_export(daemon, arguments)?;
    export(daemon, node, spec, bitmaps).await
}

/// A bitmap that an export is to offer; `None`: of the first node of its chain that has it.
type WantedBitmap = (Option<Arc<Node>>, String);

/// Takes the bitmaps of an export into use.
async fn use_bitmaps(top: &Arc<Node>, writable: bool, wanted: Vec<WantedBitmap>) -> QmpResult<Vec<BitmapUse>> {
    let mut used: Vec<BitmapUse> = Vec::new();
    for (node, name) in wanted {
        let worded = |error: cowshed_types::Error| QmpError::generic(error.message().to_owned());
        // As in QEMU: with its node it is offered as it is at the moment.
        let has_node = node.is_some();
        let node = match node {
            Some(node) if node.bitmaps().await.map_err(worded)?.iter().any(|bitmap| bitmap.name == name) => node,
            Some(_) => return Err(QmpError::generic(format!("Dirty bitmap '{name}' not found"))),
            None => top.find_bitmap(&name).await.map_err(worded)?,
        };
        // As in QEMU an export may offer one twice.
        if let Some(known) = used.iter().find(|known| known.name() == name && Arc::ptr_eq(known.node(), &node)) {
            let again = known.again();
            used.push(again);
            continue;
        }
        let is_recording = |bitmap: &NodeBitmap| bitmap.name == name && bitmap.recording;
        if !writable && !has_node && node.bitmaps().await.map_err(worded)?.iter().any(is_recording) {
            return Err(QmpError::generic(format!("Enabled bitmap '{name}' incompatible with readonly export")));
        }
        used.push(node.use_bitmap(&name).await.map_err(worded)?);
    }
    Ok(used)
}

/// The id of a new export is one, and no other export has it.
fn check_new(daemon: &Daemon, id: &str) -> QmpResult<()> {
    match (is_identifier(id), daemon.find_export(id)) {
        (false, _) => Err(QmpError::generic("Invalid block export id")),
        (true, Some(_)) => Err(QmpError::generic(format!("Block export id '{id}' is already in use"))),
        (true, None) => Ok(()),
    }
}

fn no_node(name: &str) -> QmpError {
    QmpError::generic(format!("Cannot find device='' nor node-name='{name}'"))
}

async fn export(daemon: &Rc<Daemon>, node: &str, mut spec: ExportSpec, bitmaps: Vec<WantedBitmap>) -> QmpResult<Value> {
    check_new(daemon, &spec.id)?;
    let node = daemon.graph.find(node).ok_or_else(|| no_node(node))?;
    if spec.writable && node.is_read_only() {
        return Err(QmpError::generic("Cannot export read-only node as writable"));
    }
    // QEMU looks whether a node may be written before it looks for the server.
    if !spec.writable && daemon.nbd().is_none() {
        return Err(not_running());
    }
    let request = AttachRequest::export(spec.id.clone(), spec.writable);
    let attachment = daemon.graph.attach(&node, request).await.map_err(failed)?;
    let added = async {
        let nbd = daemon.nbd().ok_or_else(not_running)?;
        if nbd.exports().iter().any(|known| known.name == spec.name) {
            return Err(QmpError::generic(format!("NBD server already has export named '{}'", spec.name)));
        }
        spec.bitmaps = use_bitmaps(&node, spec.writable, bitmaps).await?;
        nbd.add(spec, Arc::clone(&attachment)).map_err(failed)
    };
    if let Err(error) = added.await {
        attachment.detach().await.map_err(failed)?;
        return Err(error);
    }
    nothing()
}

fn removal(arguments: &Arguments) -> Removal {
    match arguments.maybe_text("mode") {
        Some("hard") => Removal::Hard,
        _ => Removal::Safe,
    }
}

async fn nbd_server_remove(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    remove(&daemon, arguments.text("name"), removal(&arguments)).await
}

async fn block_export_del(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    remove(&daemon, arguments.text("id"), removal(&arguments)).await
}

async fn remove(daemon: &Rc<Daemon>, id: &str, removal: Removal) -> QmpResult<Value> {
    let found = daemon.find_export(id);
    let found = found.ok_or_else(|| QmpError::generic(format!("Export '{id}' is not found")))?;
    let removed = match (found.kind, daemon.nbd()) {
        (NBD, Some(nbd)) => nbd.remove(id, removal).await,
        (NBD, None) => return Err(not_running()),
        _ => daemon.servers.remove(id, removal).await,
    };
    removed.map_err(|error| match error.kind() {
        ErrorKind::Busy => QmpError::generic(format!("export '{id}' still in use")),
        // QEMU's words, which don't name the file.
        ErrorKind::InvalidArgument => QmpError::generic(error.message().to_owned()),
        _ => failed(error),
    })?;
    nothing()
}

async fn query_block_exports(daemon: Rc<Daemon>, _arguments: Arguments) -> QmpResult<Value> {
    let exports = daemon.exports();
    let info = |export: &crate::nbd::Exported| {
        let mut info = json!({"id": export.id, "type": export.kind, "node-name": export.attachment.node().name(),
                              "shutting-down": export.shutting_down});
        if export.shutting_down {
            info["x-requests"] = json!(export.attachment.statistics().in_flight);
        }
        info
    };
    Ok(exports.iter().rev().map(info).collect())
}
