// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Writes of formats that keep a disk in blocks found by tables, without reference counts. A new block goes behind all
//! others. Its entry stays in memory until a flush: data first, a barrier, then the entries, a barrier. So no table on
//! disk ever names bytes that aren't there: docs/formats/block-formats.md.

mod lengthening;
mod linking;
mod packing;
mod room;
mod space;
mod tail;

use super::blocks::{BlockFormat, ImageFile};
use super::mapped::RunSource;
use super::units::{Units, gaps, survey};
use cowshed_graph::buffers::join;
use cowshed_graph::node::{Link, ZeroFlags};
use cowshed_graph::protocols::{discard_file, zero_file};
use cowshed_storage::{File, IoBuf};
use cowshed_types::memory::try_push;
use cowshed_types::{Error, ErrorKind, Result, slip};
use futures_util::lock::{Mutex as AsyncMutex, OwnedMutexGuard};
use room::EntryRoom;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use tail::ends_with;

/// The file grows by about this much at once, in bytes. A close cuts off unused space.
const GROWTH_BYTES: u64 = 16 << 20;
/// Entries that wait for a flush: with more a cycle runs before the write ends.
const MAX_PENDING: usize = 64 << 10;
/// New blocks that one write allocates together.
const MAX_TOGETHER: u64 = 64;
/// Entries that are written at once, in bytes.
const MAX_ENTRIES_BYTES: usize = 64 << 10;
/// Zeroes that are written over a backing file at once, in bytes.
const ZERO_CHUNK_BYTES: u64 = 1 << 20;

/// The allocated part, for formats that count it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Usage {
    /// The end of the last unit.
    pub end: u64,
    /// The file is no shorter than this durably.
    pub durable: u64,
}

/// The value that the entry of a block is to get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pending {
    /// The data begin at this offset.
    At(u64),
    Zero,
    /// It is packed: this many bytes at this offset.
    Packed {
        host: u64,
        len: u64,
    },
}

#[derive(Default)]
struct WriterState {
    /// Blocks whose data are written and whose entries are not.
    pending: BTreeMap<u64, Pending>,
    /// New tables that nothing leads to yet: by the place of the entry that will, where they are.
    tables: BTreeMap<u64, u64>,
    /// The place of the next unit.
    next: u64,
    /// From here on the file reads as zeroes.
    fresh: u64,
    /// Up to here the file has space for units.
    room: u64,
    /// Places between other units.
    free: Vec<u64>,
    /// The file's end isn't as a close leaves it.
    has_grown: bool,
    /// The bytes that belong at the file's end are not there.
    lacks_tail: bool,
}

/// The part of an image that writes.
pub(crate) struct Writer {
    /// None: all blocks are there.
    units: Option<Units>,
    file: File,
    state: Mutex<WriterState>,
    /// Blocks that a request allocates.
    busy: Mutex<HashMap<u64, Arc<AsyncMutex<()>>>>,
    growing: AsyncMutex<()>,
    /// Held while tables are made, and while they are linked.
    linking: AsyncMutex<()>,
    cycle: AsyncMutex<()>,
    /// Space for entries that is there for certain.
    entry_room: EntryRoom,
    /// A growth failed, and where blocks are now is unknown.
    lost: OnceLock<Error>,
}

/// New units for blocks that follow each other.
struct Reserved {
    start: u64,
    count: u64,
    /// Up to here the space may hold anything.
    fresh: u64,
}

impl Writer {
    /// Looks at every block of an image that is to be written to. Blocks that lie on each other are refused: a write to one
    /// would change the other.
    pub(crate) async fn open<F: BlockFormat>(format: &F, image: &ImageFile) -> Result<Writer> {
        let (file, units) = (image.storage(), format.units());
        let state = look_through(format, image, units.as_ref(), &file).await?;
        Ok(Writer {
            units,
            file,
            state: Mutex::new(state),
            busy: Mutex::default(),
            growing: AsyncMutex::new(()),
            linking: AsyncMutex::new(()),
            cycle: AsyncMutex::new(()),
            entry_room: EntryRoom::default(),
            lost: OnceLock::new(),
        })
    }

