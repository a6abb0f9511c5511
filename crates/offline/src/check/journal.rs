// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The undo log of a repair: before anything is written to the image, its old bytes are durable in the log.
//!
//! All numbers are big-endian. The header has 64 bytes. It begins with magic, version (4 bytes), header length (4) and
//! length of the image (8). Length (8) and checksum (4) of the image's head, zeroes, and the checksum (4) of bytes 0 to
//! 59 follow. Then come units, each a header of 48 bytes and a body:
//!
//! | bytes | of a unit's header |
//! |---|---|
//! | 0–3 | magic |
//! | 4–7 | kind: 1 changes, 2 the repair is complete, 3 an undo was started |
//! | 8–15 | length of the body in bytes |
//! | 16–23 | records in the body |
//! | 24–31 | length of the image in bytes: before these changes, or after the repair |
//! | 32–35 | checksum of the body |
//! | 36–43 | zeroes |
//! | 44–47 | checksum of the same field of the unit before (of the log's header for the first) and of bytes 0 to 43 |
//!
//! The body of changes has two parts. The first has for each record the offset, the length of the old bytes and that of
//! the new ones (8 bytes each). The second has for each record its old bytes and its new ones. The old ones are fewer
//! where the image grew. Checksums are CRC-32 (as in zlib). The changes of a unit don't overlap, and are durable in the
//! image before the next unit begins. So a cut leaves at most one unit half applied, or half written to the log. The
//! image has nothing of a half-written one.

use super::sweep::lock;
use cowshed_storage::{File, IoBuf};
use cowshed_types::{Error, Result};
use libdeflater::Crc;
use std::sync::Mutex;

pub(super) const MAGIC: [u8; 8] = *b"COWSUNDO";
pub(super) const UNIT_MAGIC: [u8; 4] = *b"UNIT";
pub(super) const VERSION: u32 = 1;
pub(super) const HEADER_BYTES: usize = 64;
pub(super) const UNIT_BYTES: usize = 48;
pub(super) const RECORD_BYTES: usize = 24;
/// Length of an image's first bytes, which identify it and hold the header.
pub(super) const HEAD_BYTES_MAX: u64 = 1 << 16;
pub(super) const KIND_CHANGES: u32 = 1;
pub(super) const KIND_COMPLETE: u32 = 2;
pub(super) const KIND_UNDO: u32 = 3;

/// Writes of one unit: every unit costs a flush of the log and one of the image.
const WRITES_MAX: usize = 256;
/// Bytes of these writes, unless a single one is larger.
const BATCH_BYTES: usize = 4 << 20;

/// The log while a repair writes it.
pub(super) struct RepairLog {
    log: File,
    waiting: Mutex<Vec<(u64, IoBuf)>>,
    tail: Mutex<Tail>,
}

#[derive(Clone, Copy)]
struct Tail {
    end: u64,
    chain: u32,
}

impl RepairLog {
    /// Starts the log of a repair of `image` in an empty file.
    pub async fn start(log: &File, image: &File) -> Result<RepairLog> {
        let named = |error: Error| error.file(log.name());
        if !log.is_empty() {
            return Err(Error::invalid_argument("the undo log isn't empty").file(log.name()));
        }
        let image_len = image.len();
        let head_len = image_len.min(HEAD_BYTES_MAX);
        let (result, head) = image.read_at(IoBuf::zeroed(head_len as usize), 0).await;
        result?;
        let mut header = [0; HEADER_BYTES];
        header[..8].copy_from_slice(&MAGIC);
        header[8..12].copy_from_slice(&VERSION.to_be_bytes());
        header[12..16].copy_from_slice(&(HEADER_BYTES as u32).to_be_bytes());
        header[16..24].copy_from_slice(&image_len.to_be_bytes());
        header[24..32].copy_from_slice(&head_len.to_be_bytes());
        header[32..36].copy_from_slice(&checksum(&[&head]).to_be_bytes());
        let chain = checksum(&[&header[..HEADER_BYTES - 4]]);
        header[HEADER_BYTES - 4..].copy_from_slice(&chain.to_be_bytes());
        let (result, _) = log.write_at(IoBuf::copy_from(&header), 0).await;
        result.map_err(named)?;
        log.sync().await.map_err(named)?;
        let tail = Mutex::new(Tail { end: HEADER_BYTES as u64, chain });
        Ok(RepairLog { log: log.clone(), waiting: Mutex::default(), tail })
    }

