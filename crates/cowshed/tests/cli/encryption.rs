// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Encrypted images by the verbs: their messages are qemu-img's, and no passphrase is in them.

use crate::oracle::{Oracle, words};
use std::path::Path;

const OBJECT: &str = "--object secret,id=s,data=geheimnis";
const LUKS: &str = "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10";
const QCOW2: &str = "--image-opts driver=qcow2,encrypt.key-secret=s,file.filename=e.qcow2";
const VOLUME: &str = "--image-opts driver=luks,key-secret=s,file.filename=v.luks";

/// An encrypted image and a volume of QEMU's, each with data.
fn gallery(oracle: &Oracle) {
    oracle.make_patiently(&format!("create -q -f qcow2 {OBJECT} -o {LUKS} e.qcow2 4M"));
    oracle.make_patiently(&format!("create -q -f luks {OBJECT} -o key-secret=s,iter-time=10 v.luks 4M"));
    let essiv = "cipher-alg=aes-128,cipher-mode=cbc,ivgen-alg=essiv,hash-alg=sha1,key-secret=s,iter-time=10";
    oracle.make_patiently(&format!("create -q -f luks {OBJECT} -o {essiv} essiv.luks 1M"));
    oracle.make("create -q -f raw r.raw 4M");
    oracle.io(&["write -P 5 100k 1M", "write -P 6 3M 7k"], "r.raw");
    for image in [QCOW2, VOLUME] {
        let target = image.trim_start_matches("--image-opts ");
        oracle.make(&format!("convert -n {OBJECT} r.raw --target-image-opts {target}"));
    }
}

#[test]
fn what_is_read_of_encrypted_images() {
    let oracle = Oracle::new();
    gallery(&oracle);
    for line in
        ["info e.qcow2", "info --output=json e.qcow2", "info v.luks", "info --output=json v.luks", "info essiv.luks"]
    {
        oracle.compare(line);
    }
    for (verb, rest) in [
        ("map --output=json", ""),
        ("map", ""),
        ("check", ""),
        ("compare", "r.raw"),
        ("measure -O raw", ""),
        ("measure -O qcow2", ""),
    ] {
        if verb == "compare" {
            let key = OBJECT;
            oracle.compare(&format!("compare {key} {QCOW2} driver=raw,file.filename=r.raw"));
            oracle.compare(&format!("compare {key} {VOLUME} driver=raw,file.filename=r.raw"));
            continue;
        }
        for image in [QCOW2, VOLUME] {
            oracle.compare(format!("{verb} {OBJECT} {image} {rest}").trim_end());
        }
    }
    oracle.compare(&format!("measure {OBJECT} -O qcow2 -o {LUKS} --size 1G"));
    oracle.compare(&format!("measure {OBJECT} -O qcow2 -o {LUKS},cluster_size=4k r.raw"));
    oracle.compare(&format!("measure {OBJECT} -O luks -o key-secret=s --size 1G"));
    oracle.verdict();
}

/// The content of an image in one of the folders, as the real tool reads it.
fn content(oracle: &Oracle, folder: &Path, image: &str) -> Vec<u8> {
    let line = format!("convert {OBJECT} {image} -O raw content.raw");
    let said = oracle.real(folder, &words(&line));
    assert_eq!(said.code, Some(0), "{line}: {}", said.err);
    std::fs::read(folder.join("content.raw")).expect("the content")
}

const RAW: &str = "--image-opts driver=raw,file.filename=n.raw";
const OVERLAY: &str = "--image-opts driver=qcow2,encrypt.key-secret=s,file.filename=o.qcow2,backing.driver=qcow2,\
                       backing.encrypt.key-secret=s,backing.file.filename=e.qcow2";
const ALONE: &str = "--image-opts driver=qcow2,encrypt.key-secret=s,file.filename=o.qcow2";
const BASE: &str = QCOW2;

