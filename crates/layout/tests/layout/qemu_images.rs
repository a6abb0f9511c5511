// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Images written by the real qemu-img, over its creation options: parsed right, and encoded again to the same bytes.

use cowshed_layout::bytes::be64_entries;
use cowshed_layout::probe::{FormatName, probe};
use cowshed_layout::qcow2::features::{
    AUTOCLEAR_BITMAPS, AUTOCLEAR_RAW_DATA, COMPAT_LAZY_REFCOUNTS, FeatureKind, INCOMPAT_COMPRESSION,
    INCOMPAT_DATA_FILE, INCOMPAT_EXTL2,
};
use cowshed_layout::qcow2::{
    Cluster, Extension, Header, L1Entry, L2Entry, L2Format, Parsed, RefcountTableEntry, Subcluster, SubclusterBitmap,
    bitmap, refcount, snapshot,
};
use cowshed_testbase::programs::run;
use cowshed_testbase::temp_dir;
use std::path::Path;

/// The bytes of a fresh image.
fn create(options: &str, more: &[&str], size: &str) -> (tempfile::TempDir, Vec<u8>) {
    let dir = temp_dir();
    std::fs::write(dir.path().join("base.raw"), vec![0; 65536]).unwrap();
    let mut arguments = vec!["create", "-q", "-f", "qcow2"];
    if !options.is_empty() {
        arguments.extend(["-o", options]);
    }
    arguments.extend(more);
    arguments.extend(["a.qcow2", size]);
    run("qemu-img", dir.path(), &arguments);
    let bytes = read(dir.path());
    (dir, bytes)
}

fn read(dir: &Path) -> Vec<u8> {
    std::fs::read(dir.join("a.qcow2")).unwrap()
}

/// Parses, and checks the facts of every image that qemu-img makes.
fn parse(bytes: &[u8]) -> Header {
    assert_eq!(probe(bytes), FormatName::Qcow2);
    let header = Header::parse(bytes).unwrap();
    header.check_tables_within(bytes.len() as u64).unwrap();
    header.require_refcount_table().unwrap();
    // The same from no more bytes than are asked for.
    let need = Header::bytes_needed(&bytes[..bytes.len().min(4096)]).unwrap();
    assert!(need <= header.cluster_size() as usize);
    assert_eq!(Header::parse(&bytes[..need]).unwrap(), header);
    let encoded = header.encode().unwrap();
    assert!(bytes.starts_with(&encoded), "not encoded as qemu-img does");
    header
}

#[test]
fn cluster_sizes_versions_and_refcount_widths() {
    for compat in ["0.10", "1.1"] {
        for cluster_bits in 9..=21 {
            let v3 = compat == "1.1";
            let refcount_bits = if v3 { 1 << (cluster_bits % 7) } else { 16 };
            let options = format!("compat={compat},cluster_size={},refcount_bits={refcount_bits}", 1 << cluster_bits);
            let (_dir, bytes) = create(&options, &[], "3G");
            let header = parse(&bytes);
            assert_eq!(header.version, if v3 { 3 } else { 2 });
            assert_eq!((header.cluster_bits, header.size), (cluster_bits, 3 << 30));
            assert_eq!(1 << header.refcount_order, refcount_bits);
            assert_eq!(header.incompatible_features | header.compatible_features | header.autoclear_features, 0);
            let geometry = header.geometry().unwrap();
            assert_eq!(u64::from(header.l1_size), geometry.l1_entries_needed(3 << 30));
            // qemu-img's own layout: header, refcount table, refcount block, L1 table.
            assert_eq!(header.refcount_table_offset, header.cluster_size());
            if v3 {
                let mut fresh = Header::new(3, cluster_bits);
                fresh.clone_tables(&header);
                assert_eq!(fresh.encode().unwrap(), header.encode().unwrap());
            }
        }
    }
}

/// Takes over the fields that a creator would fill in.
trait CloneTables {
    fn clone_tables(&mut self, from: &Header);
}

