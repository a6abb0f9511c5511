// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A VDI disk that grows: docs/formats/block-formats.md. The map takes more entries. Where it has no room for them, the first
//! blocks move to the end of the file, and a longer map takes their place. One write of the header's sector switches to it.

use super::{Shape, Vdi, table};
use crate::blocks::{BlockFormat, Grown, ImageFile};
use crate::writer::Usage;
use cowshed_graph::node::ZeroFlags;
use cowshed_graph::protocols::zero_file;
use cowshed_layout::vdi::{ALLOCATED_AT, ENTRY_BYTES, HEADER_BYTES, VdiBlock, VdiShape, largest_disk};
use cowshed_storage::{File, IoBuf};
use cowshed_types::memory::try_push;
use cowshed_types::{Error, ErrorKind, Result, slip};
use std::sync::atomic::Ordering;

/// Entries and data are copied in parts of this many bytes.
const PART_BYTES: u64 = 1 << 20;
const SECTOR_BYTES: u64 = 512;
const UNALLOCATED: [u8; 4] = [0xff; 4];

/// The blocks of a disk that grows.
struct Counts {
    /// Entries before, and after.
    before: u64,
    after: u64,
    /// The number of the next new block.
    next: u64,
}

impl Vdi {
    /// Makes room for a disk of `size` bytes, and has the header say it. Everything before is durable, and no request runs.
    pub(super) async fn grow_to(&self, image: &ImageFile, file: &File, size: u64, usage: Usage) -> Result<Grown> {
        let (shape, block_bytes) = (self.shape(), self.header.block_bytes);
        // A disk is read in whole sectors.
        let size = size.checked_next_multiple_of(SECTOR_BYTES).unwrap_or(size);
        if size > largest_disk(block_bytes) {
            return Err(Error::unsupported("Unsupported VDI image size").field("size").value(size));
        }
        let next = usage.end.saturating_sub(shape.data_offset).div_ceil(block_bytes);
        let counts = Counts { before: shape.size.div_ceil(block_bytes), after: size.div_ceil(block_bytes), next };
        let moves = shape.map.offset + counts.after * ENTRY_BYTES > shape.data_offset;
        if moves && !self.may_move.load(Ordering::Relaxed) {
            let message = "the block map has no room for so many blocks, and is moved only by 'resize', \
                           'block_resize' and a commit";
            return Err(Error::unsupported(message).field("offset_bmap").value(shape.map.offset));
        }
        self.expect_room(&shape, &counts, size, moves)?;
        self.before_change(file).await?;
        self.clear_tail(image, file, &shape).await?;
        let (shape, next) = match moves {
            false => self.extend_map(file, &shape, &counts).await?,
            true => self.move_map(image, file, &shape, &counts).await?,
        };
        let shape = Shape { size, ..shape };
        let (result, mut sector) = file.read_at(IoBuf::try_zeroed(HEADER_BYTES)?, 0).await;
        result?;
        let written = VdiShape {
            map_offset: shape.map.offset,
            data_offset: shape.data_offset,
            size,
            blocks: counts.after,
            allocated: next,
        };
        written.put(&mut sector)?;
        file.write_at(sector, 0).await.0?;
        file.sync().await?;
        self.set_shape(shape);
        image.forget();
        Ok(Grown { first: shape.data_offset, next: shape.data_offset + next * block_bytes })
    }

    /// Refuses a growth whose numbers the header or an entry has no room for, before anything changes.
    fn expect_room(&self, shape: &Shape, counts: &Counts, size: u64, moves: bool) -> Result<()> {
        let moved = if moves { self.blocks_of_map(counts) } else { 0 };
        let added = if self.header.is_fixed { counts.after - counts.before } else { 0 };
        // At most `moved` blocks go behind all others.
        let allocated = counts.next.max(moved) + moved + added;
        number_entry(allocated.saturating_sub(1))?;
        let after = VdiShape {
            map_offset: if moves { shape.data_offset } else { shape.map.offset },
            data_offset: shape.data_offset + moved * self.header.block_bytes,
            size,
            blocks: counts.after,
            allocated,
        };
        after.put(&mut [0; HEADER_BYTES])
    }

