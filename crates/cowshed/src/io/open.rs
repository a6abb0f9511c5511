// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Opening and closing the shell's image.

use super::arguments::Arguments;
use super::outcome::{CommandFailed, Done};
use super::{Shell, background};
use crate::commands::arguments::denies_sharing;
use crate::invocation::Persona;
use crate::output::{Failure, warning};
use cowshed_create::CreateRequest;
use cowshed_image::DRIVERS;
use cowshed_image::graph::Graph;
use cowshed_image::node::ChildRole;
use cowshed_image::open::{CACHE_MODES, Policy};
use cowshed_image::options::{BlockdevOptions, short_forms};
use cowshed_image::secret::Secret;
use cowshed_image::{Node, OpenRequest, TlsCredentials, open as open_image};
use cowshed_types::{Error, ErrorKind, Result};
use serde_json::Value;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;

/// The filter that keeps data read from a backing file.
const COPY_ON_READ: &str = "copy-on-read";

/// The image to open, and the way to do it.
#[derive(Clone, Debug, Default)]
pub struct OpenSpec {
    /// A file name, or with `image_opts` an option list.
    pub path: Option<String>,
    /// `path` is an option list.
    pub image_opts: bool,
    /// The format; probed when `None`.
    pub format: Option<String>,
    /// Options of the driver.
    pub options: Option<BlockdevOptions>,
    /// The image is opened for reading only.
    pub read_only: bool,
    /// With a temporary overlay that takes the writes.
    pub snapshot: bool,
    /// Cache mode.
    pub cache: Option<String>,
    /// Discards: ignore, off, unmap, on.
    pub discard: Option<String>,
    /// The engine of the I/O.
    pub aio: Option<String>,
    /// Share with writers.
    pub force_share: bool,
    /// Keep data read from the backing file.
    pub copy_on_read: bool,
    /// The rights that the image has on this process.
    pub policy: Policy,
    /// `--object secret`, by their id.
    pub secrets: Vec<(String, Secret)>,
    /// `--object tls-creds-x509`, by their id.
    pub tls: Vec<(String, TlsCredentials)>,
    /// The graph with the throttle groups.
    pub graph: Option<Arc<Graph>>,
}

/// An open image.
pub struct OpenImage {
    /// The image.
    pub node: Arc<Node>,
    pub(super) spec: OpenSpec,
}

impl OpenImage {
    /// The image itself, below a filter.
    pub fn image(&self) -> Arc<Node> {
        let below = (self.node.driver_name() == COPY_ON_READ).then(|| self.node.child(ChildRole::File)).flatten();
        below.unwrap_or_else(|| Arc::clone(&self.node))
    }
}

impl OpenSpec {
    /// Refuses words that no option knows.
    pub(super) fn check(&self) -> std::result::Result<(), CommandFailed> {
        let invalid = |what: &str, word: &str| Err(CommandFailed::complaint(format!("Invalid {what} option: {word}")));
        match (self.cache.as_deref(), self.discard.as_deref(), self.aio.as_deref()) {
            (Some(word), _, _) if !CACHE_MODES.contains(&word) => invalid("cache", word),
            (_, Some(word), _) if !["ignore", "off", "unmap", "on"].contains(&word) => invalid("discard", word),
            (_, _, Some(word)) if !["threads", "native", "io_uring"].contains(&word) => invalid("aio", word),
            _ => Ok(()),
        }
    }

    /// True where its options set anything but `force-share=on` of sharing.
    fn denies_sharing(&self) -> bool {
        let listed = self.path.as_deref().filter(|_| self.image_opts).map(BlockdevOptions::from_keyval);
        let listed = listed.and_then(Result::ok);
        [&self.options, &listed].into_iter().flatten().any(denies_sharing)
    }

    /// The image's name in messages.
    fn name(&self) -> String {
        self.path.clone().unwrap_or_else(|| match &self.options {
            Some(options) => options.to_json_name(),
            None => "(no name)".to_owned(),
        })
    }

    /// The options as a tree, the format included; `None` where the name has them all.
    fn tree(&self) -> Result<Option<BlockdevOptions>> {
        let path = self.path.as_deref().unwrap_or_default();
        let is_plain = self.options.is_none() && self.aio.is_none() && !self.snapshot && !self.copy_on_read;
        let mut tree = match path {
            _ if self.image_opts => options_of(path)?,
            _ if is_plain => return Ok(None),
            "" => self.options.clone().unwrap_or_default(),
            name => DRIVERS.options_with_name(self.options.clone().unwrap_or_default(), name)?,
        };
        if let Some(format) = self.format.as_deref().filter(|_| tree.get("driver").is_none()) {
            tree.insert("driver", format);
        }
        if let Some(aio) = &self.aio {
            let is_cached = !matches!(self.cache.as_deref(), Some("none" | "off" | "directsync"));
            if tree.set_aio(aio) && aio == "native" && is_cached {
                let message = "aio=native was specified, but it requires cache.direct=on, which was not specified.";
                return Err(Error::invalid_argument(message));
            }
        }
        Ok(Some(tree))
    }

