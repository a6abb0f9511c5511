// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Encrypted images without their key. A verb that needs their content is refused when they are opened, before a target
//! is made, emptied or written to.

use crate::oracle::{Oracle, words};
use cowshed_testkit::programs::{Said, finish};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

const OBJECT: &str = "--object secret,id=s,data=geheimnis";

/// Every file of a folder.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(folder).expect("the folder").map(|entry| entry.expect("an entry"));
    let file = |entry: std::fs::DirEntry| {
        let name = entry.file_name().to_string_lossy().into_owned();
        (name, std::fs::read(entry.path()).expect("a file"))
    };
    entries.map(file).collect()
}

/// Encrypted images of each kind with data, an overlay on each, and on that another; targets with data.
fn gallery(oracle: &Oracle) {
    oracle.make("create -q -f raw r.raw 1M");
    oracle.io(&["write -P 5 100k 300k"], "r.raw");
    oracle.make("convert -O qcow2 r.raw q.qcow2");
    let luks = "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10";
    oracle.make_patiently(&format!("create -q -f qcow2 {OBJECT} -o {luks} e.qcow2 1M"));
    oracle.make(&format!("create -q -f qcow2 {OBJECT} -o encrypt.format=aes,encrypt.key-secret=s aes.qcow2 1M"));
    oracle.make_patiently(&format!("create -q -f luks {OBJECT} -o key-secret=s,iter-time=10 v.luks 1M"));
    for target in [
        "driver=qcow2,encrypt.key-secret=s,file.filename=e.qcow2",
        "driver=qcow2,encrypt.key-secret=s,file.filename=aes.qcow2",
        "driver=luks,key-secret=s,file.filename=v.luks",
    ] {
        oracle.make(&format!("convert -n {OBJECT} r.raw --target-image-opts {target}"));
    }
    oracle.make("create -q -f qcow2 -u -b e.qcow2 -F qcow2 o.qcow2 1M");
    oracle.make("create -q -f qcow2 -u -b aes.qcow2 -F qcow2 oa.qcow2 1M");
    oracle.make("create -q -f qcow2 -u -b v.luks -F luks ov.qcow2 1M");
    oracle.make("create -q -f qcow2 -u -b o.qcow2 -F qcow2 oo.qcow2 1M");
    oracle.make("create -q -f qcow2 -b r.raw -F raw plain.qcow2");
}

/// Each image that needs a key: its name, and the end of the refusal.
const LOCKED: &[(&str, &str)] = &[
    ("e.qcow2", "Could not open 'e.qcow2': Parameter 'encrypt.key-secret' is required for cipher"),
    ("aes.qcow2", "Could not open 'aes.qcow2': Parameter 'encrypt.key-secret' is required for cipher"),
    ("v.luks", "Could not open 'v.luks': Parameter 'key-secret' is required for cipher"),
    (
        "o.qcow2",
        "Could not open 'o.qcow2': Could not open backing file: Parameter 'encrypt.key-secret' is required for cipher",
    ),
    (
        "oa.qcow2",
        "Could not open 'oa.qcow2': Could not open backing file: Parameter 'encrypt.key-secret' is required for cipher",
    ),
    (
        "ov.qcow2",
        "Could not open 'ov.qcow2': Could not open backing file: Parameter 'key-secret' is required for cipher",
    ),
    ("oo.qcow2", "Parameter 'encrypt.key-secret' is required for cipher"),
];

#[test]
fn nothing_is_written_before_a_missing_key_is_noticed() {
    let oracle = Oracle::new();
    gallery(&oracle);
    let before = files(&oracle.work());
    for (image, reason) in LOCKED {
        let format = if image.ends_with("luks") { "luks" } else { "qcow2" };
        for (line, code) in [
            (format!("convert -f {format} -O raw {image} r.raw"), 1),
            (format!("convert -f {format} -O qcow2 {image} q.qcow2"), 1),
            (format!("convert -f {format} -n -O qcow2 {image} q.qcow2"), 1),
            (format!("convert -f {format} -O qcow2 -c {image} new.qcow2"), 1),
            (format!("dd -f {format} -O raw bs=64k if={image} of=r.raw"), 1),
            (format!("compare -f {format} {image} -F raw r.raw"), 2),
            (format!("compare -f raw r.raw -F {format} {image}"), 2),
            (format!("measure -f {format} -O qcow2 {image}"), 1),
        ] {
            let said = oracle.ours(&oracle.work(), &words(&line));
            assert_eq!((said.code, said.out.as_str()), (Some(code), ""), "{line}: {}", said.err);
            assert!(said.err.trim_end().ends_with(reason), "{line}: {}", said.err);
            // The installed tool has the same words, to the letter; a second layer is framed a second time there.
            if *image != "oo.qcow2" {
                oracle.compare(&line);
            }
            assert!(files(&oracle.work()) == before, "{line} changed a file");
        }
    }
    oracle.verdict();
}