impl CloneTables for Header {
    fn clone_tables(&mut self, from: &Header) {
        self.size = from.size;
        self.refcount_order = from.refcount_order;
        self.l1_size = from.l1_size;
        self.l1_table_offset = from.l1_table_offset;
        self.refcount_table_offset = from.refcount_table_offset;
        self.refcount_table_clusters = from.refcount_table_clusters;
    }
}

#[test]
fn feature_bits_and_extensions() {
    let (_dir, bytes) = create("extended_l2=on,cluster_size=128k", &[], "1G");
    let header = parse(&bytes);
    assert_eq!(header.incompatible_features, INCOMPAT_EXTL2);
    assert!(header.geometry().unwrap().extended_l2());
    assert_eq!(header.feature_name(FeatureKind::Incompatible, 4).as_deref(), Some("extended L2 entries"));

    let (_dir, bytes) = create("lazy_refcounts=on", &[], "1G");
    assert_eq!(parse(&bytes).compatible_features, COMPAT_LAZY_REFCOUNTS);

    let (_dir, bytes) = create("compression_type=zstd", &[], "1G");
    let header = parse(&bytes);
    assert_eq!((header.incompatible_features, header.compression_type), (INCOMPAT_COMPRESSION, 1));

    let (_dir, bytes) = create("data_file=data.raw,data_file_raw=on", &[], "64M");
    let header = parse(&bytes);
    assert_eq!((header.incompatible_features, header.autoclear_features), (INCOMPAT_DATA_FILE, AUTOCLEAR_RAW_DATA));
    assert_eq!(header.data_file_name().as_deref(), Some("data.raw"));

    for compat in ["0.10", "1.1"] {
        let (_dir, bytes) = create(&format!("compat={compat}"), &["-b", "base.raw", "-F", "raw"], "64M");
        let header = parse(&bytes);
        assert_eq!(header.backing_file_name().as_deref(), Some("base.raw"));
        assert_eq!(header.backing_format().as_deref(), Some("raw"));
    }

    let long = format!("{}.raw", "x".repeat(1019));
    let (_dir, bytes) = create("", &["-u", "-b", &long, "-F", "raw"], "64M");
    assert_eq!(parse(&bytes).backing_file_name().as_deref(), Some(long.as_str()));

    let (_dir, bytes) = create("preallocation=metadata,cluster_size=4k", &[], "8M");
    let header = parse(&bytes);
    let (allocated, _) = count_clusters(&bytes, &header);
    assert_eq!(allocated, 2048);
}

#[test]
fn encryption() {
    let secret = ["--object", "secret,id=s,data=moo"];
    let options = "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10";
    let (_dir, bytes) = create(options, &secret, "64M");
    let header = parse(&bytes);
    assert_eq!(header.crypt_method, 2);
    let pointer = header.encryption_header().unwrap();
    let at = pointer.offset as usize;
    assert_eq!(probe(&bytes[at..]), FormatName::Luks);

    let (_dir, bytes) = create("encrypt.format=aes,encrypt.key-secret=s", &secret, "64M");
    assert_eq!(parse(&bytes).crypt_method, 1);
}

#[test]
fn bitmaps() {
    let (dir, _) = create("", &[], "1G");
    for (name, granularity) in [("first", "64k"), ("second", "1M")] {
        run("qemu-img", dir.path(), &["bitmap", "--add", "-g", granularity, "a.qcow2", name]);
    }
    run("qemu-img", dir.path(), &["bitmap", "--disable", "a.qcow2", "second"]);
    let bytes = read(dir.path());
    let header = parse(&bytes);
    assert_eq!(header.autoclear_features, AUTOCLEAR_BITMAPS);
    let extension = header.bitmaps().unwrap();
    let entries = bitmap::parse_directory(&bytes[extension.directory_offset as usize..], extension).unwrap();
    let seen: Vec<_> =
        entries.iter().map(|entry| (entry.name.as_slice(), entry.granularity_bits, entry.flags)).collect();
    assert_eq!(seen, [(&b"first"[..], 16, bitmap::FLAG_AUTO), (&b"second"[..], 20, 0)]);
    for entry in &entries {
        entry.validate(header.size, header.cluster_bits).unwrap();
        let table = &bytes[entry.table_offset as usize..][..entry.table_size as usize * 8];
        for raw in be64_entries(table) {
            bitmap::BitmapTableEntry(raw).cluster(header.cluster_bits).unwrap();
        }
    }
}

