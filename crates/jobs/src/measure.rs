// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The space that an image would need in another format.

use crate::layer::qcow2_layer;
use crate::{ImageSpec, JobHandle, in_work};
use cowshed_create::NewEncryption;
use cowshed_create::qcow2::{Qcow2CreateOptions, round_size};
use cowshed_create::schema::{OptionValues, options_of};
use cowshed_image::node::BitmapStatus;
use cowshed_image::{Node, Preallocation};
use cowshed_layout::qcow2::BitmapEntry;
use cowshed_types::{Error, Result};

/// The object to measure: an existing image, or an empty one of a given size.
#[derive(Clone, Debug, Default)]
pub struct MeasureOptions {
    /// The image.
    pub source: Option<ImageSpec>,
    /// `--size`, bytes.
    pub size: Option<u64>,
    /// `-O`: "raw" (also if `None`) or "qcow2".
    pub target_format: Option<String>,
    /// `-o`: options of the new image, each a `key=value,…` list.
    pub create_options: Vec<String>,
}

/// The answer; `Serialize` writes qemu-img's JSON keys in its order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Measurement {
    /// Bytes for persistent bitmaps, where source and target can hold them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bitmaps: Option<u64>,
    /// Bytes that a converted image needs.
    pub required: u64,
    /// Bytes that it needs once every guest byte is written.
    #[serde(rename = "fully-allocated")]
    pub fully_allocated: u64,
}

/// Checks the options of the new image, which need no look at the old one.
pub fn check(options: &MeasureOptions) -> Result<()> {
    let (format, values) = parsed(options)?;
    if format == "qcow2" { Qcow2CreateOptions::to_measure(0, &values).map(drop) } else { Ok(()) }
}

/// The format, and the options of the new image.
fn parsed(options: &MeasureOptions) -> Result<(&str, OptionValues)> {
    let format = options.target_format.as_deref().unwrap_or("raw");
    let schema = options_of(format).ok_or_else(|| {
        Error::unsupported("images of this format can't be measured: qcow2, luks and raw can")
            .field("-O")
            .value(format!("'{format}'"))
    })?;
    Ok((format, OptionValues::parse(schema, &options.create_options)?))
}

/// Measures.
pub async fn run(options: &MeasureOptions, job: &JobHandle) -> Result<Measurement> {
    let (format, values) = parsed(options)?;
    match (&options.source, options.size) {
        (Some(_), Some(_)) => Err(Error::invalid_argument("--size and a file name cannot be used at the same time")),
        (None, None) => Err(Error::invalid_argument("either --size or a file name must be given")),
        (None, Some(size)) => measure(format, &values, size, None, job).await,
        (Some(spec), None) => {
            let node = spec.open_for_reading().await?;
            let measured = measure(format, &values, node.size(), Some(&node), job).await;
            let closed = node.close().await;
            measured.and_then(|measured| closed.map(|()| measured))
        }
    }
}

async fn measure(
    format: &str,
    values: &OptionValues,
    size: u64,
    source: Option<&Node>,
    job: &JobHandle,
) -> Result<Measurement> {
    if format == "luks" {
        let new = NewEncryption::from_values(values, "")?;
        let size = new.file_bytes(round_size(size)?, values.switch("detached-header"));
        return Ok(Measurement { bitmaps: None, required: size, fully_allocated: size });
    }
    if !["qcow2", "raw", "file"].contains(&format) {
        return Err(Error::unsupported(format!("Block driver '{format}' does not support size measurement")));
    }
    if format != "qcow2" {
        let too_large = || Error::invalid_argument("the image is too large to be measured").field("size").value(size);
        let size = size.checked_next_multiple_of(512).ok_or_else(too_large)?;
        return Ok(Measurement { bitmaps: None, required: size, fully_allocated: size });
    }
    let options = Qcow2CreateOptions::to_measure(size, values)?;
    let cluster = options.cluster_bytes();
    let too_large = || Error::invalid_argument("the image is too large to be measured").field("size").value(size);
    let metadata = metadata_bytes(&options).ok_or_else(too_large)?;
    let all = options.size.checked_next_multiple_of(cluster).ok_or_else(too_large)?;
    // Reserved from the start; and above a backing file zeroes need space too, so all that is sure is the worst.
    let everything = matches!(options.preallocation, Preallocation::Falloc | Preallocation::Full)
        || (options.backing_file.is_some() && source.is_some());
    let data = match source {
        _ if everything => all,
        None => 0,
        Some(node) => data_clusters(node, cluster, job).await? * cluster,
    };
    let bitmaps = match source {
        Some(node) if options.version >= 3 => bitmap_bytes(node, cluster).await?,
        _ => None,
    };
    let sum = |bytes: u64| metadata.checked_add(bytes).ok_or_else(too_large);
    Ok(Measurement { bitmaps, required: sum(data)?, fully_allocated: sum(all)? })
}

