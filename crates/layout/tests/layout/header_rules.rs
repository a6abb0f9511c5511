// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Every rule of the header, each broken once: the error names the field, and the header without the change is good.

use cowshed_layout::qcow2::features::*;
use cowshed_layout::qcow2::{
    BitmapsExtension, EncryptionHeader, Extension, FeatureNames, Geometry, Header, offset, peek_cluster_bits,
};
use cowshed_types::ErrorKind;
use proptest::collection::vec;
use proptest::prelude::*;

/// A good header of version 3 with 64 KiB clusters.
fn good() -> Header {
    let mut header = Header::new(3, 16);
    header.size = 1 << 30;
    header.l1_size = 2;
    header.l1_table_offset = 0x3_0000;
    header.refcount_table_offset = 0x1_0000;
    header.refcount_table_clusters = 1;
    header
}

fn patch(bytes: &mut [u8], at: u64, value: &[u8]) {
    bytes[at as usize..][..value.len()].copy_from_slice(value);
}

/// The good header's first cluster with bytes changed.
fn patched(at: u64, value: &[u8]) -> Vec<u8> {
    let mut bytes = good().encode().unwrap();
    bytes.resize(65536, 0);
    patch(&mut bytes, at, value);
    bytes
}

#[track_caller]
fn refused(bytes: &[u8], field: &str, text: &str) {
    let error = Header::parse(bytes).unwrap_err();
    assert_eq!(error.field_name(), Some(field), "{error}");
    assert!(error.to_string().contains(text), "{error}");
}

#[test]
fn good_header_is_good() {
    assert_eq!(Header::parse(&patched(0, b"QFI\xfb")).unwrap(), good());
}

#[test]
fn fields_out_of_range() {
    let be32 = |value: u32| value.to_be_bytes();
    let be64 = |value: u64| value.to_be_bytes();
    refused(b"", "file length", "ends within its qcow2 header");
    refused(&patched(0, b"QFI\xfb")[..100], "file length", "ends within its qcow2 header");
    refused(&patched(0, b"QFI "), "magic", "not in qcow2 format");
    refused(&patched(offset::VERSION, &be32(1)), "version", "unsupported");
    refused(&patched(offset::VERSION, &be32(4)), "version", "unsupported");
    refused(&patched(offset::CLUSTER_BITS, &be32(8)), "cluster_bits", "is 8");
    refused(&patched(offset::CLUSTER_BITS, &be32(22)), "cluster_bits", "is 22");
    refused(&patched(offset::CLUSTER_BITS, &be32(u32::MAX)), "cluster_bits", "2 MiB");
    refused(&patched(offset::SIZE, &be64(1 << 40)), "l1_size", "too small: 2048 entries");
    refused(&patched(offset::SIZE, &be64(i64::MAX as u64)), "l1_size", "too small");
    refused(&patched(offset::SIZE, &be64(1 << 63)), "size", "2^63");
    refused(&patched(offset::SIZE, &be64(u64::MAX)), "size", "2^63");
    refused(&patched(offset::CRYPT_METHOD, &be32(3)), "crypt_method", "unknown encryption method");
    refused(&patched(offset::CRYPT_METHOD, &be32(2)), "crypt_method", "without the encryption header");
    refused(&patched(offset::L1_SIZE, &be32(1)), "l1_size", "too small");
    refused(&patched(offset::L1_SIZE, &be32((4 << 20) + 1)), "l1_size", "32 MiB");
    refused(&patched(offset::L1_TABLE_OFFSET, &be64(0x3_0200)), "l1_table_offset", "not cluster-aligned");
    refused(&patched(offset::L1_TABLE_OFFSET, &be64(0)), "l1_table_offset", "overwrite the header");
    refused(&patched(offset::L1_TABLE_OFFSET, &be64(1 << 56)), "l1_table_offset", "largest offset");
    refused(&patched(offset::L1_TABLE_OFFSET, &be64(u64::MAX << 16)), "l1_table_offset", "largest offset");
    refused(&patched(offset::REFCOUNT_TABLE_OFFSET, &be64(1)), "refcount_table_offset", "not cluster-aligned");
    refused(&patched(offset::REFCOUNT_TABLE_OFFSET, &be64(0)), "refcount_table_offset", "overwrite the header");
    refused(&patched(offset::REFCOUNT_TABLE_CLUSTERS, &be32(129)), "refcount_table_clusters", "8 MiB");
    refused(&patched(offset::REFCOUNT_TABLE_CLUSTERS, &be32(u32::MAX)), "refcount_table_clusters", "8 MiB");
    refused(&patched(offset::NB_SNAPSHOTS, &be32(65537)), "nb_snapshots", "more than 65536");
    refused(&patched(offset::NB_SNAPSHOTS, &be32(1)), "snapshots_offset", "overwrite the header");
    refused(&patched(offset::REFCOUNT_ORDER, &be32(7)), "refcount_order", "64 bits");
    refused(&patched(offset::HEADER_LENGTH, &be32(96)), "header_length", "at least 104");
    refused(&patched(offset::HEADER_LENGTH, &be32(108)), "header_length", "multiple of 8");
    refused(&patched(offset::HEADER_LENGTH, &be32(65544)), "header_length", "first cluster");
    refused(&patched(offset::COMPRESSION_TYPE, &[1]), "compression_type", "without its incompatible bit");
}