    /// Looks at every block again, of an image that was read-only for a while.
    pub(crate) async fn begin_again<F: BlockFormat>(&self, format: &F, image: &ImageFile) -> Result<()> {
        let is_idle = {
            let state = self.state();
            state.pending.is_empty() && state.tables.is_empty()
        };
        if !is_idle {
            return Ok(());
        }
        let state = look_through(format, image, format.units().as_ref(), &self.file).await?;
        *self.state() = state;
        Ok(())
    }

    fn expect_known(&self) -> Result<()> {
        self.lost.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    fn state(&self) -> MutexGuard<'_, WriterState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// As [`BlockFormat::place`], with the blocks whose entries aren't written yet.
    pub(crate) async fn place<F: BlockFormat>(
        &self,
        format: &F,
        image: &ImageFile,
        at: u64,
        len: u64,
    ) -> Result<(RunSource, u64)> {
        self.expect_known()?;
        let Some(units) = &self.units else { return format.place(image, at, len).await };
        let (block, skip) = (at / units.block_bytes, at % units.block_bytes);
        let (here, next) = {
            let state = self.state();
            let next = state.pending.range(block + 1..).next().map(|(block, _)| *block);
            (state.pending.get(&block).copied(), next)
        };
        if let Some(here) = here {
            let place = match here {
                Pending::At(host) => RunSource::Data { file: units.file, host: host + skip },
                Pending::Zero => RunSource::Zero,
                Pending::Packed { .. } => RunSource::Packed { block: at - skip },
            };
            return Ok((place, len.min(units.block_bytes - skip)));
        }
        let len = next.map_or(len, |next| len.min(next * units.block_bytes - at));
        format.place(image, at, len).await
    }

    /// Writes a buffer.
    pub(crate) async fn write<F: BlockFormat>(
        &self,
        format: &F,
        image: &ImageFile,
        backing: &Link,
        offset: u64,
        buf: IoBuf,
    ) -> (Result<()>, IoBuf) {
        if let Err(error) = self.before_change(format).await {
            return (Err(error), buf);
        }
        let (mut at, mut rest, mut done) = (offset, buf, None);
        while !rest.is_empty() {
            let (place, len) = match self.place(format, image, at, rest.len() as u64).await {
                Ok(place) => place,
                Err(error) => return (Err(error), join(done, rest)),
            };
            let part = rest.split_to(len as usize);
            let (result, part) = match place {
                RunSource::Data { host, .. } => self.overwrite(format, (at, host), part).await,
                place => self.allocate(format, image, backing, (at, place), part).await,
            };
            match result {
                Ok(true) => {
                    at += len;
                    done = Some(join(done, part));
                }
                // Another request was faster: the place is looked up again.
                Ok(false) => rest = join(Some(part), rest),
                Err(error) => return (Err(error), join(Some(join(done, part)), rest)),
            }
        }
        (self.bound_pending(format, image).await, join(done, rest))
    }

    /// Runs a cycle where too many entries wait for a flush.
    async fn bound_pending<F: BlockFormat>(&self, format: &F, image: &ImageFile) -> Result<()> {
        if self.state().pending.len() <= MAX_PENDING {
            return Ok(());
        }
        self.flush(format, image).await
    }

    async fn overwrite<F: BlockFormat>(
        &self,
        format: &F,
        (at, host): (u64, u64),
        part: IoBuf,
    ) -> (Result<bool>, IoBuf) {
        if let Err(error) = self.before_overwrite(format, at, host).await {
            return (Err(error), part);
        }
        let (result, part) = self.file.write_at(part, host).await;
        (result.map(|()| true), part)
    }

    async fn before_overwrite<F: BlockFormat>(&self, format: &F, at: u64, host: u64) -> Result<()> {
        match &self.units {
            Some(units) => format.before_overwrite(&self.file, host - at % units.block_bytes).await,
            None => Ok(()),
        }
    }

    /// Writes to blocks that aren't there, from byte `at` of the disk on. False: some are there now.
    async fn allocate<F: BlockFormat>(
        &self,
        format: &F,
        image: &ImageFile,
        backing: &Link,
        (at, place): (u64, RunSource),
        part: IoBuf,
    ) -> (Result<bool>, IoBuf) {
        let Some(units) = &self.units else {
            return (Err(Error::internal("a block is missing where none can be").offset(at)), part);
        };
        if part.len() as u64 > MAX_TOGETHER * units.block_bytes {
            return self.allocate_in_pieces(format, image, backing, (at, place), part).await;
        }
        let end = at + part.len() as u64;
        let blocks = at / units.block_bytes..end.div_ceil(units.block_bytes);
        let _turns = self.take_turns(blocks.clone()).await;
        let allocated = async {
            for block in blocks.clone() {
                let start = (block * units.block_bytes).max(at);
                if self.place(format, image, start, 1).await?.0 != self.same_kind(place, units, start) {
                    return Ok(None);
                }
                // It has a place before anything is written.
                self.prepare_slot(format, image, units, block).await?;
            }
            let count = blocks.end - blocks.start;
            let reserved = self.reserve(units, count).await?;
            let last = reserved.start + (count - 1) * units.unit_bytes() + units.head.len() as u64;
            if let Err(error) = format.entry(last) {
                // The file is too long for the entries: no flush could write them.
                self.give_back(units, &reserved).await?;
                return Err(error);
            }
            Ok(Some(reserved))
        };
        let reserved = match allocated.await {
            Ok(Some(reserved)) => reserved,
            Ok(None) => return (Ok(false), part),
            Err(error) => return (Err(error), part),
        };
        let (result, part) = self.fill(format, image, backing, units, &reserved, (at, place), part).await;
        if let Err(error) = result {
            let result = self.give_back(units, &reserved).await;
            return (result.and(Err(error)), part);
        }
        let mut state = self.state();
        for (index, block) in blocks.enumerate() {
            let host = reserved.start + index as u64 * units.unit_bytes() + units.head.len() as u64;
            state.pending.insert(block, Pending::At(host));
        }
        (Ok(true), part)
    }

    /// The place that a later part of a run has.
    fn same_kind(&self, place: RunSource, units: &Units, start: u64) -> RunSource {
        match place {
            RunSource::Packed { .. } => RunSource::Packed { block: start / units.block_bytes * units.block_bytes },
            place => place,
        }
    }

    /// As much as is allocated at once; the rest comes in the next round.
    async fn allocate_in_pieces<F: BlockFormat>(
        &self,
        format: &F,
        image: &ImageFile,
        backing: &Link,
        (at, place): (u64, RunSource),
        mut part: IoBuf,
    ) -> (Result<bool>, IoBuf) {
        let step = self.units.as_ref().map_or(u64::MAX, |units| MAX_TOGETHER * units.block_bytes);
        let (mut at, mut done) = (at, None);
        while !part.is_empty() {
            let len = (step - at % step).min(part.len() as u64);
            let piece = part.split_to(len as usize);
            let (result, piece) = Box::pin(self.allocate(format, image, backing, (at, place), piece)).await;
            done = Some(join(done, piece));
            match result {
                Ok(true) => at += len,
                other => return (other, join(done, part)),
            }
        }
        (Ok(true), join(done, part))
    }

    /// Keeps other requests from allocating these blocks. All take them in one order.
    async fn take_turns(&self, blocks: std::ops::Range<u64>) -> Turns<'_> {
        let mut turns = Turns { writer: self, blocks: blocks.clone(), guards: Vec::new() };
        for block in blocks {
            let turn = Arc::clone(self.busy().entry(block).or_default());
            turns.guards.push(turn.lock_owned().await);
        }
        turns
    }

