// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `blockdev-create` in nodes that have a length of their own, by QEMU's newest daemon and by ours.

use super::beside_qemu::Theirs;
use super::jobs::concluded;
use super::running::{Client, Running};
use cowshed_testkit::qemu::Qemu;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

const MIB: u64 = 1 << 20;

fn formats() -> Vec<Value> {
    vec![
        json!({"driver": "qed"}),
        json!({"driver": "vmdk"}),
        json!({"driver": "vmdk", "subformat": "streamOptimized"}),
        json!({"driver": "vhdx"}),
        json!({"driver": "vpc", "subformat": "fixed", "force-size": true}),
        json!({"driver": "vpc", "force-size": true}),
        json!({"driver": "vdi"}),
        json!({"driver": "vdi", "preallocation": "metadata"}),
        json!({"driver": "qcow"}),
        json!({"driver": "parallels"}),
        json!({"driver": "qcow2"}),
        json!({"driver": "qcow2", "preallocation": "metadata"}),
    ]
}

/// The error of a creation in the node `n` below which `disk` is, and the size of the node and of `disk` afterwards.
fn create(client: &mut Client, disk: &Path, node: &Value, options: &Value) -> (Option<String>, u64, u64) {
    client.command("blockdev-add", node.clone());
    let mut options = options.clone();
    options["file"] = "n".into();
    options["size"] = MIB.into();
    client.command("blockdev-create", json!({"job-id": "c", "options": options}));
    let error = concluded(client, "c");
    let nodes = client.command("query-named-block-nodes", json!({"flat": true}));
    let node = nodes.as_array().expect("a list").iter().find(|node| node["node-name"] == "n").expect("the node");
    let size = node["image"]["virtual-size"].as_u64().expect("a size");
    client.command("blockdev-del", json!({"node-name": "n"}));
    (error, size, fs::metadata(disk).expect("a file").len())
}

/// QEMU's and our outcomes for each format, in a file of this length below a node with these options. A refusal leaves the
/// file as it was.
fn compare(bytes: u64, node: &Value, expect: impl Fn(&Value, (Option<String>, u64, u64), (Option<String>, u64, u64))) {
    let daemon = Running::start(Vec::new());
    let (theirs, mut of_theirs) = Theirs::start_newest();
    let mut of_ours = daemon.client();
    of_ours.files_in(daemon.folder.path());
    for client in [&mut of_ours, &mut of_theirs] {
        client.command("object-add", json!({"qom-type": "secret", "id": "s", "data": "x"}));
        client.command("object-add", json!({"qom-type": "throttle-group", "id": "g"}));
    }
    let mut node = node.clone();
    node["node-name"] = "n".into();
    node["file"] = json!({"driver": "file", "filename": "disk"});
    let old = vec![90; bytes as usize];
    // QEMU takes seconds for a key slot.
    let luks = json!({"driver": "luks", "key-secret": "s", "iter-time": 10});
    let luks = Some(luks).filter(|_| node["size"] == 10 * MIB);
    for options in formats().into_iter().chain(luks) {
        let run = |client: &mut Client, folder: &Path| {
            let disk = folder.join("disk");
            fs::write(&disk, &old).expect("a file");
            (create(client, &disk, &node, &options), fs::read(&disk).expect("a file") == old)
        };
        let (real, _) = run(&mut of_theirs, theirs.folder.path());
        let (ours, is_untouched) = run(&mut of_ours, daemon.folder.path());
        assert!(ours.0.is_none() || is_untouched, "{options}: {:?}, and the disk is another one", ours.0);
        expect(&options, ours, real);
    }
    daemon.stop().expect("stopped in order");
}

/// Behind a filter, and behind an offset: formats that count or end with the bytes behind them get a shorter file.
#[test]
fn longer_nodes_are_cut_as_by_qemu() {
    for node in [
        json!({"driver": "throttle", "throttle-group": "g"}),
        json!({"driver": "raw", "offset": MIB}),
        json!({"driver": "preallocate"}),
    ] {
        compare(12 * MIB, &node, |options, ours, real| assert_eq!(ours, real, "{node}: {options}"));
    }
}

#[test]
fn windows_of_fixed_size_are_refused_as_by_qemu() {
    for bytes in [10 * MIB, MIB] {
        compare(12 * MIB, &json!({"driver": "raw", "offset": MIB, "size": bytes}), |options, ours, mut real| {
            // QEMU joins two sentences without a blank.
            real.0 = real.0.map(|error| error.replace("Failed to statically allocate file", ""));
            // For its metadata there is no room: other words.
            if options["preallocation"] == "metadata" && options["driver"] == "qcow2" && bytes == MIB {
                assert!(ours.0.is_some() && real.0.is_some(), "{options}");
                real.0.clone_from(&ours.0);
            }
            assert_eq!(ours, real, "{bytes}: {options}");
        });
    }
}

/// A window that no image fits into stays as it was. QEMU writes the first part of some.
#[test]
fn windows_that_are_too_short_stay() {
    compare(2 * MIB, &json!({"driver": "raw", "offset": MIB, "size": 32768}), |options, ours, real| {
        assert_eq!(ours.0.is_none(), real.0.is_none(), "{options}: {ours:?}, {real:?}");
        assert_eq!((ours.1, ours.2), (real.1, real.2), "{options}");
    });
}