#[test]
fn backing_file_names() {
    let name = |at: u64, len: u32| [&at.to_be_bytes()[..], &len.to_be_bytes()].concat();
    let at = offset::BACKING_FILE_OFFSET;
    refused(&patched(at, &name(0x8000, 1024)), "backing_file_size", "1023");
    refused(&patched(at, &name(0x8000, u32::MAX)), "backing_file_size", "1023");
    refused(&patched(at, &name(65530, 10)), "backing_file_offset", "outside of the first cluster");
    refused(&patched(at, &name(u64::MAX, 10)), "backing_file_offset", "outside of the first cluster");
    // Also of a name without bytes, as QEMU does.
    for start in [65537, 0xdead_0000_0000_0000] {
        refused(&patched(at, &name(start, 0)), "backing_file_offset", "outside of the first cluster");
        let error = Header::parse_to_check(&patched(at, &name(start, 0))).unwrap_err();
        assert_eq!(error.sentence(), "Invalid backing file offset");
    }
    assert_eq!(Header::parse(&patched(at, &name(65536, 0))).unwrap().backing_file, None);
    refused(&patched(at, &name(80, 4)), "backing_file_offset", "inside of the header");
    refused(&patched(at, &name(0x8000, 4))[..0x8002], "backing_file_offset", "past the end of the file");
    refused(&patched(at, &name(0x8000, 4)), "backing_file", "NUL");
    assert_eq!(Header::parse(&patched(at, &name(0x8000, 0))).unwrap().backing_file, None);
    // Old images have the name directly behind the header, without an end mark.
    let mut bytes = Header { extensions: vec![], ..v2() }.encode().unwrap();
    bytes.truncate(72);
    patch(&mut bytes, at, &name(72, 3));
    bytes.extend_from_slice(b"moo");
    assert_eq!(Header::parse(&bytes).unwrap().backing_file.as_deref(), Some(&b"moo"[..]));
}

fn v2() -> Header {
    Header { size: 1 << 30, l1_size: 2, l1_table_offset: 0x3_0000, ..Header::new(2, 16) }
}

