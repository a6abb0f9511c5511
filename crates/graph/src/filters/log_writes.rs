// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Blklogwrites: a disk's writes go to a log too, in the format of the kernel's dm-log-writes. Its replay tool brings a disk to any
//! state that this one went through.

use super::Filter;
use crate::node::Ranges;
use crate::node::{Below, Preallocation, Transfer, Work, ZeroFlags, done};
use crate::options::schemas;
use cowshed_storage::{File, IoBuf, PermissionSet, Permissions};
use cowshed_types::{Error, ErrorKind, Result};
use futures_util::lock::Mutex;
use std::sync::Arc;

/// First number of the log's superblock, little-endian like all others.
const MAGIC: u64 = 0x6a_7366_7773_6872;
const VERSION: u64 = 1;
/// Magic, version and number of entries of 8 bytes each, the sector size of 4.
const SUPER_BYTES: usize = 28;
/// First sector, number of sectors, flags, length of further data: 8 bytes each.
const ENTRY_BYTES: usize = 32;
const FLUSH: u64 = 1;
const DISCARD: u64 = 4;
/// Zeroes are logged in pieces of at most this many bytes.
const MOST_ZEROES_BYTES: u64 = 1 << 20;
/// Smallest and largest sector, in bytes.
const SECTOR_BYTES: std::ops::RangeInclusive<u64> = 256..=1 << 22;

/// The user's options for the log.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LogOptions {
    /// Entries are added to those that the log has.
    pub append: bool,
    /// Unit of offsets and lengths in the log, in bytes.
    pub sector_bytes: u64,
    /// The superblock is written after this many entries.
    pub update_interval: u64,
}

/// The filter. An entry follows its write, so the writes of the entries before a flush came before it.
pub struct LogWrites {
    below: Below,
    sector_bytes: u64,
    update_interval: u64,
    ranges: Arc<Ranges>,
    log: Mutex<Log>,
}

/// The end of the log.
struct Log {
    file: File,
    entries: u64,
    /// Entries that the superblock counts.
    counted: u64,
    next_sector: u64,
    /// Requests since the last entry of a flush.
    is_dirty: bool,
}

impl LogWrites {
    /// `file` is the log. With `append` its superblock and its entries are read.
    pub(crate) async fn open(below: Below, file: File, options: LogOptions) -> Result<LogWrites> {
        let mut sector_bytes = options.sector_bytes;
        let is_sector = |bytes: u64| bytes.is_power_of_two() && SECTOR_BYTES.contains(&bytes);
        if !is_sector(sector_bytes) {
            return Err(Error::invalid_argument(format!("Invalid log sector size {sector_bytes}")));
        }
        if options.update_interval == 0 {
            return Err(Error::invalid_argument("Invalid log superblock update interval 0"));
        }
        let mut log = Log { file, entries: 0, counted: 0, next_sector: 1, is_dirty: false };
        if options.append {
            let head = log.read(0, SUPER_BYTES).await?;
            let number = |at: usize| u64_at(&head, at);
            if number(0) != MAGIC {
                return Err(damaged("Invalid log superblock magic", number(0)));
            }
            if number(8) != VERSION {
                return Err(damaged(&format!("Unsupported log version {}", number(8)), number(8)));
            }
            sector_bytes = u64::from(u32::from_le_bytes([head[24], head[25], head[26], head[27]]));
            if !is_sector(sector_bytes) {
                return Err(damaged(&format!("Invalid log sector size {sector_bytes}"), sector_bytes));
            }
            log.find_end(number(16), sector_bytes).await?;
        }
        let log = Mutex::new(log);
        let update_interval = options.update_interval;
        Ok(LogWrites { below, sector_bytes, update_interval, ranges: Arc::default(), log })
    }

    /// The unit of requests, in bytes.
    pub fn sector_bytes(&self) -> u64 {
        self.sector_bytes
    }

    fn sectors_around(&self, offset: u64, len: u64) -> (u64, u64) {
        let end = offset.saturating_add(len);
        let unit = self.sector_bytes;
        (offset / unit * unit, end.checked_next_multiple_of(unit).unwrap_or(end))
    }

