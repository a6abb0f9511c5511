// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Builds nodes from options, leaves first.

use super::line::DriverLine;
use super::names::{driver_for, has_names, instead_of, options_for, protocol_options};
use super::naming::given;
use super::policy::{Files, Policy};
use super::{BackingPolicy, Drivers, OpenRequest, Source, TlsCredentials};
use crate::graph::{Graph, check_children};
use crate::node::{
    ChildRole, Children, Deadline, Driver, Edge, Link, LocalFuture, LockSource, MONITOR, Node, NodeParts, NodeSettings,
    detect_zeroes,
};
use crate::options::{self, BlockdevOptions, DriverKind};
use crate::secret::Secret;
use cowshed_layout::probe::{FormatName, probe_with_tail};
use cowshed_layout::qcow2::SnapshotName;
use cowshed_storage::fault::as_metadata;
use cowshed_storage::{CacheMode, FileIdentity, PermissionSet, Permissions, rt};
use cowshed_types::{Error, ErrorKind, Result};
use serde_json::Value;
use std::cell::RefCell;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::{Arc, Weak};

/// The user of a node that [`open`] returns: its caller.
const ROOT: &str = "#root";

pub(super) async fn open(drivers: &'static Drivers, request: OpenRequest) -> Result<Arc<Node>> {
    if request.force_share && request.writable {
        return Err(Error::invalid_argument("force-share needs a read-only image").file(request.name()));
    }
    let graph = request.graph.unwrap_or_else(|| Graph::new(drivers));
    // A graph has brought its own table.
    let drivers = Drivers::of(&graph);
    let options = match request.source {
        Source::Name(ref name) => named(drivers, name, request.format.as_deref(), &*request.files)?,
        Source::Options(options) if request.format.is_none() => options,
        Source::Options(ref options) => {
            let message = "a format can't be given together with image options";
            return Err(Error::invalid_argument(message).file(options.to_json_name()));
        }
    };
    let place = TreePlace {
        role: Role::Root,
        path: String::new(),
        writable: request.writable,
        force_share: request.force_share,
        share_writes: (request.no_io && !request.writable) || request.share_raw,
        auto_read_only: false,
        cache: CacheMode { direct: request.cache.direct, no_flush: request.cache.no_flush },
        discard: request.discard,
        writethrough: request.cache.writethrough,
        depth: 1,
        beneath: None,
        is_metadata: false,
    };
    let wants_snapshot = request.snapshot.is_some();
    let opener = Rc::new(Opener {
        graph,
        drivers,
        secrets: request.secrets,
        tls: request.tls,
        files: request.files,
        deadline: request.policy.time_limit.map(Deadline::from_now),
        policy: request.policy,
        no_io: request.no_io && !request.writable,
        no_content: request.no_content && !request.writable,
        no_keys: request.no_keys && request.no_content && !request.writable,
        resizes: request.resizes,
        keeps_size: request.keeps_size,
        locks_by_users: request.for_monitor && !request.share_raw,
        backing: request.backing,
        check: request.check,
        try_keys: request.try_keys,
        snapshot: request.snapshot,
        opened: RefCell::default(),
        writable: RefCell::default(),
        warnings: RefCell::default(),
    });
    let (writable, share_all) = (place.writable, place.force_share || place.share_writes);
    let node = as_metadata(opener.node(options, place)).await?;
    if wants_snapshot && !node.has_snapshots() {
        let message = format!("images of the format '{}' have no internal snapshots", node.driver_name());
        let sentence = format!(
            "Failed to load snapshot: Block format '{}' used by device '' does not support temporarily loading internal snapshots",
            node.driver_name()
        );
        return Err(Error::unsupported(message).file(node.filename()).qemu(sentence));
    }
    let user = match request.for_monitor {
        true => Edge::new(MONITOR, Permissions::NONE),
        false => Edge::of(ROOT, writable && !node.is_read_only(), share_all),
    };
    node.attach(user)?;
    // Images that are marked as in use are closed in order from now on.
    match opener.begin_writing().await {
        Ok(()) => Ok(node),
        Err(error) => node.close().await.and(Err(error)),
    }
}

