// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Protocols: drivers of nodes that are the bytes of a [`File`].

mod file;

pub use file::{check_can_preallocate, discard_file, resize_file, zero_file};

use crate::nbd_client::Client;
use crate::node::{
    Driver, Intent, LocalFuture, Mapped, Preallocation, StatusExtent, StorageKind, Transfer, Work, ZeroFlags,
    whole_sectors,
};
use cowshed_nbd_proto::flags::{STATE_HOLE, STATE_ZERO};
use cowshed_storage::{File, IoBuf};
use cowshed_types::{Errno, Error, Result};
use file::file_status;
use std::sync::Arc;

/// A protocol node: bytes in a [`File`].
#[derive(Debug)]
pub(crate) struct FileDriver {
    pub name: &'static str,
    pub file: File,
    /// `None`: that of the node below.
    pub kind: Option<StorageKind>,
    /// For `null-co`: whether reads are promised to give zeroes.
    pub null_reads_zeroes: Option<bool>,
    /// The context that a map shows in place of the places of data.
    pub context: Option<ForeignContext>,
}

/// A metadata context of an NBD server that the user named (`x-dirty-bitmap`).
#[derive(Debug)]
pub(crate) struct ForeignContext {
    pub client: Arc<Client>,
    /// Its values are depths, and not bits.
    pub has_depths: bool,
}

impl Driver for FileDriver {
    fn name(&self) -> &'static str {
        self.name
    }

    fn holds_changes(&self) -> bool {
        false
    }

    fn size(&self) -> u64 {
        whole_sectors(self.file.len())
    }

    #[inline]
    fn map(&self, offset: u64, _len: u64, _intent: Intent) -> Mapped<'_> {
        Mapped::File { file: &self.file, host: offset, guard: None }
    }

    fn read(&self, offset: u64, buf: IoBuf) -> Transfer<'_> {
        Box::pin(self.file.read_at(buf, offset))
    }

    fn write(&self, offset: u64, buf: IoBuf) -> Transfer<'_> {
        Box::pin(self.file.write_at(buf, offset))
    }

    fn write_zeroes(&self, offset: u64, len: u64, flags: ZeroFlags) -> Work<'_> {
        Box::pin(zero_file(&self.file, offset, len, flags))
    }

    fn discard(&self, offset: u64, len: u64) -> Work<'_> {
        Box::pin(discard_file(&self.file, offset, len))
    }

    fn flush(&self) -> Work<'_> {
        Box::pin(self.file.sync())
    }

    fn resize(&self, size: u64, preallocation: Preallocation) -> Work<'_> {
        Box::pin(resize_file(&self.file, size, preallocation))
    }

    fn shows_foreign_context(&self) -> bool {
        self.context.is_some()
    }

    fn block_status(&self, offset: u64, len: u64, max_runs: usize) -> LocalFuture<'_, Result<Vec<StatusExtent>>> {
        Box::pin(self.status(offset, len, max_runs))
    }

    fn whole_file(&self) -> Option<&File> {
        Some(&self.file)
    }

    fn protocol_file(&self) -> Option<&File> {
        Some(&self.file)
    }

    fn storage_kind(&self) -> Option<StorageKind> {
        self.kind
    }

    fn null_reads_zeroes(&self) -> Option<bool> {
        self.null_reads_zeroes
    }

    fn can_grow(&self) -> bool {
        !self.file.is_device()
    }

    fn fixed_length(&self) -> Option<&'static str> {
        None
    }

    fn close(&self, read_only: bool) -> Work<'_> {
        Box::pin(async move {
            let synced = if read_only { Ok(()) } else { self.file.sync().await };
            // A remaining reference to the node keeps the file open, but not its locks.
            synced.and(self.file.unlock())
        })
    }
}

/// A file that is read sector by sector has data up to the end of its last sector.
fn in_whole_sectors(mut runs: Vec<StatusExtent>) -> Vec<StatusExtent> {
    const SECTOR_BYTES: u64 = 512;
    if let [.., data, tail] = &mut runs[..]
        && data.data
        && !tail.data
        && !tail.start.is_multiple_of(SECTOR_BYTES)
        && tail.len < SECTOR_BYTES
    {
        data.len += tail.len;
        runs.pop();
    }
    runs
}

impl FileDriver {
    async fn status(&self, offset: u64, len: u64, max_runs: usize) -> Result<Vec<StatusExtent>> {
        if let Some(context) = &self.context {
            return context.block_status(&self.file, offset, len, max_runs).await;
        }
        match self.null_reads_zeroes {
            None if self.file.alignment().offset > 1 => {
                file_status(&self.file, offset, len, max_runs).await.map(in_whole_sectors)
            }
            None => file_status(&self.file, offset, len, max_runs).await,
            Some(zero) => Ok(vec![StatusExtent {
                start: offset,
                len,
                data: false,
                zero,
                present: zero,
                compressed: false,
                offset: zero.then_some(offset),
                file: zero.then(|| self.file.name().into()),
                depth: 0,
            }]),
        }
    }
}

impl ForeignContext {
    /// The status of a range as QEMU reads it from any context: bit 0 stands for the absence of data, bit 1 for zeroes.
    /// Of depths, 2 stands for all below the image.
    async fn block_status(&self, file: &File, offset: u64, len: u64, max_runs: usize) -> Result<Vec<StatusExtent>> {
        let failed =
            |errno| Error::os(errno, "could not ask for the metadata context").file(file.name()).offset(offset);
        let name: Arc<str> = file.name().into();
        let end = offset + len;
        let (mut at, mut found) = (offset, Vec::new());
        while at < end && found.len() < max_runs {
            let runs = self.client.context_status(at, end - at).await.map_err(failed)?;
            if runs.is_empty() || runs.iter().any(|run| run.len == 0) {
                return Err(failed(Errno::EIO));
            }
            for run in runs {
                if at == end || found.len() == max_runs {
                    break;
                }
                let len = run.len.min(end - at);
                let flags = if self.has_depths { run.flags.min(STATE_ZERO) } else { run.flags };
                let (data, zero) = (flags & STATE_HOLE == 0, flags & STATE_ZERO != 0);
                let present = data || zero;
                found.push(StatusExtent {
                    start: at,
                    len,
                    data,
                    zero,
                    present,
                    compressed: false,
                    offset: present.then_some(at),
                    file: present.then(|| Arc::clone(&name)),
                    depth: 0,
                });
                at += len;
            }
        }
        Ok(found)
    }
}
