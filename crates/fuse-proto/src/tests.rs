// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Requests and replies, byte by byte as `linux/fuse.h` lays them out.

use crate::reply::{self, Attributes, InitReply};
use crate::request::{Changes, HEADER_BYTES, Operation, RequestHeader, Time, opcode};
use crate::{Malformed, WRITE_HEAD_BYTES};
use proptest::prelude::*;

/// A request with these fields, and how many bytes of data follow.
fn request(opcode: u32, fields: &[u8], data_bytes: usize) -> Result<Operation, Malformed> {
    let len = HEADER_BYTES + fields.len() + data_bytes;
    let mut bytes = Vec::new();
    bytes.extend((len as u32).to_ne_bytes());
    bytes.extend(opcode.to_ne_bytes());
    bytes.extend(77u64.to_ne_bytes());
    bytes.extend(1u64.to_ne_bytes());
    bytes.extend(halves(&[1000, 1001, 4242, 0]));
    assert_eq!(bytes.len(), HEADER_BYTES);
    let header = RequestHeader::parse(&bytes, len)?;
    assert_eq!((header.unique, header.node, header.thread), (77, 1, 4242));
    Operation::parse(&header, fields)
}

fn words(numbers: &[u64]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_ne_bytes()).collect()
}

fn halves(numbers: &[u32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_ne_bytes()).collect()
}

#[test]
fn requests_are_read_field_by_field() {
    let read = [words(&[9, 4096]), halves(&[512, 0]), words(&[0]), halves(&[0, 0])].concat();
    assert_eq!(request(opcode::READ, &read, 0), Ok(Operation::Read { offset: 4096, len: 512 }));
    let write = [words(&[9, 8192]), halves(&[100, 0]), words(&[0]), halves(&[0o4010000, 0])].concat();
    assert_eq!(HEADER_BYTES + write.len(), WRITE_HEAD_BYTES);
    let expected = Operation::Write { offset: 8192, len: 100, flags: 0o4010000 };
    assert_eq!(request(opcode::WRITE, &write, 100), Ok(expected));
    for wrong in [0, 99, 101] {
        assert!(request(opcode::WRITE, &write, wrong).is_err());
    }
    let allocate = [words(&[9, 1, 2]), halves(&[3, 0])].concat();
    assert_eq!(request(opcode::FALLOCATE, &allocate, 0), Ok(Operation::Allocate { offset: 1, len: 2, mode: 3 }));
    let seek = [words(&[9, 1 << 40]), halves(&[4, 0])].concat();
    assert_eq!(request(opcode::LSEEK, &seek, 0), Ok(Operation::Seek { offset: 1 << 40, whence: 4 }));
    assert_eq!(request(opcode::LSEEK, &seek[..20], 0).unwrap_err().value, 20);
    assert_eq!(request(4711, &[], 0), Ok(Operation::Other));
    assert_eq!(request(opcode::FORGET, &words(&[1]), 0), Ok(Operation::Unanswered));
    assert_eq!(request(opcode::INTERRUPT, &words(&[76]), 0), Ok(Operation::Interrupt { unique: 76 }));
    assert_eq!(request(opcode::INTERRUPT, &[0; 4], 0).unwrap_err().value, 4);
}

#[test]
fn features_have_a_second_word_only_where_the_first_says_so() {
    let init = |flags: u32, more: u32| request(opcode::INIT, &halves(&[7, 40, 1 << 17, flags, more, 0]), 0);
    let features = |flags, more| match init(flags, more) {
        Ok(Operation::Init { major: 7, minor: 40, max_readahead: 0x20000, features }) => features,
        other => panic!("{other:?}"),
    };
    assert_eq!(features(5, 0xffff_ffff), 5);
    assert_eq!(features(1 << 30, 16), 1 << 30 | 1 << 36);
    let old = request(opcode::INIT, &halves(&[7, 24, 0, 1 << 30]), 0);
    assert!(matches!(old, Ok(Operation::Init { features: 0x4000_0000, .. })), "{old:?}");
}

