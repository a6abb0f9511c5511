// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Nodes: adding, deleting, listing, resizing.

use super::{Arguments, Group, activity, change, command, failed, names, nothing};
use crate::state::Daemon;
use crate::warnings;
use cowshed_image::filters::throttle::Limits;
use cowshed_image::graph::{Attachment, below_filters, images_below, nodes_below};
use cowshed_image::node::ChildRole;
use cowshed_image::options::BlockdevOptions;
use cowshed_image::{Node, Preallocation};
use cowshed_jobs::limits::BlockLimits;
use cowshed_qmp::{QmpError, QmpResult};
use cowshed_storage::rt::within;
use cowshed_storage::{CacheMode, File, path_of_text, rt};
use cowshed_types::ErrorKind;
use serde_json::{Map, Value, json};
use std::cell::RefCell;
use std::collections::HashSet;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

pub(super) const GROUP: Group = Group {
    schema: "
command blockdev-add(BlockdevOptions)
command blockdev-del: node-name: str
command block_resize: device?: str, node-name?: str, size: int
command blockdev-reopen: options: [BlockdevOptions]
command x-blockdev-insert: node-name: str
command x-blockdev-remove: node-name: str
object BlockdevChild: child: str, node-name: str
object BlockdevCacheInfo: writeback: bool, direct: bool, no-flush: bool
object BlockDeviceInfo: file: str, node-name: str, ro: bool, drv: str, backing_file?: str, backing_file_depth: int
  , children: [BlockdevChild], active: bool, encrypted: bool, detect_zeroes: BlockdevOptions-detect-zeroes
  , bps: int, bps_rd: int, bps_wr: int, iops: int, iops_rd: int, iops_wr: int
  , bps_max?: int, bps_rd_max?: int, bps_wr_max?: int, iops_max?: int, iops_rd_max?: int, iops_wr_max?: int
  , bps_max_length?: int, bps_rd_max_length?: int, bps_wr_max_length?: int
  , iops_max_length?: int, iops_rd_max_length?: int, iops_wr_max_length?: int, iops_size?: int, group?: str
  , image: any, cache: BlockdevCacheInfo, write_threshold: int, dirty-bitmaps?: [BlockDirtyInfo]
command query-named-block-nodes: flat?: bool -> [BlockDeviceInfo]
",
    commands: &[
        change!("blockdev-add", blockdev_add),
        change!("blockdev-del", blockdev_del),
        change!("block_resize", block_resize),
        change!("blockdev-reopen", blockdev_reopen),
        change!("x-blockdev-insert", insert),
        change!("x-blockdev-remove", remove),
        command!("query-named-block-nodes", query_named_block_nodes),
    ],
};

async fn blockdev_add(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    let options = BlockdevOptions::from_map(arguments.into_map()).map_err(failed)?;
    add_node(&daemon, options).await?;
    nothing()
}

/// Opens a node and keeps it until it is deleted.
async fn add_node(daemon: &Rc<Daemon>, mut options: BlockdevOptions) -> QmpResult<()> {
    if options.text("driver").is_none() {
        return Err(QmpError::generic("Parameter 'driver' is missing"));
    }
    let Some(name) = options.text("node-name").map(str::to_owned) else {
        return Err(QmpError::generic("'node-name' must be specified for the root node"));
    };
    if is_taken(daemon, &name) {
        // As in QEMU, which opens the children first.
        let mut files = Vec::new();
        options.iter().try_for_each(|(key, child)| check_child(daemon, key, child, &mut files))?;
        let missing = move || files.into_iter().find(|file| !path_of_text(file).exists());
        if let Some(file) = rt::run_on_cpu_pool(missing).await {
            return Err(QmpError::generic(format!("Could not open '{file}': No such file or directory")));
        }
        return Err(QmpError::generic(format!("Duplicate nodes with node-name='{name}'")));
    }
    let whole = Map::from_iter(options.iter().map(|(key, value)| (key.clone(), value.clone())));
    if let Some(path) = missing_of_server(&Value::Object(whole), "") {
        return Err(QmpError::generic(format!("Parameter '{path}' is missing")));
    }
    daemon.untrusted.take_option(&mut options);
    let driver = options.text("driver").unwrap_or_default().to_owned();
    let added = add_active(daemon, options).await;
    if let Err(failure) = added {
        daemon.untrusted.remove(&name);
        // An option of the command line has no schema with the list of drivers.
        return Err(match failure.description == format!("Unknown driver '{driver}'") {
            true => QmpError { description: format!("Parameter 'driver' does not accept value '{driver}'"), ..failure },
            false => missing_event(failure),
        });
    }
    Ok(())
}

