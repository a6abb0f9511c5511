// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Packages of virtual machines at their edges: names, empty disks, other verbs, parts left out or not compared.

use super::ova::{changed, cowshed, disks, names, ok, refused, run, tool};
use crate::oracle::{Oracle, words};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;

/// A package of raw disks, written by hand: `m.ova`, and the folder `m`. Each disk has its reference in the descriptor, and its name.
fn raw_package(oracle: &Oracle, disks: &[(&str, &str, &[u8])]) {
    let folder = oracle.work().join("m");
    fs::create_dir_all(&folder).unwrap();
    let (mut files, mut list) = (String::new(), String::new());
    for (number, (href, name, bytes)) in disks.iter().enumerate() {
        let len = bytes.len();
        files += &format!("<File ovf:href=\"{href}\" ovf:id=\"f{number}\" ovf:size=\"{len}\"/>");
        list += &format!(
            "<Disk ovf:capacity=\"{len}\" ovf:diskId=\"d{number}\" ovf:fileRef=\"f{number}\" ovf:format=\"http://x/raw\"/>"
        );
        fs::write(folder.join(name), bytes).unwrap();
    }
    let ovf = format!(
        "<Envelope xmlns=\"http://schemas.dmtf.org/ovf/envelope/1\" xmlns:ovf=\"http://schemas.dmtf.org/ovf/envelope/1\">\
         <References>{files}</References><DiskSection><Info/>{list}</DiskSection></Envelope>"
    );
    fs::write(folder.join("m.ovf"), ovf).unwrap();
    pack(oracle, &disks.iter().map(|(_, name, _)| *name).collect::<Vec<_>>());
}

/// Packs the folder `m` by tar.
fn pack(oracle: &Oracle, files: &[&str]) {
    let arguments = ["--format=ustar", "-C", "m", "-cf", "m.ova", "m.ovf"].iter().chain(files);
    let said = run(oracle, "tar", &arguments.map(|text| (*text).to_owned()).collect::<Vec<_>>());
    assert_eq!(said.code, Some(0), "{said:?}");
}

/// Its archive is no disk.
#[test]
fn only_a_conversion_takes_a_package() {
    let oracle = disks();
    raw_package(&oracle, &[("a.raw", "a.raw", &[7; 4096])]);
    fs::copy(oracle.work().join("m.ova"), oracle.work().join("other.tar")).unwrap();
    let before = fs::read(oracle.work().join("m.ova")).unwrap();
    for file in ["m.ova", "m/m.ovf", "other.tar", "file:m.ova"] {
        for line in [
            "info FILE",
            "check FILE",
            "map FILE",
            "measure FILE",
            "compare FILE b.raw",
            "compare b.raw FILE",
            "dd if=FILE of=out.raw",
            "bench FILE",
            "resize FILE +1M",
            "snapshot -l FILE",
            "commit FILE",
            "rebase -u -b b.raw -F raw FILE",
            "amend -o compat=1.1 FILE",
            "bitmap --add FILE x",
            "io -c length FILE",
            "inspect FILE",
        ] {
            if file.starts_with("file:") && line.starts_with("inspect") {
                continue;
            }
            let said = cowshed(&oracle, &line.replace("FILE", file));
            assert!(
                said.code != Some(0) && said.err.contains("a package of a virtual machine"),
                "{line} {file}: {said:?}"
            );
        }
    }
    assert!(!oracle.work().join("out.raw").exists());
    assert!(before == fs::read(oracle.work().join("m.ova")).unwrap());
    // A format from the user is that of the file, and QEMU has no packages.
    assert!(ok(&oracle, "info -f raw m.ova").contains("raw"));
    let said = oracle.ours(&oracle.work(), &words("info m.ova"));
    assert!(said.code == Some(0) && said.out.contains("file format: raw"), "{said:?}");
}

