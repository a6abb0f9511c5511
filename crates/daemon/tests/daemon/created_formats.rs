// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `blockdev-create` of the formats of other programs, by QEMU's newest daemon and by ours: the same files, the same errors.

use super::beside_qemu::Theirs;
use super::jobs::concluded;
use super::running::{Client, Running};
use cowshed_testkit::qemu::Qemu;
use serde_json::{Value, json};
use std::io::Read;
use std::path::Path;

/// Options besides the file. Errors are compared, too.
fn cases() -> Vec<Value> {
    let mut cases = Vec::new();
    for size in [1u64 << 20, (10 << 20) + 512, 3 << 30] {
        cases.extend([
            json!({"driver": "vdi", "size": size}),
            json!({"driver": "vpc", "size": size}),
            json!({"driver": "vpc", "size": size, "force-size": true}),
            json!({"driver": "vhdx", "size": size}),
            json!({"driver": "vhdx", "size": size, "log-size": 3 << 20, "block-size": 1 << 20, "block-state-zero": false}),
            json!({"driver": "vmdk", "size": size}),
            json!({"driver": "vmdk", "size": size, "adapter-type": "lsilogic", "hwversion": "8", "toolsversion": "77", "zeroed-grain": true}),
            json!({"driver": "qcow", "size": size}),
            json!({"driver": "qed", "size": size}),
            json!({"driver": "qed", "size": size, "cluster-size": 16384, "table-size": 8}),
            json!({"driver": "parallels", "size": size}),
            json!({"driver": "parallels", "size": size, "cluster-size": 65536}),
        ]);
    }
    cases.extend([
        json!({"driver": "vdi", "size": 4 << 20, "preallocation": "metadata"}),
        json!({"driver": "vpc", "size": 4 << 20, "subformat": "fixed"}),
        json!({"driver": "vpc", "size": 4 << 20, "subformat": "fixed", "force-size": true}),
        json!({"driver": "qcow", "size": 4 << 20, "backing-file": "base"}),
        json!({"driver": "qed", "size": 4 << 20, "backing-file": "base", "backing-fmt": "raw"}),
        json!({"driver": "qed", "size": 4 << 20, "backing-file": "base"}),
        json!({"driver": "qed", "size": 4 << 20, "backing-file": "base", "backing-fmt": "qcow2"}),
        json!({"driver": "vmdk", "size": 4 << 20, "subformat": "monolithicFlat", "extents": ["e1"]}),
        // QEMU leaves old bytes in flat extents, so these come first.
        json!({"driver": "vmdk", "size": 3u64 << 30, "subformat": "twoGbMaxExtentFlat", "extents": ["e1", "e2"]}),
        json!({"driver": "vmdk", "size": 3u64 << 30, "subformat": "twoGbMaxExtentSparse", "extents": ["e1", "e2"]}),
        json!({"driver": "vmdk", "size": 4 << 20, "backing-file": "parent.vmdk"}),
        json!({"driver": "vmdk", "size": 3u64 << 30, "subformat": "streamOptimized"}),
        json!({"driver": "vmdk", "size": 4 << 20, "subformat": "streamOptimized", "zeroed-grain": true}),
        // Refused.
        json!({"driver": "vmdk", "size": 4 << 20, "subformat": "monolithicFlat"}),
        json!({"driver": "vmdk", "size": 3u64 << 30, "subformat": "twoGbMaxExtentSparse", "extents": ["e1"]}),
        json!({"driver": "vmdk", "size": 4 << 20, "subformat": "twoGbMaxExtentFlat", "extents": ["e1", "e2"]}),
        json!({"driver": "vmdk", "size": 4 << 20, "extents": ["e1"]}),
        json!({"driver": "vmdk", "size": 4 << 20, "subformat": "monolithicFlat", "extents": ["nosuch"]}),
        json!({"driver": "vmdk", "size": 4 << 20, "subformat": "monolithicFlat", "extents": ["e1"], "zeroed-grain": true}),
        json!({"driver": "vmdk", "size": 4 << 20, "subformat": "monolithicFlat", "extents": ["e1"], "backing-file": "parent.vmdk"}),
        json!({"driver": "vmdk", "size": 4 << 20, "backing-file": "parent.qcow2"}),
        json!({"driver": "vmdk", "size": 4 << 20, "subformat": "nosuch"}),
        json!({"driver": "qed", "size": 4 << 20, "cluster-size": 5000}),
        json!({"driver": "qed", "size": 4 << 20, "table-size": 3}),
        json!({"driver": "vhdx", "size": 4 << 20, "block-size": 3 << 20}),
        json!({"driver": "vhdx", "size": 4 << 20, "subformat": "nosuch"}),
        json!({"driver": "vpc", "size": 4 << 20, "nosuch": true}),
        json!({"driver": "vdi"}),
    ]);
    // No image has these sizes.
    for size in [1u64 << 62, (1 << 63) - 1, (1 << 63) - 512, 1 << 63, u64::MAX - 511] {
        cases.extend(["vdi", "vpc", "vhdx", "parallels"].map(|driver| json!({"driver": driver, "size": size})));
    }
    cases
}

