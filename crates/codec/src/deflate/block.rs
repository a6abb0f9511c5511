// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Blocks: where one ends and the next begins, and how each is sent (RFC 1951, section 3.2).

use super::bits::BitWriter;
use super::huffman::{Code, MAX_SYMBOLS};
use super::matches::{MAX_MATCH, MIN_MATCH, Match};
use std::ops::Range;
use std::sync::LazyLock;

/// Alphabet of literals, lengths and the end of the block.
const LITERALS: usize = 286;
/// Alphabet of distances.
const DISTANCES: usize = 30;
/// Alphabet of code lengths.
const LENGTHS: usize = 19;
const END_OF_BLOCK: usize = 256;
/// Longest stored block.
const STORED_BYTES: usize = 65535;

/// Tokens after which a new block is considered.
const CHUNK_TOKENS: usize = 1024;
/// A new block costs about this many bits: its trees, and codes that fit fewer data.
const BLOCK_BITS: u64 = 640;

/// A literal byte or a match.
pub(super) enum DeflateToken {
    Literal(u8),
    Match(Match),
}

/// The number of occurrences of each symbol.
#[derive(Clone)]
struct Histogram {
    literals: [u32; LITERALS],
    distances: [u32; DISTANCES],
}

impl Histogram {
    const EMPTY: Self = Histogram { literals: [0; LITERALS], distances: [0; DISTANCES] };

    fn add(&mut self, other: &Self) {
        self.literals.iter_mut().zip(&other.literals).for_each(|(count, more)| *count += more);
        self.distances.iter_mut().zip(&other.distances).for_each(|(count, more)| *count += more);
    }

    /// Bits that ideal codes for these frequencies would need.
    fn entropy_bits(&self) -> u64 {
        entropy_bits(self.literals.iter().copied()) + entropy_bits(self.distances.iter().copied())
    }

    /// As [`Histogram::entropy_bits`] for two histograms as one.
    fn joint_entropy_bits(&self, other: &Self) -> u64 {
        let sum = |(one, two): (&u32, &u32)| one + two;
        entropy_bits(self.literals.iter().zip(&other.literals).map(sum))
            + entropy_bits(self.distances.iter().zip(&other.distances).map(sum))
    }

    /// The bits that follow length and distance codes.
    fn extra_bits(&self) -> u64 {
        let lengths = self.literals[257..].iter().enumerate();
        let lengths = lengths.map(|(code, count)| u64::from(*count) * u64::from(length_extra(code)));
        let distances = self.distances.iter().enumerate();
        let distances = distances.map(|(code, count)| u64::from(*count) * u64::from(distance_extra(code)));
        lengths.sum::<u64>() + distances.sum::<u64>()
    }
}

/// The sum of `count * log2(total / count)`, in whole numbers so that it is the same everywhere.
fn entropy_bits(counts: impl Iterator<Item = u32>) -> u64 {
    let (mut total, mut sum) = (0u64, 0u64);
    for count in counts.filter(|count| *count != 0) {
        total += u64::from(count);
        sum += u64::from(count) * log2_fixed(count);
    }
    if total == 0 {
        return 0;
    }
    (total * log2_fixed(total as u32)).saturating_sub(sum) >> 12
}

/// log2 of `number` (not 0) times 4096, to about 0.01.
fn log2_fixed(number: u32) -> u64 {
    let whole = number.ilog2();
    let fraction = (u64::from(number) << 12 >> whole) - 4096;
    // log2(1 + x) is close to x + 0.344 x (1 - x).
    (u64::from(whole) << 12) + fraction + ((fraction * (4096 - fraction) * 1409) >> 24)
}

/// One block of the output: tokens, and the bytes that they stand for.
struct Block {
    tokens: Range<usize>,
    bytes: Range<usize>,
    histogram: Histogram,
}

/// Collects tokens and divides them into blocks.
pub(super) struct Blocks {
    /// Literals as they are; matches as length and, in the upper half, distance.
    tokens: Vec<u32>,
    done: Vec<Block>,
    /// The open block without the chunk.
    block: Histogram,
    block_entropy_bits: u64,
    chunk: Histogram,
    /// First token and byte of the open block and of the chunk.
    block_start: (usize, usize),
    chunk_start: (usize, usize),
    /// Bytes that all tokens stand for.
    bytes: usize,
}