    /// The longer map covers this number of blocks.
    fn blocks_of_map(&self, counts: &Counts) -> u64 {
        (counts.after * ENTRY_BYTES).div_ceil(self.header.block_bytes)
    }

    /// Zeroes the bytes behind the disk's end in its last block: they become a part of the disk.
    async fn clear_tail(&self, image: &ImageFile, file: &File, shape: &Shape) -> Result<()> {
        let block_bytes = self.header.block_bytes;
        let used = shape.size % block_bytes;
        if used == 0 {
            return Ok(());
        }
        let entry = u32::from_le_bytes(image.entry(shape.map, shape.size / block_bytes).await?);
        if let VdiBlock::At(number) = VdiBlock::of(entry) {
            let host = shape.data_offset + u64::from(number) * block_bytes + used;
            zero_file(file, host, block_bytes - used, ZeroFlags::default()).await?;
        }
        Ok(())
    }

    /// New entries where the map has room for them. The number of the next new block.
    async fn extend_map(&self, file: &File, shape: &Shape, counts: &Counts) -> Result<(Shape, u64)> {
        let next = self.allocate_new(file, shape, counts, counts.next).await?;
        let mut at = counts.before;
        while at < counts.after {
            let part = (counts.after - at).min(PART_BYTES / ENTRY_BYTES);
            let entries = self.new_entries(at - counts.before..at - counts.before + part, counts.next, 0)?;
            file.write_at(IoBuf::copy_from(&entries), shape.map.offset + at * ENTRY_BYTES).await.0?;
            at += part;
        }
        if !slip!("vdi_size_before_the_new_entries") {
            file.sync().await?;
        }
        Ok((Shape { map: table(shape.map.offset, counts.after), ..*shape }, next))
    }

    /// Entries of new blocks: those of a fixed disk are there, from number `first` less `moved` on.
    fn new_entries(&self, blocks: std::ops::Range<u64>, first: u64, moved: u64) -> Result<Vec<u8>> {
        let mut entries = Vec::new();
        for block in blocks {
            let entry = match self.header.is_fixed {
                true => number_entry(first + block - moved)?,
                false => UNALLOCATED,
            };
            for byte in entry {
                try_push(&mut entries, byte)?;
            }
        }
        Ok(entries)
    }

    /// Space for the new blocks of a fixed disk, with zeroes. The number behind them.
    async fn allocate_new(&self, file: &File, shape: &Shape, counts: &Counts, next: u64) -> Result<u64> {
        if !self.header.is_fixed {
            return Ok(next);
        }
        let end = next + (counts.after - counts.before);
        let host = |number: u64| shape.data_offset + number * self.header.block_bytes;
        let stale = file.len().min(host(end)).saturating_sub(host(next));
        if stale > 0 {
            zero_file(file, host(next), stale, ZeroFlags::default()).await?;
        }
        if file.len() < host(end) {
            file.set_len(host(end)).await?;
        }
        Ok(end)
    }

    /// A longer map in the place of the first blocks. The number of the next new block, behind it.
    async fn move_map(&self, image: &ImageFile, file: &File, shape: &Shape, counts: &Counts) -> Result<(Shape, u64)> {
        let block_bytes = self.header.block_bytes;
        let moved = self.blocks_of_map(counts);
        let (next, end) = self.make_room(image, file, shape, counts, moved).await?;
        // Nothing leads into the first blocks now.
        let mut at = 0;
        while at < counts.after {
            let part = (counts.after - at).min(PART_BYTES / ENTRY_BYTES);
            let old = at..(at + part).min(counts.before.max(at));
            let mut entries = self.old_entries(file, shape, old.clone(), moved).await?;
            let new = old.end.max(counts.before) - counts.before..at + part - counts.before.min(at + part);
            entries.extend(self.new_entries(new, next, moved)?);
            file.write_at(IoBuf::copy_from(&entries), shape.data_offset + at * ENTRY_BYTES).await.0?;
            at += part;
        }
        if !slip!("vdi_led_to_a_map_before_it_is_durable") {
            file.sync().await?;
        }
        let data_offset = shape.data_offset + moved * block_bytes;
        Ok((Shape { map: table(shape.data_offset, counts.after), data_offset, ..*shape }, end - moved))
    }

