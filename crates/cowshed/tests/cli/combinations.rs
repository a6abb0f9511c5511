// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Random sessions of qemu-img and qemu-io, the real tools and ours each on their own copies: snapshots, bitmaps,
//! sizes, backing files, options and writes mixed. Exit codes must agree at every step, and the images' contents in the
//! end. `COWSHED_SEED=N` runs one session, `COWSHED_SEEDS=A..B` a range.

use crate::oracle::{Oracle, words};
use cowshed_testkit::programs::{Said, finish};
use cowshed_testkit::random::{Random, for_each_seed};
use std::path::Path;
use std::process::Command;

const STEPS: usize = 14;
const KIB: u64 = 1 << 10;

/// The state of a session, as far as the next step depends on it.
struct Session {
    random: Random,
    is_v2: bool,
    has_backing: bool,
    snapshots: u32,
    has_bitmap: bool,
}

/// A command line of one of the two tools.
enum Step {
    Img(String),
    Io(String),
}

impl Session {
    fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let is_v2 = random.chance(20);
        Session { random, is_v2, has_backing: true, snapshots: 0, has_bitmap: false }
    }

    fn options(&mut self) -> String {
        if self.is_v2 {
            return format!("compat=0.10,cluster_size={}", self.random.pick(&["4k", "64k"]));
        }
        self.random
            .pick(&[
                "cluster_size=64k",
                "cluster_size=4k,refcount_bits=8",
                "cluster_size=512",
                "cluster_size=64k,extended_l2=on",
                "cluster_size=128k,lazy_refcounts=on",
                "cluster_size=2M",
            ])
            .to_owned()
    }

    /// A range of whole blocks of this many bytes below 1 MiB.
    fn range(&mut self, block: u64) -> (u64, u64) {
        let offset = self.random.below((1 << 20) / block) * block;
        let len = (1 + self.random.below(300 * KIB / block)) * block;
        (offset, len.min((1 << 20) - offset))
    }

    fn step(&mut self) -> Step {
        let pattern = 1 + self.random.below(250);
        let name = 1 + self.random.below(3);
        match self.random.below(16) {
            0..=3 => {
                let (offset, len) = self.range(512);
                Step::Io(format!("write -P {pattern} {offset} {len}"))
            }
            4 => {
                let (offset, len) = self.range(4 * KIB);
                Step::Io(format!("write -z {}{offset} {len}", self.random.pick(&["", "-u "])))
            }
            5 => {
                // Part of a cluster is the format's to keep or not.
                let (offset, len) = self.range(128 * KIB);
                Step::Io(format!("discard {offset} {len}"))
            }
            6 => {
                self.snapshots += 1;
                Step::Img(format!("snapshot -c s{name} top.qcow2"))
            }
            7 => Step::Img(format!("snapshot -{} s{name} top.qcow2", self.random.pick(&["a", "d"]))),
            8 => Step::Img(format!("resize -f qcow2 top.qcow2 +{}k", 64 * (1 + self.random.below(9)))),
            9 if self.snapshots == 0 => Step::Img("resize -f qcow2 --shrink top.qcow2 1M".to_owned()),
            10 if !self.is_v2 => {
                let option = self.random.pick(&["lazy_refcounts=on", "lazy_refcounts=off"]);
                Step::Img(format!("amend -f qcow2 -o {option} top.qcow2"))
            }
            11 if !self.is_v2 => {
                self.has_bitmap = true;
                let action = self.random.pick(&["--add", "--remove", "--clear", "--disable", "--enable"]);
                Step::Img(format!("bitmap {action} -f qcow2 top.qcow2 b{name}"))
            }
            12 if self.has_backing => Step::Img(format!("commit {}-f qcow2 top.qcow2", self.random.pick(&["", "-d "]))),
            13 if !self.is_v2 => {
                let base = self.random.pick(&["''", "base.qcow2", "other.qcow2"]);
                self.has_backing = base != "''";
                let format = if self.has_backing { "-F qcow2 " } else { "" };
                Step::Img(format!("rebase -f qcow2 {format}-b {base} top.qcow2"))
            }
            14 => Step::Img("convert -f qcow2 -O qcow2 top.qcow2 copy.qcow2".to_owned()),
            15 => Step::Img("convert -c -f qcow2 -O qcow2 top.qcow2 copy.qcow2".to_owned()),
            _ => Step::Img("measure -f qcow2 -O qcow2 top.qcow2".to_owned()),
        }
    }
}

