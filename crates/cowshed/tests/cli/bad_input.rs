// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Verbs that change images, with impossible requests: one clear line, exit code 1, and not a byte of any image
//! changed.

use crate::oracle::{Oracle, words};
use cowshed_testkit::programs::tool;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Header bytes 60–63 count the snapshots, 64–71 have the place of their table, 72–79 are the incompatible features.
const NB_SNAPSHOTS: u64 = 60;
const SNAPSHOTS_OFFSET: u64 = 64;
const INCOMPATIBLE_FEATURES: u64 = 72;

fn damaged(folder: &Path, name: &str, at: u64, bytes: &[u8]) {
    fs::copy(folder.join("snapshots.qcow2"), folder.join(name)).expect("a copy");
    let file = fs::OpenOptions::new().write(true).open(folder.join(name)).expect("the copy");
    file.write_all_at(bytes, at).expect("damage");
}

#[test]
fn what_cannot_be_is_refused_and_changes_nothing() {
    let oracle = Oracle::new();
    let folder = oracle.work();
    oracle.make("create -q -f qcow2 base.qcow2 4M");
    oracle.make("create -q -f qcow2 -b base.qcow2 -F qcow2 middle.qcow2");
    oracle.make("create -q -f qcow2 -b middle.qcow2 -F qcow2 top.qcow2");
    oracle.make("create -q -f qcow2 -o refcount_bits=1 narrow.qcow2 4M");
    oracle.io(&["write -P 5 0 1M"], "narrow.qcow2");
    oracle.make("create -q -f qcow2 snapshots.qcow2 4M");
    oracle.io(&["write -P 5 0 1M"], "snapshots.qcow2");
    oracle.make("snapshot -c one snapshots.qcow2");
    damaged(&folder, "many.qcow2", NB_SNAPSHOTS, &u32::MAX.to_be_bytes());
    damaged(&folder, "far.qcow2", SNAPSHOTS_OFFSET, &(1u64 << 40).to_be_bytes());
    damaged(&folder, "corrupt.qcow2", INCOMPATIBLE_FEATURES, &2u64.to_be_bytes());
    let images = || -> Vec<(String, Vec<u8>)> {
        let names = fs::read_dir(&folder).expect("the folder").map(|entry| entry.expect("an entry").path());
        let mut all: Vec<_> =
            names.map(|path| (path.display().to_string(), fs::read(&path).expect("an image"))).collect();
        all.sort();
        all
    };
    let before = images();
    let mut wrong = String::new();
    for (line, reason) in [
        ("rebase -b top.qcow2 -F qcow2 top.qcow2", "top.qcow2"),
        ("rebase -b top.qcow2 -F qcow2 middle.qcow2", "middle.qcow2"),
        ("commit base.qcow2", "does not have a backing file"),
        ("commit -b top.qcow2 top.qcow2", "backing chain"),
        ("snapshot -l many.qcow2", "Snapshot table too large"),
        ("snapshot -c two missing.qcow2", "Could not open 'missing.qcow2'"),
        ("snapshot -a two missing.qcow2", "Could not open 'missing.qcow2'"),
        ("snapshot -d two missing.qcow2", "Could not open 'missing.qcow2'"),
        ("snapshot -c two narrow.qcow2", "Could not create snapshot 'two': a cluster would have 2 references"),
        ("resize --shrink snapshots.qcow2 0", "New image size must be positive"),
        ("resize --shrink snapshots.qcow2 -4M", "New image size must be positive"),
        ("snapshot -c two many.qcow2", "Snapshot table too large"),
        ("snapshot -d one far.qcow2", "snapshots_offset"),
        ("snapshot -a one far.qcow2", "snapshots_offset"),
        ("snapshot -c two corrupt.qcow2", "corrupt"),
        ("amend -o refcount_bits=64 many.qcow2", "Snapshot table too large"),
        ("amend -o refcount_bits=64 far.qcow2", "snapshots_offset"),
        ("amend -o refcount_bits=64 corrupt.qcow2", "corrupt"),
        ("amend -o refcount_bits=1 snapshots.qcow2", "refcount of 2"),
        ("amend -o compat=0.10,size=5M snapshots.qcow2", "snapshots prevent downgrade"),
        ("resize corrupt.qcow2 8M", "corrupt"),
    ] {
        let said = oracle.ours(&folder, &words(line));
        if said.code != Some(1) || !said.err.contains(reason) || said.err.contains("panicked") {
            wrong += &format!("{line}: {said:?}\n");
        }
        assert!(images() == before, "{line}: an image has changed");
    }
    assert!(wrong.is_empty(), "{wrong}");
    // Where only the snapshots are lost, the rest is reported and read, with a warning.
    for line in ["info far.qcow2", "convert -O raw far.qcow2 far.raw"] {
        let said = oracle.ours(&folder, &words(line));
        assert!(
            said.code == Some(0) && said.err.contains("warning") && said.err.contains("snapshots_offset"),
            "{said:?}"
        );
    }
}