/// The option tree for a file name and perhaps a format.
pub(super) fn named(drivers: &Drivers, name: &str, format: Option<&str>, files: &dyn Files) -> Result<BlockdevOptions> {
    let Some(format) = format else { return without_format(drivers, name, files) };
    match BlockdevOptions::from_json_name(name) {
        // The format counts, not a driver in the name.
        Some(options) => Ok(options.map_err(|error| error.file(name))?.with("driver", format)),
        // A protocol as "format": the node itself, without a format above it.
        None if drivers.is_protocol(format) || has_names(drivers, format, name) => {
            options_for(drivers, format, name, files)
        }
        None => Ok(without_format(drivers, name, files)?.with("driver", format)),
    }
}

/// The option tree for a file name without a format.
pub(super) fn without_format(drivers: &Drivers, name: &str, files: &dyn Files) -> Result<BlockdevOptions> {
    match BlockdevOptions::from_json_name(name) {
        Some(options) => options.map_err(|error| error.file(name)),
        None => Ok(BlockdevOptions::new().with("file", protocol_options(drivers, name, files)?)),
    }
}

/// The purpose for which a node is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The image that the request names.
    Root,
    /// The file or data file of a format: a protocol node when no driver is named.
    Storage,
    /// A backing file.
    Backing,
    /// A node of several that keep the same disk: named or probed like the root.
    Replica,
}

/// The place of a node in the tree, and the settings that it takes over from there where it has no own options.
#[derive(Clone, Debug)]
pub struct TreePlace {
    /// The purpose for which it is opened.
    pub role: Role,
    /// The option path of the node, "" or ending in a dot.
    pub path: String,
    /// Open for writing.
    pub writable: bool,
    /// Share everything with other users of the files.
    pub force_share: bool,
    /// The user doesn't mind writers (as with `force_share`, but a format with metadata does).
    pub share_writes: bool,
    /// Fall back to reading where writing isn't permitted.
    pub auto_read_only: bool,
    /// Use of the page cache.
    pub cache: CacheMode,
    /// Discards are passed on.
    pub discard: bool,
    /// Each write is followed by a flush.
    pub writethrough: bool,
    /// Number of layers of the chain so far, this one included.
    pub depth: u32,
    /// The file must be in this folder, also behind symbolic links.
    pub beneath: Option<PathBuf>,
    /// A format above it keeps its metadata here. It is read and written in full, also for a caller of the root that reads no data
    /// or checks the root.
    pub is_metadata: bool,
}

/// One file between the root and the node that is opened now, to notice loops.
pub(super) struct OpenedFile {
    pub identity: FileIdentity,
    pub name: String,
}

/// Opens the nodes of one request.
pub struct Opener {
    pub(super) graph: Arc<Graph>,
    /// The table of the graph.
    pub(super) drivers: &'static Drivers,
    pub(super) secrets: Vec<(String, Secret)>,
    pub(super) tls: Vec<(String, TlsCredentials)>,
    pub(super) files: Arc<dyn Files>,
    pub(super) policy: Policy,
    deadline: Option<Deadline>,
    /// The request is for the format's description of the image only.
    pub no_io: bool,
    /// The request is for places only, not for the guest's data.
    pub no_content: bool,
    /// Keys that are given aren't looked at.
    pub(super) no_keys: bool,
    /// The size is going to be changed.
    pub(super) resizes: bool,
    /// A user that shares a raw image may not change its size.
    pub(super) keeps_size: bool,
    /// The locks of files follow from the operations of their nodes' users.
    pub(super) locks_by_users: bool,
    pub(super) backing: BackingPolicy,
    /// Damaged images are taken as they are.
    pub check: bool,
    /// Keys that are given must fit, also where nothing is decrypted.
    pub(super) try_keys: bool,
    /// The internal snapshot that is opened in place of the disk.
    pub snapshot: Option<SnapshotName>,
    pub(super) opened: RefCell<Vec<OpenedFile>>,
    /// The nodes that take writes.
    writable: RefCell<Vec<Weak<Node>>>,
    warnings: RefCell<Vec<String>>,
}

/// An opened driver, and the node's name in messages.
pub type Opened = Result<(Box<dyn Driver>, String)>;

/// A node's options and the settings made of them, on the way to its driver.
pub struct Draft {
    /// Its node-name.
    pub name: String,
    /// Its options.
    pub options: BlockdevOptions,
    /// Its place in the tree.
    pub place: TreePlace,
    /// The settings that every driver's options have.
    pub settings: NodeSettings,
    /// The children that are open.
    pub children: Children,
    /// See [`TreePlace::is_metadata`]. That of `place` is for the children.
    pub is_metadata: bool,
}

