// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Formats of other programs beside QEMU: conversions of a half-full disk, random reads and allocating writes over NBD.

use crate::Settings;
use crate::cases::{allocated, command};
use crate::fixture;
use crate::large::done;
use crate::measure::alternate;
use crate::memory;
use crate::reads::{Access, Load, Side, in_turns, serve};
use crate::table::{Outcome, Row};
use crate::writes::{Fresh, written};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

const MIB: u64 = 1 << 20;

/// A format and how its images are made.
struct Format {
    name: &'static str,
    driver: &'static str,
    /// Of `create` and `convert`.
    options: &'static str,
    /// The goal of a conversion to it.
    target: &'static str,
    /// Whether a virtual machine has its disks in it: it is served, too.
    is_served: bool,
}

const fn plain(name: &'static str, driver: &'static str, options: &'static str, is_served: bool) -> Format {
    Format { name, driver, options, target: "≥ 1.2×, peak ≤ 128 MiB", is_served }
}

const FORMATS: &[Format] = &[
    plain("vmdk, sparse", "vmdk", "subformat=monolithicSparse", true),
    plain("vmdk, flat", "vmdk", "subformat=monolithicFlat", false),
    plain("vmdk, sparse files of 2 GB", "vmdk", "subformat=twoGbMaxExtentSparse", false),
    plain("vmdk, flat files of 2 GB", "vmdk", "subformat=twoGbMaxExtentFlat", false),
    Format {
        name: "vmdk, stream",
        driver: "vmdk",
        options: "subformat=streamOptimized",
        target: "≥ 2×, peak ≤ 128 MiB",
        is_served: false,
    },
    plain("vhd, dynamic", "vpc", "subformat=dynamic,force_size=on", true),
    plain("vhd, fixed", "vpc", "subformat=fixed,force_size=on", false),
    plain("vhdx, dynamic", "vhdx", "subformat=dynamic", true),
    plain("vhdx, fixed", "vhdx", "subformat=fixed", false),
    plain("vdi, dynamic", "vdi", "static=off", true),
    plain("vdi, static", "vdi", "static=on", false),
    plain("qed", "qed", "cluster_size=64k", false),
    plain("qcow", "qcow", "", false),
    plain("parallels", "parallels", "", false),
];

fn wanted(settings: &Settings) -> impl Iterator<Item = &'static Format> {
    FORMATS.iter().filter(|format| settings.only.as_ref().is_none_or(|only| format.name.contains(only.as_str())))
}

impl Format {
    /// `-o` with the options, where there are some.
    fn options(&self) -> Vec<&'static str> {
        if self.options.is_empty() { Vec::new() } else { vec!["-o", self.options] }
    }

    /// The half-full disk in this format, by qemu-img. Disks of several files have a folder of their own.
    fn image(&self, settings: &Settings) -> Result<PathBuf, String> {
        let name = format!("{}-{}", self.name.replace([',', ' '], ""), settings.size_mib);
        let folder = settings.folder.join(name);
        let image = folder.join("disk");
        if !image.exists() {
            let source = fixture::half_full(settings)?;
            let started = Instant::now();
            let partial = settings.folder.join("format.partial");
            emptied(&partial)?;
            let how = [&["convert", "-f", "raw", "-O", self.driver], &self.options()[..]].concat();
            done(&mut command(&settings.qemu, &how, &[&source, &partial.join("disk")]))?;
            std::fs::rename(&partial, &folder).map_err(|e| format!("{}: {e}", folder.display()))?;
            fixture::made(&image, started);
        }
        Ok(image)
    }
}

/// Of raw disks to each format, and back.
pub fn conversions(settings: &Settings) -> Result<Vec<Row>, String> {
    let source = fixture::half_full(settings)?;
    let mut rows = Vec::new();
    for format in wanted(settings) {
        let to = [&["convert", "-f", "raw", "-O", format.driver], &format.options()[..]].concat();
        rows.push(convert(settings, &format!("raw → {}", format.name), format.target, &source, &to)?);
        let from = ["convert", "-f", format.driver, "-O", "raw"];
        let image = format.image(settings)?;
        rows.push(convert(settings, &format!("{} → raw", format.name), "≥ 1.2×, peak ≤ 128 MiB", &image, &from)?);
    }
    Ok(rows)
}

