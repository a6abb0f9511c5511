// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Changes of an image's format options while the image is closed: version, refcount width, lazy refcounts, names of
//! other files.
//!
//! Changes that need more than the header are built beside the old metadata, in free clusters. They are refcount blocks
//! and table of another width, L2 tables without zero clusters, and the snapshot table. After a barrier the header is
//! switched, by one write within its first sector. So a power cut leaves the image as it was before or as it is
//! afterwards. Only then the old metadata, free by the new counts, is given back.

mod rewrite;
mod runs;
mod target;
mod zeroes;

use crate::ProgressFn;
use crate::snapshots::Image;
use cowshed_storage::File;
use cowshed_types::Result;
use rewrite::Rewrite;

/// The changes to an image; `None` leaves a property as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Amendment {
    /// 2 (`compat=0.10`) or 3 (`compat=1.1`).
    pub version: Option<u32>,
    /// log2 of the refcount width in bits, 0 to 6 (`refcount_bits`).
    pub refcount_order: Option<u32>,
    /// Refcounts may lag behind while the dirty bit is set.
    pub lazy_refcounts: Option<bool>,
    /// The backing file as the header is to name it.
    pub backing: Option<NewBacking>,
    /// The external data file as the header is to name it.
    pub data_file: Option<String>,
    /// The data file is a raw image at any time: can only be given up.
    pub data_file_raw: Option<bool>,
}

/// A backing file as a header names it. Nothing is opened or compared.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NewBacking {
    /// Its name, at most 1023 bytes; `None`: no backing file.
    pub name: Option<String>,
    /// Its format; `None`: left to be probed.
    pub format: Option<String>,
}

impl Amendment {
    /// True when nothing is to be changed.
    pub fn is_empty(&self) -> bool {
        *self == Amendment::default()
    }
}

/// Looks whether [`amend`] would take the change, and changes nothing. It doesn't find counts too large for a narrower
/// width, which only a walk over all tables finds. `size`: the disk is going to have this many bytes.
pub async fn check(file: &File, amendment: &Amendment, size: Option<u64>) -> Result<()> {
    named(file, async {
        let image = Image::load_any(file).await?;
        let new = target::header(&image, amendment, size)?;
        if new.compression() == image.header.compression() {
            return Ok(());
        }
        Rewrite::new(image, new, &|_, _| true).await?.check_method().await
    })
    .await
}

/// Carries the change out on the image in `file`, which the caller has locked for writing. `discard`: the space of
/// freed clusters goes back to the file system. After an error the image is as it was.
pub async fn amend(file: &File, amendment: &Amendment, discard: bool, watch: ProgressFn<'_>) -> Result<()> {
    named(file, async {
        let image = Image::load_any(file).await?;
        let new = target::header(&image, amendment, None)?;
        if new == image.header {
            return Ok(());
        }
        Rewrite::new(image, new, watch).await?.run(discard).await
    })
    .await
}

async fn named<T>(file: &File, work: impl Future<Output = Result<T>>) -> Result<T> {
    work.await.map_err(|error| error.file(file.name()))
}