impl Opener {
    /// Passes a warning to the caller of the root.
    pub fn warn(&self, text: String) {
        self.warnings.borrow_mut().push(text);
    }

    async fn begin_writing(&self) -> Result<()> {
        for node in self.writable.take().iter().filter_map(Weak::upgrade) {
            node.begin_writing().await?;
        }
        Ok(())
    }

    /// The rights that images have on this process.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Opens a node and all nodes below it.
    pub(super) fn node(
        self: &Rc<Self>,
        options: BlockdevOptions,
        place: TreePlace,
    ) -> LocalFuture<'_, Result<Arc<Node>>> {
        if rt::is_deep() {
            let opener = Rc::clone(self);
            return Box::pin(rt::spawn(async move { opener.node_unboxed(options, place).await }));
        }
        rt::nested(self.node_unboxed(options, place))
    }

    async fn node_unboxed(self: &Rc<Self>, mut options: BlockdevOptions, mut place: TreePlace) -> Result<Arc<Node>> {
        if let Some(deadline) = &self.deadline {
            deadline.check()?;
        }
        options::check_common(&mut options, &place.path)?;
        let reservation = self.graph.reserve(options.text("node-name"))?;
        let settings = take_over(&options, &mut place)?;
        let name = reservation.name().to_owned();
        let children = Children::of(&name);
        let is_metadata = place.is_metadata;
        // A driver that isn't named is a format that the child's first bytes decide.
        place.is_metadata |=
            !options.text("driver").and_then(|name| self.drivers.find(name)).is_some_and(|line| line.passes_on);
        let mut draft = Draft { name, options, place, settings, children, is_metadata };
        if self.locks_by_users {
            draft.settings.locks = LockSource::Users { share_all: draft.place.force_share };
        }
        let line = self.find_driver(&mut draft).await?;
        if let Some(child) = draft.children.link(ChildRole::File).and_then(|link| link.get())
            && let Some(asked) = line.asked_at_first(self.locks_by_users)
        {
            // Opened to find the driver out.
            child.change_user(&draft.name, asked)?;
        }
        let given = given(&draft.options);
        (line.prepare)(self, &mut draft)?;
        line.schema.check(&mut draft.options, &draft.place.path)?;
        let (driver, filename) = (line.open)(self, &mut draft).await?;
        if !draft.settings.read_only {
            check_children(&draft.children.list())?;
        }
        let warnings = if draft.place.role == Role::Root { self.warnings.take() } else { Vec::new() };
        let node = Node::new(NodeParts {
            name: draft.name,
            filename,
            driver,
            children: draft.children,
            settings: draft.settings,
            options: draft.options,
            given,
            home: Box::new(Arc::clone(&self.graph)),
            warnings,
            deadline: self.deadline,
        })?;
        reservation.fill(&node);
        if !node.is_read_only() {
            self.writable.borrow_mut().push(Arc::downgrade(&node));
        }
        Ok(node)
    }

    /// The driver that the options name, or a guess.
    async fn find_driver(self: &Rc<Self>, draft: &mut Draft) -> Result<&'static DriverLine> {
        let name = match draft.options.text("driver") {
            Some(name) => name.to_owned(),
            None if draft.options.get("driver").is_some_and(Value::is_null) => {
                let error = Error::invalid_argument(format!("'{}driver' is null", draft.place.path));
                return Err(error.qemu("Must specify either driver or file"));
            }
            None if draft.place.role == Role::Storage && draft.options.text("filename").is_none() => {
                let error = Error::invalid_argument(format!("'{}driver' or '{0}filename' is needed", draft.place.path));
                return Err(error.qemu("Must specify either driver or file"));
            }
            None if draft.place.role == Role::Storage => {
                let driver = driver_for(draft.options.text("filename").unwrap_or_default(), &*self.files);
                draft.options.insert("driver", driver);
                driver.to_owned()
            }
            None => {
                let format = self.guess_format(draft).await?;
                draft.options.insert("driver", format);
                format.to_owned()
            }
        };
        self.drivers.find(&name).ok_or_else(|| match self.drivers.refused(&name) {
            Some(about) => Error::unsupported(format!(
                "images of format '{name}' ({about}) can't be opened; the format 'raw' takes the file's bytes as they are"
            )),
            None if let Some(instead) = instead_of(&name) => {
                Error::unsupported(format!("Unknown driver '{name}': {instead}"))
            }
            None => {
                let known: Vec<&str> = self.drivers.schemas().map(|driver| driver.name).collect();
                let error = Error::invalid_argument(format!("Unknown driver '{name}'"));
                error.hint(format!(": one of {} is expected", known.join(", ")))
            }
        })
    }

    /// Opens the file and looks at its first bytes.
    async fn guess_format(self: &Rc<Self>, draft: &mut Draft) -> Result<&'static str> {
        if !matches!(draft.options.get("file"), Some(Value::String(_) | Value::Object(_))) {
            let path = &draft.place.path;
            let error = Error::invalid_argument("Must specify either driver or file");
            return Err(error.hint(format!(" ('{path}driver' or '{path}file')")));
        }
        let child = self.file_child(draft).await?;
        let name = if child.children().is_empty() { child.filename() } else { child.reference() };
        if draft.place.role == Role::Backing && !self.policy.allow_backing_probe {
            let message = "the overlay doesn't say the format of this backing file, and the policy forbids to guess it";
            return Err(Error::new(ErrorKind::PermissionDenied, message).file(name));
        }
        let unread = |error: Error| match error.kind() {
            ErrorKind::Io | ErrorKind::NoSpace => error.qemu("Could not read image for determining its format"),
            _ => error,
        };
        let [first, last] = child.read_ends().await.map_err(unread)?;
        let format = probe_with_tail(&first, &last);
        let written = !draft.settings.read_only;
        // Also where it is only read: it may become writable.
        draft.settings.probed_raw = format == FormatName::Raw;
        if format == FormatName::Raw && written {
            self.warn(format!(
                "{name}: the image format was not given and is guessed to be raw; writes to its start are restricted, \
                 name the format 'raw' to lift that"
            ));
        } else if draft.place.role == Role::Backing {
            self.warn(format!(
                "{name}: the overlay doesn't say the format of this backing file, guessed {}",
                format.as_str()
            ));
        }
        Ok(format.as_str())
    }

    /// The child `file`, opened once.
    pub async fn file_child(self: &Rc<Self>, draft: &mut Draft) -> Result<Arc<Node>> {
        if let Some(open) = draft.children.link(ChildRole::File).and_then(|link| link.get()) {
            return Ok(open);
        }
        let spec = draft.options.get("file").cloned().unwrap_or(Value::Null);
        let place = draft.place.storage("file", !draft.settings.read_only);
        self.child(draft, ChildRole::File, spec, place).await
    }

    /// As [`Self::file_child`], for a format that permits no other writers, also where the caller would.
    pub async fn unshared_file_child(self: &Rc<Self>, draft: &mut Draft) -> Result<Arc<Node>> {
        let shared_writes = std::mem::replace(&mut draft.place.share_writes, false);
        let child = self.file_child(draft).await?;
        if shared_writes && !draft.place.force_share {
            // Opened by the probe, for a format that permits writers; this one doesn't.
            child.release(&draft.name);
            let edge = Edge::of(&draft.name, !draft.settings.read_only, false).with_role(ChildRole::File);
            let permissions = edge.permissions;
            child.attach(edge)?;
            if let (Some(file), Some(Value::Object(_))) = (child.bottom_file(), draft.options.get("file")) {
                file.lock(permissions)?;
            }
        }
        Ok(child)
    }

    /// Opens or finds a child and gives the parent its permissions on it.
    pub async fn child(
        self: &Rc<Self>,
        draft: &mut Draft,
        role: ChildRole,
        spec: Value,
        place: TreePlace,
    ) -> Result<Arc<Node>> {
        let edge = Edge::of(&draft.name, place.writable, place.force_share || place.share_writes);
        let node = match spec {
            Value::String(name) => self.graph.find(&name).ok_or_else(|| {
                let path = place.path.trim_end_matches('.');
                let sentence = format!("Cannot find device='{name}' nor node-name='{name}'");
                match self.locks_by_users {
                    true => Error::new(ErrorKind::NotFound, sentence),
                    false => Error::new(ErrorKind::NotFound, format!("option '{path}': there is no node '{name}'"))
                        .qemu(sentence),
                }
            })?,
            Value::Object(map) => {
                let node = self.node(BlockdevOptions::from_map(map)?, place).await?;
                node.describe_by(&draft.children);
                node
            }
            other => {
                let path = place.path.trim_end_matches('.');
                return Err(
                    Error::invalid_argument(format!("option '{path}' expects a node-name or an object")).value(other)
                );
            }
        };
        let line = draft.options.text("driver").and_then(|name| self.drivers.find(name));
        // A child that fell back to reading makes its parent read-only too.
        let edge = if node.is_read_only() && edge.permissions.used.contains(PermissionSet::WRITE) {
            let has_metadata = line.is_some_and(|line| line.schema.kind == DriverKind::Format && !line.follows_file);
            if has_metadata && role == ChildRole::File && node.stays_read_only() {
                return Err(Error::new(ErrorKind::ReadOnly, "Block node is read-only"));
            }
            // Where rights are passed on, a user that writes is refused below.
            let passes_on = line.is_some_and(|line| line.passes_on && line.asked_at_first(true).is_some());
            draft.settings.read_only |= !(self.locks_by_users && passes_on && node.stays_read_only());
            Edge::of(&draft.name, false, false)
        } else {
            edge
        };
        let edge = match line.and_then(|line| line.asked_at_first(self.locks_by_users)) {
            Some(permissions) => Edge { permissions, ..edge },
            None => edge,
        };
        let edge = match role {
            ChildRole::Backing if self.locks_by_users => edge.without_users(),
            _ => edge,
        };
        let edge = edge.with_role(role);
        let was_unlocked = self.locks_by_users && node.is_unlocked();
        node.attach(edge)?;
        draft.children.push(role, Link::to(Some(Arc::clone(&node))));
        if was_unlocked && !node.is_unlocked() {
            node.measure_again()?;
        }
        Ok(node)
    }

    /// The files from the root to the node that is opened now, to be given to [`Self::back_to`] behind a branch.
    pub(super) fn path_of_files(&self) -> usize {
        self.opened.borrow().len()
    }

    /// Ends a branch: its files may come again in the next one, for two images may share a base.
    pub(super) fn back_to(&self, path: usize) {
        self.opened.borrow_mut().truncate(path);
    }
}

