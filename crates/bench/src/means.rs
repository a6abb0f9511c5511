// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Each optimisation, with it and without it, by one program in turns. `scripts/without` builds `cowshed` with a switch
//! for each one that no option switches off.

use crate::Settings;
use crate::cases::{allocated, command, terabyte};
use crate::copies::Mounted;
use crate::fixture::{self, Kind};
use crate::large::{self, done};
use crate::measure::once;
use crate::memory;
use crate::nbd::{Served, resident_bytes};
use crate::opening::serve_touched;
use crate::reads::{self, Access, Load as Reads, Serving, chain, fio, mapped, serve_by};
use crate::table::{Cost, Outcome, Row};
use crate::writes::{self, Fresh};
use cowshed_testkit::bigimage::{self, Placement};
use cowshed_testkit::means::{MEANS, VARIABLE};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// One row.
struct Means {
    /// Its name.
    name: &'static str,
    /// The start of the program with it.
    with: How,
    /// The start of the program without it.
    without: How,
    /// The name of the side without it, where no switch of the list has one.
    instead: &'static str,
    load: Load,
}

/// The start of a program: its options and its switches.
#[derive(Clone, Copy)]
struct How {
    /// Names of [`MEANS`] that are switched off, with commas between them.
    off: &'static str,
    arguments: &'static [&'static str],
    environment: &'static [(&'static str, &'static str)],
}

const AS_IT_IS: How = How { off: "", arguments: &[], environment: &[] };

/// A means that a switch takes away.
const fn switched(name: &'static str, off: &'static str, load: Load) -> Means {
    Means { name, with: AS_IT_IS, without: How { off, ..AS_IT_IS }, instead: "", load }
}

type Image = fn(&Settings) -> Result<PathBuf, String>;

/// The work of both sides.
enum Load {
    /// Reads of a qcow2 image over NBD.
    Reads {
        name: &'static str,
        image: Image,
        options: &'static str,
        direct: bool,
        how: fn(&Settings) -> Reads,
        /// Both sides are compared from end to end afterwards.
        compared: bool,
    },
    /// Writes over NBD to a fresh image.
    Writes { name: &'static str, options: &'static str, over_backing: bool, how: fn(&Settings) -> Vec<String> },
    /// `convert` between two formats.
    Convert {
        name: &'static str,
        source: Image,
        from: &'static str,
        to: &'static str,
        arguments: &'static [&'static str],
        /// On a file system that shares clusters.
        on_xfs: bool,
        /// The bytes of the row are the new image's, not the peak of memory.
        size: bool,
    },
    /// `check` of 1 TiB of metadata.
    Check { name: &'static str, placement: Placement },
    /// A daemon with this many images, of which each was read a little everywhere.
    Memory { name: &'static str, images: usize, overlays: bool },
}

impl Load {
    fn name(&self) -> &'static str {
        match self {
            Load::Reads { name, .. }
            | Load::Writes { name, .. }
            | Load::Convert { name, .. }
            | Load::Check { name, .. }
            | Load::Memory { name, .. } => name,
        }
    }
}

const fn reads(name: &'static str, image: Image, how: fn(&Settings) -> Reads) -> Load {
    Load::Reads { name, image, options: "", direct: false, how, compared: true }
}

/// Random reads past the page cache of 20 GiB, whose data are holes.
const fn mapping(name: &'static str, image: Image) -> Load {
    let options = "l2-cache-size=1M,l2-cache-entry-size=4096";
    Load::Reads { name, image, options, direct: true, how: |_| random(20 * GIB, 32), compared: false }
}

const fn writes(name: &'static str, over_backing: bool, how: fn(&Settings) -> Vec<String>) -> Load {
    Load::Writes { name, options: "cluster_size=64k", over_backing, how }
}

const fn convert(
    name: &'static str,
    source: Image,
    (from, to): (&'static str, &'static str),
    arguments: &'static [&'static str],
) -> Load {
    Load::Convert { name, source, from, to, arguments, on_xfs: false, size: false }
}

/// With `-c`: the size of the new image counts.
const fn compress(name: &'static str) -> Load {
    let (source, arguments): (Image, &[&str]) = (fixture::full, &["-c"]);
    Load::Convert { name, source, from: "raw", to: "qcow2", arguments, on_xfs: false, size: true }
}

const TO_QCOW2: (&str, &str) = ("raw", "qcow2");
const TO_RAW: (&str, &str) = ("qcow2", "raw");

