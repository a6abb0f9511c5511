// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Damage that a request meets, by the name qemu-io, beside both versions of the real tool. All give the same exit
//! code, the same sentences on standard error, and the same marks in the header.

use cowshed_testkit::programs::{Said, finish};
use cowshed_testkit::qemu::{Qemu, temp_dir};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap())
}

fn set(bytes: &mut [u8], at: usize, value: u64) {
    bytes[at..at + 8].copy_from_slice(&value.to_be_bytes());
}

/// Gets the file's bytes and the places of its L1 and L2 table, and damages the entries for guest offset 0.
type Damage = fn(&mut [u8], usize, usize);

/// Kinds of damage by the options of the image they are made in.
const DAMAGES: &[(&str, &str, Damage)] = &[
    ("data cluster", "", |bytes, _, l2| set(bytes, l2, word(bytes, l2) | 0x200)),
    ("two data clusters", "", |bytes, _, l2| {
        set(bytes, l2, word(bytes, l2) | 0x200);
        set(bytes, l2 + 8, word(bytes, l2 + 8) | 0x400);
    }),
    ("zero cluster", "", |bytes, _, l2| set(bytes, l2, word(bytes, l2) | 0x201)),
    ("L2 table", "", |bytes, l1, _| set(bytes, l1, word(bytes, l1) | 0x200)),
    ("data on the L1 table", "", |bytes, l1, l2| set(bytes, l2, l1 as u64 | 1 << 63)),
    ("reserved bits", "", |bytes, _, l2| set(bytes, l2, word(bytes, l2) | 1 << 57)),
    ("garbage", "", |bytes, _, l2| {
        let host = (word(bytes, l2 + 64) & 0x3f_ffff_ffff_ffff) as usize;
        bytes[host..host + 64].fill(0xff);
    }),
    ("version 2", "compat=0.10", |bytes, _, l2| set(bytes, l2, word(bytes, l2) | 0x200)),
    ("version 2 with a zero flag", "compat=0.10", |bytes, _, l2| set(bytes, l2, word(bytes, l2) | 1)),
    ("extended data cluster", "extended_l2=on", |bytes, _, l2| set(bytes, l2, word(bytes, l2) | 0x200)),
    ("subclusters of both kinds", "extended_l2=on", |bytes, _, l2| set(bytes, l2 + 8, word(bytes, l2 + 8) | 1 << 32)),
    ("subclusters without a cluster", "extended_l2=on", |bytes, _, l2| set(bytes, l2, 0)),
];

const REQUESTS: &[&str] = &[
    "read 0 64k; write 2M 64k",
    "read 200k 4k; read 0 4k",
    "write -P 7 0 64k; write 2M 64k",
    "write -P 7 4k 4k; discard 2M 64k",
    "write -P 7 1M 64k",
    "discard 0 64k; discard 64k 64k; write 2M 64k",
    "discard 0 64k; read -P 0 0 64k",
    "write -z -u 0 64k; read -P 0 0 64k",
    "read 512k 64k; write 2M 64k",
    "write 512k 4k; write 2M 64k",
    "truncate 128M; write 100M 64k",
];

/// Where we go another way than QEMU, and why.
fn is_known(damage: &str, request: &str) -> bool {
    match damage {
        // QEMU unmaps the cluster and then refuses to touch the metadata that it would free, after the discard went well
        // (or ends by an assertion). Ours looks first: the entry stays as it was.
        "data on the L1 table" => request.starts_with("discard 0") || request.starts_with("write -z"),
        // QEMU takes entries that contradict themselves for zeroes or data as it likes; ours refuses them.
        "version 2 with a zero flag" => !request.starts_with("read 512k"),
        // QEMU leaves the entry as it is; ours makes zeroes of the clusters that the guest gave up.
        "subclusters without a cluster" => request.starts_with("discard 0 64k; read"),
        _ => false,
    }
}

struct Run {
    code: Option<i32>,
    reports: Vec<String>,
    failed: Vec<String>,
    features: Vec<u8>,
}

fn run(tool: &Path, image: &Path, options: &[&str], requests: &str) -> Run {
    let mut command = Command::new(tool);
    command.args(options).args(["-f", "qcow2", "-d", "unmap"]).env("LC_ALL", "C");
    requests.split("; ").for_each(|request| {
        command.args(["-c", request]);
    });
    let Said { code, out, err } = finish(command.arg(image));
    assert!(!err.contains("panicked"), "{requests}: {err}");
    let pick = |word: &str| {
        (out.clone() + &err).lines().filter(|line| line.contains(word)).map(str::to_owned).collect::<Vec<_>>()
    };
    // After a mark QEMU has "No medium found" for reads too; ours refuses writes with EIO and goes on reading.
    let failed = pick("failed").into_iter().map(|line| line.replace("No medium found", "Input/output error")).collect();
    let features = std::fs::read(image).unwrap()[72..80].to_vec();
    Run { code, reports: pick("qcow2: "), failed, features }
}

