// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The bytes of stream-optimised disks. Grains come behind their first sector and length. Tables, the grain directory,
//! a footer with the place of that, and a mark of the end follow. A sector with a marker comes before each of these.

use super::SECTOR_BYTES;

const SECTOR: usize = SECTOR_BYTES as usize;
const MARKER_TABLE: u32 = 1;
const MARKER_DIRECTORY: u32 = 2;
const MARKER_FOOTER: u32 = 3;
/// Offset of the header's flags.
const FLAGS_AT: usize = 8;
/// Offset of the header's field for the second grain directory.
const REDUNDANT_AT: usize = 48;
/// Offset of the header's field for the grain directory.
const DIRECTORY_AT: usize = 56;
/// The only flag of the lowest byte that is for streams: the line ends are tested.
const FLAG_NEWLINE_TEST: u8 = 1;
/// Deflate with a window of 32 KiB at most, no dictionary: RFC 1950.
const ZLIB_HEADER: [u8; 2] = [0x78, 0x01];
/// Longest stored block of deflate.
const MAX_STORED: usize = 0xffff;

/// The bytes of a grain in the file, whole sectors. `packed`: its deflate stream, unless that is longer than the grain.
pub fn stream_grain(first_sector: u64, grain: &[u8], packed: Option<&[u8]>) -> Vec<u8> {
    let mut data = ZLIB_HEADER.to_vec();
    match packed {
        Some(packed) => data.extend_from_slice(packed),
        None => {
            let blocks = grain.chunks(MAX_STORED);
            let last = blocks.len().saturating_sub(1);
            for (index, block) in blocks.enumerate() {
                let len = block.len() as u16;
                data.push(u8::from(index == last));
                data.extend_from_slice(&len.to_le_bytes());
                data.extend_from_slice(&(!len).to_le_bytes());
                data.extend_from_slice(block);
            }
        }
    }
    data.extend_from_slice(&adler32(grain).to_be_bytes());
    let mut bytes = first_sector.to_le_bytes().to_vec();
    bytes.extend_from_slice(&(data.len() as u32).to_le_bytes());
    bytes.extend_from_slice(&data);
    bytes.resize(bytes.len().next_multiple_of(SECTOR), 0);
    bytes
}

/// Adler-32 (RFC 1950).
fn adler32(bytes: &[u8]) -> u32 {
    const PRIME: u32 = 65_521;
    let (mut low, mut high) = (1, 0);
    // So many additions don't overflow.
    for part in bytes.chunks(5552) {
        for byte in part {
            low += u32::from(*byte);
            high += low;
        }
        low %= PRIME;
        high %= PRIME;
    }
    high << 16 | low
}

/// A sector that describes the next sectors.
fn marker(sectors: u64, kind: u32) -> Vec<u8> {
    let mut bytes = vec![0; SECTOR];
    bytes[..8].copy_from_slice(&sectors.to_le_bytes());
    bytes[12..16].copy_from_slice(&kind.to_le_bytes());
    bytes
}

/// The parts of the file behind the grains.
pub mod stream_end {
    use super::{
        DIRECTORY_AT, FLAG_NEWLINE_TEST, FLAGS_AT, MARKER_DIRECTORY, MARKER_FOOTER, MARKER_TABLE, REDUNDANT_AT, SECTOR,
        marker,
    };

    /// Sectors behind the grain directory: the footer behind its marker, and the mark of the end.
    pub const FOOTER_SECTORS: u64 = 3;

    fn words(words: &[u32]) -> Vec<u8> {
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.resize(bytes.len().next_multiple_of(SECTOR), 0);
        bytes
    }

    /// A header of a sector whose directories are given up for one behind the grains.
    pub fn header(old: &[u8]) -> Vec<u8> {
        let mut header = old.to_vec();
        header.resize(SECTOR, 0);
        header[FLAGS_AT] &= FLAG_NEWLINE_TEST;
        header[REDUNDANT_AT..REDUNDANT_AT + 8].fill(0);
        header[DIRECTORY_AT..DIRECTORY_AT + 8].fill(0xff);
        header
    }

    /// A grain table behind its marker.
    pub fn table(entries: &[u32]) -> Vec<u8> {
        let table = words(entries);
        let mut bytes = marker((table.len() / SECTOR) as u64, MARKER_TABLE);
        bytes.extend_from_slice(&table);
        bytes
    }

    /// The grain directory, the footer and the end. `at`: the sector where this begins; `header`: that of the file.
    pub fn directory(entries: &[u32], at: u64, header: &[u8]) -> Vec<u8> {
        let directory = words(entries);
        let mut bytes = marker((directory.len() / SECTOR) as u64, MARKER_DIRECTORY);
        bytes.extend_from_slice(&directory);
        bytes.extend_from_slice(&marker(1, MARKER_FOOTER));
        let mut footer = header.to_vec();
        footer.resize(SECTOR, 0);
        footer[DIRECTORY_AT..DIRECTORY_AT + 8].copy_from_slice(&(at + 1).to_le_bytes());
        bytes.extend_from_slice(&footer);
        // The marker of the end is zeroes.
        bytes.resize(bytes.len() + SECTOR, 0);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::super::{CompressedGrain, SparseHeader};
    use super::*;

    #[test]
    fn checksums_are_those_of_rfc_1950() {
        assert_eq!(adler32(b""), 1);
        assert_eq!(adler32(b"Wikipedia"), 0x11e6_0398);
    }

    #[test]
    fn grains_fill_sectors() {
        let grain = vec![7; 65_536];
        let stored = stream_grain(128, &grain, None);
        let header = CompressedGrain::parse(&stored).unwrap();
        assert_eq!((header.first_sector, header.data_bytes), (128, 65_536 + 2 + 10 + 4));
        assert_eq!(stored.len() % 512, 0);
        assert_eq!((stored[12..14].to_vec(), stored[14], stored[14 + 5 + 65_535]), (vec![0x78, 1], 0, 1));
        let packed = stream_grain(0, &grain, Some(&[1, 2, 3]));
        assert_eq!((packed.len(), CompressedGrain::parse(&packed).unwrap().data_bytes), (512, 9));
    }

    #[test]
    fn the_footer_is_where_readers_look() {
        let mut header = vec![0; 512];
        header[..4].copy_from_slice(b"KDMV");
        header[4] = 3;
        header[8..12].copy_from_slice(&0x3_0001u32.to_le_bytes());
        header[12] = 200;
        header[20] = 128;
        header[45] = 2;
        header[56..64].fill(0xff);
        header[73..79].copy_from_slice(b"\n \r\n\x01\0");
        let end = stream_end::directory(&[9, 0], 50, &header);
        assert_eq!(end.len(), 5 * 512);
        let footer = SparseHeader::parse(&end[end.len() - 1024..]).unwrap();
        assert_eq!((footer.directory_sector, footer.compressed), (Some(51), true));
        assert_eq!(stream_end::table(&[1; 512]).len(), 512 + 2048);
    }
}