    /// Old entries by the new numbers.
    async fn old_entries(
        &self,
        file: &File,
        shape: &Shape,
        blocks: std::ops::Range<u64>,
        moved: u64,
    ) -> Result<Vec<u8>> {
        if blocks.is_empty() {
            return Ok(Vec::new());
        }
        let len = (blocks.end - blocks.start) * ENTRY_BYTES;
        let (result, bytes) =
            file.read_at(IoBuf::try_zeroed(len as usize)?, shape.map.offset + blocks.start * ENTRY_BYTES).await;
        result?;
        let mut entries = bytes.to_vec();
        for entry in entries.as_chunks_mut::<4>().0 {
            if let VdiBlock::At(number) = VdiBlock::of(u32::from_le_bytes(*entry)) {
                let number = u64::from(number).checked_sub(moved);
                *entry = number_entry(number.ok_or_else(|| Error::internal("a block stayed where the map goes"))?)?;
            }
        }
        Ok(entries)
    }

    /// Has no entry lead to the first `moved` blocks: what is there moves behind all others. The next number, and that
    /// behind the new blocks of a fixed disk.
    async fn make_room(
        &self,
        image: &ImageFile,
        file: &File,
        shape: &Shape,
        counts: &Counts,
        moved: u64,
    ) -> Result<(u64, u64)> {
        let block_bytes = self.header.block_bytes;
        let host = |number: u64| shape.data_offset + number * block_bytes;
        let mut next = counts.next.max(moved);
        let mut entries = Vec::new();
        for block in 0..counts.before {
            let entry = u32::from_le_bytes(image.entry(shape.map, block).await?);
            let VdiBlock::At(number) = VdiBlock::of(entry) else { continue };
            if u64::from(number) >= moved {
                continue;
            }
            let mut at = 0;
            while at < block_bytes {
                let part = (block_bytes - at).min(PART_BYTES);
                let (result, bytes) = file.read_at(IoBuf::try_zeroed(part as usize)?, host(number.into()) + at).await;
                result?;
                file.write_at(bytes, host(next) + at).await.0?;
                at += part;
            }
            try_push(&mut entries, (block, number_entry(next)?))?;
            next += 1;
        }
        if file.len() < host(next) {
            file.set_len(host(next)).await?;
        }
        // A full disk is noticed before the header changes.
        let end = self.allocate_new(file, shape, counts, next).await?;
        reserve(file, shape.data_offset, counts.after * ENTRY_BYTES).await?;
        // As for every new block: QEMU puts its next one where the header says.
        let count = u32::try_from(next).map_err(|_| too_many(next))?;
        file.write_at(IoBuf::copy_from(&count.to_le_bytes()), ALLOCATED_AT).await.0?;
        if !slip!("vdi_blocks_moved_before_they_are_durable") {
            file.sync().await?;
        }
        for (block, entry) in entries {
            file.write_at(IoBuf::copy_from(&entry), shape.map.offset + block * ENTRY_BYTES).await.0?;
        }
        file.sync().await?;
        Ok((next, end))
    }
}

/// Space for a map where a hole of the file may be.
async fn reserve(file: &File, offset: u64, len: u64) -> Result<()> {
    if file.is_device() {
        return Ok(());
    }
    match file.allocate(offset, len).await {
        Err(error) if error.kind() == ErrorKind::Unsupported => Ok(()),
        done => done,
    }
}

fn too_many(number: u64) -> Error {
    Error::unsupported("a VDI image has no more blocks").value(number)
}

fn number_entry(number: u64) -> Result<[u8; 4]> {
    match u32::try_from(number).ok().filter(|number| matches!(VdiBlock::of(*number), VdiBlock::At(_))) {
        Some(number) => Ok(number.to_le_bytes()),
        None => Err(too_many(number)),
    }
}
