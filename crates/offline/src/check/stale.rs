// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Bitmaps that a program without support for them has made worthless.

use super::session::CheckSession;
use cowshed_layout::qcow2::{HeaderStages, extension_type, switch_header};
use cowshed_qcow2::check::{Ledger, Outlook};
use cowshed_types::Result;
use cowshed_types::memory::set_for;

/// Bytes of which a write is atomic.
const SECTOR_BYTES: usize = 512;

impl CheckSession<'_> {
    /// Takes the extension for bitmaps out of the header, durably, so that nothing names the bitmaps' clusters when they
    /// are freed. False where that can't be done at once: the header stays as it is, and so do they.
    pub(super) async fn drop_stale_bitmaps(&mut self) -> Result<bool> {
        let Some(stages) = self.without_bitmaps().await? else { return Ok(false) };
        for stage in stages {
            for (at, bytes) in stage {
                self.write(at, &bytes).await?;
            }
            self.barrier().await?;
        }
        self.header.remove_extension(extension_type::BITMAPS);
        self.header.remove_extension(extension_type::BITMAP_JOURNAL);
        self.stale_bitmaps = false;
        Ok(true)
    }

    /// The writes that take the extension out, a power cut leaving the old header or the new; `None` where there are none.
    async fn without_bitmaps(&self) -> Result<Option<HeaderStages>> {
        let mut new = self.header.clone();
        new.remove_extension(extension_type::BITMAPS);
        new.remove_extension(extension_type::BITMAP_JOURNAL);
        let cluster = self.read(0, self.geometry.cluster_size() as usize).await?;
        let stages = switch_header(&cluster, &self.header, &new)?;
        let is_torn = stages.iter().flatten().any(|(at, bytes)| *at == 0 && bytes.len() > SECTOR_BYTES);
        Ok((!is_torn).then_some(stages))
    }

    /// The possible effect of a repair on the findings.
    pub(super) async fn outlook(&self, ledger: &Ledger) -> Result<Outlook> {
        let bitmaps_stay = self.stale_bitmaps && self.without_bitmaps().await?.is_none();
        let mut outlook =
            Outlook::new(&self.header, ledger, self.obstacles.clone(), bitmaps_stay, self.context.file_len)?;
        outlook.lossy = self.options.lossy;
        let movable = self.overfull(ledger).await?;
        outlook.movable = set_for(movable.len())?;
        outlook.movable.extend(movable.into_keys());
        Ok(outlook)
    }
}
