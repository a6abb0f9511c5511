// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Compressed clusters of qcow (version 1), written by us and by QEMU in turns, and read by both.

use crate::oracle::words;
use cowshed_testkit::qemu::{Qemu, temp_dir};
use cowshed_testkit::random::{Random, for_each_seed};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

struct Tools {
    folder: tempfile::TempDir,
    img: PathBuf,
    io: PathBuf,
}

impl Tools {
    fn new() -> Tools {
        let folder = temp_dir();
        let [img, io] = ["qemu-img", "qemu-io"].map(|name| {
            let link = folder.path().join(name);
            std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_cowshed"), &link).unwrap();
            link
        });
        Tools { folder, img, io }
    }

    fn run(&self, tool: &Path, arguments: &[String]) -> Output {
        Command::new(tool).args(arguments).current_dir(self.folder.path()).output().unwrap()
    }

    #[track_caller]
    fn done(&self, tool: &Path, line: &str) {
        let output = self.run(tool, &words(line));
        assert!(output.status.success(), "{tool:?} {line}: {}", String::from_utf8_lossy(&output.stderr));
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// All readers see the disk as it is to be.
    #[track_caller]
    fn check(&self, model: &[u8], what: &str) {
        for reader in [&self.img, Qemu::newest().img_path(), Qemu::system().img_path()] {
            self.done(reader, "convert -f qcow -O raw image out");
            assert!(fs::read(self.path("out")).unwrap() == model, "{what}: {reader:?}");
        }
    }
}

/// Parts that get shorter, parts that don't, and zeroes.
fn content(random: &mut Random, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    for part in bytes.chunks_mut(6000) {
        match random.below(3) {
            0 => part.iter_mut().for_each(|byte| *byte = random.below(256) as u8),
            1 => part.iter_mut().for_each(|byte| *byte = random.below(6) as u8),
            _ => (),
        }
    }
    bytes
}

#[test]
fn qcow_images_are_compressed_and_then_written_to_in_turns() {
    for_each_seed(2, |seed| {
        let tools = Tools::new();
        let random = &mut Random::new(seed);
        for size in [512, 4096, (1 << 20) + 512, (5 << 20) + 3 * 512] {
            let mut model = content(random, size);
            fs::write(tools.path("source"), &model).unwrap();
            tools.done(&tools.img, "convert -c -f raw -O qcow source image");
            tools.check(&model, &format!("seed {seed}, {size} bytes, converted"));
            // The next writer changes parts of compressed clusters, and compresses others again.
            for (round, tool) in [&tools.io, Qemu::newest().io_path(), &tools.io].into_iter().enumerate() {
                let mut line = words("-f qcow");
                for _ in 0..6 {
                    let at = random.below(size as u64 / 512) as usize * 512;
                    let len = ((1 + random.below(40)) as usize * 512).min(size - at);
                    let pattern = 1 + random.below(200) as u8;
                    let is_whole = at.is_multiple_of(4096) && len.is_multiple_of(4096);
                    let option = if is_whole && random.chance(70) { "-c " } else { "" };
                    line.extend(["-c".to_owned(), format!("write {option}-P {pattern} {at} {len}")]);
                    model[at..at + len].fill(pattern);
                    // Compressed data are read before they are flushed.
                    line.extend(["-c".to_owned(), format!("read -P {pattern} {at} {len}")]);
                }
                line.push("image".to_owned());
                let output = tools.run(tool, &line);
                let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
                assert!(output.status.success() && !said.contains("failed"), "{tool:?}: {line:?}: {said}");
                tools.check(&model, &format!("seed {seed}, {size} bytes, round {round}"));
            }
        }
    });
}

/// An image over a backing file has small clusters: hardly one gets shorter.
#[test]
fn a_compressed_qcow_image_stands_on_its_backing_file() {
    let tools = Tools::new();
    let random = &mut Random::new(5);
    let base = content(random, 1 << 20);
    let mut model = base.clone();
    model[100_000..300_000].fill(7);
    fs::write(tools.path("base"), &base).unwrap();
    fs::write(tools.path("source"), &model).unwrap();
    tools.done(&tools.img, "convert -c -f raw -O qcow -B base -F raw source image");
    tools.check(&model, "with a backing file");
}

#[test]
fn a_conversion_puts_images_of_other_formats_on_a_backing_file() {
    let tools = Tools::new();
    let random = &mut Random::new(6);
    let base = content(random, 2 << 20);
    let mut model = base.clone();
    model[600_000..900_000].fill(7);
    model[1_000_000..1_400_000].fill(0);
    fs::write(tools.path("base.raw"), &base).unwrap();
    fs::write(tools.path("source"), &model).unwrap();
    tools.done(&tools.img, "convert -f raw -O vmdk base.raw base.vmdk");
    for (format, base) in [("qcow", "raw"), ("qed", "raw"), ("vmdk", "vmdk")] {
        tools.done(&tools.img, &format!("convert -f raw -O {format} -B base.{base} -F {base} source image"));
        for reader in [&tools.img, Qemu::newest().img_path(), Qemu::system().img_path()] {
            tools.done(reader, &format!("convert -f {format} -O raw image out"));
            assert!(fs::read(tools.path("out")).unwrap() == model, "{format}, {reader:?}");
        }
    }
}

/// A command line of image builders: the kind of VMDK that is compressed takes `-c`. So do others in grains, which stay plain.
#[test]
fn a_stream_optimised_disk_is_asked_for_with_compression_too() {
    let tools = Tools::new();
    let model = content(&mut Random::new(7), 1 << 20);
    fs::write(tools.path("source"), &model).unwrap();
    tools.done(&tools.img, "convert -c -f raw -O vmdk -o subformat=streamOptimized source image");
    for reader in [&tools.img, Qemu::newest().img_path()] {
        tools.done(reader, "convert -f vmdk -O raw image out");
        assert!(fs::read(tools.path("out")).unwrap() == model);
    }
    for options in ["", "-o subformat=twoGbMaxExtentSparse "] {
        tools.done(&tools.img, &format!("convert -c -f raw -O vmdk {options}source plain.vmdk"));
        for reader in [&tools.img, Qemu::newest().img_path()] {
            tools.done(reader, "convert -f vmdk -O raw plain.vmdk out");
            assert!(fs::read(tools.path("out")).unwrap() == model);
        }
    }
    let output = tools.run(&tools.img, &words("convert -c -f raw -O vmdk -o subformat=monolithicFlat source other"));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.ends_with("Compression not supported for this file format\n"), "{said}");
    assert!(!output.status.success() && !tools.path("other").exists());
}

