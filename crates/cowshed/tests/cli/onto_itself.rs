// SPDX-License-Identifier: Apache-2.0 OR MIT
//! No verb writes into a file that it reads, by whatever name, and even without locks: `-U` shares everything.

use cowshed_testkit::qemu::{Qemu, temp_dir};
use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;
use std::process::{Command, Output};

/// Files of the folder that must stay as they are.
const FILES: &[&str] =
    &["plain.raw", "base.qcow2", "top.qcow2", "other.qcow2", "data.raw", "data.qcow2", "flat.vmdk", "flat-f001.vmdk"];

struct Fixture(tempfile::TempDir);

impl Fixture {
    fn new() -> Fixture {
        let fixture = Fixture(temp_dir());
        let qemu = Qemu::system();
        let path = |name: &str| fixture.path().join(name).to_str().expect("text").to_owned();
        std::fs::write(path("plain.raw"), vec![7; 1 << 20]).expect("a file");
        qemu.create(Path::new(&path("base.qcow2")), "qcow2", "", 1 << 20);
        qemu.io(["-f", "qcow2", "-c", "write -P 1 0 512k", &path("base.qcow2")]).expect_ok();
        for name in ["top.qcow2", "other.qcow2"] {
            qemu.img(["create", "-q", "-f", "qcow2", "-b", &path("base.qcow2"), "-F", "qcow2", &path(name)])
                .expect_ok();
            qemu.io(["-f", "qcow2", "-c", "write -P 2 64k 64k", &path(name)]).expect_ok();
        }
        let data = format!("data_file={}", path("data.raw"));
        qemu.create(Path::new(&path("data.qcow2")), "qcow2", &data, 1 << 20);
        qemu.io(["-f", "qcow2", "-c", "write -P 3 0 1M", &path("data.qcow2")]).expect_ok();
        let flat =
            ["convert", "-O", "vmdk", "-o", "subformat=twoGbMaxExtentFlat", &path("plain.raw"), &path("flat.vmdk")];
        qemu.img(flat).expect_ok();
        for name in FILES {
            std::fs::hard_link(path(name), path(&format!("hard-{name}"))).expect("a hard link");
            std::os::unix::fs::symlink(path(name), path(&format!("soft-{name}"))).expect("a symbolic link");
        }
        fixture
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn contents(&self) -> BTreeMap<&'static str, Vec<u8>> {
        FILES.iter().map(|name| (*name, std::fs::read(self.path().join(name)).expect("a file"))).collect()
    }

    /// As qemu-img; `/dev/fd/0` is the file `stdin`.
    fn run(&self, line: &str, stdin: &str) -> Output {
        let stdin = File::options().read(true).write(true).open(self.path().join(stdin)).expect("a file");
        let words = line.split(' ');
        let mut command = Command::new(env!("CARGO_BIN_EXE_cowshed"));
        command.arg("img").args(words).current_dir(self.path()).stdin(stdin).output().expect("our own binary")
    }

    #[track_caller]
    fn expect_refusal(&self, line: &str, stdin: &str) {
        let before = self.contents();
        let output = self.run(line, stdin);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        for (name, bytes) in self.contents() {
            assert!(before[name] == bytes, "{line}: '{name}' has changed ({:?}: {said})", output.status.code());
        }
        assert_eq!(output.status.code(), Some(1), "{line}: {said}");
        assert!(said.contains("this is the file '") || said.contains("both are one file"), "{line}: {said}");
    }
}

/// Other names of a file.
fn names(file: &str) -> [String; 5] {
    [file.to_owned(), format!("./{file}"), format!("hard-{file}"), format!("soft-{file}"), "/dev/fd/0".to_owned()]
}

#[test]
fn a_copy_onto_a_file_of_the_source_is_refused() {
    let fixture = Fixture::new();
    let sources = [
        ("raw", "plain.raw", &["plain.raw"][..]),
        ("qcow2", "top.qcow2", &["top.qcow2", "base.qcow2"]),
        ("qcow2", "data.qcow2", &["data.qcow2", "data.raw"]),
        ("vmdk", "flat.vmdk", &["flat.vmdk", "flat-f001.vmdk"]),
    ];
    for (format, source, files) in sources {
        for file in files {
            for name in names(file) {
                fixture.expect_refusal(&format!("convert -U -f {format} -O raw {source} {name}"), file);
                fixture.expect_refusal(&format!("convert -U -f {format} -O qcow2 {source} {name}"), file);
                fixture.expect_refusal(&format!("dd -U -f {format} -O raw if={source} of={name}"), file);
                fixture.expect_refusal(&format!("convert -n -U -f {format} -O raw {source} {name}"), file);
            }
        }
    }
    fixture.expect_refusal("convert -n -U -f qcow2 -O qcow2 top.qcow2 hard-top.qcow2", "plain.raw");
    fixture.expect_refusal("convert -n -U -f qcow2 -O qcow2 data.qcow2 soft-data.qcow2", "plain.raw");
    // By way of the target's data file.
    fixture.expect_refusal("convert -U -f raw -O qcow2 -o data_file=hard-plain.raw plain.raw new.qcow2", "plain.raw");
    fixture.expect_refusal("convert -n -U -f raw -O qcow2 hard-data.raw data.qcow2", "plain.raw");
}

