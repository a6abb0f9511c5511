// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The contents of a simulated file: sparse, cheap to copy, with a hash that follows every change.

use cowshed_storage::DataRange;
use cowshed_storage::rng::mix;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Size of a page of [`PageMap`] in bytes, the unit of sharing and of holes.
pub const PAGE_BYTES: u64 = 4096;

#[derive(Clone)]
struct Page {
    bytes: [u8; PAGE_BYTES as usize],
    /// Of `bytes`; 0 when they are all zero, so that a hole and a page of zeroes hash alike.
    hash: u128,
}

/// Bytes of a file and its length. A copy shares all pages until one of the two changes them.
///
/// Invariant: bytes of the last page behind the length are zero, and no page lies wholly behind it.
#[derive(Clone, Default)]
pub struct PageMap {
    pages: BTreeMap<u64, Arc<Page>>,
    len_bytes: u64,
    hash: u128,
}

impl PageMap {
    /// A file of `len_bytes` that is one hole.
    pub fn with_len(len_bytes: u64) -> Self {
        PageMap { len_bytes, ..PageMap::default() }
    }

    /// A file with the contents `bytes`; pages of zeroes become holes.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let mut map = PageMap::with_len(bytes.len() as u64);
        for (index, chunk) in bytes.chunks(PAGE_BYTES as usize).enumerate() {
            if chunk.iter().any(|&byte| byte != 0) {
                map.write(index as u64 * PAGE_BYTES, chunk);
            }
        }
        map
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.len_bytes
    }

    /// True for length 0.
    pub fn is_empty(&self) -> bool {
        self.len_bytes == 0
    }

    /// All bytes.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len_bytes as usize];
        for (index, page) in &self.pages {
            let start = (index * PAGE_BYTES) as usize;
            let end = (start + PAGE_BYTES as usize).min(bytes.len());
            bytes[start..end].copy_from_slice(&page.bytes[..end - start]);
        }
        bytes
    }

    /// A hash of length and bytes. Holes and zeroes are the same.
    pub fn hash(&self) -> u128 {
        self.hash.wrapping_add(spread(self.len_bytes, 0x6c65_6e67))
    }

    /// Space taken, in bytes: the pages that are not holes.
    pub fn allocated_bytes(&self) -> u64 {
        self.pages.len() as u64 * PAGE_BYTES
    }

    /// Fills `into` from `offset`; holes and bytes behind the end read as zeroes.
    pub fn read(&self, offset: u64, into: &mut [u8]) {
        for (index, within, part) in pieces_mut(offset, into) {
            match self.pages.get(&index) {
                Some(page) => part.copy_from_slice(&page.bytes[within..within + part.len()]),
                None => part.fill(0),
            }
        }
    }

    /// Writes `bytes` at `offset`; grows the file, unless there are none.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        let mut done = 0;
        while done < bytes.len() {
            let (index, within) = locate(offset + done as u64);
            let count = (PAGE_BYTES as usize - within).min(bytes.len() - done);
            self.update(index, |page| page[within..within + count].copy_from_slice(&bytes[done..done + count]));
            done += count;
        }
        self.len_bytes = self.len_bytes.max(offset + bytes.len() as u64);
    }

    /// Makes `offset .. offset + len` read as zeroes; does not change the length. Whole pages become holes, or with
    /// `keep_space` pages of zeroes.
    pub fn zero(&mut self, offset: u64, len: u64, keep_space: bool) {
        let end = offset.saturating_add(len).min(self.len_bytes.next_multiple_of(PAGE_BYTES));
        let mut at = offset;
        if !keep_space {
            // Only pages that exist need work: a range of terabytes costs no more than its contents.
            let first = offset.div_ceil(PAGE_BYTES);
            let last = end / PAGE_BYTES;
            if first < last {
                let whole: Vec<u64> = self.pages.range(first..last).map(|(index, _)| *index).collect();
                whole.into_iter().for_each(|index| self.remove(index));
                self.zero_pages(offset, first * PAGE_BYTES, false);
                at = last * PAGE_BYTES;
            }
        }
        self.zero_pages(at, end, keep_space);
    }

    fn zero_pages(&mut self, start: u64, end: u64, create: bool) {
        let mut at = start;
        while at < end {
            let (index, within) = locate(at);
            let count = (PAGE_BYTES - within as u64).min(end - at) as usize;
            if create || self.pages.contains_key(&index) {
                self.update(index, |page| page[within..within + count].fill(0));
            }
            at += count as u64;
        }
    }

    /// Takes space for `offset .. offset + len` without changing its bytes; grows the file with `grow`, else pages
    /// wholly behind the end are left out.
    pub fn allocate(&mut self, offset: u64, len: u64, grow: bool) {
        let end = offset.saturating_add(len);
        if grow {
            self.len_bytes = self.len_bytes.max(end);
        }
        let end = end.min(self.len_bytes);
        for index in offset / PAGE_BYTES..end.div_ceil(PAGE_BYTES) {
            self.pages.entry(index).or_insert_with(zero_page);
        }
    }

    /// Sets the length; bytes cut off are gone, an added range is a hole.
    pub fn set_len(&mut self, len_bytes: u64) {
        if len_bytes < self.len_bytes {
            let behind: Vec<u64> =
                self.pages.range(len_bytes.div_ceil(PAGE_BYTES)..).map(|(index, _)| *index).collect();
            behind.into_iter().for_each(|index| self.remove(index));
            self.zero_pages(len_bytes, len_bytes.next_multiple_of(PAGE_BYTES), false);
        }
        self.len_bytes = len_bytes;
    }

    /// The first run of pages that are no holes at or behind `offset`, clipped to `offset` and the end.
    pub fn next_data(&self, offset: u64) -> Option<DataRange> {
        if offset >= self.len_bytes {
            return None;
        }
        let mut pages = self.pages.range(offset / PAGE_BYTES..).map(|(index, _)| *index);
        let first = pages.next()?;
        let mut end = first + 1;
        while pages.next() == Some(end) {
            end += 1;
        }
        Some(DataRange { start: (first * PAGE_BYTES).max(offset), end: (end * PAGE_BYTES).min(self.len_bytes) })
    }

    /// Number of pages that a write of `offset .. offset + len` would have to take from the free space.
    pub fn missing_pages(&self, offset: u64, len: u64) -> u64 {
        let pages = offset / PAGE_BYTES..(offset + len).div_ceil(PAGE_BYTES);
        let total = pages.end - pages.start;
        total - self.pages.range(pages).count() as u64
    }

    fn update(&mut self, index: u64, change: impl FnOnce(&mut [u8; PAGE_BYTES as usize])) {
        let entry = self.pages.entry(index).or_insert_with(zero_page);
        let old = entry.hash;
        let page = Arc::make_mut(entry);
        change(&mut page.bytes);
        page.hash = hash_page(&page.bytes);
        self.hash = self.hash.wrapping_sub(place(index, old)).wrapping_add(place(index, page.hash));
    }

    fn remove(&mut self, index: u64) {
        if let Some(page) = self.pages.remove(&index) {
            self.hash = self.hash.wrapping_sub(place(index, page.hash));
        }
    }
}

