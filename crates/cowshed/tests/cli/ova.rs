// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Packages of virtual machines: made, looked at, and read as sources of conversions.

use crate::oracle::{Oracle, words};
use cowshed_testkit::programs::{Said, finish};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Two disks with content, `a.qcow2` and `b.raw`.
pub(super) fn disks() -> Oracle {
    let oracle = Oracle::new();
    oracle.make("create -q -f qcow2 a.qcow2 10M");
    oracle.io(&["write -P 0x11 1M 2M", "write -P 0x22 7M 64k"], "a.qcow2");
    oracle.make("create -q -f raw b.raw 3M");
    oracle.io(&["write -P 0x33 100k 5k"], "b.raw");
    oracle
}

pub(super) fn run(oracle: &Oracle, program: &str, arguments: &[String]) -> Said {
    finish(Command::new(program).args(arguments).current_dir(oracle.work()))
}

pub(super) fn cowshed(oracle: &Oracle, line: &str) -> Said {
    run(oracle, env!("CARGO_BIN_EXE_cowshed"), &words(line))
}

#[track_caller]
pub(super) fn ok(oracle: &Oracle, line: &str) -> String {
    let said = cowshed(oracle, line);
    assert_eq!(said.code, Some(0), "{line}: {said:?}");
    said.out
}

/// Refused in one line that has these words.
#[track_caller]
pub(super) fn refused(oracle: &Oracle, line: &str, words: &[&str]) -> String {
    let said = cowshed(oracle, line);
    assert_eq!(said.code, Some(1), "{line}: {said:?}");
    assert!(!said.err.contains("panicked"), "{line}: {said:?}");
    let lines: Vec<&str> = said.err.lines().filter(|line| !line.starts_with("Try 'cowshed")).collect();
    assert_eq!(lines.len(), 1, "{line}: {said:?}");
    for word in words {
        assert!(said.err.contains(word), "{line}: no '{word}' in {said:?}");
    }
    said.err
}

#[track_caller]
pub(super) fn tool(oracle: &Oracle, program: &str, line: &str) -> String {
    let said = run(oracle, program, &words(line));
    assert_eq!(said.code, Some(0), "{program} {line}: {said:?}");
    said.out
}

pub(super) fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = entries.collect();
    names.sort();
    names
}

/// Unpacks `m.ova`, changes its descriptor, and packs it with tar, without a manifest.
pub(super) fn changed(oracle: &Oracle, change: impl FnOnce(&str) -> String) -> PathBuf {
    let folder = oracle.work().join("changed");
    let _ = fs::remove_dir_all(&folder);
    ok(oracle, "ova unpack m.ova changed");
    let path = folder.join("m.ovf");
    let text = fs::read_to_string(&path).unwrap();
    let new = change(&text);
    assert_ne!(new, text, "nothing was changed");
    fs::write(&path, new).unwrap();
    fs::remove_file(folder.join("m.mf")).unwrap();
    let mut files = names(&folder);
    files.sort_by_key(|name| !name.ends_with(".ovf"));
    tool(oracle, "tar", &format!("--format=ustar -C changed -cf changed.ova {}", files.join(" ")));
    oracle.work().join("changed.ova")
}

/// The lines of a descriptor that ESXi asks for, and QEMU leaves out.
#[track_caller]
pub(super) fn expect_vmware_ids(text: &str) {
    let value = |key: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(key)).unwrap_or_else(|| panic!("no {key} in {text}"));
        line.trim_matches([' ', '=', '"']).to_owned()
    };
    let (long, cid) = (value("ddb.longContentID"), value("CID"));
    assert!(long.len() == 32 && long.ends_with(&format!("{cid:0>8}")), "{text}");
    let uuid = value("ddb.uuid");
    assert!(uuid.starts_with("60 00 c2 9") && uuid.len() == 47 && uuid.as_bytes()[23] == b'-', "{text}");
    assert_eq!((value("ddb.encoding").as_str(), value("isNativeSnapshot").as_str()), ("UTF-8", "no"), "{text}");
}

