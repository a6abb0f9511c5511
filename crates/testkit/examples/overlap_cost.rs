// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Counts the cost of the overlap checks by default (`overlap-check=cached`). The figures are instructions of a 4 KiB
//! write and of the checks in it. Writes are in place and allocating, on a small image and on one of several TiB.
//! Counted by valgrind's callgrind: a busy machine changes little (threads that find each other awake or asleep).
//!
//! `cargo run --release -p cowshed-testkit --example overlap_cost [-- TIB]` prints a table in markdown; TIB (default 4)
//! is the size of the large image; its metadata takes some 160 MiB on the disk for each of them.

use cowshed_image::{OpenRequest, open};
use cowshed_storage::{IoBuf, rt};
use cowshed_testkit::bigimage::{self, Placement};
use cowshed_testkit::qemu::{Qemu, temp_dir};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Writes of the shorter run; the longer one has twice as many, and the difference counts.
const WRITES: u64 = 2000;
const BYTES: u64 = 4096;
/// Writes in place go to this much of the disk, whose mapping is cached before.
const WINDOW_BYTES: u64 = 256 << 20;

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match words.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["write", image, check, kind, count] => write(image, check, kind, count.parse().expect("a count")),
        [] => compare(4),
        [tib] => compare(tib.parse().expect("a number of TiB")),
        _ => panic!("see the head of this file"),
    }
}

/// The run that is counted.
fn write(image: &str, check: &str, kind: &str, count: u64) {
    rt::block_on(async {
        let options = format!("driver=qcow2,file.filename={image},overlap-check={check}");
        let request = OpenRequest::image_opts(&options).expect("good options").writable(true);
        let node = open(request).await.expect("the image opens");
        let mut buf = IoBuf::zeroed(BYTES as usize);
        if kind == "in-place" {
            for at in (0..WINDOW_BYTES.min(node.size())).step_by(1 << 20) {
                let (result, back) = node.read(at, buf).await;
                result.expect("a read");
                buf = back;
            }
        }
        buf.fill(7);
        for number in 0..count {
            let at = match kind {
                "in-place" => number * 0x9e37_79b9 % (WINDOW_BYTES.min(node.size()) / BYTES) * BYTES,
                // A cluster each.
                _ => number * 65536,
            };
            let (result, back) = node.write(at, buf).await;
            result.expect("a write");
            buf = back;
        }
        // Without a close: writing everything back is no part of a write.
        std::process::exit(0);
    });
}

/// Instructions of a run; with `only_checks` those of the map of metadata alone.
fn count(image: &Path, kind: &str, writes: u64, only_checks: bool) -> u64 {
    let program = std::env::current_exe().expect("the path of this program");
    let mut command = Command::new("valgrind");
    command.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]);
    if only_checks {
        // All that touches the map: looks, and marks as tables come and go.
        for function in ["contains", "insert_all", "remove"] {
            command.arg(format!("--toggle-collect=cowshed_qcow2::metadata_map::MetadataMap::{function}"));
        }
    }
    command.arg(program).args(["write", &image.to_string_lossy(), "cached", kind, &writes.to_string()]);
    // valgrind has no io_uring.
    let output = command.env("COWSHED_IO_ENGINE", "threads").output().expect("valgrind is installed");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{text}");
    let collected = text.lines().find_map(|line| line.split_once("Collected : ")).expect("a count of instructions");
    collected.1.trim().parse().unwrap_or_else(|error| panic!("{error}: {text}"))
}

fn per_write(image: &dyn Fn() -> PathBuf, kind: &str, only_checks: bool) -> f64 {
    let runs = [WRITES, 2 * WRITES].map(|writes| count(&image(), kind, writes, only_checks));
    (runs[1] as f64 - runs[0] as f64) / WRITES as f64
}

fn compare(tib: u64) {
    let (qemu, folder) = (Qemu::system(), temp_dir());
    let path = |name: &str| folder.path().join(name);
    let fresh = |size: u64| {
        let image = path("fresh.qcow2");
        let _ = std::fs::remove_file(&image);
        qemu.create(&image, "qcow2", "", size);
        image
    };
    let full = |name: &str, size: u64| {
        let image = path(name);
        bigimage::build(&image, size, 16, Placement::Contiguous).expect("the image can be built");
        image
    };
    let small = full("small.qcow2", 1 << 30);
    let large = full("large.qcow2", tib << 40);
    type Source<'a> = (String, &'static str, Box<dyn Fn() -> PathBuf + 'a>);
    let cases: [Source<'_>; 4] = [
        ("1 GiB, full".to_owned(), "in-place", Box::new(|| small.clone())),
        (format!("{tib} TiB, full"), "in-place", Box::new(|| large.clone())),
        ("1 GiB, empty".to_owned(), "allocating", Box::new(|| fresh(1 << 30))),
        (format!("{tib} TiB, empty"), "allocating", Box::new(|| fresh(tib << 40))),
    ];
    println!("| image | 4 KiB write | instructions | of the checks | part |\n|---|---|--:|--:|--:|");
    for (name, kind, image) in &cases {
        let (whole, checks) = (per_write(image, kind, false), per_write(image, kind, true));
        println!("| {name} | {kind} | {whole:.0} | {checks:.1} | {:.2} % |", checks / whole * 100.0);
    }
}
