// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Stress on a real daemon: several disks, several connections each, random commands beside the writes. It ends by
//! SIGKILL, SIGTERM or `quit`, life after life. A byte model judges each read, each backup, each disk at quiet points
//! and after each life.
//!
//! - `client`, `guest`: connections of every dialect with requests in flight, and the model
//! - `commander`, `exports`: commands that change the layers below a disk, or take its export away
//! - `meddler`: a monitor that asks for everything else
//!
//! A seed fixes the choices, not the timing, so a failure's seed is a place to look, not a replay.

mod client;
mod commander;
mod exports;
mod guest;
mod meddler;
mod monitor;
mod tally;
mod trace;

use crate::audit::audit;
use crate::qemu::Qemu;
use crate::random::Random;
use commander::{Commander, Layer, node_options};
use cowshed_simulator::PageMap;
use exports::Server;
use guest::{Disk, lock};
use monitor::{Answer, Monitor};
use serde_json::json;
use std::collections::BTreeSet;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
pub use tally::{Counts, Tally};

/// The longest time that an orderly end may take, in seconds.
const END_LIMIT_S: u64 = 60;
/// Memory that the daemon may have at most, in KiB: far above its disks' needs.
const MOST_MEMORY_KIB: u64 = 1 << 20;

/// The settings of a run.
#[derive(Clone, Debug)]
pub struct Config {
    /// The program `cowshed`.
    pub program: PathBuf,
    /// An empty folder on a real file system. Images and the log stay there after a failure.
    pub folder: PathBuf,
    /// Seed of all choices.
    pub seed: u64,
    /// The length of the run in seconds; the life that is under way then ends first.
    pub seconds: u64,
    /// Disks of the daemon.
    pub disks: usize,
    /// Connections to each disk.
    pub connections: usize,
}

/// The counts of a run.
#[derive(Default)]
pub struct Report {
    /// Lives of the daemon.
    pub lives: u64,
    /// Lives that SIGKILL has ended.
    pub kills: u64,
    /// Requests of all clients.
    pub requests: u64,
    /// Images that the real `qemu-img check` has judged.
    pub images: u64,
    /// The most memory that one life took, in KiB.
    pub memory_kib: u64,
    /// Commands.
    pub tally: Arc<Tally>,
}

/// The end of a life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Kill,
    Terminate,
    Quit,
}

/// Options of a new qcow2 image.
fn random_options(random: &mut Random) -> String {
    let choices = [
        "",
        "cluster_size=4k",
        "cluster_size=512",
        "cluster_size=128k,extended_l2=on",
        "lazy_refcounts=on",
        "compat=0.10",
        "refcount_bits=64,cluster_size=16k",
        "compression_type=zstd",
    ];
    random.pick(&choices).to_owned()
}

/// Runs life after life until the time is up; `tell` hears of the state after each.
///
/// # Errors
/// The first fault of the daemon, with the life's number and the seed.
pub fn run(config: &Config, mut tell: impl FnMut(&Report)) -> Result<Report, String> {
    let mut report = Report::default();
    let mut random = Random::new(config.seed);
    let started = Instant::now();
    let mut tops = Vec::new();
    for number in 0..config.disks {
        tops.push(new_disk(config, number, &mut random));
    }
    while report.lives == 0 || started.elapsed() < Duration::from_secs(config.seconds) {
        let life = Life { config, number: report.lives, random: Random::new(random.next_u64()) };
        tops = life
            .run(&tops, &mut report)
            .map_err(|wrong| format!("seed {}, life {}: {wrong}", config.seed, report.lives))?;
        report.lives += 1;
        tell(&report);
    }
    Ok(report)
}

/// A new disk of a few MiB, on a base or not; the file on top.
fn new_disk(config: &Config, number: usize, random: &mut Random) -> PathBuf {
    let qemu = Qemu::system();
    let size = (4 + random.below(12)) << 20;
    let base = config.folder.join(format!("d{number}-base.raw"));
    let top = config.folder.join(format!("d{number}.qcow2"));
    let mut options = random_options(random);
    if random.chance(50) {
        qemu.create(&base, "raw", "", size);
        qemu.io_commands(&base, "raw", &[format!("write -P 7 0 {size}")]).expect_ok();
        let separator = if options.is_empty() { "" } else { "," };
        options = format!("{options}{separator}backing_file={},backing_fmt=raw", base.display());
    }
    qemu.create(&top, "qcow2", &options, size);
    top
}

