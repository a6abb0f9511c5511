// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Copies one or several images into a new one, in another format, compressed, sparse or on another backing file.

mod copy;
mod pieces;
mod share;
mod source;
mod start_order;
mod target;

use crate::{ImageSpec, JobHandle};
use copy::{Copy, CopySettings};
use cowshed_create::INCOMPLETE;
use cowshed_image::graph::files_below;
use cowshed_storage::FileIdentity;
use cowshed_types::{Error, Result, without};
use pieces::Cut;
pub(crate) use source::Sources;
use std::path::PathBuf;
use target::Target;

/// `-S` by default: zeroes of at least this many bytes become holes.
pub const DEFAULT_SPARSE_BYTES: u64 = 4096;
const SECTOR_BYTES: u64 = 512;
/// Blocks of a file system: holes in a raw target are no finer.
const RAW_UNIT_BYTES: u64 = 4096;
/// One read and its writes: large enough for the disk, small enough for the processor's cache.
const CHUNK_BYTES: u64 = 1 << 20;
const MAX_CHUNK_BYTES: u64 = 16 << 20;
/// The same at first, while nothing waits for a disk. For short copies the faults of fresh buffers cost more than the
/// larger pieces save.
const FIRST_CHUNK_BYTES: u64 = 256 << 10;
/// The longest piece that the kernel copies or shares, in bytes.
const UNREAD_CHUNK_BYTES: u64 = 64 << 20;

/// The sources, the target and the options of `convert`.
#[derive(Clone, Debug)]
pub struct ConvertOptions {
    /// The images, concatenated in this order.
    pub sources: Vec<ImageSpec>,
    /// The target. Its `format` is that of the new image, "raw" if `None`; its `cache` is "unsafe" if `None`.
    pub target: ImageSpec,
    /// `-o`: options of the new image, each a `key=value,key=value` list.
    pub create_options: Vec<String>,
    /// `-c`: compress every cluster.
    pub compressed: bool,
    /// `--compression-level`: see [`cowshed_codec::Codec::with_effort`].
    pub compression_level: Option<i32>,
    /// `--compression-window=32k`: deflate with a window of 32 KiB.
    pub wide_window: bool,
    /// `-n`: write into an existing target.
    pub skip_create: bool,
    /// `--target-is-zero`: the existing target reads as zeroes.
    pub target_is_zero: bool,
    /// `-B`: the new image's backing file; only ranges that aren't "unallocated" above it are copied.
    pub backing_file: Option<String>,
    /// `-F`: format of the backing file.
    pub backing_format: Option<String>,
    /// `-S`: zeroes shorter than this many bytes are written out; 0 leaves no holes at all.
    pub sparse_bytes: u64,
    /// `-W`: writes need not be in order.
    pub out_of_order: bool,
    /// `-m`: requests in flight at most, 1 to 16.
    pub requests: usize,
    /// `-r`: bytes a second.
    pub rate: Option<u64>,
    /// `--salvage`: unreadable parts become zeroes.
    pub salvage: bool,
    /// `-C`: copy inside the kernel where it can, without looking for zeroes.
    pub copy_range: bool,
    /// `--reflink`: data may be shared with the sources' files, where the file system can.
    pub share: bool,
    /// `--bitmaps`: copy the persistent bitmaps too. There is one source then.
    pub bitmaps: bool,
    /// `--skip-broken-bitmaps`: leave out inconsistent ones instead of failing.
    pub skip_broken_bitmaps: bool,
    /// The size of a new target is rounded up to a multiple of this many bytes, by zeroes.
    pub size_unit_bytes: u64,
    /// A disk of 0 bytes is an error: no machine takes it.
    pub refuses_empty: bool,
    /// The new target replaces no file that is there already.
    pub keeps_existing: bool,
    /// The name that the new target gets once it is whole, where that is another one.
    pub final_name: Option<String>,
    /// The file in whose place the caller puts the new target: none of those that the sources read.
    pub replaced: Option<PathBuf>,
    /// A new VMDK target gets the identifiers that VMware's programs write, which QEMU leaves out.
    pub has_vmware_ids: bool,
}

impl ConvertOptions {
    /// `qemu-img convert SOURCE… TARGET` with its defaults.
    pub fn new(sources: Vec<ImageSpec>, target: ImageSpec) -> Self {
        ConvertOptions {
            sources,
            target,
            create_options: Vec::new(),
            compressed: false,
            compression_level: None,
            wide_window: false,
            skip_create: false,
            target_is_zero: false,
            backing_file: None,
            backing_format: None,
            sparse_bytes: DEFAULT_SPARSE_BYTES,
            out_of_order: false,
            requests: 8,
            rate: None,
            salvage: false,
            copy_range: false,
            share: true,
            bitmaps: false,
            skip_broken_bitmaps: false,
            size_unit_bytes: 1,
            refuses_empty: false,
            keeps_existing: false,
            final_name: None,
            replaced: None,
            has_vmware_ids: false,
        }
    }
}

