// SPDX-License-Identifier: Apache-2.0 OR MIT
//! xz, for reading: the compression of Apple's disk images of the kind ULMO.

use super::bad_data;
use cowshed_types::Result;
use lzma_rust2::XzReader;
use std::io::Read;

/// The largest dictionary of a stream, with the decoder's other memory, in KiB. `xz -9` has 64 MiB. The window itself
/// grows with the output, and is no longer than that.
const MOST_MEMORY_KIB: u32 = 66 << 10;

/// Fills `out` with all that a stream holds, or fails. Its checksums must be right.
pub fn unpack_xz(packed: &[u8], out: &mut [u8]) -> Result<()> {
    let bad = |reason: &str| bad_data(packed, format!("packed data are no whole xz data of their length: {reason}"));
    let mut reader = XzReader::new_mem_limit(packed, false, MOST_MEMORY_KIB);
    let mut done = 0;
    // The end of a stream comes behind the last byte: there is room for one more, which must not come.
    let mut more = [0];
    loop {
        let room = match out.get_mut(done..) {
            Some(room) if !room.is_empty() => room,
            _ => &mut more,
        };
        match reader.read(room) {
            Ok(0) if done == out.len() => return Ok(()),
            Ok(0) => return Err(bad("there is less")),
            Ok(_) if done == out.len() => return Err(bad("there is more")),
            Ok(len) => done += len,
            Err(error) => return Err(bad(&error.to_string())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::process::{Command, Stdio};

    /// By the real xz.
    fn packed(bytes: &[u8], options: &[&str]) -> Vec<u8> {
        let mut child =
            Command::new("xz").arg("-c").args(options).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
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
        let noise: Vec<u8> = (0..150_000).map(|_| random()).collect();
        let mut mixed = b"cows in the shed ".repeat(9000);
        mixed.extend(&noise[..5000]);
        mixed.extend([7; 70_000]);
        vec![vec![], b"a".to_vec(), vec![0; 300_000], noise, mixed]
    }

    #[test]
    fn streams_of_xz_are_unpacked() {
        for bytes in contents() {
            for options in
                [&["-0"][..], &["-6"], &["-9", "--check=sha256"], &["-6", "--check=crc32", "--block-size=20000"]]
            {
                let stream = packed(&bytes, options);
                let mut out = vec![0; bytes.len()];
                unpack_xz(&stream, &mut out).unwrap();
                assert!(out == bytes, "{} bytes, {options:?}", bytes.len());
                assert!(unpack_xz(&stream, &mut vec![0; bytes.len() + 1]).is_err());
                assert!(bytes.is_empty() || unpack_xz(&stream, &mut vec![0; bytes.len() - 1]).is_err());
            }
        }
    }

    #[test]
    fn damaged_streams_are_refused_and_end() {
        let bytes = b"cows in the shed ".repeat(50);
        let stream = packed(&bytes, &["-6"]);
        for at in 0..stream.len() {
            for change in [1, 0x80, 0xff] {
                let mut bad = stream.clone();
                bad[at] ^= change;
                let mut out = vec![0; bytes.len()];
                assert!(unpack_xz(&bad, &mut out).is_err(), "byte {at}");
            }
            assert!(unpack_xz(&stream[..at], &mut vec![0; bytes.len()]).is_err(), "cut at {at}");
        }
    }

    /// The length of the dictionary is the stream's word.
    #[test]
    fn a_stream_that_wants_too_much_memory_is_refused() {
        let bytes = b"cows in the shed ".repeat(50);
        let stream = packed(&bytes, &["--lzma2=preset=6,dict=256MiB"]);
        let error = unpack_xz(&stream, &mut vec![0; bytes.len()]).unwrap_err();
        assert!(error.to_string().contains("memory"), "{error}");
    }
}
