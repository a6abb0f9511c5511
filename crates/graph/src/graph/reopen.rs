// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reopening: nodes get other options while they are in use, all of them or none.
//!
//! First every node is prepared: options are checked, files opened for writing, locks taken, images made complete on
//! disk, whatever can fail. Then all is committed, or the preparation is taken back. The nodes are drained meanwhile.

use super::Graph;
use super::owned::no_such_node;
use super::transaction::Transaction;
use super::writing::not_reopened;
use crate::node::{Apply, Child, ChildRole, DetectZeroes, LiveOptions, Node, detect_zeroes, nodes_below};
use crate::options::{self, BlockdevOptions};
use cowshed_storage::{CacheMode, rt};
use cowshed_types::{Error, ErrorKind, Result};
use serde_json::{Map, Value};
use std::cmp::Reverse;
use std::sync::Arc;

/// Options of any node that a reopen changes.
const COMMON: &[&str] = &["read-only", "auto-read-only", "discard", "detect-zeroes", "cache"];

/// A node with the options that it is to have.
struct Reopening {
    node: Arc<Node>,
    options: BlockdevOptions,
    /// For a child that is reopened with its parent.
    above: Option<TakenOver>,
    /// It isn't described again: its own options stay, and with them what it took over before.
    keeps: bool,
}

/// Options of a node that a child without own ones takes over, where they are said.
#[derive(Clone, Copy, Default)]
struct TakenOver {
    read_only: Option<bool>,
    direct: Option<bool>,
    no_flush: Option<bool>,
}

impl TakenOver {
    fn or_defaults(self) -> TakenOver {
        let CacheMode { direct, no_flush } = self.cache();
        TakenOver { read_only: Some(self.read_only.unwrap_or(false)), direct: Some(direct), no_flush: Some(no_flush) }
    }

    fn cache(self) -> CacheMode {
        CacheMode { direct: self.direct.unwrap_or(false), no_flush: self.no_flush.unwrap_or(false) }
    }
}

impl Reopening {
    /// The same node a second time, as in QEMU: what both say counts as it is said last, and what one of them says stays. The parent of
    /// the last one passes its options on.
    fn and_then(self, last: Reopening) -> Reopening {
        let (keeps, above) = (self.keeps && last.keeps, last.above);
        let options = match last.keeps {
            true if keeps => last.options,
            // Nothing is said of it: what it has stands behind what was said.
            true => merged(last.said(), self.said()),
            false => merged(self.said(), last.said()),
        };
        Reopening { node: self.node, options, above, keeps }
    }

    /// The options that it says, or that the node has by its own word.
    fn said(&self) -> BlockdevOptions {
        let mut options = self.options.clone();
        if self.keeps {
            match self.node.said_read_only() {
                Some(said) => options.insert("read-only", said),
                None => drop(options.remove("read-only")),
            }
        }
        options
    }

    /// The options that count for this node and for those that are described with it.
    fn taken_over(&self) -> TakenOver {
        let above = self.above.unwrap_or_default();
        let of_cache = |key: &str| self.options.get("cache").and_then(|cache| cache.get(key)).and_then(Value::as_bool);
        let before = self.node.bottom_file().filter(|_| self.keeps).map(|file| file.cache_mode());
        let own_read_only = match self.keeps {
            true => self.node.said_read_only(),
            false => self.options.flag("read-only"),
        };
        TakenOver {
            read_only: own_read_only.or(above.read_only).or(self.keeps.then(|| self.node.is_read_only())),
            direct: of_cache("direct").or(above.direct).or(before.map(|mode| mode.direct)),
            no_flush: of_cache("no-flush").or(above.no_flush).or(before.map(|mode| mode.no_flush)),
        }
    }
}

