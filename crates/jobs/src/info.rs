// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Facts about an image that need no reading of its data.

use crate::layer::{Qcow2Layer, qcow2_layer};
use crate::limits::BlockLimits;
use crate::{ImageSpec, JobHandle};
use cowshed_image::graph::only_child;
use cowshed_image::node::{ChildRole, Description, LocalFuture};
use cowshed_image::open::resolve_name;
use cowshed_image::{DRIVERS, Node};
use cowshed_layout::luks::{KeySlot, LuksHeader};
use cowshed_layout::qcow2::Snapshot;
use cowshed_layout::qcow2::bitmap::BitmapEntry;
use cowshed_storage::{FileIdentity, path_of_text};
use cowshed_types::{Compression, Error, ErrorKind, Result};
use serde_json::{Map, Value, json};

/// The image to look at, and the extent.
#[derive(Clone, Debug)]
pub struct InfoOptions {
    /// The image.
    pub image: ImageSpec,
    /// `--backing-chain`: the layers below too.
    pub backing_chain: bool,
    /// `--limits`: alignments and sizes of requests.
    pub limits: bool,
}

/// One layer; `Serialize` writes qemu-img's JSON keys in its order.
#[derive(Clone, Debug, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct ImageInfo {
    /// Limits of requests, where they were asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limits: Option<BlockLimits>,
    /// The file and data-file nodes below (QEMU 8 and later).
    pub children: Vec<ChildInfo>,
    /// Internal snapshots.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub snapshots: Vec<SnapshotInfo>,
    /// Format of the backing file as the header names it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backing_filename_format: Option<String>,
    /// Virtual size, bytes.
    pub virtual_size: u64,
    /// File name.
    pub filename: String,
    /// Cluster size, bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cluster_size: Option<u64>,
    /// Format.
    pub format: String,
    /// Space taken on the disk, bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub actual_size: Option<u64>,
    /// The properties that only this format has: `{"type": "qcow2", "data": {…}}`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub format_specific: Option<Value>,
    /// Encrypted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub encrypted: Option<bool>,
    /// Backing file as it is found from here.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub full_backing_filename: Option<String>,
    /// Backing file as the header names it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backing_filename: Option<String>,
    /// Not closed properly; none where it can't be asked: disks of servers, null disks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dirty_flag: Option<bool>,
    /// Warnings about the parts that couldn't be read and are left out, in words.
    #[serde(skip)]
    pub warnings: Vec<String>,
}

/// A child node.
#[derive(Clone, Debug, serde::Serialize)]
pub struct ChildInfo {
    /// Role: "file", "data-file", …
    pub name: String,
    /// The child's own information.
    pub info: Box<ImageInfo>,
}

/// An internal snapshot.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct SnapshotInfo {
    /// Number of instructions at the time, with record and replay.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub icount: Option<u64>,
    /// Guest clock, nanoseconds part.
    pub vm_clock_nsec: u64,
    /// Name.
    pub name: String,
    /// Seconds of the creation time.
    pub date_sec: u64,
    /// Nanoseconds of the creation time.
    pub date_nsec: u64,
    /// Guest clock, seconds part.
    pub vm_clock_sec: u64,
    /// Unique id.
    pub id: String,
    /// Bytes of VM state.
    pub vm_state_size: u64,
}

/// Most layers of a chain that are looked at.
const MAX_CHAIN_DEPTH: usize = 200;

impl ImageInfo {
    /// Adds the limits of the node that this is about, and of its children.
    fn with_limits(mut self, node: &Node) -> Self {
        self.limits = Some(BlockLimits::of(node));
        for child in &mut self.children {
            let below = node.children().into_iter().find(|below| below.role.name() == child.name);
            if let Some(below) = below {
                *child.info = child.info.as_ref().clone().with_limits(&below.node);
            }
        }
        self
    }
}

/// Looks: one layer, or with `backing_chain` all, the top first.
pub async fn run(options: &InfoOptions, job: &JobHandle) -> Result<Vec<ImageInfo>> {
    run_telling(options, job, &|_| ()).await
}

