// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Format options amended by the real qemu-img and by us, each on a copy of one image with random features. Both take
//! or refuse the change, and afterwards both images hold the same. QEMU finds nothing wrong with ours, and goes on
//! writing to it.

use cowshed_image::{OpenRequest, open};
use cowshed_jobs::amend::{self, AmendOptions};
use cowshed_jobs::{ImageSpec, JobHandle};
use cowshed_layout::qcow2::SnapshotName;
use cowshed_storage::{IoBuf, rt};
use cowshed_testkit::qemu::{Qemu, temp_dir};
use cowshed_testkit::random::{Random, for_each_seed};
use std::path::{Path, PathBuf};

const SIZE: u64 = 2 << 20;

struct Subject<'a> {
    qemu: &'a Qemu,
    folder: PathBuf,
    random: Random,
    snapshots: Vec<String>,
    compressed: bool,
    /// Grown to at most, in bytes.
    size: u64,
}

impl Subject<'_> {
    fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    fn create(&mut self) {
        let random = &mut self.random;
        let base = self.folder.join("base");
        self.qemu.create(&base, "raw", "", SIZE);
        self.qemu.io_commands(&base, "raw", &["write -P 9 0 1M".into()]);
        let v2 = random.chance(25);
        let mut options = format!("compat={}", if v2 { "0.10" } else { "1.1" });
        let mut cluster = random.pick(&["512", "1k", "4k", "4k", "16k", "64k"]);
        self.compressed = true;
        if !v2 {
            options += &format!(",refcount_bits={}", random.pick(&[1, 2, 4, 8, 16, 16, 16, 32, 64]));
            if random.chance(25) {
                options += ",lazy_refcounts=on";
            }
            if random.chance(20) {
                cluster = "16k";
                options += ",extended_l2=on";
            }
            if random.chance(15) {
                options += &format!(",data_file={}", self.folder.join("data").display());
                if random.chance(50) {
                    options += ",data_file_raw=on";
                }
                self.compressed = false;
            } else if random.chance(15) {
                options += ",compression_type=zstd";
            }
        }
        if random.chance(50) && !options.contains("data_file_raw") {
            options += &format!(",backing_file={},backing_fmt=raw", base.display());
        }
        options += &format!(",cluster_size={cluster}");
        eprintln!("{options}");
        self.qemu.create(&self.folder.join("image"), "qcow2", &options, SIZE);
    }

    fn fill(&mut self, name: &str) {
        let path = self.path(name);
        for _ in 0..6 + self.random.below(10) {
            let start = self.random.below(SIZE / 512);
            let len = (1 + self.random.below((SIZE / 512 - start).min(400))) * 512;
            let (start, pattern) = (start * 512, 1 + self.random.below(255));
            let command = match self.random.below(8) {
                0..=2 => format!("write -P {pattern} {start} {len}"),
                3 if self.compressed => format!("write -c -P {pattern} {} 64k", start / 65536 * 65536),
                4 => format!("write -z -u {start} {len}"),
                5 => format!("discard {start} {len}"),
                6 if self.random.chance(60) => {
                    // Refused where counts have no room, and with a data file.
                    let name = format!("snapshot {}", self.snapshots.len());
                    if self.qemu.img(["snapshot", "-c", &name, path.to_str().unwrap()]).code == 0 {
                        self.snapshots.push(name);
                    }
                    continue;
                }
                _ => format!("write -z {start} {len}"),
            };
            let arguments = ["-f", "qcow2", "-d", "unmap", "-c", &command, path.to_str().unwrap()];
            // A compressed cluster over an allocated one is refused.
            self.qemu.io(arguments);
        }
    }

    fn amendment(&mut self) -> String {
        let random = &mut self.random;
        let mut options = Vec::new();
        if random.chance(50) {
            options.push(format!("compat={}", random.pick(&["0.10", "0.10", "1.1", "v3", "v2"])));
        }
        if random.chance(40) {
            options.push(format!("refcount_bits={}", random.pick(&[1, 2, 4, 8, 16, 16, 32, 64])));
        }
        if random.chance(25) {
            options.push(format!("lazy_refcounts={}", random.pick(&["on", "off"])));
        }
        if random.chance(15) {
            self.size += random.below(20) * 65536;
            options.push(format!("size={}", self.size));
        }
        if options.is_empty() {
            options.push("refcount_bits=16".to_owned());
        }
        options.join(",")
    }

    fn copy(&self, from: &str, to: &str) {
        std::fs::copy(self.path(from), self.path(to)).expect("a copy");
    }

    fn contents(&self, name: &str) -> Vec<Vec<u8>> {
        let path = self.path(name);
        let mut all = vec![self.qemu.content(&path, "qcow2")];
        for snapshot in &self.snapshots {
            let raw = self.path("raw");
            self.qemu.convert((&path, "qcow2"), (&raw, "raw"), &["-l", snapshot]);
            all.push(std::fs::read(&raw).expect("the snapshot"));
        }
        all
    }

    fn our_contents(&self, name: &str) -> Vec<Vec<u8>> {
        let wanted = self.snapshots.iter().map(|name| Some(SnapshotName::of_name(name)));
        rt::block_on(async {
            let mut all = Vec::new();
            for snapshot in std::iter::once(None).chain(wanted) {
                let request = OpenRequest::file(self.path(name).to_str().unwrap()).format("qcow2").snapshot(snapshot);
                let node = open(request).await.expect("open");
                let (result, bytes) = node.read(0, IoBuf::zeroed(node.size() as usize)).await;
                result.expect("read");
                node.close().await.expect("close");
                all.push(bytes.to_vec());
            }
            all
        })
    }

    /// One amendment by both. True when it was taken.
    fn amend(&mut self) -> bool {
        let wanted = self.amendment();
        self.copy("image", "theirs");
        self.copy("image", "ours");
        let before = self.contents("image");
        let theirs = self.qemu.img(["amend", "-f", "qcow2", "-o", &wanted, self.path("theirs").to_str().unwrap()]);
        let ours = ours(&self.path("ours"), &wanted);
        eprintln!("amend {wanted}: {} / {ours:?}", theirs.stderr.trim());
        match (&ours, theirs.code) {
            (Ok(()), 0) => {}
            (Err(_), code) if code != 0 => {
                // Nothing has changed.
                assert!(self.contents("ours") == before, "a refused change changed the image");
                self.qemu.expect_clean(&self.path("ours"));
                return false;
            }
            // QEMU's own counts have no room for its steps on the way.
            (Ok(()), _) => eprintln!("only we can: {}", theirs.stderr),
            // It leaves an option alone that is on already, and makes it version 2, where none is on.
            (Err(error), _)
                if error.contains("Lazy refcounts only supported") && wanted.contains("lazy_refcounts=on") =>
            {
                assert!(self.contents("ours") == before, "a refused change changed the image");
                self.qemu.expect_clean(&self.path("ours"));
                return false;
            }
            (Err(error), _) => panic!("amend {wanted}: {error}, where QEMU takes it"),
        }
        self.qemu.expect_clean(&self.path("ours"));
        let after = self.contents("ours");
        assert_eq!(after.len(), before.len());
        for (number, (before, after)) in before.iter().zip(&after).enumerate() {
            let (old, new) = after.split_at(before.len().min(after.len()));
            assert!(old == &before[..], "amend {wanted}: tree {number} reads otherwise");
            assert!(new.iter().all(|byte| *byte == 0), "amend {wanted}: what was added isn't zero");
        }
        for (number, (ours, theirs)) in self.our_contents("ours").iter().zip(&after).enumerate() {
            // QEMU shows a snapshot in the size of the disk as it is now.
            let (same, more) = theirs.split_at(ours.len().min(theirs.len()));
            assert!(ours == same, "amend {wanted}: tree {number}: we read otherwise than QEMU");
            assert!(more.iter().all(|byte| *byte == 0) && (number > 0 || more.is_empty()), "amend {wanted}");
        }
        if theirs.code == 0 {
            assert_eq!(self.specific("ours"), self.specific("theirs"), "amend {wanted}");
        }
        self.copy("ours", "image");
        true
    }

    fn specific(&self, name: &str) -> serde_json::Value {
        let info = self.qemu.info(&self.path(name), "qcow2");
        serde_json::json!([info["virtual-size"], info["format-specific"], info["backing-filename"], info["snapshots"]])
    }
}

