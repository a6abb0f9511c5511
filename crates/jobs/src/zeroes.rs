// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Finding zeroes in data.

use cowshed_image::Node;
use cowshed_storage::IoBuf;
use cowshed_types::without;
use std::ops::Range;

/// Bytes looked at without a branch, so that the compiler uses vector instructions.
const STRIDE_BYTES: usize = 256;
/// Runs that one question about the mapping returns at most.
const STATUS_RUNS: usize = 64;

/// True when all bytes are zero.
pub fn is_zero(bytes: &[u8]) -> bool {
    if without!("wide_zero_search") {
        return bytes.iter().all(|byte| *byte == 0);
    }
    let (strides, tail) = bytes.as_chunks::<STRIDE_BYTES>();
    let zero_stride = |stride: &[u8; STRIDE_BYTES]| {
        let (words, _) = stride.as_chunks::<8>();
        words.iter().fold(0, |sum, word| sum | u64::from_ne_bytes(*word)) == 0
    };
    // Data rarely starts with a zero stride: both ends first, they decide most blocks at once.
    match (strides.first(), strides.last()) {
        (Some(first), Some(last)) if !zero_stride(first) || !zero_stride(last) => return false,
        _ => {}
    }
    tail.iter().all(|byte| *byte == 0) && strides.iter().all(zero_stride)
}

/// A part of a buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ZeroSegment {
    /// Where in the buffer.
    pub range: Range<usize>,
    /// Holds something other than zero, or zeroes too short to count.
    pub data: bool,
}

/// Splits `bytes` into data and zeroes, looking at blocks of `unit` bytes. Runs of zero blocks shorter than
/// `min_zero_bytes` count as data. Segments follow each other without gaps and change kind each time.
pub fn segments(bytes: &[u8], unit: usize, min_zero_bytes: usize) -> Vec<ZeroSegment> {
    let mut found: Vec<ZeroSegment> = Vec::new();
    let mut at = 0;
    for block in bytes.chunks(unit.max(1)) {
        let range = at..at + block.len();
        at = range.end;
        let data = !is_zero(block);
        match found.last_mut() {
            Some(last) if last.data == data => last.range.end = range.end,
            _ => found.push(ZeroSegment { range, data }),
        }
    }
    if min_zero_bytes > unit {
        for segment in &mut found {
            segment.data |= segment.range.len() < min_zero_bytes;
        }
        found.dedup_by(|next, last| {
            let same = next.data == last.data;
            if same {
                last.range.end = next.range.end;
            }
            same
        });
    }
    found
}

/// Data that is read to find out whether it is zero, in bytes: a new raw file has its first block.
const MOST_READ_BYTES: u64 = 128 << 10;

/// True when the node is known to read as zeroes everywhere. Little data is read for that.
pub(crate) async fn reads_as_zeroes(node: &Node) -> bool {
    let (size, mut at, mut unread) = (node.size(), 0, MOST_READ_BYTES);
    while at < size {
        let Ok(runs) = node.block_status_chain(at, size - at, STATUS_RUNS).await else { return false };
        let Some(last) = runs.last() else { return false };
        for run in runs.iter().filter(|run| !run.zero) {
            let Some(left) = unread.checked_sub(run.len) else { return false };
            unread = left;
            let (read, buf) = node.read(run.start, IoBuf::zeroed(run.len as usize)).await;
            if read.is_err() || !is_zero(&buf) {
                return false;
            }
        }
        at = last.start + last.len;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(bytes: &[u8], unit: usize, min_zero_bytes: usize) -> Vec<(Range<usize>, bool)> {
        segments(bytes, unit, min_zero_bytes).into_iter().map(|segment| (segment.range, segment.data)).collect()
    }

    #[test]
    fn one_byte_anywhere_is_seen() {
        for len in [1, 7, 8, 255, 256, 257, 1000, 4096] {
            let mut bytes = vec![0; len];
            assert!(is_zero(&bytes), "{len}");
            for at in [0, len / 2, len - 1] {
                bytes[at] = 0x80;
                assert!(!is_zero(&bytes), "{at} of {len}");
                bytes[at] = 0;
            }
        }
        assert!(is_zero(&[]));
    }

    #[test]
    fn segments_alternate_and_cover_all() {
        let mut bytes = vec![0; 10 * 512];
        bytes[512] = 1;
        bytes[4 * 512 + 5] = 1;
        assert_eq!(
            shape(&bytes, 512, 512),
            [(0..512, false), (512..1024, true), (1024..2048, false), (2048..2560, true), (2560..5120, false)]
        );
        assert_eq!(
            shape(&bytes, 512, 1024),
            [(0..1024, true), (1024..2048, false), (2048..2560, true), (2560..5120, false)]
        );
        assert_eq!(shape(&bytes, 512, 2048), [(0..2560, true), (2560..5120, false)]);
        assert_eq!(shape(&bytes, 512, 4096), [(0..5120, true)]);
        assert_eq!(shape(&[], 512, 512), []);
    }

    #[test]
    fn a_short_tail_is_a_block() {
        let mut bytes = vec![1; 1500];
        bytes[1024..].fill(0);
        assert_eq!(shape(&bytes, 512, 512), [(0..1024, true), (1024..1500, false)]);
    }
}
