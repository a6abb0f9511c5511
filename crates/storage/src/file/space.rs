// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Space of a file that is given back, or reads as zeroes.

use super::File;
use crate::IoBuf;
use crate::counters::FileOp;
use crate::medium::{Medium, Space};
use cowshed_types::{Errno, Result};
use std::sync::atomic::Ordering;

impl File {
    /// True where a user of the file wants discards ignored: callers that could give space back don't. Space that an operation
    /// on the file itself gives back isn't meant.
    pub fn keeps_space(&self) -> bool {
        let base = matches!(&self.0.medium, Medium::Faulty(faulty) if faulty.base().keeps_space());
        base || self.0.keeps_space.load(Ordering::Relaxed)
    }

    /// Says whether discards are to be ignored from now on.
    pub fn set_keeps_space(&self, keeps: bool) {
        self.0.keeps_space.store(keeps, Ordering::Release);
    }

    /// True for bytes behind a protocol, or of another image.
    pub fn is_remote(&self) -> bool {
        matches!(self.0.medium, Medium::Remote(_))
    }

    /// The words of a refusal to set the length: of the disk of another image, or of a part of one.
    pub fn fixed_length(&self) -> Option<&'static str> {
        match &self.0.medium {
            Medium::Remote(file) => file.remote.fixed_length(),
            Medium::Faulty(faulty) => faulty.base().fixed_length(),
            _ => None,
        }
    }

    /// True where writes are forgotten.
    pub fn is_null(&self) -> bool {
        matches!(self.0.medium, Medium::Null(_))
    }

    /// Gives the space of a range back: a hint. On a local file it reads as zeroes then. Behind a protocol, and where a
    /// device has longer sectors, its bytes are unknown. `Unsupported` where it can't be done.
    pub async fn discard(&self, offset: u64, len: u64) -> Result<()> {
        self.check_change(offset, len, false)?;
        let Medium::Remote(file) = &self.0.medium else {
            let (start, end) = self.whole_blocks(offset, len);
            return self.change_space(Space::Punch, start, end.saturating_sub(start), "could not discard").await;
        };
        let start_ns = self.0.counters.start_ns();
        let result = file.discard(offset, len).await;
        self.0.counters.count(FileOp::Discard, offset, len, start_ns, result.is_ok());
        result.map_err(|errno| self.error(errno, "could not discard", offset))
    }

    /// Gives the space of a range in bytes back; it reads as zeroes then. `Unsupported` where the file system can't.
    pub async fn punch_hole(&self, offset: u64, len: u64) -> Result<()> {
        self.make_zero(Space::Punch, offset, len, "could not punch a hole").await
    }

    /// Makes a range in bytes read as zeroes and keeps its space allocated; the file grows to hold it. `Unsupported`
    /// where the file system can't.
    pub async fn zero_range(&self, offset: u64, len: u64) -> Result<()> {
        self.make_zero(Space::Zero, offset, len, "could not zero a range").await
    }

    /// Makes a range in bytes behind a protocol read as zeroes. `Unsupported` where the other side would write them, and for
    /// other files.
    pub async fn zero_fast(&self, offset: u64, len: u64, may_unmap: bool) -> Result<()> {
        self.check_change(offset, len, true)?;
        let start_ns = self.0.counters.start_ns();
        let result = match &self.0.medium {
            Medium::Remote(file) => file.zero_fast(offset, len, may_unmap).await,
            _ => Err(Errno::ENOTSUP),
        };
        self.0.counters.count(FileOp::Zero, offset, len, start_ns, result.is_ok());
        result.map_err(|errno| self.error(errno, "could not zero a range", offset))
    }

    /// A change of space is about whole blocks of this many bytes.
    pub(crate) fn space_block_bytes(&self) -> u64 {
        self.0.medium.space_block_bytes()
    }

    /// The whole blocks within a range, as the medium changes its space: their start and their end, which may lie before it.
    fn whole_blocks(&self, offset: u64, len: u64) -> (u64, u64) {
        let (block, end) = (self.space_block_bytes(), offset + len);
        (offset.checked_next_multiple_of(block).unwrap_or(end), end - end % block)
    }

    /// Has the medium make zeroes of the whole blocks of a range. The parts of others are written.
    async fn make_zero(&self, space: Space, offset: u64, len: u64, doing: &str) -> Result<()> {
        self.check_change(offset, len, space != Space::Punch)?;
        let ((start, stop), end) = (self.whole_blocks(offset, len), offset + len);
        if (start, stop) == (offset, end) {
            return self.change_space(space, offset, len, doing).await;
        }
        if start < stop {
            // Where the medium can't, nothing is written either.
            self.change_space(space, start, stop - start, doing).await?;
        }
        let edges = if start < stop { [(offset, start), (stop, end)] } else { [(offset, end), (end, end)] };
        for (from, to) in edges {
            if from < to {
                self.write_at(IoBuf::try_zeroed(usize::try_from(to - from).unwrap_or(usize::MAX))?, from).await.0?;
            }
        }
        Ok(())
    }
}
