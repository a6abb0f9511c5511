// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Opening: header, L1 table, and nothing else that grows with the image.

use super::cleaner::clean_each;
use super::encryption;
use super::readahead::Ahead;
use super::shared_metadata::SharedMetadata;
use super::{Cipher, OpenContext, Qcow2Driver};
use crate::Qcow2RuntimeOptions;
use arc_swap::ArcSwapOption;
use cowshed_codec::Codec;
use cowshed_graph::encryption::Writers;
use cowshed_graph::node::{Link, Node};
use cowshed_layout::qcow2::features::AUTOCLEAR_KNOWN;
use cowshed_layout::qcow2::{Header, L1Entry, L2Format, SnapshotName};
use cowshed_offline::{read_header, read_header_as};
use cowshed_qcow2::{Budget, EngineConfig, OverlapSet, Structure};
use cowshed_storage::{File, IoBuf, rt};
use cowshed_types::memory::try_collect;
use cowshed_types::{Error, ErrorKind, Result, slip};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, OnceLock};

/// Default of `l2-cache-entry-size` in bytes, where the cluster isn't smaller.
const L2_SLICE_BYTES: u64 = 4096;
/// Refcount blocks that a cache can count.
const MOST_REFCOUNT_BLOCKS: u64 = i32::MAX as u64;
/// Refcount blocks in the cache at least.
const REFCOUNT_BLOCKS: u64 = 4;

impl Qcow2Driver {
    /// Opens an image whose children are open. An encrypted one can't be read without a cipher.
    pub async fn open(context: OpenContext) -> Result<Qcow2Driver> {
        // Nearly every image is opened without: one read less.
        let cipher = match context.encryption.is_empty() {
            true => None,
            false => {
                let header = read_header(&context.file).await?;
                let name = context.file_name.clone();
                encryption::cipher_of(&context, &header).await.map_err(|error| error.file(name))?
            }
        };
        Self::open_with_cipher(context, cipher).await
    }

    /// As [`Qcow2Driver::open`], with the cipher of an encrypted image.
    pub async fn open_with_cipher(context: OpenContext, cipher: Option<Arc<dyn Cipher>>) -> Result<Qcow2Driver> {
        let mut header = read_header_as(&context.file, context.check).await?;
        let name = context.file_name.clone();
        let may_write = context.writable && !context.check;
        if header.is_dirty() && may_write {
            check_may_write(&header, cipher.is_some()).map_err(|error| error.file(name.clone()))?;
            cowshed_offline::check::recover_dirty(&context.file).await?;
            header = read_header(&context.file).await?;
        }
        let driver = Self::open_named(context, header, cipher).await.map_err(|error| error.file(name))?;
        if may_write {
            let counts = driver.plan(|engine| engine.require_refcount_table()).await;
            counts.map_err(|error| unread(error, "Could not initialize refcount handling"))?;
            driver.refuse_lost_clusters().await?;
            driver.prepare_bitmaps().await?;
            driver.clear_unknown_autoclear().await?;
        }
        Ok(driver)
    }

