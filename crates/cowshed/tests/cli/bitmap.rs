// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `bitmap` and `convert --bitmaps` beside the real qemu-img: exit codes, messages, and the bitmaps that each finds in
//! the other's image.

use crate::oracle::{Oracle, words};
use serde_json::Value;
use std::path::Path;
use std::process::Command;

/// The bitmaps that the real qemu-img finds, by name.
fn bitmaps(folder: &Path, image: &str) -> Value {
    let output = Command::new("qemu-img").current_dir(folder).args(["info", "--output=json", image]).output();
    let output = output.expect("qemu-img runs");
    assert!(output.status.success(), "{output:?}");
    let info: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let mut list = info["format-specific"]["data"]["bitmaps"].as_array().cloned().unwrap_or_default();
    list.sort_by_key(|bitmap| bitmap["name"].as_str().unwrap_or_default().to_owned());
    let check = Command::new("qemu-img").current_dir(folder).args(["check", image]).output().expect("qemu-img runs");
    assert!(check.status.success(), "{image}: {check:?}");
    Value::Array(list)
}

fn same_bitmaps(image: &'static str) -> impl FnOnce(&Path, &Path) {
    move |theirs: &Path, own: &Path| assert_eq!(bitmaps(theirs, image), bitmaps(own, image), "{image}")
}

fn images() -> Oracle {
    let oracle = Oracle::new();
    oracle.make("create -q -f qcow2 a.qcow2 10M");
    oracle.make("bitmap --add a.qcow2 b0");
    oracle.make("bitmap --add --disable -g 4k a.qcow2 b1");
    oracle.io(&["write -q 0 200k", "write -q 5M 1"], "a.qcow2");
    oracle.make("create -q -f qcow2 -o compat=0.10 old.qcow2 1M");
    oracle.make("create -q -f raw plain.raw 1M");
    oracle.make("create -q -f qcow2 -o cluster_size=2M large.qcow2 1P");
    oracle.make("create -q -f qcow2 other.qcow2 10M");
    for cluster in ["512", "4k", "2M"] {
        oracle.make(&format!("create -q -f qcow2 -o cluster_size={cluster} c{cluster}.qcow2 10M"));
    }
    std::fs::copy(oracle.work().join("a.qcow2"), oracle.work().join("broken.qcow2")).expect("copied");
    make_inconsistent(&oracle.work().join("broken.qcow2"));
    oracle
}

/// Bitmaps of an image become in use, with unknown content: a writer was killed.
pub fn make_inconsistent(image: &Path) {
    let killed = Command::new("qemu-io").args(["-c", "write 0 4k", "-c", "sigraise 9"]).arg(image).output();
    assert!(!killed.expect("qemu-io runs").status.success());
}

#[test]
fn bitmap_does_what_qemu_img_does() {
    let oracle = images();
    for line in [
        "--add a.qcow2 new",
        "--add -g 512 a.qcow2 new",
        "--add --granularity=2G a.qcow2 new",
        "--add -g 0 a.qcow2 new",
        "--add --disable a.qcow2 new",
        "--add --disable --merge b0 a.qcow2 new",
        "--add --merge b0 --merge b1 --enable a.qcow2 new",
        "--remove a.qcow2 b0",
        "--clear a.qcow2 b0",
        "--enable a.qcow2 b1",
        "--disable a.qcow2 b0",
        "--merge b0 a.qcow2 b1",
        "--clear --remove a.qcow2 b1",
        "--add -f qcow2 a.qcow2 new",
        "--add --image-opts driver=qcow2,file.filename=a.qcow2 new",
    ] {
        oracle.compare_writing(&format!("bitmap {line}"), same_bitmaps("a.qcow2"));
    }
    oracle.compare_writing("bitmap --add c512.qcow2 d", same_bitmaps("c512.qcow2"));
    oracle.compare_writing("bitmap --add c4k.qcow2 d", same_bitmaps("c4k.qcow2"));
    oracle.compare_writing("bitmap --add c2M.qcow2 d", same_bitmaps("c2M.qcow2"));
    oracle.compare_writing("bitmap --remove broken.qcow2 b0", same_bitmaps("broken.qcow2"));
    oracle.compare_writing("bitmap --add --merge b0 -b a.qcow2 -F qcow2 other.qcow2 new", same_bitmaps("other.qcow2"));
    oracle.verdict();
}

