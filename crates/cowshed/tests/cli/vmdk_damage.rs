// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Damaged and hostile VMDK images: one clear error, no foreign file opened, no memory for the asking.

use crate::oracle::{Oracle, words};
use crate::ova;
use std::fs;
use std::path::Path;

fn descriptor(create_type: &str, lines: &str) -> String {
    format!("# Disk DescriptorFile\nversion=1\nCID=1\nparentCID=ffffffff\ncreateType=\"{create_type}\"\n{lines}\n")
}

#[test]
fn a_descriptor_does_not_lead_out_of_its_folder() {
    let oracle = Oracle::new();
    let work = oracle.work();
    let secret = work.join("secret");
    fs::write(&secret, [7; 4096]).unwrap();
    fs::create_dir(work.join("upload")).unwrap();
    std::os::unix::fs::symlink("../secret", work.join("upload/link")).unwrap();
    fs::write(work.join("upload/own"), [1; 4096]).unwrap();
    let write = |name: &str| {
        let lines = format!("RW 8 FLAT \"{name}\" 0");
        fs::write(work.join("upload/disk.vmdk"), descriptor("monolithicFlat", &lines)).unwrap();
    };
    let absolute = secret.to_str().unwrap().to_owned();
    for name in [absolute.as_str(), "../secret", "sub/../../secret", "/etc/hostname"] {
        write(name);
        for line in ["info upload/disk.vmdk", "convert -O raw upload/disk.vmdk out.raw"] {
            let message = oracle.refused(line);
            assert!(message.contains("not in its own folder") && message.contains("extents=anywhere"), "{message}");
        }
    }
    // Names that would be another driver elsewhere are file names here.
    for name in ["json:{\\\"driver\\\":\\\"file\\\",\\\"filename\\\":\\\"../secret\\\"}", "file:../secret", "nbd:x:1"] {
        write(name);
        oracle.refused("info upload/disk.vmdk");
    }
    assert!(!work.join("out.raw").exists());
    let inspect = || {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_cowshed"));
        let output =
            command.args(["inspect", "--output=json", "upload/disk.vmdk"]).current_dir(&work).output().unwrap();
        (output.status.code(), serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap())
    };
    write("../secret");
    let (code, verdict) = inspect();
    assert!(code == Some(2) && verdict["verdict"] == "suspicious", "{verdict}");
    write("own");
    let (code, verdict) = inspect();
    assert!(code == Some(2) && verdict["verdict"] == "asks-for-files", "{verdict}");
    assert_eq!((&verdict["asks-for"][0]["name"], &verdict["virtual-size"]), (&"own".into(), &4096.into()));
    // The user's own word counts.
    write("../secret");
    let line = "convert -O raw --image-opts driver=vmdk,extents=anywhere,file.filename=upload/disk.vmdk out.raw";
    assert_eq!(oracle.ours(&work, &words(line)).code, Some(0));
    assert_eq!(fs::read(work.join("out.raw")).unwrap(), [7; 4096]);
    // A link is the user's, unless the image comes from a stranger.
    write("link");
    assert_eq!(oracle.ours(&work, &words("info upload/disk.vmdk")).code, Some(0));
    let message = oracle.refused("info --untrusted --allow extents upload/disk.vmdk");
    assert!(message.contains("symbolic link"), "{message}");
    write("own");
    let message = oracle.refused("info --untrusted upload/disk.vmdk");
    assert!(message.contains("'own'") && message.contains("'--allow extents' does"), "{message}");
    for line in [
        "convert --untrusted --allow extents -O raw upload/disk.vmdk out.raw",
        "info --untrusted --allow extents upload/disk.vmdk",
    ] {
        let said = oracle.ours(&work, &words(line));
        assert_eq!(said.code, Some(0), "{line}: {}", said.err);
    }
    assert_eq!(fs::read(work.join("out.raw")).unwrap(), [1; 4096]);
}

