// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Replays the fuzzer's inputs, slightly mutated, on a stable compiler and with the same result every time.

use std::path::{Path, PathBuf};

/// Name (also of the folder under `corpus/` and `regressions/`) and function.
pub type Entry = (&'static str, fn(&[u8]));

/// Every file of an entry's folders under `fuzz/corpus` and `fuzz/regressions`, in order.
///
/// # Panics
/// If there is none, or a file can't be read.
pub fn inputs(entry: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let fuzz = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz");
    let mut inputs = Vec::new();
    for folder in ["corpus", "regressions"] {
        let Ok(files) = std::fs::read_dir(fuzz.join(folder).join(entry)) else { continue };
        for file in files {
            let path = file.unwrap().path();
            let bytes = std::fs::read(&path).unwrap();
            inputs.push((path, bytes));
        }
    }
    assert!(!inputs.is_empty(), "no corpus for {entry}");
    inputs.sort();
    inputs
}

/// Calls each entry on its inputs.
///
/// # Panics
/// If an entry does.
pub fn replay(entries: &[Entry]) {
    for (name, entry) in entries {
        for (path, bytes) in inputs(name) {
            eprintln!("{}", path.display());
            entry(&bytes);
        }
    }
}

/// Calls an entry on `rounds` mutations of its inputs, `COWSHED_FUZZ_FACTOR` times as many where that is set. A panic
/// has the seed by which the bytes are made again.
///
/// # Panics
/// If an entry does, or the variable holds no number.
pub fn mutate(entries: &[Entry], rounds: u32) {
    let factor = std::env::var("COWSHED_FUZZ_FACTOR").map_or(1, |factor| factor.parse().expect("a number"));
    let rounds = rounds.saturating_mul(factor);
    for (name, entry) in entries {
        let inputs = inputs(name);
        let mut random = Random(0x5eed_0000_0000_0001);
        for round in 0..rounds {
            let seed = random.0;
            let mut bytes = inputs[random.below(inputs.len())].1.clone();
            for _ in 0..1 + random.below(6) {
                random.damage(&mut bytes);
            }
            let result = std::panic::catch_unwind(|| entry(&bytes));
            if result.is_err() {
                let path = std::env::temp_dir().join(format!("{name}-{seed:016x}"));
                std::fs::write(&path, &bytes).unwrap();
                panic!("entry {name}, round {round}: the input is in {}", path.display());
            }
        }
    }
}

/// xorshift64*: the tests must not depend on a crate that may change its numbers.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }

    /// One change: a bit, a byte, a number at the edge of its range, a cut, a repetition.
    fn damage(&mut self, bytes: &mut Vec<u8>) {
        // Half of the changes go to the first 160 bytes: headers decide most.
        let near = if self.next() & 1 == 0 { bytes.len().min(160) } else { bytes.len() };
        let at = self.below(near);
        match self.below(8) {
            0 | 1 => bytes.iter_mut().skip(at).take(1).for_each(|byte| *byte ^= 1 << self.below(8)),
            2 => bytes.iter_mut().skip(at).take(1).for_each(|byte| *byte = self.next() as u8),
            3 | 4 => {
                let edges = [
                    0,
                    1,
                    8,
                    0x7f,
                    0xff,
                    0x200,
                    0x1_0000,
                    1 << 31,
                    u64::from(u32::MAX),
                    1 << 56,
                    1 << 62,
                    1 << 63,
                    u64::MAX,
                ];
                let number = edges[self.below(edges.len())].wrapping_sub((self.next() & 3) / 3);
                let width = [1, 2, 4, 8][self.below(4)];
                let at = at / width * width;
                let number = &number.to_be_bytes()[8 - width..];
                bytes.iter_mut().skip(at).zip(number).for_each(|(byte, new)| *byte = *new);
            }
            5 => bytes.truncate(at),
            6 => {
                let end = (at + 1 + self.below(64)).min(bytes.len());
                let piece = bytes.get(at..end).unwrap_or_default().to_vec();
                let to = self.below(bytes.len());
                bytes.splice(to..to, piece);
            }
            _ => bytes.extend((0..self.below(32)).map(|index| (index as u8).wrapping_mul(37))),
        }
    }
}
