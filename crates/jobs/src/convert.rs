// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Copies one or several images into a new one, in another format, compressed, sparse or on another backing file.

use crate::{ImageSpec, JobHandle};
use cowshed_block::Result;

/// What `convert` is to do.
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
    /// `-n`: write into an existing target.
    pub skip_create: bool,
    /// `--target-is-zero`: the existing target reads as zeroes.
    pub target_is_zero: bool,
    /// `-B`: the new image's backing file; only what differs from "unallocated" above it is copied.
    pub backing_file: Option<String>,
    /// `-F`: format of the backing file.
    pub backing_format: Option<String>,
    /// `-S`: zeroes shorter than this many bytes are written out; 0 leaves no holes at all.
    pub sparse_bytes: u64,
    /// `-W`: writes need not be in order.
    pub out_of_order: bool,
    /// `-m`: requests in flight, 1 to 16.
    pub requests: usize,
    /// `-r`: bytes a second.
    pub rate: Option<u64>,
    /// `--salvage`: unreadable parts become zeroes.
    pub salvage: bool,
    /// `-C`: copy inside the kernel where it can.
    pub copy_range: bool,
}

impl ConvertOptions {
    /// `qemu-img convert SOURCE… TARGET` with its defaults.
    pub fn new(sources: Vec<ImageSpec>, target: ImageSpec) -> Self {
        ConvertOptions {
            sources,
            target,
            create_options: Vec::new(),
            compressed: false,
            skip_create: false,
            target_is_zero: false,
            backing_file: None,
            backing_format: None,
            sparse_bytes: 4096,
            out_of_order: false,
            requests: 8,
            rate: None,
            salvage: false,
            copy_range: false,
        }
    }
}

/// What a conversion did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConvertOutcome {
    /// Virtual size of the target, bytes.
    pub size: u64,
    /// Bytes written as data.
    pub data_bytes: u64,
    /// Bytes left or made zero.
    pub zero_bytes: u64,
    /// Offsets of unreadable parts that became zeroes (`--salvage`).
    pub salvaged: Vec<u64>,
}

/// Runs the conversion.
pub async fn run(options: &ConvertOptions, job: &JobHandle) -> Result<ConvertOutcome> {
    let _ = (options, job);
    todo!()
}
