// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Verbs that change images, asked for what can't be: one clear line, exit code 1, and not a byte of any image changed.

use crate::oracle::{Oracle, words};
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Header bytes 60–63 count the snapshots, 64–71 say where their table is, 72–79 are the incompatible features.
const NB_SNAPSHOTS: u64 = 60;
const SNAPSHOTS_OFFSET: u64 = 64;
const INCOMPATIBLE_FEATURES: u64 = 72;

fn damaged(folder: &Path, name: &str, at: u64, bytes: &[u8]) {
    fs::copy(folder.join("snapshots.qcow2"), folder.join(name)).expect("a copy");
    let file = fs::OpenOptions::new().write(true).open(folder.join(name)).expect("the copy");
    file.write_all_at(bytes, at).expect("damage");
}

#[test]
fn what_cannot_be_is_refused_and_changes_nothing() {
    let oracle = Oracle::new();
    let folder = oracle.work();
    oracle.make("create -q -f qcow2 base.qcow2 4M");
    oracle.make("create -q -f qcow2 -b base.qcow2 -F qcow2 middle.qcow2");
    oracle.make("create -q -f qcow2 -b middle.qcow2 -F qcow2 top.qcow2");
    oracle.make("create -q -f qcow2 snapshots.qcow2 4M");
    oracle.io(&["write -P 5 0 1M"], "snapshots.qcow2");
    oracle.make("snapshot -c one snapshots.qcow2");
    damaged(&folder, "many.qcow2", NB_SNAPSHOTS, &u32::MAX.to_be_bytes());
    damaged(&folder, "far.qcow2", SNAPSHOTS_OFFSET, &(1u64 << 40).to_be_bytes());
    damaged(&folder, "corrupt.qcow2", INCOMPATIBLE_FEATURES, &2u64.to_be_bytes());
    let images = || -> Vec<(String, Vec<u8>)> {
        let names = fs::read_dir(&folder).expect("the folder").map(|entry| entry.expect("an entry").path());
        let mut all: Vec<_> =
            names.map(|path| (path.display().to_string(), fs::read(&path).expect("an image"))).collect();
        all.sort();
        all
    };
    let before = images();
    let mut wrong = String::new();
    for (line, reason) in [
        ("rebase -b top.qcow2 -F qcow2 top.qcow2", "top.qcow2"),
        ("rebase -b top.qcow2 -F qcow2 middle.qcow2", "middle.qcow2"),
        ("commit base.qcow2", "does not have a backing file"),
        ("commit -b top.qcow2 top.qcow2", "backing chain"),
        ("snapshot -l many.qcow2", "65536"),
        ("snapshot -c two many.qcow2", "65536"),
        ("snapshot -d one far.qcow2", "snapshots_offset"),
        ("snapshot -a one far.qcow2", "snapshots_offset"),
        ("snapshot -c two corrupt.qcow2", "corrupt"),
        ("amend -o refcount_bits=64 many.qcow2", "65536"),
        ("amend -o refcount_bits=64 far.qcow2", "snapshots_offset"),
        ("amend -o refcount_bits=64 corrupt.qcow2", "corrupt"),
        ("amend -o refcount_bits=1 snapshots.qcow2", "refcount of 2"),
        ("amend -o compat=0.10,size=5M snapshots.qcow2", "snapshots prevent downgrade"),
        ("resize corrupt.qcow2 8M", "corrupt"),
    ] {
        let said = oracle.ours(&folder, &words(line));
        if said.code != Some(1) || !said.err.contains(reason) || said.err.contains("panicked") {
            wrong += &format!("{line}: {said:?}\n");
        }
        assert!(images() == before, "{line}: an image has changed");
    }
    assert!(wrong.is_empty(), "{wrong}");
}
