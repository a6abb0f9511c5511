// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The commands on pages of docs/, run word for word. The tutorial has a test of its own (`documents.rs`).

use std::path::Path;
use std::process::Command;

/// A command of a page: its beginning, the script that prepares its files, and the exit code. Without a script it isn't
/// run: it serves until it is stopped. The commands of a page run in one folder, as a reader runs them. A prepared file takes
/// no place there where an earlier command has made one.
type Case = (&'static str, Option<&'static str>, i32);

const SECRETS: &str = "printf secret >passphrase.txt; printf other >new.txt";
const LOCKED: &str = "printf secret >passphrase.txt; printf other >new.txt
    cowshed create -q -f qcow2 --object secret,id=pass,file=passphrase.txt -o encrypt.format=luks,encrypt.key-secret=pass,encrypt.iter-time=10 disk.qcow2 1M";
/// With a second key, for the removal of the first one.
const LOCKED_TWICE: &str = "printf secret >passphrase.txt; printf other >new.txt
    cowshed create -q -f qcow2 --object secret,id=pass,file=passphrase.txt -o encrypt.format=luks,encrypt.key-secret=pass,encrypt.iter-time=10 disk.qcow2 1M
    cowshed amend --object secret,id=pass,file=passphrase.txt --object secret,id=new,file=new.txt --image-opts driver=qcow2,encrypt.key-secret=pass,file.filename=disk.qcow2 -o encrypt.state=active,encrypt.new-secret=new,encrypt.iter-time=10";
const DISK: &str = "cowshed create -q -f qcow2 disk.qcow2 1M";
const UPLOAD: &str = "cowshed create -q -f qcow2 upload.qcow2 1M";
const BROKEN: &str = "cowshed create -q -f qcow2 broken.qcow2 1M; cowshed io -c 'write 0 64k' broken.qcow2
    printf '\\200\\0\\0\\377\\377\\377\\0\\0' | dd of=broken.qcow2 bs=1 seek=196608 conv=notrunc status=none";
const DISKS: &str = "for n in system data disk; do cowshed create -q -f qcow2 $n.qcow2 1M; done";
const PACKAGE: &str = "for n in system more; do cowshed create -q -f qcow2 $n.qcow2 1M; done
    cowshed convert -O ova system.qcow2 more.qcow2 machine.ova";
const ONE_DISK: &str = "cowshed create -q -f qcow2 system.qcow2 1M; cowshed convert -O ova system.qcow2 machine.ova";
const UNPACKED: &str = "cowshed create -q -f qcow2 system.qcow2 1M; cowshed convert -O ova system.qcow2 machine.ova
    cowshed ova unpack machine.ova unpacked; rm machine.ova";
const TWO_DISKS: &str = "for n in system more; do cowshed create -q -f qcow2 $n.qcow2 1M; done
    cowshed convert -O ova system.qcow2 more.qcow2 server.ova; rm more.qcow2";

const RAW: &str = "yes | head -c 1M >disk.raw";
const DISK_AND_RAW: &str = "yes | head -c 1M >disk.raw; cowshed convert -q -O qcow2 disk.raw disk.qcow2";
const FOLDER: &str = "mkdir folder; yes | head -c 100k >folder/a.txt";
const BASE: &str = "cowshed create -q -f qcow2 base.qcow2 1M";
const OVERLAY: &str =
    "cowshed create -q -f qcow2 disk.qcow2 1M; cowshed create -q -f qcow2 -b disk.qcow2 -F qcow2 overlay.qcow2";
/// With the log of a repair.
const REPAIRED: &str =
    "cowshed create -q -f qcow2 disk.qcow2 1M; cowshed check -q -r all --undo-log repair.undo disk.qcow2";
const SNAPSHOT: &str = "cowshed create -q -f qcow2 vm2.qcow2 1M; cowshed snapshot -c before-upgrade vm2.qcow2";
/// An image that names a backing file.
const UPLOAD_ON_BASE: &str =
    "cowshed create -q -f qcow2 base.qcow2 1M; cowshed create -q -f qcow2 -b base.qcow2 -F qcow2 upload.qcow2";

