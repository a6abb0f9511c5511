// SPDX-License-Identifier: Apache-2.0 OR MIT
//! vhost-user-blk under a driver of our own: one queue and two, the page cache and past it, and writes that allocate.

use crate::Settings;
use crate::bare_vhost;
use crate::driver::{self, DEPTH, Kind};
use crate::fixture;
use crate::nbd::{Served, Server};
use crate::random_io::cpu_nanoseconds;
use crate::table::{Outcome, Row};
use cowshed_storage::{CacheMode, File, IoBuf, OpenOptions, rt};
use cowshed_testkit::random::Random;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

const BLOCK_BYTES: u64 = 4096;
const ALLOCATING: &str = "vhost-user-blk cached: random 4k writes to an empty image";

/// A server with one disk of `bytes` bytes in a qcow2 image.
struct Disk {
    server: Server,
    socket: PathBuf,
    image: PathBuf,
    bytes: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Program {
    Ours,
    Theirs,
}

/// The measured combinations of a server and queues, in turns.
#[derive(Clone, Copy)]
enum Turn {
    Ours,
    Theirs,
    OursWithTwo,
    Bare,
}

impl Disk {
    fn start(settings: &Settings, program: Program, image: &Path, bytes: u64, direct: bool) -> Result<Disk, String> {
        let (mut command, name) = match program {
            Program::Ours => {
                let mut command = Command::new(&settings.cowshed);
                command.arg("qemu-storage-daemon");
                (command, "ours-driver.sock")
            }
            Program::Theirs => {
                (Command::new(settings.qemu.with_file_name("qemu-storage-daemon")), "theirs-driver.sock")
            }
        };
        let socket = settings.folder.join(name);
        let (cache, aio) = if direct { ("on", ",aio=io_uring") } else { ("off", "") };
        let file = format!("file,node-name=f,filename={},cache.direct={cache}{aio}", image.display());
        let node = format!("qcow2,node-name=disk,file=f,cache.direct={cache}");
        let export = format!(
            "vhost-user-blk,id=e,node-name=disk,addr.type=unix,addr.path={},writable=on,num-queues=2",
            socket.display()
        );
        command.args(["--blockdev", &file, "--blockdev", &node, "--export", &export]);
        Ok(Disk { server: Server::start(command, socket.clone())?, socket, image: image.to_owned(), bytes })
    }

    /// The bare server with a raw file.
    fn start_bare(settings: &Settings, raw: &Path, bytes: u64, direct: bool) -> Result<Disk, String> {
        let socket = settings.folder.join("bare-driver.sock");
        let command = bare_vhost::command(&socket, raw, direct)?;
        Ok(Disk { server: Server::start(command, socket.clone())?, socket, image: raw.to_owned(), bytes })
    }