#[test]
fn what_was_done_before_an_error_stays_done() {
    let oracle = images();
    oracle.compare_writing("bitmap --add --merge nothing a.qcow2 new", |_, _| panic!("both fail"));
    let (theirs, own) = (oracle.work().join("../theirs"), oracle.work().join("../own"));
    assert_eq!(bitmaps(&theirs, "a.qcow2"), bitmaps(&own, "a.qcow2"));
    assert_eq!(bitmaps(&own, "a.qcow2").as_array().map(Vec::len), Some(3));
    oracle.verdict();
}

#[test]
fn bitmap_refuses_what_qemu_img_refuses() {
    let oracle = images();
    for line in [
        "--add a.qcow2 b0",
        "--remove a.qcow2 nothing",
        "--clear a.qcow2 nothing",
        "--enable a.qcow2 nothing",
        "--disable a.qcow2 nothing",
        "--merge nothing a.qcow2 b0",
        "--clear broken.qcow2 b0",
        "--enable broken.qcow2 b0",
        "--merge b0 broken.qcow2 b1",
        "--add a.qcow2",
        "a.qcow2 b0",
        "--remove -g 64k a.qcow2 b0",
        "--add -b a.qcow2 a.qcow2 b2",
        "--merge b0 -F qcow2 a.qcow2 b0",
    ] {
        oracle.compare_writing(&format!("bitmap {line}"), |_, _| panic!("{line}: both fail"));
    }
    for line in [
        "--add -g 100 a.qcow2 b2",
        "--add -g 4G a.qcow2 b2",
        "--add -g x a.qcow2 b2",
        "--add nofile.qcow2 b2",
        "--merge b0 -b nofile a.qcow2 b0",
        "--add -f raw plain.raw b2",
        "--add old.qcow2 b2",
        "--add -g 512 large.qcow2 b2",
        "--add a.qcow2 ''",
        "--merge b0 -b a.qcow2 -F qcow2 c4k.qcow2 nothing",
    ] {
        oracle.compare_refusal(&format!("bitmap {line}"));
    }
    oracle.verdict();
    assert_eq!(bitmaps(&oracle.work(), "a.qcow2").as_array().map(Vec::len), Some(2));
}

#[test]
fn convert_takes_bitmaps_along() {
    let oracle = images();
    let check = same_bitmaps("out.qcow2");
    oracle.compare_writing("convert --bitmaps -O qcow2 a.qcow2 out.qcow2", check);
    oracle
        .compare_writing("convert --bitmaps -O qcow2 -o cluster_size=4k a.qcow2 out.qcow2", same_bitmaps("out.qcow2"));
    oracle.compare_writing("convert --bitmaps -c -O qcow2 a.qcow2 out.qcow2", same_bitmaps("out.qcow2"));
    oracle.compare_writing("convert --bitmaps -n -O qcow2 a.qcow2 other.qcow2", same_bitmaps("other.qcow2"));
    oracle.compare_writing("convert --bitmaps -O qcow2 other.qcow2 out.qcow2", same_bitmaps("out.qcow2"));
    for line in [
        "--skip-broken-bitmaps -O qcow2 a.qcow2 out.qcow2",
        "--bitmaps -O qcow2 a.qcow2 a.qcow2 out.qcow2",
        "--bitmaps -f raw -O qcow2 plain.raw out.qcow2",
        "--bitmaps -O qcow2 broken.qcow2 out.qcow2",
    ] {
        oracle.compare_refusal(&format!("convert {line}"));
        assert!(!oracle.work().join("out.qcow2").exists(), "{line}");
    }
    oracle.compare_refusal("convert --bitmaps -O raw a.qcow2 out.raw");
    oracle.verdict();
    // The order of the warnings is ours.
    let line = ["convert", "--bitmaps", "--skip-broken-bitmaps", "-O", "qcow2", "broken.qcow2", "out.qcow2"];
    let said = oracle.ours(&oracle.work(), &line.map(str::to_owned));
    assert_eq!(said.code, Some(0), "{}", said.err);
    for name in ["b0", "b1"] {
        let warning = format!("qemu-img: warning: Skipping inconsistent bitmap '{name}'\n");
        assert!(said.err.contains(&warning), "{}", said.err);
    }
    assert_eq!(bitmaps(&oracle.work(), "out.qcow2"), Value::Array(Vec::new()));
}

