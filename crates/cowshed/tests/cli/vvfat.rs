// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Folders as disks with a FAT file system.

use crate::oracle::{Oracle, words};
use cowshed_testkit::programs::finish_well;
use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

/// The files below a folder, by their paths.
fn files_of(folder: &Path, below: &str, files: &mut BTreeMap<String, Vec<u8>>) {
    for entry in fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        let name = format!("{below}{}", entry.file_name().to_str().unwrap());
        match entry.file_type().unwrap().is_dir() {
            true => {
                files.insert(format!("{name}/"), Vec::new());
                files_of(&entry.path(), &format!("{name}/"), files);
            }
            false => {
                files.insert(name, fs::read(entry.path()).unwrap());
            }
        }
    }
}

fn tree_of(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut files = BTreeMap::new();
    files_of(folder, "", &mut files);
    files
}

/// A program on the disks of a test.
#[track_caller]
fn run(oracle: &Oracle, line: &str) {
    let words = words(line);
    finish_well(Command::new(&words[0]).args(&words[1..]).current_dir(oracle.work()));
}

/// The files in the volume of a raw disk, as another program reads them.
fn unpacked(oracle: &Oracle, disk: &str, is_floppy: bool) -> BTreeMap<String, Vec<u8>> {
    let mut boot = [0; 512];
    fs::File::open(oracle.work().join(disk)).unwrap().read_exact(&mut boot).unwrap();
    assert_eq!(boot[510..], [0x55, 0xaa]);
    // Without the sectors before the volume. The zeroes take no space.
    let skip = if is_floppy { 0 } else { 1 };
    run(oracle, &format!("dd if={disk} of=volume.fat bs=32256 skip={skip} conv=sparse status=none"));
    let out = oracle.work().join("unpacked");
    if out.exists() {
        fs::remove_dir_all(&out).unwrap();
    }
    run(oracle, "7z x -y -ounpacked volume.fat");
    tree_of(&out)
}

#[track_caller]
fn ours(oracle: &Oracle, line: &str) -> (String, String) {
    let said = oracle.ours(&oracle.work(), &words(line));
    assert_eq!(said.code, Some(0), "{line}: {}{}", said.out, said.err);
    (said.out, said.err)
}

fn bytes(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|at| (at * 7 + at / 251) as u8 ^ seed).collect()
}

/// A tree with files of lengths about those of clusters, long names and many names.
fn make_tree(root: &Path, many: usize) {
    fs::create_dir_all(root.join("One folder/with another.one/and another")).unwrap();
    fs::create_dir(root.join("empty")).unwrap();
    for (index, len) in [0, 1, 511, 512, 1024, 8191, 8192, 8193, 100_000].into_iter().enumerate() {
        fs::write(root.join(format!("file of {len}.bin")), bytes(len, index as u8)).unwrap();
    }
    fs::write(root.join("PLAIN.TXT"), "capitals").unwrap();
    fs::write(root.join("lower.txt"), "small letters").unwrap();
    fs::write(root.join("One folder/with another.one/and another/Übermäßig.text"), "umlauts").unwrap();
    fs::write(root.join("One folder/with another.one/.hidden"), bytes(5000, 9)).unwrap();
    for index in 0..many {
        fs::write(root.join(format!("One folder/a long name with number {index}.text")), index.to_string()).unwrap();
    }
}

#[test]
fn a_folder_is_a_disk_that_others_read() {
    let oracle = Oracle::new();
    let root = oracle.work().join("v");
    make_tree(&root, 500);
    let tree = tree_of(&root);
    for name in ["fat:v", "fat:12:v", "fat:16:v", "fat:32:v", "fat:floppy:v"] {
        ours(&oracle, &format!("convert -O raw {name} ours.raw"));
        assert!(unpacked(&oracle, "ours.raw", name.contains("floppy")) == tree, "{name}");
        // The map has the places of the data, and all paths to the bytes are the same.
        ours(&oracle, &format!("compare -f raw -F raw {name} ours.raw"));
        ours(&oracle, &format!("convert -O qcow2 {name} ours.qcow2"));
        ours(&oracle, "compare -f qcow2 -F raw ours.qcow2 ours.raw");
        oracle.make("compare -f qcow2 -F raw ours.qcow2 ours.raw");
        if name.contains("32") || name.contains("floppy") {
            // QEMU's have FAT16 in the place of FAT32, and tables that are too short.
            continue;
        }
        oracle.make(&format!("convert -O raw {name} theirs.raw"));
        assert!(unpacked(&oracle, "theirs.raw", false) == tree, "{name} of QEMU");
        let length = |name: &str| fs::metadata(oracle.work().join(name)).unwrap().len();
        assert_eq!(length("ours.raw"), length("theirs.raw"));
    }
    // The same folder is the same disk.
    ours(&oracle, "convert -O raw --image-opts driver=vvfat,dir=v,floppy=on,label=OURS again.raw");
    ours(&oracle, "convert -O raw fat:floppy:v ours.raw");
    let read = |name: &str| fs::read(oracle.work().join(name)).unwrap();
    let (mut ours_is, again) = (read("ours.raw"), read("again.raw"));
    assert!(again != ours_is);
    for at in (0..ours_is.len() - 11).filter(|at| &ours_is[*at..at + 10] == b"QEMU VVFAT").collect::<Vec<_>>() {
        ours_is[at..at + 10].copy_from_slice(b"OURS      ");
    }
    assert!(again == ours_is, "the label is all that differs");
}

