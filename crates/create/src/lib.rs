// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Creation of images: [`prepare`] checks a request, [`CreatePlan::run`] writes.

mod behind;
mod created;
mod encryption;
mod file;
mod fresh;
pub mod layout;
mod monitor;
pub mod qcow2;
pub mod schema;

use behind::Behind;
use cowshed_image::graph::files_below;
use cowshed_image::node::Preallocation;
use cowshed_image::open::{OpenRequest, Policy, TlsCredentials, resolve_name};
use cowshed_image::secret::Secret;
use cowshed_image::{DRIVERS, open};
use cowshed_storage::{File, FileIdentity, path_of_text};
use cowshed_types::{Error, ErrorKind, LINE_END, Result};
use file::{Durability, Manner};
use fresh::{Fresh, Identity};
use qcow2::{Qcow2CreateOptions, layout_hints, parse_preallocation, round_size};
use schema::{OptionValues, options_of};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

pub use created::{Created, INCOMPLETE};
pub use encryption::{ImageEncryption, NewEncryption, iteration_ms};
pub use file::{NO_EXPORT, write_fresh_qcow2, write_fresh_raw};
pub use monitor::{MonitorRules, Numbers};

/// A request for a new image, in the user's words.
#[derive(Clone, Debug, Default)]
pub struct CreateRequest {
    /// File name (or `file:NAME`).
    pub filename: String,
    /// Format: "raw" or "qcow2".
    pub format: String,
    /// Virtual size in bytes; of the backing file if `None`.
    pub size: Option<u64>,
    /// `-o`: each a `key=value,key=value` list.
    pub options: Vec<String>,
    /// `-b`.
    pub backing_file: Option<String>,
    /// `-F`.
    pub backing_format: Option<String>,
    /// `-u`: the backing file is neither opened nor needed.
    pub backing_unchecked: bool,
    /// The files that may be opened on the backing file's word.
    pub policy: Policy,
    /// Secrets that options can name, by their id (`--object secret`).
    pub secrets: Vec<(String, Secret)>,
    /// TLS credentials that the options of the backing file can name, by their id.
    pub tls: Vec<(String, TlsCredentials)>,
    /// No regular file that is there already is replaced, neither under the image's name nor under one of its other files.
    pub keeps_existing: bool,
    /// The name that the file gets once it is whole, where that is another one: images that name their own file use
    /// this one.
    pub final_name: Option<String>,
    /// A VMDK disk gets the identifiers that VMware's programs write, which QEMU leaves out.
    pub has_vmware_ids: bool,
    /// The files of the extents of a disk that is made in open files, as its descriptor is to name them.
    pub extents: Vec<String>,
}

/// A checked request. [`CreatePlan::summary`] is the line that qemu-img prints before it writes. [`CreatePlan::run`]
/// checks the values together, still before anything is touched.
#[derive(Clone, Debug)]
pub struct CreatePlan {
    path: PathBuf,
    filename: String,
    format: String,
    size: u64,
    values: OptionValues,
    secrets: Vec<(String, Secret)>,
    /// The files that the new image is to be read through to: none of them may become a part of it.
    below: Vec<(FileIdentity, String)>,
    keeps_existing: bool,
    final_name: Option<String>,
    has_vmware_ids: bool,
    extents: Vec<String>,
    /// A fault that shows only while the image is made.
    refused: Option<Error>,
}

/// Checks a request: parses its options, opens the backing file for its size.
pub async fn prepare(request: &CreateRequest) -> Result<CreatePlan> {
    check_request(request, None).await.map_err(|error| error.file(&request.filename))
}

/// As [`prepare`], for an image of `size` bytes, which count more than the request and its options: the target of a
/// copy.
pub async fn prepare_sized(request: &CreateRequest, size: u64) -> Result<CreatePlan> {
    check_request(request, Some(size)).await.map_err(|error| error.file(&request.filename))
}

/// False for a format that can be created and whose images have no backing files.
pub fn takes_backing(format: &str) -> bool {
    options_of(format).is_none_or(|schema| schema.iter().any(|option| option.name == "backing_file"))
}

