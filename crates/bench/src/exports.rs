// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Exports without NBD beside those of qemu-storage-daemon: a file that FUSE shows, under fio, and vhost-user-blk under
//! `bench` of QEMU's own client. Both sides have the same command line and the same client. The file is also compared
//! with that of nbdfuse over qemu-nbd, whose two processes count as one server.

use crate::Settings;
use crate::fixture;
use crate::nbd::{Served, Server};
use crate::table::{Outcome, Row};
use std::path::{Path, PathBuf};
use std::process::Command;

/// QEMU's program with the client of vhost-user-blk, beside the others (`scripts/peers`).
const CLIENT: &str = "qemu-img-vhost";
/// Requests of a run of it for each second that a run is to take, near enough.
const REQUESTS_A_SECOND: u64 = 50_000;

struct Load {
    /// fio's `rw`; the other client writes for `randwrite`, in steps over the whole disk.
    pattern: &'static str,
    block_bytes: u64,
    depth: u32,
}

const fn load(pattern: &'static str, block_bytes: u64, depth: u32) -> Load {
    Load { pattern, block_bytes, depth }
}

const LOADS: &[Load] = &[
    load("randread", 4 << 10, 1),
    load("randread", 4 << 10, 32),
    load("randwrite", 4 << 10, 32),
    load("read", 1 << 20, 8),
];

/// One of the two kinds.
#[derive(Clone, Copy)]
enum Kind {
    Fuse,
    Vhost,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Fuse => "fuse",
            Kind::Vhost => "vhost-user-blk",
        }
    }

    fn target(self) -> &'static str {
        match self {
            Kind::Fuse => "IOPS ≥ 1.2, CPU ≤ 1",
            Kind::Vhost => "IOPS ≥ 2, CPU ≤ 0.5",
        }
    }
}

/// Servers beside ours.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Peer {
    StorageDaemon,
    NbdFuse,
}

/// A server with the place of its export.
struct Side {
    server: Server,
    /// The server behind it, where it is a client itself.
    behind: Option<Server>,
    place: PathBuf,
    image: PathBuf,
}

impl Side {
    fn start(settings: &Settings, kind: Kind, name: &str, mut command: Command, source: &Path) -> Result<Side, String> {
        let at = |ending: &str| settings.folder.join(format!("{name}.{ending}"));
        let (image, place) = (at("served"), at("export"));
        std::fs::copy(source, &image).map_err(|e| format!("{}: {e}", image.display()))?;
        let node = format!("qcow2,node-name=disk,file.driver=file,file.filename={}", image.display());
        let (export, sign) = match kind {
            Kind::Fuse => {
                std::fs::write(&place, "").map_err(|e| format!("{}: {e}", place.display()))?;
                // The socket comes last, and shows that the file is there.
                (format!("fuse,id=e,node-name=disk,mountpoint={},writable=on", place.display()), at("sock"))
            }
            Kind::Vhost => {
                let address = format!("addr.type=unix,addr.path={}", place.display());
                (format!("vhost-user-blk,id=e,node-name=disk,{address},writable=on"), place.clone())
            }
        };
        command.args(["--blockdev", &node, "--export", &export]);
        if matches!(kind, Kind::Fuse) {
            command.args(["--nbd-server", &format!("addr.type=unix,addr.path={}", sign.display())]);
        }
        Ok(Side { server: Server::start(command, sign)?, behind: None, place, image })
    }

