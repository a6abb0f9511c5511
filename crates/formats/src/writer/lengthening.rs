// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Disks that become longer, and what a failure leaves of that.

use super::{Usage, Writer, WriterState, look_through};
use crate::blocks::{BlockFormat, ImageFile};
use cowshed_types::{Error, Result};

impl Writer {
    /// Has the format make room for a longer disk.
    pub(crate) async fn lengthen<F: BlockFormat>(&self, format: &F, image: &ImageFile, size: u64) -> Result<()> {
        let durable = self.file.len();
        self.flush(format, image).await?;
        let usage = Usage { end: self.state().next, durable };
        let grown = match format.grow(image, &self.file, size, usage).await {
            Ok(Some(grown)) => grown,
            Ok(None) => return Ok(()),
            Err(error) => {
                if let Err(unknown) = self.look_again(format, image).await {
                    let message = format!("a resize failed, and the image must be opened again: {unknown}");
                    drop(self.lost.set(Error::new(unknown.kind(), message)));
                }
                return Err(error);
            }
        };
        let mut state = self.state();
        state.free.retain(|start| *start >= grown.first);
        state.next = state.next.max(grown.next);
        state.fresh = state.fresh.max(grown.next);
        state.room = state.room.max(state.next);
        state.has_grown = true;
        Ok(())
    }

    /// Finds out where blocks are after a growth that failed, and may have moved some. Nothing waits for a flush.
    async fn look_again<F: BlockFormat>(&self, format: &F, image: &ImageFile) -> Result<()> {
        image.forget();
        format.forget();
        // The old places of moved blocks are free: entries that leave them must be durable before others use them. A
        // sync that fails stops all new blocks.
        drop(self.file.sync().await);
        format.look_again(image).await?;
        let state = look_through(format, image, format.units().as_ref(), &self.file).await?;
        *self.state() = WriterState { has_grown: true, ..state };
        Ok(())
    }
}