const ROWS: &[Means] = &[
    switched("slices as runs", "compact_slices", mapping("randread 4k, 20 GiB in order, L2 cache 1 MiB", in_order)),
    switched(
        "slices as numbers of few bits",
        "compact_slices",
        mapping("randread 4k, 20 GiB in random order, L2 cache 1 MiB", |settings| reads::scattered(settings, 20 * GIB)),
    ),
    switched(
        "owners of granules",
        "owners_of_granules",
        reads("randread 4k, chain of 64", |settings| chain(settings, 64), |_| random(GIB, 32)),
    ),
    switched(
        "places of granules",
        "places_of_granules",
        reads("randread 4k, chain of 64", |settings| chain(settings, 64), |_| random(GIB, 32)),
    ),
    switched(
        "a read-only image passed over",
        "image_passed_over",
        reads("randread 4k, chain of 64", |settings| chain(settings, 64), |_| random(GIB, 32)),
    ),
    switched(
        "mapping of a base once",
        "mapping_of_a_base_once",
        Load::Memory { name: "16 overlays of 64 GiB scattered, all read", images: 16, overlays: true },
    ),
    Means {
        name: "one budget",
        with: How { arguments: &["--metadata-budget", "4M"], ..AS_IT_IS },
        without: AS_IT_IS,
        instead: "the default of 256 MiB, which these images don't reach (with it: `--metadata-budget 4M`)",
        load: Load::Memory { name: "8 images of 64 GiB scattered, all read", images: 8, overlays: false },
    },
    switched(
        "decompressed clusters kept",
        "decompressed_kept",
        reads("randread 4k in 32 MiB, zlib", zlib, |_| random(32 * MIB, 8)),
    ),
    switched("read-ahead", "read_ahead", reads("read 4k, zlib", zlib, |settings| in_turn(settings, "4k"))),
    switched("read-ahead", "read_ahead", reads("read 64k, zlib", zlib, |settings| in_turn(settings, "64k"))),
    switched("decoder of whole clusters", "whole_cluster_decoder", convert("convert, zlib to raw", zlib, TO_RAW, &[])),
    switched("encoder of clusters", "cluster_deflater", compress("convert -c, zlib")),
    Means {
        name: "encoder with a wide window",
        with: How { arguments: &["--compression-window", "32k"], ..AS_IT_IS },
        without: AS_IT_IS,
        instead: "the default, a window of 4 KiB (with it: `--compression-window 32k`)",
        load: compress("convert -c, zlib"),
    },
    switched("codecs on all cores", "all_cores", compress("convert -c, zlib")),
    switched("codecs on all cores", "all_cores", convert("convert, zlib to raw", zlib, TO_RAW, &[])),
    Means {
        name: "several pieces in flight",
        with: AS_IT_IS,
        without: How { arguments: &["-m", "1"], ..AS_IT_IS },
        instead: "`-m 1`",
        load: convert("convert, full qcow2 to raw", full_qcow2, TO_RAW, &[]),
    },
    switched(
        "zero search in vectors",
        "wide_zero_search",
        convert("convert, raw with zeroes written out to qcow2", zeroes_written, TO_QCOW2, &[]),
    ),
    switched("large pieces", "large_pieces", convert("convert, full raw to qcow2", full_raw, TO_QCOW2, &[])),
    switched(
        "extents joined",
        "joined_extents",
        reads("read 1m, depth 8", full_qcow2, |settings| Reads {
            pattern: "read",
            block: "1m",
            depth: 8,
            bytes: settings.size_mib / 2 * MIB,
        }),
    ),
    switched("extents joined", "joined_extents", convert("convert, full qcow2 to raw", full_qcow2, TO_RAW, &[])),
    switched(
        "vectored writes",
        "vectored_writes",
        writes("overlay, 64k: randwrite 32k", true, |settings| at_random(settings, 32, 10_000)),
    ),
    switched(
        "extents allocated at once",
        "extents_at_once",
        writes("empty image, 64k: write 1m", false, |settings| in_order_of(settings, 1024)),
    ),
    switched(
        "extents allocated at once",
        "extents_at_once",
        writes("empty image, 64k: randwrite 512k", false, |settings| at_random(settings, 512, 4_000)),
    ),
    switched(
        "copy in one read",
        "merged_copy",
        writes("overlay, 64k: randwrite 4k", true, |settings| at_random(settings, 4, 30_000)),
    ),
    Means {
        name: "copy in one read and one write",
        with: AS_IT_IS,
        without: How { off: "merged_copy,vectored_writes", ..AS_IT_IS },
        instead: "two reads and three writes",
        load: writes("overlay, 64k: randwrite 4k", true, |settings| at_random(settings, 4, 30_000)),
    },
    switched(
        "write-behind",
        "write_behind",
        writes("overlay, 64k: randwrite 4k", true, |settings| at_random(settings, 4, 30_000)),
    ),
    switched(
        "write-behind",
        "write_behind",
        writes("empty image, 64k: write 64k", false, |settings| in_order_of(settings, 64)),
    ),
    switched(
        "write-back late",
        "late_write_back",
        writes("empty image, 64k: randwrite 4k", false, |settings| at_random(settings, 4, 30_000)),
    ),
    switched("SEEK_DATA", "seek_data", convert("convert, sparse raw to qcow2", sparse_raw, TO_QCOW2, &[])),
    Means {
        name: "reflink",
        with: AS_IT_IS,
        without: How { arguments: &["--reflink=never"], ..AS_IT_IS },
        instead: "`--reflink=never`",
        load: Load::Convert {
            name: "convert, full raw to qcow2 on XFS",
            source: full_raw,
            from: "raw",
            to: "qcow2",
            arguments: &[],
            on_xfs: true,
            size: false,
        },
    },
    switched(
        "check in parallel",
        "check_in_parallel",
        Load::Check { name: "check, 1 TiB in order", placement: Placement::Contiguous },
    ),
    switched(
        "check in parallel",
        "check_in_parallel",
        Load::Check { name: "check, 1 TiB scattered", placement: Placement::Scattered },
    ),
    Means {
        name: "io_uring",
        with: AS_IT_IS,
        without: How { environment: &[("COWSHED_IO_ENGINE", "threads")], ..AS_IT_IS },
        instead: "`COWSHED_IO_ENGINE=threads`",
        load: mapping("randread 4k, 20 GiB in order", in_order),
    },
    polled("read 4k, zlib", zlib, |settings| in_turn(settings, "4k")),
    polled("read 4k, one at a time", full_qcow2, |settings| in_turn(settings, "4k")),
    polled("read 64k, one at a time", full_qcow2, |settings| in_turn(settings, "64k")),
    polled("randread 4k, four at a time", full_qcow2, |settings| random(settings.size_mib / 8 * MIB, 4)),
    polled("randread 4k, 32 at a time", full_qcow2, |settings| random(settings.size_mib / 8 * MIB, 32)),
];

