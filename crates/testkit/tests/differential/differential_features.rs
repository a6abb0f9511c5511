// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Images with several features at once: encryption, snapshots, bitmaps, data files, subclusters, backing files. The
//! real QEMU and we create, write and change them in turns. Each is compared with a plain copy of the disk's bytes and
//! a set of granules.

use cowshed_image::formats::DriverOf;
use cowshed_image::secret::Secret;
use cowshed_image::{Node, OpenRequest, ZeroFlags, open};
use cowshed_jobs::amend::{self, AmendOptions};
use cowshed_jobs::bitmap::{self, BitmapAction, BitmapOptions};
use cowshed_jobs::commit::{self, CommitOptions};
use cowshed_jobs::create::CreateRequest;
use cowshed_jobs::rebase::{self, RebaseOptions};
use cowshed_jobs::resize::{self, NewSize, ResizeOptions};
use cowshed_jobs::snapshot::{self, SnapshotAction};
use cowshed_jobs::{ImageSpec, JobHandle, create};
use cowshed_layout::qcow2::SnapshotName;
use cowshed_storage::{IoBuf, rt};
use cowshed_testkit::dirty::DirtyModel;
use cowshed_testkit::qemu::{Output, Qemu, temp_dir};
use cowshed_testkit::random::{Random, for_each_seed};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const SIZE: u64 = 1 << 20;
const OBJECT: &str = "secret,id=s,data=geheim";

/// The features of one image.
#[derive(Clone, Debug)]
struct Features {
    options: String,
    cluster_bytes: u64,
    is_v2: bool,
    is_encrypted: bool,
    has_data_file: bool,
    is_raw: bool,
    /// Bytes of the backing file.
    backing: Option<u64>,
}

impl Features {
    fn random(random: &mut Random, folder: &Path) -> Features {
        let is_v2 = random.chance(15);
        let mut cluster_bytes = 512 << random.below(8);
        let mut options = format!("compat={},cluster_size={cluster_bytes}", if is_v2 { "0.10" } else { "1.1" });
        let mut has_data_file = false;
        let mut is_raw = false;
        if !is_v2 {
            if random.chance(35) {
                cluster_bytes = 16384 << random.below(3);
                options = format!("cluster_size={cluster_bytes},extended_l2=on");
            }
            options += &format!(",refcount_bits={}", random.pick(&[8, 16, 16, 32, 64]));
            if random.chance(25) {
                options += ",lazy_refcounts=on";
            }
            has_data_file = random.chance(25);
            is_raw = has_data_file && random.chance(50);
            if has_data_file {
                let raw = if is_raw { "on" } else { "off" };
                options += &format!(",data_file={},data_file_raw={raw}", folder.join("data").display());
            }
        }
        let encryption = random.pick(&["luks", "luks", "aes", ""]);
        let is_encrypted = !encryption.is_empty();
        match encryption {
            "luks" => {
                let cipher = random.pick(&["aes-256", "aes-128", "serpent-128", "twofish-256"]);
                options += ",encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10";
                options += &format!(",encrypt.cipher-alg={cipher}");
            }
            "aes" => options += ",encrypt.format=aes,encrypt.key-secret=s",
            _ => {}
        }
        let backing = (!is_raw && random.chance(40)).then(|| random.pick(&[SIZE, SIZE / 2, SIZE + 65536]));
        if let Some(len) = backing {
            let base = folder.join("base.raw");
            std::fs::write(&base, vec![9; len as usize]).expect("a base");
            options += &format!(",backing_file={},backing_fmt=raw", base.display());
        } else if !is_v2 && random.chance(20) {
            options += ",preallocation=metadata";
        }
        Features { options, cluster_bytes, is_v2, is_encrypted, has_data_file, is_raw, backing }
    }
}

struct Subject<'a> {
    qemu: &'a Qemu,
    folder: PathBuf,
    features: Features,
    random: Random,
    current: Vec<u8>,
    /// Name and bytes.
    taken: Vec<(String, Vec<u8>)>,
    bitmaps: BTreeMap<String, DirtyModel>,
    next: u64,
}

