// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Under our own name no verb replaces a file without `--force`: neither the image's, nor an extent or a data file of it.

use crate::oracle::{Oracle, words};
use cowshed_testkit::qemu::temp_dir;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output};

const PRECIOUS: &[u8] = b"precious";

fn ours(folder: &Path, line: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cowshed"));
    command.args(line.split(' ')).current_dir(folder).output().expect("our own binary")
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).expect("a folder");
    let mut names: Vec<String> =
        entries.map(|entry| entry.expect("an entry").file_name().into_string().expect("text")).collect();
    names.sort();
    names
}

/// A command that makes an image, and the file that it would replace.
const CASES: &[(&str, &str)] = &[
    ("create -f vmdk -o subformat=monolithicFlat e.vmdk 4M", "e-flat.vmdk"),
    ("create -f vmdk -o subformat=twoGbMaxExtentSparse e.vmdk 4M", "e-s001.vmdk"),
    ("create -f vmdk -o subformat=twoGbMaxExtentFlat e.vmdk 5G", "e-f003.vmdk"),
    ("convert -O vmdk -o subformat=monolithicFlat a.raw e.vmdk", "e-flat.vmdk"),
    ("convert -O vmdk -o subformat=twoGbMaxExtentSparse a.raw e.vmdk", "e-s001.vmdk"),
    ("create -f qcow2 -o data_file=d.raw e.qcow2 4M", "d.raw"),
    ("convert -O qcow2 -o data_file=d.raw a.raw e.qcow2", "d.raw"),
    ("rescue -O vmdk -o subformat=monolithicFlat a.qcow2 e.vmdk", "e-flat.vmdk"),
    ("rescue a.qcow2 e.qcow2", "e.qcow2"),
    ("dd -O vmdk if=a.raw of=e.vmdk", "e.vmdk"),
];

#[test]
fn a_file_beside_the_image_stays_without_force() {
    for (line, kept) in CASES {
        let folder = temp_dir();
        let folder = folder.path();
        std::fs::write(folder.join("a.raw"), vec![7; 1 << 20]).unwrap();
        assert!(ours(folder, "create -q -f qcow2 a.qcow2 1M").status.success());
        std::fs::write(folder.join(kept), PRECIOUS).unwrap();
        let before = names(folder);
        let output = ours(folder, line);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{line}: {said}");
        assert!(said.contains(&format!("{kept}: the file exists already; --force overwrites it")), "{line}: {said}");
        assert_eq!(std::fs::read(folder.join(kept)).unwrap(), PRECIOUS, "{line}");
        assert_eq!(names(folder), before, "{line}: no other file is left");
        let forced = line.replacen(' ', " --force ", 1);
        let output = ours(folder, &forced);
        assert!(output.status.success(), "{forced}: {}", String::from_utf8_lossy(&output.stderr));
        assert_ne!(std::fs::read(folder.join(kept)).unwrap(), PRECIOUS, "{forced}");
    }
}

/// An extent would take the place of the parent.
#[test]
fn no_extent_of_a_new_disk_replaces_its_parent() {
    let folder = temp_dir();
    let folder = folder.path();
    assert!(ours(folder, "create -q -f vmdk x-s001.vmdk 4M").status.success());
    let before = std::fs::read(folder.join("x-s001.vmdk")).unwrap();
    for program in ["", "img "] {
        let force = if program.is_empty() { "--force " } else { "" };
        let line =
            format!("{program}create {force}-f vmdk -F vmdk -b x-s001.vmdk -o subformat=twoGbMaxExtentSparse x.vmdk");
        let output = ours(folder, &line);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(1) && said.contains("which the backing file needs"), "{line}: {said}");
        assert_eq!(std::fs::read(folder.join("x-s001.vmdk")).unwrap(), before, "{line}");
    }
}

/// QEMU's words. QEMU leaves an empty descriptor.
#[test]
fn extents_that_are_links_to_their_image_are_refused() {
    for (kind, extent) in [("monolithicFlat", "disk-flat.vmdk"), ("twoGbMaxExtentSparse", "disk-s001.vmdk")] {
        let oracle = Oracle::new();
        let line = words(&format!("create -q -f vmdk -o subformat={kind} disk.vmdk 1M"));
        symlink("disk.vmdk", oracle.work().join(extent)).unwrap();
        let said = oracle.ours(&oracle.work(), &line);
        assert!(!oracle.work().join("disk.vmdk").exists(), "{kind}");
        let real = oracle.real(&oracle.work(), &line);
        assert_eq!((said.code, &said.err), (real.code, &real.err), "{kind}");
    }
}