/// Threads that serve look for requests before they sleep.
const fn polled(name: &'static str, image: Image, how: fn(&Settings) -> Reads) -> Means {
    let arguments = &["--object", "iothread,id=asleep,poll-max-ns=0"];
    let without = How { arguments, ..AS_IT_IS };
    Means {
        name: "looking before sleeping",
        with: AS_IT_IS,
        without,
        instead: "`--object iothread,id=ID,poll-max-ns=0`",
        load: reads(name, image, how),
    }
}

fn in_order(settings: &Settings) -> Result<PathBuf, String> {
    mapped(settings, "mapped-20g", "cluster_size=64k", 20 * GIB)
}

fn zlib(settings: &Settings) -> Result<PathBuf, String> {
    fixture::converted(settings, &fixture::full(settings)?, "zlib", &["-c"])
}

fn full_raw(settings: &Settings) -> Result<PathBuf, String> {
    fixture::of_kind(settings, Kind::Full)
}

fn full_qcow2(settings: &Settings) -> Result<PathBuf, String> {
    fixture::converted(settings, &full_raw(settings)?, "full", &[])
}

fn sparse_raw(settings: &Settings) -> Result<PathBuf, String> {
    fixture::of_kind(settings, Kind::Sparse)
}

/// A raw image, in turns 64 KiB of data and of zeroes that take space.
fn zeroes_written(settings: &Settings) -> Result<PathBuf, String> {
    let source = fixture::of_kind(settings, Kind::HoleRich)?;
    let path = source.with_extension("written.raw");
    if !path.exists() {
        let partial = path.with_extension("partial");
        done(Command::new("cp").args(["--sparse=never", "--reflink=never"]).arg(&source).arg(&partial))?;
        std::fs::rename(&partial, &path).map_err(|e| format!("{}: {e}", path.display()))?;
    }
    Ok(path)
}