/// As any tool for tar files and digests sees it.
#[test]
fn a_package_is_made_as_importers_want_it() {
    let oracle = disks();
    let said = ok(
        &oracle,
        "convert -O ova --vm-name box --vm-cpus 3 --vm-memory 768M --vm-network lan --vm-network wan a.qcow2 b.raw m.ova",
    );
    assert!(said.starts_with("m.ova: a machine with 2 disks of 13 MiB, in "), "{said}");
    let listed = tool(&oracle, "tar", "-tf m.ova");
    assert_eq!(listed, "m.ovf\nm.mf\nm-disk1.vmdk\nm-disk2.vmdk\n");
    let head = fs::read(oracle.work().join("m.ova")).unwrap();
    assert_eq!((&head[257..265], head.len() % 10240), (&b"ustar\x0000"[..], 0));
    assert!(tool(&oracle, "7z", "l m.ova").contains("m-disk2.vmdk"));
    tool(&oracle, "tar", "-xf m.ova");
    let manifest = fs::read_to_string(oracle.work().join("m.mf")).unwrap();
    let names: Vec<&str> = manifest.lines().map(|line| &line[..line.find('=').unwrap()]).collect();
    assert_eq!(names, ["SHA256(m.ovf)", "SHA256(m-disk1.vmdk)", "SHA256(m-disk2.vmdk)"]);
    for line in manifest.lines() {
        let (name, digest) = line.strip_prefix("SHA256(").and_then(|line| line.split_once(")= ")).unwrap();
        assert_eq!(tool(&oracle, "sha256sum", name), format!("{digest}  {name}\n"));
    }
    for (disk, source) in [("m-disk1.vmdk", "a.qcow2"), ("m-disk2.vmdk", "b.raw")] {
        oracle.make(&format!("compare -f vmdk {disk} {source}"));
        oracle.make(&format!("check -f vmdk {disk}"));
        let bytes = fs::read(oracle.work().join(disk)).unwrap();
        let text = String::from_utf8_lossy(&bytes[512..2048]).into_owned();
        for part in [
            "createType=\"streamOptimized\"",
            "ddb.adapterType = \"lsilogic\"",
            "ddb.virtualHWVersion = \"10\"",
            "ddb.toolsVersion = \"2147483647\"",
            &format!(" SPARSE \"{disk}\""),
        ] {
            assert!(text.contains(part), "{disk}: no {part} in {text}");
        }
        assert_eq!(bytes[4], 3, "{disk}: the version of the header");
        expect_vmware_ids(&text);
    }
    let ovf = fs::read_to_string(oracle.work().join("m.ovf")).unwrap();
    for (part, count) in [
        ("<Name>box</Name>", 1),
        ("<vssd:VirtualSystemType>vmx-10</vssd:VirtualSystemType>", 1),
        ("<rasd:VirtualQuantity>3</rasd:VirtualQuantity>", 1),
        ("<rasd:VirtualQuantity>768</rasd:VirtualQuantity>", 1),
        ("<Network ovf:name=", 2),
        ("<rasd:ResourceSubType>E1000</rasd:ResourceSubType>", 2),
        ("ovf:capacity=\"10485760\"", 1),
        ("ovf:capacity=\"3145728\"", 1),
        ("#streamOptimized\"", 2),
        ("<rasd:HostResource>ovf:/disk/vmdisk", 2),
    ] {
        assert_eq!(ovf.matches(part).count(), count, "{part} in {ovf}");
    }
    let said = ok(&oracle, "ova verify m.ova");
    assert_eq!(said, "m.ova: nothing wrong (3 digests compared)\n");
}

#[test]
fn packages_for_one_importer_have_its_words() {
    let oracle = disks();
    let ovf = |importer: &str, more: &str| {
        ok(&oracle, &format!("convert --force -O ova --for {importer} {more} a.qcow2 m.ova"));
        ok(&oracle, &format!("ova verify --for {importer} m.ova"));
        tool(&oracle, "tar", "-xOf m.ova m.ovf")
    };
    let vmware = ovf("vmware", "--vm-firmware efi");
    assert!(
        vmware.contains("vmx-10") && vmware.contains("lsilogic") && vmware.contains("vmw:value=\"efi\""),
        "{vmware}"
    );
    let virtualbox = ovf("virtualbox", "--vm-network none");
    assert!(virtualbox.contains("virtualbox-2.2") && virtualbox.contains("AHCI"), "{virtualbox}");
    assert!(!virtualbox.contains("E1000") && !virtualbox.contains("<Network "), "{virtualbox}");
    let both = ovf("both", "");
    assert!(both.contains("vmx-10") && !both.contains("virtualbox-2.2"), "{both}");
    // VMware's importer would reject elements for VirtualBox alone.
    ok(&oracle, "convert --force -O ova --for virtualbox a.qcow2 m.ova");
    let said = cowshed(&oracle, "ova verify --for vmware m.ova");
    assert_eq!(said.code, Some(2));
    assert!(said.out.contains("VMware rejects the family of hardware 'virtualbox-2.2'"), "{said:?}");
}

#[test]
fn a_disk_of_a_package_is_a_source() {
    let oracle = disks();
    ok(&oracle, "convert -q -O ova a.qcow2 b.raw m.ova");
    for (choice, source) in [
        ("--disk 1", "a.qcow2"),
        ("--disk m-disk2.vmdk", "b.raw"),
        ("--disk vmdisk2", "b.raw"),
        ("--untrusted --disk 2", "b.raw"),
        ("-f ova --disk 1", "a.qcow2"),
    ] {
        ok(&oracle, &format!("convert --force {choice} -O qcow2 m.ova out"));
        oracle.make(&format!("compare -f qcow2 out {source}"));
    }
    // The name doesn't matter: the content decides.
    fs::rename(oracle.work().join("m.ova"), oracle.work().join("other.tar")).unwrap();
    ok(&oracle, "convert --force --disk 1 -O raw other.tar out");
    oracle.make("compare -f raw -F qcow2 out a.qcow2");
    // Its folder is a package too.
    ok(&oracle, "ova unpack other.tar folder");
    ok(&oracle, "convert --force --disk 1 -O raw folder/m.ovf out");
    oracle.make("compare -f raw -F qcow2 out a.qcow2");
    // A format that is given is that of the file.
    ok(&oracle, "convert --force -f raw -O raw other.tar out");
    assert!(fs::read(oracle.work().join("out")).unwrap().starts_with(b"m.ovf\0"));
    // QEMU has no packages, so neither do we under its name.
    let said = oracle.ours(&oracle.work(), &words("convert -O raw other.tar out"));
    assert_eq!(said.code, Some(0), "{said:?}");
    assert!(fs::read(oracle.work().join("out")).unwrap().starts_with(b"m.ovf\0"));
}