const PAGES: &[(&str, &[Case])] = &[
    (
        "../README.md",
        &[
            ("convert --untrusted", Some("cowshed create -q -f qcow2 upload.img 1M"), 0),
            ("convert -p -O qcow2 -c", Some(RAW), 0),
            ("create -f qcow2 -b disk.qcow2", Some(DISK), 0),
            ("info --backing-chain", Some(OVERLAY), 0),
            ("check -r leaks", Some(OVERLAY), 0),
            ("map --output=json", Some(OVERLAY), 0),
            // `served_pages.rs` runs these.
            ("serve", None, 0),
            ("share", None, 0),
        ],
    ),
    (
        "convert.md",
        &[
            ("convert -p disk.raw", Some(RAW), 0),
            ("convert -p -O raw vm1.qcow2", Some("cowshed create -q -f qcow2 vm1.qcow2 1M"), 0),
            ("convert -f vmdk", Some("cowshed create -q -f vmdk disk.vmdk 1M"), 0),
            ("convert -c", Some(RAW), 0),
            ("measure", Some(RAW), 0),
            (
                "convert -B golden.qcow2",
                Some(
                    "cowshed create -q -f qcow2 golden.qcow2 1M; cowshed create -q -f qcow2 -b golden.qcow2 -F qcow2 vm1.qcow2",
                ),
                0,
            ),
            ("convert -n", Some("cowshed create -q -f qcow2 disk.qcow2 1M; truncate -s 1M target.raw"), 0),
            ("convert -l", Some(SNAPSHOT), 0),
            ("compare", Some(DISK_AND_RAW), 0),
        ],
    ),
    (
        "check.md",
        &[("check disk.qcow2", Some(DISK), 0), ("check -r", Some(DISK), 0), ("check --undo", Some(REPAIRED), 0)],
    ),
    // `served_pages.rs` runs the commands that serve.
    ("limits.md", &[("serve", None, 0), ("bench", Some(DISK), 0)]),
    ("caches.md", &[("serve", None, 0), ("bench", Some(DISK), 0)]),
    ("statistics.md", &[("serve", None, 0), ("top", None, 0)]),
    (
        "fast.md",
        &[
            ("create -f qcow2 -o cluster_size=128k", Some(BASE), 0),
            ("create -f qcow2 -o cluster_size=2M", Some("true"), 0),
            ("convert -c", Some(RAW), 0),
            ("bench", Some(DISK), 0),
        ],
    ),
    (
        "encryption.md",
        &[
            ("create -f qcow2 --object", Some(SECRETS), 0),
            ("convert --object", Some(LOCKED), 0),
            ("create -f luks", Some(SECRETS), 0),
            ("amend --object secret,id=pass,file=passphrase.txt --object secret,id=new", Some(LOCKED), 0),
            ("amend --object secret,id=pass,file=passphrase.txt --image-opts", Some(LOCKED_TWICE), 0),
        ],
    ),
    ("io.md", &[("io ", Some(DISK), 0)]),
    (
        "rescue.md",
        &[
            ("rescue --map lost.json", Some(BROKEN), 2),
            ("rescue --scan", Some(BROKEN), 2),
            // It needs a table that was lost there.
            ("rescue --assign", None, 0),
        ],
    ),
    ("untrusted-images.md", &[("inspect", Some(UPLOAD), 0), ("convert --untrusted", Some(UPLOAD), 0)]),
    (
        "coming-from-qemu-img.md",
        &[
            ("convert disk.raw", Some("truncate -s 1M disk.raw"), 0),
            // The page shows these refusals.
            ("create disk.qcow2", Some("true"), 1),
            ("inspect", Some(UPLOAD_ON_BASE), 2),
            ("convert --untrusted", Some(UPLOAD_ON_BASE), 1),
        ],
    ),
    (
        "fault-injection.md",
        &[
            ("create -f qcow2 out.qcow2", Some("true"), 0),
            // 100 writes are let through.
            ("convert -n", Some("yes | head -c 200M >disk.raw; cowshed create -q -f qcow2 out.qcow2 20G"), 1),
            ("qemu-storage-daemon", None, 0),
            // These go together, as `documents.rs` runs them.
            ("create -f qcow2 app.qcow2", None, 0),
            ("create -f qcow2 fs.qcow2", None, 0),
            ("mount", None, 0),
            ("umount", None, 0),
            // `guest_faults.rs` of the daemon's tests runs these with a guest.
            ("convert -f raw -O qcow2 disk.raw", None, 0),
            ("serve --fault seed=7", None, 0),
            ("convert -f qcow2 -O raw disk.qcow2 after.raw", None, 0),
        ],
    ),
    ("formats/vmdk.md", &[("convert", Some("cowshed create -q -f vmdk disk.vmdk 1M"), 0)]),
    ("formats/vvfat.md", &[("convert -O", Some(FOLDER), 0), ("serve", None, 0)]),
    (
        "formats/block-formats.md",
        &[
            ("convert -p", Some("cowshed create -q -f vhdx disk.vhdx 1M"), 0),
            ("convert -f vpc", Some("cowshed create -q -f vpc child.vhd 1M"), 0),
            // It needs a differencing image, which no tool here makes.
            ("convert -O qcow2 --image-opts", None, 0),
        ],
    ),
    (
        "formats/ova.md",
        &[
            ("convert machine.ova disk.qcow2", Some(ONE_DISK), 0),
            ("convert --disk 2", Some(TWO_DISKS), 0),
            ("convert unpacked/machine.ovf", Some(UNPACKED), 0),
            ("convert -O ova", Some(DISKS), 0),
            ("convert --for", Some(DISKS), 0),
            ("ova info", Some(PACKAGE), 0),
            ("ova verify", Some(PACKAGE), 0),
            ("ova unpack", Some(PACKAGE), 0),
            ("ova pack", Some("true"), 0),
        ],
    ),
];