/// The option of an `nbd` node's server that the schema of QMP requires and that is missing, at any depth. `path`: the
/// place of the options.
fn missing_of_server(options: &Value, path: &str) -> Option<String> {
    let options = options.as_object()?;
    let is_older = || ["host", "path", "filename"].iter().any(|key| options.contains_key(*key));
    if options.get("driver").is_some_and(|driver| driver == "nbd") && !is_older() {
        let Some(server) = options.get("server") else { return Some(format!("{path}server")) };
        let needed: &[&str] = match server.get("type").and_then(Value::as_str) {
            Some("unix") => &["path"],
            Some("inet") => &["host", "port"],
            _ => &[],
        };
        let missing = needed.iter().find(|key| server.get(**key).is_none());
        return missing.map(|key| format!("{path}server.{key}"));
    }
    options.iter().find_map(|(key, child)| missing_of_server(child, &format!("{path}{key}.")))
}

/// The words of the schema for a rule of `blkdebug` without its event.
fn missing_event(failure: QmpError) -> QmpError {
    if failure.description != "Missing event name for rule" {
        return failure;
    }
    let path = failure.whole.as_deref().and_then(|whole| whole.split_once("option '")?.1.split_once('\''));
    let Some((path, _)) = path else { return failure };
    let key = |key: &str| if key.parse::<usize>().is_ok() { format!("[{key}]") } else { format!(".{key}") };
    let path: String = path.split('.').map(key).collect();
    let description = format!("Parameter '{}' is missing", path.trim_start_matches('.'));
    QmpError { description, ..failure }
}

fn is_taken(daemon: &Daemon, name: &str) -> bool {
    daemon.graph.find(name).is_some() || daemon.inactive.contains(name)
}