#[test]
fn other_verbs_know_bitmaps_as_qemu_img_does() {
    let oracle = images();
    oracle.compare_writing("resize a.qcow2 20M", same_bitmaps("a.qcow2"));
    oracle.compare_writing("resize --shrink a.qcow2 1M", same_bitmaps("a.qcow2"));
    oracle.compare_writing("snapshot -c s a.qcow2", same_bitmaps("a.qcow2"));
    oracle.make("snapshot -c kept a.qcow2");
    oracle.compare_writing("snapshot -a kept a.qcow2", |_, _| panic!("both fail"));
    oracle.compare_writing("snapshot -d kept a.qcow2", same_bitmaps("a.qcow2"));
    oracle.compare_refusal("resize broken.qcow2 20M");
    for line in ["check a.qcow2", "check broken.qcow2", "info broken.qcow2", "measure -O qcow2 broken.qcow2"] {
        oracle.compare(line);
    }
    oracle.make("create -q -f qcow2 -b a.qcow2 -F qcow2 top.qcow2");
    oracle.make("bitmap --add top.qcow2 t");
    oracle.io(&["write -q 1M 64k"], "top.qcow2");
    let both = |theirs: &Path, own: &Path| {
        same_bitmaps("a.qcow2")(theirs, own);
        same_bitmaps("top.qcow2")(theirs, own);
    };
    oracle.compare_writing("commit top.qcow2", both);
    oracle.compare_writing("commit -d top.qcow2", both);
    oracle.compare_writing("rebase -b '' top.qcow2", both);
    oracle.compare_writing("rebase -u -b '' top.qcow2", both);
    oracle.verdict();
}

/// QEMU 11's; the installed one may be older, so the resulting image counts.
#[test]
fn all_bitmaps_are_removed_at_once() {
    let oracle = images();
    let folder = oracle.work();
    let folder = folder.as_path();
    let run = |line: &str| {
        let mut ours = Command::new(env!("CARGO_BIN_EXE_cowshed"));
        ours.current_dir(folder).args(["img", "bitmap"]).args(line.split(' '));
        let output = ours.output().expect("our tool runs");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).trim().to_owned())
    };
    // Also those that are in use and can't be trusted.
    for image in ["a.qcow2", "broken.qcow2"] {
        assert_eq!(run(&format!("--remove-all {image}")), (Some(0), String::new()), "{image}");
        assert_eq!(bitmaps(folder, image), Value::Array(Vec::new()), "{image}");
        assert_eq!(run(&format!("--remove-all {image}")), (Some(0), String::new()), "{image} has none");
    }
    oracle.make("bitmap --add other.qcow2 b0");
    assert_eq!(run("--remove-all --add other.qcow2 b1"), (Some(0), String::new()));
    let names = bitmaps(folder, "other.qcow2");
    assert_eq!(names.as_array().map(Vec::len), Some(1), "{names}");
    assert_eq!(names[0]["name"], "b1");
    for (line, message) in [
        ("--remove-all a.qcow2 b0", "Expecting filename"),
        ("--remove-all --clear a.qcow2", "Expecting filename and bitmap name"),
        ("--remove-all", "Expecting filename"),
    ] {
        let (code, text) = run(line);
        assert!(code == Some(1) && text.contains(message), "{line}: {code:?} {text}");
    }
}