    async fn open_named(context: OpenContext, header: Header, cipher: Option<Arc<dyn Cipher>>) -> Result<Self> {
        if context.writable && !context.check {
            check_may_write(&header, cipher.is_some())?;
        }
        if !context.check {
            // For a check, they are read as far as they go: the check reports the faults.
            header.check_disk_tables_within(context.file.len())?;
            if header.refcount_table_clusters == 0 {
                let error = Error::invalid_image("refcount_table_clusters", 0, "the image has no refcount table");
                return Err(error.qemu("Image does not contain a reference count table"));
            }
        }
        if header.has_data_file() && context.data_file.is_none() && !context.no_data {
            return Err(Error::invalid_argument("'data-file' is required for this image"));
        }
        let header = match &context.snapshot {
            Some(wanted) => header_of_snapshot(&context, header, wanted).await?,
            None => header,
        };
        let l1 = read_l1(&context.file, &header).await?;
        let mut config = config_of(&header, &context)?;
        if context.writable && !context.check {
            let inactive_l2 = context.options.overlap_check.inactive_l2;
            config.other_metadata.extend(snapshots_to_keep(&context.file, &header, inactive_l2).await?);
        }
        let punch = context.options.pass_discard_request;
        let core = SharedMetadata::of(&context.file, config, &l1, !context.writable && !context.check)?;
        if core.is_new {
            core.engine.join_budget(Budget::process_wide());
            if !rt::is_simulated() && context.options.cache_clean_interval_s > 0 {
                clean_each(&core.engine, context.options.cache_clean_interval_s);
            }
        }
        Ok(Qcow2Driver {
            engine: core.engine,
            codec: Mutex::new(Codec::new(header.compression())),
            decompressed_bytes: AtomicU64::new(0),
            max_decompressed_bytes: context.max_decompressed_bytes,
            cluster_cache: core.cluster_cache,
            ahead: Ahead::new(),
            membership: core.membership,
            file: context.file,
            file_name: context.file_name,
            data_file: context.data_file,
            backing: Link::to(context.backing),
            chain_map: ArcSwapOption::empty(),
            is_covered: AtomicBool::new(false),
            frozen: AtomicBool::new(!context.writable && !context.check),
            no_backing: context.no_backing && header.backing_file.is_some(),
            cipher,
            writers: Writers::default(),
            header: Mutex::new(header),
            // Opened to be checked: the check writes past the driver, whose view of the file is stale after a repair.
            writable: AtomicBool::new(context.writable && !context.check),
            punch: AtomicBool::new(punch),
            shrinks: AtomicBool::new(false),
            events: core.events,
            cycle_lock: futures_util::lock::Mutex::new(()),
            flushes_asked: AtomicU64::new(0),
            flushes_covered: AtomicU64::new(0),
            no_reserve: AtomicBool::new(false),
            growth: super::growth::Growth::new(),
            wrote_metadata: AtomicBool::new(false),
            abandoned: AtomicBool::new(false),
            corrupt: AtomicBool::new(false),
            on_corruption: OnceLock::new(),
            closed: AtomicBool::new(false),
            renewal: Default::default(),
            bitmaps: Default::default(),
        })
    }
}

/// Refuses to write to images of which a part can't be kept right yet.
pub(super) fn check_may_write(header: &Header, has_cipher: bool) -> Result<()> {
    if header.is_corrupt() {
        let message = "the image is marked as corrupt: it can only be opened for reading, or repaired";
        return Err(Error::new(ErrorKind::InvalidImage, message)
            .qemu("qcow2: Image is corrupt; cannot be opened read/write")
            .field("incompatible_features")
            .value(format!("{:#x}", header.incompatible_features)));
    }
    header.require_refcount_table()?;
    if header.crypt_method != 0 && !has_cipher {
        let message = "the image is encrypted: writing needs 'encrypt.key-secret'";
        return Err(Error::invalid_argument(message));
    }
    Ok(())
}

/// The header as if the snapshot were the disk.
async fn header_of_snapshot(context: &OpenContext, mut header: Header, wanted: &SnapshotName) -> Result<Header> {
    if context.writable {
        return Err(Error::new(ErrorKind::ReadOnly, "a snapshot can only be opened for reading"));
    }
    let listed = cowshed_offline::snapshots::list(&context.file, &header).await;
    let snapshots = listed.map_err(|error| unread(error, "Failed to read snapshot table"))?;
    let Some(index) = wanted.find(&snapshots) else {
        return Err(Error::new(ErrorKind::NotFound, "can't find the snapshot").value(&wanted.name));
    };
    let snapshot = &snapshots[index];
    snapshot.validate(header.version.min(2), header.cluster_bits)?;
    header.size = snapshot.disk_size_bytes().unwrap_or(header.size);
    header.l1_table_offset = snapshot.l1_table_offset;
    header.l1_size = snapshot.l1_size;
    let needed = header.geometry()?.l1_entries_needed(header.size);
    if needed > u64::from(header.l1_size) {
        let message = format!("the snapshot's L1 table needs {needed} entries");
        return Err(Error::invalid_image("snapshot_l1_size", header.l1_size, message));
    }
    header.check_disk_tables_within(context.file.len())?;
    Ok(header)
}

/// Gives QEMU's sentence to an error of reading; damage has sentences of its own.
fn unread(error: Error, sentence: &str) -> Error {
    match error.kind() {
        ErrorKind::Io | ErrorKind::NoSpace => error.qemu(sentence),
        _ => error,
    }
}