impl std::fmt::Debug for PageMap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PageMap({} bytes, {} pages, hash {:016x})", self.len_bytes, self.pages.len(), self.hash() as u64)
    }
}

fn zero_page() -> Arc<Page> {
    Arc::new(Page { bytes: [0; PAGE_BYTES as usize], hash: 0 })
}

fn locate(offset: u64) -> (u64, usize) {
    (offset / PAGE_BYTES, (offset % PAGE_BYTES) as usize)
}

/// Cuts `bytes`, which starts at `offset`, at page ends: (page, offset within it, part).
fn pieces_mut(offset: u64, mut bytes: &mut [u8]) -> impl Iterator<Item = (u64, usize, &mut [u8])> {
    let mut at = offset;
    std::iter::from_fn(move || {
        if bytes.is_empty() {
            return None;
        }
        let (index, within) = locate(at);
        let count = (PAGE_BYTES as usize - within).min(bytes.len());
        let (part, rest) = std::mem::take(&mut bytes).split_at_mut(count);
        bytes = rest;
        at += count as u64;
        Some((index, within, part))
    })
}

fn hash_page(bytes: &[u8; PAGE_BYTES as usize]) -> u128 {
    // Two lanes of multiply-and-rotate: fast, and equal hashes mean equal pages in practice.
    let (mut a, mut b) = (0u64, 0u64);
    let (words, _) = bytes.as_chunks::<8>();
    for pair in words.chunks_exact(2) {
        a = (a.rotate_left(29) ^ u64::from_le_bytes(pair[0])).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        b = (b.rotate_left(31) ^ u64::from_le_bytes(pair[1])).wrapping_mul(0xc2b2_ae3d_27d4_eb4f);
    }
    // From (0, 0) zero words lead to (0, 0) only, and both steps are bijections: no other page of one nonzero word
    // hashes to 0.
    (u128::from(mix(a.wrapping_add(b.rotate_left(17)))) << 64) | u128::from(mix(a ^ b.rotate_left(41)))
}

