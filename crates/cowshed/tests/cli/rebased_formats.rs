// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Images of other formats that get another backing file, beside QEMU.

use crate::oracle::{Oracle, words};
use cowshed_testkit::qemu::{Qemu, temp_dir};
use cowshed_testkit::random::{Random, for_each_seed};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

struct Tools {
    folder: tempfile::TempDir,
    own: PathBuf,
}

impl Tools {
    fn new() -> Tools {
        let folder = temp_dir();
        let own = folder.path().join("qemu-img");
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_cowshed"), &own).unwrap();
        Tools { folder, own }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    #[track_caller]
    fn img(&self, tool: &Path, arguments: &[&str]) {
        let output = Command::new(tool).args(arguments).current_dir(self.folder.path()).output().unwrap();
        assert!(output.status.success(), "{tool:?} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    }

    fn content(&self, tool: &Path, format: &str) -> Vec<u8> {
        self.img(tool, &["convert", "-f", format, "-O", "raw", "top", "out"]);
        fs::read(self.path("out")).unwrap()
    }
}

/// Data, zeroes and holes in parts of any length.
fn filled(random: &mut Random, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    let mut at = 0;
    while at < len {
        let part = (1 + random.below(400) as usize) * 512;
        let end = (at + part).min(len);
        bytes[at..end].fill(random.below(4) as u8);
        at = end;
    }
    bytes
}

#[test]
fn a_qed_image_reads_the_same_on_its_new_backing_file() {
    for_each_seed(2, |seed| {
        let tools = Tools::new();
        let random = &mut Random::new(seed);
        let qemu = Qemu::newest();
        for cluster in ["4k", "64k"] {
            for wanted in ["shorter.raw", "longer.qcow2", ""] {
                let size = (1 << 20) + 512 * random.below(3000) as usize;
                fs::write(tools.path("old.raw"), filled(random, size)).unwrap();
                fs::write(tools.path("shorter.raw"), filled(random, size / 2 / 512 * 512)).unwrap();
                fs::write(tools.path("longer.raw"), filled(random, size + (1 << 20))).unwrap();
                tools.img(&tools.own, &["convert", "-f", "raw", "-O", "qcow2", "longer.raw", "longer.qcow2"]);
                let options = format!("cluster_size={cluster}");
                let made = ["create", "-q", "-f", "qed", "-o", &options, "-b", "old.raw", "-F", "raw", "top"];
                tools.img(&tools.own, &made);
                let mut io = Command::new(Qemu::newest().io_path());
                io.args(words("-f qed")).current_dir(tools.folder.path());
                for _ in 0..4 {
                    let at = random.below(size as u64 / 512 - 200) * 512;
                    let kind = ["write -P 9", "write -z"][random.below(2) as usize];
                    io.args(["-c", &format!("{kind} {at} {}", (1 + random.below(200)) * 512)]);
                }
                assert!(io.arg("top").output().unwrap().status.success());
                let before = tools.content(&tools.own, "qed");
                fs::copy(tools.path("top"), tools.path("top.theirs")).unwrap();
                let format = if wanted.ends_with("qcow2") { "qcow2" } else { "raw" };
                let line = ["rebase", "-f", "qed", "-b", wanted, "-F", format, "top"];
                tools.img(&tools.own, &line);
                let what = format!("seed {seed}, {cluster}, {wanted:?}");
                assert!(tools.content(&tools.own, "qed") == before, "{what}");
                assert!(tools.content(qemu.img_path(), "qed") == before, "{what}, read by QEMU");
                assert!(tools.content(Qemu::system().img_path(), "qed") == before, "{what}, read by an older QEMU");
                tools.img(qemu.img_path(), &["check", "-q", "-f", "qed", "top"]);
                // The header is the one that QEMU leaves.
                tools.img(qemu.img_path(), &["rebase", "-f", "qed", "-b", wanted, "-F", format, "top.theirs"]);
                let header = |name: &str| fs::read(tools.path(name)).unwrap()[..4096].to_vec();
                assert!(header("top") == header("top.theirs"), "{what}: the header");
            }
        }
    });
}

/// Only the name: of a file that isn't there, raw or not, longer than a sector, and none.
#[test]
fn a_qed_image_names_another_backing_file() {
    let tools = Tools::new();
    let (own, qemu) = (tools.own.clone(), Qemu::newest());
    fs::write(tools.path("base.raw"), vec![3; 1 << 20]).unwrap();
    tools.img(&own, &["create", "-q", "-f", "qed", "-o", "cluster_size=4k", "-b", "base.raw", "-F", "raw", "top"]);
    fs::copy(tools.path("top"), tools.path("theirs")).unwrap();
    let long = "d/".repeat(400);
    let longest = "e".repeat(1023);
    let names = [
        ("moved/base.raw", "raw"),
        ("base", "qcow2"),
        ("", ""),
        (long.as_str(), "qcow2"),
        ("base.raw", "raw"),
        (long.as_str(), "raw"),
        (longest.as_str(), "qed"),
        (long.as_str(), "raw"),
        ("", ""),
        ("base.raw", "raw"),
    ];
    for (name, format) in names {
        let mut line = vec!["rebase", "-u", "-f", "qed", "-b", name];
        if !format.is_empty() {
            line.extend(["-F", format]);
        }
        tools.img(&own, &[line.clone(), vec!["top"]].concat());
        tools.img(qemu.img_path(), &[line, vec!["theirs"]].concat());
        let info = |name: &str| {
            let line = ["info", "-U", "--output=json", "-f", "qed", name];
            let output = Command::new(qemu.img_path()).args(line).current_dir(tools.folder.path()).output().unwrap();
            let info: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
            (info["backing-filename"].clone(), info["backing-filename-format"].clone(), info["virtual-size"].clone())
        };
        assert_eq!(info("top"), info("theirs"), "{name} {format}");
        if name.len() < 100 {
            // Older names may lie behind the new one. Fields and name are equal.
            let start = |file: &str| fs::read(tools.path(file)).unwrap()[..64 + name.len()].to_vec();
            assert_eq!(start("top"), start("theirs"), "{name} {format}");
        }
    }
    let model = vec![3; 1 << 20];
    assert!(tools.content(&own, "qed") == model && tools.content(qemu.img_path(), "qed") == model);
    tools.img(qemu.img_path(), &["check", "-q", "-f", "qed", "top"]);
}

#[test]
fn rebase_refuses_other_formats_as_qemu() {
    let oracle = Oracle::new();
    oracle.make("create -q -f raw base 1M");
    for format in ["vdi", "vpc", "vhdx", "vmdk", "qcow", "raw"] {
        oracle.make(&format!("create -q -f {format} image.{format} 1M"));
        oracle.compare(&format!("rebase -u -f {format} -b base -F raw image.{format}"));
    }
    oracle.make("create -q -f qed image.qed 1M");
    for line in [
        "rebase -u -f qed -b base image.qed",
        "rebase -f qed -b nosuch -F raw image.qed",
        "rebase -f qed -b image.qed -F qed image.qed",
        "rebase -f qed -b base -F nosuch image.qed",
    ] {
        oracle.compare(line);
    }
    oracle.verdict();
}
