// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Writes by fio over NBD that need clusters, to our daemon and to qemu-storage-daemon. Each run gets a fresh image.
//! The bytes that the disk was given to write, up to the flush at the end, are counted.

use crate::Settings;
use crate::large::done;
use crate::memory;
use crate::nbd::{Server, written_bytes};
use crate::reads::{Access, Side, serve};
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
    /// Past the page cache.
    direct: bool,
    /// Options of the node that is served.
    node: &'static str,
    limit: Limit,
    load: &'static [&'static str],
    target: &'static str,
}

/// The measurement of a raw file to which a case is compared.
#[derive(Clone, Copy)]
enum Limit {
    None,
    /// The same load on a file with this preallocation.
    File(&'static str),
    /// The first request in a block copies all of it. The disk can't write more such blocks than under a load of
    /// nothing but whole blocks of this many KiB.
    Copies(u64),
}

/// Requests of a run: with 64 KiB clusters about every third one of the disk is hit.
const RANDOM_REQUESTS: u32 = 30_000;
const RANDOM_NUMBER: &str = "--number_ios=30000";
const RANDOM: &[&str] = &["--rw=randwrite", "--bs=4k", "--iodepth=32", RANDOM_NUMBER];
const SEQUENTIAL: &[&str] = &["--rw=write", "--bs=64k", "--iodepth=8", "--number_ios=32768"];

const fn overlay(name: &'static str, options: &'static str, limit: Limit) -> Case {
    let target = "≥ 1.5× or ≥ 0.9 of the disk's bandwidth, bytes ≤ 1";
    Case { name, options, over_backing: true, direct: false, node: "", limit, load: RANDOM, target }
}

const fn direct(name: &'static str, options: &'static str, over_backing: bool, load: &'static [&'static str]) -> Case {
    let target = if over_backing { "≥ 1.5×, CPU ≤ 0.7" } else { "≥ 1.3×" };
    Case { name, options, over_backing, direct: true, node: "", limit: Limit::None, load, target }
}

/// Without flushes.
const fn unflushed(name: &'static str, options: &'static str) -> Case {
    let (node, target) = ("cache.no-flush=on", "≥ 1.5×, CPU ≤ 0.7");
    Case { name, options, over_backing: true, direct: false, node, limit: Limit::None, load: RANDOM, target }
}

const fn alone(name: &'static str, options: &'static str, load: &'static [&'static str], target: &'static str) -> Case {
    let limit = Limit::File("preallocation=off");
    Case { name, options, over_backing: false, direct: false, node: "", limit, load, target }
}

const fn preallocated(name: &'static str, options: &'static str, limit: &'static str) -> Case {
    let target = "≥ 0.95 of the raw file";
    let limit = Limit::File(limit);
    Case { name, options, over_backing: false, direct: false, node: "", limit, load: RANDOM, target }
}

const CASES: &[Case] = &[
    overlay("overlay, 64k", "cluster_size=64k", Limit::Copies(64)),
    overlay("overlay, 128k", "cluster_size=128k", Limit::Copies(128)),
    overlay("overlay, 128k, extended_l2", "cluster_size=128k,extended_l2=on", Limit::None),
    overlay("overlay, 64k, extended_l2", "cluster_size=64k,extended_l2=on", Limit::None),
    overlay("overlay, 2M, extended_l2", "cluster_size=2M,extended_l2=on", Limit::Copies(64)),
    direct("overlay, 64k, direct", "cluster_size=64k", true, RANDOM),
    direct("overlay, 128k, extended_l2, direct", "cluster_size=128k,extended_l2=on", true, RANDOM),
    direct("overlay, 2M, extended_l2, direct", "cluster_size=2M,extended_l2=on", true, RANDOM),
    unflushed("overlay, 64k, no flush", "cluster_size=64k"),
    unflushed("overlay, 128k, extended_l2, no flush", "cluster_size=128k,extended_l2=on"),
    unflushed("overlay, 2M, extended_l2, no flush", "cluster_size=2M,extended_l2=on"),
    alone("empty image, random 4k", "cluster_size=64k", RANDOM, "≥ 1.5×"),
    alone("empty image, sequential 64k", "cluster_size=64k", SEQUENTIAL, "≥ 1.2×"),
    direct("empty image, random 4k, direct", "cluster_size=64k", false, RANDOM),
    direct("empty image, sequential 64k, direct", "cluster_size=64k", false, SEQUENTIAL),
    preallocated("preallocation=metadata, random 4k", "preallocation=metadata", "preallocation=off"),
    preallocated("preallocation=falloc, random 4k", "preallocation=falloc", "preallocation=falloc"),
    preallocated("preallocation=full, random 4k", "preallocation=full", "preallocation=full"),
];

/// Over a backing file.
pub fn overlays(settings: &Settings) -> Result<Vec<Row>, String> {
    run(settings, true)
}

/// The same load on an image without a backing file.
pub fn empty(settings: &Settings) -> Result<Vec<Row>, String> {
    run(settings, false)
}

fn run(settings: &Settings, over_backing: bool) -> Result<Vec<Row>, String> {
    let base = base(settings, DISK_MIB)?;
    let wanted = |case: &&Case| {
        case.over_backing == over_backing && settings.only.as_ref().is_none_or(|only| case.name.contains(only.as_str()))
    };
    CASES.iter().filter(wanted).map(|case| measure(settings, case, &base)).collect()
}

