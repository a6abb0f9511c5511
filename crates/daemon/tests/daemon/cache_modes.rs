// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Cache modes that children have from the node above, over many changes, by QEMU's newest daemon and by ours.

use super::beside_qemu::Theirs;
use super::running::{Client, Running};
use cowshed_testkit::qemu::Qemu;
use serde_json::{Value, json};
use std::path::Path;

/// `O_DIRECT` in the flags of `/proc/PID/fdinfo/FD`.
const DIRECT: u32 = 0o40000;

/// Whether the process has the file open past the page cache, by the kernel's word.
fn is_direct(pid: u32, path: &Path) -> Vec<bool> {
    let path = std::fs::canonicalize(path).expect("the file");
    let mut found = Vec::new();
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd")).expect("the process's files") {
        let entry = entry.expect("an open file");
        if !std::fs::read_link(entry.path()).is_ok_and(|target| target == path) {
            continue;
        }
        let info = Path::new("/proc").join(pid.to_string()).join("fdinfo").join(entry.file_name());
        let info = std::fs::read_to_string(info).expect("facts of the descriptor");
        let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).expect("its flags").trim();
        found.push(u32::from_str_radix(flags, 8).expect("a number") & DIRECT != 0);
    }
    found.dedup();
    found
}

/// The modes of the image and its file after each step, and the file's own.
fn modes(client: &mut Client, pid: u32, folder: &Path) -> Vec<String> {
    Qemu::system().create(&folder.join("disk.qcow2"), "qcow2", "", 1 << 20);
    let (direct, no_flush) = (json!({"direct": true}), json!({"no-flush": true}));
    let image = |above: Option<&Value>, below: Option<&Value>| {
        let mut file = json!({"driver": "file", "filename": folder.join("disk.qcow2")});
        below.into_iter().for_each(|cache| file["cache"] = cache.clone());
        let mut image = json!({"driver": "qcow2", "node-name": "image", "file": file});
        above.into_iter().for_each(|cache| image["cache"] = cache.clone());
        image
    };
    let mut seen = Vec::new();
    for first in [None, Some(&direct)] {
        client.command("blockdev-add", image(first, None));
        for (above, below) in [
            (Some(&direct), None),
            (None, None),
            (None, Some(&direct)),
            (None, None),
            (None, Some(&direct)),
            (Some(&direct), None),
            (None, None),
            (Some(&no_flush), None),
            (None, Some(&no_flush)),
            (None, None),
        ] {
            client.command("blockdev-reopen", json!({"options": [image(above, below)]}));
            let nodes = client.command("query-named-block-nodes", json!({"flat": true}));
            let mut caches: Vec<String> = nodes
                .as_array()
                .expect("a list")
                .iter()
                .map(|node| {
                    let (cache, driver) = (&node["cache"], &node["drv"]);
                    format!("{driver}: direct {}, no-flush {}", cache["direct"], cache["no-flush"])
                })
                .collect();
            caches.sort();
            seen.push(format!("{above:?} {below:?}: {caches:?}, {:?}", is_direct(pid, &folder.join("disk.qcow2"))));
        }
        client.command("blockdev-del", json!({"node-name": "image"}));
    }
    seen
}

#[test]
fn children_take_cache_modes_over_as_in_qemu() {
    let daemon = Running::start(Vec::new());
    let (theirs, mut of_theirs) = Theirs::start_newest();
    let ours = modes(&mut daemon.client(), std::process::id(), daemon.folder.path());
    let real = modes(&mut of_theirs, theirs.pid(), theirs.folder.path());
    for (ours, real) in ours.iter().zip(&real) {
        assert_eq!(ours, real);
    }
    daemon.stop().expect("stopped in order");
}