#[test]
fn a_folder_stands_below_an_image() {
    let oracle = Oracle::new();
    make_tree(&oracle.work().join("v"), 3);
    ours(&oracle, "create -q -f qcow2 -F raw -b fat:v top.qcow2");
    ours(&oracle, "compare -f qcow2 -F raw top.qcow2 fat:v");
    oracle.make("info top.qcow2");
    // A stranger's image gets no folder of ours.
    for allowed in ["", "--allow backing", "--allow backing,json"] {
        let message = oracle.refused(&format!("convert --untrusted {allowed} -O raw top.qcow2 out"));
        assert!(message.contains("fat:v") && message.contains("policy"), "{message}");
    }
    ours(&oracle, "convert --untrusted -f raw -O raw fat:v out");
    ours(&oracle, "compare -f raw -F raw out fat:v");
}

/// In QEMU's words, where that refuses the same.
#[test]
fn folders_that_make_no_disk_are_refused() {
    let oracle = Oracle::new();
    fs::create_dir_all(oracle.work().join("big")).unwrap();
    fs::create_dir_all(oracle.work().join("many")).unwrap();
    fs::create_dir_all(oracle.work().join("huge")).unwrap();
    make_tree(&oracle.work().join("v"), 0);
    fs::File::create(oracle.work().join("big/f")).unwrap().set_len(600 << 20).unwrap();
    fs::File::create(oracle.work().join("huge/f")).unwrap().set_len(4 << 30).unwrap();
    for index in 0..300 {
        fs::write(oracle.work().join(format!("many/file with a name {index}.text")), "").unwrap();
    }
    for line in [
        "info fat:nosuch",
        "info fat:",
        "info fat:v/PLAIN.TXT",
        "info --image-opts driver=vvfat",
        "info --image-opts driver=vvfat,dir=v,fat-type=11",
        "info --image-opts driver=vvfat,dir=v,label=abcdefghijklmn",
        "info --image-opts driver=vvfat,dir=v,rw=on",
        "info fat:rw:v",
        "info fat:big",
        "info fat:12:big",
        "resize -f raw fat:v 1G",
        "commit fat:v",
        "check fat:v",
        "create -f vvfat x 1M",
        "convert -f raw -O vvfat v/PLAIN.TXT y",
    ] {
        let (real, said) = (oracle.real(&oracle.work(), &words(line)), oracle.ours(&oracle.work(), &words(line)));
        assert_eq!((said.code, &said.out), (real.code, &real.out), "{line}: {}", said.err);
        let (said, real) = (said.err.lines().last(), real.err.lines().last());
        assert_eq!(said, real, "{line}");
    }
    for (line, part) in [
        ("info fat:many", "Too many entries in root directory"),
        ("info fat:huge", "4 GiB or more"),
        ("info fat:floppy:32:v", "FAT types"),
    ] {
        let said = oracle.ours(&oracle.work(), &words(line));
        assert!(said.code == Some(1), "{line}: {}", said.out);
        let plain = Command::new(env!("CARGO_BIN_EXE_cowshed")).args(words(line)).current_dir(oracle.work()).output();
        let message = String::from_utf8(plain.unwrap().stderr).unwrap();
        assert!(said.err.contains(part) || message.contains(part), "{line}: {} {message}", said.err);
    }
    // QEMU refuses these, and FAT32 holds them.
    ours(&oracle, "info fat:32:big");
    ours(&oracle, "convert -O raw fat:32:many out.raw");
    assert_eq!(unpacked(&oracle, "out.raw", false).len(), 300);
}

#[test]
fn links_and_devices_of_a_folder_lead_nowhere() {
    let oracle = Oracle::new();
    let root = oracle.work().join("v");
    make_tree(&root, 0);
    fs::write(oracle.work().join("secret"), "of the host").unwrap();
    let mut expected = tree_of(&root);
    symlink("../secret", root.join("out")).unwrap();
    symlink(oracle.work().join("secret"), root.join("absolute")).unwrap();
    symlink(".", root.join("loop")).unwrap();
    symlink("nowhere", root.join("dangling")).unwrap();
    symlink("../PLAIN.TXT", root.join("One folder/inside")).unwrap();
    assert!(Command::new("mkfifo").arg(root.join("pipe")).status().unwrap().success());
    expected.insert("One folder/inside".to_owned(), b"capitals".to_vec());
    let (_, err) = ours(&oracle, "convert -O raw fat:v out.raw");
    assert!(err.contains("5 entries are left out") && err.contains("absolute"), "{err}");
    assert!(unpacked(&oracle, "out.raw", false) == expected);
    let whole = fs::read(oracle.work().join("out.raw")).unwrap();
    assert!(!whole.windows(11).any(|part| part == b"of the host"));
}

#[test]
fn names_that_a_fat_file_system_lacks_are_changed() {
    let oracle = Oracle::new();
    let root = oracle.work().join("v");
    fs::create_dir(&root).unwrap();
    for (index, name) in ["name", "NAME", "Name", "a:b?c", "end.", "end ", "tab\tname"].into_iter().enumerate() {
        fs::write(root.join(name), index.to_string()).unwrap();
    }
    let invalid = std::os::unix::ffi::OsStrExt::from_bytes(&b"\xff\xfe"[..]);
    fs::write(root.join::<&std::ffi::OsStr>(invalid), "no text").unwrap();
    ours(&oracle, "convert -O raw fat:v out.raw");
    let found = unpacked(&oracle, "out.raw", false);
    assert_eq!(found.len(), 8, "{:?}", found.keys());
    assert!(found.values().any(|content| content == b"no text"));
    assert!(found.contains_key("a_b_c") && found.contains_key("end_"), "{:?}", found.keys());
}
