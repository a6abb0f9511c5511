// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Opening images: from a name or an option tree to a node.

mod adding;
mod build;
mod cache;
mod children;
mod drivers;
mod extents;
mod file_names;
mod filters;
mod folders;
mod line;
mod names;
mod naming;
mod nbd;
mod null;
mod policy;
mod protocols;

pub use crate::node::HeaderName;
pub use build::{Draft, Opened, Opener, Role, TreePlace};
pub use cache::{CACHE_MODES, Cache};
pub use children::BackingReference;
pub use drivers::Drivers;
pub use file_names::{FileNames, NameParts, WithoutWord};
pub use filters::FILTERS;
pub use line::{DriverLine, FirstUse, Mention, Telling};
pub use names::{SERVED_BY_NBDKIT, resolve as resolve_name};
pub use naming::check_header_name;
pub use nbd::{TlsCredentials, is_nbd_name, open_nbd_file};
pub use policy::{FileKind, Files, HostFiles, Policy};
pub use protocols::{PROTOCOLS, is_read_only_device};

use crate::graph::Graph;
use crate::options::BlockdevOptions;
use crate::secret::Secret;
use cowshed_layout::qcow2::SnapshotName;
use cowshed_types::Result;
use std::sync::Arc;

/// The treatment of the backing file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BackingPolicy {
    /// It is opened, and its own one, to the end of the chain.
    #[default]
    Open,
    /// It is left out: unallocated ranges can't be read.
    None,
}

#[derive(Clone, Debug)]
enum Source {
    Name(String),
    Options(BlockdevOptions),
}

/// A request to open an image. By default read-only, format probed, backing chain opened, cache mode `writeback`,
/// discards passed on.
#[derive(Clone, Debug)]
pub struct OpenRequest {
    source: Source,
    format: Option<String>,
    writable: bool,
    force_share: bool,
    cache: Cache,
    discard: bool,
    backing: BackingPolicy,
    check: bool,
    try_keys: bool,
    snapshot: Option<SnapshotName>,
    no_io: bool,
    no_content: bool,
    no_keys: bool,
    share_raw: bool,
    resizes: bool,
    keeps_size: bool,
    policy: Policy,
    graph: Option<Arc<Graph>>,
    secrets: Vec<(String, Secret)>,
    tls: Vec<(String, TlsCredentials)>,
    for_monitor: bool,
    files: Arc<dyn Files>,
}

impl OpenRequest {
    fn new(source: Source) -> Self {
        OpenRequest {
            source,
            format: None,
            writable: false,
            force_share: false,
            cache: Cache::default(),
            discard: true,
            backing: BackingPolicy::Open,
            check: false,
            try_keys: false,
            snapshot: None,
            no_io: false,
            no_content: false,
            no_keys: false,
            share_raw: false,
            resizes: false,
            keeps_size: false,
            policy: Policy::default(),
            graph: None,
            secrets: Vec::new(),
            tls: Vec::new(),
            for_monitor: false,
            files: Arc::new(HostFiles),
        }
    }

    /// The image in a file: a path, or a name with one of the prefixes `file:`, `host_device:`, `null-co:`, `json:`.
    pub fn file(name: impl Into<String>) -> Self {
        Self::new(Source::Name(name.into()))
    }

    /// A request from the value of `--image-opts`: `driver=qcow2,file.filename=disk.qcow2`.
    pub fn image_opts(text: &str) -> Result<Self> {
        BlockdevOptions::from_image_opts(text).map(Self::options).map_err(|error| error.file(text))
    }

    /// An option tree.
    pub fn options(options: BlockdevOptions) -> Self {
        Self::new(Source::Options(options))
    }