/// The result of a conversion.
#[derive(Clone, Debug, Default)]
pub struct ConvertOutcome {
    /// Virtual size of the target, bytes.
    pub size: u64,
    /// Size of the sources together, bytes.
    pub source_bytes: u64,
    /// Bytes written as data.
    pub data_bytes: u64,
    /// Bytes left or made zero.
    pub zero_bytes: u64,
    /// Offsets of unreadable parts that became zeroes (`--salvage`).
    pub salvaged: Vec<u64>,
    /// The errors of places of the source that could not be looked up: all there was read (`--salvage`).
    pub unknown: Vec<Error>,
    /// Inconsistent bitmaps that were left out (`--skip-broken-bitmaps`).
    pub skipped_bitmaps: Vec<String>,
}

/// Runs the conversion. After an error a new target is gone again; an old one is incomplete, and the message has that.
pub async fn run(options: &ConvertOptions, job: &JobHandle) -> Result<ConvertOutcome> {
    check(options)?;
    let options = &target::settled(options);
    if options.rate.is_some() {
        job.set_speed(options.rate);
    }
    let sources = Sources::open(&options.sources, options.backing_file.is_some()).await?.salvaging(options.salvage);
    let checked = match check_replaced(options, &sources) {
        Ok(()) => check_bitmaps(options, &sources).await,
        refused => refused,
    };
    let result = match checked {
        Ok(()) => convert_sources(options, &sources, job).await,
        Err(error) => Err(error),
    };
    let closed = sources.close().await;
    let outcome = result?;
    closed?;
    Ok(outcome)
}

/// Refuses to take the place of a file that a source reads, a backing file too, whether it is locked or not.
fn check_replaced(options: &ConvertOptions, sources: &Sources) -> Result<()> {
    let Some(path) = &options.replaced else { return Ok(()) };
    let replaced = FileIdentity::of_path(path);
    let is_read = |(identity, _): &(FileIdentity, String)| replaced.as_ref() == Some(identity);
    match sources.nodes().flat_map(|node| files_below(node)).find(is_read) {
        Some((_, name)) => {
            let message = format!("this file would be replaced while it is read as '{name}': both are one file");
            Err(Error::invalid_argument(message).file(path.display().to_string()))
        }
        None => Ok(()),
    }
}

/// Refuses bitmaps that can't be copied, before the target is made.
async fn check_bitmaps(options: &ConvertOptions, sources: &Sources) -> Result<()> {
    match sources.only() {
        _ if !options.bitmaps => Ok(()),
        Some(source) => crate::bitmap::check_copy(source, options.skip_broken_bitmaps).await,
        None => Err(Error::invalid_argument("Copying bitmaps only possible with single source")),
    }
}

/// Refuses a target that can't have the bitmaps, before anything is copied to it.
async fn check_bitmap_target(options: &ConvertOptions, sources: &Sources, target: &Target) -> Result<()> {
    let Some(source) = sources.only().filter(|_| options.bitmaps) else { return Ok(()) };
    crate::bitmap::check_target(&target.node)?;
    match options.skip_create {
        true => crate::bitmap::check_existing_target(source, &target.node).await,
        false => Ok(()),
    }
}

/// Refuses all options that can be refused without opening a file.
fn check(options: &ConvertOptions) -> Result<()> {
    if options.sources.is_empty() {
        return Err(Error::invalid_argument("no image to convert"));
    }
    if options.sources.len() > 1 && options.backing_file.is_some() {
        return Err(Error::invalid_argument(
            "a backing file for the target makes no sense when several images are concatenated",
        ));
    }
    if !(1..=16).contains(&options.requests) {
        return Err(Error::invalid_argument("the number of parallel requests must be from 1 to 16")
            .field("-m")
            .value(options.requests));
    }
    if options.target_is_zero && !options.skip_create {
        return Err(Error::invalid_argument("--target-is-zero requires -n: a new target is known to be zero"));
    }
    if options.backing_file.is_some() && options.backing_format.is_none() && !options.skip_create {
        return Err(Error::invalid_argument("use of a backing file requires an explicit backing format").field("-F"));
    }
    if !options.sparse_bytes.is_multiple_of(SECTOR_BYTES) || options.sparse_bytes > MAX_CHUNK_BYTES {
        return Err(Error::invalid_argument(format!(
            "the sparse size must be a multiple of 512 up to {MAX_CHUNK_BYTES}; 0 leaves no holes"
        ))
        .field("-S")
        .value(options.sparse_bytes));
    }
    if options.skip_create && !options.create_options.is_empty() {
        return Err(Error::invalid_argument("-o makes no sense with -n: the target exists"));
    }
    if options.copy_range && options.compressed {
        return Err(Error::invalid_argument("copy offloading (-C) and compression cannot be used at the same time"));
    }
    if options.copy_range && options.salvage {
        return Err(Error::invalid_argument("Cannot use copy offloading in salvaging mode"));
    }
    if options.copy_range && options.sparse_bytes != DEFAULT_SPARSE_BYTES {
        return Err(Error::invalid_argument("copy offloading (-C) and -S cannot be used at the same time"));
    }
    Ok(())
}

