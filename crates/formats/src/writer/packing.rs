// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Packed blocks of formats that have them: written one behind the other, each from a sector on. So no sector with data of another
//! block is ever written again.

use super::{Pending, Writer};
use crate::blocks::{BlockFormat, ImageFile};
use crate::mapped::RunSource;
use crate::units::Units;
use cowshed_codec::Codec;
use cowshed_graph::node::Link;
use cowshed_storage::{IoBuf, rt};
use cowshed_types::memory::try_push;
use cowshed_types::{Compression, Error, Result};
use futures_util::future::join_all;

/// Packed blocks begin at multiples of this many bytes.
const SECTOR_BYTES: u64 = 512;
/// Bytes that one thread packs at once.
const PACKED_AT_ONCE: u64 = 128 << 10;

/// A block, and its packed bytes; `None` where it doesn't get shorter.
struct Packing {
    at: u64,
    bytes: IoBuf,
    packed: Option<Vec<u8>>,
}

impl Writer {
    /// Writes whole blocks, packed where that makes them shorter.
    pub(crate) async fn write_packed<F: BlockFormat>(
        &self,
        format: &F,
        image: &ImageFile,
        backing: &Link,
        blocks: Vec<(u64, IoBuf)>,
    ) -> Result<()> {
        let Some(units) = &self.units else {
            return Err(Error::internal("this format packs no blocks"));
        };
        for (at, bytes) in &blocks {
            let end = at + bytes.len() as u64;
            let is_whole = bytes.len() as u64 == units.block_bytes || end == format.size();
            if !at.is_multiple_of(units.block_bytes) || !is_whole || bytes.len() as u64 > units.block_bytes {
                return Err(Error::invalid_argument("whole clusters are compressed").offset(*at));
            }
        }
        self.before_change(format).await?;
        let mut run: Vec<Packing> = Vec::new();
        for block in pack(blocks, units.block_bytes).await? {
            let is_next = run.last().is_none_or(|last| last.at + units.block_bytes == block.at);
            if block.packed.is_none() || !is_next {
                self.write_run(format, image, backing, units, std::mem::take(&mut run)).await?;
            }
            match block.packed {
                Some(_) => try_push(&mut run, block)?,
                None => self.write(format, image, backing, block.at, block.bytes).await.0?,
            }
        }
        self.write_run(format, image, backing, units, run).await?;
        self.bound_pending(format, image).await
    }

    /// Writes packed blocks that follow each other on the disk.
    async fn write_run<F: BlockFormat>(
        &self,
        format: &F,
        image: &ImageFile,
        backing: &Link,
        units: &Units,
        run: Vec<Packing>,
    ) -> Result<()> {
        let (Some(first), Some(last)) = (run.first(), run.last()) else { return Ok(()) };
        let blocks = first.at / units.block_bytes..last.at / units.block_bytes + 1;
        let mut in_place = Vec::new();
        {
            let _turns = self.take_turns(blocks).await;
            let mut fresh = Vec::new();
            for block in run {
                match self.place(format, image, block.at, 1).await?.0 {
                    // It has a place of the full length.
                    RunSource::Data { .. } => try_push(&mut in_place, block)?,
                    _ => {
                        self.prepare_slot(format, image, units, block.at / units.block_bytes).await?;
                        try_push(&mut fresh, block)?;
                    }
                }
            }
            self.place_packed(format, units, &fresh).await?;
        }
        for block in in_place {
            self.write(format, image, backing, block.at, block.bytes).await.0?;
        }
        Ok(())
    }

