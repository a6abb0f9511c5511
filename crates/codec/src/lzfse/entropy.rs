// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The entropy code of lzfse: asymmetric numeral systems with a table of states (tANS).
//!
//! A state stands for a symbol. The bits that follow, with the state's own number, give the next state. A symbol may
//! stand for a range of values; further bits choose one. Bits are read from the last one to the first.

use super::{ALL_SYMBOLS, CUT_OFF, Refusal};

/// Bits of a part of a block, read from its end.
pub(super) struct BackwardBits<'a> {
    bytes: &'a [u8],
    /// Bits that aren't read yet.
    left: usize,
}

impl<'a> BackwardBits<'a> {
    /// The upper `spare` bits of the last byte aren't used; at most 7.
    pub(super) fn new(bytes: &'a [u8], spare: u32) -> Result<Self, Refusal> {
        let unused = bytes.last().map_or(0, |&last| u32::from(last) << spare.min(8) >> 8);
        match (bytes.len() * 8).checked_sub(spare as usize) {
            Some(left) if spare < 8 && unused == 0 => Ok(BackwardBits { bytes, left }),
            _ => Err("a part of a block ends in a wrong way"),
        }
    }

    /// At most 32 bits.
    fn take(&mut self, count: u32) -> Result<u32, Refusal> {
        self.left = self.left.checked_sub(count as usize).ok_or(CUT_OFF)?;
        let (at, shift) = (self.left / 8, self.left % 8);
        let word = match self.bytes.get(at..).and_then(|rest| rest.first_chunk()) {
            Some(word) => u64::from_le_bytes(*word),
            None => self.last_word(at),
        };
        Ok((word >> shift & ((1 << count) - 1)) as u32)
    }

    #[cold]
    fn last_word(&self, at: usize) -> u64 {
        let rest = self.bytes.get(at..).unwrap_or_default();
        rest.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte))
    }
}

/// The meaning of a symbol: `base`, and the number that the extra bits give.
#[derive(Clone, Copy)]
pub(super) struct Symbol {
    pub(super) base: u32,
    pub(super) extra_bits: u32,
}

/// Symbols whose ranges of values lie side by side from 0 on: so many of each, with so many extra bits.
pub(super) fn symbols(widths: &[(usize, u32)]) -> impl Iterator<Item = Symbol> {
    let widths = widths.iter().flat_map(|&(count, extra_bits)| std::iter::repeat_n(extra_bits, count));
    widths.scan(0, |base, extra_bits| {
        let symbol = Symbol { base: *base, extra_bits };
        *base += 1 << extra_bits;
        Some(symbol)
    })
}

#[derive(Clone, Copy)]
struct FseState {
    symbol: Symbol,
    /// The next state: this one and the number that this many bits give.
    next: u32,
    bits: u32,
}

/// The states of one alphabet, of a power of two.
pub(super) struct Values<const STATES: usize> {
    states: [FseState; STATES],
}

impl<const STATES: usize> Values<STATES> {
    /// Each symbol has as many states as its count. Fails when these aren't all.
    pub(super) fn new(counts: &[u16], symbols: impl Iterator<Item = Symbol>) -> Result<Self, Refusal> {
        let mut states = [FseState { symbol: Symbol { base: 0, extra_bits: 0 }, next: 0, bits: 0 }; STATES];
        if counts.iter().map(|&count| usize::from(count)).sum::<usize>() != STATES {
            return Err("the counts of a block's symbols don't fit");
        }
        let each = counts.iter().zip(symbols).flat_map(|(&count, symbol)| {
            let count = u32::from(count);
            (count..2 * count).map(move |number| (number, symbol))
        });
        for (state, (number, symbol)) in states.iter_mut().zip(each) {
            // These bits lift the number into the range of states, which begins at their count.
            let bits = STATES.ilog2() - number.ilog2();
            *state = FseState { symbol, next: (number << bits) - STATES as u32, bits };
        }
        Ok(Values { states })
    }
}

/// The state that a sequence of symbols is in.
pub(super) struct Reader {
    state: usize,
}

impl Reader {
    pub(super) fn new(state: usize) -> Self {
        Reader { state }
    }

    /// The value of the state, and the next state.
    pub(super) fn next<const STATES: usize>(
        &mut self,
        values: &Values<STATES>,
        bits: &mut BackwardBits,
    ) -> Result<u32, Refusal> {
        let FseState { symbol, next, bits: count } = *values.states.get(self.state).ok_or("a state is out of range")?;
        let taken = bits.take(count + symbol.extra_bits)?;
        self.state = (next + (taken >> symbol.extra_bits)) as usize;
        Ok(symbol.base + (taken & ((1 << symbol.extra_bits) - 1)))
    }
}

/// Reads the counts of all symbols from the end of a header.
///
/// A count takes 2 bits (0, 1), 3 (2, 3), 5 (4 to 7), 8 (8 to 23) or 14. The first byte's lowest bit is the first one.
pub(super) fn counts(mut coded: &[u8]) -> Result<[u16; ALL_SYMBOLS], Refusal> {
    let mut counts = [0; ALL_SYMBOLS];
    // No counts are all zero.
    if coded.is_empty() {
        return Ok(counts);
    }
    let (mut word, mut have) = (0u32, 0);
    for count in &mut counts {
        while have <= 24
            && let Some((&byte, rest)) = coded.split_first()
        {
            word |= u32::from(byte) << have;
            have += 8;
            coded = rest;
        }
        let (base, prefix, extra) = match word & 0b1111 {
            low if low & 0b11 == 0b00 => (0, 2, 0),
            low if low & 0b11 == 0b10 => (1, 2, 0),
            low if low & 0b111 == 0b001 => (2, 3, 0),
            low if low & 0b111 == 0b101 => (3, 3, 0),
            low if low & 0b111 == 0b011 => (4, 3, 2),
            0b0111 => (8, 4, 4),
            _ => (24, 4, 10),
        };
        *count = base + (word >> prefix & ((1 << extra) - 1)) as u16;
        word >>= prefix + extra;
        have = u32::checked_sub(have, prefix + extra).ok_or(CUT_OFF)?;
    }
    match coded.is_empty() && have < 8 {
        true => Ok(counts),
        false => Err("a header is too long"),
    }
}
