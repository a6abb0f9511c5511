// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Internal snapshots, taken, applied, deleted and written over by the real QEMU and by us in turns, on one image, over
//! the matrix of options. Each is compared with a plain copy of the disk's bytes.

use cowshed_image::formats::DriverOf;
use cowshed_image::{OpenRequest, Preallocation, open};
use cowshed_jobs::amend::{self, AmendOptions};
use cowshed_jobs::bitmap::{self, BitmapAction, BitmapOptions};
use cowshed_jobs::{ImageSpec, JobHandle};
use cowshed_layout::qcow2::{Header, Snapshot};
use cowshed_offline::snapshots::{self, SnapshotOptions};
use cowshed_storage::{File, IoBuf, OpenOptions, rt};
use cowshed_testkit::qemu::{Qemu, temp_dir};
use cowshed_testkit::random::{Random, for_each_seed};
use std::path::Path;

const SIZE: u64 = 1 << 20;

/// The image and its expected contents.
struct Subject<'a> {
    qemu: &'a Qemu,
    path: &'a Path,
    random: Random,
    current: Vec<u8>,
    /// ID and bytes.
    taken: Vec<(String, Vec<u8>)>,
    max_snapshots: usize,
}

fn matrix(seed: u64) -> (String, usize) {
    let mut random = Random::new(seed);
    let v2 = random.chance(20);
    let cluster_bits = 9 + random.below(6);
    let order = if v2 { 4 } else { random.below(7) };
    let mut options = format!("cluster_size={},compat={}", 1 << cluster_bits, if v2 { "0.10" } else { "1.1" });
    if !v2 {
        options += &format!(",refcount_bits={}", 1 << order);
        if random.chance(30) {
            options = format!("cluster_size=16k,refcount_bits={},extended_l2=on", 1 << order);
        }
        if random.chance(20) {
            options += ",lazy_refcounts=on";
        }
    }
    // So many references a count can hold, the active table's one included.
    (options, ((1u64 << (1 << order).min(8)) - 2).min(5) as usize)
}

fn locked(path: &Path) -> File {
    File::open(path, &OpenOptions { write: true, ..OpenOptions::default() }).expect("a file")
}