/// Copies open images into a target that it creates, opens and closes.
pub(crate) async fn convert_sources(
    options: &ConvertOptions,
    sources: &Sources,
    job: &JobHandle,
) -> Result<ConvertOutcome> {
    if options.refuses_empty && sources.size() == 0 {
        let name = options.sources.first().map_or("", |source| &source.name);
        return Err(Error::invalid_argument("the disk is empty (0 bytes)").file(name));
    }
    let target = Target::open(options, sources).await?;
    let bitmaps = check_bitmap_target(options, sources, &target).await;
    let settings = match bitmaps.and_then(|()| settings(options, &target)) {
        Ok(settings) => settings,
        Err(error) => {
            let _ = target.node.close().await;
            return Err(target.created.take_back(error));
        }
    };
    let copied = Copy::new(sources, &target.node, settings, job).await.run().await;
    let copied = match (copied, sources.only()) {
        (Ok(outcome), Some(source)) if options.bitmaps => {
            let skipped = crate::bitmap::copy(source, &target.node, options.skip_broken_bitmaps).await;
            skipped.map(|skipped_bitmaps| ConvertOutcome { skipped_bitmaps, ..outcome })
        }
        (copied, _) => copied,
    };
    let flushed = match &copied {
        Ok(_) => target.node.flush().await,
        Err(_) => Ok(()),
    };
    let size = if options.skip_create { sources.size() } else { target::size(options, sources)? };
    let closed = target.node.close().await;
    let outcome = copied.and_then(|outcome| flushed.and(closed).map(|()| outcome));
    match outcome {
        Ok(outcome) => {
            let source_bytes = sources.size();
            // Rounding adds zeroes.
            let zero_bytes = outcome.zero_bytes + size.saturating_sub(source_bytes);
            Ok(ConvertOutcome { size, source_bytes, zero_bytes, unknown: sources.take_unknown(), ..outcome })
        }
        Err(error) if target.created.is_empty() => Err(error.context(INCOMPLETE)),
        // A part of a disk that resembles a whole one, on a disk that may be full.
        Err(error) => Err(target.created.take_back(error)),
    }
}

fn settings(options: &ConvertOptions, target: &Target) -> Result<CopySettings> {
    let (cluster, compressed) = (target.cluster_bytes, target.is_compressed);
    if compressed && cluster.is_none() && target.node.size() > 0 {
        return Err(Error::unsupported("Compression not supported for this file format").file(target.node.filename()));
    }
    let has_backing = target.has_backing;
    // Above a backing file a border is where the layer's data ends: nothing else may be copied up.
    let unit = match cluster {
        Some(cluster) if compressed || !has_backing => cluster,
        _ if has_backing => SECTOR_BYTES,
        _ => RAW_UNIT_BYTES,
    };
    let min_zero_bytes = options.sparse_bytes;
    let zero_unit = match target.allocation_unit_bytes {
        Some(unit) => unit.max(SECTOR_BYTES),
        None => min_zero_bytes.clamp(SECTOR_BYTES, RAW_UNIT_BYTES),
    };
    let step =
        if without!("large_pieces") { 64 << 10 } else { CHUNK_BYTES }.max(unit).max(min_zero_bytes.next_power_of_two());
    let chunk =
        if options.copy_range && !compressed && options.rate.is_none() { UNREAD_CHUNK_BYTES.max(step) } else { step };
    let no_holes = min_zero_bytes == 0;
    // The target's contents must not depend on the time that pieces took. Their borders may lie anywhere only if each
    // block decides for itself whether it is a hole.
    let is_cut_anywhere = !compressed && min_zero_bytes <= zero_unit && zero_unit <= unit;
    let first_step = if is_cut_anywhere { FIRST_CHUNK_BYTES.max(unit) } else { step };
    let narrow = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
    Ok(CopySettings {
        cut: Cut { unit, chunk, all_data: no_holes },
        step,
        first_step,
        zero_unit: narrow(zero_unit),
        min_zero_bytes: narrow(min_zero_bytes),
        target_is_zero: target.is_zero,
        compressed,
        requests: options.requests,
        out_of_order: options.out_of_order,
        salvage: options.salvage,
        copy_range: options.copy_range && !compressed,
        // Salvaged content differs from that of the source.
        share: options.share
            && !compressed
            && !options.salvage
            && (options.copy_range || !target.has_own_space && !no_holes),
    })
}
