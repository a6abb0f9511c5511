// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Creation of images.

use cowshed_block::Result;

/// What to create, as the user says it.
#[derive(Clone, Debug, Default)]
pub struct CreateRequest {
    /// File name (or `file:…`).
    pub filename: String,
    /// Format: "raw" or "qcow2".
    pub format: String,
    /// Virtual size in bytes; of the backing file if `None`.
    pub size: Option<u64>,
    /// `-o`: each a `key=value,key=value` list.
    pub options: Vec<String>,
    /// `-b`.
    pub backing_file: Option<String>,
    /// `-F`.
    pub backing_format: Option<String>,
    /// `-u`: the backing file is neither opened nor needed.
    pub backing_unchecked: bool,
}

/// A checked request. [`CreatePlan::summary`] is what qemu-img prints before it writes.
#[derive(Clone, Debug)]
pub struct CreatePlan {}

/// Checks a request: parses its options, opens the backing file for its size.
pub async fn prepare(request: &CreateRequest) -> Result<CreatePlan> {
    let _ = request;
    todo!()
}

impl CreatePlan {
    /// `Formatting 'a.qcow2', fmt=qcow2 cluster_size=65536 …`, as qemu-img prints it.
    pub fn summary(&self) -> &str {
        todo!()
    }
    /// Virtual size in bytes.
    pub fn size(&self) -> u64 {
        todo!()
    }
    /// Creates the image.
    pub async fn run(&self) -> Result<()> {
        todo!()
    }
}