/// As [`run`]; passes the name of each image to `tell` before it is opened.
pub async fn run_telling(options: &InfoOptions, job: &JobHandle, tell: &dyn Fn(&str)) -> Result<Vec<ImageInfo>> {
    let mut layers: Vec<ImageInfo> = Vec::new();
    // Names of one file can differ, and grow with each turn of a loop.
    let mut files: Vec<FileIdentity> = Vec::new();
    let mut next = Some(options.image.clone());
    while let Some(spec) = next.take() {
        job.pause_point().await?;
        tell(&spec.name);
        // The backing file isn't opened with its overlay: a missing one must not hide the overlay's own facts.
        let node = spec.open(spec.request()?.no_backing().no_io()).await?;
        let info = image_info(&node).await.map(|info| if options.limits { info.with_limits(&node) } else { info });
        let is_difference = node.description().is_some_and(|known| known.identity.is_some());
        let names_parents = ["backing", "parents"].iter().any(|key| node.options().get(key).is_some());
        let closed = node.close().await;
        let mut info = info?;
        closed?;
        // The header doesn't name the parent: the options say where it is.
        if options.backing_chain && is_difference && names_parents && info.full_backing_filename.is_none() {
            let below = parents(&spec, options).await?;
            name_backing(&mut info, below.first());
            layers.push(info);
            layers.extend(below);
            break;
        }
        if options.backing_chain && is_difference && info.full_backing_filename.is_some() {
            // A parent of another content is refused, as by those that read the disk.
            spec.open(spec.request()?.no_io()).await?.close().await?;
        }
        if let Some(warn) = spec.on_warning {
            info.warnings.iter().for_each(|text| warn(text));
        }
        if options.backing_chain
            && let Some(name) = &info.full_backing_filename
        {
            files.extend(FileIdentity::of_path(&path_of_text(&info.filename)));
            let is_known = FileIdentity::of_path(&path_of_text(name)).is_some_and(|file| files.contains(&file));
            if is_known || layers.iter().any(|layer| layer.filename == *name) {
                let error = Error::invalid_argument("the backing chain loops").file(name.clone());
                return Err(error.qemu(format!("Backing file '{name}' creates an infinite loop.")));
            }
            if layers.len() + 1 >= MAX_CHAIN_DEPTH {
                let message = format!("the backing chain is longer than {MAX_CHAIN_DEPTH} images");
                return Err(Error::invalid_argument(message).file(name.clone()));
            }
            spec.policy.check_backing(&DRIVERS, name, &info.filename)?;
            next = Some(ImageSpec {
                name: name.clone(),
                format: info.backing_filename_format.clone(),
                image_opts: false,
                ..spec.clone()
            });
        }
        layers.push(info);
    }
    Ok(layers)
}

/// The layers below a difference whose parent is found by its identifier.
async fn parents(spec: &ImageSpec, options: &InfoOptions) -> Result<Vec<ImageInfo>> {
    let top = spec.open(spec.request()?.no_io()).await?;
    let mut layers: Vec<ImageInfo> = Vec::new();
    let mut next = top.backing();
    let mut result = Ok(());
    while let Some(node) = next.take() {
        match image_info(&node).await {
            Ok(info) => {
                let mut info = if options.limits { info.with_limits(&node) } else { info };
                // The file, as the user finds it, and not the options that lead to its own parent.
                info.filename = node.filename();
                if let Some(above) = layers.last_mut() {
                    name_backing(above, Some(&info));
                }
                layers.push(info);
                next = node.backing();
            }
            Err(error) => result = Err(error),
        }
    }
    let closed = top.close().await;
    result.and(closed).map(|()| layers)
}

/// Says on which layer one stands whose header doesn't name it.
fn name_backing(info: &mut ImageInfo, below: Option<&ImageInfo>) {
    let Some(below) = below.filter(|_| info.full_backing_filename.is_none()) else { return };
    info.full_backing_filename = Some(below.filename.clone());
    info.backing_filename = Some(below.filename.clone());
    info.backing_filename_format = Some(below.format.clone());
}

/// The description of an open image.
pub fn image_info(node: &Node) -> LocalFuture<'_, Result<ImageInfo>> {
    Box::pin(whole_info(node, false))
}