    /// The format by name; `None` probes it.
    #[must_use]
    pub fn format<'a>(mut self, format: impl Into<Option<&'a str>>) -> Self {
        self.format = format.into().map(str::to_owned);
        self
    }

    /// Open for writing. The option `read-only` has the last word.
    #[must_use]
    pub fn writable(mut self, writable: bool) -> Self {
        self.writable = writable;
        self
    }

    /// True where it is opened for writing, unless options forbid it.
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// Share everything with other users of the files (`-U`): reads may be inconsistent. Not with `writable`.
    #[must_use]
    pub fn force_share(mut self, force_share: bool) -> Self {
        self.force_share = force_share;
        self
    }

    /// The cache mode by name, see [`CACHE_MODES`].
    pub fn cache(mut self, mode: &str) -> Result<Self> {
        self.cache = Cache::parse(mode)?;
        Ok(self)
    }

    /// The cache mode.
    #[must_use]
    pub fn cache_mode(mut self, cache: Cache) -> Self {
        self.cache = cache;
        self
    }

    /// Whether discards are passed on (`discard=unmap`, the default here) or ignored, for nodes without an option of
    /// their own.
    #[must_use]
    pub fn discard(mut self, discard: bool) -> Self {
        self.discard = discard;
        self
    }

    /// Leave the backing file out (`-u`).
    #[must_use]
    pub fn no_backing(self) -> Self {
        self.backing(BackingPolicy::None)
    }

    /// Sets the treatment of the backing file.
    #[must_use]
    pub fn backing(mut self, backing: BackingPolicy) -> Self {
        self.backing = backing;
        self
    }

    /// Open an internal snapshot, for reading, in place of the disk as it is now.
    #[must_use]
    pub fn snapshot(mut self, snapshot: impl Into<Option<SnapshotName>>) -> Self {
        self.snapshot = snapshot.into();
        self
    }

    /// Open to be checked: dirty and corrupt images are taken as they are, the backing file is left out.
    #[must_use]
    pub fn for_check(mut self) -> Self {
        self.check = true;
        self.no_backing()
    }

    /// With [`OpenRequest::for_check`]: a key that is given must fit all the same, though nothing is decrypted.
    #[must_use]
    pub fn trying_keys(mut self) -> Self {
        self.try_keys = true;
        self
    }

    /// Declares that the caller reads no data, only the format's description of the image (`info`). A raw image may
    /// then be in use by a writer. A qcow2 image may not, its metadata changes under a writer. Its data file isn't
    /// opened unless the options name it, and reads fail then. Not with `writable`.
    #[must_use]
    pub fn no_io(mut self) -> Self {
        self.no_io = true;
        self
    }

    /// Declares that the caller asks for places of data (`map`), snapshots or sizes, not for contents. Encrypted images
    /// of the chain then open without their keys. For all other callers, an encrypted image without its key is refused
    /// at its opening, before anything depends on it.
    #[must_use]
    pub fn without_content(mut self) -> Self {
        self.no_content = true;
        self
    }

    /// Declares that keys aren't needed, and with [`OpenRequest::without_content`] that they aren't looked at.
    #[must_use]
    pub fn without_keys(mut self) -> Self {
        self.no_keys = true;
        self
    }

    /// Lets others write to the file meanwhile, where the format permits that. A raw image is then locked as by
    /// qemu-img and qemu-io: by its user's operations, and not against those of others. Formats with metadata are
    /// locked as without it.
    #[must_use]
    pub fn sharing_raw(mut self) -> Self {
        self.share_raw = true;
        self
    }

    /// With [`OpenRequest::sharing_raw`]: the size is going to be changed, too.
    #[must_use]
    pub fn for_resize(mut self) -> Self {
        self.resizes = true;
        self
    }

    /// As [`OpenRequest::sharing_raw`], but the size of a raw image may not change: clients of an export rely on it.
    #[must_use]
    pub fn sharing_raw_of_one_size(mut self) -> Self {
        self.keeps_size = true;
        self.sharing_raw()
    }

    /// Sets the files that the image may make us open.
    #[must_use]
    pub fn policy(mut self, policy: Policy) -> Self {
        self.policy = policy;
        self
    }

    /// Secrets that options can name by their id, besides those of the graph.
    #[must_use]
    pub fn secrets(mut self, secrets: impl IntoIterator<Item = (String, Secret)>) -> Self {
        self.secrets.extend(secrets);
        self
    }

    /// TLS credentials that options can name by their id, besides those of the graph.
    #[must_use]
    pub fn tls_credentials(mut self, credentials: impl IntoIterator<Item = (String, TlsCredentials)>) -> Self {
        self.tls.extend(credentials);
        self
    }

    /// The graph that the nodes are part of, and whose nodes options may name. Without one it is a graph of its own.
    #[must_use]
    pub fn graph(mut self, graph: Arc<Graph>) -> Self {
        self.graph = Some(graph);
        self
    }

    /// As a node that a graph holds by its name: writable, discards ignored unless the options pass them on.
    pub(crate) fn for_monitor(mut self, graph: &Arc<Graph>) -> Self {
        self.graph = Some(Arc::clone(graph));
        self.for_monitor = true;
        self.writable(true).discard(false)
    }

    /// True when the options name the node.
    pub(crate) fn has_node_name(&self) -> bool {
        matches!(&self.source, Source::Options(options) if options.text("node-name").is_some())
    }

    /// All texts in the options: among them are the names of the nodes that the options refer to.
    pub(crate) fn texts(&self) -> Vec<String> {
        match &self.source {
            Source::Name(_) => Vec::new(),
            Source::Options(options) => options.texts(),
        }
    }

    /// Where protocol nodes get their files from.
    #[must_use]
    pub fn files(mut self, files: Arc<dyn Files>) -> Self {
        self.files = files;
        self
    }

    /// The name for messages.
    pub fn name(&self) -> String {
        match &self.source {
            Source::Name(name) => name.clone(),
            Source::Options(options) => options.to_json_name(),
        }
    }
}

impl From<&str> for OpenRequest {
    fn from(name: &str) -> Self {
        OpenRequest::file(name)
    }
}

impl From<String> for OpenRequest {
    fn from(name: String) -> Self {
        OpenRequest::file(name)
    }
}
