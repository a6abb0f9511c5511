// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Measuring, against the real qemu-img.

use crate::oracle::{Bench, run};
use cowshed_jobs::measure::{self, MeasureOptions};
use cowshed_jobs::{ImageSpec, JobHandle};

fn check(bench: &Bench, source: Option<&str>, size: Option<u64>, format: &str, options: &str) {
    let text = size.map(|size| size.to_string());
    let mut args = vec!["measure", "--output=json", "-O", format];
    if !options.is_empty() {
        args.extend(["-o", options]);
    }
    match (&text, source) {
        (Some(size), _) => args.extend(["--size", size]),
        (None, Some(source)) => args.push(source),
        (None, None) => panic!("nothing to measure"),
    }
    let theirs = bench.tool("qemu-img", &args);
    let ours = run(measure::run(
        &MeasureOptions {
            source: source.map(|name| ImageSpec::file(bench.path(name))),
            size,
            target_format: Some(format.to_owned()),
            create_options: if options.is_empty() { Vec::new() } else { vec![options.to_owned()] },
        },
        &JobHandle::new(),
    ));
    let what = format!("{source:?} {size:?} as {format} with '{options}'");
    if theirs.code != Some(0) {
        let error = ours.err().unwrap_or_else(|| panic!("qemu-img refuses {what}"));
        assert!(!error.to_string().is_empty());
        return;
    }
    let theirs: serde_json::Value = serde_json::from_str(&theirs.out).expect("json");
    assert_eq!(serde_json::to_value(ours.expect(&what)).expect("json"), theirs, "{what}");
}

#[test]
fn empty_images_measure_as_by_qemu_img() {
    let bench = Bench::new();
    for cluster in ["512", "1k", "4k", "64k", "2M"] {
        for width in [1, 16, 64] {
            for size in [0, 1, 512, 1000, 1 << 20, 1 << 30, 1 << 40, 1 << 50, i64::MAX as u64] {
                check(&bench, None, Some(size), "qcow2", &format!("cluster_size={cluster},refcount_bits={width}"));
            }
        }
    }
    for options in
        ["", "preallocation=full", "preallocation=falloc", "preallocation=metadata", "extended_l2=on", "compat=0.10"]
    {
        for size in [0, 1 << 20, 100 << 30] {
            check(&bench, None, Some(size), "qcow2", options);
        }
    }
    for size in [0, 1, 1000, 1 << 40] {
        check(&bench, None, Some(size), "raw", "");
    }
}

#[test]
fn images_measure_as_by_qemu_img() {
    let bench = Bench::new();
    bench.pattern("a.raw", (9 << 20) + 512, 1);
    bench.qemu_img(&["create", "-q", "-f", "qcow2", "base.qcow2", "10M"]);
    bench.qemu_io(
        "base.qcow2",
        &["write 0 64k", "write 1M 100k", "write -z 2M 1M", "write -c 4M 64k", "write 6M 512", "write 9M 1M"],
    );
    bench.qemu_img(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        "-F",
        "qcow2",
        "-b",
        "base.qcow2",
        "-o",
        "cluster_size=4k",
        "top.qcow2",
        "11M",
    ]);
    bench.qemu_io("top.qcow2", &["write 5M 4k", "write -z 1M 64k", "write 10M 10k"]);
    bench.qemu_img(&["create", "-q", "-f", "qcow2", "marked.qcow2", "10G"]);
    bench.qemu_img(&["bitmap", "--add", "marked.qcow2", "first"]);
    bench.qemu_img(&["bitmap", "--add", "-g", "512", "marked.qcow2", "second"]);
    for source in ["a.raw", "base.qcow2", "top.qcow2", "marked.qcow2"] {
        for (format, options) in [
            ("raw", ""),
            ("qcow2", ""),
            ("qcow2", "cluster_size=4k"),
            ("qcow2", "cluster_size=512,refcount_bits=64"),
            ("qcow2", "cluster_size=2M"),
            ("qcow2", "extended_l2=on"),
            ("qcow2", "preallocation=full"),
            ("qcow2", "compat=0.10"),
            ("qcow2", "backing_file=x,backing_fmt=raw"),
        ] {
            check(&bench, Some(source), None, format, options);
        }
    }
}
