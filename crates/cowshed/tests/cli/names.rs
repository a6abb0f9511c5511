// SPDX-License-Identifier: Apache-2.0 OR MIT
//! File names that are no text: any bytes but a slash and a zero are a name on Linux.

use crate::oracle::Oracle;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::process::{Command, Output};

struct Folder(Oracle);

/// `text` with each `~` replaced by a byte that is no part of UTF-8.
fn name(text: &str) -> OsString {
    OsString::from_vec(text.bytes().map(|byte| if byte == b'~' { 0xff } else { byte }).collect())
}

impl Folder {
    fn run(&self, program: impl AsRef<OsStr>, line: &str) -> Output {
        let words: Vec<OsString> = line.split(' ').map(name).collect();
        Command::new(program).args(words).current_dir(self.0.work()).output().expect("the program runs")
    }

    /// Ours, which must succeed; standard output.
    #[track_caller]
    fn ours(&self, line: &str) -> Vec<u8> {
        let output = self.run(env!("CARGO_BIN_EXE_cowshed"), line);
        assert!(output.status.success(), "{line}: {output:?}");
        output.stdout
    }

    #[track_caller]
    fn real(&self, line: &str) -> Vec<u8> {
        let output = self.run(self.0.qemu.img_path(), line);
        assert!(output.status.success(), "qemu-img {line}: {output:?}");
        output.stdout
    }
}

fn contains(bytes: &[u8], part: &OsStr) -> bool {
    bytes.windows(part.len()).any(|window| window == part.as_bytes())
}

#[test]
fn every_verb_takes_names_that_are_no_text() {
    let folder = Folder(Oracle::new());
    std::fs::write(folder.0.work().join(name("s~urce.raw")), vec![7; 1 << 20]).expect("the source");
    folder.ours("convert -q -f raw -O qcow2 s~urce.raw b~se.qcow2");
    folder.ours("create -q -f qcow2 -b b~se.qcow2 -F qcow2 t~p.qcow2");
    let text = folder.ours("info t~p.qcow2");
    assert!(contains(&text, &name("image: t~p.qcow2")) && contains(&text, &name("backing file: b~se.qcow2")));
    let json = folder.ours("info --output=json t~p.qcow2");
    let json: serde_json::Value = serde_json::from_slice(&json).expect("JSON is text");
    assert_eq!(json["backing-filename"], "b\u{fffd}se.qcow2");
    folder.ours("info --backing-chain t~p.qcow2");
    folder.ours("convert -O raw t~p.qcow2 c~py.raw");
    folder.ours("convert -O qcow2 -o data_file=d~ta,data_file_raw=on c~py.raw p~rted.qcow2");
    folder.ours("check b~se.qcow2");
    folder.ours("check p~rted.qcow2");
    folder.ours("compare t~p.qcow2 p~rted.qcow2");
    folder.ours("map t~p.qcow2");
    folder.ours("measure -O qcow2 t~p.qcow2");
    folder.ours("resize t~p.qcow2 8M");
    folder.ours("dd if=t~p.qcow2 of=d~d.raw bs=64k count=2");
    folder.ours("inspect b~se.qcow2");
    folder.ours("map --image-opts driver=qcow2,file.filename=t~p.qcow2");
    folder.ours("check -r all --undo-log l~g b~se.qcow2");
    // QEMU finds the same files by the names in our headers, and we by those in its.
    folder.real("compare t~p.qcow2 t~p.qcow2 -U");
    folder.real("check p~rted.qcow2");
    folder.real("create -q -f qcow2 -b b~se.qcow2 -F qcow2 th~irs.qcow2");
    folder.ours("map th~irs.qcow2");
}

#[test]
fn messages_hold_the_name_as_it_is() {
    let folder = Folder(Oracle::new());
    let output = folder.run(env!("CARGO_BIN_EXE_cowshed"), "info mi~~ing");
    assert_eq!(output.status.code(), Some(1));
    assert!(contains(&output.stderr, &name("mi~~ing: could not open: No such file")), "{output:?}");
}