#[test]
fn snapshots() {
    for (compat, version) in [("0.10", 2), ("1.1", 3)] {
        let (dir, _) = create(&format!("compat={compat}"), &[], "1G");
        for name in ["one", "the second snapshot"] {
            run("qemu-io", dir.path(), &["-c", "write -P 7 0 64k", "a.qcow2"]);
            run("qemu-img", dir.path(), &["snapshot", "-c", name, "a.qcow2"]);
        }
        let bytes = read(dir.path());
        let header = parse(&bytes);
        assert_eq!(header.nb_snapshots, 2);
        let table = &bytes[header.snapshots_offset as usize..];
        let Parsed::Complete { value, .. } = snapshot::parse_table(table, 2).unwrap() else { panic!("incomplete") };
        let seen: Vec<_> = value.iter().map(|snapshot| (snapshot.id.as_slice(), snapshot.name.as_slice())).collect();
        assert_eq!(seen, [(&b"1"[..], &b"one"[..]), (b"2", b"the second snapshot")]);
        for snapshot in value {
            snapshot.validate(version, header.cluster_bits).unwrap();
            assert_eq!((snapshot.vm_state_bytes(), snapshot.disk_size_bytes()), (0, Some(1 << 30)));
            assert_eq!(snapshot.l1_size, header.l1_size);
            let encoded = snapshot.encode().unwrap();
            // The file may end before the padding of the last entry.
            let unpadded = 40 + snapshot.extra_data.len() + snapshot.id.len() + snapshot.name.len();
            assert!(table.windows(unpadded).step_by(8).any(|window| window == &encoded[..unpadded]));
        }
        // Data and L2 table are shared now: the active entries aren't COPIED.
        let (allocated, copied) = count_clusters(&bytes, &header);
        assert_eq!((allocated, copied), (1, 0));
    }
}

/// Allocated guest clusters of the active L1 table, and how many of them are COPIED; checks each against its refcount.
fn count_clusters(bytes: &[u8], header: &Header) -> (usize, usize) {
    let format = L2Format::of(header).unwrap();
    let (mut allocated, mut copied) = (0, 0);
    let l1 = &bytes[header.l1_table_offset as usize..][..header.l1_size as usize * 8];
    for table in be64_entries(l1).filter_map(|raw| L1Entry(raw).table(format.geometry).unwrap()) {
        let end = (table.0 + header.cluster_size()).min(bytes.len() as u64);
        for raw in be64_entries(&bytes[table.0 as usize..end as usize]) {
            let entry = L2Entry(raw);
            if let Cluster::Data { host } = entry.cluster(format).unwrap() {
                allocated += 1;
                copied += usize::from(entry.is_copied());
                let count = refcount_of(bytes, header, host.0);
                assert_eq!(count == 1, entry.is_copied(), "refcount {count} of {host}");
            }
        }
    }
    (allocated, copied)
}

fn refcount_of(bytes: &[u8], header: &Header, host: u64) -> u64 {
    let geometry = header.geometry().unwrap();
    let cluster = host >> header.cluster_bits;
    let at = header.refcount_table_offset + geometry.refcount_table_index(cluster) * 8;
    let raw = be64_entries(&bytes[at as usize..]).next().unwrap();
    let block = RefcountTableEntry(raw).block(geometry).unwrap().unwrap();
    let block = &bytes[block.0 as usize..][..header.cluster_size() as usize];
    refcount::get(block, header.refcount_order, geometry.refcount_block_index(cluster) as usize)
}

