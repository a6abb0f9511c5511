// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `serve`: images over NBD, with the defaults that most users want.

use super::super::Verb;
use super::super::arguments::FaultArgs;
use super::super::untrusted::PolicyArgs;
use super::{BoundArgs, LogFormat, Running, queues, vhost_queues};
use crate::output::{Console, Failure};
use clap::{ArgMatches, Args, FromArgMatches};
use cowshed_daemon::{Drive, MonitorAddress, Ready, Setup, Step};
use cowshed_storage::{Listener, SocketAddress};
use serde_json::json;
use std::any::Any;
use std::collections::BTreeSet;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

pub const VERB: Verb = Verb {
    name: "serve",
    about: "Serve images over NBD, under control of QMP monitors",
    operands: "[FILE]...",
    details: "Without an address it listens on a new Unix socket and prints its URI. One FILE is the default export, whose name may be left out; each \
              has its name without folder and ending. The log on standard error has the clients' actions. SIGTERM \
              and Ctrl-C stop it in order: requests in flight are answered, and everything is flushed, as far as disks answer within --stop-timeout.\n\n\
              A service manager can pass sockets (LISTEN_FDS). See docs/daemon.md.",
    examples: "  cowshed serve disk.qcow2
      Prints a URI such as nbd+unix:///?socket=/tmp/cowshed-1234/nbd.sock.
  cowshed serve --port 10809 --read-only base.qcow2
  cowshed serve --monitor qmp.sock --drive file=disk.qcow2,l2-cache-size=4M
      With a QMP monitor that can change limits, take snapshots, read statistics.",
    in_qemu_img: false,
    arguments,
    run,
};

#[derive(Args, Clone, Debug)]
struct ServeArgs {
    /// Format of FILE [default: probed]
    #[arg(short, long, value_name = "FORMAT")]
    format: Option<String>,
    /// FILE is an option string (driver=…,file.filename=…)
    #[arg(long)]
    image_opts: bool,
    /// Serve for reading only
    #[arg(short, long)]
    read_only: bool,
    /// Cache mode of FILE: none, writeback, writethrough, directsync or unsafe
    #[arg(long, value_name = "MODE")]
    cache: Option<String>,
    /// An image with options: file=NAME,format=FORMAT,id=ID,readonly=on,cache=MODE,l2-cache-size=SIZE,throttling.iops-total=N,stats-intervals.0=SECONDS,…
    #[arg(long = "drive", value_name = "OPTIONS")]
    drives: Vec<String>,
    /// Listen on a Unix socket
    #[arg(short = 'k', long, value_name = "PATH")]
    socket: Option<String>,
    /// Listen on a TCP port
    #[arg(short, long, value_name = "PORT")]
    port: Option<u16>,
    /// Address for --port [default: localhost]
    #[arg(short, long, value_name = "ADDRESS")]
    bind: Option<String>,
    /// Export a node by further means: `fuse,id=ID,node-name=NAME,mountpoint=FILE`, `http,id=ID,node-name=NAME,addr.type=inet,addr.host=HOST,addr.port=PORT`, `ublk,id=ID,node-name=NAME`, `vhost-user-blk,id=ID,node-name=NAME,addr.type=unix,addr.path=PATH,…`. The node-name of an image is its id. vhost-user-blk has as many queues as there are processors, at most 64, or `num-queues=N`
    #[arg(long = "export", value_name = "OPTIONS")]
    exports: Vec<String>,
    /// Name of the export, where there is one image
    #[arg(short = 'x', long, value_name = "NAME")]
    export_name: Option<String>,
    /// Offer the context qemu:dirty-bitmap:NAME, where there is one image; may be given several times
    #[arg(short = 'B', long, value_name = "NAME")]
    bitmap: Vec<String>,
    /// Threads that serve clients [default: the number of processors, at most 4]
    #[arg(long, value_name = "N")]
    queues: Option<usize>,
    /// The most clients at a time; 0 is any number
    #[arg(long, value_name = "N", default_value_t = 0)]
    max_connections: usize,
    /// Start a QMP monitor: a path, unix:PATH, tcp:HOST:PORT or stdio
    #[arg(long = "monitor", value_name = "ADDRESS")]
    monitors: Vec<String>,
    /// Serve statistics in the OpenMetrics format over HTTP
    #[arg(long, value_name = "HOST:PORT")]
    metrics: Option<String>,
    /// Memory that the metadata of all images may take, at least 1M [default: 256M]
    #[arg(long, value_name = "SIZE")]
    metadata_budget: Option<String>,
    /// Define an object, for example credentials
    #[arg(long = "object", value_name = "TYPE,id=ID,…")]
    objects: Vec<String>,
    /// Encrypt, with the credentials of an object
    #[arg(long, value_name = "ID")]
    tls_creds: Option<String>,
    /// Stop when the last NBD client goes, whatever clients other exports have
    #[arg(long)]
    once: bool,
    /// Go into the background once it is up
    #[arg(long)]
    daemonize: bool,
    /// Write the process's number to a file
    #[arg(long, value_name = "PATH")]
    pidfile: Option<String>,
    /// Stop the daemon that --pidfile names, in order, and go on with its clients. See docs/upgrade.md
    #[arg(long)]
    takeover: bool,
    /// The log: lines for people, or JSON
    #[arg(long, value_enum, default_value_t, value_name = "text|json")]
    log_format: LogFormat,
    #[command(flatten)]
    faults: FaultArgs,
    #[command(flatten)]
    bounds: BoundArgs,
    #[command(flatten)]
    untrusted: PolicyArgs,
    /// Images
    #[arg(value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    files: Vec<String>,
}