pub(super) async fn read_l1(file: &File, header: &Header) -> Result<Vec<u64>> {
    let bytes = header.l1_size as usize * 8;
    if bytes == 0 {
        return Ok(Vec::new());
    }
    let (result, buf) = file.read_at(IoBuf::try_zeroed(bytes)?, header.l1_table_offset).await;
    result.map_err(|error| unread(error, "Could not read L1 table"))?;
    try_collect(buf.as_chunks::<8>().0.iter().map(|word| u64::from_be_bytes(*word)))
}

fn config_of(header: &Header, context: &OpenContext) -> Result<EngineConfig> {
    let options = &context.options;
    check_version(header, options)?;
    let format = L2Format::of(header)?;
    let cluster_size = format.geometry.cluster_size();
    let (l2_cache_bytes, refcount_cache_bytes) = cache_sizes(options, &format, header.size)?;
    let l2_slice_bytes = slice_bytes(options, cluster_size)?;
    Ok(EngineConfig {
        format,
        size: header.size,
        encrypted: header.crypt_method != 0,
        lazy_refcounts: header.version >= 3
            && context.writable
            && options.lazy_refcounts.unwrap_or_else(|| header.has_lazy_refcounts()),
        l1_offset: header.l1_table_offset,
        refcount_table_offset: header.refcount_table_offset,
        refcount_table_clusters: u64::from(header.refcount_table_clusters),
        file_len: context.file.len(),
        fixed_length: context.file.is_device(),
        reserves: !context.file.has_its_space() && !slip!("metadata_without_room"),
        data_file_len: context.data_file.as_ref().map_or(0, File::len),
        new_space_is_zero: context.file.grows_by_zeroes()
            && context.data_file.as_ref().is_none_or(File::grows_by_zeroes),
        sector_bytes: context.file.alignment().offset.max(512),
        l2_cache_bytes,
        l2_slice_bytes,
        refcount_cache_bytes,
        discard_no_unref: options.discard_no_unref,
        // A reader has nothing to check, and opens faster.
        overlap: if context.writable { overlap_set(options) } else { OverlapSet::NONE },
        other_metadata: other_metadata(header),
        backing_size: context.backing.as_deref().map(Node::size),
        names_backing: header.backing_file.is_some(),
    })
}

/// Refuses options for which version 2 of the format has no means.
pub(super) fn check_version(header: &Header, options: &Qcow2RuntimeOptions) -> Result<()> {
    if header.version < 3 && options.discard_no_unref {
        let message = "discard-no-unref is only supported since qcow2 version 3";
        return Err(Error::invalid_argument(message).field("discard-no-unref").value("on").qemu(message));
    }
    if header.version >= 3 || options.lazy_refcounts != Some(true) {
        return Ok(());
    }
    let message = "lazy refcounts need version 3 of the format";
    Err(Error::invalid_argument(message)
        .field("lazy-refcounts")
        .value("on")
        .qemu("Lazy refcounts require a qcow2 image with at least qemu 1.1 compatibility level"))
}

/// Bytes of an L2 slice, by these options.
pub(super) fn slice_bytes(options: &Qcow2RuntimeOptions, cluster_size: u64) -> Result<u64> {
    let bytes = options.l2_cache_entry_bytes.unwrap_or(L2_SLICE_BYTES.min(cluster_size));
    if bytes.is_power_of_two() && (512..=cluster_size).contains(&bytes) {
        return Ok(bytes);
    }
    let message =
        format!("L2 cache entry size must be a power of two between 512 and the cluster size ({cluster_size})");
    Err(Error::invalid_argument(message).field("l2-cache-entry-size").value(bytes))
}

pub(super) fn overlap_set(options: &Qcow2RuntimeOptions) -> OverlapSet {
    let checks = &options.overlap_check;
    OverlapSet::NONE
        .with(Structure::MainHeader, checks.main_header)
        .with(Structure::ActiveL1, checks.active_l1)
        .with(Structure::ActiveL2, checks.active_l2)
        .with(Structure::RefcountTable, checks.refcount_table)
        .with(Structure::RefcountBlock, checks.refcount_block)
        .with(Structure::SnapshotTable, checks.snapshot_table)
        .with(Structure::InactiveL1, checks.inactive_l1)
        .with(Structure::InactiveL2, checks.inactive_l2)
        .with(Structure::BitmapDirectory, checks.bitmap_directory)
}

