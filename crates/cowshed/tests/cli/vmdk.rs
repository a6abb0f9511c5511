// SPDX-License-Identifier: Apache-2.0 OR MIT
//! VMDK images that the real qemu-img makes, and ones of VMware's kinds that it only reads, under both tools.

use crate::oracle::{Oracle, words};
use crate::written_edges::io;
use cowshed_testkit::qemu::Qemu;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::Command;

/// Every kind that qemu-img can make.
const SUBFORMATS: [&str; 5] =
    ["monolithicSparse", "monolithicFlat", "twoGbMaxExtentSparse", "twoGbMaxExtentFlat", "streamOptimized"];

/// Ours, which must succeed; its standard output.
#[track_caller]
fn ours(oracle: &Oracle, line: &str) -> String {
    let said = oracle.ours(&oracle.work(), &words(line));
    assert_eq!(said.code, Some(0), "{line}: {}{}", said.out, said.err);
    said.out
}

/// A source of random-looking data with holes, and an image of each kind made of it.
fn gallery(oracle: &Oracle, size: &str, commands: &[&str]) -> Vec<String> {
    oracle.make(&format!("create -q -f raw source.raw {size}"));
    oracle.io(commands, "source.raw");
    SUBFORMATS
        .iter()
        .map(|subformat| {
            oracle.make(&format!("convert -O vmdk -o subformat={subformat} source.raw {subformat}.vmdk"));
            format!("{subformat}.vmdk")
        })
        .collect()
}

const SMALL: [&str; 4] = ["write -P 1 0 5000", "write -P 2 64k 200k", "write -P 3 1M 512", "write -P 4 2M 1M"];

#[test]
fn content_is_what_the_real_tool_put_in() {
    // 10 MiB and an odd end: the last grain is not whole.
    for size in ["10M", "10486272", "3222016"] {
        let oracle = Oracle::new();
        for image in gallery(&oracle, size, &SMALL) {
            for format in ["raw", "qcow2"] {
                ours(&oracle, &format!("convert -f vmdk -O {format} {image} target.{format}"));
                oracle.make(&format!("compare -f raw -F {format} source.raw target.{format}"));
            }
            ours(&oracle, &format!("compare source.raw {image}"));
            ours(&oracle, &format!("compare {image} target.qcow2"));
        }
    }
}

#[test]
fn split_disk_of_two_gigabyte_extents_converts() {
    let oracle = Oracle::new();
    // Across the borders of extents, and into the last one, which is shorter.
    let far = ["write -P 7 2147418112 131072", "write -P 8 4294967296 64k", "write -P 9 4831838208 4k"];
    for image in gallery(&oracle, "4831842304", &far).iter().filter(|name| name.starts_with("twoGb")) {
        ours(&oracle, &format!("convert -p -O qcow2 {image} target.qcow2"));
        oracle.make("compare -f raw -F qcow2 source.raw target.qcow2");
        ours(&oracle, &format!("compare {image} source.raw"));
        assert!(fs::metadata(oracle.work().join("target.qcow2")).unwrap().len() < 16 << 20);
    }
}

#[test]
fn info_map_and_check_are_the_real_ones() {
    let oracle = Oracle::new();
    let mut images = gallery(&oracle, "10M", &SMALL);
    oracle.make("create -q -f vmdk -o zeroed_grain=on zeroed.vmdk 10M");
    let mut command = std::process::Command::new(oracle.qemu.io_path());
    command.current_dir(oracle.work()).args(["-f", "vmdk", "-c", "write -P 5 1M 64k", "-c", "write -z 2M 1M"]);
    assert!(command.arg("zeroed.vmdk").status().unwrap().success());
    oracle.make("create -q -f vmdk -b monolithicSparse.vmdk -F vmdk child.vmdk");
    images.extend(["zeroed.vmdk".to_owned(), "child.vmdk".to_owned()]);
    for image in &images {
        oracle.compare(&format!("info {image}"));
        oracle.compare(&format!("info --output=json --backing-chain {image}"));
        oracle.compare(&format!("map --output=json {image}"));
        oracle.compare(&format!("check {image}"));
        oracle.compare(&format!("check --output=json {image}"));
        oracle.compare(&format!("check -r all {image}"));
        oracle.compare(&format!("measure -O raw {image}"));
        if image != "streamOptimized.vmdk" {
            oracle.compare(&format!("map {image}"));
        }
    }
    oracle.compare("compare child.vmdk source.raw");
    oracle.compare("info --image-opts driver=vmdk,file.filename=child.vmdk");
    oracle.verdict();
}