/// One node with its new options, checked.
struct Plan {
    node: Arc<Node>,
    options: BlockdevOptions,
    read_only: bool,
    discard: bool,
    detect_zeroes: DetectZeroes,
    /// Applies the options of the driver.
    apply: Option<Apply>,
    /// The new use of the page cache by this node's file, where that changes.
    cache: Option<CacheMode>,
    backing: Backing,
    /// The new child of this node, where that changes.
    file: Option<Arc<Node>>,
    /// See [`Reopening`].
    keeps: bool,
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
    ///
    /// Children that were described with their node, and not named, are reopened with it. They take over whether they are
    /// read-only, and the use of the page cache, where they have no such options of their own.
    pub async fn reopen(self: &Arc<Self>, list: Vec<BlockdevOptions>) -> Result<()> {
        let one_change = self.changing_named(&list.iter().flat_map(BlockdevOptions::texts).collect::<Vec<_>>()).await;
        let mut wanted = Vec::with_capacity(list.len());
        for mut options in list {
            let Some(name) = options.text("node-name") else {
                return Err(Error::invalid_argument("'node-name' must be specified to reopen a node"));
            };
            let node = self.find(name).ok_or_else(|| no_such_node(name))?;
            options::check_common(&mut options, "")?;
            want(Reopening { node, options, above: None, keeps: false }, &mut wanted)?;
        }
        let plans: Vec<Plan> = wanted.into_iter().map(|wanted| self.plan_reopen(wanted)).collect::<Result<_>>()?;
        check_storage(&plans)?;
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
        for plan in plans.into_iter().filter(|plan| !plan.keeps) {
            let before = plan.node.size();
            plan.node.apply(plan.options, plan.discard, plan.detect_zeroes, plan.apply);
            plan.node.note_size(before);
        }
        for (parent, old) in left {
            old.forget_describer(&parent);
            if old.is_unused() {
                old.close().await?;
            }
        }
        Ok(())
    }

    /// All that can be refused; the children that were left, each behind its parent.
    async fn prepare_all(&self, plans: &[Plan], change: &mut Transaction) -> Result<Vec<(Arc<Node>, Arc<Node>)>> {
        for plan in in_order(plans) {
            self.prepare(plan, change).await?;
        }
        // Children come last among the possible refusals.
        let mut left = Vec::new();
        for plan in plans {
            match (&plan.backing, &plan.file) {
                (Backing::Keep, None) => {}
                (Backing::Keep, Some(file)) => {
                    left.push((Arc::clone(&plan.node), self.set_filter_child(&plan.node, file, change)?));
                }
                (backing, _) => {
                    let wanted = if let Backing::Node(node) = backing { Some(node) } else { None };
                    plan.node.check_backing(wanted).await?;
                    let is_other = |old: &Arc<Node>| wanted.is_none_or(|wanted| !Arc::ptr_eq(wanted, old));
                    left.extend(plan.node.backing().filter(is_other).map(|old| (Arc::clone(&plan.node), old)));
                    self.set_backing_drained(&plan.node, wanted, change)?;
                    plan.node.note_backing().await?;
                }
            }
        }
        Ok(left)
    }

    /// Checks the options of one node against its present state.
    fn plan_reopen(&self, wanted: Reopening) -> Result<Plan> {
        let taken_over = wanted.taken_over();
        let Reopening { node, mut options, above, keeps } = wanted;
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
        if !self.schemas().reopens(driver) {
            return Err(not_reopened(&node));
        }
        let read_only = taken_over.read_only.unwrap_or(false);
        let cache = changed_cache(&node, &options, above.is_some() || self.has_parent(&node), taken_over.cache())?;
        if keeps {
            // These stay as they are.
            let (discard, detect_zeroes) = (node.discards(), DetectZeroes::default());
            let (apply, backing, file) = (None, Backing::Keep, None);
            return Ok(Plan { node, options, read_only, discard, detect_zeroes, apply, cache, backing, file, keeps });
        }
        options.insert("driver", driver);
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
        Ok(Plan { node, options, read_only, discard, detect_zeroes, apply, cache, backing, file, keeps })
    }

    /// True for a node into which a copy-on-read filter writes what its readers ask for.
    fn is_copied_into(&self, node: &Arc<Node>) -> bool {
        let below = |node: &Arc<Node>| node.is_filter().then(|| node.child(ChildRole::File)).flatten();
        let copies = |filter: &Arc<Node>| {
            filter.copy_on_read().is_some()
                && std::iter::successors(below(filter), below).any(|target| Arc::ptr_eq(&target, node))
        };
        self.snapshot().nodes().any(|filter| copies(&filter))
    }

