// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Numbers in byte slices, read without panics: big-endian, and little-endian for most formats of other programs.

/// The `N` bytes at `offset`, or `None` where the slice is too short.
#[inline]
pub fn array_at<const N: usize>(bytes: &[u8], offset: usize) -> Option<[u8; N]> {
    bytes.get(offset..offset.checked_add(N)?)?.try_into().ok()
}

/// Big-endian `u16` at `offset`.
#[inline]
pub fn be16_at(bytes: &[u8], offset: usize) -> Option<u16> {
    array_at(bytes, offset).map(u16::from_be_bytes)
}

/// Big-endian `u32` at `offset`.
#[inline]
pub fn be32_at(bytes: &[u8], offset: usize) -> Option<u32> {
    array_at(bytes, offset).map(u32::from_be_bytes)
}

/// Big-endian `u64` at `offset`.
#[inline]
pub fn be64_at(bytes: &[u8], offset: usize) -> Option<u64> {
    array_at(bytes, offset).map(u64::from_be_bytes)
}

/// Little-endian `u16` at `offset`.
#[inline]
pub fn le16_at(bytes: &[u8], offset: usize) -> Option<u16> {
    array_at(bytes, offset).map(u16::from_le_bytes)
}

/// Little-endian `u32` at `offset`.
#[inline]
pub fn le32_at(bytes: &[u8], offset: usize) -> Option<u32> {
    array_at(bytes, offset).map(u32::from_le_bytes)
}

/// Little-endian `u64` at `offset`.
#[inline]
pub fn le64_at(bytes: &[u8], offset: usize) -> Option<u64> {
    array_at(bytes, offset).map(u64::from_le_bytes)
}

/// The 8-byte entries of an L1 table, L2 table, refcount table or bitmap table; an incomplete last entry is left out.
pub fn be64_entries(table: &[u8]) -> impl ExactSizeIterator<Item = u64> + '_ {
    table.as_chunks::<8>().0.iter().map(|entry| u64::from_be_bytes(*entry))
}

/// Entries as the bytes of a table; see [`be64_entries`].
pub fn be64_table(entries: &[u64]) -> Vec<u8> {
    entries.iter().flat_map(|entry| entry.to_be_bytes()).collect()
}
