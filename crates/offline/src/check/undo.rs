// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Takes a repair back with its undo log: all that it changed gets its old bytes again, and the file its old length.
//!
//! An image that has changed since, where the repair had written, is refused before anything is written. The log notes
//! the begin of an undo first, so that an interrupted one can be made again.

use super::journal::{KIND_UNDO, checksum, unit_header};
use super::undo_log::{PADDING_BYTES_MAX, Record, UndoLog};
use cowshed_storage::{File, IoBuf};
use cowshed_types::{Error, ErrorKind, Result};
use std::collections::BTreeMap;

/// Bytes compared or copied at a time.
const PIECE_BYTES: u64 = 1 << 20;

/// The result of an undo.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UndoReport {
    /// Bytes that have their old value again.
    pub bytes_restored: u64,
    /// Bytes cut off that the repair had added at the end of the file.
    pub bytes_cut: u64,
    /// False when the repair was cut off before its end.
    pub was_complete: bool,
}

/// A part of the image and where its bytes are in the log.
#[derive(Clone, Copy, Debug)]
struct Part {
    len: u64,
    log_offset: u64,
}

/// Parts that don't overlap, by offset in the image.
#[derive(Default)]
struct Parts(BTreeMap<u64, Part>);

impl Parts {
    /// Adds the missing parts of the range.
    fn add(&mut self, start: u64, len: u64, log_offset: u64) {
        let end = start + len;
        let before = self.0.range(..start).next_back().map_or(0, |(at, part)| at + part.len);
        let inside: Vec<(u64, u64)> = self.0.range(start..end).map(|(at, part)| (*at, at + part.len)).collect();
        let mut at = start.max(before);
        for (from, to) in inside.into_iter().chain([(end, end)]) {
            if at < from {
                self.0.insert(at, Part { len: from - at, log_offset: log_offset + (at - start) });
            }
            at = at.max(to);
        }
    }
}

/// Takes the repair back that is in `log`; both files must be writable, and the image must have no other users.
pub async fn undo(image: &File, log: &File) -> Result<UndoReport> {
    let read = UndoLog::read(log).await.map_err(|error| error.file(log.name()))?;
    let (mut original, mut latest) = (Parts::default(), Parts::default());
    for record in &read.records {
        let old_len = record.old_len.min(read.image_len.saturating_sub(record.offset));
        original.add(record.offset, old_len, record.log_offset);
    }
    for record in read.records.iter().rev() {
        latest.add(record.offset, record.new_len, record.log_offset + record.old_len);
    }
    let undo = Undo { image, log, read: &read };
    undo.check_len()?;
    undo.check_head(&original).await?;
    match read.complete_len.is_some() && !read.undo_started {
        true => undo.check_complete(&latest).await?,
        false => undo.check_partial(&latest).await?,
    }
    undo.note_start().await.map_err(|error| error.file(log.name()))?;
    undo.restore(&original).await
}

struct Undo<'a> {
    image: &'a File,
    log: &'a File,
    read: &'a UndoLog,
}

