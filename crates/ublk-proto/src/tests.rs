// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Layouts, limits and turns.

use crate::control::{DeviceInfo, INFO_BYTES, UblkState};
use crate::params::{PARAMS_BYTES, Params};
use crate::request::DESCRIPTOR_BYTES;
use crate::{Arrival, Limits, Malformed, Operation, Request, Tags};
use proptest::prelude::*;

const LIMITS: Limits = Limits { max_request_bytes: 1 << 20, block_bytes: 512, writable: true };

fn info() -> DeviceInfo {
    DeviceInfo {
        queues: 2,
        depth: 64,
        state: UblkState::Quiesced,
        max_request_bytes: 1 << 20,
        device: 7,
        process: 1234,
        features: 0x98,
        note: 0x1234_5678_9abc_def0,
        owner: 1000,
    }
}

#[test]
fn what_is_known_of_a_device_stands_where_the_driver_looks() {
    let bytes = info().bytes();
    assert_eq!(bytes[..8], [2, 0, 64, 0, 2, 0, 0, 0]);
    assert_eq!(bytes[8..20], [0, 0, 16, 0, 7, 0, 0, 0, 0xd2, 4, 0, 0]);
    assert_eq!(bytes[24..34], [0x98, 0, 0, 0, 0, 0, 0, 0, 0xf0, 0xde]);
    assert_eq!(DeviceInfo::parse(&bytes), Ok(info()));
    for (at, wrong) in [(0, 0), (2, 0), (4, 9), (1, 0xff), (3, 0xff), (8, 1), (10, 0), (11, 0xff)] {
        let mut bytes = bytes;
        bytes[at] = wrong;
        assert!(DeviceInfo::parse(&bytes).is_err(), "byte {at} is {wrong}");
    }
}

#[test]
fn parameters_stand_where_the_driver_looks() {
    let params = Params {
        sectors: 0x1_0000,
        read_only: false,
        has_cache: true,
        block_bytes: 4096,
        grain_bytes: 65536,
        max_request_bytes: 1 << 20,
        discards: true,
    };
    let bytes = params.bytes();
    assert_eq!(bytes[..8], [64, 0, 0, 0, 3, 0, 0, 0]);
    assert_eq!(bytes[8..24], [12, 0, 0, 0, 12, 12, 16, 12, 0, 8, 0, 0, 0, 0, 0, 0]);
    assert_eq!(bytes[24..32], 0x1_0000u64.to_ne_bytes());
    assert_eq!(bytes[40..60], [0, 0, 0, 0, 0, 16, 0, 0, 0, 0, 32, 0, 0, 0, 32, 0, 1, 0, 0, 0]);
    assert_eq!(Params::parse(&bytes), Ok(params));
    let small = Params { read_only: true, has_cache: false, discards: false, block_bytes: 512, ..params };
    assert_eq!(small.bytes()[4..12], [1, 0, 0, 0, 1, 0, 0, 0]);
    assert_eq!(Params::parse(&small.bytes()), Ok(small));
    assert!(Params::parse(&Params::question()).is_err());
}

