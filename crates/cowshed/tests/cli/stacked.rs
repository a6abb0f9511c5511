// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A qcow2 image in a node that is no plain file: every verb reads and writes it there as QEMU does.

use crate::oracle::{Oracle, words};
use serde_json::Value;
use std::path::Path;

const SECRET: &str = "--object secret,id=s,data=x";

/// Name, the commands that make the container of the image `inner.qcow2`, and the options of the image in it.
const CONTAINERS: &[(&str, &[&str], &str)] = &[
    (
        "a LUKS volume",
        &["convert -f raw -O luks SECRET -o key-secret=s,iter-time=10 inner.qcow2 c"],
        "driver=qcow2,file.driver=luks,file.key-secret=s,file.file.driver=file,file.file.filename=c",
    ),
    (
        "a window of a file",
        &["convert -f raw -O raw inner.qcow2 c"],
        "driver=qcow2,file.driver=raw,file.offset=0,file.file.driver=file,file.file.filename=c",
    ),
    (
        "another image",
        &["convert -f raw -O qcow2 inner.qcow2 c"],
        "driver=qcow2,file.driver=qcow2,file.file.driver=file,file.file.filename=c",
    ),
    (
        "an overlay of another image",
        &["convert -f raw -O qcow2 inner.qcow2 b", "create -q -f qcow2 -b b -F qcow2 c"],
        "driver=qcow2,file.driver=qcow2,file.file.driver=file,file.file.filename=c",
    ),
    (
        "an encrypted image",
        &[
            "convert -f raw -O qcow2 SECRET -o encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10 inner.qcow2 c",
        ],
        "driver=qcow2,file.driver=qcow2,file.encrypt.key-secret=s,file.file.driver=file,file.file.filename=c",
    ),
    (
        "a node with faults",
        &["convert -f raw -O raw inner.qcow2 c"],
        "driver=qcow2,file.driver=blkdebug,file.image.driver=file,file.image.filename=c",
    ),
];

const READING: &[&str] = &["check OPTS", "info --output=json OPTS", "map --output=json OPTS", "snapshot -l OPTS"];

const WRITING: &[&str] = &[
    "check -r all OPTS",
    "amend -o lazy_refcounts=on OPTS",
    "resize OPTS 9M",
    "snapshot -c two OPTS",
    "bitmap --add OPTS b",
];

fn line_of(verb: &str, options: &str) -> Vec<String> {
    words(&verb.replace("OPTS", &format!("{SECRET} --image-opts {options}")))
}

/// The parts of an answer that don't name files in words of each tool.
fn facts(verb: &str, out: &str) -> Value {
    if verb.starts_with("snapshot") {
        // Each version of QEMU has other columns.
        return Value::from(out.lines().count());
    }
    if !verb.contains("json") {
        return Value::from(out);
    }
    let answer: Value = serde_json::from_str(out).unwrap_or_else(|error| panic!("{verb}: {error}: {out}"));
    match answer {
        Value::Array(runs) => {
            let known =
                |run: &Value| (run["depth"].as_u64() == Some(0) && run["present"] == true, run["start"].clone());
            // Where data begins: a hole below an allocated cluster is seen by one tool and not by the other.
            let mut present: Vec<(bool, Value)> = runs.iter().map(known).collect();
            present.dedup_by_key(|run| run.0);
            present.into_iter().map(|(is_present, start)| serde_json::json!([is_present, start])).collect()
        }
        info => {
            serde_json::json!([info["format"], info["virtual-size"], info["format-specific"], info["cluster-size"]])
        }
    }
}

fn refresh(from: &Path, to: &Path) {
    for name in ["b", "c"].iter().filter(|name| from.join(name).exists()) {
        std::fs::copy(from.join(name), to.join(name)).expect("a copy");
    }
}

