// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The cost of opening: with nothing in the page cache, many images at once, and memory of many overlays of one base.

use crate::Settings;
use crate::measure::alternate;
use crate::nbd::{Server, resident_bytes};
use crate::reads::{chain, mapped};
use crate::table::{Outcome, Row};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

const GIB: u64 = 1 << 30;
const DEPTH: u64 = 64;
/// Images that are opened at the same time.
const AT_ONCE: usize = 20;
/// Overlays of one base.
const OVERLAYS: usize = 50;

/// Writes everything back and empties the page cache. Needs root.
fn drop_caches() -> Result<(), String> {
    rustix::fs::sync();
    let path = "/proc/sys/vm/drop_caches";
    std::fs::write(path, "3").map_err(|e| format!("{path}: {e} (root alone may empty the page cache)"))
}

/// `info`, a first read through a deep chain, and many images at once, each with an empty page cache.
pub fn cold(settings: &Settings) -> Result<Vec<Row>, String> {
    let top = chain(settings, DEPTH)?;
    let large = mapped(settings, "mapped-2t", "cluster_size=2M", 2048 * GIB)?;
    let output = settings.folder.join("first-read.out");
    let info = |program: &Path| {
        let mut command = Command::new(program);
        command.args(["info", "--backing-chain", "-f", "qcow2"]).arg(&top);
        Ok(command)
    };
    let first_read = |program: &Path| {
        let mut command = Command::new(program);
        let operand = |name: &str, path: &Path| format!("{name}={}", path.display());
        command.args(["dd", "-f", "qcow2", "-O", "raw", "bs=4096", "count=1"]);
        command.args([operand("if", &top), operand("of", &output)]);
        Ok(command)
    };
    let many = |program: &Path| {
        let one = format!("{} info -U -f qcow2 {} > /dev/null &", program.display(), large.display());
        let mut command = Command::new("sh");
        command.args(["-c", &format!("{} wait", one.repeat(AT_ONCE))]);
        Ok(command)
    };
    type Recipe<'a> = &'a dyn Fn(&Path) -> Result<Command, String>;
    let cases: [(String, Recipe<'_>); 3] = [
        (format!("cold: info on a chain of {DEPTH}"), &info),
        (format!("cold: first read through a chain of {DEPTH}"), &first_read),
        (format!("cold: info on 2 TiB, {AT_ONCE} at once"), &many),
    ];
    let folder = top.parent().unwrap_or(&settings.folder);
    let mut images: Vec<PathBuf> = (0..DEPTH).map(|layer| folder.join(format!("{layer}.qcow2"))).collect();
    images.push(large.clone());
    let mut rows = Vec::new();
    for (name, recipe) in cases {
        let fresh = |program: &Path| {
            drop_caches()?;
            recipe(program)
        };
        let pairs = alternate(settings.rounds, &|| fresh(&settings.cowshed), &|| fresh(&settings.qemu))?;
        // In runs of their own: a traced program is slow.
        let count = |program: &Path| fresh(program).and_then(|command| reads(settings, &command, &images));
        let reads = match has_strace() {
            true => Ok((count(&settings.cowshed)?, count(&settings.qemu)?)),
            false => Err("not counted: no strace"),
        };
        rows.push(Row::new(name, "report", Outcome::Opened { pairs, reads }));
    }
    let _ = std::fs::remove_file(&output);
    Ok(rows)
}

fn has_strace() -> bool {
    Command::new("strace").arg("-V").output().is_ok_and(|output| output.status.success())
}

/// The number of reads by a command, with all processes that it starts, from one of the images. Reads are system calls
/// then, on both sides; one that only asks whether the page cache has it, and fails, doesn't count.
fn reads(settings: &Settings, command: &Command, images: &[PathBuf]) -> Result<u64, String> {
    let report = settings.folder.join("strace.out");
    let mut strace = Command::new("strace");
    strace.args(["-f", "-c", "-e", "trace=read,readv,pread64,preadv,preadv2", "-o"]).arg(&report);
    for image in images {
        strace.arg("-P").arg(image);
    }
    strace.arg("--").arg(command.get_program()).args(command.get_args()).env("COWSHED_IO_ENGINE", "threads");
    let output = strace.output().map_err(|e| format!("could not run {strace:?}: {e}"))?;
    if !output.status.success() {
        return Err(format!("{command:?} under strace: {}", String::from_utf8_lossy(&output.stderr).trim()));
    }
    let text = std::fs::read_to_string(&report).map_err(|e| format!("{}: {e}", report.display()))?;
    let _ = std::fs::remove_file(&report);
    total(&text).ok_or_else(|| format!("strace counted in a way that isn't understood: {text}"))
}

/// Calls that succeeded, of strace's summary: `% time, seconds, usecs/call, calls[, errors], syscall`. A summary without calls
/// has no lines.
fn total(summary: &str) -> Option<u64> {
    let mut sum = 0;
    for line in summary.lines() {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let is_call = fields.first().is_some_and(|first| first.parse::<f64>().is_ok());
        if !is_call || fields.last() == Some(&"total") {
            continue;
        }
        let number = |index: usize| fields.get(index).and_then(|field| field.parse::<u64>().ok());
        let errors = if fields.len() > 5 { number(4)? } else { 0 };
        sum += number(3)?.checked_sub(errors)?;
    }
    Some(sum)
}

/// Memory of a daemon for each further overlay of one base, after all of them were read from end to end of the disk.
pub fn overlays(settings: &Settings) -> Result<Vec<Row>, String> {
    let base = mapped(settings, "mapped-20g", "cluster_size=64k", 20 * GIB)?;
    let folder = settings.folder.join("overlays");
    std::fs::create_dir_all(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    for index in 0..=OVERLAYS {
        let mut create = Command::new(&settings.qemu);
        create.args(["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b"]).arg(&base);
        let created = create.arg(folder.join(format!("{index}.qcow2"))).status();
        if !created.is_ok_and(|status| status.success()) {
            return Err(format!("could not create overlay {index}"));
        }
    }
    let resident = |command: Command, count: usize| -> Result<u64, String> {
        let images: Vec<PathBuf> = (0..count).map(|index| folder.join(format!("{index}.qcow2"))).collect();
        // A little of every part of the disk that has an L2 table of its own.
        let server = serve_touched(settings, command, &images, 256, 20 * 1024)?;
        resident_bytes(server.id())
    };
    let growth = |program: &dyn Fn() -> Command| -> Result<u64, String> {
        let (one, all) = (resident(program(), 1)?, resident(program(), 1 + OVERLAYS)?);
        Ok(all.saturating_sub(one) / OVERLAYS as u64)
    };
    let our_bytes = growth(&|| {
        let mut command = Command::new(&settings.cowshed);
        command.arg("qemu-storage-daemon");
        command
    })?;
    let their_bytes = growth(&|| Command::new(settings.qemu.with_file_name("qemu-storage-daemon")))?;
    std::fs::remove_dir_all(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let name = format!("each of {OVERLAYS} further overlays of one base, all read");
    Ok(vec![Row::new(name, "< 0.25 MiB", Outcome::Memory { our_bytes, their_bytes })])
}

/// A daemon with many writable images, of which each was read a little every `step_mib` of its `size_mib`. `command` lacks
/// nothing but the images.
pub fn serve_touched(
    settings: &Settings,
    mut command: Command,
    images: &[PathBuf],
    step_mib: usize,
    size_mib: usize,
) -> Result<Server, String> {
    let socket = settings.folder.join("overlays.sock");
    for (index, image) in images.iter().enumerate() {
        let options = format!("qcow2,node-name=d{index},file.driver=file,file.filename={}", image.display());
        command.args(["--blockdev", &options]);
    }
    command.args(["--nbd-server", &format!("addr.type=unix,addr.path={}", socket.display())]);
    for index in 0..images.len() {
        command.args(["--export", &format!("nbd,id=e{index},node-name=d{index},writable=on")]);
    }
    let server = Server::start(command, socket.clone())?;
    for index in 0..images.len() {
        let uri = format!("nbd+unix:///d{index}?socket={}", socket.display());
        touch(settings, &uri, step_mib, size_mib)?;
    }
    Ok(server)
}

fn touch(settings: &Settings, uri: &str, step_mib: usize, size_mib: usize) -> Result<(), String> {
    let started = Instant::now();
    loop {
        let mut command = Command::new(settings.qemu.with_file_name("qemu-io"));
        command.args(["-r", "-f", "raw"]);
        for at in (0..size_mib).step_by(step_mib) {
            command.args(["-c", &format!("read -q {at}M 4k")]);
        }
        // The socket is there before the exports are.
        if command.arg(uri).output().is_ok_and(|output| output.status.success()) {
            return Ok(());
        }
        if started.elapsed() > Duration::from_secs(60) {
            return Err(format!("{uri} can't be read"));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_that_failed_are_not_counted() {
        let summary = "\
% time     seconds  usecs/call     calls    errors syscall
------ ----------- ----------- --------- --------- ----------------
 60.00    0.000120           1       100        60 preadv2
 40.00    0.000080           2        40           pread64
------ ----------- ----------- --------- --------- ----------------
100.00    0.000200           1       140        60 total
";
        assert_eq!(total(summary), Some(80));
        assert_eq!(total(""), Some(0));
        assert_eq!(total(" 60.00 0.1 1 many preadv2"), None);
    }
}