/// Behind the new end of a refused shrink nothing is lost, and a refused growth takes no space.
#[test]
fn sizes_that_a_bitmap_refuses_change_nothing() {
    let oracle = Oracle::new();
    oracle.make("create -q -f qcow2 a.qcow2 8M");
    oracle.make("bitmap --add a.qcow2 b0");
    oracle.io(&["write -q -P 2 6M 1M"], "a.qcow2");
    let path = oracle.work().join("a.qcow2");
    make_inconsistent(&path);
    let before = std::fs::read(&path).expect("an image");
    for line in [
        "resize --shrink a.qcow2 4M",
        "amend -f qcow2 -o size=4M a.qcow2",
        "resize a.qcow2 16M",
        "resize --preallocation=metadata a.qcow2 16M",
        "resize --preallocation=full a.qcow2 16M",
    ] {
        let said = oracle.ours(&oracle.work(), &words(line));
        assert_eq!(said.code, Some(1), "{line}: {}", said.err);
        assert!(said.err.contains("Bitmap 'b0' is inconsistent"), "{line}: {}", said.err);
        assert!(std::fs::read(&path).expect("an image") == before, "{line} changed the file");
    }
}

/// QEMU opens no image with a bitmap of more than 512 MiB. Its own growth past that gives up all bitmaps of the image.
#[test]
fn a_growth_past_what_a_bitmap_covers_changes_nothing() {
    let oracle = Oracle::new();
    let words_of_qemu = "Bitmap 'b0' doesn't satisfy the constraints: Too much space will be occupied by the bitmap. Use larger granularity";
    for (name, options, granularity, most) in [
        ("a", "cluster_size=64k", 512, 2 << 40),
        ("b", "cluster_size=2M", 1024, 4 << 40),
        ("c", "cluster_size=64k", 65536, 256 << 40),
        ("d", "cluster_size=2M,extended_l2=on", 512_u64, 2_u64 << 40),
    ] {
        let image = format!("{name}.qcow2");
        oracle.make(&format!("create -q -f qcow2 -o {options} {image} 1G"));
        oracle.make(&format!("bitmap --add -g {granularity} {image} b0"));
        let flag = if name == "b" { "disable" } else { "enable" };
        oracle.make(&format!("bitmap --{flag} {image} b0"));
        oracle.make(&format!("create -q -f qcow2 -o cluster_size=2M -b {image} -F qcow2 top.{image} {}", most + 512));
        let path = oracle.work().join(&image);
        let before = std::fs::read(&path).expect("an image");
        for line in [
            format!("resize {image} {}", most + 512),
            format!("resize {image} {}", 2 * most),
            format!("resize --preallocation=metadata {image} {}", most + 512),
            format!("amend -f qcow2 -o size={} {image}", most + 512),
            format!("commit top.{image}"),
        ] {
            let said = oracle.ours(&oracle.work(), &words(&line));
            assert_eq!(said.code, Some(1), "{line}: {}", said.err);
            assert!(said.err.contains(words_of_qemu), "{line}: {}", said.err);
            assert!(std::fs::read(&path).expect("an image") == before, "{line} changed the file");
        }
        let said = oracle.ours(&oracle.work(), &words(&format!("resize {image} {most}")));
        assert_eq!(said.code, Some(0), "{name}: {}", said.err);
        let bitmaps = bitmaps(&oracle.work(), &image);
        let flags = bitmaps[0]["flags"].as_array().map(Vec::len);
        assert_eq!(flags, Some(usize::from(name != "b")), "{bitmaps}");
    }
}

/// A header of one small cluster with a long name in it.
#[test]
fn a_bitmap_without_room_in_the_header_leaks_nothing() {
    let oracle = Oracle::new();
    let base = format!("{}/{}", "d".repeat(180), "b".repeat(180));
    std::fs::create_dir(oracle.work().join("d".repeat(180))).expect("a folder");
    oracle.make(&format!("create -q -f raw {base} 1M"));
    oracle.make(&format!("create -q -f qcow2 -o cluster_size=512 -b {base} -F raw top.qcow2"));
    let refused = oracle.refused("bitmap --add top.qcow2 b0");
    assert!(refused.contains("fit a cluster of 512 bytes"), "{refused}");
    let said = oracle.ours(&oracle.work(), &words("check top.qcow2"));
    assert_eq!(said.code, Some(0), "{}{}", said.out, said.err);
}
