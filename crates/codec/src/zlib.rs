// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Raw deflate (RFC 1951), the compression type that options call "zlib".

use super::bad_data;
use super::deflate::Encoder;
use cowshed_types::{Error, Result, without};
use libdeflater::{CompressionLvl, Compressor, Decompressor};
use std::cell::RefCell;
use zlib_rs::{Inflate, InflateFlush};

/// Level of [`ZlibMode::DEFAULT`].
pub(super) const NARROW_LEVEL: u8 = 2;
/// Level of [`ZlibMode::WIDE`].
pub(super) const WIDE_LEVEL: u8 = 1;

/// The way of making deflate data. The decompressed bytes are the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ZlibMode {
    /// A 4 KiB window, as QEMU writes: any reader can take it, also one that streams with a window of that size.
    Narrow {
        /// 1 (fast) to 9 (small).
        level: u8,
    },
    /// A 32 KiB window: faster and smaller, for readers that decompress a whole cluster at once, as QEMU does.
    Fast {
        /// 1 (fast) to 12 (small).
        level: u8,
    },
}

impl ZlibMode {
    /// About the size of QEMU's output (measured on programs and libraries: less than 2 % larger; level 4: 0.5 % smaller)
    /// at less than half of its time.
    pub const DEFAULT: Self = ZlibMode::Narrow { level: NARROW_LEVEL };
    /// The fast choice: 2 % smaller than QEMU's output (level 3: 4 %) at a quarter of its time, where the wide window is
    /// fine.
    pub const WIDE: Self = ZlibMode::Fast { level: WIDE_LEVEL };

    pub(super) fn validate(self) -> Result<()> {
        let (level, max) = match self {
            ZlibMode::Narrow { level } => (level, 9),
            ZlibMode::Fast { level } => (level, 12),
        };
        if (1..=max).contains(&level) {
            return Ok(());
        }
        Err(Error::invalid_argument(format!("compression level must be between 1 and {max}")).value(level))
    }
}

/// An encoder with the level it was made for.
struct Leveled<T> {
    level: u8,
    encoder: T,
}

thread_local! {
    static NARROW: RefCell<Option<Encoder>> = const { RefCell::new(None) };
    static FAST: RefCell<Option<Leveled<Compressor>>> = const { RefCell::new(None) };
    static DECODER: RefCell<Decompressor> = RefCell::new(Decompressor::new());
    static TOLERANT: RefCell<Option<Inflate>> = const { RefCell::new(None) };
}

/// Length of the compressed data in `out`, or `None` where they don't fit.
pub(super) fn compress(mode: ZlibMode, cluster: &[u8], out: &mut [u8]) -> Option<usize> {
    match mode {
        ZlibMode::Narrow { .. } if without!("cluster_deflater") => {
            let mut encoder = zlib_rs::Deflate::new(6, false, 12);
            match encoder.compress(cluster, out, zlib_rs::DeflateFlush::Finish) {
                Ok(zlib_rs::Status::StreamEnd) => usize::try_from(encoder.total_out()).ok(),
                _ => None,
            }
        }
        ZlibMode::Narrow { level } => {
            NARROW.with_borrow_mut(|slot| slot.get_or_insert_with(Encoder::new).compress(level, cluster, out))
        }
        ZlibMode::Fast { level } => FAST.with_borrow_mut(|slot| {
            // Levels are checked where a codec is made, so the fallback is never taken.
            let fresh = || Compressor::new(CompressionLvl::new(level.into()).unwrap_or_default());
            encoder(slot, level, fresh).deflate_compress(cluster, out).ok()
        }),
    }
}

fn encoder<T>(slot: &mut Option<Leveled<T>>, level: u8, fresh: impl Fn() -> T) -> &mut T {
    if slot.as_ref().is_some_and(|leveled| leveled.level != level) {
        *slot = None;
    }
    &mut slot.get_or_insert_with(|| Leveled { level, encoder: fresh() }).encoder
}

pub(super) fn decompress(compressed: &[u8], cluster: &mut [u8]) -> Result<()> {
    if without!("whole_cluster_decoder") {
        return decompress_tolerant(compressed, cluster);
    }
    match DECODER.with_borrow_mut(|decoder| decoder.deflate_decompress(compressed, cluster)) {
        Ok(len) if len == cluster.len() => Ok(()),
        Ok(len) => Err(short(compressed, len, cluster.len())),
        // "Decompression stops when it has produced a cluster of data": a stream may be longer, or lack its end. The
        // fast decoder takes whole streams only.
        Err(_) => decompress_tolerant(compressed, cluster),
    }
}

/// Inflates a stream with zlib's header and checksum (RFC 1950), as in grains of VMDK images. It fills the front of
/// `out`, at least `least` bytes of it, or fails.
pub fn inflate_zlib(compressed: &[u8], out: &mut [u8], least: usize) -> Result<()> {
    match DECODER.with_borrow_mut(|decoder| decoder.zlib_decompress(compressed, out)) {
        Ok(len) if len >= least => Ok(()),
        Ok(len) => Err(short(compressed, len, least)),
        Err(error) => Err(bad_data(compressed, format!("compressed data are no valid zlib data: {error}"))),
    }
}

#[cold]
fn decompress_tolerant(compressed: &[u8], cluster: &mut [u8]) -> Result<()> {
    TOLERANT.with_borrow_mut(|slot| {
        let inflate = slot.get_or_insert_with(|| Inflate::new(false, 15));
        inflate.reset(false);
        let status = inflate.decompress(compressed, cluster, InflateFlush::Finish);
        let len = usize::try_from(inflate.total_out()).unwrap_or(usize::MAX);
        match status {
            _ if len == cluster.len() => Ok(()),
            Ok(_) => Err(short(compressed, len, cluster.len())),
            Err(error) => {
                let reason = error.as_str();
                Err(bad_data(
                    compressed,
                    format!("compressed cluster is not valid deflate data after {len} bytes: {reason}"),
                ))
            }
        }
    })
}

fn short(compressed: &[u8], len: usize, expected: usize) -> Error {
    bad_data(compressed, format!("compressed data inflate to {len} bytes instead of {expected}"))
}
