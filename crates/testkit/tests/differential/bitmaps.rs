// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Dirty bitmaps, changed and recorded into by the real QEMU and by us in turns, on one image, over the matrix of
//! options. Each is compared with a plain set of granules, which QEMU and we must find exactly.

use cowshed_image::formats::DriverOf;
use cowshed_image::formats::qcow2::BitmapChange;
use cowshed_image::{Node, OpenRequest, Preallocation, ZeroFlags, open};
use cowshed_storage::{IoBuf, rt};
use cowshed_testkit::dirty::DirtyModel;
use cowshed_testkit::qemu::{Qemu, temp_dir};
use cowshed_testkit::random::{Random, for_each_seed};
use cowshed_testkit::waiting::await_listening;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::{Child, Command};
use std::sync::Arc;

struct Subject<'a> {
    qemu: &'a Qemu,
    path: &'a Path,
    random: Random,
    size: u64,
    bitmaps: BTreeMap<String, DirtyModel>,
    next: u64,
    snapshots: u64,
    has_data_file: bool,
}

fn matrix(seed: u64, data: &Path) -> (String, bool) {
    let mut random = Random::new(seed);
    let cluster_bits = 9 + random.below(8);
    let mut options = format!("cluster_size={},refcount_bits={}", 1 << cluster_bits, 1 << (3 + random.below(4)));
    if random.chance(30) {
        options = format!("cluster_size={},extended_l2=on", 16384 << random.below(3));
    }
    if random.chance(20) {
        options += ",lazy_refcounts=on";
    }
    let has_data_file = random.chance(25);
    if has_data_file {
        options += &format!(",data_file={},data_file_raw={}", data.display(), random.pick(&["on", "off"]));
    }
    (options, has_data_file)
}

async fn opened(path: &Path, writable: bool) -> Arc<Node> {
    let name = path.to_str().expect("text path");
    open(OpenRequest::file(name).format("qcow2").writable(writable)).await.unwrap_or_else(|error| panic!("{error}"))
}

