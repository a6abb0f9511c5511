// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The data ranges of a file.

use super::HostFile;
use crate::DataRange;
use crate::sys::{self, SysResult};
use cowshed_types::without;
use rustix::fs::SeekFrom;
use std::os::fd::BorrowedFd;

impl HostFile {
    /// `len` is the length of the file as far as we know.
    pub(crate) async fn next_data(&self, offset: u64, len: u64) -> SysResult<Option<DataRange>> {
        if let Some(data) = self.known.find(offset, len) {
            return Ok(Some(data));
        }
        let (is_device, changes) = (self.is_device, self.known.changes());
        let found = self.short_call(move |fd| seek_data(fd, is_device, offset, len)).await?;
        found.into_iter().for_each(|data| self.known.keep(changes, data, len));
        Ok(found)
    }

    /// The first `max` runs of data that begin from `offset` on and before `end`, with one change of thread for all.
    pub(crate) async fn data_ranges(&self, offset: u64, end: u64, len: u64, max: usize) -> SysResult<Vec<DataRange>> {
        let (is_device, changes) = (self.is_device, self.known.changes());
        let first = self.known.find(offset, len).filter(|_| max > 0);
        if let Some(data) = first.filter(|data| data.end >= end || max == 1) {
            return Ok(vec![data]);
        }
        let found = self.short_call(move |fd| {
            let mut ranges: Vec<DataRange> = Vec::from_iter(first);
            let mut at = first.map_or(offset, |data| data.end);
            while at < end && ranges.len() < max {
                let Some(range) = seek_data(fd, is_device, at, len)?.filter(|range| range.start < end) else { break };
                at = range.end.max(at + 1);
                match ranges.last_mut() {
                    // A hole behind the known run has been written.
                    Some(last) if last.end == range.start => last.end = range.end,
                    _ => ranges.push(range),
                }
            }
            Ok(ranges)
        });
        let ranges = found.await?;
        ranges.last().into_iter().for_each(|data| self.known.keep(changes, *data, len));
        Ok(ranges)
    }
}

/// The first run of data of a file at or behind `offset`; of devices, and where the file system can't answer, all.
fn seek_data(fd: BorrowedFd<'_>, is_device: bool, offset: u64, len: u64) -> SysResult<Option<DataRange>> {
    let all = (offset < len).then_some(DataRange { start: offset, end: len });
    if is_device || without!("seek_data") {
        return Ok(all);
    }
    let start = match rustix::fs::seek(fd, SeekFrom::Data(offset)) {
        Ok(start) => start,
        Err(rustix::io::Errno::NXIO) => return Ok(None),
        Err(rustix::io::Errno::INVAL | rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => {
            return Ok(all);
        }
        Err(error) => return Err(sys::errno(error)),
    };
    match rustix::fs::seek(fd, SeekFrom::Hole(start)) {
        Ok(end) => Ok(Some(DataRange { start, end })),
        // The file was cut meanwhile.
        Err(rustix::io::Errno::NXIO) => Ok(None),
        Err(error) => Err(sys::errno(error)),
    }
}
