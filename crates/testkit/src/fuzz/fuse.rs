// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Entry point of `cowshed-fuse-proto`: bytes of the kernel's device.

use super::replay::Entry;
use cowshed_fuse_proto::request::HEADER_BYTES;
use cowshed_fuse_proto::{Operation, RequestHeader, WRITE_HEAD_BYTES, reply};

/// All entry points of this file.
pub const ENTRIES: &[Entry] = &[("fuse_request", request)];

/// One request, whose length in the header is made right: the kernel's always is.
pub fn request(data: &[u8]) {
    // A length that isn't the header's is refused.
    let other = data.len() + 1;
    let said = data.first_chunk().map_or(0, |bytes| u32::from_ne_bytes(*bytes));
    assert_eq!(RequestHeader::parse(data, other).is_ok(), data.len() >= HEADER_BYTES && said as usize == other);
    let mut bytes = data.to_vec();
    let received = bytes.len();
    if received >= HEADER_BYTES {
        bytes[..4].copy_from_slice(&(received as u32).to_ne_bytes());
    }
    let Ok(header) = RequestHeader::parse(&bytes, received) else { return };
    match Operation::parse(&header, &bytes[HEADER_BYTES..]) {
        Ok(Operation::Write { len, .. }) => assert_eq!(len as usize + WRITE_HEAD_BYTES, received),
        Ok(Operation::SetAttributes(changes)) => {
            let times = [changes.atime, changes.mtime];
            let is_time = |time: &Option<_>| !matches!(time, Some(cowshed_fuse_proto::Time::At(_, 1_000_000_000..)));
            assert!(times.iter().all(is_time));
        }
        _ => {}
    }
    let answer = reply::reply(header.unique, Err(header.opcode.cast_signed()));
    let error = answer[4..8].first_chunk().map_or(0, |bytes| i32::from_ne_bytes(*bytes));
    assert!((-511..0).contains(&error), "the kernel takes no {error}");
}