/// The length of an extent, and its first bytes.
fn beginning(path: &Path) -> Vec<u8> {
    let file = std::fs::File::open(path).expect("an extent");
    let mut bytes = file.metadata().expect("a file").len().to_le_bytes().to_vec();
    file.take(1 << 20).read_to_end(&mut bytes).expect("an extent");
    bytes
}

/// The nodes `e1` and `e2`, and the images that are named as backing files.
fn prepare(client: &mut Client, folder: &Path) {
    for name in ["e1", "e2"] {
        std::fs::write(folder.join(name), []).expect("a file");
        client.command("blockdev-add", json!({"driver": "file", "node-name": name, "filename": name}));
    }
    for format in ["vmdk", "qcow2"] {
        let parent = folder.join(format!("parent.{format}"));
        Qemu::system().create(&parent, format, "", 4 << 20);
        if format == "vmdk" {
            // The content id counts, and is random.
            let mut bytes = std::fs::read(&parent).expect("an image");
            let at = bytes.windows(5).position(|text| text == b"\nCID=").expect("a content id") + 5;
            let end = at + bytes[at..].iter().position(|byte| *byte == b'\n').expect("a line");
            bytes.splice(at..end, *b"77777777");
            // One id in sixteen has fewer digits. Zeroes follow the text to a fixed place.
            let behind = at + bytes[at..].iter().position(|byte| *byte == 0).expect("room for a text");
            bytes.drain(behind..behind + 8 - (end - at));
            std::fs::write(&parent, bytes).expect("an image");
        }
    }
}

/// Creates an image; returns its bytes, or the error.
fn create(client: &mut Client, folder: &Path, options: &Value) -> Result<Vec<u8>, String> {
    let file = json!({"driver": "file", "filename": "new", "size": 0});
    client.command("blockdev-create", json!({"job-id": "f", "options": file}));
    assert_eq!(concluded(client, "f"), None);
    let mut options = options.clone();
    options["file"] = json!({"driver": "file", "filename": "new"});
    match client.execute("blockdev-create", json!({"job-id": "c", "options": options})) {
        Ok(_) => concluded(client, "c").map_or(Ok(()), Err)?,
        Err(error) => return Err(error["desc"].as_str().expect("words").to_owned()),
    }
    let mut bytes = std::fs::read(folder.join("new")).expect("an image");
    if options["extents"].is_array() {
        for name in ["e1", "e2"] {
            bytes.extend(beginning(&folder.join(name)));
        }
    }
    Ok(bytes)
}

/// The bytes of a VMDK disk without its random content id. `is_padded`: zeroes follow the text to a fixed place.
fn without_cid(mut bytes: Vec<u8>, is_padded: bool) -> Vec<u8> {
    let at = bytes.windows(5).position(|text| text == b"\nCID=").expect("a content id") + 5;
    let digits = bytes[at..].iter().take_while(|byte| byte.is_ascii_hexdigit()).count();
    bytes.drain(at..at + digits);
    if is_padded {
        let end = at + bytes[at..].iter().position(|byte| *byte == 0).expect("room for a text");
        bytes.splice(end..end, vec![0; digits]);
    }
    bytes
}

/// True at the place of a random name, the time, or the program's name.
fn may_differ(driver: &str, len: usize, at: usize) -> bool {
    match driver {
        "vdi" => (392..424).contains(&at),
        "vpc" => [0, len - 512].iter().any(|start| {
            let within = at.wrapping_sub(*start);
            (24..28).contains(&within) || (64..84).contains(&within)
        }),
        // In the region tables also that both regions are required.
        "vhdx" => at < 1 << 20 || at % (1 << 20) / 16 == 0x1_0010 / 16,
        _ => false,
    }
}

