// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Requests that change a disk in blocks.

use super::{BlockFormat, Image};
use crate::mapped::MappedWriter;
use crate::writer::Writer;
use cowshed_graph::node::{Link, Transfer, Work, ZeroFlags};
use cowshed_storage::IoBuf;
use cowshed_types::Error;

impl<F: BlockFormat> MappedWriter for Image<F> {
    fn write<'a>(&'a self, offset: u64, buf: IoBuf, backing: &'a Link) -> Transfer<'a> {
        Box::pin(async move {
            match self.open_writer() {
                Ok(writer) => writer.write(&self.format, &self.file, backing, offset, buf).await,
                Err(error) => (Err(error), buf),
            }
        })
    }

    fn write_compressed<'a>(&'a self, clusters: Vec<(u64, IoBuf)>, backing: &'a Link) -> Work<'a> {
        Box::pin(async move {
            if !F::PACKS {
                return Err(Error::unsupported("Compression not supported for this file format"));
            }
            self.open_writer()?.write_packed(&self.format, &self.file, backing, clusters).await
        })
    }

    fn compresses(&self) -> bool {
        F::PACKS
    }

    fn write_zeroes<'a>(&'a self, offset: u64, len: u64, flags: ZeroFlags, backing: &'a Link) -> Work<'a> {
        Box::pin(async move {
            self.open_writer()?.write_zeroes(&self.format, &self.file, backing, (offset, len), flags).await
        })
    }

    fn discard(&self, offset: u64, len: u64) -> Work<'_> {
        Box::pin(async move { self.open_writer()?.discard(&self.format, &self.file, (offset, len)).await })
    }

    fn is_resizable(&self) -> bool {
        self.format.set_size(self.format.size()).is_ok()
    }

    fn resize<'a>(&'a self, size: u64, backing: &'a Link) -> Work<'a> {
        Box::pin(async move {
            let (writer, old) = (self.open_writer()?, self.format.size());
            // Formats that can't be resized refuse first.
            self.format.set_size(old)?;
            if size < old {
                return Err(Error::unsupported("Shrinking images is currently not supported"));
            }
            if size > old {
                writer.lengthen(&self.format, &self.file, size).await?;
            }
            self.format.set_size(size)?;
            let grown = async {
                // A longer backing file must not show behind the old end.
                let below = backing.load().as_ref().map_or(0, |backing| backing.size());
                if old < below.min(size) {
                    let range = (old, below.min(size) - old);
                    writer.write_zeroes(&self.format, &self.file, backing, range, ZeroFlags::default()).await?;
                }
                writer.flush(&self.format, &self.file).await?;
                self.format.write_size(&self.file.storage()).await
            };
            let result = grown.await;
            if result.is_err() {
                self.format.set_size(old)?;
            }
            result
        })
    }

    fn let_blocks_move(&self, allowed: bool) {
        self.format.let_blocks_move(allowed);
    }

    fn holds_changes(&self) -> bool {
        self.writer.get().is_some_and(Writer::holds_changes)
    }

    fn flush(&self) -> Work<'_> {
        Box::pin(async move { self.open_writer()?.flush(&self.format, &self.file).await })
    }

    fn complete(&self) -> Work<'_> {
        Box::pin(async move { self.open_writer()?.complete(&self.format, &self.file).await })
    }
}
