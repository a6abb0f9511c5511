// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Changes the virtual size of an image.

use crate::{ImageSpec, JobHandle, in_work};
use cowshed_image::node::{ChildRole, StorageKind};
use cowshed_image::{Node, Preallocation};
use cowshed_types::{Errno, Error, Result};

/// The new size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NewSize {
    /// The new size in bytes.
    Absolute(u64),
    /// Bytes to add (`+SIZE`).
    Grow(u64),
    /// Bytes to remove (`-SIZE`).
    Shrink(u64),
}

/// The image to resize, and its new size.
#[derive(Clone, Debug)]
pub struct ResizeOptions {
    /// The image.
    pub image: ImageSpec,
    /// Its new size.
    pub size: NewSize,
    /// `--shrink`: without it shrinking is refused, since it loses data.
    pub shrink: bool,
    /// `--preallocation` of the added range.
    pub preallocation: Preallocation,
}

/// Sizes before and after, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResizeOutcome {
    /// The size before, in bytes.
    pub old_size: u64,
    /// The size afterwards, in bytes.
    pub new_size: u64,
}

impl NewSize {
    /// The size in bytes that an image of `old` bytes gets.
    pub fn apply(self, old: u64) -> Result<u64> {
        let size = match self {
            NewSize::Absolute(size) => Some(size),
            NewSize::Grow(more) => old.checked_add(more),
            NewSize::Shrink(less) => Some(old.saturating_sub(less)),
        };
        if size == Some(0) {
            return Err(Error::invalid_argument("the new image size must be positive").field("size"));
        }
        size.filter(|size| i64::try_from(*size).is_ok())
            .ok_or_else(|| Error::invalid_argument("the new image size must be below 2^63 bytes").field("size"))
    }
}

/// Resizes.
pub async fn run(options: &ResizeOptions, job: &JobHandle) -> Result<ResizeOutcome> {
    job.pause_point().await?;
    let node = options.image.open(options.image.request()?.force_share(false).writable(true).for_resize()).await?;
    let result = resize(&node, options).await.map_err(|error| {
        let sentence = failed_sentence(&node, options, error.errno());
        in_work(error, sentence).file(node.filename())
    });
    let closed = node.close().await;
    result.and_then(|outcome| closed.map(|()| outcome))
}

/// QEMU's words for a change of the size that fails.
fn failed_sentence(node: &Node, options: &ResizeOptions, errno: Errno) -> String {
    let mode = options.preallocation;
    let space = match (mode, errno) {
        (Preallocation::Off, _) | (Preallocation::Full, Errno::EFBIG) => "Could not resize file",
        _ => mode.failed_sentence(),
    };
    let Some(reach) = node.mapped_bytes() else { return space.to_owned() };
    let has_data_file = node.child(ChildRole::DataFile).is_some();
    let wanted = options.size.apply(node.size()).unwrap_or(0);
    match mode {
        Preallocation::Off if wanted > reach => "Failed to grow the L1 table".to_owned(),
        Preallocation::Off => "Failed to update the image size".to_owned(),
        Preallocation::Falloc | Preallocation::Full if !has_data_file => {
            format!("Failed to resize underlying file: {space}")
        }
        _ => space.to_owned(),
    }
}

async fn resize(node: &Node, options: &ResizeOptions) -> Result<ResizeOutcome> {
    let old_size = node.size();
    let new_size = options.size.apply(old_size)?;
    if new_size <= old_size && options.preallocation != Preallocation::Off {
        return Err(Error::invalid_argument("Preallocation can only be used for growing images"));
    }
    if new_size < old_size && !options.shrink {
        return Err(Error::invalid_argument(
            "shrinking an image deletes all data beyond its new end: use --shrink to do it all the same",
        ));
    }
    if node.is_sized_in_sectors() && !new_size.is_multiple_of(512) {
        return Err(Error::invalid_argument("The new size must be a multiple of 512").field("size").value(new_size));
    }
    check_grows(node, old_size, new_size)?;
    node.resize(new_size, options.preallocation).await?;
    node.flush().await?;
    Ok(ResizeOutcome { old_size, new_size: node.size() })
}

/// Refuses another size for an image whose size can't be changed: a raw disk would only report that it has become
/// smaller.
fn check_grows(node: &Node, old_size: u64, new_size: u64) -> Result<()> {
    let below = node.child(ChildRole::File).filter(|_| node.is_raw());
    let sentence = match below.as_deref().unwrap_or(node).storage_kind() {
        Some(StorageKind::Export) => "Cannot resize NBD nodes",
        Some(StorageKind::HostDevice) => "Cannot resize device files",
        _ => return Ok(()),
    };
    match new_size == old_size {
        true => Ok(()),
        false => Err(Error::unsupported("the size of a device or export can't be changed").qemu(sentence)),
    }
}

#[cfg(test)]
mod tests {
    use super::NewSize;

    #[test]
    fn sizes_are_relative_or_absolute() {
        assert_eq!(NewSize::Absolute(7).apply(5).expect("size"), 7);
        assert_eq!(NewSize::Grow(7).apply(5).expect("size"), 12);
        assert_eq!(NewSize::Shrink(3).apply(5).expect("size"), 2);
        let wrong = [NewSize::Shrink(5), NewSize::Shrink(6), NewSize::Grow(u64::MAX), NewSize::Absolute(1 << 63)];
        for wrong in wrong.into_iter().chain([NewSize::Absolute(0)]) {
            assert!(wrong.apply(5).is_err(), "{wrong:?}");
        }
        assert!(NewSize::Grow(0).apply(0).is_err());
    }
}
