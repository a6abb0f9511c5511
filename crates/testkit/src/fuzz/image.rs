// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Entry points of the parsers in `cowshed-image`; see `layout.rs`.

use super::replay::Entry;
use cowshed_codec::{Codec, ZlibMode, unpack_adc, unpack_bzip2, unpack_lzfse, unpack_xz};
use cowshed_image::options::{BareKey, BlockdevOptions, parse_list, parse_size};
use cowshed_types::Compression;

/// All entry points of this file.
pub const ENTRIES: &[Entry] = &[("inflate", inflate), ("unpack", unpack), ("deflate", deflate), ("options", options)];

/// 1 byte of settings, then compressed data.
pub fn inflate(data: &[u8]) {
    let [settings, compressed @ ..] = data else { return };
    let mut cluster = vec![0; 512 << (settings >> 1 & 7)];
    let compression = if settings & 1 == 0 { Compression::Zlib } else { Compression::Zstd };
    let first = Codec::new(compression).decompress(compressed, &mut cluster).map(|()| cluster.clone());
    // A failure leaves nothing behind: the same data again give the same.
    let second = Codec::new(compression).decompress(compressed, &mut cluster).map(|()| cluster);
    assert_eq!(first.ok(), second.ok());
}

/// 1 byte that chooses the packing, the length of the content, then a piece of a packed disk image.
pub fn unpack(data: &[u8]) {
    let [packing, low, high, packed @ ..] = data else { return };
    let unpack = [unpack_adc, unpack_bzip2, unpack_lzfse, unpack_xz][usize::from(packing % 4)];
    let mut content = vec![0; usize::from(u16::from_le_bytes([*low, *high]))];
    let first = unpack(packed, &mut content).map(|()| content.clone());
    // The old content of the buffer doesn't matter.
    content.fill(0xaa);
    let second = unpack(packed, &mut content).map(|()| content);
    assert_eq!(first.ok(), second.ok());
}

/// 1 byte of settings, then a cluster: its compressed bytes are fewer and inflate to itself.
pub fn deflate(data: &[u8]) {
    let [settings, source @ ..] = data else { return };
    let mut cluster = source.to_vec();
    cluster.resize(source.len().next_power_of_two().max(512), 0);
    let codec = match settings % 4 {
        0 => Codec::new(Compression::Zlib),
        1 => Codec::new(Compression::Zstd),
        2 => Codec::zlib(ZlibMode::Narrow { level: 1 + settings / 4 % 9 }).unwrap(),
        _ => Codec::zlib(ZlibMode::Fast { level: 1 + settings / 4 % 12 }).unwrap(),
    };
    let mut out = Vec::new();
    let Some(len) = codec.compress(&cluster, &mut out) else { return };
    assert!(len == out.len() && len < cluster.len());
    let mut back = vec![0xaa; cluster.len()];
    codec.decompress(&out, &mut back).unwrap();
    assert!(back == cluster);
}

/// Option strings as people type them.
pub fn options(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let _ = parse_size(text);
    let _ = BlockdevOptions::from_json_name(text);
    if let Ok(options) = BlockdevOptions::from_keyval(text) {
        let again = BlockdevOptions::from_json(&options.to_json()).unwrap();
        assert_eq!(again.to_json(), options.to_json());
    }
    let _ = parse_list(text, BareKey::Refused);
}
