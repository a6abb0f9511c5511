// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Apple Data Compression, of old disk images: literals, and copies of earlier bytes.

use super::bad_data;
use cowshed_types::Result;

/// Fills `out`, or fails.
pub fn unpack_adc(packed: &[u8], out: &mut [u8]) -> Result<()> {
    let (mut at, mut done) = (0, 0);
    let bad = || bad_data(packed, "packed data are no ADC data".to_owned());
    while done < out.len() {
        let byte = *packed.get(at).ok_or_else(bad)?;
        let operand = |index: usize| packed.get(at + index).map(|&byte| usize::from(byte)).ok_or_else(bad);
        let (len, distance, used) = match byte {
            0x80.. => {
                let len = usize::from(byte & 0x7f) + 1;
                let literal = packed.get(at + 1..at + 1 + len).ok_or_else(bad)?;
                out.get_mut(done..done + len).ok_or_else(bad)?.copy_from_slice(literal);
                (done, at) = (done + len, at + 1 + len);
                continue;
            }
            0x40.. => (usize::from(byte & 0x3f) + 4, (operand(1)? << 8 | operand(2)?) + 1, 3),
            _ => (usize::from(byte >> 2) + 3, (usize::from(byte & 3) << 8 | operand(1)?) + 1, 2),
        };
        if distance > done || len > out.len() - done {
            return Err(bad());
        }
        for index in done..done + len {
            out[index] = out[index - distance];
        }
        (done, at) = (done + len, at + used);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn literals_and_copies_are_unpacked() {
        let mut out = [0; 14];
        unpack_adc(&[0x82, b'a', b'b', b'c', 0x00, 2, 0x40, 0, 0, 0x83, b'w', b'x', b'y', b'z'], &mut out).unwrap();
        assert_eq!(&out, b"abcabcccccwxyz");
    }

    #[test]
    fn hostile_data_are_refused() {
        for packed in [&[][..], &[0x83, 1], &[0x00, 0], &[0x40, 0], &[0x80, 1, 0x00, 1], &[0xff; 200]] {
            assert!(unpack_adc(packed, &mut [0; 20]).is_err(), "{packed:?}");
        }
    }
}
