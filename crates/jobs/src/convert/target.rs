// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The image that is written.

use super::ConvertOptions;
use super::source::Sources;
use crate::ImageSpec;
use cowshed_codec::Codec;
use cowshed_create::schema::{ImageCompression, compression_of};
use cowshed_create::{CreateRequest, Created};
use cowshed_image::Node;
use cowshed_image::graph::check_apart;
use cowshed_image::open::is_nbd_name;
use cowshed_storage::path_of_text;
use cowshed_types::{Error, Result};
use std::sync::Arc;

/// The open target and the known facts about it.
pub struct Target {
    /// The image.
    pub node: Arc<Node>,
    /// Cluster size in bytes, of formats that have one.
    pub cluster_bytes: Option<u64>,
    /// Data are compressed: as asked, or as an image of this kind takes no others.
    pub is_compressed: bool,
    /// The smallest space that such a format allocates (a subcluster, else a cluster), bytes.
    pub allocation_unit_bytes: Option<u64>,
    /// Ranges that aren't written read as zeroes.
    pub is_zero: bool,
    /// Ranges that aren't written read from a backing file.
    pub has_backing: bool,
    /// It has space of its own: preallocated, `nocow`, or there before.
    pub has_own_space: bool,
    /// The files made for it: none where the name was there before.
    pub created: Created,
}

impl Target {
    /// Creates the target, unless it exists, and opens it for writing.
    pub async fn open(options: &ConvertOptions, sources: &Sources) -> Result<Target> {
        if options.target.image_opts && !options.skip_create {
            return Err(Error::invalid_argument("--target-image-opts requires -n: options name an existing image"));
        }
        let (extra, has_own_space, created) = match options.skip_create {
            false => create_target(options, sources).await?,
            true => (options.target.extra.clone(), true, Created::default()),
        };
        let node = match (ImageSpec { extra, ..writable(&options.target) }).open_for_writing().await {
            Ok(node) => node,
            Err(error) => return Err(created.take_back(error)),
        };
        let mut result = check_target(&node, sources, options).and_then(|()| set_codec(&node, options));
        if result.is_ok() && is_stream(options) {
            // Importers expect a footer of a disk without data, too.
            result = node.write_compressed(Vec::new()).await;
        }
        match result {
            Ok(()) => {
                let geometry = crate::layer::geometry(&node);
                let has_backing = node.backing().is_some();
                let is_blank = node.encrypted_volume().is_none() && !is_device(&options.target.name);
                let fresh = !options.skip_create && !has_backing && is_blank;
                let packed = node.compressed_cluster_bytes().filter(|_| geometry.is_none());
                let is_stream = node.description().is_some_and(|known| known.takes_stream);
                let packed = packed.filter(|_| options.compressed || is_stream);
                Ok(Target {
                    is_compressed: options.compressed || packed.is_some(),
                    cluster_bytes: geometry.map(|geometry| geometry.cluster_bytes).or(packed),
                    allocation_unit_bytes: geometry.map(|geometry| geometry.allocation_unit_bytes),
                    is_zero: fresh || options.target_is_zero,
                    has_backing,
                    has_own_space,
                    created,
                    node,
                })
            }
            Err(error) => {
                let _ = node.close().await;
                Err(created.take_back(error))
            }
        }
    }
}

/// How the new image takes compressed data; `None` of an image that exists.
fn packing(options: &ConvertOptions) -> ImageCompression {
    match options.target.format.as_deref().filter(|_| !options.skip_create) {
        Some(format) => compression_of(format, &options.create_options),
        None => ImageCompression::None,
    }
}

fn is_stream(options: &ConvertOptions) -> bool {
    packing(options) == ImageCompression::Stream
}

/// The options with those that the new image needs.
pub(super) fn settled(options: &ConvertOptions) -> ConvertOptions {
    let compressed = options.compressed || is_stream(options);
    ConvertOptions { compressed, ..options.clone() }
}

const COMPRESSED_AND_ENCRYPTED: &str = "Compression and encryption not supported at the same time";

/// Chooses how hard clusters are compressed.
fn set_codec(node: &Node, options: &ConvertOptions) -> Result<()> {
    match node.compressing() {
        Some(image) if options.compressed => {
            image.set_codec(Codec::with_effort(image.method(), options.compression_level, options.wide_window)?)
        }
        _ => Ok(()),
    }
}

