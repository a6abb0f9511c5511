// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Requests whose data lies in memory that a guest shares. A range that is one place of a file goes between the two without a copy in
//! this process. All else has a copy: the guest may change its memory while a driver looks at the bytes.

use super::driver::{Intent, Mapped};
use super::{ByNode, CountedBy, DetectZeroes, LocalFuture, Node};
use crate::stats::IoKind;
use cowshed_storage::{IoBuf, SharedBufs};
#[cfg(mutants)]
use cowshed_types::slip;
use cowshed_types::{Error, Result};

impl Node {
    /// As [`Node::read`], into shared memory. After an error it may be filled in part.
    #[inline]
    pub fn read_shared(&self, offset: u64, bufs: SharedBufs) -> impl Future<Output = (Result<()>, SharedBufs)> {
        self.read_shared_counted(offset, bufs, ByNode)
    }

    /// As [`Node::read_shared`].
    pub(crate) async fn read_shared_counted<C: CountedBy>(
        &self,
        offset: u64,
        bufs: SharedBufs,
        counting: C,
    ) -> (Result<()>, SharedBufs) {
        let (len, start_ns) = (bufs.len() as u64, self.start_ns(counting));
        if let Err(error) = self.check_range(offset, len) {
            self.count_invalid(IoKind::Read);
            return (Err(error), bufs);
        }
        let (result, bufs) = match self.map_read(offset, len) {
            Mapped::File { file, host, guard } => {
                #[cfg(mutants)]
                let guard = guard.filter(|_| !slip!("shared_reads_unpinned"));
                let done = file.read_shared_at(bufs, host).await;
                drop(guard);
                done
            }
            Mapped::Zeroes => {
                bufs.zero_from(0);
                (Ok(()), bufs)
            }
            mapped => (self.read_copied(mapped, offset, &bufs).await, bufs),
        };
        let result = result.and_then(|()| bufs.check());
        self.end(counting, IoKind::Read, offset, len, start_ns, &result);
        (result, bufs)
    }

    /// By a buffer. A driver's own read does what [`Node::read`] does for a place that is not its own file's.
    async fn read_copied(&self, mapped: Mapped<'_>, offset: u64, bufs: &SharedBufs) -> Result<()> {
        let mapped = after_load(mapped).await?;
        let buf = IoBuf::try_scratch(bufs.len())?;
        let (result, buf) = match mapped {
            Mapped::Layer(layer, place) => self.read_layers(layer, place, offset, buf).await,
            _ => self.read_noted(offset, buf).await,
        };
        if result.is_ok() {
            bufs.write(0, &buf);
        }
        result
    }

    /// As [`Node::run_write`], from shared memory, which may change meanwhile.
    #[inline]
    pub(crate) fn run_write_shared(
        &self,
        offset: u64,
        bufs: SharedBufs,
    ) -> impl Future<Output = (Result<()>, SharedBufs)> {
        self.write_shared_counted(offset, bufs, ByNode)
    }

    /// As [`Node::run_write_shared`]. A lane may count it only while [`Node::is_counted_in_lanes`].
    pub(crate) async fn write_shared_counted<C: CountedBy>(
        &self,
        offset: u64,
        bufs: SharedBufs,
        counting: C,
    ) -> (Result<()>, SharedBufs) {
        let (len, start_ns) = (bufs.len() as u64, self.start_ns(counting));
        if let Err(error) = self.check_write(offset, len).and_then(|()| bufs.check()) {
            self.count_invalid(IoKind::Write);
            return (Err(error), bufs);
        }
        if self.settings.detect_zeroes() != DetectZeroes::Off || self.settings.is_probed_raw() {
            // The bytes decide.
            let result = match IoBuf::try_copy_of(&bufs) {
                Ok(buf) => self.write_boxed_counted(offset, buf, counting).await.0,
                Err(error) => Err(error),
            };
            return (result, bufs);
        }
        let (result, bufs) = match self.driver.map(offset, len, Intent::Overwrite) {
            Mapped::File { file, host, guard } => {
                #[cfg(mutants)]
                let guard = guard.filter(|_| !slip!("shared_writes_unpinned"));
                let done = file.write_shared_at(bufs, host).await;
                drop(guard);
                match done {
                    (Err(error), bufs) => (self.write_shared_again(error, offset, &bufs).await, bufs),
                    done => done,
                }
            }
            mapped => (self.write_copied(mapped, offset, &bufs).await, bufs),
        };
        let result = result.and_then(|()| bufs.check());
        self.end_write(counting, IoKind::Write, offset, len, start_ns, &result);
        if result.is_ok() && self.settings.is_writethrough() {
            return (self.flush_boxed().await, bufs);
        }
        (result, bufs)
    }

    /// As [`Node::write_again`].
    #[cold]
    fn write_shared_again<'a>(
        &'a self,
        error: Error,
        offset: u64,
        bufs: &'a SharedBufs,
    ) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move {
            match IoBuf::try_copy_of(bufs) {
                Ok(buf) => self.write_again(error, offset, buf).await.0,
                Err(_) => Err(error),
            }
        })
    }

    async fn write_copied(&self, mapped: Mapped<'_>, offset: u64, bufs: &SharedBufs) -> Result<()> {
        let mapped = after_load(mapped).await?;
        let buf = IoBuf::try_copy_of(bufs)?;
        match mapped {
            Mapped::Nothing => self.driver.write_unmapped(offset, buf).await.0,
            _ => self.driver.write(offset, buf).await.0,
        }
    }
}

/// Other requests wait for what it loads, also where this one fails. The driver itself looks again then.
async fn after_load(mapped: Mapped<'_>) -> Result<Mapped<'_>> {
    match mapped {
        Mapped::Load(load) => load.await.map(|()| Mapped::Special),
        mapped => Ok(mapped),
    }
}
