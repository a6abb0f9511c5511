// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Writes by fio over NBD that need clusters, to our daemon and to qemu-storage-daemon: each run gets a fresh image, and what
//! the server handed to the file system is counted.

use crate::Settings;
use crate::nbd::Server;
use crate::reads::{Side, serve};
use crate::table::{Outcome, Row, Written};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

const MIB: u64 = 1 << 20;
/// Size of the disks.
const DISK_MIB: u64 = 4096;

struct Case {
    name: &'static str,
    /// Options of the fresh image.
    options: &'static str,
    over_backing: bool,
    load: &'static [&'static str],
    target: &'static str,
}

/// Requests of a run: with 64 KiB clusters about every third one of the disk is hit.
const RANDOM: &[&str] = &["--rw=randwrite", "--bs=4k", "--iodepth=32", "--number_ios=30000"];
const SEQUENTIAL: &[&str] = &["--rw=write", "--bs=64k", "--iodepth=8", "--number_ios=32768"];

const fn overlay(name: &'static str, options: &'static str) -> Case {
    Case { name, options, over_backing: true, load: RANDOM, target: "≥ 1.5×, bytes ≤ 1" }
}

const fn alone(name: &'static str, options: &'static str, load: &'static [&'static str], target: &'static str) -> Case {
    Case { name, options, over_backing: false, load, target }
}

const CASES: &[Case] = &[
    overlay("overlay, 64k", "cluster_size=64k"),
    overlay("overlay, 128k", "cluster_size=128k"),
    overlay("overlay, 128k, extended_l2", "cluster_size=128k,extended_l2=on"),
    overlay("overlay, 64k, extended_l2", "cluster_size=64k,extended_l2=on"),
    overlay("overlay, 2M, extended_l2", "cluster_size=2M,extended_l2=on"),
    alone("empty image, random 4k", "cluster_size=64k", RANDOM, "≥ 1.5×"),
    alone("empty image, sequential 64k", "cluster_size=64k", SEQUENTIAL, "≥ 1.2×"),
    alone("preallocation=metadata, random 4k", "preallocation=metadata", RANDOM, ""),
    alone("preallocation=falloc, random 4k", "preallocation=falloc", RANDOM, ""),
];

/// All cases.
pub fn run(settings: &Settings) -> Result<Vec<Row>, String> {
    let base = base(settings)?;
    let wanted = |case: &&Case| settings.only.as_ref().is_none_or(|only| case.name.contains(only.as_str()));
    CASES.iter().filter(wanted).map(|case| measure(settings, case, &base)).collect()
}

fn measure(settings: &Settings, case: &Case, base: &Path) -> Result<Row, String> {
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for round in 0..=settings.rounds {
        for turn in 0..2 {
            let (side, runs) = match (round + turn) % 2 {
                0 => (Side::Ours, &mut ours),
                _ => (Side::Theirs, &mut theirs),
            };
            let written = once(settings, case, base, side)?;
            // The first round warms the page cache.
            if round > 0 {
                runs.push(written);
            }
        }
    }
    Ok(Row { name: case.name.to_owned(), target: case.target, result: Outcome::Written { ours, theirs } })
}

fn once(settings: &Settings, case: &Case, base: &Path, side: Side) -> Result<Written, String> {
    let image = settings.folder.join("fresh.qcow2");
    let mut create = Command::new(&settings.qemu);
    create.args(["create", "-q", "-f", "qcow2", "-o", case.options]);
    if case.over_backing {
        create.args(["-F", "raw", "-b"]).arg(base);
    }
    let output = create.arg(&image).arg(format!("{DISK_MIB}M")).output().map_err(|e| e.to_string())?;
    if !output.status.success() {
        return Err(format!("{create:?}: {}", String::from_utf8_lossy(&output.stderr).trim()));
    }
    let server = serve(settings, side, &image, "qcow2", "", true)?;
    let before = written_bytes(&server)?;
    let how: Vec<String> =
        case.load.iter().copied().chain(["--size=4096m", "--end_fsync=1"]).map(str::to_owned).collect();
    let served = server.load(settings, &how)?;
    let bytes = written_bytes(&server)? - before;
    drop(server);
    std::fs::remove_file(&image).map_err(|e| format!("{}: {e}", image.display()))?;
    Ok(Written { served, bytes })
}

/// Bytes that a server has written to files so far, as the kernel counts them.
fn written_bytes(server: &Server) -> Result<u64, String> {
    let path = format!("/proc/{}/io", server.id());
    let text = std::fs::read_to_string(&path).map_err(|e| format!("{path}: {e}"))?;
    let line = text.lines().find_map(|line| line.strip_prefix("write_bytes: "));
    line.and_then(|bytes| bytes.parse().ok()).ok_or_else(|| format!("{path} has no write_bytes"))
}

/// A raw file full of bytes that aren't zero.
fn base(settings: &Settings) -> Result<PathBuf, String> {
    let path = settings.folder.join(format!("base-{DISK_MIB}.raw"));
    if path.exists() {
        return Ok(path);
    }
    let partial = path.with_extension("partial");
    let fail = |e: std::io::Error| format!("{}: {e}", partial.display());
    let file = std::fs::File::create(&partial).map_err(fail)?;
    for mib in 0..DISK_MIB {
        let bytes: Vec<u8> = (0..MIB).map(|at| (at ^ at >> 8 ^ mib) as u8 | 1).collect();
        file.write_all_at(&bytes, mib * MIB).map_err(fail)?;
    }
    file.sync_all().map_err(fail)?;
    std::fs::rename(&partial, &path).map_err(|e| format!("{}: {e}", path.display()))?;
    Ok(path)
}