/// Sets a flag when it is dropped.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A process that doesn't outlive its test.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        // Both fail where it has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct Life<'a> {
    config: &'a Config,
    number: u64,
    random: Random,
}

impl Life<'_> {
    /// One life over the disks whose uppermost files are `tops`; where they are afterwards.
    fn run(mut self, tops: &[PathBuf], report: &mut Report) -> Result<Vec<PathBuf>, String> {
        let mut chains = Vec::new();
        for top in tops {
            chains.push(chain_of(top)?);
        }
        self.remove_others(&chains);
        let qemu = Qemu::system();
        let disks: Vec<Disk> = tops
            .iter()
            .enumerate()
            .map(|(number, top)| Disk::new(format!("d{number}"), top.clone(), qemu.content(top, format_of(top))))
            .collect();
        let mut daemon = Ended(self.start(&disks, &chains)?);
        let stop = AtomicBool::new(false);
        let wrong: Mutex<Vec<String>> = Mutex::new(Vec::new());
        let end = match self.random.below(4) {
            0 => End::Terminate,
            1 => End::Quit,
            _ => End::Kill,
        };
        let lasts = Duration::from_millis(300 + self.random.below(6000));
        let mut last_monitor = self.monitor(2)?;
        let seeds: Vec<u64> =
            (0..=disks.len() * (self.config.connections + 1)).map(|_| self.random.next_u64()).collect();
        let mut seeds = seeds.into_iter();
        let mut seed = || seeds.next().unwrap_or_default();
        let (this, tally) = (&self, Arc::clone(&report.tally));
        let (stop, wrong, tally, server) = (&stop, &wrong, &*tally, &Server::new(this.path("nbd.sock")));
        let outcome = std::thread::scope(|scope| {
            // Whatever happens here, the threads see their end.
            let _end = SetOnDrop(stop);
            for (disk, chain) in disks.iter().zip(chains) {
                for _ in 0..this.config.connections {
                    let (seed, socket) = (seed(), &server.socket);
                    scope.spawn(move || note(wrong, stop, disk.use_it(socket, seed, stop, tally)));
                }
                let mut commander = this.commander(disk, chain, (stop, tally, server), seed())?;
                commander.monitor.trace(&disk.trace);
                scope.spawn(move || note(wrong, stop, commander.command_it()));
            }
            let (monitor, random) = (this.monitor(1)?, Random::new(seed()));
            scope.spawn(move || note(wrong, stop, meddler::meddle(monitor, random, stop, tally)));
            let began = Instant::now();
            while began.elapsed() < lasts && !stop.load(Ordering::Relaxed) {
                // Between two looks: the load runs on other threads.
                std::thread::sleep(Duration::from_millis(5));
            }
            // No disk moves to another file while the life ends.
            let places: Vec<_> = disks.iter().map(|disk| lock(&disk.top)).collect();
            stop.store(true, Ordering::Relaxed);
            let ended = this.end(&mut daemon.0, end, &mut last_monitor);
            drop(places);
            ended
        });
        report.requests += disks.iter().map(Disk::requests).sum::<u64>();
        let judged = match lock(wrong).first() {
            Some(wrong) => Err(wrong.clone()),
            None => outcome.and_then(|memory_kib| {
                report.memory_kib = report.memory_kib.max(memory_kib);
                report.kills += u64::from(end == End::Kill);
                disks.iter().map(|disk| self.judge(disk, end, report)).collect()
            }),
        };
        if judged.is_err() {
            for disk in &disks {
                // The failure counts, not this.
                let _ = std::fs::write(self.path(&format!("{}.trace", disk.name)), disk.trace.text());
            }
        }
        judged
    }

    fn path(&self, name: &str) -> PathBuf {
        self.config.folder.join(name)
    }

    fn monitor(&self, number: usize) -> Result<Monitor, String> {
        let path = self.path(&format!("m{number}.sock"));
        Monitor::connect(&path).map_err(|error| format!("{}: {error}", path.display()))
    }

    fn commander<'a>(
        &'a self,
        disk: &'a Disk,
        chain: Vec<Layer>,
        (stop, tally, server): (&'a AtomicBool, &'a Tally, &'a Server),
        seed: u64,
    ) -> Result<Commander<'a>, String> {
        Ok(Commander {
            disk,
            chain,
            folder: &self.config.folder,
            server,
            monitor: self.monitor(0)?,
            random: Random::new(seed),
            stop,
            tally,
            prefix: format!("{}-{}-", disk.name, self.number),
            next_name: 0,
        })
    }

    /// Files of earlier lives that no chain needs.
    fn remove_others(&self, chains: &[Vec<Layer>]) {
        let kept: BTreeSet<PathBuf> = chains.iter().flatten().map(|layer| layer.file.clone()).collect();
        for entry in std::fs::read_dir(&self.config.folder).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.extension().is_some_and(|end| end == "qcow2" || end == "sock") && !kept.contains(&path) {
                let _ = std::fs::remove_file(path);
            }
        }
    }

    fn start(&mut self, disks: &[Disk], chains: &[Vec<Layer>]) -> Result<Child, String> {
        let log = std::fs::File::options().create(true).append(true).open(self.path("log"));
        let log = log.map_err(|error| format!("the log: {error}"))?;
        let mut command = Command::new(&self.config.program);
        // The tool is the daemon by that name.
        command.arg0("qemu-storage-daemon").arg("--nbd-server");
        command.arg(format!("addr.type=unix,addr.path={},max-connections=0", self.path("nbd.sock").display()));
        for number in 0..3 {
            let path = self.path(&format!("m{number}.sock"));
            command.args(["--chardev", &format!("socket,id=c{number},path={},server=on,wait=off", path.display())]);
            command.args(["--monitor", &format!("chardev=c{number}")]);
        }
        for (disk, chain) in disks.iter().zip(chains) {
            for (index, layer) in chain.iter().enumerate() {
                let below = index.checked_sub(1).map(|below| &chain[below]);
                command.args(["--blockdev", &node_options(layer, below, index + 1 == chain.len()).to_string()]);
            }
            let top = &chain.last().expect("a chain is never empty").node;
            let export = format!("type=nbd,id=e-{0},node-name={top},name={0},writable=on", disk.name);
            command.args(["--export", &export]);
        }
        let mut daemon = command
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .map_err(|error| format!("{}: {error}", self.config.program.display()))?;
        let began = Instant::now();
        while (0..3).any(|number| self.monitor(number).is_err()) {
            if let Ok(Some(status)) = daemon.try_wait() {
                return Err(format!(
                    "the daemon ends with {status} when it starts: see {}",
                    self.path("log").display()
                ));
            }
            if began.elapsed() > Duration::from_secs(END_LIMIT_S) {
                let _ = daemon.kill();
                return Err(format!("the daemon doesn't listen after {END_LIMIT_S} s"));
            }
            // Between two attempts, with the bound above.
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(daemon)
    }

    /// Ends the daemon; the memory in KiB that it has taken.
    fn end(&self, daemon: &mut Child, end: End, monitor: &mut Monitor) -> Result<u64, String> {
        let memory = memory_kib(daemon.id());
        if let Ok(Some(status)) = daemon.try_wait() {
            return Err(format!("the daemon has ended by itself: {status}; see {}", self.path("log").display()));
        }
        match end {
            End::Kill => daemon.kill().map_err(|error| format!("kill: {error}"))?,
            End::Terminate => {
                let pid = rustix::process::Pid::from_child(daemon);
                rustix::process::kill_process(pid, rustix::process::Signal::TERM)
                    .map_err(|error| format!("kill: {error}"))?;
            }
            End::Quit => {
                if let Answer::Refused(reason) = monitor.command("quit", &json!({}))? {
                    return Err(format!("quit: {reason}"));
                }
            }
        }
        let began = Instant::now();
        let status = loop {
            match daemon.try_wait() {
                Ok(Some(status)) => break status,
                Ok(None) if began.elapsed() > Duration::from_secs(END_LIMIT_S) => {
                    let _ = daemon.kill();
                    let _ = daemon.wait();
                    return Err(format!("the daemon doesn't end within {END_LIMIT_S} s ({end:?})"));
                }
                // Between two looks, with the bound above.
                Ok(None) => std::thread::sleep(Duration::from_millis(5)),
                Err(error) => return Err(format!("wait: {error}")),
            }
        };
        if end != End::Kill && !status.success() {
            return Err(format!("the daemon ends with {status} ({end:?}); see {}", self.path("log").display()));
        }
        if memory > MOST_MEMORY_KIB {
            return Err(format!("the daemon has taken {memory} KiB of memory"));
        }
        Ok(memory)
    }

    /// Our own check has QEMU's result: no error, leaks at most.
    fn check_by_us(&self, image: &Path) -> Result<(), String> {
        let output = Command::new(&self.config.program).args(["check", "-f", "qcow2"]).arg(image).output();
        let output = output.map_err(|error| format!("{}: {error}", self.config.program.display()))?;
        match output.status.code() {
            Some(0 | 3) => Ok(()),
            _ => {
                let said = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
                Err(format!("{}: our check: {} {}", image.display(), output.status, said.concat()))
            }
        }
    }

    /// Judges a disk after a life; its uppermost file.
    fn judge(&self, disk: &Disk, end: End, report: &mut Report) -> Result<PathBuf, String> {
        let qemu = Qemu::system();
        let top = lock(&disk.top).clone();
        let name = top.display();
        wait_for_locks(&top)?;
        for layer in chain_of(&top)? {
            if layer.format != "qcow2" {
                continue;
            }
            report.images += 1;
            let bytes = std::fs::read(&layer.file).map_err(|error| format!("{}: {error}", layer.file.display()))?;
            let found = audit(&PageMap::from_bytes(&bytes))
                .map_err(|wrong| format!("{} ({end:?}): audit: {wrong}", layer.file.display()))?;
            let options: &[&str] = if found.dirty { &["-r", "all"] } else { &[] };
            if found.dirty && end != End::Kill {
                return Err(format!("{} is left dirty by an orderly end ({end:?})", layer.file.display()));
            }
            let verdict = qemu.check_with(&layer.file, "qcow2", options);
            self.check_by_us(&layer.file)?;
            // An orderly end of an image that was killed before may still have the leaks of then.
            if !matches!(verdict.code, 0 | 3) {
                let file = layer.file.display();
                return Err(format!("{file} ({end:?}): qemu-img check: {} {}", verdict.json, verdict.stderr));
            }
        }
        let content = qemu.content(&top, format_of(&top));
        // A resize may have been under way.
        if content.len() as u64 != disk.size() && end != End::Kill {
            return Err(format!("{name} has {} bytes instead of {}", content.len(), disk.size()));
        }
        disk.check_end(end == End::Kill, &content).map_err(|wrong| format!("{name} ({end:?}): {wrong}"))?;
        Ok(top)
    }
}