    fn busy(&self) -> MutexGuard<'_, HashMap<u64, Arc<AsyncMutex<()>>>> {
        self.busy.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn reserve(&self, units: &Units, count: u64) -> Result<Reserved> {
        if let Some(error) = self.file.poison() {
            return Err(error);
        }
        self.reserve_bytes(units, count * units.unit_bytes(), count).await
    }

    /// Space for `count` units, or for something else that is no shorter than the grid.
    async fn reserve_bytes(&self, units: &Units, bytes: u64, count: u64) -> Result<Reserved> {
        self.reserve_at(units, bytes, count, false).await
    }

    async fn reserve_at(&self, units: &Units, bytes: u64, count: u64, is_packed: bool) -> Result<Reserved> {
        loop {
            {
                let mut state = self.state();
                if count == 1
                    && let Some(start) = state.free.pop()
                {
                    return Ok(Reserved { start, count, fresh: u64::MAX });
                }
                // Packed blocks are shorter than the grid.
                let start = if is_packed { state.next } else { units.behind(state.next) };
                if start.saturating_add(bytes) <= state.room {
                    state.next = start + bytes;
                    return Ok(Reserved { start, count, fresh: state.fresh });
                }
            }
            self.grow(units, bytes, is_packed).await?;
        }
    }

    /// Makes the file longer, for `bytes` more bytes of units. The bytes at its end are at the new end durably before
    /// anything is written over the old one.
    async fn grow(&self, units: &Units, bytes: u64, is_packed: bool) -> Result<()> {
        let _growing = self.growing.lock().await;
        let (next, room) = {
            let state = self.state();
            (if is_packed { state.next } else { units.behind(state.next) }, state.room)
        };
        let needed = next.checked_add(bytes).filter(|end| i64::try_from(*end).is_ok());
        let needed = needed.ok_or_else(|| Error::new(ErrorKind::NoSpace, "the image file would be too long"))?;
        if needed <= room {
            return Ok(());
        }
        let extra = (GROWTH_BYTES / units.unit_bytes()).saturating_sub(1) * units.unit_bytes();
        let tail_bytes = units.tail.len() as u64;
        let room = needed.saturating_add(extra);
        if self.file.len() < room + tail_bytes {
            self.state().has_grown = true;
            self.file.set_len(room + tail_bytes).await?;
        }
        if tail_bytes > 0 {
            self.file.write_at(IoBuf::copy_from(&units.tail), room).await.0?;
            self.file.sync().await?;
        }
        let mut state = self.state();
        state.room = room;
        state.has_grown = true;
        Ok(())
    }

