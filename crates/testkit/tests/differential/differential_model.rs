// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The harness tested on QEMU alone: qemu-img reads the byte model's data after seeded operations.

use cowshed_testkit::images::{Chain, DataFile, Format, Qcow2Spec, QemuIo};
use cowshed_testkit::qemu::{Qemu, temp_dir};
use cowshed_testkit::random::seeds;

#[test]
fn the_model_agrees_with_qemu() {
    for seed in seeds(25) {
        let qemu = Qemu::for_seed(seed);
        let (folder, chain) = (temp_dir(), Chain::random(seed));
        let mut built = chain.build(&qemu, folder.path(), &mut QemuIo(&qemu));
        if let Err(difference) = built.content.adopt_read(&qemu.content(&built.path, built.format)) {
            panic!("seed {seed}: {difference}\n{}", chain.describe());
        }
        qemu.expect_clean(&built.path);
    }
}

/// The default draws of the seeded tests must reach each value of each option; a new option gets its line here.
#[test]
fn the_default_seeds_cover_the_matrix() {
    let specs: Vec<Qcow2Spec> = (0..40)
        .flat_map(|seed| Chain::random(seed).layers)
        .filter_map(|layer| match layer.format {
            Format::Qcow2(spec) => Some(spec),
            Format::Raw => None,
        })
        .collect();
    let covered = |what: &str, test: &dyn Fn(&Qcow2Spec) -> bool| assert!(specs.iter().any(test), "no seed has {what}");
    for cluster_size in [512, 1024, 4096, 16384, 32768, 65536, 262_144, 2 << 20] {
        covered(&format!("cluster_size={cluster_size}"), &|spec| spec.cluster_size == cluster_size);
    }
    for refcount_bits in [1, 2, 4, 8, 16, 32, 64] {
        covered(&format!("refcount_bits={refcount_bits}"), &|spec| spec.refcount_bits == refcount_bits);
    }
    for mode in ["off", "metadata", "falloc", "full"] {
        covered(&format!("preallocation={mode}"), &|spec| spec.preallocation == mode);
    }
    covered("version 2", &|spec| spec.is_v2);
    covered("subclusters", &|spec| spec.extended_l2);
    covered("subclusters in a data file", &|spec| spec.extended_l2 && spec.data_file.is_some());
    covered("zstd", &|spec| spec.zstd && spec.allows_compression());
    covered("zlib", &|spec| !spec.zstd && spec.allows_compression());
    covered("lazy refcounts", &|spec| spec.lazy_refcounts);
    covered("a data file", &|spec| spec.data_file == Some(DataFile::Mapped));
    covered("a raw data file", &|spec| spec.data_file == Some(DataFile::Raw));
}
