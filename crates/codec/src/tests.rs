// SPDX-License-Identifier: Apache-2.0 OR MIT
use super::*;
use proptest::prelude::*;

fn all() -> Vec<Codec> {
    let mut codecs = vec![Codec::new(Compression::Zlib), Codec::new(Compression::Zstd)];
    codecs.extend((1..=9).map(|level| Codec::zlib(ZlibMode::Narrow { level }).unwrap()));
    codecs.extend((1..=12).map(|level| Codec::zlib(ZlibMode::Fast { level }).unwrap()));
    codecs.extend([-5, 1, 9, 19].map(|level| Codec::zstd(level).unwrap()));
    codecs
}

/// Bytes with the given share of repetition, without a random generator.
fn cluster(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    (0..len)
        .map(|index| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            if index % 64 < 40 {
                b"the cow jumped over the moon; the shed stood still"[index % 50]
            } else {
                (state >> 33) as u8
            }
        })
        .collect()
}

fn noise(len: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 24) as u8
    };
    (0..len).map(|_| next()).collect()
}

#[test]
fn round_trips_at_every_level_and_cluster_size() {
    let mut compressed = Vec::new();
    let defaults = [Codec::new(Compression::Zlib), Codec::new(Compression::Zstd)];
    for codec in all() {
        // The largest clusters take long at the high levels.
        let largest = if defaults.contains(&codec) { 21 } else { 17 };
        for bits in [9, 12, 16, largest] {
            let source = cluster(1 << bits, bits as u64);
            let Some(len) = codec.compress(&source, &mut compressed) else {
                assert_eq!(bits, 9, "{codec:?} must shrink a cluster of 2^{bits}");
                continue;
            };
            assert!(len == compressed.len() && len < source.len());
            let mut back = vec![0xaa; source.len()];
            // Whole sectors are read, so other data follow.
            compressed.extend_from_slice(&noise(511));
            codec.decompress(&compressed, &mut back).unwrap();
            assert!(back == source, "{codec:?} 2^{bits}");
        }
    }
}

#[test]
fn noise_does_not_shrink_and_the_codec_survives_it() {
    let mut out = Vec::new();
    for codec in all() {
        for bits in [9, 16, 17, 16] {
            assert_eq!(codec.compress(&noise(1 << bits), &mut out), None, "{codec:?}");
            assert!(out.is_empty());
            assert!(codec.compress(&vec![0; 65536], &mut out).is_some_and(|len| len < 1024));
        }
    }
}

#[test]
fn truncated_data_fail() {
    let mut out = Vec::new();
    let source = cluster(65536, 7);
    let mut back = vec![0; source.len()];
    for codec in [Codec::new(Compression::Zlib), Codec::new(Compression::Zstd)] {
        let len = codec.compress(&source, &mut out).unwrap();
        for cut in [0, 1, 2, 100, len / 2, len - 20] {
            let error = codec.decompress(&out[..cut], &mut back).unwrap_err();
            assert_eq!(error.kind(), cowshed_types::ErrorKind::InvalidImage, "{error}");
        }
    }
}

#[test]
fn a_stream_for_less_than_a_cluster_fails() {
    let mut out = Vec::new();
    let mut back = vec![0; 65536];
    for codec in [Codec::new(Compression::Zlib), Codec::new(Compression::Zstd)] {
        codec.compress(&cluster(4096, 7), &mut out).unwrap();
        let error = codec.decompress(&out, &mut back).unwrap_err();
        assert!(error.to_string().contains("inflate to 4096 bytes instead of 65536"), "{error}");
    }
}

/// The format stops "when it has produced a cluster of data": longer deflate streams, and ones without an end, are read.
#[test]
fn deflate_stops_when_the_cluster_is_full() {
    let codec = Codec::new(Compression::Zlib);
    let mut out = Vec::new();
    let source = cluster(65536, 7);
    codec.compress(&source, &mut out).unwrap();
    let mut back = vec![0; 4096];
    codec.decompress(&out, &mut back).unwrap();
    assert!(back == source[..4096]);

    let mut deflate = zlib_rs::Deflate::new(6, false, 12);
    let mut open = vec![0; 70000];
    deflate.compress(&source, &mut open, zlib_rs::DeflateFlush::SyncFlush).unwrap();
    open.truncate(deflate.total_out() as usize);
    let mut back = vec![0; source.len()];
    codec.decompress(&open, &mut back).unwrap();
    assert!(back == source);
}

#[test]
fn zstd_frames_are_joined() {
    let codec = Codec::new(Compression::Zstd);
    let (mut first, mut second) = (Vec::new(), Vec::new());
    let source = cluster(65536, 7);
    codec.compress(&source[..32768], &mut first).unwrap();
    codec.compress(&source[32768..], &mut second).unwrap();
    let mut back = vec![0; source.len()];
    codec.decompress(&[first, second].concat(), &mut back).unwrap();
    assert!(back == source);
}

#[test]
fn levels_are_checked() {
    for level in [0, 10] {
        assert!(Codec::zlib(ZlibMode::Narrow { level }).is_err());
    }
    for level in [0, 13] {
        assert!(Codec::zlib(ZlibMode::Fast { level }).is_err());
    }
    assert!(Codec::zstd(23).is_err() && Codec::zstd(22).is_ok() && Codec::zstd(i32::MIN).is_err());
}