#[test]
fn a_disk_in_pieces_is_put_together() {
    let oracle = disks();
    ok(&oracle, "convert -q -O ova a.qcow2 m.ova");
    ok(&oracle, "ova unpack m.ova folder");
    let folder = oracle.work().join("folder");
    let disk = fs::read(folder.join("m-disk1.vmdk")).unwrap();
    fs::remove_file(folder.join("m-disk1.vmdk")).unwrap();
    // The descriptor of the disk lies in several pieces.
    let chunk = 700;
    for (index, piece) in disk.chunks(chunk).enumerate() {
        fs::write(folder.join(format!("m-disk1.vmdk.{index:09}")), piece).unwrap();
    }
    let ovf = fs::read_to_string(folder.join("m.ovf")).unwrap();
    let size = format!("ovf:size=\"{}\"", disk.len());
    let ovf = ovf.replace(&size, &format!("{size} ovf:chunkSize=\"{chunk}\""));
    fs::write(folder.join("m.ovf"), &ovf).unwrap();
    fs::remove_file(folder.join("m.mf")).unwrap();
    ok(&oracle, "convert --force -O raw folder/m.ovf out");
    oracle.make("compare -f raw -F qcow2 out a.qcow2");
    ok(&oracle, "ova pack folder/m.ovf chunked.ova");
    ok(&oracle, "ova verify --for vmware chunked.ova");
    ok(&oracle, "convert --force -O raw chunked.ova out");
    oracle.make("compare -f raw -F qcow2 out a.qcow2");
    let pieces = format!("in {}", disk.len().div_ceil(chunk));
    assert!(ok(&oracle, "ova info chunked.ova").contains(&pieces), "{pieces}");
    refused(&oracle, "convert --force --untrusted -O raw chunked.ova out", &["in pieces"]);
    let left = names(&oracle.work());
    assert!(left.iter().all(|name| !name.contains(".part")), "{left:?}");
    // A piece that is missing, and one that is too short.
    fs::write(folder.join("m-disk1.vmdk.000000001"), &disk[..7]).unwrap();
    refused(&oracle, "convert --force -O raw folder/m.ovf out", &["m-disk1.vmdk.000000001", "has 7 bytes"]);
    fs::remove_file(folder.join("m-disk1.vmdk.000000001")).unwrap();
    refused(&oracle, "convert --force -O raw folder/m.ovf out", &["lacks 'm-disk1.vmdk.000000001'"]);
}

#[test]
fn damage_and_lies_are_told_and_leave_nothing() {
    let oracle = disks();
    ok(&oracle, "convert -q -O ova a.qcow2 m.ova");
    let good = fs::read(oracle.work().join("m.ova")).unwrap();
    let work = oracle.work();
    let write = |bytes: &[u8]| fs::write(work.join("bad.ova"), bytes).unwrap();
    let absent = || {
        assert!(!work.join("out.qcow2").exists() && !work.join("folder").exists(), "{:?}", names(&work));
        assert!(names(&work).iter().all(|name| !name.contains(".part")), "{:?}", names(&work));
    };
    // A byte of the disk: the manifest knows.
    let mut bytes = good.clone();
    let at = bytes.len() - 12000;
    bytes[at] ^= 1;
    write(&bytes);
    refused(&oracle, "convert -O qcow2 bad.ova out.qcow2", &["isn't the file of the manifest", "SHA256"]);
    refused(&oracle, "ova unpack bad.ova folder", &["isn't the file of the manifest"]);
    let said = cowshed(&oracle, "ova verify bad.ova");
    assert!(
        said.code == Some(2) && said.out.contains("error: 'm-disk1.vmdk' isn't the file of the manifest"),
        "{said:?}"
    );
    absent();
    // Cut off, at several places.
    for len in [0, 100, 512, 4096, 6000, good.len() - 20000] {
        write(&good[..len]);
        refused(&oracle, "convert -f ova -O qcow2 bad.ova out.qcow2", &["bad.ova"]);
        refused(&oracle, "ova unpack bad.ova folder", &["bad.ova"]);
        absent();
    }
    // Names that lead elsewhere.
    for href in ["../a.qcow2", "/etc/passwd", "sub/x", "http://host/x"] {
        changed(&oracle, |ovf| ovf.replace("ovf:href=\"m-disk1.vmdk\"", &format!("ovf:href=\"{href}\"")));
        refused(&oracle, "convert -O qcow2 changed.ova out.qcow2", &["no name of a file in the package's own folder"]);
    }
    // A descriptor of a disk that is in other files.
    ok(&oracle, "ova unpack m.ova lying");
    let lying = work.join("lying");
    fs::write(
        lying.join("m-disk1.vmdk"),
        "# Disk DescriptorFile\nversion=1\nCID=1\nparentCID=ffffffff\ncreateType=\"monolithicFlat\"\n\
         RW 6144 FLAT \"b.raw\" 0\n",
    )
    .unwrap();
    let ovf = fs::read_to_string(lying.join("m.ovf")).unwrap();
    let start = ovf.find(" ovf:size=\"").unwrap();
    let end = start + 11 + ovf[start + 11..].find('"').unwrap() + 1;
    fs::write(lying.join("m.ovf"), format!("{}{}", &ovf[..start], &ovf[end..])).unwrap();
    fs::remove_file(lying.join("m.mf")).unwrap();
    fs::copy(work.join("b.raw"), lying.join("b.raw")).unwrap();
    refused(&oracle, "convert -O qcow2 lying/m.ovf out.qcow2", &["b.raw"]);
    // Once put together elsewhere, once as a window of the archive.
    for len in [300, 1024] {
        let mut text = fs::read(lying.join("m-disk1.vmdk")).unwrap();
        text.resize(len, b'\n');
        fs::write(lying.join("m-disk1.vmdk"), text).unwrap();
        ok(&oracle, "ova pack --force lying/m.ovf lying.ova");
        let said =
            refused(&oracle, "convert -O qcow2 lying.ova out.qcow2", &["lying.ova: disk 'm-disk1.vmdk'", "'b.raw'"]);
        assert!(!said.contains("--allow") && !said.contains(".part") && !said.contains("json:"), "{said}");
    }
    // A link in the folder of a package.
    fs::remove_file(lying.join("m-disk1.vmdk")).unwrap();
    std::os::unix::fs::symlink("/etc/hostname", lying.join("m-disk1.vmdk")).unwrap();
    refused(&oracle, "convert -O qcow2 lying/m.ovf out.qcow2", &["'m-disk1.vmdk' is no plain file"]);
    refused(&oracle, "ova pack lying/m.ovf again.ova", &["'m-disk1.vmdk' is no plain file"]);
    assert!(!work.join("again.ova").exists());
    absent();
}

