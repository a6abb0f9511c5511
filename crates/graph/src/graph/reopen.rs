// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reopening: nodes get other options while they are in use, all of them or none.
//!
//! First every node is prepared: options are checked, files opened for writing, locks taken, images made complete on
//! disk, whatever can fail. Then all is committed, or the preparation is taken back. The nodes are drained meanwhile.

use super::Graph;
use super::owned::no_such_node;
use super::transaction::Transaction;
use super::writing::{check_becomes_writable, not_reopened};
use crate::node::{Apply, ChildRole, DetectZeroes, LiveOptions, Node, detect_zeroes, nodes_below};
use crate::options::{self, BlockdevOptions};
use cowshed_storage::{CacheMode, rt};
use cowshed_types::{Error, ErrorKind, Result};
use serde_json::{Map, Value, json};
use std::cmp::Reverse;
use std::sync::Arc;

/// Options of any node that a reopen changes.
const COMMON: &[&str] = &["read-only", "auto-read-only", "discard", "detect-zeroes", "cache"];

/// Those that it also changes in a child that is described with the node.
const OF_CHILDREN: &[&str] = &["discard", "detect-zeroes", "cache"];

/// One node with its new options, checked.
struct Plan {
    node: Arc<Node>,
    options: BlockdevOptions,
    read_only: bool,
    discard: bool,
    detect_zeroes: DetectZeroes,
    /// Applies the options of the driver.
    apply: Option<Apply>,
    /// Files whose use of the page cache changes: the node itself, or files that are described with it.
    caches: Vec<(Arc<Node>, CacheMode)>,
    backing: Backing,
    /// The new child of this filter, where that changes.
    file: Option<Arc<Node>>,
}

enum Backing {
    Keep,
    None,
    Node(Arc<Node>),
}

impl Graph {
    /// Gives nodes other options (`blockdev-reopen`): each of `list` names its node and has the options that the node
    /// is to have from now on. An option that is left out goes back to its default, but for children, `backing` and
    /// `discard`, which stay. An option that can't change is refused by name. Either all nodes are reopened or none. A
    /// future that is dropped while it waits for requests changes nothing; later, the nodes are reopened all the same.
    pub async fn reopen(self: &Arc<Self>, list: Vec<BlockdevOptions>) -> Result<()> {
        let one_change = self.changing_named(&list.iter().flat_map(BlockdevOptions::texts).collect::<Vec<_>>()).await;
        let mut plans = Vec::with_capacity(list.len());
        for options in list {
            self.plan_with_children(options, None, &mut plans)?;
        }
        let nodes: Vec<&Arc<Node>> = plans.iter().map(|plan| &plan.node).collect();
        let drained = self.drain(&nodes).await;
        let graph = Arc::clone(self);
        rt::to_completion(async move {
            let _held = (drained, one_change);
            graph.reopen_drained(plans).await
        })
        .await
    }

    /// See [`Graph::reopen`]. No request runs.
    async fn reopen_drained(&self, plans: Vec<Plan>) -> Result<()> {
        let mut change = Transaction::default();
        let prepared = self.prepare_all(&plans, &mut change).await;
        let left = change.end(self, prepared).await?;
        for plan in plans {
            plan.node.apply(plan.options, plan.discard, plan.detect_zeroes, plan.apply);
        }
        for old in left.into_iter().filter(|old| old.is_unused()) {
            old.close().await?;
        }
        Ok(())
    }

    /// All that can be refused; the children that were left.
    async fn prepare_all(&self, plans: &[Plan], change: &mut Transaction) -> Result<Vec<Arc<Node>>> {
        for plan in in_order(plans) {
            self.prepare(plan, change).await?;
        }
        // Children come last among the possible refusals.
        let mut left = Vec::new();
        for plan in plans {
            match (&plan.backing, &plan.file) {
                (Backing::Keep, None) => {}
                (Backing::Keep, Some(file)) => left.push(self.set_filter_child(&plan.node, file, change)?),
                (backing, _) => {
                    let wanted = if let Backing::Node(node) = backing { Some(node) } else { None };
                    plan.node.check_backing(wanted).await?;
                    left.extend(plan.node.backing());
                    self.set_backing_drained(&plan.node, wanted, change)?;
                    plan.node.note_backing().await?;
                }
            }
        }
        Ok(left)
    }

