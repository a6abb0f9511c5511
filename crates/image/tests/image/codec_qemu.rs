// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Every compressed cluster of images that the real qemu-img wrote decompresses to the source. A walk of our own through
//! their tables finds the clusters. The real qemu-img reads clusters that we compress and that the test puts into an
//! image by hand.

use cowshed_codec::{Codec, ZlibMode};
use cowshed_layout::bytes::{be64_entries, be64_table};
use cowshed_layout::qcow2::{Cluster, CompressedDescriptor, Header, L1Entry, L2Entry, L2Format};
use cowshed_testkit::programs::run;
use cowshed_types::{Compression, HostOffset};
use std::path::Path;

/// 8 MiB: this test's own program (as real data as there is everywhere), text, zeroes, noise.
fn source() -> Vec<u8> {
    let mut bytes = std::fs::read(std::env::current_exe().unwrap()).unwrap();
    bytes.truncate(5 << 20);
    while bytes.len() < 6 << 20 {
        bytes.extend_from_slice(format!("{} cows in the shed\n", bytes.len() * 7919).as_bytes());
    }
    bytes.resize(7 << 20, 0);
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    while bytes.len() < 8 << 20 {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.push((state >> 24) as u8);
    }
    bytes
}

/// Guest cluster number and descriptor of every compressed cluster.
fn compressed_clusters(image: &[u8], header: &Header) -> Vec<(u64, CompressedDescriptor)> {
    let format = L2Format::of(header).unwrap();
    let cluster_size = header.cluster_size() as usize;
    let l1 = &image[header.l1_table_offset as usize..][..header.l1_size as usize * 8];
    let mut found = Vec::new();
    for (l1_index, raw) in be64_entries(l1).enumerate() {
        let Some(table) = L1Entry(raw).table(format.geometry).unwrap() else { continue };
        let step = format.geometry.l2_entry_size() as usize / 8;
        for (l2_index, raw) in be64_entries(&image[table.0 as usize..][..cluster_size]).step_by(step).enumerate() {
            if let Cluster::Compressed(descriptor) = L2Entry(raw).cluster(format).unwrap() {
                let guest = format.geometry.guest_at(l1_index as u64, l2_index as u64).unwrap();
                found.push((guest.0 >> header.cluster_bits, descriptor));
            }
        }
    }
    found
}

#[test]
fn clusters_written_by_qemu_decompress_to_the_source() {
    let dir = tempfile::tempdir().unwrap();
    let source = source();
    std::fs::write(dir.path().join("source.raw"), &source).unwrap();
    for options in [
        "compression_type=zlib",
        "compression_type=zstd",
        "compression_type=zlib,cluster_size=512",
        "compression_type=zstd,cluster_size=4k",
        "compression_type=zlib,cluster_size=2M",
        "compression_type=zstd,cluster_size=2M,extended_l2=on",
        "compression_type=zlib,extended_l2=on",
        "compat=0.10,cluster_size=16k",
    ] {
        run("qemu-img", dir.path(), &["convert", "-c", "-O", "qcow2", "-o", options, "source.raw", "a.qcow2"]);
        let image = std::fs::read(dir.path().join("a.qcow2")).unwrap();
        let header = Header::parse(&image).unwrap();
        let codec = Codec::new(header.compression());
        let clusters = compressed_clusters(&image, &header);
        assert!(clusters.len() as u64 * header.cluster_size() >= 4 << 20, "{options}: {}", clusters.len());
        let mut cluster = vec![0; header.cluster_size() as usize];
        for (number, descriptor) in clusters {
            let start = descriptor.host_offset.0 as usize;
            // The file may end before the last sector does.
            let end = (start + descriptor.len_max() as usize).min(image.len());
            codec.decompress(&image[start..end], &mut cluster).unwrap();
            let at = number as usize * cluster.len();
            assert!(cluster == source[at..at + cluster.len()], "{options}: cluster {number}");
        }
    }
}

/// An image of one L2 table, built by hand, with every cluster that shrinks compressed by `codec` and packed.
fn build(source: &[u8], codec: Codec, options: &str, dir: &Path) {
    let size = source.len().to_string();
    run("qemu-img", dir, &["create", "-q", "-f", "qcow2", "-o", options, "ours.qcow2", &size]);
    let mut image = std::fs::read(dir.join("ours.qcow2")).unwrap();
    let header = Header::parse(&image).unwrap();
    let cluster_size = header.cluster_size() as usize;
    let (table, mut entries) = (image.len().next_multiple_of(cluster_size), Vec::new());
    image.resize(table + cluster_size, 0);
    let mut out = Vec::new();
    for cluster in source.chunks_exact(cluster_size) {
        let entry = match codec.compress(cluster, &mut out) {
            Some(len) => {
                let descriptor = CompressedDescriptor::new(HostOffset(image.len() as u64), len as u64).unwrap();
                image.extend_from_slice(&out);
                L2Entry::compressed(descriptor, header.cluster_bits).unwrap()
            }
            None => {
                image.resize(image.len().next_multiple_of(cluster_size), 0);
                let entry = L2Entry::data(HostOffset(image.len() as u64), true);
                image.extend_from_slice(cluster);
                entry
            }
        };
        entries.push(entry.0);
    }
    image[table..][..entries.len() * 8].copy_from_slice(&be64_table(&entries));
    let l1 = L1Entry::new(HostOffset(table as u64), true);
    image[header.l1_table_offset as usize..][..8].copy_from_slice(&l1.0.to_be_bytes());
    std::fs::write(dir.join("ours.qcow2"), &image).unwrap();
}

#[test]
fn clusters_that_we_write_are_read_by_qemu() {
    let dir = tempfile::tempdir().unwrap();
    let source = source();
    std::fs::write(dir.path().join("source.raw"), &source).unwrap();
    let zlib = Codec::new(Compression::Zlib);
    let zstd = Codec::new(Compression::Zstd);
    for (codec, options) in [
        (zlib, "cluster_size=64k"),
        (zlib, "cluster_size=2M"),
        (Codec::zlib(ZlibMode::Narrow { level: 1 }).unwrap(), "cluster_size=64k"),
        (Codec::zlib(ZlibMode::Narrow { level: 9 }).unwrap(), "cluster_size=64k"),
        (Codec::zlib(ZlibMode::Fast { level: 1 }).unwrap(), "cluster_size=64k"),
        (Codec::zlib(ZlibMode::Fast { level: 9 }).unwrap(), "cluster_size=2M"),
        (zstd, "cluster_size=64k,compression_type=zstd"),
        (zstd, "cluster_size=2M,compression_type=zstd"),
        (Codec::zstd(15).unwrap(), "cluster_size=64k,compression_type=zstd"),
    ] {
        build(&source, codec, options, dir.path());
        // Refcounts aren't built here, so this compares the data and leaves `check` to other tests.
        run("qemu-img", dir.path(), &["compare", "-q", "-f", "qcow2", "-F", "raw", "ours.qcow2", "source.raw"]);
    }
}