#[test]
fn images_of_other_formats_are_created_as_by_qemu() {
    let (theirs, mut client_of_theirs) = Theirs::start_newest();
    let daemon = Running::start(Vec::new());
    let mut client = daemon.client();
    client.files_in(daemon.folder.path());
    prepare(&mut client, daemon.folder.path());
    prepare(&mut client_of_theirs, theirs.folder.path());
    for options in cases() {
        let ours = create(&mut client, daemon.folder.path(), &options);
        let real = create(&mut client_of_theirs, theirs.folder.path(), &options);
        match (ours, real) {
            // Ours rounds up, as both do for `create`: COMPAT.
            (Ok(_), Err(real)) if real == "The requested image size cannot be represented in CHS geometry" => {}
            (Err(ours), Err(real)) => assert_eq!(ours, real, "{options}"),
            (Ok(ours), Ok(real)) => {
                let driver = options["driver"].as_str().expect("a name");
                let (ours, real) = match driver {
                    "vmdk" => {
                        let is_padded = !options["extents"].is_array();
                        (without_cid(ours, is_padded), without_cid(real, is_padded))
                    }
                    _ => (ours, real),
                };
                assert_eq!(ours.len(), real.len(), "{options}");
                let differs = (0..ours.len()).find(|at| ours[*at] != real[*at] && !may_differ(driver, ours.len(), *at));
                assert_eq!(differs, None, "{options}: the first byte that differs");
            }
            (ours, real) => {
                panic!("{options}: ours {:?}, QEMU {:?}", ours.map(|bytes| bytes.len()), real.map(|bytes| bytes.len()))
            }
        }
    }
    daemon.stop().expect("stopped in order");
}

/// As in QEMU, which cuts the disks of other formats.
#[test]
fn a_luks_volume_of_odd_size_is_rounded_up() {
    let daemon = Running::start(Vec::new());
    let (_theirs, mut of_theirs) = Theirs::start_newest();
    let mut of_ours = daemon.client();
    let sizes = [&mut of_ours, &mut of_theirs].map(|client| {
        client.files_in(daemon.folder.path());
        client.command("object-add", json!({"qom-type": "secret", "id": "s", "data": "x"}));
        let file = json!({"driver": "file", "filename": "volume"});
        client.command(
            "blockdev-create",
            json!({"job-id": "f", "options": {"driver": "file", "filename": "volume", "size": 0}}),
        );
        assert_eq!(concluded(client, "f"), None);
        let options =
            json!({"driver": "luks", "file": file, "size": (1 << 20) + 1, "key-secret": "s", "iter-time": 10});
        client.command("blockdev-create", json!({"job-id": "c", "options": options}));
        assert_eq!(concluded(client, "c"), None);
        client.command("blockdev-add", json!({"driver": "luks", "node-name": "v", "file": file, "key-secret": "s"}));
        let nodes = client.command("query-named-block-nodes", json!({"flat": true}));
        let nodes = nodes.as_array().expect("a list");
        let volume = nodes.iter().find(|node| node["node-name"] == "v").expect("the node");
        let size = volume["image"]["virtual-size"].as_u64();
        client.command("blockdev-del", json!({"node-name": "v"}));
        size
    });
    assert_eq!(sizes, [Some((1 << 20) + 512); 2]);
    daemon.stop().expect("stopped in order");
}

/// A new file has another name until it is whole: its descriptor has the final one.
#[test]
fn a_backup_to_vmdk_names_its_own_file() {
    let daemon = Running::start(Vec::new());
    let mut client = daemon.client();
    client.files_in(daemon.folder.path());
    std::fs::write(daemon.folder.path().join("disk"), vec![7; 1 << 20]).expect("a file");
    let disk = json!({"driver": "raw", "node-name": "disk", "file": {"driver": "file", "filename": "disk"}});
    client.command("blockdev-add", disk);
    let target = daemon.folder.path().join("new.vmdk");
    let backup = json!({"job-id": "b", "device": "disk", "sync": "full", "target": target, "format": "vmdk", "auto-dismiss": false});
    client.command("drive-backup", backup);
    assert_eq!(concluded(&mut client, "b"), None);
    let bytes = std::fs::read(&target).expect("an image");
    let text = String::from_utf8_lossy(&bytes[512..2048]).into_owned();
    assert!(text.contains(" SPARSE \"new.vmdk\""), "{text}");
    daemon.stop().expect("stopped in order");
}

