// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Requests that are no whole sectors of a device.

use super::Loop;
use cowshed_testkit::programs::tool;
use cowshed_testkit::qemu::Qemu;
use std::path::Path;

/// Requests in halves of sectors of 4096 bytes, and of 512.
const ODD_REQUESTS: &[&str] = &[
    "write -P 1 512 1024",
    "write -P 2 4194304 512",
    "write -P 3 6292992 100",
    "write -P 4 8388708 300000",
    "write -z 8389632 131584",
    "write -z -u 8520704 65024",
    "write -z 12582912 700",
    "write -P 5 12585984 1000000",
    "discard 12586496 524800",
    "write -z -u 512 512",
    "discard 1024 512",
    "write -P 6 1536 2048",
    "flush",
];

/// The kernel zeroes and frees whole sectors only, also behind the page cache; guests have sectors of 512 bytes.
#[test]
#[ignore = "needs root and loop devices"]
fn requests_are_smaller_than_the_sectors_of_a_device() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let qemu = Qemu::newest();
    let disk = |name: &str| {
        let path = folder.path().join(name);
        std::fs::File::create(&path).unwrap().set_len(40 << 20).unwrap();
        path
    };
    let formats = [
        ("qcow2", "cluster_size=64k"),
        ("qcow2", "cluster_size=512"),
        ("qcow2", "cluster_size=256k"),
        ("qcow2", "cluster_size=2M"),
        ("qcow2", "extended_l2=on,cluster_size=2M"),
        ("raw", "nocow=off"),
    ];
    for sector in [512, 4096] {
        for (format, options) in formats {
            for (cache, aio) in [("writeback", "io_uring"), ("none", "threads")] {
                let (ours, theirs) = (disk("ours"), disk("theirs"));
                let devices = [&ours, &theirs].map(|path| Loop::with_sectors(sector, path));
                for device in &devices {
                    let arguments = ["create", "-q", "-f", format, "-o", options, &device.0, "18M"];
                    if format == "qcow2" {
                        qemu.img(arguments).expect_ok();
                    }
                }
                let what = format!("{sector} {format} {options} {cache} {aio}");
                for request in ODD_REQUESTS {
                    let flags = ["-f", format, "-t", cache, "-i", aio, "-d", "unmap", "-c", request];
                    qemu.io([&flags[..], &[&devices[1].0]].concat()).expect_ok();
                    let said =
                        tool(env!("CARGO_BIN_EXE_cowshed"), &[&["qemu-io"], &flags[..], &[&devices[0].0]].concat());
                    assert!(!said.contains("failed"), "{what}: {request}: {said}");
                }
                let compared = qemu.img(["compare", "-f", format, "-F", format, &devices[0].0, &devices[1].0]);
                if format == "qcow2" {
                    qemu.expect_clean(Path::new(&devices[0].0));
                }
                // The data after a discard of a part of a cluster is each program's own choice.
                if format == "qcow2" && !options.contains("extended_l2") {
                    assert_eq!(compared.code, 0, "{what}: {}{}", compared.stdout, compared.stderr);
                }
                let reads = [
                    "read -P 0 8389632 131584",
                    "read -P 2 4194304 512",
                    "read -P 3 6292992 100",
                    "read -P 6 1536 2048",
                    "read -P 0 512 512",
                    "read -P 0 12582912 700",
                    "read -P 5 13112320 473664",
                    "read -P 4 8585728 102980",
                ];
                for read in reads {
                    let said = qemu.io(["-r", "-f", format, "-c", read, &devices[0].0]);
                    assert!(said.code == 0 && !said.stdout.contains("failed"), "{what}: {read}: {}", said.stdout);
                }
            }
        }
    }
}

/// A device that is opened for reading learns its sectors too: it may be written to later.
#[test]
#[ignore = "needs root and loop devices"]
fn a_device_that_becomes_writable_takes_parts_of_sectors() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = |name: &str| folder.path().join(name);
    let mut expected = vec![0x11; 1 << 20];
    std::fs::write(path("file"), &expected).unwrap();
    let device = Loop::with_sectors(4096, &path("file"));
    for (at, zeroes) in [(512, 512), (9216, 1536), (100 << 10, 512)] {
        expected[at..at + zeroes].fill(0);
    }

    let opened = ["qemu-io", "-r", "-f", "raw", "-d", "unmap", "-c", "reopen -w"];
    let writes = ["-c", "write -z 512 512", "-c", "write -z -u 9216 1536", "-c", "discard 20480 512", "-c", "flush"];
    let said = tool(env!("CARGO_BIN_EXE_cowshed"), &[&opened[..], &writes, &[&device.0]].concat());
    assert!(!said.contains("failed"), "{said}");

    // The base of a commit is opened for reading at first.
    let (qemu, overlay) = (Qemu::newest(), path("overlay.qcow2"));
    let overlay = overlay.to_str().unwrap();
    let create = ["create", "-q", "-f", "qcow2", "-o", "cluster_size=512", "-b", &device.0, "-F", "raw", overlay];
    qemu.img(create).expect_ok();
    qemu.io(["-f", "qcow2", "-c", "write -z 102400 512", overlay]).expect_ok();
    super::cowshed(&["commit", "-q", overlay]);

    let bytes = std::fs::read(&device.0).unwrap();
    let discarded = 20480..20480 + 512;
    assert!(bytes[..discarded.start] == expected[..discarded.start]);
    assert!(bytes[discarded.end..] == expected[discarded.end..]);
}