#[test]
fn disks_that_can_not_be_resized_are_refused() {
    let daemon = Running::start(Vec::new());
    let (theirs, mut of_theirs) = Theirs::start_newest();
    let mut of_ours = daemon.client();
    of_ours.files_in(daemon.folder.path());
    for format in ["vdi", "vmdk"] {
        for options in formats() {
            // Joined sentences, see above.
            if options["driver"] == "vdi" && options["preallocation"].is_string() {
                continue;
            }
            let run = |client: &mut Client, folder: &Path| {
                let disk = folder.join("disk");
                let _ = fs::remove_file(&disk);
                Qemu::newest().create(&disk, format, "", 12 * MIB);
                let node = json!({"driver": format, "node-name": "n", "file": {"driver": "file", "filename": "disk"}});
                create(client, &disk, &node, &options)
            };
            let real = run(&mut of_theirs, theirs.folder.path());
            let ours = run(&mut of_ours, daemon.folder.path());
            assert_eq!((&ours.0, ours.1), (&real.0, real.1), "{format}: {options}");
        }
    }
    daemon.stop().expect("stopped in order");
}

/// Extents of VMDK are files of their own.
#[test]
fn extents_in_longer_nodes_are_cut_as_by_qemu() {
    let daemon = Running::start(Vec::new());
    let (theirs, mut of_theirs) = Theirs::start_newest();
    let mut of_ours = daemon.client();
    of_ours.files_in(daemon.folder.path());
    for client in [&mut of_ours, &mut of_theirs] {
        client.command("object-add", json!({"qom-type": "throttle-group", "id": "g"}));
    }
    for kind in ["monolithicFlat", "twoGbMaxExtentSparse"] {
        let mut lengths =
            [(&mut of_ours, daemon.folder.path()), (&mut of_theirs, theirs.folder.path())].map(|(client, folder)| {
                for name in ["d", "e"] {
                    fs::write(folder.join(name), vec![90; 12 << 20]).expect("a file");
                }
                client.command("blockdev-add", json!({"driver": "file", "node-name": "d", "filename": "d"}));
                let file = json!({"driver": "file", "filename": "e"});
                client.command(
                    "blockdev-add",
                    json!({"driver": "throttle", "node-name": "e", "throttle-group": "g", "file": file}),
                );
                let options = json!({"driver": "vmdk", "file": "d", "extents": ["e"], "size": MIB, "subformat": kind});
                client.command("blockdev-create", json!({"job-id": "c", "options": options}));
                assert_eq!(concluded(client, "c"), None);
                for name in ["d", "e"] {
                    client.command("blockdev-del", json!({"node-name": name}));
                }
                fs::metadata(folder.join("e")).expect("a file").len()
            });
        lengths.sort_unstable();
        assert_eq!(lengths[0], lengths[1], "{kind}");
    }
    daemon.stop().expect("stopped in order");
}

#[test]
fn refusals_of_sizes_and_compression_have_qemus_words() {
    let daemon = Running::start(Vec::new());
    let (theirs, mut of_theirs) = Theirs::start_newest();
    let mut of_ours = daemon.client();
    of_ours.files_in(daemon.folder.path());
    let answers =
        [(&mut of_ours, daemon.folder.path()), (&mut of_theirs, theirs.folder.path())].map(|(client, folder)| {
            for name in ["a", "b"] {
                fs::write(folder.join(name), vec![0; MIB as usize]).expect("a file");
                let file = json!({"driver": "file", "filename": name});
                client.command("blockdev-add", json!({"driver": "raw", "node-name": name, "file": file}));
            }
            [
                client.refusal("block_resize", json!({"node-name": "a", "size": 1u64 << 62})),
                client.refusal(
                    "blockdev-backup",
                    json!({"job-id": "j", "device": "a", "target": "b", "sync": "full", "compress": true}),
                ),
            ]
        });
    assert_eq!(answers[0], answers[1]);
    daemon.stop().expect("stopped in order");
}

/// The extent comes first, and the descriptor's node is refused.
#[test]
fn refused_descriptors_leave_the_extents_whole() {
    let daemon = Running::start(Vec::new());
    let mut client = daemon.client();
    client.files_in(daemon.folder.path());
    client.command("object-add", json!({"qom-type": "throttle-group", "id": "g"}));
    let old = vec![90; 6 << 20];
    for kind in ["monolithicFlat", "twoGbMaxExtentSparse"] {
        for name in ["d", "e"] {
            fs::write(daemon.folder.path().join(name), &old).expect("a file");
        }
        for (driver, name) in [("raw", "d"), ("throttle", "e")] {
            let mut node = json!({"driver": driver, "node-name": name, "file": {"driver": "file", "filename": name}});
            match driver {
                "raw" => node["size"] = MIB.into(),
                _ => node["throttle-group"] = "g".into(),
            }
            client.command("blockdev-add", node);
        }
        let options = json!({"driver": "vmdk", "file": "d", "extents": ["e"], "size": 2 * MIB, "subformat": kind});
        client.command("blockdev-create", json!({"job-id": "c", "options": options}));
        let error = concluded(&mut client, "c").expect("an error");
        assert!(error.contains("Cannot resize fixed-size raw disks"), "{kind}: {error}");
        for name in ["d", "e"] {
            assert!(fs::read(daemon.folder.path().join(name)).expect("a file") == old, "{kind}: {name} changed");
            client.command("blockdev-del", json!({"node-name": name}));
        }
    }
    daemon.stop().expect("stopped in order");
}
