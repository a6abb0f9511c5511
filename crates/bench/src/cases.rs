// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The cases, one line each in [`CASES`].

use crate::Settings;
use crate::copies;
use crate::exports;
use crate::fixture;
use crate::formats;
use crate::large;
use crate::luks;
use crate::means;
use crate::measure::alternate;
use crate::memory;
use crate::nbd;
use crate::opening;
use crate::options;
use crate::queues;
use crate::random_io;
use crate::reads;
use crate::snapshots;
use crate::table::{Outcome, Row};
use crate::vhost;
use crate::writes;
use cowshed_testkit::bigimage::{self, Placement};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// One measurement.
pub struct Case {
    /// Its name on the command line.
    pub name: &'static str,
    /// The measured work.
    pub about: &'static str,
    /// Runs it.
    pub run: fn(&Settings) -> Result<Vec<Row>, String>,
}

/// All cases.
pub const CASES: &[Case] = &[
    Case { name: "info", about: "info on a fully allocated 1 TiB image", run: info },
    Case { name: "check", about: "check of a fully allocated 1 TiB image", run: check },
    Case { name: "check-scattered", about: "the same with every cluster far from the next", run: check_scattered },
    Case { name: "raw-to-qcow2", about: "convert a half-full raw image to qcow2", run: raw_to_qcow2 },
    Case { name: "qcow2-to-raw", about: "convert a half-full qcow2 image to raw", run: qcow2_to_raw },
    Case { name: "copies", about: "convert of full, sparse and hole-rich images", run: copies::here },
    Case { name: "copies-xfs", about: "the same on XFS, which can share clusters (as root)", run: copies::xfs },
    Case { name: "compress", about: "convert -c with zlib and zstd", run: compress },
    Case { name: "decompress", about: "convert compressed images to raw", run: decompress },
    Case { name: "luks", about: "encrypted images to raw and back", run: luks::run },
    Case { name: "luks-served", about: "encrypted images over NBD", run: luks::served },
    Case { name: "random-read", about: "4 KiB reads at depth 32 through the library", run: random_io::read },
    Case { name: "random-write", about: "4 KiB overwrites at depth 32 through the library", run: random_io::overwrite },
    Case { name: "queues", about: "reads from one and from two queues through the library", run: queues::run },
    Case { name: "snapshot", about: "internal snapshots of 200 GiB that are mapped", run: snapshots::run },
    Case { name: "nbd", about: "beside qemu-nbd, through the page cache", run: nbd::nbd },
    Case { name: "nbd-direct", about: "the same past the page cache", run: nbd::nbd_direct },
    Case { name: "daemon", about: "beside qemu-storage-daemon, through the page cache", run: nbd::daemon },
    Case { name: "daemon-direct", about: "the same past the page cache", run: nbd::daemon_direct },
    Case { name: "fuse", about: "a FUSE file beside that of qemu-storage-daemon", run: exports::fuse },
    Case { name: "vhost", about: "vhost-user-blk beside that of qemu-storage-daemon", run: exports::vhost },
    Case {
        name: "vhost-driver",
        about: "the same under a driver of our own: queues, direct, allocating",
        run: vhost::run,
    },
    Case { name: "idle-images", about: "memory of a daemon with 200 images", run: nbd::idle },
    Case { name: "mapping", about: "random reads over NBD against the size of the L2 cache", run: reads::mapping },
    Case { name: "mapping-sizes", about: "the sizes of the L2 cache against each other", run: reads::mapping_sizes },
    Case { name: "mapping-others", about: "the same, scattered, and with large clusters", run: reads::mapping_others },
    Case { name: "chains", about: "random reads over NBD through 1 to 64 layers", run: reads::chains },
    Case { name: "chain-depths", about: "a chain of 64 against one image, and the limit", run: reads::chain_depths },
    Case { name: "compressed", about: "reads over NBD of compressed images", run: reads::compressed },
    Case { name: "cold", about: "opening with an empty page cache (as root)", run: opening::cold },
    Case { name: "overlays", about: "memory of many overlays of one base", run: opening::overlays },
    Case { name: "allocate", about: "writes over NBD that need clusters, over a backing file", run: writes::overlays },
    Case { name: "allocate-empty", about: "the same without a backing file, and preallocated", run: writes::empty },
    Case {
        name: "formats",
        about: "convert to VMDK, VHD, VHDX, VDI, QED, qcow, Parallels and back",
        run: formats::conversions,
    },
    Case { name: "formats-read", about: "random reads over NBD of their dynamic kinds", run: formats::reads },
    Case { name: "formats-write", about: "random writes over NBD to empty ones", run: formats::writes },
    Case { name: "options", about: "each option on and off, of servers and of convert", run: options::run },
    Case { name: "map", about: "map of fully allocated large images", run: large::map },
    Case { name: "measure", about: "measure of a fully allocated 1 TiB image", run: large::measure },
    Case { name: "compare", about: "compare a raw and a qcow2 image", run: large::compare },
    Case { name: "commit", about: "commit an overlay with a quarter of the disk", run: large::commit },
    Case { name: "means", about: "each optimisation, with it and without (scripts/without)", run: means::run },
    Case { name: "rebase", about: "rebase the same overlay to no backing file", run: large::rebase },
];