    /// Logs whole sectors: the written bytes, and the disk's bytes around them.
    async fn log_range(&self, start: u64, end: u64, offset: u64, bytes: &[u8]) -> Result<()> {
        let len = usize::try_from(end - start).map_err(|_| Error::internal("a write larger than memory"))?;
        let sector = usize::try_from(self.sector_bytes).unwrap_or(usize::MAX);
        let mut buf = IoBuf::try_zeroed(sector + len)?;
        if start != offset || len != bytes.len() {
            // The last sector may be one that the disk ends within.
            let inside = usize::try_from(self.below.size().min(end) - start).unwrap_or(len);
            let (result, read) = self.below.read(start, IoBuf::try_zeroed(inside)?).await;
            result?;
            buf[sector..sector + inside].copy_from_slice(&read);
        }
        let from = sector + (offset - start) as usize;
        buf[from..from + bytes.len()].copy_from_slice(bytes);
        let sectors = (end - start) / self.sector_bytes;
        self.append([start / self.sector_bytes, sectors, 0, 0], buf, sectors).await
    }

    /// Adds an entry. `buf` is the entry's sector, still empty, and `data_sectors` of data behind it.
    async fn append(&self, entry: [u64; 4], mut buf: IoBuf, data_sectors: u64) -> Result<()> {
        for (at, number) in entry.into_iter().enumerate() {
            buf[at * 8..at * 8 + 8].copy_from_slice(&number.to_le_bytes());
        }
        let mut log = self.log.lock().await;
        let offset = log.next_sector.checked_mul(self.sector_bytes);
        let offset = offset.ok_or_else(|| Error::invalid_argument("the log is too long").value(log.next_sector))?;
        log.file.write_at(buf, offset).await.0?;
        log.next_sector += 1 + data_sectors;
        log.entries += 1;
        log.is_dirty = entry[2] & FLUSH == 0;
        if log.entries - log.counted >= self.update_interval {
            log.count(self.sector_bytes).await?;
        }
        Ok(())
    }

    fn entry_buf(&self) -> Result<IoBuf> {
        IoBuf::try_zeroed(usize::try_from(self.sector_bytes).unwrap_or(usize::MAX))
    }

    /// Has the superblock count every entry. The counted entries are on the disk before the superblock counts them.
    pub(crate) async fn complete(&self) -> Result<()> {
        let mut log = self.log.lock().await;
        if log.entries == log.counted {
            return Ok(());
        }
        log.file.sync().await?;
        log.count(self.sector_bytes).await?;
        log.file.sync().await
    }
}