#[test]
fn names_in_descriptors_are_those_of_uris() {
    let oracle = Oracle::new();
    raw_package(&oracle, &[("my%20disk.raw", "my disk.raw", &[1; 512]), ("50%25.raw", "50%25.raw", &[2; 512])]);
    for package in ["m.ova", "m/m.ovf"] {
        for (disk, byte) in [(1, 1), (2, 2)] {
            ok(&oracle, &format!("convert -q --force --disk {disk} -O raw {package} out.raw"));
            assert_eq!(fs::read(oracle.work().join("out.raw")).unwrap(), [byte; 512], "{package} {disk}");
        }
    }
    // A name that leads elsewhere, once decoded.
    raw_package(&oracle, &[("%2e%2e%2fx", "x", &[1; 512])]);
    refused(&oracle, "convert -q -O raw m.ova no.raw", &["lacks '%2e%2e%2fx'"]);
    // A name that the package writes means the same file, decoded or not.
    let oracle = disks();
    let line = ["convert", "-q", "-O", "ova", "b.raw", "a 50%25\u{e4}#?.ova"].map(str::to_owned);
    let said = run(&oracle, env!("CARGO_BIN_EXE_cowshed"), &line);
    assert_eq!(said.code, Some(0), "{said:?}");
    fs::rename(oracle.work().join("a 50%25\u{e4}#?.ova"), oracle.work().join("n.ova")).unwrap();
    assert_eq!(tool(&oracle, "tar", "-tf n.ova"), "a_50_25___.ovf\na_50_25___.mf\na_50_25___-disk1.vmdk\n");
    assert!(ok(&oracle, "ova verify n.ova").contains("nothing wrong"));
    assert!(ok(&oracle, "ova info n.ova").contains("machine: a 50%25\u{e4}#?"));
}

#[test]
fn impossible_machine_is_refused_before_copying_disks() {
    let oracle = disks();
    let long = "n".repeat(96);
    // The missing sources would be reported next.
    for (line, words) in [
        (format!("convert -O ova {} m.ova", "missing.raw ".repeat(16)), "up to 15 disks"),
        (format!("convert -O ova --vm-name x missing.raw {long}.ova"), "longer than 100 bytes"),
    ] {
        refused(&oracle, &line, &[words]);
        assert_eq!(names(&oracle.work()), ["a.qcow2", "b.raw"]);
    }
}

#[test]
fn a_disk_without_a_byte_is_for_no_machine() {
    let oracle = Oracle::new();
    fs::write(oracle.work().join("e.img"), "").unwrap();
    for line in [
        "convert -O ova e.img e.ova",
        "convert -O ova --for vmware e.img e.ova",
        "convert --for azure e.img e.vhd",
        "convert --for hyperv e.img e.vhdx",
        "convert --for vmware e.img e.vmdk",
        "convert --for virtualbox e.img e.vdi",
        "convert --for aws e.img e.vmdk",
        "convert --for gcp e.img e.tar.gz",
    ] {
        refused(&oracle, line, &["e.img: the disk is empty (0 bytes)"]);
        assert_eq!(names(&oracle.work()), ["e.img"], "{line}");
    }
    ok(&oracle, "convert -q -O vdi e.img e.vdi");
}

#[test]
fn a_conversion_tells_what_it_could_not_compare() {
    let oracle = disks();
    raw_package(&oracle, &[("a.raw", "a.raw", &[7; 4096])]);
    let said = cowshed(&oracle, "convert -q -O raw m.ova out.raw");
    assert!(said.code == Some(0) && said.err.contains("warning: m.ova: disk 'a.raw' is unchecked"), "{said:?}");
    ok(&oracle, "convert -q -O ova a.qcow2 n.ova");
    let said = cowshed(&oracle, "convert -q -O raw n.ova out2.raw");
    assert!(said.code == Some(0) && said.err.is_empty(), "{said:?}");
    // A length that is rounded up for a platform draws no warning.
    let said = cowshed(&oracle, "convert -q --for azure m.ova p.vhd");
    assert!(said.code == Some(0) && !said.err.contains("package says"), "{said:?}");
    ok(&oracle, "convert -q --force -O ova a.qcow2 m.ova");
    changed(&oracle, |ovf| ovf.replace("capacity=\"10485760\"", "capacity=\"10485761\""));
    let said = cowshed(&oracle, "convert -q --for azure changed.ova q.vhd");
    assert!(said.err.contains("has 10485760 bytes, and its package says 10485761"), "{said:?}");
}

