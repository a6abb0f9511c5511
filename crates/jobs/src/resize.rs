// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Changes the virtual size of an image.

use crate::{ImageSpec, JobHandle};
use cowshed_block::Result;
use cowshed_image::node::Preallocation;

/// The new size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NewSize {
    /// So many bytes.
    Absolute(u64),
    /// So many bytes more (`+SIZE`).
    Grow(u64),
    /// So many bytes less (`-SIZE`).
    Shrink(u64),
}

/// What to resize.
#[derive(Clone, Debug)]
pub struct ResizeOptions {
    /// The image.
    pub image: ImageSpec,
    /// Its new size.
    pub size: NewSize,
    /// `--shrink`: without it shrinking is refused, since it loses data.
    pub shrink: bool,
    /// `--preallocation` of what is added.
    pub preallocation: Preallocation,
}

/// Sizes before and after, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResizeOutcome {
    /// Before.
    pub old_size: u64,
    /// After.
    pub new_size: u64,
}

/// Resizes.
pub async fn run(options: &ResizeOptions, job: &JobHandle) -> Result<ResizeOutcome> {
    let _ = (options, job);
    todo!()
}
