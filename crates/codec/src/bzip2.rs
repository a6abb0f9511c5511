// SPDX-License-Identifier: Apache-2.0 OR MIT
//! bzip2, for reading: blocks of Huffman codes over move-to-front positions over a sorted rotation.

use super::bad_data;
use cowshed_block::Result;

const BLOCK_MARK: u64 = 0x3141_5926_5359;
const END_MARK: u64 = 0x1772_4538_5090;
const SELECTOR_SPAN: usize = 50;
const LONGEST_CODE: usize = 20;
const MOST_SYMBOLS: usize = 258;

/// Fills `out` with all that a stream holds, or fails.
pub fn unpack_bzip2(packed: &[u8], out: &mut [u8]) -> Result<()> {
    match Decoder::new(packed).and_then(|mut decoder| decoder.run(out)) {
        Some(()) => Ok(()),
        None => {
            Err(bad_data(packed, "packed data are no whole bzip2 data of the length that they should have".to_owned()))
        }
    }
}

struct Decoder<'a> {
    bytes: &'a [u8],
    at: usize,
    bits: u64,
    count: u32,
    /// Bytes of a block at most.
    most: usize,
}

/// A code: for each length the first code word, the index of its symbol, and the count.
struct Code {
    limits: [(u32, u32, u32); LONGEST_CODE + 1],
    symbols: Vec<u16>,
}

impl Code {
    fn new(lengths: &[u8]) -> Option<Code> {
        let mut code = Code { limits: [(0, 0, 0); LONGEST_CODE + 1], symbols: Vec::with_capacity(lengths.len()) };
        let mut word = 0u32;
        for len in 1..=LONGEST_CODE {
            let first = code.symbols.len();
            let with = lengths.iter().enumerate().filter(|(_, known)| usize::from(**known) == len);
            code.symbols.extend(with.map(|(symbol, _)| symbol as u16));
            let count = (code.symbols.len() - first) as u32;
            code.limits[len] = (word, first as u32, count);
            word = word.checked_add(count)?;
            if word > 1 << len {
                return None;
            }
            word <<= 1;
        }
        Some(code)
    }
}

impl<'a> Decoder<'a> {
    fn new(bytes: &'a [u8]) -> Option<Self> {
        let level = match bytes {
            [b'B', b'Z', b'h', level @ b'1'..=b'9', ..] => usize::from(level - b'0'),
            _ => return None,
        };
        Some(Decoder { bytes, at: 4, bits: 0, count: 0, most: level * 100_000 })
    }

    /// The next bits, up to 32.
    fn take(&mut self, wanted: u32) -> Option<u32> {
        while self.count < wanted {
            self.bits = self.bits << 8 | u64::from(*self.bytes.get(self.at)?);
            self.at += 1;
            self.count += 8;
        }
        self.count -= wanted;
        let value = self.bits >> self.count & ((1u64 << wanted) - 1);
        Some(value as u32)
    }

    fn flag(&mut self) -> Option<bool> {
        Some(self.take(1)? == 1)
    }

    fn run(&mut self, out: &mut [u8]) -> Option<()> {
        let (mut done, mut all) = (0, 0u32);
        loop {
            let mark = u64::from(self.take(24)?) << 24 | u64::from(self.take(24)?);
            let expected = self.take(32)?;
            match mark {
                BLOCK_MARK => {
                    let (len, sum) = self.block(&mut out[done..])?;
                    if sum != expected {
                        return None;
                    }
                    all = all.rotate_left(1) ^ sum;
                    done += len;
                }
                END_MARK => return (expected == all && done == out.len()).then_some(()),
                _ => return None,
            }
        }
    }

    /// A block: the bytes that it has, and their checksum.
    fn block(&mut self, out: &mut [u8]) -> Option<(usize, u32)> {
        // Random blocks are of versions before 1.0.
        if self.flag()? {
            return None;
        }
        let origin = self.take(24)? as usize;
        let mut used = Vec::with_capacity(256);
        let groups = self.take(16)?;
        for group in (0..16u32).filter(|group| groups >> (15 - group) & 1 == 1) {
            let members = self.take(16)?;
            used.extend((0..16u32).filter(|bit| members >> (15 - bit) & 1 == 1).map(|bit| (group * 16 + bit) as u8));
        }
        if used.is_empty() {
            return None;
        }
        let (codes, selectors) = self.codes(used.len() + 2)?;
        let sorted = self.positions(used, &codes, &selectors)?;
        if origin >= sorted.len() {
            return None;
        }
        unsort(&sorted, origin, out)
    }

    fn codes(&mut self, symbols: usize) -> Option<(Vec<Code>, Vec<u8>)> {
        let tables = self.take(3)? as usize;
        let count = self.take(15)? as usize;
        if !(2..=6).contains(&tables) || count == 0 {
            return None;
        }
        let mut order: Vec<u8> = (0..tables as u8).collect();
        let mut selectors = Vec::with_capacity(count);
        for _ in 0..count {
            let mut position = 0;
            while self.flag()? {
                position += 1;
                if position >= tables {
                    return None;
                }
            }
            let table = order.remove(position);
            order.insert(0, table);
            selectors.push(table);
        }
        let mut codes = Vec::with_capacity(tables);
        for _ in 0..tables {
            let mut lengths = [0; MOST_SYMBOLS];
            let mut len = self.take(5)?;
            for length in &mut lengths[..symbols] {
                loop {
                    if !(1..=LONGEST_CODE as u32).contains(&len) {
                        return None;
                    }
                    if !self.flag()? {
                        break;
                    }
                    len = if self.flag()? { len - 1 } else { len + 1 };
                }
                *length = len as u8;
            }
            codes.push(Code::new(&lengths[..symbols])?);
        }
        Some((codes, selectors))
    }