#[test]
fn entries_of_written_clusters() {
    let (dir, _) = create("cluster_size=64k,refcount_bits=2", &[], "64M");
    run(
        "qemu-io",
        dir.path(),
        &["-c", "write 0 128k", "-c", "write -z 1M 64k", "-c", "write -c -P 3 2M 64k", "a.qcow2"],
    );
    let bytes = read(dir.path());
    let header = parse(&bytes);
    let format = L2Format::of(&header).unwrap();
    let l1 = L1Entry(be64_entries(&bytes[header.l1_table_offset as usize..]).next().unwrap());
    assert!(l1.is_copied());
    let table = l1.table(format.geometry).unwrap().unwrap();
    let l2: Vec<u64> = be64_entries(&bytes[table.0 as usize..][..65536]).collect();
    let cluster = |index: usize| L2Entry(l2[index]).cluster(format).unwrap();
    assert!(matches!(cluster(0), Cluster::Data { .. }) && matches!(cluster(1), Cluster::Data { .. }));
    assert_eq!(cluster(2), Cluster::Unallocated);
    assert_eq!(cluster(16), Cluster::Zero { host: None });
    let Cluster::Compressed(descriptor) = cluster(32) else { panic!("{:?}", cluster(32)) };
    assert!(descriptor.sectors >= 1 && descriptor.len_max() < 65536);
    assert_eq!(refcount_of(&bytes, &header, descriptor.host_offset.0), 1);
    count_clusters(&bytes, &header);
}

#[test]
fn subclusters() {
    let (dir, _) = create("extended_l2=on,cluster_size=64k", &[], "64M");
    run("qemu-io", dir.path(), &["-c", "write 4k 6k", "-c", "write -z 16k 2k", "a.qcow2"]);
    let bytes = read(dir.path());
    let header = parse(&bytes);
    let format = L2Format::of(&header).unwrap();
    let l1 = L1Entry(be64_entries(&bytes[header.l1_table_offset as usize..]).next().unwrap());
    let table = l1.table(format.geometry).unwrap().unwrap();
    let mut entries = be64_entries(&bytes[table.0 as usize..]);
    let entry = L2Entry(entries.next().unwrap());
    let bitmap = SubclusterBitmap(entries.next().unwrap());
    assert!(matches!(entry.cluster(format).unwrap(), Cluster::Data { .. }));
    assert!(bitmap.is_valid());
    assert_eq!(bitmap.run(0), (Subcluster::Unallocated, 2));
    assert_eq!(bitmap.run(2), (Subcluster::Data, 3));
    assert_eq!(bitmap.run(5), (Subcluster::Unallocated, 3));
    assert_eq!(bitmap.run(8), (Subcluster::Zero, 1));
    assert_eq!(bitmap.run(9), (Subcluster::Unallocated, 23));
}

#[test]
fn what_we_add_qemu_keeps_reading() {
    let (dir, mut bytes) = create("", &["-b", "base.raw", "-F", "raw"], "64M");
    let mut header = parse(&bytes);
    header.extensions.push(Extension::Unknown { kind: 0x1234_5678, data: b"kept".to_vec() });
    let encoded = header.encode().unwrap();
    bytes[..4096].fill(0);
    bytes[..encoded.len()].copy_from_slice(&encoded);
    std::fs::write(dir.path().join("a.qcow2"), &bytes).unwrap();
    run("qemu-img", dir.path(), &["check", "-q", "a.qcow2"]);
    // qemu-img writes the whole header anew for this, and keeps unknown parts as well.
    run("qemu-img", dir.path(), &["amend", "-o", "lazy_refcounts=on", "a.qcow2"]);
    let again = Header::parse(&read(dir.path())).unwrap();
    assert_eq!(again.backing_file, header.backing_file);
    assert!(again.extensions.contains(&Extension::Unknown { kind: 0x1234_5678, data: b"kept".to_vec() }));
}
