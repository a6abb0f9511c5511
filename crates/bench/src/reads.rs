// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reads by fio over NBD from our daemon and from qemu-storage-daemon, both with the same options. A raw file of the
//! same size behind our daemon shows the limit that the mapping can reach.

use crate::Settings;
use crate::bare;
use crate::fixture;
use crate::nbd::{Served, Server};
use crate::table::{Outcome, Row};
use cowshed_image::{OpenRequest, open};
use cowshed_storage::{IoBuf, rt};
use cowshed_testkit::random::Random;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const TARGET_MAPPING: &str = "≥ 5× at 1 MiB, CPU ≤ 0.5, ≥ 0.95 of the raw file";

/// The reads of fio.
#[derive(Clone, Copy)]
pub struct Load {
    /// fio's `rw`.
    pub pattern: &'static str,
    /// fio's `bs`.
    pub block: &'static str,
    /// Requests at once.
    pub depth: u32,
    /// Bytes from the start on.
    pub bytes: u64,
}

const fn random_4k(bytes: u64) -> Load {
    Load { pattern: "randread", block: "4k", depth: 32, bytes }
}

/// The comparison in a row.
pub struct Case<'a> {
    /// Name of the row.
    pub name: String,
    /// The served image.
    pub image: &'a Path,
    /// Options of the qcow2 node, for both sides.
    pub options: &'a str,
    /// Theirs, where they differ.
    pub their_options: Option<&'a str>,
    /// Past the page cache, on both sides.
    pub direct: bool,
    /// The raw file that is the limit.
    pub limit: Option<&'a Path>,
    /// The load.
    pub load: Load,
    /// The goal of the row.
    pub target: &'static str,
}

/// Without options, through the page cache, and without a raw file beside it.
fn cached<'a>(name: String, image: &'a Path, load: Load, target: &'static str) -> Case<'a> {
    Case { name, image, options: "", their_options: None, direct: false, limit: None, load, target }
}

/// Random reads against the size of the L2 cache: the disk is mapped from end to end. Its data are holes, which are
/// read past the page cache without the disk. So the mapping shows, and the cost of its tables when they have to be
/// read.
pub fn mapping(settings: &Settings) -> Result<Vec<Row>, String> {
    let full = mapped(settings, "mapped-20g", "cluster_size=64k", 20 * GIB)?;
    let raw_20g = sparse(settings, 20 * GIB)?;
    let mut rows = Vec::new();
    // QEMU as it is by default, which keeps whole clusters of a table, and with slices of them.
    for (entries, slices) in [("default entries", ""), ("entries of 4 KiB", ",l2-cache-entry-size=4096")] {
        for half_mib in 2..=5 {
            let options = format!("l2-cache-size={}", half_mib * MIB / 2);
            let theirs = format!("{options}{slices}");
            let mib = half_mib as f64 / 2.0;
            let case = Case {
                name: format!("20 GiB in order, L2 cache {mib:.1} MiB, theirs with {entries}: randread 4k"),
                image: &full,
                options: &options,
                their_options: Some(&theirs),
                direct: true,
                limit: Some(&raw_20g),
                load: random_4k(20 * GIB),
                target: TARGET_MAPPING,
            };
            rows.extend(run(settings, &case)?);
        }
    }
    Ok(rows)
}