const OBJECT: &str = "--object secret,id=s,data=geheimnis";
const WRONG: &str = "--object secret,id=s,data=falsches";

/// A wrong passphrase and key slots that are damaged: the words and exit codes of the real tool, and nothing is written.
#[test]
fn what_opens_no_key_slot_is_refused_by_every_verb() {
    let oracle = Oracle::new();
    let folder = oracle.work();
    let luks = "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10";
    oracle.make_patiently(&format!("create -q -f qcow2 {OBJECT} -o {luks} good.qcow2 2M"));
    oracle.make_patiently(&format!("create -q -f luks {OBJECT} -o key-secret=s,iter-time=10 good.luks 2M"));
    oracle.make("create -q -f raw plain.raw 2M");
    let bytes = fs::read(folder.join("good.qcow2")).expect("the image");
    let header = bytes.windows(6).position(|bytes| bytes == b"LUKS\xba\xbe").expect("a LUKS header") as u64;
    // The salt of slot 0, its iterations, and its key material: each time the passphrase opens nothing any more.
    for (name, start, image) in [("", header, "good.qcow2"), ("v", 0, "good.luks")] {
        for (what, at) in [("salt", 208 + 8), ("iterations", 208 + 7), ("material", 4096 + 1000)] {
            let copy = folder.join(format!("{name}{what}"));
            fs::copy(folder.join(image), &copy).expect("a copy");
            let file = fs::OpenOptions::new().read(true).write(true).open(&copy).expect("the copy");
            let mut byte = [0];
            file.read_exact_at(&mut byte, start + at).expect("a byte");
            file.write_all_at(&[byte[0] ^ 1], start + at).expect("damage");
        }
    }
    let files = || -> Vec<(String, Vec<u8>)> {
        let entries = fs::read_dir(&folder).expect("the folder").map(|entry| entry.expect("an entry").path());
        let mut all: Vec<_> =
            entries.map(|path| (path.display().to_string(), fs::read(&path).expect("a file"))).collect();
        all.sort();
        all
    };
    let before = files();
    let qcow2 = |name: &str| format!("--image-opts driver=qcow2,encrypt.key-secret=s,file.filename={name}");
    let volume = |name: &str| format!("--image-opts driver=luks,key-secret=s,file.filename={name}");
    let mut lines = Vec::new();
    for name in ["salt", "iterations", "material"] {
        lines.push(format!("convert {OBJECT} {} -O raw out.raw", qcow2(name)));
        lines.push(format!("convert {OBJECT} {} -O raw out.raw", volume(&format!("v{name}"))));
    }
    for image in [qcow2("good.qcow2"), volume("good.luks")] {
        for verb in ["map", "compare plain.raw", "resize", "bench -c 1", "bench -w -c 1"] {
            let (verb, rest) = verb.split_once(' ').unwrap_or((verb, ""));
            let rest = match verb {
                "resize" => "4M",
                "compare" => "driver=raw,file.filename=plain.raw",
                _ => rest,
            };
            lines.push(format!("{verb} {WRONG} {image} {rest}").trim_end().to_owned());
        }
        lines.push(format!("convert {WRONG} -n plain.raw --target-image-opts {}", image.replace("--image-opts ", "")));
    }
    lines.push(format!("snapshot {WRONG} {} -c one", qcow2("good.qcow2")));
    lines.push(format!("bitmap {WRONG} {} --add b", qcow2("good.qcow2")));
    lines.push(format!("amend {WRONG} {} -o lazy_refcounts=on", qcow2("good.qcow2")));
    for line in lines {
        let ours = oracle.ours(&folder, &words(&line));
        assert!(ours.err.contains("Invalid password, cannot unlock any keyslot"), "{line}: {}", ours.err);
        assert_eq!(ours.err.lines().count(), 1, "{line}: {}", ours.err);
        // Only QEMU 10 and later take secrets here.
        if !line.starts_with("bench") {
            oracle.compare_refusal(&line);
        }
        assert!(files() == before, "{line}: something was written");
    }
    oracle.verdict();
}