/// VMware's own package, whose disk was cut off.
#[test]
fn package_with_a_cut_disk_is_refused() {
    let oracle = Oracle::new();
    let sample = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testkit/images/ttylinux-truncated-disk.ova.gz");
    let output = Command::new("gzip").arg("-dc").arg(sample).output().unwrap();
    assert!(output.status.success());
    fs::write(oracle.work().join("t.ova"), output.stdout).unwrap();
    let said = ok(&oracle, "ova info t.ova");
    for part in ["machine: ttylinux-pc_i486-16.1", "hardware: vmx-09", "firmware: efi", "CPUs: 1", "memory: 32 MiB"] {
        assert!(said.contains(part), "{said}");
    }
    refused(&oracle, "convert -O raw t.ova out", &["has 1048576 bytes", "says 10595840", "cut off"]);
    assert!(!oracle.work().join("out").exists());
    assert_eq!(cowshed(&oracle, "ova verify t.ova").code, Some(2));
}

/// Each line: the change in a good package, and the message of `verify`.
#[test]
fn what_importers_reject_is_found() {
    let oracle = disks();
    ok(&oracle, "convert -q -O ova --vm-network none a.qcow2 m.ova");
    let item = |fields: &str| {
        format!("<Item><rasd:InstanceID>90</rasd:InstanceID>{fields}</Item>\n    </VirtualHardwareSection>")
    };
    let sound = "<rasd:ResourceType>35</rasd:ResourceType><rasd:ResourceSubType>ensoniq1371</rasd:ResourceSubType>";
    let controller = "<rasd:ResourceType>5</rasd:ResourceType><rasd:ResourceSubType>PIIX4</rasd:ResourceSubType>";
    let end = "</VirtualHardwareSection>";
    let table: &[(&str, &str, &str, &str)] = &[
        ("vmx-10", "virtualbox-2.2", "error", "VMware rejects the family of hardware 'virtualbox-2.2'"),
        ("<vssd:VirtualSystemType>vmx-10</vssd:VirtualSystemType>", "", "error", "names no family of hardware"),
        ("VirtualHardwareSection", "OtherSection", "error", "has no VirtualHardwareSection"),
        ("VirtualSystem>", "Other>", "error", "damaged"),
        ("<rasd:InstanceID>4</rasd:InstanceID>", "", "error", "has no InstanceID"),
        ("<rasd:VirtualQuantity>1024<", "<rasd:VirtualQuantity>1022<", "error", "of memory: it wants whole 4 MiB"),
        (
            end,
            &format!("<vmw:Config vmw:key=\"firmware\" vmw:value=\"efi\"/>{end}"),
            "warning",
            "doesn't read the firmware",
        ),
        (end, &item(controller), "error", "VMware rejects the controller 'PIIX4'"),
        (end, &item(sound), "error", "VMware rejects the sound card"),
        (end, &item("<rasd:ResourceType></rasd:ResourceType>"), "error", "has no ResourceType"),
        (end, &format!("<vmw:ExtraConfig vmw:key=\"a.b\" vmw:value=\"1\"/>{end}"), "warning", "extra key 'a.b'"),
        ("<rasd:InstanceID>4<", "<rasd:InstanceID>3<", "error", "have the InstanceID 3"),
        ("<rasd:Parent>3<", "<rasd:Parent>77<", "error", "hangs on part 77"),
        ("ovf:/disk/vmdisk1", "ovf:/disk/vmdisk9", "error", "'ovf:/disk/vmdisk9', which isn't declared"),
        ("ovf:fileRef=\"file1\"", "ovf:fileRef=\"file9\"", "error", "isn't declared"),
        ("ovf:capacity=\"10485760\"", "ovf:capacity=\"20971520\"", "error", "has 10485760 bytes"),
        ("vmdk.html#streamOptimized", "vhd", "error", "it is no VMDK"),
        ("http://www.vmware.com/interfaces/specifications/vmdk.html#streamOptimized", "x", "error", "isn't known"),
        ("ovf:href=\"m-disk1.vmdk\"", "ovf:href=\"m-disk2.vmdk\"", "error", "lacks 'm-disk2.vmdk'"),
        ("ovf:size=\"", "ovf:size=\"9", "error", "and the descriptor says 9"),
        (" ovf:size=", " other=", "warning", "the length of 'm-disk1.vmdk' isn't said"),
        ("xmlns=\"http://schemas.dmtf.org/ovf/envelope/1\"", "xmlns=\"http://x\"", "error", "isn't OVF's: 'http://x'"),
        (" xmlns=\"http://schemas.dmtf.org/ovf/envelope/1\"", "", "error", "the Envelope has no namespace"),
        ("</Name>", "\u{1}</Name>", "error", "XML doesn't have, U+0001 (at byte "),
        ("</Name>", "&#27;</Name>", "error", "XML doesn't have, U+001B"),
        (end, &format!("<!-- a -- b -->{end}"), "error", "the OVF descriptor is damaged"),
        (
            ">1</rasd:VirtualQuantity",
            ">18446744073709551616</rasd:VirtualQuantity",
            "error",
            "'18446744073709551616' is no number of",
        ),
        (">1</rasd:VirtualQuantity", ">0</rasd:VirtualQuantity", "error", "'0' is no number of processors"),
        (
            " ovf:href=",
            " ovf:compression=\"gzip\" ovf:href=",
            "error",
            "isn't stored with gzip, as the descriptor says",
        ),
    ];
    for (from, to, weight, words) in table {
        changed(&oracle, |ovf| ovf.replace(from, to));
        let said = cowshed(&oracle, "ova verify changed.ova");
        // Another file than a descriptor can't be looked at.
        let found = said.out.lines().any(|line| line.starts_with(weight) && line.contains(words));
        let is_refused = said.code == Some(1) && said.err.contains(words);
        assert!(found || is_refused, "{from} → {to}: {said:?}");
        assert_eq!(said.code == Some(0), *weight == "warning", "{from} → {to}: {said:?}");
    }
    // A descriptor without a machine.
    changed(&oracle, |ovf| {
        let (start, end) = (ovf.find("  <VirtualSystem ").unwrap(), ovf.find("</Envelope>").unwrap());
        format!("{}{}", &ovf[..start], &ovf[end..])
    });
    let said = cowshed(&oracle, "ova verify changed.ova");
    assert!(said.code == Some(2) && said.out.contains("error: the descriptor has no VirtualSystem"), "{said:?}");
    assert!(said.out.contains("warning: there is no manifest"), "{said:?}");
    // A raw disk of another length than in the descriptor.
    changed(&oracle, |ovf| ovf.replace("vmdk.html#streamOptimized", "raw"));
    let said = cowshed(&oracle, "ova verify --for virtualbox changed.ova");
    assert!(said.code == Some(2) && said.out.contains("and the descriptor says 10485760"), "{said:?}");
    // The disk is another kind of VMDK.
    for options in ["subformat=monolithicSparse", "subformat=monolithicFlat"] {
        changed(&oracle, |ovf| ovf.replace(" ovf:size=", " other="));
        oracle.make(&format!("convert -O vmdk -o {options} a.qcow2 changed/m-disk1.vmdk"));
        tool(&oracle, "tar", "--format=ustar -C changed -cf changed.ova m.ovf m-disk1.vmdk");
        let said = cowshed(&oracle, "ova verify --for vmware changed.ova");
        assert_eq!(said.code, Some(2), "{options}: {said:?}");
        assert!(
            said.out.contains("streamOptimized of version 3") || said.out.contains("no VMDK of one file"),
            "{said:?}"
        );
    }
    // The order of the archive, a name that nothing refers to, a manifest with wrong names or without a file.
    ok(&oracle, "ova unpack m.ova good");
    let verify = |files: &str, words: &str| {
        tool(&oracle, "tar", &format!("--format=ustar -C good -cf changed.ova {files}"));
        let said = cowshed(&oracle, "ova verify changed.ova");
        assert!(said.out.contains(words), "{files}: {said:?}");
        said.code
    };
    assert_eq!(verify("m-disk1.vmdk m.ovf m.mf", "error: the descriptor isn't the first file"), Some(2));
    assert_eq!(verify("m.ovf m-disk1.vmdk m.mf", "nothing wrong"), Some(0));
    assert_eq!(verify("m.ovf m.mf", "lacks 'm-disk1.vmdk'"), Some(2));
    let good = oracle.work().join("good");
    fs::write(good.join("m.cert"), "x").unwrap();
    assert_eq!(verify("m.ovf m.mf m.cert m-disk1.vmdk", "warning: the signature isn't checked"), Some(0));
    fs::write(good.join("README"), "x").unwrap();
    assert_eq!(verify("m.ovf m.mf README m-disk1.vmdk", "warning: nothing refers to 'README'"), Some(2));
    fs::copy(good.join("m.mf"), good.join("x.mf")).unwrap();
    assert_eq!(verify("m.ovf x.mf m-disk1.vmdk", "hasn't the descriptor's name"), Some(2));
    let manifest = fs::read_to_string(good.join("m.mf")).unwrap();
    fs::write(good.join("m.mf"), manifest.replace("m-disk1.vmdk", "disk1.vmdk")).unwrap();
    assert_eq!(verify("m.ovf m.mf m-disk1.vmdk", "names 'disk1.vmdk', which the package lacks"), Some(2));
    assert_eq!(verify("m.ovf m.mf m-disk1.vmdk", "has no digest of 'm-disk1.vmdk'"), Some(2));
}

