// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Images of other formats that are odd and allowed, under writes: nothing but the written range changes.

use crate::oracle::{Oracle, ours, words};
use cowshed_layout::vpc;
use std::fs;
use std::os::unix::fs::symlink;
use std::process::Command;

/// Our qemu-io, which must succeed.
#[track_caller]
pub fn io(oracle: &Oracle, format: &str, image: &str, commands: &[&str]) {
    let said = run_io(oracle, format, image, commands);
    assert!(!said.contains("rror") && !said.contains("ailed") && !said.contains("Could not"), "{commands:?}: {said}");
}

/// As [`io`], whatever the answer is.
pub fn run_io(oracle: &Oracle, format: &str, image: &str, commands: &[&str]) -> String {
    let link = oracle.work().join("qemu-io");
    if !link.exists() {
        symlink(env!("CARGO_BIN_EXE_cowshed"), &link).unwrap();
    }
    let mut command = Command::new(&link);
    command.current_dir(oracle.work()).args(["-f", format]);
    for text in commands {
        command.args(["-c", text]);
    }
    let output = command.arg(image).output().unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// A table with room for a disk that grows, as other programs make it.
#[test]
fn longer_vhd_table_stays_whole() {
    let oracle = Oracle::new();
    oracle.make("create -q -f vpc -o force_size=on disk.vhd 8G");
    let path = oracle.work().join("disk.vhd");
    let mut bytes = fs::read(&path).unwrap();
    for at in [0, bytes.len() - 512] {
        bytes[at + 48..at + 56].copy_from_slice(&(64u64 << 20).to_be_bytes());
        let sum = vpc::checksum(&bytes[at..at + 512], 64);
        bytes[at + 64..at + 68].copy_from_slice(&sum.to_be_bytes());
    }
    fs::write(&path, &bytes).unwrap();
    io(&oracle, "vpc", "disk.vhd", &["write -P 17 0 4M", "write -P 18 60M 1M"]);
    for reader in 0..2 {
        let line = words("convert -f vpc -O raw disk.vhd out");
        let said =
            if reader == 0 { oracle.real(&oracle.work(), &line) } else { oracle.real_of_system(&oracle.work(), &line) };
        assert_eq!(said.code, Some(0), "{}", said.err);
        let disk = fs::read(oracle.work().join("out")).unwrap();
        assert!(
            disk[..4 << 20].iter().all(|byte| *byte == 17) && disk[60 << 20..61 << 20].iter().all(|byte| *byte == 18)
        );
    }
    // The entries that no block has.
    let after = fs::read(&path).unwrap();
    assert!(after[1536 + 32 * 4..1536 + 4096 * 4].iter().all(|byte| *byte == 0xff));
}

#[test]
fn vmdk_extents_with_a_shared_part_take_no_writes() {
    let oracle = Oracle::new();
    let with_lines = |name: &str, lines: &[&str]| {
        let text = fs::read_to_string(oracle.work().join("d.vmdk")).unwrap();
        let line = text.lines().find(|line| line.starts_with("RW ")).unwrap();
        fs::write(oracle.work().join(name), text.replace(line, &lines.join("\n"))).unwrap();
    };
    oracle.make("create -q -f vmdk -o subformat=twoGbMaxExtentSparse d.vmdk 10M");
    let sparse = "RW 20480 SPARSE \"d-s001.vmdk\"";
    with_lines("twice.vmdk", &[sparse, sparse]);
    oracle.make("create -q -f vmdk -o subformat=monolithicFlat d.vmdk 10M");
    with_lines("windows.vmdk", &["RW 10000 FLAT \"d-flat.vmdk\" 0", "RW 10000 FLAT \"d-flat.vmdk\" 9999"]);
    with_lines("apart.vmdk", &["RW 10000 FLAT \"d-flat.vmdk\" 0", "RW 10480 FLAT \"d-flat.vmdk\" 10000"]);
    with_lines("mixed.vmdk", &[sparse, "RW 1 FLAT \"d-s001.vmdk\" 0"]);
    for name in ["twice.vmdk", "windows.vmdk", "mixed.vmdk"] {
        let said = run_io(&oracle, "vmdk", name, &["write -P 1 0 64k"]);
        assert!(said.contains("share a part of this file"), "{name}: {said}");
        ours(&oracle, &format!("info -f vmdk {name}"));
    }
    io(&oracle, "vmdk", "apart.vmdk", &["write -P 1 0 10M", "read -P 1 0 10M"]);
}

/// Content ids in other forms than the usual one.
#[test]
fn new_content_id_keeps_the_rest_of_a_descriptor() {
    let oracle = Oracle::new();
    oracle.make("create -q -f vmdk -o subformat=monolithicFlat c.vmdk 1M");
    let text = fs::read_to_string(oracle.work().join("c.vmdk")).unwrap();
    let line = text.lines().find(|line| line.starts_with("CID=")).unwrap().to_owned();
    let value = &line[4..];
    for form in [
        format!("{line}\n{line}"),
        format!("CID={}{value}", "0".repeat(30)),
        format!("CID = {value}"),
        "CID=7".to_owned(),
    ] {
        // The extents come last.
        let extent = "RW 2048 FLAT \"c-flat.vmdk\" 0";
        let other = text.replace(&format!("{extent}\n"), "").replace(&line, &form) + extent + "\n";
        fs::write(oracle.work().join("c.vmdk"), &other).unwrap();
        io(&oracle, "vmdk", "c.vmdk", &["write -P 1 0 64k"]);
        let after = fs::read_to_string(oracle.work().join("c.vmdk")).unwrap();
        assert_ne!(other, after, "{form}");
        assert_eq!(after.matches(extent).count(), 1, "{after}");
        let info = ours(&oracle, "info --output=json -f vmdk c.vmdk");
        let info: serde_json::Value = serde_json::from_str(&info).unwrap();
        assert_eq!(info["virtual-size"], 1 << 20, "{form}");
        io(&oracle, "vmdk", "c.vmdk", &["write -P 2 64k 64k", "read -P 1 0 64k"]);
    }
}

/// Bytes behind the text of a descriptor are no part of it, and don't become one.
#[test]
fn a_new_content_id_changes_nothing_behind_the_text() {
    let oracle = Oracle::new();
    oracle.make("create -q -f vmdk -o subformat=monolithicFlat c.vmdk 1M");
    let text = fs::read_to_string(oracle.work().join("c.vmdk")).unwrap();
    let line = text.lines().find(|line| line.starts_with("CID=")).unwrap().to_owned();
    let mut bytes = text.replace(&line, "CID=54957f4").into_bytes();
    let len = bytes.len();
    bytes.extend_from_slice(b"\0RW 2048 FLAT \"c-flat.vmdk\" 0\n");
    fs::write(oracle.work().join("c.vmdk"), &bytes).unwrap();
    io(&oracle, "vmdk", "c.vmdk", &["write -P 1 0 64k"]);
    let after = fs::read(oracle.work().join("c.vmdk")).unwrap();
    assert!(after.len() == bytes.len() && after[len..] == bytes[len..] && after != bytes);
    let info = ours(&oracle, "info --output=json -f vmdk c.vmdk");
    let info: serde_json::Value = serde_json::from_str(&info).unwrap();
    assert_eq!(info["virtual-size"], 1 << 20);
}

/// The base is opened for reading first, and for writing where the commit begins.
#[test]
fn a_commit_writes_to_bases_of_other_formats() {
    let oracle = Oracle::new();
    for format in ["vmdk", "vdi", "vpc", "vhdx"] {
        let options = if format == "vpc" { "-o force_size=on" } else { "" };
        for (name, tool) in [("real", 0), ("ours", 1)] {
            oracle.make(&format!("create -q -f {format} {options} base.{name} 5M"));
            io(&oracle, format, &format!("base.{name}"), &["write -P 3 1M 1M"]);
            oracle.make(&format!("create -q -f qcow2 -b base.{name} -F {format} top.{name}"));
            io(&oracle, "qcow2", &format!("top.{name}"), &["write -P 5 100k 100k", "write -P 6 2M 1M"]);
            let line = words(&format!("commit top.{name}"));
            let said = if tool == 0 { oracle.real(&oracle.work(), &line) } else { oracle.ours(&oracle.work(), &line) };
            assert_eq!((said.out.as_str(), said.code), ("Image committed.\n", Some(0)), "{format}: {}", said.err);
        }
        oracle.make(&format!("compare -f {format} -F {format} base.real base.ours"));
        oracle.make("compare -f qcow2 -F qcow2 top.real top.ours");
        // It is closed as after any write.
        io(&oracle, format, "base.ours", &["read -P 5 100k 100k", "write -P 7 0 4k", "read -P 6 2M 1M"]);
    }
}

#[test]
fn options_are_taken_as_qemu_takes_them() {
    let oracle = Oracle::new();
    for line in [
        "create -f vmdk -o adapter_type=IDE new 1M",
        "create -f vdi -o preallocation=metadata new 3M",
        "create -f vpc -o preallocation=metadata new 3M",
    ] {
        oracle.compare(line);
    }
    // The descriptor of a disk with a parent.
    oracle.make("create -q -f vmdk base.vmdk 1M");
    let texts = ["real", "ours"].map(|tool| {
        let line = words("create -q -f vmdk -b base.vmdk -F vmdk top.vmdk");
        match tool {
            "real" => oracle.real(&oracle.work(), &line),
            _ => oracle.ours(&oracle.work(), &line),
        };
        let bytes = fs::read(oracle.work().join("top.vmdk")).unwrap();
        let text = String::from_utf8_lossy(&bytes[512..1536]).into_owned();
        let lines: Vec<String> = text.lines().filter(|line| !line.starts_with("CID=")).map(str::to_owned).collect();
        lines
    });
    let [real, ours] = texts;
    assert_eq!(ours[..17], real[..17]);
    oracle.verdict();
}

/// VirtualBox recognises a changed parent by the UUID of its content.
#[test]
fn a_written_vdi_is_no_longer_the_parent_of_a_difference() {
    let verbs: &[(&str, &str)] = &[
        ("io", "write -P 9 3M 64k"),
        ("io", "write -z 0 1M"),
        ("img", "convert -n -f raw -O vdi zeroes.raw folder/parent.vdi"),
        ("img", "commit -f qcow2 top.qcow2"),
    ];
    for (tool, line) in verbs {
        let oracle = Oracle::new();
        fs::create_dir(oracle.work().join("folder")).unwrap();
        oracle.make("create -q -f raw zeroes.raw 4M");
        oracle.make("create -q -f vdi folder/parent.vdi 4M");
        oracle.io(&["write -P 1 0 4M"], "folder/parent.vdi");
        oracle.make("create -q -f vdi child.vdi 4M");
        oracle.make("create -q -f qcow2 -F vdi -b folder/parent.vdi top.qcow2");
        oracle.io(&["write -P 3 1M 64k"], "top.qcow2");
        let path = oracle.work().join("folder/parent.vdi");
        let (parent, mut child) = (fs::read(&path).unwrap(), fs::read(oracle.work().join("child.vdi")).unwrap());
        child[76] = 4;
        child[424..456].copy_from_slice(&parent[392..424]);
        fs::write(oracle.work().join("child.vdi"), &child).unwrap();
        let read = "convert -O raw --image-opts driver=vdi,file.filename=child.vdi,parents.0=folder out";
        io(&oracle, "vdi", "folder/parent.vdi", &["read -P 1 0 4M", "flush"]);
        assert!(fs::read(&path).unwrap() == parent, "an opening without a write changes nothing");
        ours(&oracle, read);
        match *tool {
            "io" => io(&oracle, "vdi", "folder/parent.vdi", &[line]),
            _ => drop(ours(&oracle, line)),
        }
        let after = fs::read(&path).unwrap();
        assert!(after[392..408] == parent[392..408] && after[408..424] != parent[408..424], "{line}");
        let said = oracle.refused(read);
        assert!(said.contains("is not the parent of this disk, or was changed since"), "{line}: {said}");
        oracle.make("check -q -f vdi folder/parent.vdi");
    }
}

#[test]
fn a_difference_of_vdi_names_its_parent_in_info() {
    let oracle = Oracle::new();
    oracle.make("create -q -f vdi child.vdi 4M");
    let mut child = fs::read(oracle.work().join("child.vdi")).unwrap();
    child[76] = 4;
    child[424..440].copy_from_slice(&[0x11; 16]);
    child[440..456].copy_from_slice(&[0x22; 16]);
    fs::write(oracle.work().join("child.vdi"), &child).unwrap();
    let said = ours(&oracle, "info child.vdi");
    assert!(said.contains("parent uuid: 11111111-1111-1111-1111-111111111111"), "{said}");
    assert!(said.contains("parent content uuid: 22222222-2222-2222-2222-222222222222"), "{said}");
    let mut command = Command::new(env!("CARGO_BIN_EXE_cowshed"));
    let output = command.args(["inspect", "child.vdi"]).current_dir(oracle.work()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(said.contains("backing file: a file that it doesn't name (format: vdi)"), "{said}");
}

/// Behind the last cluster of `disk.hds`: a format extension with one bitmap, and the cluster of that bitmap.
pub fn with_extension(oracle: &Oracle, feature_flags: u64) -> Vec<u8> {
    const CLUSTER_BYTES: usize = 64 << 10;
    oracle.make("create -q -f parallels -o cluster_size=64k disk.hds 1M");
    oracle.io(&["write -P 1 0 64k"], "disk.hds");
    let path = oracle.work().join("disk.hds");
    let mut bytes = fs::read(&path).unwrap();
    bytes.resize(bytes.len().next_multiple_of(CLUSTER_BYTES), 0);
    let at = bytes.len();
    let mut bitmap = [2048u64.to_le_bytes(), [0; 8], [0; 8]].concat();
    bitmap.extend([128u32, 1].iter().flat_map(|word| word.to_le_bytes()));
    bitmap.extend(((at + CLUSTER_BYTES) as u64 / 512).to_le_bytes());
    let mut cluster = [0xab23_4cef_23dc_ea87u64.to_le_bytes(), [0; 8], [0; 8]].concat();
    for word in [0x2038_5fae_252c_b34a, feature_flags, bitmap.len() as u64] {
        cluster.extend(word.to_le_bytes());
    }
    cluster.extend(bitmap);
    cluster.resize(CLUSTER_BYTES, 0);
    bytes.extend(cluster);
    bytes.resize(at + 2 * CLUSTER_BYTES, 0x11);
    bytes[44..48].copy_from_slice(&0x312e_3276u32.to_le_bytes());
    bytes[56..64].copy_from_slice(&(at as u64 / 512).to_le_bytes());
    fs::write(&path, &bytes).unwrap();
    bytes
}

/// The bitmaps don't hear of a write: they go, and before the first change.
#[test]
fn a_written_parallels_image_has_no_format_extension() {
    for command in ["write -P 5 128k 64k", "write -P 5 0 4k", "write -z 0 64k"] {
        let oracle = Oracle::new();
        with_extension(&oracle, 0);
        io(&oracle, "parallels", "disk.hds", &[command]);
        let bytes = fs::read(oracle.work().join("disk.hds")).unwrap();
        assert_eq!((&bytes[44..48], &bytes[56..64]), (&[0; 4][..], &[0; 8][..]), "{command}");
        oracle.make("info -f parallels disk.hds");
        // A write in place leaves its clusters as free space at the end.
        ours(&oracle, "check -q -r leaks -f parallels disk.hds");
        oracle.make("check -q -f parallels disk.hds");
    }
}

#[test]
fn a_format_extension_stays_where_nothing_is_written() {
    let oracle = Oracle::new();
    let before = with_extension(&oracle, 0);
    let path = oracle.work().join("disk.hds");
    io(&oracle, "parallels", "disk.hds", &["read 0 64k", "flush"]);
    for line in
        ["check -f parallels disk.hds", "check -r leaks -f parallels disk.hds", "check -r all -f parallels disk.hds"]
    {
        assert!(ours(&oracle, line).contains("No errors were found"), "{line}");
        assert!(fs::read(&path).unwrap() == before, "{line}");
    }
    // Space behind it is free.
    fs::write(&path, [&before[..], &[0; 128 << 10]].concat()).unwrap();
    ours(&oracle, "check -r leaks -f parallels disk.hds");
    assert!(fs::read(&path).unwrap() == before);
    // Another program wrote there.
    let mut bytes = before.clone();
    bytes[128 << 10..][..512].fill(5);
    fs::write(&path, &bytes).unwrap();
    let said = oracle.ours(&oracle.work(), &words("check -f parallels disk.hds"));
    assert!(
        said.code == Some(2) && (said.out.clone() + &said.err).contains("no format extension at sector 256"),
        "{}{}",
        said.out,
        said.err
    );
    ours(&oracle, "check -r all -f parallels disk.hds");
    assert_eq!(fs::read(&path).unwrap()[56..64], [0; 8]);
    oracle.make("info -f parallels disk.hds");
}

#[test]
fn a_necessary_format_extension_forbids_every_write() {
    for flags in [1, 2] {
        let oracle = Oracle::new();
        let before = with_extension(&oracle, flags);
        let said = run_io(&oracle, "parallels", "disk.hds", &["write -P 5 128k 64k"]);
        assert!(said.contains("a format extension that must not be lost"), "{said}");
        let line = words("convert -n -f raw -O parallels source.raw disk.hds");
        oracle.make("create -q -f raw source.raw 1M");
        assert_eq!(oracle.ours(&oracle.work(), &line).code, Some(1));
        ours(&oracle, "check -r all -f parallels disk.hds");
        ours(&oracle, "convert -f parallels -O raw disk.hds out");
        assert!(ours(&oracle, "check -f parallels disk.hds").contains("No errors were found"));
        assert!(fs::read(oracle.work().join("disk.hds")).unwrap() == before);
    }
}

/// The old magic counts sectors, so clusters can lie on each other in part.
#[test]
fn repaired_parallels_clusters_that_overlap_keep_their_data() {
    const CLUSTER: u32 = 2 << 20;
    let oracle = Oracle::new();
    let cases: [(&[u32], usize); 3] =
        [(&[2048, 4096], 1), (&[2048, 4096, 5120], 2), (&[6144, 4096, 2048, 2048, 7168], 3)];
    for (starts, twins) in cases {
        let mut image = b"WithoutFreeSpace".to_vec();
        let sectors = CLUSTER / 512;
        for word in [2, 16, 1, sectors, starts.len() as u32, sectors * starts.len() as u32] {
            image.extend(u32::to_le_bytes(word));
        }
        image.resize(64, 0);
        image.extend(starts.iter().flat_map(|start: &u32| start.to_le_bytes()));
        image.resize(1 << 20, 0);
        image.extend((0..7 << 20).map(|byte: u32| (byte >> 18) as u8 + 1));
        fs::write(oracle.work().join("twins.hds"), &image).unwrap();
        ours(&oracle, "convert -f parallels -O raw twins.hds before");
        let said = oracle.ours(&oracle.work(), &words("check -f parallels twins.hds"));
        let found = said.err.lines().filter(|line| line.contains("is in use already")).count();
        assert_eq!((said.code, found), (Some(2), twins), "{starts:?}: {}", said.err);
        ours(&oracle, "check -r all -f parallels twins.hds");
        oracle.make("check -q -f parallels twins.hds");
        ours(&oracle, "convert -f parallels -O raw twins.hds after");
        let [before, after] = ["before", "after"].map(|name| fs::read(oracle.work().join(name)).unwrap());
        assert!(before == after, "{starts:?}");
    }
}