/// Set in tokens that are matches (their length is below it).
const MATCH_FLAG: u32 = 1 << 15;

impl Blocks {
    pub(super) fn new() -> Self {
        Blocks {
            tokens: Vec::new(),
            done: Vec::new(),
            block: Histogram::EMPTY,
            block_entropy_bits: 0,
            chunk: Histogram::EMPTY,
            block_start: (0, 0),
            chunk_start: (0, 0),
            bytes: 0,
        }
    }

    pub(super) fn reset(&mut self) {
        let (mut tokens, mut done) = (std::mem::take(&mut self.tokens), std::mem::take(&mut self.done));
        tokens.clear();
        done.clear();
        *self = Blocks { tokens, done, ..Blocks::new() };
    }

    #[inline(always)]
    pub(super) fn push(&mut self, token: DeflateToken) {
        match token {
            DeflateToken::Literal(byte) => {
                self.chunk.literals[usize::from(byte)] += 1;
                self.tokens.push(byte.into());
                self.bytes += 1;
            }
            DeflateToken::Match(Match { len, dist }) => {
                self.chunk.literals[257 + usize::from(LENGTH_CODES[len])] += 1;
                self.chunk.distances[distance_code(dist)] += 1;
                self.tokens.push((dist as u32) << 16 | MATCH_FLAG | len as u32);
                self.bytes += len;
            }
        }
        if self.tokens.len() - self.chunk_start.0 == CHUNK_TOKENS {
            self.end_chunk();
        }
    }

    /// The chunk joins the open block, or starts a new one where codes of their own save more than they cost.
    #[inline(never)]
    fn end_chunk(&mut self) {
        let apart = self.block_entropy_bits + self.chunk.entropy_bits();
        let joint = self.block.joint_entropy_bits(&self.chunk);
        if self.chunk_start != self.block_start && joint > apart + BLOCK_BITS {
            self.end_block(self.chunk_start);
            self.block_entropy_bits = self.chunk.entropy_bits();
        } else {
            self.block_entropy_bits = joint;
        }
        self.block.add(&self.chunk);
        self.chunk = Histogram::EMPTY;
        self.chunk_start = (self.tokens.len(), self.bytes);
    }

    fn end_block(&mut self, end: (usize, usize)) {
        let mut histogram = std::mem::replace(&mut self.block, Histogram::EMPTY);
        histogram.literals[END_OF_BLOCK] = 1;
        let (tokens, bytes) = (self.block_start.0..end.0, self.block_start.1..end.1);
        self.done.push(Block { tokens, bytes, histogram });
        self.block_start = end;
    }

    /// Ends the last block and sends all; the length in bytes, or `None` when they don't fit. `source` has the bytes of
    /// the tokens.
    pub(super) fn send(&mut self, source: &[u8], out: &mut [u8]) -> Option<usize> {
        self.end_chunk();
        self.end_block(self.chunk_start);
        let mut bits = BitWriter::new(out);
        for (index, block) in self.done.iter().enumerate() {
            let last = index + 1 == self.done.len();
            send_block(&mut bits, block, &self.tokens[block.tokens.clone()], &source[block.bytes.clone()], last)?;
        }
        bits.finish()
    }
}

/// Sends a block in the shortest of the three ways.
fn send_block(bits: &mut BitWriter, block: &Block, tokens: &[u32], source: &[u8], last: bool) -> Option<()> {
    let histogram = &block.histogram;
    let dynamic = Dynamic::of(histogram);
    let extra = histogram.extra_bits();
    let cost = |literals: &Code, distances: &Code| {
        literals.cost_bits(&histogram.literals) + distances.cost_bits(&histogram.distances) + extra
    };
    let dynamic_bits = dynamic.header_bits() + cost(&dynamic.literals, &dynamic.distances);
    let (fixed_literals, fixed_distances) = &*FIXED;
    let fixed_bits = cost(fixed_literals, fixed_distances);
    // Each part: three bits, up to seven to the next byte, two lengths.
    let parts = source.len().div_ceil(STORED_BYTES) as u64;
    let stored_bits = parts * (7 + 32) + 8 * source.len() as u64;
    let best = dynamic_bits.min(fixed_bits).min(stored_bits);
    if !bits.has_room(3 + best) {
        return None;
    }
    if best == stored_bits {
        return send_stored(bits, source, last);
    }
    bits.push(u64::from(last), 1);
    if best == fixed_bits {
        bits.push(1, 2);
        send_tokens(bits, tokens, fixed_literals, fixed_distances);
    } else {
        bits.push(2, 2);
        dynamic.send_header(bits);
        send_tokens(bits, tokens, &dynamic.literals, &dynamic.distances);
    }
    Some(())
}