/// Reads the common keys: settles the node's behaviour, and changes `place` to the settings for its children.
fn take_over(options: &BlockdevOptions, place: &mut TreePlace) -> Result<NodeSettings> {
    if options.flag("active") == Some(false) {
        let message = format!("'{}active=off' is for nodes that are added to a daemon", place.path);
        return Err(Error::invalid_argument(message));
    }
    if let Some(read_only) = options.flag("read-only") {
        place.writable = !read_only;
    }
    if let Some(auto_read_only) = options.flag("auto-read-only") {
        place.auto_read_only = auto_read_only;
    }
    if let Some(force_share) = options.flag("force-share") {
        place.force_share = force_share;
    }
    if place.force_share && place.writable {
        let message = format!("'{}force-share=on' needs '{}read-only=on'", place.path, place.path);
        let error = Error::invalid_argument(message);
        return Err(error.qemu("force-share=on can only be used with read-only images"));
    }
    if let Some(Value::Object(cache)) = options.get("cache") {
        let flag = |key: &str, inherited: bool| cache.get(key).and_then(Value::as_bool).unwrap_or(inherited);
        place.cache.direct = flag("direct", place.cache.direct);
        place.cache.no_flush = flag("no-flush", place.cache.no_flush);
    }
    let discard = match options.text("discard") {
        Some("unmap" | "on") => true,
        Some(_) => false,
        None => place.discard,
    };
    let detect_zeroes = detect_zeroes(options, discard, &place.path)?;
    let writethrough = place.writethrough && place.role == Role::Root;
    Ok(NodeSettings {
        read_only: !place.writable,
        said_read_only: options.flag("read-only"),
        writethrough,
        discard,
        detect_zeroes,
        probed_raw: false,
        no_data: false,
        locks: LockSource::Opening,
    })
}

impl TreePlace {
    /// The place of the child `key` that stores bytes for a node in this place.
    pub fn storage(&self, key: &str, writable: bool) -> TreePlace {
        TreePlace {
            role: Role::Storage,
            path: format!("{}{key}.", self.path),
            writable,
            // A discard that the parent lets through is carried out by its file.
            discard: true,
            writethrough: false,
            beneath: None,
            ..self.clone()
        }
    }
}
