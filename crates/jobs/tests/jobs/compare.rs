// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Comparing, mapping, looking, resizing and dd, against the real qemu-img.

use crate::oracle::{Bench, run};
use cowshed_image::Preallocation;
use cowshed_jobs::compare::{self, CompareOptions, Failed, FailedAt, Verdict};
use cowshed_jobs::dd::{self, DdOptions};
use cowshed_jobs::info::{self, InfoOptions};
use cowshed_jobs::map::{self, MapOptions};
use cowshed_jobs::resize::{self, NewSize, ResizeOptions};
use cowshed_jobs::{ImageSpec, JobHandle};

fn spec(bench: &Bench, name: &str) -> ImageSpec {
    ImageSpec::file(bench.path(name)).format(if name.ends_with(".raw") { "raw" } else { "qcow2" })
}

/// A chain with every kind of run: base.raw, mid.qcow2 (compressed and zero clusters), top.qcow2.
fn chain(bench: &Bench) {
    bench.pattern("base.raw", 8 << 20, 5);
    bench.qemu_img(&["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "base.raw", "mid.qcow2", "9M"]);
    bench.qemu_io("mid.qcow2", &["write -c -P 1 1M 64k", "write -z 2M 256k", "write -P 3 4M 70k"]);
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
        "mid.qcow2",
        "top.qcow2",
        "10M",
    ]);
    bench.qemu_io("top.qcow2", &["write -P 7 3M 10k", "write -z 9M 64k", "write -P 1 6M 4k"]);
    bench.qemu_img(&["convert", "-O", "raw", "top.qcow2", "flat.raw"]);
}

#[test]
fn verdicts_texts_and_exit_codes_are_those_of_qemu_img() {
    let bench = Bench::new();
    chain(&bench);
    bench.qemu_img(&["create", "-q", "-f", "raw", "short.raw", "1M"]);
    bench.qemu_img(&["create", "-q", "-f", "raw", "long.raw", "2M"]);
    bench.qemu_img(&["create", "-q", "-f", "raw", "tail.raw", "2M"]);
    bench.qemu_io("tail.raw", &["write -P 1 1500000 1"]);
    bench.qemu_img(&["create", "-q", "-f", "qcow2", "empty.qcow2", "1M"]);
    bench.qemu_img(&["create", "-q", "-f", "qcow2", "zero.qcow2", "1M"]);
    bench.qemu_io("zero.qcow2", &["write -z 64k 64k"]);
    bench.qemu_img(&["convert", "-c", "-O", "qcow2", "flat.raw", "packed.qcow2"]);
    bench.qemu_img(&["convert", "-O", "raw", "top.qcow2", "changed.raw"]);
    bench.qemu_io("changed.raw", &["write -P 9 7000001 1"]);
    for (one, other) in [
        ("top.qcow2", "flat.raw"),
        ("top.qcow2", "packed.qcow2"),
        ("top.qcow2", "mid.qcow2"),
        ("changed.raw", "top.qcow2"),
        ("changed.raw", "flat.raw"),
        ("short.raw", "long.raw"),
        ("long.raw", "short.raw"),
        ("short.raw", "tail.raw"),
        ("tail.raw", "short.raw"),
        ("empty.qcow2", "zero.qcow2"),
        ("zero.qcow2", "zero.qcow2"),
        ("empty.qcow2", "short.raw"),
    ] {
        for strict in [false, true] {
            let mut args = vec!["compare"];
            if strict {
                args.push("-s");
            }
            args.extend([one, other]);
            let theirs = bench.tool("qemu-img", &args);
            let options = CompareOptions { first: spec(&bench, one), second: spec(&bench, other), strict };
            let ours = run(compare::run(&options, &JobHandle::new())).expect("compared");
            let cut = |line: &str| match line.find("Offset") {
                // In strict mode qemu-img also distinguishes the ends of runs, so it may stop earlier.
                Some(at) => line[..at].to_owned(),
                None => line.to_owned(),
            };
            let ours_text: Vec<String> = ours.messages().iter().map(|line| cut(line)).collect();
            assert_eq!(ours_text, theirs.out.lines().map(cut).collect::<Vec<_>>(), "{one} {other} strict: {strict}");
            assert_eq!(Some(ours.exit_code()), theirs.code, "{one} {other} strict: {strict}");
        }
    }
    let options = CompareOptions { first: spec(&bench, "no.raw"), second: spec(&bench, "no.raw"), strict: false };
    run(compare::run(&options, &JobHandle::new())).expect_err("nothing there");
}

