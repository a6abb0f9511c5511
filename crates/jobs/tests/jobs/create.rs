// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Creation, against the real qemu-img.

use crate::oracle::{Bench, run};
use cowshed_image::Preallocation;
use cowshed_jobs::create::{self, CreateRequest};
use cowshed_jobs::resize::{self, NewSize, ResizeOptions};
use cowshed_jobs::{ImageSpec, JobHandle};
use cowshed_simulator::{Config, Features, PageMap, Snapshot, World};
use cowshed_types::ErrorKind;

fn request(bench: &Bench, name: &str, options: &str, size: Option<u64>) -> CreateRequest {
    CreateRequest {
        filename: bench.path(name),
        format: "qcow2".to_owned(),
        size,
        options: if options.is_empty() { Vec::new() } else { vec![options.to_owned()] },
        ..CreateRequest::default()
    }
}

#[test]
fn a_created_file_is_that_of_qemu_img() {
    let bench = Bench::new();
    for (options, size) in [
        ("", 1 << 30),
        ("cluster_size=512", 64 << 20),
        ("cluster_size=4k,refcount_bits=64", 1 << 30),
        ("compat=0.10", 1 << 30),
        ("extended_l2=on,lazy_refcounts=on,compression_type=zstd", 3 << 30),
    ] {
        // Over an old file: nothing of it may show through.
        std::fs::write(bench.path("ours.qcow2"), vec![0xaa; 1 << 20]).expect("an old file");
        let request = request(&bench, "ours.qcow2", options, Some(size));
        let plan = run(create::run(&request, &JobHandle::new())).expect(options);
        let mut args = vec!["create", "-f", "qcow2"];
        if !options.is_empty() {
            args.extend(["-o", options]);
        }
        let size = size.to_string();
        args.extend(["theirs.qcow2", &size]);
        let text = bench.qemu_img(&args);
        assert_eq!(plan.summary().replace(&bench.path("ours.qcow2"), "theirs.qcow2"), text.trim_end());
        let read = |name| std::fs::read(bench.path(name)).expect("an image");
        assert!(read("ours.qcow2") == read("theirs.qcow2"), "{options}");
    }
}

#[test]
fn preallocated_images_are_clean_and_mapped_as_by_qemu_img() {
    let bench = Bench::new();
    bench.qemu_img(&["create", "-q", "-f", "raw", "base.raw", "3M"]);
    for mode in ["metadata", "falloc", "full"] {
        for options in
            ["", ",cluster_size=512", ",extended_l2=on", ",data_file=data.raw", ",refcount_bits=64,cluster_size=1k"]
        {
            for size in [0, 512, 5 << 20, (7 << 20) + 512] {
                let options = format!("preallocation={mode}{options}");
                let ours = options.replace("data.raw", &bench.path("data.raw"));
                run(create::run(&request(&bench, "ours.qcow2", &ours, Some(size)), &JobHandle::new())).expect(&options);
                bench.assert_clean("ours.qcow2", &options);
                let map = |image| bench.qemu_img(&["map", "--output=json", image]);
                let our_map = map("ours.qcow2");
                let text = size.to_string();
                bench.qemu_img(&["create", "-q", "-f", "qcow2", "-o", &options, "theirs.qcow2", &text]);
                // Whether the file has holes there is its own affair: the allocation must be the same.
                let allocated = |map: &str| -> u64 {
                    let map: serde_json::Value = serde_json::from_str(map).expect("json");
                    let runs = map.as_array().expect("runs").iter().filter(|run| run["present"] == true);
                    runs.map(|run| run["length"].as_u64().expect("a length")).sum()
                };
                assert_eq!(allocated(&our_map), allocated(&map("theirs.qcow2")), "{options} at {size}");
                let blocks = |name: &str| {
                    use std::os::unix::fs::MetadataExt;
                    std::fs::metadata(bench.path(name)).expect("an image").blocks() * 512
                };
                if mode != "metadata" && !options.contains("data_file") {
                    assert!(blocks("ours.qcow2") >= size, "{options} at {size}");
                }
            }
        }
    }
    let options = "preallocation=metadata,extended_l2=on";
    let over = CreateRequest {
        backing_file: Some("base.raw".to_owned()),
        backing_format: Some("raw".to_owned()),
        ..request(&bench, "over.qcow2", options, None)
    };
    assert_eq!(run(create::run(&over, &JobHandle::new())).expect("an overlay").size(), 3 << 20);
    bench.assert_clean("over.qcow2", options);
    bench.assert_same("over.qcow2", "base.raw", options);
}