async fn check_request(request: &CreateRequest, fixed_size: Option<u64>) -> Result<CreatePlan> {
    let schema = options_of(&request.format).ok_or_else(|| {
        Error::unsupported(format!("Unknown file format '{}'", request.format))
            .hint(": qcow2, luks, raw, parallels, qcow, qed, vdi, vhdx, vmdk and vpc can be created")
    })?;
    let mut values = OptionValues::parse(schema, &request.options)?;
    let takes_backing = takes_backing(&request.format);
    for (key, value) in [("backing_file", &request.backing_file), ("backing_fmt", &request.backing_format)] {
        let Some(value) = value else { continue };
        if !takes_backing {
            let what = if key == "backing_file" { "file" } else { "file format" };
            let message = format!("Backing {what} not supported for file format '{}'", request.format);
            return Err(Error::unsupported(message));
        }
        values.set(key, value.clone())?;
    }
    if let Some(size) = fixed_size {
        values.set("size", size.to_string())?;
    } else if let Some(size) = request.size {
        if values.is_given("size") {
            return Err(Error::invalid_argument("The image size must be specified only once").field("size"));
        }
        values.set("size", size.to_string())?;
    }
    let below = match values.get("backing_file").map(str::to_owned) {
        Some(backing) => check_backing(request, &backing, &mut values).await?,
        None => Vec::new(),
    };
    // A header alone has no disk.
    let least = values.switch("detached-header").then_some(0);
    let size = values
        .number("size")
        .or(least)
        .ok_or_else(|| Error::invalid_argument("Image creation needs a size parameter"))?;
    let path = path_of(&request.filename)?;
    let (filename, format) = (request.filename.clone(), request.format.clone());
    let refused = fresh::refused_late(request, &values);
    let (secrets, keeps_existing) = (request.secrets.clone(), request.keeps_existing);
    let final_name = request.final_name.clone();
    let extents = request.extents.clone();
    Ok(CreatePlan {
        path,
        filename,
        format,
        size,
        values,
        secrets,
        below,
        keeps_existing,
        final_name,
        has_vmware_ids: request.has_vmware_ids,
        extents,
        refused,
    })
}

/// The rules for a backing file; without a size the new image takes its. Returns the files below it.
async fn check_backing(
    request: &CreateRequest,
    backing: &str,
    values: &mut OptionValues,
) -> Result<Vec<(FileIdentity, String)>> {
    if backing.is_empty() {
        return Err(Error::invalid_argument("Expected backing file name, got empty string").field("backing_file"));
    }
    if backing == request.filename {
        return Err(Error::invalid_argument(
            "Error: Trying to create an image with the same filename as the backing file",
        )
        .field("backing_file"));
    }
    // No image with such a name can be opened.
    let refused = Policy::default().check_backing(&DRIVERS, backing, &request.filename);
    refused.map_err(|error| error.field("backing_file"))?;
    let format = values.get("backing_fmt").map(str::to_owned);
    let mut below = Vec::new();
    if request.backing_unchecked {
        let name = resolve_name(backing, Some(&request.filename)).unwrap_or_default();
        let path = path_of_name(&name);
        below.extend(FileIdentity::of_path(&path).map(|identity| (identity, name)));
    } else {
        let name = resolve_name(backing, Some(&request.filename))?;
        let opened = OpenRequest::file(&name).format(format.as_deref()).policy(request.policy.clone());
        // A running machine may be writing to it: that is how its next overlay is made.
        let opened = opened.secrets(request.secrets.iter().cloned()).tls_credentials(request.tls.iter().cloned());
        let opened = opened.without_content().without_keys().force_share(true);
        let node = match open(opened.clone()).await {
            // Nothing of its data is needed.
            Err(error) if error.kind() == ErrorKind::NotFound && error.message().contains("the data file of") => {
                open(opened.no_io()).await
            }
            node => node,
        };
        let node = node.map_err(|error| error.context("could not open the backing image"))?;
        let size = node.size();
        let detected = node.driver_name();
        below = files_below(&node);
        node.close().await?;
        if format.is_none() {
            let error = Error::invalid_argument("Backing file specified without backing format");
            return Err(error.hint(format!(" (detected format of {detected})")).qemu(format!(
                "Backing file specified without backing format{LINE_END}Detected format of {detected}."
            )));
        }
        if !values.is_given("size") {
            values.set("size", size.to_string())?;
        }
    }
    if format.is_none() {
        return Err(Error::invalid_argument("Backing file specified without backing format").field("backing_fmt"));
    }
    Ok(below)
}