#[test]
fn what_is_written_of_encrypted_images() {
    let oracle = Oracle::new();
    gallery(&oracle);
    // An encrypted overlay on the encrypted image.
    oracle.make_patiently(&format!("create -q -f qcow2 {OBJECT} -u -b e.qcow2 -F qcow2 -o {LUKS} o.qcow2 4M"));
    let target = OVERLAY.trim_start_matches("--image-opts ");
    oracle.make("create -q -f raw r2.raw 4M");
    oracle.io(&["write -P 8 200k 300k", "write -P 7 3M 64k"], "r2.raw");
    oracle.make(&format!("convert -n {OBJECT} r2.raw --target-image-opts {target}"));
    let new = "--image-opts driver=qcow2,encrypt.key-secret=s,file.filename=n.qcow2";
    let new_volume = "--image-opts driver=luks,key-secret=s,file.filename=n.luks";
    for (line, image) in [
        (format!("create {OBJECT} -f qcow2 -o {LUKS} n.qcow2 8M"), new),
        (format!("create {OBJECT} -f qcow2 -b r.raw -F raw -o {LUKS} n.qcow2"), new),
        (format!("convert {OBJECT} -O qcow2 -o {LUKS} r.raw n.qcow2"), new),
        (format!("convert {OBJECT} -O qcow2 -o {LUKS},preallocation=metadata r.raw n.qcow2"), new),
        (format!("convert {OBJECT} -O luks -o key-secret=s,iter-time=10 r.raw n.luks"), new_volume),
        (format!("convert {OBJECT} {QCOW2} -O luks -o key-secret=s,iter-time=10 n.luks"), new_volume),
        (format!("convert {OBJECT} {VOLUME} -O qcow2 -o {LUKS},compat=0.10 n.qcow2"), new),
        (
            format!("convert {OBJECT} {QCOW2} -O qcow2 -c plain.qcow2"),
            "--image-opts driver=qcow2,file.filename=plain.qcow2",
        ),
        (format!("resize {OBJECT} {QCOW2} 6M"), QCOW2),
        (format!("snapshot {OBJECT} {QCOW2} -c one"), QCOW2),
        (format!("resize {OBJECT} {VOLUME} --shrink 1M"), VOLUME),
        (format!("dd {OBJECT} -O raw {} bs=64k skip=1", QCOW2.replace(" driver", " if=driver") + " of=n.raw"), RAW),
        (format!("commit -q {OBJECT} {OVERLAY}"), BASE),
        (format!("rebase {OBJECT} {OVERLAY} -b ''"), ALONE),
        (format!("convert {OBJECT} {OVERLAY} -O raw n.raw"), RAW),
    ] {
        oracle.compare_writing(&line, |theirs, ours| {
            assert!(content(&oracle, theirs, image) == content(&oracle, ours, image), "{line}: another content");
        });
    }
    oracle.verdict();
}

#[test]
fn nothing_is_compressed_into_encrypted_images() {
    let oracle = Oracle::new();
    gallery(&oracle);
    for line in [
        format!("convert -c {OBJECT} -O qcow2 -o {LUKS} r.raw n.qcow2"),
        format!("convert -c {OBJECT} -O luks -o key-secret=s,iter-time=10 r.raw n.luks"),
    ] {
        oracle.compare_writing(&line, |_, _| panic!("{line} is no error"));
    }
    oracle.verdict();
    // An image that is there: qemu-img fails at the first cluster with data, when it has written others. We don't begin.
    let target = QCOW2.trim_start_matches("--image-opts ");
    let line = format!("convert -c -n {OBJECT} r.raw --target-image-opts {target}");
    let before = std::fs::read(oracle.work().join("e.qcow2")).expect("the image");
    assert!(oracle.refused(&line).contains("Compression and encryption not supported at the same time"));
    assert!(std::fs::read(oracle.work().join("e.qcow2")).expect("the image") == before);
    assert_eq!(oracle.real(&oracle.work(), &words(&line)).code, Some(1));
}

#[test]
fn passphrases_are_in_no_message() {
    let oracle = Oracle::new();
    gallery(&oracle);
    std::fs::write(oracle.work().join("pass"), "geheimnis").expect("a file");
    let passphrases = ["geheimnis", "falsches", "Z2VoZWltbmlz"];
    let objects = [
        "--object secret,id=s,data=geheimnis",
        "--object secret,id=s,data=falsches",
        "--object secret,id=s,data=Z2VoZWltbmlz,format=base64",
        "--object secret,id=s,data=geheimnis,format=base64",
        "--object secret,id=s,data=geheimnis,fromat=raw",
        "--object secret,id=s,data=geheimnis,file=pass",
        "--object secret,data=geheimnis",
        "--object secret,id=s,file=pass --object secret,id=s,data=geheimnis",
        "--object secret,id=s,data=geheimnis,keyid=k,iv=AAAA",
        "--object secret,id=t,data=geheimnis",
        "--object rng,id=s,data=geheimnis",
    ];
    let lines = [
        format!("info {QCOW2}"),
        format!("info --output=json {QCOW2}"),
        format!("check {QCOW2}"),
        format!("map {VOLUME}"),
        format!("convert {QCOW2} -O raw out.raw"),
        format!("convert -O qcow2 -o {LUKS} r.raw out.qcow2"),
        format!("create -f qcow2 -o {LUKS} out.qcow2 1M"),
        "create -f luks -o key-secret=s,cipher-alg=none out.luks 1M".to_owned(),
        format!("resize {VOLUME} 8M"),
        format!("compare {QCOW2} driver=raw,file.filename=r.raw"),
        format!("measure -O qcow2 -o {LUKS} --size 1M"),
    ];
    let mut refused = 0;
    for object in objects {
        for line in &lines {
            let line = format!("{line} {object}");
            let said = oracle.ours(&oracle.work(), &words(&line));
            assert!(matches!(said.code, Some(0..=4)) && !said.err.contains("panicked"), "{line}: {}", said.err);
            refused += usize::from(said.code != Some(0));
            for passphrase in passphrases {
                assert!(!said.out.contains(passphrase) && !said.err.contains(passphrase), "{line}: {}", said.err);
            }
        }
    }
    assert!(refused > 60, "{refused} of the runs were to fail");
}