/// Several threads compare, and the order of the disk counts: the first difference, or an unreadable range before it.
#[test]
fn the_first_finding_counts_in_any_order_of_threads() {
    const SIZE: u64 = 24 << 20;
    let bench = Bench::new();
    bench.pattern("one.raw", SIZE, 3);
    let content = std::fs::read(bench.path("one.raw")).expect("the pattern");
    // Chunks of 256 KiB: in the first and the last sector of one, on a border, far apart and close together.
    let places = [511, 262_143, 262_144, 300_000, 9 << 20, (9 << 20) + 262_144, SIZE - 1];
    for first in 0..places.len() {
        let mut changed = content.clone();
        places[first..].iter().for_each(|&at| changed[at as usize] ^= 1);
        std::fs::write(bench.path("other.raw"), &changed).expect("the other file");
        let theirs = bench.tool("qemu-img", &["compare", "-f", "raw", "-F", "raw", "one.raw", "other.raw"]);
        for (one, other) in [("one.raw", "other.raw"), ("other.raw", "one.raw")] {
            let options = CompareOptions { first: spec(&bench, one), second: spec(&bench, other), strict: false };
            let ours = run(compare::run(&options, &JobHandle::new())).expect("compared");
            assert_eq!(
                ours.messages(),
                theirs.out.lines().collect::<Vec<_>>(),
                "{one} {other}, first at {}",
                places[first]
            );
        }
        // A sector that can't be read: before the first difference, in the same chunk, and far behind.
        for (unreadable, is_first) in [(0, true), (places[first], true), (SIZE - 512, false)] {
            let chunk = |at: u64| at / (256 << 10);
            let is_first = is_first || chunk(unreadable) == chunk(places[first]);
            let name = format!(
                "driver=raw,file.driver=blkdebug,file.image.filename={},file.inject-error.0.event=read_aio,\
                 file.inject-error.0.sector={}",
                bench.path("other.raw"),
                unreadable / 512
            );
            let failing = ImageSpec { name, image_opts: true, ..ImageSpec::default() };
            let options = CompareOptions { first: spec(&bench, "one.raw"), second: failing, strict: false };
            let noted = FailedAt::default();
            let outcome = run(compare::run_noting(&options, &JobHandle::new(), &noted, &|| {}));
            match is_first {
                true => {
                    outcome.expect_err("a sector can't be read");
                    let offset = chunk(unreadable) * (256 << 10);
                    assert_eq!(noted.get(), Some(Failed::Read { image: 1, offset }), "first at {}", places[first]);
                }
                false => {
                    let offset = places[first] / 512 * 512;
                    assert_eq!(outcome.expect("a difference before it").verdict, Verdict::Mismatch { offset });
                }
            }
        }
    }
}

#[test]
fn compare_reports_the_first_unreadable_place() {
    let bench = Bench::new();
    bench.pattern("one.raw", 24 << 20, 3);
    // One in each of the chunks that different threads have at the same time.
    let places = [3 << 20, (4 << 20) + 512, 7 << 20, 9 << 20];
    let rules: String = places
        .iter()
        .enumerate()
        .map(|(number, at)| {
            let rule = format!(",file.inject-error.{number}");
            format!("{rule}.event=read_aio{rule}.sector={}", at / 512)
        })
        .collect();
    let name = format!("driver=raw,file.driver=blkdebug,file.image.filename={}{rules}", bench.path("one.raw"));
    let failing = ImageSpec { name, image_opts: true, ..ImageSpec::default() };
    let options = CompareOptions { first: failing, second: spec(&bench, "one.raw"), strict: false };
    for _ in 0..30 {
        let noted = FailedAt::default();
        let error = run(compare::run_noting(&options, &JobHandle::new(), &noted, &|| {})).expect_err("unreadable");
        assert_eq!(noted.get(), Some(Failed::Read { image: 0, offset: 3 << 20 }));
        assert!(error.to_string().contains("at byte 3145728"), "{error}");
    }
}