impl Subject<'_> {
    fn write(&mut self) {
        let pattern = 1 + self.random.below(255) as u8;
        let sectors = SIZE / 512;
        let start = self.random.below(sectors);
        let (start, len) = (start * 512, (1 + self.random.below((sectors - start).min(400))) * 512);
        let range = start as usize..(start + len) as usize;
        let kind = self.random.below(3);
        match kind {
            0 => self.current[range].fill(pattern),
            1 => self.current[range].fill(0),
            _ => self.current[range].fill(pattern),
        }
        if self.random.chance(50) {
            let command = match kind {
                1 => format!("write -z {start} {len}"),
                _ => format!("write -P {pattern} {start} {len}"),
            };
            let done = self.qemu.io_commands(self.path, "qcow2", &[command]);
            assert!(!done.stdout.contains("failed"), "{}", done.stdout);
            return;
        }
        rt::block_on(async {
            let name = self.path.to_str().unwrap();
            let node = open(OpenRequest::file(name).format("qcow2").writable(true)).await.expect("open");
            match kind {
                1 => node.write_zeroes(start, len, cowshed_image::ZeroFlags::default()).await.expect("zeroes"),
                _ => {
                    let bytes = IoBuf::copy_from(&self.current[start as usize..(start + len) as usize]);
                    node.write(start, bytes).await.0.expect("write");
                }
            }
            node.close().await.expect("close");
        });
    }

    fn by_qemu(&self, arguments: &[&str]) {
        let path = self.path.to_str().unwrap();
        self.qemu.img([&["snapshot"], arguments, &[path]].concat()).expect_ok();
    }

    fn ours<T>(&mut self, work: impl AsyncFnOnce(&File, &SnapshotOptions) -> cowshed_types::Result<T>) -> T {
        // From one pass over everything to many.
        let memory_bytes = [1, 1 << 14, 1 << 28][self.random.below(3) as usize];
        let options = SnapshotOptions { memory_bytes, ..SnapshotOptions::default() };
        let file = locked(self.path);
        rt::block_on(work(&file, &options)).unwrap_or_else(|error| panic!("{error}"))
    }

    fn step(&mut self) {
        let ours = self.random.chance(60);
        match self.random.below(10) {
            0..=4 => self.write(),
            5..=6 if self.taken.len() < self.max_snapshots => {
                let largest = self.taken.iter().map(|(id, _)| id.parse::<u64>().unwrap()).max().unwrap_or(0);
                let id = (largest + 1).to_string();
                let name = format!("snapshot {id}");
                if ours {
                    let given = self.ours(async |file, options| {
                        snapshots::create(file, name.as_bytes(), options, &|_, _| true).await
                    });
                    assert_eq!(given, id);
                } else {
                    self.by_qemu(&["-c", &name]);
                }
                self.taken.push((id, self.current.clone()));
            }
            7..=8 if !self.taken.is_empty() => {
                let (id, bytes) = self.taken[self.random.below(self.taken.len() as u64) as usize].clone();
                self.current = bytes;
                // QEMU counts the snapshot's clusters once more before it lets go of the others.
                match ours || self.taken.len() == self.max_snapshots {
                    true => self
                        .ours(async |file, options| snapshots::apply(file, id.as_bytes(), options, &|_, _| true).await),
                    false => self.by_qemu(&["-a", &id]),
                }
            }
            _ if !self.taken.is_empty() => {
                let (id, _) = self.taken.remove(self.random.below(self.taken.len() as u64) as usize);
                let name = format!("snapshot {id}");
                match ours {
                    true => self.ours(async |file, options| {
                        snapshots::delete(file, name.as_bytes(), options, &|_, _| true).await
                    }),
                    false => self.by_qemu(&["-d", &name]),
                }
            }
            _ => self.write(),
        }
    }

    fn verify(&self) {
        self.qemu.expect_clean(self.path);
        let theirs = self.qemu.content(self.path, "qcow2");
        assert!(theirs == self.current, "QEMU reads the disk otherwise");
        rt::block_on(async {
            let node = open(OpenRequest::file(self.path.to_str().unwrap())).await.expect("open");
            let (result, bytes) = node.read(0, IoBuf::zeroed(SIZE as usize)).await;
            result.expect("read");
            assert!(bytes[..] == self.current[..], "we read the disk otherwise");
            node.close().await.expect("close");
        });
        let raw = self.path.with_extension("raw");
        for (id, expected) in &self.taken {
            let option = format!("snapshot.id={id}");
            self.qemu.convert((self.path, "qcow2"), (&raw, "raw"), &["-l", &option]);
            let bytes = std::fs::read(&raw).expect("the snapshot");
            assert!(bytes == *expected, "snapshot {id} reads otherwise");
        }
    }
}

#[test]
fn qemu_and_we_take_turns_with_snapshots() {
    for_each_seed(24, |seed| {
        let qemu = Qemu::for_seed(seed);
        let folder = temp_dir();
        let path = folder.path().join("image.qcow2");
        let (options, max_snapshots) = matrix(seed);
        eprintln!("seed {seed}: {options}");
        qemu.create(&path, "qcow2", &options, SIZE);
        let current = vec![0; SIZE as usize];
        let random = Random::new(seed ^ 0x736e_6170);
        let mut subject = Subject { qemu: &qemu, path: &path, random, current, taken: Vec::new(), max_snapshots };
        for step in 0..24 {
            subject.step();
            if step % 4 == 3 {
                subject.verify();
            }
        }
        subject.verify();
    });
}

/// The snapshots of an image.
fn listed(path: &Path) -> Vec<Snapshot> {
    rt::block_on(async {
        let node = open(OpenRequest::file(path.to_str().expect("text path")).format("qcow2")).await.expect("open");
        let driver = node.qcow2().expect("qcow2");
        let listed = snapshots::list(driver.image_file(), &driver.header()).await.expect("a list");
        node.close().await.expect("close");
        listed
    })
}

/// An entry without the place of its table.
fn told(snapshot: &Snapshot) -> Snapshot {
    Snapshot { l1_table_offset: 0, l1_size: 0, ..snapshot.clone() }
}

/// Gives the first snapshot of an image a past: dates, clocks, a state, and unknown extra data.
fn age(path: &Path, is_v2: bool) -> Snapshot {
    let mut bytes = std::fs::read(path).expect("the image");
    let header = Header::parse(&bytes).expect("a header");
    let mut all = listed(path);
    let first = &mut all[0];
    first.date_s = 1_234_567_890;
    first.date_ns = 987_654_321;
    first.vm_clock_ns = 3_723_004_000_000;
    // Size of the state, of the disk, instructions, and a field of a later version.
    let fields = [0u64, SIZE, 77, 0x0123_4567_89ab_cdef, u64::MAX];
    let count = if is_v2 { 0 } else { fields.len() };
    first.extra_data = fields[..count].iter().flat_map(|field| field.to_be_bytes()).collect();
    let aged = first.clone();
    let table: Vec<u8> = all.iter().flat_map(|snapshot| snapshot.encode().expect("an entry")).collect();
    let at = header.snapshots_offset as usize;
    bytes.resize(bytes.len().max(at + table.len()), 0);
    bytes[at..at + table.len()].copy_from_slice(&table);
    std::fs::write(path, bytes).expect("the image");
    aged
}