    /// Writes new units: the bytes in front of each block, and the blocks, with the old data around the new.
    #[allow(clippy::too_many_arguments)]
    async fn fill<F: BlockFormat>(
        &self,
        format: &F,
        image: &ImageFile,
        backing: &Link,
        units: &Units,
        reserved: &Reserved,
        (at, place): (u64, RunSource),
        mut part: IoBuf,
    ) -> (Result<()>, IoBuf) {
        let (block_bytes, end) = (units.block_bytes, at + part.len() as u64);
        let first = at / block_bytes * block_bytes;
        let host = |start: u64| {
            let block = (start - first) / block_bytes;
            reserved.start + block * units.unit_bytes() + units.head.len() as u64 + start % block_bytes
        };
        let prepared = async {
            let units_end = reserved.start + reserved.count * units.unit_bytes();
            let stale = reserved.fresh.min(units_end).saturating_sub(reserved.start);
            // Bytes that are written anyway needn't be cleared: the head of the first unit.
            let skip = (units.head.len() as u64).min(stale);
            if stale > skip {
                self.clear(reserved.start + skip, stale - skip).await?;
            }
            if !units.head.is_empty() {
                for index in 0..reserved.count {
                    let start = reserved.start + index * units.unit_bytes();
                    self.file.write_at(IoBuf::copy_from(&units.head), start).await.0?;
                }
            }
            let last = (end.div_ceil(block_bytes) * block_bytes).min(format.size());
            for (from, to) in [(first, at), (end, last)] {
                if from < to
                    && let Some(old) = self.old(format, image, backing, place, (from, to)).await?
                {
                    self.file.write_at(old, host(from)).await.0?;
                }
            }
            Ok(())
        };
        if let Err(error) = prepared.await {
            return (Err(error), part);
        }
        if units.head.is_empty() {
            return self.file.write_at(part, host(at)).await;
        }
        let (mut at, mut done) = (at, None);
        while !part.is_empty() {
            let len = (block_bytes - at % block_bytes).min(part.len() as u64);
            let (result, piece) = self.file.write_at(part.split_to(len as usize), host(at)).await;
            done = Some(join(done, piece));
            if let Err(error) = result {
                return (Err(error), join(done, part));
            }
            at += len;
        }
        (Ok(()), join(done, part))
    }

