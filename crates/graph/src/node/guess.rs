// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The guard of a raw image whose format was guessed. Its guest must not be able to write a header or a footer that changes the
//! next guess. The image would then name files of the host as its backing file.
//!
//! Requests that touch the ends that a guess looks at take turns, so that no other one comes between the check and the
//! change.

use super::Node;
use super::driver::whole_sectors;
use cowshed_layout::probe::{FormatName, PROBE_BYTES, PROBE_TAIL_BYTES, probe_with_tail};
use cowshed_storage::IoBuf;
use cowshed_types::{Errno, Error, ErrorKind, Result, slip};
use futures_util::lock::MutexGuard;

/// The turn of a request, until dropped.
pub(super) type GuessGuard<'a> = MutexGuard<'a, ()>;

impl Node {
    /// The first and the last bytes, as far as a guess of the format looks at them.
    pub(crate) async fn read_ends(&self) -> Result<[IoBuf; 2]> {
        self.read_ends_at(self.size()).await
    }

    /// As [`Node::read_ends`], of the disk as it is when its size is `size` (bytes).
    async fn read_ends_at(&self, size: u64) -> Result<[IoBuf; 2]> {
        let read = async |start: u64, end: u64| {
            let (result, mut bytes) = self.read_padded(start, IoBuf::zeroed((end - start) as usize)).await;
            // Bytes that a resize cuts off come back as zeroes.
            let kept = size.saturating_sub(start).min(bytes.len() as u64) as usize;
            bytes[kept..].fill(0);
            result.map(|()| bytes)
        };
        let end = whole_sectors(size);
        let first = read(0, end.min(PROBE_BYTES as u64)).await?;
        Ok([first, read(size.saturating_sub(PROBE_TAIL_BYTES as u64), end).await?])
    }

    /// True where a change may touch the ends that a guess of the format looks at.
    fn is_at_an_end(&self, offset: u64, len: u64) -> bool {
        offset < PROBE_BYTES as u64 || offset + len > self.size().saturating_sub(PROBE_TAIL_BYTES as u64)
    }

    /// The turn for a change of a range, checked against the ends as the change leaves them. `None` away from the ends.
    /// `bytes`: the range's new data, zeroes where there are none.
    pub(super) async fn turn_at_ends(
        &self,
        offset: u64,
        len: u64,
        bytes: Option<&[u8]>,
    ) -> Result<Option<GuessGuard<'_>>> {
        if !self.is_at_an_end(offset, len) {
            return Ok(None);
        }
        let turn = if slip!("guessed_raw_without_turns") { None } else { Some(self.ends.lock().await) };
        let [mut first, mut last] = self.read_ends().await?;
        overlay(&mut first, 0, offset, len, bytes);
        let last_start = self.size() - last.len() as u64;
        overlay(&mut last, last_start, offset, len, bytes);
        self.check_still_raw([&first, &last], |format| format!("writing the mark of format {format} to"))?;
        Ok(turn)
    }

    /// The turn for another size: a mark in the middle of the disk may be at its new end.
    pub(super) async fn turn_to_resize(&self, size: u64) -> Result<GuessGuard<'_>> {
        let turn = self.ends.lock().await;
        let [first, last] = self.read_ends_at(size).await?;
        self.check_still_raw([&first, &last], |format| {
            format!("the new size makes the mark of format {format} an end of")
        })?;
        Ok(turn)
    }

    fn check_still_raw(&self, [first, last]: [&[u8]; 2], change: impl Fn(&str) -> String) -> Result<()> {
        match probe_with_tail(first, last) {
            FormatName::Raw => Ok(()),
            format => Err(Error::new(
                ErrorKind::PermissionDenied,
                format!(
                    "{} an image whose format was not given but guessed to be raw; name the format 'raw' to allow it",
                    change(format.as_str())
                ),
            )
            .with_errno(Errno::EPERM)
            .file(self.filename())),
        }
    }
}

/// Copies `bytes` (zeroes where there are none), at `offset` and `len` bytes long, into `piece`, at `start`, where the
/// two overlap.
fn overlay(piece: &mut [u8], start: u64, offset: u64, len: u64, bytes: Option<&[u8]>) {
    let from = start.max(offset);
    let end = (start + piece.len() as u64).min(offset + len);
    if from < end {
        let target = &mut piece[(from - start) as usize..(end - start) as usize];
        match bytes {
            Some(bytes) => target.copy_from_slice(&bytes[(from - offset) as usize..(end - offset) as usize]),
            None => target.fill(0),
        }
    }
}
