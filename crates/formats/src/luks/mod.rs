// SPDX-License-Identifier: Apache-2.0 OR MIT
//! LUKS version 1 as a format of its own: header and key slots, then the encrypted disk, or that in a file of its own.

mod open;

pub(crate) use open::DRIVER;

use cowshed_graph::encryption::{Cipher, LuksArea, SECTOR_BYTES, Writers, decrypt, encrypt, part_sectors};
use cowshed_graph::node::{
    ChildRole, Driver, EncryptedVolume, LocalFuture, Preallocation, StatusExtent, Transfer, Work, ZeroFlags, done,
    whole_sectors,
};
use cowshed_graph::protocols::resize_file;
use cowshed_layout::luks::LuksHeader;
use cowshed_storage::{File, IoBuf, PermissionSet, Permissions};
use cowshed_types::{Error, GuestOffset, HostOffset, Result};
use std::future::ready;
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
    fn cipher(&self) -> Result<&Arc<dyn Cipher>> {
        self.cipher.as_ref().ok_or_else(|| Error::invalid_argument("Parameter 'key-secret' is required for cipher"))
    }

    /// The node checked the range against the size, so the sum stays inside of the file.
    fn host(&self, offset: u64) -> HostOffset {
        HostOffset(self.payload_offset + offset)
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
}

impl EncryptedVolume for LuksDriver {
    fn header(&self) -> LocalFuture<'_, Result<LuksHeader>> {
        Box::pin(async move { Ok(self.area.volume().await?.header().clone()) })
    }

    fn has_detached_header(&self) -> bool {
        self.is_detached
    }
}

impl Driver for LuksDriver {
    fn name(&self) -> &'static str {
        "luks"
    }

    fn holds_changes(&self) -> bool {
        false
    }

    /// Virtual size in bytes: sectors of the payload, the last one also where the file ends within it, as in QEMU.
    fn size(&self) -> u64 {
        whole_sectors(self.file.len().saturating_sub(self.payload_offset))
    }

    fn read(&self, offset: u64, buf: IoBuf) -> Transfer<'_> {
        Box::pin(async move {
            let mut buf = buf;
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
        })
    }

    fn write(&self, offset: u64, buf: IoBuf) -> Transfer<'_> {
        Box::pin(async move {
            let _writing = self.writers.enter(offset, buf.len() as u64).await;
            let result = self.write_entered(offset, &buf).await;
            (result, buf)
        })
    }

    fn write_zeroes(&self, offset: u64, len: u64, flags: ZeroFlags) -> Work<'_> {
        Box::pin(async move {
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
        })
    }

    fn flush(&self) -> Work<'_> {
        Box::pin(async move { self.file.sync().await })
    }

    fn resize(&self, size: u64, preallocation: Preallocation) -> Work<'_> {
        Box::pin(async move {
            let end = whole_sectors(size).checked_add(self.payload_offset).filter(|end| i64::try_from(*end).is_ok());
            let end = end.ok_or_else(|| Error::invalid_argument("the new size is too large").value(size))?;
            resize_file(&self.file, end, preallocation).await
        })
    }

    /// All of it is data: a range never written reads as garbage, not as zeroes.
    fn block_status(&self, offset: u64, len: u64, _max_runs: usize) -> LocalFuture<'_, Result<Vec<StatusExtent>>> {
        Box::pin(ready(Ok(vec![StatusExtent {
            start: offset,
            len,
            data: true,
            zero: false,
            present: true,
            compressed: false,
            offset: None,
            file: None,
            depth: 0,
        }])))
    }

    fn can_grow(&self) -> bool {
        !self.file.is_device()
    }

    /// Bytes that were never encrypted decrypt to noise.
    fn grows_by_zeroes(&self) -> bool {
        false
    }

    fn key_slots(&self) -> Option<Result<(LuksArea, &'static str)>> {
        Some(Ok((self.area.clone(), "")))
    }

    fn encrypted_volume(&self) -> Option<&dyn EncryptedVolume> {
        Some(self)
    }

    fn passes_permissions(&self, by_users: bool) -> bool {
        by_users
    }

    /// Its header counts as long as it is open.
    fn permissions(&self, _role: ChildRole, wanted: Permissions, _read_only: bool) -> Permissions {
        Permissions { used: wanted.used | PermissionSet::CONSISTENT_READ, ..wanted }
    }

    fn close(&self, read_only: bool) -> Work<'_> {
        if read_only { done(Ok(())) } else { self.flush() }
    }
}
