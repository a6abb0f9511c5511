// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The bytes at the end of a file that a format wants there, and the length that a close leaves.

use super::Writer;
use crate::blocks::{BlockFormat, ImageFile};
use cowshed_storage::{File, IoBuf};
use cowshed_types::{ErrorKind, Result};

/// True where a file ends with these bytes.
pub(super) async fn ends_with(file: &File, tail: &[u8]) -> Result<bool> {
    let Some(start) = file.len().checked_sub(tail.len() as u64) else { return Ok(false) };
    if tail.is_empty() {
        return Ok(true);
    }
    let (result, there) = file.read_at(IoBuf::try_zeroed(tail.len())?, start).await;
    result?;
    Ok(there[..] == *tail)
}

impl Writer {
    /// Called before each change.
    pub(super) async fn before_change<F: BlockFormat>(&self, format: &F) -> Result<()> {
        format.before_change(&self.file).await?;
        let lacks_tail = self.state().lacks_tail;
        if lacks_tail { self.restore_tail().await } else { Ok(()) }
    }

    /// Puts the bytes at the end of the file back, durably and behind all that it has. Else the bytes there are the guest's, and
    /// a reader takes them for the format's.
    async fn restore_tail(&self) -> Result<()> {
        let Some(units) = &self.units else { return Ok(()) };
        let _growing = self.growing.lock().await;
        let start = {
            let state = self.state();
            if !state.lacks_tail {
                return Ok(());
            }
            units.behind(self.file.len().max(state.room))
        };
        let end = start + units.tail.len() as u64;
        {
            let mut state = self.state();
            state.has_grown = true;
            state.fresh = state.fresh.max(end);
        }
        self.file.set_len(end).await?;
        self.file.write_at(IoBuf::copy_from(&units.tail), start).await.0?;
        self.file.sync().await?;
        self.state().lacks_tail = false;
        Ok(())
    }

    /// Leaves the file as long as it must be. No request runs.
    pub(crate) async fn complete<F: BlockFormat>(&self, format: &F, image: &ImageFile) -> Result<()> {
        self.flush(format, image).await?;
        format.settle(&self.file).await?;
        let Some(units) = &self.units else { return Ok(()) };
        let end = {
            let state = self.state();
            if !state.has_grown || self.file.is_device() {
                return Ok(());
            }
            state.next
        };
        if !units.tail.is_empty() {
            match self.file.write_at(IoBuf::copy_from(&units.tail), end).await.0 {
                // The disk is full: the bytes at the end of the file, behind free space, stay there.
                Err(error) if error.kind() == ErrorKind::NoSpace && ends_with(&self.file, &units.tail).await? => {
                    return Ok(());
                }
                done => done?,
            }
            self.file.sync().await?;
        }
        self.file.set_len(end + units.tail.len() as u64).await?;
        self.file.sync().await?;
        let mut state = self.state();
        state.room = end;
        state.has_grown = false;
        Ok(())
    }
}
