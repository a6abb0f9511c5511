// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Entry point of `cowshed-ublk-proto`: bytes of the kernel's driver.

use super::replay::Entry;
use cowshed_ublk_proto::control::INFO_BYTES;
use cowshed_ublk_proto::params::PARAMS_BYTES;
use cowshed_ublk_proto::request::DESCRIPTOR_BYTES;
use cowshed_ublk_proto::{Arrival, DeviceInfo, Limits, Operation, Params, Request, SECTOR_BYTES, Tags};

/// All entry points of this file.
pub const ENTRIES: &[Entry] = &[("ublk_device", device)];

/// A description of a device, its parameters, and descriptors of requests, one behind the other.
pub fn device(data: &[u8]) {
    let Some((info, rest)) = data.split_first_chunk::<INFO_BYTES>() else { return };
    let Some((params, rest)) = rest.split_first_chunk::<PARAMS_BYTES>() else { return };
    let info = DeviceInfo::parse(info);
    if let Ok(info) = info {
        assert_eq!(DeviceInfo::parse(&info.bytes()), Ok(info));
    }
    let params = Params::parse(params);
    if let Ok(params) = params {
        assert!(params.block_bytes.is_power_of_two() && params.grain_bytes.is_power_of_two());
        let _ = params.bytes();
    }
    let (Ok(info), Ok(params)) = (info, params) else { return };
    let limits = Limits {
        max_request_bytes: info.max_request_bytes,
        block_bytes: params.block_bytes,
        writable: !params.read_only,
    };
    let mut tags = Tags::new(info.depth);
    for (number, descriptor) in rest.chunks_exact(DESCRIPTOR_BYTES).enumerate() {
        let tag = (number % usize::from(info.depth)) as u16;
        // Twice around, a tag is with the driver.
        let _ = tags.fetch(tag);
        assert_eq!(tags.arrive(tag, 0), Ok(Arrival::Request));
        let Some(Ok(request)) = descriptor.first_chunk().map(|bytes| Request::parse(bytes, &limits)) else {
            tags.commit(tag).expect("a request of the server's");
            continue;
        };
        assert!(request.offset.checked_add(request.len).is_some());
        assert!(request.offset.is_multiple_of(SECTOR_BYTES) && request.len.is_multiple_of(SECTOR_BYTES));
        assert!(limits.writable || !request.operation.changes());
        let has_data = matches!(request.operation, Operation::Read | Operation::Write { .. });
        assert!(!has_data || request.len <= u64::from(limits.max_request_bytes));
        tags.commit(tag).expect("a request of the server's");
    }
    assert_eq!((tags.running(), tags.is_over()), (0, false));
}