/// The sizes of that cache against each other and the raw file. All five servers are up and loaded in turns, so other
/// work of the machine is in the rounds of each.
pub fn mapping_sizes(settings: &Settings) -> Result<Vec<Row>, String> {
    let full = mapped(settings, "mapped-20g", "cluster_size=64k", 20 * GIB)?;
    let raw = sparse(settings, 20 * GIB)?;
    let start = |name: &str, image: &Path, format: &str, options: &str| {
        let [file, node] = plainly(options, Access { writable: false, direct: true });
        let mut command = Command::new(&settings.cowshed);
        command.arg("qemu-storage-daemon");
        let serving = Serving { image, format, file: &file, node: &node, writable: false, program: &[] };
        serve_by(settings, command, &format!("{name}.sock"), &serving)
    };
    let mut servers = vec![start("raw", &raw, "raw", "")?];
    for half_mib in 2..=5 {
        let options = format!("l2-cache-size={}", half_mib * MIB / 2);
        servers.push(start(&format!("size-{half_mib}"), &full, "qcow2", &options)?);
    }
    let servers: Vec<(&Server, &Path)> = servers.iter().map(|server| (server, full.as_path())).collect();
    let runs = in_turns(settings, &servers, random_4k(20 * GIB))?;
    let mut rows = Vec::new();
    for (half_mib, runs_of_size) in (2..).zip(&runs[1..]) {
        let mib = f64::from(half_mib) / 2.0;
        let name = format!("20 GiB in order, L2 cache {mib:.1} MiB, theirs is ours with 1.0 MiB: randread 4k");
        let (ours, theirs, limit) = (runs_of_size.clone(), runs[1].clone(), Some(runs[0].clone()));
        rows.push(Row::new(name, "0.95 to 1.05; ≥ 0.95 of the raw file", Outcome::Beside { ours, theirs, limit }));
    }
    Ok(rows)
}

/// The same with a mapping that is hard to keep small, and with the sizes of disk and cache that manuals use as examples.
pub fn mapping_others(settings: &Settings) -> Result<Vec<Row>, String> {
    let small = mapped(settings, "mapped-16g", "cluster_size=64k", 16 * GIB)?;
    let huge = mapped(settings, "mapped-2t", "cluster_size=2M", 2048 * GIB)?;
    let scattered = scattered(settings, 20 * GIB)?;
    let raw = |bytes: u64| sparse(settings, bytes);
    let (raw_20g, raw_16g, raw_2t) = (raw(20 * GIB)?, raw(16 * GIB)?, raw(2048 * GIB)?);
    let mut rows = Vec::new();
    let others = [
        ("20 GiB in random order, L2 cache 1 MiB", &scattered, &raw_20g, 20 * GIB, MIB, "≥ 2×"),
        ("16 GiB, L2 cache 1 MiB", &small, &raw_16g, 16 * GIB, MIB, "≥ 0.95 of the raw file"),
        ("2 TiB, clusters of 2 MiB, L2 cache 4 MiB", &huge, &raw_2t, 2048 * GIB, 4 * MIB, "≥ 0.95 of the raw file"),
    ];
    for (name, image, limit, bytes, cache, target) in others {
        let options = format!("l2-cache-size={cache},l2-cache-entry-size=4096");
        let (name, load) = (format!("{name}: randread 4k"), random_4k(bytes));
        let (limit, options) = (Some(limit.as_path()), options.as_str());
        let case = Case { name, image, options, their_options: None, direct: true, limit, load, target };
        rows.extend(run(settings, &case)?);
    }
    Ok(rows)
}

const CHAIN_BYTES: u64 = GIB;
const CLUSTER: u64 = 65536;

/// Random reads of a disk whose clusters are spread over the layers of a chain.
pub fn chains(settings: &Settings) -> Result<Vec<Row>, String> {
    let mut rows = Vec::new();
    for depth in [1, 8, 32, 64] {
        let image = chain(settings, depth)?;
        let name = format!("chain of {depth}: randread 4k");
        let target = "at 64: IOPS within 10 % of depth 1, ≥ 4×, CPU ≤ 0.1";
        let case = cached(name, &image, random_4k(CHAIN_BYTES), target);
        rows.extend(run(settings, &case)?);
    }
    Ok(rows)
}

/// The depth of the longest chain.
const DEEPEST: u64 = 64;