/// It is about as short as QEMU's.
#[test]
fn a_compressed_qcow_image_is_short() {
    let tools = Tools::new();
    let text: Vec<u8> = (0..1 << 20).map(|at: u32| b"a few words in a row "[(at % 21) as usize]).collect();
    fs::write(tools.path("source"), &text).unwrap();
    tools.done(&tools.img, "convert -c -f raw -O qcow source image");
    // It ends with exit code 1, and the image is whole.
    tools.run(Qemu::newest().img_path(), &words("convert -c -f raw -O qcow source theirs"));
    tools.check(&text, "a text");
    let [ours, theirs] = ["image", "theirs"].map(|name| fs::metadata(tools.path(name)).unwrap().len());
    assert!(ours <= theirs + theirs / 10, "{ours} and {theirs} bytes");
    // Without -c nothing is compressed.
    tools.done(&tools.img, "convert -f raw -O qcow source plain");
    assert!(fs::metadata(tools.path("plain")).unwrap().len() > 1 << 20);
    // The filter compresses, too.
    tools.done(&tools.img, "create -f qcow filtered 1M");
    let mut line =
        words("--image-opts driver=compress,file.driver=qcow,file.file.driver=file,file.file.filename=filtered");
    line.extend(["-c".to_owned(), "write -P 9 0 1M".to_owned()]);
    let output = tools.run(&tools.io, &line);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    fs::rename(tools.path("filtered"), tools.path("image")).unwrap();
    tools.check(&vec![9; 1 << 20], "through the filter");
    assert!(fs::metadata(tools.path("image")).unwrap().len() < 1 << 18);
}

/// QEMU encrypts images of the format as the old ones of qcow2. They are read, and never written to.
#[test]
fn an_encrypted_qcow_is_read_with_its_key() {
    const KEY: &str = "--object secret,id=s,data=geheim";
    let tools = Tools::new();
    let (img, io) = (Qemu::newest().img_path().to_owned(), Qemu::newest().io_path().to_owned());
    fs::write(tools.path("base"), vec![9; 1 << 20]).unwrap();
    for backing in ["", "-b base -F raw "] {
        let _ = fs::remove_file(tools.path("image"));
        let create =
            format!("create -q {KEY} -f qcow -o encrypt.format=aes,encrypt.key-secret=s {backing}image 1050112");
        tools.done(&img, &create);
        let named = "driver=qcow,encrypt.key-secret=s,file.driver=file,file.filename=image";
        for write in ["write -P 1 0 3k", "write -P 2 64k 100k", "write -P 3 1024k 1536", "write -P 4 700k 512"] {
            tools.done(&io, &format!("{KEY} --image-opts {named} -c '{write}'"));
        }
        tools.done(&img, &format!("convert {KEY} --image-opts -O raw {named} truth"));
        tools.done(&tools.img, &format!("convert {KEY} --image-opts -O raw {named} out"));
        let truth = fs::read(tools.path("truth")).unwrap();
        assert!(fs::read(tools.path("out")).unwrap() == truth && truth[..3072] == [1; 3072]);
        for seed in 1..=20 {
            let random = &mut Random::new(seed);
            let at = random.below((truth.len() / 512) as u64) as usize * 512;
            let len = (1 + random.below(40) as usize) * 512;
            let len = len.min(truth.len() - at);
            let read =
                format!("dd -U --image-opts {KEY} if={named} of=out bs=512 skip={} count={}", at / 512, len / 512);
            tools.done(&tools.img, &read);
            assert!(fs::read(tools.path("out")).unwrap() == truth[at..at + len], "seed {seed}");
        }
        // Both say the same of it without the key.
        for line in ["info -f qcow image", "convert -f qcow -O raw image out"] {
            let [ours, theirs] = [&tools.img, &img].map(|tool| tools.run(tool, &words(line)));
            let said = |output: &Output| {
                let text =
                    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
                (output.status.code(), text)
            };
            assert_eq!(said(&ours), said(&theirs), "{line}");
        }
        let before = fs::read(tools.path("image")).unwrap();
        for line in [
            format!("{KEY} --image-opts {named} -c 'write 0 512'"),
            format!("{KEY} --image-opts {named} -c 'write 900k 512'"),
        ] {
            let output = tools.run(&tools.io, &words(&line));
            let said = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
            assert!(said.contains("can only be read"), "{said}");
        }
        assert!(fs::read(tools.path("image")).unwrap() == before);
        // The method knows no wrong key.
        tools.done(&tools.img, &format!("convert --object secret,id=s,data=other --image-opts -O raw {named} out"));
        assert!(fs::read(tools.path("out")).unwrap() != truth);
        tools.done(&tools.img, &format!("convert {KEY} --image-opts -O qcow2 {named} out.qcow2"));
        tools.done(&img, "compare -f raw -F qcow2 truth out.qcow2");
    }
}