/// A block device, and an export on a server, keep their old contents under a new image.
fn is_device(name: &str) -> bool {
    use std::os::unix::fs::FileTypeExt;
    if is_nbd_name(name) {
        return true;
    }
    std::fs::metadata(path_of_text(name)).is_ok_and(|metadata| metadata.file_type().is_block_device())
}

fn writable(spec: &ImageSpec) -> ImageSpec {
    let mut spec = spec.clone();
    if !spec.image_opts && spec.format.is_none() {
        spec.format = Some("raw".to_owned());
    }
    // A copy can be made again: nothing is synced on the way, as in qemu-img.
    spec.cache = Some(spec.cache.unwrap_or_else(|| "unsafe".to_owned()));
    spec
}

/// The size of a new target in bytes.
pub(super) fn size(options: &ConvertOptions, sources: &Sources) -> Result<u64> {
    let size = sources.size().checked_next_multiple_of(options.size_unit_bytes.max(1));
    let size = size.filter(|&size| i64::try_from(size).is_ok());
    size.ok_or_else(|| Error::invalid_argument("the disk is too large to be rounded up"))
}

type Extra = Vec<(&'static str, String)>;

/// Creates it. Returns further options for its opening, whether it has space of its own, and the new files.
async fn create_target(options: &ConvertOptions, sources: &Sources) -> Result<(Extra, bool, Created)> {
    let format = options.target.format.clone().unwrap_or_else(|| "raw".to_owned());
    if options.compressed && packing(options) == ImageCompression::None {
        return Err(Error::unsupported("Compression not supported for this file format"));
    }
    if options.backing_file.is_some() && is_stream(options) {
        let message = "a streamOptimized VMDK image takes no backing file: other kinds of VMDK do";
        return Err(Error::unsupported(message).file(&options.target.name));
    }
    let request = CreateRequest {
        filename: options.target.name.clone(),
        format,
        size: None,
        options: options.create_options.clone(),
        backing_file: options.backing_file.clone(),
        backing_format: options.backing_format.clone(),
        backing_unchecked: false,
        // The sources come from where the backing file comes from.
        policy: options.sources.first().map(|source| source.policy.clone()).unwrap_or_default(),
        secrets: options.target.secrets.clone(),
        tls: options.target.tls.clone(),
        keeps_existing: options.keeps_existing,
        final_name: options.final_name.clone(),
        has_vmware_ids: options.has_vmware_ids,
        extents: Vec::new(),
    };
    let plan = cowshed_create::prepare_sized(&request, size(options, sources)?).await?;
    if options.bitmaps && !plan.takes_bitmaps() {
        let message = format!("Format driver '{}' does not support bitmaps", request.format);
        return Err(Error::unsupported(message).file(&request.filename));
    }
    if options.compressed && plan.is_preallocated() {
        return Err(Error::invalid_argument("Compression and preallocation not supported at the same time"));
    }
    if options.compressed && plan.has_data_file() {
        return Err(Error::invalid_argument("Compression and data file not supported at the same time"));
    }
    if options.compressed && !plan.opening_options().is_empty() {
        return Err(Error::invalid_argument(COMPRESSED_AND_ENCRYPTED));
    }
    // A target that isn't synced during the copy needn't be synced before.
    let created = match writable(&options.target).cache.as_deref() == Some("unsafe") {
        true => plan.run_unsynced().await?,
        false => plan.run().await?,
    };
    Ok((plan.opening_options(), plan.has_own_space(), created))
}

fn check_target(node: &Node, sources: &Sources, options: &ConvertOptions) -> Result<()> {
    check_apart(node, sources.nodes())?;
    if options.compressed && node.is_encrypted() {
        return Err(Error::invalid_argument(COMPRESSED_AND_ENCRYPTED).file(node.filename()));
    }
    if node.size() < sources.size() {
        return Err(Error::invalid_argument("output file is smaller than input file")
            .hint(format!(": {} of {} bytes", node.size(), sources.size()))
            .file(node.filename()));
    }
    if options.target_is_zero && node.backing().is_some() {
        return Err(Error::invalid_argument("--target-is-zero can't be used on a target with a backing file")
            .file(node.filename()));
    }
    Ok(())
}