impl Subject<'_> {
    fn text_path(&self) -> &str {
        self.path.to_str().expect("text path")
    }

    fn by_qemu(&self, arguments: &[&str]) {
        self.qemu.img(arguments).expect_ok();
    }

    fn ours<T>(&self, work: impl AsyncFnOnce(&Node) -> cowshed_types::Result<T>) -> T {
        rt::block_on(async {
            let node = opened(self.path, true).await;
            let result = work(&node).await.unwrap_or_else(|error| panic!("{error}"));
            node.close().await.unwrap_or_else(|error| panic!("{error}"));
            result
        })
    }

    fn change(&self, changes: &[BitmapChange]) {
        self.ours(async |node| node.qcow2().expect("qcow2").change_bitmaps(changes).await);
    }

    fn some_bitmap(&mut self) -> Option<String> {
        let count = self.bitmaps.len() as u64;
        (count > 0).then(|| {
            let at = self.random.below(count) as usize;
            self.bitmaps.keys().nth(at).cloned().expect("a name")
        })
    }

    /// Several writes in one session of QEMU or ours.
    fn write(&mut self) {
        let ours = self.random.chance(60);
        let mut requests = Vec::new();
        for _ in 0..1 + self.random.below(6) {
            let sectors = self.size / 512;
            let start = self.random.below(sectors);
            let len = 1 + self.random.below((sectors - start).min(300));
            requests.push((self.random.below(3), start * 512, len * 512, self.random.chance(30)));
        }
        for (_, start, len, _) in &requests {
            for bitmap in self.bitmaps.values_mut().filter(|bitmap| bitmap.enabled) {
                bitmap.mark(*start, *len);
            }
        }
        if !ours {
            let command = |(kind, start, len, _): &(u64, u64, u64, bool)| match kind {
                0 => format!("write -z {start} {len}"),
                _ => format!("write -P 7 {start} {len}"),
            };
            let commands: Vec<String> = requests.iter().map(command).collect();
            let done = self.qemu.io_commands(self.path, "qcow2", &commands);
            assert!(!done.stdout.contains("failed"), "{}", done.stdout);
            return;
        }
        self.ours(async |node| {
            for (kind, start, len, flush) in requests {
                match kind {
                    0 => node.write_zeroes(start, len, ZeroFlags::default()).await?,
                    _ => node.write(start, IoBuf::copy_from(&vec![9; len as usize])).await.0?,
                }
                if flush {
                    node.flush().await?;
                }
            }
            Ok(())
        });
    }

    fn add(&mut self) {
        let name = format!("b{}", self.next);
        self.next += 1;
        let granularity = self.random.pick(&[512, 1024, 4096, 65536, 1 << 20, 2 << 30]);
        let enabled = self.random.chance(75);
        if self.random.chance(50) {
            let granularity_bytes = Some(granularity);
            self.change(&[BitmapChange::Add { name: name.clone(), granularity_bytes, enabled }]);
        } else {
            let granularity = granularity.to_string();
            let mut arguments = vec!["bitmap", "--add", "-g", &granularity];
            arguments.extend((!enabled).then_some("--disable"));
            arguments.extend([self.text_path(), &name]);
            self.by_qemu(&arguments);
        }
        self.bitmaps.insert(name, DirtyModel::new(granularity, enabled));
    }

    fn alter(&mut self) {
        let Some(name) = self.some_bitmap() else { return self.add() };
        let ours = self.random.chance(60);
        let what = self.random.below(5);
        let other = self.some_bitmap().expect("a bitmap");
        let (option, change) = match what {
            0 => ("--remove", BitmapChange::Remove(name.clone())),
            1 => ("--clear", BitmapChange::Clear(name.clone())),
            2 => ("--enable", BitmapChange::Enable(name.clone())),
            3 => ("--disable", BitmapChange::Disable(name.clone())),
            _ => return self.merge(name, other, ours),
        };
        match ours {
            true => self.change(&[change]),
            false => self.by_qemu(&["bitmap", option, self.text_path(), &name]),
        }
        let bitmap = self.bitmaps.get_mut(&name).expect("a bitmap");
        match what {
            0 => drop(self.bitmaps.remove(&name)),
            1 => bitmap.dirty.clear(),
            2 => bitmap.enabled = true,
            _ => bitmap.enabled = false,
        }
    }

    fn merge(&mut self, target: String, source: String, ours: bool) {
        let from = self.bitmaps[&source].clone();
        // Only newer ones than 7.2 merge a coarser bitmap into a finer one.
        let ours = ours || from.granularity != self.bitmaps[&target].granularity;
        if ours {
            self.ours(async |node| {
                let driver = node.qcow2().expect("qcow2");
                let bits = driver.bitmap_bits(&source).await?;
                driver.change_bitmaps(&[BitmapChange::Merge { target: target.clone(), source: bits }]).await
            });
        } else {
            self.by_qemu(&["bitmap", "--merge", &source, self.text_path(), &target]);
        }
        let size = self.size;
        let into = self.bitmaps.get_mut(&target).expect("a bitmap");
        for (start, end) in from.ranges(size) {
            into.mark(start, end - start);
        }
    }

    fn resize(&mut self) {
        let size = (1 + self.random.below(2048)) * 1024;
        let shrinks = size < self.size;
        // With snapshots the size stays.
        if self.snapshots > 0 || (self.has_data_file && shrinks) {
            return;
        }
        if self.random.chance(50) {
            self.ours(async |node| node.resize(size, Preallocation::Off).await);
        } else {
            let text = size.to_string();
            self.by_qemu(&["resize", "-q", "--shrink", self.text_path(), &text]);
        }
        self.size = size;
        for bitmap in self.bitmaps.values_mut() {
            let end = size.div_ceil(bitmap.granularity);
            bitmap.dirty.retain(|granule| *granule < end);
        }
    }

    fn snapshot(&mut self) {
        if self.has_data_file || self.snapshots == 3 {
            return;
        }
        self.snapshots += 1;
        let name = format!("s{}", self.snapshots);
        self.by_qemu(&["snapshot", "-c", &name, self.text_path()]);
    }

    fn step(&mut self) {
        match self.random.below(20) {
            0..=8 => self.write(),
            9..=11 if self.bitmaps.len() < 5 => self.add(),
            12..=16 => self.alter(),
            17 => self.resize(),
            18 => self.snapshot(),
            _ => self.write(),
        }
    }

    fn verify(&self) {
        self.qemu.expect_clean(self.path);
        rt::block_on(async {
            let node = opened(self.path, false).await;
            let driver = node.qcow2().expect("qcow2");
            let found = driver.bitmaps().await.expect("bitmaps");
            let names: BTreeSet<&str> = found.iter().map(|bitmap| bitmap.name.as_str()).collect();
            assert_eq!(names, self.bitmaps.keys().map(String::as_str).collect());
            for status in found {
                let expected = &self.bitmaps[&status.name];
                let is = (status.granularity_bytes, status.enabled, status.inconsistent);
                assert_eq!(is, (expected.granularity, expected.enabled, false), "{}", status.name);
                let bits = driver.bitmap_bits(&status.name).await.expect("bits");
                let ranges: Vec<(u64, u64)> = bits.dirty_ranges().map(|range| (range.start, range.end)).collect();
                assert_eq!(ranges, expected.ranges(self.size), "we find in {}", status.name);
            }
            node.close().await.expect("close");
        });
    }

    /// QEMU serves the bitmaps over NBD, and its own client asks for them.
    fn verify_by_qemu(&self) {
        let socket = self.path.with_extension("sock");
        for (name, expected) in &self.bitmaps {
            let mut server = Served::start(self.path, &socket, name);
            let options = format!(
                "driver=nbd,server.type=unix,server.path={},x-dirty-bitmap=qemu:dirty-bitmap:{name}",
                socket.display()
            );
            let map = self.qemu.img(["map", "--output=json", "--image-opts", &options]).expect_ok().json();
            server.stop();
            assert_eq!(dirty_of(&map), expected.ranges(self.size), "QEMU finds in {name}");
        }
    }
}

