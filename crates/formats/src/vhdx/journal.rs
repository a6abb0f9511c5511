// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The headers and the log of a VHDX image that is written to (\[MS-VHDX\] 2.2.2, 2.3). Changes of the BAT go to the
//! log, then to their place, with a barrier behind each. An entry of the log stays there until the next one is behind
//! it. So a log in use always has one that is whole.

use crate::blocks::ImageFile;
use crate::writer::Usage;
use cowshed_crypto::luks::fill_random;
use cowshed_graph::node::ZeroFlags;
use cowshed_graph::protocols::zero_file;
use cowshed_layout::vhdx::{
    Guid, HEADER_OFFSETS, LOG_SECTOR_BYTES, LogWrite, NewLogEntry, Replay, UNIT_BYTES, VhdxHeader,
};
use cowshed_storage::{File, IoBuf};
use cowshed_types::{Error, ErrorKind, Result, slip};
use futures_util::lock::Mutex as AsyncMutex;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// Sectors that one entry changes at most: with more there are several entries.
const MAX_SECTORS: usize = 120;
const SECTOR: u64 = LOG_SECTOR_BYTES as u64;
/// An image whose header has a larger number is not written to: each opening needs more numbers.
const MAX_SEQUENCE_NUMBER: u64 = u64::MAX - (1 << 32);

/// The part of an image that keeps it whole.
pub(super) struct LogWriter {
    state: AsyncMutex<JournalState>,
    /// The headers show that this opening has changed the image.
    is_changed: AtomicBool,
    /// The id of the disk's content now.
    data_guid: Mutex<Guid>,
}

struct JournalState {
    /// The header that counts, and which of the two it is.
    header: VhdxHeader,
    slot: usize,
    /// The log of this opening, once there is one.
    log: Option<Log>,
}

/// A log in use. Places in bytes from its start.
struct Log {
    guid: Guid,
    /// Number of the next entry, and where it goes.
    number: u64,
    next: u64,
    /// The first entry whose changes are not in their places durably.
    tail: Option<u64>,
    /// These changes.
    late: BTreeMap<u64, Vec<u8>>,
}

fn new_guid() -> Result<Guid> {
    let mut bytes = [0; 16];
    fill_random(&mut bytes)?;
    Ok(Guid::random(bytes))
}

impl LogWriter {
    /// The journal of an image with this header, the first one or the second.
    pub(super) fn new(header: VhdxHeader, slot: usize) -> LogWriter {
        let data_guid = Mutex::new(header.data_guid);
        LogWriter {
            state: AsyncMutex::new(JournalState { header, slot, log: None }),
            is_changed: AtomicBool::new(false),
            data_guid,
        }
    }

    /// The id of the disk's content, by which differences refer to it.
    pub(super) fn data_guid(&self) -> Guid {
        *self.data_guid.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses an image whose headers take no more numbers, and has the next change give the content another id.
    pub(super) async fn begin(&self) -> Result<()> {
        let number = self.state.lock().await.header.sequence_number;
        if number > MAX_SEQUENCE_NUMBER {
            let message = "the header has too large a number: no newer one could follow it";
            return Err(Error::invalid_image("SequenceNumber", number, message));
        }
        self.is_changed.store(false, Ordering::Release);
        Ok(())
    }

    /// Writes the sectors in the log to their places, and empties it.
    pub(super) async fn carry_out(&self, file: &File, replay: Replay) -> Result<()> {
        let mut state = self.state.lock().await;
        if file.len() < replay.last_bytes {
            file.set_len(replay.last_bytes).await?;
        }
        for write in replay.writes {
            match write {
                // The log may name any part of the file, so this takes no space.
                LogWrite::Zeroes(at, len) => {
                    zero_file(file, at, len, ZeroFlags { may_unmap: true, no_fallback: false }).await?;
                }
                LogWrite::Sector(at, bytes) => file.write_at(IoBuf::copy_from(&bytes), at).await.0?,
            }
        }
        if !slip!("vhdx_log_emptied_before_its_changes_are_durable") {
            file.sync().await?;
        }
        let header = VhdxHeader { log_guid: Guid::ZERO, ..state.header.clone() };
        state.publish(file, header).await
    }

    /// Gives file and data new names before the first change of an opening.
    pub(super) async fn before_change(&self, file: &File) -> Result<()> {
        if self.is_changed.load(Ordering::Acquire) {
            return Ok(());
        }
        let mut state = self.state.lock().await;
        if self.is_changed.load(Ordering::Acquire) {
            return Ok(());
        }
        let header = VhdxHeader { file_guid: new_guid()?, data_guid: new_guid()?, ..state.header.clone() };
        let data_guid = header.data_guid;
        state.publish(file, header).await?;
        *self.data_guid.lock().unwrap_or_else(PoisonError::into_inner) = data_guid;
        self.is_changed.store(true, Ordering::Release);
        Ok(())
    }

    /// Puts entries into the table, durably.
    pub(super) async fn write(
        &self,
        image: &ImageFile,
        file: &File,
        entries: Vec<(u64, Vec<u8>)>,
        usage: Usage,
    ) -> Result<()> {
        let mut state = self.state.lock().await;
        // Sectors that could not be written to their places come first: the log has no room for many tries.
        state.place(file).await?;
        let mut sectors: BTreeMap<u64, Vec<u8>> = BTreeMap::new();
        for (mut at, bytes) in entries {
            let mut rest = &bytes[..];
            while !rest.is_empty() {
                let (start, skip) = (at / SECTOR * SECTOR, (at % SECTOR) as usize);
                if sectors.len() >= MAX_SECTORS && !sectors.contains_key(&start) {
                    state.commit(file, std::mem::take(&mut sectors), usage).await?;
                }
                let len = rest.len().min(LOG_SECTOR_BYTES - skip);
                let sector = match sectors.entry(start) {
                    std::collections::btree_map::Entry::Occupied(known) => known.into_mut(),
                    std::collections::btree_map::Entry::Vacant(empty) => {
                        let there = image.read(start, LOG_SECTOR_BYTES).await?;
                        if there.len() < LOG_SECTOR_BYTES {
                            return Err(Error::internal("a table isn't all in the file").offset(start));
                        }
                        empty.insert(there.to_vec())
                    }
                };
                sector[skip..skip + len].copy_from_slice(&rest[..len]);
                at += len as u64;
                rest = &rest[len..];
            }
        }
        state.commit(file, sectors, usage).await
    }

    /// Empties the log: all that it holds is in its place, durably.
    pub(super) async fn empty_log(&self, file: &File) -> Result<()> {
        let mut state = self.state.lock().await;
        if state.log.is_none() {
            return Ok(());
        }
        let header = VhdxHeader { log_guid: Guid::ZERO, ..state.header.clone() };
        state.publish(file, header).await?;
        state.log = None;
        Ok(())
    }
}

impl JournalState {
    /// Writes a header over the one that doesn't count, durably: from now on it counts.
    async fn publish(&mut self, file: &File, header: VhdxHeader) -> Result<()> {
        let number = self.header.sequence_number;
        let sequence_number = number.checked_add(1).ok_or_else(|| {
            Error::invalid_image("SequenceNumber", number, "no newer header could follow the one with this number")
        })?;
        let next = VhdxHeader { sequence_number, ..header };
        let slot = 1 - self.slot;
        file.write_at(IoBuf::copy_from(&next.to_bytes()), HEADER_OFFSETS[slot]).await.0?;
        file.sync().await?;
        (self.header, self.slot) = (next, slot);
        Ok(())
    }

