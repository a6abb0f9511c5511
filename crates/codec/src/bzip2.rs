// SPDX-License-Identifier: Apache-2.0 OR MIT
//! bzip2, for reading.

use super::bad_data;
use bzip2::{Decompress, Status};
use cowshed_types::{Errno, Error, ErrorKind, Result};

/// Fills `out` with all that a stream holds, or fails.
pub fn unpack_bzip2(packed: &[u8], out: &mut [u8]) -> Result<()> {
    let bad = |reason: &str| bad_data(packed, format!("packed data are no whole bzip2 data of their length: {reason}"));
    let mut decoder = Decompress::new(false);
    let (mut read, mut written) = (0, 0);
    // The end of a stream may come behind the last byte: there is room for one more, which must not come.
    let mut more = [0];
    loop {
        let room = match out.get_mut(written..) {
            Some(room) if !room.is_empty() => room,
            _ => &mut more,
        };
        let input = packed.get(read..).unwrap_or_default();
        let status = decoder.decompress(input, room).map_err(|error| bad(&error.to_string()))?;
        let (known_read, known_written) = (read, written);
        read = usize::try_from(decoder.total_in()).unwrap_or(usize::MAX);
        written = usize::try_from(decoder.total_out()).unwrap_or(usize::MAX);
        match status {
            _ if written > out.len() => return Err(bad("there is more")),
            Status::StreamEnd if written == out.len() => return Ok(()),
            Status::StreamEnd => return Err(bad("there is less")),
            Status::MemNeeded => return Err(Error::new(ErrorKind::Io, "no memory for bzip2").with_errno(Errno::ENOMEM)),
            _ if (read, written) == (known_read, known_written) => return Err(bad("they are cut off")),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::process::{Command, Stdio};

    /// By the real bzip2.
    fn packed(bytes: &[u8], level: &str) -> Vec<u8> {
        let mut child =
            Command::new("bzip2").args(["-c", level]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
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
        let noise: Vec<u8> = (0..250_000).map(|_| random()).collect();
        let mut mixed = b"cows in the shed ".repeat(9000);
        mixed.extend(&noise[..5000]);
        mixed.extend([7; 70_000]);
        vec![vec![], b"a".to_vec(), vec![0; 300_000], b"aaaabaaaaa".to_vec(), noise, mixed, (0..=255).collect()]
    }

    #[test]
    fn streams_of_bzip2_are_unpacked() {
        for bytes in contents() {
            for level in ["-1", "-9"] {
                let stream = packed(&bytes, level);
                let mut out = vec![0; bytes.len()];
                unpack_bzip2(&stream, &mut out).unwrap();
                assert!(out == bytes, "{} bytes, {level}", bytes.len());
                assert!(unpack_bzip2(&stream, &mut vec![0; bytes.len() + 1]).is_err());
                assert!(bytes.is_empty() || unpack_bzip2(&stream, &mut vec![0; bytes.len() - 1]).is_err());
            }
        }
    }

    #[test]
    fn damaged_streams_are_refused_and_end() {
        let bytes = b"cows in the shed ".repeat(50);
        let stream = packed(&bytes, "-9");
        for at in 0..stream.len() {
            for change in [1, 0x80, 0xff] {
                let mut bad = stream.clone();
                bad[at] ^= change;
                let mut out = vec![0; bytes.len()];
                // Bits behind the end mean nothing.
                assert!(unpack_bzip2(&bad, &mut out).is_err() || out == bytes, "byte {at}");
            }
            assert!(unpack_bzip2(&stream[..at], &mut vec![0; bytes.len()]).is_err(), "cut at {at}");
        }
    }
}
