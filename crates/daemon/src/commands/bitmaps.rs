// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Dirty bitmaps of nodes.

use super::names;
use super::snapshot::{Action, carry_out};
use super::{Arguments, Group, change};
use crate::state::Daemon;
use cowshed_image::graph::Graph;
use cowshed_image::node::BitmapChange;
use cowshed_image::node::{NodeBitmap, SavedBitmap};
use cowshed_image::{DirtyBits, Node};
use cowshed_qmp::{QmpError, QmpResult};
use cowshed_types::{Error, ErrorKind};
use serde_json::{Value, json};
use std::rc::Rc;
use std::sync::Arc;

pub(super) const GROUP: Group = Group {
    schema: "
object BlockDirtyBitmap: node: str, name: str
object BlockDirtyBitmapAdd: node: str, name: str, granularity?: uint32, persistent?: bool, disabled?: bool
alternate BlockDirtyBitmapOrStr: str, BlockDirtyBitmap
object BlockDirtyBitmapMerge: node: str, target: str, bitmaps: [BlockDirtyBitmapOrStr]
object BlockDirtyBitmapWrapper: data: BlockDirtyBitmap
object BlockDirtyBitmapAddWrapper: data: BlockDirtyBitmapAdd
object BlockDirtyBitmapMergeWrapper: data: BlockDirtyBitmapMerge
object BlockDirtyInfo: name?: str, count: int, granularity: int, recording: bool, busy: bool, persistent: bool
  , inconsistent?: bool
command block-dirty-bitmap-add(BlockDirtyBitmapAdd)
command block-dirty-bitmap-remove(BlockDirtyBitmap)
command block-dirty-bitmap-clear(BlockDirtyBitmap)
command block-dirty-bitmap-enable(BlockDirtyBitmap)
command block-dirty-bitmap-disable(BlockDirtyBitmap)
command block-dirty-bitmap-merge(BlockDirtyBitmapMerge)
",
    commands: &[
        change!("block-dirty-bitmap-add", add),
        change!("block-dirty-bitmap-remove", remove),
        change!("block-dirty-bitmap-clear", clear),
        change!("block-dirty-bitmap-enable", enable),
        change!("block-dirty-bitmap-disable", disable),
        change!("block-dirty-bitmap-merge", merge),
    ],
};

/// The actions of a transaction that are ours.
pub(super) const ACTIONS: [&str; 6] = [
    "block-dirty-bitmap-add",
    "block-dirty-bitmap-remove",
    "block-dirty-bitmap-clear",
    "block-dirty-bitmap-enable",
    "block-dirty-bitmap-disable",
    "block-dirty-bitmap-merge",
];

/// A change of a bitmap.
enum What {
    Change {
        change: BitmapChange,
        persistent: bool,
    },
    /// Bitmaps, each of a node.
    Merge(Vec<(Arc<Node>, String)>),
}

/// A change of one bitmap that is ready to be carried out.
pub(super) struct BitmapAction {
    node: Arc<Node>,
    name: String,
    what: What,
}

/// A change of a bitmap that has been made.
pub(super) struct BitmapChanged {
    node: Arc<Node>,
    saved: SavedBitmap,
}

async fn add(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    run(&daemon, "block-dirty-bitmap-add", &arguments).await
}

async fn remove(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    run(&daemon, "block-dirty-bitmap-remove", &arguments).await
}

async fn clear(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    run(&daemon, "block-dirty-bitmap-clear", &arguments).await
}

async fn enable(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    run(&daemon, "block-dirty-bitmap-enable", &arguments).await
}

async fn disable(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    run(&daemon, "block-dirty-bitmap-disable", &arguments).await
}

async fn merge(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    run(&daemon, "block-dirty-bitmap-merge", &arguments).await
}

async fn run(daemon: &Rc<Daemon>, kind: &str, arguments: &Arguments) -> QmpResult<Value> {
    let action = prepare(daemon, kind, arguments)?;
    // Only in a transaction an image takes a new bitmap behind its snapshot, as in QEMU.
    if arguments.flag("persistent", false) && action.node.is_read_only() {
        return Err(unwritable(arguments.text("node")));
    }
    carry_out(daemon, vec![Action::Bitmap(action)]).await
}

/// QEMU's words, which don't name the file.
fn worded(error: Error) -> QmpError {
    // A disk's error has its place and its reason.
    match error.kind() {
        ErrorKind::NoSpace | ErrorKind::Io | ErrorKind::Poisoned => QmpError::generic(error.to_string()),
        _ => QmpError::generic(error.sentence()),
    }
}

pub(super) fn node_of(daemon: &Daemon, name: &str) -> QmpResult<Arc<Node>> {
    daemon.inactive.check(name)?;
    let not_found = |_| QmpError::generic(format!("Node '{name}' not found"));
    names::lookup(daemon, None, Some(name)).map(|found| found.image()).map_err(not_found)
}