    /// Writes packed blocks behind all others, whose turns the caller has.
    async fn place_packed<F: BlockFormat>(&self, format: &F, units: &Units, blocks: &[Packing]) -> Result<()> {
        let mut bytes: Vec<u8> = Vec::new();
        let mut places = Vec::new();
        for Packing { at, packed, .. } in blocks {
            let packed = packed.as_deref().unwrap_or_default();
            try_push(&mut places, (at / units.block_bytes, bytes.len() as u64, packed.len() as u64))?;
            bytes.extend_from_slice(packed);
            bytes.resize(bytes.len().next_multiple_of(SECTOR_BYTES as usize), 0);
        }
        if bytes.is_empty() {
            return Ok(());
        }
        if let Some(error) = self.file.poison() {
            return Err(error);
        }
        let len = bytes.len() as u64;
        let reserved = self.reserve_at(units, len, 0, true).await?;
        let written = async {
            for (_, skip, len) in &places {
                // The file may be too long for the entries: no flush could write them.
                format.packed_entry(reserved.start + skip, *len)?;
            }
            self.file.write_at(IoBuf::copy_from(&bytes), reserved.start).await.0
        };
        if let Err(error) = written.await {
            let _ = self.give_back_bytes(units, &reserved, len).await;
            return Err(error);
        }
        let mut state = self.state();
        for (block, skip, len) in places {
            state.pending.insert(block, Pending::Packed { host: reserved.start + skip, len });
        }
        Ok(())
    }

    /// The data of a part of a block before it is allocated here; `None`: zeroes.
    pub(super) async fn old<F: BlockFormat>(
        &self,
        format: &F,
        image: &ImageFile,
        backing: &Link,
        place: RunSource,
        (from, to): (u64, u64),
    ) -> Result<Option<IoBuf>> {
        let backing = backing.load().clone();
        match (place, backing) {
            (RunSource::Unallocated, Some(backing)) => {
                let (result, bytes) =
                    backing.read_padded(from + format.disk_start(), IoBuf::try_zeroed((to - from) as usize)?).await;
                result.map(|()| Some(bytes))
            }
            (RunSource::Packed { block }, _) => {
                let bytes = self.unpack(format, image, block).await?;
                let range = (from - block) as usize..(to - block) as usize;
                let bytes =
                    bytes.get(range).ok_or_else(|| Error::internal("a packed block is too short").offset(block))?;
                Ok(Some(IoBuf::copy_from(bytes)))
            }
            _ => Ok(None),
        }
    }

    /// As [`BlockFormat::unpack`], also of blocks whose entries aren't written yet.
    pub(crate) async fn unpack<F: BlockFormat>(&self, format: &F, image: &ImageFile, block: u64) -> Result<Vec<u8>> {
        let block_bytes = self.units.as_ref().map_or(1, |units| units.block_bytes);
        let pending = self.state().pending.get(&(block / block_bytes)).copied();
        match pending {
            Some(Pending::Packed { host, len }) => format.unpack_at(image, host, len).await,
            _ => format.unpack(image, block).await,
        }
    }
}

/// Packs blocks, on as many threads as there are. The last one holds the rest of the disk, and zeroes.
async fn pack(blocks: Vec<(u64, IoBuf)>, block_bytes: u64) -> Result<Vec<Packing>> {
    let at_once = (PACKED_AT_ONCE / block_bytes).max(1) as usize;
    let (mut parts, mut part) = (Vec::new(), Vec::new());
    for block in blocks {
        try_push(&mut part, block)?;
        if part.len() == at_once {
            try_push(&mut parts, std::mem::take(&mut part))?;
        }
    }
    try_push(&mut parts, part)?;
    let packed = parts.into_iter().map(|part| {
        rt::run_on_cpu_pool(move || {
            let codec = Codec::new(Compression::Zlib);
            let pack = |(at, bytes): (u64, IoBuf)| {
                let mut packed = Vec::new();
                let len = match bytes.len() as u64 == block_bytes {
                    true => codec.compress(&bytes, &mut packed),
                    false => {
                        let mut whole = bytes.to_vec();
                        whole.resize(block_bytes as usize, 0);
                        codec.compress(&whole, &mut packed)
                    }
                };
                Packing { at, bytes, packed: len.map(|_| packed) }
            };
            part.into_iter().map(pack).collect::<Vec<Packing>>()
        })
    });
    Ok(join_all(packed).await.into_iter().flatten().collect())
}
