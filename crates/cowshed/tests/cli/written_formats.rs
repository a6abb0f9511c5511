// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Images of other formats, created and written by us and by two versions of QEMU in turns.

use crate::oracle::{Oracle, words};
use cowshed_testkit::qemu::Qemu;
use cowshed_testkit::random::{Random, for_each_seed};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Formats and the options of `create`.
const KINDS: &[(&str, &str)] = &[
    ("vdi", ""),
    ("vdi", "-o static=on"),
    ("vpc", ""),
    ("vpc", "-o force_size=on"),
    ("vpc", "-o subformat=fixed"),
    ("vpc", "-o subformat=fixed,force_size=on"),
    ("vhdx", ""),
    ("vhdx", "-o block_size=1M,log_size=3M"),
    ("vhdx", "-o block_state_zero=off"),
    ("vhdx", "-o subformat=fixed,block_state_zero=off"),
    ("qed", ""),
    ("qed", "-o cluster_size=16k,table_size=8"),
    ("qcow", ""),
    ("parallels", ""),
    ("parallels", "-o cluster_size=64k"),
    ("vmdk", ""),
    ("vmdk", "-o zeroed_grain=on,adapter_type=lsilogic,hwversion=11"),
    ("vmdk", "-o subformat=monolithicFlat,compat6=on"),
    ("vmdk", "-o subformat=twoGbMaxExtentSparse,toolsversion=7"),
    ("vmdk", "-o subformat=twoGbMaxExtentFlat,adapter_type=buslogic"),
];

/// Formats that QEMU can check.
const CHECKED: &[&str] = &["vdi", "vhdx", "vmdk", "qed", "parallels"];

/// Our tools under QEMU's names, QEMU's newest ones, and the system's.
struct Tools {
    folder: tempfile::TempDir,
    img: [PathBuf; 3],
    io: [PathBuf; 3],
}