/// The part of the sum over the file that page `index` with content hash `hash` adds.
fn place(index: u64, hash: u128) -> u128 {
    if hash == 0 {
        return 0;
    }
    let salt = spread(index, 0x7061_6765) | 1;
    (hash ^ (hash >> 61)).wrapping_mul(salt)
}

fn spread(value: u64, salt: u64) -> u128 {
    (u128::from(mix(value ^ salt)) << 64) | u128::from(mix(value.wrapping_add(salt << 32)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use cowshed_storage::rng::Rng;

    #[test]
    fn follows_a_plain_vector() {
        let mut rng = Rng::new(3);
        let mut plain: Vec<u8> = Vec::new();
        let mut map = PageMap::default();
        for step in 0..2000 {
            let offset = rng.below(40_000);
            let len = 1 + rng.below(9000);
            match rng.below(6) {
                0 => {
                    let len = rng.below(40_000);
                    plain.resize(len as usize, 0);
                    map.set_len(len);
                }
                1 | 2 => {
                    let end = ((offset + len) as usize).min(plain.len());
                    plain[(offset as usize).min(end)..end].fill(0);
                    map.zero(offset, len, step % 2 == 0);
                }
                _ => {
                    let mut bytes = vec![0; len as usize];
                    rng.fill(&mut bytes);
                    let end = (offset + len) as usize;
                    plain.resize(plain.len().max(end), 0);
                    plain[offset as usize..end].copy_from_slice(&bytes);
                    map.write(offset, &bytes);
                }
            }
            assert_eq!(map.len(), plain.len() as u64);
            if step % 50 == 0 {
                assert_eq!(map.to_vec(), plain);
                assert_eq!(map.hash(), PageMap::from_bytes(&plain).hash(), "the hash follows the bytes");
                let mut part = vec![1; 5000];
                map.read(offset, &mut part);
                let expected: Vec<u8> =
                    (offset..offset + 5000).map(|at| plain.get(at as usize).copied().unwrap_or(0)).collect();
                assert_eq!(part, expected);
            }
        }
    }

    #[test]
    fn copies_are_independent_and_holes_are_seen() {
        let mut map = PageMap::from_bytes(&[7; 3 * PAGE_BYTES as usize]);
        let copy = map.clone();
        map.zero(PAGE_BYTES, PAGE_BYTES, false);
        assert_ne!(map.hash(), copy.hash());
        assert_eq!(map.next_data(0), Some(DataRange { start: 0, end: PAGE_BYTES }));
        assert_eq!(map.next_data(5000), Some(DataRange { start: 2 * PAGE_BYTES, end: 3 * PAGE_BYTES }));
        assert_eq!(map.next_data(3 * PAGE_BYTES), None);
        assert_eq!(copy.next_data(10), Some(DataRange { start: 10, end: 3 * PAGE_BYTES }));
        map.write(PAGE_BYTES, &[7; PAGE_BYTES as usize]);
        assert_eq!(map.hash(), copy.hash());
        assert_eq!((map.missing_pages(0, 4 * PAGE_BYTES), map.allocated_bytes()), (1, 3 * PAGE_BYTES));
    }
}