    /// Plans for a node and for its children whose descriptions change. `above`: the use of the page cache that a child has of the node
    /// above, key by key. It isn't an option of the child's own, and the plan of the node above changes it.
    fn plan_with_children(
        &self,
        mut options: BlockdevOptions,
        above: Option<CacheMode>,
        plans: &mut Vec<Plan>,
    ) -> Result<()> {
        let own = options.get("cache").cloned();
        if let Some(above) = above {
            let CacheMode { direct, no_flush } = with_own(above, own.as_ref());
            options.insert("cache", json!({"direct": direct, "no-flush": no_flush}));
        }
        let mut plan = self.plan_reopen(options)?;
        let mode = with_own(CacheMode::default(), plan.options.get("cache"));
        let (node, old) = (Arc::clone(&plan.node), plan.node.options());
        let mut changed = Vec::new();
        for child in node.children() {
            let key = child.role.as_str();
            let (Some(Value::Object(before)), Some(Value::Object(now))) = (old.get(key), plan.options.get(key)) else {
                continue;
            };
            if before == now || is_same_child(&node, key, plan.options.get(key)) {
                continue;
            }
            let mut now = now.clone();
            now.insert("node-name".to_owned(), child.node.name().into());
            now.entry("read-only").or_insert_with(|| child.node.is_read_only().into());
            changed.push(BlockdevOptions::from_map(now)?);
        }
        if above.is_some() {
            plan.caches.clear();
            match own {
                Some(own) => plan.options.insert("cache", own),
                None => drop(plan.options.remove("cache")),
            }
        }
        plans.push(plan);
        changed.into_iter().try_for_each(|child| self.plan_with_children(child, Some(mode), plans))
    }

    /// Checks the options of one node against its present state.
    fn plan_reopen(&self, mut options: BlockdevOptions) -> Result<Plan> {
        let Some(name) = options.text("node-name").map(str::to_owned) else {
            return Err(Error::invalid_argument("'node-name' must be specified to reopen a node"));
        };
        let node = self.find(&name).ok_or_else(|| no_such_node(&name))?;
        let old = node.options();
        let driver = node.driver_name();
        let schema = self.schemas().schema(driver).ok_or_else(|| Error::internal("a node without a driver"))?;
        if options.text("driver").is_some_and(|wanted| wanted != driver) {
            let live = node.driver().live_options().map(LiveOptions::keys).unwrap_or_default();
            let can_go = |key: &str| live.contains(&key) && !schema.requires(key);
            let stays = |key: &str| stays_by_itself(key) || is_child(key) || can_go(key);
            let is_lost = |key: &&String| !stays(key) && options.get(key).is_none();
            let lost = old.iter().map(|(key, _)| key).find(is_lost);
            return Err(lost.map_or_else(|| cannot_change("driver"), |key| cannot_reset(key)));
        }
        if self.schemas().stays_read_only(driver) {
            // As in QEMU.
            return Err(not_reopened(&node));
        }
        options.insert("driver", driver);
        let describes_file = matches!(options.get(ChildRole::File.as_str()), Some(Value::Object(_)));
        for (key, value) in old.iter() {
            // Children without an option stay. A backing file must be named.
            if is_child(key) && key != ChildRole::Backing.as_str() && options.get(key).is_none() {
                options.insert(key.clone(), value.clone());
            }
        }
        let backing = self.wanted_backing(&node, &options)?;
        let file = self.wanted_file(&node, &options)?;
        schema.check(&mut options, "")?;
        check_unchanged(&node, &old, &options)?;
        let read_only = options.flag("read-only").unwrap_or(false);
        if options.get("read-only").is_none() && !describes_file && node.is_read_only() && stays_read_only(&node) {
            return Err(Error::new(ErrorKind::ReadOnly, "Block node is read-only"));
        }
        let discard = match options.text("discard") {
            Some(word) => matches!(word, "unmap" | "on"),
            // As in QEMU it stays as it is, other than `detect-zeroes` and `cache`.
            None => node.discards(),
        };
        let detect_zeroes = detect_zeroes(&options, discard, "")?;
        let live = node.driver().live_options();
        let apply = live.map(|live| live.check(&node, &options, discard)).transpose()?;
        // As in QEMU all other errors come first.
        let has_backing =
            node.backing().is_some() || node.backing_name().is_some_and(|backing| backing.name().is_some());
        if has_backing && options.get(ChildRole::Backing.as_str()).is_none() {
            return Err(Error::invalid_argument(format!("backing is missing for '{}'", node.name())));
        }
        let caches = self.changed_caches(&node, &old, &options);
        for (file, _) in caches.iter().filter(|(_, mode)| !mode.direct) {
            // A file that can't be opened isn't reopened either.
            options::check_aio(&file.options(), false).map_err(|error| error.file(file.filename()))?;
        }
        Ok(Plan { node, options, read_only, discard, detect_zeroes, apply, caches, backing, file })
    }

