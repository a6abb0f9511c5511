// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Conversion in every direction, checked and compared by the real qemu-img.

use crate::oracle::{Bench, run};
use cowshed_jobs::convert::{self, ConvertOptions, ConvertOutcome};
use cowshed_jobs::dd::{self, DdOptions};
use cowshed_jobs::{ImageSpec, JobHandle};
use cowshed_types::Error;
use std::os::unix::fs::MetadataExt;

fn spec(bench: &Bench, name: &str) -> ImageSpec {
    let format = if name.ends_with(".raw") { "raw" } else { "qcow2" };
    ImageSpec::file(bench.path(name)).format(format)
}

fn options(bench: &Bench, sources: &[&str], target: &str, create: &str) -> ConvertOptions {
    let mut options = ConvertOptions::new(sources.iter().map(|name| spec(bench, name)).collect(), spec(bench, target));
    if !create.is_empty() {
        options.create_options.push(create.to_owned());
    }
    options
}

fn convert(options: &ConvertOptions) -> Result<ConvertOutcome, Error> {
    run(convert::run(options, &JobHandle::new()))
}

fn space(bench: &Bench, name: &str) -> u64 {
    std::fs::metadata(bench.path(name)).expect("an image").blocks() * 512
}

#[test]
fn raw_to_raw_keeps_bytes_and_holes() {
    let bench = Bench::new();
    for (seed, len) in [(1, 0), (2, 512), (3, 5 << 20), (4, (33 << 20) + 4096 + 512)] {
        bench.pattern("a.raw", len, seed);
        for out_of_order in [false, true] {
            let outcome = convert(&ConvertOptions { out_of_order, ..options(&bench, &["a.raw"], "b.raw", "") });
            assert_eq!(outcome.expect("converted").size, len);
            let read = |name| std::fs::read(bench.path(name)).expect("an image");
            assert!(read("a.raw") == read("b.raw"), "{len} bytes");
            bench.qemu_img(&["convert", "-f", "raw", "-O", "raw", "a.raw", "theirs.raw"]);
            assert!(space(&bench, "b.raw") <= space(&bench, "theirs.raw") + (64 << 10), "as sparse as by qemu-img");
        }
    }
    convert(&ConvertOptions { sparse_bytes: 0, ..options(&bench, &["a.raw"], "b.raw", "") }).expect("converted");
    assert!(space(&bench, "b.raw") >= 33 << 20, "-S 0 leaves no hole");
    bench.assert_same("a.raw", "b.raw", "-S 0");
    let copied = ConvertOptions { copy_range: true, ..options(&bench, &["a.raw"], "b.raw", "") };
    convert(&copied).expect("copied by the kernel");
    bench.assert_same("a.raw", "b.raw", "-C");
}

/// Small pieces and large ones leave the same holes: where a run of zeroes counts only from a length on, it isn't cut.
#[test]
fn holes_do_not_depend_on_how_the_copy_is_cut() {
    let bench = Bench::new();
    let mut bytes = vec![7; 4 << 20];
    for border in [256 << 10, 768 << 10, 1280 << 10, 3 << 20] {
        bytes[border - (32 << 10)..border + (32 << 10)].fill(0);
    }
    std::fs::write(bench.path("a.raw"), &bytes).expect("a file");
    for (sparse_bytes, zero_bytes) in [(4 << 10, 4 * (64 << 10)), (64 << 10, 3 * (64 << 10)), (128 << 10, 0)] {
        let outcome = convert(&ConvertOptions { sparse_bytes, ..options(&bench, &["a.raw"], "b.raw", "") });
        // The run at 3 MiB lies across a border of the large pieces, which have always cut it.
        assert_eq!(outcome.expect("converted").zero_bytes, zero_bytes, "-S {sparse_bytes}");
        bench.assert_same("a.raw", "b.raw", "the bytes");
    }
    let target = options(&bench, &["a.raw"], "c.qcow2", "cluster_size=64k");
    assert_eq!(convert(&target).expect("converted").zero_bytes, 0, "no cluster is all zeroes");
    let target = options(&bench, &["a.raw"], "c.qcow2", "cluster_size=64k,extended_l2=on");
    assert_eq!(convert(&target).expect("converted").zero_bytes, 4 * (64 << 10), "but subclusters are");
    bench.assert_same("a.raw", "c.qcow2", "subclusters");
}

