// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How much space an image would need in another format.

use crate::{ImageSpec, JobHandle};
use cowshed_block::Result;

/// What to measure: an existing image, or an empty one of a given size.
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

/// The answer; `Serialize` gives qemu-img's JSON keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Measurement {
    /// Bytes that a converted image needs.
    pub required: u64,
    /// Bytes that it needs once every guest byte is written.
    #[serde(rename = "fully-allocated")]
    pub fully_allocated: u64,
    /// Bytes for persistent bitmaps, where source and target can hold them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bitmaps: Option<u64>,
}

/// Measures.
pub async fn run(options: &MeasureOptions, job: &JobHandle) -> Result<Measurement> {
    let _ = (options, job);
    todo!()
}