#[test]
fn changes_are_those_that_the_bits_name() {
    let mut fields = vec![0; 88];
    fields[16..24].copy_from_slice(&(5u64 << 20).to_ne_bytes());
    fields[32..40].copy_from_slice(&(-3i64).to_ne_bytes());
    fields[56..60].copy_from_slice(&7u32.to_ne_bytes());
    fields[68..72].copy_from_slice(&0o100600u32.to_ne_bytes());
    fields[76..80].copy_from_slice(&1000u32.to_ne_bytes());
    fields[80..84].copy_from_slice(&1001u32.to_ne_bytes());
    let changes = |bits: u32| {
        let mut fields = fields.clone();
        fields[..4].copy_from_slice(&bits.to_ne_bytes());
        match request(opcode::SETATTR, &fields, 0) {
            Ok(Operation::SetAttributes(changes)) => changes,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(changes(0), Changes::default());
    assert_eq!(changes(1 << 3), Changes { size: Some(5 << 20), ..Changes::default() });
    let through_descriptor = Changes { size: Some(5 << 20), through_descriptor: true, ..Changes::default() };
    assert_eq!(changes(1 << 3 | 1 << 6), through_descriptor);
    let owners = Changes { mode: Some(0o100600), uid: Some(1000), gid: Some(1001), ..Changes::default() };
    assert_eq!(changes(7), owners);
    let times = Changes { atime: Some(Time::At(-3, 7)), mtime: Some(Time::Now), ..Changes::default() };
    assert_eq!(changes(1 << 4 | 1 << 5 | 1 << 8), times);
}

#[test]
fn replies_have_the_layout_of_the_kernel() {
    let attributes = Attributes {
        size: 10,
        blocks: 11,
        atime: (1, 4),
        mtime: (2, 5),
        ctime: (3, 6),
        mode: 0o100400,
        uid: 7,
        gid: 8,
        block_bytes: 4096,
    };
    let body = attributes.body();
    let expected = [words(&[0, 0, 1, 10, 11, 1, 2, 3]), halves(&[4, 5, 6, 0o100400, 1, 7, 8, 0, 4096, 0])].concat();
    assert_eq!(body, expected);
    let init =
        InitReply { features: 1 << 36 | 9, max_readahead: 5, max_background: 64, max_write: 1 << 20, max_pages: 256 };
    let body = init.body();
    assert_eq!(body.len(), 64);
    assert_eq!(&body[..16], halves(&[7, 39, 5, 9]));
    assert_eq!(&body[16..20], [64u16.to_ne_bytes(), 48u16.to_ne_bytes()].concat());
    assert_eq!((&body[20..24], &body[32..36]), (&(1u32 << 20).to_ne_bytes()[..], &16u32.to_ne_bytes()[..]));
    assert_eq!(&body[28..30], 256u16.to_ne_bytes());
    assert_eq!(reply::opened()[8..12], 0x41u32.to_ne_bytes());
    assert_eq!(reply::statistics(4096, 100, 40)[..32], words(&[100, 40, 40, 1]));
}

#[test]
fn errors_are_numbers_that_the_kernel_takes() {
    let error = |errno: i32| i32::from_ne_bytes(*reply::reply(1, Err(errno))[4..].first_chunk().unwrap());
    assert_eq!([error(28), error(0), error(512), error(-3), error(i32::MIN)], [-28, -5, -5, -5, -5]);
    assert_eq!(reply::reply(3, Ok(b"abc")), [&reply::header(3, 0, 3)[..], b"abc"].concat());
}

proptest! {
    #[test]
    fn no_request_makes_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300), opcode in 0u32..60) {
        let mut bytes = bytes;
        let received = bytes.len();
        if received >= HEADER_BYTES {
            bytes[..4].copy_from_slice(&(received as u32).to_ne_bytes());
            bytes[4..8].copy_from_slice(&opcode.to_ne_bytes());
        }
        if let Ok(header) = RequestHeader::parse(&bytes, received)
            && let Ok(Operation::Write { len, .. }) = Operation::parse(&header, &bytes[HEADER_BYTES..])
        {
            prop_assert_eq!(len as usize + WRITE_HEAD_BYTES, received);
        }
    }
}