/// The longest chain against one image, served read-only as that is and with its uppermost image writable. The limit of
/// that follows: as many raw files as it has layers, against one, behind the bare server, which looks into no layers.
/// All the servers are up and loaded in turns.
pub fn chain_depths(settings: &Settings) -> Result<Vec<Row>, String> {
    let bare = |name: &str, files: u64| {
        let socket = settings.folder.join(name);
        let files =
            (0..files).map(|index| pieces(settings, index, CHAIN_BYTES / files)).collect::<Result<Vec<_>, _>>()?;
        files.iter().try_for_each(|file| read_once(file))?;
        Server::start(bare::command(&socket, &files, false)?, socket)
    };
    let served = |name: &str, depth: u64, writable: bool| {
        let mut image = chain(settings, depth)?;
        if writable {
            // A reader of the image keeps writers out.
            let copy = image.with_file_name("writable.qcow2");
            std::fs::copy(&image, &copy).map_err(|e| format!("{}: {e}", copy.display()))?;
            image = copy;
        }
        let layers = image.parent().into_iter().flat_map(std::fs::read_dir).flatten().flatten();
        layers.map(|layer| layer.path()).try_for_each(|layer| read_once(&layer))?;
        let [file, node] = plainly("", Access { writable, direct: false });
        let mut command = Command::new(&settings.cowshed);
        command.arg("qemu-storage-daemon");
        let serving = Serving { image: &image, format: "qcow2", file: &file, node: &node, writable, program: &[] };
        serve_by(settings, command, name, &serving)
    };
    let servers = [
        served("deep.sock", DEEPEST, false)?,
        served("deep-writable.sock", DEEPEST, true)?,
        served("one.sock", 1, false)?,
        bare("bare-many.sock", DEEPEST)?,
        bare("bare-one.sock", 1)?,
    ];
    let nothing_written = Path::new("");
    let servers: Vec<(&Server, &Path)> = servers.iter().map(|server| (server, nothing_written)).collect();
    let mut runs = in_turns(settings, &servers, random_4k(CHAIN_BYTES))?.into_iter();
    let mut next = || runs.next().unwrap_or_default();
    let [deep, writable, one] = [next(), next(), next()];
    let ours = Outcome::Beside { ours: deep, theirs: one.clone(), limit: None };
    let written_to = Outcome::Beside { ours: writable, theirs: one, limit: None };
    let limit = Outcome::Beside { ours: next(), theirs: next(), limit: None };
    Ok(vec![
        Row::new(format!("chain of {DEEPEST}, theirs is ours with one image: randread 4k"), "≥ 0.9", ours),
        Row::new("the same, the uppermost image writable: randread 4k", "≥ 0.9", written_to),
        Row::new(format!("bare server with {DEEPEST} raw files, theirs has one: randread 4k"), "the limit", limit),
    ])
}

/// Brings a file into the page cache.
fn read_once(path: &Path) -> Result<(), String> {
    let read = File::open(path).and_then(|mut file| std::io::copy(&mut file, &mut std::io::sink()));
    read.map(drop).map_err(|e| format!("{}: {e}", path.display()))
}

/// A raw file full of data, one for each index and length.
fn pieces(settings: &Settings, index: u64, bytes: u64) -> Result<PathBuf, String> {
    let path = settings.folder.join(format!("piece-{index}-of-{bytes}.raw"));
    if !path.exists() {
        let partial = path.with_extension("partial");
        // In writes of a cluster, as the layers are written: the page cache keeps the bytes of one write together.
        let data = vec![index as u8 | 1; CLUSTER as usize];
        let written = File::create(&partial)
            .and_then(|mut file| (0..bytes / CLUSTER).try_for_each(|_| std::io::Write::write_all(&mut file, &data)));
        written.map_err(|e| format!("{}: {e}", path.display()))?;
        std::fs::rename(&partial, &path).map_err(|e| format!("{}: {e}", path.display()))?;
    }
    Ok(path)
}