impl<'a> Subject<'a> {
    fn create(qemu: &'a Qemu, folder: &Path, seed: u64) -> Subject<'a> {
        let mut random = Random::new(seed ^ 0x6665_6174);
        let features = Features::random(&mut random, folder);
        eprintln!("seed {seed}: {}", features.options);
        let mut current = vec![9; features.backing.unwrap_or(0).min(SIZE) as usize];
        current.resize(SIZE as usize, 0);
        let folder = folder.to_owned();
        let (taken, bitmaps) = (Vec::new(), BTreeMap::new());
        let mut subject = Subject { qemu, folder, features, random, current, taken, bitmaps, next: 0 };
        match subject.random.chance(50) {
            true => subject.create_ours(),
            false => subject.create_theirs(),
        }
        // Preallocated clusters of an encrypted image of QEMU's hold garbage; so do those of a raw data file.
        let theirs = subject.content_by_qemu();
        if theirs != subject.current {
            assert!(subject.features.is_encrypted, "a new image that isn't empty");
            subject.current = theirs;
        }
        subject
    }

    fn create_ours(&self) {
        let request = CreateRequest {
            filename: self.image().display().to_string(),
            format: "qcow2".to_owned(),
            size: Some(SIZE),
            options: vec![self.features.options.clone()],
            secrets: secrets(),
            ..CreateRequest::default()
        };
        rt::block_on(create::run(&request, &JobHandle::new())).unwrap_or_else(|error| panic!("{error}"));
        let (node, zeroes) = (self.open_ours(false), self.current.clone());
        assert!(read_all(&node) == zeroes, "our new image isn't empty");
        close(&node);
    }

    fn create_theirs(&self) {
        let (image, size) = (self.image(), SIZE.to_string());
        let arguments = ["create", "-q", "-f", "qcow2", "--object", OBJECT, "-o", &self.features.options];
        let arguments = [&arguments[..], &[image.to_str().expect("text"), &size]].concat();
        self.qemu.img(&arguments).expect_ok();
    }

    fn image(&self) -> PathBuf {
        self.folder.join("image.qcow2")
    }

    fn image_opts(&self) -> String {
        let key = if self.features.is_encrypted { "encrypt.key-secret=s," } else { "" };
        format!("driver=qcow2,{key}file.filename={}", self.image().display())
    }

    fn spec(&self) -> ImageSpec {
        ImageSpec { name: self.image_opts(), image_opts: true, secrets: secrets(), ..ImageSpec::default() }
    }

    fn open_ours(&self, writable: bool) -> Arc<Node> {
        let request = OpenRequest::image_opts(&self.image_opts()).expect("options").secrets(secrets());
        rt::block_on(open(request.writable(writable))).unwrap_or_else(|error| panic!("{error}"))
    }

    /// A verb of QEMU's on the image: the words before its name, and behind.
    fn theirs(&self, before: &[&str], behind: &[&str]) -> Output {
        let image = self.image_opts();
        let (verb, rest) = before.split_first().expect("a verb");
        let arguments = [&[*verb, "--object", OBJECT, "--image-opts"], rest, &[&image], behind].concat();
        self.qemu.img(&arguments).expect_ok()
    }

    fn content_by_qemu(&self) -> Vec<u8> {
        self.content_of(&[])
    }

    fn content_of(&self, more: &[&str]) -> Vec<u8> {
        let raw = self.folder.join("out.raw");
        self.theirs(&[&["convert", "-O", "raw"], more].concat(), &[raw.to_str().expect("text")]);
        std::fs::read(&raw).expect("what was converted")
    }

    fn mark(&mut self, start: u64, len: u64) {
        for bitmap in self.bitmaps.values_mut().filter(|bitmap| bitmap.enabled) {
            bitmap.mark(start, len);
        }
    }

    /// Several writes in one session of QEMU or ours.
    fn write(&mut self) {
        let mut requests = Vec::new();
        for _ in 0..1 + self.random.below(5) {
            let sectors = self.current.len() as u64 / 512;
            let start = self.random.below(sectors);
            let len = 1 + self.random.below((sectors - start).min(300));
            let pattern = if self.random.chance(25) { 0 } else { 1 + self.random.below(255) as u8 };
            // Parts of sectors, too.
            let odd = if self.random.chance(30) { self.random.below(500) } else { 0 };
            requests.push((pattern, start * 512 + odd, len * 512 - odd, self.random.chance(30)));
        }
        for (pattern, start, len, _) in &requests {
            self.current[*start as usize..(start + len) as usize].fill(*pattern);
            self.mark(*start, *len);
        }
        if self.random.chance(45) {
            let image = self.image_opts();
            let mut arguments = vec!["--object".to_owned(), OBJECT.to_owned(), "--image-opts".to_owned(), image];
            for (pattern, start, len, flag) in &requests {
                let kind = match (pattern, flag) {
                    (0, true) => "-z -u".to_owned(),
                    (0, false) => "-z".to_owned(),
                    (pattern, _) => format!("-P {pattern}"),
                };
                arguments.extend(["-c".to_owned(), format!("write -q {kind} {start} {len}")]);
            }
            let done = self.qemu.io(&arguments).expect_ok();
            assert!(!done.stdout.contains("failed"), "{}", done.stdout);
            return;
        }
        let node = self.open_ours(true);
        rt::block_on(async {
            for (pattern, start, len, flag) in requests {
                let done = match pattern {
                    0 => node.write_zeroes(start, len, ZeroFlags { may_unmap: flag, no_fallback: false }).await,
                    _ => node.write(start, IoBuf::copy_from(&vec![pattern; len as usize])).await.0,
                };
                done.unwrap_or_else(|error| panic!("write {start}+{len}: {error}"));
                if flag {
                    node.flush().await.expect("a flush");
                }
            }
        });
        close(&node);
    }

    /// A whole cluster, compressed.
    fn compress(&mut self) {
        let cluster = self.features.cluster_bytes;
        let clusters = self.current.len() as u64 / cluster;
        if self.features.is_encrypted || self.features.has_data_file || clusters == 0 {
            return self.write();
        }
        let (start, pattern) = (self.random.below(clusters) * cluster, 1 + self.random.below(255) as u8);
        if self.random.chance(50) {
            let command = format!("write -c -q -P {pattern} {start} {cluster}");
            let image = self.image_opts();
            let done = self.qemu.io(["--image-opts", "-c", command.as_str(), image.as_str()]);
            if done.code != 0 || done.stdout.contains("failed") {
                // It doesn't compress into a range that has a cluster already. Bitmaps have the range all the same,
                // here as there: a backup may copy too much.
                assert!(format!("{}{}", done.stdout, done.stderr).contains("Input/output error"), "{done:?}");
                return self.mark(start, cluster);
            }
        } else {
            let node = self.open_ours(true);
            let bytes = IoBuf::copy_from(&vec![pattern; cluster as usize]);
            let done = rt::block_on(node.write_compressed(vec![(start, bytes)]));
            done.unwrap_or_else(|error| panic!("a compressed write of {start}+{cluster}: {error}"));
            close(&node);
        }
        self.current[start as usize..(start + cluster) as usize].fill(pattern);
        self.mark(start, cluster);
    }

    /// Into the backing file, or away from it. Snapshots have it below them too, and no program promises the state of
    /// bitmaps then: not with those.
    fn move_content(&mut self) {
        if self.features.backing.is_none() || !self.taken.is_empty() || !self.bitmaps.is_empty() {
            return self.write();
        }
        let (away, ours) = (self.random.chance(25), self.random.chance(50));
        match (away, ours) {
            (true, true) => {
                let options = RebaseOptions { image: self.spec(), ..RebaseOptions::default() };
                rt::block_on(rebase::run(&options, &JobHandle::new()))
                    .unwrap_or_else(|error| panic!("rebase: {error}"));
            }
            (true, false) => drop(self.theirs(&["rebase", "-b", ""], &[])),
            (false, true) => {
                let options = CommitOptions { image: self.spec(), ..CommitOptions::default() };
                rt::block_on(commit::run(&options, &JobHandle::new()))
                    .unwrap_or_else(|error| panic!("commit: {error}"));
            }
            (false, false) => drop(self.theirs(&["commit", "-q"], &[])),
        }
        if away {
            self.features.backing = None;
        }
    }

    fn snapshot(&mut self) {
        if self.features.has_data_file {
            return self.write();
        }
        let ours = self.random.chance(50);
        let count = self.taken.len() as u64;
        let act = |subject: &Subject<'_>, option: &str, action: SnapshotAction, name: &str| match ours {
            true => {
                let done = rt::block_on(snapshot::run(&subject.spec(), &action, &JobHandle::new()));
                done.unwrap_or_else(|error| panic!("{action:?}: {error}"));
            }
            false => drop(subject.theirs(&["snapshot", option, name], &[])),
        };
        match self.random.below(5) {
            0..=2 if count < 4 => {
                let name = format!("s{}", self.next);
                self.next += 1;
                act(self, "-c", SnapshotAction::Create(name.clone()), &name);
                self.taken.push((name, self.current.clone()));
            }
            // The effect of a snapshot on bitmaps is undefined: both refuse.
            3 if count > 0 && self.bitmaps.is_empty() => {
                let (name, bytes) = self.taken[self.random.below(count) as usize].clone();
                act(self, "-a", SnapshotAction::Apply(name.clone()), &name);
                self.current = bytes;
            }
            _ if count > 0 => {
                let (name, _) = self.taken.remove(self.random.below(count) as usize);
                act(self, "-d", SnapshotAction::Delete(name.clone()), &name);
            }
            _ => self.write(),
        }
    }