#[test]
fn feature_bits() {
    let bits = |incompatible: u64, compatible: u64, autoclear: u64| {
        patched(offset::INCOMPATIBLE_FEATURES, &[incompatible, compatible, autoclear].map(u64::to_be_bytes).concat())
    };
    let error = Header::parse(&bits(1 << 5 | 1 << 63, 0, 0)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().starts_with("unsupported incompatible feature: bit 5, bit 63"), "{error}");
    refused(&bits(INCOMPAT_COMPRESSION, 0, 0), "compression_type", "without a compression type");
    refused(&bits(0, 0, AUTOCLEAR_BITMAPS), "autoclear_features", "without the bitmaps extension");
    refused(&bits(0, 0, AUTOCLEAR_RAW_DATA), "autoclear_features", "without an external data file");
    // Unknown bits that may be ignored are kept.
    let header = Header::parse(&bits(INCOMPAT_DIRTY | INCOMPAT_CORRUPT, 1 << 40 | 1, 1 << 50)).unwrap();
    assert!(header.is_dirty() && header.is_corrupt() && header.has_lazy_refcounts());
    assert_eq!((header.compatible_features, header.autoclear_features), (1 << 40 | 1, 1 << 50));
    assert_eq!(Header::parse(&header.encode().unwrap()).unwrap(), header);

    let small = Header { cluster_bits: 13, incompatible_features: INCOMPAT_EXTL2, ..good() };
    assert!(small.validate().unwrap_err().to_string().contains("16 KiB"));
    let both = Header {
        incompatible_features: INCOMPAT_DATA_FILE,
        autoclear_features: AUTOCLEAR_RAW_DATA,
        backing_file: Some(b"base".to_vec()),
        ..good()
    };
    assert!(both.validate().unwrap_err().to_string().contains("with a backing file"));
    let snapshots = Header { nb_snapshots: 1, snapshots_offset: 0x5_0000, ..good() };
    snapshots.validate().unwrap();
    assert!(Header { incompatible_features: INCOMPAT_DATA_FILE, ..snapshots }.validate().is_err());
    let unknown_type = Header { incompatible_features: INCOMPAT_COMPRESSION, compression_type: 2, ..good() };
    assert_eq!(unknown_type.validate().unwrap_err().kind(), ErrorKind::Unsupported);
}

#[test]
fn an_unknown_bit_is_called_by_the_name_in_the_file() {
    let mut table = FeatureNames::standard().entries().count() as u64;
    let mut bytes = good().encode().unwrap();
    bytes.resize(65536, 0);
    // The third name of the table becomes the name of incompatible bit 9.
    table = 112 + 8 + (table - 6) * 48;
    patch(&mut bytes, table, &[0, 9]);
    patch(&mut bytes, table + 2, b"milk cache\0");
    patch(&mut bytes, offset::INCOMPATIBLE_FEATURES, &(1u64 << 9).to_be_bytes());
    refused(&bytes, "incompatible_features", "milk cache (bit 9)");
}

#[test]
fn version_2_has_no_features() {
    v2().validate().unwrap();
    assert!(Header { refcount_order: 3, ..v2() }.validate().is_err());
    assert!(Header { incompatible_features: 1, ..v2() }.validate().is_err());
    assert!(Header { compatible_features: 1, ..v2() }.validate().is_err());
    assert!(Header { autoclear_features: 1 << 9, ..v2() }.validate().is_err());
    assert!(Header { header_length: 104, ..v2() }.validate().is_err());
    // Bytes behind byte 72 are no field: here an unknown extension.
    let extensions = vec![Extension::Unknown { kind: 7, data: vec![1; 100] }];
    let header = Header { extensions, ..v2() };
    assert_eq!(Header::parse(&header.encode().unwrap()).unwrap(), header);
}

#[test]
fn extensions() {
    let at = 112;
    refused(&patched(at, &[0x12, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]), "header_extension", "longer than the space");
    for (kind, len, text) in [(0x2385_2875u32, 16u32, "24 bytes"), (0x0537_be77, 24, "16 bytes")] {
        let value = [kind.to_be_bytes(), len.to_be_bytes()].concat();
        refused(&patched(at, &value), "header_extension", text);
    }
    let with = |extensions: Vec<Extension>| Header { extensions, ..good() };
    let twice = with(vec![Extension::BackingFormat(b"raw".to_vec()), Extension::BackingFormat(b"raw".to_vec())]);
    assert!(twice.validate().unwrap_err().to_string().contains("more than once"));
    let unknown = Extension::Unknown { kind: 9, data: vec![] };
    with(vec![unknown.clone(), unknown]).validate().unwrap();
    let pointer = EncryptionHeader { offset: 0x5_0000, length: 2 << 20 };
    let luks = with(vec![Extension::EncryptionHeader(pointer)]);
    assert!(luks.validate().is_err());
    let luks = Header { crypt_method: 2, ..luks };
    luks.validate().unwrap();
    for bad in [
        EncryptionHeader { offset: 0, ..pointer },
        EncryptionHeader { offset: 0x5_0001, ..pointer },
        EncryptionHeader { length: u64::MAX, ..pointer },
    ] {
        let luks = Header { extensions: vec![Extension::EncryptionHeader(bad)], ..luks.clone() };
        assert!(luks.validate().is_err(), "{bad:?}");
    }
    let directory = BitmapsExtension { nb_bitmaps: 1, reserved: 0, directory_size: 32, directory_offset: 0x5_0000 };
    for (bad, good_one) in [
        (directory, true),
        (BitmapsExtension { nb_bitmaps: 0, ..directory }, false),
        (BitmapsExtension { nb_bitmaps: 65536, ..directory }, false),
        (BitmapsExtension { reserved: 1, ..directory }, false),
        (BitmapsExtension { directory_offset: 8, ..directory }, false),
        (BitmapsExtension { directory_size: u64::MAX, ..directory }, false),
    ] {
        let header = Header { autoclear_features: AUTOCLEAR_BITMAPS, ..with(vec![Extension::Bitmaps(bad)]) };
        assert_eq!(header.validate().is_ok(), good_one, "{bad:?}");
        // Without the bit the extension is not to be believed, so nothing in it can be wrong.
        Header { autoclear_features: 0, ..header }.validate().unwrap();
    }
}

