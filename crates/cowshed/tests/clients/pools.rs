// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Libvirt's storage pools, whose volumes `qemu-img` makes, copies, resizes and encrypts.

use super::libvirt::Libvirt;
use super::tools::text;
use cowshed_testkit::qemu::Qemu;
use std::fs;
use std::path::Path;

const SECRET: &str = "0a81f5b2-8403-7b23-c8d6-21ccc2f80d6f";

/// The lines of a volume's description that don't differ from run to run.
fn description(libvirt: &Libvirt, volume: &str) -> Vec<String> {
    let xml = libvirt.virsh(&["vol-dumpxml", "--pool", "p", volume]);
    let folder = text(&libvirt.path("")).to_owned();
    let differs = ["<allocation", "<physical", "time>", "<key>"];
    let lines = xml.lines().filter(|line| !differs.iter().any(|start| line.contains(start)));
    lines.map(|line| line.replace(&folder, "")).collect()
}

/// Formats of other programs.
const OTHERS: [&str; 5] = ["vmdk", "vdi", "vpc", "qed", "qcow"];

/// The story of a pool; returns libvirt's descriptions of its volumes.
fn use_pool(libvirt: &Libvirt) -> Vec<String> {
    let pool = format!(
        "<pool type='dir'><name>p</name><target><path>{}</path></target></pool>",
        libvirt.path("pool").display()
    );
    let pool = libvirt.write("pool.xml", &pool);
    libvirt.virsh(&["pool-define", &pool]);
    libvirt.virsh(&["pool-start", "p"]);
    libvirt.virsh(&["vol-create-as", "p", "base.qcow2", "16M", "--format", "qcow2"]);
    libvirt.virsh(&["vol-create-as", "p", "full.qcow2", "4M", "--allocation", "4M", "--format", "qcow2"]);
    libvirt.virsh(&["vol-create-as", "p", "plain.raw", "8M", "--format", "raw"]);
    for format in OTHERS {
        libvirt.virsh(&["vol-create-as", "p", &format!("disk.{format}"), "8M", "--format", format]);
    }
    let backing = ["--backing-vol", "base.qcow2", "--backing-vol-format", "qcow2"];
    libvirt.virsh(&[&["vol-create-as", "p", "child.qcow2", "16M", "--format", "qcow2"], &backing[..]].concat());

    let data: Vec<u8> = (0..3_000_000u32).map(|at| (at / 7) as u8).collect();
    let file = libvirt.path("data");
    fs::write(&file, &data).expect("a file");
    libvirt.virsh(&["vol-upload", "--pool", "p", "plain.raw", text(&file)]);
    libvirt.virsh(&["vol-clone", "--pool", "p", "plain.raw", "copy.raw"]);
    let to_qcow2 = "<volume><name>copy.qcow2</name><capacity unit='M'>8</capacity><target><format type='qcow2'/></target></volume>";
    let to_qcow2 = libvirt.write("copy.xml", to_qcow2);
    libvirt.virsh(&["vol-create-from", "p", &to_qcow2, "--inputpool", "p", "plain.raw"]);
    libvirt.virsh(&["vol-clone", "--pool", "p", "copy.qcow2", "clone.qcow2"]);
    libvirt.virsh(&["vol-resize", "--pool", "p", "clone.qcow2", "12M"]);
    libvirt.virsh(&["vol-resize", "--pool", "p", "copy.raw", "10M"]);
    let back = libvirt.path("images/back");
    libvirt.virsh(&["vol-download", "--pool", "p", "copy.raw", text(&back), "--length", "3000000"]);
    assert!(fs::read(&back).expect("a file") == data, "the clone holds what was uploaded");

    let secret = format!(
        "<secret ephemeral='no' private='yes'><uuid>{SECRET}</uuid><usage type='volume'><volume>v</volume></usage></secret>"
    );
    let secret = libvirt.write("secret.xml", &secret);
    libvirt.virsh(&["secret-define", &secret]);
    // "cowshed" in base64.
    libvirt.virsh(&["secret-set-value", SECRET, "Y293c2hlZA=="]);
    for format in ["raw", "qcow2"] {
        let volume = format!(
            "<volume><name>locked.{format}</name><capacity unit='M'>8</capacity><target><format type='{format}'/>
             <encryption format='luks'><secret type='passphrase' uuid='{SECRET}'/></encryption></target></volume>"
        );
        let volume = libvirt.write("locked.xml", &volume);
        libvirt.virsh(&["vol-create", "p", &volume]);
    }
    libvirt.virsh(&["vol-resize", "--pool", "p", "locked.raw", "10M"]);
    libvirt.virsh(&["vol-delete", "--pool", "p", "full.qcow2"]);
    libvirt.virsh(&["pool-refresh", "p"]);
    let others = OTHERS.map(|format| format!("disk.{format}"));
    let mut volumes = vec![
        "base.qcow2",
        "child.qcow2",
        "plain.raw",
        "copy.raw",
        "copy.qcow2",
        "clone.qcow2",
        "locked.raw",
        "locked.qcow2",
    ];
    volumes.extend(others.iter().map(String::as_str));
    let listed = libvirt.virsh(&["vol-list", "p"]);
    assert_eq!(listed.lines().filter(|line| !line.trim().is_empty()).count(), volumes.len(), "{listed}");
    volumes.iter().flat_map(|volume| description(libvirt, volume)).collect()
}