fn send_stored(bits: &mut BitWriter, source: &[u8], last: bool) -> Option<()> {
    let mut parts = source.chunks(STORED_BYTES).peekable();
    while let Some(part) = parts.next() {
        let aligned = 3 + (8 - (bits.unaligned() + 3) % 8) % 8;
        if !bits.has_room(aligned + 32 + 8 * part.len() as u64) {
            return None;
        }
        bits.push(u64::from(last && parts.peek().is_none()), 3);
        bits.align();
        let len = part.len() as u16;
        bits.push_bytes(&len.to_le_bytes());
        bits.push_bytes(&(!len).to_le_bytes());
        bits.push_bytes(part);
    }
    Some(())
}

fn send_tokens(bits: &mut BitWriter, tokens: &[u32], literals: &Code, distances: &Code) {
    for token in tokens {
        if token & MATCH_FLAG == 0 {
            let code = literals.packed[*token as usize & 0xff];
            bits.push(u64::from(code & 0xffff), code >> 16);
            continue;
        }
        let (len, dist) = ((token & (MATCH_FLAG - 1)) as usize, (token >> 16) as usize);
        let length_code = usize::from(LENGTH_CODES[len]);
        let code = literals.packed[257 + length_code];
        let (mut value, mut count) = (u64::from(code & 0xffff), code >> 16);
        value |= ((len - usize::from(LENGTH_BASES[length_code])) as u64) << count;
        count += length_extra(length_code);
        let distance_code = distance_code(dist);
        let code = distances.packed[distance_code];
        value |= u64::from(code & 0xffff) << count;
        count += code >> 16;
        let extra = distance_extra(distance_code);
        value |= ((dist - 1) as u64 & ((1 << extra) - 1)) << count;
        bits.push(value, count + extra);
    }
    let end = literals.packed[END_OF_BLOCK];
    bits.push(u64::from(end & 0xffff), end >> 16);
}

/// The codes of a block that brings its own, and how they are sent.
struct Dynamic {
    literals: Code,
    distances: Code,
    literal_count: usize,
    distance_count: usize,
    /// Code lengths with runs folded: symbol, extra bits, their number.
    runs: Vec<(u8, u8, u8)>,
    run_code: Code,
    run_frequencies: [u32; LENGTHS],
    run_code_count: usize,
}

/// The order in which lengths of the code lengths' code are sent.
const RUN_ORDER: [usize; LENGTHS] = [16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15];

impl Dynamic {
    fn of(histogram: &Histogram) -> Self {
        let literals = Code::of(&histogram.literals, 15);
        let distances = Code::of(&histogram.distances, 15);
        let used =
            |code: &Code, min: usize| code.lens.iter().rposition(|len| *len != 0).map_or(min, |at| min.max(at + 1));
        let (literal_count, distance_count) = (used(&literals, 257), used(&distances, 1));
        let mut lens = [0u8; LITERALS + DISTANCES];
        lens[..literal_count].copy_from_slice(&literals.lens[..literal_count]);
        lens[literal_count..][..distance_count].copy_from_slice(&distances.lens[..distance_count]);
        let runs = fold_runs(&lens[..literal_count + distance_count]);
        let mut run_frequencies = [0; LENGTHS];
        runs.iter().for_each(|(symbol, ..)| run_frequencies[usize::from(*symbol)] += 1);
        let run_code = Code::of(&run_frequencies, 7);
        let unused = RUN_ORDER.iter().rev().take_while(|symbol| run_code.lens[**symbol] == 0).count();
        let run_code_count = (LENGTHS - unused).max(4);
        Dynamic { literals, distances, literal_count, distance_count, runs, run_code, run_frequencies, run_code_count }
    }