const fn random(bytes: u64, depth: u32) -> Reads {
    Reads { pattern: "randread", block: "4k", depth, bytes }
}

/// One request at a time through an image of an eighth of the size.
fn in_turn(settings: &Settings, block: &'static str) -> Reads {
    Reads { pattern: "read", block, depth: 1, bytes: settings.size_mib / 8 * MIB }
}

/// Random writes: `requests` of them to a disk of 4 GiB, fewer to a smaller one.
fn at_random(settings: &Settings, block_kib: u64, requests: u64) -> Vec<String> {
    let requests = (requests * settings.size_mib / 4096).max(1);
    ["--rw=randwrite", "--iodepth=32", &format!("--bs={block_kib}k"), &format!("--number_ios={requests}")]
        .map(str::to_owned)
        .to_vec()
}

/// Half of the disk.
fn in_order_of(settings: &Settings, block_kib: u64) -> Vec<String> {
    let requests = settings.size_mib * 512 / block_kib;
    ["--rw=write", "--iodepth=8", &format!("--bs={block_kib}k"), &format!("--number_ios={requests}")]
        .map(str::to_owned)
        .to_vec()
}

/// Measures all rows, or those that `--only` names.
pub fn run(settings: &Settings) -> Result<Vec<Row>, String> {
    let wanted = |name: &str| settings.only.as_ref().is_none_or(|only| name.contains(only.as_str()));
    let named = ROWS.iter().map(|means| (format!("{}: {}", means.name, means.load.name()), means));
    let chosen: Vec<(String, &Means)> = named.filter(|(name, _)| wanted(name)).collect();
    knows_switches(&settings.without)?;
    let row = |(name, means): (String, &Means)| {
        // A resource that one row can't have, such as a file system, isn't needed by the others.
        let result = measured(settings, means).unwrap_or_else(Outcome::Failed);
        Ok(Row::new(name, instead(means)?, result))
    };
    chosen.into_iter().map(row).collect()
}

/// The behaviour without it.
fn instead(means: &Means) -> Result<&'static str, String> {
    if !means.instead.is_empty() {
        return Ok(means.instead);
    }
    let found = MEANS.iter().find(|known| known.name == means.without.off);
    found.map(|known| known.about).ok_or_else(|| format!("no switch is named {}", means.without.off))
}

/// Fails when the program isn't one with all switches: it would show that nothing pays.
fn knows_switches(program: &Path) -> Result<(), String> {
    let fail = |e: std::io::Error| format!("{}: {e} (scripts/without builds it)", program.display());
    let mut missing: Vec<&str> = std::iter::once(VARIABLE).chain(MEANS.iter().map(|means| means.name)).collect();
    let longest = missing.iter().map(|name| name.len()).max().unwrap_or_default();
    let mut file = std::fs::File::open(program).map_err(fail)?;
    // In pieces: programs start as copies of this one, and its peak of memory would be theirs.
    let mut piece = Vec::new();
    while !missing.is_empty() {
        let kept = piece.len().min(longest);
        piece.drain(..piece.len() - kept);
        if file.by_ref().take(MIB).read_to_end(&mut piece).map_err(fail)? == 0 {
            break;
        }
        missing.retain(|name| !piece.windows(name.len()).any(|part| part == name.as_bytes()));
    }
    match missing.first() {
        Some(name) => Err(format!("{} has no switch {name} (scripts/without builds it)", program.display())),
        None => Ok(()),
    }
}

/// The program with a verb, started in one way.
fn program(settings: &Settings, verb: &str, how: How) -> Command {
    let mut command = Command::new(&settings.without);
    command.arg(verb).args(how.arguments).env_remove(VARIABLE).envs(how.environment.iter().copied());
    if !how.off.is_empty() {
        command.env(VARIABLE, how.off);
    }
    command
}

