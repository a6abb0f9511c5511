// SPDX-License-Identifier: Apache-2.0 OR MIT
//! An export as the base of a `File`.

use super::{Client, Reply};
use cowshed_nbd_proto::flags::{STATE_ZERO, TransmissionFlags};
use cowshed_storage::{Alignment, DataRange, File, IoBuf, Remote, RemoteFuture, TransferSizes};
use cowshed_types::{Errno, Error, ErrorKind, Result};
use std::sync::Arc;

impl Client {
    /// True when the server doesn't let us write.
    pub fn is_read_only(&self) -> bool {
        self.facts().flags.contains(TransmissionFlags::READ_ONLY)
    }

    /// The export as a file, to be written to or not. Its length can't be changed.
    pub fn into_file(self, writable: bool) -> Result<File> {
        Arc::new(self).file(writable)
    }

    /// As [`Client::into_file`], beside other uses of the client.
    pub fn file(self: &Arc<Self>, writable: bool) -> Result<File> {
        let name = self.name().to_owned();
        if writable && self.is_read_only() {
            let error = Error::new(ErrorKind::ReadOnly, "the server offers it for reading only").file(name);
            return Err(error.qemu("Could not open image: Permission denied"));
        }
        let len = self.facts().size;
        Ok(File::remote(name, writable, len, Arc::clone(self) as Arc<dyn Remote>))
    }

    /// The next range from `offset` that may hold something else than zeroes.
    async fn find_data(&self, offset: u64) -> Reply<Option<DataRange>> {
        let size = self.facts().size;
        let (mut at, mut start) = (offset, None);
        while at < size {
            let runs = self.block_status(at, size - at).await?;
            if runs.is_empty() {
                // The server doesn't know: all of it.
                return Ok(Some(DataRange { start: start.unwrap_or(at), end: size }));
            }
            for run in runs {
                if run.len == 0 {
                    return Err(Errno::EIO);
                }
                let end = at.saturating_add(run.len).min(size);
                // A hole without the flag of zeroes may hold anything.
                let is_data = run.flags & STATE_ZERO == 0;
                match (is_data, start) {
                    (true, None) => start = Some(at),
                    (false, Some(start)) => return Ok(Some(DataRange { start, end: at })),
                    _ => {}
                }
                at = end;
                if at == size {
                    break;
                }
            }
            // One reply is enough when it has some data; the range behind is asked for next time.
            if let Some(start) = start {
                return Ok(Some(DataRange { start, end: at }));
            }
        }
        Ok(None)
    }
}

impl Remote for Client {
    fn alignment(&self) -> Alignment {
        Alignment { memory: 1, offset: self.facts().block_sizes.minimum.into() }
    }

    fn transfer_sizes(&self) -> Option<TransferSizes> {
        let sizes = self.facts().block_sizes;
        Some(TransferSizes { preferred: sizes.preferred.into(), maximum: sizes.maximum.into() })
    }

    fn is_read_only(&self) -> bool {
        Client::is_read_only(self)
    }

    fn read(&self, buf: IoBuf, offset: u64) -> RemoteFuture<'_, (Reply<()>, IoBuf)> {
        Box::pin(Client::read(self, offset, buf))
    }

    fn write(&self, buf: IoBuf, offset: u64) -> RemoteFuture<'_, (Reply<()>, IoBuf)> {
        Box::pin(Client::write(self, offset, buf, false))
    }

    fn sync(&self) -> RemoteFuture<'_, Reply<()>> {
        Box::pin(self.flush())
    }

    fn write_zeroes(&self, offset: u64, len: u64, may_unmap: bool) -> RemoteFuture<'_, Reply<()>> {
        Box::pin(Client::write_zeroes(self, offset, len, may_unmap, false))
    }

    fn write_zeroes_fast(&self, offset: u64, len: u64, may_unmap: bool) -> RemoteFuture<'_, Reply<()>> {
        Box::pin(Client::write_zeroes(self, offset, len, may_unmap, true))
    }

    fn discard(&self, offset: u64, len: u64) -> RemoteFuture<'_, Reply<()>> {
        Box::pin(self.trim(offset, len))
    }

    fn next_data(&self, offset: u64) -> RemoteFuture<'_, Reply<Option<DataRange>>> {
        Box::pin(self.find_data(offset))
    }
}
