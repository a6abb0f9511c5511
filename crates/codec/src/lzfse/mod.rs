// SPDX-License-Identifier: Apache-2.0 OR MIT
//! lzfse, for reading: the compression of Apple's disk images of the kind ULFO.
//!
//! A stream is a row of blocks, each with a mark of four bytes. The format is the one that Apple published with its
//! library of the same name (github.com/lzfse/lzfse); this decoder shares no code with it. All matches reach back into
//! the bytes that earlier blocks of the stream gave.

use super::bad_data;
use cowshed_types::Result;

mod entropy;
mod lzvn;

use entropy::{BackwardBits, Reader, Symbol, Values};

/// The end of a stream.
const END: [u8; 4] = *b"bvx$";
/// Bytes as they are.
const STORED: [u8; 4] = *b"bvx-";
/// Opcodes with literals and matches.
const LZVN: [u8; 4] = *b"bvxn";
/// Entropy-coded literals and matches; the counts of symbols are 16-bit numbers.
const WIDE: [u8; 4] = *b"bvx1";
/// The same; the counts of symbols have a code of their own.
const NARROW: [u8; 4] = *b"bvx2";

/// The most matches and literals of one block.
const MOST_MATCHES: usize = 10_000;
const MOST_LITERALS: usize = 4 * MOST_MATCHES;
/// Length of a header with 16-bit counts: a C structure that ends on a multiple of four.
const WIDE_HEADER_BYTES: usize = 772;
const WIDE_COUNTS_AT: usize = 50;
/// Length of a header before its coded counts.
const NARROW_HEADER_BYTES: usize = 32;

/// Symbols and states of the four alphabets.
const LENGTH_SYMBOLS: usize = 20;
const LENGTH_STATES: usize = 64;
const DISTANCE_SYMBOLS: usize = 64;
const DISTANCE_STATES: usize = 256;
const LITERAL_STATES: usize = 1024;
const ALL_SYMBOLS: usize = 2 * LENGTH_SYMBOLS + DISTANCE_SYMBOLS + 256;

/// A reason to refuse a stream.
type Refusal = &'static str;
const CUT_OFF: Refusal = "they are cut off";
const TOO_LONG: Refusal = "there is more";
const FAR: Refusal = "a match reaches before the first byte";

/// Fills `out` with all that a stream holds, or fails. Bytes behind the end of the stream mean nothing.
///
/// Takes 40 KiB of memory for the literals of a block, and no more for any input.
pub fn unpack_lzfse(packed: &[u8], out: &mut [u8]) -> Result<()> {
    let mut output = Output { bytes: out, done: 0 };
    let mut input = Input { bytes: packed };
    stream(&mut input, &mut output)
        .map_err(|reason| bad_data(packed, format!("packed data are no whole lzfse data of their length: {reason}")))
}

fn stream(input: &mut Input, output: &mut Output) -> Result<(), Refusal> {
    loop {
        match input.array()? {
            END if output.done == output.bytes.len() => return Ok(()),
            END => return Err("there is less"),
            STORED => {
                let len = input.count()?;
                output.literals(input.take(len)?)?;
            }
            LZVN => {
                let (len, packed_len) = (input.count()?, input.count()?);
                let packed = input.take(packed_len)?;
                output.block(len, |output| lzvn::unpack(packed, output))?;
            }
            WIDE => Block::wide(input)?.unpack(input, output)?,
            NARROW => Block::narrow(input)?.unpack(input, output)?,
            _ => return Err("a block has an unknown mark"),
        }
    }
}

/// The bytes that aren't read yet.
struct Input<'a> {
    bytes: &'a [u8],
}

impl<'a> Input<'a> {
    fn take(&mut self, len: usize) -> Result<&'a [u8], Refusal> {
        let (taken, rest) = self.bytes.split_at_checked(len).ok_or(CUT_OFF)?;
        self.bytes = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Refusal> {
        let (taken, rest) = self.bytes.split_first_chunk().ok_or(CUT_OFF)?;
        self.bytes = rest;
        Ok(*taken)
    }