impl Undo<'_> {
    fn refuse(&self, offset: u64, why: &str) -> Error {
        let message = format!("{why}; the undo log belongs to another image, or the image was changed since");
        Error::new(ErrorKind::InvalidArgument, message).offset(offset).file(self.image.name())
    }

    fn check_len(&self) -> Result<()> {
        let (len, old) = (self.image.len(), self.read.image_len);
        let written = self.read.records.iter().map(|record| record.offset + record.new_len).max();
        let fits = match self.read.complete_len {
            Some(complete) if !self.read.undo_started => len == complete,
            // Direct I/O may leave whole sectors.
            _ => (old..=written.unwrap_or(old).max(old).next_multiple_of(PADDING_BYTES_MAX)).contains(&len),
        };
        if fits { Ok(()) } else { Err(self.refuse(len, "the image's length isn't the one after the repair")) }
    }

    /// The image's first bytes, as they will be, against those when the log was begun.
    async fn check_head(&self, original: &Parts) -> Result<()> {
        let mut head = self.bytes(self.image, 0, self.read.head_len).await?;
        for (offset, part) in original.0.range(..self.read.head_len) {
            let len = part.len.min(self.read.head_len - offset);
            let old = self.bytes(self.log, part.log_offset, len).await?;
            head[*offset as usize..][..len as usize].copy_from_slice(&old);
        }
        if checksum(&[&head]) == self.read.head_checksum {
            return Ok(());
        }
        Err(self.refuse(0, "the image's header isn't the one that was repaired"))
    }

    /// After a whole repair everything it wrote is there.
    async fn check_complete(&self, latest: &Parts) -> Result<()> {
        for (start, part) in &latest.0 {
            for (at, len) in pieces(part.len) {
                let now = self.bytes(self.image, start + at, len).await?;
                let new = self.bytes(self.log, part.log_offset + at, len).await?;
                if let Some(index) = now.iter().zip(new.iter()).position(|(now, new)| now != new) {
                    return Err(self.refuse(start + at + index as u64, "the image isn't as the repair left it"));
                }
            }
        }
        Ok(())
    }

    /// After a repair or an undo that was cut off, each byte is one of those that the log knows for its place. Bytes
    /// behind the old end are cut off in any case.
    async fn check_partial(&self, latest: &Parts) -> Result<()> {
        let mut sorted: Vec<&Record> = self.read.records.iter().collect();
        sorted.sort_by_key(|record| record.offset);
        let longest = sorted.iter().map(|record| record.new_len).max().unwrap_or_default();
        for (start, part) in &latest.0 {
            let inside = part.len.min(self.read.image_len.saturating_sub(*start));
            for (at, len) in pieces(inside) {
                let place = start + at;
                let now = self.bytes(self.image, place, len).await?;
                let mut known = vec![false; len as usize];
                let first = sorted.partition_point(|record| record.offset + longest <= place);
                for record in sorted[first..].iter().take_while(|record| record.offset < place + len) {
                    let versions = [(record.log_offset, record.old_len)];
                    let new = (record.log_offset + record.old_len, record.new_len);
                    for (log_offset, version_len) in versions.into_iter().chain([new]) {
                        let from = place.max(record.offset);
                        let to = (place + len).min(record.offset + version_len);
                        if from >= to {
                            continue;
                        }
                        let bytes = self.bytes(self.log, log_offset + (from - record.offset), to - from).await?;
                        let range = (from - place) as usize..(to - place) as usize;
                        let cells = known[range.clone()].iter_mut().zip(&now[range]).zip(bytes.iter());
                        cells.for_each(|((known, now), byte)| *known |= now == byte);
                    }
                }
                if let Some(index) = known.iter().position(|known| !known) {
                    return Err(self.refuse(place + index as u64, "the image has bytes that no repair step wrote"));
                }
            }
        }
        Ok(())
    }

    /// Ends the log with the word that an undo began, durably.
    async fn note_start(&self) -> Result<()> {
        if self.read.undo_started {
            return Ok(());
        }
        let (unit, _) = unit_header(self.read.chain, KIND_UNDO, 0, self.image.len(), &[]);
        self.log.set_len(self.read.end).await?;
        let (result, _) = self.log.write_at(IoBuf::copy_from(&unit), self.read.end).await;
        result?;
        self.log.sync().await
    }

    async fn restore(&self, original: &Parts) -> Result<UndoReport> {
        let mut report = UndoReport { was_complete: self.read.complete_len.is_some(), ..UndoReport::default() };
        for (start, part) in &original.0 {
            for (at, len) in pieces(part.len) {
                let bytes = self.bytes(self.log, part.log_offset + at, len).await?;
                let (result, _) = self.image.write_at(bytes, start + at).await;
                result?;
                report.bytes_restored += len;
            }
        }
        self.image.sync().await?;
        report.bytes_cut = self.image.len().saturating_sub(self.read.image_len);
        if report.bytes_cut != 0 {
            self.image.set_len(self.read.image_len).await?;
            self.image.sync().await?;
        }
        Ok(report)
    }

    async fn bytes(&self, file: &File, offset: u64, len: u64) -> Result<IoBuf> {
        let (result, buf) = file.read_at(IoBuf::zeroed(len as usize), offset).await;
        result.map(|()| buf)
    }
}

/// Pieces of a part: offset inside of it, and length.
fn pieces(len: u64) -> impl Iterator<Item = (u64, u64)> {
    (0..len.div_ceil(PIECE_BYTES)).map(move |nth| (nth * PIECE_BYTES, PIECE_BYTES.min(len - nth * PIECE_BYTES)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_to_come_keeps_its_place() {
        let mut parts = Parts::default();
        for (start, len, log_offset) in [(100, 10, 0), (130, 10, 1000), (95, 50, 2000), (0, 0, 1), (0, 300, 5000)] {
            parts.add(start, len, log_offset);
        }
        let list: Vec<_> = parts.0.iter().map(|(start, part)| (*start, part.len, part.log_offset)).collect();
        let expected = [
            (0, 95, 5000),
            (95, 5, 2000),
            (100, 10, 0),
            (110, 20, 2015),
            (130, 10, 1000),
            (140, 5, 2045),
            (145, 155, 5145),
        ];
        assert_eq!(list, expected);
    }
}
