// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Compression and decompression of clusters.
//!
//! A [`Codec`] is a few bytes of settings. The working memory is kept per thread: any thread may use any codec, and
//! only the first cluster on a thread pays for it.

mod adc;
mod bzip2;
mod deflate;
mod lzfse;
mod stored;
#[cfg(not(feature = "zstd"))]
mod without_zstd;
mod xz;
mod zlib;
#[cfg(feature = "zstd")]
mod zstd;

use cowshed_types::{Compression, Error, Result};

pub use adc::unpack_adc;
pub use bzip2::unpack_bzip2;
pub use lzfse::unpack_lzfse;
#[cfg(not(feature = "zstd"))]
use without_zstd as zstd;
pub use xz::unpack_xz;
pub use zlib::{ZlibMode, inflate_zlib};

/// Compresses and decompresses clusters of one image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Codec {
    method: Method,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Method {
    Zlib(ZlibMode),
    Zstd { level: i32 },
}

impl Codec {
    /// The codec of a compression type with its default effort: sizes about as QEMU's.
    pub fn new(compression: Compression) -> Self {
        match compression {
            Compression::Zlib => Codec { method: Method::Zlib(ZlibMode::DEFAULT) },
            Compression::Zstd => Codec { method: Method::Zstd { level: zstd::LEVEL_DEFAULT } },
        }
    }

    /// A codec with a chosen effort. `level`: for zlib 1–9, with `wide_window` 1–12; for zstd 1–22 and negative ones;
    /// `None` for the default. `wide_window` is a choice of zlib alone: see [`ZlibMode::Fast`].
    pub fn with_effort(compression: Compression, level: Option<i32>, wide_window: bool) -> Result<Self> {
        // A level that doesn't fit is out of every encoder's range: 0 is refused below.
        let zlib_level = |default: u8| level.map_or(default, |level| u8::try_from(level).unwrap_or(0));
        match (compression, wide_window) {
            (Compression::Zlib, false) => Self::zlib(ZlibMode::Narrow { level: zlib_level(zlib::NARROW_LEVEL) }),
            (Compression::Zlib, true) => Self::zlib(ZlibMode::Fast { level: zlib_level(zlib::WIDE_LEVEL) }),
            (Compression::Zstd, false) => Self::zstd(level.unwrap_or(zstd::LEVEL_DEFAULT)),
            (Compression::Zstd, true) => {
                Err(Error::invalid_argument("the compression window can be chosen for compression type zlib only"))
            }
        }
    }

    /// Deflate with a chosen encoder. Fails on a level outside of the encoder's range.
    pub fn zlib(mode: ZlibMode) -> Result<Self> {
        mode.validate()?;
        Ok(Codec { method: Method::Zlib(mode) })
    }

    /// Zstandard at a level: 1–22, negative ones for speed. Fails on one that the library doesn't have.
    pub fn zstd(level: i32) -> Result<Self> {
        zstd::validate_level(level)?;
        Ok(Codec { method: Method::Zstd { level } })
    }

    /// The compression type in the header of images that use this codec.
    pub fn compression(&self) -> Compression {
        match self.method {
            Method::Zlib(_) => Compression::Zlib,
            Method::Zstd { .. } => Compression::Zstd,
        }
    }

    /// Compresses one whole cluster into `out`, whose old content is dropped. `Some(len)` with `len == out.len()`,
    /// less than the cluster, or `None` when the cluster doesn't shrink and is to be stored as it is.
    pub fn compress(&self, cluster: &[u8], out: &mut Vec<u8>) -> Option<usize> {
        // One byte less than the cluster: a longer result isn't worth it, and the encoder stops early.
        let room = cluster.len().checked_sub(1)?;
        out.clear();
        out.resize(room, 0);
        let len = match self.method {
            Method::Zlib(mode) => zlib::compress(mode, cluster, out),
            Method::Zstd { level } => zstd::compress(level, cluster, out),
        };
        out.truncate(len.unwrap_or(0));
        len
    }

    /// One whole zstd frame of these bytes, at the level of the codec. Bytes that don't shrink are in it as they are.
    /// Frames behind one another are a zstd file of all their bytes.
    ///
    /// # Errors
    /// Where the codec is another one, or there are too many bytes for one frame (4 GiB).
    pub fn zstd_frame(&self, bytes: &[u8]) -> Result<Vec<u8>> {
        let Method::Zstd { level } = self.method else {
            return Err(Error::internal("a zstd frame by a codec of zlib"));
        };
        zstd::validate_level(level)?;
        let mut frame = Vec::new();
        if self.compress(bytes, &mut frame).is_none() {
            frame = stored::frame(bytes)?;
        }
        Ok(frame)
    }

    /// Decompresses one cluster: fills the whole of `cluster` or fails. `compressed` may go on behind the data, as the
    /// format counts whole sectors. After an error the content of `cluster` is undefined.
    pub fn decompress(&self, compressed: &[u8], cluster: &mut [u8]) -> Result<()> {
        match self.method {
            Method::Zlib(_) => zlib::decompress(compressed, cluster),
            Method::Zstd { .. } => zstd::decompress(compressed, cluster),
        }
    }
}

#[cold]
fn bad_data(compressed: &[u8], message: String) -> Error {
    Error::invalid_image("compressed data", format!("{} bytes", compressed.len()), message)
}

#[cfg(all(test, feature = "zstd"))]
mod tests;