    /// True for a node that is stored in by another one.
    fn has_parent(&self, node: &Arc<Node>) -> bool {
        let has_it = |parent: &Arc<Node>| parent.children().iter().any(|child| Arc::ptr_eq(&child.node, node));
        self.snapshot().nodes().into_iter().any(|parent| has_it(&parent))
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
            Some(_) if node.backing().is_some_and(|backing| backing.is_described_by(node)) => Ok(Backing::Keep),
            Some(other) if other.get("driver").is_some() => Err(cannot_change("backing.driver")),
            Some(_) => Err(cannot_change("backing")),
        }
    }

    /// The node that a filter or a raw image is to get below it, when the options name another one than its present child. The saved
    /// data belong to one disk, so copy-before-write stays where it is.
    fn wanted_file(&self, node: &Arc<Node>, options: &BlockdevOptions) -> Result<Option<Arc<Node>>> {
        let Some(Value::String(name)) = options.get(ChildRole::File.as_str()) else { return Ok(None) };
        if node.child(ChildRole::File).is_some_and(|child| child.name() == name) {
            return Ok(None);
        }
        let found = self.find(name).ok_or_else(|| no_such_child(name))?;
        if !moves_freely(node) {
            return Ok(None);
        }
        match self.image_stored_in(node) {
            Some(image) => {
                let message = format!(
                    "node '{}' stores its data in '{}' and can't move to another file",
                    image.name(),
                    node.name()
                );
                Err(Error::new(ErrorKind::Busy, message))
            }
            None => Ok(Some(found)),
        }
    }

    /// Takes the steps that can fail for reasons outside of this process.
    async fn prepare(&self, plan: &Plan, change: &mut Transaction) -> Result<()> {
        let changes_rights = plan.node.is_read_only() != plan.read_only;
        if plan.keeps && !changes_rights && plan.cache.is_none() {
            return Ok(());
        }
        plan.node.complete().await?;
        if let Some(live) = plan.node.driver().live_options().filter(|_| !plan.keeps) {
            change.preparing(&plan.node);
            live.prepare(&plan.options, plan.discard).await?;
        }
        if let (Some(file), Some(mode)) = (plan.node.file(), plan.cache) {
            change.set_cache_mode(file, mode)?;
        }
        match (changes_rights, plan.read_only) {
            (true, true) if plan.node.has_writer() || self.is_copied_into(&plan.node) => {
                let message = format!("Read-only block node '{}' cannot support read-write users", plan.node.name());
                Err(Error::new(ErrorKind::Busy, message))
            }
            (true, true) => self.make_itself_read_only(&plan.node, change),
            (true, false) => self.make_itself_writable(&plan.node, change).await,
            // It was made complete, and takes writes again.
            (false, false) => plan.node.begin_writing().await,
            (false, true) => Ok(()),
        }
    }
}

/// Adds a node and the children that are described with it, each once. See [`Reopening::and_then`].
fn want(mut one: Reopening, list: &mut Vec<Reopening>) -> Result<()> {
    let known = list.iter().position(|known| Arc::ptr_eq(&known.node, &one.node));
    if let Some(at) = known {
        one = list.remove(at).and_then(one);
    }
    let taken_over = one.taken_over();
    let mut below = Vec::new();
    for child in one.node.children() {
        if !child.node.is_described_by(&one.node) {
            continue;
        }
        let (options, keeps) = match one.options.get(child.role.as_str()) {
            _ if one.keeps => (child.node.options(), true),
            Some(Value::Object(described)) => (BlockdevOptions::from_map(described.clone())?, false),
            // It is left.
            Some(Value::Null) => continue,
            Some(Value::String(name)) if name != child.node.name() => continue,
            _ => (child.node.options(), true),
        };
        // The defaults count for a child that the options leave out, such as a file that the image names.
        let is_left_out = one.options.get(child.role.as_str()).is_none();
        let mut above = if is_left_out { taken_over.or_defaults() } else { taken_over };
        if child.role == ChildRole::Backing {
            above.read_only = Some(true);
        }
        let above = Some(above);
        below.push(Reopening { node: child.node, options, above, keeps });
    }
    list.insert(known.unwrap_or(list.len()), one);
    below.into_iter().try_for_each(|mut child| {
        options::check_common(&mut child.options, "")?;
        want(child, list)
    })
}