#[test]
fn maps_are_those_of_qemu_img() {
    let bench = Bench::new();
    chain(&bench);
    for image in ["base.raw", "mid.qcow2", "top.qcow2", "flat.raw"] {
        for (start, len) in [(0, None), (1 << 20, Some(5 << 20)), (4096 * 3, Some(512)), (7 << 20, None)] {
            let (from, many) = (start.to_string(), len.unwrap_or(i64::MAX as u64 - start).to_string());
            let format = if image.ends_with(".raw") { "raw" } else { "qcow2" };
            let args = ["map", "-f", format, "--output=json", "-s", &from, "-l", &many, image];
            let mut theirs: serde_json::Value = serde_json::from_str(&bench.qemu_img(&args)).expect("json");
            let options = MapOptions { image: spec(&bench, image), start, len };
            let ours = run(map::run(&options, &JobHandle::new())).expect("mapped");
            let mut ours = serde_json::to_value(ours).expect("json");
            // Newer versions than the one asked may add a key.
            let compressed = theirs[0].get("compressed").is_some();
            for run in ours.as_array_mut().expect("runs").iter_mut().filter(|_| !compressed) {
                run.as_object_mut().expect("a run").remove("compressed");
            }
            join(&mut ours);
            join(&mut theirs);
            assert_eq!(ours, theirs, "{image} from {start}");
        }
    }
}

/// Joins neighbours that differ in nothing: where runs are cut is no matter of truth.
fn join(map: &mut serde_json::Value) {
    let runs = map.as_array_mut().expect("runs");
    let mut joined: Vec<serde_json::Value> = Vec::new();
    for run in runs.drain(..) {
        if let Some(last) = joined.last_mut() {
            let mut expected = last.clone();
            let end = last["start"].as_u64().expect("start") + last["length"].as_u64().expect("length");
            expected["start"] = end.into();
            expected["length"] = run["length"].clone();
            if let Some(offset) = last.get("offset").and_then(serde_json::Value::as_u64) {
                expected["offset"] = (offset + last["length"].as_u64().expect("length")).into();
            }
            if expected == run {
                last["length"] =
                    (last["length"].as_u64().expect("length") + run["length"].as_u64().expect("length")).into();
                continue;
            }
        }
        joined.push(run);
    }
    *runs = joined;
}

#[test]
fn info_is_that_of_qemu_img() {
    let bench = Bench::new();
    chain(&bench);
    bench.qemu_img(&["create", "-q", "-f", "qcow2", "-o", "compat=0.10", "old.qcow2", "1M"]);
    let options = "lazy_refcounts=on,extended_l2=on,compression_type=zstd,cluster_size=128k,refcount_bits=8";
    bench.qemu_img(&["create", "-q", "-f", "qcow2", "-o", options, "new.qcow2", "1M"]);
    bench.qemu_img(&["bitmap", "--add", "mid.qcow2", "marks"]);
    bench.qemu_img(&["snapshot", "-c", "then", "mid.qcow2"]);
    for image in ["top.qcow2", "old.qcow2", "new.qcow2", "mid.qcow2", "base.raw"] {
        let full = bench.path(image);
        let theirs = bench.qemu_img(&["info", "--backing-chain", "--output=json", &full]);
        let theirs: serde_json::Value = serde_json::from_str(&theirs).expect("json");
        let options = InfoOptions { image: ImageSpec::file(&full), backing_chain: true, limits: false };
        let ours = run(info::run(&options, &JobHandle::new())).expect(image);
        let mut ours = serde_json::to_value(ours).expect("json");
        if theirs[0].get("children").is_none() {
            for layer in ours.as_array_mut().expect("layers") {
                layer.as_object_mut().expect("a layer").remove("children");
            }
        }
        assert_eq!(ours, theirs, "{image}");
    }
}