#[test]
fn requests_are_those_of_the_device() {
    let parse = |word: u32, sectors: u32, start: u64, limits: &Limits| {
        let bytes = [&word.to_ne_bytes()[..], &sectors.to_ne_bytes(), &start.to_ne_bytes(), &[0; 8]].concat();
        Request::parse(bytes.first_chunk().unwrap(), limits)
    };
    let request = |operation, offset, len| Ok(Request { operation, offset, len });
    assert_eq!(parse(0, 8, 2, &LIMITS), request(Operation::Read, 1024, 4096));
    assert_eq!(parse(1, 8, 2, &LIMITS), request(Operation::Write { is_durable: false }, 1024, 4096));
    assert_eq!(parse(1 | 1 << 13 | 1 << 16, 1, 0, &LIMITS), request(Operation::Write { is_durable: true }, 0, 512));
    assert_eq!(parse(2, 0, 99, &LIMITS), request(Operation::Flush, 0, 0));
    assert_eq!(parse(3, u32::MAX, 0, &LIMITS), request(Operation::Discard, 0, u64::from(u32::MAX) * 512));
    let zeroes = |may_unmap, is_durable| Operation::WriteZeroes { may_unmap, is_durable };
    assert_eq!(parse(5, 1, 1, &LIMITS), request(zeroes(true, false), 512, 512));
    assert_eq!(parse(5 | 1 << 15 | 1 << 13, 1, 1, &LIMITS), request(zeroes(false, true), 512, 512));
    let refused = |result: Result<Request, Malformed>| result.unwrap_err().value;
    assert_eq!(refused(parse(4, 1, 0, &LIMITS)), 4);
    assert_eq!(refused(parse(13, 1, 0, &LIMITS)), 13);
    assert_eq!(refused(parse(0, 2049, 0, &LIMITS)), 2049);
    assert_eq!(refused(parse(1, 0, 0, &LIMITS)), 0);
    assert_eq!(refused(parse(0, 1, u64::MAX / 512 + 1, &LIMITS)), u64::MAX / 512 + 1);
    assert_eq!(refused(parse(0, 1, u64::MAX / 512, &LIMITS)), u64::MAX / 512);
    let blocks = Limits { block_bytes: 4096, writable: false, ..LIMITS };
    assert_eq!(refused(parse(0, 8, 1, &blocks)), 1);
    assert_eq!(refused(parse(0, 7, 8, &blocks)), 8);
    assert_eq!(parse(0, 8, 8, &blocks), request(Operation::Read, 4096, 4096));
    for word in [1, 3, 5] {
        assert_eq!(refused(parse(word, 8, 8, &blocks)), 8, "a change of a read-only disk");
    }
}

#[test]
fn a_tag_belongs_to_the_driver_or_to_the_server() {
    let mut tags = Tags::new(2);
    assert!(tags.arrive(0, 0).is_err(), "not fetched");
    tags.fetch(0).unwrap();
    tags.fetch(1).unwrap();
    assert_eq!(tags.fetch(1).unwrap_err().value, 1);
    assert!(tags.fetch(2).is_err(), "no such tag");
    assert!(tags.commit(0).is_err(), "no request");
    assert_eq!((tags.arrive(0, 0), tags.running()), (Ok(Arrival::Request), 1));
    assert!(tags.arrive(0, 0).is_err(), "twice");
    tags.commit(0).unwrap();
    assert_eq!((tags.arrive(0, -19), tags.running(), tags.is_over()), (Ok(Arrival::Stopped), 0, false));
    assert!(tags.commit(0).is_err() && tags.fetch(0).is_err(), "gone");
    assert_eq!((tags.arrive(1, -22), tags.is_over()), (Ok(Arrival::Refused(22)), true));
    assert_eq!(Tags::new(1).clone().fetch(1).unwrap_err().to_string(), "a tag is fetched twice (0x1)");
}

proptest! {
    #[test]
    fn what_is_read_is_what_is_written(bytes in any::<[u8; INFO_BYTES]>(), params in any::<[u8; PARAMS_BYTES]>()) {
        if let Ok(info) = DeviceInfo::parse(&bytes) {
            prop_assert_eq!(DeviceInfo::parse(&info.bytes()), Ok(info));
        }
        if let Ok(params) = Params::parse(&params) {
            let _ = params.bytes();
        }
    }

    #[test]
    fn no_request_passes_its_limits(bytes in any::<[u8; DESCRIPTOR_BYTES]>(), small in 0u32..6, sectors in 0u32..3000) {
        let mut bytes = bytes;
        bytes[..4].copy_from_slice(&small.to_ne_bytes());
        bytes[4..8].copy_from_slice(&sectors.to_ne_bytes());
        if let Ok(request) = Request::parse(&bytes, &LIMITS) {
            prop_assert!(request.offset.checked_add(request.len).is_some());
            let has_data = matches!(request.operation, Operation::Read | Operation::Write { .. });
            prop_assert!(!has_data || (1..=1 << 20).contains(&request.len));
            prop_assert_eq!(Request::parse(&request.bytes(), &LIMITS), Ok(request));
        }
    }
}
