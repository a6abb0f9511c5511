// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A writer that compresses to a gzip file.

use std::io::{self, Write};
use zlib_rs::{Deflate, DeflateFlush, Status};

/// The largest window, and gzip's frame around the data.
const WINDOW_BITS: u8 = 15 + 16;
/// Fast: most of such an archive is zeroes that were left out before.
const LEVEL: i32 = 3;

/// Compresses all that is written to it.
pub struct Gzip<W> {
    writer: W,
    deflate: Deflate,
    out: Vec<u8>,
}

impl<W: Write> Gzip<W> {
    /// An empty one.
    pub fn new(writer: W) -> Self {
        Gzip { writer, deflate: Deflate::new(LEVEL, true, WINDOW_BITS), out: vec![0; 256 << 10] }
    }

    /// Ends the file, and returns the writer.
    pub fn finish(mut self) -> io::Result<W> {
        while self.step(&[], DeflateFlush::Finish)?.1 != Status::StreamEnd {}
        Ok(self.writer)
    }

    fn step(&mut self, bytes: &[u8], flush: DeflateFlush) -> io::Result<(usize, Status)> {
        let (read, written) = (self.deflate.total_in(), self.deflate.total_out());
        let status = self.deflate.compress(bytes, &mut self.out, flush);
        let status = status.map_err(|error| io::Error::other(error.as_str()))?;
        let written = (self.deflate.total_out() - written) as usize;
        self.writer.write_all(&self.out[..written])?;
        Ok(((self.deflate.total_in() - read) as usize, status))
    }
}

impl<W: Write> Write for Gzip<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.is_empty() {
            return Ok(0);
        }
        loop {
            let (read, _) = self.step(bytes, DeflateFlush::NoFlush)?;
            if read != 0 {
                return Ok(read);
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.writer.flush()
    }
}