/// Small and large reads of compressed images.
pub fn compressed(settings: &Settings) -> Result<Vec<Row>, String> {
    let source = fixture::full(settings)?;
    let bytes = std::fs::metadata(&source).map_err(|e| e.to_string())?.len();
    let mut rows = Vec::new();
    for (method, targets) in [
        ("zlib", ["≥ 2×, CPU ≤ 0.5", "≥ 10×", "≥ 1.7×", "≥ 6×"]),
        ("zstd", ["≥ 1.2×, CPU ≤ 0.8", "≥ 5×", "≥ 1.5×", "≥ 6×"]),
    ] {
        let options = ["-c", "-o", &format!("compression_type={method}")];
        let image = fixture::converted(settings, &source, &format!("compressed-{method}"), &options)?;
        let loads = [
            ("random 4k over all", Load { pattern: "randread", block: "4k", depth: 8, bytes }),
            ("random 4k within 32 MiB", Load { pattern: "randread", block: "4k", depth: 8, bytes: 32 * MIB }),
            ("sequential 64k", Load { pattern: "read", block: "64k", depth: 1, bytes }),
            ("sequential 4k", Load { pattern: "read", block: "4k", depth: 1, bytes }),
        ];
        for ((name, load), target) in loads.into_iter().zip(targets) {
            let name = format!("compressed by {method}: {name}");
            // One request at a time costs the waking of the server, whatever it does then: the raw file shows it.
            let case = Case { limit: Some(&source), ..cached(name, &image, load, target) };
            rows.extend(run(settings, &case)?);
        }
    }
    Ok(rows)
}

/// Serves the image to one load after the other, on each side in turns.
pub fn run(settings: &Settings, case: &Case) -> Result<Option<Row>, String> {
    if settings.only.as_ref().is_some_and(|only| !case.name.contains(only.as_str())) {
        return Ok(None);
    }
    let writes = case.load.pattern.ends_with("write");
    let mut copies = Copies(Vec::new());
    let mut of = |source: &Path, side: Side| match writes {
        true => copies.add(source, settings.folder.join(format!("{side:?}.work").to_lowercase())),
        false => Ok(source.to_owned()),
    };
    let (our_image, their_image) = (of(case.image, Side::Ours)?, of(case.image, Side::Theirs)?);
    let how = Access { writable: writes, direct: case.direct };
    let ours = serve(settings, Side::Ours, &our_image, "qcow2", case.options, how)?;
    let their_options = case.their_options.unwrap_or(case.options);
    let theirs = serve(settings, Side::Theirs, &their_image, "qcow2", their_options, how)?;
    let limit = match case.limit {
        Some(raw) => {
            let raw = of(raw, Side::Limit)?;
            Some((serve(settings, Side::Limit, &raw, "raw", "", how)?, raw))
        }
        None => None,
    };
    let mut servers = vec![(&ours, our_image.as_path()), (&theirs, their_image.as_path())];
    servers.extend(limit.as_ref().map(|(server, raw)| (server, raw.as_path())));
    let mut runs = in_turns(settings, &servers, case.load)?.into_iter();
    let (ours, theirs) = (runs.next().unwrap_or_default(), runs.next().unwrap_or_default());
    let result = Outcome::Beside { ours, theirs, limit: runs.next() };
    Ok(Some(Row::new(case.name.clone(), case.target, result)))
}

/// Has fio load each server for a second, then in turns; returns the measurements of each one's rounds.
pub fn in_turns(settings: &Settings, servers: &[(&Server, &Path)], load: Load) -> Result<Vec<Vec<Served>>, String> {
    let mut runs = vec![Vec::new(); servers.len()];
    for (server, image) in servers {
        fio(settings, server, image, load, 1)?;
    }
    for round in 0..settings.rounds {
        for turn in 0..servers.len() {
            let side = (round + turn) % servers.len();
            let (server, image) = servers[side];
            runs[side].push(fio(settings, server, image, load, settings.seconds)?);
        }
    }
    Ok(runs)
}

/// Images that are written to, removed at the end.
struct Copies(Vec<PathBuf>);

impl Copies {
    fn add(&mut self, source: &Path, path: PathBuf) -> Result<PathBuf, String> {
        std::fs::copy(source, &path).map_err(|e| format!("{}: {e}", path.display()))?;
        self.0.push(path.clone());
        Ok(path)
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        self.0.iter().for_each(|path| drop(std::fs::remove_file(path)));
    }
}

/// The server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Ours,
    Theirs,
    /// Ours with the raw file.
    Limit,
}

/// The server's access to an image.
#[derive(Clone, Copy)]
pub struct Access {
    /// Write to it.
    pub writable: bool,
    /// Past the page cache.
    pub direct: bool,
}

