// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Sends bits, the first one in the lowest bit of the first byte (RFC 1951, section 3.1.1).

/// Bits in front of a buffer of fixed size. The caller has asked for [`BitWriter::has_room`] before. Bits without room are
/// dropped, and the position stays behind the end.
pub(super) struct BitWriter<'a> {
    out: &'a mut [u8],
    /// Bytes sent.
    at: usize,
    /// Bits not sent yet, the first one lowest.
    pending: u64,
    count: u32,
}

impl<'a> BitWriter<'a> {
    pub(super) fn new(out: &'a mut [u8]) -> Self {
        BitWriter { out, at: 0, pending: 0, count: 0 }
    }

    /// True when `bits` more bits fit.
    pub(super) fn has_room(&self, bits: u64) -> bool {
        self.at as u64 * 8 + u64::from(self.count) + bits <= self.out.len() as u64 * 8
    }

    /// Sends the lowest `count` bits of `value`, the others being 0. At most 48 at once.
    #[inline]
    pub(super) fn push(&mut self, value: u64, count: u32) {
        self.pending |= value << self.count;
        self.count += count;
        if self.count >= 16 {
            self.flush_bytes();
        }
    }

    #[inline]
    fn flush_bytes(&mut self) {
        let bytes = self.count / 8;
        match self.out.get_mut(self.at..).and_then(|rest| rest.first_chunk_mut::<8>()) {
            Some(rest) => *rest = self.pending.to_le_bytes(),
            None => self.flush_near_end(bytes as usize),
        }
        self.at += bytes as usize;
        self.pending = self.pending.checked_shr(bytes * 8).unwrap_or(0);
        self.count %= 8;
    }

    #[cold]
    fn flush_near_end(&mut self, bytes: usize) {
        let rest = self.out.get_mut(self.at..).unwrap_or_default();
        rest.iter_mut().zip(self.pending.to_le_bytes()).take(bytes).for_each(|(place, byte)| *place = byte);
    }

    /// Fills the last byte with 0 bits.
    pub(super) fn align(&mut self) {
        self.count = self.count.next_multiple_of(8);
        self.flush_bytes();
    }

    /// Sends whole bytes. Only after [`BitWriter::align`].
    pub(super) fn push_bytes(&mut self, bytes: &[u8]) {
        if let Some(place) = self.out.get_mut(self.at..self.at + bytes.len()) {
            place.copy_from_slice(bytes);
        }
        self.at += bytes.len();
    }

    /// Bits in the last, unfinished byte.
    pub(super) fn unaligned(&self) -> u64 {
        u64::from(self.count % 8)
    }

    /// Ends and returns the number of bytes, or `None` when they didn't fit.
    pub(super) fn finish(mut self) -> Option<usize> {
        self.align();
        (self.at <= self.out.len()).then_some(self.at)
    }
}