/// `x-dirty-bitmap` shows dirty ranges as ranges without data.
fn dirty_of(map: &Value) -> Vec<(u64, u64)> {
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    for run in map.as_array().expect("runs").iter().filter(|run| run["data"] == false) {
        let (start, len) = (run["start"].as_u64().expect("start"), run["length"].as_u64().expect("length"));
        match ranges.last_mut() {
            Some(last) if last.1 == start => last.1 = start + len,
            _ => ranges.push((start, start + len)),
        }
    }
    ranges
}

struct Served(Child);

impl Served {
    fn start(image: &Path, socket: &Path, bitmap: &str) -> Served {
        let _ = std::fs::remove_file(socket);
        let mut child = Command::new("qemu-nbd")
            .args(["-r", "-f", "qcow2", "-B", bitmap, "-k"])
            .args([socket, image])
            .spawn()
            .expect("qemu-nbd starts");
        await_listening(socket, &mut child);
        Served(child)
    }

    fn stop(&mut self) {
        let _ = self.0.wait();
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn qemu_and_we_take_turns_with_bitmaps() {
    for_each_seed(24, |seed| {
        let qemu = Qemu::for_seed(seed);
        let folder = temp_dir();
        let path = folder.path().join("image.qcow2");
        let (options, has_data_file) = matrix(seed, &folder.path().join("data"));
        eprintln!("seed {seed}: {options}");
        let size = 1 << 20;
        qemu.create(&path, "qcow2", &options, size);
        let random = Random::new(seed ^ 0x6269_746d);
        let mut subject = Subject {
            qemu: &qemu,
            path: &path,
            random,
            size,
            bitmaps: BTreeMap::new(),
            next: 0,
            snapshots: 0,
            has_data_file,
        };
        for step in 0..30 {
            subject.step();
            if step % 5 == 4 {
                subject.verify();
            }
        }
        subject.verify_by_qemu();
    });
}