#[test]
fn the_parent_is_a_backing_file_to_the_policy() {
    let oracle = Oracle::new();
    oracle.make("create -q -f vmdk base.vmdk 1M");
    oracle.make("create -q -f vmdk -b base.vmdk -F vmdk child.vmdk");
    let message = oracle.refused("convert --untrusted -O raw child.vmdk out.raw");
    assert!(message.contains("'base.vmdk'") && message.contains("policy"), "{message}");
    let line = "convert --untrusted --allow backing -O raw child.vmdk out.raw";
    assert_eq!(oracle.ours(&oracle.work(), &words(line)).code, Some(0));
    // A parent is a VMDK image, whatever its content looks like.
    fs::write(oracle.work().join("base.vmdk"), vec![0x41; 1 << 20]).unwrap();
    let message = oracle.refused("convert -O raw child.vmdk out.raw");
    assert!(message.contains("backing file") && message.contains("invalid VMDK image descriptor"), "{message}");
}

#[test]
fn damaged_headers_and_tables_are_named() {
    let oracle = Oracle::new();
    oracle.make("create -q -f raw source.raw 10M");
    oracle.io(&["write -P 1 64k 64k"], "source.raw");
    oracle.make("convert -O vmdk source.raw good.vmdk");
    let good = fs::read(oracle.work().join("good.vmdk")).unwrap();
    let word = |at: usize| u32::from_le_bytes(good[at..at + 4].try_into().unwrap()) as usize;
    let directory = word(56) * 512;
    let table = word(directory) * 512;
    let with = |at: usize, bytes: &[u8]| {
        let mut image = good.clone();
        image[at..at + bytes.len()].copy_from_slice(bytes);
        fs::write(oracle.work().join("bad.vmdk"), image).unwrap();
    };
    for (at, bytes, field) in [
        (4, &[9u8, 0, 0, 0][..], "version"),
        (12, &[0xff; 8], "capacity"),
        (12, &[0, 0, 0, 0, 0, 0, 0, 1], "capacity"),
        (20, &[0; 8], "grainSize"),
        (20, &[0xff; 8], "grainSize"),
        (44, &[0xff; 4], "numGTEsPerGT"),
        (75, b"\n", "transfer as text"),
        (512, &[0; 512], "createType"),
        (28, &[0; 8], "descriptorOffset"),
    ] {
        with(at, bytes);
        let message = oracle.refused("info bad.vmdk");
        assert!(message.contains(field), "{at}: {message}");
        assert!(oracle.refused("convert -O raw bad.vmdk out.raw").contains(field));
    }
    // A grain behind the end of the file: the same verdict as qemu-img's, which reads it as zeroes, though.
    with(table + 4, &0x70_0000u32.to_le_bytes());
    let real = oracle.real(&oracle.work(), &words("check bad.vmdk"));
    assert_eq!(real.code, Some(1));
    let message = oracle.refused("check bad.vmdk");
    assert!(message.contains("cluster offset for sector 128 points after EOF: "), "{message}");
    let message = oracle.refused("convert -O raw bad.vmdk out.raw");
    assert!(message.contains("points after EOF"), "{message}");
    // One directory is lost, the other is there.
    with(56, &(1u64 << 40).to_le_bytes());
    let said = oracle.ours(&oracle.work(), &words("compare bad.vmdk source.raw"));
    assert_eq!(said.code, Some(0), "{}", said.err);
    with(directory, &0x70_0000u32.to_le_bytes());
    let said = oracle.ours(&oracle.work(), &words("compare bad.vmdk source.raw"));
    assert_eq!(said.code, Some(0), "{}", said.err);
    // Both are.
    with(48, &[&(1u64 << 40).to_le_bytes()[..], &(1u64 << 40).to_le_bytes()].concat());
    assert!(oracle.refused("info bad.vmdk").contains("gdOffset"));
}

