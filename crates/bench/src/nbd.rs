// SPDX-License-Identifier: Apache-2.0 OR MIT
//! NBD servers side by side under the load of fio: operations per second, and CPU time of the server for each.

use crate::Settings;
use crate::bare;
use crate::fixture;
use crate::table::{Outcome, Row};
use serde_json::Value;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The load that fio puts on a server.
struct Load {
    pattern: &'static str,
    block: &'static str,
    depth: u32,
    connections: u32,
    target: &'static str,
}

const fn load(pattern: &'static str, block: &'static str, depth: u32, connections: u32, target: &'static str) -> Load {
    Load { pattern, block, depth, connections, target }
}

/// CPU per request against theirs; operations per second against theirs.
const LOADS: &[Load] = &[
    load("randread", "4k", 1, 1, "CPU ≤ 0.5, IOPS ≥ 1"),
    load("randread", "4k", 1, 4, "CPU ≤ 0.5, IOPS ≥ 1"),
    load("randread", "4k", 32, 1, "CPU ≤ 0.5, IOPS ≥ 1.3"),
    load("randread", "4k", 32, 4, "CPU ≤ 0.5"),
    load("randwrite", "4k", 1, 1, "CPU ≤ 0.5, IOPS ≥ 1"),
    load("randwrite", "4k", 1, 4, "CPU ≤ 0.5, IOPS ≥ 1"),
    load("randwrite", "4k", 32, 1, "CPU ≤ 0.5, IOPS ≥ 1.3"),
    load("randwrite", "4k", 32, 4, "CPU ≤ 0.5"),
    load("read", "64k", 8, 1, "CPU ≤ 0.5"),
    load("read", "256k", 8, 1, "CPU ≤ 0.5"),
    load("read", "1m", 8, 1, "CPU ≤ 0.5"),
    load("write", "64k", 8, 1, "CPU ≤ 0.5"),
    load("write", "256k", 8, 1, "CPU ≤ 0.5"),
    load("write", "1m", 8, 1, "CPU ≤ 0.5"),
];

/// The measurements of one run of a load on a server.
#[derive(Clone, Copy, Debug)]
pub struct Served {
    /// Operations per second.
    pub per_second: f64,
    /// User and system time of the server for each operation, in microseconds.
    pub cpu_microseconds: f64,
    /// Peak resident memory of the server during the run, in bytes.
    pub peak_bytes: u64,
    /// The bytes that the disk was given to write for each operation, up to a sync after the run; `None` without
    /// writes.
    pub written_bytes: Option<f64>,
    /// Operations of the run.
    pub operations: f64,
}

/// The programs that are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Program {
    Nbd,
    StorageDaemon,
}

impl Program {
    fn name(self) -> &'static str {
        match self {
            Program::Nbd => "qemu-nbd",
            Program::StorageDaemon => "qemu-storage-daemon",
        }
    }

    /// The same command line for both sides.
    fn arguments(self, image: &Path, socket: &Path, direct: bool) -> Vec<String> {
        let (image, socket) = (image.display(), socket.display());
        let cache = if direct { "on" } else { "off" };
        let aio = if direct { ",aio=native" } else { "" };
        // QEMU's `native` is for direct I/O only; without it each side has its default: threads there, io_uring here.
        let text = match self {
            Program::Nbd => {
                let options = if direct { "--cache=none --aio=native" } else { "--cache=writeback" };
                format!("-t -e 16 -f qcow2 {options} -x disk -k {socket} {image}")
            }
            Program::StorageDaemon => format!(
                "--blockdev file,node-name=f,filename={image},cache.direct={cache}{aio} \
                 --blockdev qcow2,node-name=disk,file=f,cache.direct={cache} \
                 --nbd-server addr.type=unix,addr.path={socket} --export nbd,id=e,node-name=disk,writable=on"
            ),
        };
        text.split_whitespace().map(str::to_owned).collect()
    }
}

/// A server, ended when dropped.
pub struct Server {
    child: Child,
    socket: PathBuf,
}

