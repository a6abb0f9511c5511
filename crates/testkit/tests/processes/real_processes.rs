// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Real processes on real files: killed under load, over and over, and on full disks. After each the journal of
//! acknowledged requests is compared with QEMU's reading of the disk.

use cowshed_image::formats::DriverOf;
use cowshed_image::{Node, OpenRequest, open};
use cowshed_simulator::PageMap;
use cowshed_storage::{IoBuf, rt};
use cowshed_testkit::audit::audit;
use cowshed_testkit::journal::Follower;
use cowshed_testkit::programs::tool;
use cowshed_testkit::qemu::{Qemu, temp_dir};
use cowshed_testkit::random::for_each_seed;
use cowshed_testkit::waiting::await_that;
use cowshed_types::ErrorKind;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};

struct Case {
    create: &'static str,
    cluster_bytes: u64,
    disk_bytes: u64,
    options: &'static str,
}

const CASES: &[Case] = &[
    Case { create: "cluster_size=64k", cluster_bytes: 65536, disk_bytes: 8 << 20, options: "" },
    Case {
        create: "cluster_size=512,refcount_bits=4",
        cluster_bytes: 512,
        disk_bytes: 1 << 20,
        options: "l2-cache-size=1k,l2-cache-entry-size=512,refcount-cache-size=2k",
    },
    Case { create: "cluster_size=16k,extended_l2=on", cluster_bytes: 16384, disk_bytes: 2 << 20, options: "" },
    Case { create: "cluster_size=4k,lazy_refcounts=on", cluster_bytes: 4096, disk_bytes: 2 << 20, options: "" },
];

/// The end of one process.
struct Load {
    follower: Follower,
    /// Exit code; `None`: killed.
    code: Option<i32>,
    stderr: String,
}

/// Runs a writer on `image`; kills it after `lines` lines of its journal, if it is still alive.
fn load(image: &Path, case: &Case, seed: u64, rounds: u64, limit_bytes: Option<u64>, lines: usize) -> Load {
    load_from(image, Qemu::system().content(image, "qcow2"), case, seed, rounds, limit_bytes, lines)
}

fn load_from(
    image: &Path,
    content: Vec<u8>,
    case: &Case,
    seed: u64,
    rounds: u64,
    limit_bytes: Option<u64>,
    lines: usize,
) -> Load {
    let mut follower = Follower::new(content);
    let mut command = Command::new(env!("CARGO_BIN_EXE_cowshed-load"));
    command.arg(image).args([case.cluster_bytes, seed, rounds].map(|number| number.to_string())).arg(case.options);
    command.args(limit_bytes.map(|bytes| bytes.to_string()));
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the writer starts");
    let journal = BufReader::new(child.stdout.take().expect("its journal"));
    for (number, line) in journal.lines().enumerate() {
        follower.follow(&line.expect("a line of text")).unwrap_or_else(|wrong| panic!("{wrong}"));
        if number == lines {
            child.kill().expect("a child can be killed");
        }
    }
    let output = child.wait_with_output().expect("the writer ends");
    wait_for_locks(image);
    Load { follower, code: output.status.code(), stderr: String::from_utf8_lossy(&output.stderr).into_owned() }
}

/// A ring of a killed process ends its writes and drops its locks some time after the process.
fn wait_for_locks(image: &Path) {
    let is_locked = || {
        let info = Qemu::system().img(["info".as_ref(), image.as_os_str()]);
        info.code != 0 && info.stderr.contains("lock")
    };
    await_that("the dead writer's locks go", || !is_locked());
}

/// Nothing but the caches in the writer's memory is lost: acknowledged data must be there.
fn judge(image: &Path, follower: &Follower) {
    let qemu = Qemu::system();
    let bytes = std::fs::read(image).expect("the image is there");
    let found = audit(&PageMap::from_bytes(&bytes)).unwrap_or_else(|wrong| panic!("audit: {wrong}"));
    let verdict =
        if found.dirty { qemu.check_with(image, "qcow2", &["-r", "all"]) } else { qemu.check(image, "qcow2") };
    assert!(matches!(verdict.code, 0 | 3), "qemu-img check: {} {}", verdict.json, verdict.stderr);
    follower.check(&qemu.content(image, "qcow2")).unwrap_or_else(|wrong| panic!("{wrong}"));
}