#[test]
fn raw_to_qcow2_over_the_option_matrix() {
    let bench = Bench::new();
    bench.pattern("a.raw", (9 << 20) + 1536, 7);
    for create in [
        "",
        "cluster_size=512",
        "cluster_size=4k,refcount_bits=1",
        "cluster_size=2M",
        "compat=0.10",
        "extended_l2=on",
        "extended_l2=on,cluster_size=16k,refcount_bits=64",
        "lazy_refcounts=on",
        "preallocation=metadata",
        "preallocation=full,cluster_size=8k",
        "compression_type=zstd",
    ] {
        for (compressed, requests) in [(false, 8), (false, 1), (true, 8), (true, 1)] {
            if compressed && create.contains("preallocation") {
                continue;
            }
            let what = format!("'{create}', compressed: {compressed}, {requests} requests");
            let options = options(&bench, &["a.raw"], "b.qcow2", create);
            println!("{what}");
            convert(&ConvertOptions { compressed, requests, ..options }).expect(&what);
            bench.assert_clean("b.qcow2", &what);
            bench.assert_same("a.raw", "b.qcow2", &what);
        }
    }
}

#[test]
fn qcow2_of_qemu_converts_to_anything() {
    let bench = Bench::new();
    bench.pattern("base.raw", 8 << 20, 11);
    bench.qemu_img(&["convert", "-c", "-f", "raw", "-O", "qcow2", "base.raw", "base.qcow2"]);
    bench.qemu_img(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        "-o",
        "cluster_size=4k",
        "-F",
        "qcow2",
        "-b",
        "base.qcow2",
        "top.qcow2",
        "9M",
    ]);
    bench.qemu_io("top.qcow2", &["write -P 1 1M 70k", "write -z 2M 300k", "write -P 3 8191k 8k", "discard 3M 64k"]);
    for (source, target, create, compressed) in [
        ("top.qcow2", "b.raw", "", false),
        ("top.qcow2", "b.qcow2", "", false),
        ("top.qcow2", "b.qcow2", "cluster_size=2k", true),
        ("base.qcow2", "b.qcow2", "compression_type=zstd", true),
    ] {
        convert(&ConvertOptions { compressed, ..options(&bench, &[source], target, create) }).expect(target);
        if target != "b.raw" {
            bench.assert_clean(target, create);
        }
        bench.assert_same(source, target, create);
    }
}

