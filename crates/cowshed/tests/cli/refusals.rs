// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Refusals and their words: the list `refusals.txt`, run by the real qemu-img and by ours. Nothing that we refuse may
//! change a file.

use crate::oracle::{Oracle, first_line, words};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

/// The list's expectation for one command line.
enum Expected<'a> {
    /// The first line of the system's tool; where the newest has other words, the list has those.
    AsInstalled,
    /// This first line.
    Text(&'a str),
}

fn entries() -> Vec<(&'static str, Expected<'static>)> {
    let lines = include_str!("refusals.txt").lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines
        .map(|line| match line.split_once(" => ") {
            None => (line, Expected::AsInstalled),
            Some((line, text)) => (line, Expected::Text(text.split_once(" | ").map_or(text, |(text, _why)| text))),
        })
        .collect()
}

/// The images that the list speaks of.
fn make_images(oracle: &Oracle) {
    for line in [
        "create -q -f qcow2 a.qcow2 4M",
        "create -q -f raw a.raw 4M",
        "create -q -f raw plain.raw 1M",
        "create -q -f raw base.raw 1M",
        "create -q -f qcow2 -o compat=0.10 old.qcow2 4M",
        "create -q -f qcow2 large.qcow2 16T",
        "create -q -f qcow2 -o data_file=d.raw data.qcow2 4M",
        "create -q -f qcow2 broken.qcow2 4M",
        "bitmap --add broken.qcow2 b0",
        "bitmap --add broken.qcow2 b1",
        "create -q -f qcow2 snap.qcow2 4M",
        "snapshot -c s1 snap.qcow2",
    ] {
        oracle.make(line);
    }
    crate::bitmap::make_inconsistent(&oracle.work().join("broken.qcow2"));
}

/// Every file of a folder, whole.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(folder).expect("the folder").map(|entry| entry.expect("an entry").path());
    entries.map(|path| (path.display().to_string(), std::fs::read(&path).expect("a file"))).collect()
}

#[test]
fn refusals_have_qemus_words_and_change_nothing() {
    let oracle = Oracle::new();
    make_images(&oracle);
    let (theirs, own) = oracle.folders();
    let before = files(&own);
    let (mut wrong, mut compared) = (String::new(), 0);
    for (line, expected) in entries() {
        let arguments = words(line);
        let ours = oracle.ours(&own, &arguments);
        if matches!(ours.code, None | Some(0)) || ours.err.contains("panicked") {
            let _ = writeln!(wrong, "{line}: {ours:?}");
        }
        assert!(files(&own) == before, "{line} changed a file");
        let (code, text) = match expected {
            Expected::Text(text) => (ours.code, format!("qemu-img: {text}")),
            Expected::AsInstalled => {
                // Files that the real tool leaves behind are not for the next line.
                let real = oracle.real_of_system(&theirs, &arguments);
                if files(&theirs).len() != before.len() || !real.err.is_empty() && line.contains("-o data_file=a.raw") {
                    oracle.folders();
                }
                compared += 1;
                (real.code, first_line(&real))
            }
        };
        if ours.code != code || text.is_empty() || !first_line(&ours).starts_with(&text) {
            let _ = writeln!(
                wrong,
                "{line}\n  expected {code:?} {text}\n  ours     {:?} {}",
                ours.code,
                ours.err.trim_end()
            );
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
    assert!(compared > 200, "{compared} lines were compared");
}

/// A copy onto itself would empty the file first; the real tool does so where the image is raw.
#[test]
fn nothing_is_copied_onto_itself() {
    let oracle = Oracle::new();
    oracle.make("create -q -f raw base.raw 1M");
    oracle.io(&["write -P 7 0 1M"], "base.raw");
    oracle.make("create -q -f qcow2 -b base.raw -F raw top.qcow2");
    oracle.io(&["write -P 8 64k 64k"], "top.qcow2");
    std::os::unix::fs::symlink("base.raw", oracle.work().join("alias")).expect("a link");
    let before = files(&oracle.work());
    for (line, file) in [
        ("dd if=base.raw of=base.raw", "base.raw"),
        ("dd -f raw -O raw if=base.raw of=./base.raw count=1", "./base.raw"),
        ("dd if=alias of=base.raw", "base.raw"),
        ("dd -O qcow2 if=top.qcow2 of=top.qcow2", "top.qcow2"),
        ("dd -f qcow2 -O raw if=top.qcow2 of=base.raw", "base.raw"),
        ("convert -O raw base.raw alias", "alias"),
    ] {
        let said = oracle.refused(line);
        let expected = format!("Is another process using the image [{file}]?");
        assert!(said.contains("Failed to get \"write\" lock") && said.contains(&expected), "{line}: {said}");
        assert!(files(&oracle.work()) == before, "{line} changed a file");
    }
}