/// Runs the tools as a user that the modes of files bind; they don't bind root.
fn bound_by_modes(oracle: &Oracle, tool: &Path, folder: &Path, line: &str) -> (Option<i32>, String) {
    let is_root = rustix::process::geteuid().is_root();
    let mut command = match is_root {
        true => {
            let mut command = std::process::Command::new("setpriv");
            command.args(["--bounding-set", "-dac_override,-fowner", "--inh-caps", "-dac_override,-fowner"]).arg(tool);
            command
        }
        false => std::process::Command::new(tool),
    };
    let output = command.args(words(line)).current_dir(folder).env("LC_ALL", "C.UTF-8").output();
    let output = output.unwrap_or_else(|error| panic!("{} by setpriv: {error}", oracle.bin().display()));
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// A base that may not be written: the commit refuses before anything is changed. One that is too small grows, as in
/// the manual.
#[test]
fn commits_into_bases_that_are_read_only_or_too_small() {
    let oracle = Oracle::new();
    let folder = oracle.work();
    for (base, format) in [("base.qcow2", "qcow2"), ("base.raw", "raw")] {
        oracle.make(&format!("create -q -f {format} {base} 1M"));
        oracle.io(&["write -P 1 0 1M"], base);
        oracle.make(&format!("create -q -f qcow2 -b {base} -F {format} top-{format}.qcow2 3M"));
        oracle.io(&["write -P 2 512k 64k", "write -P 3 2M 100k"], &format!("top-{format}.qcow2"));
    }
    for format in ["qcow2", "raw"] {
        let (base, top) = (format!("base.{format}"), format!("top-{format}.qcow2"));
        oracle.compare_writing(&format!("commit {top}"), |theirs, ours| {
            for name in [&base, &top] {
                let other = ours.join(name).display().to_string();
                let said = oracle.real(theirs, &["compare".to_owned(), name.clone(), other]);
                assert_eq!(said.code, Some(0), "{name}: {}", said.out);
            }
        });
        let path = folder.join(&base);
        let read_only = |is: bool| {
            use std::os::unix::fs::PermissionsExt;
            let mode = if is { 0o444 } else { 0o644 };
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("a mode");
        };
        let bytes = || [fs::read(&path).expect("the base"), fs::read(folder.join(&top)).expect("the overlay")];
        let before = bytes();
        read_only(true);
        for line in [format!("commit {top}"), format!("commit -d {top}"), format!("commit -b {base} {top}")] {
            let ours = bound_by_modes(&oracle, &oracle.bin().join("qemu-img"), &folder, &line);
            let real = bound_by_modes(&oracle, oracle.qemu.img_path(), &folder, &line);
            assert_eq!((ours.0, real.0), (Some(1), Some(1)), "{line}: {} {}", ours.1, real.1);
            assert!(ours.1.contains(&base) && ours.1.lines().count() == 1, "{line}: {}", ours.1);
            assert!(bytes() == before, "{line} has changed something");
        }
        read_only(false);
        oracle.compare_writing(&format!("commit -q {top}"), |_, _| {});
    }
    oracle.verdict();
}

/// The file under the image of the first name fails with "no space", as the real tool's does.
fn without_space(name: &str) -> String {
    format!(
        "driver=qcow2,file.driver=blkdebug,file.inject-error.0.event=none,file.inject-error.0.iotype=write,file.inject-error.0.errno=28,\
         file.image.driver=file,file.image.filename={name}"
    )
}

/// "No space left on device" for each verb that writes to an existing image. The error is one line, with exit code 1,
/// as from the real tool, and the image is whole and reads as before.
#[test]
fn a_full_disk_is_one_clear_error_of_every_verb() {
    let oracle = Oracle::new();
    oracle.make("create -q -f raw base.raw 2M");
    oracle.io(&["write -P 9 0 2M"], "base.raw");
    oracle.make("create -q -f raw other.raw 2M");
    oracle.make("create -q -f qcow2 -b base.raw -F raw image.qcow2");
    oracle.io(&["write -P 1 0 300k", "write -z 400k 64k"], "image.qcow2");
    oracle.make("snapshot -c one image.qcow2");
    oracle.io(&["write -P 2 100k 64k"], "image.qcow2");
    let (folder, full) = (oracle.work(), without_space("image.qcow2"));
    let read = |folder: &Path| {
        let said = oracle.real(folder, &words("convert -O raw image.qcow2 content.raw"));
        assert_eq!(said.code, Some(0), "{}", said.err);
        fs::read(folder.join("content.raw")).expect("the content")
    };
    let before = read(&folder);
    for line in [
        format!("convert -n -f raw base.raw --target-image-opts {full}"),
        format!("resize --image-opts {full} --preallocation=full 4M"),
        format!("snapshot --image-opts {full} -c two"),
        format!("snapshot --image-opts {full} -a one"),
        format!("snapshot --image-opts {full} -d one"),
        format!("rebase --image-opts {full} -b other.raw -F raw"),
        format!("rebase --image-opts {full} -b ''"),
        format!("amend --image-opts {full} -o compat=0.10"),
        format!("amend --image-opts {full} -o refcount_bits=64"),
        format!("bitmap --image-opts {full} --add b"),
        format!("bench --image-opts {full} -w -c 20"),
    ] {
        let (_, own) = oracle.folders();
        let said = oracle.ours(&own, &words(&line));
        assert_eq!(said.code, Some(1), "{line}: {}{}", said.out, said.err);
        assert!(said.err.contains("No space left on device") && !said.err.contains("panicked"), "{line}: {}", said.err);
        assert!(said.err.lines().count() <= 2, "{line}: {}", said.err);
        oracle.qemu.expect_no_corruption(&own.join("image.qcow2"));
        // After a conversion into it, or a test of writing, the data may be there in part.
        if !line.starts_with("convert") && !line.starts_with("bench") {
            assert!(read(&own)[..2 << 20] == before[..], "{line}: reads otherwise");
        }
        let (theirs, _) = oracle.folders();
        let real = oracle.real(&theirs, &words(&line));
        // Its event stands for the guest's data alone: a verb that only changes metadata succeeds there.
        assert!(matches!(real.code, Some(0 | 1)), "the real one, {line}: {}{}", real.out, real.err);
    }
    // Into the base, and into new files.
    oracle.make("create -q -f qcow2 lower.qcow2 2M");
    let lower = "json:{\"driver\":\"qcow2\",\"file\":{\"driver\":\"blkdebug\",\"inject-error\":[{\"event\":\"write_aio\",\
                 \"errno\":28}],\"image\":{\"driver\":\"file\",\"filename\":\"lower.qcow2\"}}}";
    oracle.make(&format!("create -q -f qcow2 -b '{lower}' -F qcow2 upper.qcow2"));
    oracle.io(&["write -P 5 0 1M"], "upper.qcow2");
    let before = fs::read(folder.join("upper.qcow2")).expect("the overlay");
    let (_, own) = oracle.folders();
    let said = oracle.ours(&own, &words("commit upper.qcow2"));
    assert!(said.code == Some(1) && said.err.contains("No space left on device"), "{said:?}");
    oracle.qemu.expect_no_corruption(&own.join("lower.qcow2"));
    assert!(fs::read(own.join("upper.qcow2")).expect("the overlay") == before, "the overlay has changed");
}

/// A signal, or a kill, in the middle of an amendment that writes slowly: the image is as before, or as after.
#[test]
fn an_amendment_that_is_interrupted_changes_nothing_or_all() {
    for (signal, name) in [("-INT", "interrupted"), ("-KILL", "killed")] {
        let oracle = Oracle::new();
        let folder = oracle.work();
        oracle.make("create -q -f raw base.raw 8M");
        oracle.make("create -q -f qcow2 -o cluster_size=4k -b base.raw -F raw image.qcow2");
        oracle.io(&["write -P 1 0 4M", "write -z 4M 2M"], "image.qcow2");
        let content = |folder: &Path| {
            let said = oracle.real(folder, &words("convert -O raw image.qcow2 content.raw"));
            assert_eq!(said.code, Some(0), "{}", said.err);
            fs::read(folder.join("content.raw")).expect("the content")
        };
        let before = content(&folder);
        let original = fs::read(folder.join("image.qcow2")).expect("the image");
        let mut stopped = 0;
        // After the second write a signal comes too late: that is time enough also on a busy machine.
        for delay_ms in [1, 20, 60, 150, 400, 900, 2000, 4000] {
            let image = "driver=qcow2,file.driver=blkdebug,file.inject-error.0.iotype=write,\
                         file.inject-error.0.action=delay,file.inject-error.0.delay-ms=150,\
                         file.image.driver=file,file.image.filename=image.qcow2";
            let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_cowshed"))
                .args(["amend", "--image-opts", "-o", "compat=0.10", image])
                .current_dir(&folder)
                .stderr(std::process::Stdio::piped())
                .spawn()
                .expect("our own binary runs");
            // The moment of the signal is the case.
            std::thread::sleep(std::time::Duration::from_millis(delay_ms));
            let sent = std::process::Command::new("kill").args([signal, &child.id().to_string()]).status();
            let _ = sent.expect("kill runs");
            let status = child.wait().expect("it ends");
            stopped += usize::from(!status.success());
            // The kernel lets go of a killed process's ring, and of the locks of its files, behind its end.
            let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
            while oracle.real(&folder, &words("check -q image.qcow2")).err.contains("lock") {
                assert!(std::time::Instant::now() < deadline, "the image stays locked");
            }
            oracle.qemu.expect_no_corruption(&folder.join("image.qcow2"));
            assert!(content(&folder) == before, "{name} after {delay_ms} ms");
            match status.success() {
                // A busy machine may be late with the signal: from the beginning, then.
                true if stopped == 0 => fs::write(folder.join("image.qcow2"), &original).expect("the image again"),
                true => break,
                false => {}
            }
        }
        assert!(stopped > 0, "{name}: it was always done before");
        let again = oracle.ours(&folder, &words("amend -o compat=0.10 image.qcow2"));
        assert_eq!(again.code, Some(0), "{}", again.err);
        assert!(content(&folder) == before, "{name}");
    }
}

/// A job that can't stop now, because the disk doesn't answer, ends the process at the second signal.
#[test]
fn the_second_signal_ends_the_process_at_once() {
    let oracle = Oracle::new();
    let folder = oracle.work();
    oracle.make("create -q -f qcow2 image.qcow2 8M");
    let image = "driver=raw,file.driver=blkdebug,file.inject-error.0.iotype=read,file.inject-error.0.action=delay,\
                 file.inject-error.0.delay-ms=600000,file.image.driver=file,file.image.filename=image.qcow2";
    let attempt = || {
        let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_cowshed"))
            .args(["convert", "-q", "--image-opts", image, "copy.raw"])
            .current_dir(&folder)
            .spawn()
            .expect("our own binary runs");
        // The target is there: the job runs, and so signals are taken.
        while !folder.join("copy.raw").exists() {
            std::thread::yield_now();
        }
        let send = |name| tool("kill", &[name, &child.id().to_string()]);
        send("-TERM");
        // The first signal is taken by then; nothing outside shows when.
        std::thread::sleep(std::time::Duration::from_millis(300));
        send("-INT");
        child.wait().expect("it ends").code()
    };
    // A job that has not begun its read ends in order with the first signal, and takes its target along.
    let codes: Vec<Option<i32>> = (0..20).map(|_| attempt()).take_while(|code| *code != Some(130)).collect();
    assert!(codes.len() < 20 && codes.iter().all(|code| *code == Some(143)), "{codes:?}");
}

/// One signal stops jobs that never wait for anything.
#[test]
fn a_job_that_never_waits_is_interrupted() {
    const DISK: &str = "driver=null-co,size=1000T,read-zeroes=off";
    for arguments in [
        &["convert", "-n", "--image-opts", "--target-image-opts", DISK, DISK][..],
        &["bench", "-c", "2000000000", "--image-opts", DISK],
    ] {
        let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_cowshed"))
            .args(arguments)
            .stderr(std::process::Stdio::piped())
            .stdout(std::process::Stdio::null())
            .spawn()
            .expect("our own binary runs");
        // Some time after its start, when it takes signals.
        let process = std::path::PathBuf::from(format!("/proc/{}/status", child.id()));
        let takes_signals = || {
            let status = std::fs::read_to_string(&process).expect("the process's state");
            let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).expect("what it takes");
            u64::from_str_radix(caught.trim(), 16).expect("a mask") & 1 << (15 - 1) != 0
        };
        while !takes_signals() {
            std::thread::yield_now();
        }
        // The job is under way by then; nothing outside shows when.
        std::thread::sleep(std::time::Duration::from_millis(300));
        let sent = std::process::Command::new("kill").args(["-TERM", &child.id().to_string()]).status();
        assert!(sent.expect("kill runs").success());
        let mut said = String::new();
        std::io::Read::read_to_string(child.stderr.as_mut().expect("its messages"), &mut said).expect("text");
        assert_eq!(child.wait().expect("it ends").code(), Some(143), "{said}");
        assert!(said.contains("interrupted"), "{said}");
    }
}
