// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `convert --for`: each platform's requirements.

use crate::oracle::{Oracle, words};
use crate::ova::expect_vmware_ids;
use cowshed_testkit::programs::{Said, finish};
use serde_json::Value;
use std::fs;
use std::process::Command;

const MIB: u64 = 1 << 20;

/// `a.qcow2`: 5 MiB and 3 sectors, with data at both ends.
fn disk() -> Oracle {
    let oracle = Oracle::new();
    oracle.make("create -q -f qcow2 a.qcow2 5244416");
    oracle.io(&["write -P 0x11 0 64k", "write -P 0x22 5M 1536", "write -P 0x33 2M 100k"], "a.qcow2");
    oracle
}

fn cowshed(oracle: &Oracle, line: &str) -> Said {
    finish(Command::new(env!("CARGO_BIN_EXE_cowshed")).args(words(line)).current_dir(oracle.work()))
}

fn info(oracle: &Oracle, format: &str, name: &str) -> Value {
    let said = oracle.real(&oracle.work(), &words(&format!("info --output=json -f {format} {name}")));
    serde_json::from_str(&said.out).unwrap_or_else(|_| panic!("{said:?}"))
}

/// QEMU reads the same disk, longer by zeroes where the platform needs that.
#[test]
fn each_platform_gets_its_format_and_is_told_so() {
    let oracle = disk();
    for (platform, target, format, size, word) in [
        ("azure", "a.vhd", "vpc", 6 * MIB, "fixed VHD"),
        ("hyperv", "a.vhdx", "vhdx", 6 * MIB, "dynamic VHDX; copy it there without holes"),
        ("vmware", "a.vmdk", "vmdk", 5 * MIB + 1536, "stream-optimised VMDK"),
        ("aws", "b.vmdk", "vmdk", 5 * MIB + 1536, "stream-optimised VMDK"),
        ("virtualbox", "a.vdi", "vdi", 5 * MIB + 1536, "dynamic VDI"),
    ] {
        let said = cowshed(&oracle, &format!("convert --for {platform} a.qcow2 {target}"));
        assert_eq!(said.code, Some(0), "{platform}: {said:?}");
        assert_eq!(said.err.lines().count(), 1, "{platform}: {said:?}");
        assert!(
            said.err.contains(&format!("for {platform}: {word}")) && said.err.contains(&format!("({size} bytes)")),
            "{said:?}"
        );
        assert_eq!(info(&oracle, format, target)["virtual-size"], size, "{platform}");
        // The zeroes that rounding adds are among them.
        let zeroes = if size == 6 * MIB { "6 MiB disk, 166 KiB data, 5.84 MiB zero" } else { "5 MiB disk" };
        assert!(said.out.contains(zeroes), "{platform}: {said:?}");
        // Without -s longer tails of zeroes are equal.
        oracle.make(&format!("compare -f qcow2 -F {format} a.qcow2 {target}"));
        let said = cowshed(&oracle, &format!("convert --force -q --for {platform} a.qcow2 {target}"));
        assert_eq!((said.code, said.err.as_str()), (Some(0), ""), "{platform}");
    }
    let vhd = fs::read(oracle.work().join("a.vhd")).unwrap();
    assert_eq!(vhd.len() as u64, 6 * MIB + 512, "a fixed VHD is the disk and a footer");
    let footer = &vhd[vhd.len() - 512..];
    assert_eq!((&footer[..8], footer[63], &footer[48..56]), (&b"conectix"[..], 2, &(6 * MIB).to_be_bytes()[..]));
    for name in ["a.vmdk", "b.vmdk"] {
        let details = &info(&oracle, "vmdk", name)["format-specific"]["data"];
        assert_eq!(details["create-type"], "streamOptimized");
        let bytes = fs::read(oracle.work().join(name)).unwrap();
        assert_eq!(bytes[4], 3);
        expect_vmware_ids(&String::from_utf8_lossy(&bytes[512..2048]));
    }
    // A size that fits already stays.
    oracle.make("create -q -f raw even.raw 8M");
    assert_eq!(cowshed(&oracle, "convert -q --for azure even.raw even.vhd").code, Some(0));
    assert_eq!(info(&oracle, "vpc", "even.vhd")["virtual-size"], 8 * MIB);
}