/// Each change of an image writes its snapshots' entries again, or leaves them: as they were.
#[test]
fn dates_clocks_and_extra_data_of_a_snapshot_are_kept() {
    let qemu = Qemu::system();
    for options in ["compat=1.1", "compat=0.10", "cluster_size=64k,extended_l2=on,refcount_bits=64"] {
        let folder = temp_dir();
        let path = folder.path().join("image.qcow2");
        let name = path.to_str().expect("text path");
        let is_v2 = options.contains("0.10");
        qemu.create(&path, "qcow2", options, SIZE);
        qemu.io_commands(&path, "qcow2", &["write -P 1 0 100k".to_owned()]);
        qemu.img(["snapshot", "-c", "old", name]).expect_ok();
        let aged = age(&path, is_v2);
        let line = |path: &Path| {
            let said = qemu.img(["snapshot", "-l", path.to_str().expect("text path")]).expect_ok().stdout;
            said.lines().find(|line| line.contains("old")).expect("the snapshot").to_owned()
        };
        let shown = line(&path);
        assert!(shown.contains("2009-02-1") && shown.contains("01:02:03.004"), "{shown}");
        let spec = || ImageSpec::file(name).format("qcow2");
        let amended = async |option: &str| {
            let options = vec![option.to_owned()];
            amend::run(&AmendOptions { image: spec(), options, ..AmendOptions::default() }, &JobHandle::new()).await
        };
        let snapshot = async |what: &str, of: &[u8]| {
            let (file, defaults) = (locked(&path), SnapshotOptions::default());
            match what {
                "create" => snapshots::create(&file, of, &defaults, &|_, _| true).await.map(drop),
                "apply" => snapshots::apply(&file, of, &defaults, &|_, _| true).await,
                _ => snapshots::delete(&file, of, &defaults, &|_, _| true).await,
            }
        };
        let steps: &[&str] =
            &["write", "create", "apply", "write", "delete", "amend", "bitmap", "grow", "unmark", "older", "newer"];
        for step in steps {
            if is_v2 && ["bitmap", "grow", "unmark", "older", "newer"].contains(step) {
                continue;
            }
            let done = rt::block_on(async {
                match *step {
                    "create" => snapshot("create", b"new").await,
                    "apply" => snapshot("apply", b"old").await,
                    "delete" => snapshot("delete", b"new").await,
                    "amend" if is_v2 => amended("compat=1.1").await,
                    "amend" => amended("refcount_bits=32").await,
                    // Back to 16 bits, which version 2 has.
                    "older" if options.contains("extended_l2") => amended("refcount_bits=8").await,
                    "older" => amended("refcount_bits=16,lazy_refcounts=on").await,
                    "newer" => amended("lazy_refcounts=off").await,
                    "bitmap" | "unmark" => {
                        let action = if *step == "bitmap" { BitmapAction::Add } else { BitmapAction::Remove };
                        let options = BitmapOptions {
                            image: spec(),
                            name: "b".to_owned(),
                            actions: vec![action],
                            granularity_bytes: None,
                            source: None,
                        };
                        bitmap::run(&options, &JobHandle::new()).await.map_err(|(_, error)| error)
                    }
                    _ => {
                        let node = open(OpenRequest::file(name).format("qcow2").writable(true)).await?;
                        if *step == "grow" {
                            node.resize(2 * SIZE, Preallocation::Off).await?;
                        }
                        node.write(5000, IoBuf::copy_from(&[7; 9000])).await.0?;
                        node.close().await
                    }
                }
            });
            done.unwrap_or_else(|error| panic!("{step} on {options}: {error}"));
            let now = listed(&path);
            let mut found = told(&now[0]);
            if is_v2 && *step == "amend" {
                // Version 3 has the sizes there.
                assert!(found.extra_data.len() >= 16, "{step} on {options}: {found:?}");
                found.extra_data.clear();
            }
            assert_eq!(found, told(&aged), "{step} on {options}");
            assert_eq!(line(&path), shown, "{step} on {options}");
            qemu.expect_clean(&path);
        }
    }
}
