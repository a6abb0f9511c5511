// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Prefix codes of limited length (RFC 1951, section 3.2.2).

/// Most symbols of an alphabet.
pub(super) const MAX_SYMBOLS: usize = 288;

/// A canonical prefix code: for each symbol its length (0: not used) and its bits in the order in which they are sent.
#[derive(Clone)]
pub(super) struct Code {
    pub lens: [u8; MAX_SYMBOLS],
    /// Bits in the low half, length in the high half.
    pub packed: [u32; MAX_SYMBOLS],
}

impl Code {
    /// The code that encodes symbols of the given frequencies shortest, among those with lengths up to `max_len`. At
    /// least two symbols get a code, so that the code is complete: some readers insist.
    pub(super) fn of(frequencies: &[u32], max_len: usize) -> Self {
        let mut sorted = [0u64; MAX_SYMBOLS];
        let mut count = 0;
        for (symbol, frequency) in frequencies.iter().enumerate() {
            if *frequency != 0 {
                sorted[count] = u64::from(*frequency) << 16 | symbol as u64;
                count += 1;
            }
        }
        let mut unused = (0..frequencies.len()).filter(|symbol| frequencies[*symbol] == 0);
        while count < 2 {
            sorted[count] = 1 << 16 | unused.next().unwrap_or(0) as u64;
            count += 1;
        }
        let sorted = &mut sorted[..count];
        sorted.sort_unstable();
        let counts = length_counts(sorted, max_len);
        let mut lens = [0; MAX_SYMBOLS];
        // The rarest symbols get the longest codes.
        let mut rest = sorted.iter();
        for len in (1..=max_len).rev() {
            for key in rest.by_ref().take(counts[len]) {
                lens[(key & 0xffff) as usize] = len as u8;
            }
        }
        Self::from_lens(lens)
    }

    /// The canonical code of the given lengths: codes of one length follow each other in the order of the symbols.
    pub(super) fn from_lens(lens: [u8; MAX_SYMBOLS]) -> Self {
        let mut next = [0u32; 17];
        for len in lens.iter().filter(|len| **len != 0) {
            next[usize::from(*len) + 1] += 1;
        }
        for len in 2..17 {
            next[len] = (next[len] + next[len - 1]) << 1;
        }
        let mut packed = [0; MAX_SYMBOLS];
        for (symbol, len) in lens.iter().enumerate().filter(|(_, len)| **len != 0) {
            let first = &mut next[usize::from(*len)];
            let code = *first;
            *first += 1;
            packed[symbol] = (code.reverse_bits() >> (32 - u32::from(*len))) | u32::from(*len) << 16;
        }
        Code { lens, packed }
    }

    /// Bits to send symbols of the given frequencies.
    pub(super) fn cost_bits(&self, frequencies: &[u32]) -> u64 {
        frequencies.iter().zip(&self.lens).map(|(count, len)| u64::from(*count) * u64::from(*len)).sum()
    }
}

/// The numbers of symbols with a code of each length: Huffman's algorithm on `sorted` (frequency in the upper bits,
/// rising), then the codes that are too long are shortened at the cost of others.
fn length_counts(sorted: &[u64], max_len: usize) -> [usize; 16] {
    let leaves = sorted.len();
    // Inner nodes come out in rising order of weight, so two queues do instead of a heap. Node numbers: leaves first.
    let mut weights = [0u64; MAX_SYMBOLS];
    let mut parents = [0u16; 2 * MAX_SYMBOLS];
    let (mut leaf, mut inner) = (0, 0);
    for made in 0..leaves - 1 {
        for _ in 0..2 {
            let take_leaf = leaf < leaves && (inner >= made || sorted[leaf] >> 16 <= weights[inner]);
            let (node, weight) = if take_leaf { (leaf, sorted[leaf] >> 16) } else { (leaves + inner, weights[inner]) };
            if take_leaf {
                leaf += 1
            } else {
                inner += 1
            }
            parents[node] = (leaves + made) as u16;
            weights[made] += weight;
        }
    }
    let mut depths = [0u16; 2 * MAX_SYMBOLS];
    let root = 2 * leaves - 2;
    let mut counts = [0usize; 16];
    // The share of the code space that all codes take, in units of the longest code.
    let mut space = 0usize;
    for node in (0..root).rev() {
        depths[node] = depths[usize::from(parents[node])] + 1;
        if node < leaves {
            let len = usize::from(depths[node]).min(max_len);
            counts[len] += 1;
            space += 1 << (max_len - len);
        }
    }
    while space > 1 << max_len {
        // Lengthen the longest code that can be: it frees the least, so little is lost.
        let len = (1..max_len).rev().find(|len| counts[*len] != 0).unwrap_or(1);
        counts[len] -= 1;
        counts[len + 1] += 1;
        space -= 1 << (max_len - len - 1);
    }
    // That may have freed too much: give it to the longest codes.
    while space < 1 << max_len {
        let free = (1 << max_len) - space;
        let Some(len) = (2..=max_len).find(|len| counts[*len] != 0 && 1 << (max_len - len) <= free) else { break };
        counts[len] -= 1;
        counts[len - 1] += 1;
        space += 1 << (max_len - len);
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn codes_are_complete_and_short_enough(
            frequencies in proptest::collection::vec(prop_oneof![Just(0u32), 1u32..20, 1u32..2_000_000], 2..288),
            small: bool,
        ) {
            let (frequencies, max_len) = if small { (&frequencies[..frequencies.len().min(19)], 7) } else { (&frequencies[..], 15) };
            let code = Code::of(frequencies, max_len);
            let space: usize = code.lens.iter().filter(|len| **len != 0).map(|len| 1 << (max_len - usize::from(*len))).sum();
            prop_assert_eq!(space, 1 << max_len);
            for (symbol, frequency) in frequencies.iter().enumerate() {
                prop_assert!(*frequency == 0 || code.lens[symbol] != 0);
            }
            // Never more than 6 % above the entropy and one bit a symbol.
            let total: f64 = frequencies.iter().map(|count| f64::from(*count)).sum();
            let entropy: f64 = frequencies.iter().filter(|count| **count != 0)
                .map(|count| f64::from(*count) * (total / f64::from(*count)).log2()).sum();
            prop_assert!(code.cost_bits(frequencies) as f64 <= entropy * 1.06 + total + 1.0);
        }
    }

    #[test]
    fn the_example_of_the_rfc() {
        let mut lens = [0; MAX_SYMBOLS];
        lens[..8].copy_from_slice(&[3, 3, 3, 3, 3, 2, 4, 4]);
        let code = Code::from_lens(lens);
        let bits: Vec<u32> = (0..8)
            .map(|symbol| (code.packed[symbol] & 0xffff).reverse_bits() >> (32 - u32::from(lens[symbol])))
            .collect();
        assert_eq!(bits, [0b010, 0b011, 0b100, 0b101, 0b110, 0b00, 0b1110, 0b1111]);
    }
}