#[test]
fn an_image_in_another_node_is_read_and_written_there() {
    let oracle = Oracle::new();
    let work = oracle.work();
    oracle.make("create -q -f qcow2 inner.qcow2 8M");
    oracle.io(&["write -P 3 0 300k", "write -P 4 5M 64k"], "inner.qcow2");
    oracle.make("snapshot -c one inner.qcow2");
    // Room to grow: another image is no longer than it was made.
    let file = std::fs::File::options().write(true).open(work.join("inner.qcow2")).expect("the image");
    file.set_len(4 << 20).expect("longer");
    let (theirs, ours) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    for (container, made_by, options) in CONTAINERS {
        for name in ["b", "c"] {
            let _ = std::fs::remove_file(work.join(name));
        }
        made_by.iter().for_each(|line| oracle.make_patiently(&line.replace("SECRET", SECRET)));
        for verb in READING.iter().chain(WRITING) {
            refresh(&work, theirs.path());
            refresh(&work, ours.path());
            let arguments = line_of(verb, options);
            let (real, own) = (oracle.real(theirs.path(), &arguments), oracle.ours(ours.path(), &arguments));
            let about = format!("{container}: {verb}");
            assert_eq!((own.code, &own.err), (real.code, &real.err), "{about}");
            assert_eq!(facts(verb, &own.out), facts(verb, &real.out), "{about}");
            let checked = oracle.real(ours.path(), &line_of("check OPTS", options));
            assert_eq!(checked.code, Some(0), "{about}: {}{}", checked.out, checked.err);
            let plain = oracle.real(ours.path(), &line_of("convert OPTS -O raw plain", options));
            assert_eq!(plain.code, Some(0), "{about}: {}", plain.err);
            let bytes = std::fs::read(ours.path().join("plain")).expect("the content");
            assert!(bytes[..300 << 10].iter().all(|byte| *byte == 3), "{about}: other content");
            assert!(bytes[5 << 20..][..64 << 10].iter().all(|byte| *byte == 4), "{about}: other content");
        }
    }
}

/// A repair writes through the image's container.
#[test]
fn an_image_in_another_node_is_repaired_there() {
    let oracle = Oracle::new();
    let work = oracle.work();
    oracle.make("create -q -f qcow2 inner.qcow2 8M");
    oracle.io(&["write -P 3 0 300k"], "inner.qcow2");
    let mut bytes = std::fs::read(work.join("inner.qcow2")).expect("the image");
    bytes.resize(4 << 20, 0);
    // The count of cluster 50 in the one refcount block.
    let word = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().expect("8 bytes")) as usize;
    let block = word(word(48));
    bytes[block + 101] = 1;
    std::fs::write(work.join("inner.qcow2"), bytes).expect("the image");
    for (container, made_by, options) in CONTAINERS {
        for name in ["b", "c"] {
            let _ = std::fs::remove_file(work.join(name));
        }
        made_by.iter().for_each(|line| oracle.make_patiently(&line.replace("SECRET", SECRET)));
        let before = oracle.real(&work, &line_of("check OPTS", options));
        assert_eq!(before.code, Some(3), "{container}: {}{}", before.out, before.err);
        let repaired = oracle.ours(&work, &line_of("check -r all OPTS", options));
        assert_eq!(repaired.code, Some(0), "{container}: {}{}", repaired.out, repaired.err);
        let after = oracle.real(&work, &line_of("check OPTS", options));
        assert_eq!(after.code, Some(0), "{container}: {}{}", after.out, after.err);
    }
}

/// The container of an image is read in any case: its key is needed also where the image's own would not be.
#[test]
fn a_volume_below_an_image_needs_its_key() {
    let oracle = Oracle::new();
    oracle.make("create -q -f qcow2 inner.qcow2 8M");
    let (_, made_by, _) = CONTAINERS[0];
    oracle.make_patiently(&made_by[0].replace("SECRET", SECRET));
    let options = "driver=qcow2,file.driver=luks,file.file.driver=file,file.file.filename=c";
    for verb in READING {
        let arguments = words(&verb.replace("OPTS", &format!("--image-opts {options}")));
        let (real, own) = (oracle.real(&oracle.work(), &arguments), oracle.ours(&oracle.work(), &arguments));
        assert_eq!(real.code, Some(1), "{verb}: {}", real.err);
        assert_eq!(own.code, Some(1), "{verb}: {}", own.err);
        assert!(own.err.contains("Parameter 'key-secret' is required for cipher"), "{verb}: {}", own.err);
    }
    // `info` reads no data of the volume.
    let said = oracle.ours(&oracle.work(), &words("info --image-opts driver=luks,file.driver=file,file.filename=c"));
    assert_eq!(said.code, Some(0), "{}", said.err);
}