/// The node that is to get a bitmap.
fn node_for_new(daemon: &Daemon, arguments: &Arguments) -> QmpResult<Arc<Node>> {
    let (name, persistent) = (arguments.text("node"), arguments.flag("persistent", false));
    if arguments.text("name").is_empty() {
        return Err(QmpError::generic("Bitmap name cannot be empty"));
    }
    daemon.inactive.check(name)?;
    let not_found = |_| QmpError::generic(format!("Cannot find device='{name}' nor node-name='{name}'"));
    let found = names::lookup(daemon, None, Some(name)).map_err(not_found)?;
    // As in QEMU this comes before all that a persistent bitmap needs.
    if arguments.number("granularity")?.is_some_and(|bytes| bytes < 512 || !bytes.is_power_of_two()) {
        return Err(QmpError::generic("Granularity must be power of 2 and at least 512"));
    }
    if persistent && found.node().changeable_bitmaps().is_none() {
        let message = format!("Can't store persistent bitmaps to {name}: Operation not supported");
        return Err(QmpError::generic(message));
    }
    if persistent && !found.node().bitmaps_may_change() {
        return Err(unwritable(name));
    }
    Ok(found.image())
}

fn unwritable(node: &str) -> QmpError {
    QmpError::generic(format!("Cannot add a persistent bitmap to read-only or inactive node '{node}'"))
}

/// Refuses a name that an image has no room for, in QEMU's words.
fn check_stored_name(node: &str, name: &str) -> QmpResult<()> {
    const MOST: usize = 1023;
    if name.len() <= MOST {
        return Ok(());
    }
    let reason = format!("Name length exceeds maximum ({MOST} characters)");
    Err(QmpError::generic(format!("Can't make bitmap '{name}' persistent in '{node}': {reason}")))
}

/// An action from the arguments of the command of the same name.
pub(super) fn prepare(daemon: &Daemon, kind: &str, arguments: &Arguments) -> QmpResult<BitmapAction> {
    let node = match kind {
        "block-dirty-bitmap-add" => {
            let node = node_for_new(daemon, arguments)?;
            if arguments.flag("persistent", false) {
                check_stored_name(arguments.text("node"), arguments.text("name"))?;
            }
            node
        }
        _ => node_of(daemon, arguments.text("node"))?,
    };
    let name = arguments.maybe_text("name").unwrap_or(arguments.text("target")).to_owned();
    let of = |change: fn(String) -> BitmapChange| What::Change { change: change(name.clone()), persistent: false };
    let what = match kind {
        "block-dirty-bitmap-add" => What::Change {
            change: BitmapChange::Add {
                name: name.clone(),
                granularity_bytes: arguments.number("granularity")?,
                enabled: !arguments.flag("disabled", false),
            },
            persistent: arguments.flag("persistent", false),
        },
        "block-dirty-bitmap-remove" => of(BitmapChange::Remove),
        "block-dirty-bitmap-clear" => of(BitmapChange::Clear),
        "block-dirty-bitmap-enable" => of(BitmapChange::Enable),
        "block-dirty-bitmap-disable" => of(BitmapChange::Disable),
        _ => What::Merge(sources(daemon, &node, arguments)?),
    };
    Ok(BitmapAction { node, name, what })
}

fn sources(daemon: &Daemon, node: &Arc<Node>, arguments: &Arguments) -> QmpResult<Vec<(Arc<Node>, String)>> {
    let given = arguments.get("bitmaps").and_then(Value::as_array).into_iter().flatten();
    given.map(|one| named(daemon, node, one)).collect()
}

/// A bitmap of `node` by its name, or of another node.
fn named(daemon: &Daemon, node: &Arc<Node>, given: &Value) -> QmpResult<(Arc<Node>, String)> {
    let text = |key: &str| given.get(key).and_then(Value::as_str).unwrap_or_default();
    match given.as_str() {
        Some(name) => Ok((Arc::clone(node), name.to_owned())),
        None => Ok((node_of(daemon, text("node"))?, text("name").to_owned())),
    }
}

/// The bitmaps that an export is to offer, by name, and with their nodes where those were named.
pub(super) fn of_export(daemon: &Daemon, arguments: &Arguments) -> QmpResult<Vec<(Option<Arc<Node>>, String)>> {
    let given = arguments.get("bitmaps").and_then(Value::as_array).into_iter().flatten();
    let one = |given: &Value| match given.as_str() {
        Some(name) => Ok((None, name.to_owned())),
        None => {
            let text = |key: &str| given.get(key).and_then(Value::as_str).unwrap_or_default();
            Ok((Some(node_of(daemon, text("node"))?), text("name").to_owned()))
        }
    };
    given.map(one).collect()
}

/// The bitmaps that actions of a transaction have removed. As in QEMU their names stay taken until its end.
#[derive(Default)]
pub(super) struct Removed(Vec<(Arc<Node>, String)>);