#[test]
fn a_killed_writer_loses_nothing_that_was_flushed() {
    let qemu = Qemu::system();
    for_each_seed(CASES.len() as u64, |seed| {
        let case = &CASES[seed as usize % CASES.len()];
        let folder = temp_dir();
        let image = folder.path().join("image.qcow2");
        qemu.create(&image, "qcow2", case.create, case.disk_bytes);
        let mut flushes = 0;
        // Each writer goes on with the image of the one before.
        for life in 0..5 {
            let lines = 60 + (seed * 97 + life * 211) as usize % 900;
            let load = load(&image, case, seed * 100 + life, u64::MAX, None, lines);
            assert_eq!(load.code, None, "the writer ended by itself: {}", load.stderr);
            assert!(load.follower.failures.is_empty(), "{:?}", load.follower.failures);
            flushes += load.follower.flushes;
            judge(&image, &load.follower);
        }
        assert!(flushes > 10, "{flushes} flushes are no test");
    });
}

/// Ranges that differ from an empty disk are dirty. This holds for our own reading of the killed writer's file, and for
/// QEMU's once we have opened and closed the image.
#[test]
fn a_killed_writer_loses_no_bit_of_its_bitmaps() {
    let qemu = Qemu::system();
    for_each_seed(CASES.len() as u64, |seed| {
        let case = &CASES[seed as usize % CASES.len()];
        let folder = temp_dir();
        let image = folder.path().join("image.qcow2");
        let name = image.to_str().expect("text path");
        qemu.create(&image, "qcow2", case.create, case.disk_bytes);
        qemu.img(["bitmap", "--add", "-g", "512", name, "fine"]).expect_ok();
        qemu.img(["bitmap", "--add", "-g", "65536", name, "coarse"]).expect_ok();
        for life in 0..4 {
            let lines = 60 + (seed * 89 + life * 173) as usize % 700;
            let load = load(&image, case, seed * 100 + life, u64::MAX, None, lines);
            assert_eq!(load.code, None, "the writer ended by itself: {}", load.stderr);
            judge_bitmaps(&image, &qemu.content(&image, "qcow2"));
        }
        rt::block_on(async {
            let node = open(OpenRequest::file(name).format("qcow2").writable(true)).await.expect("opened");
            node.close().await.expect("closed");
        });
        let info = qemu.info(&image, "qcow2");
        for bitmap in info["format-specific"]["data"]["bitmaps"].as_array().expect("bitmaps") {
            assert_eq!(bitmap["flags"], serde_json::json!(["auto"]), "{info}");
        }
        assert_eq!(qemu.check(&image, "qcow2").corruptions, 0);
    });
}

fn judge_bitmaps(image: &Path, content: &[u8]) {
    rt::block_on(async {
        let request = OpenRequest::file(image.to_str().expect("text path")).format("qcow2");
        let node = open(request).await.expect("opened");
        for bitmap in ["fine", "coarse"] {
            let bits = node.qcow2().expect("qcow2").bitmap_bits(bitmap).await.expect("the bitmap counts");
            for (sector, bytes) in content.chunks(512).enumerate() {
                let is_written = bytes.iter().any(|byte| *byte != 0);
                assert!(!is_written || bits.covers(sector as u64 * 512, 1), "{bitmap}: sector {sector} is lost");
            }
        }
        node.close().await.expect("closed");
    });
}

#[test]
fn a_file_that_may_not_grow_leaves_a_sound_image() {
    let qemu = Qemu::system();
    for_each_seed(CASES.len() as u64, |seed| {
        let case = &CASES[seed as usize % CASES.len()];
        let folder = temp_dir();
        let image = folder.path().join("image.qcow2");
        qemu.create(&image, "qcow2", case.create, case.disk_bytes);
        let limit = std::fs::metadata(&image).expect("the image").len() + case.cluster_bytes * (30 + seed);
        let load = load(&image, case, seed, 2, Some(limit), usize::MAX);
        assert!(matches!(load.code, Some(0 | 5)), "{:?}: {}", load.code, load.stderr);
        assert!(!load.follower.failures.is_empty(), "nothing has failed");
        assert!(std::fs::metadata(&image).expect("the image").len() <= limit);
        judge(&image, &load.follower);
    });
}

/// A file system of 8 MiB, mounted; unmounted when it is dropped.
struct SmallDisk {
    folder: tempfile::TempDir,
}

/// Writes of 4 KiB in such a distance, until they are refused and beyond: most of them need a table of their own.
const STEP: u64 = 4 << 20;

impl SmallDisk {
    fn new() -> Self {
        let disk = SmallDisk { folder: temp_dir() };
        let file = std::fs::File::create(disk.file()).expect("a file for the file system");
        file.set_len(8 << 20).expect("8 MiB");
        std::fs::create_dir(disk.path()).expect("a folder to mount on");
        tool("mkfs.ext4", &["-q", &disk.file()]);
        disk.mount();
        disk
    }

    /// A file system in memory.
    fn tmpfs() -> Self {
        let disk = SmallDisk { folder: temp_dir() };
        std::fs::create_dir(disk.path()).expect("a folder to mount on");
        tool("mount", &["-t", "tmpfs", "-o", "size=8m", "tmpfs", &disk.path()]);
        disk
    }