/// A window of a file has no identity of its own: the file behind it counts.
#[test]
fn new_image_in_a_window_spares_its_base() {
    let daemon = Running::start(Vec::new());
    let mut client = daemon.client();
    client.files_in(daemon.folder.path());
    let base = daemon.folder.path().join("base");
    std::fs::write(&base, vec![7; 4 << 20]).expect("a file");
    let file = json!({"driver": "file", "filename": "base"});
    client.command(
        "blockdev-add",
        json!({"driver": "raw", "node-name": "window", "offset": 1 << 20, "size": 2 << 20, "file": file}),
    );
    let options =
        json!({"driver": "qcow2", "file": "window", "size": 4 << 20, "backing-file": base, "backing-fmt": "raw"});
    client.command("blockdev-create", json!({"job-id": "c", "options": options}));
    let error = concluded(&mut client, "c").expect("an error");
    assert!(error.contains("which the backing file needs"), "{error}");
    assert!(std::fs::read(&base).expect("a file").iter().all(|byte| *byte == 7), "the base is as it was");
    daemon.stop().expect("stopped in order");
}

/// An image in the disk of another one: the length of that disk, and the new image's size.
fn create_in_an_image(client: &mut Client, folder: &Path, options: &Value) -> (Option<u64>, Option<u64>) {
    Qemu::system().create(&folder.join("under.qcow2"), "qcow2", "", 16 << 20);
    let file = json!({"driver": "file", "filename": "under.qcow2"});
    client.command("blockdev-add", json!({"driver": "qcow2", "node-name": "under", "file": file}));
    let mut options = options.clone();
    options["file"] = "under".into();
    client.command("blockdev-create", json!({"job-id": "c", "options": options}));
    assert_eq!(concluded(client, "c"), None, "{options}");
    let mut image = json!({"driver": options["driver"], "node-name": "image", "file": "under", "read-only": true});
    if options["driver"] == "luks" {
        image["key-secret"] = "s".into();
    }
    client.command("blockdev-add", image);
    let nodes = client.command("query-named-block-nodes", json!({"flat": true}));
    let size_of = |name| {
        let node = nodes.as_array()?.iter().find(|node| node["node-name"] == name)?;
        node["image"]["virtual-size"].as_u64()
    };
    let sizes = (size_of("under"), size_of("image"));
    for node in ["image", "under"] {
        client.command("blockdev-del", json!({"node-name": node}));
    }
    sizes
}

#[test]
fn images_in_the_disks_of_others_end_as_qemus() {
    let daemon = Running::start(Vec::new());
    let (theirs, mut of_theirs) = Theirs::start_newest();
    let mut of_ours = daemon.client();
    of_ours.files_in(daemon.folder.path());
    for client in [&mut of_ours, &mut of_theirs] {
        client.command("object-add", json!({"qom-type": "secret", "id": "s", "data": "x"}));
    }
    for options in [
        json!({"driver": "vpc", "subformat": "fixed", "force-size": true}),
        json!({"driver": "vpc", "force-size": true}),
        json!({"driver": "luks", "key-secret": "s", "iter-time": 10}),
        json!({"driver": "vhdx"}),
        json!({"driver": "vmdk"}),
        json!({"driver": "vdi"}),
        json!({"driver": "vdi", "preallocation": "metadata"}),
        json!({"driver": "qed"}),
        json!({"driver": "qcow"}),
        json!({"driver": "parallels"}),
        json!({"driver": "qcow2"}),
    ] {
        let mut options = options;
        options["size"] = (4 << 20).into();
        let ours = create_in_an_image(&mut of_ours, daemon.folder.path(), &options);
        let real = create_in_an_image(&mut of_theirs, theirs.folder.path(), &options);
        assert_eq!(ours, real, "{options}");
    }
    daemon.stop().expect("stopped in order");
}

/// As in QEMU.
#[test]
fn a_fixed_vhd_needs_a_file_of_its_length() {
    let daemon = Running::start(Vec::new());
    let mut client = daemon.client();
    client.files_in(daemon.folder.path());
    let disk = daemon.folder.path().join("disk");
    std::fs::write(&disk, vec![7; 16 << 20]).expect("a file");
    let file = json!({"driver": "file", "filename": "disk"});
    client.command("blockdev-add", json!({"driver": "raw", "node-name": "part", "size": 16 << 20, "file": file}));
    let options = json!({"driver": "vpc", "subformat": "fixed", "force-size": true, "file": "part", "size": 4 << 20});
    client.command("blockdev-create", json!({"job-id": "c", "options": options}));
    let error = concluded(&mut client, "c").expect("an error");
    assert_eq!(error, "Cannot resize fixed-size raw disks");
    assert!(std::fs::read(&disk).expect("a file").iter().all(|byte| *byte == 7), "the disk is as it was");
    daemon.stop().expect("stopped in order");
}