/// A page, with each command in one line.
fn joined(page: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(page);
    let text = std::fs::read_to_string(path).expect("the page is there");
    text.replace("\\\n", "\u{0}")
}

/// The first line of a page that begins with some words.
#[track_caller]
pub fn line_of(page: &str, start: &str) -> String {
    let joined = joined(page);
    let line = joined.lines().find(|line| line.starts_with(start));
    line.unwrap_or_else(|| panic!("{page} has no line that begins with {start}")).replace('\u{0}', " ")
}

/// The commands of `cowshed` in a page's blocks of code, each in one line, without its first word and without `sudo`.
pub fn commands(page: &str) -> Vec<String> {
    let joined = joined(page);
    let mut is_code = false;
    let of_line = |line: &str| -> Option<String> {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        let is_shown = (is_code && !is_fence) || line.starts_with("    ");
        let command = line.trim_start().trim_start_matches("$ ").trim_start_matches("sudo ");
        let command = command.strip_prefix("cowshed ").filter(|_| is_shown)?;
        let command = command.split("  #").next().unwrap_or(command).trim_end();
        // A list of options goes on in the next line without a blank, other arguments with one.
        let parts: Vec<&str> = command.split('\u{0}').map(str::trim).collect();
        Some(parts.join(" ").replace(", ", ","))
    };
    joined.lines().filter_map(of_line).collect()
}

#[test]
fn commands_of_the_pages_work_as_written() {
    let program = Path::new(env!("CARGO_BIN_EXE_cowshed"));
    let path = format!("{}:{}", program.parent().expect("its folder").display(), std::env::var("PATH").expect("PATH"));
    let mut wrong = Vec::new();
    for (page, cases) in PAGES {
        let commands = commands(page);
        assert!(commands.len() >= cases.len(), "{page} shows {commands:#?}");
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
        for command in commands {
            let Some((_, prepared, code)) = cases.iter().find(|(start, ..)| command.starts_with(start)) else {
                wrong.push(format!("{page}: no case for {command}"));
                continue;
            };
            let Some(prepared) = prepared else { continue };
            let files = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
            let script = format!(
                "set -eu\n(cd '{files}'; {prepared}) >&2 || exit 99
                tar -C '{files}' -cSf - . | tar -xf - --skip-old-files\nexec cowshed {command} </dev/null",
                files = files.path().display()
            );
            let output = Command::new("sh")
                .args(["-c", &script])
                .current_dir(&folder)
                .env("PATH", &path)
                .output()
                .expect("a shell");
            if output.status.code() != Some(*code) {
                let said = String::from_utf8_lossy(&output.stderr).into_owned();
                wrong.push(format!("{page}: {command}: {}: {said}", output.status));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
