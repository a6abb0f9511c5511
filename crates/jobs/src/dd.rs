// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Copies a part of an image block by block into a new one.

use crate::convert::{ConvertOptions, Sources, convert_sources};
use crate::{ImageSpec, JobHandle};
use cowshed_image::Node;
use cowshed_types::{Error, Result};
use std::sync::Arc;

/// The files and the blocks of a copy.
#[derive(Clone, Debug)]
pub struct DdOptions {
    /// `if=`.
    pub source: ImageSpec,
    /// `of=`; its format ("raw" if `None`) is `-O`.
    pub target: ImageSpec,
    /// `bs=`: block size in bytes, at least 1.
    pub block_bytes: u64,
    /// `count=`: blocks to copy; all if `None`.
    pub count: Option<u64>,
    /// `skip=`: blocks to skip at the source's start.
    pub skip: u64,
    /// The new target replaces no file that is there already.
    pub keeps_existing: bool,
}

/// The result of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DdOutcome {
    /// Virtual size of the target, bytes.
    pub size: u64,
    /// `skip` lies behind the end of the source: the target is empty, which is worth a warning.
    pub skipped_past_end: bool,
}

/// Largest `bs=`, bytes; qemu-img's.
const MAX_BLOCK_BYTES: u64 = i32::MAX as u64;

/// Copies.
pub async fn run(options: &DdOptions, job: &JobHandle) -> Result<DdOutcome> {
    if !(1..=MAX_BLOCK_BYTES).contains(&options.block_bytes) {
        return Err(Error::invalid_argument(format!("the block size must be between 1 and {MAX_BLOCK_BYTES}"))
            .field("bs")
            .value(options.block_bytes));
    }
    let source = options.source.open_for_reading().await?;
    let result = copy(options, &source, job).await;
    let closed = source.close().await;
    result.and_then(|outcome| closed.map(|()| outcome))
}

async fn copy(options: &DdOptions, source: &Arc<Node>, job: &JobHandle) -> Result<DdOutcome> {
    let skip = options.skip.saturating_mul(options.block_bytes);
    let skipped_past_end = skip > source.size();
    let rest = source.size().saturating_sub(skip);
    let len = options.count.map_or(rest, |count| count.saturating_mul(options.block_bytes).min(rest));
    let window = Sources::window(Arc::clone(source), skip.min(source.size()), len);
    let mut convert = ConvertOptions::new(Vec::new(), options.target.clone());
    convert.keeps_existing = options.keeps_existing;
    // As in qemu-img, the copied data is on the disk in the end.
    convert.target.cache.get_or_insert_with(|| "writeback".to_owned());
    let outcome = convert_sources(&convert, &window, job).await?;
    Ok(DdOutcome { size: outcome.size, skipped_past_end })
}
