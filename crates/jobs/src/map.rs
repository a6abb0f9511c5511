// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Where the bytes of an image are: runs as `qemu-img map` lists them.

use crate::{ImageSpec, JobHandle};
use cowshed_block::Result;

/// What to map.
#[derive(Clone, Debug)]
pub struct MapOptions {
    /// The image.
    pub image: ImageSpec,
    /// First guest byte.
    pub start: u64,
    /// Length in bytes; to the end if `None`.
    pub len: Option<u64>,
}

/// One run; `Serialize` gives qemu-img's JSON keys.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct MapEntry {
    /// First guest byte.
    pub start: u64,
    /// Length in bytes.
    pub length: u64,
    /// Layers down from the image.
    pub depth: u32,
    /// Allocated in some layer of the chain.
    pub present: bool,
    /// Reads as zeroes.
    pub zero: bool,
    /// Holds data.
    pub data: bool,
    /// Stored compressed.
    pub compressed: bool,
    /// Offset in the file, when the bytes stand there as they are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub offset: Option<u64>,
    /// File of the layer. Not part of the JSON (the human table prints it).
    #[serde(skip)]
    pub file: Option<String>,
}

/// Maps.
pub async fn run(options: &MapOptions, job: &JobHandle) -> Result<Vec<MapEntry>> {
    let _ = (options, job);
    todo!()
}
