// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Bitmaps that a program without support for them has made worthless.

use super::session::Session;
use cowshed_block::Result;
use cowshed_layout::qcow2::extension_type;
use cowshed_qcow2::check::{Ledger, Outlook};

impl Session<'_> {
    /// Ends the header's extensions before the one for bitmaps, with a barrier, so that nothing names the bitmaps'
    /// clusters when they are freed. False when another extension follows: the header stays as it is, and so do they.
    pub(super) async fn drop_stale_bitmaps(&mut self) -> Result<bool> {
        let Some(at) = self.last_bitmaps_extension().await? else { return Ok(false) };
        // Type and length are eight aligned bytes: they change in one sector, at once.
        self.write(at, &[0; 8]).await?;
        self.barrier().await?;
        self.header.remove_extension(extension_type::BITMAPS);
        self.stale_bitmaps = false;
        Ok(true)
    }

    /// Where the extension for bitmaps is; `None` unless it is the header's last one.
    async fn last_bitmaps_extension(&self) -> Result<Option<u64>> {
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
                    return Ok(Some(at as u64));
                }
                extension_type::BITMAPS | extension_type::END => break,
                _ => at = next,
            }
        }
        Ok(None)
    }

    /// What a repair can do about what was found.
    pub(super) async fn outlook(&self, ledger: &Ledger) -> Result<Outlook> {
        let bitmaps_stay = self.stale_bitmaps && self.last_bitmaps_extension().await?.is_none();
        let mut outlook =
            Outlook::new(&self.header, ledger, self.obstacles.clone(), bitmaps_stay, self.context.file_len);
        outlook.lossy = self.options.lossy;
        outlook.movable = self.overfull(ledger).await?.into_keys().collect();
        Ok(outlook)
    }
}