#[test]
fn a_data_file_is_named_with_the_protocol_or_without() {
    let folder = Folder(Oracle::new());
    let at = |name: &str| folder.0.work().join(name);
    std::fs::write(at("disk"), vec![7; 1 << 20]).expect("the source");
    for (number, line) in [
        "create -q -f qcow2 -o data_file=file:y,data_file_raw=on IMAGE 1M",
        "convert -f raw -O qcow2 -o data_file=file:y,data_file_raw=on disk IMAGE",
    ]
    .into_iter()
    .enumerate()
    {
        for program in ["ours", "theirs"] {
            let image = format!("{program}{number}.qcow2");
            let line = line.replace("IMAGE", &image);
            match program {
                "ours" => drop(folder.ours(&line)),
                _ => drop(folder.real(&line)),
            }
            assert!(!at("file:y").exists(), "{line}");
            let data = std::fs::read(at("y")).expect("the data file");
            assert!(data == vec![if number == 0 { 0 } else { 7 }; 1 << 20], "{line}");
            folder.ours(&format!("compare -f raw -F qcow2 y {image}"));
            folder.real(&format!("compare -f raw -F qcow2 y {image}"));
            std::fs::remove_file(at("y")).expect("the data file");
        }
    }
    // An image whose data file no program finds again is not made.
    for name in ["nbd:unix:t.sock", "nbd+unix:///?socket=t.sock", "nbd://localhost/x"] {
        let line = format!("create -q -f qcow2 -o data_file={name} new.qcow2 1M");
        let output = folder.run(env!("CARGO_BIN_EXE_cowshed"), &line);
        assert_eq!(output.status.code(), Some(1), "{line}: {output:?}");
        assert!(!at("new.qcow2").exists() && !at(name).exists(), "{line}");
    }
    // The protocol hides neither the image nor the source.
    for line in [
        "create -q -f qcow2 -o data_file=file:new.qcow2 new.qcow2 1M",
        "convert -f raw -O qcow2 -o data_file=file:disk disk new.qcow2",
    ] {
        let output = folder.run(env!("CARGO_BIN_EXE_cowshed"), line);
        assert_eq!(output.status.code(), Some(1), "{line}: {output:?}");
        assert!(std::fs::read(at("disk")).expect("the source") == vec![7; 1 << 20], "{line}");
    }
}

/// A device can't be made, and a file is none.
#[test]
fn the_protocol_of_devices_names_only_devices() {
    let folder = Folder(Oracle::new());
    std::fs::write(folder.0.work().join("file"), [7; 512]).expect("a file");
    for line in [
        "create -q -f qcow2 host_device:missing 1M",
        "create -q -f raw host_device:missing 1M",
        "create -q -f qcow2 host_device:file 1M",
        "convert -f raw -O qcow2 file host_device:missing",
    ] {
        let output = folder.run(env!("CARGO_BIN_EXE_cowshed"), line);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{line}: {said}");
        assert!(said.contains("an existing block device"), "{line}: {said}");
        assert!(!folder.0.work().join("missing").exists(), "{line}");
        assert_eq!(std::fs::read(folder.0.work().join("file")).expect("a file"), [7; 512], "{line}");
    }
}

/// Names in images must not command a terminal, nor begin a line that resembles one of ours.
#[test]
fn names_out_of_images_stay_in_their_line() {
    let folder = Folder(Oracle::new());
    let qemu = |arguments: &[&str]| {
        let mut command = std::process::Command::new(folder.0.qemu.img_path());
        assert!(command.args(arguments).current_dir(folder.0.work()).status().expect("qemu-img").success());
    };
    let name = "fat\n\x1b[31mparent";
    qemu(&["create", "-q", "-u", "-f", "qcow2", "-b", name, "-F", "raw", "child", "1M"]);
    qemu(&["create", "-q", "-f", "qcow2", "disk", "1M"]);
    qemu(&["snapshot", "-c", name, "disk"]);
    qemu(&["bitmap", "--add", "disk", name]);
    std::fs::write(folder.0.work().join(name), [7; 1 << 20]).expect("the parent");
    let shown = "fat\\n\\u{1b}[31mparent";
    for program in ["cowshed", "qemu-img"] {
        for (line, times) in [
            ("info child", 1),
            ("info --backing-chain child", 3),
            ("snapshot -l disk", 1),
            ("info disk", 2),
            ("map child", 1),
            ("convert -O raw child copy", 1),
        ] {
            if line.starts_with("convert") {
                std::fs::rename(folder.0.work().join(name), folder.0.work().join("away")).expect("renamed");
            }
            let tool = folder.0.work().join(program);
            let _ = std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_cowshed"), &tool);
            let output = folder.run(tool.to_str().expect("text"), line);
            let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
            assert!(!said.contains('\x1b'), "{program} {line}: {said:?}");
            assert_eq!(said.matches(shown).count(), times, "{program} {line}: {said}");
            if line.starts_with("convert") {
                assert_eq!((output.status.code(), said.lines().count()), (Some(1), 1), "{program} {line}: {said}");
                std::fs::rename(folder.0.work().join("away"), folder.0.work().join(name)).expect("renamed");
            }
        }
    }
    // Output for programs has the name itself.
    let output = folder.run(env!("CARGO_BIN_EXE_cowshed"), "info --output=json child");
    let info: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(info["backing-filename"], name);
}