#[test]
fn set_extension_keeps_the_order_of_fresh_images() {
    let mut header = good();
    header.set_extension(Extension::Unknown { kind: 9, data: vec![] });
    header.set_extension(Extension::DataFile(b"d".to_vec()));
    header.set_extension(Extension::BackingFormat(b"raw".to_vec()));
    header.set_extension(Extension::BackingFormat(b"qcow2".to_vec()));
    let kinds: Vec<u32> = header.extensions.iter().map(Extension::kind).collect();
    assert_eq!(kinds, [0xe279_2aca, 0x4441_5441, 0x6803_f857, 9]);
    assert_eq!(header.backing_format().as_deref(), Some("qcow2"));
    header.remove_extension(0xe279_2aca);
    assert_eq!(header.backing_format(), None);
}

#[test]
fn what_does_not_fit_the_first_cluster_is_refused() {
    let mut header = Header { cluster_bits: 9, l1_size: 32768, l1_table_offset: 0x400, ..good() };
    header.refcount_table_offset = 0x200;
    header.extensions.clear();
    header.backing_file = Some(vec![b'x'; 392]);
    assert_eq!(header.encode().unwrap().len(), 512);
    header.backing_file = Some(vec![b'x'; 393]);
    assert_eq!(header.encode().unwrap_err().kind(), ErrorKind::NoSpace);
}

#[test]
fn tables_past_the_end_of_the_file() {
    good().check_tables_within(0x3_0010).unwrap();
    for (file_len, field) in [(0x3_000f, "l1_table_offset"), (0, "l1_table_offset")] {
        assert_eq!(good().check_tables_within(file_len).unwrap_err().field_name(), Some(field));
    }
    let header = Header { refcount_table_offset: 0x4_0000, ..good() };
    assert_eq!(header.check_tables_within(0x4_ffff).unwrap_err().field_name(), Some("refcount_table_offset"));
    let header = Header { nb_snapshots: 1, snapshots_offset: 0x4_0000, ..good() };
    assert_eq!(header.check_tables_within(0x4_0000).unwrap_err().field_name(), Some("snapshots_offset"));
    assert!(Header { refcount_table_clusters: 0, ..good() }.require_refcount_table().is_err());
}

#[test]
fn geometry_of_the_extremes() {
    assert!(Geometry::new(8, 4, false).is_err() && Geometry::new(22, 4, false).is_err());
    assert!(Geometry::new(16, 7, false).is_err() && Geometry::new(13, 4, true).is_err());
    let small = Geometry::new(9, 6, false).unwrap();
    assert_eq!((small.l2_entries(), small.refcount_block_entries(), small.l2_coverage()), (64, 64, 32768));
    assert_eq!(small.max_virtual_size(), 128 << 30);
    let large = Geometry::new(21, 0, true).unwrap();
    assert_eq!((large.l2_entries(), large.refcount_block_entries()), (131072, 1 << 24));
    assert_eq!((large.subclusters(), large.subcluster_size()), (32, 65536));
    assert_eq!(large.max_virtual_size(), 1 << 60);
    assert_eq!(Geometry::new(21, 4, false).unwrap().max_virtual_size(), 1 << 61);
    assert_eq!(large.l1_entries_needed(u64::MAX), (u64::MAX >> 38) + 1);
    assert_eq!(large.round_up(u64::MAX), None);
    assert_eq!(large.guest_at(1 << 26, 0), None);
}