/// Inflates in small pieces with a window of 4 KiB, as a reader that knows of no larger one.
fn inflate_narrow(compressed: &[u8], len: usize) -> Vec<u8> {
    let mut inflate = zlib_rs::Inflate::new(false, 12);
    let mut back = Vec::new();
    let mut piece = [0u8; 100];
    while back.len() < len {
        let (read, written) = (inflate.total_in() as usize, inflate.total_out() as usize);
        inflate.decompress(&compressed[read..], &mut piece, zlib_rs::InflateFlush::NoFlush).unwrap();
        let made = inflate.total_out() as usize - written;
        assert!(made > 0);
        back.extend_from_slice(&piece[..made]);
    }
    back
}

/// No match may reach back more than 4 KiB: a reader with a window of that size can inflate it.
#[test]
fn narrow_streams_stay_in_their_window() {
    let mut out = Vec::new();
    for level in 1..=9 {
        let codec = Codec::zlib(ZlibMode::Narrow { level }).unwrap();
        // The second half repeats the first at a distance of 8 KiB: out of reach.
        let block = noise(8192);
        assert_eq!(codec.compress(&[block.clone(), block].concat(), &mut out), None);
        for len in [4095, 4096] {
            let source = noise(len).repeat(4);
            let compressed = codec.compress(&source, &mut out).unwrap();
            assert!(compressed < source.len() / 3, "level {level}, distance {len}: {compressed}");
            assert!(inflate_narrow(&out, source.len()) == source);
        }
        let source = cluster(65536, level.into());
        codec.compress(&source, &mut out).unwrap();
        assert!(inflate_narrow(&out, source.len()) == source);
    }
}

/// Parts that need different blocks: stored (more than one can hold), fixed codes, own codes, long runs.
#[test]
fn narrow_mixtures_round_trip() {
    let mut out = Vec::new();
    let parts = [noise(200_000), vec![0; 70_000], cluster(300_000, 1), b"short".to_vec(), noise(10), vec![7; 3]];
    for level in 1..=9 {
        let codec = Codec::zlib(ZlibMode::Narrow { level }).unwrap();
        for shift in 0..parts.len() {
            let mut source: Vec<u8> =
                (0..parts.len()).flat_map(|index| parts[(index + shift) % parts.len()].clone()).collect();
            source.resize(1 << 20, 9);
            codec.compress(&source, &mut out).unwrap();
            // Noise is stored, everything else shrinks to little.
            assert!(out.len() < 400_000, "level {level}: {}", out.len());
            let mut back = vec![1; source.len()];
            codec.decompress(&out, &mut back).unwrap();
            assert!(back == source, "level {level}");
        }
        for len in 1..40 {
            let source = [vec![0; len], noise(len), vec![0; 512 - 2 * len]].concat();
            codec.compress(&source, &mut out).unwrap();
            let mut back = vec![1; source.len()];
            codec.decompress(&out, &mut back).unwrap();
            assert!(back == source, "level {level}, {len}");
        }
    }
}

/// Images made twice are the same: nothing of one cluster leads the next.
#[test]
fn output_depends_on_the_input_alone() {
    for codec in all() {
        let (mut first, mut second) = (Vec::new(), Vec::new());
        codec.compress(&cluster(65536, 1), &mut first).unwrap();
        codec.compress(&cluster(65536, 2), &mut second).unwrap();
        codec.compress(&cluster(65536, 1), &mut second).unwrap();
        assert!(first == second, "{codec:?}");
    }
}

/// A match that reaches back before the first byte would copy old bytes of the memory.
#[test]
fn no_stream_reaches_back_before_its_start() {
    // One block of fixed codes: a match of three bytes at distance 1, then the end.
    let stream = [0x03, 0x02, 0x00];
    let mut cluster = [0xdb; 3];
    let error = Codec::new(Compression::Zlib).decompress(&stream, &mut cluster).unwrap_err();
    assert!(error.to_string().contains("not valid"), "{error}");
    let mut with_header = vec![0x78, 0x01];
    with_header.extend_from_slice(&stream);
    with_header.extend_from_slice(&0u32.to_be_bytes());
    assert!(inflate_zlib(&with_header, &mut cluster, 3).is_err());
}

proptest! {
    #[test]
    fn any_bytes_decompress_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
        let mut out = vec![0; 4096];
        for codec in [Codec::new(Compression::Zlib), Codec::new(Compression::Zstd)] {
            let _ = codec.decompress(&bytes, &mut out);
        }
    }

    #[test]
    fn damaged_data_decompress_without_panic(at in 0usize..2000, flip in 1u8..) {
        let mut compressed = Vec::new();
        let source = cluster(4096, 3);
        let mut out = vec![0; 4096];
        for codec in [Codec::new(Compression::Zlib), Codec::new(Compression::Zstd)] {
            let len = codec.compress(&source, &mut compressed).unwrap();
            compressed[at % len] ^= flip;
            let _ = codec.decompress(&compressed, &mut out);
            // Other clusters aren't affected by a failure.
            compressed[at % len] ^= flip;
            codec.decompress(&compressed, &mut out).unwrap();
            prop_assert!(out == source);
        }
    }
}

#[test]
fn frames_of_any_bytes_are_read_back() {
    let codec = Codec::new(Compression::Zstd);
    for source in [vec![], vec![1], cluster(1 << 18, 3), noise(1 << 18), noise((1 << 17) + 1), vec![0; 300_000]] {
        let frame = codec.zstd_frame(&source).unwrap();
        assert!(frame.len() <= source.len() + 24);
        assert_eq!(::zstd_safe::find_frame_compressed_size(&frame), Ok(frame.len()));
        let mut back = vec![0xaa; source.len()];
        let len = ::zstd_safe::decompress(&mut back[..], &frame).unwrap();
        assert!(len == source.len() && back == source, "{}", source.len());
    }
    assert!(Codec::new(Compression::Zlib).zstd_frame(&[]).is_err());
}