#[test]
fn a_child_reads_from_its_parent_and_notices_a_changed_one() {
    let oracle = Oracle::new();
    gallery(&oracle, "10M", &SMALL);
    oracle.make("create -q -f vmdk -b monolithicSparse.vmdk -F vmdk child.vmdk");
    let write = |image: &str, command: &str| {
        let mut process = std::process::Command::new(oracle.qemu.io_path());
        process.current_dir(oracle.work()).args(["-f", "vmdk", "-c", command, image]);
        assert!(process.status().unwrap().success());
    };
    write("child.vmdk", "write -P 6 128k 70000");
    oracle.make("convert -O raw child.vmdk expected.raw");
    ours(&oracle, "convert -O qcow2 child.vmdk ours.qcow2");
    oracle.make("compare -f raw -F qcow2 expected.raw ours.qcow2");
    // Its content id changes with the first write.
    write("monolithicSparse.vmdk", "write -P 9 0 64k");
    let said = oracle.ours(&oracle.work(), &words("convert -O raw child.vmdk target.raw"));
    assert_eq!(said.code, Some(1));
    assert!(said.err.contains("was changed since") && said.err.contains("parentCID"), "{}", said.err);
    ours(&oracle, "info child.vmdk");
    // An explicit option leaves the differences alone.
    let said = oracle.ours(
        &oracle.work(),
        &words("convert -O raw --image-opts driver=vmdk,file.filename=child.vmdk,backing= target.raw"),
    );
    assert_eq!(said.code, Some(0), "{}", said.err);
}

/// Moves the place of the directory into a footer, as programs do that write an image as a stream.
fn with_footer(image: &[u8]) -> Vec<u8> {
    let mut bytes = image.to_vec();
    bytes.resize(bytes.len().next_multiple_of(512), 0);
    let header = bytes[..512].to_vec();
    bytes[56..64].fill(0xff);
    let mut marker = vec![0; 512];
    marker[0] = 1;
    marker[12] = 3;
    bytes.extend(marker);
    bytes.extend(header);
    bytes.extend([0; 512]);
    bytes
}

#[test]
fn streams_with_their_directory_at_the_end_are_read() {
    let oracle = Oracle::new();
    gallery(&oracle, "10M", &SMALL);
    let path = oracle.work().join("stream.vmdk");
    let image = with_footer(&fs::read(oracle.work().join("streamOptimized.vmdk")).unwrap());
    fs::write(&path, &image).unwrap();
    oracle.make("compare -F vmdk source.raw stream.vmdk");
    ours(&oracle, "compare source.raw stream.vmdk");
    fs::write(&path, &image[..image.len() - 512]).unwrap();
    let said = oracle.ours(&oracle.work(), &words("info stream.vmdk"));
    assert!(said.code == Some(1) && said.err.contains("cut short"), "{}", said.err);
}

/// The flag of compressed grains is not set, and the algorithm is: QEMU goes by the algorithm.
#[test]
fn a_stream_without_its_flag_is_unpacked() {
    let oracle = Oracle::new();
    gallery(&oracle, "10M", &SMALL);
    let path = oracle.work().join("streamOptimized.vmdk");
    let mut bytes = fs::read(&path).unwrap();
    bytes[10] &= !1;
    fs::write(&path, bytes).unwrap();
    oracle.make("compare -F vmdk source.raw streamOptimized.vmdk");
    ours(&oracle, "compare source.raw streamOptimized.vmdk");
}