#[test]
fn nothing_is_changed_in_place_without_the_key() {
    let oracle = Oracle::new();
    gallery(&oracle);
    let before = files(&oracle.work());
    for line in [
        "convert -n -O qcow2 r.raw e.qcow2",
        "convert -n -O qcow2 r.raw aes.qcow2",
        "convert -n -O luks r.raw v.luks",
        "rebase -b e.qcow2 -F qcow2 plain.qcow2",
        "rebase -b v.luks -F luks plain.qcow2",
        "rebase -b r.raw -F raw o.qcow2",
        "rebase -b r.raw -F raw e.qcow2",
        "rebase -u -b r.raw -F raw e.qcow2",
        "commit o.qcow2",
        "commit ov.qcow2",
        "commit -b e.qcow2 oo.qcow2",
        "commit e.qcow2",
        "bench -c 1 e.qcow2",
        "bench -c 1 o.qcow2",
        "bench -c 1 -w -f luks v.luks",
        "bench -c 1 -w e.qcow2",
        "resize e.qcow2 2M",
        "resize -f luks v.luks 2M",
        "bitmap --add e.qcow2 b",
    ] {
        let said = oracle.refused(line);
        assert!(said.contains("is required for cipher"), "{line}: {said}");
        assert!(files(&oracle.work()) == before, "{line} changed a file");
    }
    for arguments in [
        &["io", "-c", "read 0 4k", "e.qcow2"][..],
        &["io", "-r", "-c", "read 0 4k", "o.qcow2"],
        &["io", "-c", "write 0 4k", "e.qcow2"],
        &["io", "-c", "write 0 4k", "o.qcow2"],
        &["io", "-f", "luks", "-c", "write 0 4k", "v.luks"],
        &["serve", "e.qcow2"],
        &["serve", "o.qcow2"],
    ] {
        let said = ours(&oracle, arguments);
        assert_eq!(said.code, Some(1), "{arguments:?}: {}{}", said.out, said.err);
        assert!(said.err.contains("is required for cipher"), "{arguments:?}: {}", said.err);
        assert!(files(&oracle.work()) == before, "{arguments:?} changed a file");
    }
}

fn ours(oracle: &Oracle, arguments: &[&str]) -> Said {
    finish(Command::new(env!("CARGO_BIN_EXE_cowshed")).args(arguments).current_dir(oracle.work()))
}

/// Commands that need no content work without a key. That is more than QEMU does, and harmless.
#[test]
fn what_stands_where_is_told_without_a_key() {
    let oracle = Oracle::new();
    gallery(&oracle);
    let before = files(&oracle.work());
    for line in [
        "info e.qcow2",
        "info --backing-chain oo.qcow2",
        "info -f luks v.luks",
        "check e.qcow2",
        "check oo.qcow2",
        "map --output=json e.qcow2",
        "map --output=json oo.qcow2",
        "map --output=json -f luks v.luks",
        "snapshot -l e.qcow2",
        "snapshot -l o.qcow2",
    ] {
        let said = oracle.ours(&oracle.work(), &words(line));
        assert_eq!(said.code, Some(0), "{line}: {}", said.err);
    }
    assert!(files(&oracle.work()) == before, "something was changed");
    // The size of a new overlay comes from the encrypted image.
    let said = oracle.ours(&oracle.work(), &words("create -q -f qcow2 -b e.qcow2 -F qcow2 over.qcow2"));
    assert_eq!(said.code, Some(0), "{}", said.err);
    let said = oracle.ours(&oracle.work(), &words("info --output=json over.qcow2"));
    assert!(said.out.contains("\"virtual-size\": 1048576"), "{}", said.out);
}
