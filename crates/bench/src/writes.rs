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
    /// The raw file to compare with has this preallocation; none: it isn't compared.
    limit: Option<&'static str>,
    load: &'static [&'static str],
    target: &'static str,
}

/// Requests of a run: with 64 KiB clusters about every third one of the disk is hit.
const RANDOM: &[&str] = &["--rw=randwrite", "--bs=4k", "--iodepth=32", "--number_ios=30000"];
const SEQUENTIAL: &[&str] = &["--rw=write", "--bs=64k", "--iodepth=8", "--number_ios=32768"];

const fn overlay(name: &'static str, options: &'static str) -> Case {
    Case { name, options, over_backing: true, limit: None, load: RANDOM, target: "≥ 1.5×, bytes ≤ 1" }
}

const fn alone(name: &'static str, options: &'static str, load: &'static [&'static str], target: &'static str) -> Case {
    Case { name, options, over_backing: false, limit: None, load, target }
}

const fn preallocated(name: &'static str, options: &'static str, limit: &'static str) -> Case {
    let target = "≥ 0.95 of the raw file";
    Case { name, options, over_backing: false, limit: Some(limit), load: RANDOM, target }
}

const CASES: &[Case] = &[
    overlay("overlay, 64k", "cluster_size=64k"),
    overlay("overlay, 128k", "cluster_size=128k"),
    overlay("overlay, 128k, extended_l2", "cluster_size=128k,extended_l2=on"),
    overlay("overlay, 64k, extended_l2", "cluster_size=64k,extended_l2=on"),
    overlay("overlay, 2M, extended_l2", "cluster_size=2M,extended_l2=on"),
    alone("empty image, random 4k", "cluster_size=64k", RANDOM, "≥ 1.5×"),
    alone("empty image, sequential 64k", "cluster_size=64k", SEQUENTIAL, "≥ 1.2×"),
    preallocated("preallocation=metadata, random 4k", "preallocation=metadata", "preallocation=off"),
    preallocated("preallocation=falloc, random 4k", "preallocation=falloc", "preallocation=falloc"),
    preallocated("preallocation=full, random 4k", "preallocation=full", "preallocation=full"),
];

/// Over a backing file.
pub fn overlays(settings: &Settings) -> Result<Vec<Row>, String> {
    run(settings, true)
}

/// Without one.
pub fn empty(settings: &Settings) -> Result<Vec<Row>, String> {
    run(settings, false)
}

fn run(settings: &Settings, over_backing: bool) -> Result<Vec<Row>, String> {
    let base = base(settings)?;
    let wanted = |case: &&Case| {
        case.over_backing == over_backing && settings.only.as_ref().is_none_or(|only| case.name.contains(only.as_str()))
    };
    CASES.iter().filter(wanted).map(|case| measure(settings, case, &base)).collect()
}

fn measure(settings: &Settings, case: &Case, base: &Path) -> Result<Row, String> {
    let mut sides = vec![(Side::Ours, Vec::new()), (Side::Theirs, Vec::new())];
    if case.limit.is_some() {
        sides.push((Side::Limit, Vec::new()));
    }
    for round in 0..settings.rounds {
        for turn in 0..sides.len() {
            let index = (round + turn) % sides.len();
            let (side, runs) = &mut sides[index];
            runs.push(once(settings, case, base, *side)?);
        }
    }
    let mut runs = sides.into_iter().map(|(_, runs)| runs);
    let (ours, theirs) = (runs.next().unwrap_or_default(), runs.next().unwrap_or_default());
    let result = Outcome::Written { ours, theirs, limit: runs.next() };
    Ok(Row { name: case.name.to_owned(), target: case.target, result })
}

fn once(settings: &Settings, case: &Case, base: &Path, side: Side) -> Result<Written, String> {
    let image = settings.folder.join("fresh.image");
    let (format, options) = match (side, case.limit) {
        (Side::Limit, Some(options)) => ("raw", options),
        _ => ("qcow2", case.options),
    };
    let mut create = Command::new(&settings.qemu);
    create.args(["create", "-q", "-f", format, "-o", options]);
    if case.over_backing {
        create.args(["-F", "raw", "-b"]).arg(base);
    }
    let output = create.arg(&image).arg(format!("{DISK_MIB}M")).output().map_err(|e| e.to_string())?;
    if !output.status.success() {
        return Err(format!("{create:?}: {}", String::from_utf8_lossy(&output.stderr).trim()));
    }
    // Whatever creating it wrote is on the disk: the run doesn't wait for that.
    std::fs::File::open(&image).and_then(|file| file.sync_all()).map_err(|e| format!("{}: {e}", image.display()))?;
    let server = serve(settings, side, &image, format, "", true)?;
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