#[test]
fn resized_images_have_the_size_and_zeroes_behind() {
    let bench = Bench::new();
    chain(&bench);
    let resized = |name: &str, size, shrink, preallocation| {
        let options = ResizeOptions { image: spec(&bench, name), size, shrink, preallocation };
        run(resize::run(&options, &JobHandle::new()))
    };
    bench.qemu_img(&["convert", "-O", "qcow2", "flat.raw", "a.qcow2"]);
    for name in ["a.qcow2", "flat.raw", "top.qcow2"] {
        let off = Preallocation::Off;
        let outcome = resized(name, NewSize::Grow(5 << 20), false, off).expect(name);
        assert_eq!((outcome.old_size, outcome.new_size), (10 << 20, 15 << 20));
        assert!(
            resized(name, NewSize::Absolute(1 << 20), false, off).expect_err(name).to_string().contains("--shrink")
        );
        assert!(resized(name, NewSize::Shrink(99 << 20), true, off).expect_err(name).to_string().contains("positive"));
    }
    bench.assert_same("a.qcow2", "flat.raw", "grown");
    bench.assert_same("top.qcow2", "flat.raw", "grown");
    for name in ["a.qcow2", "flat.raw", "top.qcow2"] {
        resized(name, NewSize::Absolute(3 << 20), true, Preallocation::Off).expect(name);
        resized(name, NewSize::Absolute(12 << 20), false, Preallocation::Off).expect(name);
    }
    bench.assert_same("a.qcow2", "flat.raw", "shrunk and grown");
    bench.assert_same("top.qcow2", "flat.raw", "shrunk and grown");
    for preallocation in [Preallocation::Metadata, Preallocation::Falloc, Preallocation::Full] {
        resized("a.qcow2", NewSize::Grow(1 << 20), false, preallocation).expect("preallocated");
        assert!(resized("a.qcow2", NewSize::Shrink(512), true, preallocation).is_err());
    }
    bench.assert_clean("a.qcow2", "resized");
    bench.assert_clean("top.qcow2", "resized");
    assert!(resized("a.qcow2", NewSize::Grow(1000), false, Preallocation::Off).is_err());
}

#[test]
fn dd_copies_the_blocks_asked_for() {
    let bench = Bench::new();
    bench.pattern("a.raw", 3 << 20, 9);
    let source = std::fs::read(bench.path("a.raw")).expect("the source");
    for (block, count, skip) in
        [(512, None, 0), (65536, Some(3), 2), (1000, Some(3), 1), (1 << 20, None, 2), (4096, Some(0), 0)]
    {
        for target in ["out.raw", "out.qcow2"] {
            let options = DdOptions {
                source: spec(&bench, "a.raw"),
                target: spec(&bench, target),
                block_bytes: block,
                count,
                skip,
                keeps_existing: false,
            };
            let outcome = run(dd::run(&options, &JobHandle::new())).expect("copied");
            let from = (skip * block) as usize;
            let to = count.map_or(source.len(), |count| source.len().min(from + (count * block) as usize));
            let mut expected = source[from..to].to_vec();
            assert_eq!(outcome.size, expected.len() as u64);
            expected.resize(expected.len().next_multiple_of(512), 0);
            bench.qemu_img(&["convert", "-O", "raw", target, "copy.raw"]);
            assert!(std::fs::read(bench.path("copy.raw")).expect("the copy") == expected, "{block} {count:?} {skip}");
        }
    }
    let past = DdOptions {
        source: spec(&bench, "a.raw"),
        target: spec(&bench, "out.raw"),
        block_bytes: 1 << 20,
        count: None,
        skip: 9,
        keeps_existing: false,
    };
    assert!(run(dd::run(&past, &JobHandle::new())).expect("an empty target").skipped_past_end);
    let bad = DdOptions { block_bytes: 0, ..past };
    run(dd::run(&bad, &JobHandle::new())).expect_err("no block size");
}