/// Both, member by member; where both have one, that of `last`.
fn merged(first: BlockdevOptions, last: BlockdevOptions) -> BlockdevOptions {
    fn add(to: &mut Map<String, Value>, from: &Map<String, Value>) {
        for (key, value) in from {
            match (to.get_mut(key), value) {
                (Some(Value::Object(old)), Value::Object(new)) => add(old, new),
                _ => drop(to.insert(key.clone(), value.clone())),
            }
        }
    }
    let mut both = first;
    for (key, value) in last.iter() {
        let value = match (both.get(key), value) {
            (Some(Value::Object(old)), Value::Object(new)) => {
                let mut old = old.clone();
                add(&mut old, new);
                Value::Object(old)
            }
            _ => value.clone(),
        };
        both.insert(key.clone(), value);
    }
    both
}

/// The new use of the page cache by a node's file, where it changes. A file that can't be opened so isn't reopened either.
fn changed_cache(
    node: &Arc<Node>,
    options: &BlockdevOptions,
    is_child: bool,
    mode: CacheMode,
) -> Result<Option<CacheMode>> {
    let Some(file) = node.file().filter(|_| !node.is_raw()) else { return Ok(None) };
    let is_same = match is_child {
        true => file.cache_mode() == mode,
        // The setting may be one of its opening, and no option.
        false => {
            with_own(CacheMode::default(), node.options().get("cache"))
                == with_own(CacheMode::default(), options.get("cache"))
        }
    };
    if is_same {
        return Ok(None);
    }
    if !mode.direct {
        options::check_aio(&node.options(), false).map_err(|error| error.file(node.filename()))?;
    }
    Ok(Some(mode))
}

/// True where a reopen may put another node below this one, whose rights follow from those of its users.
fn moves_freely(node: &Node) -> bool {
    node.driver().moves_freely() && node.passes_permissions()
}

/// Refuses nodes that are to be writable on storage that is not, but for those that write nothing of their own and have no writer.
fn check_storage(plans: &[Plan]) -> Result<()> {
    for plan in plans.iter().filter(|plan| !plan.read_only) {
        if plan.node.passes_permissions() && !plan.node.has_writer() {
            continue;
        }
        for child in plan.node.children().into_iter().filter(|child| child.role != ChildRole::Backing) {
            let below = plan.file.as_ref().filter(|_| child.role == ChildRole::File).unwrap_or(&child.node);
            let planned = plans.iter().find(|other| Arc::ptr_eq(&other.node, below)).map(|other| other.read_only);
            if planned.unwrap_or(below.is_read_only()) {
                return Err(Error::new(ErrorKind::ReadOnly, "Block node is read-only"));
            }
        }
    }
    Ok(())
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

/// Refuses options that differ from the node's own and that only an open can change.
fn check_unchanged(node: &Arc<Node>, old: &BlockdevOptions, new: &BlockdevOptions) -> Result<()> {
    let changeable = |key: &str| {
        COMMON.contains(&key)
            || key == "x-check-cache-dropped"
            || (key == "drop-cache" && new.get(key).is_some())
            || (node.takes_backing() && key == "backing")
            || node.driver().live_options().is_some_and(|live| live.keys().contains(&key))
            || (moves_freely(node) && key == "file" && new.text(key).is_some())
    };
    let lasting = node.driver().live_options().filter(|live| !live.can_go()).map(LiveOptions::keys).unwrap_or_default();
    if let Some(lost) = lasting.iter().find(|key| old.get(key).is_some() && new.get(key).is_none()) {
        return Err(cannot_reset(lost));
    }
    let keys = || old.iter().chain(new.iter()).map(|(key, _)| key.as_str());
    // Options of the node itself come first, and children that it didn't have.
    let is_own = |key: &&str| !is_child(key) || old.get(key).is_none();
    for key in keys().filter(is_own).chain(keys().filter(|key| !is_own(key))) {
        // The name may be left out, and isn't given back then. Names that the graph has made are no options.
        let is_unnamed = |name: &str| name.starts_with('#') || old.text(key) == Some(name);
        if changeable(key)
            || (key == "node-name" && new.text(key).is_none_or(is_unnamed))
            || old.get(key) == new.get(key)
            || is_same_child(node, key, new.get(key))
            || is_described_again(node, key, new.get(key))
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

/// The children of a described child that are described again have checks of their own.
fn is_described_again(node: &Node, key: &str, value: Option<&Value>) -> bool {
    let is_it = |child: &Child| child.role.as_str() == key && child.node.is_described_by(node);
    is_child(key) && matches!(value, Some(Value::Object(_))) && node.children().iter().any(is_it)
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
