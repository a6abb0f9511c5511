// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reading an undo log; see `journal` for its layout.

use super::journal::{
    HEAD_BYTES_MAX, HEADER_BYTES, KIND_CHANGES, KIND_COMPLETE, KIND_UNDO, MAGIC, RECORD_BYTES, UNIT_BYTES, UNIT_MAGIC,
    VERSION, checksum,
};
use cowshed_storage::{File, IoBuf};
use cowshed_types::{Error, Result};
use libdeflater::Crc;

/// Bytes read at a time.
const PIECE_BYTES: u64 = 1 << 20;
/// Direct I/O writes whole sectors, smaller than this in bytes.
pub(super) const PADDING_BYTES_MAX: u64 = 1 << 16;
/// A unit holds fewer records than this.
const RECORDS_MAX: u64 = 4096;
/// A unit is smaller than this, in bytes: a tail that is larger isn't the unit that a power cut tore.
const UNIT_BYTES_MAX: u64 = 64 << 20;

/// One write of the repair.
#[derive(Clone, Copy, Debug)]
pub(super) struct Record {
    /// Host offset in the image.
    pub offset: u64,
    /// Bytes that were there before.
    pub old_len: u64,
    /// Bytes written; no fewer.
    pub new_len: u64,
    /// Offset of the old bytes in the log; the new ones follow.
    pub log_offset: u64,
}

/// A log that was read: everything but the bytes themselves.
#[derive(Debug)]
pub(super) struct UndoLog {
    /// Length of the image before the repair, in bytes.
    pub image_len: u64,
    /// Length of the image's start that identifies it, in bytes.
    pub head_len: u64,
    pub head_checksum: u32,
    /// In the order of writing.
    pub records: Vec<Record>,
    /// Length of the image after the repair; `None` when it was cut off.
    pub complete_len: Option<u64>,
    pub undo_started: bool,
    /// First byte behind the last whole unit.
    pub end: u64,
    /// Checksum of that unit's header.
    pub chain: u32,
}

struct Unit {
    kind: u32,
    body_len: u64,
    records: u64,
    image_len: u64,
    body_checksum: u32,
    chain: u32,
}

impl UndoLog {
    /// Reads all units; a torn one at the end is left out: nothing of it was carried out.
    pub async fn read(log: &File) -> Result<UndoLog> {
        let mut read = Self::read_header(log).await?;
        while read.end < log.len() {
            let whole = match read.read_unit(log).await? {
                Some(unit) => read.take(log, unit).await?,
                None if log.len() - read.end > UNIT_BYTES_MAX => return Err(damaged(read.end)),
                None => false,
            };
            if !whole {
                break;
            }
        }
        Ok(read)
    }

    async fn read_header(log: &File) -> Result<UndoLog> {
        let header = bytes(log, 0, HEADER_BYTES).await?;
        if header[..8] != MAGIC {
            return Err(Error::invalid_argument("not an undo log"));
        }
        let (version, chain) = (u32_at(&header, 8), u32_at(&header, HEADER_BYTES - 4));
        if version != VERSION {
            return Err(Error::unsupported("unknown version of the undo log").value(version));
        }
        let head_len = u64_at(&header, 24);
        let image_len = u64_at(&header, 16);
        let valid = i64::try_from(image_len).is_ok() && chain == checksum(&[&header[..HEADER_BYTES - 4]]);
        if !valid || u32_at(&header, 12) as usize != HEADER_BYTES || head_len > HEAD_BYTES_MAX {
            return Err(damaged(0));
        }
        Ok(UndoLog {
            image_len,
            head_len,
            head_checksum: u32_at(&header, 32),
            records: Vec::new(),
            complete_len: None,
            undo_started: false,
            end: HEADER_BYTES as u64,
            chain,
        })
    }