prop_compose! {
    fn any_header()(
        v3: bool,
        cluster_bits in 14u32..=21,
        extended: bool,
        masks: (u64, u64),
        numbers: (u32, u32, u8),
        order in 0u32..=6,
        name in proptest::option::of(vec(1u8.., 1..300)),
        unknown in vec((any::<u32>(), vec(any::<u8>(), 0..100)), 0..4),
        extra_words in 0usize..4,
        extra in vec(any::<u8>(), 64),
    ) -> Header {
        let mut header = Header::new(if v3 { 3 } else { 2 }, cluster_bits);
        header.size = u64::from(numbers.0) << 9;
        header.l1_size = (1 << 18) | (numbers.1 & 0xffff);
        header.l1_table_offset = 5 << cluster_bits;
        header.refcount_table_offset = 1 << cluster_bits;
        header.refcount_table_clusters = 1 + u32::from(numbers.2 & 3);
        header.backing_file = name;
        if v3 {
            header.incompatible_features = (masks.0 & 3) | if extended { INCOMPAT_EXTL2 } else { 0 };
            header.compatible_features = masks.0;
            header.autoclear_features = masks.1 & !AUTOCLEAR_KNOWN;
            header.refcount_order = order;
            header.header_length = 104 + 8 * extra_words as u32;
            header.extra = extra[..(8 * extra_words).saturating_sub(1)].to_vec();
        }
        for (kind, data) in unknown {
            if ![0, 0xe2792aca, 0x6803f857, 0x23852875, 0x0537be77, 0x44415441].contains(&kind) {
                header.extensions.push(Extension::Unknown { kind, data });
            }
        }
        header
    }
}

proptest! {
    #[test]
    fn header_round_trip(header in any_header()) {
        let bytes = header.encode().unwrap();
        prop_assert_eq!(Header::bytes_needed(&bytes).unwrap(), bytes.len());
        let parsed = Header::parse(&bytes).unwrap();
        let offset = parsed.backing_file_offset;
        prop_assert_eq!(&parsed, &Header { backing_file_offset: offset, ..header });
        prop_assert_eq!(parsed.encode().unwrap(), bytes);
    }

    #[test]
    fn damaged_headers_parse_without_panic(header in any_header(), damage in vec((0usize..400, any::<u8>()), 1..8), cut in 0usize..600) {
        let mut bytes = header.encode().unwrap();
        for (at, byte) in damage {
            if let Some(place) = bytes.get_mut(at) {
                *place = byte;
            }
        }
        bytes.truncate(cut.max(8));
        let _ = (peek_cluster_bits(&bytes), Header::bytes_needed(&bytes));
        if let Ok(header) = Header::parse(&bytes) {
            // An accepted header can be written again, and then has the same bytes.
            let again = Header::parse(&header.encode().unwrap()).unwrap();
            prop_assert_eq!(again.encode().unwrap(), header.encode().unwrap());
        }
    }

    #[test]
    fn indexes_and_addresses_agree(cluster_bits in 9u32..=21, order in 0u32..=6, extended: bool, guest: u64) {
        use cowshed_types::GuestOffset;
        let geometry = Geometry::new(cluster_bits, order, extended && cluster_bits >= 14).unwrap();
        let guest = GuestOffset(guest);
        let start = geometry.guest_at(geometry.l1_index(guest), geometry.l2_index(guest)).unwrap();
        prop_assert_eq!(start.0, geometry.cluster_start(guest.0));
        let subcluster = u64::from(geometry.subcluster_index(guest)) << geometry.subcluster_bits();
        prop_assert!(guest.0 - start.0 - subcluster < geometry.subcluster_size());
        let cluster = guest.0 >> cluster_bits;
        let block = geometry.refcount_table_index(cluster) * geometry.refcount_block_entries();
        prop_assert_eq!(block + geometry.refcount_block_index(cluster), cluster);
    }
}