#[test]
fn packages_are_unpacked_and_packed() {
    let oracle = disks();
    ok(&oracle, "convert -q -O ova a.qcow2 b.raw m.ova");
    assert_eq!(ok(&oracle, "ova unpack m.ova"), "m: 4 files\n");
    assert_eq!(names(&oracle.work().join("m")), ["m-disk1.vmdk", "m-disk2.vmdk", "m.mf", "m.ovf"]);
    // Nothing is overwritten, and old files stay.
    refused(&oracle, "ova unpack m.ova", &["m/m.ovf", "File exists"]);
    assert_eq!(names(&oracle.work().join("m")).len(), 4);
    assert_eq!(ok(&oracle, "ova pack m/m.ovf again.ova"), "again.ova: 4 files\n");
    assert!(ok(&oracle, "ova verify again.ova").contains("nothing wrong"));
    refused(&oracle, "ova pack m/m.ovf again.ova", &["exists already"]);
    ok(&oracle, "ova pack --force m/m.ovf again.ova");
    refused(&oracle, "ova pack m.ova again2.ova", &["packed already"]);
    // A file that differs from the manifest isn't packed with a new digest.
    fs::write(oracle.work().join("m/m-disk2.vmdk"), "x").unwrap();
    refused(&oracle, "ova pack m/m.ovf bad.ova", &["m-disk2.vmdk"]);
    assert!(!oracle.work().join("bad.ova").exists());
    let json: serde_json::Value = serde_json::from_str(&ok(&oracle, "ova info --output json again.ova")).unwrap();
    assert_eq!(
        (&json["cpus"], &json["memory-bytes"], &json["manifest"]),
        (&1.into(), &(1u64 << 30).into(), &true.into())
    );
    assert_eq!(json["disks"][1]["virtual-size"], 3 << 20);
    assert_eq!(json["files"][0]["name"], "m.ovf");
}