    /// Makes a range read as zeroes.
    pub(crate) async fn write_zeroes<F: BlockFormat>(
        &self,
        format: &F,
        image: &ImageFile,
        backing: &Link,
        (offset, len): (u64, u64),
        flags: ZeroFlags,
    ) -> Result<()> {
        if flags.no_fallback {
            // Before anything is changed: a caller that asks for all or nothing must not find a part of it done.
            self.expect_fast_zeroes(format, image, backing, (offset, len)).await?;
        }
        self.before_change(format).await?;
        let (mut at, end) = (offset, offset + len);
        while at < end {
            let (place, len) = self.place(format, image, at, end - at).await?;
            let len = match place {
                RunSource::Data { host, .. } => {
                    self.before_overwrite(format, at, host).await?;
                    zero_file(&self.file, host, len, flags).await?;
                    len
                }
                RunSource::Zero => len,
                // A backing node that is left out, or comes later, must not show here.
                RunSource::Unallocated if !F::LINKS_BACKING && backing.load().is_none() => len,
                RunSource::Unallocated if self.is_whole(format, at, len) => {
                    let len = self.mark_zero(format, image, at).await?;
                    self.bound_pending(format, image).await?;
                    len
                }
                RunSource::Unallocated | RunSource::Packed { .. } => {
                    let len = len.min(ZERO_CHUNK_BYTES);
                    self.write(format, image, backing, at, IoBuf::try_zeroed(len as usize)?).await.0?;
                    len
                }
            };
            at += len;
        }
        Ok(())
    }

    /// Refuses a range of which a part would take a write of data to read as zeroes.
    async fn expect_fast_zeroes<F: BlockFormat>(
        &self,
        format: &F,
        image: &ImageFile,
        backing: &Link,
        (offset, len): (u64, u64),
    ) -> Result<()> {
        let (mut at, end) = (offset, offset + len);
        while at < end {
            let (place, len) = self.place(format, image, at, end - at).await?;
            let is_blank = !F::LINKS_BACKING && backing.load().is_none();
            at += match place {
                RunSource::Data { .. } | RunSource::Zero => len,
                RunSource::Unallocated if is_blank => len,
                RunSource::Unallocated if self.is_whole(format, at, len) => {
                    self.units.as_ref().map_or(len, |units| len.min(units.block_bytes))
                }
                RunSource::Unallocated | RunSource::Packed { .. } => {
                    return Err(Error::unsupported("zeroes would take a write of data here").offset(at));
                }
            };
        }
        Ok(())
    }

    /// True when a range begins with a whole block, which an entry can mark as zeroes.
    fn is_whole<F: BlockFormat>(&self, format: &F, at: u64, len: u64) -> bool {
        let block_bytes = self.units.as_ref().map_or(u64::MAX, |units| units.block_bytes);
        let is_whole = at.is_multiple_of(block_bytes) && (len >= block_bytes || at + len == format.size());
        is_whole && format.zero_entry().is_some()
    }

    /// Makes the entry of the block at byte `at` mark it as zeroes, unless it is there by now. Returns the length for
    /// which that holds.
    async fn mark_zero<F: BlockFormat>(&self, format: &F, image: &ImageFile, at: u64) -> Result<u64> {
        let Some(units) = &self.units else { return Ok(0) };
        let block = at / units.block_bytes;
        let _turns = self.take_turns(block..block + 1).await;
        let (place, len) = self.place(format, image, at, units.block_bytes.min(format.size() - at)).await?;
        if place != RunSource::Unallocated {
            return Ok(0);
        }
        self.prepare_slot(format, image, units, block).await?;
        self.state().pending.insert(block, Pending::Zero);
        Ok(len)
    }

    /// Gives the space of a range back. Its blocks stay allocated and read as zeroes.
    pub(crate) async fn discard<F: BlockFormat>(
        &self,
        format: &F,
        image: &ImageFile,
        (offset, len): (u64, u64),
    ) -> Result<()> {
        self.before_change(format).await?;
        let (mut at, end) = (offset, offset + len);
        while at < end {
            let (place, len) = self.place(format, image, at, end - at).await?;
            if let RunSource::Data { host, .. } = place {
                discard_file(&self.file, host, len).await?;
            }
            at += len;
        }
        Ok(())
    }