#[test]
fn a_signature_goes_with_its_manifest() {
    let oracle = disks();
    ok(&oracle, "convert -q -O ova a.qcow2 m.ova");
    ok(&oracle, "ova unpack m.ova m");
    fs::write(oracle.work().join("m/m.CERT"), "x").unwrap();
    let said = ok(&oracle, "ova verify m/m.ovf");
    assert!(said.contains("warning: the signature isn't checked"), "{said}");
    let said = cowshed(&oracle, "ova pack m/m.ovf n.ova");
    assert!(said.code == Some(0) && said.err.contains("warning: m.CERT is left out"), "{said:?}");
    assert_eq!(said.out, "n.ova: 3 files\n");
    assert_eq!(tool(&oracle, "tar", "-tf n.ova"), "m.ovf\nm.mf\nm-disk1.vmdk\n");
    // In an archive it is a file as the others.
    pack(&oracle, &["m.mf", "m.CERT", "m-disk1.vmdk"]);
    assert_eq!(ok(&oracle, "ova unpack m.ova two"), "two: 4 files\n");
}

#[test]
fn zeroes_of_an_archive_become_holes() {
    let oracle = Oracle::new();
    let mut disk = vec![0; 8 << 20];
    disk[5 << 20] = 1;
    raw_package(&oracle, &[("a.raw", "a.raw", &disk)]);
    ok(&oracle, "ova unpack m.ova two");
    let path = oracle.work().join("two/a.raw");
    assert!(fs::read(&path).unwrap() == disk);
    let allocated = fs::metadata(&path).unwrap().blocks() * 512;
    assert!(allocated <= 128 << 10, "{allocated} bytes");
    assert_eq!(names(&oracle.work().join("two")), ["a.raw", "m.ovf"]);
}

#[test]
fn pieces_are_not_put_together_beside_a_device() {
    let oracle = Oracle::new();
    raw_package(&oracle, &[("a.raw\" ovf:chunkSize=\"512", "a.raw.000000000", &[7; 512])]);
    let output = Command::new(env!("CARGO_BIN_EXE_cowshed"))
        .args(["convert", "-n", "-O", "raw", "m.ova", "/dev/null"])
        .current_dir(oracle.work())
        .env("TMPDIR", "/missing")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    // One piece of whole sectors is read where it is.
    assert!(!said.contains("/missing"), "{said}");
    raw_package(&oracle, &[("a.raw", "a.raw", &[7; 513])]);
    let output = Command::new(env!("CARGO_BIN_EXE_cowshed"))
        .args(["convert", "-n", "-O", "raw", "m.ova", "/dev/null"])
        .current_dir(oracle.work())
        .env("TMPDIR", "/missing")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("/missing"), "{said}");
}

#[test]
fn files_that_are_no_archive_are_told_by_what_they_are() {
    let oracle = disks();
    ok(&oracle, "convert -q -O ova b.raw m.ova");
    tool(&oracle, "gzip", "-k m.ova");
    fs::rename(oracle.work().join("m.ova.gz"), oracle.work().join("gz.ova")).unwrap();
    fs::write(oracle.work().join("zero.ova"), "").unwrap();
    for verb in ["ova info FILE", "ova verify FILE", "ova unpack FILE x", "convert -O raw FILE x"] {
        refused(&oracle, &verb.replace("FILE", "gz.ova"), &["compressed with gzip"]);
        refused(&oracle, &verb.replace("FILE", "zero.ova"), &["the file is empty"]);
    }
    changed(&oracle, |ovf| ovf.replace(" ovf:size=", " ovf:compression=\"gzip\" ovf:size="));
    refused(&oracle, "convert -O raw changed.ova x", &["isn't stored with gzip"]);
    changed(&oracle, |ovf| ovf.replace(" ovf:size=", " ovf:compression=\"gzip\" other="));
    tool(&oracle, "gzip", "changed/m-disk1.vmdk");
    let disk = oracle.work().join("changed/m-disk1.vmdk");
    fs::rename(disk.with_extension("vmdk.gz"), disk).unwrap();
    tool(&oracle, "tar", "--format=ustar -C changed -cf changed.ova m.ovf m-disk1.vmdk");
    refused(&oracle, "convert -O raw changed.ova x", &["is stored with gzip", "gunzip"]);
    // A folder, from a process that may open no other file.
    ok(&oracle, "ova unpack m.ova m");
    refused(&oracle, "convert --untrusted -O raw m/m.ovf x", &["takes a package in one file"]);
    assert!(!Path::new(&oracle.work().join("x")).exists());
}