/// `is_child`: the image of a child is listed with its backing files.
async fn whole_info(node: &Node, is_child: bool) -> Result<ImageInfo> {
    let mut info = node_info(node, is_child).await?;
    if let Some(description) = node.description() {
        describe(&mut info, description, &node.filename())?;
        info.encrypted = node.is_encrypted().then_some(true);
    }
    if let Some(luks) = node.encrypted_volume() {
        info.encrypted = Some(true);
        let mut data = luks_info(Some(luks.header().await?), luks.has_detached_header());
        if let Value::Object(data) = &mut data {
            data.remove("format");
        }
        info.format_specific = Some(json!({ "type": "luks", "data": data }));
    }
    let Some(layer) = qcow2_layer(node) else { return Ok(info) };
    let header = &layer.header;
    info.cluster_size = Some(header.cluster_size());
    info.encrypted = (header.crypt_method != 0).then_some(true);
    info.dirty_flag = Some(header.is_dirty());
    if let Some(name) = header.backing_file_name() {
        info.backing_filename_format = header.backing_format().map(|format| format.into_owned());
        info.full_backing_filename = Some(resolve_name(&name, Some(&node.filename()))?);
        info.backing_filename = Some(name.into_owned());
    }
    match layer.snapshots().await {
        Ok(snapshots) => info.snapshots = snapshots.iter().map(SnapshotInfo::from).collect(),
        Err(error) if error.kind() == ErrorKind::InvalidImage => info.warnings.push(error.to_string()),
        Err(error) => return Err(error),
    }
    info.format_specific = Some(json!({ "type": "qcow2", "data": qcow2_specific(&layer).await? }));
    Ok(info)
}

/// Fills in the description of an image of a read-only format.
fn describe(info: &mut ImageInfo, description: Description, path: &str) -> Result<()> {
    info.cluster_size = description.cluster_bytes;
    info.dirty_flag = (!description.only_sizes).then_some(false);
    info.format_specific = Some(description.specific).filter(|specific| !specific.is_null());
    if let Some(name) = description.backing_name {
        info.backing_filename_format = description.backing_format.map(str::to_owned);
        info.full_backing_filename = Some(resolve_name(&name, Some(path))?);
        info.backing_filename = Some(name);
    }
    Ok(())
}

/// The information that every node has.
async fn node_info(node: &Node, is_child: bool) -> Result<ImageInfo> {
    let mut children = Vec::new();
    let mut actual_size = match node.file().map(|file| file.allocated_bytes()) {
        // A server doesn't report the space of an export on its disk.
        Some(Err(error)) if error.kind() == ErrorKind::Unsupported => None,
        size => size.transpose()?,
    };
    // The last one first, as QEMU lists them.
    for child in node.children().into_iter().rev() {
        // The layers of the root's chain are listed one by one; the data file is part of the format's own information.
        let is_listed = match child.role {
            ChildRole::Backing => is_child,
            role => !matches!(role, ChildRole::DataFile | ChildRole::Header | ChildRole::Target),
        };
        if is_listed {
            let info: LocalFuture<'_, _> = Box::pin(whole_info(&child.node, true));
            let info = Box::new(info.await?);
            let counts = matches!(child.role, ChildRole::File | ChildRole::Extent(_) | ChildRole::Replica(_));
            let counts = counts && node.file().is_none();
            if let Some(bytes) = info.actual_size.filter(|_| counts) {
                actual_size = Some(actual_size.unwrap_or(0) + bytes);
            }
            children.push(ChildInfo { name: child.role.name(), info });
        }
    }
    let format = node.driver_name();
    // As in QEMU, which asks no further there.
    let has_faults = |node: &Node| node.child(ChildRole::Image).is_some();
    let is_asked = !has_faults(node) && node.child(ChildRole::File).is_none_or(|file| !has_faults(&file));
    let actual_size = actual_size.filter(|_| is_asked);
    // Raw nodes and filters report the facts of the node below them. A filter's clusters are those of the image below
    // it.
    let below = if has_faults(node) { "image" } else { "file" };
    let passes = node.is_filter() || has_faults(node) || node.is_raw();
    let cluster_size = children.iter().find(|child| child.name == below && passes);
    let cluster_size = cluster_size.and_then(|child| child.info.cluster_size);
    let has_dirty_flag = match children.iter().find(|child| ["file", "image"].contains(&child.name.as_str())) {
        Some(below) => below.info.dirty_flag.is_some() && !node.driver().shows_past(),
        None => node.is_on_host() || node.child(ChildRole::Test).is_some(),
    };
    let snapshots = children.first().filter(|_| only_child(node).is_some()).map(|child| child.info.snapshots.clone());
    Ok(ImageInfo {
        limits: None,
        children,
        snapshots: snapshots.unwrap_or_default(),
        backing_filename_format: None,
        virtual_size: node.size(),
        filename: node.reference(),
        cluster_size,
        format: format.to_owned(),
        actual_size,
        format_specific: node.is_on_host().then(|| json!({ "type": "file", "data": {} })),
        encrypted: None,
        full_backing_filename: None,
        backing_filename: None,
        dirty_flag: has_dirty_flag.then_some(false),
        warnings: Vec::new(),
    })
}