fn ours(path: &Path, options: &str) -> Result<(), String> {
    let image = ImageSpec::file(path.to_str().unwrap()).format("qcow2");
    let options = AmendOptions { image, options: vec![options.to_owned()], ..AmendOptions::default() };
    rt::block_on(amend::run(&options, &JobHandle::new())).map_err(|error| error.to_string())
}

#[test]
fn qemu_and_we_amend_alike() {
    for_each_seed(12, |seed| {
        let qemu = Qemu::for_seed(seed);
        let folder = temp_dir();
        eprintln!("seed {seed}");
        let mut subject = Subject {
            qemu: &qemu,
            folder: folder.path().to_owned(),
            random: Random::new(seed ^ 0x616d_656e_6400),
            snapshots: Vec::new(),
            compressed: true,
            size: SIZE,
        };
        subject.create();
        for _ in 0..4 {
            subject.fill("image");
            // Clusters of an amendment that QEMU refuses half-way (a snapshot where counts have no room) stay as leaks.
            let left = subject.qemu.check_with(&subject.path("image"), "qcow2", &["-r", "leaks"]);
            assert_eq!(left.code, 0, "{}", left.json);
            subject.amend();
        }
    });
}

/// The method of compression doesn't matter to version 2 as long as nothing is compressed, in snapshots neither.
#[test]
fn zstd_images_become_version_2_where_nothing_is_compressed() {
    let qemu = Qemu::system();
    let write = ["write -P 1 0 96k", "write -z 200k 64k"].map(str::to_owned);
    let compress = ["write -c -P 2 128k 64k".to_owned()];
    let overwrite = ["write -P 3 128k 64k".to_owned()];
    for (number, is_taken) in [true, false, false, true].into_iter().enumerate() {
        let folder = temp_dir();
        let image = folder.path().join("image");
        qemu.create(&image, "qcow2", "compression_type=zstd", SIZE);
        qemu.io_commands(&image, "qcow2", &write);
        if number > 0 {
            qemu.io_commands(&image, "qcow2", &compress);
        }
        if number == 2 {
            qemu.img(["snapshot", "-c", "a", image.to_str().unwrap()]).expect_ok();
        }
        if number > 1 {
            qemu.io_commands(&image, "qcow2", &overwrite);
        }
        let theirs = folder.path().join("theirs");
        std::fs::copy(&image, &theirs).expect("a copy");
        let (before, bytes) = (qemu.content(&image, "qcow2"), std::fs::read(&image).expect("the image"));
        let done = qemu.img(["amend", "-f", "qcow2", "-o", "compat=0.10", theirs.to_str().unwrap()]);
        match ours(&image, "compat=0.10") {
            Ok(()) => {
                assert!(is_taken && done.code == 0, "{number}: {}", done.stderr);
                let info = qemu.info(&image, "qcow2");
                assert_eq!(info["format-specific"], qemu.info(&theirs, "qcow2")["format-specific"], "{number}");
                assert_eq!(info["format-specific"]["data"]["compat"], "0.10");
            }
            Err(error) => {
                assert!(!is_taken && error.contains("existing compressed clusters"), "{number}: {error}");
                assert!(
                    std::fs::read(&image).expect("the image") == bytes,
                    "{number}: a refused change changed the image"
                );
                eprintln!("{number}: QEMU: {} {}", done.code, done.stderr);
                assert!(number == 2 || done.code != 0, "{number}: only QEMU takes it");
                // Nor is the other half of a change made.
                ours(&image, "compat=0.10,size=2M").expect_err("a refusal");
                assert!(std::fs::read(&image).expect("the image") == bytes, "{number}: half of a change was made");
            }
        }
        assert!(qemu.content(&image, "qcow2") == before, "{number}: reads otherwise");
        qemu.expect_clean(&image);
    }
}