fn info(settings: &Settings) -> Result<Vec<Row>, String> {
    let image = terabyte(settings, Placement::Contiguous)?;
    let pairs = alternate(
        settings.rounds.max(11),
        &|| Ok(command(&settings.cowshed, &["info", "-f", "qcow2"], &[&image])),
        &|| Ok(command(&settings.qemu, &["info", "-f", "qcow2"], &[&image])),
    )?;
    Ok(vec![row("info, 1 TiB allocated", "≤ 10 ms CPU", Outcome::Pair { pairs, our_bytes: 0, their_bytes: 0 })])
}

fn check(settings: &Settings) -> Result<Vec<Row>, String> {
    Ok(vec![check_of(settings, Placement::Contiguous, settings.rounds, "check, 1 TiB allocated in order")?])
}

fn check_scattered(settings: &Settings) -> Result<Vec<Row>, String> {
    // One round: QEMU takes minutes.
    Ok(vec![check_of(settings, Placement::Scattered, 1, "check, 1 TiB allocated, scattered (one round)")?])
}

fn check_of(settings: &Settings, placement: Placement, rounds: usize, name: &str) -> Result<Row, String> {
    let image = terabyte(settings, placement)?;
    let pairs = alternate(rounds, &|| Ok(command(&settings.cowshed, &["check", "-f", "qcow2"], &[&image])), &|| {
        Ok(command(&settings.qemu, &["check", "-f", "qcow2"], &[&image]))
    })?;
    Ok(row(name, "≥ 3×, peak < 256 MiB", Outcome::Pair { pairs, our_bytes: 0, their_bytes: 0 }))
}

fn raw_to_qcow2(settings: &Settings) -> Result<Vec<Row>, String> {
    let source = fixture::half_full(settings)?;
    let best = ["-f", "raw", "-O", "qcow2", "-W", "-m", "16"];
    Ok(vec![
        convert(settings, "raw → qcow2", "≥ 1×", &source, &best[..4], &best[..4])?,
        convert(settings, "raw → qcow2, theirs with -W -m 16", "≥ 1×", &source, &best[..4], &best)?,
    ])
}

fn qcow2_to_raw(settings: &Settings) -> Result<Vec<Row>, String> {
    let source = fixture::converted(settings, &fixture::half_full(settings)?, "half-full", &[])?;
    let best = ["-f", "qcow2", "-O", "raw", "-W", "-m", "16"];
    Ok(vec![
        convert(settings, "qcow2 → raw", "≥ 1×", &source, &best[..4], &best[..4])?,
        convert(settings, "qcow2 → raw, theirs with -W -m 16", "≥ 1×", &source, &best[..4], &best)?,
    ])
}

