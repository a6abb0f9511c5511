// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Buffers that are split for the parts of a request.

use cowshed_storage::IoBuf;

/// Joins two neighbouring parts of one buffer.
pub fn join(first: Option<IoBuf>, next: IoBuf) -> IoBuf {
    match first {
        None => next,
        Some(mut first) => match first.unsplit(next) {
            Ok(()) => first,
            Err(_) => panic!("parts of one buffer are joined in the order they were split"),
        },
    }
}
