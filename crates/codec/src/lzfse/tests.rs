// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Streams of the crate `lzfse_rust`, an independent encoder, and blocks made by hand.

use super::*;
use proptest::prelude::*;

fn packed(bytes: &[u8]) -> Vec<u8> {
    let mut stream = Vec::new();
    lzfse_rust::encode_bytes(bytes, &mut stream).unwrap();
    stream
}

fn unpacked(stream: &[u8], len: usize) -> Result<Vec<u8>> {
    let mut out = vec![0xa5; len];
    unpack_lzfse(stream, &mut out).map(|()| out)
}

/// A generator of numbers below a bound.
fn numbers(seed: u64) -> impl FnMut(usize) -> usize {
    let mut state = seed.wrapping_mul(2).wrapping_add(1);
    move |bound| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize % bound
    }
}

/// Noise of a few letters, runs, and copies from near and far.
fn content(seed: u64, len: usize) -> Vec<u8> {
    let mut number = numbers(seed);
    let letters = [2, 5, 30, 256][number(4)];
    let mut bytes = Vec::with_capacity(len);
    while bytes.len() < len {
        match number(3) {
            0 if !bytes.is_empty() => {
                let distance = 1 + number(bytes.len());
                let most = [40, 4000][number(2)];
                let count = 1 + number(most);
                for _ in 0..count {
                    bytes.push(bytes[bytes.len() - distance]);
                }
            }
            1 => (0..number(300)).for_each(|_| bytes.push(number(letters) as u8)),
            _ => bytes.resize(bytes.len() + number(60), number(256) as u8),
        }
    }
    bytes.truncate(len);
    bytes
}

/// The stream without its end.
fn open_end(stream: &[u8]) -> &[u8] {
    stream.strip_suffix(&END).unwrap()
}

/// A stream of one block with coded counts, with 16-bit counts instead.
fn widened(stream: &[u8]) -> Vec<u8> {
    let mut input = Input { bytes: stream };
    assert_eq!(input.array(), Ok(NARROW));
    let block = Block::narrow(&mut input).unwrap();
    let mut wide = WIDE.to_vec();
    let lengths = [
        block.len,
        block.literal_bytes + block.match_bytes,
        block.literals,
        block.matches,
        block.literal_bytes,
        block.match_bytes,
    ];
    lengths.iter().for_each(|&len| wide.extend((len as u32).to_le_bytes()));
    wide.extend((-(block.literal_spare as i32)).to_le_bytes());
    block.literal_states.iter().for_each(|&state| wide.extend((state as u16).to_le_bytes()));
    wide.extend((-(block.match_spare as i32)).to_le_bytes());
    block.match_states.iter().for_each(|&state| wide.extend((state as u16).to_le_bytes()));
    block.counts.iter().for_each(|count| wide.extend(count.to_le_bytes()));
    wide.resize(WIDE_HEADER_BYTES, 0);
    wide.extend(input.bytes);
    wide
}

#[test]
fn streams_of_another_encoder_are_unpacked() {
    let mut kinds = std::collections::BTreeSet::new();
    for seed in 0..200 {
        let len = numbers(seed)([30, 4000, 70_000, 300_000][seed as usize % 4]);
        let bytes = content(seed, len);
        let stream = packed(&bytes);
        kinds.insert(stream[..4].to_vec());
        assert!(unpacked(&stream, len).unwrap() == bytes, "seed {seed}, {len} bytes");
        // Bytes behind the end mean nothing; another length is refused.
        assert!(unpacked(&[&stream[..], b"bvx-"].concat(), len).unwrap() == bytes, "seed {seed}");
        assert!(unpacked(&stream, len + 1).is_err(), "seed {seed}");
        assert!(len == 0 || unpacked(&stream, len - 1).is_err(), "seed {seed}");
    }
    assert!([STORED, LZVN, NARROW].iter().all(|kind| kinds.contains(&kind[..])), "{kinds:?}");
}

#[test]
fn blocks_of_all_kinds_stand_in_one_stream() {
    let (short, noise) = (content(9, 900), (0..50u8).map(|at| at.wrapping_mul(37)).collect::<Vec<u8>>());
    let long = b"cows in the shed, and a few more of them in the field. ".repeat(200);
    let streams = [packed(&short), packed(&noise), packed(&long), widened(&packed(&long))];
    assert_eq!(
        streams.each_ref().map(|stream| stream[..4].to_vec()),
        [LZVN, STORED, NARROW, WIDE].map(|kind| kind.to_vec())
    );
    let all = [open_end(&streams[0]), open_end(&streams[1]), open_end(&streams[2]), &streams[3]].concat();
    let bytes = [&short[..], &noise, &long, &long].concat();
    assert!(unpacked(&all, bytes.len()).unwrap() == bytes);
}