/// A conversion by both sides, each into a folder of its own.
fn convert(settings: &Settings, name: &str, target: &'static str, source: &Path, how: &[&str]) -> Result<Row, String> {
    let (ours, theirs) = (settings.folder.join("ours.out"), settings.folder.join("theirs.out"));
    // Both outputs go before each run: no side pays for writing the other's pages back, or for giving its space back.
    let prepared = |program: &Path, output: &Path| {
        emptied(&ours)?;
        emptied(&theirs)?;
        done(&mut Command::new("sync"))?;
        memory::back(3 * settings.size_mib / 2)?;
        Ok(command(program, how, &[source, &output.join("disk")]))
    };
    let bytes_of = |program: &Path, output: &Path| {
        done(&mut prepared(program, output)?)?;
        let files = std::fs::read_dir(output).map_err(|e| format!("{}: {e}", output.display()))?;
        files.flatten().try_fold(0, |sum, file| Ok::<_, String>(sum + allocated(&file.path())?))
    };
    let (our_bytes, their_bytes) = (bytes_of(&settings.cowshed, &ours)?, bytes_of(&settings.qemu, &theirs)?);
    let pairs =
        alternate(settings.rounds, &|| prepared(&settings.cowshed, &ours), &|| prepared(&settings.qemu, &theirs))?;
    for output in [&ours, &theirs] {
        std::fs::remove_dir_all(output).map_err(|e| format!("{}: {e}", output.display()))?;
    }
    Ok(Row::new(name, target, Outcome::Pair { pairs, our_bytes, their_bytes }))
}

/// Random reads of the half-full disk, from our daemon and from QEMU's.
pub fn reads(settings: &Settings) -> Result<Vec<Row>, String> {
    let load = Load { pattern: "randread", block: "4k", depth: 32, bytes: settings.size_mib * MIB };
    let mut rows = Vec::new();
    for format in wanted(settings).filter(|format| format.is_served) {
        let image = format.image(settings)?;
        let start = |side| serve(settings, side, &image, format.driver, "", Access { writable: false, direct: false });
        let (ours, theirs) = (start(Side::Ours)?, start(Side::Theirs)?);
        let mut runs = in_turns(settings, &[(&ours, &image), (&theirs, &image)], load)?.into_iter();
        let (ours, theirs) = (runs.next().unwrap_or_default(), runs.next().unwrap_or_default());
        let name = format!("{}: randread 4k", format.name);
        rows.push(Row::new(name, "≥ 1.5×", Outcome::Beside { ours, theirs, limit: None }));
    }
    Ok(rows)
}

/// The same number of requests in each run.
const LOAD: &[&str] = &["--rw=randwrite", "--bs=4k", "--iodepth=32", "--number_ios=30000"];

/// Random writes to an empty disk.
pub fn writes(settings: &Settings) -> Result<Vec<Row>, String> {
    let mut rows = Vec::new();
    for format in wanted(settings).filter(|format| format.is_served) {
        let fresh = Fresh { format: format.driver, options: format.options, base: None, mib: settings.size_mib };
        let run = |side| {
            let access = Access { writable: true, direct: false };
            let start = |image: &Path| serve(settings, side, image, format.driver, "", access);
            written(settings, &fresh, LOAD.iter().map(|&option| option.to_owned()).collect(), &start, &|_| Ok(()))
        };
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for round in 0..settings.rounds {
            if round % 2 == 0 {
                ours.push(run(Side::Ours)?);
                theirs.push(run(Side::Theirs)?);
            } else {
                theirs.push(run(Side::Theirs)?);
                ours.push(run(Side::Ours)?);
            }
        }
        let name = format!("{}, empty: randwrite 4k", format.name);
        rows.push(Row::new(name, "≥ 1.2×", Outcome::Written { ours, theirs, limit: None }));
    }
    Ok(rows)
}

/// An empty folder of this name.
fn emptied(folder: &Path) -> Result<(), String> {
    let fail = |e: std::io::Error| format!("{}: {e}", folder.display());
    if folder.exists() {
        std::fs::remove_dir_all(folder).map_err(fail)?;
    }
    std::fs::create_dir(folder).map_err(fail)
}
