// SPDX-License-Identifier: Apache-2.0 OR MIT
//! An encoder for deflate (RFC 1951) with a window of 4 KiB and an input of one cluster.
//!
//! It is here because of that window. Encoders with a choice of window give up speed or size. They look for matches of
//! four bytes and more, and in a small window the three-byte ones count. The fast encoders that find everything have a
//! window of 32 KiB. Knowing the whole cluster makes it simple: no streaming, no window to slide.

mod bits;
mod block;
mod huffman;
mod matches;

use block::{Blocks, DeflateToken};
use matches::{Effort, Finder, MAX_MATCH, MIN_MATCH, Match, PADDING};

/// The choice of matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Parsing {
    /// The first one found is taken.
    Greedy,
    /// One byte is sent plain where the next position has a better match.
    Lazy,
    /// As `Lazy`, looking two positions ahead.
    Lazier,
}

/// Settings of a level.
#[derive(Clone, Copy, Debug)]
struct Level {
    parsing: Parsing,
    effort: Effort,
}

const fn level(parsing: Parsing, depth: u32, nice: usize) -> Level {
    Level { parsing, effort: Effort { depth, nice } }
}

/// Levels 1 (fast) to 9 (small).
const LEVELS: [Level; 9] = [
    level(Parsing::Greedy, 2, 16),
    level(Parsing::Greedy, 6, 24),
    level(Parsing::Greedy, 12, 32),
    level(Parsing::Lazy, 8, 32),
    level(Parsing::Lazy, 16, 64),
    level(Parsing::Lazy, 32, 96),
    level(Parsing::Lazier, 48, 128),
    level(Parsing::Lazier, 128, 192),
    level(Parsing::Lazier, 1024, MAX_MATCH),
];

/// Working memory of the encoder, about 200 KiB for clusters of 64 KiB.
pub(super) struct Encoder {
    finder: Finder,
    blocks: Blocks,
    /// The cluster, with padding behind it.
    data: Vec<u8>,
}

impl Encoder {
    pub(super) fn new() -> Self {
        Encoder { finder: Finder::new(), blocks: Blocks::new(), data: Vec::new() }
    }

    /// Compresses `cluster` at a level of 1–9 into `out`; the length, or `None` when it doesn't fit.
    pub(super) fn compress(&mut self, level: u8, cluster: &[u8], out: &mut [u8]) -> Option<usize> {
        let level = LEVELS[usize::from(level.clamp(1, 9)) - 1];
        self.data.clear();
        self.data.extend_from_slice(cluster);
        self.data.resize(cluster.len() + PADDING, 0);
        self.finder.reset();
        self.blocks.reset();
        match level.parsing {
            Parsing::Greedy => self.parse_greedy(cluster.len(), level.effort),
            Parsing::Lazy => self.parse_lazy(cluster.len(), level.effort, 1),
            Parsing::Lazier => self.parse_lazy(cluster.len(), level.effort, 2),
        }
        self.blocks.send(cluster, out)
    }

    fn parse_greedy(&mut self, end: usize, effort: Effort) {
        let mut pos = 0;
        while pos < end {
            let found = self.find(pos, MIN_MATCH - 1, end, effort);
            pos += self.take(pos, found, 1);
        }
    }

    /// `ahead` positions are tried for something better before a match is taken.
    fn parse_lazy(&mut self, end: usize, effort: Effort, ahead: usize) {
        // A good match is searched for a better one less hard.
        let again = Effort { depth: effort.depth / 2, ..effort };
        let mut pos = 0;
        while pos < end {
            let mut found = self.find(pos, MIN_MATCH - 1, end, effort);
            // Positions from `pos` on that the finder has seen.
            let mut seen = 1;
            while found.len != 0 && found.len < effort.nice {
                let better = (seen..=ahead).find_map(|step| {
                    seen = step + 1;
                    let next = self.find(pos + step, found.len.max(MIN_MATCH) - 1, end, again);
                    (gain(next, step) > gain(found, 0)).then_some((next, step))
                });
                let Some((next, step)) = better else { break };
                for _ in 0..step {
                    self.blocks.push(DeflateToken::Literal(self.data[pos]));
                    pos += 1;
                    seen -= 1;
                }
                found = next;
            }
            pos += self.take(pos, found, seen);
        }
    }

    fn find(&mut self, pos: usize, beat: usize, end: usize, effort: Effort) -> Match {
        if pos >= end {
            return Match::default();
        }
        self.finder.find(&self.data, pos, beat, (end - pos).min(MAX_MATCH), effort)
    }

    /// Takes a match (or the byte at `pos` where there is none) and returns its length. The finder has seen the first
    /// `seen` positions.
    fn take(&mut self, pos: usize, found: Match, seen: usize) -> usize {
        if found.len == 0 {
            self.blocks.push(DeflateToken::Literal(self.data[pos]));
            return 1;
        }
        self.blocks.push(DeflateToken::Match(found));
        for inner in pos + seen..pos + found.len {
            self.finder.skip(&self.data, inner);
        }
        found.len
    }
}

/// The gain of a match, roughly, in quarters of a byte. Its length counts; a far distance costs bits, and so do the
/// literals before it.
fn gain(found: Match, literals: usize) -> i64 {
    if found.len == 0 {
        return i64::MIN;
    }
    let distance_bits = i64::from(found.dist.ilog2());
    4 * found.len as i64 - distance_bits - 3 * literals as i64
}