impl Tools {
    fn new() -> Tools {
        let folder = cowshed_testkit::qemu::temp_dir();
        let own = ["qemu-img", "qemu-io"].map(|name| {
            let link = folder.path().join(name);
            std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_cowshed"), &link).unwrap();
            link
        });
        let [new, old] = [Qemu::newest(), Qemu::system()];
        let [own_img, own_io] = own;
        let img = [own_img, new.img_path().to_owned(), old.img_path().to_owned()];
        let io = [own_io, new.io_path().to_owned(), old.io_path().to_owned()];
        Tools { folder, img, io }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Removes the images.
    fn clear(&self) {
        for entry in fs::read_dir(self.folder.path()).unwrap() {
            let entry = entry.unwrap();
            if entry.file_name().to_string_lossy().starts_with("image") {
                fs::remove_file(entry.path()).unwrap();
            }
        }
    }

    /// The image and the files beside it, in order.
    fn images(&self) -> Vec<(String, Vec<u8>)> {
        let names = fs::read_dir(self.folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<String> = names.map(|name| name.to_string_lossy().into_owned()).collect();
        names.retain(|name| name.starts_with("image"));
        names.sort();
        names.into_iter().map(|name| (name.clone(), fs::read(self.path(&name)).unwrap())).collect()
    }

    #[track_caller]
    fn run(&self, program: &Path, arguments: &[String]) -> String {
        let output = Command::new(program).args(arguments).current_dir(self.folder.path()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success() && !said.contains("rror:") && !said.contains("failed"),
            "{program:?} {arguments:?}: {said}"
        );
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    #[track_caller]
    fn img(&self, tool: usize, line: &str) -> String {
        self.run(&self.img[tool], &words(line))
    }

    fn size(&self, format: &str, image: &str) -> usize {
        let info = self.img(1, &format!("info --output=json -f {format} {image}"));
        let info: serde_json::Value = serde_json::from_str(&info).unwrap();
        info["virtual-size"].as_u64().unwrap() as usize
    }
}

/// Requests of a guest, carried out on the model too.
fn guest(random: &mut Random, model: &mut [u8]) -> Vec<String> {
    let sectors = (model.len() / 512) as u64;
    let mut commands = Vec::new();
    for _ in 0..1 + random.below(12) {
        let most = [1, 8, 64, 3000][random.below(4) as usize].min(sectors);
        let len = (1 + random.below(most)) as usize * 512;
        let at = random.below((model.len() - len) as u64 / 512 + 1) as usize * 512;
        let pattern = 1 + random.below(250) as u8;
        let range = at..at + len;
        commands.push(match random.below(10) {
            0..=6 => {
                model[range].fill(pattern);
                format!("write -P {pattern} {at} {len}")
            }
            kind @ 7..=8 => {
                model[range].fill(0);
                format!("write -z{} {at} {len}", if kind == 7 { "" } else { "u" })
            }
            _ => "flush".to_owned(),
        });
    }
    commands
}

#[test]
fn images_are_written_in_turns_with_qemu() {
    for_each_seed(1, |seed| {
        let random = &mut Random::new(seed);
        let tools = Tools::new();
        for (kind, (format, options)) in KINDS.iter().enumerate() {
            let size = [1 << 20, 9_437_184, (40 << 20) + 512][random.below(3) as usize];
            let what = format!("seed {seed}, {format} {options}, {size} bytes");
            tools.img(kind % 2, &format!("create -q -f {format} {options} image {size}"));
            let mut model = vec![0; tools.size(format, "image")];
            for round in 0..5 {
                let tool = [0, 1, 0, 2, 0][round];
                let mut line = words(&format!("-d unmap -f {format}"));
                let commands = guest(random, &mut model);
                for command in &commands {
                    line.extend(["-c".to_owned(), command.clone()]);
                }
                line.push("image".to_owned());
                tools.run(&tools.io[tool], &line);
                for reader in [round % 3, 0] {
                    tools.img(reader, &format!("convert -f {format} -O raw image out"));
                    let same = fs::read(tools.path("out")).unwrap() == model;
                    assert!(same, "{what}, round {round}: tool {tool} did {commands:?}, reader {reader}");
                }
                if CHECKED.contains(format) {
                    tools.img(1 + round % 2, &format!("check -f {format} image"));
                }
            }
            tools.clear();
        }
    });
}

#[test]
fn new_image_equals_qemus_but_for_its_identifier() {
    let tools = Tools::new();
    // The places of the names and the time.
    let ours_may_differ = |format: &str, len: usize, at: usize| match format {
        "vdi" => (392..424).contains(&at),
        "vpc" => [0, len - 512].iter().any(|start| {
            [24..28, 64..84].iter().any(|part: &std::ops::Range<usize>| part.contains(&at.wrapping_sub(*start)))
        }),
        // Names, the program's name, and in the region tables that both regions are required; the disk's name.
        "vhdx" => at < 1 << 20 || at % (1 << 20) / 16 == 0x1_0010 / 16,
        _ => false,
    };
    for (format, options) in KINDS {
        for size in ["0", "1", "1023", "10M", "3000000001", "200G"] {
            let is_long = ["3000000001", "200G"].contains(&size);
            // QEMU makes no such disk of qcow either; of VHDX: COMPAT.
            if ["vhdx", "qcow"].contains(format) && size == "0" {
                continue;
            }
            if is_long && (options.contains("fixed") || options.contains("static") || options.contains("Flat")) {
                continue;
            }
            let made = [0, 1].map(|tool| {
                let line = tools.img(tool, &format!("create -f {format} {options} image {size}"));
                let images = tools.images();
                tools.clear();
                (line, images)
            });
            let [(our_line, ours), (real_line, real)] = made;
            let what = format!("{format} {options} {size}");
            assert_eq!(our_line, real_line);
            assert_eq!(ours.len(), real.len(), "{what}");
            for ((name, ours), (real_name, real)) in ours.into_iter().zip(real) {
                assert_eq!(name, real_name, "{what}");
                let (ours, real) = match format {
                    &"vmdk" => (without_cid(ours), without_cid(real)),
                    _ => (ours, real),
                };
                // QEMU ends a fixed VHDX disk with its last byte, in the middle of a block.
                let is_longer = *format == "vhdx" && options.contains("fixed") && ours.len() > real.len();
                let ours = if is_longer { ours[..real.len()].to_vec() } else { ours };
                assert_eq!(ours.len(), real.len(), "{what}: {name}");
                let may = |at: usize| ours_may_differ(format, ours.len(), at);
                let differs = (0..ours.len()).find(|at| ours[*at] != real[*at] && !may(*at));
                assert_eq!(differs, None, "{what}: the first byte of {name} that differs");
            }
        }
    }
}

/// A descriptor with no content id in it: QEMU writes one of fewer digits without zeroes in front.
fn without_cid(mut bytes: Vec<u8>) -> Vec<u8> {
    let start = bytes.windows(5).position(|part| part == b"\nCID=").map(|at| at + 5);
    if let Some(start) = start {
        let digits = bytes[start..].iter().take_while(|byte| byte.is_ascii_hexdigit()).count();
        bytes.drain(start..start + digits);
        // Bytes behind an image's text stay where they were.
        let end = bytes[start..].iter().position(|byte| *byte == 0).map(|end| start + end);
        if let Some(end) = end {
            bytes.splice(end..end, vec![0; digits]);
        }
    }
    bytes
}

/// Several disks of VMDK on each other: differences go to the top, and a parent that changes is noticed.
#[test]
fn a_vmdk_disk_stands_on_its_parent() {
    let tools = Tools::new();
    for (maker, writer) in [(0, 1), (1, 0), (0, 0)] {
        for options in ["", "-o zeroed_grain=on", "-o subformat=twoGbMaxExtentSparse"] {
            tools.img(maker, "create -q -f vmdk image-base.vmdk 5M");
            let mut line = words("-f vmdk -c");
            line.extend(["write -P 7 0 5M".to_owned(), "image-base.vmdk".to_owned()]);
            tools.run(&tools.io[writer], &line);
            tools.img(maker, &format!("create -q -f vmdk {options} -b image-base.vmdk -F vmdk image-top.vmdk"));
            let mut model = vec![7; 5 << 20];
            let random = &mut Random::new(3);
            for tool in [writer, 0, 1, 0] {
                let mut line = words("-f vmdk");
                for command in guest(random, &mut model) {
                    line.extend(["-c".to_owned(), command]);
                }
                line.push("image-top.vmdk".to_owned());
                tools.run(&tools.io[tool], &line);
                for reader in 0..3 {
                    tools.img(reader, "convert -f vmdk -O raw image-top.vmdk out");
                    assert!(fs::read(tools.path("out")).unwrap() == model, "{options}: {tool} wrote, {reader} read");
                }
            }
            // A write to the parent.
            tools.run(&tools.io[0], &words("-f vmdk -c flush image-base.vmdk"));
            tools.img(0, "info -f vmdk image-top.vmdk");
            let mut line = words("-f vmdk -c");
            line.extend(["write -P 8 0 512".to_owned(), "image-base.vmdk".to_owned()]);
            tools.run(&tools.io[0], &line);
            let said = Command::new(&tools.img[0])
                .args(words("convert -f vmdk -O raw image-top.vmdk out"))
                .current_dir(tools.folder.path())
                .output()
                .unwrap();
            let message = String::from_utf8_lossy(&said.stderr).into_owned();
            assert!(message.contains("was changed since this disk was made of it"), "{message}");
            tools.clear();
        }
    }
}

/// Differences over a disk of another format, and disks that grow over a longer one.
#[test]
fn qed_and_qcow_stand_on_backing_files() {
    let tools = Tools::new();
    let base: Vec<u8> = vec![7; 5 << 20];
    fs::write(tools.path("image-base"), &base).unwrap();
    for (format, maker) in [("qed", 0), ("qed", 1), ("qcow", 0), ("qcow", 1)] {
        tools.img(maker, &format!("create -q -f {format} -b image-base -F raw image-top 3M"));
        let mut model = vec![7; 3 << 20];
        let random = &mut Random::new(11);
        for tool in [0, 1, 0, 2] {
            let mut line = words(&format!("-f {format}"));
            for command in guest(random, &mut model) {
                line.extend(["-c".to_owned(), command]);
            }
            line.push("image-top".to_owned());
            tools.run(&tools.io[tool], &line);
            for reader in 0..3 {
                tools.img(reader, &format!("convert -f {format} -O raw image-top out"));
                assert!(fs::read(tools.path("out")).unwrap() == model, "{format}: {tool} wrote, {reader} read");
            }
        }
        if format == "qed" {
            tools.img(0, "resize -f qed image-top 6M");
            model.resize(6 << 20, 0);
            for reader in 0..3 {
                tools.img(reader, "convert -f qed -O raw image-top out");
                assert!(fs::read(tools.path("out")).unwrap() == model, "it grew, {reader} read");
            }
            tools.img(1, "check -f qed image-top");
        }
        fs::remove_file(tools.path("image-top")).unwrap();
    }
}

/// Grains in a stream: laid out as VMware does, read by QEMU, and each written once.
#[test]
fn stream_optimised_disks_are_made_by_a_conversion() {
    let tools = Tools::new();
    for_each_seed(1, |seed| {
        let random = &mut Random::new(seed);
        for len in [512, (5 << 20) + 1536, 70 << 20] {
            let mut disk = vec![0; len];
            for piece in disk.chunks_mut(40 << 10) {
                match random.below(4) {
                    0 => piece.fill_with(|| random.next_u64() as u8),
                    1 => piece.fill(random.below(256) as u8),
                    _ => {}
                }
            }
            fs::write(tools.path("source"), &disk).unwrap();
            for options in ["", ",adapter_type=lsilogic,hwversion=11", "\u{20}-W"] {
                let line = format!("convert -f raw -O vmdk -o subformat=streamOptimized{options} source image");
                tools.img(0, &line);
                let what = format!("seed {seed}, {len} bytes, {options:?}");
                for reader in 0..3 {
                    tools.img(reader, "compare -f raw -F vmdk source image");
                    tools.img(reader, "check -f vmdk image");
                }
                let bytes = fs::read(tools.path("image")).unwrap();
                assert!(bytes[56..64] == [0xff; 8] && bytes[4] == 3, "{what}: the header of a stream");
                assert!(bytes[bytes.len() - 512..].iter().all(|byte| *byte == 0), "{what}: the end");
                assert_eq!(&bytes[bytes.len() - 1024..bytes.len() - 1020], b"KDMV", "{what}: the footer");
                tools.img(0, "convert -f vmdk -O raw image back");
                assert!(fs::read(tools.path("back")).unwrap() == disk, "{what}");
            }
        }
    });
    // A new disk is zeroes, and takes each grain once.
    tools.img(0, "create -q -f vmdk -o subformat=streamOptimized image 1M");
    fs::write(tools.path("source"), vec![0; 1 << 20]).unwrap();
    for reader in 0..3 {
        tools.img(reader, "compare -f raw -F vmdk source image");
    }
    let io = |command: &str| {
        let output = Command::new(&tools.io[0])
            .current_dir(tools.folder.path())
            .args(["-f", "vmdk", "-c", command, "image"])
            .output()
            .unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
    };
    assert!(io("write -P 1 0 4k").contains("Invalid argument"));
    assert!(!io("write -P 7 128k 64k").contains("rror"));
    assert!(io("write -P 8 0 64k").contains("Input/output error"));
    let mut model = vec![0; 1 << 20];
    model[128 << 10..192 << 10].fill(7);
    fs::write(tools.path("source"), &model).unwrap();
    for reader in 0..3 {
        tools.img(reader, "compare -f raw -F vmdk source image");
    }
}

/// `-n` into a new stream, of data that begin and end anywhere.
#[test]
fn a_new_stream_takes_a_whole_conversion() {
    let tools = Tools::new();
    let mut disk = vec![0; (5 << 20) + 1536];
    for (start, len) in [(0, 512), (80 << 10, 3 << 10), (1 << 20, 200 << 10), (5 << 20, 1536)] {
        disk[start..start + len].fill(9);
    }
    fs::write(tools.path("source"), &disk).unwrap();
    for options in ["", "-S 0 ", "-C ", "-W "] {
        // Made by us, and by both QEMUs; filled by us.
        for maker in 0..3 {
            tools.img(maker, &format!("create -q -f vmdk -o subformat=streamOptimized image {}", disk.len()));
            tools.img(0, &format!("convert -n {options}-f raw -O vmdk source image"));
            let bytes = fs::read(tools.path("image")).unwrap();
            assert_eq!(&bytes[bytes.len() - 1024..bytes.len() - 1020], b"KDMV", "{options}: the footer");
            for reader in 0..3 {
                tools.img(reader, "compare -f raw -F vmdk source image");
            }
            fs::remove_file(tools.path("image")).unwrap();
        }
    }
    // Made by us, filled by QEMU.
    for filler in 1..3 {
        tools.img(0, &format!("create -q -f vmdk -o subformat=streamOptimized image {}", disk.len()));
        tools.img(filler, "convert -n -f raw -O vmdk source image");
        for reader in 0..3 {
            tools.img(reader, "compare -f raw -F vmdk source image");
        }
        fs::remove_file(tools.path("image")).unwrap();
    }
}

/// Importers want a footer.
#[test]
fn a_stream_of_zeroes_has_a_footer_too() {
    let tools = Tools::new();
    fs::write(tools.path("source"), vec![0; 1 << 20]).unwrap();
    tools.img(0, "convert -f raw -O vmdk -o subformat=streamOptimized source image");
    let bytes = fs::read(tools.path("image")).unwrap();
    assert_eq!((&bytes[bytes.len() - 1024..bytes.len() - 1020], &bytes[56..64]), (&b"KDMV"[..], &[0xff; 8][..]));
    for reader in 0..3 {
        tools.img(reader, "compare -f raw -F vmdk source image");
    }
}

/// QEMU makes them, and ends with an assertion when it opens one.
#[test]
fn vmdk_disks_of_no_bytes_are_made_and_read() {
    let tools = Tools::new();
    fs::write(tools.path("source"), []).unwrap();
    for kind in ["monolithicSparse", "monolithicFlat", "twoGbMaxExtentSparse", "twoGbMaxExtentFlat", "streamOptimized"]
    {
        for line in
            ["convert -f raw -O vmdk -o subformat=KIND source image", "create -q -f vmdk -o subformat=KIND image 0"]
        {
            tools.img(0, &line.replace("KIND", kind));
            tools.img(0, "convert -f vmdk -O raw image back");
            assert_eq!(fs::read(tools.path("back")).unwrap(), b"", "{kind}");
            tools.clear();
        }
    }
}

/// QEMU empties no image of these formats, and leaves that out. A VMDK disk is not that of its parent any more then.
#[test]
fn a_commit_leaves_images_that_it_can_not_empty() {
    let tools = Tools::new();
    for (format, base_format) in [("qed", "raw"), ("qcow", "raw"), ("vmdk", "vmdk")] {
        for tool in 0..2 {
            tools.img(tool, &format!("create -q -f {base_format} image-base 4M"));
            tools.img(tool, &format!("create -q -f {format} -b image-base -F {base_format} image-top"));
            let line = words(&format!("-f {format} -c"));
            let line = [line, vec!["write -q -P 2 1M 1M".to_owned(), "image-top".to_owned()]].concat();
            tools.run(&tools.io[tool], &line);
            assert_eq!(tools.img(tool, &format!("commit -f {format} image-top")), "Image committed.\n", "{format}");
            tools.img(tool, &format!("convert -f {base_format} -O raw image-base out"));
            let mut model = vec![0; 4 << 20];
            model[1 << 20..2 << 20].fill(2);
            assert!(fs::read(tools.path("out")).unwrap() == model, "{format}, by tool {tool}");
            if format != "vmdk" {
                tools.img(tool, &format!("convert -f {format} -O raw image-top out"));
                assert!(fs::read(tools.path("out")).unwrap() == model, "{format}, by tool {tool}, the top");
            }
            tools.clear();
        }
    }
}

/// 7-Zip reads every sector, libvmdk and libvhdi the headers.
#[test]
fn readers_of_other_programs_see_the_same_disk() {
    let tools = Tools::new();
    let mut disk = vec![0; 20 << 20];
    let random = &mut Random::new(5);
    for piece in disk.chunks_mut(40 << 10) {
        if random.chance(50) {
            piece.fill_with(|| random.next_u64() as u8);
        }
    }
    fs::write(tools.path("source"), &disk).unwrap();
    let run = |program: &str, line: &str| {
        let output = Command::new(program).args(words(line)).current_dir(tools.folder.path()).output();
        let output = output.unwrap_or_else(|error| panic!("{program} ({error}): scripts/setup test installs it"));
        assert!(output.status.success(), "{program} {line}: {}", String::from_utf8_lossy(&output.stdout));
        output.stdout
    };
    for (format, options, ending) in [
        ("vmdk", "", "vmdk"),
        ("vmdk", "-o subformat=streamOptimized", "vmdk"),
        ("vmdk", "-o subformat=twoGbMaxExtentSparse", "vmdk"),
        ("vmdk", "-o subformat=monolithicFlat", "vmdk"),
        ("vmdk", "-o subformat=twoGbMaxExtentFlat", "vmdk"),
        ("vdi", "", "vdi"),
        ("vdi", "-o static=on", "vdi"),
        ("vpc", "-o force_size=on", "vhd"),
        ("vpc", "-o subformat=fixed,force_size=on", "vhd"),
        ("vhdx", "", "vhdx"),
        ("vhdx", "-o block_size=1M", "vhdx"),
        ("vhdx", "-o subformat=fixed", "vhdx"),
        ("qcow", "", "qcow"),
    ] {
        tools.img(0, &format!("convert -f raw -O {format} {options} source image.{ending}"));
        // Writes in place, and to new blocks.
        if !options.contains("streamOptimized") {
            for (start, value) in [(0, 3), (9 << 20, 4), ((20 << 20) - 512, 5)] {
                disk[start..start + 512].fill(value);
                let line = words(&format!("-f {format} -c"));
                let line = [line, vec![format!("write -P {value} {start} 512"), format!("image.{ending}")]].concat();
                tools.run(&tools.io[0], &line);
            }
            fs::write(tools.path("source"), &disk).unwrap();
        }
        assert!(run("7z", &format!("e -so image.{ending}")) == disk, "{format} {options}");
        let reader = match format {
            "vmdk" => Some("vmdkinfo"),
            "vpc" | "vhdx" => Some("vhdiinfo"),
            _ => None,
        };
        if let Some(reader) = reader {
            let said = String::from_utf8_lossy(&run(reader, &format!("image.{ending}"))).into_owned();
            assert!(said.contains(&format!("({} bytes)", disk.len())), "{format} {options}: {said}");
        }
        tools.clear();
    }
}

/// Damage that a repair finds, made good in the same way.
#[test]
fn qed_and_parallels_are_repaired_as_qemu_does() {
    let oracle = Oracle::new();
    let work = oracle.work();
    let damage = |name: &str, edits: &[(u64, &[u8])], longer: u64| {
        let mut bytes = fs::read(work.join("good")).unwrap();
        for (at, part) in edits {
            bytes[*at as usize..*at as usize + part.len()].copy_from_slice(part);
        }
        bytes.resize(bytes.len() + longer as usize, 0);
        fs::write(work.join(name), bytes).unwrap();
    };
    oracle.make("create -q -f qed good 10M");
    oracle.io(&["write -P 1 0 1M"], "good");
    let bytes = fs::read(work.join("good")).unwrap();
    let l2 = u64::from_le_bytes(bytes[65_536..65_544].try_into().unwrap());
    let far = (1u64 << 28).to_le_bytes();
    let odd = 123_456u64.to_le_bytes();
    for (name, edits, longer) in [
        ("clean", vec![], 0),
        ("longer", vec![], 256 << 10),
        ("lost", vec![(l2 + 8, &far[..]), (l2 + 16, &odd[..])], 0),
        ("marked", vec![(16, &[2][..]), (l2 + 8, &far[..])], 0),
    ] {
        for what in ["leaks", "all"] {
            damage("real", &edits, longer);
            damage("ours", &edits, longer);
            let real = oracle.real(&work, &words(&format!("check -r {what} -f qed real")));
            let ours = oracle.ours(&work, &words(&format!("check -r {what} -f qed ours")));
            assert_eq!((ours.code, ours.out), (real.code, real.out), "{name} {what}: {}", ours.err);
            oracle.make("compare -f qed -F qed real ours");
            let verdict = |file: &str| oracle.real(&work, &words(&format!("check --output=json -f qed {file}"))).code;
            assert_eq!(verdict("ours"), verdict("real"), "{name} {what}");
        }
        // An opening for writing repairs a marked image.
        if name == "marked" {
            damage("ours", &edits, longer);
            let link = work.join("qemu-io");
            std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_cowshed"), &link).unwrap();
            let mut command = Command::new(&link);
            let output = command.current_dir(&work).args(["-f", "qed", "-c", "write -P 9 9M 64k", "ours"]).output();
            assert!(output.unwrap().status.success());
            // The entry's cluster is lost, as in QEMU's repair.
            let check = oracle.real(&work, &words("check --output=json -f qed ours"));
            assert!(check.code == Some(3) && !check.out.contains("corruptions"), "{}", check.out);
        }
    }
    fs::remove_file(work.join("good")).unwrap();
    oracle.make("create -q -f parallels good 10M");
    oracle.io(&["write -P 1 0 5M"], "good");
    let mark = 0x746f_6e59u32.to_le_bytes();
    let far = 100u32.to_le_bytes();
    for (name, edits, longer) in [
        ("clean", vec![], 0),
        ("marked", vec![(44, &mark[..])], 0),
        ("longer", vec![], 2 << 20),
        ("lost", vec![(64 + 4, &far[..])], 0),
        ("twice", vec![(64 + 4, &[3, 0, 0, 0][..])], 0),
        ("three times", vec![(64 + 4, &[5, 0, 0, 0][..]), (64 + 8, &[5, 0, 0, 0][..])], 1 << 20),
        ("all", vec![(44, &mark[..]), (64 + 4, &far[..])], 2 << 20),
    ] {
        damage("real", &edits, longer);
        damage("ours", &edits, longer);
        let real = oracle.real(&work, &words("check -r all -f parallels real"));
        let ours = oracle.ours(&work, &words("check -r all -f parallels ours"));
        assert_eq!((ours.code, ours.out), (real.code, real.out), "{name}: {}", ours.err);
        oracle.make("compare -f parallels -F parallels real ours");
        oracle.make("check -f parallels ours");
    }
}

#[test]
fn a_converted_disk_is_equal_whatever_tool_looks() {
    let tools = Tools::new();
    let random = &mut Random::new(5);
    let mut disk = vec![0; (5 << 20) + 1536];
    for piece in disk.chunks_mut(24 << 10) {
        if random.chance(30) {
            piece.fill_with(|| random.next_u64() as u8);
        }
    }
    fs::write(tools.path("source"), &disk).unwrap();
    for (format, options) in KINDS {
        tools.img(0, &format!("convert -f raw -O {format} {options} source image"));
        let size = tools.size(format, "image");
        assert!(size >= disk.len(), "{format} {options}");
        for reader in 0..3 {
            tools.img(reader, &format!("compare -f raw -F {format} source image"));
        }
        // And back; a disk that became longer ends in zeroes.
        tools.img(0, &format!("convert -f {format} -O raw image back"));
        let back = fs::read(tools.path("back")).unwrap();
        assert!(back[..disk.len()] == disk && back[disk.len()..].iter().all(|byte| *byte == 0), "{format} {options}");
        // Over an existing image, with -n.
        tools.img(0, &format!("convert -n -f raw -O {format} source image"));
        tools.img(1, &format!("compare -f raw -F {format} source image"));
        if CHECKED.contains(format) {
            tools.img(1, &format!("check -f {format} image"));
        }
    }
}

#[test]
fn what_a_format_lacks_is_refused_in_the_words_of_qemu() {
    let oracle = Oracle::new();
    oracle.make("create -q -f raw source 1M");
    for format in ["vdi", "vpc", "vhdx", "vmdk", "qed", "qcow", "parallels"] {
        oracle.make(&format!("create -q -f {format} image.{format} 10M"));
        for line in [
            "create -f F -o nosuch=1 new 1M",
            "create -f F -b source -F raw new",
            "create -f F new 9000T",
            "create -f F -o help",
            "resize image.F 20M",
            "amend -f F -o size=3M image.F",
            "measure -O F --size 1M",
            "convert -c -f raw -O F source new",
            "check -r all image.F",
        ] {
            // Such a disk, and compressed grains in a plain one, QEMU makes: COMPAT.
            let is_other = match format {
                "vmdk" => line.contains("9000T") || line.contains("convert -c"),
                // It grows.
                "vdi" => line.contains("resize"),
                // QEMU begins to write a table of such a length; it compresses.
                "qcow" => {
                    line.contains("9000T")
                        || line.contains("convert -c")
                        || line.contains("-b source")
                        || line.contains("help")
                }
                // QEMU has the other one of two sentences.
                "parallels" => line.contains("9000T"),
                "qed" => line.contains("-b source") || line.contains("resize"),
                _ => false,
            };
            if is_other {
                continue;
            }
            let line = line.replace('F', format).replace("new", &format!("new.{format}"));
            oracle.compare(&line.replace(&format!("-{format} raw"), "-F raw"));
        }
    }
    for line in [
        "create -f vpc -o subformat=nosuch new 1M",
        "create -f vhdx -o subformat=nosuch new 1M",
        "create -f qed -o cluster_size=5k new 1M",
        "create -f qed -o table_size=3 new 1M",
        "create -f qed -o cluster_size=4k,table_size=1 new 10G",
        "create -f qcow new 0",
        "create -f parallels -o cluster_size=2G new 1M",
        "create -f vhdx -o block_size=3M new 1M",
        "create -f vhdx -o log_size=4G new 1M",
        "create -f vmdk -o subformat=nosuch new 1M",
        "create -f vmdk -o adapter_type=nosuch new 1M",
        "create -f vmdk -o compat6=on,hwversion=3 new 1M",
        "create -f vmdk -o subformat=monolithicFlat,zeroed_grain=on new 1M",
        "create -f vmdk -o subformat=monolithicFlat -b image.vmdk -F vmdk new",
        "create -f vmdk -b source -F raw new",
    ] {
        oracle.compare(line);
    }
    oracle.verdict();
}