async fn qcow2_specific(layer: &Qcow2Layer) -> Result<Value> {
    let header = &layer.header;
    let compression = match header.compression() {
        Compression::Zlib => "zlib",
        Compression::Zstd => "zstd",
    };
    let mut data = Map::new();
    let mut put = |key: &str, value: Value| data.insert(key.to_owned(), value);
    let v3 = header.version >= 3;
    put("compat", json!(if v3 { "1.1" } else { "0.10" }));
    put("compression-type", json!(compression));
    if v3 {
        put("lazy-refcounts", json!(header.has_lazy_refcounts()));
        let bitmaps: Vec<Value> = layer.bitmaps().await?.iter().map(bitmap_info).collect();
        if !bitmaps.is_empty() {
            put("bitmaps", json!(bitmaps));
        }
    }
    put("refcount-bits", json!(1u32 << header.refcount_order));
    match header.crypt_method {
        0 => {}
        1 => drop(put("encrypt", json!({ "format": "aes" }))),
        _ => drop(put("encrypt", luks_info(layer.luks_header().await?, false))),
    }
    if let Some(name) = header.data_file_name() {
        put("data-file", json!(name));
    }
    if header.has_data_file() {
        put("data-file-raw", json!(header.is_data_file_raw()));
    }
    if v3 {
        put("corrupt", json!(header.is_corrupt()));
        put("extended-l2", json!(header.has_extended_l2()));
    }
    Ok(Value::Object(data))
}

fn luks_info(header: Option<LuksHeader>, is_detached: bool) -> Value {
    let mut info = Map::new();
    info.insert("format".to_owned(), json!("luks"));
    let Some(header) = header else { return Value::Object(info) };
    let mut put = |key: &str, value: Value| info.insert(key.to_owned(), value);
    let (mode, generator, generator_hash) = header.mode_parts();
    put("cipher-alg", json!(header.cipher_with_width()));
    put("cipher-mode", json!(mode));
    if let Some(generator) = generator {
        put("ivgen-alg", json!(generator));
    }
    if let Some(hash) = generator_hash.filter(|_| generator == Some("essiv")) {
        put("ivgen-hash-alg", json!(hash));
    }
    put("hash-alg", json!(header.hash));
    put("detached-header", json!(is_detached));
    put("payload-offset", json!(header.payload_offset));
    put("master-key-iters", json!(header.master_key_iterations));
    put("uuid", json!(header.uuid));
    let slot = |slot: &KeySlot| match slot.active {
        true => json!({
            "active": true, "iters": slot.iterations, "key-offset": slot.key_offset, "stripes": slot.stripes
        }),
        false => json!({ "active": false, "key-offset": slot.key_offset }),
    };
    put("slots", Value::Array(header.slots.iter().map(slot).collect()));
    Value::Object(info)
}

fn bitmap_info(bitmap: &BitmapEntry) -> Value {
    let flag = |bit: u32, name| (bitmap.flags & bit != 0).then_some(name);
    let flags: Vec<&str> = [flag(1, "in-use"), flag(2, "auto")].into_iter().flatten().collect();
    json!({
        "flags": flags,
        "name": String::from_utf8_lossy(&bitmap.name),
        "granularity": 1u64.checked_shl(u32::from(bitmap.granularity_bits)).unwrap_or(0),
    })
}

impl From<&Snapshot> for SnapshotInfo {
    fn from(snapshot: &Snapshot) -> Self {
        const SECOND_NS: u64 = 1_000_000_000;
        SnapshotInfo {
            icount: snapshot.icount(),
            vm_clock_nsec: snapshot.vm_clock_ns % SECOND_NS,
            name: String::from_utf8_lossy(&snapshot.name).into_owned(),
            date_sec: u64::from(snapshot.date_s),
            date_nsec: u64::from(snapshot.date_ns),
            vm_clock_sec: snapshot.vm_clock_ns / SECOND_NS,
            id: String::from_utf8_lossy(&snapshot.id).into_owned(),
            vm_state_size: snapshot.vm_state_bytes(),
        }
    }
}
