// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The user's description of an image.

use cowshed_image::DRIVERS;
use cowshed_image::graph::Graph;
use cowshed_image::open::Policy;
use cowshed_image::options::{BlockdevOptions, short_forms};
use cowshed_image::secret::Secret;
use cowshed_image::{Node, OpenRequest, TlsCredentials, open};
use cowshed_layout::qcow2::SnapshotName;
use cowshed_types::{Error, ErrorKind, Result};
use serde_json::json;
use std::sync::Arc;

/// An image as named on a command line or in a QMP command.
#[derive(Clone, Debug, Default)]
pub struct ImageSpec {
    /// File name, `json:{…}` name, or with `image_opts` a `driver=…,file.filename=…` list.
    pub name: String,
    /// Format; probed when `None`. Not together with `image_opts`.
    pub format: Option<String>,
    /// `name` is an option list (`--image-opts`).
    pub image_opts: bool,
    /// Share everything with other users of the image (`-U`).
    pub force_share: bool,
    /// Cache mode: `none`, `writeback`, `writethrough`, `directsync`, `unsafe`.
    pub cache: Option<String>,
    /// The engine that does the I/O of its file (`-i`, `-n`): `threads`, `native`, `io_uring`.
    pub aio: Option<String>,
    /// Lock a raw image as qemu-img does, see [`OpenRequest::sharing_raw`].
    pub shares_raw: bool,
    /// The files that the image may make us open, and its largest size.
    pub policy: Policy,
    /// An internal snapshot to read in place of the disk as it is now (`-l`).
    pub snapshot: Option<SnapshotName>,
    /// Secrets that options can name (`--object secret`), by their id.
    pub secrets: Vec<(String, Secret)>,
    /// TLS credentials that options can name (`--object tls-creds-x509`), by their id.
    pub tls: Vec<(String, TlsCredentials)>,
    /// The throttle groups that options can name (`--object throttle-group`), which the images of a command share.
    pub graph: Option<Arc<Graph>>,
    /// Options of the driver besides, with dotted keys: not together with `image_opts`.
    pub extra: Vec<(&'static str, String)>,
    /// Where warnings go, one line each; nowhere when `None`.
    pub on_warning: Option<fn(&str)>,
}

impl ImageSpec {
    /// The image in file `name`, its format probed.
    pub fn file(name: impl Into<String>) -> Self {
        ImageSpec { name: name.into(), ..ImageSpec::default() }
    }

    /// Sets the format.
    #[must_use]
    pub fn format(mut self, format: impl Into<String>) -> Self {
        self.format = Some(format.into());
        self
    }

    /// The request that opens the image, read-only and with its backing chain. It warns of options without a value.
    pub fn request(&self) -> Result<OpenRequest> {
        if let (true, Some(warn)) = (self.image_opts, self.on_warning) {
            short_forms(&self.name, true).iter().for_each(|text| warn(text));
        }
        if self.image_opts && self.format.is_some() {
            return Err(Error::invalid_argument("a format can't be given besides image options"));
        }
        let request = match (&self.aio, self.image_opts) {
            (Some(aio), _) => OpenRequest::options(self.tree_with_aio(aio)?),
            (None, true) => OpenRequest::image_opts(&self.name)?,
            (None, false) if !self.extra.is_empty() => {
                let options = DRIVERS.options_of_name(&self.name, self.format.as_deref())?;
                OpenRequest::options(self.extra.iter().fold(
                    options,
                    |options, (key, value)| match key.split_once('.') {
                        Some((outer, inner)) => options.with(outer, json!({ inner: value })),
                        None => options.with(*key, value.as_str()),
                    },
                ))
            }
            (None, false) => OpenRequest::file(&self.name).format(self.format.as_deref()),
        };
        self.settled(request)
    }

    /// The request with the settings of the image besides its name.
    fn settled(&self, request: OpenRequest) -> Result<OpenRequest> {
        let request = request
            .force_share(self.force_share)
            .policy(self.policy.clone())
            .snapshot(self.snapshot.clone())
            .secrets(self.secrets.iter().cloned())
            .tls_credentials(self.tls.iter().cloned());
        let request = if self.shares_raw { request.sharing_raw() } else { request };
        let request = match &self.graph {
            Some(graph) => request.graph(Arc::clone(graph)),
            None => request,
        };
        match &self.cache {
            Some(mode) => request.cache(mode),
            None => Ok(request),
        }
    }

    /// The option tree of the image.
    fn tree(&self) -> Result<BlockdevOptions> {
        match self.image_opts {
            true => BlockdevOptions::from_image_opts(&self.name).map_err(|error| error.file(&self.name)),
            false => DRIVERS.options_of_name(&self.name, self.format.as_deref()),
        }
    }

    /// The same with a choice of the AIO engine of its file.
    fn tree_with_aio(&self, aio: &str) -> Result<BlockdevOptions> {
        let mut tree = self.tree()?;
        let is_cached = !matches!(self.cache.as_deref(), Some("none" | "directsync"));
        if tree.set_aio(aio) && aio == "native" && is_cached {
            let message = "aio=native was specified, but it requires cache.direct=on, which was not specified.";
            return Err(Error::invalid_argument(message));
        }
        Ok(tree)
    }

    /// Opens it for reading.
    pub async fn open_for_reading(&self) -> Result<Arc<Node>> {
        self.open(self.request()?).await
    }

    /// Opens it for reading below a node with these options, such as `fault`. Its graph closes both.
    pub async fn open_below(&self, above: BlockdevOptions) -> Result<Arc<Node>> {
        const NAME: &str = "image";
        let graph = self.graph.clone().unwrap_or_else(|| Graph::new(&DRIVERS));
        let request =
            self.settled(OpenRequest::options(self.tree()?.with("node-name", NAME).with("read-only", true)))?;
        let image = graph.add_with(request).await.map_err(|error| error.file(&self.name))?;
        if let Some(warn) = self.on_warning {
            image.warnings().iter().for_each(|text| warn(text));
        }
        graph.add(above.with("node-name", "disk").with("read-only", true).with("file", NAME)).await
    }

    /// Opens it for writing.
    pub async fn open_for_writing(&self) -> Result<Arc<Node>> {
        self.open(self.request()?.force_share(false).writable(true)).await
    }

    /// Opens a request that was made of this image, and passes its warnings on.
    pub async fn open(&self, request: OpenRequest) -> Result<Arc<Node>> {
        // An error before any file was opened is about this image.
        let is_to_write = request.is_writable();
        let node = open(request).await.map_err(|error| error.file(&self.name))?;
        if is_to_write && node.is_read_only() {
            node.close().await?;
            return Err(Error::new(ErrorKind::ReadOnly, "Block node is read-only").file(&self.name));
        }
        if let Some(warn) = self.on_warning {
            node.warnings().iter().for_each(|text| warn(text));
        }
        Ok(node)
    }
}