/// QEMU looks at the places of grains alone, and finds nothing here.
#[test]
fn grains_and_tables_on_each_other_are_found() {
    let oracle = Oracle::new();
    oracle.make("create -q -f raw source.raw 40M");
    oracle.io(&["write -P 1 64k 64k", "write -P 2 256k 64k", "write -P 3 35M 64k"], "source.raw");
    oracle.make("convert -O vmdk source.raw good.vmdk");
    let good = fs::read(oracle.work().join("good.vmdk")).unwrap();
    let word = |at: usize| u32::from_le_bytes(good[at..at + 4].try_into().unwrap());
    let (directory, copies) = (word(56) as usize * 512, word(48) as usize * 512);
    let table = word(directory) as usize * 512;
    let copy = word(copies) as usize * 512;
    let check = |changes: &[(usize, u32)]| {
        let mut image = good.clone();
        for (at, value) in changes {
            image[*at..at + 4].copy_from_slice(&value.to_le_bytes());
        }
        fs::write(oracle.work().join("bad.vmdk"), image).unwrap();
        let said = oracle.ours(&oracle.work(), &words("check bad.vmdk"));
        (said.code, said.out + &said.err)
    };
    assert_eq!(check(&[]).0, Some(0));
    let first = word(table + 4);
    for (changes, wanted) in [
        (&[(table + 16, first)][..], "grain 4 lies on grain 1"),
        (&[(table + 16, first + 1)], "grain 4 lies on grain 1"),
        (&[(table + 16, 1)], "lies on the descriptor"),
        (&[(table + 16, word(56))], "lies on a grain directory"),
        (&[(table + 16, word(directory))], "lies on grain table 0"),
        (&[(directory + 4, word(directory))], "grain table 1 lies on grain table 0"),
        (&[(56, 1 << 30)], "the grain directory is not in the file, and its copy is used"),
        (&[(directory, 0x70_0000)], "grain table 0 is not in the file, and its copy is used"),
        (&[(copies, 0x70_0000)], "the copy of grain table 0 is not in the file"),
        (&[(48, 1 << 30)], "the copy of the grain directory is not in the file"),
        (&[(36, 1 << 30)], "the space of the descriptor is not all in the file"),
    ] {
        let (code, text) = check(changes);
        assert!(code == Some(2) && text.contains("ERROR: ") && text.contains(wanted), "{changes:?}: {code:?} {text}");
    }
    // A power cut leaves copies behind the first tables.
    let (code, text) = check(&[(copy + 4, 0), (copy + 16, 0)]);
    let wanted = "WARNING: extent 0: the copy of grain table 0 has 2 other entries";
    assert!(code == Some(0) && text.contains(wanted), "{code:?} {text}");
    // Two extents in one file.
    let lines = "RW 8 FLAT \"flat\" 0\nRW 8 FLAT \"flat\" 4";
    fs::write(oracle.work().join("flat"), [1; 8192]).unwrap();
    fs::write(oracle.work().join("two.vmdk"), descriptor("twoGbMaxExtentFlat", lines)).unwrap();
    let said = oracle.ours(&oracle.work(), &words("check two.vmdk"));
    assert!(said.code == Some(2) && format!("{said:?}").contains("extent 1 lies on extent 0"), "{said:?}");
}