/// Whatever follows a line end in a name, it begins no line of a message.
#[test]
fn no_name_begins_a_line_of_a_message() {
    let folder = Folder(Oracle::new());
    let lines = [
        "qemu-img: done",
        "qemu-io: done",
        "Is another process using the image [x]?",
        "Please use force",
        "Try this",
        "  repair: none",
        "server reported: x",
        "\u{10fe0a}qemu-img: done",
    ];
    for (program, option) in [("cowshed", "info"), ("qemu-img", "info"), ("qemu-img", "map"), ("qemu-io", "-r")] {
        let tool = folder.0.work().join(program);
        let _ = std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_cowshed"), &tool);
        for line in lines {
            let missing = format!("a\n{line}");
            let options = format!("driver=qcow2,file.filename={missing}");
            let json = r#"json:{"driver":"file","filename":"a\n\udbff\ude0aqemu-img: done"}"#;
            for words in [&[option, &missing][..], &[option, "--image-opts", &options], &[option, json]] {
                let mut command = Command::new(&tool);
                let output = command.args(words).current_dir(folder.0.work()).output().expect("the program runs");
                let said = String::from_utf8_lossy(&output.stderr).into_owned();
                assert!(!output.status.success(), "{words:?}: {said}");
                assert_eq!(said.lines().count(), 1, "{program} {words:?}: {said}");
            }
        }
    }
}

/// Both lines of a message are lines, under every name.
#[test]
fn what_identifiers_are_stands_in_a_line_of_its_own() {
    let folder = Folder(Oracle::new());
    let further = "Identifiers consist of letters, digits, '-', '.', '_', starting with a letter.";
    for (program, line, option) in [
        ("cowshed", "info --object secret,id=1t,data=x nosuch", ""),
        ("qemu-img", "info --object secret,id=1t,data=x nosuch", ""),
        ("qemu-img", "info --object tls-creds-x509,id=1t,dir=. nosuch", ""),
        ("qemu-io", "--object throttle-group,id=1t -c quit nosuch", ""),
        ("qemu-nbd", "--object secret,id=1t,data=x nosuch", ""),
        ("qemu-storage-daemon", "--object iothread,id=1t", "--object iothread,id=1t: "),
        ("qemu-storage-daemon", "--chardev null,id=1x", "--chardev null,id=1x: "),
        ("qemu-storage-daemon", "--chardev null,id=c --monitor chardev=c,id=1", "--monitor chardev=c,id=1: "),
    ] {
        let tool = folder.0.work().join(program);
        let _ = std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_cowshed"), &tool);
        let output = folder.run(tool.to_str().expect("text"), line);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let expected = format!("{program}: {option}Parameter 'id' expects an identifier\n{further}\n");
        assert_eq!((output.status.code(), said), (Some(1), expected), "{program} {line}");
    }
}

/// `--object help` lists types, and `--object TYPE,help` properties, before anything is opened.
#[test]
fn objects_are_explained_under_every_name() {
    let folder = Folder(Oracle::new());
    let secret = "secret options:\n  data=<string>\n  file=<string>\n";
    for (program, line) in [
        ("cowshed", "info --object"),
        ("cowshed", "serve --object"),
        ("qemu-img", "info --object"),
        ("qemu-img", "dd --object"),
        ("qemu-img", "create -f qcow2 --object"),
        ("qemu-io", "--object"),
        ("qemu-nbd", "--object"),
        ("qemu-storage-daemon", "--object"),
    ] {
        let tool = folder.0.work().join(program);
        let _ = std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_cowshed"), &tool);
        for (asked, begins) in [
            ("help", "List of user creatable objects:\n  authz-list\n"),
            ("nosuch,help", "List of user creatable objects:\n  authz-list\n"),
            ("secret,help", secret),
        ] {
            let output = folder.run(tool.to_str().expect("text"), &format!("{line} {asked}"));
            let said = String::from_utf8_lossy(&output.stdout).into_owned();
            assert!(output.status.success() && said.starts_with(begins), "{program} {line} {asked}: {output:?}");
        }
    }
}