fn arguments(command: clap::Command) -> clap::Command {
    // A daemon isn't confined.
    let help = "The images may be hostile: no other file is opened on their word, and their tables have tighter limits";
    ServeArgs::augment_args(command).mut_arg("untrusted", |argument| argument.help(help))
}

/// A folder for our socket, that only we can enter; removed in the end.
struct PrivateFolder(PathBuf);

impl PrivateFolder {
    fn new() -> Result<PrivateFolder, Failure> {
        let parent = std::env::var_os("XDG_RUNTIME_DIR").map_or_else(std::env::temp_dir, PathBuf::from);
        // A killed daemon leaves its folder behind, and its number comes again: the rest of the name is random.
        let mut folder = tempfile::Builder::new();
        let prefix = format!("cowshed-{}-", std::process::id());
        let made = folder.prefix(&prefix).permissions(Permissions::from_mode(0o700)).tempdir_in(&parent);
        let made =
            made.map_err(|error| Failure::new(format!("{}: could not make a folder: {error}", parent.display())))?;
        Ok(PrivateFolder(made.keep()))
    }
}

impl Drop for PrivateFolder {
    fn drop(&mut self) {
        // The socket in it is gone by now; whatever else is there isn't ours.
        let _ = std::fs::remove_dir(&self.0);
    }
}

impl ServeArgs {
    /// Whether the sockets are those that another process passed.
    fn is_activated(&self) -> bool {
        self.socket.is_none() && self.port.is_none() && self.bind.is_none() && Listener::are_passed()
    }

    fn drives(&self) -> Result<Vec<Drive>, Failure> {
        if self.image_opts && self.format.is_some() {
            return Err(Failure::new("--image-opts and --format are mutually exclusive"));
        }
        let mut names = BTreeSet::new();
        let mut drives = Vec::new();
        for file in &self.files {
            let id = unique(&mut names, node_name(file));
            let mut drive = match self.image_opts {
                true => Drive::image_opts(&id, file, !self.read_only)?,
                false => Drive::file(&id, file, self.format.as_deref(), !self.read_only)?,
            };
            // A disk that guests trim should shrink.
            drive.set("discard", "unmap")?;
            if let Some(mode) = &self.cache {
                drive.set("cache", mode)?;
            }
            drives.push(drive);
        }
        for text in &self.drives {
            let id = unique(&mut names, format!("drive{}", drives.len()));
            drives.push(Drive::parse(text, &id, !self.read_only)?);
        }
        if let Some(faults) = self.faults.options()? {
            if drives.is_empty() {
                return Err(Failure::new("--fault needs an image"));
            }
            drives.iter_mut().for_each(|drive| drive.fail_by(faults.clone()));
        }
        if self.untrusted.is_on() {
            let policy = self.untrusted.policy()?;
            drives.iter_mut().for_each(|drive| drive.hold_to(policy.clone()));
        }
        match drives.is_empty() && self.monitors.is_empty() {
            true => Err(Failure::usage("Expecting an image file name, --drive or --monitor")),
            false => Ok(drives),
        }
    }