#[test]
fn wrong_words_are_refused_before_anything_is_made() {
    let oracle = disks();
    fs::create_dir(oracle.work().join("folder")).unwrap();
    for (line, words) in [
        ("convert -O ova -o subformat=x a.qcow2 m.ova", "-o has no meaning"),
        ("convert -O ova -c a.qcow2 m.ova", "-c has no meaning"),
        ("convert -n -O ova a.qcow2 m.ova", "-n has no meaning"),
        ("convert -O ova --for xen a.qcow2 m.ova", "no importer"),
        ("convert -O ova --vm-cpus 0 a.qcow2 m.ova", "at least one processor"),
        ("convert -O ova --vm-memory 1000k a.qcow2 m.ova", "whole number of MiB"),
        ("convert -O ova --vm-memory 1026M a.qcow2 m.ova", "multiples of 4 MiB"),
        ("convert -O ova --vm-memory 2T a.qcow2 m.ova", "1 TiB of memory"),
        ("convert -O ova --vm-cpus 65 a.qcow2 m.ova", "up to 64 processors"),
        ("convert -O ova --vm-network none --vm-network x a.qcow2 m.ova", "no other networks"),
        ("convert -O ova --for virtualbox --vm-firmware efi a.qcow2 m.ova", "turn EFI on"),
        ("convert -O ova --untrusted a.qcow2 m.ova", "--untrusted makes no packages"),
        ("convert -O ova a.qcow2 folder", "no plain file"),
        ("convert -O ova missing.qcow2 m.ova", "missing.qcow2"),
        ("convert -O ova a.qcow2 missing.qcow2 m.ova", "missing.qcow2"),
        ("convert -O qcow2 --vm-cpus 2 a.qcow2 m.qcow2", "needs -O ova"),
        ("convert -O qcow2 --disk 1 a.qcow2 m.qcow2", "--disk chooses a disk of a package"),
        ("ova info a.qcow2", "no tar archive"),
        ("ova info missing.ova", "missing.ova"),
        ("ova pack missing.ovf m.ova", "missing.ovf"),
    ] {
        refused(&oracle, line, &[words]);
        assert_eq!(names(&oracle.work()), ["a.qcow2", "b.raw", "folder"], "{line}");
    }
    ok(&oracle, "convert -q -O ova a.qcow2 b.raw m.ova");
    for (line, words) in [
        ("convert -O qcow2 m.ova out", "choose one with --disk: 1 (m-disk1.vmdk), 2 (m-disk2.vmdk)"),
        ("convert -O qcow2 --disk 3 m.ova out", "no disk '3'"),
        ("convert -O qcow2 --disk x m.ova out", "no disk 'x'"),
        ("convert -O qcow2 m.ova a.qcow2 out", "one disk at a time"),
        ("convert -O ova m.ova a.qcow2 m2.ova", "one disk at a time"),
        ("convert -O ova a.qcow2 m.ova", "exists already"),
    ] {
        refused(&oracle, line, &[words]);
    }
    let whole = fs::read(oracle.work().join("m.ova")).unwrap();
    ok(&oracle, "ova verify m.ova");
    assert!(whole == fs::read(oracle.work().join("m.ova")).unwrap());
}

