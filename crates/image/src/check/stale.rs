// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Bitmaps that a program without support for them has made worthless.

use super::session::Session;
use cowshed_block::Result;
use cowshed_layout::qcow2::extension_type;

impl Session<'_> {
    /// Ends the header's extensions before the one for bitmaps, with a barrier, so that nothing names the bitmaps'
    /// clusters when they are freed. False when another extension follows: the header stays as it is, and so do they.
    pub(super) async fn drop_stale_bitmaps(&mut self) -> Result<bool> {
        let len = (self.geometry.cluster_size() as usize).min(1 << 16);
        let bytes = self.read(0, len).await?;
        let number = |at: usize| {
            let word = bytes.get(at..at + 4)?;
            Some(u32::from_be_bytes(word.try_into().ok()?))
        };
        let mut at = self.header.header_length as usize;
        while let (Some(kind), Some(size)) = (number(at), number(at + 4)) {
            let next = at + 8 + (size as usize).next_multiple_of(8);
            match kind {
                extension_type::BITMAPS if number(next).is_none_or(|kind| kind == extension_type::END) => {
                    // Type and length are eight aligned bytes: they change in one sector, at once.
                    self.write(at as u64, &[0; 8]).await?;
                    self.file.sync().await?;
                    self.header.remove_extension(extension_type::BITMAPS);
                    self.stale_bitmaps = false;
                    return Ok(true);
                }
                extension_type::BITMAPS | extension_type::END => break,
                _ => at = next,
            }
        }
        Ok(false)
    }
}