/// Removes the contents of an open file durably.
async fn clear(file: &File) -> Result<()> {
    // The disk of another image is as long as the new one needs it. Its part of it is zeroed.
    if file.is_device() || file.is_remote() {
        return Ok(());
    }
    file.set_len(0).await?;
    file.sync().await
}

/// The path that a name of a file to be created means.
fn path_of(filename: &str) -> Result<PathBuf> {
    if filename.is_empty() {
        let error = Error::invalid_argument("the file name is empty");
        return Err(error.qemu("Could not create '': No such file or directory"));
    }
    if filename.starts_with("json:") {
        let error = Error::unsupported("an image can't be created under a json: name").file(filename);
        return Err(error.qemu("Unknown protocol 'json'"));
    }
    DRIVERS.check_file_name(filename)?;
    check_device_name(filename)?;
    Ok(path_of_name(filename))
}

/// The path that the name of a file or a device means, with the protocol before it or without.
pub fn path_of_name(name: &str) -> PathBuf {
    let plain = name.strip_prefix("file:").or_else(|| device_name(name).map(|(_, plain)| plain));
    path_of_text(plain.unwrap_or(name))
}

/// The driver and the path of a name with the protocol of devices.
fn device_name(name: &str) -> Option<(&str, &str)> {
    name.split_once(':').filter(|(protocol, _)| *protocol != "file" && DRIVERS.takes_paths(protocol))
}

/// Refuses a name with the protocol of devices that is none of a block device: devices can't be made.
///
/// # Errors
/// Where there is nothing of this name, or a file of another kind.
pub fn check_device_name(name: &str) -> Result<()> {
    let Some((driver, plain)) = device_name(name) else { return Ok(()) };
    let (kind, reason) = match FileIdentity::of_path(&path_of_name(name)) {
        Some(FileIdentity::BlockDevice(_)) => return Ok(()),
        Some(_) => {
            let reason = format!("'{driver}' driver requires '{plain}' to be either a character or block device");
            (ErrorKind::InvalidArgument, reason)
        }
        None => (ErrorKind::NotFound, format!("Could not open '{plain}': No such file or directory")),
    };
    let sentence = format!(
        "Protocol driver '{driver}' does not support creating new images, so an existing image must be selected as \
         the target; however, opening the given target as an existing image failed: {reason}"
    );
    Err(Error::new(kind, format!("only an existing block device is written to: {reason}")).qemu(sentence))
}

impl CreatePlan {
    /// `Formatting 'a.qcow2', fmt=qcow2 cluster_size=65536 …`, as qemu-img prints it.
    pub fn summary(&self) -> String {
        // As qemu-img shows that there is none.
        let none = if self.values.get("size").is_none() { " size=-1" } else { "" };
        format!("Formatting '{}', fmt={}{none}{}", self.filename, self.format, self.values.summary())
    }

    /// Virtual size in bytes, as asked for (images hold whole sectors of 512).
    pub fn size(&self) -> u64 {
        self.size
    }

    /// True when space or metadata is to be allocated at once.
    pub fn is_preallocated(&self) -> bool {
        self.values.get("preallocation").is_some_and(|mode| mode != "off")
    }

    /// True when the new file is to have space of its own: preallocated, or written in place ever after (`nocow`).
    pub fn has_own_space(&self) -> bool {
        self.is_preallocated() || self.values.switch("nocow")
    }

    /// True when persistent dirty bitmaps can be added to the image.
    pub fn takes_bitmaps(&self) -> bool {
        self.format == "qcow2" && !matches!(self.values.get("compat"), Some("0.10" | "v2"))
    }

    /// True when the image is to have an external data file.
    pub fn has_data_file(&self) -> bool {
        self.values.is_given("data_file")
    }

    /// Creates the image, durably. Until its header is written, last and after a barrier, the file is no image. After an
    /// error no file is there that wasn't before.
    pub async fn run(&self) -> Result<Created> {
        self.make(Durability::Synced, None).await
    }

    /// As [`CreatePlan::run`], but a file whose name is new isn't synced. It serves a caller that writes with
    /// `cache=unsafe`: a power cut may leave anything under that name. Old contents are treated as by
    /// [`CreatePlan::run`].
    pub async fn run_unsynced(&self) -> Result<Created> {
        self.make(Durability::Unsynced, None).await
    }