/// The folder of [`changed`].
fn unpacked(oracle: &Oracle, change: impl FnOnce(&str) -> String) -> PathBuf {
    changed(oracle, change);
    oracle.work().join("changed")
}

#[test]
fn a_disk_is_chosen_only_by_a_word_that_names_one() {
    let oracle = disks();
    ok(&oracle, "convert -q -O ova a.qcow2 b.raw m.ova");
    let text = fs::read_to_string(unpacked(&oracle, |ovf| format!("{ovf} ")).join("m.ovf")).unwrap();
    let id = |number: usize| {
        let part = text.split("<Disk ").nth(number).unwrap();
        part.split_once("ovf:diskId=\"").unwrap().1.split_once('"').unwrap().0.to_owned()
    };
    let (first, second) = (id(1), id(2));
    // The ids are the other disk's numbers.
    changed(&oracle, |ovf| {
        ovf.replace(&format!("\"{first}\""), "\"2\"")
            .replace(&format!("\"{second}\""), "\"1\"")
            .replace(&format!("/disk/{first}<"), "/disk/2<")
            .replace(&format!("/disk/{second}<"), "/disk/1<")
    });
    let words = ["number, name or id of several disks", "1 (m-disk1.vmdk), 2 (m-disk2.vmdk)"];
    refused(&oracle, "convert -O raw --disk 1 changed.ova out", &words);
    refused(&oracle, "convert -O raw --disk 2 changed.ova out", &words);
    ok(&oracle, "convert -q -O raw --disk m-disk2.vmdk changed.ova out");
    oracle.make("compare -f raw -F raw out b.raw");
    // A disk that can't be read still keeps its name.
    changed(&oracle, |ovf| {
        ovf.replacen(
            &format!("ovf:diskId=\"{first}\""),
            &format!("ovf:diskId=\"{first}\" ovf:parentRef=\"{second}\""),
            1,
        )
    });
    for wanted in ["1", "m-disk1.vmdk", &first] {
        refused(&oracle, &format!("convert -O raw --disk {wanted} changed.ova no"), &["difference to another disk"]);
    }
}

#[test]
fn a_manifest_that_lacks_a_file_is_no_check_of_it() {
    let oracle = disks();
    ok(&oracle, "convert -q -O ova a.qcow2 m.ova");
    ok(&oracle, "ova unpack m.ova m");
    let work = oracle.work();
    let whole = fs::read_to_string(work.join("m/m.mf")).unwrap();
    let lacks = "the manifest has no digest of";
    for text in ["", whole.lines().next().unwrap()] {
        fs::write(work.join("m/m.mf"), text).unwrap();
        tool(&oracle, "tar", "--format=ustar -C m -cf part.ova m.ovf m.mf m-disk1.vmdk");
        refused(&oracle, "ova unpack part.ova to", &[lacks]);
        refused(&oracle, "ova pack m/m.ovf part2.ova", &[lacks]);
        refused(&oracle, "convert -O raw part.ova out", &[lacks]);
        assert!(!work.join("to").exists() && !work.join("part2.ova").exists());
    }
    // A right digest beside a wrong one.
    fs::write(work.join("m/m.mf"), format!("{whole}SHA1(m-disk1.vmdk)= {}\n", "0".repeat(40))).unwrap();
    refused(&oracle, "ova pack m/m.ovf part2.ova", &["its SHA1 is"]);
    assert_eq!(cowshed(&oracle, "ova verify m/m.ovf").code, Some(2));
    // Another manifest in front of the descriptor's.
    fs::write(work.join("m/a.mf"), &whole).unwrap();
    fs::write(work.join("m/m.mf"), whole.replace("= ", "= 0").replace("0\n", "\n")).unwrap();
    tool(&oracle, "tar", "--format=ustar -C m -cf two.ova a.mf m.ovf m.mf m-disk1.vmdk");
    assert_eq!(cowshed(&oracle, "convert -O raw two.ova out").code, Some(1));
    assert!(!work.join("out").exists());
    // In a folder any case counts, and a link that leads nowhere is no lack of a manifest.
    fs::remove_file(work.join("m/m.mf")).unwrap();
    fs::write(work.join("m/m.MF"), whole.lines().next().unwrap()).unwrap();
    refused(&oracle, "convert -O raw m/m.ovf out", &[lacks]);
    fs::remove_file(work.join("m/m.MF")).unwrap();
    std::os::unix::fs::symlink("nowhere", work.join("m/m.mf")).unwrap();
    refused(&oracle, "convert -O raw m/m.ovf out", &["no plain file"]);
    // Files that the manifest alone names are a part of the package, `./` or not.
    fs::remove_file(work.join("m/m.mf")).unwrap();
    fs::write(work.join("m/README"), "abc").unwrap();
    let of = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
    fs::write(work.join("m/m.mf"), format!("\u{feff}{}SHA256(./README)= {of}\n", whole.replace('(', "(./"))).unwrap();
    assert_eq!(ok(&oracle, "ova pack m/m.ovf all.ova"), "all.ova: 4 files\n");
    // A folder in an archive has no content. A link beside a descriptor is no disk of it.
    fs::create_dir(work.join("m/empty")).unwrap();
    tool(&oracle, "tar", "--format=ustar -C m -cf folder.ova m.ovf m.mf empty m-disk1.vmdk README");
    assert_eq!(cowshed(&oracle, "ova verify folder.ova").code, Some(0));
    fs::remove_file(work.join("m/m.mf")).unwrap();
    fs::rename(work.join("m/m-disk1.vmdk"), work.join("disk")).unwrap();
    std::os::unix::fs::symlink("../disk", work.join("m/m-disk1.vmdk")).unwrap();
    refused(&oracle, "convert -O raw m/m.ovf out", &["'m-disk1.vmdk' is no plain file"]);
}