fn content(image: &Path, qemu: &Qemu) -> Vec<u8> {
    let raw = image.with_extension("content");
    qemu.img(["convert", "-O", "raw", text(image), text(&raw)]).expect_ok();
    let content = fs::read(&raw).expect("a file");
    fs::remove_file(raw).expect("a file");
    content
}

#[test]
fn pools_of_libvirt_are_the_same_with_our_tools() {
    let (ours, theirs) = (Libvirt::start(true), Libvirt::start(false));
    let (said, expected) = (use_pool(&ours), use_pool(&theirs));
    assert_eq!(said, expected);
    let qemu = Qemu::system();
    for volume in ["base.qcow2", "child.qcow2", "copy.qcow2", "clone.qcow2"] {
        let (left, right) = (ours.path("pool").join(volume), theirs.path("pool").join(volume));
        assert!(content(&left, &qemu) == content(&right, &qemu), "{volume}");
        qemu.expect_clean(&left);
    }
    for format in OTHERS {
        let disk = ours.path("pool").join(format!("disk.{format}"));
        qemu.img(["info", "-f", format, text(&disk)]).expect_ok();
        let bytes = content(&disk, &qemu);
        assert!(bytes.len() >= 8 << 20 && bytes.iter().all(|byte| *byte == 0), "{format}");
    }
    for volume in ["plain.raw", "copy.raw"] {
        let read = |libvirt: &Libvirt| fs::read(libvirt.path("pool").join(volume)).expect("a volume");
        assert!(read(&ours) == read(&theirs), "{volume}");
    }
    // Each one opens the images that the other encrypts.
    for (volume, options) in [
        ("locked.raw", "driver=luks,key-secret=s,file.filename="),
        ("locked.qcow2", "driver=qcow2,encrypt.key-secret=s,file.filename="),
    ] {
        let image = format!("{options}{}", ours.path("pool").join(volume).display());
        let secret = ["--object", "secret,id=s,data=cowshed"];
        qemu.img(["check", secret[0], secret[1], "--image-opts", &image]);
        let copy = ours.path("images").join(volume);
        qemu.img(["convert", secret[0], secret[1], "--image-opts", &image, "-O", "raw", text(&copy)]).expect_ok();
        let bytes = fs::read(&copy).expect("a copy");
        assert_eq!(bytes.len(), if volume == "locked.raw" { 10 << 20 } else { 8 << 20 });
    }
}
