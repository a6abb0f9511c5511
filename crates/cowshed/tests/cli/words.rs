// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Refusals by the name qemu-img, to the word: QEMU 11's sentence first, and behind it any further words of ours.

use crate::oracle::{Oracle, words};
use std::process::Command;

const OBJECTS: &str = "--object secret,id=s,data=one --object secret,id=n,data=two --object secret,id=w,data=wrong";
const LUKS: &str = "--image-opts driver=qcow2,encrypt.key-secret=s,file.filename=e.qcow2";

/// Runs each line and compares its first line of output with the expected one. None may have a frame as if the image
/// could not be opened.
fn hold(oracle: &Oracle, table: &[(String, &str)]) {
    for (line, expected) in table {
        let said = oracle.refused(line);
        let first = said.lines().next().unwrap_or_default();
        assert_eq!(first, format!("qemu-img: {expected}"), "{line}");
    }
}

#[test]
fn key_slots_are_refused_in_qemus_sentences() {
    let oracle = Oracle::new();
    let options = "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10";
    oracle.make_patiently(&format!("create -q -f qcow2 {OBJECTS} -o {options} e.qcow2 1M"));
    oracle.make("create -q -f qcow2 plain.qcow2 1M");
    let amend = |options: &str, image: &str| format!("amend {OBJECTS} -o {options} {image}");
    let with_key = |options: &str| amend(options, LUKS);
    hold(
        &oracle,
        &[
            (
                with_key("encrypt.state=active,encrypt.new-secret=n,encrypt.iter-time=10,encrypt.keyslot=0"),
                "Refusing to overwrite active keyslot 0 - please erase it first",
            ),
            (with_key("encrypt.state=inactive,encrypt.keyslot=5"), "Given keyslot 5 is already erased (inactive) "),
            (
                with_key("encrypt.state=inactive,encrypt.old-secret=w"),
                "No keyslots match given (old) password for erase operation",
            ),
            (
                with_key("encrypt.state=inactive,encrypt.old-secret=n,encrypt.keyslot=0"),
                "Given keyslot 0 doesn't contain the given old password for erase operation",
            ),
            (
                with_key("encrypt.state=inactive,encrypt.old-secret=s"),
                "All the active keyslots match the (old) password that was given and erasing them will erase all the data in \
                 the image irreversibly - refusing operation",
            ),
            (
                with_key("encrypt.state=inactive,encrypt.keyslot=0"),
                "Attempt to erase the only active keyslot 0 which will erase all the data in the image irreversibly - \
                 refusing operation",
            ),
            (
                amend("encrypt.state=active,encrypt.new-secret=n", "e.qcow2"),
                "Could not open 'e.qcow2': Parameter 'encrypt.key-secret' is required for cipher",
            ),
            (
                amend("encrypt.state=inactive,encrypt.keyslot=0", "plain.qcow2"),
                "Can't amend encryption options - encryption not present",
            ),
        ],
    );
    // Here qemu-img can't open the image either.
    let wrong = "--image-opts driver=qcow2,encrypt.key-secret=w,file.filename=e.qcow2";
    let unknown = "--image-opts driver=qcow2,encrypt.key-secret=nobody,file.filename=e.qcow2";
    for line in [
        with_key("encrypt.state=inactive,encrypt.keyslot=0").replace("secret=s,file", "secret=w,file"),
        format!("convert {OBJECTS} {wrong} -O raw x.raw"),
        format!("convert {OBJECTS} {unknown} -O raw x.raw"),
    ] {
        if line.starts_with("convert") {
            oracle.compare(&line);
        }
        assert!(!oracle.work().join("x.raw").exists(), "{line}");
    }
    oracle.verdict();
}

#[test]
fn secrets_are_refused_in_qemus_sentences() {
    let oracle = Oracle::new();
    let create = |object: &str| format!("create --object secret,{object} -f raw y.raw 1M");
    hold(
        &oracle,
        &[
            (create("id=s"), "Either 'file' or 'data' must be provided"),
            (create("id=s,data=a,file=b"), "'file' and 'data' are mutually exclusive"),
            (
                create("id=s,file=nosuch"),
                "Unable to read nosuch: Failed to open file “nosuch”: No such file or directory",
            ),
            (create("id=s,file=."), "Unable to read .: Error reading file “.”: Is a directory"),
            (create("id=s,data=a,keyid=k"), "No secret with id 'k'"),
            (create("id=s,data=a,keyid=k,iv=aWlpaWlpaWlpaWlpaWlpaQ=="), "No secret with id 'k'"),
        ],
    );
    assert!(!oracle.work().join("y.raw").exists());
}