/// An image, and the options of its nodes.
#[derive(Clone, Copy)]
pub struct Serving<'a> {
    /// Its file.
    pub image: &'a Path,
    /// Its format.
    pub format: &'a str,
    /// Options of the file node, beside its name.
    pub file: &'a str,
    /// Options of the node on top.
    pub node: &'a str,
    /// Whether clients may write.
    pub writable: bool,
    /// Options of the program.
    pub program: &'a [&'a str],
}

/// A daemon with an image. Both sides use io_uring.
pub fn serve(
    settings: &Settings,
    side: Side,
    image: &Path,
    format: &str,
    options: &str,
    how: Access,
) -> Result<Server, String> {
    let [file, node] = plainly(options, how);
    serve_with(
        settings,
        side,
        &Serving { image, format, file: &file, node: &node, writable: how.writable, program: &[] },
    )
}

/// The options of the two nodes.
pub fn plainly(options: &str, how: Access) -> [String; 2] {
    let cache = format!("cache.direct={}", if how.direct { "on" } else { "off" });
    let node = if options.is_empty() { cache.clone() } else { format!("{cache},{options}") };
    [format!("{cache},aio=io_uring"), node]
}

/// A daemon with an image, with any options.
pub fn serve_with(settings: &Settings, side: Side, serving: &Serving) -> Result<Server, String> {
    let mut command = match side {
        Side::Theirs => Command::new(settings.qemu.with_file_name("qemu-storage-daemon")),
        Side::Ours | Side::Limit => Command::new(&settings.cowshed),
    };
    if side != Side::Theirs {
        command.arg("qemu-storage-daemon");
    }
    serve_by(settings, command, &format!("{side:?}.sock").to_lowercase(), serving)
}

/// As [`serve_with`], by a command that lacks nothing but the image; `socket` is the name of its socket.
pub fn serve_by(settings: &Settings, mut command: Command, socket: &str, serving: &Serving) -> Result<Server, String> {
    let Serving { image, format, file, node, writable, program } = *serving;
    // For encrypted images.
    command.args(program).args(["--object", "secret,id=s,data=passphrase"]);
    let socket = settings.folder.join(socket);
    let more = |options: &str| if options.is_empty() { String::new() } else { format!(",{options}") };
    let (read_only, on) = if writable { ("off", "on") } else { ("on", "off") };
    command.args([
        "--blockdev",
        &format!("file,node-name=f,filename={},read-only={read_only}{}", image.display(), more(file)),
        "--blockdev",
        &format!("{format},node-name=disk,file=f,read-only={read_only}{}", more(node)),
        "--nbd-server",
        &format!("addr.type=unix,addr.path={},max-connections=16", socket.display()),
        "--export",
        &format!("nbd,id=e,node-name=disk,writable={on}"),
    ]);
    let server = Server::start(command, socket.clone())?;
    await_export(settings, &socket)?;
    Ok(server)
}

