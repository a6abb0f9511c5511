// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `share` of a disk that another program changes: downloads that go on, and those that begin anew.

use super::share::{Share, curl, download};
use crate::oracle::Oracle;
use cowshed_testkit::waiting::{await_some, await_that};
use std::path::Path;
use std::process::{Command, Output};

const DISK_BYTES: usize = 8 << 20;
const PART_BYTES: usize = 3_000_000;

fn run(oracle: &Oracle, program: &str, arguments: &[&str]) -> Output {
    let command = ["60", program];
    let output = Command::new("timeout").args(command).args(arguments).current_dir(oracle.work()).output();
    output.expect("the program runs")
}

fn bytes(path: &Path) -> Vec<u8> {
    std::fs::read(path).unwrap_or_default()
}

/// Downloads of real programs, that go on where another one stopped.
const PROGRAMS: [(&str, &[&str]); 4] = [
    ("curl", &["-sSf", "-C", "-", "-o", "got"]),
    ("wget", &["-q", "-t", "2", "-c", "-O", "got"]),
    ("aria2c", &["-q", "-c", "--allow-overwrite=false", "--auto-file-renaming=false", "-o", "got"]),
    (
        "aria2c",
        &["-q", "-c", "-x4", "-s4", "-k1M", "--allow-overwrite=false", "--auto-file-renaming=false", "-o", "got"],
    ),
];

/// The host has had all bytes of the first version, so any rest may belong to it.
#[test]
fn programs_that_begin_anew_get_the_new_version() {
    let oracle = Oracle::new();
    let (disk, got) = (oracle.work().join("d.raw"), oracle.work().join("got"));
    let share = {
        std::fs::write(&disk, vec![7; DISK_BYTES]).expect("a disk");
        Share::start(&oracle, &["--no-digest", "-f", "raw", "d.raw"])
    };
    let mut version = 7;
    for (program, arguments) in PROGRAMS {
        let arguments = [arguments, &[share.url.as_str()]].concat();
        assert_eq!(download(&oracle, &["-f", &share.url]), vec![version; DISK_BYTES], "{program}");
        std::fs::write(&got, vec![version; PART_BYTES]).expect("a part");
        version += 1;
        std::fs::write(&disk, vec![version; DISK_BYTES]).expect("another version");
        let resumed = run(&oracle, program, &arguments);
        assert!(!resumed.status.success(), "{program} joins two versions");
        assert!(!bytes(&got).contains(&version), "{program}: {resumed:?}");
        let _ = (std::fs::remove_file(&got), std::fs::remove_file(oracle.work().join("got.aria2")));
        let anew = run(&oracle, program, &arguments);
        assert!(anew.status.success() && bytes(&got) == vec![version; DISK_BYTES], "{program}: {anew:?}");
        std::fs::remove_file(&got).expect("the file");
    }
    // A browser names the version of its part, and gets all of the new one.
    let fields = ["-H", "Range: bytes=3000000-", "-H", "If-Range: \"0123456789abcdef\"", "-w", "%{http_code}"];
    let all = download(&oracle, &[&fields[..], &[&share.url]].concat());
    assert!(all == [vec![version; DISK_BYTES], b"200".to_vec()].concat());
}

/// They have no files that they go on with, and ask for pieces alone.
#[test]
fn programs_that_read_by_pieces_name_the_version() {
    let oracle = Oracle::new();
    let disk = oracle.work().join("d.raw");
    std::fs::write(&disk, vec![7; DISK_BYTES]).expect("a disk");
    let share = Share::start(&oracle, &["--no-digest", "-f", "raw", "d.raw"]);
    download(&oracle, &["-f", &share.url]);
    std::fs::write(&disk, vec![8; DISK_BYTES]).expect("another version");
    let convert = |url: &str| {
        let qemu = run(&oracle, "qemu-img", &["convert", "-m", "1", "-f", "raw", "-O", "raw", url, "copy"]);
        let copies = "qemu-img convert -f raw -O raw \"$uri\" served";
        let nbdkit = run(&oracle, "nbdkit", &["-U", "-", "-r", "curl", url, "--run", copies]);
        (qemu.status.success(), nbdkit.status.success())
    };
    assert_eq!(convert(&share.url), (false, false));
    // For some seconds after the change it has none.
    let named = await_some("the version", || {
        let said = download(&oracle, &["-r", "100-199", &share.url]);
        let said = String::from_utf8_lossy(&said).into_owned();
        said.split(' ').find(|word| word.starts_with("?version=")).map(str::to_owned)
    });
    let named = format!("{}{named}", share.url);
    assert_eq!(convert(&named), (true, true), "{named}");
    for copy in ["copy", "served"] {
        assert!(bytes(&oracle.work().join(copy)) == vec![8; DISK_BYTES], "{copy}");
    }
    std::fs::write(&disk, vec![9; DISK_BYTES]).expect("a third version");
    assert_eq!(convert(&named), (false, false));
    assert_eq!(curl(&oracle, &["-f", &named]).status.code(), Some(22));
}

/// The server of the file system keeps the times of the file, as it likes.
#[test]
fn disk_on_a_fuse_file_system_has_a_weak_tag() {
    let oracle = Oracle::new();
    std::fs::write(oracle.work().join("d.raw"), vec![7; 1 << 20]).expect("a disk");
    std::fs::write(oracle.work().join("m"), "").expect("a mount point");
    let cowshed = |arguments: &[&str]| run(&oracle, env!("CARGO_BIN_EXE_cowshed"), arguments);
    let mounted = cowshed(&["mount", "-f", "raw", "d.raw", "m"]);
    assert!(mounted.status.success(), "{mounted:?}");
    for form in ["raw", "qcow2"] {
        let share = Share::start(&oracle, &["--as", form, "--no-digest", "-f", "raw", "m"]);
        let get = |more: &[&str]| {
            let answer = ["-o", "/dev/null", "-w", "%{http_code} %header{etag} %{size_download}", &share.url];
            String::from_utf8_lossy(&download(&oracle, &[more, &answer].concat())).into_owned()
        };
        let head = get(&["-I"]);
        let tag = head.split(' ').nth(1).expect("a tag");
        assert!(tag.starts_with("W/\""), "{form}: {head}");
        assert!(get(&["-r", "0-99"]).starts_with("206 ") && get(&["-r", "100-199"]).starts_with("206 "), "{form}");
        assert!(get(&["-r", "100-"]).starts_with("412 "), "{form}");
        // By a weak tag no ranges are joined: all of it comes.
        let named = get(&["-r", "100-", "-H", &format!("If-Range: {tag}")]);
        assert!(named.starts_with("200 "), "{form}: {named}");
    }
    await_that("the file is unmounted", || cowshed(&["umount", "m"]).status.success());
}

/// It breaks the connection of the first range off where that of the next one begins: what arrived, no one knows.
#[test]
fn several_connections_of_aria2_leave_a_share() {
    let oracle = Oracle::new();
    let disk: Vec<u8> = (0..4_u32 << 20).flat_map(u32::to_le_bytes).collect();
    std::fs::write(oracle.work().join("d.raw"), &disk).expect("a disk");
    let share = Share::start(&oracle, &["--once", "--no-digest", "-f", "raw", "d.raw"]);
    let loaded = run(&oracle, "aria2c", &["-q", "-x4", "-s4", "-k1M", "-o", "got", &share.url]);
    assert!(loaded.status.success(), "{loaded:?}");
    assert!(bytes(&oracle.work().join("got")) == disk);
    assert!(download(&oracle, &[&share.url]) == disk, "the share goes on");
    assert_eq!(share.exit_code(), Some(0));
}
