// SPDX-License-Identifier: Apache-2.0 OR MIT
//! VDI disks that grow, read by QEMU afterwards.

use crate::oracle::{Oracle, ours, words};
use crate::written_edges::run_io;
use std::fs;

/// A map with room for more blocks, and one that has to move: QEMU's has 128 entries in a sector.
#[test]
fn grown_vdi_holds_what_it_held_and_zeroes() {
    for options in ["", "-o static=on "] {
        let oracle = Oracle::new();
        oracle.make(&format!("create -q -f vdi {options}disk.vdi 2560k"));
        oracle.io(&["write -P 1 0 1M", "write -P 2 2M 512k"], "disk.vdi");
        let mut model = vec![1; 1 << 20];
        model.resize(2 << 20, 0);
        model.resize(2560 << 10, 2);
        for (size, bytes) in [("2561k", 2561 << 10), ("5M", 5 << 20), ("+1M", 6 << 20), ("150M", 150 << 20)] {
            ours(&oracle, &format!("resize -f vdi disk.vdi {size}"));
            model.resize(bytes, 0);
            fs::write(oracle.work().join("model"), &model).unwrap();
            oracle.make("check -q -f vdi disk.vdi");
            oracle.make("compare -q -f vdi -F raw disk.vdi model");
            ours(&oracle, "compare -f vdi -F raw disk.vdi model");
        }
        // Both write on: a new block of QEMU's stands where no other one is.
        oracle.io(&["write -P 3 149M 1M", "write -P 4 1M 64k"], "disk.vdi");
        ours(&oracle, "resize -f vdi disk.vdi 300M");
        model[149 << 20..].fill(3);
        model[1 << 20..(1 << 20) + (64 << 10)].fill(4);
        model.resize(300 << 20, 0);
        fs::write(oracle.work().join("model"), &model).unwrap();
        oracle.make("compare -q -f vdi -F raw disk.vdi model");
        oracle.make("check -q -f vdi disk.vdi");
        ours(&oracle, "check -f vdi disk.vdi");
    }
}

/// At once, not only when it is opened again.
#[test]
fn grown_vdi_has_whole_sectors() {
    let oracle = Oracle::new();
    oracle.make("create -q -f vdi disk.vdi 3M");
    let said = run_io(
        &oracle,
        "vdi",
        "disk.vdi",
        &["truncate 4194305", "length", "write -P 5 4194304 512", "read -P 5 4194304 512"],
    );
    assert!(said.contains("wrote 512/512") && !said.contains("failed"), "{said}");
    let header = fs::read(oracle.work().join("disk.vdi")).unwrap();
    assert_eq!(header[368..376], (4_194_304_u64 + 512).to_le_bytes());
}

#[test]
fn vdi_that_can_not_grow_stays_as_it_was() {
    let oracle = Oracle::new();
    oracle.make("create -q -f vdi disk.vdi 3M");
    oracle.io(&["write -P 1 0 1M"], "disk.vdi");
    let before = fs::read(oracle.work().join("disk.vdi")).unwrap();
    for (line, part) in [
        ("resize -f vdi --shrink disk.vdi 1M", "Shrinking images is currently not supported"),
        ("resize -f vdi disk.vdi 1M", "--shrink"),
        ("resize -f vdi --preallocation=full disk.vdi 5M", "Unsupported preallocation mode 'full'"),
        ("resize -f vdi disk.vdi 1E", "Unsupported VDI image size"),
    ] {
        let message = oracle.refused(line);
        assert!(message.contains(part), "{line}: {message}");
        assert!(fs::read(oracle.work().join("disk.vdi")).unwrap() == before, "{line}");
    }
}