    fn bitmap(&mut self) {
        if self.features.is_v2 {
            return self.write();
        }
        let ours = self.random.chance(50);
        let granularity = self.random.pick(&[512, 4096, 65536]);
        let names: Vec<String> = self.bitmaps.keys().cloned().collect();
        let what =
            if names.is_empty() || (names.len() < 3 && self.random.chance(50)) { 0 } else { 1 + self.random.below(4) };
        let name = match what {
            0 => format!("b{}", self.next),
            _ => names[self.random.below(names.len() as u64) as usize].clone(),
        };
        self.next += u64::from(what == 0);
        let (option, action) = [
            ("--add", BitmapAction::Add),
            ("--remove", BitmapAction::Remove),
            ("--clear", BitmapAction::Clear),
            ("--enable", BitmapAction::Enable),
            ("--disable", BitmapAction::Disable),
        ][what as usize]
            .clone();
        if ours {
            let options = BitmapOptions {
                image: self.spec(),
                name: name.clone(),
                actions: vec![action],
                granularity_bytes: (what == 0).then_some(granularity),
                source: None,
            };
            rt::block_on(bitmap::run(&options, &JobHandle::new())).unwrap_or_else(|error| panic!("{error:?}"));
        } else {
            let text = granularity.to_string();
            let more: &[&str] = if what == 0 { &["-g", &text] } else { &[] };
            self.theirs(&[&["bitmap", option], more].concat(), &[&name]);
        }
        match what {
            0 => drop(self.bitmaps.insert(name, DirtyModel::new(granularity, true))),
            1 => drop(self.bitmaps.remove(&name)),
            _ => {
                let bitmap = self.bitmaps.get_mut(&name).expect("a bitmap");
                match what {
                    2 => bitmap.dirty.clear(),
                    _ => bitmap.enabled = what == 3,
                }
            }
        }
    }

