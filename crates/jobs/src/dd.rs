// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Copies a part of an image block by block into a new one.

use crate::{ImageSpec, JobHandle};
use cowshed_block::Result;

/// What to copy.
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
}

/// What was copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DdOutcome {
    /// Virtual size of the target, bytes.
    pub size: u64,
}

/// Copies.
pub async fn run(options: &DdOptions, job: &JobHandle) -> Result<DdOutcome> {
    let _ = (options, job);
    todo!()
}