/// A disk of one extent of ESX' older sparse kind: grains of one sector. `data` is at sector `first`, and at sector 5000,
/// which the second grain table describes. `parent`: its content id, and the name.
fn esx(folder: &Path, name: &str, parent: (&str, &str), first: usize, data: &[u8; 512]) {
    let mut extent = b"COWD".to_vec();
    for word in [1u32, 3, 8192, 1, 4, 2, 80] {
        extent.extend(word.to_le_bytes());
    }
    extent.resize(80 * 512, 0);
    let mut put = |at: usize, word: u32| extent[at..at + 4].copy_from_slice(&word.to_le_bytes());
    put(4 * 512, 8);
    put(4 * 512 + 4, 40);
    put(8 * 512 + first * 4, 80);
    put(40 * 512 + (5000 - 4096) * 4, 81);
    extent.extend(data);
    extent.extend(data);
    fs::write(folder.join(format!("{name}-delta.vmdk")), extent).unwrap();
    let (cid, hint) = parent;
    let descriptor = format!(
        "# Disk DescriptorFile\nversion=1\nCID=fffffffe\nparentCID={cid}\ncreateType=\"vmfsSparse\"\n{hint}\
         RW 8192 VMFSSPARSE \"{name}-delta.vmdk\"\n"
    );
    fs::write(folder.join(format!("{name}.vmdk")), descriptor).unwrap();
}

#[test]
fn esx_kinds_are_read() {
    let oracle = Oracle::new();
    let work = oracle.work();
    let data: [u8; 512] = std::array::from_fn(|index| index as u8);
    esx(&work, "esx", ("ffffffff", ""), 5, &data);
    let mut expected = vec![0; 8192 * 512];
    expected[5 * 512..6 * 512].copy_from_slice(&data);
    expected[5000 * 512..5001 * 512].copy_from_slice(&data);
    fs::write(work.join("expected.raw"), &expected).unwrap();
    oracle.make("compare -F vmdk expected.raw esx.vmdk");
    ours(&oracle, "compare expected.raw esx.vmdk");
    oracle.compare("info esx.vmdk");
    oracle.compare("map --output=json esx.vmdk");
    // A snapshot over it.
    esx(&work, "top", ("fffffffe", "parentFileNameHint=\"esx.vmdk\"\n"), 7, &[0xee; 512]);
    let mut above = expected.clone();
    above[7 * 512..8 * 512].fill(0xee);
    above[5000 * 512..5001 * 512].fill(0xee);
    fs::write(work.join("above.raw"), &above).unwrap();
    oracle.make("compare -F vmdk above.raw top.vmdk");
    ours(&oracle, "compare above.raw top.vmdk");
    oracle.compare("map --output=json top.vmdk");
    // Flat extents of ESX, with windows into one file and a part without a file.
    fs::write(work.join("disk-flat.vmdk"), &expected).unwrap();
    let descriptor = "# Disk DescriptorFile\nversion=1\nCID=1\nparentCID=ffffffff\ncreateType=\"vmfs\"\n\
                      RW 6 VMFS \"disk-flat.vmdk\"\n";
    fs::write(work.join("disk.vmdk"), descriptor).unwrap();
    oracle.compare("info disk.vmdk");
    oracle.compare("map --output=json disk.vmdk");
    oracle.verdict();
    let more = "RW 10 ZERO\nRDONLY 4 FLAT \"disk-flat.vmdk\" 4999\n";
    fs::write(work.join("disk.vmdk"), format!("{descriptor}{more}")).unwrap();
    ours(&oracle, "convert -O raw disk.vmdk disk.raw");
    let mut joined = expected[..6 * 512].to_vec();
    joined.resize(16 * 512, 0);
    joined.extend(&expected[4999 * 512..5003 * 512]);
    assert_eq!(fs::read(work.join("disk.raw")).unwrap(), joined);
}

