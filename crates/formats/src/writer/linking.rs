// SPDX-License-Identifier: Apache-2.0 OR MIT
//! New tables of formats whose tables are found by a table. A table is zeroes in the file until its entries are written; the
//! entry that leads to it comes after a barrier behind them.

use super::Writer;
use crate::blocks::{BlockFormat, FileTable, ImageFile};
use crate::units::Units;
use crate::writer::Usage;
use cowshed_types::memory::try_push;
use cowshed_types::{Error, Result};

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
        if let Some((offset, bytes)) = format.flush_area() {
            self.entry_room.reserve(&self.file, (offset, offset + bytes)).await?;
        }
        let Some(missing) = format.missing_table(image, block).await? else {
            let slots = [Some(format.slot(image, block).await?), format.second_slot(image, block).await?];
            for (table, index) in slots.into_iter().flatten() {
                self.ensure_entry(format, (table.offset, table.bytes), index).await?;
            }
            return Ok(());
        };
        let (bytes, index) = (missing.bytes.next_multiple_of(units.grid), block % missing.blocks);
        let known = self.state().tables.get(&missing.entry_offset).copied();
        if let Some(start) = known {
            return self.ensure_entry(format, (start, missing.bytes), index).await;
        }
        // All that a flush will write has space before the table is one.
        self.entry_room
            .ensure(
                &self.file,
                missing.entry_offset,
                (missing.entry_offset, missing.entry_offset + format.entry_bytes()),
            )
            .await?;
        let reserved = self.reserve_bytes(units, bytes, 0).await?;
        let made = async {
            format.table_entry(reserved.start)?;
            let stale = reserved.fresh.min(reserved.start + bytes).saturating_sub(reserved.start);
            if stale > 0 {
                self.clear(reserved.start, stale).await?;
            }
            self.ensure_entry(format, (reserved.start, missing.bytes), index).await
        };
        if let Err(error) = made.await {
            let result = self.give_table_back(units, &reserved, bytes).await;
            return result.and(Err(error));
        }
        self.state().tables.insert(missing.entry_offset, reserved.start);
        Ok(())
    }

    /// Space for entry `index` of a table.
    async fn ensure_entry<F: BlockFormat>(&self, format: &F, (offset, bytes): (u64, u64), index: u64) -> Result<()> {
        let at = offset + index * format.entry_bytes();
        self.entry_room.ensure(&self.file, at, (offset, offset + bytes)).await
    }

    /// The place of a block's entry, which [`Self::prepare_slot`] has seen to.
    pub(super) async fn slot<F: BlockFormat>(
        &self,
        format: &F,
        image: &ImageFile,
        block: u64,
    ) -> Result<(FileTable, u64)> {
        let Some(missing) = format.missing_table(image, block).await? else {
            return format.slot(image, block).await;
        };
        let offset = self.state().tables.get(&missing.entry_offset).copied();
        let offset = offset.ok_or_else(|| Error::internal("the entry of a new block has no table").value(block))?;
        Ok((FileTable { field: missing.field, offset, bytes: missing.bytes }, block % missing.blocks))
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