/// The passphrase "letmein" encrypted by `openssl enc -aes-256-cbc` with a key of 32 letters k, as QEMU's manual shows it.
#[test]
fn a_secret_may_be_encrypted_with_another() {
    let oracle = Oracle::new();
    let work = oracle.work();
    std::fs::write(work.join("plain"), "letmein").expect("a file");
    std::fs::write(work.join("key"), [b'k'; 32]).expect("a file");
    let encrypt = std::process::Command::new("openssl")
        .args(["enc", "-aes-256-cbc", "-a", "-A", "-in", "plain", "-K", &"6b".repeat(32), "-iv", &"69".repeat(16)])
        .current_dir(&work)
        .output();
    let data = String::from_utf8(encrypt.expect("openssl must be installed").stdout).expect("base64");
    // 16 letters i.
    let wrapped = format!(
        "--object secret,id=k,file=key --object secret,id=s,keyid=k,iv=aWlpaWlpaWlpaWlpaWlpaQ==,format=base64,data={data}"
    );
    let said =
        oracle.ours(&work, &words(&format!("create -q -f luks {wrapped} -o key-secret=s,iter-time=10 w.luks 1M")));
    assert_eq!(said.code, Some(0), "{}", said.err);
    let image = "--image-opts driver=luks,key-secret=s,file.filename=w.luks";
    for object in ["--object secret,id=s,data=letmein", &wrapped] {
        oracle.make(&format!("convert {object} {image} -O raw out.raw"));
    }
    // Another key, another vector: one clear error, from both.
    std::fs::write(work.join("key"), [b'x'; 32]).expect("a file");
    oracle.compare_refusal(&format!("convert {wrapped} {image} -O raw out.raw"));
    std::fs::write(work.join("key"), [b'k'; 31]).expect("a file");
    oracle.compare_refusal(&format!("convert {wrapped} {image} -O raw out.raw"));
    oracle.verdict();
}

/// True if the passphrase opens the image: QEMU's tool decides.
fn opens(oracle: &Oracle, folder: &Path, image: &str, data: &str) -> bool {
    let line = format!("convert --object secret,id=s,data={data} {image} -O raw opened.raw");
    oracle.real(folder, &words(&line)).code == Some(0)
}

#[test]
fn key_slots_change_as_qemu_img_changes_them() {
    let oracle = Oracle::new();
    gallery(&oracle);
    let two = "--object secret,id=t,data=neues";
    for (image, prefix) in [(QCOW2, "encrypt."), (VOLUME, "")] {
        let amend = |options: &str| {
            let options: Vec<String> = options.split(',').map(|option| format!("{prefix}{option}")).collect();
            format!("amend {OBJECT} {two} {image} -o {}", options.join(","))
        };
        let both = |line: &str, first: bool, second: bool| {
            oracle.compare_writing(line, |theirs, ours| {
                for folder in [theirs, ours] {
                    let ways = (opens(&oracle, folder, image, "geheimnis"), opens(&oracle, folder, image, "neues"));
                    assert_eq!(ways, (first, second), "{line} in {}", folder.display());
                }
            });
        };
        both(&amend("state=active,new-secret=t,iter-time=10"), true, true);
        both(&amend("state=active,new-secret=t,iter-time=10,keyslot=7"), true, true);
        both(&format!("{} --force", amend("state=active,new-secret=t,iter-time=10,keyslot=0")), false, true);
        both(&format!("{} --force", amend("state=inactive,keyslot=0")), false, false);
        for refused in [
            "state=active,new-secret=t,iter-time=10,keyslot=0",
            "state=active,new-secret=t,iter-time=10,keyslot=8",
            "state=active,new-secret=t,iter-time=10,old-secret=s",
            "state=active,new-secret=nobody,iter-time=10",
            "state=active",
            "state=inactive",
            "state=inactive,new-secret=t",
            "state=inactive,keyslot=3",
            "state=inactive,keyslot=0",
            "state=inactive,keyslot=0,old-secret=t",
            "state=inactive,old-secret=s",
            "state=inactive,old-secret=t",
            "state=perhaps",
            "iter-time=10",
            "cipher-alg=aes-128",
        ] {
            let before = std::fs::read(oracle.work().join(if prefix.is_empty() { "v.luks" } else { "e.qcow2" }));
            oracle.compare_refusal(&amend(refused));
            let after = std::fs::read(oracle.work().join(if prefix.is_empty() { "v.luks" } else { "e.qcow2" }));
            assert!(before.expect("the image") == after.expect("the image"), "{refused} changed something");
        }
        // In the working folder itself: two slots, and the first one goes.
        let ours = |line: &str| {
            let said = oracle.ours(&oracle.work(), &words(line));
            assert_eq!(said.code, Some(0), "{line}: {}", said.err);
        };
        ours(&amend("state=active,new-secret=t,iter-time=10"));
        ours(&amend("state=inactive,old-secret=s"));
        let work = oracle.work();
        assert!(!opens(&oracle, &work, image, "geheimnis") && opens(&oracle, &work, image, "neues"));
    }
    oracle.verdict();
}