fn image(qemu: &Qemu, path: &Path, options: &str, patch: Damage) {
    qemu.create(path, "qcow2", options, 64 << 20);
    let commands = ["write -P 1 0 256k", "write -c -P 2 512k 64k"].map(str::to_owned);
    qemu.io_commands(path, "qcow2", &commands);
    let mut bytes = std::fs::read(path).unwrap();
    let l1 = word(&bytes, 40) as usize;
    let l2 = (word(&bytes, l1) & OFFSET) as usize;
    patch(&mut bytes, l1, l2);
    std::fs::write(path, &bytes).unwrap();
}

fn our_tool(folder: &Path) -> PathBuf {
    let ours = folder.join("qemu-io");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_cowshed"), &ours).unwrap();
    ours
}

fn compare_all(options: &[&str]) {
    let folder = temp_dir();
    let ours = our_tool(folder.path());
    let (made, copy) = (folder.path().join("made"), folder.path().join("copy"));
    let [system, newest] = Qemu::all();
    let (mut differences, mut known) = (String::new(), 0);
    for (number, (damage, format, patch)) in DAMAGES.iter().enumerate() {
        image(&system, &made, format, *patch);
        let before = std::fs::read(&made).unwrap();
        for (turn, requests) in REQUESTS.iter().enumerate() {
            // Both give the same for these; each is asked about every other pair.
            let qemu = if (number + turn) % 2 == 0 { &system } else { &newest };
            std::fs::copy(&made, &copy).unwrap();
            let real = run(qemu.io_path(), &copy, options, requests);
            std::fs::copy(&made, &copy).unwrap();
            let own = run(&ours, &copy, options, requests);
            if options.contains(&"-r") {
                assert!(std::fs::read(&copy).unwrap() == before, "{damage}, {requests}: a reader changed the image");
            }
            let is_same = (real.code, &real.reports, &real.failed, &real.features)
                == (own.code, &own.reports, &own.failed, &own.features);
            if !is_same && is_known(damage, requests) {
                known += 1;
                continue;
            }
            if !is_same {
                let _ = writeln!(differences, "== {damage}: {requests}");
                for (name, run) in [("QEMU", real), ("ours", own)] {
                    let _ = writeln!(differences, "   {name}: {:?} {:?}", run.code, run.features);
                    run.reports.iter().chain(&run.failed).for_each(|line| {
                        let _ = writeln!(differences, "      {line}");
                    });
                }
            }
        }
    }
    assert!(differences.is_empty(), "damage is met differently ({known} known):\n{differences}");
}

#[test]
fn damage_is_met_and_reported_as_by_qemu_io() {
    compare_all(&[]);
}

#[test]
fn reader_reports_damage_as_qemu_io_and_marks_nothing() {
    compare_all(&["-r"]);
}

#[test]
fn our_own_name_says_which_image_is_marked() {
    let folder = temp_dir();
    let made = folder.path().join("made");
    image(&Qemu::system(), &made, "", DAMAGES[0].2);
    let output = Command::new(env!("CARGO_BIN_EXE_cowshed"))
        .args(["io", "-c", "read 0 4k", "-c", "read 0 4k", made.to_str().unwrap()])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    let warnings: Vec<&str> = text.lines().filter(|line| line.contains("warning")).collect();
    let [warning] = &warnings[..] else { panic!("{text}") };
    assert!(warning.starts_with("cowshed: warning: marking the image as corrupt: "), "{text}");
    assert!(warning.contains("made: ") && warning.contains("not cluster-aligned"), "{text}");
}

/// An entry behind the new end may point into a cluster of another entry.
#[test]
fn shrinking_frees_no_cluster_for_an_entry_that_points_into_it() {
    let folder = temp_dir();
    let (made, copy) = (folder.path().join("made"), folder.path().join("copy"));
    let link = folder.path().join("qemu-img");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_cowshed"), &link).unwrap();
    for qemu in Qemu::all() {
        // Guest cluster 3 points into the cluster of guest cluster 0.
        image(&qemu, &made, "", |bytes, _, l2| set(bytes, l2 + 24, word(bytes, l2) | 0x200));
        for (tool, is_ours) in [(qemu.img_path(), false), (&*link, true)] {
            std::fs::copy(&made, &copy).unwrap();
            let output = Command::new(tool)
                .args(["resize", "-f", "qcow2", "--shrink", copy.to_str().unwrap(), "128k"])
                .output()
                .unwrap();
            let text = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.success(), "{tool:?}: {text}");
            assert!(text.contains("qcow2: Image is corrupt: Cannot free unaligned cluster 0x"), "{tool:?}: {text}");
            if is_ours {
                // Cluster 0 is still counted: new data goes elsewhere.
                qemu.io_commands(&copy, "qcow2", &["write -P 9 64k 64k".to_owned(), "read -P 1 0 64k".to_owned()]);
                let verdict = qemu.check(&copy, "qcow2");
                assert_eq!(verdict.corruptions, 0, "{}", verdict.json);
            }
        }
    }
}