    /// The header of the next unit; `None` when it isn't whole.
    async fn read_unit(&self, log: &File) -> Result<Option<Unit>> {
        let header = bytes(log, self.end, UNIT_BYTES).await?;
        let unit = Unit {
            kind: u32_at(&header, 4),
            body_len: u64_at(&header, 8),
            records: u64_at(&header, 16),
            image_len: u64_at(&header, 24),
            body_checksum: u32_at(&header, 32),
            chain: u32_at(&header, UNIT_BYTES - 4),
        };
        let chain = checksum(&[&self.chain.to_be_bytes(), &header[..UNIT_BYTES - 4]]);
        Ok((header[..4] == UNIT_MAGIC && chain == unit.chain).then_some(unit))
    }

    /// Takes a unit whose header is whole. False when its body isn't, at the end of the log.
    async fn take(&mut self, log: &File, unit: Unit) -> Result<bool> {
        let at = self.end;
        let body = at + UNIT_BYTES as u64;
        if unit.body_len > UNIT_BYTES_MAX || unit.records > RECORDS_MAX {
            return Err(damaged(at));
        }
        let end = body + unit.body_len;
        if end > log.len() || body_checksum(log, body, unit.body_len).await? != unit.body_checksum {
            // Only the last unit can be torn: the one before was durable when it was begun.
            return if has_more(log, end).await? { Err(damaged(at)) } else { Ok(false) };
        }
        match unit.kind {
            KIND_CHANGES if self.complete_len.is_none() && !self.undo_started => {
                self.add_records(log, body, &unit).await?;
            }
            KIND_COMPLETE if self.complete_len.is_none() && !self.undo_started => {
                self.complete_len = Some(unit.image_len);
            }
            KIND_UNDO if !self.undo_started => self.undo_started = true,
            _ => return Err(damaged(at)),
        }
        self.end = end;
        self.chain = unit.chain;
        Ok(true)
    }

    async fn add_records(&mut self, log: &File, body: u64, unit: &Unit) -> Result<()> {
        let table_len = unit.records * RECORD_BYTES as u64;
        if table_len > unit.body_len {
            return Err(damaged(body));
        }
        let table = bytes(log, body, table_len as usize).await?;
        let mut log_offset = body + table_len;
        for entry in table.chunks_exact(RECORD_BYTES) {
            let (offset, old_len, new_len) = (u64_at(entry, 0), u64_at(entry, 8), u64_at(entry, 16));
            let end = old_len.checked_add(new_len).and_then(|both| log_offset.checked_add(both));
            let fits = offset.checked_add(new_len).is_some_and(|end| i64::try_from(end).is_ok());
            let Some(end) = end.filter(|end| fits && old_len <= new_len && *end <= body + unit.body_len) else {
                return Err(damaged(body));
            };
            self.records.push(Record { offset, old_len, new_len, log_offset });
            log_offset = end;
        }
        Ok(())
    }
}

fn damaged(offset: u64) -> Error {
    Error::invalid_argument("the undo log is damaged").offset(offset)
}

/// True when the log goes on there. Zeroes up to the end of a sector may be remains of direct I/O.
async fn has_more(log: &File, end: u64) -> Result<bool> {
    let left = log.len().saturating_sub(end);
    Ok(left > PADDING_BYTES_MAX || bytes(log, end, left as usize).await?.iter().any(|byte| *byte != 0))
}

async fn body_checksum(log: &File, start: u64, len: u64) -> Result<u32> {
    let mut crc = Crc::new();
    let mut at = 0;
    while at < len {
        let piece = PIECE_BYTES.min(len - at);
        crc.update(&bytes(log, start + at, piece as usize).await?);
        at += piece;
    }
    Ok(crc.sum())
}

async fn bytes(log: &File, offset: u64, len: usize) -> Result<IoBuf> {
    let (result, buf) = log.read_at(IoBuf::zeroed(len), offset).await;
    result.map(|()| buf)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes[at..].first_chunk().map_or(0, |word| u32::from_be_bytes(*word))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes[at..].first_chunk().map_or(0, |word| u64::from_be_bytes(*word))
}