    /// The files that a node's options give another use of the page cache.
    fn changed_caches(
        &self,
        node: &Arc<Node>,
        old: &BlockdevOptions,
        new: &BlockdevOptions,
    ) -> Vec<(Arc<Node>, CacheMode)> {
        let differs =
            |(file, mode): &(Arc<Node>, CacheMode)| file.file().is_some_and(|file| file.cache_mode() != *mode);
        let before = files_of(node, old, CacheMode::default());
        let mut files = files_of(node, new, CacheMode::default());
        let is_child = |node: &Arc<Node>| {
            let has_it = |parent: &Arc<Node>| parent.children().iter().any(|child| Arc::ptr_eq(&child.node, node));
            self.snapshot().nodes().into_iter().any(|parent| has_it(&parent))
        };
        files.retain(|file| match Arc::ptr_eq(&file.0, node) && is_child(node) {
            // It may have the use of the node above.
            true => differs(file),
            false => !before.iter().any(|known| Arc::ptr_eq(&known.0, &file.0) && known.1 == file.1),
        });
        // A child that was described once takes the keys over that are given, where it has none of its own. The others stay.
        let owned = self.owned_nodes();
        for child in node.children().into_iter().filter(|child| child.role != ChildRole::Backing) {
            let is_owned = owned.iter().any(|owned| Arc::ptr_eq(owned, &child.node));
            if let (Some(Value::String(_)), Some(file), false) =
                (new.get(child.role.as_str()), child.node.file().filter(|_| child.node.is_on_host()), is_owned)
            {
                let mode = with_own(file.cache_mode(), new.get("cache"));
                let mode = with_own(mode, child.node.options().get("cache"));
                files.extend(Some((Arc::clone(&child.node), mode)).filter(differs));
            }
        }
        files
    }

    fn wanted_backing(&self, node: &Arc<Node>, options: &BlockdevOptions) -> Result<Backing> {
        if !node.takes_backing() {
            return Ok(Backing::Keep);
        }
        match options.get("backing") {
            None => Ok(Backing::Keep),
            Some(Value::Null) => Ok(Backing::None),
            Some(Value::String(name)) => Ok(Backing::Node(self.find(name).ok_or_else(|| no_such_child(name))?)),
            // By its options, as it was when the node was added.
            Some(other) if node.options().get("backing") == Some(other) => Ok(Backing::Keep),
            Some(_) => Err(cannot_change("backing")),
        }
    }

    /// The node that a filter is to get below it, when the options name another one than its present child. The saved
    /// data belong to one disk, so copy-before-write stays where it is.
    fn wanted_file(&self, node: &Arc<Node>, options: &BlockdevOptions) -> Result<Option<Arc<Node>>> {
        let Some(Value::String(name)) = options.get(ChildRole::File.as_str()) else { return Ok(None) };
        if node.child(ChildRole::File).is_some_and(|child| child.name() == name) {
            return Ok(None);
        }
        let found = self.find(name).ok_or_else(|| no_such_child(name))?;
        Ok(node.driver().moves_freely().then_some(found))
    }