    fn request(&self, tree: Option<BlockdevOptions>) -> Result<OpenRequest> {
        let request = match tree {
            Some(tree) => OpenRequest::options(tree),
            None => OpenRequest::file(self.path.clone().unwrap_or_default()).format(self.format.as_deref()),
        };
        let unmaps = !matches!(self.discard.as_deref(), Some("ignore" | "off"));
        let request =
            request.writable(!self.read_only).force_share(self.force_share).discard(unmaps).policy(self.policy.clone());
        let request = request.secrets(self.secrets.iter().cloned()).tls_credentials(self.tls.iter().cloned());
        let request = request.sharing_raw();
        let request = match &self.graph {
            Some(graph) => request.graph(Arc::clone(graph)),
            None => request,
        };
        // Writes are durable when the shell reports them, unless another mode is asked for.
        request.cache(self.cache.as_deref().unwrap_or("writethrough"))
    }
}

/// The options of a list. QEMU warns of those without a value.
pub(super) fn options_of(text: &str) -> Result<BlockdevOptions> {
    short_forms(text, false).iter().for_each(|text| warning::print(text));
    BlockdevOptions::from_keyval(text)
}

/// Opens an image.
async fn open_node(spec: &OpenSpec) -> Result<Arc<Node>> {
    // With -s the writer is the overlay, and the image below it is shared.
    if spec.force_share && !spec.read_only && !spec.snapshot {
        return Err(Error::invalid_argument("force-share=on can only be used with read-only images"));
    }
    if spec.copy_on_read && spec.read_only {
        return Err(Error::invalid_argument("Can't use copy-on-read on read-only device"));
    }
    let tree = spec.tree()?;
    let on = |value: &Value| value.as_bool().or_else(|| Some(value.as_str()? == "on"));
    if tree.as_ref().and_then(|tree| tree.get("read-only")).and_then(on) == Some(true) {
        if spec.copy_on_read {
            return Err(Error::invalid_argument("Can't use copy-on-read on read-only device"));
        }
        // The overlay would need a writer below it, as in QEMU.
        if spec.snapshot {
            return Err(Error::new(ErrorKind::ReadOnly, "Block node is read-only"));
        }
    }
    match tree {
        tree if spec.snapshot => open_overlay(spec, tree).await,
        Some(tree) if spec.copy_on_read => {
            let tree = with_driver(spec, tree).await?;
            open_image(spec.request(Some(keeping_what_is_read(tree)))?).await
        }
        tree => open_image(spec.request(tree)?).await,
    }
}

/// As [`open_node`]. A disk that options keep from being written is refused where it is opened for that.
async fn open_to_use(spec: &OpenSpec) -> Result<Arc<Node>> {
    let node = open_node(spec).await?;
    if node.is_read_only() && !spec.read_only {
        node.close().await?;
        return Err(Error::new(ErrorKind::ReadOnly, "Block node is read-only"));
    }
    Ok(node)
}

/// The options with the filter above. An image without backing file has nothing to keep.
fn keeping_what_is_read(tree: BlockdevOptions) -> BlockdevOptions {
    match tree.text("driver") {
        // Guessed to be raw: that it was guessed stays known.
        None => tree,
        Some(_) => BlockdevOptions::new().with("driver", COPY_ON_READ).with("file", Value::from(tree)),
    }
}

/// The options with the format, which below a filter isn't guessed; without one where it is guessed to be raw.
async fn with_driver(spec: &OpenSpec, tree: BlockdevOptions) -> Result<BlockdevOptions> {
    if tree.get("driver").is_some() {
        return Ok(tree);
    }
    let reading = OpenSpec { read_only: true, ..spec.clone() };
    let node = open_image(reading.request(Some(tree.clone()))?).await?;
    let driver = node.driver_name();
    node.close().await?;
    Ok(if driver == "raw" { tree } else { tree.with("driver", driver) })
}