impl Removed {
    fn has(&self, node: &Arc<Node>, name: &str) -> bool {
        self.0.iter().any(|(known, removed)| Arc::ptr_eq(known, node) && removed == name)
    }

    /// Refuses a use of a bitmap that is removed.
    pub fn check_use(&self, node: &Arc<Node>, name: &str) -> QmpResult<()> {
        match self.has(node, name) {
            false => Ok(()),
            true => Err(QmpError::generic(format!(
                "Bitmap '{name}' is currently in use by another operation and cannot be used"
            ))),
        }
    }

    /// Refuses an action on a bitmap that is removed, and notes one that removes.
    pub fn pass(&mut self, action: &BitmapAction) -> QmpResult<()> {
        let BitmapAction { node, name, what } = action;
        match what {
            What::Change { change: BitmapChange::Add { .. }, .. } if self.has(node, name) => {
                return Err(QmpError::generic(format!("Bitmap already exists: {name}")));
            }
            What::Change { change: BitmapChange::Remove(_), .. } => {
                self.check_use(node, name)?;
                self.0.push((Arc::clone(node), name.clone()));
            }
            What::Change { .. } => self.check_use(node, name)?,
            What::Merge(sources) => {
                self.check_use(node, name)?;
                sources.iter().try_for_each(|(node, name)| self.check_use(node, name))?;
            }
        }
        Ok(())
    }
}

impl BitmapAction {
    pub fn node(&self) -> &Arc<Node> {
        &self.node
    }

    /// True where it changes the image's stored data: it is durable once it is done.
    pub async fn is_stored(&self) -> bool {
        if matches!(&self.what, What::Change { persistent: true, .. }) {
            return true;
        }
        let bitmaps = self.node.bitmaps().await.unwrap_or_default();
        bitmaps.iter().any(|bitmap| bitmap.name == self.name && bitmap.persistent)
    }

    /// Carries it out, or leaves everything as it was. No request runs.
    pub async fn run(self, graph: &Arc<Graph>) -> QmpResult<BitmapChanged> {
        if matches!(&self.what, What::Change { change: BitmapChange::Remove(_), .. }) {
            let bitmaps = self.node.bitmaps().await.map_err(worded)?;
            if !bitmaps.iter().any(|bitmap| bitmap.name == self.name) {
                return Err(QmpError::generic(format!("Dirty bitmap '{}' not found", self.name)));
            }
        }
        let saved = self.node.save_bitmap(&self.name).await.map_err(worded)?;
        match self.what {
            What::Change { change, persistent } => {
                graph.change_bitmap(&self.node, &change, persistent).await.map_err(worded)?;
            }
            What::Merge(sources) => {
                self.node.check_bitmap(&self.name).await.map_err(worded)?;
                let mut all: Option<Arc<DirtyBits>> = None;
                for (node, name) in sources {
                    node.check_bitmap(&name).await.map_err(worded)?;
                    let bits = node.bitmap_bits(&name).await.map_err(worded)?;
                    match &mut all {
                        Some(all) if all.granularity_bytes() <= bits.granularity_bytes() => {
                            Arc::make_mut(all).merge(&bits).map_err(worded)?;
                        }
                        Some(all) => {
                            let coarser = std::mem::replace(all, bits);
                            Arc::make_mut(all).merge(&coarser).map_err(worded)?;
                        }
                        None => all = Some(bits),
                    }
                }
                if let Some(source) = all {
                    let change = BitmapChange::Merge { target: self.name, source };
                    graph.change_bitmap(&self.node, &change, false).await.map_err(worded)?;
                }
            }
        }
        Ok(BitmapChanged { node: self.node, saved })
    }
}

impl BitmapChanged {
    /// As if it had not been done. No request runs.
    pub async fn roll_back(self, graph: &Arc<Graph>) {
        if let Err(error) = graph.restore_bitmap(&self.node, &self.saved).await {
            tracing::error!(%error, node = self.node.name(), "could not take a change of a bitmap back");
        }
    }
}

/// The `dirty-bitmaps` of a node; nothing for one that can't be read.
pub(super) async fn list(node: &Node) -> Vec<Value> {
    let bitmaps = node.bitmaps_newest_first().await.unwrap_or_else(|error| {
        tracing::warn!(%error, node = node.name(), "could not read the bitmaps");
        Vec::new()
    });
    bitmaps.into_iter().map(info).collect()
}

fn info(bitmap: NodeBitmap) -> Value {
    let mut info = json!({
        "name": bitmap.name, "count": bitmap.dirty_bytes, "granularity": bitmap.granularity_bytes,
        "recording": bitmap.recording, "busy": bitmap.busy, "persistent": bitmap.persistent,
    });
    if bitmap.inconsistent {
        info["inconsistent"] = json!(true);
    }
    info
}