    /// Where to listen; `None`: on sockets that were passed. With the folder that the socket needs.
    fn address(&self) -> Result<(Option<SocketAddress>, Option<PrivateFolder>), Failure> {
        match (&self.socket, self.port) {
            (Some(_), Some(_)) => Err(Failure::new("give one of --socket and --port")),
            (Some(path), None) => Ok((Some(SocketAddress::Unix(path.clone())), None)),
            (None, Some(port)) => {
                let host = self.bind.clone().unwrap_or_else(|| "localhost".to_owned());
                Ok((Some(SocketAddress::Tcp { host, port }), None))
            }
            (None, None) if self.bind.is_some() => Err(Failure::new("--bind needs --port")),
            (None, None) if self.is_activated() => Ok((None, None)),
            (None, None) => {
                let folder = PrivateFolder::new()?;
                let path = folder.0.join("nbd.sock").to_string_lossy().into_owned();
                Ok((Some(SocketAddress::Unix(path)), Some(folder)))
            }
        }
    }
}

fn run(matches: &ArgMatches, console: &mut Console) -> Result<u8, Failure> {
    let args = ServeArgs::from_arg_matches(matches)?;
    if super::show_object_help(&args.objects, console)? {
        return Ok(0);
    }
    args.untrusted.check()?;
    if args.takeover && args.pidfile.is_none() {
        return Err(Failure::new("--takeover needs --pidfile"));
    }
    let drives = args.drives()?;
    let mut steps = Vec::new();
    if let Some(size) = &args.metadata_budget {
        steps.push(Step::metadata_budget("--metadata-budget", size)?);
    }
    for object in &args.objects {
        steps.push(Step::object(object)?);
    }
    let exports: Vec<(String, bool)> = drives.iter().map(|drive| (drive.id.clone(), drive.writable)).collect();
    let controls: Vec<Step> = drives.iter().map(|drive| Step::controls("drive", drive)).collect();
    steps.extend(drives.into_iter().map(|drive| Step::drive("drive", drive)));
    let is_second = std::env::var_os("COWSHED_BACKGROUND").is_some();
    let mut folder = None;
    if !args.daemonize || is_second {
        let (address, made) = args.address()?;
        folder = made;
        let serve = Step::serve(address, (args.tls_creds.clone(), None), args.max_connections, None);
        steps.push(serve.answering_to_ids());
    }
    let only = exports.len() == 1;
    for (id, writable) in exports {
        let name = match (&args.export_name, only) {
            (Some(name), true) => name.clone(),
            (Some(_), false) => return Err(Failure::new("--export-name needs exactly one image")),
            (None, true) => String::new(),
            (None, false) => id.clone(),
        };
        if !only && !args.bitmap.is_empty() {
            return Err(Failure::new("--bitmap needs exactly one image"));
        }
        let options = json!({"type": "nbd", "id": id, "node-name": id, "name": name, "writable": writable,
                             "allocation-depth": true, "bitmaps": args.bitmap});
        steps.push(Step::call("export", "block-export-add", "BlockExportOptions", options));
    }
    for export in &args.exports {
        steps.push(Step::export(export)?);
    }
    steps.extend(controls);
    for monitor in &args.monitors {
        steps.push(Step::monitor_at("--monitor", monitor_address(monitor)?, false));
    }
    if let Some(address) = &args.metrics {
        steps.push(Step::metrics("--metrics", address));
    }
    let running = Running {
        setup: Setup {
            steps,
            queues: queues(args.queues)?,
            vhost_queues: vhost_queues(),
            stop_when_idle: args.once,
            stop_limit: args.bounds.stop_limit(),
            turn_limit: cowshed_daemon::TURN_LIMIT,
            request_memory_bytes: args.bounds.request_memory_bytes()?,
            mount_guard: super::mount_guard(),
        },
        background: args.daemonize,
        leaves_folder: false,
        pid_frame: "",
        pid_file: args.pidfile.clone(),
        takes_over: args.takeover,
        device: None,
        log: args.log_format,
        log_level: "info",
        worded: Box::new(super::as_it_is),
        kept: folder.map(|folder| Box::new(folder) as Box<dyn Any>),
    };
    // A client that starts its server passes the socket, and its own standard output.
    let is_activated = args.is_activated();
    running.run(|ready| match is_activated {
        true => tracing::info!(exports = ready.exports.len(), "serving on the sockets that were passed"),
        false => announce(ready, console),
    })
}

