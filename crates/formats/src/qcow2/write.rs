// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A write goes in place, without the engine's lock, where the reference count is one (COPIED). Otherwise it allocates.

use super::Qcow2Driver;
use super::extent_io::SplitBuf;
use cowshed_graph::buffers::join;
use cowshed_graph::encryption::{SECTOR_BYTES, Writing, encrypt, part_sectors};
use cowshed_graph::node::{Intent, Mapped};
use cowshed_qcow2::Engine;
use cowshed_storage::IoBuf;
use cowshed_types::{Error, Extent, GuestOffset, HostOffset, Mapping, Result};
use std::sync::atomic::Ordering;

impl Qcow2Driver {
    /// Decides at once about the way of a write.
    #[inline]
    pub(super) fn map_write(&self, offset: u64, len: u64) -> Mapped<'_> {
        // Nothing goes in place either into an image that is marked as corrupt.
        // A mapping that was read anew shows with the flag.
        let takes_writes = self.writable.load(Ordering::Acquire) && !self.corrupt.load(Ordering::Relaxed);
        if !takes_writes || self.cipher.is_some() || (self.is_recording() && !self.is_recorded(offset, len)) {
            return Mapped::Special;
        }
        self.direct(offset, len, Intent::Overwrite)
    }

    /// Writes `buf` at byte `offset` of the disk, for any mapping. The range lies on the disk.
    pub async fn write(&self, offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        if let Err(error) = self.be_writable().await {
            return (Err(error), buf);
        }
        if self.is_recording()
            && let Err(error) = self.record(offset, buf.len() as u64).await
        {
            return (Err(error), buf);
        }
        self.write_alone(offset, buf).await
    }

    /// As [`Self::write_range`] of an image without a cipher, where the first byte can't be written in place. The
    /// allocation comes without a second look at the mapping.
    pub(super) async fn write_newly(&self, offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        let (result, part, rest) = self.write_allocating(offset, buf).await;
        match result {
            Ok(_) if rest.is_empty() => (Ok(()), part),
            // Boxed: most writes of a guest end in one allocation.
            Ok(bytes) => {
                let (result, rest) = Box::pin(self.write_range(offset + bytes, rest)).await;
                (result, join(Some(part), rest))
            }
            Err(error) => {
                let buf = join(Some(part), rest);
                match self.gains_space(&error).await {
                    true => Box::pin(self.write_range(offset, buf)).await,
                    false => (Err(error), buf),
                }
            }
        }
    }

    /// As [`Self::write_range`], and no other write meanwhile changes bytes that this one must leave as they are.
    pub(super) async fn write_alone(&self, offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        let _writing = self.enter(offset, buf.len() as u64).await;
        self.write_range(offset, buf).await
    }

    /// The right to change a range of an encrypted image; other images need none.
    pub(super) async fn enter(&self, offset: u64, len: u64) -> Option<Writing<'_>> {
        match &self.cipher {
            Some(_) => Some(self.writers.enter(offset, len).await),
            None => None,
        }
    }

    /// Writes `buf` at `offset`. In an encrypted image it may be parts of sectors: the caller has entered the range.
    pub(super) async fn write_range(&self, offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        if let Err(error) = self.be_writable().await {
            return (Err(error), buf);
        }
        let is_whole = (offset | buf.len() as u64).is_multiple_of(SECTOR_BYTES);
        if self.cipher.is_none() || is_whole || buf.is_empty() {
            return self.write_sectors(offset, buf).await;
        }
        // In a box: reading may end in a deeper layer.
        let read = |at, sector| Box::pin(self.read_range(at, sector));
        match part_sectors(offset, &buf, read).await {
            Ok((sectors, whole)) => (self.write_sectors(sectors.start, whole).await.0, buf),
            Err(error) => (Err(error), buf),
        }
    }

    async fn write_sectors(&self, offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        let end = offset + buf.len() as u64;
        self.step_by_step(offset, end, buf, |at, rest| self.write_some(at, rest)).await
    }

    /// Writes the front of `buf`: in place as far as its clusters are COPIED, else as far as one allocation reaches.
    async fn write_some(&self, at: u64, buf: IoBuf) -> SplitBuf {
        let len = buf.len() as u64;
        let (result, part, rest) = match self.by_extents(Engine::map_overwrite, at, len, buf, Self::write_extent).await
        {
            (Ok(0), none, rest) => {
                let (result, part, rest) = self.write_allocating(at, rest).await;
                (result, join(Some(none), part), rest)
            }
            in_place => in_place,
        };
        match result {
            Err(error) if self.gains_space(&error).await => {
                let mut rest = join(Some(part), rest);
                (Ok(0), rest.split_to(0), rest)
            }
            result => (result, part, rest),
        }
    }

    async fn write_extent(&self, extent: Extent, buf: IoBuf) -> (Result<()>, IoBuf) {
        let Mapping::Data { host, file, encrypted } = extent.mapping else {
            return (Err(Error::internal("an in-place write to something that is not data")), buf);
        };
        // Writing there would make the file longer, and other lost data would read as zeroes.
        if let Err(error) = self.check_stored(&extent, file, host) {
            return (Err(error), buf);
        }
        if !encrypted {
            return self.stored_in(file).write_at(buf, host.0).await;
        }
        let bytes = match self.encrypted(extent.guest, host, IoBuf::copy_from(&buf)).await {
            Ok(bytes) => bytes,
            Err(error) => return (Err(error), buf),
        };
        let (result, _) = self.stored_in(file).write_at(bytes, host.0).await;
        (result, buf)
    }

    /// Whole sectors, encrypted.
    pub(super) async fn encrypted(&self, guest: GuestOffset, host: HostOffset, bytes: IoBuf) -> Result<IoBuf> {
        let Some(cipher) = &self.cipher else {
            return Err(
                self.error(Error::invalid_argument("the image is encrypted: writing needs 'encrypt.key-secret'"))
            );
        };
        if !guest.is_aligned(9) || !bytes.len().is_multiple_of(512) {
            return Err(Error::internal("a part of an encrypted sector is to be written").value(guest));
        }
        Ok(encrypt(cipher, guest, host, bytes).await)
    }
}