#[test]
fn above_a_backing_file_only_the_top_layer_is_copied() {
    let bench = Bench::new();
    bench.pattern("base.raw", 8 << 20, 12);
    bench.qemu_img(&["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "base.raw", "top.qcow2", "8M"]);
    bench.qemu_io("top.qcow2", &["write -P 1 1M 70k", "write -z 2M 320k", "write -P 0 4M 64k"]);
    let over = ConvertOptions {
        backing_file: Some("base.raw".to_owned()),
        backing_format: Some("raw".to_owned()),
        ..options(&bench, &["top.qcow2"], "copy.qcow2", "cluster_size=4k")
    };
    let outcome = convert(&over).expect("converted");
    assert!(outcome.data_bytes <= 192 << 10, "{outcome:?}");
    bench.assert_clean("copy.qcow2", "-B");
    bench.assert_same("top.qcow2", "copy.qcow2", "-B");
    assert!(space(&bench, "copy.qcow2") < 1 << 20);
    let two = ConvertOptions { sources: vec![spec(&bench, "top.qcow2"), spec(&bench, "top.qcow2")], ..over };
    assert!(convert(&two).expect_err("two sources").to_string().contains("concatenated"));
}

#[test]
fn several_images_are_concatenated() {
    let bench = Bench::new();
    bench.pattern("a.raw", (1 << 20) + 512, 21);
    bench.pattern("b.raw", 3 << 19, 22);
    bench.qemu_img(&["convert", "-f", "raw", "-O", "qcow2", "b.raw", "b.qcow2"]);
    for compressed in [false, true] {
        let options = options(&bench, &["a.raw", "b.qcow2", "a.raw"], "all.qcow2", "");
        convert(&ConvertOptions { compressed, ..options }).expect("converted");
        bench.qemu_img(&["convert", "-f", "raw", "-O", "raw", "a.raw", "b.raw", "a.raw", "theirs.raw"]);
        bench.assert_clean("all.qcow2", "concatenated");
        bench.assert_same("all.qcow2", "theirs.raw", "concatenated");
    }
}

#[test]
fn an_existing_target_is_overwritten_with_zeroes_too() {
    let bench = Bench::new();
    bench.pattern("a.raw", 4 << 20, 31);
    for target in ["b.raw", "b.qcow2"] {
        let format = if target == "b.raw" { "raw" } else { "qcow2" };
        bench.qemu_img(&["create", "-q", "-f", format, target, "4M"]);
        bench.qemu_io(target, &["write -P 5 0 4M"]);
        convert(&ConvertOptions { skip_create: true, ..options(&bench, &["a.raw"], target, "") }).expect(target);
        bench.assert_same("a.raw", target, "-n");
    }
    bench.assert_clean("b.qcow2", "-n");
    bench.qemu_img(&["create", "-q", "-f", "raw", "small.raw", "1M"]);
    let small = ConvertOptions { skip_create: true, ..options(&bench, &["a.raw"], "small.raw", "") };
    assert!(convert(&small).expect_err("too small").to_string().contains("smaller"));
}

#[test]
fn convert_writes_only_what_differs() {
    let bench = Bench::new();
    bench.pattern("a.raw", 4 << 20, 32);
    bench.qemu_img(&["create", "-q", "-f", "qcow2", "zero.qcow2", "4M"]);
    let into = |target| ConvertOptions { skip_create: true, ..options(&bench, &["a.raw"], target, "") };
    convert(&ConvertOptions { target_is_zero: true, ..into("zero.qcow2") }).expect("--target-is-zero");
    bench.assert_clean("zero.qcow2", "--target-is-zero");
    bench.assert_same("a.raw", "zero.qcow2", "--target-is-zero");

    bench.qemu_img(&["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "a.raw", "top.qcow2", "4M"]);
    bench.qemu_io("top.qcow2", &["write -P 3 1M 64k", "write -z 2M 64k"]);
    bench.qemu_img(&["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "a.raw", "copy.qcow2", "4M"]);
    let over = ConvertOptions {
        skip_create: true,
        backing_file: Some("a.raw".to_owned()),
        backing_format: Some("raw".to_owned()),
        ..options(&bench, &["top.qcow2"], "copy.qcow2", "")
    };
    let outcome = convert(&over).expect("-n -B");
    assert!(outcome.data_bytes <= 128 << 10, "{outcome:?}");
    bench.assert_clean("copy.qcow2", "-n -B");
    bench.assert_same("top.qcow2", "copy.qcow2", "-n -B");
}

#[test]
fn read_errors_name_their_offset_or_are_salvaged() {
    let bench = Bench::new();
    bench.pattern("a.raw", 4 << 20, 41);
    bench.qemu_img(&["convert", "-c", "-f", "raw", "-O", "qcow2", "a.raw", "a.qcow2"]);
    // Spoil a compressed cluster: its place is where its stream stops making sense.
    let map = bench.qemu_img(&["map", "--output=json", "a.qcow2"]);
    let map: serde_json::Value = serde_json::from_str(&map).expect("json");
    let data = map.as_array().expect("runs").iter().find(|run| run["data"] == true).expect("data");
    let start = data["start"].as_u64().expect("a start");
    let mut image = std::fs::read(bench.path("a.qcow2")).expect("the image");
    let end = image.len();
    image[(5 << 16)..end].fill(0xff);
    std::fs::write(bench.path("a.qcow2"), image).expect("the image");
    let options = options(&bench, &["a.qcow2"], "b.raw", "");
    let error = convert(&options).expect_err("a spoiled image").to_string();
    assert!(error.contains("error while reading at byte"), "{error}");
    assert!(!std::path::Path::new(&bench.path("b.raw")).exists(), "a part of a disk stays");
    std::fs::write(bench.path("b.raw"), "old").expect("a file");
    let error = convert(&options).expect_err("a spoiled image").to_string();
    assert!(error.contains("incomplete"), "{error}");
    let outcome = convert(&ConvertOptions { salvage: true, ..options }).expect("salvaged");
    assert!(outcome.salvaged.iter().any(|offset| *offset >= start), "{:?}", outcome.salvaged.first());
}

/// Some nodes above an overlay report only the data of its top layer: the data below is data all the same.
#[test]
fn what_lies_below_an_inner_overlay_is_copied() {
    let bench = Bench::new();
    bench.qemu_img(&["create", "-q", "-f", "qcow2", "base.qcow2", "2M"]);
    bench.qemu_io("base.qcow2", &["write -P 17 0 2M"]);
    bench.qemu_img(&["create", "-q", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", "top.qcow2"]);
    bench.qemu_io("top.qcow2", &["write -P 3 64k 64k", "write -z 256k 64k"]);
    bench.qemu_img(&["convert", "-f", "qcow2", "-O", "raw", "top.qcow2", "theirs.raw"]);
    let whole = std::fs::read(bench.path("theirs.raw")).expect("an image");
    let inner = format!("file.driver=qcow2,file.file.filename={}", bench.path("top.qcow2"));
    let outer =
        |options: &str| ImageSpec { name: format!("{options},{inner}"), image_opts: true, ..ImageSpec::default() };
    for (driver, range) in [
        ("driver=raw", 0..2 << 20),
        ("driver=raw,offset=65536,size=1048576", 64 << 10..(64 << 10) + (1 << 20)),
        ("driver=fault", 0..2 << 20),
    ] {
        let plain = ConvertOptions::new(vec![outer(driver)], spec(&bench, "b.raw"));
        let outcome = convert(&plain).unwrap_or_else(|error| panic!("{driver}: {error}"));
        assert!(std::fs::read(bench.path("b.raw")).expect("an image") == whole[range], "{driver}: {outcome:?}");
        if plain.sources[0].name.contains("size") {
            continue;
        }
        let (backing_file, backing_format) = (Some("base.qcow2".to_owned()), Some("qcow2".to_owned()));
        let above = ConvertOptions { backing_file, backing_format, ..options(&bench, &[], "b.qcow2", "") };
        convert(&ConvertOptions { sources: vec![outer(driver)], ..above }).expect("above a backing file");
        bench.assert_same("top.qcow2", "b.qcow2", driver);
    }
    let dd = DdOptions {
        source: outer("driver=raw"),
        target: spec(&bench, "d.raw"),
        block_bytes: 4096,
        count: None,
        skip: 8,
        keeps_existing: false,
    };
    run(dd::run(&dd, &JobHandle::new())).expect("copied");
    assert!(std::fs::read(bench.path("d.raw")).expect("an image") == whole[8 * 4096..]);
}

#[test]
fn a_cancelled_conversion_stops_and_progress_ends_at_the_size() {
    let bench = Bench::new();
    bench.pattern("a.raw", 4 << 20, 51);
    let job = JobHandle::new();
    run(convert::run(&options(&bench, &["a.raw"], "b.raw", ""), &job)).expect("converted");
    assert_eq!((job.progress().offset, job.progress().len), (4 << 20, 4 << 20));
    let job = JobHandle::new();
    job.cancel();
    let error = run(convert::run(&options(&bench, &["a.raw"], "b.raw", ""), &job)).expect_err("cancelled");
    assert_eq!(error.kind(), cowshed_types::ErrorKind::Cancelled);
}

#[test]
fn the_speed_limit_holds() {
    let bench = Bench::new();
    std::fs::write(bench.path("a.raw"), vec![1; 3 << 20]).expect("a file");
    let started = std::time::Instant::now();
    let limited = ConvertOptions { rate: Some(8 << 20), ..options(&bench, &["a.raw"], "b.raw", "") };
    convert(&limited).expect("converted");
    let seconds = started.elapsed().as_secs_f64();
    assert!((0.1..5.0).contains(&seconds), "{seconds} s for 3 MiB at 8 MiB/s");
}

#[test]
fn what_makes_no_sense_is_refused() {
    let bench = Bench::new();
    bench.pattern("a.raw", 1 << 20, 61);
    let plain = || options(&bench, &["a.raw"], "b.qcow2", "");
    for (options, part) in [
        (ConvertOptions { requests: 0, ..plain() }, "1 to 16"),
        (ConvertOptions { requests: 17, ..plain() }, "1 to 16"),
        (ConvertOptions { sources: Vec::new(), ..plain() }, "no image"),
        (ConvertOptions { target_is_zero: true, ..plain() }, "-n"),
        (ConvertOptions { compressed: true, ..options(&bench, &["a.raw"], "b.raw", "") }, "Compression not supported"),
        (
            ConvertOptions { compressed: true, ..options(&bench, &["a.raw"], "b.qcow2", "preallocation=full") },
            "preallocation",
        ),
        (options(&bench, &["nowhere.raw"], "b.qcow2", ""), "nowhere.raw"),
        (options(&bench, &["a.raw"], "a.raw", ""), "a.raw"),
    ] {
        let error = convert(&options).expect_err(part).to_string();
        assert!(error.contains(part), "{error}");
    }
    assert_eq!(std::fs::metadata(bench.path("a.raw")).expect("the source").len(), 1 << 20);
}