/// Keeps a thread's failure, and ends the life then.
fn note(wrong: &Mutex<Vec<String>>, stop: &AtomicBool, outcome: Result<(), String>) {
    if let Err(text) = outcome {
        lock(wrong).push(text);
        stop.store(true, Ordering::Relaxed);
    }
}

/// The format of a file of a run: a commit may leave a disk in its raw base.
fn format_of(file: &Path) -> &'static str {
    if file.extension().is_some_and(|end| end == "raw") { "raw" } else { "qcow2" }
}

/// The chain of an image as QEMU reads it, the base first.
fn chain_of(top: &Path) -> Result<Vec<Layer>, String> {
    let output = Qemu::system().img([
        "info".as_ref(),
        "--backing-chain".as_ref(),
        "--output=json".as_ref(),
        "-f".as_ref(),
        format_of(top).as_ref(),
        top.as_os_str(),
    ]);
    let layers: Vec<serde_json::Value> = serde_json::from_str(&output.stdout)
        .map_err(|_| format!("{}: qemu-img info: {}{}", top.display(), output.stdout, output.stderr))?;
    let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    let layer = |layer: &serde_json::Value| {
        let file = PathBuf::from(text(&layer["filename"]));
        let node = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        Layer { node: format!("n{node}").chars().take(31).collect(), file, format: text(&layer["format"]) }
    };
    Ok(layers.iter().rev().map(layer).collect())
}

/// A ring of a killed process ends its writes and drops its locks some time after the process.
fn wait_for_locks(image: &Path) -> Result<(), String> {
    let began = Instant::now();
    loop {
        let info = Qemu::system().img(["info".as_ref(), image.as_os_str()]);
        if info.code == 0 || !info.stderr.contains("lock") {
            return Ok(());
        }
        if began.elapsed() > Duration::from_secs(END_LIMIT_S) {
            return Err(format!("the dead daemon's locks stay: {}", info.stderr));
        }
        // Between two attempts, with the bound above.
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The most memory that a process has had, in KiB; 0 where it is unknown.
fn memory_kib(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|line| line.split_whitespace().next()).and_then(|number| number.parse().ok()).unwrap_or(0)
}
