// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A plain byte model of one virtual disk without crashes.

use super::ops::Op;

/// The allowed values of every byte of a virtual disk: one value, or that value or zero where a discard left it open.
#[derive(Clone, Debug, Default)]
pub struct Content {
    bytes: Vec<u8>,
    may_be_zero: Vec<bool>,
}

impl Content {
    /// A disk that reads as `bytes`.
    pub fn of(bytes: Vec<u8>) -> Self {
        let may_be_zero = vec![false; bytes.len()];
        Content { bytes, may_be_zero }
    }

    /// The view of a new overlay of `size` bytes on top of this disk.
    pub fn overlay(&self, size: u64) -> Self {
        let mut overlay = self.clone();
        overlay.resize(size);
        overlay
    }

    /// Size in bytes.
    pub fn len(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// True for a disk of 0 bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Carries out one operation.
    pub fn apply(&mut self, op: &Op) {
        match *op {
            Op::Write { offset, len, texture } | Op::WriteCompressed { offset, len, texture } => {
                let range = offset as usize..(offset + len) as usize;
                texture.fill(&mut self.bytes[range.clone()]);
                self.may_be_zero[range].fill(false);
            }
            Op::WriteZeroes { offset, len, .. } => {
                let range = offset as usize..(offset + len) as usize;
                self.bytes[range.clone()].fill(0);
                self.may_be_zero[range].fill(false);
            }
            Op::Discard { offset, len } => self.may_be_zero[offset as usize..(offset + len) as usize].fill(true),
            Op::Resize { size, .. } => self.resize(size),
            Op::Flush => {}
        }
    }

    /// Takes read bytes as the truth where a discard had left them open. `Err` names the first byte that can't be.
    pub fn adopt_read(&mut self, read: &[u8]) -> Result<(), String> {
        if read.len() != self.bytes.len() {
            return Err(format!("{} bytes long instead of {}", read.len(), self.bytes.len()));
        }
        let wrong = (0..read.len()).find(|&i| read[i] != self.bytes[i] && !(self.may_be_zero[i] && read[i] == 0));
        if let Some(at) = wrong {
            let last = (at..read.len()).take_while(|&i| read[i] != self.bytes[i]).last().unwrap_or(at);
            return Err(format!(
                "byte {at:#x} is {:#04x} instead of {:#04x}{} (wrong up to {last:#x})",
                read[at],
                self.bytes[at],
                if self.may_be_zero[at] { " or 0" } else { "" }
            ));
        }
        self.bytes.copy_from_slice(read);
        self.may_be_zero.fill(false);
        Ok(())
    }

    fn resize(&mut self, size: u64) {
        self.bytes.resize(size as usize, 0);
        self.may_be_zero.resize(size as usize, false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_discarded_byte_is_old_or_zero_and_nothing_else() {
        let mut content = Content::of(vec![7; 1024]);
        content.apply(&Op::Discard { offset: 512, len: 512 });
        let mut read = vec![7; 1024];
        read[600] = 0;
        assert_eq!(content.clone().adopt_read(&read), Ok(()));
        read[600] = 9;
        assert!(content.clone().adopt_read(&read).is_err());
        read[600] = 7;
        read[0] = 0;
        assert!(content.clone().adopt_read(&read).is_err());
        assert!(content.adopt_read(&read[1..]).is_err());
    }

    #[test]
    fn a_longer_overlay_reads_zero_behind_its_backing_file() {
        let overlay = Content::of(vec![3; 512]).overlay(1024);
        let mut expected = vec![3; 512];
        expected.resize(1024, 0);
        assert_eq!(overlay.bytes, expected);
    }
}