    /// As [`CreatePlan::run`]; the flag `stop` ends it half-way, as an error would.
    pub async fn run_until(&self, stop: Arc<AtomicBool>) -> Result<Created> {
        self.make(Durability::Synced, Some(stop)).await
    }

    /// As [`CreatePlan::run`], into a file that is open for writing and has no other users; its old content is gone.
    pub async fn run_on(&self, file: &File) -> Result<()> {
        self.run_on_with(file, &[]).await
    }

    /// As [`CreatePlan::run_on`], with the other files of the image, open for writing. The data file of a qcow2 image
    /// keeps its contents, and gets the length of the disk. Those of [`CreateRequest::extents`] lose theirs.
    pub async fn run_on_with(&self, file: &File, others: &[&File]) -> Result<()> {
        self.write_to(file, others).await.map_err(|error| error.file(&self.filename))
    }

    /// The outcome of making `file` an image: one that could not become one is empty again.
    async fn clear_on_error(file: &File, image: Result<()>) -> Result<()> {
        if image.is_err()
            && let Err(error) = clear(file).await
        {
            tracing::warn!(%error, "could not empty an unfinished image");
        }
        image
    }

    /// Refuses a file that the new image is to be read through to.
    pub fn check_apart(&self, identity: Option<FileIdentity>) -> Result<()> {
        match self.below.iter().find(|(known, _)| Some(*known) == identity) {
            Some((_, name)) => {
                let message = format!("this is the file '{name}', which the backing file needs: nothing was changed");
                Err(Error::invalid_argument(message))
            }
            None => Ok(()),
        }
    }

    /// Refuses a name whose file must stay: the new image is to be read through to it, or the request keeps old files.
    fn check_replaced(&self, path: &Path) -> Result<()> {
        self.check_apart(FileIdentity::of_path(path))?;
        match self.keeps_existing && path.is_file() {
            true => Err(Error::invalid_argument("the file exists already").hint("; --force overwrites it")),
            false => Ok(()),
        }
    }