/// The folders of the option hold for the whole chain.
#[test]
fn chain_of_vdi_differences_is_told_and_mapped() {
    let oracle = Oracle::new();
    for (name, write) in [("base", "write -P 1 0 1M"), ("middle", "write -P 2 1M 1M"), ("top", "write -P 3 2M 1M")] {
        oracle.make(&format!("create -q -f vdi {name}.vdi 4M"));
        oracle.io(&[write], &format!("{name}.vdi"));
    }
    let mut below = fs::read(oracle.work().join("base.vdi")).unwrap();
    for name in ["middle.vdi", "top.vdi"] {
        let mut bytes = fs::read(oracle.work().join(name)).unwrap();
        bytes[76] = 4;
        bytes[424..456].copy_from_slice(&below[392..424]);
        fs::write(oracle.work().join(name), &bytes).unwrap();
        below = bytes;
    }
    let image = "--image-opts driver=vdi,file.filename=top.vdi,parents.0=.";
    let info = ours(&oracle, &format!("info --output=json --backing-chain {image}"));
    let layers: serde_json::Value = serde_json::from_str(&info).unwrap();
    let names: Vec<&str> = layers.as_array().unwrap().iter().map(|layer| layer["filename"].as_str().unwrap()).collect();
    assert_eq!(names, ["top.vdi", "./middle.vdi", "./base.vdi"], "{info}");
    assert_eq!(layers[0]["full-backing-filename"], "./middle.vdi", "{info}");
    assert_eq!(layers[1]["full-backing-filename"], "./base.vdi", "{info}");
    assert!(layers[2]["full-backing-filename"].is_null(), "{info}");
    let map = ours(&oracle, &format!("map {image}"));
    for name in ["top.vdi", "middle.vdi", "base.vdi"] {
        assert!(map.contains(name), "{map}");
    }
    // Without a folder it is one layer that names what it stands on.
    let info = ours(&oracle, "info --backing-chain -f vdi top.vdi");
    assert_eq!(info.matches("file format: vdi").count(), 1, "{info}");
    // A parent that isn't there is told of.
    fs::remove_file(oracle.work().join("base.vdi")).unwrap();
    let message = oracle.refused(&format!("info --backing-chain {image}"));
    assert!(message.contains("is the parent of this disk"), "{message}");
}

/// The map of the base has room for the blocks of the overlay, or has to move.
#[test]
fn a_commit_lengthens_a_vdi_base() {
    for (size, options) in [(100 << 20, ""), (150 << 20, ""), (1500 << 20, ""), (150 << 20, "-o static=on ")] {
        let oracle = Oracle::new();
        oracle.make(&format!("create -q -f vdi {options}base.vdi 2560k"));
        oracle.io(&["write -P 1 0 1M", "write -P 2 2M 512k"], "base.vdi");
        oracle.make(&format!("create -q -f qcow2 -b base.vdi -F vdi top.qcow2 {size}"));
        let last = format!("write -P 5 {} 1M", size - (1 << 20));
        oracle.io(&["write -P 3 64k 64k", "write -P 4 2500k 3M", &last], "top.qcow2");
        oracle.make("convert -f qcow2 -O raw top.qcow2 model");
        ours(&oracle, "commit -q top.qcow2");
        for image in ["base.vdi", "top.qcow2"] {
            oracle.make(&format!("compare -q -F raw {image} model"));
            ours(&oracle, &format!("compare -q -F raw {image} model"));
            oracle.make(&format!("check -q {image}"));
            ours(&oracle, &format!("check {image}"));
        }
    }
}

/// Others can't be longer. A commit is refused before anything changes.
#[test]
fn a_commit_to_a_base_that_can_not_grow_changes_nothing() {
    for format in ["vpc", "vhdx", "qcow", "parallels", "vmdk"] {
        let oracle = Oracle::new();
        oracle.make(&format!("create -q -f {format} base 4M"));
        oracle.io(&["write -P 1 0 1M"], "base");
        oracle.make(&format!("create -q -f qcow2 -b base -F {format} top.qcow2 64M"));
        oracle.io(&["write -P 3 64k 64k", "write -P 4 63M 1M"], "top.qcow2");
        oracle.make("convert -f qcow2 -O raw top.qcow2 model");
        let before = fs::read(oracle.work().join("base")).unwrap();
        let said = oracle.ours(&oracle.work(), &words("commit top.qcow2"));
        let real = oracle.real(&oracle.work(), &words("commit top.qcow2"));
        assert_eq!((said.code, real.code), (Some(1), Some(1)), "{format}: {}{}", said.err, real.err);
        // QEMU can't reopen Parallels images.
        if format != "parallels" {
            assert_eq!(said.err, real.err, "{format}");
        }
        assert!(fs::read(oracle.work().join("base")).unwrap() == before, "{format}");
        oracle.make("compare -q -F raw top.qcow2 model");
        ours(&oracle, "compare -q -F raw top.qcow2 model");
    }
}