/// As GNU tar sees it, and Python's reader of tar files.
#[test]
fn googles_archive_has_the_disk_in_whole_gib() {
    let oracle = disk();
    // More runs of data than a header has room for, and than one block behind it has.
    for index in 0..40 {
        oracle.io(&[&format!("write -P {} {}k 4k", index + 1, 200 + 40 * index)], "a.qcow2");
    }
    let said = cowshed(&oracle, "convert --for gcp a.qcow2 image.tar.gz");
    assert_eq!(said.code, Some(0), "{said:?}");
    assert!(said.err.contains("for gcp: disk.raw in whole GiB") && said.err.contains("(1073741824 bytes)"), "{said:?}");
    assert!(said.out.contains("1 GiB disk") && said.out.contains(" 1 GiB zero"), "{said:?}");
    let work = oracle.work();
    let tool = |program: &str, line: &str| {
        let output = Command::new(program).args(words(line)).current_dir(&work).output().unwrap();
        assert!(output.status.success(), "{program} {line}: {}", String::from_utf8_lossy(&output.stderr));
        output.stdout
    };
    tool("gzip", "-t image.tar.gz");
    let listed = String::from_utf8(tool("tar", "-tvzf image.tar.gz")).unwrap();
    assert!(
        listed.lines().count() == 1 && listed.contains(" 1073741824 ") && listed.ends_with(" disk.raw\n"),
        "{listed}"
    );
    let plain = tool("gzip", "-dc image.tar.gz");
    assert_eq!((&plain[257..265], plain[156], plain.len() % 10240), (&b"ustar  \0"[..], b'S', 0));
    tool("tar", "-xzf image.tar.gz");
    oracle.make("compare -f qcow2 -F raw a.qcow2 disk.raw");
    let left: Vec<_> = fs::read_dir(&work).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(left.iter().all(|name| !name.to_string_lossy().contains(".part")), "{left:?}");
    // An empty disk, and one whose end is data.
    for (name, commands) in [("empty", &[][..]), ("full", &["write -P 9 1048064k 512k"][..])] {
        oracle.make(&format!("create -q -f raw {name}.raw 1G"));
        if !commands.is_empty() {
            oracle.io(commands, &format!("{name}.raw"));
        }
        assert_eq!(cowshed(&oracle, &format!("convert -q -f raw --for gcp {name}.raw {name}.tar.gz")).code, Some(0));
        tool("tar", &format!("-xzf {name}.tar.gz"));
        oracle.make(&format!("compare -f raw -F raw {name}.raw disk.raw"));
    }
}

#[test]
fn what_a_platform_does_not_take_is_refused() {
    let oracle = disk();
    for (line, word) in [
        ("convert --for xbox a.qcow2 b.vhd", "no platform is called 'xbox'"),
        ("convert --for azure a.qcow2 b.qcow2", "ends with .vhd"),
        ("convert --for azure -O vhdx a.qcow2 b.vhd", "makes the format 'vpc'"),
        ("convert --for azure -o subformat=dynamic a.qcow2 b.vhd", "-o can't be given"),
        ("convert --for vmware -c a.qcow2 b.vmdk", "-c can't be given"),
        ("convert --for gcp --untrusted a.qcow2 b.tar.gz", "--untrusted makes no packages"),
        ("convert --for gcp missing.qcow2 b.tar.gz", "missing.qcow2"),
        ("convert --for azure --vm-cpus 2 a.qcow2 b.vhd", "needs -O ova"),
    ] {
        let said = cowshed(&oracle, line);
        assert_eq!(said.code, Some(1), "{line}: {said:?}");
        assert!(said.err.contains(word), "{line}: {said:?}");
        let left: Vec<_> = fs::read_dir(oracle.work()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["a.qcow2"], "{line}");
    }
    // An archive that is there is kept.
    fs::write(oracle.work().join("b.tar.gz"), "x").unwrap();
    assert_eq!(cowshed(&oracle, "convert --for gcp a.qcow2 b.tar.gz").code, Some(1));
    assert_eq!(fs::read(oracle.work().join("b.tar.gz")).unwrap(), b"x");
    // Without -O: the ending makes a package, for an importer.
    assert_eq!(cowshed(&oracle, "convert -q --for vmware a.qcow2 b.ova").code, Some(0));
    assert_eq!(cowshed(&oracle, "convert -q --for azure a.qcow2 c.ova").code, Some(1));
}
