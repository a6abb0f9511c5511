// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What is known of an image without reading its data.

use crate::{ImageSpec, JobHandle};
use cowshed_block::Result;
use serde_json::Value;

/// What to look at.
#[derive(Clone, Debug)]
pub struct InfoOptions {
    /// The image.
    pub image: ImageSpec,
    /// `--backing-chain`: the layers below too.
    pub backing_chain: bool,
}

/// One layer; `Serialize` gives qemu-img's JSON keys.
#[derive(Clone, Debug, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct ImageInfo {
    /// The file and data-file nodes below (QEMU 8 and later).
    pub children: Vec<ChildInfo>,
    /// Internal snapshots.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub snapshots: Vec<SnapshotInfo>,
    /// Backing file as the header names it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backing_filename: Option<String>,
    /// Backing file as it is found from here.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub full_backing_filename: Option<String>,
    /// Format of the backing file as the header names it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backing_filename_format: Option<String>,
    /// Virtual size, bytes.
    pub virtual_size: u64,
    /// File name.
    pub filename: String,
    /// Cluster size, bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cluster_size: Option<u64>,
    /// Format.
    pub format: String,
    /// Space taken on the disk, bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub actual_size: Option<u64>,
    /// Encrypted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub encrypted: Option<bool>,
    /// Stored compressed as a whole.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compressed: Option<bool>,
    /// What only this format has: `{"type": "qcow2", "data": {…}}`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub format_specific: Option<Value>,
    /// Not closed properly.
    pub dirty_flag: bool,
}

/// A child node.
#[derive(Clone, Debug, serde::Serialize)]
pub struct ChildInfo {
    /// Role: "file", "data-file", …
    pub name: String,
    /// The child's own information.
    pub info: Box<ImageInfo>,
}

/// An internal snapshot.
#[derive(Clone, Debug, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct SnapshotInfo {
    /// Number of instructions at the time, with record and replay.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub icount: Option<u64>,
    /// Guest clock, nanoseconds part.
    pub vm_clock_nsec: u64,
    /// Name.
    pub name: String,
    /// Seconds of the creation time.
    pub date_sec: u64,
    /// Nanoseconds of the creation time.
    pub date_nsec: u64,
    /// Guest clock, seconds part.
    pub vm_clock_sec: u64,
    /// Unique id.
    pub id: String,
    /// Bytes of VM state.
    pub vm_state_size: u64,
}

/// Looks: one layer, or with `backing_chain` all, the top first.
pub async fn run(options: &InfoOptions, job: &JobHandle) -> Result<Vec<ImageInfo>> {
    let _ = (options, job);
    todo!()
}