    /// A length in the file's 32 bits.
    fn count(&mut self) -> Result<usize, Refusal> {
        Ok(u32::from_le_bytes(self.array()?) as usize)
    }
}

/// The output of a stream, whose length is known.
struct Output<'a> {
    bytes: &'a mut [u8],
    done: usize,
}

impl Output<'_> {
    fn literals(&mut self, literals: &[u8]) -> Result<(), Refusal> {
        let end = self.done + literals.len();
        self.bytes.get_mut(self.done..end).ok_or(TOO_LONG)?.copy_from_slice(literals);
        self.done = end;
        Ok(())
    }

    /// Repeats `len` bytes from `distance` bytes back, which may be fewer.
    fn repeat(&mut self, distance: usize, len: usize) -> Result<(), Refusal> {
        let from = self.done.checked_sub(distance).filter(|_| distance != 0).ok_or(FAR)?;
        if len > self.bytes.len() - self.done {
            return Err(TOO_LONG);
        }
        let end = self.done + len;
        while self.done < end {
            // The bytes already written go on with the same period.
            let part = (self.done - from).min(end - self.done);
            self.bytes.copy_within(from..from + part, self.done);
            self.done += part;
        }
        Ok(())
    }

    /// Lets a block write, which must write as many bytes as its header demands.
    fn block(&mut self, len: usize, write: impl FnOnce(&mut Output) -> Result<(), Refusal>) -> Result<(), Refusal> {
        let end = self.done.checked_add(len).filter(|&end| end <= self.bytes.len()).ok_or(TOO_LONG)?;
        let mut part = Output { bytes: &mut self.bytes[..end], done: self.done };
        write(&mut part)?;
        if part.done != end {
            return Err("a block is shorter than it says");
        }
        self.done = end;
        Ok(())
    }
}

/// The header of a block with coded literals and matches.
struct Block {
    len: usize,
    literals: usize,
    matches: usize,
    literal_bytes: usize,
    match_bytes: usize,
    /// Bits of the last byte that aren't used.
    literal_spare: u32,
    match_spare: u32,
    literal_states: [usize; 4],
    /// Of literal lengths, match lengths and distances.
    match_states: [usize; 3],
    /// The number of states of each symbol: those of literal lengths, match lengths, distances and literals.
    counts: [u16; ALL_SYMBOLS],
}

impl Block {
    /// Reads the rest of a header with 16-bit counts.
    fn wide(input: &mut Input) -> Result<Self, Refusal> {
        let header = input.take(WIDE_HEADER_BYTES - 4)?;
        let mut fields = Input { bytes: header };
        let len = fields.count()?;
        // The sum of the two lengths that follow: those count.
        let _payload_bytes = fields.count()?;
        let (literals, matches) = (fields.count()?, fields.count()?);
        let (literal_bytes, match_bytes) = (fields.count()?, fields.count()?);
        let spare = |field: [u8; 4]| 0u32.wrapping_sub(u32::from_le_bytes(field));
        let state = |fields: &mut Input| Ok::<_, Refusal>(usize::from(u16::from_le_bytes(fields.array()?)));
        let literal_spare = spare(fields.array()?);
        let literal_states = [state(&mut fields)?, state(&mut fields)?, state(&mut fields)?, state(&mut fields)?];
        let match_spare = spare(fields.array()?);
        let match_states = [state(&mut fields)?, state(&mut fields)?, state(&mut fields)?];
        let mut counts = [0; ALL_SYMBOLS];
        for (count, field) in counts.iter_mut().zip(header[WIDE_COUNTS_AT - 4..].as_chunks().0) {
            *count = u16::from_le_bytes(*field);
        }
        Ok(Block {
            len,
            literals,
            matches,
            literal_bytes,
            match_bytes,
            literal_spare,
            match_spare,
            literal_states,
            match_states,
            counts,
        })
    }