/// Bytes of header, L1 and L2 tables and refcounts of an image whose clusters are all allocated: the most metadata of
/// this size. `None` past 2^64.
pub fn metadata_bytes(options: &Qcow2CreateOptions) -> Option<u64> {
    let cluster = options.cluster_bytes();
    let data = options.size.div_ceil(cluster);
    let l2_tables = data.div_ceil(options.l2_entries());
    let l1_clusters = (l2_tables * 8).div_ceil(cluster);
    let encryption = options.encryption.as_ref().map_or(0, |new| new.header_bytes().div_ceil(cluster));
    let counted = 1 + l1_clusters + l2_tables + data + encryption;
    // Refcount blocks and their table count themselves: grow both until they cover everything.
    let per_block = (cluster * 8) >> options.refcount_order;
    let (mut blocks, mut table) = (0, 0);
    loop {
        let needed_blocks = counted.checked_add(blocks)?.checked_add(table)?.div_ceil(per_block);
        let needed_table = (needed_blocks * 8).div_ceil(cluster);
        if (needed_blocks, needed_table) == (blocks, table) {
            break;
        }
        (blocks, table) = (needed_blocks, needed_table);
    }
    (1 + l1_clusters + l2_tables + encryption + blocks + table).checked_mul(cluster)
}

/// Clusters of `cluster` bytes that hold data.
async fn data_clusters(node: &Node, cluster: u64, job: &JobHandle) -> Result<u64> {
    const WINDOW_BYTES: u64 = 16 << 30;
    const MAX_RUNS: usize = 4096;
    let size = node.size();
    let (mut at, mut count, mut counted_to) = (0, 0, 0);
    job.set_len(size);
    while at < size {
        job.pause_point().await?;
        let from = at;
        let runs = node.block_status_chain(at, (size - at).min(WINDOW_BYTES), MAX_RUNS).await;
        for run in runs.map_err(|error| in_work(error, "Unable to get block status"))? {
            at = run.start + run.len;
            if run.data && !run.zero {
                let first = (run.start / cluster).max(counted_to);
                let end = at.div_ceil(cluster);
                count += end.saturating_sub(first);
                counted_to = counted_to.max(end);
            }
        }
        job.advance(at - from);
    }
    Ok(count)
}

/// Space for the source's persistent bitmaps in the new image: `None` where the source can't have any.
async fn bitmap_bytes(node: &Node, cluster: u64) -> Result<Option<u64>> {
    let granule_bytes = |bits: u8| 1u64.checked_shl(u32::from(bits)).unwrap_or(u64::MAX);
    // Bytes of a granule, and of an entry in the directory.
    let bitmaps: Vec<(u64, u64)> = match (qcow2_layer(node), node.stored_bitmaps()) {
        (Some(layer), _) if layer.header.version < 3 => return Ok(None),
        (Some(layer), _) => {
            let entry = |map: BitmapEntry| (granule_bytes(map.granularity_bits), map.encoded_len() as u64);
            layer.bitmaps().await?.into_iter().map(entry).collect()
        }
        (None, Some(stored)) => {
            let entry =
                |map: BitmapStatus| (map.granularity_bytes.max(1), BitmapEntry::encoded_len_of(map.name.len()) as u64);
            stored.list().await?.into_iter().map(entry).collect()
        }
        (None, None) => return Ok(None),
    };
    let mut sum: u64 = 0;
    let mut directory: u64 = 0;
    for (granule_bytes, entry_bytes) in bitmaps {
        // One bit per granule, in whole clusters, found through a table of 8 bytes an entry.
        let bits = node.size().div_ceil(granule_bytes);
        let data_clusters = bits.div_ceil(8).div_ceil(cluster);
        let table_clusters = (data_clusters * 8).div_ceil(cluster);
        sum = sum.saturating_add((data_clusters + table_clusters).saturating_mul(cluster));
        directory += entry_bytes;
    }
    Ok(Some(sum.saturating_add(directory.next_multiple_of(cluster))))
}