    fn amend(&mut self) {
        if self.features.is_v2 {
            return self.write();
        }
        let option =
            self.random.pick(&["lazy_refcounts=on", "lazy_refcounts=off", "refcount_bits=32", "refcount_bits=64"]);
        if self.random.chance(50) {
            let options =
                AmendOptions { image: self.spec(), options: vec![option.to_owned()], ..AmendOptions::default() };
            rt::block_on(amend::run(&options, &JobHandle::new())).unwrap_or_else(|error| panic!("{option}: {error}"));
        } else {
            self.theirs(&["amend", "-o", option], &[]);
        }
    }

    /// Larger by some sectors. With snapshots too, in version 3.
    fn grow(&mut self) {
        if self.features.is_v2 && !self.taken.is_empty() {
            return self.write();
        }
        let size = self.current.len() as u64 + (1 + self.random.below(200)) * 512;
        if self.random.chance(50) {
            let options = ResizeOptions {
                image: self.spec(),
                size: NewSize::Absolute(size),
                shrink: false,
                preallocation: cowshed_image::Preallocation::Off,
            };
            rt::block_on(resize::run(&options, &JobHandle::new())).unwrap_or_else(|error| panic!("{error}"));
        } else {
            if self.features.is_v2 && self.features.backing.is_some() {
                // Over a longer backing file QEMU refuses: version 2 has no zero clusters.
                let (image, size) = (self.image_opts(), size.to_string());
                let done = self.qemu.img(["resize", "--object", OBJECT, "--image-opts", "-q", &image, &size]);
                if done.code != 0 {
                    assert!(done.stderr.contains("zero out new clusters: Operation not supported"), "{done:?}");
                    return;
                }
            } else {
                self.theirs(&["resize", "-q"], &[&size.to_string()]);
            }
            if self.features.is_encrypted && self.features.is_raw {
                // It maps the new range at once, to bytes that were never encrypted.
                let now = self.content_by_qemu();
                is_same(&now[..self.current.len()], &self.current, "QEMU grew the disk");
                self.current = now;
                return;
            }
        }
        self.current.resize(size as usize, 0);
    }