#[test]
fn what_qemu_img_refuses_is_refused_and_the_file_kept() {
    let bench = Bench::new();
    bench.qemu_img(&["create", "-q", "-f", "raw", "base.raw", "1M"]);
    std::fs::write(bench.path("ours.qcow2"), b"precious").expect("a file");
    for (options, part) in [
        ("cluster_size=1000", "power of two between 512 and 2048k"),
        ("cluster_size=256", "power of two"),
        ("cluster_size=4M", "power of two"),
        ("cluster_size=x", "cluster_size"),
        ("extended_l2=on,cluster_size=8k", "16384"),
        ("extended_l2=on,compat=0.10", "1.1"),
        ("extended_l2=maybe", "'on' or 'off'"),
        ("refcount_bits=3", "power of two"),
        ("refcount_bits=128", "64 bits"),
        ("refcount_bits=8,compat=v2", "1.1"),
        ("lazy_refcounts=on,compat=v2", "1.1"),
        ("compression_type=zstd,compat=v2", "1.1"),
        ("compression_type=lz4", "does not accept value 'lz4': zlib and zstd"),
        ("compat=1.2", "does not accept value '1.2': 0.10, v2, 1.1 and v3"),
        ("data_file_raw=on", "data-file-raw requires data-file"),
        ("data_file=d.raw,compat=v2", "1.1"),
        ("data_file=d.raw,data_file_raw=on,backing_file=base.raw,backing_fmt=raw", "cannot be used at the same time"),
        ("preallocation=metadata,backing_file=base.raw,backing_fmt=raw", "extended_l2"),
        ("preallocation=some", "preallocation"),
        ("backing_fmt=raw", "Backing format"),
        ("backing_file=base.raw", "specified without backing format"),
        ("backing_file=nowhere.raw,backing_fmt=raw", "nowhere.raw"),
        ("backing_file=base.raw,backing_fmt=qcow2", "base.raw"),
        ("bogus=1", "'bogus'"),
        ("size=2M", "only once"),
        ("cluster_size=64k,", "option list"),
        ("encrypt.format=luks", "Parameter 'encrypt.key-secret' is required for cipher"),
        ("encrypt.format=luks,encrypt.key-secret=nobody", "No secret with id 'nobody'"),
        ("encrypt.format=rot13", "does not accept value 'rot13'"),
        ("encrypt.key-secret=s", "'encrypt.format' is missing"),
        ("encrypt.format=luks,encrypt.cipher-alg=rot13", "does not accept value 'rot13'"),
        (
            "encrypt.format=luks,encrypt.cipher-mode=cbc,encrypt.ivgen-alg=essiv,encrypt.ivgen-hash-alg=sha1",
            "key_bytes",
        ),
        ("encryption=on", "Parameter 'encrypt.key-secret' is required for cipher"),
        ("encryption=on,encrypt.format=aes", "can't be used at the same time"),
        ("encrypt.format=aes,encrypt.cipher-alg=aes-128", "Parameter 'encrypt.cipher-alg' is unexpected"),
    ] {
        let theirs = bench.tool("qemu-img", &["create", "-f", "qcow2", "-o", options, "theirs.qcow2", "1M"]);
        assert_eq!(theirs.code, Some(1), "qemu-img with {options}");
        let error = run(create::run(&request(&bench, "ours.qcow2", options, Some(1 << 20)), &JobHandle::new()))
            .expect_err(options)
            .to_string();
        assert!(error.contains(part), "{options}: {error}");
        assert_eq!(std::fs::read(bench.path("ours.qcow2")).expect("the file"), b"precious", "{options}");
    }
    for size in [None, Some(u64::MAX), Some(1 << 62)] {
        run(create::run(&request(&bench, "ours.qcow2", "", size), &JobHandle::new())).expect_err("a bad size");
    }
    assert_eq!(std::fs::read(bench.path("ours.qcow2")).expect("the file"), b"precious");
}

