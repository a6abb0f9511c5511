// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Finds repetitions within the window: hash chains over 4-byte words, and the last place of each 3-byte word.

/// Largest distance of a match, in bytes.
pub(super) const WINDOW: usize = 4096;
/// Shortest match of the format.
pub(super) const MIN_MATCH: usize = 3;
/// Longest match of the format.
pub(super) const MAX_MATCH: usize = 258;
/// Zero bytes that must follow the data, so that words can be read without looking at the end.
pub(super) const PADDING: usize = MAX_MATCH + 8;

/// Matches of three bytes further back than this cost more than three literals.
const SHORT_MATCH_WINDOW: u16 = 1024;
const HASH3_BITS: u32 = 12;
const HASH4_BITS: u32 = 13;

/// A repetition: `len` bytes that are also `dist` bytes earlier. `len == 0`: none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Match {
    pub len: usize,
    pub dist: usize,
}

/// The effort of a search.
#[derive(Clone, Copy, Debug)]
pub(super) struct Effort {
    /// The most candidates that are compared.
    pub depth: u32,
    /// A match of this many bytes is good enough.
    pub nice: usize,
}

/// Positions are kept modulo 2^16. A wrong one (from 2^16 bytes earlier, or never set) does no harm: its target is
/// compared with the data.
pub(super) struct Finder {
    last3: Box<[u16; 1 << HASH3_BITS]>,
    last4: Box<[u16; 1 << HASH4_BITS]>,
    /// The place before, of the same 4-byte hash.
    previous: Box<[u16; WINDOW]>,
}

impl Finder {
    pub(super) fn new() -> Self {
        Finder {
            last3: Box::new([0; 1 << HASH3_BITS]),
            last4: Box::new([0; 1 << HASH4_BITS]),
            previous: Box::new([0; WINDOW]),
        }
    }

    /// Forgets everything, so that the output depends on the input alone.
    pub(super) fn reset(&mut self) {
        self.last3.fill(0);
        self.last4.fill(0);
        self.previous.fill(0);
    }

    /// Remembers `pos` within a match: for matches of four bytes and more only.
    #[inline(always)]
    pub(super) fn skip(&mut self, data: &[u8], pos: usize) {
        let word = word_at(data, pos);
        let slot4 = &mut self.last4[(word.wrapping_mul(0x9e37_79b1) >> (32 - HASH4_BITS)) as usize];
        self.previous[pos % WINDOW] = *slot4;
        *slot4 = pos as u16;
    }

    /// Remembers `pos`. `data` has [`PADDING`] bytes behind every position asked for.
    #[inline]
    pub(super) fn insert(&mut self, data: &[u8], pos: usize) -> (u16, u16) {
        let word = word_at(data, pos);
        let slot3 = &mut self.last3[((word << 8).wrapping_mul(0x9e37_79b1) >> (32 - HASH3_BITS)) as usize];
        let slot4 = &mut self.last4[(word.wrapping_mul(0x9e37_79b1) >> (32 - HASH4_BITS)) as usize];
        let found = (*slot3, *slot4);
        self.previous[pos % WINDOW] = found.1;
        *slot3 = pos as u16;
        *slot4 = pos as u16;
        found
    }

    /// Remembers `pos` and finds the best match there that is longer than `beat` (at least 2) and not longer than
    /// `max_len`.
    #[inline]
    pub(super) fn find(&mut self, data: &[u8], pos: usize, beat: usize, max_len: usize, effort: Effort) -> Match {
        let (mut candidate3, mut candidate) = self.insert(data, pos);
        let mut best = Match { len: beat, dist: 0 };
        if max_len <= beat.max(MIN_MATCH) {
            return Match::default();
        }
        let here = word_at(data, pos);
        let limit = pos.min(WINDOW) as u16;
        if beat < MIN_MATCH {
            candidate3 = (pos as u16).wrapping_sub(candidate3);
            if candidate3 != 0
                && candidate3 <= limit.min(SHORT_MATCH_WINDOW)
                && (word_at(data, pos - usize::from(candidate3)) ^ here) << 8 == 0
            {
                best = Match { len: MIN_MATCH, dist: candidate3.into() };
            }
        }
        let mut nearer = 0;
        for _ in 0..effort.depth {
            let dist = (pos as u16).wrapping_sub(candidate);
            if dist <= nearer || dist > limit {
                break;
            }
            nearer = dist;
            let there = pos - usize::from(dist);
            // The last four bytes of a longer match differ most often.
            let tail = best.len.saturating_sub(MIN_MATCH);
            if word_at(data, there + tail) == word_at(data, pos + tail) && word_at(data, there) == here {
                let len = match_len(data, there, pos, max_len);
                if len > best.len {
                    best = Match { len, dist: dist.into() };
                    if len >= effort.nice || len == max_len {
                        break;
                    }
                }
            }
            candidate = self.previous[usize::from(candidate) % WINDOW];
        }
        if best.dist == 0 { Match::default() } else { best }
    }
}

#[inline]
fn word_at(data: &[u8], pos: usize) -> u32 {
    match data[pos..].first_chunk::<4>() {
        Some(bytes) => u32::from_le_bytes(*bytes),
        None => 0,
    }
}

/// Length of the match, at most `max_len`. The first four bytes are known to be equal.
#[inline]
fn match_len(data: &[u8], there: usize, here: usize, max_len: usize) -> usize {
    let (old, new) = (&data[there..][..max_len], &data[here..][..max_len]);
    let (old_words, old_rest) = old.as_chunks::<8>();
    let (new_words, new_rest) = new.as_chunks::<8>();
    let mut len = 0;
    for (old, new) in old_words.iter().zip(new_words) {
        let differ = u64::from_le_bytes(*old) ^ u64::from_le_bytes(*new);
        if differ != 0 {
            return len + differ.trailing_zeros() as usize / 8;
        }
        len += 8;
    }
    len + old_rest.iter().zip(new_rest).take_while(|(old, new)| old == new).count()
}
