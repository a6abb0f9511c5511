// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Internal snapshots, taken, applied, deleted and written over by the real QEMU and by us in turns, on one image, over
//! the matrix of options; each against a plain copy of the disk's bytes.

use cowshed_image::snapshots::{self, SnapshotOptions};
use cowshed_image::{OpenRequest, open};
use cowshed_storage::{File, IoBuf, OpenOptions, rt};
use cowshed_testkit::qemu::{Qemu, temp_dir};
use cowshed_testkit::random::{Random, for_each_seed};
use std::path::Path;

const SIZE: u64 = 1 << 20;

/// The image and what it must hold.
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

    fn ours<T>(&mut self, work: impl AsyncFnOnce(&File, &SnapshotOptions) -> cowshed_block::Result<T>) -> T {
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
    let qemu = Qemu::system();
    for_each_seed(24, |seed| {
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