#[test]
fn an_overlay_takes_size_and_name_of_its_backing_file() {
    let bench = Bench::new();
    std::fs::create_dir(bench.path("sub")).expect("a folder");
    bench.qemu_img(&["create", "-q", "-f", "qcow2", "sub/base.qcow2", "5M"]);
    let overlay = CreateRequest {
        backing_file: Some("base.qcow2".to_owned()),
        backing_format: Some("qcow2".to_owned()),
        ..request(&bench, "sub/top.qcow2", "", None)
    };
    assert_eq!(run(create::run(&overlay, &JobHandle::new())).expect("an overlay").size(), 5 << 20);
    let info = bench.qemu_img(&["info", "sub/top.qcow2"]);
    assert!(info.contains("backing file: base.qcow2 (actual path: sub/base.qcow2)"), "{info}");
    // Unchecked, nothing needs to exist, but the size must be given.
    let unchecked = CreateRequest {
        backing_file: Some("nowhere.raw".to_owned()),
        backing_format: Some("raw".to_owned()),
        backing_unchecked: true,
        ..request(&bench, "loose.qcow2", "", Some(1 << 20))
    };
    run(create::run(&unchecked, &JobHandle::new())).expect("an overlay on nothing");
    run(create::run(&CreateRequest { size: None, ..unchecked }, &JobHandle::new())).expect_err("no size");
}

#[test]
fn raw_images_have_the_size_and_space_asked_for() {
    use std::os::unix::fs::MetadataExt;
    let bench = Bench::new();
    for (mode, reserved) in [("off", false), ("falloc", true), ("full", true)] {
        let request = CreateRequest {
            format: "raw".to_owned(),
            ..request(&bench, "a.raw", &format!("preallocation={mode}"), Some((2 << 20) + 1))
        };
        run(create::run(&request, &JobHandle::new())).expect(mode);
        let metadata = std::fs::metadata(bench.path("a.raw")).expect("the file");
        assert_eq!(metadata.len(), (2 << 20) + 512);
        assert_eq!(metadata.blocks() * 512 >= 2 << 20, reserved, "{mode}");
    }
    let request =
        CreateRequest { format: "raw".to_owned(), ..request(&bench, "a.raw", "preallocation=metadata", Some(1)) };
    run(create::run(&request, &JobHandle::new())).expect_err("raw has no metadata");
}

/// ZFS and NFS before 4.2 have no `fallocate`.
#[test]
fn space_is_written_where_the_file_system_reserves_none() {
    const SIZE: u64 = 2 << 20;
    let features = Features { allocate: false, ..Features::default() };
    for (format, extra) in [("raw", ""), ("qcow2", ""), ("qcow2", ",data_file=d"), ("qcow2", ",compat=0.10")] {
        let world = World::new(Config { features, ..Config::new(1) });
        let request = CreateRequest {
            filename: "a".to_owned(),
            format: format.to_owned(),
            size: Some(SIZE),
            options: vec![format!("preallocation=falloc{extra}")],
            ..CreateRequest::default()
        };
        world.run(create::run(&request, &JobHandle::new())).unwrap_or_else(|error| panic!("{format}{extra}: {error}"));
        let allocated = |world: &World| -> u64 {
            ["a", "d"].iter().filter_map(|name| world.contents(name)).map(|file| file.allocated_bytes()).sum()
        };
        assert!(allocated(&world) >= SIZE, "{format}{extra}: {} bytes", allocated(&world));
        let resize = ResizeOptions {
            image: ImageSpec::file("a").format(format),
            size: NewSize::Grow(SIZE),
            shrink: false,
            preallocation: Preallocation::Falloc,
        };
        world.run(resize::run(&resize, &JobHandle::new())).unwrap_or_else(|error| panic!("{format}{extra}: {error}"));
        assert!(allocated(&world) >= 2 * SIZE, "{format}{extra}: {} bytes", allocated(&world));
    }
}

/// A growth that found no room is taken back.
#[test]
fn a_raw_image_that_could_not_grow_keeps_its_length() {
    for preallocation in [Preallocation::Falloc, Preallocation::Full] {
        for allocate in [true, false] {
            let features = Features { allocate, ..Features::default() };
            let config = Config { features, capacity_bytes: Some(3 << 20), ..Config::new(1) };
            let files = Snapshot::from([("a".to_owned(), PageMap::from_bytes(&vec![7; 1 << 20]))]);
            let world = World::with_files(config, &files);
            let resize = ResizeOptions {
                image: ImageSpec::file("a").format("raw"),
                size: NewSize::Grow(8 << 20),
                shrink: false,
                preallocation,
            };
            let error = world.run(resize::run(&resize, &JobHandle::new())).expect_err("there is no room");
            assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
            assert!(world.contents("a").expect("a file").to_vec() == vec![7; 1 << 20], "{preallocation:?}, {allocate}");
        }
    }
}
