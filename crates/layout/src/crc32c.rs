// SPDX-License-Identifier: Apache-2.0 OR MIT
//! CRC-32C (Castagnoli, RFC 3720 appendix B.4), the checksum of VHDX, and CRC-32 (IEEE 802.3), that of GPT.

/// The polynomials, bits reversed.
const CASTAGNOLI: u32 = 0x82f6_3b78;
const IEEE: u32 = 0xedb8_8320;

static CASTAGNOLI_TABLE: [u32; 256] = table(CASTAGNOLI);
static IEEE_TABLE: [u32; 256] = table(IEEE);

const fn table(polynomial: u32) -> [u32; 256] {
    let mut table = [0; 256];
    let mut index = 0;
    while index < table.len() {
        let mut value = index as u32;
        let mut bit = 0;
        while bit < 8 {
            value = if value & 1 != 0 { value >> 1 ^ polynomial } else { value >> 1 };
            bit += 1;
        }
        table[index] = value;
        index += 1;
    }
    table
}

/// The checksum of all bytes of these slices, one after the other.
pub fn crc32c(parts: &[&[u8]]) -> u32 {
    sum(&CASTAGNOLI_TABLE, parts)
}

/// As [`crc32c`], with the polynomial of IEEE 802.3.
pub fn crc32(parts: &[&[u8]]) -> u32 {
    sum(&IEEE_TABLE, parts)
}

fn sum(table: &[u32; 256], parts: &[&[u8]]) -> u32 {
    let bytes = parts.iter().flat_map(|part| part.iter());
    !bytes.fold(!0, |sum, byte| sum >> 8 ^ table[usize::from(sum as u8 ^ byte)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_vectors_of_rfc_3720_come_out() {
        assert_eq!(crc32c(&[&[0; 32]]), 0x8a91_36aa);
        assert_eq!(crc32c(&[&[0xff; 32]]), 0x62a8_ab43);
        let rising: Vec<u8> = (0..32).collect();
        assert_eq!(crc32c(&[&rising]), 0x46dd_794e);
        assert_eq!(crc32c(&[&rising[..7], &[], &rising[7..]]), 0x46dd_794e);
        assert_eq!(crc32(&[b"1234", b"56789"]), 0xcbf4_3926);
    }
}