    fn symbol(&mut self, code: &Code) -> Option<usize> {
        let mut word = 0;
        for (first, index, count) in &code.limits[1..] {
            word = word << 1 | self.take(1)?;
            if let Some(offset) = word.checked_sub(*first).filter(|offset| offset < count) {
                return code.symbols.get((index + offset) as usize).map(|&symbol| usize::from(symbol));
            }
        }
        None
    }

    /// The sorted block: runs and positions of the list of bytes that were used last.
    fn positions(&mut self, mut used: Vec<u8>, codes: &[Code], selectors: &[u8]) -> Option<Vec<u8>> {
        let end = used.len() + 1;
        let mut sorted = Vec::new();
        let (mut run, mut weight) = (0usize, 1usize);
        for selector in selectors {
            let code = codes.get(usize::from(*selector))?;
            for _ in 0..SELECTOR_SPAN {
                let symbol = self.symbol(code)?;
                if symbol < 2 {
                    run = run.checked_add(weight << symbol)?;
                    weight <<= 1;
                    if run > self.most {
                        return None;
                    }
                    continue;
                }
                if sorted.len() + run + usize::from(symbol != end) > self.most {
                    return None;
                }
                sorted.resize(sorted.len() + run, used[0]);
                (run, weight) = (0, 1);
                if symbol == end {
                    return Some(sorted);
                }
                let byte = used.remove(symbol - 1);
                used.insert(0, byte);
                sorted.push(byte);
            }
        }
        None
    }
}

/// Turns the sorted rotation back, and the runs of four in it.
fn unsort(sorted: &[u8], origin: usize, out: &mut [u8]) -> Option<(usize, u32)> {
    let mut starts = [0usize; 256];
    sorted.iter().for_each(|&byte| starts[usize::from(byte)] += 1);
    let mut sum = 0;
    for start in &mut starts {
        sum += std::mem::replace(start, sum);
    }
    let mut next = vec![0u32; sorted.len()];
    for (index, &byte) in sorted.iter().enumerate() {
        let start = &mut starts[usize::from(byte)];
        next[*start] = index as u32;
        *start += 1;
    }
    let (mut at, mut done, mut check) = (next[origin] as usize, 0, u32::MAX);
    let (mut last, mut same) = (None, 0);
    for _ in 0..sorted.len() {
        let byte = sorted[at];
        at = next[at] as usize;
        // Behind four of a byte stands how many more there are.
        let (value, count) = match (same, last) {
            (4, Some(value)) => {
                same = 0;
                last = None;
                (value, usize::from(byte))
            }
            _ => {
                same = if last == Some(byte) { same + 1 } else { 1 };
                last = Some(byte);
                (byte, 1)
            }
        };
        out.get_mut(done..done + count)?.fill(value);
        (0..count).for_each(|_| check = check << 8 ^ CRC[usize::from((check >> 24) as u8 ^ value)]);
        done += count;
    }
    Some((done, !check))
}

/// The checksum's table: the polynomial of CRC-32, the first bit first.
const CRC: [u32; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut value = (byte as u32) << 24;
        let mut bit = 0;
        while bit < 8 {
            value = if value & 0x8000_0000 != 0 { value << 1 ^ 0x04c1_1db7 } else { value << 1 };
            bit += 1;
        }
        table[byte] = value;
        byte += 1;
    }
    table
};

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::process::{Command, Stdio};

    /// By the real bzip2.
    fn packed(bytes: &[u8], level: &str) -> Vec<u8> {
        let mut child =
            Command::new("bzip2").args(["-c", level]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut stdin = child.stdin.take().unwrap();
        let bytes = bytes.to_vec();
        let writer = std::thread::spawn(move || stdin.write_all(&bytes).unwrap());
        let output = child.wait_with_output().unwrap();
        writer.join().unwrap();
        output.stdout
    }

    fn contents() -> Vec<Vec<u8>> {
        let mut state = 1u32;
        let mut random = move || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        };
        let noise: Vec<u8> = (0..250_000).map(|_| random()).collect();
        let mut mixed = b"cows in the shed ".repeat(9000);
        mixed.extend(&noise[..5000]);
        mixed.extend([7; 70_000]);
        vec![vec![], b"a".to_vec(), vec![0; 300_000], b"aaaabaaaaa".to_vec(), noise, mixed, (0..=255).collect()]
    }

    #[test]
    fn streams_of_bzip2_are_unpacked() {
        for bytes in contents() {
            for level in ["-1", "-9"] {
                let stream = packed(&bytes, level);
                let mut out = vec![0; bytes.len()];
                unpack_bzip2(&stream, &mut out).unwrap();
                assert!(out == bytes, "{} bytes, {level}", bytes.len());
                assert!(unpack_bzip2(&stream, &mut vec![0; bytes.len() + 1]).is_err());
                assert!(bytes.is_empty() || unpack_bzip2(&stream, &mut vec![0; bytes.len() - 1]).is_err());
            }
        }
    }

    #[test]
    fn damaged_streams_are_refused_and_end() {
        let bytes = b"cows in the shed ".repeat(50);
        let stream = packed(&bytes, "-9");
        for at in 0..stream.len() {
            for change in [1, 0x80, 0xff] {
                let mut bad = stream.clone();
                bad[at] ^= change;
                let mut out = vec![0; bytes.len()];
                // Bits behind the end mean nothing.
                assert!(unpack_bzip2(&bad, &mut out).is_err() || out == bytes, "byte {at}");
            }
            assert!(unpack_bzip2(&stream[..at], &mut vec![0; bytes.len()]).is_err(), "cut at {at}");
        }
    }
}