/// As [`snapshot_metadata`]. An image is not written where the clusters of its snapshots are unknown.
pub(super) async fn snapshots_to_keep(
    file: &File,
    header: &Header,
    inactive_l2: bool,
) -> Result<Vec<(Structure, u64, u64)>> {
    const REFUSAL: &str = "can't be opened for writing, which would harm internal snapshots that can't be read ('check -r \
                           all' repairs them, with '--lossy' it gives up those that are lost)";
    let read = async {
        header.check_snapshot_table_within(file.len())?;
        snapshot_metadata(file, header, inactive_l2).await
    };
    read.await.map_err(|error| error.context(REFUSAL))
}

/// The metadata of internal snapshots: their table, their L1 tables, and where asked for their L2 tables.
pub(super) async fn snapshot_metadata(
    file: &File,
    header: &Header,
    inactive_l2: bool,
) -> Result<Vec<(Structure, u64, u64)>> {
    if header.nb_snapshots == 0 {
        return Ok(Vec::new());
    }
    let listed = cowshed_offline::snapshots::list(file, header).await;
    let snapshots = listed.map_err(|error| unread(error, "Failed to read snapshot table"))?;
    let table_bytes = snapshots.iter().map(|snapshot| snapshot.encoded_len() as u64).sum();
    let mut found = vec![(Structure::SnapshotTable, header.snapshots_offset, table_bytes)];
    for snapshot in &snapshots {
        snapshot.validate(header.version.min(2), header.cluster_bits)?;
        found.push((Structure::InactiveL1, snapshot.l1_table_offset, u64::from(snapshot.l1_size) * 8));
        if inactive_l2 {
            let l1 = cowshed_offline::snapshots::read_l1(file, snapshot, header.version, header.cluster_bits).await?;
            let tables = l1.iter().map(|raw| L1Entry(*raw).offset().0).filter(|host| *host != 0);
            found.extend(tables.map(|host| (Structure::InactiveL2, host, header.cluster_size())));
        }
    }
    Ok(found)
}

/// Metadata that the header names and that an open image doesn't change.
pub(super) fn other_metadata(header: &Header) -> Vec<(Structure, u64, u64)> {
    header
        .bitmaps()
        .map(|bitmaps| (Structure::BitmapDirectory, bitmaps.directory_offset, bitmaps.directory_size))
        .into_iter()
        .collect()
}

/// L2 and refcount cache in bytes. One size alone sets the other, 4 : 1; of two the total decides the third. Without any,
/// the L2 cache covers `l2-cache-coverage`, by default the whole disk: it is the budget of the process that bounds it then.
pub(super) fn cache_sizes(options: &Qcow2RuntimeOptions, format: &L2Format, disk_bytes: u64) -> Result<(u64, u64)> {
    let geometry = format.geometry;
    let cluster_size = geometry.cluster_size();
    let covering = |bytes: u64| bytes.div_ceil(cluster_size).saturating_mul(geometry.l2_entry_size());
    let l2_given = options.l2_cache_bytes.or(options.l2_cache_coverage_bytes.map(covering));
    let (l2, refcounts) = match (options.cache_bytes, l2_given, options.refcount_cache_bytes) {
        (Some(both), Some(l2), _) => (l2, both.saturating_sub(l2)),
        (Some(both), None, Some(refcounts)) => (both.saturating_sub(refcounts), refcounts),
        (Some(both), None, None) => (both - both / 5, both / 5),
        (None, Some(l2), Some(refcounts)) => (l2, refcounts),
        (None, Some(l2), None) => (l2, l2 / 4),
        (None, None, Some(refcounts)) => (refcounts.saturating_mul(4), refcounts),
        (None, None, None) => (covering(disk_bytes), 0),
    };
    if refcounts / cluster_size > MOST_REFCOUNT_BLOCKS {
        return Err(Error::invalid_argument("Refcount cache size too big").value(refcounts));
    }
    Ok((l2, refcounts.max(REFCOUNT_BLOCKS * cluster_size)))
}

impl Qcow2Driver {
    /// Clears autoclear bits that we don't know, as the specification asks of the first writer.
    pub(super) async fn clear_unknown_autoclear(&self) -> Result<()> {
        let unknown = self.header().autoclear_features & !AUTOCLEAR_KNOWN;
        if unknown == 0 {
            return Ok(());
        }
        self.edit_header(|header| header.autoclear_features &= AUTOCLEAR_KNOWN).await?;
        self.file.sync().await
    }
}