    fn header_bits(&self) -> u64 {
        let extra: u64 = self.runs.iter().map(|(_, _, count)| u64::from(*count)).sum();
        14 + 3 * self.run_code_count as u64 + self.run_code.cost_bits(&self.run_frequencies) + extra
    }

    fn send_header(&self, bits: &mut BitWriter) {
        bits.push(self.literal_count as u64 - 257, 5);
        bits.push(self.distance_count as u64 - 1, 5);
        bits.push(self.run_code_count as u64 - 4, 4);
        for symbol in &RUN_ORDER[..self.run_code_count] {
            bits.push(self.run_code.lens[*symbol].into(), 3);
        }
        for (symbol, extra, extra_count) in &self.runs {
            let code = self.run_code.packed[usize::from(*symbol)];
            bits.push(u64::from(code & 0xffff), code >> 16);
            bits.push((*extra).into(), (*extra_count).into());
        }
    }
}

/// Runs of code lengths: 16 repeats the last one 3–6 times, 17 and 18 are 3–10 and 11–138 zeroes.
fn fold_runs(lens: &[u8]) -> Vec<(u8, u8, u8)> {
    let mut runs = Vec::with_capacity(lens.len());
    for group in lens.chunk_by(|one, two| one == two) {
        let (len, mut left) = (group[0], group.len());
        if len == 0 {
            while left >= 11 {
                let run = left.min(138);
                runs.push((18, (run - 11) as u8, 7));
                left -= run;
            }
            if left >= 3 {
                runs.push((17, (left - 3) as u8, 3));
                left = 0;
            }
        } else {
            runs.push((len, 0, 0));
            left -= 1;
            while left >= 3 {
                let run = left.min(6);
                runs.push((16, (run - 3) as u8, 2));
                left -= run;
            }
        }
        runs.extend((0..left).map(|_| (len, 0, 0)));
    }
    runs
}

/// The codes of blocks that bring none.
static FIXED: LazyLock<(Code, Code)> = LazyLock::new(|| {
    let mut literals = [8; MAX_SYMBOLS];
    literals[144..256].fill(9);
    literals[256..280].fill(7);
    let mut distances = [0; MAX_SYMBOLS];
    distances[..32].fill(5);
    (Code::from_lens(literals), Code::from_lens(distances))
});

/// Extra bits of length code 257 + `code`.
const fn length_extra(code: usize) -> u32 {
    match code {
        0..8 | 28 => 0,
        _ => code as u32 / 4 - 1,
    }
}

/// Shortest length of each length code.
const LENGTH_BASES: [u16; 29] = {
    let mut bases = [0; 29];
    let (mut code, mut base) = (0, MIN_MATCH as u16);
    while code < 28 {
        bases[code] = base;
        base += 1 << length_extra(code);
        code += 1;
    }
    // The longest match has a code of its own.
    bases[28] = MAX_MATCH as u16;
    bases
};

/// Length code (less 257) of each length.
const LENGTH_CODES: [u8; MAX_MATCH + 1] = {
    let mut codes = [0; MAX_MATCH + 1];
    let (mut len, mut code) = (MIN_MATCH, 0);
    while len <= MAX_MATCH {
        while code < 28 && len >= LENGTH_BASES[code + 1] as usize {
            code += 1;
        }
        codes[len] = code as u8;
        len += 1;
    }
    codes
};

/// The code of a distance, 1–32768.
#[inline]
fn distance_code(dist: usize) -> usize {
    let zero_based = dist - 1;
    if zero_based < 4 {
        return zero_based;
    }
    let top = zero_based.ilog2() as usize;
    2 * top + (zero_based >> (top - 1) & 1)
}

/// Extra bits of a distance code.
#[inline]
const fn distance_extra(code: usize) -> u32 {
    if code < 4 { 0 } else { code as u32 / 2 - 1 }
}