#[test]
fn copies_beside_the_source_go_on() {
    let fixture = Fixture::new();
    for line in [
        // One backing file for both: it is only read.
        "convert -n -U -f qcow2 -O qcow2 top.qcow2 other.qcow2",
        // The target's backing file is the source.
        "convert -n -U -f qcow2 -O qcow2 base.qcow2 other.qcow2",
        // Two parts of one file.
        "convert -n -U --image-opts --target-image-opts driver=raw,size=64k,file.filename=plain.raw \
         driver=raw,offset=64k,size=64k,file.filename=plain.raw",
    ] {
        let output = fixture.run(line, "plain.raw");
        assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    }
    let overlap = "convert -n -U --image-opts --target-image-opts driver=raw,size=64k,file.filename=plain.raw \
                   driver=raw,offset=60k,size=64k,file.filename=plain.raw";
    fixture.expect_refusal(overlap, "plain.raw");
}

#[test]
fn new_image_never_replaces_its_own_base() {
    let fixture = Fixture::new();
    let top = fixture.path().join("top.qcow2").display().to_string();
    for file in ["base.qcow2", "top.qcow2"] {
        for name in names(file).into_iter().filter(|name| name != "top.qcow2") {
            fixture.expect_refusal(&format!("create -q -f qcow2 -b {top} -F qcow2 {name}"), file);
            fixture
                .expect_refusal(&format!("create -q -f qcow2 -b {top} -F qcow2 -o data_file={name} new.qcow2"), file);
        }
    }
    fixture.expect_refusal("create -q -u -f qcow2 -b top.qcow2 -F qcow2 hard-top.qcow2 1M", "plain.raw");
    fixture.expect_refusal("create -q -f qcow2 -b data.qcow2 -F qcow2 hard-data.raw", "plain.raw");
}

#[test]
fn an_image_is_not_moved_onto_its_own_files() {
    let fixture = Fixture::new();
    let before = fixture.contents();
    for line in
        ["rebase -f qcow2 -b hard-data.raw -F raw data.qcow2", "rebase -f qcow2 -b hard-top.qcow2 -F qcow2 top.qcow2"]
    {
        let output = fixture.run(line, "plain.raw");
        assert_eq!(output.status.code(), Some(1), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    }
    assert!(fixture.contents() == before);
}

/// A lock shows it where there are locks, in QEMU's words; else the file's identity.
#[test]
fn bitmaps_are_not_merged_from_the_image_that_changes() {
    let fixture = Fixture::new();
    let qemu = Qemu::system();
    let top = fixture.path().join("top.qcow2").display().to_string();
    for name in ["a", "b"] {
        qemu.img(["bitmap", "--add", &top, name]).expect_ok();
    }
    for name in names("top.qcow2").iter().filter(|name| !name.starts_with("/dev")) {
        for qemu in Qemu::all() {
            let output = qemu.img(["bitmap", "--merge", "a", "-b", name, "-F", "qcow2", &top, "b"]);
            assert_eq!(output.code, 1, "{name}: {output:?}");
        }
        let before = fixture.contents();
        let output = fixture.run(&format!("bitmap --merge a -b {name} -F qcow2 top.qcow2 b"), "top.qcow2");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(1) && said.contains("Failed to get"), "{name}: {said}");
        let unlocked = "--image-opts driver=qcow2,file.filename=top.qcow2,file.locking=off";
        fixture.expect_refusal(&format!("bitmap --merge a -b {name} -F qcow2 {unlocked} b"), "top.qcow2");
        assert!(fixture.contents() == before, "{name}: a file has changed");
    }
    // A file of its chain is another image.
    qemu.img(["bitmap", "--add", &fixture.path().join("base.qcow2").display().to_string(), "c"]).expect_ok();
    let output = fixture.run("bitmap --merge c -b base.qcow2 -F qcow2 top.qcow2 b", "top.qcow2");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Verbs of ours that take a second name.
#[test]
fn a_rescue_and_an_undo_log_leave_the_image_alone() {
    let fixture = Fixture::new();
    let before = fixture.contents();
    for name in names("base.qcow2").iter().filter(|name| !name.starts_with("/dev")) {
        for (line, reason) in [
            (format!("rescue base.qcow2 {name}"), "one of the files that are read"),
            (format!("rescue -U top.qcow2 {name}"), "one of the files that are read"),
            (format!("rescue -U -O raw top.qcow2 {name}"), "one of the files that are read"),
            (format!("rescue -U --map {name} base.qcow2"), "File exists"),
            (format!("check -r all --undo-log {name} base.qcow2"), "File exists"),
            (format!("check --undo {name} base.qcow2"), "not an undo log"),
        ] {
            let mut command = Command::new(env!("CARGO_BIN_EXE_cowshed"));
            let output = command.args(line.split(' ')).current_dir(fixture.path()).output().expect("our own binary");
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.code() == Some(1) && said.contains(reason), "{line}: {said}");
            assert!(fixture.contents() == before, "{line}: a file has changed");
        }
    }
}
