// SPDX-License-Identifier: Apache-2.0 OR MIT
//! New tables of formats whose tables are found by a table. A table is zeroes in the file until its entries are written; the
//! entry that leads to it comes after a barrier behind them.

use super::Writer;
use crate::formats::blocks::{BlockFormat, ImageFile, Table};
use crate::formats::units::Units;
use crate::formats::writer::Usage;
use crate::node::ZeroFlags;
use crate::protocols::zero_file;
use cowshed_block::memory::try_push;
use cowshed_block::{Error, Result};

impl Writer {
    /// Sees to it that the entry of a block has a place: in a new table, where there is none.
    pub(super) async fn prepare_slot<F: BlockFormat>(
        &self,
        format: &F,
        image: &ImageFile,
        units: &Units,
        block: u64,
    ) -> Result<()> {
        let _turn = self.linking.lock().await;
        let Some(missing) = format.missing_table(image, block).await? else {
            return format.slot(image, block).await.map(drop);
        };
        if self.state().tables.contains_key(&missing.entry_offset) {
            return Ok(());
        }
        let bytes = missing.bytes.next_multiple_of(units.grid);
        let reserved = self.reserve_bytes(units, bytes, 0).await?;
        let stale = reserved.fresh.min(reserved.start + bytes).saturating_sub(reserved.start);
        if stale > 0 {
            zero_file(&self.file, reserved.start, stale, ZeroFlags::default()).await?;
        }
        self.state().tables.insert(missing.entry_offset, reserved.start);
        Ok(())
    }

    /// The place of a block's entry, which [`Self::prepare_slot`] has seen to.
    pub(super) async fn slot<F: BlockFormat>(&self, format: &F, image: &ImageFile, block: u64) -> Result<(Table, u64)> {
        let Some(missing) = format.missing_table(image, block).await? else {
            return format.slot(image, block).await;
        };
        let offset = self.state().tables.get(&missing.entry_offset).copied();
        let offset = offset.ok_or_else(|| Error::internal("the entry of a new block has no table").value(block))?;
        Ok((Table { field: missing.field, offset, bytes: missing.bytes }, block % missing.blocks))
    }

    /// Has the entries lead to new tables, which are durable.
    pub(super) async fn link<F: BlockFormat>(
        &self,
        format: &F,
        image: &ImageFile,
        tables: Vec<(u64, u64)>,
        usage: Usage,
    ) -> Result<()> {
        if tables.is_empty() {
            return Ok(());
        }
        let _turn = self.linking.lock().await;
        let mut entries = Vec::new();
        for (entry_offset, host) in &tables {
            try_push(&mut entries, (*entry_offset, format.table_entry(*host)?))?;
        }
        format.write_entries(image, &self.file, entries, usage).await?;
        image.forget();
        format.forget();
        let mut state = self.state();
        for (entry_offset, _) in &tables {
            state.tables.remove(entry_offset);
        }
        Ok(())
    }
}