    fn run(&self, settings: &Settings, kind: Kind, queues: usize) -> Result<Served, String> {
        let written = (kind == Kind::Write).then_some(self.image.as_path());
        let time = Duration::from_secs(settings.seconds);
        self.server.measure(written, || driver::drive(&self.socket, self.bytes, kind, queues, time))
    }
}

/// All of it.
pub fn run(settings: &Settings) -> Result<Vec<Row>, String> {
    let raw = fixture::full(settings)?;
    let source = fixture::converted(settings, &raw, "allocated", &["-S", "0"])?;
    let copies = ["ours-driver.served", "theirs-driver.served"].map(|name| settings.folder.join(name));
    for copy in &copies {
        std::fs::copy(&source, copy).map_err(|e| format!("{}: {e}", copy.display()))?;
    }
    let mut rows = Vec::new();
    for direct in [false, true] {
        rows.extend(reads(settings, &copies, &raw, direct)?);
    }
    if is_wanted(settings, ALLOCATING) {
        rows.push(allocating(settings)?);
    }
    for copy in &copies {
        let _ = std::fs::remove_file(copy);
    }
    Ok(rows)
}

fn is_wanted(settings: &Settings, name: &str) -> bool {
    settings.only.as_ref().is_none_or(|only| name.contains(only.as_str()))
}

/// Reads in turns: with one queue of each program and of the bare server, and with two of ours. Past the page cache fio reads the raw
/// file, too.
fn reads(settings: &Settings, images: &[PathBuf; 2], raw: &Path, direct: bool) -> Result<Vec<Row>, String> {
    let how = if direct { "past the page cache" } else { "cached" };
    let name = format!("vhost-user-blk {how}: random 4k reads, depth {DEPTH}");
    if !is_wanted(settings, &name) {
        return Ok(Vec::new());
    }
    let bytes = raw.metadata().map_err(|e| format!("{}: {e}", raw.display()))?.len();
    let ours = Disk::start(settings, Program::Ours, &images[0], bytes, direct)?;
    let theirs = Disk::start(settings, Program::Theirs, &images[1], bytes, direct)?;
    let bare = Disk::start_bare(settings, raw, bytes, direct)?;
    let turns = [Turn::Ours, Turn::Theirs, Turn::OursWithTwo, Turn::Bare];
    let mut runs = turns.map(|_| Vec::new());
    let (mut limit, mut rings, mut driver_microseconds) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..settings.rounds {
        for number in 0..turns.len() {
            let number = (round + number) % turns.len();
            let before = cpu_nanoseconds();
            let (disk, queues) = match turns[number] {
                Turn::Ours => (&ours, 1),
                Turn::Theirs => (&theirs, 1),
                Turn::OursWithTwo => (&ours, 2),
                Turn::Bare => (&bare, 1),
            };
            let run = disk.run(settings, Kind::Read, queues)?;
            if let Turn::Ours = turns[number] {
                driver_microseconds.push((cpu_nanoseconds() - before) as f64 / 1e3 / run.operations);
            }
            runs[number].push(run);
        }
        rings.push(ring(settings, raw, direct)?);
        if direct {
            limit.push(fio(settings, raw)?);
        }
    }
    let [ours, theirs, two, bare] = runs;
    let rate = |runs: &[Served]| runs.iter().map(|run| run.per_second).collect::<Vec<_>>();
    let scaling = Outcome::Scaling { one: rate(&ours), two: rate(&two) };
    let bounds = Outcome::Bounds { ours: ours.clone(), bare, ring: rings, driver_microseconds };
    let (target, outcome) = if direct {
        let target = "≥ 0.95 of fio's io_uring on the raw file";
        (target, Outcome::Beside { ours, theirs, limit: Some(limit) })
    } else {
        ("IOPS ≥ 2, CPU ≤ 0.5", Outcome::Served { ours, theirs, bare: None })
    };
    Ok(vec![
        Row::new(name.clone(), target, outcome),
        Row::new(format!("{name}, one and two queues"), "≥ 1.8×", scaling),
        Row::new(format!("{name}, a bare ring and a bare server on the raw file"), "CPU ≤ 1.5×", bounds),
    ])
}

/// The same reads of a file through a ring in this program, without a device or another process: the least that they can cost.
fn ring(settings: &Settings, path: &Path, direct: bool) -> Result<Served, String> {
    let cache = CacheMode { direct, no_flush: false };
    let file = File::open(path, &OpenOptions { cache, ..OpenOptions::default() }).map_err(|e| e.to_string())?;
    let blocks = file.len() / BLOCK_BYTES;
    let (started, before) = (Instant::now(), cpu_nanoseconds());
    let end = started + Duration::from_secs(settings.seconds);
    let operations = rt::block_on(async {
        let tasks: Vec<_> =
            (0..u64::from(DEPTH)).map(|task| rt::spawn(stream(file.clone(), blocks, task, end))).collect();
        let mut operations = 0.0;
        for task in tasks {
            operations += task.await?;
        }
        Ok::<f64, cowshed_types::Error>(operations)
    })
    .map_err(|e| e.to_string())?;
    let cpu_microseconds = (cpu_nanoseconds() - before) as f64 / 1e3 / operations;
    let per_second = operations / started.elapsed().as_secs_f64();
    Ok(Served { per_second, cpu_microseconds, peak_bytes: 0, written_bytes: None, operations })
}

/// One read after the other until `end`: their number.
async fn stream(file: File, blocks: u64, seed: u64, end: Instant) -> cowshed_types::Result<f64> {
    let mut random = Random::new(seed);
    let mut buffer = IoBuf::zeroed(BLOCK_BYTES as usize);
    let mut operations = 0.0;
    while Instant::now() < end {
        let (result, returned) = file.read_at(buffer, random.below(blocks) * BLOCK_BYTES).await;
        buffer = returned;
        result?;
        operations += 1.0;
    }
    Ok(operations)
}

/// Reads of a file by fio through io_uring, without a server: only its rate counts.
fn fio(settings: &Settings, file: &Path) -> Result<Served, String> {
    let mut fio = Command::new("fio");
    fio.args(["--name=limit", "--thread", "--ioengine=io_uring", "--direct=1", "--rw=randread", "--bs=4k"]);
    fio.args(["--norandommap", "--randrepeat=0", "--time_based", "--output-format=json"]);
    fio.arg(format!("--iodepth={DEPTH}")).arg(format!("--runtime={}", settings.seconds));
    fio.arg(format!("--filename={}", file.display()));
    let output = fio.output().map_err(|e| format!("could not run fio: {e}"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let report = text.find('{').and_then(|start| serde_json::from_str::<Value>(&text[start..]).ok());
    let read = report.as_ref().map(|report| &report["jobs"][0]["read"]);
    let figure = |key: &str| read.and_then(|read| read[key].as_f64());
    let (Some(per_second), Some(operations)) = (figure("iops"), figure("total_ios")) else {
        return Err(format!("fio failed: {}{text}", String::from_utf8_lossy(&output.stderr)));
    };
    Ok(Served { per_second, cpu_microseconds: 0.0, peak_bytes: 0, written_bytes: None, operations })
}

/// Writes to a new image in each run.
fn allocating(settings: &Settings) -> Result<Row, String> {
    let name = format!("{ALLOCATING}, depth {DEPTH}");
    // A file of a million extents takes minutes to remove, so the disk is not larger.
    let bytes = (settings.size_mib << 20) / 2;
    let mut runs = [Vec::new(), Vec::new()];
    for round in 0..settings.rounds {
        for turn in 0..2 {
            let side = (round + turn) % 2;
            let image = settings.folder.join("driver-new.qcow2");
            let _ = std::fs::remove_file(&image);
            let mut create = Command::new(&settings.qemu);
            create.args(["create", "-q", "-f", "qcow2"]).arg(&image).arg(bytes.to_string());
            let status = create.status().map_err(|e| format!("could not run qemu-img: {e}"))?;
            if !status.success() {
                return Err(format!("{create:?}: {status}"));
            }
            let program = [Program::Ours, Program::Theirs][side];
            let disk = Disk::start(settings, program, &image, bytes, false)?;
            runs[side].push(disk.run(settings, Kind::Write, 1)?);
            drop(disk);
            let _ = std::fs::remove_file(&image);
        }
    }
    let [ours, theirs] = runs;
    Ok(Row::new(name, "as over NBD or better", Outcome::Served { ours, theirs, bare: None }))
}