    /// Reads the rest of a header with coded counts.
    fn narrow(input: &mut Input) -> Result<Self, Refusal> {
        let len = input.count()?;
        let fields = [input.array()?, input.array()?, input.array()?].map(u64::from_le_bytes);
        let field = |index: usize, from: u32, bits: u32| (fields[index] >> from & ((1 << bits) - 1)) as usize;
        let spare = |index: usize| 7 - field(index, 60, 3) as u32;
        let coded = field(2, 0, 32).checked_sub(NARROW_HEADER_BYTES).ok_or("a header is too short")?;
        Ok(Block {
            len,
            literals: field(0, 0, 20),
            matches: field(0, 40, 20),
            literal_bytes: field(0, 20, 20),
            match_bytes: field(1, 40, 20),
            literal_spare: spare(0),
            match_spare: spare(1),
            literal_states: [field(1, 0, 10), field(1, 10, 10), field(1, 20, 10), field(1, 30, 10)],
            match_states: [field(2, 32, 10), field(2, 42, 10), field(2, 52, 10)],
            counts: entropy::counts(input.take(coded)?)?,
        })
    }

    fn unpack(&self, input: &mut Input, output: &mut Output) -> Result<(), Refusal> {
        if self.matches > MOST_MATCHES || self.literals > MOST_LITERALS {
            return Err("a block has too many literals or matches");
        }
        let literals = BackwardBits::new(input.take(self.literal_bytes)?, self.literal_spare)?;
        let matches = BackwardBits::new(input.take(self.match_bytes)?, self.match_spare)?;
        let literals = self.literals(literals)?;
        output.block(self.len, |output| self.matches(matches, &literals, output))
    }

    /// Four streams take turns at the bits.
    fn literals(&self, mut bits: BackwardBits) -> Result<Vec<u8>, Refusal> {
        if self.literals == 0 {
            return Ok(Vec::new());
        }
        let counts = &self.counts[ALL_SYMBOLS - 256..];
        let symbols = (0..=u8::MAX).map(|byte| Symbol { base: byte.into(), extra_bits: 0 });
        let values = Values::<LITERAL_STATES>::new(counts, symbols)?;
        let mut readers = self.literal_states.map(Reader::new);
        let mut literals = Vec::with_capacity(self.literals.next_multiple_of(readers.len()));
        while literals.len() < self.literals {
            for reader in &mut readers {
                literals.push(reader.next(&values, &mut bits)? as u8);
            }
        }
        Ok(literals)
    }

    /// Each match has its literals in front.
    fn matches(&self, mut bits: BackwardBits, mut literals: &[u8], output: &mut Output) -> Result<(), Refusal> {
        if self.matches == 0 {
            return Ok(());
        }
        let (before, rest) = self.counts.split_at(LENGTH_SYMBOLS);
        let (lengths, rest) = rest.split_at(LENGTH_SYMBOLS);
        let distances = &rest[..DISTANCE_SYMBOLS];
        let before =
            Values::<LENGTH_STATES>::new(before, entropy::symbols(&[(16, 0), (1, 2), (1, 3), (1, 5), (1, 8)]))?;
        let lengths =
            Values::<LENGTH_STATES>::new(lengths, entropy::symbols(&[(16, 0), (1, 3), (1, 5), (1, 8), (1, 11)]))?;
        let steps: [(usize, u32); 16] = std::array::from_fn(|bits| (4, bits as u32));
        let distances = Values::<DISTANCE_STATES>::new(distances, entropy::symbols(&steps))?;
        let mut readers = self.match_states.map(Reader::new);
        // None yet: the first match must have its own.
        let mut distance = 0;
        for _ in 0..self.matches {
            let count = readers[0].next(&before, &mut bits)? as usize;
            let len = readers[1].next(&lengths, &mut bits)? as usize;
            let new_distance = readers[2].next(&distances, &mut bits)? as usize;
            let (taken, rest) = literals.split_at_checked(count).ok_or("a block has too few literals")?;
            output.literals(taken)?;
            literals = rest;
            // 0 stands for the distance of the match before.
            distance = if new_distance == 0 { distance } else { new_distance };
            output.repeat(distance, len)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