/// New grains go behind the end of the file, where the lost part is said to be. QEMU writes there, and loses data.
#[test]
fn tables_behind_the_end_refuse_all_writes() {
    let oracle = Oracle::new();
    oracle.make("create -q -f vmdk good.vmdk 64M");
    oracle.io(&["write -P 17 0 1M", "write -P 18 40M 1M"], "good.vmdk");
    let good = fs::read(oracle.work().join("good.vmdk")).unwrap();
    let word = |at: usize| u32::from_le_bytes(good[at..at + 4].try_into().unwrap()) as usize;
    let (directory, copies) = (word(56) * 512, word(48) * 512);
    let sectors = good.len() / 512;
    let io = |read_only: bool, commands: &[&str]| {
        let mut args = vec!["io", "-f", "vmdk"];
        args.extend(read_only.then_some("-r"));
        args.extend(commands.iter().flat_map(|command| ["-c", *command]));
        args.push("bad.vmdk");
        let mut program = std::process::Command::new(env!("CARGO_BIN_EXE_cowshed"));
        let output = program.args(args).current_dir(oracle.work()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        (output.status.code(), said.into_owned())
    };
    for behind in [0, 128, 1024] {
        for at in [directory, copies, 48, 56, 36] {
            let mut image = good.clone();
            image[at..at + 4].copy_from_slice(&((sectors + behind) as u32).to_le_bytes());
            fs::write(oracle.work().join("bad.vmdk"), &image).unwrap();
            let (_, said) = io(false, &["write -P 33 8M 4M"]);
            assert!(said.contains("points after EOF, where new grains go"), "{at}: {said}");
            assert!(fs::read(oracle.work().join("bad.vmdk")).unwrap() == image, "{at}: it was changed");
            // It is read as before.
            let (code, said) = io(true, &["read -P 17 0 1M", "read -P 18 40M 1M", "read -P 0 8M 4M"]);
            assert!(code == Some(0) && !said.contains("fail"), "{at}: {said}");
            assert_eq!(oracle.ours(&oracle.work(), &words("check bad.vmdk")).code, Some(2), "{at}");
        }
    }
}

/// As in QEMU. Without the extents it would be a disk of 0 bytes.
#[test]
fn a_header_without_capacity_leads_to_extents() {
    let oracle = Oracle::new();
    let work = oracle.work();
    fs::write(work.join("flat"), [0x41; 1 << 20]).unwrap();
    oracle.make("create -q -f vmdk disk.vmdk 1M");
    let mut image = fs::read(work.join("disk.vmdk")).unwrap();
    let text = descriptor("monolithicFlat", "RW 2048 FLAT \"flat\" 0");
    image[12..20].fill(0);
    image[512..21 * 512].fill(0);
    image[512..512 + text.len()].copy_from_slice(text.as_bytes());
    fs::write(work.join("disk.vmdk"), &image).unwrap();
    oracle.make("convert -f vmdk -O raw disk.vmdk real.raw");
    let said = oracle.ours(&work, &words("convert -f vmdk -O raw disk.vmdk ours.raw"));
    assert_eq!(said.code, Some(0), "{}", said.err);
    let real = fs::read(work.join("real.raw")).unwrap();
    assert!(real == [0x41; 1 << 20] && fs::read(work.join("ours.raw")).unwrap() == real);
    let message = oracle.refused("info --untrusted disk.vmdk");
    assert!(message.contains("'flat'") && message.contains("'--allow extents' does"), "{message}");
    // A write goes to the extent, and the content id to its place.
    let mut program = std::process::Command::new(env!("CARGO_BIN_EXE_cowshed"));
    let args = ["io", "-f", "vmdk", "-c", "write -P 9 0 64k", "disk.vmdk"];
    assert!(program.args(args).current_dir(&work).status().unwrap().success());
    let changed = fs::read(work.join("disk.vmdk")).unwrap();
    assert!(changed.len() == image.len() && changed[..512] == image[..512] && changed != image);
    assert_eq!(fs::read(work.join("flat")).unwrap()[..65_537], [&[9; 65_536][..], &[0x41]].concat());
    // A disk of 0 bytes is one still, and the file itself is no extent.
    oracle.make("create -q -f vmdk empty.vmdk 0");
    assert_eq!(oracle.ours(&work, &words("info -f vmdk empty.vmdk")).code, Some(0));
    image[512..21 * 512].fill(0);
    let text = descriptor("monolithicSparse", "RW 2048 SPARSE \"disk.vmdk\"");
    image[512..512 + text.len()].copy_from_slice(text.as_bytes());
    fs::write(work.join("disk.vmdk"), &image).unwrap();
    oracle.refused("info -f vmdk disk.vmdk");
}

/// The space for a descriptor may be any number. No more of it is read than when the disk was opened.
#[test]
fn space_for_a_descriptor_takes_no_memory() {
    let oracle = Oracle::new();
    let work = oracle.work();
    oracle.make("create -q -f vmdk disk.vmdk 64M");
    let image = fs::read(work.join("disk.vmdk")).unwrap();
    let (place, space) = (1u64 << 20, 3u64 << 30);
    let file = fs::OpenOptions::new().write(true).open(work.join("disk.vmdk")).unwrap();
    file.set_len(place + space).unwrap();
    let put = |at: u64, bytes: &[u8]| std::os::unix::fs::FileExt::write_all_at(&file, bytes, at).unwrap();
    put(place, &image[512..21 * 512]);
    put(28, &(place / 512).to_le_bytes());
    put(36, &(space / 512).to_le_bytes());
    let mut command = std::process::Command::new("bash");
    // 2 GiB of addresses: less than the space.
    let script = "ulimit -v 2097152; exec \"$0\" io -f vmdk -c 'write -P 3 0 64k' -c 'read -P 3 0 64k' disk.vmdk";
    let output = command.args(["-c", script, env!("CARGO_BIN_EXE_cowshed")]).current_dir(&work).output().unwrap();
    assert!(output.status.success() && !format!("{output:?}").contains("fail"), "{output:?}");
}

#[test]
fn damaged_streams_are_named() {
    let oracle = Oracle::new();
    oracle.make("create -q -f raw source.raw 10M");
    oracle.io(&["write -P 1 64k 64k"], "source.raw");
    oracle.make("convert -O vmdk -o subformat=streamOptimized source.raw good.vmdk");
    let good = fs::read(oracle.work().join("good.vmdk")).unwrap();
    let grain = 128 * 512;
    assert_eq!(good[grain], 128, "the header of the only grain");
    let convert = |image: &[u8]| {
        fs::write(oracle.work().join("bad.vmdk"), image).unwrap();
        oracle.refused("convert -O raw bad.vmdk out.raw")
    };
    for (at, byte, part) in [
        (grain, 127, "another sector"),
        (grain + 10, 0xff, "impossible length"),
        (grain + 8, 3, "zlib"),
        (grain + 16, 0xaa, "zlib"),
    ] {
        let mut image = good.clone();
        image[at] = byte;
        let message = convert(&image);
        assert!(message.contains(part), "{at}: {message}");
    }
    let message = convert(&good[..grain + 8]);
    assert!(message.contains("after EOF") || message.contains("impossible length"), "{message}");
}

#[test]
fn descriptors_that_lie_are_refused() {
    let oracle = Oracle::new();
    let work = oracle.work();
    oracle.make("create -q -f vmdk -o subformat=twoGbMaxExtentSparse split.vmdk 3G");
    fs::write(work.join("flat"), [0; 4096]).unwrap();
    let cases = [
        ("custom2", "RW 8 FLAT \"flat\" 0", "custom2"),
        ("monolithicFlat", "", "names no extents"),
        ("monolithicFlat", "RW 9 FLAT \"flat\" 0", "too short"),
        ("monolithicFlat", "RW 8 FLAT \"flat\" 1", "too short"),
        (
            "monolithicFlat",
            "RW 8 FLAT \"missing\" 0",
            "'disk.vmdk': Could not open 'missing': No such file or directory",
        ),
        ("monolithicFlat", "RW 8 FLAT \"./disk.vmdk\" 0", "names its own file as a part of the disk"),
        ("monolithicFlat", "RW 8 FOO \"flat\" 0", "'disk.vmdk': Invalid extent line: RW 8 FOO \"flat\" 0"),
        ("monolithicFlax", "RW 8 FLAT \"flat\" 0", "'disk.vmdk': Unsupported image type 'monolithicFlax'"),
        ("twoGbMaxExtentSparse", "RW 8 SPARSE \"flat\"", "Image not in VMDK format"),
        ("monolithicFlat", "NOACCESS 8 FLAT \"flat\" 0", "NOACCESS"),
        ("monolithicFlat", "RW 36028797018963967 ZERO", "no number of sectors"),
        ("vmfs", "RW 8 VMFSRDM \"flat\"", "VMFSRDM"),
        ("seSparse", "RW 8 SESPARSE \"flat\"", "Bad const header magic: 0x0000000000000000"),
        ("custom", "RW 8 SESPARSE \"flat\"", "this is no seSparse extent"),
        ("twoGbMaxExtentSparse", "RW 8 SPARSE \"flat\"", "no sparse VMDK extent"),
        ("twoGbMaxExtentSparse", "RW 4194305 SPARSE \"split-s001.vmdk\"", "4194305"),
        ("twoGbMaxExtentSparse", "RW 8 VMFSSPARSE \"split-s001.vmdk\"", "another kind"),
        ("monolithicFlat", "RW 8 FLAT \".\" 0", "regular file"),
    ];
    for (create_type, lines, part) in cases {
        fs::write(work.join("disk.vmdk"), descriptor(create_type, lines)).unwrap();
        // Our own reasons come behind QEMU's sentence under our own name only.
        let message = oracle.refused("info disk.vmdk") + &ova::refused(&oracle, "info disk.vmdk", &[]);
        assert!(message.contains(part), "{lines}: {message}");
    }
    // Windows into one file by two names.
    fs::write(work.join("disk.vmdk"), descriptor("monolithicFlat", "RW 4 FLAT \"flat\" 0\nRW 4 FLAT \"./flat\" 4"))
        .unwrap();
    assert_eq!(oracle.ours(&work, &words("convert -O raw disk.vmdk disk.raw")).code, Some(0));
    let one = oracle.refused("info split-s001.vmdk");
    assert!(one.contains("open the disk by its descriptor"), "{one}");
    // Huge on paper: refused under the limits for strangers, no memory needed without them.
    let lines = "RW 9007199254740991 ZERO";
    fs::write(work.join("disk.vmdk"), descriptor("monolithicFlat", lines)).unwrap();
    assert_eq!(oracle.ours(&work, &words("info disk.vmdk")).code, Some(0));
    assert!(oracle.refused("info --untrusted disk.vmdk").contains("policy"));
    check_names_of_messages(&work, &oracle);
}

#[test]
fn many_large_directories_are_refused() {
    let oracle = Oracle::new();
    let work = oracle.work();
    oracle.make("create -q -f vmdk -o subformat=twoGbMaxExtentSparse split.vmdk 3G");
    let header = fs::read(work.join("split-s001.vmdk")).unwrap()[..512].to_vec();
    // As large as one directory may be: 16 Mi entries of 32 MiB each.
    let sectors: u64 = (1 << 24) * (32 << 20) / 512;
    let mut lines = String::new();
    for name in ["a", "b"] {
        let mut bytes = header.clone();
        bytes[12..20].copy_from_slice(&sectors.to_le_bytes());
        let file = fs::File::create(work.join(name)).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &bytes, 0).unwrap();
        file.set_len(65 << 20).unwrap();
        lines += &format!("RW {sectors} SPARSE \"{name}\"\n");
    }
    let first = lines.lines().next().unwrap();
    fs::write(work.join("disk.vmdk"), descriptor("twoGbMaxExtentSparse", first)).unwrap();
    let said = oracle.ours(&work, &words("map --output=json disk.vmdk"));
    assert_eq!((said.code, said.out.lines().count()), (Some(0), 1), "{}{}", said.out, said.err);
    let message = oracle.refused("info --untrusted --allow extents disk.vmdk");
    assert!(message.contains("size is") && message.contains("policy"), "{message}");
    fs::write(work.join("disk.vmdk"), descriptor("twoGbMaxExtentSparse", &lines)).unwrap();
    assert!(oracle.refused("info disk.vmdk").contains("directories together"));
}

/// A message names the file that is wrong, which is not always the one that was opened.
fn check_names_of_messages(work: &Path, oracle: &Oracle) {
    let extent = work.join("split-s002.vmdk");
    let mut bytes = fs::read(&extent).unwrap();
    bytes[44] = 1;
    bytes[45] = 8;
    fs::write(&extent, bytes).unwrap();
    let message = oracle.refused("info split.vmdk");
    assert!(message.contains("split-s002.vmdk") && message.contains("extent 1"), "{message}");
}