fn measure(settings: &Settings, case: &Case, base: &Path) -> Result<Row, String> {
    let mut sides = vec![(Side::Ours, Vec::new()), (Side::Theirs, Vec::new())];
    if !matches!(case.limit, Limit::None) {
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
    Ok(Row::new(case.name, case.target, result))
}

fn once(settings: &Settings, case: &Case, base: &Path, side: Side) -> Result<Written, String> {
    let (format, options) = match (side, case.limit) {
        (Side::Limit, Limit::File(options)) => ("raw", options),
        (Side::Limit, Limit::Copies(_)) => ("raw", "preallocation=off"),
        _ => ("qcow2", case.options),
    };
    let (load, requests_per_block) = match (side, case.limit) {
        (Side::Limit, Limit::Copies(block_kib)) => copies(block_kib),
        _ => (case.load.iter().map(|&option| option.to_owned()).collect(), 1.0),
    };
    let fresh = Fresh { format, options, base: case.over_backing.then_some(base), mib: DISK_MIB };
    let access = Access { writable: true, direct: case.direct };
    let start = |image: &Path| serve(settings, side, image, format, case.node, access);
    let mut written = written(settings, &fresh, load, &start, &|_| Ok(()))?;
    written.served.per_second *= requests_per_block;
    written.served.cpu_microseconds /= requests_per_block;
    Ok(written)
}

/// A disk that is made for one run.
pub struct Fresh<'a> {
    /// Its format.
    pub format: &'a str,
    /// The options of its creation.
    pub options: &'a str,
    /// A raw file that is in the page cache, and the backing file of a qcow2 image.
    pub base: Option<&'a Path>,
    /// Its size.
    pub mib: u64,
}

/// Makes the disk, has fio load the server that `start` makes of it, to a flush at the end, and counts the disk's
/// writes. `judge` sees the image before it goes.
pub fn written(
    settings: &Settings,
    fresh: &Fresh,
    load: Vec<String>,
    start: &dyn Fn(&Path) -> Result<Server, String>,
    judge: &dyn Fn(&Path) -> Result<(), String>,
) -> Result<Written, String> {
    let image = settings.folder.join("fresh.image");
    let mut create = Command::new(&settings.qemu);
    create.args(["create", "-q", "-f", fresh.format, "-o", fresh.options]);
    if let Some(base) = fresh.base.filter(|_| fresh.format == "qcow2") {
        create.args(["-F", "raw", "-b"]).arg(base);
    }
    done(create.arg(&image).arg(format!("{}M", fresh.mib)))?;
    // Whatever creating it wrote is on the disk: the run doesn't wait for that.
    std::fs::File::open(&image).and_then(|file| file.sync_all()).map_err(|e| format!("{}: {e}", image.display()))?;
    if let Some(base) = fresh.base {
        // Other cases may have driven it out of the page cache.
        let mut file = std::fs::File::open(base).map_err(|e| format!("{}: {e}", base.display()))?;
        std::io::copy(&mut file, &mut std::io::sink()).map_err(|e| format!("{}: {e}", base.display()))?;
    }
    // The host must not have to find the memory of the page cache first.
    memory::back(3 * fresh.mib / 2)?;
    let server = start(&image)?;
    let before = written_bytes(&image)?;
    let end = [format!("--size={}m", fresh.mib), "--end_fsync=1".to_owned()];
    let how: Vec<String> = load.into_iter().chain(end).collect();
    let served = server.load(settings, &how, None)?;
    let bytes = written_bytes(&image)? - before;
    drop(server);
    judge(&image)?;
    std::fs::remove_file(&image).map_err(|e| format!("{}: {e}", image.display()))?;
    Ok(Written { served, bytes })
}

/// The load that writes as many blocks as [`RANDOM`] hits, and how many of its requests there are to a block.
fn copies(block_kib: u64) -> (Vec<String>, f64) {
    let blocks = (DISK_MIB * 1024 / block_kib) as f64;
    let hit = blocks * (1.0 - (-f64::from(RANDOM_REQUESTS) / blocks).exp());
    let load = ["--rw=randwrite", "--iodepth=32"].map(str::to_owned).into_iter();
    let load = load.chain([format!("--bs={block_kib}k"), format!("--number_ios={hit:.0}")]).collect();
    (load, f64::from(RANDOM_REQUESTS) / hit)
}

/// A raw file full of bytes that aren't zero.
pub fn base(settings: &Settings, size_mib: u64) -> Result<PathBuf, String> {
    let path = settings.folder.join(format!("base-{size_mib}.raw"));
    if path.exists() {
        return Ok(path);
    }
    let partial = path.with_extension("partial");
    let fail = |e: std::io::Error| format!("{}: {e}", partial.display());
    let file = std::fs::File::create(&partial).map_err(fail)?;
    for mib in 0..size_mib {
        let bytes: Vec<u8> = (0..MIB).map(|at| (at ^ at >> 8 ^ mib) as u8 | 1).collect();
        file.write_all_at(&bytes, mib * MIB).map_err(fail)?;
    }
    file.sync_all().map_err(fail)?;
    std::fs::rename(&partial, &path).map_err(|e| format!("{}: {e}", path.display()))?;
    Ok(path)
}