#[test]
fn cut_off_streams_are_refused() {
    let long = content(3, 30_000);
    for stream in [packed(&long), widened(&packed(&long[..20_000])), packed(&long[..700]), packed(&long[..10])] {
        for end in 0..stream.len() {
            assert!(unpacked(&stream[..end], long.len()).is_err(), "cut at {end}");
        }
    }
}

/// A damaged stream is refused, or turns into other bytes of the same number: nothing in it is a checksum.
#[test]
fn damaged_streams_end() {
    for (seed, len) in [(1, 20_000), (2, 700), (3, 40)] {
        let stream = packed(&content(seed, len));
        let streams = if stream.starts_with(&NARROW) { vec![widened(&stream), stream] } else { vec![stream] };
        for stream in streams {
            // All of the headers, and places in the rest.
            for at in (0..stream.len().min(900)).chain((900..stream.len()).step_by(97)) {
                for change in [1, 0x10, 0x80, 0xff] {
                    let mut bad = stream.clone();
                    bad[at] ^= change;
                    let _ = unpacked(&bad, len);
                }
            }
        }
    }
}

/// A block of opcodes with this many bytes of output.
fn opcodes(opcodes: &[u8], len: u32) -> Vec<u8> {
    let payload = [opcodes, &[6, 0, 0, 0, 0, 0, 0, 0]].concat();
    let header = [&LZVN[..], &len.to_le_bytes(), &(payload.len() as u32).to_le_bytes()].concat();
    [&header[..], &payload, &END].concat()
}

#[test]
fn each_opcode_says_what_it_should() {
    let many: Vec<u8> = (0..16 + 255).map(|at| at as u8).collect();
    let cases: [(&[u8], &[u8]); 9] = [
        (&[0xe3, b'a', b'b', b'c'], b"abc"),
        (&[0x0e, 0x16, 0xe1, b'a'], b"a"),
        // Three literals and a match of 4 at distance 2.
        (&[0b1100_1000, 2, b'a', b'b', b'c'], b"abcbcbc"),
        // The same with a distance of 16 bits.
        (&[0b1100_1111, 2, 0, b'a', b'b', b'c'], b"abcbcbc"),
        // The same with one of 14 bits, and a match of 7.
        (&[0b1011_1001, 2 << 2, 0, b'a', b'b', b'c'], b"abcbcbcbcb"),
        // Then again at that distance, without literals and with one.
        (&[0b1100_1000, 2, b'a', b'b', b'c', 0xf3], b"abcbcbcbcb"),
        (&[0b1100_1000, 2, b'a', b'b', b'c', 0b0100_0110, b'd'], b"abcbcbcdcdc"),
        // A long match, of 16 bytes.
        (&[0b0100_0000, 1, b'a', 0xf0, 0], b"aaaaaaaaaaaaaaaaaaaa"),
        (&[&[0xe0, 255][..], &many].concat(), &many),
    ];
    for (packed, bytes) in cases {
        let stream = opcodes(packed, bytes.len() as u32);
        assert_eq!(unpacked(&stream, bytes.len()).unwrap(), bytes, "{packed:02x?}");
    }
}

#[test]
fn opcodes_that_lead_nowhere_are_refused() {
    let refused = |packed: &[u8], len: u32, word: &str| {
        let error = unpacked(&opcodes(packed, len), len as usize).unwrap_err().to_string();
        assert!(error.contains(word), "{packed:02x?}: no '{word}' in {error}");
    };
    for opcode in (0x70..=0x7f).chain(0xd0..=0xdf).chain([0x1e, 0x26, 0x2e, 0x36, 0x3e]) {
        refused(&[opcode, 1, 1, 1, 1], 3, "an opcode isn't known");
    }
    // Before the first byte, at no distance, and at that of no match before.
    refused(&[0b0100_0000, 2, b'a'], 4, "before the first byte");
    refused(&[0b0100_0000, 0, b'a'], 4, "before the first byte");
    refused(&[0xe1, b'a', 0xf1], 2, "before the first byte");
    // More than the block's length, less, and behind its end.
    refused(&[0xe3, 1, 2, 3], 2, "there is more");
    refused(&[0b0100_0000, 1, b'a'], 3, "there is more");
    refused(&[0xe3, 1, 2, 3], 4, "shorter than it says");
    refused(&[6, 0, 0, 0, 0, 0, 0, 0], 0, "behind its last opcode");
    refused(&[0xef, 1, 2, 3], 15, "cut off");
}

/// A block that holds `abcabcabcabcabca…`, to change.
fn plain() -> (Vec<u8>, usize) {
    let bytes = b"abc, and then abd; ".repeat(300);
    (widened(&packed(&bytes)), bytes.len())
}