/// A temporary overlay over the image. Its file has no name any more when this returns.
async fn open_overlay(spec: &OpenSpec, base: Option<BlockdevOptions>) -> Result<Arc<Node>> {
    // A server may serve one client only: the overlay is put on the open image.
    let spec = OpenSpec { graph: Some(spec.graph.clone().unwrap_or_else(|| Graph::new(&DRIVERS))), ..spec.clone() };
    let reading = OpenSpec { read_only: true, ..spec.clone() };
    let base = open_image(reading.request(Some(base.unwrap_or_default()))?).await?;
    match overlay_over(&spec, &base).await {
        Ok(overlay) => Ok(overlay),
        Err(error) => base.close().await.and(Err(error)),
    }
}

async fn overlay_over(spec: &OpenSpec, base: &Node) -> Result<Arc<Node>> {
    let mut folder = tempfile::Builder::new();
    let folder = folder.prefix("cowshed-overlay-").permissions(Permissions::from_mode(0o700)).tempdir();
    let folder = folder.map_err(|error| Error::io(&error, "could not make a folder for the overlay"))?;
    let path = folder.path().join("overlay.qcow2").display().to_string();
    let request = CreateRequest {
        filename: path.clone(),
        format: "qcow2".to_owned(),
        size: Some(base.size()),
        ..CreateRequest::default()
    };
    cowshed_create::prepare(&request).await?.run().await?;
    let file = BlockdevOptions::new().with("driver", "file").with("filename", path);
    let tree =
        BlockdevOptions::new().with("driver", "qcow2").with("file", Value::from(file)).with("backing", base.name());
    // The file isn't read after a crash.
    let cache = Some(spec.cache.clone().unwrap_or_else(|| "unsafe".to_owned()));
    let spec = OpenSpec { cache, force_share: false, ..spec.clone() };
    let tree = if spec.copy_on_read { keeping_what_is_read(tree) } else { tree };
    open_image(spec.request(Some(tree))?).await
}

/// Opens the image of the shell; there must be none.
pub(super) async fn open(shell: &mut Shell, spec: OpenSpec) -> Done {
    spec.check()?;
    if shell.opened.is_some() {
        return Err(CommandFailed::complaint("file open already, try 'help close'"));
    }
    if spec.force_share && spec.denies_sharing() {
        return Err(CommandFailed::complaint("-U conflicts with image options"));
    }
    let name = spec.name();
    let is_named = spec.path.is_some() && !spec.image_opts;
    let node = open_to_use(&spec).await.map_err(|error| refusal(shell, &name, is_named, &error))?;
    node.warnings().iter().for_each(|text| warning::print(text));
    shell.opened = Some(OpenImage { node, spec });
    Ok(())
}

fn refusal(shell: &Shell, name: &str, named: bool, error: &Error) -> CommandFailed {
    match shell.manner.terse {
        true => {
            let reason = Failure::open(Persona::QemuImg, name, error).message;
            // Unlike qemu-img it has no frame of its own around the reason.
            let reason = reason.strip_prefix(&format!("Could not open '{name}': ")).unwrap_or(&reason);
            // The reason names the files of image options.
            let device = if named { format!(" device {name}") } else { String::new() };
            CommandFailed::complaint(format!("can't open{device}: {reason}"))
        }
        false => CommandFailed::complaint(Failure::about(Persona::Cowshed, name, error).message),
    }
}

pub(super) async fn open_command(shell: &mut Shell, arguments: Arguments) -> Done {
    let path = match &arguments.operands[..] {
        [] => None,
        [path] => Some(path.clone()),
        _ => return Err(CommandFailed::usage()),
    };
    let options = match arguments.value('o') {
        None => None,
        Some(text) => Some(options_of(text).map_err(|error| CommandFailed::complaint(error.to_string()))?),
    };
    if path.is_none() && options.is_none() {
        return Err(CommandFailed::usage());
    }
    let text = |flag| arguments.value(flag).map(str::to_owned);
    let spec = OpenSpec {
        path,
        options,
        read_only: arguments.has('r'),
        snapshot: arguments.has('s'),
        cache: if arguments.has('n') { Some("none".to_owned()) } else { text('t') },
        discard: text('d'),
        aio: if arguments.has('k') { Some("native".to_owned()) } else { text('i') },
        force_share: arguments.has('U'),
        copy_on_read: arguments.has('C'),
        ..OpenSpec::default()
    };
    open(shell, spec).await
}

/// Waits for requests in the background, and closes the image where there is one.
pub(super) async fn close(shell: &mut Shell) -> Done {
    super::faults::let_go(shell);
    background::wait_for_all(shell).await;
    let Some(image) = shell.opened.take() else { return Ok(()) };
    let closed = image.node.close().await;
    // Its corruption was reported when it was found.
    if image.node.is_corrupt() && shell.manner.terse {
        return Ok(());
    }
    closed.map_err(|error| CommandFailed::complaint(format!("could not close the image: {error}")))
}