fn compress(settings: &Settings) -> Result<Vec<Row>, String> {
    let source = fixture::full(settings)?;
    let zlib = ["-c", "-f", "raw", "-O", "qcow2"];
    let wide = [&zlib[..], &["--compression-window", "32k"]].concat();
    let zstd = [&zlib[..], &["-o", "compression_type=zstd"]].concat();
    Ok(vec![
        convert(settings, "compress, zlib", "≥ 2×, size ≤ 103 %", &source, &zlib, &zlib)?,
        convert(settings, "compress, zlib with a 32 KiB window", "≥ 3.5×, size ≤ 100 %", &source, &wide, &zlib)?,
        convert(settings, "compress, zstd", "≥ 2×", &source, &zstd, &zstd)?,
    ])
}

fn decompress(settings: &Settings) -> Result<Vec<Row>, String> {
    let source = fixture::full(settings)?;
    let zlib = fixture::converted(settings, &source, "zlib", &["-c"])?;
    let zstd = fixture::converted(settings, &source, "zstd", &["-c", "-o", "compression_type=zstd"])?;
    let options = ["-f", "qcow2", "-O", "raw"];
    Ok(vec![
        convert(settings, "decompress, zlib", "≥ 2×", &zlib, &options, &options)?,
        convert(settings, "decompress, zstd", "≥ 2×", &zstd, &options, &options)?,
    ])
}

/// A conversion of `source` by both sides.
pub fn convert(
    settings: &Settings,
    name: &str,
    target: &'static str,
    source: &Path,
    our_options: &[&str],
    their_options: &[&str],
) -> Result<Row, String> {
    let (ours, theirs) = (settings.folder.join("ours.out"), settings.folder.join("theirs.out"));
    // Both outputs go before each run: no side pays for writing the other's pages back, or for giving its space back.
    let clear = || {
        for output in [&ours, &theirs] {
            if output.exists() {
                std::fs::remove_file(output).map_err(|e| format!("{}: {e}", output.display()))?;
            }
        }
        large::done(&mut Command::new("sync"))
    };
    let prepared = |program: &Path, options: &[&str], output: &Path| {
        clear()?;
        memory::back(3 * settings.size_mib / 2)?;
        Ok(command(program, &[&["convert"], options].concat(), &[source, output]))
    };
    let bytes_of = |recipe: &dyn Fn() -> Result<Command, String>, output: &Path| {
        let status = recipe()?.stdout(Stdio::null()).status().map_err(|e| e.to_string())?;
        if !status.success() {
            return Err(format!("{name}: {status}"));
        }
        allocated(output)
    };
    let our_recipe = || prepared(&settings.cowshed, our_options, &ours);
    let their_recipe = || prepared(&settings.qemu, their_options, &theirs);
    let (our_bytes, their_bytes) = (bytes_of(&our_recipe, &ours)?, bytes_of(&their_recipe, &theirs)?);
    let pairs = alternate(settings.rounds, &our_recipe, &their_recipe)?;
    clear()?;
    Ok(row(name, target, Outcome::Pair { pairs, our_bytes, their_bytes }))
}

/// A program with options and files.
pub fn command(program: &Path, arguments: &[&str], files: &[&Path]) -> Command {
    let mut command = Command::new(program);
    command.args(arguments).args(files);
    command
}

/// A line of the table.
pub fn row(name: &str, target: &'static str, result: Outcome) -> Row {
    Row::new(name, target, result)
}

/// Bytes that a file takes on disk.
pub fn allocated(path: &Path) -> Result<u64, String> {
    use std::os::unix::fs::MetadataExt;
    let metadata = std::fs::metadata(path).map_err(|e| format!("{}: {e}", path.display()))?;
    Ok(metadata.blocks() * 512)
}

/// The image whose metadata has all of 1 TiB as allocated; its data are holes.
pub fn terabyte(settings: &Settings, placement: Placement) -> Result<PathBuf, String> {
    let path = settings.folder.join(format!("terabyte-{placement:?}.qcow2").to_lowercase());
    if !path.exists() {
        let partial = path.with_extension("partial");
        bigimage::build(&partial, 1 << 40, 16, placement).map_err(|error| error.to_string())?;
        std::fs::rename(&partial, &path).map_err(|e| format!("{}: {e}", path.display()))?;
    }
    Ok(path)
}