/// QEMU writes to them, and leaves the free sector of the header as it is.
#[test]
fn extents_with_the_older_header_of_esx_can_only_be_read() {
    let oracle = Oracle::new();
    let work = oracle.work();
    esx(&work, "esx", ("ffffffff", ""), 5, &[7; 512]);
    let files = || ["esx.vmdk", "esx-delta.vmdk"].map(|name| fs::read(work.join(name)).unwrap());
    let before = files();
    oracle.make("create -q -f raw source.raw 4M");
    oracle.make("create -q -f qcow2 -F vmdk -b esx.vmdk top.qcow2");
    oracle.io(&["write -P 5 1M 64k"], "top.qcow2");
    for line in ["convert -n -O vmdk source.raw esx.vmdk", "commit top.qcow2"] {
        let said = oracle.ours(&work, &words(line));
        let named =
            said.err.contains("esx-delta.vmdk") && said.err.contains("extents of the kind vmfsSparse can only be read");
        assert!(said.code == Some(1) && named, "{line}: {}", said.err);
    }
    assert!(files() == before, "the disk was changed");
    ours(&oracle, "check esx.vmdk");
    ours(&oracle, "convert -O raw esx.vmdk out.raw");
    // QEMU's write puts a grain where ESX puts its next one.
    oracle.io(&["write -P 5 0 512"], "esx.vmdk");
    let after = files();
    assert!(after[1].len() > before[1].len() && after[1][28..32] == before[1][28..32], "the free sector stays");
}

#[test]
fn writing_is_refused_and_harms_nothing() {
    let oracle = Oracle::new();
    gallery(&oracle, "10M", &SMALL);
    let before = fs::read(oracle.work().join("streamOptimized.vmdk")).unwrap();
    for (line, words_of_it) in [
        ("resize streamOptimized.vmdk 20M", "Image format driver does not support resize"),
        ("convert -n -O vmdk source.raw streamOptimized.vmdk", "error while writing at byte 0: Input/output error"),
    ] {
        let said = oracle.ours(&oracle.work(), &words(line));
        assert_eq!(said.code, Some(1), "{line}");
        assert!(said.err.contains(words_of_it), "{line}: {}", said.err);
    }
    assert_eq!(fs::read(oracle.work().join("streamOptimized.vmdk")).unwrap(), before);
}

#[test]
fn a_stream_over_a_backing_file_is_refused_by_name() {
    let oracle = Oracle::new();
    oracle.make("create -q -f raw source.raw 4M");
    oracle.make("create -q -f vmdk base.vmdk 4M");
    let said = oracle.refused("convert -O vmdk -o subformat=streamOptimized -B base.vmdk -F vmdk source.raw out.vmdk");
    assert!(said.contains("a streamOptimized VMDK image takes no backing file"), "{said}");
    assert!(!oracle.work().join("out.vmdk").exists());
}