    /// nbdfuse over qemu-nbd.
    fn start_nbdfuse(settings: &Settings, source: &Path) -> Result<Side, String> {
        let at = |name: &str| settings.folder.join(name);
        let (image, socket, folder) = (at("nbdfuse.served"), at("nbdfuse.sock"), at("nbdfuse.mount"));
        std::fs::copy(source, &image).map_err(|e| format!("{}: {e}", image.display()))?;
        std::fs::create_dir_all(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
        let mut command = Command::new(settings.qemu.with_file_name("qemu-nbd"));
        command.args(["-t", "-e", "16", "-f", "qcow2", "--cache=writeback", "-k"]).args([&socket, &image]);
        let behind = Server::start(command, socket.clone())?;
        let place = folder.join("disk");
        let mut command = Command::new("nbdfuse");
        command.args(["--connections", "4"]).args([&place, Path::new("--unix"), &socket]);
        Ok(Side { server: Server::start(command, place.clone())?, behind: Some(behind), place, image })
    }

    fn run(&self, settings: &Settings, kind: Kind, load: &Load, seconds: u64) -> Result<Served, String> {
        let Some(behind) = &self.behind else { return self.run_alone(settings, kind, load, seconds) };
        let before = behind.cpu_seconds()?;
        let mut served = self.run_alone(settings, kind, load, seconds)?;
        served.cpu_microseconds += (behind.cpu_seconds()? - before) * 1e6 / served.operations;
        Ok(served)
    }

    fn run_alone(&self, settings: &Settings, kind: Kind, load: &Load, seconds: u64) -> Result<Served, String> {
        let writes = load.pattern.ends_with("write");
        let written = writes.then_some(self.image.as_path());
        match kind {
            Kind::Fuse => {
                let target = ["--ioengine=libaio", "--direct=1", &format!("--filename={}", self.place.display())];
                let how = [
                    "--time_based".to_owned(),
                    format!("--runtime={seconds}"),
                    format!("--rw={}", load.pattern),
                    format!("--bs={}", load.block_bytes),
                    format!("--iodepth={}", load.depth),
                    format!("--size={}m", settings.size_mib / 8),
                ];
                self.server.load_on(settings, &target, &how, written)
            }
            Kind::Vhost => {
                let count = (REQUESTS_A_SECOND * seconds * (4 << 10) / load.block_bytes).max(100);
                // Steps that reach each block of the disk, and none twice in a row.
                let step = if load.pattern.starts_with("rand") { 4097 * load.block_bytes } else { load.block_bytes };
                let mut client = Command::new(settings.qemu.with_file_name(CLIENT));
                client.arg("bench").args(["-c", &count.to_string(), "-d", &load.depth.to_string()]);
                client.args(["-s", &load.block_bytes.to_string(), "-S", &step.to_string(), "-t", "none"]);
                client.args(writes.then_some("-w")).arg("--image-opts");
                client.arg(format!("driver=virtio-blk-vhost-user,path={},cache.direct=on", self.place.display()));
                self.server.measure(written, || {
                    let output = client.output().map_err(|e| format!("could not run {CLIENT}: {e}"))?;
                    let said = String::from_utf8_lossy(&output.stdout).into_owned();
                    let seconds = said.split("completed in ").nth(1).and_then(|rest| rest.split(' ').next());
                    let seconds =
                        seconds.and_then(|seconds| seconds.parse::<f64>().ok()).filter(|seconds| *seconds > 0.0);
                    let seconds = seconds.filter(|_| output.status.success());
                    let failed = || format!("{CLIENT} failed: {said}{}", String::from_utf8_lossy(&output.stderr));
                    seconds.map(|seconds| (count as f64, count as f64 / seconds)).ok_or_else(failed)
                })
            }
        }
    }
}

/// A file that FUSE shows.
pub fn fuse(settings: &Settings) -> Result<Vec<Row>, String> {
    let mut rows = side_by_side(settings, Kind::Fuse, Peer::StorageDaemon)?;
    rows.extend(side_by_side(settings, Kind::Fuse, Peer::NbdFuse)?);
    Ok(rows)
}

/// vhost-user-blk.
pub fn vhost(settings: &Settings) -> Result<Vec<Row>, String> {
    side_by_side(settings, Kind::Vhost, Peer::StorageDaemon)
}

fn side_by_side(settings: &Settings, kind: Kind, peer: Peer) -> Result<Vec<Row>, String> {
    let source = fixture::converted(settings, &fixture::full(settings)?, "allocated", &["-S", "0"])?;
    let mut command = Command::new(&settings.cowshed);
    command.arg("qemu-storage-daemon");
    let ours = Side::start(settings, kind, "ours", command, &source)?;
    let theirs = match peer {
        Peer::StorageDaemon => {
            let command = Command::new(settings.qemu.with_file_name("qemu-storage-daemon"));
            Side::start(settings, kind, "theirs", command, &source)?
        }
        Peer::NbdFuse => Side::start_nbdfuse(settings, &source)?,
    };
    let beside = if peer == Peer::NbdFuse { " beside nbdfuse" } else { "" };
    let sides = [&ours, &theirs];
    let mut rows = Vec::new();
    for load in LOADS {
        let Load { pattern, block_bytes, depth } = load;
        let name = format!("{} cached{beside}: {pattern} {}k, depth {depth}", kind.name(), block_bytes >> 10);
        if settings.only.as_ref().is_some_and(|only| !name.contains(only.as_str())) {
            continue;
        }
        let mut runs = [Vec::new(), Vec::new()];
        for side in sides {
            side.run(settings, kind, load, 1)?;
        }
        for round in 0..settings.rounds {
            for turn in 0..sides.len() {
                let side = (round + turn) % sides.len();
                runs[side].push(sides[side].run(settings, kind, load, settings.seconds)?);
            }
        }
        let [ours, theirs] = runs;
        rows.push(Row::new(name, kind.target(), Outcome::Served { ours, theirs, bare: None }));
    }
    let files = [&ours, &theirs].map(|side| [side.image.clone(), side.place.clone()]);
    drop((ours, theirs));
    for file in files.iter().flatten() {
        // A socket goes with its server.
        let _ = std::fs::remove_file(file);
    }
    Ok(rows)
}