    /// True when a write that waits touches the range.
    pub fn overlaps(&self, offset: u64, len: usize) -> bool {
        let end = offset.saturating_add(len as u64);
        lock(&self.waiting).iter().any(|(start, buf)| *start < end && offset < *start + buf.len() as u64)
    }

    /// Takes a write that overlaps with none that waits; true when it is time to carry them out.
    pub fn add(&self, offset: u64, buf: IoBuf) -> bool {
        let mut waiting = lock(&self.waiting);
        waiting.push((offset, buf));
        waiting.len() >= WRITES_MAX || waiting.iter().map(|(_, buf)| buf.len()).sum::<usize>() >= BATCH_BYTES
    }

    /// Logs the writes that wait, durably, and hands them over to be carried out.
    pub async fn release(&self, image: &File) -> Result<Vec<(u64, IoBuf)>> {
        let writes = std::mem::take(&mut *lock(&self.waiting));
        if writes.is_empty() {
            return Ok(writes);
        }
        let image_len = image.len();
        let mut body = Vec::new();
        let old_len = |offset: u64, len: usize| image_len.saturating_sub(offset).min(len as u64);
        for (offset, buf) in &writes {
            body.extend(offset.to_be_bytes());
            body.extend(old_len(*offset, buf.len()).to_be_bytes());
            body.extend((buf.len() as u64).to_be_bytes());
        }
        for (offset, buf) in &writes {
            let (result, old) = image.read_at(IoBuf::zeroed(old_len(*offset, buf.len()) as usize), *offset).await;
            result?;
            body.extend_from_slice(&old);
            body.extend_from_slice(buf);
        }
        self.append(KIND_CHANGES, writes.len() as u64, image_len, &body).await?;
        Ok(writes)
    }

    /// Notes that the repair is over; the image is `image_len` bytes long.
    pub async fn finish(&self, image_len: u64) -> Result<()> {
        self.append(KIND_COMPLETE, 0, image_len, &[]).await
    }

    async fn append(&self, kind: u32, records: u64, image_len: u64, body: &[u8]) -> Result<()> {
        let Tail { end, chain } = *lock(&self.tail);
        let (unit, chain) = unit_header(chain, kind, records, image_len, body);
        let mut bytes = unit.to_vec();
        bytes.extend_from_slice(body);
        let (result, _) = self.log.write_at(IoBuf::copy_from(&bytes), end).await;
        result.map_err(|error| error.file(self.log.name()))?;
        self.log.sync().await.map_err(|error| error.file(self.log.name()))?;
        *lock(&self.tail) = Tail { end: end + bytes.len() as u64, chain };
        Ok(())
    }
}

/// A unit's header and its checksum, which the next unit needs.
pub(super) fn unit_header(chain: u32, kind: u32, records: u64, image_len: u64, body: &[u8]) -> ([u8; UNIT_BYTES], u32) {
    let mut unit = [0; UNIT_BYTES];
    unit[..4].copy_from_slice(&UNIT_MAGIC);
    unit[4..8].copy_from_slice(&kind.to_be_bytes());
    unit[8..16].copy_from_slice(&(body.len() as u64).to_be_bytes());
    unit[16..24].copy_from_slice(&records.to_be_bytes());
    unit[24..32].copy_from_slice(&image_len.to_be_bytes());
    unit[32..36].copy_from_slice(&checksum(&[body]).to_be_bytes());
    let chain = checksum(&[&chain.to_be_bytes(), &unit[..UNIT_BYTES - 4]]);
    unit[UNIT_BYTES - 4..].copy_from_slice(&chain.to_be_bytes());
    (unit, chain)
}

/// CRC-32 of the pieces one after the other.
pub(super) fn checksum(pieces: &[&[u8]]) -> u32 {
    let mut crc = Crc::new();
    pieces.iter().for_each(|piece| crc.update(piece));
    crc.sum()
}