#[test]
fn own_lock_is_reported_as_qemu() {
    let oracle = Oracle::new();
    oracle.make("create -q -f qcow2 a.qcow2 1M");
    oracle.make("create -q -f qcow2 -b a.qcow2 -F qcow2 b.qcow2");
    oracle.make("create -q -f qcow2 -b b.qcow2 -F qcow2 c.qcow2");
    let lock = "Failed to get \"write\" lock\nIs another process using the image";
    let shared = "Failed to get shared \"write\" lock\nIs another process using the image";
    for (line, expected) in [
        ("convert a.qcow2 a.qcow2", format!("a.qcow2: error while converting raw: {lock} [a.qcow2]?")),
        ("convert -O qcow2 a.qcow2 a.qcow2", format!("a.qcow2: error while converting qcow2: {lock} [a.qcow2]?")),
        ("convert -O qcow2 c.qcow2 a.qcow2", format!("a.qcow2: error while converting qcow2: {lock} [a.qcow2]?")),
        ("convert -n -O qcow2 a.qcow2 a.qcow2", format!("Could not open 'a.qcow2': {lock} [a.qcow2]?")),
        (
            "rebase -b c.qcow2 -F qcow2 b.qcow2",
            format!("Could not open new backing file 'c.qcow2': Could not open backing file: {shared} [b.qcow2]?"),
        ),
        (
            "rebase -b b.qcow2 -F qcow2 b.qcow2",
            format!("Could not open new backing file 'b.qcow2': {shared} [b.qcow2]?"),
        ),
    ] {
        let before = std::fs::read(oracle.work().join("a.qcow2")).expect("the image");
        assert_eq!(oracle.refused(line).trim_end(), format!("qemu-img: {expected}"), "{line}");
        assert!(std::fs::read(oracle.work().join("a.qcow2")).expect("the image") == before, "{line} changed the image");
        let real = oracle.real(&oracle.work(), &words(line));
        assert_eq!(real.err.trim_end(), format!("qemu-img: {expected}"), "{line}");
    }
    // Another process uses the image.
    let mut holder = std::process::Command::new(oracle.qemu.io_path())
        .args(["-f", "qcow2", "a.qcow2"])
        .stdin(std::process::Stdio::piped())
        .current_dir(oracle.work())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("qemu-io");
    let expected = "qemu-img: a.qcow2: error while converting raw: Failed to get \"write\" lock\n\
                    Is another process using the image [a.qcow2]?";
    oracle.make("create -q -f raw r.raw 1M");
    // It prompts when it has the image.
    let mut first = [0; 1];
    std::io::Read::read_exact(holder.stdout.as_mut().expect("its output"), &mut first).expect("it says something");
    let said = oracle.ours(&oracle.work(), &words("convert -f raw -O raw r.raw a.qcow2")).err;
    holder.kill().expect("the holder ends");
    holder.wait().expect("the holder ends");
    assert_eq!(said.trim_end(), expected);
}

#[test]
fn other_refusals_in_qemus_words() {
    let oracle = Oracle::new();
    oracle.make("create -q -f qcow2 -o compat=0.10 old.qcow2 4M");
    oracle.make("snapshot -c x old.qcow2");
    oracle.make("create -q -f qcow2 a.qcow2 4M");
    oracle.make("create -q -f raw r.raw 1M");
    let table = [
        ("resize old.qcow2 8M", "Can't resize a v2 image which has snapshots"),
        ("resize --shrink old.qcow2 2M", "Can't resize a v2 image which has snapshots"),
        (
            "snapshot -U -c y old.qcow2",
            "Could not open 'old.qcow2': force-share=on can only be used with read-only images",
        ),
        (
            "snapshot -U -a x old.qcow2",
            "Could not open 'old.qcow2': force-share=on can only be used with read-only images",
        ),
        (
            "snapshot -U -d x old.qcow2",
            "Could not open 'old.qcow2': force-share=on can only be used with read-only images",
        ),
        ("snapshot -f raw -a x r.raw", "Could not apply snapshot 'x': Block driver does not support snapshots"),
        ("snapshot -f raw -d x r.raw", "Could not delete snapshot 'x': snapshot not found"),
        ("convert -l snapshot.bogus=99 -O raw old.qcow2 n.raw", "Invalid parameter 'snapshot.bogus'"),
        ("convert -l snapshot.id=1,bogus=9 -O raw old.qcow2 n.raw", "Invalid parameter 'bogus'"),
        ("convert -l snapshot.id -O raw old.qcow2 n.raw", "Parameter 'snapshot.id' needs a value"),
        (
            "bitmap a.qcow2 b",
            "Need at least one of --add, --remove, --remove-all, --clear, --enable, --disable, or --merge",
        ),
    ];
    let read = |name: &str| std::fs::read(oracle.work().join(name)).expect("the image");
    let before = (read("old.qcow2"), read("a.qcow2"), read("r.raw"));
    hold(&oracle, &table.map(|(line, expected)| (line.to_owned(), expected)));
    assert!((read("old.qcow2"), read("a.qcow2"), read("r.raw")) == before, "something was changed");
    assert!(!oracle.work().join("n.raw").exists());
    // Listing shares.
    oracle.compare("snapshot -U -l old.qcow2");
    oracle.verdict();
}