    /// Takes the steps that can fail for reasons outside of this process.
    async fn prepare(&self, plan: &Plan, change: &mut Transaction) -> Result<()> {
        plan.node.complete().await?;
        if let Some(live) = plan.node.driver().live_options() {
            change.preparing(&plan.node);
            live.prepare(&plan.options, plan.discard).await?;
        }
        for (node, mode) in &plan.caches {
            if let Some(file) = node.file() {
                change.set_cache_mode(file, *mode)?;
            }
        }
        match (plan.node.is_read_only(), plan.read_only) {
            (false, true) if plan.node.has_writer() => {
                let message = format!("Read-only block node '{}' cannot support read-write users", plan.node.name());
                Err(Error::new(ErrorKind::Busy, message))
            }
            (false, true) => self.make_read_only(&plan.node, change).await,
            (true, false) => {
                check_becomes_writable(&plan.node)?;
                self.make_writable(&plan.node, change).await
            }
            _ => Ok(()),
        }
    }
}

/// The plans in the order in which they can be carried out. A node that becomes writable comes before the nodes above it, and
/// one that becomes read-only behind them.
fn in_order(plans: &[Plan]) -> Vec<&Plan> {
    let mut ordered: Vec<&Plan> = plans.iter().collect();
    let above = |plan: &Plan| plans.iter().filter(|other| is_below(&plan.node, &other.node)).count();
    ordered.sort_by_cached_key(|plan| match plan.read_only {
        false => (false, Reverse(above(plan))),
        true => (true, Reverse(plans.len() - above(plan))),
    });
    ordered
}

/// True where `node` stores a part of `above`, or is itself stored in a node that does.
fn is_below(node: &Arc<Node>, above: &Arc<Node>) -> bool {
    nodes_below(above).iter().any(|below| Arc::ptr_eq(below, node))
}

/// The use of the page cache by the option `own`, whose missing keys are those of `above`.
fn with_own(above: CacheMode, own: Option<&Value>) -> CacheMode {
    let flag = |key: &str, above: bool| own.and_then(|cache| cache.get(key)).and_then(Value::as_bool).unwrap_or(above);
    CacheMode { direct: flag("direct", above.direct), no_flush: flag("no-flush", above.no_flush) }
}

/// The nodes of the files that get a node's use of the page cache, each with its own. They are the node itself, or its
/// children that are described with it. `above`: the use of the node above.
fn files_of(node: &Arc<Node>, options: &BlockdevOptions, above: CacheMode) -> Vec<(Arc<Node>, CacheMode)> {
    let mode = with_own(above, options.get("cache"));
    if !node.is_raw() && node.file().is_some() {
        return vec![(Arc::clone(node), mode)];
    }
    let mut files = Vec::new();
    for child in node.children().into_iter().filter(|child| child.role != ChildRole::Backing) {
        let Some(Value::Object(described)) = options.get(child.role.as_str()) else { continue };
        if let Ok(described) = BlockdevOptions::from_map(described.clone()) {
            files.extend(files_of(&child.node, &described, mode));
        }
    }
    files
}

fn no_such_child(name: &str) -> Error {
    Error::new(ErrorKind::NotFound, format!("Cannot find device='' nor node-name='{name}'"))
}

fn cannot_change(key: &str) -> Error {
    Error::invalid_argument(format!("Cannot change the option '{key}'"))
}

fn is_child(key: &str) -> bool {
    const ROLES: [ChildRole; 10] = [
        ChildRole::File,
        ChildRole::Image,
        ChildRole::DataFile,
        ChildRole::Header,
        ChildRole::Backing,
        ChildRole::Target,
        ChildRole::Raw,
        ChildRole::Test,
        ChildRole::Log,
        ChildRole::Replica(0),
    ];
    ROLES.iter().any(|role| role.as_str() == key)
}

