// SPDX-License-Identifier: Apache-2.0 OR MIT
//! LUKS version 1 as a format of its own: header and key slots, then the encrypted disk, or that in a file of its own.

mod open;

pub(crate) use open::{SCHEMA, open};

use crate::encryption::{Cipher, LuksArea, SECTOR_BYTES, Writers, decrypt, encrypt, part_sectors};
use crate::formats::raw::resize_file;
use crate::node::{Preallocation, StatusExtent, ZeroFlags};
use cowshed_block::{Error, GuestOffset, HostOffset, Result};
use cowshed_layout::luks::LuksHeader;
use cowshed_storage::{File, IoBuf};
use std::sync::Arc;

/// Zeroes are encrypted and written in pieces of this size.
const ZERO_CHUNK_BYTES: u64 = 1 << 20;

/// An open LUKS volume. Sectors are numbered from the start of the payload on.
pub struct LuksDriver {
    /// The file with the payload.
    file: File,
    /// First byte of the payload in it.
    payload_offset: u64,
    area: LuksArea,
    is_detached: bool,
    cipher: Option<Arc<dyn Cipher>>,
    writers: Writers,
}

impl LuksDriver {
    /// Virtual size in bytes: whole sectors of the payload.
    pub fn size(&self) -> u64 {
        self.file.len().saturating_sub(self.payload_offset) / SECTOR_BYTES * SECTOR_BYTES
    }

    /// True when its length can be set.
    pub(crate) fn can_grow(&self) -> bool {
        !self.file.is_device()
    }

    /// The header as it is on disk.
    pub async fn header(&self) -> Result<LuksHeader> {
        Ok(self.area.volume().await?.header().clone())
    }

    /// True when header and payload are in two files.
    pub fn has_detached_header(&self) -> bool {
        self.is_detached
    }

    /// Where the header with its key slots is.
    pub fn luks_area(&self) -> &LuksArea {
        &self.area
    }

    fn cipher(&self) -> Result<&Arc<dyn Cipher>> {
        self.cipher.as_ref().ok_or_else(|| Error::invalid_argument("Parameter 'key-secret' is required for cipher"))
    }

    /// The node checked the range against the size, so the sum stays inside of the file.
    fn host(&self, offset: u64) -> HostOffset {
        HostOffset(self.payload_offset + offset)
    }

    /// Fills `buf` from `offset`. The node has checked the range.
    pub async fn read(&self, offset: u64, mut buf: IoBuf) -> (Result<()>, IoBuf) {
        let start = offset / SECTOR_BYTES * SECTOR_BYTES;
        let end = (offset + buf.len() as u64).next_multiple_of(SECTOR_BYTES);
        if start == offset && end - start == buf.len() as u64 {
            return self.read_sectors(offset, buf).await;
        }
        let (result, sectors) = self.read_sectors(start, IoBuf::zeroed((end - start) as usize)).await;
        let skip = (offset - start) as usize;
        let len = buf.len();
        buf.copy_from_slice(&sectors[skip..skip + len]);
        (result, buf)
    }

    async fn read_sectors(&self, offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        let cipher = match self.cipher() {
            Ok(cipher) => cipher,
            Err(error) => return (Err(error), buf),
        };
        let (result, mut buf) = self.file.read_at(buf, self.host(offset).0).await;
        match result {
            Ok(()) => (Ok(()), decrypt(cipher, GuestOffset(offset), self.host(offset), buf).await),
            Err(error) => {
                buf.fill(0);
                (Err(error), buf)
            }
        }
    }

    /// Writes `buf` at `offset`. The node has checked the range.
    pub async fn write(&self, offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        let _writing = self.writers.enter(offset, buf.len() as u64).await;
        let result = self.write_entered(offset, &buf).await;
        (result, buf)
    }

    async fn write_entered(&self, offset: u64, data: &[u8]) -> Result<()> {
        if data.is_empty() {
            return Ok(());
        }
        let (at, bytes) = match (offset | data.len() as u64).is_multiple_of(SECTOR_BYTES) {
            true => (offset, IoBuf::copy_from(data)),
            false => {
                let (sectors, whole) = part_sectors(offset, data, |at, buf| self.read_sectors(at, buf)).await?;
                (sectors.start, whole)
            }
        };
        let bytes = encrypt(self.cipher()?, GuestOffset(at), self.host(at), bytes).await;
        self.file.write_at(bytes, self.host(at).0).await.0
    }

    /// Makes a range read as zeroes, which are written like other data.
    pub async fn write_zeroes(&self, offset: u64, len: u64, flags: ZeroFlags) -> Result<()> {
        if flags.no_fallback {
            return Err(Error::unsupported("an encrypted volume can't be zeroed without writing data"));
        }
        let _writing = self.writers.enter(offset, len).await;
        let end = offset + len;
        let mut at = offset;
        while at < end {
            // Behind the first piece all begin with a sector.
            let next = ((at + ZERO_CHUNK_BYTES) / SECTOR_BYTES * SECTOR_BYTES).min(end);
            self.write_entered(at, &IoBuf::zeroed((next - at) as usize)).await?;
            at = next;
        }
        Ok(())
    }

    /// Makes everything written so far durable.
    pub async fn flush(&self) -> Result<()> {
        self.file.sync().await
    }

    /// Changes the virtual size. What is added reads as whatever it decrypts to, as on a new volume.
    pub async fn resize(&self, size: u64, preallocation: Preallocation) -> Result<()> {
        let end = size.checked_add(self.payload_offset).filter(|end| i64::try_from(*end).is_ok());
        let end = end.ok_or_else(|| Error::invalid_argument("the new size is too large").value(size))?;
        resize_file(&self.file, end, preallocation).await
    }

    /// All of it is data: what isn't written reads as garbage, not as zeroes.
    pub fn block_status(&self, offset: u64, len: u64) -> Vec<StatusExtent> {
        vec![StatusExtent {
            start: offset,
            len,
            data: true,
            zero: false,
            present: true,
            compressed: false,
            offset: None,
            file: None,
            depth: 0,
        }]
    }
}