fn announce(ready: &Ready, console: &mut Console) {
    for export in &ready.exports {
        for uri in &export.uris {
            console.line(uri);
        }
    }
    for monitor in &ready.monitors {
        console.line(format_args!("QMP: {monitor}"));
    }
    for address in &ready.metrics {
        console.line(format_args!("metrics: http://{address}/metrics"));
    }
    console.flush();
}

fn monitor_address(text: &str) -> Result<MonitorAddress, Failure> {
    let wrong = || Failure::new(format!("--monitor expects a path, unix:PATH, tcp:HOST:PORT or stdio, not '{text}'"));
    match text.split_once(':') {
        None if text == "stdio" => Ok(MonitorAddress::Stdio),
        None if !text.is_empty() => Ok(MonitorAddress::Unix(text.into())),
        Some(("unix", path)) if !path.is_empty() => Ok(MonitorAddress::Unix(path.into())),
        Some(("tcp", rest)) => {
            let (host, port) = rest.rsplit_once(':').ok_or_else(wrong)?;
            let port = port.parse().map_err(|_| wrong())?;
            Ok(MonitorAddress::Tcp { host: host.trim_matches(['[', ']']).to_owned(), port })
        }
        Some((path, _)) if path.contains('/') => Ok(MonitorAddress::Unix(text.into())),
        _ => Err(wrong()),
    }
}

/// A node's name after a file: its name without folder and ending, as far as node-names allow.
fn node_name(file: &str) -> String {
    let stem = Path::new(file).file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
    let name: String =
        stem.chars().map(|c| if c.is_ascii_alphanumeric() || "-._".contains(c) { c } else { '-' }).take(24).collect();
    match name.starts_with(|first: char| first.is_ascii_alphabetic()) {
        true => name,
        false => format!("disk-{name}"),
    }
}

fn unique(names: &mut BTreeSet<String>, name: String) -> String {
    let numbered = (1..).map(|n| if n == 1 { name.clone() } else { format!("{name}-{n}") });
    let free = numbered.into_iter().find(|name| !names.contains(name)).unwrap_or(name.clone());
    names.insert(free.clone());
    free
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_names_come_from_file_names() {
        assert_eq!(node_name("/a/disk one.qcow2"), "disk-one");
        assert_eq!(node_name("2024.raw"), "disk-2024");
        assert_eq!(node_name("nbd://host/x"), "x");
        let mut names = BTreeSet::new();
        let made: Vec<String> = (0..3).map(|_| unique(&mut names, "a".to_owned())).collect();
        assert_eq!(made, ["a", "a-2", "a-3"]);
    }

    #[test]
    fn monitors_have_addresses() {
        assert_eq!(monitor_address("stdio").unwrap(), MonitorAddress::Stdio);
        assert_eq!(monitor_address("run/m.sock").unwrap(), MonitorAddress::Unix("run/m.sock".into()));
        assert_eq!(monitor_address("/a:b/m").unwrap(), MonitorAddress::Unix("/a:b/m".into()));
        let tcp = MonitorAddress::Tcp { host: "::1".into(), port: 5 };
        assert_eq!(monitor_address("tcp:[::1]:5").unwrap(), tcp);
        for wrong in ["", "tcp:5", "tcp:h:x", "foo:bar"] {
            assert!(monitor_address(wrong).is_err(), "{wrong}");
        }
    }
}