    /// Changes sectors of 4 KiB: an entry of the log, a barrier, the sectors, a barrier.
    async fn commit(&mut self, file: &File, sectors: BTreeMap<u64, Vec<u8>>, usage: Usage) -> Result<()> {
        if sectors.is_empty() {
            return Ok(());
        }
        let sectors: Vec<(u64, Vec<u8>)> = sectors.into_iter().collect();
        self.log(file, &sectors, usage).await?;
        if let Some(log) = &mut self.log {
            log.late.extend(sectors);
        }
        self.place(file).await
    }

    /// Writes the sectors in the log to their places, durably.
    async fn place(&mut self, file: &File) -> Result<()> {
        let Some(guid) = self.log.as_ref().filter(|log| !log.late.is_empty()).map(|log| log.guid) else {
            return Ok(());
        };
        if self.header.log_guid != guid {
            // The log has an entry before it is named.
            self.publish(file, VhdxHeader { log_guid: guid, ..self.header.clone() }).await?;
        }
        let Some(log) = &mut self.log else { return Ok(()) };
        for (at, bytes) in &log.late {
            file.write_at(IoBuf::copy_from(bytes), *at).await.0?;
        }
        file.sync().await?;
        log.late.clear();
        log.tail = None;
        Ok(())
    }

    /// Adds an entry to the log, durably.
    async fn log(&mut self, file: &File, sectors: &[(u64, Vec<u8>)], usage: Usage) -> Result<()> {
        let log = match &mut self.log {
            Some(log) => log,
            None => self.log.insert(Log { guid: new_guid()?, number: 1, next: 0, tail: None, late: BTreeMap::new() }),
        };
        let tail = log.tail.unwrap_or(log.next);
        // The file may be longer by now, and not durably. A reader refuses a file that is shorter than the log says.
        let flushed = if slip!("vhdx_log_knows_of_a_length_too_early") { file.len() } else { usage.durable };
        let entry = NewLogEntry {
            guid: log.guid,
            number: log.number,
            tail: tail as u32,
            flushed_bytes: flushed / UNIT_BYTES * UNIT_BYTES,
            last_bytes: usage.end.next_multiple_of(UNIT_BYTES),
            sectors,
        };
        let bytes = entry.to_bytes();
        let (offset, room) = (self.header.log_offset, self.header.log_bytes);
        let in_use = (log.next + room - tail) % room;
        // An entry takes less than half of the room, so that the one before it stays.
        if in_use > room / 2 {
            let message = "the log is full of changes that could not be written to their places";
            return Err(Error::new(ErrorKind::NoSpace, message).field("LogLength").value(room));
        }
        let to_end = (room - log.next) as usize;
        let first = if slip!("vhdx_log_runs_over_its_end") { bytes.len() } else { bytes.len().min(to_end) };
        file.write_at(IoBuf::copy_from(&bytes[..first]), offset + log.next).await.0?;
        if first < bytes.len() {
            file.write_at(IoBuf::copy_from(&bytes[first..]), offset).await.0?;
        }
        file.sync().await?;
        log.tail = Some(tail);
        log.number += 1;
        log.next = (log.next + bytes.len() as u64) % room;
        Ok(())
    }
}