#[test]
fn who_chooses_luks_is_told_what_xts_does_not_do() {
    let oracle = Oracle::new();
    let said = oracle.ours(&oracle.work(), &words("create -f luks -o help"));
    assert_eq!(said.code, Some(0), "{}", said.err);
    assert!(said.out.contains("xts hides the data; it does not notice damage to it"), "{}", said.out);
    // Options of the file below are listed where the command line names it.
    let said = oracle.ours(&oracle.work(), &words("create -f luks -o help v.luks"));
    for option in ["nocow=", "extent_size_hint="] {
        assert!(said.out.contains(option), "{}", said.out);
    }
    let line = "create -q --object secret,id=s,data=one -f luks -o key-secret=s,iter-time=10,nocow=on,extent_size_hint=0 v.luks 1M";
    let said = oracle.ours(&oracle.work(), &words(line));
    assert_eq!(said.code, Some(0), "{}", said.err);
    oracle.make(
        "convert --object secret,id=s,data=one --image-opts driver=luks,key-secret=s,file.filename=v.luks -O raw v.raw",
    );
}

/// `rebase -c` and `commit -p`: qemu-img's files and output.
#[test]
fn rebase_compresses_and_commit_tells_its_progress() {
    let oracle = Oracle::new();
    oracle.make("create -q -f raw base.raw 1M");
    oracle.io(&["write -P 7 0 512k"], "base.raw");
    oracle.make("create -q -f qcow2 -b base.raw -F raw top.qcow2");
    oracle.io(&["write -P 8 64k 64k"], "top.qcow2");
    oracle.make("convert -O raw top.qcow2 before.raw");
    let said = oracle.ours(&oracle.work(), &words("rebase -c -p -b '' top.qcow2"));
    assert_eq!((said.code, said.err.as_str()), (Some(0), ""), "{}", said.out);
    assert!(said.out.ends_with("(100.00/100%)\r\n"), "{:?}", said.out);
    oracle.make("compare top.qcow2 before.raw");
    oracle.make("check -q top.qcow2");
    let check = oracle.real(&oracle.work(), &words("check --output=json top.qcow2"));
    // Seven clusters came from the base; the one that was there is as it was.
    assert!(
        check.out.contains("\"compressed-clusters\": 7") && check.out.contains("\"allocated-clusters\": 8"),
        "{}",
        check.out
    );
    oracle.make("create -q -f qcow2 -b base.raw -F raw over.qcow2");
    oracle.io(&["write -P 9 256k 300k"], "over.qcow2");
    oracle.make("convert -O raw over.qcow2 after.raw");
    let said = oracle.ours(&oracle.work(), &words("commit -p over.qcow2"));
    assert_eq!((said.code, said.err.as_str()), (Some(0), ""), "{}", said.out);
    assert!(
        said.out.starts_with("    (0.00/100%)\r") && said.out.ends_with("(100.00/100%)\r\nImage committed.\n"),
        "{:?}",
        said.out
    );
    oracle.make("compare -f raw -F raw base.raw after.raw");
}

/// The cut comes before the header, as in QEMU.
#[test]
fn shrink_that_can_not_switch_tells_the_loss() {
    for (options, back) in [("", ""), ("-o compat=0.10", ""), ("", "-b base.qcow2 -F qcow2")] {
        let oracle = Oracle::new();
        oracle.make("create -q -f qcow2 base.qcow2 8M");
        oracle.make(&format!("create -q -f qcow2 {options} {back} disk.qcow2 8M"));
        oracle.io(&["write -P 7 0 8M"], "disk.qcow2");
        let rule = "file.inject-error.0.event=none,file.inject-error.0.iotype=write,file.inject-error.0.sector=0";
        let image =
            format!("driver=qcow2,file.driver=blkdebug,{rule},file.image.driver=file,file.image.filename=disk.qcow2");
        let output = Command::new(env!("CARGO_BIN_EXE_cowshed"))
            .args(["resize", "--shrink", "--image-opts", &image, "4M"])
            .current_dir(oracle.work())
            .output()
            .expect("our own binary runs");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{said}");
        let has_lost = said.contains("the data behind the new end is gone, and the disk keeps its old size");
        oracle.make("convert -O raw disk.qcow2 disk.raw");
        let bytes = std::fs::read(oracle.work().join("disk.raw")).expect("the disk");
        assert_eq!(bytes.len(), 8 << 20, "its size is the old one");
        assert!(bytes[..4 << 20].iter().all(|byte| *byte == 7));
        let expected = if has_lost { 0 } else { 7 };
        assert!(bytes[4 << 20..].iter().all(|byte| *byte == expected), "{said}");
        oracle.make("check -q disk.qcow2");
    }
}