/// Refuses a child whose name another node has, or that no node has. `files`: the names of the children that it is to
/// be opened from.
fn check_child(daemon: &Daemon, key: &str, child: &Value, files: &mut Vec<String>) -> QmpResult<()> {
    const ROLES: [ChildRole; 3] = [ChildRole::File, ChildRole::Image, ChildRole::DataFile];
    if !ROLES.iter().any(|role| role.as_str() == key) {
        return Ok(());
    }
    match child {
        Value::String(name) => names::device(daemon, name).map(drop),
        Value::Object(options) => {
            options.iter().try_for_each(|(key, child)| check_child(daemon, key, child, files))?;
            let text = |key: &str| options.get(key).and_then(Value::as_str);
            if let Some(name) = text("node-name").filter(|name| is_taken(daemon, name)) {
                return Err(QmpError::generic(format!("Duplicate nodes with node-name='{name}'")));
            }
            if text("driver") == Some("file") {
                files.extend(text("filename").map(str::to_owned));
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Takes `active=off` out of the options of a child: the nodes below an inactive one are closed with it.
fn forget_inactive(mut child: Value) -> Value {
    for (_, option) in child.as_object_mut().into_iter().flat_map(Map::iter_mut) {
        *option = forget_inactive(option.take());
    }
    if let Some(options) = child.as_object_mut()
        && options.get("active").is_some_and(|active| [json!(false), json!("off")].contains(active))
    {
        options.shift_remove("active");
    }
    child
}

async fn add_active(daemon: &Rc<Daemon>, mut options: BlockdevOptions) -> QmpResult<()> {
    let is_off = |active: &Value| [json!(false), json!("off")].contains(active);
    if options.remove("active").as_ref().is_some_and(is_off) {
        let forgotten = options.iter().map(|(key, child)| (key.clone(), forget_inactive(child.clone())));
        let options = BlockdevOptions::from_map(forgotten.collect()).map_err(failed)?;
        return activity::add_inactive(daemon, options).await;
    }
    let opened = activity::activate_named(daemon, &options).await?;
    let node = match daemon.untrusted.add(&daemon.graph, options).await {
        Ok(node) => node,
        Err(error) => {
            activity::roll_back(daemon, opened).await;
            return Err(failed(error));
        }
    };
    warnings::report(&node);
    Ok(())
}

async fn blockdev_del(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    if daemon.inactive.delete(arguments.text("node-name"))? {
        daemon.untrusted.remove(arguments.text("node-name"));
        return nothing();
    }
    let name = arguments.text("node-name");
    if let Some((below, kind)) = daemon.jobs.behind_filter(name) {
        let overlay = names::parents(&daemon, &below).into_iter().find(|(_, role)| *role == ChildRole::Backing);
        let user = match overlay {
            Some((overlay, _)) => format!("node is used as backing hd of '{}'", overlay.name()),
            None => format!("block device is in use by block job: {kind}"),
        };
        return Err(QmpError::generic(format!("Node '{name}' is busy: {user}")));
    }
    let node = daemon.node(name)?;
    check_deletable(&daemon, &node)?;
    let node = daemon.graph.take_out(node.name()).await.map_err(failed)?;
    daemon.untrusted.remove(node.name());
    close_last(&daemon, &arguments, &node).await;
    nothing()
}

/// Closes a node that is out of the graph, as the last step of a command. A disk that never answers keeps the commands for other
/// nodes from nothing. The node is gone, whatever becomes of its last flush: a client must not take it for there.
async fn close_last(daemon: &Daemon, arguments: &Arguments, node: &Arc<Node>) {
    if let Some(turn) = arguments.turn {
        daemon.commands.narrow(turn, node.name());
    }
    if let Err(error) = node.close().await {
        tracing::warn!(node = node.name(), %error, "a node is gone that could not be closed in order");
    }
}

/// Refuses to delete a node that is in use, in QEMU's order of reasons.
fn check_deletable(daemon: &Daemon, node: &Arc<Node>) -> QmpResult<()> {
    let name = node.name();
    // In QEMU a mirror or a commit stands between a filter of the user and what uses it.
    if node.is_filter() && node.copy_before_write().is_none() && node.write_blocking().is_none() {
        daemon.jobs.check_free(node)?;
    }
    let uses = |attachment: &Arc<Attachment>| {
        (attachment.is_export() || attachment.is_writable()) && Arc::ptr_eq(&attachment.node(), node)
    };
    if daemon.graph.attachments().iter().any(uses) {
        return Err(QmpError::generic(format!("Node {name} is in use")));
    }
    // In QEMU a backup is a user of its source, as a filter is.
    let is_source = daemon.jobs.back_up(node);
    if !is_source {
        daemon.jobs.check_free(node)?;
    }
    names::check_no_overlay(daemon, node)?;
    if !daemon.graph.owned_nodes().iter().any(|owned| Arc::ptr_eq(owned, node)) {
        return Err(QmpError::generic(format!("Node {name} is not owned by the monitor")));
    }
    if is_source || !names::parents(daemon, node).is_empty() {
        return Err(QmpError::generic(format!("Block device {name} is in use")));
    }
    Ok(())
}

async fn block_resize(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    let node = names::lookup(&daemon, arguments.maybe_text("device"), arguments.maybe_text("node-name"))?.node();
    daemon.jobs.check_disk_free(&node)?;
    let refused = || QmpError::generic("Parameter 'size' expects a >0 size");
    let size = arguments.number("size").map_err(|_| refused())?.unwrap_or(0);
    check_users(&daemon, &node)?;
    let image = below_filters(&node);
    if size < node.size() {
        check_clients(&daemon, &node)?;
        check_clients(&daemon, &image)?;
        for image in images_below(&node) {
            check_clients(&daemon, &image)?;
        }
    }
    if node.is_sized_in_sectors() && !size.is_multiple_of(512) {
        return Err(QmpError::generic("The new size must be a multiple of 512"));
    }
    // Shrinking takes away a range that a request may be about to write to, and a map may move. Users of the image itself
    // wait, too, not only those of a filter above it.
    let drained = daemon.graph.drain(&[&image]).await;
    let moving = image.moving_blocks();
    let result = node.resize(size, Preallocation::Off).await;
    drop(moving);
    drop(drained);
    result.map_err(|error| match error.kind() {
        ErrorKind::ReadOnly => QmpError::generic("Image is read-only"),
        _ => match error.sentence().strip_prefix("could not change the size: ") {
            Some(rest) => QmpError::generic(format!("Could not resize file: {rest}")),
            None => failed(error),
        },
    })?;
    nothing()
}

/// Refuses another size for a node below another one. An image would lose the targets of its tables, an overlay the
/// data that it reads below. Filters pass the size on, so their own users count.
fn check_users(daemon: &Daemon, node: &Arc<Node>) -> QmpResult<()> {
    for parent in daemon.graph.snapshot().nodes().flat_map(|top| nodes_below(&top)) {
        for child in parent.children().iter().filter(|child| Arc::ptr_eq(&child.node, node)) {
            match child.role {
                ChildRole::Backing => {
                    return Err(QmpError::generic(format!(
                        "Node '{}' is busy: node is used as backing hd of '{}'",
                        node.name(),
                        parent.name()
                    )));
                }
                ChildRole::File | ChildRole::Image if parent.is_filter() => check_users(daemon, &parent)?,
                ChildRole::File if follows_size(daemon, &parent) => {}
                role => {
                    let user =
                        format!("node '{}' (uses node '{}' as '{}' child)", parent.name(), node.name(), role.name());
                    return Err(resize_conflict(node, &user));
                }
            }
        }
    }
    Ok(())
}

/// True for a raw node that is as long as its file, and that nothing uses.
fn follows_size(daemon: &Daemon, node: &Arc<Node>) -> bool {
    let options = node.options();
    node.is_raw()
        && ["offset", "size"].iter().all(|key| options.get(key).is_none())
        && names::parents(daemon, node).is_empty()
        && !daemon.graph.attachments().iter().any(|user| Arc::ptr_eq(&user.node(), node))
}

/// Refuses a smaller size where an export's clients know the larger one.
fn check_clients(daemon: &Daemon, node: &Arc<Node>) -> QmpResult<()> {
    for attachment in daemon.graph.attachments() {
        let below = |node: &Arc<Node>| node.is_filter().then(|| node.child(ChildRole::File)).flatten();
        let mut served = std::iter::successors(Some(attachment.node()), below);
        if served.any(|served| Arc::ptr_eq(&served, node)) {
            let user = format!("an unnamed block device (uses node '{}' as 'root' child)", node.name());
            return Err(resize_conflict(node, &user));
        }
    }
    Ok(())
}

fn resize_conflict(node: &Node, user: &str) -> QmpError {
    let name = node.name();
    QmpError::generic(format!(
        "Permission conflict on node '{name}': permissions 'resize' are both required by an unnamed block device (uses node \
         '{name}' as 'root' child) and unshared by {user}."
    ))
}

async fn blockdev_reopen(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    let mut list = Vec::new();
    for options in arguments.get("options").and_then(Value::as_array).into_iter().flatten() {
        let mut options = options.as_object().cloned().unwrap_or_default();
        // `blockdev-set-active` changes that.
        if options.get("active") == Some(&json!(true)) {
            options.shift_remove("active");
        }
        if !options.contains_key("node-name") {
            return Err(QmpError::generic("node-name not specified"));
        }
        if let Some(name) = options.get("node-name").and_then(Value::as_str) {
            daemon.inactive.check(name)?;
            if let Some(node) = daemon.graph.find(name) {
                daemon.jobs.check_free(&node)?;
            }
        }
        list.push(BlockdevOptions::from_map(options).map_err(failed)?);
    }
    daemon.graph.reopen(list).await.map_err(failed)?;
    nothing()
}

/// Puts a filter between its child and that node's users.
async fn insert(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    let filter = filter_named(&daemon, arguments.text("node-name"))?;
    let below = filter.child(ChildRole::File).ok_or_else(|| QmpError::generic("a filter without a file"))?;
    daemon.jobs.check_free(&below)?;
    daemon.graph.replace(&below, &filter).await.map_err(failed)?;
    nothing()
}

/// Takes a filter out from between a node and its users, and deletes it.
async fn remove(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    let filter = filter_named(&daemon, arguments.text("node-name"))?;
    let filter = daemon.graph.take_filter_out(&filter).await.map_err(failed)?;
    close_last(&daemon, &arguments, &filter).await;
    nothing()
}

/// A filter that the user added and that no job has.
fn filter_named(daemon: &Daemon, name: &str) -> QmpResult<Arc<Node>> {
    let filter = names::node(daemon, name)?;
    if !filter.is_filter() {
        return Err(QmpError::generic(format!("Node '{name}' is not a filter")));
    }
    daemon.jobs.check_free(&filter)?;
    Ok(filter)
}

async fn query_named_block_nodes(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    let flat = arguments.flag("flat", false);
    let mut list = Vec::new();
    for node in newest_first(&daemon) {
        let mut described = describe(&daemon, &node, flat).await?;
        if !daemon.inserted_filters.contains(&node) {
            hide_limits(&mut described);
        }
        list.push(described);
    }
    for job in daemon.jobs.list() {
        let entry = |list: &[Map<String, Value>], name: &str| list.iter().position(|entry| entry["node-name"] == name);
        let filter = job.listed_filter(flat, |below| entry(&list, below.name()).map(|at| list[at].clone()));
        let Some(filter) = filter else { continue };
        for (parent, role) in names::parents(&daemon, &filter.below) {
            let Some(at) = entry(&list, parent.name()) else { continue };
            let children = list[at].get_mut("children").and_then(Value::as_array_mut);
            for child in children.into_iter().flatten().filter(|child| child["child"] == role.name()) {
                child["node-name"] = json!(filter.name);
            }
        }
        list.insert(0, filter.entry);
    }
    let mut list: Vec<Value> = list.into_iter().map(Value::Object).collect();
    list.extend(daemon.inactive.described());
    Ok(Value::Array(list))
}

/// As in QEMU a node of the user shows no limits: those of a disk are in `query-block`.
fn hide_limits(described: &mut Map<String, Value>) {
    described.shift_remove("group");
    for name in Limits::qmp_names() {
        match described.get_mut(&name) {
            Some(value) if !name.contains("_max") && name != "iops_size" => *value = json!(0),
            _ => drop(described.shift_remove(&name)),
        }
    }
}

/// All nodes, the newest first, as in QEMU: there the files that an image names are opened behind the image.
pub(super) fn newest_first(daemon: &Daemon) -> Vec<Arc<Node>> {
    fn is_in(list: &[Arc<Node>], node: &Arc<Node>) -> bool {
        list.iter().any(|one| Arc::ptr_eq(one, node))
    }
    /// An image and the files that store it, which come first.
    fn with_files(image: Arc<Node>, owned: &[Arc<Node>]) -> Vec<Arc<Node>> {
        let file_of = |node: &Arc<Node>| node.child(ChildRole::File).filter(|file| !is_in(owned, file));
        let mut files: Vec<Arc<Node>> = std::iter::successors(Some(image), file_of).collect();
        files.reverse();
        files
    }
    /// The nodes of the files that an image names, in the order in which QEMU opens them.
    fn named_by(node: &Arc<Node>, owned: &[Arc<Node>]) -> Vec<Arc<Node>> {
        let parts = node.children().into_iter();
        let is_late = |role: ChildRole| {
            use ChildRole::{DataFile, Extent, Image, Log, Raw, Replica, Target, Test};
            matches!(role, DataFile | Extent(_) | Image | Log | Raw | Replica(_) | Target | Test)
        };
        let parts = parts.filter(|child| is_late(child.role)).map(|child| child.node);
        let named = parts.chain(node.backing()).filter(|named| !is_in(owned, named));
        named.flat_map(|named| with_files(named, owned)).collect()
    }
    fn add(node: &Arc<Node>, owned: &[Arc<Node>], found: &mut Vec<Arc<Node>>) {
        if is_in(found, node) {
            return;
        }
        found.push(Arc::clone(node));
        named_by(node, owned).iter().for_each(|below| add(below, owned, found));
    }
    let owned = daemon.graph.owned_nodes();
    let mut nodes: Vec<Arc<Node>> = daemon.graph.snapshot().nodes().collect();
    nodes.sort_by_key(|node| node.number());
    let named: Vec<Arc<Node>> = nodes.iter().flat_map(|node| named_by(node, &owned)).collect();
    let mut found = Vec::new();
    for node in &nodes {
        let comes_with_overlay = !is_in(&owned, node) && is_in(&named, node);
        if !comes_with_overlay {
            add(node, &owned, &mut found);
        }
    }
    nodes.iter().for_each(|node| add(node, &owned, &mut found));
    found.reverse();
    found
}

/// The next node of a chain: the one below a filter, or the backing file.
fn next_below(node: &Arc<Node>) -> Option<Arc<Node>> {
    let trusted = [ChildRole::Image, ChildRole::Raw].into_iter().find_map(|role| node.child(role));
    match trusted {
        None if node.is_filter() => node.child(ChildRole::File),
        None => node.backing(),
        Some(trusted) => Some(trusted),
    }
}

/// A `BlockDeviceInfo`. `flat`: without the images below.
pub(super) async fn describe(daemon: &Daemon, node: &Arc<Node>, flat: bool) -> QmpResult<Map<String, Value>> {
    let image = image_in_time(node).await?;
    let depth = match flat {
        true => 0,
        false => std::iter::successors(next_below(node), next_below).count(),
    };
    let mut children = node.children();
    // As in QEMU the child linked last comes first: the backing file, which may be another one than at first.
    children.reverse();
    children.sort_by_key(|child| child.role != ChildRole::Backing);
    let children: Vec<Value> =
        children.iter().map(|child| json!({"child": child.role.name(), "node-name": child.node.name()})).collect();
    let cache = cache_of(daemon, node);
    let mut info = json!({
        "file": node.reference(), "node-name": node.name(), "ro": node.is_read_only(), "drv": node.driver_name(),
        "backing_file_depth": depth, "children": children, "active": true,
        "encrypted": image["encrypted"].as_bool().unwrap_or(false),
        "detect_zeroes": node.options().text("detect-zeroes").unwrap_or("off"),
        "bps": 0, "bps_rd": 0, "bps_wr": 0, "iops": 0, "iops_rd": 0, "iops_wr": 0,
        "cache": {"writeback": !node.is_writethrough(), "direct": cache.direct, "no-flush": cache.no_flush},
    });
    // Bitmaps that can't be read now are left out.
    let asked = Arc::clone(node);
    let bitmaps = async move { super::bitmaps::list(&asked).await };
    let bitmaps = in_time(node, Question::Bitmaps, bitmaps).await.unwrap_or_default();
    if !bitmaps.is_empty() {
        info["dirty-bitmaps"] = Value::Array(bitmaps);
    }
    if let Some(throttle) = node.throttle() {
        let (group, limits) = (throttle.group(), throttle.group().limits());
        if !group.name().is_empty() {
            info["group"] = json!(group.name());
        }
        for name in Limits::qmp_names() {
            let value = limits.get(&name).unwrap_or_default();
            // Bursts are reported where there are any, as in QEMU.
            if value > 0 && (!name.ends_with("_length") || value > 1) {
                info[name] = json!(value);
            }
        }
    }
    if let Some(backing) = node.backing() {
        info["backing_file"] = json!(backing.reference());
    }
    // As in QEMU, whose numbers have a sign here.
    info["write_threshold"] = json!(node.write_threshold().cast_signed());
    info["image"] = image;
    if !flat {
        let mut below = next_below(node);
        let mut images = Vec::new();
        while let Some(node) = below {
            images.push(image_in_time(&node).await?);
            below = next_below(&node);
        }
        // Each image holds the one below it.
        let nested = images.into_iter().rev().reduce(|inner, mut outer| {
            outer["backing-image"] = inner;
            outer
        });
        if let Some(nested) = nested {
            info["image"]["backing-image"] = nested;
        }
    }
    match info {
        Value::Object(map) => Ok(map),
        _ => Err(QmpError::generic("a node's description is no object")),
    }
}

/// The time that the disk of a node may take to answer a question about it.
const ANSWER_LIMIT: Duration = Duration::from_secs(1);

/// A question about a node that may take long.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Question {
    Image,
    Bitmaps,
}

/// The pause between looks for the end of a question.
const LOOK: Duration = Duration::from_millis(5);

thread_local! {
    /// The questions whose answers are looked for now, with the numbers of the nodes.
    static ASKED: RefCell<HashSet<(u64, Question)>> = RefCell::default();
}

/// A question that has its turn. No other one of its kind to that node begins before this is dropped.
struct Asking(u64, Question);

impl Asking {
    async fn begin(node: u64, question: Question) -> Asking {
        while !ASKED.with_borrow_mut(|asked| asked.insert((node, question))) {
            rt::sleep(LOOK).await;
        }
        Asking(node, question)
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        let Asking(node, question) = *self;
        ASKED.with_borrow_mut(|asked| asked.remove(&(node, question)));
    }
}

/// The answer to a question about a node; `None` where it takes too long. It is looked for until it is found all the same.
/// The same question waits for that, so a slow node works on one at a time.
async fn in_time<T: 'static>(
    node: &Arc<Node>,
    question: Question,
    answer: impl Future<Output = T> + 'static,
) -> Option<T> {
    let in_turn = async {
        let asking = Asking::begin(node.number(), question).await;
        let found = rt::spawn(async move {
            let found = answer.await;
            drop(asking);
            found
        });
        found.await
    };
    within(ANSWER_LIMIT, in_turn).await
}

/// As [`image_of`]; for a disk that doesn't answer, the facts known without it.
async fn image_in_time(node: &Arc<Node>) -> QmpResult<Value> {
    let asked = Arc::clone(node);
    match in_time(node, Question::Image, async move { image_of(&asked).await }).await {
        Some(Ok(image)) => return Ok(image),
        // One image that can't be read hides no other node.
        Some(Err(error)) => tracing::warn!(node = node.name(), %error, "could not describe the image"),
        None => {}
    }
    Ok(json!({"filename": node.reference(), "format": node.driver_name(), "virtual-size": node.size(),
              "dirty-flag": false}))
}

/// The use of the host's page cache, as a node's options say it, or those of the node that it is described with.
fn cache_of(daemon: &Daemon, node: &Arc<Node>) -> CacheMode {
    // A file has keys of its own and those of the node that it is described with.
    if let Some(file) = node.file().filter(|_| node.is_on_host()) {
        return file.cache_mode();
    }
    if let Some(said) = node.options().get("cache") {
        let flag = |key: &str| said.get(key).and_then(Value::as_bool) == Some(true);
        return CacheMode { direct: flag("direct"), no_flush: flag("no-flush") };
    }
    let describes = |parent: &&(Arc<Node>, ChildRole)| parent.0.options().text(parent.1.as_str()).is_none();
    let is_owned = daemon.graph.owned_nodes().iter().any(|owned| Arc::ptr_eq(owned, node));
    let parents = if is_owned { Vec::new() } else { names::parents(daemon, node) };
    if let Some((parent, _)) = parents.iter().find(describes) {
        return cache_of(daemon, parent);
    }
    // A file that has its own options says nothing about the node above it.
    let is_apart = |file: Arc<Node>| {
        node.options().text(ChildRole::File.as_str()).is_some() || file.options().get("cache").is_some()
    };
    match node.child(ChildRole::File).is_some_and(is_apart) {
        true => CacheMode::default(),
        false => cache_of_file(node),
    }
}

/// The use of the host's page cache by the file that stores a node.
fn cache_of_file(node: &Arc<Node>) -> CacheMode {
    let mut below = std::iter::successors(Some(Arc::clone(node)), |node| node.child(ChildRole::File));
    below.find_map(|node| node.file().map(File::cache_mode)).unwrap_or_default()
}

/// An `ImageInfo`.
async fn image_of(node: &Node) -> QmpResult<Value> {
    let info = cowshed_jobs::info::image_info(node).await.map_err(failed)?;
    let mut value = serde_json::to_value(info).map_err(|error| QmpError::generic(error.to_string()))?;
    if let Some(map) = value.as_object_mut() {
        // Nodes are listed with their children already.
        map.shift_remove("children");
        let limits = serde_json::to_value(BlockLimits::of(node));
        map.insert("limits".to_owned(), limits.map_err(|error| QmpError::generic(error.to_string()))?);
    }
    Ok(value)
}