impl Server {
    /// Starts it and waits for its socket.
    pub fn start(mut command: Command, socket: PathBuf) -> Result<Server, String> {
        // A socket that a killed run has left would look like a server.
        let _ = std::fs::remove_file(&socket);
        let text = format!("{command:?}");
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let child = command.spawn().map_err(|e| format!("could not run {text}: {e}"))?;
        let mut server = Server { child, socket };
        let started = Instant::now();
        while !server.socket.exists() {
            if let Ok(Some(status)) = server.child.try_wait() {
                return Err(format!("{text}: {status}"));
            }
            if started.elapsed() > Duration::from_secs(60) {
                return Err(format!("{text}: no socket after a minute"));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(server)
    }

    /// User and system time so far, in seconds; the kernel counts in ticks of 10 ms.
    pub fn cpu_seconds(&self) -> Result<f64, String> {
        let path = format!("/proc/{}/stat", self.child.id());
        let stat = std::fs::read_to_string(&path).map_err(|e| format!("{path}: {e}"))?;
        // The second field is a name in parentheses, which may hold blanks.
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
        let ticks = |index: usize| fields.get(index).and_then(|text| text.parse::<u64>().ok());
        let (Some(user), Some(system)) = (ticks(11), ticks(12)) else { return Err(format!("{path}: {stat}")) };
        Ok((user + system) as f64 / rustix::param::clock_ticks_per_second() as f64)
    }

    fn run(&self, settings: &Settings, load: &Load, image: &Path, seconds: u64) -> Result<Served, String> {
        let how = [
            "--time_based".to_owned(),
            format!("--runtime={seconds}"),
            format!("--rw={}", load.pattern),
            format!("--bs={}", load.block),
            format!("--iodepth={}", load.depth),
            format!("--numjobs={}", load.connections),
            format!("--size={}m", settings.size_mib / 8),
        ];
        self.load(settings, &how, load.pattern.ends_with("write").then_some(image))
    }

    /// Its process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Has fio load its export "disk". Where `written` names the image, the writes of the disk below for it are
    /// counted.
    pub fn load(&self, settings: &Settings, how: &[String], written: Option<&Path>) -> Result<Served, String> {
        let uri = format!("--uri=nbd+unix:///disk?socket={}", self.socket.display());
        self.load_on(settings, &["--ioengine=nbd", &uri], how, written)
    }

    /// The same for another `target`, the options by which fio reaches it.
    pub fn load_on(
        &self,
        settings: &Settings,
        target: &[&str],
        how: &[String],
        written: Option<&Path>,
    ) -> Result<Served, String> {
        let output = settings.folder.join("fio.json");
        let mut fio = Command::new("fio");
        fio.args(["--name=load", "--thread", "--group_reporting"]).args(target);
        fio.args(["--norandommap", "--randrepeat=0", "--refill_buffers=0", "--output-format=json"]);
        fio.args(how).arg(format!("--output={}", output.display()));
        self.measure(written, || {
            let run = fio.output().map_err(|e| format!("could not run fio: {e}"))?;
            let text = std::fs::read_to_string(&output).map_err(|e| format!("{}: {e}", output.display()))?;
            let report = text.find('{').and_then(|start| serde_json::from_str::<Value>(&text[start..]).ok());
            let job = report.as_ref().map(|report| &report["jobs"][0]).filter(|job| job["error"] == 0);
            let Some(job) = job.filter(|_| run.status.success()) else {
                return Err(format!("fio failed: {}{text}", String::from_utf8_lossy(&run.stderr)));
            };
            let sum =
                |key: &str| ["read", "write", "trim"].iter().filter_map(|kind| job[kind][key].as_f64()).sum::<f64>();
            Ok((sum("total_ios"), sum("iops")))
        })
    }

    /// Measures the cost of a client's run for the server. The client returns its operations, and the number of them
    /// that it has done a second.
    pub fn measure(
        &self,
        written: Option<&Path>,
        client: impl FnOnce() -> Result<(f64, f64), String>,
    ) -> Result<Served, String> {
        let synced = |image: &Path| {
            let synced = std::fs::File::open(image).and_then(|file| file.sync_all());
            synced.map_err(|e| format!("{}: {e}", image.display())).and_then(|()| written_bytes(image))
        };
        let already = written.map(synced).transpose()?;
        // The peak begins anew; a kernel that can't do that reports the one since the start.
        let _ = std::fs::write(format!("/proc/{}/clear_refs", self.child.id()), "5");
        let before = self.cpu_seconds()?;
        let (operations, per_second) = client()?;
        let cpu_seconds = self.cpu_seconds()? - before;
        let peak_bytes = memory_of(self.child.id(), "VmHWM:")?;
        let after = written.map(synced).transpose()?;
        let operations = operations.max(1.0);
        let written_bytes = already.zip(after).map(|(already, after)| (after - already) as f64 / operations);
        Ok(Served {
            per_second,
            cpu_microseconds: cpu_seconds * 1e6 / operations,
            peak_bytes,
            written_bytes,
            operations,
        })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let pid = i32::try_from(self.child.id()).ok().and_then(rustix::process::Pid::from_raw);
        if let Some(pid) = pid {
            // Fails when it has ended by itself.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        let _ = self.child.wait();
        let _ = std::fs::remove_file(&self.socket);
    }
}

/// Against qemu-nbd, through the page cache.
pub fn nbd(settings: &Settings) -> Result<Vec<Row>, String> {
    side_by_side(settings, Program::Nbd, false)
}

/// Against qemu-nbd, past the page cache.
pub fn nbd_direct(settings: &Settings) -> Result<Vec<Row>, String> {
    side_by_side(settings, Program::Nbd, true)
}

/// Against qemu-storage-daemon, through the page cache.
pub fn daemon(settings: &Settings) -> Result<Vec<Row>, String> {
    side_by_side(settings, Program::StorageDaemon, false)
}

/// Against qemu-storage-daemon, past the page cache.
pub fn daemon_direct(settings: &Settings) -> Result<Vec<Row>, String> {
    side_by_side(settings, Program::StorageDaemon, true)
}

/// Both servers stay up, each with a copy of the image; the loads go to them in turns.
fn side_by_side(settings: &Settings, program: Program, direct: bool) -> Result<Vec<Row>, String> {
    let source = fixture::converted(settings, &fixture::full(settings)?, "allocated", &["-S", "0"])?;
    let images = ["ours.served", "theirs.served", "bare.served"].map(|name| settings.folder.join(name));
    let [our_image, their_image, bare_image] = &images;
    let raw = fixture::full(settings)?;
    for (source, image) in [(&source, our_image), (&source, their_image), (&raw, bare_image)] {
        std::fs::copy(source, image).map_err(|e| format!("{}: {e}", image.display()))?;
    }
    let sockets = [settings.folder.join("ours.sock"), settings.folder.join("theirs.sock")];
    let [our_socket, their_socket] = sockets;
    let mut command = Command::new(&settings.cowshed);
    command.arg(program.name()).args(program.arguments(our_image, &our_socket, direct));
    let ours = Server::start(command, our_socket)?;
    let mut command = Command::new(settings.qemu.with_file_name(program.name()));
    command.args(program.arguments(their_image, &their_socket, direct));
    let theirs = Server::start(command, their_socket)?;
    let bare_socket = settings.folder.join("bare.sock");
    let bare = Server::start(bare::command(&bare_socket, std::slice::from_ref(bare_image), direct)?, bare_socket)?;
    let servers = [&ours, &theirs, &bare];
    let mut rows = Vec::new();
    let wanted = |name: &str| settings.only.as_ref().is_none_or(|only| name.contains(only.as_str()));
    for load in LOADS {
        let Load { pattern, block, depth, connections, .. } = load;
        let name = format!("{pattern} {block}, depth {depth}, connections {connections}");
        if !wanted(&name) {
            continue;
        }
        let mut runs = vec![Vec::new(); servers.len()];
        for (server, image) in servers.iter().zip(&images) {
            server.run(settings, load, image, 1)?;
        }
        for round in 0..settings.rounds {
            for turn in 0..servers.len() {
                let side = (round + turn) % servers.len();
                runs[side].push(servers[side].run(settings, load, &images[side], settings.seconds)?);
            }
        }
        let mut runs = runs.into_iter();
        let (our_runs, their_runs) = (runs.next().unwrap_or_default(), runs.next().unwrap_or_default());
        let mode = if direct { "direct" } else { "cached" };
        let name = format!("{} {mode}: {name}", program.name());
        let target = if direct { "CPU ≤ 0.5" } else { load.target };
        let result = Outcome::Served { ours: our_runs, theirs: their_runs, bare: runs.next() };
        rows.push(Row::new(name, target, result));
    }
    drop((ours, theirs, bare));
    for image in &images {
        std::fs::remove_file(image).map_err(|e| format!("{}: {e}", image.display()))?;
    }
    Ok(rows)
}

/// Images that are served without clients.
const IDLE_IMAGES: usize = 200;

/// Memory of a daemon that serves many images.
pub fn idle(settings: &Settings) -> Result<Vec<Row>, String> {
    let folder = settings.folder.join("idle");
    std::fs::create_dir_all(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let mut arguments = Vec::new();
    for index in 0..IDLE_IMAGES {
        let image = folder.join(format!("{index}.qcow2"));
        let mut create = Command::new(&settings.qemu);
        let created = create.args(["create", "-q", "-f", "qcow2"]).arg(&image).arg("20G").status();
        if !created.is_ok_and(|status| status.success()) {
            return Err(format!("could not create {}", image.display()));
        }
        arguments.push("--blockdev".to_owned());
        arguments.push(format!("qcow2,node-name=d{index},file.driver=file,file.filename={}", image.display()));
    }
    let measure = |mut command: Command, socket: &str| {
        let socket = settings.folder.join(socket);
        command.args(&arguments).args(["--nbd-server", &format!("addr.type=unix,addr.path={}", socket.display())]);
        for index in 0..IDLE_IMAGES {
            command.args(["--export", &format!("nbd,id=e{index},node-name=d{index},writable=on")]);
        }
        let server = Server::start(command, socket.clone())?;
        // The socket is there before the exports are.
        let last = format!("nbd+unix:///d{}?socket={}", IDLE_IMAGES - 1, socket.display());
        let started = Instant::now();
        while !Command::new(&settings.qemu).args(["info", &last]).output().is_ok_and(|output| output.status.success()) {
            if started.elapsed() > Duration::from_secs(60) {
                return Err(format!("{last} isn't there after a minute"));
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        resident_bytes(server.child.id())
    };
    let mut command = Command::new(&settings.cowshed);
    command.arg("qemu-storage-daemon");
    let our_bytes = measure(command, "ours.sock")?;
    let their_bytes = measure(Command::new(settings.qemu.with_file_name("qemu-storage-daemon")), "theirs.sock")?;
    std::fs::remove_dir_all(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let name = format!("a daemon with {IDLE_IMAGES} idle images");
    Ok(vec![Row::new(name, "< 100 MiB", Outcome::Memory { our_bytes, their_bytes })])
}

/// Resident memory of a process.
pub fn resident_bytes(pid: u32) -> Result<u64, String> {
    memory_of(pid, "VmRSS:")
}

/// A field of a process's status that counts memory, in bytes.
fn memory_of(pid: u32, field: &str) -> Result<u64, String> {
    let path = format!("/proc/{pid}/status");
    let status = std::fs::read_to_string(&path).map_err(|e| format!("{path}: {e}"))?;
    let line = status.lines().find_map(|line| line.strip_prefix(field));
    let kib = line.and_then(|line| line.split_whitespace().next()).and_then(|kib| kib.parse::<u64>().ok());
    kib.map(|kib| kib << 10).ok_or_else(|| format!("{path} has no {field}"))
}

/// Bytes that the disk below a file has written so far. (The count of a process is `write_bytes` of its `io` file. It
/// counts a large page of the page cache as a whole, even after a small change.)
pub fn written_bytes(file: &Path) -> Result<u64, String> {
    const SECTOR_BYTES: u64 = 512;
    let device = std::fs::metadata(file).map_err(|e| format!("{}: {e}", file.display()))?.dev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let path = format!("/sys/dev/block/{major}:{minor}/stat");
    let text = std::fs::read_to_string(&path).map_err(|e| format!("{path}: {e}: the images must lie on a disk"))?;
    let sectors = text.split_whitespace().nth(6).and_then(|sectors| sectors.parse::<u64>().ok());
    sectors.map(|sectors| sectors * SECTOR_BYTES).ok_or_else(|| format!("{path} has no sectors written"))
}