/// Waits for the export "disk": the socket is there before it is.
pub fn await_export(settings: &Settings, socket: &Path) -> Result<(), String> {
    let uri = format!("nbd+unix:///disk?socket={}", socket.display());
    let started = Instant::now();
    while !Command::new(&settings.qemu).args(["info", &uri]).output().is_ok_and(|output| output.status.success()) {
        if started.elapsed() > Duration::from_secs(60) {
            return Err(format!("{uri} isn't there after a minute"));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Has fio load a server of `image` for this many seconds.
pub fn fio(settings: &Settings, server: &Server, image: &Path, load: Load, seconds: u64) -> Result<Served, String> {
    let how = [
        "--time_based".to_owned(),
        format!("--runtime={seconds}"),
        format!("--rw={}", load.pattern),
        format!("--bs={}", load.block),
        format!("--iodepth={}", load.depth),
        format!("--size={}", load.bytes),
    ];
    server.load(settings, &how, load.pattern.ends_with("write").then_some(image))
}

/// A sparse raw file.
fn sparse(settings: &Settings, bytes: u64) -> Result<PathBuf, String> {
    let path = settings.folder.join(format!("sparse-{}g.raw", bytes / GIB));
    let file = std::fs::OpenOptions::new().write(true).create(true).truncate(false).open(&path);
    file.and_then(|file| file.set_len(bytes)).map_err(|e| format!("{}: {e}", path.display()))?;
    Ok(path)
}

/// An image of which every cluster has its place in the file, in order, made by qemu-img.
pub fn mapped(settings: &Settings, name: &str, options: &str, bytes: u64) -> Result<PathBuf, String> {
    let path = settings.folder.join(format!("{name}.qcow2"));
    create(settings, &path, &["-o", &format!("preallocation=metadata,{options}")], bytes)?;
    Ok(path)
}

fn create(settings: &Settings, path: &Path, options: &[&str], bytes: u64) -> Result<(), String> {
    if path.exists() {
        return Ok(());
    }
    let partial = path.with_extension("partial");
    let mut command = Command::new(&settings.qemu);
    command.args(["create", "-q", "-f", "qcow2"]).args(options).arg(&partial).arg(bytes.to_string());
    let output = command.output().map_err(|e| format!("could not run {command:?}: {e}"))?;
    if !output.status.success() {
        return Err(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr).trim()));
    }
    std::fs::rename(&partial, path).map_err(|e| format!("{}: {e}", path.display()))
}

/// Writes 4 KiB into each of `clusters`.
fn touch(path: &Path, clusters: impl Iterator<Item = u64>, bytes: usize) -> Result<(), String> {
    let work = async {
        let node = open(OpenRequest::file(path.to_string_lossy()).format("qcow2").writable(true)).await?;
        let mut buffer = IoBuf::zeroed(bytes);
        for cluster in clusters {
            buffer.fill(cluster as u8 | 1);
            let (result, back) = node.write(cluster * CLUSTER, buffer).await;
            buffer = back;
            result?;
        }
        node.close().await
    };
    rt::block_on(work).map_err(|error| error.to_string())
}

/// An image whose clusters were first written in random order.
pub fn scattered(settings: &Settings, bytes: u64) -> Result<PathBuf, String> {
    let path = settings.folder.join("scattered-20g.qcow2");
    if !path.exists() {
        let unfinished = path.with_extension("unfinished");
        let _ = std::fs::remove_file(&unfinished);
        create(settings, &unfinished, &["-o", "cluster_size=64k"], bytes)?;
        let mut clusters: Vec<u64> = (0..bytes / CLUSTER).collect();
        let mut random = Random::new(1);
        for last in (1..clusters.len()).rev() {
            clusters.swap(last, random.below(last as u64 + 1) as usize);
        }
        touch(&unfinished, clusters.into_iter(), 4096)?;
        std::fs::rename(&unfinished, &path).map_err(|e| format!("{}: {e}", path.display()))?;
    }
    Ok(path)
}

/// A chain of this many images, each with its share of the clusters. Gives the top.
pub fn chain(settings: &Settings, depth: u64) -> Result<PathBuf, String> {
    let folder = settings.folder.join(format!("chain-{depth}"));
    let top = folder.join(format!("{}.qcow2", depth - 1));
    if top.exists() {
        return Ok(top);
    }
    let _ = std::fs::remove_dir_all(&folder);
    let partial = settings.folder.join("chain.partial");
    let _ = std::fs::remove_dir_all(&partial);
    std::fs::create_dir_all(&partial).map_err(|e| format!("{}: {e}", partial.display()))?;
    for layer in 0..depth {
        let path = partial.join(format!("{layer}.qcow2"));
        let below = format!("{}.qcow2", layer.saturating_sub(1));
        let backing = ["-b", below.as_str(), "-F", "qcow2"];
        create(settings, &path, if layer == 0 { &[] } else { &backing }, CHAIN_BYTES)?;
        let mine = (0..CHAIN_BYTES / CLUSTER).filter(|cluster| Random::new(*cluster).below(depth) == layer);
        touch(&path, mine, CLUSTER as usize)?;
    }
    std::fs::rename(&partial, &folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    Ok(top)
}