#[test]
fn errors_of_writing_name_the_target_and_leave_nothing() {
    let oracle = Oracle::new();
    let noise: Vec<u8> = (0u32..200_000).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
    let noise = &noise[..noise.len() / 512 * 512];
    raw_package(&oracle, &[("a.raw", "a.raw", noise)]);
    let before = names(&oracle.work());
    for (line, named) in [
        ("ova pack m/m.ovf n.ova", "n.ova: "),
        ("ova unpack m.ova to", "to/a.raw: "),
        ("convert -O ova m/a.raw n.ova", "n.ova"),
        ("convert --for gcp m/a.raw n.tar.gz", "n.tar.gz"),
    ] {
        // A file of 64 KiB at most; its signal is ignored.
        let limited = format!("ulimit -f 128; trap '' XFSZ; exec {} {line}", env!("CARGO_BIN_EXE_cowshed"));
        let output = Command::new("sh").args(["-c", &limited]).current_dir(oracle.work()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{line}: {said}");
        assert!(said.contains(named) && said.contains("File too large") && !said.contains(".part"), "{line}: {said}");
        assert_eq!(names(&oracle.work()), before, "{line}");
    }
}

#[test]
fn odd_lengths_and_wrong_compression_are_named() {
    let oracle = disks();
    raw_package(&oracle, &[("a.raw", "a.raw", &[7; 1000])]);
    ok(&oracle, "convert -q -O raw m.ova out.raw");
    assert_eq!(fs::read(oracle.work().join("out.raw")).unwrap()[..1000], [7; 1000]);
    refused(&oracle, "convert --untrusted -O raw m.ova x", &["no whole number of sectors (1000 bytes)", "unpack it"]);
    let path = oracle.work().join("m/m.ovf");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replace("ovf:id=", "ovf:compression=\"gzip\" ovf:id=")).unwrap();
    pack(&oracle, &["a.raw"]);
    for line in ["convert -O raw m.ova x", "convert --untrusted -O raw m.ova x"] {
        refused(&oracle, line, &["'a.raw' isn't stored with gzip", "ovf:compression"]);
    }
    fs::write(&path, text.replace("ovf:id=", "ovf:compression=\"identity\" ovf:id=")).unwrap();
    pack(&oracle, &["a.raw"]);
    ok(&oracle, "convert -q --force -O raw m.ova out.raw");
    assert!(!oracle.work().join("x").exists());
}

/// The schemas of DMTF can't be copied here: `ovf_schema.py` has their rules for the elements that a package may have.
#[test]
fn descriptors_of_new_packages_have_the_structure_of_the_schema() {
    let oracle = disks();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cli/ovf_schema.py");
    let check = |name: &str| tool(&oracle, "python3", &format!("{} {name}", script.display()));
    for options in [
        "a.qcow2",
        "--for vmware --vm-firmware efi a.qcow2 b.raw",
        "--for virtualbox --vm-network none a.qcow2",
        "--for virtualbox --vm-cpus 2 --vm-memory 512M a.qcow2 b.raw b.raw",
        "--for both --vm-name 'a&b<c>' --vm-network lan --vm-network 'wan&' --vm-network lan b.raw",
    ] {
        ok(&oracle, &format!("convert --force -q -O ova {options} m.ova"));
        tool(&oracle, "tar", "-xf m.ova m.ovf");
        assert_eq!(check("m.ovf"), "\n", "{options}");
    }
    // It sees faults.
    let ovf = fs::read_to_string(oracle.work().join("m.ovf")).unwrap();
    for (from, to, fault) in [
        ("<rasd:InstanceID>4</rasd:InstanceID>", "", "Item has 0 of InstanceID"),
        ("ovf:diskId=", "ovf:diskID=", "Disk lacks the attribute diskId"),
        ("<References>", "<NetworkSection><Info/></NetworkSection><References>", "Envelope have another order"),
        ("<rasd:Parent>3", "<rasd:Parent>99", "a Parent is no instance"),
        ("</Info>", "</Info><Info/>", "has 2 of Info"),
    ] {
        fs::write(oracle.work().join("bad.ovf"), ovf.replacen(from, to, 1)).unwrap();
        let said = check("bad.ovf");
        assert!(said.contains(fault), "{fault}: {said}");
    }
}