/// VMware tracks the changes of these disks: a write of ours would be missing in the next incremental backup.
#[test]
fn a_disk_whose_changes_are_tracked_can_only_be_read() {
    let oracle = Oracle::new();
    let at = |name: &str| oracle.work().join(name);
    for subformat in ["monolithicSparse", "twoGbMaxExtentSparse"] {
        oracle.make(&format!("create -q -f vmdk -o subformat={subformat} {subformat}.vmdk 4M"));
    }
    for name in ["monolithicSparse.vmdk", "twoGbMaxExtentSparse-s001.vmdk"] {
        let mut bytes = fs::read(at(name)).unwrap();
        bytes[4] = 3;
        fs::write(at(name), bytes).unwrap();
    }
    fs::write(at("esx-flat.vmdk"), vec![7; 4 << 20]).unwrap();
    let esx = "# Disk DescriptorFile\nversion=3\nCID=3c568126\nparentCID=ffffffff\ncreateType=\"vmfs\"\n\
               RW 8192 VMFS \"esx-flat.vmdk\"\nchangeTrackPath=\"esx-ctk.vmdk\"\n";
    fs::write(at("esx.vmdk"), esx).unwrap();
    let cases = [
        ("monolithicSparse.vmdk", "VMDK version 3 must be read only"),
        ("twoGbMaxExtentSparse.vmdk", "VMDK version 3 must be read only"),
        ("esx.vmdk", "changeTrackPath"),
    ];
    oracle.make("create -q -f raw source.raw 4M");
    for (image, words_of_it) in cases {
        let files =
            || ["", "-s001", "-flat"].map(|part| fs::read(at(&image.replace(".vmdk", &format!("{part}.vmdk")))).ok());
        let before = files();
        ours(&oracle, &format!("convert -f vmdk -O raw {image} out.raw"));
        ours(&oracle, &format!("check -f vmdk {image}"));
        oracle.make(&format!("create -q -f qcow2 -F vmdk -b {image} top.qcow2"));
        oracle.io(&["write -P 5 1M 64k"], "top.qcow2");
        for line in [format!("convert -n -O vmdk source.raw {image}"), "commit top.qcow2".to_owned()] {
            let said = oracle.ours(&oracle.work(), &words(&line));
            assert!(said.code == Some(1) && said.err.contains(words_of_it), "{line}: {}", said.err);
        }
        assert!(files() == before, "{image} was changed");
    }
    // QEMU's words, where it refuses.
    let line = words("convert -n -O vmdk source.raw monolithicSparse.vmdk");
    assert!(oracle.real(&oracle.work(), &line).err.contains("VMDK version 3 must be read only"));
}