#[test]
fn headers_that_lie_are_refused() {
    let (good, len) = plain();
    let refused = |at: usize, bytes: &[u8], word: &str| {
        let mut bad = good.clone();
        bad[at..at + bytes.len()].copy_from_slice(bytes);
        let error = unpacked(&bad, len).unwrap_err().to_string();
        assert!(error.contains(word), "at {at}: no '{word}' in {error}");
    };
    assert!(unpacked(&good, len).is_ok());
    refused(0, b"bvx3", "an unknown mark");
    refused(4, &(len as u32 - 1).to_le_bytes(), "there is more");
    refused(4, &(len as u32 + 1).to_le_bytes(), "there is more");
    refused(4, &u32::MAX.to_le_bytes(), "there is more");
    refused(12, &40_001u32.to_le_bytes(), "too many literals");
    refused(12, &u32::MAX.to_le_bytes(), "too many literals");
    refused(16, &10_001u32.to_le_bytes(), "too many literals or matches");
    refused(16, &9_999u32.to_le_bytes(), "there is more");
    refused(16, &1u32.to_le_bytes(), "shorter than it says");
    refused(12, &0u32.to_le_bytes(), "too few literals");
    refused(20, &u32::MAX.to_le_bytes(), "cut off");
    refused(24, &u32::MAX.to_le_bytes(), "cut off");
    for spare in [28, 40] {
        refused(spare, &(-8i32).to_le_bytes(), "ends in a wrong way");
        refused(spare, &1i32.to_le_bytes(), "ends in a wrong way");
        refused(spare, &i32::MIN.to_le_bytes(), "ends in a wrong way");
    }
    refused(32, &1024u16.to_le_bytes(), "a state is out of range");
    for state in [44, 46, 48] {
        refused(state, &u16::MAX.to_le_bytes(), "a state is out of range");
    }
    for symbol in [0, LENGTH_SYMBOLS, 2 * LENGTH_SYMBOLS, 2 * LENGTH_SYMBOLS + DISTANCE_SYMBOLS] {
        refused(WIDE_COUNTS_AT + 2 * symbol, &2000u16.to_le_bytes(), "don't fit");
    }
    let all_zero = vec![0; 2 * ALL_SYMBOLS];
    refused(WIDE_COUNTS_AT, &all_zero, "don't fit");
}

#[test]
fn coded_counts_that_lie_are_refused() {
    let bytes = b"abc, and then abd; ".repeat(300);
    let good = packed(&bytes);
    assert_eq!(good[..4], NARROW);
    let size = u32::from_le_bytes(good[24..28].try_into().unwrap());
    for (size, word) in
        [(0, "too short"), (31, "too short"), (32, "don't fit"), (size - 1, ""), (size + 1, ""), (u32::MAX, "cut off")]
    {
        let mut bad = good.clone();
        bad[24..28].copy_from_slice(&size.to_le_bytes());
        let error = unpacked(&bad, bytes.len()).unwrap_err().to_string();
        assert!(error.contains(word), "{size}: no '{word}' in {error}");
    }
}

#[test]
fn counts_are_read_as_they_are_coded() {
    // 0 to 8, 23, 24 and 1047, the first bit lowest.
    let codes: [(u32, u32, u16); 12] = [
        (0b00, 2, 0),
        (0b10, 2, 1),
        (0b001, 3, 2),
        (0b101, 3, 3),
        (0b00011, 5, 4),
        (0b01011, 5, 5),
        (0b10011, 5, 6),
        (0b11011, 5, 7),
        (0b0000_0111, 8, 8),
        (0b1111_0111, 8, 23),
        (0b1111, 14, 24),
        (0b11_1111_1111_1111, 14, 1047),
    ];
    let (mut coded, mut word, mut have) = (Vec::new(), 0u64, 0);
    for &(code, bits, _) in codes.iter().cycle().take(ALL_SYMBOLS) {
        word |= u64::from(code) << have;
        have += bits;
        while have >= 8 {
            coded.push(word as u8);
            (word, have) = (word >> 8, have - 8);
        }
    }
    coded.push(word as u8);
    let expected: Vec<u16> = codes.iter().map(|code| code.2).cycle().take(ALL_SYMBOLS).collect();
    assert_eq!(entropy::counts(&coded).unwrap().to_vec(), expected);
}

proptest! {
    #[test]
    fn any_bytes_end(mut bytes in proptest::collection::vec(any::<u8>(), 0..2000), kind in 0usize..4, len in 0usize..5000) {
        let mark = [STORED, LZVN, WIDE, NARROW][kind];
        bytes.splice(0..bytes.len().min(4), mark);
        let _ = unpacked(&bytes, len);
    }

    #[test]
    fn any_opcodes_end(bytes in proptest::collection::vec(any::<u8>(), 0..500), len in 0u32..2000) {
        let _ = unpacked(&opcodes(&bytes, len), len as usize);
    }
}