#[test]
fn incomplete_package_is_not_unpacked() {
    let oracle = disks();
    ok(&oracle, "convert -q -O ova a.qcow2 m.ova");
    ok(&oracle, "ova unpack m.ova m");
    tool(&oracle, "tar", "--format=ustar -C m -cf less.ova m.ovf");
    refused(&oracle, "ova unpack less.ova to", &["lacks 'm-disk1.vmdk'"]);
    fs::write(oracle.work().join("m/m-disk1.vmdk"), "short").unwrap();
    tool(&oracle, "tar", "--format=ustar -C m -cf less.ova m.ovf m-disk1.vmdk");
    refused(&oracle, "ova unpack less.ova to", &["has 5 bytes"]);
    // Its name without the ending is the folder above.
    fs::copy(oracle.work().join("m.ova"), oracle.work().join("...ova")).unwrap();
    refused(&oracle, "ova unpack ...ova", &["name the folder"]);
    assert!(!oracle.work().join("to").exists() && !oracle.work().join("../m.ovf").exists());
}

#[test]
fn no_target_replaces_a_file_in_use() {
    let oracle = disks();
    oracle.make("create -q -f qcow2 -F qcow2 -b a.qcow2 top.qcow2");
    ok(&oracle, "convert -q -O ova b.raw m.ova");
    ok(&oracle, "ova unpack m.ova m");
    fs::copy(oracle.work().join("b.raw"), oracle.work().join("odd.tar.gz")).unwrap();
    let files = ["a.qcow2", "b.raw", "top.qcow2", "m.ova", "m/m.ovf", "m/m-disk1.vmdk", "odd.tar.gz"];
    let all = || files.map(|name| fs::read(oracle.work().join(name)).unwrap());
    let before = all();
    for (line, word) in [
        ("convert -O ova --force b.raw b.raw", "lock"),
        ("convert -O ova --force top.qcow2 a.qcow2", "lock"),
        ("convert --for gcp --force odd.tar.gz odd.tar.gz", "lock"),
        ("convert -U -O ova --force top.qcow2 a.qcow2", "both are one file"),
        ("convert -U -f raw --for gcp --force odd.tar.gz odd.tar.gz", "both are one file"),
        ("convert -O raw --force m.ova m.ova", "file of the package itself"),
        ("convert -O raw --force m/m.ovf m/m.ovf", "file of the package itself"),
        ("convert -O raw --force m/m.ovf m/m-disk1.vmdk", "file of the package itself"),
        ("ova pack --force m/m.ovf m/m.ovf", "file of the package itself"),
        ("ova pack --force m/m.ovf m/m-disk1.vmdk", "file of the package itself"),
    ] {
        refused(&oracle, line, &[word]);
        assert!(all() == before, "{line}");
    }
}

#[test]
fn fifo_is_no_package_under_any_protocol() {
    let oracle = disks();
    ok(&oracle, "convert -q -O ova b.raw m.ova");
    tool(&oracle, "mkfifo", "f.ova");
    refused(&oracle, "ova info f.ova", &["a package is a file"]);
    refused(&oracle, "convert -f ova -O raw f.ova out", &["a package is a file"]);
    ok(&oracle, "convert -q -O raw file:m.ova out");
    oracle.make("compare -f raw -F raw out b.raw");
    // A guest can make its disk begin so.
    fs::copy(oracle.work().join("m.ova"), oracle.work().join("guest.img")).unwrap();
    let said = cowshed(&oracle, "convert -q --force -O raw guest.img out");
    assert!(said.code == Some(0) && said.err.contains("guest.img: disk 'm-disk1.vmdk' is taken"), "{said:?}");
    ok(&oracle, "convert -q -O ova b.raw file:n.ova");
    assert!(oracle.work().join("n.ova").exists());
}