/// True for an image with metadata whose file is open for reading: it was made so together with the image. Only an
/// option changes both.
fn stays_read_only(node: &Node) -> bool {
    let has_metadata = node.metadata().is_some() || node.description().is_some();
    has_metadata && node.child(ChildRole::File).is_some_and(|file| file.is_read_only())
}

/// Refuses options that differ from the node's own and that only an open can change.
fn check_unchanged(node: &Arc<Node>, old: &BlockdevOptions, new: &BlockdevOptions) -> Result<()> {
    let changeable = |key: &str| {
        COMMON.contains(&key)
            || key == "x-check-cache-dropped"
            || (key == "drop-cache" && new.get(key).is_some())
            || (node.takes_backing() && key == "backing")
            || node.driver().live_options().is_some_and(|live| live.keys().contains(&key))
            || (node.driver().moves_freely() && key == "file" && new.text(key).is_some())
    };
    let keys = || old.iter().chain(new.iter()).map(|(key, _)| key.as_str());
    // Options of the node itself come first, and children that it didn't have.
    let is_own = |key: &&str| !is_child(key) || old.get(key).is_none();
    for key in keys().filter(is_own).chain(keys().filter(|key| !is_own(key))) {
        if changeable(key)
            || key == "node-name"
            || old.get(key) == new.get(key)
            || is_same_child(node, key, new.get(key))
            || is_live_child(key, old.get(key), new.get(key))
        {
            continue;
        }
        return Err(match (old.get(key), new.get(key)) {
            (_, None) => cannot_reset(key),
            (Some(Value::Object(old)), Some(Value::Object(new))) => changed_of_child(key, old, new),
            (Some(Value::String(_)), Some(Value::Object(new))) if new.contains_key("driver") => {
                cannot_change(&format!("{key}.driver"))
            }
            _ => cannot_change(key),
        });
    }
    Ok(())
}

/// The error for the first difference between the options of a described child.
fn changed_of_child(role: &str, old: &Map<String, Value>, new: &Map<String, Value>) -> Error {
    let counts = |key: &&String| !stays_by_itself(key) && old.get(*key) != new.get(*key);
    if let Some(key) = new.keys().find(counts) {
        return match (old.get(key), &new[key]) {
            (Some(Value::Object(old)), Value::Object(new)) => changed_of_child(key, old, new),
            _ => cannot_change(key),
        };
    }
    match old.keys().find(counts) {
        Some(key) => cannot_reset(key),
        None => cannot_change(role),
    }
}

/// Options whose absence changes nothing, or that a reopen may change.
fn stays_by_itself(key: &str) -> bool {
    COMMON.contains(&key) || matches!(key, "driver" | "node-name")
}

fn cannot_reset(key: &str) -> Error {
    Error::invalid_argument(format!("Option '{key}' cannot be reset to its default value"))
}

/// A described child may change what a reopen changes in it.
fn is_live_child(key: &str, old: Option<&Value>, new: Option<&Value>) -> bool {
    let (true, Some(Value::Object(old)), Some(Value::Object(new))) = (is_child(key), old, new) else { return false };
    old.keys().chain(new.keys()).all(|key| {
        let (before, now) = (old.get(key), new.get(key));
        before == now
            || OF_CHILDREN.contains(&key.as_str())
            || (key == "node-name" && now.is_none())
            || is_live_child(key, before, now)
    })
}

/// A child may be named by its node-name where it was given by its options, and the other way round only unchanged.
fn is_same_child(node: &Arc<Node>, key: &str, value: Option<&Value>) -> bool {
    match value {
        Some(Value::String(name)) => {
            node.children().iter().any(|child| child.role.as_str() == key && child.node.name() == name)
        }
        // The name of a described child may be left out.
        Some(Value::Object(new)) if !new.contains_key("node-name") => match node.options().get(key) {
            Some(Value::Object(old)) => {
                let mut old = old.clone();
                old.shift_remove("node-name");
                old == *new
            }
            _ => false,
        },
        _ => false,
    }
}
