// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A new image that could not be made is removed. Half of one on a full disk is of no use, and a sparse one looks like
//! a raw image. A file that was there before is as qemu-img leaves it.

use cowshed_testkit::qemu::{Qemu, temp_dir};
use cowshed_testkit::waiting::await_that;
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// Runs a program whose files may not grow beyond one MiB.
fn run_small(program: &Path, words: &str, folder: &Path) -> Output {
    let script = "trap '' XFSZ; ulimit -f 1024; exec \"$@\"";
    let mut command = Command::new("bash");
    command.args(["-c", script, "bash"]).arg(program).args(words.split(' ')).current_dir(folder);
    command.output().expect("bash is there")
}

fn run_ours(words: &str, folder: &Path) -> Output {
    run_small(Path::new(env!("CARGO_BIN_EXE_cowshed")), &format!("img {words}"), folder)
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Lengths of the files; `None` where there is none.
fn lengths(folder: &Path, names: &[&str]) -> Vec<Option<u64>> {
    names.iter().map(|name| std::fs::metadata(folder.join(name)).ok().map(|metadata| metadata.len())).collect()
}

#[test]
fn a_create_that_fails_leaves_no_file() {
    let qemu = Qemu::system();
    let secret = "--object secret,id=s,data=x";
    for options in ["preallocation=falloc", "preallocation=full"] {
        for (format, more, extra) in [
            ("raw", "", ""),
            ("qcow2", "", ""),
            ("luks", secret, ",key-secret=s,iter-time=10"),
            ("qcow2", "", ",data_file=d"),
        ] {
            let line = format!("create -q -f {format} -o {options}{extra} a 8M {more}");
            let line = line.trim_end();
            let folder = temp_dir();
            let output = run_ours(line, folder.path());
            assert_eq!(output.status.code(), Some(1), "{line}: {}", said(&output));
            assert_eq!(lengths(folder.path(), &["a", "d"]), [None, None], "{line}: {}", said(&output));
            // Over a file that was there.
            let left = [qemu.img_path(), Path::new("")].map(|program| {
                let folder = temp_dir();
                std::fs::write(folder.path().join("a"), [7; 5000]).expect("a file");
                let output = match program == Path::new("") {
                    true => run_ours(line, folder.path()),
                    false => run_small(program, line, folder.path()),
                };
                assert_eq!(output.status.code(), Some(1), "{line}: {}", said(&output));
                lengths(folder.path(), &["a"])
            });
            if !extra.contains("data_file") {
                assert_eq!(left[1], left[0], "{line}, over an older file");
            }
        }
    }
}

#[test]
fn a_link_to_an_unfinished_image_stays() {
    let folder = temp_dir();
    std::os::unix::fs::symlink("b", folder.path().join("a")).expect("a symbolic link");
    let output = run_ours("create -q -f qcow2 -o preallocation=full a 8M", folder.path());
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(folder.path().join("a").is_symlink());
    assert_eq!(lengths(folder.path(), &["b"]), [None]);
}

/// Four MiB that can't be compressed.
fn source(folder: &Path) {
    let mut state = 88_172_645_463_325_252_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    let bytes: Vec<u8> = (0..(4 << 20) / 8).flat_map(|_| next()).collect();
    std::fs::write(folder.join("source"), bytes).expect("a file");
}

#[test]
fn a_copy_that_fails_leaves_no_new_file() {
    for line in [
        "convert -f raw -O raw source a",
        "convert -f raw -O qcow2 source a",
        "convert -f raw -O qcow2 -c source a",
        "convert -f raw -O qcow2 -o preallocation=full source a",
        "convert -f raw -O qcow2 -o data_file=d source a",
        "dd -f raw -O qcow2 if=source of=a",
        "dd -f raw -O raw bs=1M if=source of=a",
        // Found out when the target is there.
        "convert -f raw -O qcow2 -c --compression-level=77 source a",
    ] {
        let folder = temp_dir();
        source(folder.path());
        let output = run_ours(line, folder.path());
        assert_eq!(output.status.code(), Some(1), "{line}: {}", said(&output));
        assert_eq!(lengths(folder.path(), &["a", "d"]), [None, None], "{line}: {}", said(&output));
        assert_eq!(lengths(folder.path(), &["source"]), [Some(4 << 20)]);
    }
}

#[test]
fn a_copy_that_fails_keeps_a_file_that_was_there() {
    let folder = temp_dir();
    source(folder.path());
    std::fs::write(folder.path().join("a"), [7; 5000]).expect("a file");
    let output = run_ours("convert -f raw -O qcow2 source a", folder.path());
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(folder.path().join("a").exists(), "as with qemu-img");
}

#[test]
fn a_signal_takes_the_new_file_away() {
    let copy = "convert -r 64k -f raw -O qcow2 source a";
    // More than any disk here takes in the time that a signal needs.
    let new = "create -q -f qcow2 -o preallocation=full a 16G";
    for (signal, line) in [("INT", copy), ("TERM", copy), ("INT", new), ("TERM", new)] {
        let folder = temp_dir();
        source(folder.path());
        let mut command = Command::new(env!("CARGO_BIN_EXE_cowshed"));
        command.arg("img").args(line.split(' '));
        let mut child = command.current_dir(folder.path()).stderr(Stdio::piped()).spawn().expect("our own binary");
        await_that("the copy begins", || {
            assert!(child.try_wait().expect("a child").is_none(), "the copy has ended");
            folder.path().join("a").exists()
        });
        let sent = Command::new("kill").args(["-s", signal, &child.id().to_string()]).status().expect("kill is there");
        assert!(sent.success());
        let output = child.wait_with_output().expect("a child");
        assert_ne!(output.status.code(), Some(0), "{}", said(&output));
        assert_eq!(lengths(folder.path(), &["a"]), [None], "{}", said(&output));
    }
}

/// A confined process may remove no file.
#[test]
fn a_confined_copy_that_fails_leaves_empty_files() {
    for line in [
        "convert -O raw bad a",
        "convert -O qcow2 bad a",
        "convert -O qcow2 -o data_file=d bad a",
        "convert -O vmdk -o subformat=monolithicFlat bad a",
        "dd -O raw if=bad of=a",
    ] {
        let folder = temp_dir();
        source(folder.path());
        let made = Command::new(env!("CARGO_BIN_EXE_cowshed"))
            .args("convert -f raw -O qcow2 source bad".split(' '))
            .current_dir(folder.path())
            .output();
        assert!(made.expect("our own binary").status.success());
        // The last clusters are not in the file.
        let bad = std::fs::OpenOptions::new().write(true).open(folder.path().join("bad")).expect("a file");
        bad.set_len(bad.metadata().expect("a file").len() - (2 << 20)).expect("cut");
        let (verb, rest) = line.split_once(' ').expect("a verb");
        let output = Command::new(env!("CARGO_BIN_EXE_cowshed"))
            .args([verb, "--untrusted"].into_iter().chain(rest.split(' ')))
            .current_dir(folder.path())
            .output()
            .expect("our own binary");
        assert_eq!(output.status.code(), Some(1), "{line}: {}", said(&output));
        assert!(said(&output).contains("the target is incomplete"), "{line}: {}", said(&output));
        for len in lengths(folder.path(), &["a", "d", "a-flat"]).into_iter().flatten() {
            assert_eq!(len, 0, "{line}: {}", said(&output));
        }
    }
}

#[test]
fn a_signal_empties_the_file_of_a_confined_copy() {
    let folder = temp_dir();
    source(folder.path());
    let mut command = Command::new(env!("CARGO_BIN_EXE_cowshed"));
    command.args("convert --untrusted -r 64k -f raw -O qcow2 source a".split(' '));
    let mut child = command.current_dir(folder.path()).stderr(Stdio::piped()).spawn().expect("our own binary");
    await_that("the copy begins", || {
        assert!(child.try_wait().expect("a child").is_none(), "the copy has ended");
        lengths(folder.path(), &["a"]).iter().flatten().any(|len| *len >= 1 << 16)
    });
    let sent = Command::new("kill").args(["-s", "INT", &child.id().to_string()]).status().expect("kill is there");
    assert!(sent.success());
    let output = child.wait_with_output().expect("a child");
    assert_eq!(output.status.code(), Some(130), "{}", said(&output));
    assert!(said(&output).contains("is incomplete"), "{}", said(&output));
    assert_eq!(lengths(folder.path(), &["a"]), [Some(0)]);
}

/// Each format and each of its kinds: one line, no file of the target, and QEMU's words.
#[test]
fn a_conversion_without_space_leaves_no_file() {
    let qemu = Qemu::newest();
    let kinds = [
        "raw",
        "qcow2",
        "qcow2 -c",
        "luks --object secret,id=s,data=x -o key-secret=s,iter-time=10",
        "vmdk",
        "vmdk -o subformat=monolithicFlat",
        "vmdk -o subformat=twoGbMaxExtentSparse",
        "vmdk -o subformat=twoGbMaxExtentFlat",
        "vmdk -o subformat=streamOptimized",
        "vdi",
        "vdi -o static=on",
        "vpc",
        "vpc -o subformat=fixed",
        "vhdx",
        "vhdx -o subformat=fixed",
        "qed",
        "qcow",
        "qcow -c",
        "parallels",
    ];
    // Nothing that compression makes shorter.
    let noise: Vec<u8> = (0..3u64 << 20)
        .scan(1u64, |state, _| {
            *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            Some((*state >> 56) as u8)
        })
        .collect();
    for kind in kinds {
        let line = format!("convert -f raw source n.img -O {kind}");
        let [theirs, ours] = [qemu.img_path(), Path::new("")].map(|program| {
            let folder = temp_dir();
            std::fs::write(folder.path().join("source"), &noise).expect("a file");
            let output = match program == Path::new("") {
                true => run_ours(&line, folder.path()),
                false => run_small(program, &line, folder.path()),
            };
            let entries = std::fs::read_dir(folder.path()).expect("a folder");
            let mut names: Vec<_> = entries.map(|entry| entry.expect("a file").file_name()).collect();
            names.sort();
            (output, names)
        });
        let (ours, left) = ours;
        assert_eq!(ours.status.code(), Some(1), "{kind}: {}", said(&ours));
        assert_eq!(left, ["source"], "{kind}: {}", said(&ours));
        assert_eq!(
            (said(&ours).lines().count(), said(&ours).contains("File too large")),
            (1, true),
            "{kind}: {}",
            said(&ours)
        );
        // QEMU leaves half a file of each.
        assert_eq!(theirs.0.status.code(), Some(1), "{kind}: {}", said(&theirs.0));
    }
}
