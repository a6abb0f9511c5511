// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Space for blocks that no entry names: what a failed request had goes back at once, as a hole of the file. A full disk then has
//! it for the next one. A block that had to be filled with zeroes first might never find room for them.

use super::{Reserved, Writer};
use crate::units::Units;
use cowshed_graph::node::ZeroFlags;
use cowshed_graph::protocols::zero_file;
use cowshed_types::memory::try_push;
use cowshed_types::{Result, slip};

impl Writer {
    /// Takes units back whose blocks could not be written. Others may lie behind them by now.
    pub(super) async fn give_back(&self, units: &Units, reserved: &Reserved) -> Result<()> {
        let bytes = reserved.count * units.unit_bytes();
        if self.give_back_bytes(units, reserved, bytes).await {
            return Ok(());
        }
        self.keep_places(units, reserved.start, reserved.count)
    }

    /// The same for a table: as units, where these are no longer than its grid.
    pub(super) async fn give_table_back(&self, units: &Units, reserved: &Reserved, bytes: u64) -> Result<()> {
        let is_units = units.grid == units.unit_bytes() && bytes.is_multiple_of(units.grid);
        if self.give_back_bytes(units, reserved, bytes).await || !is_units {
            return Ok(());
        }
        self.keep_places(units, reserved.start, bytes / units.grid)
    }

    fn keep_places(&self, units: &Units, start: u64, count: u64) -> Result<()> {
        let mut state = self.state();
        for index in (0..count).rev() {
            try_push(&mut state.free, start + index * units.unit_bytes())?;
        }
        Ok(())
    }

    /// Takes space back that could not be written to. False where something lies behind it.
    pub(super) async fn give_back_bytes(&self, units: &Units, reserved: &Reserved, bytes: u64) -> bool {
        let is_hole = self.make_hole(reserved.start, bytes).await;
        let mut state = self.state();
        let end = reserved.start + bytes;
        if state.next != end {
            return false;
        }
        state.next = reserved.start;
        if !is_hole {
            state.fresh = state.fresh.max(end);
        }
        // Places that others have given back before, and behind which nothing lies any more.
        while !slip!("gaps_before_the_end") {
            let unit = units.unit_bytes();
            let Some(last) = state.free.iter().position(|place| place + unit == state.next) else { break };
            // They may hold anything.
            state.fresh = state.fresh.max(state.next);
            state.next = state.free.remove(last);
        }
        true
    }

    /// Makes a range that no block has a hole, which takes no space. False where the file can have none there.
    async fn make_hole(&self, start: u64, bytes: u64) -> bool {
        if !self.file.is_plain() || self.file.is_device() || slip!("full_until_a_block_of_zeroes_fits") {
            return false;
        }
        // Behind the end are zeroes once the file is longer.
        let inside = self.file.len().saturating_sub(start).min(bytes);
        inside == 0 || self.file.punch_hole(start, inside).await.is_ok()
    }

    /// Makes a range that no block has read as zeroes.
    pub(super) async fn clear(&self, start: u64, bytes: u64) -> Result<()> {
        // Behind the end of the file the range needs its length.
        match start + bytes <= self.file.len() && self.make_hole(start, bytes).await {
            true => Ok(()),
            false => zero_file(&self.file, start, bytes, ZeroFlags::default()).await,
        }
    }
}
