// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Transfers between a file and memory that another process shares.

use super::File;
use crate::counters::FileOp;
use crate::medium::Medium;
use crate::payload::{Bufs, Payload};
use crate::sys::SysResult;
use crate::{IoBuf, SharedBufs};
use cowshed_types::{Errno, Result};

impl File {
    /// As [`File::read_at`], into shared memory. The kernel fills it where the file is one of this machine; else the bytes are copied.
    /// After an error the memory may be filled in part.
    pub async fn read_shared_at(&self, bufs: SharedBufs, offset: u64) -> (Result<()>, SharedBufs) {
        if !matches!(self.0.medium, Medium::Host(_)) {
            return Box::pin(self.read_copied_at(bufs, offset)).await;
        }
        let (len, start_ns) = (bufs.len() as u64, self.0.counters.start_ns());
        let (result, payload) = self.0.read(Payload { bufs: Bufs::Shared(bufs), guard: None }, offset).await;
        let bufs = payload.into_shared();
        if let Err(error) = check_after(&result, &bufs) {
            return (Err(error), bufs);
        }
        self.0.counters.count(FileOp::Read, offset, len, start_ns, result.is_ok());
        (result.map_err(|errno| self.error(errno, "could not read", offset)), bufs)
    }

    async fn read_copied_at(&self, bufs: SharedBufs, offset: u64) -> (Result<()>, SharedBufs) {
        let buf = match IoBuf::try_scratch(bufs.len()) {
            Ok(buf) => buf,
            Err(error) => return (Err(error), bufs),
        };
        let (result, buf) = self.read_at(buf, offset).await;
        if result.is_ok() {
            bufs.write(0, &buf);
        }
        (result.and_then(|()| bufs.check()), bufs)
    }

    /// As [`File::write_at`], from shared memory, which may change meanwhile: the file gets what the kernel saw. The kernel takes it
    /// where the file is one of this machine; else the bytes are copied.
    pub async fn write_shared_at(&self, bufs: SharedBufs, offset: u64) -> (Result<()>, SharedBufs) {
        if !matches!(self.0.medium, Medium::Host(_)) {
            let copy = IoBuf::try_copy_of(&bufs);
            let result = match copy {
                Ok(copy) => Box::pin(self.write_at(copy, offset)).await.0,
                Err(error) => Err(error),
            };
            return (result, bufs);
        }
        let (len, start_ns) = (bufs.len() as u64, self.0.counters.start_ns());
        if let Err(error) = self.check_change(offset, len, true).and_then(|()| bufs.check()) {
            return (Err(error), bufs);
        }
        let (result, payload) = self.0.write(Payload { bufs: Bufs::Shared(bufs), guard: None }, offset).await;
        let bufs = payload.into_shared();
        if let Err(error) = check_after(&result, &bufs) {
            return (Err(error), bufs);
        }
        self.0.counters.count(FileOp::Write, offset, len, start_ns, result.is_ok());
        (result.map_err(|errno| self.error(errno, "could not write", offset)), bufs)
    }
}

/// Whether the memory of a transfer was there to its end. The kernel fails without it by an error that a file may have, too.
fn check_after(result: &SysResult<()>, bufs: &SharedBufs) -> Result<()> {
    match result {
        Err(Errno(libc::EFAULT)) => bufs.check_pages(),
        _ => bufs.check(),
    }
}