fn io(program: &Path, folder: &Path, command: &str) -> Said {
    finish(Command::new(program).args(["-f", "qcow2", "-c", command, "top.qcow2"]).current_dir(folder))
}

fn session(seed: u64) {
    let oracle = Oracle::new();
    let mut session = Session::new(seed);
    for base in ["base.qcow2", "other.qcow2"] {
        let options = session.options();
        oracle.make(&format!("create -q -f qcow2 -o {options} {base} 1M"));
        let (offset, len) = session.range(4 * KIB);
        oracle.io(&[&format!("write -P {} {offset} {len}", 1 + session.random.below(250))], base);
    }
    let options = session.options();
    oracle.make(&format!("create -q -f qcow2 -o {options} -b base.qcow2 -F qcow2 top.qcow2 1M"));
    let (theirs, own) = oracle.folders();
    let shell = own.join("qemu-io");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_cowshed"), &shell).expect("a link named qemu-io");
    let mut done = vec![format!("top: {options}")];
    for _ in 0..STEPS {
        let (line, real, ours) = match session.step() {
            Step::Img(line) => {
                let arguments = words(&line);
                (line, oracle.real(&theirs, &arguments), oracle.ours(&own, &arguments))
            }
            Step::Io(line) => (line.clone(), io(oracle.qemu.io_path(), &theirs, &line), io(&shell, &own, &line)),
        };
        done.push(line);
        assert_eq!(real.code, ours.code, "seed {seed}, {done:#?}: {}{}", real.err, ours.err);
    }
    for image in ["base.qcow2", "other.qcow2", "top.qcow2"] {
        let place = |folder: &Path| folder.join(image).display().to_string();
        let said = oracle.qemu.img(["compare", "-f", "qcow2", "-F", "qcow2", &place(&theirs), &place(&own)]);
        assert_eq!(said.code, 0, "seed {seed}, {image}, {done:#?}: {}{}", said.stdout, said.stderr);
        let check = oracle.qemu.check(&own.join(image), "qcow2");
        assert_eq!(check.code, 0, "seed {seed}, {image}, {done:#?}: {}", check.json);
        let listed = |folder: &Path| {
            let info = oracle.qemu.img(["info", "--output=json", &place(folder)]).json();
            let snapshots: Vec<String> = info["snapshots"]
                .as_array()
                .into_iter()
                .flatten()
                .map(|one| format!("{} {}", one["id"], one["name"]))
                .collect();
            (
                info["virtual-size"].clone(),
                info["backing-filename"].clone(),
                snapshots,
                info["format-specific"]["data"]["bitmaps"].clone(),
            )
        };
        assert_eq!(listed(&theirs), listed(&own), "seed {seed}, {image}, {done:#?}");
        for number in 1..=3 {
            let content = |folder: &Path| {
                let raw = folder.join("snapshot.raw").display().to_string();
                let name = format!("snapshot.name=s{number}");
                let said = oracle.qemu.img(["convert", "-f", "qcow2", "-l", &name, "-O", "raw", &place(folder), &raw]);
                (said.code, std::fs::read(&raw).ok().filter(|_| said.code == 0))
            };
            assert!(content(&theirs) == content(&own), "seed {seed}, {image}, snapshot s{number}, {done:#?}");
        }
    }
}

#[test]
fn random_sessions_end_as_those_of_qemu() {
    for_each_seed(24, session);
}
