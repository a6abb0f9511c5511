// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A guest's disk whose writes take over the blocks of another file, as `convert` does where the file system can.

use crate::runner::GuestDisk;
use crate::scenario::ImageDisk;
use cowshed_storage::{File, IoBuf, OpenOptions};
use cowshed_types::Result;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Shared ranges begin at a multiple of it in the pool, in bytes.
const POOL_ALIGN_BYTES: u64 = 1 << 16;

/// An image. Ranges that cover whole units of a write are shared, as far as the image can; the rest is written.
pub struct SharingDisk {
    disk: ImageDisk,
    pool: File,
    end: AtomicU64,
    unit: u64,
    /// Bytes that were shared, over all disks.
    shared: Arc<AtomicU64>,
}

impl SharingDisk {
    /// `unit`: the cluster size in bytes.
    ///
    /// # Errors
    /// Errors of making the file beside it.
    pub fn new(disk: ImageDisk, unit: u64, shared: Arc<AtomicU64>) -> Result<Self> {
        let pool = format!("{}.pool", disk.0.filename());
        let pool = File::open(Path::new(&pool), &OpenOptions { create: true, write: true, ..OpenOptions::default() })?;
        Ok(SharingDisk { disk, pool, end: AtomicU64::new(0), unit, shared })
    }

    /// The image.
    pub fn into_image(self) -> ImageDisk {
        self.disk
    }

    async fn share(&self, offset: u64, bytes: &[u8]) -> Result<u64> {
        let len = bytes.len() as u64;
        let place = self.end.fetch_add(len.next_multiple_of(POOL_ALIGN_BYTES), Ordering::Relaxed);
        self.pool.write_at(IoBuf::copy_from(bytes), place).await.0?;
        let shared = self.disk.0.share_from(offset, len, &self.pool, place).await?;
        self.shared.fetch_add(shared, Ordering::Relaxed);
        Ok(shared)
    }

    async fn write_all(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let start = offset.next_multiple_of(self.unit) - offset;
        let len = (bytes.len() as u64).saturating_sub(start) / self.unit * self.unit;
        let (head, rest) = bytes.split_at((start as usize).min(bytes.len()));
        if len == 0 {
            return self.disk.write(offset, IoBuf::copy_from(bytes)).await.0;
        }
        if !head.is_empty() {
            self.disk.write(offset, IoBuf::copy_from(head)).await.0?;
        }
        let shared = self.share(offset + start, &rest[..len as usize]).await?;
        match &rest[shared as usize..] {
            [] => Ok(()),
            rest => self.disk.write(offset + start + shared, IoBuf::copy_from(rest)).await.0,
        }
    }
}

impl GuestDisk for SharingDisk {
    async fn read(&self, offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        self.disk.read(offset, buf).await
    }

    async fn write(&self, offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        (self.write_all(offset, &buf).await, buf)
    }

    async fn write_zeroes(&self, offset: u64, len: u64, may_unmap: bool) -> Result<()> {
        self.disk.write_zeroes(offset, len, may_unmap).await
    }

    async fn discard(&self, offset: u64, len: u64) -> Result<()> {
        self.disk.discard(offset, len).await
    }

    async fn write_compressed(&self, offset: u64, buf: IoBuf) -> Result<()> {
        self.disk.write_compressed(offset, buf).await
    }

    async fn resize(&self, bytes: u64) -> Result<()> {
        self.disk.resize(bytes).await
    }

    fn size(&self) -> u64 {
        self.disk.size()
    }

    async fn flush(&self) -> Result<()> {
        self.disk.flush().await
    }
}