    /// True where entries and tables are only in memory. A flush forgets them when they are durable.
    pub(crate) fn holds_changes(&self) -> bool {
        let state = self.state();
        let is_written = state.pending.is_empty() && state.tables.is_empty();
        !(is_written || slip!("entries_of_new_blocks_count_as_written"))
    }

    /// Makes everything durable: the data; then the entries that name them.
    pub(crate) async fn flush<F: BlockFormat>(&self, format: &F, image: &ImageFile) -> Result<()> {
        self.expect_known()?;
        let _turn = self.cycle.lock().await;
        let (pending, tables, usage) = {
            let state = self.state();
            let mut pending = Vec::new();
            for entry in &state.pending {
                try_push(&mut pending, (*entry.0, *entry.1))?;
            }
            let mut tables = Vec::new();
            for table in &state.tables {
                try_push(&mut tables, (*table.0, *table.1))?;
            }
            // A request that runs beside this one may lengthen the file behind the sync.
            (pending, tables, Usage { end: state.next, durable: self.file.len() })
        };
        if pending.is_empty() && tables.is_empty() {
            return self.file.sync().await;
        }
        format.before_entries(&self.file, usage).await?;
        if !slip!("blocks_named_before_they_are_durable") {
            self.file.sync().await?;
        }
        let mut entries: Vec<(u64, Vec<u8>)> = Vec::new();
        for (block, host) in &pending {
            let (table, index) = self.slot(format, image, *block).await?;
            let entry = entry(format, *host)?;
            let place = table.offset + index * entry.len() as u64;
            match entries.last_mut() {
                Some((start, bytes)) if *start + bytes.len() as u64 == place && bytes.len() < MAX_ENTRIES_BYTES => {
                    bytes.extend_from_slice(&entry);
                }
                _ => try_push(&mut entries, (place, entry))?,
            }
        }
        for (block, host) in &pending {
            if let Some((table, index)) = format.second_slot(image, *block).await? {
                let entry = entry(format, *host)?;
                let place = table.offset + index * entry.len() as u64;
                try_push(&mut entries, (place, entry))?;
            }
        }
        format.write_entries(image, &self.file, entries, usage).await?;
        self.link(format, image, tables, usage).await?;
        image.forget();
        format.forget();
        let mut state = self.state();
        for (block, host) in pending {
            if state.pending.get(&block) == Some(&host) {
                state.pending.remove(&block);
            }
        }
        Ok(())
    }
}

/// Where blocks are in an image, and where new ones go.
async fn look_through<F: BlockFormat>(
    format: &F,
    image: &ImageFile,
    units: Option<&Units>,
    file: &File,
) -> Result<WriterState> {
    let mut state = WriterState { fresh: file.len(), ..WriterState::default() };
    if file.is_device() || !file.grows_by_zeroes() {
        state.fresh = u64::MAX;
    }
    if let Some(units) = units {
        let ranges = survey(format, image, units).await?;
        let end = ranges.last().map_or(units.first, |range| range.1);
        state.next = units.behind(if units.is_at_end { end.max(file.len()) } else { end });
        state.room = if file.is_device() { file.len().saturating_sub(units.tail.len() as u64) } else { state.next };
        state.free = gaps(&ranges, units)?;
        state.lacks_tail = !file.is_device() && !ends_with(file, &units.tail).await?;
    }
    Ok(state)
}

/// The entry for a place of data, or for zeroes.
fn entry<F: BlockFormat>(format: &F, pending: Pending) -> Result<Vec<u8>> {
    match pending {
        Pending::Zero => format.zero_entry().ok_or_else(|| Error::internal("this format has no entry for zeroes")),
        Pending::At(host) => format.entry(host),
        Pending::Packed { host, len } => format.packed_entry(host, len),
    }
}

/// The turns of one request.
struct Turns<'a> {
    writer: &'a Writer,
    blocks: std::ops::Range<u64>,
    guards: Vec<OwnedMutexGuard<()>>,
}

impl Drop for Turns<'_> {
    fn drop(&mut self) {
        self.guards.clear();
        let mut busy = self.writer.busy();
        for block in self.blocks.clone() {
            if busy.get(&block).is_some_and(|turn| Arc::strong_count(turn) == 1) {
                busy.remove(&block);
            }
        }
    }
}
