// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The command lines of docs/instead-of-qemu-img.md, run with the newest QEMU's tools and with ours, must print and leave the same.

use cowshed_testkit::programs::finish;
use cowshed_testkit::qemu::{Qemu, temp_dir};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, symlink};
use std::path::Path;
use std::process::Command;

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/instead-of-qemu-img.md");

/// The sections of the page that have command lines, by their titles.
fn sections(page: &str) -> Vec<(&str, Vec<&str>)> {
    let sections = page.split("\n## ").skip(1).map(|section| {
        let blocks = section.split("```sh\n").skip(1).map(|rest| rest.split("```").next().expect("a block ends"));
        (section.lines().next().expect("a title"), blocks.flat_map(str::lines).collect())
    });
    sections.filter(|(_, lines): &(_, Vec<_>)| !lines.is_empty()).collect()
}

/// The files for each section: `sample.raw`, 8 MiB with data in three places, and the same as `image.qcow2`.
fn prepare(folder: &Path, qemu: &Qemu) {
    fs::create_dir(folder).expect("a folder");
    let sample = folder.join("sample.raw");
    let file = File::create(&sample).expect("a file");
    file.set_len(8 << 20).expect("a length");
    for mib in [0u8, 1, 5] {
        file.write_all_at(&vec![mib + 1; 300_000], u64::from(mib) << 20).expect("written");
    }
    let image = folder.join("image.qcow2");
    qemu.img([
        "convert".as_ref(),
        "-f".as_ref(),
        "raw".as_ref(),
        "-O".as_ref(),
        "qcow2".as_ref(),
        sample.as_os_str(),
        image.as_os_str(),
    ])
    .expect_ok();
}

/// A line of output without the parts that differ from run to run: places on the disk, times, and the steps of
/// progress.
fn comparable(line: &str) -> Option<String> {
    let is_progress = line.ends_with("/100%)");
    if is_progress && !line.contains("(100.00/") {
        return None;
    }
    for (start, end) in [("\"actual-size\": ", ""), ("disk size: ", "")] {
        if let Some(at) = line.find(start) {
            return Some(format!("{}…{end}", &line[..at + start.len()]));
        }
    }
    let is_time = line.contains(" ops; ") || line.contains(" bytes transferred");
    Some(if is_time { "…".to_owned() } else { line.trim_end().to_owned() })
}

fn comparable_text(text: &str) -> Vec<String> {
    let mut lines: Vec<String> = text.split(['\n', '\r']).filter_map(comparable).collect();
    lines.dedup();
    lines
}

fn run(line: &str, folder: &Path, tools: &Path) -> (Option<i32>, Vec<String>, Vec<String>) {
    let path = format!("{}:{}", tools.display(), std::env::var("PATH").expect("PATH"));
    let said = finish(Command::new("sh").args(["-c", line]).current_dir(folder).env("PATH", path));
    (said.code, comparable_text(&said.out), comparable_text(&said.err))
}

fn names(folder: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(folder).expect("a folder");
    entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect()
}

/// The format by the first bytes, as far as the page's images need it.
fn format_of(file: &Path) -> &'static str {
    match fs::read(file).expect("a file").get(..4) {
        Some(b"QFI\xfb") => "qcow2",
        Some(b"LUKS") => "luks",
        _ => "raw",
    }
}

#[test]
fn the_pages_command_lines_do_the_same() {
    let page = fs::read_to_string(PAGE).expect("the page");
    let qemu = Qemu::newest();
    let theirs_tools = qemu.img_path().parent().expect("a folder").to_owned();
    let work = temp_dir();
    let ours_tools = work.path().join("bin");
    fs::create_dir(&ours_tools).expect("a folder");
    for tool in ["qemu-img", "qemu-io", "qemu-nbd", "qemu-storage-daemon"] {
        symlink(env!("CARGO_BIN_EXE_cowshed"), ours_tools.join(tool)).expect("a link");
    }
    let sections = sections(&page);
    let count: usize = sections.iter().map(|(_, lines)| lines.len()).sum();
    assert!(sections.len() >= 8 && count > 90, "{} sections, {count} lines", sections.len());
    let mut differences = Vec::new();
    for (number, (title, lines)) in sections.iter().enumerate() {
        let (theirs, ours) = (work.path().join(format!("theirs{number}")), work.path().join(format!("ours{number}")));
        prepare(&theirs, &qemu);
        prepare(&ours, &qemu);
        for line in lines {
            let (expected, found) = (run(line, &theirs, &theirs_tools), run(line, &ours, &ours_tools));
            if expected != found {
                differences.push(format!("{title}: {line}\n  QEMU {expected:?}\n  ours {found:?}"));
            }
        }
        if names(&theirs) != names(&ours) {
            differences.push(format!("{title}: files {:?} and {:?}", names(&theirs), names(&ours)));
        }
        for name in names(&theirs).intersection(&names(&ours)) {
            let (left, right) = (theirs.join(name), ours.join(name));
            let formats = (format_of(&left), format_of(&right));
            let is_same = match formats {
                // Of encrypted images each has a key of its own.
                ("luks", "luks") => true,
                (one, other) => one == other && qemu.is_equal((&left, one), (&right, other)),
            };
            if !is_same {
                differences.push(format!("{title}: {name} differs ({formats:?})"));
            }
            if formats.1 == "qcow2" {
                qemu.expect_clean(&right);
            }
        }
    }
    assert!(differences.is_empty(), "{}", differences.join("\n"));
}
