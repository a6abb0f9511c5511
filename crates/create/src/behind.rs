// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The bytes behind a new image in a file that can't begin anew: the disk of another image, a device, an export.

use cowshed_storage::File;
use cowshed_types::{Error, ErrorKind, Result};

/// The fate of these bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Behind {
    /// They stay, as in QEMU.
    Kept,
    /// They go, as in QEMU; those of a device or an export stay.
    Cut,
    /// The image counts them as its own: there may be none, as in QEMU.
    Counted,
    /// The end of the file is a part of the image: there may be none.
    Ended,
}

impl Behind {
    /// True where no device or export with bytes behind the image will do.
    pub(super) fn must_go(self) -> bool {
        matches!(self, Behind::Counted | Behind::Ended)
    }

    /// Refuses a file whose length can't become that of a new image of `len` bytes, and must. Changes nothing.
    pub(super) fn check(self, file: &File, len: u64) -> Result<()> {
        if file.len() == len {
            return Ok(());
        }
        if self == Behind::Kept {
            if file.len() < len && file.is_device() {
                let message = format!("the device has {} bytes and the image needs {len}", file.len());
                return Err(Error::new(ErrorKind::NoSpace, message));
            }
            return Ok(());
        }
        file.fixed_length().map_or(Ok(()), |words| Err(Error::unsupported(words)))
    }

    /// Gives the file the length of a new image of `len` bytes, where it may not stay longer.
    ///
    /// # Errors
    /// The length can't change, and must; or there is no room: nothing was changed.
    pub(super) async fn cut(self, file: &File, len: u64) -> Result<()> {
        self.check(file, len)?;
        if self == Behind::Kept || file.len() == len {
            return Ok(());
        }
        if file.len() < len {
            return if file.is_device() { file.set_len(len).await } else { Ok(()) };
        }
        // A device takes every smaller length, and keeps its own.
        file.set_len(len).await?;
        self.check_end(file, len)
    }

    /// Refuses a file with bytes behind an image of `len` bytes, where there may be none.
    pub(super) fn check_end(self, file: &File, len: u64) -> Result<()> {
        if file.len() <= len || !self.must_go() {
            return Ok(());
        }
        let message = format!("the image ends with its file: it has {len} bytes, and the file has {}", file.len());
        let error = Error::unsupported(message);
        Err(match (self, file.is_remote()) {
            (Behind::Ended, _) => error.hint("; subformat=dynamic has no such rule"),
            (_, true) => error.qemu("Cannot resize NBD nodes"),
            (_, false) => error.qemu("Cannot resize device files"),
        })
    }
}