#[test]
fn a_disk_of_more_files_than_the_soft_limit_opens() {
    let oracle = Oracle::new();
    let folder = oracle.work();
    let mut text =
        "# Disk DescriptorFile\nversion=1\nCID=1\nparentCID=ffffffff\ncreateType=\"twoGbMaxExtentFlat\"\n".to_owned();
    for number in 1..=100 {
        fs::write(folder.join(format!("d-f{number:03}.vmdk")), [7; 512]).unwrap();
        text += &format!("RW 1 FLAT \"d-f{number:03}.vmdk\" 0\n");
    }
    fs::write(folder.join("d.vmdk"), text).unwrap();
    for (limit, code) in [("64:1024", 0), ("64:64", 1)] {
        let mut command = std::process::Command::new("prlimit");
        command.args([&format!("--nofile={limit}"), env!("CARGO_BIN_EXE_cowshed"), "info", "d.vmdk"]);
        let output = command.current_dir(&folder).output().expect("prlimit must be installed (util-linux)");
        assert_eq!(output.status.code(), Some(code), "{limit}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

/// VMware on Windows writes names in the encoding of the machine. A name is its bytes, as in QEMU.
#[test]
fn descriptors_in_other_encodings_name_files_by_their_bytes() {
    let oracle = Oracle::new();
    let work = oracle.work();
    let foreign = |start: &str, end: &str| [start.as_bytes(), &b"b\xe4r"[..], end.as_bytes()].concat();
    let name = |end: &str| work.join(OsStr::from_bytes(&foreign("", end)));
    fs::write(name("-flat.vmdk"), [0x5a; 64 << 10]).unwrap();
    let start = "# Disk DescriptorFile\nversion=1\nencoding=\"windows-1252\"\nCID=1\nparentCID=ffffffff\n\
                 createType=\"monolithicFlat\"\nRW 128 FLAT \"";
    fs::write(work.join("disk.vmdk"), foreign(start, "-flat.vmdk\" 0\n")).unwrap();
    fs::write(work.join("model"), [0x5a; 64 << 10]).unwrap();
    oracle.make("compare -f vmdk -F raw disk.vmdk model");
    ours(&oracle, "compare -f vmdk -F raw disk.vmdk model");
    io(&oracle, "vmdk", "disk.vmdk", &["write -P 1 0 4k"]);
    oracle.io(&["read -P 1 0 4k", "read -P 0x5a 4k 60k"], "disk.vmdk");
    // New ones, and overlays over them: QEMU writes the same bytes.
    let run = |program: &Path, words: &[&[u8]]| {
        let words = words.iter().map(|word| OsStr::from_bytes(word));
        let said = Command::new(program).args(words).current_dir(&work).output().unwrap();
        assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    };
    for (program, ending) in [(oracle.bin().join("qemu-img"), "1.vmdk"), (oracle.qemu.img_path().to_owned(), "2.vmdk")]
    {
        let split: &[u8] = b"subformat=twoGbMaxExtentSparse";
        let (base, top) = (foreign("", ending), foreign("top", ending));
        run(&program, &[b"create", b"-q", b"-f", b"vmdk", b"-o", split, &base, b"4M"]);
        run(&program, &[b"create", b"-q", b"-f", b"vmdk", b"-F", b"vmdk", b"-b", &base, &top]);
    }
    let masked = |prefix: &str, number: &str| {
        let bytes = fs::read(work.join(OsStr::from_bytes(&foreign(prefix, &format!("{number}.vmdk"))))).unwrap();
        let text = bytes[if prefix.is_empty() { 0 } else { 512 }..].split(|byte| *byte == 0).next().unwrap().to_vec();
        let lines = text
            .split(|byte| *byte == b'\n')
            .filter(|line| !line.starts_with(b"CID") && !line.starts_with(b"parentCID"));
        let lines: Vec<u8> = lines.collect::<Vec<_>>().join(&b'\n');
        lines.iter().map(|byte| if byte.is_ascii_digit() { b'0' } else { *byte }).collect::<Vec<u8>>()
    };
    for prefix in ["", "top"] {
        assert_eq!(masked(prefix, "1").escape_ascii().to_string(), masked(prefix, "2").escape_ascii().to_string());
    }
    for program in [oracle.bin().join("qemu-img"), oracle.qemu.img_path().to_owned()] {
        for number in ["1", "2"] {
            let top = foreign("top", &format!("{number}.vmdk"));
            run(&program, &[b"map", b"-f", b"vmdk", &top]);
        }
    }
}

/// A chain of three with data in each, and the content of the top.
fn chain(oracle: &Oracle) {
    oracle.make("create -q -f vmdk base.vmdk 4M");
    oracle.io(&["write -P 1 0 1M"], "base.vmdk");
    oracle.make("create -q -f vmdk -b base.vmdk -F vmdk mid.vmdk");
    oracle.io(&["write -P 2 512k 1M"], "mid.vmdk");
    oracle.make("create -q -f vmdk -b mid.vmdk -F vmdk top.vmdk");
    oracle.io(&["write -P 3 1M 1M"], "top.vmdk");
    oracle.make("convert -f vmdk -O raw top.vmdk top.raw");
}

/// A commit changes the parent, and the overlays above it read as before.
#[test]
fn overlays_follow_a_parent_that_a_commit_changes() {
    for line in ["commit -q mid.vmdk", "commit -q top.vmdk", "commit -q -b base.vmdk top.vmdk"] {
        let oracle = Oracle::new();
        chain(&oracle);
        oracle.make("convert -f vmdk -O raw mid.vmdk mid.raw");
        ours(&oracle, line);
        // The middle layer is another disk once the top has been committed past it.
        for image in ["mid", "top"].iter().filter(|image| **image == "mid" || line != "commit -q mid.vmdk") {
            ours(&oracle, &format!("info {image}.vmdk"));
            oracle.make(&format!("info {image}.vmdk"));
        }
        if line == "commit -q mid.vmdk" {
            ours(&oracle, "compare mid.vmdk mid.raw");
            ours(&oracle, "compare base.vmdk mid.raw");
            oracle.make("compare mid.vmdk mid.raw");
        } else {
            ours(&oracle, "compare top.vmdk top.raw");
            oracle.make("compare top.vmdk top.raw");
        }
        ours(&oracle, if line.contains("-b") { "compare base.vmdk top.raw" } else { "check base.vmdk" });
    }
}

/// Without space for the rest: the overlay has all that it had, and the next attempt succeeds.
#[test]
fn a_commit_to_a_vmdk_parent_that_fails_is_repeated() {
    let oracle = Oracle::new();
    chain(&oracle);
    let len = fs::metadata(oracle.work().join("mid.vmdk")).unwrap().len();
    let mut command = std::process::Command::new("prlimit");
    command.arg(format!("--fsize={}", len + (256 << 10))).arg(env!("CARGO_BIN_EXE_cowshed"));
    let failed = command.args(["commit", "-q", "top.vmdk"]).current_dir(oracle.work()).output().unwrap();
    assert_eq!(failed.status.code(), Some(1), "{}", String::from_utf8_lossy(&failed.stderr));
    ours(&oracle, "compare top.vmdk top.raw");
    oracle.make("compare top.vmdk top.raw");
    ours(&oracle, "commit -q top.vmdk");
    for image in ["top.vmdk", "mid.vmdk"] {
        ours(&oracle, &format!("compare {image} top.raw"));
        oracle.make(&format!("compare {image} top.raw"));
    }
}

/// The note in the layer above the base comes before the base is changed.
#[test]
fn a_commit_that_a_layer_cannot_note_changes_nothing() {
    let oracle = Oracle::new();
    chain(&oracle);
    let mid = oracle.work().join("mid.vmdk");
    let mut bytes = fs::read(&mid).unwrap();
    let line = b"# Extent description\nRW ";
    let at = bytes.windows(line.len()).position(|part| part == line).expect("the line of its extent");
    bytes[at..at + line.len()].copy_from_slice(b"# Extent descrip\nRDONLY ");
    fs::write(&mid, bytes).unwrap();
    let files = || ["base.vmdk", "mid.vmdk", "top.vmdk"].map(|name| fs::read(oracle.work().join(name)).unwrap());
    let before = files();
    assert!(oracle.refused("commit -q -b base.vmdk top.vmdk").contains("forbids to write"));
    assert!(before == files());
    ours(&oracle, "compare top.vmdk top.raw");
}

/// The id says that the content is another one.
#[test]
fn a_discard_of_nothing_leaves_the_content_id() {
    let oracle = Oracle::new();
    chain(&oracle);
    let before = fs::read(oracle.work().join("base.vmdk")).unwrap();
    io(&oracle, "vmdk", "base.vmdk", &["discard 2M 1M"]);
    assert!(before == fs::read(oracle.work().join("base.vmdk")).unwrap());
    ours(&oracle, "compare top.vmdk top.raw");
    // Also over more than one table.
    oracle.make("create -q -f vmdk large.vmdk 256M");
    let large = fs::read(oracle.work().join("large.vmdk")).unwrap();
    io(&oracle, "vmdk", "large.vmdk", &["discard 0 40M", "discard 128M 128M"]);
    assert!(large == fs::read(oracle.work().join("large.vmdk")).unwrap());
    io(&oracle, "vmdk", "base.vmdk", &["discard 0 64k"]);
    assert!(oracle.refused("map top.vmdk").contains("was changed since"));
}

/// A client of an export reads what it wrote, before the tables are in the file.
#[test]
fn a_stream_is_read_while_it_is_written() {
    let oracle = Oracle::new();
    let commands = [
        "write -P 2 64k 64k",
        "read -P 2 64k 64k",
        "read -P 0 0 64k",
        "write -P 3 64k 64k",
        "write -P 3 1k 1k",
        "map",
        "flush",
        "read -P 2 80k 1k",
        "discard 64k 64k",
        "write -z 64k 64k",
        "read -P 2 64k 64k",
        "write -P 5 33M 128k",
        "read -P 5 33M 128k",
        "read -P 0 32M 1M",
        "write -P 7 40895k 65k",
        "map",
    ];
    let run = |program: &mut Command| {
        oracle.make("create -q -f vmdk -o subformat=streamOptimized a.vmdk 40M");
        let commands = commands.iter().flat_map(|command| ["-c", *command]);
        let output = program.current_dir(oracle.work()).args(["-f", "vmdk"]).args(commands).arg("a.vmdk").output();
        let said = String::from_utf8_lossy(&output.expect("it runs").stdout).into_owned();
        said.lines().filter(|line| !line.contains("ops;")).map(str::to_owned).collect::<Vec<_>>()
    };
    let ours_said = run(Command::new(env!("CARGO_BIN_EXE_cowshed")).arg("qemu-io"));
    oracle.make("convert -f vmdk -O raw a.vmdk ours.raw");
    ours(&oracle, "check -f vmdk a.vmdk");
    assert_eq!(ours_said, run(&mut Command::new(Qemu::newest().program("qemu-io"))));
    oracle.make("compare -f raw -F vmdk ours.raw a.vmdk");
}

/// The header leads to the tables of the flush until others are whole.
#[test]
fn a_stream_reads_as_flushed_after_its_writer_died() {
    let oracle = Oracle::new();
    let io = |commands: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cowshed"));
        command.current_dir(oracle.work()).args(["qemu-io", "-f", "vmdk"]);
        for text in commands {
            command.args(["-c", text]);
        }
        command.arg("a.vmdk").output().unwrap()
    };
    for flushes in 1..4 {
        oracle.make("create -q -f vmdk -o subformat=streamOptimized a.vmdk 40M");
        let mut commands = Vec::new();
        for flush in 0..flushes {
            commands.push(format!("write -P {} {}M 64k", flush + 1, flush * 8));
            commands.push("flush".to_owned());
        }
        commands.extend(["write -P 200 39M 64k", "abort"].map(str::to_owned));
        let died = io(&commands.iter().map(String::as_str).collect::<Vec<_>>());
        assert!(died.status.code().is_none(), "{died:?}");
        oracle.make("convert -f vmdk -O raw a.vmdk read");
        let read = fs::read(oracle.work().join("read")).unwrap();
        let mut model = vec![0; 40 << 20];
        for flush in 0..flushes {
            model[(flush * 8) << 20..][..64 << 10].fill(flush as u8 + 1);
        }
        // The write behind the last flush is there, or isn't.
        let last = read[39 << 20];
        assert!(last == 0 || last == 200, "{last}");
        model[39 << 20..][..64 << 10].fill(last);
        assert!(read == model, "{flushes} flushes");
        ours(&oracle, "compare -q -f vmdk -F raw a.vmdk read");
        ours(&oracle, "check -f vmdk a.vmdk");
    }
}

/// Links that lead nowhere yet, too. The image could not be opened.
#[test]
fn extents_that_are_one_file_are_refused() {
    let oracle = Oracle::new();
    let at = |name: &str| oracle.work().join(name);
    for (subformat, size, link, target) in [
        ("monolithicFlat", "3M", "w-flat.vmdk", "w.vmdk"),
        ("twoGbMaxExtentSparse", "3G", "w-s002.vmdk", "w-s001.vmdk"),
        ("twoGbMaxExtentFlat", "3G", "w-f002.vmdk", "./w-f001.vmdk"),
    ] {
        for is_there in [false, true] {
            std::os::unix::fs::symlink(target, at(link)).unwrap();
            if is_there {
                fs::write(at(target), "old").unwrap();
            }
            let message = oracle.refused(&format!("create -f vmdk -o subformat={subformat} w.vmdk {size}"));
            assert!(message.contains(link), "{message}");
            let left: Vec<_> = fs::read_dir(oracle.work()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            assert_eq!(left.len(), 1 + usize::from(is_there), "{left:?}");
            if is_there {
                assert_eq!(fs::read(at(target)).unwrap(), b"old");
                fs::remove_file(at(target)).unwrap();
            }
            fs::remove_file(at(link)).unwrap();
        }
    }
    // The data file of a qcow2 image is a file beside it, too.
    std::os::unix::fs::symlink("a.qcow2", at("data")).unwrap();
    let message = oracle.refused("create -f qcow2 -o data_file=data a.qcow2 1M");
    assert!(message.contains("can't be the image itself"), "{message}");
    assert!(!at("a.qcow2").exists());
}