    fn identity(&self) -> Identity<'_> {
        let last = self.final_name.as_deref().unwrap_or(&self.filename);
        Identity { now: &self.filename, last, has_vmware_ids: self.has_vmware_ids }
    }

    async fn write_to(&self, file: &File, others: &[&File]) -> Result<()> {
        self.check_apart(file.identity())?;
        file.check_single_use()?;
        if self.format == "luks" {
            let encryption = self.luks_encryption()?;
            let (size, space) = (round_size(self.size)?, self.luks_space()?);
            // The length may be wrong, and then nothing has changed.
            if file.is_device() || file.is_remote() {
                Behind::Cut.cut(file, encryption.file_bytes(size, self.is_detached())).await?;
            }
            clear(file).await?;
            let image = file::write_fresh_luks(file, &encryption, size, space, self.is_detached()).await;
            return Self::clear_on_error(file, image).await;
        }
        if let Some(format) = fresh::find(&self.format) {
            let fresh = format.lay_out(self.identity(), self.size, &self.values, Some(&self.extents)).await?;
            return self.write_parts(file, others, &fresh).await;
        }
        let data_file = others.first().copied();
        if self.format != "qcow2" || self.has_data_file() != data_file.is_some() {
            let message = "only qcow2 images, with their data file, and LUKS volumes are created in an open file";
            return Err(Error::unsupported(message));
        }
        let options = self.qcow2_options()?;
        // A file keeps its contents if the image can't be laid out.
        options.check()?;
        let layout = layout::FreshLayout::of(&options)?;
        layout.header(&options)?;
        if file.is_device() {
            Behind::Kept.cut(file, layout.file_bytes).await?;
        }
        if let Some(data_file) = data_file {
            self.check_apart(data_file.identity())?;
            data_file.check_single_use()?;
            file::fit_data_file(data_file, &options).await?;
        }
        clear(file).await?;
        let image = write_fresh_qcow2(file, &options).await;
        Self::clear_on_error(file, image).await
    }

    /// Makes an image of one file or of several. Its own comes last, and names the others.
    async fn write_parts(&self, file: &File, others: &[&File], fresh: &Fresh) -> Result<()> {
        let files = || others.iter().copied().zip(&fresh.parts);
        if others.len() != fresh.parts.len() {
            return Err(Error::internal("an image with another number of files than it was laid out for"));
        }
        for (part, _) in files() {
            self.check_apart(part.identity())?;
            part.check_single_use()?;
        }
        // The length may be wrong, and then nothing has changed: files become longer before another one becomes shorter.
        let parts = files().map(|(part, (_, layout))| (part, layout.len, Behind::Cut));
        let mut lengths: Vec<_> = parts.chain([(file, fresh.image.len, fresh.behind)]).collect();
        lengths.retain(|(file, _, _)| file.is_device() || file.is_remote());
        for (file, len, behind) in &lengths {
            behind.check(file, *len)?;
        }
        lengths.sort_by_key(|(file, len, _)| file.len() > *len);
        for (file, len, behind) in lengths {
            behind.cut(file, len).await?;
        }
        for one in others.iter().copied().chain([file]) {
            clear(one).await?;
        }
        for (part, (_, layout)) in files() {
            Self::clear_on_error(part, fresh::write(part, layout).await).await?;
        }
        let image = Self::clear_on_error(file, fresh::write(file, &fresh.image).await).await;
        if image.is_err() {
            for (part, _) in files() {
                clear(part).await?;
            }
        }
        image
    }

    fn qcow2_options(&self) -> Result<Qcow2CreateOptions> {
        Qcow2CreateOptions::from_values(self.size, &self.values)?.with_secrets(&self.secrets)
    }

    fn luks_encryption(&self) -> Result<NewEncryption> {
        NewEncryption::from_values(&self.values, "")?.with_secrets("key-secret", &self.secrets)
    }

    fn is_detached(&self) -> bool {
        self.values.switch("detached-header")
    }

    /// Of `luks`, whose metadata is written in any case.
    fn luks_space(&self) -> Result<Preallocation> {
        match self.values.get("preallocation") {
            Some("metadata") => Ok(Preallocation::Off),
            _ => self.space(),
        }
    }

    /// Of formats without metadata of their own.
    fn space(&self) -> Result<Preallocation> {
        let given = self.values.get("preallocation").unwrap_or("off");
        let preallocation =
            parse_preallocation(given).map_err(|error| error.qemu(format!("invalid parameter value: {given}")))?;
        if preallocation == Preallocation::Metadata {
            let message = format!("Unsupported preallocation mode: metadata (a {} image has no metadata)", self.format);
            return Err(Error::unsupported(message)
                .field("preallocation")
                .qemu("Unsupported preallocation mode: metadata"));
        }
        Ok(preallocation)
    }

    async fn make(&self, durability: Durability, stop: Option<Arc<AtomicBool>>) -> Result<Created> {
        self.write(&Manner { durability, stop }).await.map_err(|error| error.file(&self.filename))
    }

    async fn write(&self, how: &Manner) -> Result<Created> {
        if let Some(error) = &self.refused {
            return Err(error.clone());
        }
        self.check_replaced(&self.path)?;
        if let Some(name) = self.values.get("data_file") {
            let path = path_of_name(name);
            let checked = match self.values.switch("keep_data_file") {
                true => self.check_apart(FileIdentity::of_path(&path)),
                false => self.check_replaced(&path),
            };
            checked.map_err(|error| error.file(name))?;
        }
        match self.format.as_str() {
            "qcow2" => file::create_qcow2(&self.path, &self.qcow2_options()?, how).await,
            "luks" => {
                let (encryption, size) = (self.luks_encryption()?, round_size(self.size)?);
                let (space, hints) = (self.luks_space()?, layout_hints(&self.values)?);
                file::create_luks(&self.path, &encryption, size, space, self.is_detached(), hints, how).await
            }
            name if let Some(format) = fresh::find(name) => {
                self.space()?;
                let check = |path: &Path| self.check_replaced(path);
                format.create(self.identity(), self.size, &self.values, (how, &check)).await
            }
            _ => {
                let size = round_size(self.size)?;
                file::create_raw(&self.path, size, self.space()?, layout_hints(&self.values)?, how).await
            }
        }
    }

    /// Options that open the new image again, besides its name and format: the id of its secret.
    pub fn opening_options(&self) -> Vec<(&'static str, String)> {
        let key = if self.format == "luks" { "key-secret" } else { "encrypt.key-secret" };
        self.values.get(key).map(|id| (key, id.to_owned())).into_iter().collect()
    }
}
