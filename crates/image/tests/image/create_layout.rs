// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Fresh images equal those of the real qemu-img byte for byte.

use cowshed_create::layout::FreshLayout;
use cowshed_create::qcow2::Qcow2CreateOptions;
use cowshed_create::schema::{OptionValues, QCOW2};
use cowshed_testkit::programs::finish_well;
use std::path::Path;
use std::process::Command;

/// The file that qemu-img writes.
fn reference(folder: &Path, options: &str, size: u64, backing: Option<&str>) -> Vec<u8> {
    let mut command = Command::new("qemu-img");
    command.current_dir(folder).args(["create", "-q", "-f", "qcow2"]);
    if !options.is_empty() {
        command.args(["-o", options]);
    }
    if let Some(backing) = backing {
        command.args(["-u", "-F", "raw", "-b", backing]);
    }
    finish_well(command.arg("a.qcow2").arg(size.to_string()));
    std::fs::read(folder.join("a.qcow2")).expect("the image")
}

/// The file that we would write.
fn ours(options: &str, size: u64, backing: Option<&str>) -> Vec<u8> {
    let lists: Vec<String> = if options.is_empty() { Vec::new() } else { vec![options.to_owned()] };
    let mut values = OptionValues::parse(QCOW2, &lists).expect("options");
    if let Some(backing) = backing {
        values.set("backing_file", backing.to_owned()).expect("backing file");
        values.set("backing_fmt", "raw".to_owned()).expect("backing format");
    }
    let options = Qcow2CreateOptions::from_values(size, &values).expect("typed options");
    let layout = FreshLayout::of(&options).expect("layout");
    let mut image = vec![0; layout.file_bytes as usize];
    let mut put = |offset: u64, bytes: &[u8]| image[offset as usize..][..bytes.len()].copy_from_slice(bytes);
    put(0, &layout.header(&options).expect("header"));
    put(layout.refcount_table_offset, &layout.refcount_table(&options));
    for (index, cluster) in &layout.refcount_blocks {
        put(cluster << options.cluster_bits, &layout.refcount_block(&options, *index));
    }
    image
}

fn check(folder: &Path, options: &str, size: u64, backing: Option<&str>) {
    let (ours, theirs) = (ours(options, size, backing), reference(folder, options, size, backing));
    assert_eq!(ours.len(), theirs.len(), "length with '{options}' at {size}, backing {backing:?}");
    let differs = ours.iter().zip(&theirs).position(|(our, their)| our != their);
    assert_eq!(differs, None, "first difference with '{options}' at {size}, backing {backing:?}");
}

#[test]
fn fresh_images_are_those_of_qemu_img() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut cases = 0;
    for cluster in ["512", "1k", "4k", "8k", "64k", "2M"] {
        for width in [1, 4, 16, 64] {
            for size in [0, 512, 1000, 1 << 20, 1 << 30, 5 << 30] {
                for backing in [None, Some("base.raw")] {
                    check(folder.path(), &format!("cluster_size={cluster},refcount_bits={width}"), size, backing);
                    cases += 1;
                }
            }
        }
    }
    for options in [
        "",
        "compat=0.10",
        "compat=v2,cluster_size=4k",
        "compat=1.1",
        "lazy_refcounts=on",
        "extended_l2=on",
        "extended_l2=on,cluster_size=16k,refcount_bits=8",
        "compression_type=zstd",
        "compression_type=zstd,lazy_refcounts=on,extended_l2=on,cluster_size=1M",
        "data_file=data.raw",
        "data_file=data.raw,compression_type=zlib,refcount_bits=2",
    ] {
        for size in [0, 1 << 20, 100 << 30] {
            for backing in [None, Some("a/much/longer/name.raw")] {
                check(folder.path(), options, size, backing);
                cases += 1;
            }
        }
    }
    println!("{cases} images");
}
