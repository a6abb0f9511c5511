// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A disk of zeroes whose reads and writes wait for the test, from an offset on.

use cowshed_image::ZeroFlags;
use cowshed_nbd_server::{Disk, DiskQueue, DiskRun};
use cowshed_storage::{IoBuf, rt};
use cowshed_types::Result;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Size in bytes.
pub const SIZE: u64 = 1 << 30;
/// Requests from here on wait, in bytes.
pub const HELD_FROM: u64 = SIZE / 2;

#[derive(Debug, Default)]
pub struct Held {
    is_open: AtomicBool,
    /// Of requests that were begun and haven't ended, in bytes.
    pub bytes: AtomicU64,
    /// The most that they ever had.
    pub most_bytes: AtomicU64,
}

impl Held {
    /// Lets the requests go.
    pub fn open(&self) {
        self.is_open.store(true, Ordering::SeqCst);
    }

    async fn pass(&self, offset: u64, buf: &mut IoBuf) {
        let len = buf.len() as u64;
        let now = self.bytes.fetch_add(len, Ordering::SeqCst) + len;
        self.most_bytes.fetch_max(now, Ordering::SeqCst);
        while offset >= HELD_FROM && !self.is_open.load(Ordering::SeqCst) {
            // Held until the test opens it.
            rt::sleep(Duration::from_millis(1)).await;
        }
        buf.fill(0);
        self.bytes.fetch_sub(len, Ordering::SeqCst);
    }
}

/// The disk that the server exports.
#[derive(Clone, Debug, Default)]
pub struct HeldDisk(pub Arc<Held>);

impl Disk for HeldDisk {
    type Queue = HeldDisk;

    fn queue(&self) -> HeldDisk {
        self.clone()
    }

    fn size(&self) -> u64 {
        SIZE
    }

    fn is_read_only(&self) -> bool {
        false
    }
}

impl DiskQueue for HeldDisk {
    fn size(&self) -> u64 {
        SIZE
    }

    async fn read(&self, offset: u64, mut buf: IoBuf) -> (Result<()>, IoBuf) {
        self.0.pass(offset, &mut buf).await;
        (Ok(()), buf)
    }

    async fn write(&self, offset: u64, mut buf: IoBuf, _durable: bool) -> (Result<()>, IoBuf) {
        self.0.pass(offset, &mut buf).await;
        (Ok(()), buf)
    }

    async fn write_zeroes(&self, _offset: u64, _len: u64, _flags: ZeroFlags) -> Result<()> {
        Ok(())
    }

    async fn discard(&self, _offset: u64, _len: u64) -> Result<()> {
        Ok(())
    }

    async fn flush(&self) -> Result<()> {
        Ok(())
    }

    async fn block_status(&self, _offset: u64, len: u64, _max: usize) -> Result<Vec<DiskRun>> {
        Ok(vec![DiskRun { len, data: true, zero: false, depth: 1 }])
    }
}
