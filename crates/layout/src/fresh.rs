// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The bytes of a new image, without the image: its pieces can be larger than memory.

/// A piece of a new file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FilePiece {
    /// These bytes.
    Bytes(Vec<u8>),
    /// One byte, this many times.
    Fill(u8, u64),
    /// This many little-endian numbers of 32 bits, from 0 on.
    Count(u32),
    /// This many little-endian numbers of 64 bits, each larger than the one before by a step.
    Numbers {
        /// The first one.
        first: u64,
        /// The difference of each number from the one before.
        step: u64,
        /// Number of entries.
        count: u64,
    },
}

impl FilePiece {
    /// Length in bytes.
    pub fn len(&self) -> u64 {
        match self {
            FilePiece::Bytes(bytes) => bytes.len() as u64,
            FilePiece::Fill(_, len) => *len,
            FilePiece::Count(numbers) => u64::from(*numbers) * 4,
            FilePiece::Numbers { count, .. } => count * 8,
        }
    }

    /// True when it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Fills `part` with the bytes from byte `at` of the piece on. They are inside of it, and at a whole number.
    pub fn fill(&self, at: u64, part: &mut [u8]) {
        match self {
            FilePiece::Bytes(bytes) => {
                let at = usize::try_from(at).unwrap_or(usize::MAX);
                if let Some(bytes) = bytes.get(at..).and_then(|rest| rest.get(..part.len())) {
                    part.copy_from_slice(bytes);
                }
            }
            FilePiece::Fill(byte, _) => part.fill(*byte),
            FilePiece::Count(_) => {
                for (index, number) in part.chunks_mut(4).enumerate() {
                    let value = ((at / 4) as u32).wrapping_add(index as u32).to_le_bytes();
                    number.copy_from_slice(&value[..number.len()]);
                }
            }
            FilePiece::Numbers { first, step, .. } => {
                for (index, number) in part.chunks_mut(8).enumerate() {
                    let value = first.wrapping_add(step.wrapping_mul(at / 8 + index as u64)).to_le_bytes();
                    number.copy_from_slice(&value[..number.len()]);
                }
            }
        }
    }
}

/// A new file. Bytes that no piece covers read as zeroes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FreshFile {
    /// Its length in bytes.
    pub len: u64,
    /// The contents that aren't zeroes, with their offsets in bytes.
    pub pieces: Vec<(u64, FilePiece)>,
    /// Written last, behind a barrier: without it the file is no image. Offset in bytes, and a sector at most.
    pub mark: Option<(u64, Vec<u8>)>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_give_their_bytes_from_anywhere() {
        let mut part = [9; 4];
        FilePiece::Bytes(vec![1, 2, 3, 4, 5]).fill(1, &mut part);
        assert_eq!(part, [2, 3, 4, 5]);
        FilePiece::Fill(7, 100).fill(50, &mut part);
        assert_eq!(part, [7; 4]);
        let mut part = [0; 8];
        FilePiece::Count(1000).fill(4 * 258, &mut part);
        assert_eq!(part, [2, 1, 0, 0, 3, 1, 0, 0]);
        let mut part = [0; 16];
        FilePiece::Numbers { first: 5, step: 256, count: 9 }.fill(8, &mut part);
        assert_eq!(part, [5, 1, 0, 0, 0, 0, 0, 0, 5, 2, 0, 0, 0, 0, 0, 0]);
        assert_eq!((FilePiece::Count(3).len(), FilePiece::Bytes(Vec::new()).is_empty()), (12, true));
    }
}