    fn file(&self) -> String {
        self.folder.path().join("disk").to_string_lossy().into_owned()
    }

    fn path(&self) -> String {
        self.folder.path().join("mounted").to_string_lossy().into_owned()
    }

    fn mount(&self) {
        tool("mount", &["-o", "loop", &self.file(), &self.path()]);
    }

    /// Leaves this much room on it.
    fn fill(&self, room_bytes: u64) {
        let mut filler = std::fs::File::create(Path::new(&self.path()).join("filler")).expect("a filler");
        while filler.write_all(&[1; 65536]).is_ok() {}
        while filler.write_all(&[1; 1024]).is_ok() {}
        let len = filler.metadata().expect("the filler").len();
        filler.set_len(len.checked_sub(room_bytes).expect("more room than that")).expect("a shorter filler");
        filler.sync_all().expect("a durable filler");
    }

    fn unmount(&self) {
        tool("umount", &[&self.path()]);
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // It fails where the test has unmounted already.
        let _ = Command::new("umount").arg(self.path()).output();
    }
}

#[test]
#[ignore = "mounts a file system: root only; scripts/test runs it where it can"]
fn a_full_file_system_leaves_a_sound_image() {
    let qemu = Qemu::system();
    for (seed, case) in CASES.iter().enumerate() {
        let small = SmallDisk::new();
        let image = Path::new(&small.path()).join("image.qcow2");
        // Far more than fits.
        let case = Case { disk_bytes: case.disk_bytes.max(case.cluster_bytes * 512).max(24 << 20), ..*case };
        qemu.create(&image, "qcow2", case.create, case.disk_bytes);
        small.fill((case.cluster_bytes * 40).max(64 << 10));
        let empty = vec![0; case.disk_bytes as usize];
        let load = load_from(&image, empty, &case, seed as u64, 3, None, usize::MAX);
        assert!(matches!(load.code, Some(0 | 5)), "{:?}: {}", load.code, load.stderr);
        assert!(load.follower.failures.iter().any(|text| text.contains("No space")), "{:?}", load.follower.failures);
        // The disk's bytes count, not those in the page cache.
        small.unmount();
        small.mount();
        let copy = small.folder.path().join("end.qcow2");
        std::fs::copy(&image, &copy).expect("a copy");
        judge(&copy, &load.follower);
    }
}

/// A guest's writes; those that were acknowledged. The flush behind them, and the close, succeed.
fn write_until_full(image: &str, size: u64) -> (Vec<u64>, Vec<u64>) {
    let write = async |node: &Node, at: u64| node.write(at, IoBuf::copy_from(&[7; 4096])).await.0;
    rt::block_on(async {
        let node = open(OpenRequest::file(image).format("qcow2").writable(true)).await.expect("the image opens");
        let (mut acknowledged, mut refused) = (Vec::new(), Vec::new());
        for at in (0..size).step_by(STEP as usize) {
            match write(&node, at).await {
                Ok(()) => acknowledged.push(at),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
                    refused.push(at);
                }
            }
        }
        node.flush().await.expect("a flush on a full disk");
        node.close().await.expect("a close on a full disk");
        (acknowledged, refused)
    })
}

#[test]
#[ignore = "mounts a file system: root only; scripts/test runs it where it can"]
fn a_full_file_system_keeps_what_it_acknowledged() {
    const SIZE: u64 = 512 << 20;
    for (kind, options) in [("ext4", "cluster_size=4k"), ("tmpfs", "cluster_size=4k"), ("tmpfs", "cluster_size=16k")] {
        for qemu in Qemu::all() {
            let small = if kind == "ext4" { SmallDisk::new() } else { SmallDisk::tmpfs() };
            let image = Path::new(&small.path()).join("image.qcow2");
            qemu.create(&image, "qcow2", options, SIZE);
            small.fill(600 << 10);
            let (acknowledged, refused) = write_until_full(image.to_str().expect("text path"), SIZE);
            assert!(!acknowledged.is_empty() && !refused.is_empty(), "{acknowledged:x?}, {refused:x?}");
            if kind == "ext4" {
                // The disk's bytes count, not those in the page cache.
                small.unmount();
                small.mount();
            }
            let copy = small.folder.path().join("end.qcow2");
            std::fs::copy(&image, &copy).expect("a copy");
            qemu.expect_clean(&copy);
            let mut commands: Vec<String> = acknowledged.iter().map(|at| format!("read -P 7 {at} 4k")).collect();
            commands.extend(refused.iter().map(|at| format!("read -P 0 {at} 4k")));
            let said = qemu.io_commands(&copy, "qcow2", &commands).expect_ok().stdout;
            assert!(
                !said.contains("verification failed") && !said.contains("read failed"),
                "{kind}, {options}: {said}"
            );
        }
    }
}
