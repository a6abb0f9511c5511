// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Zstandard.

use super::bad_data;
use cowshed_types::{Error, Result};
use std::cell::RefCell;
use zstd_safe::{CCtx, CParameter, DCtx, ResetDirective};

/// Two thirds of the time of the library's default (3, which QEMU uses) for 3 % more bytes, measured on programs and
/// libraries.
pub(super) const LEVEL_DEFAULT: i32 = 1;

thread_local! {
    static ENCODER: RefCell<Option<(i32, CCtx<'static>)>> = const { RefCell::new(None) };
    static DECODER: RefCell<Option<DCtx<'static>>> = const { RefCell::new(None) };
}

pub(super) fn validate_level(level: i32) -> Result<()> {
    let (min, max) = (zstd_safe::min_c_level(), zstd_safe::max_c_level());
    if (min..=max).contains(&level) {
        return Ok(());
    }
    Err(Error::invalid_argument(format!("compression level must be between {min} and {max}")).value(level))
}

/// Length of the compressed data in `out`, or `None` where they don't fit (or memory is short: the cluster is then
/// stored as it is).
pub(super) fn compress(level: i32, cluster: &[u8], out: &mut [u8]) -> Option<usize> {
    ENCODER.with_borrow_mut(|slot| {
        if slot.as_ref().is_none_or(|(present, _)| *present != level) {
            let mut context = CCtx::try_create()?;
            context.set_parameter(CParameter::CompressionLevel(level)).ok()?;
            *slot = Some((level, context));
        }
        let (_, context) = slot.as_mut()?;
        // One frame in one call. The size of the cluster is pledged by it and is in the frame's header. So the window
        // is no larger than the cluster and readers can decode in one pass.
        let len = context.compress2(out, cluster);
        if len.is_err() {
            // The context is in the middle of a frame then. Parameters stay.
            context.reset(ResetDirective::SessionOnly).ok()?;
        }
        len.ok()
    })
}

pub(super) fn decompress(compressed: &[u8], cluster: &mut [u8]) -> Result<()> {
    DECODER.with_borrow_mut(|slot| {
        if slot.is_none() {
            *slot = DCtx::try_create();
        }
        let context = slot.as_mut().ok_or_else(|| Error::new(cowshed_types::ErrorKind::Limit, "out of memory"))?;
        decompress_frames(context, compressed, cluster)
    })
}

/// Frame by frame, until the cluster is full. Each is decoded straight into the cluster, so no window is allocated on
/// the word of a frame's header.
fn decompress_frames(context: &mut DCtx<'static>, compressed: &[u8], cluster: &mut [u8]) -> Result<()> {
    let error = |what: &str, code| bad_data(compressed, format!("{what}: {}", zstd_safe::get_error_name(code)));
    let (mut input, mut filled) = (compressed, 0);
    while filled < cluster.len() {
        if input.is_empty() {
            let message = format!("compressed data inflate to {filled} bytes instead of {}", cluster.len());
            return Err(bad_data(compressed, message));
        }
        let frame_len = zstd_safe::find_frame_compressed_size(input)
            .map_err(|code| error("compressed cluster is not a whole zstd frame", code))?;
        let frame = input.get(..frame_len).filter(|frame| !frame.is_empty()).unwrap_or(input);
        filled += context
            .decompress(&mut cluster[filled..], frame)
            .map_err(|code| error("compressed cluster is not valid zstd data", code))?;
        input = &input[frame.len()..];
    }
    Ok(())
}