/// Both sides in turns, with it first in even rounds.
fn in_turns(
    settings: &Settings,
    means: &Means,
    (requests, bytes): (bool, &'static str),
    run: &dyn Fn(usize, How) -> Result<Cost, String>,
) -> Result<Outcome, String> {
    let hows = [means.with, means.without];
    let mut costs = [Vec::new(), Vec::new()];
    for round in 0..settings.rounds {
        for turn in 0..2 {
            let side = (round + turn) % 2;
            costs[side].push(run(side, hows[side])?);
        }
    }
    let [with, without] = costs;
    Ok(Outcome::Means { with, without, requests, bytes })
}

fn measured(settings: &Settings, means: &Means) -> Result<Outcome, String> {
    match &means.load {
        Load::Reads { image, options, direct, how, compared, .. } => {
            let image = image(settings)?;
            served(settings, means, &image, options, *direct, how(settings), *compared)
        }
        Load::Writes { options, over_backing, how, .. } => {
            written(settings, means, options, *over_backing, how(settings))
        }
        Load::Convert { on_xfs: true, .. } => {
            let mounted = Mounted::new(settings)?;
            converted(&Settings { folder: mounted.folder.clone(), ..settings.clone() }, means)
        }
        Load::Convert { .. } => converted(settings, means),
        Load::Check { placement, .. } => checked(settings, means, *placement),
        Load::Memory { images, overlays, .. } => remembered(settings, means, *images, *overlays),
    }
}

fn of_request(served: Served, bytes: u64) -> Cost {
    Cost { seconds: 1.0 / served.per_second.max(1e-9), cpu_seconds: served.cpu_microseconds / 1e6, bytes }
}

/// Both servers stay up; the load goes to them in turns.
fn served(
    settings: &Settings,
    means: &Means,
    image: &Path,
    options: &str,
    direct: bool,
    load: Reads,
    compared: bool,
) -> Result<Outcome, String> {
    let sockets = ["with.sock", "without.sock"];
    let start = |side: usize, how: How| {
        let command = program(settings, "qemu-storage-daemon", how);
        {
            let how = Access { writable: false, direct };
            let [file, node] = reads::plainly(options, how);
            serve_by(
                settings,
                command,
                sockets[side],
                &Serving { image, format: "qcow2", file: &file, node: &node, writable: false, program: &[] },
            )
        }
    };
    let servers = [start(0, means.with)?, start(1, means.without)?];
    for server in &servers {
        fio(settings, server, image, load, 1)?;
    }
    let result = in_turns(settings, means, (true, "resident"), &|side, _| {
        let served = fio(settings, &servers[side], image, load, settings.seconds)?;
        Ok(of_request(served, resident_bytes(servers[side].id())?))
    })?;
    if compared {
        let uri = |name: &str| format!("nbd+unix:///disk?socket={}", settings.folder.join(name).display());
        let mut compare = Command::new(&settings.qemu);
        done(compare.args(["compare", "-f", "raw", "-F", "raw"]).args(sockets.map(uri)))?;
    }
    Ok(result)
}

fn written(
    settings: &Settings,
    means: &Means,
    options: &str,
    over_backing: bool,
    load: Vec<String>,
) -> Result<Outcome, String> {
    let base = if over_backing { Some(writes::base(settings, settings.size_mib)?) } else { None };
    let fresh = Fresh { format: "qcow2", options, base: base.as_deref(), mib: settings.size_mib };
    in_turns(settings, means, (true, "written"), &|_, how| {
        let start = |image: &Path| {
            let command = program(settings, "qemu-storage-daemon", how);
            {
                let [file, node] = reads::plainly("", Access { writable: true, direct: false });
                serve_by(
                    settings,
                    command,
                    "fresh.sock",
                    &Serving { image, format: "qcow2", file: &file, node: &node, writable: true, program: &[] },
                )
            }
        };
        let judge = |image: &Path| done(Command::new(&settings.qemu).args(["check", "-q", "-f", "qcow2"]).arg(image));
        let run = writes::written(settings, &fresh, load.clone(), &start, &judge)?;
        Ok(of_request(run.served, run.bytes))
    })
}

fn of_command(command: Command) -> Result<Cost, String> {
    let sample = once(command)?;
    Ok(Cost { seconds: sample.wall.as_secs_f64(), cpu_seconds: sample.cpu.as_secs_f64(), bytes: sample.peak_bytes })
}

fn converted(settings: &Settings, means: &Means) -> Result<Outcome, String> {
    let Load::Convert { source, from, to, arguments, size, .. } = &means.load else {
        return Err("not a conversion".into());
    };
    let source = source(settings)?;
    let outputs = ["with.out", "without.out"].map(|name| settings.folder.join(name));
    let clear = || {
        for output in outputs.iter().filter(|output| output.exists()) {
            std::fs::remove_file(output).map_err(|e| format!("{}: {e}", output.display()))?;
        }
        Ok::<(), String>(())
    };
    let convert = |side: usize, how: How| {
        let mut command = program(settings, "convert", how);
        command.args(["-f", from, "-O", to]).args(*arguments).arg(&source).arg(&outputs[side]);
        command
    };
    // Uncounted: they warm the page cache, and both images must have the source's data.
    clear()?;
    for (side, how) in [means.with, means.without].into_iter().enumerate() {
        once(convert(side, how))?;
        done(&mut command(&settings.qemu, &["compare", "-f", from, "-F", to], &[&source, &outputs[side]]))?;
    }
    let bytes = if *size { "of image" } else { "peak" };
    let result = in_turns(settings, means, (false, bytes), &|side, how| {
        // Both outputs go before each run: no side pays for writing the other's pages back.
        clear()?;
        memory::back(3 * settings.size_mib / 2)?;
        let cost = of_command(convert(side, how))?;
        Ok(if *size { Cost { bytes: allocated(&outputs[side])?, ..cost } } else { cost })
    });
    clear()?;
    result
}

fn checked(settings: &Settings, means: &Means, placement: Placement) -> Result<Outcome, String> {
    let image = terabyte(settings, placement)?;
    let check = |how: How| {
        let mut command = program(settings, "check", how);
        command.args(["-f", "qcow2"]).arg(&image);
        command
    };
    for how in [means.with, means.without] {
        once(check(how))?;
    }
    in_turns(settings, means, (false, "peak"), &|_, how| of_command(check(how)))
}

/// Size of the disks of [`Load::Memory`], and the distance of their reads: one in each range that a slice of 4 KiB
/// maps.
const REMEMBERED_GIB: u64 = 64;
const STEP_MIB: usize = 32;

fn remembered(settings: &Settings, means: &Means, images: usize, overlays: bool) -> Result<Outcome, String> {
    let folder = settings.folder.join("remembered");
    let fail = |e: std::io::Error| format!("{}: {e}", folder.display());
    std::fs::create_dir_all(&folder).map_err(fail)?;
    let paths: Vec<PathBuf> = (0..images).map(|index| folder.join(format!("{index}.qcow2"))).collect();
    for path in &paths {
        if overlays {
            let mut create = Command::new(&settings.qemu);
            create.args(["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b"]).arg(large::scattered(settings)?);
            done(create.arg(path))?;
        } else {
            bigimage::build(path, REMEMBERED_GIB * GIB, 16, Placement::Scattered).map_err(|e| e.to_string())?;
        }
    }
    let result = in_turns(settings, means, (false, "resident"), &|_, how| {
        let command = program(settings, "qemu-storage-daemon", how);
        let started = Instant::now();
        let size_mib = (REMEMBERED_GIB * GIB / MIB) as usize;
        let server = serve_touched(settings, command, &paths, STEP_MIB, size_mib)?;
        let seconds = started.elapsed().as_secs_f64();
        Ok(Cost { seconds, cpu_seconds: server.cpu_seconds()?, bytes: resident_bytes(server.id())? })
    });
    std::fs::remove_dir_all(&folder).map_err(fail)?;
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_switch_has_one_row() {
        let off: BTreeSet<&str> = ROWS.iter().flat_map(|means| means.without.off.split(',')).collect();
        let off: BTreeSet<&str> = off.into_iter().filter(|name| !name.is_empty()).collect();
        assert_eq!(off, MEANS.iter().map(|means| means.name).collect());
        let names: BTreeSet<String> =
            ROWS.iter().map(|means| format!("{}: {}", means.name, means.load.name())).collect();
        assert_eq!(names.len(), ROWS.len(), "two rows have one name");
        for means in ROWS {
            assert!(instead(means).is_ok_and(|text| !text.is_empty()), "{}", means.name);
            assert!(means.with.off.is_empty(), "{} is measured without another", means.name);
        }
    }

    #[test]
    fn a_program_without_switches_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let program = folder.path().join("program");
        let mut bytes = vec![b'x'; 3 * MIB as usize];
        std::fs::write(&program, &bytes).expect("a file");
        assert!(knows_switches(&program).is_err_and(|error| error.contains(VARIABLE)));
        // Across the border of two pieces, and one after the other.
        let names: Vec<&str> = std::iter::once(VARIABLE).chain(MEANS.iter().map(|means| means.name)).collect();
        let text = names.concat();
        let at = MIB as usize - VARIABLE.len() / 2;
        bytes[at..at + text.len()].copy_from_slice(text.as_bytes());
        std::fs::write(&program, &bytes).expect("a file");
        assert_eq!(knows_switches(&program), Ok(()));
    }
}