impl Filter for LogWrites {
    fn name(&self) -> &'static str {
        schemas::LOG_WRITES.name
    }

    fn below(&self) -> &Below {
        &self.below
    }

    fn write(&self, offset: u64, buf: IoBuf) -> Transfer<'_> {
        Box::pin(async move {
            if buf.is_empty() {
                return (Ok(()), buf);
            }
            let (start, end) = self.sectors_around(offset, buf.len() as u64);
            let _claim = self.ranges.claim(start, end - start).await;
            let (result, buf) = self.below.write(offset, buf).await;
            if let Err(error) = result {
                return (Err(error), buf);
            }
            (self.log_range(start, end, offset, &buf).await, buf)
        })
    }

    fn write_compressed(&self, _clusters: Vec<(u64, IoBuf)>) -> Work<'_> {
        done(Err(Error::unsupported("a log of writes has no compressed clusters")))
    }

    /// Zeroes are data in the log.
    fn write_zeroes(&self, offset: u64, len: u64, flags: ZeroFlags) -> Work<'_> {
        Box::pin(async move {
            let (start, end) = self.sectors_around(offset, len);
            let _claim = self.ranges.claim(start, end - start).await;
            self.below.write_zeroes(offset, len, flags).await?;
            let until = offset.saturating_add(len);
            let mut at = offset;
            while at < until {
                let next = until.min((at / MOST_ZEROES_BYTES + 1) * MOST_ZEROES_BYTES);
                let (start, end) = self.sectors_around(at, next - at);
                let zeroes = vec![0; usize::try_from(next - at).unwrap_or(0)];
                self.log_range(start, end, at, &zeroes).await?;
                at = next;
            }
            Ok(())
        })
    }

    fn discard(&self, offset: u64, len: u64) -> Work<'_> {
        Box::pin(async move {
            let unit = self.sector_bytes;
            let (start, end) = (offset.next_multiple_of(unit), offset.saturating_add(len) / unit * unit);
            let _claim = self.ranges.claim(offset, len).await;
            self.below.discard(offset, len).await?;
            if start >= end {
                return Ok(());
            }
            self.append([start / unit, (end - start) / unit, DISCARD, 0], self.entry_buf()?, 0).await
        })
    }

    fn flush(&self) -> Work<'_> {
        Box::pin(async move {
            self.below.flush().await?;
            let is_dirty = self.log.lock().await.is_dirty;
            if is_dirty {
                self.append([0, 0, FLUSH, 0], self.entry_buf()?, 0).await?;
            }
            self.complete().await
        })
    }

    fn resize(&self, size: u64, preallocation: Preallocation) -> Work<'_> {
        Box::pin(async move {
            let _claim = self.ranges.claim(0, u64::MAX).await;
            self.below.resize(size, preallocation).await
        })
    }

    fn permissions(&self, wanted: Permissions, _read_only: bool) -> Permissions {
        match wanted.used.contains(PermissionSet::WRITE) {
            // A write past the filter would miss the log.
            true => Permissions { shared: wanted.shared & !PermissionSet::WRITE, ..wanted },
            false => wanted,
        }
    }

    fn request_bytes(&self) -> Option<u64> {
        Some(self.sector_bytes())
    }

    fn close(&self, read_only: bool) -> Work<'_> {
        if read_only { done(Ok(())) } else { Filter::flush(self) }
    }
}

impl Log {
    /// `len` bytes at `offset`; zeroes behind the end.
    async fn read(&self, offset: u64, len: usize) -> Result<IoBuf> {
        let mut buf = IoBuf::try_zeroed(len)?;
        let inside = usize::try_from(self.file.len().saturating_sub(offset)).unwrap_or(len).min(len);
        if inside > 0 {
            let (result, read) = self.file.read_at(IoBuf::try_zeroed(inside)?, offset).await;
            result?;
            buf[..inside].copy_from_slice(&read);
        }
        Ok(buf)
    }

    /// Goes over `entries` entries to the place of the next one.
    async fn find_end(&mut self, entries: u64, sector_bytes: u64) -> Result<()> {
        for index in 0..entries {
            let at = self.next_sector.checked_mul(sector_bytes).filter(|at| *at < self.file.len());
            let at = at.ok_or_else(|| damaged("the log ends before its last entry", index))?;
            let entry = self.read(at, ENTRY_BYTES).await?;
            let data = if u64_at(&entry, 16) & DISCARD == 0 { u64_at(&entry, 8) } else { 0 };
            let next = self.next_sector.checked_add(1).and_then(|next| next.checked_add(data));
            self.next_sector = next.ok_or_else(|| damaged("an entry of the log is too long", data))?;
        }
        (self.entries, self.counted) = (entries, entries);
        Ok(())
    }

    /// Writes the superblock.
    async fn count(&mut self, sector_bytes: u64) -> Result<()> {
        let mut buf = IoBuf::try_zeroed(usize::try_from(sector_bytes).unwrap_or(usize::MAX))?;
        for (at, number) in [MAGIC, VERSION, self.entries].into_iter().enumerate() {
            buf[at * 8..at * 8 + 8].copy_from_slice(&number.to_le_bytes());
        }
        let sector = u32::try_from(sector_bytes).unwrap_or(u32::MAX);
        buf[24..SUPER_BYTES].copy_from_slice(&sector.to_le_bytes());
        self.file.write_at(buf, 0).await.0?;
        self.counted = self.entries;
        Ok(())
    }
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut number = [0; 8];
    number.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(number)
}

fn damaged(message: &str, value: u64) -> Error {
    Error::new(ErrorKind::InvalidImage, message.to_owned()).value(value).qemu(message)
}