    fn step(&mut self) {
        let kind = self.random.below(24);
        eprintln!("step {kind}: {} bytes, snapshots {:?}", self.current.len(), self.taken.len());
        match kind {
            0..=8 => self.write(),
            9..=12 => self.snapshot(),
            13..=16 => self.bitmap(),
            17 => self.amend(),
            18..=20 => self.compress(),
            21 => self.move_content(),
            _ => self.grow(),
        }
    }

    fn verify(&self) {
        self.theirs(&["check"], &[]);
        is_same(&self.content_by_qemu(), &self.current, "QEMU reads the disk otherwise");
        let node = self.open_ours(false);
        is_same(&read_all(&node), &self.current, "we read the disk otherwise");
        let driver = node.qcow2().expect("qcow2");
        rt::block_on(async {
            let found = driver.bitmaps().await.expect("bitmaps");
            assert_eq!(found.len(), self.bitmaps.len());
            for status in found {
                let expected = &self.bitmaps[&status.name];
                let is = (status.granularity_bytes, status.enabled, status.inconsistent);
                assert_eq!(is, (expected.granularity, expected.enabled, false), "{}", status.name);
                let bits = driver.bitmap_bits(&status.name).await.expect("bits");
                let ranges: Vec<(u64, u64)> = bits.dirty_ranges().map(|range| (range.start, range.end)).collect();
                assert_eq!(ranges, expected.ranges(self.current.len() as u64), "bitmap {}", status.name);
            }
        });
        close(&node);
        for (name, bytes) in &self.taken {
            // QEMU shows a snapshot in the disk's present size.
            let theirs = self.content_of(&["-l", &format!("snapshot.name={name}")]);
            let common = theirs.len().min(bytes.len());
            assert!(theirs[..common] == bytes[..common], "QEMU reads {name} otherwise");
            let request = OpenRequest::image_opts(&self.image_opts()).expect("options").secrets(secrets());
            let wanted = Some(SnapshotName::of_name(name.as_str()));
            let node = rt::block_on(open(request.snapshot(wanted))).unwrap_or_else(|error| panic!("{error}"));
            assert!(read_all(&node) == *bytes, "we read {name} otherwise");
            close(&node);
        }
    }
}

fn secrets() -> Vec<(String, Secret)> {
    vec![("s".to_owned(), Secret::new(b"geheim".to_vec()))]
}

#[track_caller]
fn is_same(found: &[u8], expected: &[u8], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}: the size");
    let wrong: Vec<usize> = (0..found.len()).filter(|at| found[*at] != expected[*at]).collect();
    if let (Some(first), Some(last)) = (wrong.first(), wrong.last()) {
        let (found, expected) = (found[*first], expected[*first]);
        panic!("{what}: {first:#x} is {found} instead of {expected}, {} bytes to {last:#x}", wrong.len());
    }
}

fn read_all(node: &Node) -> Vec<u8> {
    let (result, bytes) = rt::block_on(node.read(0, IoBuf::zeroed(node.size() as usize)));
    result.expect("read");
    bytes.to_vec()
}

fn close(node: &Node) {
    rt::block_on(node.close()).unwrap_or_else(|error| panic!("close: {error}"));
}

#[test]
fn qemu_and_we_take_turns_on_images_with_many_features() {
    for_each_seed(32, |seed| {
        let qemu = Qemu::for_seed(seed);
        let folder = temp_dir();
        let mut subject = Subject::create(&qemu, folder.path(), seed);
        for step in 0..16 {
            subject.step();
            if step % 4 == 3 {
                subject.verify();
            }
        }
    });
}
